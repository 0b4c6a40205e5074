//! The rest of userfaultfd(2) beside the transitions, and signals, which end a process of their own.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::super::userfault::Userfault;
use super::super::{Change, PageBatch};
use super::*;

/// Names the test whose program is the child.
const CHILD: &str = "RDMUX_DSM_TEST_CHILD";
const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;

/// Runs the calling test once more, in a child that calls `f`. Returns the signal that ended it.
fn signal_of(f: impl FnOnce()) -> Option<i32> {
    let thread = std::thread::current();
    let test = thread.name().unwrap();
    if std::env::var(CHILD).is_ok_and(|child| child == test) {
        f();
        std::process::exit(0);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(CHILD, test);
    let output = command.output().unwrap();
    output.status.signal()
}

fn with_delivery(engine: Engine, delivery: Delivery) -> Engine {
    match engine {
        Engine::Userfault(options) => Engine::Userfault(Options { delivery, ..options }),
        Engine::Mprotect => Engine::Mprotect,
    }
}

#[test]
fn read__waits_for_a_fault() {
    for engine in engines(Writes::Fault) {
        let view = new_view(1, with_delivery(engine, Delivery::Read), Costs::TYPICAL);
        alias_word(&view, 0).store(3, Ordering::Release);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| word(&view, 0).load(Ordering::Acquire));
            let mut faults = Vec::new();
            view.userfault().unwrap().read(&mut faults).unwrap();
            let access = Access::Read;
            assert_eq!(view.resolve(faults[0]).unwrap(), Some(Wanted { page: 0, access }));
            assert!(view.change(0, Change::Install(access)).unwrap());
            assert_eq!(reader.join().unwrap(), 3);
        });
    }
}

#[test]
fn register__refuses_a_mapping_that_another_has() {
    for engine in engines(Writes::Fault) {
        let Engine::Userfault(options) = engine else {
            continue;
        };
        let memory = AnonymousMemory::shareable(1).unwrap();
        let mapping = memory.map_again(None).unwrap();
        let first = Userfault::open(options).unwrap();
        let pages = first.register(&mapping).unwrap();
        let refused = Userfault::open(options).unwrap().register(&mapping);
        assert!(matches!(refused, Err(Error::Busy(at)) if at == pages.start));
        // A hole cannot be installed, and addresses that are not registered cannot be changed.
        assert!(
            matches!(first.install(pages.clone(), Access::Read), Err(Error::NoFrame(at)) if at == pages.start)
        );
        drop(mapping);
        let outside = first.protect(pages).unwrap_err().to_string();
        assert!(!outside.contains('\n'), "{outside}");
    }
}

#[test]
fn poison__raises_a_signal_at_a_touch() {
    let Some(engine) = engines(Writes::Fault).pop() else {
        return;
    };
    if !Abilities::probe().poison {
        return skip("the kernel poisons no pages: Linux 6.6 does");
    }
    let signal = signal_of(|| {
        let view = new_view(3, engine, Costs::TYPICAL);
        assert!(view.change(1, Change::Install(Access::Read)).unwrap());
        let start = view.mapping().address();
        let userfault = view.userfault().unwrap();
        userfault.poison(start..start + 3 * page_bytes() as u64).unwrap();
        // A page that is installed stays.
        assert_eq!(word(&view, 1).load(Ordering::Acquire), 0);
        word(&view, 2).load(Ordering::Acquire);
    });
    assert_eq!(signal, Some(SIGBUS));
}

/// Calls `f` in a child, with a view whose faults are answered. Checks that `SIGBUS` ends it.
fn is_ended_by_poison(f: impl FnOnce(&Arc<View>, &Handler)) {
    let Some(engine) = engines(Writes::Fault).pop() else {
        return;
    };
    if !Abilities::probe().poison {
        return skip("the kernel poisons no pages: Linux 6.6 does");
    }
    let signal = signal_of(|| {
        let view = new_view(3, engine, Costs::TYPICAL);
        let handler = Handler::new(&view);
        f(&view, &handler);
    });
    assert_eq!(signal, Some(SIGBUS));
}

/// Protected pages leave a mark when they become absent. A batch around the page leaves it as it is.
#[test]
fn poison__page_that_was_valid() {
    is_ended_by_poison(|view, _| {
        for (page, access) in [(0, Access::Write), (1, Access::Read), (2, Access::Write)] {
            assert!(view.change(page, Change::Install(access)).unwrap());
        }
        view.poison(1..2).unwrap();
        assert_eq!(view.state(1), PageState::Poisoned);
        for change in [
            Change::Invalidate,
            Change::Unprotect,
            Change::Install(Access::Write),
        ] {
            assert!(!view.change(1, change).unwrap());
        }
        let mut batch = PageBatch::new();
        batch.invalidate(0..3);
        assert_eq!(view.apply(&mut batch).unwrap().takes, 2);
        word(view, 1).load(Ordering::Acquire);
    });
}

#[test]
fn poison__ends_waits() {
    is_ended_by_poison(|view, handler| {
        std::thread::scope(|scope| {
            scope.spawn(|| word(view, 2).load(Ordering::Acquire));
            handler.next();
            view.poison(0..3).unwrap();
        });
    });
}

/// A batch that was planned before a page is poisoned may remove the mark.
#[test]
fn resolve__poisons_once_more() {
    is_ended_by_poison(|view, _| {
        view.poison(0..3).unwrap();
        view.drop_pages(0..3).unwrap();
        view.protect(0..3).unwrap();
        word(view, 2).load(Ordering::Acquire);
    });
}

#[test]
fn poison__by_mprotect_is_lacking() {
    let view = new_view(1, Engine::Mprotect, Costs::TYPICAL);
    assert!(matches!(view.poison(0..1), Err(Error::Lacks(_))));
    assert_eq!(view.state(0), PageState::Invalid);
}

#[test]
fn open__with_signals() {
    let Some(engine) = engines(Writes::Fault).pop() else {
        return;
    };
    let signal = signal_of(|| {
        let view = new_view(1, with_delivery(engine, Delivery::Signal), Costs::TYPICAL);
        word(&view, 0).load(Ordering::Acquire);
    });
    assert_eq!(signal, Some(SIGBUS));
}

#[test]
fn mprotect__raises_a_signal_at_a_touch() {
    let signal = signal_of(|| {
        let view = new_view(1, Engine::Mprotect, Costs::TYPICAL);
        word(&view, 0).load(Ordering::Acquire);
    });
    assert_eq!(signal, Some(SIGSEGV));
}

#[test]
fn probe__agrees_with_open() {
    let abilities = Abilities::probe();
    for catches in [Catches::All, Catches::Threads] {
        let opened = Userfault::open(Options {
            catches,
            delivery: Delivery::Poll,
            writes: Writes::Fault,
        });
        let may = match abilities.catches {
            Some(Catches::All) => true,
            Some(Catches::Threads) => catches == Catches::Threads,
            None => false,
        };
        assert_eq!(opened.is_ok(), may && abilities.files, "{abilities:?}");
        if let Err(error) = opened {
            assert!(!error.to_string().contains('\n'));
        }
    }
}
