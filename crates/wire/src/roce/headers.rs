//! Base transport header and extension headers.

use bitflags::bitflags;
use strum::VariantArray;

use crate::bytes::{be16, be24, be32, be64, need, put, put24};
use crate::{Malformed, Psn, Qpn, RKey};

use super::{Opcode, PKEY_DEFAULT};

/// Base transport header, 12 bytes. IBTA Vol 1, 9.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// Transport service and operation.
    pub opcode: Opcode,
    /// Solicited event: the receiver may wake a waiter that armed for solicited events only.
    pub solicited: bool,
    /// Migration request; sent as 1, ignored on receive (some hardware expects 1).
    pub migreq: bool,
    /// Pad bytes after the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion notification. Not covered by the ICRC.
    pub fecn: bool,
    /// Backward congestion notification. Not covered by the ICRC.
    pub becn: bool,
    /// QP that shall receive the packet.
    pub dest_qpn: Qpn,
    /// Set when the sender requests an acknowledgement.
    pub ack_req: bool,
    /// Sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes of the header.
    pub const LEN: usize = 12;

    /// Returns a header with default values.
    pub const fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited: false,
            migreq: true,
            pad: 0,
            pkey: PKEY_DEFAULT,
            fecn: false,
            becn: false,
            dest_qpn,
            ack_req: false,
            psn,
        }
    }

    /// Reads the header at the start of `b`.
    pub fn parse(b: &[u8]) -> Result<Bth, Malformed> {
        need("BTH", b, Bth::LEN)?;
        let undefined = |what, value: u8| Malformed::Undefined {
            what,
            value: value.into(),
        };
        if b[1] & 0x0f != 0 {
            return Err(undefined("BTH transport version", b[1] & 0x0f));
        }
        Ok(Bth {
            opcode: Opcode::from_code(b[0]).ok_or_else(|| undefined("BTH opcode", b[0]))?,
            solicited: b[1] & 0x80 != 0,
            migreq: b[1] & 0x40 != 0,
            pad: (b[1] >> 4) & 3,
            pkey: be16(b, 2),
            fecn: b[4] & 0x80 != 0,
            becn: b[4] & 0x40 != 0,
            dest_qpn: Qpn::new(be24(b, 5)),
            ack_req: b[8] & 0x80 != 0,
            psn: Psn::new(be24(b, 9)),
        })
    }

    /// Writes the header to the first 12 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        b[0] = self.opcode.code();
        b[1] = u8::from(self.solicited) << 7 | u8::from(self.migreq) << 6 | (self.pad & 3) << 4;
        put(b, 2, &self.pkey.to_be_bytes());
        b[4] = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6;
        put24(b, 5, self.dest_qpn.value());
        b[8] = u8::from(self.ack_req) << 7;
        put24(b, 9, self.psn.value());
    }
}

/// RDMA extended transport header, 16 bytes. IBTA Vol 1, 9.3.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address at the responder.
    pub va: u64,
    /// Key of the region at the responder.
    pub rkey: RKey,
    /// Bytes of the whole message (DMA length).
    pub length: u32,
}

impl Reth {
    /// Bytes of the header.
    pub const LEN: usize = 16;

    pub(super) fn parse(b: &[u8]) -> Reth {
        Reth {
            va: be64(b, 0),
            rkey: RKey(be32(b, 8)),
            length: be32(b, 12),
        }
    }

    /// Writes the header to the first 16 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        put(b, 0, &self.va.to_be_bytes());
        put(b, 8, &self.rkey.0.to_be_bytes());
        put(b, 12, &self.length.to_be_bytes());
    }
}

/// Datagram extended transport header, 8 bytes. IBTA Vol 1, 9.3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Q_Key, which must equal the receiving QP's.
    pub qkey: u32,
    /// The QP that sent the packet.
    pub src_qpn: Qpn,
}

impl Deth {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    pub(super) fn parse(b: &[u8]) -> Deth {
        Deth {
            qkey: be32(b, 0),
            src_qpn: Qpn::new(be24(b, 5)),
        }
    }

    /// Writes the header to the first 8 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        put(b, 0, &self.qkey.to_be_bytes());
        b[4] = 0;
        put24(b, 5, self.src_qpn.value());
    }
}

/// Code of a negative acknowledgement. IBTA Vol 1, table 45 (9.7.5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
#[repr(u8)]
pub enum NakCode {
    /// A packet before this one is missing.
    PsnSequence = 0,
    /// Opcode, order or length is not acceptable to the responder.
    InvalidRequest = 1,
    /// Key, bounds or access rights do not allow the access.
    RemoteAccess = 2,
    /// The responder failed while executing the request.
    RemoteOperation = 3,
}

/// AETH syndrome. IBTA Vol 1, 9.3.5 and 9.7.5.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Positive; carries the end-to-end credit code, 31 meaning no limit.
    Ack {
        /// Credit code, 0 to 31.
        credit: u8,
    },
    /// Receiver not ready: try again after [`rnr_timer_ns`].
    RnrNak {
        /// Timer code, 0 to 31.
        timer: u8,
    },
    /// Negative.
    Nak(NakCode),
}

