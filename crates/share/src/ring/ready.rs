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

    /// Announces a ring. Returns whether to ring the other side's doorbell: once for each of its sleeps, unless threads announce rings at
    /// the same time. The caller must ring it.
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
            // Whoever has set it has looked, and the other side sees it before it sleeps.
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
pub struct ReadySet<M>(M);

impl<M: ReadyMemory> ReadySet<M> {
    /// Creates the learning side.
    pub fn new(memory: M) -> Self {
        ReadySet(memory)
    }

    /// Takes all announced rings out of the set, each once, and passes them to `found` in ascending order.
    ///
    /// # Errors
    /// A ring that does not exist was announced. Those before it were passed.
    #[inline]
    pub fn take(&mut self, mut found: impl FnMut(u32)) -> Result<(), Corrupt> {
        let rings = self.0.rings();
        for word in 0..rings.div_ceil(RINGS_PER_WORD) {
            if self.0.load(word, Ordering::Relaxed) == 0 {
                continue;
            }
            // What was stored into the rings before the bits were set comes with it.
            let mut bits = self.0.clear(word, Ordering::Acquire);
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
        self.0.set_sleeping(1, Ordering::Relaxed);
        self.0.fence(Ordering::SeqCst);
        let words = self.0.rings().div_ceil(RINGS_PER_WORD);
        (0..words).all(|word| self.0.load(word, Ordering::Relaxed) == 0)
    }

    /// Stops the other side from ringing.
    pub fn awake(&mut self) {
        self.0.set_sleeping(0, Ordering::Relaxed);
    }
}
