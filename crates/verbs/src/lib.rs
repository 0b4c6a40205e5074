//! The RDMA vocabulary of rdmux: [`Device`], [`ProtectionDomain`], [`MemoryRegion`], [`CompletionQueue`], [`QueuePair`], and
//! [`Listener`] and [`Connection`] to connect them, [`DatagramListener`] and [`DatagramService`] where there are no connections.
//! The words and their meaning are those of the InfiniBand verbs.
//!
//! Devices come from providers, each a crate of its own: `rdmux_soft`, an RNIC in user space that speaks RoCEv2 over UDP, and `rdmux_hw`, an
//! RNIC of the host. A program registers those that it wants before it opens a device ([`Provider`]); the first is the default. The crate
//! `rdmux_memory` has the memories over which regions are registered.
//!
//! ```no_run
//! use rdmux_memory::AnonymousMemory;
//! use rdmux_verbs::{Access, ConnectParams, Device, QpOptions, RecvRequest, SendRequest};
//! use std::{sync::Arc, time::Duration};
//!
//! rdmux_soft::register();
//! let device = Device::open("127.0.0.1".parse()?)?;
//! let pd = device.alloc_pd()?;
//! let cq = device.create_cq(256)?;
//! let qp = pd.create_qp(&QpOptions::new(&cq))?;
//! let memory = Arc::new(AnonymousMemory::new(4096)?);
//! let mr = pd.reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)?;
//! qp.init()?;
//! let (send, receive) = (mr.slice(..64).ok_or("too short")?, mr.slice(64..128).ok_or("too short")?);
//! qp.post_recv(RecvRequest::new(0, receive))?;
//! let connection = device.connect(&qp, "127.0.0.1:7174".parse()?, &ConnectParams::default(), b"hello")?;
//! qp.post_send(SendRequest::send(send).wr_id(1).signaled())?;
//! let completion = cq.wait(Duration::from_secs(1))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]
#![cfg_attr(
    test,
    allow(
        clippy::duplicate_mod,
        reason = "loom tries the same files on atomics of its own"
    )
)]

pub mod abi;
mod cm;
mod cq;
mod cq_pool;
mod datagram;
mod device;
mod event;
mod event_queue;
mod features;
mod inbox;
pub mod interface;
mod limits;
mod load;
pub mod moderation;
mod options;
mod process;
pub mod provider;
mod region;
pub mod resources;
mod sidr;
mod size;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
mod srq;
pub mod thread;
pub mod waiting;
mod waker;
mod watch;
mod why;

pub use cm::{
    Arrival, CONNECT_DATA_MAX, ConnectError, ConnectPair, ConnectParams, Connecting, Connection,
    ConnectionRequest, ExternalPair, ListenError, Listener, Progress,
};
pub use cq::ResizeError;
pub use cq_pool::{CqPool, CqShare, GetError, PoolUser, QueueUsage};
pub use datagram::{AddressHandle, AttachError};
pub use device::{
    Carrier, CompletionQueue, CreateError, Device, PostListError, ProtectionDomain, QpOptions, QueuePair,
    Reach,
};
pub use event::AsyncEvent;
pub use event_queue::EventQueue;
pub use features::{Features, Unsupported};
pub use limits::Limits;
pub use load::{Load, wake_cost_ns};
pub use moderation::{DeviceModeration, ModerationPolicy, UnknownPolicy};
pub use options::{OpenError, Options, SharedMemory, check_environment};
pub use process::{FaultCounts, set_process_capture, set_process_faults};
pub use provider::{Provider, set_process_provider};
pub use rdmux_rnic::cm::{CmState, Endpoint};
#[doc(hidden)]
pub use rdmux_rnic::sync;
pub use rdmux_rnic::{
    Access, Answered, Arm, Atomic, AttrMask, Bind, ByPackets, CmDetail, Counters, CqDetail, CqModeration,
    Cqn, Done, Fault, Histogram, INLINE_BYTES_MAX, LKey, Latencies, MCAST_GROUPS_MAX, MCAST_QPS_MAX,
    McastError, Medium, Memory, Moderation, ModerationKind, ModifyError, Operation, Path, PdDetail,
    Placement, PoolUse, PostError, Psn, QpAttributes, QpInfo, QpState, QpType, Qpn, RKey, RecvRequest,
    RegionDetail, RegionKind, RegionSpec, RegisterError, Registration, Remains, RemoteBuffer, SGE_MAX,
    Selectivity, SendFlags, SendRequest, Sge, SgeList, SrqDetail, SrqError, SrqInfo, Srqn, Status, Target,
    Traffic, Unfinished, WcOpcode, WindowType, WorkCompletion, dcqcn, faults, ledger, sched,
};
pub use rdmux_rnic::{Cause, trace};
pub use rdmux_wire::cm::{Extensions, RejReason, ServiceId, SidrStatus};
pub use rdmux_wire::roce::grh::GRH_LEN;
pub use rdmux_wire::roce::{PathMtu, Transport};
pub use region::{MemoryRegion, MemoryWindow};
pub use sidr::{
    AnswerError, DatagramListener, DatagramService, RDMA_UDP_QKEY, RESOLVE_DATA_MAX, ResolveError, Resolving,
    ServiceRequest,
};
pub use size::parse_size;
pub use srq::{SharedReceiveQueue, XrcDomain};
pub use watch::EngineWatch;
