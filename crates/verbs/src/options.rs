//! Opening of a device: options and errors.

use std::error::Error;
use std::io;
use std::net::IpAddr;

use rdmux_rnic::Traffic;
use rdmux_rnic::faults::{Spec, SpecError};

use crate::moderation::{ModerationPolicy, UnknownPolicy};
use crate::process;
use crate::provider::{self, UnknownProvider, Variable};
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
    /// Faults of the device's port, in both directions and over all carriers; `None`: as [`crate::set_process_faults`] or
    /// the environment variable `RDMUX_FAULT` says, else none. With faults, WRITE and READ within the host go by packets too.
    pub faults: Option<Spec>,
    /// Moderation of the completion queues whose users choose none ([`crate::CompletionQueue::moderate`]); `None`: as the environment variable
    /// `RDMUX_MODERATION` says, else none.
    pub moderation: Option<ModerationPolicy>,
    /// Allows a plain WRITE to take effect twice, where nobody knows whether it took effect as a queue pair failed that nodes share, since one of
    /// them has an RNIC. Otherwise such a WRITE completes with [`Status::RetryExceeded`](crate::Status::RetryExceeded). `None`: as the environment
    /// variable `RDMUX_REPLAY_WRITE` says (`1` or `0`), else not. Only for devices of nodes.
    pub replay_writes: Option<bool>,
    /// Name of the provider; `None`: as [`crate::set_process_provider`] or the environment variable `RDMUX_PROVIDER` says, else the first
    /// that was registered. Of the other options, an RNIC uses only [`Options::waiting`] and, if it can, [`Options::moderation`].
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

/// Variables of the environment that the devices of every provider heed.
const VARIABLES: &[Variable] = &[Variable {
    name: "RDMUX_WAIT",
    words: &["blocked", "interrupted", "running"],
}];

/// Checks the environment variables that [`Device::open`](crate::Device::open) reads. A misspelt value that counted as unset would
/// silently change the results of a program's measurements. The registered providers decide on the values.
pub fn check_environment() -> Result<(), OpenError> {
    let providers = provider::registered();
    if providers.is_empty() {
        return Err(OpenError::NoProvider);
    }
    let of_providers = providers.iter().flat_map(|provider| provider.variables());
    for variable in VARIABLES.iter().chain(of_providers) {
        check(variable.name, variable.words)?;
    }
    let names: Vec<&str> = providers.iter().map(|provider| provider.name()).collect();
    check("RDMUX_PROVIDER", &names)?;
    process::faults()?;
    process::moderation()?;
    Ok(())
}

/// Checks that a variable is unset, empty, or one of these words.
fn check(name: &'static str, words: &[&str]) -> Result<(), OpenError> {
    let value = std::env::var_os(name).unwrap_or_default();
    let value = value.to_string_lossy().into_owned();
    if value.is_empty() || words.contains(&value.as_str()) {
        return Ok(());
    }
    let takes = provider::one_of(words);
    Err(OpenError::Environment { name, value, takes })
}

impl SharedMemory {
    /// Returns whether this option and the environment allow it.
    pub fn is_on(self) -> bool {
        self == SharedMemory::Auto && std::env::var_os("RDMUX_SHM").is_none_or(|value| value != "off")
    }
}

/// Reason why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The address stands for several hosts, or for any host: peers could not send to it.
    #[error("{0} is not the address of one host: open a device on each address that peers use")]
    NotOneHost(IpAddr),
    /// No interface of this network namespace has that address.
    #[error(
        "{0} is no address of this host: `ip address` lists those there are, in each network namespace its own"
    )]
    NotLocal(IpAddr),
    /// The provider cannot open the device: its own error, which names the address or the device.
    #[error(transparent)]
    Provider(Box<dyn Error + Send + Sync>),
    /// No provider is registered.
    #[error(
        "this program has registered no provider of devices: call rdmux_soft::register() or rdmux_hw::register() first"
    )]
    NoProvider,
    /// No provider of the chosen name is registered.
    #[error(transparent)]
    UnknownProvider(#[from] UnknownProvider),
    /// The process or the options ask for a feature that devices of the provider lack.
    #[error("the device's provider does not offer {0}: choose another one, or do without")]
    Unsupported(&'static str),
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
    /// `RDMUX_MODERATION` names no moderation policy.
    #[error("RDMUX_MODERATION: {0}")]
    Moderation(#[from] UnknownPolicy),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: &'static str,
        /// Error that the system returned.
        source: io::Error,
    },
}
