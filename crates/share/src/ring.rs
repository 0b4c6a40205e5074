//! Rings of descriptors between an application and the node: submissions go to the node, completions to the application.
//!
//! The node does not trust the application, which may write anything at any time. So each side works with private copies of its own
//! position and of the ring's size, loads a word of the other side once and checks the value, and copies a descriptor out of the ring before
//! it looks at it. An impossible value is [`Corrupt`]: the node detaches the application. No call waits, and none does more work than
//! the number of descriptors that the caller allows for.
//!
//! # Memory
//! Two files in memory, both the node's: the application may write one of them, and only the node the other, which the application maps to
//! read ([`NodeEnd::create`]). Each word of a ring has one writer, and is in the file that this side may write: tail, `waits` and the
//! descriptors are the producer's, head and `sleeping` the consumer's. So an application cannot change a completion, nor make the node
//! forget how far it has read. Positions count descriptors, for ever, modulo 2^32; slots are a power of two.
//!
//! A descriptor fills a cache line. Each word has two for itself, because processors fetch lines in pairs. A message that is published
//! alone moves two lines from one processor to the other, that of its descriptor and that of the tail; in a batch it is one, and a share of
//! the tail. The head moves to the producer only when the producer finds no room for what it knows of it, which is at most once a batch of
//! the consumer. The other words change only when a side goes to sleep.
//!
//! There is no area for payload. The data of a request that does not fit its descriptor goes on in those behind it
//! ([`rdmux_wire::node`]): up to 32 bytes inline take no more than the one, 1024 take 17. A second area would need positions and checks
//! of its own, and a message a third line.
//!
//! # Sleeping and waking
//! An application has many rings, up to thousands, and one doorbell in each direction. There are two steps:
//!
//! 1. A consumer that does not look at a ring any more announces it in the ring's `sleeping`, and then looks at the tail once more. A
//!    producer stores the tail, and then looks at `sleeping`. If that is set, it sets the ring's bit in a bitmap ([`ready`]).
//! 2. A side that goes to sleep announces it in the bitmap's `sleeping`, and then looks at the bitmap once more. Whoever sets a bit then looks
//!    at that word, and rings the doorbell if it is set.
//!
//! A `SeqCst` fence stands between the two accesses on either side of either step, so that at least one of them sees the other's. (Fences,
//! not `SeqCst` accesses: loom checks only fences.) A ring that is busy needs neither bit nor doorbell; a side that polls all of its
//! rings is rung for none; and a sleeper looks at one bitmap, not at 10,000 rings.
//!
//! In the same way a producer without room announces in `waits` that it goes to sleep, and then looks at the head once more. The consumer
//! looks at `waits` when it has taken half of a ring or found the ring empty, since a producer that is woken for one free slot sleeps
//! again at once; it then sets the ring's bit in the bitmap of the other direction.

use std::sync::atomic::Ordering;

use rdmux_wire::Malformed;
use rdmux_wire::node::{DESCRIPTOR_BYTES, Descriptor, WORK_DESCRIPTORS_MAX, Work};

mod area;
mod doorbell;
mod ends;
pub mod ready;
#[cfg(test)]
mod tests;

pub use area::{Layout, LayoutError, ReadyArea, RingArea};
pub use doorbell::{Bell, BellWaiter};
pub use ends::{ApplicationEnd, AttachError, Files, NodeEnd};
pub use ready::{Announcer, ReadySet};

/// Fewest slots of a ring: the largest request has room.
pub const SLOTS_MIN: u32 = WORK_DESCRIPTORS_MAX.next_power_of_two() as u32;
/// Most slots of a ring.
pub const SLOTS_MAX: u32 = 1 << 16;

/// A word of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Position up to which the producer has put descriptors. The producer's.
    Tail,
    /// Not 0 while the producer waits to be told that there is room. The producer's.
    Waits,
    /// Position up to which the consumer has taken descriptors. The consumer's.
    Head,
    /// Not 0 while the consumer waits to be told that there are descriptors. The consumer's.
    Sleeping,
}

/// The memory of a ring, as one side sees it. Tests implement it with other memory.
pub trait RingMemory {
    /// Slots of the ring: a power of two, the same at every call, and private to this side.
    fn slots(&self) -> u32;
    /// Loads a word, `Relaxed` or `Acquire`.
    fn load(&self, word: Word, order: Ordering) -> u32;
    /// Stores a word that is this side's.
    fn store(&self, word: Word, value: u32, order: Ordering);
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
    /// Copies a descriptor out of a slot below [`RingMemory::slots`]. It may change meanwhile.
    fn read(&self, slot: u32) -> Descriptor;
    /// Copies a descriptor into a slot below [`RingMemory::slots`].
    fn write(&self, slot: u32, descriptor: &Descriptor);
}

