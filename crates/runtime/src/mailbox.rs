//! Messages from other threads to a thread that may be asleep.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

use rustix::event::{EventfdFlags, eventfd};

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

    /// Makes the descriptor unreadable. Messages may be there already: take them afterwards.
    pub fn reset(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

impl<M> AsFd for Inbox<M> {
    /// Returns a descriptor that is readable when a message was sent after the last [`Inbox::reset`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
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
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(inbox: &Inbox<u32>) -> bool {
        let at_once = Timespec::default();
        poll(&mut [PollFd::new(inbox, PollFlags::IN)], Some(&at_once)).unwrap() == 1
    }

    #[test]
    fn take__messages_in_order_and_the_descriptor_until_reset() {
        let (mailbox, inbox) = mailbox().unwrap();
        assert!(!is_readable(&inbox));
        assert!(mailbox.send(1) && mailbox.clone().send(2));
        assert!(is_readable(&inbox));
        inbox.reset();
        assert!(!is_readable(&inbox));
        assert_eq!(
            [inbox.take(), inbox.take(), inbox.take()],
            [Some(1), Some(2), None]
        );
    }

    #[test]
    fn send__after_the_inbox_is_gone() {
        let (mailbox, inbox) = mailbox().unwrap();
        drop(inbox);
        assert!(!mailbox.send(1));
    }
}
