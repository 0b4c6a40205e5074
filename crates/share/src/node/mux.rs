//! Connections of many applications on one queue pair of the node, which ends at one of the peer's node.
//!
//! A pure state machine: no I/O, no clock. [`Mux`] is one end of a shared queue pair. A scheduler decides whose request is next, and into which
//! pieces it is cut: it asks whether a piece may be sent ([`Mux::admit`]) and then has it sent ([`Mux::send`]). The driver posts what that
//! returns, in that order. It gives the state machine what comes in ([`Mux::handle_message`]), and the ends of what was posted
//! ([`Mux::handle_completion`]); after each of these calls, it posts all of [`Mux::poll_message`], and takes all of [`Mux::poll_event`]. The
//! formats are those of [`rdmux_wire::node::mux`].
//!
//! A program notices nothing of it: order, lengths, immediate data and errors are those of a queue pair of its own. What an application asks
//! for is checked before it reaches the shared queue pair ([`keys`]), which no application can make fail. Two things differ. A SEND has
//! completed when the peer's node has the message, even if the receive's memory is deregistered just then. And a connection whose peer's
//! queue pair is gone fails at once, not after some retries.
//!
//! A connection ends on both sides by one [`Kind::Fail`] from each. Behind it, nothing of the connection comes from there any more: who has
//! received it knows that the peer's requests do not reach the memory of an application any more. A region that goes alone is
//! [withdrawn](withdrawals).

pub(in crate::node) mod flight;
pub(in crate::node) mod keys;
pub(in crate::node) mod receiver;
pub(in crate::node) mod recovery;
pub(in crate::node) mod sender;
pub(in crate::node) mod slots;
#[cfg(test)]
mod tests;
mod withdrawals;

use std::collections::{HashMap, HashSet, VecDeque};

use rdmux_rnic::{
    Access, Operation, PostError, Qpn, RKey, RecvRequest, SendFlags, SendRequest, SgeList, Status, WcOpcode,
    WorkCompletion,
};
use rdmux_wire::node::CompletionStatus;
use rdmux_wire::node::mux::{BODY_LEN_MAX, Extra, HEADER_LEN, Header, Kind, Receive};
use rdmux_wire::{LKey, Malformed};

use flight::{Flight, Piece, Progress, Request};
use keys::Keys;
use receiver::{CopyTo, Receiver};
use sender::{Sender, Stop, Wait};
use slots::Slots;
use withdrawals::Withdrawals;

/// Messages that are kept for connections which are not bound yet: the peer may be a little ahead.
const EARLY_MAX: usize = 256;
/// Failures that wait for a slot on behalf of connections that do not exist; the peer learns of no more at once.
const STRAY_MAX: usize = 1024;

/// The peer's node does not keep to the protocol. The shared queue pair ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's node sent {0}")]
pub(in crate::node) struct Violation(pub(in crate::node) &'static str);

impl From<Malformed> for Violation {
    fn from(_: Malformed) -> Violation {
        Violation("a malformed message")
    }
}

/// Names a connection of a [`Mux`]. A name is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::node) struct ConnectionId {
    index: u32,
    generation: u32,
}

/// Properties of a connection on which two nodes have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) struct Bound {
    /// QPN of the own application.
    pub(in crate::node) own: Qpn,
    /// QPN of the peer's.
    pub(in crate::node) peer: Qpn,
    /// Protection domain of the own queue pair, among those of the node.
    pub(in crate::node) domain: u64,
    /// Protection domain of the peer's, among those of its node.
    pub(in crate::node) peer_domain: u64,
    /// Accesses that the peer's queue pair allows.
    pub(in crate::node) peer_access: Access,
    /// Set if the application allows that a WRITE takes effect twice, where nobody can know if it has.
    pub(in crate::node) replays_writes: bool,
}

/// A request for the shared queue pair, with its number.
#[derive(Debug)]
pub(in crate::node) struct Post {
    /// Its `wr_id`.
    pub(in crate::node) number: u64,
    /// The request.
    pub(in crate::node) request: Posted,
}

/// A request of the shared queue pair. Keys are those of the domain of such queue pairs.
#[derive(Debug)]
pub(in crate::node) enum Posted {
    /// An operation on an application's memory.
    Direct(Operation, SgeList),
    /// A SEND of a header and a body.
    Message {
        /// The send buffer that has it until it completes.
        buffer: u16,
        /// The header.
        header: [u8; HEADER_LEN],
        /// The body.
        body: SgeList,
    },
}

/// Answer to the question if a piece of a request may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Admission {
    /// A piece of at most so many bytes may be; if the request is not [cut](sender::may_cut), all of it.
    Post(u32),
    /// Not now: [`Event::Wake`] tells when to ask again.
    Wait(Wait),
    /// The request fails with this status, behind those before it. The connection has failed.
    Refuse(Status),
}

