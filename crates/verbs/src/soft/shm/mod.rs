//! Shared-memory path between engines of one host: rings for packets, and grants of memory that need no packets.

mod gate;
mod grant;
pub(crate) mod link;
pub(in crate::soft) mod message;
pub(in crate::soft) mod report;
mod revocation;
pub(crate) mod ring;
mod segment;
pub(in crate::soft) mod stay;
pub(in crate::soft) mod why;
