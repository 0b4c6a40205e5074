//! A file in memory that is mapped once more, at an address that its user chooses: what becomes present there, and with which rights, is the
//! user's affair, while another mapping of the same file keeps all of it.
#![allow(unsafe_code, reason = "a mapping at a given address")]

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect};

use super::{Mapping, Unmappable, check_sealed_file};

/// A mapping at an address of the caller's choice, until it is dropped. Children that are forked do not have it, and it has no huge pages.
///
/// Threads that touch a page wait, or get a signal, as the rights of the page say; so do the methods of its [`Mapping`].
#[derive(Debug)]
pub struct PlacedMapping(Mapping);

/// Rights to pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// None: a touch raises `SIGSEGV`.
    None,
    /// Reading.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Reason why a file cannot be mapped at an address.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Something else is mapped in the range.
    #[error("the addresses {:#x} to {:#x} are taken: choose others", .0.start, .0.end)]
    Taken(Range<u64>),
    /// The address is no multiple of the page size, or the range is not the program's to map.
    #[error("the address {0:#x} cannot be mapped: choose another")]
    Address(u64),
    /// The system has no memory for it, the address space of the process is limited, or it has too many mappings.
    #[error("no memory to map {0} bytes: raise vm.max_map_count, or the limit of address space (ulimit -v)")]
    NoMemory(usize),
    /// Touching its bytes could raise a signal.
    #[error("{0}")]
    File(#[from] Unmappable),
    /// Another error of the system.
    #[error("mapping memory failed: {0}")]
    Other(io::Error),
}

