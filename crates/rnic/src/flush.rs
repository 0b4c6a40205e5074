//! Flushes in progress: the device hands them to the driver, which reports their results later.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use rdmux_wire::{Psn, Qpn};

use crate::memory::{Memory, Placement};
use crate::retired::RetiredMemories;

/// Identifier of a flush that the driver carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlushId(pub u64);

/// A flush for the driver: it calls [`Memory::flush`] with these values in a context that may block, then
/// [`crate::Rnic::handle_flush`] with the result.
#[derive(Clone, Debug)]
pub struct FlushJob {
    /// Identifier to pass to [`crate::Rnic::handle_flush`].
    pub id: FlushId,
    /// The memory.
    pub memory: Arc<dyn Memory>,
    /// Offset in the memory.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Placement types.
    pub placement: Placement,
}

#[derive(Debug, Default)]
pub(crate) struct Flushes {
    next: u64,
    jobs: VecDeque<FlushJob>,
    waiting: HashMap<FlushId, (Qpn, Psn)>,
    retired: RetiredMemories,
}

impl Flushes {
    pub(crate) fn new(retired: RetiredMemories) -> Flushes {
        Flushes {
            retired,
            ..Flushes::default()
        }
    }

    pub(crate) fn start(
        &mut self,
        waiter: (Qpn, Psn),
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        placement: Placement,
    ) {
        self.next += 1;
        let id = FlushId(self.next);
        self.jobs.push_back(FlushJob {
            id,
            memory,
            offset,
            length,
            placement,
        });
        self.waiting.insert(id, waiter);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn poll(&mut self) -> Option<FlushJob> {
        self.jobs.pop_front()
    }

    /// Returns the QP and the PSN of the request that waits for a flush; `None` when [`Flushes::forget`] has removed it since.
    pub(crate) fn finish(&mut self, id: FlushId) -> Option<(Qpn, Psn)> {
        self.waiting.remove(&id)
    }

    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.waiting.retain(|_, (waiter, _)| *waiter != qpn);
        for job in std::mem::take(&mut self.jobs) {
            if self.waiting.contains_key(&job.id) {
                self.jobs.push_back(job);
            } else {
                self.retired.retire(job.memory);
            }
        }
    }
}
