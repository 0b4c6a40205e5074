#![no_main]

#[path = "../accel.rs"]
mod accel;

libfuzzer_sys::fuzz_target!(|input: &[u8]| accel::accel_window(input));
