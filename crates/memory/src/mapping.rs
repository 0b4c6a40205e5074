//! Mapped memory: pages of the process's own, or of a file in memory that another process maps too.
//!
//! There is never a reference to bytes that another thread or process writes at the same time: all access is by copy through raw
//! pointers, or by atomics.
//!
//! Copies race: RDMA lets a program read what a peer writes, and gives it old, new or mixed bytes. Rust defines no copy of that
//! kind; by its model such a race, and one of atomics of different sizes on the same bytes, is undefined. This module relies on
//! what compilers make of them: a copy becomes `memcpy` or plain moves, which give each byte one of the values that it had, and an
//! atomic becomes one instruction. To leave compilers no other choice, nothing here looks at the bytes in place: they are only
//! looked at in the copy, and read once.
#![allow(
    unsafe_code,
    reason = "mapped memory that others write while this process reads it"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{NonNull, copy_nonoverlapping};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Atomic, Fault};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::persist::{self, Cpu, place_cached};

mod placed;

pub use placed::{PlaceError, PlacedMapping, Rights};

/// A mapping, until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: the mapping lives until the value is dropped, and every access to it is a copy through raw pointers or an atomic
// operation, which may race with others on the bytes but never on the mapping.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Rounds a length up to whole pages.
pub(crate) fn whole_pages(len: usize) -> io::Result<usize> {
    let rounded = len.max(1).checked_next_multiple_of(rustix::param::page_size());
    rounded.ok_or(io::ErrorKind::OutOfMemory.into())
}

impl Mapping {
    /// Maps `len` bytes, rounded up to whole pages, of the process's own; zero at first.
    pub fn anonymous(len: usize) -> io::Result<Mapping> {
        let len = whole_pages(len)?;
        // The kernel provides pages when they are touched, and does not account for them before.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no memory that exists.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        Mapping::from_base(base.cast(), len, true)
    }

    /// Maps `len` bytes of a file in memory at `offset`, a multiple of the page size. The file may come from another process.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if touching the bytes could raise a signal ([`Unmappable`]).
    pub fn of_sealed_file(file: impl AsFd, offset: u64, len: usize, writable: bool) -> io::Result<Mapping> {
        let end = offset.checked_add(len as u64).ok_or(io::ErrorKind::InvalidData)?;
        check_sealed_file(&file, end).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Mapping::of_file(file, offset, len, writable)
    }

