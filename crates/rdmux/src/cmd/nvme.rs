//! `rdmux nvme`: NVMe over Fabrics.

mod change;
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
    Target(Box<target::Args>),
    /// Show and change the namespaces of a target that runs.
    Ns(change::NamespaceArgs),
    /// Show and change who may use a target that runs.
    Host(change::HostArgs),
    /// Show and change the addresses on which a target listens.
    Listener(change::ListenerArgs),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Target(args) => target::run(*args),
        Command::Ns(args) => change::namespaces(&args),
        Command::Host(args) => change::hosts(&args),
        Command::Listener(args) => change::listeners(&args),
    }
}
