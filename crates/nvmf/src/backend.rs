//! Storage of namespaces.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_runtime::{Direction, Pages};
use rdmux_verbs::Memory;
use rdmux_verbs::sync::{Condvar, Mutex};
use rdmux_wire::nvme::Status;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, fcntl_getfl, fcntl_setfl, flock};
use rustix::io::Errno;

use crate::accelerator::Accelerator;
use drive::DriveBackend;

pub mod drive;
pub mod ending;
pub mod offload;
pub mod peer;

/// Sleep between two looks at writes of others.
const PAUSE: Duration = Duration::from_micros(50);

/// Waits a moment for I/Os of others, whose end is not told.
pub(crate) fn pause() {
    // Time is meant: a write does not look for who waits, which would cost each write a system call.
    std::thread::sleep(PAUSE);
}

/// The storage of a namespace. Ranges are in bytes, in multiples of the namespace's blocks, and within [`Backend::bytes`]; their callers have checked
/// that. Buffers begin at a page.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns its size in bytes.
    fn bytes(&self) -> u64;

    /// Takes the size that the storage has now, of which blocks have `block_bytes`.
    ///
    /// # Errors
    /// It has not even one block, or does not tell its size; the size stays as it was.
    fn measure(&self, _block_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Returns the bytes of its blocks as a power of two, if they are the storage's own, which may change.
    fn block_shift(&self) -> Option<u8> {
        None
    }

    /// Returns true if a call may wait for a medium: then it must not run on a reactor's thread.
    fn may_wait(&self) -> bool {
        false
    }

    /// Returns the file by which an io_uring may move bytes, at the offsets of this backend, between it and buffers that begin at a page.
    fn file(&self, _: Direction) -> Option<&Arc<File>> {
        None
    }

    /// Returns the accelerator that it is: hosts have windows there, and it stores nothing else.
    fn accelerator(&self) -> Option<&Accelerator> {
        None
    }

    /// Returns the drive whose own memory takes the data of reads and writes, between it and a queue pair.
    fn peer(&self) -> Option<&DriveBackend> {
        None
    }

    /// Returns true if what is written may be lost before [`Backend::flush`].
    fn has_write_cache(&self) -> bool {
        false
    }

    /// Reads.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status>;

    /// Writes.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status>;

    /// Writes zeros, and gives their room back if it can.
    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status>;

    /// Gives the room of bytes back that are not needed any more; they read as zeros from then on, or, of a drive that keeps them, as before. What
    /// has no room to give back writes zeros.
    fn deallocate(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.write_zeroes(offset, length)
    }

    /// Makes durable what was written before.
    fn flush(&self) -> Result<(), Status>;

    /// Waits a moment for writes of others, whose end is not told: the caller wants to be alone with the namespace.
    fn pause(&self) {
        pause();
    }
}

/// Flushes of a storage, of which a failed one is final: the system reports the failure once, and forgets what it has not written. Nothing that is
/// written after it would be sure. Only one runs at a time: the kernel, or a drive, reports a failure to one of several, and the others must not succeed
/// before that is known.
#[derive(Debug, Default)]
pub struct Flushes(Arc<FlushState>);

#[derive(Debug, Default)]
struct FlushState {
    has_failed: AtomicBool,
    is_running: Mutex<bool>,
    ended: Condvar,
}

/// A flush that runs, until this is dropped.
#[derive(Debug)]
pub(crate) struct Flushing(Arc<FlushState>);

impl Flushing {
    /// Has it, and all later ones, fail.
    pub(crate) fn fail(&self) {
        self.0
            .has_failed
            .store(!mutant!(FailedFlushForgotten), Ordering::Release);
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        *self.0.is_running.lock() = false;
        self.0.ended.notify_one();
    }
}

impl Flushes {
    /// Checks that none has failed.
    ///
    /// # Errors
    /// One has.
    pub fn check(&self) -> Result<(), Status> {
        match self.0.has_failed.load(Ordering::Acquire) {
            true => Err(Status::WRITE_FAULT.do_not_retry()),
            false => Ok(()),
        }
    }

    /// Begins one, if none runs.
    pub(crate) fn try_begin(&self) -> Option<Flushing> {
        let mut is_running = self.0.is_running.lock();
        let is_first = !std::mem::replace(&mut *is_running, true);
        is_first.then(|| Flushing(self.0.clone()))
    }

    fn begin(&self) -> Flushing {
        let others = self.0.is_running.lock();
        *self.0.ended.wait_while(others, |is_running| *is_running) = true;
        Flushing(self.0.clone())
    }

    /// Runs one, after those that run.
    ///
    /// # Errors
    /// It has failed, or one before it.
    pub fn run(&self, sync: impl FnOnce() -> io::Result<()>) -> Result<(), Status> {
        let flushing = self.begin();
        self.check()?;
        sync().map_err(|_| {
            flushing.fail();
            Status::WRITE_FAULT.do_not_retry()
        })
    }
}

