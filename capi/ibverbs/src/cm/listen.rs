//! Ids that listen.

use std::ffi::c_int;
use std::io;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmux_verbs::{DatagramListener, EventQueue, ListenError, Listener};

use super::channel::{CmEventObject, Happened, Source, UserContext};
use super::connect::told;
use super::id::{CmIdObject, IdShared, IncomingRequest, LocalAddress, Stage};
use crate::device::DeviceObject;
use crate::{abi, context, minus_one};

/// Ports to try when the program leaves the choice to the library.
const PORTS: std::ops::Range<u16> = 32_768..61_000;

/// Maximum backlog, as in the kernel.
const BACKLOG_MAX: usize = 1_024;

/// Receives requests on an address, until it is dropped.
pub(super) struct Listening {
    shared: Arc<IdShared>,
    hearing: Arc<Hearing>,
}

impl Listening {
    /// Returns the source of events that its channel watches.
    pub(super) fn source(&self) -> Weak<dyn Source> {
        let source: Weak<Hearing> = Arc::downgrade(&self.hearing);
        source
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Nobody else holds the service after this: the port is free once it is dropped.
        self.shared.events().forget(&self.source());
    }
}

/// The listening id, as those know it who report requests to it.
struct On {
    shared: Arc<IdShared>,
    /// The program's pointer: reported in events, and not followed.
    id: *mut abi::CmId,
    user: UserContext,
    ps: u32,
    qp_type: u32,
    local: SocketAddr,
    port: LocalAddress,
    /// Maximum number of requests that wait to be taken.
    backlog: usize,
}

// SAFETY: the pointers are the program's, and those of its port, which stay: none is followed.
unsafe impl Send for On {}
// SAFETY: as above.
unsafe impl Sync for On {}

/// Service that an id listens for.
enum Service {
    Connections(Listener),
    Datagrams(DatagramListener),
}

impl Service {
    /// Returns the next request that has arrived.
    fn next(&self) -> Option<IncomingRequest> {
        match self {
            Service::Connections(listener) => {
                listener.accept(Duration::ZERO).map(IncomingRequest::Connection)
            }
            Service::Datagrams(listener) => listener.accept(Duration::ZERO).map(IncomingRequest::Service),
        }
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        match self {
            Service::Connections(listener) => listener.notify(events, token),
            Service::Datagrams(listener) => listener.notify(events, token),
        }
    }
}

/// The service that an id listens on, and the id that gets its requests.
struct Hearing {
    service: Service,
    on: On,
}

impl Source for Hearing {
    fn take(self: Arc<Self>) -> Vec<Happened> {
        let requests = iter::from_fn(|| self.service.next());
        let happened = requests.map(|request| {
            let (at, hearing) = (request.arrival(), self.clone());
            let tell = Box::new(move || tell(&hearing.on, request));
            Happened { at, tell }
        });
        happened.collect()
    }
}

/// Makes an id for a request, and reports it.
fn tell(on: &On, request: IncomingRequest) {
    let (events, channel) = on.shared.channel();
    if events.waiting(on.id) >= on.backlog {
        // Dropping the request refuses it.
        return;
    }
    let made = CmIdObject::new(channel, events, on.user, on.ps, on.qp_type);
    // SAFETY: just made.
    let own = unsafe { &mut *made };
    own.take_port(on.port);
    let event = CmEventObject::new(made.cast(), &own.shared.given, abi::cm_event::CONNECT_REQUEST, 0);
    let (peer, event) = match &request {
        IncomingRequest::Connection(request) => {
            own.traffic_class = request.remote().traffic_class;
            let conn = told(request.remote());
            let peer = SocketAddr::new(request.peer(), request.peer_port());
            (peer, event.with(conn, request.private_data()))
        }
        IncomingRequest::Service(request) => {
            // The request says no more about its sender.
            // SAFETY: numbers and pointers, all of which may be zero.
            let ud = unsafe { std::mem::zeroed() };
            let peer = SocketAddr::new(request.peer(), request.peer_port());
            (peer, event.with_ud(ud, request.private_data()))
        }
    };
    own.set_addresses(on.local, Some(peer));
    let event = event.on(on.id, &on.shared.given);
    (own.request, own.stage) = (Some(request), Stage::Connect);
    // The event goes to the listening id; if that is gone, nobody takes the new id.
    on.shared.tell(|_, _| event);
}

