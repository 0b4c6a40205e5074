//! Values by unit. A region may have far more units than are in use.

use std::hash::{Hash, Hasher};

use super::slab::Slab;

/// Bits of a unit's number that a node of the tree decides about.
const DIGIT_BITS: u32 = 4;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Greatest number of levels.
const LEVELS_MAX: usize = (u64::BITS / DIGIT_BITS) as usize;

/// A tree of nodes that choose by the digits of a unit's number, the highest one first. A value takes its own bytes and at most one node a
/// level; a node has 64 bytes.
#[derive(Clone, Debug)]
pub(super) struct Table<T> {
    levels: u32,
    /// Number of the highest node, 0 if no unit has a value.
    root: u32,
    /// Numbers of the nodes below, or of the values. 0 is none.
    nodes: Slab<[u32; DIGITS]>,
    values: Slab<T>,
}

fn digit(unit: u64, level: u32) -> usize {
    (unit >> (DIGIT_BITS * level)) as usize % DIGITS
}

impl<T: Default> Table<T> {
    /// Makes a table for units below a number.
    pub(super) fn new(units: u64) -> Table<T> {
        let bits = u64::BITS - units.saturating_sub(1).leading_zeros();
        Table {
            levels: bits.div_ceil(DIGIT_BITS).max(1),
            root: 0,
            nodes: Slab::default(),
            values: Slab::default(),
        }
    }

    /// Returns the number of a unit's value, or 0.
    fn find(&self, unit: u64) -> u32 {
        let mut at = self.root;
        for level in (0..self.levels).rev() {
            if at == 0 {
                break;
            }
            at = self.nodes[at][digit(unit, level)];
        }
        at
    }

    pub(super) fn get(&self, unit: u64) -> Option<&T> {
        let value = self.find(unit);
        (value != 0).then(|| &self.values[value])
    }

    pub(super) fn get_mut(&mut self, unit: u64) -> Option<&mut T> {
        let value = self.find(unit);
        (value != 0).then(|| &mut self.values[value])
    }

    /// Returns the value of a unit, which `new` makes if there is none.
    pub(super) fn get_or_insert(&mut self, unit: u64, new: impl FnOnce() -> T) -> &mut T {
        let mut value = self.find(unit);
        if value == 0 {
            value = self.values.insert(new());
            self.link(unit, value);
        }
        &mut self.values[value]
    }

    fn link(&mut self, unit: u64, value: u32) {
        if self.root == 0 {
            self.root = self.nodes.insert([0; DIGITS]);
        }
        let mut at = self.root;
        for level in (1..self.levels).rev() {
            let mut below = self.nodes[at][digit(unit, level)];
            if below == 0 {
                below = self.nodes.insert([0; DIGITS]);
                self.nodes[at][digit(unit, level)] = below;
            }
            at = below;
        }
        self.nodes[at][digit(unit, 0)] = value;
    }

    /// Removes the value of a unit, if it has one, and the nodes that led to it alone.
    pub(super) fn remove(&mut self, unit: u64) {
        let mut path = [0; LEVELS_MAX];
        let mut at = self.root;
        for level in (0..self.levels).rev() {
            if at == 0 {
                return;
            }
            path[level as usize] = at;
            at = self.nodes[at][digit(unit, level)];
        }
        if at == 0 {
            return;
        }
        self.values.remove(at);
        for level in 0..self.levels {
            let number = path[level as usize];
            let node = &mut self.nodes[number];
            node[digit(unit, level)] = 0;
            if node.iter().any(|it| *it != 0) {
                return;
            }
            self.nodes.remove(number);
        }
        self.root = 0;
    }

    /// Returns the first unit, not below `from`, that has a value, with the value's number.
    fn first(&self, from: u64) -> Option<(u64, u32)> {
        let is_beyond = from.checked_shr(DIGIT_BITS * self.levels).unwrap_or(0) != 0;
        match self.root {
            0 => None,
            _ if is_beyond => None,
            root => self.first_below(root, self.levels - 1, from),
        }
    }

    fn first_below(&self, at: u32, level: u32, from: u64) -> Option<(u64, u32)> {
        let start = digit(from, level);
        let below = self.nodes[at].iter().enumerate().skip(start);
        below
            .filter(|(_, below)| **below != 0)
            .find_map(|(digit, below)| {
                let from = if digit == start { from } else { 0 };
                let (unit, value) = match level {
                    0 => (0, *below),
                    _ => self.first_below(*below, level - 1, from)?,
                };
                Some((((digit as u64) << (DIGIT_BITS * level)) | unit, value))
            })
    }

    /// Returns the first unit, not below `from`, that has a value.
    pub(super) fn next_mut(&mut self, from: u64) -> Option<(u64, &mut T)> {
        let (unit, value) = self.first(from)?;
        Some((unit, &mut self.values[value]))
    }

    /// Returns the units that have values, in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let (unit, value) = self.first(from?)?;
            from = unit.checked_add(1);
            Some((unit, &self.values[value]))
        })
    }
}

impl<T: Default + PartialEq> PartialEq for Table<T> {
    fn eq(&self, other: &Table<T>) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<T: Default + Eq> Eq for Table<T> {}

impl<T: Default + Hash> Hash for Table<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.iter().for_each(|it| it.hash(state));
        u64::MAX.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::*;

    /// Compares a table with a map, by random changes.
    #[test]
    fn table__is_a_map() {
        for (seed, units) in [(1, 1), (2, 16), (3, 17), (4, 1 << 20), (5, u64::MAX)] {
            println!("seed {seed}, {units} units");
            let dice = &mut ChaCha8Rng::seed_from_u64(seed);
            let (mut table, mut map) = (Table::new(units), BTreeMap::new());
            let some: Vec<u64> = (0..20)
                .map(|_| dice.next_u64() % units)
                .chain([0, units - 1])
                .collect();
            for step in 1..2000 {
                let unit = some[dice.next_u32() as usize % some.len()];
                match dice.next_u32() % 2 {
                    0 => {
                        table.remove(unit);
                        map.remove(&unit);
                    }
                    _ => {
                        *table.get_or_insert(unit, || 0) = step;
                        map.insert(unit, step);
                    }
                }
                assert!(table.iter().eq(map.iter().map(|(unit, value)| (*unit, value))));
                assert_eq!(table.get(unit), map.get(&unit));
                let next = table.next_mut(unit).map(|(unit, value)| (unit, *value));
                assert_eq!(
                    next,
                    map.range(unit..).next().map(|(unit, value)| (*unit, *value))
                );
            }
            some.iter().for_each(|unit| table.remove(*unit));
            assert_eq!(table.root, 0);
            assert_eq!(table, Table::new(units));
        }
    }
}
