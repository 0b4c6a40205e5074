//! NVMe over Fabrics: a target that every NVMe host can use.
//!
//! The protocol has no I/O and no clock: [`target`] is the controller's side of commands, whatever the transport, and [`tcp`] that of a
//! connection of NVMe/TCP. [`server`] drives them on reactors. A namespace is what a [`backend`] stores.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod auth;
pub mod backend;
pub mod identity;
pub mod server;
pub mod target;
pub mod tcp;
