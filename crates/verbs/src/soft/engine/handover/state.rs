//! What each says, and what it looks at then.

use super::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// How long after its last call a caller that polls, or that waited and drove, is trusted to come back.
pub(in super::super) const POLLER_LEASE_NS: u64 = 2_000_000;

/// Since when a caller polls that sits in the thread's place: always.
const SEATED: u64 = u64::MAX;

/// Who is to be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Wake {
    Nobody,
    Thread,
    /// Who sits in its place.
    Seat,
}

#[derive(Debug)]
pub(in super::super) struct HandOver {
    /// When a caller polled last, or [`SEATED`]; 0: the thread is to look out.
    polled_at_ns: AtomicU64,
    /// The thread does not look at the sockets: a caller does.
    leased: AtomicBool,
    /// It sleeps until it is told, because that caller sits in its place.
    parked: AtomicBool,
    /// Who sleeps and relies on somebody else.
    sleepers: AtomicUsize,
}

impl HandOver {
    pub(in super::super) fn new() -> HandOver {
        HandOver {
            polled_at_ns: AtomicU64::new(0),
            leased: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
        }
    }

    fn is_polled(&self, now_ns: u64) -> bool {
        let at = self.polled_at_ns.load(Ordering::Relaxed);
        at == SEATED || at != 0 && now_ns.saturating_sub(at) < POLLER_LEASE_NS
    }

    fn is_seated(&self) -> bool {
        self.polled_at_ns.load(Ordering::Relaxed) == SEATED
    }

    /// Whom to wake when something is to be done earlier than whoever looks out will wake.
    pub(in super::super) fn driver(&self) -> Wake {
        if self.is_seated() {
            Wake::Seat
        } else {
            Wake::Thread
        }
    }

    // A caller that polls.

    /// The caller looks out from now on. Only in a turn that finds no completion queue armed: whoever arms one arms it first and
    /// calls [`HandOver::hand_over`] behind its next turn, so either this caller sees it armed, or its lease ends there.
    #[inline]
    pub(in super::super) fn polls(&self, now_ns: u64) {
        self.polled_at_ns.store(now_ns.max(1), Ordering::Relaxed);
    }

    /// Whether the thread leaves the sockets to callers.
    #[inline]
    pub(in super::super) fn is_leased(&self) -> bool {
        self.leased.load(Ordering::Relaxed)
    }

    // A caller that goes to sleep.

    /// From now on a caller sleeps and relies on others; [`HandOver::hand_over`] comes next.
    pub(in super::super) fn rely(&self) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
    }

    pub(in super::super) fn rely_no_more(&self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The caller looks out no more. Somebody sits in the thread's place, and does so as long as somebody relies on it, or the
    /// thread looks out from now on.
    pub(in super::super) fn hand_over(&self) -> Wake {
        fence(Ordering::SeqCst);
        if self.is_seated() {
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

    // A caller that waits in the thread's place.

    /// From now on it looks out. Its next turn makes others see so.
    pub(in super::super) fn sit(&self) {
        self.polled_at_ns.store(SEATED, Ordering::Relaxed);
    }

    /// It goes about its business, and will soon be back: until then nobody looks out, unless others sleep and rely on it, or
    /// may do so since they have armed a completion queue.
    pub(in super::super) fn leave_seat(&self, now_ns: u64, is_any_armed: impl FnOnce() -> bool) -> Wake {
        self.polls(now_ns);
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 || is_any_armed() {
            self.give_to_thread()
        } else if self.parked.load(Ordering::Relaxed) {
            Wake::Thread
        } else {
            Wake::Nobody
        }
    }

    // The thread.

    /// Whether a caller looks out, so that the thread may sleep until it is woken, or for [`POLLER_LEASE_NS`].
    pub(in super::super) fn lease(&self, now_ns: u64) -> bool {
        if !self.is_polled(now_ns) {
            return false;
        }
        self.leased.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_polled(now_ns)
    }

    /// Whether, that time being over, it may sleep until it is woken: who sits in its place says when it leaves.
    pub(in super::super) fn park(&self) -> bool {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_seated()
    }

    /// The thread is awake.
    pub(in super::super) fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
        self.leased.store(false, Ordering::Relaxed);
    }
}
