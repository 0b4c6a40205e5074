//! Speedups of the programs of `examples/` on more nodes than this host has CPUs: replayed from traces of nodes that share its CPUs, beside runs with a CPU for
//! each node.

use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use rdmux_dsm::trace::{self, Trace};
use rdmux_dsm::{Cluster, FaultMode};
use rdmux_sim::dsm::{Costs, Moment, Report, replay};
use serde_json::{Value, json};

use crate::pair::{Server, stdout};
use crate::plot;
use crate::table::{Column, Line, Ratio, Suite, Table, figures};

const NODES: [Column; 5] = [
    (1, "1 node"),
    (2, "2 nodes"),
    (4, "4 nodes"),
    (8, "8 nodes"),
    (16, "16 nodes"),
];

/// A program, and its table.
#[derive(Clone, Copy, Debug)]
struct Program {
    command: &'static str,
    arguments: &'static [&'static str],
    key: &'static str,
    name: &'static str,
    title: &'static str,
}

const PROGRAMS: [Program; 3] = [
    Program {
        command: "dsm_sor",
        arguments: &["2046", "100"],
        key: "sor_s",
        name: "SOR",
        title: "SOR, s",
    },
    Program {
        command: "dsm_matmul",
        arguments: &["1152"],
        key: "matmul_s",
        name: "matmul",
        title: "Matmul, s",
    },
    Program {
        command: "dsm_lu",
        arguments: &["1536"],
        key: "lu_s",
        name: "LU",
        title: "LU, s",
    },
];

/// Marks of the programs at the beginning and the end of their parallel part (examples/dsm/mod.rs).
const BEGIN: u32 = 1;
const END: u32 = 2;

const MEASURED: &str = "measured, a CPU for each node";
const HERE: &str = "replayed, costs of this host";
const STATED: &str = "replayed, stated network";

/// Nodes that share an address: the processes of a user that do are limited.
const NODES_AT_ADDRESS: u32 = 8;
/// Nodes that share CPUs may be silent for long.
const LEASE: Duration = Duration::from_secs(120);
/// Time after which a node is killed, in seconds.
const LIMIT_S: &str = "300";

/// First argument of this program that replays traces of any program.
pub(crate) const COMMAND: &str = "dsm-replay";

/// Costs that the user states.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Stated {
    /// Latency of the network that replays assume, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 2.0, value_parser = microseconds, allow_hyphen_values = true)]
    latency_us: f64,
    /// Its bandwidth, in GB/s.
    #[arg(long, value_name = "GB", default_value_t = 12.5, value_parser = bandwidth, allow_hyphen_values = true)]
    bandwidth_gb: f64,
    /// Time after which a node that computes begins to answer, in microseconds; of the table `dsm-replay` in replays with the costs of this host.
    #[arg(long, value_name = "US", default_value_t = 0.0, value_parser = microseconds, allow_hyphen_values = true)]
    late_us: f64,
}

const AMOUNT_MAX: f64 = 1e6;

/// Bandwidth at least, in GB/s. No cluster has less, and far below this nothing is left of it in whole bytes a second.
const BANDWIDTH_MIN_GB: f64 = 0.001;

fn microseconds(text: &str) -> Result<f64, String> {
    amount(text, 0.0)
}

fn bandwidth(text: &str) -> Result<f64, String> {
    amount(text, BANDWIDTH_MIN_GB)
}

/// Parses a number that is neither below a minimum nor too large.
fn amount(text: &str, min: f64) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|it| (min..=AMOUNT_MAX).contains(it));
    number.ok_or_else(|| format!("give a number from {min} to {AMOUNT_MAX}"))
}

