//! `rdmux pull`: reads a remote region into a file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use rdmux_push::{Access, Client, Crc64, MapRequest, Mapping, Target, parse_size};
use rdmux_verbs::Memory;
use serde_json::json;

use super::push::{
    Common, connect, folder_of, gigabytes_per_second, interrupted, map, progress_bar, take_interrupts,
};
use crate::output;

/// Read a remote region into a file.
#[derive(clap::Args, Debug)]
#[command(after_help = "JSON: one object: bytes, seconds, gigabytes_per_second, crc64.")]
pub(crate) struct Args {
    /// Source: rdmux://HOST[:PORT]/REGION[@OFFSET].
    #[arg(value_name = "SOURCE")]
    source: Target,
    /// File to write; it is replaced when all bytes have arrived.
    file: PathBuf,
    /// Number of bytes to read [default: to the end of the region].
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    bytes: Option<u64>,
    #[command(flatten)]
    common: Common,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    parse_size(text)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| "give bytes, or a number with K, M, G or T".into())
}

/// A partly written file, removed unless it is finished.
struct Part(Option<PathBuf>);

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let common = &args.common;
    common.device.apply()?;
    ensure!(
        !args.file.is_dir(),
        "{} is a folder: give a file in it",
        args.file.display()
    );
    // An existing file is replaced at the end, in one step; anything but a file is refused.
    let existing = match fs::metadata(&args.file) {
        Ok(meta) if !meta.is_file() => {
            bail!(
                "{} is not a regular file: pull into a regular file",
                args.file.display()
            )
        }
        Ok(meta) => Some(meta),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| args.file.display().to_string()),
    };
    // Where the name is a link, the target is the file that it leads to.
    let target = if existing.is_some() {
        fs::canonicalize(&args.file).with_context(|| args.file.display().to_string())?
    } else {
        args.file.clone()
    };
    let mut name = target
        .file_name()
        .map(OsString::from)
        .with_context(|| format!("{} is not a file name", args.file.display()))?;
    name.push(".part");
    let part_path = target.with_file_name(name);
    // Check this before the server is asked, which may take long to answer.
    let folder = folder_of(&target);
    if !folder.is_dir() {
        bail!(
            "{}: folder {} does not exist",
            args.file.display(),
            folder.display()
        );
    }
    take_interrupts()?;
    let client = connect(&args.source, common)?;
    let offset = args.source.offset;
    let request = MapRequest {
        // This mapping disturbs no writer: the checksum shows whether there was one.
        share: Access::READ | Access::WRITE,
        offset,
        length: args.bytes.unwrap_or(0),
        ..MapRequest::new(Access::READ)
    };
    let (mut client, mapping) = map(client, &args.source.region, &request)?;
    let length: u64 = mapping.extents().iter().map(|extent| extent.length).sum();
    // Replace a file that a killed pull left; do not follow a link that somebody put there.
    let _ = fs::remove_file(&part_path);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .open(&part_path)
        .with_context(|| part_path.display().to_string())?;
    if let Some(meta) = &existing {
        file.set_permissions(meta.permissions())?;
    }
    let mut part = Part(Some(part_path.clone()));
    let bar = progress_bar(length, common);
    let start = Instant::now();
    let crc = receive(&mut client, &mapping, &args, length, &mut file, &part_path, &bar);
    bar.finish_and_clear();
    let crc = match crc {
        Ok(crc) => crc,
        Err(error) => {
            client.close();
            return Err(error.context("no bytes were kept"));
        }
    };
    file.sync_all().with_context(|| part_path.display().to_string())?;
    let elapsed = start.elapsed();
    let there = client.checksum(&args.source.region, offset, length)?;
    client.close();
    ensure!(
        there == crc,
        "{} changed during the pull (CRC-64 {there:016x} at the server, {crc:016x} here): pull it again",
        args.source
    );
    fs::rename(&part_path, &target).with_context(|| args.file.display().to_string())?;
    part.0 = None;
    File::open(folder_of(&target))?.sync_all()?;
    let rate = gigabytes_per_second(length, elapsed);
    if common.json {
        let report = json!({
            "bytes": length,
            "seconds": elapsed.as_secs_f64(),
            "gigabytes_per_second": rate,
            "crc64": format!("{crc:016x}"),
        });
        output::say(&report.to_string());
    } else if !common.quiet {
        output::say(&format!(
            "pulled {length} bytes from {} in {:.2} s, {rate:.2} GB/s",
            args.source,
            elapsed.as_secs_f64()
        ));
        output::say(&format!("CRC-64/NVME {crc:016x} at both ends"));
    }
    Ok(())
}

fn receive(
    client: &mut Client,
    mapping: &Mapping,
    args: &Args,
    length: u64,
    file: &mut File,
    path: &Path,
    bar: &ProgressBar,
) -> Result<u64> {
    let (chunk, depth) = (u64::from(args.common.chunk), u64::from(args.common.depth));
    let buffer = client.buffer((chunk * depth) as usize)?;
    let mut bytes = vec![0; chunk as usize];
    let mut crc = Crc64::default();
    let (mut asked, mut reads, mut got) = (0u64, 0u64, 0u64);
    while got < length {
        if interrupted() {
            bail!("interrupted");
        }
        if asked < length && reads - got.div_ceil(chunk) < depth {
            let part = (length - asked).min(chunk);
            let at = reads % depth * chunk;
            client.post_read(
                mapping,
                args.source.offset + asked,
                &buffer,
                at,
                part as u32,
                reads,
            )?;
            reads += 1;
            asked += part;
            continue;
        }
        // Requests complete in order: this is the chunk at `got`.
        let token = client.next_done()?.token;
        let part = &mut bytes[..(length - got).min(chunk) as usize];
        buffer.memory().read(token % depth * chunk, part)?;
        crc.update(part);
        file.write_all(part).with_context(|| path.display().to_string())?;
        got += part.len() as u64;
        bar.set_position(got);
    }
    Ok(crc.value())
}
