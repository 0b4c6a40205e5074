//! `rdmux demo fair`: a heartbeat beside a bulk transfer, to one peer behind a bottleneck. The same two programs run twice: with a device each,
//! so that the bottleneck's queue decides, and through a node, which does not send more than the bottleneck takes and so decides itself.
//!
//! The bottleneck is a port of the peer's device that receives at a rate, first in first out, as a port of a switch does (`--fault rate=`).

pub(super) mod traffic;

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hdrhistogram::Histogram;
use rdmux_verbs::faults::parse_rate;
use serde::Serialize;
use serde_json::json;

use self::traffic::{PERIOD, PORT, Report};
use super::stage::{Actor, Stage};
use super::unused_loopback;
use crate::output::{self, Align};

/// Bytes of a WRITE of the heartbeat.
const BEAT_BYTES: u32 = 64;
/// Time between two of them.
const BEAT_EVERY_US: u64 = 2_000;
/// Most of them that are not complete: more than the longest queue holds up.
const BEATS_MAX: u32 = 1024;
/// Bytes of a WRITE of the bulk transfer.
const BULK_BYTES: u32 = 1 << 20;
/// WRITEs in flight on each of its connections.
const BULK_DEPTH: u32 = 2;
/// The node's part of the bottleneck's rate: packets have headers, and nothing may wait there.
const NODE_PART: f64 = 0.95;
/// Class of the heartbeat.
const CLASS: &str = "7";
/// Time for which nothing is measured, after both have begun to send.
const WARM_UP: Duration = Duration::from_millis(300);
/// Time without a report after which a program is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bounds of a sparkline's logarithmic scale, in us.
const SCALE_US: (f64, f64) = (50.0, 200_000.0);
/// Columns of a sparkline.
const COLUMNS: usize = 24;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: rate_bps, node_rate_bps, seconds, heartbeat (object: bytes, every_us, class), bulk (object: bytes, depth, connections),
off and on (objects: beats, p50_us, p99_us, max_us, bulk_gbits), p50_ratio and p99_ratio (off to on).")]
pub(super) struct Args {
    /// Seconds for which each of the two is measured.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Rate at which the peer's port receives, such as 500Mbit; the node sends at 95 % of it.
    #[arg(long, default_value = "1Gbit", value_parser = rate_of)]
    rate: u64,
    /// Connections of the bulk transfer.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..=32))]
    connections: u8,
    /// Give the heartbeat no class of its own: both are in the same one, and take turns by bytes.
    #[arg(long)]
    same_class: bool,
    /// Report in JSON.
    #[arg(long)]
    json: bool,
}

fn rate_of(text: &str) -> Result<u64, String> {
    let rate = parse_rate(text).filter(|rate| (100_000_000..=400_000_000_000).contains(rate));
    rate.ok_or_else(|| "give a rate of 100Mbit to 400Gbit, such as 500Mbit".into())
}

