//! `rdmux-bench`: compares rdmux with the machine's floor and with its peers, in one run. `bench/run` calls it.
//!
//! Every round measures every row once, so that a noisy moment hits all of them; the tables show medians over the rounds.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod accel;
mod child;
mod crowd;
mod drop_in;
mod dsm;
mod floor;
mod interrupts;
mod load;
mod nvme;
mod offload;
mod pages;
mod pair;
mod plot;
mod scale;
mod share;
mod shm;
mod table;
mod tcp;
mod udp;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};

use self::table::Suite;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// CPUs of the two sides of a pair.
const CPUS: [usize; 2] = [0, 1];

/// Measure rdmux beside the floors of this machine, UCX and libfabric.
#[derive(clap::Parser, Debug)]
struct Args {
    /// Rounds; the tables show their medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// What to measure.
    #[arg(long, value_enum, default_value_t = Which::All)]
    table: Which,
    /// Measure only these parts of the table, such as s2,s6 of `share`.
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    only: Vec<String>,
    /// GB that S8 of the table `share` transfers in each way.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    gigabytes: u32,
    /// The program of `crates/shm/benches/shm.rs`, which measures the floors of shared memory.
    #[arg(long, value_name = "PROGRAM")]
    floors: Option<PathBuf>,
    #[command(flatten)]
    stated: dsm::Stated,
    /// Draw the table `interrupts`, `reactors`, `share` or one of `dsm-` as SVG into files of this folder.
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print Markdown, as the pages of docs/ have it.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// Two hosts as one host shows them: UDP over loopback.
    Udp,
    /// Two processes of one host: shared memory.
    Shm,
    /// More processes than CPUs.
    Crowd,
    /// Unmodified programs on the drop-in library: perftest, UCX, libfabric, MPI.
    DropIn,
    /// Wake-ups of a storage service, by policy of moderation.
    Interrupts,
    /// The same with 1 to 8 reactors, each with a client, where there is a CPU for each.
    Reactors,
    /// Queue pairs with several users.
    Share,
    /// NVMe over Fabrics beside bare sockets, and files beside fio.
    Nvme,
    /// Accelerators through the fabric, beside the same cores called in place.
    Accel,
    /// An NVMe drive behind a target, by each path of the data.
    Offload,
    /// Changing what threads may do with pages, beside mprotect.
    DsmPages,
    /// Page faults of a distributed shared memory, and the release of pages that were written.
    DsmFaults,
    /// The round trip of a short message, by the context that handles it.
    DsmLadder,
    /// Programs on a distributed shared memory, beside threads and MPI.
    DsmPrograms,
    /// The same on up to 16 nodes, replayed from traces where there are too few CPUs.
    DsmReplay,
    /// The first four. The others take as long again.
    All,
}

/// Returns the path of `rdmux`, which stands beside this program.
fn rdmux() -> Result<PathBuf> {
    beside("rdmux", "cargo build --release -p rdmux")
}

/// Returns the path of a program that stands beside this one; `why` is what it lacks otherwise.
fn beside(name: &str, why: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.is_file(), "no {name}: {why}");
    Ok(path)
}

