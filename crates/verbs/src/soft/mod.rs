//! The `soft` provider: the RNIC in user space, over UDP, and over shared memory within a host.

pub mod capture;
pub(crate) mod cm;
pub(crate) mod device;
pub(crate) mod engine;
pub mod faults;
#[doc(hidden)]
pub mod fuzz;
pub mod group;
pub(crate) mod load;
mod mcast;
pub mod metrics;
pub(crate) mod port;
pub(crate) mod qp;
pub(crate) mod region;
pub mod resources;
pub(crate) mod shm;
pub(crate) mod sidr;
pub(crate) mod srq;
pub mod trace;
pub mod udp;
mod user;

/// Protocols between the processes of one host, with their versions. Processes with different versions do not work together, and say so.
pub const LOCAL_PROTOCOLS: [(&str, u16); 2] = [
    ("group of processes", group::message::VERSION),
    ("shared memory", shm::message::VERSION),
];
