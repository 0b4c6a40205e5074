//! The control channel between nodes: who has a node, which connections go over shared queue pairs, and what those need.
//!
//! [`Peers`] is a part of the node's thread: it waits for nothing. Its owner calls
//!
//! - [`Peers::add_qp`], [`Peers::bind`] and [`Peers::remove_qp`] as an application makes an RC queue pair, brings it to RTR, and destroys it. `bind` is answered by
//!   [`PeerEvent::Bound`] or, after at most [`session::ANSWER_TIME`] if the peer does not answer at all, by [`PeerEvent::Own`]. A peer that has a node
//!   answers only once its application has brought its own queue pair to RTR. Both ends get the same answer.
//! - [`Peers::add_region`], [`Peers::region_goes`] and [`Peers::remove_region`] as an application registers and deregisters memory;
//!   [`Peers::shadow`] for the same memory in the protection domain of shared queue pairs; [`Peers::resolve_key`] for a peer's key there.
//! - [`Peers::want_qp`] for a shared queue pair to a peer, [`Peers::end_qp`] as it has failed, [`Peers::drained`] after [`PeerEvent::QpEnding`],
//!   [`Peers::may_end`] after [`PeerEvent::MayEnd`],
//! - [`Peers::look`] in its loop, [`Peers::happened`] for tokens of the event queue, [`Peers::prepare_sleep`] and [`Peers::deadline`] before it sleeps,
//!   and [`Peers::next_event`] after each of them, until there is no more.
//!
//! A node has a [`Peers`] for each engine of its device, with queue pairs, regions and control connections of its own; a peer ([`PeerId`]) is an engine
//! of another node.
//!
//! `machine` (the peers), `pool` (which shared queue pairs there are) and `line` (how each of them begins and ends) know no device and no clock; `session`
//! is one control connection.

mod keys;
mod knock;
mod line;
mod links;
mod machine;
pub(in crate::node) mod pool;
mod session;
mod shared;
mod warned;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use rdmux_key::{Key, random_nonce};
use rdmux_verbs::{
    Access, CompletionQueue, CreateError, Device, Done, EngineWatch, EventQueue, LKey, ListenError,
    MemoryRegion, ProtectionDomain, QpOptions, Qpn, RKey, RegionSpec, Remains,
};
use rdmux_wire::node::peer::{Binding, ENGINES_MAX, Engines, NodeId, Reason, TenantName};

use keys::Keys;
use links::Links;
use machine::{Event, Machine};
use pool::Pool;
use session::{Broken, Identity};
use shared::SharedQps;

use super::worker::arm;

pub(crate) use links::{DOUBT_AFTER, is_token};
pub(crate) use machine::Asked;
pub(crate) use session::RELEASE_TIME;
pub(crate) use shared::{RECEIVE, SENDS, SLOTS, SharedQp};
pub(crate) use warned::Warned;

/// An engine of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PeerId {
    /// Address of the node's device.
    pub(crate) address: IpAddr,
    /// Number of the engine at that node.
    pub(crate) engine: u8,
}

/// A line: a shared queue pair, and the ones after it when that has ended. A name is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SharedId(pub(crate) u64);

/// Users of a shared queue pair.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SharedBy {
    /// The engine at the other end.
    pub(crate) peer: PeerId,
    /// The tenant at this node.
    pub(crate) here: TenantName,
    /// The tenant at the other node.
    pub(crate) there: TenantName,
    /// Traffic class.
    pub(crate) class: u8,
}

/// A region of a peer, on shared queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteKey {
    /// The key.
    pub(crate) rkey: RKey,
    /// Address of the first byte, which is the same as for the application.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) length: u64,
    /// Rights, valued as `enum ibv_access_flags`.
    pub(crate) access: u32,
}

/// The reports of both ends of a shared queue pair on its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Remains of the own end; none if the device does not tell.
    pub(crate) own: Option<Remains>,
    /// Requests that the peer's end has executed; none if its device does not tell.
    pub(crate) theirs: Option<Done>,
    /// Number of messages that the peer has received on it.
    pub(crate) messages: u32,
}

