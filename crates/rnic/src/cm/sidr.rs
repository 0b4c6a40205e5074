//! Resolution of service ids to the QP that serves the service's datagrams. IBTA Vol 1, 12.11.

use std::net::IpAddr;

use rdmux_wire::Qpn;
use rdmux_wire::cm::{CmMessage, IpAddressing, PrivateData, ServiceId, SidrRep, SidrReq, SidrStatus};
use rdmux_wire::roce::PKEY_DEFAULT;

use super::{
    BACKLOG_MAX, Cm, CmError, CmEvent, CmId, Connection, ConnectionState, DECISION_NS, emit, with_addressing,
    without_addressing,
};
use crate::time::Time;

impl Cm {
    /// Asks the device at `peer` for the QP of a datagram `service`; [`CmEvent::SidrReply`] or [`CmEvent::Unreachable`]
    /// follows. Private data: 216 bytes, or 180 beside addressing.
    pub fn resolve(
        &mut self,
        now: Time,
        peer: IpAddr,
        service: ServiceId,
        addressing: Option<IpAddressing>,
        private_data: &[u8],
    ) -> Result<CmId, CmError> {
        let private_data = with_addressing(addressing, private_data)?;
        let id = self.new_id().ok_or(CmError::NoResources)?;
        let tid = self.new_tid();
        let req = SidrReq {
            request_id: id,
            pkey: PKEY_DEFAULT,
            service_id: service,
            private_data,
        };
        let mut resolution = Connection::new(ConnectionState::SidrReqSent, service, peer, tid);
        resolution.message = emit(&CmMessage::SidrReq(req), tid);
        self.connections.insert(id, resolution);
        self.send_again(now, id);
        Ok(CmId(id))
    }

    /// Answers a [`CmEvent::SidrRequest`]. Private data: 136 bytes. After an error the request is still pending.
    pub fn answer(
        &mut self,
        now: Time,
        id: CmId,
        status: SidrStatus,
        qpn: Qpn,
        qkey: u32,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let c = self
            .connections
            .get(&id.0)
            .filter(|c| c.state == ConnectionState::SidrReqReceived)
            .ok_or(CmError::NoSuchRequest)?;
        let private_data = PrivateData::new(private_data).ok_or(CmError::PrivateDataTooLong)?;
        let rep = SidrRep {
            request_id: c.remote_id,
            status,
            qpn,
            service_id: c.service,
            qkey,
            private_data,
        };
        let (peer, message) = (c.peer, emit(&CmMessage::SidrRep(rep), c.tid));
        self.rest(now, id.0, Some(message.clone()));
        self.send(peer, message);
        Ok(())
    }

    pub(super) fn handle_sidr_req(&mut self, now: Time, peer: IpAddr, tid: u64, req: &SidrReq) {
        let key = (peer, None, req.request_id);
        if let Some(id) = self.repeated(&key, tid) {
            // A repeated request: send the answer again if there is one yet.
            if self
                .connections
                .get(&id)
                .is_some_and(|c| c.state == ConnectionState::TimeWait)
            {
                self.repeat(id);
            }
            return;
        }
        let refusal = |status| {
            let rep = SidrRep {
                request_id: req.request_id,
                status,
                qpn: Qpn::new(0),
                service_id: req.service_id,
                qkey: 0,
                private_data: PrivateData::default(),
            };
            emit(&CmMessage::SidrRep(rep), tid)
        };
        let Some(listener) = self.listeners.get(&req.service_id).copied() else {
            return self.send(peer, refusal(SidrStatus::UNSUPPORTED));
        };
        // Drop the request without an answer: the peer repeats it, and there may be room then.
        if listener.undecided >= BACKLOG_MAX {
            return;
        }
        let Some(id) = self.new_id() else {
            return self.send(peer, refusal(SidrStatus::NO_QP));
        };
        let (addressing, private_data) = without_addressing(req.service_id, req.private_data.bytes());
        let mut request = Connection::new(ConnectionState::SidrReqReceived, req.service_id, peer, tid);
        request.request = Some(key);
        request.remote_id = req.request_id;
        request.message = emit(&CmMessage::SidrReq(*req), tid);
        self.by_request.insert(key, id);
        self.connections.insert(id, request);
        self.requested(req.service_id);
        self.set_deadline(id, Some(now + DECISION_NS));
        self.events.push_back(CmEvent::SidrRequest {
            id: CmId(id),
            service: req.service_id,
            peer,
            addressing,
            private_data,
        });
    }

    pub(super) fn handle_sidr_rep(&mut self, now: Time, peer: IpAddr, rep: &SidrRep) {
        let id = rep.request_id;
        let asked = |c: &Connection| c.peer == peer && c.state == ConnectionState::SidrReqSent;
        if !self.connections.get(&id).is_some_and(asked) {
            return;
        }
        self.rest(now, id, None);
        self.events.push_back(CmEvent::SidrReply {
            id: CmId(id),
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            private_data: rep.private_data.bytes().to_vec(),
        });
    }
}
