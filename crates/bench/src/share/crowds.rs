//! S2 to S5: many connections, many applications, several hosts.

use anyhow::Result;

use super::super::child::Side;
use super::super::table::{Column, Line, Ratio, Suite, Table, figures};
use super::hosts::{Carrier, Hosts, Placement, Setup, Sink, run};
use super::{OWN, ROWS, SHARED, jain};

/// Connections of one application in S2: a node allows an application 2,048 queue pairs.
const CONNECTIONS_MAX: usize = 1024;
/// Messages in flight in S2, unless there are more connections: as many with one connection as with 1,024.
const IN_FLIGHT: usize = 1024;

const CONNECTIONS: [Column; 8] = [
    (1, "1"),
    (4, "4"),
    (16, "16"),
    (64, "64"),
    (256, "256"),
    (1024, "1024"),
    (4096, "4096"),
    (10_000, "10000"),
];

/// S2: connections between two hosts.
pub(super) fn connections() -> Suite {
    let numbers = CONNECTIONS.map(|(n, _)| n);
    let lines = ROWS.map(|(name, placement)| Line::new(name, &numbers, move |n| connected(placement, n)));
    Suite {
        key: "s2",
        conditions: "Two hosts, UDP over loopback; WRITEs of 4 KiB, 1,024 in flight in all, at least one on each connection; an application for each \
                     1,024 connections; all wait adaptively",
        claim: Some("Avatar: at most 20 % less with 1,024 connections. Goal: less than 2 % less."),
        tables: vec![Table {
            key: "s2_thousand_writes_per_s",
            title: "S2: WRITE 4 KiB by connections, 1000/s",
            digits: 1,
            columns: CONNECTIONS.to_vec(),
            lines: lines.into(),
            compares: true,
        }],
        ratios: |tables| {
            let ratio = |row, n, goal| {
                let name = format!("S2, {row}: {n} connections / 1").leak();
                Ratio::new(name, goal, &tables[0].rounds(row, n), &tables[0].rounds(row, 1))
            };
            let mut ratios = Vec::new();
            for n in [256, 1024, 4096, 10_000] {
                ratios.push(ratio(OWN, n, ""));
                let goal = if n == 1024 { "at least 0.98" } else { "" };
                ratios.push(ratio(SHARED, n, goal));
            }
            ratios
        },
    }
}

/// Returns the thousands of WRITEs a second over so many connections.
fn connected(placement: Placement, connections: usize) -> Result<f64> {
    let hosts = Setup::new(placement, Carrier::Udp).start()?;
    let depth = (IN_FLIGHT / connections).max(1);
    let (mut sinks, mut sources) = (Vec::new(), Vec::new());
    for first in (0..connections).step_by(CONNECTIONS_MAX) {
        let connections = (connections - first).min(CONNECTIONS_MAX);
        let sink = hosts.sink(1)?;
        let args = format!("--bytes 4096 --connections {connections} --depth {depth}");
        sources.push(hosts.source(0, &[&sink], &args)?);
        sinks.push(sink);
    }
    let reports = run(&mut sources)?;
    let rates = reports
        .iter()
        .map(|report| report.messages as f64 / report.seconds);
    Ok(rates.sum::<f64>() / 1e3)
}

const APPLICATIONS: [Column; 5] = [(1, "1"), (2, "2"), (4, "4"), (8, "8"), (16, "16")];
const THREADS: &str = "threads, nodes, --share";

/// S3: applications, and threads of one, that have a connection each.
pub(super) fn applications() -> Suite {
    let numbers = APPLICATIONS.map(|(n, _)| n);
    let (mut rates, mut fairness) = (Vec::new(), Vec::new());
    for (name, placement) in ROWS {
        let [rate, fair] = figures(name, &numbers, move |n| together(placement, n));
        rates.push(rate);
        fairness.push(fair);
    }
    rates.push(Line::new(THREADS, &numbers, threads));
    let table = |key, title, digits, lines| Table {
        key,
        title,
        digits,
        columns: APPLICATIONS.to_vec(),
        lines,
        compares: false,
    };
    Suite {
        key: "s3",
        conditions: "Two hosts, UDP over loopback; WRITEs of 4 KiB, 16 in flight on the one connection of each application (or thread); all wait \
                     adaptively",
        claim: Some("Avatar: no loss by a mutex. Goal: no loss, Jain's index at least 0.99."),
        tables: vec![
            table(
                "s3_thousand_writes_per_s",
                "S3: WRITE 4 KiB by applications, 1000/s",
                1,
                rates,
            ),
            table("s3_jain", "S3: Jain's index of their rates", 3, fairness),
        ],
        ratios: |tables| {
            let ratio = |row, n| {
                let name = format!("S3, {row}: {n} / 1").leak();
                let goal = if row == OWN { "" } else { "at least 1.00" };
                Ratio::new(name, goal, &tables[0].rounds(row, n), &tables[0].rounds(row, 1))
            };
            let mut ratios = vec![ratio(OWN, 16), ratio(SHARED, 16), ratio(THREADS, 16)];
            for (row, _) in ROWS {
                let rounds = tables[1].rounds(row, 16);
                let ones = vec![1.0; rounds.len()];
                let name = format!("S3, {row}: Jain's index of 16").leak();
                let goal = if row == OWN { "" } else { "at least 0.99" };
                ratios.push(Ratio::new(name, goal, &rounds, &ones));
            }
            ratios
        },
    }
}

