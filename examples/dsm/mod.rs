//! The common part of the programs on distributed shared memory: joining, the division of the work, the places of the data, times and reports.
#![allow(dead_code, reason = "not every program needs all of it")]

use std::cell::Cell;
use std::io::Write;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use rdmux_dsm::sync::Operation;
use rdmux_dsm::{
    Access, Array, Cluster, Consistency, Number, Placement, Region, RegionOptions, Session, Stat, Thread,
};

/// Nodes that have not joined within this time are given up.
const JOINING: Duration = Duration::from_secs(30);

/// Words of a page. On a system with larger pages only the homes are worse.
const PAGE_WORDS: usize = 4096 / 8;

/// The barrier of all threads.
const ALL: u64 = 0;

/// Number of the mark at the beginning of the parallel part, in traces. The next one is that at its end.
const BEGIN: u32 = 1;

/// The barrier of the nodes at the end.
const END: u64 = 1;

/// Options of all programs.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Threads of each node
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Order in which nodes see each other's writes: all in one (sequential), or between locks and barriers (release)
    #[arg(long, value_name = "KIND", default_value_t = Consistency::Sequential, value_parser = consistency())]
    consistency: Consistency,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

fn consistency() -> impl TypedValueParser<Value = Consistency> {
    let kinds = [Consistency::Sequential, Consistency::Release];
    PossibleValuesParser::new(kinds.map(<&str>::from)).try_map(|text| text.parse::<Consistency>())
}

/// Numbers in memory of any kind, shared or not.
pub(crate) trait Numbers<T> {
    fn get(&self, index: usize) -> T;
    fn set(&self, index: usize, value: T);
    /// Copies numbers from an index on.
    fn read(&self, start: usize, out: &mut [T]);
    /// Sets numbers from an index on.
    fn write(&self, start: usize, values: &[T]);
}

impl<T: Number> Numbers<T> for Array<'_, T> {
    #[inline]
    fn get(&self, index: usize) -> T {
        Array::get(self, index)
    }
    #[inline]
    fn set(&self, index: usize, value: T) {
        Array::set(self, index, value);
    }
    #[inline]
    fn read(&self, start: usize, out: &mut [T]) {
        Array::read(self, start, out);
    }
    #[inline]
    fn write(&self, start: usize, values: &[T]) {
        Array::write(self, start, values);
    }
}

impl<T: Copy> Numbers<T> for Vec<Cell<T>> {
    #[inline]
    fn get(&self, index: usize) -> T {
        self[index].get()
    }
    #[inline]
    fn set(&self, index: usize, value: T) {
        self[index].set(value);
    }
    #[inline]
    fn read(&self, start: usize, out: &mut [T]) {
        let cells = &self[start..start + out.len()];
        out.iter_mut()
            .zip(cells)
            .for_each(|(out, cell)| *out = cell.get());
    }
    #[inline]
    fn write(&self, start: usize, values: &[T]) {
        let cells = &self[start..start + values.len()];
        values
            .iter()
            .zip(cells)
            .for_each(|(value, cell)| cell.set(*value));
    }
}

/// Gets rights to numbers, for all of which it asks before it waits.
pub(crate) fn acquire<T: Number>(array: &Array<'_, T>, wanted: &[(Range<usize>, Access)]) -> Result<()> {
    for (numbers, access) in wanted {
        array.prefetch(numbers.clone(), *access);
    }
    for (numbers, access) in wanted {
        array.acquire(numbers.clone(), *access)?;
    }
    Ok(())
}

/// Returns the share of one of `parties` in some items: neighbours, in the order of the parties.
pub(crate) fn share(items: usize, parties: usize, party: usize) -> Range<usize> {
    party * items / parties..(party + 1) * items / parties
}

/// The places of items in the words of a region. Each node has its items in pages of its own, whose home it is, and each layer of them too.
pub(crate) struct Places {
    starts: Vec<usize>,
    layer: usize,
    words_of_node: usize,
    nodes: usize,
}

