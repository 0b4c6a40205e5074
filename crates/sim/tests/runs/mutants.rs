//! Each deliberate defect of the engine is caught by a simulated run within a bounded number of seeds.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdmux_rnic::mutant::{self, Mutant};
use rdmux_sim::goodput::{LinkProperties, Streams, measure};
use rdmux_sim::{Ending, Report, Settings, run, run_connections, run_unreliable};
use rdmux_sim::{drive, leases, nvme, power};

/// Number of seeds tried for each defect.
const SEEDS: u64 = 1200;
/// As [`SEEDS`], for runs of NVMe over Fabrics: some defects need two rare events.
const NVME_SEEDS: u64 = 5000;
/// Seeds after which goodput is measured too: a defect that harms only goodput shows in no other way.
const GOODPUT_AFTER: u64 = 30;

/// A kind of run: its name, and its runs for each of [`SEEDS`] (some are shorter than others).
type Kind = (&'static str, fn(&Settings) -> Report, u64);

const KINDS: [Kind; 3] = [
    ("traffic", run, 1),
    ("unreliable", run_unreliable, 1),
    ("connections", run_connections, 4),
];

/// Returns the settings of a run. The endings take turns, with none among them, and every other run is within a machine.
fn settings(kind: &str, seed: u64) -> Settings {
    let drawn = Settings::drawn(seed);
    match kind {
        "traffic" => Settings {
            ending: match seed as usize % (Ending::ALL.len() + 1) {
                0 => Ending::None,
                n => Ending::ALL[n - 1],
            },
            one_machine: seed.is_multiple_of(2),
            ..drawn
        },
        "connections" => Settings {
            operations: 20,
            ..drawn
        },
        // Links within a machine lose some of the packets that are not retransmitted.
        _ => Settings {
            one_machine: false,
            ..drawn
        },
    }
}

/// Returns the share of a link that a stream gets at a loss of 5 %, retransmitting selectively.
fn goodput() -> f64 {
    let link = LinkProperties {
        bits_per_second: 10_000_000_000,
        round_trip_ns: 1_000_000,
        loss_percent: 5.0,
        queue_bytes_max: 1 << 20,
        marking: None,
    };
    let streams = Streams {
        seed: 1,
        senders: 1,
        message_bytes: 1 << 20,
        posted: 4,
        path_mtu: 1024,
        window_bytes: 2 << 20,
        selective: true,
        timeout: 14,
        warm_up_ns: 5_000_000,
        measured_ns: 100_000_000,
    };
    measure(&link, &streams).share_of(&link, &streams)
}

/// Returns the first run that shows the defect, and its violation.
fn caught(mutant: Mutant, healthy: f64) -> Option<String> {
    mutant::set(Some(mutant));
    let found = (0..SEEDS).find_map(|seed| {
        let in_a_run = KINDS.into_iter().find_map(|(kind, run, runs)| {
            (seed * runs..(seed + 1) * runs).find_map(|seed| {
                let what = match catch_unwind(|| run(&settings(kind, seed))) {
                    Ok(report) => report.violation?,
                    Err(_) => "panic".to_owned(),
                };
                Some(format!("{kind:<11} seed {seed:>4}: {what}"))
            })
        });
        in_a_run.or_else(|| {
            let share = (seed == GOODPUT_AFTER).then(|| catch_unwind(goodput).unwrap_or(0.0))?;
            (share < 0.95 * healthy)
                .then(|| format!("{:<11} seed    1: {share:.3} instead of {healthy:.3}", "goodput"))
        })
    });
    mutant::set(None);
    found
}

#[test]
fn every_mutant_is_caught() {
    let healthy = goodput();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let look = || {
        while let Some(mutant) = Mutant::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            match caught(*mutant, healthy) {
                Some(what) => println!("{:<26} {what}", format!("{mutant:?}")),
                None => missed.lock().unwrap().push(*mutant),
            }
        }
    };
    // The switch belongs to a thread, so defects can be tried side by side.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(look);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(Mutant::ALL.len() >= 50, "there are only {}", Mutant::ALL.len());
    assert!(missed.is_empty(), "not caught within {SEEDS} seeds: {missed:?}");
}

#[test]
fn without_a_mutant_nothing_is_caught() {
    for (kind, run, _) in KINDS {
        for seed in 0..30 {
            assert_eq!(run(&settings(kind, seed)).violation, None, "{kind} seed {seed}");
        }
    }
}

