//! `rdmux log`: an append-only log in regions of several servers.

use std::io::{BufRead, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use rdmux_log::{self as log, Log, LogError, Options, View, agree, look};
use rdmux_push::{Domain, Key, Target, parse_size};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::json;

use super::push::{interrupted, take_interrupts};
use super::serve::{domain_words, load_key, pin};
use crate::output::{self, Align};

/// Maximum number of lines read ahead of the acknowledged ones.
const AHEAD: usize = 4096;

/// Keep an append-only log in regions of several servers.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A record is acknowledged when a majority of the regions hold it, each as durably as it can. Name all regions of the log in each command;
serve each with `rdmux serve --file PATH,size=N`. A new writer fences the previous one. JSON: see `rdmux log COMMAND --help`.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Append each line of standard input; print the number of each acknowledged record.
    #[command(
        after_help = "JSON: one object for each record: record, line; at the end one with records, seconds, durable."
    )]
    Append(Append),
    /// Print the acknowledged records; does not disturb a writer.
    #[command(
        after_help = "JSON: one object for each record: record, text or hex, acknowledged (true or false)."
    )]
    Read(Read),
    /// Show the contents of each region; does not disturb a writer.
    #[command(after_help = "\
JSON: one object: complete (a majority answers), regions (number of regions of the log), acknowledged, replicas: target, state, domain, term, first, last, acknowledged, \
bytes_used, bytes.")]
    Status(Status),
    /// Drop the records below a number; fences the current writer.
    #[command(after_help = "JSON: one object: first (the first record left), last.")]
    Trim(Trim),
    /// Measure the latency of appends; fences the current writer, and drops the oldest records when the log is full.
    #[command(after_help = "\
JSON: one object: records, bytes, depth, wait, domains, cpu, microseconds (min, p50, p90, p99, p999, max), records_per_second, durable.")]
    Bench(Bench),
}

#[derive(clap::Args, Debug)]
struct Common {
    /// All regions of the log: rdmux://HOST[:PORT]/REGION.
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<Target>,
    /// File with the servers' key [default: your own, made on first use].
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Report in JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
struct Writing {
    /// Local address to send from [default: the source address of the route to each host].
    #[arg(long, value_name = "ADDR")]
    from: Option<IpAddr>,
    /// Give up when no majority has answered for this time.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    patience: Duration,
    /// Spin while waiting: lowest latency, one CPU always busy.
    #[arg(long)]
    poll: bool,
    #[command(flatten)]
    device: super::device::DeviceArgs,
}

#[derive(clap::Args, Debug)]
struct Append {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    writing: Writing,
    /// Fail if all regions are blank, instead of creating the log.
    #[arg(long)]
    existing: bool,
    /// When the log is full, drop the oldest acknowledged records.
    #[arg(long)]
    drop_oldest: bool,
    /// Print nothing but errors.
    #[arg(short, long)]
    quiet: bool,
}

#[derive(clap::Args, Debug)]
struct Read {
    #[command(flatten)]
    common: Common,
    /// First record to print.
    #[arg(long, value_name = "N", default_value = "0")]
    first: u64,
    /// Also print records that are not known to be acknowledged; the next writer may keep or discard them.
    #[arg(long)]
    all: bool,
}

#[derive(clap::Args, Debug)]
struct Status {
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args, Debug)]
struct Trim {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    writing: Writing,
    /// First record to keep; the number after the last record drops all.
    #[arg(long, value_name = "N")]
    below: u64,
}

