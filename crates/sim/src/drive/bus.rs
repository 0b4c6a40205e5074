//! The bus: which memory is at an address, and who has it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rdmux_rnic::ledger::{Class, Ledger, Location, Route};
use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Atomic, Fault, HeapMemory, Memory, Placement};

use crate::dice::Dice;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;

/// Memory of the drive, as the BAR that shows it.
pub(super) struct DriveMemory {
    bytes: Arc<HeapMemory>,
    ledger: Arc<Ledger>,
    /// Set while the RNIC accesses it, and not the processor.
    by_nic: AtomicBool,
    /// Set when the drive answers accesses.
    is_decoded: AtomicBool,
    /// Submission queues in it: what is written there are commands.
    queues: Mutex<Vec<Range<u64>>>,
}

impl fmt::Debug for DriveMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DriveMemory({} bytes)", self.len())
    }
}

impl DriveMemory {
    pub(super) fn new(bytes: Arc<HeapMemory>, ledger: Arc<Ledger>) -> DriveMemory {
        DriveMemory {
            bytes,
            ledger,
            by_nic: AtomicBool::new(false),
            is_decoded: AtomicBool::new(false),
            queues: Mutex::default(),
        }
    }

    pub(super) fn set_by_nic(&self, by_nic: bool) {
        self.by_nic.store(by_nic, Ordering::Relaxed);
    }

    pub(super) fn set_decoded(&self, is_decoded: bool) {
        self.is_decoded.store(is_decoded, Ordering::Relaxed);
    }

    pub(super) fn add_queue(&self, range: Range<u64>) {
        self.queues.lock().push(range);
    }

    pub(super) fn forget_queues(&self) {
        self.queues.lock().clear();
    }

    /// Returns the bytes, for the drive itself.
    pub(super) fn inside(&self) -> &HeapMemory {
        &self.bytes
    }

    /// Books an access from outside. Returns false if the drive does not answer.
    fn pass(&self, offset: u64, len: usize) -> bool {
        if !self.is_decoded.load(Ordering::Relaxed) {
            return false;
        }
        let route = match self.by_nic.load(Ordering::Relaxed) {
            true => Route::Nic(Location::Drive),
            false => Route::Processor,
        };
        let is_queue = self.queues.lock().iter().any(|range| range.contains(&offset));
        let class = if is_queue { Class::Command } else { Class::Data };
        self.ledger.book(route, class, len as u64);
        true
    }
}

impl Memory for DriveMemory {
    fn len(&self) -> u64 {
        self.bytes.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.bytes.read(offset, out)?;
        if !self.pass(offset, out.len()) {
            out.fill(0xff);
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.bytes.read(offset, &mut vec![0; bytes.len()])?;
        match self.pass(offset, bytes.len()) {
            true => self.bytes.write(offset, bytes),
            false => Ok(()),
        }
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn location(&self) -> Location {
        Location::Drive
    }

    fn placement(&self) -> Placement {
        self.bytes.placement()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.bytes.flush_is_immediate(placement)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.bytes.flush(offset, length, placement)
    }
}

/// Memory that the drive reaches, and an offset in it.
#[derive(Clone, Debug)]
pub(super) enum Place {
    Dram(Arc<HeapMemory>, u64),
    Own(Arc<DriveMemory>, u64),
}

impl Place {
    pub(super) fn location(&self) -> Location {
        match self {
            Place::Dram(..) => Location::Dram,
            Place::Own(..) => Location::Drive,
        }
    }

    fn memory(&self) -> (&HeapMemory, u64) {
        match self {
            Place::Dram(memory, offset) => (memory, *offset),
            Place::Own(memory, offset) => (memory.inside(), *offset),
        }
    }

    pub(super) fn read(&self, out: &mut [u8]) -> Result<(), Fault> {
        let (memory, offset) = self.memory();
        memory.read(offset, out)
    }

    pub(super) fn write(&self, bytes: &[u8]) -> Result<(), Fault> {
        let (memory, offset) = self.memory();
        memory.write(offset, bytes)
    }
}

/// A page of the host's memory.
#[derive(Debug)]
struct HostPage {
    memory: Weak<HeapMemory>,
    offset: u64,
}

/// Memory of the drive at addresses of the bus.
#[derive(Debug)]
struct Window {
    range: Range<u64>,
    memory: Arc<DriveMemory>,
    /// Offset in the memory of its first address.
    offset: u64,
}

/// Pages of the host, windows of the drive's memory, and who has the pages that were lent.
#[derive(Debug)]
pub(super) struct Bus {
    pages: BTreeMap<u64, HostPage>,
    next: u64,
    windows: Vec<Window>,
    /// By page, an odd number while it is lent to the drive, which grows with each change.
    turns: BTreeMap<u64, u64>,
}

impl Default for Bus {
    fn default() -> Bus {
        Bus {
            pages: BTreeMap::new(),
            next: 0x1_0000_0000,
            windows: Vec::new(),
            turns: BTreeMap::new(),
        }
    }
}

impl Bus {
    /// Makes memory of the host, whose pages lie scattered. An address is never used twice.
    pub(super) fn dma(&mut self, bytes: usize, dice: &mut Dice) -> (Arc<HeapMemory>, Vec<u64>) {
        let number = (bytes as u64).div_ceil(PAGE).max(1);
        let memory = Arc::new(HeapMemory::new((number * PAGE) as usize));
        let mut pages: Vec<u64> = (0..number)
            .map(|_| {
                // Some lie side by side, most do not.
                self.next += PAGE * if dice.one_in(3) { 1 } else { dice.between(2, 9) };
                self.next
            })
            .collect();
        for at in (1..pages.len()).rev() {
            pages.swap(at, dice.below(at as u64 + 1) as usize);
        }
        for (nr, page) in pages.iter().enumerate() {
            let page_of = HostPage {
                memory: Arc::downgrade(&memory),
                offset: nr as u64 * PAGE,
            };
            self.pages.insert(*page, page_of);
        }
        (memory, pages)
    }

    /// Shows the drive's memory at an address, or nowhere.
    pub(super) fn show(&mut self, memory: &Arc<DriveMemory>, at: Option<(Range<u64>, u64)>) {
        self.windows.retain(|window| !Arc::ptr_eq(&window.memory, memory));
        self.windows.extend(at.map(|(range, offset)| Window {
            range,
            memory: memory.clone(),
            offset,
        }));
    }

    /// Finds what is at an address. Bytes must not cross a page.
    pub(super) fn find(&self, address: u64) -> Option<Place> {
        let window = self.windows.iter().find(|window| window.range.contains(&address));
        if let Some(window) = window {
            let offset = window.offset + (address - window.range.start);
            return Some(Place::Own(window.memory.clone(), offset));
        }
        let page = self.pages.get(&(address & !(PAGE - 1)))?;
        let memory = page.memory.upgrade()?;
        Some(Place::Dram(memory, page.offset + address % PAGE))
    }

    /// A page belongs to the drive from now on, or no more. Returns false if that is so already.
    pub(super) fn set_lent(&mut self, page: u64, is_lent: bool) -> bool {
        let turn = self.turns.entry(page).or_default();
        let changes = turn.is_multiple_of(2) == is_lent;
        *turn += u64::from(changes);
        changes
    }

    /// Returns the turn of the page that has an address; `None` if nobody has ever lent it.
    pub(super) fn turn(&self, address: u64) -> Option<u64> {
        self.turns.get(&(address & !(PAGE - 1))).copied()
    }
}
