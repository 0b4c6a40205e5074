//! Sleep of the engine's thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::{Engine, PRECISE_NS, SOCKET_RETRY_NS};

/// The epoll set in which the engine's thread sleeps.
pub(super) struct Epoll {
    epoll: OwnedFd,
}

const SOCKET: u64 = 0;
const KICK: u64 = 1;
const GROUPS: u64 = 2;
/// Doorbells of peers: [`Links::awake`] answers them.
const DOORBELLS: u64 = 3;

impl Epoll {
    pub(super) fn new(engine: &Engine) -> io::Result<Epoll> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let core = engine.lock();
        epoll::add(
            &epoll,
            core.rx.as_fd(),
            epoll::EventData::new_u64(SOCKET),
            epoll::EventFlags::empty(),
        )?;
        epoll::add(
            &epoll,
            core.memberships.as_fd(),
            epoll::EventData::new_u64(GROUPS),
            epoll::EventFlags::empty(),
        )?;
        epoll::add(
            &epoll,
            core.links.doorbells(),
            epoll::EventData::new_u64(DOORBELLS),
            epoll::EventFlags::IN,
        )?;
        epoll::add(
            &epoll,
            engine.kick.fd(),
            epoll::EventData::new_u64(KICK),
            epoll::EventFlags::IN,
        )?;
        Ok(Epoll { epoll })
    }

    /// Sleeps until something arrives, a timer is due, or somebody wakes the thread. Returns false if something had arrived already.
    pub(super) fn wait(&self, engine: &Engine) -> bool {
        let timeout_ns = {
            let mut core = engine.lock();
            core.thread_asleep = true;
            if !core.set_doorbells() {
                core.thread_asleep = false;
                return false;
            }
            let due = core.rnic.poll_timeout();
            core.sleeps.thread_ns = due.map_or(u64::MAX, |at| at.0);
            // Armed for one event: while a caller polls, datagrams must not wake this thread.
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            for (fd, data) in [(core.rx.as_fd(), SOCKET), (core.memberships.as_fd(), GROUPS)] {
                let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(data), flags);
            }
            let now = engine.now();
            let blocked = core.blocked.is_some().then_some(SOCKET_RETRY_NS);
            [due.map(|at| at.since_ns(now)), blocked]
                .into_iter()
                .flatten()
                .min()
        };
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        // epoll's timeout counts in milliseconds, a paced queue pair in microseconds.
        let timeout = match timeout {
            Some(precise) if timeout_ns < Some(PRECISE_NS) => {
                let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&precise));
                Some(Timespec::default())
            }
            other => other,
        };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 4];
        let n = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0);
        let happened = |what| events[..n].iter().any(|event| event.data.u64() == what);
        if happened(KICK) {
            engine.kick.reset();
        }
        let mut core = engine.lock();
        core.sleeps.thread_ns = 0;
        core.thread_asleep = false;
        core.standby.woke();
        if core.caller_looks && happened(DOORBELLS) {
            // A doorbell that was rung late would also end the next sleep.
            core.links.awake();
        }
        core.set_doorbells();
        true
    }
}
