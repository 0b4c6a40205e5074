//! The `soft` provider of [`rdmux_verbs`]: an RNIC in user space, which speaks RoCEv2 over UDP, and shares memory with devices of the same
//! user within a host. Every host has it. A program that opens such devices calls [`register`] first.
//!
//! `engine` drives [`rdmux_rnic`]; `group` shares port 4791 of an address among processes; `shm` connects to the engines of other processes;
//! the other modules stand around them, or implement the traits of [`rdmux_verbs::provider`] by them.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]
#![cfg_attr(
    test,
    allow(
        clippy::duplicate_mod,
        reason = "loom tries the same files on atomics of its own"
    )
)]

pub mod capture;
mod cm;
mod device;
mod engine;
mod engines;
pub mod faults;
#[doc(hidden)]
pub mod fuzz;
pub mod group;
mod mcast;
pub mod metrics;
mod port;
mod qp;
mod region;
mod shm;
mod sidr;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
mod srq;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod udp;

use std::io;
use std::net::{IpAddr, UdpSocket};

use rdmux_verbs::interface::local_addresses;
use rdmux_verbs::provider::{self, Provider, Variable};
use rdmux_verbs::{OpenError, Options};

/// Protocols between the processes of one host, with their versions. Processes with different versions do not work together, and say so.
pub const LOCAL_PROTOCOLS: [(&str, u16); 2] = [
    ("group of processes", group::message::VERSION),
    ("shared memory", shm::message::VERSION),
];

/// Makes the provider `soft` known to this process: [`rdmux_verbs::provider::register`].
pub fn register() {
    provider::register(&Soft);
}

/// Provider of devices in user space, which every host has.
#[derive(Debug)]
struct Soft;

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
                name: "RDMUX_CONVERT",
                words: &["on", "off", "user-mode"],
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
