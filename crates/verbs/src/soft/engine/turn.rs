//! The turn to drive, and the items that others leave for its holder: a lock, and a queue beside it. A caller that finds the lock held,
//! and only has an item to hand in, leaves the item there and goes: somebody takes it in before the lock comes free for good.
//!
//! One word says whether the lock is held, whether somebody sleeps for it, and whether something was left (*rung*). A caller that leaves
//! an item sets the bit there, and learns in the same step whether the lock was held. If it was, its holder finds the word rung after
//! unlocking; if not, the caller that left the item takes the turn.

mod word;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lock_api::{GuardSend, RawMutex};

use self::word::Word;

/// Functions of the system that the word needs.
mod sync {
    use rustix::thread::futex;

    pub(super) use std::hint::spin_loop as pause;
    pub(super) use std::sync::atomic::{AtomicU32, Ordering};

    /// Attempts to take the turn before sleeping: turns are short.
    pub(super) const LOOKS: u32 = 100;

    /// Sleeps while the word has this value.
    pub(super) fn wait(word: &AtomicU32, value: u32) {
        // Woken, or never asleep: the caller looks again.
        let _ = futex::wait(word, futex::Flags::PRIVATE, value, None);
    }

    pub(super) fn wake_one(word: &AtomicU32) {
        let _ = futex::wake(word, futex::Flags::PRIVATE, 1);
    }
}

/// The word, with the interface that `lock_api` requires.
#[derive(Debug)]
pub(super) struct RawTurn(Word);

// SAFETY: `hold` and `try_hold` take the turn in a step that finds nobody having it, and `let_go` alone ends it.
#[allow(unsafe_code, reason = "how `lock_api` makes locks")]
unsafe impl RawMutex for RawTurn {
    const INIT: RawTurn = RawTurn(Word(sync::AtomicU32::new(0)));
    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        self.0.hold();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.try_hold()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.let_go();
    }
}

/// The state that the turn protects, and the items left for the holder of the turn.
pub(super) struct Turns<T, L> {
    lock: lock_api::Mutex<RawTurn, T>,
    left: Mutex<VecDeque<L>>,
}

impl<T, L> std::fmt::Debug for Turns<T, L> {
    /// Takes no turn: whoever ends a turn must look for items afterwards.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

/// A turn.
pub(super) type Turn<'a, T> = lock_api::MutexGuard<'a, RawTurn, T>;

impl<T, L> Turns<T, L> {
    pub(super) fn new(inner: T) -> Turns<T, L> {
        Turns {
            lock: lock_api::Mutex::new(inner),
            left: Mutex::default(),
        }
    }

    /// Takes the turn; waits until it is free.
    #[inline]
    pub(super) fn take(&self) -> Turn<'_, T> {
        self.lock.lock()
    }

    /// Takes the turn if it is free.
    #[inline]
    pub(super) fn try_take(&self) -> Option<Turn<'_, T>> {
        self.lock.try_lock()
    }

    /// Leaves an item. Returns true if nobody has the turn: the caller must take it then, if it is still free.
    #[must_use]
    pub(super) fn leave(&self, left: L) -> bool {
        self.queue().push_back(left);
        !self.word().ring()
    }

    /// Returns whether an item was left. The holder of the turn asks after taking the turn, and again after ending it.
    #[inline]
    pub(super) fn is_rung(&self) -> bool {
        self.word().is_rung()
    }

    /// Removes and returns the items that were left, oldest first. Only the holder of the turn calls this.
    pub(super) fn left(&self) -> VecDeque<L> {
        self.word().answer();
        std::mem::take(&mut *self.queue())
    }

    fn word(&self) -> &Word {
        // SAFETY: the operations on the word here neither take nor end a turn.
        #[allow(unsafe_code, reason = "`lock_api` gives the word in no other way")]
        let RawTurn(word) = unsafe { self.lock.raw() };
        word
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<L>> {
        // No invariant spans a panic.
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
