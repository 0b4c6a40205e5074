//! Devices and their objects. Dropping an object destroys its part of the device.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::ledger::{Booked, Class, Ledger};
use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{
    Access, Arm, Bind, Counters, Cqn, Memory, ModifyError, PostError, QpAttributes, QpInfo, QpState, QpType,
    Qpn, RKey, RecvRequest, Remains, SendFlags, SendRequest, Status, WorkCompletion,
};
use rdmux_wire::roce::PathMtu;

use crate::cq_pool::{Attached, Routes, Share};
use crate::event::AsyncEvent;
use crate::event_queue::EventQueue;
use crate::features::Features;
use crate::limits::Limits;
use crate::moderation::{DeviceModeration, Moderated, ModerationPolicy};
use crate::options::{OpenError, Options, check_environment};
use crate::process::{self, FaultCounts};
use crate::provider::{self, Provided};
use crate::region::{MemoryRegion, MemoryWindow};
use crate::srq::{SharedReceiveQueue, XrcDomain};
use crate::watch::EngineWatch;

/// Why an object could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The device has no room for another.
    #[error("the device has no room for another object, or the objects that it uses do not match")]
    NoRoom,
    /// The caller shares the device with others, and has as much as it may have; the text says of what, and who decides.
    #[error("{0}")]
    Limit(Box<str>),
    /// An object that it is to use belongs to another device.
    #[error("a completion queue, shared receive queue or XRC domain of another device")]
    OtherDevice,
    /// A completion queue of a pool without a share of it ([`CqPool::get`](crate::CqPool::get)).
    #[error("a completion queue of a pool, of which the user has no share")]
    NoShare,
    /// The share of a pool's completion queue reserves less than the queue pair may have.
    #[error(
        "{requests} requests of the queue pair, and {held} of others, exceed the {nr} completions that the share reserves"
    )]
    BeyondShare {
        /// Requests of the queue pair that complete to the share.
        requests: u32,
        /// Those of other queue pairs of the share.
        held: u32,
        /// Completions that the share reserves.
        nr: u32,
    },
    /// The completions of a queue pair in one queue count against one share.
    #[error(
        "two shares of one completion queue: reserve the completions of sends and receives together, and use one share for both"
    )]
    TwoShares,
    /// The device has fewer completion vectors.
    #[error("there is no completion vector {vector}: the device has {count}, counted from 0")]
    NoVector {
        /// The vector.
        vector: u32,
        /// Their number.
        count: u32,
    },
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a list of work requests was not posted as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {index} of the list: {source}")]
pub struct PostListError {
    /// Index of the first request that was not posted, counted from 0: those before it are posted, those behind it are not.
    pub index: usize,
    /// Reason.
    pub source: PostError,
}

/// Way in which a device accesses the bytes of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The device accesses them itself.
    Direct,
    /// The device accesses them itself, page by page, as the kernel provides them: what it wrote to a file is in the page cache,
    /// which its FLUSH to persistence does not reach.
    OnDemand,
    /// The device cannot access them: a processor copies between this memory and registered memory.
    Processor,
}

/// An RDMA device with one address (GID).
#[derive(Clone, Debug)]
pub struct Device(Arc<DeviceInner>);

#[derive(Debug)]
struct DeviceInner {
    provided: Box<dyn provider::Device>,
    provider: &'static str,
    address: IpAddr,
    /// Moderation of the completion queues whose users set none.
    moderation: Arc<DeviceModeration>,
}

impl Provided for Device {
    fn object(&self) -> &dyn Any {
        &*self.0.provided
    }
}

