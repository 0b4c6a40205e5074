//! Each deliberate defect is caught by the model checker.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod world;

use rdmux_dsm::mutant::Mutant;
use world::model::{SMALL, Worlds};

const TOUCHES: &str = "3 nodes, 1 unit, first touches, crash";
const TWO_NODES: &str = "2 nodes, 1 unit, 1 access, expulsion";

/// The smallest set in which each defect breaks a rule.
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

#[test]
fn model__catches_each_defect() {
    assert_eq!(CAUGHT.map(|it| it.0), Mutant::ALL);
    for (mutant, name) in CAUGHT {
        let worlds = SMALL.iter().find(|it| it.name == name).unwrap();
        let worlds = Worlds {
            mutant: Some(mutant),
            ..worlds.clone()
        };
        let Some(broken) = worlds.check().broken else {
            panic!("{mutant:?} breaks no rule in: {name}");
        };
        println!("{mutant:?}: {}", broken.split(" after ").next().unwrap());
    }
}
