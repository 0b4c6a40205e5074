//! Connection establishment. One thread of a device takes the events of all its connections, so that a queue pair whose peer has
//! gone is in Error whether its program looks or not; the thread sleeps while there are no events.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_rnic::cm::Endpoint;
use rdmux_rnic::{Access, Psn, QpState, QpType, Qpn};
use rdmux_verbs::abi::{self, cm_event, port_space};
use rdmux_verbs::provider::{
    self, ACK_TIMEOUT, Connection as _, ConnectionRequest as _, Inbox, QueuePair as _, no_external, own,
};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{
    Arrival, CONNECT_DATA_MAX, ConnectError, ConnectPair, ConnectParams, EventQueue, Features, ListenError,
    Progress,
};
use rdmux_wire::cm::{RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::cma::{EventChannel, RdmaCmId, Taken, Tell, Told};
use super::device::{Device, poll_until};
use super::objects::Qp;
use super::qp::QueuePair;

/// Longest wait for the peer's answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the peer's last message.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for resolving the peer's hardware address, and for resolving the route.
const RESOLVE_MS: i32 = 5000;
/// Most requests that wait to be accepted.
const BACKLOG: i32 = 128;
/// Most private data of a REJ. IBTA Vol 1, 12.6.7.
pub(super) const REJ_DATA_MAX: usize = 148;

/// The connections of a device.
#[derive(Debug)]
pub(super) struct Cm {
    shared: Arc<CmShared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct CmShared {
    channel: Arc<EventChannel>,
    lines: Mutex<Lines>,
}

#[derive(Debug, Default)]
struct Lines {
    by_number: HashMap<usize, Weak<Line>>,
    /// Connections that their programs have left, until the peer has answered or failed to answer.
    left: HashMap<usize, Arc<Line>>,
}

/// A connection, a listener or an attempt to connect: its id, and its events.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) id: RdmaCmId,
    shared: Arc<CmShared>,
    events: Inbox<Taken>,
    /// Set when its last event has arrived, under the lock of the lines and before the queue pair is looked for.
    ended: AtomicBool,
    /// The queue pair that goes to Error when the connection ends. Emptied when either side ends the connection: from then on the
    /// owner may use the queue pair again.
    qp: Mutex<Option<Weak<Qp>>>,
}

/// Returns whether an event is the last of a connection.
fn ends(kind: u32) -> bool {
    matches!(
        kind,
        cm_event::DISCONNECTED
            | cm_event::DEVICE_REMOVAL
            | cm_event::UNREACHABLE
            | cm_event::REJECTED
            | cm_event::CONNECT_ERROR
    )
}

impl CmShared {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock()
    }

    /// Delivers an event to its line.
    fn deliver(&self, taken: Taken) {
        let (line, left) = {
            let mut lines = self.lines();
            let line = lines.by_number.get(&taken.of).and_then(Weak::upgrade);
            let mut left = None;
            if ends(taken.kind) {
                left = lines.left.remove(&taken.of);
                if let Some(line) = &line {
                    line.ended.store(true, Ordering::Release);
                }
            }
            (line, left)
        };
        // No id is destroyed under the lock. Dropping a request that nobody wants refuses it.
        drop(left);
        let Some(line) = line else { return };
        if ends(taken.kind) {
            line.end_qp();
        }
        if taken.kind == cm_event::DISCONNECTED {
            // Answers the peer, if the peer ended the connection.
            let _ = line.id.disconnect();
        }
        line.queue(taken);
    }
}

