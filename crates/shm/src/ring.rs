//! One direction between two engines: a ring of records in shared memory, for one [`Producer`] and one [`Consumer`].
//!
//! The other process is not trusted: it may write anything at any time. So each side works with private copies of its positions, reads a
//! word of the other side once and checks the value. An impossible value is [`Corrupt`], and the caller gives the link up. No call waits,
//! and none does more work than one record requires.
//!
//! # Memory
//! The memory begins with three words on cache lines of their own. Slots of 64 bytes follow, a power of two of them. All of it is zero at
//! first. A record begins at the start of a slot: its header, then its bytes, in one piece that ends with the ring at the latest. A record
//! that does not fit there begins at slot 0, and a record of kind `SKIP` marks the rest that is left out. Positions count slots, for ever,
//! modulo 2^32.
//!
//! # Publishing
//! The producer shares no index. The consumer looks at one word, the stamp of the slot at its head, so a small record reaches it with one
//! cache line. For that, no other bytes may ever be taken for a stamp, neither those of an earlier lap nor payload that was stored in that
//! place:
//!
//! - Before the producer stores a record's stamp (`Release`), it sets the stamp of the slot behind the record to 0. A consumer that has
//!   seen the former (`Acquire`) and goes on to the slot behind finds that 0, or whatever the producer stored there since. That is
//!   nothing but the stamp of the next record: the next record begins there, and a header's fields and payload lie beyond the stamp.
//! - Behind a record that ends with the ring is slot 0, and the same holds there. Behind a `SKIP` is slot 0 too; the producer writes the
//!   record there first, and stores the stamp of the `SKIP` last. So the consumer finds both or none: a stamp always leads to a record.
//! - The argument holds for the first record, since the memory is zero at first.
//! - The slot behind a record must belong to the producer, so a record finds room only if one more slot is free. Hence the ring is never
//!   quite full, and the stamp that is set to 0 is never the one that the consumer looks at.
//!
//! A stamp depends on the position. The argument above does not need that: it lets sides that disagree notice.
//!
//! # Requests
//! A record is a train of packets, which the peers' queue pairs acknowledge by packets, or a *request*: one packet of data, which the
//! consumer acknowledges by taking it. The consumer executes a request before it moves the head past it. If it cannot, it sets the
//! record's verdict first: the request is one like those in trains from there on, or the producer is to send it again. The producer looks
//! at the verdict of each request that the head has passed, before it uses the slots again. A long request holds no payload but names it
//! ([`crate::lend`]).
//!
//! # Sleeping and waking
//! A sleeper announces its sleep in a word, and then looks once more. A side that has something for the sleeper stores it, and then looks
//! at the word. A `SeqCst` fence stands between the two steps on both sides, so at least one of them sees the other's. (Fences, not
//! `SeqCst` accesses: loom checks only fences.)
//!
//! A producer that sleeps until the consumer has made room is woken at once. One that only waits for the ends of its requests is woken when
//! the consumer has nothing else to do: most often a record of the consumer's own ring wakes it before.
//!
//! The waking side sets the word to 0 before it rings the doorbell, so that it does so once for a sleeper, not once per record until the
//! sleeper runs. A plain store suffices. It may overwrite the word of a later sleep, if something else woke the sleeper in between; but
//! the doorbell follows it, and ends that sleep. And a doorbell that the sleeper has answered orders the store before its next sleep.
//!
//! A consumer has two such words, because it sleeps in two ways: until the doorbell rings, or in a futex on the word itself, which is called
//! a nap. Each way has a word of its own, so that a late store for one way of sleeping cannot overwrite the announcement of the other, which
//! no call would follow. The kernel compares a napper's word when the nap begins, so a store before the nap prevents it, and a store
//! after that is followed by the call that ends it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use rdmux_rnic::{PARTS_MAX, TRAIN_BYTES_MAX, TRAIN_PACKETS_MAX, Taken, Ticket};

#[cfg(test)]
mod tests;

/// Bytes of a slot.
pub const SLOT_BYTES: usize = 64;
/// Bytes of a record's header: stamp, bytes, form and verdict, a word each.
pub const HEADER_BYTES: usize = 16;
/// Value of [`Word::Napping`] during a nap.
pub const NAPPING: u32 = 1;
/// Smallest number of slots with room for every train.
pub const SLOTS_MIN: u32 = 2048;

