//! The server: one thread for all its sessions, which polls or sleeps according to [`rdmux_verbs::waiting`]; the data path
//! belongs to the device alone. [`Service`] makes the decisions; this module carries them out.

mod control;
mod drive;
mod event;
mod lease;
mod metrics;
mod probes;
mod requests;
mod service;
mod session;
mod watch;
mod work;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdmux_memory::{AnonymousMemory, FileWatch};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectParams, Connection, ConnectionRequest, CreateError, Device,
    Features, ListenError, Listener, Memory, MemoryRegion, OpenError, Operation, ProtectionDomain, QpOptions,
    QueuePair, RKey, Reach, RecvRequest, RegisterError, SendFlags, SendRequest, SgeList, Status, Target,
    WorkCompletion,
};
use rdmux_wire::push::{self, Extent, MESSAGE_LEN_MAX, Message, Ways};
use rustix::event::{EventfdFlags, eventfd};

pub use self::control::{Control, Exclusive, ServerEnded};
use self::drive::Waiting;
pub use self::event::Event;
pub use self::lease::{Answer, Claim, Effect, Kind, LeaseId, Leases};
pub use self::metrics::{Metrics, RequestKind, ServerMetrics};
use self::probes::Probes;
pub use self::service::{Driver, Registered, Service, Slot};
pub use self::session::{Action, EndReason, Map, Ordinary, Session, Shared};
use self::work::Workers;
pub use self::work::{Finished, Job};
use crate::key::{Key, random_nonce};
use crate::region::{Mapped, Region};

/// Time for a client to prove that it has the key.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an ending connection to take the last message.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that a failed connection stays before its client is disconnected, so that the NAK with the cause arrives first.
const LINGER: Duration = Duration::from_millis(200);
/// Maximum number of clients that have not yet proved that they have the key.
const HALF_OPEN_MAX: usize = 64;
/// Maximum number of clients on one address at a time.
const CONNECTIONS_MAX: usize = 1024;
/// Mappings that one client may have, unless [`Config::mappings_max`] says otherwise.
pub const MAPPINGS_MAX_DEFAULT: u32 = 16384;
/// Messages of a client that may arrive before the server polls.
const RECEIVES: usize = 16;
/// Of these, messages that need an answer: one receive is left for a notice's receipt, and one for a goodbye.
const MESSAGES_MAX: u16 = RECEIVES as u16 - 2;
/// Maximum number of messages of a client whose answers it has not acknowledged. Each message has a slot, and the server posts
/// a receive only if its message would get a slot: a client cannot make the server hold more. There are three times as many
/// slots as receives, since a client that continues at once acknowledges many answers together (IBTA Vol 1, 9.7.5.1.2), and its
/// next message must still find a receive.
const SLOTS: usize = 3 * RECEIVES;
/// Work requests that a connection may have completions for: receives, sends, a notice, a probe.
const COMPLETIONS_PER_CONNECTION: usize = RECEIVES + SLOTS + 2;
/// Time for a holder to release a lease that somebody else needs. MS-SMB2 3.3.2.5 has the same value; it is less than the 45 s
/// after which Linux takes a file lease away (proc_sys_fs(5), `lease-break-time`).
pub const BREAK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(35);

const SEND: u64 = 1 << 32;
const PROBE: u64 = 2 << 32;
const NOTICE: u64 = 3 << 32;

/// Settings of a server.
#[derive(Debug)]
pub struct Config {
    /// Addresses and ports to listen on.
    pub listen: Vec<SocketAddr>,
    /// The key that clients need.
    pub key: Key,
    /// The regions that the server offers.
    pub regions: Vec<Region>,
    /// Time of silence after which a client is taken for dead.
    pub keepalive: Duration,
    /// Time for a holder to release a lease that somebody else needs; then the server revokes it.
    pub break_timeout: Duration,
    /// Maximum number of mappings of one client.
    pub mappings_max: u32,
    /// Options for opening the devices.
    pub device: rdmux_verbs::Options,
}

/// Reason why a server could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The device did not open.
    #[error("cannot listen on {address}: {source}")]
    Open {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: OpenError,
    },
    /// The port is taken.
    #[error(
        "cannot listen on {address}: {source} (choose another port with --listen ADDR:PORT, or end the other server)"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: ListenError,
    },
    /// Two regions have one name.
    #[error("two regions are named {0}: name one of them with ,name=NAME")]
    SameName(push::Name),
    /// Another object could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A handle that ends a server from another thread.
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
    // The write fails only after 2^64 wake-ups that nobody read.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A message from another thread to the server's thread.
