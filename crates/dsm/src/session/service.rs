//! The service thread of a node: answers the others and the program's faults, while no thread of the program does.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_runtime::Waiting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Gap, LOOK, Shared, WAKES};
use crate::driver::Patience;
use crate::memory::userfault::Fault;
use crate::region::Pages;
use crate::stat::NodeCounter;

/// Questions whether a node is there, in the time of a lease.
const PROBES: u32 = 8;

/// Serves until the node leaves.
pub(super) fn serve(shared: &Shared) {
    let mut waiting = Waiting::chained(None, WAKES);
    let mut gap = Gap::default();
    let mut readers = shared.readers();
    let mut faults = Vec::new();
    let mut probed = Instant::now();
    while !shared.stops.load(Ordering::Acquire) {
        let has_come = turn(shared, &readers, &mut faults);
        gap.saw(has_come, &mut waiting);
        if probed.elapsed() >= shared.lease / PROBES {
            probed = Instant::now();
            shared.lock_in(NodeCounter::Stage2Events).probe(Patience {
                // A node that fell silent just after an answer is noticed before its lease is over.
                lease: shared.lease / PROBES * (PROBES - 2),
                joining: shared.joining,
                answers: shared.lease * 2,
            });
        }
        let is_polled = shared.is_polled();
        if !is_polled && (has_come || waiting.pause(gap.began())) {
            continue;
        }
        rest(shared, &readers);
        readers = shared.readers();
        gap.has_slept = true;
        if is_polled {
            // Another thread has taken all that came then.
            gap = Gap::default();
        }
    }
}

/// Answers all that has come. Returns whether there was anything.
fn turn(shared: &Shared, readers: &[(u32, Pages)], faults: &mut Vec<Fault>) -> bool {
    let mut driver = shared.lock_in(NodeCounter::Stage2Events);
    let mut any = driver.turn(true);
    for (region, pages) in readers {
        let Some(userfault) = pages.view().userfault() else {
            continue;
        };
        faults.clear();
        // A later look finds the fault if this one fails.
        let _ = userfault.read(faults);
        for fault in faults.iter() {
            any = true;
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

/// Sleeps until something has come. While a thread of the program polls, only faults and the time end its sleep.
fn rest(shared: &Shared, readers: &[(u32, Pages)]) {
    {
        let mut driver = shared.lock_in(NodeCounter::Stage2Events);
        if !shared.is_polled() && !driver.rest() {
            return;
        }
    }
    let mut fds = vec![
        PollFd::new(shared.waker.fd(), PollFlags::IN),
        PollFd::new(&shared.queues.work, PollFlags::IN),
        PollFd::new(&shared.queues.bells, PollFlags::IN),
    ];
    let userfaults = readers.iter().filter_map(|(_, pages)| pages.view().userfault());
    fds.extend(userfaults.map(|userfault| PollFd::new(userfault, PollFlags::IN)));
    // Its end tells nothing: all is looked at.
    let _ = poll(&mut fds, Some(&timespec((shared.lease / PROBES).min(LOOK))));
    shared.waker.reset_if_woken();
    shared.queues.work.take_event();
    shared.queues.bells.take_event();
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    }
}
