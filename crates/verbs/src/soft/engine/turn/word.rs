//! The word that turns go by.

use super::sync::{AtomicU32, LOOKS, Ordering, pause, wait, wake_one};

/// Somebody has the turn.
const HELD: u32 = 1;
/// Somebody sleeps until it is free.
const WAITED_FOR: u32 = 2;
/// Something was left.
const RUNG: u32 = 4;

/// See [`super`]. What is reached in turns is ordered by `let_go` and the next `hold`; what was left, by its queue's own lock.
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
        // Who has slept says that there may be others: only one is woken.
        while !self.mark(HELD | WAITED_FOR) {
            let word = self.0.fetch_or(WAITED_FOR, Ordering::Relaxed);
            if word & HELD != 0 {
                wait(&self.0, word | WAITED_FOR);
            }
        }
    }

    /// Ends a turn. Whoever ends one looks at [`Word::is_rung`] behind it.
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

    /// Something was left. Whether somebody has the turn: it sees so when it lets go at the latest.
    pub(super) fn ring(&self) -> bool {
        self.0.fetch_or(RUNG, Ordering::Relaxed) & HELD != 0
    }

    #[inline]
    pub(super) fn is_rung(&self) -> bool {
        self.0.load(Ordering::Relaxed) & RUNG != 0
    }

    /// Whoever has the turn is about to take what was left.
    pub(super) fn answer(&self) {
        self.0.fetch_and(!RUNG, Ordering::Relaxed);
    }
}
