//! Run times of the programs of `examples/` on two nodes, beside the same programs with two threads of one process, on the baseline, and by MPI.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use rdmux_dsm::{BATCH_VARIABLE, Cluster, FaultMode, WAIT_VARIABLE};
use serde_json::Value;

use crate::LOOPBACK;
use crate::pair::{Server, TWO_RANKS, busy, installed, peer, stdout};
use crate::table::{Column, Line, Ratio, Suite, Table, figures};

const PROGRAMS: [Column; 4] = [(0, "SOR"), (1, "matmul"), (2, "LU"), (3, "KV")];
const SOR: usize = 0;
const MATMUL: usize = 1;
/// Names and arguments of the programs.
const COMMANDS: [(&str, &[&str]); 4] = [
    ("dsm_sor", &SOR_ARGUMENTS),
    ("dsm_matmul", &["768"]),
    ("dsm_lu", &["768"]),
    ("dsm_kv", &["20000", "2000"]),
];
/// Points of an edge, and iterations.
const SOR_ARGUMENTS: [&str; 2] = ["2046", "100"];

const ONE_THREAD: &str = "one thread";
const TWO_THREADS: &str = "two threads of one process";
const INLINE: &str = "two nodes, faulting thread";
const POLLING: &str = "two nodes whose threads poll";
const BASELINE: &str = "two nodes, baseline";
const MPI: &str = "two ranks of MPI";

/// Processes and their conditions.
#[derive(Clone, Copy, Debug)]
struct Setup {
    nodes: u32,
    threads: u32,
    mode: FaultMode,
    /// Value of `RDMUX_WAIT`, if the nodes are not to wait as the machine's load allows.
    wait: Option<&'static str>,
    /// The program's threads poll as long as they wait, as those of MPI do.
    polls: bool,
    /// Rights change together.
    has_batches: bool,
}

/// Events are handled by a thread that is woken for them, and rights change page by page.
const OF_BASELINE: Setup = Setup {
    nodes: 2,
    threads: 1,
    mode: FaultMode::Mprotect,
    wait: Some("blocked"),
    polls: false,
    has_batches: false,
};
const OF_INLINE: Setup = Setup {
    mode: FaultMode::Inline,
    wait: None,
    has_batches: true,
    ..OF_BASELINE
};
const OF_POLLING: Setup = Setup {
    polls: true,
    ..OF_INLINE
};
const OF_THREAD: Setup = Setup {
    mode: FaultMode::Thread,
    ..OF_INLINE
};
const OF_ONE_THREAD: Setup = Setup {
    nodes: 1,
    ..OF_INLINE
};
const OF_TWO_THREADS: Setup = Setup {
    threads: 2,
    ..OF_ONE_THREAD
};

/// Returns what `--table dsm-programs` measures.
pub(crate) fn suite() -> Suite {
    let [alone, pages] = tables(["alone_s", "pages"], ["Alone, s", "Pages read by node 0"], false);
    let [beside, _] = tables(["beside_s", ""], ["Beside a busy process on CPU 0, s", ""], true);
    Suite {
        key: "dsm-programs",
        conditions: "SOR of 2,046 x 2,046 points, 100 iterations; matmul and LU of 768 x 768; KV of 20,000 operations; each node and rank on its CPU, two threads on \
                     both; time of the parallel part; the baseline handles events in a woken thread, and changes rights by mprotect page by page",
        claim: Some(
            "The talk (Mellanox and Technion, 2003): handling events in the interrupt, and protections without system calls, improve execution time by up to 23 %, and by \
             more under additional load.",
        ),
        tables: vec![alone, pages, beside],
        ratios,
    }
}

