//! `rdmux run` of a build: the place of the links to its libraries, the owners that it trusts, and its handling of exit status and signals.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::AS_NOBODY;
use rustix::process::{Pid, Signal, kill_process};
use skip::skip;
use tempfile::TempDir;

const REDIRECT: &str = "librdmux_sysfs.so";
const BUILT: [&str; 2] = ["libibverbs.so", REDIRECT];
/// The links and their targets.
const LINKS: [(&str, &str); 3] = [
    ("libibverbs.so.1", "libibverbs.so"),
    ("librdmacm.so.1", "libibverbs.so"),
    (REDIRECT, REDIRECT),
];
const NOBODY: u32 = 65534;
/// Makes a folder as a build does, with the program and something in the libraries' place.
fn build() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Another process copies it: a file that this one wrote is busy while a child of another test has its descriptors.
    let copied = Command::new("cp")
        .args([env!("CARGO_BIN_EXE_rdmux"), folder.path().to_str().unwrap()])
        .status();
    assert!(copied.unwrap().success());
    for name in BUILT {
        fs::write(folder.path().join(name), "").unwrap();
    }
    folder
}

/// Makes a folder that belongs to a user alone.
fn runtime_of(user: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    if rustix::process::geteuid().is_root() {
        chown(folder.path(), Some(user), Some(user)).unwrap();
    }
    folder
}

