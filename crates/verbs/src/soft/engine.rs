//! The engine's driver: it moves datagrams between sockets and the [`Rnic`], keeps its timers, carries out its flushes and
//! wakes who waits.
//!
//! Whoever has the turn ([`turn`]) drives. Normally that is the engine's thread, which sleeps in epoll until a datagram, a
//! timer or a kick. A caller that polls a completion queue drives as well, and while one does the thread leaves the socket to it
//! ([`handover`]): two programs on two CPUs are two spinners, not four. A caller that goes to sleep gives the socket back at
//! once, and one that waits sits in the thread's place ([`seat`]). A caller that only posts, and finds the turn taken, leaves its request for whoever has it.

mod flush;
mod handover;
mod looks;
mod open;
mod seat;
mod sleep;
mod sockets;
mod turn;
mod waker;

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(test)]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmEvent, CmId, Peering};
use rdmux_rnic::trace::{ConnectionNote, Note};
use rdmux_rnic::{
    ArmedQueues, Arrival, Config, Counters, Cqn, Event, Fault, Histogram, McastError, Memory, Path,
    PostError, QpAttributes, QpInfo, QpState, QpType, Qpn, Rnic, SendQueue, SendRequest, Time, TransmitBuf,
};
use rdmux_wire::cm::{RejReason, ServiceId};
use rdmux_wire::roce::PathMtu;
use rustix::event::epoll;
use rustix::io::Errno;

use crate::device::PostListError;
use crate::event::{AsyncEvent, AsyncEvents};
use crate::waiting::{Plan, WaitMode};

use self::flush::Flushers;
use self::handover::{HandOver, POLLER_LEASE_NS};
use self::looks::Looks;
pub use self::open::check_environment;
pub use self::open::{OpenError, Options, SharedMemory};
use self::seat::{Seat, Waiter};
use self::sleep::Epoll;
use self::sockets::TxSockets;
use self::turn::{Turn, Turns};
pub(crate) use self::waker::{CmQueue, CmSink, Waker};
use super::capture;
use super::faults::{self, Leaving};
use super::group::{Calls, Group, GroupError, MadDatagram, OwnRecords, Record};
use super::load::{conditions, current_cpu};
use super::mcast::Memberships;
use super::metrics::{self, DeviceMetrics};
use super::port::Port;
use super::resources::DeviceAt;
use super::shm::link::{Links, slot_of};
use super::shm::ring::Meta;
use super::trace::Level;
use super::udp::{Datagram, Outgoing, ROCE_PORT, RxBatch, RxSocket, TxSocket, interface_of};

/// Looks of a spinning caller between two at whether somebody else needs its CPU.
const LOOKS_PER_LOOK_AROUND: u32 = 64;
/// Polls that found nothing since a completion queue was armed last, after which a caller is taken for one that polls until it finds
/// something. Programs that sleep poll some times, and then arm.
const POLLS_OF_SPINNER: u32 = 64;
/// Turns in a row that a caller takes for what others left.
const TURNS_FOR_OTHERS: u32 = 16;
/// Receives of the engine's thread before others have their turn: transmit, timers. A polling caller receives once a call:
/// looking again after a hit would delay what it waits for by a system call.
const RECEIVES_PER_TURN: usize = 8;
/// How often a process that ends tries to get the turn, for its last acknowledgements: it must not wait for a thread that does not go on.
const LAST_TRIES: usize = 1_000;
/// How often a polling caller looks at what other engines have to say. Their messages have a thread of their own, but one that may
/// wait long for a CPU that a caller spins on.
const SERVE_NS: u64 = 100_000;
/// Bytes gathered before they are sent.
const TRANSMIT_BYTES: usize = 256 << 10;
/// How long a full socket may hold up the others: a NIC's queue empties faster, a neighbour that is not there never.
const SOCKET_FULL_NS: u64 = 2_000_000;
/// How long to wait for room in a socket's buffer, which empties by itself in well under a millisecond.
const SOCKET_RETRY_NS: u64 = 500_000;
/// Sleeps shorter than this end when they should, not at the next millisecond.
const PRECISE_NS: u64 = 10_000_000;

/// Why a queue pair was not attached to a multicast group.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The device does not attach it.
    #[error(transparent)]
    Refused(#[from] McastError),
    /// The system did not let the device join.
    #[error("joining {group}: {source}")]
    Join {
        /// The group.
        group: IpAddr,
        /// Why.
        source: io::Error,
    },
}

/// A service that an application offers.
#[derive(Debug)]
pub(crate) struct ListenerEntry {
    pub(crate) sink: CmSink,
    /// It is asked for datagrams, not for connections.
    pub(crate) datagrams: bool,
}

/// A connection that an application holds, or a service that it asks for.
#[derive(Debug)]
pub(crate) struct ConnectionEntry {
    pub(crate) sink: CmSink,
    /// The queue pair that ends with it, until this side has ended the connection.
    pub(crate) qpn: Option<Qpn>,
    /// Its place in the ledger of the address, as soon as the peer may take it for connected.
    pub(crate) record: Option<Record>,
}

/// Until when those who may drive sleep at most, in ns of the engine's clock; 0: awake, or looks again by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sleeps {
    thread_ns: u64,
    seat_ns: u64,
}

