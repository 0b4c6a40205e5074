//! `rdmux nvme`: NVMe over Fabrics.

mod ana;
mod change;
mod copy;
mod discover;
pub(super) mod host;
mod identify;
mod list;
mod perf;
mod stat;
mod target;

use anyhow::Result;
use clap::Subcommand;

/// Serve NVMe namespaces to every NVMe host, and use those of every NVMe target.
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
    /// Show and change the other discovery services to which a target refers hosts.
    Referral(change::ReferralArgs),
    /// Show what the hosts of a target that runs have read and written.
    Stat(stat::Args),
    /// Show and change by which ways hosts reach the namespaces of a target that runs.
    Ana(ana::Args),
    /// List the subsystems that a target offers.
    Discover(discover::Args),
    /// List the namespaces of a subsystem.
    List(list::Args),
    /// Show what a controller says of itself, in nvme-cli's words.
    IdCtrl(identify::ControllerArgs),
    /// Show what a controller says of a namespace, in nvme-cli's words.
    IdNs(identify::NamespaceArgs),
    /// Read bytes of a namespace.
    Read(copy::ReadArgs),
    /// Write bytes into a namespace, and make them durable there.
    Write(copy::WriteArgs),
    /// Measure a namespace: IOPS, bandwidth, latency and processor time.
    Perf(perf::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Target(args) => target::run(*args),
        Command::Ns(args) => change::namespaces(&args),
        Command::Host(args) => change::hosts(&args),
        Command::Listener(args) => change::listeners(&args),
        Command::Referral(args) => change::referrals(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Ana(args) => ana::run(&args),
        Command::Discover(args) => discover::run(&args),
        Command::List(args) => list::run(&args),
        Command::IdCtrl(args) => identify::controller(&args),
        Command::IdNs(args) => identify::namespace(&args),
        Command::Read(args) => copy::read(&args),
        Command::Write(args) => copy::write(&args),
        Command::Perf(args) => perf::run(&args),
    }
}
