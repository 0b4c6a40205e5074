//! The client: connect, map, then write, read and flush the mapping by RDMA.
//!
//! Data requests are posted and complete in order ([`Client::next_done`]). RDMA requests and messages of one client take
//! effect in the order in which they were posted: a message is acted on after all RDMA requests before it, and an RDMA request
//! is held back until the ordinary reads and writes before it are answered.
//!
//! A mapping has a lease. When somebody else needs its range, the server sends a notice. The client handles the notice whenever
//! it waits for something, or in [`Client::handle_notices`]: it posts nothing more through the mapping, and releases it when
//! the requests in flight are done. Then requests fail with [`Error::LeaseBroken`], or go by message ([`Fallback`]).

mod connect;
mod data;
mod error;
mod lease;
mod mapping;
mod nonblocking;
mod session;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdmux_runtime::{self as runtime, BufferPool, Completed, MessageConnection, SIGNAL_EVERY, Sizes};
use rdmux_verbs::{
    CompletionQueue, Device, Features, PostError, ProtectionDomain, RKey, Status, WorkCompletion,
};
use rdmux_wire::push::{self, Extent, MESSAGE_LEN_MAX, Message, Name, Ways};

pub use self::connect::PendingClient;
use self::connect::{ClientParts, Establishing};
pub use self::data::{DEPTH_MAX, Done, Kind, Part};
use self::data::{Entry, Received};
pub use self::error::Error;
pub use self::lease::Broken;
use self::lease::Leased;
pub use self::mapping::{Buffer, MapRequest, Mapping, PendingMap, REQUEST_BYTES_MAX, Way};
pub use self::session::{Failure, Handshake, Next};
use rdmux_key::Key;

/// Maximum number of messages of this client without an answer, if the server allows so many.
const MESSAGES_MAX: usize = 14;
const SIZES: Sizes = Sizes {
    message_bytes: MESSAGE_LEN_MAX,
    sent_bytes: MESSAGE_LEN_MAX,
    // One for each answer, and one for a notice.
    receives: MESSAGES_MAX + 1,
    answers: 0,
    // One for each message that has an answer, and two for those that have none.
    own: MESSAGES_MAX + 2 + SIGNAL_EVERY,
    operations: DEPTH_MAX,
};
/// Memory that a client keeps for the next request that it waits for.
const IDLE_BYTES_MAX: usize = 1 << 20;
/// The longest READ whose bytes nobody wants.
const SCRATCH_BYTES: usize = 8;

/// Waiting mode of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// The client sleeps.
    #[default]
    Blocked,
    /// The client spins: lowest latency, one CPU always busy.
    Polled,
}

/// The client's reaction when the lease of a mapping is being broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBreak {
    /// The client releases the mapping as soon as no request through it is in flight.
    #[default]
    Release,
    /// The client reports the break ([`Client::broken`]) and continues until the application releases the mapping
    /// ([`Client::release`]) or the server's break timeout expires.
    Tell,
}

/// Treatment of requests through a mapping whose lease is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// They fail with [`Error::LeaseBroken`], and the application decides.
    #[default]
    Application,
    /// They go by message, once the server has acknowledged that the mapping's keys are invalid. In turn they break the other
    /// holder's lease.
    Automatic,
}

/// Options for a connection.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Own address; `None` takes the one from which packets to the server leave.
    pub from: Option<IpAddr>,
    /// A device that is open already.
    pub device: Option<Device>,
    /// Waiting mode for completions.
    pub wait: Wait,
    /// Way of flushing; `None` takes the best way that the mapping offers.
    pub way: Option<Way>,
    /// Reaction when a lease is being broken.
    pub on_break: OnBreak,
    /// Treatment of requests whose lease is over.
    pub fallback: Fallback,
    /// This client's name over several connections, in this process or after it: connecting revokes the earlier mappings of the
    /// same client. `None` makes one up.
    pub client: Option<[u8; 16]>,
}

/// A connection to a server. The caller posts data requests with numbers of its own; they complete in order
/// ([`Client::next_done`]). Other calls send a request and wait for its answer, unless they say otherwise.
#[derive(Debug)]
pub struct Client {
    link: ServerConnection,
    pd: ProtectionDomain,
    peer: SocketAddr,
    key: Key,
    options: Options,
    id: [u8; 16],
    /// Number of the connection: mappings of other connections are over.
    connection: u64,
    /// Data requests in the order in which they were posted, and the number of the first.
    entries: VecDeque<Entry>,
    first_entry: u64,
    /// Number of ordinary reads and writes without an answer.
    ordinary: usize,
    leased: HashMap<u64, Leased>,
    /// The place for the bytes of a READ that nobody wants.
    scratch: runtime::Buffer,
    pool: BufferPool,
}

