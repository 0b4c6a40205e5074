//! All states of small worlds of synchronisation keep the rules.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod sync_world;

use sync_world::model::{LARGE, SMALL, Worlds};

/// Set to check [`LARGE`] too.
const ALL: &str = "RDMUX_DSM_MODEL_ALL";

fn check(worlds: &Worlds) {
    let checked = worlds.clone().check();
    let (name, states) = (worlds.name, checked.states);
    println!("{name}: {states} states in {:.1?}", checked.time);
    assert!(checked.broken.is_none(), "{name}: {}", checked.broken.unwrap());
}

#[test]
fn sync__keeps_the_rules_in_all_states() {
    SMALL.iter().for_each(check);
    if std::env::var_os(ALL).is_some() {
        LARGE.iter().for_each(check);
    }
}
