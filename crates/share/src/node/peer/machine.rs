//! All peers of a node: which of them have a node, and what is agreed with them. No I/O and no clock.
//!
//! The caller tells what happens to links ([`Machine::accepted`], [`Machine::connected`], [`Machine::heard`], [`Machine::lost`],
//! [`Machine::check_time`]), then does what [`Machine::next_action`] returns until there is no more, sends what [`Machine::next_message`] has for
//! the links of [`Action::Send`], and takes the [`PeerEvent`]s.
//!
//! A machine is that of one engine of its node, and a *peer* is one engine of another node ([`PeerId`]). A peer is connected to when it is needed: when a
//! queue pair is to have one of the peer's at its other end. Whose that is, the first link to its node tells; there is one attempt at a time for
//! each address. Both engines may connect at once: then there are two links, and each uses either. What is agreed
//! belongs to the pair of engines and not to a link, and once one link is lost all that was agreed with the peer is over, at both ends.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rdmux_verbs::{Qpn, RKey};
use rdmux_wire::node::peer::{Binding, Engines, Executed, Message, NodeId, Reason, SharedEnd, TenantName};

use super::session::{Broken, Heard, Identity, Role, Session};
use super::{PeerEvent, PeerId, RemoteKey, SharedBy, SharedId, Warned, Why};

/// Time for which a peer that has no node, or none of the same key, is not asked again.
pub(super) const NONE_TIME: Duration = Duration::from_secs(5);
/// Peers, and addresses that have none.
pub(super) const PEERS_MAX: usize = 8192;
/// Links of nodes that have not shown yet that they have the key.
const STRANGERS_MAX: usize = 64;
/// Time between two questions which run a node is, if it does not answer, and if it was the same.
const DOUBT_TIME: Duration = Duration::from_millis(500);
const SAME_TIME: Duration = Duration::from_secs(2);
/// Most addresses that are asked, or were within these times.
const DOUBTS_MAX: usize = 64;
/// Questions of one peer that wait until a queue pair is in RTR.
const KEPT_MAX: usize = 4096;

/// A control connection, or an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(super) u64);

/// Actions for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Connect to the node of an address, to the engine that has a queue pair.
    Connect(LinkId, IpAddr, Qpn),
    /// Send the messages that a link has.
    Send(LinkId),
    /// Send these last messages, and end a link.
    Close(LinkId, Vec<Vec<u8>>),
}

/// A question of a peer that is to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    link: LinkId,
    request: u32,
}

/// Events that the machine reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// News of the node's own business.
    Peer(PeerEvent),
    /// A peer asks for a key: [`Machine::answer_key`].
    KeyAsked { asked: Asked, domain: u64, rkey: RKey },
    /// No peer uses a key any more, after [`Machine::key_goes`].
    KeyReleased { rkey: RKey },
    /// A peer asks for the other end of a shared queue pair. `line` is the peer's.
    OpenAsked {
        asked: Asked,
        by: SharedBy,
        line: u64,
        end: SharedEnd,
    },
    /// A peer has answered [`Machine::open`], with its line and its end.
    Opened {
        id: SharedId,
        qpn: Qpn,
        peer: PeerId,
        opened: Result<(u64, SharedEnd), Reason>,
    },
    /// A peer's end of a shared queue pair is ready.
    ReadyTold { peer: PeerId, id: SharedId },
    /// A peer asks for the end of a shared queue pair.
    CloseAsked {
        asked: Asked,
        peer: PeerId,
        id: SharedId,
        failed: bool,
    },
    /// A peer has answered [`Machine::close`].
    Closed { id: SharedId, qpn: Qpn, is_closed: bool },
    /// A peer's end of a shared queue pair has ended.
    EndTold {
        peer: PeerId,
        id: SharedId,
        messages: u32,
        executed: Option<Executed>,
    },
}

/// Tells which question an answer belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tag {
    Bind {
        qpn: Qpn,
        serial: u64,
    },
    Key {
        ticket: u64,
    },
    KeyGone {
        rkey: RKey,
    },
    /// `qpn` is the own end: an answer that comes late is not one about the next.
    Open {
        id: SharedId,
        qpn: Qpn,
        peer: PeerId,
    },
    Close {
        id: SharedId,
        qpn: Qpn,
    },
    /// Nobody waits for the answer.
    Notice,
}

#[derive(Debug)]
struct Link {
    address: IpAddr,
    /// Once both nodes have agreed.
    peer: Option<PeerId>,
    role: Role,
    session: Session<Tag>,
    kept: usize,
    /// Keys that the peer knows.
    keys: HashSet<RKey>,
}

/// An attempt to agree with the node of an address.
#[derive(Debug)]
enum Attempt {
    /// It runs, for the engine that has queue pair `wanted`.
    Runs {
        link: LinkId,
        wanted: Qpn,
        waiting: Vec<Waiting>,
    },
    /// There is none to talk to, as far as is known, until then.
    Failed { until: Instant, why: Why },
}

