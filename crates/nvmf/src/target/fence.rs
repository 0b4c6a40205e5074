//! Keeps the writes of a namespace apart from what must not be interrupted: fused pairs, and changes of a reservation.
//!
//! A write announces itself at a counter, of which there are several so that queues of different processors do not share one, and looks
//! at a flag: two operations on memory that is its own in the common case. Who needs to be alone takes a lock, raises the flag, and
//! waits until all counters are 0. A write that finds the flag raised withdraws and takes the lock too: it runs while it has it, so that
//! no number of fused pairs keeps it from running. Each write announces itself before it looks at the flag, and the flag is raised before the
//! counters are looked at, all sequentially consistent: one of the two sees the other.
//!
//! Only threads that may wait are ever alone. A write on a reactor's thread waits for the lock no longer than one part of a write and one fused pair of
//! a backend that does not wait for a medium.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdmux_verbs::sync::{Mutex, MutexGuard};

pub(super) const STRIPES: usize = 8;
/// Looks at the counters before the thread sleeps between two of them.
const SPINS: u32 = 200;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    is_raised: AtomicBool,
    writers: [Stripe; STRIPES],
    alone: Mutex<()>,
}

/// A counter, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Stripe(pub(super) AtomicU32);

/// A write that runs, until it is dropped.
#[derive(Debug)]
pub(super) enum Writing<'a> {
    Counted(&'a Fence, usize),
    Locked { _alone: MutexGuard<'a, ()> },
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if let Writing::Counted(fence, stripe) = self {
            fence.leave(*stripe);
        }
    }
}

impl Fence {
    /// Begins a write unless somebody is alone, or wants to be. It ends with [`Fence::leave`].
    pub(crate) fn try_enter(&self, stripe: usize) -> bool {
        let Stripe(writers) = &self.writers[stripe % STRIPES];
        writers.fetch_add(1, Ordering::SeqCst);
        let enters = !self.is_raised.load(Ordering::SeqCst);
        if !enters {
            writers.fetch_sub(1, Ordering::SeqCst);
        }
        enters
    }

    pub(crate) fn leave(&self, stripe: usize) {
        let Stripe(writers) = &self.writers[stripe % STRIPES];
        writers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Begins a write, once nobody is alone.
    pub(super) fn write(&self, stripe: usize) -> Writing<'_> {
        match self.try_enter(stripe) {
            true => Writing::Counted(self, stripe),
            false => Writing::Locked {
                _alone: self.alone.lock(),
            },
        }
    }

    /// Runs something while no write of the namespace does. `pause` waits a moment for writes that run.
    pub(crate) fn alone<T>(&self, pause: impl Fn(), run: impl FnOnce() -> T) -> T {
        let _alone = self.alone.lock();
        self.is_raised.store(true, Ordering::SeqCst);
        // Also if it panics: writes would wait for the lock for ever.
        let _lower = Lower(&self.is_raised);
        let mut looks = 0;
        while self
            .writers
            .iter()
            .any(|Stripe(writers)| writers.load(Ordering::SeqCst) > 0)
        {
            looks += 1;
            match looks < SPINS {
                true => std::thread::yield_now(),
                // A write does not look for waiters, which would cost each write a system call for a rare pair.
                false => pause(),
            }
        }
        run()
    }
}

struct Lower<'a>(&'a AtomicBool);

impl Drop for Lower<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alone__is_so_among_many_threads() {
        const ROUNDS: u64 = 2000;
        let fence = Fence::default();
        // Each half is changed by those alone in two steps, between which nobody may look.
        let (left, right) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for stripe in 0..2 {
                let (fence, left, right) = (&fence, &left, &right);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let _writing = fence.write(stripe);
                        assert_eq!(left.load(Ordering::SeqCst), right.load(Ordering::SeqCst));
                    }
                });
                scope.spawn(move || {
                    for _ in 0..ROUNDS / 10 {
                        fence.alone(std::thread::yield_now, || {
                            left.fetch_add(1, Ordering::SeqCst);
                            std::thread::yield_now();
                            right.fetch_add(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(u64::from(right.into_inner()), 2 * ROUNDS / 10);
        assert!(fence.try_enter(3), "nobody is left");
    }
}
