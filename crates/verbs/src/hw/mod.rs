//! The `hw` provider: an RNIC, or the kernel's `rxe` or `siw`, through the system's `libibverbs` and `librdmacm`, which are opened at run
//! time. `docs/hardware.md` says what it offers.
//!
//! [`crate::abi`] has the libraries' structures, `library` their functions. `objects` and `cma` wrap their objects into values and are,
//! with `library`, the only places with unsafe code. The other modules speak the vocabulary of this crate over them.

pub(crate) mod cm;
mod cma;
pub(crate) mod cq;
pub(crate) mod device;
mod library;
pub mod metrics;
mod objects;
pub(crate) mod qp;
pub(crate) mod region;
mod resources;
pub(crate) mod sidr;
pub(crate) mod srq;

pub use device::OpenError;
pub use library::LibraryError;

use std::io;
use std::net::IpAddr;

use crate::process::capture_file;
use crate::provider::{self, Provider};

/// Provider of the RNICs of the host, and of its kernel's software RNICs, through the system's libraries.
#[derive(Debug)]
pub struct Hw;

impl Provider for Hw {
    fn name(&self) -> &'static str {
        "hw"
    }

    fn open(
        &self,
        address: IpAddr,
        options: &crate::Options,
    ) -> Result<Box<dyn provider::Device>, crate::OpenError> {
        if options.faults.is_some() {
            return Err(crate::OpenError::Unsupported("fault injection"));
        }
        if capture_file().is_some() {
            return Err(crate::OpenError::Unsupported("captures"));
        }
        let device = device::Device::open(address, options.waiting);
        Ok(Box::new(
            device.map_err(|error| crate::OpenError::Provider(error.into()))?,
        ))
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
