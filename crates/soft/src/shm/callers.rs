//! Links as the threads of the program use them, without the engine's lock.
//!
//! A thread puts SENDs into the rings of links ([`PeerLink`]), and one that polls takes out those of the peers and completes those that the
//! peers have taken ([`Looker`]): all under the locks of the links' sides and of the queue pairs' lanes. What a lane does not cover stays in
//! the ring, or is handed to the engine. A thread looks so only while it is trusted to come back: it may leave the room of a record that it
//! has taken unreleased until its answer is in the other ring, and the engine, which looks at everything else, is driven by other polls.

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

/// A thread's looks at the links, one after another.
#[derive(Debug, Default)]
pub(crate) struct Looker {
    links: Arc<[Arc<PeerLink>]>,
    /// [`CallerLinks::changes`] at the time of that list.
    changes: u64,
    sending: Recent,
    receiving: Recent,
    /// Looks since the last drive, and those in a row that have found nothing.
    looks: u32,
    empty: u32,
    at: usize,
    pub(crate) found: ForEngine,
}

impl Looker {
    /// Returns whether looking is worth while.
    #[inline]
    pub(crate) fn is_to_look(&mut self, all: &CallerLinks) -> bool {
        if self.empty < EMPTY_LOOKS {
            return true;
        }
        let lively = all.is_lively.load(Ordering::Relaxed) && all.is_lively.swap(false, Ordering::Relaxed);
        if lively {
            self.empty = 0;
        }
        lively
    }

    /// Takes what peers have sent for lanes, and completes what they have taken. Returns what the caller does next.
    #[inline]
    pub(crate) fn look(&mut self, all: &CallerLinks, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> Looked {
        self.looks += 1;
        if self.look_at_links(all, lanes, now) {
            self.empty = 0;
            return Looked::Moved;
        }
        self.empty += 1;
        if self.looks < LOOKS_PER_DRIVE {
            return Looked::Nothing;
        }
        Looked::Drive(std::mem::take(&mut self.looks))
    }

    #[inline]
    fn look_at_links(&mut self, all: &CallerLinks, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> bool {
        if self.changes != all.changes.load(Ordering::Acquire) {
            self.look_anew(all);
        }
        let mut any = false;
        for _ in 0..self.links.len().min(LINKS_PER_LOOK) {
            let next = self.at + 1;
            self.at = if next < self.links.len() { next } else { 0 };
            let link = &self.links[self.at];
            link.release();
            if link.ends.is_ready() && link.is_open() {
                any |= self.take(lanes, now);
            } else if link.ends.has_news() && link.is_open() {
                any |= self.end(lanes, now);
            }
        }
        any
    }

    #[cold]
    fn look_anew(&mut self, all: &CallerLinks) {
        self.changes = all.changes.load(Ordering::Acquire);
        self.links = all.list.read().clone();
        self.at = 0;
    }

    /// Has lanes execute the next requests of the peer.
    #[inline]
    fn take(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> bool {
        let Looker {
            links,
            at,
            receiving,
            found,
            ..
        } = self;
        let link = &links[*at];
        let took = link.ends.take_requests(RECORDS_PER_LOOK, true, &mut |record| {
            lanes.take(link.peer, record, receiving, now, &mut found.deliveries)
        });
        // A ring that holds nonsense is left to the engine, which ends the link.
        let Some(Ok(took)) = took else {
            return false;
        };
        if took.owes_ends {
            link.owes_ends.store(true, Ordering::Relaxed);
        }
        took.taken > 0
    }

    /// Completes requests that the peer has taken.
    #[inline]
    fn end(&mut self, lanes: &Lanes, now: impl Fn() -> Time + Copy) -> bool {
        let mut any = false;
        let Looker {
            links,
            at,
            sending,
            found,
            ..
        } = self;
        let ends = &links[*at].ends;
        while let Some(Ok(Some(ticket))) = ends.take_end(&mut |ticket| lanes.has(ticket, sending)) {
            any = true;
            if !lanes.end(ticket, sending, now, &mut found.deliveries) {
                found.ended.push(ticket);
            }
        }
        any
    }
}
