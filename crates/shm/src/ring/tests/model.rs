//! The ring under loom, which tries the orders in which two threads may run, up to a number of preemptions, and every value that
//! a load may return.
//!
//! A model holds as the code is, and fails when any single ordering or fence is weakened.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::{self, AcqRel, Relaxed};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use rdmux_rnic::Taken;

use super::super::{
    Consumer, NAPPING, Producer, RingMemory, SLOT_BYTES, Wake, Word, payload_offset, slot_offset,
};
use super::{push, record, request, sides, take, ticket};

/// The step that is weaker than in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weak {
    Nothing,
    /// The stamp behind a record is not set to 0.
    StampBehind,
    StampRelease,
    StampAcquire,
    HeadRelease,
    HeadAcquire,
    /// The `SeqCst` fence between a push and the look at `sleeping`, and so on, orders no store before a later load.
    FenceOfPush,
    FenceOfSleep,
    FenceOfRelease,
    FenceOfWaits,
}

/// A slot. Its bytes are one cell, which loom watches for races. The stamp has values of its own like every loom atomic, so payload in its
/// place is stored in it.
#[derive(Debug, Default)]
struct Slot {
    stamp: AtomicU32,
    watch: UnsafeCell<()>,
    words: [Cell<u32>; SLOT_BYTES / 4],
}

impl Slot {
    fn load(&self, word: usize) -> u32 {
        self.watch.with(|_| ());
        match word {
            0 => self.stamp.load(Relaxed),
            _ => self.words[word].get(),
        }
    }

    fn store(&self, word: usize, value: u32) {
        self.watch.with_mut(|_| ());
        match word {
            0 => self.stamp.store(value, Relaxed),
            _ => self.words[word].set(value),
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    head: AtomicU32,
    sleeping: AtomicU32,
    napping: AtomicU32,
    waits: AtomicU32,
    slots: Vec<Slot>,
}

/// One side's memory.
#[derive(Clone, Debug)]
struct Side {
    shared: Rc<Shared>,
    weak: Weak,
    /// The word that was stored last: it tells the fences apart.
    stored: Cell<Word>,
}

impl Side {
    fn slot(&self, word: Word) -> (&Slot, usize) {
        let at = word.offset() - slot_offset(0);
        (&self.shared.slots[at / SLOT_BYTES], at % SLOT_BYTES / 4)
    }

    fn atomic(&self, word: Word) -> Option<&AtomicU32> {
        match word {
            Word::Head => Some(&self.shared.head),
            Word::Sleeping => Some(&self.shared.sleeping),
            Word::Napping => Some(&self.shared.napping),
            Word::Waits => Some(&self.shared.waits),
            Word::Stamp(slot) => Some(&self.shared.slots[slot as usize].stamp),
            Word::Bytes(_) | Word::Form(_) | Word::Verdict(_) => None,
        }
    }

    /// Returns slot and word index for each word of a payload.
    fn payload(&self, slot: u32, bytes: usize) -> impl Iterator<Item = (&Slot, usize)> {
        let first = (payload_offset(slot) - slot_offset(0)) / 4;
        let per_slot = SLOT_BYTES / 4;
        (first..first + bytes.div_ceil(4)).map(move |at| (&self.shared.slots[at / per_slot], at % per_slot))
    }
}

impl RingMemory for Side {
    fn slots(&self) -> u32 {
        self.shared.slots.len() as u32
    }

    fn load(&self, word: Word, order: Ordering) -> u32 {
        let order = match (self.weak, word) {
            (Weak::StampAcquire, Word::Stamp(_)) | (Weak::HeadAcquire, Word::Head) => Relaxed,
            _ => order,
        };
        match self.atomic(word) {
            Some(atomic) => atomic.load(order),
            None => {
                let (slot, word) = self.slot(word);
                slot.load(word)
            }
        }
    }

    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.stored.set(word);
        let order = match (self.weak, word) {
            (Weak::StampBehind, Word::Stamp(_)) if value == 0 => return,
            (Weak::StampRelease, Word::Stamp(_)) | (Weak::HeadRelease, Word::Head) => Relaxed,
            _ => order,
        };
        if let Word::Stamp(slot) = word {
            self.shared.slots[slot as usize].watch.with_mut(|_| ());
        }
        match self.atomic(word) {
            Some(atomic) => atomic.store(value, order),
            None => {
                let (slot, word) = self.slot(word);
                slot.store(word, value);
            }
        }
    }

    fn fence(&self, order: Ordering) {
        let order = match (self.weak, self.stored.get()) {
            (Weak::FenceOfPush, Word::Stamp(_))
            | (Weak::FenceOfSleep, Word::Sleeping | Word::Napping)
            | (Weak::FenceOfRelease, Word::Head)
            | (Weak::FenceOfWaits, Word::Waits) => AcqRel,
            _ => order,
        };
        fence(order);
    }

    fn write(&self, slot: u32, bytes: &[u8]) {
        for ((slot, word), four) in self.payload(slot, bytes.len()).zip(bytes.chunks_exact(4)) {
            slot.store(word, u32::from_ne_bytes(four.try_into().unwrap()));
        }
    }

    fn read(&self, slot: u32, bytes: usize, out: &mut Vec<u8>) {
        for (slot, word) in self.payload(slot, bytes) {
            out.extend(slot.load(word).to_ne_bytes());
        }
    }
}

/// The object on which a side sleeps: an eventfd.
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

/// The futex on which a consumer naps.
#[derive(Debug)]
struct Futex {
    /// Locked while the kernel compares the word and puts the caller among the sleepers, and while it wakes them.
    asleep: Mutex<bool>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Rc<Futex> {
        let asleep = Mutex::new(false);
        let woken = Condvar::new();
        Rc::new(Futex { asleep, woken })
    }

