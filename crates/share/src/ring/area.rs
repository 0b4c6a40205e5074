//! Where the rings of an application are in the two files that it shares with the node.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rdmux_memory::mapping::Mapping;
use rdmux_wire::node::{DESCRIPTOR_BYTES, Descriptor};

use super::ready::{RINGS_PER_WORD, ReadyMemory};
use super::{RingMemory, SLOTS_MAX, SLOTS_MIN, Word};

/// Bytes between words that change at different times: processors fetch lines in pairs.
const STRIDE: usize = 128;
/// Bytes of the words of one side of a ring: tail and `waits`, or head and `sleeping`.
const SIDE_BYTES: usize = 2 * STRIDE;
/// The descriptors begin at a page.
const PAGE_BYTES: usize = 4096;

/// The rings of an application: their numbers and sizes.
///
/// Rings have one numbering for both kinds, submissions first: [`Layout::completion_ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    submissions: u32,
    submission_slots: u32,
    completions: u32,
    completion_slots: u32,
}

/// Reason why there are no such rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A number of rings.
    #[error("{0} rings of a kind: 1 to {max} are possible", max = Layout::RINGS_MAX)]
    Rings(u32),
    /// A number of slots.
    #[error("{0} slots of a ring: a power of two from {SLOTS_MIN} to {SLOTS_MAX} is possible")]
    Slots(u32),
    /// All rings together.
    #[error("the rings of a kind have {0} bytes, {max} at most are possible", max = Layout::BYTES_MAX)]
    Bytes(u64),
}

impl Layout {
    /// Most rings of a kind.
    pub const RINGS_MAX: u32 = 1 << 14;
    /// Most bytes of the descriptors of all rings of a kind. Memory is taken for those that were used once.
    pub const BYTES_MAX: u64 = 1 << 30;

    /// Checks a layout: numbers of rings, and slots of each.
    ///
    /// # Errors
    /// A number that is out of its range.
    pub fn new(
        submissions: u32,
        submission_slots: u32,
        completions: u32,
        completion_slots: u32,
    ) -> Result<Layout, LayoutError> {
        for (rings, slots) in [(submissions, submission_slots), (completions, completion_slots)] {
            if !(1..=Layout::RINGS_MAX).contains(&rings) {
                return Err(LayoutError::Rings(rings));
            }
            if !slots.is_power_of_two() || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots) {
                return Err(LayoutError::Slots(slots));
            }
            let bytes = u64::from(rings) * u64::from(slots) * DESCRIPTOR_BYTES as u64;
            if bytes > Layout::BYTES_MAX {
                return Err(LayoutError::Bytes(bytes));
            }
        }
        Ok(Layout {
            submissions,
            submission_slots,
            completions,
            completion_slots,
        })
    }

    /// Returns the number of all rings.
    pub fn rings(&self) -> u32 {
        self.submissions + self.completions
    }

    /// Returns the number of submission rings, whose numbers are those below.
    pub fn submissions(&self) -> u32 {
        self.submissions
    }

    /// Returns the number of completion rings.
    pub fn completions(&self) -> u32 {
        self.completions
    }

    /// Returns the slots of a submission ring and of a completion ring.
    pub fn slots(&self) -> (u32, u32) {
        (self.submission_slots, self.completion_slots)
    }

    /// Returns the number of a completion ring among all rings.
    pub fn completion_ring(&self, index: u32) -> u32 {
        self.submissions + index
    }

    /// Returns the bytes of the node's file.
    pub(super) fn node_bytes(&self) -> usize {
        self.completion_descriptors(self.completions)
    }

    /// Returns the bytes of the application's file.
    pub(super) fn application_bytes(&self) -> usize {
        self.submission_descriptors(self.submissions)
    }

    // The application's file: the set of the node, that of the application, tails and `waits` of submission rings, heads and `sleeping` of
    // completion rings, and the descriptors of submission rings.

    fn ready_bytes(&self) -> usize {
        let bitmap = self.rings().div_ceil(RINGS_PER_WORD) as usize * size_of::<u64>();
        STRIDE + bitmap.next_multiple_of(STRIDE)
    }

    fn submission_producer(&self, index: u32) -> usize {
        2 * self.ready_bytes() + index as usize * SIDE_BYTES
    }

    fn completion_consumer(&self, index: u32) -> usize {
        self.submission_producer(self.submissions + index)
    }

    fn submission_descriptors(&self, index: u32) -> usize {
        let begin = self
            .completion_consumer(self.completions)
            .next_multiple_of(PAGE_BYTES);
        begin + index as usize * self.submission_slots as usize * DESCRIPTOR_BYTES
    }

    // The node's file: heads and `sleeping` of submission rings, tails and `waits` of completion rings, and the descriptors of completion
    // rings.

    fn submission_consumer(&self, index: u32) -> usize {
        index as usize * SIDE_BYTES
    }

    fn completion_producer(&self, index: u32) -> usize {
        self.submission_consumer(self.submissions + index)
    }

    fn completion_descriptors(&self, index: u32) -> usize {
        let begin = self
            .completion_producer(self.completions)
            .next_multiple_of(PAGE_BYTES);
        begin + index as usize * self.completion_slots as usize * DESCRIPTOR_BYTES
    }
}

