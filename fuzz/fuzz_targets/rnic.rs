#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| drop(rdmux_sim::fuzz::rnic(input)));
