//! Memory kinds: anonymous pages and files.
//!
//! There is never a reference to memory that another thread or process writes at the same time: all access is by copy through
//! raw pointers, or by the kernel.
//!
//! Copies of [`AnonymousMemory`] race: RDMA lets a program read what a peer writes, and gives it old, new or mixed bytes. Rust
//! defines no copy of that kind; by its model such a race, and one of atomics of different sizes on the same bytes, is undefined.
//! What is relied on is what compilers make of them: a copy becomes `memcpy` or plain moves, which give each byte one of the
//! values that it had, and an atomic becomes one instruction. To leave them no other choice, nothing here looks at the bytes
//! themselves: they are only looked at in the copy, and read once.
#![allow(
    unsafe_code,
    reason = "mapped memory that peers write while the program reads it"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::{NonNull, copy_nonoverlapping};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rdmux_rnic::{Atomic, Fault, Memory, Placement};
use rustix::fs::{FallocateFlags, fallocate, fdatasync, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// What becomes of bytes when power fails. `docs/persistence.md` says which flush reaches what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistenceDomain {
    /// Nothing survives: DRAM, tmpfs.
    None,
    /// The page cache: bytes survive once they are written back and the device's cache is flushed (`fdatasync`).
    File,
}

/// Pages of the process's own, zero at first.
#[derive(Debug)]
pub struct AnonymousMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives until the value is dropped, and every access to it is a copy through raw pointers or an atomic
// operation, which may race with others on the bytes but never on the mapping.
unsafe impl Send for AnonymousMemory {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMemory {}

impl AnonymousMemory {
    /// Maps `len` bytes, rounded up to whole pages.
    pub fn new(len: usize) -> io::Result<AnonymousMemory> {
        let len = len.max(1).next_multiple_of(rustix::param::page_size());
        // SAFETY: a new private mapping at an address that the kernel chooses affects no memory that exists.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                // Pages come when they are touched, and are not accounted for before.
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(AnonymousMemory { base, len })
    }

    /// Address of the first byte, by which work requests name it.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn at(&self, offset: u64, len: usize) -> Result<*mut u8, Fault> {
        let end = offset.checked_add(len as u64).ok_or(Fault::Unmapped)?;
        if end > self.len as u64 {
            return Err(Fault::Unmapped);
        }
        // SAFETY: `offset` is at most `len`, so the result stays inside of the mapping or one past its end.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Reads one byte that a peer may write: everything that it placed before is seen too.
    ///
    /// # Panics
    /// When `offset` lies outside.
    pub fn load_u8(&self, offset: u64) -> u8 {
        let at = self.at(offset, 1).expect("offset inside of the memory");
        // SAFETY: the byte is inside of the mapping (checked by `at`), which lives as long as `self`; an atomic byte has no
        // alignment.
        unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Acquire)
    }
}

impl Drop for AnonymousMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and nobody holds the value any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Memory for AnonymousMemory {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let from = self.at(offset, out.len())?;
        // SAFETY: `at` checked that `out.len()` bytes from there lie inside of the mapping; `out` is a reference of the
        // caller's and so does not overlap it. A racing write makes the copy old, new or mixed, as on a real RNIC; the module's
        // documentation says what that relies on.
        unsafe { copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let to = self.at(offset, bytes.len())?;
        // A program may poll the last word: it is stored after all others, in one piece when it is aligned.
        let tail = bytes.len() - bytes.len().min(8);
        let (body, last) = bytes.split_at(tail);
        // SAFETY: `at` checked that `bytes.len()` bytes from there lie inside of the mapping; `bytes` is a reference of the
        // caller's and so does not overlap it. Racing accesses are as for `read`.
        let to_last = unsafe {
            copy_nonoverlapping(body.as_ptr(), to, body.len());
            to.add(tail)
        };
        if let Ok(word) = <[u8; 8]>::try_from(last)
            && to_last.addr().is_multiple_of(8)
        {
            // SAFETY: eight bytes inside of the mapping, aligned.
            unsafe { AtomicU64::from_ptr(to_last.cast()) }.store(u64::from_ne_bytes(word), Ordering::Release);
        } else {
            for (i, byte) in last.iter().enumerate() {
                // SAFETY: inside of the mapping: `i` is less than the length of `last`, which `at` checked.
                unsafe { AtomicU8::from_ptr(to_last.add(i)) }.store(*byte, Ordering::Release);
            }
        }
        Ok(())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let at = self.at(offset, 8)?;
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
        self.at(offset, usize::try_from(length).map_err(|_| Fault::Unmapped)?)?;
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }
}

/// A file, reached by `pread` and `pwrite`: the kernel copies, so a file that another process truncates or a medium that
/// fails is a fault and never a signal. Its blocks are allocated when it is opened.
#[derive(Debug)]
pub struct FileMemory {
    file: File,
    len: u64,
    domain: PersistenceDomain,
    read_only: bool,
    /// All blocks were allocated at first, so that fewer later mean a truncation, even one that was grown over again.
    blocks_known: bool,
    /// A flush failed: what was written since may be lost though later flushes would succeed. It stays failed. Held while a
    /// flush runs, since the kernel tells a failure to one caller alone.
    failed: Mutex<bool>,
    /// Held from the read to the write of an atomic operation.
    atomics: Mutex<()>,
}

