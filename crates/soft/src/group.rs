//! The group of processes that share UDP port 4791 of one local address.
//!
//! The first process of an address binds a block of 16 sockets to the port, and a filter that chooses among all sockets there by
//! the top byte of the destination QPN. When all slots of the existing blocks are taken, the holder (below) binds one more. Every process of
//! the same user gets the blocks up to that of its own slot, so that none of these is closed while it lives: closing a socket would move
//! live QPs of higher slots to other sockets. Each process reads the socket of its own slot and no other.
//!
//! Connection management uses QPN 1, which lies in slot 0. One process, the *holder*, reads that socket and hands each message to the
//! process concerned: the one with the slot in the top byte of the communication id, or the one that offers the requested service. The
//! others are *members*, each with a connection to the holder. When the holder ends, in whatever way, these connections end too, one
//! member becomes holder and the rest connect to it.
//!
//! The kernel keeps the state that must survive every death: who is holder, which slots are taken, which services are offered. It keeps
//! this as abstract Unix socket names, which vanish with the process that bound them and are scoped by network namespace just as the port
//! is. Messages between processes only speed up the lookup. So two processes never have the same slot or service, and a new holder knows
//! for whom it must wait before it answers that a service does not exist.
//!
//! A process that ends without ending its connections leaves them in the group's *ledger*. The holder sends the DREQs in its place, so
//! that peers need not find out by retries. Meanwhile the slot rests: no new process gets it as long as another slot is free. When no
//! process is left, the ledger is gone too, and the peers find out by retries.
//!
//! Only processes of one user share a port: both ends of each connection check the other's credentials. Another user who binds one of the
//! names can keep this process from starting, as with a socket on the port, but is never sent anything.

mod ledger;
pub(crate) mod message;
mod names;
mod sockets;
mod worker;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::Peering;
use rdmux_verbs::provider::seqpacket::receive_with_descriptors;
use rdmux_verbs::provider::user::{User, peer_credentials, user_of};
use rdmux_verbs::resources::places::bind_slot;
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{ListenError, OpenError};
use rdmux_wire::Qpn;
use rdmux_wire::cm::{self, Destination, ServiceId};
use rdmux_wire::roce::{Opcode, Operation, Packet, Transport};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use self::ledger::Ledger;
pub(crate) use self::ledger::{LedgerRecord, OwnRecords};
use self::message::GroupMessage;
use self::names::Names;
use self::sockets::Sockets;
use self::worker::{GroupRole, Worker};
use super::udp::{ROCE_PORT, RxBatch, RxSocket};

pub use rdmux_verbs::resources::places::SLOTS;

/// Sockets by which a group grows.
const BLOCK: u8 = 16;

/// Most blocks of a group.
const BLOCKS: u8 = 8;
const _: () = assert!(SLOTS == BLOCK as usize * BLOCKS as usize);

/// Services that one process may offer on one address.
pub const SERVICES_MAX: usize = 512;

/// Slot of QPN 1.
pub(crate) const CM_SLOT: u8 = 0;

