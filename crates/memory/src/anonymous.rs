//! Pages of the process's own.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rdmux_rnic::{Atomic, Fault, Memory, Placement, Sharing};

use crate::mapping::{Mapping, PlaceError, PlacedMapping, Unmappable, sealed_file, whole_pages};

/// Pages of the process's own, zero at first.
#[derive(Debug)]
pub struct AnonymousMemory {
    mapping: Mapping,
    /// The file in memory that holds them, when peers may map it.
    file: Option<OwnedFd>,
}

impl AnonymousMemory {
    /// Maps `len` bytes, rounded up to whole pages, that this process alone maps.
    pub fn new(len: usize) -> io::Result<AnonymousMemory> {
        Ok(AnonymousMemory {
            mapping: Mapping::anonymous(len)?,
            file: None,
        })
    }

    /// Maps `len` bytes, rounded up to whole pages, that peers on this host may map too. Once such memory is registered and a peer
    /// of the same user has its key, that peer reads and writes it without any action of this process. A peer that maps it reaches
    /// all of the memory, by page, not the region alone: data that no peer may see belongs in a memory of its own.
    pub fn shareable(len: usize) -> io::Result<AnonymousMemory> {
        let len = whole_pages(len)?;
        let file = sealed_file("rdmux-memory", len as u64)?;
        Ok(AnonymousMemory {
            mapping: Mapping::of_sealed_file(&file, 0, len, true)?,
            file: Some(file),
        })
    }

    /// Maps the first `len` bytes, rounded up to whole pages, of a file in memory that another process made, as
    /// [`AnonymousMemory::shareable`] makes one.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if touching the bytes could raise a signal ([`Mapping::of_sealed_file`]), among others because the file
    /// is shorter.
    pub fn of_file(file: OwnedFd, len: u64) -> io::Result<AnonymousMemory> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
        let len = whole_pages(len)?;
        Ok(AnonymousMemory {
            mapping: Mapping::of_sealed_file(&file, 0, len, true)?,
            file: Some(file),
        })
    }

    /// Address of the first byte, by which work requests name it.
    pub fn address(&self) -> u64 {
        self.mapping.address()
    }

    /// Reads one byte that a peer may write: everything that the peer placed before it is seen too.
    ///
    /// # Panics
    /// If `offset` lies outside of the memory.
    pub fn load_u8(&self, offset: u64) -> u8 {
        self.mapping.byte(offset).load(Ordering::Acquire)
    }

    /// Returns its pages.
    #[inline]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Maps all of it once more in this process, at an address that is free. Without one the system chooses.
    ///
    /// # Errors
    /// Also fails for memory that peers cannot map, which is in no file.
    pub fn map_again(&self, address: Option<u64>) -> Result<PlacedMapping, PlaceError> {
        self.map_times(address, 1)
    }

    /// Does that several times, one behind the other: all show the same bytes.
    ///
    /// # Errors
    /// As [`AnonymousMemory::map_again`].
    ///
    /// # Panics
    /// If it is to be mapped no time.
    pub fn map_times(&self, address: Option<u64>, times: usize) -> Result<PlacedMapping, PlaceError> {
        let file = self.file.as_ref().ok_or(Unmappable::NotSealed)?;
        PlacedMapping::new(file, address, self.mapping.len(), times)
    }

    /// The file that peers may map.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

impl Memory for AnonymousMemory {
    fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.mapping.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.mapping.write(offset, bytes)
    }

    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.mapping.copy_in(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.mapping.atomic(offset, atomic)
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
        if offset.checked_add(length).is_none_or(|end| end > self.len()) {
            return Err(Fault::Unmapped);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn sharing(&self) -> Option<Sharing> {
        self.file.as_ref().map(|_| Sharing::Shared)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn pages(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
