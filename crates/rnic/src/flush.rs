//! Flushes under way: handed to the driver, finished later.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use rdmux_wire::{Psn, Qpn};

use crate::graveyard::Graveyard;
use crate::memory::{Memory, Placement};

/// Names a flush that the driver carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlushId(pub u64);

/// A flush for the driver: call [`Memory::flush`] with these values where blocking does no harm, then
/// [`crate::Rnic::handle_flush`] with the result.
#[derive(Clone, Debug)]
pub struct FlushJob {
    /// To be given back.
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
    graveyard: Graveyard,
}

impl Flushes {
    pub(crate) fn new(graveyard: Graveyard) -> Flushes {
        Flushes {
            graveyard,
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

    /// Who waits for a flush; `None` when its QP has gone meanwhile.
    pub(crate) fn finish(&mut self, id: FlushId) -> Option<(Qpn, Psn)> {
        self.waiting.remove(&id)
    }

    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.waiting.retain(|_, (waiter, _)| *waiter != qpn);
        for job in std::mem::take(&mut self.jobs) {
            if self.waiting.contains_key(&job.id) {
                self.jobs.push_back(job);
            } else {
                self.graveyard.bury(job.memory);
            }
        }
    }
}
