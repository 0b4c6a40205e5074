//! Links as the threads of the program use them, without the engine's lock.
//!
//! A thread puts SENDs into the rings of links ([`PeerLink`]), and one that polls takes out those of the peers and completes those that the
//! peers have taken ([`Looker`]): all under the locks of the links' sides and of the queue pairs' lanes. What a lane does not cover stays in
//! the ring, or is handed to the engine. A thread looks so only while it is trusted to come back: it may leave the room of a record that it
//! has taken unreleased until its answer is in the other ring, and the engine, which looks at everything else, is driven by other polls.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_rnic::{Delivery, Fill, Lanes, PeerRing, Put, Recent, Ticket, Time};
use rdmux_shm::{Corrupt, Ends, TookRequests};
use rdmux_verbs::sync::RwLock;

use super::link::{LINKS_PER_LOOK, RECORDS_PER_PASS};

/// Looks in a row of a thread that polls, of which the last one drives the engine as well.
const LOOKS_PER_DRIVE: u32 = 16;
/// Time from one poll to the next from which on a thread polls slowly.
const SLOW_NS: u64 = 2_000;
/// Most engines whose links a thread remembers.
const LOOKERS_MAX: usize = 4;
/// Looks that find nothing, after which a thread leaves looking to the engine, which does so at less cost.
const EMPTY_LOOKS: u32 = 256;

/// A link to the process of a peer.
#[derive(Debug)]
pub(crate) struct PeerLink {
    peer: IpAddr,
    ends: Arc<Ends>,
    /// Cleared when the link ends.
    open: Arc<AtomicBool>,
}

impl PeerLink {
    pub(crate) fn new(peer: IpAddr, ends: Arc<Ends>, open: Arc<AtomicBool>) -> PeerLink {
        PeerLink { peer, ends, open }
    }

    #[inline]
    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }
}

impl PeerRing for PeerLink {
    #[inline]
    fn put(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Put {
        if !self.is_open() {
            return Put::Not;
        }
        // The engine finds what is wrong with a ring, and ends the link.
        self.ends.request(ticket, bytes, fill).unwrap_or(Put::Not)
    }
}

/// The links of an engine that are up.
#[derive(Debug, Default)]
pub(crate) struct CallerLinks {
    list: RwLock<Arc<[Arc<PeerLink>]>>,
    /// Number of changes of the list.
    changes: AtomicU64,
    /// Set when the engine has taken a request: threads that poll look at the rings by themselves again.
    is_lively: AtomicBool,
}

impl CallerLinks {
    /// Makes threads that poll look at the rings by themselves again.
    #[inline]
    pub(crate) fn enliven(&self) {
        if !self.is_lively.load(Ordering::Relaxed) {
            self.is_lively.store(true, Ordering::Relaxed);
        }
    }

    /// Replaces the list, if it differs.
    pub(crate) fn set(&self, links: Vec<Arc<PeerLink>>) {
        let mut list = self.list.write();
        let same = list.len() == links.len() && list.iter().zip(&links).all(|(a, b)| Arc::ptr_eq(a, b));
        if !same {
            *list = links.into();
            self.changes.fetch_add(1, Ordering::Release);
        }
    }
}

/// News that a look has found for the engine.
#[derive(Debug, Default)]
pub(crate) struct ForEngine {
    pub(crate) deliveries: Vec<Delivery>,
    /// Requests that the peers have executed, of queue pairs whose lanes have closed meanwhile.
    pub(crate) ended: Vec<Ticket>,
}

impl ForEngine {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.ended.is_empty()
    }
}

/// Outcome of a look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    /// Set when something was moved.
    pub(crate) any: bool,
    /// Set when the caller is to drive the engine: the number of polls since it did.
    pub(crate) drive: Option<u32>,
}

impl Looked {
    /// Nothing was looked at.
    pub(crate) const DRIVE: Looked = Looked {
        any: false,
        drive: Some(1),
    };
}

