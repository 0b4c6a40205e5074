//! Connecting queue pairs by address and port, with the messages that rdma_cm speaks.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmError, Endpoint};
use rdmux_rnic::{Access, ModifyError, QpAttributes, QpState, QpType, Qpn};
use rdmux_wire::cm::{RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};

use crate::device::{Device, QueuePair};
use crate::event_queue::EventQueue;
#[cfg(doc)]
use crate::features::Features;
use crate::provider;

/// Default of [`ConnectParams::ack_timeout`].
pub const ACK_TIMEOUT: u8 = 14;

/// Maximum private data of [`Device::connect`], in bytes: that of a REQ that also carries its addresses. IBTA Vol 1, 12.6.5 and
/// A11.
pub const CONNECT_DATA_MAX: usize = 56;

/// Parameters of connection establishment.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Rights of the peer on this queue pair.
    pub access: Access,
    /// READs, FLUSHes and atomics of this side in flight at a time.
    pub initiator_depth: u8,
    /// The peer's READs, FLUSHes and atomics that can be answered at a time.
    pub responder_resources: u8,
    /// Local ACK timeout code: 4.096 us x 2^code. `None`: 14, which is 67 ms; the accepting side takes that of the request.
    pub ack_timeout: Option<u8>,
    /// Retries on timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries on RNR NAK; 7: without limit.
    pub rnr_retry: u8,
    /// Maximum retries of this side on RNR NAK, of those that the peer asks for; 7: without limit. Provider `share` does not limit them.
    pub rnr_retry_max: u8,
    /// RNR timer code that the peer is asked to wait.
    pub min_rnr_timer: u8,
    /// Largest path MTU to use; the link may allow less.
    pub path_mtu_max: PathMtu,
    /// IPv4 TOS or IPv6 traffic class; its DSCP chooses the traffic class. The accepting side takes that of the request. ECN is set
    /// towards peers that are rdmux; towards others its bits are sent as given here.
    pub traffic_class: u8,
    /// Requested service; `None`: the port's service of RDMA_PS_TCP.
    pub service: Option<ServiceId>,
    /// Source port that the peer is shown; 0: none. It has no other effect. Provider `hw` chooses one itself.
    pub source_port: u16,
}

impl Default for ConnectParams {
    /// All rights on the queue pair (those on a region are the region's), 16 READs, FLUSHes and atomics each way, 7 retries, RNR retries
    /// without limit, path MTU and timeout as the two sides agree.
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
            rnr_retry_max: 7,
            min_rnr_timer: 12,
            path_mtu_max: PathMtu::Bytes4096,
            traffic_class: 0,
            service: None,
            source_port: 0,
        }
    }
}

/// A queue pair that its owner brings up, with the attributes that the connection gives ([`Connection::attributes`],
/// [`ConnectionRequest::attributes`]). To its peer it is one that keeps to the specification alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalPair {
    /// QPN.
    pub qpn: Qpn,
    /// RC, UC, or the XRC type that fits the side.
    pub qp_type: QpType,
    /// Set when it takes receives from a shared receive queue.
    pub srq: bool,
}

