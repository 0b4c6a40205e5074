//! Control messages of the push service: who may map which region, under which lease, and what a mapping is good for. The data
//! travels as RDMA READ, WRITE and FLUSH on the same connection, or, where there is no mapping for it, in Write and Read here.
//!
//! Each message is one RC SEND, big endian throughout. It has at most [`CONTROL_LEN_MAX`] bytes; Write and Bytes have at most
//! [`MESSAGE_LEN_MAX`].
//!
//! ```text
//!  0  type u16 | version u16 | length u32: bytes of the whole message, this header included
//!  8  request id u64: an answer repeats it; a Notice numbers itself, and Noticed repeats that
//! 16  body
//! ```
//!
//! `name` is a length byte, 1 to 255, and as many bytes of UTF-8 without control characters; `[n]` are n bytes.
//!
//! ```text
//! type                body
//!  1  Hello           version_min u16, version_max u16, client_nonce [32]
//!  2  Challenge       version u16, server_nonce [32], server_proof [32]
//!  3  Proof           client_proof [32], client [16]
//!  4  Welcome         keepalive_ms u32, mappings_max u32, messages_max u16, revoked u32
//!  5  Map             name, access u32, share u32, conflict u8, offset u64, length u64, transfer u64
//!  6  Mapped          mapping u64, region_bytes u64, domain u8, placement u8, ways u8,
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
//! 17  Flush           mapping u64, offset u64, length u64, placement u8
//! 18  Flushed
//! 19  Write           name, offset u64, placement u8, conflict u8, count u32, bytes [count]
//! 20  Written
//! 21  Read            name, offset u64, length u32, conflict u8
//! 22  Bytes           count u32, bytes [count]
//! 23  Notice          count u16, count times: mapping u64, kind u8, ms u32
//! 24  Noticed
//! 25  Release         mapping u64
//! 26  Released
//! ```
//!
//! The client speaks first: Hello, Challenge, Proof, Welcome; before Welcome nothing else is answered. Hello, Challenge and
//! Error have header version 1 for ever, so that any two versions can agree; all others have [`VERSION`].

use std::fmt;

use bitflags::bitflags;

pub use crate::roce::Placement;
use crate::{Malformed, RKey};

mod codec;

/// Bytes of the header.
pub const HEADER_LEN: usize = 16;
/// The longest message, of those that carry no data.
pub const CONTROL_LEN_MAX: usize = 4096;
/// The most bytes of data in a message.
pub const DATA_LEN_MAX: usize = 65536;
/// The longest message: one with so much data, and the longest name.
pub const MESSAGE_LEN_MAX: usize = DATA_LEN_MAX + 512;
/// Version of the protocol described here.
pub const VERSION: u16 = 2;
/// Header version of the messages that any two versions understand.
const VERSION_FOREVER: u16 = 1;
/// The most extents that fit into a [`Message::Mapped`].
pub const EXTENTS_MAX: usize = (CONTROL_LEN_MAX - HEADER_LEN - 21) / Extent::LEN;
/// The most changes that fit into a [`Message::Notice`].
pub const CHANGES_MAX: usize = (CONTROL_LEN_MAX - HEADER_LEN - 2) / Change::LEN;

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
    /// What a mapping is to be used for, or what others may do meanwhile.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// RDMA READ.
        const READ = 1;
        /// RDMA WRITE and FLUSH.
        const WRITE = 2;
    }
}

bitflags! {
    /// The ways by which a client can make durable what it wrote to a region. Without any, nothing there is durable.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Ways: u8 {
        /// A FLUSH with placement type persistence. IBTA Vol 1, A19.4.
        const FLUSH = 1;
        /// A [`Message::Flush`] behind the WRITEs on the same QP, to the server's processor, which flushes and then answers.
        const SOFTWARE_FLUSH = 2;
        /// A READ behind the WRITE on the same QP: bytes are placed straight into the persistence domain, and are there before
        /// a READ is answered.
        const READ_AFTER_WRITE = 4;
    }
}

