//! Wakers of those who wait for the engine, and the connection events that they wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rdmux_rnic::cm::{CmEvent, CmId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::cm::Arrival;
use crate::event_queue::{EventQueue, Registration};
use crate::inbox::Inbox;

/// A sleeper that the engine can wake. Its descriptor is pollable, so that programs can wait for other things too.
#[derive(Debug)]
pub(crate) struct Waker {
    fd: OwnedFd,
    /// Number of writes to the descriptor, begun ones too, that were not read. Counted before the write, which may wake a thread that
    /// takes the writer's CPU: it must not overlook that the descriptor is readable.
    unread: AtomicU64,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        Ok(Waker {
            fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            unread: AtomicU64::new(0),
        })
    }

    pub(crate) fn wake(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        // Fails only if it was woken 2^64 times without a reset.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
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
        let mut writes = [0; 8];
        let was_woken = rustix::io::read(&self.fd, &mut writes).is_ok();
        if was_woken {
            self.unread
                .fetch_sub(u64::from_ne_bytes(writes), Ordering::Relaxed);
        }
        was_woken
    }

    /// Does the same, without a system call if nobody woke it.
    pub(crate) fn reset_if_woken(&self) -> bool {
        self.unread.load(Ordering::Relaxed) > 0 && self.reset()
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

/// Wakes those who wait for a completion queue.
#[derive(Debug)]
pub(crate) enum CqWaker {
    /// By a descriptor of its own.
    Own(Waker),
    /// By the queue to which it reports.
    Reports {
        registration: Registration,
        /// Set when it was woken since [`CqWaker::reset_if_woken`]: one report for each arming.
        woken: AtomicBool,
        /// For threads that wait for this queue alone.
        own: OnceLock<Waker>,
    },
}

impl CqWaker {
    pub(crate) fn new() -> io::Result<CqWaker> {
        Ok(CqWaker::Own(Waker::new()?))
    }

    pub(crate) fn reporting(queue: &EventQueue, token: u64) -> CqWaker {
        CqWaker::Reports {
            registration: Registration::new(queue, token),
            woken: AtomicBool::new(false),
            own: OnceLock::new(),
        }
    }

    pub(crate) fn wake(&self) {
        match self {
            CqWaker::Own(waker) => waker.wake(),
            CqWaker::Reports {
                registration,
                woken,
                own,
            } => {
                if let Some(waker) = own.get() {
                    waker.wake();
                }
                if !woken.swap(true, Ordering::AcqRel) {
                    registration.announce_again();
                }
            }
        }
    }

    /// Ends the effect of earlier wake-ups on a descriptor of its own; a report stays where it is. Returns whether there were any.
    pub(crate) fn reset_if_woken(&self) -> bool {
        match self {
            CqWaker::Own(waker) => waker.reset_if_woken(),
            CqWaker::Reports { woken, .. } => woken.swap(false, Ordering::AcqRel),
        }
    }

    /// Returns the waker for threads that wait for this queue alone. A wake-up before it was made is no wake-up of such a thread.
    pub(crate) fn own(&self) -> io::Result<&Waker> {
        match self {
            CqWaker::Own(waker) => Ok(waker),
            CqWaker::Reports { own, .. } => match own.get() {
                Some(waker) => Ok(waker),
                None => {
                    let made = Waker::new()?;
                    Ok(own.get_or_init(|| made))
                }
            },
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            CqWaker::Own(waker) => waker.fd().as_fd(),
            CqWaker::Reports { registration, .. } => registration.queue().as_fd(),
        }
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
