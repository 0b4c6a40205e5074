#![no_main]

#[path = "../dsm_protocol.rs"]
mod dsm_protocol;

libfuzzer_sys::fuzz_target!(|input: &[u8]| dsm_protocol::dsm_protocol(input));
