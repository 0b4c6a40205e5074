//! S8 and S15: processor time, and one CPU for both sides.

use anyhow::{Context, Result, ensure};

use super::super::table::{Column, Line, Ratio, Suite, Table, figures};
use super::hosts::{Carrier, Placement, Setup, run};
use super::latency::latency;

const OWN_POLLING: &str = "own, polling";
const OWN_EVENTS: &str = "own, events";
const SHARED: &str = "nodes, --share, adaptive";

/// A row: placement, and the mode in which all programs wait.
const ROWS: [(&str, Placement, Option<&str>); 6] = [
    (OWN_POLLING, Placement::Own, Some("running")),
    (OWN_EVENTS, Placement::Own, Some("blocked")),
    ("own, adaptive", Placement::Own, None),
    ("nodes, --share, polling", Placement::Shared, Some("running")),
    ("nodes, --share, events", Placement::Shared, Some("blocked")),
    (SHARED, Placement::Shared, None),
];

const MESSAGE_BYTES: u64 = 64 << 10;
/// Messages in flight: many, and so few that each side waits for the other again and again.
const DEEP: usize = 16;
const SHALLOW: usize = 1;
const DEPTHS: [Column; 2] = [(DEEP, "16 in flight"), (SHALLOW, "1 in flight")];

/// S8: the time that so many GB take.
pub(super) fn waiting(gigabytes: u32) -> Suite {
    let columns = DEPTHS.map(|(depth, _)| depth);
    let mut tables: Vec<Table> = [
        ("s8_real_s", "S8: real, s"),
        ("s8_user_s", "S8: user, all programs, s"),
        ("s8_system_s", "S8: system, all programs, s"),
        ("s8_cpu_s", "S8: user and system, s"),
    ]
    .map(|(key, title)| Table {
        key,
        title,
        digits: 2,
        columns: DEPTHS.to_vec(),
        lines: Vec::new(),
        compares: true,
    })
    .into();
    for (name, placement, wait) in ROWS {
        let lines = figures(name, &columns, move |depth| {
            let setup = Setup {
                wait,
                ..Setup::new(placement, Carrier::Udp)
            };
            transfer(setup, depth, gigabytes)
        });
        for (table, line) in tables.iter_mut().zip(lines) {
            table.lines.push(line);
        }
    }
    Suite {
        key: "s8",
        conditions: format!(
            "Two hosts, UDP over loopback; {gigabytes} GB in WRITEs of 64 KiB; user and system time are of both programs and nodes, \
             from start to end"
        )
        .leak(),
        claim: Some(
            "Avatar (1, 10, 100 GB): less time than busy polling; less real but more user time than events. Goal: less CPU than both.",
        ),
        tables,
        ratios: |tables| {
            let mut ratios = Vec::new();
            let (Some(real), Some(cpu)) = (tables.first(), tables.last()) else {
                return ratios;
            };
            for (column, heading) in DEPTHS {
                for to in [OWN_POLLING, OWN_EVENTS] {
                    for (table, what, goal) in [(cpu, "CPU", "at most 1.00"), (real, "real", "")] {
                        ratios.push(Ratio::new(
                            format!("S8, {heading}, {what}: nodes, adaptive / {to}").leak(),
                            goal,
                            &table.rounds(SHARED, column),
                            &table.rounds(to, column),
                        ));
                    }
                }
            }
            ratios
        },
    }
}

/// Returns the seconds of a transfer: real, user, system, and the sum of the latter two.
fn transfer(setup: Setup, depth: usize, gigabytes: u32) -> Result<[f64; 4]> {
    let before = processor_time()?;
    let hosts = setup.start()?;
    let sink = hosts.sink(1)?;
    let messages = u64::from(gigabytes) * 1_000_000_000 / MESSAGE_BYTES;
    let args = format!("--bytes {MESSAGE_BYTES} --depth {depth} --messages {messages}");
    let mut sources = [hosts.source(0, &[&sink], &args)?];
    let reports = run(&mut sources)?;
    let [source] = sources;
    source.end()?;
    sink.end()?;
    hosts.end();
    let after = processor_time()?;
    let [user, system] = [0, 1].map(|nth| after[nth] - before[nth]);
    let real = reports.first().context("no source")?.seconds;
    Ok([real, user, system, user + system])
}

/// Returns the processor time of all that this process has started and that has ended: in user mode and in the kernel, in seconds.
fn processor_time() -> Result<[f64; 2]> {
    // proc_pid_stat(5): the fields behind the name, from the third on, are separated by blanks; cutime and cstime are fields 16 and 17.
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("/proc/self/stat has no name")?;
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let times: Vec<f64> = fields
        .split_whitespace()
        .skip(16 - 3)
        .take(2)
        .map(|field| field.parse::<f64>().map(|number| number / ticks))
        .collect::<Result<_, _>>()?;
    ensure!(times.len() == 2, "/proc/self/stat is short");
    Ok([times[0], times[1]])
}

const BLOCKED: &str = "own, blocked";
/// Rows of S15: placement, hosts, mode.
const ON_ONE_CPU: [(&str, Placement, usize, Option<&str>); 5] = [
    (BLOCKED, Placement::Own, 1, Some("blocked")),
    ("own, adaptive", Placement::Own, 1, None),
    (NODE_BLOCKED, Placement::Nodes, 1, Some("blocked")),
    (NODE, Placement::Nodes, 1, None),
    ("nodes, --share, adaptive", Placement::Shared, 2, None),
];
const NODE: &str = "one node, adaptive";
const NODE_BLOCKED: &str = "one node, blocked";

/// S15: both sides, and the node, on one CPU.
pub(super) fn one_cpu() -> Suite {
    let line = |(name, placement, hosts, wait)| {
        let setup = Setup {
            hosts,
            wait,
            cpu: Some("0"),
            ..Setup::new(placement, Carrier::Memory)
        };
        Line::new(name, &[64], move |bytes| {
            latency(setup, "send-lat", &format!("-e -s {bytes} -n 3000"), "t_typical")
        })
    };
    Suite {
        key: "s15",
        conditions: "Two programs that sleep on events (SEND 64 B, half a round trip), and their nodes, all on CPU 0; shared memory",
        claim: Some(
            "Avatar: nothing. Goal: adaptive waiting takes at most twice as long as to sleep at once.",
        ),
        tables: vec![Table {
            key: "s15_us",
            title: "S15: SEND 64 B on one CPU, us",
            digits: 1,
            columns: vec![(64, "64")],
            lines: ON_ONE_CPU.into_iter().map(line).collect(),
            compares: true,
        }],
        ratios: |tables| {
            let ratio = |of, to| {
                let name = format!("S15: {of} / {to}").leak();
                Ratio::new(
                    name,
                    "at most 2.00",
                    &tables[0].rounds(of, 64),
                    &tables[0].rounds(to, 64),
                )
            };
            vec![ratio("own, adaptive", BLOCKED), ratio(NODE, NODE_BLOCKED)]
        },
    }
}
