//! Messages from other threads to a thread that may be asleep.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Sends messages to the [`Inbox`] of one thread, and wakes that thread. Clones send to the same inbox.
#[derive(Debug)]
pub struct Mailbox<M> {
    sender: mpsc::Sender<M>,
    wake: Arc<OwnedFd>,
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Mailbox<M> {
        Mailbox {
            sender: self.sender.clone(),
            wake: self.wake.clone(),
        }
    }
}

impl<M> Mailbox<M> {
    /// Sends a message. Returns false if the inbox is gone.
    pub fn send(&self, message: M) -> bool {
        let sent = self.sender.send(message).is_ok();
        // The write fails only after 2^64 wake-ups that nobody read.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        sent
    }
}

/// Receives the messages of all clones of a [`Mailbox`].
#[derive(Debug)]
pub struct Inbox<M> {
    receiver: mpsc::Receiver<M>,
    wake: Arc<OwnedFd>,
}

impl<M> Inbox<M> {
    /// Takes the oldest message.
    pub fn take(&self) -> Option<M> {
        self.receiver.try_recv().ok()
    }

    /// Sleeps until a message arrives, another descriptor is readable, a signal comes, or the deadline. Returns false if it was the
    /// deadline. A message that arrived before the previous sleep ended does not end this one: take all messages between two sleeps.
    pub fn sleep(&self, others: &[BorrowedFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        fds.extend(others.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().min(3600) as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let ready = match poll(&mut fds, timeout.as_ref()) {
            Ok(ready) => ready > 0,
            Err(rustix::io::Errno::INTR) => true,
            Err(error) => return Err(error.into()),
        };
        if fds.first().is_some_and(|wake| !wake.revents().is_empty()) {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        Ok(ready)
    }
}

/// Makes a mailbox and its inbox.
///
/// # Errors
/// The system refuses a descriptor.
pub fn mailbox<M>() -> io::Result<(Mailbox<M>, Inbox<M>)> {
    let (sender, receiver) = mpsc::channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
    let mailbox = Mailbox {
        sender,
        wake: wake.clone(),
    };
    Ok((mailbox, Inbox { receiver, wake }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn is_woken(inbox: &Inbox<u32>) -> bool {
        inbox.sleep(&[], Some(Instant::now())).unwrap()
    }

    #[test]
    fn sleep__ends_once_for_the_messages_before_it() {
        let (mailbox, inbox) = mailbox().unwrap();
        assert!(!is_woken(&inbox));
        assert!(mailbox.send(1) && mailbox.clone().send(2));
        assert!(is_woken(&inbox) && !is_woken(&inbox));
        assert_eq!(
            [inbox.take(), inbox.take(), inbox.take()],
            [Some(1), Some(2), None]
        );
    }

    #[test]
    fn sleep__another_descriptor_ends_it() {
        let (_mailbox, inbox) = mailbox::<u32>().unwrap();
        let other = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        assert!(inbox.sleep(&[other.as_fd()], None).unwrap());
    }

    #[test]
    fn sleep__a_message_of_another_thread_ends_it() {
        let (mailbox, inbox) = mailbox().unwrap();
        let sender = std::thread::spawn(move || mailbox.send(7));
        while inbox.take() != Some(7) {
            assert!(inbox.sleep(&[], None).unwrap());
        }
        assert!(sender.join().unwrap());
    }

    #[test]
    fn send__after_the_inbox_is_gone() {
        let (mailbox, inbox) = mailbox().unwrap();
        drop(inbox);
        assert!(!mailbox.send(1));
    }
}
