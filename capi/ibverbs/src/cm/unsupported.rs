//! Calls that are not supported yet and return an error. Programs do not start without them, whether they use them or not.

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
    rdma_get_remote_ece
    rdma_query_addrinfo
    rdma_reject_ece
    rdma_resolve_addrinfo
    rdma_set_local_ece
    rdma_write_cm_event
    repoll_create
    repoll_ctl
    repoll_wait
}