/// Figures of one of the two.
#[derive(Debug, Serialize)]
struct Figures {
    beats: u64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    bulk_gbits: f64,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let is_live = !args.json && std::io::stdout().is_terminal();
    if !args.json {
        output::say(&format!(
            "heartbeat {BEAT_BYTES} bytes each {} ms, bulk transfer {} x {} x {} in flight, to a port of {}",
            BEAT_EVERY_US / 1000,
            args.connections,
            BULK_DEPTH,
            output::bytes(BULK_BYTES.into()),
            bits(args.rate as f64)
        ));
    }
    let stage = Stage::new(None, None)?;
    let off = measure(&stage, args, Sharing::Off, is_live)?;
    let on = measure(&stage, args, Sharing::On, is_live)?;
    drop(stage);
    let (p50_ratio, p99_ratio) = (off.p50_us / on.p50_us, off.p99_us / on.p99_us);
    if args.json {
        let report = json!({
            "rate_bps": args.rate,
            "node_rate_bps": node_rate_bps(args),
            "seconds": args.seconds,
            "heartbeat": { "bytes": BEAT_BYTES, "every_us": BEAT_EVERY_US, "class": class_of(args).parse::<u8>()? },
            "bulk": { "bytes": BULK_BYTES, "depth": BULK_DEPTH, "connections": args.connections },
            "off": off,
            "on": on,
            "p50_ratio": p50_ratio,
            "p99_ratio": p99_ratio,
        });
        output::say(&report.to_string());
        return Ok(());
    }
    let columns = [
        ("sharing", Align::Left),
        ("beats", Align::Right),
        ("p50 ms", Align::Right),
        ("p99 ms", Align::Right),
        ("max ms", Align::Right),
        ("bulk Gbit/s", Align::Right),
    ];
    let row = |sharing: Sharing, figures: &Figures| {
        let ms = |us: f64| format!("{:.2}", us / 1e3);
        vec![
            sharing.word().into(),
            figures.beats.to_string(),
            ms(figures.p50_us),
            ms(figures.p99_us),
            ms(figures.max_us),
            format!("{:.2}", figures.bulk_gbits),
        ]
    };
    let rows = [row(Sharing::Off, &off), row(Sharing::On, &on)];
    output::say("");
    output::say(&output::table(&columns, &rows));
    output::say(&format!(
        "with sharing the heartbeat is {p50_ratio:.0} times as fast (p50), {p99_ratio:.0} times (p99)"
    ));
    output::say(
        "off: a device for each program; on: rdmux node, the same programs with RDMUX_PROVIDER=shared",
    );
    Ok(())
}

/// The way on which the programs reach their peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// Each by a device of its own.
    Off,
    /// Through a node.
    On,
}

impl Sharing {
    fn word(self) -> &'static str {
        match self {
            Sharing::Off => "off",
            Sharing::On => "on",
        }
    }

    fn provider(self) -> &'static str {
        match self {
            Sharing::Off => "soft",
            Sharing::On => "shared",
        }
    }
}

fn node_rate_bps(args: &Args) -> u64 {
    (args.rate as f64 * NODE_PART) as u64
}

fn class_of(args: &Args) -> &'static str {
    if args.same_class { "0" } else { CLASS }
}

