//! S7: latency of one pair of programs.

use anyhow::{Context, Result, ensure};

use super::super::pair::{Server, free_port};
use super::super::table::{Column, Line, Ratio, Suite, Table};
use super::hosts::{Carrier, Placement, Setup};

const BYTES: [Column; 5] = [
    (8, "8"),
    (4096, "4096"),
    (16384, "16384"),
    (262_144, "262144"),
    (1 << 20, "1048576"),
];
const ITERATIONS: u32 = 2000;

/// Tests of `rdmux perf`, with the keys and titles of their tables.
const LATENCIES: [(&str, &str, &str); 3] = [
    ("write-lat", "s7_write_us", "S7: WRITE by bytes, us"),
    ("send-lat", "s7_send_us", "S7: SEND by bytes, us"),
    ("read-lat", "s7_read_us", "S7: READ by bytes, us"),
];

const OWN: &str = "engines of their own";
const ONE_NODE: &str = "one node";
const SHARED: &str = "two nodes, --share";

const ROWS: [(&str, Placement, Carrier, usize); 5] = [
    (OWN, Placement::Own, Carrier::Memory, 1),
    (ONE_NODE, Placement::Nodes, Carrier::Memory, 1),
    ("two nodes", Placement::Nodes, Carrier::Memory, 2),
    (SHARED, Placement::Shared, Carrier::Memory, 2),
    ("engines of their own, UDP", Placement::Own, Carrier::Udp, 2),
];

pub(super) fn suite() -> Suite {
    Suite {
        key: "s7",
        conditions: "Two programs that poll, one message at a time; all of it where the scheduler puts it; shared memory, the last row UDP",
        claim: Some(
            "Avatar: 1 to 2 us more below 16 KB, 37 % less at 256 KB. Goal: 0.5 us more within a process (S1 has that: no worker).",
        ),
        tables: LATENCIES.into_iter().map(table).collect(),
        ratios: |tables| {
            let mut ratios = Vec::new();
            for (bytes, size) in [
                (8, "8 B"),
                (4096, "4 KiB"),
                (16384, "16 KiB"),
                (262_144, "256 KiB"),
            ] {
                for row in [ONE_NODE, SHARED] {
                    ratios.push(Ratio::new(
                        format!("S7, WRITE {size}: {row} / own").leak(),
                        if bytes == 262_144 { "at most 0.63" } else { "" },
                        &tables[0].rounds(row, bytes),
                        &tables[0].rounds(OWN, bytes),
                    ));
                }
            }
            ratios
        },
    }
}

fn table((test, key, title): (&'static str, &'static str, &'static str)) -> Table {
    let columns = BYTES.map(|(bytes, _)| bytes);
    let line = |(name, placement, carrier, hosts)| {
        let setup = Setup {
            hosts,
            ..Setup::new(placement, carrier)
        };
        Line::new(name, &columns, move |bytes| {
            latency(setup, test, &format!("-s {bytes} -n {ITERATIONS}"), "t_typical")
        })
    };
    Table {
        key,
        title,
        digits: 2,
        columns: BYTES.to_vec(),
        lines: ROWS.into_iter().map(line).collect(),
        compares: true,
    }
}

/// Runs a test of `rdmux perf`; returns a figure of its row.
pub(super) fn latency(setup: Setup, test: &str, args: &str, key: &str) -> Result<f64> {
    let hosts = setup.start()?;
    let rdmux = super::super::rdmux()?;
    let port = free_port()?;
    let perf = |host: usize| {
        let mut perf = hosts.program(host, &rdmux);
        perf.args(["perf", test, "--bind", hosts.address(host), "-p", &port]);
        perf
    };
    let _server = Server::start_until(&mut perf(0), "Waiting for client")?;
    let mut client = perf(setup.hosts - 1);
    client
        .args([hosts.address(0), "--json"])
        .args(args.split_whitespace());
    let output = client.output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let value: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    value["results"][0][key]
        .as_f64()
        .context("no such figure in perf's output")
}