/// Action for the other side.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// Nothing: it looks at the ring by itself.
    Nothing,
    /// Announce the ring to it ([`Announcer::announce`]).
    Ring,
}

/// The other side has written something that it never writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// The producer's position.
    #[error("the ring's tail {tail} is not between {from} and {to}")]
    Tail {
        /// The value.
        tail: u32,
        /// The least possible one, modulo 2^32.
        from: u32,
        /// The greatest possible one.
        to: u32,
    },
    /// The consumer's position.
    #[error("the ring's head {head} is not between {from} and {to}")]
    Head {
        /// The value.
        head: u32,
        /// The least possible one, modulo 2^32.
        from: u32,
        /// The greatest possible one.
        to: u32,
    },
    /// A descriptor.
    #[error(transparent)]
    Descriptor(#[from] Malformed),
    /// The first descriptor of a request was published without the others.
    #[error("a work request has {published} of {needed} descriptors")]
    Cut {
        /// Published descriptors.
        published: u32,
        /// Descriptors of the request.
        needed: u32,
    },
    /// A bit for a ring that does not exist.
    #[error("there is no ring {0}")]
    Ring(u32),
}

/// Reason why descriptors were not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// There is no room now.
    #[error("the ring is full")]
    Full,
    /// The other side has written something that it never writes.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
}

/// The side that puts descriptors into the ring.
///
/// [`Producer::push`] puts them there, and [`Producer::publish`] shows all of them to the consumer: once a batch.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    slots: u32,
    /// Position of the next descriptor.
    tail: u32,
    /// Tail that the consumer knows.
    published: u32,
    /// The consumer's head as last seen; `tail - head` is at most `slots`.
    head: u32,
    /// Slots that the last push without room requires.
    wanted: u32,
}

impl<M: RingMemory> Producer<M> {
    /// Creates the producer, which goes on at the tail that the memory holds: 0 in a new one.
    pub fn new(memory: M) -> Self {
        let slots = memory.slots();
        assert!(slots.is_power_of_two() && slots <= SLOTS_MAX);
        let tail = memory.load(Word::Tail, Ordering::Relaxed);
        Producer {
            memory,
            slots,
            tail,
            published: tail,
            // As if the ring was full: the first push looks.
            head: tail.wrapping_sub(slots),
            wanted: 0,
        }
    }

    /// Puts all of these descriptors into the ring, or none. The consumer sees them after [`Producer::publish`].
    ///
    /// # Errors
    /// There is no room, or the consumer's head is impossible.
    #[inline]
    pub fn push(&mut self, descriptors: &[Descriptor]) -> Result<(), PushError> {
        self.reserve(descriptors.len())?;
        for descriptor in descriptors {
            self.put(descriptor);
        }
        Ok(())
    }

    /// Puts a work request into the ring as [`Producer::push`] does. `fill` writes its data into its bytes: [`Work::put_elements`],
    /// [`Work::put_inline`].
    ///
    /// # Errors
    /// As for [`Producer::push`].
    #[inline]
    pub fn push_work(&mut self, work: &Work, fill: impl FnOnce(&Work, &mut [u8])) -> Result<(), PushError> {
        let descriptors = work.descriptors();
        self.reserve(descriptors)?;
        if descriptors == 1 {
            let mut descriptor = [0; DESCRIPTOR_BYTES];
            work.emit(&mut descriptor);
            fill(work, &mut descriptor);
            self.put(&descriptor);
            return Ok(());
        }
        let mut all = [[0; DESCRIPTOR_BYTES]; WORK_DESCRIPTORS_MAX];
        let all = &mut all[..descriptors];
        work.emit(&mut all[0]);
        fill(work, all.as_flattened_mut());
        all.iter().for_each(|descriptor| self.put(descriptor));
        Ok(())
    }

    /// Shows the consumer what was pushed. Returns whether the consumer is to be told.
    #[inline]
    pub fn publish(&mut self) -> Tell {
        if self.published == self.tail {
            return Tell::Nothing;
        }
        self.published = self.tail;
        self.memory.store(Word::Tail, self.tail, Ordering::Release);
        self.memory.fence(Ordering::SeqCst);
        match self.memory.load(Word::Sleeping, Ordering::Relaxed) {
            0 => Tell::Nothing,
            _ => Tell::Ring,
        }
    }

