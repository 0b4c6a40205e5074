//! The connection to another node: frames both ways, and reads of the other's memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, Connection, CreateError, Memory, MemoryRegion, PostError,
    ProtectionDomain, QpOptions, QueuePair, RKey, RecvRequest, RegisterError, RemoteBuffer, SendRequest, Sge,
    SgeList, Status,
};
use rdmux_wire::Malformed;
use rdmux_wire::dsm::MESSAGE_LEN;
use rdmux_wire::dsm::frame::{FRAME_LEN, Frame};

use crate::window::{RECEIVES, Slot, Window};

/// Reads in flight to one node. Others wait for their completions.
pub(crate) const READS: u32 = 32;

/// Completions that the queue of all links must hold for one link.
pub(crate) const COMPLETIONS: u32 = 2 * RECEIVES + READS + 1;

/// Reason why a link has no use any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// A request failed, or the other has disconnected.
    #[error("the connection failed: {0}")]
    Status(Status),
    /// A request was not accepted.
    #[error("the connection failed: {0}")]
    Post(#[from] PostError),
    /// The other sends what no node sends.
    #[error("it does not keep to the protocol: {0}")]
    Malformed(#[from] Malformed),
    /// The other tells that it has handled more frames than were sent.
    #[error("it does not keep to the protocol: a wrong number of handled frames")]
    Handled,
    /// The connection's buffers cannot be read or written.
    #[error("the connection's buffers failed")]
    Buffers,
}

/// Reason why a link cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its buffers cannot be made.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Its queue pair cannot be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Its buffers cannot be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// Its queue pair cannot be prepared.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Its receives cannot be posted.
    #[error(transparent)]
    Post(#[from] PostError),
}

/// Kind of a request, with a number of the kind's own: of a receive that of its buffer, of a send the count of frames, of a read the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkId {
    Receive(u32),
    Send(u32),
    Read(u32),
    Probe,
}

impl WorkId {
    /// Returns the number of a request to a node.
    fn of(self, node: u32) -> u64 {
        let (kind, number) = match self {
            WorkId::Receive(number) => (0, number),
            WorkId::Send(number) => (1, number),
            WorkId::Read(number) => (2, number),
            WorkId::Probe => (3, 0),
        };
        kind << 62 | u64::from(node & 0x3fff_ffff) << 32 | u64::from(number)
    }

    /// Returns the node and the request of a number.
    pub(crate) fn parse(wr_id: u64) -> (u32, WorkId) {
        let number = wr_id as u32;
        let id = match wr_id >> 62 {
            0 => WorkId::Receive(number),
            1 => WorkId::Send(number),
            2 => WorkId::Read(number),
            _ => WorkId::Probe,
        };
        ((wr_id >> 32) as u32 & 0x3fff_ffff, id)
    }
}

/// Queue pair and buffers of a link that is not connected yet. Its receives are posted: the peer may send at once.
#[derive(Debug)]
pub(crate) struct Prepared {
    node: u32,
    qp: QueuePair,
    buffers_mr: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
}

impl Prepared {
    /// Prepares the link to a node.
    pub(crate) fn new(node: u32, pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<Prepared, OpenError> {
        let mut options = QpOptions::new(cq);
        options.max_send_wr = RECEIVES + READS + 1;
        options.max_recv_wr = RECEIVES;
        let qp = pd.create_qp(&options)?;
        // Receives, then sends.
        let buffers = Arc::new(AnonymousMemory::new(2 * RECEIVES as usize * FRAME_LEN)?);
        let buffers_mr = pd.reg_mr_all(buffers.clone(), 0, Access::LOCAL_WRITE)?;
        qp.init().map_err(ConnectError::Modify)?;
        let prepared = Prepared {
            node,
            qp,
            buffers_mr,
            buffers,
        };
        (0..RECEIVES).try_for_each(|index| post_receive(node, &prepared.qp, &prepared.buffers_mr, index))?;
        Ok(prepared)
    }

    /// Returns the queue pair, to connect it.
    pub(crate) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Makes a link of it, which is connected.
    pub(crate) fn connected(self, connection: Connection) -> Link {
        Link {
            node: self.node,
            connection,
            qp: self.qp,
            buffers_mr: self.buffers_mr,
            buffers: self.buffers,
            window: Window::default(),
            waiting: VecDeque::new(),
            reads: 0,
            waiting_reads: VecDeque::new(),
            probed: None,
        }
    }
}

fn post_receive(node: u32, qp: &QueuePair, mr: &MemoryRegion, index: u32) -> Result<(), PostError> {
    let buffer = mr.sge(u64::from(index) * FRAME_LEN as u64, FRAME_LEN as u32);
    qp.post_recv(RecvRequest::new(WorkId::Receive(index).of(node), buffer))
}

/// The connection to another node. Messages that cannot be sent yet wait in it, in their order, and so do reads.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub(crate) struct Link {
    node: u32,
    connection: Connection,
    qp: QueuePair,
    buffers_mr: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    window: Window,
    waiting: VecDeque<[u8; MESSAGE_LEN]>,
    reads: u32,
    waiting_reads: VecDeque<(Sge, RemoteBuffer, u32)>,
    /// Time of the question that was not answered yet.
    probed: Option<Instant>,
}

