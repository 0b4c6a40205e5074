//! Memory that two engines share: a ring each way, and the words that revoke grants.
//!
//! The side that asks for a link creates it: a sealed file in memory, which can neither shrink nor grow. Both ends may write all of it at
//! any time, so nothing that is read from it is trusted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rdmux_memory::mapping::{Mapping, sealed_file};
use rustix::io::Errno;

use crate::revocation::Words;
use crate::ring::{RingMemory, SLOTS_MIN, Word, area_bytes, payload_offset};

/// Slots of a ring: enough for a few of the longest trains, but not more than the caches hold.
pub const SLOTS: u32 = 4096;
/// Largest number of grants of one end to the other at a time.
pub const GRANTS: u32 = 1024;

/// Places of one end for entries: one for each thread of the end that may write to the other end's memory at a time.
pub const PLACES: u32 = 64;

/// Bytes of each end's words: a page, in which each word has a pair of cache lines, and as much for each place.
const WORDS_BYTES: usize = 4096 + PLACES as usize * LINE_BYTES;
const LINE_BYTES: usize = 128;
/// Distance between the words of two places, see [`Segment::left_address`].
pub(crate) const PLACE_BYTES: u64 = LINE_BYTES as u64;
const GRANTS_BYTES: usize = 4 * GRANTS as usize;

/// The two ends of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that asked for the link, and created the segment.
    Asking,
    /// The other side.
    Answering,
}

impl Side {
    /// Returns the other end.
    #[inline]
    pub fn other(self) -> Side {
        match self {
            Side::Asking => Side::Answering,
            Side::Answering => Side::Asking,
        }
    }

    #[inline]
    fn index(self) -> usize {
        usize::from(self == Side::Answering)
    }
}

/// The memory of a link.
#[derive(Debug)]
pub struct Segment {
    mapping: Mapping,
}

impl Segment {
    /// Bytes of a segment.
    pub fn bytes() -> usize {
        2 * (WORDS_BYTES + GRANTS_BYTES + area_bytes(SLOTS))
    }

    /// Creates a segment; returns it with the file by which the other end maps it.
    pub fn create() -> Result<(Arc<Segment>, OwnedFd), Errno> {
        let file = sealed_file("rdmux-link", Segment::bytes() as u64)?;
        let segment =
            Segment::map(&file).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
        Ok((segment, file))
    }

    /// Maps the segment that the other end created.
    pub fn from_file(file: BorrowedFd<'_>) -> io::Result<Arc<Segment>> {
        Segment::map(file)
    }

    fn map(file: impl AsFd) -> io::Result<Arc<Segment>> {
        let mapping = Mapping::of_sealed_file(file, 0, Segment::bytes(), true)?;
        Ok(Arc::new(Segment { mapping }))
    }

    /// Returns the ring into which `from` puts records.
    pub fn ring(self: &Arc<Segment>, from: Side) -> Area {
        Area {
            segment: Arc::clone(self),
            begin: area_offset(from),
        }
    }

    /// Returns the word on which the taker of records from `from` naps: [`Word::Napping`].
    pub(crate) fn napping(&self, from: Side) -> &AtomicU32 {
        self.mapping.word(area_offset(from) + Word::Napping.offset())
    }

    #[inline]
    fn word(&self, side: Side, line: usize) -> &AtomicU32 {
        self.mapping.word(side.index() * WORDS_BYTES + line * LINE_BYTES)
    }

    /// Returns a word of a place of that end; each of the two has a cache line.
    #[inline]
    fn word_of(&self, side: Side, place: u32, line: usize) -> &AtomicU32 {
        let place = (place % PLACES) as usize;
        let at = side.index() * WORDS_BYTES + 4096 + place * LINE_BYTES + line * LINE_BYTES / 2;
        self.mapping.word(at)
    }

    /// Returns the word that shows to which of its grants that end is writing by a place: [`crate::revocation`].
    #[inline]
    pub fn inside(&self, side: Side, place: u32) -> &AtomicU32 {
        self.word_of(side, place, 0)
    }

    /// Returns the word for the last entry of a place whose copy that end has finished by calls into the other end's process.
    #[inline]
    pub fn left(&self, side: Side, place: u32) -> &AtomicU32 {
        self.word_of(side, place, 1)
    }

