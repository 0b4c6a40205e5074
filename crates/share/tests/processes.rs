//! An application and a node in two processes: one of them is killed at any moment, or writes anything at any moment. The other one
//! notices nothing but the end of what it gets.
//!
//! `RDMUX_RING_KILLS` says how often, `RDMUX_RING_SEED` seeds the choices. The system decides the moments, so a seed replays the choices
//! but no run exactly.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "common/hostile.rs"]
mod hostile;
#[path = "common/other.rs"]
mod other;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hostile::{Dice, Vandal};
use other::{Other, number};
use rdmux_share::ring::*;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_wire::node::*;
use rustix::event::{PollFd, PollFlags, poll};

/// Time after which the other process counts as hung.
const LONG: Duration = Duration::from_secs(60);
/// A side that sleeps looks this often whether the other process is alive.
const LOOK: Duration = Duration::from_millis(10);

const SUBMISSIONS: u32 = 3;

fn layout() -> Layout {
    Layout::new(SUBMISSIONS, 64, 1, 32).unwrap()
}

// ---- What goes through the rings.

/// Request `number` of a ring, with the bytes inline. Some take several descriptors.
fn request(ring: u32, number: u64) -> (Work, Vec<u8>) {
    let mut dice = Dice(number << 8 | u64::from(ring));
    let bytes = dice.below(40) * [1, 1, 1, 10][dice.below(4) as usize];
    let inline = (0..bytes).map(|_| dice.next() as u8).collect();
    let work = Work {
        queue: QueueId(ring),
        wr_id: number,
        flags: WorkFlags::SIGNALED,
        operation: WorkOperation::Send {
            imm: Some(number as u32),
        },
        data: WorkData::Inline(bytes as u16),
    };
    (work, inline)
}

/// The completion of request `number` of a ring.
fn completion(ring: u32, number: u64) -> Descriptor {
    let completion = Completion {
        queue: QueueId(ring),
        wr_id: number,
        status: CompletionStatus::Success,
        opcode: CompletionOpcode::Send,
        bytes: number as u32,
        imm: None,
        invalidated: None,
        source: None,
        is_solicited: false,
    };
    let mut bytes = [0; DESCRIPTOR_BYTES];
    completion.emit(&mut bytes);
    bytes
}

/// The application: submits requests by all rings, and takes the completions of those that the node has taken.
struct Application {
    end: ApplicationEnd,
    submissions: Vec<Producer<RingArea>>,
    completions: Consumer<RingArea>,
    ready: ReadySet<ReadyArea>,
    dice: Dice,
    submitted: [u64; SUBMISSIONS as usize],
    completed: [u64; SUBMISSIONS as usize],
}

impl Application {
    fn new(files: Files, seed: u64) -> Application {
        let end = ApplicationEnd::attach(layout(), files).unwrap();
        Application {
            submissions: (0..SUBMISSIONS).map(|ring| end.submission(ring)).collect(),
            completions: end.completion(0),
            ready: end.ready(),
            end,
            dice: Dice(seed),
            submitted: [0; SUBMISSIONS as usize],
            completed: [0; SUBMISSIONS as usize],
        }
    }

    /// Submits some requests and takes some completions; sleeps, for a moment at most, when there is room for none and none has come.
    fn step(&mut self) {
        let mut has_room = false;
        for ring in 0..SUBMISSIONS {
            let index = ring as usize;
            for _ in 0..self.dice.below(8) {
                let (work, inline) = request(ring, self.submitted[index]);
                let producer = &mut self.submissions[index];
                match producer.push_work(&work, |work, bytes| work.put_inline(bytes, &inline)) {
                    Ok(()) => self.submitted[index] += 1,
                    Err(PushError::Full) => break,
                    Err(PushError::Corrupt(error)) => panic!("{error}"),
                }
                has_room = true;
            }
            let told = self.submissions[index].publish();
            self.end.tell(ring, told);
        }
        if self.take() || has_room {
            return;
        }
        let room = self
            .submissions
            .iter_mut()
            .any(|producer| !producer.wants_room().unwrap());
        let asleep = self.completions.prepare_sleep().unwrap() && !room;
        if asleep && self.ready.prepare_sleep() {
            let _ = self.end.waiter().wait(LOOK);
        }
        self.ready.awake();
        self.ready.take(|_| {}).unwrap();
        self.completions.awake();
        self.submissions.iter_mut().for_each(Producer::no_longer_waits);
    }

