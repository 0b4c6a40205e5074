//! Files, reached through the kernel.

use std::any::Any;
use std::fs::{self, File};
use std::io::{self, IoSliceMut, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Atomic, Fault, Medium, Memory, Placement};
use rustix::fs::{FallocateFlags, OFlags, Stat, fallocate, fdatasync, fstat, stat};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::PersistenceDomain;
use crate::domain::{device_folder, is_in_memory, is_ram_disk, keeps_its_blocks};
use crate::lease::{FileWatch, Wanted};
use crate::mapping::Mapping;

/// A file, or a block device as one, reached by `pread` and `pwrite`. The kernel copies, so truncation by another process or a
/// failing medium is a fault and never a signal. Its blocks are allocated when it is opened.
#[derive(Debug)]
pub struct FileMemory {
    file: Arc<File>,
    len: u64,
    domain: PersistenceDomain,
    /// What an access may wait for; `None` for a file in memory.
    medium: Option<Medium>,
    read_only: bool,
    /// Set for a block device, whose size does not change.
    is_device: bool,
    /// Set when all blocks were allocated at first and the file system lets none go. Fewer blocks later then mean a truncation,
    /// even if the file has grown again since.
    blocks_known: bool,
    /// Set once a flush has failed, and never cleared: bytes written since may be lost though later flushes would succeed. Locked
    /// while a flush runs, since the kernel reports a failure to one caller alone.
    failed: Mutex<bool>,
    /// Locked from the read to the write of an atomic operation.
    atomics: Mutex<()>,
    /// Mapping for an RNIC that pages on demand, made when the first one asks. No processor touches it, so that truncation stays a
    /// fault.
    mapping: OnceLock<Mapping>,
}

impl FileMemory {
    /// Opens a block device, whole. Fails when it is mounted or used otherwise (`EBUSY`), unless it is only read.
    pub fn device(path: &Path, read_only: bool) -> io::Result<FileMemory> {
        let mut options = File::options();
        options.read(true).write(!read_only);
        if !read_only {
            // Of all openers with this flag only one gets the device, and a mount opens it with this flag. open(2).
            options.custom_flags(OFlags::EXCL.bits() as i32);
        }
        let mut file = options.open(path)?;
        let meta = file.metadata()?;
        if !meta.file_type().is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a block device"));
        }
        let len = file.seek(SeekFrom::End(0))?;
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the device is empty"));
        }
        let domain = if is_ram_disk(&device_folder("block", meta.rdev())?) {
            PersistenceDomain::None
        } else {
            PersistenceDomain::File
        };
        Ok(FileMemory {
            file: Arc::new(file),
            len,
            domain,
            medium: medium(domain, meta.rdev()),
            read_only,
            is_device: true,
            blocks_known: false,
            failed: Mutex::new(false),
            atomics: Mutex::new(()),
            mapping: OnceLock::new(),
        })
    }

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
                "the file is empty: give it a size",
            ));
        }
        if read_only && len > meta.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a read-only file cannot grow",
            ));
        }
        let domain = if is_in_memory(&file)? {
            PersistenceDomain::None
        } else {
            PersistenceDomain::File
        };
        if !read_only {
            match fallocate(&file, FallocateFlags::empty(), 0, len) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP) => write_holes(&file, meta.len(), len)?,
                Err(error) => return Err(error.into()),
            }
            if domain == PersistenceDomain::File {
                file.sync_all()?;
                // The directory of the file itself, if `path` is a link.
                let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
                let real = real.or_else(|_| path.canonicalize())?;
                let parent = real.parent().unwrap_or_else(|| Path::new("/"));
                File::open(parent)?.sync_all()?;
            }
        }
        let blocks_known = !read_only && keeps_its_blocks(&file)? && has_blocks(&fstat(&file)?, len);
        Ok(FileMemory {
            file: Arc::new(file),
            len,
            domain,
            medium: medium(domain, meta.dev()),
            read_only,
            is_device: false,
            blocks_known,
            failed: Mutex::new(false),
            atomics: Mutex::new(()),
            mapping: OnceLock::new(),
        })
    }

    /// Returns the file from which a device may read a memory's bytes by itself, at the same offsets; `None` for a block device, which has
    /// no pages for devices.
    pub fn of(memory: &dyn Memory) -> Option<&FileMemory> {
        memory.pages()?.downcast_ref()
    }

    /// Returns what survives a loss of power once it is flushed.
    pub fn domain(&self) -> PersistenceDomain {
        self.domain
    }

    /// Returns whether `path` leads to this file: another process may have removed, renamed or replaced it since.
    pub fn is_at(&self, path: &Path) -> bool {
        let same = |here: Stat, there: Stat| (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino);
        fstat(&self.file).is_ok_and(|here| stat(path).is_ok_and(|there| same(here, there)))
    }

    /// Returns whether it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the open file. Whoever reads it by itself calls [`FileMemory::check`] afterwards.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Returns a mapping for an RNIC that asks the kernel for each page when it needs it. The kernel then allocates pages, marks
    /// them as changed and takes them back as for any mapping, so that `fdatasync` knows what the device wrote.
    pub(crate) fn hand_out(&self) -> Option<&Mapping> {
        if self.mapping.get().is_none() {
            let mapping = Mapping::of_file(&*self.file, 0, usize::try_from(self.len).ok()?, !self.read_only);
            // A mapping that another thread set serves as well.
            let _ = self.mapping.set(mapping.ok()?);
        }
        self.mapping.get()
    }

    /// Checks that `len` bytes at `offset` are there. Another process may truncate the file at any time: each access checks this
    /// first, and each flush checks it again before it promises anything.
    ///
    /// # Errors
    /// [`Fault::Unmapped`]: the memory has no such bytes, or the file was truncated.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), Fault> {
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= self.len)
            .ok_or(Fault::Unmapped)?;
        if self.is_device {
            return Ok(());
        }
        let stat = fstat(&self.file).map_err(fault)?;
        let lost = self.blocks_known && !has_blocks(&stat, self.len);
        if (stat.st_size as u64) < end || lost {
            return Err(Fault::Unmapped);
        }
        Ok(())
    }
}

