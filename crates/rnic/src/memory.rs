//! Memory as the engine sees it: an access either succeeds or faults. A fault becomes the NAK that the specification assigns to it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bitflags::bitflags;
pub use rdmux_wire::roce::Placement;

use crate::ledger::Location;
use crate::sync::Mutex;

bitflags! {
    /// Access rights of a region or a QP. The values are those of `enum ibv_access_flags`; IBTA Vol 1, 10.6.3.1.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device may write the region on behalf of its owner: receives and READ destinations.
        const LOCAL_WRITE = 1 << 0;
        /// A peer may WRITE and ATOMIC WRITE. Only with `LOCAL_WRITE`.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may compare-and-swap and fetch-and-add. Only with `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region. IBTA Vol 1, 10.6.7.2.
        const MW_BIND = 1 << 4;
        /// Addresses count from the start of the region or window. IBTA Vol 1, 10.6.3.1.
        const ZERO_BASED = 1 << 5;
        /// Pages need not be present at registration. Always true here: registration never pins.
        const ON_DEMAND = 1 << 6;
        /// The region consists of huge pages; a hint.
        const HUGETLB = 1 << 7;
        /// A peer may FLUSH with placement type global visibility. A19.4.
        const FLUSH_GLOBAL = 1 << 8;
        /// A peer may FLUSH with placement type persistence. A19.4.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Writes may become visible out of order; a hint.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// The access that a FLUSH of these placement types needs.
    pub fn for_flush(placement: Placement) -> Access {
        let mut access = Access::empty();
        access.set(Access::FLUSH_GLOBAL, placement.contains(Placement::GLOBAL));
        access.set(
            Access::FLUSH_PERSISTENT,
            placement.contains(Placement::PERSISTENT),
        );
        access
    }
}

/// Error of reading, writing or flushing memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There is no memory at that offset, or it has gone: unmapped, truncated, revoked.
    #[error("no memory at this offset (unmapped or truncated)")]
    Unmapped,
    /// The medium has no room for the bytes.
    #[error("no space left")]
    NoSpace,
    /// The medium failed; the number is the system's errno.
    #[error("input/output error (errno {0})")]
    Io(i32),
    /// The memory does not support the operation: a persistent flush of volatile memory, for example.
    #[error("not supported by this memory")]
    NotSupported,
}

/// An operation on 8 aligned bytes that nobody observes half done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Stores `swap` if the current value is `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds, wrapping.
    FetchAdd(u64),
    /// Stores these bytes as they are.
    Write([u8; 8]),
}

impl Atomic {
    /// Returns the bytes after the operation.
    pub fn apply(self, before: [u8; 8]) -> [u8; 8] {
        match self {
            Atomic::CompareSwap { compare, swap } if u64::from_ne_bytes(before) == compare => {
                swap.to_ne_bytes()
            }
            Atomic::CompareSwap { .. } => before,
            Atomic::FetchAdd(add) => u64::from_ne_bytes(before).wrapping_add(add).to_ne_bytes(),
            Atomic::Write(bytes) => bytes,
        }
    }
}

/// A medium with latencies of its own, such as a disk: accesses to the memories on it may wait for it, and for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Medium(pub u64);

/// Memory over which regions are registered.
///
/// Offsets count from the start of the memory. An access outside of it returns [`Fault::Unmapped`] and never panics. Bytes are written
/// in ascending order and the last word with release semantics, since programs poll it.
///
/// An access must not wait for another thread's call to the device: that call may wait for the access. It may poll a completion queue.
///
/// Any call to a device may drop a memory that no region needs any more. That drop must not begin or end a service of the device.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Returns the length in bytes.
    fn len(&self) -> u64;

    /// Returns whether the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `out.len()` bytes at `offset` into `out`.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` at `offset` in ascending order, the last word last, since a program may poll it.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Writes `bytes` at `offset` in any order: the reader learns from a completion that the bytes are there.
    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.write(offset, bytes)
    }

    /// Executes an atomic operation on the 8 bytes at `offset` and returns their previous value in the host's byte order. Where the
    /// bytes can be loaded and stored, the operation is also atomic with respect to the CPUs; otherwise only with respect to accesses
    /// through this `Memory`. An `offset` whose address is not a multiple of 8 returns [`Fault::NotSupported`].
    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault>;

    /// Returns the medium that an access may have to wait for; `None` if no access blocks. The engine hands what the peers of its RC QPs
    /// access on a medium to the driver ([`crate::Rnic::poll_access`]).
    fn medium(&self) -> Option<Medium> {
        None
    }

    /// Like [`Memory::read`], but returns `None` where that would wait for a medium. `out` is then undefined.
    fn read_at_once(&self, offset: u64, out: &mut [u8]) -> Option<Result<(), Fault>> {
        self.medium().is_none().then(|| self.read(offset, out))
    }

    /// Returns where its bytes are, for the ledger.
    fn location(&self) -> Location {
        Location::Dram
    }

    /// Returns the placement types that a flush of this memory can honour.
    fn placement(&self) -> Placement;

    /// Returns whether [`Memory::flush`] with this placement type returns without waiting for a medium. If so, the engine calls it
    /// itself; otherwise the engine hands the flush to the driver ([`crate::Rnic::poll_flush`]).
    fn flush_is_immediate(&self, placement: Placement) -> bool;

    /// Returns whether one large access is much cheaper than many small ones, for example because each access is a system call. If so,
    /// the engine writes the bytes of packets that arrive together, and reads the bytes of packets that leave together, in one access.
    fn gathers(&self) -> bool {
        false
    }

    /// Returns whether peers on the host can map it; `None` if it is no memory of that kind.
    fn sharing(&self) -> Option<Sharing> {
        None
    }

    /// Brings `length` bytes at `offset` to the requested placement. May block unless [`Memory::flush_is_immediate`].
    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault>;

    /// Returns the concrete memory, for a driver that has a shorter path between memories of its own kinds.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns the memory that owns the pages, at the same offsets, for a device that reads and writes them by itself and so bypasses
    /// this trait. Returns `None` if the bytes are not mapped in this process for the memory's whole lifetime, or if nothing may bypass
    /// the trait.
    fn pages(&self) -> Option<&dyn Any> {
        None
    }
}

