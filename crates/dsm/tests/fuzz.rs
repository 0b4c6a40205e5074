//! Fuzzing of the synchronisation of a node with a stable toolchain: mutates the seeds of `fuzz/corpus/dsm_sync/`. `fuzz/stable.rs` documents how
//! long this runs, and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/dsm_sync.rs"]
mod dsm_sync;
#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, mutate};

#[test]
fn fuzz__dsm_sync() {
    let corpus = corpus("dsm_sync");
    let input = |seed| match seed % 4 {
        0 => mutate(&mut Rng(seed), &corpus),
        _ => mix(&mut Rng(seed), &corpus),
    };
    stable::fuzz("dsm_sync", &corpus, input, dsm_sync::dsm_sync);
}

/// Returns whole events of the corpus in any order, of which some have another byte.
fn mix(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    const EVENT_LEN: usize = 49;
    let count = 1 + rng.below(100);
    let events = (0..count).flat_map(|_| {
        let seed = &corpus[rng.below(corpus.len())];
        let at = EVENT_LEN * rng.below(seed.len() / EVENT_LEN);
        let mut event = seed[at..at + EVENT_LEN].to_vec();
        if rng.below(2) == 0 {
            event[[0, 1, 2, 3, 4, 25, 33, 41][rng.below(8)]] = rng.below(48) as u8;
        }
        event
    });
    events.collect()
}