fn main() -> Result<()> {
    rdmux_soft::register();
    let own: Vec<String> = std::env::args().skip(1).collect();
    match own.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some((scale::COMMAND, args)) => return scale::child(args),
        Some((load::COMMAND, args)) => return load::child(args),
        Some((nvme::COMMAND, args)) => return nvme::child(args),
        Some((accel::COMMAND, args)) => return accel::child(args),
        Some((offload::COMMAND, args)) => return offload::child(args),
        Some((dsm::COMMAND, args)) => return dsm::child(args),
        Some((dsm::REPLAY, args)) => return dsm::replay_child(args),
        _ => (),
    }
    let args = Args::parse();
    ensure!(
        thread::available_parallelism().is_ok_and(|n| n.get() >= 2),
        "the bench needs two CPUs: both sides of a pair spin"
    );
    let wants = |which| args.table == which || args.table == Which::All;
    let mut suites: Vec<Suite> = Vec::new();
    if wants(Which::Udp) {
        suites.push(udp::suite());
    }
    if wants(Which::Shm) {
        suites.push(shm::suite(args.floors.clone()));
    }
    if wants(Which::Crowd) {
        suites.push(crowd::suite(args.floors.clone()));
    }
    if wants(Which::DropIn) {
        suites.push(drop_in::suite(args.floors.clone()));
    }
    if args.table == Which::Interrupts {
        suites.push(interrupts::suite());
    }
    if args.table == Which::Reactors {
        suites.push(interrupts::suite_on_cores());
    }
    if args.table == Which::Nvme {
        suites.extend(nvme::suites());
    }
    if args.table == Which::Accel {
        suites.push(accel::suite());
    }
    if args.table == Which::Offload {
        suites.push(offload::suite());
    }
    if args.table == Which::DsmPages {
        suites.push(pages::suite());
    }
    if args.table == Which::DsmFaults {
        suites.push(dsm::faults());
    }
    if args.table == Which::DsmLadder {
        suites.push(dsm::ladder());
    }
    if args.table == Which::DsmPrograms {
        suites.push(dsm::programs());
    }
    if args.table == Which::DsmReplay {
        suites.push(dsm::replay(args.stated));
    }
    if args.table == Which::Share {
        suites.extend(share::suites(args.gigabytes));
    }
    let parts: Vec<_> = suites.iter().map(|suite| suite.key).collect();
    for part in &args.only {
        ensure!(
            parts.contains(&part.as_str()),
            "--only {part}: this table has the parts {}",
            parts.join(", ")
        );
    }
    suites.retain(|suite| args.only.is_empty() || args.only.iter().any(|part| part == suite.key));
    let plots: Option<fn(&Suite) -> Vec<plot::File>> = match args.table {
        Which::Interrupts | Which::Reactors => Some(|suite| interrupts::plots(&suite.tables)),
        Which::Share => Some(share::plots),
        Which::DsmFaults | Which::DsmPrograms => Some(dsm::plots),
        Which::DsmReplay => Some(dsm::replay_plots),
        _ => None,
    };
    ensure!(
        args.svg.is_none() || plots.is_some(),
        "--svg goes with --table interrupts, reactors, share, dsm-faults, dsm-programs or dsm-replay"
    );
    if let Some(folder) = &args.svg {
        // Before the measurement, which takes minutes.
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let rows: usize = suites.iter().map(Suite::rows).sum();
    let bar = indicatif::ProgressBar::new(u64::from(args.rounds) * rows as u64);
    let mut out = std::io::stdout();
    if !args.json {
        writeln!(
            out,
            "Medians (lowest to highest) of {} interleaved rounds.",
            args.rounds
        )?;
    }
    for suite in &mut suites {
        for _ in 0..args.rounds {
            suite.round(&bar);
        }
        // Each measurement is shown at once: the others may take long.
        let mut drawn = Vec::new();
        if let (Some(folder), Some(plots)) = (&args.svg, plots) {
            for (name, svg) in plots(suite) {
                let path = folder.join(&name);
                std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
                drawn.push(name);
            }
        }
        bar.suspend(|| match (args.json, args.markdown) {
            (true, _) => Ok(()),
            (_, true) => suite.print_markdown(&mut out, &drawn),
            (_, false) => suite.print(&mut out),
        })?;
    }
    bar.finish_and_clear();
    if args.json {
        let mut value = serde_json::Map::new();
        value.insert("rounds".into(), args.rounds.into());
        value.extend(suites.iter().map(|suite| (suite.key.to_owned(), suite.json())));
        writeln!(out, "{:#}", serde_json::Value::Object(value))?;
    }
    Ok(())
}

/// Returns the number of messages of a bandwidth run: about half a second's worth.
fn count(size: usize) -> u32 {
    ((1usize << 31) / size).clamp(400, 20_000) as u32
}

/// Converts MiB/s to MB/s.
fn megabytes(mebibytes: f64) -> f64 {
    mebibytes * 1.048_576
}

/// Keeps this thread, and threads that it starts later, on one CPU.
fn pin(cpu: usize) -> Result<()> {
    rdmux_verbs::thread::pin(cpu).with_context(|| format!("cannot run on CPU {cpu}"))
}
