//! `rdmux accel compress`, `decompress` and `checksum`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use crc_fast::CrcAlgorithm;
use indicatif::ProgressBar;
use rdmux_nvmf::host::jobs::{Accelerator, Destination, Done, Jobs};
use rdmux_nvmf::host::{NamespaceInfo, Session, command};
use rdmux_wire::accel::{Algorithm, JobKind};
use serde_json::{Value, json};

use super::feed::{Feed, Pipeline};
use super::{ChecksumArgs, CompressArgs, DecompressArgs, InputArgs, OutputArgs};
use crate::cmd::push::{bar, gigabytes_per_second};
use crate::output;

/// Commands in flight: with the largest ones 16 MiB.
const DEPTH: u16 = 16;

/// A file, and the accelerators that work on it.
struct Bench {
    name: String,
    input: Box<dyn Read>,
    /// Its length, if it is known.
    length: Option<u64>,
    session: Arc<Session>,
    cores: Vec<Accelerator>,
    began: Instant,
}

impl Bench {
    fn open(args: &InputArgs) -> Result<Bench> {
        let (name, input, length): (_, Box<dyn Read>, _) = if args.file.as_os_str() == "-" {
            ("standard input".to_owned(), Box::new(io::stdin().lock()), None)
        } else {
            let name = args.file.display().to_string();
            let file = File::open(&args.file).with_context(|| format!("cannot read {name}"))?;
            let meta = file.metadata().with_context(|| name.clone())?;
            ensure!(!meta.is_dir(), "{name} is a folder: give a file");
            let length = meta.is_file().then_some(meta.len());
            (name, Box::new(file), length)
        };
        let session = args.session.connect(&args.via, 1)?;
        let cores = Accelerator::list(&session)?;
        ensure!(
            !cores.is_empty(),
            "{} has no accelerators: `rdmux nvme target --accel` exports them in a subsystem of their own",
            args.via
        );
        Ok(Bench {
            name,
            input,
            length,
            session,
            cores,
            began: Instant::now(),
        })
    }

    /// Leaves the cores of one algorithm, the chosen one or the only one that takes such jobs.
    fn choose(&mut self, kind: JobKind, chosen: Option<Algorithm>) -> Result<Algorithm> {
        let mut known: Vec<Algorithm> = self.cores.iter().map(|one| one.info.algorithm).collect();
        known.retain(|algorithm| algorithm.takes(kind));
        known.sort_by_key(|algorithm| *algorithm as u8);
        known.dedup();
        let names = || known.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ");
        let algorithm = match (chosen, &known[..]) {
            (_, []) => bail!("the subsystem has no accelerator to {}", kind.name()),
            (Some(chosen), known) if known.contains(&chosen) => chosen,
            (Some(chosen), _) => bail!(
                "the subsystem has no accelerator for {}, only for {}",
                chosen.name(),
                names()
            ),
            (None, [only]) => *only,
            (None, _) => bail!(
                "the subsystem has accelerators for {}: choose one with --algorithm",
                names()
            ),
        };
        self.cores.retain(|one| one.info.algorithm == algorithm);
        Ok(algorithm)
    }

    fn jobs(&self) -> Result<Jobs> {
        let [a, b, c, d, e, f, g, h, ..] = rdmux_key::random_nonce().context("no random number")?;
        let first_id = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let queue = self.session.queue(1, DEPTH)?;
        Ok(Jobs::new(&self.session, queue, &self.cores, first_id))
    }

    fn bar(&self, args: &InputArgs) -> ProgressBar {
        match self.length {
            Some(length) => bar(length, args.quiet || args.json),
            None => ProgressBar::hidden(),
        }
    }

    fn report(&self, algorithm: Algorithm, bytes: u64) -> Value {
        let elapsed = self.began.elapsed();
        json!({
            "algorithm": algorithm.name(),
            "cores": self.cores.len(),
            "bytes": bytes,
            "seconds": elapsed.as_secs_f64(),
            "gigabytes_per_second": gigabytes_per_second(bytes, elapsed),
        })
    }
}

