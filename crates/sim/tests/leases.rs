//! Leases over a wire that loses, duplicates, reorders and breaks: many random runs, and defects that must show.
//! `RDMUX_SIM_RUNS` sets how many runs there are, `RDMUX_SIM_FIRST` their first seed; each failure prints the command that does
//! its run again.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_sim::leases::{Counts, Defect, Report, Settings, run};
use strum::VariantArray;

/// Number of runs in release.
const RUNS: u64 = 8_000;
/// Number of seeds within which each defect shows.
const DEFECT_SEEDS: u64 = 100;

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
fn run__no_byte_lands_after_a_revocation_point() {
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
                Err(what) => failures.push(format!("{what}\n  replay: {}", settings.replay())),
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
    let never = counts.list().into_iter().find(|(_, count)| *count == 0);
    assert_eq!(never, None, "this never happened");
}

#[test]
fn run__is_a_function_of_its_seed() {
    for seed in 0..10 {
        let settings = Settings::drawn(seed);
        assert_eq!(run(&settings), run(&settings), "seed {seed}");
    }
}

#[test]
fn run__every_defect_shows() {
    for &defect in Defect::VARIANTS {
        let found = (0..DEFECT_SEEDS).find_map(|seed| {
            let settings = Settings {
                defect: Some(defect),
                ..Settings::drawn(seed)
            };
            violation(&settings).err().map(|what| (settings, what))
        });
        let (settings, what) =
            found.unwrap_or_else(|| panic!("{}: not seen in {DEFECT_SEEDS} seeds", defect.name()));
        println!(
            "{:<26} seed {:>3}: {what}\n  {}",
            defect.name(),
            settings.seed,
            settings.replay()
        );
    }
}
