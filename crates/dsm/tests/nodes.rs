//! Nodes as processes that share memory.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{MODES, in_threads, run, run_as_node, run_with};
use rdmux_dsm::sync::Operation;
use rdmux_dsm::{Access, Region, RegionOptions, Session};

const PAGE: usize = 4096;

#[test]
fn node() {
    run_as_node(&[
        ("locked", locked),
        ("exchanged", exchanged),
        ("atomic", atomic),
        ("added", added),
        ("gathered", gathered),
        ("queue", queue),
        ("ranges", ranges),
        ("many", many),
    ]);
}

fn region(session: &Session, pages: usize) -> Region<'_> {
    let bytes = (pages * PAGE) as u64;
    session.region(&RegionOptions::new(bytes).unwrap()).unwrap()
}

fn all(session: &Session, threads: u32) -> NonZeroU32 {
    NonZeroU32::new(session.nodes() * threads).unwrap()
}

/// Two threads of each node add to elements of one page without a lock.
fn added(session: &Session) {
    const ROUNDS: u64 = 200;
    let region = region(session, 1);
    let (counts, balances) = (region.array::<u64>(0, 2), region.array::<i64>(16, 1));
    let add = |number| {
        let mut thread = session.thread(number).unwrap();
        thread.barrier(0, all(session, 2)).unwrap();
        for _ in 0..ROUNDS {
            counts.fetch_add(0, 1);
            balances.fetch_add(0, -3);
            let mut before = counts.get(1);
            while let Err(found) = counts.compare_exchange(1, before, before + 2) {
                before = found;
            }
        }
        thread.barrier(0, all(session, 2)).unwrap();
        let sum = u64::from(2 * session.nodes()) * ROUNDS;
        assert_eq!((counts.get(0), counts.get(1)), (sum, 2 * sum));
        let balance = -3 * sum.cast_signed();
        assert_eq!(balances.compare_exchange(0, balance + 1, 5), Err(balance));
        thread.barrier(0, all(session, 2)).unwrap();
    };
    in_threads(0..2, add);
}

#[test]
fn fetch_add__and_compare_exchange_of_an_element_lose_nothing_between_nodes() {
    for mode in MODES {
        for nodes in 1..=2 {
            run("added", nodes, mode);
        }
    }
}

/// Two threads of each node add to words of several pages under a lock.
fn locked(session: &Session) {
    const ROUNDS: usize = 100;
    let region = region(session, 4);
    let words = region.array::<u64>(0, 4 * PAGE / 8);
    let add = |number| {
        let mut thread = session.thread(number).unwrap();
        for round in 0..ROUNDS {
            let guard = thread.lock(7).unwrap();
            let at = round % 4 * PAGE / 8;
            words.set(at, words.get(at) + 1);
            drop(guard);
        }
        thread.barrier(1, all(session, 2)).unwrap();
        let sum: u64 = (0..4).map(|page| words.get(page * PAGE / 8)).sum();
        assert_eq!(sum, u64::from(2 * session.nodes()) * ROUNDS as u64);
        thread.barrier(1, all(session, 2)).unwrap();
    };
    in_threads(0..2, add);
}

#[test]
fn lock__lets_one_thread_of_all_nodes_write_at_a_time() {
    for mode in MODES {
        run("locked", 3, mode);
    }
}

/// In each round one node writes all pages, and all nodes read them.
fn exchanged(session: &Session) {
    const PAGES: usize = 33;
    let region = region(session, PAGES);
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let mut before = 0;
    for round in 0..12 {
        // Until then, each node has read the pages whose homes are others.
        if round == 2 {
            before = region.stat().fetches;
        }
        if round % session.nodes() == session.node() {
            (0..words.len()).for_each(|at| words.set(at, at as u64 * u64::from(round + 1)));
        }
        thread.barrier(0, all(session, 1)).unwrap();
        for at in 0..words.len() {
            assert_eq!(
                words.get(at),
                at as u64 * u64::from(round + 1),
                "word {at} of round {round}"
            );
        }
        thread.barrier(0, all(session, 1)).unwrap();
    }
    let stat = region.stat();
    // Of two nodes, each reads each page that the other has written, once.
    if session.nodes() == 2 {
        assert_eq!(stat.fetches - before, 5 * PAGES as u64, "{stat:?}");
    }
}

#[test]
fn barrier__all_see_what_one_has_written_before_it() {
    for mode in MODES {
        for nodes in 1..=3 {
            run("exchanged", nodes, mode);
        }
    }
}

/// Threads of all nodes add to a word by the processor's instruction.
fn atomic(session: &Session) {
    const ROUNDS: u64 = 500;
    let region = region(session, 1);
    let word = region.mapping().double_word(8);
    let mut thread = session.thread(0).unwrap();
    for _ in 0..ROUNDS {
        word.fetch_add(1, Ordering::SeqCst);
    }
    thread.barrier(0, all(session, 1)).unwrap();
    assert_eq!(word.load(Ordering::SeqCst), ROUNDS * u64::from(session.nodes()));
    thread.barrier(0, all(session, 1)).unwrap();
}

#[test]
fn double_word__of_all_nodes_is_one_atomic() {
    for mode in MODES {
        run("atomic", 3, mode);
    }
}

