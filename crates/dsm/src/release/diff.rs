//! Bytes of a unit that a node has written: those by which its copy differs from the twin.

use std::sync::atomic::{AtomicU64, Ordering};

/// Copies words, of which other threads write none meanwhile.
pub(crate) fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Stores the bytes of a copy that differ from its twin. Other threads may write other bytes of the frame meanwhile. A word of which all bytes
/// differ, or that nobody else writes, is stored at once.
pub(crate) fn store_changes(copy: &[AtomicU64], twin: &[AtomicU64], frame: &[AtomicU64]) {
    for ((copy, twin), frame) in copy.iter().zip(twin).zip(frame) {
        let new = copy.load(Ordering::Relaxed);
        let mask = changed(new, twin.load(Ordering::Relaxed));
        match mask {
            0 => {}
            u64::MAX => frame.store(new, Ordering::Relaxed),
            _ => {
                let merge = |word| Some(word & !mask | new & mask);
                // It always has a value to store.
                let _ = frame.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
            }
        }
    }
}

/// Returns a mask of the bytes that differ.
fn changed(a: u64, b: u64) -> u64 {
    let bytes = (a ^ b).to_ne_bytes();
    u64::from_ne_bytes(bytes.map(|byte| match byte {
        0 => 0,
        _ => 0xff,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: [u64; 4]) -> [AtomicU64; 4] {
        words.map(AtomicU64::new)
    }

    #[test]
    fn store_changes__stores_bytes_that_differ_from_the_twin_and_no_others() {
        let twin = words([1, 0x1111_1111_1111_1111, 0x0102_0304_0506_0708, 7]);
        let copy = words([1, 0x2222_2222_2222_2222, 0x0102_ff04_0500_0708, 8]);
        let frame = words([5, 6, 0xaaaa_aaaa_aaaa_aaaa, 0x100]);
        store_changes(&copy, &twin, &frame);
        let stored = frame.map(AtomicU64::into_inner);
        assert_eq!(stored, [5, 0x2222_2222_2222_2222, 0xaaaa_ffaa_aa00_aaaa, 0x108]);
    }

    /// A thread counts in one byte of a word, and others' changes of the byte beside it are stored.
    #[test]
    fn store_changes__loses_no_write_of_a_thread_to_neighbours() {
        const ROUNDS: u64 = 100_000;
        let frame = words([0; 4]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let before = frame[0].fetch_add(1 << 32, Ordering::Relaxed);
                    assert_eq!(before >> 32, round);
                }
            });
            for round in 0..ROUNDS {
                store_changes(&words([round + 1, 0, 0, 0]), &words([round, 0, 0, 0]), &frame);
            }
        });
        assert_eq!(frame[0].load(Ordering::Relaxed), ROUNDS << 32 | ROUNDS);
    }
}
