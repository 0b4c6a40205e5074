//! The transitions of a page, one by one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::super::userfault::Kind;
use super::super::{Change, PageBatch};
use super::*;

const PAGES: u32 = 4;

/// Touches a page in a thread of its own. A read returns the word of the page.
fn touch(view: &Arc<View>, page: u32, access: Access) -> JoinHandle<u32> {
    let view = Arc::clone(view);
    std::thread::spawn(move || match access {
        Access::Read => word(&view, page).load(Ordering::Acquire),
        Access::Write => word(&view, page).fetch_add(1, Ordering::AcqRel),
    })
}

fn want(page: u32, access: Access) -> Wanted {
    Wanted { page, access }
}

/// Calls `f` for each engine, with a view all of whose pages have frames, and its handler.
fn with_each(f: impl Fn(&Arc<View>, &Handler)) {
    for engine in engines(Writes::Fault) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        for page in 0..PAGES {
            alias_word(&view, page).store(100 + page, Ordering::Release);
        }
        let handler = Handler::new(&view);
        f(&view, &handler);
    }
}

#[test]
fn change__invalid_to_shared_and_modified() {
    with_each(|view, handler| {
        let reader = touch(view, 1, Access::Read);
        let (fault, wanted) = handler.next();
        assert_eq!((fault.kind, wanted), (Kind::Absent, want(1, Access::Read)));
        // The thread reads bytes that land meanwhile.
        alias_word(view, 1).store(7, Ordering::Release);
        assert!(view.change(1, Change::Install(Access::Read)).unwrap());
        assert_eq!(reader.join().unwrap(), 7);
        // It may read, and not write.
        assert_eq!(word(view, 1).load(Ordering::Acquire), 7);
        let writer = touch(view, 1, Access::Write);
        let (fault, wanted) = handler.next();
        assert_eq!((fault.kind, wanted), (Kind::Protected, want(1, Access::Write)));
        assert!(view.change(1, Change::Unprotect).unwrap());
        writer.join().unwrap();
        assert_eq!(alias_word(view, 1).load(Ordering::Acquire), 8);
        // The neighbours are as before.
        for page in [0, 2] {
            let reader = touch(view, page, Access::Read);
            assert_eq!(handler.next().1, want(page, Access::Read));
            assert!(view.change(page, Change::Install(Access::Read)).unwrap());
            assert_eq!(reader.join().unwrap(), 100 + page);
        }
    });
}

#[test]
fn change__invalid_to_modified_is_one_fault() {
    with_each(|view, handler| {
        let writer = touch(view, 0, Access::Write);
        let (fault, wanted) = handler.next();
        assert_eq!((fault.kind, wanted), (Kind::Absent, want(0, Access::Write)));
        assert!(view.change(0, Change::Install(Access::Write)).unwrap());
        assert_eq!(writer.join().unwrap(), 100);
        assert_eq!(alias_word(view, 0).load(Ordering::Acquire), 101);
        assert!(handler.wanted.try_recv().is_err());
    });
}

#[test]
fn change__modified_to_shared_keeps_what_was_written() {
    with_each(|view, handler| {
        assert!(view.change(0, Change::Install(Access::Write)).unwrap());
        word(view, 0).store(5, Ordering::Release);
        assert!(view.change(0, Change::Protect).unwrap());
        assert_eq!(word(view, 0).load(Ordering::Acquire), 5);
        assert_eq!(alias_word(view, 0).load(Ordering::Acquire), 5);
        let writer = touch(view, 0, Access::Write);
        assert_eq!(handler.next().1, want(0, Access::Write));
        assert_eq!(alias_word(view, 0).load(Ordering::Acquire), 5);
        assert!(view.change(0, Change::Unprotect).unwrap());
        assert_eq!(writer.join().unwrap(), 5);
    });
}

#[test]
fn change__shared_and_modified_to_invalid_keep_the_bytes_in_the_alias() {
    with_each(|view, handler| {
        assert!(view.change(0, Change::Install(Access::Write)).unwrap());
        word(view, 0).store(5, Ordering::Release);
        assert!(view.change(1, Change::Install(Access::Read)).unwrap());
        for page in [0, 1] {
            assert!(view.change(page, Change::Invalidate).unwrap());
            assert_eq!(view.state(page), PageState::Invalid);
        }
        assert_eq!(alias_word(view, 0).load(Ordering::Acquire), 5);
        for page in [0, 1] {
            let reader = touch(view, page, Access::Read);
            let (fault, wanted) = handler.next();
            assert_eq!((fault.kind, wanted), (Kind::Absent, want(page, Access::Read)));
            alias_word(view, page).store(9, Ordering::Release);
            assert!(view.change(page, Change::Install(Access::Read)).unwrap());
            assert_eq!(reader.join().unwrap(), 9);
        }
    });
}

