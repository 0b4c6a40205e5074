//! Nodes that die: the others end no wait but with an error that names them, or go on.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use common::{MODES, Node, named, run_as_node, start, stay, wait_for};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Error, FaultMode, RegionOptions, Session, Thread};
use rustix::process::Signal;

const PAGE: u64 = 4096;
const PAGES: u64 = 16;
/// Locks of [`locked`].
const LOCKS: u64 = 40;
const LEASE: Duration = Duration::from_secs(8);

#[test]
fn node() {
    run_as_node(&[("busy", busy), ("locked", locked)]);
}

/// All nodes write, read, lock and meet, until one is gone. Each prints how far it has come, and the node that it has missed.
fn busy(session: &Session) {
    let region = session
        .region(&RegionOptions::new(PAGES * PAGE).unwrap())
        .unwrap();
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let step = |thread: &mut Thread<'_>| -> Result<(), Error> {
        for page in 0..PAGES {
            let guard = thread.lock(page)?;
            if let Some(node) = guard.recovered() {
                println!("recovered from {node}");
            }
            let mut bytes = [0; 8];
            region.read(page * PAGE, &mut bytes)?;
            let count = u64::from_ne_bytes(bytes) + 1;
            region.write(page * PAGE, &count.to_ne_bytes())?;
        }
        thread.barrier(100, all)?;
        Ok(())
    };
    println!("@ begins");
    for round in 0u64.. {
        if let Err(error) = step(&mut thread) {
            println!("@ misses {} after {round}: {error}", named(&error));
            // The others would miss this node, too.
            stay();
        }
    }
}

#[test]
fn wait__for_a_node_that_was_killed_ends_with_its_name() {
    for seed in 0..6 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mode = MODES[(seed % 3) as usize];
        let victim = dice.next_u32() % 3;
        println!("seed {seed}: {mode}, node {victim} dies");
        let mut nodes = start("busy", 3, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        // Time is meant: the node dies at some point of its work.
        std::thread::sleep(Duration::from_micros(u64::from(dice.next_u32() % 300_000)));
        let killed = Instant::now();
        drop(nodes.remove(victim as usize));
        wait_for(&mut nodes, &format!("@ misses {victim} "));
        println!("all have noticed after {:?}", killed.elapsed());
    }
}

#[test]
fn wait__for_a_node_that_is_stopped_ends_with_its_name_and_it_ends_when_it_goes_on() {
    for (mode, victim) in MODES.into_iter().zip([1, 0, 2]) {
        println!("{mode}, node {victim} is stopped");
        let mut nodes = start("busy", 3, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        let mut stopped = nodes.remove(victim);
        stopped.signal(Signal::STOP);
        let began = Instant::now();
        wait_for(&mut nodes, &format!("@ misses {victim} "));
        println!("all have noticed after {:?}", began.elapsed());
        stopped.signal(Signal::CONT);
        wait_for([&mut stopped], "@ misses ");
    }
}

/// Node 1 takes locks and says so; the others wait for them.
fn locked(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    // Of all objects, some have their home at node 1: their locks are gone with it.
    for object in 0..LOCKS {
        if session.node() == 1 {
            std::mem::forget(thread.lock(object).unwrap());
        }
    }
    thread.barrier(100, all).unwrap();
    println!("@ locked");
    if session.node() == 1 {
        stay();
    }
    for object in 0..LOCKS {
        match thread.lock(object) {
            // The first one that gets it learns of that.
            Ok(guard) => println!("{object} recovered {:?}", guard.recovered()),
            Err(error) => println!("{object} misses {}", named(&error)),
        }
    }
    println!("@ ends");
    stay();
}

#[test]
fn lock__of_a_node_that_was_killed_is_given_on_with_its_name() {
    let mut nodes = start("locked", 3, FaultMode::Thread, LEASE);
    wait_for(&mut nodes, "@ locked");
    drop(nodes.remove(1));
    wait_for(&mut nodes, "@ ends");
    let texts: Vec<String> = nodes.iter().map(Node::printed).collect();
    let mut recovered = 0u64;
    for object in 0..LOCKS {
        let count = |line: String| {
            let has = |text: &&String| text.lines().any(|it| it == line);
            texts.iter().filter(has).count()
        };
        let (given, gone) = (
            count(format!("{object} recovered Some(1)")),
            count(format!("{object} misses 1")),
        );
        assert!(
            (given, gone) == (1, 0) || (given, gone) == (0, 2),
            "{object}: {texts:?}"
        );
        recovered += given as u64;
    }
    assert!(recovered > 0 && recovered < LOCKS, "{texts:?}");
}
