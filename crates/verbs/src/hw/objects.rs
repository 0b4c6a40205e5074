//! The objects of `libibverbs`, each as a value that ends it when it is dropped and keeps alive what it was made of. Calls through the
//! libraries' structures are made here and nowhere else.
//!
//! All of them may be used by several threads at a time, as the libraries allow it; an object is destroyed by the drop of its value,
//! and so after every other use.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdmux_rnic::{Fault, Memory, SgeList};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::library::{self, Library};
use crate::abi;
use crate::memory::mapped_at;

/// Most completions that are taken by one call.
pub(super) const POLL_MAX: usize = 16;

/// What a function that gives back an error number says.
fn done(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        // Some return -1 and set `errno`, some a negative number of it.
        -1 => Err(last_error()),
        error => Err(Errno::from_raw_os_error(error.saturating_abs().clamp(1, 4095))),
    }
}

/// What a function that gives back a pointer says.
fn made<T>(pointer: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(pointer).ok_or_else(last_error)
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Makes a descriptor of a library's never block.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// Declares a value around a pointer of the library's that threads may share.
macro_rules! shared {
    ($($name:ident)*) => {$(
        // SAFETY: the library's objects belong to no thread, its functions may be called by several at a time, and the value is the
        // only owner of its object.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

shared! { Context Pd Channel Cq Srq Xrcd Qp Mr Mw Ah }

/// An opened device.
#[derive(Debug)]
pub(super) struct Context {
    library: &'static Library,
    pointer: NonNull<abi::Context>,
    name: String,
}

/// An asynchronous event that was taken and acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) event_type: u32,
    /// The number that the program gave the completion queue or the shared receive queue, or the queue pair's own.
    pub(super) number: u32,
}

impl Context {
    /// Opens the device of a name.
    pub(super) fn open(library: &'static Library, name: &str) -> Result<Context, Errno> {
        let mut count = 0;
        // SAFETY: the result is a list of `count` devices, or null.
        let list = made(unsafe { (library.ibv_get_device_list)(&mut count) })?;
        let mut opened = Err(Errno::NODEV);
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries, each a device until the list is freed.
            let device = unsafe { *list.as_ptr().add(at) };
            // SAFETY: as above; the library writes nothing to the name of a device.
            if device_name(unsafe { &*device }) == name {
                // SAFETY: the device is one of the list.
                opened = made(unsafe { (library.ibv_open_device)(device) });
                break;
            }
        }
        // SAFETY: the list is not used any more. Opened devices live on.
        unsafe { (library.ibv_free_device_list)(list.as_ptr()) };
        let context = Context {
            library,
            pointer: opened?,
            name: name.to_owned(),
        };
        set_nonblocking(context.async_fd())?;
        Ok(context)
    }

    /// The device's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn ops(&self) -> &abi::ContextOps {
        // SAFETY: the context lives as long as `self`, and its operations are set when it is opened.
        unsafe { &(*self.pointer.as_ptr()).ops }
    }

    /// An operation of the extended context, by its offset there. `None`: the library is older, or the device does not have it.
    fn extended<T: Copy>(&self, offset: usize) -> Option<T> {
        const { assert!(size_of::<Option<T>>() == size_of::<*const c_void>()) };
        let end = offset_of!(abi::VerbsContext, context);
        // SAFETY: the context lives as long as `self`; the field is set when it is opened.
        let is_extended = unsafe { (*self.pointer.as_ptr()).abi_compat } == abi::EXTENDED;
        if !is_extended {
            return None;
        }
        let base = self.pointer.as_ptr().cast::<u8>();
        let before = |offset: usize| end - offset;
        // SAFETY: an extended context has its size in front of it.
        let size = unsafe {
            base.sub(before(offset_of!(abi::VerbsContext, size)))
                .cast::<usize>()
                .read()
        };
        if size < before(offset) + size_of::<abi::Context>() {
            return None;
        }
        // SAFETY: the size says that the extended context begins no later than at this operation, which is a pointer to a function of
        // type `T`, or null, which is `None`.
        unsafe { base.sub(before(offset)).cast::<Option<T>>().read() }
    }

    /// What the device has and how much of it.
    pub(super) fn query_device(&self) -> Result<abi::DeviceAttrEx, Errno> {
        // SAFETY: numbers and arrays of them: zero is a value of each.
        let mut attr: abi::DeviceAttrEx = unsafe { std::mem::zeroed() };
        let query: Option<abi::QueryDeviceEx> = self.extended(offset_of!(abi::VerbsContext, query_device_ex));
        if let Some(query) = query {
            let size = size_of::<abi::DeviceAttrEx>();
            // SAFETY: no input, and an output of the size that is told.
            if done(unsafe { query(self.pointer.as_ptr(), std::ptr::null(), &mut attr, size) }).is_ok() {
                return Ok(attr);
            }
        }
        // SAFETY: the structure has the size that this function has always written.
        done(unsafe { (self.library.ibv_query_device)(self.pointer.as_ptr(), &mut attr.orig_attr) })?;
        attr.device_cap_flags_ex = attr.orig_attr.device_cap_flags.into();
        Ok(attr)
    }

    /// What a port is like.
    pub(super) fn query_port(&self, port: u8) -> Result<abi::PortAttr, Errno> {
        let mut attr = abi::PortAttr::default();
        let query: Option<abi::QueryPort> = self.extended(offset_of!(abi::VerbsContext, query_port));
        let context = self.pointer.as_ptr();
        let result = match query {
            Some(query) => {
                // SAFETY: the size that is told is that of the structure.
                unsafe { query(context, port, &mut attr, size_of::<abi::PortAttr>()) }
            }
            None => {
                // SAFETY: the structure begins as the one that this function writes, and is longer.
                unsafe { (self.library.ibv_query_port)(context, port, &mut attr) }
            }
        };
        done(result)?;
        Ok(attr)
    }

    /// An entry of a port's table of GIDs; `None`: it is empty.
    pub(super) fn query_gid(&self, port: u8, index: u32) -> Option<abi::GidEntry> {
        let mut entry = abi::GidEntry::default();
        let size = size_of::<abi::GidEntry>();
        // SAFETY: the size that is told is that of the structure.
        let result = unsafe {
            (self.library._ibv_query_gid_ex)(self.pointer.as_ptr(), port.into(), index, &mut entry, 0, size)
        };
        done(result).ok().map(|()| entry)
    }

    /// Readable when there is an asynchronous event.
    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).async_fd) }
    }

    /// Takes the oldest asynchronous event.
    pub(super) fn take_event(&self) -> Option<Event> {
        use abi::event_type as t;
        let mut event = abi::AsyncEvent {
            element: 0,
            event_type: 0,
        };
        // SAFETY: writes one event.
        if unsafe { (self.library.ibv_get_async_event)(self.pointer.as_ptr(), &mut event) } != 0 {
            return None;
        }
        // SAFETY: of these kinds the element is a pointer to the object, which its destruction waits for until the event is
        // acknowledged. The numbers are set when it is made.
        let number = unsafe {
            match event.event_type {
                t::CQ_ERR => (*(event.element as *const abi::Cq)).cq_context as usize,
                t::SRQ_ERR | t::SRQ_LIMIT_REACHED => {
                    (*(event.element as *const abi::Srq)).srq_context as usize
                }
                t::QP_FATAL
                | t::QP_REQ_ERR
                | t::QP_ACCESS_ERR
                | t::COMM_EST
                | t::SQ_DRAINED
                | t::PATH_MIG
                | t::PATH_MIG_ERR
                | t::QP_LAST_WQE_REACHED => (*(event.element as *const abi::Qp)).qp_num as usize,
                _ => 0,
            }
        };
        // SAFETY: the event was taken by the call above, and is acknowledged once.
        unsafe { (self.library.ibv_ack_async_event)(&mut event) };
        Some(Event {
            event_type: event.event_type,
            number: number as u32,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all objects hold the context, so that none is left.
        unsafe { (self.library.ibv_close_device)(self.pointer.as_ptr()) };
    }
}

/// The name of a device.
fn device_name(device: &abi::Device) -> String {
    library::text(&device.name)
}

/// The name of the device that a context of `librdmacm` is of.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn context_name(context: NonNull<abi::Context>) -> String {
    // SAFETY: an open context has its device, whose name nobody writes.
    device_name(unsafe { &*(*context.as_ptr()).device })
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Pd {
    context: Arc<Context>,
    pointer: NonNull<abi::Pd>,
}

impl Pd {
    pub(super) fn new(context: &Arc<Context>) -> Result<Pd, Errno> {
        // SAFETY: the context is open, and held.
        let pointer = made(unsafe { (context.library.ibv_alloc_pd)(context.pointer.as_ptr()) })?;
        Ok(Pd {
            context: context.clone(),
            pointer,
        })
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: what was made in it holds it, so that nothing is left.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.pointer.as_ptr()) };
    }
}

