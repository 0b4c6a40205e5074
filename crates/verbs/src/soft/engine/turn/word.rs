//! The atomic word behind the turns.

use super::sync::{AtomicU32, LOOKS, Ordering, pause, wait, wake_one};

/// Somebody has the turn.
const HELD: u32 = 1;
/// Somebody sleeps until the turn is free.
const WAITED_FOR: u32 = 2;
/// Something was left.
const RUNG: u32 = 4;

/// See [`super`]. `let_go` and the next `hold` order the accesses to the protected state; the queue of left items has its own lock.
#[derive(Debug)]
pub(super) struct Word(pub(super) AtomicU32);

impl Word {
    #[inline]
    pub(super) fn hold(&self) {
        let free = self
            .0
            .compare_exchange(0, HELD, Ordering::Acquire, Ordering::Relaxed);
        if free.is_err() {
            self.hold_slowly();
        }
    }

    #[inline]
    pub(super) fn try_hold(&self) -> bool {
        let free = self
            .0
            .compare_exchange(0, HELD, Ordering::Acquire, Ordering::Relaxed);
        free.is_ok() || self.mark(HELD)
    }

    /// Sets these bits, if nobody has the turn.
    fn mark(&self, bits: u32) -> bool {
        let free = |word: u32| (word & HELD == 0).then_some(word | bits);
        let marked = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, free);
        marked.is_ok()
    }

    #[cold]
    fn hold_slowly(&self) {
        for _ in 0..LOOKS {
            if self.mark(HELD) {
                return;
            }
            pause();
        }
        // A thread that has slept sets the bit for possible other sleepers: only one is woken.
        while !self.mark(HELD | WAITED_FOR) {
            let word = self.0.fetch_or(WAITED_FOR, Ordering::Relaxed);
            if word & HELD != 0 {
                wait(&self.0, word | WAITED_FOR);
            }
        }
    }

    /// Ends a turn. The caller must check [`Word::is_rung`] afterwards.
    #[inline]
    pub(super) fn let_go(&self) {
        let quiet = self
            .0
            .compare_exchange(HELD, 0, Ordering::Release, Ordering::Relaxed);
        if quiet.is_err() {
            let word = self.0.fetch_and(RUNG, Ordering::Release);
            if word & WAITED_FOR != 0 {
                wake_one(&self.0);
            }
        }
    }

    /// Marks that an item was left. Returns whether somebody has the turn: that holder sees the mark at the latest when it lets go.
    pub(super) fn ring(&self) -> bool {
        self.0.fetch_or(RUNG, Ordering::Relaxed) & HELD != 0
    }

    #[inline]
    pub(super) fn is_rung(&self) -> bool {
        self.0.load(Ordering::Relaxed) & RUNG != 0
    }

    /// Clears the mark: the holder of the turn is about to take the items that were left.
    pub(super) fn answer(&self) {
        self.0.fetch_and(!RUNG, Ordering::Relaxed);
    }
}
