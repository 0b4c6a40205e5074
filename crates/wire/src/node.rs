//! Messages between an application and the node that owns the device: [`control`] messages over a Unix socket, and, through rings, a
//! [`Work`] for each posted request and a [`Completion`] for each end of one. [`mux`] has those of two nodes on a queue pair that connections
//! share, [`peer`] those by which nodes agree on that. [`crate`] has the panic contract.
//!
//! Those in the rings are made of descriptors of 64 bytes, one for each slot of a ring. Numbers are little-endian. The application is not trusted: an
//! opcode, a status or a flag is a byte until [`Work::parse`] has checked it. Fields that an operation does not use are ignored, and written
//! as 0.
//!
//! Queue pairs, keys and addresses are those that the node gave the application: the node checks each before it does anything with it.

mod codec;
mod completion;
pub mod control;
pub mod mux;
pub mod peer;
mod work;

pub use completion::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
pub use work::{Destination, Element, Remote, Work, WorkData, WorkFlags, WorkOperation};

/// Bytes of a descriptor, one cache line.
pub const DESCRIPTOR_BYTES: usize = 64;
/// Most descriptors of a work request: that of the most bytes inline.
pub const WORK_DESCRIPTORS_MAX: usize = (Work::DATA_AT + Work::INLINE_BYTES_MAX).div_ceil(DESCRIPTOR_BYTES);

/// The bytes of a descriptor, copied out of a ring.
pub type Descriptor = [u8; DESCRIPTOR_BYTES];

/// A queue pair, or a shared receive queue, as the node named it to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u32);
