//! Fuzzing of the engine by stable means, for RDMUX_FUZZ_SECONDS (1 unless given). A failure prints its seed;
//! RDMUX_FUZZ_SEED=N runs that input again.

use std::panic::{catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime};

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={value} is not a number")))
}

/// Events of every kind; the engine's own traffic makes the packets that are then changed.
fn input(seed: u64) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut bytes = vec![0; 20 + (rng.next_u32() % 1200) as usize];
    rng.fill_bytes(&mut bytes);
    bytes
}

#[test]
fn fuzz_rnic() {
    let run = |seed: u64| {
        if let Err(panic) = catch_unwind(|| rdmux_sim::fuzz::rnic(&input(seed))) {
            eprintln!("fuzz rnic: RDMUX_FUZZ_SEED={seed} failed");
            resume_unwind(panic);
        }
    };
    if let Some(seed) = number("RDMUX_FUZZ_SEED") {
        return run(seed);
    }
    let duration = Duration::from_secs(number("RDMUX_FUZZ_SECONDS").unwrap_or(1));
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = since_epoch.as_nanos() as u64 >> 16;
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < duration {
        run(first + count);
        count += 1;
    }
    println!("fuzz rnic: {count} inputs from seed {first}");
}