    /// Takes completions; returns whether there were any.
    fn take(&mut self) -> bool {
        let mut out = [[0; DESCRIPTOR_BYTES]; 8];
        let count = self.completions.take(&mut out).unwrap();
        for found in &out[..count] {
            let ring = Completion::parse(found).unwrap().queue.0;
            let next = &mut self.completed[ring as usize];
            assert_eq!(*found, completion(ring, *next));
            *next += 1;
        }
        let ring = self.end.layout().completion_ring(0);
        let told = self.completions.release();
        self.end.tell(ring, told);
        count > 0
    }
}

/// The node: takes requests and completes them in order.
struct Node {
    end: NodeEnd,
    submissions: Vec<Consumer<RingArea>>,
    completions: Producer<RingArea>,
    ready: ReadySet<ReadyArea>,
    bytes: WorkBytes,
    taken: [u64; SUBMISSIONS as usize],
}

impl Node {
    fn new() -> (Node, Files) {
        let (end, files) = NodeEnd::create(layout()).unwrap();
        let node = Node {
            submissions: (0..SUBMISSIONS).map(|ring| end.submission(ring)).collect(),
            completions: end.completion(0),
            ready: end.ready(),
            end,
            bytes: WorkBytes::new(),
            taken: [0; SUBMISSIONS as usize],
        };
        (node, files)
    }

    fn total(&self) -> u64 {
        self.taken.iter().sum()
    }

    /// Takes and completes some requests; sleeps, for a moment at most, if there were none, or no room for a completion. Returns how many.
    fn step(&mut self) -> u64 {
        let before = self.total();
        let mut has_room = true;
        for ring in 0..SUBMISSIONS {
            for _ in 0..4 {
                has_room = self.completions.has_room(1).unwrap();
                if !has_room || !self.take(ring) {
                    break;
                }
            }
            let told = self.submissions[ring as usize].release();
            self.end.tell(ring, told);
        }
        let told = self.completions.publish();
        self.end.tell(self.end.layout().completion_ring(0), told);
        let taken = self.total() - before;
        if taken == 0 {
            self.sleep(has_room);
        }
        taken
    }

    fn take(&mut self, ring: u32) -> bool {
        let taken = &mut self.taken[ring as usize];
        let Some(found) = self.submissions[ring as usize]
            .take_work(&mut self.bytes)
            .unwrap()
        else {
            return false;
        };
        let (work, inline) = request(ring, *taken);
        assert_eq!((found, found.inline(self.bytes.bytes())), (work, &inline[..]));
        self.completions.push(&[completion(ring, *taken)]).unwrap();
        *taken += 1;
        true
    }

    fn sleep(&mut self, has_room: bool) {
        // Without room for completions, requests stay where they are.
        let mut asleep = has_room || self.completions.wants_room().unwrap();
        if has_room {
            asleep = self
                .submissions
                .iter_mut()
                .all(|ring| ring.prepare_sleep().unwrap());
        }
        if asleep && self.ready.prepare_sleep() {
            let _ = self.end.waiter().wait(LOOK);
        }
        self.ready.awake();
        self.ready.take(|_| {}).unwrap();
        self.submissions.iter_mut().for_each(Consumer::awake);
        self.completions.no_longer_waits();
    }
}

// ---- The other process.

fn send_files(socket: BorrowedFd<'_>, files: &Files) {
    send_bytes(socket, b"rings", &files.as_fds()).unwrap();
}

/// Waits for the descriptors.
fn receive_files(socket: BorrowedFd<'_>) -> Files {
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], None).unwrap();
    let (_, fds) = receive_with_descriptors(socket, &mut [0; 8]).unwrap();
    Files::from_fds(fds.try_into().unwrap())
}

/// The other process's part; nothing in a run of the tests.
#[test]
fn child() {
    let Some((role, seed)) = other::role() else { return };
    let stdin = std::io::stdin();
    match role.as_str() {
        "application" => {
            let mut application = Application::new(receive_files(stdin.as_fd()), seed);
            loop {
                application.step();
            }
        }
        "node" => {
            let (mut node, files) = Node::new();
            send_files(stdin.as_fd(), &files);
            drop(files);
            loop {
                node.step();
            }
        }
        "vandal" => {
            let (files, mut dice) = (receive_files(stdin.as_fd()), Dice(seed));
            let rings = layout().rings().into();
            let mut vandal = Vandal::new(files.as_fds(), SUBMISSIONS.into(), rings);
            loop {
                vandal.step(&mut dice);
            }
        }
        other => panic!("no role {other}"),
    }
}

