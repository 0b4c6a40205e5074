//! Nodes as processes that share memory with release consistency.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use common::{
    LONG, MODES, Node, in_threads, named, run, run_as_node, run_with, start, stay, succeed, until, wait_for,
};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Consistency, Error, Placement, Region, RegionOptions, Session, Stat};
use rustix::process::Signal;

const PAGE: usize = 4096;

#[test]
fn node() {
    run_as_node(&[
        ("shared", shared),
        ("panicking", panicking),
        ("sized", sized),
        ("unequal", unequal),
        ("locked", locked),
        ("queue", queue),
        ("counted", counted),
        ("turns", turns),
        ("added", added),
        ("filled", filled),
        ("homeless", homeless),
        ("unlocked", unlocked),
        ("busy", busy),
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
    in_threads(0..2, work);
}

#[test]
fn barrier__all_see_the_words_that_others_have_written_in_the_same_pages() {
    for mode in MODES {
        for nodes in 1..=3 {
            run("shared", nodes, mode);
        }
    }
}

/// A thread of the last node panics, while all others wait for it.
fn panicking(session: &Session) {
    let is_last = session.node() + 1 == session.nodes();
    in_threads(0..2, |number| {
        let mut thread = session.thread(number).unwrap();
        assert!(!is_last || number == 0, "thread {number} does not come");
        thread.barrier(0, all(session, 2)).unwrap();
    });
}

#[test]
fn in_threads__with_a_panic_of_one_ends_the_test_with_its_message() {
    let nodes = start("panicking", 2, MODES[0], LEASE);
    let (sender, ends) = mpsc::channel();
    std::thread::spawn(move || sender.send(catch_unwind(AssertUnwindSafe(|| succeed(nodes)))));
    let panic = ends.recv_timeout(LONG).expect("no node waits").unwrap_err();
    let message = panic.downcast::<String>().unwrap();
    assert!(message.contains("thread 1 does not come"), "{message}");
}

/// Node 1 wants another second region than the others, so nobody gets it. All go on to use the first one, also when node 2 is gone, of which the
/// others tell each other for both regions.
fn unequal(session: &Session) {
    let region = region(session, 1);
    let pages = 2 + u64::from(session.node() == 1);
    let options = RegionOptions::new(pages * PAGE as u64).unwrap();
    let refused = session.region(&options.consistency(Consistency::Release));
    assert!(refused.is_err(), "{refused:?}");
    let words = region.array::<u64>(0, 3);
    let mut thread = session.thread(0).unwrap();
    words.set(session.node() as usize, 7);
    thread.barrier(0, all(session, 1)).unwrap();
    assert_eq!([0, 1, 2].map(|at| words.get(at)), [7; 3]);
    thread.barrier(0, all(session, 1)).unwrap();
    println!("@ ready");
    if session.node() == 2 {
        stay();
    }
    let error = thread.barrier(0, all(session, 1)).unwrap_err();
    assert_eq!(named(&error), 2, "{error}");
    for object in 0..20 {
        match thread.lock(object) {
            Ok(_) => words.set(session.node() as usize, object),
            Err(error) => assert_eq!(named(&error), 2, "{error}"),
        }
    }
    println!("@ ends");
    stay();
}

#[test]
fn synchronisation__goes_on_after_a_region_that_could_not_be_made() {
    for mode in MODES {
        let mut nodes = start("unequal", 3, mode, LEASE);
        wait_for(&mut nodes, "@ ready");
        drop(nodes.remove(2));
        wait_for(&mut nodes, "@ ends");
    }
}

/// All nodes write words of the same units, of several sizes, at homes in turn and where the first of them has touched a unit, and read all.
fn sized(session: &Session) {
    const BYTES: u64 = 32 * PAGE as u64;
    const STEP: usize = 24;
    let mut thread = session.thread(0).unwrap();
    let (own, nodes) = (u64::from(session.node()), u64::from(session.nodes()));
    let units = [64, 1024, 4 * PAGE as u64];
    let settings = units.map(|unit| [Placement::InTurn(1), Placement::FirstTouch].map(|homes| (unit, homes)));
    for (unit, homes) in settings.into_iter().flatten() {
        let options = RegionOptions::new(BYTES)
            .unwrap()
            .consistency(Consistency::Release);
        let options = RegionOptions {
            unit,
            homes,
            ..options
        };
        let region = session.region(&options).unwrap();
        let word = |at: u64| region.mapping().double_word(region.place(at) as usize);
        for round in 1..5 {
            for at in (0..BYTES)
                .step_by(STEP)
                .filter(|at| at / STEP as u64 % nodes == own)
            {
                word(at).store(at << 8 | round, Ordering::Relaxed);
            }
            thread.barrier(0, all(session, 1)).unwrap();
            for at in (0..BYTES).step_by(STEP) {
                assert_eq!(word(at).load(Ordering::Relaxed), at << 8 | round, "{options:?}");
            }
            thread.barrier(0, all(session, 1)).unwrap();
        }
    }
}

#[test]
fn barrier__all_see_the_words_that_others_have_written_in_the_same_units() {
    for mode in MODES {
        run("sized", 3, mode);
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
    in_threads(0..2, work);
}

#[test]
fn lock__of_one_word_does_not_lose_writes_to_its_neighbours() {
    for mode in MODES {
        run("locked", 3, mode);
    }
}

/// Two threads of each node add to the node's elements, which share a page with those of the other node, and release meanwhile.
fn added(session: &Session) {
    const ROUNDS: u64 = 200;
    let region = region(session, 1);
    let words = region.array::<u64>(0, 2 * session.nodes() as usize);
    let node = session.node() as usize;
    let work = |number: u16| {
        let mut thread = session.thread(number).unwrap();
        for round in 0..ROUNDS {
            words.fetch_add(2 * node, 1);
            let mut before = words.get(2 * node + 1);
            while let Err(found) = words.compare_exchange(2 * node + 1, before, before + 2) {
                before = found;
            }
            if round % 20 == 0 {
                thread.release().unwrap();
            }
        }
        thread.barrier(0, all(session, 2)).unwrap();
        for node in 0..session.nodes() as usize {
            let sums = (words.get(2 * node), words.get(2 * node + 1));
            assert_eq!(sums, (2 * ROUNDS, 4 * ROUNDS), "node {node}");
        }
        thread.barrier(0, all(session, 2)).unwrap();
    };
    in_threads(0..2, work);
}

#[test]
fn fetch_add__and_compare_exchange_lose_nothing_between_threads_of_a_node() {
    for mode in MODES {
        run("added", 2, mode);
    }
}

fn queue(session: &Session) {
    common::queue(session, &region(session, 1), 30);
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
    // Each node has flushed a page for each that it has read for a flush, some of them with their twins.
    assert_eq!((stat.flushes_sent, stat.twins), (moved * ROUNDS, moved * ROUNDS));
    assert_eq!(stat.landed_units + stat.merged_units, stat.flushes, "{stat:?}");
    let copies = stat.landed_units + 2 * stat.merged_units;
    assert_eq!(stat.flush_read_bytes, copies * PAGE as u64, "{stat:?}");
}

#[test]
fn barrier__takes_away_the_pages_that_were_written_and_no_others() {
    for mode in MODES {
        run("counted", 2, mode);
    }
}

/// The nodes write words of the same pages in turn, whose home is node 1. Each counts what it has done for that.
fn turns(session: &Session) {
    /// Runs of 16 pages and of 4.
    const PAGES: usize = 20;
    const HEADER: u64 = 16;
    const NOTICE: u64 = 8;
    let mut options = RegionOptions::new((PAGES * PAGE) as u64)
        .unwrap()
        .consistency(Consistency::Release);
    options.homes = Placement::node(1);
    let region = session.region(&options).unwrap();
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let node = session.node();
    // Pages that node 1 has written since the last flush of node 0 are read with their twins.
    for (step, writer) in (1..).zip([0, 1, 0, 0]) {
        for page in (0..PAGES).filter(|_| node == writer) {
            words.set(page * PAGE / 8 + node as usize, step);
        }
        thread.barrier(0, all(session, 1)).unwrap();
        // No acquire finds notices of two steps.
        thread.barrier(0, all(session, 1)).unwrap();
    }
    let pages = PAGES as u64;
    let acquires = 8;
    let common = |stat: Stat| Stat {
        acquires,
        // Two more of each log with something new.
        log_reads: acquires + 2 * (4 - stat.releases),
        log_read_bytes: acquires * HEADER + (4 - stat.releases) * (NOTICE + HEADER),
        downgrades: stat.releases * pages,
        messages: 6,
        ..stat
    };
    let expected = match node {
        0 => common(Stat {
            write_faults: 2 * pages,
            upgrade_faults: pages,
            fetches: 2 * pages,
            fetched_bytes: 2 * pages * PAGE as u64,
            invalidations: pages,
            releases: 3,
            twins: 3 * pages,
            flushes_sent: 6,
            ..Stat::default()
        }),
        _ => common(Stat {
            write_faults: pages,
            releases: 1,
            flushes: 6,
            landed_units: 2 * pages,
            merged_units: pages,
            flush_read_bytes: 4 * pages * PAGE as u64,
            ..Stat::default()
        }),
    };
    let stat = region.stat();
    // The other node's last acquire may still read this one's log.
    thread.barrier(0, all(session, 1)).unwrap();
    assert!(stat.release_wait_ns > 0 && stat.acquire_wait_ns > 0, "{stat:?}");
    let without_times = Stat {
        release_wait_ns: 0,
        acquire_wait_ns: 0,
        ..stat
    };
    assert_eq!(without_times, expected);
}

#[test]
fn stat__of_flushes_twins_and_logs_is_exact() {
    for mode in MODES {
        run("turns", 2, mode);
    }
}

/// Node 0 writes all bytes of pages whose home is node 1, but one of each page, which node 1 writes in some rounds.
fn filled(session: &Session) {
    const PAGES: usize = 40;
    const ROUNDS: u8 = 12;
    /// Messages of a release: of 40 pages, each is about 64 KiB at most.
    const RUNS: u64 = 3;
    let mut options = RegionOptions::new(2 * (PAGES * PAGE) as u64)
        .unwrap()
        .consistency(Consistency::Release);
    options.homes = Placement::InTurn(PAGES as u64);
    let region = session.region(&options).unwrap();
    let mut thread = session.thread(0).unwrap();
    let at = |page: usize| ((PAGES + page) * PAGE) as u64;
    let mut of_home = 0;
    for round in 1..=ROUNDS {
        // In the last round node 0 writes what is there.
        let value = round.min(ROUNDS - 1);
        let is_written = matches!(round, 3..5 | 8);
        if is_written {
            of_home = 100 + round;
        }
        for page in 0..PAGES {
            if session.node() == 0 {
                region.write(at(page), &[value]).unwrap();
                region.write(at(page) + 2, &[value; PAGE - 2]).unwrap();
            } else if is_written {
                region.write(at(page) + 1, &[of_home]).unwrap();
            }
        }
        thread.barrier(0, all(session, 1)).unwrap();
        let mut expected = [value; PAGE];
        expected[1] = of_home;
        for page in 0..PAGES {
            let mut bytes = [0; PAGE];
            region.read(at(page), &mut bytes).unwrap();
            assert!(bytes == expected, "page {page} of round {round}");
        }
        thread.barrier(0, all(session, 1)).unwrap();
    }
    // Each flush has an answer, and the last round needs none.
    let (stat, flushes) = (region.stat(), u64::from(ROUNDS - 1) * RUNS);
    let expected = [(flushes, 0), (0, flushes)][session.node() as usize];
    assert_eq!(
        (stat.messages, (stat.flushes_sent, stat.flushes)),
        (flushes, expected)
    );
}

#[test]
fn barrier__releases_whole_pages_by_runs_and_keeps_bytes_of_others() {
    for mode in MODES {
        run("filled", 2, mode);
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
    run_with("filled", 2, MODES[2], &network);
}

const LEASE: Duration = Duration::from_secs(8);

/// Pages of a region in which [`await_lost`] finds fresh ones as long as [`until`] looks.
const MANY: usize = 40_000;

/// Word of a page.
fn word(region: &Region<'_>, page: u64, word: u64) -> Result<u64, Error> {
    let mut bytes = [0; 8];
    region.read(page * PAGE as u64 + 8 * word, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Reads pages from 4 on that are at home at node 1 of three, until that has left. Unlike a call of a thread, this releases and acquires nothing.
fn await_lost(region: &Region<'_>) {
    let mut fresh = (4..MANY as u64).step_by(3);
    until(|| match word(region, fresh.next().unwrap(), 0) {
        Ok(_) => Err("node 1 is there".to_owned()),
        Err(lost) => {
            assert_eq!(named(&lost), 1, "{lost}");
            Ok(())
        }
    });
}

/// Node 1 is killed, when it has released writes, and written more. Node 0 has written a page whose home that is, and one of node 2.
fn homeless(session: &Session) {
    let region = region(session, MANY);
    let words = region.array::<u64>(0, MANY * PAGE / 8);
    let at = |page: usize, word: usize| page * PAGE / 8 + word;
    let mut thread = session.thread(0).unwrap();
    if session.node() == 1 {
        words.set(at(1, 1), 11);
        words.set(at(2, 1), 12);
    }
    thread.barrier(0, all(session, 1)).unwrap();
    assert_eq!((words.get(at(1, 1)), words.get(at(2, 1))), (11, 12));
    thread.barrier(0, all(session, 1)).unwrap();
    match session.node() {
        0 => {
            words.set(at(1, 0), 5);
            words.set(at(2, 0), 6);
        }
        1 => words.set(at(2, 2), 99),
        _ => {}
    }
    println!("@ ready");
    // The first word whose home is left tells node 2 of all that node 0 has done.
    match session.node() {
        0 => {
            await_lost(&region);
            // Pages that were read of it before are still there, until the next synchronisation.
            assert_eq!(words.get(at(1, 1)), 11);
            let error = thread.signal(9).unwrap_err();
            assert!(matches!(error, Error::Unreleased { node: 1 }), "{error}");
            assert!(matches!(word(&region, 1, 1), Err(Error::Lost { node: 1, .. })));
            assert!((0..).any(|object| thread.fetch_add(object, 1).is_ok()));
        }
        1 => stay(),
        _ => {
            let mut object = 0;
            loop {
                match thread.load(object) {
                    Ok(0) => std::thread::yield_now(),
                    Ok(_) => break,
                    Err(_) => object += 1,
                }
            }
            assert_eq!(
                (word(&region, 2, 0).unwrap(), word(&region, 2, 1).unwrap()),
                (6, 12)
            );
            assert_eq!(word(&region, 2, 2).unwrap() % 99, 0);
            assert!(matches!(word(&region, 1, 1), Err(Error::Lost { node: 1, .. })));
        }
    }
    println!("@ ends");
    stay();
}

#[test]
fn release__to_a_home_that_was_killed_ends_with_its_name_and_other_pages_are_right() {
    for mode in MODES {
        let mut nodes = start("homeless", 3, mode, LEASE);
        wait_for(&mut nodes, "@ ready");
        drop(nodes.remove(1));
        wait_for(&mut nodes, "@ ends");
    }
}

/// Node 1 is killed. Node 0 has written a page whose home that is, and one of node 2, which waits for the lock.
fn unlocked(session: &Session) {
    /// Its home is node 0, as its hash is 0.
    const LOCK: u64 = 0;
    let region = region(session, MANY);
    let mut thread = session.thread(0).unwrap();
    if session.node() == 0 {
        let guard = thread.lock(LOCK).unwrap();
        let mut other = session.thread(1).unwrap();
        other.barrier(0, all(session, 1)).unwrap();
        let words = region.array::<u64>(0, MANY * PAGE / 8);
        words.set(PAGE / 8, 5);
        words.set(2 * PAGE / 8, 6);
        println!("@ ready");
        await_lost(&region);
        let error = guard.unlock().unwrap_err();
        assert!(matches!(error, Error::Unreleased { node: 1 }), "{error}");
        // The thread has the lock no more, and nothing else is lost.
        thread.lock(LOCK).unwrap().unlock().unwrap();
    } else {
        thread.barrier(0, all(session, 1)).unwrap();
        println!("@ ready");
        if session.node() == 1 {
            stay();
        }
        let guard = thread.lock(LOCK).unwrap();
        assert_eq!(guard.recovered(), None);
        assert_eq!(word(&region, 2, 0).unwrap(), 6);
        assert!(matches!(word(&region, 1, 0), Err(Error::Lost { node: 1, .. })));
        guard.unlock().unwrap();
    }
    println!("@ ends");
    stay();
}

#[test]
fn unlock__of_writes_that_are_lost_with_their_home_says_so_and_gives_the_lock_back() {
    let mut nodes = start("unlocked", 3, MODES[0], LEASE);
    wait_for(&mut nodes, "@ ready");
    drop(nodes.remove(1));
    wait_for(&mut nodes, "@ ends");
}

/// All nodes write, lock and meet, until one is gone. Each prints the node that it has missed.
fn busy(session: &Session) {
    const PAGES: u64 = 8;
    let region = region(session, PAGES as usize);
    let mut thread = session.thread(0).unwrap();
    let nodes = u64::from(session.nodes());
    let own = u64::from(session.node());
    let mut step = |round: u64| -> Result<(), Error> {
        for page in 0..PAGES {
            let guard = thread.lock(page)?;
            let count = word(&region, page, nodes)? + 1;
            region.write(page * PAGE as u64 + 8 * nodes, &count.to_ne_bytes())?;
            guard.unlock()?;
            region.write(page * PAGE as u64 + 8 * own, &round.to_ne_bytes())?;
        }
        thread.barrier(100, all(session, 1))?;
        for page in 0..PAGES {
            for node in 0..nodes {
                assert_eq!(word(&region, page, node)?, round, "word {node} of page {page}");
            }
            assert_eq!(word(&region, page, nodes)?, round * nodes);
        }
        thread.barrier(100, all(session, 1))?;
        Ok(())
    };
    println!("@ begins");
    for round in 1.. {
        if let Err(error) = step(round) {
            println!("@ misses {} after {round}: {error}", named(&error));
            stay();
        }
    }
}

#[test]
fn wait__for_a_node_that_was_killed_or_stopped_ends_with_its_name() {
    for seed in 0..6 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mode = MODES[(seed % 3) as usize];
        let victim = (dice.next_u32() % 3) as usize;
        println!("seed {seed}: {mode}, node {victim}");
        let mut nodes = start("busy", 3, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        // Time is meant: the node dies at some point of its work.
        std::thread::sleep(Duration::from_micros(u64::from(dice.next_u32() % 300_000)));
        let victim_node: Node = nodes.remove(victim);
        if seed == 5 {
            victim_node.signal(Signal::STOP);
            wait_for(&mut nodes, &format!("@ misses {victim} "));
            victim_node.signal(Signal::CONT);
            wait_for([&mut { victim_node }], "@ misses ");
        } else {
            drop(victim_node);
            wait_for(&mut nodes, &format!("@ misses {victim} "));
        }
    }
}
