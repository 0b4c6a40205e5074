//! The bytes of a connection on its socket: as they are, or through a session of TLS.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::{Proof, Session};

/// See the module. Nothing here sleeps, but for [`Channel::receive`] of plain bytes where the caller says so.
#[derive(Debug)]
pub(crate) enum Channel {
    /// Bytes as they are.
    Plain,
    /// Bytes of a session.
    Secure(Box<Session>),
    /// The first byte of the host says which of both.
    Open(Box<Session>),
}

/// First byte of a PDU by which a host begins a connection (ICReq, NVMe/TCP 3.6.2.2), which is that of no record of TLS.
const INITIALIZE: u8 = 0;

impl Channel {
    /// Returns true once bytes can be exchanged.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Channel::Plain => true,
            Channel::Secure(session) => session.is_ready(),
            Channel::Open(_) => false,
        }
    }

    /// Takes a handshake that is not over further. Returns true once bytes can be exchanged.
    ///
    /// # Errors
    /// The peer has another key, or sends something else: the connection is over.
    pub(crate) fn handshake(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        if let Channel::Open(_) = self {
            let mut first = [0];
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let is_plain = match recv(socket, &mut first[..], flags) {
                Ok((bytes, _)) => bytes > 0 && first[0] == INITIALIZE,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(error) => return Err(error),
            };
            *self = match std::mem::replace(self, Channel::Plain) {
                // The session ends what is neither, and a connection without bytes.
                Channel::Open(session) if !is_plain => Channel::Secure(session),
                _ => Channel::Plain,
            };
        }
        match self {
            Channel::Secure(session) if !session.is_ready() => session.handshake(socket),
            _ => Ok(true),
        }
    }

    /// Returns true if a handshake waits for the socket to take bytes.
    pub(crate) fn is_blocked(&self) -> bool {
        match self {
            Channel::Plain | Channel::Open(_) => false,
            Channel::Secure(session) => session.is_blocked(),
        }
    }

    /// Returns once, after the handshake, what the host has proved by it.
    pub(crate) fn take_proof(&mut self) -> Option<Proof> {
        match self {
            Channel::Plain | Channel::Open(_) => None,
            Channel::Secure(session) => session.take_proof(),
        }
    }

    /// Receives bytes; 0 if the peer has closed the connection.
    ///
    /// # Errors
    /// None are there ([`Errno::AGAIN`]), or the connection is over.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        space: &mut [u8],
        flags: RecvFlags,
    ) -> Result<usize, Errno> {
        match self {
            Channel::Plain => recv(socket, space, flags).map(|(bytes, _)| bytes),
            Channel::Secure(session) => session.receive(socket, space),
            Channel::Open(_) => Err(Errno::AGAIN),
        }
    }

    /// Returns true if fewer bytes than there was space for were all that the socket has.
    pub(crate) fn is_drained(&self, bytes: usize, space: usize) -> bool {
        // A session returns a record at a time.
        matches!(self, Channel::Plain) && bytes < space
    }

    /// Returns true if it holds bytes of which the socket does not tell.
    pub(crate) fn has_bytes(&self) -> bool {
        match self {
            Channel::Plain | Channel::Open(_) => false,
            Channel::Secure(session) => session.has_bytes(),
        }
    }

    /// Sends as much as the socket takes. What it does not take is to be sent next, as it was, maybe with more behind it.
    ///
    /// # Errors
    /// It takes nothing ([`Errno::AGAIN`]), or the connection is over.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        match self {
            Channel::Plain => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags)
            }
            Channel::Secure(session) => session.send(socket, slices),
            Channel::Open(_) => Err(Errno::AGAIN),
        }
    }

    /// Returns what has ended the session.
    pub(crate) fn failure(&self) -> Option<&str> {
        match self {
            Channel::Plain | Channel::Open(_) => None,
            Channel::Secure(session) => session.failure(),
        }
    }
}
