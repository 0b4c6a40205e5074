#![no_main]

#[path = "../nvme_rdma.rs"]
mod nvme_rdma;

libfuzzer_sys::fuzz_target!(|input: &[u8]| nvme_rdma::nvme_target_rdma(input));
