//! Instructions a message, counted by callgrind and compared with `bench/instructions.txt`: a regression that the times of a busy machine hide.
//!
//! Counts are of user space alone, of the thread that posts and polls. The engine's threads sleep, and what a system call does counts nothing.

use std::fmt::Write;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, iter};

use anyhow::{Context, Result, ensure};
use cargo_metadata::Message;
use clap::Args;

use crate::check::compiles;
use crate::process::{Job, Signals, output};
use crate::programs::free_address;
use crate::{Outcome, installed, last_lines, rdmux, root, say};

#[derive(Args)]
pub(crate) struct Options {
    /// The program rdmux, with its libraries beside it [default: that of the release build]
    #[arg(long, value_name = "RDMUX")]
    binary: Option<PathBuf>,
    /// Only rows whose name has the word
    #[arg(long, value_name = "WORD", default_value = "")]
    only: String,
    /// Count each row so many times, and show how much the counts differ
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
}

/// Rewrites the table when it is set.
const WRITE: &str = "RDMUX_INSTRUCTIONS_WRITE";
const TABLE: &str = "bench/instructions.txt";
/// A count may differ by this part of the expected one. Runs of one build differ by less than a hundredth.
const TOLERANCE: f64 = 0.05;
/// Messages that are counted.
const MESSAGES: u32 = 2_000;
/// A machine that is busy with other work may take this long for a count of a second.
const COUNT_LIMIT: Duration = Duration::from_secs(120);
const BUILD_LIMIT: Duration = Duration::from_secs(900);

const HEAD: &str = "\
# Instructions a message, in user space, as `./test instructions` counts and compares them; docs/performance.md describes the rows.
# Written by RDMUX_INSTRUCTIONS_WRITE=1 ./test instructions. They hold for this compiler:
";

/// The program that sends the messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    /// `crates/soft/benches/instructions.rs`.
    Own,
    /// `bench/drop_in.c`.
    DropIn,
}

