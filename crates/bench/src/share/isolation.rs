//! S9 to S14: applications that disturb others, that are killed, and that send messages of unequal lengths.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::child::Side;
use super::super::load::{PERIOD, Report};
use super::super::table::{Column, Line, Ratio, Suite, Table, figures};
use super::hosts::{Carrier, Placement, Setup, run};
use super::{LINK, NODES, OWN, ROWS, SHARED, jain};

/// Column of a victim that is alone.
const ALONE: usize = 0;
/// Columns of attackers that want all bytes: a victim's fair share is half. A node counts the bytes of READs as those of other requests.
const HALF: [usize; 2] = [1, 2];
/// The kind of an attacker, and the heading of its column.
const ATTACKS: [(&str, &str); 7] = [
    ("", "none"),
    ("--bytes 8 --depth 128", "small messages"),
    ("--kind read --bytes 1048576 --depth 64", "READs (S10)"),
    ("--attack bad-key --bytes 64", "bad keys (S11)"),
    ("--attack registration --bytes 64", "registrations"),
    ("--attack connect --bytes 64", "connects"),
    (
        "--kind send --bytes 4096 --depth 64 --receives 1 --delay-ms 10",
        "slow receiver (S13)",
    ),
];

#[derive(Clone, Copy)]
enum Victim {
    /// WRITEs of 64 B, one at a time.
    Latency,
    /// WRITEs of 1 MiB.
    Bandwidth,
}

const VICTIM_MS: u32 = 1500;

fn attacks() -> Vec<Column> {
    ATTACKS
        .iter()
        .enumerate()
        .map(|(nth, (_, heading))| (nth, *heading))
        .collect()
}

/// S9, with S10, S11 and S13: an attacker beside a victim.
pub(super) fn matrix() -> Suite {
    let columns: Vec<usize> = (0..ATTACKS.len()).collect();
    let table = |key, title, digits, victim| Table {
        key,
        title,
        digits,
        columns: attacks(),
        lines: ROWS
            .map(|(name, placement)| {
                Line::new(name, &columns, move |attack| attacked(placement, victim, attack))
            })
            .into(),
        compares: false,
    };
    Suite {
        key: "s9",
        conditions: "Two hosts, a link of 1 Gbit/s (veth, tbf); attacker and victim are applications of one host and write to one sink each; \
                     nodes keep to 900 Mbit/s; all wait adaptively",
        claim: Some(
            "Avatar: nothing. Goal: a victim's p99 at most 2 times that alone, its bandwidth at least 0.95 of its fair share.",
        ),
        tables: vec![
            table(
                "s9_latency_p99_us",
                "S9: WRITE 64 B beside, p99, us",
                0,
                Victim::Latency,
            ),
            table(
                "s9_bandwidth_mb_per_s",
                "S9: WRITE 1 MiB beside, MB/s",
                1,
                Victim::Bandwidth,
            ),
        ],
        ratios: |tables| {
            let mut ratios = Vec::new();
            let [latency, bandwidth] = tables else {
                return ratios;
            };
            for (row, _) in ROWS {
                for (attack, (_, heading)) in ATTACKS.iter().enumerate().skip(1) {
                    ratios.push(Ratio::new(
                        format!("{row}: p99 beside {heading} / alone").leak(),
                        "at most 2.00",
                        &latency.rounds(row, attack),
                        &latency.rounds(row, ALONE),
                    ));
                }
                for (attack, (_, heading)) in ATTACKS.iter().enumerate().skip(1) {
                    ratios.push(Ratio::new(
                        format!("{row}: MB/s beside {heading} / alone").leak(),
                        if HALF.contains(&attack) {
                            "at least 0.48"
                        } else {
                            "at least 0.95"
                        },
                        &bandwidth.rounds(row, attack),
                        &bandwidth.rounds(row, ALONE),
                    ));
                }
            }
            ratios
        },
    }
}

