//! `rdmux top` beside a node with traffic.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};
use std::time::Instant;

use common::nodes::{Host, LONG, Running};
use serde_json::Value;
use skip::skip;

/// A server of tmux, which ends when the value is dropped.
struct Tmux(PathBuf);

impl Drop for Tmux {
    fn drop(&mut self) {
        let mut command = Command::new("tmux");
        let _ = command.arg("-S").arg(&self.0).arg("kill-server").output();
    }
}

fn line(from: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line
}

/// Returns the bytes that the objects of a list have moved in the interval.
fn moved(frame: &Value, list: &str) -> f64 {
    let seconds = frame["interval_ns"].as_f64().unwrap() / 1e9;
    let all = frame[list].as_array().unwrap().iter();
    all.map(|one| one["bytes_per_s"].as_f64().unwrap() * seconds)
        .sum()
}

#[test]
fn top__rates_sum_up_to_what_was_moved() {
    const ADDRESS: &str = "127.0.61.1";
    const BYTES: f64 = 20_000.0 * 65_536.0;
    let host = Host::new();
    let none = host.rdmux(&["top", "--device", ADDRESS]).output().unwrap();
    assert_eq!(none.status.code(), Some(1));
    let why = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(why.contains("there is no node of 127.0.61.1"), "{why}");
    let _node = host.node(ADDRESS);
    let args = ["top", "--json", "--device", ADDRESS, "--interval", "0.05"];
    let mut top = host.start(&args);
    let mut frames = top.lines();
    // It watches from now on.
    let first: Value = serde_json::from_str(&line(&mut frames)).unwrap();
    assert_eq!(moved(&first, "tenants"), 0.0);
    let _server = host.server("write-bw", ADDRESS);
    let ran = host.run_client("write-bw", ADDRESS, ADDRESS, &["-s", "65536", "-n", "20000"]);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let (mut of_tenants, mut has_connection) = (0.0, false);
    let deadline = Instant::now() + LONG;
    while of_tenants < BYTES {
        assert!(Instant::now() < deadline, "{of_tenants} of {BYTES} bytes");
        let frame: Value = serde_json::from_str(&line(&mut frames)).unwrap();
        of_tenants += moved(&frame, "tenants");
        let connections = frame["connections"].as_array().unwrap();
        if let Some(one) = connections.iter().find(|one| one["bytes_per_s"] != 0.0) {
            has_connection = true;
            assert_eq!((&one["route"], &one["peer"]), (&"own".into(), &ADDRESS.into()));
            assert!(one["p99_ns"].as_u64() >= one["p50_ns"].as_u64(), "{one}");
            // Of that of its application, and of its tenant.
            let (of_connections, of_applications) =
                (moved(&frame, "connections"), moved(&frame, "applications"));
            assert!((of_connections - of_applications).abs() < 1.0, "{frame}");
            assert!(of_connections <= moved(&frame, "tenants") + 1.0, "{frame}");
        }
    }
    // Beyond them the test has warmed up, and the ends have told each other what they do.
    assert!(of_tenants < 2.0 * BYTES, "{of_tenants} of {BYTES} bytes");
    assert!(has_connection);
    // It ends by itself, and prints tables where there is no terminal.
    let output = host
        .rdmux(&["top", "-d", "0.05", "-n", "2", "--device", ADDRESS])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text.matches("WHO").count(), 2, "{text}");
    assert_eq!(text.matches("\ndefault").count(), 2, "{text}");
}

#[test]
fn top__ends_with_its_node() {
    const ADDRESS: &str = "127.0.61.2";
    let host = Host::new();
    let node = host.node(ADDRESS);
    let mut top = host.start(&["top", "--json", "--device", ADDRESS, "-d", "0.05"]);
    let mut frames = top.lines();
    assert!(line(&mut frames).starts_with('{'));
    drop(node);
    while !line(&mut frames).is_empty() {}
    let status = top.0.wait().unwrap();
    assert_eq!(status.code(), Some(1));
}

