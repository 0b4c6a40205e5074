//! Litmus tests: short programs of several nodes on real pages, whose outcomes must be those of some interleaving (sequential consistency).
//!
//! `RDMUX_DSM_LITMUS=100000` sets the number of runs of each.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use common::{MODES, run, run_as_node};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{FaultMode, RegionOptions, Session};

const RUNS: &str = "RDMUX_DSM_LITMUS";
/// Runs between two barriers, each on pages of its own.
const BATCH: usize = 32;
const PAGE_WORDS: usize = 512;
const X: usize = 0;
const Y: usize = 1;
const VARIABLES: usize = 2;
/// Reads of a thread at most.
const READS: usize = 2;

#[derive(Clone, Copy)]
enum Operation {
    Write(usize, u64),
    Read(usize),
}
use Operation::{Read, Write};

/// A program: its threads, one a node, and an outcome that no interleaving has: the values read by each thread in turn, then those of the
/// variables at the end.
struct Litmus {
    name: &'static str,
    threads: &'static [&'static [Operation]],
    forbidden: &'static [u64],
}

const TESTS: [Litmus; 12] = [
    Litmus {
        name: "MP",
        threads: &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Read(X)]],
        forbidden: &[1, 0, 1, 1],
    },
    Litmus {
        name: "SB",
        threads: &[&[Write(X, 1), Read(Y)], &[Write(Y, 1), Read(X)]],
        forbidden: &[0, 0, 1, 1],
    },
    Litmus {
        name: "LB",
        threads: &[&[Read(X), Write(Y, 1)], &[Read(Y), Write(X, 1)]],
        forbidden: &[1, 1, 1, 1],
    },
    Litmus {
        name: "R",
        threads: &[&[Write(X, 1), Write(Y, 1)], &[Write(Y, 2), Read(X)]],
        forbidden: &[0, 1, 2],
    },
    Litmus {
        name: "S",
        threads: &[&[Write(X, 2), Write(Y, 1)], &[Read(Y), Write(X, 1)]],
        forbidden: &[1, 2, 1],
    },
    Litmus {
        name: "2+2W",
        threads: &[&[Write(X, 1), Write(Y, 2)], &[Write(Y, 1), Write(X, 2)]],
        forbidden: &[1, 1],
    },
    Litmus {
        name: "WRC",
        threads: &[&[Write(X, 1)], &[Read(X), Write(Y, 1)], &[Read(Y), Read(X)]],
        forbidden: &[1, 1, 0, 1, 1],
    },
    Litmus {
        name: "IRIW",
        threads: &[
            &[Write(X, 1)],
            &[Write(Y, 1)],
            &[Read(X), Read(Y)],
            &[Read(Y), Read(X)],
        ],
        forbidden: &[1, 0, 1, 0, 1, 1],
    },
    Litmus {
        name: "CoRR",
        threads: &[&[Write(X, 1)], &[Read(X), Read(X)]],
        forbidden: &[1, 0, 1, 0],
    },
    Litmus {
        name: "CoWW",
        threads: &[&[Write(X, 1), Write(X, 2)], &[Read(X)]],
        forbidden: &[0, 1, 0],
    },
    Litmus {
        name: "CoRW",
        threads: &[&[Read(X), Write(X, 1)], &[Write(X, 2)]],
        forbidden: &[1, 1, 0],
    },
    Litmus {
        name: "CoWR",
        threads: &[&[Write(X, 1), Read(X)], &[Write(X, 2)]],
        forbidden: &[0, 1, 0],
    },
];

/// Outcomes of all interleavings of some threads.
fn interleavings(threads: &[&[Operation]]) -> BTreeSet<Vec<u64>> {
    fn go(
        threads: &[&[Operation]],
        at: &mut Vec<usize>,
        memory: [u64; VARIABLES],
        reads: &mut Vec<Vec<u64>>,
        found: &mut BTreeSet<Vec<u64>>,
    ) {
        let mut is_over = true;
        for thread in 0..threads.len() {
            let Some(operation) = threads[thread].get(at[thread]) else {
                continue;
            };
            is_over = false;
            at[thread] += 1;
            let mut memory = memory;
            match *operation {
                Write(variable, value) => {
                    memory[variable] = value;
                    go(threads, at, memory, reads, found);
                }
                Read(variable) => {
                    reads[thread].push(memory[variable]);
                    go(threads, at, memory, reads, found);
                    reads[thread].pop();
                }
            }
            at[thread] -= 1;
        }
        if is_over {
            found.insert(reads.iter().flatten().chain(&memory).copied().collect());
        }
    }
    let mut found = BTreeSet::new();
    let (mut at, mut reads) = (vec![0; threads.len()], vec![Vec::new(); threads.len()]);
    go(threads, &mut at, [0; VARIABLES], &mut reads, &mut found);
    found
}

