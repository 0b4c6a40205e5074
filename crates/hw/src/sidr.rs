//! Datagram services, found by their port, through the system's RDMA CM.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_rnic::{QpState, QpType, Qpn};
use rdmux_verbs::abi::{cm_event, port_space};
use rdmux_verbs::provider::{self, Found, Inbox, ServiceRequest as _};
use rdmux_verbs::{
    AnswerError, Arrival, EventQueue, ListenError, RDMA_UDP_QKEY, RESOLVE_DATA_MAX, ResolveError,
};
use rdmux_wire::cm::SidrStatus;

use super::cm::{Approach, Failure, Line, listen};
use super::cma::{RdmaCmId, Tell, Told};
use super::device::Device;

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

fn resolve_error(failure: Failure, peer: IpAddr) -> ResolveError {
    match failure {
        Failure::Rejected(status, private_data) => ResolveError::Refused {
            status: SidrStatus(u8::try_from(status).unwrap_or(SidrStatus::UNSUPPORTED.0)),
            private_data,
        },
        Failure::Silence => ResolveError::Unreachable(peer),
        Failure::Other(error) => ResolveError::Io(error),
    }
}

/// A request for a datagram service. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Resolving {
    approach: Approach,
    address: IpAddr,
    private_data: Vec<u8>,
    /// Keeps alive the thread that takes its events.
    _device: Device,
}

impl Resolving {
    /// Asks a peer which queue pair serves datagrams on an address and port (RDMA_PS_UDP).
    pub(super) fn start(
        device: &Device,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Resolving, ResolveError> {
        if private_data.len() > RESOLVE_DATA_MAX {
            return Err(ResolveError::PrivateData);
        }
        let line = device
            .cm()
            .and_then(|cm| cm.open(port_space::UDP, Inbox::new()))
            .map_err(io::Error::from)?;
        let approach = Approach::start(line, device.address(), peer, cm_event::ESTABLISHED);
        Ok(Resolving {
            approach: approach.map_err(|failure| resolve_error(failure, peer.ip()))?,
            address: peer.ip(),
            private_data: private_data.to_vec(),
            _device: device.clone(),
        })
    }
}

impl provider::Resolving for Resolving {
    fn poll(&mut self) -> Option<Result<Found, ResolveError>> {
        poll(&mut self.approach, self.address, &self.private_data)
    }

    fn wait(&mut self) -> Result<Found, ResolveError> {
        let (address, private_data) = (self.address, &self.private_data);
        let result = self
            .approach
            .wait(|approach| poll(approach, address, private_data));
        result.unwrap_or(Err(ResolveError::Unreachable(address)))
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.approach.line.events().notify(events, token);
    }
}

fn poll(approach: &mut Approach, peer: IpAddr, private_data: &[u8]) -> Option<Result<Found, ResolveError>> {
    let answer = approach.poll(|id| id.connect(&tell(private_data, 0)))?;
    let found = |told: Told| Found {
        qpn: Qpn::new(told.qpn),
        qkey: told.qkey,
        private_data: told.private_data,
    };
    Some(answer.map(found).map_err(|failure| resolve_error(failure, peer)))
}

/// A port on which requests for datagram services arrive.
#[derive(Debug)]
pub(crate) struct DatagramListener {
    line: Arc<Line>,
    /// Reports only this listener's events, for its descriptor.
    own: EventQueue,
}

impl DatagramListener {
    /// Listens on a port (RDMA_PS_UDP) for requests for datagram services.
    pub(super) fn new(device: &Device, port: u16) -> Result<DatagramListener, ListenError> {
        let own = EventQueue::new()?;
        let line = listen(device, port_space::UDP, port, &own)?;
        Ok(DatagramListener { line, own })
    }
}

impl provider::DatagramListener for DatagramListener {
    fn accept(&self, timeout: Duration) -> Option<Box<dyn provider::ServiceRequest>> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let taken = self.line.wait(deadline, || self.line.events().poll())?;
            if let Some(id) = taken.request {
                return Some(Box::new(ServiceRequest {
                    peer: id.peer()?,
                    id: Some(id),
                    arrival: Arrival::next(),
                    private_data: taken.told.private_data,
                }));
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.line.events().notify(events, token);
    }
}

/// A peer's request for a datagram service. Dropping it undecided refuses it.
#[derive(Debug)]
pub(crate) struct ServiceRequest {
    /// `None` once the request is decided.
    id: Option<RdmaCmId>,
    arrival: Arrival,
    peer: IpAddr,
    private_data: Vec<u8>,
}

impl provider::ServiceRequest for ServiceRequest {
    fn peer(&self) -> IpAddr {
        self.peer
    }

    fn arrival(&self) -> Arrival {
        self.arrival
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Answers with a UD queue pair that is ready. The system's RDMA CM sends peers [`RDMA_UDP_QKEY`], so the queue pair must have
    /// that one.
    fn accept(&mut self, qp: &rdmux_verbs::QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
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

    fn reject(&mut self, private_data: &[u8]) {
        if let Some(id) = self.id.take() {
            // A request that has been withdrawn needs no answer.
            let _ = id.reject(&private_data[..private_data.len().min(REP_DATA_MAX)]);
        }
    }
}

impl Drop for ServiceRequest {
    fn drop(&mut self) {
        self.reject(&[]);
    }
}