/// Both files, as one side has mapped them.
#[derive(Clone, Debug)]
pub(super) struct Area {
    pub(super) layout: Layout,
    pub(super) node: Arc<Mapping>,
    pub(super) application: Arc<Mapping>,
}

impl Area {
    pub(super) fn submission(&self, index: u32) -> RingArea {
        assert!(index < self.layout.submissions, "there is no such ring");
        RingArea {
            producer: Arc::clone(&self.application),
            producer_at: self.layout.submission_producer(index),
            consumer: Arc::clone(&self.node),
            consumer_at: self.layout.submission_consumer(index),
            descriptors_at: self.layout.submission_descriptors(index),
            slots: self.layout.submission_slots,
        }
    }

    pub(super) fn completion(&self, index: u32) -> RingArea {
        assert!(index < self.layout.completions, "there is no such ring");
        RingArea {
            producer: Arc::clone(&self.node),
            producer_at: self.layout.completion_producer(index),
            consumer: Arc::clone(&self.application),
            consumer_at: self.layout.completion_consumer(index),
            descriptors_at: self.layout.completion_descriptors(index),
            slots: self.layout.completion_slots,
        }
    }

    pub(super) fn ready_for_node(&self) -> ReadyArea {
        self.ready_at(0)
    }

    pub(super) fn ready_for_application(&self) -> ReadyArea {
        self.ready_at(self.layout.ready_bytes())
    }

    fn ready_at(&self, at: usize) -> ReadyArea {
        ReadyArea {
            mapping: Arc::clone(&self.application),
            at,
            rings: self.layout.rings(),
        }
    }
}

/// The memory of one ring: that of its producer and that of its consumer.
#[derive(Debug)]
pub struct RingArea {
    producer: Arc<Mapping>,
    producer_at: usize,
    consumer: Arc<Mapping>,
    consumer_at: usize,
    descriptors_at: usize,
    slots: u32,
}

impl RingArea {
    #[inline]
    fn place(&self, word: Word) -> (&Mapping, usize) {
        match word {
            Word::Tail => (&self.producer, self.producer_at),
            Word::Waits => (&self.producer, self.producer_at + STRIDE),
            Word::Head => (&self.consumer, self.consumer_at),
            Word::Sleeping => (&self.consumer, self.consumer_at + STRIDE),
        }
    }

    #[inline]
    fn descriptor_at(&self, slot: u32) -> usize {
        self.descriptors_at + slot as usize * DESCRIPTOR_BYTES
    }
}

impl RingMemory for RingArea {
    #[inline]
    fn slots(&self) -> u32 {
        self.slots
    }

    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        let (mapping, at) = self.place(word);
        let value = mapping.load(at);
        if order != Ordering::Relaxed {
            fence(order);
        }
        value
    }

    #[inline]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        let (mapping, at) = self.place(word);
        mapping.word(at).store(value, order);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }

    #[inline]
    fn read(&self, slot: u32) -> Descriptor {
        self.producer.load_line(self.descriptor_at(slot))
    }

    #[inline]
    fn write(&self, slot: u32, descriptor: &Descriptor) {
        self.producer.store_line(self.descriptor_at(slot), descriptor);
    }
}

