//! RoCEv2 packets: BTH, extension headers, payload, pad and ICRC inside a UDP datagram. IBTA Vol 1, chapter 9 and annex
//! A17 (RoCEv2), annex A19 (FLUSH, ATOMIC WRITE).
//!
//! [`Packet::parse`] checks that a datagram has the length that its opcode requires. The ICRC is checked separately ([`crate::icrc`]),
//! because it also needs the addresses.

use std::fmt;

use bitflags::bitflags;

use crate::bytes::{be16, be24, be32, be64, need, put, put24};
use crate::{Malformed, Psn, Qpn, RKey};

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
            .find(|path| path.bytes() + 80 <= mtu)
    }
}

/// Transport service, the upper bits of the opcode. IBTA Vol 1, 9.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection. IBTA Vol 1, annex A14.
    Xrc,
}

/// Operation of a packet, the lower five bits of the opcode. IBTA Vol 1, 9.2.1, A17.9.3 and A19.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the specification's own")]
pub enum Operation {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImm = 0x03,
    SendOnly = 0x04,
    SendOnlyImm = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImm = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImm = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Acknowledge = 0x11,
    AtomicAcknowledge = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
    Flush = 0x1c,
    AtomicWrite = 0x1d,
}

/// Position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// First of several packets.
    First,
    /// Between first and last.
    Middle,
    /// Last of several packets.
    Last,
    /// The whole message.
    Only,
}

impl Position {
    /// Returns whether a message begins with this packet.
    pub const fn begins(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Returns whether a message ends with this packet.
    pub const fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

bitflags! {
    /// Set of the extension headers that follow the BTH, in the order of their bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Ext: u16 {
        /// Datagram: Q_Key and source QPN, 8 bytes.
        const DETH = 1 << 0;
        /// XRC SRQ number, 4 bytes.
        const XRCETH = 1 << 1;
        /// FLUSH type and selectivity, 4 bytes.
        const FETH = 1 << 2;
        /// RDMA address, key and length, 16 bytes.
        const RETH = 1 << 3;
        /// Atomic operands, 28 bytes.
        const ATOMIC = 1 << 4;
        /// Acknowledgement, 4 bytes.
        const AETH = 1 << 5;
        /// Original value of an atomic, 8 bytes.
        const ATOMIC_ACK = 1 << 6;
        /// Immediate data, 4 bytes.
        const IMM = 1 << 7;
        /// Key to invalidate, 4 bytes.
        const IETH = 1 << 8;
    }
}

/// Bytes of each header, in the order of the bits of [`Ext`].
const EXT_LEN: [u8; 9] = [8, 4, 4, 16, 28, 4, 8, 4, 4];

/// Total length of each set of headers: a table, since it is read several times for each packet.
const EXT_SET_LEN: [u8; 1 << EXT_LEN.len()] = {
    let mut table = [0; 1 << EXT_LEN.len()];
    let mut set = 1;
    while set < table.len() {
        let lowest = set.trailing_zeros() as usize;
        table[set] = table[set & (set - 1)] + EXT_LEN[lowest];
        set += 1;
    }
    table
};

impl Ext {
    /// Returns the total length of the headers in the set, in bytes.
    #[expect(clippy::len_without_is_empty, reason = "bitflags makes is_empty")]
    pub const fn len(self) -> usize {
        EXT_SET_LEN[self.bits() as usize % EXT_SET_LEN.len()] as usize
    }

    /// Returns the offset of header `ext` from the end of the BTH: headers with lower bits precede it.
    fn offset(self, ext: Ext) -> usize {
        debug_assert!(self.contains(ext));
        Ext::from_bits_truncate(self.bits() & (ext.bits() - 1)).len()
    }
}

/// Opcode: transport service and operation. IBTA Vol 1, 9.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode {
    /// Transport service.
    pub transport: Transport,
    /// Operation.
    pub operation: Operation,
}

