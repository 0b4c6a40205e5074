//! Registered buffers of a reactor, which all connections of a device share.

use rdmux_runtime::{Buffer, BufferError};
use rdmux_verbs::{Memory, ProtectionDomain};

use crate::tcp::{Buffers, Idle};

/// Registered buffers by size: powers of two. No peer has rights on them. Making one takes system calls and a registration, so those that are not used
/// wait here. One thread uses them, and takes no lock.
#[derive(Debug)]
pub(super) struct Slab {
    pd: ProtectionDomain,
    idle: Idle<Buffer>,
}

impl Slab {
    pub(super) fn new(pd: ProtectionDomain) -> Slab {
        Slab {
            pd,
            idle: Idle::default(),
        }
    }

    /// Returns the protection domain of the buffers.
    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Returns a buffer of at least so many bytes, which have any values.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Buffer, BufferError> {
        let size = Buffers::size(bytes);
        match self.idle.take(size) {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(&self.pd, size),
        }
    }

    /// Takes a buffer back that no request uses any more, unless enough are kept.
    pub(super) fn give(&mut self, buffer: Buffer) {
        self.idle.give(buffer.memory().len() as usize, buffer);
    }
}
