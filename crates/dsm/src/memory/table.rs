//! States of the pages of a view: what threads may do, whatever is installed at the moment.
//!
//! Rights are given to threads only while the entry is held, and only those of its state. They are taken after the state has changed, and a
//! state changes only while the entry is not held. A state that has changed changes no more until the calls have returned that bring the threads'
//! rights to it ([`Pending`]). So once a call that takes rights has returned, no thread has more than the table says, and
//! one that has less is given the rest when it faults.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_memory::mapping::Mapping;

use super::Access;
use super::plan::Changed;

/// Bit of an entry: a thread gives the rights of the state to threads, and the state does not change meanwhile.
const HELD: u32 = 1 << 31;
/// Bit of an entry: the state has changed, and not yet the rights of threads.
const PENDING: u32 = 1 << 30;
/// Bits of an entry that are the state.
const STATE: u32 = 3;
/// Entries that are held at most at a time, so that others wait for a short time only.
const HELD_MAX: u32 = 512;
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
    /// Its bytes are lost: a touch raises `SIGBUS`. It stays so.
    Poisoned,
}

impl PageState {
    /// Returns whether threads may access the page so.
    pub fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => matches!(self, PageState::Shared | PageState::Modified),
            Access::Write => self == PageState::Modified,
        }
    }

    fn of(entry: u32) -> PageState {
        match entry & STATE {
            0 => PageState::Invalid,
            1 => PageState::Shared,
            2 => PageState::Modified,
            _ => PageState::Poisoned,
        }
    }
}

/// Words of the entries, `Invalid` at first. Tests implement them with other memory.
pub(super) trait Words {
    /// Loads a word.
    fn load(&self, page: u32, order: Ordering) -> u32;
    /// Replaces a word if it is `old`, `AcqRel`. Returns whether it was.
    fn replace(&self, page: u32, old: u32, new: u32) -> bool;
    /// Stores a word that no other thread changes, `Release`.
    fn store(&self, page: u32, value: u32);
    /// Waits before another look.
    fn pause(&self, looks: u32);
}

/// Words in memory that the kernel provides as they are touched: regions may be large and sparse.
#[derive(Debug)]
pub(super) struct MappedWords(Mapping);

impl MappedWords {
    fn word(&self, page: u32) -> &AtomicU32 {
        self.0.word(size_of::<u32>() * page as usize)
    }
}

impl Words for MappedWords {
    fn load(&self, page: u32, order: Ordering) -> u32 {
        self.word(page).load(order)
    }

