//! Page faults of a distributed shared memory, beside what the machine takes for them without a protocol, and beside library calls that fetch as
//! much; and the round trip of a short message by the context that handles it. The floors and peers are the C programs of `bench/`.

mod node;
mod programs;
mod replay;

use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rdmux_dsm::FaultMode;
use serde_json::Value;

pub(super) use self::node::{COMMAND, child};
use self::node::{Event, Fault, Home};
pub(super) use self::programs::suite as programs;
pub(super) use self::replay::{
    COMMAND as REPLAY, Stated, child as replay_child, plots as replay_plots, suite as replay,
};
use super::CPUS;
use super::pair::{TWO_RANKS, installed, peer, stdout, ucx_transport};
use super::plot;
use super::table::{Column, Line, Ratio, Suite, Table};

/// Kinds of faults, and their names for `dsm_floor`.
const FAULTS: [Column; 3] = [(0, "read"), (1, "upgrade"), (2, "cold write")];
const FAULT_NAMES: [&str; 3] = ["read", "upgrade", "write"];
const READ: usize = 0;
/// Pages of a release.
const RELEASE_PAGES: usize = 1024;

/// Quantities of [`faults`], each a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// A fault without another process.
    Alone,
    /// A fault whose page's home is so.
    Polling,
    Computing,
    Asleep,
    /// A fault on the baseline, alone, and beside a busy process.
    Baseline,
    Beside,
    /// A fetch through the network.
    Network,
    /// Copying the pages that were written.
    Release,
}

impl Part {
    /// Returns the rows of a table: the floor, and all that is compared with it.
    fn lines(self) -> Vec<Line> {
        match self {
            Part::Alone => vec![floor("userfaultfd, SIGBUS", "none")],
            Part::Polling => vec![
                floor("two bare processes", "polling"),
                ours("rdmux, faulting thread", &INLINE),
                ours("rdmux, service thread", &THREAD),
                ours("rdmux, mprotect", &MPROTECT),
                get(&MPI_MEMORY),
                get(&SHMEM_MEMORY),
            ],
            Part::Computing => vec![
                floor("two bare processes", "computing"),
                ours("rdmux, faulting thread, home computes", &INLINE_COMPUTING),
                ours("rdmux, service thread, home computes", &THREAD_COMPUTING),
            ],
            Part::Asleep => vec![
                floor("two bare processes", "asleep"),
                ours("rdmux, faulting thread", &INLINE_ASLEEP),
            ],
            Part::Baseline => vec![ours(BASELINE, &OF_BASELINE), ours(OURS, &OF_OURS)],
            Part::Beside => vec![ours(BASELINE, &BASELINE_BESIDE), ours(OURS, &OURS_BESIDE)],
            Part::Network => vec![
                ours("rdmux, faulting thread, UDP", &INLINE_UDP),
                get(&MPI_TCP),
                get(&SHMEM_TCP),
            ],
            Part::Release => vec![
                copy("the home copies", "pull"),
                copy("the writer copies", "push"),
                Line::new("rdmux, release consistency", &[RELEASE_PAGES], |_| {
                    node::release()
                }),
            ],
        }
    }

    fn table(self) -> Table {
        let (key, title) = match self {
            Part::Alone => ("alone_us", "Without a home, p50, us"),
            Part::Polling => ("polling_us", "Home polls, p50, us"),
            Part::Computing => ("computing_us", "Home looks each 20 us, p50, us"),
            Part::Asleep => ("asleep_us", "Home sleeps, p50, us"),
            Part::Baseline => ("baseline_us", "Without priority, p50, us"),
            Part::Beside => ("beside_us", "The same, home beside a busy process, p50, us"),
            Part::Network => ("network_us", "Over loopback, p50, us"),
            Part::Release => ("release_us", "Release, p50, us"),
        };
        let columns = match self {
            Part::Release => vec![(RELEASE_PAGES, "1,024 pages")],
            _ => FAULTS.to_vec(),
        };
        Table {
            key,
            title,
            digits: 2,
            columns,
            lines: self.lines(),
            compares: true,
        }
    }
}

