//! Storage by number that grows by chunks and uses the places of what was removed again, so that events allocate only while more is in use than
//! ever before.

use std::ops::{Index, IndexMut};

/// Values of a chunk.
const CHUNK: usize = 16;

/// Values by number. 0 is the number of none.
#[derive(Clone, Debug)]
pub(super) struct Slab<T> {
    /// Each has room for [`CHUNK`] values. A chunk never moves.
    chunks: Vec<Vec<T>>,
    /// Numbers of removed values, with room for all numbers.
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab {
            chunks: Vec::new(),
            free: Vec::new(),
        }
    }
}

fn position(number: u32) -> (usize, usize) {
    let index = number as usize - 1;
    (index / CHUNK, index % CHUNK)
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        let (chunk, index) = position(number);
        &self.chunks[chunk][index]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        let (chunk, index) = position(number);
        &mut self.chunks[chunk][index]
    }
}

impl<T: Default> Slab<T> {
    /// Stores a value, and returns its number.
    ///
    /// # Panics
    /// If there are 2^32 - 1 values, for which no memory suffices.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(number) = self.free.pop() {
            self[number] = value;
            return number;
        }
        if self.chunks.last().is_none_or(|it| it.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
            // None is free now.
            self.free.reserve(self.chunks.len() * CHUNK);
        }
        let before = (self.chunks.len() - 1) * CHUNK;
        let chunk = self.chunks.last_mut().expect("it was pushed if there was none");
        chunk.push(value);
        u32::try_from(before + chunk.len()).expect("fewer than 2^32 values")
    }

    /// Returns all values. Those that were removed are the default.
    fn values(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    /// Takes a value out.
    pub(super) fn remove(&mut self, number: u32) -> T {
        self.free.push(number);
        std::mem::take(&mut self[number])
    }
}

/// Items of many lists, whose heads are [`List`].
#[derive(Clone, Debug)]
pub(super) struct Lists<T> {
    links: Slab<Link<T>>,
}

impl<T> Default for Lists<T> {
    fn default() -> Lists<T> {
        let links = Slab::default();
        Lists { links }
    }
}

/// A list: numbers of its first and its last link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct List {
    first: u32,
    last: u32,
}

#[derive(Clone, Debug, Default)]
struct Link<T> {
    item: T,
    next: u32,
}

impl List {
    pub(super) fn is_empty(self) -> bool {
        self.first == 0
    }
}

impl<T: Default> Lists<T> {
    /// Adds an item behind the others of a list.
    pub(super) fn push(&mut self, list: &mut List, item: T) {
        let link = self.links.insert(Link { item, next: 0 });
        match list.last {
            0 => list.first = link,
            last => self.links[last].next = link,
        }
        list.last = link;
    }

    /// Takes the first item out of a list.
    pub(super) fn pop(&mut self, list: &mut List) -> Option<T> {
        if list.is_empty() {
            return None;
        }
        let Link { item, next } = self.links.remove(list.first);
        list.first = next;
        if next == 0 {
            list.last = 0;
        }
        Some(item)
    }

    /// Returns the items of a list in their order.
    pub(super) fn iter(&self, list: List) -> impl Iterator<Item = &T> {
        let mut next = list.first;
        std::iter::from_fn(move || {
            let link = (next != 0).then(|| &self.links[next])?;
            next = link.next;
            Some(&link.item)
        })
    }

    /// Returns the items of all lists, and the default in their midst.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.links.values().map(|link| &link.item)
    }

    /// Returns the first item of a list for which a condition holds.
    pub(super) fn find(&mut self, list: List, mut is_it: impl FnMut(&T) -> bool) -> Option<&mut T> {
        let mut at = list.first;
        while at != 0 && !is_it(&self.links[at].item) {
            at = self.links[at].next;
        }
        (at != 0).then(|| &mut self.links[at].item)
    }

    /// Changes the items of a list, and removes those for which `is_kept` returns false.
    pub(super) fn retain(&mut self, list: &mut List, mut is_kept: impl FnMut(&mut T) -> bool) {
        let mut all = std::mem::take(list);
        while let Some(mut item) = self.pop(&mut all) {
            if is_kept(&mut item) {
                self.push(list, item);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slab__uses_the_numbers_of_removed_values_again() {
        let mut slab = Slab::default();
        let numbers: Vec<u32> = (0..40).map(|value: u64| slab.insert(value)).collect();
        let chunks = slab.chunks.len();
        for _ in 0..3 {
            for number in &numbers {
                assert_eq!(slab.remove(*number), u64::from(*number) - 1);
            }
            let mut again: Vec<u32> = numbers.iter().map(|_| slab.insert(0)).collect();
            again.iter().for_each(|it| slab[*it] = u64::from(*it) - 1);
            again.sort_unstable();
            assert_eq!(again, numbers);
        }
        assert_eq!(slab.chunks.len(), chunks);
    }

    #[test]
    fn lists__keep_their_items_in_order() {
        let mut lists = Lists::default();
        let (mut odd, mut all) = (List::default(), List::default());
        for item in 1..6 {
            lists.push(&mut all, item);
            lists.push(&mut odd, item);
        }
        lists.retain(&mut odd, |it| *it % 2 == 1);
        assert!(lists.iter(odd).eq(&[1, 3, 5]));
        *lists.find(odd, |it| *it == 3).unwrap() = 7;
        assert_eq!(lists.find(odd, |it| *it == 3), None);
        lists.push(&mut odd, 9);
        let mut every: Vec<i32> = lists.all().copied().filter(|it| *it != 0).collect();
        every.sort_unstable();
        assert_eq!(every, [1, 1, 2, 3, 4, 5, 5, 7, 9]);
        let taken: Vec<_> = std::iter::from_fn(|| lists.pop(&mut odd)).collect();
        assert_eq!(taken, [1, 7, 5, 9]);
        assert!(odd.is_empty());
        assert!(lists.iter(all).eq(&[1, 2, 3, 4, 5]));
    }
}
