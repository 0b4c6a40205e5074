//! Options that all commands which open devices have in common.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use rdmux_verbs::faults::Spec;
use rdmux_verbs::provider::{self, UnknownProvider};
use rdmux_verbs::{set_process_capture, set_process_faults, set_process_provider};

use crate::metrics;

/// How this command's devices are opened.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Provider of the device: `soft`, the RNIC in user space, `hw`, the host's RNIC that has the address, through the system's
    /// libibverbs and librdmacm (docs/hardware.md), or `shared`, the device of `rdmux node`. The environment variable RDMUX_PROVIDER does the same for any program. [default: soft]
    #[arg(long, value_name = "PROVIDER", value_parser = parse_provider)]
    provider: Option<&'static str>,
    /// Inject faults at the device's port, in both directions, such as loss=1%,delay=5ms,seed=7. The kinds are loss, dup, reorder, corrupt,
    /// delay, rate, rnr, down, qp-error, only and seed (docs/bad-network.md). The environment variable RDMUX_FAULT does the same for any
    /// program.
    #[arg(long, value_name = "SPEC")]
    fault: Option<Spec>,
    /// Capture the device's packets, sent and received, to a pcapng file (docs/capture.md). The environment variable RDMUX_CAPTURE does the
    /// same for any program.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Serve metrics for Prometheus over HTTP, for example at 127.0.0.1:9791, while the command runs; a PORT alone is on the loopback
    /// interface (docs/metrics.md).
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = metrics::parse_address)]
    metrics: Option<SocketAddr>,
}

fn parse_provider(name: &str) -> Result<&'static str, UnknownProvider> {
    Ok(provider::named(name)?.name())
}

impl DeviceArgs {
    /// Applies the options to this process. Must be called before a device is opened.
    pub(crate) fn apply(&self) -> Result<()> {
        if let Some(provider) = self.provider {
            set_process_provider(provider)?;
        }
        if let Some(spec) = self.fault {
            set_process_faults(spec);
        }
        if let Some(file) = &self.capture {
            set_process_capture(file);
        }
        self.metrics.map_or(Ok(()), metrics::serve_at)
    }
}
