//! Choice of what a power cut leaves: by dice, or by a walk over everything that is possible.

use crate::dice::Dice;

/// Source of choices.
pub(super) trait Choose {
    /// Returns one of `0..n`; `n` is at least 1. Zero is the choice that keeps least.
    fn choose(&mut self, n: u64) -> u64;

    /// Returns whether lines may be torn.
    fn tears(&self) -> bool {
        true
    }
}

/// Choice by chance. Half of the cuts leave no more than they must: those reveal most.
#[derive(Debug)]
pub(super) struct Chance<'a> {
    dice: &'a mut Dice,
    keeps_least: bool,
}

impl Chance<'_> {
    pub(super) fn new(dice: &mut Dice) -> Chance<'_> {
        let keeps_least = dice.one_in(2);
        Chance { dice, keeps_least }
    }
}

impl Choose for Chance<'_> {
    fn choose(&mut self, n: u64) -> u64 {
        if self.keeps_least { 0 } else { self.dice.below(n) }
    }
}

/// Choice of each possibility once: a walk over the tree of all choices.
#[derive(Debug)]
pub(super) struct Walk {
    /// Choices made and numbers of options, from the root to a leaf.
    path: Vec<(u64, u64)>,
    at: usize,
    tears: bool,
}

impl Walk {
    pub(super) fn new(tears: bool) -> Walk {
        Walk {
            path: Vec::new(),
            at: 0,
            tears,
        }
    }

    /// Goes on to the next leaf; returns false when all were visited.
    pub(super) fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((chosen, of)) = self.path.pop() {
            if chosen + 1 < of {
                self.path.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

impl Choose for Walk {
    fn choose(&mut self, n: u64) -> u64 {
        if self.at == self.path.len() {
            self.path.push((0, n));
        }
        let (chosen, _) = self.path[self.at];
        self.at += 1;
        chosen
    }

    fn tears(&self) -> bool {
        self.tears
    }
}
