use super::*;

fn nothing_left(_: Place) -> u32 {
    0
}

/// Numbers that look random (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[test]
fn vector__of_a_hint_wraps_and_without_one_they_come_in_turn() {
    let mut shares = Shares::new(3, 16, 64);
    let hints = [0, 1, 2, 3, 7, u32::MAX];
    assert_eq!(hints.map(|hint| shares.vector(Some(hint))), [0, 1, 2, 0, 1, 0]);
    assert_eq!([(); 5].map(|()| shares.vector(None)), [1, 2, 0, 1, 2]);
    shares.turn = u32::MAX - 1;
    assert_eq!([(); 2].map(|()| shares.vector(None)), [0, 0], "the counter wraps");
    let mut one = Shares::new(1, 16, 64);
    assert_eq!([one.vector(None), one.vector(Some(9))], [0, 0]);
    // More vectors than a machine has processors.
    let mut many = Shares::new(1000, 16, 64);
    assert_eq!([many.vector(Some(999)), many.vector(Some(1999))], [999, 999]);
}

#[test]
fn take__the_first_with_room_and_the_youngest_array_is_the_first() {
    let mut shares = Shares::new(2, 10, 100);
    assert_eq!(shares.take(4, 1, nothing_left), None);
    shares.grow(10);
    assert_eq!(shares.take(4, 1, nothing_left), Some(Place(1)));
    assert_eq!(
        shares.take(6, 1, nothing_left),
        Some(Place(1)),
        "full to the last"
    );
    assert_eq!(shares.take(1, 1, nothing_left), None);
    shares.grow(10);
    assert_eq!(shares.take(1, 1, nothing_left), Some(Place(3)));
    // Not the one that is used least, and not the one of the other vector.
    shares.put(Place(1), 4).unwrap();
    assert_eq!(shares.take(4, 1, nothing_left), Some(Place(3)));
    assert_eq!(shares.take(6, 1, nothing_left), None);
    assert_eq!(shares.take(4, 1, nothing_left), Some(Place(3)));
    assert_eq!(
        shares.take(4, 1, nothing_left),
        Some(Place(1)),
        "the only one with room"
    );
    assert_eq!(shares.places(0).collect::<Vec<_>>(), [Place(2), Place(0)]);
}

#[test]
fn take__completions_that_nobody_reserves_take_room() {
    let mut shares = Shares::new(1, 10, 100);
    shares.grow(10);
    assert_eq!(shares.take(8, 0, |_| 3), None);
    assert_eq!(shares.take(7, 0, |_| 3), Some(Place(0)));
}

#[test]
fn size_for__the_least_size_unless_more_is_needed_or_there_is_less() {
    let shares = Shares::new(1, 16, 64);
    assert_eq!(
        [1, 16, 17, 64].map(|nr| shares.size_for(nr)),
        [Ok(16), Ok(16), Ok(17), Ok(64)]
    );
    assert_eq!(shares.size_for(65), Err(TooMany));
    assert_eq!(Shares::new(1, 4096, 64).size_for(1), Ok(64));
    assert_eq!(Shares::new(1, 0, u32::MAX).size_for(0), Ok(1));
    assert_eq!(Shares::new(1, 0, u32::MAX).size_for(u32::MAX), Ok(u32::MAX));
}

#[test]
fn put__below_zero_changes_nothing() {
    let mut shares = Shares::new(1, 10, 100);
    assert_eq!(shares.put(Place(0), 0), Err(NotReserved), "no queue");
    shares.grow(10);
    assert_eq!(shares.put(Place(0), 0), Err(NotReserved), "no user");
    shares.take(4, 0, nothing_left).unwrap();
    assert_eq!(shares.put(Place(0), 5), Err(NotReserved));
    let before = shares.account(Place(0));
    assert_eq!(before.map(|account| (account.used, account.users)), Some((4, 1)));
    shares.put(Place(0), 4).unwrap();
    assert_eq!(shares.put(Place(0), 0), Err(NotReserved));
}

