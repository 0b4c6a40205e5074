//! Giving up what another thread waits for.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

#[cfg(doc)]
use crate::device::Device;
use crate::soft::engine::CmQueue;

/// Lets a thread give up what another one waits for: [`Device::connect_pair`] and [`Device::resolve_from`]. It is for one wait at a
/// time, and for good. Provider `hw` looks at it only before it asks.
#[derive(Debug, Default)]
pub struct Cancel {
    state: Mutex<State>,
    cancelled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    cancelled: bool,
    /// Who waits for a peer.
    waits: Weak<CmQueue>,
}

impl Cancel {
    /// Nothing is given up yet.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up: who waits, or will, returns at once.
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

    /// Whether it was given up.
    pub fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// Sleeps until it is given up. False: the time is over.
    pub fn wait(&self, timeout: Duration) -> bool {
        let waited = self
            .cancelled
            .wait_timeout_while(self.state(), timeout, |state| !state.cancelled);
        waited.unwrap_or_else(PoisonError::into_inner).0.cancelled
    }

    /// Has one who waits for a peer be woken. False: it was given up before.
    pub(crate) fn wakes(&self, queue: &Arc<CmQueue>) -> bool {
        let mut state = self.state();
        state.waits = Arc::downgrade(queue);
        !state.cancelled
    }
}
