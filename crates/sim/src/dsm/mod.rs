//! Replay of recorded runs of programs on the distributed shared memory, with stated costs in place of those of the host.
//!
//! Begin with [`replay`]. It takes the traces of all nodes ([`rdmux_dsm::trace`]) and runs the shipped state machines of that many nodes under a virtual
//! clock: computing takes the recorded CPU time, and all else what [`Costs`] say. So the traces may come from nodes that shared CPUs, and the replay tells
//! what the run would have taken with a CPU for each node.
//!
//! # Model
//!
//! - A node has a thread that computes, and handles one thing at a time: messages, ends of READs, and the calls of its thread, in the order in which
//!   they come. Handling takes no time from computing. While the thread computes, handling begins late by [`Costs::late_ns`].
//! - A message arrives after the latency. A READ takes the latency twice, and the time of its bytes; data leaves a node one READ after the other.
//! - Units whose rights change at once are changed together.
//! - Threads touch what they have touched in the run that was recorded, in that order, and make the same calls. A touch of a unit to which the node had a
//!   right in that run is not in its trace: if the right is taken earlier in the replay, it costs nothing there.
//! - Logs of writes never run full.

mod engine;
mod node;

use rdmux_dsm::protocol::HomesError;
use rdmux_dsm::trace::Trace;

use self::engine::Engine;

/// Costs of all that a run does besides computing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Time of a message, or of the request of a READ, on its way, in nanoseconds.
    pub latency_ns: u64,
    /// Bytes that leave a node in a second. 0 stands for 1.
    pub bytes_per_s: u64,
    /// Time in which a node handles a message, in nanoseconds.
    pub message_ns: u64,
    /// Time in which a thread that waits for units hands its wish in and goes on later, in nanoseconds. The exception is in the recorded CPU time.
    pub fault_ns: u64,
    /// Time in which a node begins a READ and takes its end, in nanoseconds.
    pub read_ns: u64,
    /// Time in which a node changes the right of its program to a unit, in nanoseconds.
    pub protect_ns: u64,
    /// Time for each further unit that is changed together with it, in nanoseconds.
    pub protect_more_ns: u64,
    /// Bytes that a node copies or compares in a second. 0 stands for 1.
    pub memory_bytes_per_s: u64,
    /// Time after which a node whose thread computes begins to answer, in nanoseconds: 0 if it has a CPU for that.
    pub late_ns: u64,
}

impl Default for Costs {
    /// Returns the costs of nodes on one host that poll (docs/dsm.md, Replays): a message is 1.0 us, of which the way in shared memory is a fifth, the system
    /// call that installs a page 0.9 us, and a READ of 4 KiB 1.7 us with its way and its bytes. What else a read of a page takes there (8.4 us, of which 2.1
    /// without a home, and one change of a right at the home) is that of the thread.
    fn default() -> Costs {
        Costs {
            latency_ns: 200,
            bytes_per_s: 8_000_000_000,
            message_ns: 800,
            fault_ns: 1_700,
            read_ns: 800,
            protect_ns: 900,
            protect_more_ns: 100,
            memory_bytes_per_s: 5_000_000_000,
            late_ns: 0,
        }
    }
}

impl Costs {
    fn transfer_ns(&self, bytes: u64) -> u64 {
        nanoseconds(bytes, self.bytes_per_s)
    }

    fn copy_ns(&self, bytes: u64) -> u64 {
        nanoseconds(bytes, self.memory_bytes_per_s)
    }

    /// Returns the time in which the rights to some units are changed together.
    fn protects_ns(&self, units: usize) -> u64 {
        match units {
            0 => 0,
            _ => {
                let more = self.protect_more_ns.saturating_mul(units as u64 - 1);
                self.protect_ns.saturating_add(more)
            }
        }
    }
}

/// Returns the nanoseconds of some bytes, rounded up.
fn nanoseconds(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = (u128::from(bytes) * 1_000_000_000).div_ceil(bytes_per_s.max(1).into());
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// Counts of a node at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The time since the beginning, in nanoseconds.
    pub at_ns: u64,
    /// Units that it has read from other nodes, for its program.
    pub units_read: u64,
    /// Messages that it has sent.
    pub messages: u64,
}

/// Replay of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Marks of the program, each with the moment at which the node came to it, in their order.
    pub marks: Vec<(u32, Moment)>,
    /// The end of its trace, with all that it has done for others until the end of the run.
    pub end: Moment,
}

impl Report {
    /// Returns what the node has done between the first two marks of these numbers. `None` if it has not come to both.
    pub fn between(&self, first: u32, second: u32) -> Option<Moment> {
        let moment = |number| {
            let mark = self.marks.iter().find(|(it, _)| *it == number);
            mark.map(|(_, moment)| *moment)
        };
        let (from, to) = (moment(first)?, moment(second)?);
        Some(Moment {
            at_ns: to.at_ns.saturating_sub(from.at_ns),
            units_read: to.units_read.saturating_sub(from.units_read),
            messages: to.messages.saturating_sub(from.messages),
        })
    }
}

/// A run cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// There are no traces, or not those of all nodes.
    #[error("{0} traces of {1} nodes: give those of all nodes of one run")]
    Nodes(usize, u32),
    /// The homes of a region cannot be given.
    #[error("region {region}: {error}")]
    Homes {
        /// The region.
        region: u32,
        /// The reason.
        error: HomesError,
    },
    /// A step cannot be carried out.
    #[error("node {node}, line {line} of its trace: {problem}")]
    Step {
        /// The node.
        node: u32,
        /// Line of its trace.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// A node waits for ever.
    #[error(
        "node {node} waits for ever in line {line} of its trace: the program's calls depend on the order in which nodes come"
    )]
    Stuck {
        /// The node.
        node: u32,
        /// Line of its trace.
        line: usize,
    },
}

/// Replays a run from the traces of all its nodes, in their order, as [`Trace::read_all`] returns them. Returns a report of each node.
///
/// # Errors
/// The traces do not go together, or a call of them fails or never ends.
///
/// # Panics
/// If a step names a unit, a node or a thread that is not there. No step of [`Trace::read_all`] does.
pub fn replay(traces: &[Trace], costs: Costs) -> Result<Vec<Report>, ReplayError> {
    Engine::new(traces, costs)?.run()
}

#[cfg(test)]
mod tests;
