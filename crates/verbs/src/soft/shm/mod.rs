//! The path between engines of one host: rings in shared memory for packets, and grants of memory that need none.

mod grant;
pub(crate) mod link;
mod message;
pub(crate) mod ring;
mod segment;
