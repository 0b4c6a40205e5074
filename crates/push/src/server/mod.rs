//! The server: one thread for all its sessions, which looks or sleeps as [`rdmux_verbs::waiting`] has it; the data path is the
//! device's alone.

mod control;
mod drive;
mod event;
mod lease;
mod requests;
mod session;
mod watch;
mod work;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Access, AnonymousMemory, CompletionQueue, ConnectError, ConnectParams, Connection, ConnectionRequest,
    CreateError, Device, ListenError, Listener, Memory, MemoryRegion, OpenError, Operation, ProtectionDomain,
    QpOptions, QueuePair, RKey, RecvRequest, SendFlags, SendRequest, SgeList, Status, Target, WorkCompletion,
};
use rdmux_wire::push::{self, Change, MESSAGE_LEN_MAX, Message};
use rustix::event::{EventfdFlags, eventfd};

pub use self::control::{Control, Exclusive, ServerEnded};
use self::drive::Waiting;
pub use self::event::Event;
pub use self::lease::{Answer, Claim, Effect, Kind, LeaseId, Leases};
use self::requests::{Pending, Welcoming};
pub use self::session::{Action, EndReason, Map, Ordinary, Session, Shared};
use self::watch::Watches;
use self::work::{Finished, Workers};
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
/// Mappings that one client may have, unless [`Config::mappings_max`] says otherwise.
pub const MAPPINGS_MAX_DEFAULT: u32 = 16384;
/// Messages of a client that are under way at a time. Each has a slot, and no receive is posted to a slot before the answer
/// to its last message has arrived: a client cannot make the server hold more.
const SLOTS: usize = 16;
/// Of those, such as need an answer: one is left for a notice's receipt, and one for a goodbye.
const MESSAGES_MAX: u16 = SLOTS as u16 - 2;
/// Work requests that a connection may have completions for: receives, sends, a notice, a probe.
const COMPLETIONS_PER_CONNECTION: usize = 2 * SLOTS + 2;
/// A holder has so long to let go of a lease that somebody else needs. MS-SMB2 3.3.2.5 has the same; it is less than the 45 s
/// after which Linux takes a file lease away (proc_sys_fs(5), `lease-break-time`).
pub const BREAK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(35);

const SEND: u64 = 1 << 32;
const PROBE: u64 = 2 << 32;
const NOTICE: u64 = 3 << 32;

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
    /// A holder has so long to let go of a lease that somebody else needs; then it is taken away.
    pub break_timeout: Duration,
    /// Mappings that one client may have.
    pub mappings_max: u32,
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
    Finished(Finished),
    Local(control::Local),
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

/// A mapping. Without its region and lease it is no longer reached, and can only be flushed.
#[derive(Debug)]
struct Mapping {
    live: Option<(MemoryRegion, LeaseId)>,
    memory: Arc<Mapped>,
    /// Number of the region.
    number: usize,
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
    /// Who it is over several connections; zeros when it has not said.
    id: [u8; 16],
    /// What it is to be told of its mappings: of each the last that happened.
    changes: BTreeMap<u64, Change>,
    /// The notice that it has not taken yet.
    notice: Option<u64>,
    notices_so_far: u64,
    /// It has ended: for its jobs that take long.
    gone: Arc<AtomicBool>,
}

