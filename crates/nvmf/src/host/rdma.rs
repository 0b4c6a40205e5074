//! NVMe/RDMA: the host's side of a connection, as a state machine without I/O.
//!
//! A command whose data do not go in its capsule ([`Connection::needs_memory`]) has memory that the driver has registered, with the data to
//! be sent in it. The driver passes both ([`Connection::submit`]), sends capsules ([`Connection::next_capsule`]), and passes responses
//! ([`Connection::handle_response`]), which make the memory of their command free. All that a target sends is checked: what does not fit ends the
//! connection, with an [`End`] that says what it was.

use std::collections::VecDeque;
use std::time::Instant;

use rdmux_wire::RKey;
use rdmux_wire::nvme::{CQE_LEN, Cqe, Opcode, SQE_LEN, Sgl};

use super::queue::{Command, Completion, Data, Queue};
use crate::rdma::Remote;

/// Maximum bytes of data in a capsule, whatever the controller takes: capsules have memory of their own.
const IN_CAPSULE_MAX: u32 = 16 << 10;

/// Properties of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Entries of the queue.
    pub entries: u16,
    /// Maximum bytes of data in the capsule of a command that is none of fabrics; 0 on the admin queue.
    pub in_capsule_max: u32,
    /// It is an I/O queue.
    pub is_io: bool,
}

impl Config {
    /// Returns the bytes of the longest capsule.
    pub fn capsule_bytes(&self) -> usize {
        SQE_LEN + self.in_capsule_max.min(IN_CAPSULE_MAX) as usize
    }
}

/// Reason for which a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The target has violated the protocol.
    #[error("the target sent {0}: the connection is over")]
    Violation(&'static str),
}

/// State of a command in flight.
#[derive(Debug, Default)]
struct State {
    /// Its capsule is with the driver.
    is_sent: bool,
    /// Bytes of data in its capsule.
    in_capsule: usize,
}

/// A capsule to be sent, in parts.
pub type Capsule<'a> = [&'a [u8]; 2];

/// The host's side of a connection, which is a queue.
///
/// A target has taken each command that it has completed, and no more commands are in flight than the queue has entries less one: the queue's
/// head in a response (SQHD) allows whatever is free here.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    queue: Queue<State>,
    /// Commands whose capsules are to be sent.
    unsent: VecDeque<u16>,
    done: VecDeque<Completion>,
    end: Option<End>,
}

impl Connection {
    /// Makes the host's side of a connection that a target has accepted.
    pub fn new(config: Config) -> Connection {
        Connection {
            config,
            queue: Queue::new(config.entries),
            unsent: VecDeque::with_capacity(config.entries.into()),
            done: VecDeque::with_capacity(config.entries.into()),
            end: None,
        }
    }

