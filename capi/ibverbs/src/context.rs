//! Contexts: opened devices, and the asynchronous events of their objects.

use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::offset_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdmux_verbs::{AsyncEvent, OpenError};
use rustix::event::{EventfdFlags, eventfd};

use crate::device::Device;
use crate::events::Given;
use crate::{abi, channel, made, memory, minus_one, query, queue_pair, srq};

/// What a program's `struct ibv_context` pointer points into: what `verbs.h` calls through stands before the context, ours behind.
#[repr(C)]
pub(crate) struct Context {
    verbs: abi::VerbsContext,
    pub(crate) of: &'static Device,
    pub(crate) device: rdmux_verbs::Device,
    /// `cmd_fd`: nothing is said over it, but programs duplicate and poll it.
    _command: OwnedFd,
    objects: Mutex<Objects>,
}

/// The objects that asynchronous events are of, by their numbers: what the program's pointers point at.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) pairs: HashMap<u32, *mut abi::Qp>,
    pub(crate) completions: HashMap<u32, *mut abi::Cq>,
    pub(crate) queues: HashMap<u32, *mut abi::Srq>,
}

impl Context {
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a program's pointer points into.
    ///
    /// # Safety
    /// The pointer is one that [`ibv_open_device`] gave out, and is not closed.
    pub(crate) unsafe fn of<'a>(context: *mut abi::Context) -> &'a Context {
        let at = offset_of!(Context, verbs) + offset_of!(abi::VerbsContext, context);
        // SAFETY: it lies there in what was made, says the caller.
        unsafe { &*context.cast::<u8>().sub(at).cast::<Context>() }
    }
}

fn open(of: &'static Device) -> Result<*mut abi::Context, c_int> {
    let device = rdmux_verbs::Device::open(of.address).map_err(|error| {
        eprintln!("rdmux: {}: {error}", of.address);
        match error {
            OpenError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            OpenError::NotOneHost(_) => libc::ENODEV,
            _ => libc::EBUSY,
        }
    })?;
    let command = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| errno.raw_os_error())?;
    // SAFETY: all of it may be zero: numbers, null pointers, and functions that are none.
    let mut verbs: abi::VerbsContext = unsafe { std::mem::zeroed() };
    verbs.size = size_of::<abi::VerbsContext>();
    verbs.query_port = Some(query::query_port);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.create_qp_ex = Some(queue_pair::create_qp_ex);
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
    context.async_fd = device.async_event_fd().as_raw_fd();
    context.num_comp_vectors = 1;
    context.abi_compat = abi::EXTENDED;
    let made = Box::leak(Box::new(Context {
        verbs,
        of,
        device,
        _command: command,
        objects: Mutex::default(),
    }));
    Ok(&raw mut made.verbs.context)
}

/// The context of a device that all ids share. It stays open.
pub(crate) fn shared(of: &'static Device) -> Result<*mut abi::Context, c_int> {
    static OPEN: Mutex<Vec<(IpAddr, usize)>> = Mutex::new(Vec::new());
    let mut list = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, context)) = list.iter().find(|(address, _)| *address == of.address) {
        return Ok(ptr::with_exposed_provenance_mut(*context));
    }
    let context = open(of)?;
    list.push((of.address, context.expose_provenance()));
    Ok(context)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut abi::Device) -> *mut abi::Context {
    // SAFETY: a device of the list, says the caller.
    made(open(unsafe { Device::of(device) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut abi::Context) -> c_int {
    // SAFETY: an open context, says the caller, who uses it no more.
    let context = unsafe { ptr::from_ref(Context::of(context)) }.cast_mut();
    // SAFETY: made by a Box in `open`.
    drop(unsafe { Box::from_raw(context) });
    0
}

/// The next event, as the program reads it. Those of objects that are gone are left out.
fn next_event(context: &Context) -> Option<abi::AsyncEvent> {
    use abi::event_type::*;
    loop {
        let event = context.device.poll_async_event()?;
        // Held until the event is counted: its object is not destroyed before.
        let objects = context.objects();
        let pair = |qpn: rdmux_verbs::Qpn| objects.pairs.get(&qpn.value()).map(|pair| pair.cast::<()>());
        let (element, event_type) = match event {
            AsyncEvent::PortActive => (Some(ptr::without_provenance_mut(1)), PORT_ACTIVE),
            AsyncEvent::PortError => (Some(ptr::without_provenance_mut(1)), PORT_ERR),
            AsyncEvent::CqError(cqn) => (objects.completions.get(&cqn.0).map(|queue| queue.cast()), CQ_ERR),
            AsyncEvent::SrqLimitReached(srqn) => (
                objects.queues.get(&srqn.0).map(|queue| queue.cast()),
                SRQ_LIMIT_REACHED,
            ),
            AsyncEvent::QpFatal(qpn) => (pair(qpn), QP_FATAL),
            AsyncEvent::QpRequestError(qpn) => (pair(qpn), QP_REQ_ERR),
            AsyncEvent::QpAccessError(qpn) => (pair(qpn), QP_ACCESS_ERR),
            AsyncEvent::CommunicationEstablished(qpn) => (pair(qpn), COMM_EST),
            AsyncEvent::SqDrained(qpn) => (pair(qpn), SQ_DRAINED),
            AsyncEvent::LastWqeReached(qpn) => (pair(qpn), QP_LAST_WQE_REACHED),
        };
        let Some(element) = element else { continue };
        let found = abi::AsyncEvent {
            element: element.expose_provenance(),
            event_type,
        };
        // SAFETY: its object is there, as was just found.
        if let Some(given) = unsafe { given_of(&found) } {
            given.give();
        }
        return Some(found);
    }
}

/// The count of the object that an event is of; none of a port.
///
/// # Safety
/// The object is not destroyed.
unsafe fn given_of<'a>(event: &abi::AsyncEvent) -> Option<&'a Given> {
    use abi::event_type::*;
    let at = ptr::with_exposed_provenance_mut::<()>(event.element);
    match event.event_type {
        PORT_ACTIVE | PORT_ERR => None,
        // SAFETY: an event of this type is of a completion queue.
        CQ_ERR => Some(unsafe { &channel::Queue::of(at.cast()).errors }),
        // SAFETY: an event of this type is of a shared receive queue.
        SRQ_LIMIT_REACHED => Some(unsafe { &srq::Queue::of(at.cast()).given }),
        // SAFETY: all others are of queue pairs.
        _ => Some(unsafe { &queue_pair::Pair::of(at.cast()).given }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(context: *mut abi::Context, event: *mut abi::AsyncEvent) -> c_int {
    // SAFETY: an open context, says the caller.
    let context = unsafe { Context::of(context) };
    loop {
        if let Some(found) = next_event(context) {
            // SAFETY: an event of the caller's.
            unsafe { *event = found };
            return 0;
        }
        if let Err(errno) = channel::wait_readable(context.device.async_event_fd().as_raw_fd()) {
            return minus_one(Err(errno));
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut abi::AsyncEvent) {
    // SAFETY: an event that `ibv_get_async_event` filled, says the caller; until now its object waits with its end.
    if let Some(given) = unsafe { given_of(&*event) } {
        given.acknowledge(1);
    }
}
