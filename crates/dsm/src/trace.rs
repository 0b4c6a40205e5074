//! Traces of runs: what each node has computed, touched and waited for. `rdmux-sim` replays a run from them, with other costs.
//!
//! A node that finds [`VARIABLE`] in its environment, the name of a folder, writes a file `node-K.trace` there when its [`Session`](crate::Session)
//! ends. A file is text. Its first line is `rdmux-dsm-trace 1 node K nodes N`, its last one `stop`, and each other one a [`Step`]: the CPU time in
//! nanoseconds that the thread has used since its last step, without that of the step itself, and an [`Event`]. CPU time is that of the thread
//! (`CLOCK_THREAD_CPUTIME_ID`), so nodes that share a CPU record what each would take alone.
//!
//! | words | event |
//! |---|---|
//! | `region NUMBER UNITS BYTES KIND PLACEMENT` | a region was made; `BYTES` of a unit; `KIND` is `sequential` or `release`; `PLACEMENT` is `in-turn N`, `hash`, `first-touch`, or `named UNIT NODE ...` |
//! | `begin THREAD`, `end THREAD` | a thread became known, or ended |
//! | `pages REGION FIRST COUNT ACCESS` | a fault, or another wait for rights to units; `ACCESS` is `read` or `write` |
//! | `prefetch REGION FIRST COUNT ACCESS` | the same without a wait |
//! | `release`, `acquire` | what release consistency does before and after a call, and a heap with it before a free and after an allocation |
//! | `exchange NODE` | a question to a node, and its answer |
//! | `barrier THREAD OBJECT PARTIES` and other calls | a call of [`sync`](crate::sync), with its fields in their order |
//! | `mark NUMBER` | [`Thread::mark`](crate::Thread::mark) |
//!
//! The steps of a node are in one order, that of their beginnings. Its threads must not run at the same time: see [`Trace::read_all`].

mod recorder;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::{FromStr, SplitAsciiWhitespace};

pub(crate) use self::recorder::Recorder;
use crate::cluster::NODES_MAX;
use crate::driver::REGIONS_MAX;
use crate::geometry::Geometry;
pub use crate::session::units_at_once;
use crate::sync::{Call, Mode, Operation, THREADS_MAX};
use crate::{Access, Consistency, Placement};

/// The environment variable with the folder of the traces.
pub const VARIABLE: &str = "RDMUX_DSM_TRACE";

/// First words of a trace, the second of which is the version.
const MAGIC: &str = "rdmux-dsm-trace 1";
/// Last line of a trace.
const STOP: &str = "stop";

/// The trace of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The node.
    pub node: u32,
    /// Nodes of the cluster.
    pub nodes: u32,
    /// Its steps.
    pub steps: Vec<Step>,
}

/// Computing, and the event at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// CPU time since the thread's last step, in nanoseconds.
    pub cpu_ns: u64,
    /// The event.
    pub event: Event,
}

/// An event at the end of computing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A region was made.
    Region(RegionMade),
    /// A thread became known under a number.
    Begin {
        /// The number.
        thread: u16,
    },
    /// A thread ended.
    End {
        /// Its number.
        thread: u16,
    },
    /// A thread asked for a right to units.
    Pages {
        /// Number of the region.
        region: u32,
        /// The first unit.
        first: u32,
        /// Number of units.
        count: u32,
        /// The access for which it needs the right.
        access: Access,
        /// It waited until it had the right to each of them once.
        waits: bool,
    },
    /// A thread released what its node had written.
    Release,
    /// A thread acquired what other nodes had released.
    Acquire,
    /// A thread asked a node something, and waited for the answer.
    Exchange {
        /// The other node.
        node: u32,
    },
    /// A call of synchronisation.
    Call {
        /// Number of the thread.
        thread: u16,
        /// The call.
        call: Call,
    },
    /// The program has come to a point that it has named.
    Mark(u32),
}

/// A region, as its nodes have made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionMade {
    /// Its number.
    pub number: u32,
    /// Number of its units.
    pub units: u32,
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Homes of the units.
    pub homes: Placement,
    /// Order of accesses of different nodes.
    pub consistency: Consistency,
}

/// A trace cannot be used, or not be written.
#[derive(Debug, thiserror::Error)]
#[error("trace {}: {problem}", path.display())]
pub struct TraceError {
    path: PathBuf,
    /// With the line, where it has one.
    problem: String,
}

