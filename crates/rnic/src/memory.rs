//! Memory as the engine sees it: every access is done, or a fault. A fault becomes the NAK that the specification gives.

use std::any::Any;
use std::fmt;

use bitflags::bitflags;
pub use rdmux_wire::roce::Placement;

bitflags! {
    /// What may be done with a region or on a QP. The values are those of `enum ibv_access_flags`; IBTA Vol 1, 10.6.3.1.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device may write it for its owner: receives and READ destinations.
        const LOCAL_WRITE = 1 << 0;
        /// A peer may WRITE and ATOMIC WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may compare-and-swap and fetch-and-add.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to it. IBTA Vol 1, 10.6.7.2.
        const MW_BIND = 1 << 4;
        /// Addresses count from the start of the region or window. IBTA Vol 1, 10.6.3.1.
        const ZERO_BASED = 1 << 5;
        /// Pages need not be there when registered. Always so here: registration never pins.
        const ON_DEMAND = 1 << 6;
        /// The pages are huge ones; a hint.
        const HUGETLB = 1 << 7;
        /// A peer may FLUSH with placement type global visibility. A19.4.
        const FLUSH_GLOBAL = 1 << 8;
        /// A peer may FLUSH with placement type persistence. A19.4.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Writes may be seen out of order; a hint.
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

/// Why memory could not be read, written or flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There is no memory at that place, or no longer: unmapped, truncated, revoked.
    #[error("no memory at this offset (unmapped or truncated)")]
    Unmapped,
    /// The medium has no room for the bytes.
    #[error("no space left")]
    NoSpace,
    /// The medium failed; the number is the system's errno.
    #[error("input/output error (errno {0})")]
    Io(i32),
    /// This memory cannot do that: a persistent flush of volatile memory.
    #[error("not supported by this memory")]
    NotSupported,
}

/// An operation on 8 aligned bytes that nobody sees half done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Store `swap` when the number is `compare`.
    CompareSwap {
        /// To be found.
        compare: u64,
        /// To be stored.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd(u64),
    /// Store these bytes as they are.
    Write([u8; 8]),
}

impl Atomic {
    /// What stands there afterwards.
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

/// Memory that regions are registered over.
///
/// Offsets count from the start of the memory. An access outside of it is [`Fault::Unmapped`], never a panic. Bytes are
/// placed in ascending order and the last word with release semantics, since programs poll it.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Bytes of it.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `out.len()` bytes at `offset` out.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault>;

    /// Places `bytes` at `offset`, in ascending order, the last word last: a program may poll it.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Places `bytes` at `offset` in any order: a completion tells the reader that they are there.
    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.write(offset, bytes)
    }

    /// Does an atomic operation on the 8 bytes at `offset` and gives back what they held as a number of the host. Where the
    /// bytes can be loaded and stored it is atomic to the CPUs too; else to all accesses through this `Memory`. An `offset`
    /// whose address is no multiple of 8 is [`Fault::NotSupported`].
    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault>;

    /// The placement types that a flush of this memory can honour.
    fn placement(&self) -> Placement;

    /// Whether [`Memory::flush`] of this placement type returns without waiting for a medium. Then the engine calls it
    /// itself; else it hands the flush to the driver ([`crate::Rnic::poll_flush`]).
    fn flush_is_immediate(&self, placement: Placement) -> bool;

    /// Whether one large access is much cheaper than many small ones, as it is where each is a system call. Then what arrives
    /// or leaves together is placed or read together.
    fn gathers(&self) -> bool {
        false
    }

    /// Brings `length` bytes at `offset` to the placement asked for. May block when not immediate.
    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault>;

    /// Itself, for a driver that has a shorter way between memories of its own kinds.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// The memory whose pages these are, at the same offsets, for a device that reads and writes them by itself and so goes past
    /// this trait. `None`: its bytes are not mapped in this process for as long as it lives, or nothing may go past it.
    fn pages(&self) -> Option<&dyn Any> {
        None
    }
}

/// A peer's memory that this host lets us reach without the peer: it granted that, and may take it back at any time.
pub trait PeerMemory: fmt::Debug + Send + Sync {
    /// Places `length` bytes of own memory at an offset of the peer's. As with [`Memory::write`] the last word comes last.
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault>;

    /// Places bytes at an offset of the peer's memory.
    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault>;

    /// Places `length` bytes at an offset of the peer's memory in own memory.
    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault>;

    /// Itself, for a driver that tells its own kinds apart.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// Why a peer's memory was not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFault {
    /// The grant has ended, or the system does not allow it: it is the peer's to do, and asked for by packets.
    Ended,
    /// Own memory failed.
    Own(Fault),
}

/// Plain bytes in the process's heap: for tests and the simulator.
pub struct HeapMemory {
    bytes: std::sync::Mutex<Vec<u8>>,
    len: u64,
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeapMemory({} bytes)", self.len)
    }
}

impl HeapMemory {
    /// `len` zero bytes.
    pub fn new(len: usize) -> HeapMemory {
        HeapMemory {
            bytes: std::sync::Mutex::new(vec![0; len]),
            len: len as u64,
        }
    }

    /// Calls `f` on the bytes.
    pub fn with<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> R {
        f(&mut self
            .bytes
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
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
