//! Shared receive queues of ids.

use std::ffi::c_int;
use std::ptr;

use super::connect::{destroy_queue, destroy_queues, queue_of};
use super::id::CmIdObject;
use crate::{abi, context, minus_one, srq};

/// Makes the shared receive queue of an id, and fills in the fields of the structure that the program left out.
///
/// # Safety
/// The objects given were made, and are not destroyed.
unsafe fn create(id: *mut abi::CmId, init: &mut abi::SrqInitAttrEx) -> Result<(), c_int> {
    use abi::srq::{INIT_CQ, INIT_PD, INIT_TYPE, INIT_XRCD, TYPE_XRC};
    // SAFETY: an id that was made, which one thread uses at a time, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    if own.shown.verbs.is_null() || !own.shown.srq.is_null() || init.comp_mask & INIT_TYPE == 0 {
        return Err(libc::EINVAL);
    }
    if init.comp_mask & INIT_PD == 0 || init.pd.is_null() {
        init.pd = own.shown.pd;
    }
    init.comp_mask |= INIT_PD;
    // If this call fails, it destroys what it made; the completion queues of a queue pair stay.
    let has_queue = !own.shown.recv_cq.is_null();
    if init.srq_type == TYPE_XRC {
        if init.comp_mask & INIT_XRCD == 0 || init.xrcd.is_null() {
            init.xrcd = context::shared_xrcd(own.shown.verbs)?;
        }
        if init.comp_mask & INIT_CQ == 0 || init.cq.is_null() {
            if !has_queue {
                // SAFETY: a context that is open.
                (own.shown.recv_cq_channel, own.shown.recv_cq) =
                    unsafe { queue_of(id, own.shown.verbs, init.attr.max_wr) }?;
            }
            init.cq = own.shown.recv_cq;
        }
        init.comp_mask |= INIT_XRCD | INIT_CQ;
    }
    // SAFETY: as the caller says, and what was just made.
    match unsafe { srq::create_extended(init) } {
        Ok(queue) => {
            own.shown.srq = queue;
            Ok(())
        }
        Err(errno) => {
            if !has_queue {
                destroy_queue(&mut own.shown.recv_cq_channel, &mut own.shown.recv_cq);
            }
            Err(errno)
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_srq_ex(id: *mut abi::CmId, init: *mut abi::SrqInitAttrEx) -> c_int {
    // SAFETY: as the caller says.
    minus_one(unsafe { create(id, &mut *init) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_srq(
    id: *mut abi::CmId,
    pd: *mut abi::Pd,
    init: *mut abi::SrqInitAttr,
) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's.
    let (qp_type, init) = unsafe { ((*id).qp_type, &mut *init) };
    let mut whole = abi::SrqInitAttrEx {
        srq_context: init.srq_context,
        attr: init.attr,
        comp_mask: abi::srq::INIT_TYPE | abi::srq::INIT_PD,
        srq_type: match qp_type {
            abi::qp_type::XRC_RECV => abi::srq::TYPE_XRC,
            _ => abi::srq::TYPE_BASIC,
        },
        pd,
        xrcd: ptr::null_mut(),
        cq: ptr::null_mut(),
        max_num_tags: 0,
        max_ops: 0,
    };
    // SAFETY: as the caller says.
    let made = unsafe { create(id, &mut whole) };
    init.attr = whole.attr;
    minus_one(made)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_destroy_srq(id: *mut abi::CmId) {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    let queue = std::mem::replace(&mut own.shown.srq, ptr::null_mut());
    if !queue.is_null() {
        // SAFETY: made for the id, and used no more, says the caller.
        unsafe { srq::ibv_destroy_srq(queue) };
    }
    if own.shown.qp.is_null() {
        destroy_queues(own);
    }
}
