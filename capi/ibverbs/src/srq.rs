//! Shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{PostError, RecvRequest, SharedReceiveQueue, SrqError};

use crate::channel::errno_of;
use crate::context::ContextObject;
use crate::events::Given;
use crate::memory::PdObject;
use crate::queue_pair::{WR_MAX, elements, errno_of_post, sges};
use crate::uses::{Use, Uses};
use crate::{abi, channel, made, status, xrc};

/// Object behind a program's `struct ibv_srq` pointer.
#[repr(C)]
pub(crate) struct SrqObject {
    shown: UnsafeCell<abi::Srq>,
    pub(crate) queue: SharedReceiveQueue,
    attr: Mutex<abi::SrqAttr>,
    is_xrc: bool,
    pub(crate) given: Given,
    pub(crate) uses: Uses,
    /// Its domain, and the queue of its completions.
    _of: Vec<Use>,
}

impl SrqObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that `ibv_create_srq` gave out, and is not destroyed.
    pub(crate) unsafe fn of<'a>(queue: *mut abi::Srq) -> &'a SrqObject {
        // SAFETY: as the caller says.
        unsafe { &*queue.cast::<SrqObject>() }
    }
}

/// Makes a queue; an XRC queue is in a domain, and its completions go to a queue of its own.
///
/// # Safety
/// The objects given were made, and are not destroyed.
unsafe fn create(
    pd: *mut abi::Pd,
    srq_context: *mut c_void,
    attr: abi::SrqAttr,
    xrc: Option<(*mut abi::Xrcd, *mut abi::Cq)>,
) -> Result<*mut abi::Srq, c_int> {
    if attr.max_wr == 0 || attr.max_wr > WR_MAX || attr.max_sge > rdmux_verbs::SGE_MAX as u32 {
        return Err(libc::EINVAL);
    }
    // SAFETY: a domain that was made, says the caller.
    let (context, of) = unsafe { ((*pd).context, PdObject::of(pd)) };
    let (domain, mut used) = (&of.domain, vec![of.uses.begin()]);
    let queue = match xrc {
        None => domain.create_srq(attr.max_wr),
        Some((xrcd, cq)) => {
            // SAFETY: both were made, says the caller.
            let (xrcd, cq) = unsafe {
                (
                    &xrc::XrcdObject::of(xrcd).shared.domain,
                    channel::CqObject::of(cq),
                )
            };
            used.push(cq.uses.begin());
            domain.create_xrc_srq(attr.max_wr, xrcd, &cq.queue)
        }
    };
    let queue = queue.map_err(|error| errno_of(&error))?;
    let number = queue.srqn().0;
    let made: *mut SrqObject = Box::into_raw(Box::new(SrqObject {
        shown: UnsafeCell::new(abi::Srq {
            context,
            srq_context,
            pd,
            handle: number,
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
        }),
        queue,
        attr: Mutex::new(attr),
        is_xrc: xrc.is_some(),
        given: Given::default(),
        uses: Uses::default(),
        _of: used,
    }));
    // SAFETY: an open context, which lives as long as its objects.
    unsafe { ContextObject::of(context) }
        .objects()
        .queues
        .insert(number, made.cast());
    Ok(made.cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_srq(pd: *mut abi::Pd, init: *mut abi::SrqInitAttr) -> *mut abi::Srq {
    // SAFETY: as the caller says.
    made(unsafe { create(pd, (*init).srq_context, (*init).attr, None) })
}

/// Makes a queue as `ibv_create_srq_ex(3)` says.
///
/// # Safety
/// The objects that `init` names were made, and are not destroyed.
pub(crate) unsafe fn create_extended(init: &abi::SrqInitAttrEx) -> Result<*mut abi::Srq, c_int> {
    use abi::srq::{INIT_CQ, INIT_PD, INIT_TYPE, INIT_XRCD, TYPE_BASIC, TYPE_XRC};
    let has = |bits: u32| init.comp_mask & bits == bits;
    let srq_type = if has(INIT_TYPE) { init.srq_type } else { TYPE_BASIC };
    let xrc = match srq_type {
        TYPE_BASIC => None,
        TYPE_XRC if has(INIT_XRCD | INIT_CQ) => Some((init.xrcd, init.cq)),
        TYPE_XRC => return Err(libc::EINVAL),
        _ => return Err(libc::EOPNOTSUPP),
    };
    if init.comp_mask & !(INIT_TYPE | INIT_PD | INIT_XRCD | INIT_CQ) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if !has(INIT_PD) {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller says.
    unsafe { create(init.pd, init.srq_context, init.attr, xrc) }
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    _: *mut abi::Context,
    init: *mut abi::SrqInitAttrEx,
) -> *mut abi::Srq {
    // SAFETY: a structure of the caller's, which names what was made.
    made(unsafe { create_extended(&*init) })
}

/// Returns the number by which peers name an XRC queue.
pub(crate) unsafe extern "C" fn get_srq_num(queue: *mut abi::Srq, number: *mut u32) -> c_int {
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { SrqObject::of(queue) };
    if !own.is_xrc {
        return libc::EINVAL;
    }
    // SAFETY: a place of the caller's.
    unsafe { *number = own.queue.srqn().0 };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_srq(queue: *mut abi::Srq) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*queue).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a queue that was made, says the caller.
    let (context, own) = unsafe { ((*queue).context, SrqObject::of(queue)) };
    if let Err(errno) = own.uses.check_unused() {
        return errno;
    }
    // SAFETY: an open context, which lives as long as its objects.
    unsafe { ContextObject::of(context) }.take_out(queue.cast(), |objects| {
        objects.queues.remove(&own.queue.srqn().0);
    });
    own.given.wait_acknowledged();
    // SAFETY: made by a Box in `create`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(queue.cast::<SrqObject>()) });
    0
}

/// Ends a queue whose context is closed.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end(queue: *mut abi::Srq) {
    // SAFETY: as the caller says.
    if unsafe { SrqObject::of(queue) }.uses.check_unused().is_ok() {
        // SAFETY: made by a Box in `create`; the rest as the caller says.
        drop(unsafe { Box::from_raw(queue.cast::<SrqObject>()) });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_srq(queue: *mut abi::Srq, attr: *mut abi::SrqAttr, mask: c_int) -> c_int {
    // SAFETY: a queue that was made, and a structure of the caller's.
    let (own, attr) = unsafe { (SrqObject::of(queue), &*attr) };
    let max_wr = (mask & abi::srq::MAX_WR != 0).then_some(attr.max_wr);
    let limit = (mask & abi::srq::LIMIT != 0).then_some(attr.srq_limit);
    if max_wr.is_some_and(|max| max > WR_MAX) {
        return libc::EINVAL;
    }
    let mut kept = own.attr.lock();
    let modified = own.queue.modify(max_wr, limit).map_err(|error: SrqError| {
        let _ = error;
        libc::EINVAL
    });
    kept.max_wr = max_wr.filter(|_| modified.is_ok()).unwrap_or(kept.max_wr);
    status(modified)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_srq(queue: *mut abi::Srq, attr: *mut abi::SrqAttr) -> c_int {
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { SrqObject::of(queue) };
    let Some(info) = own.queue.query() else {
        return libc::EINVAL;
    };
    let kept = *own.attr.lock();
    // SAFETY: a place of the caller's.
    unsafe {
        *attr = abi::SrqAttr {
            max_wr: info.max_wr,
            srq_limit: info.limit.unwrap_or(0),
            ..kept
        };
    }
    0
}

pub(crate) unsafe extern "C" fn post_recv(
    queue: *mut abi::Srq,
    mut wr: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { SrqObject::of(queue) };
    // SAFETY: null or a request of the caller's list.
    while let Some(next) = unsafe { wr.as_ref() } {
        // SAFETY: the list's elements live, says the caller.
        let posted = unsafe { elements(next.sg_list, next.num_sge) }.and_then(|list| {
            let request = RecvRequest {
                wr_id: next.wr_id,
                sges: sges(list),
            };
            own.queue
                .post_recv(request)
                .map_err(|error: PostError| errno_of_post(&error))
        });
        if let Err(errno) = posted {
            // SAFETY: a place of the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        wr = next.next;
    }
    0
}
