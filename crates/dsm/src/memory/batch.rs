//! Changes of a group of pages, collected and then made together.

use std::ops::Range;

use super::{Access, Change};

/// Changes of any pages, each to a state of its own. [`View::apply`](super::View::apply) makes them with few system calls.
///
/// Of several changes of one page the last counts. A change that does not fit the page's state, such as `protect` of a page that is absent,
/// leaves it as it is.
#[derive(Debug, Default)]
pub struct PageBatch {
    changes: Vec<(u32, Change)>,
}

/// Result of a [`PageBatch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Pages that have changed their state.
    pub pages: usize,
    /// System calls that took rights, each of which interrupts the other CPUs that run the process.
    pub takes: usize,
    /// System calls that gave rights.
    pub gives: usize,
}

impl PageBatch {
    /// Makes an empty one.
    pub fn new() -> PageBatch {
        PageBatch::default()
    }

    /// Adds: pages that may be written may only be read from now on.
    pub fn protect(&mut self, pages: Range<u32>) {
        self.add(pages, Change::Protect);
    }

    /// Adds: pages that may be read may be written, too.
    pub fn unprotect(&mut self, pages: Range<u32>) {
        self.add(pages, Change::Unprotect);
    }

    /// Adds: pages may not be touched. Their bytes stay in the alias: send them from there, afterwards.
    pub fn invalidate(&mut self, pages: Range<u32>) {
        self.add(pages, Change::Invalidate);
    }

    /// Adds: pages that may not be touched, and whose bytes are in the alias, may be accessed.
    pub fn install(&mut self, pages: Range<u32>, access: Access) {
        self.add(pages, Change::Install(access));
    }

    /// Adds one change of some pages.
    pub fn add(&mut self, pages: Range<u32>, change: Change) {
        self.changes.extend(pages.map(|page| (page, change)));
    }

    /// Returns true if there are no changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Removes all changes, in ascending order of their pages, each page once.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (u32, Change)> {
        // The sort keeps the order of one page's changes.
        self.changes.sort_by_key(|(page, _)| *page);
        let mut changes = self.changes.drain(..).peekable();
        std::iter::from_fn(move || {
            let mut last = changes.next()?;
            while let Some(later) = changes.next_if(|(page, _)| *page == last.0) {
                last = later;
            }
            Some(last)
        })
    }
}
