//! All peers of a node: which of them have a node, and what is agreed with them. No I/O and no clock.
//!
//! The caller tells what happens to links ([`Machine::accepted`], [`Machine::connected`], [`Machine::heard`], [`Machine::lost`],
//! [`Machine::check_time`]), then does what [`Machine::next_action`] returns until there is no more, sends what [`Machine::next_message`] has for
//! the links of [`Action::Send`], and takes the [`PeerEvent`]s.
//!
//! A peer is connected to when it is needed. Both nodes may connect at once: then there are two links, and each node uses either. What is agreed
//! belongs to the pair of nodes and not to a link, and once one link is lost all that was agreed with the peer is over, at both ends.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rdmux_verbs::{Qpn, RKey};
use rdmux_wire::node::peer::{Binding, Executed, Message, NodeId, Reason, SharedEnd, TenantName};

use super::session::{Broken, Heard, Identity, Role, Session};
use super::{PeerEvent, RemoteKey, SharedBy, SharedId, Why};

/// Time for which a peer that has no node, or none of the same key, is not asked again.
const NONE_TIME: Duration = Duration::from_secs(5);
/// Time between two warnings about one peer.
const WARNING_TIME: Duration = Duration::from_secs(60);
/// Peers, those without a node too.
const PEERS_MAX: usize = 8192;
/// Links of nodes that have not shown yet that they have the key.
const STRANGERS_MAX: usize = 64;
/// Time between two links that are to show whether a peer's node is another run.
const DOUBT_TIME: Duration = Duration::from_millis(500);
/// Most such links at a time.
const DOUBTS_MAX: usize = 64;
/// Questions of one peer that wait until a queue pair is in RTR.
const KEPT_MAX: usize = 4096;

/// A control connection, or an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(super) u64);

/// Actions for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Connect to the node of a peer.
    Connect(LinkId, IpAddr),
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
        peer: IpAddr,
        opened: Result<(u64, SharedEnd), Reason>,
    },
    /// A peer's end of a shared queue pair is ready.
    ReadyTold { peer: IpAddr, id: SharedId },
    /// A peer asks for the end of a shared queue pair.
    CloseAsked {
        asked: Asked,
        peer: IpAddr,
        id: SharedId,
        failed: bool,
    },
    /// A peer has answered [`Machine::close`].
    Closed { id: SharedId, qpn: Qpn, is_closed: bool },
    /// A peer's end of a shared queue pair has ended.
    EndTold {
        peer: IpAddr,
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
        peer: IpAddr,
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
    peer: IpAddr,
    role: Role,
    session: Session<Tag>,
    kept: usize,
    /// Keys that the peer knows.
    keys: HashSet<RKey>,
}

/// Knowledge about the node of a peer.
#[derive(Debug)]
enum Way {
    /// An attempt runs.
    Connecting { link: LinkId },
    /// Both have the same key. At least one link is there.
    Agreed { node: NodeId, links: Vec<LinkId> },
    /// There is none to talk to, as far as is known, until then.
    None { until: Instant, why: Why },
}

#[derive(Debug)]
struct Peer {
    way: Way,
    /// Queue pairs that wait for the agreement.
    waiting: Vec<(Qpn, u64)>,
    /// The last link that was to show whether the agreed node is another run than the one that is known, and its time.
    doubted: Option<(LinkId, Instant)>,
}

impl Peer {
    fn new(way: Way, waiting: Vec<(Qpn, u64)>) -> Peer {
        Peer {
            way,
            waiting,
            doubted: None,
        }
    }
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
    peer: IpAddr,
    qpn: Qpn,
    class: u8,
}

