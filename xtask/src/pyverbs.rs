//! The test suite of rdma-core, as Debian 12 packages it (pyverbs, rdma-core 44), on rdmux. The outcome of each test has to match
//! `capi/pyverbs.list`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{Job, Signals, output};
use crate::{Outcome, last_lines, rdmux, root, say, succeeds};

#[derive(Args)]
pub(crate) struct Options {
    /// The program rdmux, with its libraries beside it [default: that of the release build]
    #[arg(long, value_name = "RDMUX")]
    binary: Option<PathBuf>,
    /// The address of the device
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    device: IpAddr,
    /// Repeat the random numbers of an earlier run
    #[arg(long, value_name = "N")]
    seed: Option<u16>,
    /// Write the list again; then read the difference
    #[arg(long)]
    write: bool,
}

const SUITE: &str = "/usr/share/doc/rdma-core/tests";
/// The Python version that Debian's modules are compiled for.
const PYTHON: &str = "/usr/bin/python3";
const RUNNER: &str = include_str!("pyverbs.py");
const LIMIT: Duration = Duration::from_secs(320);

pub(crate) fn run(options: &Options, signals: &Signals) -> Result<Outcome> {
    if let Some(why) = unsuitable(signals)? {
        return Ok(Outcome::Skipped(why));
    }
    let binary = rdmux(options.binary.as_deref())?;
    let work = tempfile::tempdir()?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u16(..));
    say(format_args!("pyverbs: seed {seed}"))?;

    unpack(&work.path().join("tests"), signals)?;
    let runner = work.path().join("suite.py");
    fs::write(&runner, RUNNER)?;
    let (output, errors) = (work.path().join("outcomes"), work.path().join("errors"));
    let device = options.device.to_string();
    let mut command = Command::new(binary);
    command
        .args(["run", "--device", &device, "--", PYTHON, "-B"])
        .args([&runner, work.path()])
        .args([&seed.to_string(), &device]);
    let mut job = Job::start(&command, File::create(&output)?, File::create(&errors)?, LIMIT)?;
    let end = job.wait(signals)?;
    if !end.success() {
        for line in last_lines(&errors, 20) {
            eprintln!("{line}");
        }
        eprintln!("pyverbs: {end}");
    }

    let path = root().join("capi/pyverbs.list");
    let mut list = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let output = fs::read(&output)?;
    let output = String::from_utf8_lossy(&output);
    let mut outcomes: Vec<Line<'_>> = output.lines().filter_map(Line::parse).collect();
    outcomes.sort();
    let count = |outcome| outcomes.iter().filter(|line| line.outcome == outcome).count();
    let (ok, failed, skipped) = (count("ok"), count("FAILED"), count("skipped"));
    if options.write {
        match written(&list, &outcomes, end.success()) {
            Some(written) => {
                fs::write(&path, &written)?;
                list = written;
            }
            None => say("capi/pyverbs.list is not written, because the suite or a test failed")?,
        }
    }
    let differences = differences(&list, &outcomes);
    let passed = differences.is_empty() && end.success();
    if !passed {
        say("differs from capi/pyverbs.list (<), which says what each test does (>: what it did):")?;
        for difference in differences {
            say(format_args!("  {difference}"))?;
        }
        for line in outcomes.iter().filter(|line| line.outcome == "FAILED") {
            say(line.whole)?;
        }
        for line in last_lines(&errors, 40) {
            say(line)?;
        }
    }
    say(format_args!(
        "pyverbs: {ok} passed, {failed} failed, {skipped} skipped"
    ))?;
    Ok(Outcome::of(passed))
}

/// Returns why the suite cannot run on this machine.
fn unsuitable(signals: &Signals) -> Result<Option<String>> {
    let mut missing = Vec::new();
    if !Path::new(SUITE).join("run_tests.py").exists() {
        missing.push("rdma-core");
    }
    if !succeeds(PYTHON, &["-c", "import pyverbs.device"], signals)? {
        missing.push("python3-pyverbs");
    }
    if !missing.is_empty() {
        return Ok(Some(format!(
            "{} of Debian 12 not installed",
            missing.join(" and ")
        )));
    }
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${Version}", "python3-pyverbs"]);
    let version = output(&query, signals)?.stdout;
    let other = version.split('.').next() != Some("44");
    Ok(other.then(|| "the list is of rdma-core 44, and another is installed".to_owned()))
}

/// Copies the suite, whose files Debian has compressed.
fn unpack(folder: &Path, signals: &Signals) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.arg("-r").args([Path::new(SUITE), folder]);
    run_well(&copy, signals)?;
    let mut unzip = Command::new("gunzip");
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "gz") {
            unzip.arg(path);
        }
    }
    run_well(&unzip, signals)
}

