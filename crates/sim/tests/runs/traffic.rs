//! Many runs by seed, of four kinds, which must together see all that the engine has. `RDMUX_SIM_RUNS` sets how many there are of each
//! kind, `RDMUX_SIM_FIRST` their first seed; `RDMUX_SIM_SEED=N` replays one of the kind that the test's filter names and prints its report.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::many::{self, env};
use rdmux_sim::{Ending, Report, Seen, Settings, run, run_connections, run_unreliable};

/// Minimum number of operations that the runs of a test post in release.
const OPERATIONS_MIN: u64 = 1_000_000;

/// A kind of run.
struct Kind {
    /// Property that must hold.
    name: &'static str,
    /// Number of its runs in release.
    runs: u64,
    run: fn(&Settings) -> Report,
    settings_of: fn(u64) -> Settings,
}

const KINDS: [Kind; 4] = [
    Kind {
        name: "every_operation_succeeds_exactly_once",
        runs: 8_000,
        run,
        settings_of: Settings::drawn,
    },
    Kind {
        name: "what_ends_early_ends_as_specified",
        runs: 5_100,
        run,
        settings_of: |seed| Settings {
            ending: Ending::ALL[seed as usize % Ending::ALL.len()],
            ..Settings::drawn(seed)
        },
    },
    Kind {
        name: "connections_come_and_go_as_their_users_want",
        runs: 8_000,
        run: run_connections,
        settings_of: |seed| Settings {
            operations: 20,
            ..Settings::drawn(seed)
        },
    },
    Kind {
        name: "what_arrives_unreliably_is_what_was_sent",
        runs: 5_000,
        run: run_unreliable,
        settings_of: Settings::drawn,
    },
];

/// Result of many runs.
#[derive(Default)]
struct Total {
    operations: u64,
    seen: Seen,
    failures: Vec<(u64, String)>,
}

impl Kind {
    fn runs(&self) -> u64 {
        many::runs(self.runs, 40)
    }

    /// Makes runs for many seeds on all cores.
    fn many(&self) -> Total {
        let first = env("RDMUX_SIM_FIRST").unwrap_or(0);
        let (next, end) = (AtomicU64::new(first), first + self.runs());
        let total = Mutex::new(Total::default());
        let work = || {
            let mut own = Total::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= end || total.lock().unwrap().failures.len() >= 5 {
                    break;
                }
                let settings = (self.settings_of)(seed);
                let what = match catch_unwind(|| (self.run)(&settings)) {
                    Ok(report) => {
                        own.operations += report.posted;
                        own.seen.add(&report.seen);
                        report.violation
                    }
                    Err(_) => Some("panic".to_owned()),
                };
                if let Some(what) = what {
                    total.lock().unwrap().failures.push((seed, what));
                }
            }
            let mut total = total.lock().unwrap();
            total.operations += own.operations;
            total.seen.add(&own.seen);
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(work);
            }
        });
        total.into_inner().unwrap()
    }

    fn replay(&self, seed: u64) {
        let report = (self.run)(&(self.settings_of)(seed));
        println!("{report}");
        assert_eq!(report.violation, None);
    }

    fn print_failures(&self, failures: &[(u64, String)]) {
        for (seed, what) in failures {
            println!("{} seed {seed}: {what}", self.name);
            println!(
                "  replay: RDMUX_SIM_SEED={seed} cargo test --release -p rdmux-sim --test runs traffic::replay::{} -- --nocapture",
                self.name
            );
        }
    }
}

#[test]
fn all_runs_hold_and_see_everything() {
    if env("RDMUX_SIM_SEED").is_some() {
        return;
    }
    let (mut operations, mut failed, mut seen) = (0, 0, Seen::default());
    for kind in &KINDS {
        let total = kind.many();
        kind.print_failures(&total.failures);
        println!(
            "{:<44} {:>8} runs {:>10} operations",
            kind.name,
            kind.runs(),
            total.operations
        );
        operations += total.operations;
        failed += total.failures.len();
        seen.add(&total.seen);
    }
    assert_eq!(failed, 0, "runs failed");
    println!("{operations} operations in all\n\n{seen}");
    if many::are_all() {
        assert!(operations >= OPERATIONS_MIN, "{operations} operations");
        assert_eq!(seen.missing(), [""; 0], "never seen");
    }
}

/// Replays a run of each kind by one seed, when there is one.
mod replay {
    use super::{KINDS, env};

    fn kind(name: &str) {
        if let Some(seed) = env("RDMUX_SIM_SEED") {
            let kind = KINDS.iter().find(|kind| kind.name == name);
            kind.expect("a kind of that name").replay(seed);
        }
    }

    #[test]
    fn every_operation_succeeds_exactly_once() {
        kind("every_operation_succeeds_exactly_once");
    }

    #[test]
    fn what_ends_early_ends_as_specified() {
        kind("what_ends_early_ends_as_specified");
    }

    #[test]
    fn connections_come_and_go_as_their_users_want() {
        kind("connections_come_and_go_as_their_users_want");
    }

    #[test]
    fn what_arrives_unreliably_is_what_was_sent() {
        kind("what_arrives_unreliably_is_what_was_sent");
    }
}