impl FileMemory {
    /// Watches over the file: calls `tell` when another process wants to open it. That process waits meanwhile.
    pub fn watch(&self, tell: impl Fn(Wanted) + Send + Sync + 'static) -> io::Result<FileWatch> {
        FileWatch::begin(self.file.clone(), self.read_only, tell)
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
        // Atomic to all accesses through this memory; an access of a processor that maps the file may come between read and write.
        let _one_at_a_time = self.atomics.lock();
        let mut before = [0; 8];
        self.read(offset, &mut before)?;
        self.write(offset, &atomic.apply(before))?;
        Ok(u64::from_ne_bytes(before))
    }

    fn medium(&self) -> Option<Medium> {
        self.medium
    }

    /// Reads from the page cache. A file system that cannot tell whether it has the bytes there refuses `RWF_NOWAIT`, and may wait for
    /// the file's attributes as well, so that these come second.
    fn read_at_once(&self, offset: u64, out: &mut [u8]) -> Option<Result<(), Fault>> {
        if self.medium.is_none() {
            return Some(self.read(offset, out));
        }
        let length = out.len();
        let inside = offset
            .checked_add(length as u64)
            .is_some_and(|end| end <= self.len);
        if !inside {
            return Some(Err(Fault::Unmapped));
        }
        let read = preadv2(
            &self.file,
            &mut [IoSliceMut::new(out)],
            offset,
            ReadWriteFlags::NOWAIT,
        );
        (read == Ok(length)).then(|| self.check(offset, length as u64))
    }

    fn placement(&self) -> Placement {
        match self.domain {
            PersistenceDomain::None => Placement::GLOBAL,
            _ => Placement::GLOBAL | Placement::PERSISTENT,
        }
    }

