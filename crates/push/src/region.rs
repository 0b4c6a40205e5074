//! Regions: memory that a server offers by name, and the progress of uploads into it.

use std::any::Any;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rdmux_memory::{AnonymousMemory, DaxError, DaxMemory, FileMemory, PersistenceDomain};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{Atomic, Device, Fault, Features, Medium, Memory, Placement, Reach};
pub use rdmux_wire::push::Ways;
use rdmux_wire::push::{self, Domain, ErrorCode, Name};

/// Maximum number of uploads that a region remembers; it forgets the oldest first.
const UPLOADS_MAX: usize = 64;

/// Reason why a region cannot be offered.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct RegionError {
    what: String,
    source: io::Error,
}

/// Memory that is offered by name.
#[derive(Debug)]
pub struct Region {
    name: Name,
    memory: Arc<dyn Memory>,
    domain: Domain,
    placed_in_domain: bool,
    read_only: bool,
    place: Place,
    sizing: Option<Sizing>,
    not_mapped: Option<String>,
    state: Mutex<RegionState>,
}

/// The place of a region's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file, on a file system of this kind, reached through the kernel.
    File(PathBuf, String),
    /// In a file in persistent memory, on a file system of this kind, mapped.
    Dax(PathBuf, String),
    /// In a device of persistent memory, mapped.
    DaxDevice(PathBuf),
    /// On a block device, reached through the kernel.
    BlockDevice(PathBuf),
    /// In the server's memory.
    Memory,
    /// Elsewhere.
    Other,
}

/// The effect of a requested size on a region's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizing {
    /// There was no file.
    Created,
    /// The file was shorter.
    Grown {
        /// Its bytes before.
        from: u64,
    },
    /// The file was as long, or longer.
    Kept,
}

#[derive(Debug, Default)]
struct RegionState {
    /// Oldest first.
    uploads: Vec<Arc<Upload>>,
    failed: Option<Fault>,
}

impl Region {
    /// Opens a file, or a DAX device; `size` creates a file or grows it to that many bytes. Persistent memory with direct
    /// access is mapped; for other files the kernel copies.
    pub fn file(name: Name, path: &Path, size: Option<u64>, read_only: bool) -> Result<Region, RegionError> {
        Region::file_in(name, path, size, read_only, None)
    }

