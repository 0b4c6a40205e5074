//! Datagram services, found by their port: the peer answers with the queue pair that serves, and with its Q_Key. IBTA Vol 1, 12.11.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdmux_rnic::cm::CmError;
use rdmux_rnic::{Qpn, Target};
use rdmux_wire::cm::SidrStatus;

use crate::cm::{Arrival, ListenError};
use crate::device::{Device, QueuePair};
use crate::event_queue::EventQueue;
use crate::provider;

/// Q_Key of queue pairs that serve datagrams on a port of RDMA_PS_UDP. Programs on `rdma_cm` give theirs this one, and refuse an
/// answer with another one.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;

/// Why a service was not found.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The peer refused the request.
    #[error("the peer does not offer the service: {status}")]
    Refused {
        /// Reason.
        status: SidrStatus,
        /// Private data from the peer's user.
        private_data: Vec<u8>,
    },
    /// No answer.
    #[error(
        "no answer from {0}: check the address, that rdmux runs there, and that firewalls pass UDP port 4791"
    )]
    Unreachable(IpAddr),
    /// The peer is of the other address family.
    #[error("{peer} cannot be reached from {local}: one is IPv4, the other IPv6")]
    Family {
        /// Own address.
        local: IpAddr,
        /// The peer's address.
        peer: IpAddr,
    },
    /// More private data than the message holds.
    #[error("too much private data")]
    PrivateData,
    /// The request has given its result before.
    #[error("the request is over")]
    Over,
    /// A system call failed, or there are too many connections.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<CmError> for ResolveError {
    fn from(error: CmError) -> ResolveError {
        match error {
            CmError::PrivateDataTooLong => ResolveError::PrivateData,
            other => ResolveError::Io(io::Error::other(other)),
        }
    }
}

/// Why a request for a service was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// Only a UD queue pair that takes datagrams serves them: [`QueuePair::ready_datagram`].
    #[error("the queue pair cannot receive these datagrams: it is not UD, not ready, or of another device")]
    NotReady,
    /// More private data than the message holds.
    #[error("too much private data")]
    PrivateData,
    /// The request was not answered in time.
    #[error("the request no longer exists")]
    Expired,
}

/// A peer's answer.
#[derive(Clone, Debug)]
pub struct Found {
    /// The queue pair that serves.
    pub qpn: Qpn,
    /// The Q_Key that it demands.
    pub qkey: u32,
    /// Private data from the peer's user, padded with zeros.
    pub private_data: Vec<u8>,
}

/// A queue pair of a peer that serves datagrams.
#[derive(Clone, Debug)]
pub struct DatagramService {
    device: Device,
    address: IpAddr,
    found: Found,
}

impl DatagramService {
    /// The peer's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The queue pair.
    pub fn qpn(&self) -> Qpn {
        self.found.qpn
    }

    /// Returns the Q_Key that datagrams must carry.
    pub fn qkey(&self) -> u32 {
        self.found.qkey
    }

    /// Returns the private data that the peer's user sent, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.found.private_data
    }

    /// Returns the target of a send request to the service. `traffic_class` is the IPv4 TOS or the IPv6 traffic class.
    ///
    /// # Errors
    /// Errors of creating a socket.
    pub fn target(&self, traffic_class: u8) -> io::Result<Target> {
        let to = self.device.create_ah(self.address, traffic_class);
        to.to(self.found.qpn, self.found.qkey)
    }
}

/// Maximum private data of [`Device::resolve`], in bytes: that of a SIDR_REQ that also carries its addresses. IBTA Vol 1, 12.11 and
/// A11.
pub const RESOLVE_DATA_MAX: usize = 180;

impl Device {
    /// Asks a peer which queue pair serves datagrams on an address and port (RDMA_PS_UDP), and waits for the answer. Private data:
    /// [`RESOLVE_DATA_MAX`] bytes.
    pub fn resolve(&self, peer: SocketAddr, private_data: &[u8]) -> Result<DatagramService, ResolveError> {
        self.start_resolve(0, peer, private_data)?.wait()
    }

