//! A connected queue, whatever its transport: runs commands, one at a time or many.

mod rdma;
mod tcp;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::Device;

use super::queue::{Command, Completion};
use super::setup::{Setup, Step};
use super::{HostError, Options, Transport};
pub(super) use rdma::open_device;

/// Longest sleep before deadlines are looked at.
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Token of requests for events, which complete at any time.
pub(super) const EVENT_TOKEN: u64 = u64::MAX;

/// Way to a target.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) address: SocketAddr,
    /// The device, for RDMA.
    pub(super) device: Option<Device>,
}

/// A queue that is to be connected.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueParams {
    pub(super) qid: u16,
    pub(super) entries: u16,
    /// Its controller; of an admin queue 0.
    pub(super) cntlid: u16,
    /// Maximum bytes of data in the capsule of an I/O command.
    pub(super) in_capsule_max: u32,
}

/// A connection of some transport, with its commands.
pub(super) trait Connection: fmt::Debug + Send {
    /// Returns the number of commands that may be submitted now.
    fn room(&self) -> usize;

    /// Returns the number of commands in flight.
    fn in_flight(&self) -> usize;

    /// Returns true if a command was to be done before now.
    fn has_expired(&self, now: Instant) -> bool;

    /// Takes the commands that are not done, when the connection is over.
    fn take_commands(&mut self) -> Vec<Command>;

    /// Takes a command, which the next wait sends. It is to be done before the deadline, if there is one.
    fn submit(&mut self, command: Command, deadline: Option<Instant>);

    /// Returns true if a command is done.
    fn has_completions(&self) -> bool;

    /// Returns a command that is done.
    fn poll(&mut self) -> Option<Completion>;

    /// Sends what was submitted, and sleeps until the target has sent something or so long, at most a tick.
    fn wait(&mut self, longest: Duration) -> Result<(), HostError>;

    /// Ends the connection: the target learns that at once.
    fn end(&mut self);

    /// Returns a handle by which another thread ends the waits on this connection.
    fn breaker(&self) -> Result<Box<dyn Breaker>, HostError>;
}

/// Ends the waits on a connection, which fail then.
pub(super) trait Breaker: fmt::Debug + Send + Sync {
    fn break_off(&self);
}

/// A connection, which is a queue.
#[derive(Debug)]
pub(super) struct Link {
    connection: Box<dyn Connection>,
    breaker: Arc<dyn Breaker>,
    /// Completions of requests for events.
    pub(super) events: Vec<Completion>,
}

impl Link {
    /// Connects.
    pub(super) fn open(options: &Options, route: &Route, queue: &QueueParams) -> Result<Link, HostError> {
        let connection: Box<dyn Connection> = match options.transport {
            Transport::Tcp => Box::new(tcp::Link::open(options, route.address, queue)?),
            Transport::Rdma => Box::new(rdma::Link::open(options, route, queue)?),
        };
        Ok(Link {
            breaker: connection.breaker()?.into(),
            connection,
            events: Vec::new(),
        })
    }

    /// Returns a handle by which another thread ends the waits on this connection.
    pub(super) fn breaker(&self) -> &Arc<dyn Breaker> {
        &self.breaker
    }

    /// Returns the connection.
    pub(super) fn connection(&self) -> &dyn Connection {
        &*self.connection
    }

    /// Returns the connection.
    pub(super) fn connection_mut(&mut self) -> &mut dyn Connection {
        &mut *self.connection
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
            self.connection.wait(TICK).map_err(|error| at(error, what))?;
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

fn at(error: HostError, what: &'static str) -> HostError {
    match error {
        HostError::Closed(None) => HostError::Closed(Some(what)),
        error => error,
    }
}
