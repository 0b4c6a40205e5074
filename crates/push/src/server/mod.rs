//! The server: one thread for all its sessions, which sleeps on descriptors; the data path is the device's alone.

mod session;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Access, AnonymousMemory, CompletionQueue, ConnectError, ConnectParams, Connection, ConnectionRequest,
    CreateError, Device, ListenError, Listener, Memory, MemoryRegion, OpenError, Operation, ProtectionDomain,
    QpOptions, QueuePair, RKey, RecvRequest, SendFlags, SendRequest, SgeList, Status, Target, WorkCompletion,
};
use rdmux_wire::push::{self, ErrorCode, Extent, MESSAGE_LEN_MAX, Message};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

pub use self::session::{Action, EndReason, Map, Session, Shared};
use crate::crc::crc64_of;
use crate::key::{Key, random_nonce};
use crate::region::{Mapped, Region};

/// A client has so long to show that it has the key.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// An ending connection has so long to take the last message.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that failed stays so long before its client is told to disconnect, so that the NAK that says why comes first.
const LINGER: Duration = Duration::from_millis(200);
/// Clients that have not shown yet that they have the key.
const HALF_OPEN_MAX: usize = 64;
/// Clients at a time, on one address.
const CONNECTIONS_MAX: usize = 1024;
/// Mappings of a client.
const MAPPINGS_MAX: u32 = 64;
/// Messages of a client that are under way at a time. Each has a slot, and no receive is posted to a slot before the answer
/// to its last message has arrived: a client cannot make the server hold more.
const SLOTS: usize = 4;
/// Work requests that a connection may have completions for: receives, sends, a probe.
const COMPLETIONS_PER_CONNECTION: usize = 2 * SLOTS + 1;

const SEND: u64 = 1 << 32;
const PROBE: u64 = 2 << 32;

/// How a server is made.
#[derive(Debug)]
pub struct Config {
    /// Addresses and ports.
    pub listen: Vec<SocketAddr>,
    /// The key that clients need.
    pub key: Key,
    /// What is offered.
    pub regions: Vec<Region>,
    /// A client that is silent for so long is taken for dead.
    pub keepalive: Duration,
    /// How the devices are opened.
    pub device: rdmux_verbs::Options,
}

/// Why a server could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The device did not open.
    #[error("cannot listen on {address}: {source}")]
    Open {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: OpenError,
    },
    /// The port is taken.
    #[error(
        "cannot listen on {address}: {source} (choose another port with --listen ADDR:PORT, or end the other server)"
    )]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: ListenError,
    },
    /// Two regions have one name.
    #[error("two regions are named {0}: name one of them with ,name=NAME")]
    SameName(push::Name),
    /// Something else.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What happens, for people to read.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client connected and has the key.
    Connected {
        /// Number of the client.
        client: u64,
        /// Where from.
        peer: IpAddr,
    },
    /// A client mapped.
    Mapped {
        /// Number of the client.
        client: u64,
        /// Number of the mapping.
        mapping: u64,
        /// What.
        region: push::Name,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// What for.
        access: push::Access,
    },
    /// A client ended a mapping.
    Unmapped {
        /// Number of the client.
        client: u64,
        /// Number of the mapping.
        mapping: u64,
    },
    /// A connection ended, and its mappings with it.
    Ended {
        /// Number of the client.
        client: u64,
        /// Where from.
        peer: IpAddr,
        /// Why.
        reason: EndReason,
        /// Mappings that ended with it.
        mappings: usize,
    },
    /// A connection was refused.
    Refused {
        /// Where from.
        peer: IpAddr,
        /// Why.
        why: String,
    },
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Event::Connected { client, peer } => write!(f, "client {client} connected from {peer}"),
            Event::Mapped {
                client,
                mapping,
                region,
                offset,
                length,
                access,
            } => {
                let what = match (
                    access.contains(push::Access::READ),
                    access.contains(push::Access::WRITE),
                ) {
                    (true, true) => "read and write",
                    (false, true) => "write",
                    _ => "read",
                };
                write!(
                    f,
                    "client {client} maps {region}, {length} bytes at {offset}, to {what} (mapping {mapping})"
                )
            }
            Event::Unmapped { client, mapping } => write!(f, "client {client} unmaps mapping {mapping}"),
            Event::Ended {
                client,
                peer,
                reason,
                mappings,
            } => {
                write!(f, "client {client} from {peer} ended: {reason}")?;
                match mappings {
                    0 => Ok(()),
                    1 => f.write_str("; its mapping ended too"),
                    n => write!(f, "; its {n} mappings ended too"),
                }
            }
            Event::Refused { peer, why } => write!(f, "connection from {peer} refused: {why}"),
        }
    }
}

