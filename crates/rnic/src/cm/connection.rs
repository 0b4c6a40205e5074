//! Establishing, refusing and ending connections. IBTA Vol 1, 12.6 and 12.9.

use std::net::IpAddr;

use rdmux_wire::Qpn;
use rdmux_wire::cm::{
    Answered, Apr, AprStatus, CmMessage, Drep, Dreq, Extensions, IpAddressing, Lap, Mra, PrivateData, Rej,
    RejReason, Rep, Req, Rtu, ServiceId, SidrStatus, to_gid,
};
use rdmux_wire::roce::{PKEY_DEFAULT, PathMtu, Transport};

use super::{
    ANSWER_KEPT, BACKLOG_MAX, CONNECTIONS_MAX, Cm, CmError, CmEvent, CmId, Connection, ConnectionState,
    DECISION_NS, Endpoint, FIRST_WAIT_NS, PEER_DECISION_NS, Peering, RESPONSE_TIMEOUT, RequestKey,
    SERVICE_TIMEOUT, TRIES, cut, emit, nanoseconds, rej, rej_with, with_addressing, without_addressing,
};
use crate::time::Time;
use crate::transmit::ECN_MARKED;

/// Timeout codes of the shortest and the longest TimeWait of a connection: 67 ms and 2.1 s.
const REST_MIN: u8 = 14;
const REST_MAX: u8 = 19;

impl Cm {
    fn ece(&self) -> Option<rdmux_wire::cm::Ece> {
        let extensions = Extensions {
            version: Extensions::VERSION,
            receive_window_log2: self.window_log2,
            selective: true,
            carried_acks: true,
        };
        Some(extensions.to_ece())
    }

    /// Requests a connection to `service` from the device at `peer`. Private data: 92 bytes, or 56 beside addressing.
    pub fn connect(
        &mut self,
        now: Time,
        peer: IpAddr,
        service: ServiceId,
        addressing: Option<IpAddressing>,
        local: &Endpoint,
        private_data: &[u8],
    ) -> Result<CmId, CmError> {
        if local.transport == Transport::Ud {
            return Err(CmError::InvalidTransport);
        }
        let private_data = with_addressing(addressing, private_data)?;
        let id = self.new_id().ok_or(CmError::NoResources)?;
        let tid = self.new_tid();
        let req = Req {
            local_comm_id: id,
            ece: self.ece().filter(|_| !local.plain),
            service_id: service,
            ca_guid: self.guid,
            qkey: 0,
            qpn: local.qpn,
            responder_resources: local.responder_resources,
            initiator_depth: local.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            transport: local.transport,
            flow_control: false,
            starting_psn: local.starting_psn,
            local_response_timeout: RESPONSE_TIMEOUT,
            retry_count: local.retry_count,
            pkey: PKEY_DEFAULT,
            path_mtu: local.path_mtu,
            rnr_retry_count: local.rnr_retry_count,
            max_cm_retries: 15,
            srq: local.srq,
            src_gid: to_gid(self.address),
            dst_gid: to_gid(peer),
            flow_label: 0,
            packet_rate: 0,
            traffic_class: local.traffic_class & !ECN_MARKED,
            hop_limit: 64,
            service_level: 0,
            local_ack_timeout: local.ack_timeout,
            private_data,
        };
        let mut connection = Connection::new(ConnectionState::ReqSent, service, peer, tid);
        connection.transport = local.transport;
        connection.local_qpn = local.qpn;
        connection.rest = local.ack_timeout.clamp(REST_MIN, REST_MAX);
        connection.decide_by = now + PEER_DECISION_NS;
        connection.message = emit(&CmMessage::Req(req), tid);
        self.qpns.insert((local.qpn, id));
        self.connections.insert(id, connection);
        self.send_again(now, id);
        Ok(CmId(id))
    }

