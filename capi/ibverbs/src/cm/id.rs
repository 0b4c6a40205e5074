//! Ids, with which a program binds, resolves, connects and listens.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{
    Arrival, Connection, ConnectionRequest, EventQueue, Progress, QpType, ServiceId, ServiceRequest,
};

use super::ask::Ask;
use super::channel::{CmEventObject, EventChannelObject, Events, Source, UserContext, take_back};
use super::connect::source_of;
use super::listen::{Listening, free_port, some_port};
use super::made::Made;
use super::multicast::Membership;
use super::socket_address::{read, route, storage};
use crate::cm_thread::{Handled, Handler};
use crate::context::{self, ContextObject};
use crate::device::DeviceObject;
use crate::events::Given;
use crate::{abi, minus_one, queue_pair};

/// Progress of an id: the states of the kernel's rdma_cm, without those in which it waits for an address or a route, which are
/// known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Idle,
    AddrBound,
    AddrResolved,
    RouteResolved,
    /// It has sent a request to a peer, or received one, whatever the outcome.
    Connect,
    /// The program has ended its connection.
    Disconnect,
    Listen,
}

/// The ids of the program.
static IDS: Made = Made::new();

/// Object behind a program's `struct rdma_cm_id` pointer.
#[repr(C)]
pub(super) struct CmIdObject {
    pub(super) shown: abi::CmId,
    pub(super) stage: Stage,
    pub(super) shared: Arc<IdShared>,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    pub(super) traffic_class: u8,
    pub(super) ack_timeout: Option<u8>,
    /// Request that this id was made for: the peer waits for the answer.
    pub(super) request: Option<IncomingRequest>,
    pub(super) memberships: Vec<Membership>,
    /// Listening services, which end when this is dropped.
    pub(super) listening: Vec<Listening>,
    /// Channel of its own, for an id made without one: calls wait for their event.
    private: Option<Box<EventChannelObject>>,
    /// Attributes with which queue pairs are made for ids that come in on this one ([`super::endpoint`]), in its domain.
    pub(super) passive: Option<abi::QpInitAttr>,
    /// Set on an IPv6 id that does not accept IPv4.
    pub(super) own_family: bool,
    process: u32,
}

/// A local address as ids have it: the objects that all ids there share, which stay.
#[derive(Clone, Copy)]
pub(super) struct LocalAddress {
    verbs: *mut abi::Context,
    pd: *mut abi::Pd,
    gid: abi::Gid,
}

impl LocalAddress {
    pub(super) fn at(address: IpAddr) -> Result<LocalAddress, c_int> {
        let device = DeviceObject::at(address).ok_or(libc::ENODEV)?;
        let verbs = context::shared(device)?;
        let (pd, gid) = (context::shared_domain(verbs)?, device.gid());
        Ok(LocalAddress { verbs, pd, gid })
    }
}

/// A peer's request.
pub(super) enum IncomingRequest {
    Connection(ConnectionRequest),
    Service(ServiceRequest),
}

impl IncomingRequest {
    /// Returns the time at which it arrived.
    pub(super) fn arrival(&self) -> Arrival {
        match self {
            IncomingRequest::Connection(request) => request.arrival(),
            IncomingRequest::Service(request) => request.arrival(),
        }
    }
}

/// State that an id shares with the thread that handles its events.
pub(super) struct IdShared {
    state: Mutex<IdState>,
    /// The question that it asks its peer. Locked before the sources of a channel, and before `state`.
    question: Mutex<Option<Box<dyn Ask>>>,
    /// Events that the program has and has not acknowledged.
    pub(super) given: Arc<Given>,
    handled: Handled,
}

struct IdState {
    /// Null when the id is destroyed.
    id: *mut abi::CmId,
    events: Arc<Events>,
    /// The program's channel; null when it has none.
    channel: *mut abi::EventChannel,
    connection: Option<Arc<Connection>>,
    /// Progress of the connection that was reported to the program; `None` while nothing is to be reported.
    told: Option<Told>,
}

/// Progress of a connection that was reported to the program.
struct Told {
    established: bool,
    ended: bool,
    /// Set when the connection's numbers no longer rest.
    rested: bool,
}

// SAFETY: the pointers are the program's, and not followed.
unsafe impl Send for IdState {}

