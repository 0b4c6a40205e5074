//! Metrics for Prometheus: `--metrics ADDR`. They hold figures only, since anybody who reaches the address can read them: no names of
//! regions, files or applications, no addresses of peers, no payload. Those of a node name its tenants.

mod dsm;
mod node;
mod nvme;
mod text;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use rdmux_dsm::{Cluster, stat};
use rdmux_hw::metrics::{RnicMetrics, devices as rnics};
use rdmux_nvmf::control::Control;
use rdmux_push::server::{Metrics, RequestKind, ServerMetrics};
use rdmux_share::node::snapshot::Snapshot;
use rdmux_soft::metrics::{DeviceMetrics, devices};
use rdmux_verbs::WcOpcode;

use strum::VariantArray;

use self::text::{Kind, Text};
use crate::http::{self, Answer, Request};
use crate::recent::Recent;

/// Port of the metrics where only an address is given.
pub(crate) const PORT_DEFAULT: u16 = 9791;

/// Time that a client has for sending its request and taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The server of this process, if it is one.
static SERVER: OnceLock<Metrics> = OnceLock::new();

/// The NVMe target of this process, if it is one.
static TARGET: OnceLock<Arc<Control>> = OnceLock::new();

/// The node of this process, if it is one.
static NODE: OnceLock<Arc<Recent>> = OnceLock::new();

/// The cluster whose nodes this process has started, if it has.
static CLUSTER: OnceLock<Cluster> = OnceLock::new();

/// Parses `ADDR`, `ADDR:PORT` or `PORT`; port 0 stands for any free port.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    http::parse_address(text, PORT_DEFAULT)
}

/// Serves metrics at this address until the process ends, and prints their URL to standard error.
pub(crate) fn serve_at(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("cannot serve metrics at {address} (choose another port with --metrics ADDR:PORT)")
    })?;
    let at = listener.local_addr().context("cannot serve metrics")?;
    http::serve(listener, "rdmux-metrics", PATIENCE, answer).context("cannot serve metrics")?;
    // Nobody may read standard error: ignore a failure.
    let _ = std::io::Write::write_fmt(
        &mut std::io::stderr(),
        format_args!("rdmux: metrics at http://{at}/metrics\n"),
    );
    Ok(())
}

fn answer(request: &Request<'_>) -> Answer {
    if request.path != "/metrics" {
        return Answer::text("404 Not Found", "metrics are at /metrics\n");
    }
    let node = NODE.get().and_then(|node| node.snapshot());
    let target = TARGET.get().map(|target| nvme::Figures::of(target));
    let nodes = CLUSTER.get().map(nodes_of).unwrap_or_default();
    Answer {
        content_type: "text/plain; version=0.0.4; charset=utf-8",
        body: render(
            &devices(),
            &rnics(),
            SERVER.get(),
            node.as_deref(),
            target.as_ref(),
            &nodes,
        )
        .into(),
        ..Answer::text("200 OK", "")
    }
}

/// Adds the figures of a server to the metrics.
pub(crate) fn show_server(metrics: Metrics) {
    // A process has at most one server.
    let _ = SERVER.set(metrics);
}

/// Adds the figures of an NVMe target to the metrics.
pub(crate) fn show_target(target: Arc<Control>) {
    // A process has at most one target.
    let _ = TARGET.set(target);
}

/// Adds the counts of the nodes of a shared memory to the metrics, of those that run on this host.
pub(crate) fn show_cluster(cluster: Cluster) {
    // A process starts the nodes of at most one cluster.
    let _ = CLUSTER.set(cluster);
}

fn nodes_of(cluster: &Cluster) -> Vec<stat::Node> {
    let nodes = stat::nodes().into_iter().flatten();
    nodes.filter(|node| node.is_of(cluster)).collect()
}

/// Adds the figures of a node to the metrics.
pub(crate) fn show_node(node: Arc<Recent>) {
    // A process has at most one node.
    let _ = NODE.set(node);
}