/// What is reached under the engine's lock.
pub(crate) struct Core {
    pub(crate) rnic: Port,
    rx: RxSocket,
    memberships: Memberships,
    pub(crate) links: Links,
    /// When it was last heard what other engines have to say.
    served_at: Time,
    sleeps: Sleeps,
    /// The thread sleeps in epoll.
    thread_asleep: bool,
    /// A caller looks out for a moment: while it does, peers need not ring for a thread that sleeps.
    caller_looks: bool,
    /// Peers ring for the thread.
    bells: bool,
    /// How often completion queues have told who waits for them.
    told: Arc<AtomicU64>,
    /// Calls of polling callers: all, and those since a completion queue was armed.
    polls: u32,
    polls_unarmed: u32,
    looks: Looks,
    /// How often the sockets were looked at.
    #[cfg(test)]
    looked: u64,
    batch: RxBatch,
    tx: TxSockets,
    buf: TransmitBuf,
    /// Trains of `buf` that were sent already; the rest waits for the socket.
    sent: usize,
    /// Since when a socket takes no more.
    blocked: Option<Time>,
    gso: bool,
    address: IpAddr,
    pub(crate) cq_wakers: HashMap<Cqn, Weak<Waker>>,
    pub(crate) qp_errors: HashMap<Qpn, rdmux_rnic::Status>,
    pub(crate) async_events: AsyncEvents,
    pub(crate) connections: HashMap<CmId, ConnectionEntry>,
    /// Connections that were accepted and wait for the peer's last message, or its first request, by their queue pairs.
    pub(crate) accepted: HashMap<Qpn, CmId>,
    pub(crate) listeners: HashMap<ServiceId, ListenerEntry>,
    /// Trains that could not be sent.
    pub(crate) send_errors: u64,
    /// How long flushes took that were carried out for peers.
    pub(crate) flush_times: Histogram,
    records: Arc<OwnRecords>,
    flushers: Arc<Flushers>,
    /// Of flushes that were refused, to be dropped when the engine is unlocked.
    ended: Vec<Arc<dyn Memory>>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// A send request that was posted while somebody else had the turn, with its place in the queue of its queue pair.
type Left = (Qpn, SendRequest);

/// A turn at the engine. Memories that end meanwhile are dropped behind it: dropping one may unmap, close, or run its owner's code,
/// which may use the device.
pub(crate) struct Locked<'a> {
    // Dropped in this order.
    core: Turn<'a, Core>,
    behind: Behind<'a>,
}

/// What is to be done behind a turn.
struct Behind<'a> {
    engine: &'a Engine,
    ended: Vec<Arc<dyn Memory>>,
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        self.behind.ended = self.core.ended_memories();
    }
}

impl Drop for Behind<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.engine.core.is_rung() {
            self.engine.take_turn();
        }
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

/// A device's engine, shared by all its objects.
#[derive(Debug)]
pub(crate) struct Engine {
    core: Turns<Core, Left>,
    kick: Waker,
    /// The clock's 0.
    start: Instant,
    hand_over: HandOver,
    /// Queues whose owners may sleep until they are told.
    armed_queues: ArmedQueues,
    /// See [`Core::told`].
    told: Arc<AtomicU64>,
    stop: AtomicBool,
    /// Who waits and drives, one at a time: how, by its experience.
    seat: Mutex<Seat>,
    /// Ends the sleep of who sits there.
    seat_kick: Waker,
    /// The sockets and bells, for who sits there.
    watch: OwnedFd,
    waiting: Option<WaitMode>,
    group: Mutex<Option<Group>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Leases that the thread slept through to their end while a completion queue was armed.
    #[cfg(test)]
    overslept: AtomicUsize,
    /// Woken by asynchronous events.
    pub(crate) async_waker: Arc<Waker>,
}

impl Engine {
    pub(crate) fn open(address: IpAddr, options: Options) -> Result<Arc<Engine>, OpenError> {
        let io = |what| move |source| OpenError::Io { what, source };
        if address.is_unspecified() || address.is_multicast() || is_broadcast(address) {
            return Err(OpenError::NotOneHost(address));
        }
        let spec = match options.faults {
            None => faults::of_process()?,
            some => some,
        };
        // The group's thread may hear of a connection before the engine stands: it waits for the slot here.
        let slot: Arc<Mutex<Weak<Engine>>> = Arc::default();
        let deliver = {
            let slot = slot.clone();
            move |mad: MadDatagram| {
                let engine = slot.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
                if let Some(engine) = engine {
                    engine.handle_mad(&mad);
                }
            }
        };
        let bury = {
            let slot = slot.clone();
            move |dead: Vec<Peering>| {
                let engine = slot.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
                if let Some(engine) = engine {
                    engine.with(|core, now| {
                        for peering in &dead {
                            core.rnic.cm().bury(now, peering);
                        }
                    });
                }
            }
        };
        let serve = {
            let slot = slot.clone();
            move || {
                let engine = slot.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
                if let Some(engine) = engine {
                    engine.serve_links();
                }
            }
        };
        let control = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| io("epoll")(e.into()))?;
        let aside = control.try_clone().map_err(io("epoll"))?;
        let group = Group::join_with(
            address,
            Calls {
                deliver: Box::new(deliver),
                bury: Box::new(bury),
                aside: Some((aside, Box::new(serve))),
            },
        )?;
        let rx = group.socket().map_err(io("UDP socket"))?;
        if let Some(bytes) = options.receive_buffer_bytes {
            rx.set_buffer_bytes(bytes).map_err(io("UDP receive buffer"))?;
        }
        let buffer_bytes = rx.buffer_bytes().map_err(io("UDP receive buffer"))?;
        let gsi = TxSocket::bind(address).map_err(io("UDP socket"))?;
        // Packets that are lost and held back one by one leave one by one, too.
        let gso = gsi.self_test().map_err(io("UDP self-test"))? && spec.is_none();

