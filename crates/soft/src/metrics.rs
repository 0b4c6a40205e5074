//! Metrics of the devices of this process, for programs that export them. They are figures only: no payload, no names and no peers.

use std::net::IpAddr;
use std::sync::{Arc, Weak};

use rdmux_rnic::{Counters, Histogram, Latencies};
use rdmux_verbs::FaultCounts;
use rdmux_verbs::sync::Mutex;

use super::engine::Engine;

/// Engines that this process has opened.
static ENGINES: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

/// Metrics of a device since it was opened, all of the same moment.
#[derive(Clone, Debug)]
pub struct DeviceMetrics {
    /// Address of the device.
    pub address: IpAddr,
    /// The top byte of its QPNs, by which the devices of an address differ.
    pub slot: u8,
    /// Counters of the device.
    pub counters: Counters,
    /// Datagram trains that the system refused to send.
    pub send_errors: u64,
    /// Set when the network accepted the packets that the device sent last.
    pub is_up: bool,
    /// Number of its queue pairs.
    pub queue_pairs: usize,
    /// Number of its memory regions.
    pub regions: usize,
    /// Number of its completion queues.
    pub completion_queues: usize,
    /// Use of those that users share.
    pub pooled: Pooled,
    /// Latencies of its requests.
    pub latencies: Latencies,
    /// Durations of the flushes of its memory that peers requested with FLUSH and that had to wait for a medium.
    pub flushes: Histogram,
    /// Counts of the injected faults, if it was opened with faults.
    pub faults: Option<FaultCounts>,
}

/// Use of the completion queues of a device that its users share ([`rdmux_verbs::CqPool`]), together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pooled {
    /// Number of queues.
    pub queues: u64,
    /// Completions that they hold.
    pub size: u64,
    /// Completions that their users have reserved.
    pub used: u64,
    /// Number of users.
    pub users: u64,
}

/// Adds the engine of a device that was opened.
pub(super) fn enlist(engine: &Arc<Engine>) {
    let mut engines = ENGINES.lock();
    engines.retain(|known| known.strong_count() > 0);
    engines.push(Arc::downgrade(engine));
}

/// Returns the metrics of the devices that this process has open, in the order in which they were opened. Each call locks the engine of
/// each device for a moment, as a program that posts to it does.
pub fn devices() -> Vec<DeviceMetrics> {
    let engines = ENGINES.lock().clone();
    let open = engines.iter().filter_map(Weak::upgrade);
    open.filter_map(|engine| engine.metrics()).collect()
}
