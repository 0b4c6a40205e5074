//! `rdmux capture`: looks at captures of RoCEv2.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rdmux_wire::check::{Checker, Report};
use rdmux_wire::roce::Opcode;
use serde_json::{Value, json};

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Verify every packet's ICRC, PSN and length: what a peer would drop without a word.
    ///
    /// Exit status 1 when a file has errors or no RoCEv2 packets. Let tcpdump capture whole packets on both ways, as by
    /// `tcpdump -s 0 -w FILE udp port 4791`. A train that the link carried unsplit (GSO) is split here.
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
    match &args.command {
        Command::Check { files, json } => check(files, *json),
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
        .with_context(|| format!("{} is no pcap or pcapng file", file.display()))?;
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
    use rdmux_wire::pcapng::{self, LinkType};

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
        assert!(error.to_string().contains("is no pcap or pcapng file"), "{error}");
    }
}
