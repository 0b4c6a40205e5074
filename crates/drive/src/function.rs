//! The PCIe function that a drive is.

use std::fmt;
use std::io;
use std::sync::Arc;

use rdmux_verbs::Memory;

/// A PCIe function, of class 01 08 02 (NVMe): what a driver needs of it, and no more. NVMe over PCIe Transport 1.0, 3.1.
///
/// Registers are those of BAR 0. A function that was removed reads as all ones and ignores writes, as PCIe has it; nothing here fails for that reason.
pub trait Function: fmt::Debug + Send + Sync {
    /// Returns its address, for people: `0000:00:04.0`.
    fn address(&self) -> &str;

    /// Returns the bytes of its registers, with the doorbells: nothing behind them is read or written.
    fn register_bytes(&self) -> u64;

    /// Reads 4 bytes at an offset that is a multiple of 4.
    fn read_u32(&self, offset: u32) -> u32;

    /// Reads 8 bytes at an offset that is a multiple of 8.
    fn read_u64(&self, offset: u32) -> u64;

    /// Writes 4 bytes at an offset that is a multiple of 4, after everything that the caller has written to memory before.
    fn write_u32(&self, offset: u32, value: u32);

    /// Writes 8 bytes at an offset that is a multiple of 8.
    fn write_u64(&self, offset: u32, value: u64);

    /// Maps a BAR other than 0: memory that the drive has (CMB, PMR).
    ///
    /// # Errors
    /// There is none, or the system does not map it.
    fn bar(&self, index: u8) -> io::Result<Bar>;

    /// Makes zeroed memory of the host, of so many bytes, rounded up to pages of 4 KiB, that the function reads and writes (DMA) until this is dropped.
    ///
    /// # Errors
    /// The system has not so much, or the user may not lock so much.
    fn dma(&self, bytes: usize) -> io::Result<DmaMemory>;
}

/// A BAR of a function.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Its bytes.
    pub memory: Arc<dyn Memory>,
    /// Its address on the bus.
    pub address: u64,
}

/// Memory that a function reaches.
#[derive(Clone, Debug)]
pub struct DmaMemory {
    /// Its bytes.
    pub memory: Arc<dyn Memory>,
    /// Addresses on the bus of its pages of 4 KiB, in order.
    pub pages: Vec<u64>,
}