thread_local! {
    /// The thread's looks at the links of engines, and the index of the engine that it polled last.
    static LOOKERS: RefCell<(Vec<Looker>, usize)> = const { RefCell::new((Vec::new(), 0)) };
    /// Set while the thread is inside of a lane, under locks that the engine needs too.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the thread is inside of a lane: memory that a request names may run code of the program, which may poll.
#[inline]
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// Calls `f`, which may enter lanes.
#[inline]
pub(crate) fn inside<R>(f: impl FnOnce() -> R) -> R {
    /// Ends it when it is dropped, also while a panic of a memory unwinds.
    struct Ends(bool);
    impl Drop for Ends {
        #[inline]
        fn drop(&mut self) {
            INSIDE.set(self.0);
        }
    }
    // The program's code may poll, and so come here again.
    let _ends = Ends(INSIDE.replace(true));
    f()
}

/// Moves what peers have sent for lanes, on behalf of a thread that polls, and completes what they have taken. Returns what the caller does
/// next, and what it hands to the engine.
#[inline]
pub(crate) fn look(
    all: &Arc<CallerLinks>,
    lanes: &Lanes,
    now: impl Fn() -> Time + Copy,
) -> (Looked, Option<ForEngine>) {
    let look = |lookers: &RefCell<(Vec<Looker>, usize)>| {
        let Ok(mut lookers) = lookers.try_borrow_mut() else {
            return (Looked::default(), None);
        };
        let (lookers, last) = &mut *lookers;
        let is_it = |looker: &Looker| Arc::ptr_eq(&looker.all, all);
        if !lookers.get(*last).is_some_and(is_it) {
            let at = lookers.iter().position(is_it);
            *last = at.unwrap_or_else(|| add(lookers, all));
        }
        let looker = &mut lookers[*last];
        if !looker.is_to_look() {
            return (Looked::DRIVE, None);
        }
        let looked = inside(|| looker.look(lanes, now));
        let found = &mut looker.found;
        let found = (!found.is_empty()).then(|| std::mem::take(found));
        (looked, found)
    };
    // A thread that ends has none any more.
    LOOKERS.try_with(look).unwrap_or((Looked::DRIVE, None))
}

/// Adds the links of an engine; returns its index.
#[cold]
fn add(lookers: &mut Vec<Looker>, all: &Arc<CallerLinks>) -> usize {
    // Those of engines that are closed would keep the memory of their links.
    lookers.retain(|looker| Arc::strong_count(&looker.all) > 1);
    if lookers.len() == LOOKERS_MAX {
        lookers.remove(0);
    }
    lookers.push(Looker::new(all));
    lookers.len() - 1
}

/// Outcome of a look at a link.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    /// Set when something was moved.
    any: bool,
    /// Set when something is there for the engine.
    is_more: bool,
}

/// A thread's looks at the links of an engine, one after another.
#[derive(Debug)]
struct Looker {
    all: Arc<CallerLinks>,
    links: Arc<[Arc<PeerLink>]>,
    /// [`CallerLinks::changes`] at the time of that list.
    changes: u64,
    sending: Recent,
    receiving: Recent,
    /// Looks since the last drive, and those in a row that have found nothing.
    looks: u32,
    empty: u32,
    /// Time of the last drive, and whether the thread polled slowly until then.
    driven: Time,
    is_slow: bool,
    at: usize,
    found: ForEngine,
}

impl Looker {
    fn new(all: &Arc<CallerLinks>) -> Looker {
        Looker {
            all: Arc::clone(all),
            links: Arc::default(),
            changes: 0,
            sending: Recent::default(),
            receiving: Recent::default(),
            looks: 0,
            empty: EMPTY_LOOKS,
            driven: Time(0),
            is_slow: true,
            at: 0,
            found: ForEngine::default(),
        }
    }