/// The queue pair that is to be connected.
#[derive(Clone, Copy, Debug)]
pub enum ConnectPair<'a> {
    /// A queue pair that its connection brings up.
    Own(&'a QueuePair),
    /// A queue pair that its owner brings up.
    External(&'a ExternalPair),
}

impl<'a> ConnectPair<'a> {
    /// Returns the queue pair that its connection brings up.
    pub fn own(self) -> Option<&'a QueuePair> {
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

    /// Returns whether it may belong to `device`.
    fn is_of(self, device: &Device) -> bool {
        self.own().is_none_or(|qp| qp.device().is(device))
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The peer refused the connection.
    #[error("the peer refused the connection: {reason}")]
    Rejected {
        /// Reason.
        reason: RejReason,
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
    /// No connection of this kind can be made with such a queue pair: RC and UC connect to their like, XRC initiators to targets.
    #[error("a {0:?} queue pair does not support this kind of connection")]
    QpType(QpType),
    /// The queue pair was not made on the device that is to connect it.
    #[error("the queue pair belongs to another device")]
    OtherDevice,
    /// The attempt has given its result before.
    #[error("the attempt to connect is over")]
    Over,
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
    /// A process offers a service on that port of the address: the provider's own error, which names it.
    #[error(transparent)]
    InUse(Box<dyn Error + Send + Sync>),
    /// The provider cannot offer the service: its own error.
    #[error(transparent)]
    Provider(Box<dyn Error + Send + Sync>),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Returns the time at which a wait of `timeout` ends; `None`: never.
pub fn deadline_after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

/// Order, within this process, of events of connections and of requests for them: a later one is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival(u64);

impl Arrival {
    /// Returns a later one than all before.
    pub fn next() -> Arrival {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arrival(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Progress of a connection. One that ended may have been established before anybody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Set once both ends have established it.
    pub established: Option<Arrival>,
    /// Set once an end has ended it.
    pub ended: Option<Arrival>,
}

impl Progress {
    /// Records that it was established.
    pub fn establish(&mut self, at: Arrival) {
        self.established.get_or_insert(at);
    }

    /// Records that it ended.
    pub fn end(&mut self, at: Arrival) {
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
    /// Provider `hw` supports the ports of RDMA_PS_TCP alone ([`io::ErrorKind::Unsupported`]).
    pub fn listen_service(&self, service: ServiceId, qp_types: &[QpType]) -> Result<Listener, ListenError> {
        let provided = self.provided().listen(service, qp_types)?;
        Ok(Listener {
            provided,
            device: self.clone(),
            qp_types: qp_types.to_vec(),
        })
    }

    /// Connects a new queue pair (RC, UC or an XRC initiator) to the listener on an address and port, and waits for the answer. Its
    /// receives may already be posted: [`QueuePair::init`].
    pub fn connect(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        self.start_connect(ConnectPair::Own(qp), peer, params, private_data)?
            .wait()
    }

    /// Starts to connect either kind of queue pair as [`Device::connect`] does, and does not wait for the answer. The peer of an external
    /// queue pair waits until [`Connection::establish`].
    ///
    /// # Errors
    /// Provider `hw` connects no external queue pairs ([`io::ErrorKind::Unsupported`]).
    pub fn start_connect(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connecting, ConnectError> {
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
        let provided = self.provided().start_connect(pair, peer, params, private_data)?;
        Ok(Connecting {
            provided: Some(provided),
            qp: pair.own().cloned(),
            peer: peer.ip(),
        })
    }
}

/// An attempt to connect, which waits for the peer's answer. Dropping it withdraws the request. An attempt whose peer does not answer
/// ends by itself.
#[derive(Debug)]
pub struct Connecting {
    /// `None` once it has given its result.
    provided: Option<Box<dyn provider::Connecting>>,
    /// `None` if the owner of the queue pair brings it up.
    qp: Option<QueuePair>,
    peer: IpAddr,
}

impl Connecting {
    /// Moves the attempt on, which only this call and [`Connecting::wait`] do. Returns the result, once, and `None` before and after that.
    /// The queue pair of a connection is ready from then on, unless its owner brings it up; that of a refused attempt can be connected
    /// again.
    pub fn poll(&mut self) -> Option<Result<Connection, ConnectError>> {
        let result = self.provided.as_mut()?.poll()?;
        self.provided = None;
        Some(result.map(|provided| self.connection(provided)))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`ConnectError::Over`] if [`Connecting::poll`] has returned the result.
    pub fn wait(mut self) -> Result<Connection, ConnectError> {
        let mut connecting = self.provided.take().ok_or(ConnectError::Over)?;
        let provided = connecting.wait()?;
        Ok(self.connection(provided))
    }

    /// Reports to a queue, under a token, when [`Connecting::poll`] may have a result. The connection that comes of the attempt goes on
    /// reporting there.
    pub fn notify(&self, events: &EventQueue, token: u64) {
        if let Some(connecting) = &self.provided {
            connecting.notify(events, token);
        }
    }

    fn connection(&mut self, provided: Box<dyn provider::Connection>) -> Connection {
        let (qp, peer) = (self.qp.take(), self.peer);
        Connection { provided, qp, peer }
    }
}

/// Returns the error of a provider that brings up the queue pairs of its connections itself, for one that its owner is to bring up.
pub fn no_external() -> ConnectError {
    let why = "the device brings up the queue pairs of its connections itself";
    ConnectError::Io(io::Error::new(io::ErrorKind::Unsupported, why))
}

/// Returns the transport service of a queue pair's connections; `None` if its type has no connections.
pub fn transport_of(qp_type: QpType) -> Option<Transport> {
    match qp_type {
        QpType::Rc => Some(Transport::Rc),
        QpType::Uc => Some(Transport::Uc),
        QpType::XrcSend | QpType::XrcRecv => Some(Transport::Xrc),
        QpType::Ud => None,
    }
}

/// Returns the type of the queue pair that accepts a request for a transport service.
pub fn accepting_type(transport: Transport) -> QpType {
    match transport {
        Transport::Rc => QpType::Rc,
        Transport::Uc => QpType::Uc,
        Transport::Xrc => QpType::XrcRecv,
        Transport::Ud => QpType::Ud,
    }
}

/// A port on which connection requests arrive.
#[derive(Debug)]
pub struct Listener {
    provided: Box<dyn provider::Listener>,
    device: Device,
    qp_types: Vec<QpType>,
}

impl Listener {
    /// Waits for a request. Returns `None` if the timeout expires.
    pub fn accept(&self, timeout: Duration) -> Option<ConnectionRequest> {
        let provided = self.provided.accept(&self.qp_types, timeout)?;
        Some(ConnectionRequest {
            provided,
            device: self.device.clone(),
        })
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

impl AsFd for Listener {
    /// Returns a descriptor that is readable when a request may have arrived, until [`Listener::accept`] finds none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.provided.fd()
    }
}

/// Maximum private data of an answer (REP), in bytes: IBTA 12.6.8.
const REP_DATA_MAX: usize = 196;

/// A peer's request to connect. Dropping it undecided refuses it.
#[derive(Debug)]
pub struct ConnectionRequest {
    provided: Box<dyn provider::ConnectionRequest>,
    device: Device,
}

impl ConnectionRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.provided.peer()
    }

    /// Returns the source port that the peer sent; 0: the peer sent none, or provider `hw`, which does not report it.
    pub fn peer_port(&self) -> u16 {
        self.provided.peer_port()
    }

    /// Returns when the request arrived.
    pub fn arrival(&self) -> Arrival {
        self.provided.arrival()
    }

    /// Returns the type of the queue pair that can accept the request.
    pub fn qp_type(&self) -> QpType {
        accepting_type(self.remote().transport)
    }

    /// Returns the peer's endpoint.
    pub fn remote(&self) -> &Endpoint {
        self.provided.remote()
    }

    /// Returns the private data that the peer's user sent, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        self.provided.private_data()
    }

    /// Accepts with a new queue pair, whose receives may already be posted: [`QueuePair::init`]. Both ends may send at once:
    /// packets that arrive before the peer has brought up its queue pair are sent again.
    pub fn accept(
        mut self,
        qp: &QueuePair,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        self.accept_after(qp, params, private_data, || Ok(()))
    }

    /// Accepts as [`ConnectionRequest::accept`] does, but calls `prepare` once the queue pair takes receives and before the peer
    /// gets the answer: the receives that it posts are there in time.
    pub fn accept_after(
        &mut self,
        qp: &QueuePair,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: impl FnOnce() -> Result<(), ConnectError>,
    ) -> Result<Connection, ConnectError> {
        self.accept_pair_after(ConnectPair::Own(qp), params, private_data, prepare)
    }

    /// Accepts as [`ConnectionRequest::accept`] does, with either kind of queue pair. The owner of an external one has already
    /// brought it up.
    ///
    /// # Errors
    /// Errors of [`Device::start_connect`]. The request stays: it can be accepted in another way, or refused.
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
        let prepare = Box::new(prepare);
        let provided = self.provided.accept(pair, params, private_data, prepare)?;
        Ok(Connection { provided, qp, peer })
    }

    /// Returns the attributes for Init, RTR or RTS of a queue pair that its owner brings up before
    /// [`ConnectionRequest::accept_pair`].
    ///
    /// # Errors
    /// Errors of creating a socket; provider `hw` has no such connections.
    pub fn attributes(&self, to: QpState, params: &ConnectParams) -> Result<QpAttributes, ConnectError> {
        self.provided.attributes(to, params)
    }

    /// Passes the request to another engine of the device ([`Device::open_engine`]). The engine's listener gets it as if it had arrived there;
    /// an engine that does not listen for the service refuses it.
    ///
    /// # Errors
    /// [`ConnectError::OtherDevice`] if `engine` is none of this device: the request is refused.
    pub fn pass_to(mut self, engine: &Device) -> Result<(), ConnectError> {
        let is_passed = self.provided.pass_to(engine);
        is_passed.then_some(()).ok_or(ConnectError::OtherDevice)
    }

    /// Refuses the request.
    pub fn reject(mut self, private_data: &[u8]) {
        self.provided.reject(private_data);
    }
}

/// A connection of a queue pair. Dropping it ends it.
#[derive(Debug)]
pub struct Connection {
    provided: Box<dyn provider::Connection>,
    /// `None` if the owner of the queue pair brings it up.
    qp: Option<QueuePair>,
    peer: IpAddr,
}

impl Connection {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// Returns the peer's endpoint.
    pub fn remote(&self) -> Option<&Endpoint> {
        self.provided.remote()
    }

    /// Returns the private data that the peer's user sent with its request or its answer, padded with zeros to the length of the field: data
    /// that may be missing needs a length or a mark of its own.
    pub fn private_data(&self) -> &[u8] {
        self.provided.private_data()
    }

    /// The queue pair, unless its owner brings it up.
    pub fn qp(&self) -> Option<&QueuePair> {
        self.qp.as_ref()
    }

    /// Returns the attributes for Init, RTR or RTS of a queue pair that its owner brings up. `None`: only the provider brings up
    /// queue pairs.
    pub fn attributes(&self, to: QpState) -> Option<QpAttributes> {
        self.provided.attributes(to)
    }

    /// Reports that the queue pair that its owner brings up is ready. After [`Device::start_connect`] this notifies the peer; on the
    /// passive side it means that the queue pair received something before the peer's last message arrived. Does nothing to other
    /// connections.
    pub fn establish(&self) {
        if self.qp.is_none() {
            self.provided.establish();
        }
    }

    /// Passive side: waits for the peer's last message, or for its first request, which implies it. Returns false if neither
    /// arrives: then the connection is over.
    pub fn wait_established(&self) -> bool {
        self.provided.wait_established()
    }

    /// Reports to a queue, under a token, when [`Connection::progress`] may have changed, and when the queue pair that it has brought up
    /// has failed ([`QueuePair::error`]), if the device has [`Features::SHARED_RECEIVES`](crate::Features::SHARED_RECEIVES).
    pub fn notify(&self, events: &EventQueue, token: u64) {
        self.provided.notify(events, token);
    }

    /// Returns the progress that is known so far.
    pub fn progress(&self) -> Progress {
        self.provided.progress()
    }

    /// Returns whether the peer has ended the connection. The queue pair is then in Error and its requests are flushed. A peer that was
    /// killed on another host, where it shared its address with no other process, ends nothing: a request to it fails with `RetryExceeded`, and a side that sends none has to
    /// probe, for example by an empty WRITE from time to time.
    pub fn is_ended(&self) -> bool {
        self.progress().ended.is_some()
    }

    /// Returns for how much longer, at most, the numbers of an ended connection are not reused, since its packets may still be in
    /// flight: ask again after that. `None`: that time is over, or provider `hw`, which does not report it. IBTA Vol 1, 12.9.8.4.
    pub fn rests_for(&self) -> Option<Duration> {
        self.provided.rests_for()
    }

    /// Waits until the peer has ended the connection. Returns false if the timeout expires.
    pub fn wait_ended(&self, timeout: Duration) -> bool {
        self.provided.wait_ended(timeout)
    }

    /// Ends the connection: sends what is pending for the peer, moves the queue pair to Error and notifies the peer. Does nothing
    /// the second time.
    pub fn disconnect(&self) {
        self.provided.disconnect()
    }

    /// Ends the connection and waits until the peer has agreed, or does not answer.
    pub fn disconnect_and_wait(&self, timeout: Duration) {
        self.disconnect();
        self.wait_ended(timeout);
    }
}
