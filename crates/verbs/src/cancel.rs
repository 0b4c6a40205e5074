//! Cancellation of a wait in another thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

#[cfg(doc)]
use crate::device::Device;
use crate::soft::engine::CmQueue;

/// Lets a thread cancel the wait of another one: [`Device::connect_pair`] and [`Device::resolve_from`]. It serves one wait at a
/// time, and cancellation is final. Provider `hw` checks it only before it sends its request.
#[derive(Debug, Default)]
pub struct Cancel {
    state: Mutex<State>,
    cancelled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    cancelled: bool,
    /// Queue of the thread that waits for a peer.
    waits: Weak<CmQueue>,
}

impl Cancel {
    /// Makes a `Cancel` that is not cancelled yet.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cancels: a thread that waits, or will wait, returns at once.
    pub fn cancel(&self) {
        let mut state = self.state();
        state.cancelled = true;
        let waits = std::mem::take(&mut state.waits);
        drop(state);
        self.cancelled.notify_all();
        if let Some(queue) = waits.upgrade() {
            queue.waker().wake();
        }
    }

    /// Returns whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// Sleeps until it is cancelled. Returns false if the timeout expires first.
    pub fn wait(&self, timeout: Duration) -> bool {
        let waited = self
            .cancelled
            .wait_timeout_while(self.state(), timeout, |state| !state.cancelled);
        waited.unwrap_or_else(PoisonError::into_inner).0.cancelled
    }

    /// Registers the queue of a thread that waits for a peer, so that cancellation wakes it. Returns false if it was cancelled
    /// before.
    pub(crate) fn wakes(&self, queue: &Arc<CmQueue>) -> bool {
        let mut state = self.state();
        state.waits = Arc::downgrade(queue);
        !state.cancelled
    }
}
