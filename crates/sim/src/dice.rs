//! Random numbers by seed.

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

/// Source of every random decision of a run.
#[derive(Debug)]
pub(crate) struct Dice(ChaCha8Rng);

impl Dice {
    /// `stream` separates decisions that must not shift when another part of the run draws more or less.
    pub(crate) fn new(seed: u64, stream: u64) -> Dice {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Dice(rng)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// `0..n`, or 0 when `n` is 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// `low..=high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// As [`Dice::one_in`]; 0 is never.
    pub(crate) fn one_in_or_never(&mut self, n: u64) -> bool {
        n > 0 && self.one_in(n)
    }

    pub(crate) fn percent(&mut self, percent: f64) -> bool {
        f64::from(self.0.next_u32()) < percent / 100.0 * 4_294_967_296.0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// `1..=max`, each power of two as likely as the next.
    pub(crate) fn log_uniform(&mut self, max: u64) -> u64 {
        let bits = self.between(0, u64::from(max.ilog2()));
        (1 << bits) + self.below((1 << bits).min(max - (1 << bits) + 1))
    }

    /// Fills `bytes` with bytes that hardly ever repeat.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        let mut state = self.next() | 1;
        for chunk in bytes.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
        }
    }
}
