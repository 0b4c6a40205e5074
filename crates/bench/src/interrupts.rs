//! Wake-ups of a storage service (`rdmux perf storage`) under each policy of moderation, with private completion queues and with a pool.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::pair::{Server, crowded, free_port};
use super::plot::{File, draw};
use super::table::{Column, Line, Ratio, Suite, Table};

/// Seconds of a run.
const SECONDS: &str = "1";
/// Seconds after which a client is killed.
const SECONDS_MAX: &str = "20";
const LATENCY: &str = "20us";
const IODEPTH: &str = "32";
/// Added to a number of connections: the server has two reactors.
const TWO_REACTORS: usize = 1_000;
/// Added to a number of reactors: each has 8 connections, of a client of its own, and client and server run on all CPUs.
const REACTORS: usize = 10_000;

/// Load of a column.
struct Load {
    reactors: usize,
    clients: usize,
    /// Connections of each client.
    connections: usize,
}

impl Load {
    fn of(column: usize) -> Load {
        let (reactors, clients, connections) = match column {
            REACTORS.. => (column - REACTORS, column - REACTORS, 8),
            TWO_REACTORS.. => (2, 1, column - TWO_REACTORS),
            _ => (1, 1, column),
        };
        Load {
            reactors,
            clients,
            connections,
        }
    }
}

/// A policy, and the completion queues of the server.
#[derive(Clone, Copy)]
struct Policy {
    name: &'static str,
    moderation: &'static str,
    queues: &'static str,
}

const fn policy(name: &'static str, moderation: &'static str, queues: &'static str) -> Policy {
    Policy {
        name,
        moderation,
        queues,
    }
}

const OFF_PRIVATE: Policy = policy("off, private", "off", "private");
const FIXED_PRIVATE: Policy = policy("fixed 16,32us, private", "16,32us", "private");
const DIM_PRIVATE: Policy = policy("dim, private", "dim", "private");
const RATE_PRIVATE: Policy = policy("rate, private", "rate", "private");
const OFF_POOL: Policy = policy("off, pool", "off", "pool");
const DIM_POOL: Policy = policy("dim, pool", "dim", "pool");
const RATE_POOL: Policy = policy("rate, pool", "rate", "pool");

const POLICIES: [Policy; 6] = [
    OFF_PRIVATE,
    FIXED_PRIVATE,
    DIM_PRIVATE,
    OFF_POOL,
    DIM_POOL,
    RATE_POOL,
];
/// Under a low load.
const LOW: [Policy; 6] = [
    OFF_PRIVATE,
    DIM_PRIVATE,
    RATE_PRIVATE,
    OFF_POOL,
    DIM_POOL,
    RATE_POOL,
];

#[derive(Clone, Copy)]
struct Workload {
    /// Name in keys and in the names of files.
    key: &'static str,
    title: &'static str,
    rw: &'static str,
    drives: &'static str,
    over_udp: bool,
    is_asleep: bool,
    columns: &'static [Column],
}

const MEMORY: usize = 0;
const UDP: usize = 1;
/// Over shared memory, with a server that never polls: each command wakes it, and moderation may delay each.
const ASLEEP: usize = 2;
const CONNECTIONS: [Column; 3] = [(1, "1"), (8, "8"), (64, "64")];
const CONNECTIONS_AND_REACTORS: [Column; 4] = [
    (1, "1"),
    (8, "8"),
    (64, "64"),
    (64 + TWO_REACTORS, "64, 2 reactors"),
];

/// The numbers of reactors that are measured where the machine has a CPU for each and for its client.
const ON_CORES: [Column; 4] = [
    (REACTORS + 1, "1"),
    (REACTORS + 2, "2"),
    (REACTORS + 4, "4"),
    (REACTORS + 8, "8"),
];

const WORKLOADS: [Workload; 4] = [
    Workload {
        key: "read_4_drives_memory",
        title: "read, 4 drives, mem",
        rw: "randread",
        drives: "4",
        over_udp: false,
        is_asleep: false,
        columns: &CONNECTIONS_AND_REACTORS,
    },
    Workload {
        key: "read_1_drive_memory",
        title: "read, 1 drive, mem",
        rw: "randread",
        drives: "1",
        over_udp: false,
        is_asleep: false,
        columns: &CONNECTIONS,
    },
    Workload {
        key: "write_4_drives_memory",
        title: "write, 4 drives, mem",
        rw: "randwrite",
        drives: "4",
        over_udp: false,
        is_asleep: false,
        columns: &CONNECTIONS,
    },
    Workload {
        key: "read_4_drives_udp",
        title: "read, 4 drives, UDP",
        rw: "randread",
        drives: "4",
        over_udp: true,
        is_asleep: false,
        columns: &CONNECTIONS,
    },
];

