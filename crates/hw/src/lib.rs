//! The `hw` provider of [`rdmux_verbs`]: an RNIC, or the kernel's `rxe` or `siw`, through the system's `libibverbs` and `librdmacm`, which
//! are opened at run time. A program that opens such devices calls [`register`] first. `docs/hardware.md` says what the provider offers.
//!
//! [`rdmux_verbs::abi`] has the libraries' structures, `library` their functions. `objects` and `cma` wrap their objects into values and are,
//! with `library`, the only places with unsafe code. The other modules speak the vocabulary over them.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod answer;
mod cm;
mod cma;
mod cq;
mod device;
mod library;
pub mod metrics;
mod objects;
mod qp;
mod region;
mod resources;
mod sidr;
mod srq;

pub use device::OpenError;
pub use library::LibraryError;

use std::io;
use std::net::IpAddr;

use rdmux_verbs::provider::{self, Provider, capture_file};

/// Makes the provider `hw` known to this process: [`rdmux_verbs::provider::register`].
pub fn register() {
    provider::register(&Hw);
}

/// Provider of the RNICs of the host, and of its kernel's software RNICs, through the system's libraries.
#[derive(Debug)]
struct Hw;

impl Provider for Hw {
    fn name(&self) -> &'static str {
        "hw"
    }

    fn open(
        &self,
        address: IpAddr,
        options: &rdmux_verbs::Options,
    ) -> Result<Box<dyn provider::Device>, rdmux_verbs::OpenError> {
        if options.faults.is_some() {
            return Err(rdmux_verbs::OpenError::Unsupported("fault injection"));
        }
        if capture_file().is_some() {
            return Err(rdmux_verbs::OpenError::Unsupported("captures"));
        }
        let device = device::Device::open(address, options);
        Ok(Box::new(device.map_err(|error| {
            rdmux_verbs::OpenError::Provider(error.into())
        })?))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        let mut addresses = Vec::new();
        for (_, address) in device::devices() {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(addresses)
    }
}
