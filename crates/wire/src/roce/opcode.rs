//! Opcodes: transport service and operation, and the extension headers that each has.

use std::fmt;

use bitflags::bitflags;

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
    /// Returns the position of a packet with which a message begins, or ends, or both, or neither.
    pub const fn of(begins: bool, ends: bool) -> Position {
        match (begins, ends) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        }
    }

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
    pub(super) fn offset(self, ext: Ext) -> usize {
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

    /// Returns the operation of a packet of a SEND or WRITE whose last packet has immediate data, or a key to invalidate, or neither.
    pub const fn of_data(write: bool, position: Position, imm: bool, invalidate: bool) -> Operation {
        match (write, position, imm) {
            (false, Position::Last, false) if invalidate => Operation::SendLastInvalidate,
            (false, Position::Only, false) if invalidate => Operation::SendOnlyInvalidate,
            (false, Position::First, _) => Operation::SendFirst,
            (false, Position::Middle, _) => Operation::SendMiddle,
            (false, Position::Last, false) => Operation::SendLast,
            (false, Position::Last, true) => Operation::SendLastImm,
            (false, Position::Only, false) => Operation::SendOnly,
            (false, Position::Only, true) => Operation::SendOnlyImm,
            (true, Position::First, _) => Operation::WriteFirst,
            (true, Position::Middle, _) => Operation::WriteMiddle,
            (true, Position::Last, false) => Operation::WriteLast,
            (true, Position::Last, true) => Operation::WriteLastImm,
            (true, Position::Only, false) => Operation::WriteOnly,
            (true, Position::Only, true) => Operation::WriteOnlyImm,
        }
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