    /// Maps `len` bytes of a file at `offset`, a multiple of the page size. The file must never be shortened below their end:
    /// touching the missing bytes would raise a signal.
    pub(crate) fn of_file(file: impl AsFd, offset: u64, len: usize, writable: bool) -> io::Result<Mapping> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        Mapping::of_file_as(file, offset, len, writable, flags)
    }

    /// Maps `len` bytes of a file on persistent memory, such that stored bytes can be found again after a loss of power without a
    /// system call: before a page may be written, the file system's own record of it is on the medium (`MAP_SYNC`). A file system
    /// that cannot promise that is refused: [`io::ErrorKind::Unsupported`]. The file must not be shortened here either, as for
    /// [`Mapping::of_file`].
    pub(crate) fn synchronous(file: impl AsFd, len: usize) -> io::Result<Mapping> {
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        Mapping::of_file_as(file, 0, len, true, flags)
    }

    fn of_file_as(
        file: impl AsFd,
        offset: u64,
        len: usize,
        writable: bool,
        flags: MapFlags,
    ) -> io::Result<Mapping> {
        let write = if writable {
            ProtFlags::WRITE
        } else {
            ProtFlags::empty()
        };
        // SAFETY: as for `anonymous`.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | write,
                flags,
                file,
                offset,
            )
        }?;
        Mapping::from_base(base.cast(), len, writable)
    }

    fn from_base(base: *mut u8, len: usize, writable: bool) -> io::Result<Mapping> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len, writable })
    }

    #[expect(clippy::len_without_is_empty, reason = "no mapping is empty")]
    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns its start address in this process.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    #[inline]
    fn at(&self, offset: u64, len: u64) -> Result<*mut u8, Fault> {
        let end = offset.checked_add(len).ok_or(Fault::Unmapped)?;
        if end > self.len as u64 {
            return Err(Fault::Unmapped);
        }
        // SAFETY: `offset` is at most `len`, so the result stays inside of the mapping or one past its end.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    #[inline]
    fn at_writable(&self, offset: u64, len: u64) -> Result<*mut u8, Fault> {
        if !self.writable {
            return Err(Fault::NotSupported);
        }
        self.at(offset, len)
    }

    /// Copies `out.len()` bytes at `offset` out.
    #[inline]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let from = self.at(offset, out.len() as u64)?;
        // SAFETY: `at` checked that `out.len()` bytes from there lie inside of the mapping; `out` is a reference of the
        // caller's and so does not overlap it. A racing write makes the copy old, new or mixed, as on a real RNIC; the module's
        // documentation says what that relies on.
        unsafe { copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Appends `len` bytes at `offset` to a vector.
    #[inline]
    pub fn append_to(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
        let from = self.at(offset, len as u64)?;
        out.reserve(len);
        // SAFETY: `at` checked the source; `reserve` made room behind the vector's bytes, which are initialised by the copy before
        // they are counted. Racing writes are as for `read`.
        unsafe {
            copy_nonoverlapping(from, out.as_mut_ptr().add(out.len()), len);
            out.set_len(out.len() + len);
        }
        Ok(())
    }

    /// Copies bytes in, in any order: the reader learns by other means that they are there.
    #[inline]
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        // SAFETY: as for `write`.
        unsafe { copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Places bytes in ascending order, the last word with release semantics: a program may poll it.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        // SAFETY: `at_writable` checked that `bytes.len()` bytes from there lie inside of the mapping; `bytes` is a reference
        // of the caller's and so does not overlap it. Racing accesses are as for `read`.
        unsafe { place_cached(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Places bytes as [`Mapping::write`] does, such that they are out of the caches after the next [`persist::fence`].
    pub(crate) fn write_through(&self, cpu: Cpu, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        // SAFETY: as for `write`; only `persist` reports what the processor can do.
        unsafe { persist::place(cpu, bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Writes back what the caches hold of a range. The write-back is done after the next [`persist::fence`].
    pub(crate) fn write_back(&self, cpu: Cpu, offset: u64, len: u64) -> Result<(), Fault> {
        let at = self.at(offset, len)?;
        // SAFETY: `at` checked that `len` bytes from there lie inside of the mapping, which lives as long as `self`.
        unsafe { persist::write_back(cpu, at, len as usize) };
        Ok(())
    }

    /// Makes the pages of a range present and writable. A condition that would raise a signal when the range is touched, such as a
    /// lack of blocks or a failing medium, is an error here. Linux 5.14.
    pub fn populate(&self, offset: u64, len: usize) -> io::Result<()> {
        let at = self
            .at_writable(offset, len as u64)
            .map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the range lies inside of the mapping, and the advice changes no byte of it.
        Ok(unsafe { madvise(at.cast(), len, Advice::LinuxPopulateWrite) }?)
    }

    /// Keeps the mapping out of children that are forked.
    pub fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own, and the advice changes nothing of it in this process.
        Ok(unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxDontFork) }?)
    }

    /// Keeps huge pages out of the mapping. A kernel that has none says nothing.
    pub fn refuse_huge_pages(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own, and the advice changes no byte of it.
        match unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxNoHugepage) } {
            Err(Errno::INVAL) => Ok(()),
            result => Ok(result?),
        }
    }

    /// Removes the pages and keeps the addresses: from then on the kernel answers accesses from other processes with an error, and
    /// nothing else is mapped there as long as the value lives.
    ///
    /// # Safety
    /// No reference into the mapping is left, and none of its methods that touch the pages is called from now on.
    pub unsafe fn take_away(&self) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: replaces exactly the range that is this mapping's own, which nobody touches any more, as the caller says.
        unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.len, ProtFlags::empty(), flags) }?;
        Ok(())
    }

    /// Places `len` bytes of another mapping as [`Mapping::write`] does, in one pass.
    pub fn write_from(
        &self,
        offset: u64,
        from: &Mapping,
        from_offset: u64,
        len: u64,
    ) -> Result<(), CopyError> {
        let source = from.at(from_offset, len).map_err(CopyError::From)?;
        let to = self.at_writable(offset, len).map_err(CopyError::To)?;
        // SAFETY: both ranges were checked against their mappings. They may name the same pages by two mappings, and then race
        // as any two accesses do; as addresses they overlap only when both are of one mapping.
        unsafe {
            if std::ptr::eq(self, from) {
                std::ptr::copy(source, to, len as usize);
            } else {
                place_cached(source, to, len as usize);
            }
        }
        Ok(())
    }

    /// Executes an atomic operation on 8 aligned bytes. Returns their previous value.
    pub(crate) fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let at = self.at_writable(offset, 8)?;
        if !at.addr().is_multiple_of(8) {
            return Err(Fault::NotSupported);
        }
        // SAFETY: eight bytes inside of the mapping (checked by `at`), aligned, which lives as long as `self`.
        let word = unsafe { AtomicU64::from_ptr(at.cast()) };
        Ok(match atomic {
            Atomic::CompareSwap { compare, swap } => word
                .compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire)
                .unwrap_or_else(|found| found),
            Atomic::FetchAdd(add) => word.fetch_add(add, Ordering::AcqRel),
            Atomic::Write(bytes) => word.swap(u64::from_ne_bytes(bytes), Ordering::AcqRel),
        })
    }

    /// Returns a byte.
    ///
    /// # Panics
    /// If it lies outside of the mapping.
    pub(crate) fn byte(&self, offset: u64) -> &AtomicU8 {
        let at = self.at(offset, 1).expect("offset inside of the memory");
        // SAFETY: the byte is inside of the mapping (checked by `at`), which lives as long as `self`; an atomic byte has no
        // alignment. In a mapping that is not writable nobody stores: callers that do made it so.
        unsafe { AtomicU8::from_ptr(at) }
    }

    /// Returns a word of a writable mapping.
    ///
    /// # Panics
    /// If it lies outside of the mapping, is not aligned, or the mapping is not writable.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        let at = self.at_writable(offset as u64, 4).expect("a word of the mapping");
        assert!(offset.is_multiple_of(4));
        // SAFETY: four bytes inside of the mapping (checked by `at_writable`), which lives as long as `self`; the mapping begins
        // at a page, so they are aligned.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Loads a word, `Relaxed`, also of a mapping that is not writable.
    ///
    /// # Panics
    /// If it lies outside of the mapping, or is not aligned.
    #[inline]
    pub fn load(&self, offset: usize) -> u32 {
        let at = self.at(offset as u64, 4).expect("a word of the mapping");
        assert!(offset.is_multiple_of(4));
        // SAFETY: as for `word`, with the check of `at`. In memory that is not writable here, a `Relaxed` load of up to 8 bytes only reads on
        // each 64-bit processor that Linux runs on (`std::sync::atomic`, "Atomic accesses to read-only memory"), and the reference does not
        // leave this function.
        unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Relaxed)
    }

    /// Returns 8 aligned bytes of a writable mapping.
    ///
    /// # Panics
    /// If they lie outside of the mapping, are not aligned, or the mapping is not writable.
    #[inline]
    pub fn double_word(&self, offset: usize) -> &AtomicU64 {
        let at = self
            .at_writable(offset as u64, 8)
            .expect("8 bytes of the mapping");
        assert!(offset.is_multiple_of(8));
        // SAFETY: as for `word`, with 8 bytes.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Returns aligned groups of 8 bytes of a writable mapping.
    ///
    /// # Panics
    /// If they lie outside of the mapping, are not aligned, or the mapping is not writable.
    pub fn double_words(&self, offset: usize, len: usize) -> &[AtomicU64] {
        let bytes = (len as u64).checked_mul(8);
        let at = bytes.and_then(|bytes| self.at_writable(offset as u64, bytes).ok());
        let at = at.expect("bytes of the mapping");
        assert!(offset.is_multiple_of(8));
        // SAFETY: as for `word`, with `len` times 8 bytes, whose number does not overflow.
        unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), len) }
    }

    /// Loads 64 aligned bytes, 8 at a time and each of them once, also of a mapping that is not writable: others may write them meanwhile.
    ///
    /// # Panics
    /// If they lie outside of the mapping, or are not aligned.
    #[inline]
    pub fn load_line(&self, offset: usize) -> [u8; LINE_BYTES] {
        let at = self
            .at(offset as u64, LINE_BYTES as u64)
            .expect("a line of the mapping");
        assert!(offset.is_multiple_of(LINE_BYTES));
        let mut line = [0; LINE_BYTES];
        for (index, eight) in line.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: as for `load`: 8 bytes inside of the mapping, which `at` has checked, and aligned as its beginning is.
            let word = unsafe { AtomicU64::from_ptr(at.add(8 * index).cast()) };
            *eight = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        line
    }

    /// Stores 64 aligned bytes, 8 at a time: others may read them meanwhile.
    ///
    /// # Panics
    /// If they lie outside of the mapping, are not aligned, or the mapping is not writable.
    #[inline]
    pub fn store_line(&self, offset: usize, line: &[u8; LINE_BYTES]) {
        assert!(offset.is_multiple_of(LINE_BYTES));
        let at = self
            .at_writable(offset as u64, LINE_BYTES as u64)
            .expect("a line of the mapping");
        for (index, eight) in line.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: 8 bytes inside of the mapping, which `at_writable` has checked, and aligned as its beginning is.
            let word = unsafe { AtomicU64::from_ptr(at.add(8 * index).cast()) };
            word.store(u64::from_ne_bytes(*eight), Ordering::Relaxed);
        }
    }

    /// Copies from or to memory of another process, as its owner granted: `len` bytes at `offset` here, at `address` there.
    ///
    /// # Safety
    /// A copy to the process writes only what its owner granted: the kernel does not know that, and the process may be this one.
    pub unsafe fn copy_process(
        &self,
        offset: u64,
        pid: i32,
        address: u64,
        len: u64,
        way: Way,
    ) -> Result<(), CopyError> {
        let here = match way {
            Way::ToProcess(..) => self.at(offset, len),
            Way::FromProcess(_) => self.at_writable(offset, len),
        };
        let here = here.map_err(CopyError::From)?;
        // SAFETY: `len` bytes from there lie inside of the mapping; the other side is as the caller says.
        unsafe { copy_process(here, pid, address, len as usize, way) }.map_err(CopyError::To)
    }

    /// Copies between addresses of two processes, this one's and another's: the kernel checks both.
    ///
    /// # Safety
    /// As for [`Mapping::copy_process`], on both sides.
    pub(crate) unsafe fn copy_between(
        own: u64,
        pid: i32,
        address: u64,
        len: u64,
        way: Way,
    ) -> Result<(), Fault> {
        let here = std::ptr::without_provenance_mut(own as usize);
        // SAFETY: as the caller says; the kernel copies only from or to addresses that this process may access.
        unsafe { copy_process(here, pid, address, len as usize, way) }
    }

    /// Copies bytes at addresses of this process, which the kernel checks, into the mapping.
    pub(crate) fn copy_from_addresses(&self, offset: u64, own: u64, len: u64) -> Result<(), Fault> {
        let there = self.at_writable(offset, len)?;
        let pid = std::process::id().cast_signed();
        // SAFETY: `len` bytes from there lie inside of the mapping; the other side is the kernel's to check.
        unsafe {
            copy_process(
                there,
                pid,
                own,
                len as usize,
                Way::FromProcess(Order::LastWordLast),
            )
        }
    }

    /// Copies bytes of the mapping to addresses of this process, which the kernel checks.
    ///
    /// # Safety
    /// No reference to the bytes at these addresses contradicts that they are written.
    pub(crate) unsafe fn copy_to_addresses(&self, offset: u64, own: u64, len: u64) -> Result<(), Fault> {
        let here = self.at(offset, len)?;
        let pid = std::process::id().cast_signed();
        // SAFETY: `len` bytes from `here` lie inside of the mapping; the other side is as the caller says.
        unsafe {
            copy_process(
                here,
                pid,
                own,
                len as usize,
                Way::ToProcess(Order::LastWordLast, None),
            )
        }
    }

    /// Places bytes in memory of another process.
    ///
    /// # Safety
    /// As for [`Mapping::copy_process`].
    pub unsafe fn write_process(
        pid: i32,
        address: u64,
        bytes: &[u8],
        order: Order,
        passage: Option<Passage>,
    ) -> Result<(), Fault> {
        let (from, way) = (bytes.as_ptr().cast_mut(), Way::ToProcess(order, passage));
        // SAFETY: the bytes are a reference's, and only read; the other side is as the caller says.
        unsafe { copy_process(from, pid, address, bytes.len(), way) }
    }

    /// Copies bytes out of memory of another process.
    pub fn read_process(pid: i32, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: the bytes are an exclusive reference's.
        unsafe {
            copy_process(
                out.as_mut_ptr(),
                pid,
                address,
                out.len(),
                Way::FromProcess(Order::Any),
            )
        }
    }
}