/// A page keeps the mark of its protection when it becomes absent: installed for writing it has none.
#[test]
fn change__protected_to_invalid_to_modified_is_one_fault() {
    with_each(|view, handler| {
        assert!(view.change(0, Change::Install(Access::Read)).unwrap());
        assert!(view.change(0, Change::Invalidate).unwrap());
        let writer = touch(view, 0, Access::Write);
        assert_eq!(handler.next().1, want(0, Access::Write));
        assert!(view.change(0, Change::Install(Access::Write)).unwrap());
        assert_eq!(writer.join().unwrap(), 100);
        assert!(handler.wanted.try_recv().is_err());
    });
}

#[test]
fn change__that_does_not_fit_changes_nothing() {
    with_each(|view, _| {
        for change in [Change::Protect, Change::Unprotect, Change::Invalidate] {
            assert!(!view.change(0, change).unwrap());
            assert_eq!(view.state(0), PageState::Invalid);
        }
        assert!(view.change(0, Change::Install(Access::Read)).unwrap());
        for change in [Change::Protect, Change::Install(Access::Write)] {
            assert!(!view.change(0, change).unwrap());
            assert_eq!(view.state(0), PageState::Shared);
        }
        assert!(view.change(0, Change::Unprotect).unwrap());
        for change in [Change::Unprotect, Change::Install(Access::Read)] {
            assert!(!view.change(0, change).unwrap());
            assert_eq!(view.state(0), PageState::Modified);
        }
    });
}

/// A page of which the file has no frame yet is one of zeros.
#[test]
fn install__page_that_the_file_does_not_have() {
    for engine in engines(Writes::Fault) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        let handler = Handler::new(&view);
        alias_word(&view, 0).store(1, Ordering::Release);
        let reader = touch(&view, 1, Access::Read);
        let (fault, wanted) = handler.next();
        assert_eq!((fault.kind, wanted), (Kind::Missing, want(1, Access::Read)));
        let mut batch = PageBatch::new();
        batch.install(0..PAGES, Access::Write);
        view.apply(&mut batch).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
        let words: Vec<u32> = (0..PAGES)
            .map(|page| word(&view, page).fetch_add(1, Ordering::AcqRel))
            .collect();
        assert_eq!(words, [1, 0, 0, 0]);
    }
}

/// The kernel stops at each page that is installed already.
#[test]
fn install__range_with_pages_that_are_installed() {
    with_each(|view, handler| {
        let addresses = view.mapping().address()..view.mapping().address() + (4 * page_bytes()) as u64;
        view.install(0..1, Access::Read).unwrap();
        view.install(2..3, Access::Read).unwrap();
        let userfault = view.userfault().unwrap();
        userfault.install(addresses.clone(), Access::Write).unwrap();
        for page in 0..PAGES {
            assert_eq!(word(view, page).fetch_add(1, Ordering::AcqRel), 100 + page);
        }
        userfault.install(addresses, Access::Read).unwrap();
        assert!(handler.wanted.try_recv().is_err());
    });
}

/// Several threads wait for one page: all are woken.
#[test]
fn change__wakes_all_who_wait() {
    with_each(|view, handler| {
        let readers: Vec<_> = (0..4).map(|_| touch(view, 3, Access::Read)).collect();
        handler.next();
        assert!(view.change(3, Change::Install(Access::Read)).unwrap());
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 103);
        }
    });
}

/// A page whose state another thread has changed is given no rights, and its waiter looks again.
#[test]
fn give__wakes_who_waits_for_a_page_that_has_another_state() {
    with_each(|view, handler| {
        let reader = touch(view, 0, Access::Read);
        assert_eq!(handler.next().1, want(0, Access::Read));
        assert!(!view.give(0..1, PageState::Shared, true).unwrap());
        assert_eq!(handler.next().1, want(0, Access::Read));
        assert!(view.change(0, Change::Install(Access::Read)).unwrap());
        assert_eq!(reader.join().unwrap(), 100);
    });
}

#[test]
fn resolve__answers_what_the_table_allows() {
    with_each(|view, handler| {
        for (page, access) in [(0, Access::Read), (1, Access::Write)] {
            assert!(view.change(page, Change::Install(access)).unwrap());
        }
        // Absent though valid, as pages are for a moment during a batch.
        view.drop_pages(0..2).unwrap();
        assert_eq!(word(view, 0).load(Ordering::Acquire), 100);
        assert_eq!(word(view, 1).fetch_add(1, Ordering::AcqRel), 101);
        // Protected though it may be written.
        view.protect(1..2).unwrap();
        assert_eq!(word(view, 1).fetch_add(1, Ordering::AcqRel), 102);
        assert!(handler.wanted.try_recv().is_err());
    });
}

#[test]
fn resolve__refuses_an_address_outside() {
    for engine in engines(Writes::Fault) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        let start = view.mapping().address();
        for address in [0, start - 1, start + (4 * page_bytes()) as u64, u64::MAX] {
            let fault = Fault {
                address,
                access: Access::Read,
                kind: Kind::Absent,
            };
            assert!(matches!(view.resolve(fault), Err(Error::Outside(at)) if at == address));
        }
    }
}

