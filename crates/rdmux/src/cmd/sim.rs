//! `rdmux sim`: the engine over simulated links.

use std::io::Write;
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use rdmux_sim::{Settings, leases, power};
use rdmux_verbs::faults::{Spec, SpecError};
use serde_json::json;
use strum::VariantArray;

/// Run the engine over simulated links that lose, duplicate, reorder and corrupt packets.
///
/// A run is a function of its seed: the same options always give the same output. The simulation compares every byte at both ends with a
/// model, and prints each violation with the seed that shows it.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object for each run: seed, violation (null if there is none), address_family, path_mtu, window_bytes, latency_ns, done (of
send, write, read, flush, atomic, atomic_write and local each operations and bytes), packets, packet_bytes, lost, duplicated, reordered,
corrupted, discarded, retransmitted, timeouts, sequence_naks, rnr_naks, duplicate_requests, direct, links_broken, virtual_ns.
JSON with --power or --leases: one object for each run: seed, defect, violation, counts (by name), and with --power platform, rely.")]
pub(crate) struct Args {
    /// Seed of all random choices [default: 1].
    #[arg(long)]
    seed: Option<u64>,
    /// Faults of the links, in the syntax of docs/bad-network.md: loss, dup, reorder, corrupt and seed, such as loss=1%,reorder=2%,seed=7
    /// [default: loss=1%].
    #[arg(long, value_name = "SPEC", value_parser = parse_fault)]
    fault: Option<Spec>,
    /// Same as --fault loss=PERCENT.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    loss: Option<f64>,
    /// Same as --fault dup=PERCENT.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    dup: Option<f64>,
    /// Same as --fault reorder=PERCENT.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    reorder: Option<f64>,
    /// Same as --fault corrupt=PERCENT.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    corrupt: Option<f64>,
    /// Number of operations over all queue pairs.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    operations: u32,
    /// Number of queue pairs.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    qps: u32,
    /// Simulate both hosts as processes of one machine: packets go through shared memory, and each side grants the other direct access to
    /// its memory. Now and then the link between them breaks, and packets take the network.
    #[arg(long)]
    one_machine: bool,
    /// Cut the power of a server while clients write, flush and read it, and check the bytes that survive. The seed determines the server
    /// and the faults of the links.
    #[arg(long, group = "kind", conflicts_with_all = ["fault", "loss", "dup", "reorder", "corrupt", "operations", "qps", "one_machine"])]
    power: bool,
    /// Run clients of the push service that take ranges from each other, reconnect, stop and die, and check for each byte placed that its
    /// writer still had the right to write it. The seed determines the faults of the links.
    #[arg(long, group = "kind", conflicts_with_all = ["fault", "loss", "dup", "reorder", "corrupt", "operations", "qps", "one_machine"])]
    leases: bool,
    /// Persistence domain of the server's memory: none, file, adr, adr-direct, adr-stores, eadr, battery or battery-early-ack.
    #[arg(long, requires = "power")]
    platform: Option<power::Platform>,
    /// Let the clients rely on this method alone, whether it is durable on the platform or not: write, read, flush-global, flush-persistent
    /// or software-flush.
    #[arg(long, requires = "power", value_name = "METHOD")]
    rely: Option<power::Method>,
    /// Cut the power of a replica of a log instead: the real writer appends, the real reader checks the records that survive.
    #[arg(long, requires = "power")]
    log: bool,
    /// Inject a defect of the server, or of the log, that the run must detect; an unknown name prints the list.
    #[arg(long, requires = "kind")]
    defect: Option<String>,
    /// Number of runs, each with the next seed.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,
    /// Print JSON, one object for each run.
    #[arg(long)]
    json: bool,
}

/// Parses a percentage with which a simulated run can still end; the percent sign may be left out here.
fn percent(text: &str) -> Result<f64, String> {
    let spec: Spec = format!("loss={}%", text.trim_end_matches('%'))
        .parse()
        .map_err(|_| "give 0% to 50%, as 1%".to_owned())?;
    up_to_half("loss", spec.loss)
}

