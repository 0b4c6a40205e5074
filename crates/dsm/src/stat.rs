//! Counts of a node, which other processes may read: `rdmux dsm stat`, and metrics.
//!
//! A node counts in a sealed file in memory, its [`Sheet`]. [`nodes`] finds the sheets of all nodes of this host by the descriptors of processes.
//! So a node answers nobody, the counts of one that is stopped can be read too, and a sheet is gone with its process, however that ends.
//!
//! A sheet consists of words of 64 bits: [`HEAD_WORDS`] about the node, a word for each [`NodeCounter`], [`PEER_WORDS`] for each node of the
//! cluster, and [`REGION_WORDS`] for each region that there may be. All but the counts of a kind are 0 where nothing is said.

mod read;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rdmux_memory::AnonymousMemory;
use rdmux_memory::mapping::sealed_file;

use crate::cluster::Cluster;
use crate::driver::REGIONS_MAX;
use crate::session::{Consistency, FaultMode};

pub use self::read::{Node, Peer, ReadError, Region, nodes};

/// Name of the file of a sheet.
const NAME: &str = "rdmux-dsm-stat";

/// The first word of a sheet that is complete.
const MAGIC: u64 = u64::from_le_bytes(*b"rdmuxdsm");
/// Changes with the words of a sheet.
const VERSION: u64 = 2;

/// Words about the node.
const HEAD_WORDS: usize = 10;
const VERSION_AT: usize = 1;
/// Number of the process, as it knows it.
const PROCESS_AT: usize = 2;
/// Number of the node.
const NODE_AT: usize = 3;
/// Number of nodes.
const NODES_AT: usize = 4;
/// Session, in two words.
const SESSION_AT: usize = 5;
/// Time at which the node has joined, in ns since 1970.
const JOINED_AT: usize = 7;
const EPOCH_AT: usize = 8;
/// Bytes of a page.
const PAGE_AT: usize = 9;

/// Words of a node of the cluster: its address as one of IPv6, in two words; its port; 1 if it is gone; its counts.
const PEER_WORDS: usize = 4 + PeerCounter::COUNT;
const PORT_AT: usize = 2;
const GONE_AT: usize = 3;
const PEER_COUNTS_AT: usize = 4;

/// Words of a region: its bytes, 0 if there is none; its mode of faults; its consistency; its counts.
const REGION_WORDS: usize = 3 + RegionCounter::COUNT;
const MODE_AT: usize = 1;
const CONSISTENCY_AT: usize = 2;
const REGION_COUNTS_AT: usize = 3;

/// Returns the words of a sheet in a cluster of so many nodes.
const fn words(nodes: usize) -> usize {
    region_at(nodes, REGIONS_MAX)
}

const fn peer_at(peer: usize) -> usize {
    HEAD_WORDS + NodeCounter::COUNT + peer * PEER_WORDS
}

const fn region_at(nodes: usize, region: usize) -> usize {
    peer_at(nodes) + region * REGION_WORDS
}

/// Unit of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Events.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Ns,
}

/// A count with its name, unit and meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Name, the same in JSON and, with a prefix, in metrics.
    pub name: &'static str,
    /// Unit of the value.
    pub unit: Unit,
    /// Meaning of the value.
    pub help: &'static str,
    /// The value.
    pub value: u64,
}

