//! Each deliberate defect of the engine is caught by a run within a bounded number of seeds.

use std::panic::catch_unwind;

use rdmux_rnic::mutant::{self, Mutant};
use rdmux_sim::{Ending, Report, Settings, run, run_unreliable};

/// Runs tried for each defect.
const SEEDS: u64 = 1000;

/// The first seed whose run shows the defect, and what it shows.
fn caught(mutant: Mutant) -> Option<(u64, String)> {
    mutant::set(Some(mutant));
    let found = (0..SEEDS).find_map(|seed| {
        let settings = Settings {
            ending: match seed % 6 {
                3 => Ending::PeerVanishes,
                4 => Ending::UserError,
                5 => Ending::OutOfBounds,
                _ => Ending::None,
            },
            ..Settings::drawn(seed)
        };
        let runs: [fn(&Settings) -> Report; 2] = [run_unreliable, run];
        let violation = |run: fn(&Settings) -> Report| match catch_unwind(|| run(&settings)) {
            Ok(report) => report.violation,
            Err(_) => Some("panic".to_owned()),
        };
        Some((seed, runs.into_iter().find_map(violation)?))
    });
    mutant::set(None);
    found
}

#[test]
fn every_mutant_is_caught() {
    let mut missed = Vec::new();
    for mutant in Mutant::SIMULATED {
        match caught(mutant) {
            Some((seed, what)) => println!("{:<22} seed {seed:>3}: {what}", format!("{mutant:?}")),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not caught within {SEEDS} seeds: {missed:?}");
}

#[test]
fn without_a_mutant_nothing_is_caught() {
    mutant::set(None);
    for seed in 0..20 {
        for run in [run, run_unreliable] {
            assert_eq!(run(&Settings::drawn(seed)).violation, None, "seed {seed}");
        }
    }
}
