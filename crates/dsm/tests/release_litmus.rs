//! Litmus tests of release consistency: short programs of several nodes on real pages, whose outcomes must be among those of a small model.
//!
//! `RDMUX_DSM_LITMUS=100000` sets the number of runs of each.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use common::{MODES, run, run_as_node};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Consistency, FaultMode, RegionOptions, Session};

const RUNS: &str = "RDMUX_DSM_LITMUS";
/// Runs between two barriers, each on pages of its own.
const BATCH: usize = 32;
const PAGE_WORDS: usize = 512;
const X: usize = 0;
const Y: usize = 1;
const VARIABLES: usize = 2;
/// Reads of a thread at most.
const READS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Write(usize, u64),
    Read(usize),
    Release,
    Acquire,
}
use Operation::{Acquire, Read, Release, Write};

/// A program: its threads, one a node, and an outcome: the values read by each thread in turn. The programs have an order if the outcome is
/// impossible whatever nodes are the homes of the variables.
struct Litmus {
    name: &'static str,
    threads: &'static [&'static [Operation]],
    outcome: &'static [u64],
    is_forbidden: bool,
}

const TESTS: [Litmus; 11] = [
    Litmus {
        name: "MP, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0],
        is_forbidden: true,
    },
    Litmus {
        name: "MP, release",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Read(X)],
        ],
        outcome: &[1, 0],
        is_forbidden: false,
    },
    Litmus {
        name: "MP, acquire",
        threads: &[
            &[Write(X, 1), Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0],
        is_forbidden: false,
    },
    Litmus {
        name: "SB, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Acquire, Read(Y)],
            &[Write(Y, 1), Release, Acquire, Read(X)],
        ],
        outcome: &[0, 0],
        is_forbidden: true,
    },
    Litmus {
        name: "SB",
        threads: &[&[Write(X, 1), Release, Read(Y)], &[Write(Y, 1), Release, Read(X)]],
        outcome: &[0, 0],
        is_forbidden: false,
    },
    Litmus {
        name: "LB",
        threads: &[
            &[Acquire, Read(X), Write(Y, 1), Release],
            &[Acquire, Read(Y), Write(X, 1), Release],
        ],
        outcome: &[1, 1],
        is_forbidden: true,
    },
    Litmus {
        name: "CoRR",
        threads: &[&[Write(X, 1), Release], &[Acquire, Read(X), Acquire, Read(X)]],
        outcome: &[1, 0],
        is_forbidden: true,
    },
    Litmus {
        name: "CoWR",
        threads: &[&[Write(X, 1), Acquire, Read(X)], &[Read(X), Release]],
        outcome: &[0, 0],
        is_forbidden: true,
    },
    Litmus {
        name: "2+2W",
        threads: &[
            &[Write(X, 1), Write(Y, 2), Release, Acquire, Read(X), Read(Y)],
            &[Write(Y, 1), Write(X, 2), Release],
        ],
        outcome: &[1, 1],
        is_forbidden: false,
    },
    Litmus {
        name: "WRC, release, acquire",
        threads: &[
            &[Write(X, 1), Release],
            &[Acquire, Read(X), Acquire, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 1, 0],
        is_forbidden: false,
    },
    Litmus {
        name: "ISA2, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0, 1, 0],
        is_forbidden: true,
    },
];

/// Task of a node beside its program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
enum Doing {
    #[default]
    Nothing,
    /// Variables whose writes are on their way home, and those of the release; then an acquire goes on if it has begun that.
    Releasing(BTreeSet<usize>, BTreeSet<usize>, Option<BTreeSet<usize>>),
    /// Nodes whose logs are not read, and variables that were noticed.
    Acquiring(BTreeSet<usize>, BTreeSet<usize>),
}

/// A node of the model: a thread, and copies of the variables whose home is another node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Node {
    at: usize,
    /// The program's own operation is in progress.
    is_own: bool,
    doing: Doing,
    /// Contents and twin.
    copies: [Option<(u64, u64)>; VARIABLES],
    dirty: BTreeSet<usize>,
    /// Variables that were written, by number of the notice, and how many of each node's notices were read.
    log: Vec<usize>,
    seen: Vec<usize>,
    reads: Vec<u64>,
}

/// State of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    homes: [usize; VARIABLES],
    memory: [u64; VARIABLES],
    nodes: Vec<Node>,
}

