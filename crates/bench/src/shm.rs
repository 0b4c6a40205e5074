//! rdmux through shared memory between two processes of this host, beside the cost of the memory and of a futex by themselves, and peers'
//! shared memory transports.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::pair::{FABRIC_BANDWIDTH, FABRIC_LATENCY, Perf, UCX_BANDWIDTH, UCX_LATENCY, libfabric, ucx};
use super::table::{Line, Ratio, Suite, Table};
use super::{count, megabytes, scale};

const MIB: usize = 1 << 20;
/// Columns of the blocking table: number of CPUs of the two sides.
const CPU_COLUMNS: [usize; 2] = [2, 1];

pub(super) const FLAG: &str = "shared flag";
pub(super) const MEMCPY: &str = "memcpy into shared memory";
const WRITE: &str = "rdmux WRITE";
const SEND: &str = "rdmux SEND";
const SEND_EVENTS: &str = "rdmux SEND -e, RDMUX_WAIT=blocked";
const FUTEX: &str = "futex";
const UCX_PUT: [&str; 2] = ["UCX put, posix", "UCX put, sysv"];
const UCX_AM: [&str; 2] = ["UCX am, posix", "UCX am, sysv"];

/// `floors` is the program that measures the floors.
pub(super) fn suite(floors: Option<PathBuf>) -> Suite {
    Suite {
        key: "shm",
        conditions: "shared memory between two processes on CPU 0 and 1, both spinning unless said otherwise",
        claim: None,
        tables: vec![
            latency(floors.clone()),
            bandwidth(floors.clone()),
            blocking(floors),
            scale::table(),
        ],
        ratios,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let [latency, bandwidth, blocking, scale] = tables else {
        return Vec::new();
    };
    let best_put = best(latency, UCX_PUT, 8, f64::min);
    let best_am = best(latency, UCX_AM, 8, f64::min);
    let best_stream = best(bandwidth, UCX_PUT, MIB, f64::max);
    let [write, send] = [WRITE, SEND].map(|name| latency.rounds(name, 8));
    let flag = latency.rounds(FLAG, 8);
    let [write_stream, send_stream, memcpy] = [WRITE, SEND, MEMCPY].map(|name| bandwidth.rounds(name, MIB));
    let asleep = |name, cpus| {
        let goal = if cpus == 2 { "at most 1.15" } else { "at most 2.50" };
        let [send, futex] = [SEND_EVENTS, FUTEX].map(|name| blocking.rounds(name, cpus));
        Ratio::new(name, goal, &send, &futex)
    };
    vec![
        Ratio::new("WRITE 8 B / best UCX put", "at most 1.25", &write, &best_put),
        Ratio::new("WRITE 8 B / flag", "at most 1.50", &write, &flag),
        Ratio::new("SEND 8 B / best UCX am", "at most 1.00", &send, &best_am),
        Ratio::new("SEND 8 B / flag", "at most 2.20", &send, &flag),
        Ratio::new(
            "WRITE 1 MiB bandwidth / best UCX put",
            "at least 1.00",
            &write_stream,
            &best_stream,
        ),
        Ratio::new(
            "SEND 1 MiB bandwidth / memcpy",
            "at least 0.85",
            &send_stream,
            &memcpy,
        ),
        asleep("SEND 8 B, both asleep / futex, two CPUs", 2),
        asleep("SEND 8 B, both asleep / futex, one CPU", 1),
        scale::ratio(scale),
    ]
}

/// Returns the better of two rows in each round.
fn best(table: &Table, names: [&str; 2], column: usize, better: fn(f64, f64) -> f64) -> Vec<f64> {
    let [one, other] = names.map(|name| table.rounds(name, column));
    if one.is_empty() || other.is_empty() {
        return [one, other].concat();
    }
    one.iter()
        .zip(other)
        .map(|(one, other)| better(*one, other))
        .collect()
}

/// Options for both sides. Reading the clock for each two round trips takes as long as UCX's reading of the processor's counter
/// for each one.
pub(super) const SHARED: &[&str] = &["--memory", "shared", "--group", "2"];
const PRIVATE: &[&str] = &["--memory", "private", "--group", "2"];

fn latency(floors: Option<PathBuf>) -> Table {
    let perf = |test, size, options| Perf::new(test, size).options(options).run(20_000, "t_typical");
    let ucx = |tls, test| {
        move |size: usize| {
            ucx(
                tls,
                test,
                size,
                if size < 4096 { 20_000 } else { 10_000 },
                UCX_LATENCY,
            )
        }
    };
    let floor_of = floors.clone();
    // Rows that are compared stand side by side, so that little time passes between their measurements.
    let lines = vec![
        Line::new(FLAG, &[8], move |_| Ok(floor(floor_of.as_deref(), "flag")? / 1e3)),
        Line::new("shared flag + copy in and out", &[64, 4096], move |size| {
            Ok(floor(floors.as_deref(), &format!("copy-{size}"))? / 1e3)
        }),
        Line::new("rdmux WRITE, private memory", &[8], move |size| {
            perf("write-lat", size, PRIVATE)
        }),
        Line::new(WRITE, &[4096, 8], move |size| perf("write-lat", size, SHARED)),
        Line::new(UCX_PUT[0], &[8, 4096], ucx("posix", "ucp_put_lat")),
        Line::new(UCX_PUT[1], &[8, 4096], ucx("sysv", "ucp_put_lat")),
        Line::new("rdmux READ (whole trip)", &[8], move |size| {
            perf("read-lat", size, SHARED)
        }),
        Line::new("rdmux SEND, private memory", &[8], move |size| {
            perf("send-lat", size, PRIVATE)
        }),
        Line::new(SEND, &[4096, 64, 8], move |size| perf("send-lat", size, SHARED)),
        Line::new(UCX_AM[0], &[8, 4096], ucx("posix", "ucp_am_lat")),
        Line::new(UCX_AM[1], &[8, 4096], ucx("sysv", "ucp_am_lat")),
        Line::new("libfabric rdm, shm", &[64], |size| {
            libfabric(["shm", "rdm"], size, 2_000, FABRIC_LATENCY)
        }),
    ];
    Table {
        key: "latency_us",
        title: "Half round trip, p50, us",
        digits: 3,
        compares: true,
        columns: vec![(8, "8 B"), (64, "64 B"), (4096, "4 KiB")],
        lines,
    }
}

fn bandwidth(floors: Option<PathBuf>) -> Table {
    let perf = |test, size, options| {
        let perf = Perf::new(test, size).options(options);
        perf.run(count(size), "BW_average").map(megabytes)
    };
    let mut lines = vec![
        Line::new(MEMCPY, &[MIB], move |size| {
            Ok(floor(floors.as_deref(), &format!("memcpy-{size}"))? / 1e6)
        }),
        Line::new(WRITE, &[MIB], move |size| perf("write-bw", size, SHARED)),
        Line::new("rdmux WRITE, private memory", &[MIB], move |size| {
            perf("write-bw", size, PRIVATE)
        }),
        Line::new(SEND, &[MIB], move |size| perf("send-bw", size, SHARED)),
    ];
    for (i, tls) in ["posix", "sysv"].into_iter().enumerate() {
        lines.push(Line::new(UCX_PUT[i], &[MIB], move |size| {
            ucx(tls, "ucp_put_bw", size, count(size), UCX_BANDWIDTH).map(megabytes)
        }));
    }
    lines.push(Line::new("libfabric rdm ping-pong, shm", &[MIB], |size| {
        libfabric(["shm", "rdm"], size, 400, FABRIC_BANDWIDTH)
    }));
    Table {
        key: "bandwidth_mb_per_s",
        title: "Bandwidth, MB/s",
        digits: 0,
        compares: true,
        columns: vec![(MIB, "1 MiB")],
        lines,
    }
}

fn blocking(floors: Option<PathBuf>) -> Table {
    Table {
        key: "blocking_us",
        title: "Both sides wait for events, p50, us",
        digits: 2,
        compares: true,
        columns: vec![(2, "two CPUs"), (1, "one CPU")],
        lines: vec![
            Line::new(FUTEX, &CPU_COLUMNS, move |cpus| {
                let name = if cpus == 2 { "futex-2-cpus" } else { "futex-1-cpu" };
                Ok(floor(floors.as_deref(), name)? / 1e3)
            }),
            Line::new(SEND_EVENTS, &CPU_COLUMNS, |cpus| {
                let perf = Perf::new("send-lat", 8).cpus([0, cpus - 1]);
                perf.options(&["-e"]).blocked().run(3_000, "t_typical")
            }),
            Line::new("rdmux SEND -e, as it pays", &CPU_COLUMNS, |cpus| {
                let perf = Perf::new("send-lat", 8).cpus([0, cpus - 1]);
                perf.options(&["-e"]).run(20_000, "t_typical")
            }),
        ],
    }
}

/// Runs the program that measures the floors; returns a floor in ns or bytes/s.
pub(super) fn floor(program: Option<&Path>, name: &str) -> Result<f64> {
    let program = program.context("give --floors, as bench/run does")?;
    let output = Command::new(program)
        .arg(name)
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}