/// Whether peers on the host can map a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Not so far: it was not worth while.
    NotYet,
    /// Its pages move into a file.
    Moving,
    /// They can.
    Shared,
    /// They cannot.
    Refused(NotShared),
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharing::NotYet => f.write_str("not-yet"),
            Sharing::Moving => f.write_str("moving"),
            Sharing::Shared => f.write_str("yes"),
            Sharing::Refused(reason) => write!(f, "no: {reason}"),
        }
    }
}

/// Reason for which peers cannot map memory of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, strum::VariantArray)]
pub enum NotShared {
    /// `RDMUX_CONVERT=off`.
    #[error("RDMUX_CONVERT=off")]
    Off,
    /// The region contains no whole page.
    #[error("no whole page")]
    NoWholePage,
    /// A region of other bytes, or one of the same bytes on another device, has some of the pages.
    #[error("another region overlaps")]
    Overlaps,
    /// Some of it is not private memory that may be read and written, or is a stack.
    #[error("not private memory")]
    NotPrivate,
    /// Some of it is locked, of huge pages, or special in another way.
    #[error("special pages")]
    Special,
    /// The process has mappings enough.
    #[error("too many mappings")]
    ManyMappings,
    /// The process has an io_uring, which may have pinned the pages.
    #[error("the process has an io_uring")]
    IoUring,
    /// The process has a context of libaio, whose requests may have pinned the pages.
    #[error("the process has an AIO context")]
    AsyncIo,
    /// The process has a file open for direct I/O, which pins pages.
    #[error("the process has a file open for direct I/O")]
    DirectIo,
    /// The process has a device open that may have pinned the pages.
    #[error("the process has a device open")]
    Device,
    /// The process has other threads, and the system lets it catch their faults only in user mode.
    #[error("threads, and no right to full userfaultfd")]
    Threads,
    /// Only the program's one thread could move the pages, and it did not call the library when they were to move.
    #[error("its thread makes no calls, and no right to full userfaultfd")]
    ThreadAway,
    /// The system refuses userfaultfd(2), or lacks a part of it.
    #[error("no userfaultfd")]
    Userfaultfd,
    /// The system had no memory or no file for it.
    #[error("no resources")]
    NoResources,
    /// A peer stayed inside of it.
    #[error("a peer is inside")]
    PeerInside,
    /// The program unmapped some of it meanwhile.
    #[error("unmapped meanwhile")]
    Unmapped,
    /// The system did not say what is mapped.
    #[error("/proc is not readable")]
    Unknown,
}

/// A peer's memory that the peer has granted and that this host can access without the peer. The peer may revoke the grant at any time.
pub trait PeerMemory: fmt::Debug + Send + Sync {
    /// Copies `length` bytes of own memory to an offset in the peer's memory. As with [`Memory::write`], the last word is written last.
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault>;

    /// Writes bytes at an offset in the peer's memory.
    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault>;

    /// Copies `length` bytes at an offset in the peer's memory to own memory.
    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault>;

    /// Returns whether accesses under the grants of one QP may run beside those of other QPs ([`crate::DirectLane`]). If not, the device
    /// makes one after another.
    fn is_apart(&self) -> bool {
        true
    }

    /// Returns this memory for a part of the QP's lane: accesses by it may run beside those by other parts. `None`: accesses of a QP come
    /// one after another.
    fn of_part(&self, _part: usize) -> Option<Arc<dyn PeerMemory>> {
        None
    }

    /// Returns the concrete memory, for a driver that distinguishes its own kinds.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// Error of accessing a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFault {
    /// The grant has ended, or the system does not allow the access: the requester must send packets, and the peer executes the request.
    Ended,
    /// Own memory failed.
    Own(Fault),
}

/// Plain bytes in the process's heap, for tests and the simulator.
pub struct HeapMemory {
    bytes: Mutex<Vec<u8>>,
    len: u64,
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeapMemory({} bytes)", self.len)
    }
}

impl HeapMemory {
    /// Returns a memory of `len` zero bytes.
    pub fn new(len: usize) -> HeapMemory {
        HeapMemory {
            bytes: Mutex::new(vec![0; len]),
            len: len as u64,
        }
    }

    /// Calls `f` on the bytes.
    pub fn with<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> R {
        f(&mut self.bytes.lock())
    }

    fn range(&self, offset: u64, len: usize) -> Result<std::ops::Range<usize>, Fault> {
        let end = offset
            .checked_add(len as u64)
            .filter(|end| *end <= self.len)
            .ok_or(Fault::Unmapped)?;
        Ok(offset as usize..end as usize)
    }
}

impl Memory for HeapMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(offset, out.len())?;
        self.with(|bytes| out.copy_from_slice(&bytes[range]));
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let range = self.range(offset, bytes.len())?;
        self.with(|all| all[range].copy_from_slice(bytes));
        Ok(())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let range = self.range(offset, 8)?;
        self.with(|all| {
            let mut before = [0; 8];
            before.copy_from_slice(&all[range.clone()]);
            all[range].copy_from_slice(&atomic.apply(before));
            Ok(u64::from_ne_bytes(before))
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
        if offset.checked_add(length).is_none_or(|end| end > self.len) {
            return Err(Fault::Unmapped);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }
}
