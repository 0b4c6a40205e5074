//! XRC domains, and objects that a program opens a second time. IBTA Vol 1, A14; `ibv_open_xrcd(3)`, `ibv_open_qp(3)`.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{CompletionQueue, ProtectionDomain, XrcDomain};

use crate::channel::errno_of;
use crate::context::ContextObject;
use crate::{abi, made, queue_pair};

/// A domain, and the objects that its target queue pairs are made with: neither is used, because the shared receive queues that
/// peers name have their own protection domains and completion queues.
#[derive(Debug)]
pub(crate) struct XrcdShared {
    pub(crate) domain: XrcDomain,
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
}

/// Object behind a program's `struct ibv_xrcd` pointer.
#[repr(C)]
pub(crate) struct XrcdObject {
    shown: abi::Xrcd,
    pub(crate) shared: Arc<XrcdShared>,
}

impl XrcdObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that [`open_xrcd`] gave out, and is not closed.
    pub(crate) unsafe fn of<'a>(domain: *mut abi::Xrcd) -> &'a XrcdObject {
        // SAFETY: as the caller says.
        unsafe { &*domain.cast::<XrcdObject>() }
    }
}

/// A file by which a process finds the domain again: its device's address, and its file system and inode.
type Name = (IpAddr, u64, u64);

static NAMED: Mutex<Vec<(Name, Weak<XrcdShared>)>> = Mutex::new(Vec::new());

fn new(context: &ContextObject) -> Result<Arc<XrcdShared>, c_int> {
    let device = &context.device;
    Ok(Arc::new(XrcdShared {
        domain: device.alloc_xrcd().map_err(|error| errno_of(&error))?,
        pd: device.alloc_pd().map_err(|error| errno_of(&error))?,
        cq: device.create_cq(1).map_err(|error| errno_of(&error))?,
    }))
}

fn open(context: &ContextObject, attr: &abi::XrcdInitAttr) -> Result<Arc<XrcdShared>, c_int> {
    if attr.comp_mask != abi::xrcd::FD | abi::xrcd::OFLAGS
        || attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0
    {
        return Err(libc::EINVAL);
    }
    let creates = attr.oflags & libc::O_CREAT != 0;
    if attr.fd < 0 {
        return if creates { new(context) } else { Err(libc::EINVAL) };
    }
    // SAFETY: a descriptor of the program's, which it holds during the call.
    let file = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(attr.fd) });
    let file = file.map_err(|errno| errno.raw_os_error())?;
    let name = (context.of.address, file.st_dev, file.st_ino);
    let mut named = NAMED.lock();
    named.retain(|(_, shared)| shared.strong_count() > 0);
    let mut known = named.iter().filter(|(known, _)| *known == name);
    match known.find_map(|(_, shared)| shared.upgrade()) {
        Some(_) if attr.oflags & libc::O_EXCL != 0 => Err(libc::EINVAL),
        Some(shared) => Ok(shared),
        None if !creates => Err(libc::EAGAIN),
        None => {
            let shared = new(context)?;
            named.push((name, Arc::downgrade(&shared)));
            Ok(shared)
        }
    }
}

/// Makes a domain that no file names.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn unnamed(context: *mut abi::Context) -> Result<*mut abi::Xrcd, c_int> {
    // SAFETY: as the caller says.
    let shared = new(unsafe { ContextObject::of(context) })?;
    let shown = abi::Xrcd { context };
    Ok(Box::into_raw(Box::new(XrcdObject { shown, shared })).cast())
}

pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut abi::Context,
    attr: *mut abi::XrcdInitAttr,
) -> *mut abi::Xrcd {
    // SAFETY: an open context and a structure of the caller's.
    let opened = unsafe { open(ContextObject::of(context), &*attr) };
    made(opened.map(|shared| {
        let shown = abi::Xrcd { context };
        Box::into_raw(Box::new(XrcdObject { shown, shared })).cast()
    }))
}

pub(crate) unsafe extern "C" fn close_xrcd(domain: *mut abi::Xrcd) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*domain).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: made by a Box in `open_xrcd`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(domain.cast::<XrcdObject>()) });
    0
}

/// `ibv_open_qp`: makes another handle of a target queue pair of this process.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut abi::Context,
    attr: *mut abi::QpOpenAttr,
) -> *mut abi::Qp {
    use abi::qp_open::{CONTEXT, NUM, TYPE, XRCD};
    // SAFETY: a structure of the caller's.
    let attr = unsafe { &*attr };
    let (needed, known) = (NUM | XRCD | TYPE, NUM | XRCD | TYPE | CONTEXT);
    if attr.comp_mask & needed != needed || attr.comp_mask & !known != 0 {
        return made(Err(libc::EINVAL));
    }
    let qp_context = if attr.comp_mask & CONTEXT != 0 {
        attr.qp_context
    } else {
        std::ptr::null_mut()
    };
    // SAFETY: an open context and a domain of it, says the caller.
    made(unsafe { queue_pair::open(context, attr, qp_context) })
}
