//! Connection management: two ends agree on QPNs, PSNs and depths by messages between their general services QPs. IBTA Vol 1,
//! chapter 12.
//!
//! It moves no QP: as with the kernel's `ib_cm`, whoever uses it modifies the QP between the messages. The active side
//! calls [`Cm::connect`], gets [`CmEvent::Reply`], moves its QP to RTS and calls [`Cm::establish`]. The passive side
//! calls [`Cm::listen`], gets [`CmEvent::Request`], moves its QP to RTS, calls [`Cm::accept`] and gets
//! [`CmEvent::Established`] (or [`Cm::establish`]es itself when data comes before the RTU). Either side [`Cm::disconnect`]s.
//!
//! A datagram service has no connection; only its QPN and Q_Key are asked for: [`Cm::resolve`], [`CmEvent::SidrRequest`],
//! [`Cm::answer`], [`CmEvent::SidrReply`]. 12.11.
//!
//! Both sides say through ECE what rdmux needs to know, never in the user's private data.
//!
//! Every state and every event are a table in `tests/cm_table.rs`.

mod connection;
mod sidr;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;
use rdmux_wire::cm::{
    Answered, Extensions, IpAddressing, MAD_LEN, Message, PrivateData, Rej, RejReason, ServiceId, SidrStatus,
};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use crate::backlog::Backlog;
use crate::device::{CmDetail, Config};
use crate::time::Time;

/// Response timeout that we announce: 4.096 us x 2^20 = 4.3 s, as the kernel does.
const RESPONSE_TIMEOUT: u8 = 20;
/// Time for which our MRAs put off the peer: 17 s. A message that is lost meanwhile costs no more than that.
const SERVICE_TIMEOUT: u8 = 22;
/// First wait for an answer; it doubles with each try.
const FIRST_WAIT_NS: u64 = 64_000_000;
/// Messages sent before the peer is given up: 64 ms x (2^6 - 1) and the last wait, 8.3 s in all.
const TRIES: u8 = 7;
/// Connections under way in all; more are refused.
const CONNECTIONS_MAX: usize = 1 << 16;
/// Requests of one service that its user has not decided on; more are dropped, and come again.
pub(crate) const BACKLOG_MAX: usize = 128;
/// Time that a user has to decide on a request. No peer asks for that long.
const DECISION_NS: u64 = 60_000_000_000;
/// Connections at rest, and apart from them as many requests: the one whose rest ends first makes place for the next.
pub(crate) const RESTING_MAX: usize = 4_096;
/// How long an answer to a request is kept for repetitions of the request: the kernel repeats after 4.3 s.
const ANSWER_KEPT: u8 = 21;
/// Messages that wait to be sent; more are dropped, and come again.
pub(crate) const OUT_MAX: usize = 256;

/// Local communication id: names a connection of this device, or a resolution of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmId(pub u32);

/// Why a connection was not asked for or accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CmError {
    /// There is no such request, or no longer: withdrawn, expired, or decided on before.
    #[error("there is no such connection request any more")]
    NoSuchRequest,
    /// More private data than the message holds.
    #[error("too much private data for the message")]
    PrivateDataTooLong,
    /// As many connections as there can be.
    #[error("too many connections")]
    NoResources,
    /// Connections are for RC, UC and XRC.
    #[error("datagram services have no connections")]
    InvalidTransport,
}

/// What one side brings into a connection, and learns of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// RC, UC or XRC (in a REQ only).
    pub transport: Transport,
    /// QPN.
    pub qpn: Qpn,
    /// The PSN at which the *receiver* of the message shall start sending: the sender's own receive PSN.
    pub starting_psn: Psn,
    /// READs, atomics and FLUSHes that it can answer at a time.
    pub responder_resources: u8,
    /// READs, atomics and FLUSHes that it wants to have under way.
    pub initiator_depth: u8,
    /// Retries on RNR NAK that the other side is to use.
    pub rnr_retry_count: u8,
    /// Retries on timeout that the other side is to use (in a REQ only).
    pub retry_count: u8,
    /// Its QP takes receives from a shared receive queue.
    pub srq: bool,
    /// Local ACK timeout code (in a REQ only).
    pub ack_timeout: u8,
    /// Path MTU (in a REQ only).
    pub path_mtu: PathMtu,
    /// Traffic class of the path, ECN left out (in a REQ only).
    pub traffic_class: u8,
    /// What an rdmux peer told besides; `None` for any other peer. Filled in by the device when sending.
    pub extensions: Option<Extensions>,
    /// Own side: the peer is told of no extensions, since who brings up the QP knows of none.
    pub plain: bool,
}