impl PlacedMapping {
    /// Maps the first `len` bytes of a sealed file in memory, so many times one behind the other. `len` is a multiple of the page size. Without an
    /// address the system chooses one.
    ///
    /// # Panics
    /// If the file is to be mapped no time.
    pub fn new(
        file: impl AsFd,
        address: Option<u64>,
        len: usize,
        times: usize,
    ) -> Result<PlacedMapping, PlaceError> {
        assert!(times > 0);
        check_sealed_file(&file, len as u64)?;
        let all = len.checked_mul(times).ok_or(PlaceError::NoMemory(usize::MAX))?;
        let place = match address {
            Some(0) => return Err(PlaceError::Address(0)),
            Some(address) => std::ptr::without_provenance_mut(address as usize),
            None => std::ptr::null_mut(),
        };
        let fixed = match address {
            Some(_) => MapFlags::FIXED_NOREPLACE,
            None => MapFlags::empty(),
        };
        let start = address.unwrap_or(0);
        let end = start.checked_add(all as u64).ok_or(PlaceError::Address(start))?;
        let refused = |error| match error {
            Errno::EXIST => PlaceError::Taken(start..end),
            Errno::INVAL | Errno::PERM => PlaceError::Address(start),
            Errno::NOMEM => PlaceError::NoMemory(all),
            error => PlaceError::Other(error.into()),
        };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
        // SAFETY: the call replaces no mapping that exists, by its flag or because the kernel chooses the address.
        let base = unsafe { mmap_anonymous(place, all, ProtFlags::empty(), flags) }.map_err(refused)?;
        let mapping = Mapping::from_base(base.cast(), all, true).map_err(PlaceError::Other)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        for time in 0..times {
            let at = mapping.at((time * len) as u64, len as u64);
            let at = at.map_err(|_| PlaceError::Address(start))?;
            // SAFETY: it replaces a part of what was reserved above, which nobody has touched.
            unsafe {
                mmap(
                    at.cast(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    flags,
                    &file,
                    0,
                )
            }
            .map_err(refused)?;
        }
        // A kernel that does not know the flag takes the address for a wish.
        if address.is_some_and(|address| address != mapping.address()) {
            return Err(PlaceError::Taken(start..end));
        }
        mapping.keep_from_children().map_err(PlaceError::Other)?;
        mapping.refuse_huge_pages().map_err(PlaceError::Other)?;
        Ok(PlacedMapping(mapping))
    }

    /// Returns the bytes.
    pub fn mapping(&self) -> &Mapping {
        &self.0
    }

    /// Makes pages absent (`MADV_DONTNEED`). Their bytes stay in the file. `offset` and `len` are multiples of the page size.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the range is not within the mapping.
    pub fn drop_pages(&self, offset: u64, len: usize) -> io::Result<()> {
        let at = self.0.at(offset, len as u64);
        let at = at.map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `at` checked that the range lies inside of the mapping. The mapping is shared, so no byte of it changes.
        Ok(unsafe { madvise(at.cast(), len, Advice::LinuxDontNeed) }?)
    }

    /// Sets the rights of pages. `offset` and `len` are multiples of the page size.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the range is not within the mapping; [`io::ErrorKind::OutOfMemory`] if ranges with different rights
    /// are more than the mappings that a process may have (`vm.max_map_count`).
    pub fn set_rights(&self, offset: u64, len: usize, rights: Rights) -> io::Result<()> {
        let at = self.0.at(offset, len as u64);
        let at = at.map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = match rights {
            Rights::None => MprotectFlags::empty(),
            Rights::Read => MprotectFlags::READ,
            Rights::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: `at` checked that the range lies inside of the mapping. Every access to it is a copy or an atomic operation, to which a
        // signal may happen as the type's documentation says.
        Ok(unsafe { mprotect(at.cast(), len, flags) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AnonymousMemory;

    fn page() -> usize {
        rustix::param::page_size()
    }

    /// Returns an address at which two pages were free a moment ago.
    fn free_address() -> u64 {
        Mapping::anonymous(2 * page()).unwrap().address()
    }

    #[test]
    fn map_again__has_the_same_bytes_at_the_address() {
        let memory = AnonymousMemory::shareable(2 * page()).unwrap();
        // Another thread may map something there meanwhile.
        let view = (0..100).find_map(|_| {
            let address = free_address();
            let view = memory.map_again(Some(address)).ok()?;
            assert_eq!(view.mapping().address(), address);
            Some(view)
        });
        let view = view.unwrap();
        memory
            .mapping()
            .word(page())
            .store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(view.mapping().load(page()), 7);
        view.drop_pages(0, 2 * page()).unwrap();
        assert_eq!(view.mapping().load(page()), 7);
        view.set_rights(0, page(), Rights::None).unwrap();
        view.set_rights(page() as u64, page(), Rights::Read).unwrap();
        assert_eq!(view.mapping().load(page()), 7);
    }

    #[test]
    fn map_times__has_the_same_bytes_each_time_with_rights_of_their_own() {
        let memory = AnonymousMemory::shareable(2 * page()).unwrap();
        let view = memory.map_times(None, 3).unwrap();
        assert_eq!(view.mapping().len(), 6 * page());
        view.mapping()
            .word(3 * page())
            .store(7, std::sync::atomic::Ordering::Relaxed);
        for time in 0..3 {
            assert_eq!(view.mapping().load((2 * time + 1) * page()), 7);
        }
        let first = view.mapping().address() + page() as u64;
        // Across the boundary of two times.
        view.set_rights(page() as u64, 2 * page(), Rights::None).unwrap();
        view.drop_pages(3 * page() as u64, 2 * page()).unwrap();
        assert_eq!(view.mapping().load(5 * page()), 7);
        let taken = memory.map_again(Some(first)).unwrap_err();
        assert!(matches!(taken, PlaceError::Taken(_)), "{taken}");
    }

    /// A child would touch the pages without anybody's knowledge.
    #[test]
    fn map_again__is_neither_for_children_nor_of_huge_pages() {
        let memory = AnonymousMemory::shareable(page()).unwrap();
        let view = memory.map_again(None).unwrap();
        let start = format!("{:x}-", view.mapping().address());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, own) = maps.split_once(&format!("\n{start}")).unwrap();
        let flags = own.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        let has = |flag: &str| flags.split_whitespace().any(|has| has == flag);
        assert!(has("dc"), "{flags}");
        // A kernel without huge pages has no such flag.
        let has_huge = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(has("nh"), has_huge, "{flags}");
    }

    #[test]
    fn map_again__refuses_an_address_that_is_taken() {
        let memory = AnonymousMemory::shareable(page()).unwrap();
        let taken = memory.map_again(None).unwrap();
        let address = taken.mapping().address();
        let refused = memory.map_again(Some(address)).unwrap_err();
        assert!(matches!(&refused, PlaceError::Taken(range) if range.start == address));
        assert!(!refused.to_string().contains('\n'));
        // The mapping that was there is as before.
        assert_eq!(taken.mapping().load(0), 0);
    }

    #[test]
    fn map_again__refuses_addresses_that_nobody_can_have() {
        let memory = AnonymousMemory::shareable(page()).unwrap();
        for address in [0, 1, page() as u64 + 1, u64::MAX, u64::MAX - (page() as u64 - 1)] {
            let refused = memory.map_again(Some(address)).unwrap_err();
            assert!(
                matches!(refused, PlaceError::Address(_) | PlaceError::NoMemory(_)),
                "{address:#x}: {refused}"
            );
        }
    }

    #[test]
    fn map_again__refuses_memory_without_a_file() {
        let memory = AnonymousMemory::new(page()).unwrap();
        assert!(matches!(memory.map_again(None), Err(PlaceError::File(_))));
    }

    #[test]
    fn drop_pages__refuses_a_range_outside() {
        let memory = AnonymousMemory::shareable(page()).unwrap();
        let view = memory.map_again(None).unwrap();
        assert!(view.drop_pages(0, 2 * page()).is_err());
        assert!(view.set_rights(page() as u64, page(), Rights::None).is_err());
    }
}
