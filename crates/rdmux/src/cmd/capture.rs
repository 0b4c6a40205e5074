//! `rdmux capture`: captures a device of this user, and looks at captures of RoCEv2.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rdmux_capture::check::{Checker, Report};
use rdmux_soft::capture::{Filter, start};
use rdmux_verbs::resources::{DeviceAt, Object, ask, devices};
use rdmux_wire::roce::Opcode;
use serde_json::{Value, json};

use super::push::{interrupted, take_interrupts};
use crate::output;

/// Time that all devices together have to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Period at which a capture checks whether to end.
const LOOK: Duration = Duration::from_millis(100);

/// Capture what a device of this user sends and receives, shared memory included, until Ctrl-C; or check captures.
///
/// The file is pcapng, with whole Ethernet frames, for Wireshark, tshark and `rdmux capture check`. The device's own process writes it and
/// never waits for the file; it counts the packets that it drops. Only devices of the same user can be captured. See docs/capture.md. The
/// environment variable RDMUX_CAPTURE captures any program from its start.
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// File to write; an existing file is replaced.
    #[arg(short, long, value_name = "FILE", required = true)]
    write: Option<PathBuf>,
    /// Device to capture, as `rdmux dev show` names it [default: the only device].
    #[arg(long, value_name = "ADDRESS/SLOT")]
    device: Option<DeviceAt>,
    /// Stop after this time.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    seconds: Option<u32>,
    /// Print JSON: {"file", "device", "packets", "dropped"}.
    #[arg(long)]
    json: bool,
    /// Packets to capture: qp=N (of this queue pair, both directions), peer=ADDR, opcode=send|write|read|atomic|flush|ack|cm|cnp. A packet
    /// must match all filters.
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Verify the ICRC, PSN and length of every packet: errors for which a peer drops a packet silently.
    ///
    /// The exit status is 1 when a file has errors or no RoCEv2 packets. Let tcpdump capture whole packets in both directions: `tcpdump -s
    /// 0 -w FILE udp port 4791`. The check splits a train that the link carried unsplit (GSO).
    Check {
        /// Captures in pcap or pcapng format.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Print JSON: {"files": [{"file", "passed", "packets", "roce", "trains", "fragments", "opcodes": {NAME: count},
        /// "retransmissions", "naks", "rnr_naks", "rxe_flushes", "unmatched", "errors_total", "errors": [{"packet", "reason"}]}]}.
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match (&args.command, &args.write) {
        (Some(Command::Check { files, json }), _) => check(files, *json),
        (None, Some(file)) => capture(args, file),
        (None, None) => bail!("no file given: use rdmux capture -w FILE.pcapng"),
    }
}

/// Runs `rdmux capture -w FILE`.
fn capture(args: &Args, path: &Path) -> Result<()> {
    let filter: Filter = args.filter.join(",").parse()?;
    let device = match args.device {
        Some(device) => device,
        None => only_device()?,
    };
    take_interrupts()?;
    let cannot = || format!("cannot write {}", path.display());
    if let Ok(meta) = std::fs::metadata(path) {
        let kind = meta.file_type();
        ensure!(
            kind.is_file() || kind.is_char_device(),
            "{}: not a regular file",
            cannot()
        );
    }
    let file = File::create(path).with_context(cannot)?;
    let capturing = start(device, &file, &filter).with_context(|| format!("cannot capture {device}"))?;
    if !args.json {
        // Nobody reads a closed stderr: ignore the failure.
        let _ = writeln!(
            std::io::stderr(),
            "capturing {device} to {}; end with Ctrl-C",
            path.display()
        );
    }
    let end = args
        .seconds
        .map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let mut is_there = true;
    while is_there && !interrupted() && end.is_none_or(|end| Instant::now() < end) {
        is_there = capturing.wait(LOOK)?;
    }
    let counts = capturing.stop()?;
    if args.json {
        let value = json!({
            "file": path.display().to_string(),
            "device": device.to_string(),
            "packets": counts.packets,
            "dropped": counts.dropped,
        });
        output::say(&format!("{value:#}"));
    } else {
        let gone = if is_there {
            ""
        } else {
            ", and the device has closed"
        };
        output::say(&format!(
            "{} packets, {} dropped{gone}",
            counts.packets, counts.dropped
        ));
    }
    Ok(())
}