impl Device {
    /// Returns the local address from which a peer is reached, by the host's routes.
    ///
    /// # Errors
    /// Those of `connect(2)` on a UDP socket, as `ENETUNREACH`.
    pub fn address_to(peer: SocketAddr) -> io::Result<IpAddr> {
        let any: IpAddr = match peer {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let probe = UdpSocket::bind((any, 0))?;
        probe.connect(peer)?;
        Ok(probe.local_addr()?.ip())
    }

    /// Opens the device of a local address, of the provider that the process uses ([`Options::provider`]).
    pub fn open(address: IpAddr) -> Result<Device, OpenError> {
        Device::open_with(address, Options::default())
    }

    /// Opens it as [`Device::open`] does, with options.
    pub fn open_with(address: IpAddr, mut options: Options) -> Result<Device, OpenError> {
        let address = address.to_canonical();
        check_environment()?;
        let provider = provider::chosen(options.provider)?;
        options.faults = options.faults.or(process::faults()?);
        options.moderation = options.moderation.or(process::moderation()?);
        let provided = provider.open(address, &options)?;
        Ok(Device(Arc::new(DeviceInner {
            moderation: provided.moderation(),
            provided,
            provider: provider.name(),
            address,
        })))
    }

    /// Opens another engine of the device, with the same options. It has objects, a thread, a slot and sockets of its own, which it does not
    /// share with the others on the path of data, and counts as a process among those that share the address. Objects of different engines
    /// cannot be combined. Engines listen for a service together: each request goes to the listener with the fewest requests that are not
    /// decided, and of those to the one whose engine has the fewest connections.
    ///
    /// ```no_run
    /// # use rdmux_verbs::*;
    /// # use std::{thread, time::Duration};
    /// # fn serve(device: Device) -> Result<(), Box<dyn std::error::Error>> {
    /// let engines = [device.open_engine()?, device];
    /// thread::scope(|scope| {
    ///     for engine in engines {
    ///         scope.spawn(move || {
    ///             let listener = engine.listen(7174)?;
    ///             while let Some(request) = listener.accept(Duration::MAX) {
    ///                 // Accept it with a queue pair of this engine.
    /// #               drop(request);
    ///             }
    ///             Ok::<_, ListenError>(())
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Errors of [`Device::open`]. Provider `hw` has no engines ([`OpenError::Unsupported`]).
    pub fn open_engine(&self) -> Result<Device, OpenError> {
        let provided = self.provided().open_engine()?;
        Ok(Device(Arc::new(DeviceInner {
            moderation: provided.moderation(),
            provided,
            provider: self.provider(),
            address: self.address(),
        })))
    }

    /// Returns the local addresses on which this process can open a device, of the provider that [`Device::open`] takes: those of
    /// the interfaces that are up, loopback last, or those of the host's RDMA devices. A soft device can also be opened on every
    /// other address of 127.0.0.0/8, which hosts have without a list.
    pub fn addresses() -> io::Result<Vec<IpAddr>> {
        let provider = provider::chosen(None).map_err(io::Error::other)?;
        provider.addresses()
    }

    pub(crate) fn provided(&self) -> &dyn provider::Device {
        &*self.0.provided
    }

    pub(crate) fn moderation(&self) -> &DeviceModeration {
        &self.0.moderation
    }

    /// Returns the moderation policy of its completion queues that have none of their own ([`CompletionQueue::moderate`]): the one that it was
    /// opened with ([`Options::moderation`]), unless somebody has changed it ([`crate::resources::set`]). All its engines have the same.
    pub fn moderation_policy(&self) -> ModerationPolicy {
        self.0.moderation.policy()
    }

    /// Returns the limits of the device.
    pub fn limits(&self) -> Limits {
        self.provided().limits()
    }

    /// Returns the name of its provider.
    pub fn provider(&self) -> &'static str {
        self.0.provider
    }

    /// Returns the features of the device. The soft device has all; it pins no memory, and so needs no paging on demand to register
    /// it.
    pub fn features(&self) -> Features {
        self.provided().features()
    }

    /// Returns whether a processor writes what peers send, and not a device by DMA: then their bytes are where its own stores are.
    pub fn writes_by_processor(&self) -> bool {
        self.provided().writes_by_processor()
    }

