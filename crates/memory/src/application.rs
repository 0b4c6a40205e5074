//! Memory of the program's own, as programs that use the C interface register it.
#![allow(unsafe_code, reason = "its maker promises what the compiler cannot see")]

use std::any::Any;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Atomic, Fault, Memory, NotShared, Placement, Sharing};

use crate::convert::{Mode, Progress, Registered, Registration};
use crate::mapping::{Mapping, Order, Way};

/// Locked during an atomic operation: those of all devices of the process are atomic to each other, though not to the CPUs
/// (`IBV_ATOMIC_HCA`).
static ATOMIC: Mutex<()> = Mutex::new(());

/// Number of calls by this process after which it is worth while to share a memory.
const CALLS_BEFORE_SHARING: u32 = 64;

/// Number of memories that have become worth sharing: [`ApplicationMemory::wanted_sharing`].
static WANTED: AtomicU32 = AtomicU32::new(0);

/// Addresses of this process. An RNIC pins registered pages, so that a program may unmap them while a peer still writes there. Here
/// the kernel copies, and an access to a page that is no longer mapped, or not writable, is a fault and never a signal. Once it is in use
/// its pages may move into a file that peers can map, see [`ApplicationMemory::share_some`].
#[derive(Debug)]
pub struct ApplicationMemory {
    address: u64,
    len: u64,
    pid: i32,
    registered: Arc<Registered>,
    registration: Mutex<Option<Registration>>,
}

/// The whole pages of an [`ApplicationMemory`], in a file that peers may map.
#[derive(Clone, Copy, Debug)]
pub struct SharedPages<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Addresses of the pages; the file begins with the first.
    pub addresses: &'a Range<u64>,
    mapping: &'a Mapping,
}

impl<'a> SharedPages<'a> {
    /// Returns this process's own mapping of the file, and the offset in it of `len` bytes at an address if it has all of them.
    #[inline]
    pub fn mapping_of(&self, address: u64, len: u64) -> Option<(&'a Mapping, u64)> {
        let at = address.checked_sub(self.addresses.start)?;
        let end = address.checked_add(len)?;
        (end <= self.addresses.end).then_some((self.mapping, at))
    }
}

