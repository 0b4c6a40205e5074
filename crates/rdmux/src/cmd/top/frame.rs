//! The difference between two snapshots of a node.

use std::collections::HashMap;
use std::net::IpAddr;

use rdmux_share::node::snapshot::{Counts, NodeState, Route, SharedQp, Snapshot};
use serde::Serialize;

/// The work of a node in an interval, and the requests that wait at its end.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Frame {
    pub(super) time_ns: u64,
    pub(super) interval_ns: u64,
    pub(super) node: NodeState,
    pub(super) tenants: Vec<Tenant>,
    pub(super) applications: Vec<Application>,
    pub(super) connections: Vec<Connection>,
    pub(super) connections_left_out: u64,
    pub(super) shared_qps: Vec<SharedQp>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Tenant {
    pub(super) name: String,
    pub(super) applications: u32,
    #[serde(flatten)]
    pub(super) rates: Rates,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Application {
    pub(super) id: u64,
    pub(super) pid: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) name: String,
    pub(super) tenant: String,
    pub(super) queue_pairs: u32,
    #[serde(flatten)]
    pub(super) rates: Rates,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Connection {
    pub(super) application: u64,
    pub(super) qpn: u32,
    pub(super) peer: Option<IpAddr>,
    pub(super) class: Option<u8>,
    pub(super) route: Route,
    pub(super) shared_qp: Option<u64>,
    #[serde(flatten)]
    pub(super) rates: Rates,
}

/// Bytes and requests that a tenant, an application or a connection has moved in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    pub(super) requests_per_s: f64,
    pub(super) bytes_per_s: f64,
    pub(super) receives_per_s: f64,
    pub(super) received_bytes_per_s: f64,
    /// Part of the bytes of all tenants' requests, from 0 to 1.
    pub(super) share: f64,
    pub(super) p50_ns: Option<u64>,
    pub(super) p99_ns: Option<u64>,
    pub(super) waiting_requests: u64,
    pub(super) waiting_bytes: u64,
    pub(super) errors: u64,
}

impl Frame {
    /// Returns what has happened between two snapshots.
    pub(super) fn of(before: &Snapshot, after: &Snapshot) -> Frame {
        let interval_ns = after.node.time_ns.saturating_sub(before.node.time_ns);
        let seconds = interval_ns.max(1) as f64 / 1e9;
        let tenants: HashMap<_, _> = before.tenants.iter().map(|it| (&it.name, &it.counts)).collect();
        let applications: HashMap<_, _> = before.applications.iter().map(|it| (it.id, &it.counts)).collect();
        let connections = before.connections.iter();
        let connections: HashMap<_, _> = connections
            .map(|it| ((it.application, it.qpn), &it.counts))
            .collect();
        // One that was not there before has begun with nothing.
        let since = |after: &Counts, before: Option<&&Counts>| match before {
            Some(before) => after.since(before),
            None => *after,
        };
        let of_tenants = after.tenants.iter();
        let of_tenants: Vec<Counts> = of_tenants
            .map(|it| since(&it.counts, tenants.get(&it.name)))
            .collect();
        let all = of_tenants.iter().map(|counts| counts.bytes as f64).sum();
        let rates = |counts: &Counts| Rates::of(counts, seconds, all);
        Frame {
            time_ns: after.node.time_ns,
            interval_ns,
            node: after.node.clone(),
            tenants: after
                .tenants
                .iter()
                .zip(&of_tenants)
                .map(|(it, counts)| Tenant {
                    name: it.name.clone(),
                    applications: it.applications,
                    rates: rates(counts),
                })
                .collect(),
            applications: after
                .applications
                .iter()
                .map(|it| Application {
                    id: it.id,
                    pid: it.pid,
                    uid: it.uid,
                    name: it.name.clone(),
                    tenant: it.tenant.clone(),
                    queue_pairs: it.queue_pairs,
                    rates: rates(&since(&it.counts, applications.get(&it.id))),
                })
                .collect(),
            connections: after
                .connections
                .iter()
                .map(|it| Connection {
                    application: it.application,
                    qpn: it.qpn,
                    peer: it.peer,
                    class: it.class,
                    route: it.route,
                    shared_qp: it.shared_qp,
                    rates: rates(&since(&it.counts, connections.get(&(it.application, it.qpn)))),
                })
                .collect(),
            connections_left_out: after.connections_left_out,
            shared_qps: after.shared_qps.clone(),
        }
    }

    /// Returns the bytes that all tenants have moved, in a second.
    pub(super) fn bytes_per_s(&self) -> f64 {
        let sum: f64 = self.tenants.iter().map(|tenant| tenant.rates.bytes_per_s).sum();
        // The sum of none is -0.
        sum + 0.0
    }

