//! Connecting queue pairs by address and port, with the messages that rdma_cm speaks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmError, CmEvent, CmId, Endpoint};
use rdmux_rnic::{Access, ModifyError, Path, Psn, QpAttributes, QpState, QpType};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};

use crate::device::{Device, QueuePair};
use crate::soft::engine::{Accepted, CmQueue, CmSink, ConnectionEntry, Core, ListenerEntry, path_mtu_to};
use crate::soft::group::GroupError;

/// The window towards a peer that is not rdmux and so does not say what it can take.
const FOREIGN_WINDOW_BYTES: u32 = 64 << 10;
/// Longest wait for the peer's answer, MRAs included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the peer's last message.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);

/// What is asked for when connecting.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// What the peer may do on this queue pair.
    pub access: Access,
    /// Own READs, FLUSHes and atomics under way at a time.
    pub initiator_depth: u8,
    /// The peer's READs, FLUSHes and atomics that can be answered at a time.
    pub responder_resources: u8,
    /// Local ACK timeout code: 4.096 us x 2^code. 14 is 67 ms.
    pub ack_timeout: u8,
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
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            path_mtu_max: PathMtu::Bytes4096,
            traffic_class: 0,
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

/// Events of one connection or listener, with someone to wake.
#[derive(Debug)]
pub(crate) struct Events(Arc<CmQueue>);

impl Events {
    pub(crate) fn new() -> io::Result<(CmSink, Events)> {
        let queue = Arc::new(CmQueue::new()?);
        Ok((CmSink(Arc::downgrade(&queue)), Events(queue)))
    }

    /// Readable when there may be an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.waker().fd().as_fd()
    }

    /// The next event; sleeps until there is one. `None`: the time is over. One thread waits at a time.
    pub(crate) fn wait(&self, device: &Device, deadline: Option<Instant>) -> Option<CmEvent> {
        loop {
            if let Some(event) = self.0.poll() {
                return Some(event);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !device.engine().sleep(self.0.waker(), left) {
                return self.0.poll();
            }
        }
    }
}

/// When a wait of `timeout` ends; `None`: never.
pub(crate) fn deadline_after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

impl Device {
    /// Listens on a port (RDMA_PS_TCP) for connections of RC.
    pub fn listen(&self, port: u16) -> Result<Listener, ListenError> {
        self.listen_for(port, &[QpType::Rc])
    }

    /// Listens on a port (RDMA_PS_TCP) for connections to queue pairs of these types: RC, UC and XRC targets. Peers that ask for
    /// others are refused.
    pub fn listen_for(&self, port: u16, qp_types: &[QpType]) -> Result<Listener, ListenError> {
        let service = Service::offer(self, ServiceId::tcp(port), false)?;
        let qp_types = qp_types.to_vec();
        Ok(Listener { service, qp_types })
    }

