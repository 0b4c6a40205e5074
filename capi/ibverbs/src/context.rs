//! Contexts: opened devices, and the asynchronous events of their objects.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Weak};

use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{AsyncEvent, OpenError};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use crate::device::DeviceObject;
use crate::events::Given;
use crate::{
    abi, channel, completions, device_memory, domains, made, memory, minus_one, query, queue_pair, srq, wait,
    warn, xrc,
};

/// Object that a program's `struct ibv_context` pointer points into: the part that `verbs.h` calls through lies before the
/// context, ours behind it.
#[repr(C)]
pub(crate) struct ContextObject {
    verbs: abi::VerbsContext,
    pub(crate) of: &'static DeviceObject,
    pub(crate) device: rdmux_verbs::Device,
    /// State that all contexts of the device share.
    opened: Arc<Opened>,
    /// `cmd_fd`: nothing is sent over it, but programs duplicate it, and a context is found again by it.
    command: OwnedFd,
    /// `async_fd`: readable when the device has an event, or this context has one.
    events_fd: OwnedFd,
    /// Readable when there are events of this context's objects: both change together, under their lock.
    told: OwnedFd,
    events: Mutex<VecDeque<abi::AsyncEvent>>,
    /// For a context that ids share: the objects that [`shared_xrcd`] and [`shared_domain`] have made, or 0.
    shared_xrcd: Mutex<usize>,
    shared_domain: Mutex<usize>,
}

/// A device of the process: all contexts of an address share one, because an address has few slots.
struct Opened {
    device: rdmux_verbs::Device,
    process: u32,
    objects: Mutex<Objects>,
    /// Addresses of its open contexts: events of the port go to all of them.
    contexts: Mutex<Vec<usize>>,
}

static OPEN: Mutex<Vec<(IpAddr, Weak<Opened>)>> = Mutex::new(Vec::new());

impl Opened {
    /// Returns the open devices of this process.
    fn all() -> Vec<Arc<Opened>> {
        let process = std::process::id();
        let list = OPEN.lock();
        let opened = list.iter().filter_map(|(_, opened)| opened.upgrade());
        opened.filter(|opened| opened.process == process).collect()
    }

    /// Returns the device of an address: the one that is open, or a new one. A child of a fork has its own.
    fn get(of: &DeviceObject) -> Result<Arc<Opened>, c_int> {
        let mut list = OPEN.lock();
        list.retain(|(_, opened)| opened.strong_count() > 0);
        let process = std::process::id();
        let mut known = list.iter().filter(|(address, _)| *address == of.address);
        let known = known.find_map(|(_, opened)| opened.upgrade().filter(|opened| opened.process == process));
        if let Some(opened) = known {
            return Ok(opened);
        }
        // The first one is the default.
        rdmux_soft::register();
        rdmux_hw::register();
        rdmux_share::register();
        let device = rdmux_verbs::Device::open(of.address).map_err(|error| {
            match &error {
                // These errors name the address themselves.
                OpenError::Provider(_) | OpenError::NotLocal(_) | OpenError::NotOneHost(_) => {
                    warn(format_args!("{error}"))
                }
                _ => warn(format_args!("{}: {error}", of.address)),
            }
            match error {
                OpenError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
                OpenError::NotOneHost(_) => libc::ENODEV,
                _ => libc::EBUSY,
            }
        })?;
        let opened = Arc::new(Opened {
            device,
            process,
            objects: Mutex::default(),
            contexts: Mutex::default(),
        });
        list.push((of.address, Arc::downgrade(&opened)));
        Ok(opened)
    }
}

/// Sends pending acknowledgements and delayed packets of devices when the program ends in its own way (`exit(3)`), because most
/// programs end with queues and connections open.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = acknowledge;

extern "C" fn acknowledge() {
    // The program may end in the middle of anything, so this waits for nothing.
    let Some(list) = OPEN.try_lock() else { return };
    for opened in list.iter().filter_map(|(_, opened)| opened.upgrade()) {
        if opened.process == std::process::id() {
            opened.device.acknowledge();
        }
    }
}

