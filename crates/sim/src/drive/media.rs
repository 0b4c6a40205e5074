//! What keeps a drive's blocks.

use std::fmt;
use std::sync::Arc;

use rdmux_rnic::sync::Mutex;

use crate::nvme::disk::{BLOCK, Disk};

/// Blocks that outlast the controller.
pub trait Media: fmt::Debug + Send + Sync {
    /// Returns the bytes of a block as a power of two.
    fn block_shift(&self) -> u8;

    /// Returns the number of blocks.
    fn blocks(&self) -> u64;

    /// Reads whole blocks.
    fn read(&self, block: u64, out: &mut [u8]);

    /// Writes whole blocks; durably, or into the cache.
    fn write(&self, block: u64, bytes: &[u8], durably: bool);

    /// Writes some of these blocks: the controller has ended meanwhile.
    fn tear(&self, block: u64, bytes: &[u8]);

    /// Makes durable what was written.
    fn flush(&self);
}

impl Media for Disk {
    fn block_shift(&self) -> u8 {
        BLOCK.ilog2() as u8
    }

    fn blocks(&self) -> u64 {
        Disk::blocks(self)
    }

    fn read(&self, block: u64, out: &mut [u8]) {
        Disk::read(self, block * BLOCK as u64, out);
    }

    fn write(&self, block: u64, bytes: &[u8], durably: bool) {
        Disk::write(self, None, block * BLOCK as u64, bytes);
        if durably {
            self.keep(block, (bytes.len() / BLOCK) as u64);
        }
    }

    fn tear(&self, block: u64, bytes: &[u8]) {
        Disk::tear(self, block * BLOCK as u64, bytes);
    }

    fn flush(&self) {
        self.sync().expect("no failures of flushes are set");
    }
}

/// Plain bytes without a cache, for whoever wants a drive and no checks of its blocks.
#[derive(Debug)]
pub struct Bytes(Mutex<Vec<u8>>);

impl Bytes {
    const SHIFT: u8 = 9;

    /// Returns media of this many blocks of 512 bytes.
    pub fn new(blocks: u64) -> Arc<Bytes> {
        Arc::new(Bytes(Mutex::new(vec![0; (blocks as usize) << Bytes::SHIFT])))
    }
}

impl Media for Bytes {
    fn block_shift(&self) -> u8 {
        Bytes::SHIFT
    }

    fn blocks(&self) -> u64 {
        (self.0.lock().len() >> Bytes::SHIFT) as u64
    }

    fn read(&self, block: u64, out: &mut [u8]) {
        let at = (block as usize) << Bytes::SHIFT;
        out.copy_from_slice(&self.0.lock()[at..at + out.len()]);
    }

    fn write(&self, block: u64, bytes: &[u8], _: bool) {
        let at = (block as usize) << Bytes::SHIFT;
        self.0.lock()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn tear(&self, block: u64, bytes: &[u8]) {
        let half = bytes.len() >> (Bytes::SHIFT + 1) << Bytes::SHIFT;
        self.write(block, &bytes[..half], false);
    }

    fn flush(&self) {}
}