#[derive(clap::Args, Debug)]
struct Bench {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    writing: Writing,
    /// Number of records.
    #[arg(short = 'n', long, default_value = "10000", value_parser = clap::value_parser!(u64).range(1..))]
    records: u64,
    /// Size of a record.
    #[arg(short = 's', long, default_value = "4K", value_parser = parse_record)]
    size: usize,
    /// Number of unacknowledged records in flight.
    #[arg(short = 'd', long, default_value = "1", value_parser = clap::value_parser!(u64).range(1..=4096))]
    depth: u64,
    /// Run on this CPU.
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|seconds: &f64| (0.1..=86_400.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds, 0.1 to 86400".into())
}

fn parse_record(text: &str) -> Result<usize, String> {
    parse_size(text)
        .filter(|bytes| *bytes <= log::RECORD_BYTES_MAX.into())
        .map(|bytes| bytes as usize)
        .ok_or_else(|| "give bytes, 0 to 16M".into())
}

pub(crate) fn run(args: Args) -> Result<()> {
    let writing = match &args.command {
        Command::Append(Append { writing, .. })
        | Command::Trim(Trim { writing, .. })
        | Command::Bench(Bench { writing, .. }) => Some(writing),
        Command::Read(_) | Command::Status(_) => None,
    };
    writing.map_or(Ok(()), |writing| writing.device.apply())?;
    match args.command {
        Command::Append(args) => append(&args),
        Command::Read(args) => read(&args),
        Command::Status(args) => status(&args),
        Command::Trim(args) => trim(&args),
        Command::Bench(args) => bench(&args),
    }
}

impl Common {
    fn key(&self) -> Result<Key> {
        for (at, target) in self.targets.iter().enumerate() {
            ensure!(
                target.offset == 0,
                "{target}: a log begins at the start of its region: leave out @OFFSET"
            );
            ensure!(!self.targets[..at].contains(target), "{target} is given twice");
        }
        load_key(self.key.as_deref())
    }
}

impl Writing {
    fn options(&self) -> Options {
        Options {
            from: self.from,
            polled: self.poll,
            patience: self.patience,
            ..Options::default()
        }
    }
}

/// Warns of a log of few regions: with one region, its loss loses everything; with two, the loss of one stops the log.
fn warn_of_few(common: &Common) {
    let replicas = common.targets.len();
    if replicas < 3 {
        let _ = writeln!(
            std::io::stderr(),
            "rdmux log: {replicas} region{} cannot tolerate a failure: use 3 to survive the loss of one",
            if replicas == 1 { "" } else { "s" }
        );
    }
}

/// Returns whether an acknowledged record survives a loss of power of all servers.
fn is_durable(log: &Log) -> bool {
    log.replicas()
        .all(|(_, _, domain)| domain.is_none_or(|domain| domain != Domain::None))
}

fn tell_changes(log: &mut Log, quiet: bool) {
    let changes = log.take_changes();
    if quiet {
        return;
    }
    let targets: Vec<String> = log.replicas().map(|(target, ..)| target.to_string()).collect();
    for (replica, state) in changes {
        let _ = writeln!(std::io::stderr(), "rdmux log: {}: {state}", targets[replica]);
    }
}

/// Lines of standard input, read by a thread; `None` is the end.
struct Lines {
    lines: mpsc::Receiver<std::io::Result<Vec<u8>>>,
    readable: Arc<std::os::fd::OwnedFd>,
    ended: bool,
}

impl Lines {
    fn start() -> Result<Lines> {
        let readable = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (tx, lines) = mpsc::sync_channel(AHEAD);
        let waker = readable.clone();
        let read = move || {
            let mut input = std::io::stdin().lock();
            loop {
                let mut line = Vec::new();
                let result = input.read_until(b'\n', &mut line);
                let end = matches!(result, Ok(0) | Err(_));
                if line.last() == Some(&b'\n') {
                    line.pop();
                }
                let sent = match result {
                    Ok(0) => Ok(()),
                    Ok(_) => tx.send(Ok(line)),
                    Err(error) => tx.send(Err(error)),
                };
                if end || sent.is_err() {
                    break;
                }
                let _ = rustix::io::write(&waker, &1u64.to_ne_bytes());
            }
            drop(tx);
            let _ = rustix::io::write(&waker, &1u64.to_ne_bytes());
        };
        std::thread::Builder::new().name("stdin".into()).spawn(read)?;
        Ok(Lines {
            lines,
            readable,
            ended: false,
        })
    }

