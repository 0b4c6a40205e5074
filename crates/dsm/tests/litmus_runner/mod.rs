//! Litmus tests: short programs of several nodes, run many times on real pages. Each outcome must be among those that a model allows.
//!
//! The nodes run a batch of instances, each on pages of its own, between two barriers, and meet before each instance, so that its threads overlap.
//! Memory is not set back: the values that an instance writes tell its round.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Access, Consistency, FaultMode, Region, RegionOptions, Session, Thread};

use crate::board::{Board, run_with_board};

/// Set to the number of runs of each program.
const RUNS: &str = "RDMUX_DSM_LITMUS";
/// Instances of a batch. In a batch no node releases so often that its log laps, after which an acquire does more than the models know.
const INSTANCES: usize = 256;
const PAGE_BYTES: usize = 4096;
/// Bytes between two variables on one page.
const LINE_BYTES: usize = 64;
pub(crate) const X: usize = 0;
pub(crate) const Y: usize = 1;
pub(crate) const VARIABLES: usize = 2;
/// Marks a value that is neither the previous one nor one of this round.
const WRONG: u8 = u8::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Writes 1, 2 or 3.
    Write(usize, u8),
    Read(usize),
    Release,
    Acquire,
}
use Operation::{Acquire, Read, Release, Write};

/// A program: its threads, one a node, and the outcome for which it is known, or the first values of it. An outcome is the values read by each thread
/// in turn, then those of the variables at the end.
pub(crate) struct Program {
    pub name: &'static str,
    pub threads: &'static [&'static [Operation]],
    pub outcome: &'static [u8],
    pub is_possible: bool,
}

/// Pages of the variables of an instance, and their homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    /// Page of each variable, 0 or 1.
    pub pages: [usize; VARIABLES],
    /// Home of each page.
    pub homes: [usize; VARIABLES],
}

impl Place {
    /// Returns the place of an instance: pages are at home at the nodes in turn.
    fn of(instance: usize, nodes: usize) -> Place {
        let first = instance >> 2 & 1;
        let is_together = instance >> 1 & 1 == 1;
        let pages = match is_together {
            true => [first, first],
            false => [first, 1 - first],
        };
        let homes = [0, 1].map(|page| (instance * VARIABLES + page) % nodes);
        Place { pages, homes }
    }

    /// Returns all places.
    pub(crate) fn all(nodes: usize) -> BTreeSet<Place> {
        (0..INSTANCES).map(|it| Place::of(it, nodes)).collect()
    }
}

/// Returns the outcomes of a program that are allowed at some place.
pub(crate) type Model = fn(&Program, &Place) -> BTreeSet<Vec<u8>>;

/// Checks that a model knows of each program whether its outcome is possible.
pub(crate) fn check_model(programs: &[Program], model: Model) {
    for program in programs {
        let places = Place::all(program.threads.len());
        let allowed: BTreeSet<Vec<u8>> = places.iter().flat_map(|place| model(program, place)).collect();
        let is_possible = allowed.iter().any(|outcome| outcome.starts_with(program.outcome));
        assert_eq!(is_possible, program.is_possible, "{}", program.name);
        assert!(allowed.len() > 1, "{}", program.name);
    }
}

/// Runs the programs of the part `litmus` on clusters of several sizes, and prints what they had.
pub(crate) fn run_all(programs: &[Program], mode: FaultMode) {
    let sizes: BTreeSet<usize> = programs.iter().map(|program| program.threads.len()).collect();
    for nodes in sizes {
        let printed = run_with_board("litmus", nodes as u32, mode);
        let lines = printed[0].lines().filter(|line| line.contains(" outcomes: "));
        lines.for_each(|line| println!("{line}"));
    }
}

