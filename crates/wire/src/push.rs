//! Control messages of the push service: which client may map which region under which lease, and the uses of a mapping. The data
//! travels as RDMA READ, WRITE and FLUSH on the same connection, or, where the client has no mapping, in the Write and Read messages.
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
//! The client begins: Hello, Challenge, Proof, Welcome. Before Welcome the server answers nothing else. Hello, Challenge and Error keep
//! header version 1 for ever, so that any two versions can agree; all other messages have [`VERSION`].

use std::fmt;

use bitflags::bitflags;

pub use crate::roce::Placement;
use crate::{Malformed, RKey};

mod codec;

/// Bytes of the header.
pub const HEADER_LEN: usize = 16;
/// Maximum length of a message that carries no data.
pub const CONTROL_LEN_MAX: usize = 4096;
/// Maximum data bytes of a message.
pub const DATA_LEN_MAX: usize = 65536;
/// Maximum length of a message: the maximum data and the longest name.
pub const MESSAGE_LEN_MAX: usize = DATA_LEN_MAX + 512;
/// Version of the protocol described here.
pub const VERSION: u16 = 2;
/// Header version of the messages that every version understands.
const VERSION_FOREVER: u16 = 1;
/// Maximum number of extents in a [`Message::Mapped`].
pub const EXTENTS_MAX: usize = (CONTROL_LEN_MAX - HEADER_LEN - 21) / Extent::LEN;
/// Maximum number of changes in a [`Message::Notice`].
pub const CHANGES_MAX: usize = (CONTROL_LEN_MAX - HEADER_LEN - 2) / Change::LEN;

/// Name of a region: 1 to 255 bytes of UTF-8 without control characters, so that a terminal can show it unchanged.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

impl Name {
    /// Returns the name if its length and characters are valid.
    pub fn new(name: &str) -> Option<Name> {
        let fits = (1..=255).contains(&name.len()) && !name.chars().any(char::is_control);
        fits.then(|| Name(name.into()))
    }

    /// Returns the name.
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
    /// Access that a mapping gives to its client, or that it leaves to others.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// RDMA READ.
        const READ = 1;
        /// RDMA WRITE and FLUSH.
        const WRITE = 2;
    }
}

bitflags! {
    /// Methods by which a client can make its writes to a region durable. Without any, nothing in the region is durable.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Ways: u8 {
        /// A FLUSH with placement type persistence. IBTA Vol 1, A19.4.
        const FLUSH = 1;
        /// A [`Message::Flush`] behind the WRITEs on the same QP: the server's processor flushes and then answers.
        const SOFTWARE_FLUSH = 2;
        /// A READ behind the WRITE on the same QP: bytes are placed straight into the persistence domain, before the READ is answered.
        const READ_AFTER_WRITE = 4;
    }
}

/// Handling of a request that conflicts with another client's lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Conflict {
    /// The server breaks the lease: it notifies the holder, and the request waits until the holder releases the lease or its time is over.
    #[default]
    Break = 0,
    /// The request fails with [`ErrorCode::Busy`]; the holder is not notified.
    Fail = 1,
}

/// A change of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The mapping.
    pub mapping: u64,
    /// Kind of change.
    pub kind: ChangeKind,
    /// Time for which the mapping is still valid, in milliseconds.
    pub ms: u32,
}

impl Change {
    const LEN: usize = 13;
}

/// Kind of a [`Change`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChangeKind {
    /// The mapping's lease is being broken: the client must post nothing more, wait for requests in flight, and release the mapping.
    Break = 1,
    /// The mapping was revoked: its keys are invalid, and using them ends the connection. It can still be flushed, as after
    /// [`Message::Release`].
    Revoked = 2,
}

/// Persistence domain of a region: which bytes survive a loss of power, and whether they must leave the processor's caches for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Domain {
    /// Nothing survives: plain memory, or a file in memory.
    None = 0,
    /// A file: durable after fdatasync.
    File = 1,
    /// Persistent memory: durable once the bytes have left the caches (ADR).
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

/// A part of a region and the address at which RDMA accesses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: RKey,
}

impl Extent {
    const LEN: usize = 28;
}

/// The server's description of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its name.
    pub name: Name,
    /// Size in bytes.
    pub bytes: u64,
    /// Persistence domain.
    pub domain: Domain,
    /// Supported kinds of flush.
    pub placement: Placement,
    /// Set when nobody may write to the region.
    pub read_only: bool,
    /// The requested upload, or by default the upload that wrote last; 0 if there was none.
    pub transfer: u64,
    /// Durable bytes of that upload, contiguous from its first offset.
    pub durable: u64,
}

impl Region {
    fn wire_len(&self) -> usize {
        1 + self.name.0.len() + 27
    }
}

