//! Connection management: two ends agree on QPNs, PSNs and depths by messages between their general services QPs. IBTA Vol 1, chapter 12.
//!
//! It does not modify QPs: as with the kernel's `ib_cm`, the user modifies the QP between the messages. The active side calls
//! [`Cm::connect`], gets [`CmEvent::Reply`], moves its QP to RTS and calls [`Cm::establish`]. The passive side calls [`Cm::listen`],
//! gets [`CmEvent::Request`], moves its QP to RTS, calls [`Cm::accept`] and gets [`CmEvent::Established`] (or [`Cm::establish`]es
//! itself when data arrives before the RTU). Either side [`Cm::disconnect`]s.
//!
//! A datagram service has no connection. Its clients ask only for its QPN and Q_Key: [`Cm::resolve`], [`CmEvent::SidrRequest`],
//! [`Cm::answer`], [`CmEvent::SidrReply`]. 12.11.
//!
//! Several devices of one address can listen for the same service: their user places the requests ([`Cm::defer_requests`]).
//!
//! Both sides exchange what rdmux needs to know in the ECE fields, never in the user's private data.
//!
//! `tests/cm_table.rs` has a table of every state and every event.

mod connection;
mod placement;
mod sidr;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;
use rdmux_wire::cm::{
    Answered, CmMessage, Extensions, IpAddressing, MAD_LEN, PrivateData, Rej, RejReason, ServiceId,
    SidrStatus,
};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};
use strum::VariantArray;

pub use self::placement::{ListenerLoad, Request};
use crate::backlog::Backlog;
use crate::device::{CmDetail, Config};
use crate::time::Time;

/// Response timeout that this side announces: 4.096 us x 2^20 = 4.3 s, the same as the kernel's.
const RESPONSE_TIMEOUT: u8 = 20;
/// Service timeout in our MRAs, for which the peer waits: 17 s. A message that is lost meanwhile costs no more than this time.
const SERVICE_TIMEOUT: u8 = 22;
/// Wait for an answer after the first try; it doubles with each try.
const FIRST_WAIT_NS: u64 = 64_000_000;
/// Messages that are sent before the peer counts as unreachable: 64 ms x (2^6 - 1) and the last wait, 8.3 s in all.
const TRIES: u8 = 7;
/// Maximum number of connections that have not ended; further requests are refused.
const CONNECTIONS_MAX: usize = 1 << 16;
/// Maximum requests of one service that its user has not decided on. Further requests are dropped, and the peer repeats them.
pub(crate) const BACKLOG_MAX: usize = 128;
/// Time that a user has to decide on a request. No peer keeps requesting for that long.
const DECISION_NS: u64 = 60_000_000_000;
/// Time that a peer has which asks for more time again and again. A peer whose user does not decide rejects before that.
const PEER_DECISION_NS: u64 = DECISION_NS + 15_000_000_000;
/// Maximum connections in TimeWait, and separately maximum requests: when full, the entry whose TimeWait ends first is forgotten.
pub(crate) const RESTING_MAX: usize = 4_096;
/// Timeout code of the time for which an answer is kept in case the request is repeated: the kernel repeats after 4.3 s.
const ANSWER_KEPT: u8 = 21;
/// Maximum messages that wait to be sent. Further messages are dropped; a timeout or their cause repeats them.
pub(crate) const OUT_MAX: usize = 256;

/// Local communication id, which names a connection of this device or a resolution of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmId(pub u32);

/// Error of requesting or accepting a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CmError {
    /// There is no such request, or it has gone: withdrawn, expired, or already decided on.
    #[error("the connection request no longer exists")]
    NoSuchRequest,
    /// More private data than the message holds.
    #[error("too much private data for the message")]
    PrivateDataTooLong,
    /// The device already has the maximum number of connections.
    #[error("too many connections")]
    NoResources,
    /// Only RC, UC and XRC have connections.
    #[error("datagram services have no connections")]
    InvalidTransport,
}

