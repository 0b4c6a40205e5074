//! `rdmux node`: owns a device and serves this user's applications on it.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use rdmux_share::node::Node;
use rdmux_verbs::Device;

use crate::output;

/// Own a device and share it with this user's applications.
///
/// Applications use the device through this process: `--provider shared`, or the environment variable RDMUX_PROVIDER=shared, which works for
/// any program. Queue pairs and engine are in this process; the applications' payload is not copied on the way. When an application ends, also
/// by a signal, this process destroys what it had. It runs until Ctrl-C or SIGTERM; its applications then have a device that has gone.
#[derive(Parser, Debug)]
pub(crate) struct Args {
    /// Local address of the device.
    #[arg(long = "device", value_name = "ADDRESS", default_value = "127.0.0.1")]
    address: IpAddr,
    /// Run on this CPU.
    #[arg(long, value_name = "CPU")]
    pin: Option<usize>,
    #[command(flatten)]
    device: super::device::DeviceArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    args.device.apply()?;
    if let Some(cpu) = args.pin {
        super::serve::pin(cpu)?;
    }
    let device = Device::open(args.address)?;
    ensure!(
        device.provider() != "shared",
        "a node needs a device of its own: give --provider soft or hw, and unset RDMUX_PROVIDER"
    );
    let provider = device.provider();
    let mut node = Node::open(device)?;
    let stopper = node.stopper();
    ctrlc::set_handler(move || stopper.stop()).context("cannot install signal handlers")?;
    output::say(&format!(
        "node of {} ({provider}): ready for applications",
        args.address
    ));
    // Does nothing unless systemd asked for it.
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        output::error(&anyhow::Error::new(error).context("cannot notify systemd that the node is ready"));
    }
    Ok(node.run()?)
}
