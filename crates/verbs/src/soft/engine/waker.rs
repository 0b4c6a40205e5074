//! Wakers of those who wait for the engine, and the connection events that they wait for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmux_rnic::cm::{CmEvent, CmId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::cm::Arrival;
use crate::connection_events::Inbox;

/// A sleeper that the engine can wake. Its descriptor is pollable, so that programs can wait for other things too.
#[derive(Debug)]
pub(crate) struct Waker {
    fd: OwnedFd,
    /// Set when the waker was woken since [`Waker::reset_if_woken`]. Stored after the write to the descriptor, so that a readable
    /// descriptor is not overlooked for good.
    woken: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        Ok(Waker {
            fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            woken: AtomicBool::new(false),
        })
    }

    pub(crate) fn wake(&self) {
        // Fails only if it was woken 2^64 times without a reset.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        self.woken.store(true, Ordering::Release);
    }

    /// Sleeps until woken; returns false if the time is over first.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs().min(i64::MAX as u64 / 2) as i64,
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => false,
            Ok(_) => {
                self.reset();
                true
            }
            Err(_) => true,
        }
    }

    /// Resets the waker. Returns whether it was woken since the last reset.
    pub(crate) fn reset(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 8]).is_ok()
    }

    /// Does the same, without a system call if nobody woke it.
    pub(crate) fn reset_if_woken(&self) -> bool {
        self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::Acquire) && self.reset()
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

/// Events of a connection, or requests for a service, until its user takes them.
pub(crate) type CmQueue = Inbox<(Arrival, CmEvent)>;

impl CmQueue {
    /// Removes a request that has ended: the user can no longer decide on it.
    pub(super) fn withdraw(&self, ended: CmId) {
        self.retain(|(_, event)| {
            let (CmEvent::Request { id, .. } | CmEvent::SidrRequest { id, .. }) = event else {
                return true;
            };
            *id != ended
        });
    }
}

/// The engine's side of a [`CmQueue`].
#[derive(Clone, Debug)]
pub(crate) struct CmSink(pub(super) Weak<CmQueue>);

impl CmSink {
    pub(crate) fn of(queue: &Arc<CmQueue>) -> CmSink {
        CmSink(Arc::downgrade(queue))
    }

    /// Queues an event and wakes its user; returns whether the user still exists.
    pub(super) fn tell(&self, event: CmEvent) -> bool {
        let Some(queue) = self.0.upgrade() else {
            return false;
        };
        queue.push((Arrival::next(), event));
        true
    }
}