/// Everything that ends with a connection.
#[derive(Debug)]
struct ServerConnection {
    connection: MessageConnection,
    cq: CompletionQueue,
    /// Messages that have not been sent yet, for lack of room at the server.
    outbox: VecDeque<(Message, Asked)>,
    /// Receivers of the pending answers, by request.
    asked: HashMap<u64, Asked>,
    messages_max: usize,
    /// Number of a notice that the client has taken and not acknowledged.
    noticed: Option<u64>,
    /// Set when the server's device has the goodbye.
    has_left: bool,
    last_request: u64,
    keepalive: Duration,
    /// Time of the next probe, by which the death of a silent server is noticed.
    probe_at: Instant,
}

/// The receiver of an answer.
#[derive(Debug)]
enum Asked {
    /// A caller, which may no longer want it.
    Caller(mpsc::Sender<Message>),
    /// The data request with this number, and the place for the bytes.
    Entry(u64, Option<Received>),
    /// The release of a mapping.
    Release(u64),
}

/// Where a caller finds an answer.
type Answer = mpsc::Receiver<Message>;

impl Client {
    /// Connects and proves that it has the key. When this returns, the server has revoked the same client's mappings on other
    /// connections.
    pub fn connect(peer: SocketAddr, key: &Key, options: &Options) -> Result<Client, Error> {
        let parts = ClientParts::new(peer, key, options)?;
        let link = parts.establish()?.wait(options.wait)?;
        Client::new(parts, link)
    }

    /// Starts what [`Client::connect`] does, and waits for nothing.
    pub fn start_connect(peer: SocketAddr, key: &Key, options: &Options) -> Result<PendingClient, Error> {
        PendingClient::start(ClientParts::new(peer, key, options)?)
    }

    fn new(parts: ClientParts, link: ServerConnection) -> Result<Client, Error> {
        let ClientParts {
            pd,
            peer,
            key,
            options,
            id,
        } = parts;
        Ok(Client {
            link,
            scratch: runtime::Buffer::new(&pd, SCRATCH_BYTES)?,
            pool: BufferPool::new(&pd, IDLE_BYTES_MAX),
            pd,
            peer,
            key,
            options,
            id,
            connection: 1,
            entries: VecDeque::new(),
            first_entry: 0,
            ordinary: 0,
            leased: HashMap::new(),
        })
    }

    /// Connects again as the same client, after the connection was lost or to fence requests in flight. When this returns, the
    /// server has revoked all mappings that this client had and finished its ordinary writes, so that no earlier request can
    /// take effect any more: requests that were not done may be done again. Returns the numbers of the data requests that were
    /// not done, oldest first.
    ///
    /// After an error it may be called again.
    pub fn reconnect(&mut self) -> Result<Vec<u64>, Error> {
        let establishing = Establishing::start(&self.pd, self.peer, &self.key, self.id)?;
        self.link = establishing.wait(self.options.wait)?;
        self.connection += 1;
        self.leased.clear();
        self.ordinary = 0;
        let entries = std::mem::take(&mut self.entries);
        self.first_entry += entries.len() as u64;
        Ok(entries
            .iter()
            .filter(|entry| !entry.is_done())
            .map(Entry::token)
            .collect())
    }