/// `rdmux run --shared` holds the node beside the program, also where the program may be the only application.
#[test]
fn top__program_that_holds_its_node() {
    const ADDRESS: &str = "127.0.61.4";
    let host = Host::new();
    let config = host.runtime.path().join("node.toml");
    let uid = rustix::process::geteuid().as_raw();
    let limits = format!("[tenant.own]\nuid = [{uid}]\nlimits.applications = 1\n");
    std::fs::write(&config, limits).unwrap();
    let mut node = host.start(&["node", "--device", ADDRESS, "--config", config.to_str().unwrap()]);
    assert!(line(&mut node.lines()).contains("ready"));
    let program = [
        env!("CARGO_BIN_EXE_rdmux"),
        "perf",
        "write-lat",
        "--bind",
        ADDRESS,
    ];
    let run = ["run", "--sysfs", "none", "--shared", "--device", ADDRESS, "--"];
    // A build without the libraries for C programs, which this one does not need.
    let build = tempfile::tempdir().unwrap();
    let copied = Command::new("cp")
        .args([program[0].as_ref(), build.path()])
        .status();
    assert!(copied.unwrap().success());
    for name in ["libibverbs.so", "librdmux_sysfs.so"] {
        std::fs::write(build.path().join(name), "").unwrap();
    }
    let start = || {
        let mut command = Command::new(build.path().join("rdmux"));
        command
            .args(run)
            .args(program)
            .env("XDG_RUNTIME_DIR", host.runtime.path());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    };
    let mut server = start();
    let deadline = Instant::now() + LONG;
    while host.applications(ADDRESS).is_empty() {
        assert!(Instant::now() < deadline, "no application");
        assert!(server.0.try_wait().unwrap().is_none(), "the program has ended");
    }
    let frame = host.frame(ADDRESS, "2");
    assert_eq!(frame["applications"].as_array().unwrap().len(), 1, "{frame}");
    assert_ne!(frame["applications"][0]["name"], "", "{frame}");
    let tenants = frame["tenants"].as_array().unwrap();
    let own = tenants.iter().find(|one| one["name"] == "own").unwrap();
    assert_eq!(own["applications"], 1, "{frame}");
    // A second one has no application, and says so.
    let (status, text) = start().end();
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("the tenant own has 1 of at most 1 applications"),
        "{text}"
    );
}

/// In a terminal of tmux.
#[test]
fn top__in_a_terminal() {
    const ADDRESS: &str = "127.0.61.3";
    let host = Host::new();
    let socket = host.runtime.path().join("tmux");
    let _server = Tmux(socket.clone());
    let tmux = |args: &[&str]| {
        let mut command = Command::new("tmux");
        command
            .arg("-S")
            .arg(&socket)
            .args(["-f", "/dev/null"])
            .args(args);
        command.env("TERM", "xterm").stdin(Stdio::null()).output()
    };
    if tmux(&["-V"]).is_err() {
        return skip("tmux is not installed");
    }
    let _node = host.node(ADDRESS);
    let command = format!(
        "XDG_RUNTIME_DIR={} {} top --device {ADDRESS} -d 0.1; echo ended $?; read line",
        host.runtime.path().display(),
        env!("CARGO_BIN_EXE_rdmux"),
    );
    // Not by the user's shell, which may be nologin.
    let size = ["new-session", "-d", "-x", "120", "-y", "24"];
    let started = tmux(&[&size[..], &["/bin/sh", "-c", &command]].concat()).unwrap();
    assert!(started.status.success(), "{started:?}");
    let wait_for = |words: &str| {
        let deadline = Instant::now() + LONG;
        loop {
            let output = tmux(&["capture-pane", "-p"]).unwrap();
            assert!(output.status.success(), "no {words}: {output:?}");
            let shown = String::from_utf8_lossy(&output.stdout).into_owned();
            if shown.contains(words) {
                return shown;
            }
            assert!(Instant::now() < deadline, "no {words}:\n{shown}");
        }
    };
    let shown = wait_for("default");
    assert!(shown.starts_with(&format!("node {ADDRESS} (soft)")), "{shown}");
    assert!(shown.contains("F10Quit"), "{shown}");
    tmux(&["send-keys", "F1"]).unwrap();
    wait_for("this help");
    tmux(&["send-keys", "F1"]).unwrap();
    tmux(&["send-keys", "/"]).unwrap();
    wait_for("/_");
    tmux(&["send-keys", "nothing", "Enter"]).unwrap();
    let shown = wait_for("Filter: nothing");
    assert!(!shown.contains("default"), "{shown}");
    tmux(&["resize-window", "-x", "60", "-y", "10"]).unwrap();
    tmux(&["send-keys", "Escape"]).unwrap();
    wait_for("default");
    tmux(&["send-keys", "q"]).unwrap();
    // The terminal is as it was.
    let shown = wait_for("ended 0");
    assert!(!shown.contains("WHO"), "{shown}");
}
