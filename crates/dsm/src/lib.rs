//! Distributed shared memory: one address space for processes of one host or many.
//!
//! [`memory`] changes what the threads of a process may do with the pages of a region; it knows no other process.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod memory;

#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
