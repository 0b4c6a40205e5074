//! Many random runs of each kind, in one program: linked with optimization across crates, each program takes about as long to build as all.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod drive;
mod leases;
mod many;
#[cfg(feature = "mutants")]
mod mutants;
mod nvme;
mod power;
mod traffic;