/// Counters with the meaning of a counter of node_exporter's infiniband collector, and their names there, which the collector takes from
/// mlx5's and the specification's.
const NODE_EXPORTER: [(&str, &str); 17] = [
    ("rcvd_pkts", "port_packets_received"),
    ("sent_pkts", "port_packets_transmitted"),
    ("rcvd_bytes", "port_data_received_bytes"),
    ("sent_bytes", "port_data_transmitted_bytes"),
    ("rx_icrc_encapsulated", "rx_icrc_encapsulated_errors"),
    ("duplicate_request", "duplicate_requests_packets"),
    ("out_of_sequence", "out_of_sequence_packets_received"),
    ("packet_seq_err", "packet_sequence_errors"),
    ("rcvd_rnr_err", "rnr_nak_retry_packets_received"),
    ("local_ack_timeout_err", "local_ack_timeout_errors"),
    (
        "np_ecn_marked_roce_packets",
        "np_ecn_marked_roce_packets_received",
    ),
    ("np_cnp_sent", "np_cnp_packets_sent"),
    ("rp_cnp_handled", "rp_cnp_packets_handled"),
    ("req_cqe_error", "req_cqes_errors"),
    ("req_cqe_flush_error", "req_cqes_flush_errors"),
    ("resp_cqe_error", "resp_cqes_errors"),
    ("resp_cqe_flush_error", "resp_cqes_flush_errors"),
];

/// Returns the name of the metric for a counter of devices.
fn counter_name(counter: &str) -> String {
    let known = NODE_EXPORTER.iter().find(|(name, _)| *name == counter);
    let name = known.map_or(counter, |(_, theirs)| theirs);
    format!("rdmux_{name}_total")
}

/// Requests whose latency is shown, with their labels.
const OPERATIONS: [(WcOpcode, &str); 10] = [
    (WcOpcode::Send, "send"),
    (WcOpcode::Write, "write"),
    (WcOpcode::Read, "read"),
    (WcOpcode::CompareSwap, "compare_swap"),
    (WcOpcode::FetchAdd, "fetch_add"),
    (WcOpcode::AtomicWrite, "atomic_write"),
    (WcOpcode::Flush, "flush"),
    (WcOpcode::BindWindow, "bind_mw"),
    (WcOpcode::Register, "reg_mr"),
    (WcOpcode::LocalInvalidate, "local_invalidate"),
];