/// A completion channel.
#[derive(Debug)]
struct Channel {
    context: Arc<Context>,
    pointer: NonNull<abi::CompChannel>,
}

impl Channel {
    fn new(context: &Arc<Context>) -> Result<Channel, Errno> {
        // SAFETY: the context is open, and held.
        let pointer = made(unsafe { (context.library.ibv_create_comp_channel)(context.pointer.as_ptr()) })?;
        let channel = Channel {
            context: context.clone(),
            pointer,
        };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: its completion queue holds it, and has ended before.
        unsafe { (self.context.library.ibv_destroy_comp_channel)(self.pointer.as_ptr()) };
    }
}

/// A completion queue with a channel of its own.
#[derive(Debug)]
pub(super) struct Cq {
    pointer: NonNull<abi::Cq>,
    poll: abi::PollCq,
    notify: abi::ReqNotifyCq,
    channel: Channel,
}

impl Cq {
    /// Makes one for `depth` completions, whose events are of `number`.
    pub(super) fn new(context: &Arc<Context>, depth: u32, number: u32) -> Result<Cq, Errno> {
        let (poll, notify) = context
            .ops()
            .poll_cq
            .zip(context.ops().req_notify_cq)
            .ok_or(Errno::OPNOTSUPP)?;
        let channel = Channel::new(context)?;
        let depth = c_int::try_from(depth.max(1)).map_err(|_| Errno::INVAL)?;
        // SAFETY: context and channel live as long as the queue. Its own context is a number, which nobody takes for a pointer.
        let pointer = made(unsafe {
            (context.library.ibv_create_cq)(
                context.pointer.as_ptr(),
                depth,
                std::ptr::without_provenance_mut(number as usize),
                channel.pointer.as_ptr(),
                0,
            )
        })?;
        Ok(Cq {
            pointer,
            poll,
            notify,
            channel,
        })
    }

