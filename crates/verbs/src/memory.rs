//! Memory kinds: anonymous pages, of this process alone or shareable with peers on the host, and files.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use rdmux_rnic::{Atomic, Fault, Memory, Placement};
use rustix::fs::{FallocateFlags, fallocate, fdatasync, fstat, fstatfs};
use rustix::io::Errno;

use crate::mapping::{Mapping, sealed_file};

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

    /// Maps `len` bytes, rounded up to whole pages, that peers on this host may map too: once such memory is registered and
    /// its key told to a peer of the same user, that peer reads and writes it without this process's doing. A peer that maps it
    /// reaches all of the memory, by page, not the region alone: what no peer may see belongs into a memory of its own.
    pub fn shareable(len: usize) -> io::Result<AnonymousMemory> {
        let len = len.max(1).next_multiple_of(rustix::param::page_size());
        let file = sealed_file("rdmux-memory", len as u64)?;
        Ok(AnonymousMemory {
            mapping: Mapping::of_file(&file, 0, len, true)?,
            file: Some(file),
        })
    }

    /// Address of the first byte, by which work requests name it.
    pub fn address(&self) -> u64 {
        self.mapping.address()
    }

    /// Reads one byte that a peer may write: everything that it placed before is seen too.
    ///
    /// # Panics
    /// When `offset` lies outside.
    pub fn load_u8(&self, offset: u64) -> u8 {
        self.mapping.byte(offset).load(Ordering::Acquire)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// The file that peers may map.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
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

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
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