/// Ends a server from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(mpsc::Sender<Done>, Arc<OwnedFd>);

impl Stopper {
    /// Makes [`Server::run`] return.
    pub fn stop(&self) {
        let _ = self.0.send(Done::Stop);
        wake(&self.1);
    }
}

fn wake(fd: &OwnedFd) {
    // Fails only when it was woken 2^64 times without anybody looking.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// What comes back to the server's thread from others.
#[derive(Debug)]
enum Done {
    Stop,
    Checksum {
        key: ConnectionKey,
        client: u64,
        slot: usize,
        request: u64,
        result: Result<u64, rdmux_verbs::Fault>,
    },
}

#[derive(Debug)]
struct ChecksumJob {
    key: ConnectionKey,
    client: u64,
    slot: usize,
    request: u64,
    region: Arc<Region>,
    offset: u64,
    length: u64,
}

/// Which endpoint, and the QP's number there.
type ConnectionKey = (usize, u32);

#[derive(Debug)]
struct Endpoint {
    address: SocketAddr,
    device: Device,
    cq: CompletionQueue,
    listener: Listener,
    connections: usize,
}

/// A mapping; dropped, it is no longer reached.
#[derive(Debug)]
struct Mapping {
    _mr: MemoryRegion,
    memory: Arc<Mapped>,
    offset: u64,
    length: u64,
    transfer: u64,
}

/// The fields are in the order in which they have to go.
#[derive(Debug)]
struct Client {
    number: u64,
    session: Session,
    mappings: HashMap<u64, Mapping>,
    connection: Connection,
    qp: QueuePair,
    slots: Arc<AnonymousMemory>,
    slots_mr: MemoryRegion,
    pd: ProtectionDomain,
    /// The handshake, or the last message, must be done by then.
    deadline: Option<Instant>,
    /// The end, once the last message has left.
    closing: Option<EndReason>,
    probing: bool,
}

/// A server. [`Server::bind`], then [`Server::run`].
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    endpoints: Vec<Endpoint>,
    clients: HashMap<ConnectionKey, Client>,
    /// Failed connections, and when they go. The oldest is first.
    lingering: VecDeque<(Instant, Client)>,
    clients_so_far: u64,
    keepalive: Duration,
    /// When live clients are probed next.
    next_probe: Instant,
    wake: Arc<OwnedFd>,
    done_tx: mpsc::Sender<Done>,
    done_rx: mpsc::Receiver<Done>,
    checksums: mpsc::Sender<ChecksumJob>,
    events: Vec<Event>,
}

