//! Memory of the host at physical addresses that stay, for a function that no IOMMU translates for.
#![allow(unsafe_code, reason = "pages are pinned by their address")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use io_uring::IoUring;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Atomic, Fault, Memory, Placement};

use crate::function::DmaMemory;
use crate::memory::PAGE;

/// Most bytes of one buffer of an io_uring.
const BUFFER_MAX: usize = 1 << 30;
/// An entry of /proc/self/pagemap: the page is present.
const PRESENT: u64 = 1 << 63;
/// Its frame.
const FRAME: u64 = (1 << 55) - 1;

/// Memory whose pages stay where they are. Pages that are only locked may be moved to other frames, when the system makes large pages of small ones;
/// those of an io_uring's buffers are pinned.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    memory: AnonymousMemory,
    _ring: Option<Ring>,
}

/// An io_uring that pins pages, until it is dropped.
struct Ring(#[allow(dead_code, reason = "it is only kept")] IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

impl PinnedMemory {
    /// Makes zeroed memory that stays.
    ///
    /// # Errors
    /// The system has not so much, lets the user not lock so much, or allows no io_uring.
    pub(crate) fn new(bytes: usize) -> io::Result<PinnedMemory> {
        let memory = AnonymousMemory::new(bytes)?;
        memory.mapping().keep_from_children()?;
        // Each page is there from then on, and none is the system's page of zeros.
        let zeroes = [0; PAGE];
        for at in (0..memory.len()).step_by(PAGE) {
            memory.write(at, &zeroes).map_err(io::Error::other)?;
        }
        let ring = pin(&memory).map_err(|error| {
            let kind = error.kind();
            let hint = "raise memlock (ulimit -l), and allow io_uring (sysctl kernel.io_uring_disabled=0), whose buffers stay in place";
            io::Error::new(kind, format!("cannot pin {bytes} bytes of memory: {error}; {hint}"))
        })?;
        Ok(PinnedMemory {
            memory,
            _ring: Some(ring),
        })
    }

    /// Returns the address of its first byte in this process.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Makes memory that the system's other means keep in place.
    pub(crate) fn unpinned(bytes: usize) -> io::Result<PinnedMemory> {
        let memory = AnonymousMemory::new(bytes)?;
        memory.mapping().keep_from_children()?;
        Ok(PinnedMemory { memory, _ring: None })
    }

    /// Makes memory, with the physical addresses of its pages.
    pub(crate) fn with_frames(bytes: usize) -> io::Result<DmaMemory> {
        let memory = PinnedMemory::new(bytes)?;
        let pages = frames(memory.address(), memory.len() as usize)?;
        Ok(DmaMemory {
            memory: Arc::new(memory),
            pages,
        })
    }
}

fn pin(memory: &AnonymousMemory) -> io::Result<Ring> {
    let ring = IoUring::builder().dontfork().build(1)?;
    let parts = (0..memory.len() as usize).step_by(BUFFER_MAX);
    let buffers: Vec<libc::iovec> = parts
        .map(|at| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(memory.address() as usize + at),
            iov_len: (memory.len() as usize - at).min(BUFFER_MAX),
        })
        .collect();
    // SAFETY: the buffers are mapped as long as the memory lives, and the ring lives no longer: both are fields of one value, and nothing is ever
    // submitted to the ring.
    unsafe { ring.submitter().register_buffers(&buffers) }?;
    Ok(Ring(ring))
}

/// Returns the physical addresses of the pages of 4 KiB of pages that stay.
fn frames(address: u64, bytes: usize) -> io::Result<Vec<u64>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let page = rustix::param::page_size() as u64;
    let addresses = (address..address + bytes as u64).step_by(PAGE);
    addresses
        .map(|address| {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, address / page * 8)?;
            let entry = u64::from_ne_bytes(entry);
            match entry & FRAME {
                // The kernel shows frames to the administrator alone.
                0 => Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "the system does not tell physical addresses: run as root, with CAP_SYS_ADMIN",
                )),
                _ if entry & PRESENT == 0 => Err(io::Error::other("a page is not in memory")),
                frame => Ok(frame * page + address % page),
            }
        })
        .collect()
}

impl Memory for PinnedMemory {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.memory.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.memory.write(offset, bytes)
    }

    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.memory.write_in_any_order(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.memory.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        self.memory.placement()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.memory.flush_is_immediate(placement)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.memory.flush(offset, length, placement)
    }

    fn pages(&self) -> Option<&dyn std::any::Any> {
        self.memory.pages()
    }
}
