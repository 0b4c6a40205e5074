//! Links as the threads of the program use them, without the engine's lock.
//!
//! A thread puts SENDs into the rings of links ([`PeerLink`]), and one that polls takes out those of the peers and completes those that the
//! peers have taken ([`Looker`]): all under the locks of the links' sides and of the queue pairs' lanes. What a lane does not cover stays in
//! the ring, or is handed to the engine. A thread looks so only while it is trusted to come back: it may leave the room of a record that it
//! has taken unreleased until its answer is in the other ring, and the engine, which looks at everything else, is driven by other polls.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_rnic::{Delivery, Fill, Lanes, PeerRing, Put, Recent, Ticket, Time};
use rdmux_shm::{Corrupt, Ends, Put as Requested};
use rdmux_verbs::sync::RwLock;

/// Links at which a look looks: with more of them a caller would see less often what comes without the rings.
const LINKS_PER_LOOK: usize = 8;
/// Records taken from one link per look.
const RECORDS_PER_LOOK: usize = 16;
/// Looks in a row of a thread that polls, of which the last one drives the engine as well.
const LOOKS_PER_DRIVE: u32 = 16;
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
    /// Set when the peer may wait for the ends of its requests, until the engine wakes it.
    owes_ends: AtomicBool,
}

impl PeerLink {
    pub(crate) fn new(peer: IpAddr, ends: Arc<Ends>, open: Arc<AtomicBool>) -> PeerLink {
        PeerLink {
            peer,
            ends,
            open,
            owes_ends: AtomicBool::new(false),
        }
    }

    #[inline]
    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns the room of records that a caller has taken to the peer.
    #[inline]
    fn release(&self) {
        if self.ends.is_unreleased() && self.ends.release() {
            self.owes_ends.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether callers have left a wake-up of the peer to the engine.
    #[inline]
    pub(crate) fn take_owed_ends(&self) -> bool {
        self.owes_ends.load(Ordering::Relaxed) && self.owes_ends.swap(false, Ordering::Relaxed)
    }
}

impl PeerRing for PeerLink {
    #[inline]
    fn put(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Put {
        if !self.is_open() {
            return Put::Not;
        }
        // The engine finds what is wrong with a ring, and ends the link.
        match self.ends.request(ticket, bytes, fill) {
            Ok(Requested::Done) => Put::Done,
            Ok(Requested::DoneAndEnded) => Put::DoneAndEnded,
            Ok(Requested::NoRoom) | Err(Corrupt) => Put::Not,
        }
    }
}

/// The links of an engine that are up.
#[derive(Debug, Default)]
pub(crate) struct CallerLinks {
    list: RwLock<Arc<[Arc<PeerLink>]>>,
    /// Number of changes of the list.
    changes: AtomicU64,
    /// Set by the engine when it has taken a request: more may come.
    is_lively: AtomicBool,
}

impl CallerLinks {
    /// Makes threads that poll look by themselves again.
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

/// What a look has found for the engine.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Looked {
    /// Something was moved.
    Moved,
    /// There is nothing, and the caller need not drive the engine.
    Nothing,
    /// There is nothing for lanes: the caller drives the engine, after so many polls.
    Drive(u32),
}

thread_local! {
    /// The thread's looks at the links of engines, and the index of the engine that it polled last.
    static LOOKERS: RefCell<(Vec<Looker>, usize)> = const { RefCell::new((Vec::new(), 0)) };
}

/// Moves what peers have sent for lanes, on behalf of a thread that polls, and completes what they have taken. Returns what the caller does
/// next, and what it hands to the engine.
#[inline]
pub(crate) fn look(
    all: &Arc<CallerLinks>,
    lanes: &Lanes,
    now: impl Fn() -> Time + Copy,
) -> (Looked, Option<ForEngine>) {
    LOOKERS.with(|lookers| {
        // Borrowed if the thread polls in a handler of a fault in memory that a request is placed in.
        let Ok(mut lookers) = lookers.try_borrow_mut() else {
            return (Looked::Drive(1), None);
        };
        let (lookers, last) = &mut *lookers;
        let is_it = |looker: &Looker| Arc::ptr_eq(&looker.all, all);
        if !lookers.get(*last).is_some_and(is_it) {
            let at = lookers.iter().position(is_it);
            *last = at.unwrap_or_else(|| add(lookers, all));
        }
        let looker = &mut lookers[*last];
        if !looker.is_to_look() {
            return (Looked::Drive(1), None);
        }
        let looked = looker.look(lanes, now);
        let found = &mut looker.found;
        let found = (!found.is_empty()).then(|| std::mem::take(found));
        (looked, found)
    })
}

/// Adds the links of an engine; returns its index.
#[cold]
fn add(lookers: &mut Vec<Looker>, all: &Arc<CallerLinks>) -> usize {
    if lookers.len() == LOOKERS_MAX {
        lookers.remove(0);
    }
    lookers.push(Looker::new(all));
    lookers.len() - 1
}

/// What a look at a link has done.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    /// Set when something was moved.
    any: bool,
    /// Set when something is there for the engine.
    is_more: bool,
}

impl Moved {
    /// Nothing, although something is there.
    const NOT: Moved = Moved {
        any: false,
        is_more: true,
    };
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
        if any {
            self.empty = 0;
            return Looked::Moved;
        }
        self.empty += 1;
        if self.looks < LOOKS_PER_DRIVE && !is_more {
            return Looked::Nothing;
        }
        Looked::Drive(std::mem::take(&mut self.looks))
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
            link.release();
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
        let took = link.ends.take_requests(RECORDS_PER_LOOK, true, &mut |record| {
            lanes.take(link.peer, record, receiving, now, &mut found.deliveries)
        });
        // A ring that holds nonsense is left to the engine, which ends the link.
        let Some(Ok(took)) = took else {
            return Moved::NOT;
        };
        if took.owes_ends {
            link.owes_ends.store(true, Ordering::Relaxed);
        }
        Moved {
            any: took.taken > 0,
            is_more: took.is_more,
        }
    }

    /// Completes requests that the peer has taken.
    #[inline]
    fn end(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Moved {
        let mut any = false;
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
        while let Some(Ok(Some(ticket))) = link.ends.take_end(&mut |ticket| lanes.has(ticket, sending)) {
            any = true;
            if !lanes.end(ticket, sending, now, &mut found.deliveries) {
                found.ended.push(ticket);
            }
        }
        // Without any they are the engine's.
        Moved { any, is_more: !any }
    }
}
