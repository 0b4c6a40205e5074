//! The ends of a link, and the rest of a node, under loom, which tries the orders in which the nodes may run and every value that a load may return.
//! A frame that nobody takes makes a model hang, which loom reports. The models hold as the code is, and not without any of the parts
//! that `Without` names.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering::{self, AcqRel, Relaxed, Release};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use rdmux_wire::dsm::frame::SLOTS;

use super::*;
use crate::driver::rest::{Looks, rest};

/// The part that a model leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// The count is no release of the bytes before it.
    ReleaseOfCount,
    /// The look at the count acquires nothing.
    AcquireOfCount,
    /// The fence between a frame and the look at the word orders no store before a later load.
    FenceOfBell,
    /// The same of the fence between the word and the last look.
    FenceOfRest,
    /// The word is not written.
    Word,
    /// It is not written for a sleep after the node has polled.
    NewWord,
    /// The bell is not rung.
    Bell,
    /// It is rung early alone.
    LastBell,
    /// The queue of bells is not armed.
    Arm,
    /// A node sleeps without a last look.
    Look,
    /// A node sleeps although its last look has sent a frame.
    Again,
    /// A node reads the bytes of a frame after it has told that it has handled it.
    EarlyRead,
    /// A frame that is on its way counts as written.
    Completion,
}

/// A slot. Its bytes are one cell, which loom watches for races.
#[derive(Debug)]
struct SlotMemory {
    count: AtomicU32,
    watch: UnsafeCell<()>,
    bytes: Cell<[u8; FRAME_LEN]>,
}

/// The memory of a node that its peer writes: a ring, the peer's word, and the queue of bells.
#[derive(Debug)]
struct Place {
    slots: Vec<SlotMemory>,
    word: AtomicU32,
    bells: Mutex<Bells>,
    changed: Condvar,
}

/// A queue of completions with its descriptor.
#[derive(Debug, Default)]
struct Bells {
    rung: u32,
    is_armed: bool,
    is_readable: bool,
}