        let mut seed = [0u8; 32];
        fill_random(&mut seed).map_err(io("random numbers"))?;
        // Not of the seed, since peers are told: who connects, not which node it is.
        let mut guid = [0u8; 8];
        fill_random(&mut guid).map_err(io("random numbers"))?;
        let config = Config {
            address,
            slot: group.slot(),
            seed,
            guid: u64::from_le_bytes(guid),
            gsi_src_port: gsi.local_addr().port(),
            receive_window_bytes: window_for(buffer_bytes),
            traffic: options.traffic,
            mtu: device_mtu(address).bytes(),
        };
        let listener = group.bind_slot().ok();
        let links = Links::new(
            address,
            group.slot(),
            listener,
            control,
            options.shared_memory.is_on(),
        );
        let mut links = links.map_err(|errno| io("shared memory")(errno.into()))?;
        let capture = capture::of_process(format!("{address}/{}", group.slot()))?;
        if spec.is_some() || capture.is_some() {
            links.keep_to_packets();
        }
        if spec.is_some() {
            links.lose_packets();
        }
        // One clock for all engines: a thread's load is watched by it.
        static START: OnceLock<Instant> = OnceLock::new();
        let start = *START.get_or_init(Instant::now);
        let now = Time(start.elapsed().as_nanos() as u64);
        let mut port = Port::new(Rnic::new(config), spec, now);
        let device = DeviceAt {
            address,
            slot: group.slot(),
        };
        let level = Level::of_environment();
        port.trace(level, device, Time(start.elapsed().as_nanos() as u64));
        if let Some(capture) = capture {
            port.capture(capture);
        }
        let core = Core {
            rnic: port,
            rx,
            memberships: Memberships::new().map_err(io("epoll"))?,
            links,
            served_at: Time(0),
            sleeps: Sleeps::default(),
            thread_asleep: false,
            caller_looks: false,
            bells: false,
            told: Arc::default(),
            polls: 0,
            polls_unarmed: 0,
            looks: Looks::default(),
            #[cfg(test)]
            looked: 0,
            batch: RxBatch::new(),
            tx: TxSockets::new(address, gsi),
            buf: TransmitBuf::new(TRANSMIT_BYTES, gso),
            sent: 0,
            blocked: None,
            gso,
            address,
            cq_wakers: HashMap::new(),
            qp_errors: HashMap::new(),
            async_events: AsyncEvents::new().map_err(io("eventfd"))?,
            connections: HashMap::new(),
            accepted: HashMap::new(),
            listeners: HashMap::new(),
            send_errors: 0,
            flush_times: Histogram::default(),
            records: group.records(),
            flushers: Arc::default(),
            ended: Vec::new(),
        };
        let waiting = options.waiting.or_else(WaitMode::of_environment);
        let watch = watch_all([core.rx.as_fd(), core.memberships.as_fd(), core.links.bells()]);
        let watch = watch.map_err(|errno| io("epoll")(errno.into()))?;
        let engine = Arc::new(Engine {
            async_waker: core.async_events.waker(),
            armed_queues: core.rnic.armed_queues(),
            told: core.told.clone(),
            core: Turns::new(core),
            kick: Waker::new().map_err(io("eventfd"))?,
            start,
            hand_over: HandOver::new(),
            stop: AtomicBool::new(false),
            seat: Mutex::new(Seat::new(waiting)),
            seat_kick: Waker::new().map_err(io("eventfd"))?,
            watch,
            waiting,
            group: Mutex::new(Some(group)),
            thread: Mutex::new(None),
            #[cfg(test)]
            overslept: AtomicUsize::new(0),
        });
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&engine);
        let listening = engine.lock().links.listen();
        listening.map_err(|errno| io("shared memory")(errno.into()))?;
        *engine
            .lock()
            .flushers
            .engine
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&engine);
        let epoll = Epoll::new(&engine).map_err(io("epoll"))?;
        let thread = crate::thread::spawn("rdmux-nic", {
            let engine = engine.clone();
            move || engine.run(&epoll)
        })
        .map_err(io("engine thread"))?;
        *engine.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        metrics::enlist(&engine);
        Ok(engine)
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        self.begin(self.core.take())
    }

    /// A turn, unless somebody has it.
    fn try_lock(&self) -> Option<Locked<'_>> {
        Some(self.begin(self.core.try_take()?))
    }

    #[inline]
    fn begin<'a>(&'a self, mut core: Turn<'a, Core>) -> Locked<'a> {
        if self.core.is_rung() {
            self.post_left(&mut core);
        }
        let behind = Behind {
            engine: self,
            ended: Vec::new(),
        };
        Locked { core, behind }
    }

    /// Posts what others left.
    #[cold]
    fn post_left(&self, core: &mut Core) {
        let (left, now) = (self.core.left(), self.now());
        for (qpn, request) in left {
            core.rnic.post_reserved(now, qpn, request);
        }
        core.finish(now, false);
        self.wake_early(core);
    }

    /// Takes a turn to see to what was left, unless somebody has it and will. A caller is not kept for ever: then it is the thread's
    /// to do.
    #[cold]
    fn take_turn(&self) {
        for _ in 0..TURNS_FOR_OTHERS {
            if !self.core.is_rung() {
                return;
            }
            let Some(mut core) = self.core.try_take() else {
                return;
            };
            self.post_left(&mut core);
            let ended = core.ended_memories();
            drop(core);
            drop(ended);
        }
        self.kick.wake();
    }

    /// The moment that a time of its stands for.
    pub(crate) fn instant(&self, time: Time) -> Instant {
        self.start + Duration::from_nanos(time.0)
    }

    pub(crate) fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// Looks for something, and drives on behalf of the caller that polls when it is not there yet, unless somebody drives
    /// already. The thread goes on looking out beside a caller that may sleep without a further word; for one that comes back it
    /// rests, and acknowledgements wait while requests keep coming in.
    pub(crate) fn poll<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        if let Some(found) = look() {
            return Some(found);
        }
        let mut core = self.try_lock()?;
        let now = self.now();
        core.polls = core.polls.wrapping_add(1);
        core.polls_unarmed = match self.armed_queues.any() {
            true => 0,
            false => core.polls_unarmed.saturating_add(1),
        };
        let comes_back = core.polls_unarmed > POLLS_OF_SPINNER;
        if comes_back {
            self.hand_over.polls(now.0);
        }
        let received = core.receive_polled(now);
        let met = now.since_ns(core.served_at) > SERVE_NS && core.serve_links(now);
        let yields = core.polls.is_multiple_of(LOOKS_PER_LOOK_AROUND) && core.needs_to_yield(now);
        core.finish(now, received == 0 || !comes_back);
        self.wake_early(&core);
        drop(core);
        let mut found = look();
        if yields && found.is_none() {
            // Who it looks for may be the one who cannot run.
            thread::yield_now();
            // A caller that finds nothing goes on to look at other things, which may have happened since, but after this.
            found = look();
        }
        if met {
            self.wake_driver();
        }
        if received > 0 && comes_back && !self.hand_over.is_leased() {
            // The caller may never come back for what it left owing: let the thread begin to watch it.
            self.kick.wake();
        }
        found
    }

    /// Sends the acknowledgements that wait.
    pub(crate) fn acknowledge(&self) {
        for _ in 0..LAST_TRIES {
            if let Some(mut core) = self.try_lock() {
                core.finish(self.now(), true);
                return;
            }
            thread::yield_now();
        }
    }

    /// Posts a send request, and sends what it wants sent. Where somebody else has the turn, and the request is one that the queue
    /// is sure to take, it is left to them.
    pub(crate) fn post_send(
        &self,
        queue: &SendQueue,
        qpn: Qpn,
        request: SendRequest,
    ) -> Result<(), PostError> {
        let mut core = match self.try_lock() {
            Some(core) => core,
            None if queue.reserve(&request) => {
                if self.core.leave((qpn, request)) {
                    self.take_turn();
                }
                return Ok(());
            }
            None => self.lock(),
        };
        if core.rnic.post_directly(|| self.now(), qpn, &request) {
            if !core.rnic.is_quiet() {
                self.finish(core, self.now());
            }
            return Ok(());
        }
        let now = self.now();
        let posted = core.post_send(now, qpn, request);
        self.finish(core, now);
        posted
    }

    /// As [`Engine::post_send`], in order. Fails at the first that is not taken.
    pub(crate) fn post_send_list(
        &self,
        queue: &SendQueue,
        qpn: Qpn,
        requests: Vec<SendRequest>,
    ) -> Result<(), PostListError> {
        let failed = |index| move |source| PostListError { index, source };
        let mut numbered = requests.into_iter().enumerate();
        let Some(mut core) = self.try_lock() else {
            return numbered
                .try_for_each(|(index, request)| self.post_send(queue, qpn, request).map_err(failed(index)));
        };
        let now = self.now();
        let posted = numbered.try_for_each(|(index, request)| {
            if core.rnic.post_directly(|| now, qpn, &request) {
                return Ok(());
            }
            core.rnic.post_send(now, qpn, request).map_err(failed(index))
        });
        self.finish(core, now);
        posted
    }

    /// Calls `f` on the device, then sends what it wants sent.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Core, Time) -> R) -> R {
        let mut core = self.lock();
        let now = self.now();
        let result = f(&mut core, now);
        self.finish(core, now);
        result
    }

    /// Sends what the device wants sent, and wakes the thread if it would sleep for too long.
    fn finish(&self, mut core: Locked<'_>, now: Time) {
        core.finish(now, false);
        self.wake_early(&core);
    }

    /// Wakes those who sleep past something that is to be done: each, since either may leave it to the other. Requests that follow
    /// each other set later timers, so this happens once in a timeout, not once a request.
    fn wake_early(&self, core: &Core) {
        if core.sleeps == Sleeps::default() {
            return;
        }
        let due = if core.blocked.is_some() || core.links.have_waiting() {
            1
        } else {
            core.rnic.poll_timeout().map_or(u64::MAX, |at| at.0)
        };
        if due < core.sleeps.thread_ns {
            self.kick.wake();
        }
        if due < core.sleeps.seat_ns {
            self.seat_kick.wake();
        }
    }

    fn handle_mad(&self, mad: &MadDatagram) {
        self.with(|core, now| {
            // Data that the peer sent before this message came by another socket: a DREQ must not overtake the last answer.
            core.receive(now, RECEIVES_PER_TURN);
            core.rnic
                .handle_datagram(now, mad.src.ip(), mad.src.port(), &mad.bytes, mad.bytes.len());
            // The engine's thread was woken for that data, finds none, and sleeps on: nobody else sends what it is owed.
            core.finish(now, true);
        });
    }

    /// Others on this host have something to say.
    fn serve_links(&self) {
        let met = self.with(|core, now| {
            let met = core.serve_links(now);
            core.finish(now, true);
            met
        });
        if met {
            self.wake_driver();
        }
    }

    /// Reserves a service id for this process among those that share the address.
    pub(crate) fn register_service(&self, service: ServiceId) -> Result<(), GroupError> {
        match &*self.group.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(group) => group.register_service(service),
            None => Ok(()),
        }
    }

    pub(crate) fn unregister_service(&self, service: ServiceId) {
        if let Some(group) = &*self.group.lock().unwrap_or_else(PoisonError::into_inner) {
            group.unregister_service(service);
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        *self.lock().rnic.counters()
    }

    /// What is measured of it; `None` when it is closed.
    pub(crate) fn metrics(&self) -> Option<DeviceMetrics> {
        if self.stop.load(Ordering::Acquire) {
            return None;
        }
        let core = self.lock();
        let (queue_pairs, regions, completion_queues) = core.rnic.object_counts();
        Some(DeviceMetrics {
            address: core.address,
            slot: core.rnic.config().slot,
            counters: *core.rnic.counters(),
            send_errors: core.send_errors,
            is_up: !core.rnic.is_down(),
            queue_pairs,
            regions,
            completion_queues,
            latencies: core.rnic.latencies().clone(),
            flushes: core.flush_times,
            faults: core.rnic.fault_counts(),
        })
    }

    /// The engine's thread.
    fn run(self: Arc<Engine>, epoll: &Epoll) {
        // Pacing needs timers that fire on time; what cannot be had is done without.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
        let mut waiter = Waiter::new(self.waiting);
        // Since when nothing has come, and whether it has slept since.
        let mut idle: Option<(Time, bool)> = None;
        while !self.stop.load(Ordering::Acquire) {
            if self.core.is_rung() {
                self.take_turn();
            }
            if self.waiting != Some(WaitMode::Running) && self.hand_over.lease(self.now().0) {
                // Look again when the lease is over, or when the caller says that it sleeps.
                let lease = Duration::from_nanos(POLLER_LEASE_NS);
                if !self.kick.wait(Some(lease)) {
                    #[cfg(test)]
                    self.overslept
                        .fetch_add(usize::from(self.armed_queues.any()), Ordering::Relaxed);
                    if self.hand_over.park() {
                        self.kick.wait(None);
                    }
                }
                self.hand_over.unpark();
                idle = None;
                continue;
            }
            self.hand_over.unpark();
            let mut core = self.lock();
            let now = self.now();
            let received = core.receive(now, RECEIVES_PER_TURN);
            core.finish(now, true);
            core.links.tell_cpu(current_cpu());
            let peer_cpu = core.links.peer_cpu();
            let flushes = core.flushers.busy.load(Ordering::Relaxed) > 0;
            let caller_looks = core.caller_looks;
            drop(core);
            if received > 0 {
                if let Some((since, slept)) = idle.take() {
                    waiter.ended(now.since_ns(since), slept);
                }
                continue;
            }
            let (since, slept_before) = *idle.get_or_insert((now, false));
            // While a flush runs the thread sleeps even when it is to spin: on one CPU it would hold up the flush, and who waits
            // for one waits for a disk. Beside a caller that looks it need not.
            if !flushes && !caller_looks {
                match waiter.plan(now.since_ns(since), now, peer_cpu) {
                    Plan::Sleep => {}
                    Plan::Yield => {
                        thread::yield_now();
                        continue;
                    }
                    Plan::Spin { .. } => {
                        std::hint::spin_loop();
                        continue;
                    }
                }
            }
            let slept = epoll.wait(&self) || slept_before;
            idle = Some((since, slept));
        }
    }

    /// Ends the engine: its thread and its membership of the address's group.
    pub(crate) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        self.kick.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(group);
        let mut core = self.lock();
        core.links.close();
        let capture = core.rnic.end_capture();
        let trace = core.rnic.set_tracer(None);
        drop(core);
        drop(trace);
        if let Some(capture) = capture {
            capture.finish();
        }
    }
}

