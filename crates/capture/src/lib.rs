//! Captures of RoCEv2: files of packets, and a checker that judges them.
//!
//! No I/O, no clock. [`pcapng`] writes and reads files in memory; [`check::Checker`] names each packet for which a peer would drop it.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod check;
pub mod pcapng;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of `wire` use all of it")]
#[path = "../../wire/src/vectors.rs"]
mod vectors;