    /// Does the same in a declared domain, which the system does not know, or underrates: for persistent memory, and for files
    /// in memory (tmpfs), which are then mapped as well.
    pub fn file_in(
        name: Name,
        path: &Path,
        size: Option<u64>,
        read_only: bool,
        declared: Option<Domain>,
    ) -> Result<Region, RegionError> {
        let failed = |source: io::Error| RegionError {
            what: path.display().to_string(),
            source: match source.kind() {
                io::ErrorKind::NotFound if size.is_none() => {
                    io::Error::new(source.kind(), "no such file: create it with ,size=N")
                }
                _ => source,
            },
        };
        if matches!(declared, Some(Domain::None | Domain::File)) {
            let why = "only ADR, eADR or the whole system can be declared as persistence domain";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let declared = declared.map(|domain| match domain {
            Domain::None => PersistenceDomain::None,
            Domain::File => PersistenceDomain::File,
            Domain::Adr => PersistenceDomain::Adr,
            Domain::Eadr => PersistenceDomain::Eadr,
            Domain::WholeSystem => PersistenceDomain::WholeSystem,
        });
        let meta = std::fs::metadata(path);
        // Only people see this path, so that a path that has no absolute form does no harm.
        let shown = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let kind = meta.as_ref().ok().map(|meta| meta.file_type());
        let is_block_device = kind.is_some_and(|kind| kind.is_block_device());
        if is_block_device || kind.is_some_and(|kind| kind.is_char_device()) {
            let refused = |why: &str| failed(io::Error::new(io::ErrorKind::InvalidInput, why));
            if size.is_some() {
                return Err(refused("a device cannot be resized: leave out size="));
            }
            if is_block_device {
                if declared.is_some() {
                    return Err(refused(
                        "a persistence domain can be declared only for mapped memory",
                    ));
                }
                let memory = FileMemory::device(path, read_only).map_err(failed)?;
                let domain = domain_of(memory.domain());
                return Ok(Region {
                    place: Place::BlockDevice(shown),
                    ..Region::new(name, Arc::new(memory), domain, read_only)
                });
            }
            let memory = DaxMemory::device(path, declared).map_err(|error| failed(io_error(error)))?;
            return Ok(Region {
                place: Place::DaxDevice(shown),
                ..Region::dax(name, memory, read_only)
            });
        }
        if let (Some(size), false) = (size, read_only) {
            let had = meta
                .as_ref()
                .map_or(0, |meta| meta.len().max(meta.blocks().saturating_mul(512)));
            // Some file systems find the lack of space only after minutes of allocating.
            check_space(&shown, size, size.saturating_sub(had)).map_err(failed)?;
        }
        let is_new = size.is_some() && std::fs::symlink_metadata(path).is_err();
        let sizing = size.map(|size| match &meta {
            Err(_) => Sizing::Created,
            Ok(meta) if meta.len() < size => Sizing::Grown { from: meta.len() },
            Ok(_) => Sizing::Kept,
        });
        let memory = FileMemory::open(path, size, read_only).map_err(|error| {
            if is_new {
                // The file holds nothing: a disk that is full must not keep it.
                let _ = std::fs::remove_file(path);
            }
            failed(error)
        })?;
        let memory = Arc::new(memory);
        let kind = file_system_of(&shown);
        let why = match DaxMemory::map(memory.clone(), declared) {
            Ok(memory) => {
                return Ok(Region {
                    place: Place::Dax(shown, kind),
                    sizing,
                    ..Region::dax(name, memory, read_only)
                });
            }
            Err(why) if declared.is_some() => {
                let why = format!(
                    "a persistence domain can be declared only for mapped memory, and this is not mapped: {why}"
                );
                return Err(failed(io::Error::new(io::ErrorKind::Unsupported, why)));
            }
            Err(DaxError::NotDax | DaxError::ReadOnly) => None,
            Err(why) => Some(why.to_string()),
        };
        let domain = domain_of(memory.domain());
        Ok(Region {
            place: Place::File(shown, kind),
            sizing,
            not_mapped: why,
            ..Region::new(name, memory, domain, read_only)
        })
    }

    fn dax(name: Name, memory: DaxMemory, read_only: bool) -> Region {
        let domain = domain_of(memory.domain());
        Region::new(name, Arc::new(memory), domain, read_only).placed_in_domain()
    }

    /// Allocates pages of this process, zero at first.
    pub fn anonymous(name: Name, bytes: u64) -> Result<Region, RegionError> {
        let memory = usize::try_from(bytes)
            .ok()
            .filter(|bytes| *bytes <= isize::MAX as usize)
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
            .and_then(AnonymousMemory::new)
            .map_err(|source| RegionError {
                what: format!("memory region {name} of {bytes} bytes"),
                source,
            })?;
        // The process maps whole pages; the region offers only the bytes asked for.
        let memory = Truncated(memory, bytes);
        Ok(Region {
            place: Place::Memory,
            ..Region::new(name, Arc::new(memory), Domain::None, false)
        })
    }

    /// Offers any memory.
    pub fn new(name: Name, memory: Arc<dyn Memory>, domain: Domain, read_only: bool) -> Region {
        Region {
            name,
            memory,
            domain,
            placed_in_domain: false,
            read_only,
            place: Place::Other,
            sizing: None,
            not_mapped: None,
            state: Mutex::default(),
        }
    }

    /// Declares that the region's memory places bytes straight into its persistence domain, and has them there before it
    /// answers a READ.
    pub fn placed_in_domain(mut self) -> Region {
        self.placed_in_domain = true;
        self
    }

    /// Makes persistent flushes do nothing and claim to be done: this proves that a crash test can fail.
    pub fn without_flush(mut self) -> Region {
        self.memory = Arc::new(WithoutFlush(self.memory));
        self
    }

    /// Returns its name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Returns its size.
    pub fn bytes(&self) -> u64 {
        self.memory.len()
    }

    /// Returns how much of it survives a loss of power.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Returns the kinds of flush that it offers.
    pub fn placement(&self) -> Placement {
        self.memory.placement()
    }

    /// Returns the ways to durability that it offers.
    pub fn ways(&self) -> Ways {
        let durable = self.domain != Domain::None && self.placement().contains(Placement::PERSISTENT);
        let mut ways = Ways::empty();
        ways.set(Ways::FLUSH | Ways::SOFTWARE_FLUSH, durable);
        ways.set(Ways::READ_AFTER_WRITE, durable && self.placed_in_domain);
        ways
    }

    /// Returns the ways to durability on a device that accesses the region's bytes by `reach`.
    pub fn ways_on(&self, device: &Device, reach: Reach) -> Ways {
        let mut ways = self.ways();
        if device.writes_by_processor() {
            return ways;
        }
        // The platform determines where an RNIC's writes are placed (docs/persistence-model.md).
        ways.remove(Ways::READ_AFTER_WRITE);
        let flushes = Features::FLUSH_GLOBAL | Features::FLUSH_PERSISTENT;
        if reach != Reach::Direct || !device.features().contains(flushes) {
            ways.remove(Ways::FLUSH);
            // This holds also for a region that keeps nothing: there it is the way to visibility for every processor.
            ways.insert(Ways::SOFTWARE_FLUSH);
        }
        ways
    }

    /// Returns how a device accesses its bytes.
    pub fn reach(&self, device: &Device) -> Reach {
        device.reach(&*self.memory)
    }

    /// Returns whether nobody may write to it.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the place of its bytes.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Returns what became of its file when it was opened with a size.
    pub fn sizing(&self) -> Option<Sizing> {
        self.sizing
    }

    /// Checks that the path of its file leads to the file that it has open, which may wait for the medium. Another program may have
    /// removed, renamed or replaced the file: bytes written here would then not be where the path's readers look, and may end with this
    /// process.
    pub(crate) fn check_place(&self) -> Result<(), (ErrorCode, String)> {
        let (Place::File(path, _) | Place::Dax(path, _), Some(memory)) = (&self.place, self.memory.as_any())
        else {
            return Ok(());
        };
        let file = memory.downcast_ref::<FileMemory>();
        let file = file.or_else(|| memory.downcast_ref::<DaxMemory>()?.file());
        if file.is_none_or(|file| file.is_at(path)) {
            return Ok(());
        }
        let text = format!(
            "region {}: {} is not the file that the server opened (it was removed, renamed or replaced): restart the server to serve what \
             is there now",
            self.name,
            path.display()
        );
        Err((ErrorCode::Io, text))
    }

    /// Returns why a file on persistent memory is accessed through the kernel all the same.
    pub fn not_mapped(&self) -> Option<&str> {
        self.not_mapped.as_deref()
    }

    /// Returns its bytes.
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Returns the failure of its medium, which is final.
    pub fn failed(&self) -> Option<Fault> {
        self.lock().failed
    }

    /// Returns the description for clients. `transfer` is the upload that they ask about, 0 for the last.
    pub fn describe(&self, transfer: u64) -> push::Region {
        let state = self.lock();
        let upload = match transfer {
            0 => state.uploads.last(),
            id => state.uploads.iter().find(|upload| upload.id == id),
        };
        push::Region {
            name: self.name.clone(),
            bytes: self.bytes(),
            domain: self.domain,
            placement: self.placement(),
            read_only: self.read_only,
            transfer: upload.map_or(0, |upload| upload.id),
            durable: upload.map_or(0, |upload| upload.durable()),
        }
    }

    /// Makes the memory of a mapping of `offset..offset + length`. If the mapping may write, the durable part of other uploads
    /// ends where it begins.
    pub fn open(self: &Arc<Region>, write: bool, offset: u64, length: u64, transfer: u64) -> Arc<Mapped> {
        let mut upload = None;
        if write {
            let mut state = self.lock();
            for other in &state.uploads {
                if other.id != transfer {
                    other.cut(offset, length);
                }
            }
            if transfer != 0 {
                let known = state.uploads.iter().position(|upload| upload.id == transfer);
                let known = known.map(|at| state.uploads.remove(at));
                let same = known.filter(|upload| upload.base == offset && upload.length == length);
                let this = same.unwrap_or_else(|| Arc::new(Upload::new(transfer, offset, length)));
                if state.uploads.len() == UPLOADS_MAX {
                    state.uploads.remove(0);
                }
                state.uploads.push(this.clone());
                upload = Some(this);
            }
        }
        // The strongest flush that the region offers makes bytes durable here.
        let counts = if self.placement().contains(Placement::PERSISTENT) {
            Placement::PERSISTENT
        } else {
            Placement::GLOBAL
        };
        Arc::new(Mapped {
            region: self.clone(),
            upload,
            counts,
            fault: Mutex::new(None),
        })
    }

    fn lock(&self) -> MutexGuard<'_, RegionState> {
        self.state.lock()
    }
}