impl Operation {
    /// All operations, in the order of their codes.
    pub const ALL: [Operation; 25] = {
        use Operation::*;
        [
            SendFirst,
            SendMiddle,
            SendLast,
            SendLastImm,
            SendOnly,
            SendOnlyImm,
            WriteFirst,
            WriteMiddle,
            WriteLast,
            WriteLastImm,
            WriteOnly,
            WriteOnlyImm,
            ReadRequest,
            ReadResponseFirst,
            ReadResponseMiddle,
            ReadResponseLast,
            ReadResponseOnly,
            Acknowledge,
            AtomicAcknowledge,
            CompareSwap,
            FetchAdd,
            SendLastInvalidate,
            SendOnlyInvalidate,
            Flush,
            AtomicWrite,
        ]
    };

    fn from_code(code: u8) -> Option<Operation> {
        // The codes are dense except for holes (0x15, 0x18 to 0x1b).
        let at = match code {
            0x00..=0x14 => code,
            0x16 | 0x17 => code - 1,
            0x1c | 0x1d => code - 5,
            _ => return None,
        };
        Some(Operation::ALL[usize::from(at)])
    }

    /// Returns the position in the message; an operation that always has one packet is [`Position::Only`].
    pub const fn position(self) -> Position {
        use Operation::*;
        match self {
            SendFirst | WriteFirst | ReadResponseFirst => Position::First,
            SendMiddle | WriteMiddle | ReadResponseMiddle => Position::Middle,
            SendLast | SendLastImm | SendLastInvalidate | WriteLast | WriteLastImm | ReadResponseLast => {
                Position::Last
            }
            _ => Position::Only,
        }
    }

    /// Returns whether this is a SEND in any form.
    pub const fn is_send(self) -> bool {
        use Operation::*;
        matches!(
            self,
            SendFirst
                | SendMiddle
                | SendLast
                | SendLastImm
                | SendOnly
                | SendOnlyImm
                | SendLastInvalidate
                | SendOnlyInvalidate
        )
    }

    /// Returns whether this is an RDMA WRITE in any form.
    pub const fn is_write(self) -> bool {
        use Operation::*;
        matches!(
            self,
            WriteFirst | WriteMiddle | WriteLast | WriteLastImm | WriteOnly | WriteOnlyImm
        )
    }

    /// Returns whether this is a READ response in any form (it also answers FLUSH and ATOMIC WRITE).
    pub const fn is_read_response(self) -> bool {
        use Operation::*;
        matches!(
            self,
            ReadResponseFirst | ReadResponseMiddle | ReadResponseLast | ReadResponseOnly
        )
    }

    /// Returns whether this is a compare-and-swap, a fetch-and-add or an ATOMIC WRITE.
    pub const fn is_atomic(self) -> bool {
        matches!(
            self,
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite
        )
    }

    /// Returns whether the responder sends this to the requester.
    pub const fn is_response(self) -> bool {
        self.is_read_response() || matches!(self, Operation::Acknowledge | Operation::AtomicAcknowledge)
    }
}

impl Opcode {
    /// Returns an RC opcode.
    pub const fn rc(operation: Operation) -> Opcode {
        Opcode {
            transport: Transport::Rc,
            operation,
        }
    }

    /// Returns the code on the wire.
    pub const fn code(self) -> u8 {
        let base = match self.transport {
            Transport::Rc => 0x00,
            Transport::Uc => 0x20,
            Transport::Ud => 0x60,
            Transport::Xrc => 0xa0,
        };
        base + self.operation as u8
    }

    /// Returns the opcode of a code on the wire, if the specification defines one.
    pub fn from_code(code: u8) -> Option<Opcode> {
        use Operation::*;
        let operation = Operation::from_code(code & 0x1f)?;
        let transport = match code & 0xe0 {
            0x00 => Transport::Rc,
            0x20 if (operation as u8) <= WriteOnlyImm as u8 => Transport::Uc,
            0x60 if matches!(operation, SendOnly | SendOnlyImm) => Transport::Ud,
            0xa0 => Transport::Xrc,
            _ => return None,
        };
        Some(Opcode { transport, operation })
    }