/// The place to which results go.
enum Sink {
    /// A file, which is removed unless all is there.
    File {
        path: PathBuf,
        out: File,
        is_whole: bool,
    },
    Pipe(io::StdoutLock<'static>),
    Namespace {
        namespace: NamespaceInfo,
        to: Destination,
        next_block: u64,
    },
}

impl Sink {
    fn open(args: &OutputArgs, default: Option<PathBuf>, session: &Arc<Session>) -> Result<Sink> {
        if let Some(nsid) = args.to {
            let namespace = session.open_namespace(nsid)?;
            let block = namespace.block_bytes();
            ensure!(
                args.offset.is_multiple_of(block),
                "--offset {} is no multiple of the blocks of namespace {nsid}, {block} bytes",
                args.offset
            );
            ensure!(
                Accelerator::of(&namespace)?.is_none(),
                "--to {nsid}: namespace {nsid} is an accelerator: give one that stores"
            );
            return Ok(Sink::Namespace {
                to: Destination::new(session, &namespace)?,
                next_block: args.offset / block,
                namespace,
            });
        }
        let path = match args.output.clone().or(default) {
            Some(path) if path.as_os_str() == "-" => return Ok(Sink::Pipe(io::stdout().lock())),
            None => return Ok(Sink::Pipe(io::stdout().lock())),
            Some(path) => path,
        };
        let mut options = File::options();
        options.write(true);
        match args.force {
            true => options.create(true).truncate(true),
            false => options.create_new(true),
        };
        let out = options.open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                anyhow::anyhow!(
                    "{} exists: replace it with --force, or give another --output",
                    path.display()
                )
            }
            _ => anyhow::Error::new(error).context(format!("cannot write {}", path.display())),
        })?;
        Ok(Sink::File {
            path,
            out,
            is_whole: false,
        })
    }

    fn stays(&self) -> bool {
        matches!(self, Sink::Namespace { .. })
    }

    /// Returns the multiple to which results are padded, so that one begins where the one before it ends.
    fn align(&self) -> u32 {
        match self {
            Sink::Namespace { namespace, .. } => namespace.block_bytes() as u32,
            _ => 0,
        }
    }

    fn take(&mut self, jobs: &mut Jobs, done: &Done) -> Result<()> {
        match self {
            Sink::File { path, out, .. } => out
                .write_all(&done.result)
                .with_context(|| format!("cannot write {}", path.display())),
            Sink::Pipe(out) => out.write_all(&done.result).context("standard output"),
            Sink::Namespace {
                namespace,
                to,
                next_block,
            } => {
                let block = namespace.block_bytes();
                let blocks = u64::from(done.outcome.length).div_ceil(block);
                ensure!(
                    *next_block + blocks <= namespace.blocks,
                    "namespace {} has no room for the result, which is longer than {} bytes: it was written in part",
                    namespace.nsid,
                    *next_block * block
                );
                jobs.store(done.window, *to, *next_block);
                *next_block += blocks;
                Ok(())
            }
        }
    }

    /// Ends the result, and returns its place for the report.
    fn finish(&mut self, jobs: Jobs, offset: u64) -> Result<Value> {
        match self {
            Sink::File { path, is_whole, .. } => {
                *is_whole = true;
                Ok(json!({ "output": path }))
            }
            Sink::Pipe(out) => {
                out.flush().context("standard output")?;
                Ok(json!({ "output": null }))
            }
            Sink::Namespace { namespace, .. } => {
                jobs.into_queue().run("Flush", command::flush(namespace.nsid))?;
                Ok(json!({ "nsid": namespace.nsid.0, "offset": offset }))
            }
        }
    }

    fn is_pipe(&self) -> bool {
        matches!(self, Sink::Pipe(_))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Sink::File {
            path,
            is_whole: false,
            ..
        } = self
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Compresses or decompresses.
fn convert(
    mut bench: Bench,
    args: &InputArgs,
    output: &OutputArgs,
    (kind, algorithm, level): (JobKind, Algorithm, u8),
    read: Vec<u8>,
    default: Option<PathBuf>,
) -> Result<()> {
    let mut sink = Sink::open(output, default, &bench.session)?;
    ensure!(
        !(args.json && sink.is_pipe()),
        "--json and the result cannot both go to standard output: give --output FILE"
    );
    let bar = bench.bar(args);
    let (mut bytes, mut result_bytes, mut is_ragged) = (0, 0, false);
    let align = if kind == JobKind::Compress {
        sink.align()
    } else {
        0
    };
    let mut pipeline = Pipeline::new(bench.jobs()?, kind, level, align, sink.stays());
    let mut input = std::mem::replace(&mut bench.input, Box::new(io::empty()));
    let mut feed = Feed::new(&mut *input, kind, &bench.cores, read);
    let run = pipeline.run(&mut feed, |jobs, done| {
        ensure!(
            !is_ragged,
            "a frame's content ends in the middle of a block, where the next cannot begin: decompress it into a file"
        );
        let step = u64::from(done.outcome.consumed);
        bar.inc(step);
        bytes += step;
        result_bytes += u64::from(done.outcome.length);
        is_ragged = sink.stays() && !result_bytes.is_multiple_of(sink.align().into());
        sink.take(jobs, done)
    });
    bar.finish_and_clear();
    run.with_context(|| bench.name.clone())?;
    let place = sink.finish(pipeline.into_jobs(), output.offset)?;
    let ratio = match kind {
        JobKind::Compress => bytes as f64 / result_bytes.max(1) as f64,
        _ => result_bytes as f64 / bytes.max(1) as f64,
    };
    let mut report = bench.report(algorithm, bytes);
    report["result_bytes"] = result_bytes.into();
    report["ratio"] = ratio.into();
    for (key, value) in place.as_object().into_iter().flatten() {
        report[key] = value.clone();
    }
    let Bench {
        session, name, began, ..
    } = bench;
    session.close();
    if args.quiet || sink.is_pipe() {
        return Ok(());
    }
    if args.json {
        output::say(&report.to_string());
        return Ok(());
    }
    let to = match &sink {
        Sink::File { path, .. } => path.display().to_string(),
        Sink::Namespace { namespace, .. } => {
            format!(
                "namespace {}, bytes {} to {}",
                namespace.nsid,
                output.offset,
                output.offset + result_bytes
            )
        }
        Sink::Pipe(_) => String::new(),
    };
    let elapsed = began.elapsed();
    output::say(&format!(
        "{name}: {bytes} bytes to {result_bytes} ({ratio:.2}x) in {:.2} s, {:.2} GB/s, {to}",
        elapsed.as_secs_f64(),
        gigabytes_per_second(bytes, elapsed)
    ));
    Ok(())
}

/// Endings of files, as the tools have them.
const ENDINGS: [(Algorithm, &str); 3] = [
    (Algorithm::Zstd, "zst"),
    (Algorithm::Lz4, "lz4"),
    (Algorithm::Deflate, "gz"),
];

pub(super) fn compress(args: &CompressArgs) -> Result<()> {
    let mut bench = Bench::open(&args.input)?;
    let algorithm = bench.choose(JobKind::Compress, args.algorithm.map(Algorithm::from))?;
    if let Some(level) = args.level {
        let max = bench.cores.iter().map(|one| one.info.level).min().unwrap_or(0);
        ensure!(max > 0, "{} has no levels: leave --level out", algorithm.name());
        ensure!(
            level <= max,
            "--level {level}: these accelerators take levels up to {max}: export them with level={level}"
        );
    }
    let ending = ENDINGS.iter().find(|(known, _)| *known == algorithm);
    let default = ending
        .filter(|_| args.input.file.as_os_str() != "-")
        .map(|(_, ending)| {
            let mut name = args.input.file.clone().into_os_string();
            name.push(format!(".{ending}"));
            PathBuf::from(name)
        });
    let what = (JobKind::Compress, algorithm, args.level.unwrap_or(0));
    convert(bench, &args.input, &args.output, what, Vec::new(), default)
}

/// Returns the algorithm of compressed data.
fn recognize(bytes: &[u8]) -> Option<Algorithm> {
    match bytes {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Algorithm::Zstd),
        [0x04, 0x22, 0x4d, 0x18, ..] => Some(Algorithm::Lz4),
        [0x1f, 0x8b, ..] => Some(Algorithm::Deflate),
        _ => None,
    }
}