/// Returns the reads of all outcomes of a program whose variables have some homes. Other programs that the nodes run at the same time may have them
/// acquire before this one, and release after it.
fn outcomes(threads: &[&[Operation]], homes: [usize; VARIABLES]) -> BTreeSet<Vec<u64>> {
    let node = |number: usize| Node {
        copies: homes.map(|home| (home != number).then_some((0, 0))),
        seen: vec![0; threads.len()],
        ..Node::default()
    };
    let first = State {
        homes,
        memory: [0; VARIABLES],
        nodes: (0..threads.len()).map(node).collect(),
    };
    let mut seen = HashSet::from([first.clone()]);
    let mut found = BTreeSet::new();
    let mut states = vec![first];
    while let Some(state) = states.pop() {
        let is_over = |(node, operations): (&Node, &&[Operation])| node.at == operations.len();
        if state.nodes.iter().zip(threads).all(is_over) {
            found.insert(state.nodes.iter().flat_map(|node| node.reads.clone()).collect());
        }
        for (number, operations) in threads.iter().enumerate() {
            for next in state.steps(number, operations) {
                if seen.insert(next.clone()) {
                    states.push(next);
                }
            }
        }
    }
    found
}

impl State {
    /// Returns the states that follow by a step of a node.
    fn steps(&self, number: usize, operations: &[Operation]) -> Vec<State> {
        let node = &self.nodes[number];
        match &node.doing {
            Doing::Nothing => {
                let mut next = Vec::new();
                if let Some(operation) = operations.get(node.at) {
                    next.extend(self.begin(number, *operation, true));
                }
                // One that finds nothing changes nothing.
                let news = |(other, seen): (&Node, &usize)| other.log.len() > *seen;
                if node.at == 0 && self.nodes.iter().zip(&node.seen).any(news) {
                    next.extend(self.begin(number, Acquire, false));
                }
                if node.at == operations.len() && !node.dirty.is_empty() {
                    next.extend(self.begin(number, Release, false));
                }
                next
            }
            Doing::Releasing(left, all, acquiring) if left.is_empty() => {
                let mut next = self.clone();
                let node = &mut next.nodes[number];
                node.log.extend(all);
                match acquiring {
                    Some(noticed) => {
                        noticed.iter().for_each(|it| node.copies[*it] = None);
                        node.end();
                    }
                    None => node.end(),
                }
                vec![next]
            }
            Doing::Releasing(left, all, acquiring) => {
                let flush = |variable: &usize| {
                    let mut next = self.clone();
                    let mut left = left.clone();
                    left.remove(variable);
                    if let Some((value, twin)) = node.copies[*variable]
                        && value != twin
                    {
                        next.memory[*variable] = value;
                    }
                    next.nodes[number].doing = Doing::Releasing(left, all.clone(), acquiring.clone());
                    next
                };
                left.iter().map(flush).collect()
            }
            Doing::Acquiring(left, noticed) if left.is_empty() => {
                let mut next = self.clone();
                let node = &mut next.nodes[number];
                let noticed: BTreeSet<usize> = noticed
                    .iter()
                    .copied()
                    .filter(|it| self.homes[*it] != number)
                    .collect();
                if noticed.is_disjoint(&node.dirty) {
                    noticed.iter().for_each(|it| node.copies[*it] = None);
                    node.end();
                } else {
                    let all = std::mem::take(&mut node.dirty);
                    node.doing = Doing::Releasing(all.clone(), all, Some(noticed));
                }
                vec![next]
            }
            Doing::Acquiring(left, noticed) => {
                let look = |other: &usize| {
                    let mut next = self.clone();
                    let (mut left, mut noticed) = (left.clone(), noticed.clone());
                    left.remove(other);
                    let log = &self.nodes[*other].log;
                    noticed.extend(&log[node.seen[*other]..]);
                    next.nodes[number].seen[*other] = log.len();
                    next.nodes[number].doing = Doing::Acquiring(left, noticed);
                    next
                };
                left.iter().map(look).collect()
            }
        }
    }

