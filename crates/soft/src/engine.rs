//! The engine's driver: it moves datagrams between sockets and the [`Rnic`], runs its timers, carries out its flushes and wakes
//! waiting callers.
//!
//! Whoever holds the engine's lock ([`lock`]) drives the engine. Normally that is the engine's thread, which sleeps in epoll until a
//! datagram arrives, a timer expires or it is kicked. A caller that polls a completion queue drives as well, and meanwhile the thread
//! leaves the socket to it ([`handover`]): two programs on two CPUs are two spinners, not four. A caller that goes to sleep gives the
//! socket back at once, and a caller that waits takes the thread's place ([`leader`]). A caller that only posts, and finds the lock
//! held, leaves its request to the holder of the lock.

mod connections;
mod flush;
mod handover;
mod leader;
mod lock;
mod looks;
mod media;
mod nap;
mod open;
mod quiet;
mod sleep;
mod sockets;
mod spinner;
mod standby;
mod waker;
mod watch;

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
#[cfg(test)]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmId, Request};
use rdmux_rnic::{
    ArmedQueues, Arrival, Counters, Cqn, Delivery, DirectLane, Directly, Event, Fault, Histogram, Lanes,
    Memory, Path, PostError, QpType, Qpn, SendQueue, SendRequest, Taken, Time, Train, TransmitBuf,
};
use rdmux_shm::Meta;
use rdmux_verbs::interface::interface_of;
use rdmux_verbs::provider::{AsyncEvents, Nap, Waker, conditions, current_cpu};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::waiting::{Plan, WaitMode};
use rdmux_verbs::{AsyncEvent, AttachError, PostListError};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::roce::PathMtu;
use rustix::io::Errno;

pub(crate) use self::connections::{ConnectionEntry, ListenerEntry};
use self::flush::Flushers;
use self::handover::{HandOver, POLLER_LEASE_NS};
use self::leader::{Leader, Waiter};
use self::lock::{EngineGuard, EngineLock};
use self::looks::Looks;
pub(crate) use self::media::InProgress;
use self::media::Media;
use self::quiet::Quiet;
use self::sleep::Epoll;
use self::sockets::TxSockets;
use self::spinner::Spinner;
use self::standby::Standby;
pub(crate) use self::waker::{CmQueue, CmSink, CqWaker};
pub(crate) use self::watch::Watch;
use super::engines::Engines;
use super::faults::Leaving;
use super::group::{GroupError, LedgerRecord, MadDatagram, OwnRecords, PortGroup, ServiceClaim};
use super::mcast::Memberships;
use super::metrics::{DeviceMetrics, Pooled};
use super::port::RnicPort;
use super::shm::callers::{self, CallerLinks, ForEngine, Looked};
use super::shm::link::{Links, slot_of};
use super::udp::{Datagram, Outgoing, ROCE_PORT, RxBatch, RxSocket, SendError, TxSocket};

/// Polls by a spinning caller, at least, between two checks whether somebody else needs its CPU.
const LOOKS_PER_LOOK_AROUND: u32 = 64;
/// Looks of a caller that has a request for a lane, before it leaves that behind those that others have left.
const LOOKS_BEHIND_LEFT: u32 = 100;
/// Times in a row that a caller takes the lock for requests that others left.
const ROUNDS_FOR_OTHERS: u32 = 16;
/// Receive calls of the engine's thread in a row before transmission and timers. A polling caller receives once per call: another
/// receive after a hit would delay the caller's result by a system call.
const RECEIVES_PER_PASS: usize = 8;
/// Attempts of an ending process to take the engine's lock for its last acknowledgements: it must not wait for a thread that makes no
/// progress.
const LAST_TRIES: usize = 1_000;
/// Interval at which a polling caller serves the messages of other engines. These messages have a thread of their own, which may wait
/// long for a CPU that a caller spins on.
const SERVE_NS: u64 = 100_000;
/// Longest time for which a full socket may block the others: a NIC's queue drains faster, that of an absent neighbour never does.
const SOCKET_FULL_NS: u64 = 2_000_000;
/// Time between attempts to send to a full socket, whose buffer drains by itself in well under a millisecond.
const SOCKET_RETRY_NS: u64 = 500_000;
/// Sleeps shorter than this end on time, not at the next millisecond.
const PRECISE_NS: u64 = 10_000_000;

/// Times in ns of the engine's clock at which the sleeping thread and the leader wake at the latest; 0: awake, or looks again by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sleeps {
    thread_ns: u64,
    leader_ns: u64,
}

