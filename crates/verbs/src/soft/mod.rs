//! The `soft` provider: the RNIC in user space, over UDP.

pub mod group;
pub mod udp;
