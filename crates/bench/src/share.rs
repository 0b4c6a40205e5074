//! The cost of several users of a queue pair.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::pair::{Server, free_port};
use super::scale::{QueuePairs, rate};
use super::table::{Column, Line, Ratio, Suite, Table};

const THREADS: [Column; 5] = [(1, "1"), (3, "3"), (6, "6"), (9, "9"), (12, "12")];
const OWN: &str = "a queue pair each";
const ONE: &str = "one queue pair";

const SIZES: [(u32, &str, &str); 2] = [
    (
        64,
        "s1_64_million_writes_per_s",
        "S1: WRITE 64 B by threads, millions/s",
    ),
    (
        4096,
        "s1_4096_million_writes_per_s",
        "S1: WRITE 4 KiB by threads, millions/s",
    ),
];

const BYTES: [Column; 5] = [
    (8, "8"),
    (4096, "4096"),
    (16384, "16384"),
    (262_144, "262144"),
    (1 << 20, "1048576"),
];
const ITERATIONS: u32 = 2000;
const SECONDS_MAX: &str = "20";

/// Tests of `rdmux perf`, with the keys and titles of their tables.
const LATENCIES: [(&str, &str, &str); 3] = [
    ("write-lat", "s7_write_us", "S7: WRITE by bytes, us"),
    ("send-lat", "s7_send_us", "S7: SEND by bytes, us"),
    ("read-lat", "s7_read_us", "S7: READ by bytes, us"),
];

/// Place of the engine and of the queue pairs of a pair of programs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// In each program.
    Own,
    /// In each program, and the programs reach each other over UDP.
    Udp,
    /// In a node that serves both.
    OneNode,
    /// In a node for each.
    TwoNodes,
    /// In a node for each; the nodes share queue pairs.
    Shared,
}

const PLACEMENTS: [(Placement, &str); 5] = [
    (Placement::Own, "engines of their own"),
    (Placement::OneNode, "one node"),
    (Placement::TwoNodes, "two nodes"),
    (Placement::Shared, "two nodes, --share"),
    (Placement::Udp, "engines of their own, UDP"),
];

pub(super) fn suite() -> Suite {
    let mut tables: Vec<Table> = SIZES.into_iter().map(threads).collect();
    tables.extend(LATENCIES.into_iter().map(latencies));
    Suite {
        key: "share",
        conditions: "shared memory; S1: one engine in each process, unsignaled WRITEs of threads pinned in turn to all CPUs, 0.5 s each; \
                     S7: two programs where the scheduler puts them, which poll",
        tables,
        ratios,
    }
}

fn latencies((test, key, title): (&'static str, &'static str, &'static str)) -> Table {
    let columns = BYTES.map(|(bytes, _)| bytes);
    let line = |(placement, name)| Line::new(name, &columns, move |bytes| latency(test, bytes, placement));
    Table {
        key,
        title,
        digits: 2,
        columns: BYTES.to_vec(),
        lines: PLACEMENTS.into_iter().map(line).collect(),
        compares: true,
    }
}

/// Returns the median latency of a pair of programs.
fn latency(test: &str, bytes: usize, placement: Placement) -> Result<f64> {
    const SERVER: &str = "127.0.0.1";
    let folder = TempDir::new()?;
    let rdmux = super::rdmux()?;
    let command = || {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", SECONDS_MAX]).arg(&rdmux);
        // The user may have nodes.
        command.env("XDG_RUNTIME_DIR", folder.path());
        command.env("XDG_CONFIG_HOME", folder.path());
        command.env_remove("RDMUX_PROVIDER").stdin(Stdio::null());
        command
    };
    let client_address = match placement {
        Placement::Own | Placement::OneNode => SERVER,
        Placement::TwoNodes | Placement::Shared | Placement::Udp => "127.0.0.2",
    };
    let has_nodes = !matches!(placement, Placement::Own | Placement::Udp);
    let mut nodes = Vec::new();
    if has_nodes {
        let mut addresses = vec![SERVER, client_address];
        addresses.dedup();
        for address in addresses {
            let mut node = command();
            node.args(["node", "--device", address]);
            node.args((placement == Placement::Shared).then_some("--share"));
            nodes.push(Server::start_until(&mut node, "ready")?);
        }
    }
    let port = free_port()?;
    let perf = |address: &str| {
        let mut perf = command();
        perf.args(["perf", test, "--bind", address, "-p", &port]);
        if has_nodes {
            perf.env("RDMUX_PROVIDER", "shared");
        }
        if placement == Placement::Udp {
            perf.env("RDMUX_SHM", "off");
        }
        perf
    };
    let _server = Server::start_until(&mut perf(SERVER), "Waiting for client")?;
    let mut client = perf(client_address);
    client.args([SERVER, "--json", "-s", &bytes.to_string()]);
    client.args(["-n", &ITERATIONS.to_string()]);
    let output = client.output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    nodes.iter().for_each(Server::interrupt);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    value["results"][0]["t_typical"]
        .as_f64()
        .context("no such figure in perf's output")
}

fn threads((bytes, key, title): (u32, &'static str, &'static str)) -> Table {
    let numbers = THREADS.map(|(n, _)| n);
    Table {
        key,
        title,
        digits: 2,
        columns: THREADS.to_vec(),
        lines: vec![
            Line::new(OWN, &numbers, move |n| rate(&[n], bytes, QueuePairs::Own)),
            Line::new(ONE, &numbers, move |n| rate(&[n], bytes, QueuePairs::One)),
        ],
        compares: true,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (table, size) in tables.iter().zip(["64 B", "4 KiB"]) {
        for n in [6, 9] {
            ratios.push(Ratio::new(
                format!("S1, {size}: one queue pair, {n} threads / 1 thread").leak(),
                // The deck's loss: 34 % with 6 threads, 44 % with 9.
                if n == 6 { "at least 0.66" } else { "at least 0.56" },
                &table.rounds(ONE, n),
                &table.rounds(ONE, 1),
            ));
        }
    }
    ratios
}