impl Cm {
    fn new(device: &Device) -> Result<Cm, Errno> {
        let channel = Arc::new(EventChannel::new(device.0.library)?);
        let shared = Arc::new(CmShared {
            channel,
            lines: Mutex::default(),
        });
        let stop = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (thread_shared, thread_stop) = (shared.clone(), stop.clone());
        let thread = rdmux_verbs::thread::spawn("rdmux-cm", move || {
            loop {
                if poll_until(&[thread_shared.channel.fd(), thread_stop.as_fd()], None).is_err() {
                    return;
                }
                if rustix::io::read(&*thread_stop, &mut [0u8; 8]).is_ok() {
                    return;
                }
                while let Some(taken) = thread_shared.channel.take_event() {
                    thread_shared.deliver(taken);
                }
            }
        })
        .map_err(|_| Errno::AGAIN)?;
        Ok(Cm {
            shared,
            stop,
            thread: Some(thread),
        })
    }

    /// Makes an id whose events are delivered.
    pub(super) fn open(&self, space: u32, events: Inbox<Taken>) -> Result<Arc<Line>, Errno> {
        Ok(self.adopt(RdmaCmId::new(&self.shared.channel, space)?, events))
    }

    /// Adopts an id, so that its events are delivered.
    fn adopt(&self, id: RdmaCmId, events: Inbox<Taken>) -> Arc<Line> {
        let line = Arc::new(Line {
            id,
            shared: self.shared.clone(),
            events,
            ended: AtomicBool::new(false),
            qp: Mutex::default(),
        });
        self.shared
            .lines()
            .by_number
            .insert(line.id.number(), Arc::downgrade(&line));
        line
    }
}

impl Drop for Cm {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The ids of these lines hold the channel, which the lines share.
        let left = std::mem::take(&mut self.shared.lines().left);
        drop(left);
    }
}

impl Line {
    pub(super) fn events(&self) -> &Inbox<Taken> {
        &self.events
    }

    /// Queues an event. The kernel stops counting a request once the event is taken, so one request too many is refused here, by its
    /// drop.
    fn queue(&self, taken: Taken) {
        let max = if taken.request.is_some() {
            BACKLOG as usize
        } else {
            usize::MAX
        };
        self.events.push_below(max, taken);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn qp(&self) -> MutexGuard<'_, Option<Weak<Qp>>> {
        self.qp.lock()
    }

    /// Ties the queue pair to the end of the connection, also to one that has happened already.
    fn set_qp(&self, qp: &QueuePair) {
        *self.qp() = Some(Arc::downgrade(qp.object()));
        if self.has_ended() {
            self.end_qp();
        }
    }

    /// Moves the queue pair to Error, the first time.
    fn end_qp(&self) {
        let mut qp = self.qp();
        if let Some(qp) = qp.take().and_then(|qp| qp.upgrade()) {
            QueuePair::fail(&qp);
        }
    }

    /// Sleeps until `look` finds something. `None`: the deadline has passed.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        loop {
            let seen = self.events.seen();
            if let Some(found) = look() {
                return Some(found);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !self.events.wait(seen, left) {
                return look();
            }
        }
    }
}

/// An id on its way to a peer.
#[derive(Debug)]
pub(super) struct Approach {
    pub(super) line: Arc<Line>,
    /// Event that it waits for.
    awaited: u32,
    /// Event that ends the way.
    last: u32,
    deadline: Option<Instant>,
}

impl Approach {
    /// Starts to resolve the address of a peer.
    pub(super) fn start(
        line: Arc<Line>,
        own: IpAddr,
        peer: SocketAddr,
        last: u32,
    ) -> Result<Approach, Failure> {
        let resolves = line.id.resolve_addr(SocketAddr::new(own, 0), peer, RESOLVE_MS);
        resolves.map_err(|error| Failure::of(error.into()))?;
        Ok(Approach {
            line,
            awaited: cm_event::ADDR_RESOLVED,
            last,
            deadline: Instant::now().checked_add(CONNECT_TIMEOUT),
        })
    }

