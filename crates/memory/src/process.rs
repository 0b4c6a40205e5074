//! Memory of another process that has offered it: where its pages are in a file, by a mapping; elsewhere by calls.
//!
//! The process offers all of its memory by a descriptor of its own `/proc/self/mem`. So the calls need no right to trace it, and reach its
//! memory even if its number belongs to another process by then, or it has started another program: then they find nothing. Which bytes are
//! accessed is for the caller: it accesses only those that the process has registered.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Atomic, Fault, Memory, Placement};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
use rustix::io::{Errno, pread, pwrite};

use crate::mapping::Mapping;

/// Number of bytes that are placed after all others, since a program may poll them.
const LAST_WORD: usize = 8;

/// Why the memory of a process cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOffered {
    /// The descriptor is not that of the process's memory.
    #[error(
        "the descriptor is not the memory of the process that sent it, or of a process that this one cannot see"
    )]
    Another,
    /// The descriptor does not let this process read and write.
    #[error("the memory of the process cannot be read and written")]
    Rights,
}

/// Opens the memory of this process, to offer it to another one.
///
/// # Errors
/// There is no `/proc`, or the system forbids it.
pub fn own_memory() -> io::Result<OwnedFd> {
    Ok(open(
        "/proc/self/mem",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// All memory of a process, which has offered it.
#[derive(Debug)]
pub struct ProcessMemory {
    file: OwnedFd,
    /// Held during an atomic operation on bytes that are reached by calls: those of one process are atomic to each other, though not to its
    /// CPUs (`IBV_ATOMIC_HCA`).
    atomic: Mutex<()>,
}

impl ProcessMemory {
    /// Takes the descriptor that a process has sent. `pid` is that of the process at the other end of the socket that it came by.
    ///
    /// # Errors
    /// It is another file. Nothing is asked of that file, whose server may never answer.
    pub fn of(file: OwnedFd, pid: i32) -> Result<ProcessMemory, NotOffered> {
        let identity = |fd: BorrowedFd<'_>, path: &str, flags| {
            let found = statx(fd, path, flags | AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
            found.map(|found| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
        };
        let sent = identity(file.as_fd(), "", AtFlags::EMPTY_PATH).map_err(|_| NotOffered::Another)?;
        // The descriptor keeps the inode: the number is that of no other file.
        let path = format!("/proc/{pid}/mem");
        let expected = identity(rustix::fs::CWD, &path, AtFlags::empty()).map_err(|_| NotOffered::Another)?;
        if sent != expected {
            return Err(NotOffered::Another);
        }
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|_| NotOffered::Rights)?;
        if flags & OFlags::RWMODE != OFlags::RDWR {
            return Err(NotOffered::Rights);
        }
        Ok(ProcessMemory {
            file,
            atomic: Mutex::new(()),
        })
    }

    fn read(&self, mut address: u64, mut out: &mut [u8]) -> Result<(), Fault> {
        while !out.is_empty() {
            let n = copied(pread(&self.file, &mut *out, address))?;
            out = &mut out[n..];
            address += n as u64;
        }
        Ok(())
    }

    fn write_any(&self, mut address: u64, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let n = copied(pwrite(&self.file, bytes, address))?;
            bytes = &bytes[n..];
            address += n as u64;
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let first = match bytes.len() {
            len if len > LAST_WORD => len - LAST_WORD,
            _ => 0,
        };
        self.write_any(address, &bytes[..first])?;
        self.write_any(address + first as u64, &bytes[first..])
    }

    fn atomic(&self, address: u64, atomic: Atomic) -> Result<u64, Fault> {
        let _held = self.atomic.lock();
        let mut before = [0; 8];
        self.read(address, &mut before)?;
        self.write_any(address, &atomic.apply(before))?;
        Ok(u64::from_ne_bytes(before))
    }
}

/// Returns the number of bytes that a call has copied. Nothing is where it copied none: the process has ended, or has unmapped it.
fn copied(result: Result<usize, Errno>) -> Result<usize, Fault> {
    match result {
        Ok(0) | Err(Errno::FAULT | Errno::IO | Errno::INVAL | Errno::OVERFLOW) => Err(Fault::Unmapped),
        Ok(n) => Ok(n),
        Err(Errno::INTR) => Err(Fault::Io(Errno::INTR.raw_os_error())),
        Err(error) => Err(Fault::Io(error.raw_os_error())),
    }
}

/// Bytes of another process.
#[derive(Debug)]
pub struct ForeignMemory {
    process: Arc<ProcessMemory>,
    address: u64,
    len: u64,
    /// Addresses whose pages are in a file, and its mapping, which begins with the first.
    pages: Option<(Range<u64>, Mapping)>,
}

impl ForeignMemory {
    /// Returns `len` bytes at an address of a process. `pages`: the process has some of its pages in a file in memory, which begins with the
    /// first of them.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if touching the bytes of the file could raise a signal ([`Mapping::of_sealed_file`]), and
    /// [`io::ErrorKind::InvalidInput`] if the bytes, or the pages among them, are not addresses.
    pub fn new(
        process: Arc<ProcessMemory>,
        address: u64,
        len: u64,
        pages: Option<(Range<u64>, OwnedFd)>,
    ) -> io::Result<ForeignMemory> {
        let end = address.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let pages = match pages {
            None => None,
            Some((range, file)) => {
                if range.start < address || range.end > end || range.is_empty() {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let bytes = usize::try_from(range.end - range.start);
                let bytes = bytes.map_err(|_| io::ErrorKind::InvalidInput)?;
                let mapping = Mapping::of_sealed_file(&file, 0, bytes, true)?;
                Some((range, mapping))
            }
        };
        Ok(ForeignMemory {
            process,
            address,
            len,
            pages,
        })
    }

    /// Returns the address of `len` bytes at an offset.
    fn at(&self, offset: u64, len: u64) -> Result<u64, Fault> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.map(|_| self.address + offset).ok_or(Fault::Unmapped)
    }

    /// Returns the parts of a range of addresses: those before the pages of the file, among them, and behind them.
    fn parts(&self, range: Range<u64>) -> [Range<u64>; 3] {
        let pages = self
            .pages
            .as_ref()
            .map_or(range.end..range.end, |(pages, _)| pages.clone());
        let first = pages.start.clamp(range.start, range.end);
        let second = pages.end.clamp(first, range.end);
        [range.start..first, first..second, second..range.end]
    }

    /// Copies bytes to an offset, by `mapped` where the pages are in the file and by `call` elsewhere, in ascending order.
    fn place(
        &self,
        offset: u64,
        bytes: &[u8],
        mapped: fn(&Mapping, u64, &[u8]) -> Result<(), Fault>,
        call: fn(&ProcessMemory, u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let start = self.at(offset, bytes.len() as u64)?;
        let [before, among, behind] = self.parts(start..start + bytes.len() as u64);
        let piece = |range: &Range<u64>| &bytes[(range.start - start) as usize..(range.end - start) as usize];
        if !before.is_empty() {
            call(&self.process, before.start, piece(&before))?;
        }
        if let Some((pages, mapping)) = self.pages.as_ref().filter(|_| !among.is_empty()) {
            mapped(mapping, among.start - pages.start, piece(&among))?;
        }
        if !behind.is_empty() {
            call(&self.process, behind.start, piece(&behind))?;
        }
        Ok(())
    }
}

impl Memory for ForeignMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let start = self.at(offset, out.len() as u64)?;
        let [before, among, behind] = self.parts(start..start + out.len() as u64);
        let (head, rest) = out.split_at_mut((before.end - before.start) as usize);
        let (middle, tail) = rest.split_at_mut((among.end - among.start) as usize);
        if let Some((pages, mapping)) = self.pages.as_ref().filter(|_| !among.is_empty()) {
            mapping.read(among.start - pages.start, middle)?;
        }
        self.process.read(before.start, head)?;
        self.process.read(behind.start, tail)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(offset, bytes, Mapping::write, ProcessMemory::write)
    }

    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(offset, bytes, Mapping::copy_in, ProcessMemory::write_any)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let at = self.at(offset, 8)?;
        if !at.is_multiple_of(8) {
            return Err(Fault::NotSupported);
        }
        match &self.pages {
            // Whole pages have all of an aligned word, or nothing.
            Some((pages, mapping)) if pages.contains(&at) => mapping.atomic(at - pages.start, atomic),
            _ => self.process.atomic(at, atomic),
        }
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn gathers(&self) -> bool {
        self.pages.is_none()
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if placement.contains(Placement::PERSISTENT) {
            return Err(Fault::NotSupported);
        }
        self.at(offset, length)?;
        fence(Ordering::SeqCst);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::sealed_file;

    const PAGE: u64 = 4096;

    fn own() -> Arc<ProcessMemory> {
        let pid = std::process::id().cast_signed();
        Arc::new(ProcessMemory::of(own_memory().unwrap(), pid).unwrap())
    }

    #[test]
    fn of__descriptors_of_something_else() {
        let pid = std::process::id().cast_signed();
        let file = || OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        assert_eq!(ProcessMemory::of(file(), pid).err(), Some(NotOffered::Another));
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert_eq!(ProcessMemory::of(pipe, pid).err(), Some(NotOffered::Another));
        let memory = own_memory().unwrap();
        assert_eq!(ProcessMemory::of(memory, 1).err(), Some(NotOffered::Another));
        let read_only = OwnedFd::from(std::fs::File::open("/proc/self/mem").unwrap());
        assert_eq!(ProcessMemory::of(read_only, pid).err(), Some(NotOffered::Rights));
    }

    #[test]
    fn write__around_the_pages_of_a_file() {
        // The pages of the file are elsewhere, so that a test sees which way the bytes went.
        let pages = Mapping::anonymous(4 * PAGE as usize).unwrap();
        let (address, len) = (pages.address() + 100, 3 * PAGE);
        let file = sealed_file("pages", PAGE).unwrap();
        let view = Mapping::of_sealed_file(&file, 0, PAGE as usize, true).unwrap();
        let range = pages.address() + PAGE..pages.address() + 2 * PAGE;
        let memory = ForeignMemory::new(own(), address, len, Some((range, file))).unwrap();
        let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
        for write in [Memory::write, Memory::write_in_any_order] {
            let none = vec![0; len as usize];
            write(&memory, 0, &none).unwrap();
            write(&memory, 0, &bytes).unwrap();
            let mut back = vec![0; len as usize];
            memory.read(0, &mut back).unwrap();
            assert!(back == bytes);
            let mut seen = vec![0; 4 * PAGE as usize];
            pages.read(0, &mut seen).unwrap();
            let (head, middle, tail) = (PAGE as usize - 100, PAGE as usize, PAGE as usize + 100);
            assert!(seen[100..][..head] == bytes[..head]);
            assert!(seen[PAGE as usize..][..middle].iter().all(|byte| *byte == 0));
            assert!(seen[2 * PAGE as usize..][..tail] == bytes[head + middle..]);
            let mut seen = vec![0; PAGE as usize];
            view.read(0, &mut seen).unwrap();
            assert!(seen == bytes[head..head + middle]);
        }
    }

    #[test]
    fn atomic__by_either_way() {
        let pages = Mapping::anonymous(2 * PAGE as usize).unwrap();
        let file = sealed_file("pages", PAGE).unwrap();
        let range = pages.address()..pages.address() + PAGE;
        let memory = ForeignMemory::new(own(), pages.address(), 2 * PAGE, Some((range, file))).unwrap();
        for at in [0, 8, PAGE - 8, PAGE, 2 * PAGE - 8] {
            assert_eq!(memory.atomic(at, Atomic::FetchAdd(5)), Ok(0));
            let swap = Atomic::CompareSwap { compare: 5, swap: 9 };
            assert_eq!(memory.atomic(at, swap), Ok(5));
            assert_eq!(memory.atomic(at, Atomic::FetchAdd(0)), Ok(9));
        }
        assert_eq!(
            memory.atomic(PAGE - 4, Atomic::FetchAdd(0)),
            Err(Fault::NotSupported)
        );
        assert_eq!(memory.atomic(2 * PAGE, Atomic::FetchAdd(0)), Err(Fault::Unmapped));
    }

    #[test]
    fn read__what_is_not_there() {
        let all = ForeignMemory::new(own(), 0, u64::MAX, None).unwrap();
        for offset in [0, 1 << 46, u64::MAX - 8] {
            assert_eq!(all.read(offset, &mut [0; 8]), Err(Fault::Unmapped), "{offset}");
            assert_eq!(all.write(offset, &[0; 20]), Err(Fault::Unmapped), "{offset}");
        }
        assert_eq!(all.read(u64::MAX, &mut [0; 8]), Err(Fault::Unmapped));
    }

    #[test]
    fn new__ranges_that_are_none() {
        let file = || sealed_file("pages", PAGE).unwrap();
        for (address, len, pages) in [
            (u64::MAX, 1, None),
            (PAGE, PAGE, Some((0..PAGE, file()))),
            (PAGE, PAGE, Some((PAGE..3 * PAGE, file()))),
            (PAGE, 4 * PAGE, Some((PAGE..3 * PAGE, file()))),
            (PAGE, PAGE, Some((PAGE..PAGE, file()))),
        ] {
            assert!(ForeignMemory::new(own(), address, len, pages).is_err());
        }
    }
}
