//! Metrics of the nodes of a shared memory that run on this host.

use rdmux_dsm::stat::{Count, Node, Unit};

use super::text::{Kind, Text};

/// Samples of one metric: the labels with their values, and the count.
type Samples = Vec<(Vec<(&'static str, String)>, Count)>;

pub(super) fn render(text: &mut Text, nodes: &[Node]) {
    let number = |node: &Node| ("node", node.number.to_string());
    text.family(
        "rdmux_dsm_epoch",
        Kind::Gauge,
        "Nodes of the cluster that are gone, as a node knows.",
    );
    for node in nodes {
        let (name, value) = number(node);
        text.sample("", &[(name, &value)], node.epoch);
    }
    text.family("rdmux_dsm_region_bytes", Kind::Gauge, "Bytes of a region.");
    for node in nodes {
        for region in &node.regions {
            let (name, value) = number(node);
            let labels = [(name, value.as_str()), ("region", &region.number.to_string())];
            text.sample("", &labels, region.bytes);
        }
    }
    let of_nodes = nodes
        .iter()
        .flat_map(|node| node.counts.iter().map(|count| (vec![number(node)], count)));
    counters(text, "", of_nodes.collect());
    let of_regions = nodes.iter().flat_map(|node| {
        node.regions.iter().flat_map(move |region| {
            let labels = vec![number(node), ("region", region.number.to_string())];
            region.counts.iter().map(move |count| (labels.clone(), count))
        })
    });
    counters(text, "", of_regions.collect());
    let of_peers = nodes.iter().flat_map(|node| {
        let peers = node.peers.iter().enumerate();
        let others = peers.filter(|(peer, _)| *peer != node.number as usize);
        others.flat_map(move |(peer, known)| {
            let labels = vec![number(node), ("peer", peer.to_string())];
            known.counts.iter().map(move |count| (labels.clone(), count))
        })
    });
    counters(text, "peer_", of_peers.collect());
}

/// Writes counters, those of one name together.
fn counters(text: &mut Text, prefix: &str, mut samples: Samples) {
    while let Some((_, first)) = samples.first() {
        let first = *first;
        let (these, others): (Samples, Samples) = samples
            .into_iter()
            .partition(|(_, count)| count.name == first.name);
        samples = others;
        text.family(&name_of(prefix, &first), Kind::Counter, first.help);
        for (labels, count) in these {
            let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, &**value)).collect();
            match count.unit {
                Unit::Ns => text.sample("", &labels, count.value as f64 * 1e-9),
                Unit::Count | Unit::Bytes => text.sample("", &labels, count.value),
            }
        }
    }
}

/// Returns the name of the metric for a count; times are in seconds.
fn name_of(prefix: &str, count: &Count) -> String {
    let name = match count.unit {
        Unit::Ns => format!("{}_seconds", count.name.trim_end_matches("_ns")),
        Unit::Count | Unit::Bytes => count.name.to_owned(),
    };
    format!("rdmux_dsm_{prefix}{name}_total")
}

#[cfg(test)]
pub(super) mod tests {
    use rdmux_dsm::stat::{NodeStat, Peer, PeerStat, Region};
    use rdmux_dsm::{Consistency, FaultMode, Stat};

    use super::*;

    /// Returns node 1 of 2, with a region.
    pub(in crate::metrics) fn node() -> Node {
        let peer = |port| Peer {
            address: ([127, 0, 0, 1], port).into(),
            is_gone: false,
            counts: PeerStat {
                messages_sent: 7,
                ..PeerStat::default()
            },
        };
        Node {
            pid: 1,
            number: 1,
            session: [3; 16],
            joined_ns: 0,
            epoch: 0,
            page_bytes: 4096,
            counts: NodeStat {
                barrier_wait_ns: 1_500_000_000,
                ..NodeStat::default()
            },
            regions: vec![Region {
                number: 2,
                bytes: 8192,
                mode: FaultMode::Inline,
                consistency: Consistency::Release,
                counts: Stat {
                    read_faults: 5,
                    acquire_wait_ns: 250_000_000,
                    log_read_bytes: 24,
                    ..Stat::default()
                },
            }],
            peers: vec![peer(7180), peer(7181)],
        }
    }

    #[test]
    fn render__counts_by_node_region_and_peer() {
        let mut text = Text::default();
        let other = Node { number: 0, ..node() };
        render(&mut text, &[other, node()]);
        let text = text.finish();
        for line in [
            "rdmux_dsm_epoch{node=\"1\"} 0",
            "rdmux_dsm_region_bytes{node=\"1\",region=\"2\"} 8192",
            "rdmux_dsm_barrier_wait_seconds_total{node=\"1\"} 1.5",
            "rdmux_dsm_read_faults_total{node=\"0\",region=\"2\"} 5",
            "rdmux_dsm_acquire_wait_seconds_total{node=\"1\",region=\"2\"} 0.25",
            "rdmux_dsm_log_read_bytes_total{node=\"1\",region=\"2\"} 24",
            "rdmux_dsm_peer_messages_sent_total{node=\"1\",peer=\"0\"} 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        let families: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let mut once = families.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), families.len(), "{text}");
    }
}
