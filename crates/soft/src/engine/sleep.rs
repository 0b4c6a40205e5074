//! Sleep of the engine's thread.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::{Core, Engine, PRECISE_NS, SOCKET_RETRY_NS, Waker};

/// The epoll set in which the engine's thread sleeps.
#[derive(Debug)]
pub(super) struct Epoll {
    epoll: OwnedFd,
}

/// The sockets and doorbells.
const ARRIVALS: u64 = 0;
const KICK: u64 = 1;

impl Epoll {
    pub(super) fn new(arrivals: &OwnedFd, kick: &Waker) -> io::Result<Epoll> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let none = epoll::EventFlags::empty();
        epoll::add(&epoll, arrivals, epoll::EventData::new_u64(ARRIVALS), none)?;
        let kicked = epoll::EventFlags::IN;
        epoll::add(&epoll, kick.fd(), epoll::EventData::new_u64(KICK), kicked)?;
        Ok(Epoll { epoll })
    }

    /// Lets the next arrival wake the thread, or none: also while the thread sleeps.
    pub(super) fn report(&self, arrivals: &OwnedFd, on: bool) {
        // For one event: while a caller polls, datagrams must not wake the thread.
        let flags = match on {
            true => epoll::EventFlags::IN | epoll::EventFlags::ONESHOT,
            false => epoll::EventFlags::empty(),
        };
        let _ = epoll::modify(&self.epoll, arrivals, epoll::EventData::new_u64(ARRIVALS), flags);
    }

    /// Sleeps until something arrives, a timer is due, or somebody wakes the thread. Returns false if something had arrived already.
    pub(super) fn wait(&self, engine: &Engine) -> bool {
        let timeout_ns = {
            let mut core = engine.lock();
            core.thread_asleep = true;
            if !engine.set_watch(&mut core) {
                core.thread_asleep = false;
                return false;
            }
            let due = core.rnic.poll_timeout();
            core.sleeps.thread_ns = due.map_or(u64::MAX, |at| at.0);
            let now = engine.now();
            let blocked = core.blocked.is_some().then_some(SOCKET_RETRY_NS);
            [due.map(|at| at.since_ns(now)), blocked]
                .into_iter()
                .flatten()
                .min()
        };
        let timeout = timeout_ns.map(timespec);
        // epoll's timeout counts in milliseconds, a paced queue pair in microseconds.
        let timeout = match timeout {
            Some(precise) if timeout_ns < Some(PRECISE_NS) => {
                let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&precise));
                Some(Timespec::default())
            }
            other => other,
        };
        let arrived = self.wait_for(engine, timeout.as_ref()).arrivals;
        let mut core = engine.lock();
        core.sleeps.thread_ns = 0;
        core.thread_asleep = false;
        core.standby.woke();
        if arrived {
            core.thread_reported = false;
            #[cfg(test)]
            {
                core.thread_woken += 1;
            }
            if core.caller_looks {
                // A doorbell that was rung late would also end the next sleep.
                core.links.awake();
            }
            // A peer that has rung rings no more. The caller that watches may be awake already, and busy.
            core.end_doorbells();
        }
        engine.set_watch(&mut core);
        true
    }

    /// Sleeps until something happens, or the time is over.
    pub(super) fn wait_for(&self, engine: &Engine, timeout: Option<&Timespec>) -> Happened {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 2];
        let n = epoll::wait(&self.epoll, &mut events[..], timeout).unwrap_or(0);
        let happened = |what| events[..n].iter().any(|event| event.data.u64() == what);
        let kicked = happened(KICK) && engine.kick.reset();
        Happened {
            kicked,
            arrivals: happened(ARRIVALS),
        }
    }
}

/// Causes that ended a sleep in the epoll set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Happened {
    /// Somebody woke the thread.
    pub(super) kicked: bool,
    /// Something has arrived. The next arrival is not reported before [`Epoll::report`].
    pub(super) arrivals: bool,
}

pub(super) fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as _,
    }
}

impl Core {
    /// Stops the peers from ringing for the thread or the caller that watches. While one of them still sleeps, or only prepared for it,
    /// [`Engine::set_watch`] makes them ring again.
    pub(super) fn end_doorbells(&mut self) {
        if std::mem::take(&mut self.doorbells) {
            self.links.awake();
        }
    }
}

impl Engine {
    /// Lets arrivals wake the thread, or the caller that watches in its place, while that sleeps and no caller looks. They wake both while
    /// others rely on the thread. Returns false if packets wait already.
    pub(super) fn set_watch(&self, core: &mut Core) -> bool {
        let is_relieved = core.is_watched && !self.hand_over.has_followers();
        let thread = core.thread_asleep && !is_relieved;
        if is_relieved && !core.guarded {
            self.report_to_thread(core, false);
        } else if thread && !core.caller_looks {
            self.report_to_thread(core, true);
        }
        let wanted = (thread || core.watcher_asleep) && !core.caller_looks;
        if wanted == core.doorbells {
            return true;
        }
        if wanted {
            core.doorbells = core.links.prepare_sleep();
            core.doorbells
        } else {
            core.end_doorbells();
            true
        }
    }

    pub(super) fn report_to_thread(&self, core: &mut Core, on: bool) {
        if core.thread_reported != on {
            core.thread_reported = on;
            self.epoll.report(&self.arrivals, on);
        }
    }

    /// Wakes whoever watches, after [`Engine::set_watch`] has found packets.
    pub(super) fn wake_watch(&self, core: &Core) {
        if core.is_watched {
            self.watch_kick.wake();
        } else {
            self.kick.wake();
        }
    }
}
