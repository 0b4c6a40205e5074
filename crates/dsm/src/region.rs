//! Regions: the memory that the nodes share.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rdmux_memory::mapping::Mapping;
use rdmux_wire::dsm::NodeId;

use crate::array::{Array, Number};
use crate::memory::userfault::Delivery;
use crate::memory::{self, Access, Change, PageState, View};
use crate::session::{Error, Session};
use crate::signal;
use crate::stat::Stat;

/// The pages of a region in this process. Clones are the same pages.
#[derive(Clone, Debug)]
pub(crate) struct Pages(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    view: View,
    delivery: Delivery,
    /// Pages that are lost, each with a node.
    lost: Mutex<BTreeMap<u32, NodeId>>,
}

impl Pages {
    pub(crate) fn new(view: View, delivery: Delivery) -> Pages {
        Pages(Arc::new(Inner {
            view,
            delivery,
            lost: Mutex::default(),
        }))
    }

    pub(crate) fn view(&self) -> &View {
        &self.0.view
    }

    /// Returns how faults are announced.
    pub(crate) fn delivery(&self) -> Delivery {
        self.0.delivery
    }

    /// Returns the addresses of the program's view.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let mapping = self.view().mapping();
        mapping.address()..mapping.address() + mapping.len() as u64
    }

    /// Lets the threads go on that wait in the kernel for a page.
    pub(crate) fn wake(&self, page: u32) -> Result<(), memory::Error> {
        match self.view().userfault() {
            Some(userfault) if self.delivery() != Delivery::Signal => {
                let page_bytes = rustix::param::page_size() as u64;
                let at = self.addresses().start + u64::from(page) * page_bytes;
                userfault.wake(at..at + page_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Makes a page unusable, which was lost with a node.
    pub(crate) fn poison(&self, page: u32, node: NodeId) -> Result<(), memory::Error> {
        let mut lost = self.0.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.insert(page, node).is_some() {
            drop(lost);
            return self.wake(page);
        }
        drop(lost);
        match self.view().poison(page..page + 1) {
            // Threads that wait look at the list.
            Err(memory::Error::Lacks(_)) => self.view().change(page, Change::Invalidate).map(|_| ()),
            outcome => outcome,
        }
    }

    /// Returns whether a page may be accessed now.
    pub(crate) fn allow(&self, page: u32, access: Access) -> bool {
        let state = self.view().state(page);
        state != PageState::Poisoned && state.allows(access)
    }

    /// Returns the node with which a page was lost.
    pub(crate) fn lost(&self, page: u32) -> Option<NodeId> {
        let lost = self.0.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get(&page).copied()
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

    /// Returns the bytes as the program sees them: a touch of a page that this node has no right to waits until it has.
    ///
    /// A touch of a page that was lost with a node raises `SIGBUS`; [`Region::acquire`] returns an error.
    pub fn mapping(&self) -> &Mapping {
        self.pages.view().mapping()
    }

    /// Returns the address of the first byte, the same on all nodes.
    pub fn address(&self) -> u64 {
        self.mapping().address()
    }

    /// Gets a right to bytes of the region, which other nodes may take again at once. Many pages are asked for at a time.
    ///
    /// # Errors
    /// [`Error::Lost`] if a page was lost with a node.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn acquire(&self, bytes: Range<u64>, access: Access) -> Result<(), Error> {
        let pages = self.pages_of(&bytes);
        self.session
            .shared()
            .acquire(self.number, &self.pages, pages, access)
    }

    /// Asks for a right to bytes of the region without waiting: a later touch of them waits less. At most 256 pages that are away are asked for.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn prefetch(&self, bytes: Range<u64>, access: Access) {
        let pages = self.pages_of(&bytes);
        self.session
            .shared()
            .prefetch(self.number, &self.pages, pages, access);
    }

    /// Returns the pages that have some bytes.
    fn pages_of(&self, bytes: &Range<u64>) -> Range<u32> {
        let all = self.mapping().len() as u64;
        assert!(
            bytes.start <= bytes.end && bytes.end <= all,
            "bytes {bytes:?} of {all}"
        );
        let page_bytes = rustix::param::page_size() as u64;
        (bytes.start / page_bytes) as u32..bytes.end.div_ceil(page_bytes) as u32
    }

    /// Copies bytes of the region. Those of one page are what it had at one moment, but for writes of this node's own threads. `out` is in no region.
    ///
    /// # Errors
    /// [`Error::Lost`] if a page was lost with a node.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let alias = self.pages.view().alias();
        self.by_page(offset, out.len(), |page, bytes, at| {
            // The frame is up to date as long as the driver takes no right.
            self.session
                .shared()
                .access(self.number, &self.pages, page, Access::Read, || {
                    alias.mapping().read(at, &mut out[bytes.clone()])
                })
        })
    }

    /// Writes bytes of the region. Other nodes see those of one page at once. `bytes` are in no region.
    ///
    /// # Errors
    /// [`Error::Lost`] if a page was lost with a node. Those before are written.
    ///
    /// # Panics
    /// If the bytes are not in the region.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let alias = self.pages.view().alias();
        self.by_page(offset, bytes.len(), |page, part, at| {
            self.session
                .shared()
                .access(self.number, &self.pages, page, Access::Write, || {
                    alias.mapping().write(at, &bytes[part.clone()])
                })
        })
    }

    /// Calls a function for the part of some bytes that is in each page: with the page, the part, and its offset in the region.
    fn by_page(
        &self,
        offset: u64,
        len: usize,
        mut f: impl FnMut(u32, Range<usize>, u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let all = self.mapping().len() as u64;
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= all),
            "{len} bytes at {offset} of {all}"
        );
        let page_bytes = rustix::param::page_size() as u64;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let left = (page_bytes - at % page_bytes) as usize;
            let part = done..len.min(done + left);
            done = part.end;
            f((at / page_bytes) as u32, part, at)?;
        }
        Ok(())
    }

    /// Returns an array of `len` numbers, the first at a byte of the region.
    ///
    /// # Panics
    /// If the offset is no multiple of 8, or the numbers are not in the region.
    pub fn array<T: Number>(&self, offset: u64, len: usize) -> Array<'_, T> {
        let all = self.mapping().len() as u64;
        let end = (len as u64)
            .checked_mul(8)
            .and_then(|bytes| bytes.checked_add(offset));
        let is_inside = end.is_some_and(|end| end <= all);
        assert!(
            is_inside && offset.is_multiple_of(8),
            "{len} numbers at {offset} of {all} bytes"
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
