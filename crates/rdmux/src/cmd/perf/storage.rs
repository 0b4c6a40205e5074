//! `rdmux perf storage`: a small storage service on [`rdmux_runtime`], and a client that keeps it busy. It shows what wake-ups and their
//! moderation cost a server whose answers come later than its requests.
//!
//! A command is a SEND of 64 bytes. Once the simulated drive has finished it, the server moves the bytes, by RDMA WRITE into the client's
//! buffer (read) or by RDMA READ out of it (write), and sends a response of 16 bytes or more. Numbers are big endian:
//!
//! ```text
//! command   "RDPS" | version 1 u8 | opcode u8 | id u16 | drive u32 | bytes u32 | lba u64 | va u64 | rkey u32 | 28 bytes 0
//! response  id u16 | status u8 | 0 u8 | bytes u32 | 8 bytes 0
//! opcode    0 identify, 1 read, 2 write, 3 statistics
//! status    0 success, 1 unknown opcode, 2 no such drive, 3 blocks out of range, 4 bad length, 5 unknown version
//! ```
//!
//! An LBA counts blocks of 512 bytes, and `bytes` is a multiple of that, at most 1 MiB. A connection has at most 128 commands in flight. Behind
//! the response to identify and to statistics follow:
//!
//! ```text
//! identify    drives u32 | bytes of a drive u64 | latency ns u64 | depth of a drive u32 | commands in flight u32 | reactors u32 |
//!             queues: length u8, text | moderation: length u8, text
//! statistics  time ns | processor time ns: of the process, of the reactors | voluntary context switches: of the reactors, of other
//!             threads | completions | reads | writes | refused commands, each u64, since the server began
//! ```
//!
//! The server answers a command that it cannot execute with a status. A message that is no command, or a buffer that the client does not let
//! it access, ends the connection.

mod capsule;
mod client;
mod drive;
mod server;

use std::time::Duration;

use anyhow::Result;
use clap::{CommandFactory, ValueEnum};
use rdmux_push::parse_size;
use rdmux_verbs::ModerationPolicy;

use self::capsule::{LBA_BYTES, TRANSFER_MAX};

/// Heading of the options below.
const HEADING: &str = "storage";
/// Bytes of a command, unless --bs says otherwise.
const BS_DEFAULT: u32 = 4096;
const IODEPTH_DEFAULT: u32 = 32;
/// Duration, unless --runtime or --ios says otherwise.
const RUNTIME_DEFAULT: Duration = Duration::from_secs(5);
const DRIVES_DEFAULT: u32 = 4;
const DRIVE_BYTES_DEFAULT: u64 = 16 << 20;
const LATENCY_DEFAULT: Duration = Duration::from_micros(20);
const DRIVE_DEPTH_DEFAULT: u32 = 128;

/// Options of this test alone.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct StorageArgs {
    /// Storage client: order and kind of the commands, in fio's words [default: randread].
    #[arg(long, value_enum, help_heading = HEADING)]
    rw: Option<Rw>,
    /// Storage client: write blocks with a pattern, and check every block that is read. Each connection writes up to 1024 blocks before the
    /// measurement and reads them after it. No other client may write to the server's drives meanwhile.
    #[arg(long, help_heading = HEADING)]
    verify: bool,
    /// Storage client: threads among which the connections are divided [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=128), help_heading = HEADING)]
    threads: Option<u16>,
    /// Storage server: number of simulated drives, with contents in memory [default: 4].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = HEADING)]
    drives: Option<u32>,
    /// Storage server: bytes of a drive, a multiple of 512 [default: 16M].
    #[arg(long, value_name = "BYTES", value_parser = parse_drive_size, help_heading = HEADING)]
    drive_size: Option<u64>,
    /// Storage server: time that a drive needs for a command, such as 20us or 1ms; with 0 it is done at once [default: 20us].
    #[arg(long, value_name = "TIME", value_parser = parse_latency, help_heading = HEADING)]
    latency: Option<Duration>,
    /// Storage server: commands that a drive executes at a time for each reactor; others wait in order [default: 128].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = HEADING)]
    drive_depth: Option<u32>,
    /// Storage server: number of reactors, each a thread [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=128), help_heading = HEADING)]
    reactors: Option<u16>,
    /// Storage server: CPUs of the reactors, such as 0,1 or 0-3: the first reactor runs on the first, and so on in turn [default: where the
    /// scheduler puts them].
    #[arg(long, value_name = "CPUS", value_parser = parse_cpus, help_heading = HEADING)]
    reactor_cpus: Option<Cpus>,
    /// Storage server: completion queues of the connections [default: pool].
    #[arg(long, value_enum, help_heading = HEADING)]
    queues: Option<Queues>,
    /// Storage server: moderation of completion events: off, dim, rate, or COUNT,PERIOD such as 16,32us [default: as the environment
    /// variable RDMUX_MODERATION says, else off].
    #[arg(long, value_name = "POLICY", help_heading = HEADING)]
    moderation: Option<ModerationPolicy>,
}

/// Order and kind of commands.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rw {
    /// Reads of random blocks.
    Randread,
    /// Writes of random blocks.
    Randwrite,
    /// Reads and writes of random blocks, half of each.
    #[value(alias = "rw")]
    Randrw,
}

impl Rw {
    fn name(self) -> &'static str {
        match self {
            Rw::Randread => "randread",
            Rw::Randwrite => "randwrite",
            Rw::Randrw => "randrw",
        }
    }
}

