//! Histories of random programs on real pages: each must be that of some interleaving (sequential consistency).
//!
//! `RDMUX_DSM_HISTORIES=100000` sets the number of histories for each number of nodes, and `RDMUX_DSM_SEED` their seed.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use common::{MODES, run, run_as_node};
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    /// Writes a value that no other access writes.
    Write(u64),
    /// Does so, and reads the value before, as one access.
    Swap(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Access {
    word: usize,
    kind: Kind,
}

/// An access, and the value that it has read; 0 for a write.
type Event = (Access, u64);

/// Returns the number of an environment variable, or a default.
fn number(variable: &str, otherwise: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(otherwise, |value| value.parse().expect("a number"))
}

/// Returns the program of a node in a history.
fn program(seed: u64, history: u64, node: usize, nodes: usize) -> Vec<Access> {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    dice.set_stream(history << 8 | node as u64);
    let access = |nth: usize| {
        let value = ((node + 1) << 8 | nth + 1) as u64;
        let word = dice.next_u32() as usize % WORDS;
        let kind = match dice.next_u32() % 8 {
            0..4 => Kind::Read,
            4..7 => Kind::Write(value),
            _ => Kind::Swap(value),
        };
        Access { word, kind }
    };
    (0..ACCESSES / nodes).map(access).collect()
}

/// Returns whether some interleaving of the threads has these values, and ends with that memory.
fn is_interleaving(threads: &[Vec<Event>], end: [u64; WORDS]) -> bool {
    // Positions of the threads, and the memory. Each state is looked at once.
    let mut open = vec![(vec![0; threads.len()], [0; WORDS])];
    let mut seen: HashSet<(Vec<usize>, [u64; WORDS])> = open.iter().cloned().collect();
    while let Some((at, memory)) = open.pop() {
        let mut is_over = true;
        for (thread, events) in threads.iter().enumerate() {
            let Some((access, value)) = events.get(at[thread]) else {
                continue;
            };
            is_over = false;
            let reads = matches!(access.kind, Kind::Read | Kind::Swap(_));
            if reads && memory[access.word] != *value {
                continue;
            }
            let (mut at, mut memory) = (at.clone(), memory);
            at[thread] += 1;
            if let Kind::Write(value) | Kind::Swap(value) = access.kind {
                memory[access.word] = value;
            }
            if seen.insert((at.clone(), memory)) {
                open.push((at, memory));
            }
        }
        if is_over && memory == end {
            return true;
        }
    }
    false
}

#[test]
fn is_interleaving__of_known_histories() {
    let write = |word, value| {
        (
            Access {
                word,
                kind: Kind::Write(value),
            },
            0,
        )
    };
    let read = |word, value| {
        (
            Access {
                word,
                kind: Kind::Read,
            },
            value,
        )
    };
    let swap = |word, value, before| {
        (
            Access {
                word,
                kind: Kind::Swap(value),
            },
            before,
        )
    };
    let stores = |first, second| {
        [
            vec![write(0, 1), read(1, first)],
            vec![write(1, 2), read(0, second)],
        ]
    };
    assert!(is_interleaving(&stores(0, 1), [1, 2, 0, 0]));
    assert!(is_interleaving(&stores(2, 1), [1, 2, 0, 0]));
    assert!(!is_interleaving(&stores(0, 0), [1, 2, 0, 0]));
    // The memory at the end counts, and a swap is one access.
    assert!(!is_interleaving(&stores(2, 1), [1, 3, 0, 0]));
    let swaps = |first, second| [vec![swap(0, 1, first)], vec![swap(0, 2, second)]];
    assert!(is_interleaving(&swaps(0, 1), [2, 0, 0, 0]));
    assert!(!is_interleaving(&swaps(0, 0), [2, 0, 0, 0]));
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
            for access in program(seed, history, node, nodes) {
                (0..dice.next_u32() % 200).for_each(|_| std::hint::spin_loop());
                let at = word(instance, access.word);
                // The processor keeps the order of SeqCst: the history is that of the pages.
                values.push(match access.kind {
                    Kind::Read => at.load(Ordering::SeqCst),
                    Kind::Swap(value) => at.swap(value, Ordering::SeqCst),
                    Kind::Write(value) => {
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
                let event = |(nth, access)| (access, results.get(result(instance, node, nth)));
                program.map(event).collect()
            };
            let threads: Vec<Vec<Event>> = (0..nodes).map(events).collect();
            let end = std::array::from_fn(|it| word(instance, it).load(Ordering::SeqCst));
            assert!(
                is_interleaving(&threads, end),
                "seed {seed}, history {history}: {threads:#?}, at the end {end:?}"
            );
            let of_others = |(node, events): (usize, &Vec<Event>)| {
                let foreign = |(_, value): &Event| *value != 0 && *value >> 8 != node as u64 + 1;
                events.iter().any(foreign)
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
