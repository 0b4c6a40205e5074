//! Sets of nodes.

use std::hash::{Hash, Hasher};

use crate::peers::Place;

/// A set of nodes, a bit each. It allocates only when it gets a member beyond the first 64 that is greater than all it has ever had.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeSet {
    low: u64,
    /// Bits of the places from 64 on.
    high: Box<[u64]>,
}

/// Returns the word of a place, and its bit there.
fn position(place: Place) -> (usize, u64) {
    ((place.0 / u64::BITS) as usize, 1 << (place.0 % u64::BITS))
}

impl NodeSet {
    fn words(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.low).chain(self.high.iter().copied())
    }

    /// Makes room for `words` words from place 64 on.
    fn reserve(&mut self, words: usize) {
        if self.high.len() < words {
            let mut high = vec![0; words].into_boxed_slice();
            high[..self.high.len()].copy_from_slice(&self.high);
            self.high = high;
        }
    }

    pub(super) fn insert(&mut self, place: Place) {
        match position(place) {
            (0, bit) => self.low |= bit,
            (word, bit) => {
                self.reserve(word);
                self.high[word - 1] |= bit;
            }
        }
    }

    /// Removes a node, and returns whether it was a member.
    pub(super) fn remove(&mut self, place: Place) -> bool {
        let is_member = self.contains(place);
        match position(place) {
            (0, bit) => self.low &= !bit,
            (word, bit) if is_member => self.high[word - 1] &= !bit,
            _ => {}
        }
        is_member
    }

    pub(super) fn contains(&self, place: Place) -> bool {
        let (word, bit) = position(place);
        self.words().nth(word).is_some_and(|it| it & bit != 0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words().all(|it| it == 0)
    }

    /// Removes all members.
    pub(super) fn clear(&mut self) {
        self.low = 0;
        self.high.fill(0);
    }

    /// Makes the set one of a single node.
    pub(super) fn set_only(&mut self, place: Place) {
        self.clear();
        self.insert(place);
    }

    /// Makes the set equal to another one.
    pub(super) fn set(&mut self, other: &NodeSet) {
        self.clear();
        self.low = other.low;
        self.reserve(other.high.len());
        self.high[..other.high.len()].copy_from_slice(&other.high);
    }

    pub(super) fn first(&self) -> Option<Place> {
        self.iter().next()
    }

    /// Returns the members in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Place> {
        (0..).zip(self.words()).flat_map(|(index, mut word)| {
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros())?;
                word &= word - 1;
                Some(Place(index * u64::BITS + bit))
            })
        })
    }
}

impl PartialEq for NodeSet {
    fn eq(&self, other: &NodeSet) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for NodeSet {}

impl Hash for NodeSet {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.low.hash(state);
        let last = self.high.iter().rposition(|it| *it != 0);
        self.high[..last.map_or(0, |it| it + 1)].hash(state);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    fn set(places: &[u32]) -> NodeSet {
        let mut set = NodeSet::default();
        places.iter().for_each(|it| set.insert(Place(*it)));
        set
    }

    fn places(set: &NodeSet) -> Vec<u32> {
        set.iter().map(|it| it.0).collect()
    }

    #[test]
    fn node_set__has_the_nodes_that_were_inserted_and_not_removed() {
        let mut set = set(&[200, 3, 64, 63, 0, 3]);
        assert_eq!(places(&set), [0, 3, 63, 64, 200]);
        assert!(set.contains(Place(64)) && !set.contains(Place(65)) && !set.contains(Place(10_000)));
        assert!(set.remove(Place(64)) && !set.remove(Place(64)) && !set.remove(Place(10_000)));
        assert!(set.remove(Place(3)));
        assert_eq!(places(&set), [0, 63, 200]);
        set.set_only(Place(70));
        assert_eq!(places(&set), [70]);
        set.clear();
        assert!(set.is_empty());
    }

    #[test]
    fn node_set__is_equal_whatever_it_had_before() {
        let state = std::hash::RandomState::new();
        for members in [&[][..], &[1, 2], &[1, 64], &[65, 130]] {
            let mut other = set(&[5, 70, 1000]);
            other.set(&set(members));
            assert_eq!(other, set(members));
            assert_eq!(state.hash_one(&other), state.hash_one(set(members)));
            other.insert(Place(999));
            assert_ne!(other, set(members));
        }
    }
}