    /// Returns whether looking is worth while.
    #[inline]
    fn is_to_look(&mut self) -> bool {
        if self.empty < EMPTY_LOOKS {
            return true;
        }
        let is_lively = &self.all.is_lively;
        let lively = is_lively.load(Ordering::Relaxed) && is_lively.swap(false, Ordering::Relaxed);
        if lively {
            self.empty = 0;
        }
        lively
    }

    #[inline]
    fn look(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Looked {
        self.looks += 1;
        let Moved { any, is_more } = self.look_at_links(lanes, now);
        self.empty = if any { 0 } else { self.empty + 1 };
        let drives = is_more || self.looks >= LOOKS_PER_DRIVE || self.is_slow;
        let drive = drives.then(|| self.begin_drive(now()));
        Looked { any, drive }
    }

    /// Notes that the thread drives the engine now; returns the number of polls since it did. One that polls now and then does so each time:
    /// whatever does not come by the rings waits for it.
    fn begin_drive(&mut self, now: Time) -> u32 {
        let since = std::mem::replace(&mut self.driven, now);
        self.is_slow = now.since_ns(since) > u64::from(self.looks) * SLOW_NS;
        std::mem::take(&mut self.looks)
    }

    #[inline]
    fn look_at_links(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Moved {
        if self.changes != self.all.changes.load(Ordering::Acquire) {
            self.look_anew();
        }
        let mut moved = Moved::default();
        for _ in 0..self.links.len().min(LINKS_PER_LOOK) {
            let next = self.at + 1;
            self.at = if next < self.links.len() { next } else { 0 };
            let link = &self.links[self.at];
            link.ends.release();
            let of_link = if link.ends.is_ready() {
                self.take(lanes, now)
            } else if link.ends.has_news() {
                self.end(lanes, now)
            } else {
                continue;
            };
            moved.any |= of_link.any;
            moved.is_more |= of_link.is_more;
        }
        moved
    }

    #[cold]
    fn look_anew(&mut self) {
        self.changes = self.all.changes.load(Ordering::Acquire);
        self.links = self.all.list.read().clone();
        self.at = 0;
    }

    /// Has lanes execute the next requests of the peer.
    #[inline]
    fn take(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Moved {
        let Looker {
            links,
            at,
            receiving,
            found,
            ..
        } = self;
        let link = &links[*at];
        if !link.is_open() {
            return Moved::default();
        }
        let took = link.ends.take_requests(RECORDS_PER_PASS, true, &mut |record| {
            lanes.take(link.peer, record, receiving, now, &mut found.deliveries)
        });
        let took = match took {
            Some(Ok(took)) => took,
            // The engine ends a link whose ring holds nonsense.
            Some(Err(Corrupt)) => TookRequests {
                is_more: true,
                ..TookRequests::default()
            },
            // Another thread has the ring, and goes on.
            None => return Moved::default(),
        };
        Moved {
            any: took.taken > 0,
            is_more: took.is_more,
        }
    }

    /// Completes requests that the peer has taken.
    #[inline]
    fn end(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Moved {
        let Looker {
            links,
            at,
            sending,
            found,
            ..
        } = self;
        let link = &links[*at];
        if !link.is_open() {
            return Moved::default();
        }
        let mut any = false;
        for _ in 0..RECORDS_PER_PASS {
            let ticket = match link.ends.take_end(&mut |ticket| lanes.has(ticket, sending)) {
                Some(Ok(Some(ticket))) => ticket,
                Some(_) => break,
                None => return Moved { any, is_more: false },
            };
            any = true;
            if !lanes.end(ticket, sending, now, &mut found.deliveries) {
                found.ended.push(ticket);
            }
        }
        // Without any they are the engine's.
        let is_more = !any || link.ends.has_untold_ends();
        Moved { any, is_more }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inside__that_ends_within_another_does_not_end_that() {
        inside(|| {
            inside(|| ());
            assert!(is_inside());
        });
        assert!(!is_inside());
    }
}
