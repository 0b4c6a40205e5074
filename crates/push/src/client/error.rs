//! What goes wrong at a client.

use std::io;
use std::net::SocketAddr;

use rdmux_verbs::{ConnectError, CreateError, Fault, OpenError, PostError, RegisterError};
use rdmux_wire::push::{ErrorCode, Name};

use super::mapping::Way;
use crate::target::TargetError;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be reached.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The device did not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nobody serves there.
    #[error("nobody serves on {0}: start `rdmux serve` there, or give the port that it listens on")]
    NobodyListens(SocketAddr),
    /// No connection.
    #[error("{peer}: {source}")]
    Connect {
        /// Where.
        peer: SocketAddr,
        /// Why.
        source: ConnectError,
    },
    /// The keys differ.
    #[error("{0} has another key: give both sides the same key file with --key FILE")]
    WrongKey(SocketAddr),
    /// The server said no.
    #[error("{text}")]
    Refused {
        /// Why, for programs.
        code: ErrorCode,
        /// Why, for people.
        text: String,
    },
    /// The connection is over.
    #[error("connection to {peer} lost: {why}")]
    Lost {
        /// Where.
        peer: SocketAddr,
        /// Why.
        why: String,
    },
    /// The server does not speak as it should.
    #[error("{peer} does not speak the push protocol as it should: {why}")]
    Protocol {
        /// Where.
        peer: SocketAddr,
        /// What is wrong.
        why: String,
    },
    /// Outside of a mapping; nothing was sent.
    #[error("{length} bytes at {offset} lie outside of the mapping of {region}")]
    OutOfRange {
        /// The region.
        region: Name,
        /// First byte, in the region.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The mapping was not made for this; nothing was sent.
    #[error("the mapping of {region} was made without the right to {right}")]
    NoRight {
        /// The region.
        region: Name,
        /// What for.
        right: &'static str,
    },
    /// A persistent flush of what keeps nothing; nothing was sent.
    #[error(
        "region {region} keeps nothing over a loss of power: a persistent flush is refused; flush for visibility, or serve a \
         file on a disk"
    )]
    NotPersistent {
        /// The region.
        region: Name,
    },
    /// That way to durability is not offered; nothing was sent.
    #[error(
        "region {region} cannot be made durable by {way}: leave the way to the client, or choose among {offered}"
    )]
    NoWay {
        /// The region.
        region: Name,
        /// The way asked for.
        way: Way,
        /// What is offered.
        offered: String,
    },
    /// Somebody else needed the range, and the mapping's lease is over; nothing was sent. What was acknowledged before holds;
    /// the mapping can still be flushed.
    #[error(
        "the mapping of {region} is over, because somebody else needed it: map it again, or use ordinary reads and writes"
    )]
    LeaseBroken {
        /// The region.
        region: Name,
    },
    /// The mapping belongs to an earlier connection; nothing was sent.
    #[error("the mapping of {region} ended with the connection that it was made on: map it again")]
    MappingEnded {
        /// The region.
        region: Name,
    },
    /// Own memory.
    #[error("memory: {0}")]
    Memory(#[from] Fault),
    /// Own memory.
    #[error("memory: {0}")]
    Register(#[from] RegisterError),
    /// The device has no room.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A work request was not taken.
    #[error("work request: {0}")]
    Post(#[from] PostError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}