impl Places {
    /// Places items, each given by its node, of some words in some layers.
    pub(crate) fn new(nodes_of_items: &[usize], nodes: usize, words: usize, layers: usize) -> Places {
        let mut counts = vec![0; nodes];
        let mut numbers = Vec::new();
        for node in nodes_of_items {
            numbers.push(counts[*node]);
            counts[*node] += 1;
        }
        let most = counts.into_iter().max().unwrap_or(0);
        let layer = (most * words).next_multiple_of(PAGE_WORDS);
        let words_of_node = layers * layer;
        let start = |(node, number)| node * words_of_node + number * words;
        let starts = nodes_of_items.iter().zip(numbers).map(start).collect();
        Places {
            starts,
            layer,
            words_of_node,
            nodes,
        }
    }

    /// Returns the index of the first word of an item in a layer.
    #[inline]
    pub(crate) fn start(&self, layer: usize, item: usize) -> usize {
        self.starts[item] + layer * self.layer
    }

    /// Returns the number of all words.
    pub(crate) fn words(&self) -> usize {
        self.nodes * self.words_of_node
    }

    /// Returns numbers of these places in memory of this process alone.
    pub(crate) fn alone<T: Copy + Default>(&self) -> Vec<Cell<T>> {
        vec![Cell::new(T::default()); self.words()]
    }
}

/// This process.
pub(crate) struct Node {
    session: Session,
    options: Options,
}

impl Node {
    /// Joins the cluster of the environment.
    pub(crate) fn join(options: Options) -> Result<Node> {
        rdmux_soft::register();
        rdmux_hw::register();
        let session = Session::join(Cluster::of_environment()?, JOINING)?;
        Ok(Node { session, options })
    }

    pub(crate) fn number(&self) -> usize {
        self.session.node() as usize
    }

    pub(crate) fn nodes(&self) -> usize {
        self.session.nodes() as usize
    }

    /// Returns the number of threads of all nodes.
    pub(crate) fn parties(&self) -> usize {
        self.nodes() * self.threads()
    }

    /// Returns the number of threads of each node.
    pub(crate) fn threads(&self) -> usize {
        usize::from(self.options.threads)
    }

    /// Makes a region of some words, of which each node is the home of `row` pages in turn.
    pub(crate) fn region(&self, words: usize, row: usize) -> Result<Region<'_>> {
        let options = RegionOptions::new(8 * words as u64)?;
        let homes = Placement::InTurn(row as u64);
        let consistency = self.options.consistency;
        Ok(self.session.region(&RegionOptions {
            homes,
            consistency,
            ..options
        })?)
    }

    /// Makes a region for items at their places.
    pub(crate) fn region_of(&self, places: &Places) -> Result<Region<'_>> {
        self.region(places.words(), places.words_of_node / PAGE_WORDS)
    }

    /// Calls a function in each thread of this node. Returns what they return, in the order of the threads.
    pub(crate) fn run<R: Send>(&self, f: impl Fn(&mut Party<'_>) -> Result<R> + Sync) -> Result<Vec<R>> {
        let run = |number: u16| {
            let mut party = Party {
                number: self.number() * self.threads() + usize::from(number),
                parties: count(self.parties()),
                consistency: self.options.consistency,
                thread: self.session.thread(number)?,
            };
            f(&mut party)
        };
        let run = &run;
        std::thread::scope(|scope| {
            let start = |number| scope.spawn(move || run(number));
            let threads: Vec<_> = (0..self.options.threads).map(start).collect();
            let end = |thread: std::thread::ScopedJoinHandle<'_, Result<R>>| match thread.join() {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow!("a thread has panicked")),
            };
            threads.into_iter().map(end).collect()
        })
    }

    /// Prints the report of a correct run, and waits until all nodes have come so far.
    pub(crate) fn end(&self, report: &Report) -> Result<()> {
        let Report {
            shared,
            alone,
            result,
        } = report;
        let Timed { seconds, stat } = shared;
        let (node, (name, value)) = (self.number(), result);
        let text = match self.options.json {
            true => serde_json::json!({
                "node": node,
                "nodes": self.nodes(),
                "threads": self.threads(),
                "seconds": seconds,
                "alone_seconds": alone,
                "read_faults": stat.read_faults,
                "write_faults": stat.write_faults,
                "upgrade_faults": stat.upgrade_faults,
                "pages_read": stat.fetches,
                "invalidations": stat.invalidations,
                "downgrades": stat.downgrades,
                "messages": stat.messages,
                *name: value,
            })
            .to_string(),
            false => format!(
                "node {node}: {seconds:.3} s, alone {alone:.3} s, {} pages read, {} invalidations, {} messages, {name} {value}: correct",
                stat.fetches, stat.invalidations, stat.messages
            ),
        };
        writeln!(std::io::stdout(), "{text}")?;
        let mut thread = self.session.thread(0)?;
        thread.barrier(END, count(self.nodes()))?;
        Ok(())
    }
}

