//! `rdmux push`: writes a file into a remote region and makes it durable there.

mod stream;

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rdmux_push::client::{DEPTH_MAX, Part};
use rdmux_push::{
    Access, Client, Conflict, Crc64, Domain, Error, Key, MapRequest, Mapping, Name, Options, Placement,
    Target, parse_size, transfer_id,
};
use rdmux_verbs::Memory;
use serde_json::json;

use super::serve::load_key;
use crate::output;

/// Bit in the tokens of flushes; the other bits are the position up to which they flush.
const FLUSH: u64 = 1 << 62;

/// Write a file into a remote region and make it durable there.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: bytes, resumed_from (bytes that the region had already), seconds, gigabytes_per_second, durable (true or false), crc64; \
with --stream also paused_seconds and rounds: bytes, seconds, paused.")]
pub(crate) struct Args {
    /// File to push.
    file: PathBuf,
    /// Destination: rdmux://HOST[:PORT]/REGION[@OFFSET].
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Resume an earlier push of the same file where it ended.
    #[arg(long)]
    resume: bool,
    /// Flush each time after this number of bytes; an interrupted push resumes at a flush.
    #[arg(long, value_name = "BYTES", default_value = "32M", value_parser = parse_flush_every)]
    flush_every: u64,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    stream: stream::StreamArgs,
    /// Append `ACK <bytes>` to a file for each flush that was acknowledged, and sync it: for crash tests.
    #[arg(long, value_name = "FILE", hide = true)]
    ack_log: Option<PathBuf>,
    /// Stop when so many bytes are acknowledged, and wait to be killed.
    #[arg(long, value_name = "BYTES", hide = true)]
    hold_at: Option<u64>,
}

/// What push and pull have in common.
#[derive(clap::Args, Debug)]
pub(super) struct Common {
    /// Bytes of a request.
    #[arg(long, value_name = "BYTES", default_value = "1M", value_parser = parse_chunk)]
    pub(super) chunk: u32,
    /// Maximum number of requests in flight.
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..=DEPTH_MAX as i64 / 2))]
    pub(super) depth: u16,
    /// File with the server's key [default: your own, made on first use].
    #[arg(long, value_name = "FILE")]
    pub(super) key: Option<PathBuf>,
    /// Local address to send from [default: the source address of the route to the host].
    #[arg(long, value_name = "ADDR")]
    pub(super) from: Option<IpAddr>,
    /// Report in JSON.
    #[arg(long)]
    pub(super) json: bool,
    /// Report nothing but errors.
    #[arg(short, long)]
    pub(super) quiet: bool,
    #[command(flatten)]
    pub(super) device: super::device::DeviceArgs,
}

fn parse_chunk(text: &str) -> Result<u32, String> {
    parse_size(text)
        .filter(|bytes| (1..=64 << 20).contains(bytes))
        .map(|bytes| bytes as u32)
        .ok_or_else(|| "give bytes, 1 to 64M".into())
}

fn parse_flush_every(text: &str) -> Result<u64, String> {
    parse_size(text)
        .filter(|bytes| (1..=1 << 30).contains(bytes))
        .ok_or_else(|| "give bytes, 1 to 1G".into())
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes [`interrupted`] report Ctrl-C; a second Ctrl-C ends the process.
pub(super) fn take_interrupts() -> Result<()> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .context("cannot install signal handlers")
}

