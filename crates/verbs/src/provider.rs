//! The provider of an object. The types of the vocabulary hold an object of their provider, and do what all providers have in
//! common: they keep the objects that they depend on alive, and refuse to combine objects of different devices.

use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// Kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provider {
    /// The RNIC in user space, which every host has.
    #[default]
    Soft,
    /// An RNIC of the host, or its kernel's software RNIC, through the system's libraries.
    Hw,
}

/// Provider that [`set_process_provider`] set.
static PROCESS_PROVIDER: Mutex<Option<Provider>> = Mutex::new(None);

/// Chooses the provider of the devices that this process opens from then on, unless their options name one: for programs whose user
/// decides.
pub fn set_process_provider(provider: Provider) {
    *PROCESS_PROVIDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(provider);
}

impl Provider {
    /// Names of the providers, as users give them.
    pub const NAMES: [&str; 2] = ["soft", "hw"];

    /// Returns the provider of a device whose options do not name one, as set by [`set_process_provider`] or the environment
    /// variable `RDMUX_PROVIDER`.
    pub fn of_process() -> Provider {
        let set = *PROCESS_PROVIDER.lock().unwrap_or_else(PoisonError::into_inner);
        let of_environment = || std::env::var("RDMUX_PROVIDER").ok()?.parse().ok();
        set.or_else(of_environment).unwrap_or_default()
    }
}

impl FromStr for Provider {
    type Err = String;

    fn from_str(name: &str) -> Result<Provider, String> {
        match name {
            "soft" => Ok(Provider::Soft),
            "hw" => Ok(Provider::Hw),
            other => Err(format!("'{other}' is not a provider: give soft or hw")),
        }
    }
}

/// Object of a provider: of [`crate::soft`], or of an RNIC.
#[derive(Clone, Debug)]
pub(crate) enum Provided<S, H> {
    /// The RNIC in user space.
    Soft(S),
    /// An RNIC, through the system's libraries.
    Hw(H),
}

impl<S, H> Provided<S, H> {
    pub(crate) fn soft(&self) -> Option<&S> {
        match self {
            Provided::Soft(object) => Some(object),
            Provided::Hw(_) => None,
        }
    }

    pub(crate) fn hw(&self) -> Option<&H> {
        match self {
            Provided::Soft(_) => None,
            Provided::Hw(object) => Some(object),
        }
    }
}