/// Checks that the run of some seed shows the defect; prints the first such seed and its violation.
fn first_found(mutant: Mutant, run: impl Fn(u64) -> Option<String> + std::panic::RefUnwindSafe) {
    mutant::set(Some(mutant));
    let found = (0..SEEDS).find_map(|seed| {
        let what = catch_unwind(|| run(seed)).unwrap_or_else(|_| Some("panic".to_owned()))?;
        Some(format!("seed {seed:>4}: {what}"))
    });
    mutant::set(None);
    match found {
        Some(what) => println!("{:<26} {what}", format!("{mutant:?}")),
        None => panic!("{mutant:?}: not caught within {SEEDS} seeds"),
    }
}

/// Checks that power cuts, too, show defects of the engine that concern durability.
#[test]
fn power_cuts_catch_what_concerns_them() {
    for mutant in [
        Mutant::AckBeforePlacement,
        Mutant::FlushAnsweredEarly,
        Mutant::FlushShort,
        Mutant::AtomicPassesFlush,
    ] {
        first_found(mutant, |seed| {
            let settings = power::Settings {
                platform: power::Platform::ADR_CACHED,
                ..power::Settings::drawn(seed)
            };
            power::run(&settings).violation
        });
    }
}

/// Checks that revoked mappings show defects of the engine that concern acknowledgements.
#[test]
fn leases_catch_what_concerns_them() {
    for mutant in [Mutant::FlushAnsweredEarly, Mutant::GapAccepted] {
        first_found(mutant, |seed| {
            leases::run(&leases::Settings::drawn(seed)).violation
        });
    }
}

/// Runs each defect until a run shows it, and prints its first run that does. Returns those that none has shown.
fn missed<M: Copy + std::fmt::Debug>(
    all: &[M],
    set: impl Fn(Option<M>),
    seeds: u64,
    run: impl Fn(u64) -> Option<String> + std::panic::RefUnwindSafe,
) -> Vec<M> {
    let missed = all.iter().copied().filter(|mutant| {
        set(Some(*mutant));
        let found = (0..seeds).find_map(|seed| {
            let what = catch_unwind(|| run(seed)).unwrap_or_else(|_| Some("panic".to_owned()))?;
            Some(format!("seed {seed:>4}: {what}"))
        });
        set(None);
        println!(
            "{:<26} {}",
            format!("{mutant:?}"),
            found.as_deref().unwrap_or("not caught")
        );
        found.is_none()
    });
    missed.collect()
}

/// Checks that runs of NVMe over Fabrics show each defect of the target.
#[test]
fn nvme_catches_every_defect_of_the_target() {
    use rdmux_nvmf::mutant::{Mutant, set};

    assert!(Mutant::ALL.len() >= 16, "there are only {}", Mutant::ALL.len());
    let run = |seed| nvme::run(&nvme::Settings::drawn(seed)).violation;
    let missed = missed(Mutant::ALL, set, NVME_SEEDS, run);
    assert!(
        missed.is_empty(),
        "not caught within {NVME_SEEDS} seeds: {missed:?}"
    );
}

/// Checks that runs on the model of a drive show each defect of its driver.
#[test]
fn drive_catches_every_defect_of_the_driver() {
    use rdmux_drive::mutant::{Mutant, set};

    assert!(Mutant::ALL.len() >= 16, "there are only {}", Mutant::ALL.len());
    let run = |seed| drive::run(&drive::Settings::drawn(seed)).violation;
    let missed = missed(Mutant::ALL, set, SEEDS, run);
    assert!(missed.is_empty(), "not caught within {SEEDS} seeds: {missed:?}");
}

/// Checks that nothing but the ledger shows a copy of data through the host's memory: the data are right, and all memory is the driver's own.
#[test]
fn drive_catches_a_secret_copy_by_the_ledger() {
    use rdmux_drive::mutant::{Mutant, set};

    set(Some(Mutant::CopiedThroughDram));
    let found = (0..SEEDS).filter_map(|seed| {
        let settings = drive::Settings {
            trouble: drive::Trouble::None,
            ..drive::Settings::drawn(seed)
        };
        drive::run(&settings).violation
    });
    let found: Vec<String> = found.take(10).collect();
    set(None);
    assert_eq!(found.len(), 10, "within {SEEDS} seeds");
    let others: Vec<_> = found
        .iter()
        .filter(|what| !what.contains("bytes of data on root-"))
        .collect();
    assert!(others.is_empty(), "{others:?}");
}
