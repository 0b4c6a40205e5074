//! Fuzzing of windows and of compressed data by stable means, from the seeds of `fuzz/corpus/`, mutated. `fuzz/stable.rs` says how long, and how to run
//! one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/accel.rs"]
mod accel;
#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, mutate};

fn fuzz(name: &str, target: fn(&[u8])) {
    let corpus = corpus(name);
    stable::fuzz(name, &corpus, |seed| mutate(&mut Rng(seed), &corpus), target);
}

#[test]
fn fuzz_accel_window() {
    fuzz("accel_window", accel::accel_window);
}

#[test]
fn fuzz_accel_frames() {
    fuzz("accel_frames", accel::accel_frames);
}