/// Objects that asynchronous events concern, by their numbers, as the program's pointers.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) pairs: HashMap<u32, *mut abi::Qp>,
    pub(crate) completions: HashMap<u32, *mut abi::Cq>,
    pub(crate) queues: HashMap<u32, *mut abi::Srq>,
    /// Objects that can be imported, by their handles.
    pub(crate) domains: HashMap<u32, *mut abi::Pd>,
    pub(crate) regions: HashMap<u32, *mut abi::Mr>,
    pub(crate) memories: HashMap<u32, *mut abi::Dm>,
    handles: u32,
}

impl Objects {
    /// Returns a handle that no object has had.
    pub(crate) fn new_handle(&mut self) -> u32 {
        self.handles += 1;
        self.handles
    }
}

impl ContextObject {
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.opened.objects.lock()
    }

    /// Returns whether its process has forked and this is the child: it has a copy of what the parent opened, without the
    /// parent's threads, and what they share with the kernel still belongs to the parent. The child must end nothing of that;
    /// only the memory of the copy is lost.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process() != std::process::id()
    }

    /// Returns the process that opened it.
    pub(crate) fn process(&self) -> u32 {
        self.opened.process
    }

    /// Reports an event to this context.
    fn tell(&self, event: abi::AsyncEvent) {
        let mut events = self.events.lock();
        events.push_back(event);
        let _ = rustix::io::write(&self.told, &1u64.to_ne_bytes());
    }

    /// Takes the next event, for the program: from now on the end of its object waits until the event is acknowledged.
    fn take_event(&self) -> Option<abi::AsyncEvent> {
        // Held until the event is counted: its object is not destroyed before that.
        let _objects = self.objects();
        let event = self.take_from(VecDeque::pop_front)?;
        // SAFETY: an object takes its events out of the list as it leaves the objects, which are held.
        if let Some(given) = unsafe { given_of(&event) } {
            given.give();
        }
        Some(event)
    }

    /// Takes an object that is about to end out of the objects, together with its events that the program has not been given.
    pub(crate) fn take_out(&self, element: *mut c_void, remove: impl FnOnce(&mut Objects)) {
        // Later events of the device for it find no object.
        distribute(&self.opened);
        let mut objects = self.objects();
        remove(&mut objects);
        self.take_from(|events| events.retain(|event| event.element != element.addr()));
    }

    /// Ends the objects that a program has left in a context which it closes, as the kernel does: peers no longer reach
    /// anything of them. An object that an imported object or an address handle still uses can only no longer be found.
    ///
    /// # Safety
    /// The context is this one's, and none of its objects is used any more.
    unsafe fn end_objects(&self, context: *mut abi::Context) {
        macro_rules! left {
            ($list:expr, $type:ty) => {{
                // SAFETY: it is there while it is among the objects, which are held.
                let is_left = |_: &u32, object: &mut *mut $type| unsafe { (**object).context } == context;
                let left = $list.extract_if(is_left);
                left.map(|(_, object)| object).collect::<Vec<_>>()
            }};
        }
        let mut held = self.objects();
        let objects = &mut *held;
        let pairs = left!(objects.pairs, abi::Qp);
        let queues = left!(objects.queues, abi::Srq);
        let completions = left!(objects.completions, abi::Cq);
        let regions = left!(objects.regions, abi::Mr);
        let memories = left!(objects.memories, abi::Dm);
        let domains = left!(objects.domains, abi::Pd);
        drop(held);
        // SAFETY: as the caller says; what uses others goes before them.
        unsafe {
            pairs.into_iter().for_each(|pair| queue_pair::end(pair));
            queues.into_iter().for_each(|queue| srq::end(queue));
            completions.into_iter().for_each(|queue| channel::end(queue));
            regions.into_iter().for_each(|region| memory::end_region(region));
            memories.into_iter().for_each(|memory| device_memory::end(memory));
            domains.into_iter().for_each(|domain| memory::end_left(domain));
        }
    }

    fn take_from<T>(&self, take: impl FnOnce(&mut VecDeque<abi::AsyncEvent>) -> T) -> T {
        let mut events = self.events.lock();
        let taken = take(&mut events);
        if events.is_empty() {
            let _ = rustix::io::read(&self.told, &mut [0; 8]);
        }
        taken
    }

    /// Returns the object that a program's pointer points into.
    ///
    /// # Safety
    /// The pointer is one that [`ibv_open_device`] gave out, and is not closed.
    pub(crate) unsafe fn of<'a>(context: *mut abi::Context) -> &'a ContextObject {
        let at = offset_of!(ContextObject, verbs) + offset_of!(abi::VerbsContext, context);
        // SAFETY: it lies there in what was made, says the caller.
        unsafe { &*context.cast::<u8>().sub(at).cast::<ContextObject>() }
    }
}

