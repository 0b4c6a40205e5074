//! Programs without data races see one memory, in all states of small worlds with release consistency.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod release_world;

use std::time::Instant;

#[test]
fn release__keeps_the_rules_in_all_states() {
    for worlds in release_world::SMALL {
        let began = Instant::now();
        let checked = worlds.check();
        println!(
            "{}: {} states in {:.1?}",
            worlds.name,
            checked.states,
            began.elapsed()
        );
        assert!(
            checked.broken.is_none(),
            "{}: {}",
            worlds.name,
            checked.broken.unwrap()
        );
    }
}