    /// Returns the memory for a region whose accesses are booked: without a ledger, or on a device that does not access booked memory, the memory itself.
    pub fn booked(
        &self,
        memory: Arc<dyn Memory>,
        ledger: Option<&Arc<Ledger>>,
        class: Class,
    ) -> Arc<dyn Memory> {
        let booked = Booked::wrap(memory.clone(), ledger, class);
        match self.reach(&*booked) {
            Reach::Direct => booked,
            Reach::OnDemand | Reach::Processor => memory,
        }
    }

    /// Returns how the device accesses the bytes of a memory.
    pub fn reach(&self, memory: &dyn Memory) -> Reach {
        self.provided().reach(memory)
    }

    /// Returns whether both are the same device, opened once: objects of different ones cannot be combined.
    pub fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device's address.
    pub fn address(&self) -> IpAddr {
        self.0.address
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain, CreateError> {
        let provided = self.provided().alloc_pd()?;
        let device = self.clone();
        Ok(ProtectionDomain(Arc::new(PdInner { provided, device })))
    }

    /// Makes a completion queue for `depth` completions.
    pub fn create_cq(&self, depth: u32) -> Result<CompletionQueue, CreateError> {
        self.create_cq_on(depth, 0)
    }

    /// Returns the number of completion vectors. An RNIC raises the events of queues with different vectors on different CPUs. The soft device
    /// has one for each CPU that was online when it was first asked; there a vector changes nothing, since the event comes from the thread
    /// that drives the engine, but tools show it.
    pub fn completion_vectors(&self) -> u32 {
        self.provided().completion_vectors()
    }

    /// Makes a completion queue as [`Device::create_cq`] does, with a completion vector.
    ///
    /// # Errors
    /// [`CreateError::NoVector`] unless it is below [`Device::completion_vectors`].
    pub fn create_cq_on(&self, depth: u32, vector: u32) -> Result<CompletionQueue, CreateError> {
        self.check_vector(vector)?;
        Ok(self.completion_queue(self.provided().create_cq(depth, vector)?, false))
    }

    fn check_vector(&self, vector: u32) -> Result<(), CreateError> {
        // Every device has the first one.
        if vector == 0 {
            return Ok(());
        }
        let count = self.completion_vectors();
        match vector < count {
            true => Ok(()),
            false => Err(CreateError::NoVector { vector, count }),
        }
    }

    /// Makes a completion queue that opens no descriptor: it reports to a queue, under a token, each time that it has a completion after it
    /// was armed. [`CompletionQueue::as_fd`] returns the descriptor of that queue.
    ///
    /// # Errors
    /// Provider `hw` does not support it ([`io::ErrorKind::Unsupported`]).
    pub fn create_cq_reporting(
        &self,
        depth: u32,
        events: &EventQueue,
        token: u64,
    ) -> Result<CompletionQueue, CreateError> {
        self.create_cq_reporting_on(depth, 0, events, token)
    }

    /// Makes a completion queue as [`Device::create_cq_reporting`] does, with a completion vector.
    ///
    /// # Errors
    /// Those of [`Device::create_cq_reporting`], and [`CreateError::NoVector`] unless it is below [`Device::completion_vectors`].
    pub fn create_cq_reporting_on(
        &self,
        depth: u32,
        vector: u32,
        events: &EventQueue,
        token: u64,
    ) -> Result<CompletionQueue, CreateError> {
        self.check_vector(vector)?;
        let provided = self
            .provided()
            .create_cq_reporting(depth, vector, events, token)?;
        Ok(self.completion_queue(provided, false))
    }

    /// Makes a queue of a pool: only shares of it are for queue pairs. `vector` is that of the pool, which may have more than the device.
    pub(crate) fn create_pooled_cq(&self, depth: u32, vector: u32) -> Result<CompletionQueue, CreateError> {
        let vector = vector % self.completion_vectors().max(1);
        Ok(self.completion_queue(self.provided().create_cq(depth, vector)?, true))
    }

    fn completion_queue(
        &self,
        provided: Box<dyn provider::CompletionQueue>,
        pooled: bool,
    ) -> CompletionQueue {
        let inner = Arc::new(CqInner {
            queue: provided.queue().cloned(),
            provided,
            device: self.clone(),
            taken: AtomicU32::new(0),
            driven_at: AtomicU32::new(0),
            moderated: Moderated::default(),
            pooled,
            routes: Mutex::default(),
        });
        let queue = CompletionQueue { inner, share: None };
        if self.moderation().policy() != ModerationPolicy::Off {
            queue.follow();
        }
        queue
    }

    /// Lets the caller drive the device, unless another thread does: receives packets that have arrived and sends packets that are
    /// pending. A program that polls memory instead of a completion queue calls this in its loop.
    pub fn progress(&self) {
        self.provided().progress()
    }

    /// For a caller that is about to sleep until a descriptor of its completion queues is readable. Calls `look`; while that finds
    /// nothing, drives the device, and calls `look` again when a queue has raised an event. Goes on as long as that is expected to
    /// cost less than a wake-up. `None`: the caller is to sleep, and then to call [`Device::slept`].
    pub fn look_before_sleep<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        let mut found = None;
        self.provided().look_before_sleep(&mut || {
            found = look();
            found.is_some()
        });
        found
    }

