//! Persistent memory, mapped: DAX files and DAX devices.

use std::any::Any;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_rnic::{Atomic, Fault, Memory, Placement};

use crate::PersistenceDomain;
use crate::domain::{device_folder, domain_of, is_in_memory};
use crate::file::FileMemory;
use crate::lease::{FileLease, FileWatch, Held, Wanted};
use crate::mapping::Mapping;
use crate::persist::{self, Cpu};

/// Bytes whose pages one call makes present: few enough that a signal to end the program does not wait for long.
const POPULATE_BYTES: usize = 64 << 20;

/// Why a file is not mapped as persistent memory.
#[derive(Debug, thiserror::Error)]
pub enum DaxError {
    /// It is not on persistent memory, or its file system has no direct access.
    #[error("its file system offers no direct access to persistent memory (mount -o dax)")]
    NotDax,
    /// It was opened for reading only.
    #[error("it is open only for reading")]
    ReadOnly,
    /// The system does not know what survives, and nobody declared it.
    #[error("the system does not report the persistence domain of this memory: declare it")]
    UnknownDomain,
    /// Another process could shorten it at any time.
    #[error("another process has it open")]
    InUse,
    /// A process gets no lease on a file that it does not own, and so would not be warned when the file is shortened.
    #[error("it belongs to another user")]
    NotOwner,
    /// This processor has no instructions that bring bytes out of its caches, or none that rdmux knows.
    #[error("the processor has no instruction to write back cache lines")]
    Processor,
    /// A call of the system failed.
    #[error("mapping it failed: {0}")]
    Io(#[from] io::Error),
}

/// Persistent memory of this host that is mapped: a file on a file system with direct access (DAX), or a DAX device.
///
/// A file is mapped under a lease: before another process opens or truncates it, the mapping is given up. From then on, until the
/// others have closed it, the file is reached through the kernel as [`FileMemory`] does, with its faults.
#[derive(Debug)]
pub struct DaxMemory {
    mapping: Arc<Mapping>,
    len: u64,
    domain: PersistenceDomain,
    cpu: Cpu,
    /// Set for a file, `None` for a device.
    file: Option<Leased>,
    /// Set once an RNIC writes the pages: then bytes are where the RNIC puts them, and not where [`Memory::write`] does.
    written_past: AtomicBool,
}

#[derive(Debug)]
struct Leased {
    lease: FileLease,
    memory: Arc<FileMemory>,
    /// Number of writes through the kernel so far, and of those that a flush has brought to the medium.
    written: AtomicU64,
    settled: AtomicU64,
}

/// Way to the bytes.
enum Way<'a> {
    /// The mapping; of a file, while this is held.
    Mapped(Option<Held<'a>>),
    Kernel(&'a Leased),
}

impl DaxMemory {
    /// Maps a file, if it is on persistent memory with direct access. `declared` says what survives if the system does not know it,
    /// or knows less; a file in memory (tmpfs) is mapped if it is declared to survive.
    pub fn map(file: Arc<FileMemory>, declared: Option<PersistenceDomain>) -> Result<DaxMemory, DaxError> {
        let (domain, cpu, mapping) = mapping_of(&file, declared)?;
        let (mapping, len) = (Arc::new(mapping), file.len());
        let lease = FileLease::take(file.file().clone(), {
            let (mapping, file) = (mapping.clone(), file.clone());
            move || file.check(0, len).is_ok() && populate(&mapping).is_ok()
        });
        let lease = lease.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => DaxError::InUse,
            io::ErrorKind::PermissionDenied => DaxError::NotOwner,
            _ => error.into(),
        })?;
        prepare(file.file(), mapping.len())?;
        populate(&mapping)?;
        Ok(DaxMemory {
            mapping,
            len,
            domain,
            cpu,
            file: Some(Leased {
                lease,
                memory: file,
                written: AtomicU64::new(0),
                settled: AtomicU64::new(0),
            }),
            written_past: AtomicBool::new(false),
        })
    }

    /// Returns the file, or `None` for a device.
    pub fn file(&self) -> Option<&FileMemory> {
        self.file.as_ref().map(|leased| &*leased.memory)
    }