    /// Takes completions; how many.
    pub(super) fn poll(&self, into: &mut [abi::Wc; POLL_MAX], max: usize) -> usize {
        let max = max.min(POLL_MAX) as c_int;
        // SAFETY: there is room for as many completions as are asked for.
        let taken = unsafe { (self.poll)(self.pointer.as_ptr(), max, into.as_mut_ptr()) };
        // A queue that overran gives an error: it has no more completions.
        usize::try_from(taken).unwrap_or(0).min(POLL_MAX)
    }

    /// Makes room for `depth` completions.
    pub(super) fn resize(&self, depth: u32) -> Result<(), Errno> {
        let depth = c_int::try_from(depth.max(1)).map_err(|_| Errno::INVAL)?;
        // SAFETY: the queue lives.
        done(unsafe { (self.channel.context.library.ibv_resize_cq)(self.pointer.as_ptr(), depth) })
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&self, solicited_only: bool) {
        // SAFETY: the queue lives. It cannot fail but for what the arguments rule out.
        unsafe { (self.notify)(self.pointer.as_ptr(), solicited_only.into()) };
    }

    /// Readable when there is an event.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// Takes and acknowledges the events there are. Whether there were any.
    pub(super) fn take_events(&self) -> bool {
        let library = self.channel.context.library;
        let (mut cq, mut context) = (null_mut(), null_mut());
        let mut events = 0;
        // SAFETY: the channel lives, and its descriptor does not block. Events are of this queue, the only one on the channel.
        while unsafe { (library.ibv_get_cq_event)(self.channel.pointer.as_ptr(), &mut cq, &mut context) } == 0
        {
            events += 1;
        }
        if events > 0 {
            // SAFETY: so many events were taken by the calls above.
            unsafe { (library.ibv_ack_cq_events)(self.pointer.as_ptr(), events) };
        }
        events > 0
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it, so that none is left; all events that were taken are acknowledged, so that it does not wait.
        unsafe { (self.channel.context.library.ibv_destroy_cq)(self.pointer.as_ptr()) };
    }
}

/// An XRC domain.
#[derive(Debug)]
pub(super) struct Xrcd {
    context: Arc<Context>,
    pointer: NonNull<abi::Xrcd>,
    close: abi::CloseXrcd,
}

impl Xrcd {
    pub(super) fn new(context: &Arc<Context>) -> Result<Xrcd, Errno> {
        let open: Option<abi::OpenXrcd> = context.extended(offset_of!(abi::VerbsContext, open_xrcd));
        let close = context.extended(offset_of!(abi::VerbsContext, close_xrcd));
        let (open, close) = open.zip(close).ok_or(Errno::OPNOTSUPP)?;
        let mut attr = abi::XrcdInitAttr {
            comp_mask: abi::xrcd::FD | abi::xrcd::OFLAGS,
            fd: -1,
            oflags: OFlags::CREATE.bits() as c_int,
        };
        // SAFETY: the context is open, and held.
        let pointer = made(unsafe { open(context.pointer.as_ptr(), &mut attr) })?;
        Ok(Xrcd {
            context: context.clone(),
            pointer,
            close,
        })
    }
}

