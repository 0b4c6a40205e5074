//! Memory of a PCIe function: a BAR, mapped.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rdmux_rnic::ledger::Location;
use rdmux_rnic::{Atomic, Fault, Memory, Placement};

use crate::mapping::Mapping;

/// A BAR of a PCIe function, or a part of it, that is mapped.
///
/// Every access is aligned and of 1, 4 or 8 bytes, and happens once: a bus splits or repeats nothing, and registers change by being read. Memory of a
/// function that was removed reads as all ones, and ignores writes.
#[derive(Debug)]
pub struct DeviceMemory {
    mapping: Mapping,
    dma_buf: Option<OwnedFd>,
}

impl DeviceMemory {
    /// Maps `len` bytes, whole pages, of a file that the system gives for a BAR, such as `resource0` in sysfs, at an offset.
    ///
    /// # Errors
    /// The system does not map it: among others because the kernel's driver has it.
    pub fn map(file: impl AsFd, offset: u64, len: usize) -> io::Result<DeviceMemory> {
        Ok(DeviceMemory {
            mapping: Mapping::of_file(file, offset, len, true)?,
            dma_buf: None,
        })
    }

    /// Sets the dma-buf of the same bytes, by which other devices reach them.
    #[must_use]
    pub fn with_dma_buf(self, dma_buf: OwnedFd) -> DeviceMemory {
        DeviceMemory {
            dma_buf: Some(dma_buf),
            ..self
        }
    }

    pub(crate) fn dma_buf(&self) -> Option<BorrowedFd<'_>> {
        self.dma_buf.as_ref().map(AsFd::as_fd)
    }

    /// Reads a register of 4 bytes.
    ///
    /// # Panics
    /// It lies outside, or is not aligned.
    pub fn load_u32(&self, offset: u32) -> u32 {
        u32::from_le(self.mapping.word(offset as usize).load(Ordering::Acquire))
    }

    /// Reads a register of 8 bytes.
    ///
    /// # Panics
    /// It lies outside, or is not aligned.
    pub fn load_u64(&self, offset: u32) -> u64 {
        u64::from_le(self.mapping.double_word(offset as usize).load(Ordering::Acquire))
    }

    /// Writes a register of 4 bytes, after all that this thread has written to memory.
    ///
    /// # Panics
    /// It lies outside, or is not aligned.
    pub fn store_u32(&self, offset: u32, value: u32) {
        fence(Ordering::SeqCst);
        self.mapping
            .word(offset as usize)
            .store(value.to_le(), Ordering::Release);
    }

    /// Writes a register of 8 bytes, after all that this thread has written to memory.
    ///
    /// # Panics
    /// It lies outside, or is not aligned.
    pub fn store_u64(&self, offset: u32, value: u64) {
        fence(Ordering::SeqCst);
        self.mapping
            .double_word(offset as usize)
            .store(value.to_le(), Ordering::Release);
    }

    fn check(&self, offset: u64, len: usize) -> Result<usize, Fault> {
        let end = offset.checked_add(len as u64).ok_or(Fault::Unmapped)?;
        match end <= self.len() {
            true => Ok(offset as usize),
            false => Err(Fault::Unmapped),
        }
    }
}

/// Bytes of the largest aligned access at an offset, of those that are left.
fn width(offset: usize, left: usize) -> usize {
    [8, 4]
        .into_iter()
        .find(|width| left >= *width && offset.is_multiple_of(*width))
        .unwrap_or(1)
}

impl Memory for DeviceMemory {
    fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn read(&self, offset: u64, mut out: &mut [u8]) -> Result<(), Fault> {
        let mut at = self.check(offset, out.len())?;
        while !out.is_empty() {
            let (part, rest) = out.split_at_mut(width(at, out.len()));
            match part.len() {
                8 => {
                    part.copy_from_slice(&self.mapping.double_word(at).load(Ordering::Relaxed).to_ne_bytes())
                }
                4 => part.copy_from_slice(&self.mapping.word(at).load(Ordering::Relaxed).to_ne_bytes()),
                _ => part[0] = self.mapping.byte(at as u64).load(Ordering::Relaxed),
            }
            at += part.len();
            out = rest;
        }
        Ok(())
    }

