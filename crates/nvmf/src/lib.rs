//! NVMe over Fabrics: a target that every NVMe host can use.
//!
//! The protocol has no I/O and no clock: [`target`] is the controller's side of commands, whatever the transport, [`tcp`] and [`rdma`] those of
//! connections of NVMe/TCP and NVMe/RDMA. [`server`] drives them on reactors, and [`control`] starts and changes all that as a user describes
//! it. A namespace is what a [`backend`] stores.
#![deny(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;

pub mod accelerator;
mod announce;
pub mod auth;
pub mod backend;
pub mod control;
pub mod host;
pub mod identity;
pub mod passthrough;
pub mod rdma;
pub mod reservations;
pub mod server;
mod slab;
pub mod target;
pub mod tcp;
pub mod tls;