/// Parameters of one side of a connection, which the other side learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// RC, UC or XRC (in a REQ only).
    pub transport: Transport,
    /// QPN.
    pub qpn: Qpn,
    /// PSN at which the *receiver* of the message shall start sending: the sender's own receive PSN.
    pub starting_psn: Psn,
    /// READs, atomics and FLUSHes that this side can answer at a time.
    pub responder_resources: u8,
    /// READs, atomics and FLUSHes that this side wants to have in flight.
    pub initiator_depth: u8,
    /// RNR retry count that the other side shall use.
    pub rnr_retry_count: u8,
    /// Retry count that the other side shall use (in a REQ only).
    pub retry_count: u8,
    /// Set when the QP takes receives from a shared receive queue.
    pub srq: bool,
    /// Local ACK timeout code (in a REQ only).
    pub ack_timeout: u8,
    /// Path MTU (in a REQ only).
    pub path_mtu: PathMtu,
    /// Traffic class of the path without ECN (in a REQ only).
    pub traffic_class: u8,
    /// Extensions of an rdmux peer; `None` for any other peer. The device fills them in when it sends.
    pub extensions: Option<Extensions>,
    /// Own side: send no extensions to the peer, since the code that brings up the QP does not know them.
    pub plain: bool,
}

/// Names of both ends of a connection: enough to end the connection when its device has gone.
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

/// Event of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEvent {
    /// A peer requests a connection to a service that has a listener.
    Request {
        /// The connection, which the user must accept or reject.
        id: CmId,
        /// The service.
        service: ServiceId,
        /// The peer's address.
        peer: IpAddr,
        /// Addresses and ports, if the peer sent them.
        addressing: Option<IpAddressing>,
        /// Parameters of the peer's side.
        remote: Endpoint,
        /// The user's private data, without the addressing.
        private_data: Vec<u8>,
    },
    /// The peer accepted: the user can move its QP and establish the connection.
    Reply {
        /// The connection.
        id: CmId,
        /// Parameters of the peer's side.
        remote: Endpoint,
        /// The user's private data.
        private_data: Vec<u8>,
    },
    /// The peer is ready too: the connection is established.
    Established {
        /// The connection.
        id: CmId,
    },
    /// The peer refused, or withdrew its request. The id is no longer valid.
    Rejected {
        /// The connection.
        id: CmId,
        /// Reason of the rejection.
        reason: RejReason,
        /// Values that the peer would have accepted; their meaning depends on the reason. 12.6.7.2.
        ari: Vec<u8>,
        /// The user's private data.
        private_data: Vec<u8>,
    },
    /// The peer did not answer. The id is no longer valid.
    Unreachable {
        /// The connection.
        id: CmId,
    },
    /// Either side ended the connection, or the user did not decide on its request or reply within a minute. The id is no longer valid.
    Disconnected {
        /// The connection.
        id: CmId,
    },
    /// A peer asks for the QP of a datagram service that has a listener.
    SidrRequest {
        /// The request, which the user must answer.
        id: CmId,
        /// The service.
        service: ServiceId,
        /// The peer's address.
        peer: IpAddr,
        /// Addresses and ports, if the peer sent them.
        addressing: Option<IpAddressing>,
        /// The user's private data, without the addressing.
        private_data: Vec<u8>,
    },
    /// The peer answered. The id is no longer valid.
    SidrReply {
        /// The resolution.
        id: CmId,
        /// Outcome. QPN and Q_Key are valid only with [`SidrStatus::VALID`].
        status: SidrStatus,
        /// QP that serves the datagrams.
        qpn: Qpn,
        /// Q_Key of that QP.
        qkey: u32,
        /// The user's private data.
        private_data: Vec<u8>,
    },
}

/// State of a connection as inspection shows it. IBTA Vol 1, 12.9.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum CmState {
    /// A listener waits for connections to a service.
    Listen,
    /// This side has requested the connection.
    Connect,
    /// The peer has requested the connection.
    Accept,
    /// The connection is established.
    Established,
    /// The connection is being ended.
    Disconnect,
    /// The connection has ended; its ids and QPNs are not reused yet.
    TimeWait,
    /// The QP of a datagram service is being resolved. 12.11.
    Resolve,
}

/// Bit that marks a service with a listener in the numbers that inspection uses for connections.
pub(crate) const LISTENER: u64 = 1 << 63;

