//! Result of a run.

use std::fmt;

use rdmux_rnic::Counters;

use crate::Settings;
use crate::seen::{self, Seen};
use crate::world::{Carried, World};

/// Operations of one kind that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Number of operations.
    pub operations: u64,
    /// Bytes that they moved.
    pub bytes: u64,
}

/// Result of a run. The same settings give the same result: it holds no figure of a real clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Settings of the run.
    pub settings: Settings,
    /// First violation found; `None` when every property held.
    pub violation: Option<String>,
    /// Drawn: IPv4 or IPv6.
    pub address_family: &'static str,
    /// Drawn: path MTU in bytes.
    pub path_mtu: u32,
    /// Drawn: bytes in flight that each QP is allowed.
    pub window_bytes: u32,
    /// Drawn: one-way latency.
    pub latency_ns: u64,
    /// Drawn: whether packets travel in trains.
    pub trains: bool,
    /// Operations posted.
    pub posted: u64,
    /// Operations that succeeded, by the kinds of [`KINDS`].
    pub done: [Counted; 7],
    /// Receives that succeeded.
    pub received: u64,
    /// Operations that failed, as they had to.
    pub failed: u64,
    /// Virtual time that the run took.
    pub virtual_ns: u64,
    /// Events that the run took.
    pub steps: u64,
    /// Packets sent.
    pub packets: u64,
    /// Bytes of these.
    pub packet_bytes: u64,
    /// Packets lost.
    pub lost: u64,
    /// Packets duplicated.
    pub duplicated: u64,
    /// Packets reordered.
    pub reordered: u64,
    /// Packets corrupted.
    pub corrupted: u64,
    /// Times that the path between the hosts changed or broke.
    pub path_changes: u64,
    /// Packets retransmitted, by both devices.
    pub retransmitted: u64,
    /// Timeouts of the local ACK timer.
    pub timeouts: u64,
    /// Gaps reported by NAK.
    pub sequence_naks: u64,
    /// RNR NAKs.
    pub rnr_naks: u64,
    /// Requests that had been executed before.
    pub duplicate_requests: u64,
    /// Packets dropped as malformed or for a wrong ICRC.
    pub discarded: u64,
    /// WRITEs and READs that needed no packet.
    pub direct: u64,
    /// Times that the link of two hosts on one machine broke.
    pub links_broken: u64,
    /// Occurrences in the run, by name.
    pub seen: Seen,
}

/// Names of the kinds in [`Report::done`]; `LOCAL` are bindings, registrations and invalidations.
pub const KINDS: [&str; 7] = [
    "SEND",
    "WRITE",
    "READ",
    "FLUSH",
    "ATOMIC",
    "ATOMIC WRITE",
    "LOCAL",
];

impl Report {
    pub(crate) fn new(settings: &Settings) -> Report {
        Report {
            settings: *settings,
            violation: None,
            address_family: "",
            path_mtu: 0,
            window_bytes: 0,
            latency_ns: 0,
            trains: false,
            posted: 0,
            done: [Counted::default(); 7],
            received: 0,
            failed: 0,
            virtual_ns: 0,
            steps: 0,
            packets: 0,
            packet_bytes: 0,
            lost: 0,
            duplicated: 0,
            reordered: 0,
            corrupted: 0,
            path_changes: 0,
            retransmitted: 0,
            timeouts: 0,
            sequence_naks: 0,
            rnr_naks: 0,
            duplicate_requests: 0,
            discarded: 0,
            direct: 0,
            links_broken: 0,
            seen: Seen::default(),
        }
    }

    /// Returns the number of operations that succeeded.
    pub fn completed(&self) -> u32 {
        self.done.iter().map(|kind| kind.operations as u32).sum()
    }

    pub(crate) fn book(&mut self, kind: usize, bytes: u64) {
        self.done[kind].operations += 1;
        self.done[kind].bytes += bytes;
    }

    /// Fills in the state of a world at the end of its run.
    pub(crate) fn world(&mut self, world: &World) {
        self.virtual_ns = world.now.0;
        self.steps = world.steps;
        self.link(&world.carried);
        self.seen = world.seen.clone();
        world.tap.count(&mut self.seen);
        for host in &world.hosts {
            self.count(&host.rnic.counters());
            self.seen.counters(&host.rnic.counters());
        }
        if let Some(machine) = &world.machine {
            self.links_broken = machine.breaks;
            for _ in 0..machine.breaks {
                self.seen.happened(seen::LINK_BROKE);
            }
            for _ in 0..machine.half_way() {
                self.seen.happened(seen::ENDED_HALF_WAY);
            }
        }
    }

    fn link(&mut self, carried: &Carried) {
        self.packets = carried.packets;
        self.packet_bytes = carried.bytes;
        self.lost = carried.lost;
        self.duplicated = carried.duplicated;
        self.reordered = carried.reordered;
        self.corrupted = carried.corrupted;
        self.path_changes = carried.path_changes;
    }

    fn count(&mut self, counters: &Counters) {
        self.retransmitted += counters.retransmitted_packets;
        self.timeouts += counters.local_ack_timeout_err;
        self.sequence_naks += counters.packet_seq_err;
        self.rnr_naks += counters.rcvd_rnr_err;
        self.duplicate_requests += counters.duplicate_request;
        self.direct += counters.direct_requests;
        self.discarded += counters.malformed + counters.rx_icrc_encapsulated;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.settings;
        writeln!(f, "seed          {}", s.seed)?;
        writeln!(
            f,
            "faults        loss {} %, duplication {} %, reordering {} %, corruption {} %",
            s.loss_percent, s.dup_percent, s.reorder_percent, s.corrupt_percent
        )?;
        writeln!(
            f,
            "drawn         {}, path MTU {}, window {} B, latency {:.1} us, trains {}",
            self.address_family,
            self.path_mtu,
            self.window_bytes,
            self.latency_ns as f64 / 1e3,
            if self.trains { "on" } else { "off" }
        )?;
        writeln!(f, "QPs           {}", s.qps)?;
        writeln!(f)?;
        writeln!(f, "{:<12} {:>12} {:>16}", "operation", "completed", "bytes")?;
        for (name, kind) in KINDS.iter().zip(&self.done) {
            writeln!(f, "{name:<12} {:>12} {:>16}", kind.operations, kind.bytes)?;
        }
        let bytes: u64 = self.done.iter().map(|kind| kind.bytes).sum();
        writeln!(f, "{:<12} {:>12} {:>16}", "all", self.completed(), bytes)?;
        writeln!(f)?;
        for (name, value) in [
            ("packets", self.packets),
            ("  lost", self.lost),
            ("  duplicated", self.duplicated),
            ("  reordered", self.reordered),
            ("  corrupted", self.corrupted),
            ("  discarded", self.discarded),
            ("  sent again", self.retransmitted),
            ("path changes", self.path_changes),
            ("timeouts", self.timeouts),
            ("NAK sequence", self.sequence_naks),
            ("NAK RNR", self.rnr_naks),
            ("duplicates", self.duplicate_requests),
            ("direct", self.direct),
            ("links broken", self.links_broken),
        ] {
            writeln!(f, "{name:<14} {value:>10}")?;
        }
        writeln!(
            f,
            "{:<14} {:>10.3} ms",
            "virtual time",
            self.virtual_ns as f64 / 1e6
        )?;
        match &self.violation {
            None => writeln!(
                f,
                "\nEvery operation completed exactly once and in order; both memories equal the model."
            ),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}
