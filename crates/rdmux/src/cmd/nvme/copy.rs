//! `rdmux nvme read` and `write`: bytes of a namespace to and from files and pipes.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use rdmux_nvmf::host::command;
use rdmux_nvmf::host::queue::Completion;
use rdmux_nvmf::host::{IoQueue, NamespaceInfo, Session, Url};
use rdmux_push::parse_size;
use serde_json::json;

use super::host::{IoArgs, hint};
use crate::cmd::push::{bar, gigabytes_per_second};
use crate::cmd::serve::parse_positive;
use crate::output;

/// Commands in flight: with the largest ones 8 MiB.
const DEPTH: u16 = 8;

/// Read bytes of a namespace.
#[derive(clap::Args, Debug)]
#[command(after_help = "JSON: with --output one object: bytes, seconds, gigabytes_per_second, reconnects.")]
pub(crate) struct ReadArgs {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// File to write; it is replaced [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// First byte to read, a multiple of the namespace's block.
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_offset)]
    offset: u64,
    /// Number of bytes to read, a multiple of the namespace's block [default: to the end].
    #[arg(long, value_name = "BYTES", value_parser = parse_positive)]
    length: Option<u64>,
    /// Report in JSON.
    #[arg(long, requires = "output")]
    json: bool,
    /// Report nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    io: IoArgs,
}

/// Write bytes into a namespace, and make them durable there.
#[derive(clap::Args, Debug)]
#[command(after_help = "JSON: one object: bytes, seconds, gigabytes_per_second, reconnects.")]
pub(crate) struct WriteArgs {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// File to read [default: standard input].
    file: Option<PathBuf>,
    /// First byte to write, a multiple of the namespace's block.
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_offset)]
    offset: u64,
    /// Number of bytes to write, a multiple of the namespace's block [default: all that the input has].
    #[arg(long, value_name = "BYTES", value_parser = parse_positive)]
    length: Option<u64>,
    /// Report in JSON.
    #[arg(long)]
    json: bool,
    /// Report nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    io: IoArgs,
}

fn parse_offset(text: &str) -> Result<u64, String> {
    parse_size(text)
        .ok_or_else(|| format!("'{text}' is not a size: give bytes, or a number with K, M, G or T"))
}

/// A range of a namespace, and the commands that it is cut into.
struct Range {
    namespace: NamespaceInfo,
    /// First block, and number of blocks.
    first: u64,
    blocks: u64,
    /// Blocks of a command.
    step: u64,
}

impl Range {
    fn new(session: &Session, namespace: NamespaceInfo, offset: u64, length: Option<u64>) -> Result<Range> {
        let (nsid, block, size) = (namespace.nsid, namespace.block_bytes(), namespace.bytes());
        for (option, value) in [("--offset", offset), ("--length", length.unwrap_or(block))] {
            ensure!(
                value.is_multiple_of(block),
                "{option} {value} is no multiple of the blocks of namespace {nsid}, {block} bytes"
            );
        }
        let end = offset.checked_add(length.unwrap_or(0)).filter(|end| *end <= size);
        ensure!(
            end.is_some() && offset < size,
            "namespace {nsid} ends at byte {size}: choose a smaller --offset or --length"
        );
        let length = length.unwrap_or(size - offset);
        let step = u64::from(session.transfer_max()) / block;
        ensure!(
            step > 0,
            "the target takes no command of one block of {block} bytes"
        );
        Ok(Range {
            namespace,
            first: offset / block,
            blocks: length / block,
            step,
        })
    }

    fn bytes(&self) -> u64 {
        self.blocks * self.namespace.block_bytes()
    }

    fn commands(&self) -> u64 {
        self.blocks.div_ceil(self.step)
    }

    /// Returns the first block of a command, its blocks, and its bytes.
    fn part(&self, number: u64) -> (u64, u32, u32) {
        let blocks = self.step.min(self.blocks - number * self.step);
        let bytes = blocks * self.namespace.block_bytes();
        (self.first + number * self.step, blocks as u32, bytes as u32)
    }

    fn step_bytes(&self) -> usize {
        (self.step * self.namespace.block_bytes()) as usize
    }
}

