//! All states of small worlds keep the rules.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod world;

use world::model::{LARGE, SMALL, Worlds};

/// Set to check [`LARGE`] too.
const ALL: &str = "RDMUX_DSM_MODEL_ALL";

fn check(worlds: &Worlds) {
    let checked = worlds.clone().check();
    println!(
        "{}: {} states in {:.1?}",
        worlds.name, checked.states, checked.time
    );
    assert!(
        checked.broken.is_none(),
        "{}: {}",
        worlds.name,
        checked.broken.unwrap()
    );
}

#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes without optimisation: add --release")]
fn protocol__keeps_the_rules_in_all_states() {
    SMALL.iter().for_each(check);
    if std::env::var_os(ALL).is_some() {
        LARGE.iter().for_each(check);
    }
}
