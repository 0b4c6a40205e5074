//! Calls that are not supported yet, or never will be, and return the error that the manual prescribes; and calls that have
//! nothing to do here.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::set_errno;

/// Calls that return a null pointer and `EOPNOTSUPP`.
macro_rules! makes_nothing {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> *mut c_void {
                set_errno(libc::EOPNOTSUPP);
                ptr::null_mut()
            }
        )*
    };
}

/// Calls that return the error's number.
macro_rules! refuses {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> c_int {
                libc::EOPNOTSUPP
            }
        )*
    };
}

/// Calls that return -1 and `EOPNOTSUPP`.
macro_rules! fails {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> c_int {
                set_errno(libc::EOPNOTSUPP);
                -1
            }
        )*
    };
}

makes_nothing! {
    ibv_alloc_dmah
    ibv_create_comp_cntr
    ibv_reg_dmabuf_mr
}

refuses! {
    _ibv_query_comp_cntr_caps
    ibv_dealloc_dmah
    ibv_destroy_comp_cntr
    ibv_inc_comp_cntr
    ibv_inc_err_comp_cntr
    ibv_qp_attach_comp_cntr
    ibv_query_ece
    ibv_read_comp_cntr
    ibv_read_err_comp_cntr
    ibv_set_comp_cntr
    ibv_set_ece
    ibv_set_err_comp_cntr
}

fails! {
    ibv_dm_export_dmabuf_fd
    ibv_resolve_eth_l2_from_gid
}

/// Incoming bytes are placed in ascending order, and the last word last. 0: the call asks for something else, whole cache lines
/// at once.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp_data_in_order(_: *mut c_void, _: c_int, _: u32) -> c_int {
    0
}

/// Registered memory is reached through the kernel, so a fork does it no harm.
#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

/// IBV_FORK_UNNEEDED
#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> c_int {
    2
}

/// Structures of the kernel's interface, which no program gets here.
#[unsafe(no_mangle)]
extern "C" fn ibv_copy_ah_attr_from_kern(_: *mut c_void, _: *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_copy_path_rec_from_kern(_: *mut c_void, _: *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_copy_path_rec_to_kern(_: *mut c_void, _: *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_copy_qp_attr_from_kern(_: *mut c_void, _: *mut c_void) {}