/// Returns the addresses that an id listens on.
fn addresses(bound: Option<SocketAddr>, own_family: bool) -> Result<(Vec<IpAddr>, u16), c_int> {
    let bound = bound.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into());
    if !bound.ip().is_unspecified() {
        return Ok((vec![bound.ip()], bound.port()));
    }
    // IPv6's unspecified address stands for both families, as with a socket, unless the id is limited to its own.
    let all = DeviceObject::all().into_iter().map(|device| device.address);
    let all: Vec<IpAddr> = all
        .filter(|address| (bound.is_ipv6() && !own_family) || address.is_ipv4() == bound.is_ipv4())
        .collect();
    if all.is_empty() {
        Err(libc::ENODEV)
    } else {
        Ok((all, bound.port()))
    }
}

/// Returns the device of an address.
pub(crate) fn device_at(address: IpAddr) -> Result<rdmux_verbs::Device, c_int> {
    let device = DeviceObject::at(address).ok_or(libc::ENODEV)?;
    // SAFETY: a context of `context::shared`, which is never closed.
    Ok(unsafe { context::ContextObject::of(context::shared(device)?) }
        .device
        .clone())
}

/// Returns the devices of addresses. It leaves out a device that another user has, or that cannot be opened, if others are
/// left.
fn devices_at(addresses: &[IpAddr]) -> Result<Vec<(IpAddr, rdmux_verbs::Device)>, c_int> {
    let mut why = libc::ENODEV;
    let mut found = Vec::new();
    for address in addresses {
        match device_at(*address) {
            Ok(device) => found.push((*address, device)),
            Err(errno) => why = errno,
        }
    }
    if found.is_empty() { Err(why) } else { Ok(found) }
}

/// Returns the error number of an error of the system's or of a provider's.
pub(super) fn errno_of_io(error: &io::Error) -> c_int {
    let known = match error.kind() {
        io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    };
    error.raw_os_error().unwrap_or(known)
}

/// Returns the error number for a service that cannot be offered.
fn errno_of(error: ListenError) -> c_int {
    match &error {
        ListenError::InUse(_) => libc::EADDRINUSE,
        ListenError::Io(error) => errno_of_io(error),
        ListenError::Provider(why) => {
            match why.source().and_then(|source| source.downcast_ref::<io::Error>()) {
                Some(failed) => errno_of_io(failed),
                // An address has no more room.
                None => libc::ENOBUFS,
            }
        }
    }
}

/// Returns a port when a program leaves the choice: another one each time, and for each process.
pub(crate) fn some_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = u64::from(std::process::id()) * 61;
    let n = u64::from(NEXT.fetch_add(1, Ordering::Relaxed));
    PORTS.start + ((first + n) % PORTS.len() as u64) as u16
}

/// Offers a service on an address, or on all, and on a port, or on a free one. Returns the port, and the service on each
/// address.
pub(crate) fn services<S>(
    bound: Option<SocketAddr>,
    own_family: bool,
    offer: impl Fn(&rdmux_verbs::Device, u16) -> Result<S, ListenError>,
) -> Result<(u16, Vec<(IpAddr, S)>), c_int> {
    let (addresses, port) = addresses(bound, own_family)?;
    let devices = devices_at(&addresses)?;
    // Offers the service on all addresses or on none.
    let on = |port| {
        let offered = devices.iter().map(|(address, device)| {
            let service = offer(device, port).map_err(errno_of)?;
            Ok((*address, service))
        });
        Ok((port, offered.collect::<Result<Vec<_>, c_int>>()?))
    };
    if port != 0 {
        return on(port);
    }
    for _ in PORTS {
        match on(some_port()) {
            Err(libc::EADDRINUSE) => {}
            found => return found,
        }
    }
    Err(libc::EADDRINUSE)
}

