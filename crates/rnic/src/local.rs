//! Requests to peers on this host that need no acknowledgement packet.
//!
//! A ring in shared memory carries them, and the peer acknowledges each by taking it out ([`Taken::Done`]): one that it has executed is
//! done. Of any other it says so, and the request is one like those that arrive in packets from there on, with the same PSNs: packets
//! acknowledge or refuse it, and the requester sends it again in packets if it must. So a requester whose link ends, or whose peer has no
//! receive, goes on exactly where it would be if all had been packets.

use std::fmt;
use std::net::IpAddr;

use rdmux_wire::roce::{Bth, ICRC_LEN};
use rdmux_wire::{Psn, Qpn};

use crate::memory::{Fault, Memory};

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
}

/// Bytes of a record in memory that this device and a peer on this host share. The peer may change them at any time. Offsets count from the
/// start of the record, and callers stay within it.
pub trait RingBytes: fmt::Debug {
    /// Copies bytes out.
    fn read(&self, at: usize, out: &mut [u8]);
    /// Copies bytes in.
    fn write(&self, at: usize, bytes: &[u8]);
    /// Copies bytes of a memory in.
    fn write_from(&self, at: usize, from: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault>;
    /// Copies bytes out, to a memory, as [`Memory::write`] does.
    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault>;
}

/// Writes a request into its record; returns false if that fails, and the record is given up.
pub type Fill<'a> = dyn FnMut(&dyn RingBytes) -> bool + 'a;

/// The rings to the peers on this host.
pub trait Rings {
    /// Returns whether there is a ring to the process that has a QPN at an address.
    fn reach(&mut self, peer: (IpAddr, Qpn)) -> bool;

    /// Puts a request of `bytes` bytes into the ring to the process that has a QPN at an address. Returns false if there is no such ring,
    /// or no room in it, or `fill` fails. Once the peer has taken the request, the driver passes the ticket to [`crate::Rnic::handle_taken`].
    fn put(&mut self, peer: (IpAddr, Qpn), ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> bool;
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
}

/// Makes the bytes of a record a whole packet, with its pad and without an ICRC. Bytes that are no packet become none.
pub fn end_packet(record: &mut Vec<u8>) {
    let pad = Bth::parse(record).map_or(0, |bth| usize::from(bth.pad));
    record.resize(record.len() + pad + ICRC_LEN, 0);
}