/// A row: its name, and the message and the step that the program is to count.
struct Row(&'static str, Program, &'static str, &'static str);

const ROWS: [Row; 16] = [
    Row("WRITE 8 B: post", Program::Own, "write-8-unsignaled", "post"),
    Row("WRITE 8 B: post and completion", Program::Own, "write-8", "all"),
    Row("READ 8 B: post and completion", Program::Own, "read-8", "all"),
    Row("SEND 8 B: post", Program::Own, "send-8", "post"),
    Row("SEND 8 B: receive", Program::Own, "send-8", "receive"),
    Row("SEND 8 B: post receive", Program::Own, "send-8", "post-receive"),
    Row("SEND 8 B: acknowledge", Program::Own, "send-8", "acknowledge"),
    Row("SEND 8 B: completion", Program::Own, "send-8", "complete"),
    Row("SEND 8 B: both sides", Program::Own, "send-8", "all"),
    Row("SEND 4 KiB: both sides", Program::Own, "send-4096", "all"),
    Row("poll, nothing there", Program::Own, "poll", "poll"),
    Row("UDP, WRITE 8 B: post", Program::Own, "udp-write-8", "post"),
    Row("UDP, WRITE 8 B: both sides", Program::Own, "udp-write-8", "all"),
    Row("drop-in, SEND 8 B: post", Program::DropIn, "send-8", "post"),
    Row("drop-in, SEND 8 B: both sides", Program::DropIn, "send-8", "all"),
    Row("drop-in, poll, nothing there", Program::DropIn, "poll", "poll"),
];

/// Rows that are shown and not held: their counts depend on how the engine's thread and the caller met, and have several values.
const SHOWN: [&str; 10] = [
    "SEND 8 B: receive",
    "SEND 8 B: acknowledge",
    "SEND 8 B: completion",
    "SEND 8 B: both sides",
    "SEND 4 KiB: both sides",
    "poll, nothing there",
    "UDP, WRITE 8 B: both sides",
    "drop-in, SEND 8 B: post",
    "drop-in, SEND 8 B: both sides",
    "drop-in, poll, nothing there",
];

pub(crate) fn run(options: &Options, signals: &Signals) -> Result<Outcome> {
    if let Some(why) = unsuitable(signals)? {
        return Ok(Outcome::Skipped(why));
    }
    let counter = Counter::new(options, signals)?;
    let compiler = compiler(signals)?;
    let path = root().join(TABLE);
    let table = Table::parse(&fs::read_to_string(&path).unwrap_or_default())?;
    let writes = env::var_os(WRITE).is_some_and(|value| !value.is_empty());
    let compares = table.compiler == compiler;

    let heading = ["expected", "counted", "difference"];
    say(format_args!(
        "{:<34} {:>9} {:>9} {:>11}",
        "instructions a message", heading[0], heading[1], heading[2]
    ))?;
    let mut new = Table {
        compiler,
        counts: Vec::new(),
    };
    let mut passed = true;
    for row in ROWS.iter().filter(|row| row.0.contains(&options.only)) {
        let line = Line::new(row.0, table.count(row.0), &counter.count(row)?);
        say(line.text(compares))?;
        passed &= line.is_expected();
        new.counts.push((row.0.to_owned(), line.counted));
    }
    if writes {
        ensure!(new.counts.len() == ROWS.len(), "{WRITE} needs all of the rows");
        fs::write(&path, new.text())?;
        say(format_args!("{TABLE} is written"))?;
        return Ok(Outcome::Passed);
    }
    if !compares {
        say(format_args!(
            "{TABLE} is of {}, and this is {}: not compared",
            table.compiler, new.compiler
        ))?;
        return Ok(Outcome::Passed);
    }
    if !passed {
        say(format_args!(
            "A count differs by more than {:.0} % from {TABLE}: find out why, then {WRITE}=1 ./test instructions",
            TOLERANCE * 100.0
        ))?;
    }
    Ok(Outcome::of(passed))
}

/// Returns why this machine cannot count.
fn unsuitable(signals: &Signals) -> Result<Option<String>> {
    if !installed("valgrind") {
        return Ok(Some("there is no valgrind".to_owned()));
    }
    let mut command = Command::new("valgrind");
    let ran = output(command.args(["--tool=none", "--quiet", "true"]), signals)?;
    if !ran.end.success() {
        return Ok(Some(format!("valgrind cannot run here: {}", ran.stderr.trim())));
    }
    let work = tempfile::tempdir()?;
    if !installed("cc") || !compiles("#include <infiniband/verbs.h>\n", work.path(), signals)? {
        let why = "there is no C compiler, or no header of rdma-core (Debian: libibverbs-dev)";
        return Ok(Some(why.to_owned()));
    }
    Ok(None)
}

/// Returns the compiler and the platform that counts depend on.
fn compiler(signals: &Signals) -> Result<String> {
    let text = output(Command::new("rustc").arg("-vV"), signals)?.stdout;
    let field = |name| text.lines().find_map(|line| line.strip_prefix(name));
    let release = field("release: ").context("rustc has no version")?;
    let host = field("host: ").context("rustc has no host")?;
    Ok(format!("rustc {release} {host}"))
}

/// The programs that send messages, built, and the way to count them.
struct Counter<'a> {
    work: tempfile::TempDir,
    own: PathBuf,
    rdmux: PathBuf,
    runs: u32,
    signals: &'a Signals,
}

