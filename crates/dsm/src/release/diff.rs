//! Bytes of a unit that a node has written: those by which its copy differs from the twin.

use std::sync::atomic::{AtomicU64, Ordering};

/// Copies words, of which other threads write none meanwhile.
pub(crate) fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Returns whether a copy differs from its twin. Other threads write neither meanwhile.
pub(crate) fn differ(copy: &[AtomicU64], twin: &[AtomicU64]) -> bool {
    let differs =
        |(copy, twin): (&AtomicU64, &AtomicU64)| copy.load(Ordering::Relaxed) != twin.load(Ordering::Relaxed);
    copy.iter().zip(twin).any(differs)
}

/// Stores the bytes of a copy that differ from its twin, and returns whether the frame has the contents of the copy then. Other threads do not write
/// the frame meanwhile.
pub(crate) fn store_changes(copy: &[AtomicU64], twin: &[AtomicU64], frame: &[AtomicU64]) -> bool {
    let mut others = 0;
    for ((copy, twin), frame) in copy.iter().zip(twin).zip(frame) {
        let (new, old) = (copy.load(Ordering::Relaxed), frame.load(Ordering::Relaxed));
        let mask = changed(new, twin.load(Ordering::Relaxed));
        let merged = old & !mask | new & mask;
        if merged != old {
            frame.store(merged, Ordering::Relaxed);
        }
        others |= merged ^ new;
    }
    others == 0
}

/// As [`store_changes`], while other threads may write other bytes of the frame: if they do, the result means nothing. A word of which all bytes differ
/// is stored at once.
pub(crate) fn store_changes_beside_writers(
    copy: &[AtomicU64],
    twin: &[AtomicU64],
    frame: &[AtomicU64],
) -> bool {
    let mut others = 0;
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
        others |= frame.load(Ordering::Relaxed) ^ new;
    }
    others == 0
}

/// Returns a mask of the bytes that differ.
fn changed(a: u64, b: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let bits = a ^ b;
    // The highest bit of each byte is set if another one of it is: no sum exceeds its byte.
    let any = ((bits & LOW) + LOW) | bits;
    ((any & !LOW) >> 7) * 0xff
}

#[cfg(test)]
mod tests {
    use super::*;

    type Store = fn(&[AtomicU64], &[AtomicU64], &[AtomicU64]) -> bool;

    const STORES: [Store; 2] = [store_changes, store_changes_beside_writers];

    fn words(words: [u64; 4]) -> [AtomicU64; 4] {
        words.map(AtomicU64::new)
    }

    #[test]
    fn store_changes__stores_bytes_that_differ_from_the_twin_and_no_others() {
        let twin = words([1, 0x1111_1111_1111_1111, 0x0102_0304_0506_0708, 7]);
        let copy = words([1, 0x2222_2222_2222_2222, 0x0102_ff04_0500_0708, 8]);
        for store in STORES {
            let frame = words([5, 6, 0xaaaa_aaaa_aaaa_aaaa, 0x100]);
            assert!(!store(&copy, &twin, &frame));
            let stored = frame.map(AtomicU64::into_inner);
            assert_eq!(stored, [5, 0x2222_2222_2222_2222, 0xaaaa_ffaa_aa00_aaaa, 0x108]);
        }
    }

    #[test]
    fn store_changes__tells_when_the_frame_has_the_contents_of_the_copy() {
        let (twin, copy) = (words([1, 2, 3, 4]), words([1, 0x0102, 3, 5]));
        for (frame, is_same) in [
            ([1, 2, 3, 4], true),
            ([1, 0xff02, 3, 9], true),
            ([1, 0x01_0002, 3, 4], false),
            ([0, 2, 3, 4], false),
        ] {
            for store in STORES {
                assert_eq!(store(&copy, &twin, &words(frame)), is_same, "{frame:?}");
            }
        }
    }

    #[test]
    fn differ__finds_one_byte_of_any_word() {
        let twin = words([1, 2, 3, 4]);
        assert!(!differ(&words([1, 2, 3, 4]), &twin));
        for at in 0..4 {
            let copy = words([1, 2, 3, 4]);
            copy[at].fetch_xor(1 << 63, Ordering::Relaxed);
            assert!(differ(&copy, &twin), "word {at}");
        }
    }

    #[test]
    fn changed__has_all_bits_of_each_byte_that_differs() {
        for bit in 0..64 {
            assert_eq!(changed(1 << bit, 0), 0xff << (bit / 8 * 8), "bit {bit}");
            assert_eq!(changed(u64::MAX, 1 << bit ^ u64::MAX), 0xff << (bit / 8 * 8));
        }
        assert_eq!(changed(0x8001_7f80_00ff_0100, 0), 0xffff_ffff_00ff_ff00);
        assert_eq!((changed(7, 7), changed(0, u64::MAX)), (0, u64::MAX));
    }

    /// A thread counts in one byte of a word, and others' changes of the byte beside it are stored.
    #[test]
    fn store_changes_beside_writers__loses_no_write_of_a_thread_to_neighbours() {
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
                let (copy, twin) = (words([round + 1, 0, 0, 0]), words([round, 0, 0, 0]));
                store_changes_beside_writers(&copy, &twin, &frame);
            }
        });
        assert_eq!(frame[0].load(Ordering::Relaxed), ROUNDS << 32 | ROUNDS);
    }
}