/// Bytes of [`Mapping::load_line`].
const LINE_BYTES: usize = 64;

/// Number of bytes that are placed after all others where a program may poll them.
const LAST_WORD: usize = 8;

/// Copies between this process and another one. The kernel checks rights and addresses there; a failure is a fault and never a
/// signal.
///
/// # Safety
/// No reference to the `len` bytes on the side that is written contradicts that. The kernel checks on both sides that the bytes are
/// there.
unsafe fn copy_process(here: *mut u8, pid: i32, address: u64, len: usize, way: Way) -> Result<(), Fault> {
    let own = pid == std::process::id().cast_signed();
    let mut done = 0;
    while done < len {
        let (local, remote) = (here.wrapping_add(done), address.wrapping_add(done as u64));
        // SAFETY: as the caller says.
        let copied = match unsafe { call_process(local, pid, remote, len - done, way) } {
            // A filter of system calls (seccomp) refuses the call, as in some containers.
            Err(libc::EPERM | libc::ENOSYS | libc::EACCES) if own => {
                let there = std::ptr::without_provenance_mut(remote as usize);
                let (from, to) = match way {
                    Way::ToProcess(..) => (local, there),
                    Way::FromProcess(_) => (there, local),
                };
                // The last word goes in a copy of its own.
                let left = len - done;
                let piece = if left > LAST_WORD { left - LAST_WORD } else { left };
                // SAFETY: as above.
                unsafe { copy_by_file(from, to, piece) }
            }
            copied => copied,
        };
        match copied {
            Ok(0) | Err(libc::EFAULT) => return Err(Fault::Unmapped),
            Ok(n) => done += n,
            Err(errno) => return Err(Fault::Io(errno)),
        }
    }
    Ok(())
}

