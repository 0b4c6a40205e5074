//! The provider `shared`: devices of nodes, for applications.
//!
//! `client` has the control connection with its thread, `rings` the rings and what is in flight; the other modules implement the traits of
//! [`rdmux_verbs::provider`] by them.

mod client;
mod cm;
mod cq;
mod device;
mod posted;
mod qp;
mod region;
mod rings;
mod srq;

use std::io;
use std::net::IpAddr;

use rdmux_verbs::provider::{self, Provider, Variable, capture_file};
use rdmux_verbs::{OpenError, Options};

pub use client::AttachError;

/// Makes the provider `shared` known to this process: [`rdmux_verbs::provider::register`].
pub fn register() {
    provider::register(&Shared);
}

/// Provider of the devices that nodes of this user serve.
#[derive(Debug)]
struct Shared;

impl Provider for Shared {
    fn name(&self) -> &'static str {
        "shared"
    }

    fn variables(&self) -> &'static [Variable] {
        const VARIABLES: &[Variable] = &[Variable {
            name: device::REPLAY_WRITE,
            words: &["0", "1"],
        }];
        VARIABLES
    }

    fn open(&self, address: IpAddr, options: &Options) -> Result<Box<dyn provider::Device>, OpenError> {
        if options.faults.is_some() {
            return Err(OpenError::Unsupported("fault injection"));
        }
        if capture_file().is_some() {
            return Err(OpenError::Unsupported("captures"));
        }
        let device = device::Device::open(address, options);
        Ok(Box::new(
            device.map_err(|error| OpenError::Provider(error.into()))?,
        ))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        crate::place::addresses()
    }
}
