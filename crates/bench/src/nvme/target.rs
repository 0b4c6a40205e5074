//! A target alone: its CPU time under a low load and with idle hosts, its reactors, and its wake-ups under each policy of moderation.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rdmux_nvmf::host::{Options, Session};
use rdmux_wire::nvme::Nqn;
use serde_json::Value;

use super::{QUEUE, Target, Transport, cpu_ns, perf_of};
use crate::LOOPBACK;
use crate::child::{Side, say_ready};
use crate::table::{Column, Line, Ratio, Suite, Table, figures};

/// First argument after [`super::COMMAND`] of a process of idle hosts.
pub(super) const IDLE: &str = "idle";
const IDLE_HOSTS: usize = 100;
/// Time for which idle hosts are watched: some keep-alives of each.
const IDLE_TIME: Duration = Duration::from_secs(6);

const CPU: &str = "cpu_percent_of_a_core";
const REACTORS_IOPS: &str = "reactors_thousand_iops";
const TARGET: &str = "target";
const HOST: &str = "host";
const OVER_TCP: &str = "TCP";
const OVER_RDMA: &str = "RDMA";

const RATE_TCP: usize = 0;
const RATE_RDMA: usize = 1;
const IDLE_TCP: usize = 2;
const LOW_LOADS: [Column; 3] = [
    (RATE_TCP, "1,000 IOPS, TCP"),
    (RATE_RDMA, "1,000 IOPS, RDMA"),
    (IDLE_TCP, "100 idle hosts, TCP"),
];
const REACTORS: [Column; 3] = [(1, "1 reactor"), (2, "2"), (4, "4")];

const MODERATED: [Column; 4] = [
    (QUEUE + 1, "1 in flight"),
    (QUEUE + 8, "8"),
    (QUEUE + 32, "32"),
    (4 * QUEUE + 32, "4 queues of 32"),
];
/// The policies, by the values of `RDMUX_MODERATION`.
const POLICIES: [&str; 4] = ["off", "16,32us", "dim", "rate"];

/// A quantity of a run under a policy: its key, its title, its digits, and its value in the run's report.
type Figure = (&'static str, &'static str, usize, fn(&Value) -> Option<f64>);

const MODERATED_IOPS: &str = "moderated_thousand_iops";
const FIGURES: [Figure; 5] = [
    (MODERATED_IOPS, "reads by RDMA: 1000 IOPS", 1, |run| {
        Some(run["iops"].as_f64()? / 1e3)
    }),
    ("moderated_sleeps_per_thousand", "sleeps/1000 IOs", 1, |run| {
        Some(run["sleeps"].as_f64()? / run["ios"].as_f64()? * 1e3)
    }),
    ("moderated_p50_us", "p50, us", 1, |run| {
        run["latency_us"]["percentiles"]["50.00"].as_f64()
    }),
    ("moderated_p99_us", "p99, us", 1, |run| {
        run["latency_us"]["percentiles"]["99.00"].as_f64()
    }),
    ("moderated_cpu_s_per_million", "CPU s/million IOs", 2, |run| {
        Some(run["cpu_ns"].as_f64()? / 1e3 / run["ios"].as_f64()?)
    }),
];

