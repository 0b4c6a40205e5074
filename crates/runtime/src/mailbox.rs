//! Messages from other threads to a thread that may be asleep.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use rdmux_verbs::provider::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Sends messages to the [`Inbox`] of one thread, and wakes that thread. Clones send to the same inbox.
#[derive(Debug)]
pub struct Mailbox<M> {
    sender: mpsc::Sender<M>,
    waker: Arc<Waker>,
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Mailbox<M> {
        Mailbox {
            sender: self.sender.clone(),
            waker: self.waker.clone(),
        }
    }
}

impl<M> Mailbox<M> {
    /// Sends a message. Returns false if the inbox is gone.
    pub fn send(&self, message: M) -> bool {
        self.pass(message).is_none()
    }

    /// Sends a message, or returns it if the inbox is gone.
    pub(crate) fn pass(&self, message: M) -> Option<M> {
        let sent = self.sender.send(message);
        self.waker.wake();
        sent.err().map(|mpsc::SendError(message)| message)
    }
}

/// Receives the messages of all clones of a [`Mailbox`].
#[derive(Debug)]
pub struct Inbox<M> {
    receiver: mpsc::Receiver<M>,
    waker: Arc<Waker>,
}

impl<M> Inbox<M> {
    /// Makes another mailbox, whose inbox belongs to the same thread: its messages end the sleep of this one.
    pub(crate) fn beside<N>(&self) -> (Mailbox<N>, Inbox<N>) {
        with_waker(self.waker.clone())
    }

    /// Takes the oldest message.
    pub fn take(&self) -> Option<M> {
        self.receiver.try_recv().ok()
    }

    /// Makes the descriptor unreadable until the next message arrives.
    pub fn reset(&self) {
        self.waker.reset();
    }

    /// Sleeps until a message arrives, another descriptor is readable, or the deadline. Returns the indices of the other descriptors that
    /// are readable; `None` if it was the deadline. A message that arrived before the previous sleep ended does not end this one: take all
    /// messages between two sleeps.
    ///
    /// # Errors
    /// [`io::ErrorKind::Interrupted`]: a signal has ended the sleep.
    pub fn sleep(
        &self,
        others: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> io::Result<Option<Vec<usize>>> {
        let mut fds: Vec<_> = others.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if !self.sleep_beside(&mut fds, deadline)? {
            return Ok(None);
        }
        let is_ready = |at: &usize| !fds[*at].revents().is_empty();
        Ok(Some((0..others.len()).filter(is_ready).collect()))
    }

    /// Sleeps as [`Inbox::sleep`] does, on descriptors that then tell which of them are ready; its own is added behind them. Returns false if
    /// the deadline has ended it.
    pub(crate) fn sleep_beside<'fd>(
        &'fd self,
        fds: &mut Vec<PollFd<'fd>>,
        deadline: Option<Instant>,
    ) -> io::Result<bool> {
        fds.push(PollFd::new(self.waker.fd(), PollFlags::IN));
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().min(3600) as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        if poll(fds, timeout.as_ref())? == 0 {
            return Ok(false);
        }
        if fds.last().is_some_and(|own| !own.revents().is_empty()) {
            self.reset();
        }
        Ok(true)
    }
}

/// Readable once a message has arrived, for a thread with a loop of its own, which calls [`Inbox::reset`] then and takes all messages.
impl<M> AsFd for Inbox<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.fd().as_fd()
    }
}

/// Makes a mailbox and its inbox.
///
/// # Errors
/// The system refuses a descriptor.
pub fn mailbox<M>() -> io::Result<(Mailbox<M>, Inbox<M>)> {
    Ok(with_waker(Arc::new(Waker::new()?)))
}

fn with_waker<M>(waker: Arc<Waker>) -> (Mailbox<M>, Inbox<M>) {
    let (sender, receiver) = mpsc::channel();
    let mailbox = Mailbox {
        sender,
        waker: waker.clone(),
    };
    (mailbox, Inbox { receiver, waker })
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn is_woken(inbox: &Inbox<u32>) -> bool {
        inbox.sleep(&[], Some(Instant::now())).unwrap().is_some()
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
        let [silent, other] = [0, 1].map(|count| eventfd(count, EventfdFlags::CLOEXEC).unwrap());
        let ready = inbox.sleep(&[silent.as_fd(), other.as_fd()], None).unwrap();
        assert_eq!(ready, Some(vec![1]));
    }

    #[test]
    fn sleep__a_message_of_another_thread_ends_it() {
        let (mailbox, inbox) = mailbox().unwrap();
        let sender = std::thread::spawn(move || mailbox.send(7));
        while inbox.take() != Some(7) {
            assert_eq!(inbox.sleep(&[], None).unwrap(), Some(vec![]));
        }
        assert!(sender.join().unwrap());
    }

    #[test]
    fn as_fd__readable_until_it_is_reset() {
        let (mailbox, inbox) = mailbox().unwrap();
        let is_readable = || {
            let mut fds = [PollFd::new(&inbox, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!is_readable());
        assert!(mailbox.send(1) && is_readable());
        inbox.reset();
        assert!(!is_readable());
        assert_eq!(inbox.take(), Some(1));
    }

    #[test]
    fn send__after_the_inbox_is_gone() {
        let (mailbox, inbox) = mailbox().unwrap();
        drop(inbox);
        assert!(!mailbox.send(1));
    }
}
