//! The program's view of a region, and the engines that change it.

use std::ops::Range;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_memory::mapping::{Mapping, PlacedMapping, Rights};

use super::batch::{Applied, PageBatch};
use super::costs::Costs;
use super::plan::{Call, plan};
use super::table::{MappedWords, PageState, PageTable, Pending};
use super::userfault::{
    Catches, Delivery, Fault, Options, POISON_LACKS, Userfault, Writes, check_install_for_reading,
};
use super::{Access, Error};

/// Means by which pages are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// userfaultfd(2).
    Userfault(Options),
    /// mprotect(2): slower, and each range of rights of its own counts against `vm.max_map_count`. A touch that is not allowed raises `SIGSEGV`.
    Mprotect,
}

/// A change of a page's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `Modified` to `Shared`.
    Protect,
    /// `Shared` to `Modified`.
    Unprotect,
    /// `Shared` or `Modified` to `Invalid`.
    Invalidate,
    /// `Invalid` to `Shared` or `Modified`.
    Install(Access),
}

impl Change {
    /// Returns the state that follows; `None` if the change does not fit.
    pub(super) fn of(self, state: PageState) -> Option<PageState> {
        match (self, state) {
            (Change::Protect, PageState::Modified) => Some(PageState::Shared),
            (Change::Unprotect, PageState::Shared) => Some(PageState::Modified),
            (Change::Invalidate, PageState::Shared | PageState::Modified) => Some(PageState::Invalid),
            (Change::Install(Access::Read), PageState::Invalid) => Some(PageState::Shared),
            (Change::Install(Access::Write), PageState::Invalid) => Some(PageState::Modified),
            _ => None,
        }
    }
}

/// An access that the state of a page does not allow: its thread waits until the state has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Index of the page.
    pub page: u32,
    /// Access that is wanted.
    pub access: Access,
}

/// The program's view of a region: a second mapping of its file, with a state for each page. All pages are `Invalid` at first.
///
/// It may have the file several times, one behind the other ([`View::repeated`]), so that each part of a frame can be seen by a page with a state of
/// its own; and a page of it may be several of the system's, which change together.
///
/// Any thread may change pages and answer faults at any time: rights are given only while the state of a page is kept, and taken after it has
/// changed. Of two changes of one page at the same time either may be the first: the other waits until the call of the first returns. Threads have
/// no more rights than the table says when a call returns; only after a call that has failed they may, and then the view is of no use any more.
///
/// Rights are those of threads and of their system calls. A device, or the kernel on its behalf, that has got the memory of a page before keeps
/// writing to it after its rights were taken: `O_DIRECT` reads, buffers of io_uring and memory regions (MRs) on the view. Let them end first, or
/// let them use the alias.
///
/// The kernel makes valid pages absent, too, when memory is short: with userfaultfd(2) their touch is a fault. So with [`Catches::Threads`] or
/// [`Delivery::Signal`] a system call that touches a valid page may still fail with `EFAULT`.
///
/// A thread that changes pages or answers faults must not touch the view meanwhile, nor may a signal handler that interrupts it.
#[derive(Debug)]
pub struct View {
    // Unmapped first: without its userfaultfd a touch would raise no fault.
    app: PlacedMapping,
    /// `None`: mprotect(2).
    userfault: Option<Userfault>,
    writes: Writes,
    /// Pages between those of a batch may lose their rights for a moment.
    bridges: bool,
    /// Each change of a batch takes a system call of its own.
    is_unbatched: bool,
    table: PageTable,
    alias: Arc<AnonymousMemory>,
    costs: Costs,
    page_bytes: u64,
    /// Pages until the file begins again.
    pages_each: u32,
}

impl View {
    /// Maps a region at an address, or where the system wishes.
    ///
    /// # Errors
    /// [`Error::Lacks`] or [`Error::NotPermitted`] where userfaultfd(2) does not serve, as before Linux 6.4: [`Engine::Mprotect`] does.
    /// Also fails for memory that peers cannot map, which is in no file.
    pub fn new(
        alias: Arc<AnonymousMemory>,
        address: Option<u64>,
        engine: Engine,
        costs: Costs,
    ) -> Result<View, Error> {
        let page_bytes = rustix::param::page_size() as u64;
        View::repeated(alias, address, engine, costs, page_bytes, 1)
    }

