//! The accounting of a pool: which queues it has, and how much of each is reserved. It has no queue, makes no call, and knows no user.

/// A queue of the pool. Its number never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place(pub(crate) usize);

/// Room of one queue, and the part that its users have reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) size: u32,
    pub(crate) used: u32,
    pub(crate) users: u32,
}

/// More completions than a queue of the pool can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

/// Something that was not reserved is to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotReserved;

/// Accounts of the pool's queues. They come in arrays of one queue for each vector, the youngest array first in the order of search.
#[derive(Debug)]
pub(crate) struct Shares {
    vectors: usize,
    size_min: u32,
    size_max: u32,
    /// Counter of those who do not care about the vector.
    turn: u32,
    /// The arrays one behind the other, the oldest first.
    accounts: Vec<Account>,
}

impl Shares {
    /// Makes the accounts of a pool that has no queue yet. `vectors` is at least 1.
    pub(crate) fn new(vectors: usize, size_min: u32, size_max: u32) -> Shares {
        Shares {
            vectors: vectors.max(1),
            size_min,
            size_max,
            turn: 0,
            accounts: Vec::new(),
        }
    }

    /// Returns the vector for a hint; without one, each in turn, the second first.
    pub(crate) fn vector(&mut self, hint: Option<u32>) -> usize {
        let hint = hint.unwrap_or_else(|| {
            self.turn = self.turn.wrapping_add(1);
            self.turn
        });
        hint as usize % self.vectors
    }

    /// Returns the places of a vector's queues, in the order of search.
    pub(crate) fn places(&self, vector: usize) -> impl Iterator<Item = Place> + use<> {
        let vectors = self.vectors;
        let arrays = self.accounts.len() / vectors;
        (0..arrays)
            .rev()
            .map(move |array| Place(array * vectors + vector))
    }

    /// Returns the vector of a queue.
    pub(crate) fn vector_of(&self, place: Place) -> usize {
        place.0 % self.vectors
    }

    /// Reserves room in the first queue of the vector that has it. `left`: the completions in a queue that nobody reserves any more.
    pub(crate) fn take(&mut self, nr: u32, vector: usize, left: impl Fn(Place) -> u32) -> Option<Place> {
        self.places(vector)
            .find(|place| self.take_at(*place, nr, left(*place)))
    }

    /// Reserves room in a queue, if it has that.
    pub(crate) fn take_at(&mut self, place: Place, nr: u32, left: u32) -> bool {
        let Some(account) = self.accounts.get_mut(place.0) else {
            return false;
        };
        let fits = u64::from(account.used) + u64::from(nr) + u64::from(left) <= u64::from(account.size);
        if fits {
            account.used += nr;
            account.users += 1;
        }
        fits
    }

    /// Returns the size of new queues that have room for `nr` completions.
    pub(crate) fn size_for(&self, nr: u32) -> Result<u32, TooMany> {
        if nr > self.size_max {
            // Queues that cannot hold it would be made for ever.
            return Err(TooMany);
        }
        Ok(nr.max(self.size_min).max(1).min(self.size_max))
    }

    /// Adds an array of queues of this size.
    pub(crate) fn grow(&mut self, size: u32) {
        let account = Account {
            size,
            used: 0,
            users: 0,
        };
        self.accounts.extend((0..self.vectors).map(|_| account));
    }

    /// Gives back what a user had reserved. After an error nothing has changed.
    pub(crate) fn put(&mut self, place: Place, nr: u32) -> Result<(), NotReserved> {
        let account = self.accounts.get_mut(place.0).ok_or(NotReserved)?;
        if nr > account.used || account.users == 0 {
            return Err(NotReserved);
        }
        account.used -= nr;
        account.users -= 1;
        Ok(())
    }

    /// Changes what a user has reserved, if the queue has room for it.
    pub(crate) fn resize(&mut self, place: Place, from: u32, to: u32, left: u32) -> Result<(), TooMany> {
        let account = self.accounts.get_mut(place.0).ok_or(TooMany)?;
        let others = account.used.checked_sub(from).ok_or(TooMany)?;
        let after = u64::from(others) + u64::from(to);
        if to > from && after + u64::from(left) > u64::from(account.size) {
            return Err(TooMany);
        }
        account.used = after as u32;
        Ok(())
    }

    /// Returns the account of a queue.
    pub(crate) fn account(&self, place: Place) -> Option<Account> {
        self.accounts.get(place.0).copied()
    }
}

#[cfg(test)]
mod tests;