    /// Connects a queue pair that was just made, RC, UC or an XRC initiator, to whoever listens on an address and port. Waits for
    /// the answer.
    pub fn connect(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        let local = self.address();
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(ConnectError::Family {
                local,
                peer: peer.ip(),
            });
        }
        if !qp.device().is(self) {
            return Err(ConnectError::OtherDevice);
        }
        if qp.qp_type() == QpType::XrcRecv || transport_of(qp.qp_type()).is_none() {
            return Err(ConnectError::QpType(qp.qp_type()));
        }
        let mut path_mtu = path_mtu_to(local, peer.ip())?.min(params.path_mtu_max);
        loop {
            match self.connect_at(qp, peer, params, private_data, path_mtu) {
                // The peer's link carries less than ours: ask for less.
                Err(ConnectError::Rejected {
                    reason: RejReason::INVALID_PATH_MTU,
                    ..
                }) if path_mtu > PathMtu::Bytes256 => {
                    path_mtu = PathMtu::from_bytes(path_mtu.bytes() / 2).unwrap_or(PathMtu::Bytes256);
                }
                result => return result,
            }
        }
    }

    fn connect_at(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
        path_mtu: PathMtu,
    ) -> Result<Connection, ConnectError> {
        let local = self.address();
        let (sink, events) = Events::new()?;
        let addressing = IpAddressing {
            src_port: 0,
            src: local,
            dst: peer.ip(),
        };
        let (id, starting_psn) = self.engine().with(|core, now| {
            let starting_psn = Psn::new(core.rnic.random());
            let endpoint = local_endpoint(qp, starting_psn, params, path_mtu);
            let service = ServiceId::tcp(peer.port());
            let id =
                core.rnic
                    .cm()
                    .connect(now, peer.ip(), service, Some(addressing), &endpoint, private_data);
            if let Ok(id) = id {
                core.connections.insert(
                    id,
                    ConnectionEntry {
                        sink,
                        qpn: Some(qp.qpn()),
                        record: None,
                    },
                );
            }
            id.map(|id| (id, starting_psn)).map_err(ConnectError::from)
        })?;
        let mut connection = Connection::new(self, qp, id, events, peer.ip());
        loop {
            match connection.events.wait(self, deadline_after(CONNECT_TIMEOUT)) {
                Some(CmEvent::Reply {
                    remote, private_data, ..
                }) => {
                    connection.remote = Some(remote);
                    connection.private_data = private_data;
                    let remote = Endpoint {
                        path_mtu,
                        traffic_class: params.traffic_class,
                        ..remote
                    };
                    self.engine().with(|core, now| {
                        let retries = (params.ack_timeout, params.retry_count);
                        let rts = ready_to_send(qp, params, &remote, retries);
                        ready_to_receive(core, now, qp, peer.ip(), params, &remote, starting_psn)?;
                        core.rnic.modify_qp(now, qp.qpn(), QpState::Rts, &rts)?;
                        core.rnic.cm().establish(id);
                        Ok::<_, ConnectError>(())
                    })?;
                    connection
                        .phase
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .established = true;
                    return Ok(connection);
                }
                // The queue pair stays as it was: it can be connected again.
                Some(CmEvent::Rejected {
                    reason, private_data, ..
                }) => {
                    connection.left.store(true, Ordering::Release);
                    return Err(ConnectError::Rejected { reason, private_data });
                }
                Some(CmEvent::Unreachable { .. } | CmEvent::Disconnected { .. }) | None => {
                    connection.left.store(true, Ordering::Release);
                    self.engine().with(|core, now| {
                        core.rnic.cm().disconnect(now, id);
                        core.connections.remove(&id);
                    });
                    return Err(ConnectError::Unreachable(peer.ip()));
                }
                Some(_) => {}
            }
        }
    }
}

/// The transport service of connections of a queue pair; `None`: it has none.
fn transport_of(qp_type: QpType) -> Option<Transport> {
    match qp_type {
        QpType::Rc => Some(Transport::Rc),
        QpType::Uc => Some(Transport::Uc),
        QpType::XrcSend | QpType::XrcRecv => Some(Transport::Xrc),
        QpType::Ud => None,
    }
}

/// The type of the queue pair that accepts a request for a transport service.
fn accepting_type(transport: Transport) -> QpType {
    match transport {
        Transport::Rc => QpType::Rc,
        Transport::Uc => QpType::Uc,
        Transport::Xrc => QpType::XrcRecv,
        Transport::Ud => QpType::Ud,
    }
}

fn local_endpoint(qp: &QueuePair, starting_psn: Psn, params: &ConnectParams, path_mtu: PathMtu) -> Endpoint {
    // What is not acknowledged has no READs, and no retries.
    let reliable = qp.qp_type() != QpType::Uc;
    let if_reliable = |value: u8| if reliable { value } else { 0 };
    Endpoint {
        transport: transport_of(qp.qp_type()).unwrap_or(Transport::Rc),
        qpn: qp.qpn(),
        starting_psn,
        responder_resources: if_reliable(params.responder_resources),
        initiator_depth: if_reliable(params.initiator_depth),
        rnr_retry_count: if_reliable(params.rnr_retry),
        retry_count: if_reliable(params.retry_count),
        srq: qp.has_srq(),
        ack_timeout: params.ack_timeout,
        path_mtu,
        traffic_class: params.traffic_class,
        extensions: None,
    }
}