    /// Maps a whole DAX device (`/dev/dax0.0`). `declared` says what survives; without it, the system's report about the device
    /// does.
    pub fn device(path: &Path, declared: Option<PersistenceDomain>) -> Result<DaxMemory, DaxError> {
        let cpu = persist::cpu().ok_or(DaxError::Processor)?;
        let file = File::options().read(true).write(true).open(path)?;
        let meta = file.metadata()?;
        let not_dax = || io::Error::new(io::ErrorKind::InvalidInput, "not a DAX device");
        if !meta.file_type().is_char_device() {
            return Err(not_dax().into());
        }
        let folder = device_folder("char", meta.rdev())?;
        let subsystem = folder.join("subsystem").canonicalize()?;
        if subsystem.file_name() != Some("dax".as_ref()) {
            return Err(not_dax().into());
        }
        let size = folder
            .ancestors()
            .find_map(|folder| fs::read_to_string(folder.join("size")).ok())
            .and_then(|size| size.trim().parse::<u64>().ok())
            .filter(|size| (1..=isize::MAX as u64).contains(size))
            .ok_or_else(not_dax)?;
        // Such a device has no file system whose records could lag behind, and nobody can shorten it.
        let mapping = Mapping::synchronous(&file, size as usize)?;
        Ok(DaxMemory {
            mapping: Arc::new(mapping),
            len: size,
            domain: declared
                .or_else(|| domain_of(&folder))
                .unwrap_or(PersistenceDomain::None),
            cpu,
            file: None,
            written_past: AtomicBool::new(false),
        })
    }

    /// Returns what survives a loss of power.
    pub fn domain(&self) -> PersistenceDomain {
        self.domain
    }

    /// Returns whether the mapping is in use, and no other process has the file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.way(), Way::Mapped(_))
    }

    /// Watches over a file: calls `tell` when another process wants to open it. That process waits until [`FileWatch::let_go`];
    /// from then on the kernel copies. Returns `None` for a device, of which there is nothing to watch.
    pub fn watch(&self, tell: impl Fn(Wanted) + Send + Sync + 'static) -> Option<FileWatch> {
        Some(self.file.as_ref()?.lease.watch(tell))
    }

    /// Returns the mapping, for an RNIC.
    pub(crate) fn hand_out(&self) -> &Mapping {
        self.written_past.store(true, Ordering::Release);
        &self.mapping
    }

    /// Returns whether bytes that a flush covers may be in the caches.
    fn may_be_cached(&self) -> bool {
        self.through() && self.written_past.load(Ordering::Acquire)
    }

    #[inline]
    fn way(&self) -> Way<'_> {
        match &self.file {
            None => Way::Mapped(None),
            Some(leased) => match leased.lease.hold() {
                Some(held) => Way::Mapped(Some(held)),
                None => Way::Kernel(leased),
            },
        }
    }

    /// Returns whether everything that was written is in the domain after a fence.
    fn is_settled(&self) -> bool {
        let settled = |leased: &Leased| leased.is_settled() && leased.lease.hold().is_some();
        self.file.as_ref().is_none_or(settled)
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), Fault> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        fits.then_some(()).ok_or(Fault::Unmapped)
    }

    /// Returns whether bytes must leave the caches to survive. In larger domains they need not, and if nothing survives it is no
    /// use.
    fn through(&self) -> bool {
        self.domain == PersistenceDomain::Adr
    }
}

/// Returns what is needed to map a file, or why it cannot be mapped.
fn mapping_of(
    file: &FileMemory,
    declared: Option<PersistenceDomain>,
) -> Result<(PersistenceDomain, Cpu, Mapping), DaxError> {
    if file.is_read_only() {
        return Err(DaxError::ReadOnly);
    }
    let len = usize::try_from(file.len())
        .ok()
        .and_then(|len| len.checked_next_multiple_of(rustix::param::page_size()))
        .filter(|len| *len <= isize::MAX as usize)
        .ok_or(DaxError::NotDax)?;
    let (mapping, found) = if is_in_memory(file.file())? {
        declared.ok_or(DaxError::NotDax)?;
        (Mapping::of_file(file.file(), 0, len, true)?, None)
    } else {
        let mapping = Mapping::synchronous(file.file(), len).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => DaxError::NotDax,
            _ => error.into(),
        })?;
        let device = device_folder("block", file.file().metadata()?.dev());
        (mapping, device.ok().and_then(|device| domain_of(&device)))
    };
    let domain = declared.or(found).ok_or(DaxError::UnknownDomain)?;
    Ok((domain, persist::cpu().ok_or(DaxError::Processor)?, mapping))
}