/// Returns the forbidden outcome of a program. Variables that it does not name are 0.
fn padded(test: &Litmus) -> Vec<u64> {
    let reads = test.threads.iter().flat_map(|it| it.iter());
    let reads = reads.filter(|it| matches!(it, Read(_))).count();
    let mut outcome = test.forbidden.to_vec();
    outcome.resize(reads + VARIABLES, 0);
    outcome
}

#[test]
fn interleavings__exclude_the_outcome_for_which_each_program_is_known() {
    for test in &TESTS {
        let allowed = interleavings(test.threads);
        assert!(!allowed.contains(&padded(test)), "{}", test.name);
        assert!(allowed.len() > 1, "{}", test.name);
    }
}

fn runs() -> usize {
    let runs = std::env::var(RUNS).ok();
    runs.map_or(640, |runs| runs.parse().expect("a number"))
}

#[test]
fn node() {
    run_as_node(&[("litmus", litmus)]);
}

/// Runs all programs that have as many threads as there are nodes.
fn litmus(session: &Session) {
    let (node, nodes) = (session.node() as usize, session.nodes() as usize);
    let results = BATCH * nodes * READS;
    let pages = BATCH * VARIABLES + results.div_ceil(PAGE_WORDS);
    let options = RegionOptions::new((pages * PAGE_WORDS * 8) as u64).unwrap();
    let region = session.region(&options).unwrap();
    let words = region.array::<u64>(0, pages * PAGE_WORDS);
    let variable = |instance: usize, variable: usize| {
        let page = instance * VARIABLES + variable;
        region.mapping().double_word(page * PAGE_WORDS * 8)
    };
    let result = |instance: usize, thread: usize, read: usize| {
        BATCH * VARIABLES * PAGE_WORDS + (instance * nodes + thread) * READS + read
    };
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let mut dice = ChaCha8Rng::seed_from_u64(node as u64);
    for test in TESTS.iter().filter(|test| test.threads.len() == nodes) {
        let allowed = interleavings(test.threads);
        let mut seen: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        for _ in 0..runs().div_ceil(BATCH) {
            if node == 0 {
                for instance in 0..BATCH {
                    (0..VARIABLES).for_each(|it| variable(instance, it).store(0, Ordering::SeqCst));
                }
            }
            thread.barrier(0, all).unwrap();
            // Otherwise node 0 would take no fault, and be through before the others begin.
            for instance in 0..BATCH {
                (0..VARIABLES).for_each(|it| assert_eq!(variable(instance, it).load(Ordering::SeqCst), 0));
            }
            thread.barrier(0, all).unwrap();
            // Nodes meet in few instances if all take them in one order: each has an order of its own.
            let (first, step) = (dice.next_u32() as usize, dice.next_u32() as usize | 1);
            for turn in 0..BATCH {
                let instance = (first.wrapping_add(turn.wrapping_mul(step))) % BATCH;
                let mut read = 0;
                let mut values = [0; READS];
                for operation in test.threads[node] {
                    (0..dice.next_u32() % 200).for_each(|_| std::hint::spin_loop());
                    match *operation {
                        // The processor keeps the order of SeqCst: the outcome is that of the pages.
                        Write(at, value) => variable(instance, at).store(value, Ordering::SeqCst),
                        Read(at) => {
                            values[read] = variable(instance, at).load(Ordering::SeqCst);
                            read += 1;
                        }
                    }
                }
                (0..read).for_each(|it| words.set(result(instance, node, it), values[it]));
            }
            thread.barrier(0, all).unwrap();
            if node == 0 {
                for instance in 0..BATCH {
                    let reads = test.threads.iter().enumerate().flat_map(|(thread, operations)| {
                        let reads = operations.iter().filter(|it| matches!(it, Read(_))).count();
                        (0..reads).map(move |read| (thread, read))
                    });
                    let mut outcome: Vec<u64> = reads
                        .map(|(thread, read)| words.get(result(instance, thread, read)))
                        .collect();
                    outcome.extend((0..VARIABLES).map(|it| variable(instance, it).load(Ordering::SeqCst)));
                    assert!(allowed.contains(&outcome), "{}: {outcome:?}", test.name);
                    *seen.entry(outcome).or_default() += 1;
                }
            }
            thread.barrier(0, all).unwrap();
        }
        if node == 0 {
            println!(
                "{}: {} of {} allowed outcomes: {seen:?}",
                test.name,
                seen.len(),
                allowed.len()
            );
        }
    }
}

fn run_all(mode: FaultMode) {
    for nodes in 2..=4 {
        println!("{mode}, {nodes} nodes:\n{}", run("litmus", nodes, mode)[0]);
    }
}

#[test]
fn pages__answered_by_the_service_thread_are_sequentially_consistent() {
    run_all(MODES[0]);
}

#[test]
fn pages__answered_by_the_faulting_thread_are_sequentially_consistent() {
    run_all(MODES[1]);
}

#[test]
fn pages__of_mprotect_are_sequentially_consistent() {
    run_all(MODES[2]);
}