/// Returns the victim's figure.
fn attacked(placement: Placement, victim: Victim, attack: usize) -> Result<f64> {
    let hosts = Setup::new(placement, LINK).start()?;
    let (to_victim, to_attacker) = (hosts.sink(1)?, hosts.sink(1)?);
    let what = match victim {
        Victim::Latency => "--bytes 64",
        Victim::Bandwidth => "--bytes 1048576 --depth 4",
    };
    let victim_args = format!("{what} --time-ms {VICTIM_MS}");
    let mut sources = vec![hosts.source(0, &[&to_victim], &victim_args)?];
    if attack != ALONE {
        // It goes on for a little longer than the victim.
        let args = format!("{} --time-ms {}", ATTACKS[attack].0, VICTIM_MS + 300);
        sources.push(hosts.source(0, &[&to_attacker], &args)?);
    }
    let reports = run(&mut sources)?;
    let report = reports.first().context("no victim")?;
    Ok(match victim {
        Victim::Latency => report.p99_us,
        Victim::Bandwidth => report.rate() / 1e6,
    })
}

/// Applications of S14: messages of 2 KiB and of 1 MiB.
const SMALL: usize = 4;
const LARGE: usize = 3;

/// S14: messages of unequal lengths, with deep queues.
pub(super) fn unequal() -> Suite {
    let (mut rates, mut fairness) = (Vec::new(), Vec::new());
    for (name, placement) in ROWS {
        let [rate, fair] = figures(name, &[0], move |_| lengths(placement));
        rates.push(rate);
        fairness.push(fair);
    }
    let table = |key, title, digits, lines| Table {
        key,
        title,
        digits,
        columns: vec![(0, "4 of 2 KiB, 3 of 1 MiB")],
        lines,
        compares: false,
    };
    Suite {
        key: "s14",
        conditions: "Two hosts, a link of 1 Gbit/s; 4 applications with 256 WRITEs of 2 KiB in flight and 3 with 8 of 1 MiB; nodes keep to 900 \
                     Mbit/s; all wait adaptively",
        claim: Some(
            "Avatar: nothing; its round robin gives shares as the lengths up to its piece. Goal: Jain's index at least 0.99.",
        ),
        tables: vec![
            table("s14_mb_per_s", "S14: all, MB/s", 1, rates),
            table("s14_jain", "S14: Jain's index of their bytes", 3, fairness),
        ],
        ratios: |tables| {
            let ratio = |(row, _)| {
                let rounds = tables[1].rounds(row, 0);
                let ones = vec![1.0; rounds.len()];
                let goal = if row == OWN { "" } else { "at least 0.99" };
                Ratio::new(format!("S14, {row}: Jain's index").leak(), goal, &rounds, &ones)
            };
            ROWS.map(ratio).into()
        },
    }
}

/// Returns the rate of all, in MB/s, and Jain's index of their rates.
fn lengths(placement: Placement) -> Result<[f64; 2]> {
    let hosts = Setup::new(placement, LINK).start()?;
    let sink = hosts.sink(1)?;
    let source = |nth| {
        let what = if nth < SMALL {
            "--bytes 2048 --depth 256"
        } else {
            "--bytes 1048576 --depth 8"
        };
        hosts.source(0, &[&sink], &format!("{what} --time-ms 2000"))
    };
    let mut sources = (0..SMALL + LARGE).map(source).collect::<Result<Vec<Side>>>()?;
    let rates: Vec<f64> = run(&mut sources)?.iter().map(Report::rate).collect();
    Ok([rates.iter().sum::<f64>() / 1e6, jain(&rates)])
}

/// Columns of S12.
const NOTHING: usize = 0;
const APPLICATION: usize = 1;
const NODE: usize = 2;
const PEERS_NODE: usize = 3;
const KILLED: [Column; 4] = [
    (NOTHING, "nothing killed"),
    (APPLICATION, "an application"),
    (NODE, "the node, restarted"),
    (PEERS_NODE, "the peer's, restarted"),
];
/// Time from the beginning to the kill.
const UNTIL_KILL: Duration = Duration::from_millis(1200);
/// Applications, one of which may be killed.
const APPLICATIONS: usize = 4;
/// Periods in which a dip is looked for at a time: 100 ms.
const DIP_PERIODS: usize = 10;