    /// Takes the steps that the events allow; `connect` sends the request once the route is known. Returns what the last event says, or
    /// why it will not come.
    pub(super) fn poll(
        &mut self,
        connect: impl Fn(&RdmaCmId) -> Result<(), Errno>,
    ) -> Option<Result<Told, Failure>> {
        loop {
            let Some(taken) = self.line.events.poll() else {
                let is_late = self.deadline.is_some_and(|at| at <= Instant::now());
                return is_late.then_some(Err(Failure::Silence));
            };
            let failed = |error: Errno| Failure::of(error.into());
            let step = match taken.kind {
                kind if kind != self.awaited => match Failure::of_event(taken) {
                    Some(failure) => Err(failure),
                    None => continue,
                },
                kind if kind == self.last => return Some(Ok(taken.told)),
                cm_event::ADDR_RESOLVED => {
                    self.awaited = cm_event::ROUTE_RESOLVED;
                    self.line.id.resolve_route(RESOLVE_MS).map_err(failed)
                }
                _ => {
                    self.awaited = self.last;
                    connect(&self.line.id).map_err(|error| Failure::Other(error.into()))
                }
            };
            if let Err(failure) = step {
                return Some(Err(failure));
            }
        }
    }

    /// Waits until [`Approach::poll`] returns something.
    pub(super) fn wait<T>(&mut self, mut poll: impl FnMut(&mut Approach) -> Option<T>) -> Option<T> {
        let (line, deadline) = (self.line.clone(), self.deadline);
        line.wait(deadline, || poll(self))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let number = self.id.number();
        self.shared.lines().by_number.remove(&number);
    }
}

/// Why an id did not reach the expected state.
#[derive(Debug)]
pub(super) enum Failure {
    /// The peer refused: reason and private data.
    Rejected(i32, Vec<u8>),
    /// No answer.
    Silence,
    /// Error that the system reported.
    Other(io::Error),
}

/// Returns the error in an event's status, which is a negative errno. Without one the peer has ended the connection.
fn status_error(status: i32) -> io::Error {
    match status {
        0 => Errno::CONNRESET.into(),
        status => io::Error::from_raw_os_error(status.saturating_neg()),
    }
}

impl Failure {
    /// Classifies an error on the way to the peer.
    fn of(error: io::Error) -> Failure {
        match Errno::from_io_error(&error) {
            Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::TIMEDOUT) => Failure::Silence,
            _ => Failure::Other(error),
        }
    }

    /// Returns the reason that an event names; `None` if it names none.
    fn of_event(taken: Taken) -> Option<Failure> {
        Some(match taken.kind {
            cm_event::REJECTED => Failure::Rejected(taken.status, taken.told.private_data),
            cm_event::UNREACHABLE if taken.status > 0 => {
                Failure::Rejected(taken.status, taken.told.private_data)
            }
            cm_event::UNREACHABLE => Failure::Silence,
            cm_event::ADDR_ERROR | cm_event::ROUTE_ERROR => Failure::of(status_error(taken.status)),
            cm_event::CONNECT_ERROR | cm_event::DEVICE_REMOVAL | cm_event::DISCONNECTED => {
                Failure::Other(status_error(taken.status))
            }
            _ => return None,
        })
    }

    fn connect_error(self, peer: IpAddr) -> ConnectError {
        match self {
            Failure::Rejected(reason, private_data) => ConnectError::Rejected {
                reason: RejReason(u16::try_from(reason).unwrap_or(0)),
                private_data,
            },
            Failure::Silence => ConnectError::Unreachable(peer),
            Failure::Other(error) => ConnectError::Io(error),
        }
    }
}

fn io_error(error: Errno) -> ConnectError {
    ConnectError::Io(error.into())
}

/// Binds an id to a port and listens on it. Its events make the descriptor of `own` readable.
pub(super) fn listen(
    device: &Device,
    space: u32,
    port: u16,
    own: &EventQueue,
) -> Result<Arc<Line>, ListenError> {
    let failed = |error: Errno| {
        let error = io::Error::from(error);
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => format!("port {port} of {} is in use: {error}", device.address()),
            _ => format!("listening on port {port} of {}: {error}", device.address()),
        };
        ListenError::Io(io::Error::new(error.kind(), why))
    };
    let events = Inbox::with_events(own);
    let line = device
        .cm()
        .and_then(|cm| cm.open(space, events))
        .map_err(failed)?;
    line.id
        .bind(SocketAddr::new(device.address(), port))
        .map_err(failed)?;
    line.id.listen(BACKLOG).map_err(failed)?;
    Ok(line)
}

