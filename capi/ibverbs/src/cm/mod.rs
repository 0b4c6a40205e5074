//! `librdmacm.so.1`: connections by address and port. It is the same file as `libibverbs.so.1` under another name: an id and its queue
//! pair, device and events belong together, and two libraries would have to hand them to each other.
//!
//! No call of an id with a channel waits: one thread of the process handles what happens to all connections
//! ([`cm_thread`](crate::cm_thread)), and reports it to the channels of their ids.

mod address_info;
mod ask;
mod bring_up;
mod channel;
mod connect;
mod datagram;
mod endpoint;
mod id;
mod listen;
mod made;
mod multicast;
mod socket_address;
mod srq;
mod unsupported;

pub(crate) use listen::{device_at, services, some_port};
pub(crate) use socket_address::{read as read_address, route, write as write_address};

/// Text of an event. No option or event of this library needs it, but programs ask for it.
mod text {
    use std::ffi::{CStr, c_char, c_int};

    #[unsafe(no_mangle)]
    extern "C" fn rdma_event_str(event: c_int) -> *const c_char {
        const NAMES: [&CStr; 16] = [
            c"RDMA_CM_EVENT_ADDR_RESOLVED",
            c"RDMA_CM_EVENT_ADDR_ERROR",
            c"RDMA_CM_EVENT_ROUTE_RESOLVED",
            c"RDMA_CM_EVENT_ROUTE_ERROR",
            c"RDMA_CM_EVENT_CONNECT_REQUEST",
            c"RDMA_CM_EVENT_CONNECT_RESPONSE",
            c"RDMA_CM_EVENT_CONNECT_ERROR",
            c"RDMA_CM_EVENT_UNREACHABLE",
            c"RDMA_CM_EVENT_REJECTED",
            c"RDMA_CM_EVENT_ESTABLISHED",
            c"RDMA_CM_EVENT_DISCONNECTED",
            c"RDMA_CM_EVENT_DEVICE_REMOVAL",
            c"RDMA_CM_EVENT_MULTICAST_JOIN",
            c"RDMA_CM_EVENT_MULTICAST_ERROR",
            c"RDMA_CM_EVENT_ADDR_CHANGE",
            c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        ];
        crate::text::name(&NAMES, event, c"UNKNOWN EVENT")
    }
}
