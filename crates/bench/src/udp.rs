//! rdmux over UDP, beside raw UDP, TCP, and peers over TCP. Both sides are on this host, but use no shared memory.

use std::time::Duration;

use super::floor::{push_exchange, raw_udp_bandwidth, raw_udp_latency};
use super::pair::{FABRIC_BANDWIDTH, FABRIC_LATENCY, Perf, UCX_BANDWIDTH, UCX_LATENCY, libfabric, push, ucx};
use super::table::{Line, Ratio, Suite, Table};
use super::{CPUS, LOOPBACK, count, megabytes, tcp};

/// Payload of a packet at path MTU 4096 with the headers of a WRITE.
const SEGMENT_BYTES: u16 = 4_096 + 32;

pub(super) fn suite() -> Suite {
    Suite {
        key: "udp",
        conditions: "UDP over loopback, both sides spinning on CPU 0 and 1",
        tables: vec![latency(), bandwidth(), durable()],
        ratios,
    }
}

const EXCHANGE: &str = "UDP: one train, one answer";
const PUSH: &str = "rdmux push: WRITE, FLUSH";
const RAW: &str = "raw UDP (unconnected, DF)";
const WRITE: &str = "rdmux WRITE";

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let [latency, _, durable] = tables else {
        return Vec::new();
    };
    vec![
        Ratio::new(
            "WRITE 8 B latency / raw UDP",
            "at most 1.40",
            &latency.rounds(WRITE, 8),
            &latency.rounds(RAW, 8),
        ),
        Ratio::new(
            "durable push 4 KiB / one train, one answer",
            "at most 1.25",
            &durable.rounds(PUSH, 4096),
            &durable.rounds(EXCHANGE, 4096),
        ),
    ]
}

fn durable() -> Table {
    let sizes = [4096];
    Table {
        key: "durable_us",
        title: "Durable push, p50, us",
        digits: 2,
        compares: true,
        columns: vec![(4096, "4 KiB")],
        lines: vec![
            Line::new(EXCHANGE, &sizes, |size| {
                Ok(push_exchange(LOOPBACK, CPUS, size, 10_000)? as f64 / 1e3)
            }),
            Line::new(PUSH, &sizes, |size| push("WRITE, FLUSH", size)),
        ],
    }
}

fn latency() -> Table {
    let perf = |test, size| Perf::new(test, size).over_udp().run(10_000, "t_typical");
    let sizes = [8, 4096];
    Table {
        key: "latency_us",
        title: "Half round trip, p50, us",
        digits: 2,
        compares: true,
        columns: vec![(8, "8 B"), (4096, "4 KiB")],
        lines: vec![
            Line::new(RAW, &sizes, |size| {
                Ok(raw_udp_latency(LOOPBACK, CPUS, size.max(64), 10_000)? as f64 / 1e3)
            }),
            Line::new("TCP", &sizes, tcp::latency),
            Line::new(WRITE, &sizes, move |size| perf("write-lat", size)),
            Line::new("rdmux SEND", &sizes, move |size| perf("send-lat", size)),
            Line::new("rdmux READ (whole trip / 2)", &sizes, move |size| {
                Ok(perf("read-lat", size)? / 2.0)
            }),
            Line::new("UCX put, tcp", &sizes, |size| {
                ucx("tcp", "ucp_put_lat", size, 3_000, UCX_LATENCY)
            }),
            Line::new("UCX am, tcp", &sizes, |size| {
                ucx("tcp", "ucp_am_lat", size, 3_000, UCX_LATENCY)
            }),
            Line::new("libfabric msg, tcp", &sizes, |size| {
                libfabric(["tcp", "msg"], size, 3_000, FABRIC_LATENCY)
            }),
        ],
    }
}

fn bandwidth() -> Table {
    let perf = |test, size| {
        let perf = Perf::new(test, size).over_udp();
        perf.run(count(size), "BW_average").map(megabytes)
    };
    let sizes = [64 << 10, 1 << 20];
    Table {
        key: "bandwidth_mb_per_s",
        title: "Bandwidth, MB/s",
        digits: 0,
        compares: true,
        columns: vec![(64 << 10, "64 KiB"), (1 << 20, "1 MiB")],
        lines: vec![
            Line::new("raw UDP (GSO + GRO)", &sizes, |_| {
                Ok(raw_udp_bandwidth(LOOPBACK, CPUS, SEGMENT_BYTES, Duration::from_millis(700))? / 1e6)
            }),
            Line::new("TCP stream", &sizes, tcp::bandwidth),
            Line::new("rdmux WRITE", &sizes, move |size| perf("write-bw", size)),
            Line::new("rdmux READ", &sizes, move |size| perf("read-bw", size)),
            Line::new("rdmux SEND", &sizes, move |size| perf("send-bw", size)),
            Line::new("UCX put, tcp", &sizes, |size| {
                ucx("tcp", "ucp_put_bw", size, count(size) / 4, UCX_BANDWIDTH).map(megabytes)
            }),
            Line::new("libfabric msg ping-pong, tcp", &sizes, |size| {
                libfabric(["tcp", "msg"], size, count(size) / 4, FABRIC_BANDWIDTH)
            }),
        ],
    }
}
