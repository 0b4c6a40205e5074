//! Rings and sets under loom, which tries the orders in which threads may run, up to a number of preemptions, and every value that a
//! load may return.
//!
//! A model holds as the code is, and fails when any single ordering or fence is weakened.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::{self, AcqRel, Relaxed};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::super::ready::ReadyMemory;
use super::super::{
    Announcer, Consumer, Corrupt, Descriptor, Producer, PushError, ReadySet, RingMemory, Tell, Word,
};

/// The step that is weaker than in the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weak {
    Nothing,
    TailRelease,
    TailAcquire,
    HeadRelease,
    HeadAcquire,
    BitAcquire,
    /// The `SeqCst` fence between the store of the tail and the look at `sleeping` orders no store before a later load; and so on.
    FenceOfPublish,
    FenceOfSleep,
    FenceOfWaits,
    FenceOfRelease,
    FenceOfAnnounce,
    FenceOfReadySleep,
}

/// A slot, which loom watches for races.
#[derive(Debug, Default)]
struct Slot {
    watch: UnsafeCell<()>,
    descriptor: Cell<u8>,
}

#[derive(Debug, Default)]
struct Shared {
    tail: AtomicU32,
    waits: AtomicU32,
    head: AtomicU32,
    sleeping: AtomicU32,
    slots: Vec<Slot>,
}

/// One side's memory of a ring.
#[derive(Clone, Debug)]
struct Side {
    shared: Rc<Shared>,
    weak: Weak,
    /// The word that was stored last: it tells the fences apart.
    stored: Cell<Word>,
}

impl Side {
    fn word(&self, word: Word) -> &AtomicU32 {
        match word {
            Word::Tail => &self.shared.tail,
            Word::Waits => &self.shared.waits,
            Word::Head => &self.shared.head,
            Word::Sleeping => &self.shared.sleeping,
        }
    }
}

impl RingMemory for Side {
    fn slots(&self) -> u32 {
        self.shared.slots.len() as u32
    }

    fn load(&self, word: Word, order: Ordering) -> u32 {
        let order = match (self.weak, word) {
            (Weak::TailAcquire, Word::Tail) | (Weak::HeadAcquire, Word::Head) => Relaxed,
            _ => order,
        };
        self.word(word).load(order)
    }

    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.stored.set(word);
        let order = match (self.weak, word) {
            (Weak::TailRelease, Word::Tail) | (Weak::HeadRelease, Word::Head) => Relaxed,
            _ => order,
        };
        self.word(word).store(value, order);
    }

    fn fence(&self, order: Ordering) {
        let order = match (self.weak, self.stored.get()) {
            (Weak::FenceOfPublish, Word::Tail)
            | (Weak::FenceOfSleep, Word::Sleeping)
            | (Weak::FenceOfRelease, Word::Head)
            | (Weak::FenceOfWaits, Word::Waits) => AcqRel,
            _ => order,
        };
        fence(order);
    }

    fn read(&self, slot: u32) -> Descriptor {
        let slot = &self.shared.slots[slot as usize];
        slot.watch.with(|_| ());
        [slot.descriptor.get(); 64]
    }

    fn write(&self, slot: u32, descriptor: &Descriptor) {
        let slot = &self.shared.slots[slot as usize];
        slot.watch.with_mut(|_| ());
        slot.descriptor.set(descriptor[0]);
    }
}

/// The memory of a set of at most 64 rings.
#[derive(Clone, Debug)]
struct Set {
    shared: Rc<(AtomicU64, AtomicU32)>,
    rings: u32,
    weak: Weak,
    is_announcer: bool,
}

impl Set {
    fn new(rings: u32, weak: Weak) -> (Announcer<Set>, ReadySet<Set>) {
        let set = Set {
            shared: Rc::new((AtomicU64::new(0), AtomicU32::new(0))),
            rings,
            weak,
            is_announcer: false,
        };
        let announcer = Set {
            is_announcer: true,
            ..set.clone()
        };
        (Announcer::new(announcer), ReadySet::new(set))
    }
}

impl ReadyMemory for Set {
    fn rings(&self) -> u32 {
        self.rings
    }

    fn load(&self, _: u32, order: Ordering) -> u64 {
        self.shared.0.load(order)
    }

    fn set(&self, _: u32, bits: u64, order: Ordering) -> u64 {
        self.shared.0.fetch_or(bits, order)
    }

    fn clear(&self, _: u32, order: Ordering) -> u64 {
        let order = if self.weak == Weak::BitAcquire {
            Relaxed
        } else {
            order
        };
        self.shared.0.swap(0, order)
    }

