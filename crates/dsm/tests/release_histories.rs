//! Histories of random programs on real pages with release consistency. Programs without data races must read the last writes, others what release
//! consistency allows.
//!
//! `RDMUX_DSM_HISTORIES=100000` sets the number of histories for each number of nodes, and `RDMUX_DSM_SEED` their seed.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod board;
mod common;
mod happens_before;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use board::{Board, run_with_board};
use common::{MODES, in_threads, number, run_as_node};
use happens_before::{Event, check};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::sync::{Call, Mode};
use rdmux_dsm::{Consistency, FaultMode, Region, RegionOptions, Session, Thread};

const HISTORIES: &str = "RDMUX_DSM_HISTORIES";
const SEED: &str = "RDMUX_DSM_SEED";
/// Histories between two looks at their results, each on pages of its own.
const BATCH: usize = 32;
const PAGE_WORDS: usize = 512;
const PAGES: usize = 2;
const LOCKS: usize = 2;
/// Words that a lock guards, one on each page.
const GUARDED: usize = 2;
/// Words that have an owner from one barrier to the next.
const OWNED: usize = 4;
const WORDS: usize = LOCKS * GUARDED + OWNED;
/// Events of a thread at most.
const EVENTS: usize = 64;

// Numbers of objects.
const BARRIER: u64 = 0;
const FIRST_LOCK: u64 = 1;
const COUNTER: u64 = 100;

/// A task of a program.
#[derive(Clone, Copy, Debug)]
enum Task {
    Read(usize),
    /// Writes a value that no other task writes.
    Write(usize, u64),
    /// Takes a lock, and reads its number; adds 1 to it unless others may share the lock.
    Lock(usize, Mode),
    Unlock(usize, Mode),
    /// Adds 1 to a counter that is no memory.
    Add,
    Barrier,
    /// These two order nothing that the program knows.
    Release,
    Acquire,
}

/// Returns whether the threads access words without an order in a history.
fn is_racy(history: u64) -> bool {
    history % 2 == 1
}

/// Makes the programs of a history.
struct Author {
    dice: ChaCha8Rng,
    threads: usize,
    is_racy: bool,
    writes: u8,
}

impl Author {
    /// Returns the programs of all threads.
    fn programs(seed: u64, history: u64, threads: usize) -> Vec<Vec<Task>> {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        dice.set_stream(history);
        let mut author = Author {
            dice,
            threads,
            is_racy: is_racy(history),
            writes: 0,
        };
        let mut programs = vec![Vec::new(); threads];
        for _ in 0..1 + author.roll(3) {
            // Words without an owner are read by all.
            let owners: [usize; OWNED] = std::array::from_fn(|_| author.roll(threads + 1));
            for (thread, program) in programs.iter_mut().enumerate() {
                (0..1 + author.roll(3)).for_each(|_| author.add_some(program, thread, &owners));
                program.push(Task::Barrier);
            }
        }
        programs
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.dice.next_u32() as usize % sides
    }

    fn write(&mut self, word: usize) -> Task {
        self.writes += 1;
        // All bytes differ from those of other values: no reader sees a part of a word.
        Task::Write(word, u64::from_ne_bytes([self.writes; 8]))
    }