impl ApplicationMemory {
    /// Wraps `len` bytes at an address of this process, whatever is mapped there.
    ///
    /// # Safety
    /// Devices and peers write these bytes while the value lives, and as long as it is registered: there are no references to them
    /// that this would contradict, and nothing of the program relies on their not changing.
    pub unsafe fn new(address: u64, len: u64) -> ApplicationMemory {
        let registration = Registration::new(address, len);
        ApplicationMemory {
            address,
            len,
            pid: std::process::id().cast_signed(),
            registered: Arc::clone(registration.registered()),
            registration: Mutex::new(Some(registration)),
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns whether both are the same bytes of the program, which move together.
    pub fn is_same(&self, other: &ApplicationMemory) -> bool {
        Arc::ptr_eq(&self.registered, &other.registered)
    }

    /// Moves the next pages into a file that peers may map, 2 MiB at most: `convert.rs` says how, and what the program may notice. An error
    /// is final. No peer may access these bytes by their addresses until this has returned [`Progress::Done`] or an error: what it writes
    /// meanwhile could be lost. The caller sees to that for `memories` made of these bytes; while there are more, this returns
    /// [`Progress::Elsewhere`]. Whoever makes another one finds it [`Sharing::Moving`].
    pub fn share_some(&self, memories: usize) -> Result<Progress, NotShared> {
        let Registered { moving, shared, .. } = &*self.registered;
        if shared.get().is_some() {
            return Ok(Progress::Done);
        }
        let mode = Mode::of_process();
        let registration = self.registration.lock();
        let registration = registration.as_ref().ok_or(NotShared::Unmapped)?;
        // Accesses of this process by the addresses wait.
        let mut moving = moving.write();
        let begun = match &*moving {
            Some(begun) => begun.clone(),
            None if self.registered.memories.load(Ordering::Relaxed) > memories => {
                return Ok(Progress::Elsewhere);
            }
            None => registration.convert(mode),
        };
        let advanced = begun
            .clone()
            .and_then(|shared| registration.advance(mode, &shared));
        *moving = Some(advanced.and(begun.clone()));
        if let (Ok(Progress::Done), Ok(begun)) = (advanced, begun) {
            let _ = shared.set(begun);
        }
        advanced
    }

    /// Gives up what [`ApplicationMemory::share_some`] has begun, or not: it stays as it is.
    pub fn refuse_sharing(&self, reason: NotShared) {
        *self.registered.moving.write() = Some(Err(reason));
    }

    /// Returns its whole pages, once they are in a file.
    #[inline]
    pub fn shared_pages(&self) -> Option<SharedPages<'_>> {
        let shared = self.registered.shared.get()?;
        Some(SharedPages {
            file: shared.file(),
            addresses: shared.pages(),
            mapping: shared.alias(),
        })
    }

    /// Returns whether this process has accessed it by so many calls that sharing it would be worth while, and it was not tried yet.
    pub fn wants_sharing(&self) -> bool {
        self.registered.calls.load(Ordering::Relaxed) >= CALLS_BEFORE_SHARING
            && self.sharing() == Some(Sharing::NotYet)
    }

    /// Returns the number of memories of this process that have ever begun to want sharing, modulo 2^32.
    #[inline]
    pub fn wanted_sharing() -> u32 {
        WANTED.load(Ordering::Relaxed)
    }

    /// Gives the memory back to the program: pages that have moved move back, unless other memory shares them. Nothing accesses it from
    /// now on. Dropping it does the same.
    pub fn give_back(&self) {
        drop(self.registration.lock().take());
    }

    /// Returns the mapping that has a range of it, if its pages have moved.
    #[inline]
    fn mapping_of(&self, offset: u64, len: u64) -> Result<Option<(&Mapping, u64)>, Fault> {
        let at = self.range(offset, len)?;
        Ok(self.shared_pages().and_then(|pages| pages.mapping_of(at, len)))
    }

    /// Calls `f` with the address of a range, whose pages do not move meanwhile.
    fn by_address<R>(
        &self,
        offset: u64,
        len: u64,
        f: impl FnOnce(u64) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        let at = self.range(offset, len)?;
        if self.registered.calls.fetch_add(1, Ordering::Relaxed) + 1 == CALLS_BEFORE_SHARING {
            WANTED.fetch_add(1, Ordering::Relaxed);
        }
        let _stays = self.registered.moving.read();
        f(at)
    }

    /// Copies `len` bytes at an offset to a mapping, as [`Mapping::write`] does.
    pub fn copy_to(&self, offset: u64, to: &Mapping, to_offset: u64, len: u64) -> Result<(), Fault> {
        match self.mapping_of(offset, len)? {
            Some((own, at)) => to
                .write_from(to_offset, own, at, len)
                .map_err(|error| error.fault()),
            None => self.by_address(offset, len, |own| to.copy_from_addresses(to_offset, own, len)),
        }
    }

    /// Copies `len` bytes of a mapping to an offset, as [`Memory::write`] does.
    pub fn copy_from(&self, offset: u64, from: &Mapping, from_offset: u64, len: u64) -> Result<(), Fault> {
        if let Some((own, at)) = self.mapping_of(offset, len)? {
            return own
                .write_from(at, from, from_offset, len)
                .map_err(|error| error.fault());
        }
        // SAFETY: the maker of this value promised that the bytes may be written.
        self.by_address(offset, len, |own| unsafe {
            from.copy_to_addresses(from_offset, own, len)
        })
    }

    /// Copies `len` bytes at an offset to or from an address of another process, without a buffer.
    ///
    /// # Safety
    /// As for [`Mapping::copy_process`].
    pub unsafe fn copy_process(
        &self,
        offset: u64,
        pid: i32,
        address: u64,
        len: u64,
        way: Way,
    ) -> Result<(), Fault> {
        // SAFETY: the maker of this value promised that the bytes here may be written; those there are as the caller says.
        self.by_address(offset, len, |own| unsafe {
            Mapping::copy_between(own, pid, address, len, way)
        })
    }

    /// Returns the address of `len` bytes at an offset.
    fn range(&self, offset: u64, len: u64) -> Result<u64, Fault> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        end.and_then(|_| self.address.checked_add(offset))
            .filter(|at| at.checked_add(len).is_some())
            .ok_or(Fault::Unmapped)
    }

