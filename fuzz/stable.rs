//! Fuzzing by stable means: inputs by seed for a time, and what is printed of one that fails.
//!
//! A target runs for RDMUX_FUZZ_SECONDS (1 unless given). A failure prints its seed; RDMUX_FUZZ_SEED=N, with the name of the
//! failing test, runs that one input again.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// No input grows past this: a capture of a few packets.
const INPUT_LEN_MAX: usize = 16 * 1024;

/// SplitMix64 (Steele, Lea, Flood 2014): enough for choosing mutations, and the same everywhere.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 for 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        if bound == 0 {
            0
        } else {
            (self.next() % bound as u64) as usize
        }
    }

    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        start..start + self.below((len - start).min(64) + 1)
    }
}

/// One of the corpus, changed.
pub(crate) fn mutate(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut input = corpus[rng.below(corpus.len())].clone();
    for _ in 0..rng.below(8) {
        let at = rng.below(input.len());
        match rng.below(9) {
            0 if !input.is_empty() => input[at] ^= 1 << rng.below(8),
            1 if !input.is_empty() => input[at] = rng.next() as u8,
            2 if !input.is_empty() => input[at] = [0, 1, 0x7f, 0x80, 0xff][rng.below(5)],
            3 => {
                let value =
                    [0, 1, 4, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, input.len() as u32][rng.below(7)];
                let bytes = if rng.below(2) == 0 {
                    value.to_be_bytes()
                } else {
                    value.to_le_bytes()
                };
                let width = 1 + rng.below(4);
                for (to, from) in input.iter_mut().skip(at).zip(&bytes[4 - width..]) {
                    *to = *from;
                }
            }
            4 => input.truncate(at),
            5 => drop(input.drain(rng.range(input.len()))),
            6 => {
                let range = rng.range(input.len());
                let copy = input[range].to_vec();
                input.splice(at..at, copy);
            }
            7 => {
                let other = &corpus[rng.below(corpus.len())];
                input.truncate(at);
                input.extend_from_slice(&other[rng.below(other.len())..]);
            }
            _ => {
                let bytes: Vec<u8> = (0..rng.below(16)).map(|_| rng.next() as u8).collect();
                input.splice(at..at, bytes);
            }
        }
        input.truncate(INPUT_LEN_MAX);
    }
    input
}

/// The seeds of `fuzz/corpus/TARGET/`.
pub(crate) fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort(); // a seed counts on the order
    assert!(!files.is_empty(), "{} has no seeds", folder.display());
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={value} is not a number")),
    )
}

/// Gives a target its corpus, and then inputs by seed.
pub(crate) fn fuzz(name: &str, corpus: &[Vec<u8>], input: impl Fn(u64) -> Vec<u8>, target: impl Fn(&[u8])) {
    let run = |input: &[u8], label: &str| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) {
            let hex: String = input.iter().map(|b| format!("{b:02x}")).collect();
            eprintln!("fuzz {name}: {label} failed on input {hex}");
            resume_unwind(panic);
        }
    };
    let run_seed = |seed: u64| run(&input(seed), &format!("RDMUX_FUZZ_SEED={seed}"));
    if let Some(seed) = number("RDMUX_FUZZ_SEED") {
        return run_seed(seed);
    }
    corpus.iter().for_each(|input| run(input, "a seed of the corpus"));
    let duration = Duration::from_secs(number("RDMUX_FUZZ_SECONDS").unwrap_or(1));
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = Rng(since_epoch.as_nanos() as u64).next() >> 16;
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < duration {
        (first + count..first + count + 16).for_each(run_seed);
        count += 16;
    }
    println!("fuzz {name}: {count} inputs from seed {first}");
}
