//! The client: connect, map, then write, read and flush the mapping by RDMA.

mod session;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Access, AnonymousMemory, CompletionQueue, ConnectError, ConnectParams, Connection, CreateError, Device,
    Fault, Memory, MemoryRegion, OpenError, Operation, Placement, PostError, ProtectionDomain, QpOptions,
    QueuePair, RKey, RecvRequest, RegisterError, RejReason, Selectivity, SendFlags, SendRequest, SgeList,
    Status, Target, WcOpcode, WorkCompletion,
};
use rdmux_wire::push::{self, Domain, ErrorCode, Extent, MESSAGE_LEN_MAX, Message, Name};

pub use self::session::{Failure, Handshake, Next};
use crate::key::{Key, random_nonce};
use crate::target::{TargetError, local_address_towards};

/// Receives for control messages.
const RECEIVES: usize = 4;
/// Control messages have work request ids from here on; data has those below.
const CONTROL: u64 = 1 << 63;
const CONTROL_SEND: u64 = CONTROL | 1 << 32;
const PROBE: u64 = CONTROL | 2 << 32;
/// A server that is busy with others may take so long for the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Data requests under way at a time.
pub const DEPTH_MAX: usize = 256;
/// The most bytes of one request.
pub const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be reached.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The device did not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nobody serves there.
    #[error("nobody serves on {0}: start `rdmux serve` there, or give the port that it listens on")]
    NobodyListens(SocketAddr),
    /// No connection.
    #[error("{peer}: {source}")]
    Connect {
        /// Where.
        peer: SocketAddr,
        /// Why.
        source: ConnectError,
    },
    /// The keys differ.
    #[error("{0} has another key: give both sides the same key file with --key FILE")]
    WrongKey(SocketAddr),
    /// The server said no.
    #[error("{text}")]
    Refused {
        /// Why, for programs.
        code: ErrorCode,
        /// Why, for people.
        text: String,
    },
    /// The connection is over.
    #[error("connection to {peer} lost: {why}")]
    Lost {
        /// Where.
        peer: SocketAddr,
        /// Why.
        why: String,
    },
    /// The server does not speak as it should.
    #[error("{peer} does not speak the push protocol as it should: {why}")]
    Protocol {
        /// Where.
        peer: SocketAddr,
        /// What is wrong.
        why: String,
    },
    /// Outside of a mapping; nothing was sent.
    #[error("{length} bytes at {offset} lie outside of the mapping of {region}")]
    OutOfRange {
        /// The region.
        region: Name,
        /// First byte, in the region.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The mapping was not made for this; nothing was sent.
    #[error("the mapping of {region} was made without the right to {right}")]
    NoRight {
        /// The region.
        region: Name,
        /// What for.
        right: &'static str,
    },
    /// A persistent flush of what keeps nothing; nothing was sent.
    #[error(
        "region {region} keeps nothing over a loss of power: a persistent flush is refused; flush for visibility, or serve a \
         file on a disk"
    )]
    NotPersistent {
        /// The region.
        region: Name,
    },
    /// Own memory.
    #[error("memory: {0}")]
    Memory(#[from] Fault),
    /// Own memory.
    #[error("memory: {0}")]
    Register(#[from] RegisterError),
    /// The device has no room.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A work request was not taken.
    #[error("work request: {0}")]
    Post(#[from] PostError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How a client waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// Asleep.
    #[default]
    Blocked,
    /// Spinning: lowest latency, one CPU always busy.
    Polled,
}

/// How to connect.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Own address; `None` takes the one from which packets to the server leave.
    pub from: Option<IpAddr>,
    /// A device that is open already.
    pub device: Option<Device>,
    /// How to wait for completions.
    pub wait: Wait,
}

/// A mapping: what of a region RDMA reaches.
#[derive(Clone, Debug)]
pub struct Mapping {
    id: u64,
    region: Name,
    access: push::Access,
    domain: Domain,
    placement: Placement,
    region_bytes: u64,
    extents: Vec<Extent>,
}

impl Mapping {
    /// The region.
    pub fn region(&self) -> &Name {
        &self.region
    }

    /// What of it survives a loss of power.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// The kinds of flush it offers.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Size of the region.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// The strongest flush it offers.
    pub fn strongest(&self) -> Placement {
        if self.placement.contains(Placement::PERSISTENT) {
            Placement::PERSISTENT
        } else {
            Placement::GLOBAL
        }
    }

    /// What is mapped.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Address and key of a range of the region.
    fn locate(&self, offset: u64, length: u64) -> Result<(u64, RKey), Error> {
        let inside = |extent: &&Extent| {
            let end = offset.checked_add(length);
            offset >= extent.offset && end.is_some_and(|end| end <= extent.offset + extent.length)
        };
        let extent = self
            .extents
            .iter()
            .find(inside)
            .filter(|_| length <= REQUEST_BYTES_MAX)
            .ok_or_else(|| Error::OutOfRange {
                region: self.region.clone(),
                offset,
                length,
            })?;
        Ok((extent.va + (offset - extent.offset), extent.rkey))
    }

    fn needs(&self, access: push::Access, right: &'static str) -> Result<(), Error> {
        if self.access.contains(access) {
            return Ok(());
        }
        Err(Error::NoRight {
            region: self.region.clone(),
            right,
        })
    }
}

/// Own memory that requests take bytes from and put bytes into.
#[derive(Debug)]
pub struct Buffer {
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
}

impl Buffer {
    /// The bytes.
    pub fn memory(&self) -> &AnonymousMemory {
        &self.memory
    }
}

/// A data request that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number given to it.
    pub token: u64,
    /// What it was.
    pub opcode: WcOpcode,
}