/// Runs all programs that have as many threads as there are nodes: the part of a node.
pub(crate) fn run(
    session: &Session,
    consistency: Consistency,
    programs: &[Program],
    model: Model,
    runs: usize,
) {
    let runs = std::env::var(RUNS).map_or(runs, |runs| runs.parse().expect("a number"));
    let (node, nodes) = (session.node() as usize, session.nodes() as usize);
    let bytes = (INSTANCES * VARIABLES * PAGE_BYTES) as u64;
    let options = RegionOptions::new(bytes).unwrap().consistency(consistency);
    let mode = options.mode;
    let region = session.region(&options).unwrap();
    let mut runner = Runner {
        node,
        nodes,
        consistency,
        thread: session.thread(0).unwrap(),
        board: Board::open(node, nodes),
        dice: ChaCha8Rng::seed_from_u64(node as u64),
        turns: 0,
        region,
    };
    let (mut count, mut seen) = (0, 0);
    for program in programs.iter().filter(|program| program.threads.len() == nodes) {
        let began = Instant::now();
        let mut judge = Judge::new(program, model);
        runner.clear();
        let rounds = runs.div_ceil(INSTANCES);
        for round in 0..rounds {
            runner.round(program, round);
            match node {
                0 => judge.look(&runner, round),
                _ => runner.prepare(),
            }
        }
        count += 1;
        seen += judge.seen.len();
        if node == 0 {
            println!(
                "{}, {mode}, {consistency}: {}, {:.1} s",
                program.name,
                judge.verdict(rounds * INSTANCES),
                began.elapsed().as_secs_f64()
            );
        }
    }
    // Pages of a node that leaves are lost, and node 0 still reads them.
    runner.barrier();
    assert!(
        node > 0 || seen > count,
        "the threads of no program have met: {count} programs, {seen} outcomes"
    );
}

/// A node that runs programs.
struct Runner<'a> {
    node: usize,
    nodes: usize,
    consistency: Consistency,
    region: Region<'a>,
    thread: Thread<'a>,
    board: Board,
    dice: ChaCha8Rng,
    turns: u64,
}

impl Runner<'_> {
    /// Returns the offset of a variable.
    fn offset(&self, instance: usize, variable: usize) -> usize {
        let page = instance * VARIABLES + Place::of(instance, self.nodes).pages[variable];
        page * PAGE_BYTES + variable * LINE_BYTES
    }

    // The processor keeps the order of SeqCst: the outcome is that of the pages.
    fn store(&self, instance: usize, variable: usize, value: u64) {
        let word = self.region.mapping().double_word(self.offset(instance, variable));
        word.store(value, Ordering::SeqCst);
    }

    fn load(&self, instance: usize, variable: usize) -> u64 {
        let word = self.region.mapping().double_word(self.offset(instance, variable));
        word.load(Ordering::SeqCst)
    }

    fn barrier(&mut self) {
        let all = NonZeroU32::new(self.nodes as u32).unwrap();
        self.thread.barrier(0, all).unwrap();
    }

    /// Sets all variables to 0.
    fn clear(&mut self) {
        if self.node == 0 {
            for instance in 0..INSTANCES {
                (0..VARIABLES).for_each(|it| self.store(instance, it, 0));
            }
        }
    }

    /// Gets pages, some or all, so that instances begin with different rights.
    fn prepare(&mut self) {
        let all = 0..self.region.bytes();
        match self.dice.next_u32() % 6 {
            0 => self.region.acquire(all, Access::Read).unwrap(),
            // Under release consistency the models know of no page that may be written at the beginning.
            1 if self.consistency == Consistency::Sequential => {
                self.region.acquire(all, Access::Write).unwrap();
            }
            1 | 2 => {
                for instance in 0..INSTANCES {
                    if self.dice.next_u32().is_multiple_of(2) {
                        self.load(instance, X);
                    }
                }
            }
            // The rights that the last round has left.
            _ => {}
        }
    }

    /// Runs a program once in each instance.
    fn round(&mut self, program: &Program, round: usize) {
        self.barrier();
        for instance in 0..INSTANCES {
            self.turns += 1;
            self.board.meet(self.turns);
            let mut reads = [0; 8];
            let mut read = reads.iter_mut();
            // Pauses of different lengths: the operations of a thread fall into any part of those of another one.
            let pause = 1 << (self.dice.next_u32() % 11);
            for operation in program.threads[self.node] {
                (0..self.dice.next_u32() % pause).for_each(|_| std::hint::spin_loop());
                match *operation {
                    Write(at, value) => self.store(instance, at, written(round, value)),
                    Read(at) => *read.next().unwrap() = digit(self.load(instance, at)),
                    Release => self.thread.release().unwrap(),
                    Acquire => self.thread.acquire().unwrap(),
                }
            }
            let reads = u64::from_ne_bytes(reads);
            self.board
                .word(instance * self.nodes + self.node)
                .store(reads, Ordering::SeqCst);
        }
        self.barrier();
    }
}

