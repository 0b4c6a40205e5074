//! Nodes that die: the others end no wait but with an error that names them, or go on.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
mod played;

use std::alloc::Layout;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::{Duration, Instant};

use common::holds::leave;
use common::{
    LONG, MODES, Node, clusters, command, go_on, named, part, run_as_node, start, stay, wait_for, wait_until,
};
use played::Played;
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Cluster, Consistency, Error, FaultMode, HeapOptions, Place, RegionOptions, Session, Thread};
use rustix::process::Signal;

const PAGE: u64 = 4096;
const PAGES: u64 = 16;
const NODES: u32 = 3;
/// Locks of [`locked`].
const LOCKS: u64 = 40;
/// Regions that nodes make one after the other, and heaps, each of which has 7 regions. One more can be made after them.
const REGIONS: u64 = 56;
const HEAPS: u64 = 8;
const LEASE: Duration = Duration::from_secs(8);
/// Time that nodes have to join, of which some are killed meanwhile.
const PATIENCE: Duration = Duration::from_secs(15);

#[test]
fn node() {
    match part().as_deref() {
        Some("joins") => joins(),
        Some("connects") => connects(),
        Some("leaves") => leave(use_both),
        _ => run_as_node(&[
            ("busy", busy),
            ("locked", locked),
            ("regions", regions),
            ("heaps", heaps),
            ("bystander", bystander),
        ]),
    }
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

/// Has nodes run a program, and kills one of some of them at a moment of a seed, after all have printed a line. Returns its number, and the others.
fn kill_one(part: &str, seed: u64, victims: Range<u32>, line: &str, within: Duration) -> (u32, Vec<Node>) {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let mode = MODES[(seed % 3) as usize];
    let victim = victims.start + dice.next_u32() % (victims.end - victims.start);
    println!("{part}, seed {seed}: {mode}, node {victim} dies");
    let mut nodes = start(part, NODES, mode, LEASE);
    wait_for(&mut nodes, line);
    // Time is meant: the seed draws the moment of the node's work at which it dies, and any moment has to do.
    std::thread::sleep(within.mul_f64(f64::from(dice.next_u32()) / f64::from(u32::MAX)));
    drop(nodes.remove(victim as usize));
    (victim, nodes)
}

#[test]
fn wait__for_a_node_that_was_killed_ends_with_its_name() {
    for seed in 0..6 {
        let within = Duration::from_millis(300);
        let (victim, mut nodes) = kill_one("busy", seed, 0..NODES, "@ begins", within);
        let killed = Instant::now();
        wait_for(&mut nodes, &format!("@ misses {victim} "));
        println!("all have noticed after {:?}", killed.elapsed());
    }
}

/// Nodes of another cluster write, read and meet, and tell their rounds.
fn bystander(session: &Session) {
    let region = session
        .region(&RegionOptions::new(PAGES * PAGE).unwrap())
        .unwrap();
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let (own, other) = (session.node(), (session.node() + 1) % session.nodes());
    let mut told = Instant::now();
    for round in 0u64.. {
        region.write(u64::from(own) * PAGE, &round.to_ne_bytes()).unwrap();
        thread.barrier(0, all).unwrap();
        let mut bytes = [0; 8];
        region.read(u64::from(other) * PAGE, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), round);
        thread.barrier(0, all).unwrap();
        if told.elapsed() > Duration::from_millis(20) {
            told = Instant::now();
            println!("@ round {round}");
        }
    }
}

/// Calls a function while another cluster of this host uses its memory, and checks that that one goes on.
fn beside_another_cluster(work: impl FnOnce()) {
    let mut others = start("bystander", 2, FaultMode::Inline, LONG);
    wait_for(&mut others, "@ round");
    work();
    go_on(&mut others);
}

/// Returns the nodes that an error names, separated by commas.
fn missed(error: &Error) -> String {
    match error {
        Error::Missing { nodes, .. } => nodes.clone(),
        Error::Absent { node, .. } => node.to_string(),
        other => named(other).to_string(),
    }
}

/// Makes something so many times, and then meets the others, until a node is gone. Tells how often it has been made, the node that it misses, and
/// the one that it misses when it makes one more.
fn make_until_gone(session: &Session, times: u64, make: impl Fn(&Session) -> Result<(), Error>) {
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    for round in 0..times {
        if let Err(error) = make(session) {
            println!("@ misses {}: {error}", missed(&error));
            break;
        }
        println!("@ round {round}");
    }
    let error = loop {
        if let Err(error) = thread.barrier(0, all) {
            break error;
        }
    };
    println!("@ meets no more without {}: {error}", missed(&error));
    let error = make(session).unwrap_err();
    println!("@ makes no more without {}: {error}", missed(&error));
    // The others would miss this node, too.
    stay();
}

fn regions(session: &Session) {
    make_until_gone(session, REGIONS, |session| {
        session.region(&RegionOptions::new(PAGES * PAGE)?).map(|_| ())
    });
}

fn heaps(session: &Session) {
    make_until_gone(session, HEAPS, |session| {
        session.heap(&HeapOptions::new(PAGES * PAGE)?).map(|_| ())
    });
}