    /// Accepts a request. Private data: 196 bytes. After an error the request is still pending.
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
            .filter(|c| {
                matches!(
                    c.state,
                    ConnectionState::ReqReceived | ConnectionState::MraReqSent
                )
            })
            .ok_or(CmError::NoSuchRequest)?;
        let private_data = PrivateData::new(private_data).ok_or(CmError::PrivateDataTooLong)?;
        let rep = Rep {
            local_comm_id: id.0,
            remote_comm_id: c.remote_id,
            // Only to a peer whose REQ had our extensions: librdmacm gives up a connection when its device does not know the ECE in a REP.
            ece: extensions.filter(|_| c.extended && !local.plain),
            qkey: 0,
            qpn: local.qpn,
            // In XRC this field holds the target's QPN. 12.6.8.
            eecn: if c.transport == Transport::Xrc {
                local.qpn.value()
            } else {
                0
            },
            starting_psn: local.starting_psn,
            responder_resources: local.responder_resources,
            initiator_depth: local.initiator_depth,
            target_ack_delay: 15,
            failover: 0,
            flow_control: false,
            rnr_retry_count: local.rnr_retry_count,
            srq: local.srq,
            ca_guid: guid,
            private_data,
        };
        c.message = emit(&CmMessage::Rep(rep), c.tid);
        c.state = ConnectionState::RepSent;
        c.local_qpn = local.qpn;
        c.decide_by = now + PEER_DECISION_NS;
        let service = c.service;
        self.qpns.insert((local.qpn, id.0));
        self.decided(service);
        self.send_again(now, id.0);
        Ok(())
    }

    /// Refuses a request or a reply. Private data beyond 148 bytes (136 for a resolution) is cut off.
    pub fn reject(&mut self, now: Time, id: CmId, reason: RejReason, private_data: &[u8]) {
        self.reject_with(now, id, reason, &[], private_data);
    }

    /// Refuses as [`Cm::reject`] does, and names in up to 72 bytes what this side would accept: for [`RejReason::INVALID_PATH_MTU`] the
    /// code of the largest path MTU. 12.6.7.2.
    pub fn reject_with(&mut self, now: Time, id: CmId, reason: RejReason, ari: &[u8], private_data: &[u8]) {
        let Some(c) = self.connections.get_mut(&id.0) else {
            return;
        };
        let answered = match c.state {
            // If the rejection is lost, the peer repeats its request; after an MRA it does so only when the MRA's time is over.
            ConnectionState::ReqReceived => {
                c.rest = ANSWER_KEPT;
                Answered::Req
            }
            ConnectionState::MraReqSent => {
                c.rest = SERVICE_TIMEOUT + 1;
                Answered::Req
            }
            ConnectionState::RepReceived | ConnectionState::MraRepSent => Answered::Rep,
            ConnectionState::SidrReqReceived => {
                let status = match reason {
                    RejReason::INVALID_SERVICE_ID => SidrStatus::UNSUPPORTED,
                    _ => SidrStatus::REJECT,
                };
                let data = cut::<136>(private_data);
                let _ = self.answer(now, id, status, Qpn::new(0), 0, data.bytes());
                return;
            }
            _ => return,
        };
        let message = rej_with(c.tid, (id.0, c.remote_id), answered, reason, ari, private_data);
        let peer = c.peer;
        self.rest(now, id.0, Some(message.clone()));
        self.send(peer, message);
    }

    /// Establishes a connection when the user's QP is ready. After a reply this sends the RTU; the passive side calls it if data
    /// arrives before the RTU.
    pub fn establish(&mut self, id: CmId) {
        let Some(c) = self.connections.get_mut(&id.0) else {
            return;
        };
        match c.state {
            ConnectionState::RepReceived | ConnectionState::MraRepSent => {
                let rtu = Rtu {
                    local_comm_id: id.0,
                    remote_comm_id: c.remote_id,
                    private_data: PrivateData::default(),
                };
                c.message = emit(&CmMessage::Rtu(rtu), c.tid);
                c.state = ConnectionState::Established;
                self.repeat(id.0);
            }
            ConnectionState::RepSent | ConnectionState::MraRepReceived => {
                c.state = ConnectionState::Established;
                self.events.push_back(CmEvent::Established { id });
            }
            _ => return,
        }
        self.set_deadline(id.0, None);
    }

    /// Ends a connection; [`CmEvent::Disconnected`] follows when the peer has agreed or does not answer. A request without an answer is
    /// withdrawn, and a request that the user has not decided on is refused; no event follows for these.
    pub fn disconnect(&mut self, now: Time, id: CmId) {
        let tid = self.new_tid();
        let Some(c) = self.connections.get_mut(&id.0) else {
            return;
        };
        match c.state {
            ConnectionState::RepReceived
            | ConnectionState::MraRepSent
            | ConnectionState::RepSent
            | ConnectionState::MraRepReceived
            | ConnectionState::Established => {
                let dreq = Dreq {
                    local_comm_id: id.0,
                    remote_comm_id: c.remote_id,
                    remote_qpn: c.remote_qpn,
                    private_data: PrivateData::default(),
                };
                c.tid = tid;
                c.message = emit(&CmMessage::Dreq(dreq), tid);
                c.state = ConnectionState::DreqSent;
                c.tries = 0;
                self.send_again(now, id.0);
            }
            ConnectionState::ReqReceived | ConnectionState::MraReqSent | ConnectionState::SidrReqReceived => {
                self.reject(now, id, RejReason::CONSUMER, &[]);
            }
            ConnectionState::ReqSent | ConnectionState::MraReqReceived => self.withdraw(now, id.0),
            ConnectionState::SidrReqSent => self.rest(now, id.0, None),
            ConnectionState::DreqSent | ConnectionState::TimeWait => {}
        }
    }

    /// Returns both ends of a connection that the peer may consider a connection: accepted or replied to, and not ended.
    pub fn peering(&self, id: CmId) -> Option<Peering> {
        let c = self.connections.get(&id.0)?;
        matches!(
            c.state,
            ConnectionState::RepReceived
                | ConnectionState::MraRepSent
                | ConnectionState::RepSent
                | ConnectionState::MraRepReceived
                | ConnectionState::Established
                | ConnectionState::DreqSent
        )
        .then_some(Peering {
            id,
            local_qpn: c.local_qpn,
            peer: c.peer,
            remote_id: c.remote_id,
            remote_qpn: c.remote_qpn,
        })
    }

    /// Ends the connections of a device that is known to have gone, named by its address and by the QPNs that it had, as if the device
    /// had ended them itself. [`CmEvent::Disconnected`] follows for each.
    pub fn peer_gone(&mut self, now: Time, peer: IpAddr, had: impl Fn(Qpn) -> bool) {
        let is_its = |c: &Connection| c.peer == peer && had(c.remote_qpn);
        let ids = self
            .connections
            .iter()
            .filter(|(_, c)| is_its(c))
            .map(|(id, _)| *id);
        let mut ids: Vec<u32> = ids.filter(|id| self.peering(CmId(*id)).is_some()).collect();
        ids.sort_unstable();
        for id in ids {
            self.rest(now, id, None);
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
        }
    }

    /// Ends an orphan, a connection of another device of this address that has gone without ending it: the peer gets a DREQ as if from that
    /// device. [`CmEvent::Disconnected`] follows.
    pub fn disconnect_orphan(&mut self, now: Time, peering: &Peering) {
        let id = peering.id;
        if self.len() >= CONNECTIONS_MAX || self.connections.contains_key(&id.0) {
            return;
        }
        let mut connection = Connection::new(ConnectionState::Established, ServiceId(0), peering.peer, 0);
        connection.local_qpn = peering.local_qpn;
        connection.remote_id = peering.remote_id;
        connection.remote_qpn = peering.remote_qpn;
        self.qpns.insert((peering.local_qpn, id.0));
        self.connections.insert(id.0, connection);
        self.disconnect(now, id);
    }

    /// Tells the peer that this side no longer waits for its answer. The peer's id may be unknown, so our GUID identifies us. 12.6.7.2.
    pub(super) fn withdraw(&mut self, now: Time, id: u32) {
        let Some(c) = self.connections.get(&id) else {
            return;
        };
        let guid = self.guid.to_be_bytes();
        let message = rej_with(
            c.tid,
            (id, c.remote_id),
            Answered::Other,
            RejReason::TIMEOUT,
            &guid,
            &[],
        );
        let peer = c.peer;
        self.rest(now, id, Some(message.clone()));
        self.send(peer, message);
    }

    /// Tells the peer that the user needs more time, so that the peer waits before it repeats its message. 12.6.6.
    pub(super) fn send_mra(&mut self, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        let (answered, state) = match c.state {
            ConnectionState::ReqReceived | ConnectionState::MraReqSent => {
                (Answered::Req, ConnectionState::MraReqSent)
            }
            ConnectionState::RepReceived | ConnectionState::MraRepSent => {
                (Answered::Rep, ConnectionState::MraRepSent)
            }
            _ => return,
        };
        c.state = state;
        let mra = Mra {
            local_comm_id: id,
            remote_comm_id: c.remote_id,
            answered,
            service_timeout: SERVICE_TIMEOUT,
            private_data: PrivateData::default(),
        };
        let (peer, message, decide_by) = (c.peer, emit(&CmMessage::Mra(mra), c.tid), c.decide_by);
        self.set_deadline(id, Some(decide_by));
        self.send(peer, message);
    }

    pub(super) fn handle_req(&mut self, now: Time, peer: IpAddr, tid: u64, req: &Req) {
        let key = (peer, Some(req.ca_guid), req.local_comm_id);
        if let Some(id) = self.repeated(&key, tid) {
            return self.handle_req_again(id);
        }
        let refuse = |cm: &mut Cm, reason, ari: &[u8]| {
            let ids = (0, req.local_comm_id);
            cm.send(peer, rej_with(tid, ids, Answered::Req, reason, ari, &[]));
        };
        let Some(listener) = self.listeners.get(&req.service_id).copied() else {
            return refuse(self, RejReason::INVALID_SERVICE_ID, &[]);
        };
        let gid = to_gid(self.address);
        if req.dst_gid != gid {
            return refuse(self, RejReason::INVALID_GID, &gid.octets());
        }
        // The peer uses a QP that this side considers connected: the peer has forgotten the connection. 12.9.8.3.1.
        let stale = self.by_qp.get(&(peer, req.ca_guid, req.qpn)).copied();
        if let Some(id) = stale.filter(|_| !mutant!(StaleUnnoticed)) {
            refuse(self, RejReason::STALE_CONNECTION, &[]);
            return self.end_stale(now, id);
        }
        // Drop the request without an answer, as TCP does: the peer repeats it, and there may be room then.
        if listener.undecided >= BACKLOG_MAX {
            return;
        }
        let Some(id) = self.new_id() else {
            return refuse(self, RejReason::NO_RESOURCES, &[]);
        };
        let (addressing, private_data) = without_addressing(req.service_id, req.private_data.bytes());
        let extensions = req.ece.and_then(Extensions::from_ece);
        let mut connection = Connection::new(ConnectionState::ReqReceived, req.service_id, peer, tid);
        connection.transport = req.transport;
        connection.request = Some(key);
        connection.remote_id = req.local_comm_id;
        connection.remote_guid = req.ca_guid;
        connection.remote_qpn = req.qpn;
        connection.extended = extensions.is_some();
        connection.tries_max = TRIES.min(req.max_cm_retries + 1);
        connection.peer_response = req.local_response_timeout;
        connection.rest = req.local_ack_timeout.clamp(REST_MIN, REST_MAX);
        connection.decide_by = now + DECISION_NS;
        connection.message = emit(&CmMessage::Req(*req), tid);
        // An MRA must reach the peer within the response timeout that the peer gave.
        let half = now + nanoseconds(req.remote_response_timeout) / 2;
        let deadline = half.min(connection.decide_by);
        self.by_request.insert(key, id);
        self.by_qp.insert(connection.qp_key(), id);
        self.connections.insert(id, connection);
        self.requested(req.service_id);
        self.set_deadline(id, Some(deadline));
        self.events.push_back(CmEvent::Request {
            id: CmId(id),
            service: req.service_id,
            peer,
            addressing,
            remote: Endpoint {
                transport: req.transport,
                qpn: req.qpn,
                starting_psn: req.starting_psn,
                responder_resources: req.responder_resources,
                initiator_depth: req.initiator_depth,
                rnr_retry_count: req.rnr_retry_count,
                retry_count: req.retry_count,
                srq: req.srq,
                ack_timeout: req.local_ack_timeout,
                path_mtu: req.path_mtu,
                traffic_class: req.traffic_class & !ECN_MARKED,
                extensions,
                plain: false,
            },
            private_data,
        });
    }

    /// Ends a connection that its peer has forgotten, and notifies the user.
    fn end_stale(&mut self, now: Time, id: u32) {
        if self.connections.get(&id).is_some_and(|c| c.state.is_undecided()) {
            self.reject(now, CmId(id), RejReason::STALE_CONNECTION, &[]);
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
        } else {
            self.disconnect(now, CmId(id));
        }
    }

    /// Returns the connection, or the resolution, of a request that the peer repeats.
    pub(super) fn repeated(&mut self, key: &RequestKey, tid: u64) -> Option<u32> {
        let id = self.by_request.get(key).copied()?;
        let c = self.connections.get_mut(&id)?;
        if !c.is_of(tid) {
            c.request = None;
            self.by_request.remove(key);
            return None;
        }
        Some(id)
    }

    /// Answers a repeated request: repeats the earlier answer, or sends an MRA if there is none yet.
    fn handle_req_again(&mut self, id: u32) {
        match self.connections.get(&id).map(|c| c.state) {
            Some(ConnectionState::ReqReceived | ConnectionState::MraReqSent) => self.send_mra(id),
            Some(ConnectionState::RepSent | ConnectionState::TimeWait) => self.repeat(id),
            _ => {}
        }
    }

    pub(super) fn handle_rep(&mut self, now: Time, peer: IpAddr, tid: u64, rep: &Rep) {
        let id = rep.remote_comm_id;
        let Some(c) = self
            .connections
            .get(&id)
            .filter(|c| c.peer == peer && c.state != ConnectionState::TimeWait)
        else {
            // Name the id that the peer used for us, so that the peer recognizes its connection.
            let ids = (id, rep.local_comm_id);
            return self.send(peer, rej(tid, ids, Answered::Rep, RejReason::INVALID_COMM_ID));
        };
        match c.state {
            ConnectionState::ReqSent | ConnectionState::MraReqReceived => self.handle_first_rep(now, id, rep),
            _ if c.remote_id != rep.local_comm_id || c.request.is_some() => {}
            ConnectionState::RepReceived | ConnectionState::MraRepSent => self.send_mra(id),
            // The RTU was lost.
            ConnectionState::Established => self.repeat(id),
            _ => {}
        }
    }

    fn handle_first_rep(&mut self, now: Time, id: u32, rep: &Rep) {
        let Some(c) = self.connections.get_mut(&id) else {
            return;
        };
        let mut qpn = rep.qpn;
        if c.transport == Transport::Xrc {
            qpn = Qpn::new(rep.eecn);
        }
        c.remote_id = rep.local_comm_id;
        c.remote_guid = rep.ca_guid;
        c.remote_qpn = qpn;
        c.state = ConnectionState::RepReceived;
        c.decide_by = now + DECISION_NS;
        let key = c.qp_key();
        // As with a request: the peer has forgotten the earlier connection of this QP. 12.9.8.3.1.
        if let Some(old) = self.by_qp.get(&key).copied() {
            self.reject(now, CmId(id), RejReason::STALE_CONNECTION, &[]);
            self.events.push_back(CmEvent::Rejected {
                id: CmId(id),
                reason: RejReason::STALE_CONNECTION,
                ari: Vec::new(),
                private_data: Vec::new(),
            });
            return self.end_stale(now, old);
        }
        self.by_qp.insert(key, id);
        self.set_deadline(id, Some(now + nanoseconds(RESPONSE_TIMEOUT) / 2));
        self.events.push_back(CmEvent::Reply {
            id: CmId(id),
            remote: Endpoint {
                transport: self.connections[&id].transport,
                qpn,
                starting_psn: rep.starting_psn,
                responder_resources: rep.responder_resources,
                initiator_depth: rep.initiator_depth,
                rnr_retry_count: rep.rnr_retry_count,
                retry_count: 0,
                srq: rep.srq,
                ack_timeout: 0,
                path_mtu: PathMtu::Bytes4096,
                traffic_class: 0,
                extensions: rep.ece.and_then(Extensions::from_ece),
                plain: false,
            },
            private_data: rep.private_data.bytes().to_vec(),
        });
    }

    pub(super) fn handle_rtu(&mut self, peer: IpAddr, tid: u64, rtu: &Rtu) {
        let id = rtu.remote_comm_id;
        match self.known(id, peer, rtu.local_comm_id).map(|c| c.state) {
            Some(ConnectionState::RepSent | ConnectionState::MraRepReceived) => self.establish(CmId(id)),
            Some(_) => {}
            // The peer considers a connection established that this side has given up.
            None => {
                let ids = (id, rtu.local_comm_id);
                self.send(peer, rej(tid, ids, Answered::Other, RejReason::INVALID_COMM_ID));
            }
        }
    }

    /// Returns the connection that a REJ concerns. A peer that stops waiting for our answer may not know our id. 12.6.7.2.
    fn rejected(&self, peer: IpAddr, rej: &Rej) -> Option<u32> {
        if rej.remote_comm_id != 0 || rej.reason != RejReason::TIMEOUT {
            return Some(rej.remote_comm_id);
        }
        let guid = u64::from_be_bytes(*rej.ari.first_chunk()?);
        self.by_request
            .get(&(peer, Some(guid), rej.local_comm_id))
            .copied()
    }

    pub(super) fn handle_rej(&mut self, now: Time, peer: IpAddr, rej: &Rej) {
        let Some(id) = self.rejected(peer, rej) else {
            return;
        };
        let Some(c) = self.connections.get(&id).filter(|c| c.peer == peer) else {
            return;
        };
        // The peer's id is unknown until the peer has answered. After that, a REJ with another id is stale or forged.
        let unknown = matches!(
            c.state,
            ConnectionState::ReqSent | ConnectionState::MraReqReceived
        );
        if !unknown && c.remote_id != rej.local_comm_id {
            return;
        }
        let event = match c.state {
            ConnectionState::TimeWait | ConnectionState::SidrReqSent | ConnectionState::SidrReqReceived => {
                return;
            }
            ConnectionState::Established | ConnectionState::DreqSent => {
                CmEvent::Disconnected { id: CmId(id) }
            }
            _ => CmEvent::Rejected {
                id: CmId(id),
                reason: rej.reason,
                ari: rej.ari[..usize::from(rej.ari_len.min(72))].to_vec(),
                private_data: rej.private_data.bytes().to_vec(),
            },
        };
        self.rest(now, id, None);
        self.events.push_back(event);
    }

    /// The peer needs more time: wait that long before the next try. The try that the MRA answers is not counted. 12.6.6.
    pub(super) fn handle_mra(&mut self, now: Time, peer: IpAddr, mra: &Mra) {
        let id = mra.remote_comm_id;
        let Some(c) = self.connections.get_mut(&id).filter(|c| c.peer == peer) else {
            return;
        };
        match (c.state, mra.answered) {
            (ConnectionState::ReqSent | ConnectionState::MraReqReceived, Answered::Req) => {
                c.state = ConnectionState::MraReqReceived;
                c.remote_id = mra.local_comm_id;
            }
            (ConnectionState::RepSent | ConnectionState::MraRepReceived, Answered::Rep)
                if c.remote_id == mra.local_comm_id =>
            {
                c.state = ConnectionState::MraRepReceived;
            }
            _ => return,
        }
        c.tries = c.tries.saturating_sub(1);
        let wait = nanoseconds(mra.service_timeout.min(24)).max(FIRST_WAIT_NS);
        let until = (now + wait).min(c.decide_by);
        self.set_deadline(id, Some(until));
    }

    pub(super) fn handle_dreq(&mut self, now: Time, peer: IpAddr, tid: u64, dreq: &Dreq) {
        let id = dreq.remote_comm_id;
        let known = self.known(id, peer, dreq.local_comm_id);
        // The ids are those of one connection and the QPN is that of another: end neither.
        if known
            .as_ref()
            .is_some_and(|c| !c.state.is_undecided() && c.local_qpn != dreq.remote_qpn)
        {
            return;
        }
        let ends = known.is_some_and(|c| {
            matches!(
                c.state,
                ConnectionState::RepReceived
                    | ConnectionState::MraRepSent
                    | ConnectionState::RepSent
                    | ConnectionState::MraRepReceived
                    | ConnectionState::Established
                    | ConnectionState::DreqSent
            )
        });
        let drep = Drep {
            local_comm_id: id,
            remote_comm_id: dreq.local_comm_id,
            private_data: PrivateData::default(),
        };
        // Also answer for a connection that has gone: the peer only needs to know that it has ended.
        if !mutant!(DreqUnanswered) {
            self.send(peer, emit(&CmMessage::Drep(drep), tid));
        }
        if ends {
            self.rest(now, id, None);
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
        }
    }

    pub(super) fn handle_drep(&mut self, now: Time, peer: IpAddr, drep: &Drep) {
        let id = drep.remote_comm_id;
        let known = self.known(id, peer, drep.local_comm_id);
        if known.is_some_and(|c| c.state == ConnectionState::DreqSent) {
            self.rest(now, id, None);
            self.events.push_back(CmEvent::Disconnected { id: CmId(id) });
        }
    }

    /// Refuses an alternate path: there is only one path between two addresses. 12.8.
    pub(super) fn handle_lap(&mut self, peer: IpAddr, tid: u64, lap: &Lap) {
        let id = lap.remote_comm_id;
        let status = match self.known(id, peer, lap.local_comm_id).map(|c| c.state) {
            Some(ConnectionState::Established) => AprStatus::UNSUPPORTED,
            Some(_) => return,
            None => AprStatus::INVALID_COMM_ID,
        };
        let apr = Apr {
            local_comm_id: id,
            remote_comm_id: lap.local_comm_id,
            status,
            private_data: PrivateData::default(),
        };
        self.send(peer, emit(&CmMessage::Apr(apr), tid));
    }
}
