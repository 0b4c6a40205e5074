//! Power cuts: 10,000 at random moments; the table of durability by platform and method; defects that must show. `RDMUX_SIM_RUNS` sets how
//! many runs there are, `RDMUX_SIM_FIRST` their first seed; each failure prints the command that does its run again.

use crate::many::{are_all, checked, many};
use rdmux_sim::power::{
    Counted, Defect, Domain, LogDefect, Method, Platform, Report, Settings, Verdict, run, run_log,
    run_log_everywhere,
};
use strum::VariantArray;

/// Minimum number of power cuts of all random runs in release.
const CUTS_MIN: u64 = 10_000;
/// Number of runs in release, of three to four cuts each.
const RUNS: u64 = 3_000;
/// Number of runs of a log in release, of three to four cuts each.
const LOG_RUNS: u64 = 2_000;
/// Number of seeds within which each defect shows.
const DEFECT_SEEDS: u64 = 200;
/// Number of runs of each cell of the table.
const CELL_RUNS: u64 = if cfg!(debug_assertions) { 20 } else { 60 };

/// Makes a run; returns its violation as the error.
fn violation(settings: &Settings) -> Result<Report, String> {
    checked(|| run(settings), |report| report.violation.as_ref())
}

#[test]
fn run__ten_thousand_power_cuts() {
    let counts = many(RUNS, RUNS, |seed| {
        let settings = Settings::drawn(seed);
        let report =
            violation(&settings).map_err(|what| format!("{what}\n  replay: {}", settings.replay()))?;
        Ok(report.counts())
    });
    if are_all() {
        assert!(counts[0].1 >= CUTS_MIN, "{} power cuts", counts[0].1);
    }
}

/// Makes a run of a log; returns its violation, and how to replay it, as the error.
fn log_violation(settings: &Settings, defect: Option<LogDefect>) -> Result<Counted, String> {
    let report = checked(|| run_log(settings, defect), |_| None);
    let report = report.map_err(|what| format!("{what}\n  log over {}", settings.replay()))?;
    match &report.violation {
        None => Ok(report.counts()),
        Some(what) => Err(format!("{what}\n  replay: {}", report.replay())),
    }
}

#[test]
fn run_log__what_was_acknowledged_is_there_and_nothing_torn() {
    many(LOG_RUNS, LOG_RUNS, |seed| {
        log_violation(&Settings::drawn_for_log(seed), None)
    });
}

#[test]
fn run_log__every_cut_at_every_step() {
    let platforms = Platform::ALL
        .into_iter()
        .filter(|platform| platform.domain != Domain::None);
    for platform in platforms {
        let mut looked_at = 0;
        for seed in 0..if cfg!(debug_assertions) { 1 } else { 6 } {
            let settings = Settings {
                platform,
                ..Settings::drawn_for_log(seed)
            };
            looked_at += run_log_everywhere(&settings, 12, 256).unwrap_or_else(|what| {
                panic!("{}, seed {seed}: {what}", platform.name());
            });
        }
        println!("{:<18} {looked_at} memories", platform.name());
        assert!(looked_at > 100, "{looked_at}");
    }
}

#[test]
fn run_log__every_defect_shows() {
    let on = |platform, rely, defect| Settings {
        platform,
        rely,
        defect,
        ..Settings::drawn_for_log(0)
    };
    let cached = |defect| on(Platform::ADR_CACHED, None, defect);
    let mut controls = vec![(
        "read on ADR, cached",
        on(Platform::ADR_CACHED, Some(Method::Read), None),
        None,
    )];
    for defect in [
        Defect::WriteBackDropped,
        Defect::AckBeforeFence,
        Defect::LineShort,
    ] {
        controls.push((defect.name(), cached(Some(defect)), None));
    }
    for &defect in LogDefect::VARIANTS {
        controls.push((defect.name(), cached(None), Some(defect)));
    }
    for (name, control, defect) in controls {
        let found = (0..DEFECT_SEEDS).find_map(|seed| {
            let settings = Settings {
                platform: control.platform,
                rely: control.rely,
                defect: control.defect,
                ..Settings::drawn_for_log(seed)
            };
            log_violation(&settings, defect).err().map(|what| (seed, what))
        });
        let (seed, what) = found.unwrap_or_else(|| panic!("{name}: not seen in {DEFECT_SEEDS} seeds"));
        println!("{name:<26} seed {seed:>3}: {what}");
    }
}

