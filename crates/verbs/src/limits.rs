//! Limits of devices.

use rdmux_rnic::{
    INLINE_BYTES_MAX, MCAST_GROUPS_MAX, MCAST_QPS_MAX, QPS_MAX, REGIONS_MAX, SGE_MAX, SRQS_MAX,
};
use rdmux_wire::roce::MESSAGE_BYTES_MAX;

#[cfg(doc)]
use crate::device::{Device, QpOptions};

/// Limits of a device ([`Device::limits`]). Of an RNIC they are those that it reports; it may refuse an object earlier, for lack of
/// room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs of the device.
    pub queue_pairs: u32,
    /// Shared receive queues of the device.
    pub shared_receive_queues: u32,
    /// Memory regions of the device; for a soft device, regions and windows together.
    pub memory_regions: u32,
    /// Requests that a queue of a queue pair can hold ([`QpOptions::max_send_wr`]); `None`: any number.
    pub work_requests: Option<u32>,
    /// Completions that a completion queue can hold; `None`: any number.
    pub completions: Option<u32>,
    /// Scatter/gather elements of a request. A queue pair of an RNIC may take fewer.
    pub sges: u32,
    /// Bytes of inline data of a send request. A queue pair of an RNIC may take fewer.
    pub inline_bytes: u32,
    /// Bytes of a message. A datagram holds at most the path MTU.
    pub message_bytes: u32,
    /// Multicast groups that the device's queue pairs are attached to.
    pub mcast_groups: u32,
    /// Queue pairs attached to one multicast group.
    pub mcast_queue_pairs: u32,
}

impl Limits {
    /// Limits of the engine ([`rdmux_rnic`]).
    pub const ENGINE: Limits = Limits {
        queue_pairs: QPS_MAX as u32,
        shared_receive_queues: SRQS_MAX as u32,
        memory_regions: REGIONS_MAX as u32,
        work_requests: None,
        completions: None,
        sges: SGE_MAX as u32,
        inline_bytes: INLINE_BYTES_MAX as u32,
        message_bytes: MESSAGE_BYTES_MAX,
        mcast_groups: MCAST_GROUPS_MAX as u32,
        mcast_queue_pairs: MCAST_QPS_MAX as u32,
    };
}
