//! Messages between two nodes on a queue pair that connections of their applications share.
//!
//! Payload that an application's request moves directly, by WRITE, READ or an atomic operation, has no message here. All else is a SEND of one
//! slot: a [`Header`] of [`HEADER_LEN`] bytes, and at most [`BODY_LEN_MAX`] bytes behind it. Numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind; 0 is none |
//! | 1 | flags |
//! | 2..4 | 0 |
//! | 4..8 | QPN of the destination's application |
//! | 8..12 | QPN of the source's application |
//! | 12..16 | sequence: number of messages before this one that took a receive of the connection, modulo 2^32 |
//! | 16..20 | length |
//! | 20..24 | immediate data, or a key, or a status, or a number of withdrawals |
//! | 24..28 | slots of the destination that the source has emptied since the queue pair began, modulo 2^32 |
//! | 28..32 | 0 |
//!
//! The two QPNs name the connection. The body is the payload of a [`Kind::Send`], the receives of a [`Kind::Receives`], and empty otherwise.
//!
//! A receive is its capacity, the number of its elements in two bytes, and two bytes of flags; then, for each element, the address, the key and
//! the length. One without elements cannot be written to: the bytes come in a message.

use bitflags::bitflags;
use strum::VariantArray;

use super::CompletionStatus;
use crate::bytes::{le16, le32, le64, need, put};
use crate::roce::MESSAGE_BYTES_MAX;
use crate::{Malformed, Qpn, RKey};

/// Bytes of a header.
pub const HEADER_LEN: usize = 32;
/// Most bytes behind a header: longer messages are written into the receive.
pub const BODY_LEN_MAX: usize = 4096;
/// Bytes of a slot, which holds one message.
pub const SLOT_LEN: usize = HEADER_LEN + BODY_LEN_MAX;
/// Most elements of a receive.
pub const RECEIVE_ELEMENTS_MAX: usize = super::Work::ELEMENTS_MAX;

const RECEIVE_LEN: usize = 8;

bitflags! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Flags: u8 {
        const IMM = 1 << 0;
        const INVALIDATE = 1 << 1;
        const SOLICITED = 1 << 2;
    }
}

bitflags! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct ReceiveFlags: u16 {
        const FAULTY = 1 << 0;
    }
}

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[repr(u8)]
pub enum Kind {
    /// A SEND whose payload is the body.
    Send = 1,
    /// A SEND whose payload was written into the receive before.
    Placed = 2,
    /// The end of a WRITE with immediate data, whose payload was written before.
    WriteImm = 3,
    /// Receives that the source's application has posted.
    Receives = 4,
    /// Only tells which slots are empty; belongs to no connection.
    Slots = 5,
    /// The connection has failed at the source.
    Fail = 6,
    /// Receives of the source's application that may no longer be written to: those with an element of the key, of all that were told before. They
    /// are faulty from now on.
    Withdraw = 7,
    /// All [`Kind::Withdraw`] of the connection so far have been carried out: nothing is written to those receives behind this message.
    Withdrawn = 8,
}

/// Data of a message beside its payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extra {
    /// Nothing.
    #[default]
    None,
    /// Immediate data.
    Imm(u32),
    /// The key that a SEND invalidates.
    Invalidate(RKey),
    /// The key of the source's region whose receives are withdrawn.
    Withdraw(RKey),
    /// Withdrawals of the connection that have been carried out, modulo 2^32.
    Withdrawn(u32),
    /// How the failure concerns the destination: the status of the receive that a message would have taken
    /// ([`CompletionStatus::LocalLength`], [`CompletionStatus::LocalProtection`]), an access to the destination's memory that is refused
    /// ([`CompletionStatus::RemoteAccess`], [`CompletionStatus::RemoteInvalidRequest`]), that the source's queue pair does not answer any
    /// more ([`CompletionStatus::RetryExceeded`]), or that it has no such connection ([`CompletionStatus::Flushed`]), which has no answer.
    Status(CompletionStatus),
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind.
    pub kind: Kind,
    /// Set if the receiver of the message is to be woken also if it waits for such messages alone.
    pub is_solicited: bool,
    /// QPN of the destination's application.
    pub destination: Qpn,
    /// QPN of the source's application.
    pub source: Qpn,
    /// Messages before this one that took a receive of the connection, modulo 2^32. A failure has it too, for the receive that it concerns.
    pub sequence: u32,
    /// Bytes of the message, not only of the body; the number of receives.
    pub length: u32,
    /// Immediate data, key or status, as the kind has it.
    pub extra: Extra,
    /// Slots that the source has emptied since the queue pair began, modulo 2^32.
    pub emptied: u32,
}