impl Device {
    pub(super) fn cm(&self) -> Result<&Cm, Errno> {
        let cm = self.0.cm.get_or_init(|| Cm::new(self));
        cm.as_ref().map_err(|error| *error)
    }

    /// Returns how many READs of a peer this device answers at a time.
    fn responder_resources(&self, params: &ConnectParams) -> u8 {
        let max = u8::try_from(self.0.attr.orig_attr.max_qp_rd_atom).unwrap_or(u8::MAX);
        params.responder_resources.min(max)
    }

    fn initiator_depth(&self, params: &ConnectParams) -> u8 {
        let max = u8::try_from(self.0.attr.orig_attr.max_qp_init_rd_atom).unwrap_or(u8::MAX);
        params.initiator_depth.min(max)
    }

    /// Returns the rights that have a meaning on this device: nobody can use a right whose feature the device lacks.
    pub(super) fn rights(&self, mut access: Access) -> Access {
        let features = self.features();
        for (right, feature) in [
            (Access::REMOTE_ATOMIC, Features::ATOMIC),
            (Access::FLUSH_GLOBAL, Features::FLUSH_GLOBAL),
            (Access::FLUSH_PERSISTENT, Features::FLUSH_PERSISTENT),
        ] {
            if !features.contains(feature) {
                access.remove(right);
            }
        }
        access
    }
}

/// An attempt to connect. Dropping it withdraws it.
#[derive(Debug)]
pub(crate) struct Connecting {
    approach: Approach,
    request: ConnectAttempt,
}

/// What an attempt asks for.
#[derive(Debug)]
struct ConnectAttempt {
    device: Device,
    qp: QueuePair,
    peer: IpAddr,
    params: ConnectParams,
    private_data: Vec<u8>,
}

/// Returns the queue pair that is to be connected: it has to be one that the connection brings up.
fn own_qp(pair: ConnectPair<'_>) -> Result<&QueuePair, ConnectError> {
    let qp = pair.own().ok_or_else(no_external)?;
    own::<QueuePair>(qp).ok_or(ConnectError::OtherDevice)
}

impl Connecting {
    /// Starts to connect a new queue pair of RC to the listener on an address and port. The path MTU is that of the links.
    pub(super) fn start(
        device: &Device,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connecting, ConnectError> {
        let qp = own_qp(pair)?;
        let port = ServiceId::tcp(peer.port());
        if params.service.is_some_and(|service| service != port) {
            return Err(ConnectError::Io(io::ErrorKind::Unsupported.into()));
        }
        if qp.qp_type() != QpType::Rc {
            return Err(ConnectError::Io(device.lacks(Features::CONNECT_ANY).into()));
        }
        if private_data.len() > CONNECT_DATA_MAX {
            return Err(ConnectError::PrivateData);
        }
        let line = device
            .cm()
            .and_then(|cm| cm.open(port_space::TCP, Inbox::new()))
            .map_err(io_error)?;
        // Older kernels do not have the second option; then only the queue pair has the timeout.
        line.id
            .set_option(abi::cm_option::TOS, params.traffic_class)
            .map_err(io_error)?;
        let ack_timeout = params.ack_timeout.unwrap_or(ACK_TIMEOUT);
        let _ = line.id.set_option(abi::cm_option::ACK_TIMEOUT, ack_timeout);
        let approach = Approach::start(line, device.address(), peer, cm_event::CONNECT_RESPONSE);
        Ok(Connecting {
            approach: approach.map_err(|failure| failure.connect_error(peer.ip()))?,
            request: ConnectAttempt {
                device: device.clone(),
                qp: qp.clone(),
                peer: peer.ip(),
                params: params.clone(),
                private_data: private_data.to_vec(),
            },
        })
    }
}

impl provider::Connecting for Connecting {
    fn poll(&mut self) -> Option<Result<Box<dyn provider::Connection>, ConnectError>> {
        self.request.poll(&mut self.approach)
    }

