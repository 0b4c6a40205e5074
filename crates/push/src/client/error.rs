//! Errors of a client.

use std::io;
use std::net::SocketAddr;

use rdmux_runtime::{BufferError, SendError};
use rdmux_verbs::{ConnectError, CreateError, Fault, OpenError, PostError, RegisterError};
use rdmux_wire::push::{ErrorCode, Name};

use super::mapping::Way;
use crate::target::TargetError;

/// An error of a client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be reached.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The device did not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No server listens there.
    #[error("nobody serves on {0}: start `rdmux serve` there, or give the port that it listens on")]
    NobodyListens(SocketAddr),
    /// The connection could not be established.
    #[error("{peer}: {source}")]
    Connect {
        /// The server's address.
        peer: SocketAddr,
        /// The cause.
        source: ConnectError,
    },
    /// The keys differ.
    #[error("{0} has another key: give both sides the same key file with --key FILE")]
    WrongKey(SocketAddr),
    /// The server refused.
    #[error("{text}")]
    Refused {
        /// The reason, for programs.
        code: ErrorCode,
        /// The reason, for people.
        text: String,
    },
    /// The connection is over.
    #[error("connection to {peer} lost: {why}")]
    Lost {
        /// The server's address.
        peer: SocketAddr,
        /// The cause.
        why: String,
    },
    /// The server violates the protocol.
    #[error("{peer} violates the push protocol: {why}")]
    Protocol {
        /// The server's address.
        peer: SocketAddr,
        /// The violation.
        why: String,
    },
    /// The range lies outside of the mapping; nothing was sent.
    #[error("{length} bytes at {offset} are outside the mapping of {region}")]
    OutOfRange {
        /// The region.
        region: Name,
        /// First byte, in the region.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The mapping was made without the right; nothing was sent.
    #[error("the mapping of {region} does not have the right to {right}")]
    NoRight {
        /// The region.
        region: Name,
        /// The missing right.
        right: &'static str,
    },
    /// A persistent flush of a region that keeps nothing; nothing was sent.
    #[error(
        "region {region} does not survive a loss of power, so a persistent flush is refused: flush for visibility, or serve a file on a \
         disk"
    )]
    NotPersistent {
        /// The region.
        region: Name,
    },
    /// That way to durability is not offered; nothing was sent.
    #[error(
        "region {region} cannot be made durable by {way}: let the client choose the method, or use one of {offered}"
    )]
    NoWay {
        /// The region.
        region: Name,
        /// The way asked for.
        way: Way,
        /// The ways that are offered.
        offered: String,
    },
    /// Somebody else needed the range, and the mapping's lease is over; nothing was sent. Requests that were acknowledged
    /// before remain in effect; the mapping can still be flushed.
    #[error(
        "the mapping of {region} was revoked because somebody else needed the range: map it again, or use ordinary reads and writes"
    )]
    LeaseBroken {
        /// The region.
        region: Name,
    },
    /// The mapping belongs to an earlier connection; nothing was sent.
    #[error("the mapping of {region} ended with its connection: map it again")]
    MappingEnded {
        /// The region.
        region: Name,
    },
    /// An access to own memory failed.
    #[error("memory: {0}")]
    Memory(#[from] Fault),
    /// Own memory could not be registered.
    #[error("memory: {0}")]
    Register(#[from] RegisterError),
    /// The device has no room.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The queue pair did not accept a work request.
    #[error("work request: {0}")]
    Post(#[from] PostError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<SendError> for Error {
    fn from(error: SendError) -> Error {
        match error {
            SendError::TooLong => PostError::TooLong.into(),
            SendError::Memory(fault) => fault.into(),
            SendError::Post(error) => error.into(),
        }
    }
}

impl From<BufferError> for Error {
    fn from(error: BufferError) -> Error {
        match error {
            BufferError::Allocate(error) => error.into(),
            BufferError::Register(error) => error.into(),
        }
    }
}