    /// Returns the server's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        self.pd.device()
    }

    /// Returns this client's name over several connections.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Maps a range of a region, for one writer or several readers; `length` 0 is the rest of it. `transfer` names an upload
    /// whose progress the server is to remember; 0 names none. Holders of conflicting leases are asked to release, and this
    /// call waits for them; but a conflicting upload disturbs nobody and fails. [`Client::map_as`] offers other choices.
    pub fn map(
        &mut self,
        region: &Name,
        access: push::Access,
        offset: u64,
        length: u64,
        transfer: u64,
    ) -> Result<Mapping, Error> {
        let conflict = if transfer == 0 {
            push::Conflict::Break
        } else {
            push::Conflict::Fail
        };
        let request = MapRequest {
            conflict,
            offset,
            length,
            transfer,
            ..MapRequest::new(access)
        };
        self.map_as(region, &request)
    }

    /// Maps a range of a region.
    pub fn map_as(&mut self, region: &Name, request: &MapRequest) -> Result<Mapping, Error> {
        let pending = self.start_map(region, request)?;
        loop {
            if let Some(mapping) = self.mapped(&pending)? {
                return Ok(mapping);
            }
            self.handle_next()?;
        }
    }

    /// Starts what [`Client::map_as`] does, and waits for nothing: [`Client::poll_map`] returns the mapping.
    pub fn start_map(&mut self, region: &Name, request: &MapRequest) -> Result<PendingMap, Error> {
        let MapRequest {
            access,
            share,
            conflict,
            offset,
            length,
            transfer,
        } = *request;
        let message = Message::Map {
            region: region.clone(),
            access,
            share,
            conflict,
            offset,
            length,
            transfer,
        };
        Ok(PendingMap {
            answer: self.start(message)?,
            connection: self.connection,
            region: region.clone(),
            access,
            offset,
            length,
        })
    }

    /// Returns the mapping, once, when the server has answered the request.
    fn mapped(&self, pending: &PendingMap) -> Result<Option<Mapping>, Error> {
        if pending.connection != self.connection {
            return Err(Error::MappingEnded {
                region: pending.region.clone(),
            });
        }
        let Ok(answer) = pending.answer.try_recv() else {
            return Ok(None);
        };
        let Message::Mapped {
            mapping,
            region_bytes,
            domain,
            placement,
            ways,
            extents,
        } = unless_refused(answer)?
        else {
            return Err(self.protocol("unexpected answer to Map"));
        };
        let sane =
            |e: &Extent| e.offset.checked_add(e.length).is_some() && e.va.checked_add(e.length).is_some();
        if !extents.iter().all(sane) {
            return Err(self.protocol("an extent wraps around"));
        }
        let (offset, length) = (pending.offset, pending.length);
        let direct = !extents.is_empty();
        let extents = match direct {
            true => extents,
            false => vec![Extent {
                offset,
                length: if length == 0 {
                    region_bytes.saturating_sub(offset)
                } else {
                    length
                },
                va: 0,
                rkey: RKey(0),
            }],
        };
        Ok(Some(Mapping {
            id: mapping,
            connection: self.connection,
            region: pending.region.clone(),
            access: pending.access,
            domain,
            placement,
            ways: self.ways_here(ways),
            region_bytes,
            extents,
            direct,
        }))
    }

    /// Returns the ways that this side's device supports too.
    fn ways_here(&self, mut ways: Ways) -> Ways {
        let flushes = Features::FLUSH_GLOBAL | Features::FLUSH_PERSISTENT;
        if !self.pd.device().features().contains(flushes) {
            ways.remove(Ways::FLUSH);
            ways.insert(Ways::SOFTWARE_FLUSH);
        }
        ways
    }

    /// Ends a mapping, after all requests in flight.
    pub fn unmap(&mut self, mapping: Mapping) -> Result<(), Error> {
        let Some(answer) = self.begin_unmap(&mapping)? else {
            return Ok(());
        };
        match self.wait_for(&answer)? {
            Message::Unmapped => Ok(()),
            _ => Err(self.protocol("unexpected answer to Unmap")),
        }
    }

    /// Does what [`Client::unmap`] does, and waits for nothing: the server acts on it before it acts on later requests.
    pub fn start_unmap(&mut self, mapping: Mapping) -> Result<(), Error> {
        self.begin_unmap(&mapping).map(drop)
    }

    /// Returns where the answer will be; `None` if the mapping ended with its connection.
    fn begin_unmap(&mut self, mapping: &Mapping) -> Result<Option<Answer>, Error> {
        if mapping.connection != self.connection {
            return Ok(None);
        }
        self.leased.remove(&mapping.id);
        self.start(Message::Unmap { mapping: mapping.id }).map(Some)
    }

    /// Queries a region and an upload into it; `transfer` 0 selects the upload that wrote last.
    pub fn stat(&mut self, region: &Name, transfer: u64) -> Result<push::Region, Error> {
        let request = Message::Stat {
            region: region.clone(),
            transfer,
        };
        match self.ask(request)? {
            Message::Region(region) => Ok(region),
            _ => Err(self.protocol("unexpected answer to Stat")),
        }
    }

    /// Queries all regions; returns those that fit a message, and the number of all.
    pub fn list(&mut self) -> Result<(Vec<push::Region>, u32), Error> {
        match self.ask(Message::List)? {
            Message::Regions { total, regions } => Ok((regions, total)),
            _ => Err(self.protocol("unexpected answer to List")),
        }
    }

    /// Returns the CRC-64/NVME of a range, as the server reads it.
    pub fn checksum(&mut self, region: &Name, offset: u64, length: u64) -> Result<u64, Error> {
        let request = Message::Checksum {
            region: region.clone(),
            offset,
            length,
        };
        match self.ask(request)? {
            Message::Checksummed { crc } => Ok(crc),
            _ => Err(self.protocol("unexpected answer to Checksum")),
        }
    }

    /// Allocates memory to write from and read into.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(Buffer(Arc::new(runtime::Buffer::new(&self.pd, bytes)?)))
    }

    /// Returns memory for a request that this client waits for.
    fn pooled(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(Buffer(Arc::new(self.pool.take(bytes)?)))
    }

    /// Says goodbye and ends the connection. The goodbye arrives behind the RDMA requests in flight, so that this waits for
    /// them: for a flush, as long as the server's disk takes. Dropping the client ends the connection at once.
    pub fn close(mut self) {
        // Disconnecting at once would overtake a goodbye that has not arrived.
        let _ = self.say_goodbye();
        self.link.connection.close(Duration::from_secs(1));
    }

    /// Sends a goodbye and waits until it has arrived. The error is a lost connection, of which the transport takes care: a
    /// server that is dead acknowledges nothing, and its retries are limited.
    fn say_goodbye(&mut self) -> Result<(), Error> {
        let slot = loop {
            match self.link.connection.take_slot() {
                Some(slot) => break slot,
                None => self.handle_next()?,
            }
        };
        self.link.last_request += 1;
        let goodbye = bytes_of(self.link.last_request, &Message::Goodbye);
        self.link.connection.send_reported(slot, &goodbye)?;
        while !self.link.has_left {
            self.handle_next()?;
        }
        Ok(())
    }

    /// Sends a request and waits for the answer.
    fn ask(&mut self, message: Message) -> Result<Message, Error> {
        let answer = self.start(message)?;
        self.wait_for(&answer)
    }

    fn wait_for(&mut self, answer: &Answer) -> Result<Message, Error> {
        loop {
            if let Ok(answer) = answer.try_recv() {
                return unless_refused(answer);
            }
            self.handle_next()?;
        }
    }

    /// Sends a request, and returns where its answer will be.
    fn start(&mut self, message: Message) -> Result<Answer, Error> {
        let (caller, answer) = mpsc::channel();
        self.tell(message, Asked::Caller(caller))?;
        Ok(answer)
    }

    /// Sends a message that has an answer, now or when there is room for it.
    fn tell(&mut self, message: Message, asked: Asked) -> Result<(), Error> {
        self.link.outbox.push_back((message, asked));
        self.send_outbox()
    }

    fn send_outbox(&mut self) -> Result<(), Error> {
        while self.link.connection.has_slot() {
            if let Some(number) = self.link.noticed.take() {
                self.link.send(number, &Message::Noticed)?;
                continue;
            }
            if self.link.asked.len() >= self.link.messages_max {
                break;
            }
            let Some((message, asked)) = self.link.outbox.pop_front() else {
                break;
            };
            self.link.last_request += 1;
            let request = self.link.last_request;
            self.link.asked.insert(request, asked);
            self.link.send(request, &message)?;
        }
        Ok(())
    }

    /// Handles what has arrived from the server, without waiting: above all, notices of leases that are being broken. Every
    /// call that waits does so too; only a caller that never waits needs this one.
    pub fn handle_notices(&mut self) -> Result<(), Error> {
        while let Some(wc) = self.link.cq.poll() {
            self.handle(&wc)?;
        }
        Ok(())
    }

    /// Waits for a completion, for the keep-alive time at most. Probes a server that is silent for so long, so that its death
    /// is noticed.
    fn poll(&mut self) -> Result<Option<WorkCompletion>, Error> {
        let link = &mut self.link;
        link.probe_at = Instant::now() + link.keepalive;
        let wc = wait_until(&link.cq, link.probe_at, self.options.wait)?;
        if wc.is_none() {
            self.probe_if_due()?;
        }
        Ok(wc)
    }

    fn probe_if_due(&mut self) -> Result<(), Error> {
        let (link, now) = (&mut self.link, Instant::now());
        if now >= link.probe_at {
            link.connection.probe()?;
            link.probe_at = now + link.keepalive;
        }
        Ok(())
    }

    fn handle(&mut self, wc: &WorkCompletion) -> Result<(), Error> {
        let completed = self.link.connection.handle(wc);
        match completed.map_err(|status| failed(self.peer, status))? {
            Completed::Message { bytes, .. } => {
                let (request, message) = parse(self.peer, &bytes)?;
                self.handle_message(request, message)?;
            }
            Completed::Operation(entry) => self.entry_done(entry)?,
            Completed::Sent(_) => self.link.has_left = true,
            Completed::Nothing => {}
        }
        self.send_outbox()
    }

    fn handle_message(&mut self, request: u64, message: Message) -> Result<(), Error> {
        let message = match message {
            Message::Notice { changes } => {
                self.link.noticed = Some(request);
                return changes.iter().try_for_each(|change| self.changed(change));
            }
            answer => answer,
        };
        match self.link.asked.remove(&request) {
            Some(Asked::Caller(caller)) => {
                // A notice about the mapping may arrive before the caller looks.
                if let Message::Mapped { mapping, .. } = message {
                    self.leased_now(mapping);
                }
                let _ = caller.send(message);
            }
            Some(Asked::Entry(entry, received)) => self.entry_answered(entry, received, message)?,
            Some(Asked::Release(mapping)) => self.released(mapping),
            None => return Err(self.protocol("an answer without a request")),
        }
        Ok(())
    }

    fn protocol(&self, why: &str) -> Error {
        protocol(self.peer, why)
    }
}