/// Requests to post for a piece, in this order; none for one that has nothing to bring to the peer.
#[derive(Debug, Default)]
pub(in crate::node) struct Posts {
    pub(in crate::node) first: Option<Post>,
    pub(in crate::node) then: Option<Post>,
}

/// Why a connection has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Failure {
    /// A request of its own application ([`Admission::Refuse`]), or the application itself ([`Mux::fail`]).
    Own,
    /// A message found no receive that fits.
    Receive(Status),
    /// The peer wanted to access what it must not: [`Status::RemoteAccess`] or [`Status::RemoteInvalidRequest`].
    Access(Status),
    /// The shared queue pair.
    Shared,
}

/// News of a connection.
#[derive(Clone, Debug)]
pub(in crate::node) enum Event {
    /// It may have something to send.
    Wake(ConnectionId),
    /// The piece with this tag has ended with this status.
    Landed(u64, Status),
    /// An atomic operation has found this value, which is to be written to these elements before [`Event::Landed`] is handled. Their keys are those of
    /// shared queue pairs.
    Answer(ConnectionId, SgeList, u64),
    /// Its own request has made the queue pair fail, with a status that says so. [`Event::Failed`] follows, if it has not failed before.
    Culprit(ConnectionId),
    /// A receive has been flushed, or has failed.
    Received(ConnectionId, WorkCompletion),
    /// It has failed: its requests are to be flushed once what is in flight has ended; its receives have been.
    Failed(ConnectionId, Failure),
    /// A use of an own region has ended, after [`Mux::withdraw`].
    Released(RKey),
    /// Both ends have ended: its QPNs may be connected anew.
    Ended(#[cfg_attr(not(test), expect(dead_code, reason = "its owner has left it"))] ConnectionId),
}

/// A message for an application.
#[derive(Debug)]
pub(in crate::node) struct Received {
    /// The connection.
    pub(in crate::node) id: ConnectionId,
    /// Bytes to copy out of the body, before the completion is told.
    pub(in crate::node) copies: Vec<CopyTo>,
    /// The receive's completion.
    pub(in crate::node) completion: WorkCompletion,
    /// Set if it wakes a receiver that waits for such messages alone.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the completions of applications do not tell yet")
    )]
    pub(in crate::node) is_solicited: bool,
}

#[derive(Debug)]
struct Connection {
    bound: Bound,
    sender: Sender,
    receiver: Receiver,
    withdrawals: Withdrawals,
    /// Pieces in flight.
    in_flight: u32,
    waits: Option<Wait>,
    /// The last refill of slots of which it has had one.
    had_slot: Option<u64>,
    /// Set while it is in the queue of those that have something to tell.
    tells: bool,
    failure: Option<Failure>,
    /// Set once the peer is told, or about to be, that nothing comes from here any more.
    has_told: bool,
    /// Set once nothing comes from the peer any more.
    peer_ended: bool,
    /// Set once its owner has left it.
    is_abandoned: bool,
}

#[derive(Debug, Default)]
struct Entry {
    connection: Option<Connection>,
    generation: u32,
}

/// One end of a shared queue pair.
#[derive(Debug)]
pub(in crate::node) struct Mux {
    slots: Slots,
    flight: Flight,
    /// Send buffers that are free.
    buffers: Vec<u16>,
    buffers_reserve: usize,
    entries: Vec<Entry>,
    free: Vec<u32>,
    by_names: HashMap<(Qpn, Qpn), ConnectionId>,
    /// Connections that wait for a slot: first those that have had none since slots last came back, then those that have. Then those that wait
    /// for keys.
    lack_slots: [VecDeque<ConnectionId>; 2],
    lack_keys: Vec<ConnectionId>,
    /// Times that connections which waited for slots have been woken.
    refill: u64,
    /// Failures to tell, connections that have receives or withdrawals to tell.
    failures: VecDeque<Header>,
    /// Messages of connections that are not bound, and those of connections that have been bound since.
    early: VecDeque<Vec<u8>>,
    due: VecDeque<Vec<u8>>,
    tellers: VecDeque<ConnectionId>,
    /// Own regions that go once the pieces before these numbers have ended, in this order.
    leaving: VecDeque<(u64, RKey)>,
    events: VecDeque<Event>,
    /// Set once it is over for all connections.
    has_failed: bool,
    /// Set while there is no queue pair to which anything may be posted.
    is_stopped: bool,
    /// Set while it is stopped so that what is in flight comes to an end.
    is_held: bool,
    /// Set if a connection has something to send meanwhile.
    is_wanted: bool,
    /// Messages posted to this queue pair, and those that have come over it, modulo 2^32.
    messages_sent: u32,
    messages_handled: u32,
    /// Failures of queue pairs in a row that have found the same number of pieces completed, and that number.
    barren: (u32, u64),
}

