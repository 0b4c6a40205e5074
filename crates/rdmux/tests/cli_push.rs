//! `rdmux serve`, `push` and `pull` as a user runs them: processes, exit codes, output. Each test has an address of its own on the loopback
//! interface, so that they run side by side.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rdmux_push::{Access, Client, Key, MapRequest, Name, Options};
use skip::skip;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);

/// A folder, and the key that all commands in it use.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        Place {
            folder: tempfile::Builder::new().prefix("rdmux-cli-").tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.arg(name)
    }

    fn rdmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_CONFIG_HOME", self.folder.path().join("config"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.rdmux(args).output().unwrap()
    }

    /// Runs a command that must succeed; returns its stdout.
    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {out}{err}");
        out
    }

    /// Runs a command that must fail with one line on stderr; returns that line.
    fn fails(&self, args: &[&str], code: i32) -> String {
        let output = self.run(args);
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {out}{err}");
        if code == 1 {
            assert!(
                err.starts_with("rdmux: ") && err.lines().count() == 1,
                "{args:?}: {err}"
            );
        }
        err
    }

    fn key(&self) -> Key {
        Key::load(&self.path("config/rdmux/key")).unwrap()
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// A process, killed when it is dropped.
struct Process(Child);

impl Process {
    fn wait_with_output(&mut self) -> Output {
        let mut stderr = Vec::new();
        self.0.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        Output {
            status: self.0.wait().unwrap(),
            stdout: Vec::new(),
            stderr,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that listens.
struct Serve {
    process: Process,
    head: serde_json::Value,
    address: String,
    log: mpsc::Receiver<(Instant, String)>,
}

impl Serve {
    fn start(place: &Place, address: &str, args: &[&str]) -> Serve {
        let mut all = vec!["serve", "--json", "--listen", address];
        all.extend(args);
        let mut child = place.rdmux(&all).spawn().unwrap();
        let (tx, log) = mpsc::channel();
        let stderr = child.stderr.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = tx.send((Instant::now(), line));
            }
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let process = Process(child);
        let Ok(head) = serde_json::from_str::<serde_json::Value>(&line) else {
            panic!("serve said {line:?}, {:?}", log.recv_timeout(LONG));
        };
        Serve {
            process,
            address: head["listen"][0].as_str().unwrap().to_owned(),
            head,
            log,
        }
    }

    fn url(&self, region: &str) -> String {
        format!("rdmux://{}/{region}", self.address)
    }

    fn socket(&self) -> SocketAddr {
        self.address.parse().unwrap()
    }

    /// Returns the next line of the log with this text, and the time at which it came.
    fn logged(&self, text: &str) -> (Instant, String) {
        let deadline = Instant::now() + LONG;
        let mut others = Vec::new();
        loop {
            match self
                .log
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok((at, line)) if line.contains(text) => return (at, line),
                Ok((_, line)) => others.push(line),
                Err(_) => panic!("serve did not say '{text}', but {others:#?}"),
            }
        }
    }

    fn pid(&self) -> u32 {
        self.process.0.id()
    }

    fn client(&self, place: &Place) -> Client {
        let options = Options {
            from: Some(self.socket().ip()),
            ..Options::default()
        };
        rdmux_soft::register();
        Client::connect(self.socket(), &place.key(), &options).unwrap()
    }

    /// Ends the server by a signal; it must end cleanly.
    fn end(mut self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process.0);
        rustix::process::kill_process(pid, signal).unwrap();
        let status = self.process.0.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{status:?}");
    }
}

/// A push that reports each acknowledged flush.
struct Pushing {
    process: Process,
    acks: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Pushing {
    fn start(place: &Place, file: &str, url: &str) -> Pushing {
        Pushing::start_with(place, file, url, &[])
    }

    /// Starts a push as a client on another host would: the carrier of its packets does not report its death.
    fn start_by_udp(place: &Place, file: &str, url: &str, more: &[&str]) -> Pushing {
        let mut command = place.rdmux(&Pushing::args(file, url, more));
        command.env("RDMUX_SHM", "off");
        Pushing::of(command)
    }

    fn start_with(place: &Place, file: &str, url: &str, more: &[&str]) -> Pushing {
        Pushing::of(place.rdmux(&Pushing::args(file, url, more)))
    }

    fn args<'a>(file: &'a str, url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let mut args = vec![
            "push",
            file,
            url,
            "-q",
            "--chunk",
            "64K",
            "--flush-every",
            "256K",
            "--ack-log",
            "/dev/stdout",
        ];
        args.extend(more);
        args
    }

    fn of(mut command: Command) -> Pushing {
        let mut child = command.spawn().unwrap();
        let acks = BufReader::new(child.stdout.take().unwrap()).lines();
        Pushing {
            process: Process(child),
            acks,
        }
    }

    /// Waits for the next acknowledged flush.
    fn ack(&mut self) -> Option<u64> {
        let line = self.acks.next()?.unwrap();
        Some(line.strip_prefix("ACK ").unwrap().parse().unwrap())
    }

    /// Kills it; returns the position acknowledged last.
    fn kill(&mut self, after: u64) -> u64 {
        let mut last = 0;
        while last < after {
            last = self.ack().expect("an acknowledgement before the end");
        }
        self.process.0.kill().unwrap();
        while let Some(more) = self.ack() {
            last = more;
        }
        assert_eq!(self.process.0.wait().unwrap().signal(), Some(9));
        last
    }
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

fn file_spec(place: &Place, name: &str, rest: &str) -> String {
    format!("{}{rest}", place.arg(name))
}

#[test]
fn push_and_pull__round_trip_of_a_file() {
    let place = Place::new();
    let bytes = pattern(5_000_001, 1);
    let source = place.write("source", &bytes);
    let spec = file_spec(&place, "data.img", ",size=8M");
    let serve = Serve::start(&place, "127.0.10.1", &["--file", &spec]);
    let region = &serve.head["regions"][0];
    assert_eq!(
        (region["name"].as_str(), region["bytes"].as_u64()),
        (Some("data.img"), Some(8 << 20))
    );
    let out = place.ok(&["push", &source, &(serve.url("data.img") + "@1M")]);
    assert!(
        out.contains("pushed 5000001 bytes") && out.contains("durable"),
        "{out}"
    );
    let served = fs::read(place.path("data.img")).unwrap();
    assert!(
        served[1 << 20..][..bytes.len()] == bytes,
        "the served file differs"
    );
    let back = place.arg("back");
    let url = serve.url("data.img") + "@1M";
    let out = place.ok(&["pull", &url, &back, "--bytes", "5000001", "--chunk", "100000"]);
    assert!(out.contains("pulled 5000001 bytes"), "{out}");
    assert!(fs::read(&back).unwrap() == bytes, "what came back differs");
    assert!(!place.path("back.part").exists());
    place.ok(&["pull", &serve.url("data.img"), &back]);
    assert!(fs::read(&back).unwrap() == served, "the whole region differs");
    serve.end(rustix::process::Signal::INT);
}

#[test]
fn push_and_pull__memory_and_json() {
    let place = Place::new();
    let source = place.write("source", &pattern(100_000, 2));
    let serve = Serve::start(&place, "127.0.10.2:7200", &["--mem", "m,size=100000"]);
    let out = place.ok(&["push", &source, &serve.url("m"), "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (report["bytes"].as_u64(), report["durable"].as_bool()),
        (Some(100_000), Some(false))
    );
    assert_eq!(report["crc64"].as_str().unwrap().len(), 16);
    let pulled = place.ok(&["pull", &serve.url("m"), &place.arg("back"), "--json"]);
    let pulled: serde_json::Value = serde_json::from_str(&pulled).unwrap();
    assert_eq!(pulled["crc64"], report["crc64"]);
    assert_eq!(place.ok(&["push", &source, &serve.url("m"), "-q"]), "");
    serve.end(rustix::process::Signal::TERM);
}

#[test]
fn push__over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        return skip("this host has no IPv6");
    }
    let place = Place::new();
    let source = place.write("source", &pattern(300_000, 3));
    let serve = Serve::start(&place, "[::1]:7982", &["--mem", "m,size=1M"]);
    place.ok(&["push", &source, &serve.url("m")]);
}

#[test]
fn serve__listens_on_several_addresses() {
    let place = Place::new();
    let source = place.write("source", &pattern(1000, 3));
    let serve = Serve::start(
        &place,
        "127.0.10.3",
        &["--listen", "127.0.10.4:7201", "--mem", "m,size=1M"],
    );
    place.ok(&["push", &source, "rdmux://127.0.10.3/m"]);
    place.ok(&["push", &source, "rdmux://127.0.10.4:7201/m"]);
    drop(serve);
}

#[test]
fn serve__prints_an_aligned_table() {
    let place = Place::new();
    let mut child = place
        .rdmux(&[
            "serve",
            "--listen",
            "127.0.10.5",
            "--mem",
            "first,size=64K",
            "--mem",
            "b,size=1M",
        ])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let process = Process(child);
    let table: Vec<String> = (0..4).map(|_| lines.next().unwrap().unwrap()).collect();
    assert_eq!(
        table,
        [
            "region    bytes  where                   survives  flush    durable by",
            "first     65536  memory of this process  none      visible  -",
            "b       1048576  memory of this process  none      visible  -",
            "listening on rdmux://127.0.10.5:7174; end with Ctrl-C",
        ]
    );
    drop(process);
}

#[test]
fn serve__tells_what_size_did() {
    let place = Place::new();
    for (rest, sizing) in [
        (",size=4K", "created".into()),
        (",size=8K", "grown".into()),
        (",size=4K", "kept".into()),
        ("", serde_json::Value::Null),
    ] {
        let spec = file_spec(&place, "d", rest);
        let serve = Serve::start(&place, "127.0.10.28", &["--file", &spec]);
        assert_eq!(serve.head["regions"][0]["sizing"], sizing, "{rest}");
    }
}

#[test]
fn serve__declared_persistent_memory_is_mapped() {
    let place = Place::new();
    let bytes = pattern(3_000_001, 3);
    let source = place.write("source", &bytes);
    // A file in memory, which a loss of power would erase, stands for memory that this host does not have.
    let path = format!("/dev/shm/rdmux-serve-{}", std::process::id());
    let spec = format!("{path},size=4M,name=pm,domain=adr");
    let serve = Serve::start(&place, "127.0.10.24", &["--file", &spec]);
    let region = &serve.head["regions"][0];
    assert_eq!(region["domain"], "ADR");
    assert_eq!(region["mapped"], true);
    assert_eq!(
        region["durable_by"],
        serde_json::json!(["flush", "software flush", "read after write"])
    );
    let out = place.ok(&["push", &source, &serve.url("pm")]);
    assert!(out.contains("durable: persistent memory"), "{out}");
    let served = fs::read(&path);
    // Reading the file took it out of the mapping; bytes written after that are there as well.
    let out = place.ok(&["push", &source, &(serve.url("pm") + "@1M")]);
    assert!(out.contains("durable: persistent memory"), "{out}");
    let served_then = fs::read(&path);
    serve.end(rustix::process::Signal::INT);

    fs::remove_file(&path).unwrap();
    assert!(served.unwrap()[..bytes.len()] == bytes);
    assert!(served_then.unwrap()[1 << 20..][..bytes.len()] == bytes);
}

#[test]
fn serve__nothing_can_be_declared_of_a_disk() {
    let place = Place::new();
    let spec = file_spec(&place, "disk", ",size=4M,domain=adr");
    if rdmux_push::file_system_of(&place.path("")) == "tmpfs" {
        return skip("the folder for temporary files is on a file system in memory");
    }
    let error = place
        .rdmux(&["serve", "--listen", "127.0.10.25", "--file", &spec])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&error.stderr);
    assert!(!error.status.success() && text.lines().count() == 1, "{text}");
    assert!(text.contains("direct access"), "{text}");
}

