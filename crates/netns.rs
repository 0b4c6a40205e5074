//! A test that runs in a network namespace of its own. Crates include it by `#[path]`, beside `skip.rs`.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::skip::skip;

/// Tells a test that it is in its namespace.
const INSIDE: &str = "RDMUX_TEST_NAMESPACE";

/// Runs the other test of this program that is named `namespace` in a network namespace, which a shell has prepared. That test returns at once
/// unless [`is_inside`]. Skips the calling test if this user can have no such namespace.
pub(crate) fn run_inside(prepare: &str) {
    let in_namespace = |then: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c"]);
        command
            .arg(format!("{prepare} && exec \"$@\""))
            .arg("sh")
            .args(then);
        command.env(INSIDE, "1");
        command.output().ok()
    };
    if !in_namespace(&["true"]).is_some_and(|tried| tried.status.success()) {
        return skip("this user can have no network namespace with a link");
    }
    let program = std::env::current_exe().unwrap();
    let output = in_namespace(&[program.to_str().unwrap(), "--exact", "namespace", "--nocapture"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// Returns true in the namespace.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Another network namespace, until this is dropped.
#[allow(dead_code, reason = "most tests need one namespace")]
pub(crate) struct Second {
    /// Keeps it.
    process: Child,
    /// Number of that process.
    pid: String,
}

#[allow(dead_code, reason = "most tests need one namespace")]
impl Second {
    /// Makes one, and moves an interface into it, which gets an address with its prefix.
    pub(crate) fn with_link(interface: &str, address: &str) -> Second {
        let process = Command::new("unshare")
            .args(["--net", "sleep", "600"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = process.id().to_string();
        let second = Second { process, pid };
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while namespace(&second.pid) == namespace("self") {
            assert!(Instant::now() < deadline, "no second network namespace");
            // A look at the condition again and again: nothing tells that the process is there.
            std::thread::sleep(Duration::from_millis(1));
        }
        run(&["ip", "link", "set", interface, "netns", &second.pid]);
        for command in [
            &["ip", "addr", "add", address, "dev", interface][..],
            &["ip", "link", "set", interface, "up"],
            &["ip", "link", "set", "lo", "up"],
        ] {
            run(&[&second.before()[..], command].concat());
        }
        second
    }

    /// Returns the words of a command that runs another one there.
    pub(crate) fn before(&self) -> [&str; 4] {
        ["nsenter", "--target", &self.pid, "--net"]
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a command, which must succeed.
#[allow(dead_code, reason = "most tests need one namespace")]
pub(crate) fn run(words: &[&str]) {
    let status = Command::new(words[0]).args(&words[1..]).status();
    assert!(status.unwrap().success(), "{words:?}");
}