impl Mux {
    /// Returns the send buffers that a queue pair with so many slots needs, each of [`rdmux_wire::node::mux::SLOT_LEN`] bytes.
    pub(in crate::node) fn buffers_of(slots: u16) -> u16 {
        2 * slots
    }

    /// Returns the end of a queue pair without connections. Each node receives into `slots` slots.
    ///
    /// # Panics
    /// If there are fewer than 8 slots, or more than 2^14.
    pub(in crate::node) fn new(slots: u16) -> Mux {
        assert!(slots <= 1 << 14, "{slots} slots");
        Mux {
            slots: Slots::new(slots.into()),
            flight: Flight::default(),
            buffers: (0..Mux::buffers_of(slots)).rev().collect(),
            buffers_reserve: usize::from(slots) / 2,
            entries: Vec::new(),
            free: Vec::new(),
            by_names: HashMap::new(),
            lack_slots: [VecDeque::new(), VecDeque::new()],
            refill: 0,
            lack_keys: Vec::new(),
            failures: VecDeque::new(),
            early: VecDeque::new(),
            due: VecDeque::new(),
            tellers: VecDeque::new(),
            leaving: VecDeque::new(),
            events: VecDeque::new(),
            has_failed: false,
            is_stopped: false,
            is_held: false,
            is_wanted: false,
            messages_sent: 0,
            messages_handled: 0,
            barren: (0, 0),
        }
    }

