//! Memory that takes the data of commands: of the host, or of the drive.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use rdmux_verbs::ledger::Location;
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{Fault, Memory};

use crate::command::Action;
use crate::{Bar, Function};

/// Bytes of a page, of which all addresses of a command are.
pub const PAGE: usize = 4096;

/// Memory that takes the data of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Memory of the host.
    #[default]
    Dram,
    /// The drive's Controller Memory Buffer.
    Cmb,
    /// The drive's Persistent Memory Region.
    Pmr,
}

impl MemoryKind {
    /// Returns where it is, for the ledger.
    pub const fn location(self) -> Location {
        match self {
            MemoryKind::Dram => Location::Dram,
            MemoryKind::Cmb | MemoryKind::Pmr => Location::Drive,
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryKind::Dram => "dram",
            MemoryKind::Cmb => "cmb",
            MemoryKind::Pmr => "pmr",
        })
    }
}

impl FromStr for MemoryKind {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryKind, String> {
        let kinds = [MemoryKind::Dram, MemoryKind::Cmb, MemoryKind::Pmr];
        let kind = kinds.into_iter().find(|kind| kind.to_string() == text);
        kind.ok_or_else(|| format!("'{text}' is no memory of a drive: give dram, cmb or pmr"))
    }
}

/// Addresses on the bus of a pool's pages.
#[derive(Debug)]
enum Addresses {
    Listed(Vec<u64>),
    From(u64),
}

impl Addresses {
    fn of(&self, page: usize) -> u64 {
        match self {
            Addresses::Listed(pages) => pages[page],
            Addresses::From(base) => base + (page * PAGE) as u64,
        }
    }
}

/// Memory of one kind, by pages.
#[derive(Debug)]
pub struct Pool {
    kind: MemoryKind,
    /// The drive may write here: data of reads.
    reads: bool,
    /// The drive may read here: data of writes.
    writes: bool,
    memory: Arc<dyn Memory>,
    /// Offset of the first page in the memory.
    base: u64,
    addresses: Addresses,
    free: Mutex<Extents>,
}

impl Pool {
    /// Makes one of memory of the host.
    pub(crate) fn dram(function: &dyn Function, bytes: usize) -> io::Result<Arc<Pool>> {
        let dma = function.dma(bytes)?;
        let pages = bytes.div_ceil(PAGE).min(dma.pages.len());
        Ok(Arc::new(Pool {
            kind: MemoryKind::Dram,
            reads: true,
            writes: true,
            memory: dma.memory,
            base: 0,
            addresses: Addresses::Listed(dma.pages),
            free: Mutex::new(Extents::new(pages)),
        }))
    }

    /// Makes one of `bytes` at an offset of a BAR, or fewer if the BAR ends before. `address` is that of the first byte on the bus.
    pub(crate) fn of_bar(
        kind: MemoryKind,
        bar: &Bar,
        offset: u64,
        bytes: u64,
        address: u64,
        (reads, writes): (bool, bool),
    ) -> Arc<Pool> {
        let there = bar.memory.len().saturating_sub(offset);
        let pages = usize::try_from(bytes.min(there)).unwrap_or(usize::MAX) / PAGE;
        Arc::new(Pool {
            kind,
            reads,
            writes,
            memory: bar.memory.clone(),
            base: offset,
            addresses: Addresses::From(address),
            free: Mutex::new(Extents::new(pages)),
        })
    }

    /// Returns its kind.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Takes so many bytes, rounded up to pages, in a row of the pool. `None` if there are none.
    pub fn allocate(self: &Arc<Pool>, bytes: usize) -> Option<Buffer> {
        let pages = bytes.div_ceil(PAGE).max(1);
        let first = self.free.lock().take(pages)?;
        Some(Buffer {
            pool: self.clone(),
            first,
            pages,
        })
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> u64 {
        (self.free.lock().pages * PAGE) as u64
    }

    /// Returns bytes of the most pages in a row that are free.
    pub fn room(&self) -> usize {
        let free = self.free.lock();
        let pages = free.free.iter().map(|(_, pages)| *pages);
        pages.max().unwrap_or(0) * PAGE
    }

    /// Returns the memory that holds it, and its offset there. No register lies in it, but submission queues may.
    pub fn memory(&self) -> (&Arc<dyn Memory>, u64) {
        (&self.memory, self.base)
    }

    /// Returns true if the drive moves the data of such a command to or from here.
    pub fn takes(&self, action: Action) -> bool {
        match action {
            Action::Read => self.reads,
            Action::Write => self.writes,
            Action::Flush | Action::WriteZeroes | Action::Deallocate => true,
        }
    }

    /// Returns the address on the bus of its first byte.
    pub(crate) fn address(&self) -> u64 {
        self.addresses.of(0)
    }
}

/// Pages of a [`MemoryKind`], until they are dropped. A drive that has them for a command keeps them so long.
pub struct Buffer {
    pool: Arc<Pool>,
    first: usize,
    pages: usize,
}

impl Buffer {
    /// Returns the kind of its memory.
    pub fn kind(&self) -> MemoryKind {
        self.pool.kind
    }

