//! `cargo xtask COMMAND`: the checks of this repository that need more than a few lines of a shell.
//!
//! The status is 0 if a check passed, 1 if it failed, 2 if it could not be started, and 77 if it cannot run on this machine: the reason is then
//! the line that starts with `skipped: `.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

mod policy;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Checks of this repository"
)]
enum Command {
    /// The dependency policy: where crates come from, their licences, and the unwanted ones
    Policy,
}

/// How a check ended. It has printed its findings.
enum Outcome {
    Passed,
    Failed,
}

impl Outcome {
    fn of(passed: bool) -> Self {
        if passed { Self::Passed } else { Self::Failed }
    }
}

/// Returns the root of the repository that this program was built in.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn main() -> ExitCode {
    let outcome = match Command::parse() {
        Command::Policy => policy::run(),
    };
    match outcome {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(1),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}