fn run_well(command: &Command, signals: &Signals) -> Result<()> {
    let output = output(command, signals)?;
    if !output.end.success() {
        bail!("cannot copy {SUITE}: {} ({})", output.stderr.trim(), output.end);
    }
    Ok(())
}

/// A line of the list, or of the suite's output: `OUTCOME NAME[: REASON]`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Line<'a> {
    /// The part after the outcome, with its blanks: the list is in this order, so outcomes of a length stand together.
    rest: &'a str,
    outcome: &'a str,
    whole: &'a str,
}

impl<'a> Line<'a> {
    fn parse(whole: &'a str) -> Option<Self> {
        let outcome = whole.split(' ').next()?;
        let known = ["ok", "skipped", "FAILED", "either"].contains(&outcome);
        known.then(|| Self {
            rest: &whole[outcome.len()..],
            outcome,
            whole,
        })
    }

    fn name(&self) -> &'a str {
        let name = self.rest.trim_start();
        name.split([' ', ':']).next().unwrap_or(name)
    }
}

/// Returns the outcome of each test of the list by name. Tests that do one or the other are said to do so by hand.
fn expected(list: &str) -> BTreeMap<&str, Line<'_>> {
    list.lines()
        .filter_map(Line::parse)
        .map(|line| (line.name(), line))
        .collect()
}

/// Returns the list with other outcomes: its comments first, and the lines that were written by hand as they are. The list has no outcomes of a
/// suite that did not end well, or in which a test failed.
fn written(list: &str, outcomes: &[Line<'_>], ended_well: bool) -> Option<String> {
    if !ended_well || outcomes.iter().any(|line| line.outcome == "FAILED") {
        return None;
    }
    let expected = expected(list);
    let comments = list.lines().filter(|line| line.starts_with('#'));
    let lines = outcomes.iter().map(|line| match expected.get(line.name()) {
        Some(by_hand) if by_hand.outcome == "either" => by_hand.whole,
        _ => line.whole,
    });
    Some(comments.chain(lines).map(|line| format!("{line}\n")).collect())
}

/// Returns what differs: lines of the list after `<`, of the suite after `>`.
fn differences(list: &str, outcomes: &[Line<'_>]) -> Vec<String> {
    let expected = expected(list);
    let found: BTreeMap<&str, &Line<'_>> = outcomes.iter().map(|line| (line.name(), line)).collect();
    let mut differences = Vec::new();
    for (name, line) in &expected {
        let same = found.get(name).is_some_and(|found| match line.outcome {
            "either" => found.outcome != "FAILED",
            outcome => outcome == found.outcome,
        });
        if !same {
            differences.push(format!("< {} {name}", line.outcome));
            differences.extend(found.get(name).map(|line| format!("> {} {name}", line.outcome)));
        }
    }
    let unknown = found.iter().filter(|(name, _)| !expected.contains_key(*name));
    differences.extend(unknown.map(|(name, line)| format!("> {} {name}", line.outcome)));
    differences
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use super::*;

    const LIST: &str = "# Comment.\nok       a.b\neither   a.e: here or there\nskipped  a.c: no device\n";

    fn lines(output: &str) -> Vec<Line<'_>> {
        let mut lines: Vec<Line<'_>> = output.lines().filter_map(Line::parse).collect();
        lines.sort();
        lines
    }

    #[test]
    fn differences__none_where_each_test_did_as_listed() {
        for either in ["ok       a.e", "skipped  a.e: here"] {
            let output = format!("noise\nskipped  a.c: another reason\nok       a.b\n{either}\n");
            assert!(differences(LIST, &lines(&output)).is_empty(), "{either}");
        }
    }

    #[test]
    fn differences__name_both_sides() {
        let output = "FAILED   a.b: AssertionError: 1: 2\nFAILED   a.e: x\nok       a.d\n";
        assert_eq!(
            differences(LIST, &lines(output)),
            [
                "< ok a.b",
                "> FAILED a.b",
                "< skipped a.c",
                "< either a.e",
                "> FAILED a.e",
                "> ok a.d",
            ]
        );
    }

    #[test]
    fn written__keeps_what_is_written_by_hand() {
        let output = "skipped  a.c: other\nok       a.e\nok       a.b\n";
        assert_eq!(
            written(LIST, &lines(output), true).as_deref(),
            Some("# Comment.\nok       a.b\neither   a.e: here or there\nskipped  a.c: other\n")
        );
    }

    #[test]
    fn written__is_no_list_of_failures() {
        assert_eq!(written(LIST, &lines("ok       a.b\n"), false), None);
        assert_eq!(
            written(LIST, &lines("ok       a.b\nFAILED   a.c: x\n"), true),
            None
        );
    }
}