/// Progress of an upload: all positions are relative to its first byte. It promises that the first `durable` bytes are the
/// upload's and were flushed after they were placed. When the upload starts again, or somebody else may write, the promise ends
/// at that position: bytes behind it are from the time before.
#[derive(Debug)]
struct Upload {
    id: u64,
    base: u64,
    length: u64,
    progress: Mutex<Progress>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Bytes placed without a gap since the last step back.
    written: u64,
    /// Bytes flushed without a gap: at most `written`.
    durable: u64,
    /// Number of steps back: a flush that ran during one proves nothing about bytes written after it.
    steps_back: u64,
}

impl Progress {
    fn step_back(&mut self, start: u64) {
        self.written = self.written.min(start);
        self.durable = self.durable.min(start);
        self.steps_back += 1;
    }
}

impl Upload {
    fn new(id: u64, base: u64, length: u64) -> Upload {
        Upload {
            id,
            base,
            length,
            progress: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    fn durable(&self) -> u64 {
        self.lock().durable
    }

    /// Returns the part of a range that belongs to the upload, relative to the upload's first byte.
    fn part(&self, offset: u64, length: u64) -> Option<(u64, u64)> {
        let end = offset.saturating_add(length).min(self.base + self.length);
        let start = offset.max(self.base);
        (start < end).then(|| (start - self.base, end - self.base))
    }

    /// Ends the promise where somebody else may write.
    fn cut(&self, offset: u64, length: u64) {
        if let Some((start, _)) = self.part(offset, length) {
            self.lock().step_back(start);
        }
    }

    fn before_write(&self, offset: u64, length: u64) {
        if let Some((start, _)) = self.part(offset, length) {
            let mut progress = self.lock();
            if start < progress.written {
                progress.step_back(start);
            }
        }
    }

    fn after_write(&self, offset: u64, length: u64) {
        if let Some((start, end)) = self.part(offset, length) {
            let mut progress = self.lock();
            if start <= progress.written {
                progress.written = progress.written.max(end);
            }
        }
    }

    fn after_flush(&self, offset: u64, length: u64, before: Progress) {
        if let Some((start, end)) = self.part(offset, length) {
            let mut progress = self.lock();
            if start <= progress.durable && progress.steps_back == before.steps_back {
                progress.durable = progress.durable.max(end.min(before.written));
            }
        }
    }
}

/// The memory of one mapping: the region's memory, with a record of what was written and flushed, and of what failed.
#[derive(Debug)]
pub struct Mapped {
    region: Arc<Region>,
    upload: Option<Arc<Upload>>,
    counts: Placement,
    fault: Mutex<Option<Fault>>,
}

impl Mapped {
    /// Returns the region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the last failure.
    pub fn fault(&self) -> Option<Fault> {
        *self.fault.lock()
    }

    fn note<T>(&self, result: Result<T, Fault>) -> Result<T, Fault> {
        if let Err(fault) = &result {
            *self.fault.lock() = Some(*fault);
        }
        result
    }
}

impl Memory for Mapped {
    fn len(&self) -> u64 {
        self.region.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.note(self.region.memory.read(offset, out))
    }

    fn medium(&self) -> Option<Medium> {
        self.region.memory.medium()
    }

    fn read_at_once(&self, offset: u64, out: &mut [u8]) -> Option<Result<(), Fault>> {
        let read = self.region.memory.read_at_once(offset, out)?;
        Some(self.note(read))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let Some(upload) = &self.upload else {
            return self.note(self.region.memory.write(offset, bytes));
        };
        upload.before_write(offset, bytes.len() as u64);
        self.note(self.region.memory.write(offset, bytes))?;
        upload.after_write(offset, bytes.len() as u64);
        Ok(())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let Some(upload) = &self.upload else {
            return self.note(self.region.memory.atomic(offset, atomic));
        };
        upload.before_write(offset, 8);
        let before = self.note(self.region.memory.atomic(offset, atomic))?;
        upload.after_write(offset, 8);
        Ok(before)
    }

    fn placement(&self) -> Placement {
        self.region.memory.placement()
    }

    fn gathers(&self) -> bool {
        self.region.memory.gathers()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.region.memory.flush_is_immediate(placement)
    }

    /// A device's own writes are not recorded: an upload by such a device resumes from its beginning.
    fn pages(&self) -> Option<&dyn Any> {
        self.region.memory.pages()
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        let before = self.upload.as_ref().map(|upload| *upload.lock());
        let result = self.note(self.region.memory.flush(offset, length, placement));
        if let Err(fault @ (Fault::Io(_) | Fault::NoSpace)) = result {
            self.region.lock().failed = Some(fault);
        }
        result?;
        if let (Some(upload), Some(before)) = (&self.upload, before)
            && placement.contains(self.counts)
        {
            upload.after_flush(offset, length, before);
        }
        Ok(())
    }
}

/// The first bytes of a memory.
#[derive(Debug)]
struct Truncated<M>(M, u64);

impl<M: Memory> Truncated<M> {
    fn check(&self, offset: u64, length: u64) -> Result<(), Fault> {
        let fits = offset.checked_add(length).is_some_and(|end| end <= self.1);
        fits.then_some(()).ok_or(Fault::Unmapped)
    }
}

impl<M: Memory> Memory for Truncated<M> {
    fn len(&self) -> u64 {
        self.1
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.check(offset, out.len() as u64)?;
        self.0.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.check(offset, bytes.len() as u64)?;
        self.0.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.check(offset, 8)?;
        self.0.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        self.0.placement()
    }

    fn gathers(&self) -> bool {
        self.0.gathers()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.0.flush_is_immediate(placement)
    }

    fn pages(&self) -> Option<&dyn Any> {
        self.0.pages()
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.check(offset, length)?;
        self.0.flush(offset, length, placement)
    }
}

/// A memory that skips persistent flushes.
#[derive(Debug)]
struct WithoutFlush(Arc<dyn Memory>);

impl Memory for WithoutFlush {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.0.read(offset, out)
    }

    fn medium(&self) -> Option<Medium> {
        self.0.medium()
    }

    fn read_at_once(&self, offset: u64, out: &mut [u8]) -> Option<Result<(), Fault>> {
        self.0.read_at_once(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.0.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.0.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        self.0.placement()
    }

    fn gathers(&self) -> bool {
        self.0.gathers()
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if !self.placement().contains(placement) {
            return Err(Fault::NotSupported);
        }
        self.0.flush(offset, length, Placement::GLOBAL)
    }
}

fn io_error(error: DaxError) -> io::Error {
    match error {
        DaxError::Io(error) => error,
        other => io::Error::new(io::ErrorKind::Unsupported, other.to_string()),
    }
}

/// Returns the domain as the protocol names it.
fn domain_of(domain: PersistenceDomain) -> Domain {
    match domain {
        PersistenceDomain::None => Domain::None,
        PersistenceDomain::File => Domain::File,
        PersistenceDomain::Adr => Domain::Adr,
        PersistenceDomain::Eadr => Domain::Eadr,
        PersistenceDomain::WholeSystem => Domain::WholeSystem,
    }
}

/// Checks that the file system of a path, which need not exist yet, has `missing` bytes for a file that gets `size`.
fn check_space(path: &Path, size: u64, missing: u64) -> io::Result<()> {
    let is_new = std::fs::symlink_metadata(path).is_err();
    let there = path.parent().filter(|_| is_new).unwrap_or(path);
    // Opening the path explains its faults better than this function can.
    let Ok(stat) = rustix::fs::statvfs(there) else {
        return Ok(());
    };
    // Some blocks are reserved for root; a tmpfs without a limit reports none at all.
    let blocks = if rustix::process::geteuid().is_root() {
        stat.f_bfree
    } else {
        stat.f_bavail
    };
    let free = blocks.saturating_mul(stat.f_frsize);
    if missing <= free || stat.f_blocks == 0 {
        return Ok(());
    }
    let why = format!(
        "No space left: size={size} needs {missing} more bytes, and {free} bytes are free on the file system: use a smaller size, or free \
         space"
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, why))
}

/// Returns the kind of the file system that a path is on, as mounted: `ext4`, `tmpfs`.
pub fn file_system_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mounts = String::from_utf8_lossy(&mounts);
    // Format: mount-id parent major:minor root mount-point options... - type source options. The longest mount point wins, and
    // of equal ones the last.
    let mut best: Option<(usize, &str)> = None;
    for line in mounts.lines() {
        let (Some((mount, rest)), true) = (line.split_once(" - "), line.len() < 1 << 16) else {
            continue;
        };
        let (Some(point), Some(kind)) = (mount.split(' ').nth(4), rest.split(' ').next()) else {
            continue;
        };
        let point = point.replace("\\040", " ");
        if path.starts_with(&point) && best.is_none_or(|(len, _)| point.len() >= len) {
            best = Some((point.len(), kind));
        }
    }
    best.map_or_else(|| "an unknown file system".into(), |(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(bytes: u64) -> Arc<Region> {
        Arc::new(Region::anonymous(Name::new("r").unwrap(), bytes).unwrap())
    }

    fn durable(region: &Region, transfer: u64) -> u64 {
        region.describe(transfer).durable
    }

    /// Two pages of memory; a closure runs during the next flush.
    struct DuringFlush {
        memory: AnonymousMemory,
        next: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    }

    impl Default for DuringFlush {
        fn default() -> DuringFlush {
            DuringFlush {
                memory: AnonymousMemory::new(8192).unwrap(),
                next: Mutex::default(),
            }
        }
    }

    impl DuringFlush {
        fn next(&self, happens: impl FnOnce() + Send + 'static) {
            *self.next.lock() = Some(Box::new(happens));
        }
    }

    impl std::fmt::Debug for DuringFlush {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("DuringFlush").finish_non_exhaustive()
        }
    }

    impl Memory for DuringFlush {
        fn len(&self) -> u64 {
            self.memory.len()
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
            self.memory.read(offset, out)
        }

        fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
            self.memory.write(offset, bytes)
        }

        fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
            self.memory.atomic(offset, atomic)
        }

