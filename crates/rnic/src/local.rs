//! Requests to peers on this host that need no acknowledgement packet.
//!
//! A ring in shared memory carries them, and the peer acknowledges each by taking it out ([`Taken::Done`]): one that it has executed is
//! done. Of any other it says so, and the request is one like those that arrive in packets from there on, with the same PSNs: packets
//! acknowledge or refuse it, and the requester sends it again in packets if it must. So a requester whose link ends, or whose peer has no
//! receive, goes on exactly where it would be if all had been packets.
//!
//! A long SEND carries no payload but names the parts of the requester's memory that hold it ([`Part`]), and the peer copies from there.
//! The memory belongs to the request until the peer has taken it, as until a packet is acknowledged. A request that ends earlier, because
//! its QP fails, ends what the peer may read before its completion shows ([`Lending`]). A WRITE holds its payload in any case: if the memory
//! were lent no more in the middle of the copy, its bytes would be placed twice, and somebody may look at the first ones.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_wire::roce::{Bth, ICRC_LEN};
use rdmux_wire::{LKey, Psn, Qpn};

use crate::memory::{Fault, Memory, PeerFault};

/// Most payload bytes of a request that names its memory.
pub(crate) const NAMED_BYTES_MAX: usize = 256 << 10;
/// Most parts of memory that a request names.
pub const PARTS_MAX: usize = 4;

/// A request in a ring, as its sender keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The QP that sent it.
    pub qpn: Qpn,
    /// PSN behind the request's last one.
    pub end: Psn,
    /// Tells the QP from others that had its number, and from itself before a reset.
    pub incarnation: u32,
}

/// How a peer has taken a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is executed, and so are all before it.
    Done,
    /// Packets tell.
    Deferred,
    /// It names memory that cannot be read, and was not executed: the requester sends it in packets.
    Again,
}

/// A part of a region of ours that holds payload of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The region.
    pub lkey: LKey,
    /// Offset in the region.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// A request that a peer on this host has put into its ring: the bytes of the packet without pad and ICRC. The peer may change them at any
/// time. Offsets count from the start of the packet, and callers stay within it.
pub trait RingBytes: fmt::Debug {
    /// Returns the number of bytes.
    fn bytes(&self) -> usize;
    /// Returns the number of bytes at the start that the record holds itself; the rest is in memory of the peer, if there is more.
    fn held(&self) -> usize;
    /// Copies bytes out.
    ///
    /// # Errors
    /// [`PeerFault::Ended`] if the memory that the request names cannot be read, or no longer.
    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault>;
    /// Copies bytes out, to a memory, as [`Memory::write`] does.
    ///
    /// # Errors
    /// As [`RingBytes::read`], or that of the memory. Some bytes may be in place.
    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault>;
}

/// Room for a request in a ring. Offsets count from its start, and callers stay within it.
pub trait Room: fmt::Debug {
    /// Copies bytes in.
    fn write(&self, at: usize, bytes: &[u8]);
    /// Copies bytes of a memory in.
    fn write_from(&self, at: usize, from: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault>;
}

/// Writes a request into its record; returns false if that fails, and the record is given up.
pub type Fill<'a> = dyn FnMut(&dyn Room) -> bool + 'a;

/// What the peer of a QP may read of our memory ([`crate::Rnic::lendable`]).
pub trait Lending: fmt::Debug + Send + Sync {
    /// Ends it: the peer discards what it copies from here on. The driver forgets the regions later, by [`crate::Rnic::poll_revoked`].
    fn end(&self);
}

/// Outcome of [`PeerRing::put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The request is not in the ring: there is no room, or `fill` failed, or the ring has ended.
    Not,
    /// The request is in the ring.
    Done,
    /// So it is, and requests have ended of which the peer tells nobody who sleeps.
    DoneAndEnded,
}

/// The ring to one peer, for threads that do without the device.
pub trait PeerRing: fmt::Debug + Send + Sync {
    /// Puts a request of `bytes` bytes into the ring, as [`Rings::put`] does.
    fn put(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Put;
}

/// The rings to the peers on this host.
pub trait Rings {
    /// Returns whether there is a ring to the process that has a QPN at an address.
    fn reach(&mut self, peer: (IpAddr, Qpn)) -> bool;

    /// Puts a request of `bytes` bytes into the ring to the process that has a QPN at an address. Returns false if there is no such ring,
    /// or no room in it, or `fill` fails. Once the peer has taken the request, the driver passes the ticket to [`crate::Rnic::handle_taken`].
    fn put(&mut self, peer: (IpAddr, Qpn), ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> bool;

    /// Returns the ring to the process that has a QPN at an address, for threads that do without the device; `None` if there is none, or
    /// the device is to see all requests.
    fn ring_to(&mut self, peer: (IpAddr, Qpn)) -> Option<Arc<dyn PeerRing>>;

    /// Returns the number of payload bytes from which on a request is worth naming its memory, instead of a second copy.
    fn named_bytes_min(&self) -> usize;

    /// Puts a request into the ring whose headers are `heads`, and whose payload is in these parts of our memory, as [`Rings::put`] does.
    /// Returns false if the peer cannot read them (yet), or there is no room.
    fn put_named(&mut self, peer: (IpAddr, Qpn), ticket: Ticket, heads: &[u8], parts: &[Part]) -> bool;
}

/// No rings.
#[derive(Clone, Copy, Debug)]
pub struct NoRings;

impl Rings for NoRings {
    fn reach(&mut self, _: (IpAddr, Qpn)) -> bool {
        false
    }

    fn put(&mut self, _: (IpAddr, Qpn), _: Ticket, _: usize, _: &mut Fill<'_>) -> bool {
        false
    }

    fn ring_to(&mut self, _: (IpAddr, Qpn)) -> Option<Arc<dyn PeerRing>> {
        None
    }

    fn named_bytes_min(&self) -> usize {
        usize::MAX
    }

    fn put_named(&mut self, _: (IpAddr, Qpn), _: Ticket, _: &[u8], _: &[Part]) -> bool {
        false
    }
}

/// Makes the bytes of a record a whole packet, with its pad and without an ICRC. Bytes that are no packet become none.
pub fn end_packet(record: &mut Vec<u8>) {
    let pad = Bth::parse(record).map_or(0, |bth| usize::from(bth.pad));
    record.resize(record.len() + pad + ICRC_LEN, 0);
}