/// Why a connection does not go over a shared queue pair.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Why {
    /// The peer has no node, or it does not answer.
    #[error("there is no node")]
    NoNode,
    /// The peer's node has another key.
    #[error("its key is another one")]
    Key,
    /// The peer's node has another version.
    #[error("its version is another one")]
    Version,
    /// The peer does not keep to the protocol.
    #[error(transparent)]
    Protocol(Broken),
    /// The peer's node does not want it.
    #[error("the peer's node refuses it: {0:?}")]
    Refused(Reason),
    /// There are too many peers.
    #[error("there are too many peers")]
    Limit,
}

/// News for the owner of [`Peers`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerEvent {
    /// The connection of a queue pair goes over shared queue pairs, at both ends.
    Bound {
        /// The queue pair.
        qpn: Qpn,
        /// The peer.
        peer: PeerId,
        /// The peer's queue pair.
        dest: Qpn,
        /// State of the peer's queue pair, as far as it is known.
        binding: Binding,
    },
    /// The connection of a queue pair is to be its own.
    Own {
        /// The queue pair.
        qpn: Qpn,
        /// Reason.
        why: Why,
    },
    /// After [`PeerEvent::Bound`]: the peer's queue pair is gone, or its node.
    Unbound {
        /// The queue pair.
        qpn: Qpn,
    },
    /// The answer to [`Peers::resolve_key`].
    Key {
        /// The number that was given.
        ticket: u64,
        /// The key; none: the peer has no such region.
        key: Option<RemoteKey>,
    },
    /// A peer's key goes. Once no access with it is in flight, [`Peers::key_unused`] is to be called.
    KeyGone {
        /// The question.
        asked: Asked,
        /// The peer.
        peer: PeerId,
        /// The protection domain, as it was given to [`Peers::resolve_key`].
        domain: u64,
        /// The key, as it was given to [`Peers::resolve_key`].
        rkey: RKey,
    },
    /// No peer uses the key of a region any more, after [`Peers::region_goes`].
    RegionReleased {
        /// Its key.
        rkey: RKey,
    },
    /// A shared queue pair can be used: one that was wanted, or that the peer has opened, or that was to be put away and was not.
    QpReady {
        /// The queue pair.
        id: SharedId,
    },
    /// A shared queue pair may be put away: [`Peers::may_end`] is to be called.
    MayEnd {
        /// The queue pair.
        id: SharedId,
        /// Another one is wanted in its place, or the peer asks: it has to go although it is in use, if nothing better comes along.
        for_room: bool,
    },
    /// A shared queue pair ends, at both ends: it is in error. Once all its completions have come, [`Peers::drained`] is to be called.
    QpEnding {
        /// The queue pair.
        id: SharedId,
    },
    /// The completions of a queue pair that ends take too long: those that have not come do not count, and [`Peers::drained`] is to be called.
    QpOverdue {
        /// The queue pair.
        id: SharedId,
    },
    /// A shared queue pair has ended. The line is away until it is wanted again, by either end: [`PeerEvent::QpReady`] follows.
    QpEnded {
        /// The line.
        id: SharedId,
        /// The requests that took effect.
        ended: Box<Ended>,
    },
    /// A shared queue pair is not there. If it is not [coming](Peers::is_qp_coming) either, nothing follows for who wants it.
    QpRefused {
        /// The users that may want it.
        by: SharedBy,
    },
    /// A line is gone with what was in flight: the peer is gone, or it takes too long, or [`Peers::fail_qp`] was called at either end.
    QpGone {
        /// The line.
        id: SharedId,
    },
    /// A peer is gone. All that was agreed with it is over; the events of its queue pairs came before.
    Gone {
        /// The peer.
        peer: PeerId,
    },
}