/// Words at their homes, and reductions.
fn gathered(session: &Session) {
    let mut thread = session.thread(5).unwrap();
    let nodes = u64::from(session.nodes());
    for object in 0..20 {
        thread.fetch_add(object, 3).unwrap();
    }
    thread.barrier(0, all(session, 1)).unwrap();
    for object in 0..20 {
        assert_eq!(thread.load(object).unwrap(), 3 * nodes);
    }
    thread.barrier(0, all(session, 1)).unwrap();
    let swapped = thread.compare_swap(0, 3 * nodes, 1).unwrap();
    assert!(swapped == 3 * nodes || swapped == 1);
    let node = session.node();
    let sum = thread.sum(1, all(session, 1), f64::from(node)).unwrap();
    assert_eq!(sum, (0..session.nodes()).map(f64::from).sum::<f64>());
    let least = thread
        .reduce(2, all(session, 1), Operation::MinU64, u64::from(node) + 9)
        .unwrap();
    assert_eq!(least, 9);
}

#[test]
fn reduce__of_all_nodes_values() {
    for nodes in 1..=3 {
        run("gathered", nodes, MODES[0]);
    }
}

fn queue(session: &Session) {
    common::queue(session, &region(session, 1), 50);
}

#[test]
fn wait__of_a_queue_between_nodes() {
    run("queue", 3, MODES[0]);
}

/// One node writes all pages. The other gets them by one call, and the second time as many as it may ask for ahead.
fn ranges(session: &Session) {
    const PAGES: usize = 600;
    const AHEAD: usize = 256;
    let region = region(session, PAGES);
    let bytes = (PAGES * PAGE) as u64;
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let is_writer = session.node() == 0;
    for had in [PAGES, AHEAD] {
        let value = |page: usize| (page + had) as u64;
        if is_writer {
            (0..PAGES).for_each(|page| words.set(page * PAGE / 8, value(page)));
        }
        thread.barrier(0, all(session, 1)).unwrap();
        if !is_writer {
            let before = region.stat();
            match had {
                PAGES => region.acquire(0..bytes, Access::Read).unwrap(),
                _ => region.prefetch(0..bytes, Access::Read),
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            while region.stat().fetches < before.fetches + had as u64 {
                assert!(Instant::now() < deadline, "{:?}", region.stat());
                std::thread::yield_now();
            }
            for page in 0..had {
                assert_eq!(words.get(page * PAGE / 8), value(page), "page {page}");
            }
            let stat = region.stat().since(&before);
            assert_eq!([stat.read_faults, stat.fetches], [had as u64; 2], "{stat:?}");
        }
        thread.barrier(0, all(session, 1)).unwrap();
    }
}

#[test]
fn acquire__of_many_pages_and_prefetch_read_each_once() {
    for mode in MODES {
        run("ranges", 2, mode);
    }
}

/// Each node reads a page that the last one has written, whose home is the last one or another, and has a part in a sum.
fn many(session: &Session) {
    let last = session.nodes() - 1;
    let region = region(session, session.nodes() as usize);
    let mut thread = session.thread(0).unwrap();
    let pages = [last as usize, 1].map(|page| region.array::<u64>((page * PAGE) as u64, PAGE / 8));
    if session.node() == last {
        for words in &pages {
            (0..words.len()).for_each(|at| words.set(at, at as u64 * 3));
        }
    }
    thread.barrier(0, all(session, 1)).unwrap();
    for words in &pages {
        assert!((0..words.len()).all(|at| words.get(at) == at as u64 * 3));
    }
    let sum = thread.sum(1, all(session, 1), f64::from(session.node())).unwrap();
    assert_eq!(sum, (0..=last).map(f64::from).sum::<f64>());
    thread.barrier(2, all(session, 1)).unwrap();
}

/// Sets of more than 64 nodes are stored apart, and a device has shared memory with no more than 64 others.
#[test]
fn nodes__more_than_64_of_one_host() {
    run("many", 70, MODES[0]);
}

/// Packets between nodes, on a network without and with faults: some of each kind for each packet of a round trip.
const NETWORKS: [&[(&str, &str)]; 3] = [
    &[("RDMUX_SHM", "off")],
    &[
        ("RDMUX_SHM", "off"),
        ("RDMUX_FAULT", "loss=2%,dup=2%,reorder=2%,corrupt=1%,seed=5"),
    ],
    &[
        ("RDMUX_SHM", "off"),
        ("RDMUX_FAULT", "loss=1%,delay=100us..2ms,seed=6"),
    ],
];

#[test]
fn packets__lost_delayed_and_damaged_change_no_contents() {
    for (number, network) in NETWORKS.into_iter().enumerate() {
        for (part, mode) in ["locked", "exchanged"].into_iter().zip([number, number + 1]) {
            let mode = MODES[mode % 3];
            println!("{part}, {mode}, {network:?}");
            run_with(part, 3, mode, network);
        }
    }
    run_with("queue", 3, MODES[0], NETWORKS[1]);
    run_with("gathered", 3, MODES[0], NETWORKS[2]);
}

/// Packets of nodes of one host that go through shared memory, where a fault can hit them too.
#[test]
fn packets__lost_within_a_host_change_no_contents() {
    for part in ["locked", "atomic"] {
        run_with(part, 2, MODES[1], &[("RDMUX_FAULT", "loss=1%,dup=1%,seed=7")]);
    }
}
