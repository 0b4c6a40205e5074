//! `rdmux nvme`: NVMe over Fabrics.

mod target;

use anyhow::Result;
use clap::Subcommand;

/// Serve NVMe namespaces to every NVMe host.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Export files, block devices and memory as NVMe namespaces, until Ctrl-C.
    Target(target::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Target(args) => target::run(args),
    }
}