    /// Reports that the caller has slept on descriptors since `since`, when it called [`Device::look_before_sleep`], until
    /// something arrived.
    pub fn slept(&self, since: Instant) {
        self.provided().slept(since);
    }

    /// Takes the place of the device's engine, for a caller that is about to sleep on descriptors. `None`: another caller has it, or the
    /// device wakes callers itself; then the descriptors of completion queues and events wake the caller.
    pub fn watch(&self) -> Option<EngineWatch> {
        self.provided().watch().map(EngineWatch::new)
    }

    /// Sends the delayed acknowledgements, which an RNIC would have sent long ago, and the packets that fault injection delays, and completes
    /// the file of a capture. It is for a process that ends without dropping its queue pairs, whose peers would take these for lost. Does
    /// nothing while another thread drives the device for long.
    pub fn acknowledge(&self) {
        self.provided().acknowledge();
    }

    /// Returns how many datagram trains the system refused to send; the protocol took them for lost.
    pub fn send_errors(&self) -> u64 {
        self.provided().send_errors()
    }

    /// Returns the path MTU towards a peer: the largest that the interface's MTU carries.
    pub fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu> {
        self.provided().path_mtu_to(peer)
    }

    /// Returns the UDP source port of packets to a queue pair of a peer, for programs that bring up their queue pairs themselves
    /// ([`rdmux_rnic::Path::src_port`]).
    pub fn source_port(&self, peer: Qpn) -> io::Result<u16> {
        self.provided().source_port(peer)
    }

    /// Returns the counters of the device.
    pub fn counters(&self) -> Counters {
        self.provided().counters()
    }

    /// Returns the counts of faults that were injected into its packets, if it was opened with faults ([`Options::faults`]).
    pub fn fault_counts(&self) -> Option<FaultCounts> {
        self.provided().fault_counts()
    }

    /// Takes the oldest asynchronous event. IBTA Vol 1, 11.6.3.
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.provided().poll_async_event()
    }

    /// Returns a descriptor that is readable when there may be an asynchronous event, until [`Device::poll_async_event`] finds
    /// none.
    pub fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.provided().async_event_fd()
    }

    /// Returns the largest path MTU that the device's link carries, whatever the peer.
    pub fn active_mtu(&self) -> PathMtu {
        self.provided().active_mtu()
    }

    /// Returns whether its port is active. [`AsyncEvent::PortError`] and [`AsyncEvent::PortActive`] report changes.
    pub fn is_active(&self) -> bool {
        self.provided().is_active()
    }

    /// Takes the oldest asynchronous event; sleeps until there is one. Returns `None` if the timeout expires.
    pub fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        self.provided().wait_async_event(timeout)
    }

    /// Returns the numbers of queue pairs, memory regions and completion queues.
    pub fn object_counts(&self) -> (usize, usize, usize) {
        self.provided().object_counts()
    }
}