// Two lines apart, because processors fetch lines in pairs.
const HEAD_OFFSET: usize = 0;
const SLEEPING_OFFSET: usize = 128;
// On the same line: the producer loads both after each record.
const NAPPING_OFFSET: usize = SLEEPING_OFFSET + 4;
const WAITS_OFFSET: usize = 256;
const SLOTS_OFFSET: usize = 384;

// Kinds of record. 0 is no kind, so that zeroed memory holds no record.
const DATA: u8 = 1;
const SKIP: u8 = 2;
const REQUEST: u8 = 3;

// Values of `Word::Waits`: the producer sleeps until there is room, or until requests have ended.
const FOR_ROOM: u32 = 1;
const FOR_ENDS: u32 = 2;
/// Most releases of which a producer that sleeps until requests have ended is not told at once.
const UNTOLD_MAX: u32 = 16;

const _: () = assert!(bytes_max(SLOTS_MIN) == TRAIN_BYTES_MAX && bytes_max(SLOTS_MIN / 2) < TRAIN_BYTES_MAX);
const _: () = assert!(
    TRAIN_BYTES_MAX <= u16::MAX as usize,
    "a segment's size has 16 bits"
);

/// Returns the bytes of a ring's memory, which must begin at a multiple of 128.
pub const fn area_bytes(slots: u32) -> usize {
    SLOTS_OFFSET + slots as usize * SLOT_BYTES
}

/// Returns the offset of the payload of a record that begins with `slot`.
#[inline]
pub const fn payload_offset(slot: u32) -> usize {
    slot_offset(slot) + HEADER_BYTES
}

#[inline]
const fn slot_offset(slot: u32) -> usize {
    SLOTS_OFFSET + slot as usize * SLOT_BYTES
}

/// Returns the number of slots of a record.
#[inline]
const fn record_slots(bytes: usize) -> u32 {
    (HEADER_BYTES + bytes).div_ceil(SLOT_BYTES) as u32
}

/// Returns the most bytes of a record. A record takes at most half of the ring, so that it fits an empty ring wherever the head is: behind
/// a rest that is too small for the record, and with a free slot behind the record.
#[inline]
pub const fn bytes_max(slots: u32) -> usize {
    let half = slots as usize / 2 * SLOT_BYTES - HEADER_BYTES;
    if half < TRAIN_BYTES_MAX {
        half
    } else {
        TRAIN_BYTES_MAX
    }
}

/// Returns the stamp of a record at a position: never 0, and a different one in the next lap, since a lap is an even number.
#[inline]
const fn stamp(position: u32) -> u32 {
    position | 1
}

/// A word that both sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Position up to which the consumer has taken records.
    Head,
    /// Not 0 while the consumer sleeps until its doorbell rings.
    Sleeping,
    /// [`NAPPING`] while the consumer sleeps in a futex on this word.
    Napping,
    /// Not 0 while the producer sleeps until there is room, or until requests have ended.
    Waits,
    /// Stamp of the record that begins with this slot: a number made of its position once the record is complete.
    Stamp(u32),
    /// Number of the record's payload bytes.
    Bytes(u32),
    /// Segment size, traffic class and kind: 16, 8 and 8 bits from the lowest. For a request, the number of its parts instead of the size.
    Form(u32),
    /// How the consumer took the request: 0 if it has executed it.
    Verdict(u32),
}

impl Word {
    /// Returns the offset of the word in the ring's memory.
    #[inline]
    pub const fn offset(self) -> usize {
        match self {
            Word::Head => HEAD_OFFSET,
            Word::Sleeping => SLEEPING_OFFSET,
            Word::Napping => NAPPING_OFFSET,
            Word::Waits => WAITS_OFFSET,
            Word::Stamp(slot) => slot_offset(slot),
            Word::Bytes(slot) => slot_offset(slot) + 4,
            Word::Form(slot) => slot_offset(slot) + 8,
            Word::Verdict(slot) => slot_offset(slot) + 12,
        }
    }
}