#[derive(Debug)]
enum Done {
    Stop,
    Finished(Finished),
    Local(control::Local),
}

/// Index of the endpoint, and the QP's number there.
type ConnectionKey = (usize, u32);

#[derive(Debug)]
struct Endpoint {
    address: SocketAddr,
    device: Device,
    cq: CompletionQueue,
    listener: Listener,
    connections: usize,
}

/// A client's connection. The fields are in the order in which they must be dropped.
#[derive(Debug)]
struct Link {
    key: ConnectionKey,
    /// Registered mappings, by number of the mapping.
    mappings: HashMap<u64, MemoryRegion>,
    connection: Connection,
    qp: QueuePair,
    /// Places for incoming messages, then one for each slot's answer, and one for a notice.
    buffers: Arc<AnonymousMemory>,
    buffers_mr: MemoryRegion,
    free_slots: Vec<usize>,
    /// Arrival time of the message in each slot.
    began: [Option<Instant>; SLOTS],
    /// Places for which no receive is posted until a slot is free.
    idle_receives: Vec<usize>,
    pd: ProtectionDomain,
    probing: bool,
}

/// The driver, which carries out what the service decides.
#[derive(Debug)]
struct Hands {
    endpoints: Vec<Endpoint>,
    /// Connections, by number of the client.
    links: HashMap<u64, Link>,
    /// Numbers of the clients, by connection.
    numbers: HashMap<ConnectionKey, u64>,
    /// Failed connections, and when each is dropped. The oldest is first.
    lingering: VecDeque<(Instant, Link)>,
    workers: Workers,
    /// Watches of files, by number of the region.
    files: HashMap<usize, FileWatch>,
    metrics: Metrics,
    /// Number of jobs that carried bytes by message.
    jobs_by_message: u64,
}

