//! Random runs of release consistency with more nodes, threads and units than the model checker can do.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod release_world;
mod seeds;

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;

use release_world::{Op, WORDS, Worlds};
use seeds::below;

/// Nodes of a run at most.
const NODES: usize = 4;
/// Units of a run at most.
const UNITS: usize = 6;
/// Locks that guard words. One more has no holder: to give it back is a release that has no acquire.
const LOCKS: usize = 3;

/// Threads that may access a word until the next barrier.
#[derive(Clone, Copy)]
enum Rule {
    /// The one that has a lock.
    Guarded(usize),
    /// One alone.
    Owned(usize),
    /// All, to read.
    ReadOnly,
    /// All: there are data races.
    Racy,
}

impl Rule {
    fn draw(dice: &mut ChaCha8Rng, is_racy: bool, threads: usize) -> Rule {
        match below(dice, 8) {
            _ if is_racy => Rule::Racy,
            0 => Rule::ReadOnly,
            1 | 2 => Rule::Owned(below(dice, threads)),
            _ => Rule::Guarded(below(dice, LOCKS)),
        }
    }

    /// Returns whether a thread may write the word, or nothing if it may not even read it.
    fn may_write(self, thread: usize, held: Option<usize>) -> Option<bool> {
        match self {
            Rule::Guarded(lock) => (held == Some(lock)).then_some(true),
            Rule::Owned(owner) => (owner == thread).then_some(true),
            Rule::ReadOnly => Some(false),
            Rule::Racy => Some(true),
        }
    }
}

/// Values that programs write.
struct Values {
    /// The last one of each word.
    last: Vec<u8>,
    /// Some writes have the value of another one: one that the copy has already is not flushed.
    may_repeat: bool,
}

impl Values {
    fn draw(&mut self, dice: &mut ChaCha8Rng, word: usize) -> u8 {
        if !self.may_repeat || below(dice, 8) > 0 {
            self.last[word] = self.last[word] % u8::MAX + 1;
        }
        self.last[word]
    }
}

/// Adds what a thread does until the next barrier. There is a rule for each word.
fn add_sections(
    dice: &mut ChaCha8Rng,
    sections: usize,
    rules: &[Rule],
    thread: usize,
    values: &mut Values,
    ops: &mut Vec<Op>,
) {
    for _ in 0..sections {
        let lock = below(dice, LOCKS + 1);
        let held = Some(lock).filter(|it| *it < LOCKS);
        if held.is_some() {
            ops.push(Op::Lock(lock));
        }
        let rule = |word: usize| Some((word, rules[word].may_write(thread, held)?));
        let usable: Vec<(usize, bool)> = (0..rules.len()).filter_map(rule).collect();
        let accesses = if usable.is_empty() { 0 } else { below(dice, 5) };
        for _ in 0..accesses {
            let (word, may_write) = usable[below(dice, usable.len())];
            let (unit, part) = (word / WORDS, word % WORDS);
            if !may_write || below(dice, 2) == 0 {
                ops.push(Op::Read(unit, part));
                continue;
            }
            ops.push(Op::Write(unit, part, values.draw(dice, word)));
        }
        if held.is_some() || below(dice, 2) == 0 {
            ops.push(Op::Unlock(lock));
        }
    }
}

/// Returns the programs of threads, and marks of the words that have data races.
fn programs(
    dice: &mut ChaCha8Rng,
    words: usize,
    threads: usize,
    may_crash: bool,
    may_repeat: bool,
) -> (Vec<Vec<Op>>, Vec<bool>) {
    let has_races = below(dice, 3) == 0;
    let is_racy = |_| has_races && below(dice, 3) == 0;
    let racy: Vec<bool> = (0..words).map(is_racy).collect();
    let mut programs: Vec<Vec<Op>> = vec![vec![]; threads];
    let last = vec![0; words];
    let mut values = Values { last, may_repeat };
    // A thread that has crashed comes to no barrier.
    let (rounds, sections_max) = if may_crash { (1, 8) } else { (3, 3) };
    for _ in 0..rounds {
        let rule = |is_racy: &bool| Rule::draw(dice, *is_racy, threads);
        let rules: Vec<Rule> = racy.iter().map(rule).collect();
        for (thread, ops) in programs.iter_mut().enumerate() {
            let sections = 1 + below(dice, sections_max);
            add_sections(dice, sections, &rules, thread, &mut values, ops);
            if !may_crash {
                ops.push(Op::Barrier);
            }
        }
    }
    programs.iter_mut().for_each(|ops| ops.push(Op::Unlock(LOCKS)));
    (programs, racy)
}

/// Runs a world to its end, and returns the numbers of steps and of operations of programs.
fn run(seed: u64) -> (usize, usize) {
    let dice = &mut ChaCha8Rng::seed_from_u64(seed);
    let (nodes, units) = (2 + below(dice, NODES - 1), 1 + below(dice, UNITS));
    let crash = Some(below(dice, nodes)).filter(|_| below(dice, 2) == 0);
    // A node that may crash is the home of some units, or of none.
    let spared = crash.filter(|_| below(dice, 2) == 0);
    let home = |_| match spared {
        Some(spared) => (spared + 1 + below(dice, nodes - 1)) % nodes,
        None => below(dice, nodes),
    };
    let homes: Vec<usize> = (0..units).map(home).collect();
    // A thread that uses a lost unit ends, and its node goes on. What the thread has not released may then come home at any later time, by a release of
    // another thread of the node, which the model does not know; or is there, without a notice, if the node is the home.
    let is_first_touch = below(dice, 3) == 0;
    let may_lose = crash.is_some_and(|it| is_first_touch || homes.contains(&it));
    let threads_max = if may_lose { 1 } else { 2 };
    let at = |node: usize| vec![node; 1 + below(dice, threads_max)];
    let places: Vec<usize> = (0..nodes).flat_map(at).collect();
    let (programs, racy) = programs(dice, units * WORDS, places.len(), crash.is_some(), !may_lose);
    let programs = programs.iter().map(Vec::as_slice);
    let threads: Vec<(usize, &[Op])> = places.into_iter().zip(programs).collect();
    let worlds = Worlds {
        is_first_touch,
        locks: LOCKS + 1,
        racy: &racy,
        slots: 1 + below(dice, 4),
        run_max: 1 + below(dice, 3) as u32,
        log: 1 + below(dice, 8),
        duplicates: below(dice, 20),
        crash,
        delays: below(dice, 2) == 0,
        ..release_world::world("random", &homes, &threads)
    };
    let played = worlds.play(|end| below(dice, end));
    assert!(
        played.broken.is_none(),
        "{} in {worlds:?}: RDMUX_DSM_SEED={seed} cargo test -p rdmux-dsm --test release_random",
        played.broken.unwrap()
    );
    (played.steps, played.operations)
}

#[test]
fn release__keeps_the_rules_in_random_runs() {
    seeds::run_all(run, "operations");
}
