//! Datagram services, found by their port: which queue pair serves, and what Q_Key it asks for. IBTA Vol 1, 12.11.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdmux_rnic::cm::{CmError, CmEvent, CmId};
use rdmux_rnic::{QpState, QpType, Qpn, Target};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId, SidrStatus};

use crate::cm::{Events, ListenError, Service, deadline_after};
use crate::device::{Device, QueuePair};
use crate::soft::engine::ConnectionEntry;

/// The Q_Key of queue pairs that serve datagrams on a port of RDMA_PS_UDP: the one that programs on `rdma_cm` give theirs,
/// which refuse an answer with another one.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;

/// Longest wait for the peer's answer. Its requests are given up sooner when there is none.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(60);

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

/// A queue pair of a peer that serves datagrams.
#[derive(Clone, Debug)]
pub struct DatagramService {
    device: Device,
    address: IpAddr,
    qpn: Qpn,
    qkey: u32,
    private_data: Vec<u8>,
}

impl DatagramService {
    /// The peer's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The queue pair.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// What datagrams must show.
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Whom a send request is for that is meant for the service. `traffic_class` is the IPv4 TOS or the IPv6 traffic class.
    ///
    /// # Errors
    /// Those of making a socket.
    pub fn target(&self, traffic_class: u8) -> io::Result<Target> {
        let to = self.device.create_ah(self.address, traffic_class);
        to.to(self.qpn, self.qkey)
    }
}

impl Device {
    /// Asks who serves datagrams on an address and port (RDMA_PS_UDP). Waits for the answer. Private data: 180 bytes.
    pub fn resolve(&self, peer: SocketAddr, private_data: &[u8]) -> Result<DatagramService, ResolveError> {
        let (local, address) = (self.address(), peer.ip());
        if local.is_ipv4() != address.is_ipv4() {
            return Err(ResolveError::Family { local, peer: address });
        }
        let (sink, events) = Events::new()?;
        let addressing = IpAddressing {
            src_port: 0,
            src: local,
            dst: address,
        };
        let id = self.engine().with(|core, now| {
            let service = ServiceId::udp(peer.port());
            let cm = core.rnic.cm();
            let id = cm.resolve(now, address, service, Some(addressing), private_data)?;
            let (qpn, record) = (None, None);
            core.connections.insert(id, ConnectionEntry { sink, qpn, record });
            Ok::<_, CmError>(id)
        })?;
        let deadline = deadline_after(RESOLVE_TIMEOUT);
        match events.wait(self, deadline) {
            Some(CmEvent::SidrReply {
                status: SidrStatus::VALID,
                qpn,
                qkey,
                private_data,
                ..
            }) => Ok(DatagramService {
                device: self.clone(),
                address,
                qpn,
                qkey,
                private_data,
            }),
            Some(CmEvent::SidrReply {
                status, private_data, ..
            }) => Err(ResolveError::Refused { status, private_data }),
            _ => {
                self.engine().with(|core, now| {
                    core.rnic.cm().disconnect(now, id);
                    core.connections.remove(&id);
                });
                Err(ResolveError::Unreachable(address))
            }
        }
    }

    /// Serves datagrams on a port (RDMA_PS_UDP): peers ask which queue pair does. Connections ([`Device::listen`]) have ports of
    /// their own.
    pub fn listen_datagram(&self, port: u16) -> Result<DatagramListener, ListenError> {
        let service = Service::offer(self, ServiceId::udp(port), true)?;
        Ok(DatagramListener(service))
    }
}

/// A port that requests for datagram services come in on.
#[derive(Debug)]
pub struct DatagramListener(Service);

impl DatagramListener {
    /// Waits for a request. `None`: the time is over.
    pub fn accept(&self, timeout: Duration) -> Option<ServiceRequest> {
        let deadline = deadline_after(timeout);
        loop {
            if let CmEvent::SidrRequest {
                id,
                peer,
                private_data,
                ..
            } = self.0.wait(deadline)?
            {
                return Some(ServiceRequest {
                    device: self.0.device.clone(),
                    id,
                    peer,
                    private_data,
                    decided: false,
                });
            }
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }
}

impl AsFd for DatagramListener {
    /// Readable when a request may have come. Read eight bytes to reset it, then accept until there is none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

/// A peer's request for a datagram service. Dropped undecided, it is refused.
#[derive(Debug)]
pub struct ServiceRequest {
    device: Device,
    id: CmId,
    peer: IpAddr,
    private_data: Vec<u8>,
    decided: bool,
}

impl ServiceRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Answers with a UD queue pair that is ready, which may serve many peers; post receives to it before. Private data: 136
    /// bytes. After an error the request is refused.
    pub fn accept(mut self, qp: &QueuePair, private_data: &[u8]) -> Result<(), AnswerError> {
        let serves = |state| matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let info = qp
            .query()
            .filter(|_| qp.device().is(&self.device))
            .filter(|info| info.qp_type == QpType::Ud && serves(info.state))
            .ok_or(AnswerError::NotReady)?;
        let answered = self.device.engine().with(|core, now| {
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

    /// Refuses. Private data beyond 136 bytes is cut off.
    pub fn reject(mut self, private_data: &[u8]) {
        self.refuse(private_data);
    }

    fn refuse(&mut self, private_data: &[u8]) {
        self.decided = true;
        let id = self.id;
        self.device.engine().with(|core, now| {
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
