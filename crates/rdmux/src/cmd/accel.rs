//! `rdmux accel`: compression and checksums by accelerators of a target.

mod feed;
mod work;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};
use rdmux_nvmf::host::Url;
use rdmux_nvmf::host::jobs::Accelerator;
use rdmux_wire::accel::{Algorithm, DATA_OFFSET, Header, Job, JobKind};
use rdmux_wire::nvme::NsId;
use serde_json::json;

use super::nvme::host::{SessionArgs, parse_nsid};
use super::serve::parse_positive;
use crate::output::{self, Align};

/// Compress and checksum files by accelerators of a target, which `rdmux nvme target --accel` exports.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Compress a file, into one that zstd, lz4 or gzip reads.
    Compress(CompressArgs),
    /// Decompress a file of zstd, lz4 or gzip.
    Decompress(DecompressArgs),
    /// Compute the checksum of a file.
    Checksum(ChecksumArgs),
    /// List the accelerators of a subsystem.
    List(ListArgs),
    /// Write the header of a job, for programs that write to the window by themselves, such as dd.
    Header(HeaderArgs),
}

/// The file, and the accelerators.
#[derive(clap::Args, Debug)]
struct InputArgs {
    /// File to read; - is standard input.
    file: PathBuf,
    /// The accelerators' subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN. All of its cores of the algorithm work.
    #[arg(long, value_name = "URL")]
    via: Url,
    /// Report in JSON.
    #[arg(long)]
    json: bool,
    /// Report nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    session: SessionArgs,
}

/// The place of the result.
#[derive(clap::Args, Debug)]
struct OutputArgs {
    /// File to write; - is standard output [default: the name of the input, with the ending that zstd, lz4 and gzip give].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace a file that exists.
    #[arg(short, long)]
    force: bool,
    /// Leave the result at the target: copy it into this namespace of the subsystem, from --offset on. It crosses no network.
    #[arg(long, value_name = "NSID", conflicts_with_all = ["output", "force"], value_parser = parse_nsid)]
    to: Option<NsId>,
    /// First byte of the namespace to write, a multiple of its block.
    #[arg(long, value_name = "BYTES", default_value = "0", requires = "to", value_parser = parse_offset)]
    offset: u64,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: algorithm, cores, bytes, result_bytes, ratio, seconds, gigabytes_per_second, and output (the file, or null), or nsid and offset.")]
struct CompressArgs {
    #[command(flatten)]
    input: InputArgs,
    /// Algorithm [default: the only one that the subsystem has].
    #[arg(short, long)]
    algorithm: Option<Compressor>,
    /// Level, up to that of the accelerators [default: theirs].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=19))]
    level: Option<u8>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: algorithm, cores, bytes, result_bytes, ratio, seconds, gigabytes_per_second, and output (the file, or null), or nsid and offset.")]
struct DecompressArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "JSON: one object: algorithm, cores, bytes, checksum, seconds, gigabytes_per_second.")]
struct ChecksumArgs {
    #[command(flatten)]
    input: InputArgs,
    /// Checksum [default: the only one that the subsystem has].
    #[arg(short, long)]
    algorithm: Option<Checksum>,
}

#[derive(clap::Args, Debug)]
#[command(
    after_help = "JSON: an array of nsid, algorithm, level (null if it has none), windows, window_bytes."
)]
struct ListArgs {
    /// The accelerators' subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(long, value_name = "URL")]
    via: Url,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    session: SessionArgs,
}

