//! A soft device, its protection domains and its completion queues.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{
    Arm, Counters, Cqn, Memory, Moderation, ModerationKind, Pd, QpType, Qpn, RegionSpec, RegisterError,
    TooShort, WindowType, WorkCompletion,
};
use rdmux_verbs::provider::{self, Object, deadline_after, vector_per_cpu};
use rdmux_verbs::{
    AsyncEvent, ConnectError, ConnectPair, ConnectParams, CreateError, DeviceModeration, EventQueue,
    FaultCounts, Features, Limits, ListenError, OpenError, Options, QpOptions, Reach, ResizeError,
    ResolveError,
};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::roce::PathMtu;

use super::cm::{Connecting, Service};
use super::engine::{CqWaker, Engine, Watch, device_mtu, path_mtu_to};
use super::engines::Engines;
use super::qp::QueuePair;
use super::region::{MemoryRegion, MemoryWindow};
use super::shm::callers::Looked;
use super::sidr::Resolving;
use super::srq::{SharedReceiveQueue, XrcDomain};

/// Handle that closes the engine when the last object of the device is dropped.
#[derive(Debug)]
struct DeviceHandle {
    engine: Arc<Engine>,
    address: IpAddr,
    options: Options,
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        self.engine.close();
    }
}

/// A device with one of its engines. Each object of the engine holds a clone.
#[derive(Clone, Debug)]
pub(crate) struct Device(Arc<DeviceHandle>);

impl Deref for Device {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0.engine
    }
}

impl Device {
    pub(crate) fn open(address: IpAddr, options: Options) -> Result<Device, OpenError> {
        let engines = Engines::new(options.moderation.unwrap_or_default());
        Device::with_engine(address, options, Arc::new(engines))
    }

    fn with_engine(address: IpAddr, options: Options, engines: Arc<Engines>) -> Result<Device, OpenError> {
        let engine = Engine::open(address, options, engines)?;
        Ok(Device(Arc::new(DeviceHandle {
            engine,
            address,
            options,
        })))
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.0.address
    }

    fn create_cq_with(
        &self,
        depth: u32,
        vector: u32,
        waker: CqWaker,
    ) -> Result<CompletionQueue, CreateError> {
        let waker = Arc::new(waker);
        let mut core = self.lock();
        let cqn = core.rnic.create_cq_on(depth, vector);
        let queue = core.rnic.cq(cqn).ok_or(CreateError::NoRoom)?;
        core.cq_wakers.insert(cqn, Arc::downgrade(&waker));
        drop(core);
        Ok(CompletionQueue {
            device: self.clone(),
            cqn,
            queue,
            waker,
            waiters: AtomicUsize::new(0),
        })
    }
}

impl provider::Device for Device {
    fn open_engine(&self) -> Result<Box<dyn provider::Device>, OpenError> {
        let DeviceHandle {
            engine,
            address,
            options,
        } = &*self.0;
        let device = Device::with_engine(*address, *options, engine.engines.clone())?;
        Ok(Box::new(device))
    }

    fn limits(&self) -> Limits {
        Limits::ENGINE
    }

    fn features(&self) -> Features {
        Features::all()
    }

    fn moderation(&self) -> Arc<DeviceModeration> {
        self.engines.moderation.clone()
    }

    fn writes_by_processor(&self) -> bool {
        true
    }

    fn reach(&self, _memory: &dyn Memory) -> Reach {
        Reach::Direct
    }

    fn alloc_pd(&self) -> Result<Box<dyn provider::ProtectionDomain>, CreateError> {
        let pd = self.lock().rnic.alloc_pd();
        let device = self.clone();
        Ok(Box::new(ProtectionDomain { device, pd }))
    }

    fn completion_vectors(&self) -> u32 {
        vector_per_cpu()
    }

