//! Completion queues. IBTA Vol 1, 10.8 and 11.4.2.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::probes;
use crate::sync::{Mutex, MutexGuard};
use rdmux_wire::{Qpn, RKey};
use strum::VariantArray;

use crate::time::Time;

mod quotas;

pub use quotas::ShareId;
use quotas::{Charged, Quotas};

/// Handle of a completion queue of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cqn(pub u32);

/// Outcome of a work request. The names are those of `enum ibv_wc_status`; IBTA Vol 1, 11.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error, VariantArray)]
pub enum Status {
    /// The request succeeded.
    #[error("success")]
    Success,
    /// The receive buffer is too small, or the message is longer than allowed.
    #[error("local length error")]
    LocalLength,
    /// The request's own memory keys or bounds are wrong.
    #[error("local protection error")]
    LocalProtection,
    /// The request's own memory failed while it was read or written.
    #[error("local QP operation error")]
    LocalQpOperation,
    /// The request was not carried out: the QP was in error.
    #[error("work request flushed error")]
    Flushed,
    /// The peer's response does not fit the request.
    #[error("bad response error")]
    BadResponse,
    /// The peer found the request invalid: its opcode, its length, or a right missing on the peer's QP.
    #[error("remote invalid request error")]
    RemoteInvalidRequest,
    /// The peer's memory key, bounds or rights did not allow it.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer failed while it carried out the request.
    #[error("remote operation error")]
    RemoteOperation,
    /// No response came within the retries.
    #[error("transport retry counter exceeded")]
    RetryExceeded,
    /// The peer had no receive posted within the retries.
    #[error("RNR retry counter exceeded")]
    RnrRetryExceeded,
    /// A memory window could not be bound: wrong rights or bounds, or a window or region that the requester does not own.
    #[error("memory window bind error")]
    MemoryBind,
}

/// Kind of a completed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[expect(missing_docs, reason = "the names are the verbs' own")]
pub enum WcOpcode {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
    BindWindow,
    Register,
    LocalInvalidate,
    Recv,
    RecvRdmaWithImm,
}

/// A work completion. IBTA Vol 1, 11.4.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// Number that the poster of the request chose.
    pub wr_id: u64,
    /// Outcome. With anything but success, only `wr_id`, `status` and `qpn` are meaningful.
    pub status: Status,
    /// Kind of the request.
    pub opcode: WcOpcode,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data of a receive.
    pub imm: Option<u32>,
    /// The QP that the request was posted to, or that used it up.
    pub qpn: Qpn,
    /// Receives: the key that the message invalidated (SEND with invalidate).
    pub invalidated: Option<RKey>,
    /// Receives of UD: the sender's QPN. The first 40 bytes of the message are the GRH.
    pub src_qpn: Option<Qpn>,
}

impl Default for WorkCompletion {
    /// Returns a flushed request 0, to fill a slice that completions are polled into.
    fn default() -> WorkCompletion {
        WorkCompletion {
            wr_id: 0,
            status: Status::Flushed,
            opcode: WcOpcode::Send,
            byte_len: 0,
            imm: None,
            qpn: Qpn::new(0),
            invalidated: None,
            src_qpn: None,
        }
    }
}

/// Completion at which an armed queue notifies its waiter. IBTA Vol 1, 11.4.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The next completion.
    Next,
    /// The next receive of a message that was sent as solicited, or the next error.
    Solicited,
}

/// Moderation of an armed queue: it notifies its waiter of the completions that [`Arm`] asks for when so many have come since it
/// was armed, or when the first of them is so old, whichever is earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moderation {
    /// Number of completions.
    pub count: u16,
    /// Time in microseconds.
    pub period_us: u16,
}

/// Use of a queue by a pool of queues that users share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUse {
    /// The vector of the pool that the queue belongs to.
    pub vector: u32,
    /// Completions that its users have reserved.
    pub used: u32,
    /// Number of its users.
    pub users: u32,
}

