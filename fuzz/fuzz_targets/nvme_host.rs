#![no_main]

#[path = "../nvme_host.rs"]
mod nvme_host;

libfuzzer_sys::fuzz_target!(|input: &[u8]| nvme_host::nvme_host(input));
