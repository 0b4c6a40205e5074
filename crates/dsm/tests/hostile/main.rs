//! A node with the session's key that sends what no correct node sends: the others end their connections to it, with an error that names it, or
//! ignore it, and go on.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../common/mod.rs"]
mod common;
mod first;
#[path = "../played/mod.rs"]
mod played;
mod releases;
mod taken;

use std::time::{Duration, Instant};

use common::{
    LONG, MODES, Node, clusters, command, go_on, named, part, rounds, run_as_node, start, stay, wait_for,
};
use played::Played;
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Consistency, Error, FaultMode, Region, RegionOptions, Session};
use rdmux_verbs::{RemoteBuffer, SendRequest};
use rdmux_wire::dsm::frame::{FRAME_LEN, Frame};
use rdmux_wire::dsm::joining::{Joining, Step};
use rdmux_wire::dsm::membership::Membership;
use rdmux_wire::dsm::{Body, MESSAGE_LEN, Message, NodeId, Right, heap, sync};

const PAGE: u64 = 4096;
const PAGES: u64 = 12;
const NODES: u32 = 3;
const HOSTILE: u32 = 2;
const LEASE: Duration = Duration::from_secs(5);

#[test]
fn node() {
    match part().as_deref() {
        Some(part @ (first::JOINER | first::IMPATIENT)) => first::join(part),
        _ => run_as_node(&[
            ("bystander", bystander),
            ("releaser", releaser),
            ("follower", follower),
            ("crowded", taken::crowded),
            ("pair", releases::pair),
            ("lone", releases::lone),
        ]),
    }
}

fn region(session: &Session, consistency: Consistency) -> Result<Region<'_>, Error> {
    session.region(&RegionOptions::new(PAGES * PAGE)?.consistency(consistency))
}

fn bystander(session: &Session) {
    go(session, Consistency::Sequential, HOSTILE);
}

/// Does that where the hostile node is the first one.
fn follower(session: &Session) {
    go(session, Consistency::Sequential, first::FIRST);
}

fn releaser(session: &Session) {
    go(session, Consistency::Release, HOSTILE);
}

/// Adds to a word of its own in each page whose home is not the hostile node; tells when a node is missing, and goes on.
fn go(session: &Session, consistency: Consistency, hostile: u32) {
    let region = region(session, consistency).unwrap();
    println!("@ begins");
    std::thread::scope(|scope| {
        if session.nodes() == NODES {
            scope.spawn(|| {
                // The hostile node never makes it.
                let error = self::region(session, consistency).unwrap_err();
                println!("@ misses {}: {error}", missed(&error));
            });
        }
        let own = u64::from(session.node()) * 8;
        let mut counts = [0u64; PAGES as usize];
        let mut step = |page: u64| -> Result<(), Error> {
            let count = &mut counts[page as usize];
            let mut bytes = [0; 8];
            region.read(page * PAGE + own, &mut bytes)?;
            assert_eq!(u64::from_ne_bytes(bytes), *count, "page {page}");
            region.write(page * PAGE + own, &(*count + 1).to_ne_bytes())?;
            *count += 1;
            Ok(())
        };
        let mut told = Instant::now();
        for round in 0.. {
            let pages = (0..PAGES).filter(|page| page % u64::from(session.nodes()) != u64::from(hostile));
            for page in pages {
                if let Err(error) = step(page) {
                    assert!(matches!(error, Error::Lost { .. }), "{error}");
                }
            }
            if told.elapsed() > Duration::from_millis(20) {
                told = Instant::now();
                println!("@ round {round}");
            }
        }
    });
}

/// Returns the node without which a region cannot be made.
fn missed(error: &Error) -> u32 {
    match error {
        Error::Differs { node, .. } => *node,
        other => named(other),
    }
}

/// Starts two nodes that live, and joins them as the third one.
fn begin(mode: FaultMode) -> (Vec<Node>, Played) {
    begin_with("bystander", mode)
}

fn begin_with(program: &str, mode: FaultMode) -> (Vec<Node>, Played) {
    let clusters = clusters(NODES, LEASE);
    let start = |number: usize| Node::start(command(&[], program, &clusters[number], mode));
    let mut nodes = vec![start(0), start(1)];
    let mut hostile = Played::join(&clusters[HOSTILE as usize]);
    assert_eq!(hostile.make_region(), PAGES);
    wait_for(&mut nodes, "@ begins");
    (nodes, hostile)
}

