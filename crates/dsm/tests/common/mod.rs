//! Nodes as processes: a test starts its own program once for each node, with the name of what the node does.
#![allow(dead_code, reason = "not every test needs all of it")]

pub(crate) mod holds;

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rdmux_dsm::sync::Failure;
use rdmux_dsm::{Cluster, Error, FaultMode, Region, Session};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;

/// Set to what a node does.
const PART: &str = "RDMUX_DSM_TEST_PART";

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) const MODES: [FaultMode; 3] = [FaultMode::Thread, FaultMode::Inline, FaultMode::Mprotect];

/// Name and work of the nodes of a test.
pub(crate) type Part = (&'static str, fn(&Session));

/// Runs the part of this process, if it is a node: called by the test `node`, which does nothing else.
pub(crate) fn run_as_node(parts: &[Part]) {
    let Some(name) = part() else { return };
    rdmux_soft::register();
    let (_, part) = parts.iter().find(|(part, _)| *part == name).expect("a part");
    let cluster = Cluster::of_environment().unwrap();
    part(&Session::join(cluster, LONG).unwrap());
}

/// Returns what this process does, if it is a node.
pub(crate) fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// A node that runs. Dropping it kills the process.
pub(crate) struct Node {
    child: Child,
    output: NamedTempFile,
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
    let clusters = clusters(nodes, lease);
    let start = |cluster: &Cluster| Node::start(command(&[], part, cluster, mode));
    clusters.iter().map(start).collect()
}

/// Describes a cluster on this host, to each of its nodes.
pub(crate) fn clusters(nodes: u32, lease: Duration) -> Vec<Cluster> {
    rdmux_soft::register();
    let mut clusters = Cluster::on_this_host(address(), nodes).unwrap();
    clusters.iter_mut().for_each(|cluster| cluster.lease = lease);
    clusters
}

/// Returns the command that runs a node, behind the words of another command that runs it.
pub(crate) fn command(before: &[&str], part: &str, cluster: &Cluster, mode: FaultMode) -> Command {
    let program = std::env::current_exe().unwrap();
    let words = [before, &[program.to_str().unwrap()]].concat();
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .args(["--exact", "node", "--nocapture"])
        .envs(cluster.environment())
        .env(FaultMode::VARIABLE, mode.to_string())
        .env(PART, part);
    command
}

/// Starts nodes, waits for them, and checks that all succeed. Returns what each has printed.
pub(crate) fn run(part: &str, nodes: u32, mode: FaultMode) -> Vec<String> {
    run_with(part, nodes, mode, &[])
}

/// Does that with more variables in the environment.
pub(crate) fn run_with(part: &str, nodes: u32, mode: FaultMode, environment: &[(&str, &str)]) -> Vec<String> {
    // A busy host does not decide the outcome.
    let clusters = clusters(nodes, LONG);
    let start = |cluster: &Cluster| {
        let mut command = command(&[], part, cluster, mode);
        command.envs(environment.iter().copied());
        Node::start(command)
    };
    succeed(clusters.iter().map(start).collect())
}

/// Waits until all nodes have succeeded. Returns what each has printed. If one has failed, another one may be the reason: the panic has the texts of all.
pub(crate) fn succeed(nodes: Vec<Node>) -> Vec<String> {
    let mut texts = Vec::new();
    let mut nodes = nodes.into_iter();
    while let Some(node) = nodes.next() {
        let (status, text) = node.wait();
        texts.push(text);
        if status != 0 {
            let number = texts.len() - 1;
            texts.extend(nodes.as_slice().iter().map(Node::printed));
            panic!(
                "node {number} has ended with {status}; all nodes: {}",
                texts.join("\n")
            );
        }
    }
    texts
}

/// Calls a function in threads of these numbers at the same time. If one panics, the process ends after the message: the others may wait for that
/// thread for ever.
pub(crate) fn in_threads(numbers: Range<u16>, work: impl Fn(u16) + Sync) {
    let run = &|number| {
        if catch_unwind(AssertUnwindSafe(|| work(number))).is_err() {
            std::process::exit(101);
        }
    };
    std::thread::scope(|scope| {
        for number in numbers {
            scope.spawn(move || run(number));
        }
    });
}

/// Waits until each of some nodes has printed a text.
pub(crate) fn wait_for<'a>(nodes: impl IntoIterator<Item = &'a mut Node>, text: &str) {
    wait_until(nodes, text, |printed| printed.contains(text));
}

