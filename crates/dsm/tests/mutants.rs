//! Each deliberate defect is caught by the model checkers.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod release_world;
mod sync_world;
mod world;

use rdmux_dsm::mutant::Mutant;
use world::model::{SMALL, Worlds};

const TOUCHES: &str = "3 nodes, 1 unit, first touches, crash";
const TWO_NODES: &str = "2 nodes, 1 unit, 1 access, expulsion";

/// The smallest set in which each defect of the coherence protocol breaks a rule.
const CAUGHT: [(Mutant, &str); 28] = [
    (Mutant::RecallNotAwaited, TWO_NODES),
    (Mutant::YieldedEarly, TWO_NODES),
    (Mutant::OneSharerRecalled, "3 nodes, 1 unit, 1 access"),
    (Mutant::OwnerKeepsRight, TWO_NODES),
    (Mutant::BusyForgotten, TWO_NODES),
    (Mutant::UpgradeKeepsCopy, "2 nodes, 1 unit, 2 accesses"),
    (Mutant::InstalledNotAwaited, TWO_NODES),
    (
        Mutant::DuplicateTaken,
        "2 nodes, 1 unit, 1 access, reordered, duplicate, crash",
    ),
    (Mutant::GoneHeard, TWO_NODES),
    (
        Mutant::NewerNotHeld,
        "3 nodes, 2 units, a reader that is stopped and goes on",
    ),
    (Mutant::ExclusiveNotLost, TWO_NODES),
    (Mutant::GrantNotLost, TWO_NODES),
    (Mutant::GoneAwaited, TWO_NODES),
    (Mutant::GoneGranted, TWO_NODES),
    (Mutant::HomeGoneAwaited, TWO_NODES),
    (Mutant::FreshKept, TWO_NODES),
    (Mutant::TakenEarly, TWO_NODES),
    (Mutant::FailureTaken, TWO_NODES),
    (
        Mutant::EarlierTaskTaken,
        "3 nodes, 1 unit, a failed read that ends twice",
    ),
    (Mutant::FailureForgotten, TWO_NODES),
    (Mutant::ReadNotAwaited, "4 nodes, 1 unit, 2 crashes"),
    (Mutant::SharedLost, TWO_NODES),
    (Mutant::RegistrationForgotten, TOUCHES),
    (Mutant::EarlyTaken, TOUCHES),
    (Mutant::EarlyForgotten, TOUCHES),
    (Mutant::EarlyNotRefused, TOUCHES),
    (Mutant::WriterJoins, "3 nodes, 1 unit, 1 access"),
    (Mutant::WriterJoined, TWO_NODES),
];

const TWO_LOCKS: &str = "2 nodes, 2 threads at one, 1 unit, 2 locks";
const SHARED_FALSELY: &str = "2 nodes, 1 unit, false sharing between barriers";
const AT_HOME: &str = "2 nodes, 2 threads at the home, 1 unit, 2 locks";
const RELEASED_LATE: &str = "3 nodes, 1 unit, false sharing, releases without an acquire, delays";
const TOUCHED: &str = "3 nodes, 1 unit, first touch, false sharing, 2 locks";

/// The smallest set in which each defect of release consistency breaks a rule.
const RELEASE_CAUGHT: [(Mutant, &str); 21] = [
    (Mutant::NoticedEarly, "3 nodes, 1 unit, false sharing, 2 locks"),
    (Mutant::HomeUnprotected, AT_HOME),
    (Mutant::DirtyDropped, TWO_LOCKS),
    (Mutant::StaleTaken, TWO_LOCKS),
    (Mutant::TwinForgotten, SHARED_FALSELY),
    (Mutant::RoundShared, "2 nodes, 2 threads at one, 2 units, 2 locks"),
    (
        Mutant::LapForgotten,
        "3 nodes, 2 units, a log of one, flushes of one",
    ),
    (Mutant::DepartureForgotten, "3 nodes, 1 unit, a crash of a writer"),
    (
        Mutant::LateStoreNotAwaited,
        "3 nodes, 1 unit, a crash of a writer, writes of the same value",
    ),
    (Mutant::ChangeForgotten, TWO_LOCKS),
    (Mutant::HomesMixed, "3 nodes, 2 units, a crash of a home"),
    (Mutant::OthersOverwritten, SHARED_FALSELY),
    (
        Mutant::DifferenceForgotten,
        "3 nodes, 1 unit, false sharing, releases without an acquire",
    ),
    (Mutant::LandingNotAwaited, SHARED_FALSELY),
    (
        Mutant::LandingOvertaken,
        "3 nodes, 1 unit, false sharing, 2 locks",
    ),
    (
        Mutant::ComparedEarly,
        "2 nodes, 2 threads at one, 1 unit, 2 locks, delays",
    ),
    (Mutant::AnsweredEarly, RELEASED_LATE),
    (
        Mutant::StoreOvertaken,
        "3 nodes, 2 units, false sharing, flushes that wait for slots",
    ),
    (Mutant::TouchForgotten, TOUCHED),
    (Mutant::TouchNotAgreed, TOUCHED),
    (
        Mutant::RegistrarGoneAwaited,
        "3 nodes, 1 unit, first touch, a crash of the registrar",
    ),
];

