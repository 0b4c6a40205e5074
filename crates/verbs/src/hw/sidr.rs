//! Datagram services, found by their port, through the system's RDMA CM.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_rnic::{QpState, QpType, Qpn};
use rdmux_wire::cm::SidrStatus;

use super::cm::{Failure, Line, listen};
use super::cma::{Id, Tell};
use super::device::Device;
use super::qp::QueuePair;
use crate::abi::{cm_event, port_space};
use crate::cm::{Arrival, ListenError};
use crate::sidr::{AnswerError, Found, RDMA_UDP_QKEY, RESOLVE_DATA_MAX, ResolveError};

/// Longest wait for the peer's answer.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Most private data of a SIDR_REP. IBTA Vol 1, 12.11.
const REP_DATA_MAX: usize = 136;

fn tell(private_data: &[u8], qpn: u32) -> Tell<'_> {
    Tell {
        private_data,
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: false,
        qpn,
    }
}

impl Device {
    /// Asks a peer which queue pair serves datagrams on an address and port (RDMA_PS_UDP).
    pub(crate) fn resolve(&self, peer: SocketAddr, private_data: &[u8]) -> Result<Found, ResolveError> {
        if private_data.len() > RESOLVE_DATA_MAX {
            return Err(ResolveError::PrivateData);
        }
        let failed = |failure: Failure| match failure {
            Failure::Rejected(status, private_data) => ResolveError::Refused {
                status: SidrStatus(u8::try_from(status).unwrap_or(SidrStatus::UNSUPPORTED.0)),
                private_data,
            },
            Failure::Silence => ResolveError::Unreachable(peer.ip()),
            Failure::Other(error) => ResolveError::Io(error),
        };
        let deadline = Instant::now().checked_add(RESOLVE_TIMEOUT);
        let line = self
            .cm()
            .and_then(|cm| cm.open(port_space::UDP))
            .map_err(io::Error::from)?;
        line.resolve(self.address(), peer, deadline).map_err(failed)?;
        line.id.connect(&tell(private_data, 0)).map_err(io::Error::from)?;
        let told = line.expect(cm_event::ESTABLISHED, deadline).map_err(failed)?;
        Ok(Found {
            qpn: Qpn::new(told.qpn),
            qkey: told.qkey,
            private_data: told.private_data,
        })
    }

    /// Listens on a port (RDMA_PS_UDP) for requests for datagram services.
    pub(crate) fn listen_datagram(&self, port: u16) -> Result<DatagramListener, ListenError> {
        let line = listen(self, port_space::UDP, port)?;
        Ok(DatagramListener { line })
    }
}

/// A port on which requests for datagram services arrive.
#[derive(Debug)]
pub(crate) struct DatagramListener {
    line: Arc<Line>,
}

impl DatagramListener {
    /// Waits for a request. Returns `None` if the timeout expires.
    pub(crate) fn accept_datagram(&self, timeout: Duration) -> Option<ServiceRequest> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let taken = self.line.wait(deadline)?;
            if let Some(id) = taken.request {
                return Some(ServiceRequest {
                    peer: id.peer()?,
                    id: Some(id),
                    arrival: Arrival::next(),
                    private_data: taken.told.private_data,
                });
            }
        }
    }

    /// Returns a descriptor that is readable when a request may have arrived.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.line.fd()
    }
}

/// A peer's request for a datagram service. Dropping it undecided refuses it.
#[derive(Debug)]
pub(crate) struct ServiceRequest {
    /// `None` once the request is decided.
    id: Option<Id>,
    pub(crate) arrival: Arrival,
    pub(crate) peer: IpAddr,
    pub(crate) private_data: Vec<u8>,
}

impl ServiceRequest {
    /// Answers with a UD queue pair that is ready. The system's RDMA CM sends peers [`RDMA_UDP_QKEY`], so the queue pair must have
    /// that one.
    pub(crate) fn accept(&mut self, qp: &QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        let serves = |state| matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let info = qp
            .query()
            .filter(|info| info.qp_type == QpType::Ud && serves(info.state));
        info.filter(|info| info.qkey == RDMA_UDP_QKEY)
            .ok_or(AnswerError::NotReady)?;
        if private_data.len() > REP_DATA_MAX {
            return Err(AnswerError::PrivateData);
        }
        let id = self.id.take().ok_or(AnswerError::Expired)?;
        id.accept(&tell(private_data, qp.qpn().value()))
            .map_err(|_| AnswerError::Expired)
    }

    /// Refuses the request.
    pub(crate) fn refuse(&mut self, private_data: &[u8]) {
        if let Some(id) = self.id.take() {
            // A request that has been withdrawn needs no answer.
            let _ = id.reject(&private_data[..private_data.len().min(REP_DATA_MAX)]);
        }
    }
}

impl Drop for ServiceRequest {
    fn drop(&mut self) {
        self.refuse(&[]);
    }
}