    /// Returns a line about the node.
    pub(super) fn title(&self) -> String {
        let NodeState {
            address,
            provider,
            waiting,
            retransmitted_packets,
            is_whole,
            ..
        } = &self.node;
        let (applications, connections) = (
            self.applications.len(),
            self.connections.len() as u64 + self.connections_left_out,
        );
        let mut title = format!(
            "node {address} ({provider}), {waiting}: {applications} applications, {connections} connections"
        );
        if self.connections_left_out > 0 {
            title += &format!(" ({} not shown)", self.connections_left_out);
        }
        match is_whole {
            true => title += &format!(", {} shared", self.shared_qps.len()),
            false => title += " of yours",
        }
        title += &format!(", {}", rate(self.bytes_per_s()));
        if *retransmitted_packets > 0 {
            title += &format!(", {retransmitted_packets} packets retransmitted");
        }
        title
    }

    /// Returns the rows of a tree: tenants, their applications, and the applications' connections.
    pub(super) fn tree(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for tenant in &self.tenants {
            rows.push(Row::of_tenant(tenant));
            for application in self.applications.iter().filter(|it| it.tenant == tenant.name) {
                rows.push(Row::of_application(application));
                let connections = self.connections.iter();
                let connections = connections.filter(|it| it.application == application.id);
                rows.extend(connections.map(Row::of_connection));
            }
        }
        rows
    }
}

impl Rates {
    fn of(counts: &Counts, seconds: f64, all_bytes: f64) -> Rates {
        let share = match all_bytes > 0.0 {
            // The bytes of one that has ended since are in its tenant's alone.
            true => (counts.bytes as f64 / all_bytes).min(1.0),
            false => 0.0,
        };
        Rates {
            requests_per_s: counts.requests as f64 / seconds,
            bytes_per_s: counts.bytes as f64 / seconds,
            receives_per_s: counts.receives as f64 / seconds,
            received_bytes_per_s: counts.received_bytes as f64 / seconds,
            share,
            p50_ns: counts.latency.quantile(0.5),
            p99_ns: counts.latency.quantile(0.99),
            waiting_requests: counts.waiting_requests,
            waiting_bytes: counts.waiting_bytes,
            errors: counts.errors,
        }
    }
}

/// Name of a row: the same in the next frame.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Tenant(String),
    Application(u64),
    Connection(u64, u32),
}

/// A row of a table.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) key: Key,
    /// 0 for a tenant, 1 for an application, 2 for a connection.
    pub(super) level: u8,
    pub(super) name: String,
    peer: String,
    route: String,
    class: String,
    pub(super) rates: Rates,
}

impl Row {
    fn of_tenant(tenant: &Tenant) -> Row {
        Row {
            key: Key::Tenant(tenant.name.clone()),
            level: 0,
            name: tenant.name.clone(),
            peer: String::new(),
            route: String::new(),
            class: String::new(),
            rates: tenant.rates,
        }
    }

    fn of_application(application: &Application) -> Row {
        let pid = application.pid.map_or("-".into(), |pid| pid.to_string());
        Row {
            key: Key::Application(application.id),
            level: 1,
            name: format!("{pid} {}", application.name),
            peer: String::new(),
            route: String::new(),
            class: String::new(),
            rates: application.rates,
        }
    }

    fn of_connection(connection: &Connection) -> Row {
        let route = match connection.shared_qp {
            Some(id) => format!("{} {id}", connection.route.word()),
            None => connection.route.word().into(),
        };
        Row {
            key: Key::Connection(connection.application, connection.qpn),
            level: 2,
            name: format!("{:#08x}", connection.qpn),
            peer: connection.peer.map_or("-".into(), |peer| peer.to_string()),
            route,
            class: connection.class.map_or("-".into(), |class| class.to_string()),
            rates: connection.rates,
        }
    }

    /// Returns the cells behind the name.
    pub(super) fn cells(&self) -> [String; 10] {
        let rates = &self.rates;
        let latency = |ns: Option<u64>| ns.map_or("-".into(), time);
        [
            self.peer.clone(),
            self.route.clone(),
            self.class.clone(),
            rate(rates.bytes_per_s),
            format!("{:.1}%", rates.share * 100.0),
            count(rates.requests_per_s),
            latency(rates.p50_ns),
            latency(rates.p99_ns),
            rates.waiting_requests.to_string(),
            rates.errors.to_string(),
        ]
    }

    /// Returns whether it has a word, in lower case.
    pub(super) fn has(&self, word: &str) -> bool {
        [&self.name, &self.peer, &self.route]
            .iter()
            .any(|text| text.to_lowercase().contains(word))
    }
}

/// Writes a number with three digits, and a unit: powers of 1000.
fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = match (unit, value) {
        (0, _) => 0,
        (_, value) if value < 9.995 => 2,
        (_, value) if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{}", units[unit])
}

/// Writes bytes per second.
pub(super) fn rate(bytes_per_s: f64) -> String {
    scaled(bytes_per_s, &[" B/s", " kB/s", " MB/s", " GB/s", " TB/s"])
}

fn count(per_s: f64) -> String {
    scaled(per_s, &["", "k", "M", "G"])
}

fn time(ns: u64) -> String {
    scaled(ns as f64, &[" ns", " us", " ms", " s"])
}
