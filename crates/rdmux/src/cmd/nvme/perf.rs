//! `rdmux nvme perf`: keeps queues of a namespace full, or sends them so many commands a second, and measures.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use clap::ValueEnum;
use hdrhistogram::Histogram;
use rdmux_nvmf::host::command::{read, write};
use rdmux_nvmf::host::queue::ENTRIES_MAX;
use rdmux_nvmf::host::{IoQueue, NamespaceInfo, Url};
use rdmux_push::parse_size;
use serde_json::json;

use super::host::{IoArgs, hint};
use crate::output;

/// Longest time that the histogram distinguishes, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// Percentiles that fio prints.
const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99,
];

/// Measure a namespace: IOPS, bandwidth, latency and processor time.
///
/// Each queue is a connection with a thread of its own, which sleeps until commands are done. Writes destroy what the namespace holds.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: url, nsid, rw, bs, depth, queues, rate (null without --rate), header_digest and data_digest, runtime_s, ios, reads, writes, iops, mib_per_s, latency_us (object: min, mean, stdev, max, percentiles: object of
fio's), cpu_us_per_io (processor time of this process), reconnects.")]
pub(crate) struct Args {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// Order and kind of the commands, in fio's words.
    #[arg(long, value_enum, default_value = "randread")]
    rw: Rw,
    /// Bytes of a command, a multiple of the namespace's block.
    #[arg(long, value_name = "BYTES", default_value = "4K", value_parser = parse_bs)]
    bs: u32,
    /// Commands in flight on each queue.
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u16).range(1..i64::from(ENTRIES_MAX)))]
    depth: u16,
    /// Number of I/O queues, each with a connection and a thread.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=128))]
    queues: u16,
    /// Commands a second, of all queues together, whatever the target's pace; one that finds its queue full is sent late, and its latency
    /// counts from when it was due [default: as fast as the target answers].
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    rate: Option<u32>,
    /// Seconds to measure.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    time: Duration,
    /// Seconds that go before, and do not count.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_pause)]
    warmup: Duration,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    io: IoArgs,
}

/// Order and kind of commands.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Rw {
    /// Reads of random places.
    Randread,
    /// Writes of random places.
    Randwrite,
    /// Reads in order.
    Read,
    /// Writes in order.
    Write,
    /// Reads and writes of random places, half of each.
    Randrw,
}

impl Rw {
    fn is_random(self) -> bool {
        matches!(self, Rw::Randread | Rw::Randwrite | Rw::Randrw)
    }

    fn has_writes(self) -> bool {
        matches!(self, Rw::Randwrite | Rw::Write | Rw::Randrw)
    }

    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

fn parse_bs(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text).filter(|bytes| (512..=1 << 20).contains(bytes));
    bytes
        .map(|bytes| bytes as u32)
        .ok_or_else(|| "give 512 bytes to 1M, as a number with or without K or M".into())
}

pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = parse_pause(text)?;
    (!seconds.is_zero())
        .then_some(seconds)
        .ok_or_else(|| "give more than 0 seconds".into())
}

