//! One RDMA device for many processes: a node owns the device and serves applications that trust each other as little as the node trusts
//! them.
//!
//! [`node::Node`] is the process that owns a device, whatever its provider. [`register`] makes the provider `shared` known, whose devices are
//! those of nodes: the engine and the queue pairs live in the node. Calls go to it over a control connection, work requests and completions
//! through the rings of [`ring`]: how descriptors cross them, how the sides wake each other, and the memory.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod control;
pub mod node;
mod place;
mod provider;
pub mod ring;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
mod start;
pub mod watch;

use rdmux_verbs::Features;

pub use provider::{AttachError, register};
pub use start::{Held, StartLock, node_addresses};

/// Features of a device that a node passes on to applications.
const FEATURES: Features = Features::UC
    .union(Features::UD)
    .union(Features::SRQ)
    .union(Features::ATOMIC)
    .union(Features::FLUSH_GLOBAL)
    .union(Features::FLUSH_PERSISTENT)
    .union(Features::ATOMIC_WRITE)
    .union(Features::CONNECT_ANY)
    .union(Features::BY_ADDRESS)
    .union(Features::SEND_INVALIDATE);