    fn create_cq(&self, depth: u32, vector: u32) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        let waker = CqWaker::new(self.nap.clone())?;
        Ok(Box::new(self.create_cq_with(depth, vector, waker)?))
    }

    fn create_cq_reporting(
        &self,
        depth: u32,
        vector: u32,
        events: &EventQueue,
        token: u64,
    ) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        let waker = CqWaker::reporting(events, token, self.nap.clone());
        Ok(Box::new(self.create_cq_with(depth, vector, waker)?))
    }

    fn alloc_xrcd(&self) -> Result<Box<dyn provider::XrcDomain>, CreateError> {
        Ok(Box::new(XrcDomain::new(self)))
    }

    fn listen(
        &self,
        service: ServiceId,
        _qp_types: &[QpType],
    ) -> Result<Box<dyn provider::Listener>, ListenError> {
        Ok(Box::new(Service::offer(self, service, false)?))
    }

    fn start_connect(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Box<dyn provider::Connecting>, ConnectError> {
        Ok(Box::new(Connecting::start(
            self,
            pair,
            peer,
            params,
            private_data,
        )?))
    }

    fn listen_datagram(&self, port: u16) -> Result<Box<dyn provider::DatagramListener>, ListenError> {
        Ok(Box::new(Service::offer(self, ServiceId::udp(port), true)?))
    }

    fn start_resolve(
        &self,
        source_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Box<dyn provider::Resolving>, ResolveError> {
        Ok(Box::new(Resolving::start(self, source_port, peer, private_data)?))
    }

    fn look_before_sleep(&self, look: &mut dyn FnMut() -> bool) -> bool {
        Engine::look_before_sleep(self, || look().then_some(())).is_some()
    }

    fn slept(&self, since: Instant) {
        Engine::slept(self, since);
    }

    fn watch(&self) -> Option<Box<dyn provider::EngineWatch>> {
        Some(Box::new(Watch::begin(self)?))
    }

    fn acknowledge(&self) {
        Engine::acknowledge(self);
    }

    fn active_mtu(&self) -> PathMtu {
        device_mtu(self.address())
    }

    fn progress(&self) {
        self.poll(|| None::<()>);
    }

    fn is_active(&self) -> bool {
        !self.lock().rnic.is_down()
    }

    fn send_errors(&self) -> u64 {
        self.lock().send_errors
    }

    fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu> {
        path_mtu_to(self.address(), peer)
    }

    fn source_port(&self, peer: Qpn) -> io::Result<u16> {
        self.lock().source_port(peer)
    }

    fn counters(&self) -> Counters {
        Engine::counters(self)
    }

    fn fault_counts(&self) -> Option<FaultCounts> {
        self.lock().rnic.fault_counts()
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        let take = || self.lock().async_events.take();
        take().or_else(|| {
            self.async_waker.reset_if_woken();
            take()
        })
    }

    fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.async_waker.fd().as_fd()
    }

    fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        let deadline = deadline_after(timeout);
        let take = || self.lock().async_events.take_and_pass_on();
        loop {
            if let Some(event) = take() {
                return Some(event);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !self.sleep(&self.async_waker, left) {
                return take();
            }
        }
    }

    fn object_counts(&self) -> (usize, usize, usize) {
        self.lock().rnic.object_counts()
    }
}

#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    pub(super) device: Device,
    pub(super) pd: Pd,
}

impl provider::ProtectionDomain for ProtectionDomain {
    fn create_qp(&self, options: &QpOptions) -> Result<Box<dyn provider::QueuePair>, CreateError> {
        Ok(Box::new(QueuePair::new(self, options)?))
    }

    fn create_srq(
        &self,
        max_wr: u32,
        xrc: Option<(&rdmux_verbs::XrcDomain, &rdmux_verbs::CompletionQueue)>,
    ) -> Result<Box<dyn provider::SharedReceiveQueue>, CreateError> {
        Ok(Box::new(SharedReceiveQueue::new(self, max_wr, xrc)?))
    }

    fn reg_mr(&self, spec: RegionSpec) -> Result<Box<dyn provider::MemoryRegion>, RegisterError> {
        Ok(Box::new(MemoryRegion::new(self, spec)?))
    }

    fn alloc_mr(&self, length_max: u64) -> Result<Box<dyn provider::MemoryRegion>, RegisterError> {
        Ok(Box::new(MemoryRegion::without_memory(self, length_max)?))
    }

