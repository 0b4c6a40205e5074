//! Counts of nodes that run, as another process reads them.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use common::{LONG, MODES, run_as_node, start};
use rdmux_dsm::stat::{self, Node};
use rdmux_dsm::{FaultMode, RegionOptions, Session};
use rustix::process::Signal;

const PAGE: usize = 4096;
const PAGES: usize = 8;

#[test]
fn node() {
    run_as_node(&[("counted", counted)]);
}

/// Node 0 writes all pages, node 1 reads them, and node 0 writes them again. Then both stay.
fn counted(session: &Session) {
    let bytes = (PAGES * PAGE) as u64;
    let region = session.region(&RegionOptions::new(bytes).unwrap()).unwrap();
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    for round in 0..3 {
        for at in (0..words.len()).step_by(PAGE / 8) {
            match (round, session.node()) {
                (0 | 2, 0) => words.set(at, round),
                (1, 1) => assert_eq!(words.get(at), 0),
                _ => {}
            }
        }
        thread.barrier(0, all).unwrap();
    }
    drop(thread.lock(1).unwrap());
    thread.fetch_add(2, 1).unwrap();
    loop {
        std::thread::park();
    }
}

/// Returns the nodes of these processes that can be read.
fn found(nodes: &[common::Node]) -> Vec<Node> {
    let all = stat::nodes().into_iter().filter_map(Result::ok);
    all.filter(|found| nodes.iter().any(|node| node.pid() == found.pid))
        .collect()
}

fn wait(nodes: &mut [common::Node], is_done: impl Fn(&[Node]) -> bool) -> Vec<Node> {
    let deadline = Instant::now() + LONG;
    loop {
        let found = found(nodes);
        if is_done(&found) {
            return found;
        }
        if Instant::now() >= deadline {
            let said: Vec<String> = nodes.iter().map(common::Node::printed).collect();
            panic!("{found:?} {said:?}");
        }
        std::thread::yield_now();
    }
}

/// Returns whether both have ended their work, and all messages have arrived.
fn have_ended(found: &[Node]) -> bool {
    let [one, other] = found else { return false };
    let sent = |from: &Node, to: &Node| {
        let there = from.peers[to.number as usize].counts.messages_sent;
        there == to.peers[from.number as usize].counts.messages_received
    };
    found.iter().all(|node| node.counts.word_calls == 1) && sent(one, other) && sent(other, one)
}

#[test]
fn nodes__have_the_counts_of_their_work() {
    for mode in MODES {
        let mut nodes = start("counted", 2, mode, LONG);
        let found = wait(&mut nodes, have_ended);
        let [zero, one] = &found[..] else { unreachable!() };
        for node in &found {
            let counts = node.counts;
            let waits = (counts.barrier_waits, counts.lock_waits, counts.condition_waits);
            assert_eq!(waits, (3, 1, 0), "{mode} {node:?}");
            assert!(
                counts.barrier_wait_ns > 0 && counts.stage_1_events > 0,
                "{node:?}"
            );
            assert_eq!(node.regions.len(), 1);
            let region = &node.regions[0];
            assert_eq!((region.bytes, region.mode), ((PAGES * PAGE) as u64, mode));
            assert_eq!((node.cluster(), node.epoch), (zero.address(), 0));
        }
        if mode == FaultMode::Thread {
            assert!(zero.counts.stage_2_events > 0, "{zero:?}");
        }
        let pages = PAGES as u64;
        let (writer, reader) = (zero.regions[0].counts, one.regions[0].counts);
        assert_eq!(
            (writer.write_faults, writer.upgrade_faults),
            (pages, pages),
            "{mode}"
        );
        assert_eq!((writer.downgrades, writer.invalidations), (pages, 0), "{mode}");
        assert_eq!((reader.read_faults, reader.write_faults), (pages, 0), "{mode}");
        assert_eq!((reader.fetches, reader.invalidations), (pages, pages), "{mode}");
        assert_eq!(reader.fetched_bytes, pages * PAGE as u64, "{mode}");
        // Each is the home of half of the pages, and asks itself for nothing.
        assert_eq!(
            (writer.invalidations_sent, reader.invalidations_sent),
            (pages / 2, 0)
        );
        assert_eq!((writer.downgrades_sent, reader.downgrades_sent), (0, pages / 2));
        let (of_zero, of_one) = (zero.peers[1].counts, one.peers[0].counts);
        assert_eq!(
            (of_one.fetches, of_one.fetched_bytes),
            (reader.fetches, reader.fetched_bytes)
        );
        assert_eq!(
            (of_zero.recalls_sent, of_one.recalls_received),
            (pages / 2, pages / 2)
        );
        assert_eq!(
            (of_one.recalls_sent, of_zero.recalls_received),
            (pages / 2, pages / 2)
        );
    }
}

#[test]
fn nodes__end_with_their_processes() {
    let lease = Duration::from_millis(1500);
    let mut nodes = start("counted", 2, FaultMode::Mprotect, lease);
    wait(&mut nodes, have_ended);
    // One that is stopped answers nobody.
    nodes[0].signal(Signal::STOP);
    assert_eq!(found(&nodes).len(), 2);
    nodes[0].signal(Signal::CONT);
    let killed = nodes.remove(1);
    killed.signal(Signal::KILL);
    killed.wait();
    let left = wait(&mut nodes, |found| found.len() == 1 && found[0].epoch == 1);
    assert!(left[0].peers[1].is_gone && !left[0].peers[0].is_gone, "{left:?}");
}