/// What becomes of a request that a lease of somebody else's stands against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Conflict {
    /// The lease is broken: its holder is told, and the request waits until it has let go or its time is over.
    #[default]
    Break = 0,
    /// The request fails with [`ErrorCode::Busy`]; the holder hears nothing.
    Fail = 1,
}

/// What has happened to a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The mapping.
    pub mapping: u64,
    /// What.
    pub kind: ChangeKind,
    /// How long it is still good, milliseconds.
    pub ms: u32,
}

impl Change {
    const LEN: usize = 13;
}

/// See [`Change`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChangeKind {
    /// Its lease is being broken: post nothing more, wait for what is under way, and release it.
    Break = 1,
    /// It was revoked: its keys are invalid, and using them ends the connection. It can still be flushed, as after
    /// [`Message::Release`].
    Revoked = 2,
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
    /// The mapping was revoked or released.
    Revoked = 10,
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
            Revoked,
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
    /// Client: its half of the proof, and who it is.
    Proof {
        /// Proof that the client has the key.
        client_proof: [u8; 32],
        /// Random, the same whenever this client connects again; zeros for one that never does.
        client: [u8; 16],
    },
    /// Server: the client may go on.
    Welcome {
        /// A client that is silent for so long is taken for dead.
        keepalive_ms: u32,
        /// Mappings that one connection may hold.
        mappings_max: u32,
        /// Messages of the client's that may be unanswered at a time.
        messages_max: u16,
        /// Mappings of earlier connections of this client that were revoked, all of them.
        revoked: u32,
    },
    /// Client: map a region for direct access.
    Map {
        /// The region.
        region: Name,
        /// What for.
        access: Access,
        /// What others may do there meanwhile.
        share: Access,
        /// What if a lease stands against it.
        conflict: Conflict,
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
        /// The ways to durability that it offers.
        ways: Ways,
        /// What is mapped, at most [`EXTENTS_MAX`].
        extents: Vec<Extent>,
    },
    /// Client: end a mapping and forget it.
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
    /// Client: make a range of a mapping durable. It is acted on after all that was posted before it on this connection. The
    /// mapping may have been released or revoked: what was written through it before is meant.
    Flush {
        /// The mapping.
        mapping: u64,
        /// First byte, in the region.
        offset: u64,
        /// Bytes.
        length: u64,
        /// The kind of flush.
        placement: Placement,
    },
    /// Server: all of the range is where the flush was to bring it.
    Flushed,
    /// Client: write without a mapping.
    Write {
        /// The region.
        region: Name,
        /// First byte.
        offset: u64,
        /// The kind of flush before the answer; none for none.
        placement: Placement,
        /// What if a lease stands against it.
        conflict: Conflict,
        /// What to write, 1 to [`DATA_LEN_MAX`] bytes.
        bytes: Vec<u8>,
    },
    /// Server: it is written, and flushed.
    Written,
    /// Client: read without a mapping.
    Read {
        /// The region.
        region: Name,
        /// First byte.
        offset: u64,
        /// Bytes, 1 to [`DATA_LEN_MAX`].
        length: u32,
        /// What if a lease stands against it.
        conflict: Conflict,
    },
    /// Server: what was read.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Server, unasked: what has happened to mappings. There is one at a time: the next comes when this was taken.
    Notice {
        /// What has happened, at most [`CHANGES_MAX`].
        changes: Vec<Change>,
    },
    /// Client: the notice was taken. It has no answer.
    Noticed,
    /// Client: give up a mapping's keys and its lease. What was written through it can still be flushed by
    /// [`Message::Flush`], until it is unmapped.
    Release {
        /// The mapping.
        mapping: u64,
    },
    /// Server: the mapping's keys are no longer valid.
    Released,
}

impl Message {
    /// A [`Message::Regions`] with as many of `all` as fit.
    pub fn regions(all: impl IntoIterator<Item = Region>) -> Message {
        let (mut total, mut regions, mut room) = (0, Vec::new(), CONTROL_LEN_MAX - HEADER_LEN - 6);
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
}

fn undefined(what: &'static str, value: u64) -> Malformed {
    Malformed::Undefined { what, value }
}

#[cfg(test)]
mod tests;
