//! Control messages of the push service: who may map which region, and what a mapping is good for. The data itself never
//! passes here; it travels as RDMA READ, WRITE and FLUSH on the same connection.
//!
//! Each message is one RC SEND of at most [`MESSAGE_LEN_MAX`] bytes, big endian throughout:
//!
//! ```text
//!  0  type u16 | version u16 (1) | length u32: bytes of the whole message, this header included
//!  8  request id u64: an answer repeats it
//! 16  body
//! ```
//!
//! `name` is a length byte, 1 to 255, and as many bytes of UTF-8 without control characters; `[n]` are n bytes.
//!
//! ```text
//! type                body
//!  1  Hello           version_min u16, version_max u16, client_nonce [32]
//!  2  Challenge       version u16, server_nonce [32], server_proof [32]
//!  3  Proof           client_proof [32]
//!  4  Welcome         keepalive_ms u32, mappings_max u32
//!  5  Map             name, access u32, offset u64, length u64, transfer u64
//!  6  Mapped          mapping u64, region_bytes u64, domain u8, placement u8,
//!                     count u16, count times: offset u64, length u64, va u64, rkey u32
//!  7  Unmap           mapping u64
//!  8  Unmapped
//!  9  Stat            name, transfer u64
//! 10  Region          region: name, bytes u64, domain u8, placement u8, read_only u8, transfer u64, durable u64
//! 11  List
//! 12  Regions         total u32, count u16, count times: region as in 10
//! 13  Checksum        name, offset u64, length u64
//! 14  Checksummed     crc u64
//! 15  Goodbye
//! 16  Error           code u16, length u16, text of that many bytes of UTF-8 without control characters
//! ```
//!
//! The client speaks first: Hello, Challenge, Proof, Welcome; before Welcome nothing else is answered. Hello, Challenge and
//! the Error that may end this exchange have header version 1 for ever, so that any two versions can agree.

use std::fmt;

use bitflags::bitflags;

pub use crate::roce::Placement;
use crate::{Malformed, RKey, be16, be32, be64, need};

/// Bytes of the header.
pub const HEADER_LEN: usize = 16;
/// The longest message.
pub const MESSAGE_LEN_MAX: usize = 4096;
/// Version of the protocol described here.
pub const VERSION: u16 = 1;
/// The most extents that fit into a [`Message::Mapped`].
pub const EXTENTS_MAX: usize = (MESSAGE_LEN_MAX - HEADER_LEN - 20) / Extent::LEN;

/// Name of a region: 1 to 255 bytes of UTF-8 without control characters, so that it can be shown on a terminal as it is.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

impl Name {
    /// Checks length and characters.
    pub fn new(name: &str) -> Option<Name> {
        let fits = (1..=255).contains(&name.len()) && !name.chars().any(char::is_control);
        fits.then(|| Name(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

bitflags! {
    /// What a mapping is to be used for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// RDMA READ.
        const READ = 1;
        /// RDMA WRITE and FLUSH.
        const WRITE = 2;
    }
}

/// How far a loss of power reaches into the region's bytes: what is durable once it has left the processor's caches, or
/// without leaving them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Domain {
    /// Nothing survives: plain memory, or a file in memory.
    None = 0,
    /// A file: durable after fdatasync.
    File = 1,
    /// Persistent memory: durable once out of the caches (ADR).
    Adr = 2,
    /// Persistent memory whose power-fail protection includes the caches (eADR).
    Eadr = 3,
    /// The whole system survives a loss of power.
    WholeSystem = 4,
}

impl Domain {
    fn parse(code: u8) -> Result<Domain, Malformed> {
        use Domain::*;
        [None, File, Adr, Eadr, WholeSystem]
            .into_iter()
            .find(|d| *d as u8 == code)
            .ok_or_else(|| undefined("persistence domain", code.into()))
    }
}

/// A part of a region and the address at which RDMA reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the region.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
    /// Its address.
    pub va: u64,
    /// Its key.
    pub rkey: RKey,
}

impl Extent {
    const LEN: usize = 28;
}

/// What the server says of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its name.
    pub name: Name,
    /// Its size.
    pub bytes: u64,
    /// What of it survives a loss of power.
    pub domain: Domain,
    /// The kinds of flush it offers.
    pub placement: Placement,
    /// No one may write to it.
    pub read_only: bool,
    /// The upload asked about, else the one that wrote to it last; 0 when there was none.
    pub transfer: u64,
    /// Bytes of that upload, counted from its first offset without a gap, that are durable.
    pub durable: u64,
}