#[cfg(test)]
thread_local! {
    /// Calls that this thread has made into processes.
    static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Makes one system call that copies `len` bytes at most. Returns how many it copied.
///
/// # Safety
/// As for [`copy_process`].
unsafe fn call_process(here: *mut u8, pid: i32, address: u64, len: usize, way: Way) -> Result<usize, i32> {
    let vector = |iov_base: *mut u8, iov_len| libc::iovec {
        iov_base: iov_base.cast(),
        iov_len,
    };
    let there = |address: u64| std::ptr::without_provenance_mut(address as usize);
    let (Way::ToProcess(order, _) | Way::FromProcess(order)) = way;
    let passage = match way {
        Way::ToProcess(_, passage) => passage,
        Way::FromProcess(_) => None,
    };
    let last = match order {
        Order::LastWordLast if len > LAST_WORD => LAST_WORD,
        _ => 0,
    };
    let (mut entry, gate, left) = passage.map_or((0, 0, 0), |it| (it.entry, it.gate, it.left));
    let entry = (&raw mut entry).cast();
    let entry_len = if passage.is_some() { size_of::<u32>() } else { 0 };
    // The kernel copies one local vector after the other, and skips empty ones.
    let first = len - last;
    let local = [
        vector(entry, entry_len),
        vector(here, first),
        vector(here.wrapping_add(first), last),
        vector(entry, entry_len),
    ];
    let remote = [
        vector(there(gate), entry_len),
        vector(there(address), len),
        vector(there(left), entry_len),
    ];
    let call = match way {
        Way::ToProcess(..) => libc::process_vm_writev,
        Way::FromProcess(_) => libc::process_vm_readv,
    };
    #[cfg(test)]
    CALLS.with(|calls| calls.set(calls.get() + 1));
    // SAFETY: the local bytes are as the caller says, and an entry of this function's, which is only read, since a passage belongs
    // to a copy to the process; the kernel checks the remote ones.
    let n = unsafe {
        call(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    match usize::try_from(n) {
        Ok(n) => Ok(n.saturating_sub(entry_len).min(len)),
        Err(_) => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// Returns whether the system lets this process make calls into processes of its user, tested on itself. Filters of system calls
/// (seccomp) may refuse them; then programs' own memory is copied twice, and that of peers on the host is reached by packets.
pub fn allows_calls_into_processes() -> bool {
    let (mut here, there) = ([0_u8], [1_u8]);
    let local = libc::iovec {
        iov_base: here.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let remote = libc::iovec {
        iov_base: there.as_ptr().cast_mut().cast(),
        iov_len: 1,
    };
    let own = std::process::id().cast_signed();
    // SAFETY: the call writes one byte of this function's, and reads another one.
    unsafe { libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0) == 1 }
}

/// Copies within this process through a file in memory: the kernel checks both sides, as it does for calls into processes, and
/// allows it to every process. Copies some of `len` bytes, and returns how many.
///
/// # Safety
/// No reference to the bytes contradicts that those at `from` are read and those at `to` written.
unsafe fn copy_by_file(from: *const u8, to: *mut u8, len: usize) -> Result<usize, i32> {
    /// The file, and the process that made it: a forked child shares it, and makes its own.
    static FILE: Mutex<Option<(u32, OwnedFd)>> = Mutex::new(None);
    const AT_ONCE: usize = 64 << 10;
    let last_error = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    let make = || memfd_create("rdmux-copy", MemfdFlags::CLOEXEC).map_err(Errno::raw_os_error);
    let process = std::process::id();
    // A thread that does not get the lock, also because a thread had it when the process forked, makes another file.
    let (mut held, other);
    let file = if let Some(guard) = FILE.try_lock() {
        held = guard;
        if held.as_ref().is_none_or(|(maker, _)| *maker != process) {
            *held = Some((process, make()?));
        }
        held.as_ref().map(|(_, file)| file.as_raw_fd())
    } else {
        other = make()?;
        Some(other.as_raw_fd())
    };
    let file = file.expect("made above");
    let checked = |n: isize| usize::try_from(n).map_err(|_| last_error());
    // SAFETY: as the caller says, and the kernel checks that the bytes are there.
    let n = checked(unsafe { libc::pwrite(file, from.cast(), len.min(AT_ONCE), 0) })?;
    // SAFETY: as above.
    checked(unsafe { libc::pread(file, to.cast(), n, 0) })
}

/// The direction of a copy between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Into the other process.
    ToProcess(Order, Option<Passage>),
    /// Out of the other process.
    FromProcess(Order),
}

/// The order in which bytes are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Ascending, the last word after all others: a program may poll it.
    LastWordLast,
    /// Any: the reader learns by other means that the bytes are there.
    Any,
}

/// The words that a copy into the memory of another process writes beside the bytes. The owner of the memory closes the gate to make
/// the copy fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Address in the other process, to which the entry is copied before the bytes.
    pub gate: u64,
    /// Address to which the entry is copied after the bytes.
    pub left: u64,
    /// The entry, which tells this copy from others.
    pub entry: u32,
}

/// Side of a copy that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyError {
    /// The source; in a copy with another process, the side in this process.
    From(Fault),
    /// The other side.
    To(Fault),
}

impl CopyError {
    /// Returns what failed, on either side.
    pub fn fault(self) -> Fault {
        let (CopyError::From(fault) | CopyError::To(fault)) = self;
        fault
    }

    /// Returns the same error, seen from the other side.
    pub fn swapped(self) -> CopyError {
        match self {
            CopyError::From(fault) => CopyError::To(fault),
            CopyError::To(fault) => CopyError::From(fault),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nobody holds the value any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Makes a file in memory that no process can shorten, lengthen, or seal further. Readers and writers may map it.
pub fn sealed_file(name: &str, len: u64) -> Result<OwnedFd, Errno> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Reason why touching the pages of another process's file could raise a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmappable {
    /// It is no file in memory, or one whose size its owner may change: seals forbid that.
    #[error("the file is not memory that is sealed against shrinking")]
    NotSealed,
    /// It consists of huge pages, or has another file system: the system may have no page left when one is touched.
    #[error("the file does not consist of ordinary pages of memory")]
    NotOrdinary,
    /// It is too short.
    #[error("the file has {bytes} bytes, {needed} are needed")]
    TooShort {
        /// Bytes of the file.
        bytes: u64,
        /// Bytes that were to be mapped.
        needed: u64,
    },
}

/// Checks that a file from another process can be mapped safely: memory of at least `len` bytes that cannot shrink, and not of huge
/// pages. What holds once holds for ever: nobody can take back a seal.
///
/// # Errors
/// It cannot, and why.
pub fn check_sealed_file(file: impl AsFd, len: u64) -> Result<(), Unmappable> {
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
    const TMPFS: i64 = 0x0102_1994;
    // This check comes first: a file that is not in memory may have a server, and any other question to that may wait for ever.
    if !fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Err(Unmappable::NotSealed);
    }
    if !fstatfs(&file).is_ok_and(|stat| stat.f_type == TMPFS) {
        return Err(Unmappable::NotOrdinary);
    }
    let bytes = fstat(&file).map_or(0, |stat| stat.st_size as u64);
    if bytes < len {
        return Err(Unmappable::TooShort { bytes, needed: len });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::{LINE, Stream, WriteBack, cpu};
    use crate::skip::skip;

    /// Returns every set of instructions that this processor can use.
    fn cpus() -> Vec<Cpu> {
        let Some(best) = cpu() else { return Vec::new() };
        let mut all = Vec::new();
        for write_back in [WriteBack::Clwb, WriteBack::ClflushOpt, WriteBack::Clflush] {
            for stream in [Stream::Avx512, Stream::Sse2] {
                if write_back >= best.write_back && stream >= best.stream {
                    all.push(Cpu { write_back, stream });
                }
            }
        }
        all
    }

    fn calls<R>(f: impl FnOnce() -> R) -> u64 {
        let before = CALLS.get();
        f();
        CALLS.get() - before
    }

    /// Each copy is one system call, whatever its length and order.
    #[test]
    fn copy_process__makes_one_call() {
        if !allows_calls_into_processes() {
            return skip("calls into processes are refused");
        }
        let memory = Mapping::anonymous(8192).unwrap();
        let pid = std::process::id().cast_signed();
        for len in [1, 8, 9, 4096, 8192] {
            for order in [Order::LastWordLast, Order::Any] {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
                let address = memory.address();
                // SAFETY: the bytes are this test's, and there are no references to them.
                let write = || unsafe { Mapping::write_process(pid, address, &bytes, order, None) }.unwrap();
                assert_eq!(calls(write), 1, "{len} bytes");
                let mut seen = vec![0; len];
                memory.read(0, &mut seen).unwrap();
                assert_eq!(seen, bytes);
                let mut copied = vec![0; len];
                let read = || Mapping::read_process(pid, memory.address(), &mut copied).unwrap();
                assert_eq!(calls(read), 1, "{len} bytes");
                assert_eq!(copied, bytes);
            }
        }
    }

    /// Polled memory: a reader that sees the last word sees all words before it.
    #[test]
    fn copy_process__places_the_last_word_last() {
        if !allows_calls_into_processes() {
            return skip("calls into processes are refused");
        }
        const LEN: usize = 4096 + 8;
        const ROUNDS: u64 = 20_000;
        let memory = Mapping::anonymous(8192).unwrap();
        let pid = std::process::id().cast_signed();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for round in 1..=ROUNDS {
                    let words = std::iter::repeat_n(round.to_ne_bytes(), LEN / 8);
                    let bytes: Vec<u8> = words.flatten().collect();
                    let order = Order::LastWordLast;
                    let address = memory.address();
                    // SAFETY: the bytes are this test's, and there are no references to them.
                    unsafe { Mapping::write_process(pid, address, &bytes, order, None) }.unwrap();
                }
            });
            let (mut seen, mut bytes) = (0, vec![0; LEN - 8]);
            while seen < ROUNDS {
                let word = memory.atomic(LEN as u64 - 8, Atomic::FetchAdd(0)).unwrap();
                memory.read(0, &mut bytes).unwrap();
                let words = bytes.chunks(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap()));
                let first = words.min();
                assert!(first >= Some(word), "{word} was seen before {first:?}");
                seen = word;
            }
        });
    }

    #[test]
    fn load_line__what_was_stored_up_to_the_last_line() {
        let file = sealed_file("lines", 8192).unwrap();
        let memory = Mapping::of_sealed_file(&file, 0, 8192, true).unwrap();
        let reader = Mapping::of_sealed_file(&file, 0, 8192, false).unwrap();
        for offset in [0, 64, 8192 - 64] {
            let line = std::array::from_fn(|i| (i * 3 + offset) as u8);
            memory.store_line(offset, &line);
            memory.double_word(offset).fetch_add(1 << 8, Ordering::Relaxed);
            let mut expected = line;
            expected[1] += 1;
            assert_eq!(reader.load_line(offset), expected);
            let word = u32::from_ne_bytes(*expected.last_chunk().unwrap());
            assert_eq!(reader.load(offset + 60), word);
        }
        for outside in [
            || Mapping::anonymous(4096).unwrap().load_line(4096)[0].into(),
            || Mapping::anonymous(4096).unwrap().load_line(32)[0].into(),
            || Mapping::anonymous(4096).unwrap().load(4096),
            || Mapping::anonymous(4096).unwrap().load(2),
        ] as [fn() -> u32; 4]
        {
            assert!(std::panic::catch_unwind(outside).is_err());
        }
        let store = || reader.store_line(0, &[0; 64]);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(store)).is_err());
    }

    #[test]
    fn write_through__every_start_and_length_around_lines() {
        for cpu in cpus() {
            let memory = Mapping::anonymous(8192).unwrap();
            let source: Vec<u8> = (0..1200u32).map(|i| (i * 7 + 1) as u8).collect();
            for start in 0..2 * LINE as u64 {
                for len in (0..=2 * LINE + 1).chain(1020..=1024 + 2 * LINE + 1) {
                    memory.write(0, &[0xee; 1600]).unwrap();
                    memory.write_through(cpu, start + 64, &source[..len]).unwrap();
                    let mut seen = vec![0; 1600];
                    memory.read(0, &mut seen).unwrap();
                    let at = start as usize + 64;
                    assert!(
                        seen[..at].iter().all(|b| *b == 0xee),
                        "{cpu:?}: before {start}+{len}"
                    );
                    assert_eq!(seen[at..at + len], source[..len], "{cpu:?}: {start}+{len}");
                    assert!(
                        seen[at + len..].iter().all(|b| *b == 0xee),
                        "{cpu:?}: behind {start}+{len}"
                    );
                }
            }
        }
    }

    #[test]
    fn write_through__up_to_the_last_byte_of_a_mapping_and_no_further() {
        for cpu in cpus() {
            let memory = Mapping::anonymous(4096).unwrap();
            for len in [0usize, 1, 8, 63, 64, 65, 4096] {
                let start = 4096 - len as u64;
                memory.write_through(cpu, start, &vec![9; len]).unwrap();
                memory.write_back(cpu, start, len as u64).unwrap();
                assert_eq!(
                    memory.write_through(cpu, start + 1, &vec![9; len]),
                    Err(Fault::Unmapped)
                );
            }
            assert_eq!(
                memory.write_through(cpu, u64::MAX, &[9; 64]),
                Err(Fault::Unmapped)
            );
            assert_eq!(memory.write_back(cpu, 4095, 2), Err(Fault::Unmapped));
        }
    }

    /// A reader that sees the last word sees everything before it.
    #[test]
    fn write_through__last_word_is_seen_last() {
        let Some(cpu) = cpu() else {
            return skip("the processor cannot write caches back");
        };
        let memory = Mapping::anonymous(4096).unwrap();
        const LEN: usize = 2048 + 8;
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for round in 1..=60_000u64 {
                    let bytes: Vec<u8> = std::iter::repeat_n(round.to_ne_bytes(), LEN / 8)
                        .flatten()
                        .collect();
                    memory.write_through(cpu, 56, &bytes).unwrap();
                }
            });
            let (mut seen, mut bytes) = (0, vec![0; LEN - 8]);
            while seen < 60_000 {
                let word = memory.atomic(56 + LEN as u64 - 8, Atomic::FetchAdd(0)).unwrap();
                memory.read(56, &mut bytes).unwrap();
                let first = bytes
                    .chunks(8)
                    .map(|w| u64::from_ne_bytes(w.try_into().unwrap()))
                    .min();
                assert!(first >= Some(word), "{word} was seen before {first:?}");
                seen = word;
            }
        });
    }
}