/// The memory of a ring, as one side sees it. Callers pass slots below [`RingMemory::slots`], and payload that ends with the last slot at
/// the latest: the ring has checked that. Tests implement it with other memory.
pub trait RingMemory {
    /// Slots of the ring: a power of two, the same at every call, and private to this side.
    fn slots(&self) -> u32;
    /// Loads a word.
    fn load(&self, word: Word, order: Ordering) -> u32;
    /// Stores a word.
    fn store(&self, word: Word, value: u32, order: Ordering);
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
    /// Copies `bytes` to [`payload_offset`] of `slot`.
    fn write(&self, slot: u32, bytes: &[u8]);
    /// Appends `bytes` bytes from [`payload_offset`] of `slot` to `out`. They may change meanwhile.
    fn read(&self, slot: u32, bytes: usize, out: &mut Vec<u8>);
}

/// Description of a record's bytes, which are a train of packets as in [`rdmux_rnic::Arrival`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Bytes of each packet; the last may be shorter. Not 0.
    pub segment_bytes: u16,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
}

/// Form of a request, to which the number of its parts is added.
const REQUEST_FORM: u32 = (REQUEST as u32) << 24;
/// Bytes of a part that a request names. The parts come first.
pub(crate) const PART_BYTES: usize = 24;

/// Values of [`Word::Verdict`].
const DEFERRED: u32 = 1;
const AGAIN: u32 = 2;
/// Form of a `SKIP`.
const SKIP_FORM: u32 = (SKIP as u32) << 24;

/// A record that the consumer has taken. Its slots are the consumer's until [`Consumer::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The slot in which it begins.
    pub slot: u32,
    /// Bytes of payload.
    pub bytes: usize,
    /// Description of a train; `None` for a request.
    pub train: Option<Meta>,
    /// Number of parts of memory that a request names.
    pub parts: usize,
}

impl Meta {
    /// Returns whether a number of bytes is one train: this bounds the work that a record causes for its receiver.
    #[inline]
    fn is_train_of(self, bytes: usize) -> bool {
        self.segment_bytes > 0 && bytes <= TRAIN_PACKETS_MAX * usize::from(self.segment_bytes)
    }

    #[inline]
    fn form(self, kind: u8) -> u32 {
        let [low, high] = self.segment_bytes.to_le_bytes();
        u32::from_le_bytes([low, high, self.traffic_class, kind])
    }

    #[inline]
    fn of_form(form: u32) -> (Meta, u8) {
        let [low, high, traffic_class, kind] = form.to_le_bytes();
        let segment_bytes = u16::from_le_bytes([low, high]);
        let meta = Meta {
            segment_bytes,
            traffic_class,
        };
        (meta, kind)
    }
}

/// A record at the head of the ring, which the consumer has not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// The record.
    pub record: Record,
    /// Position behind it.
    end: u32,
}

/// How to wake the other side. The caller must wake it: a sleeper is reported only once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Nobody sleeps.
    Nobody,
    /// By the doorbell that the two sides agreed on.
    Peer,
    /// By a call to the futex [`Word::Napping`].
    Napper,
    /// By both: two threads of the other side sleep.
    Both,
}

/// The other side has written a value that it never writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer wrote nonsense into the shared ring")]
pub struct Corrupt;

/// Reason why a record was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// There is no room now.
    #[error("the shared ring is full")]
    Full,
    /// The other side has written a value that it never writes.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
}

/// Looks for sleeping consumers after the caller has stored a record for them.
#[inline]
fn wake_consumer<M: RingMemory>(memory: &M) -> Wake {
    memory.fence(Ordering::SeqCst);
    let sleeps = ends_sleep(memory, Word::Sleeping);
    let naps = ends_sleep(memory, Word::Napping);
    match (sleeps, naps) {
        (false, false) => Wake::Nobody,
        (true, false) => Wake::Peer,
        (false, true) => Wake::Napper,
        (true, true) => Wake::Both,
    }
}

/// Returns whether there is a record at a consumer's position ([`Consumer::position`]). Costs one load.
#[inline]
pub fn is_record_at<M: RingMemory>(memory: &M, position: u32) -> bool {
    let slot = position & (memory.slots() - 1);
    memory.load(Word::Stamp(slot), Ordering::Relaxed) != 0
}