/// States of a connection. IBTA Vol 1, 12.9.6 and 12.9.7; of a resolution, 12.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionState {
    /// Active: REQ sent, waits for REP.
    ReqSent,
    /// Active: the peer needs more time for its REP.
    MraReqReceived,
    /// Active: REP received, the user moves its QP to RTS.
    RepReceived,
    /// Active: the user needs more time, and an MRA has been sent.
    MraRepSent,
    /// Passive: REQ received, the user has yet to decide.
    ReqReceived,
    /// Passive: the user needs more time, and an MRA has been sent.
    MraReqSent,
    /// Passive: REP sent, waits for RTU.
    RepSent,
    /// Passive: the peer needs more time for its RTU.
    MraRepReceived,
    Established,
    /// DREQ sent, waits for DREP.
    DreqSent,
    /// Ended, and the user has been notified. The id and the QPN are not reused until no packet of the connection is in flight. A
    /// repeated request gets the same answer again.
    TimeWait,
    /// SIDR_REQ sent, waits for SIDR_REP.
    SidrReqSent,
    /// SIDR_REQ received, the user has yet to decide.
    SidrReqReceived,
}

impl ConnectionState {
    fn to_public(self) -> CmState {
        match self {
            ConnectionState::ReqSent
            | ConnectionState::MraReqReceived
            | ConnectionState::RepReceived
            | ConnectionState::MraRepSent => CmState::Connect,
            ConnectionState::ReqReceived
            | ConnectionState::MraReqSent
            | ConnectionState::RepSent
            | ConnectionState::MraRepReceived => CmState::Accept,
            ConnectionState::Established => CmState::Established,
            ConnectionState::DreqSent => CmState::Disconnect,
            ConnectionState::TimeWait => CmState::TimeWait,
            ConnectionState::SidrReqSent | ConnectionState::SidrReqReceived => CmState::Resolve,
        }
    }

    #[cfg(test)]
    pub(crate) const COUNT: usize = ConnectionState::SidrReqReceived as usize + 1;

    /// Returns whether the user has yet to decide on a request.
    fn is_undecided(self) -> bool {
        matches!(
            self,
            ConnectionState::ReqReceived | ConnectionState::MraReqSent | ConnectionState::SidrReqReceived
        )
    }
}

/// QPN of a connection that has no QP here yet.
const NO_QPN: Qpn = Qpn::new(0);

/// Key of a request: the peer's address, its GUID (`None` for a resolution), its communication or request id.
type RequestKey = (IpAddr, Option<u64>, u32);
/// Key of a peer's QP: its address, its GUID, its QPN.
type QpKey = (IpAddr, u64, Qpn);
/// A message that is ready to be sent.
type Mad = Box<[u8; MAD_LEN]>;

#[derive(Debug)]
struct Connection {
    state: ConnectionState,
    service: ServiceId,
    transport: Transport,
    peer: IpAddr,
    /// Passive: the request that the connection came from, and its transaction id.
    request: Option<RequestKey>,
    request_tid: u64,
    local_qpn: Qpn,
    remote_id: u32,
    remote_guid: u64,
    remote_qpn: Qpn,
    /// Passive: set when the REQ had our extensions.
    extended: bool,
    tid: u64,
    /// The message that is repeated until it is answered, or when the peer repeats the message that caused it. While the user has yet to
    /// decide on a request: the request.
    message: Mad,
    tries: u8,
    tries_max: u8,
    /// Timeout code of the time that the peer may take to answer.
    peer_response: u8,
    /// Timeout code of TimeWait, for which ids and QPNs are not reused. 12.9.8.4.
    rest: u8,
    /// Time until which the user may decide on a request, or the peer that was asked.
    decide_by: Time,
    deadline: Option<Time>,
}

