//! RoCEv2 packets: BTH, extension headers, payload, pad and ICRC inside a UDP datagram. IBTA Vol 1, chapter 9 and annex
//! A17 (RoCEv2), annex A19 (FLUSH, ATOMIC WRITE).
//!
//! [`Packet::parse`] checks that a datagram has the length that its opcode requires. The ICRC is checked separately ([`crate::roce::icrc`]),
//! because it also needs the addresses.

pub mod carried;
pub mod cnp;
pub mod coalesced;
pub mod grh;
mod headers;
pub mod icrc;
mod opcode;
mod packet;
pub mod sack;
#[cfg(test)]
mod tests;

pub use self::headers::{
    Aeth, AtomicEth, Bth, Deth, Feth, NakCode, Placement, Reth, Selectivity, Syndrome, ack_timeout_ns,
    rnr_timer_ns,
};
pub use self::opcode::{Ext, Opcode, Operation, Position, Transport};
pub use self::packet::Packet;

/// UDP destination port of RoCEv2. IBTA Vol 1, A17.4.
pub const UDP_PORT: u16 = 4791;
/// Bytes of the invariant CRC at the end of every packet.
pub const ICRC_LEN: usize = 4;
/// The default partition key with full membership. IBTA Vol 1, 10.9.1.2.
pub const PKEY_DEFAULT: u16 = 0xffff;
/// Q_Key of the general services QP. IBTA Vol 1, 10.2.4.2.
pub const GSI_QKEY: u32 = 0x8001_0000;
/// Maximum length of a message of any transport service, in bytes. IBTA Vol 1, 9.7.7.
pub const MESSAGE_BYTES_MAX: u32 = 1 << 31;
/// Bytes of IP, UDP and all headers that a link carries beside a full packet's payload ([`PathMtu::of_link`]).
pub const LINK_HEADERS: u32 = 80;
/// Payload bytes of a full packet. IBTA Vol 1, 9.7.7 and 12.7.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the values")]
pub enum PathMtu {
    Bytes256 = 1,
    Bytes512 = 2,
    Bytes1024 = 3,
    Bytes2048 = 4,
    Bytes4096 = 5,
}

impl PathMtu {
    /// All values, smallest first.
    pub const ALL: [PathMtu; 5] = [
        PathMtu::Bytes256,
        PathMtu::Bytes512,
        PathMtu::Bytes1024,
        PathMtu::Bytes2048,
        PathMtu::Bytes4096,
    ];

    /// Returns the payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        128 << self as u8
    }

    /// Returns the code in CM messages and in verbs.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the value with this code.
    pub fn from_code(code: u8) -> Option<PathMtu> {
        PathMtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// Returns the value with this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<PathMtu> {
        PathMtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// Returns the largest path MTU that a link with `mtu` bytes carries, IP, UDP and all headers included. Linux reserves the same 80
    /// bytes for headers, so that both ends of a link choose the same value. `None` below 336.
    pub fn of_link(mtu: u32) -> Option<PathMtu> {
        PathMtu::ALL
            .into_iter()
            .rev()
            .find(|path| path.bytes() + LINK_HEADERS <= mtu)
    }
}
