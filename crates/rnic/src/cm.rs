//! Connection management: two ends agree on QPNs, PSNs and depths by messages between their general services QPs. IBTA Vol 1,
//! chapter 12.
//!
//! It moves no QP: as with the kernel's `ib_cm`, whoever uses it modifies the QP between the messages. The active side
//! calls [`Cm::connect`], gets [`CmEvent::Reply`], moves its QP to RTS and calls [`Cm::establish`]. The passive side
//! calls [`Cm::listen`], gets [`CmEvent::Request`], moves its QP to RTS, calls [`Cm::accept`] and gets
//! [`CmEvent::Established`] (or [`Cm::establish`]es itself when data comes before the RTU). Either side [`Cm::disconnect`]s.
//!
//! Both sides say through ECE what rdmux needs to know, never in the user's private data.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use rand_chacha::ChaCha12Rng;
use rand_core::RngCore;
use rdmux_wire::cm::{
    Answered, Drep, Dreq, Extensions, IpAddressing, MAD_LEN, Message, Mra, PrivateData, Rej, RejReason, Rep,
    Req, Rtu, ServiceId, to_gid,
};
use rdmux_wire::roce::{PKEY_DEFAULT, PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use crate::device::Config;
use crate::time::Time;

/// Response timeout that we announce: 4.096 us x 2^20 = 4.3 s, as the kernel does.
const RESPONSE_TIMEOUT: u8 = 20;
/// First wait for an answer; it doubles with each try.
const FIRST_WAIT_NS: u64 = 64_000_000;
/// Messages sent before the peer is given up: 64 ms x (2^7 - 1) = 8.1 s in all.
const TRIES: u8 = 7;
/// Connections under way in all; more are refused.
const CONNECTIONS_MAX: usize = 1 << 16;
/// Requests of one service that its user has not decided on; more are dropped, and come again.
pub(crate) const BACKLOG_MAX: usize = 128;
/// Time that a user has to decide on a request. No peer asks for that long.
const DECISION_NS: u64 = 60_000_000_000;
/// Messages that wait to be sent; more are dropped, and come again.
pub(crate) const OUT_MAX: usize = 256;

/// Local communication id: names a connection of this device.
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
}

/// What one side brings into a connection, and learns of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
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
    /// Local ACK timeout code (in a REQ only).
    pub ack_timeout: u8,
    /// Path MTU (in a REQ only).
    pub path_mtu: PathMtu,
    /// What an rdmux peer told besides; `None` for any other peer. Filled in by the device when sending.
    pub extensions: Option<Extensions>,
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
    /// The peer refused; the id is gone.
    Rejected {
        /// The connection.
        id: CmId,
        /// Why.
        reason: RejReason,
        /// The user's private data.
        private_data: Vec<u8>,
    },
    /// No answer came; the id is gone.
    Unreachable {
        /// The connection.
        id: CmId,
    },
    /// The connection has ended, by either side, or its request was not decided on within a minute; the id is gone.
    Disconnected {
        /// The connection.
        id: CmId,
    },
}

/// States of a connection. IBTA Vol 1, 12.9.6 and 12.9.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Active: REQ sent, waits for REP.
    ReqSent,
    /// Active: REP received, the user moves its QP.
    RepReceived,
    /// Passive: REQ received, the user decides.
    ReqReceived,
    /// Passive: REP sent, waits for RTU.
    RepSent,
    Established,
    /// DREQ sent, waits for DREP.
    DreqSent,
}

/// Names a request: the peer's address, its GUID, its communication id.
type RequestKey = (IpAddr, u64, u32);
/// Names a peer's QP: its address, its GUID, its QPN.
type QpKey = (IpAddr, u64, Qpn);

