//! Fuzzing of the parsers of `wire` and `capture` with a stable toolchain: mutates the seeds of `fuzz/corpus/TARGET/` and passes them to the target.
//! `fuzz/stable.rs` documents how long this runs, and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/stable.rs"]
mod stable;
#[path = "../../../fuzz/targets.rs"]
mod targets;

use stable::{Rng, corpus, mutate};

fn fuzz(name: &str, target: fn(&[u8])) {
    let corpus = corpus(name);
    stable::fuzz(name, &corpus, |seed| mutate(&mut Rng(seed), &corpus), target);
}

#[test]
fn fuzz__roce() {
    fuzz("roce", targets::roce);
}

#[test]
fn fuzz__cm() {
    fuzz("cm", targets::cm);
}

#[test]
fn fuzz__nvme() {
    fuzz("nvme", targets::nvme);
}

#[test]
fn fuzz__push() {
    fuzz("push", targets::push);
}

#[test]
fn fuzz__node_control() {
    fuzz("node_control", targets::node_control);
}

#[test]
fn fuzz__node_peer() {
    fuzz("node_peer", targets::node_peer);
}

#[test]
fn fuzz__capture() {
    fuzz("capture", targets::capture);
}

#[test]
fn fuzz__check() {
    fuzz("check", targets::check);
}

#[test]
fn fuzz__rsocket() {
    fuzz("rsocket", targets::rsocket);
}

#[test]
fn fuzz__dsm() {
    fuzz("dsm", targets::dsm);
}

#[test]
fn fuzz__node_mux() {
    fuzz("node_mux", targets::node_mux);
}

#[test]
fn fuzz__node() {
    fuzz("node", targets::node);
}