/// Names both ends of a connection: enough to end it when the device that had it has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peering {
    /// The connection.
    pub id: CmId,
    /// Own QPN.
    pub local_qpn: Qpn,
    /// The peer's address.
    pub peer: IpAddr,
    /// The peer's communication id.
    pub remote_id: u32,
    /// The peer's QPN.
    pub remote_qpn: Qpn,
}

/// What happened to a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEvent {
    /// A peer asks for a connection to a service that is listened on.
    Request {
        /// The connection, to be accepted or rejected.
        id: CmId,
        /// The service.
        service: ServiceId,
        /// The peer's address.
        peer: IpAddr,
        /// Addresses and ports as the peer gave them, when it did.
        addressing: Option<IpAddressing>,
        /// The peer's side.
        remote: Endpoint,
        /// The user's private data: what follows the addressing.
        private_data: Vec<u8>,
    },
    /// The peer accepted; the QP can be moved and the connection established.
    Reply {
        /// The connection.
        id: CmId,
        /// The peer's side.
        remote: Endpoint,
        /// The user's private data.
        private_data: Vec<u8>,
    },
    /// The peer is ready too.
    Established {
        /// The connection.
        id: CmId,
    },
    /// The peer refused, or withdrew its request; the id is gone.
    Rejected {
        /// The connection.
        id: CmId,
        /// Why.
        reason: RejReason,
        /// What the peer would have accepted; its meaning depends on the reason. 12.6.7.2.
        ari: Vec<u8>,
        /// The user's private data.
        private_data: Vec<u8>,
    },
    /// No answer came; the id is gone.
    Unreachable {
        /// The connection.
        id: CmId,
    },
    /// The connection has ended, by either side, or its request or reply was not decided on within a minute; the id is gone.
    Disconnected {
        /// The connection.
        id: CmId,
    },
    /// A peer asks which QP serves datagrams of a service that is listened on.
    SidrRequest {
        /// The request, to be answered.
        id: CmId,
        /// The service.
        service: ServiceId,
        /// The peer's address.
        peer: IpAddr,
        /// Addresses and ports as the peer gave them, when it did.
        addressing: Option<IpAddressing>,
        /// The user's private data: what follows the addressing.
        private_data: Vec<u8>,
    },
    /// The peer answered; the id is gone.
    SidrReply {
        /// The resolution.
        id: CmId,
        /// Outcome. QPN and Q_Key mean something when it is [`SidrStatus::VALID`].
        status: SidrStatus,
        /// The QP that serves.
        qpn: Qpn,
        /// Its Q_Key.
        qkey: u32,
        /// The user's private data.
        private_data: Vec<u8>,
    },
}

/// Where a connection stands, as those see it who look from outside. IBTA Vol 1, 12.9.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmState {
    /// Connections to a service are waited for.
    Listen,
    /// It was asked for.
    Connect,
    /// A peer asks for it.
    Accept,
    /// It stands.
    Established,
    /// It is being ended.
    Disconnect,
    /// It has ended; its ids and QPNs rest.
    TimeWait,
    /// The QP of a datagram service is asked for. 12.11.
    Resolve,
}

/// In the numbers by which connections are told of: a service that is listened on.
pub(crate) const LISTENER: u64 = 1 << 63;

/// States of a connection. IBTA Vol 1, 12.9.6 and 12.9.7; of a resolution, 12.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Active: REQ sent, waits for REP.
    ReqSent,
    /// Active: the peer needs more time for its REP.
    MraReqReceived,
    /// Active: REP received, the user moves its QP.
    RepReceived,
    /// Active: the user takes its time; the peer knows.
    MraRepSent,
    /// Passive: REQ received, the user decides.
    ReqReceived,
    /// Passive: the user takes its time; the peer knows.
    MraReqSent,
    /// Passive: REP sent, waits for RTU.
    RepSent,
    /// Passive: the peer needs more time for its RTU.
    MraRepReceived,
    Established,
    /// DREQ sent, waits for DREP.
    DreqSent,
    /// Ended, and the user knows. The id and the QPN rest until nothing of the connection is under way any more, and a
    /// repeated request gets the answer that it had.
    TimeWait,
    /// SIDR_REQ sent, waits for SIDR_REP.
    SidrReqSent,
    /// SIDR_REQ received, the user decides.
    SidrReqReceived,
}

