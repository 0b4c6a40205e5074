//! The end of a work request.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | opcode; 0 is none |
//! | 1 | status |
//! | 2 | flags |
//! | 4..8 | queue pair |
//! | 8..16 | wr_id |
//! | 16..20 | bytes |
//! | 20..24 | immediate data, or the key that the message invalidated |
//! | 24..28 | QPN of the sender of a datagram |

use bitflags::bitflags;
use strum::VariantArray;

use super::{Descriptor, QueueId};
use crate::bytes::{le32, le64, put};
use crate::{Malformed, Qpn, RKey};

bitflags! {
    /// Flags of a completion: which fields it has.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct CompletionFlags: u8 {
        /// A receive with immediate data.
        const IMM = 1 << 0;
        /// A receive of a message that invalidated a key.
        const INVALIDATED = 1 << 1;
        /// A receive of a datagram, whose first 40 bytes are the GRH.
        const DATAGRAM = 1 << 2;
        /// A receive of a message that was sent as solicited.
        const SOLICITED = 1 << 3;
    }
}

/// Kind of a completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[expect(missing_docs, reason = "the names are the verbs' own")]
#[repr(u8)]
pub enum CompletionOpcode {
    Send = 1,
    Write = 2,
    Read = 3,
    CompareSwap = 4,
    FetchAdd = 5,
    AtomicWrite = 6,
    Flush = 7,
    Recv = 8,
    RecvRdmaWithImm = 9,
}

/// Outcome of a request, numbered as `enum ibv_wc_status`. IBTA Vol 1, 11.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[repr(u8)]
pub enum CompletionStatus {
    /// The request succeeded.
    Success = 0,
    /// The receive buffer is too small, or the message is longer than allowed.
    LocalLength = 1,
    /// The request's own memory failed while it was read or written.
    LocalQpOperation = 2,
    /// The request's own memory keys or bounds are wrong.
    LocalProtection = 4,
    /// The request was not carried out: the queue pair was in error.
    Flushed = 5,
    /// The peer's response does not fit the request.
    BadResponse = 7,
    /// The peer found the request invalid.
    RemoteInvalidRequest = 9,
    /// The peer's memory key, bounds or rights did not allow it.
    RemoteAccess = 10,
    /// The peer failed while it carried out the request.
    RemoteOperation = 11,
    /// No response came within the retries.
    RetryExceeded = 12,
    /// The peer had no receive posted within the retries.
    RnrRetryExceeded = 13,
}

/// A completion. IBTA Vol 1, 11.4.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The queue pair that the request was posted to, or that used it up.
    pub queue: QueueId,
    /// Number that the application chose for the request.
    pub wr_id: u64,
    /// Outcome. With anything but success, only `queue`, `wr_id` and `status` are meaningful.
    pub status: CompletionStatus,
    /// Kind of the request.
    pub opcode: CompletionOpcode,
    /// Bytes received or read.
    pub bytes: u32,
    /// Immediate data of a receive.
    pub imm: Option<u32>,
    /// Key that the received message invalidated; not with immediate data.
    pub invalidated: Option<RKey>,
    /// QPN of the sender of a received datagram.
    pub source: Option<Qpn>,
    /// Set if the received message was sent as solicited.
    pub is_solicited: bool,
}

impl Completion {
    /// Reads a completion.
    ///
    /// # Errors
    /// An undefined opcode, status or flag, or flags that exclude each other.
    #[inline]
    pub fn parse(bytes: &Descriptor) -> Result<Completion, Malformed> {
        let opcode = CompletionOpcode::VARIANTS
            .iter()
            .find(|it| **it as u8 == bytes[0]);
        let Some(opcode) = opcode else {
            return undefined("completion opcode", bytes[0]);
        };
        let status = CompletionStatus::VARIANTS
            .iter()
            .find(|it| **it as u8 == bytes[1]);
        let Some(status) = status else {
            return undefined("completion status", bytes[1]);
        };
        let excluded = CompletionFlags::IMM | CompletionFlags::INVALIDATED;
        let flags = CompletionFlags::from_bits(bytes[2]).filter(|flags| !flags.contains(excluded));
        let Some(flags) = flags else {
            return undefined("completion flags", bytes[2]);
        };
        let with = |flag, value: u32| flags.contains(flag).then_some(value);
        let imm = le32(bytes, 20);
        Ok(Completion {
            queue: QueueId(le32(bytes, 4)),
            wr_id: le64(bytes, 8),
            status: *status,
            opcode: *opcode,
            bytes: le32(bytes, 16),
            imm: with(CompletionFlags::IMM, imm),
            invalidated: with(CompletionFlags::INVALIDATED, imm).map(RKey),
            source: with(CompletionFlags::DATAGRAM, le32(bytes, 24)).map(Qpn::new),
            is_solicited: flags.contains(CompletionFlags::SOLICITED),
        })
    }

