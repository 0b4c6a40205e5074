//! The rule of the table under loom, which tries the orders in which threads may run. It holds as the code is, and not without any of its parts.

use std::convert::Infallible;
use std::rc::Rc;

use loom::sync::Mutex;
use loom::sync::atomic::AtomicU32;
use loom::thread;

use super::PageState::{Invalid, Modified, Shared};
use super::*;

const PAGES: usize = 2;

/// The part of the rule that a model leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// States of held entries change, too.
    Waiting,
    /// Rights are taken before the state changes.
    Order,
    /// Rights are given by the state that was planned.
    Look,
    /// Nothing is done for pages that have another state than the one planned.
    Wake,
    /// A state changes before the call for an earlier change has returned.
    Pending,
}

#[derive(Debug, Default)]
struct ModelWords {
    words: [AtomicU32; PAGES],
    ignores_holders: bool,
}

impl Words for ModelWords {
    fn load(&self, page: u32, order: Ordering) -> u32 {
        let word = self.words[page as usize].load(order);
        if self.ignores_holders { word & !HELD } else { word }
    }

    fn replace(&self, page: u32, old: u32, new: u32) -> bool {
        let word = &self.words[page as usize];
        if self.ignores_holders {
            word.store(new, Ordering::Release);
            return true;
        }
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    fn store(&self, page: u32, value: u32) {
        self.words[page as usize].store(value, Ordering::Release);
    }

    fn pause(&self, _: u32) {
        thread::yield_now();
    }
}

/// A table, and the rights that threads have, which the kernel changes under a lock of a page.
#[derive(Clone, Debug)]
struct Model {
    table: Rc<PageTable<ModelWords>>,
    rights: Rc<[Mutex<PageState>; PAGES]>,
    /// A thread that waits for a page has been woken.
    has_woken: Rc<[Mutex<bool>; PAGES]>,
    without: Without,
}

impl Model {
    /// All pages are in a state, and threads have its rights, or not for the moment.
    fn new(state: PageState, are_absent: bool, without: Without) -> Model {
        let words = ModelWords {
            words: [(); PAGES].map(|()| AtomicU32::new(state as u32)),
            ignores_holders: without == Without::Waiting,
        };
        let table = PageTable {
            words,
            pages: PAGES as u32,
        };
        let has = if are_absent { Invalid } else { state };
        Model {
            table: Rc::new(table),
            rights: Rc::new([(); PAGES].map(|()| Mutex::new(has))),
            has_woken: Rc::new([(); PAGES].map(|()| Mutex::new(false))),
            without,
        }
    }

    fn wake(&self, page: u32) {
        *self.has_woken[page as usize].lock().unwrap() = true;
    }

    fn set(&self, pages: Range<u32>, f: impl Fn(PageState) -> PageState) {
        for page in pages {
            let mut has = self.rights[page as usize].lock().unwrap();
            *has = f(*has);
        }
    }

    /// Makes a page invalid, and takes the rights of a span.
    fn invalidate(&self, page: u32, span: Range<u32>) {
        let take = || self.set(span.clone(), |_| Invalid);
        if self.without == Without::Order {
            take();
        }
        let mut pending = self.table.pending();
        let is_valid = |state| (state != Invalid).then_some(Invalid);
        let is_changed = match self.without {
            Without::Pending => self.table.change(page, is_valid),
            _ => pending.add(page, is_valid),
        };
        if is_changed && self.without != Without::Order {
            take();
        }
    }

    fn protect(&self, page: u32) {
        let mut pending = self.table.pending();
        if pending.add(page, |state| (state == Modified).then_some(Shared)) {
            self.set(page..page + 1, |has| has.min(Shared));
        }
    }

    /// Gives the rights of a state to pages that have it: a page that is put back, or a fault that is answered.
    fn give(&self, pages: Range<u32>, state: PageState) {
        if self.without == Without::Look {
            return self.set(pages, |has| has.max(state));
        }
        let give = |pages: Range<u32>| {
            self.set(pages.clone(), |has| has.max(state));
            pages.for_each(|page| self.wake(page));
            Ok::<(), Infallible>(())
        };
        let wake = |page| {
            if self.without != Without::Wake {
                self.wake(page);
            }
            Ok(())
        };
        self.table.give(pages, state, give, wake).unwrap();
    }

    /// Checks that no thread has more than the table says.
    fn check(&self, page: u32) {
        let state = self.table.state(page);
        let has = *self.rights[page as usize].lock().unwrap();
        assert!(has <= state, "{has:?}, not {state:?}");
    }
}

/// A page becomes invalid while a fault at it is answered. No thread has a right when that has returned.
fn invalidate_while_answered(without: Without) {
    let model = Model::new(Modified, true, without);
    let handler = thread::spawn({
        let model = model.clone();
        move || model.give(0..1, Modified)
    });
    model.invalidate(0, 0..1);
    model.check(0);
    handler.join().unwrap();
    model.check(0);
}

/// A page is put back after a batch had it in its span, while it becomes invalid or protected by another.
fn change_while_put_back(without: Without) {
    for protects in [false, true] {
        let model = Model::new(Modified, false, without);
        let batch = thread::spawn({
            let model = model.clone();
            move || {
                model.invalidate(0, 0..2);
                model.give(1..2, Modified);
            }
        });
        match protects {
            true => model.protect(1),
            false => model.invalidate(1, 1..2),
        }
        model.check(1);
        batch.join().unwrap();
        (0..2).for_each(|page| model.check(page));
    }
}

/// Two batches put back both pages as they are, in ranges of both.
fn put_back_twice(without: Without) {
    let model = Model::new(Shared, true, without);
    let other = thread::spawn({
        let model = model.clone();
        move || model.give(0..2, Shared)
    });
    model.give(0..2, Shared);
    model.invalidate(1, 1..2);
    model.check(1);
    other.join().unwrap();
    (0..2).for_each(|page| model.check(page));
}

/// A page for which a thread waits is installed, and becomes invalid at once. The thread has been woken afterwards.
fn invalidate_while_installed(without: Without) {
    let model = Model::new(Invalid, true, without);
    let invalidate = thread::spawn({
        let model = model.clone();
        move || model.invalidate(0, 0..1)
    });
    model.table.change(0, |_| Some(Shared));
    model.give(0..1, Shared);
    invalidate.join().unwrap();
    model.check(0);
    assert!(*model.has_woken[0].lock().unwrap());
}

/// Two threads make a page invalid. No thread has a right when either has returned.
fn invalidate_twice(without: Without) {
    let model = Model::new(Modified, false, without);
    let other = thread::spawn({
        let model = model.clone();
        move || {
            model.invalidate(0, 0..1);
            model.check(0);
        }
    });
    model.invalidate(0, 0..1);
    model.check(0);
    other.join().unwrap();
}

fn holds(model: fn(Without), without: Without) -> bool {
    crate::model::holds(3, move || model(without))
}

#[test]
fn give__and_change_at_the_same_time() {
    for model in [
        invalidate_while_answered,
        change_while_put_back,
        put_back_twice,
        invalidate_while_installed,
        invalidate_twice,
    ] {
        assert!(holds(model, Without::Nothing));
    }
}

#[test]
fn give__and_change_without_any_part_of_the_rule() {
    for without in [Without::Waiting, Without::Order, Without::Look] {
        assert!(!holds(invalidate_while_answered, without), "{without:?}");
    }
    for without in [Without::Waiting, Without::Look] {
        assert!(!holds(change_while_put_back, without), "{without:?}");
    }
    assert!(!holds(invalidate_while_installed, Without::Wake));
    assert!(!holds(invalidate_twice, Without::Pending));
}
