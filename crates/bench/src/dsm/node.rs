//! Page faults and events of the distributed shared memory itself: two nodes, one of which touches pages, or changes a word, whose home is the other.

use std::hint::{black_box, spin_loop};
use std::num::NonZeroU32;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rdmux_dsm::protocol::Homes;
use rdmux_dsm::{BATCH_VARIABLE, Cluster, Consistency, FaultMode, Placement, RegionOptions, Session};
use serde_json::{Value, json};

use super::FAULT_NAMES;
use crate::child::say;
use crate::pair::{ORDINARY, Server, busy, stdout};
use crate::{CPUS, LOOPBACK};

/// First argument of this program as a node.
pub(crate) const COMMAND: &str = "dsm-node";

/// Pages that are touched, in turn.
const PAGES: u64 = 1024;
/// Rounds over all pages. In the first one, which is not measured, the system allocates them.
const ROUNDS: u64 = 6;
/// The same where faults take milliseconds.
const FEW_ROUNDS: u64 = 2;
const PAGE: u64 = 4096;
/// Events that are measured.
const EVENTS: usize = 10_000;
const JOINING: Duration = Duration::from_secs(10);

/// State of the program of the home while the other node touches its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// It waits as the machine's load allows.
    Waits,
    /// It computes, and its service thread is woken for what comes.
    Computes,
    /// It sleeps: it does not poll, and a millisecond passes before each fault.
    Sleeps,
}

/// Conditions of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// Mode in which the fault is answered.
    pub mode: FaultMode,
    pub home: Home,
    /// The nodes have no shared memory: packets go through UDP.
    pub over_udp: bool,
    /// Both nodes handle events in a thread that is woken for them, and change rights page by page, as the talk's baseline does.
    pub is_baseline: bool,
    /// The nodes run without priority: with one, a thread of the same CPU waits for the end of a slice of 100 ms.
    pub is_ordinary: bool,
    /// A busy process, without priority, shares the CPU of the home.
    pub is_beside: bool,
}

/// Conditions of the round trip of an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    /// CPUs of the nodes.
    pub cpus: [usize; 2],
    /// Value of `RDMUX_WAIT` of both, if they are not to wait as the machine's load allows.
    pub wait: Option<&'static str>,
    /// A millisecond passes before each, so that the other node's CPU is idle.
    pub is_idle: bool,
}

/// Kind of an event for [`child`].
const EVENT: &str = "event";
/// Precedes a kind before whose events a millisecond passes.
const IDLE: &str = "idle-";
/// Precedes a kind of which there are few faults.
const FEW: &str = "few-";
/// Precedes a kind whose home computes.
const COMPUTING: &str = "computing-";
/// Time for which a home computes at most.
const COMPUTING_LIMIT: Duration = Duration::from_secs(60);
/// Time for which a home that computes does not look whether it is over.
const COMPUTED: Duration = Duration::from_micros(20);
/// Kind of a release for [`child`].
const RELEASE: &str = "release";
/// Releases that are measured.
const RELEASES: u64 = 51;

/// Measures one kind of fault. Returns the median in microseconds.
pub(super) fn measure(fault: Fault, kind: usize) -> Result<f64> {
    let prefix = match fault.home {
        Home::Waits if fault.is_beside => FEW,
        Home::Waits => "",
        Home::Computes => COMPUTING,
        Home::Sleeps => IDLE,
    };
    let before = if fault.is_ordinary { ORDINARY } else { &[] };
    let _busy = fault.is_beside.then(|| busy(CPUS[1])).transpose()?;
    let kind = format!("{prefix}{}", FAULT_NAMES[kind]);
    run(before, CPUS, &kind, |node, command| {
        let is_woken = fault.is_baseline || (fault.home == Home::Sleeps && node == 1);
        command
            .env(FaultMode::VARIABLE, fault.mode.to_string())
            .envs(is_woken.then_some(("RDMUX_WAIT", "blocked")))
            .envs(fault.is_baseline.then_some((BATCH_VARIABLE, "off")))
            .env("RDMUX_SHM", if fault.over_udp { "off" } else { "on" });
    })
}

/// Measures the round trip of an event. Returns the median in microseconds.
pub(super) fn event(event: Event) -> Result<f64> {
    let prefix = if event.is_idle { IDLE } else { "" };
    run(&[], event.cpus, &format!("{prefix}{EVENT}"), |_, command| {
        command.envs(event.wait.map(|wait| ("RDMUX_WAIT", wait)));
    })
}

/// Measures the release of pages of which every word has changed. Returns the median in microseconds.
pub(super) fn release() -> Result<f64> {
    run(&[], CPUS, RELEASE, |_, command| {
        command.env(FaultMode::VARIABLE, FaultMode::Inline.to_string());
    })
}

/// Runs two nodes on some CPUs, by a command that has words before. Returns the median that node 0 has measured, in microseconds.
fn run(before: &[&str], cpus: [usize; 2], kind: &str, prepare: impl Fn(usize, &mut Command)) -> Result<f64> {
    let clusters = Cluster::on_this_host(LOOPBACK, 2)?;
    let command = |node: usize| -> Result<Command> {
        let cpu = cpus[node].to_string();
        let words = [before, &["taskset", "-c", &cpu]].concat();
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .arg(std::env::current_exe()?)
            .args([COMMAND, kind])
            .envs(clusters[node].environment());
        prepare(node, &mut command);
        Ok(command)
    };
    let _home = Server::start(command(1)?.stdout(Stdio::null()))?;
    let text = stdout(COMMAND, command(0)?.stdin(Stdio::null()).stderr(Stdio::piped()))?;
    let line: Value = serde_json::from_str(&text).with_context(|| format!("a node printed {text:?}"))?;
    line["p50"].as_f64().context("a node printed no median")
}

