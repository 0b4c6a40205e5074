//! PDUs of NVMe/TCP: the NVMe over TCP Transport Specification 1.0, 3.6. All numbers are little endian.
//!
//! ```text
//!  0  type u8 | flags u8 | header length u8 | data offset u8 | PDU length u32: bytes of the whole, digests included
//!  8  specific to the type, as far as the header length
//!     header digest u32, if the connection has one and the type may have one
//!     padding as far as the data offset, data, data digest u32, if the connection has one
//! ```
//!
//! ```text
//! type            header  specific
//! 0 ICReq          128    version u16, host's data alignment u8, digests u8, MAXR2T u32
//! 1 ICResp         128    version u16, controller's data alignment u8, digests u8, MAXH2CDATA u32
//! 2 H2CTermReq      24    fatal error status u16, information u32; then bytes of the header that was refused
//! 3 C2HTermReq      24    the same
//! 4 CapsuleCmd      72    command [64]; then data
//! 5 CapsuleResp     24    completion [16]
//! 6 H2CData         24    command id u16, transfer tag u16, offset u32, length u32; then data
//! 7 C2HData         24    command id u16, zero u16, offset u32, length u32; then data
//! 9 R2T             24    command id u16, transfer tag u16, offset u32, length u32
//! ```

use bitflags::bitflags;

use crate::Malformed;
use crate::bytes::{le16, le32, put};
use crate::nvme::{CQE_LEN, Cid, Cqe, SQE_LEN, Sqe};

#[cfg(test)]
mod tests;

/// Bytes of the header that every PDU has.
pub const COMMON_LEN: usize = 8;
/// Bytes of a digest.
pub const DIGEST_LEN: usize = 4;
/// Bytes of the longest header.
pub const HEADER_LEN_MAX: usize = 128;
/// Bytes of the longest PDU that ends a connection.
const TERM_LEN_MAX: usize = 24 + 128;
/// Highest alignment of data, in 4 bytes, less 1.
const ALIGNMENT_MAX: u8 = 31;

bitflags! {
    /// Flags of a PDU.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Flags: u8 {
        /// A digest of the header follows it.
        const HEADER_DIGEST = 1;
        /// A digest of the data follows them.
        const DATA_DIGEST = 2;
        /// The last data of their transfer.
        const LAST = 4;
        /// The command is done without an error; no completion follows.
        const SUCCESS = 8;
    }
}

bitflags! {
    /// Digests (CRC-32C) that a connection has.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Digests: u8 {
        /// Of headers.
        const HEADER = 1;
        /// Of data.
        const DATA = 2;
    }
}

/// Type of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PduType {
    /// Request to initialize the connection.
    IcReq = 0,
    /// Its answer.
    IcResp = 1,
    /// The host ends the connection.
    H2cTermReq = 2,
    /// The controller ends the connection.
    C2hTermReq = 3,
    /// A command.
    CapsuleCmd = 4,
    /// A completion.
    CapsuleResp = 5,
    /// Data from the host.
    H2cData = 6,
    /// Data from the controller.
    C2hData = 7,
    /// The controller is ready to receive data.
    R2t = 9,
}

impl PduType {
    fn parse(code: u8) -> Result<PduType, Malformed> {
        use PduType::*;
        [
            IcReq,
            IcResp,
            H2cTermReq,
            C2hTermReq,
            CapsuleCmd,
            CapsuleResp,
            H2cData,
            C2hData,
            R2t,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == code)
        .ok_or(Malformed::Undefined {
            what: "type of a PDU",
            value: code.into(),
        })
    }

    /// Returns the bytes of its header.
    pub const fn header_len(self) -> usize {
        match self {
            PduType::IcReq | PduType::IcResp => HEADER_LEN_MAX,
            PduType::CapsuleCmd => COMMON_LEN + SQE_LEN,
            _ => 24,
        }
    }

    /// Returns true if data may follow its header.
    pub const fn may_have_data(self) -> bool {
        matches!(self, PduType::CapsuleCmd | PduType::H2cData | PduType::C2hData)
    }