/// State that the engine's lock protects.
pub(crate) struct Core {
    pub(crate) rnic: RnicPort,
    rx: RxSocket,
    memberships: Memberships,
    pub(crate) links: Links,
    /// Time at which the messages of other engines were last served.
    served_at: Time,
    sleeps: Sleeps,
    /// True while the thread sleeps in epoll.
    thread_asleep: bool,
    /// True while arrivals are reported to the thread's epoll set.
    thread_reported: bool,
    /// True while a caller watches in the thread's place ([`Watch`]), and while that caller sleeps.
    is_watched: bool,
    watcher_asleep: bool,
    /// True while a caller polls for a moment before it sleeps: peers need not ring the doorbell of a sleeping watcher meanwhile.
    caller_looks: bool,
    standby: Standby,
    /// True while peers ring their doorbells for the thread, or for the caller that watches in its place.
    doorbells: bool,
    /// True while the thread watches the sockets beside a leader that may nap, and while one naps: see [`nap`].
    guarded: bool,
    napping: bool,
    /// Set when a leader has slept since the thread last looked.
    leader_slept: bool,
    /// False where the system does not support naps.
    naps: bool,
    /// Number of wake-ups that completion queues sent to their waiters.
    told: Arc<AtomicU64>,
    /// Polls by callers: all of them, and all by the last look around.
    polls: u32,
    polls_checked: u32,
    spinner: Spinner,
    quiet: Quiet,
    looks: Looks,
    /// Number of times that the sockets were read.
    #[cfg(test)]
    looked: u64,
    /// Number of times that arrivals woke the thread.
    #[cfg(test)]
    thread_woken: u64,
    /// Number of naps.
    #[cfg(test)]
    napped: u64,
    batch: RxBatch,
    tx: TxSockets,
    buf: TransmitBuf,
    /// Trains of `buf` that are already sent; the rest waits for the socket.
    sent: usize,
    /// Time since which a socket has been full.
    blocked: Option<Time>,
    gso: bool,
    address: IpAddr,
    pub(crate) cq_wakers: HashMap<Cqn, Weak<CqWaker>>,
    pub(crate) qp_errors: HashMap<Qpn, rdmux_rnic::Status>,
    pub(crate) async_events: AsyncEvents,
    pub(crate) connections: HashMap<CmId, ConnectionEntry>,
    /// Connections by the queue pairs that end with them.
    pub(crate) connected: HashMap<Qpn, CmId>,
    pub(crate) listeners: HashMap<ServiceId, ListenerEntry>,
    /// Trains that could not be sent.
    pub(crate) send_errors: u64,
    /// Durations of the flushes that were carried out for peers.
    pub(crate) flush_times: Histogram,
    records: Arc<OwnRecords>,
    flushers: Arc<Flushers>,
    pub(crate) media: Arc<Media>,
    /// Memories of refused flushes, to be dropped when the engine is unlocked.
    ended: Vec<Arc<dyn Memory>>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Work that a caller leaves for the holder of the engine's lock.
enum Left {
    /// A send request with its place in the queue of its queue pair.
    Request(Qpn, SendRequest),
    /// A completion that the caller has put into its queue.
    Completion(Delivery),
}

/// The locked engine. Memories that end while it is locked are dropped after unlocking: dropping one may unmap, close, or run its owner's
/// code, which may use the device.
pub(crate) struct Locked<'a> {
    // Fields are dropped in this order.
    core: EngineGuard<'a, Core>,
    behind: Behind<'a>,
}

/// Work to do after unlocking.
struct Behind<'a> {
    engine: &'a Engine,
    remains: Option<Box<Remains>>,
}

/// Memories to drop, and requests to place. Requests arrive only while the engine is locked by [`Locked`].
struct Remains {
    _ended: Vec<Arc<dyn Memory>>,
    requests: Vec<Request>,
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.core.has_remains() {
            self.behind.remains = Some(self.core.remains());
        }
    }
}

