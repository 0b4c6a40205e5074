//! The rings of this process, and where their completions go.
//!
//! A thread that polls a completion queue takes what is in the ring, for all queues, and delivers it. While a queue is armed, the ring is left so that
//! the node announces the next completion: then the thread of the connection takes it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_rnic::{ArmedQueues, PostError, Srqn};
use rdmux_verbs::moderation::now;
use rdmux_verbs::provider::conditions;
use rdmux_verbs::sync::Mutex;
use rdmux_wire::node::{Completion, DESCRIPTOR_BYTES, Descriptor, Element, Work};

use super::client::Client;
use super::qp::QpShared;
use crate::ring::{
    ApplicationEnd, Consumer, Corrupt, Producer, PushError, ReadyArea, ReadySet, RingArea, Tell,
};

/// Ring of requests, and that of completions.
const SUBMISSIONS: u32 = 0;
const COMPLETIONS: u32 = 0;
/// Completions that are taken at once.
const BATCH: usize = 32;
/// Longest wait for a node to take requests out of a full ring. It takes them in microseconds, unless it was stopped.
const ROOM_TIMEOUT: Duration = Duration::from_secs(1);

/// The rings of this process.
#[derive(Debug)]
pub(super) struct Rings {
    end: ApplicationEnd,
    submissions: Mutex<Producer<RingArea>>,
    completions: Mutex<Taking>,
    ready: Mutex<ReadySet<ReadyArea>>,
    qps: Mutex<HashMap<u32, Arc<QpShared>>>,
    /// The numbers of shared receive queues, by their ids.
    srqs: Mutex<HashMap<u32, Srqn>>,
    /// Counts the completion queues that are armed.
    pub(super) armed: ArmedQueues,
}

/// The consumer of the ring of completions.
#[derive(Debug)]
struct Taking {
    consumer: Consumer<RingArea>,
    /// Set while the node announces the next completion.
    sleeps: bool,
}

impl Rings {
    pub(super) fn new(end: ApplicationEnd) -> Rings {
        Rings {
            submissions: Mutex::new(end.submission(SUBMISSIONS)),
            completions: Mutex::new(Taking {
                consumer: end.completion(COMPLETIONS),
                sleeps: false,
            }),
            ready: Mutex::new(end.ready()),
            end,
            qps: Mutex::default(),
            srqs: Mutex::default(),
            armed: ArmedQueues::default(),
        }
    }