/// Completion queues of the server's connections.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Queues {
    /// The connections of a reactor share one.
    #[default]
    Pool,
    /// Each connection has one of its own, as servers have it that know no pool.
    Private,
}

impl Queues {
    fn name(self) -> &'static str {
        match self {
            Queues::Pool => "pool",
            Queues::Private => "private",
        }
    }
}

fn parse_drive_size(text: &str) -> Result<u64, String> {
    parse_size(text)
        .filter(|bytes| (LBA_BYTES..=1 << 40).contains(bytes) && bytes.is_multiple_of(LBA_BYTES))
        .ok_or_else(|| {
            "give a multiple of 512 bytes up to 1T, as a number with or without K, M, G or T".into()
        })
}

/// A list of CPUs.
#[derive(Clone, Debug)]
struct Cpus(Vec<usize>);

fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        (first <= last).then(|| (first..=last).map(usize::from))
    };
    let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
    let cpus = ranges.map(|ranges| Cpus(ranges.into_iter().flatten().collect()));
    cpus.ok_or_else(|| "give numbers of CPUs, such as 0,1 or 0-3".into())
}

fn parse_latency(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_ns = match &text[digits.len()..] {
        "ns" => Some(1),
        "us" => Some(1_000),
        "ms" => Some(1_000_000),
        "s" => Some(1_000_000_000),
        "" if digits == "0" => Some(1),
        _ => None,
    };
    let number = digits.parse::<u64>().ok().filter(|_| !digits.starts_with('+'));
    let ns = number
        .zip(unit_ns)
        .and_then(|(number, unit)| number.checked_mul(unit));
    let latency = ns.map(Duration::from_nanos);
    latency
        .filter(|latency| *latency <= Duration::from_secs(10))
        .ok_or_else(|| "give a time up to 10s with its unit, such as 20us or 1ms, or 0".into())
}

impl StorageArgs {
    /// Returns one of the options that is given.
    pub(super) fn given(&self) -> Option<&'static str> {
        given(&self.of_client()).or_else(|| given(&self.of_server()))
    }

    fn of_client(&self) -> [(&'static str, bool); 3] {
        [
            ("--rw", self.rw.is_some()),
            ("--verify", self.verify),
            ("--threads", self.threads.is_some()),
        ]
    }

    fn of_server(&self) -> [(&'static str, bool); 8] {
        [
            ("--drives", self.drives.is_some()),
            ("--drive-size", self.drive_size.is_some()),
            ("--latency", self.latency.is_some()),
            ("--drive-depth", self.drive_depth.is_some()),
            ("--reactors", self.reactors.is_some()),
            ("--reactor-cpus", self.reactor_cpus.is_some()),
            ("--queues", self.queues.is_some()),
            ("--moderation", self.moderation.is_some()),
        ]
    }
}

/// Returns the first option that is given.
fn given(options: &[(&'static str, bool)]) -> Option<&'static str> {
    options.iter().find(|(_, given)| *given).map(|(name, _)| *name)
}

/// Returns what is wrong with options that the other side or another test takes, if some are given.
fn misplaced(args: &super::Args) -> Option<String> {
    let of_others = [
        ("--events", args.events),
        ("--all", args.all),
        ("--group", args.group != 1),
        ("--report-gbits", args.report_gbits),
    ];
    if let Some((name, _)) = of_others.into_iter().find(|(_, given)| *given) {
        let instead = match name {
            "--events" => "; the environment variable RDMUX_WAIT says how each side waits",
            _ => "",
        };
        return Some(format!("storage does not support {name}{instead}"));
    }
    match args.host {
        Some(_) => given(&args.storage.of_server()).map(|name| {
            format!("{name} is an option of the server: give it to `rdmux perf storage` without HOST")
        }),
        None => given(&args.storage.of_client())
            .map(|name| format!("{name} is an option of the client: give it to `rdmux perf storage HOST`")),
    }
}

pub(super) fn run(args: &super::Args) -> Result<()> {
    let bs = args.size.unwrap_or(BS_DEFAULT);
    let wrong = misplaced(args).or_else(|| {
        let fits = bs <= TRANSFER_MAX && u64::from(bs).is_multiple_of(LBA_BYTES);
        (!fits).then(|| format!("--bs {bs}: give a multiple of 512 bytes up to 1M"))
    });
    if let Some(wrong) = wrong {
        super::Args::command()
            .error(clap::error::ErrorKind::ArgumentConflict, wrong)
            .exit();
    }
    match &args.host {
        None => server::run(args),
        Some(host) => client::run(args, host, bs),
    }
}

/// Returns the processor time of this process.
fn process_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_latency__takes_units_and_nothing_else() {
        for (text, ns) in [
            ("0", 0),
            ("0us", 0),
            ("20us", 20_000),
            ("7ns", 7),
            ("3ms", 3_000_000),
            ("10s", 10_000_000_000),
        ] {
            assert_eq!(parse_latency(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        for text in [
            "",
            "us",
            "20",
            "20 us",
            "+2us",
            "-1us",
            "11s",
            "1h",
            "18446744073709551615s",
        ] {
            assert!(parse_latency(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parse_drive_size__takes_whole_blocks() {
        assert_eq!(parse_drive_size("512"), Ok(512));
        assert_eq!(parse_drive_size("16M"), Ok(16 << 20));
        for text in ["0", "511", "513", "2T", "x"] {
            assert!(parse_drive_size(text).is_err(), "{text}");
        }
    }
}
