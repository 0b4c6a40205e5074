//! Events that a program was given and has yet to acknowledge: their object is destroyed after that, and not before.

use std::sync::{Condvar, Mutex, PoisonError};

/// The events of one object.
#[derive(Default)]
pub(crate) struct Given {
    /// Numbers of events given and acknowledged since the object was made. They wrap.
    counts: Mutex<(u32, u32)>,
    acknowledged: Condvar,
}

impl Given {
    /// Counts an event given to the program.
    pub(crate) fn give(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.0 = counts.0.wrapping_add(1);
    }

    /// Counts events that the program has acknowledged.
    pub(crate) fn acknowledge(&self, count: u32) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.1 = counts.1.wrapping_add(count);
        drop(counts);
        self.acknowledged.notify_all();
    }

    /// Waits until the program has acknowledged all events, as the manual prescribes for destroying an object.
    pub(crate) fn wait_acknowledged(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        while counts.0 != counts.1 {
            counts = self
                .acknowledged
                .wait(counts)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}
