//! Two users of one host: the other user learns no name, path, payload, key or queue pair of anything that the owner runs and offers, by
//! any command or by the metrics that both may read. Only root can be two users.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::is_alone;
use skip::skip;
use tempfile::TempDir;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);
/// Part of each name, path and message of the owner.
const SECRET: &str = "sEcReT";
const OWNER: u32 = 65_534;
const OTHER: u32 = 65_533;

/// A user with a folder that belongs to them alone.
struct User {
    uid: u32,
    home: TempDir,
}

impl User {
    fn new(uid: u32) -> User {
        let home = tempfile::Builder::new()
            .prefix(SECRET)
            .tempdir_in("/tmp")
            .unwrap();
        chown(home.path(), Some(uid), Some(uid)).unwrap();
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o700)).unwrap();
        User { uid, home }
    }

    fn rdmux(&self, args: &[&str]) -> Command {
        let uid = self.uid.to_string();
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", &uid, "--regid", &uid, "--clear-groups", RDMUX])
            .args(args);
        for name in ["HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "TMPDIR"] {
            command.env(name, self.home.path());
        }
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.rdmux(args).output().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Returns whether this user may run the binary; says so when not.
    fn may_run_rdmux(&self) -> bool {
        let may = self
            .rdmux(&["--version"])
            .output()
            .is_ok_and(|output| output.status.success());
        if !may {
            skip(format!("another user may not run {RDMUX}"));
        }
        may
    }
}

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the first line of standard error with this beginning, without the beginning.
fn said(child: &mut Child, beginning: &'static str) -> String {
    let stderr = child.stderr.take().unwrap();
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let _ = tx.send(line);
        }
    });
    loop {
        let line = rx.recv_timeout(LONG).unwrap();
        if let Some(rest) = line.strip_prefix(beginning) {
            return rest.to_owned();
        }
    }
}

fn scrape(at: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("rdmux_push_connections "), "{answer}");
    answer
}

/// Returns the owner's entries of a folder that are not the owner's alone, as another user could read them.
fn readable(folder: &Path, owner: u32) -> Vec<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(meta) = entry.metadata() else { continue };
        if meta.uid() == owner && !meta.is_symlink() && meta.mode() & 0o077 != 0 {
            found.push(entry.path());
        }
    }
    found
}

