//! Storage of namespaces.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::Memory;
use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::Status;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;

/// The storage of a namespace. Ranges are in bytes and within [`Backend::bytes`]; their callers have checked that.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns its size in bytes.
    fn bytes(&self) -> u64;

    /// Returns true if a call may wait for a medium: then it must not run on a reactor's thread.
    fn may_wait(&self) -> bool {
        false
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

    /// Makes durable what was written before.
    fn flush(&self) -> Result<(), Status>;
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
    #[error("{} is in use by another process: end that, or export another file", .0.display())]
    InUse(PathBuf),
    /// It is neither a file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    Kind(PathBuf),
}

/// A file or a block device, opened for this process alone.
#[derive(Debug)]
pub struct FileBackend {
    file: File,
    bytes: u64,
    is_file: bool,
    /// A flush has failed. The kernel has dropped the pages and reports that once: nothing that is written after it would be sure.
    has_failed: AtomicBool,
    /// The kernel reports a failure to one of several flushes at a time: the others must not succeed before that is known.
    flushing: Mutex<()>,
}

impl FileBackend {
    /// Opens a file or a block device.
    ///
    /// # Errors
    /// It does not open, is in use, or is something else.
    pub fn open(path: &Path, read_only: bool) -> Result<FileBackend, OpenError> {
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
        // A device has no length of its own.
        let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(FileBackend {
            file,
            bytes,
            is_file: kind.is_file(),
            has_failed: AtomicBool::new(false),
            flushing: Mutex::new(()),
        })
    }

    fn check(&self) -> Result<(), Status> {
        match self.has_failed.load(Ordering::Acquire) {
            true => Err(Status::WRITE_FAULT.do_not_retry()),
            false => Ok(()),
        }
    }
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
        self.bytes
    }

    fn may_wait(&self) -> bool {
        true
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
        self.check()?;
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| write_status(&error))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.check()?;
        let mode = match self.is_file {
            true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        if fallocate(&self.file, mode, offset, length).is_ok() {
            return Ok(());
        }
        // The file system has no holes.
        static ZEROES: [u8; 65536] = [0; 65536];
        for at in (0..length).step_by(ZEROES.len()) {
            let part = (length - at).min(ZEROES.len() as u64) as usize;
            self.write(offset + at, &ZEROES[..part])?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Status> {
        let _alone = self.flushing.lock();
        self.check()?;
        self.file.sync_data().map_err(|_| {
            self.has_failed.store(true, Ordering::Release);
            Status::WRITE_FAULT.do_not_retry()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    #[test]
    fn file__is_for_one_target_alone() {
        let file = file(8192);
        let backend = FileBackend::open(file.path(), false).unwrap();
        assert_eq!(backend.bytes(), 8192);
        assert!(matches!(
            FileBackend::open(file.path(), true),
            Err(OpenError::InUse(_))
        ));
        drop(backend);
        assert!(FileBackend::open(file.path(), true).is_ok());
    }

    #[test]
    fn file__writes_zeroes_and_reads_them() {
        let file = file(1 << 20);
        let backend = FileBackend::open(file.path(), false).unwrap();
        backend.write(0, &[7; 1 << 20]).unwrap();
        backend.write_zeroes(4096, 300_000).unwrap();
        backend.flush().unwrap();
        let mut bytes = vec![1; 1 << 20];
        backend.read(0, &mut bytes).unwrap();
        let zero = |at: &usize| (4096..304_096).contains(at);
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
        let backend = FileBackend::open(file.path(), false).unwrap();
        backend.has_failed.store(true, Ordering::Release);
        let failed = Err(Status::WRITE_FAULT.do_not_retry());
        assert_eq!(backend.write(0, &[1]), failed);
        assert_eq!(backend.write_zeroes(0, 4096), failed);
        assert_eq!(backend.flush(), failed);
        assert_eq!(backend.read(0, &mut [0]), Ok(()));
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
        assert!(matches!(FileBackend::open(&pipe, true), Err(OpenError::Kind(_))));
        assert!(matches!(
            FileBackend::open(folder.path(), true),
            Err(OpenError::Kind(_))
        ));
        let missing = FileBackend::open(&folder.path().join("none"), true);
        assert!(matches!(missing, Err(OpenError::Open { .. })));
    }

    #[test]
    fn memory__writes_zeroes_of_any_length() {
        let backend = MemoryBackend::new(1 << 20).unwrap();
        backend.write(0, &[7; 1 << 20]).unwrap();
        backend.write_zeroes(512, 10_000).unwrap();
        let mut bytes = vec![1; 1 << 20];
        backend.read(0, &mut bytes).unwrap();
        assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), 10_000);
    }
}