    fn alloc_mw(&self, window_type: WindowType) -> Result<Box<dyn provider::MemoryWindow>, RegisterError> {
        Ok(Box::new(MemoryWindow::new(self, window_type)?))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // Drop the memories only after the engine is unlocked: dropping may unmap, close, or run code of a memory's owner.
        let memories = self.device.lock().rnic.dealloc_pd(self.pd);
        drop(memories);
    }
}

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    device: Device,
    cqn: Cqn,
    queue: rdmux_rnic::CompletionQueue,
    waker: Arc<CqWaker>,
    /// Number of threads in [`CompletionQueue::wait`].
    waiters: AtomicUsize,
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let mut core = self.device.lock();
        core.rnic.destroy_cq(self.cqn);
        core.async_events.forget(Object::Cq(self.cqn));
        core.cq_wakers.remove(&self.cqn);
    }
}

impl CompletionQueue {
    /// Calls `look`; as long as that finds nothing, moves what peers have sent, by lanes or by the engine, and calls it again.
    #[inline]
    fn look_or_drive<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        match look() {
            None => self.look_and_drive(look),
            found => found,
        }
    }

    /// As [`CompletionQueue::look_or_drive`], for a caller who has looked.
    #[inline]
    fn look_and_drive<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        let Looked { any, drive } = self.device.look_by_lanes();
        let found = if any { look() } else { None };
        match (drive, found) {
            (None, found) => found,
            (Some(polls), None) => self.device.drive_and_look(polls, look),
            (Some(polls), found) => {
                let _: Option<()> = self.device.drive_and_look(polls, || None);
                found
            }
        }
    }
}

impl provider::CompletionQueue for CompletionQueue {
    fn cqn(&self) -> Cqn {
        self.cqn
    }

    fn queue(&self) -> Option<&rdmux_rnic::CompletionQueue> {
        Some(&self.queue)
    }

    fn poll(&self) -> Option<WorkCompletion> {
        self.look_and_drive(|| self.queue.poll())
    }

    fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        self.look_or_drive(|| Some(self.queue.poll_many(max, into)).filter(|n| *n > 0))
            .unwrap_or(0)
    }

    fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        self.look_or_drive(|| Some(self.queue.poll_into(into)).filter(|n| *n > 0))
            .unwrap_or(0)
    }

    fn poll_with_time(&self) -> Option<(WorkCompletion, Instant)> {
        let (wc, came) = self.look_or_drive(|| self.queue.poll_with_time())?;
        Some((wc, self.device.instant(came)))
    }

    fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        let resized = self.device.lock().rnic.resize_cq(self.cqn, depth);
        resized.map_err(|TooShort| ResizeError::TooShort)
    }

    fn moderate(&self, kind: ModerationKind, moderation: Option<Moderation>) {
        self.device.lock().rnic.moderate_cq(self.cqn, kind, moderation);
    }

    fn has_notified(&self) -> bool {
        self.queue.has_raised()
    }

    fn keep_times(&self) {
        self.device.lock().rnic.keep_cq_times(self.cqn);
    }

    fn take_event(&self) -> bool {
        self.queue.take_notification();
        self.waker.reset_if_woken()
    }

    fn arm(&self, arm: Arm) {
        self.waker.reset_if_woken();
        self.queue.arm(arm);
        self.device.hand_over();
    }

    fn watch(&self, on: bool) {
        if on {
            self.waker.reset_if_woken();
        }
        self.queue.watch(on);
    }

    fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        let waker = self.waker.own()?;
        let look = || {
            let (wc, left) = self.queue.poll_and_count()?;
            if left > 0 {
                // Another thread may wait for the rest: one wake-up can stand for several completions.
                waker.wake();
            }
            Some(wc)
        };
        if timeout.is_zero() {
            return Ok(look().or_else(|| {
                self.arm(Arm::Next);
                look()
            }));
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let found = self
            .device
            .wait(deadline_after(timeout), waker, &self.queue, look);
        if self.waiters.fetch_sub(1, Ordering::SeqCst) > 1 || self.queue.is_notified() {
            // The wake-up, and the event for which the queue was armed, may have been meant for all waiters, and for a user who sleeps on
            // the descriptor: they poll and arm again.
            self.waker.wake();
        }
        Ok(found)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.waker.fd()
    }
}