    /// Adds some tasks to the program of a thread.
    fn add_some(&mut self, program: &mut Vec<Task>, thread: usize, owners: &[usize; OWNED]) {
        match self.roll(8) {
            0..4 => {
                let lock = self.roll(LOCKS);
                let mode = match self.roll(4) {
                    0 => Mode::Shared,
                    _ => Mode::Exclusive,
                };
                program.push(Task::Lock(lock, mode));
                for _ in 0..1 + self.roll(3) {
                    let word = match self.is_racy {
                        true => self.roll(WORDS),
                        false => lock * GUARDED + self.roll(GUARDED),
                    };
                    let writes = self.roll(2) == 0 && (self.is_racy || mode == Mode::Exclusive);
                    program.push(if writes {
                        self.write(word)
                    } else {
                        Task::Read(word)
                    });
                }
                program.push(Task::Unlock(lock, mode));
            }
            4..6 => {
                for _ in 0..1 + self.roll(3) {
                    let word = match self.is_racy {
                        true => self.roll(WORDS),
                        false => LOCKS * GUARDED + self.roll(OWNED),
                    };
                    let owner = word.checked_sub(LOCKS * GUARDED).map(|word| owners[word]);
                    let is_own = self.is_racy || owner == Some(thread);
                    if is_own && self.roll(2) == 0 {
                        program.push(self.write(word));
                    } else if is_own || owner == Some(self.threads) {
                        program.push(Task::Read(word));
                    }
                }
            }
            6 => program.push(Task::Add),
            _ if self.roll(2) == 0 => program.push(Task::Release),
            _ => program.push(Task::Acquire),
        }
    }
}

/// Returns the event that a task was. `result` is what it has read; the counter had `added` before the history.
fn event(task: Task, result: u64, added: u64) -> Option<Event> {
    Some(match task {
        Task::Read(place) => Event::Read { place, value: result },
        Task::Write(place, value) => Event::Write { place, value },
        Task::Lock(lock, mode) => Event::Lock {
            lock,
            number: result,
            is_shared: mode == Mode::Shared,
        },
        Task::Unlock(lock, _) => Event::Unlock { lock },
        Task::Add => Event::Add {
            word: 0,
            value: result.wrapping_sub(added),
        },
        Task::Barrier => Event::Barrier,
        Task::Release | Task::Acquire => return None,
    })
}

/// Checks that a history is allowed, with so many races; `None` if it is not.
fn expect(name: &str, threads: &[&[Event]], races: Option<usize>) {
    let threads: Vec<Vec<Event>> = threads.iter().map(|events| events.to_vec()).collect();
    let verdict = check(&threads);
    assert_eq!(verdict.clone().ok(), races, "{name}: {verdict:?}");
}

fn read(place: usize, value: u64) -> Event {
    Event::Read { place, value }
}

fn write(place: usize, value: u64) -> Event {
    Event::Write { place, value }
}

fn lock(number: u64) -> Event {
    Event::Lock {
        lock: 0,
        number,
        is_shared: false,
    }
}

fn lock_shared(number: u64) -> Event {
    Event::Lock {
        lock: 0,
        number,
        is_shared: true,
    }
}

fn add(value: u64) -> Event {
    Event::Add { word: 0, value }
}