    fn next(&mut self) -> Result<Option<Vec<u8>>> {
        match self.lines.try_recv() {
            Ok(line) => Ok(Some(line.context("standard input")?)),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => {
                self.ended = true;
                Ok(None)
            }
        }
    }
}

fn append(args: &Append) -> Result<()> {
    let common = &args.common;
    let key = common.key()?;
    take_interrupts()?;
    if !args.quiet {
        warn_of_few(common);
    }
    let options = Options {
        create: !args.existing,
        drop_oldest: args.drop_oldest,
        ..args.writing.options()
    };
    let mut log = Log::open(&common.targets, &key, &options)?;
    let begin = Instant::now();
    let (first, mut told) = (log.last() + 1, log.last());
    let mut lines = Lines::start()?;
    let mut report = |log: &Log, line_of: &dyn Fn(u64) -> u64| {
        let acknowledged = log.acknowledged();
        let mut text = String::new();
        while told < acknowledged {
            told += 1;
            if common.json {
                text += &json!({ "record": told, "line": line_of(told) }).to_string();
            } else {
                text += &told.to_string();
            }
            text.push('\n');
        }
        if !args.quiet && !text.is_empty() {
            output::say(text.trim_end());
        }
    };
    let line_of = move |record: u64| record + 1 - first;
    let mut result = (|| -> Result<()> {
        while !lines.ended {
            let mut idle = true;
            while log.last() - log.acknowledged() < AHEAD as u64
                && !interrupted()
                && let Some(line) = lines.next()?
            {
                idle = false;
                let at = line_of(log.last() + 1);
                let record = log.append(&line).with_context(|| format!("line {at}"))?;
                ensure!(record >= first, "another writer has taken over the log");
                report(&log, &line_of);
            }
            ensure!(!interrupted(), "interrupted after line {}", line_of(log.last()));
            log.poll()?;
            report(&log, &line_of);
            tell_changes(&mut log, args.quiet);
            if idle && !lines.ended {
                log.sleep(Some(&*lines.readable), Duration::from_secs(1))?;
                let _ = rustix::io::read(&*lines.readable, &mut [0u8; 8]);
            }
        }
        Ok(())
    })();
    // Records in flight need nothing but time, unless the log itself failed: after any other end, wait for them.
    let failed = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(error) if !matches!(error, LogError::Append(_)));
    if !result.as_ref().is_err_and(failed) {
        let waited = (|| -> Result<()> {
            let last = log.last();
            while log.acknowledged() < last {
                // Wait in steps, so that acknowledgements are reported as they come.
                log.wait_for(log.acknowledged() + 1)?;
                report(&log, &line_of);
            }
            Ok(())
        })();
        result = result.and(waited);
    }
    report(&log, &line_of);
    tell_changes(&mut log, args.quiet);
    let (acknowledged, last) = (log.acknowledged(), log.last());
    let durable = is_durable(&log);
    let unknown = last - acknowledged;
    if unknown == 0 && !result.as_ref().is_err_and(failed) {
        result = result.and(log.close().map_err(Into::into));
    }
    result.with_context(|| match unknown {
        0 => format!("records up to {acknowledged} are acknowledged"),
        _ => format!(
            "records up to {acknowledged} are acknowledged, {unknown} more may or may not be in the log: see `rdmux log status`"
        ),
    })?;
    if common.json {
        let report = json!({
            "records": acknowledged + 1 - first,
            "seconds": begin.elapsed().as_secs_f64(),
            "durable": durable,
        });
        output::say(&report.to_string());
    } else if !args.quiet && !durable {
        let _ = writeln!(
            std::io::stderr(),
            "rdmux log: warning: not all regions survive a loss of power"
        );
    }
    Ok(())
}

/// Looks at all regions at once; returns an error for each that cannot be reached.
fn look_at_all(common: &Common, records: bool) -> Result<Vec<Result<Option<View>, rdmux_push::Error>>> {
    let key = common.key()?;
    Ok(std::thread::scope(|scope| {
        let threads: Vec<_> = (common.targets.iter())
            .map(|target| scope.spawn(|| look(target, &key, records)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(std::io::Error::other("the thread that reads the region failed").into())
                })
            })
            .collect()
    }))
}