impl IdShared {
    fn state(&self) -> MutexGuard<'_, IdState> {
        self.state.lock()
    }

    /// Reports an event of the id to the program, unless the id is gone. `event` makes it from the id and from the count of its
    /// unacknowledged events.
    pub(super) fn tell(&self, event: impl FnOnce(*mut abi::CmId, &Arc<Given>) -> Box<CmEventObject>) {
        let state = self.state();
        if !state.id.is_null() {
            state.events.push(event(state.id, &self.given));
        }
    }

    /// Keeps a connection, unless the id is gone: then it ends the connection and returns false.
    pub(super) fn keep(&self, connection: &Arc<Connection>) -> bool {
        let mut state = self.state();
        if state.id.is_null() {
            connection.disconnect();
            return false;
        }
        state.connection = Some(connection.clone());
        true
    }

    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        self.state().connection.clone()
    }

    /// Starts reporting the connection's progress: that it is established, unless the program was told so, and that it has
    /// ended.
    pub(super) fn follow(&self, established: bool) {
        self.state().told = Some(Told {
            established,
            ended: false,
            rested: false,
        });
    }

    /// Returns the queue, and the token, to which objects of the id report what happens, so that the thread handles it.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub(super) fn queue(self: &Arc<Self>) -> Result<(&EventQueue, u64), c_int> {
        self.handled.queue(|| {
            let handler: Weak<IdShared> = Arc::downgrade(self);
            handler
        })
    }

    fn question(&self) -> MutexGuard<'_, Option<Box<dyn Ask>>> {
        self.question.lock()
    }

    /// Asks the peer. An event reports the result.
    ///
    /// # Errors
    /// The system refuses the thread that takes the answer.
    pub(super) fn ask(self: &Arc<Self>, mut question: Box<dyn Ask>) -> Result<(), c_int> {
        let queue = self.queue()?;
        let mut place = self.question();
        question.advance(self, queue);
        *place = Some(question);
        Ok(())
    }

    /// Reports that the numbers of an ended connection no longer rest; returns the time at which to look again if they do.
    fn end_rest(&self) -> Option<Instant> {
        let mut state = self.state();
        let told = state.told.as_ref()?;
        if !told.ended || told.rested {
            return None;
        }
        if let Some(rest) = state.connection.as_ref()?.rests_for() {
            return Some(Instant::now() + rest);
        }
        state.told.as_mut()?.rested = true;
        drop(state);
        self.tell(|id, of| CmEventObject::new(id, of, abi::cm_event::TIMEWAIT_EXIT, 0));
        None
    }

    /// Returns the connection and its progress that was not reported yet: the caller reports it.
    pub(super) fn take_progress(&self) -> Option<(Arc<Connection>, Progress)> {
        let mut state = self.state();
        let connection = state.connection.clone()?;
        let told = state.told.as_mut()?;
        let known = connection.progress();
        let new = Progress {
            established: known.established.filter(|_| !told.established),
            ended: known.ended.filter(|_| !told.ended),
        };
        told.established |= known.established.is_some();
        told.ended |= known.ended.is_some();
        Some((connection, new))
    }

    pub(super) fn events(&self) -> Arc<Events> {
        self.state().events.clone()
    }

    /// Returns the events of its channel, and the channel as the program knows it.
    pub(super) fn channel(&self) -> (Arc<Events>, *mut abi::EventChannel) {
        let state = self.state();
        (state.events.clone(), state.channel)
    }
}

impl Handler for IdShared {
    fn handle(self: Arc<Self>) -> Option<Instant> {
        let queue = self.queue().ok()?;
        let mut question = self.question();
        let asks_at = question
            .as_mut()
            .and_then(|question| question.advance(&self, queue));
        drop(question);
        self.events().tell_happened(|| ());
        asks_at.or_else(|| self.end_rest())
    }
}

