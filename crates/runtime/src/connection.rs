//! A connection that carries messages, and RDMA operations beside them.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::ledger::{Class, Ledger};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectPair, ConnectParams, Connecting, Connection,
    ConnectionRequest, CreateError, Endpoint, EventQueue, Fault, GetError, Memory, MemoryRegion, Operation,
    PostError, ProtectionDomain, QpAttributes, QpOptions, QpState, QueuePair, RKey, RegisterError, SendFlags,
    SendRequest, SgeList, Status, WorkCompletion,
};

use crate::reactor::ConnectionEnd;
use crate::receives::{ReceiveShare, message_of, receive_request};
use crate::work_id::WorkId;

/// At the latest every so many messages, one has a completion, which frees the slots of all messages before it as well. So many slots
/// more than there are unacknowledged messages let a connection go on as if each had a completion.
pub const SIGNAL_EVERY: usize = 8;

/// Memory of so many handled messages waits for the next ones.
const SPARE_MAX: usize = 32;

/// The sizes of a connection's queues, which must fit those that the protocol gives its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the longest message of the peer.
    pub message_bytes: usize,
    /// Bytes of the longest message of this side.
    pub sent_bytes: usize,
    /// Messages of the peer that may arrive before they are handled.
    pub receives: usize,
    /// Slots for answers. Each message takes one when it arrives, and a receive is posted only if its message would get one: a peer
    /// that does not acknowledge answers cannot make this side hold more. Of a peer whose connection shares its receives, up to
    /// `receives` messages wait for slots; one more ends the connection. With 0, messages take none, and the protocol limits them.
    pub answers: usize,
    /// Slots for messages that are no answers.
    pub own: usize,
    /// RDMA operations in flight at a time.
    pub operations: usize,
}

impl Sizes {
    const fn slots(&self) -> usize {
        self.answers + self.own
    }

    /// Returns the number of requests that the send queue holds: beside messages and operations a probe, and those that mark the end
    /// ([`WorkId::End`], [`WorkId::Last`]).
    const fn sends(&self) -> usize {
        self.slots() + self.operations + 3
    }

    /// Returns the number of completions that a connection may have at a time.
    pub const fn completions(&self) -> usize {
        self.receives + self.sends()
    }

    /// Returns sizes none of which is larger than the same of `most`.
    pub(crate) fn within(&self, most: &Sizes) -> Sizes {
        Sizes {
            message_bytes: self.message_bytes.min(most.message_bytes),
            sent_bytes: self.sent_bytes.min(most.sent_bytes),
            receives: self.receives.min(most.receives),
            answers: self.answers.min(most.answers),
            own: self.own.min(most.own),
            operations: self.operations.min(most.operations),
        }
    }
}

/// Where the messages of a connection are received.
#[derive(Debug)]
enum Receives {
    /// In buffers of its own, before those of the slots.
    Own {
        /// Buffers for which no receive is posted until a slot is free.
        idle: Vec<u32>,
    },
    /// In buffers that it shares with other connections.
    Shared {
        share: ReceiveShare,
        /// Messages that wait for a slot for their answer.
        held: VecDeque<Vec<u8>>,
    },
}

/// The buffer that one message is sent from. Those for answers come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendSlot(u32);

impl SendSlot {
    /// Returns the slot with an index.
    pub fn new(index: usize) -> SendSlot {
        SendSlot(index as u32)
    }