impl TraceError {
    fn new(path: &Path, problem: impl fmt::Display) -> TraceError {
        TraceError {
            path: path.to_owned(),
            problem: problem.to_string(),
        }
    }
}

impl Trace {
    /// Returns the name of a node's file in the folder of the traces.
    pub fn file_name(node: u32) -> String {
        format!("node-{node}.trace")
    }

    /// Reads the traces of all nodes of a run from a folder.
    ///
    /// # Errors
    /// A file cannot be read, or is damaged; the nodes have not made the same regions; or threads of a node ran at the same time.
    pub fn read_all(folder: &Path) -> Result<Vec<Trace>, TraceError> {
        let first = Trace::read(&folder.join(Trace::file_name(0)))?;
        let nodes = first.nodes;
        let mut traces = vec![first];
        for node in 1..nodes {
            traces.push(Trace::read(&folder.join(Trace::file_name(node)))?);
        }
        for (node, trace) in traces.iter().enumerate() {
            let failed = |problem| TraceError::new(&folder.join(Trace::file_name(node as u32)), problem);
            if (trace.node as usize, trace.nodes) != (node, nodes) {
                return Err(failed(
                    "it is of another node or another run: record the run again",
                ));
            }
            if !trace.regions().eq(traces[0].regions()) {
                return Err(failed(
                    "its regions are not those of node 0: record the run again",
                ));
            }
            if trace.has_threads_at_a_time() {
                return Err(failed(
                    "several threads ran at a time: record a run with one thread a node",
                ));
            }
        }
        Ok(traces)
    }

    /// Reads a trace.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn read(path: &Path) -> Result<Trace, TraceError> {
        let text = std::fs::read_to_string(path).map_err(|error| TraceError::new(path, error))?;
        Trace::parse(&text).map_err(|problem| TraceError::new(path, problem))
    }

    /// Parses a trace. An error names the line.
    fn parse(text: &str) -> Result<Trace, String> {
        if text.is_empty() {
            return Err("it is empty: the program must drop its session".into());
        }
        let mut lines = text.lines().enumerate();
        let head = lines.next().map_or("", |(_, line)| line);
        let mut trace =
            Trace::parse_head(head).ok_or("line 1: not the first line of a trace of this version")?;
        // Units of each region.
        let mut regions = Vec::new();
        while let Some((at, line)) = lines.next() {
            if line == STOP {
                let behind = lines
                    .next()
                    .map(|(at, _)| format!("line {}: it is behind the end", at + 1));
                return behind.map_or(Ok(trace), Err);
            }
            let step = Step::parse(line).and_then(|step| {
                step.check(&mut regions, trace.nodes)?;
                Ok(step)
            });
            trace
                .steps
                .push(step.map_err(|problem| format!("line {}: {problem}", at + 1))?);
        }
        Err("it has no end: the program must drop its session, and the file system have room".into())
    }

    fn parse_head(line: &str) -> Option<Trace> {
        let mut words = line.strip_prefix(MAGIC)?.split_ascii_whitespace();
        let node = words.next().filter(|word| *word == "node").and(words.next())?;
        let nodes = words.next().filter(|word| *word == "nodes").and(words.next())?;
        let (node, nodes): (u32, u32) = (node.parse().ok()?, nodes.parse().ok()?);
        let is_possible = node < nodes && nodes as usize <= NODES_MAX && words.next().is_none();
        is_possible.then_some(Trace {
            node,
            nodes,
            steps: Vec::new(),
        })
    }

    /// Returns the regions that the node has made.
    pub fn regions(&self) -> impl Iterator<Item = &RegionMade> {
        self.steps.iter().filter_map(|step| match &step.event {
            Event::Region(region) => Some(region),
            _ => None,
        })
    }

    fn has_threads_at_a_time(&self) -> bool {
        let mut threads = BTreeSet::new();
        self.steps.iter().any(|step| {
            match step.event {
                Event::Begin { thread } => _ = threads.insert(thread),
                Event::End { thread } => _ = threads.remove(&thread),
                _ => {}
            }
            threads.len() > 1
        })
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{MAGIC} node {} nodes {}", self.node, self.nodes)?;
        for step in &self.steps {
            writeln!(f, "{step}")?;
        }
        writeln!(f, "{STOP}")
    }
}