    /// Maps a region `times` one behind the other, with pages of `page_bytes`, of which the region has whole ones.
    ///
    /// # Errors
    /// As [`View::new`].
    ///
    /// # Panics
    /// If a page is none or several of the system's, or the region is to be mapped no time.
    pub fn repeated(
        alias: Arc<AnonymousMemory>,
        address: Option<u64>,
        engine: Engine,
        costs: Costs,
        page_bytes: u64,
        times: u32,
    ) -> Result<View, Error> {
        let system_page = rustix::param::page_size() as u64;
        let file_bytes = alias.mapping().len() as u64;
        assert!(page_bytes > 0 && page_bytes.is_multiple_of(system_page));
        assert!(
            file_bytes.is_multiple_of(page_bytes),
            "pages of {page_bytes} bytes"
        );
        let app = alias.map_times(address, times as usize)?;
        let advised = alias.mapping().refuse_huge_pages();
        advised.map_err(|error| Error::of("madvise", &error))?;
        let len = app.mapping().len();
        let pages = u32::try_from(len as u64 / page_bytes).map_err(|_| Error::TooLarge)?;
        let mut writes = Writes::Fault;
        // By mprotect(2) no thread can wait until a page in between is given back.
        let mut bridges = false;
        let userfault = match engine {
            Engine::Userfault(options) => {
                writes = options.writes;
                // System calls that touch such a page must wait, too. A record would end: pages in between may become valid, and be written,
                // after the plan.
                bridges = options.catches == Catches::All
                    && options.delivery != Delivery::Signal
                    && writes == Writes::Fault;
                // Found at the first fault, it would be too late for another engine.
                check_install_for_reading(options)?;
                let userfault = Userfault::open(options)?;
                userfault.register(&app)?;
                Some(userfault)
            }
            Engine::Mprotect => {
                let taken = app.set_rights(0, len, Rights::None);
                taken.map_err(|error| Error::of("mprotect", &error))?;
                None
            }
        };
        Ok(View {
            app,
            userfault,
            writes,
            bridges,
            is_unbatched: false,
            table: PageTable::new(pages).map_err(|error| Error::of("mmap", &error))?,
            alias,
            costs: costs.of_pages(page_bytes / system_page),
            page_bytes,
            pages_each: (file_bytes / page_bytes) as u32,
        })
    }

    /// Has [`View::apply`] make the changes of a batch page by page, as programs do that call mprotect(2): for comparisons.
    #[must_use]
    pub fn unbatched(self) -> View {
        View {
            is_unbatched: true,
            ..self
        }
    }

    /// Makes the changes of a batch, and empties it: they are first noted in the table, then rights are taken, and then given. Where it is cheaper,
    /// pages that are in between lose their rights for a moment; a thread that touches one then faults, which [`View::resolve`] answers. This is
    /// done only with [`Catches::All`], [`Writes::Fault`] and without [`Delivery::Signal`].
    ///
    /// # Errors
    /// Fails if the system refuses a call.
    ///
    /// # Panics
    /// If a page is outside of the region; if one is to be protected in a view that records writes.
    pub fn apply(&self, batch: &mut PageBatch) -> Result<Applied, Error> {
        if self.is_unbatched {
            return self.apply_page_by_page(batch);
        }
        let mut pending = self.table.pending();
        for (page, change) in batch.take() {
            self.note(&mut pending, page, change);
        }
        let calls = plan(pending.changed(), |page| self.table.state(page), &self.prices());
        let mut applied = Applied {
            pages: pending.changed().len(),
            ..Applied::default()
        };
        for call in calls {
            match call {
                Call::Drop(_) | Call::Protect(_) => applied.takes += 1,
                Call::Install(..) | Call::Unprotect(_) => applied.gives += 1,
            }
            self.carry_out(call)?;
        }
        Ok(applied)
    }