fn open(of: &'static DeviceObject) -> Result<*mut abi::Context, c_int> {
    // A file, which its number distinguishes from others, whoever duplicates it.
    let command = memfd_create("rdmux", MemfdFlags::CLOEXEC).map_err(Errno::raw_os_error)?;
    open_over(of, command)
}

fn open_over(of: &'static DeviceObject, command: OwnedFd) -> Result<*mut abi::Context, c_int> {
    let opened = Opened::get(of)?;
    let device = opened.device.clone();
    let told = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Errno::raw_os_error)?;
    let events_fd = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Errno::raw_os_error)?;
    for fd in [device.async_event_fd(), told.as_fd()] {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&events_fd, fd, data, epoll::EventFlags::IN).map_err(Errno::raw_os_error)?;
    }
    // SAFETY: all of it may be zero: numbers, null pointers, and functions that are none.
    let mut verbs: abi::VerbsContext = unsafe { std::mem::zeroed() };
    verbs.size = size_of::<abi::VerbsContext>();
    verbs.query_port = Some(query::query_port);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.advise_mr = memory::advise_mr as *const c_void;
    verbs.create_qp_ex = Some(queue_pair::create_qp_ex);
    verbs.open_qp = Some(xrc::open_qp);
    verbs.create_srq_ex = Some(srq::create_srq_ex);
    verbs.get_srq_num = Some(srq::get_srq_num);
    verbs.open_xrcd = Some(xrc::open_xrcd);
    verbs.close_xrcd = Some(xrc::close_xrcd);
    verbs.alloc_td = Some(domains::alloc_td);
    verbs.dealloc_td = Some(domains::dealloc_td);
    verbs.alloc_parent_domain = Some(domains::alloc_parent_domain);
    verbs.alloc_dm = Some(device_memory::alloc_dm);
    verbs.free_dm = Some(device_memory::free_dm);
    verbs.reg_dm_mr = Some(device_memory::reg_dm_mr);
    verbs.alloc_null_mr = Some(device_memory::alloc_null_mr);
    verbs.modify_qp_rate_limit = Some(queue_pair::modify_qp_rate_limit);
    verbs.create_cq_ex = Some(completions::create_cq_ex);
    verbs.modify_cq = Some(completions::modify_cq);
    verbs.query_rt_values = Some(completions::query_rt_values);
    let context = &mut verbs.context;
    context.device = ptr::from_ref(&of.shown).cast_mut();
    context.ops.poll_cq = Some(channel::poll_cq);
    context.ops.req_notify_cq = Some(channel::req_notify_cq);
    context.ops.alloc_mw = Some(memory::alloc_mw);
    context.ops.bind_mw = Some(memory::bind_mw);
    context.ops.dealloc_mw = Some(memory::dealloc_mw);
    context.ops.post_srq_recv = Some(srq::post_recv);
    context.ops.post_send = Some(queue_pair::post_send);
    context.ops.post_recv = Some(queue_pair::post_recv);
    context.cmd_fd = command.as_raw_fd();
    context.async_fd = events_fd.as_raw_fd();
    context.num_comp_vectors = device.completion_vectors().cast_signed();
    context.abi_compat = abi::EXTENDED;
    let made = Box::leak(Box::new(ContextObject {
        verbs,
        of,
        device,
        opened,
        command,
        events_fd,
        told,
        events: Mutex::default(),
        shared_xrcd: Mutex::default(),
        shared_domain: Mutex::default(),
    }));
    made.opened
        .contexts
        .lock()
        .push((&raw const *made).expose_provenance());
    Ok(&raw mut made.verbs.context)
}