/// Declares the counters of a kind of objects, and the structure of their values.
macro_rules! counters {
    (
        $(#[doc = $doc:literal])+
        $counter:ident, $counts:ident {
            $(#[doc = $help:literal] $variant:ident, $field:ident, $unit:ident;)+
        }
    ) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $counter {
            $($variant,)+
        }

        impl $counter {
            const COUNT: usize = [$($counter::$variant,)+].len();
        }

        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $counts {
            $(#[doc = $help] pub $field: u64,)+
        }

        impl $counts {
            /// Returns all of them.
            pub fn iter(&self) -> impl Iterator<Item = Count> {
                [$(Count {
                    name: stringify!($field),
                    unit: Unit::$unit,
                    help: $help.trim_ascii_start(),
                    value: self.$field,
                },)+].into_iter()
            }

            /// Returns those of a sheet.
            fn of(value: impl Fn(usize) -> u64) -> $counts {
                $counts { $($field: value($counter::$variant as usize),)+ }
            }

            /// Returns what was counted since earlier.
            #[must_use]
            pub fn since(&self, earlier: &$counts) -> $counts {
                $counts { $($field: self.$field.wrapping_sub(earlier.$field),)+ }
            }
        }
    };
}

counters! {
    /// Counts of a node.
    NodeCounter, NodeStat {
        /// Messages, completions and page faults that threads of the program have handled, which wait or fault.
        Stage1Events, stage_1_events, Count;
        /// Messages, completions and page faults that the service thread has handled.
        Stage2Events, stage_2_events, Count;
        /// Locks that threads have asked for and got, or been refused.
        LockWaits, lock_waits, Count;
        /// Time that they took.
        LockWaitNs, lock_wait_ns, Ns;
        /// Barriers and reductions that threads have come to and left.
        BarrierWaits, barrier_waits, Count;
        /// Time that they took.
        BarrierWaitNs, barrier_wait_ns, Ns;
        /// Conditions that threads have waited for.
        ConditionWaits, condition_waits, Count;
        /// Time that they took, with that of taking the lock again.
        ConditionWaitNs, condition_wait_ns, Ns;
        /// Words that threads have read or changed.
        WordCalls, word_calls, Count;
        /// Time that they took.
        WordCallNs, word_call_ns, Ns;
    }
}

counters! {
    /// Counts of a region at one node.
    RegionCounter, Stat {
        /// Faults of reads, and wishes for pages to be read.
        ReadFaults, read_faults, Count;
        /// Faults of writes, and wishes for pages to be written, where the page could not be read either.
        WriteFaults, write_faults, Count;
        /// Faults of writes, and wishes for pages to be written, where the page could be read.
        UpgradeFaults, upgrade_faults, Count;
        /// Pages that were read from other nodes.
        Fetches, fetches, Count;
        /// Their bytes.
        FetchedBytes, fetched_bytes, Bytes;
        /// Requests to other nodes to give up pages of which this node is the home.
        InvalidationsSent, invalidations_sent, Count;
        /// Requests to other nodes to write no more to pages of which this node is the home.
        DowngradesSent, downgrades_sent, Count;
        /// Pages that this node has given up for others; with release consistency, copies that acquires have taken away.
        Invalidations, invalidations, Count;
        /// Pages that this node may only read any more, for others; with release consistency, pages that releases have protected.
        Downgrades, downgrades, Count;
        /// Messages sent.
        Messages, messages, Count;
        /// Releases of pages that were written, in a region with release consistency. Threads that come at the same time share one.
        Releases, releases, Count;
        /// Time that threads have waited for releases, which are those of all regions.
        ReleaseWaitNs, release_wait_ns, Ns;
        /// Acquires, in a region with release consistency. Threads that come at the same time share one.
        Acquires, acquires, Count;
        /// Time that threads have waited for acquires, which are those of all regions.
        AcquireWaitNs, acquire_wait_ns, Ns;
        /// Twins made: copies of pages before they were written, whose home is another node.
        Twins, twins, Count;
        /// Flushes that were sent to homes, each of neighbouring pages that differ from their twins.
        FlushesSent, flushes_sent, Count;
        /// Flushes of other nodes that this node has carried out as their home.
        Flushes, flushes, Count;
        /// Pages of such flushes that this node has read straight into its own pages.
        LandedUnits, landed_units, Count;
        /// Pages of such flushes that this node has read with their twins, to store the bytes that differ.
        MergedUnits, merged_units, Count;
        /// Bytes that this node has read for such flushes, those of twins included.
        FlushReadBytes, flush_read_bytes, Bytes;
        /// RDMA READs of the logs of other nodes: one of each log for an acquire, and two or three more if there is something new.
        LogReads, log_reads, Count;
        /// Their bytes.
        LogReadBytes, log_read_bytes, Bytes;
    }
}

counters! {
    /// Counts of what goes between two nodes.
    PeerCounter, PeerStat {
        /// Messages to the node.
        MessagesSent, messages_sent, Count;
        /// Messages of the node.
        MessagesReceived, messages_received, Count;
        /// Bells that were rung at the node, since it may sleep.
        BellsSent, bells_sent, Count;
        /// Bells that the node has rung here.
        BellsReceived, bells_received, Count;
        /// Pages that were read from the node.
        Fetches, fetches, Count;
        /// Their bytes.
        FetchedBytes, fetched_bytes, Bytes;
        /// Requests to the node to give up pages, or to write no more to them.
        RecallsSent, recalls_sent, Count;
        /// Such requests of the node.
        RecallsReceived, recalls_received, Count;
    }
}

/// The counts of this node. One thread at a time counts: the one that holds the driver.
#[derive(Debug)]
pub(crate) struct Sheet {
    memory: AnonymousMemory,
    nodes: usize,
}

impl Sheet {
    /// Makes the sheet of a node that has joined.
    ///
    /// # Errors
    /// There is no memory, or no descriptor.
    pub(crate) fn new(cluster: &Cluster) -> io::Result<Sheet> {
        let nodes = cluster.nodes().count();
        let pages = rustix::param::page_size();
        let bytes = (words(nodes) * 8).next_multiple_of(pages) as u64;
        let memory = AnonymousMemory::of_file(sealed_file(NAME, bytes)?, bytes)?;
        let sheet = Sheet { memory, nodes };
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let (session, _) = cluster.session.as_chunks::<8>();
        sheet.set(VERSION_AT, VERSION);
        sheet.set(PROCESS_AT, std::process::id().into());
        sheet.set(NODE_AT, cluster.own().number().into());
        sheet.set(NODES_AT, nodes as u64);
        for (at, part) in (SESSION_AT..).zip(session) {
            sheet.set(at, u64::from_le_bytes(*part));
        }
        sheet.set(JOINED_AT, since_1970.map_or(0, |time| time.as_nanos() as u64));
        sheet.set(PAGE_AT, rustix::param::page_size() as u64);
        for node in cluster.nodes() {
            let Some(address) = cluster.address(node) else {
                continue;
            };
            let at = peer_at(node.number() as usize);
            let [high, low] = address_words(address);
            sheet.set(at, high);
            sheet.set(at + 1, low);
            sheet.set(at + PORT_AT, address.port().into());
        }
        // A reader that sees this word sees all of that too.
        sheet.word(0).store(MAGIC, Ordering::Release);
        Ok(sheet)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.memory.mapping().double_word(index * 8)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Relaxed);
    }

    fn add(&self, index: usize, n: u64) {
        // Not one instruction, as nobody else writes.
        let word = self.word(index);
        word.store(word.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    pub(crate) fn count(&self, counter: NodeCounter, n: u64) {
        self.add(HEAD_WORDS + counter as usize, n);
    }

    /// Counts a call of a thread that has taken a time; the counter of the time follows that of the calls.
    pub(crate) fn count_call(&self, calls: NodeCounter, time: Duration) {
        let at = HEAD_WORDS + calls as usize;
        self.add(at, 1);
        self.add(at + 1, time.as_nanos() as u64);
    }

    pub(crate) fn count_peer(&self, peer: u32, counter: PeerCounter, n: u64) {
        if (peer as usize) < self.nodes {
            self.add(peer_at(peer as usize) + PEER_COUNTS_AT + counter as usize, n);
        }
    }

    pub(crate) fn count_region(&self, region: u32, counter: RegionCounter, n: u64) {
        if (region as usize) < REGIONS_MAX {
            let at = region_at(self.nodes, region as usize);
            self.add(at + REGION_COUNTS_AT + counter as usize, n);
        }
    }

    /// Raises the count of a region to that of events which have numbers from 1 on.
    pub(crate) fn raise_region(&self, region: u32, counter: RegionCounter, number: u64) {
        if (region as usize) < REGIONS_MAX {
            let at = region_at(self.nodes, region as usize) + REGION_COUNTS_AT + counter as usize;
            let counted = self.word(at).load(Ordering::Relaxed);
            self.set(at, counted.max(number));
        }
    }

    /// Adds a region.
    pub(crate) fn add_region(&self, region: u32, bytes: u64, mode: FaultMode, consistency: Consistency) {
        if (region as usize) < REGIONS_MAX {
            let at = region_at(self.nodes, region as usize);
            self.set(at + MODE_AT, mode as u64);
            self.set(at + CONSISTENCY_AT, consistency as u64);
            self.word(at).store(bytes, Ordering::Release);
        }
    }

    /// Returns the counts of a region.
    pub(crate) fn region(&self, region: u32) -> Stat {
        let at = region_at(self.nodes, region as usize) + REGION_COUNTS_AT;
        match (region as usize) < REGIONS_MAX {
            true => Stat::of(|counter| self.word(at + counter).load(Ordering::Relaxed)),
            false => Stat::default(),
        }
    }

    /// Notes that a node is gone since an epoch.
    pub(crate) fn end_peer(&self, peer: u32, epoch: u64) {
        if (peer as usize) < self.nodes {
            self.set(peer_at(peer as usize) + GONE_AT, 1);
        }
        self.set(EPOCH_AT, epoch);
    }
}

fn address_words(address: SocketAddr) -> [u64; 2] {
    let octets = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let number = u128::from_be_bytes(octets);
    [(number >> 64) as u64, number as u64]
}

#[cfg(test)]
mod tests;
