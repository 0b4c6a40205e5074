//! A distributed shared memory: one address space for processes of one host or many.
//!
//! [`protocol`] decides which node may access what, and has no I/O and no clock.
#![deny(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;

pub mod protocol;