    fn place(&self, offset: u64, bytes: &[u8], order: Order) -> Result<(), Fault> {
        if let Some((own, at)) = self.mapping_of(offset, bytes.len() as u64)? {
            return match order {
                Order::LastWordLast => own.write(at, bytes),
                Order::Any => own.copy_in(at, bytes),
            };
        }
        // SAFETY: the maker of this value promised that the bytes may be written.
        self.by_address(offset, bytes.len() as u64, |at| unsafe {
            Mapping::write_process(self.pid, at, bytes, order, None)
        })
    }
}

impl Memory for ApplicationMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        if let Some((own, at)) = self.mapping_of(offset, out.len() as u64)? {
            return own.read(at, out);
        }
        self.by_address(offset, out.len() as u64, |at| {
            Mapping::read_process(self.pid, at, out)
        })
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(offset, bytes, Order::LastWordLast)
    }

    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(offset, bytes, Order::Any)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        if !self.range(offset, 8)?.is_multiple_of(8) {
            return Err(Fault::NotSupported);
        }
        let own_atomic = || {
            Ok(self
                .mapping_of(offset, 8)?
                .map(|(own, at)| own.atomic(at, atomic)))
        };
        if let Some(done) = own_atomic()? {
            return done;
        }
        let _held = ATOMIC.lock();
        self.by_address(offset, 8, |at| {
            // The pages may have moved meanwhile, and others use them by the mapping.
            if let Some(done) = own_atomic()? {
                return done;
            }
            let mut before = [0; 8];
            Mapping::read_process(self.pid, at, &mut before)?;
            let after = atomic.apply(before);
            // SAFETY: the maker of this value promised that the bytes may be written.
            unsafe { Mapping::write_process(self.pid, at, &after, Order::LastWordLast, None) }?;
            Ok(u64::from_ne_bytes(before))
        })
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn sharing(&self) -> Option<Sharing> {
        if self.registered.shared.get().is_some() {
            return Some(Sharing::Shared);
        }
        Some(match &*self.registered.moving.read() {
            None => Sharing::NotYet,
            Some(Ok(_)) => Sharing::Moving,
            Some(Err(reason)) => Sharing::Refused(*reason),
        })
    }

    fn gathers(&self) -> bool {
        self.registered.shared.get().is_none()
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if placement.contains(Placement::PERSISTENT) {
            return Err(Fault::NotSupported);
        }
        self.range(offset, length)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    use super::*;
    use crate::mapping::{Mapping, allows_calls_into_processes};

    /// Removes the pages and keeps their addresses, which the kernel could otherwise give to another thread's mapping.
    fn take_away(pages: &Mapping) {
        let address = std::ptr::without_provenance_mut(pages.address() as usize);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: these are this test's pages, to which there are no references; the mapping unmaps what replaces them.
        unsafe { mmap_anonymous(address, pages.len(), ProtFlags::empty(), flags) }.unwrap();
    }

    #[test]
    fn write__to_what_is_unmapped_meanwhile_is_a_fault() {
        let pages = Mapping::anonymous(3 * 4096).unwrap();
        // SAFETY: pages of this test's, to which there are no references.
        let memory = unsafe { ApplicationMemory::new(pages.address(), 3 * 4096) };
        memory.write(4090, b"over a page").unwrap();
        let mut back = [0; 11];
        memory.read(4090, &mut back).unwrap();
        assert_eq!(&back, b"over a page");
        pages.read(4090, &mut back).unwrap();
        assert_eq!(&back, b"over a page");
        take_away(&pages);
        assert_eq!(memory.write(4090, b"x"), Err(Fault::Unmapped));
        assert_eq!(memory.read(0, &mut back), Err(Fault::Unmapped));
        assert_eq!(memory.atomic(8, Atomic::FetchAdd(1)), Err(Fault::Unmapped));
    }

    /// Makes the system refuse this thread the calls into processes, as containers' filters of system calls do.
    fn refuse_calls_into_processes() {
        let statement = |code: u32, k: u32, jt, jf| libc::sock_filter {
            code: u16::try_from(code).unwrap(),
            jt,
            jf,
            k,
        };
        let number = |call: libc::c_long| u32::try_from(call).unwrap();
        let mut filter = [
            // The data begin with the number of the system call.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            statement(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                number(libc::SYS_process_vm_readv),
                1,
                0,
            ),
            statement(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                number(libc::SYS_process_vm_writev),
                0,
                1,
            ),
            statement(
                libc::BPF_RET | libc::BPF_K,
                libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned(),
                0,
                0,
            ),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog {
            len: u16::try_from(filter.len()).unwrap(),
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: numbers, and a filter that lives during the call.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(
                libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program
                ),
                0
            );
        }
    }

    #[test]
    fn read_write__where_calls_into_processes_are_refused() {
        const LEN: u64 = 50 * 4096;
        let copies = || {
            refuse_calls_into_processes();
            assert!(!allows_calls_into_processes());
            let pages = Mapping::anonymous(LEN as usize).unwrap();
            // SAFETY: pages of this test's, to which there are no references.
            let memory = unsafe { ApplicationMemory::new(pages.address(), LEN) };
            let bytes: Vec<u8> = (0..LEN - 5).map(|i| (i % 251) as u8).collect();
            memory.write(5, &bytes).unwrap();
            let mut back = vec![0; bytes.len()];
            memory.read(5, &mut back).unwrap();
            assert!(back == bytes);
            let other = Mapping::anonymous(LEN as usize).unwrap();
            other
                .copy_from_addresses(5, pages.address() + 5, LEN - 5)
                .unwrap();
            let mut back = vec![0; bytes.len()];
            other.read(5, &mut back).unwrap();
            assert!(back == bytes);
            assert_eq!(
                memory.atomic(0, Atomic::FetchAdd(0)),
                Ok(u64::from_le_bytes([0, 0, 0, 0, 0, 0, 1, 2]))
            );
            take_away(&pages);
            assert_eq!(memory.write(5, b"x"), Err(Fault::Unmapped));
            assert_eq!(memory.read(0, &mut back), Err(Fault::Unmapped));
        };
        // A filter applies to its thread alone. Several threads copy at the same time.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(copies);
            }
        });
    }

    #[test]
    fn atomic__adds_and_swaps_in_place() {
        let pages = Mapping::anonymous(4096).unwrap();
        // SAFETY: pages of this test's, to which there are no references.
        let memory = unsafe { ApplicationMemory::new(pages.address() + 8, 16) };
        assert_eq!(memory.atomic(0, Atomic::FetchAdd(5)), Ok(0));
        let swap = Atomic::CompareSwap { compare: 5, swap: 9 };
        assert_eq!(memory.atomic(0, swap), Ok(5));
        assert_eq!(memory.atomic(0, swap), Ok(9));
        assert_eq!(memory.atomic(4, Atomic::FetchAdd(1)), Err(Fault::NotSupported));
        assert_eq!(memory.atomic(16, Atomic::FetchAdd(1)), Err(Fault::Unmapped));
    }

    #[test]
    fn read__outside_of_the_range() {
        // SAFETY: nothing is there.
        let memory = unsafe { ApplicationMemory::new(u64::MAX - 7, 64) };
        for offset in [0, 8, 63, u64::MAX] {
            assert_eq!(memory.read(offset, &mut [0; 8]), Err(Fault::Unmapped));
        }
    }
}