impl Region {
    fn wire_len(&self) -> usize {
        1 + self.name.0.len() + 27
    }
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// No version in common.
    BadVersion = 1,
    /// The proof does not fit the key.
    BadKey = 2,
    /// No region of that name.
    NoSuchRegion = 3,
    /// Offset and length reach past the region's end.
    OutOfRange = 4,
    /// Writing was asked of a region that is only read.
    ReadOnly = 5,
    /// The region or the server cannot do this.
    NotSupported = 6,
    /// Too many mappings or connections, or another upload holds the region.
    Busy = 7,
    /// The file behind the region failed.
    Io = 8,
    /// A message that is malformed, or out of turn.
    Protocol = 9,
}

impl ErrorCode {
    fn parse(code: u16) -> Result<ErrorCode, Malformed> {
        use ErrorCode::*;
        [
            BadVersion,
            BadKey,
            NoSuchRegion,
            OutOfRange,
            ReadOnly,
            NotSupported,
            Busy,
            Io,
            Protocol,
        ]
        .into_iter()
        .find(|c| *c as u16 == code)
        .ok_or_else(|| undefined("error code", code.into()))
    }
}

/// A message of the push service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Client: the versions it speaks.
    Hello {
        /// Lowest version.
        version_min: u16,
        /// Highest version.
        version_max: u16,
        /// Random, for the server to prove that it has the key.
        client_nonce: [u8; 32],
    },
    /// Server: the version chosen, and its half of the proof.
    Challenge {
        /// The version that both speak.
        version: u16,
        /// Random, for the client to prove that it has the key.
        server_nonce: [u8; 32],
        /// Proof that the server has the key.
        server_proof: [u8; 32],
    },
    /// Client: its half of the proof.
    Proof {
        /// Proof that the client has the key.
        client_proof: [u8; 32],
    },
    /// Server: the client may go on.
    Welcome {
        /// A client that is silent for so long is taken for dead.
        keepalive_ms: u32,
        /// Mappings that one connection may hold.
        mappings_max: u32,
    },
    /// Client: map a region for direct access.
    Map {
        /// The region.
        region: Name,
        /// What for.
        access: Access,
        /// First byte.
        offset: u64,
        /// Bytes; 0 means to the end.
        length: u64,
        /// Upload that this mapping serves, so that it can be resumed; 0 for none.
        transfer: u64,
    },
    /// Server: the mapping.
    Mapped {
        /// Names the mapping on this connection.
        mapping: u64,
        /// Size of the region.
        region_bytes: u64,
        /// What of it survives a loss of power.
        domain: Domain,
        /// The kinds of flush it offers.
        placement: Placement,
        /// What is mapped, at most [`EXTENTS_MAX`].
        extents: Vec<Extent>,
    },
    /// Client: end a mapping.
    Unmap {
        /// The mapping.
        mapping: u64,
    },
    /// Server: the mapping's keys are no longer valid.
    Unmapped,
    /// Client: ask about a region.
    Stat {
        /// The region.
        region: Name,
        /// The upload whose progress is asked for; 0 for the one that wrote last.
        transfer: u64,
    },
    /// Server: the region asked about.
    Region(Region),
    /// Client: ask about all regions.
    List,
    /// Server: as many regions as fit into a message.
    Regions {
        /// How many there are.
        total: u32,
        /// The first of them; build it with [`Message::regions`].
        regions: Vec<Region>,
    },
    /// Client: ask for a checksum of what is durable.
    Checksum {
        /// The region.
        region: Name,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Server: the checksum.
    Checksummed {
        /// CRC-64/NVME.
        crc: u64,
    },
    /// Either side: nothing more will come.
    Goodbye,
    /// Server: the request failed.
    Error {
        /// Why, for programs.
        code: ErrorCode,
        /// Why, for people.
        text: String,
    },
}

impl Message {
    /// A [`Message::Regions`] with as many of `all` as fit.
    pub fn regions(all: impl IntoIterator<Item = Region>) -> Message {
        let (mut total, mut regions, mut room) = (0, Vec::new(), MESSAGE_LEN_MAX - HEADER_LEN - 6);
        for region in all {
            total += 1;
            match room.checked_sub(region.wire_len()) {
                Some(left) => {
                    room = left;
                    regions.push(region);
                }
                // What follows one that does not fit is left out too, so that the list has no holes.
                None => room = 0,
            }
        }
        Message::Regions { total, regions }
    }