pub(super) fn suite() -> Suite {
    let columns = [RATE_TCP, RATE_RDMA, IDLE_TCP];
    let host = Rc::new(RefCell::new(BTreeMap::new()));
    let of_host = host.clone();
    let cpu = Table {
        key: CPU,
        title: "CPU, % of a core",
        digits: 2,
        columns: LOW_LOADS.to_vec(),
        lines: vec![
            Line::new(TARGET, &columns, move |column| match column {
                RATE_TCP => at_rate(Transport::Tcp, &mut host.borrow_mut()),
                RATE_RDMA => at_rate(Transport::Rdma, &mut host.borrow_mut()),
                _ => with_idle_hosts(),
            }),
            Line::new(HOST, &[RATE_TCP, RATE_RDMA], move |column| {
                let transport = [Transport::Tcp, Transport::Rdma][column];
                of_host
                    .borrow()
                    .get(transport.scheme())
                    .copied()
                    .context("see above")
            }),
        ],
        compares: false,
    };
    let cpus = thread::available_parallelism().map_or(1, |n| n.get());
    // Each reactor has a core, and the host as many.
    let columns: Vec<Column> = REACTORS
        .into_iter()
        .filter(|(n, _)| *n == 1 || 2 * n <= cpus)
        .collect();
    let numbers: Vec<usize> = columns.iter().map(|(column, _)| *column).collect();
    let reactors = Table {
        key: REACTORS_IOPS,
        title: "4 queues of 32: 1000 IOPS",
        digits: 1,
        columns,
        lines: [(OVER_TCP, Transport::Tcp), (OVER_RDMA, Transport::Rdma)]
            .map(|(name, transport)| Line::new(name, &numbers, move |n| with_reactors(transport, n)))
            .into(),
        compares: false,
    };
    let mut tables = vec![cpu, reactors];
    tables.extend(moderated());
    Suite {
        key: "nvme_target",
        conditions: "random reads of 4 KiB of the null namespace by rdmux nvme perf; idle hosts have an admin and an I/O queue and send keep-alives; \
                     a reactor unless said otherwise; policies by RDMUX_MODERATION on completion queues of the pool; all where the scheduler puts them",
        claim: None,
        tables,
        ratios,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let of = |key, row, column| super::of(tables, key, row, column);
    let mut ratios = Vec::new();
    for (column, name, percent) in [
        (RATE_TCP, "1,000 IOPS by TCP / 5 % of a core", 5.0),
        (RATE_RDMA, "1,000 IOPS by RDMA / 10 % of a core", 10.0),
        (IDLE_TCP, "100 idle hosts / 0.5 % of a core", 0.5),
    ] {
        let cpu = of(CPU, TARGET, column);
        ratios.push(Ratio::new(name, "at most 1", &cpu, &vec![percent; cpu.len()]));
    }
    for (row, name) in [
        (OVER_TCP, "2 reactors / 1, TCP"),
        (OVER_RDMA, "2 reactors / 1, RDMA"),
    ] {
        let (one, two) = (of(REACTORS_IOPS, row, 1), of(REACTORS_IOPS, row, 2));
        ratios.push(Ratio::new(name, "at least 1.8", &two, &one));
    }
    ratios
}

/// Returns the share of a core that a target takes for 1,000 I/Os a second, in percent, and keeps that of the host.
fn at_rate(transport: Transport, host: &mut BTreeMap<&'static str, f64>) -> Result<f64> {
    let target = Target::with(&[], None)?;
    let (before, began) = (cpu_ns(target.server.pid())?, Instant::now());
    let report = perf_of(
        &target,
        transport,
        &["--rw", "randread", "--rate", "1000", "--time", "3"],
    )?;
    let percent = (cpu_ns(target.server.pid())? - before) as f64 / began.elapsed().as_nanos() as f64 * 100.0;
    let us_per_io = report["cpu_us_per_io"]
        .as_f64()
        .context("perf reports no CPU time")?;
    let iops = report["iops"].as_f64().context("perf reports no iops")?;
    host.insert(transport.scheme(), us_per_io * iops / 1e6 * 100.0);
    Ok(percent)
}

/// Returns the share of a core that a target takes for idle hosts, in percent.
fn with_idle_hosts() -> Result<f64> {
    let target = Target::with(&[], None)?;
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.args([super::COMMAND, IDLE, &target.port, &target.nqn]);
    let mut hosts = Side::start(&mut command)?;
    let (before, began) = (cpu_ns(target.server.pid())?, Instant::now());
    thread::sleep(IDLE_TIME); // time is meant: the CPU time in it is measured
    let cpu = cpu_ns(target.server.pid())? - before;
    let percent = cpu as f64 / began.elapsed().as_nanos() as f64 * 100.0;
    hosts.begin();
    hosts.end()?;
    Ok(percent)
}

/// Runs as the idle hosts, until the standard input ends.
pub(super) fn be_idle(args: &[String]) -> Result<()> {
    let [port, nqn] = args else {
        anyhow::bail!("give a port and a subsystem's name");
    };
    let address = SocketAddr::new(LOOPBACK, port.parse()?);
    let subsystem = Nqn::new(nqn).context("no name of a subsystem")?;
    let mut hosts = Vec::new();
    for _ in 0..IDLE_HOSTS {
        let session = Session::connect(Options::new(vec![address], subsystem.clone()), 1)?;
        hosts.push((session.queue(1, 32)?, session));
    }
    say_ready()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    for (queue, session) in hosts {
        drop(queue);
        session.close();
    }
    Ok(())
}

fn with_reactors(transport: Transport, reactors: usize) -> Result<f64> {
    let target = Target::with(&["--reactors", &reactors.to_string()], None)?;
    let load = [
        "--rw", "randread", "--queues", "4", "--depth", "32", "--time", "1",
    ];
    let report = perf_of(&target, transport, &load)?;
    Ok(report["iops"].as_f64().context("perf reports no iops")? / 1e3)
}

/// Returns the tables of the policies, one for each figure. The rows of the first measure, and leave their figures to the others.
fn moderated() -> Vec<Table> {
    let columns: Vec<usize> = MODERATED.iter().map(|(column, _)| *column).collect();
    let mut tables: Vec<Table> = FIGURES
        .map(|(key, title, digits, _)| Table {
            key,
            title,
            digits,
            columns: MODERATED.to_vec(),
            lines: Vec::new(),
            compares: key == MODERATED_IOPS,
        })
        .into();
    for policy in POLICIES {
        let figures = figures(policy, &columns, move |column| {
            let run = run_moderated(policy, column)?;
            let mut values = [0.0; FIGURES.len()];
            for (value, (key, _, _, of)) in values.iter_mut().zip(&FIGURES) {
                *value = of(&run).with_context(|| format!("{key} is missing in the report of perf"))?;
            }
            Ok(values)
        });
        for (table, line) in tables.iter_mut().zip(figures) {
            table.lines.push(line);
        }
    }
    tables
}

/// Returns the report of perf, with the target's CPU time and sleeps.
fn run_moderated(policy: &str, load: usize) -> Result<Value> {
    let target = Target::with(&[], Some(policy))?;
    let pid = target.server.pid();
    let (cpu, sleeps) = (cpu_ns(pid)?, sleeps(pid)?);
    let (queues, depth) = ((load / QUEUE).to_string(), (load % QUEUE).to_string());
    let load = [
        "--rw", "randread", "--queues", &queues, "--depth", &depth, "--time", "1",
    ];
    let mut report = perf_of(&target, Transport::Rdma, &load)?;
    report["cpu_ns"] = (cpu_ns(pid)? - cpu).into();
    report["sleeps"] = (self::sleeps(pid)? - sleeps).into();
    Ok(report)
}

/// Returns the number of times that threads of a process have slept.
fn sleeps(pid: u32) -> Result<u64> {
    let mut all = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status"))?;
        let number = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        all += number
            .and_then(|number| number.trim().parse::<u64>().ok())
            .unwrap_or(0);
    }
    Ok(all)
}