pub(super) fn decompress(args: &DecompressArgs) -> Result<()> {
    let mut bench = Bench::open(&args.input)?;
    let mut read = Vec::new();
    let name = bench.name.clone();
    (&mut bench.input)
        .take(4)
        .read_to_end(&mut read)
        .with_context(|| name.clone())?;
    let algorithm = recognize(&read)
        .with_context(|| format!("{name} is not of zstd, lz4 or gzip: its first bytes are others"))?;
    bench.choose(JobKind::Decompress, Some(algorithm))?;
    let default = match args.input.file.as_os_str() == "-"
        || args.output.output.is_some()
        || args.output.to.is_some()
    {
        true => None,
        false => Some(without_ending(&args.input.file, algorithm)?),
    };
    convert(
        bench,
        &args.input,
        &args.output,
        (JobKind::Decompress, algorithm, 0),
        read,
        default,
    )
}

fn without_ending(file: &Path, algorithm: Algorithm) -> Result<PathBuf> {
    let ending = ENDINGS.iter().find(|(known, _)| *known == algorithm);
    let has = file.extension().and_then(|ending| ending.to_str());
    ensure!(
        ending.is_some_and(|(_, ending)| Some(*ending) == has),
        "{} has no ending that tells the name of the result: give it with --output",
        file.display()
    );
    Ok(file.with_extension(""))
}

