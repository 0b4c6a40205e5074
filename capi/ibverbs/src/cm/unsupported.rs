//! Calls that are not supported yet, and say so. Programs do not start without them, used or not.

use std::ffi::c_int;

use crate::set_errno;

macro_rules! fails {
    ($errno:ident: $($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> isize {
                set_errno(libc::$errno);
                -1
            }
        )*
    };
}

fails! {
    EOPNOTSUPP:
    rdma_create_srq
    rdma_create_srq_ex
    rdma_get_remote_ece
    rdma_join_multicast
    rdma_join_multicast_ex
    rdma_leave_multicast
    rdma_reject_ece
    rdma_set_local_ece
}

#[unsafe(no_mangle)]
extern "C" fn rdma_destroy_srq(_: *mut crate::abi::CmId) -> c_int {
    0
}
