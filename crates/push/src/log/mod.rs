//! An append-only log in N remote mappings, of which any minority may be lost: a record is acknowledged when a majority of the
//! replicas hold it durably. The replicas are regions of `rdmux serve`, memory that runs no code of the log's: writers do
//! it all by WRITE, FLUSH and READ.
//!
//! There is one writer at a time. A new one takes the mappings of a majority for itself, which ends those of the writer before
//! at the servers (that is the fence), promises them durably to its epoch (so that the old one notices when it
//! comes back), reads what they hold, takes the log whose last frame has the highest epoch, the longest of these, brings the
//! others to it, and appends a frame that starts its epoch. When that is durable on a majority, all before it is too, and
//! nobody can come to another conclusion any more. These are the rules of Raft's elections, with the fence in place of votes.
//!
//! [`Writer`] is that as a state machine, without I/O and clock; [`Log`] drives it over [`Client`](crate::Client)s. `format.rs`
//! says what stands in a replica.

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
pub use writer::{Action, AppendError, Event, Over, Settings, What, Writer};

/// The most bytes of a record.
pub const RECORD_BYTES_MAX: u32 = 16 << 20;

/// A time in which one writer writes. Later ones are greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch {
    /// Counts writers.
    pub term: u64,
    /// The writer's own random number: two that choose a term at once differ.
    pub writer: u64,
}

/// What is wrong with the regions given of a log that has another number of them, for people.
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