/// Message of a node about a page of region 0, with the numbers of its first one.
fn about(unit: u64, body: Body) -> Message {
    Message {
        region: 0,
        epoch: 0,
        sequence: 0,
        request: 0,
        unit,
        body,
    }
}

fn id(node: u32) -> NodeId {
    NodeId::new(node).unwrap()
}

fn emitted(message: Message) -> [u8; MESSAGE_LEN] {
    let mut bytes = [0; MESSAGE_LEN];
    message.emit(&mut bytes);
    bytes
}

type Attack = fn(&mut Played, u32);

/// An act of a node that has to leave for it, and a word of the others' error.
const ATTACKS: [(&str, Attack, &str); 15] = [
    (
        "a message of no kind",
        |it, to| it.send(to, [9; MESSAGE_LEN]),
        "protocol",
    ),
    ("a frame with reserved bytes", with_reserved_bytes, "protocol"),
    (
        "frames handled that were not sent",
        with_wrong_count,
        "handled frames",
    ),
    (
        "a region that is not there",
        |it, to| {
            let message = Message {
                region: 7,
                ..about(0, Body::Ask(Right::Shared))
            };
            it.send(to, emitted(message));
        },
        "kind 1",
    ),
    (
        "a page that the region lacks",
        |it, to| it.send(to, emitted(about(PAGES, Body::Ask(Right::Shared)))),
        "does not have",
    ),
    (
        "a page of another home",
        |it, to| {
            it.send(to, emitted(about(u64::from(to) + 1, Body::Ask(Right::Exclusive))));
        },
        "another home",
    ),
    (
        "an answer that nobody has asked for",
        |it, to| it.send(to, emitted(about(to.into(), Body::Yielded))),
        "asked for",
    ),
    (
        "a loss with a member",
        |it, to| {
            let body = Body::Refuse(NodeId::new(1 - to).unwrap());
            it.send(to, emitted(about(HOSTILE.into(), body)));
        },
        "protocol",
    ),
    (
        "an epoch that never begins",
        |it, to| {
            let message = Message {
                epoch: u64::MAX,
                ..about(to.into(), Body::Ask(Right::Shared))
            };
            (0..66_000).for_each(|sequence| it.send(to, emitted(Message { sequence, ..message })));
        },
        "too many messages",
    ),
    (
        "an expulsion by a node that cannot decide",
        |it, to| {
            let node = NodeId::new(1 - to).unwrap();
            it.send(to, Membership::Expel { epoch: 1, node }.emit());
        },
        "kind 25",
    ),
    (
        "an offer of a region by a node that is not the first",
        |it, to| {
            let step = Step::Propose {
                address: 1,
                pages: 1,
                digest: 0,
            };
            it.send(
                to,
                Joining {
                    region: 1,
                    attempt: 0,
                    step,
                }
                .emit(),
            );
        },
        "kind 16",
    ),
    (
        "memory of a region that is of no heap",
        |it, to| it.send(to, of_heap(heap::Body::Allocate { units: 1 })),
        "kind 21",
    ),
    (
        "an answer about memory that nobody has asked for",
        |it, to| it.send(to, of_heap(heap::Body::Done { unit: 0 })),
        "kind 23",
    ),
    (
        "a lock given back that it does not have",
        |it, to| {
            let body = sync::Body::Unlock(sync::Mode::Exclusive);
            // Some of them are this node's, the others not.
            for (sequence, object) in (0..20).enumerate() {
                it.send(to, of_thread(sequence as u64, object, body));
            }
        },
        "protocol",
    ),
    (
        "a write behind the ring",
        |it, to| {
            let rkey = it.peer(to).their_ring;
            let length = 64;
            let to_memory = RemoteBuffer {
                address: 1 << 20,
                length,
                rkey,
            };
            let from = it.region().sge(0, length as u32);
            it.post(to, SendRequest::write(from, to_memory));
        },
        "",
    ),
];

/// Returns a frame without a message.
fn bare(handled: u32, count: u32) -> Frame {
    Frame {
        message: None,
        handled,
        sleeps: 0,
        is_direct: false,
        count,
    }
}

fn with_reserved_bytes(it: &mut Played, to: u32) {
    it.send_frame(to, |handled, count| {
        let mut frame = bare(handled, count).emit();
        frame[57] = 1;
        frame
    });
}

fn with_wrong_count(it: &mut Played, to: u32) {
    it.send_frame(to, |handled, count| bare(handled + (1 << 20), count).emit());
}

