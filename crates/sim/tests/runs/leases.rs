//! Leases over a wire that loses, duplicates, reorders and breaks: many random runs, and defects that must show.
//! `RDMUX_SIM_RUNS` sets how many runs there are, `RDMUX_SIM_FIRST` their first seed; each failure prints the command that does
//! its run again.

use crate::many::{checked, many};
use rdmux_sim::leases::{Defect, Report, Settings, run};
use strum::VariantArray;

/// Number of runs in release.
const RUNS: u64 = 8_000;
/// Number of seeds within which each defect shows.
const DEFECT_SEEDS: u64 = 100;

/// Makes a run; returns its violation as the error.
fn violation(settings: &Settings) -> Result<Report, String> {
    checked(|| run(settings), |report| report.violation.as_ref())
}

#[test]
fn run__no_byte_lands_after_a_revocation_point() {
    many(RUNS, RUNS / 20, |seed| {
        let settings = Settings::drawn(seed);
        let report =
            violation(&settings).map_err(|what| format!("{what}\n  replay: {}", settings.replay()))?;
        Ok(report.counts.list())
    });
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