    /// Returns its index among the connection's slots.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum EstablishError {
    /// An object could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The buffers could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The queue pair was not connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A receive was not posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// There is no completion queue for it.
    #[error(transparent)]
    Queue(#[from] GetError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a message was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It is longer than [`Sizes::sent_bytes`].
    #[error("the message is too long")]
    TooLong,
    /// The buffer could not be written.
    #[error(transparent)]
    Memory(#[from] Fault),
    /// The queue pair did not accept it.
    #[error(transparent)]
    Post(#[from] PostError),
}

/// Tells what a completion means for the connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Completed {
    /// A message has arrived.
    Message {
        /// The slot for its answer, if messages take one: to be sent, or given back.
        slot: Option<SendSlot>,
        /// The message.
        bytes: Vec<u8>,
    },
    /// The peer's device has acknowledged a message that was sent by [`MessageConnection::send_reported`], or by
    /// [`MessageConnection::send_behind`], which may be the first of several ([`MessageConnection::poll_sent`]). Its slot is the caller's.
    Sent(SendSlot),
    /// The RDMA operation with this number is done.
    Operation(u64),
    /// Nothing that concerns the caller; slots may have become free.
    Nothing,
}

/// A connection that carries messages, and RDMA operations beside them, which take effect at the peer in the order in which both were
/// posted. It does not wait: its owner passes each completion of its queue pair to [`MessageConnection::handle`]. A failure of any
/// request ends the connection. Dropping it ends it at once.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub struct MessageConnection {
    connection: Connection,
    qp: QueuePair,
    buffers_mr: MemoryRegion,
    /// One buffer for each receive of its own, then one for each slot.
    buffers: Arc<AnonymousMemory>,
    sizes: Sizes,
    receives: Receives,
    free_answers: Vec<SendSlot>,
    free_own: Vec<SendSlot>,
    /// Messages without a completion so far, in the order in which they were posted.
    in_flight: VecDeque<Posted>,
    probing: bool,
    /// Reported messages that are acknowledged, of which the caller does not know yet.
    acknowledged: VecDeque<SendSlot>,
    /// Memory of messages that were handled.
    spare: Vec<Vec<u8>>,
    /// Ends behind the queue pair.
    kept: Vec<Box<dyn Any + Send>>,
}

#[derive(Clone, Copy, Debug)]
struct Posted {
    slot: SendSlot,
    signaled: bool,
    reported: bool,
}

/// The objects of a connection before it is established. The receives are posted: the peer may send at once.
#[derive(Debug)]
struct Parts {
    qp: QueuePair,
    buffers_mr: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    sizes: Sizes,
    receives: Receives,
}

impl Parts {
    fn new(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        sizes: &Sizes,
        share: Option<ReceiveShare>,
        ledger: Option<&Arc<Ledger>>,
    ) -> Result<Parts, EstablishError> {
        let own_receives = if share.is_none() { sizes.receives } else { 0 };
        let mut options = QpOptions::new(cq);
        options.max_send_wr = sizes.sends() as u32;
        options.max_recv_wr = own_receives as u32;
        options.srq = share.as_ref().map(|share| share.queue().clone());
        let qp = pd.create_qp(&options)?;
        let buffers_bytes = own_receives * sizes.message_bytes + sizes.slots() * sizes.sent_bytes;
        let buffers = Arc::new(AnonymousMemory::new(buffers_bytes)?);
        // Those that send answer commands.
        let class = match own_receives {
            0 => Class::Completion,
            _ => Class::Command,
        };
        let booked = pd.device().booked(buffers.clone(), ledger, class);
        let buffers_mr = pd.reg_mr_all(booked, 0, Access::LOCAL_WRITE)?;
        qp.init().map_err(ConnectError::Modify)?;
        (0..own_receives as u32)
            .try_for_each(|index| qp.post_recv(receive_request(&buffers_mr, sizes.message_bytes, index)))?;
        Ok(Parts {
            qp,
            buffers_mr,
            buffers,
            sizes: *sizes,
            receives: match share {
                None => Receives::Own { idle: Vec::new() },
                Some(share) => Receives::Shared {
                    share,
                    held: VecDeque::new(),
                },
            },
        })
    }

    fn connected(self, connection: Connection) -> MessageConnection {
        let sizes = self.sizes;
        // The first are taken first: a peer with few messages under way has the memory of few slots touched.
        let slots = |range: std::ops::Range<usize>| range.rev().map(SendSlot::new).collect();
        MessageConnection {
            connection,
            qp: self.qp,
            buffers_mr: self.buffers_mr,
            buffers: self.buffers,
            sizes,
            receives: self.receives,
            free_answers: slots(0..sizes.answers),
            free_own: slots(sizes.answers..sizes.slots()),
            in_flight: VecDeque::new(),
            probing: false,
            acknowledged: VecDeque::new(),
            spare: Vec::new(),
            kept: Vec::new(),
        }
    }
}

/// An attempt to connect, which waits for the listener's answer. Dropping it withdraws the request. An attempt that gets no answer ends by
/// itself.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub struct PendingConnection {
    connecting: Connecting,
    /// `None` once it has given its result.
    parts: Option<Parts>,
}