/// Returns the thousands of WRITEs a second of so many applications, and Jain's index of their rates.
fn together(placement: Placement, applications: usize) -> Result<[f64; 2]> {
    let hosts = Setup::new(placement, Carrier::Udp).start()?;
    let sink = hosts.sink(1)?;
    let source = |_| hosts.source(0, &[&sink], "--bytes 4096 --depth 16");
    let mut sources = (0..applications).map(source).collect::<Result<Vec<Side>>>()?;
    let reports = run(&mut sources)?;
    let rates: Vec<f64> = reports
        .iter()
        .map(|report| report.messages as f64 / 1e3)
        .collect();
    Ok([rates.iter().sum::<f64>(), jain(&rates)])
}

/// Returns the thousands of WRITEs a second of so many threads of an application.
fn threads(threads: usize) -> Result<f64> {
    let hosts = Setup::new(Placement::Shared, Carrier::Udp).start()?;
    let sink = hosts.sink(1)?;
    let args = format!("--bytes 4096 --depth 16 --threads {threads} --connections {threads}");
    let report = run(&mut [hosts.source(0, &[&sink], &args)?])?;
    Ok(report[0].messages as f64 / report[0].seconds / 1e3)
}

/// Columns of S4: connections of each pair of hosts.
const PAIRS: [Column; 4] = [(1, "1"), (16, "16"), (64, "64"), (256, "256")];
const S4_HOSTS: usize = 4;
/// Messages in flight from each host: one on each connection where there are most.
const IN_FLIGHT_OF_HOST: usize = 768;
/// Columns of S5: hosts.
const HOSTS: [Column; 3] = [(2, "2"), (3, "3"), (4, "4")];
const S5_CONNECTIONS: usize = 64;

/// S4 and S5: all hosts to all others.
pub(super) fn clusters() -> [Suite; 2] {
    let s4 = Suite {
        key: "s4",
        conditions: "4 hosts, each writes to the 3 others, UDP over loopback; WRITEs of 4 KiB, 768 in flight in all from each host; \
                     all wait adaptively",
        claim: Some(
            "Avatar: 10 to 20 % more than native, where the RNIC's cache misses as connections become many. A soft device has no such cache.",
        ),
        tables: vec![Table {
            key: "s4_thousand_writes_per_s",
            title: "S4: by connections of a pair, 1000/s",
            digits: 1,
            columns: PAIRS.to_vec(),
            lines: lines(&PAIRS, |placement, n| cluster(placement, S4_HOSTS, n)),
            compares: true,
        }],
        ratios: |tables| to_native(&tables[0], "S4", &PAIRS),
    };
    let s5 = Suite {
        key: "s5",
        conditions: "As S4, with 64 connections of each pair of hosts",
        claim: Some("Avatar: 8 to 25 % more than native, as S4."),
        tables: vec![Table {
            key: "s5_thousand_writes_per_s",
            title: "S5: by hosts, 1000/s",
            digits: 1,
            columns: HOSTS.to_vec(),
            lines: lines(&HOSTS, |placement, hosts| {
                cluster(placement, hosts, S5_CONNECTIONS)
            }),
            compares: true,
        }],
        ratios: |tables| to_native(&tables[0], "S5", &HOSTS),
    };
    [s4, s5]
}

fn lines(columns: &[Column], measure: fn(Placement, usize) -> Result<f64>) -> Vec<Line> {
    let numbers: Vec<usize> = columns.iter().map(|(n, _)| *n).collect();
    let line = |(name, placement)| Line::new(name, &numbers, move |n| measure(placement, n));
    ROWS.into_iter().map(line).collect()
}

fn to_native(table: &Table, key: &str, columns: &[Column]) -> Vec<Ratio> {
    let ratio = |(n, heading): &(usize, &str)| {
        Ratio::new(
            format!("{key}, {heading}: {SHARED} / {OWN}").leak(),
            "at least 1.00",
            &table.rounds(SHARED, *n),
            &table.rounds(OWN, *n),
        )
    };
    columns.iter().map(ratio).collect()
}

/// Returns the thousands of WRITEs a second of all hosts.
fn cluster(placement: Placement, number: usize, connections: usize) -> Result<f64> {
    let setup = Setup {
        hosts: number,
        ..Setup::new(placement, Carrier::Udp)
    };
    let hosts: Hosts = setup.start()?;
    let sinks = (0..number)
        .map(|host| hosts.sink(host))
        .collect::<Result<Vec<Sink>>>()?;
    let connections = connections * (number - 1);
    let depth = (IN_FLIGHT_OF_HOST / connections).max(1);
    let args = format!("--bytes 4096 --connections {connections} --depth {depth}");
    let source = |host: usize| {
        let others = sinks.iter().enumerate().filter(|(other, _)| *other != host);
        let others: Vec<&Sink> = others.map(|(_, sink)| sink).collect();
        hosts.source(host, &others, &args)
    };
    let mut sources = (0..number).map(source).collect::<Result<Vec<Side>>>()?;
    let reports = run(&mut sources)?;
    let rates = reports
        .iter()
        .map(|report| report.messages as f64 / report.seconds);
    Ok(rates.sum::<f64>() / 1e3)
}
