//! Shared memory between two devices of one host: what a [`Channel`] is made of, and how its ends use it.
//!
//! A channel is a [`segment`] that both ends map, with a [`ring`] for packets each way, a doorbell that wakes the peer, or a futex in its
//! place ([`nap`]), and grants. Threads without the engine's lock use the rings by their [`Ends`]. The owner of a region grants it to the
//! peer, which then reads and writes it without packets ([`Granted`]) until the owner revokes the grant ([`revocation`]). A peer that was
//! stopped while it wrote may still be inside of memory that was revoked ([`Stay`]).
//!
//! Both ends are processes of one user. That does not mean that they are trusted: whatever a peer writes, it gets an error and the channel
//! ends. This crate knows neither the devices nor how they meet: the user connects two processes and passes descriptors and [`Offer`]s
//! between them.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod channel;
mod ends;
mod gate;
mod grant;
mod lend;
pub mod nap;
mod place;
mod record;
pub mod revocation;
pub mod ring;
pub mod segment;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
pub mod stay;

pub use channel::{Channel, NameError, Offer, WAITING_BYTES_MAX};
pub use ends::{Ends, TookRequests};
pub use grant::{Granted, Process};
pub use lend::{NamedBytes, NotLent};
pub use nap::NapWord;
pub use record::HeldBytes;
pub use ring::{Corrupt, Meta, Record};
pub use segment::{Segment, Side};
pub use stay::{Given, Stay, Stays};