#[test]
fn resize__as_far_as_there_is_room() {
    let mut shares = Shares::new(1, 10, 100);
    shares.grow(10);
    shares.take(4, 0, nothing_left).unwrap();
    shares.take(3, 0, nothing_left).unwrap();
    assert_eq!(shares.resize(Place(0), 4, 8, 0), Err(TooMany));
    assert_eq!(shares.resize(Place(0), 4, 7, 1), Err(TooMany));
    assert_eq!(shares.resize(Place(0), 4, 7, 0), Ok(()));
    assert_eq!(shares.resize(Place(0), 7, 2, 9), Ok(()), "less fits always");
    assert_eq!(shares.account(Place(0)).map(|account| account.used), Some(5));
    assert_eq!(shares.resize(Place(0), 4, u32::MAX, 0), Err(TooMany));
    assert_eq!(
        shares.resize(Place(0), 6, 1, 0),
        Err(TooMany),
        "more than is reserved"
    );
}

/// A pool as Linux describes it: a list of arrays of (size, used), searched from its head.
#[derive(Default)]
struct Model {
    arrays: Vec<Vec<(u32, u32)>>,
    turn: u32,
}

impl Model {
    /// Returns the index of the array from the tail, and the vector; `None` if no queue can hold it.
    fn get(
        &mut self,
        nr: u32,
        hint: Option<u32>,
        (vectors, min, max): (usize, u32, u32),
    ) -> Option<(usize, usize)> {
        let number = hint.unwrap_or_else(|| {
            self.turn += 1;
            self.turn
        });
        let vector = number as usize % vectors;
        if nr > max {
            return None;
        }
        for _ in 0..2 {
            let count = self.arrays.len();
            for (at, array) in self.arrays.iter_mut().enumerate() {
                let (size, used) = &mut array[vector];
                if *used + nr <= *size {
                    *used += nr;
                    return Some((count - 1 - at, vector));
                }
            }
            self.arrays.insert(0, vec![(max.min(nr.max(min)), 0); vectors]);
        }
        unreachable!("a new queue has room");
    }

    fn put(&mut self, (array, vector): (usize, usize), nr: u32) {
        let at = self.arrays.len() - 1 - array;
        self.arrays[at][vector].1 -= nr;
    }
}

/// The pool's search, as [`crate::CqPool::get`] does it.
fn get(shares: &mut Shares, nr: u32, hint: Option<u32>) -> Option<Place> {
    let vector = shares.vector(hint);
    loop {
        if let Some(place) = shares.take(nr, vector, nothing_left) {
            return Some(place);
        }
        let size = shares.size_for(nr).ok()?;
        shares.grow(size);
    }
}

#[test]
fn get_and_put__as_the_model_does() {
    let seed = std::env::var("RDMUX_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("seed {seed} (RDMUX_SEED)");
    let mut dice = Dice(seed | 1);
    for _ in 0..200 {
        let vectors = dice.below(6) as usize + 1;
        let (min, max) = (dice.below(40) as u32 + 1, dice.below(60) as u32 + 1);
        let (mut shares, mut model) = (Shares::new(vectors, min, max), Model::default());
        let mut users = Vec::new();
        for _ in 0..200 {
            if dice.below(5) < 2 && !users.is_empty() {
                let (place, nr) = users.swap_remove(dice.below(users.len() as u64) as usize);
                let Place(at) = place;
                shares.put(place, nr).unwrap();
                model.put((at / vectors, at % vectors), nr);
            } else {
                let nr = dice.below(u64::from(max) + 3) as u32;
                let hint = (dice.below(2) == 0).then(|| dice.below(12) as u32);
                let place = get(&mut shares, nr, hint);
                let expected = model.get(nr, hint, (vectors, min, max));
                assert_eq!(
                    place.map(|Place(at)| (at / vectors, at % vectors)),
                    expected,
                    "nr {nr}"
                );
                users.extend(place.map(|place| (place, nr)));
            }
            let accounts = model.arrays.iter().rev().flatten();
            let used: Vec<_> = accounts.copied().collect();
            let are: Vec<_> = shares
                .accounts
                .iter()
                .map(|account| (account.size, account.used))
                .collect();
            assert_eq!(are, used);
        }
        for (place, nr) in users {
            shares.put(place, nr).unwrap();
        }
        assert!(
            shares
                .accounts
                .iter()
                .all(|account| account.used == 0 && account.users == 0)
        );
    }
}