/// Why there is no control channel.
#[derive(Debug, thiserror::Error)]
pub enum PeersError {
    /// The device has too many engines.
    #[error("a node that shares queue pairs with others has at most {ENGINES_MAX} engines")]
    Engines,
    /// Another process has the port.
    #[error("the port for other nodes: {0}")]
    Listen(#[from] ListenError),
    /// The device refuses an object.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The part that an engine of a node has in sharing queue pairs with other nodes.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    /// The key of the nodes.
    key: Key,
    /// This run of the node.
    node: NodeId,
    /// The engines of the node, as this one tells them.
    engines: Engines,
    /// The same engines.
    devices: Arc<[Device]>,
    /// Most queue pairs at a time of this one.
    queue_pairs_max: usize,
    /// Set if peers are told of each packet that was executed, where the device knows.
    tells_executed: bool,
    warned: Warned,
}

impl Shares {
    /// Returns the parts of a node's engines. `queue_pairs_max`: of all of them together, but one for each at least. `tells_executed`: peers are told of
    /// each packet that was executed, where the device knows.
    pub(crate) fn of_engines(
        devices: &[Device],
        key: &Key,
        (queue_pairs_max, tells_executed): (usize, bool),
    ) -> Result<Vec<Shares>, PeersError> {
        let [id @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = random_nonce()?;
        let upper_bits = upper_bits(devices)?;
        let warned = Warned::default();
        let (all, count): (Arc<[Device]>, _) = (devices.into(), devices.len());
        let part = |engine| {
            Some(Shares {
                key: key.clone(),
                node: NodeId(id),
                engines: Engines::new(u8::try_from(engine).ok()?, &upper_bits)?,
                devices: all.clone(),
                queue_pairs_max: queue_pairs_max / count + usize::from(engine < queue_pairs_max % count),
                tells_executed,
                warned: warned.clone(),
            })
        };
        (0..count)
            .map(|engine| part(engine).ok_or(PeersError::Engines))
            .collect()
    }

    fn device(&self) -> &Device {
        &self.devices[usize::from(self.engines.own())]
    }
}

/// Returns the upper bits of the numbers of each engine's queue pairs.
fn upper_bits(devices: &[Device]) -> Result<Vec<u8>, PeersError> {
    let of_engine = |device: &Device| {
        let cq = device.create_cq(1)?;
        let qp = device.alloc_pd()?.create_qp(&QpOptions::new(&cq))?;
        Ok(Engines::upper_bits(qp.qpn()))
    };
    devices.iter().map(of_engine).collect()
}

/// The peers of an engine of a node.
#[derive(Debug)]
pub(crate) struct Peers {
    machine: Machine,
    /// Shared queue pairs end before the regions that they reach.
    shared: SharedQps,
    links: Links,
    keys: Keys,
    domains: u64,
    out: std::collections::VecDeque<PeerEvent>,
}

impl Peers {
    /// Begins to take connections of other nodes.
    pub(crate) fn open(events: &EventQueue, shares: Shares) -> Result<Peers, PeersError> {
        let device = shares.device();
        let pd = device.alloc_pd()?;
        let identity = Identity {
            key: shares.key.clone(),
            node: shares.node,
            address: device.address(),
            engines: shares.engines.clone(),
        };
        // A number of a line is that of no other line of the node.
        let numbers = (u64::from(shares.engines.own()) + 1, shares.devices.len() as u64);
        let pool = Pool::new(shares.queue_pairs_max).with_numbers(numbers);
        Ok(Peers {
            machine: Machine::new(identity, shares.warned.clone()),
            shared: SharedQps::new(device, &pd, pool, shares.tells_executed)?,
            links: Links::open(shares, events)?,
            keys: Keys::new(pd),
            domains: 0,
            out: Default::default(),
        })
    }

    /// Returns the queue of the completions of the control connections, which wakes the node.
    pub(crate) fn control_cq(&self) -> &CompletionQueue {
        self.links.cq()
    }

    /// Returns the queue of the completions of all shared queue pairs, which their user polls.
    pub(crate) fn shared_cq(&self) -> &CompletionQueue {
        self.shared.cq()
    }

    /// Returns the protection domain of shared queue pairs.
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.keys.pd()
    }

    // Queue pairs of applications.

    /// Returns a name for a protection domain of an application that no other one gets.
    pub(crate) fn new_domain(&mut self) -> u64 {
        self.domains += 1;
        self.domains
    }

    /// Adds a queue pair of an application.
    pub(crate) fn add_qp(&mut self, qpn: Qpn, domain: u64, tenant: TenantName) {
        self.machine.add_qp(qpn, domain, tenant);
    }

    /// Changes the tenant of a queue pair that is not connected.
    pub(crate) fn set_tenant(&mut self, qpn: Qpn, tenant: TenantName) {
        self.machine.set_tenant(qpn, tenant);
    }

    /// Asks how a queue pair that goes to RTR is to be connected: [`PeerEvent::Bound`] or [`PeerEvent::Own`] answers.
    /// `access`: what the queue pair allows.
    pub(crate) fn bind(
        &mut self,
        now: Instant,
        qpn: Qpn,
        (address, dest, class): (IpAddr, Qpn, u8),
        access: Access,
    ) {
        // Without one, no node will believe this one: the connection then has a queue pair of its own.
        let nonce = random_nonce().unwrap_or_default();
        self.machine
            .bind(now, qpn, (address, dest, class), access.bits(), nonce);
        self.work(now);
    }