/// Returns all metrics, in the text format of Prometheus.
fn render(
    devices: &[DeviceMetrics],
    rnics: &[RnicMetrics],
    server: Option<&Metrics>,
    node: Option<&Snapshot>,
    target: Option<&nvme::Figures>,
    dsm: &[stat::Node],
) -> String {
    let mut text = Text::default();
    text.family(
        "rdmux_build_info",
        Kind::Gauge,
        "Version of the program; always 1.",
    );
    text.sample("", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    // Without a device there are no samples, and a family without samples says nothing.
    if !devices.is_empty() {
        render_devices(&mut text, devices);
    }
    if !rnics.is_empty() {
        render_rnics(&mut text, rnics);
    }
    if let Some(server) = server {
        render_server(&mut text, &server.read());
    }
    if let Some(node) = node {
        node::render(&mut text, node);
    }
    if let Some(target) = target {
        target.render(&mut text);
    }
    if !dsm.is_empty() {
        dsm::render(&mut text, dsm);
    }
    text.finish()
}

/// Labels that identify a device's port, as node_exporter has them. `rdmux res` shows the port as `DEVICE/PORT`.
struct DevicePort {
    device: String,
    port: String,
}

impl DevicePort {
    fn of(metrics: &DeviceMetrics) -> DevicePort {
        DevicePort {
            device: metrics.address.to_string(),
            port: metrics.slot.to_string(),
        }
    }

    fn labels(&self) -> [(&str, &str); 2] {
        [("device", &self.device), ("port", &self.port)]
    }
}

fn render_devices(text: &mut Text, devices: &[DeviceMetrics]) {
    let ports: Vec<DevicePort> = devices.iter().map(DevicePort::of).collect();
    let each = || ports.iter().zip(devices);

    text.family("rdmux_info", Kind::Gauge, "A device; always 1.");
    for (port, _) in each() {
        let [device, number] = port.labels();
        let version = ("firmware_version", env!("CARGO_PKG_VERSION"));
        text.sample("", &[device, number, version, ("hca_type", "rdmux")], 1);
    }
    let gauge = |text: &mut Text, name, help, value: fn(&DeviceMetrics) -> u64| {
        text.family(name, Kind::Gauge, help);
        for (port, metrics) in each() {
            text.sample("", &port.labels(), value(metrics));
        }
    };
    let state = "State of the port (1: down, the network did not accept the last packets; 4: active).";
    gauge(text, "rdmux_state_id", state, |m| if m.is_up { 4 } else { 1 });
    let state = "Physical state of the port (2: polling; 5: link up).";
    gauge(text, "rdmux_physical_state_id", state, |m| {
        if m.is_up { 5 } else { 2 }
    });
    gauge(text, "rdmux_queue_pairs", "Number of queue pairs.", |m| {
        m.queue_pairs as u64
    });
    gauge(text, "rdmux_memory_regions", "Number of memory regions.", |m| {
        m.regions as u64
    });
    gauge(
        text,
        "rdmux_completion_queues",
        "Number of completion queues.",
        |m| m.completion_queues as u64,
    );
    gauge(
        text,
        "rdmux_pooled_completion_queues",
        "Number of completion queues that users share.",
        |m| m.pooled.queues,
    );
    gauge(
        text,
        "rdmux_pooled_completions",
        "Completions that the queues that users share hold.",
        |m| m.pooled.size,
    );
    gauge(
        text,
        "rdmux_pooled_completions_reserved",
        "Completions that users have reserved in queues that they share.",
        |m| m.pooled.used,
    );
    gauge(
        text,
        "rdmux_pooled_completion_queue_users",
        "Number of users of completion queues that are shared.",
        |m| m.pooled.users,
    );

    // Each device has the same counters, in the same order.
    for (i, (name, _, help)) in devices[0].counters.iter().enumerate() {
        text.family(&counter_name(name), Kind::Counter, help);
        for (port, metrics) in each() {
            let value = metrics.counters.iter().nth(i).map_or(0, |(_, value, _)| value);
            text.sample("", &port.labels(), value);
        }
    }
    let help = "Packets received with an error: malformed, or with a wrong ICRC.";
    text.family("rdmux_port_errors_received_total", Kind::Counter, help);
    for (port, metrics) in each() {
        let counters = &metrics.counters;
        text.sample(
            "",
            &port.labels(),
            counters.malformed + counters.rx_icrc_encapsulated,
        );
    }
    let help = "Datagram trains that the system refused to send.";
    text.family("rdmux_send_errors_total", Kind::Counter, help);
    for (port, metrics) in each() {
        text.sample("", &port.labels(), metrics.send_errors);
    }
    render_faults(text, &ports, devices);

    let help = "Time from posting a request on a reliable transport to its successful completion, except for requests executed without \
                packets at the post (rdmux_direct_requests_total).";
    text.family("rdmux_wr_latency_seconds", Kind::Histogram, help);
    for (port, metrics) in each() {
        let [device, number] = port.labels();
        for (opcode, name) in OPERATIONS {
            let histogram = &metrics.latencies[opcode];
            // Operations that the program has never made are left out: each has many buckets.
            if histogram.count() > 0 {
                text.histogram(&[device, number, ("operation", name)], histogram);
            }
        }
    }
    let help = "Duration of memory flushes for FLUSHes of peers that had to wait for a medium.";
    text.family("rdmux_flush_duration_seconds", Kind::Histogram, help);
    for (port, metrics) in each() {
        text.histogram(&port.labels(), &metrics.flushes);
    }
}

/// Writes the metrics of the host's RNICs that this process uses through provider `hw`.
fn render_rnics(text: &mut Text, rnics: &[RnicMetrics]) {
    let ports: Vec<DevicePort> = rnics
        .iter()
        .map(|rnic| DevicePort {
            device: rnic.device.clone(),
            port: rnic.port.to_string(),
        })
        .collect();
    let each = || ports.iter().zip(rnics);
    let mut gauge = |name, help, value: fn(&RnicMetrics) -> usize| {
        text.family(name, Kind::Gauge, help);
        for (port, rnic) in each() {
            text.sample("", &port.labels(), value(rnic));
        }
    };
    let help = "Number of this process's queue pairs on the RNIC.";
    gauge("rdmux_hw_queue_pairs", help, |rnic| rnic.queue_pairs);
    let help = "Number of this process's memory regions on the RNIC.";
    gauge("rdmux_hw_memory_regions", help, |rnic| rnic.regions);
    let help = "Number of this process's completion queues on the RNIC.";
    gauge("rdmux_hw_completion_queues", help, |rnic| rnic.completion_queues);
    if rnics.iter().all(|rnic| rnic.counters.is_empty()) {
        return;
    }
    let help = "Counters of the RNIC's driver, for all programs, under the driver's names.";
    text.family("rdmux_hw_counter_total", Kind::Counter, help);
    for (port, rnic) in each() {
        let [device, number] = port.labels();
        for (name, value) in &rnic.counters {
            text.sample("", &[device, number, ("counter", name)], value);
        }
    }
}

/// Writes the faults that devices injected on purpose (`--fault`).
fn render_faults(text: &mut Text, ports: &[DevicePort], devices: &[DeviceMetrics]) {
    let faulty = || {
        let both = ports.iter().zip(devices);
        both.filter_map(|(port, metrics)| Some((port, metrics.faults?)))
    };
    if faulty().next().is_none() {
        return;
    }
    text.family("rdmux_faults_total", Kind::Counter, "Injected faults, by kind.");
    for (port, counts) in faulty() {
        let [device, number] = port.labels();
        for (kind, count) in [
            ("lost", counts.lost),
            ("corrupted", counts.corrupted),
            ("duplicated", counts.duplicated),
            ("reordered", counts.reordered),
            ("qp_error", counts.qp_errors),
        ] {
            text.sample("", &[device, number, ("kind", kind)], count);
        }
    }
}

fn request_name(kind: RequestKind) -> &'static str {
    match kind {
        RequestKind::Map => "map",
        RequestKind::Unmap => "unmap",
        RequestKind::Release => "release",
        RequestKind::Flush => "flush",
        RequestKind::Write => "write",
        RequestKind::Read => "read",
        RequestKind::Checksum => "checksum",
        RequestKind::Stat => "stat",
    }
}

