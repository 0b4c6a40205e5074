//! Metrics of a node: of each tenant and of the queue pairs that connections share. They name tenants, and neither applications nor peers.

use std::collections::BTreeMap;

use rdmux_share::node::snapshot::{Snapshot, Tenant};

use super::text::{Kind, Text};

/// Connections and bytes of shared queue pairs.
#[derive(Default)]
struct Shared {
    queue_pairs: u64,
    connections: u64,
    in_flight_bytes: u64,
    window_bytes: u64,
}

pub(super) fn render(text: &mut Text, snapshot: &Snapshot) {
    let address = snapshot.node.address.to_string();
    let device = ("device", address.as_str());
    let tenants = &snapshot.tenants;
    let mut each = |name: &str, kind, help, value: &dyn Fn(&Tenant) -> Option<f64>| {
        // A family without samples says nothing.
        let values = tenants.iter().filter_map(|tenant| Some((tenant, value(tenant)?)));
        let values: Vec<_> = values.collect();
        if !values.is_empty() {
            text.family(&format!("rdmux_node_tenant_{name}"), kind, help);
        }
        for (tenant, value) in values {
            text.sample("", &[device, ("tenant", &tenant.name)], value);
        }
    };
    let queue_pairs = |tenant: &Tenant| {
        let own = snapshot.applications.iter();
        let own = own.filter(|application| application.tenant == tenant.name);
        own.map(|application| u64::from(application.queue_pairs))
            .sum::<u64>() as f64
    };
    let bytes_per_second = |bps: Option<u64>| bps.map(|bps| bps as f64 / 8.0);
    each(
        "applications",
        Kind::Gauge,
        "Number of the tenant's applications.",
        &|tenant| Some(tenant.applications.into()),
    );
    each(
        "queue_pairs",
        Kind::Gauge,
        "Number of their queue pairs.",
        &|tenant| Some(queue_pairs(tenant)),
    );
    each(
        "weight",
        Kind::Gauge,
        "Part of what guaranteed rates leave, in proportion to others; only with a configuration.",
        &|tenant| tenant.weight.map(f64::from),
    );
    each(
        "rate_bytes_per_second",
        Kind::Gauge,
        "Rate that the tenant has before others exceed theirs, if it has one.",
        &|tenant| bytes_per_second(tenant.rate_bps),
    );
    each(
        "ceiling_bytes_per_second",
        Kind::Gauge,
        "Rate that the tenant never exceeds, if it has one.",
        &|tenant| bytes_per_second(tenant.ceiling_bps),
    );
    each(
        "waiting_requests",
        Kind::Gauge,
        "Requests of send queues that are not complete.",
        &|tenant| Some(tenant.counts.waiting_requests as f64),
    );
    each(
        "waiting_bytes",
        Kind::Gauge,
        "Bytes of their messages.",
        &|tenant| Some(tenant.counts.waiting_bytes as f64),
    );
    each(
        "requests_total",
        Kind::Counter,
        "Requests of send queues that have succeeded.",
        &|tenant| Some(tenant.counts.requests as f64),
    );
    each(
        "bytes_total",
        Kind::Counter,
        "Bytes of their messages: sent by WRITEs and SENDs, received by READs.",
        &|tenant| Some(tenant.counts.bytes as f64),
    );
    each(
        "receives_total",
        Kind::Counter,
        "Receives that have completed with a message.",
        &|tenant| Some(tenant.counts.receives as f64),
    );
    each(
        "received_bytes_total",
        Kind::Counter,
        "Bytes of these messages.",
        &|tenant| Some(tenant.counts.received_bytes as f64),
    );
    each(
        "errors_total",
        Kind::Counter,
        "Requests and receives that have ended with an error, those flushed included.",
        &|tenant| Some(tenant.counts.errors as f64),
    );
    let help = "Time from the node's taking of a request to its successful completion, of requests that ask for one.";
    text.family("rdmux_node_tenant_request_latency_seconds", Kind::Histogram, help);
    for tenant in tenants {
        text.histogram(&[device, ("tenant", &tenant.name)], &tenant.counts.latency);
    }
    render_shared(text, device, snapshot);
}