    /// Writes the completion.
    ///
    /// # Panics
    /// If it has both immediate data and an invalidated key.
    #[inline]
    pub fn emit(&self, bytes: &mut Descriptor) {
        assert!(self.imm.is_none() || self.invalidated.is_none(), "{self:?}");
        bytes.fill(0);
        let mut flags = CompletionFlags::empty();
        flags.set(CompletionFlags::IMM, self.imm.is_some());
        flags.set(CompletionFlags::INVALIDATED, self.invalidated.is_some());
        flags.set(CompletionFlags::DATAGRAM, self.source.is_some());
        flags.set(CompletionFlags::SOLICITED, self.is_solicited);
        bytes[0] = self.opcode as u8;
        bytes[1] = self.status as u8;
        bytes[2] = flags.bits();
        put(bytes, 4, &self.queue.0.to_le_bytes());
        put(bytes, 8, &self.wr_id.to_le_bytes());
        put(bytes, 16, &self.bytes.to_le_bytes());
        let imm = self.imm.or(self.invalidated.map(|key| key.0)).unwrap_or(0);
        put(bytes, 20, &imm.to_le_bytes());
        put(bytes, 24, &self.source.map_or(0, Qpn::value).to_le_bytes());
    }
}

fn undefined<T>(what: &'static str, value: u8) -> Result<T, Malformed> {
    let value = value.into();
    Err(Malformed::Undefined { what, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECV: Completion = Completion {
        queue: QueueId(0x0102_0304),
        wr_id: 0x1122_3344_5566_7788,
        status: CompletionStatus::Success,
        opcode: CompletionOpcode::Recv,
        bytes: 4096,
        imm: Some(0xaabb_ccdd),
        invalidated: None,
        source: Some(Qpn::new(0x12_3456)),
        is_solicited: true,
    };

    fn bytes(completion: &Completion) -> Descriptor {
        let mut bytes = [0xee; 64];
        completion.emit(&mut bytes);
        bytes
    }

    #[test]
    fn completion__bytes() {
        let mut expected = [0; 64];
        expected[..28].copy_from_slice(&[
            8, 0, 0b1101, 0, 4, 3, 2, 1, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0x10, 0, 0, 0xdd,
            0xcc, 0xbb, 0xaa, 0x56, 0x34, 0x12, 0,
        ]);
        assert_eq!(bytes(&RECV), expected);
        assert_eq!(Completion::parse(&expected), Ok(RECV));
    }

    #[test]
    fn completion__each_opcode_and_status() {
        for &opcode in CompletionOpcode::VARIANTS {
            for &status in CompletionStatus::VARIANTS {
                let completion = Completion {
                    opcode,
                    status,
                    imm: None,
                    invalidated: Some(RKey(7)),
                    source: None,
                    is_solicited: false,
                    ..RECV
                };
                assert_eq!(Completion::parse(&bytes(&completion)), Ok(completion));
            }
        }
    }

    #[test]
    fn completion__refuses_what_is_not_defined() {
        for (at, value) in [
            (0, 0),
            (0, 10),
            (0, 255),
            (1, 3),
            (1, 6),
            (1, 14),
            (2, 16),
            (2, 3),
        ] {
            let mut bytes = bytes(&RECV);
            bytes[at] = value;
            assert!(Completion::parse(&bytes).is_err(), "byte {at}: {value}");
        }
        assert!(Completion::parse(&[0; 64]).is_err());
    }
}
