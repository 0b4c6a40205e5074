//! Registered buffers of a reactor, which all connections of a device share.

use rdmux_runtime::{Buffer, BufferError};
use rdmux_verbs::{Memory, ProtectionDomain};

use crate::tcp::Buffers;

/// The least size of a buffer.
const BYTES_MIN: usize = 4096;
/// Bytes of buffers that are kept for the next command.
const IDLE_MAX: usize = 16 << 20;

/// Registered buffers by size: powers of two. No peer has rights on them. Making one takes system calls and a registration, so those that are not used
/// wait here. One thread uses them, and takes no lock.
#[derive(Debug)]
pub(super) struct Slab {
    pd: ProtectionDomain,
    /// By the power of two, less that of [`BYTES_MIN`].
    idle: Vec<Vec<Buffer>>,
    idle_bytes: usize,
}

impl Slab {
    pub(super) fn new(pd: ProtectionDomain) -> Slab {
        Slab {
            pd,
            idle: Vec::new(),
            idle_bytes: 0,
        }
    }

    /// Returns the protection domain of the buffers.
    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Returns a buffer of at least so many bytes, which have any values.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Buffer, BufferError> {
        let size = Buffers::size(bytes);
        match self.idle.get_mut(class(size)).and_then(Vec::pop) {
            Some(buffer) => {
                self.idle_bytes -= size;
                Ok(buffer)
            }
            None => Buffer::new(&self.pd, size),
        }
    }

    /// Takes a buffer back that no request uses any more, unless enough are kept.
    pub(super) fn give(&mut self, buffer: Buffer) {
        let size = buffer.memory().len() as usize;
        if self.idle_bytes + size > IDLE_MAX {
            return;
        }
        let class = class(size);
        if self.idle.len() <= class {
            self.idle.resize_with(class + 1, Vec::new);
        }
        self.idle_bytes += size;
        self.idle[class].push(buffer);
    }
}

fn class(size: usize) -> usize {
    (size.ilog2() - BYTES_MIN.ilog2()) as usize
}