    fn wait(&mut self) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let request = &self.request;
        let result = self.approach.wait(|approach| request.poll(approach));
        result.unwrap_or(Err(ConnectError::Unreachable(request.peer)))
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.approach.line.events().notify(events, token);
    }
}

impl ConnectAttempt {
    fn tell(&self) -> Tell<'_> {
        let ConnectAttempt {
            device, qp, params, ..
        } = self;
        Tell {
            private_data: &self.private_data,
            responder_resources: device.responder_resources(params),
            initiator_depth: device.initiator_depth(params),
            retry_count: params.retry_count.min(7),
            rnr_retry_count: params.rnr_retry.min(7),
            srq: qp.has_srq(),
            qpn: qp.qpn().value(),
        }
    }

    fn poll(&self, approach: &mut Approach) -> Option<Result<Box<dyn provider::Connection>, ConnectError>> {
        let answer = approach.poll(|id| id.connect(&self.tell()))?;
        let answer = answer.map_err(|failure| failure.connect_error(self.peer));
        Some(answer.and_then(|told| self.answered(&approach.line, told)))
    }

    /// Brings up the queue pair after the peer's answer.
    fn answered(&self, line: &Arc<Line>, told: Told) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let ConnectAttempt { qp, params, .. } = self;
        let ack_timeout = params.ack_timeout.unwrap_or(ACK_TIMEOUT);
        let depth = self.tell().initiator_depth.min(told.initiator_depth);
        let up = bring_up(&line.id, qp, params, depth, Some(ack_timeout)).and_then(|(rtr, rts)| {
            line.set_qp(qp);
            line.id.establish().map_err(io_error)?;
            Ok(endpoint(&told, &rtr, &rts))
        });
        let remote = up.inspect_err(|_| QueuePair::fail(qp.object()))?;
        let connection = Connection::new(&self.device, line.clone(), remote, told.private_data);
        connection.known().establish(Arrival::next());
        Ok(Box::new(connection))
    }
}

/// Moves a queue pair from Reset to RTS as both ends agreed, and returns the attributes of the last two steps.
fn bring_up(
    id: &RdmaCmId,
    qp: &QueuePair,
    params: &ConnectParams,
    depth: u8,
    ack_timeout: Option<u8>,
) -> Result<(abi::QpAttr, abi::QpAttr), ConnectError> {
    let device = qp.device();
    let object = qp.object();
    let access = device.rights(params.access).bits();
    let (mut init, mask) = id.qp_attributes(QpState::Init).map_err(io_error)?;
    init.qp_access_flags = access;
    object
        .modify(init, mask | abi::qp_attr::ACCESS_FLAGS)
        .map_err(io_error)?;
    let (mut rtr, mask) = id.qp_attributes(QpState::Rtr).map_err(io_error)?;
    rtr.min_rnr_timer = params.min_rnr_timer;
    rtr.max_dest_rd_atomic = device.responder_resources(params);
    object.modify(rtr, mask).map_err(io_error)?;
    let (mut rts, mask) = id.qp_attributes(QpState::Rts).map_err(io_error)?;
    rts.max_rd_atomic = depth;
    rts.timeout = ack_timeout.unwrap_or(rts.timeout);
    rts.rnr_retry = rts.rnr_retry.min(params.rnr_retry_max);
    object.modify(rts, mask).map_err(io_error)?;
    Ok((rtr, rts))
}