    /// Begins an operation, or carries it out if it takes one step.
    fn begin(&self, number: usize, operation: Operation, is_own: bool) -> Option<State> {
        let mut next = self.clone();
        let all = 0..self.nodes.len();
        let node = &mut next.nodes[number];
        node.is_own = is_own;
        match operation {
            Read(variable) | Write(variable, _)
                if self.homes[variable] != number && node.copies[variable].is_none() =>
            {
                // The copy comes in a step of its own.
                let value = self.memory[variable];
                node.copies[variable] = Some((value, value));
            }
            Read(variable) => {
                let value = node.copies[variable].map_or(self.memory[variable], |it| it.0);
                node.reads.push(value);
                node.at += 1;
            }
            Write(variable, value) => {
                if self.homes[variable] == number {
                    next.memory[variable] = value;
                } else if let Some((contents, twin)) = &mut node.copies[variable] {
                    if !node.dirty.contains(&variable) {
                        *twin = *contents;
                    }
                    *contents = value;
                }
                let node = &mut next.nodes[number];
                node.dirty.insert(variable);
                node.at += 1;
            }
            Release => {
                let dirty = std::mem::take(&mut node.dirty);
                node.doing = Doing::Releasing(dirty.clone(), dirty, None);
            }
            Acquire => {
                let others = all.filter(|it| *it != number).collect();
                node.doing = Doing::Acquiring(others, BTreeSet::new());
            }
        }
        Some(next)
    }
}

impl Node {
    /// Ends a release or an acquire.
    fn end(&mut self) {
        self.doing = Doing::Nothing;
        self.at += usize::from(std::mem::take(&mut self.is_own));
    }
}

/// Returns the homes that two pages in a row can have.
fn all_homes(nodes: usize) -> impl Iterator<Item = [usize; VARIABLES]> {
    (0..nodes).map(move |home| [home, (home + 1) % nodes])
}

#[test]
fn outcomes__exclude_what_release_and_acquire_forbid_and_nothing_else() {
    for test in &TESTS {
        let nodes = test.threads.len();
        let is_possible = all_homes(nodes).any(|homes| outcomes(test.threads, homes).contains(test.outcome));
        assert_eq!(is_possible, !test.is_forbidden, "{}", test.name);
    }
}

fn runs() -> usize {
    let runs = std::env::var(RUNS).ok();
    runs.map_or(320, |runs| runs.parse().expect("a number"))
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
    let region = session
        .region(&options.consistency(Consistency::Release))
        .unwrap();
    let words = region.array::<u64>(0, pages * PAGE_WORDS);
    let page = |instance: usize, variable: usize| instance * VARIABLES + variable;
    let variable = |instance, variable| {
        region
            .mapping()
            .double_word(page(instance, variable) * PAGE_WORDS * 8)
    };
    let result = |instance: usize, thread: usize, read: usize| {
        BATCH * VARIABLES * PAGE_WORDS + (instance * nodes + thread) * READS + read
    };
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let mut dice = ChaCha8Rng::seed_from_u64(node as u64);
    for test in TESTS.iter().filter(|test| test.threads.len() == nodes) {
        let mut allowed: BTreeMap<[usize; VARIABLES], BTreeSet<Vec<u64>>> = BTreeMap::new();
        let mut seen: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        for _ in 0..runs().div_ceil(BATCH) {
            if node == 0 {
                for instance in 0..BATCH {
                    (0..VARIABLES).for_each(|it| variable(instance, it).store(0, Ordering::SeqCst));
                }
            }
            thread.barrier(0, all).unwrap();
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
                        Release => thread.release().unwrap(),
                        Acquire => thread.acquire().unwrap(),
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
                    let outcome: Vec<u64> = reads
                        .map(|(thread, read)| words.get(result(instance, thread, read)))
                        .collect();
                    let homes = [X, Y].map(|it| page(instance, it) % nodes);
                    let allowed = allowed
                        .entry(homes)
                        .or_insert_with(|| outcomes(test.threads, homes));
                    assert!(
                        allowed.contains(&outcome),
                        "{}: {outcome:?}, homes {homes:?}",
                        test.name
                    );
                    *seen.entry(outcome).or_default() += 1;
                }
            }
            thread.barrier(0, all).unwrap();
        }
        if node == 0 {
            println!("{}: {seen:?}", test.name);
        }
    }
}

fn run_all(mode: FaultMode) {
    for nodes in 2..=3 {
        println!("{mode}, {nodes} nodes:\n{}", run("litmus", nodes, mode)[0]);
    }
}

#[test]
fn pages__answered_by_the_service_thread_are_release_consistent() {
    run_all(MODES[0]);
}

#[test]
fn pages__answered_by_the_faulting_thread_are_release_consistent() {
    run_all(MODES[1]);
}

#[test]
fn pages__of_mprotect_are_release_consistent() {
    run_all(MODES[2]);
}
