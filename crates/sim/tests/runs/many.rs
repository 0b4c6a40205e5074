//! Many runs by seed, on all cores. `RDMUX_SIM_RUNS` sets how many there are, `RDMUX_SIM_FIRST` their first seed.

use std::panic::{UnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts by name.
pub(crate) type Counted = Vec<(&'static str, u64)>;

/// Returns the number in an environment variable.
pub(crate) fn env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let parsed = value.parse();
    Some(parsed.unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Returns the number of runs: a part of those in release without optimization, or as it is set.
pub(crate) fn runs(in_release: u64, divisor: u64) -> u64 {
    let runs = match cfg!(debug_assertions) {
        true => in_release / divisor,
        false => in_release,
    };
    env("RDMUX_SIM_RUNS").unwrap_or(runs)
}

/// Returns true if there are as many runs as in release: they must have all that can happen.
pub(crate) fn are_all() -> bool {
    !cfg!(debug_assertions) && env("RDMUX_SIM_RUNS").is_none()
}

/// Makes a run; returns its violation, or that it has panicked, as the error.
pub(crate) fn checked<R>(
    run: impl FnOnce() -> R + UnwindSafe,
    violation: impl Fn(&R) -> Option<&String>,
) -> Result<R, String> {
    let report = catch_unwind(run).map_err(|_| "panic".to_owned())?;
    match violation(&report) {
        Some(what) => Err(what.clone()),
        None => Ok(report),
    }
}

/// Makes runs on all cores, prints their results, and returns the counts. At most a few fail before it gives up. From `have_all` runs on, all that is
/// counted has to have happened.
pub(crate) fn many(
    in_release: u64,
    have_all: u64,
    one: impl Fn(u64) -> Result<Counted, String> + Sync,
) -> Counted {
    let runs = runs(in_release, 20);
    let first = env("RDMUX_SIM_FIRST").unwrap_or(0);
    let (next, end) = (AtomicU64::new(first), first + runs);
    let total: Mutex<(Counted, Vec<String>)> = Mutex::default();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || total.lock().unwrap().1.len() >= 5 {
                return;
            }
            let found = one(seed);
            let (counts, failures) = &mut *total.lock().unwrap();
            match found {
                Ok(counted) if counts.is_empty() => *counts = counted,
                Ok(counted) => {
                    for (sum, (_, count)) in counts.iter_mut().zip(counted) {
                        sum.1 += count;
                    }
                }
                Err(what) => failures.push(format!("seed {seed}: {what}")),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let (counts, failures) = total.into_inner().unwrap();
    println!("{runs} runs from seed {first}");
    for (name, count) in &counts {
        println!("{name:<28} {count:>10}");
    }
    for failure in &failures {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "runs failed");
    let never = counts.iter().find(|(_, count)| *count == 0);
    assert!(
        never.is_none() || runs < have_all,
        "this never happened: {never:?}"
    );
    counts
}