/// A server. [`Server::bind`], then [`Server::run`].
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    endpoints: Vec<Endpoint>,
    /// The one that is looked at next.
    next_endpoint: usize,
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
    workers: Workers,
    leases: Leases,
    carrying_out: bool,
    /// Mappings by their lease.
    leased: HashMap<LeaseId, (ConnectionKey, u64)>,
    /// What waits for a lease.
    pending: HashMap<LeaseId, Pending>,
    /// Clients whose earlier connections' jobs are not done.
    welcoming: Vec<Welcoming>,
    /// Local operations by their number.
    locals: HashMap<u64, LeaseId>,
    locals_so_far: u64,
    watches: Watches,
    events: Vec<Event>,
    waiting: Waiting,
    stop: bool,
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
            mappings_max: config.mappings_max,
            messages_max: MESSAGES_MAX,
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
        let mut events = Vec::new();
        let watches = Watches::begin(&shared.regions, &done_tx, &wake, &mut events);
        let workers = Workers::new(done_tx.clone(), wake.clone());
        Ok(Server {
            shared,
            endpoints,
            next_endpoint: 0,
            clients: HashMap::new(),
            lingering: VecDeque::new(),
            clients_so_far: 0,
            keepalive: config.keepalive,
            next_probe: Instant::now(),
            wake,
            done_tx,
            done_rx,
            workers,
            leases: Leases::new(config.break_timeout),
            carrying_out: false,
            leased: HashMap::new(),
            pending: HashMap::new(),
            welcoming: Vec::new(),
            locals: HashMap::new(),
            locals_so_far: 0,
            watches,
            events,
            waiting: Waiting::new(config.device.waiting),
            stop: false,
        })
    }

    /// What is offered.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.shared.regions
    }

    /// Works on the regions from elsewhere.
    pub fn control(&self) -> Control {
        Control {
            server: self.done_tx.clone(),
            wake: self.wake.clone(),
        }
    }

    /// Ends this server from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.done_tx.clone(), self.wake.clone())
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
        options.max_send_wr = SLOTS as u32 + 2;
        options.max_recv_wr = SLOTS as u32;
        let qp = pd.create_qp(&options)?;
        let slots = Arc::new(AnonymousMemory::new((2 * SLOTS + 1) * MESSAGE_LEN_MAX)?);
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
            id: [0; 16],
            changes: BTreeMap::new(),
            notice: None,
            notices_so_far: 0,
            gone: Arc::default(),
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
        } else if wc.wr_id == NOTICE {
            // Its place is free when the client says that it has taken it.
        } else if wc.wr_id & SEND != 0 {
            let slot = (wc.wr_id & !SEND) as usize;
            if let Some(reason) = client.closing.take() {
                self.end(key, reason);
            } else {
                self.receive_again(key, slot);
            }
        } else {
            self.received(key, wc.wr_id as usize, wc.byte_len as usize);
        }
    }

    fn send(&mut self, key: ConnectionKey, slot: usize, request: u64, message: &Message) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if !client.emit(SLOTS + slot, SEND | slot as u64, request, message) {
            self.end(key, EndReason::Failed("connection lost".into()));
        }
    }

    fn receive_again(&mut self, key: ConnectionKey, slot: usize) {
        let Some(client) = self.clients.get(&key) else {
            return;
        };
        if client.qp.post_recv(receive(&client.slots_mr, slot)).is_err() {
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
        self.leases.handle_timeout(now);
        self.carry_out();
        while self.lingering.front().is_some_and(|(until, _)| *until <= now) {
            self.lingering.pop_front();
        }
        let deadlines = self.clients.values().filter_map(|client| client.deadline);
        let lingering = self.lingering.front().map(|(until, _)| *until);
        let next = deadlines.chain(lingering).chain(self.leases.next_timeout()).min();
        next.map_or(self.next_probe, |next| next.min(self.next_probe))
    }

    fn end(&mut self, key: ConnectionKey, reason: EndReason) {
        let Some(mut client) = self.clients.remove(&key) else {
            return;
        };
        self.endpoints[key.0].connections -= 1;
        client.gone.store(true, Ordering::Relaxed);
        // The mappings first: from here on nothing of the client reaches a region, and only then may others.
        let live = client
            .mappings
            .values_mut()
            .filter_map(|mapping| mapping.live.take());
        let mut mappings = 0;
        for (_, lease) in live {
            self.leased.remove(&lease);
            mappings += 1;
        }
        client.mappings.clear();
        self.pending.retain(|_, pending| !pending.is_of(client.number));
        self.welcoming
            .retain(|welcoming| welcoming.client != client.number);
        self.leases.owner_ended(Instant::now(), client.number);
        self.carry_out();
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

impl Client {
    /// Sends a message from a place among the slots.
    fn emit(&self, place: usize, wr_id: u64, request: u64, message: &Message) -> bool {
        let mut bytes = Vec::with_capacity(256);
        message.emit(request, &mut bytes);
        let at = (place * MESSAGE_LEN_MAX) as u64;
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: self.slots_mr.sge(at, bytes.len() as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.slots.write(at, &bytes).is_ok() && self.qp.post_send(request).is_ok()
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