/// Number of rounds, seed of the first.
fn rounds() -> (u64, u64) {
    (
        number("RDMUX_RING_KILLS").unwrap_or(30),
        number("RDMUX_RING_SEED").unwrap_or(1),
    )
}

#[test]
fn node__an_application_is_killed_at_any_moment() {
    let (kills, first) = rounds();
    let mut total = 0;
    for seed in first..first + kills {
        println!("RDMUX_RING_SEED={seed}");
        let mut dice = Dice(seed);
        let (mut node, files) = Node::new();
        let mut other = Other::start("application", seed);
        send_files(other.socket.as_fd(), &files);
        drop(files);
        let after = 1 + dice.below(20_000);
        let deadline = Instant::now() + LONG;
        while node.total() < after {
            node.step();
            assert!(other.is_alive() && Instant::now() < deadline, "no more requests");
        }
        other.kill();
        // Whole requests in order, until there are no more, or no room for their completions.
        while node.step() > 0 {}
        total += node.total();
    }
    println!("{total} requests of {kills} applications");
}

#[test]
fn application__a_node_is_killed_at_any_moment() {
    let (kills, first) = rounds();
    let mut total = 0;
    for seed in first..first + kills {
        println!("RDMUX_RING_SEED={seed}");
        let mut dice = Dice(seed);
        let mut other = Other::start("node", seed);
        let mut application = Application::new(receive_files(other.socket.as_fd()), seed);
        let after = 1 + dice.below(20_000);
        let deadline = Instant::now() + LONG;
        while application.completed.iter().sum::<u64>() < after {
            application.step();
            assert!(
                other.is_alive() && Instant::now() < deadline,
                "no more completions"
            );
        }
        other.kill();
        while application.take() {}
        for (completed, submitted) in application.completed.iter().zip(application.submitted) {
            assert!(*completed <= submitted);
        }
        total += application.completed.iter().sum::<u64>();
    }
    println!("{total} completions of {kills} nodes");
}

// ---- An application that does everything that it can.

#[test]
fn node__an_application_that_does_everything_that_it_can() {
    let (mut node, files) = Node::new();
    let other = Other::start("vandal", 1);
    send_files(other.socket.as_fd(), &files);
    drop(files);
    let (mut taken, mut corrupt) = (0u64, 0u64);
    let deadline = Instant::now() + LONG;
    let mut round = 0;
    // At first it has not begun.
    while round < 100_000 || corrupt < 100 || taken < 100 {
        round += 1;
        assert!(Instant::now() < deadline, "nothing happens");
        let completions = node.end.layout().completion_ring(0);
        for ring in 0..SUBMISSIONS {
            let consumer = &mut node.submissions[ring as usize];
            let found = consumer.take_work(&mut node.bytes);
            let told = consumer.release();
            node.end.tell(ring, told);
            match found {
                Ok(Some(work)) => {
                    assert!(work.inline(node.bytes.bytes()).len() <= Work::INLINE_BYTES_MAX);
                    taken += 1;
                }
                Ok(None) => {}
                Err(_) => {
                    corrupt += 1;
                    node.submissions[ring as usize] = node.end.submission(ring);
                }
            }
        }
        let pushed = node.completions.push(&[[1; DESCRIPTOR_BYTES]]);
        let told = node.completions.publish();
        node.end.tell(completions, told);
        let waits = match pushed {
            Ok(()) => Ok(false),
            Err(PushError::Full) => node.completions.wants_room(),
            Err(PushError::Corrupt(error)) => Err(error),
        };
        if waits.is_err() {
            corrupt += 1;
            node.completions = node.end.completion(0);
        }
        if node.ready.take(|ring| assert!(ring <= completions)).is_err() {
            corrupt += 1;
        }
        if node.ready.prepare_sleep() {
            let _ = node.end.waiter().wait(Duration::ZERO);
        }
        node.ready.awake();
        node.end.waiter().answer();
    }
    println!("{round} rounds, {taken} requests, {corrupt} times corrupt");
}