impl<'a> Counter<'a> {
    fn new(options: &Options, signals: &'a Signals) -> Result<Counter<'a>> {
        let counter = Counter {
            work: tempfile::tempdir()?,
            own: own_program(signals)?,
            rdmux: rdmux(options.binary.as_deref())?,
            runs: options.runs,
            signals,
        };
        counter.compile("counting.c", &counter.preloaded(), &["-shared", "-fPIC"])?;
        counter.compile("drop_in.c", &counter.drop_in(), &["-libverbs"])?;
        Ok(counter)
    }

    fn preloaded(&self) -> PathBuf {
        self.work.path().join("counting.so")
    }

    fn drop_in(&self) -> PathBuf {
        self.work.path().join("drop_in")
    }

    fn compile(&self, source: &str, program: &Path, options: &[&str]) -> Result<()> {
        let mut command = Command::new("cc");
        command.args(["-Wall", "-Werror", "-O1", "-o"]).arg(program);
        command.arg(root().join("bench").join(source)).args(options);
        let compiled = output(&command, self.signals)?;
        ensure!(compiled.end.success(), "bench/{source}: {}", compiled.stderr);
        Ok(())
    }

    /// Returns the counts of a row's step, one a run.
    fn count(&self, row: &Row) -> Result<Vec<f64>> {
        let mut counts = Vec::new();
        for _ in 0..self.runs {
            let collected = self.collected(&self.command(row)?).with_context(|| row.0)?;
            counts.push(collected as f64 / f64::from(MESSAGES));
        }
        Ok(counts)
    }

    fn command(&self, Row(_, program, message, step): &Row) -> Result<Command> {
        let address = free_address()?.to_string();
        let mut command = match program {
            Program::Own => Command::new("valgrind"),
            Program::DropIn => {
                let mut command = Command::new(&self.rdmux);
                command.args(["run", "--sysfs", "none", "--device", &address, "--", "valgrind"]);
                command
            }
        };
        // The function of the program alone: collecting is toggled by each function whose name matches.
        let counted = match program {
            Program::Own => "--toggle-collect=instructions::counted*",
            Program::DropIn => "--toggle-collect=counted",
        };
        // Without fair scheduling a thread that polls could keep out the one that holds the engine.
        command.args(["--tool=callgrind", counted, "--fair-sched=yes"]);
        command.arg("--callgrind-out-file=/dev/null");
        match program {
            Program::Own => command.arg(&self.own).arg(&address),
            Program::DropIn => command.arg(self.drop_in()),
        };
        command.args([message, step, MESSAGES.to_string().as_str()]);
        command.env("LD_PRELOAD", self.preloaded());
        Ok(command)
    }

    /// Runs a command of callgrind; returns the number of instructions that it collected.
    fn collected(&self, command: &Command) -> Result<u64> {
        let path = self.work.path().join("errors");
        let errors = File::create(&path)?;
        let mut job = Job::start(command, errors.try_clone()?, errors, COUNT_LIMIT)?;
        let end = job.wait(self.signals)?;
        ensure!(end.success(), "{end}\n{}", last_lines(&path, 20).join("\n"));
        let errors = fs::read_to_string(&path)?;
        collected(&errors).context("callgrind printed no count")
    }
}

/// Returns the count of the line `==PID== Collected : COUNT`.
fn collected(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| line.split_once("== Collected : ")?.1.trim().parse().ok())
}

