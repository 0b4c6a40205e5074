//! The descriptor that says where a command's data are. 4.1.2.2; TCP 3.3.2; RDMA 3.2.

use super::Status;
use crate::RKey;
use crate::bytes::{le32, le64, put};

/// The one data block that a command over fabrics names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// Behind the command, in its capsule.
    InCapsule {
        /// Offset behind the command.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// Wherever the transport puts them: PDUs of NVMe/TCP.
    Transport {
        /// Length in bytes.
        length: u32,
    },
    /// In the host's memory, reached by RDMA.
    Keyed {
        /// Remote address.
        address: u64,
        /// Length in bytes, less than 2^24.
        length: u32,
        /// Remote key of the host's memory.
        rkey: RKey,
        /// The host has the controller invalidate the key with the response.
        invalidate: bool,
    },
}

impl Sgl {
    /// Bytes of a descriptor.
    pub const LEN: usize = 16;

    const DATA_BLOCK_OFFSET: u8 = 0x01;
    const TRANSPORT_BLOCK: u8 = 0x5a;
    const KEYED_BLOCK: u8 = 0x40;
    const KEYED_INVALIDATE: u8 = 0x4f;

    /// Parses a descriptor.
    ///
    /// # Errors
    /// The status with which a controller refuses the command.
    ///
    /// # Panics
    /// `bytes` is shorter than a descriptor.
    pub fn parse(bytes: &[u8]) -> Result<Sgl, Status> {
        let (address, length, kind) = (le64(bytes, 0), le32(bytes, 8), bytes[15]);
        Ok(match kind {
            Sgl::DATA_BLOCK_OFFSET => Sgl::InCapsule {
                offset: address,
                length,
            },
            Sgl::TRANSPORT_BLOCK => Sgl::Transport { length },
            Sgl::KEYED_BLOCK | Sgl::KEYED_INVALIDATE => Sgl::Keyed {
                address,
                length: length & 0xff_ffff,
                rkey: RKey(le32(bytes, 11)),
                invalidate: kind == Sgl::KEYED_INVALIDATE,
            },
            _ => return Err(Status::SGL_TYPE_INVALID.do_not_retry()),
        })
    }

    /// Writes the descriptor.
    ///
    /// # Panics
    /// `bytes` is shorter than a descriptor.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..Sgl::LEN].fill(0);
        match *self {
            Sgl::InCapsule { offset, length } => {
                put(bytes, 0, &offset.to_le_bytes());
                put(bytes, 8, &length.to_le_bytes());
                bytes[15] = Sgl::DATA_BLOCK_OFFSET;
            }
            Sgl::Transport { length } => {
                put(bytes, 8, &length.to_le_bytes());
                bytes[15] = Sgl::TRANSPORT_BLOCK;
            }
            Sgl::Keyed {
                address,
                length,
                rkey,
                invalidate,
            } => {
                put(bytes, 0, &address.to_le_bytes());
                put(bytes, 8, &length.to_le_bytes()[..3]);
                put(bytes, 11, &rkey.0.to_le_bytes());
                bytes[15] = match invalidate {
                    true => Sgl::KEYED_INVALIDATE,
                    false => Sgl::KEYED_BLOCK,
                };
            }
        }
    }

    /// Returns the length of the data in bytes.
    pub const fn length(&self) -> u32 {
        match self {
            Sgl::InCapsule { length, .. } | Sgl::Transport { length } | Sgl::Keyed { length, .. } => *length,
        }
    }
}
