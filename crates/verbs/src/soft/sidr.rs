//! Datagram services of a soft device.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdmux_rnic::cm::{CmError, CmEvent, CmId};
use rdmux_rnic::{QpState, QpType};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId, SidrStatus};

use super::cm::{Events, Service};
use super::device::Device;
use super::engine::ConnectionEntry;
use super::qp::QueuePair;
use crate::cancel::Cancel;
use crate::cm::{Arrival, ListenError, deadline_after};
use crate::sidr::{AnswerError, Found, ResolveError};

/// Longest wait for the peer's answer. Without an answer the device gives up its requests sooner.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(60);

impl Device {
    pub(crate) fn resolve(
        &self,
        src_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
        cancel: &Cancel,
    ) -> Result<Found, ResolveError> {
        let (local, address) = (self.address(), peer.ip());
        let (sink, events) = Events::new()?;
        let addressing = IpAddressing {
            src_port,
            src: local,
            dst: address,
        };
        let id = self.with(|core, now| {
            let service = ServiceId::udp(peer.port());
            let cm = core.rnic.cm();
            let id = cm.resolve(now, address, service, Some(addressing), private_data)?;
            let (qpn, record) = (None, None);
            core.connections.insert(id, ConnectionEntry { sink, qpn, record });
            Ok::<_, CmError>(id)
        })?;
        let deadline = deadline_after(RESOLVE_TIMEOUT);
        match events.wait_unless(cancel, self, deadline) {
            Some((
                _,
                CmEvent::SidrReply {
                    status: SidrStatus::VALID,
                    qpn,
                    qkey,
                    private_data,
                    ..
                },
            )) => Ok(Found {
                qpn,
                qkey,
                private_data,
            }),
            Some((
                _,
                CmEvent::SidrReply {
                    status, private_data, ..
                },
            )) => Err(ResolveError::Refused { status, private_data }),
            _ => {
                self.with(|core, now| {
                    core.rnic.cm().disconnect(now, id);
                    core.connections.remove(&id);
                });
                Err(if cancel.is_cancelled() {
                    ResolveError::Cancelled
                } else {
                    ResolveError::Unreachable(address)
                })
            }
        }
    }

    pub(crate) fn listen_datagram(&self, port: u16) -> Result<Service, ListenError> {
        Service::offer(self, ServiceId::udp(port), true)
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