/// Returns the function that offers the service of an id.
fn offer(own: &CmIdObject) -> impl Fn(&rdmux_verbs::Device, u16) -> Result<Service, ListenError> {
    let (qp_types, datagrams) = ([own.qp_type()], own.is_datagram());
    move |device, port| {
        if datagrams {
            return device.listen_datagram(port).map(Service::Datagrams);
        }
        let listener = device.listen_service(own.service(port), &qp_types);
        listener.map(Service::Connections)
    }
}

/// Returns a port for an id that is bound to an address: one that nobody listens on, as far as that can be known now.
pub(super) fn free_port(own: &CmIdObject, address: SocketAddr) -> u16 {
    let found = services(Some(address), own.own_family, offer(own));
    found.map_or_else(|_| some_port(), |(port, _)| port)
}

fn listen(id: *mut abi::CmId, own: &mut CmIdObject, backlog: c_int) -> Result<(), c_int> {
    let asked = usize::try_from(backlog).ok().filter(|backlog| *backlog > 0);
    let backlog = asked.map_or(BACKLOG_MAX, |backlog| backlog.min(BACKLOG_MAX));
    let bound = own.local.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into());
    let (queue, token) = own.shared.queue()?;
    let (port, services) = services(Some(bound), own.own_family, offer(own))?;
    let hears = |(address, service)| {
        let on = On {
            shared: own.shared.clone(),
            id,
            user: own.shown.context,
            ps: own.shown.ps,
            qp_type: own.shown.qp_type,
            local: SocketAddr::new(address, port),
            port: LocalAddress::at(address)?,
            backlog,
        };
        Ok(Hearing { service, on })
    };
    // If the id cannot listen on one of several addresses, it listens on none.
    let hearings: Vec<Hearing> = services.into_iter().map(hears).collect::<Result<_, c_int>>()?;
    let listening = hearings.into_iter().map(|hearing| {
        let (shared, hearing) = (own.shared.clone(), Arc::new(hearing));
        let listening = Listening { shared, hearing };
        own.shared.events().watch(listening.source());
        listening.hearing.service.notify(queue, token);
        listening
    });
    own.listening = listening.collect();
    own.set_addresses(SocketAddr::new(bound.ip(), port), None);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_listen(id: *mut abi::CmId, backlog: c_int) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    let from = [Stage::Idle, Stage::AddrBound];
    minus_one(own.advance(&from, Stage::Listen, |own| listen(id, own, backlog)))
}

/// Waits for the next request of an id that has no channel. Returns the request's id, with the queue pair that the program
/// asked for.
fn next_request(own: &mut CmIdObject) -> Result<*mut abi::CmId, c_int> {
    if own.stage != Stage::Listen || !own.waits() {
        return Err(libc::EINVAL);
    }
    // If this fails, the request stays where it is.
    let events = super::channel::Events::new()?;
    own.complete(abi::cm_event::CONNECT_REQUEST, |_| Ok(()))?;
    // SAFETY: the event that was just waited for.
    let asked = unsafe { (*own.shown.event).id };
    // SAFETY: an id that was made for the request, and is nobody's yet.
    let made = unsafe { &mut *asked.cast::<CmIdObject>() };
    made.migrate(events, ptr::null_mut());
    // The event belongs to the new id, with the private data in it.
    made.shown.event = std::mem::replace(&mut own.shown.event, ptr::null_mut());
    if let Some(mut init) = own.passive {
        // SAFETY: as the program gave it to `rdma_create_ep`.
        let with = unsafe { super::connect::create_qp(asked, own.shown.pd, &mut init, None) };
        with.inspect_err(|_| {
            // SAFETY: it is nobody's yet; the request is refused with it.
            unsafe { super::id::rdma_destroy_id(asked) };
        })?;
    }
    Ok(asked)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_get_request(listener: *mut abi::CmId, id: *mut *mut abi::CmId) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *listener.cast::<CmIdObject>() };
    minus_one(next_request(own).map(|asked| {
        // SAFETY: a place of the caller's.
        unsafe { *id = asked };
    }))
}
