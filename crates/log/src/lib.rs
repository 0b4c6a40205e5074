//! An append-only log in N remote mappings, any minority of which may be lost: a record is acknowledged when a majority of the
//! replicas hold it durably. The replicas are regions of `rdmux serve`, which runs no code of the log: writers do all the work
//! by WRITE, FLUSH and READ.
//!
//! There is one writer at a time. A new writer acquires the mappings of a majority, which ends the previous writer's mappings
//! at the servers (the fence). It promises these replicas durably to its epoch, so that the old writer notices when it
//! reconnects. It reads them, takes the log whose last frame has the highest epoch (the longest of these), brings the other
//! replicas to it, and appends a frame that starts its epoch. When that frame is durable on a majority, everything before it is
//! durable there too, and no later writer can reach another conclusion. These are the rules of Raft's elections, with the fence
//! in place of votes.
//!
//! [`Writer`] implements this as a state machine without I/O or clock; [`Log`] drives it with [`Client`](rdmux_push::Client)s.
//! `format.rs` describes the layout of a replica.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod defect;
mod driver;
mod format;
mod link;
mod reader;
mod writer;

#[cfg(test)]
mod tests;

pub use driver::{Log, LogError, Options};
pub use format::VERSION;
pub use reader::{Read, View, agree, look, scan};
pub use writer::{Action, AppendError, Over, Settings, What, Writer, WriterEvent};

/// Maximum number of bytes in a record.
pub const RECORD_BYTES_MAX: u32 = 16 << 20;

/// A period in which one writer writes. Later epochs compare greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch {
    /// Number that increases with each writer.
    pub term: u64,
    /// The writer's own random number: it differs between two writers that choose the same term at once.
    pub writer: u64,
}

/// Returns the error text, for people, about a log that has another number of regions than were given.
pub fn count_words(has: usize, given: usize) -> String {
    let what = match given.checked_sub(has) {
        Some(over) => format!("{over} too many"),
        None if has - given == 1 => "1 is missing".into(),
        None => format!("{} are missing", has - given),
    };
    format!("has {has} regions but {given} were given: {what}")
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.term)
    }
}