fn up_to_half(kind: &str, percent: f64) -> Result<f64, String> {
    if percent <= 50.0 {
        return Ok(percent);
    }
    Err(format!(
        "{kind}={percent}%: give 0% to 50%: with more, connections fail"
    ))
}

/// Parses faults, and refuses kinds with which operations may fail: a run checks that every operation succeeds.
fn parse_fault(text: &str) -> Result<Spec, String> {
    let spec: Spec = text.parse().map_err(|error: SpecError| error.to_string())?;
    let Spec {
        seed,
        loss,
        dup,
        reorder,
        corrupt,
        ..
    } = spec;
    let taken = Spec {
        seed,
        loss,
        dup,
        reorder,
        corrupt,
        ..Spec::default()
    };
    if spec != taken {
        return Err(
            "the simulation takes loss, dup, reorder, corrupt and seed; it draws delays, rates and outages from the seed".into(),
        );
    }
    for (kind, percent) in [
        ("loss", loss),
        ("dup", dup),
        ("reorder", reorder),
        ("corrupt", corrupt),
    ] {
        up_to_half(kind, percent)?;
    }
    Ok(spec)
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.log {
        return cut_log(args);
    }
    if args.power {
        return cut_power(args);
    }
    if args.leases {
        return take_back(args);
    }
    let spec = args.fault.unwrap_or(Spec {
        loss: 1.0,
        ..Spec::default()
    });
    each_run(args, spec.seed, |seed| {
        let settings = Settings {
            seed,
            loss_percent: args.loss.unwrap_or(spec.loss),
            dup_percent: args.dup.unwrap_or(spec.dup),
            reorder_percent: args.reorder.unwrap_or(spec.reorder),
            corrupt_percent: args.corrupt.unwrap_or(spec.corrupt),
            operations: args.operations,
            qps: args.qps,
            one_machine: args.one_machine,
            ..Settings::default()
        };
        let report = rdmux_sim::run(&settings);
        let done: serde_json::Map<String, serde_json::Value> = rdmux_sim::KINDS
            .iter()
            .zip(&report.done)
            .map(|(name, kind)| {
                (
                    name.to_lowercase().replace(' ', "_"),
                    json!({ "operations": kind.operations, "bytes": kind.bytes }),
                )
            })
            .collect();
        let value = json!({
            "seed": settings.seed,
            "violation": report.violation,
            "address_family": report.address_family,
            "path_mtu": report.path_mtu,
            "window_bytes": report.window_bytes,
            "latency_ns": report.latency_ns,
            "done": done,
            "virtual_ns": report.virtual_ns,
            "packets": report.packets,
            "packet_bytes": report.packet_bytes,
            "lost": report.lost,
            "duplicated": report.duplicated,
            "reordered": report.reordered,
            "corrupted": report.corrupted,
            "retransmitted": report.retransmitted,
            "timeouts": report.timeouts,
            "sequence_naks": report.sequence_naks,
            "rnr_naks": report.rnr_naks,
            "duplicate_requests": report.duplicate_requests,
            "discarded": report.discarded,
            "direct": report.direct,
            "links_broken": report.links_broken,
        });
        Ok(Outcome::of(value, &report, report.violation.as_deref()))
    })
}

/// Output of a run, and the rule that it violated.
struct Outcome {
    value: serde_json::Value,
    text: String,
    violation: Option<String>,
}

impl Outcome {
    fn of(value: serde_json::Value, report: &impl std::fmt::Display, violation: Option<&str>) -> Outcome {
        Outcome {
            value,
            text: report.to_string(),
            violation: violation.map(str::to_owned),
        }
    }
}