impl State {
    fn to_public(self) -> CmState {
        match self {
            State::ReqSent | State::MraReqReceived | State::RepReceived | State::MraRepSent => {
                CmState::Connect
            }
            State::ReqReceived | State::MraReqSent | State::RepSent | State::MraRepReceived => {
                CmState::Accept
            }
            State::Established => CmState::Established,
            State::DreqSent => CmState::Disconnect,
            State::TimeWait => CmState::TimeWait,
            State::SidrReqSent | State::SidrReqReceived => CmState::Resolve,
        }
    }

    #[cfg(test)]
    pub(crate) const COUNT: usize = State::SidrReqReceived as usize + 1;

    /// The user has not decided on a request.
    fn is_undecided(self) -> bool {
        matches!(
            self,
            State::ReqReceived | State::MraReqSent | State::SidrReqReceived
        )
    }
}

/// The QPN of a connection that has no QP here yet.
const NO_QPN: Qpn = Qpn::new(0);

/// Names a request: the peer's address, its GUID (`None` for a resolution), its communication or request id.
type RequestKey = (IpAddr, Option<u64>, u32);
/// Names a peer's QP: its address, its GUID, its QPN.
type QpKey = (IpAddr, u64, Qpn);
/// A message, ready to be sent.
type Mad = Box<[u8; MAD_LEN]>;

#[derive(Debug)]
struct Connection {
    state: State,
    service: ServiceId,
    transport: Transport,
    peer: IpAddr,
    /// Passive: the request that it came from.
    request: Option<RequestKey>,
    local_qpn: Qpn,
    remote_id: u32,
    remote_guid: u64,
    remote_qpn: Qpn,
    /// Passive: the REQ had our extensions.
    extended: bool,
    tid: u64,
    /// The message that is sent again until it is answered, or when its cause comes again.
    message: Mad,
    tries: u8,
    tries_max: u8,
    /// Code of the time that the peer may take to answer.
    peer_response: u8,
    /// Code of the time for which ids and QPNs rest at the end. 12.9.8.4.
    rest: u8,
    /// Until when the user may decide on a request.
    decide_by: Time,
    deadline: Option<Time>,
}

impl Connection {
    fn new(state: State, service: ServiceId, peer: IpAddr, tid: u64) -> Connection {
        Connection {
            state,
            service,
            transport: Transport::Rc,
            peer,
            request: None,
            local_qpn: NO_QPN,
            remote_id: 0,
            remote_guid: 0,
            remote_qpn: Qpn::new(0),
            extended: false,
            tid,
            message: Box::new([0; MAD_LEN]),
            tries: 0,
            tries_max: TRIES,
            peer_response: RESPONSE_TIMEOUT,
            rest: ANSWER_KEPT,
            decide_by: Time(0),
            deadline: None,
        }
    }

    fn qp_key(&self) -> QpKey {
        (self.peer, self.remote_guid, self.remote_qpn)
    }
}

/// The connections of a device.
#[derive(Debug)]
pub struct Cm {
    address: IpAddr,
    guid: u64,
    slot: u8,
    window_log2: u8,
    rng: ChaCha12Rng,
    next_tid: u64,
    /// Services that are listened on, each with its requests that are not decided on.
    listeners: HashMap<ServiceId, usize>,
    connections: HashMap<u32, Connection>,
    /// Passive side: requests to connections.
    by_request: HashMap<RequestKey, u32>,
    /// The peers' QPs of connections that live, as far as they are known.
    by_qp: HashMap<QpKey, u32>,
    /// Connections in TimeWait, by when that ends.
    resting: BTreeSet<(Time, u32)>,
    /// The same of requests and resolutions, which never had a QP here. They cost a peer little, so they displace none of those.
    answered: BTreeSet<(Time, u32)>,
    /// Own QPNs of connections in any state.
    qpns: BTreeSet<(Qpn, u32)>,
    timers: BTreeSet<(Time, u32)>,
    out: VecDeque<(IpAddr, Mad)>,
    events: VecDeque<CmEvent>,
    /// UDP source port of what is sent to general services QPs.
    src_port: u16,
}

