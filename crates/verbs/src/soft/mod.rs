//! The `soft` provider: the RNIC in user space, over UDP, and over shared memory within a host.

pub mod capture;
pub(crate) mod cm;
pub(crate) mod device;
pub(crate) mod engine;
mod engines;
pub mod faults;
#[doc(hidden)]
pub mod fuzz;
pub mod group;
mod mcast;
pub mod metrics;
pub(crate) mod port;
pub(crate) mod qp;
pub(crate) mod region;
pub(crate) mod shm;
pub(crate) mod sidr;
pub(crate) mod srq;
pub mod trace;
pub mod udp;

use std::io;
use std::net::{IpAddr, UdpSocket};

use crate::interface::local_addresses;
use crate::options::{OpenError, Options};
use crate::provider::{self, Provider, Variable};

/// Protocols between the processes of one host, with their versions. Processes with different versions do not work together, and say so.
pub const LOCAL_PROTOCOLS: [(&str, u16); 2] = [
    ("group of processes", group::message::VERSION),
    ("shared memory", shm::message::VERSION),
];

/// Provider of devices in user space, which every host has.
#[derive(Debug)]
pub struct Soft;

impl Provider for Soft {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn variables(&self) -> &'static [Variable] {
        const VARIABLES: &[Variable] = &[
            Variable {
                name: "RDMUX_SHM",
                words: &["on", "off"],
            },
            Variable {
                name: "RDMUX_TRACE",
                words: &["off", "events", "packets"],
            },
        ];
        VARIABLES
    }

    fn open(&self, address: IpAddr, options: &Options) -> Result<Box<dyn provider::Device>, OpenError> {
        Ok(Box::new(device::Device::open(address, *options)?))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        // An IPv6 address may be there and not yet, or no more, be usable.
        let is_usable = |address: &IpAddr| UdpSocket::bind((*address, 0)).is_ok();
        let all = local_addresses()?.into_iter();
        Ok(all.filter(is_usable).collect())
    }
}
