//! Histories of random programs on real pages: each must be that of some interleaving (sequential consistency).
//!
//! `RDMUX_DSM_HISTORIES=100000` sets the number of histories for each number of nodes, and `RDMUX_DSM_SEED` their seed.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
mod history;

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use common::{MODES, number, run, run_as_node};
use history::{Event, has_order};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{FaultMode, RegionOptions, Session};

const HISTORIES: &str = "RDMUX_DSM_HISTORIES";
const SEED: &str = "RDMUX_DSM_SEED";
/// Histories between two barriers, each on pages of its own.
const BATCH: usize = 32;
const PAGE_WORDS: usize = 512;
/// Words of a history. Two pages have two of them each: nodes also meet on pages without meeting on words.
const WORDS: usize = 4;
const PAGES: usize = 2;
/// Accesses of all nodes in a history.
const ACCESSES: usize = 24;

/// An access of a program.
#[derive(Clone, Copy, Debug)]
enum Access {
    Read,
    /// Writes a value that no other access writes.
    Write(u64),
    /// Does so, and reads the value before, at once.
    Swap(u64),
}

/// Returns the program of a node in a history: words, and what it does with them.
fn program(seed: u64, history: u64, node: usize, nodes: usize) -> Vec<(usize, Access)> {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    dice.set_stream(history << 8 | node as u64);
    let access = |nth: usize| {
        let value = ((node + 1) << 8 | (nth + 1)) as u64;
        let word = dice.next_u32() as usize % WORDS;
        let access = match dice.next_u32() % 8 {
            0..4 => Access::Read,
            4..7 => Access::Write(value),
            _ => Access::Swap(value),
        };
        (word, access)
    };
    (0..ACCESSES / nodes).map(access).collect()
}

#[test]
fn has_order__of_known_histories() {
    let (read, write) = (Event::read, Event::write);
    let swap = |place, before, value| Event {
        read: Some(before),
        ..write(place, value)
    };
    let stores = |first, second| {
        [
            vec![write(0, 1), read(1, first)],
            vec![write(1, 2), read(0, second)],
        ]
    };
    assert!(has_order(&stores(0, 1), Some(&[1, 2])));
    assert!(has_order(&stores(2, 1), None));
    assert!(!has_order(&stores(0, 0), None), "store buffering");
    assert!(!has_order(&stores(2, 1), Some(&[1, 3])));
    let swaps = |first, second| [vec![swap(0, first, 1)], vec![swap(0, second, 2)]];
    assert!(has_order(&swaps(0, 1), Some(&[2])));
    assert!(!has_order(&swaps(0, 1), Some(&[1])));
    assert!(!has_order(&swaps(0, 0), None), "a swap is one access");
}

#[test]
fn node() {
    run_as_node(&[("histories", histories)]);
}

fn histories(session: &Session) {
    let (node, nodes) = (session.node() as usize, session.nodes() as usize);
    let (seed, batches) = (number(SEED, 1), number(HISTORIES, 640).div_ceil(BATCH as u64));
    let accesses = ACCESSES / nodes;
    let pages = BATCH * PAGES + (BATCH * nodes * accesses).div_ceil(PAGE_WORDS);
    let options = RegionOptions::new((pages * PAGE_WORDS * 8) as u64).unwrap();
    let region = session.region(&options).unwrap();
    let results = region.array::<u64>(0, pages * PAGE_WORDS);
    let word = |instance: usize, word: usize| {
        let page = instance * PAGES + word % PAGES;
        region
            .mapping()
            .double_word((page * PAGE_WORDS + word / PAGES * 8) * 8)
    };
    let result = |instance: usize, node: usize, nth: usize| {
        BATCH * PAGES * PAGE_WORDS + (instance * nodes + node) * accesses + nth
    };
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let mut dice = ChaCha8Rng::seed_from_u64(node as u64);
    // Histories in which a node has read what another one has written.
    let mut met = 0;
    for batch in 0..batches {
        if node == 0 {
            for instance in 0..BATCH {
                (0..WORDS).for_each(|it| word(instance, it).store(0, Ordering::SeqCst));
            }
        }
        thread.barrier(0, all).unwrap();
        // Otherwise node 0 would take no fault, and be through before the others begin.
        for instance in 0..BATCH {
            (0..WORDS).for_each(|it| assert_eq!(word(instance, it).load(Ordering::SeqCst), 0));
        }
        thread.barrier(0, all).unwrap();
        // Nodes meet in few histories if all take them in one order: each has an order of its own.
        let (first, step) = (dice.next_u32() as usize, dice.next_u32() as usize | 1);
        for turn in 0..BATCH {
            let instance = first.wrapping_add(turn.wrapping_mul(step)) % BATCH;
            let history = batch * BATCH as u64 + instance as u64;
            let mut values = Vec::with_capacity(accesses);
            for (place, access) in program(seed, history, node, nodes) {
                (0..dice.next_u32() % 200).for_each(|_| std::hint::spin_loop());
                let at = word(instance, place);
                // The processor keeps the order of SeqCst: the history is that of the pages.
                values.push(match access {
                    Access::Read => at.load(Ordering::SeqCst),
                    Access::Swap(value) => at.swap(value, Ordering::SeqCst),
                    Access::Write(value) => {
                        at.store(value, Ordering::SeqCst);
                        0
                    }
                });
            }
            for (nth, value) in values.into_iter().enumerate() {
                results.set(result(instance, node, nth), value);
            }
        }
        thread.barrier(0, all).unwrap();
        for instance in (0..BATCH).filter(|_| node == 0) {
            let history = batch * BATCH as u64 + instance as u64;
            let events = |node| {
                let program = program(seed, history, node, nodes).into_iter().enumerate();
                let event = |(nth, (place, access))| {
                    let read = results.get(result(instance, node, nth));
                    let (read, written) = match access {
                        Access::Read => (Some(read), None),
                        Access::Write(value) => (None, Some(value)),
                        Access::Swap(value) => (Some(read), Some(value)),
                    };
                    Event { place, read, written }
                };
                program.map(event).collect()
            };
            let threads: Vec<Vec<Event>> = (0..nodes).map(events).collect();
            let end: Vec<u64> = (0..WORDS)
                .map(|it| word(instance, it).load(Ordering::SeqCst))
                .collect();
            assert!(
                has_order(&threads, Some(&end)),
                "seed {seed}, history {history}: {threads:#?}, at the end {end:?}"
            );
            let of_others = |(node, events): (usize, &Vec<Event>)| {
                let mut read = events.iter().filter_map(|event| event.read);
                read.any(|value| value != 0 && value >> 8 != node as u64 + 1)
            };
            met += usize::from(threads.iter().enumerate().any(of_others));
        }
        thread.barrier(0, all).unwrap();
    }
    if node == 0 {
        assert!(met > 0, "no node has read what another one has written");
        println!(
            "seed {seed}: {} histories, nodes have met in {met}",
            batches * BATCH as u64
        );
    }
}

fn run_all(mode: FaultMode) {
    for nodes in 2..=4 {
        println!("{mode}, {nodes} nodes:\n{}", run("histories", nodes, mode)[0]);
    }
}

#[test]
fn histories__of_pages_answered_by_the_service_thread_are_interleavings() {
    run_all(MODES[0]);
}

#[test]
fn histories__of_pages_answered_by_the_faulting_thread_are_interleavings() {
    run_all(MODES[1]);
}

#[test]
fn histories__of_pages_of_mprotect_are_interleavings() {
    run_all(MODES[2]);
}