    /// Adds a connection, with the receives that its application has posted.
    ///
    /// # Errors
    /// The receives: one of the same QPNs has not ended yet, or the queue pair has failed.
    pub(in crate::node) fn bind(
        &mut self,
        bound: Bound,
        receiver: Receiver,
    ) -> Result<ConnectionId, Receiver> {
        let names = (bound.own, bound.peer);
        if self.by_names.contains_key(&names) || self.has_failed {
            return Err(receiver);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() as u32 - 1
        });
        let entry = &mut self.entries[index as usize];
        entry.connection = Some(Connection {
            bound,
            sender: Sender::default(),
            receiver,
            withdrawals: Withdrawals::default(),
            in_flight: 0,
            waits: None,
            had_slot: None,
            tells: false,
            failure: None,
            has_told: false,
            peer_ended: false,
            is_abandoned: false,
        });
        let id = ConnectionId {
            index,
            generation: entry.generation,
        };
        self.by_names.insert(names, id);
        self.has_something_to_tell(id);
        for message in std::mem::take(&mut self.early) {
            let is_its =
                Header::parse(&message).is_ok_and(|(header, _)| (header.destination, header.source) == names);
            match is_its {
                true => self.due.push_back(message),
                false => self.early.push_back(message),
            }
        }
        Ok(id)
    }

    /// Returns the number of connections.
    pub(in crate::node) fn connections(&self) -> usize {
        self.by_names.len()
    }

    /// Begins to end the uses of an own region, as its application deregisters it: what is in flight, and, if `is_written`, what peers may write for
    /// receives of which their nodes know. No further use begins if [`Keys`] does not find the region any more. `own`, `shared`: its keys for
    /// its application, and on shared queue pairs. Returns the number of uses: for each, [`Event::Released`] has its application's remote key
    /// once it has ended.
    pub(in crate::node) fn withdraw(
        &mut self,
        domain: u64,
        own: (LKey, RKey),
        shared: (LKey, RKey),
        is_written: bool,
    ) -> usize {
        let mut uses = 0;
        if self.flight.uses(shared.0) {
            self.leaving.push_back((self.flight.end(), own.1));
            uses += 1;
        }
        let ids: Vec<_> = match is_written {
            true => self.by_names.values().copied().collect(),
            false => Vec::new(),
        };
        for id in ids {
            if let Some(connection) = self.connection(id)
                && connection.bound.domain == domain
                && connection.may_be_written(own.0)
            {
                connection.withdrawals.add(own.1, shared.1);
                uses += 1;
                self.has_something_to_tell(id);
            }
        }
        uses
    }

    /// Ends what waits for the uses of a region, after [`Mux::withdraw`], though they have not ended.
    pub(in crate::node) fn release(&mut self, region: RKey) {
        let before = self.leaving.len();
        self.leaving.retain(|(_, leaves)| *leaves != region);
        let mut uses = before - self.leaving.len();
        let connections = self
            .entries
            .iter_mut()
            .filter_map(|entry| entry.connection.as_mut());
        for connection in connections {
            uses += usize::from(connection.withdrawals.release(region));
        }
        self.events
            .extend(std::iter::repeat_n(Event::Released(region), uses));
    }

    /// Returns the number of the next piece. Once [`Mux::completed`] is not below it, everything that was posted before has ended.
    pub(in crate::node) fn posted(&self) -> u64 {
        self.flight.end()
    }

    /// Returns the number of the first piece that has not ended.
    pub(in crate::node) fn completed(&self) -> u64 {
        self.flight.completed()
    }

    fn connection(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let entry = self.entries.get_mut(id.index as usize)?;
        (entry.generation == id.generation).then_some(())?;
        entry.connection.as_mut()
    }

    /// Adds a receive of an application. One of a connection that has failed is flushed.
    pub(in crate::node) fn post_recv(
        &mut self,
        id: ConnectionId,
        receive: RecvRequest,
    ) -> Result<(), PostError> {
        let connection = self.connection(id).ok_or(PostError::NoQp)?;
        if connection.failure.is_some() {
            receive.check()?;
            let flushed = flushed(connection.bound.own, receive.wr_id);
            self.completed_receive(id, flushed);
            return Ok(());
        }
        connection.receiver.post(receive)?;
        self.has_something_to_tell(id);
        Ok(())
    }

    fn has_slot(&self) -> bool {
        self.slots.has_for_application() && self.buffers.len() > self.buffers_reserve
    }

    /// Decides about the next piece of the request that is first in a connection's queue, which begins at `offset`.
    pub(in crate::node) fn admit(
        &mut self,
        id: ConnectionId,
        request: &SendRequest,
        offset: u32,
        keys: &mut dyn Keys,
    ) -> Admission {
        let (has_slot, refill, is_stopped) = (self.has_slot(), self.refill, self.is_stopped);
        let Some(connection) = self.connection(id).filter(|it| it.failure.is_none()) else {
            return Admission::Wait(Wait::Failed);
        };
        connection.waits = None;
        if is_stopped {
            connection.waits = Some(Wait::Shared);
            self.is_wanted = true;
            return Admission::Wait(Wait::Shared);
        }
        let had_slot = connection.had_slot == Some(refill);
        let bound = connection.bound;
        let admitted = match connection.peer_ended {
            true => Err(sender::refuse(Status::RetryExceeded)),
            false => connection.sender.admit(&bound, request, offset, has_slot, keys),
        };
        match admitted {
            Ok(bytes) => Admission::Post(bytes),
            Err(Stop::Refuse(status, told)) => {
                self.fail_with(id, Failure::Own, told);
                Admission::Refuse(status)
            }
            Err(Stop::Wait(wait)) => {
                connection.waits = Some(wait);
                match wait {
                    Wait::Slot => self.lack_slots[usize::from(had_slot)].push_back(id),
                    Wait::Key => self.lack_keys.push(id),
                    Wait::Receive | Wait::Fence | Wait::Shared | Wait::Failed => {}
                }
                Admission::Wait(wait)
            }
        }
    }

    /// Sends a piece that has just been admitted: `length` bytes at `offset`, the last ones if `is_last`. [`Event::Landed`] names its `tag`.
    ///
    /// # Errors
    /// The status with which the request fails: the piece is not what was admitted. The connection has failed.
    pub(in crate::node) fn send(
        &mut self,
        id: ConnectionId,
        request: &SendRequest,
        (offset, length): (u32, u32),
        is_last: bool,
        tag: u64,
        keys: &mut dyn Keys,
    ) -> Result<Posts, Status> {
        let Some(connection) = self.connection(id).filter(|it| it.failure.is_none()) else {
            return Err(Status::Flushed);
        };
        let bound = connection.bound;
        let cut = connection
            .sender
            .cut(&bound, request, (offset, length), is_last, keys);
        let cut = match cut {
            Ok(cut) => cut,
            Err(stop) => {
                let (status, told) = match stop {
                    Stop::Refuse(status, told) => (status, told),
                    Stop::Wait(_) => (Status::LocalQpOperation, CompletionStatus::RetryExceeded),
                };
                self.fail_with(id, Failure::Own, told);
                return Err(status);
            }
        };
        if cut.message.is_some() && !self.has_slot() {
            self.fail_with(id, Failure::Own, CompletionStatus::RetryExceeded);
            return Err(Status::LocalQpOperation);
        }
        let mut posts = Posts::default();
        let mut piece = Piece::of_node();
        piece.connection = Some(id);
        let has_direct = cut.direct.is_some();
        if let Some((operation, list)) = cut.direct {
            self.takes_off(id, request.operation.takes_answer());
            let number = self.flight.push(Piece {
                request: Request::Direct(operation, list),
                is_fenced: request.operation.takes_answer(),
                has_message: sender::takes_receive(&request.operation),
                tag: cut.message.is_none().then_some(tag),
                ..piece
            });
            piece = Piece::of_node();
            piece.connection = Some(id);
            posts.first = self.launch(number);
        }
        piece.tag = Some(tag);
        match cut.message {
            Some(message) => {
                self.takes_off(id, false);
                let refill = self.refill;
                if let Some(connection) = self.connection(id) {
                    connection.had_slot = Some(refill);
                }
                let header = Header {
                    kind: message.kind,
                    is_solicited: request.flags.contains(SendFlags::SOLICITED),
                    destination: bound.peer,
                    source: bound.own,
                    sequence: message.sequence,
                    length: message.length,
                    extra: message.extra,
                    emptied: 0,
                };
                let post = self.message(piece, header, message.body);
                match posts.first {
                    None => posts.first = post,
                    Some(_) => posts.then = post,
                }
            }
            None if !has_direct => {
                self.takes_off(id, false);
                piece.progress = Progress::Over(Status::Success);
                self.flight.push(piece);
                self.settle();
            }
            None => {}
        }
        Ok(posts)
    }

    /// Counts something of a connection as in flight.
    fn takes_off(&mut self, id: ConnectionId, is_fenced: bool) {
        if let Some(connection) = self.connection(id) {
            connection.in_flight += 1;
            connection.sender.fenced += u32::from(is_fenced);
        }
    }

    /// Puts a connection in error on its application's behalf: what is in flight ends, receives are flushed, and the peer is told.
    pub(in crate::node) fn fail(&mut self, id: ConnectionId) {
        self.fail_with(id, Failure::Own, CompletionStatus::RetryExceeded);
    }

    /// Leaves a connection to itself: its owner hears nothing of it any more but [`Event::Landed`] and
    /// [`Event::Ended`].
    pub(in crate::node) fn abandon(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connection(id) {
            connection.is_abandoned = true;
            self.fail(id);
            self.try_end(id);
        }
    }

    /// Tells that keys have been answered: connections that waited for them have a further step.
    pub(in crate::node) fn keys_answered(&mut self) {
        for id in std::mem::take(&mut self.lack_keys) {
            self.wake(id, Wait::Key);
        }
    }

    /// Returns the next message of the nodes themselves.
    pub(in crate::node) fn poll_message(&mut self, keys: &mut dyn Keys) -> Option<Post> {
        if self.has_failed || self.is_stopped || self.buffers.is_empty() {
            return None;
        }
        if self.slots.has_for_node() {
            if let Some(header) = self.failures.pop_front() {
                return self.message(Piece::of_node(), header, SgeList::EMPTY);
            }
            while let Some(id) = self.tellers.pop_front() {
                let Some(connection) = self.connection(id) else {
                    continue;
                };
                connection.tells = false;
                let is_over = connection.has_told || connection.peer_ended;
                let message = (!is_over).then(|| connection.tell(keys)).flatten();
                self.has_something_to_tell(id);
                if let Some((header, body)) = message {
                    return self.message(Piece::of_node(), header, body);
                }
            }
        }
        if !self.slots.is_due() {
            return None;
        }
        let header = Header {
            kind: Kind::Slots,
            is_solicited: false,
            destination: Qpn::new(0),
            source: Qpn::new(0),
            sequence: 0,
            length: 0,
            extra: Extra::None,
            emptied: 0,
        };
        self.message(Piece::of_node(), header, SgeList::EMPTY)
    }

    /// Returns what happened to a connection.
    pub(in crate::node) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns a message that came before its connection was bound, for [`Mux::handle_early`].
    pub(in crate::node) fn poll_early(&mut self) -> Option<Vec<u8>> {
        self.due.pop_front()
    }

    /// Handles such a message as [`Mux::handle_message`] does.
    ///
    /// # Errors
    /// As there.
    pub(in crate::node) fn handle_early(
        &mut self,
        bytes: &[u8],
        keys: &mut dyn Keys,
    ) -> Result<Option<Received>, Violation> {
        let (header, body) = Header::parse(bytes)?;
        self.handle(header, body, keys)
    }

    /// Handles a message of the peer's node, the bytes of one slot.
    ///
    /// # Errors
    /// The peer's node does not keep to the protocol.
    pub(in crate::node) fn handle_message(
        &mut self,
        bytes: &[u8],
        keys: &mut dyn Keys,
    ) -> Result<Option<Received>, Violation> {
        let (header, body) = Header::parse(bytes)?;
        self.slots.arrived(header.emptied)?;
        self.messages_handled = self.messages_handled.wrapping_add(1);
        self.wake_for_slots();
        if header.kind == Kind::Slots {
            return Ok(None);
        }
        let names = (header.destination, header.source);
        if !self.by_names.contains_key(&names) {
            self.early.push_back(bytes.to_vec());
            if self.early.len() > EARLY_MAX
                && let Some(oldest) = self.early.pop_front()
                && let Ok((header, _)) = Header::parse(&oldest)
            {
                self.answer_stray(&header);
            }
            return Ok(None);
        }
        self.handle(header, body, keys)
    }

    /// Returns whether there are messages of connections that are not bound.
    pub(in crate::node) fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// Answers messages of connections that are not bound, except of those that may yet be: between the own queue pair and the peer's.
    pub(in crate::node) fn answer_strays(&mut self, may_be_bound: impl Fn(Qpn, Qpn) -> bool) {
        for _ in 0..self.early.len() {
            let Some(message) = self.early.pop_front() else {
                return;
            };
            match Header::parse(&message) {
                Ok((header, _)) if !may_be_bound(header.destination, header.source) => {
                    self.answer_stray(&header);
                }
                _ => self.early.push_back(message),
            }
        }
    }

    /// Tells the peer that there is no such connection, and that nothing follows: it waits for that if its own end has ended. An answer is a Fail
    /// with the status Flushed, which has no answer.
    fn answer_stray(&mut self, header: &Header) {
        let is_answer = header.kind == Kind::Fail && header.extra == Extra::Status(CompletionStatus::Flushed);
        if !is_answer && self.failures.len() < self.by_names.len() + STRAY_MAX {
            self.failures.push_back(Header {
                kind: Kind::Fail,
                is_solicited: false,
                destination: header.source,
                source: header.destination,
                sequence: 0,
                length: 0,
                extra: Extra::Status(CompletionStatus::Flushed),
                emptied: 0,
            });
        }
    }

    fn handle(
        &mut self,
        header: Header,
        body: &[u8],
        keys: &mut dyn Keys,
    ) -> Result<Option<Received>, Violation> {
        let names = (header.destination, header.source);
        let Some(id) = self.by_names.get(&names).copied() else {
            return Ok(None);
        };
        let Some(connection) = self.connection(id) else {
            return Ok(None);
        };
        if connection.peer_ended {
            if header.kind == Kind::Fail {
                return Ok(None);
            }
            return Err(Violation("a message of a connection that it has ended"));
        }
        match (header.kind, header.extra) {
            (Kind::Receives, _) => {
                let receives = Receive::parse_all(header.length, body)?;
                connection.sender.add_receives(receives)?;
                self.wake(id, Wait::Receive);
                Ok(None)
            }
            (Kind::Fail, Extra::Status(status)) => {
                self.peer_failed(id, status);
                Ok(None)
            }
            (Kind::Withdraw, Extra::Withdraw(key)) => {
                connection.sender.withdraw(key);
                connection.withdrawals.carried_out();
                self.has_something_to_tell(id);
                Ok(None)
            }
            (Kind::Withdrawn, Extra::Withdrawn(count)) => {
                let regions = connection.withdrawals.answered(count)?;
                self.events.extend(regions.into_iter().map(Event::Released));
                Ok(None)
            }
            // It has failed here; the peer does not know yet.
            _ if connection.failure.is_some() => Ok(None),
            _ => {
                let bound = connection.bound;
                let taken = connection.receiver.take(bound.own, &header, bound.domain, keys)?;
                let status = taken.completion.status;
                self.has_something_to_tell(id);
                if status != Status::Success {
                    self.fail_with(id, Failure::Receive(status), CompletionStatus::RetryExceeded);
                }
                Ok(Some(Received {
                    id,
                    copies: taken.copies,
                    completion: taken.completion,
                    is_solicited: taken.is_solicited,
                }))
            }
        }
    }

    /// Handles the end of a piece. Those before it have succeeded. One that is not in flight is ignored. After one that has failed, the queue
    /// pair is to be ended: nothing is posted any more, and what comes back waits for [`Mux::carry_over`].
    pub(in crate::node) fn handle_completion(&mut self, number: u64, status: Status) {
        let found = self.flight.get_mut(number);
        let Some(piece) = found.filter(|piece| piece.progress == Progress::Posted) else {
            return;
        };
        if status != Status::Success {
            (self.is_stopped, self.is_held) = (true, false);
        }
        if self.is_stopped && !self.is_held {
            piece.progress = Progress::Back(status);
            return;
        }
        while self.flight.completed() <= number
            && let Some(piece) = self.flight.pop()
        {
            let status = match piece.progress {
                Progress::Over(status) => status,
                _ => Status::Success,
            };
            self.end_piece(piece, status);
        }
        self.settle();
        self.wake_for_slots();
    }

    /// Ends what only waited for pieces before it.
    fn settle(&mut self) {
        while let Some((piece, status)) = self.flight.pop_over() {
            self.end_piece(piece, status);
        }
        while let Some((end, region)) = self.leaving.front().copied()
            && end <= self.flight.completed()
        {
            self.leaving.pop_front();
            self.events.push_back(Event::Released(region));
        }
    }

    fn end_piece(&mut self, piece: Piece, status: Status) {
        if let Request::Message(buffer, ..) = piece.request {
            self.buffers.push(buffer);
        }
        let Some(id) = piece.connection else { return };
        let Some(connection) = self.connection(id) else {
            return;
        };
        connection.in_flight -= 1;
        let mut runs_free = false;
        if piece.is_fenced {
            connection.sender.fenced -= 1;
            runs_free = connection.sender.fenced == 0;
        }
        if let Some(tag) = piece.tag {
            self.events.push_back(Event::Landed(tag, status));
        }
        if runs_free {
            self.wake(id, Wait::Fence);
        }
        self.try_end(id);
    }

    /// Makes a message, for which there is a slot. Returns `None` if there is no send buffer.
    fn message(&mut self, mut piece: Piece, header: Header, body: SgeList) -> Option<Post> {
        piece.request = Request::Message(self.buffers.pop()?, header, body);
        let number = self.flight.push(piece);
        self.launch(number)
    }

    /// Returns the request of a piece, to be posted now; `None` as long as nothing may be posted.
    fn launch(&mut self, number: u64) -> Option<Post> {
        let piece = self.flight.get_mut(number).filter(|_| !self.is_stopped)?;
        piece.progress = Progress::Posted;
        piece.ordinal = self.messages_sent;
        let request = match &piece.request {
            Request::Nothing => return None,
            Request::Direct(operation, list) => Posted::Direct(operation.clone(), list.clone()),
            Request::Message(buffer, header, body) => {
                self.messages_sent = self.messages_sent.wrapping_add(1);
                let header = Header {
                    emptied: self.slots.take(),
                    ..*header
                };
                let mut bytes = [0; HEADER_LEN];
                header.emit(&mut bytes);
                Posted::Message {
                    buffer: *buffer,
                    header: bytes,
                    body: body.clone(),
                }
            }
        };
        Some(Post { number, request })
    }

    /// Has a connection wait for its turn to tell of receives and withdrawals, if it has any to tell.
    fn has_something_to_tell(&mut self, id: ConnectionId) {
        let Some(connection) = self.connection(id) else {
            return;
        };
        let open = connection.failure.is_none() && !connection.peer_ended;
        let has_news = connection.receiver.has_news() || connection.withdrawals.has_news();
        if open && !connection.tells && has_news {
            connection.tells = true;
            self.tellers.push_back(id);
        }
    }

    fn wake(&mut self, id: ConnectionId, from: Wait) {
        if let Some(connection) = self.connection(id).filter(|it| it.waits == Some(from)) {
            connection.waits = None;
            self.events.push_back(Event::Wake(id));
        }
    }

    fn wake_for_slots(&mut self) {
        if self.has_slot() {
            self.refill += 1;
            for had in 0..2 {
                while let Some(id) = self.lack_slots[had].pop_front() {
                    self.wake(id, Wait::Slot);
                }
            }
        }
    }

    /// Puts a connection in error, and tells the peer.
    fn fail_with(&mut self, id: ConnectionId, failure: Failure, told: CompletionStatus) {
        let Some(connection) = self.connection(id) else {
            return;
        };
        if connection.failure.is_some() {
            return;
        }
        connection.failure = Some(failure);
        connection.waits = None;
        let own = connection.bound.own;
        let mut receives = Vec::new();
        while let Some(receive) = connection.receiver.pop() {
            receives.push(flushed(own, receive.wr_id));
        }
        for completion in receives {
            self.completed_receive(id, completion);
        }
        self.tell_failure(id, told);
        if self.connection(id).is_some_and(|it| !it.is_abandoned) {
            self.events.push_back(Event::Failed(id, failure));
        }
    }

    fn completed_receive(&mut self, id: ConnectionId, completion: WorkCompletion) {
        if self.connection(id).is_some_and(|it| !it.is_abandoned) {
            self.events.push_back(Event::Received(id, completion));
        }
    }

    fn tell_failure(&mut self, id: ConnectionId, status: CompletionStatus) {
        let has_failed = self.has_failed;
        let Some(connection) = self.connection(id).filter(|it| !it.has_told) else {
            return;
        };
        connection.has_told = true;
        let header = Header {
            sequence: connection.sender.sequence(),
            extra: Extra::Status(status),
            ..header_of(Kind::Fail, &connection.bound)
        };
        if !has_failed {
            self.failures.push_back(header);
        }
    }

    fn peer_failed(&mut self, id: ConnectionId, status: CompletionStatus) {
        let Some(connection) = self.connection(id) else {
            return;
        };
        let released = connection.peer_ends();
        self.events.extend(released);
        let Some(connection) = self.connection(id) else {
            return;
        };
        let has_failed = connection.failure.is_some();
        let own = connection.bound.own;
        let failure = match status {
            _ if has_failed => None,
            CompletionStatus::LocalLength => Some(Failure::Receive(Status::LocalLength)),
            CompletionStatus::LocalProtection => Some(Failure::Receive(Status::LocalProtection)),
            CompletionStatus::RemoteAccess => Some(Failure::Access(Status::RemoteAccess)),
            CompletionStatus::RemoteInvalidRequest => Some(Failure::Access(Status::RemoteInvalidRequest)),
            _ => None,
        };
        if let Some(Failure::Receive(status)) = failure
            && let Some(receive) = connection.receiver.pop()
        {
            let completion = WorkCompletion {
                status,
                ..flushed(own, receive.wr_id)
            };
            self.completed_receive(id, completion);
        }
        if let Some(failure) = failure {
            self.fail_with(id, failure, CompletionStatus::RetryExceeded);
        }
        // The event that it waits for does not come any more.
        if let Some(connection) = self.connection(id)
            && connection.waits.take().is_some()
        {
            self.events.push_back(Event::Wake(id));
        }
        self.tell_failure(id, CompletionStatus::RetryExceeded);
        self.try_end(id);
    }

    /// Ends all connections, because the peer's node has gone, does not keep to the protocol, or has no queue pair any more.
    pub(in crate::node) fn close(&mut self) {
        self.has_failed = true;
        let mut failed = HashSet::new();
        while let Some(piece) = self.flight.pop() {
            let known = match piece.progress {
                Progress::Over(status) | Progress::Back(status @ Status::Success) => status,
                _ => Status::RetryExceeded,
            };
            let status = match piece.tag.is_some() && failed.contains(&piece.connection) {
                true => Status::Flushed,
                false => known,
            };
            if status != Status::Success && piece.tag.is_some() {
                failed.insert(piece.connection);
            }
            self.end_piece(piece, status);
        }
        self.settle();
        let ids: Vec<_> = self.by_names.values().copied().collect();
        for id in ids {
            if let Some(connection) = self.connection(id) {
                connection.has_told = true;
                let released = connection.peer_ends();
                self.events.extend(released);
            }
            self.fail_with(id, Failure::Shared, CompletionStatus::RetryExceeded);
            self.try_end(id);
        }
        self.failures.clear();
    }

    /// Removes a connection that its owner has left, once both ends have ended and nothing is in flight.
    fn try_end(&mut self, id: ConnectionId) {
        let Some(connection) = self.connection(id) else {
            return;
        };
        let ended = connection.is_abandoned && connection.has_told && connection.peer_ended;
        if !ended || connection.in_flight > 0 {
            return;
        }
        let bound = connection.bound;
        self.by_names.remove(&(bound.own, bound.peer));
        let entry = &mut self.entries[id.index as usize];
        entry.connection = None;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(id.index);
        self.events.push_back(Event::Ended(id));
    }
}

