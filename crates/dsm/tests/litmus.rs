//! Litmus tests: short programs of several nodes on real pages, whose outcomes must be those of some interleaving (sequential consistency).
//!
//! `RDMUX_DSM_LITMUS=100000` sets the number of runs of each.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod board;
mod common;
mod litmus_runner;

use std::collections::BTreeSet;

use common::{MODES, run_as_node};
use litmus_runner::Operation::{self, Acquire, Read, Release, Write};
use litmus_runner::{Place, Program, VARIABLES, X, Y};
use rdmux_dsm::{Consistency, Session};

/// Runs of each program.
const RUNS: usize = 768;

const TESTS: [Program; 13] = [
    Program {
        name: "MP",
        threads: &[&[Write(X, 1), Write(Y, 1)], &[Read(Y), Read(X)]],
        outcome: &[1, 0, 1, 1],
        is_possible: false,
    },
    // A release and an acquire change nothing where all accesses have one order.
    Program {
        name: "MP, release and acquire",
        threads: &[&[Write(X, 1), Release, Write(Y, 1)], &[Read(Y), Acquire, Read(X)]],
        outcome: &[1, 0, 1, 1],
        is_possible: false,
    },
    Program {
        name: "SB",
        threads: &[&[Write(X, 1), Read(Y)], &[Write(Y, 1), Read(X)]],
        outcome: &[0, 0, 1, 1],
        is_possible: false,
    },
    Program {
        name: "LB",
        threads: &[&[Read(X), Write(Y, 1)], &[Read(Y), Write(X, 1)]],
        outcome: &[1, 1, 1, 1],
        is_possible: false,
    },
    Program {
        name: "R",
        threads: &[&[Write(X, 1), Write(Y, 1)], &[Write(Y, 2), Read(X)]],
        outcome: &[0, 1, 2],
        is_possible: false,
    },
    Program {
        name: "S",
        threads: &[&[Write(X, 2), Write(Y, 1)], &[Read(Y), Write(X, 1)]],
        outcome: &[1, 2, 1],
        is_possible: false,
    },
    Program {
        name: "2+2W",
        threads: &[&[Write(X, 1), Write(Y, 2)], &[Write(Y, 1), Write(X, 2)]],
        outcome: &[1, 1],
        is_possible: false,
    },
    Program {
        name: "WRC",
        threads: &[&[Write(X, 1)], &[Read(X), Write(Y, 1)], &[Read(Y), Read(X)]],
        outcome: &[1, 1, 0, 1, 1],
        is_possible: false,
    },
    Program {
        name: "IRIW",
        threads: &[
            &[Write(X, 1)],
            &[Write(Y, 1)],
            &[Read(X), Read(Y)],
            &[Read(Y), Read(X)],
        ],
        outcome: &[1, 0, 1, 0, 1, 1],
        is_possible: false,
    },
    Program {
        name: "CoRR",
        threads: &[&[Write(X, 1)], &[Read(X), Read(X)]],
        outcome: &[1, 0, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoWW",
        threads: &[&[Write(X, 1), Write(X, 2)], &[Read(X)]],
        outcome: &[0, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoRW",
        threads: &[&[Read(X), Write(X, 1)], &[Write(X, 2)]],
        outcome: &[1, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoWR",
        threads: &[&[Write(X, 1), Read(X)], &[Write(X, 2)]],
        outcome: &[0, 1, 0],
        is_possible: false,
    },
];

/// Outcomes of all interleavings of some threads.
fn interleavings(threads: &[&[Operation]]) -> BTreeSet<Vec<u8>> {
    fn go(
        threads: &[&[Operation]],
        at: &mut Vec<usize>,
        memory: [u8; VARIABLES],
        reads: &mut Vec<Vec<u8>>,
        found: &mut BTreeSet<Vec<u8>>,
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
                // They change nothing here.
                Release | Acquire => go(threads, at, memory, reads, found),
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

/// Returns the outcomes of a program, which are the same wherever its variables are.
fn model(program: &Program, _: &Place) -> BTreeSet<Vec<u8>> {
    interleavings(program.threads)
}

#[test]
fn interleavings__exclude_the_outcome_for_which_each_program_is_known() {
    litmus_runner::check_model(&TESTS, model);
}

#[test]
fn node() {
    run_as_node(&[("litmus", run)]);
}

fn run(session: &Session) {
    litmus_runner::run(session, Consistency::Sequential, &TESTS, model, RUNS);
}

#[test]
fn pages__answered_by_the_service_thread_are_sequentially_consistent() {
    litmus_runner::run_all(&TESTS, MODES[0]);
}

#[test]
fn pages__answered_by_the_faulting_thread_are_sequentially_consistent() {
    litmus_runner::run_all(&TESTS, MODES[1]);
}

#[test]
fn pages__of_mprotect_are_sequentially_consistent() {
    litmus_runner::run_all(&TESTS, MODES[2]);
}