#[derive(Debug)]
struct Connection {
    state: State,
    service: ServiceId,
    peer: IpAddr,
    /// Passive: the request that it came from.
    request: Option<RequestKey>,
    remote_id: u32,
    remote_guid: u64,
    remote_qpn: Qpn,
    /// Passive: the REQ had our extensions.
    extended: bool,
    tid: u64,
    /// The message that is sent again until it is answered, or when its cause comes again.
    message: Box<[u8; MAD_LEN]>,
    tries: u8,
    deadline: Option<Time>,
}

impl Connection {
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
    /// The peers' QPs, as far as they are known, to connections.
    by_qp: HashMap<QpKey, u32>,
    out: VecDeque<(IpAddr, Box<[u8; MAD_LEN]>)>,
    events: VecDeque<CmEvent>,
    /// UDP source port of what is sent to general services QPs.
    src_port: u16,
    /// No connection has a deadline before this. An answer that cancels one leaves it: waking once for nothing costs less
    /// than looking through all connections at each poll.
    wake_at: Option<Time>,
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
            out: VecDeque::new(),
            events: VecDeque::new(),
            src_port: config.gsi_src_port,
            wake_at: None,
        }
    }

    fn ece(&self) -> Option<rdmux_wire::cm::Ece> {
        let extensions = Extensions {
            version: Extensions::VERSION,
            receive_window_log2: self.window_log2,
        };
        Some(extensions.to_ece())
    }

    /// Accepts requests for a service from now on.
    pub fn listen(&mut self, service: ServiceId) {
        self.listeners.entry(service).or_insert(0);
    }

    /// Refuses requests for a service from now on, and those that were not decided on.
    pub fn unlisten(&mut self, service: ServiceId) {
        let undecided = |c: &Connection| c.state == State::ReqReceived && c.service == service;
        let mut ids: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| undecided(c))
            .map(|(id, _)| *id)
            .collect();
        // A run must not depend on the order of a hash map.
        ids.sort_unstable();
        for id in ids {
            self.reject(CmId(id), RejReason::INVALID_SERVICE_ID, &[]);
        }
        self.listeners.remove(&service);
    }

    /// Asks the device at `peer` for a connection to `service`. Private data: 92 bytes, or 56 beside addressing.
    pub fn connect(
        &mut self,
        now: Time,
        peer: IpAddr,
        service: ServiceId,
        addressing: Option<IpAddressing>,
        local: &Endpoint,
        private_data: &[u8],
    ) -> Result<CmId, CmError> {
        let mut data = [0u8; 92];
        let room = match addressing {
            Some(addressing) => {
                addressing.emit(&mut data);
                &mut data[IpAddressing::LEN..]
            }
            None => &mut data[..],
        };
        room.get_mut(..private_data.len())
            .ok_or(CmError::PrivateDataTooLong)?
            .copy_from_slice(private_data);
        let id = self.new_id().ok_or(CmError::NoResources)?;
        let tid = self.new_tid();
        let req = Req {
            local_comm_id: id,
            ece: self.ece(),
            service_id: service,
            ca_guid: self.guid,
            qkey: 0,
            qpn: local.qpn,
            responder_resources: local.responder_resources,
            initiator_depth: local.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            transport: Transport::Rc,
            flow_control: false,
            starting_psn: local.starting_psn,
            local_response_timeout: RESPONSE_TIMEOUT,
            retry_count: local.retry_count,
            pkey: PKEY_DEFAULT,
            path_mtu: local.path_mtu,
            rnr_retry_count: local.rnr_retry_count,
            max_cm_retries: 15,
            srq: false,
            src_gid: to_gid(self.address),
            dst_gid: to_gid(peer),
            flow_label: 0,
            packet_rate: 0,
            traffic_class: 0,
            hop_limit: 64,
            service_level: 0,
            local_ack_timeout: local.ack_timeout,
            private_data: PrivateData::new(&data).ok_or(CmError::PrivateDataTooLong)?,
        };
        let connection = Connection {
            state: State::ReqSent,
            service,
            peer,
            request: None,
            remote_id: 0,
            remote_guid: 0,
            remote_qpn: Qpn::new(0),
            extended: false,
            tid,
            message: emit(&Message::Req(req), tid),
            tries: 0,
            deadline: None,
        };
        self.connections.insert(id, connection);
        self.send_again(now, id);
        Ok(CmId(id))
    }

    /// Accepts a request. Private data: 196 bytes. After an error the request stands as it did.
    pub fn accept(
        &mut self,
        now: Time,
        id: CmId,
        local: &Endpoint,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let (extensions, guid) = (self.ece(), self.guid);
        let c = self
            .connections
            .get_mut(&id.0)
            .filter(|c| c.state == State::ReqReceived)
            .ok_or(CmError::NoSuchRequest)?;
        let private_data = PrivateData::new(private_data).ok_or(CmError::PrivateDataTooLong)?;
        let rep = Rep {
            local_comm_id: id.0,
            remote_comm_id: c.remote_id,
            // Only to one that asked: librdmacm gives up a connection when its device knows nothing of the ECE in a REP.
            ece: extensions.filter(|_| c.extended),
            qkey: 0,
            qpn: local.qpn,
            eecn: 0,
            starting_psn: local.starting_psn,
            responder_resources: local.responder_resources,
            initiator_depth: local.initiator_depth,
            target_ack_delay: 15,
            failover: 0,
            flow_control: false,
            rnr_retry_count: local.rnr_retry_count,
            srq: false,
            ca_guid: guid,
            private_data,
        };
        c.message = emit(&Message::Rep(rep), c.tid);
        c.state = State::RepSent;
        c.tries = 0;
        let service = c.service;
        self.decided(service);
        self.send_again(now, id.0);
        Ok(())
    }

    /// Refuses a request, or a reply. Private data beyond 148 bytes is cut off.
    pub fn reject(&mut self, id: CmId, reason: RejReason, private_data: &[u8]) {
        let Some(c) = self.forget(id.0) else { return };
        let answered = if c.state == State::ReqReceived {
            Answered::Req
        } else {
            Answered::Rep
        };
        let data = PrivateData::new(&private_data[..private_data.len().min(148)]).unwrap_or_default();
        self.send_rej(c.peer, c.tid, (id.0, c.remote_id), answered, reason, data);
    }

    /// The user's QP is ready: after a reply the peer is told; on the passive side data came before the peer's own message.
    pub fn establish(&mut self, id: CmId) {
        let Some(c) = self.connections.get_mut(&id.0) else {
            return;
        };
        match c.state {
            State::RepReceived => {
                let rtu = Rtu {
                    local_comm_id: id.0,
                    remote_comm_id: c.remote_id,
                    private_data: PrivateData::default(),
                };
                c.message = emit(&Message::Rtu(rtu), c.tid);
            }
            State::RepSent => self.events.push_back(CmEvent::Established { id }),
            _ => return,
        }
        let tell = c.state == State::RepReceived;
        c.state = State::Established;
        c.deadline = None;
        if tell {
            let (peer, message) = (c.peer, c.message.clone());
            self.send(peer, message);
        }
    }

    /// Ends a connection; [`CmEvent::Disconnected`] follows when the peer has agreed or does not answer.
    pub fn disconnect(&mut self, now: Time, id: CmId) {
        let tid = self.new_tid();
        let Some(c) = self.connections.get_mut(&id.0) else {
            return;
        };
        match c.state {
            State::Established | State::RepSent | State::RepReceived => {
                let dreq = Dreq {
                    local_comm_id: id.0,
                    remote_comm_id: c.remote_id,
                    remote_qpn: c.remote_qpn,
                    private_data: PrivateData::default(),
                };
                c.tid = tid;
                c.message = emit(&Message::Dreq(dreq), tid);
                c.state = State::DreqSent;
                c.tries = 0;
                self.send_again(now, id.0);
            }
            State::ReqReceived => self.reject(id, RejReason::CONSUMER, &[]),
            State::ReqSent => {
                self.forget(id.0);
            }
            State::DreqSent => {}
        }
    }

    /// Forgets a connection without a word. The peer learns of it when it asks.
    pub fn destroy(&mut self, id: CmId) {
        self.forget(id.0);
    }

    /// Something that happened to a connection.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Connections there are, in any state.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    // Driven by the device.

    pub(crate) fn poll_transmit(&mut self) -> Option<(IpAddr, u16, Box<[u8; MAD_LEN]>)> {
        let (peer, mad) = self.out.pop_front()?;
        Some((peer, self.src_port, mad))
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.wake_at
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        if self.wake_at.is_none_or(|at| at > now) {
            return;
        }
        let mut due: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| c.deadline.is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        due.sort_unstable();
        for id in due {
            self.send_again(now, id);
        }
        self.wake_at = self.connections.values().filter_map(|c| c.deadline).min();
    }

    pub(crate) fn handle_mad(&mut self, now: Time, peer: IpAddr, mad: &[u8]) {
        let Ok((tid, message)) = Message::parse(mad) else {
            return;
        };
        match message {
            Message::Req(req) => self.handle_req(now, peer, tid, &req),
            Message::Rep(rep) => self.handle_rep(peer, tid, &rep),
            Message::Rtu(rtu) => self.handle_rtu(peer, &rtu),
            Message::Rej(rej) => self.handle_rej(peer, &rej),
            Message::Mra(mra) => self.handle_mra(now, peer, &mra),
            Message::Dreq(dreq) => self.handle_dreq(peer, tid, &dreq),
            Message::Drep(drep) => {
                if self
                    .known(drep.remote_comm_id, peer, drep.local_comm_id)
                    .is_some_and(|c| c.state == State::DreqSent)
                {
                    self.ended(drep.remote_comm_id);
                }
            }
            Message::SidrReq(_) | Message::SidrRep(_) => {}
        }
    }

    /// The connection that both ends' ids and the peer's address name.
    fn known(&mut self, id: u32, peer: IpAddr, remote_id: u32) -> Option<&mut Connection> {
        self.connections
            .get_mut(&id)
            .filter(|c| c.peer == peer && c.remote_id == remote_id)
    }

    fn handle_req(&mut self, now: Time, peer: IpAddr, tid: u64, req: &Req) {
        let key = (peer, req.ca_guid, req.local_comm_id);
        if let Some(id) = self.by_request.get(&key).copied() {
            // The same request again: the answer, if there is one yet. That costs none of our own tries.
            if let Some(c) = self.connections.get(&id)
                && c.state == State::RepSent
            {
                let message = c.message.clone();
                self.send(peer, message);
            }
            return;
        }
        let reject = |cm: &mut Cm, reason| {
            cm.send_rej(
                peer,
                tid,
                (0, req.local_comm_id),
                Answered::Req,
                reason,
                PrivateData::default(),
            );
        };
        let Some(undecided) = self.listeners.get(&req.service_id).copied() else {
            return reject(self, RejReason::INVALID_SERVICE_ID);
        };
        if req.transport != Transport::Rc {
            return reject(self, RejReason::INVALID_TRANSPORT);
        }
        if req.dst_gid != to_gid(self.address) {
            return reject(self, RejReason::INVALID_GID);
        }
        // The peer uses a QP that we still take for connected: it has forgotten us. 12.9.8.3.1.
        if let Some(id) = self.by_qp.get(&(peer, req.ca_guid, req.qpn)).copied() {
            reject(self, RejReason::STALE_CONNECTION);
            self.disconnect(now, CmId(id));
            return;
        }
        // In silence, as TCP does: the peer asks again, and there may be room then.
        if undecided >= BACKLOG_MAX {
            return;
        }
        let Some(id) = self.new_id() else {
            return reject(self, RejReason::NO_RESOURCES);
        };
        // Services named by an IP port begin their private data with the addresses.
        let data = req.private_data.bytes();
        let addressing = req.service_id.port().and_then(|_| IpAddressing::parse(data).ok());
        let skip = if addressing.is_some() {
            IpAddressing::LEN
        } else {
            0
        };
        let extensions = req.ece.and_then(Extensions::from_ece);
        let connection = Connection {
            state: State::ReqReceived,
            service: req.service_id,
            peer,
            request: Some(key),
            remote_id: req.local_comm_id,
            remote_guid: req.ca_guid,
            remote_qpn: req.qpn,
            extended: extensions.is_some(),
            tid,
            message: Box::new([0; MAD_LEN]),
            tries: 0,
            deadline: None,
        };
        self.by_request.insert(key, id);
        self.by_qp.insert(connection.qp_key(), id);
        self.connections.insert(id, connection);
        self.listeners.insert(req.service_id, undecided + 1);
        self.wait_until(id, now + DECISION_NS);
        self.events.push_back(CmEvent::Request {
            id: CmId(id),
            service: req.service_id,
            peer,
            addressing,
            remote: Endpoint {
                qpn: req.qpn,
                starting_psn: req.starting_psn,
                responder_resources: req.responder_resources,
                initiator_depth: req.initiator_depth,
                rnr_retry_count: req.rnr_retry_count,
                retry_count: req.retry_count,
                ack_timeout: req.local_ack_timeout,
                path_mtu: req.path_mtu,
                extensions,
            },
            private_data: data[skip..].to_vec(),
        });
    }

    fn handle_rep(&mut self, peer: IpAddr, tid: u64, rep: &Rep) {
        let id = rep.remote_comm_id;
        let Some(c) = self.connections.get_mut(&id).filter(|c| c.peer == peer) else {
            // The id that the peer takes for ours, by which it knows that it is meant.
            let ids = (id, rep.local_comm_id);
            return self.send_rej(
                peer,
                tid,
                ids,
                Answered::Rep,
                RejReason::INVALID_COMM_ID,
                PrivateData::default(),
            );
        };
        match c.state {
            State::ReqSent => {
                c.state = State::RepReceived;
                c.remote_id = rep.local_comm_id;
                c.remote_guid = rep.ca_guid;
                c.remote_qpn = rep.qpn;
                c.deadline = None;
                self.by_qp.insert(c.qp_key(), id);
                self.events.push_back(CmEvent::Reply {
                    id: CmId(id),
                    remote: Endpoint {
                        qpn: rep.qpn,
                        starting_psn: rep.starting_psn,
                        responder_resources: rep.responder_resources,
                        initiator_depth: rep.initiator_depth,
                        rnr_retry_count: rep.rnr_retry_count,
                        retry_count: 0,
                        ack_timeout: 0,
                        path_mtu: PathMtu::Bytes4096,
                        extensions: rep.ece.and_then(Extensions::from_ece),
                    },
                    private_data: rep.private_data.bytes().to_vec(),
                });
            }
            // Our RTU was lost.
            State::Established if c.remote_id == rep.local_comm_id => {
                let message = c.message.clone();
                self.send(peer, message);
            }
            _ => {}
        }
    }

    fn handle_rtu(&mut self, peer: IpAddr, rtu: &Rtu) {
        let id = rtu.remote_comm_id;
        if self
            .known(id, peer, rtu.local_comm_id)
            .is_some_and(|c| c.state == State::RepSent)
        {
            self.establish(CmId(id));
        }
    }

    fn handle_rej(&mut self, peer: IpAddr, rej: &Rej) {
        let id = rej.remote_comm_id;
        // Until the peer has answered, its id is not known. Afterwards a REJ that names another one is stale or made up.
        let Some(c) = self.connections.get(&id).filter(|c| c.peer == peer) else {
            return;
        };
        if c.state != State::ReqSent && c.remote_id != rej.local_comm_id {
            return;
        }
        let established = matches!(c.state, State::Established | State::DreqSent);
        self.forget(id);
        self.events.push_back(if established {
            CmEvent::Disconnected { id: CmId(id) }
        } else {
            let private_data = rej.private_data.bytes().to_vec();
            CmEvent::Rejected {
                id: CmId(id),
                reason: rej.reason,
                private_data,
            }
        });
    }

    fn handle_mra(&mut self, now: Time, peer: IpAddr, mra: &Mra) {
        // The peer needs more time: wait that long, once, before asking again. 12.6.6.
        let id = mra.remote_comm_id;
        let asked = |c: &Connection| c.peer == peer && c.deadline.is_some() && c.state != State::ReqReceived;
        if self.connections.get(&id).is_some_and(asked) {
            self.wait_until(id, now + (4_096u64 << mra.service_timeout.min(24)));
        }
    }

    fn handle_dreq(&mut self, peer: IpAddr, tid: u64, dreq: &Dreq) {
        let id = dreq.remote_comm_id;
        let drep = Drep {
            local_comm_id: id,
            remote_comm_id: dreq.local_comm_id,
            private_data: PrivateData::default(),
        };
        // Also for a connection that has gone: the peer only wants to hear that it has.
        self.send(peer, emit(&Message::Drep(drep), tid));
        let in_use = |c: &mut Connection| !matches!(c.state, State::ReqSent | State::ReqReceived);
        if self.known(id, peer, dreq.local_comm_id).is_some_and(in_use) {
            self.ended(id);
        }
    }

    fn ended(&mut self, id: u32) {
        if self.forget(id).is_some() {
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
        }
    }

    /// A request of a service is undecided no longer.
    fn decided(&mut self, service: ServiceId) {
        if let Some(undecided) = self.listeners.get_mut(&service) {
            *undecided = undecided.saturating_sub(1);
        }
    }

    fn wait_until(&mut self, id: u32, deadline: Time) {
        if let Some(c) = self.connections.get_mut(&id) {
            c.deadline = Some(deadline);
            self.wake_at = Some(self.wake_at.map_or(deadline, |at| at.min(deadline)));
        }
    }

    fn send(&mut self, peer: IpAddr, message: Box<[u8; MAD_LEN]>) {
        if self.out.len() < OUT_MAX {
            self.out.push_back((peer, message));
        }
    }

    /// Sends a connection's message, or gives up after the last try or when nobody decides.
    fn send_again(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        let state = c.state;
        if state == State::ReqReceived {
            self.reject(CmId(id), RejReason::TIMEOUT, &[]);
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
            return;
        }
        if c.tries == TRIES {
            self.forget(id);
            self.events.push_back(match state {
                State::DreqSent | State::Established => CmEvent::Disconnected { id: CmId(id) },
                _ => CmEvent::Unreachable { id: CmId(id) },
            });
            return;
        }
        let deadline = now + (FIRST_WAIT_NS << c.tries);
        c.tries += 1;
        let (peer, message) = (c.peer, c.message.clone());
        self.wait_until(id, deadline);
        self.send(peer, message);
    }

    fn send_rej(
        &mut self,
        peer: IpAddr,
        tid: u64,
        (local, remote): (u32, u32),
        answered: Answered,
        reason: RejReason,
        private_data: PrivateData<148>,
    ) {
        let rej = Rej {
            local_comm_id: local,
            remote_comm_id: remote,
            answered,
            reason,
            ari_len: 0,
            ari: [0; 72],
            private_data,
        };
        self.send(peer, emit(&Message::Rej(rej), tid));
    }

    fn forget(&mut self, id: u32) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        if let Some(request) = connection.request {
            self.by_request.remove(&request);
        }
        if self.by_qp.get(&connection.qp_key()) == Some(&id) {
            self.by_qp.remove(&connection.qp_key());
        }
        if connection.state == State::ReqReceived {
            self.decided(connection.service);
        }
        Some(connection)
    }

    fn new_id(&mut self) -> Option<u32> {
        if self.connections.len() >= CONNECTIONS_MAX {
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

fn emit(message: &Message, tid: u64) -> Box<[u8; MAD_LEN]> {
    let mut mad = Box::new([0; MAD_LEN]);
    message.emit(tid, &mut mad);
    mad
}
