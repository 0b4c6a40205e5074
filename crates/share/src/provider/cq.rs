//! Completion queues: memory of this process, into which it delivers the completions that it takes out of its ring.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{Arm, Cqn, Delivered, TooShort, WorkCompletion};
use rdmux_verbs::moderation::now;
use rdmux_verbs::provider::{self, Object, Registration, Waker, conditions, deadline_after};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::waiting::{Plan, Policy};
use rdmux_verbs::{AsyncEvent, EventQueue, ResizeError, wake_cost_ns};

use super::client::Client;
use super::device::Device;

/// Numbers of completion queues, which tools do not see.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Receiver of an event.
#[derive(Debug)]
enum Told {
    Own(Waker),
    Chosen(Registration),
}

/// The part of a completion queue that its queue pairs deliver to.
#[derive(Debug)]
pub(super) struct CqShared {
    pub(super) cqn: Cqn,
    pub(super) queue: rdmux_rnic::CompletionQueue,
    told: Told,
}

impl CqShared {
    /// Delivers a completion. Returns false if it is lost, and its queue pair is in error for that.
    pub(super) fn deliver(&self, client: &Client, wc: WorkCompletion) -> bool {
        // The node's device alone knows that a message was solicited: each counts as solicited here.
        match self.queue.deliver(wc, true) {
            Delivered::Quiet => true,
            Delivered::Tell => {
                self.tell();
                true
            }
            Delivered::Overrun { first } => {
                if first {
                    client.raise(AsyncEvent::CqError(self.cqn));
                }
                false
            }
            Delivered::ShareOverrun => false,
        }
    }

    fn tell(&self) {
        match &self.told {
            Told::Own(waker) => waker.wake(),
            Told::Chosen(registration) => registration.announce(),
        }
    }

    fn reset(&self) {
        match &self.told {
            Told::Own(waker) => drop(waker.reset_if_woken()),
            Told::Chosen(registration) => registration.forget(),
        }
    }
}

#[derive(Debug)]
pub(super) struct CompletionQueue {
    device: Device,
    pub(super) shared: Arc<CqShared>,
    policy: Mutex<Policy>,
}

impl CompletionQueue {
    pub(super) fn new(
        device: &Device,
        depth: u32,
        vector: u32,
        chosen: Option<(&EventQueue, u64)>,
    ) -> io::Result<CompletionQueue> {
        let armed = device.client().rings.armed.clone();
        device.client().queues.fetch_add(1, Ordering::Relaxed);
        let mut policy = Policy::new(wake_cost_ns());
        policy.pin(device.waiting());
        Ok(CompletionQueue {
            device: device.clone(),
            shared: Arc::new(CqShared {
                cqn: Cqn(NEXT.fetch_add(1, Ordering::Relaxed)),
                queue: rdmux_rnic::CompletionQueue::without_engine(depth as usize, vector, armed),
                told: match chosen {
                    Some((events, token)) => Told::Chosen(Registration::new(events, token)),
                    None => Told::Own(Waker::new()?),
                },
            }),
            policy: Mutex::new(policy),
        })
    }

    fn client(&self) -> &Client {
        self.device.client()
    }

    /// Takes what is in the ring, if the queue is empty. A node that writes no completions is one that has gone.
    fn look<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        look().or_else(|| {
            self.client().rings.poll(self.client());
            look()
        })
    }

    fn arm_for(&self, arm: Arm) {
        self.shared.reset();
        self.shared.queue.arm(arm);
        self.client().rings.armed(self.client());
    }

    /// Polls as long as the policy expects that to cost less than a wake-up.
    fn poll_first(&self, began: Instant, deadline: Option<Instant>) -> Option<WorkCompletion> {
        let elapsed_ns = || began.elapsed().as_nanos() as u64;
        loop {
            let elapsed = elapsed_ns();
            let plan = self.policy.lock().plan(elapsed, conditions(now().0));
            match plan {
                Plan::Sleep => return None,
                Plan::Spin { .. } => std::hint::spin_loop(),
                Plan::Yield => std::thread::yield_now(),
            }
            if let Some(wc) = self.look(|| self.shared.queue.poll()) {
                self.policy.lock().came(elapsed_ns());
                return Some(wc);
            }
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return None;
            }
        }
    }
}

impl provider::CompletionQueue for CompletionQueue {
    fn cqn(&self) -> Cqn {
        self.shared.cqn
    }

    fn queue(&self) -> Option<&rdmux_rnic::CompletionQueue> {
        Some(&self.shared.queue)
    }

    fn poll(&self) -> Option<WorkCompletion> {
        self.client().rings.poll(self.client());
        self.shared.queue.poll()
    }

    fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        self.look(|| Some(self.shared.queue.poll_many(max, into)).filter(|n| *n > 0))
            .unwrap_or(0)
    }

    fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        self.look(|| Some(self.shared.queue.poll_into(into)).filter(|n| *n > 0))
            .unwrap_or(0)
    }

    fn arm(&self, arm: Arm) {
        self.arm_for(arm);
    }

    fn take_event(&self) -> bool {
        self.shared.queue.take_notification();
        match &self.shared.told {
            Told::Own(waker) => waker.reset_if_woken(),
            Told::Chosen(_) => false,
        }
    }

    fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        let Told::Own(waker) = &self.shared.told else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let queue = &self.shared.queue;
        let look = || {
            let (wc, left) = queue.poll_and_count()?;
            if left > 0 {
                // Another thread may wait for the rest: one wake-up can stand for several completions.
                waker.wake();
            }
            Some(wc)
        };
        if let Some(wc) = self.look(look) {
            return Ok(Some(wc));
        }
        if timeout.is_zero() {
            self.arm_for(Arm::Next);
            return Ok(look());
        }
        let began = Instant::now();
        let deadline = deadline_after(timeout);
        if let Some(wc) = self.poll_first(began, deadline) {
            return Ok(Some(wc));
        }
        loop {
            self.arm_for(Arm::Next);
            if let Some(wc) = look() {
                self.policy.lock().came(began.elapsed().as_nanos() as u64);
                return Ok(Some(wc));
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !waker.wait(left) {
                self.policy.lock().gave_up(began.elapsed().as_nanos() as u64);
                return Ok(look());
            }
            if let Some(wc) = look() {
                self.policy.lock().woke(began.elapsed().as_nanos() as u64, None);
                return Ok(Some(wc));
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.shared.told {
            Told::Own(waker) => waker.fd().as_fd(),
            Told::Chosen(registration) => registration.queue().as_fd(),
        }
    }

    fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        let resized = self.shared.queue.resize(depth as usize);
        resized.map_err(|TooShort| ResizeError::TooShort)
    }

    fn has_notified(&self) -> bool {
        self.shared.queue.has_raised()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.client().queues.fetch_sub(1, Ordering::Relaxed);
        self.client().forget_events(Object::Cq(self.shared.cqn));
    }
}
