#![no_main]

#[path = "../dsm_sync.rs"]
mod dsm_sync;

libfuzzer_sys::fuzz_target!(|input: &[u8]| dsm_sync::dsm_sync(input));
