//! How often a cache line moves from one side's processor to the other's, under a model of coherent caches without any limit of size.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Line {
    Word(Word),
    Slot(u32),
}

/// The caches of two processors.
#[derive(Debug, Default)]
struct Caches {
    /// Which of the two have a valid copy of a line; none before the first access.
    copies: HashMap<Line, [bool; 2]>,
    /// Lines that a side has fetched from the other.
    moves: u32,
}

/// A ring's memory, as the processor of one side sees it.
#[derive(Clone, Debug)]
struct Side {
    heap: Heap,
    caches: Rc<RefCell<Caches>>,
    own: usize,
}

impl Side {
    /// A store invalidates the other's copy. It waits in the store buffer for the line, so it is no move that anybody waits for.
    fn access(&self, line: Line, is_store: bool) {
        let mut caches = self.caches.borrow_mut();
        let copies = caches.copies.entry(line).or_default();
        let fetches = !is_store && !copies[self.own] && copies[1 - self.own];
        copies[self.own] = true;
        copies[1 - self.own] &= !is_store;
        caches.moves += u32::from(fetches);
    }
}

impl RingMemory for Side {
    fn slots(&self) -> u32 {
        self.heap.slots()
    }

    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.access(Line::Word(word), false);
        self.heap.load(word, order)
    }

    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.access(Line::Word(word), true);
        self.heap.store(word, value, order);
    }

    fn fence(&self, order: Ordering) {
        self.heap.fence(order);
    }

    fn read(&self, slot: u32) -> Descriptor {
        self.access(Line::Slot(slot), false);
        self.heap.read(slot)
    }

    fn write(&self, slot: u32, descriptor: &Descriptor) {
        self.access(Line::Slot(slot), true);
        self.heap.write(slot, descriptor);
    }
}

/// Returns the lines that move for 64 messages, of which so many are published at a time. A look without a message comes before each batch.
fn moves(batch: u64) -> u32 {
    let heap = Heap::new(64, 0);
    let caches: Rc<RefCell<Caches>> = Rc::default();
    let side = |own| Side {
        heap: heap.clone(),
        caches: Rc::clone(&caches),
        own,
    };
    let (mut producer, mut consumer) = (Producer::new(side(0)), Consumer::new(side(1)));
    let mut counted = 0;
    // The first lap fills the caches.
    for first in (0..128).step_by(batch as usize) {
        if first == 64 {
            counted = caches.borrow().moves;
        }
        let mut out = [[0; 64]; 64];
        assert_eq!(consumer.take(&mut out), Ok(0));
        let _ = consumer.release();
        producer.push(&descriptors(first..first + batch)).unwrap();
        assert_eq!(producer.publish(), Tell::Nothing);
        assert_eq!(consumer.take(&mut out), Ok(batch as usize));
        let _ = consumer.release();
    }
    caches.borrow().moves - counted
}

#[test]
fn message__moves_two_lines_alone_and_one_in_a_batch() {
    // Its descriptor and the tail; and the head once a lap, when the producer has no room that it knows of.
    assert_eq!(moves(1), 2 * 64 + 1);
    assert_eq!(moves(16), 64 + 4 + 1);
}