    /// Reads a message: its request id and itself. `bytes` are those of one SEND.
    pub fn parse(bytes: &[u8]) -> Result<(u64, Message), Malformed> {
        need("push header", bytes, HEADER_LEN)?;
        if be16(bytes, 2) != VERSION {
            return Err(undefined("push version", be16(bytes, 2).into()));
        }
        let length = be32(bytes, 4);
        if bytes.len() > MESSAGE_LEN_MAX || length as usize != bytes.len() {
            return Err(undefined("push length", length.into()));
        }
        let mut r = Reader {
            bytes,
            at: HEADER_LEN,
        };
        let message = match be16(bytes, 0) {
            1 => Message::Hello {
                version_min: r.u16()?,
                version_max: r.u16()?,
                client_nonce: r.array()?,
            },
            2 => Message::Challenge {
                version: r.u16()?,
                server_nonce: r.array()?,
                server_proof: r.array()?,
            },
            3 => Message::Proof {
                client_proof: r.array()?,
            },
            4 => Message::Welcome {
                keepalive_ms: r.u32()?,
                mappings_max: r.u32()?,
            },
            5 => {
                let region = r.name()?;
                let access = r.u32()?;
                let access = Access::from_bits(access).ok_or_else(|| undefined("access", access.into()))?;
                Message::Map {
                    region,
                    access,
                    offset: r.u64()?,
                    length: r.u64()?,
                    transfer: r.u64()?,
                }
            }
            6 => {
                let (mapping, region_bytes) = (r.u64()?, r.u64()?);
                let (domain, placement) = (Domain::parse(r.u8()?)?, r.placement()?);
                let count = usize::from(r.u16()?);
                need("extents", &r.bytes[r.at..], count * Extent::LEN)?;
                let extents = (0..count).map(|_| r.extent()).collect::<Result<_, _>>()?;
                Message::Mapped {
                    mapping,
                    region_bytes,
                    domain,
                    placement,
                    extents,
                }
            }
            7 => Message::Unmap { mapping: r.u64()? },
            8 => Message::Unmapped,
            9 => Message::Stat {
                region: r.name()?,
                transfer: r.u64()?,
            },
            10 => Message::Region(r.region()?),
            11 => Message::List,
            12 => {
                let (total, count) = (r.u32()?, r.u16()?);
                let regions = (0..count).map(|_| r.region()).collect::<Result<_, _>>()?;
                Message::Regions { total, regions }
            }
            13 => Message::Checksum {
                region: r.name()?,
                offset: r.u64()?,
                length: r.u64()?,
            },
            14 => Message::Checksummed { crc: r.u64()? },
            15 => Message::Goodbye,
            16 => {
                let code = ErrorCode::parse(r.u16()?)?;
                let len = usize::from(r.u16()?);
                Message::Error {
                    code,
                    text: r.text("error text", len)?.to_owned(),
                }
            }
            other => return Err(undefined("push message type", other.into())),
        };
        if r.at != bytes.len() {
            return Err(undefined(
                "bytes after the push message",
                (bytes.len() - r.at) as u64,
            ));
        }
        Ok((be64(bytes, 8), message))
    }