impl Drop for Xrcd {
    fn drop(&mut self) {
        // SAFETY: what uses it holds it, so that nothing is left; it holds its context.
        unsafe { (self.close)(self.pointer.as_ptr()) };
        let _ = &self.context;
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Srq>,
    post: abi::PostSrqRecv,
    number: u32,
    max_sge: u32,
    /// What one of XRC uses.
    _xrc: Option<(Arc<Xrcd>, Arc<Cq>)>,
}

impl Srq {
    /// Makes one for `max_wr` receives of `max_sge` elements, whose events are of `number`, unless peers name it.
    pub(super) fn new(
        pd: &Arc<Pd>,
        max_wr: u32,
        max_sge: u32,
        number: u32,
        xrc: Option<(Arc<Xrcd>, Arc<Cq>)>,
    ) -> Result<Srq, Errno> {
        let context = &pd.context;
        let post = context.ops().post_srq_recv.ok_or(Errno::OPNOTSUPP)?;
        let srq_context = std::ptr::without_provenance_mut(number as usize);
        let attr = abi::SrqAttr {
            max_wr,
            max_sge,
            srq_limit: 0,
        };
        let Some((xrcd, cq)) = &xrc else {
            let mut init = abi::SrqInitAttr { srq_context, attr };
            // SAFETY: the domain lives as long as the queue.
            let pointer = made(unsafe { (context.library.ibv_create_srq)(pd.pointer.as_ptr(), &mut init) })?;
            return Ok(Srq {
                pd: pd.clone(),
                pointer,
                post,
                number,
                max_sge: init.attr.max_sge.max(1),
                _xrc: None,
            });
        };
        let create: Option<abi::CreateSrqEx> = context.extended(offset_of!(abi::VerbsContext, create_srq_ex));
        let number_of: Option<abi::GetSrqNum> = context.extended(offset_of!(abi::VerbsContext, get_srq_num));
        let (create, number_of) = create.zip(number_of).ok_or(Errno::OPNOTSUPP)?;
        let mut init = abi::SrqInitAttrEx {
            srq_context,
            attr,
            comp_mask: abi::srq::INIT_TYPE | abi::srq::INIT_PD | abi::srq::INIT_XRCD | abi::srq::INIT_CQ,
            srq_type: abi::srq::TYPE_XRC,
            pd: pd.pointer.as_ptr(),
            xrcd: xrcd.pointer.as_ptr(),
            cq: cq.pointer.as_ptr(),
            max_num_tags: 0,
            max_ops: 0,
        };
        // SAFETY: what it is made of lives as long as the queue.
        let pointer = made(unsafe { create(context.pointer.as_ptr(), &mut init) })?;
        let mut srq = Srq {
            pd: pd.clone(),
            pointer,
            post,
            number,
            max_sge: init.attr.max_sge.max(1),
            _xrc: xrc.clone(),
        };
        // SAFETY: the queue lives.
        done(unsafe { number_of(srq.pointer.as_ptr(), &mut srq.number) })?;
        // SAFETY: nobody but this thread has the queue yet. Its events are of the number that peers name it by.
        unsafe {
            (*srq.pointer.as_ptr()).srq_context = std::ptr::without_provenance_mut(srq.number as usize)
        };
        Ok(srq)
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Elements that a receive may have.
    pub(super) fn max_sge(&self) -> usize {
        self.max_sge as usize
    }

    /// Posts a receive.
    pub(super) fn post_recv(&self, wr_id: u64, sges: &SgeList) -> Result<(), Errno> {
        let mut list = Elements::new(sges);
        let mut wr = list.receive(wr_id);
        let mut bad = null_mut();
        // SAFETY: the request and its list live until the call returns; the device checks what they name.
        done(unsafe { (self.post)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    pub(super) fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Errno> {
        let mut attr = abi::SrqAttr {
            max_wr: max_wr.unwrap_or(0),
            max_sge: 0,
            srq_limit: limit.unwrap_or(0),
        };
        let mask = if max_wr.is_some() { abi::srq::MAX_WR } else { 0 }
            | if limit.is_some() { abi::srq::LIMIT } else { 0 };
        // SAFETY: the queue lives.
        done(unsafe { (self.pd.context.library.ibv_modify_srq)(self.pointer.as_ptr(), &mut attr, mask) })
    }

    pub(super) fn query(&self) -> Result<abi::SrqAttr, Errno> {
        let mut attr = abi::SrqAttr::default();
        // SAFETY: the queue lives.
        done(unsafe { (self.pd.context.library.ibv_query_srq)(self.pointer.as_ptr(), &mut attr) })?;
        Ok(attr)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it, so that none is left.
        unsafe { (self.pd.context.library.ibv_destroy_srq)(self.pointer.as_ptr()) };
    }
}

/// The elements of a list as the library takes them, where they stand until it has.
struct Elements {
    list: [abi::Sge; rdmux_rnic::SGE_MAX],
    count: usize,
}

impl Elements {
    fn new(sges: &SgeList) -> Elements {
        let mut elements = Elements {
            list: [abi::Sge::default(); rdmux_rnic::SGE_MAX],
            count: sges.as_slice().len().min(rdmux_rnic::SGE_MAX),
        };
        for (to, sge) in elements.list.iter_mut().zip(sges.as_slice()) {
            *to = abi::Sge {
                addr: sge.addr,
                length: sge.length,
                lkey: sge.lkey,
            };
        }
        elements
    }

    /// A receive into them; it is not to outlive them.
    fn receive(&mut self, wr_id: u64) -> abi::RecvWr {
        abi::RecvWr {
            wr_id,
            next: null_mut(),
            sg_list: self.list.as_mut_ptr(),
            num_sge: self.count as c_int,
        }
    }
}

/// With what a queue pair is made.
#[derive(Debug)]
pub(super) struct QpInit {
    pub(super) qp_type: u32,
    pub(super) send_cq: Arc<Cq>,
    pub(super) recv_cq: Arc<Cq>,
    pub(super) srq: Option<Arc<Srq>>,
    pub(super) xrcd: Option<Arc<Xrcd>>,
    pub(super) cap: abi::QpCap,
    /// Operations of [`abi::qp_ex`].
    pub(super) extended: u64,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Qp>,
    /// The same, where it was made with extended operations.
    extended: Option<NonNull<abi::QpEx>>,
    post_send: abi::PostSend,
    post_recv: abi::PostRecv,
    /// What it has got, and what it uses.
    init: QpInit,
}

/// Where a request is for, or what it is about.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work<'a> {
    /// Only what the list has.
    List,
    Rdma {
        va: u64,
        rkey: u32,
    },
    Atomic {
        va: u64,
        rkey: u32,
        compare_add: u64,
        swap: u64,
    },
    Datagram {
        ah: &'a Ah,
        qpn: u32,
        qkey: u32,
    },
    Bind {
        window: &'a Mw,
        rkey: u32,
        range: BindRange<'a>,
    },
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
pub(super) struct BindRange<'a> {
    pub(super) region: &'a Mr,
    pub(super) va: u64,
    pub(super) length: u64,
    pub(super) access: u32,
}

impl BindRange<'_> {
    fn info(&self) -> abi::MwBindInfo {
        abi::MwBindInfo {
            mr: self.region.pointer.as_ptr(),
            addr: self.va,
            length: self.length,
            mw_access_flags: self.access,
        }
    }
}

/// A send request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) wr_id: u64,
    pub(super) opcode: u32,
    pub(super) flags: u32,
    /// As the structure has it: immediate data in network order, or a key.
    pub(super) imm: u32,
    pub(super) sges: &'a SgeList,
    pub(super) work: Work<'a>,
    /// XRC.
    pub(super) srqn: u32,
}

impl Request<'_> {
    /// Its list; bytes inline are an element of their own.
    fn elements(&self) -> Elements {
        let mut elements = Elements::new(self.sges);
        if let Some(bytes) = self.sges.as_inline() {
            elements.list[0] = abi::Sge {
                addr: bytes.as_ptr() as u64,
                length: bytes.len() as u32,
                lkey: 0,
            };
            elements.count = 1;
        }
        elements
    }