/// A server. [`Server::bind`], then [`Server::run`].
#[derive(Debug)]
pub struct Server {
    service: Service<Hands>,
    began: Instant,
    /// The endpoint to poll next.
    next_endpoint: usize,
    /// Schedule for probing live clients.
    probes: Probes,
    wake: Arc<OwnedFd>,
    done_tx: mpsc::Sender<Done>,
    done_rx: mpsc::Receiver<Done>,
    waiting: Waiting,
    /// Processor time of the server's thread at the last booking.
    booked_ns: u64,
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
            // Several ports of an address share one device.
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
        let files = watch::watch(&shared.regions, &done_tx, &wake, &mut events);
        let hands = Hands {
            endpoints,
            links: HashMap::new(),
            numbers: HashMap::new(),
            lingering: VecDeque::new(),
            workers: Workers::new(done_tx.clone(), wake.clone()),
            files,
            metrics: Metrics::default(),
            jobs_by_message: 0,
        };
        let mut service = Service::new(hands, shared, config.break_timeout);
        service.events = events;
        let began = Instant::now();
        Ok(Server {
            service,
            began,
            next_endpoint: 0,
            probes: Probes::new(config.keepalive / 2),
            wake,
            done_tx,
            done_rx,
            waiting: Waiting::new(config.device.waiting),
            booked_ns: 0,
            stop: false,
        })
    }

    /// Returns the regions that the server offers.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.service.shared.regions
    }

    /// Returns the server's metrics, which can be read while it runs.
    pub fn metrics(&self) -> Metrics {
        self.service.driver.metrics.clone()
    }

    /// Returns the ways to durability that the server offers to clients of a region.
    pub fn ways(&self, region: &Region) -> Ways {
        let device = self
            .service
            .driver
            .endpoints
            .first()
            .map(|endpoint| &endpoint.device);
        device.map_or_else(
            || region.ways(),
            |device| region.ways_on(device, region.reach(device)),
        )
    }

    /// Returns how the devices access a region's bytes: the costliest way among all devices.
    pub fn reach(&self, region: &Region) -> Reach {
        self.service.driver.reach(region)
    }

    /// Returns a handle for operations on the regions from another thread.
    pub fn control(&self) -> Control {
        Control {
            server: self.done_tx.clone(),
            wake: self.wake.clone(),
        }
    }

    /// Returns a handle that ends this server from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.done_tx.clone(), self.wake.clone())
    }

    /// Returns the service's time.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn accept(&mut self, at: usize) {
        while let Some(request) = self.service.driver.endpoints[at].listener.accept(Duration::ZERO) {
            let peer = request.peer();
            let refusal = if self.service.driver.endpoints[at].connections >= CONNECTIONS_MAX {
                Some("too many connections")
            } else if self.service.half_open() >= HALF_OPEN_MAX {
                Some("too many unauthenticated clients")
            } else {
                None
            };
            if let Some(why) = refusal {
                request.reject(why.as_bytes());
                self.refused(peer, why.into());
                continue;
            }
            if let Err(why) = self.accept_one(at, request) {
                self.refused(peer, why.to_string());
            }
        }
    }

    fn refused(&mut self, peer: std::net::IpAddr, why: String) {
        self.service.events.push(Event::Refused { peer, why });
    }

    fn accept_one(
        &mut self,
        at: usize,
        mut request: ConnectionRequest,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let nonce = random_nonce()?;
        let endpoint = &mut self.service.driver.endpoints[at];
        // Each client has its own domain: no key of one client is valid for another.
        let pd = endpoint.device.alloc_pd()?;
        let mut options = QpOptions::new(&endpoint.cq);
        options.max_send_wr = SLOTS as u32 + 2;
        options.max_recv_wr = RECEIVES as u32;
        let qp = pd.create_qp(&options)?;
        let buffers = Arc::new(AnonymousMemory::new((RECEIVES + SLOTS + 1) * MESSAGE_LEN_MAX)?);
        let buffers_mr = pd.reg_mr_all(buffers.clone(), 0, Access::LOCAL_WRITE)?;
        let prepare = || {
            for place in 0..RECEIVES {
                qp.post_recv(receive(&buffers_mr, place))
                    .map_err(io::Error::other)?;
            }
            Ok::<(), ConnectError>(())
        };
        let connection = request.accept_after(&qp, &ConnectParams::default(), &[], prepare)?;
        endpoint.connections += 1;
        let link = Link {
            key: (at, qp.qpn().value()),
            mappings: HashMap::new(),
            connection,
            buffers,
            buffers_mr,
            free_slots: (0..SLOTS).collect(),
            began: [None; SLOTS],
            idle_receives: Vec::new(),
            pd,
            probing: false,
            qp,
        };
        let now = self.now();
        let client = self.service.handle_connected(now, link.connection.peer(), nonce);
        let hands = &mut self.service.driver;
        hands.numbers.insert(link.key, client);
        hands.links.insert(client, link);
        hands.metrics.lock().connections = hands.links.len();
        Ok(())
    }

    fn completed(&mut self, at: usize, wc: &WorkCompletion) {
        let now = self.now();
        let hands = &mut self.service.driver;
        let Some(client) = hands.numbers.get(&(at, wc.qpn.value())).copied() else {
            return;
        };
        let Some(link) = hands.links.get_mut(&client) else {
            return;
        };
        if wc.status != Status::Success {
            let status = match wc.status {
                Status::Flushed => link.qp.error(),
                other => Some(other),
            };
            self.service.handle_disconnected(now, client, status);
        } else if wc.wr_id == PROBE {
            link.probing = false;
        } else if wc.wr_id == NOTICE {
            // The notice's place stays in use until the client says that it has taken the notice.
        } else if wc.wr_id & SEND != 0 {
            let slot = (wc.wr_id & !SEND) as usize;
            self.service.handle_sent(now, client, slot);
        } else {
            let place = wc.wr_id as usize;
            let mut message = vec![0; (wc.byte_len as usize).min(MESSAGE_LEN_MAX)];
            let at = (place * MESSAGE_LEN_MAX) as u64;
            if link.buffers.read(at, &mut message).is_ok()
                && let Some(slot) = link.take_slot(place)
            {
                let jobs = hands.jobs_by_message;
                self.service.handle_message(now, client, slot, &message);
                self.book(self.service.driver.jobs_by_message != jobs, 0);
            }
        }
    }

    /// Books the processor time of this thread since the last booking, and `others_ns` of other threads, on bytes by message,
    /// or on nothing.
    fn book(&mut self, by_message: bool, others_ns: u64) {
        let now_ns = work::thread_cpu_ns();
        if by_message {
            let own_ns = now_ns.saturating_sub(self.booked_ns);
            self.service.driver.metrics.lock().message_cpu_ns += own_ns + others_ns;
        }
        self.booked_ns = now_ns;
    }

    /// Does what is due; returns when to call again if nothing happens before, or `None` if no call is needed.
    fn handle_timers(&mut self, now: Instant) -> Option<Instant> {
        let since = now.saturating_duration_since(self.began);
        let is_anybody_there = !self.service.driver.links.is_empty();
        if self.probes.are_due(now, is_anybody_there) {
            // Probes all clients at once, so that the machine wakes up once. The peer's NIC alone answers an empty WRITE. A
            // client that has not answered the last probe by now has been silent for half of the keep-alive time, and before it
            // for no more than that.
            let clients: Vec<u64> = self.service.driver.links.keys().copied().collect();
            for client in clients {
                if !self.service.is_ready(client) {
                    continue;
                }
                let Some(link) = self.service.driver.links.get_mut(&client) else {
                    continue;
                };
                if link.probing {
                    self.service.handle_dead(since, client);
                    continue;
                }
                link.probing = true;
                if link.qp.post_send(probe()).is_err() {
                    self.service.handle_lost(since, client);
                }
            }
        }
        self.service.handle_timeout(since);
        let lingering = &mut self.service.driver.lingering;
        while lingering.front().is_some_and(|(until, _)| *until <= now) {
            lingering.pop_front();
        }
        let lingering = lingering.front().map(|(until, _)| *until);
        let service = self.service.poll_timeout().map(|at| self.began + at);
        lingering.into_iter().chain(service).chain(self.probes.next).min()
    }
}