impl Header {
    /// Reads a message, and returns its header and body.
    ///
    /// # Errors
    /// An undefined kind, flag or status, a QPN of more than 24 bits, or a length that the kind cannot have or that is not that of the body.
    pub fn parse(bytes: &[u8]) -> Result<(Header, &[u8]), Malformed> {
        need("message of a shared queue pair", bytes, HEADER_LEN)?;
        let (header, body) = bytes.split_at(HEADER_LEN);
        let kind = Kind::VARIANTS.iter().find(|kind| **kind as u8 == header[0]);
        let Some(&kind) = kind else {
            return undefined("kind of a message", header[0].into());
        };
        let Some(flags) = Flags::from_bits(header[1]) else {
            return undefined("flags of a message", header[1].into());
        };
        if le16(header, 2) != 0 || le32(header, 28) != 0 {
            return undefined("reserved bytes of a message", le32(header, 28).into());
        }
        let extra = extra_of(kind, flags, le32(header, 20))?;
        if flags.contains(Flags::SOLICITED) && !kind.takes_receive() {
            return undefined("flags of a message", header[1].into());
        }
        let parsed = Header {
            kind,
            is_solicited: flags.contains(Flags::SOLICITED),
            destination: qpn(le32(header, 4))?,
            source: qpn(le32(header, 8))?,
            sequence: le32(header, 12),
            length: le32(header, 16),
            extra,
            emptied: le32(header, 24),
        };
        if parsed.has_valid_length(body.len()) {
            Ok((parsed, body))
        } else {
            undefined("length of a message", parsed.length.into())
        }
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8; HEADER_LEN]) {
        let (mut flags, word) = match self.extra {
            Extra::None => (Flags::empty(), 0),
            Extra::Imm(imm) => (Flags::IMM, imm),
            Extra::Invalidate(key) => (Flags::INVALIDATE, key.0),
            Extra::Withdraw(key) => (Flags::empty(), key.0),
            Extra::Withdrawn(count) => (Flags::empty(), count),
            Extra::Status(status) => (Flags::empty(), status as u32),
        };
        flags.set(Flags::SOLICITED, self.is_solicited);
        bytes.fill(0);
        bytes[0] = self.kind as u8;
        bytes[1] = flags.bits();
        put(bytes, 4, &self.destination.value().to_le_bytes());
        put(bytes, 8, &self.source.value().to_le_bytes());
        put(bytes, 12, &self.sequence.to_le_bytes());
        put(bytes, 16, &self.length.to_le_bytes());
        put(bytes, 20, &word.to_le_bytes());
        put(bytes, 24, &self.emptied.to_le_bytes());
    }

    fn has_valid_length(&self, body: usize) -> bool {
        let length = self.length as usize;
        match self.kind {
            Kind::Send => length <= BODY_LEN_MAX && length == body,
            Kind::Placed | Kind::WriteImm => self.length <= MESSAGE_BYTES_MAX && body == 0,
            Kind::Receives => length > 0 && (length * RECEIVE_LEN..=BODY_LEN_MAX).contains(&body),
            Kind::Slots | Kind::Fail | Kind::Withdraw | Kind::Withdrawn => length == 0 && body == 0,
        }
    }
}

impl Kind {
    /// Returns whether a message of this kind takes a receive of its destination's application.
    pub fn takes_receive(self) -> bool {
        matches!(self, Kind::Send | Kind::Placed | Kind::WriteImm)
    }
}

fn extra_of(kind: Kind, flags: Flags, word: u32) -> Result<Extra, Malformed> {
    let (imm, invalidate) = (flags.contains(Flags::IMM), flags.contains(Flags::INVALIDATE));
    Ok(match (kind, imm, invalidate) {
        (Kind::Send | Kind::Placed | Kind::WriteImm, true, false) => Extra::Imm(word),
        (Kind::Send | Kind::Placed, false, true) => Extra::Invalidate(RKey(word)),
        (Kind::Withdraw, false, false) => Extra::Withdraw(RKey(word)),
        (Kind::Withdrawn, false, false) => Extra::Withdrawn(word),
        (Kind::Fail, false, false) => {
            let status = CompletionStatus::VARIANTS.iter().find(|it| **it as u32 == word);
            match status {
                Some(
                    status @ (CompletionStatus::LocalLength
                    | CompletionStatus::LocalProtection
                    | CompletionStatus::RemoteAccess
                    | CompletionStatus::RemoteInvalidRequest
                    | CompletionStatus::RetryExceeded
                    | CompletionStatus::Flushed),
                ) => Extra::Status(*status),
                _ => return undefined("status of a failure", word.into()),
            }
        }
        (Kind::Send | Kind::Placed | Kind::Receives | Kind::Slots, false, false) if word == 0 => Extra::None,
        _ => return undefined("flags of a message", flags.bits().into()),
    })
}