/// The workloads of `--table reactors`.
const WORKLOADS_ON_CORES: [Workload; 2] = [
    Workload {
        key: "reactors_memory",
        title: "read, N reactors, mem",
        rw: "randread",
        drives: "4",
        over_udp: false,
        is_asleep: false,
        columns: &ON_CORES,
    },
    Workload {
        key: "reactors_udp",
        title: "read, N reactors, UDP",
        rw: "randread",
        drives: "4",
        over_udp: true,
        is_asleep: false,
        columns: &ON_CORES,
    },
];

impl Workload {
    /// Returns the conditions that a plot states.
    fn conditions(&self) -> String {
        let order = if self.rw == "randread" { "reads" } else { "writes" };
        let carrier = if self.over_udp { "UDP" } else { "shared memory" };
        format!(
            "4 KiB, {} drives of 20 us, {order} over {carrier}, 32 in flight on each connection; by connections or reactors; medians",
            self.drives
        )
    }

    /// Returns the columns that this machine has the CPUs for.
    fn columns(&self) -> Vec<Column> {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let fits = |column: usize| column < REACTORS || 2 * (column - REACTORS) <= cpus;
        let columns = self.columns.iter().copied();
        columns.filter(|(column, _)| fits(*column)).collect()
    }
}

/// A quantity of each run.
struct Figure {
    key: &'static str,
    title: &'static str,
    digits: usize,
    of: fn(&Value) -> Option<f64>,
}

const KIOPS: &str = "thousand_iops";
const WAKE_UPS: &str = "wake_ups_per_s";
const P99_99: &str = "p99_99_us";

const FIGURES: [Figure; 6] = [
    Figure {
        key: KIOPS,
        title: "1000 IOPS",
        digits: 1,
        of: |run| Some(run["iops"].as_f64()? / 1e3),
    },
    Figure {
        key: WAKE_UPS,
        title: "wake-ups/s",
        digits: 0,
        of: |run| {
            let per_second = &run["server_per_s"];
            Some(per_second["reactor_wakeups"].as_f64()? + per_second["other_wakeups"].as_f64()?)
        },
    },
    Figure {
        key: "p50_us",
        title: "p50, us",
        digits: 0,
        of: |run| run["latency_us"]["p50"].as_f64(),
    },
    Figure {
        key: "p99_us",
        title: "p99, us",
        digits: 0,
        of: |run| run["latency_us"]["p99"].as_f64(),
    },
    Figure {
        key: P99_99,
        title: "p99.99, us",
        digits: 0,
        of: |run| run["latency_us"]["p99.99"].as_f64(),
    },
    Figure {
        key: "server_cpu_us",
        title: "CPU/IO, us",
        digits: 2,
        of: |run| run["server_cpu_us"].as_f64(),
    },
];

const LOW_LOAD: &str = "low_load_p50_us";

pub(super) fn suite() -> Suite {
    let mut tables: Vec<Table> = WORKLOADS.into_iter().flat_map(tables).collect();
    tables.push(Table {
        key: LOW_LOAD,
        title: "1 command in flight: p50, us",
        digits: 2,
        columns: vec![(MEMORY, "memory"), (UDP, "UDP"), (ASLEEP, "asleep")],
        lines: LOW.into_iter().map(low_load).collect(),
        compares: true,
    });
    Suite {
        key: "interrupts",
        conditions: "rdmux perf storage, drives of 20 us, 4 KiB, 32 in flight on each connection, 1 thread of the client, 1 s each; both \
                     sides where the scheduler puts them, on CPU 0 and 1",
        claim: None,
        tables,
        ratios,
    }
}

/// The same service with as many reactors and clients as the machine has CPUs for.
pub(super) fn suite_on_cores() -> Suite {
    Suite {
        key: "reactors",
        conditions: "rdmux perf storage, 4 drives of 20 us, 4 KiB, 32 in flight on each of 8 connections of each client, a client for each reactor, \
                     1 s each; latencies of the slowest client; all where the scheduler puts them, on all CPUs",
        claim: None,
        tables: WORKLOADS_ON_CORES.into_iter().flat_map(tables).collect(),
        ratios: ratios_on_cores,
    }
}

