//! The objects of one kind that an application has, by their ids.

/// Objects by id. Their number is bounded. `SLOT_BITS` bits of an id say where the object is; the others count the objects that were there
/// before, so that the id of a destroyed object does not name the next one.
#[derive(Debug)]
pub(super) struct Table<T, const SLOT_BITS: u32 = 16> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    max: usize,
}

#[derive(Debug)]
struct Slot<T> {
    value: Option<T>,
    /// Number of objects that were here before, modulo 2^(32 - `SLOT_BITS`).
    generation: u32,
}

impl<T, const SLOT_BITS: u32> Table<T, SLOT_BITS> {
    /// Makes a table for at most `max` objects.
    ///
    /// # Panics
    /// If ids do not suffice for so many.
    pub(super) fn new(max: usize) -> Self {
        assert!(max <= 1 << SLOT_BITS, "{max} objects have no ids");
        Table {
            slots: Vec::new(),
            free: Vec::new(),
            max,
        }
    }

    /// Returns whether there is room for one more.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.max
    }

    /// Returns the number of objects.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns all objects.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    /// Returns the ids of all objects.
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> {
        let used = self
            .slots
            .iter()
            .zip(0..)
            .filter(|(slot, _)| slot.value.is_some());
        used.map(|(slot, at)| slot.generation << SLOT_BITS | at)
    }

    /// Adds an object, and returns its id; `None` if there is no room.
    pub(super) fn insert(&mut self, value: T) -> Option<u32> {
        self.insert_with(|_| Some(value))
    }

    /// Adds an object that `make` makes, which is given its id, and returns the id; `None` if there is no room, or `make` returns `None`.
    pub(super) fn insert_with(&mut self, make: impl FnOnce(u32) -> Option<T>) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                value: None,
                generation: 0,
            });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[at as usize];
        let id = slot.generation << SLOT_BITS | at;
        slot.value = make(id);
        if slot.value.is_none() {
            self.free.push(at);
            return None;
        }
        Some(id)
    }

    fn slot(&self, id: u32) -> Option<usize> {
        let at = (id & ((1 << SLOT_BITS) - 1)) as usize;
        let slot = self.slots.get(at)?;
        (slot.generation == id >> SLOT_BITS).then_some(at)
    }

    /// Returns an object.
    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.slots[self.slot(id)?].value.as_ref()
    }

    /// Returns an object.
    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        let at = self.slot(id)?;
        self.slots[at].value.as_mut()
    }

    /// Removes an object.
    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        let at = self.slot(id)?;
        let slot = &mut self.slots[at];
        let value = slot.value.take()?;
        slot.generation = (slot.generation + 1) & (u32::MAX >> SLOT_BITS);
        self.free.push(at as u32);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn insert__up_to_the_bound() {
        let mut table = Table::<_>::new(2);
        let ids = [(); 3].map(|()| table.insert('x'));
        assert!(ids[0].is_some() && ids[1].is_some() && ids[2].is_none());
        assert!(!table.has_room());
        assert_eq!(table.remove(ids[0].unwrap()), Some('x'));
        assert!(table.has_room());
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn get__id_of_an_object_that_is_gone() {
        let mut table = Table::<_>::new(1);
        let first = table.insert('a').unwrap();
        assert_eq!(table.get(first), Some(&'a'));
        table.remove(first);
        assert_eq!(table.remove(first), None);
        let second = table.insert('b').unwrap();
        assert_ne!(first, second);
        assert_eq!(table.get(first), None);
        assert_eq!(table.get_mut(second), Some(&mut 'b'));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn get__ids_of_no_object() {
        let table = Table::<char>::new(8);
        for id in [0, 1, 1 << 16, u32::MAX] {
            assert_eq!(table.get(id), None);
        }
    }
}
