//! The objects of `libibverbs`, each as a value that destroys its object when it is dropped, and keeps alive the objects that its
//! object was made of. Calls through the libraries' structures are made here and nowhere else.
//!
//! All of them may be used by several threads at a time, as the libraries allow it; an object is destroyed by the drop of its value,
//! and so after every other use.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

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

mod cq;
mod qp;
mod region;
mod srq;

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdmux_rnic::SgeList;
use rdmux_verbs::abi;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::library::{self, Library};

pub(super) use cq::{Cq, POLL_MAX};
pub(super) use qp::{Ah, BindRange, ExtendedRequest, Qp, QpInit, WorkRequest, WorkTarget};
pub(super) use region::{Mr, Mw};
pub(super) use srq::{Srq, Xrcd};

/// Returns the result of a function that returns an error number.
fn done(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        // Some functions return -1 and set `errno`, some a negative error number.
        -1 => Err(last_error()),
        error => Err(Errno::from_raw_os_error(error.saturating_abs().clamp(1, 4095))),
    }
}

/// Returns the result of a function that returns a pointer.
fn made<T>(pointer: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(pointer).ok_or_else(last_error)
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Makes a descriptor of a library non-blocking.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

shared! { Context Pd }

/// An opened device.
#[derive(Debug)]
pub(super) struct Context {
    library: &'static Library,
    pointer: NonNull<abi::Context>,
    name: String,
}

/// An asynchronous event that was taken and acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LibraryEvent {
    pub(super) event_type: u32,
    /// The number that the program gave the completion queue or the shared receive queue, or the queue pair's own.
    pub(super) number: u32,
}

impl Context {
    /// Opens the device with the name `name`.
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
        // SAFETY: the list is not used after this. Opened devices live on.
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

    /// Returns the number of completion vectors.
    pub(super) fn comp_vectors(&self) -> u32 {
        // SAFETY: the context lives as long as `self`, and the number is set when it is opened.
        let count = unsafe { (*self.pointer.as_ptr()).num_comp_vectors };
        u32::try_from(count).unwrap_or(0).max(1)
    }

    fn ops(&self) -> &abi::ContextOps {
        // SAFETY: the context lives as long as `self`, and its operations are set when it is opened.
        unsafe { &(*self.pointer.as_ptr()).ops }
    }

    /// Returns an operation of the extended context, by its offset there. `None`: the library is older, or the device does not have
    /// it.
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

    /// Returns the capabilities and limits of the device.
    pub(super) fn query_device(&self) -> Result<abi::DeviceAttrEx, Errno> {
        // SAFETY: numbers and arrays of them: zero is a value of each.
        let mut attr: abi::DeviceAttrEx = unsafe { std::mem::zeroed() };
        let query: Option<abi::QueryDeviceEx> = self.extended(offset_of!(abi::VerbsContext, query_device_ex));
        if let Some(query) = query {
            let size = size_of::<abi::DeviceAttrEx>();
            // SAFETY: no input, and an output of the size that is passed.
            if done(unsafe { query(self.pointer.as_ptr(), std::ptr::null(), &mut attr, size) }).is_ok() {
                return Ok(attr);
            }
        }
        // SAFETY: the structure has the size that this function has always written.
        done(unsafe { (self.library.ibv_query_device)(self.pointer.as_ptr(), &mut attr.orig_attr) })?;
        attr.device_cap_flags_ex = attr.orig_attr.device_cap_flags.into();
        Ok(attr)
    }

    /// Returns the attributes of a port.
    pub(super) fn query_port(&self, port: u8) -> Result<abi::PortAttr, Errno> {
        let mut attr = abi::PortAttr::default();
        let query: Option<abi::QueryPort> = self.extended(offset_of!(abi::VerbsContext, query_port));
        let context = self.pointer.as_ptr();
        let result = match query {
            Some(query) => {
                // SAFETY: the size that is passed is that of the structure.
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

    /// Returns an entry of a port's table of GIDs; `None`: it is empty.
    pub(super) fn query_gid(&self, port: u8, index: u32) -> Option<abi::GidEntry> {
        let mut entry = abi::GidEntry::default();
        let size = size_of::<abi::GidEntry>();
        // SAFETY: the size that is passed is that of the structure.
        let result = unsafe {
            (self.library._ibv_query_gid_ex)(self.pointer.as_ptr(), port.into(), index, &mut entry, 0, size)
        };
        done(result).ok().map(|()| entry)
    }

    /// Returns a descriptor that is readable when there is an asynchronous event.
    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).async_fd) }
    }

    /// Takes the oldest asynchronous event.
    pub(super) fn take_event(&self) -> Option<LibraryEvent> {
        use abi::event_type as t;
        let mut event = abi::AsyncEvent {
            element: 0,
            event_type: 0,
        };
        // SAFETY: writes one event.
        if unsafe { (self.library.ibv_get_async_event)(self.pointer.as_ptr(), &mut event) } != 0 {
            return None;
        }
        // SAFETY: for these kinds the element is a pointer to the object, whose destruction waits until the event is acknowledged.
        // The numbers are set when the object is made.
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
        Some(LibraryEvent {
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

/// Returns the name of a device.
fn device_name(device: &abi::Device) -> String {
    library::text(&device.name)
}

/// Returns the name of the device of a context of `librdmacm`.
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

/// The elements of a list in the library's form. They stay in place until the library has taken them.
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

    /// Returns a receive into the elements, which it must not outlive.
    fn receive(&mut self, wr_id: u64) -> abi::RecvWr {
        abi::RecvWr {
            wr_id,
            next: null_mut(),
            sg_list: self.list.as_mut_ptr(),
            num_sge: self.count as c_int,
        }
    }
}
