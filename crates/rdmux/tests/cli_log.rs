//! `rdmux log` with real servers: processes that are killed, stopped and started again, and writers that meet. Each test has
//! addresses of its own on the loopback interface, so that they run side by side.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);

/// Three servers with a region each, and the key of all.
struct Place {
    folder: TempDir,
    net: u8,
    servers: Vec<Option<Child>>,
    memory: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        for server in 0..self.servers.len() {
            self.kill(server);
        }
    }
}

impl Place {
    fn new(net: u8, memory: bool) -> Place {
        let mut place = Place {
            folder: tempfile::Builder::new().prefix("rdmux-log-").tempdir().unwrap(),
            net,
            servers: (0..3).map(|_| None).collect(),
            memory,
        };
        for server in 0..3 {
            place.start(server);
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn rdmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_CONFIG_HOME", self.folder.path().join("config"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn targets(&self) -> Vec<String> {
        (1..=3)
            .map(|host| format!("rdmux://127.0.{}.{host}/log", self.net))
            .collect()
    }

    fn start(&mut self, server: usize) {
        let address = format!("127.0.{}.{}", self.net, server + 1);
        let file = format!(
            "{},size=256K,name=log",
            self.path(&format!("log{server}")).display()
        );
        let what = if self.memory {
            ["--mem", "log,size=256K"]
        } else {
            ["--file", &file]
        };
        let mut args = vec![
            "serve",
            "--quiet",
            "--json",
            "--listen",
            &address,
            "--keepalive",
            "1",
        ];
        args.extend(what);
        let mut child = self.rdmux(&args).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.starts_with('{'), "serve said {line:?}");
        self.servers[server] = Some(child);
    }

    fn kill(&mut self, server: usize) {
        if let Some(mut child) = self.servers[server].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, server: usize, signal: Signal) {
        let child = self.servers[server].as_ref().unwrap();
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    fn log(&self, command: &str, args: &[&str]) -> std::process::Output {
        let targets = self.targets();
        let mut all = vec!["log", command];
        all.extend(targets.iter().map(String::as_str));
        all.extend(args);
        self.rdmux(&all).stdin(Stdio::null()).output().unwrap()
    }

    /// Appends the input up to its end; returns the exit status, stdout and stderr.
    fn append(&self, input: &str) -> (Option<i32>, String, String) {
        let mut writer = Writer::spawn(self, Stdio::piped(), Stdio::piped());
        // The writer may end before it has read everything.
        let _ = writer.input.as_mut().unwrap().write_all(input.as_bytes());
        drop(writer.input.take());
        writer.end()
    }

    /// Returns the records that are known to be acknowledged.
    fn records(&self) -> Vec<String> {
        let output = self.log("read", &[]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        text.lines().map(Into::into).collect()
    }
}

/// An `rdmux log append` that is fed line by line.
struct Writer {
    child: Child,
    input: Option<ChildStdin>,
    acknowledged: mpsc::Receiver<u64>,
    sent: Vec<String>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Writer {
    fn start(place: &Place) -> Writer {
        Writer::spawn(place, Stdio::piped(), Stdio::inherit())
    }

    fn spawn(place: &Place, input: Stdio, errors: Stdio) -> Writer {
        let targets = place.targets();
        let mut args = vec!["log", "append"];
        args.extend(targets.iter().map(String::as_str));
        let mut child = (place.rdmux(&args).stdin(input).stderr(errors)).spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tx, acknowledged) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = tx.send(line.parse().unwrap());
            }
        });
        Writer {
            child,
            input,
            acknowledged,
            sent: Vec::new(),
        }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
        self.sent.push(line.into());
    }

    /// Appends a line and waits until it is acknowledged; returns its number.
    fn append(&mut self, line: &str) -> u64 {
        self.send(line);
        self.acknowledged
            .recv_timeout(LONG)
            .unwrap_or_else(|_| panic!("{line} is not acknowledged"))
    }

    /// Waits until it ends; returns the exit status, the numbers on stdout not taken yet, and stderr.
    fn end(mut self) -> (Option<i32>, String, String) {
        let mut errors = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut errors).unwrap();
        }
        let status = self.child.wait().unwrap();
        let told = (self.acknowledged.iter()).map(|record| format!("{record}\n"));
        (status.code(), told.collect(), errors)
    }

    fn finish(mut self) -> bool {
        drop(self.input.take());
        self.child.wait().unwrap().success()
    }
}