/// Replay a run of a program on the distributed shared memory from its traces
#[derive(clap::Parser, Debug)]
#[command(name = "rdmux-bench dsm-replay")]
struct Arguments {
    /// Folder with the traces of all nodes, as RDMUX_DSM_TRACE has named it
    folder: PathBuf,
    #[command(flatten)]
    stated: Stated,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Replays the traces of a folder on the stated network.
pub(crate) fn child(args: &[String]) -> Result<()> {
    let name = std::iter::once(COMMAND.to_owned());
    let Arguments { folder, stated, json } = Arguments::parse_from(name.chain(args.iter().cloned()));
    let costs = Costs {
        late_ns: stated.here().late_ns,
        ..stated.network()
    };
    let reports = replay(&Trace::read_all(&folder)?, costs)?;
    let text = match json {
        true => format!("{:#}\n", reports_json(&reports)),
        false => reports_text(&reports),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Returns a line for each mark and the end of each node.
fn reports_text(reports: &[Report]) -> String {
    let mut text = String::new();
    for (node, report) in reports.iter().enumerate() {
        let marks = report.marks.iter().map(|(mark, at)| (format!("mark {mark}"), at));
        for (point, at) in marks.chain([("end".to_owned(), &report.end)]) {
            text += &format!(
                "node {node}, {point}: {:.6} s, {} pages read, {} messages\n",
                at.at_ns as f64 / 1e9,
                at.units_read,
                at.messages
            );
        }
    }
    text
}

fn reports_json(reports: &[Report]) -> Value {
    let moment = |at: &Moment| json!({ "seconds": at.at_ns as f64 / 1e9, "pages_read": at.units_read, "messages": at.messages });
    let mark = |(mark, at): &(u32, Moment)| json!({ "mark": mark, "at": moment(at) });
    let node = |report: &Report| {
        let marks: Vec<Value> = report.marks.iter().map(mark).collect();
        json!({ "marks": marks, "end": moment(&report.end) })
    };
    let nodes: Vec<Value> = reports.iter().map(node).collect();
    json!({ "nodes": nodes })
}

impl Stated {
    /// Returns the costs of nodes on this host.
    fn here(self) -> Costs {
        Costs {
            late_ns: (self.late_us * 1e3) as u64,
            ..Costs::default()
        }
    }

    /// Returns the costs of nodes on the network, each of which has a CPU for its answers.
    fn network(self) -> Costs {
        Costs {
            latency_ns: (self.latency_us * 1e3) as u64,
            bytes_per_s: (self.bandwidth_gb * 1e9) as u64,
            ..Costs::default()
        }
    }
}

/// Returns what `--table dsm-replay` measures and replays.
pub(crate) fn suite(stated: Stated) -> Suite {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let all = NODES.map(|(nodes, _)| nodes);
    let measured: Vec<usize> = all.into_iter().filter(|nodes| *nodes <= cpus).collect();
    let mut pages = Vec::new();
    let mut tables = Vec::new();
    for program in PROGRAMS {
        let lines = figures(HERE, &all, move |nodes| replayed(program, nodes as u32, stated));
        let [here, mut network, mut read] = lines;
        network.name = STATED;
        read.name = program.name;
        pages.push(read);
        let measure = move |nodes| run(program, nodes as u32, None);
        let lines = vec![Line::new(MEASURED, &measured, measure), here, network];
        tables.push(table(program.key, program.title, 3, lines));
    }
    tables.push(table("pages", "Pages read by all nodes, replayed", 0, pages));
    let (of_host, of_network) = (stated.here(), stated.network());
    Suite {
        key: "dsm-replay",
        // There is one suite in the life of the program.
        conditions: format!(
            "SOR of 2,046 x 2,046 points, 100 iterations; matmul of 1,152 x 1,152; LU of 1,536 x 1,536; mode inline; time of the parallel part; replayed from the CPU time of nodes that share \
             the CPUs of this host; a message takes {} ns and {} ns to handle it, on the network {} ns instead of the former, and {} GB/s; a change of rights {} ns; a \
             node that computes answers after {} ns, on the network at once",
            of_host.latency_ns,
            of_host.message_ns,
            of_network.latency_ns,
            stated.bandwidth_gb,
            of_host.protect_ns,
            of_host.late_ns,
        )
        .leak(),
        claim: None,
        tables,
        ratios,
    }
}

fn table(key: &'static str, title: &'static str, digits: usize, lines: Vec<Line>) -> Table {
    Table {
        key,
        title,
        digits,
        columns: NODES.to_vec(),
        lines,
        compares: false,
    }
}

/// Returns how far replays are from what was measured, and the speedups.
fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (program, table) in PROGRAMS.iter().zip(tables) {
        for (nodes, heading) in NODES {
            let (of, to) = (table.rounds(HERE, nodes), table.rounds(MEASURED, nodes));
            if of.is_empty() || to.is_empty() {
                continue;
            }
            for goal in ["at least 0.85", "at most 1.15"] {
                let name = format!("{}, {heading}: replayed to measured", program.name);
                ratios.push(Ratio::new(name, goal, &of, &to));
            }
        }
        let (one, _) = NODES[0];
        for row in [MEASURED, HERE, STATED] {
            let alone = table.rounds(row, one);
            for (nodes, heading) in &NODES[1..] {
                let together = table.rounds(row, *nodes);
                if !together.is_empty() {
                    let name = format!("{}, {heading}: speedup, {row}", program.name);
                    ratios.push(Ratio::new(name, "", &alone, &together));
                }
            }
        }
    }
    ratios
}

/// Draws the speedups: what was measured, and apart from that what was replayed.
pub(crate) fn plots(suite: &Suite) -> Vec<plot::File> {
    let tables: Vec<&Table> = suite.tables.iter().take(PROGRAMS.len()).collect();
    let svg = plot::speedups(suite.key, &tables, |row| row == MEASURED);
    vec![(format!("{}.svg", suite.key), svg)]
}

/// Records a run and replays it. Returns the seconds of its parallel part with the costs of this host and with those of the network, and the pages
/// that all nodes read there.
fn replayed(program: Program, nodes: u32, stated: Stated) -> Result<[f64; 3]> {
    let folder = tempfile::tempdir()?;
    run(program, nodes, Some(folder.path()))?;
    let traces = Trace::read_all(folder.path())?;
    let here = replay(&traces, stated.here())?;
    let network = replay(&traces, stated.network())?;
    let pages = |report: &Report| Some(report.between(BEGIN, END)?.units_read);
    let pages: Option<u64> = here.iter().map(pages).sum();
    let pages = pages.context("a node has no marks in its trace")?;
    Ok([seconds(&here)?, seconds(&network)?, pages as f64])
}

/// Returns the seconds of the parallel part at node 0, as the programs report them.
fn seconds(reports: &[Report]) -> Result<f64> {
    let part = reports.first().and_then(|report| report.between(BEGIN, END));
    let part = part.context("node 0 has no marks in its trace")?;
    Ok(part.at_ns as f64 / 1e9)
}

/// Runs a program, each node on its CPU, or with traces in a folder and all nodes on all CPUs. Returns the seconds of its parallel part.
fn run(program: Program, nodes: u32, folder: Option<&Path>) -> Result<f64> {
    let name = program.command;
    let path = crate::beside(name, "bench/run builds it")?;
    let clusters = clusters(nodes)?;
    let command = |node: usize| {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", LIMIT_S]);
        if folder.is_none() {
            let cpus = match nodes {
                1 => "0,1".to_owned(),
                _ => node.to_string(),
            };
            command.args(["taskset", "-c", &cpus]);
        }
        command
            .arg(&path)
            .args(program.arguments)
            .arg("--json")
            .envs(clusters[node].environment())
            .env(FaultMode::VARIABLE, FaultMode::Inline.to_string())
            .envs(folder.map(|folder| (trace::VARIABLE, folder)))
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        command
    };
    let other = |node| Server::start(command(node).stdout(Stdio::null()).stderr(Stdio::null()));
    let mut others: Vec<Server> = (1..nodes as usize).map(other).collect::<Result<_>>()?;
    let text = stdout(name, &mut command(0))?;
    // Their traces are whole when they have ended.
    others.iter_mut().try_for_each(Server::wait)?;
    let line: Value = serde_json::from_str(&text).with_context(|| format!("{name} printed {text:?}"))?;
    let seconds = line["seconds"].as_f64();
    seconds.with_context(|| format!("{name} printed no seconds"))
}

/// Returns the parts of a cluster on this host.
fn clusters(nodes: u32) -> Result<Vec<Cluster>> {
    ensure!(nodes > 0, "no nodes");
    let mut members = Vec::new();
    let mut session = [0; 16];
    for first in (0..nodes).step_by(NODES_AT_ADDRESS as usize) {
        let address = Ipv4Addr::new(127, 0, 0, 1 + (first / NODES_AT_ADDRESS) as u8);
        let there = Cluster::on_this_host(address.into(), (nodes - first).min(NODES_AT_ADDRESS))?;
        for cluster in there {
            members.extend(cluster.address(cluster.own()));
            session = cluster.session;
        }
    }
    let cluster = |own| {
        let mut cluster = Cluster::new(own, members.clone(), session)?;
        cluster.lease = LEASE;
        Ok(cluster)
    };
    (0..nodes).map(cluster).collect()
}

#[cfg(test)]
mod tests {
    use rdmux_dsm::trace::{Event, RegionMade, Step};
    use rdmux_dsm::{Access, Consistency, Placement};

    use super::*;

    #[test]
    fn arguments__refuse_costs_that_no_network_has() {
        let parse = |option: &str, value: &str| Arguments::try_parse_from([COMMAND, "folder", option, value]);
        for (option, min) in [
            ("--latency-us", "0"),
            ("--late-us", "0"),
            ("--bandwidth-gb", "0.001"),
        ] {
            for value in [min, "0.5", "1e6"] {
                parse(option, value).expect(value);
            }
            for value in ["-1", "-0.5", "nan", "inf", "-inf", "1000001", "x", ""] {
                let text = parse(option, value).unwrap_err().to_string();
                let says = format!(": give a number from {min} to 1000000");
                assert!(text.lines().next().unwrap().ends_with(&says), "{value}: {text}");
            }
        }
        for value in ["0", "0.0009", "1e-9"] {
            assert!(parse("--bandwidth-gb", value).is_err(), "{value}");
        }
    }

    #[test]
    fn network__has_the_costs_that_are_stated() {
        let options = ["--latency-us", "1.5", "--bandwidth-gb", "0.001"];
        let options = [COMMAND, "folder"].into_iter().chain(options);
        let costs = Arguments::parse_from(options).stated.network();
        assert_eq!((costs.latency_ns, costs.bytes_per_s), (1_500, 1_000_000));
    }

    /// Replays a node that reads a page of another one on the stated network: 1 ms for each way, and for the page.
    fn reports() -> Vec<Report> {
        let costs = Costs {
            latency_ns: 1_000_000,
            bytes_per_s: 4_096_000,
            message_ns: 0,
            fault_ns: 0,
            read_ns: 0,
            protect_ns: 0,
            protect_more_ns: 0,
            memory_bytes_per_s: 0,
            late_ns: 0,
        };
        let step = |cpu_ns, event| Step { cpu_ns, event };
        let region = || {
            let made = RegionMade {
                number: 0,
                units: 2,
                unit_bytes: 4096,
                homes: Placement::InTurn(1),
                consistency: Consistency::Sequential,
            };
            step(0, Event::Region(made))
        };
        let page_of_node_1 = Event::Pages {
            region: 0,
            first: 1,
            count: 1,
            access: Access::Read,
            waits: true,
        };
        let steps = [
            vec![
                region(),
                step(250_000_000, Event::Mark(BEGIN)),
                step(250_000_000, page_of_node_1),
                step(0, Event::Mark(END)),
            ],
            vec![region()],
        ];
        let trace = |(node, steps)| Trace {
            node,
            nodes: 2,
            steps,
        };
        let traces: Vec<Trace> = (0..).zip(steps).map(trace).collect();
        replay(&traces, costs).unwrap()
    }

    #[test]
    fn reports_text__has_a_line_for_each_mark_and_end() {
        // Node 0 sends Ask and Installed, node 1 Grant. The request of the READ and its end are no messages.
        let lines = [
            "node 0, mark 1: 0.250000 s, 0 pages read, 0 messages",
            "node 0, mark 2: 0.505000 s, 1 pages read, 2 messages",
            "node 0, end: 0.505000 s, 1 pages read, 2 messages",
            "node 1, end: 0.000000 s, 0 pages read, 1 messages",
        ];
        assert_eq!(reports_text(&reports()).lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn reports_json__has_all_numbers_of_the_text() {
        let moment = |seconds: f64, pages: u64, messages: u64| json!({ "seconds": seconds, "pages_read": pages, "messages": messages });
        let expected = json!({ "nodes": [
            {
                "marks": [
                    { "mark": 1, "at": moment(0.25, 0, 0) },
                    { "mark": 2, "at": moment(0.505, 1, 2) },
                ],
                "end": moment(0.505, 1, 2),
            },
            { "marks": [], "end": moment(0.0, 0, 1) },
        ] });
        assert_eq!(reports_json(&reports()), expected);
    }

    fn of_rows(rows: &[(&'static str, &[usize])]) -> Suite {
        let line = |(name, columns): &(&'static str, &[usize])| {
            Line::new(name, columns, |nodes| Ok(8.0 / nodes as f64))
        };
        let lines = rows.iter().map(line).collect();
        let mut suite = Suite {
            key: "dsm-replay",
            conditions: "",
            claim: None,
            tables: vec![table("sor_s", "SOR, s", 3, lines)],
            ratios,
        };
        suite.round(&indicatif::ProgressBar::hidden());
        suite
    }

    #[test]
    fn plots__draw_what_was_measured_apart_from_what_was_replayed() {
        let all = NODES.map(|(nodes, _)| nodes);
        let suite = of_rows(&[(MEASURED, &[1, 2]), (HERE, &all), (STATED, &all)]);
        let [(name, svg)]: [plot::File; 1] = plots(&suite).try_into().unwrap();
        assert_eq!(name, "dsm-replay.svg");
        let curves = |part: &str| svg.lines().filter(|line| line.contains(part)).count();
        assert_eq!(curves("<polyline"), 3);
        assert_eq!(curves("stroke-dasharray"), 2);
    }

    #[test]
    fn ratios__compare_a_replay_with_what_was_measured_of_as_many_nodes() {
        let suite = of_rows(&[(MEASURED, &[1, 2]), (HERE, &[1, 2, 4])]);
        let ratios = ratios(&suite.tables);
        let names: Vec<&str> = ratios.iter().map(|ratio| ratio.name.as_str()).collect();
        let compared = names.iter().filter(|name| name.ends_with("replayed to measured"));
        assert_eq!(compared.count(), 4, "{names:?}");
        let speedup = ratios
            .iter()
            .find(|ratio| ratio.name.contains("4 nodes: speedup"));
        assert_eq!(speedup.unwrap().value, Some((4.0, 4.0, 4.0)));
    }
}
