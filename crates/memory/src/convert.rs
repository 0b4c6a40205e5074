//! Memory of the program that moves into a file in memory, at the same addresses, so that peers on the host can map it.
//!
//! A program that uses the C interface registers memory of its own allocator, which no other process can map. Once such a region is in
//! use, its pages move: they are taken away from their addresses in one step, copied into a file, and the file is mapped where they were.
//! Whoever touches them meanwhile waits (userfaultfd(2)). The device reaches the file by a mapping of its own, so a program may unmap the
//! memory, as it may with an RNIC, which pins pages.
//!
//! When no region has these pages any more, they move back, wherever the program has them mapped by then: allocators rely on private pages,
//! which `MADV_DONTNEED` empties and a fork copies. A child of fork(2) gets private copies at once, while its parent waits.
//!
//! # What the program could notice
//! While the pages are in the file, `MADV_DONTNEED` does not empty them, and raw clone(2) or `_Fork(3)` shares them with the child. Another
//! process that writes to pages by process_vm_writev(2) in the microseconds in which they move may write to the copy that is dropped.
//! `RDMUX_CONVERT=off` keeps all memory as it is.
#![allow(
    unsafe_code,
    reason = "replaces mappings of the program by others with the same bytes"
)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rdmux_rnic::NotShared;
use rdmux_rnic::sync::{Mutex, RwLock};
use rdmux_verbs::thread::without_signals;
use rustix::io::{pread, pwrite};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mprotect, mremap_fixed,
};
use rustix::process::{Resource, getrlimit};

use crate::mapping::{Mapping, sealed_file};

mod conditions;
mod fork;
mod maps;
mod userfault;

#[cfg(test)]
mod tests;

use conditions::{Advised, Guard};
use maps::FileId;
use userfault::{Catches, Userfault};

/// Bytes that move at once: threads that touch them wait for as long as that takes.
const CHUNK_BYTES: u64 = 2 << 20;
/// Bytes of the buffer through which they are copied, so that pages of zeros stay without memory.
const BUFFER_BYTES: usize = 64 << 10;

/// Whether memory of the program is converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Never.
    Off,
    /// Where no thread of the program can notice.
    On,
    /// Also where the system lets this process catch the faults of threads, but not those of their system calls: a call that reads or writes
    /// memory that moves just then fails with `EFAULT`.
    User,
}

impl Mode {
    /// Returns what `RDMUX_CONVERT` says: `off`, `on` (as without it), or `user-mode`.
    pub(crate) fn of_process() -> Mode {
        static MODE: OnceLock<Mode> = OnceLock::new();
        *MODE.get_or_init(|| match std::env::var("RDMUX_CONVERT").as_deref() {
            Ok("off") => Mode::Off,
            Ok("user-mode") => Mode::User,
            _ => Mode::On,
        })
    }
}

/// The programs whose memory this process's user may have moved while they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convertible {
    /// All.
    All,
    /// Those with one thread.
    OneThread,
    /// None: the system refuses userfaultfd(2), or lacks a part of it.
    None,
}

/// Returns the programs whose memory can move on this host, tested on this process.
pub fn convertible() -> Convertible {
    if Userfault::new(Catches::All).is_ok() {
        Convertible::All
    } else if Userfault::new(Catches::Threads).is_ok() {
        Convertible::OneThread
    } else {
        Convertible::None
    }
}

/// How far a conversion has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All pages have moved.
    Done,
    /// More of them are to move.
    More,
    /// None has moved: only the program's thread can do it, since the system lets no other catch the faults of its calls.
    NotHere,
    /// None has moved: another device of the process has regions of the same bytes, and its peers may write to them.
    Elsewhere,
}

/// Pages of the program that a file holds.
#[derive(Debug)]
pub(crate) struct Shared {
    file: OwnedFd,
    id: FileId,
    alias: Mapping,
    /// The addresses at which the pages were when they moved.
    pages: Range<u64>,
    advised: Advised,
    /// End of the addresses that have moved so far.
    moved: AtomicU64,
}

