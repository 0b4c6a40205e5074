//! The host's side of a queue, whatever the transport: command ids, commands in flight, and the checks of what a controller answers.

use std::time::Instant;

use rdmux_wire::nvme::{Cid, Cqe, Sqe, Status};

/// Maximum number of entries of a queue.
pub const ENTRIES_MAX: u16 = 1024;
/// Bits of a command id that name a slot; those above it count how often the slot was used, so that a late answer is not taken for another
/// command's.
const SLOT_BITS: u32 = 10;

/// Data of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// So many bytes from the controller at most, at the buffer's beginning.
    In(u32),
    /// So many bytes to the controller, from the buffer's beginning.
    Out(u32),
}

impl Data {
    /// Returns the number of bytes.
    pub const fn len(self) -> usize {
        match self {
            Data::None => 0,
            Data::In(len) | Data::Out(len) => len as usize,
        }
    }

    /// Returns true if there are none.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// A command. The queue chooses its id, and its transport where its data are.
#[derive(Debug)]
pub struct Command {
    /// The command.
    pub sqe: Sqe,
    /// Its data.
    pub data: Data,
    /// At least as long as the data; comes back with the completion.
    pub buffer: Vec<u8>,
    /// Chosen by the caller, and comes back with the completion.
    pub token: u64,
    /// Times that it was sent before.
    pub tries: u8,
}

impl Command {
    /// Returns a command without data.
    pub fn new(sqe: Sqe) -> Command {
        Command {
            sqe,
            data: Data::None,
            buffer: Vec::new(),
            token: 0,
            tries: 0,
        }
    }

    /// Returns a command that receives at most so many bytes.
    pub fn receiving(sqe: Sqe, len: u32) -> Command {
        Command {
            data: Data::In(len),
            buffer: vec![0; len as usize],
            ..Command::new(sqe)
        }
    }

    /// Returns a command that sends these bytes.
    pub fn sending(sqe: Sqe, bytes: Vec<u8>) -> Command {
        Command {
            data: Data::Out(bytes.len() as u32),
            buffer: bytes,
            ..Command::new(sqe)
        }
    }
}

/// A command that is done.
#[derive(Debug)]
pub struct Completion {
    /// The command, as it was given to the queue.
    pub command: Command,
    /// Its status.
    pub status: Status,
    /// Its result.
    pub result: u64,
    /// Bytes that were received.
    pub received: usize,
}

impl Completion {
    /// Returns the bytes that were received.
    pub fn bytes(&self) -> &[u8] {
        &self.command.buffer[..self.received]
    }
}

/// A command in flight, with what its transport knows about it.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    pub(crate) command: Command,
    /// It has to be done before this time.
    deadline: Option<Instant>,
    pub(crate) transport: T,
}

#[derive(Debug)]
struct Slot<T> {
    /// Its next command id.
    cid: u16,
    in_flight: Option<InFlight<T>>,
}

/// Commands in flight of a queue.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u16>,
}

impl<T> Queue<T> {
    /// Makes a queue of at most [`ENTRIES_MAX`] entries. One of them stays free, so that a full queue is not taken for an empty one.
    pub(crate) fn new(entries: u16) -> Queue<T> {
        let commands = entries.clamp(2, ENTRIES_MAX) - 1;
        let slot = |cid| Slot { cid, in_flight: None };
        Queue {
            slots: (0..commands).map(slot).collect(),
            free: (0..commands).rev().collect(),
        }
    }

    /// Returns the number of commands that may be submitted now.
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of commands in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Gives a command its id, and returns its slot.
    ///
    /// # Panics
    /// There is no room, or the buffer is shorter than the data.
    pub(crate) fn begin(&mut self, mut command: Command, deadline: Option<Instant>, transport: T) -> u16 {
        assert!(
            command.data.len() <= command.buffer.len(),
            "a command's buffer holds its data"
        );
        let at = self.free.pop().expect("the caller has looked at the room");
        let slot = &mut self.slots[usize::from(at)];
        command.sqe.set_cid(Cid(slot.cid));
        slot.in_flight = Some(InFlight {
            command,
            deadline,
            transport,
        });
        at
    }

    /// Returns the slot of the command in flight that has this id.
    pub(crate) fn find(&self, cid: Cid) -> Option<u16> {
        let at = cid.0 & ((1 << SLOT_BITS) - 1);
        let slot = self.slots.get(usize::from(at))?;
        (slot.cid == cid.0 && slot.in_flight.is_some()).then_some(at)
    }

    /// Returns the command of a slot.
    pub(crate) fn get(&self, at: u16) -> Option<&InFlight<T>> {
        self.slots.get(usize::from(at))?.in_flight.as_ref()
    }

    /// Returns the command of a slot.
    pub(crate) fn get_mut(&mut self, at: u16) -> Option<&mut InFlight<T>> {
        self.slots.get_mut(usize::from(at))?.in_flight.as_mut()
    }

    /// Frees a slot, and returns its completion.
    pub(crate) fn finish(&mut self, at: u16, cqe: &Cqe, received: usize) -> Option<Completion> {
        let slot = self.slots.get_mut(usize::from(at))?;
        let InFlight { command, .. } = slot.in_flight.take()?;
        slot.cid = slot.cid.wrapping_add(1 << SLOT_BITS);
        self.free.push(at);
        Some(Completion {
            command,
            status: cqe.status,
            result: cqe.result,
            received,
        })
    }

    /// Returns true if a command was to be done before now.
    pub(crate) fn has_expired(&self, now: Instant) -> bool {
        let mut in_flight = self.slots.iter().filter_map(|slot| slot.in_flight.as_ref());
        in_flight.any(|command| command.deadline.is_some_and(|deadline| deadline <= now))
    }

    /// Takes all commands in flight, in the order of their slots.
    pub(crate) fn take_all(&mut self) -> Vec<Command> {
        let taken = self.slots.iter_mut().filter_map(|slot| slot.in_flight.take());
        let commands: Vec<_> = taken.map(|in_flight| in_flight.command).collect();
        self.free = (0..self.slots.len() as u16).rev().collect();
        commands
    }
}