#[test]
fn check__refuses_histories_that_release_consistency_does_not_allow() {
    const UNLOCK: Event = Event::Unlock { lock: 0 };
    const BARRIER: Event = Event::Barrier;
    expect("own write", &[&[write(0, 1), read(0, 1)]], Some(0));
    expect("own write lost", &[&[write(0, 1), read(0, 0)]], None);
    expect(
        "own write replaced",
        &[&[write(0, 1), write(0, 2), read(0, 1)]],
        None,
    );
    expect("own write to come", &[&[read(0, 1), write(0, 1)]], None);
    expect("of no write", &[&[write(0, 1), read(0, 2)]], None);
    expect("of another place", &[&[write(0, 1), read(1, 1)]], None);

    let writer = [lock(0), write(0, 1), UNLOCK];
    let reader = |number, value| [lock(number), read(0, value), UNLOCK];
    expect("lock", &[&writer, &reader(1, 1)], Some(0));
    expect("lock, stale", &[&writer, &reader(1, 0)], None);
    expect("lock, twice the same number", &[&writer, &reader(0, 1)], None);
    expect("lock, a number is missing", &[&writer, &reader(2, 1)], None);
    let later = [lock(1), write(0, 1), UNLOCK];
    expect("lock, before the write", &[&later, &reader(0, 0)], Some(0));
    expect("lock, of a later write", &[&later, &reader(0, 1)], None);

    let shared = |value| [lock_shared(1), read(0, value), UNLOCK];
    let last = [lock(1), write(0, 2), UNLOCK];
    let threads = |value| {
        [
            writer.to_vec(),
            shared(1).to_vec(),
            shared(value).to_vec(),
            last.to_vec(),
        ]
    };
    assert_eq!(check(&threads(1)), Ok(0));
    assert!(check(&threads(0)).is_err(), "a shared lock, stale");
    assert!(check(&threads(2)).is_err(), "a shared lock, of a later write");

    expect(
        "barrier",
        &[&[write(0, 1), BARRIER], &[BARRIER, read(0, 1)]],
        Some(0),
    );
    expect(
        "barrier, stale",
        &[&[write(0, 1), BARRIER], &[BARRIER, read(0, 0)]],
        None,
    );
    expect(
        "barrier, of a later write",
        &[&[BARRIER, write(0, 1)], &[read(0, 1), BARRIER]],
        None,
    );
    expect(
        "barrier without a party",
        &[&[BARRIER, write(0, 1)], &[read(0, 1)]],
        None,
    );

    expect("word", &[&[write(0, 1), add(0)], &[add(1), read(0, 1)]], Some(0));
    expect(
        "word, stale",
        &[&[write(0, 1), add(0)], &[add(1), read(0, 0)]],
        None,
    );
    expect(
        "word, before the write",
        &[&[write(0, 1), add(1)], &[add(0), read(0, 0)]],
        Some(1),
    );
    expect("word, a circle", &[&[add(1), BARRIER], &[BARRIER, add(0)]], None);

    // The order goes on from one thread to the next.
    let (first, second) = ([write(0, 1), add(0)], [add(1), lock(0), UNLOCK]);
    expect("chain", &[&first, &second, &[lock(1), read(0, 1)]], Some(0));
    expect("chain, stale", &[&first, &second, &[lock(1), read(0, 0)]], None);

    // Reads that race may return what is old, in any order, but nothing else.
    let writes = [write(0, 1), write(0, 2)];
    expect("race", &[&writes, &[read(0, 2), read(0, 1), read(0, 0)]], Some(6));
    expect(
        "race of writes",
        &[&[write(0, 1)], &[write(0, 2), read(0, 1)]],
        Some(2),
    );
    expect(
        "race, replaced",
        &[&[write(0, 1), write(0, 2), add(0)], &[add(1), read(0, 1)]],
        None,
    );
}

#[test]
fn programs__without_races_have_none_and_others_have_some() {
    let races = |history: u64| {
        // One thread runs after the other, from each barrier to the next.
        let mut memory = [0; WORDS];
        let (mut numbers, mut added) = ([0; LOCKS], 0);
        let mut programs: Vec<_> = Author::programs(7, history, 3)
            .into_iter()
            .map(|program| program.into_iter().peekable())
            .collect();
        let mut threads = vec![Vec::new(); programs.len()];
        while programs.iter_mut().any(|program| program.peek().is_some()) {
            for (program, events) in programs.iter_mut().zip(&mut threads) {
                for task in program.by_ref() {
                    let before = |number: &mut u64| {
                        *number += 1;
                        *number - 1
                    };
                    let result = match task {
                        Task::Read(word) => memory[word],
                        Task::Write(word, value) => std::mem::replace(&mut memory[word], value),
                        Task::Lock(lock, Mode::Exclusive) => before(&mut numbers[lock]),
                        Task::Lock(lock, Mode::Shared) => numbers[lock],
                        Task::Add => before(&mut added),
                        Task::Unlock(..) | Task::Barrier | Task::Release | Task::Acquire => 0,
                    };
                    events.extend(event(task, result, 0));
                    if matches!(task, Task::Barrier) {
                        break;
                    }
                }
                assert!(events.len() <= EVENTS);
            }
        }
        check(&threads).unwrap()
    };
    let is_racy = |history: &u64| is_racy(*history);
    assert!(
        (0..200)
            .filter(|it| !is_racy(it))
            .all(|history| races(history) == 0)
    );
    assert!(
        (0..200)
            .filter(is_racy)
            .filter(|history| races(*history) > 0)
            .count()
            > 50
    );
}

