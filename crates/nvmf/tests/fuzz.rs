//! Fuzzing of the host by stable means: what targets send, from the seeds of `fuzz/corpus/nvme_host/`, mutated. `fuzz/stable.rs` says how long,
//! and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/nvme_host.rs"]
mod nvme_host;
#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, fuzz, mutate};

#[test]
fn fuzz_nvme_host() {
    let corpus = corpus("nvme_host");
    let input = |seed| mutate(&mut Rng(seed), &corpus);
    fuzz("nvme_host", &corpus, input, nvme_host::nvme_host);
}
