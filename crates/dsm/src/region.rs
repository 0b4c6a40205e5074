//! Regions: the memory that the nodes share.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rdmux_memory::mapping::Mapping;
use rdmux_wire::dsm::NodeId;

use crate::array::{Array, Number};
use crate::geometry::Geometry;
use crate::memory::userfault::Delivery;
use crate::memory::{self, Access, Change, PageState, View};
use crate::session::{Error, Session};
use crate::signal;
use crate::stat::Stat;

/// The pages of a region in this process, by the units that they show. Clones are the same pages.
#[derive(Clone, Debug)]
pub(crate) struct Pages(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    view: View,
    delivery: Delivery,
    geometry: Geometry,
    /// Units that are lost, each with a node.
    lost: Mutex<BTreeMap<u32, NodeId>>,
}

impl Pages {
    pub(crate) fn new(view: View, delivery: Delivery, geometry: Geometry) -> Pages {
        Pages(Arc::new(Inner {
            view,
            delivery,
            geometry,
            lost: Mutex::default(),
        }))
    }

    pub(crate) fn view(&self) -> &View {
        &self.0.view
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// Returns how faults are announced.
    pub(crate) fn delivery(&self) -> Delivery {
        self.0.delivery
    }

    /// Returns the addresses of the program's views.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let mapping = self.view().mapping();
        mapping.address()..mapping.address() + mapping.len() as u64
    }

    /// Returns the address at which the program sees the first byte of a unit.
    pub(crate) fn address_of(&self, unit: u32) -> u64 {
        let geometry = self.geometry();
        self.addresses().start + geometry.place_of(geometry.bytes_of(unit).start)
    }

    /// Lets the threads go on that wait in the kernel for a unit.
    pub(crate) fn wake(&self, unit: u32) -> Result<(), memory::Error> {
        match self.delivery() {
            Delivery::Signal => Ok(()),
            Delivery::Read | Delivery::Poll => self.view().wake(self.geometry().page_of(unit)),
        }
    }

    /// Makes a unit unusable, which was lost with a node.
    pub(crate) fn poison(&self, unit: u32, node: NodeId) -> Result<(), memory::Error> {
        let mut lost = self.0.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.insert(unit, node).is_some() {
            drop(lost);
            return self.wake(unit);
        }
        drop(lost);
        let page = self.geometry().page_of(unit);
        match self.view().poison(page..page + 1) {
            // Threads that wait look at the list.
            Err(memory::Error::Lacks(_)) => self.view().change(page, Change::Invalidate).map(|_| ()),
            outcome => outcome,
        }
    }

    /// Returns the state of the page by which the program sees a unit.
    pub(crate) fn state(&self, unit: u32) -> PageState {
        self.view().state(self.geometry().page_of(unit))
    }

    /// Returns whether a unit may be accessed now.
    pub(crate) fn allow(&self, unit: u32, access: Access) -> bool {
        let state = self.state(unit);
        state != PageState::Poisoned && state.allows(access)
    }

    /// Returns the node with which a unit was lost.
    pub(crate) fn lost(&self, unit: u32) -> Option<NodeId> {
        let lost = self.0.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get(&unit).copied()
    }
}

/// A region: memory that all nodes read and write at the same address. Its bytes are 0 at first.
#[derive(Debug)]
pub struct Region<'a> {
    session: &'a Session,
    number: u32,
    pages: Pages,
}

impl<'a> Region<'a> {
    pub(crate) fn new(session: &'a Session, number: u32, pages: Pages) -> Region<'a> {
        Region {
            session,
            number,
            pages,
        }
    }

    /// Returns the bytes as the program sees them: a touch of a unit that this node has no right to waits until it has. If units are smaller than a
    /// page, it has all bytes several times, and each byte is to be used at its [`Region::place`] alone: elsewhere it is as old as it happens to be,
    /// and what is written there may be lost.
    ///
    /// A touch of a unit that was lost with a node raises `SIGBUS`; [`Region::acquire`] returns an error.
    pub fn mapping(&self) -> &Mapping {
        self.pages.view().mapping()
    }

    /// Returns the address of the first byte, the same on all nodes.
    pub fn address(&self) -> u64 {
        self.mapping().address()
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.pages.geometry().bytes()
    }

    /// Returns the bytes of a unit.
    pub fn unit_bytes(&self) -> u64 {
        self.pages.geometry().unit_bytes()
    }

    /// Returns the place of a byte in [`Region::mapping`], the same on all nodes. The bytes of one unit are side by side; those of the next one follow if
    /// a unit is not smaller than a page.
    ///
    /// # Panics
    /// If the byte is neither in the region nor the one behind it.
    pub fn place(&self, offset: u64) -> u64 {
        let all = self.bytes();
        assert!(offset <= all, "byte {offset} of {all}");
        self.pages.geometry().place_of(offset)
    }

    /// Returns the bytes of the region that the program sees at an address; `None` if it sees none there, or if not all of them are side by side.
    pub fn bytes_at(&self, address: u64, len: u64) -> Option<Range<u64>> {
        let geometry = self.pages.geometry();
        let area = self.pages.addresses();
        let end = address.checked_add(len).filter(|end| *end <= area.end)?;
        let place = address.checked_sub(area.start)?;
        if geometry.views() == 1 {
            return Some(place..end - area.start);
        }
        let start = geometry.offset_at(place)?;
        let left = geometry.bytes_of(geometry.unit_with(start)).end - start;
        (place < area.end - area.start && len <= left).then_some(start..start + len)
    }

    /// Gets a right to bytes of the region, which other nodes may take again at once. Many units are asked for at a time.
    ///
    /// # Errors
    /// [`Error::Lost`] if a unit was lost with a node.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn acquire(&self, bytes: Range<u64>, access: Access) -> Result<(), Error> {
        let units = self.units_of(&bytes);
        self.session
            .shared()
            .acquire(self.number, &self.pages, units, access)
    }

