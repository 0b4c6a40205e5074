//! The `soft` provider: the RNIC in user space, over UDP, and over shared memory within a host.

pub(crate) mod engine;
pub mod faults;
pub mod group;
pub(crate) mod load;
mod mcast;
pub(crate) mod port;
pub mod resources;
pub(crate) mod shm;
pub mod udp;
mod user;