    /// Replaces what is in `out` by the message. The text of an [`Message::Error`] is cut to fit, and its control
    /// characters become spaces.
    ///
    /// # Panics
    ///
    /// When there are more extents than [`EXTENTS_MAX`], or more regions than [`Message::regions`] takes.
    pub fn emit(&self, request: u64, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.type_code().to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&request.to_be_bytes());
        match self {
            Message::Hello {
                version_min,
                version_max,
                client_nonce,
            } => {
                out.extend_from_slice(&version_min.to_be_bytes());
                out.extend_from_slice(&version_max.to_be_bytes());
                out.extend_from_slice(client_nonce);
            }
            Message::Challenge {
                version,
                server_nonce,
                server_proof,
            } => {
                out.extend_from_slice(&version.to_be_bytes());
                out.extend_from_slice(server_nonce);
                out.extend_from_slice(server_proof);
            }
            Message::Proof { client_proof } => out.extend_from_slice(client_proof),
            Message::Welcome {
                keepalive_ms,
                mappings_max,
            } => {
                out.extend_from_slice(&keepalive_ms.to_be_bytes());
                out.extend_from_slice(&mappings_max.to_be_bytes());
            }
            Message::Map {
                region,
                access,
                offset,
                length,
                transfer,
            } => {
                put_name(out, region);
                out.extend_from_slice(&access.bits().to_be_bytes());
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&transfer.to_be_bytes());
            }
            Message::Mapped {
                mapping,
                region_bytes,
                domain,
                placement,
                extents,
            } => {
                assert!(
                    extents.len() <= EXTENTS_MAX,
                    "{} extents do not fit a message",
                    extents.len()
                );
                out.extend_from_slice(&mapping.to_be_bytes());
                out.extend_from_slice(&region_bytes.to_be_bytes());
                out.extend_from_slice(&[*domain as u8, placement.bits()]);
                out.extend_from_slice(&(extents.len() as u16).to_be_bytes());
                for extent in extents {
                    out.extend_from_slice(&extent.offset.to_be_bytes());
                    out.extend_from_slice(&extent.length.to_be_bytes());
                    out.extend_from_slice(&extent.va.to_be_bytes());
                    out.extend_from_slice(&extent.rkey.0.to_be_bytes());
                }
            }
            Message::Unmap { mapping } => out.extend_from_slice(&mapping.to_be_bytes()),
            Message::Stat { region, transfer } => {
                put_name(out, region);
                out.extend_from_slice(&transfer.to_be_bytes());
            }
            Message::Region(region) => put_region(out, region),
            Message::Regions { total, regions } => {
                out.extend_from_slice(&total.to_be_bytes());
                out.extend_from_slice(&(regions.len() as u16).to_be_bytes());
                regions.iter().for_each(|region| put_region(out, region));
            }
            Message::Checksum {
                region,
                offset,
                length,
            } => {
                put_name(out, region);
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
            }
            Message::Checksummed { crc } => out.extend_from_slice(&crc.to_be_bytes()),
            Message::Unmapped | Message::List | Message::Goodbye => {}
            Message::Error { code, text } => {
                out.extend_from_slice(&(*code as u16).to_be_bytes());
                let text = text.replace(char::is_control, " ");
                let mut end = text.len().min(MESSAGE_LEN_MAX - HEADER_LEN - 4);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                let text = &text[..end];
                out.extend_from_slice(&(text.len() as u16).to_be_bytes());
                out.extend_from_slice(text.as_bytes());
            }
        }
        assert!(
            out.len() <= MESSAGE_LEN_MAX,
            "a push message of {} bytes",
            out.len()
        );
        let length = out.len() as u32;
        out[4..8].copy_from_slice(&length.to_be_bytes());
    }

    const fn type_code(&self) -> u16 {
        match self {
            Message::Hello { .. } => 1,
            Message::Challenge { .. } => 2,
            Message::Proof { .. } => 3,
            Message::Welcome { .. } => 4,
            Message::Map { .. } => 5,
            Message::Mapped { .. } => 6,
            Message::Unmap { .. } => 7,
            Message::Unmapped => 8,
            Message::Stat { .. } => 9,
            Message::Region(_) => 10,
            Message::List => 11,
            Message::Regions { .. } => 12,
            Message::Checksum { .. } => 13,
            Message::Checksummed { .. } => 14,
            Message::Goodbye => 15,
            Message::Error { .. } => 16,
        }
    }
}

fn undefined(what: &'static str, value: u64) -> Malformed {
    Malformed::Undefined { what, value }
}

fn put_name(out: &mut Vec<u8>, name: &Name) {
    out.push(name.0.len() as u8);
    out.extend_from_slice(name.0.as_bytes());
}

fn put_region(out: &mut Vec<u8>, region: &Region) {
    put_name(out, &region.name);
    out.extend_from_slice(&region.bytes.to_be_bytes());
    out.extend_from_slice(&[
        region.domain as u8,
        region.placement.bits(),
        u8::from(region.read_only),
    ]);
    out.extend_from_slice(&region.transfer.to_be_bytes());
    out.extend_from_slice(&region.durable.to_be_bytes());
}