    fn apply_page_by_page(&self, batch: &mut PageBatch) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        for (page, change) in batch.take() {
            if !self.change(page, change)? {
                continue;
            }
            applied.pages += 1;
            match change {
                Change::Protect | Change::Invalidate => applied.takes += 1,
                Change::Unprotect | Change::Install(_) => applied.gives += 1,
            }
        }
        Ok(applied)
    }

    /// Changes one page by one system call. Returns whether the change fits its state.
    ///
    /// # Errors
    /// As [`View::apply`].
    ///
    /// # Panics
    /// As [`View::apply`].
    pub fn change(&self, page: u32, change: Change) -> Result<bool, Error> {
        let mut pending = self.table.pending();
        if !self.note(&mut pending, page, change) {
            return Ok(false);
        }
        let pages = page..page + 1;
        self.carry_out(match change {
            Change::Protect => Call::Protect(pages),
            Change::Unprotect => Call::Unprotect(pages),
            Change::Invalidate => Call::Drop(pages),
            Change::Install(access) => Call::Install(pages, access),
        })?;
        Ok(true)
    }

    /// Poisons pages, whatever their states: a thread that touches one, or waits for one, gets `SIGBUS`, and a system call fails with `EFAULT`. The
    /// alias still has their bytes.
    ///
    /// # Errors
    /// [`Error::Lacks`] without userfaultfd(2) or before Linux 6.6. Then no page has changed: make the pages `Invalid` and end the threads that wait.
    ///
    /// # Panics
    /// If a page is outside of the region.
    pub fn poison(&self, pages: Range<u32>) -> Result<(), Error> {
        self.userfault
            .as_ref()
            .map_or(Err(POISON_LACKS), Userfault::check_poison)?;
        self.check(&pages);
        if pages.is_empty() {
            return Ok(());
        }
        let mut pending = self.table.pending();
        for page in pages.clone() {
            pending.add(page, |_| Some(PageState::Poisoned));
        }
        self.drop_pages(pages.clone())?;
        self.set_poison(pages)
    }

    /// Answers a fault if the state of the page allows the access: the page was absent for a moment only. Else returns what is wanted; the
    /// thread waits until a change allows it.
    ///
    /// In a view that records writes, a valid page allows both accesses. One that was absent becomes `Modified`: no record tells whether it was
    /// written, so it counts as written.
    ///
    /// # Errors
    /// [`Error::Outside`] if the fault is in no page of the view.
    pub fn resolve(&self, fault: Fault) -> Result<Option<Wanted>, Error> {
        let start = self.app.mapping().address();
        let page = fault.address.checked_sub(start).map(|at| at / self.page_bytes);
        let page = page.and_then(|page| u32::try_from(page).ok());
        let page = page.filter(|page| *page < self.pages());
        let page = page.ok_or(Error::Outside(fault.address))?;
        let access = fault.access;
        let needed = match self.writes {
            Writes::Fault => access,
            Writes::Record => Access::Read,
        };
        loop {
            let mut state = self.state(page);
            if state == PageState::Poisoned {
                // A batch that was planned before has removed the mark.
                self.set_poison(page..page + 1)?;
                return Ok(None);
            }
            if !state.allows(needed) {
                return Ok(Some(Wanted { page, access }));
            }
            if self.writes == Writes::Record {
                self.table.change(page, |state| Change::Unprotect.of(state));
                state = PageState::Modified;
            }
            // The state may have changed just now.
            if self.give_back(page, fault.address, state)? {
                return Ok(None);
            }
        }
    }

    /// Finds the pages that were written since they were installed or last taken, and protects them. Returns ranges of them in ascending order. A
    /// page that another thread makes absent meanwhile may be missing.
    ///
    /// # Errors
    /// [`Error::Lacks`] if the view does not record writes. If the system refuses a call, all valid pages of the range count as written.
    ///
    /// # Panics
    /// If a page is outside of the region.
    pub fn take_written(&self, pages: Range<u32>) -> Result<Vec<Range<u32>>, Error> {
        const LACKS: Error = Error::Lacks("recorded writes (Linux 6.7)");
        let userfault = self.userfault.as_ref().ok_or(LACKS)?;
        self.check(&pages);
        if pages.is_empty() {
            return Ok(Vec::new());
        }
        let start = self.app.mapping().address();
        let mut written: Vec<Range<u32>> = Vec::new();
        let mut add = |page: u32| {
            // The kernel counts absent pages as written. Of a page that is several of the system's, each may be found.
            let is_known = written.last().is_some_and(|last| last.end > page);
            if is_known || !self.table.state(page).allows(Access::Read) {
                return;
            }
            self.table.change(page, |state| Change::Protect.of(state));
            match written.last_mut() {
                Some(last) if last.end == page => last.end += 1,
                _ => written.push(page..page + 1),
            }
        };
        let taken = userfault.take_written(self.addresses(&pages), |found| {
            let first = (found.start - start) / self.page_bytes;
            let end = (found.end - start).div_ceil(self.page_bytes);
            (first as u32..end as u32).for_each(&mut add);
        });
        if taken.is_err() && self.writes == Writes::Record {
            // The scan may have protected more pages than it has returned. The first error is the one to report.
            for page in pages {
                self.table.change(page, |state| Change::Unprotect.of(state));
                let _ = self.give(page..page + 1, PageState::Modified, false);
            }
        }
        taken.map(|()| written)
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.table.pages()
    }

    /// Returns the state of a page.
    ///
    /// # Panics
    /// If it is outside of the region.
    pub fn state(&self, page: u32) -> PageState {
        self.table.state(page)
    }

    /// Returns the bytes as the program sees them: a touch that is not allowed waits.
    pub fn mapping(&self) -> &Mapping {
        self.app.mapping()
    }

    /// Returns the region, all of whose bytes can be accessed.
    pub fn alias(&self) -> &Arc<AnonymousMemory> {
        &self.alias
    }

    /// Returns the userfaultfd, from which faults are read.
    pub fn userfault(&self) -> Option<&Userfault> {
        self.userfault.as_ref()
    }

    /// Checks that pages are in the region.
    fn check(&self, pages: &Range<u32>) {
        let all = self.pages();
        assert!(
            pages.start <= pages.end && pages.end <= all,
            "pages {pages:?} of {all}"
        );
    }

    /// Poisons pages that are absent, and wakes the threads that wait for them.
    fn set_poison(&self, pages: Range<u32>) -> Result<(), Error> {
        let Some(userfault) = &self.userfault else {
            return Err(POISON_LACKS);
        };
        self.pieces(pages).try_for_each(|piece| {
            // The kernel keeps the protection of an absent page, and poisons none that has it.
            userfault.unprotect(self.addresses(&piece))?;
            userfault.poison(self.addresses(&piece))
        })
    }

    /// Notes a change in the table. Returns whether it fits.
    fn note(&self, pending: &mut Pending<'_, MappedWords>, page: u32, change: Change) -> bool {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        assert!(
            change != Change::Protect || self.writes == Writes::Fault,
            "recorded writes are taken, which protects"
        );
        pending.add(page, |state| change.of(state))
    }

    /// Returns the prices for a plan.
    fn prices(&self) -> Costs {
        let mut costs = self.costs;
        if !self.bridges {
            // A call that costs nothing takes no page in between.
            costs.drop.call_ns = 0;
            costs.protect.call_ns = 0;
        }
        costs
    }

    fn carry_out(&self, call: Call) -> Result<(), Error> {
        match call {
            Call::Drop(pages) => self.drop_pages(pages),
            Call::Protect(pages) => self.protect(pages),
            Call::Install(pages, access) => {
                let state = match access {
                    Access::Read => PageState::Shared,
                    Access::Write => PageState::Modified,
                };
                self.give(pages, state, true).map(drop)
            }
            Call::Unprotect(pages) => self.give(pages, PageState::Modified, false).map(drop),
        }
    }

    /// Gives the rights of a state to the pages that have it, and wakes the waiters of all. Returns whether there was one.
    pub(super) fn give(&self, pages: Range<u32>, state: PageState, are_absent: bool) -> Result<bool, Error> {
        let give = |pages| match state {
            PageState::Modified if !are_absent => self.unprotect(pages),
            PageState::Modified => self.install(pages, Access::Write),
            _ => self.install(pages, Access::Read),
        };
        self.table.give(pages, state, give, |page| self.wake(page))
    }

    /// Gives the rights of its state to the system's page at an address, which is in a page: others of that page may be installed already, and
    /// would cost a call each.
    fn give_back(&self, page: u32, address: u64, state: PageState) -> Result<bool, Error> {
        let system_page = rustix::param::page_size() as u64;
        let at = address - address % system_page;
        let access = match state {
            PageState::Modified => Access::Write,
            _ => Access::Read,
        };
        let give = |pages| match &self.userfault {
            Some(userfault) => self.install_at(userfault, at..at + system_page, access),
            None => self.install(pages, access),
        };
        self.table
            .give(page..page + 1, state, give, |page| self.wake(page))
    }

    /// Wakes the threads that wait for a page: they touch it once more.
    pub(crate) fn wake(&self, page: u32) -> Result<(), Error> {
        match &self.userfault {
            Some(userfault) => userfault.wake(self.addresses(&(page..page + 1))),
            None => Ok(()),
        }
    }

    /// Makes pages absent.
    pub(super) fn drop_pages(&self, pages: Range<u32>) -> Result<(), Error> {
        match &self.userfault {
            Some(_) => {
                let (offset, len) = self.bytes(&pages);
                let dropped = self.app.drop_pages(offset, len);
                dropped.map_err(|error| Error::of("madvise", &error))
            }
            None => self.set_rights(pages, Rights::None),
        }
    }

    /// Takes the right to write.
    pub(super) fn protect(&self, pages: Range<u32>) -> Result<(), Error> {
        match &self.userfault {
            Some(userfault) => self
                .pieces(pages)
                .try_for_each(|piece| userfault.protect(self.addresses(&piece))),
            None => self.set_rights(pages, Rights::Read),
        }
    }

    /// Gives the right to write.
    pub(super) fn unprotect(&self, pages: Range<u32>) -> Result<(), Error> {
        match &self.userfault {
            Some(userfault) => self
                .pieces(pages)
                .try_for_each(|piece| userfault.unprotect(self.addresses(&piece))),
            None => self.set_rights(pages, Rights::ReadWrite),
        }
    }

    /// Installs pages.
    pub(super) fn install(&self, pages: Range<u32>, access: Access) -> Result<(), Error> {
        let Some(userfault) = &self.userfault else {
            return self.set_rights(
                pages,
                match access {
                    Access::Read => Rights::Read,
                    Access::Write => Rights::ReadWrite,
                },
            );
        };
        self.pieces(pages)
            .try_for_each(|piece| self.install_at(userfault, self.addresses(&piece), access))
    }

    /// Installs the system's pages at addresses of one time of the file.
    fn install_at(&self, userfault: &Userfault, addresses: Range<u64>, access: Access) -> Result<(), Error> {
        match userfault.install(addresses.clone(), access) {
            Err(Error::NoFrame(at)) => {
                self.make_frames(at..addresses.end)?;
                userfault.install(at..addresses.end, access)
            }
            result => result,
        }
    }

    /// Makes frames, of zeros, for those addresses of one time of the file that have none.
    fn make_frames(&self, addresses: Range<u64>) -> Result<(), Error> {
        let offset = (addresses.start - self.app.mapping().address()) % self.alias.mapping().len() as u64;
        let len = (addresses.end - addresses.start) as usize;
        let made = self.alias.mapping().populate(offset, len);
        made.map_err(|error| Error::of("making frames", &error))
    }

    /// Divides pages where the file begins again: the kernel installs and poisons pages of one mapping at a time.
    fn pieces(&self, pages: Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let each = self.pages_each;
        let mut at = pages.start;
        std::iter::from_fn(move || {
            let piece = at..pages.end.min((at / each + 1).saturating_mul(each));
            at = piece.end;
            (!piece.is_empty()).then_some(piece)
        })
    }

    fn set_rights(&self, pages: Range<u32>, rights: Rights) -> Result<(), Error> {
        let (offset, len) = self.bytes(&pages);
        let set = self.app.set_rights(offset, len, rights);
        set.map_err(|error| Error::of("mprotect", &error))
    }

    /// Returns the offset and length in bytes of pages.
    fn bytes(&self, pages: &Range<u32>) -> (u64, usize) {
        let offset = u64::from(pages.start) * self.page_bytes;
        let len = u64::from(pages.end - pages.start) * self.page_bytes;
        (offset, len as usize)
    }

    fn addresses(&self, pages: &Range<u32>) -> Range<u64> {
        let (offset, len) = self.bytes(pages);
        let start = self.app.mapping().address() + offset;
        start..start + len as u64
    }
}
