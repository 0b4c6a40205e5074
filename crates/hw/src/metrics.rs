//! Figures about the RNICs that this process has open, for exporters. There are figures alone: no payload, no names of files and no
//! peers.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use super::device::{DeviceInner, folder};
use super::resources;
use rdmux_verbs::sync::Mutex;

/// The devices of this process that were opened.
static DEVICES: Mutex<Vec<Weak<DeviceInner>>> = Mutex::new(Vec::new());

/// An RNIC that this process has open, once or more often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RnicMetrics {
    /// Its name, as `rdma link` shows it.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// Queue pairs that this process has on it.
    pub queue_pairs: usize,
    /// Memory regions.
    pub regions: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Counters of its driver, for all programs, under the driver's own names.
    pub counters: Vec<(String, u64)>,
}

/// Adds a device that was opened.
pub(super) fn enlist(device: &Arc<DeviceInner>) {
    let mut devices = DEVICES.lock();
    devices.retain(|known| known.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// Returns the RNICs that this process has open, in the order in which they were opened first.
pub fn devices() -> Vec<RnicMetrics> {
    let devices = DEVICES.lock().clone();
    let mut found: Vec<RnicMetrics> = Vec::new();
    for device in devices.iter().filter_map(Weak::upgrade) {
        let counts = resources::counts(&device);
        let [qps, mrs, cqs] = [counts.qps, counts.mrs, counts.cqs].map(|count| count as usize);
        let (name, port) = (device.context.name(), device.port);
        let known = found
            .iter_mut()
            .find(|known| known.device == name && known.port == port);
        if let Some(known) = known {
            known.queue_pairs += qps;
            known.regions += mrs;
            known.completion_queues += cqs;
        } else {
            found.push(RnicMetrics {
                device: name.to_owned(),
                port,
                queue_pairs: qps,
                regions: mrs,
                completion_queues: cqs,
                counters: counters_of(&device),
            });
        }
    }
    found
}

/// Returns the counters of a device's port.
pub(super) fn counters_of(device: &DeviceInner) -> Vec<(String, u64)> {
    let at: PathBuf = format!(
        "/sys/class/infiniband/{}/ports/{}",
        device.context.name(),
        device.port
    )
    .into();
    counters_at(&at)
}

/// Returns the counters in a port's folder: those of the specification, and the driver's.
fn counters_at(port: &Path) -> Vec<(String, u64)> {
    let mut found: Vec<(String, u64)> = Vec::new();
    for kind in ["counters", "hw_counters"] {
        let at = port.join(kind);
        for name in folder(&at) {
            let value = fs::read_to_string(at.join(&name)).ok();
            // `lifespan` is no counter: it is the time for which the driver keeps its figures.
            let value = value.filter(|_| name != "lifespan");
            if let Some(value) = value.and_then(|text| text.trim().parse().ok())
                && !found.iter().any(|(known, _)| *known == name)
            {
                found.push((name, value));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_at__numbers_of_both_folders() {
        let port = tempfile::tempdir().unwrap();
        for (kind, name, text) in [
            ("counters", "port_rcv_packets", "7\n"),
            ("counters", "port_rcv_data", "N/A (no PMA)\n"),
            ("hw_counters", "sent_pkts", "18446744073709551615\n"),
            ("hw_counters", "lifespan", "10\n"),
        ] {
            fs::create_dir_all(port.path().join(kind)).unwrap();
            fs::write(port.path().join(kind).join(name), text).unwrap();
        }
        let expected = [
            ("port_rcv_packets".to_owned(), 7),
            ("sent_pkts".to_owned(), u64::MAX),
        ];
        assert_eq!(counters_at(port.path()), expected);
        assert_eq!(counters_at(&port.path().join("none")), []);
    }
}