/// Knowledge about all peers.
#[derive(Debug)]
pub(super) struct Machine {
    identity: Identity,
    peers: HashMap<IpAddr, Peer>,
    links: BTreeMap<LinkId, Link>,
    /// Links that are to show whether a peer's node is another run than the one that is known.
    doubts: HashSet<LinkId>,
    /// Links whose peers may have to answer in some time.
    timed: BTreeSet<LinkId>,
    ends: HashMap<Qpn, End>,
    /// Questions that wait until a queue pair of this node is in RTR: that one, the link, the peer's queue pair; and what is known of the latter.
    kept: BTreeMap<(Qpn, LinkId, Qpn), Binding>,
    /// Keys that are going, and the links whose answers are missing.
    going: HashMap<RKey, BTreeSet<LinkId>>,
    warned: HashMap<IpAddr, Instant>,
    warnings: Vec<String>,
    actions: VecDeque<Action>,
    events: VecDeque<Event>,
    next: u64,
}

impl Machine {
    pub(super) fn new(identity: Identity) -> Machine {
        Machine {
            identity,
            peers: HashMap::new(),
            links: BTreeMap::new(),
            doubts: HashSet::new(),
            timed: BTreeSet::new(),
            ends: HashMap::new(),
            kept: BTreeMap::new(),
            going: HashMap::new(),
            warned: HashMap::new(),
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
    pub(super) fn accepted(&mut self, now: Instant, peer: IpAddr, nonce: [u8; 32]) -> Option<LinkId> {
        let strangers = self
            .links
            .values()
            .filter(|link| link.role == Role::Accepts && !link.session.is_agreed());
        if strangers.count() >= STRANGERS_MAX || self.links.len() >= 2 * PEERS_MAX {
            return None;
        }
        Some(self.add_link(Role::Accepts, now, peer, nonce))
    }

    fn add_link(&mut self, role: Role, now: Instant, peer: IpAddr, nonce: [u8; 32]) -> LinkId {
        let id = LinkId(self.number());
        let link = Link {
            peer,
            role,
            session: Session::new(role, &self.identity, peer, nonce, now),
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

    /// Takes note that a peer's node does not answer as it should. Another link shows whether the node has ended and started again: then everything that
    /// was agreed with its former run is over. A node that is the same notices nothing. `nonce` is for that link.
    pub(super) fn doubt(&mut self, now: Instant, peer: IpAddr, nonce: [u8; 32]) {
        let Some(Peer {
            way: Way::Agreed { node, .. },
            doubted,
            ..
        }) = self.peers.get_mut(&peer)
        else {
            return;
        };
        let is_recent = doubted.is_some_and(|(_, at)| now < at + DOUBT_TIME);
        if is_recent || self.doubts.len() >= DOUBTS_MAX {
            return;
        }
        let former = *node;
        let id = self.add_link(Role::Connects, now, peer, nonce);
        if let Some(link) = self.links.get_mut(&id) {
            link.session.other_than(former);
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.doubted = Some((id, now));
        }
        self.doubts.insert(id);
        self.actions.push_back(Action::Connect(id, peer));
    }

    /// Handles a message of a link.
    pub(super) fn heard(&mut self, now: Instant, id: LinkId, bytes: &[u8]) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        match link.session.handle(&self.identity, bytes) {
            Ok(Heard::Nothing) => {}
            Ok(Heard::Agreed(node)) => self.agreed(now, id, node),
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

    /// Asks whether the connection of a queue pair that goes to RTR goes over shared queue pairs: [`PeerEvent::Bound`] or [`PeerEvent::Own`]
    /// answers, soon. `access`: what the queue pair allows. `nonce` is for a link that may have to be made.
    pub(super) fn bind(
        &mut self,
        now: Instant,
        qpn: Qpn,
        (peer, dest, class): (IpAddr, Qpn, u8),
        access: u32,
        nonce: [u8; 32],
    ) {
        let Some(end) = self.ends.get_mut(&qpn) else {
            return;
        };
        let serial = end.serial;
        let far = Far {
            peer,
            qpn: dest,
            class,
        };
        end.state = EndState::Asking(far);
        end.binding.access = access;
        // The peer may have asked first. Whoever else has, asks for another connection.
        for (link, source, binding) in self.take_kept(qpn) {
            let from = self.links.get(&link).map(|link| link.peer);
            let is_this = from == Some(peer) && source == dest;
            self.settle(now, link, (qpn, source), is_this);
            if is_this {
                self.bound(qpn, binding);
            }
        }
        if self.state(qpn) != Some(EndState::Asking(far)) {
            return;
        }
        match self.peers.get_mut(&peer) {
            Some(Peer {
                way: Way::None { until, why },
                ..
            }) if *until > now => {
                let why = why.clone();
                self.own(qpn, why);
            }
            Some(Peer {
                way: Way::Agreed { .. },
                ..
            }) => self.ask_bind(now, qpn, serial),
            Some(Peer {
                way: Way::Connecting { .. },
                waiting,
                ..
            }) => waiting.push((qpn, serial)),
            _ => self.connect(now, peer, (qpn, serial), nonce),
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
            && let Some(link) = self.link_to(far.peer)
        {
            let (source, dest) = (qpn, far.qpn);
            self.ask(now, link, Message::Unbind { source, dest }, Tag::Notice);
        }
    }

    fn state(&self, qpn: Qpn) -> Option<EndState> {
        self.ends.get(&qpn).map(|end| end.state)
    }

    fn connect(&mut self, now: Instant, peer: IpAddr, first: (Qpn, u64), nonce: [u8; 32]) {
        if self.peers.len() >= PEERS_MAX {
            self.peers.retain(|_, peer| match peer.way {
                Way::None { until, .. } => until > now,
                _ => true,
            });
        }
        if self.peers.len() >= PEERS_MAX {
            return self.own(first.0, Why::Limit);
        }
        let link = self.add_link(Role::Connects, now, peer, nonce);
        let way = Way::Connecting { link };
        let waiting = vec![first];
        self.peers.insert(peer, Peer::new(way, waiting));
        self.actions.push_back(Action::Connect(link, peer));
    }

    fn ask_bind(&mut self, now: Instant, qpn: Qpn, serial: u64) {
        let Some(end) = self.ends.get(&qpn) else { return };
        let EndState::Asking(far) = end.state else { return };
        if end.serial != serial {
            return;
        }
        let question = Message::Bind {
            source: qpn,
            dest: far.qpn,
            class: far.class,
            binding: end.binding.clone(),
        };
        match self.link_to(far.peer) {
            Some(link) => self.ask(now, link, question, Tag::Bind { qpn, serial }),
            None => self.own(qpn, Why::NoNode),
        }
    }

    fn bound(&mut self, qpn: Qpn, binding: Binding) {
        let Some(end) = self.ends.get_mut(&qpn) else {
            return;
        };
        let EndState::Asking(far) = end.state else { return };
        end.state = EndState::Bound(far);
        self.tell(PeerEvent::Bound {
            qpn,
            peer: far.peer,
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
        peer: IpAddr,
        (domain, rkey): (u64, RKey),
        ticket: u64,
    ) {
        let question = Message::ResolveKey { domain, rkey };
        match self.link_to(peer) {
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
    pub(super) fn tell_ready(&mut self, now: Instant, (peer, line): (IpAddr, u64)) -> bool {
        self.ask_peer(now, peer, Message::QpReady { line }, Tag::Notice)
    }

    /// Asks a peer to end its end of a shared queue pair, if nothing is in flight there. `qpn` is the own end.
    pub(super) fn close(
        &mut self,
        now: Instant,
        (id, qpn): (SharedId, Qpn),
        (peer, line): (IpAddr, u64),
    ) -> bool {
        let failed = false;
        let tag = Tag::Close { id, qpn };
        self.ask_peer(now, peer, Message::CloseQp { line, failed }, tag)
    }

    /// Tells a peer that a line is over.
    pub(super) fn tell_over(&mut self, now: Instant, (peer, line): (IpAddr, u64)) -> bool {
        let failed = true;
        self.ask_peer(now, peer, Message::CloseQp { line, failed }, Tag::Notice)
    }

    /// Tells a peer that the queue pair of a line has ended here.
    pub(super) fn tell_ended(
        &mut self,
        now: Instant,
        (peer, line): (IpAddr, u64),
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
    pub(super) fn precedes(&self, peer: IpAddr) -> bool {
        match self.peers.get(&peer).map(|peer| &peer.way) {
            Some(Way::Agreed { node, .. }) => self.identity.node < *node,
            _ => false,
        }
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

    fn ask_peer(&mut self, now: Instant, peer: IpAddr, question: Message, tag: Tag) -> bool {
        let link = self.link_to(peer);
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
    fn link_to(&self, peer: IpAddr) -> Option<LinkId> {
        match &self.peers.get(&peer)?.way {
            Way::Agreed { links, .. } => links.first().copied(),
            _ => None,
        }
    }

    fn agreed(&mut self, now: Instant, id: LinkId, node: NodeId) {
        let Some(link) = self.links.get(&id) else { return };
        let (peer, role) = (link.peer, link.role);
        self.doubts.remove(&id);
        // One that asks who the peer is has found the same as this one, and stays as the second link.
        let doubted = self.peers.get_mut(&peer).and_then(|peer| peer.doubted.take());
        // An earlier run of the peer's node is over, even if its links do not know yet. So is a link that the peer has made once more.
        let mut before = Vec::new();
        if let Some(Peer {
            way: Way::Agreed { node: known, links },
            ..
        }) = self.peers.get(&peer)
        {
            let again = |other: &LinkId| self.links.get(other).is_some_and(|other| other.role == role);
            if *known != node || links.iter().any(again) {
                before.clone_from(links);
            }
        }
        for other in before {
            self.actions.push_back(Action::Close(other, Vec::new()));
            self.end_link(now, other, Why::NoNode);
        }
        let known = self.peers.remove(&peer);
        if known.is_none() && self.peers.len() >= PEERS_MAX {
            return self.broken(now, id, Broken::TooMany);
        }
        let mut links = vec![id];
        let mut waiting = Vec::new();
        match known {
            Some(Peer {
                way: Way::Agreed { links: others, .. },
                ..
            }) => links.splice(0..0, others).for_each(drop),
            Some(Peer { waiting: queue, .. }) => waiting = queue,
            None => {}
        }
        let way = Way::Agreed { node, links };
        let known = Peer {
            doubted,
            ..Peer::new(way, Vec::new())
        };
        self.peers.insert(peer, known);
        for (qpn, serial) in waiting {
            self.ask_bind(now, qpn, serial);
        }
    }

    fn broken(&mut self, now: Instant, id: LinkId, why: Broken) {
        let why = match why {
            Broken::Key => Why::Key,
            Broken::Version => Why::Version,
            Broken::Silent | Broken::Same => Why::NoNode,
            other => Why::Protocol(other),
        };
        let mut last = Vec::new();
        if let Some(link) = self.links.get_mut(&id) {
            let mut bytes = Vec::new();
            while link.session.next_message(now, &mut bytes) {
                last.push(bytes.clone());
            }
            let peer = link.peer;
            self.warn(now, peer, &why);
        }
        self.actions.push_back(Action::Close(id, last));
        self.end_link(now, id, why);
    }

    fn warn(&mut self, now: Instant, peer: IpAddr, why: &Why) {
        let advice = match why {
            Why::Key => {
                "copy the key file of one of the two nodes to the other host, and start that node again (`rdmux node --key FILE`)"
            }
            Why::Version => "use the same version of rdmux at both ends",
            Why::Protocol(_) => "it may be another program",
            _ => return,
        };
        self.warned.retain(|_, at| now < *at + WARNING_TIME);
        if self.warned.len() >= PEERS_MAX || self.warned.contains_key(&peer) {
            return;
        }
        self.warned.insert(peer, now);
        self.warnings.push(format!(
            "the node of {peer} cannot be used, so connections to it have queue pairs of their own: {why}; {advice}"
        ));
    }

    /// Forgets a link. Everything that was agreed with its peer is over, if the peer had agreed to anything.
    fn end_link(&mut self, now: Instant, id: LinkId, why: Why) {
        let Some(Link { peer, session, .. }) = self.links.remove(&id) else {
            return;
        };
        self.doubts.remove(&id);
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
        let Some(Peer { way, .. }) = self.peers.get_mut(&peer) else {
            return;
        };
        let is_over = match way {
            Way::Connecting { link } => *link == id,
            Way::Agreed { links, .. } => links.contains(&id),
            Way::None { .. } => false,
        };
        if is_over {
            self.peer_is_over(now, peer, why);
        }
    }

    fn peer_is_over(&mut self, now: Instant, peer: IpAddr, why: Why) {
        let until = now + NONE_TIME;
        let way = Way::None {
            until,
            why: why.clone(),
        };
        let before = self.peers.insert(peer, Peer::new(way, Vec::new()));
        // Nobody asks any more whether it is another run.
        let doubted = before.as_ref().and_then(|before| before.doubted);
        if let Some((link, _)) = doubted.filter(|(link, _)| self.links.contains_key(link)) {
            self.actions.push_back(Action::Close(link, Vec::new()));
            self.end_link(now, link, why.clone());
        }
        let was_agreed = match before.map(|before| before.way) {
            Some(Way::Agreed { links, .. }) => {
                // One that was there before may be back at once.
                self.peers.remove(&peer);
                for link in links {
                    if self.links.contains_key(&link) {
                        self.actions.push_back(Action::Close(link, Vec::new()));
                        self.end_link(now, link, why.clone());
                    }
                }
                true
            }
            _ => false,
        };
        let qpns: Vec<Qpn> = self
            .ends
            .iter()
            .filter(|(_, end)| match end.state {
                EndState::Asking(far) | EndState::Bound(far) => far.peer == peer,
                _ => false,
            })
            .map(|(qpn, _)| *qpn)
            .collect();
        for qpn in qpns {
            self.own(qpn, why.clone());
            self.unbound(qpn);
        }
        if was_agreed {
            self.tell(PeerEvent::Gone { peer });
        }
    }

    // Messages.

    fn question(&mut self, now: Instant, asked: Asked, message: Message) {
        let Some(link) = self.links.get(&asked.link) else {
            return;
        };
        let peer = link.peer;
        let answer = match message {
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
                    && (far.peer, far.qpn) == (peer, source)
                {
                    match binding {
                        Some(binding) => self.bound(dest, binding),
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
                    Some(EndState::Bound(far)) if (far.peer, far.qpn) == (peer, source) => self.unbound(dest),
                    Some(EndState::Asking(far)) if (far.peer, far.qpn) == (peer, source) => {
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
        peer: IpAddr,
        (source, dest): (Qpn, Qpn),
        binding: Binding,
    ) -> Message {
        let Some(end) = self.ends.get(&dest) else {
            return refused(Reason::NoQp);
        };
        match end.state {
            EndState::Own => refused(Reason::Own),
            EndState::Asking(far) | EndState::Bound(far) if (far.peer, far.qpn) != (peer, source) => {
                refused(Reason::OtherPeer)
            }
            EndState::Asking(_) | EndState::Bound(_) => {
                let answer = end.binding.clone();
                self.bound(dest, binding);
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
        match (tag, answer) {
            (Tag::Bind { qpn, serial }, answer) => {
                if self.ends.get(&qpn).is_none_or(|end| end.serial != serial) {
                    return;
                }
                match answer {
                    Message::Bound { binding } => self.bound(qpn, binding.clone()),
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

fn refused(reason: Reason) -> Message {
    Message::Refused { reason }
}

#[cfg(test)]
mod tests;
