//! Wakers of those who wait for the engine, and the connection events that they wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rdmux_rnic::cm::{CmEvent, CmId};
use rdmux_verbs::provider::{Inbox, Nap, Registration, Waker};
use rdmux_verbs::{Arrival, EventQueue};

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
        nap: Arc<Nap>,
    },
}

impl CqWaker {
    /// `nap` is that of the thread that may nap while it waits for the queue.
    pub(crate) fn new(nap: Arc<Nap>) -> io::Result<CqWaker> {
        Ok(CqWaker::Own(Waker::of_napper(nap)?))
    }

    pub(crate) fn reporting(queue: &EventQueue, token: u64, nap: Arc<Nap>) -> CqWaker {
        CqWaker::Reports {
            registration: Registration::new(queue, token),
            woken: AtomicBool::new(false),
            own: OnceLock::new(),
            nap,
        }
    }

    pub(crate) fn wake(&self) {
        match self {
            CqWaker::Own(waker) => waker.wake(),
            CqWaker::Reports {
                registration,
                woken,
                own,
                ..
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
            CqWaker::Reports { own, nap, .. } => match own.get() {
                Some(waker) => Ok(waker),
                None => {
                    let made = Waker::of_napper(nap.clone())?;
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

/// Removes a request that has ended: the user can no longer decide on it.
pub(super) fn withdraw(queue: &CmQueue, ended: CmId) {
    queue.retain(|(_, event)| {
        let (CmEvent::Request { id, .. } | CmEvent::SidrRequest { id, .. }) = event else {
            return true;
        };
        *id != ended
    });
}

/// The engine's side of a [`CmQueue`].
#[derive(Clone, Debug)]
pub(crate) struct CmSink(pub(super) Weak<CmQueue>);

impl CmSink {
    pub(crate) fn of(queue: &Arc<CmQueue>) -> CmSink {
        CmSink(Arc::downgrade(queue))
    }

    /// Wakes the user, who asks for something else than events.
    pub(super) fn wake(&self) {
        if let Some(queue) = self.0.upgrade() {
            queue.wake();
        }
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
