//! The server: one thread for all its sessions, which a [`Reactor`] wakes; the data path belongs to the device alone. [`Service`]
//! makes the decisions; this module carries them out.

mod control;
mod event;
mod id;
mod lease;
mod metrics;
mod requests;
mod service;
mod session;
mod watch;
mod work;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::FileWatch;
use rdmux_runtime::{
    Completed, ConnectionEnd, ConnectionId, EstablishError, Limits, ListenAtError, Mailbox,
    MessageConnection, Queues, Reactor, ReactorEvent, Request, SIGNAL_EVERY, SendSlot, Sizes,
};
use rdmux_verbs::{
    Access, ConnectParams, Device, Features, ListenError, MemoryRegion, OpenError, RKey, Reach, RegisterError,
};
use rdmux_wire::push::{self, Extent, MESSAGE_LEN_MAX, Message, Ways};

use self::control::Local;
pub use self::control::{Control, Exclusive, ServerEnded};
pub use self::event::ServerEvent;
pub use self::id::{ClientId, MappingId, OperationId, Owner, RegionId};
pub use self::lease::{Answer, Claim, Effect, Kind, LeaseId, Leases};
pub use self::metrics::{Metrics, RequestKind, ServerMetrics};
pub use self::service::{Driver, Registered, ReplySlot, Service};
pub use self::session::{Action, EndReason, Map, Ordinary, Session, Shared};
use self::work::Workers;
pub use self::work::{Finished, Job};
use crate::region::{Mapped, Region};
use rdmux_key::{Key, random_nonce};

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
/// Maximum number of messages of a client whose answers it has not acknowledged. There are more than three times as many as receives, since
/// a client that continues at once acknowledges many answers together (IBTA Vol 1, 9.7.5.1.2), and its next message must still
/// find a receive.
const SLOTS: usize = 3 * RECEIVES + SIGNAL_EVERY;
/// A client's connection. The slot that is no answer's is for notices.
const SIZES: Sizes = Sizes {
    message_bytes: MESSAGE_LEN_MAX,
    sent_bytes: MESSAGE_LEN_MAX,
    receives: RECEIVES,
    answers: SLOTS,
    own: 1,
    operations: 0,
};
/// Receives that the clients of an address share: so many messages may arrive before the server polls, and one of each client besides. A
/// client's message that finds none is sent again.
const SHARED_RECEIVES: usize = 16 * RECEIVES;
/// Maximum number of events handled before timers.
const EVENTS_MAX: usize = 256;
/// Time for a holder to release a lease that somebody else needs. MS-SMB2 3.3.2.5 has the same value; it is less than the 45 s
/// after which Linux takes a file lease away (proc_sys_fs(5), `lease-break-time`).
pub const BREAK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(35);

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
    #[error("two regions are named {0}: give one another name (--file PATH,name=NAME or --mem NAME,size=N)")]
    SameName(push::Name),
    /// An object for the connections could not be created.
    #[error(transparent)]
    Establish(#[from] EstablishError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A handle that ends a server from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Mailbox<Mail>);

impl Stopper {
    /// Makes [`Server::run`] return.
    pub fn stop(&self) {
        self.0.send(Mail::Stop);
    }
}

/// A message from another thread to the server's thread.
#[derive(Debug)]
enum Mail {
    Stop,
    Finished(Finished),
    Local(Local),
}

/// The driver's record of a client.
#[derive(Debug)]
struct ClientConnection {
    /// Registered mappings, by number of the mapping.
    mappings: HashMap<MappingId, MemoryRegion>,
    /// Arrival time of the message in each slot.
    began: [Option<Instant>; SLOTS],
    notice: SendSlot,
}

/// A client has the number of its connection.
impl From<ConnectionId> for ClientId {
    fn from(ConnectionId(number): ConnectionId) -> ClientId {
        ClientId(number)
    }
}

impl From<ClientId> for ConnectionId {
    fn from(ClientId(number): ClientId) -> ConnectionId {
        ConnectionId(number)
    }
}

/// The driver, which carries out what the service decides.
#[derive(Debug)]
struct ServerDriver {
    /// Records of the clients, by number. They are dropped before the connections.
    links: HashMap<ClientId, ClientConnection>,
    reactor: Reactor<Mail>,
    workers: Workers,
    /// Watches of files, by number of the region.
    files: HashMap<RegionId, FileWatch>,
    metrics: Metrics,
    /// Number of jobs that carried bytes by message.
    jobs_by_message: u64,
}

/// A server. [`Server::bind`], then [`Server::run`].
#[derive(Debug)]
pub struct Server {
    service: Service<ServerDriver>,
    began: Instant,
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
        let limits = Limits {
            connections: CONNECTIONS_MAX,
            keepalive: config.keepalive,
            shared_receives: Some(SHARED_RECEIVES),
            queues: Queues::Pool,
            ledger: None,
        };
        let mut reactor = Reactor::new(SIZES, limits, config.device.waiting)?;
        for address in config.listen {
            // Several ports of an address share one device.
            let known = reactor.devices().find(|device| device.address() == address.ip());
            let device = match known {
                Some(device) => device.clone(),
                None => Device::open_with(address.ip(), config.device)
                    .map_err(|source| ServeError::Open { address, source })?,
            };
            reactor
                .listen(&device, address.port())
                .map_err(|error| match error {
                    ListenAtError::Listen(source) => ServeError::Listen { address, source },
                    ListenAtError::Open(source) => ServeError::Open { address, source },
                    ListenAtError::Establish(source) => source.into(),
                })?;
        }
        let mailbox = reactor.mailbox();
        let mut events = Vec::new();
        let files = watch::watch(&shared.regions, &mailbox, &mut events);
        let driver = ServerDriver {
            links: HashMap::new(),
            reactor,
            workers: work::workers(mailbox),
            files,
            metrics: Metrics::default(),
            jobs_by_message: 0,
        };
        let mut service = Service::new(driver, shared, config.break_timeout);
        service.events = events;
        Ok(Server {
            service,
            began: Instant::now(),
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
        let device = self.service.driver.reactor.devices().next();
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
        Control(self.service.driver.reactor.mailbox())
    }

    /// Returns a handle that ends this server from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.service.driver.reactor.mailbox())
    }

    /// Returns the service's time.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Serves until stopped. Passes each event to `log`.
    pub fn run(mut self, mut log: impl FnMut(&ServerEvent)) -> io::Result<()> {
        let metrics = self.metrics();
        let mut tell = |event: ServerEvent| {
            metrics.count(&event);
            log(&event);
        };
        self.booked_ns = work::thread_cpu_ns();
        while !self.stop {
            self.service.handle_timeout(self.now());
            self.service.poll_events().for_each(&mut tell);
            let next = self.service.poll_timeout().map(|at| self.began + at);
            let mut event = self.service.driver.reactor.next(next)?;
            // Timers and events also concern clients that send nothing.
            for _ in 0..EVENTS_MAX {
                let Some(happened) = event.take() else {
                    break;
                };
                self.handle(happened);
                event = self.service.driver.reactor.poll();
            }
            event.into_iter().for_each(|event| self.handle(event));
        }
        self.service.shut_down(self.now());
        self.service.poll_events().for_each(&mut tell);
        Ok(())
    }

    fn handle(&mut self, event: ReactorEvent<Mail>) {
        let now = self.now();
        match event {
            ReactorEvent::Request(request) => self.accept(now, request),
            ReactorEvent::Completed(connection, completed) => match completed {
                Completed::Message {
                    slot: Some(slot),
                    bytes,
                } => self.message(now, connection.into(), slot, &bytes),
                Completed::Sent(slot) if slot.index() < SLOTS => {
                    self.service.handle_sent(now, connection.into(), slot.index());
                }
                // The slot of a notice stays in use until the client says that it has taken the notice.
                _ => {}
            },
            ReactorEvent::Ended(connection, end) => self.ended(now, connection.into(), end),
            ReactorEvent::Mail(mail) => self.mail(now, mail),
            // The server dials nobody, and has no descriptors of its own.
            ReactorEvent::Connected(..) | ReactorEvent::Readable(_) | ReactorEvent::Writable(_) => {}
        }
    }

    fn ended(&mut self, now: Duration, client: ClientId, end: ConnectionEnd) {
        match end {
            ConnectionEnd::Disconnected => self.service.handle_disconnected(now, client, None),
            ConnectionEnd::Failed(status) => self.service.handle_disconnected(now, client, Some(status)),
            ConnectionEnd::Silent => self.service.handle_dead(now, client),
            ConnectionEnd::Lost => self.service.handle_lost(now, client),
        }
    }

    fn mail(&mut self, now: Duration, mail: Mail) {
        match mail {
            Mail::Stop => self.stop = true,
            Mail::Finished(finished) => {
                let (by_message, cpu_ns) = (finished.by_message, finished.cpu_ns);
                self.service.finished(now, finished);
                self.book(by_message, cpu_ns);
            }
            Mail::Local(Local::Begin {
                region,
                access,
                share,
                reply,
            }) => self.service.handle_local(now, &region, access, share, reply),
            Mail::Local(Local::End(number)) => self.service.handle_local_end(now, number),
            Mail::Local(Local::Wanted(number, wanted)) => self.service.handle_wanted(now, number, wanted),
        }
    }

    fn accept(&mut self, now: Duration, request: Request) {
        let peer = request.peer();
        if self.service.half_open() >= HALF_OPEN_MAX {
            let why = "too many unauthenticated clients";
            request.refuse(why);
            self.refused(peer, why.into());
        } else if let Err(why) = self.accept_one(now, request) {
            self.refused(peer, why.to_string());
        }
    }

    fn refused(&mut self, peer: IpAddr, why: String) {
        self.service.events.push(ServerEvent::Refused { peer, why });
    }

    fn accept_one(&mut self, now: Duration, request: Request) -> Result<(), Box<dyn std::error::Error>> {
        let (nonce, peer) = (random_nonce()?, request.peer());
        let driver = &mut self.service.driver;
        let id = driver.reactor.accept(request, &ConnectParams::default())?;
        let connection = driver.reactor.connection(id);
        let Some(notice) = connection.and_then(MessageConnection::take_slot) else {
            return Ok(());
        };
        let link = ClientConnection {
            mappings: HashMap::new(),
            began: [None; SLOTS],
            notice,
        };
        driver.links.insert(id.into(), link);
        driver.metrics.lock().connections = driver.links.len();
        self.service.handle_connected(now, id.into(), peer, nonce);
        Ok(())
    }

    fn message(&mut self, now: Duration, client: ClientId, slot: SendSlot, message: &[u8]) {
        let driver = &mut self.service.driver;
        let jobs = driver.jobs_by_message;
        if let Some(link) = driver.links.get_mut(&client) {
            link.began[slot.index()] = Some(Instant::now());
        }
        self.service.handle_message(now, client, slot.index(), message);
        self.book(self.service.driver.jobs_by_message != jobs, 0);
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

impl ServerDriver {
    fn reach(&self, region: &Region) -> Reach {
        let reaches = self.reactor.devices().map(|device| region.reach(device));
        // The costlier of two.
        let worst = |a: Reach, b: Reach| match (a, b) {
            (Reach::Processor, _) | (_, Reach::Processor) => Reach::Processor,
            (Reach::OnDemand, _) | (_, Reach::OnDemand) => Reach::OnDemand,
            (Reach::Direct, Reach::Direct) => Reach::Direct,
        };
        reaches.fold(Reach::Direct, worst)
    }
}

impl Driver for ServerDriver {
    fn register(
        &mut self,
        client: ClientId,
        map: &Map,
        memory: Arc<Mapped>,
        rights: Access,
    ) -> Result<Registered, String> {
        let connection = self.reactor.connection(client.into());
        let (Some(link), Some(connection)) = (self.links.get_mut(&client), connection) else {
            return Err("the connection has ended".into());
        };
        let pd = connection.pd();
        let device = pd.device();
        let reach = map.region.reach(device);
        let mut possible = rights_on(device);
        // A device's own FLUSH does not bring bytes that it wrote to the page cache to the medium.
        possible.set(
            Access::FLUSH_PERSISTENT,
            possible.contains(Access::FLUSH_PERSISTENT) && reach == Reach::Direct,
        );
        // The address is the offset in the region, so that both ends use the same numbers.
        let registered = pd.reg_mr(memory, map.offset, map.length, map.offset, rights & possible);
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

    fn deregister(&mut self, client: ClientId, mapping: MappingId) {
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

    fn send(&mut self, client: ClientId, slot: ReplySlot, request: u64, message: &Message) -> bool {
        let connection = self.reactor.connection(client.into());
        let (Some(link), Some(connection)) = (self.links.get_mut(&client), connection) else {
            return false;
        };
        let mut bytes = Vec::with_capacity(256);
        message.emit(request, &mut bytes);
        let sent = match slot {
            ReplySlot::Answer(slot) => connection.send(SendSlot::new(slot), &bytes),
            ReplySlot::Last(slot) => connection.send_reported(SendSlot::new(slot), &bytes),
            ReplySlot::Notice => connection.send_reported(link.notice, &bytes),
        };
        if let ReplySlot::Answer(slot) | ReplySlot::Last(slot) = slot {
            self.metrics.answered(link.began[slot].take(), message);
        }
        if matches!(message, Message::Welcome { .. }) {
            self.reactor.watch(client.into());
        }
        sent.is_ok()
    }

    fn receive(&mut self, client: ClientId, slot: usize) -> bool {
        let connection = self.reactor.connection(client.into());
        connection
            .map(|connection| connection.give_back(SendSlot::new(slot)))
            .is_some()
    }

    fn disconnect(&mut self, client: ClientId, failed: bool) {
        let Some(link) = self.links.remove(&client) else {
            return;
        };
        let mut metrics = self.metrics.lock();
        metrics.connections = self.links.len();
        metrics.mappings -= link.mappings.len();
        drop(metrics);
        drop(link);
        self.reactor.close(client.into(), failed.then_some(LINGER));
    }

    fn work(&mut self, mut job: Job) -> Option<Finished> {
        if let Some(bytes) = job.task.bytes_by_message(|region| self.reach(region)) {
            job.by_message = true;
            self.jobs_by_message += 1;
            self.metrics.lock().message_bytes += bytes;
        }
        work::submit(&mut self.workers, job)
    }

    fn let_others(&mut self, region: RegionId) {
        if let Some(watch) = self.files.get(&region) {
            watch.let_go();
        }
    }

    fn is_alone(&mut self, region: RegionId) -> bool {
        self.files.get(&region).is_some_and(FileWatch::is_alone)
    }
}
