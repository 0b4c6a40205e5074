//! The announcement of each party, and its look at the others'.

use super::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// Time after its last call for which a caller that polls, or that waited and drove, is trusted to come back.
pub(in super::super) const POLLER_LEASE_NS: u64 = 2_000_000;

/// Time of the last poll while there is a leader: it never expires.
const LEADING: u64 = u64::MAX;

/// The party to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Wake {
    Nobody,
    Thread,
}

#[derive(Debug)]
pub(in super::super) struct HandOver {
    /// Time at which a caller polled last, or [`LEADING`]; 0: the thread must watch.
    polled_at_ns: AtomicU64,
    /// Set while the thread does not look at the sockets, since a caller does.
    leased: AtomicBool,
    /// Set while the thread sleeps until it is woken, since the leader is in its place.
    parked: AtomicBool,
    /// Number of callers that sleep and rely on somebody else.
    followers: AtomicUsize,
}

impl HandOver {
    pub(in super::super) fn new() -> HandOver {
        HandOver {
            polled_at_ns: AtomicU64::new(0),
            leased: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            followers: AtomicUsize::new(0),
        }
    }

    fn is_polled(&self, now_ns: u64) -> bool {
        let at = self.polled_at_ns.load(Ordering::Relaxed);
        at == LEADING || at != 0 && now_ns.saturating_sub(at) < POLLER_LEASE_NS
    }

    pub(in super::super) fn has_leader(&self) -> bool {
        self.polled_at_ns.load(Ordering::Relaxed) == LEADING
    }

    // A caller that polls.

    /// Makes the caller the watcher. Allowed only to a holder of the engine's lock that finds no completion queue armed, or none that was
    /// armed lately: a caller arms a queue first, and notes that under the lock before it calls [`HandOver::hand_over`]. So either this
    /// caller sees that, or its lease ends there.
    #[inline]
    pub(in super::super) fn polls(&self, now_ns: u64) {
        self.polled_at_ns.store(now_ns.max(1), Ordering::Relaxed);
    }

    /// Returns whether the thread leaves the sockets to callers.
    #[inline]
    pub(in super::super) fn is_leased(&self) -> bool {
        self.leased.load(Ordering::Relaxed)
    }

    /// Returns whether callers sleep and rely on somebody else. One that begins to is seen by whoever holds the engine's lock after it.
    pub(in super::super) fn has_followers(&self) -> bool {
        self.followers.load(Ordering::Relaxed) > 0
    }

    // A caller that goes to sleep.

    /// Announces a caller that sleeps and relies on others; [`HandOver::hand_over`] comes next.
    pub(in super::super) fn rely(&self) {
        self.followers.fetch_add(1, Ordering::Relaxed);
    }

    pub(in super::super) fn rely_no_more(&self) {
        self.followers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends the caller's watch. Either there is a leader, which watches as long as somebody relies on it, or the thread watches from here
    /// on.
    pub(in super::super) fn hand_over(&self) -> Wake {
        fence(Ordering::SeqCst);
        if self.has_leader() {
            return Wake::Nobody;
        }
        self.give_to_thread()
    }

    fn give_to_thread(&self) -> Wake {
        self.polled_at_ns.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.is_leased() {
            Wake::Thread
        } else {
            Wake::Nobody
        }
    }

    // The leader.

    /// Makes the leader the watcher. Others see this once the leader has held the engine's lock again.
    pub(in super::super) fn lead(&self) {
        self.polled_at_ns.store(LEADING, Ordering::Relaxed);
    }

    /// Ends the leader's watch. The caller will soon be back: until then nobody watches, unless followers sleep and rely on it, or others
    /// may do so since they have armed a completion queue.
    pub(in super::super) fn stop_leading(&self, now_ns: u64, is_any_armed: impl FnOnce() -> bool) -> Wake {
        self.polls(now_ns);
        fence(Ordering::SeqCst);
        if self.followers.load(Ordering::Relaxed) > 0 || is_any_armed() {
            self.give_to_thread()
        } else if self.parked.load(Ordering::Relaxed) {
            Wake::Thread
        } else {
            Wake::Nobody
        }
    }

    // The thread.

    /// Returns whether a caller watches, so that the thread may sleep until it is woken, or for [`POLLER_LEASE_NS`].
    pub(in super::super) fn lease(&self, now_ns: u64) -> bool {
        if !self.is_polled(now_ns) {
            return false;
        }
        self.leased.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_polled(now_ns)
    }

    /// Returns whether the thread may sleep until it is woken when that time is over: the leader wakes it when it stops leading.
    pub(in super::super) fn park(&self) -> bool {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_leader()
    }

    /// Records that the thread is awake.
    pub(in super::super) fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
        self.leased.store(false, Ordering::Relaxed);
    }
}