/// Runs the programs, and measures them for the time that was asked for.
fn measure(stage: &Stage, args: &Args, sharing: Sharing, is_live: bool) -> Result<Figures> {
    let (here, there) = (unused_loopback(0), unused_loopback(1));
    let (bind, listen) = (here.to_string(), there.to_string());
    let to = SocketAddr::new(there, PORT).to_string();
    let bulk_bytes = BULK_BYTES.to_string();
    let fault = format!("rate={}kbit", args.rate / 1000);
    let sink = [
        "demo",
        "fair-sink",
        "--listen",
        &listen,
        "--bytes",
        &bulk_bytes,
        "--provider",
        "soft",
        "--fault",
        &fault,
    ];
    let _sink = stage.start_ready(&sink, &[])?;
    let node = match sharing {
        Sharing::Off => None,
        Sharing::On => {
            let config = stage.path("node.toml");
            let user = rustix::process::geteuid().as_raw();
            let rate = node_rate_bps(args) / 1000;
            let text = format!(
                "rate = \"{rate}kbit\"\n[tenant.demo]\nuid = [{user}]\nclasses = {{ {CLASS} = \"strict\" }}\n"
            );
            std::fs::write(&config, text)?;
            let config = stage.arg_of(&config)?;
            let node = [
                "node",
                "--device",
                &bind,
                "--config",
                &config,
                "--provider",
                "soft",
                "--until-idle",
                "5",
            ];
            Some(stage.start_ready(&node, &[])?)
        }
    };
    let (connections, depth) = (args.connections.to_string(), BULK_DEPTH.to_string());
    let (beat_bytes, beats_max, every) = (
        BEAT_BYTES.to_string(),
        BEATS_MAX.to_string(),
        BEAT_EVERY_US.to_string(),
    );
    let common = [
        "demo",
        "fair-traffic",
        "--bind",
        &bind,
        "--to",
        &to,
        "--provider",
        sharing.provider(),
    ];
    let mut beat = common.to_vec();
    beat.extend([
        "--connections",
        "1",
        "--bytes",
        &beat_bytes,
        "--depth",
        &beats_max,
    ]);
    beat.extend(["--every-us", &every, "--class", class_of(args)]);
    let mut bulk = common.to_vec();
    bulk.extend([
        "--connections",
        &connections,
        "--bytes",
        &bulk_bytes,
        "--depth",
        &depth,
    ]);
    let (reports, received) = mpsc::channel();
    // The heartbeat is there first: what it waits for to connect is not measured.
    let mut programs = Vec::new();
    for (program, words) in [(Program::Beat, &beat), (Program::Bulk, &bulk)] {
        let mut actor = stage.start(words, &[])?;
        forward(program, &mut actor, reports.clone())?;
        programs.push(actor);
    }

    let mut scene = Scene::new(sharing)?;
    let mut begun = [false; 2];
    let mut measures_from = None;
    loop {
        let (program, report) = match received.recv_timeout(PATIENCE) {
            Ok(report) => report,
            Err(RecvTimeoutError::Timeout) => bail!("the programs do not report: is the host overloaded?"),
            Err(RecvTimeoutError::Disconnected) => bail!("the programs have ended"),
        };
        let Some(report) = report else {
            let name = program.word();
            let said = programs
                .get_mut(program as usize)
                .map(Actor::complaint)
                .unwrap_or_default();
            return Err(anyhow!("{said}").context(format!("the {name} has ended")));
        };
        begun[program as usize] |= report.bytes > 0;
        let now = Instant::now();
        if begun == [true; 2] && measures_from.is_none() {
            measures_from = Some(now + WARM_UP);
            if !is_live && !args.json {
                output::say(&format!("{:<3}  measured for {} s", sharing.word(), args.seconds));
            }
        }
        let Some(from) = measures_from.filter(|from| now >= *from) else {
            continue;
        };
        scene.add(program, &report);
        let measured = now - from;
        if program == Program::Beat && is_live {
            scene.show(measured)?;
        }
        if measured >= Duration::from_secs(args.seconds.into()) && !scene.beats.is_empty() {
            for program in programs {
                program.kill();
            }
            if let Some(node) = node {
                stage.end(node)?;
            }
            if is_live {
                output::say("");
            }
            return Ok(scene.figures(measured));
        }
    }
}

/// A program that reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Beat,
    Bulk,
}

impl Program {
    fn word(self) -> &'static str {
        match self {
            Program::Beat => "heartbeat",
            Program::Bulk => "bulk transfer",
        }
    }
}

/// Starts a thread that passes a program's reports on, and `None` at its end.
fn forward(program: Program, actor: &mut Actor, to: Sender<(Program, Option<Report>)>) -> Result<()> {
    let lines = BufReader::new(actor.stdout()?).lines();
    let run = move || {
        let reports = lines.map_while(|line| serde_json::from_str(&line.ok()?).ok());
        for report in reports {
            if to.send((program, Some(report))).is_err() {
                return;
            }
        }
        let _ = to.send((program, None));
    };
    std::thread::Builder::new()
        .name("reports".into())
        .spawn(run)
        .context("a thread for the reports")?;
    Ok(())
}

/// Measurements so far.
struct Scene {
    sharing: Sharing,
    /// In ns.
    beats: Histogram<u64>,
    bulk_bytes: u64,
    /// The longest beat of each period.
    peaks_us: Vec<f64>,
}

impl Scene {
    fn new(sharing: Sharing) -> Result<Scene> {
        Ok(Scene {
            sharing,
            beats: Histogram::new_with_bounds(1, 60_000_000_000, 3)?,
            bulk_bytes: 0,
            peaks_us: Vec::new(),
        })
    }