    /// Forgets a queue pair, which is destroyed or reset. The peer is told.
    pub(crate) fn remove_qp(&mut self, now: Instant, qpn: Qpn) {
        self.machine.remove_qp(now, qpn);
        self.work(now);
    }

    /// Takes note that a queue pair is used by itself.
    pub(crate) fn keep_own(&mut self, now: Instant, qpn: Qpn) {
        self.machine.keep_own(now, qpn);
        self.work(now);
    }

    /// Takes note that what was sent to a peer has not arrived for some time. If its node has ended, and has started again or the peer's host says so,
    /// what was agreed with it is over at once: [`PeerEvent::Gone`] follows.
    pub(crate) fn doubt(&mut self, now: Instant, address: IpAddr) {
        self.links.doubt(now, address, &mut self.machine);
        self.work(now);
    }

    // Regions.

    /// Adds a region of an application, with the keys that the application knows.
    pub(crate) fn add_region(&mut self, domain: u64, keys: (LKey, RKey), spec: RegionSpec) {
        self.keys.add(domain, keys, spec);
    }

    /// Begins to remove a region, as an application deregisters it: nobody learns its key any more, and it stays until [`Peers::remove_region`].
    /// Returns whether peers know its key. Then [`PeerEvent::RegionReleased`] follows, soon, once they no longer use it.
    pub(crate) fn region_goes(&mut self, now: Instant, region: MemoryRegion) -> bool {
        let rkey = region.rkey();
        let Some(domain) = self.keys.domain(rkey) else {
            return false;
        };
        self.keys.let_go(region);
        let is_known = self.machine.key_goes(now, domain, rkey);
        if is_known {
            self.work(now);
        }
        is_known
    }

    /// Removes a region that nobody uses any more.
    pub(crate) fn remove_region(&mut self, rkey: RKey) {
        self.keys.remove(rkey);
    }

    /// Returns the region with a local key, in the protection domain of shared queue pairs. Whoever keeps it keeps the memory registered.
    pub(crate) fn shadow(&mut self, domain: u64, lkey: LKey) -> Option<Arc<MemoryRegion>> {
        self.keys.shadow_of_local(domain, lkey)
    }

    /// Asks a peer for a key that its application has given to one of this node. [`PeerEvent::Key`] answers, with `ticket`.
    pub(crate) fn resolve_key(
        &mut self,
        now: Instant,
        peer: PeerId,
        (domain, rkey): (u64, RKey),
        ticket: u64,
    ) {
        self.machine.resolve_key(now, peer, (domain, rkey), ticket);
        self.work(now);
    }

    /// Tells a peer that no access with a key is in flight: the answer to [`PeerEvent::KeyGone`].
    pub(crate) fn key_unused(&mut self, now: Instant, asked: Asked) {
        self.machine
            .answer(asked, rdmux_wire::node::peer::Message::Done {});
        self.work(now);
    }

    // Shared queue pairs.

    /// Returns the shared queue pair of two tenants. If there is none, or it was put away, it is opened: [`PeerEvent::QpReady`] follows, or
    /// [`PeerEvent::QpRefused`].
    pub(crate) fn want_qp(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        let id = self.shared.want(now, by);
        self.work(now);
        id
    }

    /// Returns whether [`PeerEvent::QpReady`] or [`PeerEvent::QpRefused`] is yet to come for the shared queue pair of two tenants, or it is open.
    pub(crate) fn is_qp_coming(&self, by: &SharedBy) -> bool {
        self.shared.is_coming(by)
    }

    /// Returns a shared queue pair.
    pub(crate) fn shared_qp(&self, id: SharedId) -> Option<&SharedQp> {
        self.shared.get(id)
    }

    /// Returns the shared queue pair of a completion.
    pub(crate) fn shared_by_qpn(&self, qpn: Qpn) -> Option<SharedId> {
        self.shared.by_qpn(qpn)
    }

    /// Takes note that a shared queue pair has failed: [`PeerEvent::QpEnding`] follows, if it did not before.
    pub(crate) fn end_qp(&mut self, now: Instant, id: SharedId) {
        self.shared.end(now, &mut self.machine, id, &mut self.out);
        self.work(now);
    }