    /// As the library takes it, with its list; it is to outlive neither.
    fn send(&self, list: &mut Elements) -> abi::SendWr {
        let is_inline = self.sges.as_inline().is_some();
        let flags = self.flags | if is_inline { abi::SEND_INLINE } else { 0 };
        // SAFETY: numbers, pointers and unions of them: zero is a value of each.
        let mut wr: abi::SendWr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.wr_id;
        wr.sg_list = list.list.as_mut_ptr();
        wr.num_sge = list.count as c_int;
        (wr.opcode, wr.send_flags, wr.imm_data) = (self.opcode, flags, self.imm);
        wr.remote_srqn = self.srqn;
        match self.work {
            Work::List => {}
            Work::Rdma {
                va: remote_addr,
                rkey,
            } => wr.wr.rdma = abi::Rdma { remote_addr, rkey },
            Work::Atomic {
                va: remote_addr,
                rkey,
                compare_add,
                swap,
            } => {
                wr.wr.atomic = abi::Atomic {
                    remote_addr,
                    compare_add,
                    swap,
                    rkey,
                };
            }
            Work::Datagram {
                ah,
                qpn: remote_qpn,
                qkey: remote_qkey,
            } => {
                wr.wr.ud = abi::Ud {
                    ah: ah.pointer.as_ptr(),
                    remote_qpn,
                    remote_qkey,
                };
            }
            Work::Bind { window, rkey, range } => {
                wr.bind_mw = abi::BindMwWr {
                    mw: window.pointer.as_ptr(),
                    rkey,
                    bind_info: range.info(),
                };
            }
        }
        wr
    }
}

/// A request that only the extended interface has.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExtendedRequest {
    AtomicWrite {
        va: u64,
        rkey: u32,
        bytes: [u8; 8],
    },
    Flush {
        va: u64,
        rkey: u32,
        length: u32,
        placement: u8,
        selectivity: u8,
    },
}