#[derive(Debug)]
struct PdInner {
    provided: Box<dyn provider::ProtectionDomain>,
    device: Device,
}

/// Protection domain: queue pairs reach the regions of their own domain only.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<PdInner>);

impl Provided for ProtectionDomain {
    fn object(&self) -> &dyn Any {
        &*self.0.provided
    }
}

impl ProtectionDomain {
    pub(crate) fn provided(&self) -> &dyn provider::ProtectionDomain {
        &*self.0.provided
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Makes a queue pair.
    ///
    /// # Errors
    /// [`CreateError::OtherDevice`] if an object in `options` was not made on this device, [`CreateError::NoShare`] if a completion queue
    /// is one of a pool and no share of it, [`CreateError::TwoShares`] if both are, but not the same share of one queue, [`CreateError::BeyondShare`] if the device does not count completions, and the queue pair holds
    /// more requests than are left of the share.
    pub fn create_qp(&self, options: &QpOptions) -> Result<QueuePair, CreateError> {
        let device = self.device();
        let ours = options.send_cq.device().is(device)
            && options.recv_cq.device().is(device)
            && options.srq.as_ref().is_none_or(|srq| srq.device().is(device))
            && options.xrcd.as_ref().is_none_or(|xrcd| xrcd.device().is(device));
        if !ours {
            return Err(CreateError::OtherDevice);
        }
        if options.send_cq.lacks_share() || options.recv_cq.lacks_share() {
            return Err(CreateError::NoShare);
        }
        if options.send_cq.is(&options.recv_cq) && !options.send_cq.has_share_of(&options.recv_cq) {
            return Err(CreateError::TwoShares);
        }
        let receives = if options.srq.is_none() {
            options.max_recv_wr
        } else {
            0
        };
        let of_sends = Attached::new(&options.send_cq, options.max_send_wr)?;
        let of_receives = Attached::new(&options.recv_cq, receives)?;
        let provided = self.provided().create_qp(options)?;
        let mut shares = [of_sends, of_receives];
        for share in shares.iter_mut().flatten() {
            share.begin(provided.qpn());
        }
        Ok(QueuePair(Arc::new(QpInner {
            provided,
            _shares: shares,
            pd: self.clone(),
            options: options.clone(),
        })))
    }
}

/// Completions taken after which the next poll drives the device.
const FINDS_PER_PROGRESS: u32 = 128;

#[derive(Debug)]
struct CqInner {
    /// See [`provider::CompletionQueue::queue`].
    queue: Option<rdmux_rnic::CompletionQueue>,
    provided: Box<dyn provider::CompletionQueue>,
    device: Device,
    /// Number of completions taken, modulo 2^32, and what it was when a drive was due the last time. A completion that two threads
    /// count as one costs nothing.
    taken: AtomicU32,
    driven_at: AtomicU32,
    moderated: Moderated,
    /// Set if it is one of a pool.
    pooled: bool,
    routes: Mutex<Routes>,
}

/// Completion queue with a completion channel of its own.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    inner: Arc<CqInner>,
    /// The user's share, if it is a queue of a pool. Behind the queue, which has the share's account.
    share: Option<Arc<Share>>,
}

impl Provided for CompletionQueue {
    fn object(&self) -> &dyn Any {
        &*self.inner.provided
    }
}

impl CompletionQueue {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Returns whether both are the same queue.
    pub fn is(&self, other: &CompletionQueue) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns this queue of a pool with a user's share.
    pub(crate) fn shared(self, share: Arc<Share>) -> CompletionQueue {
        CompletionQueue {
            share: Some(share),
            ..self
        }
    }

    pub(crate) fn without_share(&self) -> CompletionQueue {
        CompletionQueue {
            inner: self.inner.clone(),
            share: None,
        }
    }

