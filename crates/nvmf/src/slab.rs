//! Registered buffers of one thread: of a reactor's connections to a device, or of a host's queue.

use rdmux_runtime::{Buffer, BufferError};
use rdmux_verbs::{Access, Memory, ProtectionDomain};

use crate::tcp::{Buffers, Idle};

/// Registered buffers by size: powers of two. Making one takes system calls and a registration, so those that are not used wait here. One
/// thread uses them, and takes no lock.
#[derive(Debug)]
pub(crate) struct Slab {
    pd: ProtectionDomain,
    access: Access,
    idle: Idle<Buffer>,
}

impl Slab {
    /// Makes an empty one. `access`: the rights on its buffers, those of peers among them.
    pub(crate) fn new(pd: ProtectionDomain, access: Access) -> Slab {
        Slab {
            pd,
            access,
            idle: Idle::default(),
        }
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
            None => Buffer::with_access(&self.pd, size, self.access),
        }
    }

    /// Takes a buffer back that no request uses any more, unless enough are kept.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.idle.give(buffer.memory().len() as usize, buffer);
    }
}