/// Returns the tables of a workload, one for each figure. The rows of the first measure, and leave their figures to the others.
fn tables(workload: Workload) -> Vec<Table> {
    let mut figures: Vec<Table> = FIGURES
        .iter()
        .map(|figure| Table {
            key: format!("{}_{}", workload.key, figure.key).leak(),
            title: format!("{}: {}", workload.title, figure.title).leak(),
            digits: figure.digits,
            columns: workload.columns(),
            lines: Vec::new(),
            compares: figure.key == KIOPS,
        })
        .collect();
    let columns: Vec<usize> = workload.columns().iter().map(|(column, _)| *column).collect();
    for policy in POLICIES {
        let runs = Rc::new(RefCell::new(BTreeMap::new()));
        for (nth, (table, figure)) in figures.iter_mut().zip(&FIGURES).enumerate() {
            let (runs, of) = (runs.clone(), figure.of);
            table.lines.push(Line::new(policy.name, &columns, move |column| {
                if nth == 0 {
                    let run = run(policy, workload, column, IODEPTH)?;
                    runs.borrow_mut().insert(column, run);
                }
                let runs = runs.borrow();
                let run: &Value = runs.get(&column).context("see above")?;
                of(run).context("no such figure in perf's output")
            }));
        }
    }
    figures
}

fn low_load(policy: Policy) -> Line {
    Line::new(policy.name, &[MEMORY, UDP, ASLEEP], move |carrier| {
        let workload = Workload {
            over_udp: carrier == UDP,
            is_asleep: carrier == ASLEEP,
            ..WORKLOADS[0]
        };
        let run = run(policy, workload, 1, "1")?;
        run["latency_us"]["p50"]
            .as_f64()
            .context("no p50 in perf's output")
    })
}

