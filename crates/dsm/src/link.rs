//! The connection to another node: frames both ways, and reads of the other's memory.

mod end;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::thread::spawn;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, Connection, CreateError, Memory, MemoryRegion, PostError,
    ProtectionDomain, QpOptions, QueuePair, RKey, RecvRequest, RegisterError, RemoteBuffer, SendRequest, Sge,
    SgeList, Status,
};
use rdmux_wire::Malformed;
use rdmux_wire::dsm::MESSAGE_LEN;
use rdmux_wire::dsm::frame::{FRAME_LEN, Frame, RING_LEN, SLEEPS_AT, SLOTS};

use self::end::{End, Ring};
use crate::window::Slot;

/// Reads in flight to one node. Others wait for their completions.
const READS: u32 = 32;

/// Receives for bells. A thorough turn takes all that have come; before it, a node that writes frames directly rings once at most for each sleep of
/// this one.
const BELLS: u32 = 2 * SLOTS;

/// Send requests of a link: frames, as many bells, reads, a probe, and the word.
const SENDS: u32 = 2 * SLOTS + READS + 2;

/// Requests without a completion, from which on messages wait.
const CROWDED: u32 = SENDS - READS - 8;

/// Messages that may wait for room in the ring of a node.
const WAITING_MAX: usize = 65536;

/// Completions that the queue of all links must hold for one link.
pub(crate) const COMPLETIONS: u32 = BELLS + SENDS;

/// Offset in the buffers of the word's value, behind one frame for each slot.
const WORD_AT: usize = SLOTS as usize * FRAME_LEN;

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
    /// The other does not handle what it is sent.
    #[error("it does not take its messages")]
    Stuck,
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

/// Kind of a request, with a number of the kind's own: of a frame its count, of a read the caller's, of a word its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkId {
    Bell,
    Frame(u32),
    Read(u32),
    Probe,
    Word(u32),
}

impl WorkId {
    /// Returns the number of a request to a node.
    fn of(self, node: u32) -> u64 {
        let (kind, number) = match self {
            WorkId::Bell => (0, 0),
            WorkId::Frame(number) => (1, number),
            WorkId::Read(number) => (2, number),
            WorkId::Probe => (3, 0),
            WorkId::Word(number) => (4, number),
        };
        kind << 56 | u64::from(node & 0xff_ffff) << 32 | u64::from(number)
    }

    /// Returns the node and the request of a number.
    pub(crate) fn parse(wr_id: u64) -> (u32, WorkId) {
        let number = wr_id as u32;
        let id = match wr_id >> 56 {
            0 => WorkId::Bell,
            1 => WorkId::Frame(number),
            2 => WorkId::Read(number),
            3 => WorkId::Probe,
            _ => WorkId::Word(number),
        };
        ((wr_id >> 32) as u32 & 0xff_ffff, id)
    }
}

/// Queue pair and memory of a link that is not connected yet. Its receives are posted: the peer may ring at once.
#[derive(Debug)]
pub(crate) struct Prepared {
    node: u32,
    qp: QueuePair,
    buffers_mr: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    ring_mr: MemoryRegion,
    ring: Arc<AnonymousMemory>,
}

