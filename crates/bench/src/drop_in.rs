//! Unmodified programs on the drop-in library: perftest beside rdmux's own API, and UCX, libfabric and MPI beside UCX's own shared memory.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::pair::{
    FABRIC_LATENCY, Perf, RC, UCX_LATENCY, exchange, free_port, installed, libfabric_on_rdmux, mpi, on_rdmux,
    ucx,
};
use super::shm::{FLAG, MEMCPY, SHARED, floor};
use super::table::{Line, Ratio, Suite, Table};
use super::{count, megabytes};

const MIB: usize = 1 << 20;

/// A row of rdmux's own API and the row of perftest that is compared with it.
#[derive(Clone, Copy)]
struct Rows {
    own: &'static str,
    /// Test of `rdmux perf`.
    test: &'static str,
    drop_in: &'static str,
    program: &'static str,
}

const WRITE: Rows = Rows::new(
    "rdmux WRITE",
    "write-lat",
    "ib_write_lat, drop-in",
    "ib_write_lat",
);
const SEND: Rows = Rows::new("rdmux SEND", "send-lat", "ib_send_lat, drop-in", "ib_send_lat");
const READ: Rows = Rows::new(
    "rdmux READ (whole trip)",
    "read-lat",
    "ib_read_lat, drop-in",
    "ib_read_lat",
);
const WRITES: Rows = Rows::new("rdmux WRITE", "write-bw", "ib_write_bw, drop-in", "ib_write_bw");
const SENDS: Rows = Rows::new("rdmux SEND", "send-bw", "ib_send_bw, drop-in", "ib_send_bw");
const READS: Rows = Rows::new("rdmux READ", "read-bw", "ib_read_bw, drop-in", "ib_read_bw");

impl Rows {
    const fn new(
        own: &'static str,
        test: &'static str,
        drop_in: &'static str,
        program: &'static str,
    ) -> Rows {
        Rows {
            own,
            test,
            drop_in,
            program,
        }
    }
}

/// `ib_send_lat -e`: it arms, polls and sleeps on a channel instead.
const EVENTS: &str = "ib_send_lat -e, drop-in";
/// A program over UCX's own shared memory and over the drop-in library.
const UCX_PUT: [&str; 2] = ["UCX put, posix", "UCX put, drop-in"];
const UCX_TAG: [&str; 2] = ["UCX tag, posix", "UCX tag, drop-in"];
const MPI: [&str; 2] = ["MPI, UCX posix", "MPI, UCX drop-in"];
const FABRIC: &str = "libfabric msg, drop-in";
/// The transports of the pairs above.
const TRANSPORTS: [&str; 2] = ["posix", RC];

/// Columns of perftest's lines.
const TYPICAL: usize = 4;
const BANDWIDTH: usize = 3;

/// `floors` is the program that measures the floors.
pub(super) fn suite(floors: Option<PathBuf>) -> Suite {
    Suite {
        key: "drop_in",
        conditions: "programs with rdmux's libibverbs, two processes spinning on CPU 0 and 1; rdmux perf with memory for sharing",
        claim: None,
        tables: vec![latency(floors.clone()), bandwidth(floors)],
        ratios: |tables| {
            let [latency, bandwidth] = tables else {
                return Vec::new();
            };
            let beside_own = |name, rows: Rows| {
                let [of, to] = [rows.drop_in, rows.own].map(|name| latency.rounds(name, 8));
                Ratio::new(name, "at most 1.25", &of, &to)
            };
            let beside_memcpy = |name, goal, rows: Rows| {
                let [of, to] = [rows.drop_in, MEMCPY].map(|name| bandwidth.rounds(name, MIB));
                Ratio::new(name, goal, &of, &to)
            };
            let beside_posix = |name, [posix, drop_in]: [&str; 2]| {
                let [of, to] = [drop_in, posix].map(|name| latency.rounds(name, 8));
                Ratio::new(name, "at most 1.50", &of, &to)
            };
            let [events, polling] = [EVENTS, SEND.drop_in].map(|name| latency.rounds(name, 8));
            vec![
                beside_own("ib_write_lat 8 B / rdmux's own", WRITE),
                beside_own("ib_read_lat 8 B / rdmux's own", READ),
                beside_own("ib_send_lat 8 B / rdmux's own", SEND),
                Ratio::new(
                    "ib_send_lat 8 B, events / polling",
                    "at most 3.00",
                    &events,
                    &polling,
                ),
                beside_memcpy("ib_write_bw 1 MiB / memcpy", "at least 0.90", WRITES),
                beside_memcpy("ib_read_bw 1 MiB / memcpy", "at least 0.90", READS),
                beside_memcpy("ib_send_bw 1 MiB / memcpy", "at least 0.85", SENDS),
                beside_posix("UCX put 8 B, drop-in / posix", UCX_PUT),
                beside_posix("UCX tag 8 B, drop-in / posix", UCX_TAG),
                beside_posix(
                    "libfabric msg 8 B, drop-in / UCX tag, posix",
                    [UCX_TAG[0], FABRIC],
                ),
                beside_posix("MPI 8 B, drop-in / posix", MPI),
            ]
        },
    }
}

