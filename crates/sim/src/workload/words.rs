//! Words that atomic operations of several QPs work on, and the check that the values they returned fit one order of them all.

use std::collections::BTreeMap;

use super::Checked;
use super::side::Piece;
use crate::dice::Dice;

/// Words to add to, then words to swap.
const ADDED: usize = 3;
const SWAPPED: usize = 3;

/// An atomic operation in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordOp {
    word: usize,
    /// Number to add to the word.
    pub(super) add: u64,
    pub(super) compare: u64,
    pub(super) swap: u64,
    /// Value that the word had reached by operations that had completed when this one was posted.
    floor: u64,
}

#[derive(Debug, Default)]
struct Word {
    initial: u64,
    /// By the value that an addition found, less `initial`: the number that it added.
    added: BTreeMap<u64, u64>,
    /// By the value that a swap found: the value that it left.
    swapped: BTreeMap<u64, u64>,
    /// Last value that a swap found or left.
    seen: u64,
    floor: u64,
    /// Values that swaps were to store.
    offered: Vec<u64>,
    /// Set when an operation failed that may have taken effect.
    unsure: bool,
}

/// The words of a host.
#[derive(Debug)]
pub(super) struct Words {
    at: u64,
    words: Vec<Word>,
    next: u64,
}

impl Words {
    /// Returns the number of bytes of all words: for atomics, and one word for the ATOMIC WRITEs of each flow.
    pub(super) fn bytes(flows: usize) -> u64 {
        8 * (ADDED + SWAPPED + flows) as u64
    }

    pub(super) fn new(dice: &mut Dice, at: u64, image: &[u8]) -> Words {
        let initial = |n: usize| read_word(image, at + 8 * n as u64);
        let words = (0..ADDED + SWAPPED).map(|n| Word {
            initial: initial(n),
            seen: initial(n),
            ..Word::default()
        });
        let words = words.collect();
        Words {
            at,
            words,
            next: dice.next() << 20,
        }
    }

    pub(super) fn of_atomics(&self) -> Piece {
        Piece {
            at: self.at,
            len: 8 * self.words.len() as u64,
        }
    }

    /// Returns the location for the ATOMIC WRITEs of a flow.
    pub(super) fn published(&self, flow: usize) -> Piece {
        let at = self.at + 8 * (self.words.len() + flow) as u64;
        Piece { at, len: 8 }
    }

    pub(super) fn at(&self, op: &WordOp) -> u64 {
        self.at + 8 * op.word as u64
    }

    /// Returns a value that no word ever held.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn add(&mut self, dice: &mut Dice) -> WordOp {
        let word = dice.below(ADDED as u64) as usize;
        WordOp {
            word,
            add: dice.log_uniform(1 << 40),
            compare: 0,
            swap: 0,
            floor: self.words[word].floor,
        }
    }

    /// Returns a compare-and-swap, mostly with the value that it will find unless another operation is faster.
    pub(super) fn compare_swap(&mut self, dice: &mut Dice) -> WordOp {
        let word = ADDED + dice.below(SWAPPED as u64) as usize;
        let swap = self.fresh();
        let known = &mut self.words[word];
        known.offered.push(swap);
        let compare = if dice.one_in(8) { dice.next() } else { known.seen };
        WordOp {
            word,
            add: 0,
            compare,
            swap,
            floor: 0,
        }
    }

    /// Checks an operation that returned the value it found.
    pub(super) fn done(&mut self, op: &WordOp, found: u64) -> Checked {
        let word = &mut self.words[op.word];
        if op.add > 0 {
            let found = found.wrapping_sub(word.initial);
            if found < op.floor {
                return Err("an addition found less than one before it had left".to_owned());
            }
            if word.added.insert(found, op.add).is_some() {
                return Err("two additions found the same value".to_owned());
            }
            word.floor = word.floor.max(found + op.add);
            return Ok(());
        }
        if found != word.initial && !word.offered.contains(&found) {
            return Err(format!("a swap found {found:#x}, which nobody stored"));
        }
        word.seen = found;
        if found == op.compare {
            word.seen = op.swap;
            if word.swapped.insert(found, op.swap).is_some() {
                return Err("two swaps found the same value".to_owned());
            }
        }
        Ok(())
    }

    /// Records an operation that failed, whether it took effect or not.
    pub(super) fn unsure(&mut self, op: &WordOp) {
        self.words[op.word].unsure = true;
    }

    /// Checks that every operation took effect once, and nothing else did.
    pub(super) fn check(&self, image: &[u8]) -> Checked {
        for (n, word) in self.words.iter().enumerate() {
            let last = read_word(image, self.at + 8 * n as u64);
            let mut sum = 0;
            for (found, add) in &word.added {
                if *found < sum || *found > sum && !word.unsure {
                    return Err(format!(
                        "word {n}: an addition found {found:#x}, those before it make {sum:#x}"
                    ));
                }
                sum = found + add;
            }
            let mut value = word.initial;
            let mut swaps = 0;
            while let Some(next) = word.swapped.get(&value) {
                value = *next;
                swaps += 1;
            }
            let fits = last == value.wrapping_add(sum) && swaps == word.swapped.len();
            if !fits && !word.unsure {
                return Err(format!("word {n} holds {last:#x}: an atomic is missing"));
            }
        }
        Ok(())
    }
}

fn read_word(image: &[u8], at: u64) -> u64 {
    let bytes = image[at as usize..].first_chunk().copied();
    bytes.map_or(0, u64::from_ne_bytes)
}