/// Returns the device to capture where none is named.
fn only_device() -> Result<DeviceAt> {
    // Root sees the devices of all users, and captures only its own.
    let uid = rustix::process::geteuid().as_raw();
    let answers = ask(&devices(), Object::Device, PATIENCE);
    let own: Vec<DeviceAt> = answers
        .into_iter()
        .filter(|(_, answer)| answer.as_ref().is_ok_and(|told| told.uid == uid))
        .map(|(device, _)| device)
        .collect();
    ensure!(
        !own.is_empty(),
        "this user has no device to capture (`rdmux dev show` lists devices)"
    );
    match own[..] {
        [device] => Ok(device),
        _ => {
            let names: Vec<String> = own.iter().map(DeviceAt::to_string).collect();
            bail!(
                "there are several devices, choose one with --device: {}",
                names.join(", ")
            )
        }
    }
}

fn check(files: &[PathBuf], as_json: bool) -> Result<()> {
    let reports = files
        .iter()
        .map(|file| Ok((file.as_path(), check_file(file)?)))
        .collect::<Result<Vec<_>>>()?;
    let mut out = std::io::stdout().lock();
    if as_json {
        let files: Vec<_> = reports
            .iter()
            .map(|(file, report)| to_json(file, report))
            .collect();
        serde_json::to_writer_pretty(&mut out, &json!({ "files": files }))?;
        writeln!(out)?;
    } else {
        for (i, (file, report)) in reports.iter().enumerate() {
            if i > 0 {
                writeln!(out)?;
            }
            write!(out, "{}\n{report}", file.display())?;
        }
    }
    let without = reports.iter().find(|(_, report)| report.roce == 0);
    if let Some((file, _)) = without {
        bail!("{} holds no RoCEv2 packet (UDP port 4791)", file.display());
    }
    match reports.iter().map(|(_, report)| report.errors_total).sum::<u64>() {
        0 => Ok(()),
        n => bail!("{n} errors in {} files checked", reports.len()),
    }
}

fn check_file(file: &Path) -> Result<Report> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut checker = Checker::new();
    checker
        .file(&bytes)
        .with_context(|| format!("{} is not a pcap or pcapng file", file.display()))?;
    Ok(checker.report().clone())
}

fn to_json(file: &Path, report: &Report) -> Value {
    let name =
        |code: u8| Opcode::from_code(code).map_or_else(|| "CNP".to_owned(), |opcode| opcode.to_string());
    let opcodes: serde_json::Map<_, _> = report
        .opcodes
        .iter()
        .map(|(code, count)| (name(*code), json!(count)))
        .collect();
    let errors: Vec<_> = report
        .errors
        .iter()
        .map(|error| json!({ "packet": error.packet, "reason": error.reason }))
        .collect();
    json!({
        "file": file.display().to_string(),
        "passed": report.passed(),
        "packets": report.packets,
        "roce": report.roce,
        "trains": report.trains,
        "fragments": report.fragments,
        "opcodes": opcodes,
        "retransmissions": report.retransmissions,
        "naks": report.naks,
        "rnr_naks": report.rnr_naks,
        "rxe_flushes": report.rxe_flushes,
        "unmatched": report.unmatched,
        "errors_total": report.errors_total,
        "errors": errors,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdmux_capture::pcapng::{self, LinkType};

    #[test]
    fn to_json__has_every_field_of_the_report() {
        let mut bytes = Vec::new();
        pcapng::write_section(&mut bytes);
        pcapng::write_interface(&mut bytes, LinkType::ETHERNET, None);
        let mut checker = Checker::new();
        checker.file(&bytes).unwrap();
        let value = to_json(Path::new("a.pcapng"), checker.report());
        let keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys.len(), 14);
        assert_eq!(value["passed"], false);
        assert_eq!(value["packets"], 0);
    }

    #[test]
    fn check_file__another_kind_of_file_is_an_error() {
        let error = check_file(Path::new("/proc/self/exe")).unwrap_err();
        assert!(
            error.to_string().contains("is not a pcap or pcapng file"),
            "{error}"
        );
    }
}