/// Returns what is known of a peer's endpoint.
fn endpoint(told: &Told, rtr: &abi::QpAttr, rts: &abi::QpAttr) -> Endpoint {
    Endpoint {
        transport: Transport::Rc,
        qpn: Qpn::new(told.qpn),
        starting_psn: Psn::new(rts.sq_psn),
        // The event has both as they are for this side.
        responder_resources: told.initiator_depth,
        initiator_depth: told.responder_resources,
        rnr_retry_count: told.rnr_retry_count,
        retry_count: told.retry_count,
        srq: told.srq,
        ack_timeout: rts.timeout,
        path_mtu: PathMtu::from_code(rtr.path_mtu as u8).unwrap_or(PathMtu::Bytes1024),
        traffic_class: rtr.ah_attr.grh.traffic_class,
        extensions: None,
        plain: false,
    }
}

/// A port on which connection requests arrive.
#[derive(Debug)]
pub(crate) struct Listener {
    device: Device,
    line: Arc<Line>,
    /// Reports only this listener's events, for its descriptor.
    own: EventQueue,
}

impl Listener {
    /// Listens on a port (RDMA_PS_TCP) for connections of RC, the only ones that the system's RDMA CM makes there.
    pub(super) fn new(
        device: &Device,
        service: ServiceId,
        qp_types: &[QpType],
    ) -> Result<Listener, ListenError> {
        let port = service.port().filter(|port| ServiceId::tcp(*port) == service);
        let port = port.ok_or(ListenError::Io(io::ErrorKind::Unsupported.into()))?;
        if qp_types.iter().any(|qp_type| *qp_type != QpType::Rc) {
            return Err(ListenError::Io(device.lacks(Features::CONNECT_ANY).into()));
        }
        let own = EventQueue::new()?;
        Ok(Listener {
            device: device.clone(),
            line: listen(device, port_space::TCP, port, &own)?,
            own,
        })
    }
}

impl provider::Listener for Listener {
    fn accept(&self, qp_types: &[QpType], timeout: Duration) -> Option<Box<dyn provider::ConnectionRequest>> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let taken = self.line.wait(deadline, || self.line.events.poll())?;
            // Dropping a request of another type refuses it.
            let Some(id) = taken.request.filter(|_| qp_types.contains(&QpType::Rc)) else {
                continue;
            };
            let attributes = |state| {
                id.qp_attributes(state)
                    .map_or_else(|_| abi::QpAttr::default(), |(attr, _)| attr)
            };
            let remote = endpoint(&taken.told, &attributes(QpState::Rtr), &attributes(QpState::Rts));
            return Some(Box::new(ConnectionRequest {
                device: self.device.clone(),
                peer: id.peer()?,
                id: Some(id),
                arrival: Arrival::next(),
                remote,
                private_data: taken.told.private_data,
                depth: taken.told.initiator_depth,
            }));
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.line.events().notify(events, token);
    }
}

/// A peer's request to connect. Dropping it undecided refuses it.
#[derive(Debug)]
pub(crate) struct ConnectionRequest {
    device: Device,
    /// `None` once the request is decided.
    id: Option<RdmaCmId>,
    arrival: Arrival,
    peer: IpAddr,
    remote: Endpoint,
    private_data: Vec<u8>,
    /// READs that the peer answers at a time.
    depth: u8,
}

impl provider::ConnectionRequest for ConnectionRequest {
    fn peer(&self) -> IpAddr {
        self.peer
    }

    fn arrival(&self) -> Arrival {
        self.arrival
    }