        fn placement(&self) -> Placement {
            self.memory.placement()
        }

        fn flush_is_immediate(&self, _: Placement) -> bool {
            false
        }

        fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
            self.memory.flush(offset, length, placement)?;
            let happens = self.next.lock().take();
            happens.into_iter().for_each(|happens| happens());
            Ok(())
        }
    }

    #[test]
    fn describe__durable_is_what_was_written_and_then_flushed_without_a_gap() {
        let region = region(1 << 20);
        let memory = region.open(true, 4096, 65536, 7);
        memory.flush(4096, 65536, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 0, "nothing was written");
        memory.write(4096, &[1; 1000]).unwrap();
        assert_eq!(durable(&region, 7), 0, "nothing was flushed");
        memory.flush(4096, 65536, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 1000, "no more than was written");
        memory.write(4096 + 2000, &[1; 1000]).unwrap();
        memory.flush(4096, 3000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 1000, "there is a gap");
        memory.write(4096 + 1000, &[1; 1000]).unwrap();
        memory.write(4096 + 2000, &[1; 1000]).unwrap();
        memory.flush(4096 + 2000, 1000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 1000, "the flush leaves a gap");
        memory.flush(4096 + 1000, 1500, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 2500, "no more than was flushed");
        assert_eq!(region.describe(0).transfer, 7);
        assert_eq!(region.describe(8).transfer, 0);
    }

    #[test]
    fn describe__durable_survives_a_mapping_and_ends_where_it_is_written_again() {
        let region = region(1 << 20);
        let memory = region.open(true, 0, 65536, 7);
        memory.write(0, &[1; 5000]).unwrap();
        memory.flush(0, 5000, Placement::GLOBAL).unwrap();
        drop(memory);
        let memory = region.open(true, 0, 65536, 7);
        assert_eq!(durable(&region, 7), 5000);
        memory.write(3000, &[2; 10]).unwrap();
        assert_eq!(durable(&region, 7), 3000);
        memory.flush(3000, 2000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 3010, "what follows is of the time before");
        drop(region.open(true, 0, 70000, 7));
        assert_eq!(durable(&region, 7), 0, "another range is another upload");
    }

    #[test]
    fn describe__durable_of_an_upload_that_starts_again_counts_flushes_with_writes_under_way() {
        let during = Arc::new(DuringFlush::default());
        let memory: Arc<dyn Memory> = during.clone();
        let region = Arc::new(Region::new(Name::new("r").unwrap(), memory, Domain::None, false));
        let memory = region.open(true, 0, 5000, 7);
        memory.write(0, &[1; 5000]).unwrap();
        memory.flush(0, 5000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 5000);
        drop(memory);

        let memory = region.open(true, 0, 5000, 7);
        memory.write(0, &[2; 1000]).unwrap();
        assert_eq!(durable(&region, 7), 0);
        for start in (0..4000).step_by(1000) {
            let next = memory.clone();
            during.next(move || next.write(start + 1000, &[2; 1000]).unwrap());
            memory.flush(start, 1000, Placement::GLOBAL).unwrap();
            assert_eq!(durable(&region, 7), start + 1000);
        }
        memory.flush(4000, 1000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 5000);

        memory.write(0, &[3; 1000]).unwrap();
        memory.flush(0, 5000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 1000, "what follows is of the time before");
    }

    #[test]
    fn describe__durable_leaves_out_what_is_written_again_during_the_flush() {
        let during = Arc::new(DuringFlush::default());
        let memory: Arc<dyn Memory> = during.clone();
        let region = Arc::new(Region::new(Name::new("r").unwrap(), memory, Domain::None, false));
        let memory = region.open(true, 0, 5000, 7);
        memory.write(0, &[1; 2000]).unwrap();
        let again = memory.clone();
        during.next(move || again.write(500, &[2; 1500]).unwrap());
        memory.flush(0, 2000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 0);
        memory.flush(0, 2000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 2000);

        let other = region.clone();
        memory.write(2000, &[1; 1000]).unwrap();
        during.next(move || drop(other.open(true, 1000, 100, 0)));
        memory.flush(2000, 1000, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 1000, "another writer came");
    }

    #[test]
    fn describe__durable_ends_where_writing_again_failed() {
        let during = Arc::new(DuringFlush::default());
        let memory: Arc<dyn Memory> = during.clone();
        let region = Arc::new(Region::new(Name::new("r").unwrap(), memory, Domain::None, false));
        let memory = region.open(true, 0, 9000, 7);
        memory.write(0, &[1; 8192]).unwrap();
        // This write goes beyond the end of the memory.
        memory.write(4096, &[2; 4097]).unwrap_err();
        memory.flush(0, 8192, Placement::GLOBAL).unwrap();
        assert_eq!(durable(&region, 7), 4096, "nobody knows what is there");
    }

    #[test]
    fn open__a_writer_ends_what_was_durable_of_others() {
        let region = region(1 << 20);
        for id in 1..=2 {
            let memory = region.open(true, id * 65536, 65536, id);
            memory.write(id * 65536, &[1; 5000]).unwrap();
            memory.flush(id * 65536, 5000, Placement::GLOBAL).unwrap();
        }
        drop(region.open(false, 0, 1 << 20, 0));
        assert_eq!((durable(&region, 1), durable(&region, 2)), (5000, 5000));
        drop(region.open(true, 2 * 65536 + 100, 1, 0));
        assert_eq!((durable(&region, 1), durable(&region, 2)), (5000, 100));
    }

    #[test]
    fn open__forgets_the_oldest_upload_first() {
        let region = region(1 << 20);
        for id in 1..=UPLOADS_MAX as u64 + 1 {
            drop(region.open(true, id * 10, 10, id));
        }
        assert_eq!((region.describe(1).transfer, region.describe(2).transfer), (0, 2));
    }

    #[test]
    fn anonymous__offers_what_was_asked_for_only() {
        let region = region(100);
        assert_eq!(region.bytes(), 100);
        assert_eq!(region.memory().write(100, &[1]), Err(Fault::Unmapped));
        assert_eq!(
            region.memory().flush(0, 100, Placement::PERSISTENT),
            Err(Fault::NotSupported)
        );
    }

    #[test]
    fn ways__none_without_a_domain_and_a_persistent_flush() {
        let folder = tempfile::tempdir().unwrap();
        let name = Name::new("r").unwrap();
        let file = Region::file(name.clone(), &folder.path().join("f"), Some(4096), false).unwrap();
        let memory = file.memory().clone();
        if file.placement().contains(Placement::PERSISTENT) {
            assert_eq!(file.ways(), Ways::FLUSH | Ways::SOFTWARE_FLUSH);
            let adr = Region::new(name.clone(), memory.clone(), Domain::Adr, false).placed_in_domain();
            assert_eq!(adr.ways(), Ways::all());
        }
        let none = Region::new(name, memory, Domain::None, false).placed_in_domain();
        assert_eq!(none.ways(), Ways::empty());
        assert_eq!(region(100).ways(), Ways::empty());
    }

    #[test]
    fn file_in__a_declared_domain_is_for_memory_that_is_mapped() {
        let name = Name::new("r").unwrap();
        let declared = |folder: &Path| {
            let path = folder.join(format!("rdmux-region-{}", std::process::id()));
            let region = Region::file_in(name.clone(), &path, Some(4096), false, Some(Domain::Adr));
            let _ = std::fs::remove_file(&path);
            region
        };
        let region = declared(Path::new("/dev/shm")).unwrap();
        assert!(
            matches!(region.place(), Place::Dax(_, kind) if kind == "tmpfs"),
            "{region:?}"
        );
        assert_eq!((region.domain(), region.ways()), (Domain::Adr, Ways::all()));

        let folder = tempfile::tempdir().unwrap();
        let plain = Region::file(name.clone(), &folder.path().join("f"), Some(4096), false).unwrap();
        if plain.domain() == Domain::File {
            let error = declared(folder.path()).unwrap_err().to_string();
            assert!(error.contains("direct access"), "{error}");
        }
    }

    #[test]
    fn file_in__what_is_no_persistent_memory_is_not_declared() {
        let folder = tempfile::tempdir().unwrap();
        for domain in [Domain::None, Domain::File] {
            let path = folder.path().join("f");
            let error = Region::file_in(Name::new("r").unwrap(), &path, Some(4096), false, Some(domain));
            assert!(error.unwrap_err().to_string().contains("declared"), "{domain:?}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn sizing__of_files_that_are_new_short_and_long_enough() {
        let folder = tempfile::tempdir().unwrap();
        let file =
            |size| Region::file(Name::new("r").unwrap(), &folder.path().join("f"), size, false).unwrap();
        for (size, sizing, bytes) in [
            (Some(4096), Some(Sizing::Created), 4096),
            (Some(8192), Some(Sizing::Grown { from: 4096 }), 8192),
            (Some(8192), Some(Sizing::Kept), 8192),
            (Some(100), Some(Sizing::Kept), 8192),
            (None, None, 8192),
        ] {
            let region = file(size);
            assert_eq!((region.sizing(), region.bytes()), (sizing, bytes), "{size:?}");
        }
    }

    #[test]
    fn file__errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let name = Name::new("r").unwrap();
        let missing = folder.path().join("missing");
        let error = Region::file(name.clone(), &missing, None, false)
            .unwrap_err()
            .to_string();
        assert!(error.contains("missing") && error.contains("size=N"), "{error}");
        let error = Region::file(name, folder.path(), None, true)
            .unwrap_err()
            .to_string();
        assert!(error.contains("regular file"), "{error}");
    }

    #[test]
    fn file_system_of__proc() {
        assert_eq!(file_system_of(Path::new("/proc/self/stat")), "proc");
    }
}
