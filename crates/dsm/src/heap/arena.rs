//! The units of a region that one node hands out.

use std::collections::BTreeMap;
use std::ops::Range;

/// Units of a region that are at home at a node, free and allocated ones. It touches none of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Numbers of the free units in a row, by the first of them. Rows do not adjoin.
    free: BTreeMap<u32, u32>,
    /// Numbers of units that were allocated together, by the first of them.
    used: BTreeMap<u32, u32>,
}

impl Arena {
    pub(crate) fn new(units: Range<u32>) -> Arena {
        let count = units.end - units.start;
        Arena {
            free: BTreeMap::from([(units.start, count)]),
            used: BTreeMap::new(),
        }
    }

    /// Allocates units in a row, at least one, at the lowest place. Returns the first of them if there are so many.
    ///
    /// It looks at all rows that are too short: for one unit at no other than the first.
    pub(crate) fn allocate(&mut self, count: u32) -> Option<u32> {
        let count = count.max(1);
        let (first, len) = self.free.iter().find(|(_, len)| **len >= count)?;
        let (first, len) = (*first, *len);
        self.free.remove(&first);
        if len > count {
            self.free.insert(first + count, len - count);
        }
        self.used.insert(first, count);
        Some(first)
    }

    /// Frees what was allocated from a unit on. Returns false if nothing was.
    pub(crate) fn free(&mut self, first: u32) -> bool {
        let Some(mut count) = self.used.remove(&first) else {
            return false;
        };
        let mut first = first;
        if let Some(behind) = self.free.remove(&(first + count)) {
            count += behind;
        }
        let before = self.free.range(..first).next_back();
        if let Some((start, len)) = before.map(|(start, len)| (*start, *len))
            && start + len == first
        {
            first = start;
            count += len;
        }
        self.free.insert(first, count);
        true
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::*;

    #[test]
    fn allocate__gives_the_lowest_units_until_there_are_none() {
        let mut arena = Arena::new(10..14);
        assert_eq!([2, 1].map(|count| arena.allocate(count)), [Some(10), Some(12)]);
        assert_eq!(
            [2, 1, 1].map(|count| arena.allocate(count)),
            [None, Some(13), None]
        );
        assert!(arena.free(12));
        assert_eq!(arena.allocate(1), Some(12));
        assert_eq!(arena.allocate(u32::MAX), None);
    }

    #[test]
    fn free__of_what_is_not_allocated_changes_nothing() {
        let mut arena = Arena::new(10..20);
        arena.allocate(4);
        let before = arena.clone();
        for unit in [0, 9, 11, 13, 14, 19, 20, u32::MAX] {
            assert!(!arena.free(unit), "{unit}");
        }
        assert_eq!(arena, before);
        assert!(arena.free(10));
        assert!(!arena.free(10));
        assert_eq!(arena, Arena::new(10..20));
    }

    /// Against a list of who has each unit.
    #[test]
    fn allocate__and_free_in_any_order_keep_objects_apart() {
        for seed in 0..300 {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut next = |bound: u32| random.next_u32() % bound;
            let units = 5..5 + 1 + next(60);
            let mut arena = Arena::new(units.clone());
            let mut owners = vec![None; units.end as usize];
            let mut objects: Vec<(u32, u32)> = Vec::new();
            for _ in 0..400 {
                if next(2) == 0 && !objects.is_empty() {
                    let (first, count) = objects.swap_remove(next(objects.len() as u32) as usize);
                    assert!(arena.free(first), "seed {seed}");
                    owners[first as usize..(first + count) as usize].fill(None);
                    continue;
                }
                let count = 1 + next(5);
                let free = |first: u32| {
                    let row = first..first + count;
                    row.end <= units.end && row.clone().all(|unit| owners[unit as usize].is_none())
                };
                let lowest = units.clone().find(|first| free(*first));
                assert_eq!(arena.allocate(count), lowest, "seed {seed}");
                if let Some(first) = lowest {
                    owners[first as usize..(first + count) as usize].fill(Some(first));
                    objects.push((first, count));
                }
            }
            objects.iter().for_each(|(first, _)| assert!(arena.free(*first)));
            assert_eq!(arena, Arena::new(units), "seed {seed}");
        }
    }
}