/// Runs with one seed after the other, until one violates a rule or the reader of standard output has gone.
fn each_run(args: &Args, first: u64, run: impl Fn(u64) -> Result<Outcome>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for i in 0..args.runs {
        let seed = args.seed.unwrap_or(first).wrapping_add(i);
        let outcome = run(seed)?;
        let shown = if args.json {
            writeln!(out, "{}", outcome.value)
        } else {
            write!(out, "{}", outcome.text)
        };
        match shown.and_then(|()| out.flush()) {
            Err(why) if why.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            shown => shown?,
        }
        if let Some(violation) = outcome.violation {
            bail!("seed {seed}: {violation}");
        }
    }
    Ok(())
}

/// Returns the requested defect.
fn defect<T: FromStr<Err = String>>(args: &Args) -> Result<Option<T>> {
    let parsed = args.defect.as_deref().map(str::parse).transpose();
    parsed.map_err(|why| anyhow!("--defect: {why}"))
}

/// Returns counts as JSON.
fn counted(counts: &[(&str, u64)]) -> serde_json::Map<String, serde_json::Value> {
    counts
        .iter()
        .map(|(name, count)| (name.replace([' ', '-'], "_"), json!(count)))
        .collect()
}

/// Runs `rdmux sim --leases`.
fn take_back(args: &Args) -> Result<()> {
    let defect = defect(args)?;
    each_run(args, 1, |seed| {
        let settings = leases::Settings {
            defect,
            ..leases::Settings::drawn(seed)
        };
        let report = leases::run(&settings);
        let value = json!({
            "seed": settings.seed,
            "defect": settings.defect.map(leases::Defect::name),
            "violation": report.violation,
            "counts": counted(&report.counts.list()),
        });
        Ok(Outcome::of(value, &report, report.violation.as_deref()))
    })
}

/// Runs `rdmux sim --power --log`.
fn cut_log(args: &Args) -> Result<()> {
    // A defect of the log, or else one of the server.
    let of_log = args.defect.as_deref().and_then(|name| name.parse().ok());
    let of_server = match of_log {
        Some(_) => None,
        None => defect(args).map_err(|why| {
            let names: Vec<&str> = power::LogDefect::VARIANTS.iter().map(|one| one.name()).collect();
            anyhow!("{why}; of the log: {}", names.join(", "))
        })?,
    };
    each_run(args, 1, |seed| {
        let drawn = power::Settings::drawn_for_log(seed);
        let settings = power::Settings {
            platform: args.platform.unwrap_or(drawn.platform),
            rely: args.rely,
            defect: of_server,
            ..drawn
        };
        if settings.platform.domain == power::Domain::None {
            bail!("nothing survives on platform none: choose another for a log");
        }
        let report = power::run_log(&settings, of_log);
        let named = of_log.map(power::LogDefect::name);
        let value = json!({
            "seed": settings.seed,
            "platform": settings.platform.name(),
            "rely": settings.rely.map(power::Method::name),
            "defect": named.or(settings.defect.map(power::Defect::name)),
            "violation": report.violation,
            "counts": counted(&report.counts()),
        });
        Ok(Outcome::of(value, &report, report.violation.as_deref()))
    })
}

/// Runs `rdmux sim --power`.
fn cut_power(args: &Args) -> Result<()> {
    let defect = defect(args)?;
    each_run(args, 1, |seed| {
        let drawn = power::Settings::drawn(seed);
        let settings = power::Settings {
            platform: args.platform.unwrap_or(drawn.platform),
            rely: args.rely,
            defect,
            ..drawn
        };
        let report = power::run(&settings);
        let value = json!({
            "seed": settings.seed,
            "platform": settings.platform.name(),
            "rely": settings.rely.map(power::Method::name),
            "defect": settings.defect.map(power::Defect::name),
            "violation": report.violation,
            "counts": counted(&report.counts()),
        });
        Ok(Outcome::of(value, &report, report.violation.as_deref()))
    })
}
