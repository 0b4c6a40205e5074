//! A connection of NVMe/TCP on a socket: sends what waits, and sleeps once for all that comes.

use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::HostError;
use super::queue::{Command, Completion};
use super::setup::{Setup, Step};
use super::tcp::{Config, Connection};

/// Longest sleep before deadlines are looked at.
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Slices of one message to a socket.
const SLICES_MAX: usize = 128;
/// Token of requests for events, which complete at any time.
pub(super) const EVENT_TOKEN: u64 = u64::MAX;

/// A connection, which is a queue.
#[derive(Debug)]
pub(super) struct Link {
    socket: TcpStream,
    pub(super) connection: Connection,
    /// Completions of requests for events.
    pub(super) events: Vec<Completion>,
}

impl Link {
    /// Connects, and has the target agree to the parameters of the connection.
    pub(super) fn open(address: SocketAddr, config: Config, timeout: Duration) -> Result<Link, HostError> {
        let failed = |source| HostError::Connect {
            address,
            source: std::sync::Arc::new(source),
        };
        let socket = TcpStream::connect_timeout(&address, timeout).map_err(failed)?;
        // Commands are small and must not wait for each other.
        socket.set_nodelay(true).map_err(failed)?;
        socket.set_read_timeout(Some(TICK)).map_err(failed)?;
        let mut link = Link {
            socket,
            connection: Connection::new(config),
            events: Vec::new(),
        };
        let deadline = Instant::now() + timeout;
        while !link.connection.is_ready() {
            link.wait()
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

    /// Returns a handle by which another thread can end the connection.
    pub(super) fn socket(&self) -> io::Result<TcpStream> {
        self.socket.try_clone()
    }

    /// Sends what waits. Returns true if the socket takes no more.
    fn send(&mut self) -> Result<bool, HostError> {
        loop {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let number = self.connection.slices(&mut slices);
            if number == 0 {
                return Ok(false);
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = sendmsg(
                &self.socket,
                &slices[..number],
                &mut SendAncillaryBuffer::default(),
                flags,
            );
            match sent {
                Ok(bytes) => self.connection.sent(bytes),
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }

    /// Receives what is there. `flags` says whether to sleep for it.
    fn receive(&mut self, mut flags: RecvFlags) -> Result<(), HostError> {
        loop {
            let space = self.connection.space();
            let wanted = space.len();
            match recv(&self.socket, space, flags) {
                Ok((0, _)) => return Err(HostError::Closed(None)),
                Ok((bytes, _)) => {
                    self.connection.received(bytes);
                    if bytes < wanted || self.connection.end().is_some() {
                        return Ok(());
                    }
                    flags = RecvFlags::DONTWAIT;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(error) => return Err(lost(error)),
            }
        }
    }

    /// Sends what waits, and sleeps until the target has sent something or a tick has passed.
    pub(super) fn wait(&mut self) -> Result<(), HostError> {
        let is_blocked = self.send()?;
        if self.connection.has_completions() {
            return Ok(());
        }
        let received = if is_blocked {
            let tick = Timespec::try_from(TICK).unwrap_or_default();
            let mut polled = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::OUT)];
            match poll(&mut polled, Some(&tick)) {
                Ok(_) | Err(Errno::INTR) => self.receive(RecvFlags::DONTWAIT),
                Err(error) => Err(io::Error::from(error).into()),
            }
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

    /// Runs one command.
    pub(super) fn run(
        &mut self,
        what: &'static str,
        command: Command,
        timeout: Duration,
    ) -> Result<Completion, HostError> {
        if self.connection.room() == 0 {
            return Err(HostError::Closed(Some(what)));
        }
        let deadline = Instant::now() + timeout;
        self.connection.submit(command, Some(deadline));
        loop {
            self.wait().map_err(|error| at(error, what))?;
            while let Some(completion) = self.connection.poll() {
                match completion.command.token {
                    EVENT_TOKEN => self.events.push(completion),
                    _ => return Ok(completion),
                }
            }
            if Instant::now() >= deadline {
                return Err(HostError::TimedOut {
                    what,
                    within: timeout,
                });
            }
        }
    }

    /// Carries out a setup.
    pub(super) fn set_up(&mut self, setup: &mut Setup<'_>, timeout: Duration) -> Result<(), HostError> {
        loop {
            match setup.next()? {
                Step::Submit(what, command) => {
                    let completion = self.run(what, *command, timeout);
                    let completion = completion.map_err(|error| setup.failed(error))?;
                    setup.handle(what, &completion)?;
                }
                Step::Post(command) => self.post(*command),
                // Between two looks at CSTS, of whose change no event tells.
                Step::Wait(time) => std::thread::sleep(time),
                Step::Done => return Ok(()),
            }
        }
    }

    /// Sends a request for an event.
    pub(super) fn post(&mut self, mut command: Command) {
        command.token = EVENT_TOKEN;
        if self.connection.room() > 0 {
            self.connection.submit(command, None);
        }
    }
}

/// Returns the error of a connection that the peer, or another thread here, has ended.
fn lost(error: Errno) -> HostError {
    match error {
        Errno::CONNRESET | Errno::PIPE => HostError::Closed(None),
        error => io::Error::from(error).into(),
    }
}

fn at(error: HostError, what: &'static str) -> HostError {
    match error {
        HostError::Closed(None) => HostError::Closed(Some(what)),
        error => error,
    }
}