    /// Returns true if digests apply to it.
    const fn has_digests(self) -> bool {
        !matches!(
            self,
            PduType::IcReq | PduType::IcResp | PduType::H2cTermReq | PduType::C2hTermReq
        )
    }
}

/// Fatal error, which ends a connection. 3.6.2.4 and 3.6.2.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// A field of a header, at this offset.
    #[error("invalid field at byte {0} of a PDU's header")]
    InvalidField(u32),
    /// A PDU that is not allowed at this time.
    #[error("a PDU that is not allowed at this time")]
    Sequence,
    /// The digest of a header is not its.
    #[error("wrong header digest")]
    HeaderDigest,
    /// Data outside of what was asked for.
    #[error("data outside of the transfer")]
    OutOfRange,
    /// More data at a time, or more requests for data, than agreed.
    #[error("data beyond the agreed limit")]
    Limit,
    /// A parameter that is not supported, at this offset.
    #[error("unsupported parameter at byte {0} of a PDU's header")]
    Unsupported(u32),
    /// A status that has no meaning here.
    #[error("fatal error status {0}")]
    Other(u16),
}

impl Fatal {
    const fn status_and_information(self) -> (u16, u32) {
        match self {
            Fatal::InvalidField(at) => (1, at),
            Fatal::Sequence => (2, 0),
            Fatal::HeaderDigest => (3, 0),
            Fatal::OutOfRange => (4, 0),
            Fatal::Limit => (5, 0),
            Fatal::Unsupported(at) => (6, at),
            Fatal::Other(status) => (status, 0),
        }
    }

    fn parse(status: u16, information: u32) -> Fatal {
        match status {
            1 => Fatal::InvalidField(information),
            2 => Fatal::Sequence,
            3 => Fatal::HeaderDigest,
            4 => Fatal::OutOfRange,
            5 => Fatal::Limit,
            6 => Fatal::Unsupported(information),
            other => Fatal::Other(other),
        }
    }
}

/// The header that every PDU has, checked against the digests of its connection: lengths and offsets of it agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    /// The type.
    pub kind: PduType,
    /// The flags.
    pub flags: Flags,
    /// Digests that it has.
    pub digests: Digests,
    /// Bytes before the data: header, its digest, padding.
    pub data_offset: usize,
    /// Bytes of the data.
    pub data_len: usize,
    /// Bytes of the whole PDU.
    pub pdu_len: usize,
}

impl Common {
    /// Parses the first [`COMMON_LEN`] bytes of a PDU.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    ///
    /// # Panics
    /// There are fewer bytes.
    pub fn parse(bytes: &[u8], digests: Digests) -> Result<Common, Fatal> {
        let kind = PduType::parse(bytes[0]).map_err(|_| Fatal::InvalidField(0))?;
        let flags = Flags::from_bits_truncate(bytes[1]);
        let digests = if kind.has_digests() {
            digests
        } else {
            Digests::empty()
        };
        let (header_len, pdu_len) = (kind.header_len(), le32(bytes, 4) as usize);
        if usize::from(bytes[2]) != header_len {
            return Err(Fatal::InvalidField(2));
        }
        if kind.has_digests() && flags.contains(Flags::HEADER_DIGEST) != digests.contains(Digests::HEADER) {
            return Err(Fatal::InvalidField(1));
        }
        let header_end = header_len + digests.header_len();
        let common = |digests, data_offset, data_len| Common {
            kind,
            flags,
            digests,
            data_offset,
            data_len,
            pdu_len,
        };
        if matches!(kind, PduType::H2cTermReq | PduType::C2hTermReq) {
            return match (header_len..=TERM_LEN_MAX).contains(&pdu_len) {
                true => Ok(common(digests, header_len, pdu_len - header_len)),
                false => Err(Fatal::InvalidField(4)),
            };
        }
        if pdu_len == header_end {
            return Ok(common(digests - Digests::DATA, header_end, 0));
        }
        if !kind.may_have_data() {
            return Err(Fatal::InvalidField(4));
        }
        if flags.contains(Flags::DATA_DIGEST) != digests.contains(Digests::DATA) {
            return Err(Fatal::InvalidField(1));
        }
        // Linux leaves the offset 0 where nothing stands between header and data.
        let data_offset = match bytes[3] {
            0 => header_end,
            offset => usize::from(offset),
        };
        if data_offset < header_end {
            return Err(Fatal::InvalidField(3));
        }
        let data_len = pdu_len.checked_sub(data_offset + digests.data_len());
        let data_len = data_len.filter(|len| *len > 0).ok_or(Fatal::InvalidField(4))?;
        Ok(common(digests, data_offset, data_len))
    }
}

