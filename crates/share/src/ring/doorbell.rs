//! Doorbells: a descriptor that becomes readable.
//!
//! Two processes share a doorbell, and one of them does not trust the other. A flag of an open file, such as `O_NONBLOCK`, is everybody's
//! who has a descriptor of that open file. So a node that writes to an eventfd of which the application has a descriptor waits for ever if
//! the application has set the counter to its limit and cleared the flag, and one that reads it waits if the application has read it
//! first. Hence:
//!
//! - The application rings the node by an eventfd, and the node reads it by a call that never waits, whatever the flags are (`RWF_NOWAIT`,
//!   which eventfds have since Linux 5.8; there is no such call that writes).
//! - The node rings the application by a pipe, of which it alone has the writing end. The two ends are open files of their own.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags, fcntl_dupfd_cloexec, preadv2, read, write};
use rustix::pipe::{PipeFlags, pipe_with};

/// The end that rings.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
    /// The bytes of a call.
    call: [u8; 8],
    call_bytes: usize,
    /// The reading end of a pipe: without a reader, a call would raise a signal.
    _reader: Option<OwnedFd>,
}

/// The end that is rung. Its descriptor is readable from then on until [`BellWaiter::answer`].
#[derive(Debug)]
pub struct BellWaiter {
    fd: OwnedFd,
    is_event: bool,
}

impl Bell {
    /// Creates the doorbell of the node: the node's end, and the descriptor for [`Bell::of_application`].
    pub(super) fn to_node() -> io::Result<(BellWaiter, OwnedFd)> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let other = fcntl_dupfd_cloexec(&fd, 0)?;
        Ok((BellWaiter { fd, is_event: true }, other))
    }

    /// Creates the doorbell of the application: the node's end, and the descriptor for [`BellWaiter::of_application`].
    pub(super) fn to_application() -> io::Result<(Bell, OwnedFd)> {
        let (reader, fd) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let other = fcntl_dupfd_cloexec(&reader, 0)?;
        let bell = Bell {
            fd,
            call: [1; 8],
            call_bytes: 1,
            _reader: Some(reader),
        };
        Ok((bell, other))
    }

    /// Returns the application's end of the doorbell of the node.
    pub(super) fn of_application(fd: OwnedFd) -> Bell {
        let call = 1u64.to_ne_bytes();
        Bell {
            fd,
            call,
            call_bytes: call.len(),
            _reader: None,
        }
    }

    /// Rings. The node's call never waits, whatever the application does.
    pub fn ring(&self) {
        // An error means that the other side has many calls that it has not answered: one more is no news.
        let _ = write(&self.fd, &self.call[..self.call_bytes]);
    }
}

impl BellWaiter {
    /// Returns the application's end of its doorbell.
    pub(super) fn of_application(fd: OwnedFd) -> BellWaiter {
        BellWaiter { fd, is_event: false }
    }

    /// Makes the descriptor unreadable until the next call. Comes before the look at what the call is about. The node never waits here,
    /// whatever the application does.
    pub fn answer(&self) {
        if self.is_event {
            let mut count = [0; 8];
            // Offset -1: this is no file with positions.
            let _ = preadv2(
                &self.fd,
                &mut [IoSliceMut::new(&mut count)],
                u64::MAX,
                ReadWriteFlags::NOWAIT,
            );
        } else {
            let mut calls = [0; 64];
            while read(&self.fd, &mut calls) == Ok(calls.len()) {}
        }
    }

    /// Waits until the doorbell rings or the time is over, and answers it. May end without cause. Returns whether it has rung.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) => {
                self.answer();
                Ok(true)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for BellWaiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    /// Runs a step of the node that must not wait for the application.
    fn must_end(step: impl FnOnce() + Send + 'static) {
        let (sender, ended) = mpsc::channel();
        thread::spawn(move || {
            step();
            let _ = sender.send(());
        });
        ended.recv_timeout(LONG).expect("the node waits");
    }

    #[test]
    fn wait__until_it_rings() {
        let (waiter, other) = Bell::to_node().unwrap();
        let (bell, far) = Bell::to_application().unwrap();
        for (waiter, bell) in [
            (waiter, Bell::of_application(other)),
            (BellWaiter::of_application(far), bell),
        ] {
            assert!(!waiter.wait(NOW).unwrap());
            for _ in 0..200 {
                bell.ring();
            }
            assert!(waiter.wait(LONG).unwrap());
            assert!(!waiter.wait(NOW).unwrap(), "all calls are answered");
            thread::scope(|threads| {
                threads.spawn(|| bell.ring());
                assert!(waiter.wait(LONG).unwrap());
            });
        }
    }

    #[test]
    fn answer__of_a_call_that_the_application_has_taken_away() {
        let (waiter, other) = Bell::to_node().unwrap();
        fcntl_setfl(&other, OFlags::empty()).unwrap();
        must_end(move || waiter.answer());
    }

    #[test]
    fn answer__of_so_many_calls_that_no_more_are_possible() {
        let (waiter, other) = Bell::to_node().unwrap();
        write(&other, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(waiter.wait(LONG).unwrap());
        assert!(!waiter.wait(NOW).unwrap());
    }

    #[test]
    fn ring__an_application_that_answers_nothing() {
        let (bell, other) = Bell::to_application().unwrap();
        fcntl_setfl(&other, OFlags::empty()).unwrap();
        must_end(move || (0..100_000).for_each(|_| bell.ring()));
        fcntl_setfl(&other, OFlags::NONBLOCK).unwrap();
        assert!(BellWaiter::of_application(other).wait(NOW).unwrap());
    }

    #[test]
    fn ring__an_application_that_has_gone() {
        let (bell, other) = Bell::to_application().unwrap();
        drop(other);
        bell.ring();
    }
}