#[test]
fn append__survives_each_server_killed_stopped_and_started_again() {
    let mut place = Place::new(81, false);
    let mut writer = Writer::start(&place);
    for round in 0..3 {
        writer.append(&format!("before {round}"));
        place.kill(round);
        writer.append(&format!("one is dead {round}"));
        place.start(round);
        writer.append(&format!("it is back {round}"));
        let next = (round + 1) % 3;
        until_in_step(&place);
        place.signal(next, Signal::STOP);
        let last = writer.append(&format!("another is stopped {round}"));
        assert_eq!(last, writer.sent.len() as u64);
        place.signal(next, Signal::CONT);
        until_in_step(&place);
    }
    let sent = writer.sent.clone();
    assert!(writer.finish());
    assert_eq!(place.records(), sent);
}

/// Waits until all replicas are in step: the writer brings them there by itself.
fn until_in_step(place: &Place) {
    let deadline = Instant::now() + LONG;
    loop {
        let output = place.log("status", &["--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let in_step = |replica: &serde_json::Value| replica["state"] == "in step";
        if status["replicas"]
            .as_array()
            .is_some_and(|replicas| replicas.iter().all(in_step))
        {
            return;
        }
        assert!(Instant::now() < deadline, "{status}");
        // Other processes do not report their progress, so poll.
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn append__a_new_writer_ends_the_one_before_wherever_that_was_stopped() {
    let place = Place::new(82, false);
    let mut first = Writer::start(&place);
    first.append("first");
    kill_process(Pid::from_child(&first.child), Signal::STOP).unwrap();
    // The line waits in the pipe until the writer goes on, and must never be acknowledged.
    first.send("too late");
    let mut second = Writer::start(&place);
    assert_eq!(second.append("second"), 2);
    kill_process(Pid::from_child(&first.child), Signal::CONT).unwrap();
    assert_eq!(second.append("third"), 3);
    assert!(!first.child.wait().unwrap().success());
    assert!(first.acknowledged.recv_timeout(LONG).is_err());
    assert!(second.finish());
    assert_eq!(place.records(), ["first", "second", "third"]);
}

#[test]
fn append__memory_that_lost_all_is_filled_again() {
    let mut place = Place::new(83, true);
    let mut writer = Writer::start(&place);
    for server in 0..3 {
        writer.append(&format!("before {server}"));
        place.kill(server);
        writer.append(&format!("after {server}"));
        place.start(server);
        until_in_step(&place);
    }
    let sent = writer.sent.clone();
    assert!(writer.finish());
    assert_eq!(place.records(), sent);
}

#[test]
fn append__no_majority_is_no_acknowledgement() {
    let mut place = Place::new(84, false);
    let mut writer = Writer::start(&place);
    writer.append("kept");
    place.kill(0);
    place.kill(2);
    writer.send("nobody knows");
    assert!(writer.acknowledged.recv_timeout(Duration::from_secs(3)).is_err());
    let output = place.log("read", &[]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("only 1 of 3 regions could be read, no majority"),
        "{text}"
    );
    place.start(0);
    assert_eq!(writer.acknowledged.recv_timeout(LONG), Ok(2));
    assert!(writer.finish());
    assert_eq!(place.records(), ["kept", "nobody knows"]);
}

#[test]
fn append__no_majority_says_who_does_not_answer() {
    let mut place = Place::new(95, false);
    let (code, ..) = place.append("kept\n");
    assert_eq!(code, Some(0));
    place.kill(1);
    place.kill(2);
    let output = place.log("append", &["--patience", "2"]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let [live, dead, dead_too] = &place.targets()[..] else {
        panic!("three")
    };
    let said = |target: &str| {
        let (host, region) = target.rsplit_once('/').unwrap();
        let begin = text
            .find(&format!("{host}:7174/{region}: "))
            .unwrap_or_else(|| panic!("{target}: {text}"));
        text[begin..].split("; ").next().unwrap().to_owned()
    };
    assert!(
        said(live).ends_with("connected, waiting for the others"),
        "{text}"
    );
    for target in [dead, dead_too] {
        assert!(said(target).contains("no answer"), "{text}");
    }
}

#[test]
fn append__from_an_address_that_no_host_has() {
    let place = Place::new(97, false);
    // This address is not going to appear: the patience meant for servers is in vain here.
    let output = place.log("append", &["--from", "192.0.2.1", "--patience", "86400"]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("192.0.2.1 is no address of this host"), "{text}");
}

#[test]
fn append__whatever_ends_it_what_is_under_way_is_acknowledged_and_read() {
    let place = Place::new(86, false);
    let (code, told, errors) = place.append(&format!("a\nb\n{}\nnever\n", "x".repeat(200_000)));
    assert_eq!((code, &*told), (Some(1), "1\n2\n"), "{errors}");
    assert!(
        errors.contains("records up to 2 are acknowledged: line 3: a record of 200000 bytes is too long"),
        "{errors}"
    );
    assert_eq!(place.records(), ["a", "b"]);

    let mut writer = Writer::spawn(&place, Stdio::piped(), Stdio::piped());
    assert_eq!(writer.append("c"), 3);
    kill_process(Pid::from_child(&writer.child), Signal::INT).unwrap();
    let (code, _, errors) = writer.end();
    assert_eq!(code, Some(1), "{errors}");
    assert!(
        errors.contains("records up to 3 are acknowledged: interrupted after line 1"),
        "{errors}"
    );
    assert_eq!(place.records(), ["a", "b", "c"]);

    let (mut ours, mut its) = UnixStream::pair().unwrap();
    // A socket closed with unread bytes fails at its other end.
    its.write_all(b"unread").unwrap();
    let writer = Writer::spawn(&place, OwnedFd::from(its).into(), Stdio::piped());
    ours.write_all(b"d\n").unwrap();
    assert_eq!(writer.acknowledged.recv_timeout(LONG), Ok(4));
    drop(ours);
    let (code, _, errors) = writer.end();
    assert_eq!(code, Some(1), "{errors}");
    assert!(
        errors.contains("records up to 4 are acknowledged: standard input"),
        "{errors}"
    );
    assert_eq!(place.records(), ["a", "b", "c", "d"]);

    let line = "y".repeat(60_000);
    let (code, told, errors) = place.append(&format!("{line}\n").repeat(6));
    assert_eq!((code, &*told), (Some(1), "5\n6\n7\n8\n"), "{errors}");
    assert!(
        errors.contains("records up to 8 are acknowledged: line 5: the log is full"),
        "{errors}"
    );
    assert_eq!(place.records()[4..], [&*line; 4]);
}

#[test]
fn append__servers_that_refuse_for_good_are_not_waited_for() {
    let place = Place::new(87, false);
    let fail = |args: &[&str]| {
        let mut all = vec!["log", "append", "--patience", "50"];
        all.extend(args);
        let output = place.rdmux(&all).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let [a, b, c] = [1, 2, 3].map(|host| format!("rdmux://127.0.87.{host}/log"));
    let (key, other) = (place.path("key"), "7".repeat(64));
    std::fs::write(&key, other).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let errors = fail(&[&a, &b, &c, "--key", key.to_str().unwrap()]);
    assert!(
        errors.contains("no majority of the 3 replicas is possible: rdmux://127.0.87.")
            && errors.contains("has another key"),
        "{errors}"
    );
    let [b, c] = [b, c].map(|target| target + "s");
    let errors = fail(&[&a, &b, &c]);
    assert!(
        errors.contains("is possible: rdmux://127.0.87.2:7174/logs") && errors.contains("no region 'logs'"),
        "{errors}"
    );
}

#[test]
fn trim__drops_what_is_below_and_numbers_go_on() {
    let place = Place::new(85, false);
    let mut writer = Writer::start(&place);
    for line in ["a", "b", "c"] {
        writer.append(line);
    }
    assert!(writer.finish());
    let output = place.log("trim", &["--below", "3"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "records 3 to 3 remain\n");
    let mut writer = Writer::start(&place);
    assert_eq!(writer.append("d"), 4);
    assert!(writer.finish());
    let output = place.log("trim", &["--below", "6"]);
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("cannot drop records below 6: the last is 4; 5 drops all"),
        "{errors}"
    );
    assert_eq!(place.records(), ["c", "d"]);
    let output = place.log("trim", &["--below", "5"]);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "no record remains; the next is 5\n"
    );
}

#[test]
fn log__given_more_or_fewer_regions_than_it_has_says_so() {
    let place = Place::new(88, false);
    assert_eq!(place.append("a\n").0, Some(0));
    let run = |command: &str, hosts: std::ops::RangeInclusive<u8>| {
        let mut args = vec!["log".to_owned(), command.into()];
        args.extend(hosts.map(|host| format!("rdmux://127.0.88.{host}/log")));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = place.rdmux(&args).stdin(Stdio::null()).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), errors)
    };
    let has = |command, hosts, code, words: &str| {
        let (status, errors) = run(command, hosts);
        assert_eq!(status, Some(code), "{errors}");
        assert!(errors.contains(words), "{errors}");
    };
    has(
        "append",
        1..=4,
        1,
        ":7174/log: its log has 3 regions but 4 were given: 1 too many",
    );
    has(
        "append",
        1..=2,
        1,
        ":7174/log: its log has 3 regions but 2 were given: 1 is missing",
    );
    has(
        "status",
        1..=2,
        0,
        "the log has 3 regions but 2 were given: 1 is missing",
    );
    has("read", 1..=1, 1, "only 1 of 3 regions could be read, no majority");
    assert_eq!(place.records(), ["a"]);
}