impl Connection {
    /// Returns whether the peer may yet write into the own region of a key. Nobody knows which receives one had that has failed.
    fn may_be_written(&self, lkey: LKey) -> bool {
        !self.peer_ended && (self.failure.is_some() || self.receiver.has_told(lkey))
    }

    /// Returns what is to be told next, with its body.
    fn tell(&mut self, keys: &mut dyn Keys) -> Option<(Header, SgeList)> {
        if let Some((kind, extra)) = self.withdrawals.tell() {
            let header = Header {
                extra,
                ..header_of(kind, &self.bound)
            };
            return Some((header, SgeList::EMPTY));
        }
        let receives = self.receiver.tell(self.bound.domain, keys, BODY_LEN_MAX);
        let mut body = Vec::new();
        receives.iter().for_each(|receive| receive.emit(&mut body));
        let header = Header {
            length: receives.len() as u32,
            ..header_of(Kind::Receives, &self.bound)
        };
        (!receives.is_empty()).then(|| (header, SgeList::inline(&body)))
    }

    /// Takes note that nothing comes from the peer any more. Returns the events that follow for own regions.
    fn peer_ends(&mut self) -> impl Iterator<Item = Event> + use<> {
        self.peer_ended = true;
        self.withdrawals.end().into_iter().map(Event::Released)
    }
}

impl Piece {
    /// A message of the nodes themselves.
    fn of_node() -> Piece {
        Piece {
            connection: None,
            request: Request::Nothing,
            progress: Progress::Again,
            is_fenced: false,
            has_message: false,
            ordinal: 0,
            tag: None,
        }
    }
}

fn header_of(kind: Kind, bound: &Bound) -> Header {
    Header {
        kind,
        is_solicited: false,
        destination: bound.peer,
        source: bound.own,
        sequence: 0,
        length: 0,
        extra: Extra::None,
        emptied: 0,
    }
}

/// Returns the completion of a receive that is flushed.
pub(in crate::node) fn flushed(qpn: Qpn, wr_id: u64) -> WorkCompletion {
    WorkCompletion {
        wr_id,
        status: Status::Flushed,
        opcode: WcOpcode::Recv,
        qpn,
        ..WorkCompletion::default()
    }
}
