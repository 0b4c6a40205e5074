//! Wakers of threads that sleep on a descriptor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::thread::futex;

/// Value of [`Nap::word`] while a thread naps.
pub const NAP_ASLEEP: u32 = 1;

/// The word on which a thread naps: it sleeps in a futex, among other words, and not on descriptors. Others of its process wake it by this
/// word. One thread at a time naps.
#[derive(Debug, Default)]
pub struct Nap(AtomicU32);

impl Nap {
    /// Announces a nap. The caller then looks once more for everything that others leave before they call [`Nap::wake`], and sleeps while
    /// [`Nap::word`] is [`NAP_ASLEEP`].
    pub fn begin(&self) {
        self.0.store(NAP_ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Ends a nap: nobody needs to wake the caller.
    pub fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Wakes the napper, if there is one, after the caller has left something for it.
    #[inline]
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.0.load(Ordering::Relaxed) == NAP_ASLEEP {
            // This may overwrite the announcement of a later nap, but the call follows, and ends that.
            self.0.store(0, Ordering::Relaxed);
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }

    /// Returns the word.
    pub fn word(&self) -> &AtomicU32 {
        &self.0
    }
}

/// A sleeper that another thread can wake. Its descriptor is pollable, so that programs can wait for other things too.
#[derive(Debug)]
pub struct Waker {
    fd: OwnedFd,
    /// Number of writes to the descriptor, begun ones too, that were not read. Counted before the write, which may wake a thread that
    /// takes the writer's CPU: it must not overlook that the descriptor is readable.
    unread: AtomicU64,
    /// The nap that the sleeper may take, and not sleep on the descriptor.
    nap: Option<Arc<Nap>>,
}

impl Waker {
    /// Makes a waker.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker {
            fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            unread: AtomicU64::new(0),
            nap: None,
        })
    }

    /// Makes a waker that wakes a napper too.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn of_napper(nap: Arc<Nap>) -> io::Result<Waker> {
        let nap = Some(nap);
        Ok(Waker { nap, ..Waker::new()? })
    }

    /// Wakes the sleeper.
    pub fn wake(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        // Fails only if it was woken 2^64 times without a reset.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        if let Some(nap) = &self.nap {
            nap.wake();
        }
    }

    /// Returns whether it was woken since the last reset. Costs no system call.
    pub fn is_woken(&self) -> bool {
        self.unread.load(Ordering::Relaxed) > 0
    }

    /// Sleeps until woken; returns false if the time is over first.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
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
    pub fn reset(&self) -> bool {
        let mut writes = [0; 8];
        let was_woken = rustix::io::read(&self.fd, &mut writes).is_ok();
        if was_woken {
            self.unread
                .fetch_sub(u64::from_ne_bytes(writes), Ordering::Relaxed);
        }
        was_woken
    }

    /// Does the same, without a system call if nobody woke it.
    pub fn reset_if_woken(&self) -> bool {
        self.is_woken() && self.reset()
    }

    /// Returns the descriptor, which is readable while it is woken.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}