/// Time for which `join` waits for the survivors of a holder to agree.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Total time for which `join` waits for a live holder: on a busy machine the holder may get no CPU for seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Reason why a process cannot have a place on the port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The port is shared by processes of another user.
    #[error(
        "{addr}: UDP port {ROCE_PORT} is in use by process {pid} of user {uid}, and only processes of one user can share \
         it: run as that user, or use another local address (option --from, --device or --listen of a command) or network namespace"
    )]
    OtherUser {
        /// The local address.
        addr: IpAddr,
        /// Number of that user.
        uid: u32,
        /// The process that holds it; 0 when it is in another PID namespace.
        pid: i32,
    },
    /// The port may be shared by processes of another user.
    #[error(
        "{addr}: UDP port {ROCE_PORT} is in use by a process whose user may be another one, as this user namespace does not \
         tell: it shows all users without a number of their own as {uid}. Run as a user with another number, or use another \
         local address or network namespace"
    )]
    UnknownUser {
        /// The local address.
        addr: IpAddr,
        /// User number that both processes show.
        uid: u32,
    },
    /// The port belongs to something other than a group: the kernel's rxe driver, or another program.
    #[error(
        "{addr}: UDP port {ROCE_PORT} is in use by another program or by the kernel's rdma_rxe (see `ss -ulnp` and \
         `rdma link`): stop it, or use another local address or network namespace"
    )]
    PortInUse {
        /// The local address.
        addr: IpAddr,
    },
    /// No interface of this network namespace has that address.
    #[error(
        "{addr} is no address of this host: `ip address` lists those there are, in each network namespace its own"
    )]
    NotLocal {
        /// The address.
        addr: IpAddr,
    },
    /// All slots are taken.
    #[error("{addr}: all {} places on UDP port {ROCE_PORT} are taken: end one of those processes", SLOTS - 1)]
    Full {
        /// The local address.
        addr: IpAddr,
    },
    /// The process that holds the port could not bind more sockets, or get those of another process.
    #[error(
        "{addr}: process {pid}, which holds UDP port {ROCE_PORT}, could not add a place: {source}. If the address is in use, sockets of a \
         stopped process or of another program are in the way (see `ss -ulnp`)"
    )]
    NotGrown {
        /// The local address.
        addr: IpAddr,
        /// The process; 0 when it is in another PID namespace.
        pid: i32,
        /// Error that the system returned to it.
        source: io::Error,
    },
    /// The process that holds the port does not answer: it is stopped, gets no CPU, or is not rdmux.
    #[error(
        "{addr}: process {pid}, which holds UDP port {ROCE_PORT}, lives and has not answered for {} s. If it is stopped, continue \
         or end it; if it gets no CPU, try again; or use another local address",
        ANSWER_TIMEOUT.as_secs()
    )]
    NoAnswer {
        /// The local address.
        addr: IpAddr,
        /// The process; 0 when it is in another PID namespace.
        pid: i32,
    },
    /// The process that holds the port speaks another version of the group's protocol.
    #[error(
        "{addr}: process {pid}, which holds UDP port {ROCE_PORT}, runs another version of rdmux: use the same version, or \
         another local address"
    )]
    OtherVersion {
        /// The local address.
        addr: IpAddr,
        /// The process; 0 when it is in another PID namespace.
        pid: i32,
    },
    /// The service is offered already, by this process or another one.
    #[error("{} of {addr} is in use by another process", service_words(*service))]
    ServiceInUse {
        /// The local address.
        addr: IpAddr,
        /// The service.
        service: ServiceId,
    },
    /// This process offers [`SERVICES_MAX`] services.
    #[error("{addr}: no more than {SERVICES_MAX} services on an address")]
    TooManyServices {
        /// The local address.
        addr: IpAddr,
    },
    /// A system call failed.
    #[error("{addr}: {what}: {source}")]
    Io {
        /// The local address.
        addr: IpAddr,
        /// The attempted operation.
        what: &'static str,
        /// Error that the system returned.
        source: io::Error,
    },
}

impl From<GroupError> for OpenError {
    fn from(error: GroupError) -> OpenError {
        match error {
            GroupError::NotLocal { addr } => OpenError::NotLocal(addr),
            other => OpenError::Provider(other.into()),
        }
    }
}

impl From<GroupError> for ListenError {
    fn from(error: GroupError) -> ListenError {
        match error {
            GroupError::ServiceInUse { .. } => ListenError::InUse(error.into()),
            other => ListenError::Provider(other.into()),
        }
    }
}

/// Returns the name of a service for people.
fn service_words(service: ServiceId) -> String {
    service
        .port()
        .map_or_else(|| format!("{service:?}"), |port| format!("port {port}"))
}

/// A connection-management datagram for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadDatagram {
    /// The sender.
    pub src: SocketAddr,
    /// The UDP payload, from BTH to ICRC. The ICRC is not checked yet.
    pub bytes: Vec<u8>,
}

/// Receives the messages for this process, on the group's own thread. It must not call back into the [`PortGroup`], and while it runs no
/// message moves on the address.
pub type Deliver = Box<dyn Fn(MadDatagram) + Send>;

/// Receives the connections of a process that has gone, on the same thread and with the same restrictions: the holder of the address ends
/// them in the place of that process.
pub(crate) type DisconnectOrphans = Box<dyn Fn(Vec<Peering>) + Send>;

/// Work that the group's thread does for an engine.
pub(crate) struct Calls {
    pub(crate) deliver: Deliver,
    pub(crate) disconnect_orphans: DisconnectOrphans,
    /// Another descriptor to wait for, and the function to call when it is readable, under the same restrictions.
    pub(crate) aside: Option<(OwnedFd, Box<dyn Fn() + Send>)>,
}