impl CmIdObject {
    /// Makes an id; without a channel it gets one of its own for these events.
    pub(super) fn new(
        channel: *mut abi::EventChannel,
        events: Arc<Events>,
        context: UserContext,
        ps: u32,
        qp_type: u32,
    ) -> *mut CmIdObject {
        // SAFETY: numbers and pointers, all of which may be zero.
        let mut shown: abi::CmId = unsafe { std::mem::zeroed() };
        (shown.context, shown.ps, shown.qp_type) = (context, ps, qp_type);
        shown.pkey = 0xffff;
        let mut private = channel.is_null().then(|| EventChannelObject::of(events.clone()));
        shown.channel = shown_channel(channel, &mut private);
        let state = IdState {
            id: ptr::null_mut(),
            events,
            channel,
            connection: None,
            told: None,
        };
        let shared = Arc::new(IdShared {
            state: Mutex::new(state),
            question: Mutex::default(),
            given: Arc::default(),
            handled: Handled::default(),
        });
        let id = Box::into_raw(Box::new(CmIdObject {
            shown,
            stage: Stage::Idle,
            shared: shared.clone(),
            local: None,
            remote: None,
            traffic_class: 0,
            ack_timeout: None,
            request: None,
            memberships: Vec::new(),
            listening: Vec::new(),
            private,
            passive: None,
            own_family: false,
            process: std::process::id(),
        }));
        shared.state().id = id.cast();
        IDS.add(id);
        id
    }

    /// Returns the object of an id.
    ///
    /// # Errors
    /// EINVAL: it is none.
    ///
    /// # Safety
    /// Nobody else uses the id meanwhile.
    unsafe fn of<'a>(id: *mut abi::CmId) -> Result<&'a mut CmIdObject, c_int> {
        match IDS.has(id) {
            // SAFETY: made by a Box in `CmIdObject::new` and not destroyed; used by nobody else, says the caller.
            true => Ok(unsafe { &mut *id.cast::<CmIdObject>() }),
            false => Err(libc::EINVAL),
        }
    }

    /// Reports an event that consists of its kind alone.
    pub(super) fn tell(&self, event: u32) {
        self.shared.tell(|id, of| CmEventObject::new(id, of, event, 0));
    }

    /// Returns whether calls wait for their event.
    pub(super) fn waits(&self) -> bool {
        self.private.is_some()
    }

    /// Takes a step from one of the allowed stages to the next one. If the step fails, the id stays in its stage.
    pub(super) fn advance(
        &mut self,
        from: &[Stage],
        to: Stage,
        step: impl FnOnce(&mut CmIdObject) -> Result<(), c_int>,
    ) -> Result<(), c_int> {
        if !from.contains(&self.stage) {
            return Err(libc::EINVAL);
        }
        // The step may report its event: from then on the id may be gone.
        let before = std::mem::replace(&mut self.stage, to);
        step(self).inspect_err(|_| self.stage = before)
    }

    /// Performs the action that causes an event. If calls wait for their event, waits for it; another event is an error. The
    /// program keeps the event until the next call, or the id's end.
    pub(super) fn complete(
        &mut self,
        expected: u32,
        begin: impl FnOnce(&mut CmIdObject) -> Result<(), c_int>,
    ) -> Result<(), c_int> {
        let waits = self.waits();
        begin(self)?;
        // If a channel has the event, another thread may have taken it, and the id may be gone.
        if waits { self.wait(expected) } else { Ok(()) }
    }

    fn wait(&mut self, expected: u32) -> Result<(), c_int> {
        self.forget_event();
        let event = super::channel::give(self.shared.events().next()?);
        self.shown.event = event;
        // SAFETY: just made, and acknowledged by this id alone.
        let (status, kind) = unsafe { ((*event).status, (*event).event) };
        use abi::cm_event::*;
        match kind {
            REJECTED => Err(libc::ECONNREFUSED),
            // For datagrams: the peer's answer.
            UNREACHABLE if status > 0 => Err(libc::ECONNREFUSED),
            _ if status != 0 => Err(status.abs()),
            UNREACHABLE => Err(libc::ETIMEDOUT),
            DISCONNECTED if expected != DISCONNECTED => Err(libc::ECONNRESET),
            // The peer ended the connection before, and the program has that event.
            TIMEWAIT_EXIT if expected == DISCONNECTED => Ok(()),
            _ if kind != expected => Err(libc::EIO),
            _ => Ok(()),
        }
    }

    pub(super) fn forget_event(&mut self) {
        let event = std::mem::replace(&mut self.shown.event, ptr::null_mut());
        if !event.is_null() {
            // SAFETY: it was given to this id alone.
            unsafe { take_back(event) };
        }
    }

