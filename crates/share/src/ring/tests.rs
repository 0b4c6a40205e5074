use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_wire::RKey;
use rdmux_wire::node::{QueueId, Remote, WorkData, WorkFlags, WorkOperation};

use super::ready::{RINGS_PER_WORD, ReadyMemory};
use super::*;

mod lines;
mod model;

/// A ring's memory on the heap.
#[derive(Clone, Debug)]
struct Heap {
    slots: u32,
    words: Arc<[AtomicU32; 4]>,
    descriptors: Arc<[[AtomicU64; 8]]>,
}

impl Heap {
    /// Memory of a ring whose sides are at a position.
    fn new(slots: u32, position: u32) -> Heap {
        let words = [position, 0, position, 0].map(AtomicU32::new);
        let descriptors = (0..slots).map(|_| [0; 8].map(AtomicU64::new)).collect();
        Heap {
            slots,
            words: Arc::new(words),
            descriptors,
        }
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        &self.words[word as usize]
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

    fn read(&self, slot: u32) -> Descriptor {
        let mut descriptor = [0; 64];
        let chunks = descriptor.as_chunks_mut().0;
        for (eight, word) in chunks.iter_mut().zip(&self.descriptors[slot as usize]) {
            *eight = word.load(Relaxed).to_ne_bytes();
        }
        descriptor
    }

    fn write(&self, slot: u32, descriptor: &Descriptor) {
        let chunks = descriptor.as_chunks().0;
        for (eight, word) in chunks.iter().zip(&self.descriptors[slot as usize]) {
            word.store(u64::from_ne_bytes(*eight), Relaxed);
        }
    }
}

type Sides = (Heap, Producer<Heap>, Consumer<Heap>);

fn ring(slots: u32) -> Sides {
    ring_at(slots, 0)
}

fn ring_at(slots: u32, position: u32) -> Sides {
    let memory = Heap::new(slots, position);
    let sides = (Producer::new(memory.clone()), Consumer::new(memory.clone()));
    (memory, sides.0, sides.1)
}

/// Memory of a set of rings on the heap.
#[derive(Clone, Debug)]
struct Set {
    rings: u32,
    sleeping: Arc<AtomicU32>,
    words: Arc<[AtomicU64]>,
}

impl Set {
    fn new(rings: u32) -> Set {
        let words = (0..rings.div_ceil(RINGS_PER_WORD)).map(|_| AtomicU64::new(0));
        Set {
            rings,
            sleeping: Arc::default(),
            words: words.collect(),
        }
    }
}

impl ReadyMemory for Set {
    fn rings(&self) -> u32 {
        self.rings
    }

    fn load(&self, word: u32, order: Ordering) -> u64 {
        self.words[word as usize].load(order)
    }

    fn set(&self, word: u32, bits: u64, order: Ordering) -> u64 {
        self.words[word as usize].fetch_or(bits, order)
    }

    fn clear(&self, word: u32, order: Ordering) -> u64 {
        self.words[word as usize].swap(0, order)
    }

    fn sleeping(&self, order: Ordering) -> u32 {
        self.sleeping.load(order)
    }

