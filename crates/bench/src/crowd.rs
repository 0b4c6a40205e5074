//! More processes than CPUs: pairs that share two CPUs, without priority and without a CPU of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::pair::{
    Perf, Server, UCX_LATENCY, UCX_MESSAGE_RATE, crowded, free_port, installed, ucx_figure, ucx_transport,
};
use super::table::{Line, Ratio, Suite, Table, figures};

/// Run time of each pair.
const SECONDS: u32 = 2;
/// Run time of `ucx_perftest`, including its start; it prints a line a second.
const UCX_SECONDS: &str = "2.5";
/// Numbers of processes; two form a pair.
const PROCESSES: [usize; 3] = [2, 4, 8];

const FUTEX: &str = "futex";
const YIELD: &str = "shared flag, yielding";
const SEND: &str = "rdmux SEND 8 B -e";
const WRITE: &str = "rdmux WRITE 8 B, polling";
const UCX: &str = "UCX put 8 B, posix";

/// `floors` is the program that measures the floors: the same exchange without anything but the waiting.
pub(super) fn suite(floors: Option<PathBuf>) -> Suite {
    let floor_rates = [(FUTEX, "crowd-futex"), (YIELD, "crowd-yield")].map(|(name, figure)| {
        let floors = floors.clone();
        Line::new(name, &PROCESSES, move |processes| {
            Ok(floor(floors.as_deref(), figure, processes / 2)? / 1e3)
        })
    });
    let (rates, waits): (Vec<Line>, Vec<Line>) = [
        lines(SEND, |pairs| {
            perf(Perf::new("send-lat", 8).options(&["-e"]), pairs)
        }),
        lines(WRITE, |pairs| perf(Perf::new("write-lat", 8), pairs)),
        lines(UCX, ucx),
    ]
    .into_iter()
    .unzip();
    let rates = floor_rates.into_iter().chain(rates).collect();
    let columns = vec![(2, "2 processes"), (4, "4 processes"), (8, "8 processes")];
    Suite {
        key: "crowd",
        conditions: "pairs of processes on CPU 0 and 1, where the scheduler puts them, 2 s each",
        claim: None,
        tables: vec![
            Table {
                key: "thousand_round_trips_per_s",
                title: "Round trips of all, 1000/s",
                digits: 1,
                compares: false,
                columns: columns.clone(),
                lines: rates,
            },
            Table {
                key: "p99_us",
                title: "Half round trip, p99, worst, us",
                digits: 1,
                compares: false,
                columns,
                lines: waits,
            },
        ],
        ratios: |tables| {
            let scaling = |name, what| {
                let rates = |processes| tables[0].rounds(name, processes);
                Ratio::new(what, "at least 0.90", &rates(8), &rates(2))
            };
            // What is lost to the machine is lost without rdmux as well.
            let kept = |name| -> Vec<f64> {
                let [of_two, of_eight] = [2, 8].map(|processes| tables[0].rounds(name, processes));
                of_eight.iter().zip(&of_two).map(|(of, to)| of / to).collect()
            };
            let beside = |name, floor, what| Ratio::new(what, "at least 0.95", &kept(name), &kept(floor));
            let at_eight = |name| tables[0].rounds(name, 8);
            vec![
                Ratio::new(
                    "8 processes, events: rdmux's rate / the futex's",
                    "as large as it gets",
                    &at_eight(SEND),
                    &at_eight(FUTEX),
                ),
                beside(
                    SEND,
                    FUTEX,
                    "8 processes, events: rdmux keeps ... of what the futex keeps",
                ),
                beside(
                    WRITE,
                    YIELD,
                    "8 processes, polling: rdmux keeps ... of what the flag keeps",
                ),
                scaling(FUTEX, "futex, rate of 8 processes / of 2"),
                scaling(YIELD, "flag, yielding, rate of 8 processes / of 2"),
                scaling(SEND, "rdmux SEND -e, rate of 8 processes / of 2"),
                scaling(WRITE, "rdmux WRITE polling, rate of 8 processes / of 2"),
                scaling(UCX, "UCX put, rate of 8 processes / of 2"),
            ]
        },
    }
}

