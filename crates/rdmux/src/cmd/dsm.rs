//! `rdmux dsm`: programs on several nodes that share memory.

mod run;
mod stat;

use anyhow::Result;
use clap::Subcommand;

/// Run programs on several nodes that share memory, and show what they do (docs/dsm.md).
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run a program as all nodes on this host, or as one node of several hosts.
    Run(Box<run::Args>),
    Stat(stat::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Run(args) => run::run(*args),
        Command::Stat(args) => stat::run(&args),
    }
}