    pub(crate) fn share(&self) -> Option<&Arc<Share>> {
        self.share.as_ref()
    }

    /// Returns the number of completions in it that count against no share: those of shares that are gone.
    pub(crate) fn left_over(&self) -> u32 {
        self.counting().map_or(0, |queue| queue.left_over() as u32)
    }

    /// Returns the queue of this process that completions arrive in, which counts them by their users; `None` if the device has no such.
    pub(crate) fn counting(&self) -> Option<&rdmux_rnic::CompletionQueue> {
        self.inner.queue.as_ref()
    }

    /// Returns whether a completion of a queue pair was lost since it was reset, because the queue or its share of it overran: then no
    /// other completion of it follows. An RNIC reports only the former, and only as [`AsyncEvent::CqError`].
    pub fn has_lost(&self, qp: &QueuePair) -> bool {
        self.counting().is_some_and(|queue| queue.has_lost(qp.qpn()))
    }

    /// Returns whether both have the same share, or none.
    fn has_share_of(&self, other: &CompletionQueue) -> bool {
        match (&self.share, &other.share) {
            (Some(share), Some(other)) => Arc::ptr_eq(share, other),
            (share, other) => share.is_none() && other.is_none(),
        }
    }

    pub(crate) fn routes(&self) -> &Mutex<Routes> {
        &self.inner.routes
    }

    /// Returns whether it is a queue of a pool.
    pub(crate) fn is_pooled(&self) -> bool {
        self.inner.pooled
    }

    /// Returns whether it is a queue of a pool without a user's share.
    pub(crate) fn lacks_share(&self) -> bool {
        self.inner.pooled && self.share.is_none()
    }

    pub(crate) fn provided(&self) -> &dyn provider::CompletionQueue {
        &*self.inner.provided
    }

    /// Returns its number, by which [`AsyncEvent::CqError`] names it.
    pub fn cqn(&self) -> Cqn {
        self.provided().cqn()
    }

    /// Takes the oldest completion, driving the device if there is none. Never sleeps, and does not wait for another thread that
    /// drives.
    #[inline]
    pub fn poll(&self) -> Option<WorkCompletion> {
        self.drive_if_due();
        let taken = self.inner.queue.as_ref().and_then(|queue| queue.poll());
        let found = taken.or_else(|| self.provided().poll());
        self.note(usize::from(found.is_some()));
        found
    }

    /// Drives for a caller that finds something at every poll, as one does whose requests are done when they are posted: the device's threads
    /// may wait for the CPU that it spins on, and they bring what makes its requests cheaper. Comes before the look, not with a completion in
    /// hand.
    #[inline]
    pub(crate) fn drive_if_due(&self) {
        let taken = self.inner.taken.load(Ordering::Relaxed);
        if taken.wrapping_sub(self.inner.driven_at.load(Ordering::Relaxed)) >= FINDS_PER_PROGRESS {
            self.inner.driven_at.store(taken, Ordering::Relaxed);
            self.inner.device.progress();
        }
    }

    /// Notes that a poll took so many completions, by which another drive comes due.
    #[inline]
    pub(crate) fn note(&self, taken: usize) {
        if taken > 0 {
            let before = self.inner.taken.load(Ordering::Relaxed);
            self.inner
                .taken
                .store(before.wrapping_add(taken as u32), Ordering::Relaxed);
        }
    }

    /// Returns the number of completions that were taken, modulo 2^32.
    pub(crate) fn taken(&self) -> u32 {
        self.inner.taken.load(Ordering::Relaxed)
    }

    pub(crate) fn moderated(&self) -> &Moderated {
        &self.inner.moderated
    }

