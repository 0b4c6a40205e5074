//! The lock under loom, which tries the orders in which threads may run and every value that a load may return. Each model holds as the code
//! is, and fails when any single ordering that it relies on is weakened.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

/// The step that is weaker than in the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weak {
    Nothing,
    /// The ordering of the step on this line of `word.rs`.
    Step(u32),
    /// A thread that has unlocked does not check whether an item was left.
    NoLookBehind,
    /// A thread that leaves an item does not take a lock that is free.
    NoLockOfOnesOwn,
    /// A thread that unlocks wakes nobody.
    NoWake,
}

/// The word again, on loom's atomics.
#[path = "word.rs"]
mod word;

mod sync {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;
    use std::panic::Location;

    use loom::sync::{Condvar, Mutex};

    pub(super) use super::Weak;
    pub(super) use std::sync::atomic::Ordering;

    thread_local! {
        pub(super) static WEAK: Cell<Weak> = const { Cell::new(Weak::Nothing) };
    }

    thread_local! {
        /// Lines of `word.rs` with operations that order anything.
        pub(super) static STEPS: RefCell<BTreeSet<u32>> = RefCell::default();
    }

    #[track_caller]
    fn order(order: Ordering) -> Ordering {
        let line = Location::caller().line();
        if order != Ordering::Relaxed {
            STEPS.with_borrow_mut(|steps| steps.insert(line));
        }
        if WEAK.get() == Weak::Step(line) {
            Ordering::Relaxed
        } else {
            order
        }
    }

    /// An atomic with its sleepers, as a futex has them.
    #[derive(Debug)]
    pub(super) struct AtomicU32 {
        value: loom::sync::atomic::AtomicU32,
        sleepers: Mutex<u32>,
        woken: Condvar,
    }

    impl AtomicU32 {
        pub(super) fn new(value: u32) -> AtomicU32 {
            AtomicU32 {
                value: loom::sync::atomic::AtomicU32::new(value),
                sleepers: Mutex::new(0),
                woken: Condvar::new(),
            }
        }

        #[track_caller]
        pub(super) fn load(&self, o: Ordering) -> u32 {
            self.value.load(order(o))
        }

        #[track_caller]
        pub(super) fn fetch_or(&self, bits: u32, o: Ordering) -> u32 {
            self.value.fetch_or(bits, order(o))
        }

        #[track_caller]
        pub(super) fn fetch_and(&self, bits: u32, o: Ordering) -> u32 {
            self.value.fetch_and(bits, order(o))
        }

        #[track_caller]
        pub(super) fn compare_exchange(
            &self,
            from: u32,
            to: u32,
            ok: Ordering,
            no: Ordering,
        ) -> Result<u32, u32> {
            self.value.compare_exchange(from, to, order(ok), no)
        }

        #[track_caller]
        pub(super) fn fetch_update(
            &self,
            ok: Ordering,
            no: Ordering,
            f: impl FnMut(u32) -> Option<u32>,
        ) -> Result<u32, u32> {
            self.value.fetch_update(order(ok), no, f)
        }
    }

    pub(super) const LOOKS: u32 = 1;

    pub(super) fn pause() {
        loom::thread::yield_now();
    }

    pub(super) fn wait(word: &AtomicU32, value: u32) {
        let mut sleepers = word.sleepers.lock().unwrap();
        // As in the kernel: checks again under the lock that the waking thread takes.
        if word.value.load(Ordering::Relaxed) == value {
            *sleepers += 1;
            drop(word.woken.wait(sleepers).unwrap());
        }
    }

    pub(super) fn wake_one(word: &AtomicU32) {
        if WEAK.get() == Weak::NoWake {
            return;
        }
        let mut sleepers = word.sleepers.lock().unwrap();
        if *sleepers > 0 {
            *sleepers -= 1;
            word.woken.notify_one();
        }
    }
}

use sync::{AtomicU32, WEAK};
use word::Word;

struct Shared {
    word: Word,
    /// The state that the lock protects: number of items taken in. Loom watches the cell beside it.
    taken_in: Cell<u32>,
    watch: UnsafeCell<()>,
    left: Mutex<u32>,
}

impl Shared {
    fn new() -> Rc<Shared> {
        Rc::new(Shared {
            word: Word(AtomicU32::new(0)),
            taken_in: Cell::new(0),
            watch: UnsafeCell::new(()),
            left: Mutex::new(0),
        })
    }

    /// Does the same as the holder of the engine's lock, and what it does after unlocking.
    fn drive(&self) {
        loop {
            self.watch.with_mut(|_| ());
            if self.word.has_left() {
                self.word.clear_left();
                let left = std::mem::take(&mut *self.left.lock().unwrap());
                self.taken_in.set(self.taken_in.get() + left);
            }
            self.word.unlock();
            let again = self.word.has_left() && WEAK.get() != Weak::NoLookBehind;
            if !again || !self.word.try_lock() {
                return;
            }
        }
    }

    fn leave(&self) {
        *self.left.lock().unwrap() += 1;
        let held = self.word.mark_left();
        if !held && WEAK.get() != Weak::NoLockOfOnesOwn && self.word.try_lock() {
            self.drive();
        }
    }
}

/// Runs a model with one step weakened; returns whether the model holds.
fn holds(weak: Weak, model: fn()) -> bool {
    let run = move || {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound.get_or_insert(3);
        builder.check(move || {
            WEAK.set(weak);
            model();
        });
    };
    let held = catch_unwind(AssertUnwindSafe(run)).is_ok();
    WEAK.set(Weak::Nothing);
    held
}

/// Two threads take the lock, one at a time; one that sleeps for it is woken.
fn two_drive() {
    let shared = Shared::new();
    let other = thread::spawn({
        let shared = shared.clone();
        move || {
            shared.word.lock();
            shared.drive();
        }
    });
    shared.word.lock();
    shared.drive();
    other.join().unwrap();
}

/// One thread drives, two leave an item each: both items are taken in once all threads have gone.
fn two_leave() {
    let shared = Shared::new();
    let others = [(); 2].map(|()| {
        let shared = shared.clone();
        thread::spawn(move || shared.leave())
    });
    shared.word.lock();
    shared.drive();
    for other in others {
        other.join().unwrap();
    }
    assert_eq!((shared.taken_in.get(), *shared.left.lock().unwrap()), (2, 0));
}

#[test]
fn lock__one_at_a_time_and_sleepers_are_woken() {
    assert!(holds(Weak::Nothing, two_drive));
    assert!(!holds(Weak::NoWake, two_drive));
}

#[test]
fn word__needs_each_ordering() {
    assert!(holds(Weak::Nothing, two_drive) && holds(Weak::Nothing, two_leave));
    let steps = sync::STEPS.take();
    assert_eq!(steps.len(), 5, "lines {steps:?}");
    for line in steps {
        let weak = Weak::Step(line);
        let held = holds(weak, two_drive) && holds(weak, two_leave);
        assert!(!held, "the ordering in line {line} of word.rs is not needed");
    }
}

#[test]
fn leave__is_taken_in_before_the_lock_rests() {
    assert!(holds(Weak::Nothing, two_leave));
    for weak in [Weak::NoLookBehind, Weak::NoLockOfOnesOwn] {
        assert!(!holds(weak, two_leave), "{weak:?} does no harm");
    }
}