impl Syndrome {
    /// A positive acknowledgement without a credit limit.
    pub const ACK: Syndrome = Syndrome::Ack { credit: 31 };

    pub(super) fn parse(code: u8) -> Result<Syndrome, Malformed> {
        let low = code & 0x1f;
        Ok(match (code >> 5, low) {
            (0, credit) => Syndrome::Ack { credit },
            (1, timer) => Syndrome::RnrNak { timer },
            (3, 0) => Syndrome::Nak(NakCode::PsnSequence),
            (3, 1) => Syndrome::Nak(NakCode::InvalidRequest),
            (3, 2) => Syndrome::Nak(NakCode::RemoteAccess),
            (3, 3) => Syndrome::Nak(NakCode::RemoteOperation),
            _ => {
                return Err(Malformed::Undefined {
                    what: "AETH syndrome",
                    value: code.into(),
                });
            }
        })
    }

    /// Returns the code in the AETH.
    pub const fn code(self) -> u8 {
        match self {
            Syndrome::Ack { credit } => credit & 0x1f,
            Syndrome::RnrNak { timer } => 0x20 | (timer & 0x1f),
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }
}

/// Returns the time of an RNR timer code, in nanoseconds. IBTA Vol 1, table 46 (9.7.5.2.8).
pub const fn rnr_timer_ns(code: u8) -> u64 {
    const US: [u64; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1_280, 1_920, 2_560, 3_840,
        5_120, 7_680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
        327_680, 491_520,
    ];
    US[(code & 31) as usize] * 1_000
}

/// Returns the time of a local ACK timeout code, in nanoseconds; `None` for 0, no timeout. IBTA Vol 1, 9.7.6.1.3.
pub const fn ack_timeout_ns(code: u8) -> Option<u64> {
    match code & 31 {
        0 => None,
        n => Some(4_096u64 << n),
    }
}

/// ACK extended transport header, 4 bytes. IBTA Vol 1, 9.3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Positive or negative acknowledgement.
    pub syndrome: Syndrome,
    /// Message sequence number: messages completed by the responder, 24 bits.
    pub msn: u32,
}

impl Aeth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    pub(super) fn parse(b: &[u8]) -> Result<Aeth, Malformed> {
        Ok(Aeth {
            syndrome: Syndrome::parse(b[0])?,
            msn: be24(b, 1),
        })
    }

    /// Writes the header to the first 4 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        b[0] = self.syndrome.code();
        put24(b, 1, self.msn);
    }
}

/// Atomic extended transport header, 28 bytes. IBTA Vol 1, 9.3.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Virtual address at the responder, 8-aligned.
    pub va: u64,
    /// Key of the region at the responder.
    pub rkey: RKey,
    /// Value to swap in, or to add.
    pub swap_or_add: u64,
    /// Value to compare with (compare-and-swap only).
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes of the header.
    pub const LEN: usize = 28;

    pub(super) fn parse(b: &[u8]) -> AtomicEth {
        AtomicEth {
            va: be64(b, 0),
            rkey: RKey(be32(b, 8)),
            swap_or_add: be64(b, 12),
            compare: be64(b, 20),
        }
    }

    /// Writes the header to the first 28 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        put(b, 0, &self.va.to_be_bytes());
        put(b, 8, &self.rkey.0.to_be_bytes());
        put(b, 12, &self.swap_or_add.to_be_bytes());
        put(b, 20, &self.compare.to_be_bytes());
    }
}

bitflags! {
    /// Placement types that a FLUSH requests. IBTA Vol 1, A19.4.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Placement: u8 {
        /// Bytes are visible to every processor and device of the responder.
        const GLOBAL = 1;
        /// Bytes survive a loss of power.
        const PERSISTENT = 2;
    }
}

/// Part of the region that a FLUSH covers. IBTA Vol 1, A19.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selectivity {
    /// The range of the RETH's address and length.
    Range,
    /// The whole memory region of the RETH's key.
    MemoryRegion,
}

/// FLUSH extended transport header, 4 bytes. IBTA Vol 1, A19.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feth {
    /// Placement types.
    pub placement: Placement,
    /// Selectivity level.
    pub selectivity: Selectivity,
}

impl Feth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    pub(crate) fn parse(b: &[u8]) -> Result<Feth, Malformed> {
        let selectivity = match (b[3] >> 4) & 3 {
            0 => Selectivity::Range,
            1 => Selectivity::MemoryRegion,
            other => {
                return Err(Malformed::Undefined {
                    what: "FETH selectivity",
                    value: other.into(),
                });
            }
        };
        let placement = Placement::from_bits(b[3] & 0x0f)
            .filter(|p| !p.is_empty())
            .ok_or_else(|| Malformed::Undefined {
                what: "FETH placement type",
                value: (b[3] & 0x0f).into(),
            })?;
        Ok(Feth {
            placement,
            selectivity,
        })
    }

    /// Writes the header to the first 4 bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        let selectivity = match self.selectivity {
            Selectivity::Range => 0,
            Selectivity::MemoryRegion => 1,
        };
        put(b, 0, &[0, 0, 0, self.placement.bits() | selectivity << 4]);
    }
}
