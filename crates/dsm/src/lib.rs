//! Distributed shared memory: one address space for processes of one host or many.
//!
//! [`protocol`] decides which node may access what, and has no I/O and no clock. [`memory`] changes what the threads of a process may do with
//! the pages of a region, and knows no other process. Nothing joins the two yet.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;

pub mod memory;
pub mod protocol;

/// Access to a unit or a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reading.
    Read,
    /// Writing, and reading.
    Write,
}

#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