/// Returns the settings of a run on a given platform.
fn on(platform: Platform, seed: u64) -> Settings {
    Settings {
        platform,
        ..Settings::drawn(seed)
    }
}

#[test]
fn run__every_defect_shows() {
    let relied = Settings {
        rely: Some(Method::Read),
        ..on(Platform::ADR_CACHED, 0)
    };
    let mut controls = vec![("read on ADR, cached".to_owned(), relied)];
    for &defect in Defect::VARIANTS {
        let settings = Settings {
            defect: Some(defect),
            ..on(defect.platform(), 0)
        };
        controls.push((defect.name().to_owned(), settings));
    }
    for (name, settings) in controls {
        let mut seeds = (0..DEFECT_SEEDS).map(|seed| Settings {
            seed,
            ..on(settings.platform, seed)
        });
        let found = seeds.find_map(|drawn| {
            let settings = Settings {
                rely: settings.rely,
                defect: settings.defect,
                ..drawn
            };
            violation(&settings).err().map(|what| (settings, what))
        });
        let (settings, what) = found.unwrap_or_else(|| panic!("{name}: not seen in {DEFECT_SEEDS} seeds"));
        println!(
            "{name:<26} seed {:>3}: {what}\n  {}",
            settings.seed,
            settings.replay()
        );
    }
}

/// Returns the verdict of runs on a platform about a method.
fn cell(platform: Platform, method: Method) -> Verdict {
    let mut refused = 0;
    for seed in 0..CELL_RUNS {
        let settings = Settings {
            rely: Some(method),
            ..on(platform, seed)
        };
        match violation(&settings) {
            Ok(report) => refused += report.refused,
            Err(what) if what.starts_with("after a power cut: unit") => return Verdict::Lost,
            // Where nothing survives a loss of power, a kill is as bad.
            Err(what) if platform.domain == Domain::None && what.starts_with("after a kill: unit") => {
                return Verdict::Lost;
            }
            Err(what) => panic!("{what}\n  replay: {}", settings.replay()),
        }
    }
    if refused > 0 {
        Verdict::Refused
    } else {
        Verdict::Durable
    }
}

#[test]
fn table__each_cell_is_as_stated() {
    print!("{:<18}", "");
    Method::VARIANTS
        .iter()
        .for_each(|method| print!(" {:<16}", method.name()));
    println!();
    let mut wrong = Vec::new();
    for platform in Platform::ALL {
        print!("{:<18}", platform.name());
        for &method in Method::VARIANTS {
            let (stated, shown) = (platform.verdict(method), cell(platform, method));
            print!(" {shown:<16}");
            if stated != shown {
                wrong.push(format!(
                    "{} by {}: {stated}, but runs show {shown}",
                    platform.name(),
                    method.name()
                ));
            }
        }
        println!();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn table__is_that_of_the_docs() {
    let page = include_str!("../../../../docs/persistence-model.md");
    for platform in Platform::ALL {
        let begin = format!("| {} |", platform.name());
        let row = page.lines().find(|line| line.starts_with(&begin));
        let row = row.unwrap_or_else(|| panic!("no row of {}", platform.name()));
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).skip(2).collect();
        let stated = Method::VARIANTS
            .iter()
            .map(|&method| platform.verdict(method).to_string());
        assert_eq!(cells, stated.collect::<Vec<_>>(), "{}", platform.name());
    }
}