/// Returns the rights that a device supports: nobody can use a right that it lacks.
fn rights_on(device: &Device) -> Access {
    let mut rights = Access::all();
    let features = device.features();
    rights.set(Access::FLUSH_GLOBAL, features.contains(Features::FLUSH_GLOBAL));
    rights.set(
        Access::FLUSH_PERSISTENT,
        features.contains(Features::FLUSH_PERSISTENT),
    );
    rights
}

/// Returns whether a device reaches other memory, but not this: a file, or pages that its driver does not accept.
fn is_out_of_reach(error: &RegisterError) -> bool {
    match error {
        RegisterError::NotMapped => true,
        RegisterError::Refused(errno) => {
            let errno = rustix::io::Errno::from_raw_os_error(*errno);
            matches!(
                errno,
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::FAULT | rustix::io::Errno::INVAL
            )
        }
        _ => false,
    }
}

impl Hands {
    fn reach(&self, region: &Region) -> Reach {
        let reaches = self
            .endpoints
            .iter()
            .map(|endpoint| region.reach(&endpoint.device));
        // The costlier of two.
        let worst = |a: Reach, b: Reach| match (a, b) {
            (Reach::Processor, _) | (_, Reach::Processor) => Reach::Processor,
            (Reach::OnDemand, _) | (_, Reach::OnDemand) => Reach::OnDemand,
            (Reach::Direct, Reach::Direct) => Reach::Direct,
        };
        reaches.fold(Reach::Direct, worst)
    }
}

impl Driver for Hands {
    fn register(
        &mut self,
        client: u64,
        map: &Map,
        memory: Arc<Mapped>,
        rights: Access,
    ) -> Result<Registered, String> {
        let Some(link) = self.links.get_mut(&client) else {
            return Err("the connection has ended".into());
        };
        let device = link.pd.device();
        let reach = map.region.reach(device);
        let mut possible = rights_on(device);
        // A device's own FLUSH does not bring bytes that it wrote to the page cache to the medium.
        possible.set(
            Access::FLUSH_PERSISTENT,
            possible.contains(Access::FLUSH_PERSISTENT) && reach == Reach::Direct,
        );
        // The address is the offset in the region, so that both ends use the same numbers.
        let registered = link
            .pd
            .reg_mr(memory, map.offset, map.length, map.offset, rights & possible);
        let mr = match registered {
            Ok(mr) => mr,
            Err(error) if is_out_of_reach(&error) => {
                let ways = map.region.ways_on(device, Reach::Processor);
                return Ok(Registered { extent: None, ways });
            }
            Err(error) => return Err(error.to_string()),
        };
        let extent = Extent {
            offset: map.offset,
            length: map.length,
            va: mr.iova(),
            rkey: RKey(mr.rkey().0),
        };
        let ways = map.region.ways_on(device, reach);
        if link.mappings.insert(map.mapping, mr).is_none() {
            self.metrics.lock().mappings += 1;
        }
        Ok(Registered {
            extent: Some(extent),
            ways,
        })
    }