/// Memory of this process, which ends with it.
#[derive(Debug)]
pub struct MemoryBackend(AnonymousMemory);

impl MemoryBackend {
    /// Makes one of so many zero bytes.
    ///
    /// # Errors
    /// The system does not map that much.
    pub fn new(bytes: u64) -> io::Result<MemoryBackend> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        Ok(MemoryBackend(AnonymousMemory::new(bytes)?))
    }
}

impl Backend for MemoryBackend {
    fn bytes(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        self.0.read(offset, out).map_err(|_| Status::READ_ERROR)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let written = self.0.write_in_any_order(offset, bytes);
        written.map_err(|_| Status::WRITE_FAULT)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        const ZEROES: [u8; 4096] = [0; 4096];
        for at in (0..length).step_by(ZEROES.len()) {
            let part = (length - at).min(ZEROES.len() as u64) as usize;
            self.write(offset + at, &ZEROES[..part])?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Status> {
        Ok(())
    }
}

/// Stores nothing and reads as zeros, so that it costs nothing beside the fabric.
#[derive(Debug)]
pub struct NullBackend(
    /// Its size in bytes.
    pub u64,
);

impl Backend for NullBackend {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Status> {
        out.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Status> {
        Ok(())
    }

    fn write_zeroes(&self, _: u64, _: u64) -> Result<(), Status> {
        Ok(())
    }

    fn flush(&self) -> Result<(), Status> {
        Ok(())
    }
}

/// Reason for which a file is no backend.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It could not be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Somebody else uses it.
    #[error("{} is in use: end what uses it, or export another file", .0.display())]
    InUse(PathBuf),
    /// It is neither a file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    Kind(PathBuf),
}

/// A file or a block device, opened for this process alone: for direct I/O, which spares the copy by the page cache, if it takes blocks of the
/// namespace's size.
#[derive(Debug)]
pub struct FileBackend {
    file: Arc<File>,
    /// The opening that keeps others out, if it is another one.
    _lock: Option<File>,
    bytes: AtomicU64,
    is_file: bool,
    flushes: Flushes,
}

impl FileBackend {
    /// Opens a file or a block device, of which all accesses will be multiples of `block_bytes`.
    ///
    /// # Errors
    /// It does not open, is in use, or is something else.
    pub fn open(path: &Path, read_only: bool, block_bytes: usize) -> Result<FileBackend, OpenError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::ResourceBusy => OpenError::InUse(path.to_owned()),
            _ => OpenError::Open {
                path: path.to_owned(),
                source,
            },
        };
        let open = |flags: OFlags| {
            let mut options = OpenOptions::new();
            options.read(true).write(!read_only);
            options
                .custom_flags(flags.bits() as i32)
                .open(path)
                .map_err(failed)
        };
        // A pipe would have the open wait for its other end.
        let mut file = open(OFlags::NONBLOCK)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        if kind.is_block_device() {
            // One that is mounted, or opened so by another process, is busy.
            file = open(OFlags::NONBLOCK | OFlags::EXCL)?;
        } else if kind.is_file() {
            flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
                Errno::WOULDBLOCK => OpenError::InUse(path.to_owned()),
                error => failed(error.into()),
            })?;
        } else {
            return Err(OpenError::Kind(path.to_owned()));
        }
        // An io_uring carries out what is open so on this thread, even where the file system would block it.
        let flags = fcntl_getfl(&file).map_err(|error| failed(error.into()))?;
        fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK)).map_err(|error| failed(error.into()))?;
        // A device has no length of its own.
        let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let direct = open_direct(&file, read_only, block_bytes);
        let (file, lock) = match direct {
            Some(direct) => (direct, Some(file)),
            None => (file, None),
        };
        Ok(FileBackend {
            file: Arc::new(file),
            _lock: lock,
            bytes: AtomicU64::new(bytes),
            is_file: kind.is_file(),
            flushes: Flushes::default(),
        })
    }
}

/// Opens a file once more, for direct I/O. `None` if its system has none, or none of blocks of this size.
fn open_direct(file: &File, read_only: bool, block_bytes: usize) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only);
    options.custom_flags(OFlags::DIRECT.bits() as i32);
    // The path may name another file by now.
    let direct = options.open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    // Most file systems refuse what is no multiple of their device's block; some carry it out without direct I/O.
    let mut block = Pages::new(block_bytes);
    direct.read_exact_at(&mut block, block_bytes as u64).ok()?;
    Some(direct)
}

/// Returns the status for an error of a write.
fn write_status(error: &io::Error) -> Status {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Status::CAPACITY_EXCEEDED.do_not_retry(),
        _ => Status::WRITE_FAULT,
    }
}

