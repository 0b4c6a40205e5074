//! Parsing and writing of the bytes that rdmux and its peers exchange.
//!
//! No I/O, no clock, no state. Each format has a checked view over a slice, or a plain value with `parse` and `emit`.
//!
//! **Panic contract.** `parse` accepts bytes from anyone and returns an error for invalid ones. Accessors of a value from `parse` never
//! panic. `emit` writes into a buffer that the caller made large enough (each value documents the size) and panics if the buffer is too
//! small: that is a bug of the caller, never of the peer.
//!
//! Begin with [`roce::Packet`], [`roce::icrc::Flow`] and [`cm::CmMessage`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[cfg(test)]
extern crate self as rdmux_wire;

pub mod accel;
pub mod bytes;
pub mod cm;
pub mod dsm;
mod id;
pub mod node;
pub mod nvme;
pub mod nvme_rdma;
pub mod nvme_tcp;
pub mod push;
pub mod roce;
pub mod rsocket;
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
