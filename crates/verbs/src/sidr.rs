//! Datagram services, found by their port: which queue pair serves, and what Q_Key it asks for. IBTA Vol 1, 12.11.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdmux_rnic::cm::CmError;
use rdmux_rnic::{Qpn, Target};
use rdmux_wire::cm::SidrStatus;

use crate::cancel::Cancel;
use crate::cm::{Arrival, ListenError};
use crate::device::{Device, QueuePair};
use crate::hw;
use crate::provider::Provided;
use crate::soft;

/// The Q_Key of queue pairs that serve datagrams on a port of RDMA_PS_UDP: the one that programs on `rdma_cm` give theirs,
/// which refuse an answer with another one.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;

/// Why a service was not found.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The peer said no.
    #[error("the peer does not serve this: {status}")]
    Refused {
        /// Why.
        status: SidrStatus,
        /// What its user said.
        private_data: Vec<u8>,
    },
    /// No answer.
    #[error(
        "no answer from {0}: is the address right, is rdmux running there, does UDP port 4791 get through?"
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
    /// Another thread has given it up.
    #[error("looking for the service was given up")]
    Cancelled,
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
    #[error("the queue pair takes no datagrams here: it is not UD, not ready, or of another device")]
    NotReady,
    /// More private data than the message holds.
    #[error("too much private data")]
    PrivateData,
    /// The request was not decided on in time.
    #[error("there is no such request any more")]
    Expired,
}

/// What a peer answered.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) qpn: Qpn,
    pub(crate) qkey: u32,
    pub(crate) private_data: Vec<u8>,
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

    /// What datagrams must show.
    pub fn qkey(&self) -> u32 {
        self.found.qkey
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.found.private_data
    }

    /// Whom a send request is for that is meant for the service. `traffic_class` is the IPv4 TOS or the IPv6 traffic class.
    ///
    /// # Errors
    /// Those of making a socket.
    pub fn target(&self, traffic_class: u8) -> io::Result<Target> {
        let to = self.device.create_ah(self.address, traffic_class);
        to.to(self.found.qpn, self.found.qkey)
    }
}

/// Private data of [`Device::resolve`], in bytes: that of a SIDR_REQ with its addresses. IBTA Vol 1, 12.11 and A11.
pub const RESOLVE_DATA_MAX: usize = 180;

impl Device {
    /// Asks who serves datagrams on an address and port (RDMA_PS_UDP). Waits for the answer. Private data: [`RESOLVE_DATA_MAX`] bytes.
    pub fn resolve(&self, peer: SocketAddr, private_data: &[u8]) -> Result<DatagramService, ResolveError> {
        self.resolve_from(0, peer, private_data, &Cancel::new())
    }

    /// Asks as [`Device::resolve`] does, until another thread gives it up, and tells the peer a port that it is asked from; 0: none.
    ///
    /// # Errors
    /// Those of [`Device::resolve`], and [`ResolveError::Cancelled`]. Provider `hw` tells a port of its own.
    pub fn resolve_from(
        &self,
        source_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
        cancel: &Cancel,
    ) -> Result<DatagramService, ResolveError> {
        let (local, address) = (self.address(), peer.ip());
        if cancel.is_cancelled() {
            return Err(ResolveError::Cancelled);
        }
        if local.is_ipv4() != address.is_ipv4() {
            return Err(ResolveError::Family { local, peer: address });
        }
        let found = match &self.provided {
            Provided::Soft(device) => device.resolve(source_port, peer, private_data, cancel)?,
            Provided::Hw(device) => device.resolve(peer, private_data)?,
        };
        Ok(DatagramService {
            device: self.clone(),
            address,
            found,
        })
    }

    /// Serves datagrams on a port (RDMA_PS_UDP): peers ask which queue pair does. Connections ([`Device::listen`]) have ports of
    /// their own.
    pub fn listen_datagram(&self, port: u16) -> Result<DatagramListener, ListenError> {
        let provided = match &self.provided {
            Provided::Soft(device) => Provided::Soft(device.listen_datagram(port)?),
            Provided::Hw(device) => Provided::Hw(device.listen_datagram(port)?),
        };
        let device = self.clone();
        Ok(DatagramListener { provided, device })
    }
}

/// A port that requests for datagram services come in on.
#[derive(Debug)]
pub struct DatagramListener {
    provided: Provided<soft::cm::Service, hw::sidr::DatagramListener>,
    device: Device,
}

impl DatagramListener {
    /// Waits for a request. `None`: the time is over.
    pub fn accept(&self, timeout: Duration) -> Option<ServiceRequest> {
        let provided = match &self.provided {
            Provided::Soft(service) => Provided::Soft(service.accept_datagram(timeout)?),
            Provided::Hw(service) => Provided::Hw(service.accept_datagram(timeout)?),
        };
        let device = self.device.clone();
        Some(ServiceRequest { provided, device })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl AsFd for DatagramListener {
    /// Readable when a request may have come, until [`DatagramListener::accept`] found none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.provided {
            Provided::Soft(service) => service.fd(),
            Provided::Hw(service) => service.fd(),
        }
    }
}

/// A peer's request for a datagram service. Dropped undecided, it is refused.
#[derive(Debug)]
pub struct ServiceRequest {
    provided: Provided<soft::sidr::ServiceRequest, hw::sidr::ServiceRequest>,
    device: Device,
}

impl ServiceRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        match &self.provided {
            Provided::Soft(request) => request.peer,
            Provided::Hw(request) => request.peer,
        }
    }

    /// When it came.
    pub fn arrival(&self) -> Arrival {
        match &self.provided {
            Provided::Soft(request) => request.arrival,
            Provided::Hw(request) => request.arrival,
        }
    }

    /// The port that it was asked from, as the peer says; 0: it does not, or provider `hw` does not tell.
    pub fn peer_port(&self) -> u16 {
        match &self.provided {
            Provided::Soft(request) => request.peer_port,
            Provided::Hw(_) => 0,
        }
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        match &self.provided {
            Provided::Soft(request) => &request.private_data,
            Provided::Hw(request) => &request.private_data,
        }
    }

    /// Answers with a UD queue pair that is ready, which may serve many peers; post receives to it before. Private data: 136
    /// bytes. After an error the request is still to be decided on.
    pub fn accept(&mut self, qp: &QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        if !qp.device().is(&self.device) {
            return Err(AnswerError::NotReady);
        }
        match (&mut self.provided, qp.provided()) {
            (Provided::Soft(request), Provided::Soft(qp)) => request.accept(qp, private_data),
            (Provided::Hw(request), Provided::Hw(qp)) => request.accept(qp, private_data),
            _ => Err(AnswerError::NotReady),
        }
    }

    /// Refuses. Private data beyond 136 bytes is cut off.
    pub fn reject(mut self, private_data: &[u8]) {
        match &mut self.provided {
            Provided::Soft(request) => request.refuse(private_data),
            Provided::Hw(request) => request.refuse(private_data),
        }
    }
}
