//! `rdmux perf storage`: a server, its clients, and what both report.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const LONG: Duration = Duration::from_secs(60);

fn rdmux(args: &[&str], shared_memory: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command
        .args(args)
        .stdin(Stdio::null())
        .env("RDMUX_SHM", shared_memory);
    command
}

/// A server that clients can connect to; it is killed when the value is dropped.
struct Server {
    child: Child,
    address: String,
    shared_memory: &'static str,
    said: Value,
    out: BufReader<ChildStdout>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(last: u8, shared_memory: &'static str, more: &[&str]) -> Server {
        let address = format!("127.0.5.{last}");
        let mut child = rdmux(&["perf", "storage", "--json", "--bind", &address], shared_memory)
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let said = serde_json::from_str(&line).unwrap_or_else(|why| {
            let mut errors = String::new();
            let _ = child.stderr.as_mut().unwrap().read_to_string(&mut errors);
            panic!("{why}: {line}{errors}")
        });
        Server {
            child,
            address,
            shared_memory,
            said,
            out,
        }
    }

    fn client(&self, more: &[&str]) -> Command {
        let mut command = rdmux(&["perf", "storage", &self.address, "--json"], self.shared_memory);
        command.args(more);
        command
    }

    /// Returns what a client reports.
    fn measured(&self, more: &[&str]) -> Value {
        let output = self.client(more).output().unwrap();
        assert!(output.status.success(), "{more:?}: {}", errors(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Checks what holds of the figures of every run.
fn check(found: &Value, ios: u64) {
    assert_eq!(found["ios"], ios, "{found:#}");
    let moved = [&found["reads"], &found["writes"]].map(|n| n.as_u64().unwrap());
    assert_eq!(moved[0] + moved[1], ios);
    match found["rw"].as_str().unwrap() {
        "randread" => assert_eq!(moved[1], 0),
        "randwrite" => assert_eq!(moved[0], 0),
        _ => assert!(moved[0] > 0 && moved[1] > 0, "{moved:?}"),
    }
    let latency = &found["latency_us"];
    let names = ["min", "p50", "p99", "p99.9", "p99.99", "max"];
    let latencies = names.map(|name| number(&latency[name]));
    assert!(latencies[0] > 0.0 && latencies.is_sorted(), "{latency:#}");
    assert!(number(&latency["mean"]) >= latencies[0]);
    for name in ["iops", "mib_per_s", "runtime_s", "client_cpu_us", "server_cpu_us"] {
        assert!(number(&found[name]) > 0.0, "{name}: {found:#}");
    }
    let rates = &found["server_per_s"];
    assert!(number(&rates["completions"]) > 0.0, "{rates:#}");
    assert!(number(&rates["reactor_wakeups"]) >= 0.0 && number(&rates["other_wakeups"]) >= 0.0);
}

/// Runs reads, writes and both, and has every block checked.
fn runs_verified(last: u8, shared_memory: &'static str, carrier: &str) {
    let server = Server::start(
        last,
        shared_memory,
        &[
            "--drives",
            "3",
            "--latency",
            "50us",
            "--drive-depth",
            "2",
            "--reactors",
            "2",
        ],
    );
    for rw in ["randread", "randwrite", "randrw", "rw"] {
        let args = [
            "--ios",
            "300",
            "--rw",
            rw,
            "--verify",
            "--connections",
            "3",
            "--iodepth",
            "8",
            "--threads",
            "2",
        ];
        let found = server.measured(&args);
        check(&found, 900);
        assert_eq!(found["carrier"], carrier);
        assert_eq!(found["verified"], true);
        assert_eq!(found["server"], server.said["server"]);
    }
    let found = server.measured(&[
        "--ios",
        "20",
        "--rw",
        "randrw",
        "--bs",
        "64k",
        "--verify",
        "--iodepth",
        "1",
    ]);
    check(&found, 20);
    assert_eq!(found["bs"], 65536);
    // No command is done before its drive has finished it.
    assert!(number(&found["latency_us"]["min"]) >= 50.0, "{found:#}");
}

#[test]
fn storage__verified_over_shared_memory() {
    runs_verified(1, "on", "shared memory");
}

#[test]
fn storage__verified_over_udp() {
    runs_verified(2, "off", "UDP");
}

#[test]
fn storage__drives_without_latency() {
    let server = Server::start(
        3,
        "on",
        &["--latency", "0", "--drives", "1", "--drive-size", "1M"],
    );
    let found = server.measured(&["--ios", "500", "--rw", "randrw", "--verify", "--iodepth", "128"]);
    check(&found, 500);
    let drives = &found["server"];
    assert_eq!(drives["drives"], 1);
    assert_eq!(drives["drive_bytes"], 1 << 20);
    assert_eq!(number(&drives["drive_latency_us"]), 0.0);
}

#[test]
fn storage__moderation_is_the_servers_option_and_else_the_environments() {
    let server = Server::start(4, "on", &["--moderation", "4,16us"]);
    let found = server.measured(&["--ios", "200", "--verify"]);
    check(&found, 200);
    assert_eq!(found["server"]["moderation"], "4,16us");
    drop(server);
    for policy in ["dim", "rate", "off"] {
        let server = Server::start(4, "off", &["--moderation", policy]);
        check(&server.measured(&["--ios", "200", "--rw", "randwrite"]), 200);
        assert_eq!(server.said["server"]["moderation"], policy);
    }
}

#[test]
fn storage__moderation_is_what_the_device_has_now() {
    let server = Server::start(10, "on", &["--moderation", "dim"]);
    let set = ["dev", "set", &server.address, "moderation", "4,16us"];
    let output = rdmux(&set, "on").output().unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    let found = server.measured(&["--ios", "200"]);
    assert_eq!(found["server"]["moderation"], "4,16us");
}

#[test]
fn storage__runs_for_a_time() {
    let server = Server::start(5, "on", &[]);
    let found = server.measured(&["--runtime", "1s"]);
    assert!(number(&found["runtime_s"]) >= 1.0);
    assert!(found["ios"].as_u64().unwrap() > 0);
}

/// Kills a client in the middle of its run, and checks that another is served then.
fn kills_a_client(last: u8, shared_memory: &'static str) {
    let server = Server::start(last, shared_memory, &[]);
    let own = format!("127.0.5.{}", last + 100);
    let args = ["--runtime", "600", "--connections", "2", "--bind", &own];
    let mut doomed = server.client(&args).stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + LONG;
    let connected = || {
        let output = rdmux(&["res", "show", "qp", "--json"], shared_memory)
            .output()
            .unwrap();
        let qps: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let own = qps
            .iter()
            .filter(|qp| qp["ifname"] == own.as_str() && qp["state"] == "RTS");
        own.count() == 2
    };
    while !connected() {
        assert!(doomed.try_wait().unwrap().is_none(), "the client has ended");
        assert!(Instant::now() < deadline, "the client does not connect");
    }
    // One more runs all the while.
    let other = server
        .client(&["--ios", "3000", "--rw", "randrw", "--iodepth", "4", "--verify"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    doomed.kill().unwrap();
    doomed.wait().unwrap();
    let output = other.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    check(&serde_json::from_slice(&output.stdout).unwrap(), 3000);
    check(&server.measured(&["--ios", "100", "--verify"]), 100);
}

#[test]
fn storage__a_killed_client_disturbs_no_other_over_shared_memory() {
    kills_a_client(6, "on");
}

#[test]
fn storage__a_killed_client_disturbs_no_other_over_udp() {
    kills_a_client(7, "off");
}

#[test]
fn storage__server_ends_by_a_signal() {
    let mut server = Server::start(8, "on", &["--reactors", "2"]);
    server.measured(&["--ios", "10"]);
    let pid = server.child.id().to_string();
    let killed = Command::new("kill").args(["-INT", &pid]).status().unwrap();
    assert!(killed.success());
    assert!(server.child.wait().unwrap().success());
    let mut rest = String::new();
    server.out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "one line alone");
}

#[test]
fn storage__reactors_run_on_the_given_cpus() {
    let allowed = |status: &str| {
        let status = std::fs::read_to_string(status).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.unwrap().trim().to_owned()
    };
    let of_test = allowed("/proc/self/status");
    let cpu = of_test.split([',', '-']).next().unwrap();
    let server = Server::start(11, "on", &["--reactors", "2", "--reactor-cpus", cpu]);
    server.measured(&["--ios", "10"]);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap();
    let mut reactors = 0;
    for task in tasks.map(|task| task.unwrap().path()) {
        let name = std::fs::read_to_string(task.join("comm")).unwrap();
        let is_reactor = name.starts_with("storage-");
        let expected = if is_reactor { cpu } else { &of_test };
        assert_eq!(allowed(task.join("status").to_str().unwrap()), expected, "{name}");
        reactors += usize::from(is_reactor);
    }
    assert_eq!(reactors, 2);

    for (cpus, why) in [
        ("60000", "may not run on CPU 60000: give --reactor-cpus others"),
        ("0,0", "names 2 CPUs: give as many --reactors"),
        ("0-", "give numbers of CPUs, such as 0,1 or 0-3"),
        ("", "give numbers of CPUs"),
        ("3-1", "give numbers of CPUs"),
    ] {
        let mut wrong = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        wrong.args(["perf", "storage", "--reactor-cpus", cpus]);
        let output = wrong.output().unwrap();
        let said = errors(&output);
        assert!(!output.status.success() && said.contains(why), "{cpus:?}: {said}");
    }
    let mut other = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    let output = other
        .args(["perf", "write-lat", "--moderation", "rate"])
        .output()
        .unwrap();
    let said = errors(&output);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        said.contains("--moderation is an option of `rdmux perf storage`"),
        "{said}"
    );
}

#[test]
fn storage__errors_are_one_line() {
    let server = Server::start(9, "on", &["--drive-size", "64K", "--drives", "1"]);
    let wrong: [(&[&str], i32, &str); 7] = [
        (
            &["--bs", "128k"],
            1,
            "use a smaller --bs or start the server with a larger --drive-size",
        ),
        (&["--iodepth", "129"], 1, "at most 128 commands in flight"),
        (
            &["--verify", "--connections", "20"],
            1,
            "use fewer --connections or a larger --drive-size",
        ),
        (
            &["--bs", "1000"],
            2,
            "--bs 1000: give a multiple of 512 bytes up to 1M",
        ),
        (&["--latency", "1us"], 2, "--latency is an option of the server"),
        (&["--events"], 2, "storage does not support --events"),
        (&["--port", "18599"], 1, "start `rdmux perf storage` there first"),
    ];
    for (args, code, why) in wrong {
        let output = server.client(args).output().unwrap();
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
        assert!(output.stdout.is_empty());
        if code == 1 {
            assert_eq!(said.lines().count(), 1, "{said}");
        }
    }
    for (args, why) in [
        (&["--verify"][..], "--verify is an option of the client"),
        (&["--moderation", "much"], "use off, dim, rate, or COUNT,PERIOD"),
        (&["--latency", "20"], "give a time up to 10s with its unit"),
        (&["--queues", "none"], "invalid value 'none'"),
    ] {
        let output = rdmux(&["perf", "storage"], "on").args(args).output().unwrap();
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
    let taken = rdmux(&["perf", "storage", "--bind", &server.address], "on")
        .output()
        .unwrap();
    assert_eq!(taken.status.code(), Some(1));
    assert_eq!(errors(&taken).lines().count(), 1, "{}", errors(&taken));
    assert!(
        errors(&taken).contains("cannot serve at 127.0.5.9:18515"),
        "{}",
        errors(&taken)
    );
}
