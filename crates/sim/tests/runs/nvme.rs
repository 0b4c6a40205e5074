//! NVMe over Fabrics: many random runs. `RDMUX_SIM_RUNS` sets how many runs there are, `RDMUX_SIM_FIRST` their first seed; each failure
//! prints the command that does its run again.

use crate::many::{checked, many};
use rdmux_sim::nvme::{Settings, run};

/// Number of runs in release.
const RUNS: u64 = 3_000;

#[test]
fn run__nothing_acknowledged_is_lost() {
    many(RUNS, RUNS / 20, |seed| {
        let settings = Settings::drawn(seed);
        let report = checked(|| run(&settings), |report| report.violation.as_ref());
        let report = report.map_err(|what| format!("{what}\n  replay: {}", settings.replay()))?;
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
