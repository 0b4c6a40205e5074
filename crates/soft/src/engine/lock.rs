//! The engine's lock, and a queue beside it of the items that others leave for its holder. A caller that finds the lock held, and only
//! has an item to hand in, leaves the item there and goes: somebody takes it in before the lock comes free for good.
//!
//! One word says whether the lock is held, whether somebody sleeps for it, and whether an item was left. A caller that leaves an item
//! sets the bit there, and learns in the same step whether the lock was held. If it was, its holder finds the bit set after unlocking; if
//! not, the caller that left the item takes the lock.

mod word;

use std::collections::VecDeque;

use lock_api::{GuardSend, RawMutex};

use self::word::Word;

use rdmux_verbs::sync::{Mutex, MutexGuard};

/// Functions of the system that the word needs.
mod sync {
    use rustix::thread::futex;

    pub(super) use std::hint::spin_loop as pause;
    pub(super) use std::sync::atomic::{AtomicU32, Ordering};

    /// Attempts to take the lock before sleeping: it is held for a short time.
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
pub(super) struct RawEngineLock(Word);

// SAFETY: `Word::lock` and `Word::try_lock` take the lock in a step that finds it free, and `Word::unlock` alone releases it.
#[allow(unsafe_code, reason = "how `lock_api` makes locks")]
unsafe impl RawMutex for RawEngineLock {
    const INIT: RawEngineLock = RawEngineLock(Word(sync::AtomicU32::new(0)));
    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        self.0.lock();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.unlock();
    }
}

/// The state that the lock protects, and the items left for the holder of the lock.
pub(super) struct EngineLock<T, L> {
    lock: lock_api::Mutex<RawEngineLock, T>,
    left: Mutex<VecDeque<L>>,
}

impl<T, L> std::fmt::Debug for EngineLock<T, L> {
    /// Does not lock: whoever unlocks must look for items afterwards.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineLock").finish_non_exhaustive()
    }
}

/// Access to the state for the holder of the lock.
pub(super) type EngineGuard<'a, T> = lock_api::MutexGuard<'a, RawEngineLock, T>;

impl<T, L> EngineLock<T, L> {
    pub(super) fn new(inner: T) -> EngineLock<T, L> {
        EngineLock {
            lock: lock_api::Mutex::new(inner),
            left: Mutex::default(),
        }
    }

    /// Takes the lock; waits until it is free.
    #[inline]
    pub(super) fn lock(&self) -> EngineGuard<'_, T> {
        self.lock.lock()
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<EngineGuard<'_, T>> {
        self.lock.try_lock()
    }

    /// Leaves an item. Returns true if nobody holds the lock: the caller must take it then, if it is still free.
    #[must_use]
    pub(super) fn leave(&self, left: L) -> bool {
        self.queue().push_back(left);
        !self.word().mark_left()
    }

    /// Returns whether an item was left. The holder of the lock asks after locking, and again after unlocking.
    #[inline]
    pub(super) fn has_left(&self) -> bool {
        self.word().has_left()
    }

    /// Removes and returns the items that were left, oldest first. Only the holder of the lock calls this.
    pub(super) fn take_left(&self) -> VecDeque<L> {
        self.word().clear_left();
        std::mem::take(&mut *self.queue())
    }

    fn word(&self) -> &Word {
        // SAFETY: the operations on the word here neither take nor release the lock.
        #[allow(unsafe_code, reason = "`lock_api` gives the word in no other way")]
        let RawEngineLock(word) = unsafe { self.lock.raw() };
        word
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<L>> {
        self.left.lock()
    }
}

#[cfg(test)]
mod tests;