fn latency(floors: Option<PathBuf>) -> Table {
    const ITERATIONS: u32 = 50_000;
    const ITERATIONS_EVENTS: u32 = 10_000;
    const ITERATIONS_OTHERS: u32 = 20_000;
    let mut lines = vec![Line::new(FLAG, &[8], move |_| {
        Ok(floor(floors.as_deref(), "flag")? / 1e3)
    })];
    for rows in [WRITE, SEND, READ] {
        lines.push(Line::new(rows.own, &[8], move |size| {
            Perf::new(rows.test, size)
                .options(SHARED)
                .run(ITERATIONS, "t_typical")
        }));
        lines.push(Line::new(rows.drop_in, &[8], move |size| {
            perftest(rows.program, size, ITERATIONS, TYPICAL, &[])
        }));
    }
    lines.push(Line::new(EVENTS, &[8], move |size| {
        perftest(SEND.program, size, ITERATIONS_EVENTS, TYPICAL, &["-e"])
    }));
    for (names, test) in [(UCX_PUT, "ucp_put_lat"), (UCX_TAG, "tag_lat")] {
        for (name, tls) in names.into_iter().zip(TRANSPORTS) {
            lines.push(Line::new(name, &[8], move |size| {
                ucx(tls, test, size, ITERATIONS_OTHERS, UCX_LATENCY)
            }));
        }
    }
    lines.push(Line::new(FABRIC, &[8], |size| {
        libfabric_on_rdmux(size, ITERATIONS_OTHERS, FABRIC_LATENCY)
    }));
    for (name, tls) in MPI.into_iter().zip(TRANSPORTS) {
        lines.push(Line::new(name, &[8], move |size| {
            mpi(tls, size, ITERATIONS_OTHERS)
        }));
    }
    Table {
        key: "latency_us",
        title: "Half round trip, p50, us",
        digits: 3,
        compares: true,
        columns: vec![(8, "8 B")],
        lines,
    }
}

fn bandwidth(floors: Option<PathBuf>) -> Table {
    let mut lines = vec![Line::new(MEMCPY, &[MIB], move |size| {
        Ok(floor(floors.as_deref(), &format!("memcpy-{size}"))? / 1e6)
    })];
    for rows in [WRITES, SENDS, READS] {
        lines.push(Line::new(rows.own, &[MIB], move |size| {
            let perf = Perf::new(rows.test, size).options(SHARED);
            perf.run(count(size), "BW_average").map(megabytes)
        }));
        lines.push(Line::new(rows.drop_in, &[MIB], move |size| {
            perftest(rows.program, size, count(size), BANDWIDTH, &[]).map(megabytes)
        }));
    }
    Table {
        key: "bandwidth_mb_per_s",
        title: "Bandwidth, MB/s",
        digits: 0,
        compares: true,
        columns: vec![(MIB, "1 MiB")],
        lines,
    }
}

/// Runs one of perftest's programs on the drop-in, with the options on both sides; returns a figure.
fn perftest(program: &str, size: usize, iterations: u32, column: usize, options: &[&str]) -> Result<f64> {
    installed(program)?;
    let (port, size, iterations) = (free_port()?, size.to_string(), iterations.to_string());
    // A stream has as many messages in flight as with `rdmux perf`; a ping-pong takes no such option.
    let depth: &[&str] = if column == BANDWIDTH { &["-t", "32"] } else { &[] };
    let common = ["-F", "-x", "0", "-p", &port, "-s", &size, "-n", &iterations];
    let server = [&common[..], depth, options].concat();
    let client = [&server[..], &["127.0.0.1"]].concat();
    exchange(
        program,
        &port,
        on_rdmux("1", program, &server)?,
        on_rdmux("0", program, &client)?,
    )?
    .lines()
    .map(|line| line.split_whitespace().collect::<Vec<_>>())
    .find(|words| words.first() == Some(&size.as_str()))
    .and_then(|words| words.get(column)?.parse().ok())
    .with_context(|| format!("{program} printed no figure"))
}