fn read(args: &Read) -> Result<()> {
    let common = &args.common;
    let looks = look_at_all(common, true)?;
    let mut views = Vec::new();
    for (target, look) in common.targets.iter().zip(looks) {
        match look {
            Ok(Some(view)) => views.push(view),
            Ok(None) => drop(writeln!(
                std::io::stderr(),
                "rdmux log: {target}: the region holds no log"
            )),
            Err(error) => drop(writeln!(std::io::stderr(), "rdmux log: {target}: {error}")),
        }
    }
    let read = agree(&views).ok_or_else(|| anyhow!("none of the regions holds a readable log"))?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for (record, bytes) in &read.records {
        let acknowledged = *record <= read.acknowledged;
        if *record < args.first || !acknowledged && !args.all {
            continue;
        }
        let written = if common.json {
            let mut line = json!({ "record": record, "acknowledged": acknowledged });
            match std::str::from_utf8(bytes) {
                Ok(text) => line["text"] = text.into(),
                Err(_) => {
                    line["hex"] = bytes
                        .iter()
                        .map(|byte| format!("{byte:02x}"))
                        .collect::<String>()
                        .into()
                }
            }
            writeln!(out, "{line}")
        } else {
            out.write_all(bytes).and_then(|()| out.write_all(b"\n"))
        };
        match written {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("cannot write to standard output")?,
        }
    }
    out.flush().context("cannot write to standard output")?;
    let last = read.records.last().map_or(0, |(record, _)| *record);
    if last > read.acknowledged && !args.all && !common.json {
        let _ = writeln!(
            std::io::stderr(),
            "rdmux log: {} more records exist, not known to be acknowledged: --all prints them",
            last - read.acknowledged
        );
    }
    ensure!(
        read.complete || views.iter().all(|view| view.whole),
        "the writer drops records faster than this command reads them: acknowledged records may be missing at the end"
    );
    ensure!(
        read.complete,
        "only {} of {} regions could be read, no majority: acknowledged records may be missing at the end",
        read.seen,
        read.replicas
    );
    Ok(())
}

fn status(args: &Status) -> Result<()> {
    let common = &args.common;
    let looks = look_at_all(common, false)?;
    let views: Vec<View> = looks.iter().flatten().flatten().cloned().collect();
    let read = agree(&views);
    let best = views.iter().map(|view| (view.epoch, view.last)).max();
    let state = |look: &Result<Option<View>, rdmux_push::Error>| match look {
        Err(error) => error.to_string(),
        Ok(None) => "no log".into(),
        Ok(Some(view)) if view.joining => "joining".into(),
        Ok(Some(view)) if Some((view.epoch, view.last)) == best => "in step".into(),
        Ok(Some(_)) => "behind".into(),
    };
    let complete = read.as_ref().is_some_and(|read| read.complete);
    let regions = read.as_ref().map(|read| read.replicas);
    let acknowledged = read.map(|read| read.acknowledged);
    if common.json {
        let replicas: Vec<_> = (common.targets.iter().zip(&looks))
            .map(|(target, look)| {
                let mut entry = json!({ "target": target.to_string(), "state": state(look) });
                if let Ok(Some(view)) = look {
                    entry["domain"] = domain_words(view.domain).into();
                    entry["term"] = view.promise.term.into();
                    entry["first"] = view.first.into();
                    entry["last"] = view.last.into();
                    entry["acknowledged"] = view.acknowledged.into();
                    entry["bytes_used"] = view.used.into();
                    entry["bytes"] = view.area.into();
                }
                entry
            })
            .collect();
        let report = json!({ "complete": complete, "regions": regions, "acknowledged": acknowledged, "replicas": replicas });
        output::say(&report.to_string());
    } else {
        let rows: Vec<Vec<String>> = (common.targets.iter().zip(&looks))
            .map(|(target, look)| {
                let mut row = vec![target.to_string()];
                match look {
                    Ok(Some(view)) => row.extend([
                        view.promise.term.to_string(),
                        view.first.to_string(),
                        view.last.to_string(),
                        format!("{} of {}", output::bytes(view.used), output::bytes(view.area)),
                        domain_words(view.domain).into(),
                    ]),
                    _ => row.extend(std::iter::repeat_n("-".into(), 5)),
                }
                row.push(state(look));
                row
            })
            .collect();
        let columns = [
            ("region", Align::Left),
            ("term", Align::Right),
            ("first", Align::Right),
            ("last", Align::Right),
            ("in use", Align::Right),
            ("survives", Align::Left),
            ("state", Align::Left),
        ];
        output::say(&output::table(&columns, &rows));
        if let Some(acknowledged) = acknowledged {
            output::say(&format!("known to be acknowledged: up to record {acknowledged}"));
        }
    }
    if let Some(replicas) = regions
        .map(usize::from)
        .filter(|has| *has != common.targets.len())
    {
        let words = log::count_words(replicas, common.targets.len());
        let _ = writeln!(std::io::stderr(), "rdmux log: the log {words}");
    }
    ensure!(complete, "no majority of the regions answers and holds the log");
    Ok(())
}