/// Makes the file system allocate and clear every block, and record that, through a mapping that may do so in bulk: through a
/// synchronous one each page would wait for a record of its own.
fn prepare(file: &File, len: usize) -> io::Result<()> {
    populate(&Mapping::of_file(file, 0, len, true)?)?;
    file.sync_all()
}

/// Makes every page present, so that no later access can fail.
fn populate(mapping: &Mapping) -> io::Result<()> {
    for offset in (0..mapping.len()).step_by(POPULATE_BYTES) {
        mapping.populate(offset as u64, POPULATE_BYTES.min(mapping.len() - offset))?;
    }
    Ok(())
}

impl Memory for DaxMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.check(offset, out.len() as u64)?;
        if self.through()
            && let Some(leased) = &self.file
            && !leased.is_settled()
        {
            // The answer to a READ promises that earlier writes are in the domain, and the kernel wrote some of them.
            leased.settle(0, self.len)?;
        }
        match self.way() {
            Way::Mapped(_held) => {
                if self.through() {
                    // Earlier writes must be in the domain when the READ is answered.
                    persist::fence();
                }
                self.mapping.read(offset, out)
            }
            Way::Kernel(leased) => leased.memory.read(offset, out),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.check(offset, bytes.len() as u64)?;
        match self.way() {
            Way::Mapped(_held) if self.through() => self.mapping.write_through(self.cpu, offset, bytes),
            Way::Mapped(_held) => self.mapping.write(offset, bytes),
            Way::Kernel(leased) => {
                let result = leased.memory.write(offset, bytes);
                leased.written.fetch_add(1, Ordering::AcqRel);
                result
            }
        }
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.check(offset, 8)?;
        match self.way() {
            Way::Mapped(_held) => {
                let before = self.mapping.atomic(offset, atomic)?;
                if self.through() {
                    self.mapping.write_back(self.cpu, offset, 8)?;
                }
                Ok(before)
            }
            Way::Kernel(leased) => {
                let result = leased.memory.atomic(offset, atomic);
                leased.written.fetch_add(1, Ordering::AcqRel);
                result
            }
        }
    }

    fn placement(&self) -> Placement {
        match self.domain {
            PersistenceDomain::None => Placement::GLOBAL,
            _ => Placement::GLOBAL | Placement::PERSISTENT,
        }
    }

    /// Returns whether a fence is enough for a flush, whatever its length. A flush through the kernel waits for the medium; a file
    /// that changes hands between this answer and the flush holds up the engine once.
    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT) || self.is_settled() && !self.may_be_cached()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    /// Returns the pages of a device. The mapping of a file is given up when another process wants the file, which an RNIC would
    /// not notice.
    fn pages(&self) -> Option<&dyn Any> {
        self.file.is_none().then_some(self as &dyn Any)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if !self.placement().contains(placement) {
            return Err(Fault::NotSupported);
        }
        self.check(offset, length)?;
        if placement.contains(Placement::PERSISTENT) && self.may_be_cached() {
            self.mapping.write_back(self.cpu, offset, length)?;
        }
        persist::fence();
        let medium = placement.contains(Placement::PERSISTENT);
        if medium
            && let Some(leased) = &self.file
            && !self.is_settled()
        {
            return leased.settle(offset, length);
        }
        match self.way() {
            Way::Mapped(_held) => Ok(()),
            // The file changed hands since the check above.
            Way::Kernel(leased) if medium => leased.settle(offset, length),
            Way::Kernel(leased) => leased.memory.check(offset, length),
        }
    }
}

impl Leased {
    fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire) >= self.written.load(Ordering::Acquire)
    }

    /// Brings to the medium what was written through the kernel, and what was written through the mapping before.
    fn settle(&self, offset: u64, length: u64) -> Result<(), Fault> {
        // Writes from here on belong to the next flush.
        let written = self.written.load(Ordering::Acquire);
        self.memory.flush_to_medium(offset, length)?;
        self.settled.fetch_max(written, Ordering::AcqRel);
        Ok(())
    }
}