    fn sleeping(&self, order: Ordering) -> u32 {
        self.shared.1.load(order)
    }

    fn set_sleeping(&self, value: u32, order: Ordering) {
        self.shared.1.store(value, order);
    }

    fn fence(&self, order: Ordering) {
        let order = match (self.weak, self.is_announcer) {
            (Weak::FenceOfAnnounce, true) | (Weak::FenceOfReadySleep, false) => AcqRel,
            _ => order,
        };
        fence(order);
    }
}

/// The object on which a side sleeps: an eventfd or a pipe.
#[derive(Debug)]
struct Doorbell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Doorbell {
    fn new(rung: bool) -> Rc<Doorbell> {
        let rung = Mutex::new(rung);
        let changed = Condvar::new();
        Rc::new(Doorbell { rung, changed })
    }

    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = false;
    }
}

fn ring(slots: usize, weak: Weak) -> (Producer<Side>, Consumer<Side>) {
    let shared = Shared {
        slots: (0..slots).map(|_| Slot::default()).collect(),
        ..Shared::default()
    };
    let side = Side {
        shared: Rc::new(shared),
        weak,
        stored: Cell::new(Word::Head),
    };
    (Producer::new(side.clone()), Consumer::new(side))
}

fn push(producer: &mut Producer<Side>, number: u8) -> Result<(), PushError> {
    producer.push(&[[number; 64]])
}

/// Takes what there is, at most two; each is the next number.
fn take(consumer: &mut Consumer<Side>, next: &mut u8) -> bool {
    let mut out = [[0; 64]; 2];
    let count = consumer.take(&mut out).unwrap();
    for found in &out[..count] {
        assert_eq!(found[0], *next);
        *next += 1;
    }
    count > 0
}

/// Hands over four descriptors through two slots, the first two in a batch. Both sides retry until they succeed.
fn hand_over(weak: Weak) {
    let (mut producer, mut consumer) = ring(2, weak);
    let other = thread::spawn(move || {
        push(&mut producer, 0).unwrap();
        for number in 1..4 {
            while push(&mut producer, number).is_err() {
                thread::yield_now();
            }
            let _ = producer.publish();
        }
    });
    let mut next = 0;
    while next < 4 {
        if !take(&mut consumer, &mut next) {
            thread::yield_now();
        }
        let _ = consumer.release();
    }
    other.join().unwrap();
}

/// Hands over two descriptors through one ring; the consumer sleeps whenever it finds nothing. With `rung`, something else ends its
/// first sleep.
fn sleeper(weak: Weak, rung: bool) {
    let (mut producer, mut consumer) = ring(2, weak);
    let (announcer, mut ready) = Set::new(1, weak);
    let doorbell = Doorbell::new(rung);
    let other = thread::spawn({
        let doorbell = Rc::clone(&doorbell);
        move || {
            for number in 0..2 {
                push(&mut producer, number).unwrap();
                if producer.publish() == Tell::Ring && announcer.announce(0) {
                    doorbell.ring();
                }
            }
        }
    });
    let mut next = 0;
    loop {
        while take(&mut consumer, &mut next) {
            let _ = consumer.release();
        }
        let _ = consumer.release();
        if next == 2 {
            break;
        }
        if consumer.prepare_sleep().unwrap() {
            wait_for_news(&mut ready, &doorbell).unwrap();
        }
        consumer.awake();
    }
    other.join().unwrap();
}

/// Waits until rings are announced, or until something else rings the doorbell.
fn wait_for_news(ready: &mut ReadySet<Set>, doorbell: &Doorbell) -> Result<u64, Corrupt> {
    let mut rings = 0;
    if ready.prepare_sleep() {
        doorbell.wait();
    }
    ready.awake();
    ready.take(|ring| rings |= 1 << ring)?;
    Ok(rings)
}

