//! `programs` with scripts in place of rdmux and the tools that it needs.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

#[path = "../../crates/skip.rs"]
mod skip;

/// In place of rdmux: takes one of XRC's files, writes its number, its child's and its arguments to a file, and never ends. The child's
/// sleep stands for a program that does not end by itself: nobody waits for its time.
const NEVER_ENDS: &str = "#!/bin/sh
: >/tmp/xrc_domain
sleep 1000 &
echo $$ $! $* >\"$STARTED/.$$\" && mv \"$STARTED/.$$\" \"$STARTED/$$\"
wait
";
/// In place of rdmux: a server that is ready after its client's 20th try.
const LATE: &str = "#!/bin/sh
tries=${0%/*}/tries
case $* in
*-s*) echo >>\"$tries\"; [ \"$(wc -l <\"$tries\")\" -ge 20 ] || { echo rconnect: Connection refused >&2; exit 1; } ;;
*) until [ \"$(wc -l <\"$tries\")\" -ge 20 ]; do sleep 0.01; done ;;
esac
";
/// In place of rdmux: a client that fails, and a server that waits for it.
const WAITS: &str = "#!/bin/sh
case $* in
*-s*) echo rpoll: Broken pipe >&2; exit 3 ;;
*) exec sleep 1000 ;;
esac
";
const XTASK: &str = env!("CARGO_BIN_EXE_rdmux-xtask");

fn script(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Makes a folder with the programs that `programs` needs, an rdmux, and a folder `tmp`.
fn folder(rdmux: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["ib_write_lat", "ibv_rc_pingpong", "rping"] {
        script(&folder.path().join(name), "#!/bin/sh\n");
    }
    script(&folder.path().join("rdmux"), rdmux);
    fs::create_dir(folder.path().join("tmp")).unwrap();
    folder
}

/// Adds the arguments and the environment with which `programs` uses the folder.
fn with<'a>(command: &'a mut Command, folder: &TempDir, only: &str) -> &'a mut Command {
    let folder = folder.path();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    command
        .args(["programs", "--only", only, "--binary"])
        .arg(folder.join("rdmux"))
        .env("PATH", path)
        .env("TMPDIR", folder.join("tmp"))
}

fn output(folder: &TempDir, only: &str) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = with(&mut Command::new(XTASK), folder, only).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// Waits for so many programs, and returns the words that each has written; or why they were left out.
fn started(run: &mut Child, folder: &Path, count: usize) -> Result<Vec<Vec<String>>, String> {
    let deadline = Instant::now() + Duration::from_secs(180);
    loop {
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let files = files.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
        let said: Vec<String> = files
            .map(|entry| fs::read_to_string(entry.path()).unwrap())
            .collect();
        if said.len() == count {
            let words = said.iter().map(|said| said.split_whitespace());
            return Ok(words.map(|words| words.map(str::to_owned).collect()).collect());
        }
        if let Some(status) = run.try_wait().unwrap() {
            let output = std::io::read_to_string(run.stdout.take().unwrap()).unwrap();
            assert!(
                status.success() && output.contains("left out"),
                "{status}: {output}"
            );
            return Err(output);
        }
        assert!(Instant::now() < deadline, "{count} programs have not started");
        std::thread::yield_now();
    }
}

/// Waits until no process has the number, or a dead one that nobody has reaped.
fn expect_end(process: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) {
        let state = stat.rsplit_once(") ").map_or("", |(_, state)| state);
        if state.starts_with(['Z', 'X']) {
            return;
        }
        assert!(Instant::now() < deadline, "process {process} runs on: {stat}");
        std::thread::yield_now();
    }
}

#[test]
fn programs__interrupted_leave_nothing() {
    let folder = folder(NEVER_ENDS);
    let numbers = folder.path().join("started");
    // Of two signals the first is ignored, because the process was started so.
    let signals: [(&[Signal], i32); 4] = [
        (&[Signal::INT], 130),
        (&[Signal::TERM], 143),
        (&[Signal::HUP], 129),
        (&[Signal::HUP, Signal::TERM], 143),
    ];
    for (signals, status) in signals {
        fs::create_dir(&numbers).unwrap();
        let mut command = match signals {
            [_] => Command::new(XTASK),
            _ => {
                let mut shell = Command::new("sh");
                shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", XTASK]);
                shell
            }
        };
        let mut run = with(&mut command, &folder, "ibv_xsrq")
            .env("STARTED", &numbers)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let server = match started(&mut run, &numbers, 1) {
            Ok(server) => server.concat(),
            Err(why) => {
                skip::skip(why);
                return;
            }
        };
        // The client is started once the server listens at its port, which the test does instead.
        let port = server.iter().skip_while(|word| *word != "-p").nth(1).unwrap();
        let _listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port.parse().unwrap())).unwrap();
        let both = started(&mut run, &numbers, 2).unwrap();

        for signal in signals {
            kill_process(Pid::from_child(&run), *signal).unwrap();
        }
        assert_eq!(run.wait().unwrap().code(), Some(status));
        for program in both {
            let [process, child, ..] = program.as_slice() else {
                panic!("{program:?}");
            };
            expect_end(process);
            expect_end(child);
        }
        assert_eq!(fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0);
        // Who has this lock is the only one who may have the files.
        let lock = File::open("/tmp").unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        assert!(!Path::new("/tmp/xrc_domain").exists());
        fs::remove_dir_all(&numbers).unwrap();
    }
}

#[test]
fn programs__client_tries_until_the_server_listens() {
    let folder = folder(LATE);
    fs::write(folder.path().join("tries"), "").unwrap();
    let (status, stdout, stderr) = output(&folder, "rstream -T b -T v -S 64 ");
    assert_eq!(status, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("(20 tries)"), "{stdout}");
}

#[test]
fn programs__server_does_not_outlive_a_failed_client() {
    let began = Instant::now();
    let (status, stdout, stderr) = output(&folder(WAITS), "rstream -T b -T v -S 64 ");
    assert_eq!(status, Some(1), "{stdout}{stderr}");
    for line in [
        "client: rpoll: Broken pipe",
        "client: exit status: 3",
        "server: not ended within its limit",
    ] {
        assert!(stdout.contains(line), "{stdout}");
    }
    // Far less than the limit of its own.
    assert!(began.elapsed() < Duration::from_secs(90));
}

#[test]
fn programs__error_fails_its_line_alone() {
    let folder = folder("#!/bin/sh\n");
    // Namespaces seem possible, but none can be made.
    let unshare = "#!/bin/sh\ncase $* in *cat) exit 1 ;; esac\n";
    script(&folder.path().join("unshare"), unshare);
    let (status, stdout, stderr) = output(&folder, "two hosts: ");
    assert_eq!(status, Some(1), "{stdout}{stderr}");
    assert_eq!(
        stdout.matches("FAILED").count(),
        3,
        "each line is reported: {stdout}{stderr}"
    );
    assert_eq!(stdout.matches("cannot make a network namespace").count(), 3);
    assert!(stdout.contains("0 passed, 3 failed"), "{stdout}");
}

#[test]
fn programs__word_of_no_line_is_an_error() {
    let (status, stdout, stderr) = output(&folder("#!/bin/sh\n"), "no such program");
    assert_eq!((status, stdout.as_str()), (Some(2), ""));
    assert_eq!(stderr, "xtask: no line has 'no such program'\n");
}

#[test]
fn programs__closed_output_is_an_error() {
    let folder = folder("#!/bin/sh\n");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let run = with(&mut Command::new(XTASK), &folder, "ibv_devices")
        .stdout(writer)
        .output()
        .unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("xtask: Broken pipe"), "{stderr}");
}

#[test]
fn programs__run_where_all_signals_are_ignored() {
    let folder = folder("#!/bin/sh\n");
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP INT TERM; exec \"$0\" \"$@\"", XTASK]);
    let run = with(&mut shell, &folder, "ibv_devices").output().unwrap();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
}