    fn deregister(&mut self, client: u64, mapping: u64) {
        let links = &mut self.links;
        // Once the memory region is gone, the responder is in no access to it, and begins none.
        if let Some(mr) = links
            .get_mut(&client)
            .and_then(|link| link.mappings.remove(&mapping))
        {
            drop(mr);
            self.metrics.lock().mappings -= 1;
        }
    }

    fn send(&mut self, client: u64, slot: Slot, request: u64, message: &Message) -> bool {
        let (place, wr_id) = match slot {
            Slot::Answer(slot) => (RECEIVES + slot, SEND | slot as u64),
            Slot::Notice => (RECEIVES + SLOTS, NOTICE),
        };
        let Some(link) = self.links.get_mut(&client) else {
            return false;
        };
        let sent = link.emit(place, wr_id, request, message);
        if let Slot::Answer(slot) = slot {
            self.metrics.answered(link.began[slot].take(), message);
        }
        sent
    }

    fn receive(&mut self, client: u64, slot: usize) -> bool {
        self.links
            .get_mut(&client)
            .is_some_and(|link| link.give_back(slot))
    }

    fn disconnect(&mut self, client: u64, failed: bool) {
        let Some(link) = self.links.remove(&client) else {
            return;
        };
        self.numbers.remove(&link.key);
        self.endpoints[link.key.0].connections -= 1;
        let mut metrics = self.metrics.lock();
        metrics.connections = self.links.len();
        metrics.mappings -= link.mappings.len();
        drop(metrics);
        if failed && self.lingering.len() < CONNECTIONS_MAX {
            self.lingering.push_back((Instant::now() + LINGER, link));
        }
    }

    fn work(&mut self, mut job: Job) -> Option<Finished> {
        if let Some(bytes) = job.task.bytes_by_message(|region| self.reach(region)) {
            job.by_message = true;
            self.jobs_by_message += 1;
            self.metrics.lock().message_bytes += bytes;
        }
        self.workers.submit(job)
    }

    fn let_others(&mut self, region: usize) {
        if let Some(watch) = self.files.get(&region) {
            watch.let_go();
        }
    }

    fn is_alone(&mut self, region: usize) -> bool {
        self.files.get(&region).is_some_and(FileWatch::is_alone)
    }
}

impl Link {
    /// Takes a slot for the message that came in at `place`, and posts receives again as long as there is a slot for each.
    fn take_slot(&mut self, place: usize) -> Option<usize> {
        let slot = self.free_slots.pop();
        if let Some(slot) = slot {
            self.began[slot] = Some(Instant::now());
        }
        self.idle_receives.push(place);
        // If a receive is refused, the connection is at its end, as its completions will say.
        self.post_receives();
        slot
    }

    /// Frees a slot whose answer was acknowledged. Returns false if the connection accepts nothing more.
    fn give_back(&mut self, slot: usize) -> bool {
        self.free_slots.push(slot);
        self.post_receives()
    }

    fn post_receives(&mut self) -> bool {
        while RECEIVES - self.idle_receives.len() < self.free_slots.len() {
            let Some(place) = self.idle_receives.pop() else {
                break;
            };
            if self.qp.post_recv(receive(&self.buffers_mr, place)).is_err() {
                return false;
            }
        }
        true
    }

    /// Sends a message from a place in the buffers.
    fn emit(&self, place: usize, wr_id: u64, request: u64, message: &Message) -> bool {
        let mut bytes = Vec::with_capacity(256);
        message.emit(request, &mut bytes);
        let at = (place * MESSAGE_LEN_MAX) as u64;
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: self.buffers_mr.sge(at, bytes.len() as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.buffers.write(at, &bytes).is_ok() && self.qp.post_send(request).is_ok()
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

fn receive(buffers: &MemoryRegion, place: usize) -> RecvRequest {
    RecvRequest {
        wr_id: place as u64,
        sges: buffers
            .sge((place * MESSAGE_LEN_MAX) as u64, MESSAGE_LEN_MAX as u32)
            .into(),
    }
}