/// A part of a receive to which the peer's node may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveElement {
    /// Address.
    pub va: u64,
    /// Key of the node that has the memory.
    pub rkey: RKey,
    /// Bytes.
    pub length: u32,
}

impl ReceiveElement {
    const LEN: usize = 16;

    fn parse(bytes: &[u8; ReceiveElement::LEN]) -> ReceiveElement {
        ReceiveElement {
            va: le64(bytes, 0),
            rkey: RKey(le32(bytes, 8)),
            length: le32(bytes, 12),
        }
    }
}

/// A receive of an application, as its node tells it to the peer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receive {
    /// Bytes that fit.
    pub capacity: u32,
    /// Set if its memory is not what its application says: no message fits, of whatever length.
    pub is_faulty: bool,
    /// Where to write a message; none if only messages with a body fit. Their lengths add up to the capacity.
    pub elements: Vec<ReceiveElement>,
}

impl Receive {
    /// Returns its bytes in a [`Kind::Receives`].
    pub fn emitted_len(&self) -> usize {
        RECEIVE_LEN + self.elements.len() * ReceiveElement::LEN
    }

    /// Writes it behind what `bytes` holds.
    ///
    /// # Panics
    /// If it has more than [`RECEIVE_ELEMENTS_MAX`] elements.
    pub fn emit(&self, bytes: &mut Vec<u8>) {
        assert!(self.elements.len() <= RECEIVE_ELEMENTS_MAX, "{self:?}");
        let mut flags = ReceiveFlags::empty();
        flags.set(ReceiveFlags::FAULTY, self.is_faulty);
        bytes.extend_from_slice(&self.capacity.to_le_bytes());
        bytes.extend_from_slice(&(self.elements.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&flags.bits().to_le_bytes());
        for element in &self.elements {
            bytes.extend_from_slice(&element.va.to_le_bytes());
            bytes.extend_from_slice(&element.rkey.0.to_le_bytes());
            bytes.extend_from_slice(&element.length.to_le_bytes());
        }
    }

    /// Reads the `count` receives of a body.
    ///
    /// # Errors
    /// Another number of receives, an undefined flag, too many elements, elements of another length than the capacity's, or a capacity beyond
    /// the longest message.
    pub fn parse_all(count: u32, mut body: &[u8]) -> Result<Vec<Receive>, Malformed> {
        let mut receives = Vec::new();
        for _ in 0..count {
            let receive = Receive::parse(&mut body)?;
            receives.push(receive);
        }
        match body.len() {
            0 => Ok(receives),
            len => undefined("bytes behind receives", len as u64),
        }
    }

    fn parse(body: &mut &[u8]) -> Result<Receive, Malformed> {
        need("receive", body, RECEIVE_LEN)?;
        let (fixed, rest) = body.split_at(RECEIVE_LEN);
        let (capacity, count) = (le32(fixed, 0), usize::from(le16(fixed, 4)));
        let Some(flags) = ReceiveFlags::from_bits(le16(fixed, 6)) else {
            return undefined("flags of a receive", le16(fixed, 6).into());
        };
        if count > RECEIVE_ELEMENTS_MAX {
            return undefined("elements of a receive", count as u64);
        }
        need("elements of a receive", rest, count * ReceiveElement::LEN)?;
        let (list, rest) = rest.split_at(count * ReceiveElement::LEN);
        let elements: Vec<_> = list.as_chunks().0.iter().map(ReceiveElement::parse).collect();
        let bytes: u64 = elements.iter().map(|element| u64::from(element.length)).sum();
        let fits = capacity <= MESSAGE_BYTES_MAX && (count == 0 || bytes == u64::from(capacity));
        let ends = elements
            .iter()
            .all(|it| it.va.checked_add(it.length.into()).is_some());
        if !fits || !ends {
            return undefined("capacity of a receive", capacity.into());
        }
        *body = rest;
        Ok(Receive {
            capacity,
            is_faulty: flags.contains(ReceiveFlags::FAULTY),
            elements,
        })
    }
}

fn qpn(value: u32) -> Result<Qpn, Malformed> {
    match Qpn::new(value) {
        qpn if qpn.value() == value => Ok(qpn),
        _ => undefined("QPN of a message", value.into()),
    }
}

fn undefined<T>(what: &'static str, value: u64) -> Result<T, Malformed> {
    Err(Malformed::Undefined { what, value })
}

#[cfg(test)]
mod tests;