fn parse_pause(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.strip_suffix('s').unwrap_or(text).parse().ok();
    seconds
        .filter(|seconds| (0.0..=86400.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds up to 86400, such as 5 or 0.5s".into())
}

/// The task of all queues.
#[derive(Debug)]
struct Job {
    namespace: NamespaceInfo,
    rw: Rw,
    bs: u32,
    /// Blocks of a command, and places of that size in the namespace.
    step: u32,
    places: u64,
    depth: u16,
    /// The measurement is from the first to the second.
    from: Instant,
    until: Instant,
}

/// The measurements of a queue.
#[derive(Debug)]
struct Measured {
    latency: Histogram<u64>,
    reads: u64,
    writes: u64,
}

impl Measured {
    fn new() -> Result<Measured> {
        Ok(Measured {
            latency: Histogram::new_with_max(LONGEST_NS, 3)?,
            reads: 0,
            writes: 0,
        })
    }
}

/// The order of the commands of one queue.
#[derive(Debug)]
struct Order {
    random: u64,
    next: u64,
}

impl Order {
    /// Returns the place of the next command, and whether it writes.
    fn next(&mut self, job: &Job) -> (u64, bool) {
        // xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let writes = match job.rw {
            Rw::Randread | Rw::Read => false,
            Rw::Randwrite | Rw::Write => true,
            Rw::Randrw => self.random >> 63 == 0,
        };
        let place = match job.rw.is_random() {
            true => self.random % job.places,
            false => self.next % job.places,
        };
        self.next += 1;
        (place, writes)
    }
}

/// Times at which the commands of one queue are due.
#[derive(Debug)]
struct Pace {
    /// Commands a second, of all queues.
    rate: Option<u32>,
    queues: u16,
    /// The first one is due.
    begin: Instant,
    /// The next one, of all queues' commands, which take turns.
    number: u64,
    /// A command that is due later found the queue full.
    full_since: Option<Instant>,
}

impl Pace {
    /// Returns the time at which the next command is due.
    fn due(&self, now: Instant) -> Instant {
        self.rate.map_or(now, |rate| {
            let ns = u128::from(self.number) * 1_000_000_000 / u128::from(rate);
            self.begin + Duration::from_nanos(ns as u64)
        })
    }

    /// Goes on to the next command, and returns the time from which the latency of this one counts: a target that lets commands wait for
    /// room does not look faster by that. A thread that wakes up late is not the target's fault.
    fn begin(&mut self, now: Instant) -> Instant {
        let due = self.due(now);
        self.number += u64::from(self.queues);
        match self.full_since {
            Some(since) if due >= since => due,
            _ => now,
        }
    }
}

/// Sends commands to a queue until the end, and measures what is done in between.
fn drive(
    queue: &mut IoQueue,
    job: &Job,
    mut order: Order,
    mut pace: Pace,
    measured: &mut Measured,
) -> Result<()> {
    let nsid = job.namespace.nsid;
    let submit = |queue: &mut IoQueue, order: &mut Order, buffer, token| {
        let (place, writes) = order.next(job);
        let slba = place * u64::from(job.step);
        let mut command = match writes {
            true => write(nsid, slba, job.step, job.bs, buffer),
            false => read(nsid, slba, job.step, job.bs, buffer),
        };
        command.token = token << 1 | u64::from(writes);
        queue.submit(command);
    };
    let mut began = vec![pace.begin; job.depth.into()];
    let mut idle = Vec::with_capacity(job.depth.into());
    for token in 0..u64::from(job.depth) {
        // A pattern that no compression or deduplication shrinks.
        let mut word = order.random ^ token;
        let buffer = (0..job.bs).map(|_| {
            word = word
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            (word >> 56) as u8
        });
        idle.push((token, buffer.collect()));
    }
    loop {
        let now = Instant::now();
        let is_over = now >= job.until;
        let mut due = pace.due(now);
        while !is_over
            && due <= now
            && let Some((token, buffer)) = idle.pop()
        {
            began[token as usize] = pace.begin(now);
            submit(queue, &mut order, buffer, token);
            due = pace.due(now);
        }
        pace.full_since = match idle.is_empty() {
            true => pace.full_since.or(Some(now)),
            false => None,
        };
        if is_over && queue.in_flight() == 0 {
            return Ok(());
        } else if is_over || idle.is_empty() {
            queue.wait()?;
        } else {
            queue.wait_until(due.min(job.until))?;
        }
        let now = Instant::now();
        while let Some(completion) = queue.poll() {
            ensure!(
                completion.status.is_success(),
                "the target refused a command: {}{}",
                completion.status,
                hint(completion.status)
            );
            let (token, writes) = (completion.command.token >> 1, completion.command.token & 1 != 0);
            if (job.from..job.until).contains(&now) {
                let latency = now.saturating_duration_since(began[token as usize]);
                measured.latency.saturating_record(latency.as_nanos() as u64);
                *(if writes {
                    &mut measured.writes
                } else {
                    &mut measured.reads
                }) += 1;
            }
            idle.push((token, completion.command.buffer));
        }
    }
}

/// Returns the processor time of this process.
fn process_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

pub(super) fn run(args: &Args) -> Result<()> {
    let (session, namespace) = args.io.session(&args.url, args.queues)?;
    let block = namespace.block_bytes();
    let (nsid, bs) = (namespace.nsid, args.bs);
    ensure!(
        u64::from(bs).is_multiple_of(block),
        "--bs {bs}: the blocks of namespace {nsid} have {block} bytes: give a multiple of that"
    );
    let most = session.transfer_max();
    ensure!(
        bs <= most,
        "--bs {bs}: the target takes at most {most} bytes of a command"
    );
    let places = namespace.bytes() / u64::from(bs);
    ensure!(
        places > 0,
        "--bs {bs}: namespace {nsid} has {} bytes",
        namespace.bytes()
    );
    ensure!(
        !args.rw.has_writes() || !namespace.is_protected,
        "namespace {nsid} takes no writes (it is read-only): use --rw randread or read"
    );
    let mut queues = Vec::new();
    for qid in 1..=args.queues {
        queues.push(session.queue(qid, args.depth)?);
    }
    let begin = Instant::now();
    let from = begin + args.warmup;
    let job = Job {
        namespace,
        rw: args.rw,
        bs,
        step: (u64::from(bs) / block) as u32,
        places,
        depth: args.depth,
        from,
        until: from + args.time,
    };
    let (mut cpu, mut runtime, mut failed) = (Duration::ZERO, Duration::ZERO, None);
    let measured = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (mut queue, number) in queues.into_iter().zip(1u64..) {
            let order = Order {
                random: number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                next: (number - 1) * (places / u64::from(args.queues)),
            };
            let pace = Pace {
                rate: args.rate,
                queues: args.queues,
                begin,
                number: number - 1,
                full_since: None,
            };
            let job = &job;
            let thread = std::thread::Builder::new().name("nvme-queue".into());
            let work = move || {
                let mut measured = Measured::new()?;
                let ended = drive(&mut queue, job, order, pace, &mut measured);
                Ok::<_, anyhow::Error>((measured, ended))
            };
            threads.push(thread.spawn_scoped(scope, work)?);
        }
        // Time is meant: the warm-up, and then the measurement.
        std::thread::sleep(job.from.saturating_duration_since(Instant::now()));
        let before = process_cpu();
        // A queue that has failed ends early.
        while let Some(left) = job.until.checked_duration_since(Instant::now())
            && !threads.iter().all(std::thread::ScopedJoinHandle::is_finished)
        {
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
        cpu = process_cpu() - before;
        runtime = Instant::now().min(job.until).saturating_duration_since(job.from);
        let mut all = Measured::new()?;
        for thread in threads {
            let (measured, ended) = thread.join().map_err(|_| anyhow!("a thread has panicked"))??;
            failed = failed.take().or(ended.err());
            all.latency.add(&measured.latency)?;
            all.reads += measured.reads;
            all.writes += measured.writes;
        }
        Ok::<_, anyhow::Error>(all)
    })?;
    let is_empty = measured.reads + measured.writes == 0;
    if is_empty && let Some(failed) = failed {
        return Err(failed);
    }
    if is_empty {
        bail!("no command was done in the time: give a longer --time");
    }
    let report = Report {
        args,
        runtime,
        measured,
        cpu,
        reconnects: session.generation() - 1,
    };
    output::say(&match args.json {
        true => format!("{:#}", report.json()),
        false => report.text(),
    });
    session.close();
    failed.map_or(Ok(()), Err)
}