    fn replace(&self, page: u32, old: u32, new: u32) -> bool {
        let replaced = self
            .word(page)
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed);
        replaced.is_ok()
    }

    fn store(&self, page: u32, value: u32) {
        self.word(page).store(value, Ordering::Release);
    }

    fn pause(&self, looks: u32) {
        match looks % SPINS {
            0 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
}

/// An entry a page.
#[derive(Debug)]
pub(super) struct PageTable<W = MappedWords> {
    words: W,
    pages: u32,
}

impl PageTable {
    pub(super) fn new(pages: u32) -> std::io::Result<PageTable> {
        let words = MappedWords(Mapping::anonymous(size_of::<u32>() * pages as usize)?);
        Ok(PageTable { words, pages })
    }
}

impl<W: Words> PageTable<W> {
    /// Returns the number of pages.
    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    pub(super) fn state(&self, page: u32) -> PageState {
        PageState::of(self.words.load(page, Ordering::Acquire))
    }

    /// Changes a state, for which rights need not be taken, as `f` says. Returns whether it did. Waits for a change that is pending.
    pub(super) fn change(&self, page: u32, f: impl Fn(PageState) -> Option<PageState>) -> bool {
        let changed = |entry| f(PageState::of(entry)).map(|after| after as u32);
        self.update(page, HELD | PENDING, changed).is_some()
    }

    /// Makes a set of pages whose changes are pending.
    pub(super) fn pending(&self) -> Pending<'_, W> {
        Pending {
            table: self,
            changed: Vec::new(),
        }
    }

    /// Calls `give` with ranges of those pages that have a state, which keep it until `give` has returned. Returns whether there was one. Calls
    /// `wake` with each of the other pages: a thread that waits for it must look again.
    pub(super) fn give<E>(
        &self,
        pages: Range<u32>,
        state: PageState,
        mut give: impl FnMut(Range<u32>) -> Result<(), E>,
        mut wake: impl FnMut(u32) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut has_given = false;
        let mut at = pages.start;
        while at < pages.end {
            let end = pages.end.min(at.saturating_add(HELD_MAX));
            let held = self.hold(at..end, state);
            if held.pages.is_empty() {
                // Another thread has changed it meanwhile. It wakes no waiter if it takes rights.
                wake(at)?;
                at += 1;
                continue;
            }
            give(held.pages.clone())?;
            has_given = true;
            at = held.pages.end;
        }
        Ok(has_given)
    }

    /// Holds the first of some pages, up to one that has another state.
    fn hold(&self, pages: Range<u32>, state: PageState) -> Held<'_, W> {
        let mut held = Held {
            words: &self.words,
            pages: pages.start..pages.start,
        };
        let held_entry = |entry| (PageState::of(entry) == state).then_some(entry | HELD);
        let holds = |page| self.update(page, HELD, held_entry);
        while held.pages.end < pages.end && holds(held.pages.end).is_some() {
            held.pages.end += 1;
        }
        held
    }

    /// Replaces an entry once it has none of some bits, as `f` says. Returns the one before and the new one if it did.
    fn update(&self, page: u32, without: u32, f: impl Fn(u32) -> Option<u32>) -> Option<(u32, u32)> {
        let mut looks = 0;
        loop {
            let found = self.words.load(page, Ordering::Relaxed);
            if found & without == 0 {
                let new = f(found)?;
                if self.words.replace(page, found, new) {
                    return Some((found, new));
                }
            } else {
                looks += 1;
                self.words.pause(looks);
            }
        }
    }
}

/// Entries that are held, until it is dropped.
struct Held<'a, W: Words> {
    words: &'a W,
    pages: Range<u32>,
}

impl<W: Words> Drop for Held<'_, W> {
    fn drop(&mut self) {
        for page in self.pages.clone() {
            // No other thread changes it meanwhile.
            let entry = self.words.load(page, Ordering::Relaxed);
            self.words.store(page, entry & !HELD);
        }
    }
}

/// Pages whose state has changed, and not yet the rights of threads, until it is dropped. Others that change a state wait for that: add pages in
/// ascending order, lest two wait for each other.
pub(super) struct Pending<'a, W: Words> {
    table: &'a PageTable<W>,
    changed: Vec<Changed>,
}

impl<W: Words> Pending<'_, W> {
    /// Changes the state of a page, once no other change of it is pending, as `f` says. Returns whether it did.
    pub(super) fn add(&mut self, page: u32, f: impl Fn(PageState) -> Option<PageState>) -> bool {
        assert!(self.changed.last().is_none_or(|last| last.page < page));
        let changed = |entry| f(PageState::of(entry)).map(|after| after as u32 | PENDING);
        let Some((before, after)) = self.table.update(page, HELD | PENDING, changed) else {
            return false;
        };
        let [before, after] = [before, after].map(PageState::of);
        self.changed.push(Changed { page, before, after });
        true
    }

    /// Returns the changes.
    pub(super) fn changed(&self) -> &[Changed] {
        &self.changed
    }
}

impl<W: Words> Drop for Pending<'_, W> {
    fn drop(&mut self) {
        for changed in &self.changed {
            self.table
                .update(changed.page, HELD, |entry| Some(entry & !PENDING));
        }
    }
}

#[cfg(test)]
mod tests;
