//! rdmux over UDP, beside raw UDP, TCP, and peers over TCP. Both sides are on this host, but use no shared memory.

use std::time::Duration;

use super::floor::{Message, raw_udp_bandwidth, raw_udp_latency};
use super::pair::{FABRIC_BANDWIDTH, FABRIC_LATENCY, Perf, UCX_BANDWIDTH, UCX_LATENCY, libfabric, ucx};
use super::table::{Line, Ratio, Suite, Table};
use super::{CPUS, LOOPBACK, count, megabytes, tcp};

/// Payload of a packet at path MTU 4096 with the headers of a WRITE.
const SEGMENT_BYTES: u16 = 4_096 + 32;

/// A WRITE of 4 KiB, a FLUSH behind it, and the answer to it: payload, headers and ICRC of each.
const PUSH_WRITE_BYTES: u16 = 4_096 + 28;
const PUSH_FLUSH_BYTES: u16 = 44;
const PUSH_ANSWER_BYTES: usize = 28;

const RAW: &str = "raw UDP (unconnected, DF)";
const RAW_STREAM: &str = "raw UDP (GSO + GRO)";
const WRITE: &str = "rdmux WRITE";
const TRAIN: &str = "raw UDP, a train and an answer";
const PUSH: &str = "rdmux push, WRITE and FLUSH";

pub(super) fn suite() -> Suite {
    Suite {
        key: "udp",
        conditions: "UDP over loopback, both sides spinning on CPU 0 and 1",
        claim: None,
        tables: vec![latency(), bandwidth(), push()],
        ratios: |tables| {
            let [latency, bandwidth, push] = tables else {
                return Vec::new();
            };
            let ratio = |name, goal, table: &Table, column, of, to| {
                Ratio::new(name, goal, &table.rounds(of, column), &table.rounds(to, column))
            };
            vec![
                ratio("WRITE 8 B / raw UDP", "at most 1.40", latency, 8, WRITE, RAW),
                ratio(
                    "WRITE 1 MiB bandwidth / raw UDP",
                    "at least 0.75",
                    bandwidth,
                    1 << 20,
                    WRITE,
                    RAW_STREAM,
                ),
                ratio(
                    "push of 4 KiB / train and answer",
                    "at most 1.25",
                    push,
                    4096,
                    PUSH,
                    TRAIN,
                ),
            ]
        },
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
                let message = Message::Datagram(size.max(64));
                Ok(raw_udp_latency(LOOPBACK, CPUS, [message; 2], 10_000)? as f64 / 1e3)
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
            Line::new(RAW_STREAM, &sizes, |_| {
                Ok(raw_udp_bandwidth(LOOPBACK, CPUS, SEGMENT_BYTES, Duration::from_millis(700))? / 1e6)
            }),
            Line::new("TCP stream", &sizes, tcp::bandwidth),
            Line::new(WRITE, &sizes, move |size| perf("write-bw", size)),
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

fn push() -> Table {
    Table {
        key: "push_us",
        title: "Durable push, p50, us",
        digits: 2,
        compares: true,
        columns: vec![(4096, "4 KiB")],
        lines: vec![
            Line::new(TRAIN, &[4096], |_| {
                let train = Message::Train([PUSH_WRITE_BYTES, PUSH_FLUSH_BYTES]);
                let messages = [train, Message::Datagram(PUSH_ANSWER_BYTES)];
                Ok(raw_udp_latency(LOOPBACK, CPUS, messages, 5_000)? as f64 * 2.0 / 1e3)
            }),
            Line::new(PUSH, &[4096], |size| {
                Perf::new("push-write", size).over_udp().push(2_000)
            }),
        ],
    }
}