impl Drop for Behind<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.engine.core.has_left() {
            self.engine.serve_left();
        }
        if let Some(remains) = &self.remains
            && !remains.requests.is_empty()
        {
            self.engine.engines.place(self.engine, &remains.requests);
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

/// An engine of a device, shared by all its objects.
#[derive(Debug)]
pub(crate) struct Engine {
    core: EngineLock<Core, Left>,
    kick: Waker,
    /// Zero of the engine's clock.
    start: Instant,
    hand_over: HandOver,
    /// Armed completion queues, whose owners may sleep until they are notified.
    armed_queues: ArmedQueues,
    /// See [`Core::told`].
    told: Arc<AtomicU64>,
    stop: AtomicBool,
    /// Locked by the leader, the one caller that waits and drives. Holds the policy, which learns from the waits.
    leader: Mutex<Leader>,
    /// Wakes the leader.
    leader_kick: Waker,
    /// The nap of the leader: see [`nap`].
    pub(super) nap: Arc<Nap>,
    /// Wakes the caller that watches.
    watch_kick: Waker,
    /// Readable when something has arrived: an epoll set of the sockets and doorbells.
    arrivals: Arc<OwnedFd>,
    /// Readable when the caller that watches is to wake: an epoll set of the arrivals and `watch_kick`.
    watch: OwnedFd,
    /// The thread's epoll set.
    epoll: Epoll,
    /// Links and lanes, with which callers do without the engine.
    callers: Arc<CallerLinks>,
    lanes: Lanes,
    waiting: Option<WaitMode>,
    /// The engines of this device.
    pub(super) engines: Arc<Engines>,
    group: Mutex<Option<PortGroup>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Leases that the thread slept through to their end while a completion queue was armed.
    #[cfg(test)]
    overslept: AtomicUsize,
    /// Woken by asynchronous events.
    pub(crate) async_waker: Arc<Waker>,
}

impl Engine {
    pub(crate) fn lock(&self) -> Locked<'_> {
        self.begin(self.core.lock())
    }

    /// Takes the lock, unless somebody holds it.
    fn try_lock(&self) -> Option<Locked<'_>> {
        Some(self.begin(self.core.try_lock()?))
    }

    #[inline]
    fn begin<'a>(&'a self, mut core: EngineGuard<'a, Core>) -> Locked<'a> {
        core.quiet.end();
        if self.core.has_left() {
            self.post_left(&mut core);
        }
        let behind = Behind {
            engine: self,
            remains: None,
        };
        Locked { core, behind }
    }

    /// Posts the requests that others left.
    #[cold]
    fn post_left(&self, core: &mut Core) {
        core.quiet.end();
        let (left, now) = (self.core.take_left(), self.now());
        for left in left {
            match left {
                Left::Request(qpn, request) => core.rnic.post_reserved(now, qpn, request),
                Left::Completion(delivery) => core.rnic.deliver(now, delivery),
            }
        }
        core.finish(now, false);
        self.wake_early(core);
    }

    /// Takes the lock to post the requests that others left, unless somebody holds the lock and will post them. A caller does not do so
    /// for ever: after some rounds it leaves them to the thread.
    #[cold]
    fn serve_left(&self) {
        for _ in 0..ROUNDS_FOR_OTHERS {
            if !self.core.has_left() {
                return;
            }
            let Some(mut core) = self.core.try_lock() else {
                return;
            };
            self.post_left(&mut core);
            let ended = core.ended_memories();
            drop(core);
            drop(ended);
        }
        self.kick.wake();
    }

    /// Returns the instant of a time of the engine's clock.
    pub(crate) fn instant(&self, time: Time) -> Instant {
        self.start + Duration::from_nanos(time.0)
    }

    pub(crate) fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// Calls `look`. If it finds nothing, drives on behalf of the polling caller, and calls it again.
    pub(crate) fn poll<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        match look() {
            None => self.drive_and_look(1, look),
            found => found,
        }
    }

    /// Drives on behalf of a caller who has polled so many times, unless somebody drives already, and calls `look`. The thread keeps watching
    /// the sockets beside a caller that may sleep without further notice. For a caller that comes back, the thread stays idle, and
    /// acknowledgements wait while requests keep coming in.
    pub(crate) fn drive_and_look<R>(&self, polls: u32, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        if callers::is_inside() {
            return None;
        }
        let mut core = self.core.try_lock()?;
        core.polls = core.polls.wrapping_add(polls - 1);
        if core.poll_quietly(polls) {
            drop(core);
            // Others may have left items meanwhile, which [`Locked`] takes care of otherwise.
            if self.core.has_left() {
                self.serve_left();
            }
            return None;
        }
        let mut core = self.begin(core);
        let now = self.now();
        core.polls = core.polls.wrapping_add(1);
        // A caller that is about to sleep in the thread's place looks once more, and does not come back.
        let comes_back = core.spinner.polls(now, self.armed_queues.any()) && !core.watcher_asleep;
        if comes_back {
            self.hand_over.polls(now.0);
        }
        let received = core.receive_polled(now);
        let met = now.since_ns(core.served_at) > SERVE_NS && core.serve_links(now);
        let unchecked = core.polls.wrapping_sub(core.polls_checked);
        let yields = unchecked >= LOOKS_PER_LOOK_AROUND && core.needs_to_yield(now);
        core.finish(now, received == 0 || !comes_back);
        self.wake_early(&core);
        core.has_driven(now, received == 0 && comes_back);
        drop(core);
        let mut found = look();
        if yields && found.is_none() {
            // The peer that the caller waits for may be the one that cannot run.
            thread::yield_now();
            // A caller that finds nothing then checks other state, which may have changed meanwhile, but after what it polls for.
            found = look();
        }
        if met {
            self.wake_sleepers();
        }
        if received > 0 && comes_back && !self.hand_over.is_leased() && !self.kick.is_woken() {
            // The caller may never come back for the acknowledgements that it left pending: let the thread begin to watch it. A thread
            // that was woken for that, and gets no CPU, is not woken for each message.
            self.kick.wake();
        }
        found
    }

    /// Sends the pending acknowledgements, and the packets that fault injection holds back. Completes the capture's file: the process may
    /// end before the file's thread runs.
    pub(crate) fn acknowledge(&self) {
        for _ in 0..LAST_TRIES {
            if let Some(mut core) = self.try_lock() {
                let now = self.now();
                core.finish(now, true);
                core.send_held_back(now);
                core.rnic.sync_capture();
                return;
            }
            thread::yield_now();
        }
    }

    /// Carries out a send request without the engine, if the lane of its queue pair covers it.
    #[inline]
    pub(crate) fn post_to_lane(
        &self,
        lane: &DirectLane,
        queue: &SendQueue,
        request: &mut Option<SendRequest>,
    ) -> bool {
        match callers::inside(|| lane.post(request, || self.now())) {
            Directly::Not => queue.has_left() && self.post_behind_left(lane, queue, request),
            Directly::Done => true,
            more => self.has_posted(more),
        }
    }

    /// Posts to a lane once the engine's driver has seen the requests of the queue pair that other threads have left to it, if that is soon.
    /// If each thread left its own request behind them, the driver would execute all requests alone.
    #[cold]
    fn post_behind_left(
        &self,
        lane: &DirectLane,
        queue: &SendQueue,
        request: &mut Option<SendRequest>,
    ) -> bool {
        for _ in 0..LOOKS_BEHIND_LEFT {
            if queue.has_left() {
                std::hint::spin_loop();
                continue;
            }
            let posted = callers::inside(|| lane.post(request, || self.now()));
            if !matches!(posted, Directly::Not) || !queue.has_left() {
                return self.has_posted(posted);
            }
        }
        false
    }

    /// Tells the engine what a lane has done. Returns whether it has posted the request.
    fn has_posted(&self, done: Directly) -> bool {
        match done {
            Directly::Not => return false,
            Directly::Done => {}
            Directly::DoneAndTell(delivery) => self.deliver(delivery),
            Directly::DoneAndEnded => self.with(|core, _| core.links.note_untold_ends()),
        }
        true
    }

    /// Moves what peers and lanes exchange without the engine, on behalf of a polling caller. Only while callers are trusted to come back, and
    /// while they find something: somebody has to drive the engine, which looks at everything.
    #[inline]
    pub(crate) fn look_by_lanes(&self) -> Looked {
        // The thread lets callers drive, or was woken to begin to: it gets no CPU while callers spin on all.
        if !self.hand_over.is_leased() && !self.kick.is_woken() {
            return Looked::DRIVE;
        }
        let (looked, found) = callers::look(&self.callers, &self.lanes, || self.now());
        if let Some(found) = found {
            self.take_found(found);
        }
        looked
    }

    /// Tells the engine what a look has found for it.
    #[cold]
    fn take_found(&self, found: ForEngine) {
        found
            .deliveries
            .into_iter()
            .for_each(|delivery| self.deliver(delivery));
        if !found.ended.is_empty() {
            self.with(|core, now| {
                for ticket in found.ended {
                    core.rnic.handle_taken(now, ticket, Taken::Done);
                }
            });
        }
    }

    /// Handles a completion that a lane has put into its queue. Where somebody else holds the engine's lock, the holder does.
    #[cold]
    fn deliver(&self, delivery: Delivery) {
        if let Some(mut core) = self.try_lock() {
            let now = self.now();
            core.rnic.deliver(now, delivery);
            self.finish(core, now);
        } else if self.core.leave(Left::Completion(delivery)) {
            self.serve_left();
        }
    }

    /// Posts a send request, and sends the resulting packets. Where somebody else holds the engine's lock, and the queue is sure to accept
    /// the request, the request is left to the holder.
    pub(crate) fn post_send(
        &self,
        queue: &SendQueue,
        qpn: Qpn,
        request: SendRequest,
    ) -> Result<(), PostError> {
        let mut core = match self.try_lock() {
            Some(core) => core,
            None if queue.reserve(&request) => {
                if self.core.leave(Left::Request(qpn, request)) {
                    self.serve_left();
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

    /// Posts requests as [`Engine::post_send`] does, in order, after those of them that the lane covers. Fails at the first that is not
    /// accepted.
    pub(crate) fn post_send_list(
        &self,
        queue: &SendQueue,
        lane: Option<&DirectLane>,
        qpn: Qpn,
        requests: Vec<SendRequest>,
    ) -> Result<(), PostListError> {
        let failed = |index| move |source| PostListError { index, source };
        let mut numbered = requests.into_iter().enumerate();
        let by_lane = |(index, request)| {
            let mut request = Some(request);
            let done = lane.is_some_and(|lane| self.post_to_lane(lane, queue, &mut request));
            request.filter(|_| !done).map(|request| (index, request))
        };
        let Some(first) = numbered.by_ref().find_map(by_lane) else {
            return Ok(());
        };
        let mut numbered = std::iter::once(first).chain(numbered);
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

    /// Calls `f` on the device, then sends the resulting packets.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Core, Time) -> R) -> R {
        let mut core = self.lock();
        let now = self.now();
        let result = f(&mut core, now);
        self.finish(core, now);
        result
    }

    /// Sends the device's pending packets, and wakes the thread if it would sleep for too long.
    fn finish(&self, mut core: Locked<'_>, now: Time) {
        core.finish(now, false);
        self.wake_early(&core);
    }

    /// Returns whether there is something to do within that time, though nothing arrives.
    fn is_due_within(&self, core: &Core, ns: u64) -> bool {
        let waits = core.blocked.is_some() || core.links.have_waiting();
        let due = core.rnic.poll_timeout();
        waits || due.is_some_and(|at| at < self.now() + ns)
    }

    /// Wakes those who would sleep past the next timer: each of them, since either may leave the work to the other. Successive
    /// requests set later and later timers, so this happens once per timeout, not once per request.
    fn wake_early(&self, core: &Core) {
        if core.sleeps == Sleeps::default() {
            return;
        }
        let due = if core.blocked.is_some() || core.links.have_waiting() {
            1
        } else {
            core.rnic.poll_timeout().map_or(u64::MAX, |at| at.0)
        };
        if due < core.sleeps.thread_ns && !self.kick.is_woken() {
            self.kick.wake();
        }
        if due < core.sleeps.leader_ns {
            self.leader_kick.wake();
        }
    }

    fn handle_mad(&self, mad: &MadDatagram) {
        self.with(|core, now| {
            // The data that the peer sent before this message came by another socket: a DREQ must not overtake the last response.
            core.receive(now, RECEIVES_PER_PASS);
            core.rnic
                .handle_datagram(now, mad.src.ip(), mad.src.port(), &mad.bytes, mad.bytes.len());
            // That data woke the engine's thread, which finds none and sleeps on: nobody else sends the acknowledgements of the data.
            core.finish(now, true);
        });
    }

    /// Serves the messages of other engines on this host.
    fn serve_links(&self) {
        let met = self.with(|core, now| {
            let met = core.serve_links(now);
            core.finish(now, true);
            met
        });
        if met {
            self.wake_sleepers();
        }
    }

    /// Handles a request that the device has placed here.
    pub(super) fn handle_request(&self, request: &Request) {
        self.with(|core, now| core.rnic.cm().handle_request(now, request));
    }

    pub(super) fn is_open(&self) -> bool {
        !self.stop.load(Ordering::Acquire)
    }

    /// Offers a service under a reservation, or reserves it for this process among those that share the address. Returns the reservation;
    /// `None` when the engine is closed.
    pub(super) fn register_service(
        &self,
        service: ServiceId,
        shared: Option<Arc<ServiceClaim>>,
    ) -> Result<Option<Arc<ServiceClaim>>, GroupError> {
        match &*self.group.lock() {
            Some(group) => group.offer(service, shared).map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn unregister_service(&self, service: ServiceId) {
        if let Some(group) = &*self.group.lock() {
            group.unregister_service(service);
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        self.lock().rnic.counters()
    }

    /// Returns the device's metrics; `None` when it is closed.
    pub(crate) fn metrics(&self) -> Option<DeviceMetrics> {
        if !self.is_open() {
            return None;
        }
        let core = self.lock();
        let (queue_pairs, regions, completion_queues) = core.rnic.object_counts();
        let mut pooled = Pooled::default();
        for (size, queue) in core.rnic.pooled_cqs() {
            pooled.queues += 1;
            pooled.size += size as u64;
            pooled.used += u64::from(queue.used);
            pooled.users += u64::from(queue.users);
        }
        Some(DeviceMetrics {
            address: core.address,
            slot: core.rnic.config().slot,
            counters: core.rnic.counters(),
            send_errors: core.send_errors,
            is_up: !core.rnic.is_down(),
            queue_pairs,
            regions,
            completion_queues,
            pooled,
            latencies: core.rnic.latencies().clone(),
            flushes: core.flush_times,
            faults: core.rnic.fault_counts(),
        })
    }

    /// Main loop of the engine's thread.
    fn run(self: Arc<Engine>) {
        // Pacing needs timers that fire on time; the engine works without them where the system refuses.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
        self.lock().standby.started();
        let mut waiter = Waiter::new(self.waiting);
        // Time since which nothing has arrived, and whether the thread has slept since.
        let mut idle: Option<(Time, bool)> = None;
        while !self.stop.load(Ordering::Acquire) {
            if self.core.has_left() {
                self.serve_left();
            }
            if self.waiting != Some(WaitMode::Running) && self.hand_over.lease(self.now().0) {
                // Look again when the lease is over, or when the caller announces that it sleeps.
                let lease = Duration::from_nanos(POLLER_LEASE_NS);
                if !self.rest(Some(lease)) {
                    #[cfg(test)]
                    self.overslept
                        .fetch_add(usize::from(self.armed_queues.any()), Ordering::Relaxed);
                    if self.hand_over.park() {
                        self.rest(None);
                    }
                }
                self.hand_over.unpark();
                idle = None;
                continue;
            }
            self.hand_over.unpark();
            let mut core = self.lock();
            core.guarded = false;
            let now = self.now();
            let received = core.receive(now, RECEIVES_PER_PASS);
            core.finish(now, true);
            core.links.tell_cpu(current_cpu());
            let peer_cpu = core.links.peer_cpu();
            let flushes = core.flushers.busy.load(Ordering::Relaxed) > 0;
            let is_relieved = core.caller_looks || core.is_watched;
            drop(core);
            if received > 0 {
                if let Some((since, slept)) = idle.take() {
                    waiter.ended(now.since_ns(since), slept);
                }
                continue;
            }
            let (since, slept_before) = *idle.get_or_insert((now, false));
            // While a flush runs, the thread sleeps even when it is to spin: on one CPU it would delay the flush, and whoever waits
            // for a flush waits for a disk. Beside a caller that looks or watches it need not spin.
            if !flushes && !is_relieved {
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
            let slept = self.epoll.wait(&self) || slept_before;
            idle = Some((since, slept));
        }
    }

    /// Ends the engine: its thread and its membership in the address's group.
    pub(crate) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        self.kick.wake();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
        // Before the group ends: another process of the group then disconnects what this one has left behind, and a DREQ must not
        // overtake the last responses.
        self.lock().send_held_back(self.now());
        let group = self.group.lock().take();
        drop(group);
        let mut core = self.lock();
        core.links.close();
        let capture = core.rnic.end_capture();
        let trace = core.rnic.set_tracer(None);
        drop(core);
        drop(trace);
        if let Some(capture) = capture {
            capture.sync();
        }
    }
}

impl Core {
    /// Returns whether there is work to do after unlocking.
    #[inline]
    fn has_remains(&self) -> bool {
        self.rnic.has_remains() || !self.ended.is_empty()
    }

    /// Takes the work to do after unlocking.
    #[cold]
    fn remains(&mut self) -> Box<Remains> {
        Box::new(Remains {
            _ended: self.ended_memories(),
            requests: self.rnic.cm().take_deferred(),
        })
    }

    /// Returns the memories that have ended, for the caller to drop after unlocking.
    fn ended_memories(&mut self) -> Vec<Arc<dyn Memory>> {
        let mut ended = self.rnic.poll_ended_memories();
        ended.append(&mut self.ended);
        ended
    }

    /// Processes arrived packets, for a caller that polls. Returns how many datagrams and trains.
    fn receive_polled(&mut self, now: Time) -> usize {
        if self.looks.is_due(now) {
            return self.receive(now, 1);
        }
        let received = self.receive_linked(now);
        self.after_receive(now);
        received
    }

    /// Returns whether somebody else needs the CPU that this caller spins on.
    fn needs_to_yield(&mut self, now: Time) -> bool {
        self.polls_checked = self.polls;
        let cpu = current_cpu();
        self.links.tell_cpu(cpu);
        #[cfg(test)]
        if tests::OVERSUBSCRIBED.get() {
            return true;
        }
        self.links.peer_cpu() == Some(cpu) || conditions(now.0).oversubscribed
    }

    /// Processes what peers on this host have sent; returns how many trains.
    #[inline]
    fn receive_linked(&mut self, now: Time) -> usize {
        let unsent = self.sent < self.buf.trains().len();
        self.links.receive(&mut self.rnic, now, unsent)
    }

    /// Handles expired timers and the events of the port.
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

    /// Processes arrived packets; returns how many datagrams and trains.
    fn receive(&mut self, now: Time, calls: usize) -> usize {
        let linked = self.receive_linked(now);
        let mut total = self.receive_multicast(now);
        for _ in 0..calls {
            // An error belongs to another datagram (an ICMP message); the next receive succeeds.
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

    /// Processes the datagrams that were sent to the device's groups; returns how many.
    fn receive_multicast(&mut self, now: Time) -> usize {
        let mut total = 0;
        // A polling caller comes here each time.
        if self.memberships.is_empty() {
            return total;
        }
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

    /// Leaves the groups to which no queue pair is attached.
    pub(crate) fn leave_groups(&mut self) {
        let rnic = &self.rnic;
        self.memberships.leave(|group| rnic.has_mcast_group(group));
    }

    /// Sends the delayed acknowledgements of a queue pair that is about to end, and repeats the last one: its requests have been
    /// executed, and nobody will be there to acknowledge them later.
    pub(crate) fn say_last(&mut self, now: Time, qpn: Qpn) {
        self.rnic.repeat_last_ack(now, qpn);
        self.finish(now, true);
    }

    /// Carries out the engine's pending output: packets, flushes, events. `all`: acknowledgements too.
    pub(crate) fn finish(&mut self, now: Time, all: bool) {
        loop {
            self.revoke();
            let has_sent_all = self.sent == self.buf.trains().len() && !self.rnic.has_leaving();
            if !has_sent_all || self.rnic.has_transmit(all) {
                self.transmit(now, all);
            }
            if self.links.take_untold_ends() {
                self.receive_linked(now);
                continue;
            }
            if self.rnic.is_quiet() {
                break;
            }
            let refused = self.start_flushes(now) | self.start_accesses(now);
            let connections = self.tell(now);
            // Responses of connection management, and of flushes and accesses without a thread, are sent at once.
            if !refused && !connections {
                break;
            }
        }
        if all {
            self.links.tell_ends();
        }
    }

    /// Posts a send request and builds its packets, if no others are to be sent before them.
    pub(crate) fn post_send(&mut self, now: Time, qpn: Qpn, request: SendRequest) -> Result<(), PostError> {
        if self.sent == self.buf.trains().len() {
            self.buf.clear();
            self.sent = 0;
        }
        let rings = self.links.rings(&self.rnic);
        self.rnic.post_send_into(now, qpn, request, &mut self.buf, rings)
    }

    /// Revokes the grants of queue pairs that accept no more requests.
    fn revoke(&mut self) {
        while let Some(qpn) = self.rnic.poll_revoked() {
            self.links.revoke_qp(qpn);
        }
    }

    /// Serves the messages of other engines on this host. Returns whether a link has come up: its peer does not ring the doorbell
    /// for those who sleep already.
    fn serve_links(&mut self, now: Time) -> bool {
        self.served_at = now;
        let met = self.links.serve(&mut self.rnic, now);
        if met {
            // Those who are woken then announce their sleep to the new peer, too.
            self.end_doorbells();
        }
        met
    }

    /// Links to the peer of a queue pair, which has just been set.
    pub(crate) fn meet(&mut self, qpn: Qpn) {
        if let Some(info) = self.rnic.query_qp(qpn).filter(|info| info.qp_type != QpType::Ud) {
            self.links.want(&mut self.rnic, qpn, &info);
        }
    }

    /// Hands flushes to their threads; returns whether some got no thread.
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

    /// Hands accesses to the threads of their media; returns whether some got no thread, and were carried out here.
    fn start_accesses(&mut self, now: Time) -> bool {
        let mut done = false;
        while let Some(job) = self.rnic.poll_access() {
            if let Err(job) = Media::submit(&self.media, job) {
                self.rnic.handle_access(now, job.id, media::carry_out(&job));
                self.ended.push(job.memory);
                done = true;
            }
        }
        done
    }

    /// Withdraws the accesses to media of a queue pair that accepts no more requests: those that have not begun fail. Returns those that
    /// run, for which the caller waits once the engine is unlocked.
    pub(crate) fn withdraw_accesses(&mut self, now: Time, qpn: Qpn) -> Vec<InProgress> {
        self.start_accesses(now);
        let (withdrawn, running) = self.media.withdraw(qpn);
        for job in withdrawn {
            self.rnic.handle_access(now, job.id, Err(Fault::Unmapped));
            self.ended.push(job.memory);
        }
        running
    }

    /// Delivers all events; returns whether some concerned connections.
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

    /// Delivers the events that do not concern connections.
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
                let connection = self.connected.get(&qpn).and_then(|id| self.connections.get(id));
                if let Some(connection) = connection {
                    connection.sink.wake();
                }
            }
            Event::CommunicationEstablished(qpn) => {
                self.async_events.push(AsyncEvent::CommunicationEstablished(qpn));
            }
            // The RTU is late or lost: the request proves that the peer is ready.
            Event::FirstRequest(qpn) => {
                if let Some(id) = self.connected.get(&qpn) {
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

    /// Returns the UDP source port of packets to a QPN; creates its socket on first use.
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
            let rings = self.links.rings(&self.rnic);
            let more = self.rnic.poll_transmit_with(now, &mut self.buf, rings, all);
            if self.buf.is_empty() {
                return;
            }
            if !more {
                self.send_pending(now);
                return;
            }
        }
    }

    /// Sends the trains in the buffer, until a socket is full. A socket that stays full loses its trains: a neighbour that does not
    /// answer must not block everybody else's.
    fn send_pending(&mut self, now: Time) {
        if self.rnic.has_faults() {
            return self.send_with_faults(now);
        }
        while let Some(train) = self.buf.trains().get(self.sent) {
            let is_local = train.local;
            if !self.links.is_empty() && self.send_by_link(now) {
                self.sent += 1;
            } else if is_local {
                // The link has broken since this train was built, and the train has no ICRC: it counts as lost.
                self.sent += 1;
            } else if !self.send_by_socket(now) {
                return;
            }
        }
        if !self.gso {
            self.buf.disable_gso();
        }
    }

    /// Sends the next train to its engine by shared memory. Returns false if there is no link to that.
    fn send_by_link(&mut self, now: Time) -> bool {
        let train = &self.buf.trains()[self.sent];
        let Some(slot) = self.tx.slot_of_port(train.path.src_port) else {
            return false;
        };
        let meta = Meta {
            segment_bytes: train.segment_bytes as u16,
            traffic_class: train.path.traffic_class,
        };
        let bytes = &self.buf.bytes()[train.range.clone()];
        let sent = self.links.send((train.path.dst, slot), meta, bytes);
        if sent {
            self.rnic.show_sent(now, train, true, bytes);
        }
        sent
    }

    /// Sends the next trains, as far as they leave by one socket, in one system call. Returns false if the rest is to wait, because that
    /// socket is full.
    fn send_by_socket(&mut self, now: Time) -> bool {
        let trains = &self.buf.trains()[self.sent..];
        let Path {
            src_port: port, dst, ..
        } = trains[0].path;
        let run = trains
            .iter()
            .take_while(|t| t.path.src_port == port && (self.links.is_empty() || t.path.dst == dst))
            .count()
            .min(16);
        let Some(socket) = self.tx.by_port(port) else {
            self.sent += run;
            return true;
        };
        let run = &trains[..run];
        let bytes = self.buf.bytes();
        let result = send_trains(socket, run, bytes);
        self.gso &= socket.gso();
        match result {
            Ok(n) => {
                for train in &run[..n] {
                    self.rnic
                        .show_sent(now, train, false, &bytes[train.range.clone()]);
                }
                let full = n < run.len();
                self.sent += n;
                self.looks.sent(now);
                if n > 0 && self.rnic.set_down(now, false) {
                    self.async_events.push(AsyncEvent::PortActive);
                }
                if !full {
                    self.blocked = None;
                    return true;
                }
                let since = *self.blocked.get_or_insert(now);
                let gives_up = self.tx.carries_cm(port) || now.since_ns(since) >= SOCKET_FULL_NS;
                if gives_up {
                    self.blocked = None;
                    self.send_errors += 1;
                    self.sent += 1;
                }
                gives_up
            }
            Err(error) => {
                // The train counts as lost on the way: the protocol notices, and the counter shows the reason.
                self.send_errors += 1;
                self.sent += error.index + 1;
                if port_is_down(&error.source) && !self.rnic.set_down(now, true) {
                    self.async_events.push(AsyncEvent::PortError);
                }
                true
            }
        }
    }
}

impl Core {
    /// Gives the packets in the buffer to the port, and sends those that the port releases.
    #[cold]
    fn send_with_faults(&mut self, now: Time) {
        let (links, tx) = (&self.links, &self.tx);
        let shared = |path: &Path| {
            let slot = tx.slot_of_port(path.src_port);
            slot.is_some_and(|slot| links.reach((path.dst, slot)))
        };
        self.rnic.take_trains(now, &self.buf, self.sent, shared);
        self.sent = self.buf.trains().len();
        self.send_leaving(now, now);
    }

    /// Sends the packets that fault injection holds back, for a device that is about to end: on a network they would be under way, so
    /// they leave early rather than never.
    fn send_held_back(&mut self, now: Time) {
        self.send_leaving(now, Time(u64::MAX));
    }

    /// Sends the packets that the port releases up to a time. A packet that a socket refuses is lost.
    fn send_leaving(&mut self, now: Time, until: Time) {
        while let Some(packet) = self.rnic.next_leaving(until) {
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
                // The receiver does not check the ICRC, which would have shown the damage.
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

/// Sends trains by a socket, 16 at most. Most often there is one, for which no arrays are filled.
fn send_trains(socket: &TxSocket, trains: &[Train], bytes: &[u8]) -> Result<usize, SendError> {
    fn outgoing<'a>(train: &Train, parts: &'a [IoSlice<'a>]) -> Outgoing<'a> {
        Outgoing {
            dst: SocketAddr::new(train.path.dst, ROCE_PORT),
            segment_size: (train.packets > 1).then_some(train.segment_bytes as u16),
            tos: train.path.traffic_class,
            parts,
        }
    }
    if let [train] = trains {
        let parts = [IoSlice::new(&bytes[train.range.clone()])];
        return socket.send_batch(&[outgoing(train, &parts)]);
    }
    let part = |i: usize| trains.get(i).map_or(&[][..], |train| &bytes[train.range.clone()]);
    let parts: [[IoSlice<'_>; 1]; 16] = std::array::from_fn(|i| [IoSlice::new(part(i))]);
    let all: [Outgoing<'_>; 16] =
        std::array::from_fn(|i| outgoing(trains.get(i).unwrap_or(&trains[0]), &parts[i]));
    socket.send_batch(&all[..trains.len()])
}

/// Returns whether sending failed because the device's address or its interface has gone.
fn port_is_down(error: &io::Error) -> bool {
    let down = [
        Errno::NETDOWN,
        Errno::NETUNREACH,
        Errno::NODEV,
        Errno::ADDRNOTAVAIL,
    ];
    Errno::from_io_error(error).is_some_and(|errno| down.contains(&errno))
}

/// Wraps a datagram from a socket that is bound to `dst`.
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

/// Returns the path MTU of the device's own link. Where the address is on no link, as on routers, returns the path MTU that every
/// Ethernet carries.
pub(crate) fn device_mtu(address: IpAddr) -> PathMtu {
    let link = interface_of(address).ok();
    link.and_then(|link| PathMtu::of_link(link.mtu))
        .unwrap_or(PathMtu::Bytes1024)
}

/// Returns the path MTU towards a peer: the largest that the interface's MTU carries.
pub(crate) fn path_mtu_to(local: IpAddr, peer: IpAddr) -> io::Result<PathMtu> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};
    // Only a connected socket reports its path's MTU; nothing is sent.
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
