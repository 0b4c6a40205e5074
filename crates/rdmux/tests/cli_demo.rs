//! `rdmux demo fair`, by its processes. (cli_push has `rdmux demo push`, beside what it uses.)
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);

/// A demo, with a folder for temporary files; killed when the value is dropped.
struct Demo {
    process: Child,
    folder: TempDir,
}

impl Demo {
    fn start(args: &[&str]) -> Demo {
        let folder = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_rdmux"))
            .args(["demo", "fair"])
            .args(args)
            .env("TMPDIR", folder.path())
            .env_remove("RDMUX_PROVIDER")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Demo { process, folder }
    }

    /// Returns whether its own folder is there.
    fn has_folder(&self) -> bool {
        let name = format!("rdmux-demo-{}", self.process.id());
        let parents = [self.folder.path(), Path::new("/var/tmp"), Path::new("/tmp")];
        parents.iter().any(|parent| parent.join(&name).exists())
    }

    fn children(&self) -> Vec<OwnedFd> {
        let path = format!("/proc/{0}/task/{0}/children", self.process.id());
        let text = fs::read_to_string(path).unwrap();
        let pids = text
            .split_whitespace()
            .map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap());
        pids.map(|pid| pidfd_open(pid, PidfdFlags::empty()).unwrap())
            .collect()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits until a process has ended.
fn assert_ends(process: &OwnedFd) {
    let timeout = LONG.try_into().unwrap();
    let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)).unwrap();
    assert!(ended > 0, "a process of the demo does not end");
}

#[test]
fn fair__reports_both_and_leaves_nothing() {
    let mut demo = Demo::start(&["--json", "--seconds", "1"]);
    let mut text = String::new();
    let mut out = BufReader::new(demo.process.stdout.take().unwrap());
    out.read_line(&mut text).unwrap();
    let status = demo.process.wait().unwrap();
    let mut errors = String::new();
    let mut said = demo.process.stderr.take().unwrap();
    said.read_to_string(&mut errors).unwrap();
    assert!(status.success(), "{errors}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["node_rate_bps"], 950_000_000);
    assert_eq!(report["heartbeat"]["class"], 7);
    for sharing in ["off", "on"] {
        let figures = &report[sharing];
        assert!(figures["beats"].as_u64() > Some(0), "{report}");
        assert!(figures["bulk_gbits"].as_f64() > Some(0.0), "{report}");
        assert!(
            figures["p50_us"].as_f64() <= figures["p99_us"].as_f64(),
            "{report}"
        );
        assert!(
            figures["p99_us"].as_f64() <= figures["max_us"].as_f64(),
            "{report}"
        );
    }
    // Without a node each beat waits behind 3 MB at 1 Gbit/s; with one it waits for two pieces.
    assert!(report["p50_ratio"].as_f64() > Some(1.0), "{report}");
    assert!(!demo.has_folder());
}

#[test]
fn fair__interrupted_leaves_nothing() {
    for phase in ["off", "on"] {
        let seconds = if phase == "off" { "600" } else { "1" };
        let mut demo = Demo::start(&["--seconds", seconds, "--connections", "1"]);
        let mut lines = BufReader::new(demo.process.stdout.take().unwrap()).lines();
        while !lines.next().expect("a line").unwrap().starts_with(phase) {}
        assert!(demo.has_folder());
        let children = demo.children();
        // The two programs and their peer, and a node.
        assert_eq!(children.len(), if phase == "off" { 3 } else { 4 });
        kill_process(Pid::from_child(&demo.process), Signal::INT).unwrap();
        assert_eq!(demo.process.wait().unwrap().code(), Some(130), "{phase}");
        assert!(!demo.has_folder());
        children.iter().for_each(assert_ends);
    }
}

#[test]
fn fair__wrong_rate() {
    let mut demo = Demo::start(&["--rate", "fast"]);
    assert_eq!(demo.process.wait().unwrap().code(), Some(2));
    let mut line = String::new();
    let mut errors = BufReader::new(demo.process.stderr.take().unwrap());
    errors.read_line(&mut line).unwrap();
    assert!(line.contains("give a rate of 100Mbit to 400Gbit"), "{line}");
}
