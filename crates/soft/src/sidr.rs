//! Datagram services of a soft device.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rdmux_rnic::cm::{CmError, CmEvent, CmId};
use rdmux_rnic::{QpState, QpType};
use rdmux_verbs::provider::{self, Found, ServiceRequest as _, deadline_after};
use rdmux_verbs::{AnswerError, Arrival, EventQueue, ResolveError};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId, SidrStatus};

use super::cm::Service;
use super::device::Device;
use super::engine::{CmQueue, CmSink, ConnectionEntry};

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
    pub(super) fn start(
        device: &Device,
        src_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Resolving, ResolveError> {
        let (address, events) = (peer.ip(), Arc::new(CmQueue::new()));
        let addressing = IpAddressing {
            src_port,
            src: device.address(),
            dst: address,
        };
        let id = device.with(|core, now| {
            let service = ServiceId::udp(peer.port());
            let cm = core.rnic.cm();
            let id = cm.resolve(now, address, service, Some(addressing), private_data)?;
            let (sink, qpn, record) = (CmSink::of(&events), None, None);
            core.add_connection(id, ConnectionEntry { sink, qpn, record });
            Ok::<_, CmError>(id)
        })?;
        Ok(Resolving {
            device: device.clone(),
            address,
            events,
            id: Some(id),
        })
    }
}

impl provider::Resolving for Resolving {
    fn poll(&mut self) -> Option<Result<Found, ResolveError>> {
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

    fn wait(&mut self) -> Result<Found, ResolveError> {
        let (device, events) = (self.device.clone(), self.events.clone());
        device.wait_result(&events, || self.poll())
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.device.withdraw(id);
        }
    }
}

impl provider::DatagramListener for Service {
    fn accept(&self, timeout: Duration) -> Option<Box<dyn provider::ServiceRequest>> {
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
                return Some(Box::new(ServiceRequest {
                    device: self.device.clone(),
                    id,
                    arrival,
                    peer,
                    peer_port: addressing.map_or(0, |from| from.src_port),
                    private_data,
                    decided: false,
                }));
            }
        }
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}

/// A peer's request for a datagram service. Dropping it undecided refuses it.
#[derive(Debug)]
pub(crate) struct ServiceRequest {
    device: Device,
    id: CmId,
    arrival: Arrival,
    peer: IpAddr,
    peer_port: u16,
    private_data: Vec<u8>,
    decided: bool,
}

impl provider::ServiceRequest for ServiceRequest {
    fn peer(&self) -> IpAddr {
        self.peer
    }

    fn peer_port(&self) -> u16 {
        self.peer_port
    }

    fn arrival(&self) -> Arrival {
        self.arrival
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn accept(&mut self, qp: &rdmux_verbs::QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        let serves = |state| matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let info = qp
            .query()
            .filter(|info| info.qp_type == QpType::Ud && serves(info.state))
            .ok_or(AnswerError::NotReady)?;
        let answered = self.device.with(|core, now| {
            let (valid, qpn) = (SidrStatus::VALID, qp.qpn());
            let cm = core.rnic.cm();
            cm.answer(now, self.id, valid, qpn, info.qkey, private_data)
        });
        self.decided = answered.is_ok();
        answered.map_err(|error| match error {
            CmError::PrivateDataTooLong => AnswerError::PrivateData,
            _ => AnswerError::Expired,
        })
    }

    fn reject(&mut self, private_data: &[u8]) {
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
            self.reject(&[]);
        }
    }
}