/// S12: SIGKILL of an application and of a node under load.
pub(super) fn kills() -> Suite {
    let (mut gaps, mut dips) = (Vec::new(), Vec::new());
    for (name, placement) in ROWS {
        let columns = match placement {
            Placement::Own => &[NOTHING, APPLICATION][..],
            _ => &[NOTHING, APPLICATION, NODE, PEERS_NODE],
        };
        let [gap, dip] = figures(name, columns, move |what| killed(placement, what));
        gaps.push(gap);
        dips.push(dip);
    }
    let table = |key, title, digits, lines| Table {
        key,
        title,
        digits,
        columns: KILLED.to_vec(),
        lines,
        compares: false,
    };
    Suite {
        key: "s12",
        conditions: "Two hosts, UDP over loopback; 4 applications with 16 WRITEs of 4 KiB in flight each; SIGKILL of one of them, or of their or the peer's node, \
                     which is started again at once, and whose applications open the device and connect anew; figures of those that live; all \
                     wait adaptively",
        claim: Some("Avatar: nothing. Goal: a restarted node takes work within 1 s."),
        tables: vec![
            table("s12_gap_ms", "S12: longest gap of one, ms", 0, gaps),
            table("s12_dip", "S12: worst 100 ms / median of all", 2, dips),
        ],
        ratios: |tables| {
            let mut ratios = Vec::new();
            for row in [NODES, SHARED] {
                for (column, whose) in [(NODE, "the node"), (PEERS_NODE, "the peer's node")] {
                    let rounds = tables[0].rounds(row, column);
                    let second = vec![1000.0; rounds.len()];
                    let name = format!("S12, {row}: gap, {whose} restarted / 1 s").leak();
                    ratios.push(Ratio::new(name, "at most 1.00", &rounds, &second));
                }
            }
            ratios
        },
    }
}

/// Returns the longest time in which one of those that live completed nothing, in ms, and the part of the median of 100 ms that they completed
/// in the worst 100 ms.
fn killed(placement: Placement, what: usize) -> Result<[f64; 2]> {
    let mut hosts = Setup::new(placement, Carrier::Udp).start()?;
    let sink = hosts.sink(1)?;
    // Queue pairs of their own have retried for more than three seconds before they fail.
    let time_ms = if what == PEERS_NODE { 8000 } else { 3000 };
    let args = format!("--bytes 4096 --depth 16 --time-ms {time_ms} --again");
    let source = |_| hosts.source(0, &[&sink], &args);
    let mut sources = (0..APPLICATIONS).map(source).collect::<Result<Vec<Side>>>()?;
    sources.iter_mut().for_each(Side::begin);
    // The load is to run for this long: no event.
    thread::sleep(UNTIL_KILL);
    match what {
        APPLICATION => drop(sources.pop()),
        NODE => hosts.kill_node(0)?,
        PEERS_NODE => hosts.kill_node(1)?,
        _ => (),
    }
    let reports = run(&mut sources)?;
    let gap = reports.iter().map(|report| longest_gap(&report.periods)).max();
    let mut sums: Vec<u64> = Vec::new();
    for report in &reports {
        sums.resize(sums.len().max(report.periods.len()), 0);
        for (sum, count) in sums.iter_mut().zip(&report.periods) {
            *sum += count;
        }
    }
    let mut spans: Vec<u64> = sums.windows(DIP_PERIODS).map(|span| span.iter().sum()).collect();
    spans.sort_unstable();
    let (worst, median) = (spans.first(), spans.get(spans.len() / 2));
    let dip = worst
        .zip(median)
        .map(|(worst, median)| *worst as f64 / (*median).max(1) as f64);
    let gap_ms = gap.context("no application lives")? as u128 * PERIOD.as_millis();
    Ok([gap_ms as f64, dip.context("nothing was sent")?])
}

/// Returns the most periods in succession in which nothing completed.
pub(super) fn longest_gap(periods: &[u64]) -> usize {
    periods
        .split(|count| *count > 0)
        .map(<[u64]>::len)
        .max()
        .unwrap_or(0)
}
