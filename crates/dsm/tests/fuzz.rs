//! Fuzzing of the parts of a node with a stable toolchain: mutates the seeds of `fuzz/corpus/TARGET/`. `fuzz/stable.rs` documents how long this runs,
//! and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/dsm_protocol.rs"]
mod dsm_protocol;
#[path = "../../../fuzz/dsm_sync.rs"]
mod dsm_sync;
#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, mutate};

#[test]
fn fuzz__dsm_sync() {
    fuzz("dsm_sync", 0, dsm_sync::dsm_sync);
}

#[test]
fn fuzz__dsm_protocol() {
    fuzz("dsm_protocol", 1, dsm_protocol::dsm_protocol);
}

/// Fuzzes a target whose inputs are events, with so many bytes before them.
fn fuzz(name: &str, before: usize, target: fn(&[u8])) {
    let corpus = corpus(name);
    let input = |seed| match seed % 4 {
        0 => mutate(&mut Rng(seed), &corpus),
        _ => mix(&mut Rng(seed), &corpus, before),
    };
    stable::fuzz(name, &corpus, input, target);
}

/// Returns whole events in any order, of which some have another byte, of those seeds that have the same bytes before the events as one of them.
fn mix(rng: &mut Rng, corpus: &[Vec<u8>], before: usize) -> Vec<u8> {
    const EVENT_LEN: usize = 49;
    let first = &corpus[rng.below(corpus.len())][..before];
    let alike: Vec<&[u8]> = corpus.iter().filter_map(|it| it.strip_prefix(first)).collect();
    let count = 1 + rng.below(100);
    let events = (0..count).flat_map(|_| {
        let seed = alike[rng.below(alike.len())];
        let at = EVENT_LEN * rng.below(seed.len() / EVENT_LEN);
        let mut event = seed[at..at + EVENT_LEN].to_vec();
        if rng.below(2) == 0 {
            event[[0, 1, 2, 3, 4, 25, 33, 41][rng.below(8)]] = rng.below(48) as u8;
        }
        event
    });
    first.iter().copied().chain(events).collect()
}