/// Reason for which a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// Client and server have no common protocol version.
    BadVersion = 1,
    /// The proof does not match the key.
    BadKey = 2,
    /// There is no region of that name.
    NoSuchRegion = 3,
    /// Offset and length extend past the region's end.
    OutOfRange = 4,
    /// The client requested write access to a read-only region.
    ReadOnly = 5,
    /// The region or the server does not support the request.
    NotSupported = 6,
    /// Too many mappings or connections, or another upload holds the region.
    Busy = 7,
    /// The file behind the region failed.
    Io = 8,
    /// A message is malformed or out of sequence.
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
    /// Client: the protocol versions it supports.
    Hello {
        /// Lowest version.
        version_min: u16,
        /// Highest version.
        version_max: u16,
        /// Random; the server proves with it that it has the key.
        client_nonce: [u8; 32],
    },
    /// Server: the chosen version and its half of the proof.
    Challenge {
        /// Version that both sides support.
        version: u16,
        /// Random; the client proves with it that it has the key.
        server_nonce: [u8; 32],
        /// Proof that the server has the key.
        server_proof: [u8; 32],
    },
    /// Client: its half of the proof, and its identity.
    Proof {
        /// Proof that the client has the key.
        client_proof: [u8; 32],
        /// Random, and the same whenever this client connects again; zeros for a client that never does.
        client: [u8; 16],
    },
    /// Server: the client may continue.
    Welcome {
        /// Time after which the server considers a silent client dead.
        keepalive_ms: u32,
        /// Mappings that one connection may hold.
        mappings_max: u32,
        /// Client messages that may be unanswered at a time.
        messages_max: u16,
        /// Total number of mappings of this client's earlier connections that were revoked.
        revoked: u32,
    },
    /// Client: map a region for direct access.
    Map {
        /// The region.
        region: Name,
        /// Access for this client.
        access: Access,
        /// Access left to others meanwhile.
        share: Access,
        /// Handling of a conflicting lease.
        conflict: Conflict,
        /// First byte.
        offset: u64,
        /// Length in bytes; 0 means to the end.
        length: u64,
        /// Upload that this mapping serves, so that it can be resumed; 0 for none.
        transfer: u64,
    },
    /// Server: the mapping.
    Mapped {
        /// Id of the mapping on this connection.
        mapping: u64,
        /// Size of the region.
        region_bytes: u64,
        /// Persistence domain of the region.
        domain: Domain,
        /// Supported kinds of flush.
        placement: Placement,
        /// Supported methods to make writes durable.
        ways: Ways,
        /// Mapped extents, at most [`EXTENTS_MAX`].
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
        /// Upload whose progress is requested; 0 for the upload that wrote last.
        transfer: u64,
    },
    /// Server: the requested region.
    Region(Region),
    /// Client: ask about all regions.
    List,
    /// Server: as many regions as fit into a message.
    Regions {
        /// Total number of regions.
        total: u32,
        /// The first of the regions; [`Message::regions`] builds the list.
        regions: Vec<Region>,
    },
    /// Client: ask for a checksum of the durable bytes.
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
    /// Either side: no more messages follow.
    Goodbye,
    /// Server: the request failed.
    Error {
        /// Reason as a code, for programs.
        code: ErrorCode,
        /// Reason as text, for people.
        text: String,
    },
    /// Client: make a range of a mapping durable. The server executes it after all requests posted before it on this connection. The
    /// mapping may have been released or revoked: the flush covers earlier writes through it.
    Flush {
        /// The mapping.
        mapping: u64,
        /// First byte, relative to the region.
        offset: u64,
        /// Bytes.
        length: u64,
        /// The kind of flush.
        placement: Placement,
    },
    /// Server: the whole range is flushed.
    Flushed,
    /// Client: write without a mapping.
    Write {
        /// The region.
        region: Name,
        /// First byte.
        offset: u64,
        /// Kind of flush before the answer; empty for no flush.
        placement: Placement,
        /// Handling of a conflicting lease.
        conflict: Conflict,
        /// Bytes to write, 1 to [`DATA_LEN_MAX`].
        bytes: Vec<u8>,
    },
    /// Server: the bytes are written and flushed.
    Written,
    /// Client: read without a mapping.
    Read {
        /// The region.
        region: Name,
        /// First byte.
        offset: u64,
        /// Length in bytes, 1 to [`DATA_LEN_MAX`].
        length: u32,
        /// Handling of a conflicting lease.
        conflict: Conflict,
    },
    /// Server: the bytes read.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Server, unsolicited: changes of mappings. Only one is outstanding at a time: the next follows when the client has acknowledged this.
    Notice {
        /// The changes, at most [`CHANGES_MAX`].
        changes: Vec<Change>,
    },
    /// Client: acknowledges the notice. It has no answer.
    Noticed,
    /// Client: give up a mapping's keys and its lease. Until the mapping is unmapped, [`Message::Flush`] can still flush writes through it.
    Release {
        /// The mapping.
        mapping: u64,
    },
    /// Server: the mapping's keys are no longer valid.
    Released,
}

impl Message {
    /// Returns a [`Message::Regions`] with as many of `all` as fit.
    pub fn regions(all: impl IntoIterator<Item = Region>) -> Message {
        let (mut total, mut regions, mut room) = (0, Vec::new(), CONTROL_LEN_MAX - HEADER_LEN - 6);
        for region in all {
            total += 1;
            match room.checked_sub(region.wire_len()) {
                Some(left) => {
                    room = left;
                    regions.push(region);
                }
                // Regions after one that does not fit are omitted too, so that the list has no holes.
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
