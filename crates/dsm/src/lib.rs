//! Distributed shared memory: one address space for processes of one host or many.
//!
//! [`protocol`] and [`release`] decide which node may access what, and [`sync`] which thread goes on: none has I/O or a clock. [`memory`] changes what the
//! threads of a process may do with the pages of a region, and knows no other process. A [`Session`] joins them with other nodes' over RDMA.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]
#![cfg_attr(
    test,
    allow(
        clippy::duplicate_mod,
        reason = "loom tries the same files on locks of its own"
    )
)]

#[macro_use]
pub mod mutant;

mod array;
mod cluster;
mod driver;
mod geometry;
mod heap;
mod link;
mod membership;
pub mod memory;
#[cfg(test)]
mod model;
mod peers;
mod placement;
pub mod protocol;
mod region;
pub mod release;
mod session;
mod signal;
pub mod stat;
pub mod sync;
mod thread;
pub mod trace;
mod window;

pub use array::{Array, Integer, Number};
pub use cluster::{Cluster, ClusterError, FileError, HostError, NODES_MAX};
pub use driver::REGIONS_MAX;
pub use geometry::{UNIT_BYTES_MAX, UNIT_BYTES_MIN};
pub use heap::{Heap, HeapOptions, Place};
pub use placement::Placement;
pub use rdmux_wire::dsm::joining::VERSION;
pub use region::Region;
pub use session::{BATCH_VARIABLE, Consistency, Error, FaultMode, RegionOptions, Session, WAIT_VARIABLE};
pub use stat::Stat;
pub use thread::{LockGuard, Thread};

/// Access to a unit or a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reading.
    Read,
    /// Writing, and reading.
    Write,
}

#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