#[test]
fn node() {
    run_as_node(&[("single", single), ("paired", paired)]);
}

fn single(session: &Session) {
    histories(session, 1);
}

fn paired(session: &Session) {
    histories(session, 2);
}

/// Runs programs by some threads of each node.
fn histories(session: &Session, threads: u16) {
    let (node, nodes) = (session.node() as usize, session.nodes() as usize);
    let options = RegionOptions::new((BATCH * PAGES * PAGE_WORDS * 8) as u64).unwrap();
    let region = session
        .region(&options.consistency(Consistency::Release))
        .unwrap();
    let board = Board::open(node, nodes);
    in_threads(0..threads, |number| {
        let own = node * usize::from(threads) + usize::from(number);
        let runner = Runner {
            own,
            all: nodes * usize::from(threads),
            region: &region,
            board: &board,
            thread: session.thread(number).unwrap(),
            dice: ChaCha8Rng::seed_from_u64(own as u64),
        };
        runner.run();
    });
}

/// A thread that runs programs.
struct Runner<'a> {
    own: usize,
    /// Threads of all nodes.
    all: usize,
    region: &'a Region<'a>,
    board: &'a Board,
    thread: Thread<'a>,
    dice: ChaCha8Rng,
}

impl Runner<'_> {
    /// Returns a word of an instance.
    fn word(&self, instance: usize, word: usize) -> &AtomicU64 {
        let page = instance * PAGES + word % PAGES;
        let word = page * PAGE_WORDS + word / PAGES;
        self.region.mapping().double_word(word * 8)
    }

    /// Returns the place for what a task has read.
    fn result(&self, instance: usize, thread: usize, nth: usize) -> &AtomicU64 {
        self.board.word((instance * self.all + thread) * EVENTS + nth)
    }

    /// Returns the number of a lock in an instance. It is no part of the memory under test: a thread that acquires nothing must not read an old one.
    fn lock_number(&self, instance: usize, lock: usize) -> &AtomicU64 {
        self.board
            .word(BATCH * self.all * EVENTS + instance * LOCKS + lock)
    }

    fn barrier(&mut self) {
        let all = NonZeroU32::new(self.all as u32).unwrap();
        self.thread.barrier(BARRIER, all).unwrap();
    }

    fn call(&mut self, call: Call) {
        self.thread.call(call).unwrap();
    }

    fn run(mut self) {
        let (seed, batches) = (number(SEED, 1), number(HISTORIES, 160).div_ceil(BATCH as u64));
        // Value of the counter, histories in which a thread has read what another one has written, and races.
        let (mut added, mut met, mut races) = (0, 0, 0);
        for batch in 0..batches {
            if self.own == 0 {
                for instance in 0..BATCH {
                    (0..WORDS).for_each(|it| self.word(instance, it).store(0, Ordering::SeqCst));
                    (0..LOCKS).for_each(|it| self.lock_number(instance, it).store(0, Ordering::SeqCst));
                }
            }
            self.barrier();
            let histories = batch * BATCH as u64..(batch + 1) * BATCH as u64;
            for (instance, history) in histories.clone().enumerate() {
                let programs = Author::programs(seed, history, self.all);
                for (nth, task) in programs[self.own].iter().enumerate() {
                    (0..self.dice.next_u32() % 200).for_each(|_| std::hint::spin_loop());
                    let value = self.carry_out(instance, *task);
                    self.result(instance, self.own, nth)
                        .store(value, Ordering::SeqCst);
                }
            }
            self.barrier();
            for (instance, history) in histories.enumerate().filter(|_| self.own == 0) {
                let programs = Author::programs(seed, history, self.all);
                let mut threads = self.events(instance, &programs, added);
                met += usize::from(has_met(&threads));
                // Each program ends with a barrier, so the first thread reads the last writes.
                threads[0].extend((0..WORDS).map(|place| Event::Read {
                    place,
                    value: self.word(instance, place).load(Ordering::SeqCst),
                }));
                let found = check(&threads);
                let found =
                    found.unwrap_or_else(|why| panic!("seed {seed}, history {history}: {why}\n{threads:#?}"));
                assert!(found == 0 || is_racy(history), "{threads:#?}");
                races += found;
                let adds = programs.iter().flatten().filter(|task| matches!(task, Task::Add));
                added += adds.count() as u64;
            }
        }
        // Pages of a node that leaves are lost, and the first thread still reads them.
        self.barrier();
        if self.own == 0 {
            assert!(met > 0, "no thread has read what another one has written");
            assert!(races > 0, "no program has a data race");
            let histories = batches * BATCH as u64;
            println!("seed {seed}: {histories} histories, threads have met in {met}, {races} data races");
        }
    }

    /// Carries out a task. Returns what it has read.
    fn carry_out(&mut self, instance: usize, task: Task) -> u64 {
        match task {
            Task::Read(word) => return self.word(instance, word).load(Ordering::SeqCst),
            Task::Write(word, value) => self.word(instance, word).store(value, Ordering::SeqCst),
            Task::Lock(lock, mode) => {
                let object = FIRST_LOCK + lock as u64;
                self.call(Call::Lock { object, mode });
                let number = self.lock_number(instance, lock);
                let before = number.load(Ordering::SeqCst);
                if mode == Mode::Exclusive {
                    number.store(before + 1, Ordering::SeqCst);
                }
                return before;
            }
            Task::Unlock(lock, mode) => {
                let object = FIRST_LOCK + lock as u64;
                self.call(Call::Unlock { object, mode });
            }
            Task::Add => return self.thread.fetch_add(COUNTER, 1).unwrap(),
            Task::Barrier => self.barrier(),
            Task::Release => self.thread.release().unwrap(),
            Task::Acquire => self.thread.acquire().unwrap(),
        }
        0
    }

    /// Returns what has happened in an instance. The counter had `added` before.
    fn events(&self, instance: usize, programs: &[Vec<Task>], added: u64) -> Vec<Vec<Event>> {
        let events = |(thread, program): (usize, &Vec<Task>)| {
            let read = |nth: usize| self.result(instance, thread, nth).load(Ordering::SeqCst);
            let event = |(nth, task): (usize, &Task)| event(*task, read(nth), added);
            program.iter().enumerate().filter_map(event).collect()
        };
        programs.iter().enumerate().map(events).collect()
    }
}