/// Returns seconds, to a thousandth.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

/// Result of a run.
struct Report<'a> {
    args: &'a Args,
    /// The time of the measurement, which an error may have ended.
    runtime: Duration,
    measured: Measured,
    cpu: Duration,
    reconnects: u64,
}

impl Report<'_> {
    fn ios(&self) -> u64 {
        self.measured.reads + self.measured.writes
    }

    fn iops(&self) -> f64 {
        self.ios() as f64 / self.runtime.as_secs_f64()
    }

    fn mib_per_s(&self) -> f64 {
        self.iops() * f64::from(self.args.bs) / f64::from(1 << 20)
    }

    fn cpu_us(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.ios() as f64
    }

    /// Returns the latency below which such a part of the commands is, in microseconds.
    fn percentile(&self, percent: f64) -> f64 {
        self.measured.latency.value_at_quantile(percent / 100.0) as f64 / 1e3
    }

    /// Minimum, mean, standard deviation and maximum of the latency, in microseconds.
    fn figures(&self) -> [(&'static str, f64); 4] {
        let latency = &self.measured.latency;
        [
            ("min", latency.min() as f64 / 1e3),
            ("mean", latency.mean() / 1e3),
            ("stdev", latency.stdev() / 1e3),
            ("max", latency.max() as f64 / 1e3),
        ]
    }

    fn text(&self) -> String {
        let args = self.args;
        let mut text = format!(
            "{}: namespace {}, {} bytes, depth {}, {}, {}{} s\n",
            args.rw.name(),
            args.io.nsid,
            args.bs,
            args.depth,
            match args.queues {
                1 => "1 queue".to_owned(),
                queues => format!("{queues} queues"),
            },
            args.rate
                .map_or_else(String::new, |rate| format!("{rate} a second, ")),
            seconds(self.runtime)
        );
        text += &format!(
            "IOPS {:.0}, {:.1} MiB/s, {} reads, {} writes\n",
            self.iops(),
            self.mib_per_s(),
            self.measured.reads,
            self.measured.writes
        );
        let figures = self.figures().map(|(name, us)| format!("{name} {us:.1}"));
        text += &format!("latency (us): {}\n", figures.join(", "));
        for row in PERCENTILES.chunks(6) {
            let cells: Vec<_> = row
                .iter()
                .map(|percent| format!("{percent:.2}th {:.1}", self.percentile(*percent)))
                .collect();
            text += &format!("  {}\n", cells.join(", "));
        }
        text += &format!(
            "processor time: {:.2} us a command, of this process",
            self.cpu_us()
        );
        if self.reconnects > 0 {
            text += &format!("\nconnected again: {}", self.reconnects);
        }
        text
    }

    fn json(&self) -> serde_json::Value {
        let args = self.args;
        let percentiles: serde_json::Map<_, _> = PERCENTILES
            .iter()
            .map(|percent| (format!("{percent:.2}"), self.percentile(*percent).into()))
            .collect();
        let figures = self.figures().map(|(name, us)| (name.to_owned(), us.into()));
        let mut latency: serde_json::Map<_, serde_json::Value> = figures.into_iter().collect();
        latency.insert("percentiles".to_owned(), percentiles.into());
        let digests = args.io.digests();
        json!({
            "url": args.url.to_string(),
            "nsid": args.io.nsid.0,
            "rw": args.rw.name(),
            "bs": args.bs,
            "depth": args.depth,
            "queues": args.queues,
            "rate": args.rate,
            "header_digest": digests.0,
            "data_digest": digests.1,
            "runtime_s": self.runtime.as_secs_f64(),
            "ios": self.ios(),
            "reads": self.measured.reads,
            "writes": self.measured.writes,
            "iops": self.iops(),
            "mib_per_s": self.mib_per_s(),
            "latency_us": latency,
            "cpu_us_per_io": self.cpu_us(),
            "reconnects": self.reconnects,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times of one of two queues.
    fn pace(rate: Option<u32>, number: u64) -> Pace {
        Pace {
            rate,
            queues: 2,
            begin: Instant::now(),
            number,
            full_since: None,
        }
    }

    #[test]
    fn pace__spreads_the_commands_of_all_queues_over_each_second() {
        let times = |number| {
            let mut pace = pace(Some(1000), number);
            [(); 3].map(|()| {
                let due = pace.due(pace.begin);
                pace.begin(due);
                (due - pace.begin).as_micros()
            })
        };
        assert_eq!((times(0), times(1)), ([0, 2000, 4000], [1000, 3000, 5000]));
    }

    #[test]
    fn pace__counts_from_when_a_command_was_due_that_found_the_queue_full() {
        let ms = Duration::from_millis;
        let mut paced = pace(Some(1000), 2);
        let begin = paced.begin;
        let late = begin + ms(7);
        assert_eq!(paced.begin(late), late, "the queue had room");
        paced.full_since = Some(begin + ms(5));
        assert_eq!(paced.begin(late), late, "it was due before the queue was full");
        assert_eq!(paced.begin(late), begin + ms(6));
        let mut unpaced = pace(None, 0);
        unpaced.full_since = Some(begin);
        assert_eq!(unpaced.begin(late), late, "none is due before it can be sent");
    }

    #[test]
    fn parse__takes_sizes_and_seconds() {
        assert_eq!((parse_bs("4K"), parse_bs("1M")), (Ok(4096), Ok(1 << 20)));
        assert_eq!(parse_pause("0.5s"), Ok(Duration::from_millis(500)));
        for text in ["0", "511", "2M", "x"] {
            assert!(parse_bs(text).is_err(), "{text}");
        }
        for text in ["0", "-1", "NaN", "inf", "x", ""] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
