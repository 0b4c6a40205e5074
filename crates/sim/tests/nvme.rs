//! NVMe over Fabrics: many random runs. `RDMUX_SIM_RUNS` sets how many runs there are, `RDMUX_SIM_FIRST` their first seed; each failure
//! prints the command that does its run again.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_sim::nvme::{Counts, Report, Settings, run};

/// Number of runs in release.
const RUNS: u64 = 5_000;

fn env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let parsed = value.parse();
    Some(parsed.unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Makes a run; returns its violation as the error.
fn violation(settings: &Settings) -> Result<Report, String> {
    match catch_unwind(|| run(settings)) {
        Ok(Report {
            violation: Some(what),
            ..
        }) => Err(what),
        Ok(report) => Ok(report),
        Err(_) => Err("panic".to_owned()),
    }
}

#[test]
fn run__nothing_acknowledged_is_lost() {
    let runs = if cfg!(debug_assertions) { RUNS / 20 } else { RUNS };
    let runs = env("RDMUX_SIM_RUNS").unwrap_or(runs);
    let first = env("RDMUX_SIM_FIRST").unwrap_or(0);
    let (next, end) = (AtomicU64::new(first), first + runs);
    let total: Mutex<(Counts, Vec<String>)> = Mutex::default();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || total.lock().unwrap().1.len() >= 5 {
                return;
            }
            let settings = Settings::drawn(seed);
            let found = violation(&settings);
            let (counts, failures) = &mut *total.lock().unwrap();
            match found {
                Ok(report) => counts.add(&report.counts),
                Err(what) => failures.push(format!("seed {seed}: {what}\n  replay: {}", settings.replay())),
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
    for (name, count) in counts.list() {
        println!("{name:<28} {count:>10}");
    }
    for failure in &failures {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "runs failed");
    // A single run need not have all of it.
    let never = counts.list().into_iter().find(|(_, count)| *count == 0);
    assert!(runs < 50 || never.is_none(), "this never happened: {never:?}");
}

#[test]
fn run__is_a_function_of_its_seed() {
    for seed in 0..10 {
        let settings = Settings::drawn(seed);
        assert_eq!(run(&settings), run(&settings), "seed {seed}");
    }
}