impl Prepared {
    /// Prepares the link to a node. Completions of bells come to one queue, all others to the other.
    pub(crate) fn new(
        node: u32,
        pd: &ProtectionDomain,
        work: &CompletionQueue,
        bells: &CompletionQueue,
    ) -> Result<Prepared, OpenError> {
        let mut options = QpOptions::new(work);
        options.recv_cq = bells.clone();
        options.max_send_wr = SENDS;
        options.max_recv_wr = BELLS;
        let qp = pd.create_qp(&options)?;
        let buffers = Arc::new(AnonymousMemory::new(WORD_AT + 4)?);
        let buffers_mr = pd.reg_mr_all(buffers.clone(), 0, Access::LOCAL_WRITE)?;
        let ring = Arc::new(AnonymousMemory::shareable(RING_LEN)?);
        let ring_mr = pd.reg_mr_all(ring.clone(), 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        qp.init().map_err(ConnectError::Modify)?;
        (0..BELLS).try_for_each(|_| post_bell(node, &qp))?;
        Ok(Prepared {
            node,
            qp,
            buffers_mr,
            buffers,
            ring_mr,
            ring,
        })
    }

    /// Returns the queue pair, to connect it.
    pub(crate) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Returns the key by which the peer writes the ring.
    pub(crate) fn ring_key(&self) -> u32 {
        self.ring_mr.rkey().0
    }

    /// Makes a link of it, which is connected to a peer whose ring has a key.
    pub(crate) fn connected(self, connection: Connection, peer_ring: u32) -> Link {
        Link {
            node: self.node,
            connection,
            qp: self.qp,
            buffers_mr: self.buffers_mr,
            buffers: self.buffers,
            _ring_mr: self.ring_mr,
            ring: self.ring,
            peer_ring: RKey(peer_ring),
            end: End::new(),
            waiting: VecDeque::new(),
            outstanding: 0,
            reads: 0,
            waiting_reads: VecDeque::new(),
            probed: None,
        }
    }
}

fn post_bell(node: u32, qp: &QueuePair) -> Result<(), PostError> {
    qp.post_recv(RecvRequest::new(WorkId::Bell.of(node), SgeList::EMPTY))
}

impl Ring for AnonymousMemory {
    fn count(&self, slot: u32, order: Ordering) -> u32 {
        let at = slot as usize * FRAME_LEN;
        let last = self.mapping().double_word(at + FRAME_LEN - 8);
        (last.load(order).to_le() >> 32) as u32
    }

    fn frame(&self, slot: u32) -> [u8; FRAME_LEN] {
        self.mapping().load_line(slot as usize * FRAME_LEN)
    }

    fn word(&self) -> u32 {
        u32::from_le(self.mapping().load(SLEEPS_AT))
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
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
    _ring_mr: MemoryRegion,
    ring: Arc<AnonymousMemory>,
    peer_ring: RKey,
    end: End,
    waiting: VecDeque<[u8; MESSAGE_LEN]>,
    /// Requests without a completion so far.
    outstanding: u32,
    reads: u32,
    waiting_reads: VecDeque<(Sge, RemoteBuffer, u32)>,
    /// Time of the question that was not answered yet.
    probed: Option<Instant>,
}

impl Link {
    /// Ends the link: from now on the node begins no access to memory of this one. If the node is in the middle of writing into the ring, for ever if it
    /// is stopped, a thread waits for that and keeps the ring until then.
    pub(crate) fn end(self) {
        if self.qp.cut_off() {
            // This thread waits if the system refuses another one.
            let _ = spawn("dsm-link", move || drop(self));
        }
    }

    /// Sends a message, now or when there is room.
    pub(crate) fn send(&mut self, message: [u8; MESSAGE_LEN]) -> Result<(), LinkError> {
        self.waiting.push_back(message);
        self.send_waiting()?;
        if self.has_room() && self.end.may_rouse(&*self.ring) {
            self.post_bell_request()?;
        }
        match self.waiting.len() > WAITING_MAX {
            true => Err(LinkError::Stuck),
            false => Ok(()),
        }
    }

    /// Reads memory of the node into memory of this one. The completion has [`WorkId::Read`] with the number.
    pub(crate) fn read(&mut self, into: Sge, from: RemoteBuffer, number: u32) -> Result<(), LinkError> {
        if self.reads == READS {
            self.waiting_reads.push_back((into, from, number));
            return Ok(());
        }
        self.reads += 1;
        self.post_request(SendRequest::read(into, from), WorkId::Read(number))
    }

    /// Returns whether the last frames went by packets.
    pub(crate) fn uses_packets(&self) -> bool {
        self.end.uses_packets()
    }

    /// Notes the completion of a request.
    pub(crate) fn completed(&mut self) {
        self.outstanding -= 1;
    }

    /// Returns whether there are requests without a completion.
    pub(crate) fn has_outstanding(&self) -> bool {
        self.outstanding > 0
    }

    /// Returns whether messages have not arrived.
    pub(crate) fn is_sending(&self) -> bool {
        self.has_outstanding() || !self.waiting.is_empty()
    }

    /// Takes the completion of a read: the next one that waits is posted.
    pub(crate) fn has_read(&mut self) -> Result<(), LinkError> {
        self.reads -= 1;
        match self.waiting_reads.pop_front() {
            Some((into, from, number)) => self.read(into, from, number),
            None => Ok(()),
        }
    }

    /// Takes the completion of a frame.
    pub(crate) fn has_written(&mut self, count: u32) -> Result<(), LinkError> {
        self.end.has_written(count);
        self.send_waiting()
    }