/// Counts of the datagrams that the holder read, by their fate; all zero in the other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounters {
    /// Forwarded to another process.
    pub forwarded: u64,
    /// Delivered to this process.
    pub delivered: u64,
    /// Not a message of connection management.
    pub malformed: u64,
    /// For a process that lives but could not accept it: stopped, or still looking for the new holder. The sender repeats the datagram.
    pub undeliverable: u64,
}

/// This process's place on port 4791 of an address.
///
/// A process may have several, on one address or on many. Dropping it leaves the group. A child that is forked and does
/// not `exec` keeps its parent's place taken, and must end before the place is free.
pub struct PortGroup {
    shared: Arc<GroupShared>,
    socket: RxSocket,
    slot: u8,
    records: Arc<OwnRecords>,
    thread: Option<JoinHandle<()>>,
    thread_id: ThreadId,
    _slot_claim: OwnedFd,
}

/// A process's part of the group's objects.
struct Place {
    slot: u8,
    slot_claim: OwnedFd,
    sockets: Sockets,
    ledger: Arc<Ledger>,
}

/// The reservation of a service for a process, which its places on the address share.
#[derive(Debug)]
pub(crate) struct ServiceClaim(#[expect(dead_code, reason = "the name is bound while it is open")] OwnedFd);

/// Returns the block of a slot.
fn block_of(slot: u8) -> u8 {
    slot / BLOCK
}

/// State that the group's thread and its user share.
struct GroupShared {
    names: Names,
    wake: OwnedFd,
    stop: AtomicBool,
    state: Mutex<GroupState>,
    counters: Counters,
}

#[derive(Default)]
struct GroupState {
    slot: u8,
    /// Services of this place, with the names that reserve them.
    services: Vec<(ServiceId, Arc<ServiceClaim>)>,
    /// The connection to the holder, in a member.
    link: Option<OwnedFd>,
}

#[derive(Default)]
struct Counters {
    forwarded: AtomicU64,
    delivered: AtomicU64,
    malformed: AtomicU64,
    undeliverable: AtomicU64,
}

impl GroupShared {
    fn state(&self) -> MutexGuard<'_, GroupState> {
        // No invariant spans a panic: each change of the state is one push, removal or assignment.
        self.state.lock()
    }
}

impl GroupState {
    /// Sends this process's slot and services to the holder. If the connection cannot take the message, this ends it, and the thread makes
    /// a new one, which begins with this message.
    fn announce(&mut self) {
        let Some(link) = &self.link else { return };
        let services = self.services.iter().map(|(id, _)| *id).collect();
        if message::send(
            link,
            &GroupMessage::Announce {
                slot: self.slot,
                services,
            },
        )
        .is_err()
        {
            let _ = rustix::net::shutdown(link, rustix::net::Shutdown::Both);
            self.link = None;
        }
    }
}

impl PortGroup {
    /// Takes a place on port 4791 of the local address `addr`, and becomes the first process there if there is none.
    ///
    /// # Errors
    /// A [`GroupError`] that says who has the port. Where it belongs to a foreign program the call takes 2 s, during
    /// which the survivors of a holder would have come forward.
    pub fn join(addr: IpAddr, deliver: Deliver) -> Result<PortGroup, GroupError> {
        let calls = Calls {
            deliver,
            disconnect_orphans: Box::new(|_| {}),
            aside: None,
        };
        Self::join_with(addr, calls)
    }