/// Returns the context of a device that all ids share. It stays open. A child of a fork has its own.
pub(crate) fn shared(of: &'static DeviceObject) -> Result<*mut abi::Context, c_int> {
    static OPEN: Mutex<Vec<(IpAddr, usize)>> = Mutex::new(Vec::new());
    let mut list = OPEN.lock();
    for (_, context) in list.iter().filter(|(address, _)| *address == of.address) {
        let context = ptr::with_exposed_provenance_mut(*context);
        // SAFETY: it is never closed.
        if !unsafe { ContextObject::of(context) }.is_inherited() {
            return Ok(context);
        }
    }
    let context = open(of)?;
    list.push((of.address, context.expose_provenance()));
    Ok(context)
}

/// Makes an object once for such a context, at its first use. It stays open, too.
fn made_once<T>(place: &Mutex<usize>, make: impl FnOnce() -> Result<*mut T, c_int>) -> Result<*mut T, c_int> {
    let mut at = place.lock();
    if *at == 0 {
        *at = make()?.expose_provenance();
    }
    Ok(ptr::with_exposed_provenance_mut(*at))
}

/// Returns the XRC domain that ids of such a context share.
pub(crate) fn shared_xrcd(context: *mut abi::Context) -> Result<*mut abi::Xrcd, c_int> {
    // SAFETY: a context of `shared`, which is never closed.
    let own = unsafe { ContextObject::of(context) };
    // SAFETY: as above.
    made_once(&own.shared_xrcd, || unsafe { xrc::unnamed(context) })
}

/// Returns the domain of such a context that ids have when their program gives none.
pub(crate) fn shared_domain(context: *mut abi::Context) -> Result<*mut abi::Pd, c_int> {
    // SAFETY: a context of `shared`, which is never closed.
    let own = unsafe { ContextObject::of(context) };
    made_once(&own.shared_domain, || memory::alloc_pd(context))
}

