//! Nodes as processes: a test starts its own program once for each node, with the name of what the node does.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::fs::File;
use std::io::{Read, Seek};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use rdmux_dsm::{Cluster, FaultMode, Session};
use rustix::process::{Pid, Signal, kill_process};

/// Set to what a node does.
const PART: &str = "RDMUX_DSM_TEST_PART";

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) const MODES: [FaultMode; 3] = [FaultMode::Thread, FaultMode::Inline, FaultMode::Mprotect];

/// Name and work of the nodes of a test.
pub(crate) type Part = (&'static str, fn(&Session));

/// Runs the part of this process, if it is a node: called by the test `node`, which does nothing else.
pub(crate) fn run_as_node(parts: &[Part]) {
    let Ok(name) = std::env::var(PART) else { return };
    rdmux_soft::register();
    let (_, part) = parts.iter().find(|(part, _)| *part == name).expect("a part");
    let cluster = Cluster::of_environment().unwrap();
    part(&Session::join(cluster, LONG).unwrap());
}

/// A node that runs. Dropping it kills the process.
pub(crate) struct Node {
    child: Child,
    output: File,
}

/// Returns an address of the loopback interface for one cluster: the processes that share an address are limited.
fn address() -> IpAddr {
    static CLUSTERS: AtomicU8 = AtomicU8::new(0);
    let cluster = CLUSTERS.fetch_add(1, Ordering::Relaxed);
    let pid = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | cluster & 0x3f, pid[2], pid[3]).into()
}

/// Starts the nodes of a cluster on this host.
pub(crate) fn start(part: &str, nodes: u32, mode: FaultMode, lease: Duration) -> Vec<Node> {
    rdmux_soft::register();
    let clusters = Cluster::on_this_host(address(), nodes).unwrap();
    let start = |mut cluster: Cluster| {
        cluster.lease = lease;
        let output = tempfile::tempfile().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "node", "--nocapture"])
            .envs(cluster.environment())
            .env(FaultMode::VARIABLE, mode.to_string())
            .env(PART, part)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output.try_clone().unwrap())
            .spawn()
            .unwrap();
        Node { child, output }
    };
    clusters.into_iter().map(start).collect()
}

/// Starts nodes, waits for them, and checks that all succeed. Returns what each has printed.
pub(crate) fn run(part: &str, nodes: u32, mode: FaultMode) -> Vec<String> {
    // A busy host does not decide the outcome.
    let nodes = start(part, nodes, mode, LONG);
    nodes.into_iter().map(Node::succeed).collect()
}

impl Node {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end. Returns its exit status, or the negative number of the signal that has ended it, and what it has printed.
    pub(crate) fn wait(mut self) -> (i32, String) {
        let status = self.child.wait().unwrap();
        let code = status.code().or(status.signal().map(|signal| -signal));
        (code.unwrap(), self.printed())
    }

    /// Returns what it has printed so far.
    pub(crate) fn printed(&mut self) -> String {
        let mut text = String::new();
        self.output.rewind().unwrap();
        self.output.read_to_string(&mut text).unwrap();
        text
    }

    /// Waits until it has succeeded. Returns what it has printed.
    pub(crate) fn succeed(self) -> String {
        let (status, text) = self.wait();
        assert_eq!(status, 0, "{text}");
        text
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