fn trim(args: &Trim) -> Result<()> {
    let common = &args.common;
    let key = common.key()?;
    let options = Options {
        trim: Some(args.below),
        ..args.writing.options()
    };
    let log = Log::open(&common.targets, &key, &options)?;
    let (first, last) = (log.first(), log.last());
    log.close()?;
    if common.json {
        output::say(&json!({ "first": first, "last": last }).to_string());
    } else if first > last {
        output::say(&format!("no record remains; the next is {first}"));
    } else {
        output::say(&format!("records {first} to {last} remain"));
    }
    Ok(())
}

fn bench(args: &Bench) -> Result<()> {
    let common = &args.common;
    if let Some(cpu) = args.cpu {
        pin(cpu)?;
    }
    let key = common.key()?;
    let options = Options {
        create: true,
        drop_oldest: true,
        ..args.writing.options()
    };
    let mut log = Log::open(&common.targets, &key, &options)?;
    let record: Vec<u8> = (0..args.size).map(|at| at as u8).collect();
    let warm_up = (args.records / 10).min(1000);
    let mut histogram = Histogram::<u64>::new_with_max(60_000_000_000, 3)?;
    let mut begun = std::collections::VecDeque::new();
    let mut start = Instant::now();
    let mut done = 0;
    for at in 0..warm_up + args.records {
        if at == warm_up {
            log.wait_for(log.last())?;
            start = Instant::now();
            begun.clear();
        }
        begun.push_back(Instant::now());
        let sequence = log.append(&record)?;
        loop {
            let open = log.last() - log.acknowledged();
            while begun.len() as u64 > open
                && let Some(begin) = begun.pop_front()
            {
                if at >= warm_up {
                    histogram.saturating_record(begin.elapsed().as_nanos() as u64);
                    done += 1;
                }
            }
            if open < args.depth {
                break;
            }
            log.wait_for(
                (sequence + 1)
                    .saturating_sub(args.depth)
                    .max(log.acknowledged() + 1),
            )?;
        }
    }
    log.wait_for(log.last())?;
    for begin in begun {
        histogram.saturating_record(begin.elapsed().as_nanos() as u64);
        done += 1;
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    let durable = is_durable(&log);
    let domains: Vec<&str> = log
        .replicas()
        .map(|(_, _, domain)| domain.map_or("not reached", domain_words))
        .collect();
    let domains: Vec<String> = domains.into_iter().map(Into::into).collect();
    log.close()?;
    let us = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e3;
    let wait = if args.writing.poll { "spinning" } else { "asleep" };
    if common.json {
        let report = json!({
            "records": done,
            "bytes": args.size,
            "depth": args.depth,
            "wait": wait,
            "cpu": args.cpu,
            "domains": domains,
            "durable": durable,
            "records_per_second": rate,
            "microseconds": {
                "min": histogram.min() as f64 / 1e3,
                "p50": us(0.5),
                "p90": us(0.9),
                "p99": us(0.99),
                "p999": us(0.999),
                "max": histogram.max() as f64 / 1e3,
            },
        });
        output::say(&report.to_string());
        return Ok(());
    }
    let placed = args.cpu.map_or("free".to_owned(), |cpu| format!("on CPU {cpu}"));
    output::say(&format!(
        "{done} records of {} in {} regions ({}), {} at a time; writer {wait}, {placed}",
        output::bytes(args.size as u64),
        common.targets.len(),
        domains.join(", "),
        args.depth
    ));
    output::say(&format!(
        "us from append to {}: min {:.1}, p50 {:.1}, p90 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1}",
        if durable {
            "durable on a majority"
        } else {
            "visible on a majority"
        },
        histogram.min() as f64 / 1e3,
        us(0.5),
        us(0.9),
        us(0.99),
        us(0.999),
        histogram.max() as f64 / 1e3
    ));
    output::say(&format!(
        "{rate:.0} records/s, {:.1} MB/s",
        rate * args.size as f64 / 1e6
    ));
    Ok(())
}