/// Builds the program of rdmux's own API; returns its path.
fn own_program(signals: &Signals) -> Result<PathBuf> {
    let (mut messages, errors) = (tempfile::NamedTempFile::new()?, tempfile::NamedTempFile::new()?);
    let mut command = Command::new("cargo");
    command
        .current_dir(root())
        .args(["build", "--release", "--locked"]);
    command.args(["-p", "rdmux-soft", "--bench", "instructions"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let outputs = (messages.reopen()?, errors.reopen()?);
    let end = Job::start(&command, outputs.0, outputs.1, BUILD_LIMIT)?.wait(signals)?;
    ensure!(
        end.success(),
        "cargo build: {end}\n{}",
        last_lines(errors.path(), 20).join("\n")
    );
    let reader = std::io::BufReader::new(messages.as_file_mut());
    let executable = Message::parse_stream(reader).find_map(|message| match message {
        Ok(Message::CompilerArtifact(artifact)) if artifact.target.name == "instructions" => {
            artifact.executable
        }
        _ => None,
    });
    Ok(executable.context("cargo built no program")?.into_std_path_buf())
}

/// The expected counts.
#[derive(Debug, Default, PartialEq)]
struct Table {
    compiler: String,
    counts: Vec<(String, u64)>,
}

impl Table {
    /// Reads the text of a table: comments, the compiler, an empty line, and a line with name and count for each row.
    fn parse(text: &str) -> Result<Table> {
        let mut lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let compiler = lines.next().unwrap_or_default().to_owned();
        let counts = lines
            .map(|line| {
                let (name, count) = line
                    .rsplit_once(' ')
                    .with_context(|| format!("{TABLE}: {line}"))?;
                let count = count.parse().with_context(|| format!("{TABLE}: {line}"))?;
                Ok((name.trim_end().to_owned(), count))
            })
            .collect::<Result<_>>()?;
        Ok(Table { compiler, counts })
    }

    fn text(&self) -> String {
        let mut text = format!("{HEAD}{}\n\n", self.compiler);
        for (name, count) in &self.counts {
            // Writing to a string does not fail.
            let _written = writeln!(text, "{name:<34} {count:>7}");
        }
        text
    }

    fn count(&self, name: &str) -> Option<u64> {
        let found = self.counts.iter().find(|(known, _)| known == name);
        found.map(|(_, count)| *count)
    }
}

/// A row as it is shown.
struct Line<'a> {
    name: &'a str,
    expected: Option<u64>,
    counted: u64,
    /// Difference of the highest and the lowest count, as a part of the lowest; `None` for one run.
    spread: Option<f64>,
}

impl<'a> Line<'a> {
    /// `counts` has at least one.
    fn new(name: &'a str, expected: Option<u64>, counts: &[f64]) -> Line<'a> {
        let mut counts = counts.to_vec();
        counts.sort_by(f64::total_cmp);
        let (lowest, highest) = (counts[0], counts[counts.len() - 1]);
        Line {
            name,
            expected,
            counted: counts[counts.len() / 2].round() as u64,
            spread: (counts.len() > 1).then_some(highest / lowest - 1.0),
        }
    }

    /// Returns the difference as a part of the expected count.
    fn difference(&self) -> Option<f64> {
        let expected = self.expected.filter(|expected| *expected > 0)? as f64;
        Some(self.counted as f64 / expected - 1.0)
    }

    fn is_expected(&self) -> bool {
        SHOWN.contains(&self.name)
            || self
                .difference()
                .is_some_and(|difference| difference.abs() <= TOLERANCE)
    }

    fn text(&self, compares: bool) -> String {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let expected = or_none(self.expected.map(|count| count.to_string()));
        let difference = or_none(self.difference().map(|part| format!("{:+.1} %", part * 100.0)));
        let spread = self
            .spread
            .map(|part| format!("   runs differ by {:.2} %", part * 100.0));
        let verdict = match (compares, SHOWN.contains(&self.name)) {
            (false, _) => None,
            (true, true) => Some("   not held".to_owned()),
            (true, false) => (!self.is_expected()).then(|| "   FAILED".to_owned()),
        };
        let end: String = iter::empty().chain(spread).chain(verdict).collect();
        format!(
            "{:<34} {expected:>9} {:>9} {difference:>11}{end}",
            self.name, self.counted
        )
    }
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use super::*;

    #[test]
    fn collected__callgrind_says_it() {
        let text =
            "==7== Events    : Ir\n==7== Collected : 21085497\n==7== \n==7== I   refs:      21,085,497\n";
        assert_eq!(collected(text), Some(21_085_497));
        assert_eq!(collected("==7== Events    : Ir\n"), None);
    }

    #[test]
    fn table__reads_what_it_writes() {
        let table = Table {
            compiler: "rustc 1.95.0 x86_64-unknown-linux-gnu".to_owned(),
            counts: vec![("SEND 8 B: post".to_owned(), 3016), ("poll".to_owned(), 548)],
        };
        assert_eq!(Table::parse(&table.text()).unwrap(), table);
        assert_eq!(table.count("poll"), Some(548));
        assert_eq!(table.count("SEND"), None);
        assert!(Table::parse("rustc\nSEND 8 B: post\n").is_err());
        assert_eq!(Table::parse("").unwrap(), Table::default());
    }

    #[test]
    fn table__has_the_rows() {
        let text = fs::read_to_string(root().join(TABLE)).unwrap();
        let table = Table::parse(&text).unwrap();
        let names: Vec<&str> = table.counts.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ROWS.map(|row| row.0));
        assert_eq!(table.text(), text);
    }

    #[test]
    fn shown__are_rows() {
        for name in SHOWN {
            assert!(ROWS.iter().any(|row| row.0 == name), "{name}");
        }
    }

    #[test]
    fn line__within_the_tolerance() {
        for (expected, counted, is_expected) in [
            (Some(1000), 1000.0, true),
            (Some(1000), 1049.0, true),
            (Some(1000), 1051.0, false),
            (Some(1000), 951.0, true),
            (Some(1000), 949.0, false),
            (None, 1000.0, false),
        ] {
            let line = Line::new("row", expected, &[counted]);
            assert_eq!(line.is_expected(), is_expected, "{counted} of {expected:?}");
            assert_eq!(line.text(true).ends_with("FAILED"), !is_expected);
            assert!(!line.text(false).contains("FAILED"));
        }
        assert_eq!(Line::new("row", None, &[3.0, 1.0, 2.0]).counted, 2);
    }
}