/// The memory of a set of rings.
#[derive(Debug)]
pub struct ReadyArea {
    mapping: Arc<Mapping>,
    at: usize,
    rings: u32,
}

impl ReadyArea {
    #[inline]
    fn word_at(&self, word: u32) -> usize {
        self.at + STRIDE + word as usize * size_of::<u64>()
    }
}

impl ReadyMemory for ReadyArea {
    #[inline]
    fn rings(&self) -> u32 {
        self.rings
    }

    #[inline]
    fn load(&self, word: u32, order: Ordering) -> u64 {
        self.mapping.double_word(self.word_at(word)).load(order)
    }

    #[inline]
    fn set(&self, word: u32, bits: u64, order: Ordering) -> u64 {
        self.mapping.double_word(self.word_at(word)).fetch_or(bits, order)
    }

    #[inline]
    fn clear(&self, word: u32, order: Ordering) -> u64 {
        self.mapping.double_word(self.word_at(word)).swap(0, order)
    }

    #[inline]
    fn sleeping(&self, order: Ordering) -> u32 {
        self.mapping.word(self.at).load(order)
    }

    #[inline]
    fn set_sleeping(&self, value: u32, order: Ordering) {
        self.mapping.word(self.at).store(value, order);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns first byte and end of every part of a file, in order.
    fn parts(layout: &Layout, of_node: bool) -> Vec<(usize, usize)> {
        let (submissions, completions) = (layout.submissions, layout.completions);
        let (submission_slots, completion_slots) = layout.slots();
        let side = |at: usize| (at, at + SIDE_BYTES);
        let descriptors = |at: usize, slots: u32| (at, at + slots as usize * DESCRIPTOR_BYTES);
        let mut parts = Vec::new();
        if of_node {
            parts.extend((0..submissions).map(|i| side(layout.submission_consumer(i))));
            parts.extend((0..completions).map(|i| side(layout.completion_producer(i))));
            let at = |i| descriptors(layout.completion_descriptors(i), completion_slots);
            parts.extend((0..completions).map(at));
        } else {
            let ready = layout.ready_bytes();
            parts.extend([(0, ready), (ready, 2 * ready)]);
            parts.extend((0..submissions).map(|i| side(layout.submission_producer(i))));
            parts.extend((0..completions).map(|i| side(layout.completion_consumer(i))));
            let at = |i| descriptors(layout.submission_descriptors(i), submission_slots);
            parts.extend((0..submissions).map(at));
        }
        parts
    }

    #[test]
    fn layout__parts_do_not_overlap() {
        for (submissions, completions) in [(1, 1), (1, 3), (64, 1), (200, 65), (1500, 700)] {
            let layout = Layout::new(submissions, 32, completions, 64).unwrap();
            for of_node in [false, true] {
                let mut end = 0;
                for (begin, until) in parts(&layout, of_node) {
                    assert!(begin >= end && begin.is_multiple_of(64), "{layout:?}");
                    end = until;
                }
                let bytes = if of_node {
                    layout.node_bytes()
                } else {
                    layout.application_bytes()
                };
                assert_eq!(bytes, end);
            }
            let bits = (layout.ready_bytes() - STRIDE) * 8;
            assert!(bits >= layout.rings() as usize);
        }
    }

    #[test]
    fn layout__numbers_out_of_range() {
        let most = Layout::RINGS_MAX;
        assert!(Layout::new(1, SLOTS_MIN, 1, SLOTS_MAX).is_ok());
        assert!(Layout::new(most, 1024, most, 64).is_ok());
        for (submissions, slots, completions, completion_slots, error) in [
            (0, 64, 1, 64, LayoutError::Rings(0)),
            (1, 64, most + 1, 64, LayoutError::Rings(most + 1)),
            (1, 16, 1, 64, LayoutError::Slots(16)),
            (1, 64, 1, 96, LayoutError::Slots(96)),
            (1, 2 * SLOTS_MAX, 1, 64, LayoutError::Slots(2 * SLOTS_MAX)),
            (most, 2048, 1, 64, LayoutError::Bytes(2 << 30)),
        ] {
            let layout = Layout::new(submissions, slots, completions, completion_slots);
            assert_eq!(layout, Err(error));
        }
    }
}