    /// Returns what is readable when the node has announced a ring.
    pub(super) fn waiter(&self) -> BorrowedFd<'_> {
        self.end.waiter().as_fd()
    }

    /// Returns a queue pair by its id.
    pub(super) fn qp(&self, id: u32) -> Option<Arc<QpShared>> {
        self.qps.lock().get(&id).cloned()
    }

    /// Adds a queue pair, to which completions go from now on.
    pub(super) fn add_qp(&self, qp: Arc<QpShared>) {
        self.qps.lock().insert(qp.id, qp);
    }

    /// Removes a queue pair that the node has destroyed: it puts no completion of it into the ring any more.
    pub(super) fn remove_qp(&self, client: &Client, qp: &QpShared) {
        let _ = self.take(client);
        self.qps.lock().remove(&qp.id);
    }

    /// Returns the number of a shared receive queue.
    pub(super) fn srqn(&self, id: u32) -> Option<Srqn> {
        self.srqs.lock().get(&id).copied()
    }

    /// Adds a shared receive queue, or removes it.
    pub(super) fn set_srqn(&self, id: u32, srqn: Option<Srqn>) {
        let mut srqs = self.srqs.lock();
        match srqn {
            Some(srqn) => srqs.insert(id, srqn),
            None => srqs.remove(&id),
        };
    }

    /// Puts a request into the ring. [`Rings::publish`] shows it to the node. Returns false if there is no room ([`Rings::with_room`]).
    pub(super) fn push(&self, work: &Work, data: Data<'_>) -> Result<bool, PostError> {
        let fill = |work: &Work, bytes: &mut [u8]| match data {
            Data::Elements(elements) => work.put_elements(bytes, elements),
            Data::Inline(inline) => work.put_inline(bytes, inline),
        };
        match self.submissions.lock().push_work(work, fill) {
            Ok(()) => Ok(true),
            Err(PushError::Full) => Ok(false),
            Err(PushError::Corrupt(_)) => Err(PostError::QueueFull),
        }
    }

    /// Tries to post until there is room in the ring of requests. `post` returns false if there is none, and has its queue's lock no more: the
    /// node takes no requests of a process that takes no completions, so these are delivered meanwhile.
    ///
    /// # Errors
    /// That of `post`; [`PostError::QueueFull`]: the ring has had no room for long, since the node does not run.
    pub(super) fn with_room(
        &self,
        client: &Client,
        mut post: impl FnMut() -> Result<bool, PostError>,
    ) -> Result<(), PostError> {
        let mut since = None;
        while !post()? {
            self.publish();
            let since = *since.get_or_insert_with(Instant::now);
            if self.take_now(client).is_err() || since.elapsed() > ROOM_TIMEOUT || client.has_ended() {
                return Err(PostError::QueueFull);
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Shows the node the requests that were pushed.
    #[inline]
    pub(super) fn publish(&self) {
        let tell = self.submissions.lock().publish();
        self.end.tell(SUBMISSIONS, tell);
    }

    /// Takes all completions out of the ring and delivers them, unless another thread does so now. An error: the node is none.
    pub(super) fn take(&self, client: &Client) -> Result<(), Corrupt> {
        let Some(mut taking) = self.completions.try_lock() else {
            return Ok(());
        };
        self.take_locked(client, &mut taking).map(|_| ())
    }

    /// Takes all completions out of the ring, and waits for another thread that does so now.
    pub(super) fn take_now(&self, client: &Client) -> Result<(), Corrupt> {
        let mut taking = self.completions.lock();
        self.take_locked(client, &mut taking).map(|_| ())
    }

    /// Does the same for a caller that polls. If there is nothing, and more threads want to run than there are CPUs, the caller yields its
    /// CPU: the node, or the peer, may wait for it. A node that is none ends at its next message.
    #[inline]
    pub(super) fn poll(&self, client: &Client) {
        let taken = match self.completions.try_lock() {
            Some(mut taking) => self.take_locked(client, &mut taking),
            None => Ok(0),
        };
        if taken == Ok(0) && conditions(now().0).oversubscribed {
            std::thread::yield_now();
        }
    }

    /// Has the node announce the next completion, after a queue was armed.
    pub(super) fn armed(&self, client: &Client) {
        let mut taking = self.completions.lock();
        let _ = self.take_locked(client, &mut taking);
    }

    /// Returns the number of completions.
    fn take_locked(&self, client: &Client, taking: &mut Taking) -> Result<usize, Corrupt> {
        let mut batch = [[0; DESCRIPTOR_BYTES]; BATCH];
        let mut taken = 0;
        loop {
            if std::mem::take(&mut taking.sleeps) {
                taking.consumer.awake();
            }
            loop {
                let count = taking.consumer.take(&mut batch)?;
                let tell = taking.consumer.release();
                self.tell_of_completions(tell);
                if count == 0 {
                    break;
                }
                taken += count;
                self.deliver(client, &batch[..count])?;
            }
            if !self.armed.any() || client.has_ended() {
                return Ok(taken);
            }
            taking.sleeps = true;
            if taking.consumer.prepare_sleep()? {
                return Ok(taken);
            }
        }
    }

    fn tell_of_completions(&self, tell: Tell) {
        self.end
            .tell(self.end.layout().completion_ring(COMPLETIONS), tell);
    }

    fn deliver(&self, client: &Client, descriptors: &[Descriptor]) -> Result<(), Corrupt> {
        let mut last: Option<Arc<QpShared>> = None;
        for descriptor in descriptors {
            let completion = Completion::parse(descriptor)?;
            let id = completion.queue.0;
            if last.as_ref().is_none_or(|qp| qp.id != id) {
                last = self.qp(id);
            }
            if let Some(qp) = &last {
                qp.complete(client, &completion);
            }
        }
        Ok(())
    }

    /// Takes completions for those who sleep until a queue raises an event, and prepares the sleep of the caller, the thread of the
    /// connection.
    pub(super) fn take_for_sleepers(&self, client: &Client) -> Result<(), Corrupt> {
        let mut ready = self.ready.lock();
        loop {
            self.end.waiter().answer();
            ready.awake();
            ready.take(|_| {})?;
            self.take_now(client)?;
            if ready.prepare_sleep() {
                return Ok(());
            }
        }
    }

    /// Flushes what is in flight on all queue pairs, after the node has gone.
    pub(super) fn flush_all(&self, client: &Client) {
        let qps: Vec<Arc<QpShared>> = self.qps.lock().values().cloned().collect();
        for qp in qps {
            qp.flush(client);
        }
    }

    /// Returns the number of queue pairs.
    pub(super) fn qp_count(&self) -> usize {
        self.qps.lock().len()
    }
}

/// Data of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Data<'a> {
    /// Registered memory.
    Elements(&'a [Element]),
    /// The bytes themselves.
    Inline(&'a [u8]),
}