    /// Takes up to `max` completions, oldest first, into `into`; returns how many. Drives the device if there is none.
    pub fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        self.drive_if_due();
        let found = self.provided().poll_many(max, into);
        self.note(found);
        found
    }

    /// Takes completions, oldest first, into the first elements of a slice; returns how many. Drives the device if there is none.
    /// Allocates nothing: a loop polls into the same slice again and again.
    pub fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        self.drive_if_due();
        let found = self.provided().poll_into(into);
        self.note(found);
        found
    }

    /// Requests a wake-up through [`CompletionQueue::as_fd`], which is not readable until then. A completion that is there already
    /// causes no wake-up: poll after arming.
    pub fn arm(&self, arm: Arm) {
        self.handled_events();
        self.provided().arm(arm)
    }

    /// Takes the event that [`CompletionQueue::as_fd`] reports, so that the descriptor is no longer readable. Returns false if
    /// there is no event, or one that arrives at this moment.
    pub fn take_event(&self) -> bool {
        self.provided().take_event()
    }

    /// Takes the oldest completion; waits until there is one, as the device waits ([`Options::waiting`]). Returns `None` if the
    /// timeout expires. A timeout of zero arms the queue for any completion and polls once more: a later completion makes
    /// [`CompletionQueue::as_fd`] readable.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        match timeout.is_zero() {
            true => self.handled_events(),
            // No handler's run ends here: it takes one completion with each call.
            false => self.follow_device(),
        }
        let found = self.provided().wait(timeout)?;
        self.note(usize::from(found.is_some()));
        Ok(found)
    }
}

impl AsFd for CompletionQueue {
    /// Returns a descriptor that is readable when the armed queue has a completion, until it is armed again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.provided().fd()
    }
}

/// Carrier of the packets of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Rings in memory that this process shares with the peer's, on the same host.
    SharedMemory,
    /// The link of an RNIC.
    Rnic,
    /// UDP, with the reason why it is not shared memory.
    Udp(String),
}

/// Options for a new queue pair.
#[derive(Clone, Debug)]
pub struct QpOptions {
    /// Transport service.
    pub qp_type: QpType,
    /// Queue for send completions.
    pub send_cq: CompletionQueue,
    /// Queue for receive completions.
    pub recv_cq: CompletionQueue,
    /// Number of send requests that it holds.
    pub max_send_wr: u32,
    /// Number of receive requests that it holds.
    pub max_recv_wr: u32,
    /// Shared receive queue from which it takes its receives.
    pub srq: Option<SharedReceiveQueue>,
    /// XRC target: the domain whose shared receive queues peers may name.
    pub xrcd: Option<XrcDomain>,
}

impl QpOptions {
    /// Returns options for RC, with both kinds of completion in one queue and 128 requests each way.
    pub fn new(cq: &CompletionQueue) -> QpOptions {
        QpOptions {
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            max_send_wr: 128,
            max_recv_wr: 128,
            srq: None,
            xrcd: None,
        }
    }
}

#[derive(Debug)]
struct QpInner {
    provided: Box<dyn provider::QueuePair>,
    /// The shares of queues of a pool that its completions count against, as long as there may be any: until `provided` is dropped.
    _shares: [Option<Attached>; 2],
    pd: ProtectionDomain,
    /// Keeps alive the objects that the queue pair uses.
    options: QpOptions,
}

/// Queue pair.
#[derive(Clone, Debug)]
pub struct QueuePair(Arc<QpInner>);

impl Provided for QueuePair {
    fn object(&self) -> &dyn Any {
        &*self.0.provided
    }
}

