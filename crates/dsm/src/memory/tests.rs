//! Views on the real kernel: as an ordinary user with the faults of threads alone, as root with those of system calls, too.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::userfault::{Abilities, Catches, Delivery, Fault, Options, Writes};
use super::{Access, Costs, Engine, Error, PageState, View, Wanted};
use crate::skip::skip;

mod batch;
mod userfault;
mod view;

/// Longest wait for something that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn options(catches: Catches, writes: Writes) -> Engine {
    Engine::Userfault(Options {
        catches,
        delivery: Delivery::Poll,
        writes,
    })
}

/// Returns each engine of userfaultfd(2) that this user may have; skips the test if there is none.
fn engines(writes: Writes) -> Vec<Engine> {
    let abilities = Abilities::probe();
    let has_writes = writes == Writes::Fault || abilities.record;
    if !abilities.is_enough() || !has_writes {
        skip(format!("userfaultfd is not as this test needs it: {abilities:?}"));
        return Vec::new();
    }
    let mut all = vec![options(Catches::Threads, writes)];
    if abilities.catches == Some(Catches::All) {
        all.push(options(Catches::All, writes));
    }
    all
}

fn new_view(pages: u32, engine: Engine, costs: Costs) -> Arc<View> {
    let len = pages as usize * page_bytes();
    let memory = Arc::new(AnonymousMemory::shareable(len).unwrap());
    let view = View::new(memory, None, engine, costs).unwrap();
    assert_eq!(view.pages(), pages);
    Arc::new(view)
}

fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Returns the first word of a page, as the program sees it.
fn word(view: &View, page: u32) -> &AtomicU32 {
    view.mapping().word(page as usize * page_bytes())
}

/// Returns the first word of a page in the alias.
fn alias_word(view: &View, page: u32) -> &AtomicU32 {
    view.alias().mapping().word(page as usize * page_bytes())
}

/// A thread that answers faults from the table, and reports the others.
struct Handler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    wanted: Receiver<(Fault, Wanted)>,
}

impl Handler {
    fn new(view: &Arc<View>) -> Handler {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, wanted) = channel();
        let thread = std::thread::spawn({
            let (view, stop) = (Arc::clone(view), Arc::clone(&stop));
            move || handle(&view, &stop, &sender)
        });
        Handler {
            stop,
            thread: Some(thread),
            wanted,
        }
    }

    /// Waits for a fault that the table does not answer.
    fn next(&self) -> (Fault, Wanted) {
        self.wanted.recv_timeout(PATIENCE).expect("a fault")
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn handle(view: &View, stop: &AtomicBool, wanted: &Sender<(Fault, Wanted)>) {
    let userfault = view.userfault().unwrap();
    let mut faults = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let tick = Timespec {
            tv_sec: 0,
            tv_nsec: 10_000_000,
        };
        let _ = poll(
            &mut [PollFd::from_borrowed_fd(userfault.as_fd(), PollFlags::IN)],
            Some(&tick),
        );
        userfault.read(&mut faults).unwrap();
        for fault in faults.drain(..) {
            if let Some(want) = view.resolve(fault).unwrap() {
                let _ = wanted.send((fault, want));
            }
        }
    }
}
