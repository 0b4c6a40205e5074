//! Wakers of threads that sleep on a descriptor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// A sleeper that another thread can wake. Its descriptor is pollable, so that programs can wait for other things too.
#[derive(Debug)]
pub struct Waker {
    fd: OwnedFd,
    /// Number of writes to the descriptor, begun ones too, that were not read. Counted before the write, which may wake a thread that
    /// takes the writer's CPU: it must not overlook that the descriptor is readable.
    unread: AtomicU64,
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
        })
    }

    /// Wakes the sleeper.
    pub fn wake(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        // Fails only if it was woken 2^64 times without a reset.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
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
        self.unread.load(Ordering::Relaxed) > 0 && self.reset()
    }

    /// Returns the descriptor, which is readable while it is woken.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}