/// Returns what `--table dsm-faults` measures.
pub(super) fn faults() -> Suite {
    Suite {
        key: "dsm-faults",
        conditions: "pages of 4 KiB, 1,024 in turn, two processes on CPU 0 and 1; upgrade: a write to a page that may be read; cold write: to one that is absent; \
                     a process that waits spins, except a home that sleeps; a home of rdmux that computes does not look, its service thread is woken; the baseline handles \
                     events in a woken thread, and changes rights by mprotect page by page; MPI and OpenSHMEM fetch by a call, without a fault",
        claim: Some(
            "The talk (Mellanox and Technion, 2003): handling events in the interrupt, and protections without system calls, improve the latency of page faults by up \
             to 50 %.",
        ),
        tables: vec![
            Part::Alone.table(),
            Part::Polling.table(),
            Part::Computing.table(),
            Part::Asleep.table(),
            Part::Baseline.table(),
            Part::Beside.table(),
            Part::Network.table(),
            Part::Release.table(),
        ],
        ratios,
    }
}

/// Returns how much longer faults take on the baseline.
fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let keys = ["baseline_us", "beside_us"];
    let compared = tables.iter().filter(|table| keys.contains(&table.key));
    let of_table = |table: &Table| {
        FAULTS.map(|(column, kind)| {
            let (of, to) = (table.rounds(BASELINE, column), table.rounds(OURS, column));
            let name = format!("{kind}: baseline to faulting thread, {}", table.key);
            Ratio::new(name, "more than 1", &of, &to)
        })
    };
    compared.flat_map(of_table).collect()
}

/// Returns the row of faults that the home in one of its states answers.
fn floor(name: &'static str, home: &'static str) -> Line {
    let columns = FAULTS.map(|(column, _)| column);
    Line::new(name, &columns, move |column| {
        bare("rdmux-dsm-floor", &[FAULT_NAMES[column], home])
    })
}

const BASELINE: &str = "baseline";
const OURS: &str = "rdmux, faulting thread";

const INLINE: Fault = Fault {
    mode: FaultMode::Inline,
    home: Home::Waits,
    over_udp: false,
    is_baseline: false,
    is_ordinary: false,
    is_beside: false,
};
const THREAD: Fault = Fault {
    mode: FaultMode::Thread,
    ..INLINE
};
const MPROTECT: Fault = Fault {
    mode: FaultMode::Mprotect,
    ..INLINE
};
const INLINE_COMPUTING: Fault = Fault {
    home: Home::Computes,
    is_ordinary: true,
    ..INLINE
};
const THREAD_COMPUTING: Fault = Fault {
    mode: FaultMode::Thread,
    ..INLINE_COMPUTING
};
const INLINE_ASLEEP: Fault = Fault {
    home: Home::Sleeps,
    ..INLINE
};
const OF_OURS: Fault = Fault {
    is_ordinary: true,
    ..INLINE
};
const OURS_BESIDE: Fault = Fault {
    is_beside: true,
    ..OF_OURS
};
const OF_BASELINE: Fault = Fault {
    mode: FaultMode::Mprotect,
    is_baseline: true,
    ..OF_OURS
};
const BASELINE_BESIDE: Fault = Fault {
    is_beside: true,
    ..OF_BASELINE
};
const INLINE_UDP: Fault = Fault {
    over_udp: true,
    ..INLINE
};

/// Returns a row of faults of the shared memory.
fn ours(name: &'static str, fault: &'static Fault) -> Line {
    let columns = FAULTS.map(|(column, _)| column);
    Line::new(name, &columns, move |column| node::measure(*fault, column))
}

fn copy(name: &'static str, by: &'static str) -> Line {
    Line::new(name, &[RELEASE_PAGES], move |_| {
        bare("rdmux-dsm-floor", &[by, "polling"])
    })
}

/// A library that fetches memory of another process.
struct Get {
    name: &'static str,
    /// The program that starts the processes, and its options.
    launcher: &'static str,
    options: &'static str,
    /// Transport of UCX, where it carries the data.
    tls: Option<&'static str>,
    program: &'static str,
}