/// Message about memory of region 0.
fn of_heap(body: heap::Body) -> [u8; MESSAGE_LEN] {
    let (region, ticket) = (0, 0);
    heap::Heap { region, ticket, body }.emit()
}

/// Message of a thread of a node.
fn of_thread(sequence: u64, object: u64, body: sync::Body) -> [u8; MESSAGE_LEN] {
    let message = sync::Message {
        region: 0,
        epoch: 0,
        sequence,
        thread: 0,
        object,
        body,
    };
    let mut bytes = [0; MESSAGE_LEN];
    message.emit(&mut bytes);
    bytes
}

/// Returns the words of a node that finds the hostile one gone.
fn misses(hostile: &Played) -> String {
    let own = hostile.own;
    format!("@ misses {own}: node {own} is gone: ")
}

/// Returns a line that a node has printed, which begins with some words.
fn line(node: &mut Node, words: &str) -> String {
    let text = node.printed();
    let line = text.lines().find(|line| line.starts_with(words));
    line.expect(&text).to_owned()
}

/// Has a node attack another one, and checks that the connection between the two ends, with a word of the error, and that the others go on.
fn check(
    number: usize,
    (name, attack, word): (&str, Attack, &str),
    (mut nodes, mut hostile): (Vec<Node>, Played),
) {
    let index = number % nodes.len();
    let to = hostile.others()[index];
    println!("{name}, to node {to}");
    attack(&mut hostile, to);
    hostile.pump_until(LONG, |it| it.peer(to).is_ended);
    wait_for(&mut nodes, &misses(&hostile));
    let said = line(&mut nodes[index], "@ misses");
    println!("{said}");
    assert!(said.contains(word), "{name}: {said}");
    go_on(&mut nodes);
}

#[test]
fn hostile__message_ends_the_connection_to_its_sender_alone() {
    // Another session on this host has nothing to do with it.
    let mut others = start("bystander", 2, FaultMode::Inline, LONG);
    wait_for(&mut others, "@ begins");
    for (number, attack) in ATTACKS.into_iter().enumerate() {
        check(number, attack, begin(MODES[number % 3]));
    }
    go_on(&mut others);
    assert!(others.iter_mut().all(|node| !node.printed().contains("misses")));
}

/// A flush that a node has to leave for in a region with release consistency, where the node that it is sent to is the home of each third page,
/// and a word of the others' error.
const FLUSHES: [(&str, Attack, &str); 5] = [
    (
        "a flush of no pages",
        |it, to| {
            let mut message = emitted(about(to.into(), Body::Flush { units: 1 }));
            message[44] = 0;
            it.send(to, message);
        },
        "kind 10",
    ),
    (
        "a flush of pages that the region lacks",
        |it, to| it.send(to, emitted(about(u64::from(to) + 9, Body::Flush { units: 4 }))),
        "does not have",
    ),
    (
        "a flush of all pages that there may be",
        |it, to| it.send(to, emitted(about(to.into(), Body::Flush { units: u32::MAX }))),
        "does not have",
    ),
    (
        "a flush of pages of several homes",
        |it, to| it.send(to, emitted(about(to.into(), Body::Flush { units: 2 }))),
        "another home",
    ),
    (
        "the end of a flush that nobody has begun",
        |it, to| it.send(to, emitted(about(HOSTILE.into(), Body::Flushed { units: 1 }))),
        "asked for",
    ),
];

#[test]
fn hostile__flush_ends_the_part_of_its_sender_alone() {
    for (number, attack) in FLUSHES.into_iter().enumerate() {
        check(number, attack, begin_with("releaser", MODES[number % 3]));
    }
}

#[test]
fn hostile__noise_ends_nobody_else() {
    for seed in 0..6 {
        println!("seed {seed}");
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let (mut nodes, mut hostile) = begin(MODES[seed as usize % 3]);
        for sequence in 0u64..200 {
            let to = dice.next_u32() % HOSTILE;
            let mut bytes = [0; FRAME_LEN];
            dice.fill_bytes(&mut bytes);
            if dice.next_u32().is_multiple_of(20) {
                hostile.send_frame(to, |_, count| {
                    bytes[60..].copy_from_slice(&count.to_le_bytes());
                    bytes
                });
                continue;
            }
            let mut message = [0; MESSAGE_LEN];
            message.copy_from_slice(&bytes[..MESSAGE_LEN]);
            // Kinds and fields that are not refused at once. Suspicions have a test of their own.
            message[0] =
                [1, 2, 3, 4, 5, 6, 7, 17, 18, 28, 29, 32, 33, 34, 36, 38, 40][dice.next_u32() as usize % 17];
            message[1] %= 3;
            message[2..16].fill(0);
            message[16..24].copy_from_slice(&sequence.to_le_bytes());
            message[32] %= 16;
            message[33..40].fill(0);
            message[40] %= 4;
            message[41..].fill(0);
            hostile.send(to, message);
        }
        drop(hostile);
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        go_on(&mut nodes);
    }
}