/// Runs a server and its clients; returns what the client prints, or the figures of all clients.
fn run(policy: Policy, workload: Workload, column: usize, iodepth: &str) -> Result<Value> {
    let load = Load::of(column);
    let connections = load.connections.to_string();
    let port = free_port()?;
    let rdmux = super::rdmux()?;
    let command = |program: &str, more: &[&str]| -> Result<_> {
        let mut command = match column {
            REACTORS.. => Command::new(program),
            _ => crowded(program)?,
        };
        command
            .args(more)
            .args(["perf", "storage", "--json", "-p", &port]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.stdin(Stdio::null()).env_remove("RDMUX_MODERATION");
        if workload.over_udp {
            command.env("RDMUX_SHM", "off");
        }
        Ok(command)
    };
    let rdmux = rdmux.to_str().context("the path of rdmux is no text")?;
    let mut server = command(rdmux, &[])?;
    server.args(["--drives", workload.drives, "--latency", LATENCY]);
    server.args([
        "--reactors",
        &load.reactors.to_string(),
        "--queues",
        policy.queues,
    ]);
    server.args(["--moderation", policy.moderation]);
    if workload.is_asleep {
        server.env("RDMUX_WAIT", "blocked");
    }
    let server = Server::start_until(&mut server, "listening")?;
    let clients = (0..load.clients).map(|_| {
        let mut client = command("timeout", &["-s", "KILL", SECONDS_MAX, rdmux])?;
        client.args(["127.0.0.1", "-D", SECONDS, "--bs", "4096", "--rw", workload.rw]);
        client.args(["--connections", &connections, "--iodepth", iodepth]);
        Ok(client.spawn()?)
    });
    let clients: Vec<Child> = clients.collect::<Result<_>>()?;
    let mut figures = Vec::new();
    for client in clients {
        let output = client.wait_with_output()?;
        ensure!(
            output.status.success(),
            "the client: {}, {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        figures.push(serde_json::from_slice(&output.stdout)?);
    }
    server.interrupt();
    together(figures)
}

/// Returns the figures of clients of one server: the sum of their IOPS, the latencies of the slowest, and what the server says to one of them,
/// since it counts for all.
fn together(figures: Vec<Value>) -> Result<Value> {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut figures = figures.into_iter();
    let mut all = figures.next().context("no client")?;
    let of_first = number(&all["iops"]);
    for one in figures {
        all["iops"] = (number(&all["iops"]) + number(&one["iops"])).into();
        for percentile in ["p50", "p99", "p99.99"] {
            let slowest = number(&all["latency_us"][percentile]).max(number(&one["latency_us"][percentile]));
            all["latency_us"][percentile] = slowest.into();
        }
    }
    // A client divides the server's processor time by its own commands.
    let share = of_first / number(&all["iops"]);
    all["server_cpu_us"] = (number(&all["server_cpu_us"]) * share).into();
    Ok(all)
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let rounds = |key: &str, policy: Policy, column| -> Vec<f64> {
        let table = tables.iter().find(|table| table.key == key);
        table.map_or(Vec::new(), |table| table.rounds(policy.name, column))
    };
    let mut ratios = Vec::new();
    for (workload, carrier) in [(&WORKLOADS[0], "memory"), (&WORKLOADS[3], "UDP")] {
        let rounds = |figure, policy, column| rounds(&format!("{}_{figure}", workload.key), policy, column);
        for n in [8, 64] {
            ratios.push(Ratio::new(
                format!("{carrier}, {n}: wake-ups, off private / rate pool").leak(),
                "at least 4.00",
                &rounds(WAKE_UPS, OFF_PRIVATE, n),
                &rounds(WAKE_UPS, RATE_POOL, n),
            ));
        }
        for (figure, title, goal) in [
            (KIOPS, "IOPS", "at least 1.00"),
            (P99_99, "p99.99", "at most 1.00"),
        ] {
            for (n, policy, short) in [8, 64]
                .into_iter()
                .flat_map(|n| [(n, RATE_POOL, "rate pool"), (n, DIM_POOL, "dim pool")])
            {
                ratios.push(Ratio::new(
                    format!("{carrier}, {n}: {title}, {short} / off private").leak(),
                    goal,
                    &rounds(figure, policy, n),
                    &rounds(figure, OFF_PRIVATE, n),
                ));
            }
        }
    }
    for (carrier, title) in [(MEMORY, "memory"), (UDP, "UDP"), (ASLEEP, "asleep")] {
        for (policy, off) in [
            (DIM_PRIVATE, OFF_PRIVATE),
            (RATE_PRIVATE, OFF_PRIVATE),
            (DIM_POOL, OFF_POOL),
            (RATE_POOL, OFF_POOL),
        ] {
            ratios.push(Ratio::new(
                format!("{title}, low load: p50, {} / off", policy.name).leak(),
                "at most 1.02",
                &rounds(LOW_LOAD, policy, carrier),
                &rounds(LOW_LOAD, off, carrier),
            ));
        }
    }
    ratios
}

fn ratios_on_cores(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (workload, carrier) in WORKLOADS_ON_CORES.iter().zip(["memory", "UDP"]) {
        let rounds = |figure: &str, policy: Policy, column| -> Vec<f64> {
            let key = format!("{}_{figure}", workload.key);
            let table = tables.iter().find(|table| table.key == key);
            table.map_or(Vec::new(), |table| table.rounds(policy.name, column))
        };
        for (column, n) in workload.columns() {
            for (policy, short) in [(RATE_POOL, "rate pool"), (DIM_POOL, "dim pool")] {
                let ratio = |name: String, goal, figure: &str, inverse: bool| {
                    let (of, to) = (
                        rounds(figure, policy, column),
                        rounds(figure, OFF_PRIVATE, column),
                    );
                    let (of, to) = if inverse { (to, of) } else { (of, to) };
                    Ratio::new(name.leak(), goal, &of, &to)
                };
                ratios.push(ratio(
                    format!("{carrier}, {n}: wake-ups, off private / {short}"),
                    "at least 4.00",
                    WAKE_UPS,
                    true,
                ));
                ratios.push(ratio(
                    format!("{carrier}, {n}: IOPS, {short} / off private"),
                    "at least 1.00",
                    KIOPS,
                    false,
                ));
                ratios.push(ratio(
                    format!("{carrier}, {n}: p99.99, {short} / off private"),
                    "at most 1.00",
                    P99_99,
                    false,
                ));
            }
        }
    }
    ratios
}

/// Draws a plot for each workload; returns the names and contents of the files.
pub(super) fn plots(tables: &[Table]) -> Vec<File> {
    WORKLOADS
        .iter()
        .chain(&WORKLOADS_ON_CORES)
        .filter_map(|workload| {
            let panels = [KIOPS, WAKE_UPS].map(|figure| {
                let key = format!("{}_{figure}", workload.key);
                tables.iter().find(|table| table.key == key)
            });
            let panels: Vec<&Table> = panels.into_iter().flatten().collect();
            (!panels.is_empty()).then(|| {
                let name = format!("interrupts-{}.svg", workload.key.replace('_', "-"));
                (name, draw(&workload.conditions(), &panels))
            })
        })
        .collect()
}
