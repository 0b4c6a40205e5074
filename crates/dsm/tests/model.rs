//! All states of small worlds keep the rules.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod world;

use rdmux_dsm::protocol::Access;
use world::history::is_sequentially_consistent;
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
fn protocol__keeps_the_rules_in_all_states() {
    SMALL.iter().for_each(check);
    if std::env::var_os(ALL).is_some() {
        LARGE.iter().for_each(check);
    }
}

#[test]
fn history__store_buffering_has_no_order() {
    let (write, read) = (
        |unit, value| ((Access::Write, unit), value),
        |unit, value| ((Access::Read, unit), value),
    );
    let both_old = [vec![write(0, 1), read(1, 0)], vec![write(1, 2), read(0, 0)]];
    let one_old = [vec![write(0, 1), read(1, 0)], vec![write(1, 2), read(0, 1)]];
    assert!(!is_sequentially_consistent(&both_old));
    assert!(is_sequentially_consistent(&one_old));
}