impl Cm {
    pub(crate) fn new(config: &Config, mut rng: ChaCha12Rng) -> Cm {
        Cm {
            address: config.address,
            guid: config.guid,
            slot: config.slot,
            window_log2: config.receive_window_bytes.max(1).ilog2() as u8,
            next_tid: rng.next_u64(),
            rng,
            listeners: HashMap::new(),
            connections: HashMap::new(),
            by_request: HashMap::new(),
            by_qp: HashMap::new(),
            resting: BTreeSet::new(),
            answered: BTreeSet::new(),
            qpns: BTreeSet::new(),
            timers: BTreeSet::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            src_port: config.gsi_src_port,
        }
    }

    /// Accepts requests for a service from now on: connections to it, and resolutions of it.
    pub fn listen(&mut self, service: ServiceId) {
        self.listeners.entry(service).or_insert(0);
    }

    /// Refuses requests for a service from now on, and those that were not decided on.
    pub fn unlisten(&mut self, now: Time, service: ServiceId) {
        let undecided = |c: &Connection| c.state.is_undecided() && c.service == service;
        let mut ids: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| undecided(c))
            .map(|(id, _)| *id)
            .collect();
        // A run must not depend on the order of a hash map.
        ids.sort_unstable();
        for id in ids {
            self.reject(now, CmId(id), RejReason::INVALID_SERVICE_ID, &[]);
        }
        self.listeners.remove(&service);
    }

    /// Forgets a connection without a word, as after a crash. The peer learns of it when it asks.
    pub fn destroy(&mut self, id: CmId) {
        self.forget(id.0);
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.events.is_empty()
    }

    /// Something that happened to a connection.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Connections and resolutions there are, in any state but TimeWait.
    pub fn len(&self) -> usize {
        self.connections.len() - self.resting()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Communication ids of connections and resolutions, and services that are listened on with [`LISTENER`].
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        let connections = self.connections.keys().map(|id| u64::from(*id));
        connections.chain(self.listeners.keys().map(|service| LISTENER | service.0))
    }

    pub(crate) fn detail(&self, id: CmId) -> Option<CmDetail> {
        let c = self.connections.get(&id.0)?;
        let known = |qpn: Qpn| (qpn != NO_QPN).then_some(qpn);
        Some(CmDetail {
            number: id.0.into(),
            state: c.state.to_public(),
            service: c.service,
            peer: Some(c.peer),
            qpns: (known(c.local_qpn), known(c.remote_qpn)),
        })
    }

    /// When a connection that has ended, or is being ended, goes on by itself at the latest: `None` when its rest is over, or it
    /// never was. 12.9.8.4.
    pub fn next_deadline(&self, id: CmId) -> Option<Time> {
        self.connections.get(&id.0)?.deadline
    }

    /// Connections and resolutions in TimeWait: their ids and QPNs are not given out.
    pub fn resting(&self) -> usize {
        self.resting.len() + self.answered.len()
    }

    // Driven by the device.

    pub(crate) fn backlog(&self) -> Backlog {
        Backlog {
            cm_messages: self.out.len(),
            cm_resting: self.resting.len(),
            ..Default::default()
        }
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<(IpAddr, u16, Mad)> {
        let (peer, mad) = self.out.pop_front()?;
        Some((peer, self.src_port, mad))
    }

    pub(crate) fn has_transmit(&self) -> bool {
        !self.out.is_empty()
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        while let Some((at, id)) = self.timers.first().copied()
            && at <= now
        {
            self.timers.pop_first();
            self.expire(now, id);
        }
    }

    /// Whether a QPN is a connection's, whose QP may have gone, or was a moment ago: packets to it may still be under way.
    /// 12.9.8.4.
    pub(crate) fn has_qpn(&self, qpn: Qpn) -> bool {
        self.qpns
            .range((qpn, 0)..)
            .next()
            .is_some_and(|(at, _)| *at == qpn)
    }

    /// State of a connection, for tests.
    #[cfg(test)]
    pub(crate) fn state(&self, id: CmId) -> Option<State> {
        self.connections.get(&id.0).map(|c| c.state)
    }

    /// Messages that are no CM messages, or of another version, are dropped: a MAD that is sent without being asked for has
    /// no answer that could report it. 13.4.6.
    pub(crate) fn handle_mad(&mut self, now: Time, peer: IpAddr, mad: &[u8]) {
        let Ok((tid, message)) = Message::parse(mad) else {
            return;
        };
        match message {
            Message::Req(req) => self.handle_req(now, peer, tid, &req),
            Message::Rep(rep) => self.handle_rep(now, peer, tid, &rep),
            Message::Rtu(rtu) => self.handle_rtu(peer, tid, &rtu),
            Message::Rej(rej) => self.handle_rej(now, peer, &rej),
            Message::Mra(mra) => self.handle_mra(now, peer, &mra),
            Message::Dreq(dreq) => self.handle_dreq(now, peer, tid, &dreq),
            Message::Drep(drep) => self.handle_drep(now, peer, &drep),
            Message::Lap(lap) => self.handle_lap(peer, tid, &lap),
            // Answers LAPs, which are never sent.
            Message::Apr(_) => {}
            Message::SidrReq(req) => self.handle_sidr_req(now, peer, tid, &req),
            Message::SidrRep(rep) => self.handle_sidr_rep(now, peer, &rep),
        }
    }

    /// The connection that both ends' ids and the peer's address name, unless it has ended.
    fn known(&mut self, id: u32, peer: IpAddr, remote_id: u32) -> Option<&mut Connection> {
        self.connections
            .get_mut(&id)
            .filter(|c| c.peer == peer && c.remote_id == remote_id && c.state != State::TimeWait)
    }

    /// A deadline has passed.
    fn expire(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        match c.state {
            State::ReqSent | State::RepSent | State::DreqSent | State::SidrReqSent => {
                self.send_again(now, id);
            }
            // The peer's time is over.
            State::MraReqReceived => {
                c.state = State::ReqSent;
                self.send_again(now, id);
            }
            State::MraRepReceived => {
                c.state = State::RepSent;
                self.send_again(now, id);
            }
            State::ReqReceived | State::RepReceived if now < c.decide_by => self.send_mra(id),
            State::ReqReceived | State::MraReqSent | State::RepReceived | State::MraRepSent => {
                self.reject(now, CmId(id), RejReason::TIMEOUT, &[]);
                self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
            }
            State::SidrReqReceived => {
                self.reject(now, CmId(id), RejReason::TIMEOUT, &[]);
                self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
            }
            State::TimeWait => {
                self.forget(id);
            }
            State::Established => {}
        }
    }

    /// Sends a connection's message; after the last try the peer is given up.
    fn send_again(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        if c.tries >= c.tries_max {
            return self.give_up(now, id);
        }
        let mut wait = FIRST_WAIT_NS << c.tries;
        c.tries += 1;
        if c.tries == c.tries_max {
            // The peer may take as long as was announced.
            wait = wait.max(nanoseconds(c.peer_response.min(SERVICE_TIMEOUT)));
        }
        let (peer, message) = (c.peer, c.message.clone());
        self.set_deadline(id, Some(now + wait));
        self.send(peer, message);
    }

    fn give_up(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get(&id) else {
            return;
        };
        self.events.push_back(match c.state {
            State::DreqSent => CmEvent::Disconnected { id: CmId(id) },
            _ => CmEvent::Unreachable { id: CmId(id) },
        });
        match c.state {
            State::ReqSent | State::RepSent => self.withdraw(now, id),
            _ => self.rest(now, id, None),
        }
    }

    fn set_deadline(&mut self, id: u32, deadline: Option<Time>) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        if let Some(old) = std::mem::replace(&mut c.deadline, deadline) {
            self.timers.remove(&(old, id));
        }
        if let Some(at) = deadline {
            self.timers.insert((at, id));
        }
    }

    fn send(&mut self, peer: IpAddr, message: Mad) {
        if self.out.len() < OUT_MAX {
            self.out.push_back((peer, message));
        }
    }

    /// Sends a connection's message once more because its cause came again; that costs none of its tries.
    fn repeat(&mut self, id: u32) {
        if let Some(c) = self.connections.get(&id) {
            let (peer, message) = (c.peer, c.message.clone());
            self.send(peer, message);
        }
    }

    /// Ends a connection: its ids and QPN rest. `answer` is what repetitions of its request get; without it, that the
    /// connection is stale.
    fn rest(&mut self, now: Time, id: u32, answer: Option<Mad>) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        let (undecided, service, key) = (c.state.is_undecided(), c.service, c.qp_key());
        c.state = State::TimeWait;
        c.message = answer.unwrap_or_else(|| {
            rej(
                c.tid,
                (id, c.remote_id),
                Answered::Req,
                RejReason::STALE_CONNECTION,
            )
        });
        let until = now + nanoseconds(c.rest);
        let had_qp = c.local_qpn != NO_QPN;
        if undecided {
            self.decided(service);
        }
        if self.by_qp.get(&key) == Some(&id) {
            self.by_qp.remove(&key);
        }
        if mutant!(TimeWaitSkipped) {
            return self.forget(id);
        }
        self.set_deadline(id, Some(until));
        let at_rest = if had_qp {
            &mut self.resting
        } else {
            &mut self.answered
        };
        at_rest.insert((until, id));
        if at_rest.len() > RESTING_MAX
            && let Some((_, first)) = at_rest.first().copied()
        {
            self.forget(first);
        }
    }

    fn forget(&mut self, id: u32) {
        let Some(c) = self.connections.remove(&id) else {
            return;
        };
        if let Some(at) = c.deadline {
            self.timers.remove(&(at, id));
            self.resting.remove(&(at, id));
            self.answered.remove(&(at, id));
        }
        self.qpns.remove(&(c.local_qpn, id));
        if let Some(request) = c.request {
            self.by_request.remove(&request);
        }
        if self.by_qp.get(&c.qp_key()) == Some(&id) {
            self.by_qp.remove(&c.qp_key());
        }
        if c.state.is_undecided() {
            self.decided(c.service);
        }
    }

    /// A request of a service is undecided no longer.
    fn decided(&mut self, service: ServiceId) {
        if let Some(undecided) = self.listeners.get_mut(&service) {
            *undecided = undecided.saturating_sub(1);
        }
    }

    fn new_id(&mut self) -> Option<u32> {
        if self.len() >= CONNECTIONS_MAX {
            return None;
        }
        // A peer must not guess the id of somebody else's connection. 2^24 ids for 2^16 connections: this ends soon.
        loop {
            let id = u32::from(self.slot) << 24 | self.rng.next_u32() & 0xff_ffff;
            if id != 0 && !self.connections.contains_key(&id) {
                return Some(id);
            }
        }
    }

    fn new_tid(&mut self) -> u64 {
        self.next_tid = self.next_tid.wrapping_add(1);
        self.next_tid
    }
}

