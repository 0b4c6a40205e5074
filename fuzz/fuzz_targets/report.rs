#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rdmux_soft::fuzz::report(input));
