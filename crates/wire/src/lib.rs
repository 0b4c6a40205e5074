//! Parsing and writing of the bytes that rdmux and its peers exchange.
//!
//! No I/O, no clock, no state. Each format has a checked view over a slice, or a plain value with `parse` and `emit`.
//!
//! **Panic contract.** `parse` accepts bytes from anyone and returns an error for invalid ones. Accessors of a value from `parse` never
//! panic. `emit` writes into a buffer that the caller made large enough (each value documents the size) and panics if the buffer is too
//! small: that is a bug of the caller, never of the peer.
//!
//! Begin with [`roce::Packet`], [`icrc::Flow`] and [`cm::Message`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod check;
pub mod cm;
pub mod cnp;
pub mod grh;
pub mod icrc;
mod id;
pub mod pcapng;
pub mod push;
pub mod roce;
pub mod rsocket;
pub mod sack;
#[cfg(test)]
mod vectors;

pub use id::{LKey, Psn, Qpn, RKey};

/// Bytes that do not have the shape that their format requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Shorter than the headers that it must carry.
    #[error("{what}: {len} bytes, at least {min} needed")]
    Truncated {
        /// The header or message that does not fit.
        what: &'static str,
        /// Available bytes.
        len: usize,
        /// Required bytes.
        min: usize,
    },
    /// A field holds a value that the format does not define.
    #[error("{what}: value {value:#x} is not defined")]
    Undefined {
        /// The field.
        what: &'static str,
        /// Value of the field.
        value: u64,
    },
}

/// Checks that `bytes` has at least `min` bytes, so that fixed fields can be read.
pub(crate) fn need(what: &'static str, bytes: &[u8], min: usize) -> Result<(), Malformed> {
    if bytes.len() < min {
        return Err(Malformed::Truncated {
            what,
            len: bytes.len(),
            min,
        });
    }
    Ok(())
}

pub(crate) fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

pub(crate) fn be24(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([0, b[at], b[at + 1], b[at + 2]])
}

pub(crate) fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

pub(crate) fn be64(b: &[u8], at: usize) -> u64 {
    (u64::from(be32(b, at)) << 32) | u64::from(be32(b, at + 4))
}

pub(crate) fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

pub(crate) fn put24(b: &mut [u8], at: usize, value: u32) {
    b[at..at + 3].copy_from_slice(&value.to_be_bytes()[1..]);
}