    /// Takes a bell.
    pub(crate) fn has_rung(&mut self) -> Result<(), LinkError> {
        self.end.has_rung();
        Ok(post_bell(self.node, &self.qp)?)
    }

    /// Takes the next frame, if it has come.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, LinkError> {
        let frame = self.end.receive(&*self.ring)?;
        if frame.is_some() {
            self.send_waiting()?;
        }
        Ok(frame)
    }

    /// Tells the node of the frames that were handled, if no message has done that.
    pub(crate) fn tell(&mut self) -> Result<(), LinkError> {
        match self.end.take_bare() {
            Some(slot) => self.post(slot, None),
            None => Ok(()),
        }
    }

    /// Rings the bell if the node may not see the frames that were posted: they are on their way, or it sleeps.
    pub(crate) fn ring(&mut self) -> Result<(), LinkError> {
        match self.has_room() && self.end.must_ring(&*self.ring) {
            true => self.post_bell_request(),
            false => Ok(()),
        }
    }

    fn has_room(&self) -> bool {
        self.outstanding < SENDS - READS - 2
    }

    fn post_bell_request(&mut self) -> Result<(), LinkError> {
        self.post_request(SendRequest::send(SgeList::EMPTY), WorkId::Bell)
    }

    /// Tells the node that this one will not look at its ring until the bell rings, if the node would not ring it.
    pub(crate) fn tell_sleep(&mut self) -> Result<(), LinkError> {
        match self.end.tell_sleep() {
            Some(word) => self.write_word(word),
            None => Ok(()),
        }
    }

    /// Tells the node that this one looks at its ring again, if the node would ring the bell.
    pub(crate) fn tell_awake(&mut self) -> Result<(), LinkError> {
        if self.has_room()
            && let Some(word) = self.end.tell_awake()
        {
            self.write_word(word)?;
        }
        Ok(())
    }

    fn write_word(&mut self, word: u32) -> Result<(), LinkError> {
        self.buffers
            .write(WORD_AT as u64, &word.to_le_bytes())
            .map_err(|_| LinkError::Buffers)?;
        let value = self.buffers_mr.sge(WORD_AT as u64, 4);
        let request = SendRequest::write(value, self.remote(SLEEPS_AT, 4));
        self.post_request(request, WorkId::Word(word))
    }

    /// Takes the completion of the word.
    pub(crate) fn has_told_sleep(&mut self, word: u32) {
        self.end.has_told_sleep(word);
    }

    /// Returns whether requests are in progress whose completions matter.
    pub(crate) fn is_busy(&self) -> bool {
        self.reads > 0
            || self.end.is_telling()
            || self.probed.is_some()
            || self.end.owes_bell()
            || !self.waiting.is_empty()
    }

    /// Returns whether the node may count on this one's polling, and rings no bell.
    pub(crate) fn is_relied_on(&self) -> bool {
        self.end.is_awake()
    }

    fn send_waiting(&mut self) -> Result<(), LinkError> {
        while !self.waiting.is_empty()
            && self.outstanding < CROWDED
            && let Some(slot) = self.end.take()
        {
            let message = self.waiting.pop_front();
            self.post(slot, message)?;
        }
        Ok(())
    }

    fn post(&mut self, slot: Slot, message: Option<[u8; MESSAGE_LEN]>) -> Result<(), LinkError> {
        let at = slot.index as usize * FRAME_LEN;
        let frame = self.end.post(slot, message);
        self.buffers
            .write(at as u64, &frame.emit())
            .map_err(|_| LinkError::Buffers)?;
        let frame = self.buffers_mr.sge(at as u64, FRAME_LEN as u32);
        let request = SendRequest::write(frame, self.remote(at, FRAME_LEN));
        self.post_request(request, WorkId::Frame(slot.count))
    }

    /// Returns bytes of the peer's ring.
    fn remote(&self, at: usize, len: usize) -> RemoteBuffer {
        RemoteBuffer {
            address: at as u64,
            length: len as u64,
            rkey: self.peer_ring,
        }
    }

    fn post_request(&mut self, request: SendRequest, id: WorkId) -> Result<(), LinkError> {
        self.outstanding += 1;
        Ok(self.qp.post_send(request.signaled().wr_id(id.of(self.node)))?)
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
            self.post_request(SendRequest::write(SgeList::EMPTY, nothing), WorkId::Probe)?;
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