    /// Asks as [`Device::resolve`] does, and does not wait for the answer. Sends the peer a source port; 0: none.
    ///
    /// # Errors
    /// Errors of [`Device::resolve`]. Provider `hw` sends a source port of its own.
    pub fn start_resolve(
        &self,
        source_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Resolving, ResolveError> {
        let (local, address) = (self.address(), peer.ip());
        if local.is_ipv4() != address.is_ipv4() {
            return Err(ResolveError::Family { local, peer: address });
        }
        let provided = self.provided().start_resolve(source_port, peer, private_data)?;
        Ok(Resolving {
            provided: Some(provided),
            device: self.clone(),
            address,
        })
    }

    /// Listens on a port (RDMA_PS_UDP) for peers that ask which queue pair serves datagrams. Connections ([`Device::listen`]) have
    /// ports of their own.
    pub fn listen_datagram(&self, port: u16) -> Result<DatagramListener, ListenError> {
        let provided = self.provided().listen_datagram(port)?;
        let device = self.clone();
        Ok(DatagramListener { provided, device })
    }
}

/// A request for a datagram service, which waits for the peer's answer. Dropping it ends it. A request that the peer does not answer ends
/// by itself.
#[derive(Debug)]
pub struct Resolving {
    /// `None` once it has given its result.
    provided: Option<Box<dyn provider::Resolving>>,
    device: Device,
    address: IpAddr,
}

impl Resolving {
    /// Moves the request on, which only this call and [`Resolving::wait`] do. Returns the result, once, and `None` before and after that.
    pub fn poll(&mut self) -> Option<Result<DatagramService, ResolveError>> {
        let result = self.provided.as_mut()?.poll()?;
        self.provided = None;
        Some(result.map(|found| self.service(found)))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`ResolveError::Over`] if [`Resolving::poll`] has returned the result.
    pub fn wait(mut self) -> Result<DatagramService, ResolveError> {
        let mut provided = self.provided.take().ok_or(ResolveError::Over)?;
        let found = provided.wait()?;
        Ok(self.service(found))
    }

    /// Reports to a queue, under a token, when [`Resolving::poll`] may have a result.
    pub fn notify(&self, events: &EventQueue, token: u64) {
        if let Some(resolving) = &self.provided {
            resolving.notify(events, token);
        }
    }

    fn service(&self, found: Found) -> DatagramService {
        DatagramService {
            device: self.device.clone(),
            address: self.address,
            found,
        }
    }
}

/// A port on which requests for datagram services arrive.
#[derive(Debug)]
pub struct DatagramListener {
    provided: Box<dyn provider::DatagramListener>,
    device: Device,
}

impl DatagramListener {
    /// Waits for a request. Returns `None` if the timeout expires.
    pub fn accept(&self, timeout: Duration) -> Option<ServiceRequest> {
        let provided = self.provided.accept(timeout)?;
        let device = self.device.clone();
        Some(ServiceRequest { provided, device })
    }

    /// Reports to a queue, under a token, when a request may have arrived.
    pub fn notify(&self, events: &EventQueue, token: u64) {
        self.provided.notify(events, token);
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl AsFd for DatagramListener {
    /// Returns a descriptor that is readable when a request may have arrived, until [`DatagramListener::accept`] finds none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.provided.fd()
    }
}

/// A peer's request for a datagram service. Dropping it undecided refuses it.
#[derive(Debug)]
pub struct ServiceRequest {
    provided: Box<dyn provider::ServiceRequest>,
    device: Device,
}

impl ServiceRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.provided.peer()
    }

    /// Returns when the request arrived.
    pub fn arrival(&self) -> Arrival {
        self.provided.arrival()
    }

    /// Returns the source port that the peer sent; 0: the peer sent none, or provider `hw`, which does not report it.
    pub fn peer_port(&self) -> u16 {
        self.provided.peer_port()
    }

    /// Returns the private data that the peer's user sent, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        self.provided.private_data()
    }

    /// Answers with a UD queue pair that is ready, and may serve many peers; post receives to it before. Private data: 136 bytes.
    /// After an error the request is still undecided.
    pub fn accept(&mut self, qp: &QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        if !qp.device().is(&self.device) {
            return Err(AnswerError::NotReady);
        }
        self.provided.accept(qp, private_data)
    }

    /// Refuses the request. Private data beyond 136 bytes is cut off.
    pub fn reject(mut self, private_data: &[u8]) {
        self.provided.reject(private_data);
    }
}