    /// Prepares to sleep until there is room for what had none. Returns whether the consumer will tell this side when it has made room, enough or not.
    /// If not, there is room now. [`Producer::no_longer_waits`] ends the wait.
    ///
    /// # Errors
    /// The consumer's head is impossible.
    pub fn wants_room(&mut self) -> Result<bool, Corrupt> {
        assert_eq!(self.published, self.tail, "the consumer would sleep too");
        self.memory.store(Word::Waits, 1, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        self.look_at_head()?;
        let waits = self.wanted > self.free();
        if !waits {
            self.no_longer_waits();
        }
        Ok(waits)
    }

    /// Ends a wait that [`Producer::wants_room`] has begun.
    pub fn no_longer_waits(&mut self) {
        self.memory.store(Word::Waits, 0, Ordering::Relaxed);
    }

    /// Returns whether there is room for so many descriptors. If there is, they may be pushed one after the other.
    ///
    /// # Errors
    /// The consumer's head is impossible.
    #[inline]
    pub fn has_room(&mut self, descriptors: usize) -> Result<bool, Corrupt> {
        // Compared as `usize`, so that no number of descriptors is too large.
        if descriptors > self.free() as usize {
            self.look_at_head()?;
            if descriptors > self.free() as usize {
                self.wanted = self.slots.min(descriptors.try_into().unwrap_or(u32::MAX));
                return Ok(false);
            }
        }
        Ok(true)
    }

    #[inline]
    fn free(&self) -> u32 {
        self.slots - self.tail.wrapping_sub(self.head)
    }

    #[inline]
    fn reserve(&mut self, descriptors: usize) -> Result<(), PushError> {
        if self.has_room(descriptors)? {
            Ok(())
        } else {
            Err(PushError::Full)
        }
    }

    #[inline]
    fn put(&mut self, descriptor: &Descriptor) {
        self.memory.write(self.tail & (self.slots - 1), descriptor);
        self.tail = self.tail.wrapping_add(1);
    }

    fn look_at_head(&mut self) -> Result<(), Corrupt> {
        // The consumer has read the slots before its head, so they may be written again.
        let head = self.memory.load(Word::Head, Ordering::Acquire);
        // The head moves forward, to the published tail at most.
        let (from, to) = (self.head, self.published);
        if to.wrapping_sub(head) > to.wrapping_sub(from) {
            return Err(Corrupt::Head { head, from, to });
        }
        self.head = head;
        Ok(())
    }
}

/// The side that takes descriptors out of the ring.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    slots: u32,
    /// Position of the next descriptor.
    head: u32,
    /// Head that the producer knows.
    released: u32,
    /// The producer's tail as last seen; `tail - released` is at most `slots`.
    tail: u32,
    /// Descriptors taken since the last look at [`Word::Waits`].
    untold: u32,
}

impl<M: RingMemory> Consumer<M> {
    /// Creates the consumer, which goes on at the head that the memory holds: 0 in a new one.
    pub fn new(memory: M) -> Self {
        let slots = memory.slots();
        assert!(slots.is_power_of_two() && slots <= SLOTS_MAX);
        let head = memory.load(Word::Head, Ordering::Relaxed);
        Consumer {
            memory,
            slots,
            head,
            released: head,
            tail: head,
            untold: 0,
        }
    }

    /// Takes descriptors into `out` and returns how many; none if there are none. Their slots are free for the producer after
    /// [`Consumer::release`].
    ///
    /// # Errors
    /// The producer's tail is impossible.
    #[inline]
    pub fn take(&mut self, out: &mut [Descriptor]) -> Result<usize, Corrupt> {
        let available = self.available()? as usize;
        let count = available.min(out.len());
        for descriptor in &mut out[..count] {
            *descriptor = self.get();
        }
        Ok(count)
    }

    /// Takes a work request, with its data in `bytes`, if there is one: [`Work::elements`], [`Work::inline`]. The slots are free for the
    /// producer after [`Consumer::release`].
    ///
    /// # Errors
    /// The producer has written something that it never writes. Its next requests cannot be found any more.
    #[inline]
    pub fn take_work(&mut self, bytes: &mut WorkBytes) -> Result<Option<Work>, Corrupt> {
        let published = self.available()?;
        if published == 0 {
            return Ok(None);
        }
        let first = self.get();
        let work = Work::parse(&first)?;
        bytes.0[0] = first;
        let needed = work.descriptors();
        if needed > 1 {
            self.take_rest(&mut bytes.0[1..needed], published)?;
        }
        Ok(Some(work))
    }