const LOCK: &str = "lock, 2 nodes, crash";
const HOME: &str = "lock, 2 of 3 threads at the home, crash";
const BARRIER: &str = "barrier, 3 nodes, crash";
const CONDITION: &str = "condition, 3 nodes, crash";

/// The smallest set in which each defect of the synchronisation breaks a rule.
const SYNC_CAUGHT: [(Mutant, &str); 18] = [
    (Mutant::WriterAmongReaders, LOCK),
    (Mutant::ReaderBesideWriter, LOCK),
    (Mutant::ReaderTakesMark, HOME),
    (Mutant::GoneLocks, HOME),
    (Mutant::RecoveryUnmarked, LOCK),
    (Mutant::GoneKeepsLock, LOCK),
    (Mutant::BarrierShort, BARRIER),
    (Mutant::ReductionUnordered, "reduction, 3 threads, reordered"),
    (Mutant::BreakForgotten, BARRIER),
    (Mutant::StrangerAwaited, BARRIER),
    (Mutant::LateBarrierAwaited, BARRIER),
    (Mutant::LateWaitAwaited, CONDITION),
    (Mutant::WordNotWritten, "word, 3 nodes, crash"),
    (Mutant::GoneSignalAwaited, CONDITION),
    (Mutant::DepartureNotTold, CONDITION),
    (
        Mutant::EarlySignalLost,
        "condition, 3 nodes, reordered, duplicate, crash",
    ),
    (Mutant::LostHomeAwaited, LOCK),
    (
        Mutant::LostUnlockAwaited,
        "condition, 3 nodes, a lock at a third one, crash",
    ),
];

#[test]
fn defects__are_all_checked() {
    let checked = CAUGHT.iter().chain(&RELEASE_CAUGHT).chain(&SYNC_CAUGHT);
    let checked = checked.map(|it| it.0);
    assert!(checked.eq(Mutant::ALL.iter().copied()));
}

fn print(mutant: Mutant, name: &str, broken: Option<String>) {
    let Some(broken) = broken else {
        panic!("{mutant:?} breaks no rule in: {name}");
    };
    println!("{mutant:?}: {}", broken.split(" after ").next().unwrap());
}

#[test]
fn model__catches_each_defect() {
    for (mutant, name) in CAUGHT {
        let worlds = SMALL.iter().find(|it| it.name == name).unwrap();
        let worlds = Worlds {
            mutant: Some(mutant),
            ..worlds.clone()
        };
        print(mutant, name, worlds.check().broken);
    }
}

#[test]
fn release_model__catches_each_defect() {
    for (mutant, name) in RELEASE_CAUGHT {
        let worlds = release_world::SMALL.iter().find(|it| it.name == name);
        let worlds = release_world::Worlds {
            mutant: Some(mutant),
            ..worlds.unwrap().clone()
        };
        print(mutant, name, worlds.check().broken);
    }
}

/// Only where other steps come between an event and its actions do these break a rule.
#[test]
fn release_model__needs_delays_for_some_defects() {
    let delayed = RELEASE_CAUGHT.iter().filter(|it| it.1.ends_with(", delays"));
    for (mutant, _) in delayed {
        for worlds in release_world::SMALL.iter().filter(|it| !it.delays) {
            let worlds = release_world::Worlds {
                mutant: Some(*mutant),
                ..worlds.clone()
            };
            let broken = worlds.check().broken;
            assert_eq!(broken, None, "{mutant:?} in: {}", worlds.name);
        }
    }
}

#[test]
fn sync_model__catches_each_defect() {
    for (mutant, name) in SYNC_CAUGHT {
        let worlds = sync_world::model::SMALL.iter().find(|it| it.name == name);
        let worlds = sync_world::model::Worlds {
            mutant: Some(mutant),
            ..worlds.unwrap().clone()
        };
        print(mutant, name, worlds.check().broken);
    }
}
