//! Accesses to memory on a medium ([`Memory::medium`]): the device hands them to the driver, which reports their results later, so
//! that a slow medium delays only who accesses it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use rdmux_wire::Qpn;

use crate::memory::{Atomic, Fault, Medium, Memory};
use crate::retired::RetiredMemories;

/// Identifier of an access that the driver carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccessId(pub u64);

/// An access for the driver: it calls [`AccessJob::run`] in a context that may block, and then [`crate::Rnic::handle_access`] with the
/// result. Writes and atomic operations of one medium run one after the other, in the order in which [`crate::Rnic::poll_access`] returned
/// them: later requests of a QP rely on that. Reads may run at any time.
#[derive(Debug)]
pub struct AccessJob {
    /// Identifier to pass to [`crate::Rnic::handle_access`].
    pub id: AccessId,
    /// The QP that waits for it.
    pub qpn: Qpn,
    /// The medium on which the memory is.
    pub medium: Medium,
    /// The memory.
    pub memory: Arc<dyn Memory>,
    /// Offset in the memory.
    pub offset: u64,
    pub(crate) what: What,
}

/// Kind of an access.
#[derive(Debug)]
pub(crate) enum What {
    Write(Vec<u8>),
    /// The number of bytes to read.
    Read(usize),
    Atomic(Atomic),
}

/// Result of an access that did not fault.
#[derive(Debug)]
pub enum Accessed {
    /// The bytes are written.
    Written,
    /// These bytes were read.
    Read(Vec<u8>),
    /// The operation was done; the previous value of the memory.
    Atomic(u64),
}

impl AccessJob {
    /// Carries the access out. May block.
    pub fn run(&self) -> Result<Accessed, Fault> {
        match &self.what {
            What::Write(bytes) => {
                self.memory.write(self.offset, bytes)?;
                Ok(Accessed::Written)
            }
            What::Read(length) => {
                let mut bytes = vec![0; *length];
                self.memory.read(self.offset, &mut bytes)?;
                Ok(Accessed::Read(bytes))
            }
            What::Atomic(atomic) => self.memory.atomic(self.offset, *atomic).map(Accessed::Atomic),
        }
    }

    /// Returns the number of bytes to read, unless it is a write or an atomic operation. A driver may read them in a way of
    /// its own.
    pub fn read_length(&self) -> Option<usize> {
        match self.what {
            What::Read(length) => Some(length),
            _ => None,
        }
    }

    /// Returns the number of bytes that it copies.
    pub fn bytes(&self) -> usize {
        match &self.what {
            What::Write(bytes) => bytes.len(),
            What::Read(length) => *length,
            What::Atomic(_) => 8,
        }
    }
}

/// Accesses that have not ended.
#[derive(Debug, Default)]
pub(crate) struct Accesses {
    next: u64,
    jobs: VecDeque<AccessJob>,
    waiting: HashMap<AccessId, Qpn>,
    retired: RetiredMemories,
}

impl Accesses {
    pub(crate) fn new(retired: RetiredMemories) -> Accesses {
        Accesses {
            retired,
            ..Accesses::default()
        }
    }

    /// Returns the identifier of an access whose bytes are still being collected.
    pub(crate) fn announce(&mut self) -> AccessId {
        self.next += 1;
        AccessId(self.next)
    }

    /// Starts an announced access for a QP.
    pub(crate) fn start(
        &mut self,
        id: AccessId,
        qpn: Qpn,
        (memory, medium): (Arc<dyn Memory>, Medium),
        offset: u64,
        what: What,
    ) {
        self.waiting.insert(id, qpn);
        self.jobs.push_back(AccessJob {
            id,
            qpn,
            medium,
            memory,
            offset,
            what,
        });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn poll(&mut self) -> Option<AccessJob> {
        self.jobs.pop_front()
    }

    /// Returns the QP that waits for an access; `None` when [`Accesses::forget`] has removed it since.
    pub(crate) fn finish(&mut self, id: AccessId) -> Option<Qpn> {
        self.waiting.remove(&id)
    }

    pub(crate) fn forget(&mut self, qpn: Qpn) {
        if self.waiting.is_empty() {
            return;
        }
        self.waiting.retain(|_, waiter| *waiter != qpn);
        for job in std::mem::take(&mut self.jobs) {
            if self.waiting.contains_key(&job.id) {
                self.jobs.push_back(job);
            } else {
                self.retired.retire(job.memory);
            }
        }
    }
}
