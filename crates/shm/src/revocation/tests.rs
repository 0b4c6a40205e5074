//! The steps under loom, which tries the orders in which two threads may run and every value that a load may return. The model holds as
//! the code is, and fails when any single ordering or fence is weakened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::{self, AcqRel, Relaxed};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::thread;

use super::*;

/// The part of the steps that a model weakens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weak {
    Nothing,
    FenceOfEnter,
    FenceOfTakeBack,
    ReleaseOfEnter,
    ReleaseOfLeave,
    AcquireOfHasLeft,
    /// The holder does not look at the grant.
    NoLook,
}

/// The words, and the memory that is granted, of which each place of the holder writes a part.
#[derive(Debug, Default)]
struct Shared {
    inside: [AtomicU32; 2],
    grant: AtomicU32,
    memory: [UnsafeCell<()>; 2],
}

#[derive(Clone, Debug)]
struct ModelEnd {
    shared: Rc<Shared>,
    weak: Weak,
    owner: bool,
}

impl Words for ModelEnd {
    fn inside(&self, place: u32, order: Ordering) -> u32 {
        let weak = self.owner && self.weak == Weak::AcquireOfHasLeft;
        self.shared.inside[place as usize].load(if weak { Relaxed } else { order })
    }

    fn set_inside(&self, place: u32, value: u32, order: Ordering) {
        let weak = match self.weak {
            Weak::ReleaseOfEnter => value & 1 == 1,
            Weak::ReleaseOfLeave => value & 1 == 0,
            _ => false,
        };
        self.shared.inside[place as usize].store(value, if weak { Relaxed } else { order });
    }

    fn grant(&self, _: u32, order: Ordering) -> u32 {
        match self.weak {
            Weak::NoLook => 1,
            _ => self.shared.grant.load(order),
        }
    }

    fn set_grant(&self, _: u32, generation: u32, order: Ordering) {
        self.shared.grant.store(generation, order);
    }

    fn fence(&self, order: Ordering) {
        let weak = match self.weak {
            Weak::FenceOfEnter => !self.owner,
            Weak::FenceOfTakeBack => self.owner,
            _ => false,
        };
        fence(if weak { AcqRel } else { order });
    }
}

/// Threads of a holder write, each by a place of its own and so many times, while the owner revokes the grant and then writes.
fn take_back_while_written(weak: Weak, times: &[u32]) {
    let shared = Shared {
        grant: AtomicU32::new(1),
        ..Shared::default()
    };
    let owner = ModelEnd {
        shared: Rc::new(shared),
        weak,
        owner: true,
    };
    let holders: Vec<_> = (0..)
        .zip(times)
        .map(|(place, times)| {
            let (times, holder) = (*times, owner.clone());
            let holder = ModelEnd {
                owner: false,
                ..holder
            };
            thread::spawn(move || {
                for _ in 0..times {
                    if let Some(entry) = enter(&holder, place, 0, 1) {
                        holder.shared.memory[place as usize].with_mut(|_| ());
                        leave(&holder, place, entry);
                    }
                }
            })
        })
        .collect();
    let places = 0..times.len() as u32;
    for Inside { place, entry, .. } in take_back(&owner, places.clone(), &[0]) {
        while !has_left(&owner, place, entry) {
            thread::yield_now();
        }
    }
    // Loom reports a race with the holder's writes.
    for place in places {
        owner.shared.memory[place as usize].with_mut(|_| ());
    }
    for holder in holders {
        holder.join().unwrap();
    }
}

fn holds(weak: Weak, times: &'static [u32]) -> bool {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    catch_unwind(AssertUnwindSafe(|| {
        builder.check(move || take_back_while_written(weak, times))
    }))
    .is_ok()
}

#[test]
fn take_back__while_the_holder_writes() {
    assert!(holds(Weak::Nothing, &[2]));
}

#[test]
fn take_back__while_two_threads_of_the_holder_write() {
    assert!(holds(Weak::Nothing, &[1, 1]));
}

#[test]
fn take_back__with_any_step_weakened() {
    for weak in [
        Weak::FenceOfEnter,
        Weak::FenceOfTakeBack,
        Weak::ReleaseOfEnter,
        Weak::ReleaseOfLeave,
        Weak::AcquireOfHasLeft,
        Weak::NoLook,
    ] {
        assert!(!holds(weak, &[2]), "{weak:?}");
        // The release of an entry concerns the writes of earlier entries of its thread.
        if weak != Weak::ReleaseOfEnter {
            assert!(!holds(weak, &[1, 1]), "{weak:?}, two threads");
        }
    }
}

/// Words as plain atomics.
#[derive(Debug, Default)]
struct Plain {
    inside: [std::sync::atomic::AtomicU32; 3],
    grants: [std::sync::atomic::AtomicU32; 3],
}

impl Words for Plain {
    fn inside(&self, place: u32, order: Ordering) -> u32 {
        self.inside[place as usize].load(order)
    }

    fn set_inside(&self, place: u32, value: u32, order: Ordering) {
        self.inside[place as usize].store(value, order);
    }

    fn grant(&self, index: u32, order: Ordering) -> u32 {
        self.grants[index as usize].load(order)
    }

    fn set_grant(&self, index: u32, generation: u32, order: Ordering) {
        self.grants[index as usize].store(generation, order);
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

#[test]
fn take_back__names_the_entry_of_these_grants_alone() {
    let words = Plain::default();
    for index in 0..3 {
        words.set_grant(index, 5 + index, Relaxed);
    }
    let take_back = |grant| take_back(&words, 0..3, &[grant]);
    assert_eq!(enter(&words, 2, 1, 5), None, "another generation");
    let first = enter(&words, 2, 1, 6).unwrap();
    leave(&words, 2, first);
    assert_eq!(take_back(0), [], "nobody is inside");
    let entry = enter(&words, 2, 1, 6).unwrap();
    assert_ne!(first, entry);
    assert_eq!(take_back(2), [], "it is inside of another grant");
    let also = enter(&words, 0, 1, 6).unwrap();
    let inside = |place, entry| Inside {
        place,
        entry,
        index: 1,
    };
    assert_eq!(take_back(1), [inside(0, also), inside(2, entry)]);
    assert!(!has_left(&words, 2, entry));
    leave(&words, 2, entry);
    assert!(has_left(&words, 2, entry));
    assert!(!has_left(&words, 0, also));
    assert_eq!(enter(&words, 2, 1, 6), None);
    assert_eq!(words.inside(2, Relaxed) & 1, 0);
}

#[test]
fn enter__numbers_wrap() {
    let words = Plain::default();
    words.set_grant(1, 1, Relaxed);
    words.set_inside(1, u32::MAX, Relaxed);
    let entry = enter(&words, 1, 1, 1).unwrap();
    assert_eq!(entry, 1 << 1 | 1);
}

#[test]
fn still_holds__until_the_grant_is_taken_back() {
    let words = Plain::default();
    words.set_grant(1, 7, Relaxed);
    assert!(still_holds(&words, 1, 7));
    assert!(!still_holds(&words, 1, 6));
    take_back(&words, 0..0, &[1]);
    assert!(!still_holds(&words, 1, 7));
}
