//! States of the pages of a view: what threads may do, whatever is installed at the moment.

use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_memory::mapping::Mapping;

use super::Access;

/// Bit of an entry: somebody gives the rights of the state to threads, and the state does not change meanwhile.
const HELD: u32 = 1 << 31;
/// Bits of an entry that are the state.
const STATE: u32 = 3;
/// Looks at a held entry before the CPU is left to others: a holder makes one system call.
const SPINS: u32 = 200;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageState {
    /// Threads may not touch it.
    Invalid,
    /// Threads may read it.
    Shared,
    /// Threads may read and write it.
    Modified,
}

impl PageState {
    /// Returns whether threads may access the page so.
    pub fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => self >= PageState::Shared,
            Access::Write => self == PageState::Modified,
        }
    }

    fn of(entry: u32) -> PageState {
        match entry & STATE {
            0 => PageState::Invalid,
            1 => PageState::Shared,
            _ => PageState::Modified,
        }
    }
}

/// An entry a page, all `Invalid` at first.
///
/// Rights are given to threads only while the entry is held, and only those of its state. They are taken after the state has changed, and a
/// state changes only while the entry is not held. So once a call that takes rights has returned, no thread has more than the table says, and
/// one that has less is given the rest when it faults.
#[derive(Debug)]
pub(super) struct PageTable {
    /// The kernel provides memory for what is touched only: regions may be large and sparse.
    entries: Mapping,
    pages: u32,
}

impl PageTable {
    pub(super) fn new(pages: u32) -> std::io::Result<PageTable> {
        let entries = Mapping::anonymous(size_of::<u32>() * pages as usize)?;
        Ok(PageTable { entries, pages })
    }

    /// Returns the number of pages.
    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    fn entry(&self, page: u32) -> &AtomicU32 {
        self.entries.word(size_of::<u32>() * page as usize)
    }

    pub(super) fn state(&self, page: u32) -> PageState {
        PageState::of(self.entry(page).load(Ordering::Acquire))
    }

    /// Changes a state once its entry is not held, as `f` says. Returns the state before and after if they differ.
    pub(super) fn change(
        &self,
        page: u32,
        f: impl Fn(PageState) -> Option<PageState>,
    ) -> Option<(PageState, PageState)> {
        let before = self.update(page, |before| f(before).map(|after| after as u32))?;
        Some((before, f(before)?))
    }

    /// Replaces an entry that is not held, as `f` says. Returns the state before if it did.
    fn update(&self, page: u32, f: impl Fn(PageState) -> Option<u32>) -> Option<PageState> {
        let entry = self.entry(page);
        let mut looks = 0;
        loop {
            let found = entry.load(Ordering::Relaxed);
            if found & HELD != 0 {
                looks += 1;
                match looks % SPINS {
                    0 => std::thread::yield_now(),
                    _ => std::hint::spin_loop(),
                }
                continue;
            }
            let before = PageState::of(found);
            let new = f(before)?;
            if entry
                .compare_exchange_weak(found, new, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return Some(before);
            }
        }
    }

    /// Holds the entries from `first` on, below `end`, that have a state: none if the first has another.
    pub(super) fn hold(&self, first: u32, end: u32, state: PageState) -> Held<'_> {
        let mut held = Held {
            table: self,
            first,
            end: first,
        };
        let holds = |page| self.update(page, |found| (found == state).then_some(state as u32 | HELD));
        while held.end < end && holds(held.end).is_some() {
            held.end += 1;
        }
        held
    }
}

/// Entries that are held, until it is dropped.
#[derive(Debug)]
pub(super) struct Held<'a> {
    table: &'a PageTable,
    first: u32,
    end: u32,
}

impl Held<'_> {
    /// Returns their pages.
    pub(super) fn pages(&self) -> std::ops::Range<u32> {
        self.first..self.end
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for page in self.pages() {
            self.table.entry(page).fetch_and(!HELD, Ordering::Release);
        }
    }
}