/// Returns whether the consumer has taken records since its position was `seen` ([`Producer::seen`]). Costs one load.
#[inline]
pub fn has_moved<M: RingMemory>(memory: &M, seen: u32) -> bool {
    memory.load(Word::Head, Ordering::Relaxed) != seen
}

/// Ends the announcement of a sleep; returns whether there was one.
#[inline]
fn ends_sleep<M: RingMemory>(memory: &M, sleeper: Word) -> bool {
    let sleeps = memory.load(sleeper, Ordering::Relaxed) != 0;
    if sleeps {
        memory.store(sleeper, 0, Ordering::Relaxed);
    }
    sleeps
}

/// The side that puts records into the ring.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    slots: u32,
    /// Position of the next record.
    tail: u32,
    /// The consumer's head as last seen.
    seen: u32,
    /// Position up to which slots may be used again: those of requests only once their verdict was looked at. `tail - head` is below
    /// `slots`.
    head: u32,
    /// Slots that the last record without room requires.
    wanted: u32,
    /// Requests whose end this side has not looked at, with their positions.
    requests: VecDeque<(u32, Ticket)>,
}

/// Place of a record: the positions of the first slot that it takes, and of the one in which it begins, and the number of bytes.
#[derive(Clone, Copy, Debug)]
struct Room {
    first: u32,
    begin: u32,
    bytes: usize,
}

impl<M: RingMemory> Producer<M> {
    /// Creates the producer of memory that is zero.
    pub fn new(memory: M) -> Self {
        let slots = memory.slots();
        assert!(slots.is_power_of_two() && slots > 1);
        Producer {
            memory,
            slots,
            tail: 0,
            seen: 0,
            head: 0,
            wanted: 0,
            requests: VecDeque::new(),
        }
    }

    /// Puts a train of at most [`bytes_max`] bytes into the ring.
    #[inline]
    pub fn push(&mut self, meta: Meta, bytes: &[u8]) -> Result<Wake, PushError> {
        assert!(meta.is_train_of(bytes.len()));
        let room = self.reserve(bytes.len())?;
        self.memory.write(self.slot(room.begin), bytes);
        Ok(self.publish(room, meta.form(DATA)))
    }

    /// Puts a request of at most [`bytes_max`] bytes into the ring: `fill` writes them behind [`payload_offset`] of the slot that it gets.
    /// Returns `None` if `fill` fails. [`Producer::ended`] returns the ticket.
    #[inline]
    pub fn request(
        &mut self,
        ticket: Ticket,
        bytes: usize,
        fill: impl FnOnce(&M, u32) -> bool,
    ) -> Result<Option<Wake>, PushError> {
        self.request_with_parts(ticket, bytes, 0, fill)
    }

    /// Puts a request into the ring as [`Producer::request`] does. Its first bytes describe `parts` parts, [`PARTS_MAX`] at most.
    #[inline]
    pub fn request_with_parts(
        &mut self,
        ticket: Ticket,
        bytes: usize,
        parts: usize,
        fill: impl FnOnce(&M, u32) -> bool,
    ) -> Result<Option<Wake>, PushError> {
        let room = self.reserve(bytes)?;
        let slot = self.slot(room.begin);
        if !fill(&self.memory, slot) {
            return Ok(None);
        }
        self.memory.store(Word::Verdict(slot), 0, Ordering::Relaxed);
        self.requests.push_back((room.begin, ticket));
        Ok(Some(self.publish(room, REQUEST_FORM | parts as u32)))
    }

    /// Looks how far the consumer has come, if there are requests that have not ended. What the consumer has put into its own ring before it
    /// took them is there by then.
    #[inline]
    pub fn look_for_ends(&mut self) -> Result<(), Corrupt> {
        if self.requests.is_empty() {
            return Ok(());
        }
        self.look_at_head()
    }

    /// Returns the ticket of the oldest request that the consumer has taken, as far as is known, and how.
    #[inline]
    pub fn ended(&mut self) -> Option<(Ticket, Taken)> {
        let ended = self.oldest_end();
        if ended.is_some() {
            self.pass_end();
        }
        ended
    }

    /// Returns what [`Producer::ended`] would, if the consumer had taken it when [`Producer::seen`] was `seen`.
    #[inline]
    pub fn ended_before(&mut self, seen: u32) -> Option<(Ticket, Taken)> {
        let &(position, _) = self.requests.front()?;
        if !self.is_before(position, seen) {
            return None;
        }
        self.ended()
    }