/// Opens a second context of the device that a context of this process belongs to: its objects can be imported there.
fn import(command: c_int) -> Result<*mut abi::Context, c_int> {
    // SAFETY: a descriptor of the caller's, which it leaves open during the call.
    let given = unsafe { BorrowedFd::borrow_raw(command) };
    let file = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    let wanted = file(given).map_err(Errno::raw_os_error)?;
    let is_of = |context: &usize| {
        // SAFETY: open while it is in the list, which is held.
        let context = unsafe { &*ptr::with_exposed_provenance::<ContextObject>(*context) };
        (file(context.command.as_fd()) == Ok(wanted)).then_some(context.of)
    };
    let mut open = Opened::all().into_iter();
    let found = open.find_map(|opened| opened.contexts.lock().iter().find_map(is_of));
    // Contexts of other processes cannot be reached: their memory is theirs.
    let of = found.ok_or(libc::EOPNOTSUPP)?;
    // SAFETY: from now on the descriptor is the context's, says `ibv_import_device(3)`.
    open_over(of, unsafe { OwnedFd::from_raw_fd(command) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_device(command: c_int) -> *mut abi::Context {
    made(if command < 0 {
        Err(libc::EBADF)
    } else {
        import(command)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut abi::Device) -> *mut abi::Context {
    // SAFETY: a device of the list, says the caller.
    made(open(unsafe { DeviceObject::of(device) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut abi::Context) -> c_int {
    // SAFETY: an open context, says the caller, who uses it no more.
    let own = unsafe { ContextObject::of(context) };
    if own.is_inherited() {
        return 0;
    }
    let at = ptr::from_ref(own).cast_mut();
    // SAFETY: as the caller says, of its objects too.
    unsafe { own.end_objects(context) };
    own.opened.contexts.lock().retain(|known| *known != at.addr());
    // SAFETY: made by a Box in `open`.
    drop(unsafe { Box::from_raw(at) });
    0
}

/// Takes the device's events, and reports each to the context of its object. Skips events of objects that are gone.
fn distribute(opened: &Opened) {
    use abi::event_type::*;
    while let Some(event) = opened.device.poll_async_event() {
        // Held until the context has the event: its object, and so the context, is not destroyed before that.
        let objects = opened.objects.lock();
        let pair = |qpn: rdmux_verbs::Qpn| {
            let pair = *objects.pairs.get(&qpn.value())?;
            // SAFETY: it is there while it is among the objects, which are held.
            Some((pair.cast::<()>(), unsafe { (*pair).context }))
        };
        let (found, event_type) = match event {
            AsyncEvent::PortActive | AsyncEvent::PortError | AsyncEvent::DeviceFatal => {
                let event_type = match event {
                    AsyncEvent::PortActive => PORT_ACTIVE,
                    AsyncEvent::PortError => PORT_ERR,
                    _ => DEVICE_FATAL,
                };
                for context in &*opened.contexts.lock() {
                    // SAFETY: open while it is in the list, which is held.
                    let context = unsafe { &*ptr::with_exposed_provenance::<ContextObject>(*context) };
                    context.tell(abi::AsyncEvent {
                        element: 1,
                        event_type,
                    });
                }
                continue;
            }
            AsyncEvent::CqError(cqn) => {
                let queue = objects.completions.get(&cqn.0).copied();
                // SAFETY: as above.
                (
                    queue.map(|queue| (queue.cast(), unsafe { (*queue).context })),
                    CQ_ERR,
                )
            }
            AsyncEvent::SrqLimitReached(srqn) => {
                let queue = objects.queues.get(&srqn.0).copied();
                // SAFETY: as above.
                (
                    queue.map(|queue| (queue.cast(), unsafe { (*queue).context })),
                    SRQ_LIMIT_REACHED,
                )
            }
            AsyncEvent::QpFatal(qpn) => (pair(qpn), QP_FATAL),
            AsyncEvent::QpRequestError(qpn) => (pair(qpn), QP_REQ_ERR),
            AsyncEvent::QpAccessError(qpn) => (pair(qpn), QP_ACCESS_ERR),
            AsyncEvent::CommunicationEstablished(qpn) => (pair(qpn), COMM_EST),
            AsyncEvent::SqDrained(qpn) => (pair(qpn), SQ_DRAINED),
            AsyncEvent::LastWqeReached(qpn) => (pair(qpn), QP_LAST_WQE_REACHED),
        };
        let Some((element, context)) = found else { continue };
        let told = abi::AsyncEvent {
            element: element.expose_provenance(),
            event_type,
        };
        // SAFETY: an object's context is open as long as the object is there.
        unsafe { ContextObject::of(context) }.tell(told);
    }
}

/// Returns the count of the object that an event belongs to; `None` for a port.
///
/// # Safety
/// The object is not destroyed.
unsafe fn given_of<'a>(event: &abi::AsyncEvent) -> Option<&'a Given> {
    use abi::event_type::*;
    let at = ptr::with_exposed_provenance_mut::<()>(event.element);
    match event.event_type {
        PORT_ACTIVE | PORT_ERR | DEVICE_FATAL => None,
        // SAFETY: an event of this type is of a completion queue.
        CQ_ERR => Some(unsafe { &channel::CqObject::of(at.cast()).errors }),
        // SAFETY: an event of this type is of a shared receive queue.
        SRQ_LIMIT_REACHED => Some(unsafe { &srq::SrqObject::of(at.cast()).given }),
        // SAFETY: all others are of queue pairs.
        _ => Some(unsafe { &queue_pair::QpObject::of(at.cast()).given }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut abi::Context,
    event: *mut abi::AsyncEvent,
) -> c_int {
    // SAFETY: an open context, says the caller.
    let context = unsafe { ContextObject::of(context) };
    loop {
        distribute(&context.opened);
        if let Some(found) = context.take_event() {
            // SAFETY: an event of the caller's.
            unsafe { *event = found };
            return 0;
        }
        // SAFETY: there is nothing to drop here.
        if let Err(errno) = unsafe { wait::readable_or_cancelled(context.events_fd.as_raw_fd()) } {
            return minus_one(Err(errno));
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut abi::AsyncEvent) {
    // SAFETY: an event that `ibv_get_async_event` filled, says the caller; until now the end of its object waits for this.
    if let Some(given) = unsafe { given_of(&*event) } {
        given.acknowledge(1);
    }
}

// SAFETY: the pointers are the program's objects, which are looked at under the lock under which they leave.
unsafe impl Send for Objects {}