impl Backend for FileBackend {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    fn measure(&self, block_bytes: u64) -> io::Result<()> {
        // Another thread may use the file: it has one position, but nobody uses that.
        let bytes = (&*self.file).seek(SeekFrom::End(0))?;
        if bytes < block_bytes {
            let error = format!("it has {bytes} bytes now, less than a block of {block_bytes}");
            return Err(io::Error::other(error));
        }
        self.bytes.store(bytes, Ordering::Release);
        Ok(())
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn file(&self, direction: Direction) -> Option<&Arc<File>> {
        // After a failed flush a write has a status that the kernel does not know.
        let is_taken = direction == Direction::Read || self.flushes.check().is_ok();
        is_taken.then_some(&self.file)
    }

    fn has_write_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        self.file
            .read_exact_at(out, offset)
            .map_err(|_| Status::READ_ERROR)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.flushes.check()?;
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| write_status(&error))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.flushes.check()?;
        let mode = match self.is_file {
            true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        if fallocate(&self.file, mode, offset, length).is_ok() {
            return Ok(());
        }
        // The file system has no holes.
        let zeroes = Pages::new(length.min(64 << 10) as usize);
        for at in (0..length).step_by(zeroes.len()) {
            let part = (length - at).min(zeroes.len() as u64) as usize;
            self.write(offset + at, &zeroes[..part])?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Status> {
        self.flushes.run(|| self.file.sync_data())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(len: usize, byte: u8) -> Pages {
        let mut pages = Pages::new(len);
        pages.fill(byte);
        pages
    }

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    #[test]
    fn file__is_for_one_target_alone() {
        let file = file(8192);
        let backend = FileBackend::open(file.path(), false, 512).unwrap();
        assert_eq!(backend.bytes(), 8192);
        assert!(matches!(
            FileBackend::open(file.path(), true, 512),
            Err(OpenError::InUse(_))
        ));
        drop(backend);
        assert!(FileBackend::open(file.path(), true, 512).is_ok());
    }

    #[test]
    fn file__is_read_directly_if_its_blocks_allow_it() {
        let file = file(1 << 20);
        let is_direct = |block_bytes| {
            let backend = FileBackend::open(file.path(), false, block_bytes).unwrap();
            fcntl_getfl(&*backend.file).unwrap().contains(OFlags::DIRECT)
        };
        let mut direct = OpenOptions::new();
        direct.read(true).custom_flags(OFlags::DIRECT.bits() as i32);
        // Such as a file in memory of an older system.
        let takes_direct = direct.open(file.path()).is_ok();
        assert_eq!(is_direct(65536), takes_direct);
    }

    #[test]
    fn file__writes_zeroes_and_reads_them() {
        let file = file(1 << 20);
        let backend = FileBackend::open(file.path(), false, 512).unwrap();
        backend.write(0, &pages(1 << 20, 7)).unwrap();
        backend.write_zeroes(4096, 299_520).unwrap();
        backend.flush().unwrap();
        let mut bytes = pages(1 << 20, 1);
        backend.read(0, &mut bytes).unwrap();
        let zero = |at: &usize| (4096..303_616).contains(at);
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(at, byte)| *byte == if zero(&at) { 0 } else { 7 })
        );
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), 1 << 20);
    }

    #[test]
    fn file__a_failed_flush_is_final() {
        let file = file(4096);
        let backend = FileBackend::open(file.path(), false, 512).unwrap();
        let failed = Err(Status::WRITE_FAULT.do_not_retry());
        let sync = || Err(io::Error::from(io::ErrorKind::StorageFull));
        assert_eq!(backend.flushes.run(sync), failed);
        assert_eq!(backend.write(0, &pages(512, 1)), failed);
        assert_eq!(backend.write_zeroes(0, 4096), failed);
        assert_eq!(backend.flush(), failed);
        assert_eq!(backend.read(0, &mut pages(512, 0)), Ok(()));
    }

    #[test]
    fn open__refuses_what_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert!(matches!(
            FileBackend::open(&pipe, true, 512),
            Err(OpenError::Kind(_))
        ));
        assert!(matches!(
            FileBackend::open(folder.path(), true, 512),
            Err(OpenError::Kind(_))
        ));
        let missing = FileBackend::open(&folder.path().join("none"), true, 512);
        assert!(matches!(missing, Err(OpenError::Open { .. })));
    }

    #[test]
    fn memory__writes_zeroes_of_any_length() {
        let backend = MemoryBackend::new(1 << 20).unwrap();
        backend.write(0, &pages(1 << 20, 7)).unwrap();
        backend.write_zeroes(512, 10_000).unwrap();
        let mut bytes = pages(1 << 20, 1);
        backend.read(0, &mut bytes).unwrap();
        assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), 10_000);
    }
}