/// Moves a queue pair from Reset to RTR as both ends agreed.
fn ready_to_receive(
    core: &mut Core,
    now: rdmux_rnic::Time,
    qp: &QueuePair,
    peer: IpAddr,
    params: &ConnectParams,
    remote: &Endpoint,
    rq_psn: Psn,
) -> Result<(), ConnectError> {
    let (qpn, qp_type) = (qp.qpn(), qp.qp_type());
    let reliable = qp_type != QpType::Uc;
    let answers = reliable && qp_type != QpType::XrcSend;
    let src_port = core.source_port(remote.qpn)?;
    let config = *core.rnic.config();
    let window = match remote.extensions {
        Some(extensions) => (1u32 << extensions.receive_window_log2.min(30)).min(config.receive_window_bytes),
        None => FOREIGN_WINDOW_BYTES.min(config.receive_window_bytes),
    };
    let selective = remote.extensions.is_some_and(|extensions| extensions.selective);
    let init = QpAttributes {
        access: Some(params.access),
        ..Default::default()
    };
    core.rnic.modify_qp(now, qpn, QpState::Init, &init)?;
    let rtr = QpAttributes {
        path: Some(Path {
            src: config.address,
            dst: peer,
            src_port,
            traffic_class: remote.traffic_class,
        }),
        path_mtu: Some(remote.path_mtu.bytes()),
        dest_qpn: Some(remote.qpn),
        rq_psn: Some(rq_psn),
        max_dest_rd_atomic: answers.then_some(params.responder_resources),
        min_rnr_timer: answers.then_some(params.min_rnr_timer),
        window_bytes: reliable.then_some(window),
        peer_is_rdmux: Some(remote.extensions.is_some()),
        selective: reliable.then_some(selective),
        ..Default::default()
    };
    core.rnic.modify_qp(now, qpn, QpState::Rtr, &rtr)?;
    core.meet(qpn);
    Ok(())
}

/// With what a queue pair goes from RTR to RTS as both ends agreed.
fn ready_to_send(
    qp: &QueuePair,
    params: &ConnectParams,
    remote: &Endpoint,
    (ack_timeout, retry_count): (u8, u8),
) -> QpAttributes {
    let reliable = qp.qp_type() != QpType::Uc;
    let asks = reliable && qp.qp_type() != QpType::XrcRecv;
    // What the peer can answer bounds what we may ask: of some peers nothing.
    let depth = params.initiator_depth.min(remote.responder_resources);
    QpAttributes {
        sq_psn: Some(remote.starting_psn),
        timeout: reliable.then_some(ack_timeout),
        retry_count: asks.then_some(retry_count),
        rnr_retry: asks.then_some(remote.rnr_retry_count.min(7)),
        max_rd_atomic: asks.then_some(depth),
        ..Default::default()
    }
}

/// A service that a device offers, until it is dropped.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) device: Device,
    id: ServiceId,
    events: Events,
}

impl Service {
    pub(crate) fn offer(device: &Device, id: ServiceId, datagrams: bool) -> Result<Service, ListenError> {
        let (sink, events) = Events::new()?;
        // Last of what can fail: only a service that stands is given back when it is dropped.
        device.engine().register_service(id)?;
        let mut core = device.engine().lock();
        core.listeners.insert(id, ListenerEntry { sink, datagrams });
        core.rnic.cm().listen(id);
        drop(core);
        let device = device.clone();
        Ok(Service { device, id, events })
    }

    /// The next request. `None`: the time is over.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<CmEvent> {
        self.events.wait(&self.device, deadline)
    }

    /// Readable when a request may have come.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.device.engine().with(|core, now| {
            core.rnic.cm().unlisten(now, self.id);
            core.listeners.remove(&self.id);
        });
        self.device.engine().unregister_service(self.id);
    }
}

/// A port that connections come in on.
#[derive(Debug)]
pub struct Listener {
    service: Service,
    qp_types: Vec<QpType>,
}