const MPI_MEMORY: Get = Get {
    name: "MPI_Get, shared memory",
    launcher: "mpirun",
    options: "--mca btl ^openib --mca osc sm",
    tls: None,
    program: "rdmux-mpi-get",
};
const MPI_TCP: Get = Get {
    name: "MPI_Get, TCP",
    options: "--mca btl tcp,self --mca pml ob1 --mca osc pt2pt",
    ..MPI_MEMORY
};
const SHMEM_MEMORY: Get = Get {
    name: "shmem_getmem, shared memory",
    launcher: "oshrun",
    options: "--mca btl ^openib",
    tls: Some("posix"),
    program: "rdmux-shmem-get",
};
const SHMEM_TCP: Get = Get {
    name: "shmem_getmem, TCP",
    tls: Some("tcp"),
    ..SHMEM_MEMORY
};

fn get(way: &'static Get) -> Line {
    Line::new(way.name, &[READ], |_| {
        installed(way.launcher)?;
        let program = super::beside(way.program, "mpicc or oshcc is not installed")?;
        let program = program.to_string_lossy();
        let mut args: Vec<&str> = TWO_RANKS.split(' ').chain(way.options.split(' ')).collect();
        args.push(&program);
        let mut command = peer("0,1", way.launcher, &args);
        if let Some(tls) = way.tls {
            ucx_transport(&mut command, tls);
        }
        figure(way.program, &mut command)
    })
}

/// Returns what `--table dsm-ladder` measures.
pub(super) fn ladder() -> Suite {
    let rung = |name, rung: &'static str| Line::new(name, &[4], move |_| bare("rdmux-dsm-ladder", &[rung]));
    let ours = |name, event: Event| Line::new(name, &[4], move |_| node::event(event));
    let polling = Event {
        cpus: CPUS,
        wait: None,
        is_idle: false,
    };
    let woken = Event {
        wait: Some("blocked"),
        ..polling
    };
    Suite {
        key: "dsm-ladder",
        conditions: "a word in shared memory between two processes, those that sleep are woken by an eventfd; rdmux: fetch-add of a word at another node",
        claim: Some(
            "The talk (Mellanox and Technion, 2003): a short message is answered in 45 us by polling, in 60 us by the interrupt, in 90 us by a process.",
        ),
        tables: vec![Table {
            key: "round_trip_us",
            title: "Round trip, p50, us",
            digits: 2,
            columns: vec![(4, "4 B")],
            lines: vec![
                rung("inline, both poll", "inline"),
                rung("woken on the same CPU", "same-cpu"),
                rung("woken on another CPU", "other-cpu"),
                rung("on another, idle for 1 ms", "idle-cpu"),
                ours("rdmux, both poll", polling),
                ours(
                    "rdmux, woken on the same CPU",
                    Event {
                        cpus: [CPUS[0]; 2],
                        ..woken
                    },
                ),
                ours("rdmux, woken on another CPU", woken),
                ours(
                    "rdmux, on another, idle for 1 ms",
                    Event {
                        is_idle: true,
                        ..woken
                    },
                ),
            ],
            compares: true,
        }],
        ratios: |_| Vec::new(),
    }
}

/// Draws the tables of times.
pub(super) fn plots(suite: &Suite) -> Vec<plot::File> {
    let tables: Vec<&Table> = suite.tables.iter().filter(|table| table.compares).collect();
    vec![(format!("{}.svg", suite.key), plot::draw(suite.key, &tables))]
}

/// Runs a program of two bare processes, which pin themselves; returns its figure.
fn bare(name: &'static str, args: &[&str]) -> Result<f64> {
    let program = super::beside(name, "bench/run compiles it")?;
    figure(name, &mut peer("0,1", &program.to_string_lossy(), args))
}

/// Returns the median that a program prints.
fn figure(program: &str, command: &mut Command) -> Result<f64> {
    let text = stdout(program, command.stderr(Stdio::piped()))?;
    let line: Value = serde_json::from_str(&text).with_context(|| format!("{program} printed {text:?}"))?;
    line["p50"]
        .as_f64()
        .with_context(|| format!("{program} printed no median"))
}