impl QueuePair {
    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.provided().qpn()
    }

    /// Transport service.
    pub fn qp_type(&self) -> QpType {
        self.0.options.qp_type
    }

    /// Its protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.0.pd
    }

    pub(crate) fn device(&self) -> &Device {
        self.0.pd.device()
    }

    pub(crate) fn provided(&self) -> &dyn provider::QueuePair {
        &*self.0.provided
    }

    /// Posts a send request and sends what the window allows.
    pub fn post_send(&self, request: SendRequest) -> Result<(), PostError> {
        self.provided().post_send(request)
    }

    /// Posts send requests in order, as one doorbell. Fails at the first that cannot be posted; those before it are posted.
    pub fn post_send_list(
        &self,
        requests: impl IntoIterator<Item = SendRequest>,
    ) -> Result<(), PostListError> {
        // The iterator is the caller's code, and may use the device: it runs before the engine is locked.
        let requests: Vec<SendRequest> = requests.into_iter().collect();
        self.provided().post_send_list(requests)
    }

    /// Makes it keep what is left of it when it fails: which of its requests had not completed, and which of its peer's it has executed.
    /// Returns false if it cannot, as on devices of the kernel.
    pub fn keep_remains(&self) -> bool {
        self.provided().keep_remains()
    }

    /// Takes what is left of it in Error, once. Returns `None` if it does not keep that ([`QueuePair::keep_remains`]), and if memory on a
    /// medium was being accessed for its peer as it failed.
    pub fn take_remains(&self) -> Option<Remains> {
        self.provided().take_remains()
    }

    /// Posts the binding of a type 1 window to a range of addresses of a region, and returns the key by which peers reach them once
    /// the request has completed. Type 2 windows are bound by [`Operation::Bind`].
    ///
    /// [`Operation::Bind`]: rdmux_rnic::Operation::Bind
    pub fn bind_mw(
        &self,
        wr_id: u64,
        window: &MemoryWindow,
        region: &MemoryRegion,
        range: Range<u64>,
        access: Access,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let bind = Bind {
            window: window.rkey(),
            region: region.lkey(),
            va: range.start,
            length: range.end.saturating_sub(range.start),
            access,
        };
        let key = self.provided().bind_mw(wr_id, bind, flags)?;
        window.set_rkey(key);
        Ok(key)
    }

    /// Moves a new queue pair of a connected service from Reset to Init, where `rdma_create_qp(3)` leaves one: it takes receives,
    /// and can be connected. IBTA Vol 1, 10.3.1.2.
    pub fn init(&self) -> Result<(), ModifyError> {
        let attributes = QpAttributes {
            // Connecting sets the peer's rights.
            access: Some(Access::empty()),
            ..QpAttributes::default()
        };
        self.modify(QpState::Init, &attributes)
    }

    /// Posts a receive request. A new queue pair takes none before [`QueuePair::init`], or before it is connected.
    pub fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.provided().post_recv(request)
    }

    /// Changes state and attributes. Programs that connect through [`Device::connect`] need not call it.
    pub fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError> {
        self.provided().modify(to, attributes)?;
        if to == QpState::Reset {
            self.forget_completions();
        }
        Ok(())
    }

    /// Discards the completions that wait for a user of a pool's queue; the device has discarded those in its queues.
    fn forget_completions(&self) {
        for cq in [&self.0.options.send_cq, &self.0.options.recv_cq] {
            if let Some(share) = cq.share() {
                share.forget(cq, self.qpn());
            }
        }
    }

    /// Retires the queue pair: its owner uses it no more, while others, such as a connection that is being established, may still
    /// hold it. It discards requests that were posted and completions, and nobody brings it up again. Changing its state is from
    /// then on an error ([`ModifyError`]).
    pub fn retire(&self) {
        self.provided().retire();
        self.forget_completions();
    }

    /// As [`QueuePair::retire`], but does not wait for accesses of peers that are in progress to memory that they were given, and returns whether there
    /// are some. They begin no others; the end of the queue pair waits for them.
    pub fn cut_off(&self) -> bool {
        let has_peers_inside = self.provided().cut_off();
        self.forget_completions();
        has_peers_inside
    }

    /// Returns what is known about it.
    pub fn query(&self) -> Option<QpInfo> {
        self.provided().query()
    }

    /// Returns the carrier of its packets; `None` before it has a peer.
    pub fn carrier(&self) -> Option<Carrier> {
        self.provided().carrier()
    }

    /// Returns why it went to Error on its own, if it did since it was made or reset.
    pub fn error(&self) -> Option<Status> {
        self.provided().error()
    }
}
