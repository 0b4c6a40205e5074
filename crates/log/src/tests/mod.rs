//! The writer in a simulated world: servers that lose what was not flushed, writers that start, die and run at the same time,
//! links that break. A checker compares what was acknowledged with what the log holds.

mod world;

use std::panic::catch_unwind;

use self::world::World;
use super::format::AREA_AT;
use super::{Action, Settings, What, Writer};

/// Number of simulations in a test run; `RDMUX_LOG_RUNS` sets a higher one.
const RUNS: u64 = 600;
/// Seeds within which each defect must be caught.
#[cfg(not(debug_assertions))]
const SEEDS: u64 = 40_000;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

#[test]
fn log__nothing_acknowledged_is_lost() {
    let first = number("RDMUX_LOG_FIRST", 1);
    let mut seen = world::Seen::default();
    let runs = number("RDMUX_LOG_RUNS", RUNS);
    for seed in first..first + runs {
        match catch_unwind(|| World::new(seed).run()) {
            Ok(Ok(run)) => seen.add(&run),
            Ok(Err(why)) => panic!("seed {seed}: {why}; again: RDMUX_LOG_FIRST={seed} RDMUX_LOG_RUNS=1"),
            Err(_) => panic!("seed {seed} panicked; again: RDMUX_LOG_FIRST={seed} RDMUX_LOG_RUNS=1"),
        }
    }
    println!("{seen:?}");
    // An event that never happened was not tested.
    if runs >= RUNS {
        seen.assert_all_seen();
    }
}

/// The rarest defect takes thousands of simulations: part `sim` of ./test runs them, optimised.
#[cfg(not(debug_assertions))]
#[test]
fn log__each_defect_is_caught() {
    use super::defect::{self, Defect};

    let mut missed = Vec::new();
    for defect in Defect::ALL {
        defect::set(Some(*defect));
        let caught = (1..=SEEDS).find_map(|seed| {
            match catch_unwind(std::panic::AssertUnwindSafe(|| World::new(seed).run())) {
                Ok(Ok(_)) => None,
                Ok(Err(why)) => Some((seed, why)),
                Err(_) => Some((seed, "a panic".into())),
            }
        });
        match caught {
            Some((seed, why)) => println!("{defect:?}: seed {seed}: {why}"),
            None => missed.push(*defect),
        }
    }
    defect::set(None);
    assert!(missed.is_empty(), "not caught by {SEEDS} seeds: {missed:?}");
}

/// Performs the actions of a writer with one replica on the replica's memory; each read of the ring returns `extra` bytes more.
fn serve(writer: &mut Writer, memory: &mut [u8], extra: usize) {
    while let Some(action) = writer.poll_action() {
        answer(writer, memory, &action, extra);
    }
}

/// Performs one action on a replica's memory.
fn answer(writer: &mut Writer, memory: &mut [u8], action: &Action, extra: usize) {
    let now = std::time::Duration::ZERO;
    let (replica, session) = (action.replica, action.session);
    match &action.what {
        What::Connect => writer.handle_connected(replica, session, memory.len() as u64),
        What::Acquire => writer.handle_acquired(replica, session),
        What::Read { offset, length } => {
            let mut bytes = memory[*offset as usize..(offset + length) as usize].to_vec();
            if *offset >= AREA_AT {
                bytes.resize(bytes.len() + extra, 0);
            }
            writer.handle_done(replica, session, Some(bytes), now);
        }
        What::Write { offset, bytes } => {
            memory[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
            writer.handle_done(replica, session, None, now);
        }
        What::Flush { .. } => writer.handle_done(replica, session, None, now),
        What::Disconnect => {}
    }
}

fn settings_of_one() -> Settings {
    Settings {
        replicas: 1,
        writer: 1,
        log: 2,
        replica_ids: vec![3],
        create: true,
        drop_oldest: false,
        trim: None,
    }
}

fn writer_of_one() -> Writer {
    Writer::new(settings_of_one())
}

/// Without this rule, two writers that create a log at once could leave it promised on one replica, and nobody could ever open it.
#[test]
fn creation__promises_nothing_after_a_loss_before_all_are_seen_again() {
    let now = std::time::Duration::ZERO;
    let mut memory = vec![vec![0; AREA_AT as usize + 4096]; 3];
    let mut writer = Writer::new(Settings {
        replicas: 3,
        replica_ids: vec![3, 4, 5],
        ..settings_of_one()
    });
    let mut formatted = 0;
    while let Some(action) = writer.poll_action() {
        if matches!(action.what, What::Write { .. }) {
            formatted += 1;
            if formatted > 3 {
                break;
            }
        }
        answer(&mut writer, &mut memory[action.replica], &action, 0);
    }
    assert_eq!(formatted, 4, "the first promise was to be written");
    while writer.poll_action().is_some() {}
    for replica in 0..3 {
        writer.handle_lost(replica, 1, "lost", now);
    }
    writer.handle_timeout(writer.poll_timeout().unwrap());
    while let Some(action) = writer.poll_action() {
        assert!(!matches!(action.what, What::Write { .. }), "{action:?}");
        if action.replica == 1 {
            answer(&mut writer, &mut memory[1], &action, 0);
        }
    }
}

#[test]
fn handle_done__bytes_of_another_number_are_not_taken_as_the_log() {
    let mut memory = vec![0; AREA_AT as usize + 4096];
    for extra in [0, 8] {
        let mut writer = writer_of_one();
        serve(&mut writer, &mut memory, extra);
        assert_eq!(writer.is_ready(), extra == 0, "{}", writer.describe(0));
        assert_eq!(writer.describe(0).contains("arrived instead of"), extra > 0);
    }
}

#[test]
fn append__more_than_may_be_under_way_is_acknowledged_without_another_append() {
    let mut memory = vec![0; AREA_AT as usize + (1 << 16)];
    let mut writer = writer_of_one();
    serve(&mut writer, &mut memory, 0);
    for number in 1..=200 {
        assert_eq!(writer.append(b"record"), Ok(number));
    }
    serve(&mut writer, &mut memory, 0);
    assert_eq!(writer.acknowledged(), 200);
}
