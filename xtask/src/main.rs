//! `cargo xtask COMMAND`: the checks of this repository that need more than a few lines of a shell.
//!
//! The status is 0 if a check passed, 1 if it failed, 2 if it could not be started, and 77 if it cannot run on this machine: the reason is then
//! in a line that starts with `skipped: `. After a signal it is 128 and the signal's number.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Parser;

mod abi;
mod check;
mod policy;
mod process;
mod programs;
mod pyverbs;

use crate::process::Interrupted;

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
    /// rdma-core's own test suite on the drop-in library, compared with capi/pyverbs.list
    Pyverbs(pyverbs::Options),
}

/// Start of the line with the reason, which `./test` looks for.
const SKIPPED: &str = "skipped: ";

/// How a check ended. It has printed its findings.
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

/// Returns whether a command ends well; it says nothing.
fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = std::process::Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
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

fn main() -> ExitCode {
    let outcome = match Command::parse() {
        Command::Policy => policy::run(),
        Command::Abi(options) => abi::run(&options),
        Command::Programs(options) => programs::run(&options),
        Command::Check(options) => check::run(&options),
        Command::Pyverbs(options) => pyverbs::run(&options),
    };
    match outcome {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(1),
        Ok(Outcome::Skipped(why)) => {
            println!("{SKIPPED}{why}");
            ExitCode::from(77)
        }
        Err(error) => {
            if let Some(Interrupted(signal)) = error.downcast_ref() {
                return ExitCode::from(128 + signal);
            }
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}