/// A queue pair that waits for an agreement with its peer.
#[derive(Debug)]
struct Waiting {
    qpn: Qpn,
    serial: u64,
    /// For a link that may have to be made.
    nonce: [u8; 32],
}

/// A peer that has the same key. At least one link is there.
#[derive(Debug)]
struct Peer {
    node: NodeId,
    engines: Engines,
    links: Vec<LinkId>,
}

/// A question which run the node of an address is.
#[derive(Debug)]
struct Doubt {
    /// The link that asks.
    link: LinkId,
    /// The run that is known.
    former: NodeId,
    /// Time before which nobody asks again.
    next: Instant,
}

/// A queue pair of an application, as far as it concerns peers.
#[derive(Debug)]
struct End {
    serial: u64,
    /// The parts of it that peers are told.
    binding: Binding,
    state: EndState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndState {
    /// It has no peer yet.
    Open,
    /// The peer's node is being asked, or will be.
    Asking(Far),
    /// It goes over shared queue pairs.
    Bound(Far),
    /// It is used by itself.
    Own,
}

/// The queue pair at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Far {
    address: IpAddr,
    qpn: Qpn,
    class: u8,
}

impl Far {
    /// Returns whether it is that queue pair of a peer.
    fn is(&self, peer: PeerId, qpn: Qpn) -> bool {
        (self.address, self.qpn) == (peer.address, qpn)
    }
}

/// Knowledge about all peers.
#[derive(Debug)]
pub(super) struct Machine {
    identity: Identity,
    peers: BTreeMap<PeerId, Peer>,
    attempts: HashMap<IpAddr, Attempt>,
    links: BTreeMap<LinkId, Link>,
    /// At most [`DOUBTS_MAX`].
    doubts: HashMap<IpAddr, Doubt>,
    /// Links whose peers may have to answer in some time.
    timed: BTreeSet<LinkId>,
    ends: HashMap<Qpn, End>,
    /// Questions that wait until a queue pair of this node is in RTR: that one, the link, the peer's queue pair; and what is known of the latter.
    kept: BTreeMap<(Qpn, LinkId, Qpn), Binding>,
    /// Keys that are going, and the links whose answers are missing.
    going: HashMap<RKey, BTreeSet<LinkId>>,
    warned: Warned,
    warnings: Vec<String>,
    actions: VecDeque<Action>,
    events: VecDeque<Event>,
    next: u64,
}

impl Machine {
    pub(super) fn new(identity: Identity, warned: Warned) -> Machine {
        Machine {
            identity,
            peers: BTreeMap::new(),
            attempts: HashMap::new(),
            links: BTreeMap::new(),
            doubts: HashMap::new(),
            timed: BTreeSet::new(),
            ends: HashMap::new(),
            kept: BTreeMap::new(),
            going: HashMap::new(),
            warned,
            warnings: Vec::new(),
            actions: VecDeque::new(),
            events: VecDeque::new(),
            next: 0,
        }
    }

    fn tell(&mut self, event: PeerEvent) {
        self.events.push_back(Event::Peer(event));
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    // Calls of the driver.

    /// Takes note of a connection that a peer has made. `None`: it is to be refused.
    pub(super) fn accepted(&mut self, now: Instant, from: IpAddr, nonce: [u8; 32]) -> Option<LinkId> {
        let strangers = self
            .links
            .values()
            .filter(|link| link.role == Role::Accepts && !link.session.is_agreed());
        if strangers.count() >= STRANGERS_MAX || self.links.len() >= 2 * PEERS_MAX {
            return None;
        }
        Some(self.add_link(Role::Accepts, now, from, nonce))
    }

    fn add_link(&mut self, role: Role, now: Instant, address: IpAddr, nonce: [u8; 32]) -> LinkId {
        let id = LinkId(self.number());
        let link = Link {
            address,
            peer: None,
            role,
            session: Session::new(role, &self.identity, address, nonce, now),
            kept: 0,
            keys: HashSet::new(),
        };
        self.links.insert(id, link);
        self.timed.insert(id);
        id
    }

    /// Takes note that an attempt has become a connection.
    pub(super) fn connected(&mut self, link: LinkId) {
        self.actions.push_back(Action::Send(link));
    }

    /// Takes note that a connection, or an attempt, has ended.
    pub(super) fn lost(&mut self, now: Instant, id: LinkId) {
        self.end_link(now, id, Why::NoNode);
    }

    /// Takes note that the node of an address does not answer as it should. Another link asks which run it is: if it has ended and started again,
    /// everything that was agreed with its former run is over. A node that is the same notices nothing. `nonce` is for that link.
    pub(super) fn doubt(&mut self, now: Instant, address: IpAddr, nonce: [u8; 32]) {
        let links = &self.links;
        self.doubts
            .retain(|_, doubt| now < doubt.next || links.contains_key(&doubt.link));
        if self.doubts.len() >= DOUBTS_MAX || self.doubts.contains_key(&address) {
            return;
        }
        // Each engine tells the run of its node.
        let Some((id, peer)) = self.peers_at(address).next() else {
            return;
        };
        let (wanted, former) = (peer.engines.first_qpn(id.engine), peer.node);
        let link = self.add_link(Role::Connects, now, address, nonce);
        if let Some(asking) = self.links.get_mut(&link) {
            asking.session.only_asks_for(former);
        }
        let next = now + DOUBT_TIME;
        self.doubts.insert(address, Doubt { link, former, next });
        self.actions.push_back(Action::Connect(link, address, wanted));
    }

    /// Returns the links of what was agreed with the node of an address.
    pub(super) fn links_to(&self, address: IpAddr) -> Vec<LinkId> {
        let peers = self.peers_at(address);
        peers.flat_map(|(_, peer)| &peer.links).copied().collect()
    }

    /// Handles a message of a link.
    pub(super) fn heard(&mut self, now: Instant, id: LinkId, bytes: &[u8]) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        match link.session.handle(&self.identity, bytes) {
            Ok(Heard::Nothing) => {}
            Ok(Heard::Agreed(node, engines)) => self.agreed(now, id, node, engines),
            Ok(Heard::Question { request, message }) => {
                self.question(now, Asked { link: id, request }, message);
            }
            Ok(Heard::Answer { tag, message }) => self.answered(now, id, tag, &message),
            Err(why) => return self.broken(now, id, why),
        }
        self.actions.push_back(Action::Send(id));
    }