    /// Takes note that all completions of a queue pair that ends have come, and that so many messages were received on it:
    /// [`PeerEvent::QpEnded`] follows.
    pub(crate) fn drained(&mut self, now: Instant, id: SharedId, messages: u32) {
        let drained = (id, messages);
        self.shared
            .drained(now, &mut self.machine, drained, &mut self.out);
        self.work(now);
    }

    /// Answers [`PeerEvent::MayEnd`]. `may`: nothing is in flight or waits, and nothing is posted from now on. [`PeerEvent::QpEnding`] follows, or
    /// [`PeerEvent::QpReady`] if the queue pair stays.
    pub(crate) fn may_end(&mut self, now: Instant, id: SharedId, may: bool) {
        self.shared
            .may_end(now, &mut self.machine, (id, may), &mut self.out);
        self.work(now);
    }

    /// Forgets a line that is away and has no connections.
    pub(crate) fn forget_qp(&mut self, now: Instant, id: SharedId) {
        self.shared.forget(now, id);
        self.work(now);
    }

    /// Ends a line for good, at both ends: [`PeerEvent::QpGone`] follows.
    pub(crate) fn fail_qp(&mut self, now: Instant, id: SharedId) {
        self.shared.over(now, &mut self.machine, id, &mut self.out);
        self.work(now);
    }

    /// Returns the most shared queue pairs at a time.
    pub(crate) fn shared_max(&self) -> usize {
        self.shared.limit()
    }

    /// Returns the number of shared queue pairs, with those that are being opened and put away.
    #[cfg(test)]
    pub(crate) fn shared_count(&self) -> usize {
        self.shared.count()
    }

    // The node's loop.

    /// Handles what has come in. Returns whether there was anything.
    pub(crate) fn look(&mut self, now: Instant) -> bool {
        let any = self.links.poll(now, &mut self.machine) | self.links.probe(now, &mut self.machine);
        let is_due = self.deadline().is_some_and(|deadline| deadline <= now);
        if is_due {
            self.machine.check_time(now);
            self.shared.check_time(now, &mut self.machine, &mut self.out);
        }
        if any || is_due {
            self.work(now);
        }
        any || is_due
    }

    /// Handles a token of the event queue.
    pub(crate) fn happened(&mut self, now: Instant, token: u64) {
        self.links.happened(now, token, &mut self.machine);
        self.work(now);
    }

    /// Prepares a sleep. Returns false if there is something to do.
    pub(crate) fn prepare_sleep(&mut self, now: Instant, watch: Option<&mut EngineWatch>) -> bool {
        arm(self.links.cq(), watch);
        !self.look(now) && self.out.is_empty()
    }

    /// Returns when [`Peers::look`] is to be called, if nothing happens before.
    pub(crate) fn deadline(&mut self) -> Option<Instant> {
        let deadlines = [
            self.machine.deadline(),
            self.links.deadline(),
            self.shared.deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Returns what has happened.
    pub(crate) fn next_event(&mut self) -> Option<PeerEvent> {
        self.out.pop_front()
    }

    /// Takes what a person should know.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        self.machine.take_warnings()
    }

    /// Does what is due, until nothing is.
    fn work(&mut self, now: Instant) {
        loop {
            self.shared.work(now, &mut self.machine, &mut self.out);
            while let Some(action) = self.machine.next_action() {
                self.links.act(now, action, &mut self.machine);
            }
            let Some(event) = self.machine.next_event() else {
                return;
            };
            self.handle(now, event);
        }
    }

    fn handle(&mut self, now: Instant, event: Event) {
        match event {
            Event::Peer(event) => {
                if let PeerEvent::Gone { peer } = event {
                    self.shared.peer_gone(now, peer, &mut self.out);
                }
                self.out.push_back(event);
            }
            Event::KeyAsked { asked, domain, rkey } => {
                let key = self.keys.shadow_of_remote(domain, rkey);
                self.machine.answer_key(asked, rkey, key);
            }
            Event::KeyReleased { rkey } => self.out.push_back(PeerEvent::RegionReleased { rkey }),
            other => {
                let extensions = |peer: PeerId| self.links.extensions_of(peer.address);
                self.shared
                    .handle(now, &mut self.machine, extensions, other, &mut self.out);
            }
        }
    }
}

#[cfg(test)]
mod tests;
