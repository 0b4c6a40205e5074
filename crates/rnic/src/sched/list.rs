//! Elements by number, and doubly linked lists of them, so that an element leaves its list in constant time and nothing is allocated.

use std::ops::{Index, IndexMut};

const NONE: u32 = u32::MAX;

/// Number of an element, and how often that number had been given before: a number that was given again is another element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) index: u32,
    generation: u32,
}

/// Elements by number.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, value: T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.1 = Some(value);
        Key {
            index,
            generation: slot.0,
        }
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        self.get(key)?;
        let slot = &mut self.slots[key.index as usize];
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(key.index);
        slot.1.take()
    }

    #[inline]
    pub(super) fn get(&self, key: Key) -> Option<&T> {
        let slot = self.slots.get(key.index as usize)?;
        slot.1.as_ref().filter(|_| slot.0 == key.generation)
    }

    /// Returns the element with this number, if there is one.
    pub(super) fn at_mut(&mut self, at: u32) -> Option<&mut T> {
        self.slots.get_mut(at as usize)?.1.as_mut()
    }

    /// Returns the key of the element with this number.
    pub(super) fn key(&self, at: u32) -> Key {
        Key {
            index: at,
            generation: self.slots[at as usize].0,
        }
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.1.as_mut())
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, at: u32) -> &T {
        self.slots[at as usize]
            .1
            .as_ref()
            .expect("an element that exists")
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut T {
        self.slots[at as usize]
            .1
            .as_mut()
            .expect("an element that exists")
    }
}

/// Neighbours of an element in one list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    prev: u32,
    next: u32,
}

impl Default for Links {
    fn default() -> Links {
        Links {
            prev: NONE,
            next: NONE,
        }
    }
}

/// An element that may be in several lists at a time. `list` distinguishes them.
pub(super) trait Linked {
    fn links(&mut self, list: usize) -> &mut Links;
}

/// A list of elements of a slab.
#[derive(Clone, Copy, Debug)]
pub(super) struct List<const LIST: usize> {
    head: u32,
    tail: u32,
    len: u32,
}

impl<const LIST: usize> Default for List<LIST> {
    fn default() -> Self {
        List {
            head: NONE,
            tail: NONE,
            len: 0,
        }
    }
}

impl<const LIST: usize> List<LIST> {
    pub(super) fn head(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn push_back<T: Linked>(&mut self, slab: &mut Slab<T>, at: u32) {
        *slab[at].links(LIST) = Links {
            prev: self.tail,
            next: NONE,
        };
        match self.tail {
            NONE => self.head = at,
            tail => slab[tail].links(LIST).next = at,
        }
        self.tail = at;
        self.len += 1;
    }

    pub(super) fn push_front<T: Linked>(&mut self, slab: &mut Slab<T>, at: u32) {
        *slab[at].links(LIST) = Links {
            prev: NONE,
            next: self.head,
        };
        match self.head {
            NONE => self.tail = at,
            head => slab[head].links(LIST).prev = at,
        }
        self.head = at;
        self.len += 1;
    }

    /// Takes `at`, which is in the list, out of it.
    pub(super) fn remove<T: Linked>(&mut self, slab: &mut Slab<T>, at: u32) {
        let Links { prev, next } = std::mem::take(slab[at].links(LIST));
        match prev {
            NONE => self.head = next,
            prev => slab[prev].links(LIST).next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => slab[next].links(LIST).prev = prev,
        }
        self.len -= 1;
    }

    /// Moves `at`, which is in the list, to its end.
    pub(super) fn move_back<T: Linked>(&mut self, slab: &mut Slab<T>, at: u32) {
        if self.tail != at {
            self.remove(slab, at);
            self.push_back(slab, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::*;

    #[derive(Default)]
    struct Element([Links; 2]);

    impl Linked for Element {
        fn links(&mut self, list: usize) -> &mut Links {
            &mut self.0[list]
        }
    }

    #[test]
    fn list__as_a_deque() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut slab = Slab::default();
        for _ in 0..20 {
            slab.insert(Element::default());
        }
        let (mut list, mut other) = (List::<0>::default(), List::<1>::default());
        (0..20).for_each(|at| other.push_back(&mut slab, at));
        let mut deque = VecDeque::new();
        for _ in 0..10_000 {
            let at = rng.next_u32() % 20;
            let inside = deque.iter().position(|one| *one == at);
            match (inside, rng.next_u32() % 2) {
                (Some(place), 0) => {
                    deque.remove(place);
                    list.remove(&mut slab, at);
                }
                (Some(place), _) => {
                    deque.remove(place);
                    deque.push_back(at);
                    list.move_back(&mut slab, at);
                }
                (None, 0) => {
                    deque.push_front(at);
                    list.push_front(&mut slab, at);
                }
                (None, _) => {
                    deque.push_back(at);
                    list.push_back(&mut slab, at);
                }
            }
            assert_eq!(list.head(), deque.front().copied());
            assert_eq!(list.len() as usize, deque.len());
        }
        assert_eq!((other.head(), other.len()), (Some(0), 20));
        while let Some(at) = deque.pop_front() {
            assert_eq!(list.head(), Some(at));
            list.remove(&mut slab, at);
        }
        assert!(list.is_empty());
    }

    #[test]
    fn get__number_given_again() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_eq!(first.index, second.index);
        assert_eq!((slab.get(first), slab.get(second)), (None, Some(&'b')));
        assert_eq!(slab.remove(first), None);
    }
}