    /// Returns the extension headers that packets of this opcode carry.
    pub fn ext(self) -> Ext {
        use Operation::*;
        let of_operation = match self.operation {
            SendFirst | SendMiddle | SendLast | SendOnly | WriteMiddle | WriteLast | ReadResponseMiddle => {
                Ext::empty()
            }
            SendLastImm | SendOnlyImm | WriteLastImm => Ext::IMM,
            WriteFirst | WriteOnly | ReadRequest | AtomicWrite => Ext::RETH,
            WriteOnlyImm => Ext::RETH.union(Ext::IMM),
            ReadResponseFirst | ReadResponseLast | ReadResponseOnly | Acknowledge => Ext::AETH,
            AtomicAcknowledge => Ext::AETH.union(Ext::ATOMIC_ACK),
            CompareSwap | FetchAdd => Ext::ATOMIC,
            SendLastInvalidate | SendOnlyInvalidate => Ext::IETH,
            Flush => Ext::FETH.union(Ext::RETH),
        };
        match self.transport {
            Transport::Ud => of_operation | Ext::DETH,
            Transport::Xrc if !self.operation.is_response() => of_operation | Ext::XRCETH,
            _ => of_operation,
        }
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            Transport::Rc => "RC",
            Transport::Uc => "UC",
            Transport::Ud => "UD",
            Transport::Xrc => "XRC",
        };
        write!(f, "{transport} {:?}", self.operation)
    }
}

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

    fn parse(b: &[u8]) -> Reth {
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

    fn parse(b: &[u8]) -> Deth {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    fn parse(code: u8) -> Result<Syndrome, Malformed> {
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

    fn parse(b: &[u8]) -> Result<Aeth, Malformed> {
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

    fn parse(b: &[u8]) -> AtomicEth {
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

    fn parse(b: &[u8]) -> Result<Feth, Malformed> {
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

/// One RoCEv2 packet: the bytes of a UDP payload, checked to have the length that the opcode requires.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Base header.
    pub bth: Bth,
    ext: Ext,
    bytes: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Checks lengths, opcode, version, and those extension headers that can be invalid by themselves.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let bth = Bth::parse(bytes)?;
        let ext = bth.opcode.ext();
        let packet = Packet { bth, ext, bytes };
        need(
            "packet",
            bytes,
            Bth::LEN + ext.len() + usize::from(bth.pad) + ICRC_LEN,
        )?;
        if ext.contains(Ext::AETH) {
            Aeth::parse(packet.ext_bytes(Ext::AETH))?;
        }
        if ext.contains(Ext::FETH) {
            Feth::parse(packet.ext_bytes(Ext::FETH))?;
        }
        Ok(packet)
    }

    fn ext_bytes(&self, ext: Ext) -> &'a [u8] {
        &self.bytes[Bth::LEN + self.ext.offset(ext)..]
    }

    /// Returns the payload without pad and ICRC.
    pub fn payload(&self) -> &'a [u8] {
        let end = self.bytes.len() - ICRC_LEN - usize::from(self.bth.pad);
        &self.bytes[Bth::LEN + self.ext.len()..end]
    }

    /// Returns the ICRC in the packet (little endian on the wire).
    pub fn icrc(&self) -> u32 {
        let at = self.bytes.len() - ICRC_LEN;
        u32::from_le_bytes([
            self.bytes[at],
            self.bytes[at + 1],
            self.bytes[at + 2],
            self.bytes[at + 3],
        ])
    }

    /// Returns all bytes of the UDP payload, ICRC included.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the RDMA header, if the opcode has one.
    pub fn reth(&self) -> Option<Reth> {
        self.ext
            .contains(Ext::RETH)
            .then(|| Reth::parse(self.ext_bytes(Ext::RETH)))
    }

    /// Returns the datagram header, if the opcode has one.
    pub fn deth(&self) -> Option<Deth> {
        self.ext
            .contains(Ext::DETH)
            .then(|| Deth::parse(self.ext_bytes(Ext::DETH)))
    }

    /// Returns the acknowledge header, if the opcode has one.
    pub fn aeth(&self) -> Option<Aeth> {
        if !self.ext.contains(Ext::AETH) {
            return None;
        }
        Aeth::parse(self.ext_bytes(Ext::AETH)).ok()
    }

    /// Returns the FLUSH header, if the opcode has one.
    pub fn feth(&self) -> Option<Feth> {
        if !self.ext.contains(Ext::FETH) {
            return None;
        }
        Feth::parse(self.ext_bytes(Ext::FETH)).ok()
    }

    /// Returns the atomic header, if the opcode has one.
    pub fn atomic(&self) -> Option<AtomicEth> {
        self.ext
            .contains(Ext::ATOMIC)
            .then(|| AtomicEth::parse(self.ext_bytes(Ext::ATOMIC)))
    }

    /// Returns the original value in an atomic acknowledgement.
    pub fn atomic_ack(&self) -> Option<u64> {
        self.ext
            .contains(Ext::ATOMIC_ACK)
            .then(|| be64(self.ext_bytes(Ext::ATOMIC_ACK), 0))
    }

    /// Returns the immediate data, if the opcode has it.
    pub fn imm(&self) -> Option<u32> {
        self.ext
            .contains(Ext::IMM)
            .then(|| be32(self.ext_bytes(Ext::IMM), 0))
    }

    /// Returns the key to invalidate, if the opcode has it.
    pub fn invalidate(&self) -> Option<RKey> {
        self.ext
            .contains(Ext::IETH)
            .then(|| RKey(be32(self.ext_bytes(Ext::IETH), 0)))
    }

    /// Returns the XRC SRQ number, if the opcode has it.
    pub fn xrc_srqn(&self) -> Option<u32> {
        self.ext
            .contains(Ext::XRCETH)
            .then(|| be24(self.ext_bytes(Ext::XRCETH), 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::{self, packet};

    const VA: u64 = 0x7f12_3456_7000;
    const RKEY: RKey = RKey(0xcafe_0102);

    /// Returns the BTH of every test packet that requests an acknowledgement and has `pad` bytes of padding.
    fn bth(operation: Operation, pad: u8) -> Bth {
        Bth {
            pad,
            ack_req: true,
            ..Bth::new(Opcode::rc(operation), Qpn::new(0x12_abcd), Psn::new(0xfe_dcba))
        }
    }

    fn parse(bytes: &[u8]) -> Packet<'_> {
        Packet::parse(bytes).unwrap()
    }

    #[test]
    fn from_code__inverts_code_for_all_256() {
        let mut defined = 0;
        for code in 0..=u8::MAX {
            if let Some(opcode) = Opcode::from_code(code) {
                assert_eq!(opcode.code(), code);
                defined += 1;
            }
        }
        // RC and XRC have all 25 operations, UC the 12 of SEND and WRITE, UD two.
        assert_eq!(defined, 25 + 25 + 12 + 2);
        for operation in Operation::ALL {
            assert_eq!(Opcode::from_code(operation as u8), Some(Opcode::rc(operation)));
        }
    }

    #[test]
    fn from_code__codes_with_no_meaning_here() {
        // Holes, UC READ, reliable datagram, UD SEND First, CNP: none of them is defined.
        for code in [0x15, 0x18, 0x1b, 0x1e, 0x1f, 0x2c, 0x40, 0x60, 0x81, 0xff] {
            assert_eq!(Opcode::from_code(code), None, "{code:#x}");
        }
    }

    #[test]
    fn ext__lengths_by_opcode() {
        for (code, len) in [
            (0x00, 0),
            (0x03, 4),
            (0x06, 16),
            (0x07, 0),
            (0x0b, 20),
            (0x0c, 16),
            (0x0d, 4),
            (0x0e, 0),
            (0x11, 4),
            (0x12, 12),
            (0x13, 28),
            (0x17, 4),
            (0x1c, 20),
            (0x1d, 16),
            (0x64, 8),
            (0x65, 12),
            (0xa0, 4),
            (0xad, 4),
        ] {
            assert_eq!(Opcode::from_code(code).unwrap().ext().len(), len, "{code:#x}");
        }
    }

    #[test]
    fn position__by_operation() {
        use Position::*;
        for (operation, position) in [
            (Operation::SendFirst, First),
            (Operation::SendLastInvalidate, Last),
            (Operation::WriteMiddle, Middle),
            (Operation::WriteLastImm, Last),
            (Operation::ReadResponseMiddle, Middle),
            (Operation::ReadRequest, Only),
            (Operation::Flush, Only),
            (Operation::AtomicAcknowledge, Only),
        ] {
            assert_eq!(operation.position(), position, "{operation:?}");
        }
    }

    #[test]
    fn parse__send_only_imm() {
        let bytes = packet("SEND only imm");
        let packet = parse(&bytes);
        assert_eq!(
            packet.bth,
            Bth {
                solicited: true,
                ..bth(Operation::SendOnlyImm, 3)
            }
        );
        assert_eq!(packet.imm(), Some(0xdead_beef));
        assert_eq!(packet.payload(), b"01234");
        assert_eq!(packet.icrc(), u32::from_le_bytes([0xbe, 0xea, 0x52, 0x13]));
        assert_eq!(
            (packet.reth(), packet.aeth(), packet.deth(), packet.feth()),
            (None, None, None, None)
        );
    }

    #[test]
    fn parse__send_only_without_payload() {
        let bytes = packet("SEND only, FECN and BECN");
        let packet = parse(&bytes);
        assert!(packet.bth.fecn && packet.bth.becn && !packet.bth.ack_req && packet.payload().is_empty());
    }

    #[test]
    fn parse__send_last_invalidate() {
        let bytes = packet("SEND last invalidate");
        assert_eq!(parse(&bytes).invalidate(), Some(RKey(0x1122_3344)));
        assert_eq!(parse(&bytes).payload(), b"0123");
    }

    #[test]
    fn parse__write() {
        let bytes = packet("WRITE only");
        assert_eq!(parse(&bytes).bth, bth(Operation::WriteOnly, 1));
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA,
                rkey: RKEY,
                length: 4096
            })
        );
        assert_eq!(parse(&bytes).payload(), b"0123456789:");
        let bytes = packet("WRITE only imm");
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA,
                rkey: RKEY,
                length: 4096
            })
        );
        assert_eq!(
            (parse(&bytes).imm(), parse(&bytes).payload()),
            (Some(0x0102_0304), &b"01234567"[..])
        );
    }

    #[test]
    fn parse__read() {
        let bytes = packet("READ request");
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA,
                rkey: RKEY,
                length: 4096
            })
        );
        assert!(parse(&bytes).payload().is_empty());
        let bytes = packet("READ response first");
        assert_eq!(
            parse(&bytes).aeth(),
            Some(Aeth {
                syndrome: Syndrome::ACK,
                msn: 9
            })
        );
        assert_eq!(parse(&bytes).payload(), b"01234567");
    }

    #[test]
    fn parse__acknowledge() {
        let bytes = packet("ACK");
        assert_eq!(
            parse(&bytes).aeth(),
            Some(Aeth {
                syndrome: Syndrome::ACK,
                msn: 42
            })
        );
        let bytes = packet("RNR NAK, v6");
        assert_eq!(
            parse(&bytes).aeth(),
            Some(Aeth {
                syndrome: Syndrome::RnrNak { timer: 14 },
                msn: 42
            })
        );
    }

    #[test]
    fn parse__atomic() {
        let bytes = packet("CAS");
        let atomic = AtomicEth {
            va: VA + 8,
            rkey: RKEY,
            swap_or_add: 0x1111,
            compare: 0x2222,
        };
        assert_eq!(parse(&bytes).atomic(), Some(atomic));
        let bytes = packet("ATOMIC ACK");
        assert_eq!(
            parse(&bytes).aeth(),
            Some(Aeth {
                syndrome: Syndrome::ACK,
                msn: 256
            })
        );
        assert_eq!(parse(&bytes).atomic_ack(), Some(0x8877_6655_4433_2211));
    }

    #[test]
    fn parse__flush() {
        let bytes = packet("FLUSH");
        let feth = Feth {
            placement: Placement::PERSISTENT,
            selectivity: Selectivity::MemoryRegion,
        };
        assert_eq!(parse(&bytes).bth, bth(Operation::Flush, 0));
        assert_eq!(parse(&bytes).feth(), Some(feth));
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA,
                rkey: RKEY,
                length: 4096
            })
        );
    }

    #[test]
    fn parse__atomic_write() {
        let bytes = packet("ATOMIC WRITE");
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA + 8,
                rkey: RKEY,
                length: 8
            })
        );
        assert_eq!(parse(&bytes).payload(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn parse__other_transports() {
        let bytes = packet("UD SEND only");
        assert_eq!(
            parse(&bytes).deth(),
            Some(Deth {
                qkey: GSI_QKEY,
                src_qpn: Qpn::GSI
            })
        );
        assert_eq!(
            (parse(&bytes).bth.dest_qpn, parse(&bytes).payload()),
            (Qpn::GSI, &b"0123"[..])
        );
        let bytes = packet("XRC WRITE only");
        assert_eq!(parse(&bytes).xrc_srqn(), Some(0x777));
        assert_eq!(
            parse(&bytes).reth(),
            Some(Reth {
                va: VA,
                rkey: RKEY,
                length: 4096
            })
        );
        let bytes = packet("UC SEND only, id 0xbeef");
        assert_eq!(
            parse(&bytes).bth.opcode,
            Opcode {
                transport: Transport::Uc,
                operation: Operation::SendOnly
            }
        );
    }

    #[test]
    fn parse__truncated_at_every_byte() {
        for vector in vectors::all() {
            let whole = parse(&vector.packet);
            let min = vector.packet.len() - whole.payload().len();
            for len in 0..vector.packet.len() {
                // The payload has no length field: the parser notices only a cut into headers, pad or ICRC.
                assert_eq!(
                    Packet::parse(&vector.packet[..len]).is_err(),
                    len < min,
                    "{} cut to {len}",
                    vector.name
                );
            }
        }
    }

    #[test]
    fn parse__values_not_defined() {
        let broken = |name: &str, at: usize, value: u8| {
            let mut bytes = packet(name);
            bytes[at] = value;
            let error = Packet::parse(&bytes).unwrap_err();
            assert!(matches!(error, Malformed::Undefined { .. }), "{name}: {error}");
        };
        broken("ACK", 0, 0x15); // opcode
        broken("ACK", 1, 0x41); // transport version
        broken("ACK", 12, 0x40); // syndrome class
        broken("ACK", 12, 0x64); // NAK code of reliable datagram
        broken("FLUSH", 15, 0x22); // selectivity
        broken("FLUSH", 15, 0x10); // placement: none
        broken("FLUSH", 15, 0x14); // placement: reserved bit
    }

    /// Writes the headers over stale bytes and compares everything except the ICRC, which [`crate::icrc`] tests.
    fn emitted(name: &str, bth: Bth, ext: impl FnOnce(&mut [u8]), payload: &[u8]) {
        let expected = packet(name);
        let mut bytes = vec![0xee; expected.len() - ICRC_LEN];
        let at = Bth::LEN + bth.opcode.ext().len();
        bth.emit(&mut bytes);
        ext(&mut bytes[Bth::LEN..at]);
        bytes[at..at + payload.len()].copy_from_slice(payload);
        bytes[at + payload.len()..].fill(0);
        assert_eq!(bytes, expected[..bytes.len()], "{name}");
    }

    #[test]
    fn emit__headers() {
        let reth = Reth {
            va: VA,
            rkey: RKEY,
            length: 4096,
        };
        emitted(
            "WRITE only",
            bth(Operation::WriteOnly, 1),
            |b| reth.emit(b),
            b"0123456789:",
        );
        emitted(
            "READ request",
            bth(Operation::ReadRequest, 0),
            |b| reth.emit(b),
            b"",
        );
        let feth = Feth {
            placement: Placement::PERSISTENT,
            selectivity: Selectivity::MemoryRegion,
        };
        let flush = |b: &mut [u8]| {
            feth.emit(b);
            reth.emit(&mut b[Feth::LEN..]);
        };
        emitted("FLUSH", bth(Operation::Flush, 0), flush, b"");
        let quiet = |operation| Bth {
            ack_req: false,
            ..bth(operation, 0)
        };
        let aeth = Aeth {
            syndrome: Syndrome::RnrNak { timer: 14 },
            msn: 42,
        };
        emitted(
            "RNR NAK, v6",
            quiet(Operation::Acknowledge),
            |b| aeth.emit(b),
            b"",
        );
        let atomic = AtomicEth {
            va: VA + 8,
            rkey: RKEY,
            swap_or_add: 0x1111,
            compare: 0x2222,
        };
        emitted("CAS", quiet(Operation::CompareSwap), |b| atomic.emit(b), b"");
        let ud = Opcode {
            transport: Transport::Ud,
            operation: Operation::SendOnly,
        };
        let deth = Deth {
            qkey: GSI_QKEY,
            src_qpn: Qpn::GSI,
        };
        let gsi = Bth {
            opcode: ud,
            dest_qpn: Qpn::GSI,
            ..quiet(Operation::SendOnly)
        };
        emitted("UD SEND only", gsi, |b| deth.emit(b), b"0123");
        let congested = Bth {
            fecn: true,
            becn: true,
            ..quiet(Operation::SendOnly)
        };
        emitted("SEND only, FECN and BECN", congested, |_| {}, b"");
    }

    #[test]
    fn syndrome__code_inverts_parse() {
        let defined = (0..=u8::MAX)
            .filter(|code| Syndrome::parse(*code).is_ok_and(|s| s.code() == *code))
            .count();
        assert_eq!(defined, 32 + 32 + 4);
    }

    #[test]
    fn path_mtu__of_link() {
        assert_eq!(PathMtu::of_link(1500), Some(PathMtu::Bytes1024));
        assert_eq!(PathMtu::of_link(4175), Some(PathMtu::Bytes2048));
        assert_eq!(PathMtu::of_link(4176), Some(PathMtu::Bytes4096));
        assert_eq!(PathMtu::of_link(65_536), Some(PathMtu::Bytes4096));
        assert_eq!(
            (PathMtu::of_link(335), PathMtu::of_link(336)),
            (None, Some(PathMtu::Bytes256))
        );
        assert_eq!(PathMtu::from_code(3).map(PathMtu::bytes), Some(1024));
        assert_eq!(
            (
                PathMtu::from_code(0),
                PathMtu::from_code(6),
                PathMtu::from_bytes(1000)
            ),
            (None, None, None)
        );
    }

    #[test]
    fn timers__codes() {
        assert_eq!(
            (rnr_timer_ns(0), rnr_timer_ns(1), rnr_timer_ns(31)),
            (655_360_000, 10_000, 491_520_000)
        );
        assert_eq!((ack_timeout_ns(0), ack_timeout_ns(14)), (None, Some(67_108_864)));
    }
}