/// The time of a timeout code: 4.096 us x 2^code.
fn nanoseconds(code: u8) -> u64 {
    4_096 << code.min(31)
}

/// The user's private data behind the addressing, if there is any.
fn with_addressing<const N: usize>(
    addressing: Option<IpAddressing>,
    private_data: &[u8],
) -> Result<PrivateData<N>, CmError> {
    let mut data = Vec::with_capacity(N);
    if let Some(addressing) = addressing {
        data.resize(IpAddressing::LEN, 0);
        addressing.emit(&mut data);
    }
    data.extend_from_slice(private_data);
    PrivateData::new(&data).ok_or(CmError::PrivateDataTooLong)
}

/// Takes private data apart: services named by an IP port begin theirs with the addresses.
fn without_addressing(service: ServiceId, data: &[u8]) -> (Option<IpAddressing>, Vec<u8>) {
    match service.port().and_then(|_| IpAddressing::parse(data).ok()) {
        Some(addressing) => (Some(addressing), data[IpAddressing::LEN..].to_vec()),
        None => (None, data.to_vec()),
    }
}

/// As much of `bytes` as there is room for.
fn cut<const N: usize>(bytes: &[u8]) -> PrivateData<N> {
    PrivateData::new(&bytes[..bytes.len().min(N)]).unwrap_or_default()
}

/// A REJ without more than its reason.
fn rej(tid: u64, ids: (u32, u32), answered: Answered, reason: RejReason) -> Mad {
    rej_with(tid, ids, answered, reason, &[], &[])
}

/// A REJ; `ids` are ours and the peer's. What does not fit is cut off.
fn rej_with(
    tid: u64,
    (local_comm_id, remote_comm_id): (u32, u32),
    answered: Answered,
    reason: RejReason,
    ari: &[u8],
    private_data: &[u8],
) -> Mad {
    let rej = Rej {
        local_comm_id,
        remote_comm_id,
        answered,
        reason,
        ari_len: ari.len().min(72) as u8,
        ari: *cut::<72>(ari).bytes(),
        private_data: cut(private_data),
    };
    emit(&Message::Rej(rej), tid)
}

fn emit(message: &Message, tid: u64) -> Mad {
    let mut mad = Box::new([0; MAD_LEN]);
    message.emit(tid, &mut mad);
    mad
}