impl Listener {
    /// Waits for a request. `None`: the time is over.
    pub fn accept(&self, timeout: Duration) -> Option<ConnectionRequest> {
        let deadline = deadline_after(timeout);
        loop {
            let CmEvent::Request {
                id,
                peer,
                remote,
                private_data,
                ..
            } = self.service.wait(deadline)?
            else {
                continue;
            };
            let mut request = ConnectionRequest {
                device: self.service.device.clone(),
                id,
                peer,
                remote,
                private_data,
                decided: false,
            };
            if self.qp_types.contains(&request.qp_type()) {
                return Some(request);
            }
            request.reject_with(RejReason::INVALID_TRANSPORT, &[], &[]);
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.service.device
    }
}

impl AsFd for Listener {
    /// Readable when a request may have come. Read eight bytes to reset it, then accept until there is none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.service.fd()
    }
}

/// A peer's request to connect. Dropped undecided, it is refused.
#[derive(Debug)]
pub struct ConnectionRequest {
    device: Device,
    id: CmId,
    peer: IpAddr,
    remote: Endpoint,
    private_data: Vec<u8>,
    decided: bool,
}

impl ConnectionRequest {
    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The type of queue pair that it can be accepted with.
    pub fn qp_type(&self) -> QpType {
        accepting_type(self.remote.transport)
    }

    /// The peer's side.
    pub fn remote(&self) -> &Endpoint {
        &self.remote
    }

    /// What the peer's user sent, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Accepts with a queue pair that was just made; post receives to it only after this returns. The peer may send at
    /// once; the queue pair sends when the peer's last message has come, or its first request: see
    /// [`Connection::wait_established`].
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
        if !qp.device().is(&self.device) {
            return Err(ConnectError::OtherDevice);
        }
        if qp.qp_type() != self.qp_type() {
            return Err(ConnectError::QpType(qp.qp_type()));
        }
        let local_mtu = path_mtu_to(self.device.address(), self.peer)?.min(params.path_mtu_max);
        if self.remote.path_mtu > local_mtu {
            self.reject_with(RejReason::INVALID_PATH_MTU, &[local_mtu.code()], &[]);
            return Err(ConnectError::Rejected {
                reason: RejReason::INVALID_PATH_MTU,
                private_data: Vec::new(),
            });
        }
        let (sink, events) = Events::new()?;
        let (id, peer, remote) = (self.id, self.peer, self.remote);
        let mut psn = Psn::new(0);
        self.device.engine().with(|core, now| {
            psn = Psn::new(core.rnic.random());
            ready_to_receive(core, now, qp, peer, params, &remote, psn)
        })?;
        let retries = (remote.ack_timeout.max(1), remote.retry_count);
        let rts = ready_to_send(qp, params, &remote, retries);
        let mut connection = Connection::new(&self.device, qp, id, events, peer);
        prepare()?;
        let accepted = self.device.engine().with(|core, now| {
            let mut local = local_endpoint(qp, psn, params, remote.path_mtu);
            local.initiator_depth = local.initiator_depth.min(remote.responder_resources);
            let accepted = core.rnic.cm().accept(now, id, &local, private_data);
            // Not before: a request that the peer has withdrawn meanwhile would leave its entry behind.
            if accepted.is_ok() {
                let (qpn, record) = (Some(qp.qpn()), None);
                let entry = ConnectionEntry { sink, qpn, record };
                core.connections.insert(id, entry);
                core.accepted.insert(qp.qpn(), Accepted { id, rts });
                core.record(id);
            }
            accepted
        });
        self.decided = true;
        accepted?;
        connection.remote = Some(remote);
        connection.private_data = std::mem::take(&mut self.private_data);
        Ok(connection)
    }

    /// Refuses.
    pub fn reject(mut self, private_data: &[u8]) {
        self.reject_with(RejReason::CONSUMER, &[], private_data);
    }

    fn reject_with(&mut self, reason: RejReason, ari: &[u8], private_data: &[u8]) {
        self.decided = true;
        let id = self.id;
        self.device
            .engine()
            .with(|core, now| core.rnic.cm().reject_with(now, id, reason, ari, private_data));
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.decided {
            self.reject_with(RejReason::CONSUMER, &[], &[]);
        }
    }
}

/// A connection of a queue pair. Dropped, it is ended.
#[derive(Debug)]
pub struct Connection {
    device: Device,
    qp: QueuePair,
    id: CmId,
    events: Events,
    peer: IpAddr,
    remote: Option<Endpoint>,
    private_data: Vec<u8>,
    phase: Mutex<Phase>,
    /// This side has ended it.
    left: AtomicBool,
}

