//! Registered buffers of one thread: of a reactor's connections to a device, or of a host's queue.

use std::sync::Arc;

use rdmux_runtime::{Buffer, BufferError};
use rdmux_verbs::ledger::Ledger;
use rdmux_verbs::{Access, Memory, ProtectionDomain};

use crate::tcp::{Buffers, Idle};

/// Registered buffers by size: powers of two. Making one takes system calls and a registration, so those that are not used wait here. One
/// thread uses them, and takes no lock.
#[derive(Debug)]
pub(crate) struct Slab {
    pd: ProtectionDomain,
    access: Access,
    idle: Idle<Buffer>,
    /// Books what the device moves.
    ledger: Option<Arc<Ledger>>,
}

impl Slab {
    /// Makes an empty one. `access`: the rights on its buffers, those of peers among them.
    pub(crate) fn new(pd: ProtectionDomain, access: Access) -> Slab {
        Slab {
            pd,
            access,
            idle: Idle::default(),
            ledger: None,
        }
    }

    /// Has what the device moves in its buffers booked.
    pub(crate) fn book_in(&mut self, ledger: Option<Arc<Ledger>>) {
        self.ledger = ledger;
    }

    /// Returns the ledger that books what the device moves.
    pub(crate) fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.as_ref()
    }

    /// Returns the protection domain of the buffers.
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Returns a buffer of at least so many bytes, which have any values.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Buffer, BufferError> {
        let size = Buffers::size(bytes);
        match self.idle.take(size) {
            Some(buffer) => Ok(buffer),
            None => Buffer::with_access(&self.pd, size, self.access, self.ledger.as_ref()),
        }
    }

    /// Takes a buffer back that no request uses any more, unless enough are kept.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.idle.give(buffer.memory().len() as usize, buffer);
    }
}