/// Write the header of a job, a page of 4096 bytes, to standard output. Its data go behind it into the window, up to the end of a block.
#[derive(clap::Args, Debug)]
struct HeaderArgs {
    /// Kind of the job.
    kind: Kind,
    /// Algorithm of the accelerator.
    algorithm: AnyAlgorithm,
    /// Bytes of its data.
    #[arg(long, value_name = "BYTES", value_parser = parse_positive)]
    length: u64,
    /// Number of the job, which its result has as well.
    #[arg(long, value_name = "N", default_value = "1")]
    id: u64,
    /// Level of a compression [default: the accelerator's own].
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true, value_parser = clap::value_parser!(u8).range(0..=19))]
    level: u8,
    /// Pad the result of a compression to a multiple of this.
    #[arg(long, value_name = "BYTES", default_value = "0", hide_default_value = true)]
    align: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Compressor {
    Zstd,
    Lz4,
    Deflate,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Checksum {
    Crc32c,
    Crc64nvme,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AnyAlgorithm {
    Zstd,
    Lz4,
    Deflate,
    Crc32c,
    Crc64nvme,
    Null,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Compress,
    Decompress,
    Checksum,
    Pass,
}

impl From<Compressor> for Algorithm {
    fn from(compressor: Compressor) -> Algorithm {
        match compressor {
            Compressor::Zstd => Algorithm::Zstd,
            Compressor::Lz4 => Algorithm::Lz4,
            Compressor::Deflate => Algorithm::Deflate,
        }
    }
}

impl From<Checksum> for Algorithm {
    fn from(checksum: Checksum) -> Algorithm {
        match checksum {
            Checksum::Crc32c => Algorithm::Crc32c,
            Checksum::Crc64nvme => Algorithm::Crc64Nvme,
        }
    }
}

impl From<AnyAlgorithm> for Algorithm {
    fn from(algorithm: AnyAlgorithm) -> Algorithm {
        match algorithm {
            AnyAlgorithm::Zstd => Algorithm::Zstd,
            AnyAlgorithm::Lz4 => Algorithm::Lz4,
            AnyAlgorithm::Deflate => Algorithm::Deflate,
            AnyAlgorithm::Crc32c => Algorithm::Crc32c,
            AnyAlgorithm::Crc64nvme => Algorithm::Crc64Nvme,
            AnyAlgorithm::Null => Algorithm::Null,
        }
    }
}

impl From<Kind> for JobKind {
    fn from(kind: Kind) -> JobKind {
        match kind {
            Kind::Compress => JobKind::Compress,
            Kind::Decompress => JobKind::Decompress,
            Kind::Checksum => JobKind::Checksum,
            Kind::Pass => JobKind::Pass,
        }
    }
}

fn parse_offset(text: &str) -> Result<u64, String> {
    rdmux_push::parse_size(text)
        .ok_or_else(|| format!("'{text}' is not a size: give bytes, or a number with K, M, G or T"))
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Compress(args) => work::compress(&args),
        Command::Decompress(args) => work::decompress(&args),
        Command::Checksum(args) => work::checksum(&args),
        Command::List(args) => list(&args),
        Command::Header(args) => header(&args),
    }
}

fn list(args: &ListArgs) -> Result<()> {
    let session = args.session.connect(&args.via, 1)?;
    let accelerators = Accelerator::list(&session)?;
    session.close();
    let level = |one: &Accelerator| (one.info.level > 0).then_some(one.info.level);
    if args.json {
        let listed: Vec<_> = accelerators
            .iter()
            .map(|one| {
                json!({
                    "nsid": one.nsid.0,
                    "algorithm": one.info.algorithm.name(),
                    "level": level(one),
                    "windows": one.info.windows,
                    "window_bytes": one.info.window_bytes,
                })
            })
            .collect();
        output::say(&format!("{:#}", json!(listed)));
        return Ok(());
    }
    let rows: Vec<_> = accelerators
        .iter()
        .map(|one| {
            vec![
                one.nsid.to_string(),
                one.info.algorithm.name().to_owned(),
                level(one).map_or("-".to_owned(), |level| level.to_string()),
                one.info.windows.to_string(),
                output::bytes(one.info.window_bytes),
            ]
        })
        .collect();
    let columns = [
        ("namespace", Align::Right),
        ("algorithm", Align::Left),
        ("level", Align::Right),
        ("windows", Align::Right),
        ("window", Align::Right),
    ];
    output::say(output::table(&columns, &rows).trim_end());
    Ok(())
}

fn header(args: &HeaderArgs) -> Result<()> {
    let length = u32::try_from(args.length).ok();
    let job = Job {
        kind: args.kind.into(),
        algorithm: args.algorithm.into(),
        level: args.level,
        id: args.id,
        length: length.with_context(|| format!("{} bytes are more than any window has", args.length))?,
        align: args.align,
    };
    let mut page = vec![0; DATA_OFFSET as usize];
    Header { job, outcome: None }.emit(&mut page);
    // The target's check, before a program waits for it.
    Header::parse(&page).context("an accelerator would refuse this")?;
    std::io::stdout()
        .lock()
        .write_all(&page)
        .context("standard output")
}