fn count(parties: usize) -> NonZeroU32 {
    NonZeroU32::new(parties as u32).unwrap_or(NonZeroU32::MIN)
}

/// A thread among those of all nodes.
pub(crate) struct Party<'a> {
    /// Number among all threads, first those of node 0.
    pub(crate) number: usize,
    pub(crate) thread: Thread<'a>,
    parties: NonZeroU32,
    consistency: Consistency,
}

impl Party<'_> {
    /// Waits for all threads of all nodes.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        Ok(self.thread.barrier(ALL, self.parties)?)
    }

    /// Has all threads get the rights that a function acquires, at the same time. Nodes that wait answer each other at once, nodes that compute do so
    /// when the system has scheduled their service threads. With release consistency a node reads a page without its home's help.
    pub(crate) fn prepare(&mut self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.consistency == Consistency::Release {
            return Ok(());
        }
        f()?;
        self.barrier()
    }

    /// Returns the sum of the values of all threads of all nodes, added in their order.
    pub(crate) fn sum(&mut self, value: f64) -> Result<f64> {
        Ok(self.thread.sum(ALL, self.parties, value)?)
    }

    /// Reduces the values of all threads of all nodes, which are 64 bits of the operation's type.
    pub(crate) fn reduce(&mut self, operation: Operation, value: u64) -> Result<u64> {
        Ok(self.thread.reduce(ALL, self.parties, operation, value)?)
    }

    /// Measures a function that all threads of all nodes call, from the time at which all begin to that at which all have ended.
    pub(crate) fn time(&mut self, region: &Region, f: impl FnOnce(&mut Self) -> Result<()>) -> Result<Timed> {
        self.barrier()?;
        let before = region.stat();
        // No thread may begin before all have taken the counts.
        self.barrier()?;
        self.thread.mark(BEGIN);
        let began = Instant::now();
        f(self)?;
        self.barrier()?;
        let seconds = began.elapsed().as_secs_f64();
        self.thread.mark(BEGIN + 1);
        let stat = region.stat().since(&before);
        self.barrier()?;
        Ok(Timed { seconds, stat })
    }
}

/// Cost of a part of a program at this node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    seconds: f64,
    stat: Stat,
}

/// Returns the seconds that a function takes.
pub(crate) fn seconds(f: impl FnOnce()) -> f64 {
    let began = Instant::now();
    f();
    began.elapsed().as_secs_f64()
}

/// The report of a correct run at this node.
pub(crate) struct Report {
    /// The run in shared memory.
    pub(crate) shared: Timed,
    /// Seconds of the sequential run in memory of this process.
    pub(crate) alone: f64,
    /// A name and a number that is the same on all nodes.
    pub(crate) result: (&'static str, f64),
}