/// Spins for some time, as the floor does. Time is meant: before a fault of a millisecond the home goes to sleep.
fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        spin_loop();
    }
}

fn touch(word: &AtomicU64) {
    black_box(word.load(Ordering::Relaxed));
}

/// Runs as a node.
pub(crate) fn child(args: &[String]) -> Result<()> {
    let [kind] = args else {
        bail!("{COMMAND} KIND");
    };
    let [idle, computing, few] = [IDLE, COMPUTING, FEW].map(|prefix| kind.strip_prefix(prefix));
    let (is_idle, computes) = (idle.is_some(), computing.is_some());
    let kind_alone = idle.or(computing).or(few);
    let has_few = kind_alone.is_some();
    let kind = kind_alone.unwrap_or(kind);
    let cluster = Cluster::of_environment()?;
    let nodes: Vec<_> = cluster.nodes().collect();
    let session = Session::join(cluster, JOINING)?;
    if kind == EVENT {
        return events(&session, &Homes::hash(nodes)?, is_idle);
    }
    if kind == RELEASE {
        return releases(&session);
    }
    let kind = FAULT_NAMES.iter().position(|name| *name == kind);
    let kind = kind.context("no such kind of fault")?;
    // The second half of the pages has its home at node 1, and the first page after that at node 0.
    let mut options = RegionOptions::new((2 * PAGES + 1) * PAGE)?;
    options.homes = Placement::InTurn(PAGES);
    let region = session.region(&options)?;
    let rounds_done = region.mapping().double_word((2 * PAGES * PAGE) as usize);
    let mut thread = session.thread(0)?;
    let all = NonZeroU32::MIN.saturating_add(1);
    let words = || (PAGES..2 * PAGES).map(|page| region.mapping().double_word((page * PAGE) as usize));
    // Both nodes may read pages that are to be upgraded; others have been written by their home.
    let is_shared = FAULT_NAMES[kind] == "upgrade";
    let mut times = Histogram::<u64>::new(3)?;
    let rounds = if has_few { FEW_ROUNDS } else { ROUNDS };
    for round in 0..rounds {
        match session.node() {
            1 if is_shared => words().for_each(touch),
            1 => words().for_each(|word| word.store(round, Ordering::Relaxed)),
            _ => {}
        }
        thread.barrier(0, all)?;
        if session.node() == 0 {
            if is_shared {
                words().for_each(touch);
            }
            for word in words() {
                if is_idle {
                    spin(Duration::from_millis(1));
                }
                let began = Instant::now();
                match FAULT_NAMES[kind] {
                    "read" => touch(word),
                    _ => word.store(round, Ordering::Relaxed),
                }
                if round > 0 {
                    times.record(began.elapsed().as_nanos() as u64)?;
                }
            }
            rounds_done.store(round + 1, Ordering::Relaxed);
        } else if computes {
            // The word is at hand until the other node writes it, which may have been killed.
            let began = Instant::now();
            while rounds_done.load(Ordering::Relaxed) <= round {
                ensure!(began.elapsed() < COMPUTING_LIMIT, "the other node is gone");
                spin(COMPUTED);
            }
        }
        thread.barrier(0, all)?;
    }
    if session.node() == 0 {
        let stat = region.stat();
        let faults = match FAULT_NAMES[kind] {
            "read" => stat.read_faults,
            "upgrade" => stat.upgrade_faults,
            _ => stat.write_faults,
        };
        ensure!(faults >= rounds * PAGES, "{stat:?}");
        say_median(&times)?;
    }
    Ok(())
}

/// Prints the median of some nanoseconds, in microseconds.
fn say_median(times: &Histogram<u64>) -> Result<()> {
    say(&json!({ "p50": times.value_at_quantile(0.5) as f64 / 1000.0 }).to_string())
}

/// Has node 0 change all words of pages whose home is node 1, and release them.
fn releases(session: &Session) -> Result<()> {
    let mut options = RegionOptions::new(2 * PAGES * PAGE)?.consistency(Consistency::Release);
    options.homes = Placement::InTurn(PAGES);
    let region = session.region(&options)?;
    let mut thread = session.thread(0)?;
    let all = NonZeroU32::MIN.saturating_add(1);
    thread.barrier(0, all)?;
    if session.node() == 0 {
        let mut times = Histogram::<u64>::new(3)?;
        for value in 1..=RELEASES {
            for at in (PAGES * PAGE..2 * PAGES * PAGE).step_by(8) {
                let word = region.mapping().double_word(at as usize);
                word.store(value, Ordering::Relaxed);
            }
            let began = Instant::now();
            thread.release()?;
            times.record(began.elapsed().as_nanos() as u64)?;
        }
        say_median(&times)?;
    }
    thread.barrier(0, all)?;
    Ok(())
}

/// Has node 0 change a word whose home is node 1: one message there, and one back.
fn events(session: &Session, homes: &Homes, is_idle: bool) -> Result<()> {
    let word = (0..).find(|word| homes.of(*word).number() == 1);
    let word = word.context("node 1 is the home of no word")?;
    let mut thread = session.thread(0)?;
    let all = NonZeroU32::MIN.saturating_add(1);
    thread.barrier(0, all)?;
    if session.node() == 0 {
        let mut times = Histogram::<u64>::new(3)?;
        for _ in 0..if is_idle { EVENTS / 10 } else { EVENTS } {
            if is_idle {
                // Time is meant: the other node's CPU becomes idle.
                std::thread::sleep(Duration::from_millis(1));
            }
            let began = Instant::now();
            thread.fetch_add(word, 1)?;
            times.record(began.elapsed().as_nanos() as u64)?;
        }
        say_median(&times)?;
    }
    thread.barrier(0, all)?;
    Ok(())
}
