//! Fuzzing of both sides by stable means: what a peer sends, from the seeds of `fuzz/corpus/`, mutated. `fuzz/stable.rs` says how long, and how to
//! run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/nvme_host.rs"]
mod nvme_host;
#[path = "../../../fuzz/nvme_rdma.rs"]
mod nvme_rdma;
#[path = "../../../fuzz/stable.rs"]
mod stable;

use stable::{Rng, corpus, mutate};

fn fuzz(name: &str, target: fn(&[u8])) {
    let corpus = corpus(name);
    stable::fuzz(name, &corpus, |seed| mutate(&mut Rng(seed), &corpus), target);
}

#[test]
fn fuzz_nvme_host() {
    fuzz("nvme_host", nvme_host::nvme_host);
}

#[test]
fn fuzz_nvme_host_rdma() {
    fuzz("nvme_host_rdma", nvme_rdma::nvme_host_rdma);
}

#[test]
fn fuzz_nvme_target_rdma() {
    fuzz("nvme_target_rdma", nvme_rdma::nvme_target_rdma);
}