    /// Takes a place as [`PortGroup::join`] does, with a thread that also does other work.
    ///
    /// # Errors
    /// Those of [`PortGroup::join`].
    pub(crate) fn join_with(addr: IpAddr, calls: Calls) -> Result<PortGroup, GroupError> {
        let io = |what| {
            move |e: Errno| GroupError::Io {
                addr,
                what,
                source: e.into(),
            }
        };
        let names = Names::new(addr);
        let mut deadline = Instant::now() + JOIN_TIMEOUT;
        let give_up = Instant::now() + ANSWER_TIMEOUT;
        let mut pause = Duration::from_millis(1);
        loop {
            let entry = match names.claim_holder() {
                Ok(listener) => found(&names, listener)?,
                Err(Errno::ADDRINUSE) => enter(&names, give_up)?,
                Err(e) => return Err(io("bind an abstract Unix socket")(e)),
            };
            let failure = match entry {
                JoinOutcome::Place(role, place) => return Self::start(names, place, role, calls),
                JoinOutcome::NotYet(failure) => failure,
                JoinOutcome::HolderLeft(failure) => {
                    // The time for the holder's survivors begins here.
                    deadline = give_up.min(Instant::now() + JOIN_TIMEOUT);
                    failure
                }
            };
            if Instant::now() >= deadline {
                return Err(failure);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn start(names: Names, place: Place, role: GroupRole, calls: Calls) -> Result<PortGroup, GroupError> {
        let addr = names.addr();
        let io = |what| move |source| GroupError::Io { addr, what, source };
        let Place {
            slot,
            slot_claim,
            sockets,
            ledger,
        } = place;
        let open = |slot| sockets.of_slot(slot).map_err(io("duplicate a descriptor"));
        let (socket, cm_socket) = (open(slot)?, open(CM_SLOT)?);
        discard_queue(&socket).map_err(io("read UDP port 4791"))?;

        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| io("make an eventfd")(e.into()))?;
        let shared = Arc::new(GroupShared {
            names,
            wake,
            stop: AtomicBool::new(false),
            state: Mutex::new(GroupState {
                slot,
                ..GroupState::default()
            }),
            counters: Counters::default(),
        });
        let records = Arc::new(OwnRecords::new(Arc::clone(&ledger), slot));
        let shares = (sockets, ledger);
        let worker = Worker::new(Arc::clone(&shared), shares, (slot, cm_socket), role, calls)
            .map_err(io("duplicate a descriptor"))?;
        let thread =
            rdmux_verbs::thread::spawn("rdmux-cm", move || worker.run()).map_err(io("start a thread"))?;
        let thread_id = thread.thread().id();
        Ok(PortGroup {
            shared,
            socket,
            slot,
            records,
            thread: Some(thread),
            thread_id,
            _slot_claim: slot_claim,
        })
    }

    /// Returns the slot of this process: the top byte of all its QPNs and communication ids.
    #[must_use]
    pub fn slot(&self) -> u8 {
        self.slot
    }

    /// Binds a socket to listen on to the name of this process's slot; see [`rdmux_verbs::resources::places::connect_slot`].
    pub(crate) fn bind_slot(&self) -> Result<OwnedFd, Errno> {
        bind_slot(self.addr(), self.slot)
    }

    /// Returns the records of this process's connections.
    pub(crate) fn records(&self) -> Arc<OwnRecords> {
        Arc::clone(&self.records)
    }

    /// Returns the local address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.shared.names.addr()
    }

    /// Returns the socket of this process's slot: it receives the packets to the QPNs of the slot.
    ///
    /// # Errors
    /// Those of `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn socket(&self) -> io::Result<RxSocket> {
        self.socket.try_clone()
    }

    /// Offers `service`: once this returns, requests for it that arrive on this address come to this process.
    ///
    /// # Errors
    /// [`GroupError::ServiceInUse`], and those of making the socket whose name reserves the service.
    pub fn register_service(&self, service: ServiceId) -> Result<(), GroupError> {
        self.offer(service, None).map(drop)
    }

    /// Offers `service` as [`PortGroup::register_service`] does, beside the places of this process that share its reservation, if there are any.
    /// A request for it comes to one of them. Returns the reservation.
    pub(crate) fn offer(
        &self,
        service: ServiceId,
        shared: Option<Arc<ServiceClaim>>,
    ) -> Result<Arc<ServiceClaim>, GroupError> {
        let addr = self.addr();
        let mut state = self.shared.state();
        if state.services.iter().any(|(id, _)| *id == service) {
            return Err(GroupError::ServiceInUse { addr, service });
        }
        if state.services.len() >= SERVICES_MAX {
            return Err(GroupError::TooManyServices { addr });
        }
        let claim = match shared {
            Some(claim) => claim,
            None => {
                let claim = self.shared.names.claim_service(service).map_err(|e| match e {
                    Errno::ADDRINUSE => GroupError::ServiceInUse { addr, service },
                    e => GroupError::Io {
                        addr,
                        what: "bind an abstract Unix socket",
                        source: e.into(),
                    },
                })?;
                Arc::new(ServiceClaim(claim))
            }
        };
        state.services.push((service, claim.clone()));
        state.announce();
        Ok(claim)
    }

