//! Connecting queue pairs by address and port, with the messages that rdma_cm speaks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmError, Endpoint};
use rdmux_rnic::{Access, ModifyError, QpAttributes, QpState, QpType, Qpn};
use rdmux_wire::cm::{RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};

use crate::cancel::Cancel;
use crate::device::{Device, QueuePair};
#[cfg(doc)]
use crate::features::Features;
use crate::hw;
use crate::provider::Provided;
use crate::soft;
use crate::soft::group::GroupError;

/// What [`ConnectParams::ack_timeout`] is where nobody says.
pub(crate) const ACK_TIMEOUT: u8 = 14;

/// Private data of [`Device::connect`], in bytes: that of a REQ with its addresses. IBTA Vol 1, 12.6.5 and A11.
pub const CONNECT_DATA_MAX: usize = 56;

/// What is asked for when connecting.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// What the peer may do on this queue pair.
    pub access: Access,
    /// Own READs, FLUSHes and atomics under way at a time.
    pub initiator_depth: u8,
    /// The peer's READs, FLUSHes and atomics that can be answered at a time.
    pub responder_resources: u8,
    /// Local ACK timeout code: 4.096 us x 2^code. `None`: 14, which is 67 ms; who accepts takes that of the request.
    pub ack_timeout: Option<u8>,
    /// Retries on timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries on RNR NAK, 7 for ever.
    pub rnr_retry: u8,
    /// RNR timer code that the peer is asked to wait.
    pub min_rnr_timer: u8,
    /// Largest path MTU to use; the link may allow less.
    pub path_mtu_max: PathMtu,
    /// IPv4 TOS or IPv6 traffic class; its DSCP chooses the traffic class. Who accepts takes that of the request. ECN is set
    /// towards peers that are rdmux; towards others its bits are sent as they stand here.
    pub traffic_class: u8,
    /// What is asked for; `None`: the port's service of RDMA_PS_TCP.
    pub service: Option<ServiceId>,
    /// The port that the peer is told to be asked from; 0: none. It says no more than that. Provider `hw` chooses one itself.
    pub source_port: u16,
}

impl Default for ConnectParams {
    fn default() -> ConnectParams {
        ConnectParams {
            access: Access::LOCAL_WRITE
                | Access::REMOTE_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_ATOMIC
                | Access::FLUSH_GLOBAL
                | Access::FLUSH_PERSISTENT,
            initiator_depth: 16,
            responder_resources: 16,
            ack_timeout: None,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            path_mtu_max: PathMtu::Bytes4096,
            traffic_class: 0,
            service: None,
            source_port: 0,
        }
    }
}

/// A queue pair that is not brought up here, but by its owner, with the attributes that the connection gives
/// ([`Connection::attributes`], [`ConnectionRequest::attributes`]). To its peer it is one that keeps to the specification alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalPair {
    /// QPN.
    pub qpn: Qpn,
    /// RC, UC or, of XRC, what fits the side.
    pub qp_type: QpType,
    /// It takes receives from a shared receive queue.
    pub srq: bool,
}

