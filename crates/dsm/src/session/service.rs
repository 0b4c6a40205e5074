//! The service thread of a node: answers the others and the program's faults, while no thread of the program does.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use rdmux_runtime::Waiting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::turns::{Pause, Service};
use super::{Gaps, LOOK, Shared, WAKES};
use crate::driver::Patience;
use crate::memory::userfault::Fault;
use crate::region::Pages;
use crate::stat::NodeCounter;

/// Questions whether a node is there, in the time of a lease.
const PROBES: u32 = 8;

/// Looks for frames alone between two looks at all that comes, which need system calls, of a thread that polls.
const LOOKS: u32 = 64;

/// Stage of the events that the service thread handles.
const STAGE: NodeCounter = NodeCounter::Stage2Events;

/// Serves until the node leaves.
pub(super) fn serve(shared: &Shared) {
    let mut serving = Serving {
        shared,
        gaps: Gaps::new(Waiting::chained(None, WAKES).beside_computing()),
        readers: shared.readers(),
        faults: Vec::new(),
        has_asked: false,
        looks: 0,
        probed: Instant::now(),
    };
    shared.turns.serve(STAGE, &mut serving);
}

/// State of the service thread.
struct Serving<'a> {
    shared: &'a Shared,
    gaps: Gaps,
    readers: Vec<(u32, Pages)>,
    faults: Vec<Fault>,
    /// It has handled faults since its last sleep.
    has_asked: bool,
    /// Looks for frames alone before all is looked at again.
    looks: u32,
    probed: Instant,
}

impl Pause for Serving<'_> {
    fn saw(&mut self, has_come: bool) {
        self.gaps.saw(has_come);
    }

    fn pause(&mut self) -> bool {
        let polls = self.gaps.pause();
        self.looks = if polls { LOOKS } else { 0 };
        polls
    }

    fn keeps_cpu(&self) -> bool {
        self.gaps.keeps_cpu()
    }
}

impl Service for Serving<'_> {
    fn turn(&mut self) -> bool {
        let any = self.take_frames() || self.take_all();
        let shared = self.shared;
        if self.probed.elapsed() >= shared.lease / PROBES {
            self.probed = Instant::now();
            shared.turns.lock_in(STAGE).probe(Patience {
                // A node that fell silent just after an answer is noticed before its lease is over.
                lease: shared.lease / PROBES * (PROBES - 2),
                joining: shared.joining,
                answers: shared.lease * 2,
            });
        }
        any
    }

    fn has_asked(&self) -> bool {
        self.has_asked
    }

    /// Sleeps until something has come. While a thread of the program polls, only faults, the waker, the alarm and the time end it, and bells that were
    /// asked for before.
    fn sleep(&mut self) {
        let Shared {
            turns, queues, lease, ..
        } = self.shared;
        let mut fds = vec![
            PollFd::new(turns.waker().fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(turns.alarm().fd(), PollFlags::IN),
            PollFd::new(&queues.work, PollFlags::IN),
            PollFd::new(&queues.bells, PollFlags::IN),
        ];
        let userfaults = self
            .readers
            .iter()
            .filter_map(|(_, pages)| pages.view().userfault());
        fds.extend(userfaults.map(|userfault| PollFd::new(userfault, PollFlags::IN)));
        // Its end tells nothing: all is looked at.
        let _ = poll(&mut fds, Some(&timespec((*lease / PROBES).min(LOOK))));
        turns.waker().reset_if_woken();
        turns.alarm().take();
        self.has_asked = false;
        queues.work.take_event();
        queues.bells.take_event();
    }

    fn awake(&mut self, was_polled: bool) {
        // The events of the queues are taken: nothing else wakes this thread for what they have told of.
        self.looks = 0;
        self.readers = self.shared.readers();
        if was_polled {
            // Another thread has taken all that came then.
            self.gaps.forget();
        }
    }
}

impl Serving<'_> {
    /// Answers frames, until some have come or all is to be looked at. Returns whether some have come.
    fn take_frames(&mut self) -> bool {
        let turns = &self.shared.turns;
        while self.looks > 0 && !turns.is_polled() {
            self.looks -= 1;
            let mut driver = turns.lock_in(STAGE);
            if driver.uses_packets() {
                return false;
            }
            if driver.turn(false) {
                if !self.readers.is_empty() {
                    // Faults do not wait behind frames that come all the time.
                    self.looks = 0;
                }
                return true;
            }
            drop(driver);
            spin_loop();
        }
        false
    }

    /// Answers all that has come. Returns whether there was anything.
    fn take_all(&mut self) -> bool {
        let mut driver = self.shared.turns.lock_in(STAGE);
        let mut any = driver.turn(true);
        for (region, pages) in &self.readers {
            let Some(userfault) = pages.view().userfault() else {
                continue;
            };
            self.faults.clear();
            // A later look finds the fault if this one fails.
            let _ = userfault.read(&mut self.faults);
            for fault in &self.faults {
                any = true;
                self.has_asked = true;
                match pages.view().resolve(*fault) {
                    Ok(None) => {}
                    Ok(Some(wanted)) => {
                        let unit = pages.geometry().unit_of(wanted.page);
                        driver.fault(*region, unit, wanted.access);
                    }
                    Err(error) => driver.fail(error),
                }
            }
        }
        any
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    }
}