/// Bytes of the program that it has registered, once or several times: libraries register the same bytes with different rights. All these
/// registrations share what is known of the bytes, and move together.
#[derive(Debug)]
pub(crate) struct Registered {
    key: Key,
    /// Number of the memories made of them. Changes under the registry's lock. A device that finds no more than its own begins to move the
    /// pages, and whoever adds one after that finds `moving` set.
    pub(crate) memories: AtomicUsize,
    /// Calls of this process that accessed them.
    pub(crate) calls: AtomicU32,
    /// Held while their pages move; read while they are accessed by their addresses.
    pub(crate) moving: RwLock<Option<Result<Arc<Shared>, NotShared>>>,
    /// Their whole pages, once all have moved.
    pub(crate) shared: OnceLock<Arc<Shared>>,
}

/// The address, the length, and a number: the program may map other memory in the place of some that is still registered, and register that.
type Key = (u64, u64, u64);

/// What the process has registered, and converted. Locked while pages move, inside of [`Registered::moving`].
#[derive(Debug)]
struct Registry {
    next: u64,
    registered: BTreeMap<Key, Arc<Registered>>,
    conversions: Vec<Arc<Shared>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    next: 0,
    registered: BTreeMap::new(),
    conversions: Vec::new(),
});

/// The registration of a region. Pages that have moved for it move back when this and all others that have them are dropped.
#[derive(Debug)]
pub(crate) struct Registration(Arc<Registered>);

fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns the length of the file for some bytes: longer, so that memory that the program enlarges by mremap(2) has zeros behind its end.
fn file_bytes(bytes: u64) -> Result<u64, NotShared> {
    const GROWTH: u64 = 1 << 40;
    match getrlimit(Resource::Fsize).current {
        None => Ok(bytes + GROWTH),
        // A longer file would be a signal.
        Some(most) if bytes <= most => Ok(bytes),
        Some(_) => Err(NotShared::NoResources),
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn pointer(address: u64) -> *mut std::ffi::c_void {
    std::ptr::without_provenance_mut(address as usize)
}

impl Registered {
    /// Returns whether memory that is registered now at these addresses is this one: what has moved is still there.
    fn is_in_place(&self) -> bool {
        let mut moving = self.moving.write();
        self.forget_refusal(&mut moving);
        let begun = moving.as_ref().and_then(|begun| begun.as_ref().ok());
        let begun = self.shared.get().or(begun);
        begun.is_none_or(|shared| shared.is_in_place())
    }

    /// Lets the pages be tried again: what kept them from moving may have passed.
    fn forget_refusal(&self, moving: &mut Option<Result<Arc<Shared>, NotShared>>) {
        if matches!(moving, Some(Err(_))) {
            *moving = None;
            self.calls.store(0, Ordering::Relaxed);
        }
    }

    /// Returns their pages, outwards.
    fn range(&self) -> Range<u64> {
        let (address, len, _) = self.key;
        let start = address - address % page();
        let end = address.saturating_add(len);
        start..end.checked_next_multiple_of(page()).unwrap_or(end)
    }
}

impl Registry {
    /// Returns whether a region of other bytes has some of the pages.
    fn overlaps(&self, own: &Registered, range: &Range<u64>) -> bool {
        let mut others = self
            .registered
            .values()
            .filter(|other| !std::ptr::eq(&***other, own));
        others.any(|other| overlap(&other.range(), range))
    }

    /// Moves the pages back that no region has any more.
    fn undo(&mut self) {
        let registered = &self.registered;
        self.conversions.retain(|shared| {
            let in_use = registered
                .values()
                .any(|other| overlap(&other.range(), &shared.pages));
            // Pages that cannot move now stay, so that they are tried again, and so that a fork finds them.
            in_use || shared.move_back().is_err()
        });
    }
}

impl Registration {
    pub(crate) fn new(address: u64, len: u64) -> Registration {
        let joined = Registration::join(address, len).filter(|joined| joined.0.is_in_place());
        joined.unwrap_or_else(|| Registration::first(address, len))
    }

    /// Registers bytes that are registered already.
    fn join(address: u64, len: u64) -> Option<Registration> {
        let registry = REGISTRY.lock();
        let mut same = registry
            .registered
            .range((address, len, 0)..=(address, len, u64::MAX));
        let (_, last) = same.next_back()?;
        last.memories.fetch_add(1, Ordering::Relaxed);
        Some(Registration(Arc::clone(last)))
    }

    fn first(address: u64, len: u64) -> Registration {
        let mut registry = REGISTRY.lock();
        let key = (address, len, registry.next);
        registry.next += 1;
        let registered = Arc::new(Registered {
            key,
            memories: AtomicUsize::new(1),
            calls: AtomicU32::new(0),
            moving: RwLock::new(None),
            shared: OnceLock::new(),
        });
        registry.registered.insert(key, Arc::clone(&registered));
        Registration(registered)
    }

    /// The bytes.
    pub(crate) fn registered(&self) -> &Arc<Registered> {
        &self.0
    }

    /// Begins the conversion of the whole pages; [`Registration::advance`] carries it out.
    pub(crate) fn convert(&self, mode: Mode) -> Result<Arc<Shared>, NotShared> {
        let (address, len, _) = self.0.key;
        if mode == Mode::Off {
            return Err(NotShared::Off);
        }
        let none = NotShared::NoWholePage;
        let end = address.checked_add(len).ok_or(none)?;
        let pages = address.checked_next_multiple_of(page()).ok_or(none)?..end - end % page();
        if pages.is_empty() {
            return Err(none);
        }
        fork::follow()?;
        // Also for a process without other threads: it may have some when the pages move back.
        Userfault::new(Catches::Threads).map_err(|_| NotShared::Userfaultfd)?;
        conditions::check_process()?;
        let mut registry = REGISTRY.lock();
        if registry.overlaps(&self.0, &pages) {
            return Err(NotShared::Overlaps);
        }
        let advised = conditions::check_pages(&pages)?;
        let bytes = usize::try_from(pages.end - pages.start).map_err(|_| NotShared::NoResources)?;
        let file = sealed_file("rdmux-mr", file_bytes(bytes as u64)?).map_err(|_| NotShared::NoResources)?;
        let alias = Mapping::of_file(&file, 0, bytes, true).map_err(|_| NotShared::NoResources)?;
        // SAFETY: changes no byte. A core file has the pages once, by the program's addresses.
        let _ = unsafe { madvise(pointer(alias.address()), bytes, Advice::LinuxDontDump) };
        let shared = Arc::new(Shared {
            id: FileId::of(&file).map_err(|_| NotShared::Unknown)?,
            alias,
            file,
            moved: AtomicU64::new(pages.start),
            pages,
            advised,
        });
        registry.conversions.push(Arc::clone(&shared));
        Ok(shared)
    }

    /// Moves the next chunk of the pages. After an error those that have moved stay in the file until the region ends. Nobody accesses them by
    /// their addresses meanwhile but the program.
    pub(crate) fn advance(&self, mode: Mode, shared: &Shared) -> Result<Progress, NotShared> {
        let Some(guard) = Guard::choose(mode)? else {
            return Ok(Progress::NotHere);
        };
        let registry = REGISTRY.lock();
        let start = shared.moved.load(Ordering::Relaxed);
        let chunk = start..shared.pages.end.min(start.saturating_add(CHUNK_BYTES));
        if registry.overlaps(&self.0, &chunk) {
            return Err(NotShared::Overlaps);
        }
        // The program may have mapped something else there since.
        conditions::check_place(&chunk)?;
        without_signals(|| shared.move_in(&chunk, guard))?;
        shared.moved.store(chunk.end, Ordering::Relaxed);
        if chunk.end == shared.pages.end {
            return Ok(Progress::Done);
        }
        Ok(Progress::More)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut registry = REGISTRY.lock();
        if self.0.memories.fetch_sub(1, Ordering::Relaxed) > 1 {
            drop(registry);
            // The others may move without this one. While they do, there is no refusal.
            if let Some(mut moving) = self.0.moving.try_write() {
                self.0.forget_refusal(&mut moving);
            }
            return;
        }
        registry.registered.remove(&self.0.key);
        let range = self.0.range();
        if registry
            .conversions
            .iter()
            .any(|shared| overlap(&shared.pages, &range))
        {
            registry.undo();
        }
    }
}

impl Shared {
    /// The device's own mapping of the pages.
    #[inline]
    pub(crate) fn alias(&self) -> &Mapping {
        &self.alias
    }

    /// The addresses at which the program had the pages.
    #[inline]
    pub(crate) fn pages(&self) -> &Range<u64> {
        &self.pages
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Moves a chunk of the program's pages into the file.
    fn move_in(&self, chunk: &Range<u64>, guard: Guard) -> Result<(), NotShared> {
        let offset = chunk.start - self.pages.start;
        let faults = self.guard(chunk, guard, Userfault::register_private)?;
        let away = take_away(chunk)?;
        let copied = self.copy_in(&away, offset);
        let is_there = |range: &Range<u64>| faults.as_ref().is_none_or(|faults| faults.holds(range));
        let mut ours = false;
        if copied.is_ok() && is_there(chunk) {
            if self.place(chunk, offset).is_ok() {
                return Ok(());
            }
            // What was there is this conversion's, or nothing.
            ours = true;
        }
        put_back(&away, chunk, |range| ours || is_there(range));
        copied.and(Err(NotShared::Unmapped))
    }

    /// Catches the faults on a range, where there are threads that could have some.
    fn guard(
        &self,
        range: &Range<u64>,
        guard: Guard,
        register: fn(&Userfault, &Range<u64>) -> std::io::Result<()>,
    ) -> Result<Option<Userfault>, NotShared> {
        let Guard::Faults(catches) = guard else {
            return Ok(None);
        };
        let faults = Userfault::new(catches).map_err(|_| NotShared::Userfaultfd)?;
        register(&faults, range).map_err(|_| NotShared::Special)?;
        Ok(Some(faults))
    }

    fn copy_in(&self, from: &Mapping, offset: u64) -> Result<(), NotShared> {
        let mut buffer = vec![0; BUFFER_BYTES];
        by_pieces(from.len() as u64, |at, len| {
            let bytes = &mut buffer[..len];
            from.read(at, bytes).map_err(|_| NotShared::Unmapped)?;
            pages_with_bytes(bytes, |start, run| {
                let mut done = 0;
                while done < run.len() {
                    let n = pwrite(&self.file, &run[done..], offset + at + (start + done) as u64);
                    done += n.ok().filter(|n| *n > 0).ok_or(NotShared::NoResources)?;
                }
                Ok(())
            })
        })
    }

    /// Maps the file at addresses whose pages were taken away.
    fn place(&self, range: &Range<u64>, offset: u64) -> rustix::io::Result<()> {
        let len = (range.end - range.start) as usize;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the caller has found what it left there in the call before, and the file has the same bytes.
        unsafe { mmap(pointer(range.start), len, rights, flags, &self.file, offset) }?;
        self.advise(range.start, len)
    }

    /// Gives pages the advice that the program gave those in their place.
    fn advise(&self, address: u64, len: usize) -> rustix::io::Result<()> {
        let advice = [
            (self.advised.dont_fork, Advice::LinuxDontFork),
            (self.advised.dont_dump, Advice::LinuxDontDump),
            (self.advised.huge, Advice::LinuxHugepage),
            (self.advised.not_huge, Advice::LinuxNoHugepage),
        ];
        for (_, advice) in advice.into_iter().filter(|(given, _)| *given) {
            // SAFETY: none of them changes any byte.
            unsafe { madvise(pointer(address), len, advice) }?;
        }
        Ok(())
    }

    /// Moves the pages back to private memory, wherever the program has them mapped.
    fn move_back(&self) -> Result<(), NotShared> {
        conditions::check_process()?;
        let guard = Guard::choose(Mode::User)?.ok_or(NotShared::Threads)?;
        without_signals(|| self.move_out_all(guard))
    }

    fn move_out_all(&self, guard: Guard) -> Result<(), NotShared> {
        let alias = self.alias.address()..self.alias.address() + self.alias.len() as u64;
        let vmas = maps::all().map_err(|_| NotShared::Unknown)?;
        for vma in vmas
            .into_iter()
            .filter(|vma| vma.file == self.id && !overlap(&vma.addresses, &alias))
        {
            let mut at = vma.addresses.start;
            while at < vma.addresses.end {
                let piece = at..vma.addresses.end.min(at + CHUNK_BYTES);
                let offset = vma.offset + (at - vma.addresses.start);
                self.move_out(&piece, offset, vma.rights, guard)?;
                at = piece.end;
            }
        }
        Ok(())
    }

    /// Replaces a mapping of the file by private pages with the same bytes.
    fn move_out(
        &self,
        piece: &Range<u64>,
        offset: u64,
        rights: [u8; 4],
        guard: Guard,
    ) -> Result<(), NotShared> {
        let len = (piece.end - piece.start) as usize;
        let private = Mapping::anonymous(len).map_err(|_| NotShared::NoResources)?;
        let faults = self.guard(piece, guard, Userfault::register_shared)?;
        let _away = match &faults {
            // Threads that have the pages mapped go on writing until they are taken away.
            Some(_) => {
                let away = take_away(piece)?;
                if !self.is_at(away.address(), offset) {
                    // The program has put something else there just now.
                    put_back(&away, piece, |_| true);
                    return Err(NotShared::Unmapped);
                }
                Some(away)
            }
            None => None,
        };
        let is_there = |range: &Range<u64>| faults.as_ref().is_none_or(|faults| faults.holds(range));
        self.copy_out(&private, offset)?;
        self.advise(private.address(), len)
            .map_err(|_| NotShared::NoResources)?;
        let mut wanted = MprotectFlags::empty();
        wanted.set(MprotectFlags::READ, rights[0] == b'r');
        wanted.set(MprotectFlags::WRITE, rights[1] == b'w');
        wanted.set(MprotectFlags::EXEC, rights[2] == b'x');
        if wanted != MprotectFlags::READ | MprotectFlags::WRITE {
            // SAFETY: pages of this function's, which are moved and not touched from here on.
            unsafe { mprotect(pointer(private.address()), len, wanted) }
                .map_err(|_| NotShared::NoResources)?;
        }
        // A part that the program has unmapped meanwhile stays unmapped.
        put_back(&private, piece, is_there);
        Ok(())
    }

    fn copy_out(&self, to: &Mapping, offset: u64) -> Result<(), NotShared> {
        let mut buffer = vec![0; BUFFER_BYTES];
        by_pieces(to.len() as u64, |at, len| {
            let bytes = &mut buffer[..len];
            let mut read = 0;
            while read < len {
                let n = pread(&self.file, &mut bytes[read..], offset + at + read as u64);
                let n = n.map_err(|_| NotShared::NoResources)?;
                if n == 0 {
                    // Nobody can have touched what is behind the file's end.
                    bytes[read..].fill(0);
                    break;
                }
                read += n;
            }
            pages_with_bytes(bytes, |start, run| {
                to.copy_in(at + start as u64, run)
                    .map_err(|_| NotShared::NoResources)
            })
        })
    }

    /// Returns whether the program still has the pages that have moved, where they were.
    fn is_in_place(&self) -> bool {
        let (mut at, end) = (self.pages.start, self.moved.load(Ordering::Relaxed));
        let Ok(vmas) = maps::all() else { return false };
        for vma in vmas.iter().filter(|vma| vma.file == self.id) {
            let is_next = vma.addresses.contains(&at)
                && vma.offset + (at - vma.addresses.start) == at - self.pages.start;
            if is_next {
                at = vma.addresses.end;
            }
        }
        at >= end
    }

    /// Returns whether the file is mapped at an address, at an offset.
    fn is_at(&self, address: u64, offset: u64) -> bool {
        let there = |vma: &maps::Vma| {
            let inside = vma.addresses.contains(&address) && vma.file == self.id;
            inside && vma.offset + (address - vma.addresses.start) == offset
        };
        maps::all().is_ok_and(|vmas| vmas.iter().any(there))
    }
}

/// Takes the pages of a range away from their addresses in one step, to which a place without pages is left. The bytes are at the same
/// offsets of the result.
fn take_away(range: &Range<u64>) -> Result<Mapping, NotShared> {
    let len = (range.end - range.start) as usize;
    let away = Mapping::anonymous(len).map_err(|_| NotShared::NoResources)?;
    // SAFETY: the target is a mapping of this function's; whoever touches the source meanwhile waits, or there is nobody.
    let moved = unsafe { move_pages(range.start, away.address(), len) };
    if moved.is_err() {
        // The kernel may have unmapped the target, and somebody may have mapped something there since.
        std::mem::forget(away);
        return Err(NotShared::NoResources);
    }
    Ok(away)
}

/// Moves the pages of a mapping to a range of the same length, where it is still as `is_there` has it: as a whole, or page by page.
fn put_back(from: &Mapping, range: &Range<u64>, is_there: impl Fn(&Range<u64>) -> bool) {
    let put = |part: &Range<u64>| {
        let at = from.address() + (part.start - range.start);
        // SAFETY: what is at the target was left there by the caller, as the call before has found; the source is a mapping of this
        // module's, to which there are no references.
        let moved = unsafe { move_pages(at, part.start, (part.end - part.start) as usize) };
        debug_assert!(moved.is_ok(), "{moved:?}");
    };
    if is_there(range) {
        return put(range);
    }
    let starts = (range.start..range.end).step_by(page() as usize);
    starts
        .map(|at| at..at + page())
        .filter(|part| is_there(part))
        .for_each(|part| put(&part));
}

/// Moves pages to other addresses and replaces what is there. At the old addresses a mapping without pages stays.
///
/// # Safety
/// What is at the target may be replaced, and nobody relies on the bytes at the old addresses meanwhile.
unsafe fn move_pages(from: u64, to: u64, len: usize) -> rustix::io::Result<()> {
    // rustix has no name for the second flag where it calls libc.
    let flags = MremapFlags::MAYMOVE | MremapFlags::from_bits_retain(libc::MREMAP_DONTUNMAP as u32);
    // SAFETY: as the caller says.
    unsafe { mremap_fixed(pointer(from), len, len, flags, pointer(to)) }?;
    Ok(())
}

/// Calls `f` with the offset and length of each piece of a length.
fn by_pieces(len: u64, mut f: impl FnMut(u64, usize) -> Result<(), NotShared>) -> Result<(), NotShared> {
    let mut at = 0;
    while at < len {
        let n = (len - at).min(BUFFER_BYTES as u64);
        f(at, n as usize)?;
        at += n;
    }
    Ok(())
}

/// Calls `f` with each run of whole pages that are not all zeros, and where it begins.
fn pages_with_bytes(
    bytes: &[u8],
    mut f: impl FnMut(usize, &[u8]) -> Result<(), NotShared>,
) -> Result<(), NotShared> {
    let size = page() as usize;
    let has_bytes = |page: &[u8]| page.iter().any(|byte| *byte != 0);
    let mut start = 0;
    for run in bytes
        .chunks(size)
        .collect::<Vec<_>>()
        .chunk_by(|a, b| has_bytes(a) == has_bytes(b))
    {
        let len = run.iter().map(|page| page.len()).sum::<usize>();
        if run.first().is_some_and(|page| has_bytes(page)) {
            f(start, &bytes[start..start + len])?;
        }
        start += len;
    }
    Ok(())
}