    fn remote(&self) -> &Endpoint {
        &self.remote
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn accept(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: provider::Prepare<'_>,
    ) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let qp = own_qp(pair)?;
        if qp.qp_type() != QpType::Rc {
            return Err(ConnectError::QpType(qp.qp_type()));
        }
        let device = self.device.clone();
        let cm = device.cm().map_err(io_error)?;
        let Some(id) = &self.id else {
            return Err(ConnectError::Io(io::ErrorKind::NotFound.into()));
        };
        let depth = device.initiator_depth(params).min(self.depth);
        let up = bring_up(id, qp, params, depth, params.ack_timeout).and_then(|_| prepare());
        // Nothing else would end a queue pair that the peer never learns of.
        up.inspect_err(|_| QueuePair::fail(qp.object()))?;
        let Some(id) = self.id.take() else {
            return Err(ConnectError::Io(io::ErrorKind::NotFound.into()));
        };
        let tell = Tell {
            private_data,
            responder_resources: device.responder_resources(params),
            initiator_depth: depth,
            retry_count: 0,
            rnr_retry_count: params.rnr_retry.min(7),
            srq: qp.has_srq(),
            qpn: qp.qpn().value(),
        };
        let line = cm.adopt(id, Inbox::new());
        line.set_qp(qp);
        line.id.accept(&tell).map_err(|error| {
            QueuePair::fail(qp.object());
            io_error(error)
        })?;
        let private_data = std::mem::take(&mut self.private_data);
        let connection = Connection::new(&device, line, self.remote, private_data);
        Ok(Box::new(connection))
    }

    /// The reason is always that of the consumer: the system's RDMA CM sends no other.
    fn reject(&mut self, private_data: &[u8]) {
        if let Some(id) = self.id.take() {
            // A request that has been withdrawn needs no answer.
            let _ = id.reject(&private_data[..private_data.len().min(REJ_DATA_MAX)]);
        }
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        self.reject(&[]);
    }
}

/// A connection of a queue pair. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Connection {
    line: Arc<Line>,
    remote: Option<Endpoint>,
    private_data: Vec<u8>,
    /// Progress by the events that were taken.
    known: Mutex<Progress>,
    /// Set once this side has ended it.
    left: AtomicBool,
    /// Keeps alive the thread that takes its events.
    _device: Device,
}

impl Connection {
    fn new(device: &Device, line: Arc<Line>, remote: Endpoint, private_data: Vec<u8>) -> Connection {
        Connection {
            line,
            remote: Some(remote),
            private_data,
            known: Mutex::default(),
            left: AtomicBool::new(false),
            _device: device.clone(),
        }
    }

    fn known(&self) -> MutexGuard<'_, Progress> {
        self.known.lock()
    }

    fn wait_until(&self, deadline: Option<Instant>, done: impl Fn(Progress) -> bool) -> bool {
        let is_done = || done(self.progress()).then_some(());
        self.line.wait(deadline, is_done).is_some()
    }
}

impl provider::Connection for Connection {
    fn remote(&self) -> Option<&Endpoint> {
        self.remote.as_ref()
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.line.events().notify(events, token);
    }

    fn progress(&self) -> Progress {
        // Locked while events are taken, so that another thread that finds none left sees their effect.
        let mut known = self.known();
        while let Some(taken) = self.line.events.poll() {
            match taken.kind {
                cm_event::ESTABLISHED => known.establish(Arrival::next()),
                kind if ends(kind) => known.end(Arrival::next()),
                _ => {}
            }
        }
        *known
    }

    fn wait_established(&self) -> bool {
        let deadline = Instant::now().checked_add(ESTABLISH_TIMEOUT);
        self.wait_until(deadline, |progress| {
            progress.established.or(progress.ended).is_some()
        });
        let established = self.progress().established.is_some();
        if !established {
            self.disconnect();
        }
        established
    }

    fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(Instant::now().checked_add(timeout), |progress| {
            progress.ended.is_some()
        })
    }

    fn disconnect(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let progress = self.progress();
        if progress.ended.is_none() {
            self.line.end_qp();
            let _ = self.line.id.disconnect();
        }
        if progress.established.is_none() {
            // No further event will arrive.
            self.known().end(Arrival::next());
            self.line.events.wake();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.disconnect();
        if self.progress().ended.is_none() {
            // As long as the id exists, the system repeats its request until the peer has answered.
            let mut lines = self.line.shared.lines();
            if !self.line.has_ended() {
                lines.left.insert(self.line.id.number(), self.line.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_error__is_never_a_success() {
        assert_eq!(status_error(0).kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(status_error(-libc::ENODEV).raw_os_error(), Some(libc::ENODEV));
    }
}