/// Returns whether a thread has read what another one has written.
fn has_met(threads: &[Vec<Event>]) -> bool {
    let reads = |events: &[Event], written: u64| {
        let mut events = events.iter();
        events.any(|event| matches!(event, Event::Read { value, .. } if *value == written))
    };
    threads.iter().enumerate().any(|(writer, events)| {
        let mut others = threads.iter().enumerate().filter(|(reader, _)| *reader != writer);
        others.any(|(_, other)| {
            let mut events = events.iter();
            events.any(|event| matches!(event, Event::Write { value, .. } if reads(other, *value)))
        })
    })
}

fn run_all(mode: FaultMode) {
    // Threads of a node share its copies.
    for (part, nodes) in [
        ("single", 2),
        ("single", 3),
        ("single", 4),
        ("paired", 2),
        ("paired", 3),
    ] {
        let printed = run_with_board(part, nodes, mode);
        let mut lines = printed[0].lines();
        let line = lines.find(|line| line.starts_with("seed")).expect("its results");
        println!("{mode}, {nodes} nodes, {part} threads, {line}");
    }
}

#[test]
fn histories__of_pages_answered_by_the_service_thread_are_release_consistent() {
    run_all(MODES[0]);
}

#[test]
fn histories__of_pages_answered_by_the_faulting_thread_are_release_consistent() {
    run_all(MODES[1]);
}

#[test]
fn histories__of_pages_of_mprotect_are_release_consistent() {
    run_all(MODES[2]);
}