/// A descriptor that is readable when one of these is.
fn watch_all(fds: [BorrowedFd<'_>; 3]) -> Result<OwnedFd, Errno> {
    let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(&watch, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(watch)
}

/// Bytes in flight that one connection may have towards a socket with this buffer. The kernel charges more than the payload,
/// and several connections share the buffer: losses teach those to take less.
fn window_for(buffer_bytes: usize) -> u32 {
    (buffer_bytes / 4).clamp(16 << 10, 512 << 10) as u32
}

fn fill_random(seed: &mut [u8]) -> io::Result<()> {
    use rand_core::TryRngCore;
    rand_core::OsRng.try_fill_bytes(seed).map_err(io::Error::other)
}

impl Core {
    /// Memories that have ended, for the caller to drop behind its turn.
    fn ended_memories(&mut self) -> Vec<Arc<dyn Memory>> {
        let mut ended = self.rnic.poll_ended_memories();
        ended.append(&mut self.ended);
        ended
    }

    /// Takes in what has arrived, for a caller that polls.
    fn receive_polled(&mut self, now: Time) -> usize {
        if self.looks.is_due(now) {
            return self.receive(now, 1);
        }
        let received = self.links.receive(&mut self.rnic, now);
        self.after_receive(now);
        received
    }

    /// Has peers ring while the thread sleeps and no caller looks out. False: there is something to take in already.
    fn set_bells(&mut self) -> bool {
        let wanted = self.thread_asleep && !self.caller_looks;
        if wanted == self.bells {
            return true;
        }
        if wanted {
            self.bells = self.links.prepare_sleep();
            self.bells
        } else {
            self.bells = false;
            self.links.awake();
            true
        }
    }

    /// Whether somebody else needs the CPU that this caller spins on.
    fn needs_to_yield(&mut self, now: Time) -> bool {
        let cpu = current_cpu();
        self.links.tell_cpu(cpu);
        #[cfg(test)]
        if tests::OVERSUBSCRIBED.get() {
            return true;
        }
        self.links.peer_cpu() == Some(cpu) || conditions(now.0).oversubscribed
    }

    /// Timers, and what more than the usual is owed for what came in.
    fn after_receive(&mut self, now: Time) {
        if self.rnic.poll_timeout().is_some_and(|at| at <= now) {
            let links = &self.links;
            self.rnic
                .handle_timeout(now, &|dst, qpn| links.progress((dst, slot_of(qpn))));
            while let Some(event) = self.rnic.poll_port_event(now) {
                self.async_events.push(event);
            }
        }
    }

    /// Takes in what has arrived; returns how many datagrams.
    fn receive(&mut self, now: Time, turns: usize) -> usize {
        let linked = self.links.receive(&mut self.rnic, now);
        let mut total = self.receive_multicast(now);
        for _ in 0..turns {
            // An error is one of another datagram's (an ICMP message); the next receive goes on.
            let n = self.rx.recv_batch(&mut self.batch).unwrap_or(0);
            if n == 0 {
                break;
            }
            total += n;
            for datagram in self.batch.iter() {
                self.rnic.handle_arrival(now, &arrival(&datagram, self.address));
            }
            // Many requests in, many acknowledgements out: the sender's window must not run dry meanwhile.
            if self.rnic.has_urgent_transmit() {
                self.transmit(now, false);
            }
        }
        self.looks.looked(now, total > 0);
        #[cfg(test)]
        {
            self.looked += 1;
        }
        self.after_receive(now);
        total + linked
    }

    /// Takes in what was sent to the device's groups; returns how many datagrams.
    fn receive_multicast(&mut self, now: Time) -> usize {
        let mut total = 0;
        for membership in self.memberships.ready() {
            total += membership.socket.recv_batch(&mut self.batch).unwrap_or(0);
            for datagram in self.batch.iter() {
                self.rnic
                    .handle_arrival(now, &arrival(&datagram, membership.group));
            }
        }
        total
    }

    /// Attaches a queue pair to a multicast group, which the device joins.
    pub(crate) fn attach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), AttachError> {
        self.rnic.attach_mcast(qpn, group)?;
        let group = group.to_canonical();
        self.memberships.join(self.address, group).map_err(|source| {
            let _ = self.rnic.detach_mcast(qpn, group);
            AttachError::Join { group, source }
        })
    }

    /// Leaves the groups that no queue pair is attached to any more.
    pub(crate) fn leave_groups(&mut self) {
        let rnic = &self.rnic;
        self.memberships.leave(|group| rnic.has_mcast_group(group));
    }

    /// A queue pair is about to end: acknowledgements that waited for company are sent, and the last one again, since what they stand
    /// for has been done and nobody will be there to say so.
    pub(crate) fn say_last(&mut self, now: Time, qpn: Qpn) {
        self.rnic.repeat_last_ack(now, qpn);
        self.finish(now, true);
    }

    /// Gives out what the engine wants done: packets, flushes, events. `all`: acknowledgements too.
    pub(crate) fn finish(&mut self, now: Time, all: bool) {
        loop {
            self.revoke();
            let has_sent_all = self.sent == self.buf.trains().len() && !self.rnic.has_leaving();
            if !has_sent_all || self.rnic.has_transmit(all) {
                self.transmit(now, all);
            }
            if self.rnic.is_quiet() {
                return;
            }
            let refused = self.start_flushes(now);
            let connections = self.tell(now);
            // What connection management answers, and a flush that was refused, is sent at once.
            if !refused && !connections {
                return;
            }
        }
    }

    /// Posts a send request and builds its packets, if no other are to be sent before.
    pub(crate) fn post_send(&mut self, now: Time, qpn: Qpn, request: SendRequest) -> Result<(), PostError> {
        if self.sent == self.buf.trains().len() {
            self.buf.clear();
            self.sent = 0;
        }
        self.rnic.post_send_into(now, qpn, request, &mut self.buf)
    }

    /// Takes back what was granted for queue pairs that take no more requests.
    fn revoke(&mut self) {
        while let Some(qpn) = self.rnic.poll_revoked() {
            self.links.revoke_qp(qpn);
        }
    }

    /// Hears what other engines of this host have to say. Whether there is a new link: it is not among those that a sleeper is rung
    /// for.
    fn serve_links(&mut self, now: Time) -> bool {
        self.served_at = now;
        self.links.serve(&mut self.rnic, now)
    }

    /// A queue pair has been told who its peer is.
    pub(crate) fn meet(&mut self, qpn: Qpn) {
        if let Some(info) = self.rnic.query_qp(qpn).filter(|info| info.qp_type != QpType::Ud) {
            self.links.want(&mut self.rnic, qpn, &info);
        }
    }

    /// Hands flushes to their threads; returns whether some found none.
    fn start_flushes(&mut self, now: Time) -> bool {
        let mut refused = false;
        while let Some(job) = self.rnic.poll_flush() {
            if let Err(job) = Flushers::submit(&self.flushers, job) {
                let again = Errno::AGAIN.raw_os_error();
                self.rnic.handle_flush(now, job.id, Err(Fault::Io(again)));
                self.ended.push(job.memory);
                refused = true;
            }
        }
        refused
    }

    /// Tells whom events concern; returns whether some were of connections.
    fn tell(&mut self, now: Time) -> bool {
        let mut connections = false;
        loop {
            self.tell_events();
            let Some(event) = self.rnic.cm().poll_event() else {
                return connections;
            };
            self.dispatch(now, event);
            connections = true;
        }
    }

    /// Tells whom events concern that are not of connections.
    pub(crate) fn tell_events(&mut self) {
        while let Some(event) = self.rnic.poll_event() {
            self.tell_event(event);
        }
    }

    fn tell_event(&mut self, event: Event) {
        match event {
            Event::Completion(cqn) | Event::CqError(cqn) => {
                if matches!(event, Event::CqError(_)) {
                    self.async_events.push(AsyncEvent::CqError(cqn));
                }
                if let Some(waker) = self.cq_wakers.get(&cqn).and_then(Weak::upgrade) {
                    waker.wake();
                    self.told.fetch_add(1, Ordering::Release);
                }
            }
            Event::QpError(qpn, status, cause) => {
                self.rnic.show_failed(qpn, status, cause);
                self.qp_errors.insert(qpn, status);
                if let Some(event) = AsyncEvent::of_qp_error(qpn, status, cause) {
                    self.async_events.push(event);
                }
            }
            Event::CommunicationEstablished(qpn) => {
                self.async_events.push(AsyncEvent::CommunicationEstablished(qpn));
            }
            // The RTU is late or lost: the request says as much.
            Event::FirstRequest(qpn) => {
                if let Some(id) = self.accepted.get(&qpn) {
                    self.rnic.cm().establish(*id);
                }
            }
            Event::SqDrained(qpn) => self.async_events.push(AsyncEvent::SqDrained(qpn)),
            Event::LastWqeReached(qpn) => self.async_events.push(AsyncEvent::LastWqeReached(qpn)),
            Event::SrqLimitReached(srqn) => self.async_events.push(AsyncEvent::SrqLimitReached(srqn)),
            Event::WantsGrant(qpn, rkey) => {
                self.links.ask(&self.rnic, qpn, rkey);
            }
        }
    }

    fn dispatch(&mut self, now: Time, event: CmEvent) {
        let (id, ends) = match &event {
            CmEvent::Request { id, service, .. } => {
                return self.ask_listener(now, *id, *service, false, event);
            }
            CmEvent::SidrRequest { id, service, .. } => {
                return self.ask_listener(now, *id, *service, true, event);
            }
            CmEvent::Reply { id, .. } | CmEvent::Established { id } => (*id, false),
            CmEvent::Rejected { id, .. }
            | CmEvent::Unreachable { id }
            | CmEvent::Disconnected { id }
            | CmEvent::SidrReply { id, .. } => (*id, true),
        };
        self.note_connection(now, id, &event);
        let Some(entry) = self.connections.get(&id) else {
            // So that peers that ask and give up fill no listener's queue.
            let queues = self.listeners.values().filter_map(|l| l.sink.0.upgrade());
            queues.for_each(|queue| queue.withdraw(id));
            return;
        };
        if let Some(qpn) = entry.qpn {
            self.accepted.remove(&qpn);
            if matches!(event, CmEvent::Established { .. }) {
                self.rnic.peer_is_ready(now, qpn);
            }
            // One that was refused before it was connected can be connected again.
            let refused = matches!(event, CmEvent::Rejected { .. });
            let unused = |qp: QpInfo| qp.state == QpState::Reset || refused && qp.state == QpState::Init;
            if ends && !self.rnic.query_qp(qpn).is_some_and(unused) {
                // What is posted completes as flushed, so that whoever waits for it learns of the end.
                let _ = self
                    .rnic
                    .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
            }
        }
        if let CmEvent::Reply { id, .. } = event {
            self.record(id);
        }
        let Some(entry) = self.connections.get(&id) else {
            return;
        };
        entry.sink.tell(event);
        if ends {
            self.connections.remove(&id);
        }
    }

    /// Notes what happened to a connection, for those who ask why.
    fn note_connection(&mut self, now: Time, id: CmId, event: &CmEvent) {
        let (what, reason) = match event {
            CmEvent::Reply { .. } => (ConnectionNote::Accepted, 0),
            CmEvent::Established { .. } => (ConnectionNote::Established, 0),
            CmEvent::Rejected { reason, .. } => (ConnectionNote::Rejected, reason.0),
            CmEvent::Unreachable { .. } => (ConnectionNote::Unreachable, 0),
            CmEvent::Disconnected { .. } => (ConnectionNote::Disconnected, 0),
            CmEvent::Request { .. } | CmEvent::SidrRequest { .. } | CmEvent::SidrReply { .. } => return,
        };
        let qpn = self.connections.get(&id).and_then(|entry| entry.qpn);
        let note = Note::Connection {
            id: id.0,
            what,
            reason,
        };
        self.rnic.note(now, qpn.unwrap_or(Qpn::new(0)), note);
    }

    /// Hands a request to who listens; a request of the other kind is for nobody.
    fn ask_listener(&mut self, now: Time, id: CmId, service: ServiceId, datagrams: bool, event: CmEvent) {
        let listener = self.listeners.get(&service).filter(|l| l.datagrams == datagrams);
        if !listener.is_some_and(|listener| listener.sink.tell(event)) {
            let cm = self.rnic.cm();
            cm.reject(now, id, RejReason::INVALID_SERVICE_ID, &[]);
        }
    }

    /// Records a connection, so that it can be ended should this process die.
    pub(crate) fn record(&mut self, id: CmId) {
        if let Some(peering) = self.rnic.cm().peering(id)
            && let Some(entry) = self.connections.get_mut(&id)
        {
            entry.record = self.records.record(&peering);
        }
    }

    /// Returns the UDP source port of packets to a QPN.
    pub(crate) fn source_port(&mut self, dest_qpn: Qpn) -> io::Result<u16> {
        self.tx.port_to(dest_qpn)
    }

    fn transmit(&mut self, now: Time, all: bool) {
        loop {
            self.send_pending(now);
            if self.blocked.is_some() {
                return;
            }
            self.buf.clear();
            self.sent = 0;
            if !self.rnic.has_transmit(all) {
                return;
            }
            let more = self.rnic.poll_transmit(now, &mut self.buf, all);
            if self.buf.is_empty() {
                return;
            }
            if !more {
                self.send_pending(now);
                return;
            }
        }
    }

    /// Sends the trains in the buffer, until a socket takes no more. One that stays full drops its trains: a neighbour that
    /// does not answer must not hold up everybody else's.
    fn send_pending(&mut self, now: Time) {
        if self.rnic.has_faults() {
            return self.send_with_faults(now);
        }
        let trains = self.buf.trains();
        while self.sent < trains.len() {
            let train = &trains[self.sent];
            let port = train.path.src_port;
            if !self.links.is_empty()
                && let Some(slot) = self.tx.slot_of_port(port)
            {
                let meta = Meta {
                    segment_bytes: train.segment_bytes as u16,
                    traffic_class: train.path.traffic_class,
                };
                let bytes = &self.buf.bytes()[train.range.clone()];
                if self.links.send((train.path.dst, slot), meta, bytes) {
                    self.rnic.show_sent(now, train, true, bytes);
                    self.sent += 1;
                    continue;
                }
            }
            if train.local {
                // Its link has broken since it was built, and it has no ICRC: as good as lost.
                self.sent += 1;
                continue;
            }
            // A run of trains that leave by one socket is one system call.
            let run = trains[self.sent..]
                .iter()
                .take_while(|t| {
                    t.path.src_port == port && (self.links.is_empty() || t.path.dst == train.path.dst)
                })
                .count()
                .min(16);
            let Some(socket) = self.tx.by_port(port) else {
                self.sent += run;
                continue;
            };
            let run = &trains[self.sent..self.sent + run];
            let bytes = self.buf.bytes();
            let slices: [[IoSlice<'_>; 1]; 16] =
                std::array::from_fn(|i| [IoSlice::new(run.get(i).map_or(&[], |t| &bytes[t.range.clone()]))]);
            let outgoing: [Outgoing<'_>; 16] = std::array::from_fn(|i| {
                let train = run.get(i).unwrap_or(&run[0]);
                Outgoing {
                    dst: SocketAddr::new(train.path.dst, ROCE_PORT),
                    segment_size: (train.packets > 1).then_some(train.segment_bytes as u16),
                    tos: train.path.traffic_class,
                    parts: &slices[i],
                }
            });
            match socket.send_batch(&outgoing[..run.len()]) {
                Ok(n) => {
                    for train in &run[..n] {
                        self.rnic
                            .show_sent(now, train, false, &bytes[train.range.clone()]);
                    }
                    self.sent += n;
                    self.looks.sent(now);
                    if n > 0 && self.rnic.set_down(now, false) {
                        self.async_events.push(AsyncEvent::PortActive);
                    }
                    let full = n < run.len();
                    let since = self.blocked.unwrap_or(now);
                    self.blocked = full.then_some(since);
                    if full && (self.tx.carries_cm(port) || now.since_ns(since) >= SOCKET_FULL_NS) {
                        self.blocked = None;
                        self.send_errors += 1;
                        self.sent += 1;
                    } else if full {
                        return;
                    }
                }
                Err(error) => {
                    // As good as lost on the way: the protocol notices, and the counter tells why.
                    self.send_errors += 1;
                    self.sent += error.index + 1;
                    if port_is_down(&error.source) && !self.rnic.set_down(now, true) {
                        self.async_events.push(AsyncEvent::PortError);
                    }
                }
            }
            if self.gso && !socket.gso() {
                self.gso = false;
            }
        }
        if !self.gso {
            self.buf.disable_gso();
        }
    }
}

impl Core {
    /// Gives the packets in the buffer to the port, and sends those that it lets go. One that a socket does not take is lost.
    #[cold]
    fn send_with_faults(&mut self, now: Time) {
        let (links, tx) = (&self.links, &self.tx);
        let shared = |path: &Path| {
            let slot = tx.slot_of_port(path.src_port);
            slot.is_some_and(|slot| links.reach((path.dst, slot)))
        };
        self.rnic.take_trains(now, &self.buf, self.sent, shared);
        self.sent = self.buf.trains().len();
        while let Some(packet) = self.rnic.next_leaving(now) {
            let Leaving {
                path, local, damaged, ..
            } = packet;
            let slot = self.tx.slot_of_port(path.src_port);
            let linked = slot
                .map(|slot| (path.dst, slot))
                .filter(|peer| self.links.reach(*peer));
            if let Some(peer) = linked {
                let meta = Meta {
                    segment_bytes: packet.bytes.len() as u16,
                    traffic_class: path.traffic_class,
                };
                // Who receives it looks at no ICRC, which would have shown the damage.
                if !damaged {
                    self.links.send(peer, meta, &packet.bytes);
                }
                continue;
            }
            let socket = self.tx.by_port(path.src_port);
            let Some(socket) = socket.filter(|_| !local) else {
                continue;
            };
            let outgoing = Outgoing {
                dst: SocketAddr::new(path.dst, ROCE_PORT),
                segment_size: None,
                tos: path.traffic_class,
                parts: &[IoSlice::new(&packet.bytes)],
            };
            let sent = socket.send_batch(&[outgoing]);
            self.looks.sent(now);
            self.send_errors += u64::from(!sent.is_ok_and(|n| n == 1));
        }
    }
}

/// Whether sending failed because the device's address or its interface has gone.
fn port_is_down(error: &io::Error) -> bool {
    let down = [
        Errno::NETDOWN,
        Errno::NETUNREACH,
        Errno::NODEV,
        Errno::ADDRNOTAVAIL,
    ];
    Errno::from_io_error(error).is_some_and(|errno| down.contains(&errno))
}

/// What a socket received that is bound to `dst`.
fn arrival<'a>(datagram: &Datagram<'a>, dst: IpAddr) -> Arrival<'a> {
    Arrival {
        src: datagram.src.ip(),
        src_port: datagram.src.port(),
        dst,
        traffic_class: datagram.tos,
        bytes: datagram.bytes,
        segment_bytes: datagram.segment_size,
        local: false,
    }
}