impl PendingConnection {
    /// Moves the attempt on. Returns the result, once, and `None` before and after that.
    pub fn poll(&mut self) -> Option<Result<MessageConnection, EstablishError>> {
        let result = self.connecting.poll()?;
        let parts = self.parts.take()?;
        Some(match result {
            Ok(connection) => Ok(parts.connected(connection)),
            Err(error) => Err(error.into()),
        })
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`ConnectError::Over`] if [`PendingConnection::poll`] has returned the result.
    pub fn wait(self) -> Result<MessageConnection, EstablishError> {
        let connection = self.connecting.wait()?;
        let parts = self.parts.ok_or(ConnectError::Over)?;
        Ok(parts.connected(connection))
    }

    /// Reports to a queue, under a token, when [`PendingConnection::poll`] may have a result. The connection that comes of the attempt
    /// goes on reporting there.
    pub fn notify(&self, events: &EventQueue, token: u64) {
        self.connecting.notify(events, token);
    }
}

impl MessageConnection {
    /// Starts to connect to a listener, and does not wait for its answer.
    pub fn start(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        peer: SocketAddr,
        params: &ConnectParams,
        sizes: &Sizes,
    ) -> Result<PendingConnection, EstablishError> {
        MessageConnection::start_with(pd, cq, peer, params, sizes, &[])
    }

    /// Does the same, with private data for the listener.
    pub fn start_with(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        peer: SocketAddr,
        params: &ConnectParams,
        sizes: &Sizes,
        private_data: &[u8],
    ) -> Result<PendingConnection, EstablishError> {
        let parts = Parts::new(pd, cq, sizes, None, None)?;
        let pair = ConnectPair::Own(&parts.qp);
        let connecting = pd.device().start_connect(pair, peer, params, private_data)?;
        Ok(PendingConnection {
            connecting,
            parts: Some(parts),
        })
    }

    /// Connects to a listener, and waits for its answer.
    pub fn connect(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        peer: SocketAddr,
        params: &ConnectParams,
        sizes: &Sizes,
    ) -> Result<MessageConnection, EstablishError> {
        MessageConnection::start(pd, cq, peer, params, sizes)?.wait()
    }

    /// Accepts a request. `pd` and `cq` are of the device on which it has arrived.
    pub fn accept(
        request: ConnectionRequest,
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        params: &ConnectParams,
        sizes: &Sizes,
    ) -> Result<MessageConnection, EstablishError> {
        MessageConnection::accept_sharing(request, (pd, cq), params, sizes, (&[], &[]), None, None)
    }

    /// Does the same for a connection that may share its receives. Private data are those of the answer, and those of the rejection if its objects
    /// cannot be made.
    pub(crate) fn accept_sharing(
        request: ConnectionRequest,
        (pd, cq): (&ProtectionDomain, &CompletionQueue),
        params: &ConnectParams,
        sizes: &Sizes,
        (private_data, refusal): (&[u8], &[u8]),
        share: Option<ReceiveShare>,
        ledger: Option<&Arc<Ledger>>,
    ) -> Result<MessageConnection, EstablishError> {
        let parts = match Parts::new(pd, cq, sizes, share, ledger) {
            Ok(parts) => parts,
            Err(error) => {
                request.reject(refusal);
                return Err(error);
            }
        };
        let connection = request.accept(&parts.qp, params, private_data)?;
        Ok(parts.connected(connection))
    }