/// Kind of the policy that chooses the moderation of a queue, for tools that show it: the queue knows only what was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, VariantArray)]
pub enum ModerationKind {
    /// There is no moderation.
    #[default]
    Off,
    /// It is always the same.
    Fixed,
    /// It depends on the load, and Linux's DIM chooses it.
    Dim,
    /// It depends on the rate of completions.
    Rate,
}

impl ModerationKind {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            ModerationKind::Off => "off",
            ModerationKind::Fixed => "fixed",
            ModerationKind::Dim => "dim",
            ModerationKind::Rate => "rate",
        }
    }

    /// Returns whether it changes with the load.
    pub fn is_adaptive(self) -> bool {
        matches!(self, ModerationKind::Dim | ModerationKind::Rate)
    }
}

/// How a queue is moderated, and with what effect: `taken` divided by `events` is the number of completions that a wake-up is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CqModeration {
    /// Kind of the policy.
    pub kind: ModerationKind,
    /// The moderation in effect.
    pub moderation: Option<Moderation>,
    /// Number of times that a policy has replaced a moderation of its own by another one.
    pub changes: u64,
    /// Number of times that the armed queue has notified its waiter.
    pub events: u64,
    /// Number of completions that were polled.
    pub taken: u64,
}

/// The completion queue cannot be made that short: it holds more completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the completion queue holds more completions than the new size")]
pub struct TooShort;

/// Effect of a completion on its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// No waiter is to be notified.
    Quiet,
    /// An armed waiter is to be notified at this time, if the queue still says so then ([`CompletionQueue::expire`]).
    Later(Time),
    /// An armed waiter is to be notified.
    Tell,
    /// The queue had no room, or was in error for that reason already: the completion is lost.
    Overrun { first: bool },
    /// The QP's share of the queue had no room, or a completion of the QP was lost already: this one is lost, too.
    ShareOverrun,
}

/// Number of completion queues of a device that are armed.
#[derive(Clone, Debug, Default)]
pub struct ArmedQueues(Arc<AtomicUsize>);

impl ArmedQueues {
    /// Returns whether any queue is armed: its owner may sleep until the queue signals a completion.
    #[inline]
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// A completion queue. The device and its pollers share nothing else: polling does not wait for a lock that is held while packets
/// are handled.
#[derive(Clone, Debug)]
pub struct CompletionQueue(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    vector: u32,
    /// Number of completions, as it was when the lock was released last: a poll of an empty queue takes no lock.
    count: AtomicUsize,
}

/// The queue, locked.
struct Locked<'a> {
    queue: MutexGuard<'a, Queue>,
    count: &'a AtomicUsize,
}

