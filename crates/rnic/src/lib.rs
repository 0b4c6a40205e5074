//! The RDMA transport as a state machine. It does no I/O, reads no clock, starts no thread, and takes randomness only from the seed
//! that it is given: its driver passes in received datagrams and the time, and sends the packets that the engine produces. The
//! provider `rdmux-soft` drives it over UDP; the simulator drives it over lossy links under a virtual clock.
//!
//! Begin with [`Rnic`], whose documentation is the calling contract, and [`Memory`], through which the engine accesses all bytes.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;
#[macro_use]
mod probes;

mod access;
mod backlog;
pub mod cm;
mod counters;
mod cq;
pub mod dcqcn;
mod device;
pub mod faults;
mod flush;
mod histogram;
mod lane;
pub mod ledger;
mod local;
mod mcast;
mod memory;
mod pacer;
mod qp;
mod queue;
mod region;
mod remote;
mod retired;
pub mod sched;
mod srq;
pub mod sync;
#[cfg(test)]
mod tests;
mod time;
pub mod trace;
mod transmit;
mod work;

pub use access::{AccessId, AccessJob, Accessed};
pub use backlog::Backlog;
pub use counters::Counters;
pub use cq::{
    Arm, ArmedQueues, CompletionQueue, CqModeration, Cqn, Delivered, Moderation, ModerationKind, PoolUse,
    ShareId, Status, TooShort, WcOpcode, WorkCompletion,
};
pub use device::{
    Arrival, CmDetail, Config, CqDetail, LinkProgress, Links, Paged, PdDetail, QPS_MAX, QpDetail, QpInfo,
    RegionDetail, Rnic, SRQ_QPS_MAX, SRQS_MAX, SrqDetail, Traffic,
};
pub use flush::{FlushId, FlushJob};
pub use histogram::{Histogram, Latencies};
pub use lane::{Delivery, DirectLane, Directly, Lanes, Recent};
pub use local::{
    Fill, Lending, NoRings, PARTS_MAX, Part, PeerRing, Put, RingBytes, Rings, Room, Taken, Ticket, end_packet,
};
pub use mcast::{MCAST_GROUPS_MAX, MCAST_QPS_MAX, McastError};
pub use memory::{
    Access, Atomic, Fault, HeapMemory, Medium, Memory, NotShared, PeerFault, PeerMemory, Placement, Sharing,
};
pub use qp::remains::{Answered, Done, Remains, Unfinished};
pub use qp::requester::direct::{ByPackets, Grant, Grantable, NotGranted};
pub use qp::{AttrMask, Cause, Event, ModifyError, QpAttributes, QpInit, QpState, QpType};
pub use queue::{NotPosted, ReceiveQueue, SendQueue};
pub use rdmux_wire::roce::Selectivity;
pub use rdmux_wire::{LKey, Psn, Qpn, RKey};
pub use region::{Pd, REGIONS_MAX, RegionKind, RegionSpec, RegisterError, WindowType};
pub use remote::RemoteBuffer;
pub use srq::{SrqError, SrqInfo, SrqInit, Srqn, Xrcd};
pub use time::Time;
pub use transmit::{ECN_CAPABLE, ECN_MARKED, Path, TRAIN_BYTES_MAX, TRAIN_PACKETS_MAX, Train, TransmitBuf};
pub use work::{
    Bind, INLINE_BYTES_MAX, Operation, PostError, RecvRequest, Registration, SGE_MAX, SendFlags, SendRequest,
    Sge, SgeList, Target,
};
