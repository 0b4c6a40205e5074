//! The path between engines of one host: rings in shared memory for packets, and grants of memory that need none.

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
