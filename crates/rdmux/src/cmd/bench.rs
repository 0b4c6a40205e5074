//! Pieces of the benchmarks that need this binary.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

#[derive(clap::Args, Debug)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    anyhow::bail!("not built")
}

/// Keeps this thread, and those that it starts from now on, on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on CPU {cpu}"))
}
