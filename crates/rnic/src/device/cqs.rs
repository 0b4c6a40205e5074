//! The completion queues of a device.

use super::Rnic;
use crate::Counters;
use crate::cq::{ArmedQueues, CompletionQueue, Cqn, Moderation, ModerationKind, TooShort};

impl Rnic {
    /// Creates a completion queue for `depth` completions. IBTA Vol 1, 11.2.6.1.
    pub fn create_cq(&mut self, depth: u32) -> Cqn {
        self.create_cq_on(depth, 0)
    }

    /// Creates a completion queue as [`Rnic::create_cq`] does, with a completion vector, which only tools see.
    pub fn create_cq_on(&mut self, depth: u32, vector: u32) -> Cqn {
        self.next_cqn += 1;
        let queue = CompletionQueue::new(depth.max(1) as usize, vector, self.armed_queues.clone());
        self.cqs.insert(self.next_cqn, queue);
        Cqn(self.next_cqn)
    }

    /// Returns a handle that tells how many of the device's completion queues are armed; it stays up to date.
    pub fn armed_queues(&self) -> ArmedQueues {
        self.armed_queues.clone()
    }

    /// Destroys a completion queue. Its QPs must have been destroyed.
    pub fn destroy_cq(&mut self, cq: Cqn) {
        if let Some(queue) = self.cqs.remove(&cq.0) {
            count_queue(&mut self.counters, &queue);
        }
    }

    /// Resizes a completion queue to `depth` completions, at least 1. IBTA Vol 1, 11.2.8.3.
    pub fn resize_cq(&mut self, cq: Cqn, depth: u32) -> Result<(), TooShort> {
        match self.cqs.get(&cq.0) {
            Some(queue) => queue.resize(depth.max(1) as usize),
            None => Ok(()),
        }
    }

    /// Sets the moderation of a completion queue, which delays the notification of its waiter, as a policy of this kind has chosen it;
    /// `None` ends it.
    pub fn moderate_cq(&mut self, cq: Cqn, kind: ModerationKind, moderation: Option<Moderation>) {
        if let Some(queue) = self.cqs.get(&cq.0) {
            self.times_completions |= moderation.is_some();
            queue.moderate(kind, moderation);
        }
    }

    /// Makes a completion queue record the time of each completion: that of the call that caused it
    /// ([`CompletionQueue::poll_with_time`]).
    pub fn keep_cq_times(&mut self, cq: Cqn) {
        if let Some(queue) = self.cqs.get(&cq.0) {
            self.times_completions = true;
            queue.keep_times();
        }
    }
}

/// Adds the events and completions of a queue.
pub(super) fn count_queue(counters: &mut Counters, queue: &CompletionQueue) {
    let moderation = queue.moderation();
    counters.cq_events += moderation.events;
    counters.cq_completions += moderation.taken;
    counters.cq_moderation_changes += moderation.changes;
}