impl Server {
    /// Opens the devices and listens.
    pub fn bind(config: Config) -> Result<Server, ServeError> {
        for (at, region) in config.regions.iter().enumerate() {
            if config.regions[..at]
                .iter()
                .any(|other| other.name() == region.name())
            {
                return Err(ServeError::SameName(region.name().clone()));
            }
        }
        let shared = Arc::new(Shared {
            key: config.key,
            regions: config.regions.into_iter().map(Arc::new).collect(),
            keepalive_ms: config.keepalive.as_millis().try_into().unwrap_or(u32::MAX),
            mappings_max: MAPPINGS_MAX,
        });
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for address in config.listen {
            // One device serves several ports of an address.
            let known = endpoints.iter().find(|e| e.address.ip() == address.ip());
            let device = match known {
                Some(endpoint) => endpoint.device.clone(),
                None => Device::open_with(address.ip(), config.device)
                    .map_err(|source| ServeError::Open { address, source })?,
            };
            let depth = CONNECTIONS_MAX * COMPLETIONS_PER_CONNECTION;
            let cq = device.create_cq(depth as u32)?;
            let listener = device
                .listen(address.port())
                .map_err(|source| ServeError::Listen { address, source })?;
            endpoints.push(Endpoint {
                address,
                device,
                cq,
                listener,
                connections: 0,
            });
        }
        let wake =
            Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(io::Error::from)?);
        let (done_tx, done_rx) = mpsc::channel();
        let checksums = checksum_thread(done_tx.clone(), wake.clone())?;
        Ok(Server {
            shared,
            endpoints,
            clients: HashMap::new(),
            lingering: VecDeque::new(),
            clients_so_far: 0,
            keepalive: config.keepalive,
            next_probe: Instant::now(),
            wake,
            done_tx,
            done_rx,
            checksums,
            events: Vec::new(),
        })
    }

    /// What is offered.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.shared.regions
    }

    /// Ends this server from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.done_tx.clone(), self.wake.clone())
    }

    /// Serves until stopped. `log` hears of what happens.
    pub fn run(mut self, mut log: impl FnMut(&Event)) -> io::Result<()> {
        self.next_probe = Instant::now() + self.keepalive / 2;
        let mut stop = false;
        while !stop {
            for at in 0..self.endpoints.len() {
                self.accept(at);
                // Waiting for no time arms the queue and looks once more: nothing is missed.
                while let Some(wc) = self.endpoints[at].cq.wait(Duration::ZERO)? {
                    self.completed(at, &wc);
                }
            }
            while let Ok(done) = self.done_rx.try_recv() {
                match done {
                    Done::Stop => stop = true,
                    Done::Checksum {
                        key,
                        client,
                        slot,
                        request,
                        result,
                    } => self.checksummed(key, client, slot, request, result),
                }
            }
            let now = Instant::now();
            let next = self.handle_timers(now);
            for event in self.events.drain(..) {
                log(&event);
            }
            if !stop {
                self.sleep(next.saturating_duration_since(now))?;
            }
        }
        for key in self.clients.keys().copied().collect::<Vec<_>>() {
            self.end(key, EndReason::Shutdown);
        }
        for event in self.events.drain(..) {
            log(&event);
        }
        Ok(())
    }

    fn sleep(&self, timeout: Duration) -> io::Result<()> {
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        for endpoint in &self.endpoints {
            fds.push(PollFd::new(&endpoint.cq, PollFlags::IN));
            fds.push(PollFd::new(&endpoint.listener, PollFlags::IN));
        }
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let woken: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let fds = std::iter::once(self.wake.as_fd()).chain(
            self.endpoints
                .iter()
                .flat_map(|e| [e.cq.as_fd(), e.listener.as_fd()]),
        );
        for (fd, woken) in fds.zip(woken) {
            if woken {
                let _ = rustix::io::read(fd, &mut [0u8; 8]);
            }
        }
        Ok(())
    }

    fn accept(&mut self, at: usize) {
        while let Some(request) = self.endpoints[at].listener.accept(Duration::ZERO) {
            let peer = request.peer();
            let half_open = self.clients.values().filter(|c| !c.session.is_ready()).count();
            let refusal = if self.endpoints[at].connections >= CONNECTIONS_MAX {
                Some("too many connections")
            } else if half_open >= HALF_OPEN_MAX {
                Some("too many clients that have not shown their key")
            } else {
                None
            };
            if let Some(why) = refusal {
                request.reject(why.as_bytes());
                self.events.push(Event::Refused {
                    peer,
                    why: why.into(),
                });
                continue;
            }
            if let Err(why) = self.accept_one(at, request) {
                self.events.push(Event::Refused {
                    peer,
                    why: why.to_string(),
                });
            }
        }
    }

    fn accept_one(
        &mut self,
        at: usize,
        mut request: ConnectionRequest,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let nonce = random_nonce()?;
        let endpoint = &mut self.endpoints[at];
        // A domain for each client: no key of one is good for another.
        let pd = endpoint.device.alloc_pd();
        let mut options = QpOptions::new(&endpoint.cq);
        options.max_send_wr = SLOTS as u32 + 1;
        options.max_recv_wr = SLOTS as u32;
        let qp = pd.create_qp(&options)?;
        let slots = Arc::new(AnonymousMemory::new(2 * SLOTS * MESSAGE_LEN_MAX)?);
        let slots_mr = pd.reg_mr_all(slots.clone(), 0, Access::LOCAL_WRITE)?;
        let prepare = || {
            for slot in 0..SLOTS {
                qp.post_recv(receive(&slots_mr, slot)).map_err(io::Error::other)?;
            }
            Ok::<(), ConnectError>(())
        };
        let connection = request.accept_after(&qp, &ConnectParams::default(), &[], prepare)?;
        self.clients_so_far += 1;
        endpoint.connections += 1;
        let client = Client {
            number: self.clients_so_far,
            session: Session::new(self.shared.clone(), nonce),
            mappings: HashMap::new(),
            connection,
            slots,
            slots_mr,
            pd,
            deadline: Some(Instant::now() + HANDSHAKE_TIMEOUT),
            closing: None,
            probing: false,
            qp,
        };
        self.clients.insert((at, client.qp.qpn().value()), client);
        Ok(())
    }

    fn completed(&mut self, at: usize, wc: &WorkCompletion) {
        let key = (at, wc.qpn.value());
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if wc.status != Status::Success {
            let reason = why_ended(client, wc.status);
            return self.end(key, reason);
        }
        if wc.wr_id == PROBE {
            client.probing = false;
        } else if wc.wr_id & SEND != 0 {
            let slot = (wc.wr_id & !SEND) as usize;
            if let Some(reason) = client.closing.take() {
                self.end(key, reason);
            } else if client.qp.post_recv(receive(&client.slots_mr, slot)).is_err() {
                self.end(key, EndReason::Failed("connection lost".into()));
            }
        } else {
            self.received(key, wc.wr_id as usize, wc.byte_len as usize);
        }
    }

    fn received(&mut self, key: ConnectionKey, slot: usize, bytes: usize) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if client.closing.is_some() {
            return;
        }
        let mut message = [0; MESSAGE_LEN_MAX];
        let message = &mut message[..bytes.min(MESSAGE_LEN_MAX)];
        if client
            .slots
            .read((slot * MESSAGE_LEN_MAX) as u64, message)
            .is_err()
        {
            return;
        }
        let was_ready = client.session.is_ready();
        let (request, action) = client.session.handle(message);
        if !was_ready && client.session.is_ready() {
            client.deadline = None;
            self.events.push(Event::Connected {
                client: client.number,
                peer: client.connection.peer(),
            });
        }
        match action {
            Action::Send(answer) => self.send(key, slot, request, &answer),
            Action::Map(map) => {
                let made = self.map(key, &map);
                let Some(client) = self.clients.get_mut(&key) else {
                    return;
                };
                let answer = client.session.mapped(&map, made);
                self.send(key, slot, request, &answer);
            }
            Action::Unmap(mapping) => {
                client.mappings.remove(&mapping);
                let event = Event::Unmapped {
                    client: client.number,
                    mapping,
                };
                self.events.push(event);
                self.send(key, slot, request, &Message::Unmapped);
            }
            Action::Checksum {
                region,
                offset,
                length,
            } => {
                let job = ChecksumJob {
                    key,
                    client: client.number,
                    slot,
                    request,
                    region,
                    offset,
                    length,
                };
                // The thread lives as long as the server.
                let _ = self.checksums.send(job);
            }
            Action::End(None, reason) => self.end(key, reason),
            Action::End(Some(last), reason) => {
                client.closing = Some(reason);
                client.deadline = Some(Instant::now() + CLOSING_TIMEOUT);
                self.send(key, slot, request, &last);
            }
        }
    }

    /// Registers a mapping.
    fn map(&mut self, key: ConnectionKey, map: &Map) -> Result<Extent, (ErrorCode, String)> {
        let write = map.access.contains(push::Access::WRITE);
        if write && map.transfer != 0 {
            self.claim(key, map)?;
        }
        let Some(client) = self.clients.get_mut(&key) else {
            return Err((ErrorCode::Protocol, String::new()));
        };
        let memory = map.region.open(write, map.offset, map.length, map.transfer);
        let mut access = Access::empty();
        access.set(Access::REMOTE_READ, map.access.contains(push::Access::READ));
        if write {
            access |= Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::for_flush(map.region.placement());
        }
        // The offset in the region is the address, so that both ends speak of the same numbers.
        let mr = client
            .pd
            .reg_mr(memory.clone(), map.offset, map.length, map.offset, access)
            .map_err(|error| (ErrorCode::NotSupported, error.to_string()))?;
        let extent = Extent {
            offset: map.offset,
            length: map.length,
            va: mr.iova(),
            rkey: RKey(mr.rkey().0),
        };
        self.events.push(Event::Mapped {
            client: client.number,
            mapping: map.mapping,
            region: map.region.name().clone(),
            offset: map.offset,
            length: map.length,
            access: map.access,
        });
        let mapping = Mapping {
            _mr: mr,
            memory,
            offset: map.offset,
            length: map.length,
            transfer: map.transfer,
        };
        client.mappings.insert(map.mapping, mapping);
        Ok(extent)
    }

    /// Gives an upload its range. Another connection that wrote for the same upload is ended: it is a client that died, or
    /// one that must not write any more. Another upload keeps its range.
    fn claim(&mut self, key: ConnectionKey, map: &Map) -> Result<(), (ErrorCode, String)> {
        let mut predecessors = Vec::new();
        for (other_key, other) in &self.clients {
            for mapping in other.mappings.values() {
                let same_region = Arc::ptr_eq(mapping.memory.region(), &map.region);
                let overlaps =
                    mapping.offset < map.offset + map.length && map.offset < mapping.offset + mapping.length;
                if !same_region || !overlaps || mapping.transfer == 0 || *other_key == key {
                    continue;
                }
                if mapping.transfer != map.transfer {
                    let text = format!(
                        "another upload (client {}) is writing to region {} there: wait until it ends; one whose client \
                         died ends within {} s",
                        other.number,
                        map.region.name(),
                        self.keepalive.as_secs_f32()
                    );
                    return Err((ErrorCode::Busy, text));
                }
                predecessors.push(*other_key);
            }
        }
        for predecessor in predecessors {
            self.end(predecessor, EndReason::TakenOver);
        }
        Ok(())
    }

    fn checksummed(
        &mut self,
        key: ConnectionKey,
        number: u64,
        slot: usize,
        request: u64,
        result: Result<u64, rdmux_verbs::Fault>,
    ) {
        // The client may have gone, and another have its queue pair's number.
        if self
            .clients
            .get(&key)
            .is_none_or(|client| client.number != number)
        {
            return;
        }
        let answer = match result {
            Ok(crc) => Message::Checksummed { crc },
            Err(fault) => Message::Error {
                code: ErrorCode::Io,
                text: format!("the region could not be read: {fault}"),
            },
        };
        self.send(key, slot, request, &answer);
    }

    fn send(&mut self, key: ConnectionKey, slot: usize, request: u64, message: &Message) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let mut bytes = Vec::with_capacity(256);
        message.emit(request, &mut bytes);
        let at = ((SLOTS + slot) * MESSAGE_LEN_MAX) as u64;
        let sent = client.slots.write(at, &bytes).is_ok()
            && client
                .qp
                .post_send(SendRequest {
                    wr_id: SEND | slot as u64,
                    operation: Operation::Send { imm: None },
                    sges: client.slots_mr.sge(at, bytes.len() as u32).into(),
                    flags: SendFlags::SIGNALED,
                    to: Target::Connected,
                })
                .is_ok();
        if !sent {
            self.end(key, EndReason::Failed("connection lost".into()));
        }
    }

    /// Does what is due; returns when it wants to be called again.
    fn handle_timers(&mut self, now: Instant) -> Instant {
        let mut late = Vec::new();
        for (key, client) in &mut self.clients {
            if client.deadline.is_some_and(|deadline| deadline <= now) {
                late.push((*key, client.closing.take().unwrap_or(EndReason::HandshakeTimeout)));
            }
        }
        if self.next_probe <= now {
            // All at once, so that the machine wakes up once. A WRITE of nothing is answered by the peer's NIC alone; who has
            // not answered the last one by now was silent for half of the keep-alive time, and before it for no more than that.
            for (key, client) in self.clients.iter_mut().filter(|(_, c)| c.session.is_ready()) {
                if client.probing {
                    late.push((*key, EndReason::Dead));
                    continue;
                }
                client.probing = true;
                if client.qp.post_send(probe()).is_err() {
                    late.push((*key, EndReason::Failed("connection lost".into())));
                }
            }
            self.next_probe = now + self.keepalive / 2;
        }
        for (key, reason) in late {
            self.end(key, reason);
        }
        while self.lingering.front().is_some_and(|(until, _)| *until <= now) {
            self.lingering.pop_front();
        }
        let deadlines = self.clients.values().filter_map(|client| client.deadline);
        let lingering = self.lingering.front().map(|(until, _)| *until);
        let next = deadlines.chain(lingering).min();
        next.map_or(self.next_probe, |next| next.min(self.next_probe))
    }

    fn end(&mut self, key: ConnectionKey, reason: EndReason) {
        let Some(mut client) = self.clients.remove(&key) else {
            return;
        };
        self.endpoints[key.0].connections -= 1;
        // The mappings first: from here on nothing of the client reaches a region.
        let mappings = client.mappings.len();
        client.mappings.clear();
        let failed = matches!(reason, EndReason::Failed(_));
        self.events.push(Event::Ended {
            client: client.number,
            peer: client.connection.peer(),
            reason,
            mappings,
        });
        if failed && self.lingering.len() < CONNECTIONS_MAX {
            self.lingering.push_back((Instant::now() + LINGER, client));
        }
    }
}