    fn gathers(&self) -> bool {
        true
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    /// Returns the pages of the page cache, for an RNIC that pages on demand. This is not tried for block devices.
    fn pages(&self) -> Option<&dyn Any> {
        (!self.is_device).then_some(self as &dyn Any)
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
        self.flush_to_medium(offset, length)
    }
}

impl FileMemory {
    /// Flushes persistently, whatever the domain.
    pub(crate) fn flush_to_medium(&self, offset: u64, length: u64) -> Result<(), Fault> {
        self.check(offset, length)?;
        let mut failed = self.failed.lock();
        if *failed {
            return Err(Fault::Io(Errno::IO.raw_os_error()));
        }
        if let Err(error) = sync(&self.file) {
            // The kernel reports a failed write-back once and forgets the pages: no later success may hide it.
            *failed = true;
            return Err(fault(error));
        }
        self.check(offset, length)
    }
}

/// Returns the medium of files of this domain on the device with this number.
fn medium(domain: PersistenceDomain, device: u64) -> Option<Medium> {
    (domain != PersistenceDomain::None).then_some(Medium(device))
}

/// Calls fdatasync(2); a test can replace the call.
fn sync(file: &File) -> Result<(), Errno> {
    #[cfg(test)]
    if let Some(instead) = tests::SYNC_ONCE.take() {
        return instead(file);
    }
    fdatasync(file)
}

/// Returns whether a file has blocks for `len` bytes.
fn has_blocks(stat: &Stat, len: u64) -> bool {
    (stat.st_blocks as u64).saturating_mul(512) >= len
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

/// Allocates blocks if the file system has no `fallocate`: writes zeros where there is nothing yet.
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

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::cell::Cell;

    use super::*;
    use crate::skip::skip;

    type Sync = fn(&File) -> Result<(), Errno>;

    thread_local! {
        /// Replacement for this thread's next fdatasync.
        pub(super) static SYNC_ONCE: Cell<Option<Sync>> = const { Cell::new(None) };
    }

    const BYTES: u64 = 64 << 10;

    fn written() -> (tempfile::TempDir, FileMemory) {
        let folder = tempfile::tempdir().unwrap();
        let memory = FileMemory::open(&folder.path().join("f"), Some(BYTES), false).unwrap();
        memory.write(0, &[1; BYTES as usize]).unwrap();
        (folder, memory)
    }

    #[test]
    fn read_at_once__of_cached_bytes_and_of_others() {
        let (_folder, memory) = written();
        if memory.domain() == PersistenceDomain::None {
            return skip("the folder for temporary files is in memory");
        }
        let mut bytes = [0; 4096];
        assert!(memory.medium().is_some());
        assert_eq!(
            memory.read_at_once(BYTES - 4095, &mut bytes),
            Some(Err(Fault::Unmapped))
        );
        if memory.read_at_once(0, &mut bytes).is_none() {
            return skip("the file system of the folder for temporary files refuses RWF_NOWAIT");
        }
        assert_eq!(bytes, [1; 4096]);
        // Clean pages that nobody uses leave the page cache on request.
        memory.flush_to_medium(0, BYTES).unwrap();
        rustix::fs::fadvise(memory.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert_eq!(memory.read_at_once(0, &mut bytes), None);
        assert_eq!(memory.read(0, &mut bytes), Ok(()));
        memory.file().set_len(BYTES / 2).unwrap();
        assert!(!matches!(
            memory.read_at_once(BYTES / 2, &mut bytes),
            Some(Ok(()))
        ));
    }

    #[test]
    fn flush__after_one_that_failed_fails_for_good() {
        let (_folder, memory) = written();
        let eio = Err(Fault::Io(Errno::IO.raw_os_error()));
        SYNC_ONCE.set(Some(|_| Err(Errno::IO)));
        assert_eq!(memory.flush_to_medium(0, BYTES), eio);
        // The disk works again, and what it lost stays lost.
        assert_eq!(memory.flush_to_medium(0, BYTES), eio);
        memory.write(0, &[2; 8]).unwrap();
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| memory.flush_to_medium(0, 8)).join());
        assert_eq!(elsewhere.unwrap(), eio);
    }

    #[test]
    fn flush__of_a_full_disk_fails_for_good() {
        let (_folder, memory) = written();
        SYNC_ONCE.set(Some(|_| Err(Errno::NOSPC)));
        assert_eq!(memory.flush_to_medium(0, BYTES), Err(Fault::NoSpace));
        assert_eq!(
            memory.flush_to_medium(0, BYTES),
            Err(Fault::Io(Errno::IO.raw_os_error()))
        );
    }

    #[test]
    fn flush__while_the_file_is_truncated_promises_nothing() {
        let (_folder, memory) = written();
        SYNC_ONCE.set(Some(|file| {
            file.set_len(BYTES / 2).unwrap();
            fdatasync(file)
        }));
        assert_eq!(memory.flush_to_medium(0, BYTES), Err(Fault::Unmapped));
        assert!(
            SYNC_ONCE.take().is_none(),
            "it was truncated before the flush began"
        );
    }

    /// Truncates the file and grows it again: it has fewer blocks then, as if a file system had compressed it.
    fn regrow(memory: &FileMemory) {
        memory.file().set_len(0).unwrap();
        memory.file().set_len(BYTES).unwrap();
        assert!(!has_blocks(&fstat(memory.file()).unwrap(), BYTES));
    }

    #[test]
    fn check__truncated_and_grown_again_is_not_taken_for_whole() {
        let (_folder, memory) = written();
        if !memory.blocks_known {
            return skip("the file system of the folder for temporary files may let blocks go");
        }
        regrow(&memory);
        assert_eq!(memory.flush_to_medium(0, BYTES), Err(Fault::Unmapped));
    }

    #[test]
    fn check__fewer_blocks_are_no_loss_where_the_file_system_lets_them_go() {
        let (_folder, mut memory) = written();
        memory.blocks_known = false;
        regrow(&memory);
        memory.write(0, &[3; 8]).unwrap();
        assert_eq!(memory.flush_to_medium(0, BYTES), Ok(()));
        // A file that is too short is truncated everywhere.
        memory.file().set_len(BYTES / 2).unwrap();
        assert_eq!(memory.flush_to_medium(0, BYTES), Err(Fault::Unmapped));
    }
}