impl Qp {
    /// Makes one; what it has got is in [`Qp::cap`].
    pub(super) fn new(pd: &Arc<Pd>, mut init: QpInit) -> Result<Qp, Errno> {
        let context = &pd.context;
        let ops = context.ops();
        let (post_send, post_recv) = ops.post_send.zip(ops.post_recv).ok_or(Errno::OPNOTSUPP)?;
        let srq = init.srq.as_ref().map_or(null_mut(), |srq| srq.pointer.as_ptr());
        let is_target = init.qp_type == abi::qp_type::XRC_RECV;
        let (send_cq, recv_cq) = match is_target {
            true => (null_mut(), null_mut()),
            false => (init.send_cq.pointer.as_ptr(), init.recv_cq.pointer.as_ptr()),
        };
        let pointer = if init.extended == 0 && !is_target && init.qp_type != abi::qp_type::XRC_SEND {
            let mut attr = abi::QpInitAttr {
                qp_context: null_mut(),
                send_cq,
                recv_cq,
                srq,
                cap: init.cap,
                qp_type: init.qp_type,
                sq_sig_all: 0,
            };
            // SAFETY: what it is made of lives as long as the queue pair.
            let pointer = made(unsafe { (context.library.ibv_create_qp)(pd.pointer.as_ptr(), &mut attr) })?;
            init.cap = attr.cap;
            pointer
        } else {
            let create: Option<abi::CreateQpEx> =
                context.extended(offset_of!(abi::VerbsContext, create_qp_ex));
            let create = create.ok_or(Errno::OPNOTSUPP)?;
            // SAFETY: numbers and pointers: zero is a value of each.
            let mut attr: abi::QpInitAttrEx = unsafe { std::mem::zeroed() };
            (attr.send_cq, attr.recv_cq, attr.srq) = (send_cq, recv_cq, srq);
            (attr.cap, attr.qp_type) = (init.cap, init.qp_type);
            match &init.xrcd {
                Some(xrcd) if is_target => {
                    attr.comp_mask = abi::qp_init::XRCD;
                    attr.xrcd = xrcd.pointer.as_ptr();
                }
                _ => {
                    attr.comp_mask = abi::qp_init::PD;
                    attr.pd = pd.pointer.as_ptr();
                }
            }
            if init.extended != 0 {
                attr.comp_mask |= abi::qp_init::SEND_OPS_FLAGS;
                attr.send_ops_flags = init.extended;
            }
            // SAFETY: as above.
            let pointer = made(unsafe { create(context.pointer.as_ptr(), &mut attr) })?;
            init.cap = attr.cap;
            pointer
        };
        let extended = match init.extended {
            0 => None,
            // SAFETY: the queue pair lives.
            _ => NonNull::new(unsafe { (context.library.ibv_qp_to_qp_ex)(pointer.as_ptr()) }),
        };
        Ok(Qp {
            pd: pd.clone(),
            pointer,
            extended,
            post_send,
            post_recv,
            init,
        })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives, and its number does not change.
        unsafe { (*self.pointer.as_ptr()).qp_num }
    }

    /// What the device made of what was asked for.
    pub(super) fn cap(&self) -> &abi::QpCap {
        &self.init.cap
    }

    /// Operations of [`abi::qp_ex`] that it takes.
    pub(super) fn extended(&self) -> u64 {
        match self.extended {
            Some(_) => self.init.extended,
            None => 0,
        }
    }

    pub(super) fn modify(&self, mut attr: abi::QpAttr, mask: u32) -> Result<(), Errno> {
        // SAFETY: the queue pair lives.
        done(unsafe {
            (self.pd.context.library.ibv_modify_qp)(self.pointer.as_ptr(), &mut attr, mask as c_int)
        })
    }

    /// Sets the highest rate, in 1000 bits per second.
    pub(super) fn limit_rate(&self, rate: u32) -> Result<(), Errno> {
        let limit: Option<abi::ModifyQpRateLimit> = self
            .pd
            .context
            .extended(offset_of!(abi::VerbsContext, modify_qp_rate_limit));
        let limit = limit.ok_or(Errno::OPNOTSUPP)?;
        let mut attr = abi::QpRateLimitAttr {
            rate_limit: rate,
            ..Default::default()
        };
        // SAFETY: the queue pair lives.
        done(unsafe { limit(self.pointer.as_ptr(), &mut attr) })
    }

