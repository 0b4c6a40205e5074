//! `cargo xtask COMMAND`: the checks of this repository that need more than a few lines of a shell.
//!
//! The status is 0 if a check passed, 1 if it failed, 2 if it could not be started, and 77 if it cannot run on this machine: the reason is then
//! in a line that starts with `skipped: `. After a signal it is 128 and the signal's number.

use std::fmt::Display;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

use anyhow::{Context, Result};
use clap::Parser;

mod abi;
mod check;
mod instructions;
mod policy;
mod process;
mod programs;
mod pyverbs;

use crate::process::{Interrupted, Signals, output};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Checks of this repository"
)]
enum Command {
    /// The dependency policy: where crates come from, their licences, and the unwanted ones
    Policy,
    /// The drop-in library against the system's libibverbs and librdmacm: names, versions, structures, numbers
    Abi(abi::Options),
    /// Unmodified programs for RDMA on rdmux: a line each with result, seconds and command
    Programs(programs::Options),
    /// The C programs of capi/checks on the drop-in library: a line each
    Check(check::Options),
    /// Instructions a message by callgrind, compared with bench/instructions.txt
    Instructions(instructions::Options),
    /// rdma-core's own test suite on the drop-in library, compared with capi/pyverbs.list
    Pyverbs(pyverbs::Options),
}

/// Start of the line with the reason, which `./test` looks for.
const SKIPPED: &str = "skipped: ";

/// The result of a check that has printed its findings.
enum Outcome {
    Passed,
    Failed,
    /// It cannot run on this machine, for the given reason.
    Skipped(String),
}

impl Outcome {
    fn of(passed: bool) -> Self {
        if passed { Self::Passed } else { Self::Failed }
    }
}

/// Returns the root of the repository that this program was built in.
fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// Returns where cargo puts a file of the release build.
fn release(name: &str) -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release").join(name)
}

/// Returns whether a program is in `PATH`.
fn installed(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// Returns whether a command can be started and ends well.
fn succeeds(program: &str, arguments: &[&str], signals: &Signals) -> Result<bool> {
    let mut command = std::process::Command::new(program);
    Ok(output(command.args(arguments), signals)?.end.success())
}

/// Prints a line. In contrast to `println!`, an output that is closed is an error.
fn say(line: impl Display) -> Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// Returns the path of rdmux: the given one, or that of the release build.
fn rdmux(given: Option<&Path>) -> Result<PathBuf> {
    let path = given.map_or_else(|| release("rdmux"), Path::to_owned);
    path.canonicalize().with_context(|| {
        let build = "cargo build --release -p rdmux -p rdmux-ibverbs -p rdmux-sysfs";
        format!("there is no {}: {build}", path.display())
    })
}

/// Returns the last `count` lines of a file.
fn last_lines(path: &Path, count: usize) -> Vec<String> {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let skipped = text.lines().count().saturating_sub(count);
    text.lines().skip(skipped).map(str::to_owned).collect()
}

fn run(command: &Command) -> Result<ExitCode> {
    let signals = Signals::catch()?;
    let outcome = match command {
        Command::Policy => policy::run(&signals),
        Command::Abi(options) => abi::run(options, &signals),
        Command::Programs(options) => programs::run(options, &signals),
        Command::Check(options) => check::run(options, &signals),
        Command::Instructions(options) => instructions::run(options, &signals),
        Command::Pyverbs(options) => pyverbs::run(options, &signals),
    };
    Ok(match outcome? {
        Outcome::Passed => ExitCode::SUCCESS,
        Outcome::Failed => ExitCode::from(1),
        Outcome::Skipped(why) => {
            say(format_args!("{SKIPPED}{why}"))?;
            ExitCode::from(77)
        }
    })
}

fn main() -> ExitCode {
    run(&Command::parse()).unwrap_or_else(|error| {
        if let Some(Interrupted(signal)) = error.downcast_ref() {
            return ExitCode::from(128 + signal);
        }
        // The status tells an error whose message nobody reads.
        let _closed = writeln!(io::stderr(), "xtask: {error:#}");
        ExitCode::from(2)
    })
}
