//! `rdmux demo`: what rdmux does, shown end to end on this host with processes of its own.

mod fair;
mod measure;
mod push;
mod stage;

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result};
use serde_json::Value;

/// Demonstrate rdmux end to end on this host.
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    demo: Demo,
}

#[derive(clap::Subcommand, Debug)]
enum Demo {
    /// Push a file to another process, kill the client halfway, resume, pull the file back, and compare with TCP.
    Push(push::Args),
    /// Send a heartbeat beside a bulk transfer, through a bottleneck: first with a device for each program, then through a node.
    Fair(fair::Args),
    #[command(hide = true)]
    Measure(measure::Args),
    #[command(hide = true)]
    TcpServe(measure::TcpServeArgs),
    #[command(hide = true)]
    FairSink(fair::traffic::SinkArgs),
    #[command(hide = true)]
    FairTraffic(fair::traffic::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.demo {
        Demo::Push(args) => push::run(&args),
        Demo::Fair(args) => fair::run(&args),
        Demo::Measure(args) => measure::run(&args),
        Demo::TcpServe(args) => measure::tcp_serve(&args),
        Demo::FairSink(args) => fair::traffic::sink(&args),
        Demo::FairTraffic(args) => fair::traffic::run(&args),
    }
}

/// Returns an address of the loopback interface that most likely nobody else uses; this process has two, 0 and 1.
fn unused_loopback(number: u8) -> IpAddr {
    // Process ids have 22 bits at most, so every process gets addresses of its own.
    let pid = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, (64 << number) | pid[1] & 0x3f, pid[2], pid[3]).into()
}

/// Parses a line of JSON that a child printed.
fn parse(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("'{line}' is not a JSON report"))
}
