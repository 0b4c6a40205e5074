//! Distributed shared memory: one address space for processes of one host or many.
//!
//! [`protocol`] decides which node may access what, and [`sync`] which thread goes on: neither has I/O or a clock. [`memory`] changes what the threads of a process may do with
//! the pages of a region, and knows no other process. Nothing joins them yet.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;

pub mod memory;
mod peers;
pub mod protocol;
pub mod sync;

#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