    /// Returns the queue pair. An owner that moves it to Error by itself gets no event of that.
    pub fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        self.qp.pd()
    }

    /// Returns the peer's address.
    pub fn peer(&self) -> IpAddr {
        self.connection.peer()
    }

    /// Returns the peer's endpoint, as it has shown it.
    pub fn remote(&self) -> Option<&Endpoint> {
        self.connection.remote()
    }

    /// Returns the private data that the peer's user sent with its request or its answer, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        self.connection.private_data()
    }

    /// Takes a slot for a message that is no answer.
    pub fn take_slot(&mut self) -> Option<SendSlot> {
        self.free_own.pop()
    }

    /// Returns whether [`MessageConnection::take_slot`] has a slot.
    pub fn has_slot(&self) -> bool {
        !self.free_own.is_empty()
    }

    /// Sends a message from a slot, which becomes free once the peer's device has acknowledged it.
    pub fn send(&mut self, slot: SendSlot, message: &[u8]) -> Result<(), SendError> {
        self.send_parts(slot, &[message])
    }

    /// Does the same with a message that is in parts.
    pub fn send_parts(&mut self, slot: SendSlot, parts: &[&[u8]]) -> Result<(), SendError> {
        let signaled = self.is_signaled(slot);
        self.post_message(slot, parts, signaled, false)
    }

    /// Returns whether a message is to have a completion. Each wakes its thread. If slots run short, however, nothing else frees them.
    fn is_signaled(&self, slot: SendSlot) -> bool {
        let (left, needed) = match slot.index() < self.sizes.answers {
            true => (self.free_answers.len(), self.sizes.receives),
            false => (self.free_own.len(), 1),
        };
        let since = self.in_flight.iter().rev().take_while(|posted| !posted.signaled);
        left < needed || since.count() + 1 >= SIGNAL_EVERY
    }

    /// Sends a message as [`MessageConnection::send`] does, which also invalidates the peer's memory of this key. The device must have
    /// [`Features::SEND_INVALIDATE`](rdmux_verbs::Features::SEND_INVALIDATE).
    pub fn send_invalidate(&mut self, slot: SendSlot, message: &[u8], rkey: RKey) -> Result<(), SendError> {
        let signaled = self.is_signaled(slot);
        let request = self.message(slot, &[message], Operation::SendInvalidate { rkey }, signaled)?;
        self.qp.post_send(request)?;
        self.posted(slot, signaled, false);
        Ok(())
    }

    /// Sends a message behind an RDMA operation, which takes effect at the peer first. Its slot stays the caller's:
    /// [`Completed::Sent`] stands for both, so that the memory of the operation is free as well. It comes as soon as the peer's device has acknowledged
    /// them, or if not `soon`, with the completion of a later message, which saves this thread a wake-up. Their packets leave together.
    /// `invalidate`: the message invalidates the peer's memory of this key ([`MessageConnection::send_invalidate`]).
    pub fn send_behind(
        &mut self,
        (operation, sges): (Operation, SgeList),
        slot: SendSlot,
        message: &[u8],
        invalidate: Option<RKey>,
        soon: bool,
    ) -> Result<(), SendError> {
        let signaled = soon || self.is_signaled(slot);
        let send = match invalidate {
            Some(rkey) => Operation::SendInvalidate { rkey },
            None => Operation::Send { imm: None },
        };
        let last = self.message(slot, &[message], send, signaled)?;
        // It has no completion of its own, unless it fails.
        let first = SendRequest::new(operation, sges).wr_id(WorkId::Send(slot).into());
        (self.qp.post_send_list([first, last])).map_err(|refused| refused.source)?;
        self.posted(slot, signaled, true);
        Ok(())
    }

    /// Returns the slot of another message for which the last [`Completed::Sent`] stands, until there is none.
    pub fn poll_sent(&mut self) -> Option<SendSlot> {
        self.acknowledged.pop_front()
    }

    /// Sends a message from a slot, which stays the caller's: [`Completed::Sent`] reports that the peer's device has acknowledged it.
    pub fn send_reported(&mut self, slot: SendSlot, message: &[u8]) -> Result<(), SendError> {
        self.post_message(slot, &[message], true, true)
    }

    fn post_message(
        &mut self,
        slot: SendSlot,
        parts: &[&[u8]],
        signaled: bool,
        reported: bool,
    ) -> Result<(), SendError> {
        let request = self.message(slot, parts, Operation::Send { imm: None }, signaled)?;
        self.qp.post_send(request)?;
        self.posted(slot, signaled, reported);
        Ok(())
    }

    /// Writes a message into the buffer of its slot, and returns the request that sends it.
    fn message(
        &self,
        slot: SendSlot,
        parts: &[&[u8]],
        operation: Operation,
        signaled: bool,
    ) -> Result<SendRequest, SendError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > self.sizes.sent_bytes || slot.index() >= self.sizes.slots() {
            return Err(SendError::TooLong);
        }
        let own_receives = match self.receives {
            Receives::Own { .. } => self.sizes.receives,
            Receives::Shared { .. } => 0,
        };
        let at = own_receives * self.sizes.message_bytes + slot.index() * self.sizes.sent_bytes;
        let mut end = at as u64;
        for part in parts {
            self.buffers.write_in_any_order(end, part)?;
            end += part.len() as u64;
        }
        let sge = self.buffers_mr.sge(at as u64, length as u32);
        let mut request = SendRequest::new(operation, sge).wr_id(WorkId::Send(slot).into());
        request.flags.set(SendFlags::SIGNALED, signaled);
        Ok(request)
    }

    fn posted(&mut self, slot: SendSlot, signaled: bool, reported: bool) {
        self.in_flight.push_back(Posted {
            slot,
            signaled,
            reported,
        });
    }

    /// Takes the memory of a message that was handled: the next message needs none of its own.
    pub fn reuse(&mut self, message: Vec<u8>) {
        if self.spare.len() < SPARE_MAX && message.capacity() > 0 {
            self.spare.push(message);
        }
    }

    /// Keeps memory that operations may use until the queue pair is no more: for a connection that ends before they are done.
    pub fn keep(&mut self, memory: Box<dyn Any + Send>) {
        self.kept.push(memory);
    }

    /// Frees a slot that was taken: by a message that gets no answer, or after [`Completed::Sent`].
    pub fn give_back(&mut self, slot: SendSlot) {
        if slot.index() < self.sizes.answers {
            self.free_answers.push(slot);
            self.post_receives();
        } else {
            self.free_own.push(slot);
        }
    }

    /// Posts an RDMA operation. Its completion is [`Completed::Operation`] with `number`, of which the low 62 bits count.
    pub fn post(&mut self, number: u64, operation: Operation, sges: SgeList) -> Result<(), PostError> {
        let request = SendRequest::new(operation, sges).wr_id(WorkId::Operation(number).into());
        self.qp.post_send(request.signaled())
    }

    /// Posts two RDMA operations as one list, so that their packets leave together. Only `last` has a completion, as
    /// [`MessageConnection::post`] has it: completions come in order, so it stands for `first` as well.
    pub fn post_pair(
        &mut self,
        (first, sges): (Operation, SgeList),
        number: u64,
        last: (Operation, SgeList),
    ) -> Result<(), PostError> {
        let id = WorkId::Operation(number).into();
        let silent = SendRequest::new(first, sges).wr_id(id);
        let last = SendRequest::new(last.0, last.1).wr_id(id).signaled();
        (self.qp.post_send_list([silent, last])).map_err(|refused| refused.source)
    }

    /// Sends a probe, which the peer's device answers without its program: an empty WRITE, for which the peer must allow remote writes.
    /// Returns false if it has not answered the last one.
    pub fn probe(&mut self) -> Result<bool, PostError> {
        if self.probing {
            return Ok(false);
        }
        self.post_empty(WorkId::Probe)?;
        self.probing = true;
        Ok(true)
    }

    /// Returns whether a probe has not been answered.
    pub fn is_probing(&self) -> bool {
        self.probing
    }

    /// Posts an empty WRITE. A queue pair in Error flushes it, and its completion follows those of all requests that were flushed before.
    pub(crate) fn post_empty(&self, id: WorkId) -> Result<(), PostError> {
        let empty = Operation::Write {
            va: 0,
            rkey: RKey(0),
            imm: None,
        };
        let request = SendRequest::new(empty, SgeList::EMPTY).wr_id(id.into());
        self.qp.post_send(request.signaled())
    }

    /// Handles a completion of the queue pair.
    ///
    /// # Errors
    /// The connection is over, for this reason; [`Status::Flushed`]: the peer has ended it.
    pub fn handle(&mut self, wc: &WorkCompletion) -> Result<Completed, Status> {
        match wc.status {
            Status::Success => {}
            Status::Flushed => return Err(self.qp.error().unwrap_or(Status::Flushed)),
            failed => return Err(failed),
        }
        Ok(match WorkId::from(wc.wr_id) {
            WorkId::Receive(index) => self.received(index, wc.byte_len)?,
            WorkId::Send(_) => self.sent(),
            WorkId::Operation(number) => Completed::Operation(number),
            WorkId::Probe => {
                self.probing = false;
                Completed::Nothing
            }
            // A queue pair in Error flushes them.
            WorkId::End | WorkId::Last => Completed::Nothing,
        })
    }

    fn received(&mut self, index: u32, byte_len: u32) -> Result<Completed, Status> {
        match &mut self.receives {
            Receives::Own { idle } => {
                let spare = self.spare.pop().unwrap_or_default();
                let message = message_of(&self.buffers, self.sizes.message_bytes, index, byte_len, spare);
                let bytes = message.map_err(|_| Status::LocalQpOperation)?;
                let slot = self.free_answers.pop();
                idle.push(index);
                self.post_receives();
                Ok(Completed::Message { slot, bytes })
            }
            Receives::Shared { share, held } => {
                let spare = self.spare.pop().unwrap_or_default();
                let message = share.take(index, byte_len, spare);
                let bytes = message.map_err(|_| Status::LocalQpOperation)?;
                if self.sizes.answers == 0 {
                    return Ok(Completed::Message { slot: None, bytes });
                }
                // A peer that keeps to its credits has no more messages without an answer.
                if held.len() >= self.sizes.receives {
                    return Err(Status::RemoteInvalidRequest);
                }
                held.push_back(bytes);
                Ok(self.next_held().unwrap_or(Completed::Nothing))
            }
        }
    }

    /// Returns the next message that waited for a slot, if one is free.
    pub(crate) fn next_held(&mut self) -> Option<Completed> {
        let Receives::Shared { held, .. } = &mut self.receives else {
            return None;
        };
        if held.is_empty() {
            return None;
        }
        let slot = Some(self.free_answers.pop()?);
        let bytes = held.pop_front()?;
        Some(Completed::Message { slot, bytes })
    }

    /// Returns whether messages wait for a slot.
    pub(crate) fn holds_messages(&self) -> bool {
        matches!(&self.receives, Receives::Shared { held, .. } if !held.is_empty())
    }

    /// Frees the slots of the messages up to the first with a completion, which this is: completions come in order.
    fn sent(&mut self) -> Completed {
        while let Some(posted) = self.in_flight.pop_front() {
            match posted.reported {
                true => self.acknowledged.push_back(posted.slot),
                false => self.give_back(posted.slot),
            }
            if posted.signaled {
                break;
            }
        }
        self.poll_sent().map_or(Completed::Nothing, Completed::Sent)
    }

    /// Posts receives as long as there is a slot for the answer of each. One that is refused is of a connection that is over, as its
    /// completions say.
    fn post_receives(&mut self) {
        let Receives::Own { idle } = &mut self.receives else {
            return;
        };
        while let Some(index) = idle.last() {
            let posted = self.sizes.receives - idle.len();
            let is_limited = self.sizes.answers > 0;
            let request = receive_request(&self.buffers_mr, self.sizes.message_bytes, *index);
            if is_limited && posted >= self.free_answers.len() || self.qp.post_recv(request).is_err() {
                return;
            }
            idle.pop();
        }
    }

    /// Returns the number of receives of its own that are posted, or whose completions were not handled.
    #[cfg(test)]
    pub(crate) fn own_receives(&self) -> usize {
        match &self.receives {
            Receives::Own { idle } => self.sizes.receives - idle.len(),
            Receives::Shared { .. } => 0,
        }
    }

    pub(crate) fn shares_receives(&self) -> bool {
        matches!(self.receives, Receives::Shared { .. })
    }

    /// Reports to a queue, under a token, when the connection may be over ([`MessageConnection::end`]).
    pub fn notify(&self, events: &EventQueue, token: u64) {
        self.connection.notify(events, token);
    }

    /// Returns why the connection is over, if it is. Messages that arrived before may still have completions.
    pub fn end(&self) -> Option<ConnectionEnd> {
        if let Some(status) = self.qp.error() {
            return Some(ConnectionEnd::Failed(status));
        }
        let disconnected = self.connection.progress().ended.is_some();
        disconnected.then_some(ConnectionEnd::Disconnected)
    }

    /// Ends the connection. When this returns, no access of the peer runs. Completions of requests may follow.
    pub fn disconnect(&self) {
        self.connection.disconnect();
        let _ = self.qp.modify(QpState::Error, &QpAttributes::default());
    }

    /// Ends the connection, and waits until the peer has agreed.
    pub fn close(self, timeout: Duration) {
        self.connection.disconnect_and_wait(timeout);
    }
}
