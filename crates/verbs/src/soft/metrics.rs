//! What is measured of the devices of this process, for those who export it. Figures alone: no payload, no names and no peers.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rdmux_rnic::{Counters, Histogram, Latencies};

use super::engine::Engine;
use super::faults::FaultCounts;

/// The engines of this process that were opened.
static ENGINES: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

/// What is measured of a device since it was opened. It is all of one moment.
#[derive(Clone, Debug)]
pub struct DeviceMetrics {
    /// Its address.
    pub address: IpAddr,
    /// The top byte of its QPNs, by which the devices of an address differ.
    pub slot: u8,
    /// What it counted.
    pub counters: Counters,
    /// Datagram trains that the system refused to send.
    pub send_errors: u64,
    /// Whether the network took packets the last time.
    pub is_up: bool,
    /// Queue pairs that it has.
    pub queue_pairs: usize,
    /// Memory regions that it has.
    pub regions: usize,
    /// Completion queues that it has.
    pub completion_queues: usize,
    /// How long its requests took.
    pub latencies: Latencies,
    /// How long flushes of its memory took that peers asked for by FLUSH, where they had to wait for a medium.
    pub flushes: Histogram,
    /// What faults did, where it was opened with some.
    pub faults: Option<FaultCounts>,
}

/// A device was opened.
pub(super) fn enlist(engine: &Arc<Engine>) {
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|known| known.strong_count() > 0);
    engines.push(Arc::downgrade(engine));
}

/// The devices that this process has open, in the order in which they were opened. Each is asked for a moment of its time, as a program
/// that posts to it does.
pub fn devices() -> Vec<DeviceMetrics> {
    let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let open = engines.iter().filter_map(Weak::upgrade);
    open.filter_map(|engine| engine.metrics()).collect()
}
