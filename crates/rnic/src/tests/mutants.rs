//! The deliberate defects that the simulation's traffic does not come upon: each makes the test beside it fail.

use std::panic::catch_unwind;

use super::{malformed, operations};
use crate::mutant::{self, Mutant};

const CAUGHT: [(Mutant, fn()); 6] = [
    (
        Mutant::WindowOfAnyQp,
        operations::window__of_type_2_serves_only_the_qp_that_bound_it_and_ends_by_either_side,
    ),
    (
        Mutant::InvalidateForgotten,
        operations::send_invalidate__ends_the_key_before_its_receive_completes,
    ),
    (
        Mutant::SqdBeginsNew,
        operations::sqd__ends_what_was_begun_tells_and_begins_the_rest_later,
    ),
    (Mutant::FenceIgnored, operations::fence__waits_for_atomics),
    (
        Mutant::AtomicMisaligned,
        malformed::atomic__misaligned_or_of_another_length_is_an_invalid_request,
    ),
    (
        Mutant::AtomicPassesFlush,
        operations::atomic__behind_a_flush_waits_until_it_has_finished,
    ),
];

#[test]
fn every_mutant_is_caught() {
    let survives = |(mutant, test): &(Mutant, fn())| {
        mutant::set(Some(*mutant));
        let passes = catch_unwind(*test).is_ok();
        mutant::set(None);
        passes
    };
    let missed: Vec<Mutant> = CAUGHT
        .iter()
        .filter(|pair| survives(pair))
        .map(|pair| pair.0)
        .collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