#[test]
fn new__refuses_an_address_that_is_taken() {
    for engine in engines(Writes::Fault).into_iter().chain([Engine::Mprotect]) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        let address = view.mapping().address();
        let again = View::new(Arc::clone(view.alias()), Some(address), engine, Costs::TYPICAL);
        let said = again.unwrap_err().to_string();
        assert!(said.contains("are taken") && !said.contains('\n'), "{said}");
    }
}

#[test]
fn take_written__returns_each_write_once() {
    for engine in engines(Writes::Record) {
        let view = new_view(600, engine, Costs::TYPICAL);
        let _handler = Handler::new(&view);
        let mut batch = PageBatch::new();
        batch.install(0..599, Access::Read);
        view.apply(&mut batch).unwrap();
        assert_eq!(view.take_written(0..600).unwrap(), []);
        // More ranges than one call returns, and two pages that follow each other.
        let written: Vec<u32> = (0..598).step_by(2).collect();
        for page in written.iter().chain(&[9]) {
            word(&view, *page).fetch_add(1, Ordering::AcqRel);
        }
        let mut expected: Vec<_> = written.iter().map(|page| *page..page + 1).collect();
        expected[4] = 8..11;
        expected.remove(5);
        assert_eq!(view.take_written(0..600).unwrap(), expected);
        assert_eq!(view.take_written(0..600).unwrap(), []);
        word(&view, 3).fetch_add(1, Ordering::AcqRel);
        assert_eq!(view.take_written(4..600).unwrap(), []);
        assert_eq!(view.take_written(0..4).unwrap(), vec![3..4; 1]);
    }
}

/// Neither a batch nor a page that is put back makes a write unseen.
#[test]
fn take_written__pages_between_those_of_a_batch() {
    for engine in engines(Writes::Record) {
        let view = new_view(64, engine, Costs::TYPICAL);
        let _handler = Handler::new(&view);
        let mut batch = PageBatch::new();
        batch.install(0..64, Access::Read);
        view.apply(&mut batch).unwrap();
        for page in 0..64 {
            word(&view, page).fetch_add(1, Ordering::AcqRel);
        }
        (0..64)
            .step_by(3)
            .for_each(|page| batch.invalidate(page..page + 1));
        let applied = view.apply(&mut batch).unwrap();
        assert_eq!((applied.takes, applied.gives), (22, 0));
        let left: u32 = view
            .take_written(0..64)
            .unwrap()
            .iter()
            .map(|r| r.end - r.start)
            .sum();
        assert_eq!(left, 64 - 22);
    }
}

#[test]
fn take_written__range_that_is_empty_or_outside() {
    for engine in engines(Writes::Record) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        assert_eq!(view.take_written(PAGES..PAGES).unwrap(), []);
        let outside = catch_unwind(AssertUnwindSafe(|| view.take_written(2..PAGES + 1)));
        let said = outside.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*said, "pages 2..5 of 4");
    }
}

/// The kernel makes pages absent when memory is short, and their record ends: such a page counts as written.
#[test]
fn take_written__page_that_was_absent_for_a_moment() {
    for engine in engines(Writes::Record) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        let handler = Handler::new(&view);
        let mut batch = PageBatch::new();
        batch.install(0..PAGES, Access::Read);
        view.apply(&mut batch).unwrap();
        assert_eq!(view.take_written(0..PAGES).unwrap(), []);
        word(&view, 1).store(5, Ordering::Release);
        view.drop_pages(1..3).unwrap();
        assert_eq!(word(&view, 1).load(Ordering::Acquire), 5);
        // A write to one that is valid passes without a change.
        assert_eq!(word(&view, 2).fetch_add(1, Ordering::AcqRel), 0);
        assert!(handler.wanted.try_recv().is_err());
        assert_eq!(view.take_written(0..PAGES).unwrap(), vec![1..3; 1]);
        assert_eq!(view.take_written(0..PAGES).unwrap(), []);
        assert_eq!(view.state(1), PageState::Shared);
    }
}

/// Pages that are absent when a batch is planned may be valid and written when it takes rights.
#[test]
fn apply__takes_no_page_in_between_that_may_be_recorded() {
    for engine in engines(Writes::Record) {
        let view = new_view(8, engine, Costs::TYPICAL);
        let mut batch = PageBatch::new();
        batch.install(0..1, Access::Read);
        batch.install(6..7, Access::Read);
        view.apply(&mut batch).unwrap();
        batch.invalidate(0..1);
        batch.invalidate(6..7);
        assert_eq!(view.apply(&mut batch).unwrap().takes, 2);
    }
}

#[test]
fn take_written__refuses_a_view_that_records_none() {
    for engine in engines(Writes::Fault).into_iter().chain([Engine::Mprotect]) {
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        assert!(matches!(view.take_written(0..PAGES), Err(Error::Lacks(_))));
    }
}
