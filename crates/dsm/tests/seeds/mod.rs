//! Random runs, each of a seed.
//!
//! `RDMUX_DSM_RUNS=100000` sets their number, and `RDMUX_DSM_SEED=7` has one of them alone.

use rand_chacha::ChaCha8Rng;
use rand_core::RngCore;

/// Set to the number of runs.
const RUNS: &str = "RDMUX_DSM_RUNS";
/// `./test sim` makes more, in release.
const DEFAULT_RUNS: u64 = if cfg!(debug_assertions) { 100 } else { 1000 };
/// Set to the seed of the only run.
const SEED: &str = "RDMUX_DSM_SEED";

/// Returns a number below an end.
pub(crate) fn below(dice: &mut ChaCha8Rng, end: usize) -> usize {
    dice.next_u32() as usize % end
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|it| it.parse().ok())
}

/// Carries out the runs, each of which returns numbers of steps and of something else, and prints the sums.
pub(crate) fn run_all(run: fn(u64) -> (usize, usize), others: &str) {
    let seeds = match number(SEED) {
        Some(seed) => seed..seed + 1,
        None => 0..number(RUNS).unwrap_or(DEFAULT_RUNS),
    };
    println!("seeds {seeds:?}; {SEED}=N runs seed N alone");
    let runs = seeds.map(run);
    let sums = runs.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
    println!("{} steps, {} {others}", sums.0, sums.1);
}
