//! The rings of an application that have news for one side: a bitmap, and whether that side sleeps.
//!
//! [`crate::ring`] describes the protocol. Each side has a set; all threads of the other side announce rings in it. Both sides write it, so
//! an application can lose its own announcements and wake the node for nothing. It loses or wakes nobody else's.

use std::sync::atomic::Ordering;

use super::Corrupt;

/// Rings of a word of the bitmap.
pub const RINGS_PER_WORD: u32 = u64::BITS;

/// The memory of a set, as one side sees it. Tests implement it with other memory.
pub trait ReadyMemory {
    /// Rings of the set, the same at every call, and private to this side.
    fn rings(&self) -> u32;
    /// Loads a word of the bitmap.
    fn load(&self, word: u32, order: Ordering) -> u64;
    /// Sets bits of a word of the bitmap; returns its previous value.
    fn set(&self, word: u32, bits: u64, order: Ordering) -> u64;
    /// Clears a word of the bitmap; returns its previous value.
    fn clear(&self, word: u32, order: Ordering) -> u64;
    /// Loads the word that says whether the side sleeps.
    fn sleeping(&self, order: Ordering) -> u32;
    /// Stores that word.
    fn set_sleeping(&self, value: u32, order: Ordering);
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
}

/// The side that announces rings. Threads may share it.
#[derive(Debug)]
pub struct Announcer<M>(M);

impl<M: ReadyMemory> Announcer<M> {
    /// Creates the announcing side.
    pub fn new(memory: M) -> Self {
        Announcer(memory)
    }

    /// Announces a ring for which a call has returned [`super::Tell::Ring`]. Returns whether to ring the other side's doorbell, which the
    /// caller then must: once for each of its sleeps, unless threads announce rings at the same time.
    ///
    /// # Panics
    /// If there is no such ring.
    #[must_use]
    #[inline]
    pub fn announce(&self, ring: u32) -> bool {
        assert!(ring < self.0.rings());
        let bit = 1 << (ring % RINGS_PER_WORD);
        // `Relaxed` suffices: there is a fence between the store of the ring's tail or head and this call.
        let before = self.0.set(ring / RINGS_PER_WORD, bit, Ordering::Relaxed);
        if before & bit != 0 {
            // The side that has set it has looked, and the other side sees it before it sleeps.
            return false;
        }
        self.0.fence(Ordering::SeqCst);
        let sleeps = self.0.sleeping(Ordering::Relaxed) != 0;
        if sleeps {
            // This may overwrite the word of a later sleep. But the doorbell follows, and ends that sleep; and a call that the sleeper
            // has answered orders the store before its next sleep.
            self.0.set_sleeping(0, Ordering::Relaxed);
        }
        sleeps
    }
}

/// The side that learns of rings.
#[derive(Debug)]
pub struct ReadySet<M> {
    memory: M,
    /// Word of the bitmap at which the next look begins.
    next: u32,
}

impl<M: ReadyMemory> ReadySet<M> {
    /// Creates the learning side.
    pub fn new(memory: M) -> Self {
        ReadySet { memory, next: 0 }
    }

    /// Takes all announced rings out of the set, each once, and passes them to `found`.
    ///
    /// # Errors
    /// A ring that does not exist was announced.
    #[inline]
    pub fn take(&mut self, found: impl FnMut(u32)) -> Result<(), Corrupt> {
        self.next = 0;
        self.take_some(u32::MAX, found)
    }

    /// Takes announced rings out of the set as [`ReadySet::take`] does, until there are `limit` of them, or up to 63 more. Further ones stay
    /// in the set, and the next call begins with them: an application that announces rings without end keeps nobody from others.
    ///
    /// # Errors
    /// As for [`ReadySet::take`].
    #[inline]
    pub fn take_some(&mut self, limit: u32, mut found: impl FnMut(u32)) -> Result<(), Corrupt> {
        let rings = self.memory.rings();
        let words = rings.div_ceil(RINGS_PER_WORD);
        let mut count = 0;
        for _ in 0..words {
            if count >= limit {
                break;
            }
            let word = self.next;
            self.next = if word + 1 < words { word + 1 } else { 0 };
            if self.memory.load(word, Ordering::Relaxed) == 0 {
                continue;
            }
            // Stores into the rings before the bits were set come with it.
            let mut bits = self.memory.clear(word, Ordering::Acquire);
            count += bits.count_ones();
            while bits != 0 {
                let ring = word * RINGS_PER_WORD + bits.trailing_zeros();
                if ring >= rings {
                    return Err(Corrupt::Ring(ring));
                }
                found(ring);
                bits &= bits - 1;
            }
        }
        Ok(())
    }

    /// Prepares to sleep until the doorbell rings. Returns whether the other side will ring it for the next ring that it announces. If
    /// not, one is announced now. [`ReadySet::awake`] ends the sleep in either case.
    pub fn prepare_sleep(&mut self) -> bool {
        self.memory.set_sleeping(1, Ordering::Relaxed);
        self.memory.fence(Ordering::SeqCst);
        let words = self.memory.rings().div_ceil(RINGS_PER_WORD);
        (0..words).all(|word| self.memory.load(word, Ordering::Relaxed) == 0)
    }

    /// Stops the other side from ringing.
    pub fn awake(&mut self) {
        self.memory.set_sleeping(0, Ordering::Relaxed);
    }
}
