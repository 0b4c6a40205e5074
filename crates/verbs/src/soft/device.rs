//! A soft device, its protection domains and its completion queues.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{Arm, Counters, Cqn, Moderation, Pd, Qpn, TooShort, WorkCompletion};
use rdmux_wire::roce::PathMtu;

use super::engine::{CqWaker, Engine, OpenError, Options, path_mtu_to};
use super::faults::FaultCounts;
use crate::cm::deadline_after;
use crate::cq::ResizeError;
use crate::device::CreateError;
use crate::event::{AsyncEvent, Object};

/// Handle that closes the engine when the last object of the device is dropped.
#[derive(Debug)]
struct Handle {
    engine: Arc<Engine>,
    address: IpAddr,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.engine.close();
    }
}

/// A device. Each of its objects holds a clone.
#[derive(Clone, Debug)]
pub(crate) struct Device(Arc<Handle>);

impl Deref for Device {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0.engine
    }
}

impl Device {
    pub(crate) fn open(address: IpAddr, options: Options) -> Result<Device, OpenError> {
        let engine = Engine::open(address, options)?;
        Ok(Device(Arc::new(Handle { engine, address })))
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.0.address
    }

    /// Returns whether both are the same opened device.
    pub(crate) fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn alloc_pd(&self) -> ProtectionDomain {
        let pd = self.lock().rnic.alloc_pd();
        let device = self.clone();
        ProtectionDomain { device, pd }
    }

    pub(crate) fn create_cq(&self, depth: u32) -> Result<CompletionQueue, CreateError> {
        self.create_cq_with(depth, CqWaker::new()?)
    }

    pub(crate) fn create_cq_with(&self, depth: u32, waker: CqWaker) -> Result<CompletionQueue, CreateError> {
        let waker = Arc::new(waker);
        let mut core = self.lock();
        let cqn = core.rnic.create_cq(depth);
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

    pub(crate) fn progress(&self) {
        self.poll(|| None::<()>);
    }

    pub(crate) fn is_active(&self) -> bool {
        !self.lock().rnic.is_down()
    }

    pub(crate) fn send_errors(&self) -> u64 {
        self.lock().send_errors
    }

    pub(crate) fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu> {
        path_mtu_to(self.address(), peer)
    }

    pub(crate) fn source_port(&self, peer: Qpn) -> io::Result<u16> {
        self.lock().source_port(peer)
    }

    pub(crate) fn counters(&self) -> Counters {
        Engine::counters(self)
    }

    pub(crate) fn fault_counts(&self) -> Option<FaultCounts> {
        self.lock().rnic.fault_counts()
    }

    pub(crate) fn poll_async_event(&self) -> Option<AsyncEvent> {
        let take = || self.lock().async_events.take();
        take().or_else(|| {
            self.async_waker.reset_if_woken();
            take()
        })
    }

    pub(crate) fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.async_waker.fd().as_fd()
    }

    pub(crate) fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
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

    pub(crate) fn object_counts(&self) -> (usize, usize, usize) {
        self.lock().rnic.object_counts()
    }
}

#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    pub(super) device: Device,
    pub(super) pd: Pd,
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
    pub(crate) fn cqn(&self) -> Cqn {
        self.cqn
    }

    #[inline]
    pub(crate) fn poll(&self) -> Option<WorkCompletion> {
        self.device.poll(|| self.queue.poll())
    }

    pub(crate) fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        let look = || Some(self.queue.poll_many(max, into)).filter(|n| *n > 0);
        self.device.poll(look).unwrap_or(0)
    }

    pub(crate) fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        let look = || Some(self.queue.poll_into(into)).filter(|n| *n > 0);
        self.device.poll(look).unwrap_or(0)
    }

    pub(crate) fn poll_with_time(&self) -> Option<(WorkCompletion, Instant)> {
        let (wc, came) = self.device.poll(|| self.queue.poll_with_time())?;
        Some((wc, self.device.instant(came)))
    }

    pub(crate) fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        let resized = self.device.lock().rnic.resize_cq(self.cqn, depth);
        resized.map_err(|TooShort| ResizeError::TooShort)
    }

    pub(crate) fn moderate(&self, moderation: Option<Moderation>) {
        self.device.lock().rnic.moderate_cq(self.cqn, moderation);
    }

    pub(crate) fn keep_times(&self) {
        self.device.lock().rnic.keep_cq_times(self.cqn);
    }

    pub(crate) fn take_event(&self) -> bool {
        self.queue.take_notification();
        self.waker.reset_if_woken()
    }

    pub(crate) fn arm(&self, arm: Arm) {
        self.waker.reset_if_woken();
        self.queue.arm(arm);
        self.device.hand_over();
    }

    pub(crate) fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
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

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.waker.fd()
    }
}
