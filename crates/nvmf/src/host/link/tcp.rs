//! A connection of NVMe/TCP on a socket: sends what waits, and sleeps once for all that comes.

use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::super::queue::{Command, Completion};
use super::super::tcp::{Config, Connection, FABRICS_IN_CAPSULE_MAX};
use super::super::{HostError, Options};
use super::{Breaker, QueueParams, TICK, at};
use crate::tls::{Channel, Session};

/// Slices of one message to a socket.
const SLICES_MAX: usize = 128;

/// A socket, and the connection on it.
#[derive(Debug)]
pub(super) struct Link {
    socket: TcpStream,
    address: SocketAddr,
    channel: Channel,
    connection: Connection,
}

impl Link {
    /// Connects, and has the target agree to the parameters of the connection.
    pub(super) fn open(
        options: &Options,
        address: SocketAddr,
        queue: &QueueParams,
    ) -> Result<Link, HostError> {
        let timeout = options.connect_timeout;
        let config = Config {
            digests: options.digests,
            entries: queue.entries,
            in_capsule_max: match queue.qid {
                0 => FABRICS_IN_CAPSULE_MAX,
                _ => queue.in_capsule_max,
            },
            is_io: queue.qid > 0,
        };
        let failed = |source| HostError::Connect {
            address,
            source: std::sync::Arc::new(source),
        };
        let socket = TcpStream::connect_timeout(&address, timeout).map_err(failed)?;
        // Commands are small and must not wait for each other.
        socket.set_nodelay(true).map_err(failed)?;
        socket.set_read_timeout(Some(TICK)).map_err(failed)?;
        let channel = match &options.psk {
            Some(psk) => {
                let session = Session::connect(psk, &options.host, &options.subsystem)?;
                Channel::Secure(Box::new(session))
            }
            None => Channel::Plain,
        };
        let mut link = Link {
            socket,
            address,
            channel,
            connection: Connection::new(config),
        };
        let deadline = Instant::now() + timeout;
        link.agree(deadline, timeout)?;
        while !link.connection.is_ready() {
            super::Connection::wait(&mut link, TICK)
                .map_err(|error| at(error, "the beginning of the connection"))?;
            if Instant::now() >= deadline && !link.connection.is_ready() {
                return Err(HostError::TimedOut {
                    what: "the beginning of the connection (ICReq)",
                    within: timeout,
                });
            }
        }
        Ok(link)
    }

    /// Ends the handshake of TLS, if the connection begins with one.
    fn agree(&mut self, deadline: Instant, timeout: Duration) -> Result<(), HostError> {
        loop {
            match self.channel.handshake(self.socket.as_fd()) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(at(self.lost(error), "the handshake of TLS")),
            }
            if Instant::now() >= deadline {
                return Err(HostError::TimedOut {
                    what: "the handshake of TLS",
                    within: timeout,
                });
            }
            self.sleep(self.channel.is_blocked(), TICK)?;
        }
    }

    /// Sleeps until the target has sent something, that time has passed, or, if the socket is blocked, it takes something again.
    fn sleep(&self, is_blocked: bool, longest: Duration) -> Result<(), HostError> {
        let longest = Timespec::try_from(longest).unwrap_or_default();
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, is_blocked);
        match poll(&mut [PollFd::new(&self.socket, wanted)], Some(&longest)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Sends what waits. Returns true if the socket takes no more.
    fn send(&mut self) -> Result<bool, HostError> {
        loop {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let number = self.connection.slices(&mut slices);
            if number == 0 {
                return Ok(false);
            }
            match self.channel.send(self.socket.as_fd(), &slices[..number]) {
                Ok(bytes) => self.connection.sent(bytes),
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// Receives what is there. `flags` says whether to sleep for it.
    fn receive(&mut self, mut flags: RecvFlags) -> Result<(), HostError> {
        loop {
            let space = self.connection.space();
            let wanted = space.len();
            match self.channel.receive(self.socket.as_fd(), space, flags) {
                Ok(0) => return Err(HostError::Closed(None)),
                Ok(bytes) => {
                    self.connection.received(bytes);
                    if self.channel.is_drained(bytes, wanted) || self.connection.end().is_some() {
                        return Ok(());
                    }
                    flags = RecvFlags::DONTWAIT;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// Returns the error of a connection that the peer, or another thread here, has ended.
    fn lost(&self, error: Errno) -> HostError {
        match (self.channel.failure(), error) {
            (Some(why), _) => HostError::Tls {
                address: self.address,
                why: why.to_owned(),
            },
            (None, Errno::CONNRESET | Errno::PIPE) => HostError::Closed(None),
            (None, error) => io::Error::from(error).into(),
        }
    }
}

impl super::Connection for Link {
    fn room(&self) -> usize {
        self.connection.room()
    }

    fn in_flight(&self) -> usize {
        self.connection.in_flight()
    }

    fn has_expired(&self, now: Instant) -> bool {
        self.connection.has_expired(now)
    }

    fn take_commands(&mut self) -> Vec<Command> {
        self.connection.take_commands()
    }

    fn submit(&mut self, command: Command, deadline: Option<Instant>) {
        self.connection.submit(command, deadline);
    }

    fn has_completions(&self) -> bool {
        self.connection.has_completions()
    }

    fn poll(&mut self) -> Option<Completion> {
        self.connection.poll()
    }

    fn wait(&mut self, longest: Duration) -> Result<(), HostError> {
        let is_blocked = self.send()?;
        if self.connection.has_completions() {
            return Ok(());
        }
        // The socket's own time-out is a tick.
        let received = if self.channel.has_bytes() {
            self.receive(RecvFlags::DONTWAIT)
        } else if is_blocked || longest < TICK || matches!(self.channel, Channel::Secure(_)) {
            self.sleep(is_blocked, longest)
                .and_then(|()| self.receive(RecvFlags::DONTWAIT))
        } else {
            self.receive(RecvFlags::empty())
        };
        // Requests for data are answered at once. The reason for an end is told, if the target still takes it.
        let sent = self.send();
        if let Some(end) = self.connection.end() {
            return Err(end.into());
        }
        received?;
        sent?;
        Ok(())
    }

    fn end(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn breaker(&self) -> Result<Box<dyn Breaker>, HostError> {
        Ok(Box::new(self.socket.try_clone()?))
    }
}

impl Breaker for TcpStream {
    fn break_off(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}