/// Returns the folder from which a program that is run in this way gets its libraries.
fn libraries(runner: &[&str], build: &Path, runtime: &Path) -> Result<PathBuf, String> {
    let program = build.join("rdmux");
    let line: Vec<&str> = runner
        .iter()
        .copied()
        .chain([program.to_str().unwrap()])
        .collect();
    let output = Command::new(line[0])
        .args(&line[1..])
        .args(["run", "--", "sh", "-c", "echo $LD_LIBRARY_PATH"])
        .env("XDG_RUNTIME_DIR", runtime)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

fn leads_to(folder: &Path, build: &Path) {
    for (name, built) in LINKS {
        let library = build.join(built).canonicalize().unwrap();
        assert_eq!(folder.join(name).canonicalize().unwrap(), library, "{name}");
    }
}

#[test]
fn run__links_beside_the_build() {
    let (build, runtime) = (build(), runtime_of(0));
    for _ in 0..2 {
        let found = libraries(&[], build.path(), runtime.path()).unwrap();
        assert_eq!(found, build.path().join("rdmux-run"));
        leads_to(&found, build.path());
    }
}

#[test]
fn run__build_of_root_used_by_another_user() {
    let (build, runtime) = (build(), runtime_of(NOBODY));
    let may = || libraries(&AS_NOBODY, build.path(), runtime.path());
    if !rustix::process::geteuid().is_root() {
        return skip("this user may not be another one");
    }
    for _ in 0..2 {
        let found = may().unwrap();
        assert!(found.starts_with(runtime.path().join("rdmux")), "{found:?}");
        leads_to(&found, build.path());
    }
    // Root's links serve every user.
    libraries(&[], build.path(), runtime.path()).unwrap();
    assert_eq!(may().unwrap(), build.path().join("rdmux-run"));
}

#[test]
fn run__links_of_another_user_are_not_trusted() {
    if !rustix::process::geteuid().is_root() {
        return skip("this user may not be another one");
    }
    let (build, runtime) = (build(), runtime_of(0));
    let links = build.path().join("rdmux-run");
    fs::create_dir(&links).unwrap();
    for (name, _) in LINKS {
        symlink("/tmp/of-somebody-else", links.join(name)).unwrap();
    }
    for (owner, mode) in [(NOBODY, 0o755), (0, 0o777)] {
        chown(&links, Some(owner), None).unwrap();
        fs::set_permissions(&links, fs::Permissions::from_mode(mode)).unwrap();
        let found = libraries(&[], build.path(), runtime.path()).unwrap();
        assert!(found.starts_with(runtime.path()), "{found:?}");
        leads_to(&found, build.path());
    }
    // A runtime folder that others may enter is not trusted either.
    let own = runtime.path().join("rdmux");
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    let why = libraries(&[], build.path(), runtime.path()).unwrap_err();
    assert!(
        why.contains("cannot create a folder for links") && why.lines().count() == 1,
        "{why}"
    );
}

#[test]
fn run__libraries_of_another_user_are_not_loaded() {
    if !rustix::process::geteuid().is_root() {
        return skip("this user may not be another one");
    }
    let (root, runtime) = (build(), runtime_of(0));
    let run = || libraries(&[], root.path(), runtime.path());
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let library = root.path().join(BUILT[0]);
    for path in [root.path(), &library] {
        let before = fs::metadata(path).unwrap().mode();
        mode(path, 0o777);
        let why = run().unwrap_err();
        assert!(
            why.contains(path.to_str().unwrap()) && why.contains("chmod go-w") && why.lines().count() == 1,
            "{why}"
        );
        mode(path, before);
        chown(path, Some(NOBODY), None).unwrap();
        run().unwrap_err();
        chown(path, Some(0), None).unwrap();
    }
    run().unwrap();
    // Libraries that somebody put where they would be installed are not loaded either.
    let bin = root.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::rename(root.path().join("rdmux"), bin.join("rdmux")).unwrap();
    let installed = root.path().join("lib/rdmux");
    fs::create_dir_all(&installed).unwrap();
    for (name, _) in LINKS {
        fs::write(installed.join(name), "").unwrap();
    }
    let run = || libraries(&[], &bin, runtime.path());
    assert_eq!(run().unwrap(), installed.canonicalize().unwrap());
    chown(&installed, Some(NOBODY), None).unwrap();
    run().unwrap_err();
}

#[test]
fn run__name_that_nothing_can_be_preloaded_by() {
    let (build, runtime) = (build(), runtime_of(0));
    let folder = build.path().join("with a space");
    fs::create_dir(&folder).unwrap();
    for name in ["rdmux"].iter().chain(&BUILT) {
        fs::rename(build.path().join(name), folder.join(name)).unwrap();
    }
    let run = |args: &[&str]| {
        let output = Command::new(folder.join("rdmux"))
            .args(["run", "--device", "127.0.0.1"])
            .args(args)
            .args(["--", "sh", "-c", "echo \"preloaded: $LD_PRELOAD\""])
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env_remove("LD_PRELOAD")
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.success(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let (passed, out, said) = run(&[]);
    assert!(passed && out == "preloaded: \n", "{out}{said}");
    assert!(said.contains("will not show the devices"), "{said}");
    assert!(said.contains("space") && said.lines().count() == 1, "{said}");
    let (passed, _, said) = run(&["--sysfs", "preload"]);
    assert!(!passed && said.contains("space"), "{said}");
}

#[test]
fn usage__what_the_program_could_not_use_is_said() {
    for (args, (name, value), expected) in [
        (
            &["--device", "192.0.2.1"][..],
            ("RDMUX_FAULT", ""),
            "192.0.2.1: not an address of this host",
        ),
        (
            &["--capture", "/nonexistent/c"],
            ("RDMUX_FAULT", ""),
            "folder /nonexistent does not exist",
        ),
        (&[], ("RDMUX_FAULT", "loss=2"), "RDMUX_FAULT: 'loss=2'"),
        (&[], ("RDMUX_SHM", "of"), "RDMUX_SHM=of: it takes on or off"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        let output = command
            .arg("run")
            .args(args)
            .args(["--", "true"])
            .env(name, value)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

/// `rdmux run` of a program that needs no devices.
fn run_plainly(build: &Path, command: &[&str]) -> Command {
    let mut run = Command::new(build.join("rdmux"));
    run.args(["run", "--sysfs", "none", "--"]).args(command);
    run
}

#[test]
fn run__exit_status_is_the_programs() {
    let build = build();
    for status in [0, 1, 7, 255] {
        let mut run = run_plainly(build.path(), &["sh", "-c", "exit $0"]);
        let ended = run.arg(status.to_string()).status().unwrap();
        assert_eq!(ended.code(), Some(status));
    }
    // No process in between can turn a signal into a status.
    for signal in [Signal::TERM, Signal::KILL, Signal::PIPE] {
        let mut run = run_plainly(build.path(), &["sh", "-c", "kill -$0 $$"]);
        let ended = run.arg(signal.as_raw().to_string()).status().unwrap();
        assert_eq!(ended.signal(), Some(signal.as_raw()));
    }
}

#[test]
fn run__signals_reach_the_program() {
    let build = build();
    // Each program waits for input, which ends with this test. (Input 0 of a program in the background would be empty.)
    let script = "trap 'kill $!; exit 9' USR1; exec 3<&0; cat <&3 >/dev/null & echo ready; wait";
    for (signal, status, ended_by) in [
        (Signal::USR1, Some(9), None),
        (Signal::KILL, None, Some(Signal::KILL.as_raw())),
    ] {
        // In the second case nothing would be left to end the other program.
        let script = if status.is_some() {
            script
        } else {
            "echo ready; exec cat"
        };
        let mut run = run_plainly(build.path(), &["sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(run.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        kill_process(Pid::from_child(&run), signal).unwrap();
        // `wait` would close the input, and so end the program.
        let input = run.stdin.take();
        let ended = run.wait().unwrap();
        assert_eq!((ended.code(), ended.signal()), (status, ended_by));
        drop(input);
    }
}

#[test]
fn run__an_option_that_it_does_not_have_is_no_program() {
    let build = build();
    let run = |args: &[&str]| {
        let mut run = Command::new(build.path().join("rdmux"));
        run.args(["run", "--sysfs", "none"]).args(args).output().unwrap()
    };
    for (option, next) in [("--devcie", "--device"), ("--json", "Usage")] {
        let output = run(&[option, "--", "true"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(&format!("unexpected argument '{option}'")) && said.contains(next),
            "{said}"
        );
    }
    // A program's options are its own, with -- and without.
    for args in [&["--", "echo", "--device", "-n"][..], &["echo", "--device", "-n"]] {
        assert_eq!(String::from_utf8_lossy(&run(args).stdout), "--device -n\n");
    }
}

#[test]
fn run__program_that_cannot_be_started() {
    let build = build();
    // Another process writes it, as with the program itself.
    let written = Command::new("sh")
        .args([
            "-c",
            "echo '#!/nonexistent/shell' >orphan; cp orphan plain; chmod 755 orphan",
        ])
        .current_dir(build.path())
        .status();
    assert!(written.unwrap().success());
    let [orphan, plain] =
        ["orphan", "plain"].map(|name| build.path().join(name).to_str().unwrap().to_owned());
    for (program, status, why) in [
        ("/nonexistent/program", 127, "program not found"),
        ("no-such-program-here", 127, "program not found"),
        (&orphan, 127, "No such file or directory"),
        (&plain, 126, "Permission denied"),
        (build.path().to_str().unwrap(), 126, "Permission denied"),
    ] {
        let output = run_plainly(build.path(), &[program])
            // A folder in PATH that may not be searched would make it "Permission denied", as with env(1).
            .env("PATH", "/usr/bin:/bin")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(
            said.contains(program) && said.contains(why) && said.lines().count() == 1,
            "{said}"
        );
    }
}
