//! Datagram services of a soft device.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rdmux_rnic::cm::{CmError, CmEvent, CmId};
use rdmux_rnic::{QpState, QpType};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId, SidrStatus};

use super::cm::Service;
use super::device::Device;
use super::engine::{CmQueue, CmSink, ConnectionEntry};
use super::qp::QueuePair;
use crate::cm::{Arrival, ListenError, deadline_after};
use crate::sidr::{AnswerError, Found, ResolveError};

impl Device {
    pub(crate) fn start_resolve(
        &self,
        src_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Resolving, ResolveError> {
        let (address, events) = (peer.ip(), Arc::new(CmQueue::new()));
        let addressing = IpAddressing {
            src_port,
            src: self.address(),
            dst: address,
        };
        let id = self.with(|core, now| {
            let service = ServiceId::udp(peer.port());
            let cm = core.rnic.cm();
            let id = cm.resolve(now, address, service, Some(addressing), private_data)?;
            let (sink, qpn, record) = (CmSink::of(&events), None, None);
            core.connections.insert(id, ConnectionEntry { sink, qpn, record });
            Ok::<_, CmError>(id)
        })?;
        Ok(Resolving {
            device: self.clone(),
            address,
            events,
            id: Some(id),
        })
    }

    pub(crate) fn listen_datagram(&self, port: u16) -> Result<Service, ListenError> {
        Service::offer(self, ServiceId::udp(port), true)
    }
}

/// A request for a datagram service. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Resolving {
    device: Device,
    address: IpAddr,
    events: Arc<CmQueue>,
    /// `None` once it is decided.
    id: Option<CmId>,
}

impl Resolving {
    /// Returns the result, once.
    pub(crate) fn poll(&mut self) -> Option<Result<Found, ResolveError>> {
        let (_, event) = self.events.poll()?;
        self.id = None;
        Some(match event {
            CmEvent::SidrReply {
                status: SidrStatus::VALID,
                qpn,
                qkey,
                private_data,
                ..
            } => Ok(Found {
                qpn,
                qkey,
                private_data,
            }),
            CmEvent::SidrReply {
                status, private_data, ..
            } => Err(ResolveError::Refused { status, private_data }),
            _ => Err(ResolveError::Unreachable(self.address)),
        })
    }

    /// Waits for the result. The engine ends a request that the peer does not answer.
    pub(crate) fn wait(mut self) -> Result<Found, ResolveError> {
        loop {
            let seen = self.events.seen();
            if let Some(result) = self.poll() {
                return result;
            }
            self.device.wait_changed(&self.events, seen, None);
        }
    }

    pub(crate) fn events(&self) -> &CmQueue {
        &self.events
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.device.with(|core, now| {
                core.rnic.cm().disconnect(now, id);
                core.connections.remove(&id);
            });
        }
    }
}

impl Service {
    /// Returns the next request of a peer that looks for a datagram service.
    pub(crate) fn accept_datagram(&self, timeout: Duration) -> Option<ServiceRequest> {
        let deadline = deadline_after(timeout);
        loop {
            if let (
                arrival,
                CmEvent::SidrRequest {
                    id,
                    peer,
                    addressing,
                    private_data,
                    ..
                },
            ) = self.wait(deadline)?
            {
                return Some(ServiceRequest {
                    device: self.device.clone(),
                    id,
                    arrival,
                    peer,
                    peer_port: addressing.map_or(0, |from| from.src_port),
                    private_data,
                    decided: false,
                });
            }
        }
    }
}

/// A peer's request for a datagram service. Dropping it undecided refuses it.
#[derive(Debug)]
pub(crate) struct ServiceRequest {
    device: Device,
    id: CmId,
    pub(crate) arrival: Arrival,
    pub(crate) peer: IpAddr,
    pub(crate) peer_port: u16,
    pub(crate) private_data: Vec<u8>,
    decided: bool,
}

impl ServiceRequest {
    pub(crate) fn accept(&mut self, qp: &QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        let serves = |state| matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let info = qp
            .query()
            .filter(|info| info.qp_type == QpType::Ud && serves(info.state))
            .ok_or(AnswerError::NotReady)?;
        let answered = self.device.with(|core, now| {
            let (valid, qpn) = (SidrStatus::VALID, qp.qpn);
            let cm = core.rnic.cm();
            cm.answer(now, self.id, valid, qpn, info.qkey, private_data)
        });
        self.decided = answered.is_ok();
        answered.map_err(|error| match error {
            CmError::PrivateDataTooLong => AnswerError::PrivateData,
            _ => AnswerError::Expired,
        })
    }

    pub(crate) fn refuse(&mut self, private_data: &[u8]) {
        self.decided = true;
        let id = self.id;
        self.device.with(|core, now| {
            let cm = core.rnic.cm();
            cm.reject(now, id, RejReason::CONSUMER, private_data);
        });
    }
}

impl Drop for ServiceRequest {
    fn drop(&mut self) {
        if !self.decided {
            self.refuse(&[]);
        }
    }
}