impl Digests {
    /// Returns the bytes behind a header.
    pub const fn header_len(self) -> usize {
        if self.contains(Digests::HEADER) {
            DIGEST_LEN
        } else {
            0
        }
    }

    /// Returns the bytes behind data.
    pub const fn data_len(self) -> usize {
        if self.contains(Digests::DATA) {
            DIGEST_LEN
        } else {
            0
        }
    }
}

/// Header of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Request to initialize the connection.
    IcReq(Initialize),
    /// Its answer.
    IcResp(Initialize),
    /// The host ends the connection.
    H2cTermReq(Fatal),
    /// The controller ends the connection.
    C2hTermReq(Fatal),
    /// A command.
    CapsuleCmd(Sqe),
    /// A completion.
    CapsuleResp(Cqe),
    /// Data from the host.
    H2cData(Transfer),
    /// Data from the controller.
    C2hData(Transfer),
    /// The controller is ready to receive data.
    R2t(Transfer),
}

/// Parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initialize {
    /// Alignment of data within PDUs to the sender, in bytes: a multiple of 4 up to 128.
    pub alignment: usize,
    /// Digests: wanted, or agreed.
    pub digests: Digests,
    /// Of a host: requests for data that a command may have at a time, 1 or more. Of a controller: bytes of an H2CData.
    pub limit: u32,
}

/// Data of a command: a range of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The command.
    pub cid: Cid,
    /// Chosen by the controller with R2T; the host repeats it.
    pub tag: u16,
    /// Offset in the command's data.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

impl Header {
    /// Parses the header of a PDU of a type, of which [`Common::parse`] has checked the beginning.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    ///
    /// # Panics
    /// There are fewer bytes than the header of that type has.
    pub fn parse(kind: PduType, bytes: &[u8]) -> Result<Header, Fatal> {
        Ok(match kind {
            PduType::IcReq => Header::IcReq(Initialize::parse(bytes, |max| max.saturating_add(1))?),
            PduType::IcResp => {
                let response = Initialize::parse(bytes, |max| max)?;
                if response.limit < 4096 {
                    return Err(Fatal::Unsupported(12));
                }
                Header::IcResp(response)
            }
            PduType::H2cTermReq | PduType::C2hTermReq => {
                let fatal = Fatal::parse(le16(bytes, 8), le32(bytes, 10));
                match kind {
                    PduType::H2cTermReq => Header::H2cTermReq(fatal),
                    _ => Header::C2hTermReq(fatal),
                }
            }
            PduType::CapsuleCmd => {
                let sqe = Sqe::parse(&bytes[COMMON_LEN..]).map_err(|_| Fatal::InvalidField(2))?;
                Header::CapsuleCmd(sqe)
            }
            PduType::CapsuleResp => {
                let cqe = Cqe::parse(&bytes[COMMON_LEN..]).map_err(|_| Fatal::InvalidField(2))?;
                Header::CapsuleResp(cqe)
            }
            PduType::H2cData => Header::H2cData(Transfer::parse(bytes)),
            PduType::C2hData => Header::C2hData(Transfer::parse(bytes)),
            PduType::R2t => Header::R2t(Transfer::parse(bytes)),
        })
    }

    /// Returns the type.
    pub const fn kind(&self) -> PduType {
        match self {
            Header::IcReq(_) => PduType::IcReq,
            Header::IcResp(_) => PduType::IcResp,
            Header::H2cTermReq(_) => PduType::H2cTermReq,
            Header::C2hTermReq(_) => PduType::C2hTermReq,
            Header::CapsuleCmd(_) => PduType::CapsuleCmd,
            Header::CapsuleResp(_) => PduType::CapsuleResp,
            Header::H2cData(_) => PduType::H2cData,
            Header::C2hData(_) => PduType::C2hData,
            Header::R2t(_) => PduType::R2t,
        }
    }

