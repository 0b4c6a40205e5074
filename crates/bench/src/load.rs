//! Programs that load a device, for the measurements of [`super::share`]: a sink, and sources that post to sinks.
//!
//! This program starts itself as one ([`super::child`]), with [`COMMAND`] as its first argument. Sources tell a sink by their private data how
//! it is to receive; its answer says where its memory is. Numbers are big endian:
//!
//! ```text
//! source  receives u16 | bytes u32 | delay ms u16
//! sink    va u64 | rkey u32
//! ```

mod attack;
mod sink;
mod source;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, ValueEnum};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Access, MemoryRegion, ProtectionDomain, RKey};
use serde_json::{Value, json};

/// The first argument of these programs.
pub(super) const COMMAND: &str = "load";
/// Bytes of each side's memory: those of the longest message.
const MEMORY_BYTES: u32 = 16 << 20;
/// Time for which a source posts before what counts.
const RAMP: Duration = Duration::from_millis(200);
/// Length of the periods for which a source tells how much completed in each.
pub(super) const PERIOD: Duration = Duration::from_millis(10);

#[derive(Parser)]
enum Program {
    Sink(SinkArgs),
    Source(SourceArgs),
}

#[derive(Args, Clone, Debug)]
struct SinkArgs {
    #[arg(long)]
    bind: IpAddr,
    #[arg(long)]
    port: u16,
}

/// Requests that a source posts.
#[derive(Args, Clone, Debug)]
struct SourceArgs {
    #[arg(long)]
    bind: IpAddr,
    /// Sinks, to which its connections go in turn.
    #[arg(long, required = true)]
    to: Vec<SocketAddr>,
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Threads, among which the connections are divided.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[arg(long, value_enum, default_value_t = Kind::Write)]
    kind: Kind,
    #[arg(long)]
    bytes: u32,
    /// Messages in flight on each connection; of Poisson arrivals, at most.
    #[arg(long, default_value_t = 1)]
    depth: u32,
    /// Messages a second on the first connection, at random times (Poisson), instead of one behind each that has completed.
    #[arg(long)]
    per_second: Option<f64>,
    /// Long messages kept in flight on the first connection beside the others, of which they are no part.
    #[arg(long, default_value_t = 0)]
    elephants: u32,
    #[arg(long, default_value_t = 1 << 20)]
    elephant_bytes: u32,
    /// Time that counts.
    #[arg(long, default_value_t = 1000)]
    time_ms: u64,
    /// Ends after so many messages instead, all of which count.
    #[arg(long)]
    messages: Option<u64>,
    /// Traffic class: IPv4's TOS.
    #[arg(long, default_value_t = 0)]
    tos: u8,
    /// Opens the device and connects again when that fails, until the time is over.
    #[arg(long)]
    again: bool,
    /// SEND: receives that the sink has posted.
    #[arg(long, default_value_t = 128)]
    receives: u16,
    /// SEND: time after which the sink posts a receive again.
    #[arg(long, default_value_t = 0)]
    delay_ms: u16,
    /// Does this instead, as often as it can.
    #[arg(long, value_enum)]
    attack: Option<Attack>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    Send,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    /// Connects, and writes with a key that the peer does not have.
    BadKey,
    /// Registers memory, and deregisters it.
    Registration,
    /// Connects and disconnects.
    Connect,
}

/// Runs a sink or a source, as the arguments after [`COMMAND`] say.
pub(super) fn child(args: &[String]) -> Result<()> {
    rdmux_soft::register();
    rdmux_share::register();
    let args = [COMMAND.to_owned()].into_iter().chain(args.iter().cloned());
    let run = match Program::try_parse_from(args)? {
        Program::Sink(args) => sink::run(&args),
        Program::Source(args) => match args.attack {
            Some(attack) => attack::run(&args, attack),
            None => source::run(&args),
        },
    };
    if let Err(error) = &run {
        super::child::say_failed(error)?;
    }
    // Tens of thousands of connections are not ended one by one: the peers are about to end too.
    std::process::exit(i32::from(run.is_err()))
}

/// Registers the memory of a side.
fn memory(pd: &ProtectionDomain) -> Result<MemoryRegion> {
    let memory = Arc::new(AnonymousMemory::shareable(MEMORY_BYTES as usize)?);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    Ok(pd.reg_mr_all(memory.clone(), memory.address(), access)?)
}

/// A source's private data.
#[derive(Clone, Copy)]
struct Request {
    receives: u16,
    bytes: u32,
    delay: Duration,
}

impl Request {
    fn emit(self) -> [u8; 8] {
        let mut data = [0; 8];
        data[..2].copy_from_slice(&self.receives.to_be_bytes());
        data[2..6].copy_from_slice(&self.bytes.to_be_bytes());
        data[6..].copy_from_slice(&(self.delay.as_millis() as u16).to_be_bytes());
        data
    }

    fn parse(data: &[u8]) -> Option<Request> {
        let (receives, rest) = data.split_first_chunk()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        Some(Request {
            receives: u16::from_be_bytes(*receives),
            bytes: u32::from_be_bytes(*bytes).min(MEMORY_BYTES),
            delay: Duration::from_millis(u16::from_be_bytes(*rest.first_chunk()?).into()),
        })
    }
}

/// A sink's answer: its memory.
#[derive(Clone, Copy)]
struct Place {
    va: u64,
    rkey: RKey,
}

impl Place {
    fn emit(self) -> [u8; 12] {
        let mut data = [0; 12];
        data[..8].copy_from_slice(&self.va.to_be_bytes());
        data[8..].copy_from_slice(&self.rkey.0.to_be_bytes());
        data
    }

    fn parse(data: &[u8]) -> Option<Place> {
        let (va, rest) = data.split_first_chunk()?;
        let rkey = RKey(u32::from_be_bytes(*rest.first_chunk()?));
        let va = u64::from_be_bytes(*va);
        Some(Place { va, rkey })
    }
}

/// Result of a source.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    /// Messages that completed within the time that counts, and their bytes.
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// The time that counts.
    pub(super) seconds: f64,
    /// Time from post to completion; 0 if no message completed.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Messages that completed in each [`PERIOD`] of that time.
    pub(super) periods: Vec<u64>,
}

impl Report {
    fn emit(&self) -> String {
        let Report {
            messages,
            bytes,
            seconds,
            p50_us,
            p99_us,
            periods,
        } = self;
        json!({
            "messages": messages,
            "bytes": bytes,
            "seconds": seconds,
            "p50_us": p50_us,
            "p99_us": p99_us,
            "periods": periods,
        })
        .to_string()
    }

    pub(super) fn parse(line: &str) -> Result<Report> {
        let value: Value = serde_json::from_str(line)?;
        let number = |key: &str| value[key].as_f64().unwrap_or_default();
        let periods = value["periods"].as_array().into_iter().flatten();
        Ok(Report {
            messages: number("messages") as u64,
            bytes: number("bytes") as u64,
            seconds: number("seconds"),
            p50_us: number("p50_us"),
            p99_us: number("p99_us"),
            periods: periods.filter_map(Value::as_u64).collect(),
        })
    }

    /// Returns the bytes a second.
    pub(super) fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}
