//! Many runs by seed. `RDMUX_SIM_RUNS` sets how many; `RDMUX_SIM_SEED=N` replays one and prints its report.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_sim::{Ending, Report, Settings, run, run_connections, run_unreliable};

fn env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}={value} is no number")),
    )
}

/// Runs `settings_of` for many seeds on all cores; prints the seeds that fail.
fn many(test: &str, runs: u64, run: fn(&Settings) -> Report, settings_of: impl Fn(u64) -> Settings + Sync) {
    if let Some(seed) = env("RDMUX_SIM_SEED") {
        let report = run(&settings_of(seed));
        println!("{report}");
        assert_eq!(report.violation, None);
        return;
    }
    let runs = env("RDMUX_SIM_RUNS").unwrap_or(runs);
    let (next, failures) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let operations = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= runs || failures.lock().unwrap().len() >= 5 {
                        return;
                    }
                    let settings = settings_of(seed);
                    let what = match catch_unwind(|| run(&settings)) {
                        Ok(report) => {
                            operations.fetch_add(report.posted, Ordering::Relaxed);
                            report.violation
                        }
                        Err(_) => Some("panic".to_owned()),
                    };
                    if let Some(what) = what {
                        failures.lock().unwrap().push((seed, what));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    for (seed, what) in &failures {
        println!("seed {seed}: {what}");
        println!(
            "  replay: RDMUX_SIM_SEED={seed} cargo test --release -p rdmux-sim --test traffic {test} -- --nocapture"
        );
    }
    assert!(failures.is_empty(), "{} of {runs} runs failed", failures.len());
    println!("{test}: {runs} runs, {} operations", operations.into_inner());
}

const RUNS: u64 = if cfg!(debug_assertions) { 300 } else { 10_000 };

#[test]
fn every_operation_succeeds_exactly_once() {
    many(
        "every_operation_succeeds_exactly_once",
        RUNS,
        run,
        Settings::drawn,
    );
}

#[test]
fn what_ends_early_ends_as_specified() {
    many("what_ends_early_ends_as_specified", RUNS / 10, run, |seed| {
        Settings {
            ending: Ending::ALL[seed as usize % Ending::ALL.len()],
            ..Settings::drawn(seed)
        }
    });
}

#[test]
fn connections_come_and_go_as_their_users_want() {
    many(
        "connections_come_and_go_as_their_users_want",
        RUNS / 4,
        run_connections,
        |seed| Settings {
            operations: 20,
            ..Settings::drawn(seed)
        },
    );
}

#[test]
fn what_arrives_unreliably_is_what_was_sent() {
    many(
        "what_arrives_unreliably_is_what_was_sent",
        RUNS / 2,
        run_unreliable,
        Settings::drawn,
    );
}