impl Connection {
    fn new(state: ConnectionState, service: ServiceId, peer: IpAddr, tid: u64) -> Connection {
        Connection {
            state,
            service,
            transport: Transport::Rc,
            peer,
            request: None,
            request_tid: tid,
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

/// A service for which the user listens.
#[derive(Clone, Copy, Debug, Default)]
struct Listener {
    /// Requests that the user has not decided on.
    undecided: usize,
    /// All requests.
    requests: u64,
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
    listeners: HashMap<ServiceId, Listener>,
    /// Set when the user places requests, and the requests to place.
    defers: bool,
    deferred: Vec<Request>,
    connections: HashMap<u32, Connection>,
    /// Passive side: connections by their requests.
    by_request: HashMap<RequestKey, u32>,
    /// Connections that have not ended, by the peer's QP as far as it is known.
    by_qp: HashMap<QpKey, u32>,
    /// Connections in TimeWait, by the end of TimeWait.
    resting: BTreeSet<(Time, u32)>,
    /// Likewise requests and resolutions that never had a QP here. They cost a peer little, so they must not displace connections.
    answered: BTreeSet<(Time, u32)>,
    /// Own QPNs of connections in any state.
    qpns: BTreeSet<(Qpn, u32)>,
    timers: BTreeSet<(Time, u32)>,
    out: VecDeque<(IpAddr, Mad)>,
    events: VecDeque<CmEvent>,
    /// UDP source port of messages to general services QPs.
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
            defers: false,
            deferred: Vec::new(),
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

    /// Starts accepting requests for a service: connections to it and resolutions of it.
    pub fn listen(&mut self, service: ServiceId) {
        self.listeners.entry(service).or_default();
    }

    /// Starts refusing requests for a service, and refuses those that the user has not decided on.
    pub fn unlisten(&mut self, now: Time, service: ServiceId) {
        for id in self.undecided(service) {
            self.reject(now, CmId(id), RejReason::INVALID_SERVICE_ID, &[]);
        }
        self.listeners.remove(&service);
    }

    /// Forgets a connection without a message to the peer, as a crash would. The peer learns of it when it next sends a CM message.
    pub fn destroy(&mut self, id: CmId) {
        self.forget(id.0);
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Returns the number of connections and resolutions in any state but TimeWait.
    pub fn len(&self) -> usize {
        self.connections.len() - self.resting()
    }

    /// Returns whether there is no connection or resolution outside TimeWait.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the communication ids of connections and resolutions, and the services with a listener, marked with [`LISTENER`].
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

    /// Returns the time by which a connection that is ending or has ended changes state by itself; `None` if its TimeWait is over, or
    /// if it never existed. 12.9.8.4.
    pub fn next_deadline(&self, id: CmId) -> Option<Time> {
        self.connections.get(&id.0)?.deadline
    }

    /// Returns the number of connections and resolutions in TimeWait, whose ids and QPNs are not reused.
    pub fn resting(&self) -> usize {
        self.resting.len() + self.answered.len()
    }

    // Called by the device.

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

    /// Returns whether a QPN belongs to a connection, whose QP may be gone, or did so until recently: packets to that QPN may still be
    /// in flight. 12.9.8.4.
    pub(crate) fn has_qpn(&self, qpn: Qpn) -> bool {
        self.qpns
            .range((qpn, 0)..)
            .next()
            .is_some_and(|(at, _)| *at == qpn)
    }

    /// Returns the state of a connection, for tests.
    #[cfg(test)]
    pub(crate) fn state(&self, id: CmId) -> Option<ConnectionState> {
        self.connections.get(&id.0).map(|c| c.state)
    }

    /// Handles a MAD. Drops anything that is not a CM message, or is one of another version: an unsolicited MAD has no response that
    /// could report the error. 13.4.6.
    pub(crate) fn handle_mad(&mut self, now: Time, peer: IpAddr, mad: &[u8]) {
        let Ok((tid, message)) = CmMessage::parse(mad) else {
            return;
        };
        match message {
            CmMessage::Req(req) => self.receive_request(now, Request::connect(peer, tid, req)),
            CmMessage::Rep(rep) => self.handle_rep(now, peer, tid, &rep),
            CmMessage::Rtu(rtu) => self.handle_rtu(peer, tid, &rtu),
            CmMessage::Rej(rej) => self.handle_rej(now, peer, &rej),
            CmMessage::Mra(mra) => self.handle_mra(now, peer, &mra),
            CmMessage::Dreq(dreq) => self.handle_dreq(now, peer, tid, &dreq),
            CmMessage::Drep(drep) => self.handle_drep(now, peer, &drep),
            CmMessage::Lap(lap) => self.handle_lap(peer, tid, &lap),
            // An APR answers a LAP, and this side never sends one.
            CmMessage::Apr(_) => {}
            CmMessage::SidrReq(req) => self.receive_request(now, Request::resolve(peer, tid, req)),
            CmMessage::SidrRep(rep) => self.handle_sidr_rep(now, peer, &rep),
        }
    }

    /// Returns the connection with these ids of both ends and this peer address, unless it has ended.
    fn known(&mut self, id: u32, peer: IpAddr, remote_id: u32) -> Option<&mut Connection> {
        self.connections
            .get_mut(&id)
            .filter(|c| c.peer == peer && c.remote_id == remote_id && c.state != ConnectionState::TimeWait)
    }

    /// Handles an expired deadline.
    fn expire(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        match c.state {
            ConnectionState::ReqSent
            | ConnectionState::RepSent
            | ConnectionState::DreqSent
            | ConnectionState::SidrReqSent => {
                self.send_again(now, id);
            }
            ConnectionState::MraReqReceived | ConnectionState::MraRepReceived if now >= c.decide_by => {
                self.give_up(now, id)
            }
            // The time that the peer asked for is over.
            ConnectionState::MraReqReceived => {
                c.state = ConnectionState::ReqSent;
                self.send_again(now, id);
            }
            ConnectionState::MraRepReceived => {
                c.state = ConnectionState::RepSent;
                self.send_again(now, id);
            }
            ConnectionState::ReqReceived | ConnectionState::RepReceived if now < c.decide_by => {
                self.send_mra(id)
            }
            ConnectionState::ReqReceived
            | ConnectionState::MraReqSent
            | ConnectionState::RepReceived
            | ConnectionState::MraRepSent => {
                self.reject(now, CmId(id), RejReason::TIMEOUT, &[]);
                self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
            }
            ConnectionState::SidrReqReceived => {
                self.reject(now, CmId(id), RejReason::TIMEOUT, &[]);
                self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
            }
            ConnectionState::TimeWait => {
                self.forget(id);
            }
            ConnectionState::Established => {}
        }
    }

    /// Sends a connection's message; after the last try, gives up the peer.
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
            // The peer may take as long as it announced.
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
            ConnectionState::DreqSent => CmEvent::Disconnected { id: CmId(id) },
            _ => CmEvent::Unreachable { id: CmId(id) },
        });
        match c.state {
            ConnectionState::ReqSent
            | ConnectionState::MraReqReceived
            | ConnectionState::RepSent
            | ConnectionState::MraRepReceived => {
                self.withdraw(now, id);
            }
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

    /// Sends a connection's message once more because the peer repeated the message that caused it. Does not count as a try.
    fn repeat(&mut self, id: u32) {
        if let Some(c) = self.connections.get(&id) {
            let (peer, message) = (c.peer, c.message.clone());
            self.send(peer, message);
        }
    }

    /// Moves a connection to TimeWait. Repetitions of its request get `answer`, or without one a rejection as a stale connection.
    fn rest(&mut self, now: Time, id: u32, answer: Option<Mad>) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        let (undecided, service, key) = (c.state.is_undecided(), c.service, c.qp_key());
        c.state = ConnectionState::TimeWait;
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

    /// Counts one undecided request of a service less.
    fn decided(&mut self, service: ServiceId) {
        if let Some(listener) = self.listeners.get_mut(&service) {
            listener.undecided = listener.undecided.saturating_sub(1);
        }
    }

    /// Counts a request of a service, which the user has yet to decide on.
    fn requested(&mut self, service: ServiceId) {
        if let Some(listener) = self.listeners.get_mut(&service) {
            listener.undecided += 1;
            listener.requests += 1;
        }
    }

    fn new_id(&mut self) -> Option<u32> {
        if self.len() >= CONNECTIONS_MAX {
            return None;
        }
        // A peer must not guess the id of another connection. With 2^24 ids for 2^16 connections this loop ends soon.
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

/// Returns the time of a timeout code: 4.096 us x 2^code.
fn nanoseconds(code: u8) -> u64 {
    4_096 << code.min(31)
}

/// Returns private data that consists of the addressing, if any, and the user's private data.
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

/// Splits private data: that of services named by an IP port begins with the addresses.
fn without_addressing(service: ServiceId, data: &[u8]) -> (Option<IpAddressing>, Vec<u8>) {
    match service.port().and_then(|_| IpAddressing::parse(data).ok()) {
        Some(addressing) => (Some(addressing), data[IpAddressing::LEN..].to_vec()),
        None => (None, data.to_vec()),
    }
}

/// Returns the part of `bytes` that fits.
fn cut<const N: usize>(bytes: &[u8]) -> PrivateData<N> {
    PrivateData::new(&bytes[..bytes.len().min(N)]).unwrap_or_default()
}

/// Returns a REJ that carries only a reason.
fn rej(tid: u64, ids: (u32, u32), answered: Answered, reason: RejReason) -> Mad {
    rej_with(tid, ids, answered, reason, &[], &[])
}

/// Returns a REJ; `ids` are ours and the peer's. Data that does not fit is cut off.
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
    emit(&CmMessage::Rej(rej), tid)
}

fn emit(message: &CmMessage, tid: u64) -> Mad {
    let mut mad = Box::new([0; MAD_LEN]);
    message.emit(tid, &mut mad);
    mad
}