    /// Returns its bytes: whole pages.
    pub fn bytes(&self) -> usize {
        self.pages * PAGE
    }

    /// Returns the address on the bus of a page.
    ///
    /// # Panics
    /// It has no such page.
    pub fn address(&self, page: usize) -> u64 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.pool.addresses.of(self.first + page)
    }

    /// Returns the memory that holds it, and its offset there.
    pub fn memory(&self) -> (&Arc<dyn Memory>, u64) {
        (&self.pool.memory, self.offset())
    }

    /// Returns its pool, and its offset there.
    pub fn place(&self) -> (&Arc<Pool>, u64) {
        (&self.pool, (self.first * PAGE) as u64)
    }

    /// Takes its first bytes, whole pages, as a buffer of their own. `None` if there would be none on one side.
    pub fn split(&mut self, bytes: usize) -> Option<Buffer> {
        let pages = bytes / PAGE;
        if !bytes.is_multiple_of(PAGE) || pages == 0 || pages >= self.pages {
            return None;
        }
        let first = Buffer {
            pool: self.pool.clone(),
            first: self.first,
            pages,
        };
        self.first += pages;
        self.pages -= pages;
        Some(first)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// They are not all in it, or the memory has gone.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), Fault> {
        self.check(at, out.len())?;
        self.pool.memory.read(self.offset() + at as u64, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// They do not all fit, or the memory has gone.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Fault> {
        self.check(at, bytes.len())?;
        self.pool
            .memory
            .write_in_any_order(self.offset() + at as u64, bytes)
    }

    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    fn offset(&self) -> u64 {
        self.pool.base + (self.first * PAGE) as u64
    }

    fn check(&self, at: usize, len: usize) -> Result<(), Fault> {
        let end = at.checked_add(len).ok_or(Fault::Unmapped)?;
        match end <= self.bytes() {
            true => Ok(()),
            false => Err(Fault::Unmapped),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.free.lock().give(self.first, self.pages);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Buffer({}, {} pages at {})",
            self.kind(),
            self.pages,
            self.first
        )
    }
}

/// Free pages of a pool: runs in ascending order, none beside another.
#[derive(Debug)]
struct Extents {
    pages: usize,
    /// First page and number.
    free: Vec<(usize, usize)>,
}

impl Extents {
    fn new(pages: usize) -> Extents {
        let free = if pages > 0 { vec![(0, pages)] } else { Vec::new() };
        Extents { pages, free }
    }

    /// Takes pages in a row.
    fn take(&mut self, pages: usize) -> Option<usize> {
        let at = self.free.iter().position(|(_, free)| *free >= pages)?;
        let (first, free) = self.free[at];
        if free == pages {
            self.free.remove(at);
        } else {
            self.free[at] = (first + pages, free - pages);
        }
        Some(first)
    }

    fn give(&mut self, first: usize, pages: usize) {
        let at = self.free.partition_point(|(start, _)| *start < first);
        self.free.insert(at, (first, pages));
        let joins = |left: (usize, usize), right: (usize, usize)| left.0 + left.1 == right.0;
        if let Some(next) = self.free.get(at + 1).copied()
            && joins(self.free[at], next)
        {
            self.free[at].1 += next.1;
            self.free.remove(at + 1);
        }
        if at > 0 && joins(self.free[at - 1], self.free[at]) {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents__join_again_in_any_order() {
        let orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]];
        for order in orders {
            let mut extents = Extents::new(10);
            let taken = [3, 4, 3].map(|pages| (extents.take(pages).unwrap(), pages));
            assert_eq!(extents.take(1), None, "all are taken");
            for at in order {
                extents.give(taken[at].0, taken[at].1);
            }
            assert_eq!(extents.free, [(0, 10)], "{order:?}");
        }
    }

    #[test]
    fn extents__give_pages_in_a_row_alone() {
        let mut extents = Extents::new(6);
        let taken = [2, 2, 2].map(|pages| extents.take(pages).unwrap());
        extents.give(taken[0], 2);
        extents.give(taken[2], 2);
        assert_eq!(extents.take(3), None);
        assert_eq!(extents.take(2), Some(0));
        assert_eq!(Extents::new(0).take(1), None);
    }
}