    fn wake(&self) {
        *self.asleep.lock().unwrap() = false;
        self.woken.notify_one();
    }

    fn wait(&self, word: &AtomicU32) {
        let mut asleep = self.asleep.lock().unwrap();
        *asleep = word.load(Relaxed) == NAPPING;
        while *asleep {
            asleep = self.woken.wait(asleep).unwrap();
        }
    }
}

fn ring(slots: u32, position: u32, weak: Weak) -> (Producer<Side>, Consumer<Side>) {
    let shared = Shared {
        head: AtomicU32::new(position),
        slots: (0..slots).map(|_| Slot::default()).collect(),
        ..Shared::default()
    };
    let side = Side {
        shared: Rc::new(shared),
        weak,
        stored: Cell::new(Word::Head),
    };
    sides(side, position)
}

/// Takes record `number` if it is there.
fn try_pop(consumer: &mut Consumer<Side>, number: u64, bytes: usize) -> bool {
    let mut out = Vec::new();
    let found = take(consumer, &mut out).unwrap();
    if let Some(meta) = found {
        assert_eq!((meta, out), record(number, bytes));
    }
    found.is_some()
}

/// Payload bytes of records of one, two and one slots.
const HANDED: [usize; 3] = [48, 112, 48];

/// Hands over three records from the third slot of four, so that the second skips the last slot. Both sides retry until they succeed.
fn hand_over(weak: Weak) {
    let (mut producer, mut consumer) = ring(4, 2, weak);
    let other = thread::spawn(move || {
        for (number, bytes) in (0..).zip(HANDED) {
            while push(&mut producer, number, bytes).is_err() {
                thread::yield_now();
            }
        }
    });
    for (number, bytes) in (0..).zip(HANDED) {
        while !try_pop(&mut consumer, number, bytes) {
            thread::yield_now();
        }
        let _ = consumer.release();
    }
    assert!(!consumer.is_ready());
    other.join().unwrap();
}

/// Hands over two records; both sides sleep when they cannot go on. With `rung`, something else ends their first sleep. With `more`,
/// somebody else is about to sleep on the consumer's side while the consumer sleeps.
fn sleepers(weak: Weak, slots: u32, rung: bool, more: bool) {
    let (mut producer, mut consumer) = ring(slots, 0, weak);
    let (records, room) = (Doorbell::new(rung), Doorbell::new(rung));
    let other = thread::spawn({
        let (records, room) = (Rc::clone(&records), Rc::clone(&room));
        move || {
            for number in 0..2 {
                loop {
                    match push(&mut producer, number, 48) {
                        Ok(Wake::Nobody) => break,
                        Ok(_) => break records.ring(),
                        Err(_) if producer.wants_room().unwrap() => room.wait(),
                        Err(_) => {}
                    }
                }
            }
        }
    });
    let mut number = 0;
    loop {
        while try_pop(&mut consumer, number, 48) {
            number += 1;
        }
        if consumer.release() == Wake::Peer {
            room.ring();
        }
        if number == 2 {
            break;
        }
        if consumer.prepare_sleep() {
            let _ = more && consumer.prepare_sleep();
            records.wait();
        }
        consumer.awake();
    }
    other.join().unwrap();
}

/// The producer puts two requests into a ring of four slots, and sleeps until each has ended; the consumer defers the second, and sleeps
/// when it finds nothing.
fn requests(weak: Weak) {
    let (mut producer, mut consumer) = ring(4, 3, weak);
    let (records, ends) = (Doorbell::new(false), Doorbell::new(false));
    let other = thread::spawn({
        let (records, ends) = (Rc::clone(&records), Rc::clone(&ends));
        move || {
            for number in 0..2 {
                match request(&mut producer, number, 48) {
                    Ok(Some(Wake::Peer)) => records.ring(),
                    Ok(Some(Wake::Nobody)) => {}
                    other => panic!("{other:?}"),
                }
                let ended = loop {
                    producer.look_for_ends().unwrap();
                    if let Some(ended) = producer.ended() {
                        break ended;
                    }
                    if producer.wants_ends().unwrap() {
                        ends.wait();
                    }
                    producer.no_longer_waits();
                };
                let taken = [Taken::Done, Taken::Deferred][number as usize];
                assert_eq!(ended, (ticket(number), taken), "end of {number}");
            }
        }
    });
    let mut number = 0;
    while number < 2 {
        if let Some(taken) = consumer.pop().unwrap() {
            let mut out = Vec::new();
            consumer.read(&taken, &mut out);
            assert_eq!(out, record(number, 48).1);
            if number == 1 {
                consumer.answer(&taken, Taken::Deferred);
            }
            number += 1;
        }
        if consumer.release() == Wake::Peer || consumer.tell_ends() == Wake::Peer {
            ends.ring();
        }
        if number < 2 {
            if consumer.prepare_sleep() {
                records.wait();
            }
            consumer.awake();
        }
    }
    other.join().unwrap();
}

/// Hands over two records to a consumer that naps at its first sleep, and at its second, as `naps` says, and otherwise sleeps until the
/// doorbell rings. With `interrupted`, something else ends its first sleep.
fn nappers(weak: Weak, naps: [bool; 2], interrupted: bool) {
    let (mut producer, mut consumer) = ring(8, 0, weak);
    let (doorbell, futex) = (Doorbell::new(false), Futex::new());
    let shared = Rc::clone(&consumer.memory.shared);
    let other = thread::spawn({
        let (doorbell, futex) = (Rc::clone(&doorbell), Rc::clone(&futex));
        move || {
            for number in 0..2 {
                let wake = push(&mut producer, number, 48).unwrap();
                if matches!(wake, Wake::Napper | Wake::Both) {
                    futex.wake();
                }
                if matches!(wake, Wake::Peer | Wake::Both) {
                    doorbell.ring();
                }
            }
        }
    });
    let (mut number, mut sleeps) = (0, 0);
    loop {
        while try_pop(&mut consumer, number, 48) {
            number += 1;
        }
        assert_eq!(consumer.release(), Wake::Nobody);
        if number == 2 {
            break;
        }
        let ends_at_once = interrupted && sleeps == 0;
        if naps[sleeps.min(1)] {
            if consumer.prepare_nap() && !ends_at_once {
                futex.wait(&shared.napping);
            }
            consumer.end_nap();
        } else {
            if consumer.prepare_sleep() && !ends_at_once {
                doorbell.wait();
            }
            consumer.awake();
        }
        sleeps += 1;
    }
    other.join().unwrap();
}

#[test]
fn requests__end_as_the_consumer_says() {
    check(Weak::Nothing, requests);
}

#[test]
fn requests__need_each_ordering() {
    for (weak, how) in [
        (Weak::StampRelease, "Causality violation"),
        (Weak::StampAcquire, "Causality violation"),
        (Weak::HeadRelease, "Causality violation"),
        (Weak::HeadAcquire, "Causality violation"),
        (Weak::FenceOfPush, "deadlock"),
        (Weak::FenceOfSleep, "deadlock"),
        (Weak::FenceOfRelease, "deadlock"),
        (Weak::FenceOfWaits, "deadlock"),
    ] {
        fails(weak, how, requests);
    }
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
    let message = panic.downcast_ref::<String>().map_or("", String::as_str);
    assert!(message.contains(how), "{weak:?}: {message}");
}

#[test]
fn hand_over__holds() {
    check(Weak::Nothing, hand_over);
}

#[test]
fn hand_over__needs_each_ordering() {
    for (weak, how) in [
        (Weak::StampBehind, "Corrupt"),
        (Weak::StampRelease, "Causality violation"),
        (Weak::StampAcquire, "Causality violation"),
        (Weak::HeadRelease, "Causality violation"),
        (Weak::HeadAcquire, "Causality violation"),
    ] {
        fails(weak, how, hand_over);
    }
}

#[test]
fn sleepers__hold() {
    check(Weak::Nothing, |weak| sleepers(weak, 4, false, false));
}

#[test]
fn sleepers__hold_after_another_wake_up() {
    check(Weak::Nothing, |weak| sleepers(weak, 4, true, false));
}

#[test]
fn sleepers__hold_where_there_are_two_on_one_side() {
    check(Weak::Nothing, |weak| sleepers(weak, 4, false, true));
}

#[test]
fn sleepers__hold_in_a_full_ring() {
    check(Weak::Nothing, |weak| sleepers(weak, 2, false, false));
}

#[test]
fn sleepers__hold_in_a_full_ring_after_another_wake_up() {
    check(Weak::Nothing, |weak| sleepers(weak, 2, true, false));
}

#[test]
fn nappers__hold() {
    for naps in [[true, true], [true, false], [false, true]] {
        for interrupted in [false, true] {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound.get_or_insert(PREEMPTIONS - 1);
            builder.check(move || nappers(Weak::Nothing, naps, interrupted));
        }
    }
}

#[test]
fn nappers__need_each_fence() {
    for weak in [Weak::FenceOfPush, Weak::FenceOfSleep] {
        fails(weak, "deadlock", |weak| nappers(weak, [true; 2], false));
    }
}

#[test]
fn sleepers__need_each_fence() {
    for weak in [
        Weak::FenceOfPush,
        Weak::FenceOfSleep,
        Weak::FenceOfRelease,
        Weak::FenceOfWaits,
    ] {
        fails(weak, "deadlock", |weak| sleepers(weak, 2, false, false));
    }
}