    fn add(&mut self, program: Program, report: &Report) {
        match program {
            Program::Bulk => self.bulk_bytes += report.bytes,
            Program::Beat => {
                for latency_ns in &report.latencies_ns {
                    self.beats.saturating_record(*latency_ns);
                }
                let peak_ns = report.latencies_ns.iter().max();
                self.peaks_us.extend(peak_ns.map(|ns| *ns as f64 / 1e3));
            }
        }
    }

    fn figures(&self, measured: Duration) -> Figures {
        let us = |ns: u64| ns as f64 / 1e3;
        Figures {
            beats: self.beats.len(),
            p50_us: us(self.beats.value_at_quantile(0.50)),
            p99_us: us(self.beats.value_at_quantile(0.99)),
            max_us: us(self.beats.max()),
            // The first report counts a period from before.
            bulk_gbits: self.bulk_bytes as f64 * 8.0 / 1e9 / (measured + PERIOD).as_secs_f64(),
        }
    }

    /// Writes the line anew.
    fn show(&self, measured: Duration) -> Result<()> {
        let figures = self.figures(measured);
        let recent = &self.peaks_us[self.peaks_us.len().saturating_sub(COLUMNS)..];
        let line = format!(
            "{:<3}  {:>COLUMNS$}  p50 {:>7.2} ms  p99 {:>7.2} ms  bulk {:.2} Gbit/s",
            self.sharing.word(),
            sparkline(recent),
            figures.p50_us / 1e3,
            figures.p99_us / 1e3,
            figures.bulk_gbits
        );
        let mut out = std::io::stdout().lock();
        write!(out, "\r{line}\x1b[K")?;
        Ok(out.flush()?)
    }
}

/// Returns a column for each value, its height by the logarithm.
fn sparkline(values_us: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (low, high) = (SCALE_US.0.ln(), SCALE_US.1.ln());
    let bar = |us: &f64| {
        let part = (us.max(SCALE_US.0).ln() - low) / (high - low);
        BARS[((part * BARS.len() as f64) as usize).min(BARS.len() - 1)]
    };
    values_us.iter().map(bar).collect()
}

fn bits(bps: f64) -> String {
    if bps >= 1e9 {
        format!("{} Gbit/s", bps / 1e9)
    } else {
        format!("{} Mbit/s", bps / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparkline__is_logarithmic_and_bounded() {
        assert_eq!(sparkline(&[]), "");
        assert_eq!(sparkline(&[0.0, 50.0, 3_163.0, 199_000.0, 1e9]), "▁▁▅██");
    }

    #[test]
    fn figures__of_what_was_added() {
        let mut scene = Scene::new(Sharing::On).unwrap();
        let latencies_ns = (1..=100).map(|ms| ms * 1_000_000).collect();
        scene.add(
            Program::Beat,
            &Report {
                bytes: 6400,
                latencies_ns,
            },
        );
        let bulk = Report {
            bytes: 125_000_000,
            latencies_ns: Vec::new(),
        };
        scene.add(Program::Bulk, &bulk);
        let figures = scene.figures(Duration::from_millis(900));
        assert_eq!(figures.beats, 100);
        assert!((figures.p50_us / 50_000.0 - 1.0).abs() < 0.01, "{figures:?}");
        assert!((figures.p99_us / 99_000.0 - 1.0).abs() < 0.01, "{figures:?}");
        assert!((figures.bulk_gbits - 1.0).abs() < 1e-9, "{figures:?}");
        assert_eq!(scene.peaks_us.len(), 1);
    }

    #[test]
    fn rate_of__within_bounds() {
        assert_eq!(rate_of("500Mbit"), Ok(500_000_000));
        for wrong in ["1", "99Mbit", "1Tbit", "fast"] {
            assert!(rate_of(wrong).unwrap_err().contains("500Mbit"), "{wrong}");
        }
    }
}