    /// Returns what [`Producer::ended`] would, and leaves it there. [`Producer::pass_end`] goes past it.
    #[inline]
    pub fn oldest_end(&self) -> Option<(Ticket, Taken)> {
        let &(position, ticket) = self.requests.front()?;
        if !self.has_passed(position) {
            return None;
        }
        let verdict = Word::Verdict(self.slot(position));
        let taken = match self.memory.load(verdict, Ordering::Relaxed) {
            0 => Taken::Done,
            AGAIN => Taken::Again,
            _ => Taken::Deferred,
        };
        Some((ticket, taken))
    }

    /// Goes past the request that [`Producer::oldest_end`] has returned.
    #[inline]
    pub fn pass_end(&mut self) {
        self.requests.pop_front();
    }

    /// Returns whether [`Producer::look_for_ends`] and [`Producer::ended`] are worth calling. Costs one load if there are requests.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.has_requests() && (self.has_ended() || has_moved(&self.memory, self.seen))
    }

    /// Returns the position up to which the consumer had taken records at the last look.
    #[inline]
    pub fn seen(&self) -> u32 {
        self.seen
    }

    /// Returns whether there are requests that have not ended.
    #[inline]
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Prepares to sleep after [`PushError::Full`]. Returns whether the consumer will wake this side when it has made room, enough or not.
    /// If not, there is room now, or a request has ended.
    pub fn wants_room(&mut self) -> Result<bool, Corrupt> {
        self.waits(FOR_ROOM, |this| this.wanted <= this.free() || this.has_ended())
    }

    /// Prepares to sleep with requests that have not ended. Returns whether the consumer will wake this side when it has taken some. If not,
    /// some have ended.
    pub fn wants_ends(&mut self) -> Result<bool, Corrupt> {
        self.waits(FOR_ENDS, Self::has_ended)
    }

    /// Returns whether [`Producer::ended`] returns a request, as far as is known.
    #[inline]
    pub fn has_ended(&self) -> bool {
        let oldest = self.requests.front();
        oldest.is_some_and(|(position, _)| self.has_passed(*position))
    }

    fn waits(&mut self, what: u32, is_over: impl FnOnce(&Self) -> bool) -> Result<bool, Corrupt> {
        self.memory.store(Word::Waits, what, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        self.look_at_head()?;
        let waits = !is_over(self);
        if !waits {
            self.no_longer_waits();
        }
        Ok(waits)
    }

    /// Ends a sleep that [`Producer::wants_room`] or [`Producer::wants_ends`] prepared.
    pub fn no_longer_waits(&self) {
        self.memory.store(Word::Waits, 0, Ordering::Relaxed);
    }

    /// Returns the position up to which the consumer has taken records, as it reports it, and whether that is all of them.
    pub fn taken(&self) -> (u32, bool) {
        let head = self.memory.load(Word::Head, Ordering::Relaxed);
        (head, head == self.tail)
    }

    fn look_at_head(&mut self) -> Result<(), Corrupt> {
        // The consumer has read the slots before its head, so they may be written again.
        let head = self.memory.load(Word::Head, Ordering::Acquire);
        // The head moves forward, to the tail at most.
        if self.tail.wrapping_sub(head) > self.tail.wrapping_sub(self.seen) {
            return Err(Corrupt);
        }
        self.seen = head;
        self.head = match self.requests.front() {
            Some((position, _)) if self.has_passed(*position) => *position,
            _ => head,
        };
        Ok(())
    }

    /// Returns whether the consumer has taken the record at a position before the tail, as far as is known.
    #[inline]
    fn has_passed(&self, position: u32) -> bool {
        self.is_before(position, self.seen)
    }

    /// Returns whether a position is before another one, neither behind the tail.
    #[inline]
    fn is_before(&self, position: u32, other: u32) -> bool {
        self.tail.wrapping_sub(position) > self.tail.wrapping_sub(other)
    }

    /// Finds room for a record.
    #[inline]
    fn reserve(&mut self, bytes: usize) -> Result<Room, PushError> {
        assert!(bytes <= bytes_max(self.slots));
        let slots = record_slots(bytes);
        let rest = self.slots - self.slot(self.tail);
        let skipped = if slots > rest { rest } else { 0 };
        // One slot more for the stamp behind the record.
        let needed = skipped + slots + 1;
        if needed > self.free() {
            self.look_at_head()?;
            if needed > self.free() {
                self.wanted = needed;
                return Err(PushError::Full);
            }
        }
        let first = self.tail;
        let begin = first.wrapping_add(skipped);
        // This store comes first, so that its cache line is on its way here while the record is written.
        let end = self.slot(begin.wrapping_add(slots));
        self.memory.store(Word::Stamp(end), 0, Ordering::Relaxed);
        Ok(Room { first, begin, bytes })
    }

    /// Publishes a record whose payload is written.
    #[inline]
    fn publish(&mut self, room: Room, form: u32) -> Wake {
        let Room { first, begin, bytes } = room;
        self.tail = begin.wrapping_add(record_slots(bytes));
        self.stamp(begin, form, bytes);
        if first != begin {
            self.stamp(first, SKIP_FORM, 0);
        }
        wake_consumer(&self.memory)
    }

    #[inline]
    fn stamp(&self, position: u32, form: u32, bytes: usize) {
        let slot = self.slot(position);
        self.memory
            .store(Word::Bytes(slot), bytes as u32, Ordering::Relaxed);
        self.memory.store(Word::Form(slot), form, Ordering::Relaxed);
        self.memory
            .store(Word::Stamp(slot), stamp(position), Ordering::Release);
    }

    fn free(&self) -> u32 {
        self.slots - self.tail.wrapping_sub(self.head)
    }

    fn slot(&self, position: u32) -> u32 {
        position & (self.slots - 1)
    }
}