impl FileMemory {
    /// Opens a file. With `size`, creates it or grows it to that many bytes (it is never shortened); all blocks are
    /// allocated, and inode and directory are on the medium, when this returns.
    pub fn open(path: &Path, size: Option<u64>, read_only: bool) -> io::Result<FileMemory> {
        let create = size.is_some() && !read_only;
        let file = File::options()
            .read(true)
            .write(!read_only)
            .create(create)
            .truncate(false)
            .open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let len = size.unwrap_or(0).max(meta.len());
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is empty; give it a size",
            ));
        }
        if read_only && len > meta.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a read-only file cannot grow",
            ));
        }
        let domain = domain_of(&file)?;
        if !read_only {
            match fallocate(&file, FallocateFlags::empty(), 0, len) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP) => write_holes(&file, meta.len(), len)?,
                Err(error) => return Err(error.into()),
            }
            if domain == PersistenceDomain::File {
                file.sync_all()?;
                let parent = path
                    .parent()
                    .filter(|p| !p.as_os_str().is_empty())
                    .unwrap_or_else(|| Path::new("."));
                File::open(parent)?.sync_all()?;
            }
        }
        let stat = fstat(&file)?;
        let blocks_known = !read_only && (stat.st_blocks as u64).saturating_mul(512) >= len;
        Ok(FileMemory {
            file,
            len,
            domain,
            read_only,
            blocks_known,
            failed: Mutex::new(false),
            atomics: Mutex::new(()),
        })
    }

    /// What survives a loss of power once it is flushed.
    pub fn domain(&self) -> PersistenceDomain {
        self.domain
    }

    /// Whether it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether `len` bytes at `offset` are there. Another process may truncate the file at any time: this is looked at before
    /// each access, and again by each flush before it promises anything.
    fn check(&self, offset: u64, len: u64) -> Result<(), Fault> {
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= self.len)
            .ok_or(Fault::Unmapped)?;
        let stat = fstat(&self.file).map_err(fault)?;
        let lost = self.blocks_known && (stat.st_blocks as u64).saturating_mul(512) < self.len;
        if (stat.st_size as u64) < end || lost {
            return Err(Fault::Unmapped);
        }
        Ok(())
    }
}

impl Memory for FileMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.check(offset, out.len() as u64)?;
        match self.file.read_exact_at(out, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Fault::Unmapped),
            Err(error) => Err(io_fault(&error)),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        if self.read_only {
            return Err(Fault::NotSupported);
        }
        self.check(offset, bytes.len() as u64)?;
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| io_fault(&error))
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        if !offset.is_multiple_of(8) {
            return Err(Fault::NotSupported);
        }
        // Atomic to all that comes this way; a processor that maps the file may see it come between read and write.
        let _one_at_a_time = self.atomics.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = [0; 8];
        self.read(offset, &mut before)?;
        self.write(offset, &atomic.apply(before))?;
        Ok(u64::from_ne_bytes(before))
    }

    fn placement(&self) -> Placement {
        match self.domain {
            PersistenceDomain::None => Placement::GLOBAL,
            PersistenceDomain::File => Placement::GLOBAL | Placement::PERSISTENT,
        }
    }

    fn gathers(&self) -> bool {
        true
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if !self.placement().contains(placement) {
            return Err(Fault::NotSupported);
        }
        self.check(offset, length)?;
        if !placement.contains(Placement::PERSISTENT) {
            // The page cache is what every processor sees.
            return Ok(());
        }
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *failed {
            return Err(Fault::Io(Errno::IO.raw_os_error()));
        }
        if let Err(error) = fdatasync(&self.file) {
            // The kernel reports a failed write-back once and forgets the pages: no later success may hide it.
            *failed = true;
            return Err(fault(error));
        }
        self.check(offset, length)
    }
}

fn fault(error: Errno) -> Fault {
    match error {
        Errno::NOSPC | Errno::DQUOT => Fault::NoSpace,
        other => Fault::Io(other.raw_os_error()),
    }
}

fn io_fault(error: &io::Error) -> Fault {
    fault(Errno::from_io_error(error).unwrap_or(Errno::IO))
}

/// Allocates blocks where the file system has no `fallocate`: by writing zeros where there is nothing yet.
fn write_holes(file: &File, from: u64, to: u64) -> io::Result<()> {
    let zeros = vec![0u8; 1 << 20];
    let mut at = from;
    while at < to {
        let n = (to - at).min(zeros.len() as u64) as usize;
        file.write_all_at(&zeros[..n], at)?;
        at += n as u64;
    }
    Ok(())
}

fn domain_of(file: impl AsFd) -> io::Result<PersistenceDomain> {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    const HUGETLBFS: i64 = 0x9584_58f6;
    let kind = fstatfs(file)?.f_type;
    Ok(match kind {
        TMPFS | RAMFS | HUGETLBFS => PersistenceDomain::None,
        _ => PersistenceDomain::File,
    })
}
