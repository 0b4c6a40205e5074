//! perftest on the drop-in library beside rdmux's own API: the cost of libibverbs' calls for an unmodified program.

use anyhow::{Context, Result, ensure};

use super::pair::{Perf, Server, free_port, installed, peer};
use super::table::{Line, Ratio, Suite, Table};
use super::{count, megabytes};

const MIB: usize = 1 << 20;

/// perftest reads the processor's counter for each round trip. rdmux reads the clock, which takes longer, once for two round trips. In
/// both, registered memory is the process's own.
const NATIVE: &[&str] = &["--memory", "private", "--group", "2"];

/// Rows that are compared: name and test of `rdmux perf`, then name and program of perftest.
const LATENCIES: [(&str, &str, &str, &str); 3] = [
    (
        "rdmux WRITE",
        "write-lat",
        "ib_write_lat, drop-in",
        "ib_write_lat",
    ),
    ("rdmux SEND", "send-lat", "ib_send_lat, drop-in", "ib_send_lat"),
    (
        "rdmux READ (whole trip)",
        "read-lat",
        "ib_read_lat, drop-in",
        "ib_read_lat",
    ),
];
const BANDWIDTHS: [(&str, &str, &str, &str); 3] = [
    ("rdmux WRITE", "write-bw", "ib_write_bw, drop-in", "ib_write_bw"),
    ("rdmux SEND", "send-bw", "ib_send_bw, drop-in", "ib_send_bw"),
    ("rdmux READ", "read-bw", "ib_read_bw, drop-in", "ib_read_bw"),
];

/// Name of the row for the second line's program with `-e`: it arms, polls and sleeps on a channel instead.
const EVENTS: &str = "ib_send_lat -e, drop-in";

/// Columns of perftest's lines.
const TYPICAL: usize = 4;
const BANDWIDTH: usize = 3;

pub(super) fn suite() -> Suite {
    Suite {
        key: "drop_in",
        conditions: "perftest with rdmux's libibverbs beside rdmux perf, two processes spinning on CPU 0 and 1, private memory",
        tables: vec![latency(), bandwidth()],
        ratios: |tables| {
            let [latency, bandwidth] = tables else {
                return Vec::new();
            };
            let (native, _, program, _) = LATENCIES[0];
            let write = Ratio::difference(
                "WRITE 8 B, drop-in above rdmux's own, us",
                "at most 0.10",
                &latency.rounds(program, 8),
                &latency.rounds(native, 8),
            );
            let (native, _, program, _) = BANDWIDTHS[0];
            let stream = Ratio::new(
                "WRITE 1 MiB bandwidth, drop-in / rdmux's own",
                "at least 0.95",
                &bandwidth.rounds(program, MIB),
                &bandwidth.rounds(native, MIB),
            );
            let (_, _, polling, _) = LATENCIES[1];
            let events = Ratio::new(
                "SEND 8 B, drop-in, events / polling",
                "at most 3.00",
                &latency.rounds(EVENTS, 8),
                &latency.rounds(polling, 8),
            );
            vec![write, events, stream]
        },
    }
}

fn latency() -> Table {
    const ITERATIONS: u32 = 50_000;
    const ITERATIONS_EVENTS: u32 = 10_000;
    let mut lines = Vec::new();
    for (native, test, name, program) in LATENCIES {
        lines.push(Line::new(native, &[8], move |size| {
            let perf = Perf::new(test, size).options(NATIVE);
            perf.run(ITERATIONS, "t_typical")
        }));
        lines.push(Line::new(name, &[8], move |size| {
            perftest(program, size, ITERATIONS, TYPICAL, &[])
        }));
    }
    lines.push(Line::new(EVENTS, &[8], move |size| {
        perftest("ib_send_lat", size, ITERATIONS_EVENTS, TYPICAL, &["-e"])
    }));
    Table {
        key: "latency_us",
        title: "Half round trip, p50, us",
        digits: 3,
        compares: false,
        columns: vec![(8, "8 B")],
        lines,
    }
}

fn bandwidth() -> Table {
    let mut lines = Vec::new();
    for (native, test, name, program) in BANDWIDTHS {
        lines.push(Line::new(native, &[MIB], move |size| {
            let perf = Perf::new(test, size).options(NATIVE);
            perf.run(count(size), "BW_average").map(megabytes)
        }));
        lines.push(Line::new(name, &[MIB], move |size| {
            perftest(program, size, count(size), BANDWIDTH, &[]).map(megabytes)
        }));
    }
    Table {
        key: "bandwidth_mb_per_s",
        title: "Bandwidth, MB/s",
        digits: 0,
        compares: false,
        columns: vec![(MIB, "1 MiB")],
        lines,
    }
}

/// Runs one of perftest's programs on the drop-in, with the options on both sides; returns a figure.
fn perftest(program: &str, size: usize, iterations: u32, column: usize, options: &[&str]) -> Result<f64> {
    installed(program)?;
    let rdmux = super::rdmux()?;
    let rdmux = rdmux.to_str().context("the path of rdmux is no text")?;
    let (port, size, iterations) = (free_port()?, size.to_string(), iterations.to_string());
    let common = [
        "run",
        "--device",
        "127.0.0.1",
        "--",
        program,
        "-F",
        "-x",
        "0",
        "-p",
        &port,
        "-s",
        &size,
        "-n",
        &iterations,
    ];
    // A stream has as many messages in flight as with `rdmux perf`; a ping-pong takes no such option.
    let depth: &[&str] = if column == BANDWIDTH { &["-t", "32"] } else { &[] };
    let server = [&common[..], depth, options].concat();
    let _server = Server::start_on(&port, &mut peer("1", rdmux, &server))?;
    let client = [&server[..], &["127.0.0.1"]].concat();
    let output = peer("0", rdmux, &client).output()?;
    ensure!(output.status.success(), "{program} failed");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first() == Some(&size.as_str()))
        .and_then(|words| words.get(column)?.parse().ok())
        .with_context(|| format!("{program} printed no figure"))
}