/// A connection to a server. Data requests are posted with a number of the caller's own and complete in order
/// ([`Client::next_done`]); everything else asks and waits.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    qp: QueuePair,
    slots_mr: MemoryRegion,
    slots: Arc<AnonymousMemory>,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    peer: SocketAddr,
    wait: Wait,
    /// Data requests that were done while something else was waited for.
    done: VecDeque<Done>,
    in_flight: usize,
    /// The control message that came last.
    answer: Option<(u64, Message)>,
    control_sends: usize,
    probing: bool,
    last_request: u64,
    keepalive: Duration,
}

impl Client {
    /// Connects and shows the key.
    pub fn connect(peer: SocketAddr, key: &Key, options: &Options) -> Result<Client, Error> {
        let device = match &options.device {
            Some(device) => device.clone(),
            None => {
                let from = match options.from {
                    Some(from) => from,
                    None => local_address_towards(peer.ip())?,
                };
                Device::open(from)?
            }
        };
        let pd = device.alloc_pd();
        let cq = device.create_cq((DEPTH_MAX + RECEIVES + 4) as u32)?;
        let mut qp_options = QpOptions::new(&cq);
        qp_options.max_send_wr = DEPTH_MAX as u32 + 4;
        qp_options.max_recv_wr = RECEIVES as u32;
        let qp = pd.create_qp(&qp_options)?;
        let slots = Arc::new(AnonymousMemory::new((RECEIVES + 1) * MESSAGE_LEN_MAX)?);
        let slots_mr = pd.reg_mr_all(slots.clone(), 0, Access::LOCAL_WRITE)?;
        let params = ConnectParams {
            // The server writes nothing here; its probe, a WRITE of no bytes, needs the right all the same.
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            ..ConnectParams::default()
        };
        let connection = device
            .connect(&qp, peer, &params, &[])
            .map_err(|source| match source {
                ConnectError::Rejected {
                    reason: RejReason::INVALID_SERVICE_ID,
                    ..
                } => Error::NobodyListens(peer),
                ConnectError::Rejected { private_data, .. }
                    if private_data.first().is_some_and(|b| *b != 0) =>
                {
                    let end = private_data
                        .iter()
                        .position(|b| *b == 0)
                        .unwrap_or(private_data.len());
                    let text: String = String::from_utf8_lossy(&private_data[..end])
                        .chars()
                        .filter(|c| !c.is_control())
                        .collect();
                    Error::Refused {
                        code: ErrorCode::Busy,
                        text: format!("{peer} refused the connection: {text}"),
                    }
                }
                source => Error::Connect { peer, source },
            })?;
        let mut client = Client {
            connection,
            qp,
            slots_mr,
            slots,
            pd,
            cq,
            peer,
            wait: options.wait,
            done: VecDeque::new(),
            in_flight: 0,
            answer: None,
            control_sends: 0,
            probing: false,
            last_request: 0,
            keepalive: HANDSHAKE_TIMEOUT,
        };
        for slot in 0..RECEIVES {
            client.post_receive(slot)?;
        }
        client.handshake(key)?;
        Ok(client)
    }

