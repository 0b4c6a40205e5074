//! Memory that knows what a power loss would leave, doors to it that can be shut, and an allocator.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_rnic::{AccessJob, Accessed, Atomic, Fault, Medium, Memory, Placement};

use crate::dice::Dice;

/// Bytes, and their image on the medium, which flushes update.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) bytes: Vec<u8>,
    pub(crate) medium: Vec<u8>,
    /// Promises that ATOMIC WRITEs in flight make by taking effect.
    pub(crate) promises: Vec<Promise>,
    /// Promises that were not true when they were made.
    pub(crate) promises_broken: u64,
}

/// Promise that once these eight bytes are at this place, these ranges are on the medium, because a FLUSH precedes the ATOMIC
/// WRITE.
#[derive(Debug)]
pub(crate) struct Promise {
    pub(crate) at: u64,
    pub(crate) value: [u8; 8],
    pub(crate) ranges: Vec<Range<usize>>,
}

impl Image {
    /// Checks the promise of an ATOMIC WRITE that takes effect.
    fn publish(&mut self, at: u64, value: [u8; 8]) {
        let made = self.promises.iter().position(|p| p.at == at && p.value == value);
        if let Some(promise) = made.map(|i| self.promises.swap_remove(i)) {
            let kept = |range: &Range<usize>| self.medium[range.clone()] == self.bytes[range.clone()];
            self.promises_broken += u64::from(!promise.ranges.iter().all(kept));
        }
    }
}

/// A host's memory.
#[derive(Debug)]
pub(crate) struct SimMemory {
    image: Mutex<Image>,
    len: usize,
    kind: MemoryKind,
}

/// How an engine accesses memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryKind {
    /// Set when the engine places together what arrives together.
    pub(crate) gathers: bool,
    /// Set when accesses of peers wait for a medium.
    pub(crate) on_medium: bool,
}

impl MemoryKind {
    /// Returns one of the four kinds.
    pub(crate) fn random(dice: &mut Dice) -> MemoryKind {
        let kind = dice.below(4);
        MemoryKind {
            gathers: kind & 1 == 0,
            on_medium: kind & 2 == 0,
        }
    }
}

impl SimMemory {
    /// Creates memory with these bytes.
    pub(crate) fn new(bytes: Vec<u8>, kind: MemoryKind) -> SimMemory {
        let len = bytes.len();
        let medium = vec![0; len];
        SimMemory {
            image: Mutex::new(Image {
                bytes,
                medium,
                promises: Vec::new(),
                promises_broken: 0,
            }),
            len,
            kind,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Image> {
        self.image.lock()
    }

    fn range(&self, offset: u64, len: u64) -> Result<Range<usize>, Fault> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len as u64);
        Ok(offset as usize..end.ok_or(Fault::Unmapped)? as usize)
    }
}

/// Memory behind a door, over which a region is registered. No access may pass once the region is deregistered.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) shut: AtomicBool,
    /// Reads and writes that passed although the door was shut.
    pub(crate) trespasses: AtomicU64,
    /// Set to make every access fault.
    pub(crate) fails: AtomicBool,
    /// Set to make every flush fault.
    pub(crate) flush_fails: AtomicBool,
}

impl Door {
    pub(crate) fn new(memory: Arc<SimMemory>) -> Door {
        Door {
            memory,
            shut: AtomicBool::new(false),
            trespasses: AtomicU64::new(0),
            fails: AtomicBool::new(false),
            flush_fails: AtomicBool::new(false),
        }
    }

    fn pass(&self) -> Result<(), Fault> {
        if self.shut.load(Ordering::Relaxed) && !IS_UNDER_WAY.get() {
            self.trespasses.fetch_add(1, Ordering::Relaxed);
        }
        if self.fails.load(Ordering::Relaxed) {
            Err(Fault::Io(5))
        } else {
            Ok(())
        }
    }
}

thread_local! {
    /// Set while an access is carried out that passed its door before.
    static IS_UNDER_WAY: Cell<bool> = const { Cell::new(false) };
}

/// Notes that an access to a medium begins: it passes its door now.
pub(crate) fn begin(job: &AccessJob) {
    // The engine learns of a fault when the access is carried out.
    let _ = job.memory.read(job.offset, &mut []);
}

/// Carries out an access that has begun, though its door may have been shut since.
pub(crate) fn carry_out(job: &AccessJob) -> Result<Accessed, Fault> {
    IS_UNDER_WAY.set(true);
    let result = job.run();
    IS_UNDER_WAY.set(false);
    result
}

impl Memory for Door {
    fn len(&self) -> u64 {
        self.memory.len as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.pass()?;
        let range = self.memory.range(offset, out.len() as u64)?;
        out.copy_from_slice(&self.memory.lock().bytes[range]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.pass()?;
        let range = self.memory.range(offset, bytes.len() as u64)?;
        self.memory.lock().bytes[range].copy_from_slice(bytes);
        Ok(())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.pass()?;
        let range = self.memory.range(offset, 8)?;
        let mut image = self.memory.lock();
        let mut before = [0; 8];
        before.copy_from_slice(&image.bytes[range.clone()]);
        if let Atomic::Write(value) = atomic {
            image.publish(offset, value);
        }
        image.bytes[range].copy_from_slice(&atomic.apply(before));
        Ok(u64::from_ne_bytes(before))
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn medium(&self) -> Option<Medium> {
        self.memory.kind.on_medium.then_some(Medium(1))
    }

    fn gathers(&self) -> bool {
        self.memory.kind.gathers
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        let range = self.memory.range(offset, length)?;
        if self.fails.load(Ordering::Relaxed) || self.flush_fails.load(Ordering::Relaxed) {
            return Err(Fault::Io(5));
        }
        if placement.contains(Placement::PERSISTENT) {
            let mut image = self.memory.lock();
            let Image { bytes, medium, .. } = &mut *image;
            medium[range.clone()].copy_from_slice(&bytes[range]);
        }
        Ok(())
    }
}

/// Ranges of a memory that operations in flight use.
#[derive(Debug)]
pub(crate) struct Space {
    /// Free ranges: offset to length.
    free: BTreeMap<u64, u64>,
}

impl Space {
    pub(crate) fn new(range: Range<u64>) -> Space {
        Space {
            free: BTreeMap::from([(range.start, range.end - range.start)]),
        }
    }

    /// Takes a range, first fit: a freed range is soon used again, so a write that arrives too late hits something.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let (at, room) = self.free.iter().find(|(_, room)| **room >= len)?;
        let (at, room) = (*at, *room);
        self.free.remove(&at);
        if room > len {
            self.free.insert(at + len, room - len);
        }
        Some(at)
    }

    pub(crate) fn give(&mut self, mut at: u64, mut len: u64) {
        if len == 0 {
            return;
        }
        if let Some((before, room)) = self.free.range(..at).next_back()
            && before + room == at
        {
            (at, len) = (*before, room + len);
            self.free.remove(&at);
        }
        if let Some(room) = self.free.remove(&(at + len)) {
            len += room;
        }
        self.free.insert(at, len);
    }
}