    /// Returns why the connection is over: the driver closes it.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the number of commands that may be submitted now.
    pub fn room(&self) -> usize {
        match self.end {
            None => self.queue.room(),
            Some(_) => 0,
        }
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Returns true if a command was to be done before now.
    pub fn has_expired(&self, now: Instant) -> bool {
        self.queue.has_expired(now)
    }

    /// Takes the commands that are not done, when the connection is over.
    pub fn take_commands(&mut self) -> Vec<Command> {
        self.unsent.clear();
        self.queue.take_all()
    }

    /// Returns the bytes of registered memory that a command needs; 0: its data go in the capsule, or there are none.
    pub fn needs_memory(&self, command: &Command) -> usize {
        match self.in_capsule(command) {
            0 => command.data.len(),
            _ => 0,
        }
    }

    /// Returns true if the memory of a command that receives data is to hold those of its buffer before: of an I/O, the target writes all of it.
    pub fn fills_memory(&self) -> bool {
        !self.config.is_io
    }

    /// Returns the bytes of a command's data in its capsule.
    fn in_capsule(&self, command: &Command) -> usize {
        let most = match command.sqe.opcode() {
            // The controller's capsules may be smaller before it has its properties.
            Opcode::FABRICS => 0,
            _ => self.config.in_capsule_max.min(IN_CAPSULE_MAX) as usize,
        };
        match command.data {
            Data::Out(length) if length as usize <= most => length as usize,
            _ => 0,
        }
    }

    /// Takes a command, which is to be done before the deadline, if there is one. `memory`: that of its data, if it needs some. Returns the
    /// place of the command, by which its memory is known.
    ///
    /// # Panics
    /// There is no [room](Connection::room), or the buffer is shorter than the data, or memory that it needs is missing.
    pub fn submit(&mut self, mut command: Command, deadline: Option<Instant>, memory: Option<Remote>) -> u16 {
        assert!(self.room() > 0, "the caller has looked at the room");
        let length = command.data.len() as u32;
        let in_capsule = self.in_capsule(&command);
        command.sqe.set_sgl(match memory {
            _ if in_capsule > 0 => Sgl::InCapsule { offset: 0, length },
            Some(Remote { address, rkey }) => Sgl::Keyed {
                address,
                length,
                rkey,
                // The key stays for the next command.
                invalidate: false,
            },
            None => {
                assert!(length == 0, "the command needs memory");
                Sgl::Keyed {
                    address: 0,
                    length: 0,
                    rkey: RKey(0),
                    invalidate: false,
                }
            }
        });
        let state = State {
            is_sent: false,
            in_capsule,
        };
        let at = self.queue.begin(command, deadline, state);
        self.unsent.push_back(at);
        at
    }

    /// Returns true if [`Connection::next_capsule`] has one.
    pub fn has_capsule(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns the next capsule to be sent.
    pub fn next_capsule(&mut self) -> Option<Capsule<'_>> {
        let at = self.unsent.pop_front()?;
        let in_flight = self.queue.get_mut(at)?;
        in_flight.transport.is_sent = true;
        let (command, state) = (&in_flight.command, &in_flight.transport);
        Some([command.sqe.as_bytes(), &command.buffer[..state.in_capsule]])
    }

    /// Takes a response. `copy` copies the data of the command at a place out of its memory. Returns the place of the command that is done.
    pub fn handle_response(&mut self, bytes: &[u8], copy: impl FnOnce(u16, &mut [u8])) -> Option<u16> {
        if self.end.is_some() {
            return None;
        }
        match self.check(bytes) {
            Ok((at, cqe)) => {
                self.complete(at, &cqe, copy);
                Some(at)
            }
            Err(what) => {
                self.end = Some(End::Violation(what));
                None
            }
        }
    }

    fn check(&self, bytes: &[u8]) -> Result<(u16, Cqe), &'static str> {
        let cqe = match bytes.len() {
            CQE_LEN => Cqe::parse(bytes).map_err(|_| "a response that is none")?,
            _ => return Err("a response of another length than 16 bytes"),
        };
        if cqe.sq_head >= self.config.entries {
            return Err("a head outside of the queue (SQHD)");
        }
        let at = self.queue.find(cqe.cid);
        let at = at.filter(|at| self.queue.get(*at).is_some_and(|found| found.transport.is_sent));
        let at = at.ok_or("a response to no command in flight")?;
        Ok((at, cqe))
    }

    fn complete(&mut self, at: u16, cqe: &Cqe, copy: impl FnOnce(u16, &mut [u8])) {
        let mut received = 0;
        if let Some(in_flight) = self.queue.get_mut(at)
            && let Data::In(length) = in_flight.command.data
            && cqe.status.is_success()
        {
            // No message tells how many bytes the target has written: all of them, if it has carried out the command.
            received = length as usize;
            copy(at, &mut in_flight.command.buffer[..received]);
        }
        self.done.extend(self.queue.finish(at, cqe, received));
    }

    /// Returns a command that is done.
    pub fn poll(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Returns true if a command is done.
    pub fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }
}
