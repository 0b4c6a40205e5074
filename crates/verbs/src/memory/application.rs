//! Memory of the program's own, as a program registers that uses the C interface.
#![allow(unsafe_code, reason = "its maker promises what the compiler cannot see")]

use std::any::Any;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, PoisonError};

use rdmux_rnic::{Atomic, Fault, Memory, Placement};

use crate::mapping::Mapping;

/// Held during an atomic operation: those of all devices of the process are atomic to each other, though not to the CPUs
/// (`IBV_ATOMIC_HCA`).
static ATOMIC: Mutex<()> = Mutex::new(());

/// Addresses of this process. An RNIC pins registered pages, so that a program may unmap them while a peer still writes there; here the
/// kernel copies, and what is not mapped any more, or not writable, is a fault and never a signal.
#[derive(Debug)]
pub struct ApplicationMemory {
    address: u64,
    len: u64,
    pid: i32,
}

impl ApplicationMemory {
    /// `len` bytes at an address of this process, whatever is mapped there.
    ///
    /// # Safety
    /// What lies there is written by devices and peers while the value lives, and as long as it is registered: there are no references to
    /// it that this would contradict, and nothing of the program relies on its not changing.
    pub unsafe fn new(address: u64, len: u64) -> ApplicationMemory {
        ApplicationMemory {
            address,
            len,
            pid: std::process::id().cast_signed(),
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Where `len` bytes at an offset lie.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<u64, Fault> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.and_then(|_| self.address.checked_add(offset))
            .filter(|at| at.checked_add(len).is_some())
            .ok_or(Fault::Unmapped)
    }
}

impl Memory for ApplicationMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        Mapping::read_process(self.pid, self.range(offset, out.len() as u64)?, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        Mapping::write_process(self.pid, self.range(offset, bytes.len() as u64)?, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        if !self.range(offset, 8)?.is_multiple_of(8) {
            return Err(Fault::NotSupported);
        }
        let _held = ATOMIC.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = [0; 8];
        self.read(offset, &mut before)?;
        self.write(offset, &atomic.apply(before))?;
        Ok(u64::from_ne_bytes(before))
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn gathers(&self) -> bool {
        true
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if placement.contains(Placement::PERSISTENT) {
            return Err(Fault::NotSupported);
        }
        self.range(offset, length)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;

    #[test]
    fn write__to_what_is_unmapped_meanwhile_is_a_fault() {
        let pages = Mapping::anonymous(3 * 4096).unwrap();
        // SAFETY: pages of this test's, to which there are no references.
        let memory = unsafe { ApplicationMemory::new(pages.address(), 3 * 4096) };
        memory.write(4090, b"over a page").unwrap();
        let mut back = [0; 11];
        memory.read(4090, &mut back).unwrap();
        assert_eq!(&back, b"over a page");
        pages.read(4090, &mut back).unwrap();
        assert_eq!(&back, b"over a page");
        drop(pages);
        assert_eq!(memory.write(4090, b"x"), Err(Fault::Unmapped));
        assert_eq!(memory.read(0, &mut back), Err(Fault::Unmapped));
        assert_eq!(memory.atomic(8, Atomic::FetchAdd(1)), Err(Fault::Unmapped));
    }

    #[test]
    fn atomic__adds_and_swaps_in_place() {
        let pages = Mapping::anonymous(4096).unwrap();
        // SAFETY: pages of this test's, to which there are no references.
        let memory = unsafe { ApplicationMemory::new(pages.address() + 8, 16) };
        assert_eq!(memory.atomic(0, Atomic::FetchAdd(5)), Ok(0));
        let swap = Atomic::CompareSwap { compare: 5, swap: 9 };
        assert_eq!(memory.atomic(0, swap), Ok(5));
        assert_eq!(memory.atomic(0, swap), Ok(9));
        assert_eq!(memory.atomic(4, Atomic::FetchAdd(1)), Err(Fault::NotSupported));
        assert_eq!(memory.atomic(16, Atomic::FetchAdd(1)), Err(Fault::Unmapped));
    }

    #[test]
    fn read__outside_of_the_range() {
        // SAFETY: nothing is there.
        let memory = unsafe { ApplicationMemory::new(u64::MAX - 7, 64) };
        for offset in [0, 8, 63, u64::MAX] {
            assert_eq!(memory.read(offset, &mut [0; 8]), Err(Fault::Unmapped));
        }
    }
}