fn render_server(text: &mut Text, server: &ServerMetrics) {
    for (name, value, help) in [
        (
            "connections",
            server.connections,
            "Number of connections, including those of unauthenticated clients.",
        ),
        ("mappings", server.mappings, "Number of mappings in use."),
    ] {
        text.family(&format!("rdmux_push_{name}"), Kind::Gauge, help);
        text.sample("", &[], value as u64);
    }
    for (name, value, help) in [
        (
            "clients",
            server.connected,
            "Clients that connected and authenticated.",
        ),
        (
            "refused_connections",
            server.refused,
            "Connections that were refused.",
        ),
        (
            "ended_connections",
            server.ended,
            "Connections that ended, including those in their handshake.",
        ),
        ("mapped", server.mapped, "Mappings created."),
        (
            "lease_breaks",
            server.breaks,
            "Mappings whose holder was asked to release them.",
        ),
        (
            "lease_revocations",
            server.revoked,
            "Mappings revoked because their holder did not release them in time.",
        ),
        (
            "request_errors",
            server.errors,
            "Requests answered with an error.",
        ),
        (
            "message_bytes",
            server.message_bytes,
            "Bytes transferred by message, which the processor copied.",
        ),
    ] {
        text.family(&format!("rdmux_push_{name}_total"), Kind::Counter, help);
        text.sample("", &[], value);
    }
    let help = "Processor time of the server's threads for bytes by message.";
    text.family("rdmux_push_message_cpu_seconds_total", Kind::Counter, help);
    text.sample("", &[], server.message_cpu_ns as f64 * 1e-9);
    let help = "Time from a request by message to its successful answer; for map, including the wait for the release of other mappings.";
    text.family("rdmux_push_request_duration_seconds", Kind::Histogram, help);
    for &kind in RequestKind::VARIANTS {
        text.histogram(&[("request", request_name(kind))], server.requests(kind));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rdmux_verbs::Counters;

    use super::*;

    #[test]
    fn counter_name__each_is_one_of_its_own() {
        let counters = Counters::default();
        let names: Vec<&str> = counters.iter().map(|(name, ..)| name).collect();
        for (ours, _) in NODE_EXPORTER {
            assert!(names.contains(&ours), "there is no counter {ours}");
        }
        let metrics: BTreeSet<String> = names.iter().map(|name| counter_name(name)).collect();
        assert_eq!(metrics.len(), names.len());
        assert_eq!(counter_name("sent_pkts"), "rdmux_port_packets_transmitted_total");
        assert_eq!(counter_name("grants"), "rdmux_grants_total");
    }

    /// Checks that the documentation's table of counters has every counter, in the order of the code, with its meaning.
    #[test]
    fn docs__table_of_counters_is_complete() {
        let page = include_str!("../../../../docs/observability.md");
        let table = page.split("\n| counter | what |\n|---|---|\n").nth(1).unwrap();
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        let told: Vec<(&str, String)> = rows
            .map(|line| {
                let mut cells = line.trim_matches(['|', ' ']).splitn(2, " | ");
                let mut cell = || cells.next().unwrap();
                (cell().trim_matches('`'), cell().to_lowercase())
            })
            .collect();
        let counters = Counters::default();
        let counted: Vec<(&str, String)> = counters
            .iter()
            .map(|(name, _, meaning)| (name, meaning.trim_end_matches('.').to_lowercase()))
            .collect();
        assert_eq!(told, counted);
    }

    fn an_rnic() -> RnicMetrics {
        RnicMetrics {
            device: "rxe0".into(),
            port: 1,
            queue_pairs: 2,
            regions: 3,
            completion_queues: 1,
            counters: vec![("sent_pkts".into(), 7)],
        }
    }

    /// Checks that the documentation names every metric that is shown, by its name or by the rule for counters, and no other.
    #[test]
    fn docs__names_of_metrics_are_those_shown() {
        let page = include_str!("../../../../docs/metrics.md");
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = page
            .split(|c| !is_part(c))
            .filter(|word| word.starts_with("rdmux_"));
        let told: BTreeSet<&str> = words
            .map(|word| word.trim_end_matches("_bucket"))
            // Not names of metrics: a pattern, the prefix, and a crate.
            .filter(|word| !["rdmux_NAME_total", "rdmux_", "rdmux_soft"].contains(word))
            .collect();
        let address = "127.0.20.9".parse().unwrap();
        let options = rdmux_verbs::Options {
            faults: Some("loss=1%".parse().unwrap()),
            ..Default::default()
        };
        rdmux_soft::register();
        let _device = rdmux_verbs::Device::open_with(address, options).unwrap();
        let own: Vec<DeviceMetrics> = devices()
            .into_iter()
            .filter(|one| one.address == address)
            .collect();
        let server = Metrics::default();
        let text = render(
            &own,
            &[an_rnic()],
            Some(&server),
            Some(&node::tests::snapshot()),
            Some(&nvme::Figures::with_all()),
            &[dsm::tests::node()],
        );
        let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let shown: BTreeSet<&str> = families.map(|family| family.split(' ').next().unwrap()).collect();
        let missing: Vec<&&str> = told.difference(&shown).collect();
        assert!(
            missing.is_empty(),
            "docs/metrics.md has, but nothing shows: {missing:?}"
        );
        let counters = Counters::default();
        let by_rule: BTreeSet<String> = counters
            .iter()
            .filter(|(name, ..)| NODE_EXPORTER.iter().all(|(known, _)| known != name))
            .map(|(name, ..)| counter_name(name))
            .collect();
        let untold: Vec<&&str> = shown
            .difference(&told)
            .filter(|name| !by_rule.contains(**name))
            .collect();
        assert!(untold.is_empty(), "docs/metrics.md does not tell of {untold:?}");
    }

    #[test]
    fn parse_address__each_form() {
        for (text, address) in [
            ("127.0.0.2", "127.0.0.2:9791"),
            ("9000", "127.0.0.1:9000"),
            ("localhost", "127.0.0.1:9791"),
            ("localhost:1", "127.0.0.1:1"),
            ("0.0.0.0:0", "0.0.0.0:0"),
            ("::1", "[::1]:9791"),
            ("[::1]", "[::1]:9791"),
            ("[::]:80", "[::]:80"),
        ] {
            assert_eq!(parse_address(text), Ok(address.parse().unwrap()), "{text}");
        }
        for text in [
            "",
            "host",
            "127.0.0.1:",
            "127.0.0.1:x",
            "65536",
            "224.0.0.1",
            "[::1",
            "localhosts",
        ] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn render__without_devices() {
        let expected = format!(
            "# HELP rdmux_build_info Version of the program; always 1.\n# TYPE rdmux_build_info gauge\nrdmux_build_info{{version=\"{}\"}} \
             1\n",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(render(&[], &[], None, None, None, &[]), expected);
    }

    #[test]
    fn render__an_rnic() {
        let text = render(&[], &[an_rnic()], None, None, None, &[]);
        for line in [
            "rdmux_hw_queue_pairs{device=\"rxe0\",port=\"1\"} 2",
            "rdmux_hw_memory_regions{device=\"rxe0\",port=\"1\"} 3",
            "rdmux_hw_completion_queues{device=\"rxe0\",port=\"1\"} 1",
            "rdmux_hw_counter_total{device=\"rxe0\",port=\"1\",counter=\"sent_pkts\"} 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
    }
}
