//! The duty to watch for arriving packets while nobody drives. Either the engine's thread has it; or a caller that polls, for as long
//! as it is trusted to come back; or the leader, a caller that waits in the thread's place. A caller that goes to sleep and relies on a
//! watcher always has one, whatever the others do at that moment.
//!
//! Two parties that meet each announce their own step, and then look at the other's. A `SeqCst` fence stands between the two steps on both
//! sides, so at least one of them sees the other. (Fences, not `SeqCst` accesses: loom checks only fences.)

mod state;

pub(super) use self::state::{HandOver, POLLER_LEASE_NS, Wake};

/// Atomics that the hand-over uses.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(test)]
mod tests;
