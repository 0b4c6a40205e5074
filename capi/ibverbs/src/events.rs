//! Events that a program was given and has yet to acknowledge: their object is destroyed after that, and not before.

use rdmux_verbs::sync::{Condvar, Mutex, MutexGuard};

/// The events of one object.
#[derive(Default)]
pub(crate) struct Given {
    counts: Mutex<Counts>,
    acknowledged: Condvar,
}

#[derive(Default)]
struct Counts {
    /// Numbers of events given and acknowledged since the object was made. They wrap.
    given: u32,
    acknowledged: u32,
    /// Threads that destroy the object. Mostly none: a notification costs a system call also then.
    waiting: u32,
}

impl Given {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock()
    }

    /// Counts an event given to the program.
    pub(crate) fn give(&self) {
        let mut counts = self.counts();
        counts.given = counts.given.wrapping_add(1);
    }

    /// Counts events that the program has acknowledged.
    pub(crate) fn acknowledge(&self, count: u32) {
        let mut counts = self.counts();
        counts.acknowledged = counts.acknowledged.wrapping_add(count);
        if counts.waiting > 0 {
            self.acknowledged.notify_all();
        }
    }

    /// Waits until the program has acknowledged all events, as the manual prescribes for destroying an object.
    pub(crate) fn wait_acknowledged(&self) {
        let mut counts = self.counts();
        counts.waiting += 1;
        let are_open = |counts: &mut Counts| counts.given != counts.acknowledged;
        counts = self.acknowledged.wait_while(counts, are_open);
        counts.waiting -= 1;
    }
}