    /// Writes the header of a PDU, without its digest, and returns its layout: the caller appends what [`Common`] says.
    ///
    /// # Panics
    /// There are fewer bytes than [`PduType::header_len`].
    pub fn emit(&self, flags: Flags, data: DataLayout, bytes: &mut [u8]) -> Common {
        let kind = self.kind();
        let digests = if kind.has_digests() {
            data.digests
        } else {
            Digests::empty()
        };
        let header_end = kind.header_len() + digests.header_len();
        let (data_offset, pdu_len) = match data.len {
            0 => (header_end, header_end),
            len => {
                let at = header_end.next_multiple_of(data.alignment.max(4));
                (at, at + len + digests.data_len())
            }
        };
        let digests = if data.len > 0 {
            digests
        } else {
            digests - Digests::DATA
        };
        let mut flags = flags;
        flags.set(Flags::HEADER_DIGEST, digests.contains(Digests::HEADER));
        flags.set(Flags::DATA_DIGEST, digests.contains(Digests::DATA));
        bytes[..kind.header_len()].fill(0);
        let offset = if data.len > 0 { data_offset as u8 } else { 0 };
        put(
            bytes,
            0,
            &[kind as u8, flags.bits(), kind.header_len() as u8, offset],
        );
        put(bytes, 4, &(pdu_len as u32).to_le_bytes());
        match self {
            Header::IcReq(request) => request.emit(request.limit.saturating_sub(1), bytes),
            Header::IcResp(response) => response.emit(response.limit, bytes),
            Header::H2cTermReq(fatal) | Header::C2hTermReq(fatal) => {
                let (status, information) = fatal.status_and_information();
                put(bytes, 8, &status.to_le_bytes());
                put(bytes, 10, &information.to_le_bytes());
            }
            Header::CapsuleCmd(sqe) => put(bytes, COMMON_LEN, sqe.as_bytes()),
            Header::CapsuleResp(cqe) => cqe.emit(&mut bytes[COMMON_LEN..COMMON_LEN + CQE_LEN]),
            Header::H2cData(transfer) | Header::C2hData(transfer) | Header::R2t(transfer) => {
                transfer.emit(bytes)
            }
        }
        Common {
            kind,
            flags,
            digests,
            data_offset,
            data_len: data.len,
            pdu_len,
        }
    }
}

/// Place of data in a PDU that is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataLayout {
    /// Bytes of the data.
    pub len: usize,
    /// Digests of the connection.
    pub digests: Digests,
    /// Alignment that the receiver has asked for, in bytes; 0 is none.
    pub alignment: usize,
}

impl Initialize {
    fn parse(bytes: &[u8], limit: impl Fn(u32) -> u32) -> Result<Initialize, Fatal> {
        if le16(bytes, 8) != 0 {
            return Err(Fatal::Unsupported(8));
        }
        if bytes[10] > ALIGNMENT_MAX {
            return Err(Fatal::InvalidField(10));
        }
        Ok(Initialize {
            alignment: 4 * (usize::from(bytes[10]) + 1),
            digests: Digests::from_bits(bytes[11]).ok_or(Fatal::InvalidField(11))?,
            limit: limit(le32(bytes, 12)),
        })
    }

    fn emit(&self, limit: u32, bytes: &mut [u8]) {
        bytes[10] = (self.alignment / 4).saturating_sub(1) as u8;
        bytes[11] = self.digests.bits();
        put(bytes, 12, &limit.to_le_bytes());
    }
}

impl Transfer {
    fn parse(bytes: &[u8]) -> Transfer {
        Transfer {
            cid: Cid(le16(bytes, 8)),
            tag: le16(bytes, 10),
            offset: le32(bytes, 12),
            length: le32(bytes, 16),
        }
    }

    fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 8, &self.cid.0.to_le_bytes());
        put(bytes, 10, &self.tag.to_le_bytes());
        put(bytes, 12, &self.offset.to_le_bytes());
        put(bytes, 16, &self.length.to_le_bytes());
    }
}
