//! Fuzzing of data from files and other processes of the host, by stable means: the seeds of `fuzz/corpus/`, mutated.
//! `fuzz/stable.rs` says how long it runs, and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, mutate};

fn fuzz(name: &str, target: fn(&[u8])) {
    let corpus = corpus(name);
    stable::fuzz(name, &corpus, |seed| mutate(&mut Rng(seed), &corpus), target);
}

#[test]
fn fuzz__trace() {
    fuzz("trace", rdmux_soft::fuzz::trace);
}

#[test]
fn fuzz__report() {
    fuzz("report", rdmux_soft::fuzz::report);
}