/// Refuses a command that has failed.
fn check(range: &Range, what: &str, completion: &Completion) -> Result<()> {
    let (first, ..) = range.part(completion.command.token);
    ensure!(
        completion.status.is_success(),
        "the target refused a {what} at byte {} of namespace {}: {}{}",
        first * range.namespace.block_bytes(),
        range.namespace.nsid,
        completion.status,
        hint(completion.status)
    );
    Ok(())
}

/// Reports a transfer that is done.
fn report(session: &Session, bytes: u64, began: Instant, words: &str, json: bool) {
    let elapsed = began.elapsed();
    let rate = gigabytes_per_second(bytes, elapsed);
    let reconnects = session.generation() - 1;
    if json {
        let report = json!({
            "bytes": bytes,
            "seconds": elapsed.as_secs_f64(),
            "gigabytes_per_second": rate,
            "reconnects": reconnects,
        });
        output::say(&report.to_string());
        return;
    }
    let again = match reconnects {
        0 => String::new(),
        1 => ", connected again once".to_owned(),
        times => format!(", connected again {times} times"),
    };
    let seconds = elapsed.as_secs_f64();
    output::say(&format!(
        "{words} {bytes} bytes in {seconds:.2} s, {rate:.2} GB/s{again}"
    ));
}

pub(super) fn read(args: &ReadArgs) -> Result<()> {
    let (session, namespace) = args.io.session(&args.url, 1)?;
    let range = Range::new(&session, namespace, args.offset, args.length)?;
    let mut queue = session.queue(1, DEPTH)?;
    let name = args
        .output
        .as_ref()
        .map_or("standard output".to_owned(), |path| path.display().to_string());
    let mut out: Box<dyn Write> = match &args.output {
        Some(path) => Box::new(File::create(path).with_context(|| format!("cannot write {name}"))?),
        None => Box::new(io::stdout().lock()),
    };
    let bar = bar(range.bytes(), args.quiet || args.json);
    let began = Instant::now();
    let result = receive(&mut queue, &range, &mut out, &bar);
    bar.finish_and_clear();
    match result {
        // The reader of a pipe may have enough.
        Err(error) if args.output.is_none() && is_broken_pipe(&error) => return Ok(()),
        result => result.with_context(|| name.clone())?,
    }
    out.flush().with_context(|| name.clone())?;
    drop(queue);
    if args.output.is_some() && !args.quiet {
        report(&session, range.bytes(), began, "read", args.json);
    }
    session.close();
    Ok(())
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn receive(queue: &mut IoQueue, range: &Range, out: &mut dyn Write, bar: &ProgressBar) -> Result<()> {
    let nsid = range.namespace.nsid;
    let mut free: Vec<_> = (0..DEPTH).map(|_| vec![0; range.step_bytes()]).collect();
    // Completions come in any order: those from the next one to be written on.
    let mut done: VecDeque<Option<Completion>> = VecDeque::new();
    let (mut asked, mut written) = (0, 0);
    while written < range.commands() {
        while asked < range.commands() && queue.room() > 0 {
            let Some(buffer) = free.pop() else { break };
            let (first, blocks, bytes) = range.part(asked);
            let mut command = command::read(nsid, first, blocks, bytes, buffer);
            command.token = asked;
            queue.submit(command);
            done.push_back(None);
            asked += 1;
        }
        queue.wait()?;
        while let Some(completion) = queue.poll() {
            check(range, "read", &completion)?;
            let at = (completion.command.token - written) as usize;
            done[at] = Some(completion);
        }
        while let Some(Some(completion)) = done.front_mut().map(Option::take) {
            out.write_all(completion.bytes())?;
            bar.inc(completion.received as u64);
            free.push(completion.command.buffer);
            done.pop_front();
            written += 1;
        }
    }
    Ok(())
}

pub(super) fn write(args: &WriteArgs) -> Result<()> {
    let (session, namespace) = args.io.session(&args.url, 1)?;
    ensure!(
        !namespace.is_protected,
        "namespace {} takes no writes (it is read-only)",
        namespace.nsid
    );
    let name = args
        .file
        .as_ref()
        .map_or("standard input".to_owned(), |path| path.display().to_string());
    let mut file = match &args.file {
        Some(path) => Some(File::open(path).with_context(|| format!("cannot read {name}"))?),
        None => None,
    };
    // The length of a regular file is known before a block is written.
    let known = match &file {
        Some(file) => file
            .metadata()
            .ok()
            .filter(std::fs::Metadata::is_file)
            .map(|meta| meta.len()),
        None => None,
    };
    let length = match (args.length, known) {
        (Some(length), Some(known)) if length > known => {
            bail!("{name} has {known} bytes, fewer than --length {length}")
        }
        (Some(length), _) => Some(length),
        (None, Some(0)) => bail!("{name} is empty"),
        (None, known) => known,
    };
    let block = namespace.block_bytes();
    if let (None, Some(length)) = (args.length, length) {
        ensure!(
            length.is_multiple_of(block),
            "{name} has {length} bytes, no multiple of the blocks of namespace {}, {block} bytes: pad it, or write a part with --length",
            namespace.nsid
        );
    }
    let has_length = length.is_some();
    let range = Range::new(&session, namespace, args.offset, length)?;
    let mut queue = session.queue(1, DEPTH)?;
    let bar = match has_length {
        true => bar(range.bytes(), args.quiet || args.json),
        false => ProgressBar::hidden(),
    };
    let began = Instant::now();
    let mut stdin = io::stdin().lock();
    let bytes = loop {
        let generation = session.generation();
        let input: &mut dyn Read = match &mut file {
            Some(file) => file,
            None => &mut stdin,
        };
        bar.set_position(0);
        let bytes = send(&mut queue, &range, input, has_length, &bar).with_context(|| name.clone())?;
        queue.run("Flush", command::flush(range.namespace.nsid))?;
        if session.generation() == generation || !has_cache(&session) {
            break bytes;
        }
        // A Flush is about what its own controller has carried out, and the writes went to several: one may have been lost with its cache.
        match &mut file {
            Some(file) if known.is_some() => {
                file.seek(SeekFrom::Start(0)).with_context(|| name.clone())?;
            }
            _ => {
                bail!(
                    "{name}: the controller changed before all was flushed, and {bytes} bytes that the one before may have lost cannot be read again: write them again"
                )
            }
        }
    };
    bar.finish_and_clear();
    drop(queue);
    if !args.quiet {
        report(&session, bytes, began, "wrote", args.json);
    }
    session.close();
    Ok(())
}

fn has_cache(session: &Arc<Session>) -> bool {
    session.controller().info().identify.has_write_cache
}

/// Writes what the input has, and returns the number of bytes.
fn send(
    queue: &mut IoQueue,
    range: &Range,
    input: &mut dyn Read,
    has_length: bool,
    bar: &ProgressBar,
) -> Result<u64> {
    let (nsid, block) = (range.namespace.nsid, range.namespace.block_bytes());
    let mut free: Vec<_> = (0..DEPTH).map(|_| vec![0; range.step_bytes()]).collect();
    let (mut asked, mut sent, mut is_over) = (0, 0, false);
    loop {
        while !is_over && asked < range.commands() && queue.room() > 0 {
            let Some(mut buffer) = free.pop() else { break };
            let (first, _, wanted) = range.part(asked);
            let found = fill(input, &mut buffer[..wanted as usize])? as u64;
            is_over = found < wanted.into();
            ensure!(
                !is_over || !has_length,
                "it ends after {} bytes, too early",
                sent + found
            );
            ensure!(
                found.is_multiple_of(block),
                "it ends in the middle of a block of {block} bytes: pad it; {sent} bytes were written, not flushed"
            );
            if found > 0 {
                let mut command = command::write(nsid, first, (found / block) as u32, found as u32, buffer);
                command.token = asked;
                queue.submit(command);
                asked += 1;
                sent += found;
            }
        }
        if queue.in_flight() == 0 {
            break;
        }
        queue.wait()?;
        while let Some(completion) = queue.poll() {
            check(range, "write", &completion)?;
            bar.inc(completion.command.data.len() as u64);
            free.push(completion.command.buffer);
        }
    }
    // A pipe that has more than the namespace has room for.
    if !has_length && !is_over {
        ensure!(
            fill(input, &mut [0])? == 0,
            "it has more bytes than namespace {nsid} from --offset on, {}, which are written, not flushed",
            range.bytes()
        );
    }
    Ok(sent)
}

/// Reads until the buffer is full or the input ends.
fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
