use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_rnic::{Psn, Qpn};

use super::*;

mod model;

/// A ring's memory on the heap, laid out as shared memory is.
#[derive(Clone, Debug)]
struct Heap {
    slots: u32,
    words: Arc<[AtomicU32]>,
}

impl Heap {
    fn new(slots: u32) -> Heap {
        let words = (0..area_bytes(slots) / 4).map(|_| AtomicU32::new(0)).collect();
        Heap { slots, words }
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        &self.words[word.offset() / 4]
    }

    fn payload(&self, slot: u32, bytes: usize) -> &[AtomicU32] {
        assert!(slot < self.slots);
        &self.words[payload_offset(slot) / 4..][..bytes.div_ceil(4)]
    }
}

impl RingMemory for Heap {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.word(word).load(order)
    }

    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.word(word).store(value, order);
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }

    fn write(&self, slot: u32, bytes: &[u8]) {
        for (word, chunk) in self.payload(slot, bytes.len()).iter().zip(bytes.chunks(4)) {
            let mut four = [0; 4];
            four[..chunk.len()].copy_from_slice(chunk);
            word.store(u32::from_ne_bytes(four), Relaxed);
        }
    }

    fn read(&self, slot: u32, bytes: usize, out: &mut Vec<u8>) {
        let end = out.len() + bytes;
        for word in self.payload(slot, bytes) {
            out.extend(word.load(Relaxed).to_ne_bytes());
        }
        out.truncate(end);
    }
}

fn ring(slots: u32) -> (Heap, Producer<Heap>, Consumer<Heap>) {
    ring_at(slots, 0)
}

/// The same, but the first record goes to `position`.
fn ring_at(slots: u32, position: u32) -> (Heap, Producer<Heap>, Consumer<Heap>) {
    let memory = Heap::new(slots);
    memory.store(Word::Head, position, Relaxed);
    let (producer, consumer) = sides(memory.clone(), position);
    (memory, producer, consumer)
}