    fn set_sleeping(&self, value: u32, order: Ordering) {
        self.sleeping.store(value, order);
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
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

/// Returns descriptor `number`, which differs from every other one in each eight bytes.
fn descriptor(number: u64) -> Descriptor {
    let mut descriptor = [0; 64];
    for (index, eight) in descriptor.as_chunks_mut().0.iter_mut().enumerate() {
        *eight = (number * 8 + index as u64).to_ne_bytes();
    }
    descriptor
}

fn descriptors(numbers: std::ops::Range<u64>) -> Vec<Descriptor> {
    numbers.map(descriptor).collect()
}

/// Takes one descriptor.
fn take(consumer: &mut Consumer<Heap>) -> Option<Descriptor> {
    let mut out = [[0; 64]];
    (consumer.take(&mut out).unwrap() == 1).then_some(out[0])
}

/// A request with so many bytes inline; its `wr_id` tells it from others.
fn send(wr_id: u64, inline: u16) -> Work {
    Work {
        queue: QueueId(7),
        wr_id,
        flags: WorkFlags::SIGNALED,
        operation: WorkOperation::Write {
            remote: Remote {
                va: 0x1000,
                rkey: RKey(3),
            },
            imm: None,
        },
        data: WorkData::Inline(inline),
    }
}

/// The bytes inline of [`send`].
fn payload(wr_id: u64, inline: u16) -> Vec<u8> {
    let mut dice = Dice(wr_id);
    (0..inline).map(|_| dice.next() as u8).collect()
}

fn push_send(producer: &mut Producer<Heap>, wr_id: u64, inline: u16) -> Result<(), PushError> {
    producer.push_work(&send(wr_id, inline), |work, bytes| {
        work.put_inline(bytes, &payload(wr_id, inline));
    })
}

fn take_send(consumer: &mut Consumer<Heap>, wr_id: u64, inline: u16) {
    let mut bytes = WorkBytes::new();
    let work = consumer.take_work(&mut bytes).unwrap();
    assert_eq!(work, Some(send(wr_id, inline)));
    assert_eq!(work.unwrap().inline(bytes.bytes()), payload(wr_id, inline));
}

#[test]
fn take__in_order_once_published() {
    let (_, mut producer, mut consumer) = ring(8);
    assert_eq!(producer.publish(), Tell::Nothing);
    producer.push(&descriptors(0..2)).unwrap();
    producer.push(&descriptors(2..3)).unwrap();
    assert_eq!(take(&mut consumer), None);
    assert_eq!(producer.publish(), Tell::Nothing);
    let mut out = [[0; 64]; 8];
    assert_eq!(consumer.take(&mut out[..2]), Ok(2));
    assert_eq!(consumer.take(&mut out[2..]), Ok(1));
    assert_eq!(consumer.take(&mut out), Ok(0));
    assert_eq!(out[..3], descriptors(0..3)[..]);
}

#[test]
fn push__all_or_none() {
    let (memory, mut producer, mut consumer) = ring(4);
    producer.push(&descriptors(0..3)).unwrap();
    assert_eq!(producer.push(&descriptors(3..5)), Err(PushError::Full));
    assert_eq!(producer.push(&descriptors(3..8)), Err(PushError::Full));
    producer.push(&descriptors(3..4)).unwrap();
    let _ = producer.publish();
    assert_eq!(producer.push(&descriptors(4..5)), Err(PushError::Full));
    assert_eq!(take(&mut consumer), Some(descriptor(0)));
    assert_eq!(producer.push(&descriptors(4..5)), Err(PushError::Full));
    let _ = consumer.release();
    assert_eq!(memory.load(Word::Head, Relaxed), 1);
    producer.push(&descriptors(4..5)).unwrap();
}

#[test]
fn push_work__each_length_past_the_last_position() {
    let (_, mut producer, mut consumer) = ring_at(SLOTS_MIN, u32::MAX - 100);
    for inline in 0..=Work::INLINE_BYTES_MAX as u16 {
        push_send(&mut producer, inline.into(), inline).unwrap();
        let _ = producer.publish();
        take_send(&mut consumer, inline.into(), inline);
        let _ = consumer.release();
    }
}

#[test]
fn new__goes_on_where_the_memory_says() {
    let (memory, mut producer, mut consumer) = ring_at(8, u32::MAX);
    producer.push(&descriptors(0..3)).unwrap();
    let _ = producer.publish();
    assert_eq!(take(&mut consumer), Some(descriptor(0)));
    let _ = consumer.release();
    let (mut producer, mut consumer) = (Producer::new(memory.clone()), Consumer::new(memory));
    assert_eq!(producer.push(&descriptors(3..10)), Err(PushError::Full));
    producer.push(&descriptors(3..9)).unwrap();
    let _ = producer.publish();
    for number in 1..9 {
        assert_eq!(take(&mut consumer), Some(descriptor(number)));
    }
    assert_eq!(take(&mut consumer), None);
}

/// Random calls against a queue, in rings of several sizes from positions before and after the wrap of positions.
#[test]
fn ring__as_a_queue_does() {
    let seeds = match std::env::var("RDMUX_RING_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (0..2_000).collect::<Vec<u64>>(),
    };
    for seed in seeds {
        println!("RDMUX_RING_SEED={seed}");
        as_a_queue_does(seed);
    }
}

fn as_a_queue_does(seed: u64) {
    let mut dice = Dice(seed);
    let slots = 1 << dice.below(6);
    let position = [0, u32::MAX - 50, 1 << 31, dice.next() as u32][dice.below(4)];
    let (_, mut producer, mut consumer) = ring_at(slots, position);
    let (mut pushed, mut published, mut taken) = (VecDeque::new(), VecDeque::new(), 0);
    // Slots that are not free: those taken and not released as well.
    let (mut held, mut next) = (0, 0);
    for _ in 0..200 {
        match dice.below(4) {
            0 => {
                let count = dice.below(slots as usize + 2) as u64;
                let all = descriptors(next..next + count);
                let used = pushed.len() + published.len() + held;
                let result = producer.push(&all);
                if used + all.len() > slots as usize {
                    assert_eq!(result, Err(PushError::Full));
                } else {
                    assert_eq!(result, Ok(()));
                    next += count;
                    pushed.extend(all);
                }
            }
            1 => {
                assert_eq!(producer.publish(), Tell::Nothing);
                published.append(&mut pushed);
            }
            2 => {
                let mut out = vec![[0; 64]; dice.below(slots as usize + 2)];
                let count = consumer.take(&mut out).unwrap();
                // A consumer that has seen some looks for more only when it has taken them.
                assert!(count > 0 || out.is_empty() || published.is_empty());
                for found in &out[..count] {
                    assert_eq!(Some(*found), published.pop_front());
                }
                held += count;
                taken += count;
            }
            _ => {
                assert_eq!(consumer.release(), Tell::Nothing);
                held = 0;
            }
        }
    }
    let _ = producer.publish();
    published.append(&mut pushed);
    while let Some(found) = take(&mut consumer) {
        assert_eq!(Some(found), published.pop_front());
        taken += 1;
    }
    assert_eq!((taken as u64, published.len()), (next, 0));
}

#[test]
fn publish__tells_a_consumer_that_sleeps() {
    let (_, mut producer, mut consumer) = ring(8);
    assert_eq!(consumer.prepare_sleep(), Ok(true));
    producer.push(&descriptors(0..1)).unwrap();
    assert_eq!(producer.publish(), Tell::Ring);
    consumer.awake();
    producer.push(&descriptors(1..2)).unwrap();
    assert_eq!(producer.publish(), Tell::Nothing);
    assert_eq!(take(&mut consumer), Some(descriptor(0)));
    assert_eq!(take(&mut consumer), Some(descriptor(1)));
    for _ in 0..2 {
        assert_eq!(consumer.release(), Tell::Nothing);
    }
    producer.push(&descriptors(2..3)).unwrap();
    let _ = producer.publish();
    assert_eq!(consumer.prepare_sleep(), Ok(false));
}

#[test]
fn release__tells_who_wants_room_at_half_or_when_it_is_empty() {
    for batch in [1, 3, 4, 8] {
        let (_, mut producer, mut consumer) = ring(8);
        producer.push(&descriptors(0..8)).unwrap();
        let _ = producer.publish();
        assert_eq!(producer.push(&descriptors(8..9)), Err(PushError::Full));
        assert_eq!(producer.wants_room(), Ok(true));
        let (mut taken, mut told) = (0, None);
        let mut out = [[0; 64]; 8];
        while told.is_none() {
            taken += consumer.take(&mut out[..batch]).unwrap();
            if consumer.release() == Tell::Ring {
                told = Some(taken);
            }
        }
        assert_eq!(told, Some(4usize.next_multiple_of(batch)));
        assert_eq!(producer.wants_room(), Ok(false));
        assert_eq!(producer.push(&descriptors(8..9)), Ok(()));
    }
    let (_, mut producer, mut consumer) = ring(8);
    producer.push(&descriptors(0..3)).unwrap();
    let _ = producer.publish();
    assert_eq!(producer.push(&descriptors(3..9)), Err(PushError::Full));
    assert_eq!(producer.wants_room(), Ok(true));
    assert_eq!(consumer.take(&mut [[0; 64]; 8]), Ok(3));
    assert_eq!(consumer.release(), Tell::Nothing);
    assert_eq!(consumer.take(&mut [[0; 64]; 8]), Ok(0));
    assert_eq!(consumer.release(), Tell::Ring);
}

#[test]
fn announce__rings_once_for_a_sleep() {
    let set = Set::new(130);
    let (announcer, mut ready) = (Announcer::new(set.clone()), ReadySet::new(set));
    assert!(!announcer.announce(3), "nobody sleeps");
    assert!(!ready.prepare_sleep());
    ready.awake();
    assert_eq!(taken(&mut ready), [3]);
    assert!(ready.prepare_sleep());
    assert!(announcer.announce(129));
    assert!(!announcer.announce(0));
    assert!(!announcer.announce(129));
    ready.awake();
    assert_eq!(taken(&mut ready), [0, 129]);
    assert_eq!(taken(&mut ready), [0_u32; 0]);
}

fn taken(ready: &mut ReadySet<Set>) -> Vec<u32> {
    let mut rings = Vec::new();
    ready.take(|ring| rings.push(ring)).unwrap();
    rings
}

#[test]
fn take_some__goes_on_where_it_has_stopped() {
    let set = Set::new(200);
    let (announcer, mut ready) = (Announcer::new(set.clone()), ReadySet::new(set));
    let announce = || [1, 3, 70, 150, 199].map(|ring| announcer.announce(ring));
    let some = |ready: &mut ReadySet<Set>, limit| {
        let mut rings = Vec::new();
        ready.take_some(limit, |ring| rings.push(ring)).unwrap();
        rings
    };
    let _ = announce();
    assert_eq!(some(&mut ready, 0), [0_u32; 0]);
    assert_eq!(some(&mut ready, 1), [1, 3]);
    // These are behind the others.
    let _ = announce();
    assert!(!ready.prepare_sleep());
    assert_eq!(some(&mut ready, 2), [70, 150]);
    assert_eq!(some(&mut ready, 9), [199, 1, 3]);
    assert!(ready.prepare_sleep());
}

#[test]
fn take__refuses_a_ring_that_does_not_exist() {
    let set = Set::new(70);
    let mut ready = ReadySet::new(set.clone());
    set.words[1].store(0b100_0011, Relaxed);
    let mut rings = Vec::new();
    assert_eq!(ready.take(|ring| rings.push(ring)), Err(Corrupt::Ring(70)));
    assert_eq!(rings, [64, 65]);
}

#[test]
fn take__refuses_a_tail_that_is_nowhere() {
    for position in [0, 3, u32::MAX - 2] {
        for (ahead, is_valid) in [(0, false), (1, true), (8, true), (9, false), (1 << 31, false)] {
            let (memory, _, mut consumer) = ring_at(8, position);
            // The consumer has seen one descriptor, and left it there.
            memory.store(Word::Tail, position.wrapping_add(1), Relaxed);
            assert_eq!(consumer.take(&mut []), Ok(0));
            memory.store(Word::Tail, position.wrapping_add(ahead), Relaxed);
            assert_eq!(consumer.prepare_sleep().is_ok(), is_valid, "{ahead}");
            assert_eq!(consumer.head, position);
        }
    }
}

#[test]
fn take__refuses_more_than_was_released() {
    let (memory, mut producer, mut consumer) = ring(8);
    producer.push(&descriptors(0..8)).unwrap();
    let _ = producer.publish();
    assert_eq!(consumer.take(&mut [[0; 64]; 8]), Ok(8));
    memory.store(Word::Tail, 9, Relaxed);
    let refused = Err(Corrupt::Tail {
        tail: 9,
        from: 8,
        to: 8,
    });
    assert_eq!(consumer.take(&mut [[0; 64]; 8]), refused);
}

#[test]
fn push__refuses_a_head_that_is_nowhere() {
    // The producer has pushed 4 and published 3, and seen the head at 1.
    for (head, is_valid) in [(0, false), (1, true), (3, true), (4, false), (1 << 31, false)] {
        let position = u32::MAX - 1;
        let (memory, mut producer, _) = ring_at(4, position);
        producer.push(&descriptors(0..3)).unwrap();
        let _ = producer.publish();
        memory.store(Word::Head, position.wrapping_add(1), Relaxed);
        assert_eq!(producer.push(&descriptors(3..6)), Err(PushError::Full));
        producer.push(&descriptors(3..4)).unwrap();
        memory.store(Word::Head, position.wrapping_add(head), Relaxed);
        let pushed = producer.push(&descriptors(4..8));
        let expected = if is_valid {
            Err(PushError::Full)
        } else {
            Err(PushError::Corrupt(Corrupt::Head {
                head: position.wrapping_add(head),
                from: position.wrapping_add(1),
                to: position.wrapping_add(3),
            }))
        };
        assert_eq!(pushed, expected);
    }
}

#[test]
fn take_work__refuses_a_request_that_is_cut() {
    let (_, mut producer, mut consumer) = ring(32);
    let mut bytes = [[0; 64]; 2];
    send(1, 64).emit(&mut bytes[0]);
    producer.push(&bytes[..1]).unwrap();
    let _ = producer.publish();
    let cut = Err(Corrupt::Cut {
        published: 1,
        needed: 2,
    });
    assert_eq!(consumer.take_work(&mut WorkBytes::new()), cut);
}

/// The consumer knows of the first descriptors of a request and not yet of the others.
#[test]
fn take_work__that_was_published_after_the_last_look() {
    let (_, mut producer, mut consumer) = ring(32);
    push_send(&mut producer, 1, 0).unwrap();
    let _ = producer.publish();
    // This look finds one request.
    assert_eq!(consumer.take(&mut []), Ok(0));
    push_send(&mut producer, 2, 1024).unwrap();
    let _ = producer.publish();
    take_send(&mut consumer, 1, 0);
    take_send(&mut consumer, 2, 1024);
}

#[test]
fn take_work__refuses_what_no_producer_writes() {
    let (_, mut producer, mut consumer) = ring(32);
    producer.push(&[[0; 64]]).unwrap();
    let _ = producer.publish();
    let work = consumer.take_work(&mut WorkBytes::new());
    assert!(matches!(work, Err(Corrupt::Descriptor(_))), "{work:?}");
}

/// Writes anything somewhere into a ring and a set.
fn harm(memory: &Heap, set: &Set, dice: &mut Dice) {
    let value = dice.next();
    let near = memory.word([Word::Tail, Word::Head][dice.below(2)]).load(Relaxed);
    let near = near.wrapping_add(dice.below(40) as u32).wrapping_sub(4);
    match dice.below(8) {
        0 | 1 => memory.words[dice.below(4)].store([value as u32, near][dice.below(2)], Relaxed),
        2 => set.words[dice.below(set.words.len())].store(value, Relaxed),
        3 => set.sleeping.store(value as u32, Relaxed),
        _ => {
            let mut bytes = value.to_ne_bytes();
            // An opcode, flags and a count that are often valid.
            bytes[0] %= 14;
            bytes[1] %= 16;
            bytes[3] %= 2;
            let descriptor = &memory.descriptors[dice.below(memory.descriptors.len())];
            let word = dice.below(16).saturating_sub(8);
            descriptor[word].store(u64::from_ne_bytes(bytes), Relaxed);
        }
    }
}

/// Both roles of the node in one ring, whose other sides an application plays that writes anything.
struct Harmed {
    memory: Heap,
    producer: Producer<Heap>,
    consumer: Consumer<Heap>,
    announcer: Announcer<Set>,
    ready: ReadySet<Set>,
    bytes: WorkBytes,
    taken: u64,
    corrupt: u64,
}

impl Harmed {
    const RINGS: u32 = 70;

    fn new(position: u32) -> (Harmed, Heap, Set) {
        let (memory, producer, consumer) = ring_at(SLOTS_MIN, position);
        let set = Set::new(Harmed::RINGS);
        let harmed = Harmed {
            memory: memory.clone(),
            producer,
            consumer,
            announcer: Announcer::new(set.clone()),
            ready: ReadySet::new(set.clone()),
            bytes: WorkBytes::new(),
            taken: 0,
            corrupt: 0,
        };
        (harmed, memory, set)
    }

    /// Makes each call of the node once. A result is valid or corrupt.
    fn round(&mut self, round: u64) {
        let refused = [self.takes().is_err(), self.pushes(round).is_err()];
        self.announces(round);
        if refused.contains(&true) {
            // Another application takes the place of the one that is detached.
            self.corrupt += 1;
            let position = self.memory.load(Word::Head, Relaxed);
            self.memory.store(Word::Tail, position, Relaxed);
            self.producer = Producer::new(self.memory.clone());
            self.consumer = Consumer::new(self.memory.clone());
        }
    }

    fn takes(&mut self) -> Result<(), Corrupt> {
        let (consumer, bytes) = (&mut self.consumer, &mut self.bytes);
        if let Some(work) = consumer.take_work(bytes)? {
            assert!(work.descriptors() <= WORK_DESCRIPTORS_MAX);
            let (WorkData::Elements(count) | WorkData::Inline(count)) = work.data;
            let data = work.elements(bytes.bytes()).count() + work.inline(bytes.bytes()).len();
            assert_eq!(data, usize::from(count));
            self.taken += 1;
        }
        let count = consumer.take(&mut [[0; 64]; 2])?;
        assert!(count <= 2);
        let _ = consumer.release();
        if consumer.untold == 0 {
            consumer.prepare_sleep()?;
            consumer.awake();
        }
        Ok(())
    }

    fn pushes(&mut self, round: u64) -> Result<(), Corrupt> {
        let pushed = push_send(&mut self.producer, round, (round % 100) as u16);
        assert!(self.producer.free() <= SLOTS_MIN);
        let _ = self.producer.publish();
        match pushed {
            Ok(()) => Ok(()),
            Err(PushError::Full) => self.producer.wants_room().map(drop),
            Err(PushError::Corrupt(error)) => Err(error),
        }
    }

    fn announces(&mut self, round: u64) {
        let _ = self.announcer.announce((round % u64::from(Harmed::RINGS)) as u32);
        let mut rings = 0;
        let result = self.ready.take(|ring| {
            assert!(ring < Harmed::RINGS);
            rings += 1;
        });
        assert!(matches!(result, Ok(()) | Err(Corrupt::Ring(Harmed::RINGS..128))));
        assert!(rings <= Harmed::RINGS);
        let _ = self.ready.prepare_sleep();
        self.ready.awake();
    }
}

/// An application that writes anything between two calls of the node.
#[test]
fn ring__any_bytes_are_valid_or_corrupt() {
    let (mut taken, mut corrupt) = (0, 0);
    for seed in 0..2_000 {
        println!("seed {seed}");
        let mut dice = Dice(seed);
        let (mut node, memory, set) = Harmed::new(dice.next() as u32);
        for round in 0..50 {
            (0..dice.below(4)).for_each(|_| harm(&memory, &set, &mut dice));
            node.round(round);
        }
        taken += node.taken;
        corrupt += node.corrupt;
    }
    assert!(
        taken > 1_000 && corrupt > 1_000,
        "{taken} requests, {corrupt} times corrupt"
    );
}

/// An application that writes anything at any time.
#[test]
fn ring__beside_a_process_that_writes_anything_anywhere() {
    let (mut node, memory, set) = Harmed::new(0);
    let (begun, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|threads| {
        threads.spawn(|| {
            let mut dice = Dice(1);
            while !stop.load(Relaxed) {
                harm(&memory, &set, &mut dice);
                begun.store(true, Relaxed);
            }
        });
        while !begun.load(Relaxed) {
            thread::yield_now();
        }
        (0..300_000).for_each(|round| node.round(round));
        stop.store(true, Relaxed);
    });
    println!("{} requests, {} times corrupt", node.taken, node.corrupt);
    assert!(node.corrupt > 0);
}

/// Two threads, each of which sleeps when it has nothing to do, until the other one unparks it. Three rings, so that a sleep is one of
/// many rings.
#[test]
fn soak__two_threads() {
    const NUMBERS: u64 = 200_000;
    const RINGS: u32 = 3;
    let deadline = Instant::now() + Duration::from_secs(60);
    // A parked thread may return without cause now and then, but must never miss an unpark.
    let sleep = move || {
        thread::park_timeout(deadline.saturating_duration_since(Instant::now()));
        assert!(Instant::now() < deadline, "a wake-up was lost");
    };
    let (to_consumer, to_producer) = (Set::new(RINGS), Set::new(RINGS));
    let memories: Vec<_> = (0..RINGS).map(|i| Heap::new(32, u32::MAX - 7 * i)).collect();
    let mut producers: Vec<_> = memories.iter().cloned().map(Producer::new).collect();
    let mut consumers: Vec<_> = memories.into_iter().map(Consumer::new).collect();
    let consumer_thread = thread::current();
    let producer_thread = thread::spawn({
        let (announcer, mut ready) = (
            Announcer::new(to_consumer.clone()),
            ReadySet::new(to_producer.clone()),
        );
        move || {
            let mut dice = Dice(1);
            for number in 0..NUMBERS {
                let ring = dice.below(RINGS as usize);
                let producer = &mut producers[ring];
                loop {
                    let pushed = producer.push(&[descriptor(number)]);
                    if producer.publish() == Tell::Ring && announcer.announce(ring as u32) {
                        consumer_thread.unpark();
                    }
                    match pushed {
                        Ok(()) => break,
                        Err(PushError::Full) => {}
                        Err(PushError::Corrupt(e)) => panic!("{e}"),
                    }
                    if producer.wants_room().unwrap() {
                        if ready.prepare_sleep() {
                            sleep();
                        }
                        ready.awake();
                        ready.take(|_| {}).unwrap();
                        producer.no_longer_waits();
                    }
                }
            }
        }
    });
    let (announcer, mut ready) = (Announcer::new(to_producer), ReadySet::new(to_consumer));
    let mut dice = Dice(1);
    let mut expected = vec![VecDeque::new(); RINGS as usize];
    (0..NUMBERS).for_each(|number| expected[dice.below(RINGS as usize)].push_back(number));
    let mut news: Vec<u32> = (0..RINGS).collect();
    let mut left = NUMBERS;
    while left > 0 {
        for ring in news.drain(..) {
            let consumer = &mut consumers[ring as usize];
            consumer.awake();
            loop {
                let mut out = [[0; 64]; 8];
                let count = consumer.take(&mut out).unwrap();
                for found in &out[..count] {
                    let number = expected[ring as usize].pop_front().unwrap();
                    assert_eq!(*found, descriptor(number));
                }
                left -= count as u64;
                if consumer.release() == Tell::Ring && announcer.announce(ring) {
                    producer_thread.thread().unpark();
                }
                if count == 0 {
                    if consumer.prepare_sleep().unwrap() {
                        break;
                    }
                    consumer.awake();
                }
            }
        }
        if left > 0 && ready.prepare_sleep() {
            sleep();
        }
        ready.awake();
        ready.take(|ring| news.push(ring)).unwrap();
    }
    producer_thread.join().unwrap();
}