/// Returns the tables of times and of pages that nodes read.
fn tables(keys: [&'static str; 2], titles: [&'static str; 2], is_beside: bool) -> [Table; 2] {
    let all = PROGRAMS.map(|(column, _)| column);
    let row = |name, setup: Setup| figures(name, &all, move |program| run(setup, program, is_beside));
    let mut lines = [Vec::new(), Vec::new()];
    for (name, setup) in [
        (TWO_THREADS, OF_TWO_THREADS),
        (ONE_THREAD, OF_ONE_THREAD),
        (INLINE, OF_INLINE),
        (POLLING, OF_POLLING),
        ("two nodes, service thread", OF_THREAD),
        (BASELINE, OF_BASELINE),
    ] {
        let [time, pages] = row(name, setup);
        lines[0].push(time);
        if setup.nodes > 1 {
            lines[1].push(pages);
        }
    }
    lines[0].push(Line::new(MPI, &[SOR], move |_| mpi(is_beside)));
    let mut lines = lines.into_iter();
    [0, 1].map(|nth| Table {
        key: keys[nth],
        title: titles[nth],
        digits: if nth == 0 { 3 } else { 0 },
        columns: PROGRAMS.to_vec(),
        lines: lines.next().unwrap_or_default(),
        compares: nth == 0,
    })
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    let Some(alone) = tables.first() else {
        return ratios;
    };
    for row in [INLINE, POLLING] {
        for (name, program) in [("SOR", SOR), ("matmul", MATMUL)] {
            let (of, to) = (alone.rounds(TWO_THREADS, program), alone.rounds(row, program));
            let name = format!("{name}: speed of {row} to two threads");
            ratios.push(Ratio::new(name, "at least 0.9", &of, &to));
        }
        let (of, to) = (alone.rounds(row, SOR), alone.rounds(MPI, SOR));
        ratios.push(Ratio::new(
            format!("SOR: time of {row} to MPI"),
            "at most 1.25",
            &of,
            &to,
        ));
    }
    for table in tables.iter().filter(|table| table.compares) {
        for (program, heading) in PROGRAMS {
            let (of, to) = (table.rounds(BASELINE, program), table.rounds(INLINE, program));
            let name = format!("{heading}: baseline to faulting thread, {}", table.key);
            ratios.push(Ratio::new(name, "more than 1", &of, &to));
        }
    }
    ratios
}

/// Runs a program. Returns the seconds of its parallel part, and the pages that node 0 has read.
fn run(setup: Setup, program: usize, is_beside: bool) -> Result<[f64; 2]> {
    let (name, arguments) = COMMANDS[program];
    let path = super::super::beside(name, "bench/run builds it")?;
    let clusters = Cluster::on_this_host(LOOPBACK, setup.nodes)?;
    let command = |node: usize| {
        let cpus = match setup.nodes {
            1 => "0,1".to_owned(),
            _ => node.to_string(),
        };
        let mut command = peer(&cpus, &path.to_string_lossy(), arguments);
        command
            .args(["--json", "--threads", &setup.threads.to_string()])
            .envs(clusters[node].environment())
            .env(FaultMode::VARIABLE, setup.mode.to_string())
            .envs(setup.wait.map(|wait| ("RDMUX_WAIT", wait)))
            .envs(setup.polls.then_some((WAIT_VARIABLE, "running")))
            .env(BATCH_VARIABLE, if setup.has_batches { "on" } else { "off" })
            .stderr(Stdio::piped());
        command
    };
    let _busy = is_beside.then(|| busy(0)).transpose()?;
    let other = |node| Server::start(command(node).stdout(Stdio::null()).stderr(Stdio::null()));
    let _others: Vec<Server> = (1..setup.nodes as usize).map(other).collect::<Result<_>>()?;
    let text = stdout(name, &mut command(0))?;
    let line: Value = serde_json::from_str(&text).with_context(|| format!("{name} printed {text:?}"))?;
    let figure = |key: &str| {
        let value = line[key].as_f64();
        value.with_context(|| format!("{name} printed no {key}"))
    };
    Ok([figure("seconds")?, figure("pages_read")?])
}

/// Runs SOR by MPI. Returns the seconds of its iterations.
fn mpi(is_beside: bool) -> Result<f64> {
    installed("mpirun")?;
    let program = super::super::beside("rdmux-mpi-sor", "mpicc is not installed")?;
    let program = program.to_string_lossy();
    let options = TWO_RANKS.split(' ').chain(["--mca", "btl", "^openib"]);
    let arguments: Vec<&str> = options.chain([&*program]).chain(SOR_ARGUMENTS).collect();
    let _busy = is_beside.then(|| busy(0)).transpose()?;
    let text = stdout(
        "mpi_sor",
        peer("0,1", "mpirun", &arguments).stderr(Stdio::piped()),
    )?;
    let line: Value = serde_json::from_str(&text).with_context(|| format!("mpi_sor printed {text:?}"))?;
    ensure!(line["ranks"] == 2, "mpi_sor printed {text:?}");
    line["seconds"].as_f64().context("mpi_sor printed no seconds")
}