/// Both sides of a memory whose head is at `position`.
fn sides<M: RingMemory + Clone>(memory: M, position: u32) -> (Producer<M>, Consumer<M>) {
    let mut producer = Producer::new(memory.clone());
    (producer.tail, producer.head, producer.seen) = (position, position, position);
    let mut consumer = Consumer::new(memory);
    (consumer.head, consumer.released) = (position, position);
    (producer, consumer)
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Returns the metadata and bytes of record `number`, which differ from those of other records.
fn record(number: u64, bytes: usize) -> (Meta, Vec<u8>) {
    let meta = Meta {
        segment_bytes: bytes.div_ceil(TRAIN_PACKETS_MAX).max(1) as u16,
        traffic_class: number as u8,
    };
    let mut dice = Dice(number);
    (meta, (0..bytes).map(|_| dice.next() as u8).collect())
}

fn push<M: RingMemory>(producer: &mut Producer<M>, number: u64, bytes: usize) -> Result<Wake, PushError> {
    let (meta, bytes) = record(number, bytes);
    producer.push(meta, &bytes)
}

/// Takes the next record and asserts that it is record `number`.
fn pop(consumer: &mut Consumer<Heap>, number: u64, bytes: usize) {
    let mut out = vec![1, 2, 3];
    let meta = take(consumer, &mut out).unwrap().expect("a record");
    assert_eq!((meta, out), record(number, bytes));
}

/// Takes the next record, which is a train, with its bytes.
fn take<M: RingMemory>(consumer: &mut Consumer<M>, out: &mut Vec<u8>) -> Result<Option<Meta>, Corrupt> {
    let Some(record) = consumer.pop()? else {
        return Ok(None);
    };
    consumer.read(&record, out);
    Ok(record.train)
}

fn assert_empty(consumer: &mut Consumer<Heap>) {
    assert!(!consumer.is_ready());
    assert_eq!(consumer.pop(), Ok(None));
}

#[test]
fn layout__words_of_the_sides_share_no_lines() {
    let offsets = [Word::Head, Word::Sleeping, Word::Waits, Word::Stamp(0)].map(Word::offset);
    assert_eq!(offsets, [0, 128, 256, 384]);
    assert_eq!(Word::Bytes(1).offset(), 384 + 64 + 4);
    assert_eq!(Word::Form(1).offset(), 384 + 64 + 8);
    assert_eq!(payload_offset(1), 384 + 64 + 16);
    assert_eq!(area_bytes(2), 384 + 128);
}

#[test]
fn stamp__is_not_0_and_not_that_of_the_lap_before() {
    for position in [0, 1, 2, u32::MAX - 1, u32::MAX] {
        assert_ne!(stamp(position), 0);
        assert_ne!(stamp(position), stamp(position.wrapping_add(2)));
    }
}

#[test]
fn pop__records_in_order() {
    let (_, mut producer, mut consumer) = ring(16);
    assert_empty(&mut consumer);
    for number in 0..3 {
        assert_eq!(
            push(&mut producer, number, 10 * number as usize),
            Ok(Wake::Nobody)
        );
    }
    for number in 0..3 {
        assert!(consumer.is_ready());
        pop(&mut consumer, number, 10 * number as usize);
    }
    assert_empty(&mut consumer);
}

#[test]
fn push__each_size_at_each_place() {
    const SLOTS: u32 = 8;
    for place in 0..SLOTS {
        for bytes in 0..=bytes_max(SLOTS) {
            let (_, mut producer, mut consumer) = ring_at(SLOTS, SLOTS + place);
            assert_eq!(push(&mut producer, 7, bytes), Ok(Wake::Nobody));
            pop(&mut consumer, 7, bytes);
            assert_empty(&mut consumer);
        }
    }
}

#[test]
fn push__the_largest_train() {
    let (_, mut producer, mut consumer) = ring(SLOTS_MIN);
    for number in 0..10 {
        assert_eq!(push(&mut producer, number, TRAIN_BYTES_MAX), Ok(Wake::Nobody));
        pop(&mut consumer, number, TRAIN_BYTES_MAX);
        assert_eq!(consumer.release(), Wake::Nobody);
    }
}

#[test]
fn push__past_the_last_position() {
    for before in 0..8 {
        let (_, mut producer, mut consumer) = ring_at(4, 0u32.wrapping_sub(before));
        for number in 0..12 {
            let bytes = 40 * (number as usize % 3);
            assert_eq!(push(&mut producer, number, bytes), Ok(Wake::Nobody));
            pop(&mut consumer, number, bytes);
            assert_empty(&mut consumer);
            assert_eq!(consumer.release(), Wake::Nobody);
        }
    }
}

#[test]
fn push__full_until_released() {
    let (_, mut producer, mut consumer) = ring(4);
    for number in 0..3 {
        assert_eq!(push(&mut producer, number, 48), Ok(Wake::Nobody));
    }
    assert_eq!(push(&mut producer, 3, 48), Err(PushError::Full));
    pop(&mut consumer, 0, 48);
    assert_eq!(push(&mut producer, 3, 48), Err(PushError::Full), "not released");
    assert_eq!(consumer.release(), Wake::Nobody);
    assert_eq!(push(&mut producer, 3, 48), Ok(Wake::Nobody));
    for number in 1..4 {
        pop(&mut consumer, number, 48);
    }
    assert_empty(&mut consumer);
}

#[test]
fn pop__payload_of_an_earlier_lap_is_no_stamp() {
    let (_, mut producer, mut consumer) = ring(4);
    // Slot 1 holds payload in the place of its stamp that equals the stamp of its position in the next lap.
    let meta = record(0, 0).0;
    let bytes: Vec<u8> = stamp(5).to_ne_bytes().repeat(28);
    for bytes in [&bytes[..112], &bytes[..112], &bytes[..48]] {
        let meta = Meta {
            segment_bytes: 112,
            ..meta
        };
        assert_eq!(producer.push(meta, bytes), Ok(Wake::Nobody));
        assert!(consumer.pop().unwrap().is_some());
        assert_eq!(consumer.release(), Wake::Nobody);
    }
    assert_eq!(consumer.head, 5);
    assert_empty(&mut consumer);
}

#[test]
fn push__wakes_a_sleeper_once() {
    let (_, mut producer, mut consumer) = ring(8);
    assert!(consumer.prepare_sleep());
    assert_eq!(push(&mut producer, 0, 1), Ok(Wake::Peer));
    assert_eq!(push(&mut producer, 1, 1), Ok(Wake::Nobody));
    consumer.awake();
    assert!(!consumer.prepare_sleep(), "two records are there");
    consumer.awake();
    pop(&mut consumer, 0, 1);
    pop(&mut consumer, 1, 1);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(consumer.prepare_sleep());
    consumer.awake();
    assert_eq!(push(&mut producer, 2, 1), Ok(Wake::Nobody));
}

#[test]
fn push__ends_a_nap_once() {
    let (memory, mut producer, mut consumer) = ring(8);
    assert!(consumer.prepare_nap());
    assert_eq!(memory.load(Word::Napping, Relaxed), NAPPING);
    assert_eq!(push(&mut producer, 0, 1), Ok(Wake::Napper));
    assert_eq!(memory.load(Word::Napping, Relaxed), 0);
    assert_eq!(push(&mut producer, 1, 1), Ok(Wake::Nobody));
    consumer.end_nap();
    assert!(!consumer.prepare_nap(), "two records are there");
    consumer.end_nap();
    pop(&mut consumer, 0, 1);
    pop(&mut consumer, 1, 1);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(consumer.prepare_nap());
    consumer.end_nap();
    assert_eq!(push(&mut producer, 2, 1), Ok(Wake::Nobody));
}

#[test]
fn push__wakes_a_napper_and_a_sleeper() {
    let (_, mut producer, mut consumer) = ring(8);
    assert!(consumer.prepare_nap() && consumer.prepare_sleep());
    assert_eq!(push(&mut producer, 0, 1), Ok(Wake::Both));
    assert!(consumer.awake(), "the doorbell is rung");
    consumer.end_nap();
    pop(&mut consumer, 0, 1);
    assert_eq!(consumer.release(), Wake::Nobody);
    // The end of one way of sleeping does not concern the other.
    assert!(consumer.prepare_nap() && consumer.prepare_sleep());
    assert!(!consumer.awake());
    assert_eq!(push(&mut producer, 1, 1), Ok(Wake::Napper));
    pop(&mut consumer, 1, 1);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(consumer.prepare_nap() && consumer.prepare_sleep());
    consumer.end_nap();
    assert_eq!(push(&mut producer, 2, 1), Ok(Wake::Peer));
}

#[test]
fn release__wakes_who_wants_room_once() {
    let (_, mut producer, mut consumer) = ring(2);
    assert_eq!(push(&mut producer, 0, 1), Ok(Wake::Nobody));
    assert_eq!(push(&mut producer, 1, 1), Err(PushError::Full));
    assert_eq!(producer.wants_room(), Ok(true));
    pop(&mut consumer, 0, 1);
    assert_eq!(consumer.release(), Wake::Peer);
    assert_eq!(consumer.release(), Wake::Nobody, "nothing new");
    assert_eq!(producer.wants_room(), Ok(false));
    assert_eq!(push(&mut producer, 1, 1), Ok(Wake::Nobody));
    pop(&mut consumer, 1, 1);
    assert_eq!(consumer.release(), Wake::Nobody);
}

const TICKET: Ticket = Ticket {
    qpn: Qpn::new(7),
    end: Psn::new(1),
    incarnation: 0,
};

/// Returns the ticket of request `number`.
fn ticket(number: u32) -> Ticket {
    Ticket {
        end: Psn::new(number),
        ..TICKET
    }
}

/// Puts request `number` of so many bytes into the ring.
fn request<M: RingMemory>(
    producer: &mut Producer<M>,
    number: u32,
    bytes: usize,
) -> Result<Option<Wake>, PushError> {
    let (_, payload) = record(number.into(), bytes);
    producer.request(ticket(number), bytes, |memory, slot| {
        memory.write(slot, &payload);
        true
    })
}

/// Takes request `number`, and defers it if asked to.
fn take_request(consumer: &mut Consumer<Heap>, number: u32, bytes: usize, defers: bool) {
    let taken = consumer.pop().unwrap().expect("a request");
    assert_eq!(taken.train, None);
    let mut out = Vec::new();
    consumer.read(&taken, &mut out);
    assert_eq!(out, record(number.into(), bytes).1);
    if defers {
        consumer.answer(&taken, Taken::Deferred);
    }
}

#[test]
fn request__with_parts_may_have_to_come_again() {
    let (_, mut producer, mut consumer) = ring(16);
    let bytes = 2 * PART_BYTES + 12;
    let put = producer.request_with_parts(ticket(0), bytes, 2, |_, _| true);
    assert_eq!(put, Ok(Some(Wake::Nobody)));
    let taken = consumer.pop().unwrap().expect("a request");
    assert_eq!((taken.bytes, taken.parts, taken.train), (bytes, 2, None));
    consumer.answer(&taken, Taken::Again);
    let _ = consumer.release();
    producer.look_for_ends().unwrap();
    assert_eq!(producer.ended(), Some((ticket(0), Taken::Again)));
    // More than fit into the record, and more than any request has.
    for (bytes, parts) in [(2 * PART_BYTES - 1, 2), (400, PARTS_MAX + 1), (400, 0xffff)] {
        let (_, mut producer, mut consumer) = ring(16);
        let put = producer.request_with_parts(ticket(1), bytes, parts, |_, _| true);
        assert!(matches!(put, Ok(Some(_))), "{put:?}");
        assert_eq!(consumer.pop(), Err(Corrupt), "{parts} parts in {bytes} bytes");
    }
}

#[test]
fn request__ends_when_the_consumer_has_taken_it() {
    let (_, mut producer, mut consumer) = ring(16);
    for number in 0..3 {
        assert_eq!(request(&mut producer, number, 60), Ok(Some(Wake::Nobody)));
    }
    producer.look_for_ends().unwrap();
    assert_eq!(producer.ended(), None);
    take_request(&mut consumer, 0, 60, false);
    take_request(&mut consumer, 1, 60, true);
    producer.look_for_ends().unwrap();
    assert_eq!(producer.ended(), None, "not released");
    assert_eq!(consumer.release(), Wake::Nobody);
    producer.look_for_ends().unwrap();
    assert_eq!(producer.ended(), Some((ticket(0), Taken::Done)));
    assert_eq!(producer.ended(), Some((ticket(1), Taken::Deferred)));
    assert_eq!(producer.ended(), None);
    assert!(producer.has_requests());
}

#[test]
fn oldest_end__stays_until_it_is_passed() {
    let (_, mut producer, mut consumer) = ring(16);
    assert_eq!(producer.oldest_end(), None);
    for number in 0..3 {
        assert_eq!(request(&mut producer, number, 60), Ok(Some(Wake::Nobody)));
    }
    take_request(&mut consumer, 0, 60, true);
    take_request(&mut consumer, 1, 60, false);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert_eq!(producer.oldest_end(), None, "nobody has looked");
    producer.look_for_ends().unwrap();
    for _ in 0..2 {
        assert_eq!(producer.oldest_end(), Some((ticket(0), Taken::Deferred)));
    }
    producer.pass_end();
    assert_eq!(producer.oldest_end(), Some((ticket(1), Taken::Done)));
    assert_eq!(producer.ended(), Some((ticket(1), Taken::Done)));
    assert_eq!(producer.oldest_end(), None);
    assert!(producer.has_requests());
}

#[test]
fn ended_before__not_what_a_later_look_has_found() {
    for place in [0, u32::MAX - 3] {
        let (_, mut producer, mut consumer) = ring_at(16, place);
        for number in 0..2 {
            assert_eq!(request(&mut producer, number, 60), Ok(Some(Wake::Nobody)));
        }
        producer.look_for_ends().unwrap();
        let none = producer.seen();
        take_request(&mut consumer, 0, 60, false);
        assert_eq!(consumer.release(), Wake::Nobody);
        producer.look_for_ends().unwrap();
        let first = producer.seen();
        take_request(&mut consumer, 1, 60, false);
        assert_eq!(consumer.release(), Wake::Nobody);
        producer.look_for_ends().unwrap();
        assert_eq!(producer.ended_before(none), None);
        assert_eq!(producer.ended_before(first), Some((ticket(0), Taken::Done)));
        assert_eq!(producer.ended_before(first), None);
        assert_eq!(
            producer.ended_before(producer.seen()),
            Some((ticket(1), Taken::Done))
        );
    }
}

#[test]
fn peek__leaves_the_record_until_it_is_taken() {
    // The second record skips the end of the ring.
    let (_, mut producer, mut consumer) = ring_at(8, 5);
    assert_eq!(consumer.peek(), Ok(None));
    assert_eq!(push(&mut producer, 0, 40), Ok(Wake::Nobody));
    assert_eq!(push(&mut producer, 1, 150), Ok(Wake::Nobody));
    for number in 0..2 {
        let next = consumer.peek().unwrap().expect("a record");
        assert_eq!(consumer.peek(), Ok(Some(next)));
        assert_eq!(consumer.release(), Wake::Nobody);
        assert_eq!(consumer.advance(&next), next.record);
        let mut out = Vec::new();
        consumer.read(&next.record, &mut out);
        assert_eq!(out, record(number, [40, 150][number as usize]).1);
        assert_eq!(consumer.release(), Wake::Nobody);
        assert_eq!(producer.taken().0, consumer.position());
    }
    assert_empty(&mut consumer);
}

#[test]
fn is_record_at__and_has_moved_say_what_the_sides_say() {
    let (memory, mut producer, mut consumer) = ring(16);
    for number in 0..20 {
        assert!(!is_record_at(&memory, consumer.position()) && !consumer.is_ready());
        assert_eq!(request(&mut producer, number, 100), Ok(Some(Wake::Nobody)));
        assert!(is_record_at(&memory, consumer.position()) && consumer.is_ready());
        assert!(!has_moved(&memory, producer.seen()) && !producer.has_news());
        take_request(&mut consumer, number, 100, false);
        assert_eq!(consumer.release(), Wake::Nobody);
        assert!(has_moved(&memory, producer.seen()) && producer.has_news());
        producer.look_for_ends().unwrap();
        assert!(!has_moved(&memory, producer.seen()));
        assert!(producer.ended().is_some());
    }
}

#[test]
fn has_news__until_ends_were_looked_at() {
    let (_, mut producer, mut consumer) = ring(16);
    assert_eq!(push(&mut producer, 0, 40), Ok(Wake::Nobody));
    pop(&mut consumer, 0, 40);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(!producer.has_news(), "a train has no end");
    assert_eq!(request(&mut producer, 1, 40), Ok(Some(Wake::Nobody)));
    producer.look_for_ends().unwrap();
    assert!(!producer.has_news());
    take_request(&mut consumer, 1, 40, false);
    assert!(!producer.has_news());
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(producer.has_news());
    // Somebody has looked, as for room, and has left the end.
    producer.look_for_ends().unwrap();
    assert!(producer.has_news());
    assert!(producer.ended().is_some());
    assert!(!producer.has_news());
}

#[test]
fn request__keeps_its_slots_until_its_end_was_looked_at() {
    let (_, mut producer, mut consumer) = ring(4);
    assert_eq!(request(&mut producer, 0, 40), Ok(Some(Wake::Nobody)));
    for number in 1..3 {
        assert_eq!(push(&mut producer, number, 40), Ok(Wake::Nobody));
    }
    take_request(&mut consumer, 0, 40, true);
    pop(&mut consumer, 1, 40);
    pop(&mut consumer, 2, 40);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert_eq!(
        push(&mut producer, 3, 40),
        Err(PushError::Full),
        "a verdict is in the slot"
    );
    assert_eq!(producer.ended(), Some((ticket(0), Taken::Deferred)));
    assert_eq!(push(&mut producer, 3, 40), Ok(Wake::Nobody));
    // The verdict of a record that had the slot before does not remain.
    for number in 4..12 {
        pop(&mut consumer, u64::from(number) - 1, 40);
        assert_eq!(consumer.release(), Wake::Nobody);
        assert_eq!(request(&mut producer, number, 40), Ok(Some(Wake::Nobody)));
        take_request(&mut consumer, number, 40, false);
        assert_eq!(consumer.release(), Wake::Nobody);
        producer.look_for_ends().unwrap();
        assert_eq!(producer.ended(), Some((ticket(number), Taken::Done)));
        assert_eq!(push(&mut producer, number.into(), 40), Ok(Wake::Nobody));
    }
}

#[test]
fn request__that_is_not_filled_leaves_nothing() {
    for place in 0..8 {
        let (_, mut producer, mut consumer) = ring_at(8, place);
        assert_eq!(producer.request(TICKET, 150, |_, _| false), Ok(None));
        assert_empty(&mut consumer);
        assert!(!producer.has_requests());
        assert_eq!(push(&mut producer, 1, 100), Ok(Wake::Nobody));
        pop(&mut consumer, 1, 100);
        assert_empty(&mut consumer);
    }
}

#[test]
fn wants_ends__is_woken_when_the_consumer_has_nothing_else_to_do() {
    let (_, mut producer, mut consumer) = ring(64);
    assert_eq!(request(&mut producer, 0, 1), Ok(Some(Wake::Nobody)));
    assert_eq!(producer.wants_ends(), Ok(true));
    take_request(&mut consumer, 0, 1, false);
    assert_eq!(consumer.release(), Wake::Nobody);
    assert!(consumer.owes_wake());
    assert_eq!(consumer.tell_ends(), Wake::Peer);
    assert_eq!(consumer.tell_ends(), Wake::Nobody);
    assert_eq!(producer.wants_ends(), Ok(false), "it has ended");
    assert_eq!(producer.ended(), Some((ticket(0), Taken::Done)));
    // Another wake-up stands for it.
    assert_eq!(request(&mut producer, 1, 1), Ok(Some(Wake::Nobody)));
    assert_eq!(producer.wants_ends(), Ok(true));
    take_request(&mut consumer, 1, 1, false);
    assert_eq!(consumer.release(), Wake::Nobody);
    consumer.is_told();
    assert_eq!(consumer.tell_ends(), Wake::Nobody);
    // It is not put off for ever.
    producer.look_for_ends().unwrap();
    assert!(producer.ended().is_some());
    let mut releases = 0;
    for number in 2..40 {
        assert_eq!(request(&mut producer, number, 1), Ok(Some(Wake::Nobody)));
        if number == 2 {
            assert_eq!(producer.wants_ends(), Ok(true));
        }
        take_request(&mut consumer, number, 1, false);
        releases += 1;
        if consumer.release() == Wake::Peer {
            break;
        }
    }
    assert_eq!(releases, UNTOLD_MAX + 1);
}

#[test]
fn pop__refuses_what_no_producer_writes() {
    // Slot, bytes, segment bytes, kind; a record of 8 slots has 240 bytes at most.
    let cases = [
        (0, 1, 1, 0),
        (0, 1, 1, REQUEST + 1),
        (0, 0, 1, SKIP),
        (0, 1, 0, DATA),
        (0, 65, 1, DATA),
        (0, 241, 241, DATA),
        (0, u32::MAX, u16::MAX, DATA),
        (6, 113, 113, DATA),
        (0, 241, 0, REQUEST),
        (6, 113, 0, REQUEST),
    ];
    for (slot, bytes, segment_bytes, kind) in cases {
        let (memory, _, mut consumer) = ring_at(8, slot);
        let meta = Meta {
            segment_bytes,
            traffic_class: 0,
        };
        memory.store(Word::Stamp(slot), stamp(slot), Relaxed);
        memory.store(Word::Bytes(slot), bytes, Relaxed);
        memory.store(Word::Form(slot), meta.form(kind), Relaxed);
        let taken = consumer.pop();
        assert_eq!(taken, Err(Corrupt), "{bytes} bytes, kind {kind}");
        assert_eq!(consumer.head, slot);
    }
}

#[test]
fn pop__refuses_a_skip_without_a_record_behind_it() {
    let (memory, _, mut consumer) = ring_at(8, 3);
    memory.store(Word::Stamp(3), stamp(3), Relaxed);
    memory.store(Word::Form(3), record(0, 0).0.form(SKIP), Relaxed);
    assert_eq!(consumer.pop(), Err(Corrupt));
    assert_eq!(consumer.head, 3);
}

/// Memory of a producer that has put another `SKIP` wherever its consumer looks next.
#[derive(Clone)]
struct Skips(Cell<u32>);

impl RingMemory for Skips {
    fn slots(&self) -> u32 {
        8
    }

    fn load(&self, word: Word, _: Ordering) -> u32 {
        match word {
            Word::Stamp(slot) => {
                let position = self.0.get();
                assert!(position < 80, "pop goes on for ever");
                self.0.set(position + 8 - slot);
                stamp(position)
            }
            Word::Form(_) => record(0, 0).0.form(SKIP),
            _ => 0,
        }
    }

    fn store(&self, _: Word, _: u32, _: Ordering) {}
    fn fence(&self, _: Ordering) {}
    fn write(&self, _: u32, _: &[u8]) {}
    fn read(&self, _: u32, _: usize, _: &mut Vec<u8>) {}
}

#[test]
fn pop__ends_where_one_skip_follows_another() {
    let (_, mut consumer) = sides(Skips(Cell::new(3)), 3);
    assert_eq!(consumer.pop(), Err(Corrupt));
}

#[test]
fn pop__refuses_the_stamp_of_another_lap() {
    let (memory, _, mut consumer) = ring(8);
    memory.store(Word::Stamp(0), stamp(8), Relaxed);
    assert!(consumer.is_ready());
    assert_eq!(consumer.pop(), Err(Corrupt));
}

#[test]
fn push__refuses_a_head_that_is_nowhere() {
    for head in [1, 2, 3, 5 + 4, u32::MAX] {
        let (memory, mut producer, mut consumer) = ring_at(4, 4);
        for number in 0..3 {
            assert_eq!(push(&mut producer, number, 1), Ok(Wake::Nobody));
        }
        pop(&mut consumer, 0, 1);
        memory.store(Word::Head, head, Relaxed);
        assert_eq!(
            push(&mut producer, 3, 1),
            Err(PushError::Corrupt(Corrupt)),
            "head {head}"
        );
        assert_eq!(producer.wants_room(), Err(Corrupt));
    }
}

#[test]
fn pop__any_bytes_give_a_train_or_corrupt() {
    const SLOTS: u32 = 16;
    for seed in 0..20_000 {
        let mut dice = Dice(seed);
        let (memory, mut producer, mut consumer) = ring_at(SLOTS, dice.next() as u32);
        let mut out = Vec::new();
        // The consumer refuses pure noise at the first word, so part of the memory stays as a producer left it.
        for _ in 0..16 {
            let _ = push(&mut producer, seed, dice.below(bytes_max(SLOTS) + 1));
            for _ in 0..dice.below(4) {
                let word = &memory.words[dice.below(memory.words.len())];
                let value = dice.next() as u32;
                word.store(
                    [value, value & 0x0300_00ff, stamp(consumer.head)][dice.below(3)],
                    Relaxed,
                );
            }
            if let Ok(Some(record)) = consumer.pop() {
                consumer.read(&record, &mut out);
                let bytes = out.len();
                let is_train = record.train.is_none_or(|meta| meta.is_train_of(bytes));
                assert!(is_train && bytes <= bytes_max(SLOTS), "seed {seed}");
            }
            let _ = consumer.release();
        }
    }
}

#[test]
fn pop__beside_a_process_that_writes_anything_anywhere() {
    let (memory, mut producer, mut consumer) = ring(16);
    let stop = Arc::new(AtomicBool::new(false));
    let vandal = thread::spawn({
        let (memory, stop) = (memory.clone(), Arc::clone(&stop));
        move || {
            let mut dice = Dice(1);
            while !stop.load(Relaxed) {
                let word = &memory.words[dice.below(memory.words.len())];
                let value = dice.next() as u32;
                word.store([value, value & 0x0300_00ff, value & 0xff][dice.below(3)], Relaxed);
            }
        }
    });
    let mut dice = Dice(2);
    let mut out = Vec::new();
    for round in 0..100_000 {
        let pushed = push(&mut producer, 0, dice.below(bytes_max(16) + 1));
        if pushed == Err(PushError::Full) {
            let _ = producer.wants_room();
        }
        let requested = producer.request(TICKET, dice.below(bytes_max(16) + 1), |_, _| true);
        if requested.is_ok() && producer.look_for_ends().is_ok() {
            while producer.ended().is_some() {}
            let _ = producer.wants_ends();
        }
        let popped = consumer.pop();
        if let Ok(Some(record)) = popped {
            consumer.read(&record, &mut out);
            assert!(record.train.is_none_or(|meta| meta.is_train_of(out.len())));
            consumer.answer(&record, Taken::Deferred);
            let _ = consumer.release();
            let _ = consumer.tell_ends();
        }
        let _ = consumer.prepare_sleep();
        consumer.awake();
        // Both sides begin anew; otherwise they would find nothing but Corrupt.
        let corrupt = PushError::Corrupt(Corrupt);
        if popped == Err(Corrupt) || pushed == Err(corrupt) || requested == Err(corrupt) {
            memory.store(Word::Head, round, Relaxed);
            memory.store(Word::Stamp(round % 16), 0, Relaxed);
            (producer, consumer) = sides(memory.clone(), round);
        }
    }
    stop.store(true, Relaxed);
    vandal.join().unwrap();
}

/// Two threads, each of which sleeps when it has nothing to do, until the other one unparks it.
#[test]
fn soak__two_threads() {
    const RECORDS: u64 = 100_000;
    const SLOTS: u32 = 64;
    const SEED: u64 = 3;
    let deadline = Instant::now() + Duration::from_secs(60);
    // A parked thread may return without cause now and then, but must never miss an unpark.
    let sleep = move || {
        thread::park_timeout(deadline.saturating_duration_since(Instant::now()));
        assert!(Instant::now() < deadline, "a wake-up was lost");
    };
    let (_, mut producer, mut consumer) = ring(SLOTS);
    let consumer_thread = thread::current();
    let producer_thread = thread::spawn(move || {
        let mut sizes = Dice(SEED);
        for number in 0..RECORDS {
            let bytes = sizes.below(bytes_max(SLOTS) + 1) >> sizes.below(8);
            loop {
                match push(&mut producer, number, bytes) {
                    Ok(Wake::Nobody) => break,
                    Ok(_) => break consumer_thread.unpark(),
                    Err(PushError::Full) if producer.wants_room().unwrap() => sleep(),
                    Err(PushError::Full) => {}
                    Err(PushError::Corrupt(e)) => panic!("{e}"),
                }
            }
        }
    });
    let mut sizes = Dice(SEED);
    let mut number = 0;
    while number < RECORDS {
        for _ in 0..16 {
            if number == RECORDS || !consumer.is_ready() {
                break;
            }
            pop(
                &mut consumer,
                number,
                sizes.below(bytes_max(SLOTS) + 1) >> sizes.below(8),
            );
            number += 1;
        }
        if consumer.release() == Wake::Peer {
            producer_thread.thread().unpark();
        }
        if number < RECORDS && consumer.prepare_sleep() {
            sleep();
        }
        consumer.awake();
    }
    producer_thread.join().unwrap();
    assert_empty(&mut consumer);
}
