//! Each deliberate defect is caught by the model checker.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod world;

use rdmux_dsm::mutant::Mutant;
use world::model::{SMALL, Worlds};

/// Returns the first set in which a defect breaks a rule.
fn caught(mutant: Mutant) -> Option<&'static str> {
    let is_caught = |worlds: &&Worlds| {
        let worlds = Worlds {
            mutant: Some(mutant),
            ..(*worlds).clone()
        };
        let broken = worlds.check().broken;
        if let Some(broken) = &broken {
            println!("{mutant:?}: {}", broken.split(" after ").next().unwrap());
        }
        broken.is_some()
    };
    SMALL.iter().find(is_caught).map(|worlds| worlds.name)
}

#[test]
fn model__catches_each_defect() {
    let table = Mutant::ALL.iter().map(|it| (*it, caught(*it)));
    let table: Vec<_> = table.inspect(|it| println!("{it:?}")).collect();
    assert!(table.iter().all(|it| it.1.is_some()), "{table:#?}");
}