/// Asks for a page of node 0 and gets it. Returns the number of messages sent to that node about pages.
fn get(hostile: &mut Played, unit: u64, right: Right) -> u64 {
    hostile.send(0, emitted(about(unit, Body::Ask(right))));
    let source = hostile.receive(0, |message| match Message::parse(message).ok()?.body {
        Body::Grant { source, .. } => Some(source),
        _ => None,
    });
    if let Some(source) = source.expect("a grant") {
        hostile.fetch(source.number(), unit * PAGE, PAGE as u32);
    }
    let sequence = 1;
    hostile.send(
        0,
        emitted(Message {
            sequence,
            ..about(unit, Body::Installed)
        }),
    );
    sequence + 1
}

#[test]
fn hostile__messages_that_come_again_are_ignored() {
    let (mut nodes, mut hostile) = begin(FaultMode::Thread);
    let unit = 3;
    let mut sequence = get(&mut hostile, unit, Right::Exclusive);
    // The first reader leaves it a right to read.
    let mut yielded = None;
    while yielded.is_none() {
        let recall = hostile.receive(0, |message| {
            let message = Message::parse(message).ok()?;
            matches!(message.body, Body::Recall(_)).then_some(message)
        });
        let Message { request, body, .. } = recall.expect("a recall");
        let answer = Message {
            sequence,
            request,
            ..about(unit, Body::Yielded)
        };
        hostile.send(0, emitted(answer));
        sequence += 1;
        yielded = (body == Body::Recall(Right::Invalid)).then_some(answer);
    }
    let yielded = yielded.expect("the last answer");
    let installed = Message {
        sequence: 1,
        ..about(unit, Body::Installed)
    };
    for _ in 0..50 {
        for again in [about(unit, Body::Ask(Right::Exclusive)), installed, yielded] {
            hostile.send(0, emitted(again));
        }
    }
    // All were taken: an answer to a question comes behind them.
    hostile.send(0, Membership::Probe.emit());
    let is_present =
        |message: &[u8; MESSAGE_LEN]| (Membership::parse(message) == Ok(Membership::Present)).then_some(());
    hostile.receive(0, is_present).expect("an answer");
    go_on(&mut nodes);
    assert!(nodes.iter_mut().all(|node| !node.printed().contains("misses")));
    drop(hostile);
    wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
    go_on(&mut nodes);
}

#[test]
fn hostile__silence_when_its_page_is_wanted_ends_its_part() {
    for (mode, is_present, word) in [
        (
            FaultMode::Thread,
            true,
            "it takes messages, but has not answered one for",
        ),
        (
            FaultMode::Inline,
            false,
            "its device answers, but it has taken no message for",
        ),
    ] {
        let (mut nodes, mut hostile) = begin(mode);
        get(&mut hostile, 3, Right::Exclusive);
        hostile.is_present = is_present;
        let began = Instant::now();
        let is_expelled = hostile.pump_until(LONG, |it| it.peer(0).is_ended);
        assert!(is_expelled);
        // Time is meant: that of two leases, with what a busy host takes.
        assert!(began.elapsed() < 3 * LEASE, "{:?}", began.elapsed());
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        let said: Vec<String> = nodes.iter_mut().map(|node| line(node, "@ misses")).collect();
        println!("after {:?}: {said:?}", began.elapsed());
        // The node that finds it out first tells the other one.
        assert!(said.iter().any(|said| said.contains(word)), "{said:?}");
        let is_told = |said: &String| said.contains(word) || said.contains("has lost its connection to it");
        assert!(said.iter().all(is_told), "{said:?}");
        go_on(&mut nodes);
    }
}

#[test]
fn hostile__suspicion_names_who_has_uttered_it() {
    let (mut nodes, mut hostile) = begin(FaultMode::Thread);
    hostile.send(0, Membership::Suspect(NodeId::new(1).unwrap()).emit());
    wait_for(
        &mut nodes[..1],
        "@ misses 1: node 1 is gone: node 2 has lost its connection to it",
    );
    wait_for(&mut nodes[1..], "@ misses ");
    go_on(&mut nodes[..1]);
}
