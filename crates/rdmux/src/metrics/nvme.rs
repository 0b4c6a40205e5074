//! Metrics of an NVMe target: of all of its subsystems together, since their names are for those who may use them.

use std::collections::BTreeMap;

use rdmux_nvmf::control::Control;
use rdmux_verbs::ledger::Entries;
use rdmux_wire::nvme::HealthLog;

use super::text::{Kind, Text};

/// Figures of a target.
#[derive(Debug, Default)]
pub(super) struct Figures {
    subsystems: usize,
    namespaces: usize,
    controllers: usize,
    queues: usize,
    counts: HealthLog,
    ledger: Option<Entries>,
    /// Counters of the offload engine, of all namespaces together.
    offload: Option<BTreeMap<&'static str, u64>>,
}

impl Figures {
    #[cfg(test)]
    pub(super) fn with_all() -> Figures {
        use rdmux_nvmf::backend::offload::OffloadCounter;
        use strum::VariantArray as _;

        Figures {
            ledger: Some(Entries::default()),
            offload: Some(
                OffloadCounter::VARIANTS
                    .iter()
                    .filter(|counter| counter.is_summed())
                    .map(|counter| (counter.name(), 0))
                    .collect(),
            ),
            ..Figures::default()
        }
    }

    pub(super) fn of(target: &Control) -> Figures {
        let mut figures = Figures {
            ledger: target.ledger(),
            ..Figures::default()
        };
        for subsystem in target.subsystems() {
            figures.subsystems += 1;
            figures.namespaces += subsystem.namespaces.len();
            let (sum, counts) = (&mut figures.counts, &subsystem.counts);
            sum.reads += counts.reads;
            sum.read_bytes += counts.read_bytes;
            sum.writes += counts.writes;
            sum.written_bytes += counts.written_bytes;
            sum.media_errors += counts.media_errors;
            for (counter, value) in subsystem
                .namespaces
                .iter()
                .filter_map(|own| own.offload.as_ref())
                .flatten()
            {
                if counter.is_summed() {
                    *figures
                        .offload
                        .get_or_insert_default()
                        .entry(counter.name())
                        .or_default() += value;
                }
            }
            // A reload may have removed it meanwhile.
            for controller in target.controllers(Some(&subsystem.nqn)).unwrap_or_default() {
                figures.controllers += 1;
                figures.queues += controller.queues;
            }
        }
        figures
    }

    pub(super) fn render(&self, text: &mut Text) {
        for (name, value, help) in [
            ("subsystems", self.subsystems, "Number of subsystems."),
            ("namespaces", self.namespaces, "Number of namespaces."),
            (
                "controllers",
                self.controllers,
                "Number of controllers, each of a host.",
            ),
            (
                "io_queues",
                self.queues,
                "Number of their I/O queues, each a connection.",
            ),
        ] {
            text.family(&format!("rdmux_nvme_{name}"), Kind::Gauge, help);
            text.sample("", &[], value);
        }
        let counts = &self.counts;
        for (name, read, write, help) in [
            (
                "commands",
                counts.reads,
                counts.writes,
                "Commands that read or write blocks.",
            ),
            (
                "bytes",
                counts.read_bytes,
                counts.written_bytes,
                "Bytes of these commands.",
            ),
        ] {
            text.family(&format!("rdmux_nvme_{name}_total"), Kind::Counter, help);
            text.sample("", &[("operation", "read")], read);
            text.sample("", &[("operation", "write")], write);
        }
        let help = "Commands that failed at the medium.";
        text.family("rdmux_nvme_media_errors_total", Kind::Counter, help);
        text.sample("", &[], counts.media_errors);
        for (name, value) in self.offload.iter().flatten() {
            let help = "Counter of the offload engine, as ConnectX has it.";
            text.family(&format!("rdmux_nvme_offload_{name}_total"), Kind::Counter, help);
            text.sample("", &[], *value);
        }
        if let Some(ledger) = &self.ledger {
            let help = "Bytes that RNICs and drives have moved, by link of the host.";
            text.family("rdmux_nvme_link_bytes_total", Kind::Counter, help);
            for (link, class, bytes) in ledger.iter() {
                text.sample("", &[("link", link.name()), ("class", class.name())], bytes);
            }
        }
    }
}
