//! Endpoints: an id, resolved or bound, with its queue pair, in one call.

use std::ffi::c_int;
use std::ptr;

use super::address_info::AddressInfo;
use super::connect::{create_qp, rdma_destroy_qp};
use super::id::{CmIdObject, rdma_bind_addr, rdma_destroy_id, rdma_resolve_addr, rdma_resolve_route};
use super::srq::rdma_destroy_srq;
use crate::abi;

const PASSIVE: c_int = 1;
/// Time for which a program that asks for an endpoint waits for each step.
const RESOLVE_MS: c_int = 2_000;

unsafe fn create(
    id: *mut abi::CmId,
    info: &AddressInfo,
    pd: *mut abi::Pd,
    init: *mut abi::QpInitAttr,
) -> c_int {
    if !init.is_null() {
        // SAFETY: a structure of the caller's.
        unsafe { (*init).qp_type = (*id).qp_type };
    }
    if info.flags & PASSIVE != 0 {
        // SAFETY: an id just made, and what the program gave.
        unsafe {
            if !init.is_null() {
                (*id.cast::<CmIdObject>()).passive = Some(*init);
            }
            if rdma_bind_addr(id, info.source) != 0 {
                return -1;
            }
            if !pd.is_null() {
                (*id).pd = pd;
            }
            return 0;
        }
    }
    // SAFETY: an id just made, and what the program gave.
    unsafe {
        if rdma_resolve_addr(id, info.source, info.destination, RESOLVE_MS) != 0
            || rdma_resolve_route(id, RESOLVE_MS) != 0
        {
            return -1;
        }
        if init.is_null() {
            return 0;
        }
        crate::minus_one(create_qp(id, pd, &mut *init, None))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut abi::CmId,
    info: *mut AddressInfo,
    pd: *mut abi::Pd,
    init: *mut abi::QpInitAttr,
) -> c_int {
    // SAFETY: what `rdma_getaddrinfo` gave, says the caller.
    let info = unsafe { &*info };
    let mut made = ptr::null_mut();
    let (port_space, qp_type) = (info.port_space.cast_unsigned(), info.qp_type.cast_unsigned());
    let created = super::id::create(ptr::null_mut(), ptr::null_mut(), port_space, Some(qp_type));
    if crate::minus_one(created.map(|id| made = id)) != 0 {
        return -1;
    }
    // SAFETY: just made.
    if unsafe { create(made, info, pd, init) } != 0 {
        // The clean-up below may set another `errno`.
        let errno = std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO);
        // SAFETY: just made, and used by nobody.
        unsafe { rdma_destroy_id(made) };
        crate::set_errno(errno);
        return -1;
    }
    // SAFETY: a place of the caller's.
    unsafe { *id = made };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_ep(id: *mut abi::CmId) {
    // SAFETY: an id that was made, and is used no more, says the caller.
    unsafe {
        rdma_destroy_qp(id);
        if !(*id).srq.is_null() {
            rdma_destroy_srq(id);
        }
        rdma_destroy_id(id);
    }
}