    fn handshake(&mut self, key: &Key) -> Result<(), Error> {
        let mut handshake = Handshake::new(key.clone(), random_nonce()?);
        let mut message = handshake.hello();
        loop {
            let answer = self.ask_within(&message, Some(HANDSHAKE_TIMEOUT))?;
            match handshake.handle(answer) {
                Ok(Next::Send(next)) => message = next,
                Ok(Next::Welcome { keepalive_ms, .. }) => {
                    self.keepalive =
                        Duration::from_millis(keepalive_ms.into()).max(Duration::from_millis(100));
                    return Ok(());
                }
                Err(Failure::WrongKey) => return Err(Error::WrongKey(self.peer)),
                Err(Failure::Refused(code, text)) => return Err(Error::Refused { code, text }),
                Err(Failure::Protocol) => return Err(self.protocol("the handshake goes another way")),
            }
        }
    }

    /// The server's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.pd.device()
    }

    /// Maps a range of a region; `length` 0 is the rest of it. `transfer` names an upload whose progress the server is to
    /// remember, 0 none.
    pub fn map(
        &mut self,
        region: &Name,
        access: push::Access,
        offset: u64,
        length: u64,
        transfer: u64,
    ) -> Result<Mapping, Error> {
        let request = Message::Map {
            region: region.clone(),
            access,
            offset,
            length,
            transfer,
        };
        match self.ask(&request)? {
            Message::Mapped {
                mapping,
                region_bytes,
                domain,
                placement,
                extents,
            } => {
                let sane = |e: &Extent| {
                    e.offset.checked_add(e.length).is_some() && e.va.checked_add(e.length).is_some()
                };
                if !extents.iter().all(sane) {
                    return Err(self.protocol("an extent wraps around"));
                }
                Ok(Mapping {
                    id: mapping,
                    region: region.clone(),
                    access,
                    domain,
                    placement,
                    region_bytes,
                    extents,
                })
            }
            _ => Err(self.protocol("another answer than to Map")),
        }
    }

    /// Ends a mapping, after all requests under way.
    pub fn unmap(&mut self, mapping: Mapping) -> Result<(), Error> {
        match self.ask(&Message::Unmap { mapping: mapping.id })? {
            Message::Unmapped => Ok(()),
            _ => Err(self.protocol("another answer than to Unmap")),
        }
    }

    /// Asks about a region and an upload into it; 0 for the one that wrote last.
    pub fn stat(&mut self, region: &Name, transfer: u64) -> Result<push::Region, Error> {
        let request = Message::Stat {
            region: region.clone(),
            transfer,
        };
        match self.ask(&request)? {
            Message::Region(region) => Ok(region),
            _ => Err(self.protocol("another answer than to Stat")),
        }
    }

    /// Asks about all regions; returns those that fit a message, and how many there are.
    pub fn list(&mut self) -> Result<(Vec<push::Region>, u32), Error> {
        match self.ask(&Message::List)? {
            Message::Regions { total, regions } => Ok((regions, total)),
            _ => Err(self.protocol("another answer than to List")),
        }
    }

    /// Asks for the CRC-64/NVME of a range, as the server reads it.
    pub fn checksum(&mut self, region: &Name, offset: u64, length: u64) -> Result<u64, Error> {
        let request = Message::Checksum {
            region: region.clone(),
            offset,
            length,
        };
        match self.ask(&request)? {
            Message::Checksummed { crc } => Ok(crc),
            _ => Err(self.protocol("another answer than to Checksum")),
        }
    }

    /// Memory to write from and read into.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Error> {
        let memory = Arc::new(AnonymousMemory::new(bytes)?);
        let mr = self.pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE)?;
        Ok(Buffer { mr, memory })
    }

    /// Data requests that are not done, or not taken by [`Client::next_done`].
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Posts a WRITE of bytes of a buffer to `offset` of the mapping's region. When it is done, they are visible there.
    pub fn post_write(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        buffer: &Buffer,
        at: u64,
        length: u32,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(push::Access::WRITE, "write")?;
        let (va, rkey) = mapping.locate(offset, length.into())?;
        let operation = Operation::Write { va, rkey, imm: None };
        self.post(token, operation, buffer.mr.sge(at, length).into())
    }

    /// Posts a READ of `offset` of the mapping's region into a buffer.
    pub fn post_read(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        buffer: &Buffer,
        at: u64,
        length: u32,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(push::Access::READ, "read")?;
        let (va, rkey) = mapping.locate(offset, length.into())?;
        self.post(
            token,
            Operation::Read { va, rkey },
            buffer.mr.sge(at, length).into(),
        )
    }

    /// Posts a FLUSH of a range of the mapping's region. When it is done, all that was written there before is visible, or
    /// durable.
    pub fn post_flush(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(push::Access::WRITE, "flush")?;
        if !mapping.placement.contains(placement) {
            return Err(Error::NotPersistent {
                region: mapping.region.clone(),
            });
        }
        let (va, rkey) = mapping.locate(offset, length)?;
        let operation = Operation::Flush {
            va,
            rkey,
            length: length as u32,
            placement,
            selectivity: Selectivity::Range,
        };
        self.post(token, operation, SgeList::EMPTY)
    }

    fn post(&mut self, token: u64, operation: Operation, sges: SgeList) -> Result<(), Error> {
        assert!(token < CONTROL, "tokens have 63 bits");
        if self.in_flight >= DEPTH_MAX {
            return Err(PostError::QueueFull.into());
        }
        self.qp.post_send(SendRequest {
            wr_id: token,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })?;
        self.in_flight += 1;
        Ok(())
    }

    /// Waits for the oldest data request.
    pub fn next_done(&mut self) -> Result<Done, Error> {
        loop {
            if let Some(done) = self.done.pop_front() {
                self.in_flight -= 1;
                return Ok(done);
            }
            if let Some(wc) = self.poll(None)? {
                self.handle(&wc)?;
            }
        }
    }

    /// Waits until no data request is under way.
    pub fn drain(&mut self) -> Result<(), Error> {
        while self.in_flight > 0 {
            self.next_done()?;
        }
        Ok(())
    }

    /// Writes bytes and waits until they are visible. For speed, post requests instead.
    pub fn write(&mut self, mapping: &Mapping, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.drain()?;
        let buffer = self.buffer(bytes.len())?;
        buffer.memory.write(0, bytes)?;
        self.post_write(
            mapping,
            offset,
            &buffer,
            0,
            length_u32(mapping, offset, bytes.len())?,
            0,
        )?;
        self.next_done().map(drop)
    }

    /// Reads bytes. For speed, post requests instead.
    pub fn read(&mut self, mapping: &Mapping, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.drain()?;
        let buffer = self.buffer(out.len())?;
        self.post_read(
            mapping,
            offset,
            &buffer,
            0,
            length_u32(mapping, offset, out.len())?,
            0,
        )?;
        self.next_done()?;
        Ok(buffer.memory.read(0, out)?)
    }

    /// Flushes and waits until it is done.
    pub fn flush(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
    ) -> Result<(), Error> {
        self.drain()?;
        self.post_flush(mapping, offset, length, placement, 0)?;
        self.next_done().map(drop)
    }

    /// Says goodbye and ends the connection.
    pub fn close(mut self) {
        // The end of the connection would overtake a goodbye that has not arrived.
        let _ = self.say_goodbye(Instant::now() + Duration::from_secs(1));
        self.connection.disconnect_and_wait(Duration::from_secs(1));
    }

    fn say_goodbye(&mut self, deadline: Instant) -> Result<(), Error> {
        self.send(&Message::Goodbye)?;
        while self.control_sends > 0
            && let Some(wc) = self.poll(Some(deadline))?
        {
            self.handle(&wc)?;
        }
        Ok(())
    }

    /// Asks and waits for the answer.
    fn ask(&mut self, message: &Message) -> Result<Message, Error> {
        match self.ask_within(message, None)? {
            Message::Error { code, text } => Err(Error::Refused { code, text }),
            answer => Ok(answer),
        }
    }

    fn ask_within(&mut self, message: &Message, timeout: Option<Duration>) -> Result<Message, Error> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let request = self.send(message)?;
        loop {
            // The message's own completion too: its slot is written again by the next.
            if self.control_sends == 0
                && let Some((answered, answer)) = self.answer.take()
            {
                if answered != request {
                    return Err(self.protocol("an answer to what was not asked"));
                }
                return Ok(answer);
            }
            if let Some(wc) = self.poll(deadline)? {
                self.handle(&wc)?;
            } else if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(self.lost("no answer in time"));
            }
        }
    }

    fn send(&mut self, message: &Message) -> Result<u64, Error> {
        self.last_request += 1;
        let mut bytes = Vec::with_capacity(256);
        message.emit(self.last_request, &mut bytes);
        let at = (RECEIVES * MESSAGE_LEN_MAX) as u64;
        self.slots.write(at, &bytes)?;
        self.qp.post_send(SendRequest {
            wr_id: CONTROL_SEND,
            operation: Operation::Send { imm: None },
            sges: self.slots_mr.sge(at, bytes.len() as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })?;
        self.control_sends += 1;
        Ok(self.last_request)
    }

    fn post_receive(&mut self, slot: usize) -> Result<(), Error> {
        let at = (slot * MESSAGE_LEN_MAX) as u64;
        self.qp.post_recv(RecvRequest {
            wr_id: CONTROL | slot as u64,
            sges: self.slots_mr.sge(at, MESSAGE_LEN_MAX as u32).into(),
        })?;
        Ok(())
    }

    /// Waits for a completion, for the keep-alive time at most. A server that is silent for so long is probed, so that its
    /// death is noticed.
    fn poll(&mut self, deadline: Option<Instant>) -> Result<Option<WorkCompletion>, Error> {
        let silent = Instant::now() + self.keepalive;
        let until = deadline.map_or(silent, |deadline| deadline.min(silent));
        let wc = match self.wait {
            Wait::Blocked => self.cq.wait(until.saturating_duration_since(Instant::now()))?,
            Wait::Polled => {
                let mut turns = 0u32;
                loop {
                    if let Some(wc) = self.cq.poll() {
                        break Some(wc);
                    }
                    turns = turns.wrapping_add(1);
                    if turns.is_multiple_of(1024) && Instant::now() >= until {
                        break None;
                    }
                }
            }
        };
        if wc.is_none() && !self.probing && Instant::now() >= silent {
            self.probing = true;
            self.qp.post_send(SendRequest {
                wr_id: PROBE,
                operation: Operation::Write {
                    va: 0,
                    rkey: RKey(0),
                    imm: None,
                },
                sges: SgeList::EMPTY,
                flags: SendFlags::SIGNALED,
                to: Target::Connected,
            })?;
        }
        Ok(wc)
    }

    fn handle(&mut self, wc: &WorkCompletion) -> Result<(), Error> {
        if wc.status != Status::Success {
            return Err(self.failed(wc.status));
        }
        match wc.wr_id {
            PROBE => self.probing = false,
            CONTROL_SEND => self.control_sends -= 1,
            id if id & CONTROL != 0 => {
                let slot = (id & !CONTROL) as usize;
                let mut bytes = [0; MESSAGE_LEN_MAX];
                let bytes = &mut bytes[..(wc.byte_len as usize).min(MESSAGE_LEN_MAX)];
                self.slots.read((slot * MESSAGE_LEN_MAX) as u64, bytes)?;
                self.post_receive(slot)?;
                let message = Message::parse(bytes).map_err(|error| self.protocol(&error.to_string()))?;
                if matches!(message.1, Message::Goodbye) {
                    return Err(self.lost("the server said goodbye"));
                }
                if self.answer.replace(message).is_some() {
                    return Err(self.protocol("an answer to what was not asked"));
                }
            }
            token => self.done.push_back(Done {
                token,
                opcode: wc.opcode,
            }),
        }
        Ok(())
    }

    fn failed(&self, status: Status) -> Error {
        let status = match status {
            Status::Flushed => self.qp.error().unwrap_or(status),
            other => other,
        };
        self.lost(match status {
            Status::Flushed => "the server ended it",
            Status::RetryExceeded => "the server does not answer any more",
            Status::RemoteAccess => {
                "the server refused an access: the mapping ended, or the region's file was truncated"
            }
            Status::RemoteOperation => {
                "the region's file failed at the server: what was not acknowledged is not durable"
            }
            _ => return self.lost(&status.to_string()),
        })
    }

    fn lost(&self, why: &str) -> Error {
        Error::Lost {
            peer: self.peer,
            why: why.into(),
        }
    }

    fn protocol(&self, why: &str) -> Error {
        Error::Protocol {
            peer: self.peer,
            why: why.into(),
        }
    }
}

fn length_u32(mapping: &Mapping, offset: u64, length: usize) -> Result<u32, Error> {
    u32::try_from(length).map_err(|_| Error::OutOfRange {
        region: mapping.region.clone(),
        offset,
        length: length as u64,
    })
}