    /// Moves the id's events to another channel.
    pub(super) fn migrate(&mut self, events: Arc<Events>, channel: *mut abi::EventChannel) {
        let mut private = channel.is_null().then(|| EventChannelObject::of(events.clone()));
        let mut state = self.shared.state();
        let before = std::mem::replace(&mut state.events, events.clone());
        state.channel = channel;
        let moved = before.take_of(state.id);
        moved.into_iter().for_each(|event| events.push(event));
        drop(state);
        for source in self.sources() {
            before.forget(&source);
            events.watch(source);
        }
        // A thread that reported events while a source was in neither list skipped that source.
        events.tell_happened(|| ());
        self.shown.channel = shown_channel(channel, &mut private);
        self.private = private;
    }

    /// Returns the sources of events that its channel watches.
    fn sources(&self) -> Vec<Weak<dyn Source>> {
        let mut sources: Vec<Weak<dyn Source>> = self.listening.iter().map(Listening::source).collect();
        sources.push(source_of(&self.shared));
        sources
    }

    /// Sets the id's device to that of a local address.
    fn take_device(&mut self, address: IpAddr) -> Result<(), c_int> {
        self.take_port(LocalAddress::at(address)?);
        Ok(())
    }

    pub(super) fn take_port(&mut self, port: LocalAddress) {
        (self.shown.verbs, self.shown.pd) = (port.verbs, port.pd);
        (self.shown.port_num, self.shown.sgid) = (1, port.gid);
    }

    /// Takes a path as its route. There always is a route, by the address.
    fn take_path(&mut self, length: usize) -> Result<(), c_int> {
        if length == 0 || !length.is_multiple_of(PATH_BYTES) {
            return Err(libc::EINVAL);
        }
        self.take_route()
    }

    /// Takes the step to a resolved route. There always is a route, by the address.
    fn take_route(&mut self) -> Result<(), c_int> {
        self.advance(&[Stage::AddrResolved], Stage::RouteResolved, |own| {
            own.tell(abi::cm_event::ROUTE_RESOLVED);
            Ok(())
        })
    }

    /// Takes the device from which a peer is reached, and a port there.
    fn resolve(&mut self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<(), c_int> {
        let given = source.or(self.local).filter(|local| !local.ip().is_unspecified());
        let local = match given {
            Some(local) => local.ip(),
            None => route(peer)?,
        };
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(libc::EINVAL);
        }
        // Peers at an address of this host are reached from that address.
        self.take_device(local).or_else(|_| self.take_device(peer.ip()))?;
        let bound = self.local.filter(|local| local.port() != 0);
        let port = given
            .filter(|at| at.port() != 0)
            .or(bound)
            .map_or_else(some_port, |at| at.port());
        self.set_addresses(SocketAddr::new(self.device()?.address(), port), Some(peer));
        self.tell(abi::cm_event::ADDR_RESOLVED);
        Ok(())
    }

    /// Sets the addresses, as programs read them in the id.
    pub(super) fn set_addresses(&mut self, local: SocketAddr, remote: Option<SocketAddr>) {
        self.local = Some(local);
        self.shown.src_addr = storage(local);
        if let Some(remote) = remote {
            self.remote = Some(remote);
            self.shown.dst_addr = storage(remote);
            self.shown.dgid = match remote.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
        }
    }

    /// Returns its device.
    pub(super) fn device(&self) -> Result<&rdmux_verbs::Device, c_int> {
        if self.shown.verbs.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a context of `context::shared`, which is never closed.
        Ok(&unsafe { ContextObject::of(self.shown.verbs) }.device)
    }

    /// Returns the service that the id asks for, or listens on, at a port.
    pub(super) fn service(&self, port: u16) -> ServiceId {
        match (self.shown.ps, self.is_datagram()) {
            (abi::port_space::IB, _) => ServiceId::ib(port),
            (_, true) => ServiceId::udp(port),
            (_, false) => ServiceId::tcp(port),
        }
    }

    /// Returns the type, in the vocabulary, of the queue pair that asks and of the one that is asked for.
    pub(super) fn qp_type(&self) -> QpType {
        match self.shown.qp_type {
            abi::qp_type::UC => QpType::Uc,
            abi::qp_type::UD => QpType::Ud,
            abi::qp_type::XRC_SEND => QpType::XrcSend,
            abi::qp_type::XRC_RECV => QpType::XrcRecv,
            _ => QpType::Rc,
        }
    }

    /// Returns whether it is for datagrams, which have no connections.
    pub(super) fn is_datagram(&self) -> bool {
        self.shown.qp_type == abi::qp_type::UD
    }