/// Returns what a write of a value stores in a round. All bytes differ from those of other values, so that a release brings all of them home at once.
fn written(round: usize, value: u8) -> u64 {
    u64::from_ne_bytes([first_digit(round) + value; 8])
}

/// Returns the byte of which a word consists.
fn digit(word: u64) -> u8 {
    let bytes = word.to_ne_bytes();
    match bytes == [bytes[0]; 8] {
        true => bytes[0],
        false => WRONG,
    }
}

/// Digits of a round are this one and the next three. They come again after 60 rounds.
fn first_digit(round: usize) -> u8 {
    (round % 60 * 4) as u8
}

/// Results of a program at node 0.
struct Judge<'a> {
    program: &'a Program,
    model: Model,
    /// Outcomes allowed at places that were used.
    allowed: BTreeMap<Place, BTreeSet<Vec<u8>>>,
    /// Digits of the variables of each instance when its last round was over.
    digits: Vec<[u8; VARIABLES]>,
    seen: BTreeMap<Vec<u8>, usize>,
}

impl Judge<'_> {
    fn new(program: &Program, model: Model) -> Judge<'_> {
        Judge {
            program,
            model,
            allowed: BTreeMap::new(),
            digits: vec![[0; VARIABLES]; INSTANCES],
            seen: BTreeMap::new(),
        }
    }

    /// Judges the outcomes of a round.
    fn look(&mut self, runner: &Runner<'_>, round: usize) {
        let region = &runner.region;
        region.acquire(0..region.bytes(), Access::Read).unwrap();
        for instance in 0..INSTANCES {
            let end = [X, Y].map(|variable| digit(runner.load(instance, variable)));
            let before = std::mem::replace(&mut self.digits[instance], end);
            let value = |variable: usize, digit: u8| match digit.wrapping_sub(first_digit(round)) {
                _ if digit == before[variable] => 0,
                value @ 1..=3 => value,
                _ => WRONG,
            };
            let mut outcome = Vec::new();
            for (thread, operations) in self.program.threads.iter().enumerate() {
                let reads = runner.board.word(instance * runner.nodes + thread);
                let reads = reads.load(Ordering::SeqCst).to_ne_bytes();
                let variables = operations.iter().filter_map(|operation| match operation {
                    Read(variable) => Some(*variable),
                    _ => None,
                });
                outcome.extend(variables.zip(reads).map(|(variable, read)| value(variable, read)));
            }
            outcome.extend([X, Y].map(|variable| value(variable, end[variable])));
            let place = Place::of(instance, runner.nodes);
            let allowed = self
                .allowed
                .entry(place)
                .or_insert_with(|| (self.model)(self.program, &place));
            assert!(
                allowed.contains(&outcome),
                "{}: {outcome:?} in round {round} at {place:?}",
                self.program.name
            );
            *self.seen.entry(outcome).or_default() += 1;
        }
    }

    /// Returns what was seen.
    fn verdict(&self, runs: usize) -> String {
        let allowed: BTreeSet<_> = self.allowed.values().flatten().collect();
        let seen = self.seen.len();
        let counts: Vec<String> = self
            .seen
            .iter()
            .map(|(it, times)| format!("{it:?} {times}"))
            .collect();
        let counts = counts.join(", ");
        format!("{runs} runs, {seen} of {} outcomes: {counts}", allowed.len())
    }
}