#[test]
fn users__learn_nothing_of_each_other() {
    if !is_alone("users__learn_nothing_of_each_other", |why| skip(why)) {
        return;
    }
    let in_common = || -> Vec<PathBuf> {
        let folders = ["/tmp", "/dev/shm"].iter();
        folders
            .flat_map(|folder| readable(Path::new(folder), OWNER))
            .collect()
    };
    // Other programs of these users may have left files there.
    let before = in_common();
    let (owner, other) = (User::new(OWNER), User::new(OTHER));
    if !owner.may_run_rdmux() || !other.may_run_rdmux() {
        return;
    }
    // The owner serves a file and a log, and has a writer of the log that stays connected.
    let file = owner.path(&format!("{SECRET}-file"));
    let region = format!("{},size=64K,name={SECRET}-region", file.display());
    let memory = format!("{SECRET}-log,size=256K");
    let serve = [
        "serve",
        "--listen",
        "127.0.40.1",
        "--file",
        &region,
        "--mem",
        &memory,
        "--metrics",
        "127.0.0.1:0",
    ];
    let mut serving = Running(owner.rdmux(&serve).spawn().unwrap());
    let at = said(&mut serving.0, "rdmux: metrics at http://");
    let at = at.strip_suffix("/metrics").unwrap();
    let url = |name: &str| format!("rdmux://127.0.40.1/{SECRET}-{name}");
    let payload = owner.path("payload");
    fs::write(&payload, format!("{SECRET} payload")).unwrap();
    chown(&payload, Some(OWNER), Some(OWNER)).unwrap();
    let mut out = BufReader::new(serving.0.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("listening on") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0);
    }
    let pushed = owner.run(&[
        "push",
        payload.to_str().unwrap(),
        &url("region"),
        "--from",
        "127.0.40.2",
    ]);
    assert!(
        pushed.status.success(),
        "{}",
        String::from_utf8_lossy(&pushed.stderr)
    );
    let log = url("log");
    let append = ["log", "append", &log, "--from", "127.0.40.3"];
    let mut writing = Running(owner.rdmux(&append).stdin(Stdio::piped()).spawn().unwrap());
    let mut input = writing.0.stdin.take().unwrap();
    writeln!(input, "{SECRET} record").unwrap();
    let mut acknowledged = String::new();
    BufReader::new(writing.0.stdout.take().unwrap())
        .read_line(&mut acknowledged)
        .unwrap();
    assert_eq!(acknowledged.trim(), "1");

    // The owner sees its queue pair, so there is something to hide.
    let own = owner.run(&["res", "show", "qp", "--json"]);
    let own: serde_json::Value = serde_json::from_slice(&own.stdout).unwrap();
    let mine = |qp: &&serde_json::Value| qp["peer"] == "127.0.40.3";
    let qpn = own.as_array().unwrap().iter().find(mine).unwrap()["lqpn"]
        .as_u64()
        .unwrap()
        .to_string();
    let device = own.as_array().unwrap().iter().find(mine).unwrap();
    let device = format!("127.0.40.1/{}", device["port"]);

    // The other user runs every command that shows something, and those that reach a region.
    let into = other.path("into");
    let into = into.to_str().unwrap();
    let commands: [&[&str]; 19] = [
        &["res", "show"],
        &["res", "show", "--json"],
        &["res", "show", "qp"],
        &["res", "show", "qp", "--json"],
        &["res", "show", "mr", "--json"],
        &["dev", "show", "--json"],
        &["link", "show"],
        &["stat", "show", "--json"],
        &["trace", "dump", "--json"],
        &["doctor"],
        &["doctor", "--json"],
        &["capture", "-w", into, "--seconds", "1", "--device", &device],
        &["pull", "rdmux://127.0.40.1/x", into],
        &["pull", "rdmux://127.0.40.1/x", into, "--from", "127.0.40.9"],
        &[
            "push",
            "/etc/hostname",
            "rdmux://127.0.40.1/x",
            "--from",
            "127.0.40.9",
        ],
        &["log", "status", "rdmux://127.0.40.1/x", "--from", "127.0.40.9"],
        &["log", "read", "rdmux://127.0.40.1/x"],
        &["perf", "push-read", "rdmux://127.0.40.1/x", "-n", "1"],
        &[
            "perf",
            "write-lat",
            "127.0.40.1",
            "-n",
            "1",
            "--bind",
            "127.0.40.9",
        ],
    ];
    let own_home = other.home.path().to_str().unwrap();
    let hidden = |what: &str, text: &str| {
        let text = text.replace(own_home, "HOME");
        for secret in [SECRET, &qpn, "127.0.40.2", "127.0.40.3/"] {
            assert!(
                !text.contains(secret) || secret == "127.0.40.3/" && text.contains("cannot show"),
                "{what} shows {secret}: {text}"
            );
        }
    };
    for args in commands {
        let output = other.run(args);
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .concat();
        hidden(&args.join(" "), &text);
        if !matches!(args[0], "res" | "dev" | "link" | "stat" | "trace" | "doctor") {
            assert!(!output.status.success(), "{args:?}: {text}");
        }
    }
    let captured = fs::read(other.path("into")).unwrap_or_default();
    assert!(captured.is_empty(), "a refused capture holds something");
    // Everybody who reaches the metrics may read them, and they hold only figures.
    hidden("metrics", &scrape(at));
    // Everybody may see the names of sockets and the command lines of threads as well.
    hidden("/proc/net/unix", &fs::read_to_string("/proc/net/unix").unwrap());
    // Nothing that others could read was left where everybody may look.
    let mut left = in_common();
    left.retain(|path| !before.contains(path));
    assert!(left.is_empty(), "{left:?}");
    assert!(
        readable(owner.home.path(), OWNER)
            .iter()
            .all(|path| path.ends_with(format!("{SECRET}-file"))
                || path.ends_with("payload")
                || path.is_dir())
    );

    // The owner's programs were not disturbed.
    writeln!(input, "{SECRET} another record").unwrap();
    drop(input);
    let deadline = Instant::now() + LONG;
    while writing.0.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert!(writing.0.wait().unwrap().success());
}