    pub(super) fn query(&self, mask: u32) -> Result<abi::QpAttr, Errno> {
        let mut attr = abi::QpAttr::default();
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut init: abi::QpInitAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair lives.
        let result = unsafe {
            (self.pd.context.library.ibv_query_qp)(self.pointer.as_ptr(), &mut attr, mask as c_int, &mut init)
        };
        done(result)?;
        Ok(attr)
    }

    /// Posts a request.
    pub(super) fn post_send(&self, request: &Request<'_>) -> Result<(), Errno> {
        let mut list = request.elements();
        let mut wr = request.send(&mut list);
        let mut bad = null_mut();
        // SAFETY: the request, its list and what it points to live until the call returns, bytes inline are copied before; what else it
        // names by number the device checks.
        done(unsafe { (self.post_send)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    /// Posts requests in order by one call. An error comes with the place of the request that it is of: those before it are posted.
    pub(super) fn post_send_chain(&self, requests: &[Request<'_>]) -> Result<(), (usize, Errno)> {
        let mut lists: Vec<Elements> = requests.iter().map(Request::elements).collect();
        let both = requests.iter().zip(&mut lists);
        let mut chain: Vec<abi::SendWr> = both.map(|(request, list)| request.send(list)).collect();
        let first = chain.as_mut_ptr();
        for at in 1..chain.len() {
            // SAFETY: both are elements of the chain, which is not touched but through this pointer from here on.
            unsafe { (*first.add(at - 1)).next = first.add(at) };
        }
        let mut bad = null_mut();
        // SAFETY: as for one request, of each; the last has none behind it.
        let posted = done(unsafe { (self.post_send)(self.pointer.as_ptr(), first, &mut bad) });
        posted.map_err(|error| {
            let at = bad.addr().saturating_sub(first.addr()) / size_of::<abi::SendWr>();
            // A library that does not say which has posted none, for all that is known.
            (if at < requests.len() { at } else { 0 }, error)
        })
    }

    /// Posts a request that only the extended interface has. No other request is posted meanwhile: the caller sees to it.
    pub(super) fn post_extended(
        &self,
        wr_id: u64,
        flags: u32,
        request: ExtendedRequest,
    ) -> Result<(), Errno> {
        let pointer = self.extended.ok_or(Errno::OPNOTSUPP)?.as_ptr();
        // SAFETY: the queue pair lives, and was made with extended operations, so that it has these fields; the last, which older
        // libraries do not have, is only read where the queue pair was made for it. Nobody else uses the interface at the time.
        unsafe {
            let start = (*pointer).wr_start.ok_or(Errno::OPNOTSUPP)?;
            let complete = (*pointer).wr_complete.ok_or(Errno::OPNOTSUPP)?;
            match request {
                ExtendedRequest::AtomicWrite { va, rkey, bytes } => {
                    let write = (*pointer).wr_atomic_write.ok_or(Errno::OPNOTSUPP)?;
                    start(pointer);
                    ((*pointer).wr_id, (*pointer).wr_flags) = (wr_id, flags);
                    write(pointer, rkey, va, bytes.as_ptr().cast());
                }
                ExtendedRequest::Flush {
                    va,
                    rkey,
                    length,
                    placement,
                    selectivity,
                } => {
                    if self.init.extended & abi::qp_ex::FLUSH == 0 {
                        return Err(Errno::OPNOTSUPP);
                    }
                    let flush = (*pointer).wr_flush.ok_or(Errno::OPNOTSUPP)?;
                    start(pointer);
                    ((*pointer).wr_id, (*pointer).wr_flags) = (wr_id, flags);
                    flush(pointer, rkey, va, length as usize, placement, selectivity);
                }
            }
            done(complete(pointer))
        }
    }

    /// Binds a window of type 1; its new key.
    pub(super) fn bind_mw(
        &self,
        wr_id: u64,
        flags: u32,
        window: &Mw,
        range: BindRange<'_>,
    ) -> Result<u32, Errno> {
        let bind = self.pd.context.ops().bind_mw.ok_or(Errno::OPNOTSUPP)?;
        let mut request = abi::MwBind {
            wr_id,
            send_flags: flags,
            bind_info: range.info(),
        };
        // SAFETY: queue pair, window and region live, and are of one device.
        done(unsafe { bind(self.pointer.as_ptr(), window.pointer.as_ptr(), &mut request) })?;
        Ok(window.rkey())
    }

    /// Posts a receive.
    pub(super) fn post_recv(&self, wr_id: u64, sges: &SgeList) -> Result<(), Errno> {
        let mut list = Elements::new(sges);
        let mut wr = list.receive(wr_id);
        let mut bad = null_mut();
        // SAFETY: the request and its list live until the call returns; the device checks what they name.
        done(unsafe { (self.post_recv)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    pub(super) fn attach_mcast(&self, gid: abi::Gid) -> Result<(), Errno> {
        // SAFETY: the queue pair lives, and the GID until the call returns.
        done(unsafe {
            (self.pd.context.library.ibv_attach_mcast)(self.pointer.as_ptr(), &abi::AlignedGid(gid), 0)
        })
    }

    pub(super) fn detach_mcast(&self, gid: abi::Gid) -> Result<(), Errno> {
        // SAFETY: as above.
        done(unsafe {
            (self.pd.context.library.ibv_detach_mcast)(self.pointer.as_ptr(), &abi::AlignedGid(gid), 0)
        })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        unsafe { (self.pd.context.library.ibv_destroy_qp)(self.pointer.as_ptr()) };
    }
}

/// An address handle.
#[derive(Debug)]
pub(super) struct Ah {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Ah>,
}

impl Ah {
    pub(super) fn new(pd: &Arc<Pd>, mut attr: abi::AhAttr) -> Result<Ah, Errno> {
        // SAFETY: the domain lives as long as the handle.
        let pointer = made(unsafe { (pd.context.library.ibv_create_ah)(pd.pointer.as_ptr(), &mut attr) })?;
        Ok(Ah {
            pd: pd.clone(),
            pointer,
        })
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        unsafe { (self.pd.context.library.ibv_destroy_ah)(self.pointer.as_ptr()) };
    }
}

/// A memory region. It holds its memory until the device has let go of it.
#[derive(Debug)]
pub(super) struct Mr {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Mr>,
    memory: Option<Arc<dyn Memory>>,
    /// Of the memory.
    offset: u64,
    length: u64,
}

impl Mr {
    /// Registers `length` bytes at an offset of a memory. `None`: it has no pages that a device may reach by itself.
    pub(super) fn new(
        pd: &Arc<Pd>,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: u32,
    ) -> Option<Result<Mr, Errno>> {
        let address = mapped_at(&*memory, offset, length)?;
        let address = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the bytes lie inside of a mapping that lives as long as the memory, which is held until they are deregistered, and of
        // which there are no references (`crate::mapping`).
        let pointer = unsafe {
            (pd.context.library.ibv_reg_mr_iova2)(pd.pointer.as_ptr(), address, length as usize, iova, access)
        };
        Some(made(pointer).map(|pointer| Mr {
            pd: pd.clone(),
            pointer,
            memory: Some(memory),
            offset,
            length,
        }))
    }

    pub(super) fn keys(&self) -> (u32, u32) {
        // SAFETY: the region lives, and its keys do not change.
        unsafe { ((*self.pointer.as_ptr()).lkey, (*self.pointer.as_ptr()).rkey) }
    }

    /// Copies bytes out, at an offset of the region.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let inside = offset
            .checked_add(out.len() as u64)
            .is_some_and(|end| end <= self.length);
        let memory = self.memory.as_ref().filter(|_| inside).ok_or(Fault::Unmapped)?;
        memory.read(self.offset + offset, out)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        let result = done(unsafe { (self.pd.context.library.ibv_dereg_mr)(self.pointer.as_ptr()) });
        if result.is_err() {
            // The device still reaches it: nobody else may get its bytes.
            std::mem::forget(self.memory.take());
        }
    }
}

/// A memory window.
#[derive(Debug)]
pub(super) struct Mw {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Mw>,
    dealloc: abi::DeallocMw,
}

impl Mw {
    /// Makes one of type 1 or 2.
    pub(super) fn new(pd: &Arc<Pd>, mw_type: u32) -> Result<Mw, Errno> {
        let ops = pd.context.ops();
        let (alloc, dealloc) = ops.alloc_mw.zip(ops.dealloc_mw).ok_or(Errno::OPNOTSUPP)?;
        // SAFETY: the domain lives as long as the window.
        let pointer = made(unsafe { alloc(pd.pointer.as_ptr(), mw_type) })?;
        Ok(Mw {
            pd: pd.clone(),
            pointer,
            dealloc,
        })
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: the window lives. The library writes its key when it is bound: the owner does not do both at a time.
        unsafe { (&raw const (*self.pointer.as_ptr()).rkey).read_volatile() }
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner; it holds its domain.
        unsafe { (self.dealloc)(self.pointer.as_ptr()) };
        let _ = &self.pd;
    }
}