impl Step {
    fn parse(line: &str) -> Result<Step, String> {
        let mut words = Words(line.split_ascii_whitespace());
        let cpu_ns = words.value()?;
        let event = Event::parse(&mut words)?;
        match words.0.next() {
            None => Ok(Step { cpu_ns, event }),
            Some(word) => Err(format!("{word:?} is too much")),
        }
    }

    /// Checks the numbers of a step. `regions` are the units of those before it.
    fn check(&self, regions: &mut Vec<u32>, nodes: u32) -> Result<(), &'static str> {
        match &self.event {
            Event::Region(region) => {
                let is_next = region.number as usize == regions.len() && regions.len() < REGIONS_MAX;
                let bytes = region.unit_bytes.checked_mul(region.units.into());
                let geometry = bytes.and_then(|bytes| Geometry::new(bytes, region.unit_bytes).ok());
                if !is_next || geometry.is_none_or(|it| it.units() != region.units) {
                    return Err("a region that cannot be");
                }
                regions.push(region.units);
            }
            Event::Pages {
                region, first, count, ..
            } => {
                let units = regions.get(*region as usize);
                let end = first.checked_add(*count);
                if units.is_none_or(|units| end.is_none_or(|end| end > *units)) {
                    return Err("units that no region has");
                }
            }
            Event::Exchange { node } if *node >= nodes => return Err("a node that is not there"),
            Event::Begin { thread } | Event::End { thread } | Event::Call { thread, .. }
                if *thread >= THREADS_MAX =>
            {
                return Err("a thread of a number that is too high");
            }
            _ => {}
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.cpu_ns, self.event)
    }
}

/// The words of a line that are not parsed.
struct Words<'a>(SplitAsciiWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| "it ends too early".into())
    }

    fn value<T: FromStr>(&mut self) -> Result<T, String> {
        let word = self.word()?;
        word.parse().map_err(|_| may_not_stand(word))
    }

    /// Parses one of some words.
    fn one_of<T: Copy>(&mut self, all: &[(&str, T)]) -> Result<T, String> {
        let word = self.word()?;
        let found = all.iter().find(|(name, _)| *name == word);
        found.map(|(_, value)| *value).ok_or_else(|| may_not_stand(word))
    }
}

fn may_not_stand(word: &str) -> String {
    format!("{word:?} may not stand here")
}

