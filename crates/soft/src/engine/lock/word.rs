//! The atomic word of the lock.

use super::sync::{AtomicU32, LOOKS, Ordering, pause, wait, wake_one};

/// Somebody holds the lock.
const HELD: u32 = 1;
/// Somebody sleeps until the lock is free.
const WAITED_FOR: u32 = 2;
/// An item was left.
const LEFT: u32 = 4;

/// See [`super`]. `unlock` and the next `lock` order the accesses to the protected state; the queue of left items has its own lock.
#[derive(Debug)]
pub(super) struct Word(pub(super) AtomicU32);

impl Word {
    #[inline]
    pub(super) fn lock(&self) {
        let free = self
            .0
            .compare_exchange(0, HELD, Ordering::Acquire, Ordering::Relaxed);
        if free.is_err() {
            self.lock_slowly();
        }
    }

    #[inline]
    pub(super) fn try_lock(&self) -> bool {
        let free = self
            .0
            .compare_exchange(0, HELD, Ordering::Acquire, Ordering::Relaxed);
        free.is_ok() || self.acquire(HELD)
    }

    /// Sets these bits, if nobody holds the lock.
    fn acquire(&self, bits: u32) -> bool {
        let free = |word: u32| (word & HELD == 0).then_some(word | bits);
        let acquired = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, free);
        acquired.is_ok()
    }

    #[cold]
    fn lock_slowly(&self) {
        for _ in 0..LOOKS {
            if self.acquire(HELD) {
                return;
            }
            pause();
        }
        // A thread that has slept sets the bit for possible other sleepers: only one is woken.
        while !self.acquire(HELD | WAITED_FOR) {
            let word = self.0.fetch_or(WAITED_FOR, Ordering::Relaxed);
            if word & HELD != 0 {
                wait(&self.0, word | WAITED_FOR);
            }
        }
    }

    /// Releases the lock. The caller must check [`Word::has_left`] afterwards.
    #[inline]
    pub(super) fn unlock(&self) {
        let quiet = self
            .0
            .compare_exchange(HELD, 0, Ordering::Release, Ordering::Relaxed);
        if quiet.is_err() {
            let word = self.0.fetch_and(LEFT, Ordering::Release);
            if word & WAITED_FOR != 0 {
                wake_one(&self.0);
            }
        }
    }

    /// Marks that an item was left. Returns whether somebody holds the lock: that holder sees the mark at the latest when it unlocks.
    pub(super) fn mark_left(&self) -> bool {
        self.0.fetch_or(LEFT, Ordering::Relaxed) & HELD != 0
    }

    #[inline]
    pub(super) fn has_left(&self) -> bool {
        self.0.load(Ordering::Relaxed) & LEFT != 0
    }

    /// Clears the mark: the holder of the lock is about to take the items that were left.
    pub(super) fn clear_left(&self) {
        self.0.fetch_and(!LEFT, Ordering::Relaxed);
    }
}