/// Returns whether the user wants to end.
pub(super) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Connects to a target's host.
pub(super) fn connect(target: &Target, common: &Common) -> Result<Client> {
    let key: Key = load_key(common.key.as_deref())?;
    let mut first = None;
    for address in target.resolve()? {
        // Where another user has the loopback address that the route takes, the server's own address may work.
        let again = (common.from.is_none() && address.ip().is_loopback()).then_some(address.ip());
        for from in [Some(common.from), again.map(Some)].into_iter().flatten() {
            let options = Options {
                from,
                ..Options::default()
            };
            match Client::connect(address, &key, &options) {
                Ok(client) => return Ok(client),
                Err(error @ Error::Open(_)) => {
                    first.get_or_insert(error);
                }
                // The host may serve on another of its addresses.
                Err(error @ (Error::NobodyListens(_) | Error::Connect { .. } | Error::Target(_))) => {
                    first.get_or_insert(error);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Err(first.map_or_else(|| anyhow!("{} has no address", target.host), Into::into))
}

/// Maps a range. A client that is refused says goodbye: the server would report that it may have died.
pub(super) fn map(mut client: Client, region: &Name, request: &MapRequest) -> Result<(Client, Mapping)> {
    match client.map_as(region, request) {
        Ok(mapping) => Ok((client, mapping)),
        Err(error) => {
            if matches!(error, Error::Refused { .. }) {
                client.close();
            }
            Err(error.into())
        }
    }
}

/// Returns a bar on a terminal, a hidden one elsewhere.
pub(super) fn progress_bar(bytes: u64, common: &Common) -> ProgressBar {
    bar(bytes, common.quiet || common.json)
}

/// Returns a bar on a terminal unless it is to be hidden.
pub(super) fn bar(bytes: u64, is_hidden: bool) -> ProgressBar {
    if is_hidden || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr_with_hz(10));
    let style = "{bar:30} {percent:>3} %  {binary_bytes:>11} of {binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";
    match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// Describes the guarantee of an acknowledged flush of such memory.
pub(super) fn durability_words(domain: Domain) -> &'static str {
    match domain {
        Domain::None => "visible, not durable: memory, or a file in memory",
        Domain::File => "durable: file, written through to its disk",
        Domain::Adr | Domain::Eadr => "durable: persistent memory",
        Domain::WholeSystem => "durable: the whole system survives a loss of power",
    }
}

pub(super) fn gigabytes_per_second(bytes: u64, elapsed: Duration) -> f64 {
    bytes as f64 / elapsed.as_secs_f64().max(1e-9) / 1e9
}

/// An upload in progress.
struct Upload {
    file: File,
    path: PathBuf,
    length: u64,
    crc: Crc64,
    /// Position up to which the server has acknowledged a flush.
    acknowledged: u64,
    ack_log: Option<File>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let common = &args.common;
    common.device.apply()?;
    let file = File::open(&args.file).with_context(|| args.file.display().to_string())?;
    let meta = file.metadata()?;
    ensure!(meta.is_file(), "{}: not a regular file", args.file.display());
    ensure!(
        meta.len() > 0,
        "{}: the file is empty: there is nothing to push",
        args.file.display()
    );
    let ack_log = match &args.ack_log {
        Some(path) => {
            let log = OpenOptions::new().create(true).append(true).open(path);
            Some(log.with_context(|| path.display().to_string())?)
        }
        None => None,
    };
    take_interrupts()?;
    let client = connect(&args.target, common)?;
    let (region, offset) = (args.target.region.clone(), args.target.offset);
    let name = args.file.file_name().unwrap_or_default().as_encoded_bytes();
    let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
    let transfer = transfer_id(name, meta.len(), modified_ns, offset);
    let mut upload = Upload {
        file,
        path: args.file.clone(),
        length: meta.len(),
        crc: Crc64::default(),
        acknowledged: 0,
        ack_log,
    };
    // The mapping comes first: it ends a predecessor that still writes.
    let request = MapRequest {
        // A client that reads meanwhile sees the region change, and detects it by the checksum.
        share: Access::READ,
        conflict: Conflict::Fail,
        offset,
        length: upload.length,
        transfer,
        ..MapRequest::new(Access::WRITE)
    };
    let (mut client, mapping) = map(client, &region, &request)?;
    if args.stream.stream {
        return push_stream(&args, client, &mapping, &upload);
    }
    if args.resume {
        upload.resume(&mut client, &args, transfer)?;
    }
    let resumed_from = upload.acknowledged;
    let bar = progress_bar(upload.length, common);
    let start = Instant::now();
    let result = upload.send(&mut client, &mapping, &args, &bar);
    let elapsed = start.elapsed();
    bar.finish_and_clear();
    let durable = mapping.strongest() == Placement::PERSISTENT;
    if let Err(error) = result {
        let worth = if durable { "durable" } else { "in place" };
        let state = format!(
            "{} of {} bytes are {worth} there",
            upload.acknowledged, upload.length
        );
        let lost = matches!(error.downcast_ref(), Some(Error::Lost { .. }));
        let broken = matches!(error.downcast_ref(), Some(Error::LeaseBroken { .. }));
        if !lost {
            client.close();
        }
        return if lost {
            Err(anyhow!(
                "{error}; {state} according to its last answer: continue with the same command and --resume; if the server has restarted \
                 meanwhile, that begins at 0"
            ))
        } else if broken {
            Err(anyhow!(
                "another client, or a program of the server's host, needed {}, which ended this push; {state}: continue with the same command and \
                 --resume",
                args.target
            ))
        } else if interrupted() {
            Err(anyhow!(
                "{error}; {state}: continue with the same command and --resume"
            ))
        } else {
            Err(error.context(state))
        };
    }
    let crc = upload.crc.value();
    let there = client.checksum(&region, offset, upload.length)?;
    client.close();
    let now = upload.file.metadata()?;
    ensure!(
        (now.len(), now.mtime(), now.mtime_nsec()) == (meta.len(), meta.mtime(), meta.mtime_nsec()),
        "{} changed during the push: push it again",
        args.file.display()
    );
    ensure!(
        there == crc,
        "{} differs from {} (CRC-64 {there:016x} at the server, {crc:016x} here), perhaps by another writer: push it again",
        args.target,
        args.file.display()
    );
    let sent = upload.length - resumed_from;
    let rate = gigabytes_per_second(sent, elapsed);
    if common.json {
        let report = json!({
            "bytes": upload.length,
            "resumed_from": resumed_from,
            "seconds": elapsed.as_secs_f64(),
            "gigabytes_per_second": rate,
            "durable": durable,
            "crc64": format!("{crc:016x}"),
        });
        output::say(&report.to_string());
    } else if !common.quiet {
        output::say(&format!(
            "pushed {sent} bytes to {} in {:.2} s, {rate:.2} GB/s",
            args.target,
            elapsed.as_secs_f64()
        ));
        output::say(durability_words(mapping.domain()));
        output::say(&format!("CRC-64/NVME {crc:016x} at both ends"));
    }
    Ok(())
}

/// Copies memory that its owner keeps writing.
fn push_stream(args: &Args, mut client: Client, mapping: &Mapping, upload: &Upload) -> Result<()> {
    let common = &args.common;
    let tells = !common.quiet && !common.json;
    let begin = Instant::now();
    let mut stream = stream::Stream::new(args, &upload.file, upload.length);
    let mut tell = |round: &stream::Round| {
        if tells {
            output::say(&format!(
                "{:>12} bytes had changed, {:.3} s{}",
                round.bytes,
                round.seconds,
                if round.paused { ", the writer paused" } else { "" }
            ));
        }
    };
    let crc = stream.run(&mut client, mapping, &mut tell)?;
    let elapsed = begin.elapsed();
    let there = client.checksum(&args.target.region, args.target.offset, upload.length)?;
    client.close();
    ensure!(
        there == crc,
        "{} differs from the bytes sent (CRC-64 {there:016x} at the server, {crc:016x} here), perhaps by another writer: stream it again",
        args.target
    );
    let durable = mapping.strongest() == Placement::PERSISTENT;
    let domain = mapping.domain();
    let sent: u64 = stream.rounds.iter().map(|round| round.bytes).sum();
    let rate = gigabytes_per_second(sent, elapsed);
    if common.json {
        let report = json!({
            "bytes": upload.length,
            "resumed_from": 0,
            "seconds": elapsed.as_secs_f64(),
            "gigabytes_per_second": rate,
            "durable": durable,
            "crc64": format!("{crc:016x}"),
            "paused_seconds": stream.paused_seconds,
            "rounds": stream.rounds,
        });
        output::say(&report.to_string());
    } else if !common.quiet {
        output::say(&format!(
            "streamed {} bytes to {}: {sent} sent in {} rounds, {:.2} s, {rate:.2} GB/s; the writer was paused for {:.1} ms",
            upload.length,
            args.target,
            stream.rounds.len(),
            elapsed.as_secs_f64(),
            stream.paused_seconds * 1e3
        ));
        output::say(durability_words(domain));
        output::say(&format!("CRC-64/NVME {crc:016x} at both ends"));
    }
    Ok(())
}

impl Upload {
    /// Finds out how much of the file the server already has.
    fn resume(&mut self, client: &mut Client, args: &Args, transfer: u64) -> Result<()> {
        let tell = |text: &str| {
            if !args.common.quiet && !args.common.json {
                output::say(text);
            }
        };
        let known = client.stat(&args.target.region, transfer)?;
        let durable = known.durable.min(self.length);
        if known.transfer != transfer || durable == 0 {
            // The mapping has made the transfer known, so the server's answer does not show whether there was an earlier one.
            tell("the server has no durable part of an earlier push of this file: starting at 0");
            return Ok(());
        }
        let there = client.checksum(&args.target.region, args.target.offset, durable)?;
        let mut crc = Crc64::default();
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while at < durable {
            let chunk = &mut buffer[..(durable - at).min(1 << 20) as usize];
            self.read(at, chunk)?;
            crc.update(chunk);
            at += chunk.len() as u64;
        }
        if crc.value() == there {
            tell(&format!("resuming at {durable} of {} bytes", self.length));
            self.crc = crc;
            self.acknowledged = durable;
        } else {
            tell(&format!(
                "the first {durable} bytes there differ from this file: starting at 0"
            ));
        }
        Ok(())
    }

    fn read(&self, at: u64, chunk: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(chunk, at).with_context(|| {
            format!(
                "{}: cannot read {} bytes at {at}",
                self.path.display(),
                chunk.len()
            )
        })
    }

    /// Writes the missing part and flushes it.
    fn send(&mut self, client: &mut Client, mapping: &Mapping, args: &Args, bar: &ProgressBar) -> Result<()> {
        let (chunk, depth) = (u64::from(args.common.chunk), u64::from(args.common.depth));
        let buffer = client.buffer((chunk * depth) as usize)?;
        let mut bytes = vec![0; chunk as usize];
        let base = args.target.offset;
        let mut next = self.acknowledged;
        let mut flushed = self.acknowledged;
        let mut writes = 0u64;
        let mut done = 0u64;
        bar.set_position(next);
        while self.acknowledged < self.length {
            if interrupted() {
                bail!("interrupted");
            }
            if next < self.length && writes - done < depth {
                let part = &mut bytes[..(self.length - next).min(chunk) as usize];
                self.read(next, part)?;
                self.crc.update(part);
                // Requests complete in order, so the oldest chunk's place is free.
                let at = writes % depth * chunk;
                buffer.memory().write(at, part)?;
                let (offset, token) = (base + next, next);
                let part = Part {
                    offset,
                    buffer: &buffer,
                    from: at,
                    length: part.len() as u32,
                };
                writes += 1;
                next += u64::from(part.length);
                if next - flushed >= args.flush_every || next == self.length {
                    let range = (base + flushed, next - flushed);
                    let tokens = [token, FLUSH | next];
                    client.post_write_and_flush(mapping, part, range, mapping.strongest(), None, tokens)?;
                    flushed = next;
                } else {
                    client.post_write(mapping, offset, &buffer, at, part.length, token)?;
                }
                continue;
            }
            let token = client.next_done()?.token;
            if token & FLUSH == 0 {
                done += 1;
                bar.set_position(token);
                continue;
            }
            self.acknowledged = token & !FLUSH;
            if let Some(log) = &mut self.ack_log {
                let is_file = log.metadata().is_ok_and(|meta| meta.is_file());
                log.write_all(format!("ACK {}\n", self.acknowledged).as_bytes())
                    .and_then(|()| if is_file { log.sync_data() } else { Ok(()) })
                    .context("acknowledgement log")?;
            }
            while args.hold_at.is_some_and(|at| self.acknowledged >= at) && !interrupted() {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        client.drain()?;
        Ok(())
    }
}

/// Returns the folder that a file is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}