/// The queue pair that is to be connected.
#[derive(Clone, Copy, Debug)]
pub enum ConnectPair<'a> {
    /// Its connection brings it up.
    Own(&'a QueuePair),
    /// Its owner brings it up.
    External(&'a ExternalPair),
}

impl<'a> ConnectPair<'a> {
    fn own(self) -> Option<&'a QueuePair> {
        match self {
            ConnectPair::Own(qp) => Some(qp),
            ConnectPair::External(_) => None,
        }
    }

    fn qp_type(self) -> QpType {
        match self {
            ConnectPair::Own(qp) => qp.qp_type(),
            ConnectPair::External(pair) => pair.qp_type,
        }
    }

    /// Whether it may be this device's.
    fn is_of(self, device: &Device) -> bool {
        self.own().is_none_or(|qp| qp.device().is(device))
    }

    fn soft(self) -> Result<soft::cm::Pair, ConnectError> {
        match self {
            ConnectPair::Own(qp) => match qp.provided() {
                Provided::Soft(qp) => Ok(soft::cm::Pair::of(qp)),
                Provided::Hw(_) => Err(ConnectError::OtherDevice),
            },
            ConnectPair::External(pair) => Ok(soft::cm::Pair::external(pair)),
        }
    }

    fn hw(self) -> Result<&'a hw::qp::QueuePair, ConnectError> {
        match self.own().ok_or_else(no_external)?.provided() {
            Provided::Hw(qp) => Ok(qp),
            Provided::Soft(_) => Err(ConnectError::OtherDevice),
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The peer said no.
    #[error("the peer refused the connection: {reason}")]
    Rejected {
        /// Why.
        reason: RejReason,
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
    /// No connection of this kind is made with such a queue pair: RC and UC connect to their like, XRC initiators to targets.
    #[error("a {0:?} queue pair cannot be connected so")]
    QpType(QpType),
    /// The queue pair was not made on the device that is to connect it.
    #[error("the queue pair belongs to another device")]
    OtherDevice,
    /// Another thread has given it up.
    #[error("the connection was given up")]
    Cancelled,
    /// The queue pair cannot be connected in its state.
    #[error("queue pair: {0}")]
    Modify(#[from] ModifyError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<CmError> for ConnectError {
    fn from(error: CmError) -> ConnectError {
        match error {
            CmError::PrivateDataTooLong => ConnectError::PrivateData,
            CmError::NoSuchRequest | CmError::NoResources | CmError::InvalidTransport => {
                ConnectError::Io(io::Error::other(error))
            }
        }
    }
}

/// Why a port cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process of this address has it, or the group failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// When a wait of `timeout` ends; `None`: never.
pub(crate) fn deadline_after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

/// When something happened to a connection, or a request for one came, in the order of this process: what comes later is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival(u64);

impl Arrival {
    pub(crate) fn next() -> Arrival {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arrival(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// How far a connection has come. One that ended may have been established before anybody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Both ends have it.
    pub established: Option<Arrival>,
    /// An end has given it up.
    pub ended: Option<Arrival>,
}

impl Progress {
    pub(crate) fn establish(&mut self, at: Arrival) {
        self.established.get_or_insert(at);
    }

    pub(crate) fn end(&mut self, at: Arrival) {
        self.ended.get_or_insert(at);
    }
}

impl Device {
    /// Listens on a port (RDMA_PS_TCP) for connections of RC.
    pub fn listen(&self, port: u16) -> Result<Listener, ListenError> {
        self.listen_for(port, &[QpType::Rc])
    }

    /// Listens on a port (RDMA_PS_TCP) for connections to queue pairs of these types: RC, UC and XRC targets. Peers that ask for
    /// others are refused. A device without [`Features::CONNECT_ANY`] listens for RC alone: others are an error here.
    pub fn listen_for(&self, port: u16, qp_types: &[QpType]) -> Result<Listener, ListenError> {
        self.listen_service(ServiceId::tcp(port), qp_types)
    }

    /// Listens as [`Device::listen_for`] does, for a service by its id.
    ///
    /// # Errors
    /// Provider `hw` has the ports of RDMA_PS_TCP alone ([`io::ErrorKind::Unsupported`]).
    pub fn listen_service(&self, service: ServiceId, qp_types: &[QpType]) -> Result<Listener, ListenError> {
        let provided = match &self.provided {
            Provided::Soft(device) => Provided::Soft(device.listen(service)?),
            Provided::Hw(device) => match service.port().filter(|port| ServiceId::tcp(*port) == service) {
                Some(port) => Provided::Hw(device.listen(port, qp_types)?),
                None => return Err(ListenError::Io(io::ErrorKind::Unsupported.into())),
            },
        };
        Ok(Listener {
            provided,
            device: self.clone(),
            qp_types: qp_types.to_vec(),
        })
    }

    /// Connects a queue pair that was just made, RC, UC or an XRC initiator, to whoever listens on an address and port. Waits for
    /// the answer. Its receives may be there already: [`QueuePair::init`].
    pub fn connect(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        self.connect_pair(ConnectPair::Own(qp), peer, params, private_data, &Cancel::new())
    }

    /// Connects as [`Device::connect`] does, either kind of queue pair, until another thread gives it up. The peer of an external
    /// one waits until [`Connection::establish`].
    ///
    /// # Errors
    /// Those of [`Device::connect`], and [`ConnectError::Cancelled`]. Provider `hw` connects no external queue pairs
    /// ([`io::ErrorKind::Unsupported`]).
    pub fn connect_pair(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
        cancel: &Cancel,
    ) -> Result<Connection, ConnectError> {
        let local = self.address();
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(ConnectError::Family {
                local,
                peer: peer.ip(),
            });
        }
        if !pair.is_of(self) {
            return Err(ConnectError::OtherDevice);
        }
        let qp_type = pair.qp_type();
        if qp_type == QpType::XrcRecv || transport_of(qp_type).is_none() {
            return Err(ConnectError::QpType(qp_type));
        }
        if cancel.is_cancelled() {
            return Err(ConnectError::Cancelled);
        }
        let provided = match &self.provided {
            Provided::Soft(device) => {
                Provided::Soft(device.connect(&pair.soft()?, peer, params, private_data, cancel)?)
            }
            Provided::Hw(device) => {
                let qp = pair.hw()?;
                let port = ServiceId::tcp(peer.port());
                if params.service.is_some_and(|service| service != port) {
                    return Err(ConnectError::Io(io::ErrorKind::Unsupported.into()));
                }
                Provided::Hw(device.connect(qp, peer, params, private_data)?)
            }
        };
        let (qp, peer) = (pair.own().cloned(), peer.ip());
        Ok(Connection { provided, qp, peer })
    }
}

fn no_external() -> ConnectError {
    let why = "provider hw brings up the queue pairs that it connects by itself";
    ConnectError::Io(io::Error::new(io::ErrorKind::Unsupported, why))
}

/// The transport service of connections of a queue pair; `None`: it has none.
pub(crate) fn transport_of(qp_type: QpType) -> Option<Transport> {
    match qp_type {
        QpType::Rc => Some(Transport::Rc),
        QpType::Uc => Some(Transport::Uc),
        QpType::XrcSend | QpType::XrcRecv => Some(Transport::Xrc),
        QpType::Ud => None,
    }
}

/// The type of the queue pair that accepts a request for a transport service.
pub(crate) fn accepting_type(transport: Transport) -> QpType {
    match transport {
        Transport::Rc => QpType::Rc,
        Transport::Uc => QpType::Uc,
        Transport::Xrc => QpType::XrcRecv,
        Transport::Ud => QpType::Ud,
    }
}

/// A port that connections come in on.
#[derive(Debug)]
pub struct Listener {
    provided: Provided<soft::cm::Service, hw::cm::Listener>,
    device: Device,
    qp_types: Vec<QpType>,
}

impl Listener {
    /// Waits for a request. `None`: the time is over.
    pub fn accept(&self, timeout: Duration) -> Option<ConnectionRequest> {
        let provided = match &self.provided {
            Provided::Soft(service) => Provided::Soft(service.accept(&self.qp_types, timeout)?),
            Provided::Hw(service) => Provided::Hw(service.accept(&self.qp_types, timeout)?),
        };
        Some(ConnectionRequest {
            provided,
            device: self.device.clone(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl AsFd for Listener {
    /// Readable when a request may have come, until [`Listener::accept`] found none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.provided {
            Provided::Soft(service) => service.fd(),
            Provided::Hw(service) => service.fd(),
        }
    }
}

/// Private data of an answer (REP), in bytes: IBTA 12.6.8.
const REP_DATA_MAX: usize = 196;

/// A peer's request to connect. Dropped undecided, it is refused.
#[derive(Debug)]
pub struct ConnectionRequest {
    provided: Provided<soft::cm::ConnectionRequest, hw::cm::ConnectionRequest>,
    device: Device,
}

impl ConnectionRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        match &self.provided {
            Provided::Soft(request) => request.peer,
            Provided::Hw(request) => request.peer,
        }
    }

    /// The port that it was asked from, as the peer says; 0: it does not, or provider `hw` does not tell.
    pub fn peer_port(&self) -> u16 {
        match &self.provided {
            Provided::Soft(request) => request.peer_port,
            Provided::Hw(_) => 0,
        }
    }

    /// When it came.
    pub fn arrival(&self) -> Arrival {
        match &self.provided {
            Provided::Soft(request) => request.arrival,
            Provided::Hw(request) => request.arrival,
        }
    }

    /// The type of queue pair that it can be accepted with.
    pub fn qp_type(&self) -> QpType {
        accepting_type(self.remote().transport)
    }

    /// The peer's side.
    pub fn remote(&self) -> &Endpoint {
        match &self.provided {
            Provided::Soft(request) => &request.remote,
            Provided::Hw(request) => &request.remote,
        }
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        match &self.provided {
            Provided::Soft(request) => &request.private_data,
            Provided::Hw(request) => &request.private_data,
        }
    }

    /// Accepts with a queue pair that was just made, and may have its receives: [`QueuePair::init`]. Both ends may send at once:
    /// what comes before the peer has brought up its queue pair is retried.
    pub fn accept(
        mut self,
        qp: &QueuePair,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        self.accept_after(qp, params, private_data, || Ok(()))
    }

    /// Accepts as [`ConnectionRequest::accept`] does, but calls `prepare` when the queue pair takes receives and before the
    /// peer hears of it: what it posts is there in time.
    pub fn accept_after(
        &mut self,
        qp: &QueuePair,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: impl FnOnce() -> Result<(), ConnectError>,
    ) -> Result<Connection, ConnectError> {
        self.accept_pair_after(ConnectPair::Own(qp), params, private_data, prepare)
    }

    /// Accepts as [`ConnectionRequest::accept`] does, with either kind of queue pair; its owner has brought up an external one.
    ///
    /// # Errors
    /// As [`Device::connect_pair`]. The request stays: it can be accepted otherwise, or refused.
    pub fn accept_pair(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        self.accept_pair_after(pair, params, private_data, || Ok(()))
    }

    fn accept_pair_after(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: impl FnOnce() -> Result<(), ConnectError>,
    ) -> Result<Connection, ConnectError> {
        if !pair.is_of(&self.device) {
            return Err(ConnectError::OtherDevice);
        }
        if pair.qp_type() != self.qp_type() {
            return Err(ConnectError::QpType(pair.qp_type()));
        }
        if private_data.len() > REP_DATA_MAX {
            return Err(ConnectError::PrivateData);
        }
        let (qp, peer) = (pair.own().cloned(), self.peer());
        let provided = match &mut self.provided {
            Provided::Soft(request) => {
                Provided::Soft(request.accept_after(&pair.soft()?, params, private_data, prepare)?)
            }
            Provided::Hw(request) => {
                Provided::Hw(request.accept_after(pair.hw()?, params, private_data, prepare)?)
            }
        };
        Ok(Connection { provided, qp, peer })
    }

    /// With what a queue pair goes to Init, RTR and RTS that its owner brings up before [`ConnectionRequest::accept_pair`].
    ///
    /// # Errors
    /// Those of making a socket; provider `hw` has no such connections.
    pub fn attributes(&self, to: QpState, params: &ConnectParams) -> Result<QpAttributes, ConnectError> {
        match &self.provided {
            Provided::Soft(request) => Ok(request.attributes(to, params)?),
            Provided::Hw(_) => Err(no_external()),
        }
    }

    /// Refuses.
    pub fn reject(mut self, private_data: &[u8]) {
        match &mut self.provided {
            Provided::Soft(request) => request.reject(private_data),
            Provided::Hw(request) => request.reject(private_data),
        }
    }
}

/// A connection of a queue pair. Dropped, it is ended.
#[derive(Debug)]
pub struct Connection {
    provided: Provided<soft::cm::Connection, hw::cm::Connection>,
    /// `None`: its owner brings it up.
    qp: Option<QueuePair>,
    peer: IpAddr,
}

impl Connection {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The peer's side.
    pub fn remote(&self) -> Option<&Endpoint> {
        match &self.provided {
            Provided::Soft(connection) => connection.remote.as_ref(),
            Provided::Hw(connection) => connection.remote.as_ref(),
        }
    }

    /// What the peer's user sent when connecting, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        match &self.provided {
            Provided::Soft(connection) => &connection.private_data,
            Provided::Hw(connection) => &connection.private_data,
        }
    }

    /// The queue pair, unless its owner brings it up.
    pub fn qp(&self) -> Option<&QueuePair> {
        self.qp.as_ref()
    }

    /// With what a queue pair goes to Init, RTR and RTS that its owner brings up. `None`: the provider does that alone.
    pub fn attributes(&self, to: QpState) -> Option<QpAttributes> {
        match &self.provided {
            Provided::Soft(connection) => connection.attributes(to),
            Provided::Hw(_) => None,
        }
    }

    /// The queue pair that its owner brings up is ready: after [`Device::connect_pair`] the peer is told; on the passive
    /// side, it has received before the peer's last message came. Does nothing to other connections.
    pub fn establish(&self) {
        if let (Provided::Soft(connection), None) = (&self.provided, &self.qp) {
            connection.establish();
        }
    }

    /// Passive side: waits for the peer's last message, or its first request, which says as much. False when neither came: then
    /// the connection is over.
    pub fn wait_established(&self) -> bool {
        match &self.provided {
            Provided::Soft(connection) => connection.wait_established(),
            Provided::Hw(connection) => connection.wait_established(),
        }
    }

    /// How far it has come by what is known now.
    pub fn progress(&self) -> Progress {
        match &self.provided {
            Provided::Soft(connection) => connection.progress(),
            Provided::Hw(connection) => connection.progress(),
        }
    }

    /// Returns whether the peer has ended the connection. The queue pair is then in Error and its requests are flushed.
    pub fn is_ended(&self) -> bool {
        self.progress().ended.is_some()
    }

    /// For how much longer at most the numbers of a connection that has ended are not used again, since packets of it may still
    /// be under way: ask again after that. `None`: its rest is over. Provider `hw` does not tell: `None`. IBTA Vol 1, 12.9.8.4.
    pub fn rests_for(&self) -> Option<Duration> {
        match &self.provided {
            Provided::Soft(connection) => connection.rests_for(),
            Provided::Hw(_) => None,
        }
    }

    /// Waits until the peer has ended the connection. False: the time is over.
    pub fn wait_ended(&self, timeout: Duration) -> bool {
        match &self.provided {
            Provided::Soft(connection) => connection.wait_ended(timeout),
            Provided::Hw(connection) => connection.wait_ended(timeout),
        }
    }

    /// Ends the connection: what is owed to the peer is sent, the queue pair goes to Error and the peer is told. Does nothing
    /// the second time.
    pub fn disconnect(&self) {
        match &self.provided {
            Provided::Soft(connection) => connection.disconnect(),
            Provided::Hw(connection) => connection.disconnect(),
        }
    }

    /// Ends the connection and waits until the peer has agreed, or does not answer.
    pub fn disconnect_and_wait(&self, timeout: Duration) {
        self.disconnect();
        self.wait_ended(timeout);
    }
}