pub(super) fn checksum(args: &ChecksumArgs) -> Result<()> {
    let mut bench = Bench::open(&args.input)?;
    let algorithm = bench.choose(JobKind::Checksum, args.algorithm.map(Algorithm::from))?;
    let (crc, digits) = match algorithm {
        Algorithm::Crc64Nvme => (CrcAlgorithm::Crc64Nvme, 16),
        _ => (CrcAlgorithm::Crc32Iscsi, 8),
    };
    let bar = bench.bar(&args.input);
    let (mut bytes, mut all) = (0, crc_fast::checksum(crc, &[]));
    let mut pipeline = Pipeline::new(bench.jobs()?, JobKind::Checksum, 0, 0, false);
    let mut input = std::mem::replace(&mut bench.input, Box::new(io::empty()));
    let mut feed = Feed::new(&mut *input, JobKind::Checksum, &bench.cores, Vec::new());
    let run = pipeline.run(&mut feed, |_, done| {
        let step = u64::from(done.outcome.consumed);
        bar.inc(step);
        bytes += step;
        all = crc_fast::checksum_combine(crc, all, done.outcome.checksum, step);
        Ok(())
    });
    bar.finish_and_clear();
    run.with_context(|| bench.name.clone())?;
    drop(pipeline);
    let text = format!("{all:0digits$x}");
    let mut report = bench.report(algorithm, bytes);
    report["checksum"] = text.clone().into();
    let Bench { session, name, .. } = bench;
    session.close();
    output::say(&match args.input.json {
        true => report.to_string(),
        // The form of sha256sum and its likes.
        false => format!("{text}  {name}"),
    });
    Ok(())
}