    /// Returns the address of [`Segment::left`] of the first place in this process; those of the other places follow each other.
    pub fn left_address(&self, side: Side) -> u64 {
        std::ptr::from_ref(self.left(side, 0)).addr() as u64
    }

    /// Returns the word for the CPU on which that end last looked for packets, plus 1.
    #[inline]
    pub fn cpu(&self, side: Side) -> &AtomicU32 {
        self.word(side, 1)
    }

    /// Returns a word that is not 0 if that end loses packets on purpose, as a bad network would.
    #[inline]
    pub fn loses(&self, side: Side) -> &AtomicU32 {
        self.word(side, 3)
    }

    /// Returns the word that holds the generation of a grant by `by` as long as the grant lasts; 0 means none.
    #[inline]
    pub fn grant(&self, by: Side, index: u32) -> &AtomicU32 {
        let index = (index % GRANTS) as usize;
        self.mapping
            .word(2 * WORDS_BYTES + by.index() * GRANTS_BYTES + 4 * index)
    }
}

/// Returns the offset of the ring into which `from` puts records.
fn area_offset(from: Side) -> usize {
    2 * (WORDS_BYTES + GRANTS_BYTES) + from.index() * area_bytes(SLOTS)
}

/// Words of the grants that one end holds.
#[derive(Debug)]
pub struct GrantWords<'a> {
    /// The segment.
    pub segment: &'a Segment,
    /// The end that holds the grants.
    pub holder: Side,
}

impl Words for GrantWords<'_> {
    #[inline]
    fn inside(&self, place: u32, order: Ordering) -> u32 {
        self.segment.inside(self.holder, place).load(order)
    }

    #[inline]
    fn set_inside(&self, place: u32, value: u32, order: Ordering) {
        self.segment.inside(self.holder, place).store(value, order);
    }

    #[inline]
    fn grant(&self, index: u32, order: Ordering) -> u32 {
        self.segment.grant(self.holder.other(), index).load(order)
    }

    #[inline]
    fn set_grant(&self, index: u32, generation: u32, order: Ordering) {
        self.segment
            .grant(self.holder.other(), index)
            .store(generation, order);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// The words for one entry of the holder of a grant: they are looked up once.
#[derive(Debug)]
pub(crate) struct EnteredWords<'a> {
    pub(crate) inside: &'a AtomicU32,
    pub(crate) grant: &'a AtomicU32,
}

impl Words for EnteredWords<'_> {
    #[inline]
    fn inside(&self, _: u32, order: Ordering) -> u32 {
        self.inside.load(order)
    }

    #[inline]
    fn set_inside(&self, _: u32, value: u32, order: Ordering) {
        self.inside.store(value, order);
    }

    #[inline]
    fn grant(&self, _: u32, order: Ordering) -> u32 {
        self.grant.load(order)
    }

    #[inline]
    fn set_grant(&self, _: u32, generation: u32, order: Ordering) {
        self.grant.store(generation, order);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// One ring of a segment.
#[derive(Debug)]
pub struct Area {
    segment: Arc<Segment>,
    /// Offset of the area in the segment.
    begin: usize,
}

impl Area {
    #[inline]
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.segment.mapping
    }

    /// Returns the offset of the area in the mapping.
    #[inline]
    pub(crate) fn begin(&self) -> usize {
        self.begin
    }
}

impl RingMemory for Area {
    #[inline]
    fn slots(&self) -> u32 {
        SLOTS
    }

    #[inline]
    fn load(&self, word: Word, ordering: Ordering) -> u32 {
        self.segment
            .mapping
            .word(self.begin + word.offset())
            .load(ordering)
    }

    #[inline]
    fn store(&self, word: Word, value: u32, ordering: Ordering) {
        self.segment
            .mapping
            .word(self.begin + word.offset())
            .store(value, ordering);
    }

    #[inline]
    fn fence(&self, ordering: Ordering) {
        fence(ordering);
    }

    #[inline]
    fn write(&self, slot: u32, bytes: &[u8]) {
        let at = self.begin + payload_offset(slot);
        // The ring has checked that the range is inside.
        let _ = self.segment.mapping.copy_in(at as u64, bytes);
    }

    #[inline]
    fn read(&self, slot: u32, bytes: usize, out: &mut Vec<u8>) {
        let at = self.begin + payload_offset(slot);
        let _ = self.segment.mapping.append_to(at as u64, bytes, out);
    }
}

const _: () = assert!(SLOTS >= SLOTS_MIN);
