//! Interface between `libibverbs` and its drivers, which vendors' libraries ask for when they are loaded. They register
//! themselves and are never called, so nothing of this is ever reached; but each name has to exist, or a program that happens
//! to be linked with such a library does not start.

use std::ffi::{c_char, c_int, c_void};

use crate::set_errno;

macro_rules! never_reached {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> isize {
                set_errno(libc::EOPNOTSUPP);
                libc::EOPNOTSUPP as isize
            }
        )*
    };
}

never_reached! {
    _verbs_init_and_alloc_context
    execute_ioctl
    ibv_cmd_advise_mr
    ibv_cmd_alloc_dm
    ibv_cmd_alloc_mw
    ibv_cmd_alloc_pd
    ibv_cmd_attach_mcast
    ibv_cmd_close_xrcd
    ibv_cmd_create_ah
    ibv_cmd_create_counters
    ibv_cmd_create_cq
    ibv_cmd_create_cq_ex
    ibv_cmd_create_cq_ex2
    ibv_cmd_create_flow
    ibv_cmd_create_flow_action_esp
    ibv_cmd_create_qp
    ibv_cmd_create_qp_ex
    ibv_cmd_create_qp_ex2
    ibv_cmd_create_rwq_ind_table
    ibv_cmd_create_srq
    ibv_cmd_create_srq_ex
    ibv_cmd_create_wq
    ibv_cmd_dealloc_mw
    ibv_cmd_dealloc_pd
    ibv_cmd_dereg_mr
    ibv_cmd_destroy_ah
    ibv_cmd_destroy_counters
    ibv_cmd_destroy_cq
    ibv_cmd_destroy_flow
    ibv_cmd_destroy_flow_action
    ibv_cmd_destroy_qp
    ibv_cmd_destroy_rwq_ind_table
    ibv_cmd_destroy_srq
    ibv_cmd_destroy_wq
    ibv_cmd_detach_mcast
    ibv_cmd_free_dm
    ibv_cmd_get_context
    ibv_cmd_modify_cq
    ibv_cmd_modify_flow_action_esp
    ibv_cmd_modify_qp
    ibv_cmd_modify_qp_ex
    ibv_cmd_modify_srq
    ibv_cmd_modify_wq
    ibv_cmd_open_qp
    ibv_cmd_open_xrcd
    ibv_cmd_poll_cq
    ibv_cmd_post_recv
    ibv_cmd_post_send
    ibv_cmd_post_srq_recv
    ibv_cmd_query_context
    ibv_cmd_query_device_any
    ibv_cmd_query_mr
    ibv_cmd_query_port
    ibv_cmd_query_qp
    ibv_cmd_query_srq
    ibv_cmd_read_counters
    ibv_cmd_reg_dm_mr
    ibv_cmd_reg_dmabuf_mr
    ibv_cmd_reg_mr
    ibv_cmd_req_notify_cq
    ibv_cmd_rereg_mr
    ibv_cmd_resize_cq
    verbs_allow_disassociate_destroy
    verbs_init_cq
    verbs_open_device
    verbs_set_ops
    verbs_uninit_context
}

/// Registers a driver: there are no devices for it.
#[unsafe(no_mangle)]
extern "C" fn verbs_register_driver_34(_: *const c_void) {}

/// Like the above, for older drivers.
#[unsafe(no_mangle)]
extern "C" fn ibv_register_driver(_: *const c_char, _: *const c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __verbs_log(_: *mut c_void, _: u32, _: *const c_char) {}

#[unsafe(no_mangle)]
extern "C" fn __ioctl_final_num_attrs(attributes: u32, _: *mut c_void) -> u32 {
    attributes
}

#[unsafe(no_mangle)]
extern "C" fn ibv_read_ibdev_sysfs_file(_: *mut c_char, _: usize, _: *mut c_void, _: *const c_char) -> c_int {
    -1
}