impl Place {
    fn new() -> Place {
        let slot = |_| SlotMemory {
            count: AtomicU32::new(0),
            watch: UnsafeCell::new(()),
            bytes: Cell::new([0; FRAME_LEN]),
        };
        Place {
            slots: (0..SLOTS).map(slot).collect(),
            word: AtomicU32::new(0),
            bells: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Writes a frame as an RDMA WRITE does, in ascending order.
    fn write(&self, frame: &Frame, without: Without) {
        let slot = &self.slots[(frame.count.wrapping_sub(1) % SLOTS) as usize];
        slot.watch.with_mut(|_| ());
        slot.bytes.set(frame.emit());
        let order = match without {
            Without::ReleaseOfCount => Relaxed,
            _ => Release,
        };
        slot.count.store(frame.count, order);
    }

    fn ring_bell(&self) {
        let mut bells = self.bells.lock().unwrap();
        bells.rung += 1;
        if std::mem::take(&mut bells.is_armed) {
            bells.is_readable = true;
            self.changed.notify_one();
        }
    }

    fn sleep(&self) {
        let mut bells = self.bells.lock().unwrap();
        while !bells.is_readable {
            bells = self.changed.wait(bells).unwrap();
        }
        bells.is_readable = false;
    }
}

/// The memory of a node, as [`End`] sees it.
#[derive(Clone, Debug)]
struct Own {
    place: Rc<Place>,
    without: Without,
}

impl Ring for Own {
    fn count(&self, slot: u32, order: Ordering) -> u32 {
        let order = match self.without {
            Without::AcquireOfCount => Relaxed,
            _ => order,
        };
        self.place.slots[slot as usize].count.load(order)
    }

    fn frame(&self, slot: u32) -> [u8; FRAME_LEN] {
        let slot = &self.place.slots[slot as usize];
        if self.without != Without::EarlyRead {
            slot.watch.with(|_| ());
        }
        slot.bytes.get()
    }

    fn word(&self) -> u32 {
        self.place.word.load(Relaxed)
    }

    fn fence(&self, order: Ordering) {
        fence(match self.without {
            Without::FenceOfBell => AcqRel,
            _ => order,
        });
    }
}

/// A node with one peer: its link and driver, in one thread.
#[derive(Debug)]
struct Node {
    own: Own,
    peer: Rc<Place>,
    end: End,
    /// Messages that the state machines have decided to send.
    undone: u32,
    /// Messages taken.
    got: u32,
    answers: bool,
    /// Frames that are on their way, where packets carry them.
    flight: Option<Vec<Frame>>,
    is_armed: bool,
    /// The next turn is the last look before a sleep.
    rests: bool,
    /// It has polled, and told so.
    has_polled: bool,
    without: Without,
}

impl Node {
    /// As `Driver::carry_out` and `Link::send`, with requests that complete at once.
    fn carry_out(&mut self) {
        while self.undone > 0
            && let Some(slot) = self.end.take()
        {
            self.undone -= 1;
            let frame = self.end.post(slot, Some([1; MESSAGE_LEN]));
            match &mut self.flight {
                Some(flight) => flight.push(frame),
                None => self.peer.write(&frame, self.without),
            }
            if self.flight.is_none() || self.without == Without::Completion {
                self.end.has_written(slot.count);
            }
            let rouses = self.end.may_rouse(&self.own) && self.without != Without::Bell;
            if rouses && self.flight.is_none() {
                self.peer.ring_bell();
            }
        }
    }

    /// As `Driver::settle`. Returns whether it has rung the bell, which comes behind the frames that are on their way.
    fn settle(&mut self) -> bool {
        self.carry_out();
        let rings =
            self.end.must_ring(&self.own) && !matches!(self.without, Without::Bell | Without::LastBell);
        if rings && self.flight.is_none() {
            self.peer.ring_bell();
        }
        rings
    }

    fn receive(&mut self) -> bool {
        let mut any = false;
        while self.end.receive(&self.own).unwrap().is_some() {
            self.got += 1;
            self.undone += u32::from(self.answers);
            any = true;
        }
        any
    }

    fn poll_bells(&mut self) -> bool {
        let rung = std::mem::take(&mut self.own.place.bells.lock().unwrap().rung);
        (0..rung).for_each(|_| self.end.has_rung());
        self.is_armed = false;
        rung > 0
    }

    /// Polls instead of the sleep for which it has prepared.
    fn poll(&mut self) {
        self.turn(true);
        if let Some(word) = self.end.tell_awake() {
            self.peer.word.store(word, Release);
            self.has_polled = true;
        }
    }

    /// Takes turns and sleeps until so many messages have come.
    fn wait_for(&mut self, got: u32) {
        while self.got < got {
            if rest(self) {
                self.own.place.sleep();
            }
            self.turn(true);
        }
    }
}

impl Looks for Node {
    fn tell_sleep(&mut self) {
        self.rests = true;
        if let Some(word) = self.end.tell_sleep() {
            let is_left_out = match self.without {
                Without::Word => true,
                Without::NewWord => self.has_polled,
                _ => false,
            };
            if !is_left_out {
                self.peer.word.store(word, Release);
            }
            self.end.has_told_sleep(word);
        }
    }

    fn fence(&self, order: Ordering) {
        fence(match self.without {
            Without::FenceOfRest => AcqRel,
            _ => order,
        });
    }

    fn is_busy(&self) -> bool {
        self.end.is_telling() || self.end.owes_bell()
    }

    fn is_armed(&self) -> bool {
        self.is_armed
    }

    fn arm(&mut self, _: bool) {
        self.own.place.bells.lock().unwrap().is_armed = self.without != Without::Arm;
    }

    /// As `Driver::turn`.
    fn turn(&mut self, thoroughly: bool) -> bool {
        let mut any = false;
        let is_blind = std::mem::take(&mut self.rests) && self.without == Without::Look;
        while !is_blind && self.receive() | (thoroughly && self.poll_bells()) {
            self.carry_out();
            any = true;
        }
        self.settle();
        any
    }

    fn set_armed(&mut self, is_armed: bool) {
        self.is_armed = is_armed;
    }

    fn is_relied_on(&self) -> bool {
        self.end.is_awake() && self.without != Without::Again
    }
}

/// Makes two nodes, each of which writes frames directly and knows that the other one does, and that it has woken from its last sleep.
fn nodes(without: Without) -> [Node; 2] {
    let places = [(); 2].map(|()| Rc::new(Place::new()));
    let node = |own: usize| Node {
        own: Own {
            place: places[own].clone(),
            without: Without::Nothing,
        },
        peer: places[1 - own].clone(),
        end: End::new(),
        undone: 0,
        got: 0,
        answers: false,
        flight: None,
        is_armed: false,
        rests: false,
        has_polled: false,
        without: Without::Nothing,
    };
    let mut nodes = [node(0), node(1)];
    for round in 0..3 {
        for from in 0..2 {
            rest(&mut nodes[from]);
            nodes[from].undone = 1;
            nodes[from].settle();
            nodes[1 - from].turn(true);
            assert_eq!(nodes[1 - from].got, round + 1);
        }
    }
    for node in &mut nodes {
        assert!(node.end.is_awake());
        node.got = 0;
        node.is_armed = false;
        node.without = without;
        node.own.without = without;
        *node.own.place.bells.lock().unwrap() = Bells::default();
    }
    nodes
}

/// A node goes to sleep while its peer writes frames; of more than one, it may wake and go to sleep again in between.
fn frames_to_a_node_that_rests(frames: u32, without: Without) {
    let [mut sender, mut receiver] = nodes(without);
    let sender = thread::spawn(move || {
        sender.undone = frames;
        sender.settle();
    });
    receiver.wait_for(frames);
    sender.join().unwrap();
}

fn frame_to_a_node_that_rests(without: Without) {
    frames_to_a_node_that_rests(1, without);
}

fn two_frames_to_a_node_that_rests(without: Without) {
    frames_to_a_node_that_rests(2, without);
}

/// A node that was about to sleep polls instead, and goes to sleep then, while its peer writes a frame.
fn frame_to_a_node_that_polls_again(without: Without) {
    let [mut sender, mut receiver] = nodes(without);
    let sender = thread::spawn(move || {
        sender.undone = 1;
        sender.settle();
    });
    rest(&mut receiver);
    receiver.poll();
    receiver.wait_for(1);
    sender.join().unwrap();
}

/// A node that sleeps is left something to ask, and rests again until the answer comes.
fn question_of_a_node_that_rests(without: Without) {
    let [mut asks, mut answers] = nodes(without);
    assert!(rest(&mut asks));
    answers.answers = true;
    let answers = thread::spawn(move || answers.wait_for(1));
    asks.undone = 1;
    asks.wait_for(1);
    answers.join().unwrap();
}

/// A frame travels by packets while the peer goes to sleep.
fn frame_by_packets(without: Without) {
    let [mut sender, mut receiver] = nodes(without);
    sender.flight = Some(Vec::new());
    sender.undone = 1;
    let rings = sender.settle();
    let network = thread::spawn(move || {
        for frame in sender.flight.iter().flatten() {
            sender.peer.write(frame, without);
        }
        if rings {
            sender.peer.ring_bell();
        }
    });
    receiver.wait_for(1);
    network.join().unwrap();
}

/// A node that has filled the ring writes a slot again as soon as it may.
fn slot_again(without: Without) {
    let [mut sender, mut receiver] = nodes(without);
    // As many as are in flight at most, and then up to one in the slot of the first that the peer has not handled yet.
    sender.undone = SLOTS + 1;
    sender.settle();
    assert_eq!(sender.undone, 3);
    let receiver = thread::spawn(move || {
        let (slot, _) = receiver.end.window.next();
        for _ in 0..3 {
            assert!(receiver.end.receive(&receiver.own).unwrap().is_some());
        }
        receiver.undone = 1;
        receiver.settle();
        if without == Without::EarlyRead {
            receiver.own.place.slots[slot as usize].watch.with(|_| ());
        }
    });
    sender.wait_for(1);
    assert_eq!(sender.undone, 0);
    receiver.join().unwrap();
}

fn holds(model: fn(Without), without: Without) -> bool {
    crate::model::holds(3, move || model(without))
}

#[test]
fn rest__while_a_frame_comes() {
    assert!(holds(frame_to_a_node_that_rests, Without::Nothing));
    assert!(holds(two_frames_to_a_node_that_rests, Without::Nothing));
    assert!(holds(frame_by_packets, Without::Nothing));
    assert!(holds(frame_to_a_node_that_polls_again, Without::Nothing));
}

/// A peer rings no bell for a node that polls again, and one for its next sleep.
#[test]
fn tell_awake__until_the_next_sleep() {
    loom::model(|| {
        let [mut sender, mut receiver] = nodes(Without::Nothing);
        let place = receiver.own.place.clone();
        let mut send = || {
            sender.undone = 1;
            sender.settle();
            place.bells.lock().unwrap().rung
        };
        assert!(rest(&mut receiver));
        receiver.poll();
        assert_eq!(send(), 0);
        receiver.turn(true);
        assert!(rest(&mut receiver));
        assert_eq!(send(), 1);
    });
}

#[test]
fn rest__with_something_left_to_ask() {
    assert!(holds(question_of_a_node_that_rests, Without::Nothing));
}

#[test]
fn receive__while_the_slot_is_written_again() {
    assert!(holds(slot_again, Without::Nothing));
}

#[test]
fn end__without_any_part_frames_are_lost() {
    for without in [
        Without::ReleaseOfCount,
        Without::AcquireOfCount,
        Without::FenceOfBell,
        Without::FenceOfRest,
        Without::Word,
        Without::Bell,
        Without::Arm,
        Without::Look,
    ] {
        assert!(!holds(frame_to_a_node_that_rests, without), "{without:?}");
    }
    assert!(!holds(two_frames_to_a_node_that_rests, Without::LastBell));
    assert!(!holds(frame_to_a_node_that_polls_again, Without::NewWord));
    assert!(!holds(question_of_a_node_that_rests, Without::Again));
    assert!(!holds(frame_by_packets, Without::Completion));
    assert!(!holds(slot_again, Without::EarlyRead));
}