    fn write(&self, offset: u64, mut bytes: &[u8]) -> Result<(), Fault> {
        let mut at = self.check(offset, bytes.len())?;
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(width(at, bytes.len()));
            if let Ok(eight) = part.try_into() {
                let word = u64::from_ne_bytes(eight);
                self.mapping.double_word(at).store(word, Ordering::Release);
            } else if let Ok(four) = part.try_into() {
                let word = u32::from_ne_bytes(four);
                self.mapping.word(at).store(word, Ordering::Release);
            } else {
                self.mapping.byte(at as u64).store(part[0], Ordering::Release);
            }
            at += part.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Atomic operations of a CPU do not reach over a bus.
    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn location(&self) -> Location {
        Location::Drive
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if placement.contains(Placement::PERSISTENT) {
            return Err(Fault::NotSupported);
        }
        let length = usize::try_from(length).map_err(|_| Fault::Unmapped)?;
        let at = self.check(offset, length)?;
        fence(Ordering::SeqCst);
        if length > 0 {
            // A read pushes all writes before it to the function.
            self.mapping.byte(at as u64).load(Ordering::Acquire);
        }
        Ok(())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn pages(&self) -> Option<&dyn Any> {
        self.dma_buf.is_some().then_some(self as &dyn Any)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// A file is mapped as a BAR is.
    fn bar(len: u64) -> DeviceMemory {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        DeviceMemory::map(&file, 0, len as usize).unwrap()
    }

    #[test]
    fn dma_buf__is_that_of_the_memory_itself_alone() {
        assert!(crate::dma_buf(&bar(4096)).is_none());
        let file = tempfile::tempfile().unwrap();
        let descriptor = file.as_raw_fd();
        let memory = bar(4096).with_dma_buf(file.into());
        assert_eq!(crate::dma_buf(&memory).unwrap().as_raw_fd(), descriptor);
        assert_eq!(crate::Pages::of(&memory), Some(crate::Pages::Stay));
        assert_eq!(crate::Pages::of(&bar(4096)), None);
        // No device takes it for memory of the process.
        assert!(crate::mapped_at(&memory, 0, 4096).is_none() && crate::shared_file(&memory).is_none());
    }

    #[test]
    fn bytes__are_read_as_written_at_any_offset() {
        let memory = bar(4096);
        let bytes: Vec<u8> = (1..40).collect();
        for offset in 0..9 {
            for len in 0..bytes.len() {
                memory.write(offset, &bytes[..len]).unwrap();
                let mut out = vec![0; len];
                memory.read(offset, &mut out).unwrap();
                assert_eq!(out, bytes[..len], "{len} at {offset}");
            }
        }
    }

    #[test]
    fn access__outside_is_a_fault() {
        let memory = bar(4096);
        assert_eq!(memory.write(4090, &[0; 7]), Err(Fault::Unmapped));
        assert_eq!(memory.read(u64::MAX, &mut [0; 2]), Err(Fault::Unmapped));
        assert_eq!(memory.flush(4096, 1, Placement::GLOBAL), Err(Fault::Unmapped));
        assert_eq!(memory.flush(4096, 0, Placement::GLOBAL), Ok(()));
        assert_eq!(
            memory.flush(0, 8, Placement::PERSISTENT),
            Err(Fault::NotSupported)
        );
    }

    #[test]
    fn width__is_that_of_an_aligned_access() {
        let widths = [(0, 9, 8), (4, 9, 4), (8, 7, 4), (2, 9, 1), (0, 3, 1)];
        for (offset, left, expected) in widths {
            assert_eq!(width(offset, left), expected, "{left} at {offset}");
        }
    }
}