/// Figures of the pairs that ran at the same time.
#[derive(Default)]
struct Outcome {
    round_trips_per_s: f64,
    /// 99th percentile of the worst pair.
    p99_us: f64,
}

/// Returns the rows of both tables.
fn lines(name: &'static str, measure: impl Fn(u16) -> Result<Outcome> + 'static) -> (Line, Line) {
    let [rate, wait] = figures(name, &PROCESSES, move |processes| {
        let outcome = measure(processes as u16 / 2)?;
        Ok([outcome.round_trips_per_s / 1e3, outcome.p99_us])
    });
    (rate, wait)
}

/// Returns the round trips per second of all pairs.
fn floor(program: Option<&Path>, figure: &str, pairs: usize) -> Result<f64> {
    let program = program.context("give --floors, as bench/run does")?;
    let program = program.to_str().context("a path that is no text")?;
    let start = |_| -> Result<_> {
        let mut command = crowded(program)?;
        Ok(command.arg(figure).stdout(Stdio::piped()).spawn()?)
    };
    let pairs = (0..pairs).map(start).collect::<Result<Vec<_>>>()?;
    let mut total = 0.0;
    for pair in pairs {
        let output = pair.wait_with_output()?;
        ensure!(output.status.success(), "{figure} failed");
        total += String::from_utf8_lossy(&output.stdout).trim().parse::<f64>()?;
    }
    Ok(total)
}

fn perf(what: Perf, pairs: u16) -> Result<Outcome> {
    let pairs: Vec<Perf> = (0..pairs).map(|index| what.in_crowd(index)).collect();
    let _servers = pairs.iter().map(Perf::serve).collect::<Result<Vec<_>>>()?;
    let clients = pairs
        .iter()
        .map(|pair| pair.start(&["-D", &SECONDS.to_string()]))
        .collect::<Result<Vec<_>>>()?;
    let mut outcome = Outcome::default();
    for client in clients {
        let row = Perf::finish(client)?;
        outcome.round_trips_per_s += row.figure("n_iterations")? / f64::from(SECONDS);
        outcome.p99_us = outcome.p99_us.max(row.figure("percentile_99")?);
    }
    Ok(outcome)
}

/// Runs `ucx_perftest`. It takes a number of round trips, and nobody knows how many fit the time: it gets too many and is killed, and the
/// last line that it printed counts.
fn ucx(pairs: u16) -> Result<Outcome> {
    let command = |port: &str, more: &[&str]| -> Result<Command> {
        let mut command = crowded("timeout")?;
        command
            .args(["-s", "KILL", UCX_SECONDS, "ucx_perftest", "-p", port])
            .args(more);
        ucx_transport(&mut command, "posix");
        command
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::piped());
        Ok(command)
    };
    installed("ucx_perftest")?;
    let ports = (0..pairs).map(|_| free_port()).collect::<Result<Vec<_>>>()?;
    let _servers = ports
        .iter()
        .map(|port| Server::start_on(port, &mut command(port, &[])?))
        .collect::<Result<Vec<_>>>()?;
    let test = [
        "127.0.0.1",
        "-t",
        "ucp_put_lat",
        "-s",
        "8",
        "-n",
        "1000000000",
        "-R",
        "99",
        "-v",
    ];
    let clients = ports
        .iter()
        .map(|port| Ok(command(port, &test)?.spawn()?))
        .collect::<Result<Vec<_>>>()?;
    let mut outcome = Outcome::default();
    for client in clients {
        let output = client.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        // `ucx_perftest` counts messages, two to a round trip.
        outcome.round_trips_per_s += ucx_figure(&text, UCX_MESSAGE_RATE)? / 2.0;
        outcome.p99_us = outcome.p99_us.max(ucx_figure(&text, UCX_LATENCY)?);
    }
    Ok(outcome)
}
