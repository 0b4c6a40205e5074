//! `rdmux dsm`: programs on several nodes that share memory.

mod run;

use anyhow::Result;
use clap::Subcommand;

/// Run programs on several nodes that share memory (docs/dsm.md).
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run a program as all nodes on this host, or as one node of several hosts.
    Run(run::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Run(args) => run::run(args),
    }
}