impl Link {
    /// Sends a message, now or when there is room.
    pub(crate) fn send(&mut self, message: [u8; MESSAGE_LEN]) -> Result<(), LinkError> {
        if self.waiting.is_empty()
            && let Some(slot) = self.window.take()
        {
            return self.post(slot, Some(message));
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// Reads memory of the node into memory of this one. The completion has [`WorkId::Read`] with the number.
    pub(crate) fn read(&mut self, into: Sge, from: RemoteBuffer, number: u32) -> Result<(), LinkError> {
        if self.reads == READS {
            self.waiting_reads.push_back((into, from, number));
            return Ok(());
        }
        self.reads += 1;
        let request = SendRequest::read(into, from).signaled();
        self.qp
            .post_send(request.wr_id(WorkId::Read(number).of(self.node)))?;
        Ok(())
    }

    /// Takes the completion of a read: the next one that waits is posted.
    pub(crate) fn has_read(&mut self) -> Result<(), LinkError> {
        self.reads -= 1;
        match self.waiting_reads.pop_front() {
            Some((into, from, number)) => self.read(into, from, number),
            None => Ok(()),
        }
    }

    /// Takes the completion of a signaled frame.
    pub(crate) fn has_sent(&mut self, count: u32) -> Result<(), LinkError> {
        self.window.acknowledge(count);
        self.send_waiting()
    }

    /// Takes a frame that has arrived in a buffer. Returns its message, as long as its reader has no other use for the link.
    pub(crate) fn received(&mut self, buffer: u32) -> Result<Option<[u8; MESSAGE_LEN]>, LinkError> {
        let mut bytes = [0; FRAME_LEN];
        let at = u64::from(buffer) * FRAME_LEN as u64;
        self.buffers
            .read(at, &mut bytes)
            .map_err(|_| LinkError::Buffers)?;
        post_receive(self.node, &self.qp, &self.buffers_mr, buffer)?;
        let frame = Frame::parse(&bytes)?;
        if !self.window.handle(frame.handled) {
            return Err(LinkError::Handled);
        }
        self.send_waiting()?;
        Ok(frame.message)
    }

    /// Tells the node of the frames that were handled, if no message has done that.
    pub(crate) fn tell(&mut self) -> Result<(), LinkError> {
        match self.window.take_bare() {
            Some(slot) => self.post(slot, None),
            None => Ok(()),
        }
    }

    fn send_waiting(&mut self) -> Result<(), LinkError> {
        while !self.waiting.is_empty()
            && let Some(slot) = self.window.take()
        {
            let message = self.waiting.pop_front();
            self.post(slot, message)?;
        }
        Ok(())
    }

    fn post(&mut self, slot: Slot, message: Option<[u8; MESSAGE_LEN]>) -> Result<(), LinkError> {
        let handled = slot.handled;
        let at = u64::from(RECEIVES + slot.index) * FRAME_LEN as u64;
        let written = self.buffers.write(at, &Frame { message, handled }.emit());
        written.map_err(|_| LinkError::Buffers)?;
        let request = SendRequest::send(self.buffers_mr.sge(at, FRAME_LEN as u32));
        let request = request.wr_id(WorkId::Send(slot.count).of(self.node));
        self.qp.post_send(match slot.is_signaled {
            true => request.signaled(),
            false => request,
        })?;
        Ok(())
    }

    /// Asks whether the node is there, unless it has not answered the question before. Returns since when it has not. The question is a WRITE of no
    /// bytes, which the node's device acknowledges.
    pub(crate) fn probe(&mut self, now: Instant) -> Result<Option<Instant>, LinkError> {
        if self.probed.is_none() {
            self.probed = Some(now);
            let nothing = RemoteBuffer {
                address: 0,
                length: 0,
                rkey: RKey(0),
            };
            let request = SendRequest::write(SgeList::EMPTY, nothing).signaled();
            self.qp.post_send(request.wr_id(WorkId::Probe.of(self.node)))?;
            return Ok(None);
        }
        Ok(self.probed)
    }

    /// Takes the completion of a probe.
    pub(crate) fn has_probed(&mut self) {
        self.probed = None;
    }

    /// Returns whether the node has disconnected, or the connection has failed.
    pub(crate) fn is_ended(&self) -> bool {
        self.connection.is_ended()
    }
}