fn render_shared(text: &mut Text, device: (&str, &str), snapshot: &Snapshot) {
    let mut all: BTreeMap<(&str, u8), Shared> = BTreeMap::new();
    for one in &snapshot.shared_qps {
        let shared = all.entry((&one.tenant, one.class)).or_default();
        shared.queue_pairs += 1;
        shared.connections += u64::from(one.connections);
        shared.in_flight_bytes += one.in_flight_bytes;
        shared.window_bytes += one.window_bytes;
    }
    if all.is_empty() {
        return;
    }
    let mut gauge = |name: &str, help, value: fn(&Shared) -> u64| {
        text.family(&format!("rdmux_node_shared_{name}"), Kind::Gauge, help);
        for ((tenant, class), shared) in &all {
            let class = class.to_string();
            text.sample(
                "",
                &[device, ("tenant", tenant), ("class", &class)],
                value(shared),
            );
        }
    };
    gauge(
        "queue_pairs",
        "Number of queue pairs that connections of a tenant and class share.",
        |shared| shared.queue_pairs,
    );
    gauge(
        "connections",
        "Number of connections on these queue pairs.",
        |shared| shared.connections,
    );
    gauge(
        "in_flight_bytes",
        "Bytes in flight on these queue pairs.",
        |shared| shared.in_flight_bytes,
    );
    gauge(
        "window_bytes",
        "Bytes that may be in flight on these queue pairs.",
        |shared| shared.window_bytes,
    );
}

#[cfg(test)]
pub(super) mod tests {
    use rdmux_share::node::snapshot::{Application, Counts, NodeState, SharedQp};

    use super::*;

    /// Two tenants: one with everything, and one that has nothing.
    pub(in crate::metrics) fn snapshot() -> Snapshot {
        let mut counts = Counts {
            requests: 3,
            bytes: 4096,
            errors: 1,
            receives: 2,
            received_bytes: 128,
            waiting_requests: 5,
            waiting_bytes: 320,
            ..Counts::default()
        };
        counts.latency.record(300);
        let shared = |id| SharedQp {
            id,
            peer: "10.0.0.2".parse().unwrap(),
            tenant: "db".into(),
            peer_tenant: "elsewhere".into(),
            class: 4,
            connections: 7,
            window_bytes: 100,
            in_flight_bytes: 10,
        };
        Snapshot {
            node: NodeState {
                address: "10.0.0.1".parse().unwrap(),
                provider: "soft".into(),
                time_ns: 1,
                waiting: "blocked".into(),
                retransmitted_packets: 0,
                is_whole: true,
            },
            tenants: vec![
                Tenant {
                    name: "db".into(),
                    applications: 1,
                    weight: Some(3),
                    rate_bps: Some(8_000),
                    ceiling_bps: Some(16_000),
                    counts,
                },
                Tenant {
                    name: "default".into(),
                    applications: 0,
                    weight: Some(1),
                    rate_bps: None,
                    ceiling_bps: None,
                    counts: Counts::default(),
                },
            ],
            applications: vec![Application {
                id: 1,
                pid: Some(987_654),
                uid: Some(1000),
                name: "postgres".into(),
                tenant: "db".into(),
                queue_pairs: 9,
                counts,
            }],
            connections: Vec::new(),
            connections_left_out: 0,
            shared_qps: vec![shared(1), shared(2)],
        }
    }

    #[test]
    fn render__each_tenant_and_no_application_or_peer() {
        let mut text = Text::default();
        render(&mut text, &snapshot());
        let text = text.finish();
        for line in [
            "rdmux_node_tenant_applications{device=\"10.0.0.1\",tenant=\"default\"} 0",
            "rdmux_node_tenant_queue_pairs{device=\"10.0.0.1\",tenant=\"db\"} 9",
            "rdmux_node_tenant_queue_pairs{device=\"10.0.0.1\",tenant=\"default\"} 0",
            "rdmux_node_tenant_rate_bytes_per_second{device=\"10.0.0.1\",tenant=\"db\"} 1000",
            "rdmux_node_tenant_ceiling_bytes_per_second{device=\"10.0.0.1\",tenant=\"db\"} 2000",
            "rdmux_node_tenant_bytes_total{device=\"10.0.0.1\",tenant=\"db\"} 4096",
            "rdmux_node_tenant_request_latency_seconds_count{device=\"10.0.0.1\",tenant=\"db\"} 1",
            "rdmux_node_shared_connections{device=\"10.0.0.1\",tenant=\"db\",class=\"4\"} 14",
            "rdmux_node_shared_window_bytes{device=\"10.0.0.1\",tenant=\"db\",class=\"4\"} 200",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("rate_bytes_per_second{device=\"10.0.0.1\",tenant=\"default\"}"));
        for hidden in ["postgres", "987654", "10.0.0.2", "elsewhere"] {
            assert!(!text.contains(hidden), "{hidden}\n{text}");
        }
    }
}