/// The side that takes records out of the ring.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    slots: u32,
    /// Position of the next record.
    head: u32,
    /// Head that the producer knows.
    released: u32,
    /// Number of releases since the producer began to sleep until requests have ended, as far as is known.
    untold: u32,
}

impl<M: RingMemory> Consumer<M> {
    /// Creates the consumer of memory that is zero.
    pub fn new(memory: M) -> Self {
        let slots = memory.slots();
        assert!(slots.is_power_of_two() && slots > 1);
        Consumer {
            memory,
            slots,
            head: 0,
            released: 0,
            untold: 0,
        }
    }

    /// Returns whether [`Consumer::pop`] is worth calling. Costs one load.
    #[inline]
    pub fn is_ready(&self) -> bool {
        is_record_at(&self.memory, self.head)
    }

    /// Returns the position of the next record.
    #[inline]
    pub fn position(&self) -> u32 {
        self.head
    }

    /// Takes the next record, if there is one. The producer cannot use the slots again before [`Consumer::release`].
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Record>, Corrupt> {
        let next = self.peek()?;
        Ok(next.map(|next| self.advance(&next)))
    }

    /// Takes the record that [`Consumer::peek`] has returned since the last one was taken.
    #[inline]
    pub fn advance(&mut self, next: &Next) -> Record {
        self.head = next.end;
        next.record
    }

    /// Returns the next record, if there is one, and leaves it there. [`Consumer::advance`] takes it.
    #[inline]
    pub fn peek(&self) -> Result<Option<Next>, Corrupt> {
        let mut position = self.head;
        // At most two iterations: a SKIP leads to slot 0, where another SKIP is refused.
        loop {
            let slot = position & (self.slots - 1);
            let found = self.memory.load(Word::Stamp(slot), Ordering::Acquire);
            if found != stamp(position) {
                // Behind a SKIP there always is a record.
                let nothing = found == 0 && position == self.head;
                return if nothing { Ok(None) } else { Err(Corrupt) };
            }
            let bytes = self.memory.load(Word::Bytes(slot), Ordering::Relaxed) as usize;
            let (meta, kind) = Meta::of_form(self.memory.load(Word::Form(slot), Ordering::Relaxed));
            let rest = self.slots - slot;
            if kind == SKIP && slot > 0 {
                position = position.wrapping_add(rest);
                continue;
            }
            let train = (kind == DATA).then_some(meta);
            let parts = if kind == REQUEST {
                usize::from(meta.segment_bytes)
            } else {
                0
            };
            let is_request = kind == REQUEST && parts <= PARTS_MAX && parts * PART_BYTES <= bytes;
            let valid = (is_request || train.is_some_and(|meta| meta.is_train_of(bytes)))
                && bytes <= bytes_max(self.slots)
                && record_slots(bytes) <= rest;
            if !valid {
                return Err(Corrupt);
            }
            let record = Record {
                slot,
                bytes,
                train,
                parts,
            };
            let end = position.wrapping_add(record_slots(bytes));
            return Ok(Some(Next { record, end }));
        }
    }