/// Checks that nodes that make regions or heaps miss one that was killed.
fn check_makings(part: &str) {
    for seed in 0..6 {
        let line = format!("@ round {}", seed % 4);
        let (victim, mut nodes) = kill_one(part, seed, 0..NODES, &line, Duration::from_millis(40));
        let killed = Instant::now();
        wait_for(&mut nodes, &format!("@ meets no more without {victim}: "));
        wait_for(
            &mut nodes,
            &format!("@ makes no more without {victim}: node {victim} is gone: "),
        );
        println!("all have noticed after {:?}", killed.elapsed());
        for node in &nodes {
            let text = node.printed();
            let words = format!("@ misses {victim}: node {victim} is gone: ");
            let mut misses = text.lines().filter(|line| line.starts_with("@ misses "));
            assert!(misses.all(|line| line.starts_with(&words)), "{text}");
        }
    }
}

#[test]
fn region__that_is_made_while_a_node_is_killed_is_an_error_with_its_name() {
    beside_another_cluster(|| check_makings("regions"));
}

#[test]
fn heap__that_is_made_while_a_node_is_killed_is_an_error_with_its_name() {
    beside_another_cluster(|| check_makings("heaps"));
}

/// Joins, and makes regions until a node is gone. Tells the node that it misses in either.
fn joins() {
    rdmux_soft::register();
    match Session::join(Cluster::of_environment().unwrap(), PATIENCE) {
        Err(error) => println!("@ misses {}: {error}", missed(&error)),
        Ok(session) => regions(&session),
    }
}

/// Connects to the nodes of lower numbers as one that joins, and comes no further.
fn connects() {
    rdmux_soft::register();
    let _connected = Played::join_some(&Cluster::of_environment().unwrap(), 0);
    println!("@ has connected");
    stay();
}

/// Waits until nodes that join have missed a node, in their joining or after that.
fn check_joinings(victim: u32, nodes: &mut [Node]) {
    let says = |line: &str| {
        let words = ["@ misses ", "@ meets no more without "];
        let said = words.into_iter().find_map(|words| line.strip_prefix(words));
        let missed = said.and_then(|said| said.split_once(':'));
        missed.is_some_and(|(nodes, _)| nodes.split(", ").any(|node| node == victim.to_string()))
    };
    wait_until(&mut *nodes, "word of the victim", |text| text.lines().any(says));
    for node in nodes {
        let text = node.printed();
        println!("{}", text.lines().find(|line| says(line)).unwrap());
    }
}

/// The others join without it: those that it has connected to have it as a node that is gone, and the others wait for it until their time is over.
#[test]
fn join__of_a_node_that_is_killed_between_two_connections() {
    beside_another_cluster(|| {
        for (victim, mode) in (1..NODES).zip(MODES) {
            println!("{mode}, node {victim} dies");
            let clusters = clusters(NODES, LEASE);
            let start =
                |node: u32, part: &str| Node::start(command(&[], part, &clusters[node as usize], mode));
            let mut nodes: Vec<Node> = (0..victim).map(|node| start(node, "joins")).collect();
            let mut killed = start(victim, "connects");
            wait_for([&mut killed], "@ has connected");
            drop(killed);
            nodes.extend((victim + 1..NODES).map(|node| start(node, "joins")));
            check_joinings(victim, &mut nodes);
        }
    });
}

/// Node 0 is not killed: a node that it lets wait would be missed for it.
#[test]
fn join__of_a_node_that_is_killed_at_some_moment() {
    beside_another_cluster(|| {
        let within = Duration::from_millis(250);
        let kill = |seed| kill_one("joins", seed, 1..NODES, "", within);
        // Nodes that wait until their time is over do it at the same time.
        let killed: Vec<(u32, Vec<Node>)> = (0..6).map(kill).collect();
        for (victim, mut nodes) in killed {
            check_joinings(victim, &mut nodes);
        }
    });
}

/// Uses a region with release consistency and a heap for some rounds, or until a node is missing. Returns the error then.
fn use_both(cluster: Cluster, rounds: u64) -> Result<(), Error> {
    let session = Session::join(cluster, LONG)?;
    let options = RegionOptions::new(PAGES * PAGE)?.consistency(Consistency::Release);
    let region = session.region(&options)?;
    let heap = session.heap(&HeapOptions::new(PAGES * PAGE)?)?;
    let mut thread = session.thread(0)?;
    let (own, nodes) = (session.node(), session.nodes());
    let all = NonZeroU32::new(nodes).unwrap();
    for round in 0..rounds {
        for page in 0..PAGES {
            region.write(page * PAGE + u64::from(own) * 8, &round.to_ne_bytes())?;
        }
        let object = heap.allocate(Layout::new::<u64>(), Place::Node((own + 1) % nodes))?;
        heap.write(object, &round.to_ne_bytes())?;
        thread.barrier(0, all)?;
        for page in 0..PAGES {
            let mut bytes = [0; 8];
            let theirs = u64::from((own + 1) % nodes) * 8;
            region.read(page * PAGE + theirs, &mut bytes)?;
            assert_eq!(u64::from_ne_bytes(bytes), round);
        }
        heap.free(object)?;
        thread.barrier(0, all)?;
        if round == 2 && nodes > 1 {
            println!("@ begins");
        }
    }
    Ok(())
}

#[test]
fn session__that_has_lost_a_node_leaves_and_holds_what_it_held_before() {
    for (mode, victim) in MODES.into_iter().zip([1, 0, 1]) {
        println!("{mode}, node {victim} dies");
        let mut nodes = start("leaves", 2, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        drop(nodes.remove(victim));
        let text = nodes.remove(0).succeed();
        let is_told = text.contains(&format!("@ misses {victim}: "));
        assert!(is_told && text.contains("@ left"), "{text}");
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