/// Whether an address is a broadcast address, of all networks or of one that this host is on.
fn is_broadcast(address: IpAddr) -> bool {
    use rustix::net::{AddressFamily, SocketType, connect, socket};
    let IpAddr::V4(v4) = address else { return false };
    // Only the kernel knows the networks: it connects no socket to a broadcast address that has not asked for it.
    v4.is_broadcast()
        || socket(AddressFamily::INET, SocketType::DGRAM, None)
            .is_ok_and(|probe| connect(&probe, &SocketAddr::new(address, ROCE_PORT)) == Err(Errno::ACCESS))
}

/// The path MTU that the device's own link carries. Where the address is on no link, as routers have them, what every Ethernet
/// carries.
pub(crate) fn device_mtu(address: IpAddr) -> PathMtu {
    let link = interface_of(address).ok();
    link.and_then(|link| PathMtu::of_link(link.mtu))
        .unwrap_or(PathMtu::Bytes1024)
}

/// The path MTU towards a peer: the largest that the interface's MTU carries.
pub(crate) fn path_mtu_to(local: IpAddr, peer: IpAddr) -> io::Result<PathMtu> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};
    // Only a connected socket tells its path's MTU; nothing is sent.
    let v4 = peer.is_ipv4();
    let probe = socket(
        if v4 {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        },
        SocketType::DGRAM,
        None,
    )?;
    bind(&probe, &SocketAddr::new(local, 0))?;
    connect(&probe, &SocketAddr::new(peer, ROCE_PORT))?;
    let mtu = if v4 {
        sockopt::ip_mtu(&probe)
    } else {
        sockopt::ipv6_mtu(&probe)
    }?;
    PathMtu::of_link(mtu).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::Unsupported,
            format!("link MTU {mtu} is too small for RoCEv2, which needs 336"),
        )
    })
}

#[cfg(test)]
mod tests;