/// Takes fields off a message, one after the other.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at + n;
        need("push message", self.bytes, end)?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    fn text(&mut self, what: &'static str, len: usize) -> Result<&'a str, Malformed> {
        let text = str::from_utf8(self.take(len)?).map_err(|e| undefined(what, e.valid_up_to() as u64))?;
        match text.chars().find(|c| c.is_control()) {
            Some(control) => Err(undefined(what, u32::from(control).into())),
            None => Ok(text),
        }
    }

    fn name(&mut self) -> Result<Name, Malformed> {
        let len = usize::from(self.u8()?);
        if len == 0 {
            return Err(undefined("length of a region's name", 0));
        }
        Ok(Name(self.text("region name", len)?.into()))
    }

    fn placement(&mut self) -> Result<Placement, Malformed> {
        let bits = self.u8()?;
        Placement::from_bits(bits).ok_or_else(|| undefined("placement", bits.into()))
    }

    fn extent(&mut self) -> Result<Extent, Malformed> {
        Ok(Extent {
            offset: self.u64()?,
            length: self.u64()?,
            va: self.u64()?,
            rkey: RKey(self.u32()?),
        })
    }

    fn region(&mut self) -> Result<Region, Malformed> {
        Ok(Region {
            name: self.name()?,
            bytes: self.u64()?,
            domain: Domain::parse(self.u8()?)?,
            placement: self.placement()?,
            read_only: match self.u8()? {
                0 => false,
                1 => true,
                other => return Err(undefined("read-only mark", other.into())),
            },
            transfer: self.u64()?,
            durable: self.u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(s: &str) -> Name {
        Name::new(s).unwrap()
    }

    fn region(s: &str) -> Region {
        Region {
            name: name(s),
            bytes: 1 << 40,
            domain: Domain::File,
            placement: Placement::GLOBAL | Placement::PERSISTENT,
            read_only: true,
            transfer: 77,
            durable: 4096,
        }
    }

    /// One of each type, in the order of their codes.
    fn each() -> Vec<Message> {
        let extent = |n: u64| Extent {
            offset: n << 20,
            length: 1 << 20,
            va: 0x7f00_0000_0000 + n,
            rkey: RKey(0xabcd_ef01),
        };
        vec![
            Message::Hello {
                version_min: 1,
                version_max: 3,
                client_nonce: [7; 32],
            },
            Message::Challenge {
                version: 1,
                server_nonce: [8; 32],
                server_proof: [9; 32],
            },
            Message::Proof {
                client_proof: [10; 32],
            },
            Message::Welcome {
                keepalive_ms: 5_000,
                mappings_max: 64,
            },
            Message::Map {
                region: name("Fotos 2024/März.tar"),
                access: Access::READ | Access::WRITE,
                offset: 4096,
                length: 0,
                transfer: 5,
            },
            Message::Mapped {
                mapping: 3,
                region_bytes: 2 << 20,
                domain: Domain::WholeSystem,
                placement: Placement::GLOBAL,
                extents: vec![extent(0), extent(1)],
            },
            Message::Unmap { mapping: 3 },
            Message::Unmapped,
            Message::Stat {
                region: name("a"),
                transfer: 5,
            },
            Message::Region(region("database.img")),
            Message::List,
            Message::Regions {
                total: 9,
                regions: vec![region("one"), region("two")],
            },
            Message::Checksum {
                region: name("one"),
                offset: 1,
                length: 2,
            },
            Message::Checksummed {
                crc: 0x1122_3344_5566_7788,
            },
            Message::Goodbye,
            Message::Error {
                code: ErrorCode::NoSuchRegion,
                text: "no region 'x': the server has one, two".into(),
            },
        ]
    }

    #[test]
    fn parse__inverts_emit() {
        for (at, message) in each().into_iter().enumerate() {
            let mut bytes = vec![0xee; 3];
            message.emit(at as u64 + 100, &mut bytes);
            assert_eq!(usize::from(be16(&bytes, 0)), at + 1, "every type occurs once");
            assert_eq!(Message::parse(&bytes), Ok((at as u64 + 100, message)));
        }
    }

    #[test]
    fn emit__stat_as_documented() {
        let mut bytes = Vec::new();
        let stat = Message::Stat {
            region: name("ab"),
            transfer: 0x1112,
        };
        stat.emit(0x0102_0304_0506_0708, &mut bytes);
        let (header, body) = bytes.split_at(HEADER_LEN);
        assert_eq!(header, [0, 9, 0, 1, 0, 0, 0, 27, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(body, [2, b'a', b'b', 0, 0, 0, 0, 0, 0, 0x11, 0x12]);
    }

    #[test]
    fn parse__truncated_at_every_byte() {
        for message in each() {
            let mut bytes = Vec::new();
            message.emit(1, &mut bytes);
            for len in 0..bytes.len() {
                assert!(Message::parse(&bytes[..len]).is_err(), "{message:?} cut to {len}");
                if len >= HEADER_LEN {
                    // The same with a length field that fits, so that the body's own checks are reached.
                    let mut cut = bytes[..len].to_vec();
                    cut[4..8].copy_from_slice(&(len as u32).to_be_bytes());
                    assert!(
                        Message::parse(&cut).is_err(),
                        "{message:?} cut to {len}, length field too"
                    );
                }
            }
        }
    }

    #[test]
    fn parse__bytes_after_the_end() {
        for message in each() {
            let mut bytes = Vec::new();
            message.emit(1, &mut bytes);
            bytes.push(0);
            assert!(Message::parse(&bytes).is_err());
            let len = bytes.len() as u32;
            bytes[4..8].copy_from_slice(&len.to_be_bytes());
            assert!(Message::parse(&bytes).is_err(), "{message:?}");
        }
    }

    #[test]
    fn parse__values_not_defined() {
        let broken = |message: &Message, at: usize, value: u8| {
            let mut bytes = Vec::new();
            message.emit(1, &mut bytes);
            bytes[at] = value;
            assert!(
                Message::parse(&bytes).is_err(),
                "{message:?} with {value:#x} at {at}"
            );
        };
        broken(&Message::Goodbye, 1, 17); // type
        broken(&Message::Goodbye, 1, 0);
        broken(&Message::Goodbye, 3, 2); // version
        let stat = Message::Stat {
            region: name("ab"),
            transfer: 0,
        };
        broken(&stat, 16, 0); // empty name
        broken(&stat, 17, 0xff); // not UTF-8
        broken(&stat, 17, 0x1b); // control character
        let map = Message::Map {
            region: name("a"),
            access: Access::READ,
            offset: 0,
            length: 0,
            transfer: 0,
        };
        broken(&map, 21, 4); // access
        let region = Message::Region(region("a"));
        broken(&region, 26, 5); // domain
        broken(&region, 27, 4); // placement
        broken(&region, 28, 2); // read-only mark
        broken(
            &Message::Error {
                code: ErrorCode::Io,
                text: String::new(),
            },
            17,
            10,
        );
    }

    #[test]
    fn mapped__at_most_extents_max() {
        let extent = Extent {
            offset: 0,
            length: 1,
            va: 2,
            rkey: RKey(3),
        };
        let message = Message::Mapped {
            mapping: 0,
            region_bytes: 0,
            domain: Domain::None,
            placement: Placement::empty(),
            extents: vec![extent; EXTENTS_MAX],
        };
        let mut bytes = Vec::new();
        message.emit(0, &mut bytes);
        assert!(bytes.len() <= MESSAGE_LEN_MAX && bytes.len() + Extent::LEN > MESSAGE_LEN_MAX);
        assert_eq!(Message::parse(&bytes), Ok((0, message)));
    }

    #[test]
    fn regions__takes_what_fits() {
        let long = "n".repeat(255);
        let message = Message::regions((0..40).map(|_| region(&long)));
        let mut bytes = Vec::new();
        message.emit(0, &mut bytes);
        let (_, Message::Regions { total, regions }) = Message::parse(&bytes).unwrap() else {
            panic!()
        };
        assert_eq!((total, regions.len()), (40, (4096 - 22) / 283));
    }

    #[test]
    fn error__text_is_cut_at_a_character() {
        let mut bytes = Vec::new();
        Message::Error {
            code: ErrorCode::Io,
            text: format!("a\n{}", "ü".repeat(4096)),
        }
        .emit(0, &mut bytes);
        let (_, Message::Error { text, .. }) = Message::parse(&bytes).unwrap() else {
            panic!()
        };
        assert!(
            text.starts_with("a ü") && bytes.len() == MESSAGE_LEN_MAX,
            "{}",
            bytes.len()
        );
    }

    #[test]
    fn name__limits() {
        assert!(
            Name::new("").is_none() && Name::new("a\u{7}").is_none() && Name::new(&"x".repeat(256)).is_none()
        );
        assert!(Name::new(&"x".repeat(255)).is_some());
    }
}
