//! Who looks out for what arrives while nobody has a turn: the engine's thread; a caller that polls, for as long as it is trusted
//! to come back; or a caller that waits and sits in the thread's place. Whoever goes to sleep and relies on somebody else has
//! somebody, whatever the others do at that moment.
//!
//! Two who meet each say what they do, and then look what the other does. A `SeqCst` fence stands between the two steps on both
//! sides, so at least one of them sees the other. (Fences, not `SeqCst` accesses: only those are what loom checks.)

mod state;

pub(super) use self::state::{HandOver, POLLER_LEASE_NS, Wake};

/// What the hand-over needs of the system.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(test)]
mod tests;