impl Deref for Locked<'_> {
    type Target = Queue;

    #[inline]
    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        self.count.store(self.queue.completions.len(), Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Queue {
    completions: VecDeque<WorkCompletion>,
    depth: usize,
    armed: Option<Arm>,
    armed_queues: ArmedQueues,
    /// Set once the user who armed the queue is to be notified, until the user takes the notification or arms the queue again.
    notified: bool,
    /// Set once the user was notified, until the queue is armed again.
    raised: bool,
    /// Set while a driver sleeps and has to be notified of the next completion that another driver causes.
    watched: bool,
    overrun: bool,
    /// Time of each of `completions`, if the user asked for it.
    came: Option<VecDeque<Time>>,
    moderation: Option<Moderation>,
    kind: ModerationKind,
    changes: u64,
    events: u64,
    /// Completions taken when a wake-up was counted the last time.
    taken_at_event: u64,
    /// Completions that are in the queue or were taken from it.
    arrived: u64,
    /// Completions of which the armed waiter has not been notified yet, and the latest time at which it is.
    untold: u32,
    tell_at: Option<Time>,
    /// The device's timer for `tell_at`, or for an earlier one that was cancelled.
    timer: Option<Time>,
    /// Quotas of its users, if they share it.
    quotas: Option<Box<Quotas>>,
    pool: Option<PoolUse>,
}

impl Queue {
    fn arm(&mut self, arm: Arm) {
        self.notified = false;
        self.raised = false;
        if self.armed.replace(arm).is_none() {
            self.armed_queues.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Disarms the queue, and cancels a notification that moderation delays.
    fn disarm(&mut self) {
        if self.armed.take().is_some() {
            self.armed_queues.0.fetch_sub(1, Ordering::Relaxed);
        }
        self.untold = 0;
        self.tell_at = None;
    }

    /// Notifies the waiter of the armed queue.
    fn raise(&mut self) {
        self.disarm();
        self.notified = true;
        self.raised = true;
        self.events += 1;
    }

    fn take(&mut self, n: usize) -> std::collections::vec_deque::Drain<'_, WorkCompletion> {
        if let Some(came) = &mut self.came {
            came.drain(..n);
        }
        if let Some(quotas) = &mut self.quotas {
            self.completions.range(..n).for_each(|wc| quotas.release(wc.qpn));
        }
        self.completions.drain(..n)
    }

    /// Takes the oldest completion, and its time if there are times.
    #[inline]
    fn pop(&mut self) -> Option<(WorkCompletion, Option<Time>)> {
        let wc = self.completions.pop_front()?;
        if let Some(quotas) = &mut self.quotas {
            quotas.release(wc.qpn);
        }
        let came = self.came.as_mut().and_then(VecDeque::pop_front);
        Some((wc, came))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.disarm();
    }
}

/// Action that [`CompletionQueue::deliver`] asks of the queue's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivered {
    /// Nothing.
    Quiet,
    /// Notify the waiter that has armed the queue.
    Tell,
    /// Put the QP in error: the completion is lost. `first`: report that the queue overran.
    Overrun {
        /// Set at the first completion that the queue loses.
        first: bool,
    },
    /// Put the QP in error: its share of the queue had no room, and the completion is lost.
    ShareOverrun,
}

impl CompletionQueue {
    /// Makes a queue of no engine: its owner delivers the completions, which come from elsewhere. It has no moderation. `armed_queues`
    /// counts those of the owner that are armed.
    pub fn without_engine(depth: usize, vector: u32, armed_queues: ArmedQueues) -> CompletionQueue {
        CompletionQueue::new(depth, vector, armed_queues)
    }

    /// Adds a completion to a queue of no engine. `solicited`: the message was sent so that it wakes a receiver that waits for such
    /// messages alone ([`Arm::Solicited`]).
    pub fn deliver(&self, wc: WorkCompletion, solicited: bool) -> Delivered {
        match self.push(wc, solicited, Time::default) {
            Pushed::Quiet | Pushed::Later(_) => Delivered::Quiet,
            Pushed::Tell => Delivered::Tell,
            Pushed::Overrun { first } => Delivered::Overrun { first },
            Pushed::ShareOverrun => Delivered::ShareOverrun,
        }
    }

    pub(crate) fn new(depth: usize, vector: u32, armed_queues: ArmedQueues) -> CompletionQueue {
        let queue = Queue {
            completions: VecDeque::with_capacity(depth.min(1024)),
            depth,
            armed: None,
            armed_queues,
            notified: false,
            raised: false,
            watched: false,
            overrun: false,
            came: None,
            moderation: None,
            kind: ModerationKind::Off,
            changes: 0,
            events: 0,
            taken_at_event: 0,
            arrived: 0,
            untold: 0,
            tell_at: None,
            timer: None,
            quotas: None,
            pool: None,
        };
        CompletionQueue(Arc::new(Shared {
            queue: Mutex::new(queue),
            vector,
            count: AtomicUsize::new(0),
        }))
    }

    #[inline]
    fn lock(&self) -> Locked<'_> {
        Locked {
            queue: self.0.queue.lock(),
            count: &self.0.count,
        }
    }

    /// Returns whether there is nothing to poll. Whoever has armed the queue before sees each completion that notifies nobody.
    #[inline]
    fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) == 0
    }

    /// Adds a completion. Calls `now` only if somebody asked for times.
    #[inline]
    pub(crate) fn push(&self, wc: WorkCompletion, solicited: bool, now: impl Fn() -> Time) -> Pushed {
        probe!(
            completion,
            wc.qpn.value(),
            wc.wr_id,
            probes::status(wc.status),
            probes::opcode(wc.opcode),
            wc.byte_len,
        );
        let mut queue = self.lock();
        if let Some(quotas) = &mut queue.quotas
            && let Charged::Lost = quotas.charge(wc.qpn)
        {
            return Pushed::ShareOverrun;
        }
        if queue.overrun || queue.completions.len() >= queue.depth {
            // IBTA Vol 1, 11.6.3.1: an overrun queue is in error for good.
            let first = !std::mem::replace(&mut queue.overrun, true);
            if let Some(quotas) = &mut queue.quotas {
                quotas.release(wc.qpn);
            }
            queue.disarm();
            queue.watched = false;
            return Pushed::Overrun { first };
        }
        queue.completions.push_back(wc);
        queue.arrived += 1;
        if let Some(came) = &mut queue.came {
            came.push_back(now());
        }
        let tell = match queue.armed {
            Some(Arm::Next) => true,
            Some(Arm::Solicited) => solicited || wc.status != Status::Success,
            None => false,
        };
        let mut later = None;
        match queue.moderation {
            // A driver that sleeps is notified at once, and all waiters with it.
            Some(Moderation { count, period_us })
                if tell && !queue.watched && queue.untold + 1 < u32::from(count) =>
            {
                queue.untold += 1;
                if queue.tell_at.is_none() {
                    let at = now() + u64::from(period_us) * 1000;
                    queue.tell_at = Some(at);
                    later = queue.timer.is_none_or(|timer| at < timer).then_some(at);
                    queue.timer = later.or(queue.timer);
                }
            }
            _ if tell => queue.raise(),
            _ => {}
        }
        let told = tell && queue.armed.is_none();
        if std::mem::take(&mut queue.watched) || told {
            Pushed::Tell
        } else {
            later.map_or(Pushed::Quiet, Pushed::Later)
        }
    }

    /// Handles the time of [`Pushed::Later`]. A waiter that has armed the queue again since may be due later.
    pub(crate) fn expire(&self, at: Time) -> Pushed {
        let mut queue = self.lock();
        if queue.timer == Some(at) {
            queue.timer = None;
        }
        match queue.tell_at {
            Some(due) if due <= at => {
                queue.raise();
                Pushed::Tell
            }
            Some(due) if queue.timer.is_none_or(|timer| due < timer) => {
                queue.timer = Some(due);
                Pushed::Later(due)
            }
            _ => Pushed::Quiet,
        }
    }

    /// Counts a wake-up of a handler that arms no queue as an event, if it has taken completions since the event before.
    pub fn note_wake_up(&self) {
        let mut queue = self.lock();
        let taken = queue.arrived - queue.completions.len() as u64;
        if std::mem::replace(&mut queue.taken_at_event, taken) != taken {
            queue.events += 1;
        }
    }

    /// Sets the moderation of notifications, chosen by a policy of this kind; `None` notifies a waiter of each completion.
    pub(crate) fn moderate(&self, kind: ModerationKind, moderation: Option<Moderation>) {
        // No time means no moderation. A count below two delays nothing.
        let moderation = moderation.filter(|to| to.period_us > 0);
        let mut queue = self.lock();
        queue.changes += u64::from(queue.kind == kind && queue.moderation != moderation);
        queue.kind = kind;
        queue.moderation = moderation;
    }

    /// Returns how the queue is moderated, and with what effect.
    pub(crate) fn moderation(&self) -> CqModeration {
        let queue = self.lock();
        CqModeration {
            kind: queue.kind,
            moderation: queue.moderation,
            changes: queue.changes,
            events: queue.events,
            taken: queue.arrived - queue.completions.len() as u64,
        }
    }

    /// Resizes the queue to `depth` completions. IBTA Vol 1, 11.2.8.3.
    ///
    /// # Errors
    /// It holds more completions.
    pub fn resize(&self, depth: usize) -> Result<(), TooShort> {
        let mut queue = self.lock();
        if depth < queue.completions.len() {
            return Err(TooShort);
        }
        queue.depth = depth;
        Ok(())
    }

    /// Records the time of each completion from now on.
    pub(crate) fn keep_times(&self) {
        let mut queue = self.lock();
        let there = queue.completions.len();
        queue
            .came
            .get_or_insert_with(|| vec![Time::default(); there].into());
    }

    /// Takes the oldest completion, also of a queue that overran. IBTA Vol 1, 11.4.2.1.
    #[inline]
    pub fn poll(&self) -> Option<WorkCompletion> {
        Some(self.poll_and_count()?.0)
    }

    /// Takes the oldest completion, and returns the number of completions left.
    #[inline]
    pub fn poll_and_count(&self) -> Option<(WorkCompletion, usize)> {
        if self.is_empty() {
            return None;
        }
        let mut queue = self.lock();
        let (wc, _) = queue.pop()?;
        Some((wc, queue.completions.len()))
    }

    /// Takes the oldest completion, and returns its time: the engine's beginning if the queue does not record times
    /// ([`crate::Rnic::keep_cq_times`]).
    pub fn poll_with_time(&self) -> Option<(WorkCompletion, Time)> {
        if self.is_empty() {
            return None;
        }
        let mut queue = self.lock();
        let (wc, came) = queue.pop()?;
        Some((wc, came.unwrap_or_default()))
    }

    /// Takes up to `max` completions, oldest first; returns how many.
    pub fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut queue = self.lock();
        let n = max.min(queue.completions.len());
        into.extend(queue.take(n));
        n
    }

    /// Takes completions, oldest first, into the slice's first elements; returns how many.
    pub fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut queue = self.lock();
        let n = into.len().min(queue.completions.len());
        for (to, wc) in into.iter_mut().zip(queue.take(n)) {
            *to = wc;
        }
        n
    }

    /// Returns the number of completions in the queue, and whether it overran: then it receives no more.
    pub fn state(&self) -> (usize, bool) {
        let queue = self.lock();
        (queue.completions.len(), queue.overrun)
    }

    /// Returns the completion vector.
    pub(crate) fn vector(&self) -> u32 {
        self.0.vector
    }

    /// Returns the number of completions that the queue can hold.
    pub(crate) fn depth(&self) -> usize {
        self.lock().depth
    }

    /// Asks for an [`crate::Event::Completion`]. IBTA Vol 1, 11.4.2.2. A completion that is in the queue already causes none: poll
    /// after arming.
    pub fn arm(&self, arm: Arm) {
        let mut queue = self.lock();
        // The user polls after this, and so needs no notification of what came before.
        queue.untold = 0;
        queue.tell_at = None;
        // A request for any completion is the wider one and stays.
        if queue.armed != Some(Arm::Next) {
            queue.arm(arm);
        }
    }

    /// Returns whether a notification is pending: the user who armed the queue was notified, and has not taken it or armed the queue again.
    pub fn is_notified(&self) -> bool {
        self.lock().notified
    }

    /// Returns whether the user was notified since the queue was armed.
    pub fn has_raised(&self) -> bool {
        self.lock().raised
    }

    /// Records that the user has taken the notification.
    pub fn take_notification(&self) {
        self.lock().notified = false;
    }

    /// Sets whether a sleeping driver waits for the next completion, in addition to what the queue is armed for. A driver needs no
    /// event for completions that it causes itself.
    pub fn watch(&self, watched: bool) {
        self.lock().watched = watched;
    }

    // Quotas of users that share the queue.

    /// Makes a share of the queue: the completions of the QPs that have it ([`CompletionQueue::add_user`]) are up to `limit` at a time. One
    /// more is lost, and puts its QP in error ([`crate::Cause::ShareOverrun`]).
    pub fn add_share(&self, limit: usize) -> ShareId {
        self.lock().quotas.get_or_insert_default().add_share(limit)
    }

    /// Ends a share that no QP has any more.
    pub fn remove_share(&self, share: ShareId) {
        self.with_quotas(|quotas| quotas.remove_share(share));
    }

    /// Changes the number of completions of a share.
    ///
    /// # Errors
    /// More completions of the share are in the queue.
    pub fn set_share(&self, share: ShareId, limit: usize) -> Result<(), TooShort> {
        self.with_quotas(|quotas| quotas.set_limit(share, limit))
            .unwrap_or(Ok(()))
    }

    /// Has a share that is full draw on another one, which has no QPs and draws on none.
    pub fn draw_on(&self, share: ShareId, common: ShareId) {
        self.with_quotas(|quotas| quotas.draw_on(share, common));
    }

    /// Has the completions of a QP count against a share, until the QP is gone ([`CompletionQueue::remove_user`]). It has none so far.
    pub fn add_user(&self, qpn: Qpn, share: ShareId) {
        self.with_quotas(|quotas| quotas.add_user(qpn, share));
    }

    /// Notes that a QP is gone. Its completions can still be polled, and count against the share until then.
    pub fn remove_user(&self, qpn: Qpn) {
        self.with_quotas(|quotas| quotas.remove_user(qpn));
    }

    /// Returns the number of completions in the queue that count against no share: those of shares that are gone.
    pub fn left_over(&self) -> usize {
        self.with_quotas(|quotas| quotas.left_over()).unwrap_or(0)
    }

    /// Takes the oldest completion, which goes on counting against its QP's share until [`CompletionQueue::release`]. Returns the share,
    /// unless the QP is gone or has none: then there is nothing to release.
    pub fn poll_charged(&self) -> Option<(WorkCompletion, Option<ShareId>)> {
        if self.is_empty() {
            return None;
        }
        let mut queue = self.lock();
        let share = {
            let Queue {
                completions, quotas, ..
            } = &mut *queue;
            let wc = completions.front()?;
            let quotas = quotas.as_mut();
            quotas.and_then(|quotas| quotas.hold(wc.qpn))
        };
        let wc = queue.completions.pop_front()?;
        if let Some(came) = &mut queue.came {
            came.pop_front();
        }
        Some((wc, share))
    }

    /// Ends the counting of a completion of a QP that [`CompletionQueue::poll_charged`] has given.
    pub fn release(&self, qpn: Qpn) {
        self.with_quotas(|quotas| quotas.release(qpn));
    }

    /// Returns whether a completion of a QP was lost: the queue overran, or the QP's share of it since the QP was reset. The QP gets no
    /// other completion.
    pub fn has_lost(&self, qpn: Qpn) -> bool {
        let queue = self.lock();
        queue.overrun || queue.quotas.as_ref().is_some_and(|quotas| quotas.has_lost(qpn))
    }

    fn with_quotas<R>(&self, f: impl FnOnce(&mut Quotas) -> R) -> Option<R> {
        self.lock().quotas.as_deref_mut().map(f)
    }

    /// Notes how a pool uses the queue, for those who inspect the device.
    pub fn set_pool(&self, pool: PoolUse) {
        self.lock().pool = Some(pool);
    }

    pub(crate) fn pool(&self) -> Option<PoolUse> {
        self.lock().pool
    }

    /// Removes the completions of a QP that was reset or is gone.
    pub fn forget(&self, qpn: Qpn) {
        let mut queue = self.lock();
        let Queue {
            completions,
            came,
            quotas,
            arrived,
            ..
        } = &mut *queue;
        if let Some(quotas) = quotas {
            let of_qp = completions.iter().filter(|wc| wc.qpn == qpn);
            of_qp.for_each(|wc| quotas.release(wc.qpn));
            quotas.reset(qpn);
        }
        if let Some(came) = came {
            let mut of = completions.iter();
            came.retain(|_| of.next().is_some_and(|wc| wc.qpn != qpn));
        }
        let before = completions.len();
        completions.retain(|wc| wc.qpn != qpn);
        *arrived -= (before - completions.len()) as u64;
    }
}