/// Returns the word for a value.
fn name<T: PartialEq>(all: &[(&'static str, T)], value: &T) -> &'static str {
    let found = all.iter().find(|(_, it)| it == value);
    found.map_or("", |(name, _)| *name)
}

const ACCESSES: [(&str, Access); 2] = [("read", Access::Read), ("write", Access::Write)];
const MODES: [(&str, Mode); 2] = [("shared", Mode::Shared), ("exclusive", Mode::Exclusive)];
const OPERATIONS: [(&str, Operation); 9] = [
    ("sum-i64", Operation::SumI64),
    ("min-i64", Operation::MinI64),
    ("max-i64", Operation::MaxI64),
    ("sum-u64", Operation::SumU64),
    ("min-u64", Operation::MinU64),
    ("max-u64", Operation::MaxU64),
    ("sum-f64", Operation::SumF64),
    ("min-f64", Operation::MinF64),
    ("max-f64", Operation::MaxF64),
];

impl Event {
    fn parse(words: &mut Words<'_>) -> Result<Event, String> {
        let word = words.word()?;
        Ok(match word {
            "region" => Event::Region(RegionMade {
                number: words.value()?,
                units: words.value()?,
                unit_bytes: words.value()?,
                consistency: words.value()?,
                homes: parse_placement(words)?,
            }),
            "begin" => Event::Begin {
                thread: words.value()?,
            },
            "end" => Event::End {
                thread: words.value()?,
            },
            "pages" | "prefetch" => Event::Pages {
                region: words.value()?,
                first: words.value()?,
                count: words.value()?,
                access: words.one_of(&ACCESSES)?,
                waits: word == "pages",
            },
            "release" => Event::Release,
            "acquire" => Event::Acquire,
            "exchange" => Event::Exchange { node: words.value()? },
            "mark" => Event::Mark(words.value()?),
            _ => Event::Call {
                thread: words.value()?,
                call: parse_call(word, words)?,
            },
        })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Region(region) => {
                let RegionMade {
                    number,
                    units,
                    unit_bytes,
                    homes,
                    consistency,
                } = region;
                write!(f, "region {number} {units} {unit_bytes} {consistency} ")?;
                show_placement(homes, f)
            }
            Event::Begin { thread } => write!(f, "begin {thread}"),
            Event::End { thread } => write!(f, "end {thread}"),
            Event::Pages {
                region,
                first,
                count,
                access,
                waits,
            } => {
                let word = if *waits { "pages" } else { "prefetch" };
                let access = name(&ACCESSES, access);
                write!(f, "{word} {region} {first} {count} {access}")
            }
            Event::Release => write!(f, "release"),
            Event::Acquire => write!(f, "acquire"),
            Event::Exchange { node } => write!(f, "exchange {node}"),
            Event::Call { thread, call } => show_call(*thread, call, f),
            Event::Mark(number) => write!(f, "mark {number}"),
        }
    }
}

fn parse_placement(words: &mut Words<'_>) -> Result<Placement, String> {
    let word = words.word()?;
    match word {
        "in-turn" => Ok(Placement::InTurn(words.value()?)),
        "hash" => Ok(Placement::Hash),
        "first-touch" => Ok(Placement::FirstTouch),
        "named" => {
            let mut ranges = Vec::new();
            while let Some(first) = words.0.next() {
                let first = first.parse().map_err(|_| format!("{first:?} is no unit"))?;
                ranges.push((first, words.value()?));
            }
            Ok(Placement::Named(ranges))
        }
        _ => Err(format!("{word:?} is no placement")),
    }
}

fn show_placement(homes: &Placement, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match homes {
        Placement::InTurn(row) => write!(f, "in-turn {row}"),
        Placement::Hash => write!(f, "hash"),
        Placement::FirstTouch => write!(f, "first-touch"),
        Placement::Named(ranges) => {
            write!(f, "named")?;
            ranges
                .iter()
                .try_for_each(|(first, node)| write!(f, " {first} {node}"))
        }
    }
}

fn parse_call(word: &str, words: &mut Words<'_>) -> Result<Call, String> {
    Ok(match word {
        "barrier" => Call::Barrier {
            object: words.value()?,
            parties: words.value::<NonZeroU32>()?,
        },
        "reduce" => Call::Reduce {
            object: words.value()?,
            parties: words.value::<NonZeroU32>()?,
            operation: words.one_of(&OPERATIONS)?,
            value: words.value()?,
        },
        "lock" => Call::Lock {
            object: words.value()?,
            mode: words.one_of(&MODES)?,
        },
        "unlock" => Call::Unlock {
            object: words.value()?,
            mode: words.one_of(&MODES)?,
        },
        "wait" => Call::Wait {
            condition: words.value()?,
            lock: words.value()?,
        },
        "signal" => Call::Signal {
            condition: words.value()?,
        },
        "broadcast" => Call::Broadcast {
            condition: words.value()?,
        },
        "fetch-add" => Call::FetchAdd {
            object: words.value()?,
            value: words.value()?,
        },
        "compare-swap" => Call::CompareSwap {
            object: words.value()?,
            expected: words.value()?,
            new: words.value()?,
        },
        "load" => Call::Load {
            object: words.value()?,
        },
        _ => return Err(format!("{word:?} is no event")),
    })
}

fn show_call(thread: u16, call: &Call, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match call {
        Call::Barrier { object, parties } => write!(f, "barrier {thread} {object} {parties}"),
        Call::Reduce {
            object,
            parties,
            operation,
            value,
        } => {
            let operation = name(&OPERATIONS, operation);
            write!(f, "reduce {thread} {object} {parties} {operation} {value}")
        }
        Call::Lock { object, mode } => write!(f, "lock {thread} {object} {}", name(&MODES, mode)),
        Call::Unlock { object, mode } => write!(f, "unlock {thread} {object} {}", name(&MODES, mode)),
        Call::Wait { condition, lock } => write!(f, "wait {thread} {condition} {lock}"),
        Call::Signal { condition } => write!(f, "signal {thread} {condition}"),
        Call::Broadcast { condition } => write!(f, "broadcast {thread} {condition}"),
        Call::FetchAdd { object, value } => write!(f, "fetch-add {thread} {object} {value}"),
        Call::CompareSwap {
            object,
            expected,
            new,
        } => write!(f, "compare-swap {thread} {object} {expected} {new}"),
        Call::Load { object } => write!(f, "load {thread} {object}"),
    }
}

#[cfg(test)]
mod tests;
