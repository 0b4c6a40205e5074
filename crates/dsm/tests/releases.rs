//! Nodes as processes that share memory with release consistency.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;

use common::{MODES, run, run_as_node, run_with};
use rdmux_dsm::{Consistency, Region, RegionOptions, Session};

const PAGE: usize = 4096;

#[test]
fn node() {
    run_as_node(&[
        ("shared", shared),
        ("locked", locked),
        ("queue", queue),
        ("counted", counted),
    ]);
}

fn region(session: &Session, pages: usize) -> Region<'_> {
    let options = RegionOptions::new((pages * PAGE) as u64).unwrap();
    session
        .region(&options.consistency(Consistency::Release))
        .unwrap()
}

fn all(session: &Session, threads: u32) -> NonZeroU32 {
    NonZeroU32::new(session.nodes() * threads).unwrap()
}

/// In each round, two threads of each node write words of their own in the same pages, and then all read all words.
fn shared(session: &Session) {
    const PAGES: usize = 5;
    const ROUNDS: u64 = 12;
    let region = region(session, PAGES);
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let threads = 2 * session.nodes() as usize;
    let work = |number: u16| {
        let mut thread = session.thread(number).unwrap();
        let own = 2 * session.node() as usize + usize::from(number);
        for round in 1..=ROUNDS {
            for at in (own..words.len()).step_by(threads) {
                words.set(at, round << 32 | at as u64);
            }
            thread.barrier(0, all(session, 2)).unwrap();
            for at in 0..words.len() {
                assert_eq!(
                    words.get(at),
                    round << 32 | at as u64,
                    "word {at} of round {round}"
                );
            }
            thread.barrier(1, all(session, 2)).unwrap();
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|number| drop(scope.spawn(move || work(number)))));
}

#[test]
fn barrier__all_see_the_words_that_others_have_written_in_the_same_pages() {
    for mode in MODES {
        for nodes in 1..=3 {
            run("shared", nodes, mode);
        }
    }
}

/// Threads of all nodes add to words of one page, each under a lock of its own.
fn locked(session: &Session) {
    const ROUNDS: u64 = 60;
    const WORDS: u64 = 3;
    let region = region(session, 2);
    let words = region.array::<u64>(PAGE as u64, WORDS as usize);
    let work = |number: u16| {
        let mut thread = session.thread(number).unwrap();
        for round in 0..ROUNDS {
            let word = (round + u64::from(number)) % WORDS;
            let guard = thread.lock(word).unwrap();
            words.set(word as usize, words.get(word as usize) + 1);
            drop(guard);
        }
        thread.barrier(1, all(session, 2)).unwrap();
        let sum: u64 = (0..WORDS as usize).map(|word| words.get(word)).sum();
        assert_eq!(sum, u64::from(2 * session.nodes()) * ROUNDS);
        thread.barrier(1, all(session, 2)).unwrap();
    };
    std::thread::scope(|scope| (0..2).for_each(|number| drop(scope.spawn(move || work(number)))));
}

#[test]
fn lock__of_one_word_does_not_lose_writes_to_its_neighbours() {
    for mode in MODES {
        run("locked", 3, mode);
    }
}

/// The first node takes what the others put into a queue of one place.
fn queue(session: &Session) {
    const ITEMS: u64 = 30;
    const EMPTY: u64 = 0;
    let (lock, is_full, is_free) = (1, 2, 3);
    let region = region(session, 1);
    let place = region.array::<u64>(0, 1);
    let mut thread = session.thread(0).unwrap();
    if session.node() == 0 {
        let mut sum = 0;
        for _ in 0..ITEMS * u64::from(session.nodes() - 1) {
            let mut guard = thread.lock(lock).unwrap();
            while place.get(0) == EMPTY {
                guard.wait(is_full).unwrap();
            }
            sum += place.get(0);
            place.set(0, EMPTY);
            drop(guard);
            thread.signal(is_free).unwrap();
        }
        assert_eq!(sum, u64::from(session.nodes() - 1) * (1..=ITEMS).sum::<u64>());
    } else {
        for item in 1..=ITEMS {
            let mut guard = thread.lock(lock).unwrap();
            while place.get(0) != EMPTY {
                guard.wait(is_free).unwrap();
            }
            place.set(0, item);
            drop(guard);
            thread.signal(is_full).unwrap();
        }
    }
    thread.barrier(0, all(session, 1)).unwrap();
}

#[test]
fn wait__of_a_queue_between_nodes() {
    run("queue", 3, MODES[0]);
}

/// Two nodes write the halves of all pages. Each page moves once for a round of the node that is not its home, and what nobody writes moves once.
fn counted(session: &Session) {
    const PAGES: usize = 8;
    const ROUNDS: u64 = 10;
    let region = region(session, 2 * PAGES);
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let unchanged = region.array::<u64>((PAGES * PAGE) as u64, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let node = session.node() as usize;
    for round in 1..=ROUNDS {
        for page in 0..PAGES {
            words.set(page * PAGE / 8 + node, round);
        }
        thread.barrier(0, all(session, 1)).unwrap();
        for page in 0..PAGES {
            assert_eq!(words.get(page * PAGE / 8 + 1 - node), round);
            assert_eq!(unchanged.get(page * PAGE / 8), 0);
        }
        thread.barrier(0, all(session, 1)).unwrap();
    }
    // Half of the pages have the other node as their home.
    let moved = PAGES as u64 / 2;
    let stat = region.stat();
    assert_eq!(stat.fetches, moved * (ROUNDS + 1) + moved, "{stat:?}");
}

#[test]
fn barrier__takes_away_the_pages_that_were_written_and_no_others() {
    for mode in MODES {
        run("counted", 2, mode);
    }
}

#[test]
fn packets__that_are_lost_change_no_contents() {
    let network = [
        ("RDMUX_SHM", "off"),
        ("RDMUX_FAULT", "loss=2%,dup=2%,reorder=2%,corrupt=1%,seed=5"),
    ];
    run_with("shared", 3, MODES[1], &network);
    run_with("locked", 3, MODES[0], &network);
}