impl ServerConnection {
    fn new(connection: MessageConnection, cq: CompletionQueue, keepalive: Duration) -> ServerConnection {
        ServerConnection {
            connection,
            cq,
            outbox: VecDeque::new(),
            asked: HashMap::new(),
            messages_max: 1,
            noticed: None,
            has_left: false,
            last_request: 0,
            keepalive,
            probe_at: Instant::now() + keepalive,
        }
    }

    /// Sends a message. There must be a free slot.
    fn send(&mut self, request: u64, message: &Message) -> Result<(), Error> {
        let slot = self.connection.take_slot().ok_or(PostError::QueueFull)?;
        Ok(self.connection.send(slot, &bytes_of(request, message))?)
    }
}

/// Waits for a completion until a time.
fn wait_until(cq: &CompletionQueue, until: Instant, wait: Wait) -> Result<Option<WorkCompletion>, Error> {
    if wait == Wait::Blocked {
        return Ok(cq.wait(until.saturating_duration_since(Instant::now()))?);
    }
    let mut polls = 0u32;
    loop {
        if let Some(wc) = cq.poll() {
            return Ok(Some(wc));
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(1024) && Instant::now() >= until {
            return Ok(None);
        }
    }
}

fn bytes_of(request: u64, message: &Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(256);
    message.emit(request, &mut bytes);
    bytes
}

/// Returns a message of the server and the number of its request. A goodbye is an error.
fn parse(peer: SocketAddr, bytes: &[u8]) -> Result<(u64, Message), Error> {
    match Message::parse(bytes) {
        Ok((_, Message::Goodbye)) => Err(lost(peer, "the server closed the connection")),
        Ok(parsed) => Ok(parsed),
        Err(error) => Err(protocol(peer, &error.to_string())),
    }
}

fn unless_refused(answer: Message) -> Result<Message, Error> {
    match answer {
        Message::Error { code, text } => Err(Error::Refused { code, text }),
        answer => Ok(answer),
    }
}

/// Returns the error of a connection that has ended with a status.
fn failed(peer: SocketAddr, status: Status) -> Error {
    let why = match status {
        Status::Flushed => "the server disconnected",
        Status::RetryExceeded => "the server no longer answers",
        Status::RemoteAccess => {
            "the server refused an access because the mapping ended or the region's file was truncated"
        }
        Status::RemoteOperation => {
            "the region's file failed at the server: unacknowledged bytes are not durable"
        }
        _ => return lost(peer, &status.to_string()),
    };
    lost(peer, why)
}

fn lost(peer: SocketAddr, why: &str) -> Error {
    Error::Lost {
        peer,
        why: why.into(),
    }
}

fn protocol(peer: SocketAddr, why: &str) -> Error {
    Error::Protocol {
        peer,
        why: why.into(),
    }
}
