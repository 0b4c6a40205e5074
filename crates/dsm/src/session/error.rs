//! Errors of a session.

use std::io;
use std::net::SocketAddr;

use rdmux_verbs::{ConnectError, CreateError, ListenError, OpenError, RegisterError};
use rdmux_wire::dsm::joining::VERSION;

use super::ATTEMPTS;
use crate::driver::REGIONS_MAX;
use crate::geometry::{UNIT_BYTES_MAX, UNIT_BYTES_MIN};
use crate::link;
use crate::memory;
use crate::protocol::HomesError;
use crate::sync::{Failure, THREADS_MAX};
use crate::trace::TraceError;

/// Reason why there is no shared memory, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// This node cannot listen.
    #[error("node {node} cannot listen at {address}: {error}")]
    Listen {
        /// This node.
        node: u32,
        /// Its address.
        address: SocketAddr,
        /// The reason.
        error: ListenError,
    },
    /// An object cannot be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Memory cannot be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// A connection cannot be prepared.
    #[error(transparent)]
    Prepare(#[from] link::OpenError),
    /// A node has not answered in time.
    #[error("node {node} at {address} has not joined within {seconds} seconds: {error}")]
    Absent {
        /// The node.
        node: u32,
        /// Its address.
        address: SocketAddr,
        /// The time that it had.
        seconds: u64,
        /// The last error.
        error: ConnectError,
    },
    /// Nodes have not connected in time.
    #[error("nodes {nodes} have not joined within {seconds} seconds")]
    Missing {
        /// The nodes, separated by commas.
        nodes: String,
        /// The time that they had.
        seconds: u64,
    },
    /// A node is of another version.
    #[error(
        "node {node} speaks version {version} of the shared memory, and this one version {VERSION}: use the same rdmux on all nodes"
    )]
    Version {
        /// The node.
        node: u32,
        /// Its version.
        version: u16,
    },
    /// A node is of another cluster, or describes it otherwise.
    #[error(
        "node {node} at {address} is of another cluster: give all nodes the same list and session, or cluster file and key"
    )]
    Stranger {
        /// The node that was expected.
        node: u32,
        /// Its address.
        address: SocketAddr,
    },
    /// A node's pages have another size.
    #[error("pages of node {node} have {theirs} bytes, those of this one {ours}")]
    PageSize {
        /// The node.
        node: u32,
        /// Bytes of its pages.
        theirs: u32,
        /// Bytes of pages here.
        ours: u32,
    },
    /// A node has left or failed.
    #[error("node {node} is gone: {reason}")]
    Gone {
        /// The node.
        node: u32,
        /// The reason.
        reason: String,
    },
    /// Node 0 makes the region with other settings. No region can be made after that.
    #[error(
        "node 0 makes region {region} of another size, or with other units, homes or consistency: let all nodes make the same regions in the same order"
    )]
    OtherSettings {
        /// Number of the region.
        region: u32,
    },
    /// A node cannot make the region, or the programs do not make the same ones. No region can be made after that.
    #[error(
        "node {node} cannot make region {region}, or makes it with other settings: see its error, and let all nodes make the same regions in the same order"
    )]
    Differs {
        /// The node.
        node: u32,
        /// Number of the region.
        region: u32,
    },
    /// No address suits all nodes.
    #[error(
        "no address of {ATTEMPTS} is free on all nodes for a region of {bytes} bytes: limit the memory that other libraries map"
    )]
    NoAddress {
        /// Bytes of the region.
        bytes: u64,
    },
    /// The environment has no such mode.
    #[error("RDMUX_DSM_FAULTS={0}: give thread, inline or mprotect")]
    FaultMode(String),
    /// [`WAIT_VARIABLE`](super::WAIT_VARIABLE) has no such mode.
    #[error("RDMUX_DSM_WAIT={0}: give blocked, interrupted or running")]
    WaitMode(String),
    /// [`BATCH_VARIABLE`](super::BATCH_VARIABLE) is neither.
    #[error("RDMUX_DSM_BATCH={0}: give on or off")]
    Batch(String),
    /// There are too many regions.
    #[error("there are already {REGIONS_MAX} regions")]
    TooManyRegions,
    /// The region has no bytes, or more than the system can map.
    #[error("a region of {0} bytes cannot be made")]
    Size(u64),
    /// A unit cannot have so many bytes.
    #[error(
        "a unit of {0} bytes cannot be had: give a power of two from {UNIT_BYTES_MIN} to {UNIT_BYTES_MAX}"
    )]
    Unit(u64),
    /// The homes of the units cannot be given.
    #[error(transparent)]
    Homes(#[from] HomesError),
    /// Pages cannot be had or changed.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The system refused a change of pages, after which the memory is of no use.
    #[error("the shared memory is of no use any more: {0}")]
    Failed(String),
    /// A page was lost with a node.
    #[error("the memory at {address:#x} was lost with node {node}")]
    Lost {
        /// Address of the page.
        address: u64,
        /// The node.
        node: u32,
    },
    /// A node has no room for an object.
    #[error(
        "node {node} has no room for an object of {bytes} bytes: free others, place it at another node, or make a larger heap"
    )]
    NoRoom {
        /// The node.
        node: u32,
        /// Bytes of the object.
        bytes: u64,
    },
    /// An object cannot be aligned so.
    #[error(
        "an object of {bytes} bytes cannot be aligned to {alignment}: no alignment is larger than a page"
    )]
    Object {
        /// Bytes of the object.
        bytes: u64,
        /// Its alignment, in bytes.
        alignment: u64,
    },
    /// No object begins at the address that is freed.
    #[error(
        "no object begins at {address:#x}, or it was freed already: free the address that was allocated, once"
    )]
    NotAllocated {
        /// The address.
        address: u64,
    },
    /// Bytes are not in the heap.
    #[error("{bytes} bytes at {address:#x} are not in the place of one object of the heap")]
    NotInHeap {
        /// Their address.
        address: u64,
        /// Their number.
        bytes: u64,
    },
    /// Writes could not be released, as the home of their pages is gone.
    #[error("writes were lost with node {node}, which was the home of their pages")]
    Unreleased {
        /// The node.
        node: u32,
    },
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Faults of a mode cannot be recorded.
    #[error(
        "RDMUX_DSM_TRACE is set, but faults of mode thread cannot be recorded: set RDMUX_DSM_FAULTS=inline, or mprotect"
    )]
    Untraced,
    /// A thread cannot have a number.
    #[error("thread {0} is in use, or its number is not below {THREADS_MAX}")]
    ThreadNumber(u16),
    /// A thread's call was not carried out.
    #[error(transparent)]
    Call(#[from] Failure),
    /// The memory cannot be had.
    #[error("no memory for a region of {bytes} bytes: {error}")]
    NoMemory {
        /// Bytes of the region.
        bytes: u64,
        /// The reason.
        error: io::Error,
    },
    /// The system refuses a thread or a descriptor.
    #[error(transparent)]
    Io(#[from] io::Error),
}