    /// Returns its queue pair.
    pub(super) fn pair(&self) -> Result<rdmux_verbs::QueuePair, c_int> {
        if self.shown.qp.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a queue pair that was made and is the id's.
        Ok(unsafe { queue_pair::QpObject::of(self.shown.qp) }.pair.clone())
    }

    /// Returns whether its process has forked and this is the child: its connection and its listeners belong to the parent.
    pub(super) fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }

    /// Ends the id, which the program no longer uses.
    pub(super) fn end(mut self: Box<Self>) {
        if self.is_inherited() {
            // Nothing of it may be dropped here: that would disconnect, and wait for threads that belong to the parent.
            std::mem::forget(self);
            return;
        }
        self.forget_event();
        while let Some(membership) = self.memberships.pop() {
            membership.end(&self);
        }
        self.listening.clear();
        self.request = None;
        let mut state = self.shared.state();
        let id = std::mem::replace(&mut state.id, ptr::null_mut());
        let events = state.events.take_of(id);
        let connection = state.connection.take();
        drop(state);
        // The thread reports nothing of it from here on.
        if let Some(question) = self.shared.question().take() {
            question.withdraw();
        }
        drop(events);
        if let Some(connection) = connection {
            connection.disconnect();
        }
        self.shared.given.wait_acknowledged();
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_create_id(
    channel: *mut abi::EventChannel,
    id: *mut *mut abi::CmId,
    context: UserContext,
    ps: u32,
) -> c_int {
    minus_one(create(channel, context, ps, None).map(|made| {
        // SAFETY: a place of the caller's.
        unsafe { *id = made };
    }))
}

/// Makes an id of a port space; the type of its queue pair follows from that, unless it is given.
pub(super) fn create(
    channel: *mut abi::EventChannel,
    context: UserContext,
    ps: u32,
    qp_type: Option<u32>,
) -> Result<*mut abi::CmId, c_int> {
    use abi::port_space::{IB, TCP, UDP};
    use abi::qp_type::{RC, UC, UD, XRC_RECV, XRC_SEND};
    let wanted = qp_type.unwrap_or(if ps == UDP { UD } else { RC });
    let qp_type = match (ps, wanted) {
        (TCP, RC | UC | XRC_SEND | XRC_RECV) | (UDP, UD) | (IB, RC | UC | XRC_SEND | XRC_RECV) => wanted,
        // IPoIB has its own queue pairs and Q_Key, which RoCE does not have.
        _ => return Err(libc::EOPNOTSUPP),
    };
    let events = if channel.is_null() {
        Events::new()?
    } else {
        // SAFETY: a channel that was made, says the caller.
        unsafe { &*channel.cast::<EventChannelObject>() }.events.clone()
    };
    Ok(CmIdObject::new(channel, events, context, ps, qp_type).cast())
}

/// Returns the channel that a program reads in its id: the one that it gave, or the id's own.
fn shown_channel(
    given: *mut abi::EventChannel,
    private: &mut Option<Box<EventChannelObject>>,
) -> *mut abi::EventChannel {
    private
        .as_mut()
        .map_or(given, |channel| (&raw mut **channel).cast())
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_destroy_id(id: *mut abi::CmId) -> c_int {
    if !IDS.remove(id) {
        return minus_one(Err(libc::EINVAL));
    }
    // SAFETY: made by a Box in `CmIdObject::new`, and not used any more, says the caller.
    unsafe { Box::from_raw(id.cast::<CmIdObject>()) }.end();
    0
}

/// Returns the address to use for `address`: for a loopback address without a device, that of the first device.
fn seen(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_loopback() || DeviceObject::at(address.ip()).is_some() {
        return address;
    }
    let first = DeviceObject::all()
        .into_iter()
        .find(|device| device.address.is_ipv4() == address.is_ipv4());
    first.map_or(address, |device| SocketAddr::new(device.address, address.port()))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_bind_addr(id: *mut abi::CmId, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: nobody else uses the id, says the caller, whose address it is.
    let (own, address) = unsafe { (CmIdObject::of(id), read(address)) };
    minus_one(own.and_then(|own| {
        let address = seen(address?);
        own.advance(&[Stage::Idle], Stage::AddrBound, |own| {
            if !address.ip().is_unspecified() {
                own.take_device(address.ip())?;
            }
            let port = match address.port() {
                0 => free_port(own, address),
                port => port,
            };
            own.set_addresses(SocketAddr::new(address.ip(), port), None);
            Ok(())
        })
    }))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut abi::CmId,
    source: *mut libc::sockaddr,
    destination: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    // SAFETY: nobody else uses the id, says the caller, whose addresses they are, or there are none.
    let (own, source, destination) = unsafe { (CmIdObject::of(id), read(source), read(destination)) };
    minus_one(own.and_then(|own| {
        let peer = seen(destination?);
        own.complete(abi::cm_event::ADDR_RESOLVED, |own| {
            let from = [Stage::Idle, Stage::AddrBound];
            own.advance(&from, Stage::AddrResolved, |own| {
                own.resolve(source.ok().map(seen), peer)
            })
        })
    }))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_resolve_route(id: *mut abi::CmId, _: c_int) -> c_int {
    // SAFETY: nobody else uses the id, says the caller.
    let own = unsafe { CmIdObject::of(id) };
    minus_one(own.and_then(|own| own.complete(abi::cm_event::ROUTE_RESOLVED, CmIdObject::take_route)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_get_src_port(id: *mut abi::CmId) -> u16 {
    // SAFETY: an id that was made, says the caller.
    unsafe { &*id.cast::<CmIdObject>() }
        .local
        .map_or(0, |at| at.port().to_be())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_get_dst_port(id: *mut abi::CmId) -> u16 {
    // SAFETY: an id that was made, says the caller.
    unsafe { &*id.cast::<CmIdObject>() }
        .remote
        .map_or(0, |at| at.port().to_be())
}

/// Options of `rdma_set_option(3)`.
const LEVEL_IB: c_int = 1;
const REUSEADDR: c_int = 1;
const AFONLY: c_int = 2;
const PATH: c_int = 1;
/// `struct ibv_path_data`.
const PATH_BYTES: usize = 72;

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_set_option(
    id: *mut abi::CmId,
    level: c_int,
    name: c_int,
    value: *const u8,
    length: usize,
) -> c_int {
    use abi::cm_option::{ACK_TIMEOUT, LEVEL_ID, TOS};
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    let byte = || match length {
        // SAFETY: as long as the caller says.
        1 => Ok(unsafe { *value }),
        _ => Err(libc::EINVAL),
    };
    let flag = || match length {
        // SAFETY: as long as the caller says.
        4 => Ok(unsafe { value.cast::<c_int>().read_unaligned() } != 0),
        _ => Err(libc::EINVAL),
    };
    minus_one(match (level, name) {
        (LEVEL_ID, TOS) => byte().map(|tos| own.traffic_class = tos),
        (LEVEL_ID, ACK_TIMEOUT) => byte().and_then(|timeout| {
            // 5 bits of the REQ.
            own.ack_timeout = Some(timeout).filter(|timeout| *timeout < 32);
            own.ack_timeout.map(|_| ()).ok_or(libc::EINVAL)
        }),
        // No id owns a port until it listens on it, so there is none to share.
        (LEVEL_ID, REUSEADDR) => flag().map(|_| ()),
        (LEVEL_ID, AFONLY) => flag().map(|only| own.own_family = only),
        (LEVEL_IB, PATH) => own.take_path(length),
        _ => Err(libc::ENOSYS),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut abi::Context {
    let contexts: Vec<*mut abi::Context> = DeviceObject::all()
        .into_iter()
        .filter_map(|of| context::shared(of).ok())
        .collect();
    // SAFETY: room for all and a null pointer; what calloc gave is zero, so the list ends with one.
    let list = unsafe { libc::calloc(contexts.len() + 1, size_of::<*mut abi::Context>()) };
    let list = list.cast::<*mut abi::Context>();
    if list.is_null() {
        return list;
    }
    for (i, context) in contexts.iter().enumerate() {
        // SAFETY: `i` is less than the room.
        unsafe { *list.add(i) = *context };
    }
    if !count.is_null() {
        // SAFETY: a place of the caller's.
        unsafe { *count = contexts.len() as c_int };
    }
    list
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_free_devices(list: *mut *mut abi::Context) {
    // SAFETY: made by calloc above, says the caller. The contexts stay open.
    unsafe { libc::free(list.cast()) };
}
