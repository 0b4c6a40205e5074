//! Opening of a device: options and errors.

use std::io;
use std::net::IpAddr;

use rdmux_rnic::Traffic;
use rdmux_rnic::faults::{Spec, SpecError};

use crate::provider::{self, UnknownProvider};
use crate::soft::capture::CaptureError;
use crate::soft::faults;
use crate::soft::group::GroupError;
use crate::waiting::WaitMode;

/// Options for opening a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Way in which callers and the device's own thread wait for the device; `None`: as the environment variable `RDMUX_WAIT` says
    /// (`blocked`, `interrupted` or `running`), else whatever costs least ([`crate::waiting`]). With [`WaitMode::Running`] the thread
    /// keeps one CPU busy.
    pub waiting: Option<WaitMode>,
    /// Bytes of the socket's receive buffer to ask for; `None` takes what the system grants, up to 8 MiB.
    pub receive_buffer_bytes: Option<usize>,
    /// Sharing of the device's bandwidth among queue pairs, and congestion control.
    pub traffic: Traffic,
    /// Use of shared memory between this device and others of the same user on this host.
    pub shared_memory: SharedMemory,
    /// Faults of the device's port, in both directions and over all carriers; `None`: as [`crate::soft::faults::set_process_faults`] or
    /// the environment variable `RDMUX_FAULT` says, else none. With faults, WRITE and READ within the host go by packets too.
    pub faults: Option<Spec>,
    /// Name of the provider; `None`: as [`crate::set_process_provider`] or the environment variable `RDMUX_PROVIDER` says, else the first
    /// that was registered. Of the other options, an RNIC uses [`Options::waiting`] alone.
    pub provider: Option<&'static str>,
}

/// Use of shared memory between devices of one user on one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedMemory {
    /// Wherever both ends can, unless the environment variable `RDMUX_SHM` is `off`.
    #[default]
    Auto,
    /// Never: all packets are sent by UDP.
    Off,
}

/// Environment variables that take one of a few words: name, words, description.
const VARIABLES: [(&str, &[&str], &str); 3] = [
    ("RDMUX_SHM", &["on", "off"], "on or off"),
    (
        "RDMUX_TRACE",
        &["off", "events", "packets"],
        "off, events or packets",
    ),
    (
        "RDMUX_WAIT",
        &["blocked", "interrupted", "running"],
        "blocked, interrupted or running",
    ),
];

/// Checks the environment variables that [`Device::open`](crate::Device::open) reads. A misspelt value that counted as unset would
/// silently change the results of a program's measurements.
pub fn check_environment() -> Result<(), OpenError> {
    for (name, words, takes) in VARIABLES {
        let Some(value) = std::env::var_os(name) else {
            continue;
        };
        let value = value.to_string_lossy().into_owned();
        if !value.is_empty() && !words.contains(&value.as_str()) {
            let takes = takes.into();
            return Err(OpenError::Environment { name, value, takes });
        }
    }
    if let Some(value) = std::env::var_os("RDMUX_PROVIDER").filter(|value| !value.is_empty()) {
        let (name, value) = ("RDMUX_PROVIDER", value.to_string_lossy().into_owned());
        if provider::named(&value).is_err() {
            let takes = provider::names();
            return Err(OpenError::Environment { name, value, takes });
        }
    }
    faults::of_process()?;
    Ok(())
}

impl SharedMemory {
    pub(super) fn is_on(self) -> bool {
        self == SharedMemory::Auto && std::env::var_os("RDMUX_SHM").is_none_or(|value| value != "off")
    }
}

/// Reason why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The address stands for several hosts, or for any host: peers could not send to it.
    #[error("{0} is not the address of one host: open a device on each address that peers use")]
    NotOneHost(IpAddr),
    /// The address cannot be used, its port is taken, or another user has it.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The RNIC cannot be used.
    #[error(transparent)]
    Hw(#[from] crate::hw::OpenError),
    /// No provider is registered.
    #[error(
        "this process has no provider of devices: call `register` of a provider's crate before it opens a device"
    )]
    NoProvider,
    /// No provider of the chosen name is registered.
    #[error(transparent)]
    UnknownProvider(#[from] UnknownProvider),
    /// The options ask an RNIC for a feature that only the soft device has.
    #[error("{0} exist only for soft devices, not for an RNIC of provider hw")]
    SoftOnly(&'static str),
    /// An environment variable has a value that it does not take.
    #[error("{name}={value}: it takes {takes}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that it takes.
        takes: String,
    },
    /// `RDMUX_FAULT` is not a valid fault specification.
    #[error("RDMUX_FAULT: {0}")]
    Faults(#[from] SpecError),
    /// The capture file of the device cannot be created.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: &'static str,
        /// Error that the system returned.
        source: io::Error,
    },
}