fn probe() -> SendRequest {
    SendRequest {
        wr_id: PROBE,
        operation: Operation::Write {
            va: 0,
            rkey: RKey(0),
            imm: None,
        },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

fn receive(slots: &MemoryRegion, slot: usize) -> RecvRequest {
    RecvRequest {
        wr_id: slot as u64,
        sges: slots
            .sge((slot * MESSAGE_LEN_MAX) as u64, MESSAGE_LEN_MAX as u32)
            .into(),
    }
}

/// What ended a connection whose work requests fail with `status`.
fn why_ended(client: &Client, status: Status) -> EndReason {
    let fault = client.mappings.values().find_map(|mapping| {
        let fault = mapping.memory.fault()?;
        Some((mapping.memory.region().name().clone(), fault))
    });
    if let Some((region, fault)) = fault {
        return EndReason::Failed(format!("region {region} failed: {fault}"));
    }
    let status = match status {
        Status::Flushed => client.qp.error(),
        other => Some(other),
    };
    match status {
        None if !client.session.is_ready() => EndReason::LeftHandshake,
        None => EndReason::Disconnected,
        Some(Status::RetryExceeded) => EndReason::Dead,
        Some(Status::RemoteAccess) => EndReason::Failed("access outside of its mappings".into()),
        Some(other) => EndReason::Failed(other.to_string()),
    }
}

/// A thread that reads regions and sums them up, so that no session waits for it.
fn checksum_thread(done: mpsc::Sender<Done>, wake_fd: Arc<OwnedFd>) -> io::Result<mpsc::Sender<ChecksumJob>> {
    let (tx, rx) = mpsc::channel::<ChecksumJob>();
    thread::Builder::new().name("checksum".into()).spawn(move || {
        while let Ok(job) = rx.recv() {
            let result = crc64_of(&**job.region.memory(), job.offset, job.length);
            let answer = Done::Checksum {
                key: job.key,
                client: job.client,
                slot: job.slot,
                request: job.request,
                result,
            };
            if done.send(answer).is_err() {
                return;
            }
            wake(&wake_fd);
        }
    })?;
    Ok(tx)
}