#[test]
fn push__killed_client_resumes_at_the_last_acknowledged_flush() {
    let place = Place::new();
    let bytes = pattern(64 << 20, 4);
    let source = place.write("source", &bytes);
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.6", &["--file", &spec]);
    let mut pushing = Pushing::start(&place, &source, &serve.url("d"));
    let acknowledged = pushing.kill(4 << 20);
    assert!(acknowledged < 64 << 20, "it was killed too late to show anything");
    let out = place.ok(&["push", &source, &serve.url("d"), "--resume", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let from = report["resumed_from"].as_u64().unwrap();
    assert!(
        from >= acknowledged && from < 64 << 20,
        "resumed at {from}, acknowledged {acknowledged}"
    );
    assert!(
        fs::read(place.path("d")).unwrap() == bytes,
        "the served file differs"
    );
    // Everything is there: nothing is sent again.
    let out = place.ok(&["push", &source, &serve.url("d"), "--resume"]);
    assert!(out.contains("pushed 0 bytes"), "{out}");
    // Another file of that name and size is another upload.
    fs::write(&source, pattern(64 << 20, 5)).unwrap();
    let out = place.ok(&["push", &source, &serve.url("d"), "--resume"]);
    assert!(
        out.contains("starting at 0") && out.contains("pushed 67108864"),
        "{out}"
    );
}

#[test]
fn push__again_and_killed_resumes_at_the_last_acknowledged_flush() {
    let place = Place::new();
    let bytes = pattern(64 << 20, 12);
    let source = place.write("source", &bytes);
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.22", &["--file", &spec]);
    let url = serve.url("d");
    let out = place.ok(&["push", &source, &url, "--resume"]);
    assert!(
        out.contains("no durable part of an earlier push") && out.contains("starting at 0"),
        "{out}"
    );
    for by_udp in [false, true] {
        let mut pushing = if by_udp {
            Pushing::start_by_udp(&place, &source, &url, &[])
        } else {
            Pushing::start(&place, &source, &url)
        };
        let acknowledged = pushing.kill(4 << 20);
        assert!(acknowledged < 64 << 20, "it was killed too late to show anything");
        let out = place.ok(&["push", &source, &url, "--resume", "--json"]);
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        let from = report["resumed_from"].as_u64().unwrap();
        assert!(
            from >= acknowledged && from < 64 << 20,
            "resumed at {from}, acknowledged {acknowledged}, by UDP {by_udp}"
        );
    }
    assert!(
        fs::read(place.path("d")).unwrap() == bytes,
        "the served file differs"
    );
}

#[test]
fn push__resume_of_what_was_overwritten_there_starts_again() {
    let place = Place::new();
    let bytes = pattern(1 << 20, 6);
    let source = place.write("source", &bytes);
    let spec = file_spec(&place, "d", ",size=1M");
    let serve = Serve::start(&place, "127.0.10.7", &["--file", &spec]);
    place.ok(&["push", &source, &serve.url("d")]);
    fs::OpenOptions::new().write(true).open(place.path("d")).unwrap();
    // This change does not go through rdmux, so the server knows nothing of it.
    let mut there = bytes.clone();
    there[5000] ^= 1;
    std::os::unix::fs::FileExt::write_all_at(
        &fs::OpenOptions::new().write(true).open(place.path("d")).unwrap(),
        &there[5000..5001],
        5000,
    )
    .unwrap();
    let out = place.ok(&["push", &source, &serve.url("d"), "--resume"]);
    assert!(out.contains("differ from this file: starting at 0"), "{out}");
    assert!(fs::read(place.path("d")).unwrap() == bytes);
}

#[test]
fn push__server_killed_says_so_in_one_line() {
    let place = Place::new();
    let source = place.write("source", &pattern(64 << 20, 7));
    let spec = file_spec(&place, "d", ",size=64M");
    let mut serve = Serve::start(&place, "127.0.10.8", &["--file", &spec]);
    let mut pushing = Pushing::start(&place, &source, &serve.url("d"));
    pushing.ack().unwrap();
    serve.process.0.kill().unwrap();
    let mut last = 0;
    while let Some(ack) = pushing.ack() {
        last = ack;
    }
    assert!(last < 64 << 20);
    let output = pushing.process.wait_with_output();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(
        err.contains("lost") && err.contains("bytes are durable there") && err.contains("--resume"),
        "{err}"
    );
}

#[test]
fn push__file_opened_by_another_program_says_how_to_go_on() {
    let place = Place::new();
    let source = place.write("source", &pattern(64 << 20, 13));
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.26", &["--file", &spec]);
    let mut pushing = Pushing::start(&place, &source, &serve.url("d"));
    let mut acknowledged = pushing.ack().unwrap();
    // The open waits until the push has released the file.
    drop(fs::OpenOptions::new().write(true).open(place.path("d")).unwrap());
    while let Some(more) = pushing.ack() {
        acknowledged = more;
    }
    assert!(acknowledged < 64 << 20, "it was opened too late to show anything");
    let output = pushing.process.wait_with_output();
    let (_, err) = texts(&output);
    assert_eq!((output.status.code(), err.lines().count()), (Some(1), 1), "{err}");
    assert!(
        err.contains("a program of the server's host") && err.contains("the same command and --resume"),
        "{err}"
    );
    let out = place.ok(&["push", &source, &serve.url("d"), "--resume", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(report["resumed_from"].as_u64().unwrap() >= acknowledged, "{out}");
}

#[test]
fn push__to_a_file_that_a_pull_replaced_is_refused_until_the_server_starts_again() {
    let place = Place::new();
    let source = place.write("source", &pattern(4096, 14));
    let spec = file_spec(&place, "d", ",size=4K");
    let serve = Serve::start(&place, "127.0.10.27", &["--file", &spec, "--mem", "m,size=4K"]);
    place.ok(&["push", &source, &serve.url("d")]);
    place.ok(&["pull", &serve.url("m"), &place.arg("d")]);
    let err = place.fails(&["push", &source, &serve.url("d")], 1);
    assert!(
        err.contains("/d is not the file") && err.contains("restart"),
        "{err}"
    );
    serve.logged("is refused: region d");
    let (_, end) = serve.logged("ended");
    assert!(end.contains("goodbye"), "{end}");
    serve.end(rustix::process::Signal::TERM);
    let serve = Serve::start(&place, "127.0.10.27", &["--file", &spec]);
    place.ok(&["push", &source, &serve.url("d")]);
    assert_eq!(fs::read(place.path("d")).unwrap(), fs::read(source).unwrap());
}

#[test]
fn push__interrupted_ends_its_connection_and_can_be_resumed() {
    let place = Place::new();
    let source = place.write("source", &pattern(64 << 20, 11));
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.21", &["--file", &spec]);
    let mut pushing = Pushing::start(&place, &source, &serve.url("d"));
    pushing.ack().unwrap();
    let pid = rustix::process::Pid::from_child(&pushing.process.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = pushing.process.wait_with_output();
    let (_, err) = texts(&output);
    assert_eq!((output.status.code(), err.lines().count()), (Some(1), 1), "{err}");
    assert!(err.contains("interrupted") && err.contains("--resume"), "{err}");
    serve.logged("ended: goodbye");
    place.ok(&["push", &source, &serve.url("d"), "--resume"]);
}

#[test]
fn pull__server_killed_keeps_nothing() {
    let place = Place::new();
    let serve_args = ["--mem", "m,size=512M"];
    let mut serve = Serve::start(&place, "127.0.10.9", &serve_args);
    let pull = place
        .rdmux(&["pull", &serve.url("m"), &place.arg("back")])
        .spawn()
        .unwrap();
    let mut pull = Process(pull);
    serve.logged("maps m");
    serve.process.0.kill().unwrap();
    let output = pull.wait_with_output();
    let (_, err) = texts(&output);
    assert_eq!((output.status.code(), err.lines().count()), (Some(1), 1), "{err}");
    assert!(!place.path("back").exists() && !place.path("back.part").exists());
}

#[test]
fn errors__one_line_and_exit_status() {
    let place = Place::new();
    let source = place.write("source", &pattern(10_000, 8));
    let constant = place.write("constant", &pattern(10_000, 9));
    let spec = format!("{constant},ro");
    let serve = Serve::start(&place, "127.0.10.10", &["--mem", "m,size=4K", "--file", &spec]);
    let missing = place.arg("missing");
    let empty = place.write("empty", b"");

    let err = place.fails(&["push", &missing, &serve.url("m")], 1);
    assert!(err.contains("missing: No such file"), "{err}");
    let err = place.fails(&["push", &empty, &serve.url("m")], 1);
    assert!(err.contains("empty"), "{err}");
    let err = place.fails(&["push", &source, &serve.url("m")], 1);
    assert!(
        err.contains("10000 bytes at 0 do not fit region m, which has 4096"),
        "{err}"
    );
    let err = place.fails(&["push", &source, &serve.url("x")], 1);
    assert!(err.contains("no region 'x'; the server has constant, m"), "{err}");
    let err = place.fails(&["push", &source, &serve.url("constant")], 1);
    assert!(err.contains("read-only"), "{err}");
    let err = place.fails(&["pull", &(serve.url("m") + "@5000"), &missing], 1);
    assert!(err.contains("do not fit"), "{err}");
    let err = place.fails(
        &["pull", &serve.url("m"), place.folder.path().to_str().unwrap()],
        1,
    );
    assert!(err.contains("folder"), "{err}");
    let err = place.fails(&["pull", &serve.url("m"), "/proc/nowhere/x"], 1);
    assert!(err.contains("/proc/nowhere"), "{err}");
    let err = place.fails(&["push", &source, "rdmux://127.0.10.10:7999/m"], 1);
    assert!(err.contains("nobody serves on 127.0.10.10:7999"), "{err}");
    let err = place.fails(&["push", &source, "rdmux://127.0.10.11/m"], 1);
    assert!(err.contains("no answer") && err.contains("4791"), "{err}");
    let err = place.fails(&["push", &source, "rdmux://no-such-host.invalid/m"], 1);
    assert!(err.contains("no-such-host.invalid"), "{err}");
    let err = place.fails(&["serve", "--mem", "m,size=4K", "--listen", "127.0.10.10"], 1);
    assert!(
        err.contains("127.0.10.10:7174") && err.contains("--listen"),
        "{err}"
    );
    assert_eq!(err.matches("in use").count(), 1, "{err}");
    let folder = place.folder.path().to_str().unwrap();
    let err = place.fails(&["serve", "--file", folder, "--listen", "127.0.10.12"], 1);
    assert_eq!(err.matches(folder).count(), 1, "{err}");
    let err = place.fails(&["serve", "--file", &missing, "--listen", "127.0.10.12"], 1);
    assert!(err.contains("no such file: create it with ,size=N"), "{err}");
    let err = place.fails(&["serve", "--mem", "m,size=4K", "--listen", "192.0.2.1"], 1);
    assert!(err.contains("192.0.2.1"), "{err}");

    for usage in [
        &["push", source.as_str()][..],
        &["push", &source, "http://h/m"],
        &["push", &source, &serve.url("m"), "--depth", "0"],
        &["push", &source, &serve.url("m"), "--chunk", "x"],
        &["serve"],
        &["serve", "--mem", "m"],
        &["serve", "--mem", "m,size=wrong"],
        &["serve", "--mem", "m,size=4K", "--listen", "0.0.0.0"],
    ] {
        place.fails(usage, 2);
    }
    // The server still serves after all these errors.
    place.ok(&["pull", &serve.url("constant"), &place.arg("back")]);
}

#[test]
fn errors__keys() {
    let place = Place::new();
    let source = place.write("source", &pattern(100, 1));
    let serve = Serve::start(&place, "127.0.10.13", &["--mem", "m,size=4K"]);
    let meta = fs::metadata(place.path("config/rdmux/key")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&meta) & 0o777, 0o600);

    let other = place.write("other", ("5".repeat(64) + "\n").as_bytes());
    let mode = |mode| {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(&other, permissions).unwrap();
    };
    mode(0o600);
    let err = place.fails(&["push", &source, &serve.url("m"), "--key", &other], 1);
    assert!(err.contains("another key") && err.contains("--key"), "{err}");
    serve.logged("during the handshake");
    mode(0o644);
    let err = place.fails(&["push", &source, &serve.url("m"), "--key", &other], 1);
    assert!(err.contains("can be read by others (mode 644)"), "{err}");
    fs::write(&other, "short").unwrap();
    mode(0o600);
    let err = place.fails(&["push", &source, &serve.url("m"), "--key", &other], 1);
    assert!(err.contains("64 hexadecimal digits"), "{err}");
    let err = place.fails(
        &["push", &source, &serve.url("m"), "--key", &place.arg("none")],
        1,
    );
    assert!(err.contains("does not exist"), "{err}");
    place.ok(&[
        "push",
        &source,
        &serve.url("m"),
        "--key",
        &place.arg("config/rdmux/key"),
    ]);
}

#[test]
fn serve__full_disk_is_told_at_the_start() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return skip("/dev/shm cannot be written");
    };
    let stat = rustix::fs::statvfs("/dev/shm").unwrap();
    let place = Place::new();
    let path = folder.path().join("f");
    // More bytes than the file system can have: the server refuses before it takes any.
    let spec = format!("{},size={}", path.display(), (stat.f_blocks + 1) * stat.f_frsize);
    let err = place.fails(&["serve", "--listen", "127.0.10.14", "--file", &spec], 1);
    assert!(
        err.contains("No space left") && err.contains("bytes are free"),
        "{err}"
    );
    assert!(!path.exists(), "a file that could not be made stays away");
}

#[test]
fn serve__file_truncated_by_another_process_ends_that_connection_only() {
    let place = Place::new();
    let spec = file_spec(&place, "d", ",size=1M");
    let serve = Serve::start(&place, "127.0.10.15", &["--file", &spec, "--mem", "m,size=4K"]);
    let mut client = serve.client(&place);
    // A client that shares nothing would have been asked first.
    let request = MapRequest {
        share: Access::WRITE,
        ..MapRequest::new(Access::WRITE)
    };
    let mapping = client.map_as(&Name::new("d").unwrap(), &request).unwrap();
    client.write(&mapping, 0, &[1; 1 << 20]).unwrap();
    // truncate(1) opens without waiting, and so fails where a lease is broken first: use the shell instead.
    let truncate = Command::new("sh")
        .args(["-c", &format!("head -c 4096 /dev/zero > {}", place.arg("d"))])
        .status()
        .unwrap();
    assert!(truncate.success());
    client.write(&mapping, 65536, &[1; 4096]).unwrap_err();
    serve.logged("truncated");
    let source = place.write("source", &pattern(4096, 1));
    place.ok(&["push", &source, &serve.url("m")]);
    serve.end(rustix::process::Signal::TERM);
}

/// Returns how often all threads of a process were woken, and their CPU time: exactly, since ticks are samples, and a busy machine takes
/// them at bad moments.
fn activity(pid: u32) -> (u64, Duration) {
    let (mut woken, mut used) = (0, 0);
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let read = |name| fs::read_to_string(task.as_ref().unwrap().path().join(name)).unwrap();
        let (status, schedstat) = (read("status"), read("schedstat"));
        let slept = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        woken += slept.unwrap().trim().parse::<u64>().unwrap();
        used += schedstat.split(' ').next().unwrap().parse::<u64>().unwrap();
    }
    (woken, Duration::from_nanos(used))
}

#[test]
fn serve__idle_with_100_connections_sleeps() {
    let place = Place::new();
    let serve = Serve::start(&place, "127.0.10.16", &["--mem", "m,size=4K"]);
    rdmux_soft::register();
    let device = rdmux_verbs::Device::open(serve.socket().ip()).unwrap();
    let options = Options {
        device: Some(device),
        ..Options::default()
    };
    let mut clients: Vec<Client> = (0..100)
        .map(|_| Client::connect(serve.socket(), &place.key(), &options).unwrap())
        .collect();
    for client in &mut clients {
        client
            .map(&Name::new("m").unwrap(), Access::READ, 0, 0, 0)
            .unwrap();
    }
    let before = activity(serve.pid());
    // This is the time to measure, in which nothing happens.
    std::thread::sleep(Duration::from_secs(10));
    let (woken, used) = activity(serve.pid());
    let (woken, used) = (woken - before.0, used - before.1);
    println!("woken {woken} times in 10 s, {used:?}");
    // Waking each connection once a second would be 1,000 times. On a busy machine threads also sleep for each other's locks.
    assert!(woken < 400, "woken {woken} times in 10 s");
    // The cost of a wake-up depends on the load of the machine; a server that never sleeps uses far more.
    assert!(used < Duration::from_millis(200), "{used:?} in 10 s");
    for client in &mut clients {
        client.stat(&Name::new("m").unwrap(), 0).unwrap();
    }
}

#[test]
fn serve__dead_client_ends_within_the_keep_alive_time() {
    let place = Place::new();
    let source = place.write("source", &pattern(64 << 20, 10));
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.17", &["--file", &spec, "--keepalive", "2"]);
    let mut living = serve.client(&place);
    // The client has an address of its own: no other process there can disconnect in its place.
    let from = ["--from", "127.0.10.117"];
    let mut pushing = Pushing::start_by_udp(&place, &source, &serve.url("d"), &from);
    pushing.kill(1 << 20);
    let (_, line) = serve.logged("ended");
    assert!(
        line.contains("is dead") && line.contains("its mapping ended too"),
        "{line}"
    );
    living.stat(&Name::new("d").unwrap(), 0).unwrap();
}

#[test]
fn serve__dead_client_ends_at_once_if_its_address_has_others() {
    let place = Place::new();
    let source = place.write("source", &pattern(64 << 20, 10));
    let spec = file_spec(&place, "d", ",size=64M");
    let serve = Serve::start(&place, "127.0.10.23", &["--file", &spec, "--keepalive", "1000"]);
    // A client on the server's address, from which the other client connects too.
    let mut living = serve.client(&place);
    let from = ["--from", "127.0.10.23"];
    let mut pushing = Pushing::start_with(&place, &source, &serve.url("d"), &from);
    pushing.kill(1 << 20);
    let (_, line) = serve.logged("ended");
    assert!(line.contains("disconnected without a goodbye"), "{line}");
    living.stat(&Name::new("d").unwrap(), 0).unwrap();
}

#[test]
fn serve__three_clients_at_a_time_of_which_one_is_killed() {
    let place = Place::new();
    let serve_args: Vec<String> = (0..3)
        .map(|i| file_spec(&place, &format!("d{i}"), ",size=24M"))
        .collect();
    let args: Vec<&str> = serve_args
        .iter()
        .flat_map(|spec| ["--file", spec.as_str()])
        .collect();
    let serve = Serve::start(&place, "127.0.10.18", &args);
    let contents: Vec<Vec<u8>> = (0..3).map(|i| pattern(24 << 20, 20 + i)).collect();
    let sources: Vec<String> = contents
        .iter()
        .enumerate()
        .map(|(i, bytes)| place.write(&format!("s{i}"), bytes))
        .collect();
    let mut pushing: Vec<Pushing> = sources
        .iter()
        .enumerate()
        .map(|(i, source)| Pushing::start(&place, source, &serve.url(&format!("d{i}"))))
        .collect();
    for one in &mut pushing {
        one.ack().unwrap();
    }
    let killed = pushing[1].kill(1);
    assert!(killed < 24 << 20);
    for i in [0, 2] {
        while pushing[i].ack().is_some() {}
        let output = pushing[i].process.wait_with_output();
        assert_eq!(output.status.code(), Some(0), "{}", texts(&output).1);
        assert!(
            fs::read(place.path(&format!("d{i}"))).unwrap() == contents[i],
            "d{i} differs"
        );
    }
    place.ok(&["push", &sources[1], &serve.url("d1"), "--resume"]);
    assert!(fs::read(place.path("d1")).unwrap() == contents[1], "d1 differs");
}

#[test]
fn serve__unsafe_no_flush_says_so() {
    let place = Place::new();
    let spec = file_spec(&place, "d", ",size=1M");
    let serve = Serve::start(&place, "127.0.10.19", &["--file", &spec, "--unsafe-no-flush"]);
    serve.logged("WARNING");
    let source = place.write("source", &pattern(1 << 20, 1));
    place.ok(&["push", &source, &serve.url("d")]);
    let help = place.ok(&["serve", "--help"]);
    assert!(!help.contains("unsafe"), "{help}");
}

#[test]
fn pull__into_what_is_no_file_is_refused_and_leaves_it_alone() {
    let place = Place::new();
    let serve = Serve::start(&place, "127.0.10.21", &["--mem", "m,size=64K"]);
    let fifo = place.path("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let url = serve.url("m");
    let said = place.fails(&["pull", &url, fifo.to_str().unwrap()], 1);
    assert!(said.contains("not a regular file"), "{said}");
    let kind = std::os::unix::fs::FileTypeExt::is_fifo(&fs::symlink_metadata(&fifo).unwrap().file_type());
    assert!(kind, "the FIFO is still one");

    let (real, link) = (place.path("real"), place.path("link"));
    fs::write(&real, b"old").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    place.ok(&["pull", &url, link.to_str().unwrap()]);
    assert!(
        fs::symlink_metadata(&link).unwrap().is_symlink(),
        "a link stays a link"
    );
    assert_eq!(fs::metadata(&real).unwrap().len(), 65_536);
}

#[test]
fn pull__replaces_a_file_at_the_end_only() {
    let place = Place::new();
    let old = place.write("back", b"old");
    let serve = Serve::start(&place, "127.0.10.20", &["--mem", "m,size=4K"]);
    place.fails(&["pull", &serve.url("x"), &old], 1);
    assert_eq!(fs::read(&old).unwrap(), b"old");
    place.ok(&["pull", &serve.url("m"), &old]);
    assert_eq!(fs::read(&old).unwrap(), [0; 4096]);
    let left: Vec<_> = fs::read_dir(Path::new(place.folder.path())).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

/// Counts the folders that demos of this process left.
fn demo_folders(parent: &Path) -> usize {
    let names = fs::read_dir(parent)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with("rdmux-demo-"))
        .count()
}

#[test]
fn demo__push_reports_all_that_it_measured_and_cleans_up() {
    let place = Place::new();
    let source = place.write("source", &pattern(3 << 20, 12));
    let folder = place.folder.path().to_str().unwrap();
    let out = place.ok(&[
        "demo", "push", &source, "--json", "--dir", folder, "--wait", "block",
    ]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["bytes"].as_u64(), Some(3 << 20));
    let (killed, resumed) = (&report["killed_at"], &report["resumed"]["resumed_from"]);
    assert!(
        killed.as_u64().unwrap() >= 3 << 19 && resumed.as_u64() >= killed.as_u64(),
        "{killed} {resumed}"
    );
    assert_eq!(report["resumed"]["crc64"], report["pulled"]["crc64"]);
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 2 * 3 * 2 * 3);
    for cell in cells {
        assert!(cell["gigabytes_per_second"].as_f64().unwrap() > 0.0, "{cell}");
        assert!(cell["p99_us"].as_f64() >= cell["p50_us"].as_f64(), "{cell}");
    }
    assert_eq!(demo_folders(place.folder.path()), 0);
}

#[test]
fn demo__of_a_file_of_one_byte_and_without_a_file() {
    let place = Place::new();
    let empty = place.write("empty", b"");
    let err = place.fails(&["demo", "push", &empty], 1);
    assert!(err.contains("empty"), "{err}");
    let err = place.fails(&["demo", "push", &place.arg("missing")], 1);
    assert!(err.contains("missing: No such file"), "{err}");
    let output = place.run(&["demo", "push", place.folder.path().to_str().unwrap()]);
    let (out, err) = texts(&output);
    assert_eq!((output.status.code(), out.as_str()), (Some(1), ""), "{err}");
    assert!(err.ends_with(": not a regular file\n"), "{err}");
    place.fails(&["demo"], 2);
}

#[test]
fn demo__push_interrupted_leaves_nothing() {
    let place = Place::new();
    let source = place.write("source", &pattern(8 << 20, 13));
    let folder = place.folder.path().to_str().unwrap();
    let mut child = place
        .rdmux(&["demo", "push", &source, "--dir", folder])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut process = Process(child);
    while !lines.next().expect("a line").unwrap().starts_with("measure") {}
    assert_eq!(demo_folders(place.folder.path()), 1);
    let pid = rustix::process::Pid::from_child(&process.0);
    let children =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", process.0.id())).unwrap_or_default();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(process.0.wait().unwrap().code(), Some(130));
    assert_eq!(demo_folders(place.folder.path()), 0);
    for child in children.split_whitespace() {
        // The child was killed; the process that adopted it may not have waited for it yet.
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        let state = stat
            .rsplit_once(") ")
            .map_or('Z', |(_, rest)| rest.chars().next().unwrap_or('Z'));
        assert!(matches!(state, 'Z' | 'X'), "{stat}");
    }
}