/// How far a connection has come. One that ended may have been established before anybody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Phase {
    established: bool,
    ended: bool,
}

impl Connection {
    fn new(device: &Device, qp: &QueuePair, id: CmId, events: Events, peer: IpAddr) -> Connection {
        Connection {
            device: device.clone(),
            qp: qp.clone(),
            id,
            events,
            peer,
            remote: None,
            private_data: Vec::new(),
            phase: Mutex::default(),
            left: AtomicBool::new(false),
        }
    }

    /// The peer's address.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The peer's side.
    pub fn remote(&self) -> Option<&Endpoint> {
        self.remote.as_ref()
    }

    /// What the peer's user sent when connecting, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The queue pair.
    pub fn qp(&self) -> &QueuePair {
        &self.qp
    }

    fn note(&self, event: &CmEvent) -> Phase {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            CmEvent::Established { .. } => phase.established = true,
            CmEvent::Disconnected { .. } | CmEvent::Unreachable { .. } | CmEvent::Rejected { .. } => {
                phase.ended = true
            }
            _ => {}
        }
        *phase
    }

    /// How far it has come by what is known now.
    fn phase(&self) -> Phase {
        while let Some(event) = self.events.0.poll() {
            self.note(&event);
        }
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`; false when the time is over.
    fn wait_until(&self, deadline: Option<Instant>, done: impl Fn(Phase) -> bool) -> bool {
        while !done(self.phase()) {
            match self.events.wait(&self.device, deadline) {
                Some(event) => self.note(&event),
                None => return done(self.phase()),
            };
        }
        true
    }

    /// Passive side: waits for the peer's last message, or its first request, which says as much. False when neither came: then
    /// the connection is over.
    pub fn wait_established(&self) -> bool {
        self.wait_until(deadline_after(ESTABLISH_TIMEOUT), |phase| {
            phase.established || phase.ended
        });
        let established = self.phase().established;
        if !established {
            self.disconnect();
        }
        established
    }

    /// Whether the peer has ended the connection. When it has, the queue pair is in Error: what was posted is flushed.
    pub fn is_ended(&self) -> bool {
        self.phase().ended
    }

    /// Waits until the peer has ended the connection. False: the time is over.
    pub fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(deadline_after(timeout), |phase| phase.ended)
    }

    /// Ends the connection: what is owed to the peer is sent, the queue pair goes to Error and the peer is told. Does nothing
    /// the second time.
    pub fn disconnect(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let (id, qpn) = (self.id, self.qp.qpn());
        let established = self.phase().established;
        self.device.engine().with(|core, now| {
            core.finish(now, true);
            // Once a connection has ended its queue pair is its owner's to use again.
            let entry = core.connections.get_mut(&id);
            if entry.is_some_and(|entry| entry.qpn.take().is_some()) {
                core.accepted.remove(&qpn);
                let _ = core
                    .rnic
                    .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
            }
            core.rnic.cm().disconnect(now, id);
            if !established {
                // Nothing more will be heard of it.
                core.connections.remove(&id);
            }
        });
        if !established {
            self.phase.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        }
    }

    /// Ends the connection and waits until the peer has agreed, or does not answer.
    pub fn disconnect_and_wait(&self, timeout: Duration) {
        self.disconnect();
        self.wait_until(deadline_after(timeout), |phase| phase.ended);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::QpOptions;

    #[test]
    fn ready_to_send__asks_nothing_of_a_peer_that_answers_nothing() {
        let device = Device::open(IpAddr::from([127, 0, 14, 6])).unwrap();
        let cq = device.create_cq(16).unwrap();
        let qp = device.alloc_pd().create_qp(&QpOptions::new(&cq)).unwrap();
        let params = ConnectParams::default();
        for (resources, depth) in [(0, 0), (4, 4), (255, params.initiator_depth)] {
            let remote = Endpoint {
                responder_resources: resources,
                ..local_endpoint(&qp, Psn::new(0), &params, PathMtu::Bytes1024)
            };
            let rts = ready_to_send(&qp, &params, &remote, (14, 7));
            assert_eq!(rts.max_rd_atomic, Some(depth));
        }
    }
}