    /// Returns when [`Machine::check_time`] is to be called.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        let links = &self.links;
        let deadline_of = |id: &LinkId| links.get(id).and_then(|link| link.session.deadline());
        self.timed.retain(|id| deadline_of(id).is_some());
        self.timed.iter().filter_map(deadline_of).min()
    }

    /// Ends what takes too long.
    pub(super) fn check_time(&mut self, now: Instant) {
        for id in self.timed.clone() {
            if let Some(link) = self.links.get_mut(&id)
                && let Err(why) = link.session.check_time(now)
            {
                self.broken(now, id, why);
            }
        }
    }

    /// Returns what is to be done next.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Puts the next message of a link into `bytes`. Returns false if there is none.
    pub(super) fn next_message(&mut self, now: Instant, id: LinkId, bytes: &mut Vec<u8>) -> bool {
        let link = self.links.get_mut(&id);
        let is_there = link.is_some_and(|link| link.session.next_message(now, bytes));
        if is_there {
            self.timed.insert(id);
        }
        is_there
    }

    /// Returns what has happened.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes what a person should know.
    pub(super) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Returns the numbers of links, and of questions that wait for queue pairs.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.links.len(), self.kept.len())
    }

    // Queue pairs.

    /// Adds a queue pair of an application, which has no peer yet.
    pub(super) fn add_qp(&mut self, qpn: Qpn, domain: u64, tenant: TenantName) {
        let end = End {
            serial: self.number(),
            binding: Binding {
                domain,
                access: 0,
                tenant,
            },
            state: EndState::Open,
        };
        self.ends.insert(qpn, end);
    }

    /// Changes the tenant of a queue pair that has no peer yet.
    pub(super) fn set_tenant(&mut self, qpn: Qpn, tenant: TenantName) {
        if let Some(end) = self.ends.get_mut(&qpn)
            && end.state == EndState::Open
        {
            end.binding.tenant = tenant;
        }
    }

    /// Asks whether the connection of a queue pair that goes to RTR goes over shared queue pairs: [`PeerEvent::Bound`] or [`PeerEvent::Own`]
    /// answers, soon. `access`: what the queue pair allows. `nonce` is for a link that may have to be made.
    pub(super) fn bind(
        &mut self,
        now: Instant,
        qpn: Qpn,
        (address, dest, class): (IpAddr, Qpn, u8),
        access: u32,
        nonce: [u8; 32],
    ) {
        let Some(end) = self.ends.get_mut(&qpn) else {
            return;
        };
        let serial = end.serial;
        let far = Far {
            address,
            qpn: dest,
            class,
        };
        end.state = EndState::Asking(far);
        end.binding.access = access;
        // The peer may have asked first. Whoever else has, asks for another connection.
        for (link, source, binding) in self.take_kept(qpn) {
            let from = self.links.get(&link).and_then(|link| link.peer);
            let from = from.filter(|from| far.is(*from, source));
            self.settle(now, link, (qpn, source), from.is_some());
            if let Some(peer) = from {
                self.bound(qpn, peer, binding);
            }
        }
        if self.state(qpn) == Some(EndState::Asking(far)) {
            self.ask_or_wait(now, Waiting { qpn, serial, nonce });
        }
    }

    /// Forgets a queue pair, whose peer is told.
    pub(super) fn remove_qp(&mut self, now: Instant, qpn: Qpn) {
        for (link, source, _) in self.take_kept(qpn) {
            self.settle(now, link, (qpn, source), false);
        }
        if let Some(End {
            state: EndState::Asking(far) | EndState::Bound(far),
            ..
        }) = self.ends.remove(&qpn)
            && let Some(link) = self.link_to(self.peer_of(&far))
        {
            let (source, dest) = (qpn, far.qpn);
            self.ask(now, link, Message::Unbind { source, dest }, Tag::Notice);
        }
    }

    fn state(&self, qpn: Qpn) -> Option<EndState> {
        self.ends.get(&qpn).map(|end| end.state)
    }

    /// Returns the queue pair whose node a queue pair has yet to be answered by.
    fn asking(&self, qpn: Qpn, serial: u64) -> Option<Far> {
        let end = self.ends.get(&qpn).filter(|end| end.serial == serial)?;
        match end.state {
            EndState::Asking(far) => Some(far),
            _ => None,
        }
    }

    /// Asks the peer of a queue pair, if there is an agreement with it. If not, there will be.
    fn ask_or_wait(&mut self, now: Instant, waiting: Waiting) {
        let (qpn, serial) = (waiting.qpn, waiting.serial);
        let Some(far) = self.asking(qpn, serial) else {
            return;
        };
        if let Some(link) = self.link_to(self.peer_of(&far))
            && let Some(end) = self.ends.get(&qpn)
        {
            let question = Message::Bind {
                source: qpn,
                dest: far.qpn,
                class: far.class,
                binding: end.binding.clone(),
            };
            return self.ask(now, link, question, Tag::Bind { qpn, serial });
        }
        match self.attempts.get_mut(&far.address) {
            Some(Attempt::Failed { until, why }) if *until > now => {
                let why = why.clone();
                self.own(qpn, why);
            }
            Some(Attempt::Runs { waiting: queue, .. }) => queue.push(waiting),
            _ => self.connect(now, &far, waiting),
        }
    }

    fn connect(&mut self, now: Instant, far: &Far, first: Waiting) {
        if self.attempts.len() >= PEERS_MAX {
            self.attempts.retain(|_, attempt| match attempt {
                Attempt::Failed { until, .. } => *until > now,
                Attempt::Runs { .. } => true,
            });
        }
        if self.attempts.len() >= PEERS_MAX || self.peers.len() >= PEERS_MAX {
            return self.own(first.qpn, Why::Limit);
        }
        let (address, wanted) = (far.address, far.qpn);
        let link = self.add_link(Role::Connects, now, address, first.nonce);
        let waiting = vec![first];
        let attempt = Attempt::Runs {
            link,
            wanted,
            waiting,
        };
        self.attempts.insert(address, attempt);
        self.actions.push_back(Action::Connect(link, address, wanted));
    }

    fn bound(&mut self, qpn: Qpn, peer: PeerId, binding: Binding) {
        let Some(end) = self.ends.get_mut(&qpn) else {
            return;
        };
        let EndState::Asking(far) = end.state else { return };
        end.state = EndState::Bound(far);
        self.tell(PeerEvent::Bound {
            qpn,
            peer,
            dest: far.qpn,
            binding,
        });
    }

    fn own(&mut self, qpn: Qpn, why: Why) {
        if let Some(end) = self.ends.get_mut(&qpn)
            && let EndState::Asking(_) = end.state
        {
            end.state = EndState::Own;
            self.tell(PeerEvent::Own { qpn, why });
        }
    }

    fn unbound(&mut self, qpn: Qpn) {
        if let Some(end) = self.ends.get_mut(&qpn)
            && let EndState::Bound(_) = end.state
        {
            end.state = EndState::Own;
            self.tell(PeerEvent::Unbound { qpn });
        }
    }

    /// Takes note that a queue pair is used by itself: peers that ask, and those that have asked, learn that it is on no shared one.
    pub(super) fn keep_own(&mut self, now: Instant, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(&qpn) else {
            return;
        };
        end.state = EndState::Own;
        for (link, source, _) in self.take_kept(qpn) {
            self.settle(now, link, (qpn, source), false);
        }
    }

    fn take_kept(&mut self, qpn: Qpn) -> Vec<(LinkId, Qpn, Binding)> {
        let all = (qpn, LinkId(0), Qpn::new(0))..=(qpn, LinkId(u64::MAX), Qpn::new(u32::MAX));
        let keys: Vec<_> = self.kept.range(all).map(|(key, _)| *key).collect();
        keys.into_iter()
            .filter_map(|key| {
                let binding = self.kept.remove(&key)?;
                if let Some(link) = self.links.get_mut(&key.1) {
                    link.kept -= 1;
                }
                Some((key.1, key.2, binding))
            })
            .collect()
    }

    /// Tells a peer what has become of a question that was kept.
    fn settle(&mut self, now: Instant, link: LinkId, (source, dest): (Qpn, Qpn), is_bound: bool) {
        let end = self.ends.get(&source).filter(|_| is_bound);
        let binding = end.map(|end| end.binding.clone());
        let question = Message::Settled {
            source,
            dest,
            binding,
        };
        self.ask(now, link, question, Tag::Notice);
    }

    // Keys.

    /// Asks a peer for a key. [`PeerEvent::Key`] answers.
    pub(super) fn resolve_key(
        &mut self,
        now: Instant,
        peer: PeerId,
        (domain, rkey): (u64, RKey),
        ticket: u64,
    ) {
        let question = Message::ResolveKey { domain, rkey };
        match self.link_to(Some(peer)) {
            Some(link) => self.ask(now, link, question, Tag::Key { ticket }),
            None => self.tell(PeerEvent::Key { ticket, key: None }),
        }
    }

    /// Answers [`Event::KeyAsked`]. `rkey` is the key that was asked for.
    pub(super) fn answer_key(&mut self, asked: Asked, rkey: RKey, key: Option<RemoteKey>) {
        let answer = match key {
            Some(key) => {
                if let Some(link) = self.links.get_mut(&asked.link) {
                    link.keys.insert(rkey);
                }
                Message::Key {
                    rkey: key.rkey,
                    start: key.start,
                    length: key.length,
                    access: key.access,
                }
            }
            None => refused(Reason::NoKey),
        };
        self.answer(asked, answer);
    }

    /// Tells the peers that know a key that it goes. Returns whether there are any; then [`Event::KeyReleased`] follows once none of them uses it.
    pub(super) fn key_goes(&mut self, now: Instant, domain: u64, rkey: RKey) -> bool {
        let told: BTreeSet<LinkId> = self
            .links
            .iter_mut()
            .filter_map(|(id, link)| link.keys.remove(&rkey).then_some(*id))
            .collect();
        if told.is_empty() {
            return false;
        }
        self.going.insert(rkey, told.clone());
        for link in told {
            self.ask(
                now,
                link,
                Message::KeyGone { domain, rkey },
                Tag::KeyGone { rkey },
            );
        }
        true
    }

    fn key_released(&mut self, link: LinkId, rkey: RKey) {
        if let Some(links) = self.going.get_mut(&rkey) {
            links.remove(&link);
            if links.is_empty() {
                self.going.remove(&rkey);
                self.events.push_back(Event::KeyReleased { rkey });
            }
        }
    }

    // Shared queue pairs.

    /// Asks a peer for the other end of a shared queue pair. Returns false if the peer has no node.
    pub(super) fn open(&mut self, now: Instant, id: SharedId, by: &SharedBy, end: SharedEnd) -> bool {
        let question = Message::OpenQp {
            here: by.here.clone(),
            there: by.there.clone(),
            class: by.class,
            line: id.0,
            end,
        };
        let (qpn, peer) = (end.qpn, by.peer);
        self.ask_peer(now, peer, question, Tag::Open { id, qpn, peer })
    }

    /// Tells a peer that both ends of a shared queue pair are ready.
    pub(super) fn tell_ready(&mut self, now: Instant, (peer, line): (PeerId, u64)) -> bool {
        self.ask_peer(now, peer, Message::QpReady { line }, Tag::Notice)
    }

    /// Asks a peer to end its end of a shared queue pair, if nothing is in flight there. `qpn` is the own end.
    pub(super) fn close(
        &mut self,
        now: Instant,
        (id, qpn): (SharedId, Qpn),
        (peer, line): (PeerId, u64),
    ) -> bool {
        let failed = false;
        let tag = Tag::Close { id, qpn };
        self.ask_peer(now, peer, Message::CloseQp { line, failed }, tag)
    }

    /// Tells a peer that a line is over.
    pub(super) fn tell_over(&mut self, now: Instant, (peer, line): (PeerId, u64)) -> bool {
        let failed = true;
        self.ask_peer(now, peer, Message::CloseQp { line, failed }, Tag::Notice)
    }

    /// Tells a peer that the queue pair of a line has ended here.
    pub(super) fn tell_ended(
        &mut self,
        now: Instant,
        (peer, line): (PeerId, u64),
        messages: u32,
        executed: Option<Executed>,
    ) -> bool {
        let question = Message::QpEnded {
            line,
            messages,
            executed,
        };
        self.ask_peer(now, peer, question, Tag::Notice)
    }

    /// Returns whether this node goes on where both nodes have asked for the same shared queue pair.
    pub(super) fn precedes(&self, peer: PeerId) -> bool {
        let peer = self.peers.get(&peer);
        peer.is_some_and(|peer| self.identity.node < peer.node)
    }

    /// Answers a question of a peer.
    pub(super) fn answer(&mut self, asked: Asked, answer: Message) {
        if let Some(link) = self.links.get_mut(&asked.link) {
            link.session.answer(asked.request, answer);
            self.actions.push_back(Action::Send(asked.link));
        }
    }

    /// Answers a question of a peer: no.
    pub(super) fn refuse(&mut self, asked: Asked, reason: Reason) {
        self.answer(asked, refused(reason));
    }

    // Links.

    fn ask_peer(&mut self, now: Instant, peer: PeerId, question: Message, tag: Tag) -> bool {
        let link = self.link_to(Some(peer));
        if let Some(link) = link {
            self.ask(now, link, question, tag);
        }
        link.is_some()
    }

    fn ask(&mut self, now: Instant, id: LinkId, question: Message, tag: Tag) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        match link.session.ask(question, tag) {
            Ok(()) => self.actions.push_back(Action::Send(id)),
            Err(why) => self.broken(now, id, why),
        }
    }

    /// Returns a link over which a peer can be asked.
    fn link_to(&self, peer: Option<PeerId>) -> Option<LinkId> {
        self.peers.get(&peer?)?.links.first().copied()
    }

    /// Returns the peers of an address.
    fn peers_at(&self, address: IpAddr) -> impl Iterator<Item = (&PeerId, &Peer)> {
        self.peers.range(peers_of(address))
    }

    /// Returns the peer that has a queue pair, if an engine of its node has told.
    fn peer_of(&self, far: &Far) -> Option<PeerId> {
        let (_, any) = self.peers_at(far.address).next()?;
        Some(PeerId {
            address: far.address,
            engine: any.engines.of(far.qpn),
        })
    }

    fn agreed(&mut self, now: Instant, id: LinkId, node: NodeId, engines: Engines) {
        let Some(link) = self.links.get(&id) else { return };
        let (address, role) = (link.address, link.role);
        let peer = PeerId {
            address,
            engine: engines.own(),
        };
        // An earlier run of the peer's node is over, even if its links do not know yet. So is a link that the peer has made once more.
        let again = |link: &LinkId| self.links.get(link).is_some_and(|link| link.role == role);
        let is_before = |(known, other): &(&PeerId, &Peer)| {
            other.node != node || **known == peer && other.links.iter().any(again)
        };
        let before: Vec<LinkId> = self
            .peers_at(address)
            .filter(is_before)
            .flat_map(|(_, other)| &other.links)
            .copied()
            .collect();
        let contradicts =
            |(_, other): (_, &Peer)| other.node == node && !other.engines.are_those_of(&engines);
        if self.peers_at(address).any(contradicts) {
            return self.broken(now, id, Broken::Unexpected("other engines"));
        }
        let is_attempt = match self.attempts.get(&address) {
            Some(Attempt::Runs { link, wanted, .. }) if *link == id => {
                if engines.of(*wanted) != peer.engine {
                    return self.broken(
                        now,
                        id,
                        Broken::Unexpected("another engine than the one that was asked"),
                    );
                }
                true
            }
            _ => false,
        };
        for other in before {
            self.actions.push_back(Action::Close(other, Vec::new()));
            self.end_link(now, other, Why::NoNode);
        }
        if !self.peers.contains_key(&peer) && self.peers.len() >= PEERS_MAX {
            return self.broken(now, id, Broken::TooMany);
        }
        if let Some(link) = self.links.get_mut(&id) {
            link.peer = Some(peer);
        }
        let links = Vec::new();
        let known = self.peers.entry(peer).or_insert(Peer { node, engines, links });
        known.links.push(id);
        // An attempt for another engine goes on.
        let waiting = match self.attempts.get_mut(&address) {
            Some(Attempt::Runs { waiting, .. }) if !is_attempt => std::mem::take(waiting),
            _ => match self.attempts.remove(&address) {
                Some(Attempt::Runs { waiting, .. }) => waiting,
                _ => Vec::new(),
            },
        };
        for waiting in waiting {
            self.ask_or_wait(now, waiting);
        }
    }

    fn broken(&mut self, now: Instant, id: LinkId, why: Broken) {
        let mut over = None;
        if let Some((address, doubt)) = self.doubts.iter_mut().find(|(_, doubt)| doubt.link == id) {
            match why {
                Broken::Same => doubt.next = now + SAME_TIME,
                Broken::Other => over = Some((*address, doubt.former)),
                _ => {}
            }
        }
        let why = match why {
            Broken::Key => Why::Key,
            Broken::Version => Why::Version,
            Broken::Silent | Broken::Same | Broken::Other => Why::NoNode,
            other => Why::Protocol(other),
        };
        let mut last = Vec::new();
        if let Some(link) = self.links.get_mut(&id) {
            let mut bytes = Vec::new();
            while link.session.next_message(now, &mut bytes) {
                last.push(bytes.clone());
            }
            let address = link.address;
            self.warn(now, address, &why);
        }
        self.actions.push_back(Action::Close(id, last));
        self.end_link(now, id, why);
        if let Some((address, former)) = over {
            self.run_is_over(now, address, former);
        }
    }

    /// Ends what was agreed with a run of the node of an address.
    fn run_is_over(&mut self, now: Instant, address: IpAddr, run: NodeId) {
        let of_run = |(peer, known): (&PeerId, &Peer)| (known.node == run).then_some(*peer);
        let peers: Vec<PeerId> = self.peers_at(address).filter_map(of_run).collect();
        for peer in peers {
            self.peer_is_over(now, Some(peer), Why::NoNode);
        }
    }

    fn warn(&mut self, now: Instant, address: IpAddr, why: &Why) {
        let advice = match why {
            Why::Key => {
                "copy the key file of one of the two nodes to the other host, and start that node again (`rdmux node --key FILE`)"
            }
            Why::Version => "use the same version of rdmux at both ends",
            Why::Protocol(_) => "it may be another program",
            _ => return,
        };
        if !self.warned.is_due(now, address) {
            return;
        }
        self.warnings.push(format!(
            "the node of {address} cannot be used, so connections to it have queue pairs of their own: {why}; {advice}"
        ));
    }

    /// Forgets a link. Everything that was agreed with its peer is over, if the peer had agreed to anything.
    fn end_link(&mut self, now: Instant, id: LinkId, why: Why) {
        let Some(link) = self.links.remove(&id) else {
            return;
        };
        let Link {
            address,
            peer,
            session,
            ..
        } = link;
        for tag in session.into_unanswered() {
            if let Tag::Key { ticket } = tag {
                self.tell(PeerEvent::Key { ticket, key: None });
            }
        }
        let kept: Vec<_> = self.kept.keys().filter(|key| key.1 == id).copied().collect();
        for key in kept {
            self.kept.remove(&key);
        }
        let released: Vec<RKey> = self
            .going
            .iter()
            .filter_map(|(rkey, links)| links.contains(&id).then_some(*rkey))
            .collect();
        for rkey in released {
            self.key_released(id, rkey);
        }
        match self.attempts.get(&address) {
            Some(Attempt::Runs { link, .. }) if *link == id => self.attempt_failed(now, address, why),
            _ => self.peer_is_over(now, peer, why),
        }
    }

    fn attempt_failed(&mut self, now: Instant, address: IpAddr, why: Why) {
        let Some(Attempt::Runs { waiting, .. }) = self.attempts.remove(&address) else {
            return;
        };
        // A node that has agreed by another engine is there.
        if self.peers_at(address).next().is_none() {
            let failed = Attempt::Failed {
                until: now + NONE_TIME,
                why: why.clone(),
            };
            self.attempts.insert(address, failed);
        }
        for Waiting { qpn, serial, .. } in waiting {
            if self.asking(qpn, serial).is_some() {
                self.own(qpn, why.clone());
            }
        }
    }

    /// Ends what was agreed with a peer, unless that is over. One that was there before may be back at once.
    fn peer_is_over(&mut self, now: Instant, peer: Option<PeerId>, why: Why) {
        let Some((peer, before)) = peer.and_then(|peer| Some((peer, self.peers.remove(&peer)?))) else {
            return;
        };
        let mut links = before.links;
        if self.peers_at(peer.address).next().is_none() {
            // Nobody asks any more which run it is.
            links.extend(self.doubts.remove(&peer.address).map(|doubt| doubt.link));
        }
        for link in links {
            if self.links.contains_key(&link) {
                self.actions.push_back(Action::Close(link, Vec::new()));
                self.end_link(now, link, why.clone());
            }
        }
        let is_its = |far: &Far| far.address == peer.address && before.engines.of(far.qpn) == peer.engine;
        let qpns: Vec<Qpn> = self
            .ends
            .iter()
            .filter(|(_, end)| match &end.state {
                EndState::Asking(far) | EndState::Bound(far) => is_its(far),
                _ => false,
            })
            .map(|(qpn, _)| *qpn)
            .collect();
        for qpn in qpns {
            self.own(qpn, why.clone());
            self.unbound(qpn);
        }
        self.tell(PeerEvent::Gone { peer });
    }

    // Messages.

    fn question(&mut self, now: Instant, asked: Asked, message: Message) {
        let Some(peer) = self.links.get(&asked.link).and_then(|link| link.peer) else {
            return;
        };
        let answer = match message {
            Message::Bind { source, .. }
            | Message::Settled { source, .. }
            | Message::Unbind { source, .. }
                if self.peers.get(&peer).map(|peer| peer.engines.of(source)) != Some(peer.engine) =>
            {
                let why = Broken::Unexpected("a queue pair of another engine");
                return self.broken(now, asked.link, why);
            }
            Message::Bind {
                source,
                dest,
                class: _,
                binding,
            } => self.bind_asked(asked.link, peer, (source, dest), binding),
            Message::Settled {
                source,
                dest,
                binding,
            } => {
                if let Some(EndState::Asking(far)) = self.state(dest)
                    && far.is(peer, source)
                {
                    match binding {
                        Some(binding) => self.bound(dest, peer, binding),
                        None => self.own(dest, Why::Refused(Reason::Own)),
                    }
                }
                Message::Done {}
            }
            Message::Unbind { source, dest } => {
                if self.kept.remove(&(dest, asked.link, source)).is_some()
                    && let Some(link) = self.links.get_mut(&asked.link)
                {
                    link.kept -= 1;
                }
                match self.state(dest) {
                    Some(EndState::Bound(far)) if far.is(peer, source) => self.unbound(dest),
                    Some(EndState::Asking(far)) if far.is(peer, source) => {
                        self.own(dest, Why::Refused(Reason::Own));
                    }
                    _ => {}
                }
                Message::Done {}
            }
            Message::ResolveKey { domain, rkey } => {
                self.events.push_back(Event::KeyAsked { asked, domain, rkey });
                return;
            }
            Message::KeyGone { domain, rkey } => {
                self.tell(PeerEvent::KeyGone {
                    asked,
                    peer,
                    domain,
                    rkey,
                });
                return;
            }
            Message::OpenQp {
                here,
                there,
                class,
                line,
                end,
            } => {
                let by = SharedBy {
                    peer,
                    here: there,
                    there: here,
                    class,
                };
                self.events.push_back(Event::OpenAsked { asked, by, line, end });
                return;
            }
            Message::QpReady { line } => {
                let id = SharedId(line);
                self.events.push_back(Event::ReadyTold { peer, id });
                Message::Done {}
            }
            Message::CloseQp { line, failed } => {
                self.events.push_back(Event::CloseAsked {
                    asked,
                    peer,
                    id: SharedId(line),
                    failed,
                });
                return;
            }
            Message::QpEnded {
                line,
                messages,
                executed,
            } => {
                self.events.push_back(Event::EndTold {
                    peer,
                    id: SharedId(line),
                    messages,
                    executed,
                });
                Message::Done {}
            }
            other => return self.broken(now, asked.link, Broken::Unexpected(other.name())),
        };
        self.answer(asked, answer);
    }

    fn bind_asked(
        &mut self,
        link: LinkId,
        peer: PeerId,
        (source, dest): (Qpn, Qpn),
        binding: Binding,
    ) -> Message {
        let Some(end) = self.ends.get(&dest) else {
            return refused(Reason::NoQp);
        };
        match end.state {
            EndState::Own => refused(Reason::Own),
            EndState::Asking(far) | EndState::Bound(far) if !far.is(peer, source) => {
                refused(Reason::OtherPeer)
            }
            EndState::Asking(_) | EndState::Bound(_) => {
                let answer = end.binding.clone();
                self.bound(dest, peer, binding);
                Message::Bound { binding: answer }
            }
            EndState::Open => {
                let Some(from) = self.links.get_mut(&link) else {
                    return refused(Reason::Limit);
                };
                let key = (dest, link, source);
                if !self.kept.contains_key(&key) {
                    if from.kept >= KEPT_MAX {
                        return refused(Reason::Limit);
                    }
                    from.kept += 1;
                }
                self.kept.insert(key, binding);
                Message::Waits {}
            }
        }
    }

    fn answered(&mut self, now: Instant, link: LinkId, tag: Tag, answer: &Message) {
        let Some(from) = self.links.get(&link).and_then(|link| link.peer) else {
            return;
        };
        match (tag, answer) {
            (Tag::Bind { qpn, serial }, answer) => {
                if self.ends.get(&qpn).is_none_or(|end| end.serial != serial) {
                    return;
                }
                match answer {
                    Message::Bound { binding } => self.bound(qpn, from, binding.clone()),
                    Message::Waits {} => {}
                    Message::Refused { reason } => self.own(qpn, Why::Refused(*reason)),
                    other => self.broken(now, link, Broken::Unexpected(other.name())),
                }
            }
            (
                Tag::Key { ticket },
                Message::Key {
                    rkey,
                    start,
                    length,
                    access,
                },
            ) => {
                let key = RemoteKey {
                    rkey: *rkey,
                    start: *start,
                    length: *length,
                    access: *access,
                };
                let key = Some(key);
                self.tell(PeerEvent::Key { ticket, key });
            }
            (Tag::Key { ticket }, Message::Refused { .. }) => {
                self.tell(PeerEvent::Key { ticket, key: None });
            }
            (Tag::KeyGone { rkey }, Message::Done {}) => self.key_released(link, rkey),
            (Tag::Open { id, qpn, peer }, Message::QpOpened { line, end }) => {
                let opened = Ok((*line, *end));
                let event = Event::Opened {
                    id,
                    qpn,
                    peer,
                    opened,
                };
                self.events.push_back(event);
            }
            (Tag::Open { id, qpn, peer }, Message::Refused { reason }) => {
                let opened = Err(*reason);
                let event = Event::Opened {
                    id,
                    qpn,
                    peer,
                    opened,
                };
                self.events.push_back(event);
            }
            (Tag::Close { id, qpn }, Message::Done {}) => {
                let is_closed = true;
                self.events.push_back(Event::Closed { id, qpn, is_closed });
            }
            (Tag::Close { id, qpn }, Message::Refused { .. }) => {
                let is_closed = false;
                self.events.push_back(Event::Closed { id, qpn, is_closed });
            }
            (Tag::Notice, Message::Done {}) => {}
            (_, other) => self.broken(now, link, Broken::Unexpected(other.name())),
        }
    }
}

/// Returns all peers that an address may have.
fn peers_of(address: IpAddr) -> RangeInclusive<PeerId> {
    let engine = |engine| PeerId { address, engine };
    engine(0)..=engine(u8::MAX)
}

fn refused(reason: Reason) -> Message {
    Message::Refused { reason }
}

#[cfg(test)]
mod tests;