/// Waits until a function holds for what each of some nodes has printed. `what` names it to a reader of the test's output.
pub(crate) fn wait_until<'a>(
    nodes: impl IntoIterator<Item = &'a mut Node>,
    what: &str,
    is_met: impl Fn(&str) -> bool,
) {
    for node in nodes {
        until(|| {
            let printed = node.printed();
            is_met(&printed)
                .then_some(())
                .ok_or_else(|| format!("no {what:?}: {printed}"))
        });
    }
}

/// Waits until a look at a condition succeeds. An error is the state that is there instead.
pub(crate) fn until(mut look: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + LONG;
    while let Err(state) = look() {
        assert!(Instant::now() < deadline, "{state}");
        // A look at the condition again and again: neither a file that grows nor a thread that ends is reported.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the number of rounds that a node has told.
pub(crate) fn rounds(node: &mut Node) -> usize {
    let text = node.printed();
    assert!(!text.contains("panicked"), "{text}");
    text.matches("@ round").count()
}

/// Waits until nodes have gone on for some rounds.
pub(crate) fn go_on(nodes: &mut [Node]) {
    let before: Vec<usize> = nodes.iter_mut().map(rounds).collect();
    for (node, before) in nodes.iter_mut().zip(before) {
        until(|| match rounds(node) >= before + 2 {
            true => Ok(()),
            false => Err(node.printed()),
        });
    }
}

/// Returns the node that an error names.
pub(crate) fn named(error: &Error) -> u32 {
    match error {
        Error::Gone { node, .. } | Error::Lost { node, .. } | Error::Unreleased { node } => *node,
        Error::Call(Failure::Gone(node)) => node.number(),
        other => panic!("{other}"),
    }
}

/// The first node takes what the others put into a queue of one place, the first word of a region: so many items each.
pub(crate) fn queue(session: &Session, region: &Region<'_>, items: u64) {
    const EMPTY: u64 = 0;
    let (lock, is_full, is_free) = (1, 2, 3);
    let place = region.array::<u64>(0, 1);
    let mut thread = session.thread(0).unwrap();
    if session.node() == 0 {
        let mut sum = 0;
        for _ in 0..items * u64::from(session.nodes() - 1) {
            let mut guard = thread.lock(lock).unwrap();
            while place.get(0) == EMPTY {
                guard.wait(is_full).unwrap();
            }
            sum += place.get(0);
            place.set(0, EMPTY);
            drop(guard);
            thread.signal(is_free).unwrap();
        }
        assert_eq!(sum, u64::from(session.nodes() - 1) * (1..=items).sum::<u64>());
    } else {
        for item in 1..=items {
            let mut guard = thread.lock(lock).unwrap();
            while place.get(0) != EMPTY {
                guard.wait(is_free).unwrap();
            }
            place.set(0, item);
            drop(guard);
            thread.signal(is_full).unwrap();
        }
    }
    let all = NonZeroU32::new(session.nodes()).unwrap();
    thread.barrier(0, all).unwrap();
}

/// Stays until the test ends.
pub(crate) fn stay() -> ! {
    loop {
        std::thread::park();
    }
}

impl Node {
    /// Starts a command that becomes a node.
    pub(crate) fn start(mut command: Command) -> Node {
        let output = NamedTempFile::new().unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(output.as_file().try_clone().unwrap())
            .stderr(output.as_file().try_clone().unwrap())
            .spawn()
            .unwrap();
        Node { child, output }
    }

    /// Returns the number of its process.
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
    pub(crate) fn printed(&self) -> String {
        let mut text = String::new();
        // The node writes at the position of the file that it shares with this process.
        let mut output = self.output.reopen().unwrap();
        output.read_to_string(&mut text).unwrap();
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

/// Returns the number of an environment variable, or a default.
pub(crate) fn number(variable: &str, otherwise: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(otherwise, |value| value.parse().expect("a number"))
}
