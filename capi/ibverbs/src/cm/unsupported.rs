//! Calls that are not supported yet, and say so. Programs do not start without them, used or not.

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
    rdma_reject_ece
    rdma_set_local_ece
}