    /// Takes the other descriptors of a request whose first one is taken.
    fn take_rest(&mut self, rest: &mut [Descriptor], mut published: u32) -> Result<(), Corrupt> {
        let needed = 1 + rest.len() as u32;
        if needed > published {
            self.look_at_tail()?;
            published = self.tail.wrapping_sub(self.head) + 1;
        }
        if needed > published {
            return Err(Corrupt::Cut { published, needed });
        }
        rest.fill_with(|| self.get());
        Ok(())
    }

    /// Returns the slots of what was taken to the producer, once a batch. Returns whether the producer is to be told. To be called also when
    /// nothing was found.
    #[inline]
    pub fn release(&mut self) -> Tell {
        let taken = self.head.wrapping_sub(self.released);
        if taken > 0 {
            self.released = self.head;
            self.untold += taken;
            // The loads of the descriptors come before.
            self.memory.store(Word::Head, self.head, Ordering::Release);
        }
        // A producer that waits for room has published all that it has, so the consumer finds the ring empty soon.
        let is_due = self.untold > 0 && (taken == 0 || self.untold >= self.slots / 2);
        if is_due {
            self.look_for_waits()
        } else {
            Tell::Nothing
        }
    }

    /// Prepares to look at the ring no more until it is announced. Returns whether the producer will announce it. If not, there is a
    /// descriptor now. [`Consumer::awake`] comes before the next look at the ring, in either case.
    ///
    /// # Errors
    /// The producer's tail is impossible.
    ///
    /// # Panics
    /// If something was taken and not released, or the producer was to be told and [`Consumer::release`] has not been called since.
    pub fn prepare_sleep(&mut self) -> Result<bool, Corrupt> {
        let released = self.head == self.released && self.untold == 0;
        assert!(released, "a producer without room would sleep too");
        self.memory.store(Word::Sleeping, 1, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        self.look_at_tail()?;
        Ok(self.tail == self.head)
    }

    /// Ends a sleep that [`Consumer::prepare_sleep`] has prepared: the producer no longer announces the ring.
    pub fn awake(&mut self) {
        self.memory.store(Word::Sleeping, 0, Ordering::Relaxed);
    }

    /// Returns how many descriptors there are, at least as far as is known.
    #[inline]
    fn available(&mut self) -> Result<u32, Corrupt> {
        if self.tail == self.head {
            self.look_at_tail()?;
        }
        Ok(self.tail.wrapping_sub(self.head))
    }

    #[inline]
    fn get(&mut self) -> Descriptor {
        let descriptor = self.memory.read(self.head & (self.slots - 1));
        self.head = self.head.wrapping_add(1);
        descriptor
    }

    #[inline]
    fn look_at_tail(&mut self) -> Result<(), Corrupt> {
        // The producer has written the slots before its tail.
        let tail = self.memory.load(Word::Tail, Ordering::Acquire);
        // The tail moves forward, to as many slots behind the released head as there are.
        let (from, to) = (self.tail, self.released.wrapping_add(self.slots));
        if to.wrapping_sub(tail) > to.wrapping_sub(from) {
            return Err(Corrupt::Tail { tail, from, to });
        }
        self.tail = tail;
        Ok(())
    }

    fn look_for_waits(&mut self) -> Tell {
        self.untold = 0;
        self.memory.fence(Ordering::SeqCst);
        match self.memory.load(Word::Waits, Ordering::Relaxed) {
            0 => Tell::Nothing,
            _ => Tell::Ring,
        }
    }
}

/// Room for the bytes of a work request.
#[derive(Clone, Debug)]
pub struct WorkBytes([Descriptor; WORK_DESCRIPTORS_MAX]);

impl WorkBytes {
    /// Returns room, which is to be used again.
    pub const fn new() -> WorkBytes {
        WorkBytes([[0; DESCRIPTOR_BYTES]; WORK_DESCRIPTORS_MAX])
    }

    /// Returns the bytes of the request that was taken last.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_flattened()
    }
}

impl Default for WorkBytes {
    fn default() -> WorkBytes {
        WorkBytes::new()
    }
}