    /// Withdraws an offered service; ignores a service that is not offered.
    pub fn unregister_service(&self, service: ServiceId) {
        let mut state = self.shared.state();
        state.services.retain(|(id, _)| *id != service);
        state.announce();
    }

    /// Returns the counts of this process's work as the holder.
    #[must_use]
    pub fn counters(&self) -> GroupCounters {
        let c = &self.shared.counters;
        GroupCounters {
            forwarded: c.forwarded.load(Relaxed),
            delivered: c.delivered.load(Relaxed),
            malformed: c.malformed.load(Relaxed),
            undeliverable: c.undeliverable.load(Relaxed),
        }
    }
}

impl Drop for PortGroup {
    fn drop(&mut self) {
        // The holder ends the remaining connections, and another process may use the region.
        self.records.abandon();
        self.shared.stop.store(true, Relaxed);
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
        // If its own callback drops the group, the thread ends by itself.
        if let Some(thread) = self
            .thread
            .take()
            .filter(|_| thread::current().id() != self.thread_id)
        {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for PortGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortGroup")
            .field("addr", &self.addr())
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

/// Destination of a datagram to QPN 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The process that offers this service.
    Service(ServiceId),
    /// The process that issued the communication id.
    Slot(u8),
    /// All processes: one of them may know more.
    Everyone,
}

/// Returns the destination of the UDP payload `payload`; `None` if it is not a message of connection management.
#[must_use]
pub fn route(payload: &[u8]) -> Option<Route> {
    let packet = Packet::parse(payload).ok()?;
    let Opcode { transport, operation } = packet.bth.opcode;
    if (packet.bth.dest_qpn, transport, operation) != (Qpn::GSI, Transport::Ud, Operation::SendOnly) {
        return None;
    }
    Some(match cm::destination(packet.payload())? {
        Destination::Service(service) => Route::Service(service),
        Destination::CommId(id) => Route::Slot((id >> 24) as u8),
        Destination::Everyone => Route::Everyone,
    })
}

/// Outcome of an attempt to take a place.
enum JoinOutcome {
    Place(GroupRole, Place),
    /// Nobody listens, or the group cannot grow at the moment; with the error to report when the time is over.
    NotYet(GroupError),
    /// A holder was there a moment ago, and may come back; with the error to report when the time is over.
    HolderLeft(GroupError),
}

/// Becomes the first process of an address, if no process there has sockets.
fn found(names: &Names, listener: OwnedFd) -> Result<JoinOutcome, GroupError> {
    let addr = names.addr();
    let io = |what| move |source| GroupError::Io { addr, what, source };
    let sockets = match Sockets::bind(addr) {
        Ok(sockets) => sockets,
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            return Ok(JoinOutcome::NotYet(GroupError::PortInUse { addr }));
        }
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => return Err(GroupError::NotLocal { addr }),
        Err(source) => return Err(io("bind UDP port 4791")(source)),
    };
    let ledger = Ledger::create().map_err(io("make a file in memory"))?;
    // Starts at random, so that the slots of processes that ended a moment ago are not the first to be reused.
    let claim = names.claim_a_slot(names::random() as u8, |_| false);
    let claim = claim.map_err(|e| io("bind an abstract Unix socket")(e.into()))?;
    // Processes that are about to end may still have all names of the first block, though no socket.
    let Some((slot, slot_claim)) = claim.filter(|(slot, _)| block_of(*slot) < sockets.blocks()) else {
        return Ok(JoinOutcome::NotYet(GroupError::PortInUse { addr }));
    };
    rustix::net::listen(&listener, worker::BACKLOG).map_err(|e| io("listen on a Unix socket")(e.into()))?;
    let place = Place {
        slot,
        slot_claim,
        sockets,
        ledger: Arc::new(ledger),
    };
    Ok(JoinOutcome::Place(GroupRole::holder(listener), place))
}

/// Checks that the holder of a port is a process of the same user, and returns its PID.
fn check_holder(addr: IpAddr, link: &OwnedFd) -> Result<i32, GroupError> {
    let (uid, pid) = peer_credentials(link).map_err(|source| GroupError::Io {
        addr,
        what: "read the credentials of the holder of the port",
        source,
    })?;
    match user_of(uid) {
        User::Own => Ok(pid),
        User::Other => Err(GroupError::OtherUser { addr, uid, pid }),
        User::Unknown => Err(GroupError::UnknownUser { addr, uid }),
    }
}

/// Takes a free slot; the search begins at `next_slot`.
fn take_place(names: &Names, ledger: Ledger, next_slot: u8) -> Result<Place, GroupError> {
    let addr = names.addr();
    let claim = names.claim_a_slot(next_slot, |slot| ledger.is_dirty(slot));
    let claim = claim.map_err(|e| GroupError::Io {
        addr,
        what: "bind an abstract Unix socket",
        source: e.into(),
    })?;
    let (slot, slot_claim) = claim.ok_or(GroupError::Full { addr })?;
    Ok(Place {
        slot,
        slot_claim,
        sockets: Sockets::new(addr),
        ledger: Arc::new(ledger),
    })
}

/// Takes a slot, and asks the holder for the sockets of its block and the blocks below.
fn enter(names: &Names, deadline: Instant) -> Result<JoinOutcome, GroupError> {
    let addr = names.addr();
    let io = |what| {
        move |e: Errno| GroupError::Io {
            addr,
            what,
            source: e.into(),
        }
    };
    let link = match names.connect_holder() {
        Ok(link) => link,
        // The holder is between its bind and its listen, or has gone.
        Err(Errno::CONNREFUSED) => return Ok(JoinOutcome::NotYet(GroupError::PortInUse { addr })),
        // The holder's backlog is full.
        Err(Errno::AGAIN) => return Ok(JoinOutcome::HolderLeft(GroupError::PortInUse { addr })),
        Err(e) => return Err(io("connect to the holder of the port")(e)),
    };
    let pid = check_holder(addr, &link)?;
    let no_answer = || GroupError::NoAnswer { addr, pid };
    let mut buffer = [0; message::LEN_MAX];
    let mut place = None;
    loop {
        if !message::wait_readable(link.as_fd(), deadline).map_err(io("poll"))? {
            return Err(no_answer());
        }
        let (len, descriptors) = match receive_with_descriptors(&link, &mut buffer) {
            Ok(received) => received,
            // This process has too many.
            Err(Errno::MSGSIZE) => return Err(io("receive descriptors of the group")(Errno::MFILE)),
            Err(_) => return Ok(JoinOutcome::HolderLeft(no_answer())),
        };
        let taking = match (GroupMessage::decode(&buffer[..len]), &mut place) {
            (
                Some(GroupMessage::Welcome {
                    version: message::VERSION,
                    next_slot,
                }),
                None,
            ) => {
                let ledger = descriptors.into_iter().next().and_then(Ledger::from_fd);
                place.insert(take_place(names, ledger.ok_or_else(no_answer)?, next_slot)?)
            }
            (Some(GroupMessage::Welcome { .. }), None) => return Err(GroupError::OtherVersion { addr, pid }),
            (Some(GroupMessage::Block(block)), Some(place)) if block == place.sockets.blocks() => {
                if !place.sockets.add(descriptors) {
                    return Err(no_answer());
                }
                place
            }
            (Some(GroupMessage::NoBlock(errno)), Some(_)) => {
                let source = io::Error::from_raw_os_error(errno);
                return Ok(JoinOutcome::NotYet(GroupError::NotGrown { addr, pid, source }));
            }
            // Messages to all processes.
            (Some(GroupMessage::NextSlot(_) | GroupMessage::Mad { .. }), Some(_)) => continue,
            _ if len == 0 => return Ok(JoinOutcome::HolderLeft(no_answer())),
            _ => return Err(no_answer()),
        };
        let next = taking.sockets.blocks();
        if next <= block_of(taking.slot) {
            let want = GroupMessage::Want {
                slot: taking.slot,
                block: next,
            };
            if message::send(&link, &want).is_err() {
                return Ok(JoinOutcome::HolderLeft(no_answer()));
            }
        } else if let Some(place) = place {
            return Ok(JoinOutcome::Place(GroupRole::Member(link), place));
        }
    }
}

/// Discards the datagrams that came for the former process of a slot.
fn discard_queue(socket: &RxSocket) -> io::Result<()> {
    const BATCHES_MAX: usize = 4096; // more than any buffer holds; a sender must not keep us here
    let mut batch = RxBatch::new();
    for _ in 0..BATCHES_MAX {
        if socket.recv_batch(&mut batch)? == 0 {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