/// Two producers hand over a descriptor each, through a ring each; the consumer has looked at both rings before, and sleeps until one of
/// them is announced. A ring that is announced for the first time has a descriptor.
fn two_rings(weak: Weak) {
    let (announcer, mut ready) = Set::new(2, weak);
    let announcer = Rc::new(announcer);
    let doorbell = Doorbell::new(false);
    let (producers, mut consumers): (Vec<_>, Vec<_>) = [ring(1, weak), ring(1, weak)].into_iter().unzip();
    for consumer in &mut consumers {
        assert!(consumer.prepare_sleep().unwrap());
    }
    let others: Vec<_> = (0..)
        .zip(producers)
        .map(|(ring, mut producer)| {
            let (announcer, doorbell) = (Rc::clone(&announcer), Rc::clone(&doorbell));
            thread::spawn(move || {
                push(&mut producer, 0).unwrap();
                assert_eq!(producer.publish(), Tell::Ring);
                if announcer.announce(ring) {
                    doorbell.ring();
                }
            })
        })
        .collect();
    let mut left = 2;
    while left > 0 {
        let rings = wait_for_news(&mut ready, &doorbell).unwrap();
        for (ring, consumer) in consumers.iter_mut().enumerate() {
            if rings & 1 << ring != 0 {
                assert!(take(consumer, &mut 0), "nothing in the ring that was announced");
                left -= 1;
            }
        }
    }
    for other in others {
        other.join().unwrap();
    }
}

/// Hands over two descriptors through one slot. The producer sleeps while there is no room, the consumer while it finds nothing.
fn waiter(weak: Weak) {
    let (mut producer, mut consumer) = ring(1, weak);
    let (to_consumer, mut news) = Set::new(1, weak);
    let (to_producer, mut room) = Set::new(1, weak);
    let (descriptors, free) = (Doorbell::new(false), Doorbell::new(false));
    let other = thread::spawn({
        let (descriptors, free) = (Rc::clone(&descriptors), Rc::clone(&free));
        move || {
            for number in 0..2 {
                while push(&mut producer, number).is_err() {
                    if producer.wants_room().unwrap() {
                        wait_for_news(&mut room, &free).unwrap();
                        producer.no_longer_waits();
                    }
                }
                if producer.publish() == Tell::Ring && to_consumer.announce(0) {
                    descriptors.ring();
                }
            }
        }
    });
    let mut next = 0;
    loop {
        let found = take(&mut consumer, &mut next);
        if consumer.release() == Tell::Ring && to_producer.announce(0) {
            free.ring();
        }
        if next == 2 {
            break;
        }
        if !found {
            if consumer.prepare_sleep().unwrap() {
                wait_for_news(&mut news, &descriptors).unwrap();
            }
            consumer.awake();
        }
    }
    other.join().unwrap();
}

/// Default limit of preemptions, with which the models take seconds, not minutes; `LOOM_MAX_PREEMPTIONS` overrides it.
const PREEMPTIONS: usize = 4;

fn check(weak: Weak, model: fn(Weak)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(move || model(weak));
}

/// Asserts that the model panics with a message that contains `how`.
fn fails(weak: Weak, how: &str, model: fn(Weak)) {
    let outcome = catch_unwind(AssertUnwindSafe(|| check(weak, model)));
    let Err(panic) = outcome else {
        panic!("{weak:?}: the model holds without it");
    };
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("");
    assert!(message.contains(how), "{weak:?}: {message}");
}

#[test]
fn hand_over__holds() {
    check(Weak::Nothing, hand_over);
}

#[test]
fn hand_over__needs_each_ordering() {
    for weak in [
        Weak::TailRelease,
        Weak::TailAcquire,
        Weak::HeadRelease,
        Weak::HeadAcquire,
    ] {
        fails(weak, "Causality violation", hand_over);
    }
}

#[test]
fn sleeper__holds() {
    check(Weak::Nothing, |weak| sleeper(weak, false));
}

#[test]
fn sleeper__holds_after_another_wake_up() {
    check(Weak::Nothing, |weak| sleeper(weak, true));
}

#[test]
fn sleeper__needs_each_fence() {
    for weak in [
        Weak::FenceOfPublish,
        Weak::FenceOfSleep,
        Weak::FenceOfAnnounce,
        Weak::FenceOfReadySleep,
    ] {
        fails(weak, "deadlock", |weak| sleeper(weak, false));
    }
}

#[test]
fn two_rings__hold() {
    check(Weak::Nothing, two_rings);
}

#[test]
fn two_rings__need_each_ordering() {
    for (weak, how) in [
        (Weak::BitAcquire, "nothing in the ring"),
        (Weak::FenceOfAnnounce, "deadlock"),
        (Weak::FenceOfReadySleep, "deadlock"),
    ] {
        fails(weak, how, two_rings);
    }
}

#[test]
fn waiter__holds() {
    check(Weak::Nothing, waiter);
}

#[test]
fn waiter__needs_each_fence() {
    for weak in [
        Weak::FenceOfWaits,
        Weak::FenceOfRelease,
        Weak::FenceOfAnnounce,
        Weak::FenceOfReadySleep,
    ] {
        fails(weak, "deadlock", waiter);
    }
}
