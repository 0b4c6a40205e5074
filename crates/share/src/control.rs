//! The control connection of a node and an application: packets of a Unix socket, with descriptors. Both ends use it.

pub(crate) mod convert;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_wire::Malformed;
use rdmux_wire::node::control::{MESSAGE_LEN_MAX, Message};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use convert::Refusal;

/// Messages that wait until the other end reads. A correct application reads each answer before its next request, and has at most some events
/// for each of its objects, so one that lets more wait does not read at all.
const WAITING_MAX: usize = 16_384;

/// Why a control connection has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    /// The other end has closed it, or its process is gone.
    #[error("the other end has gone")]
    Gone,
    /// The other end sent what is no message.
    #[error("the other end sent no valid message: {0}")]
    Malformed(#[from] Malformed),
    /// The other end does not read.
    #[error("the other end does not read its messages")]
    Unread,
    /// A system call failed.
    #[error("the socket failed: {0}")]
    System(Errno),
}

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Received {
    /// Number of the request; 0 for an event.
    pub(crate) request: u32,
    /// The message.
    pub(crate) message: Message,
    /// Descriptors that came with it.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// One end of a control connection. No call waits.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
    buffer: Vec<u8>,
    waiting: VecDeque<Vec<u8>>,
}

impl Channel {
    /// Makes the end of a socket that does not wait.
    pub(crate) fn new(socket: OwnedFd) -> Channel {
        Channel {
            socket,
            buffer: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Sends a message with descriptors, which nothing waits before.
    pub(crate) fn send_with(
        &mut self,
        request: u32,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), Ended> {
        message.emit(request, &mut self.buffer);
        send_bytes(&self.socket, &self.buffer, descriptors).map_err(ended_by)
    }

    /// Sends a message, or lets it wait until the other end reads ([`Channel::flush`]).
    pub(crate) fn send(&mut self, request: u32, message: &Message) -> Result<(), Ended> {
        message.emit(request, &mut self.buffer);
        if self.waiting.is_empty() {
            match send_bytes(&self.socket, &self.buffer, &[]) {
                Err(Errno::AGAIN) => {}
                sent => return sent.map_err(ended_by),
            }
        }
        if self.waiting.len() >= WAITING_MAX {
            return Err(Ended::Unread);
        }
        self.waiting.push_back(self.buffer.clone());
        Ok(())
    }

    /// Sends what waits, as far as the other end has room.
    pub(crate) fn flush(&mut self) -> Result<(), Ended> {
        while let Some(first) = self.waiting.front() {
            match send_bytes(&self.socket, first, &[]) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(ended_by(error)),
            }
        }
        Ok(())
    }

    /// Returns whether messages wait.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Ends the connection with a reason, which the other end reads whether or not it has sent something.
    pub(crate) fn refuse(mut self, why: Refusal) {
        let _ = self.send(0, &why.message());
        let _ = shutdown(&self.socket, Shutdown::Both);
        // A socket that is closed with something unread resets the connection, and the reason is lost. Nothing more can come.
        while let Ok(Some(_)) | Err(Ended::Malformed(_)) = self.receive() {}
    }

    /// Receives a message; `None` if there is none.
    pub(crate) fn receive(&mut self) -> Result<Option<Received>, Ended> {
        receive(&self.socket)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives a message from a socket; `None` if there is none.
pub(crate) fn receive(socket: impl AsFd) -> Result<Option<Received>, Ended> {
    // One byte more, so that a message that is too long is noticed.
    let mut bytes = [0; MESSAGE_LEN_MAX + 1];
    let (len, descriptors) = loop {
        match receive_with_descriptors(&socket, &mut bytes) {
            Ok((0, _)) => return Err(Ended::Gone),
            Ok(received) => break received,
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(ended_by(error)),
        }
    };
    let (request, message) = Message::parse(&bytes[..len])?;
    Ok(Some(Received {
        request,
        message,
        descriptors,
    }))
}

fn ended_by(error: Errno) -> Ended {
    match error {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Ended::Gone,
        other => Ended::System(other),
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn send__waits_for_room_and_keeps_the_order() {
        let (ours, theirs) = pair();
        let mut channel = Channel::new(ours);
        let mut sent = 0;
        while !channel.has_waiting() || sent % 7 > 0 {
            channel.send(sent, &Message::Done {}).unwrap();
            sent += 1;
        }
        for expected in 0..sent {
            channel.flush().unwrap();
            let received = receive(&theirs).unwrap().unwrap();
            assert_eq!((received.request, received.message), (expected, Message::Done {}));
        }
        assert!(receive(&theirs).unwrap().is_none());
    }

    #[test]
    fn send__to_one_that_never_reads() {
        let (ours, _theirs) = pair();
        let mut channel = Channel::new(ours);
        let sent = (0..).find_map(|_| channel.send(0, &Message::Done {}).err());
        assert_eq!(sent, Some(Ended::Unread));
    }

    #[test]
    fn receive__what_is_no_message() {
        let (ours, theirs) = pair();
        send_bytes(&theirs, &[1; 20], &[]).unwrap();
        assert!(matches!(receive(&ours), Err(Ended::Malformed(_))));
        send_bytes(&theirs, &[0; MESSAGE_LEN_MAX + 9], &[]).unwrap();
        assert!(matches!(receive(&ours), Err(Ended::Malformed(_))));
        drop(theirs);
        assert_eq!(receive(&ours).unwrap_err(), Ended::Gone);
    }

    #[test]
    fn receive__descriptors_come_with_their_message() {
        let (ours, theirs) = pair();
        let mut channel = Channel::new(ours);
        let file = rustix::fs::memfd_create("a", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        channel
            .send_with(3, &Message::AllocPd {}, &[file.as_fd()])
            .unwrap();
        channel.send(4, &Message::AllocPd {}).unwrap();
        let counts = [(); 2].map(|()| receive(&theirs).unwrap().unwrap().descriptors.len());
        assert_eq!(counts, [1, 0]);
    }
}