    /// Replaces the contents of `out` by the bytes of a record.
    #[inline]
    pub fn read(&self, record: &Record, out: &mut Vec<u8>) {
        out.clear();
        self.memory.read(record.slot, record.bytes, out);
    }

    /// Returns the memory.
    #[inline]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Tells the producer how a request is taken, unless it is [`Taken::Done`].
    pub fn answer(&self, record: &Record, taken: Taken) {
        let verdict = match taken {
            Taken::Done => return,
            Taken::Deferred => DEFERRED,
            Taken::Again => AGAIN,
        };
        self.memory
            .store(Word::Verdict(record.slot), verdict, Ordering::Relaxed);
    }

    /// Returns the slots of all popped records to the producer. Called once per batch: it costs a fence. A producer that waits for the ends
    /// of requests is woken by [`Consumer::tell_ends`].
    #[inline]
    pub fn release(&mut self) -> Wake {
        if self.head == self.released {
            return Wake::Nobody;
        }
        self.released = self.head;
        self.memory.store(Word::Head, self.head, Ordering::Release);
        self.memory.fence(Ordering::SeqCst);
        match self.memory.load(Word::Waits, Ordering::Relaxed) {
            0 => Wake::Nobody,
            FOR_ENDS if self.untold < UNTOLD_MAX => {
                self.untold += 1;
                Wake::Nobody
            }
            _ => self.wake_producer(),
        }
    }

    /// Returns whether [`Consumer::tell_ends`] is to be called.
    #[inline]
    pub fn owes_wake(&self) -> bool {
        self.untold > 0
    }

    /// Wakes a producer that sleeps until requests have ended, if some have.
    #[inline]
    pub fn tell_ends(&mut self) -> Wake {
        if self.untold > 0 && self.memory.load(Word::Waits, Ordering::Relaxed) != 0 {
            self.wake_producer()
        } else {
            self.untold = 0;
            Wake::Nobody
        }
    }

    /// Notes that the producer is about to be woken for another reason.
    #[inline]
    pub fn is_told(&mut self) {
        if self.untold > 0 {
            let _ = self.wake_producer();
        }
    }

    fn wake_producer(&mut self) -> Wake {
        self.untold = 0;
        self.memory.store(Word::Waits, 0, Ordering::Relaxed);
        Wake::Peer
    }

    /// Prepares to sleep. Returns whether the producer will wake this side for the next record. If not, that record is there already.
    /// [`Consumer::awake`] ends the sleep, whatever ended it, and also a sleep that did not begin: others may sleep on this side.
    pub fn prepare_sleep(&mut self) -> bool {
        assert_eq!(
            self.head, self.released,
            "a producer without room would sleep too"
        );
        self.memory.store(Word::Sleeping, 1, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// Stops the producer from waking a side that is awake. Returns whether the producer has rung the doorbell meanwhile, or is about to.
    pub fn awake(&mut self) -> bool {
        let rung = self.memory.load(Word::Sleeping, Ordering::Relaxed) == 0;
        self.memory.store(Word::Sleeping, 0, Ordering::Relaxed);
        rung
    }

    /// Prepares for a nap: a sleep in a futex on [`Word::Napping`] while that is [`NAPPING`]. Returns whether the producer will end it by
    /// the next record. If not, that record is there already. [`Consumer::end_nap`] comes next in any case; one thread at a time naps.
    pub fn prepare_nap(&mut self) -> bool {
        assert_eq!(
            self.head, self.released,
            "a producer without room would sleep too"
        );
        self.memory.store(Word::Napping, NAPPING, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// Stops the producer from waking a napper that is awake.
    pub fn end_nap(&mut self) {
        self.memory.store(Word::Napping, 0, Ordering::Relaxed);
    }
}