    /// Asks for a right to bytes of the region without waiting: a later touch of them waits less. At most 256 units that are away are asked for, and at
    /// most 1 MiB, but at least two units.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn prefetch(&self, bytes: Range<u64>, access: Access) {
        let units = self.units_of(&bytes);
        self.session
            .shared()
            .prefetch(self.number, &self.pages, units, access);
    }

    /// Returns the units that have some bytes.
    fn units_of(&self, bytes: &Range<u64>) -> Range<u32> {
        let all = self.bytes();
        assert!(
            bytes.start <= bytes.end && bytes.end <= all,
            "bytes {bytes:?} of {all}"
        );
        self.pages.geometry().units_with(bytes)
    }

    /// Copies bytes of the region. Those of one unit are what it had at one moment, but for writes of this node's own threads. `out` is in no region.
    ///
    /// # Errors
    /// [`Error::Lost`] if a unit was lost with a node.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let alias = self.pages.view().alias();
        self.by_unit(offset, out.len(), |unit, bytes, at| {
            // The frame is up to date as long as the driver takes no right.
            self.session
                .shared()
                .access(self.number, &self.pages, unit, Access::Read, || {
                    alias.mapping().read(at, &mut out[bytes.clone()])
                })
        })
    }

    /// Writes bytes of the region. Other nodes see those of one unit at once. `bytes` are in no region.
    ///
    /// # Errors
    /// [`Error::Lost`] if a unit was lost with a node. Those before are written.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let alias = self.pages.view().alias();
        self.by_unit(offset, bytes.len(), |unit, part, at| {
            self.session
                .shared()
                .access(self.number, &self.pages, unit, Access::Write, || {
                    alias.mapping().write(at, &bytes[part.clone()])
                })
        })
    }

    /// Calls a function for the part of some bytes that is in each unit: with the unit, the part, and its offset in the region.
    fn by_unit(
        &self,
        offset: u64,
        len: usize,
        mut f: impl FnMut(u32, Range<usize>, u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let all = self.bytes();
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= all),
            "{len} bytes at {offset} of {all}"
        );
        let geometry = self.pages.geometry();
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let unit = geometry.unit_with(at);
            let left = (geometry.bytes_of(unit).end - at) as usize;
            let part = done..len.min(done + left);
            done = part.end;
            f(unit, part, at)?;
        }
        Ok(())
    }

    /// Returns an array of `len` numbers, the first at a byte of the region.
    ///
    /// # Panics
    /// If the offset is no multiple of 8, the numbers are not in the region, or they are in several units that are smaller than a page.
    pub fn array<T: Number>(&self, offset: u64, len: usize) -> Array<'_, T> {
        let all = self.bytes();
        let end = (len as u64)
            .checked_mul(8)
            .and_then(|bytes| bytes.checked_add(offset));
        let end = end.filter(|end| *end <= all && offset.is_multiple_of(8));
        let end = end.unwrap_or_else(|| panic!("{len} numbers at {offset} of {all} bytes"));
        let geometry = self.pages.geometry();
        let is_together = geometry.views() == 1 || geometry.units_with(&(offset..end)).len() <= 1;
        assert!(
            is_together,
            "{len} numbers at {offset} are in several units of {} bytes",
            geometry.unit_bytes()
        );
        Array::new(self, offset, len)
    }

    /// Returns the counts of this region at this node.
    pub fn stat(&self) -> Stat {
        self.session.shared().lock().sheet().region(self.number)
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        signal::release(&self.pages);
    }
}
