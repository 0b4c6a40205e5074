//! Memory of a peer that this process reaches itself.
#![allow(
    unsafe_code,
    reason = "copies to addresses of a peer's process, as the peer granted"
)]

use std::any::Any;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdmux_memory::mapping::{CopyError, Mapping, Order, Passage, Way};
use rdmux_memory::{AnonymousMemory, ApplicationMemory};
use rdmux_rnic::{Fault, Memory, PeerFault, PeerMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::gate;
use crate::place::Place;
use crate::revocation::{self, Words};
use crate::segment::{self, EnteredWords, GrantWords, Segment, Side};
use rdmux_verbs::provider::NotDirect;

/// Bytes copied between two checks of the grant: a revocation waits for a copy of this size.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of the buffer on the stack for copies.
const BUFFER_BYTES: usize = 4096;

/// Most mappings of peers' memory: a quarter of those that Linux gives a process, so that the process's own never fail because of them.
const MAPPED_MAX: usize = 16_384;
/// Most bytes of those mappings: a quarter of the addresses of a process.
const MAPPED_BYTES_MAX: usize = 1 << 45;
/// Time for which a process that was seen alive counts as alive: too short for the system to use up all other process numbers and give
/// this number to another process.
const SEEN_TIME: Duration = Duration::from_millis(10);

/// Way to reach a peer's memory.
#[derive(Debug)]
pub(crate) enum Reach {
    /// The memory is mapped in this process too.
    Mapped(Window),
    /// The kernel copies between the processes; offsets are the peer's addresses.
    Process(Addresses),
    /// The memory's whole pages are mapped; offsets are the peer's addresses. The kernel copies where a request goes beyond them.
    Pages(Window, Range<u64>, Addresses),
}

/// Way of one access.
enum Route<'a> {
    /// By a mapping, at an offset in it.
    Mapped(&'a Mapping, u64),
    /// By the kernel, at an address.
    Process(&'a Addresses),
}

impl Reach {
    #[inline]
    fn route(&self, at: u64, len: u64) -> Route<'_> {
        match self {
            Reach::Mapped(window) => Route::Mapped(&window.mapping, at),
            Reach::Process(addresses) => Route::Process(addresses),
            Reach::Pages(window, pages, addresses) => {
                let inside = at >= pages.start && at.checked_add(len).is_some_and(|end| end <= pages.end);
                if inside {
                    Route::Mapped(&window.mapping, at - pages.start)
                } else {
                    Route::Process(addresses)
                }
            }
        }
    }
}

/// Count of the mappings of peers' memory, and of their bytes.
#[derive(Debug)]
pub(crate) struct Mapped {
    windows: AtomicUsize,
    bytes: AtomicUsize,
}

/// Mappings in this process, by all its devices.
pub(crate) static MAPPED: Mapped = Mapped::new();

impl Mapped {
    pub(crate) const fn new() -> Mapped {
        Mapped {
            windows: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    fn take(&self, bytes: usize) -> bool {
        let add = |count: &AtomicUsize, more: usize, max: usize| {
            let sum = |before: usize| before.checked_add(more).filter(|sum| *sum <= max);
            count
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum)
                .is_ok()
        };
        if !add(&self.windows, 1, MAPPED_MAX) {
            return false;
        }
        let fits = add(&self.bytes, bytes, MAPPED_BYTES_MAX);
        if !fits {
            self.windows.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    fn give_back(&self, bytes: usize) {
        self.windows.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Memory of a peer that is mapped here.
#[derive(Debug)]
pub(crate) struct Window {
    mapping: Mapping,
    counted: &'static Mapped,
}

impl Window {
    /// Maps as [`Mapping::of_sealed_file`] does. `None`: the file cannot be mapped, or too much is mapped already.
    pub(crate) fn of_file(
        counted: &'static Mapped,
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Option<Window> {
        if !counted.take(len) {
            return None;
        }
        match Mapping::of_sealed_file(file, offset, len, writable) {
            Ok(mapping) => Some(Window { mapping, counted }),
            Err(_) => {
                counted.give_back(len);
                None
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.counted.give_back(self.mapping.len());
    }
}

/// The process of a peer. Some time after its death, another process gets its number. The end of the link shows the death late or, if the
/// process has forked, never; so this process checks that the peer lives before it accesses the peer.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    /// Readable when the process has ended.
    fd: OwnedFd,
    /// Time at which the process was last seen alive, in nanoseconds from `since`.
    seen_ns: AtomicU64,
    since: Instant,
}

impl Process {
    /// Opens the process at the other end of a connection.
    pub fn of(pid: i32, socket: BorrowedFd<'_>) -> Result<Arc<Process>, NotDirect> {
        // The system reports 0 for a process that has no number in this PID namespace.
        let number = Pid::from_raw(pid).ok_or(NotDirect::OtherPidNamespace)?;
        let fd = pidfd_open(number, PidfdFlags::empty()).map_err(NotDirect::Calls)?;
        // The process had the number when it connected, and still has it if the connection is up.
        let mut ended = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
        if poll(&mut ended, Some(&Timespec::default())) != Ok(0) {
            return Err(NotDirect::Calls(Errno::SRCH));
        }
        Ok(Arc::new(Process {
            pid,
            fd,
            seen_ns: AtomicU64::new(0),
            since: Instant::now(),
        }))
    }

    /// Returns a descriptor that is readable when the process has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the number of the process while the process has it.
    #[inline]
    fn pid(&self) -> Result<i32, Fault> {
        let now_ns = self.since.elapsed().as_nanos() as u64;
        let seen_ns = self.seen_ns.load(Ordering::Relaxed);
        if now_ns.wrapping_sub(seen_ns) < SEEN_TIME.as_nanos() as u64 {
            return Ok(self.pid);
        }
        if !self.lives() {
            return Err(Fault::Unmapped);
        }
        self.seen_ns.store(now_ns, Ordering::Relaxed);
        Ok(self.pid)
    }

    /// Returns whether the process has not ended.
    pub fn lives(&self) -> bool {
        let mut ended = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut ended, Some(&Timespec::default())) == Ok(0)
    }

    /// Copies bytes at an address of the process out.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        Mapping::read_process(self.pid()?, address, out)
    }
}

/// Addresses in a peer's process that the peer granted.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) process: Arc<Process>,
    pub(crate) range: Range<u64>,
    pub(crate) writable: bool,
}

impl Addresses {
    /// Returns the number of the process, if a copy of `len` bytes at an address stays within what was granted.
    #[inline]
    fn check(&self, address: u64, len: u64, direction: Direction) -> Result<i32, Fault> {
        let end = address.checked_add(len).ok_or(Fault::Unmapped)?;
        if address < self.range.start || end > self.range.end {
            return Err(Fault::Unmapped);
        }
        if direction == Direction::ToPeer && !self.writable {
            return Err(Fault::NotSupported);
        }
        self.process.pid()
    }
}

/// A grant by a peer. The user serializes the requests of a queue pair, or of each part of its lane, and those of all queue pairs that have no
/// place of their own: by each place an end is inside of one grant at a time.
#[derive(Clone, Debug)]
pub struct Granted {
    pub(crate) reach: Arc<Reach>,
    pub(crate) segment: Arc<Segment>,
    /// This process's side of the link.
    pub(crate) side: Side,
    pub(crate) index: u32,
    pub(crate) generation: u32,
    /// Addresses in the peer's process to which calls into it also write, see [`Passage`].
    pub(crate) gate: u64,
    pub(crate) left: u64,
    /// Number of the place by which it is entered, and the place, if it is the queue pair's own or a part's.
    pub(crate) place: u32,
    pub(crate) own_place: Option<Arc<Place>>,
    /// Set while the link is up.
    pub(crate) open: Arc<AtomicBool>,
    /// Calls into the peer that are left until the grant is given up, so that this process asks again: the peer may then share the memory.
    pub(crate) calls_left: Option<Arc<AtomicU32>>,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToPeer,
    FromPeer,
}

impl Granted {
    fn words(&self) -> GrantWords<'_> {
        GrantWords {
            segment: &self.segment,
            holder: self.side,
        }
    }

    /// Returns whether this process has mapped the memory; if not, the kernel copies between the processes.
    pub fn is_mapped(&self) -> bool {
        !matches!(*self.reach, Reach::Process(_))
    }

    /// Counts a request if it needs a call into the peer. The grant ends with the last of those after which this process asks again.
    #[inline]
    fn count_call(&self, at: u64, length: u64) -> Result<(), PeerFault> {
        let Some(left) = &self.calls_left else {
            return Ok(());
        };
        if matches!(self.reach.route(at, length), Route::Mapped(..)) {
            return Ok(());
        }
        let one_less = |left: u32| left.checked_sub(1);
        let counted = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        counted.map(|_| ()).map_err(|_| PeerFault::Ended)
    }

    /// Returns whether the grant has not been revoked.
    #[inline]
    pub fn holds(&self) -> bool {
        let grant = self.words().grant(self.index, Ordering::Acquire);
        grant == self.generation && self.open.load(Ordering::Relaxed)
    }

    /// Calls `f`, which writes, if the grant holds, and shows the owner of the grant the end of `f`.
    #[inline]
    fn writing<R>(&self, f: impl FnOnce(Passage) -> Result<R, PeerFault>) -> Result<R, PeerFault> {
        if !self.open.load(Ordering::Relaxed) {
            return Err(PeerFault::Ended);
        }
        let place = self.place;
        let words = EnteredWords {
            inside: self.segment.inside(self.side, place),
            grant: self.segment.grant(self.side.other(), self.index),
        };
        let entry = revocation::enter(&words, place, self.index, self.generation).ok_or(PeerFault::Ended)?;
        let result = f(Passage {
            gate: self.gate.wrapping_add(gate::PLACE_BYTES * u64::from(place)),
            left: self.left.wrapping_add(segment::PLACE_BYTES * u64::from(place)),
            entry,
        });
        revocation::leave(&words, place, entry);
        result
    }

    /// Calls `f`, which reads, and discards its result if the grant has ended meanwhile.
    #[inline]
    fn reading<R>(&self, f: impl FnOnce() -> Result<R, PeerFault>) -> Result<R, PeerFault> {
        if !self.holds() {
            return Err(PeerFault::Ended);
        }
        let result = f()?;
        let held = revocation::still_holds(&self.words(), self.index, self.generation);
        if held { Ok(result) } else { Err(PeerFault::Ended) }
    }

    /// Calls `f` for each piece of a length, with the piece's offset and length, and the kind of call into the peer.
    fn by_pieces(
        &self,
        length: u64,
        direction: Direction,
        mut f: impl FnMut(u64, u64, Way) -> Result<(), PeerFault>,
    ) -> Result<(), PeerFault> {
        let mut done = 0;
        while done < length {
            let n = (length - done).min(PIECE_BYTES);
            match direction {
                Direction::ToPeer => {
                    self.writing(|passage| f(done, n, Way::ToProcess(Order::LastWordLast, Some(passage))))?
                }
                Direction::FromPeer => self.reading(|| f(done, n, Way::FromProcess(Order::LastWordLast)))?,
            }
            done += n;
        }
        Ok(())
    }

    /// Copies between `own`, which is a mapping, and the peer's memory.
    fn copy(
        &self,
        at: u64,
        own: &Mapping,
        own_at: u64,
        length: u64,
        direction: Direction,
    ) -> Result<(), PeerFault> {
        self.by_pieces(length, direction, |done, n, way| {
            let (at, own_at) = (at + done, own_at + done);
            let copied = match (self.reach.route(at, n), direction) {
                (Route::Mapped(theirs, at), Direction::ToPeer) => theirs.write_from(at, own, own_at, n),
                (Route::Mapped(theirs, at), Direction::FromPeer) => {
                    own.write_from(own_at, theirs, at, n).map_err(CopyError::swapped)
                }
                (Route::Process(addresses), _) => addresses
                    .check(at, n, direction)
                    .map_err(CopyError::To)
                    .and_then(|pid| {
                        // SAFETY: the peer granted that these addresses are accessed in this direction, also where both are one process.
                        unsafe { own.copy_process(own_at, pid, at, n, way) }
                    }),
            };
            copied.map_err(peer_fault)
        })
    }

    /// Copies between addresses of this process and the peer's memory, without a buffer. Returns false if a part failed, on an unknown
    /// side: the caller may try again piece by piece.
    fn copy_application(
        &self,
        at: u64,
        own: &dyn Memory,
        own_at: u64,
        length: u64,
        direction: Direction,
    ) -> bool {
        let any = own.as_any();
        let Some(own) = any.and_then(|any| any.downcast_ref::<ApplicationMemory>()) else {
            return false;
        };
        let copied = self.by_pieces(length, direction, |done, n, way| {
            let (at, own_at) = (at + done, own_at + done);
            let copied = match (self.reach.route(at, n), direction) {
                (Route::Mapped(theirs, at), Direction::ToPeer) => own.copy_to(own_at, theirs, at, n),
                (Route::Mapped(theirs, at), Direction::FromPeer) => own.copy_from(own_at, theirs, at, n),
                (Route::Process(addresses), _) => addresses
                    .check(at, n, direction)
                    // SAFETY: as for `copy`.
                    .and_then(|pid| unsafe { own.copy_process(own_at, pid, at, n, way) }),
            };
            copied.map_err(PeerFault::Own)
        });
        copied.is_ok()
    }

    /// Copies piece by piece through a buffer.
    fn copy_buffered(
        &self,
        length: u64,
        mut copy: impl FnMut(&mut [u8], u64) -> Result<(), PeerFault>,
    ) -> Result<(), PeerFault> {
        let mut buffer = [0; BUFFER_BYTES];
        let mut done = 0;
        while done < length {
            let n = (length - done).min(BUFFER_BYTES as u64);
            copy(&mut buffer[..n as usize], done)?;
            done += n;
        }
        Ok(())
    }

    /// Writes what is not done in one copy between two mappings.
    #[inline(never)]
    fn write_by_steps(
        &self,
        offset: u64,
        from: &dyn Memory,
        from_offset: u64,
        length: u64,
    ) -> Result<(), PeerFault> {
        match mapping_of(from, from_offset, length) {
            Some((own, from_offset)) => self.copy(offset, own, from_offset, length, Direction::ToPeer),
            None if self.copy_application(offset, from, from_offset, length, Direction::ToPeer) => Ok(()),
            None => self.copy_buffered(length, |buffer, done| {
                from.read(from_offset + done, buffer).map_err(PeerFault::Own)?;
                self.put_bytes(offset + done, buffer)
            }),
        }
    }

    fn put_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        let ended = |_: Fault| PeerFault::Ended;
        self.writing(|passage| match self.reach.route(offset, bytes.len() as u64) {
            Route::Mapped(theirs, at) => theirs.write(at, bytes).map_err(ended),
            Route::Process(addresses) => addresses
                .check(offset, bytes.len() as u64, Direction::ToPeer)
                .and_then(|pid| {
                    let order = Order::LastWordLast;
                    // SAFETY: as for `copy`.
                    unsafe { Mapping::write_process(pid, offset, bytes, order, Some(passage)) }
                })
                .map_err(ended),
        })
    }

    pub(crate) fn read_bytes(&self, at: u64, out: &mut [u8]) -> Result<(), PeerFault> {
        let ended = |_: Fault| PeerFault::Ended;
        self.reading(|| match self.reach.route(at, out.len() as u64) {
            Route::Mapped(theirs, at) => theirs.read(at, out).map_err(ended),
            Route::Process(addresses) => addresses
                .check(at, out.len() as u64, Direction::FromPeer)
                .and_then(|pid| Mapping::read_process(pid, at, out))
                .map_err(ended),
        })
    }
}

impl PeerMemory for Granted {
    #[inline]
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.count_call(offset, length)?;
        let own = mapping_of(from, from_offset, length);
        if let (Some((own, from_offset)), Route::Mapped(theirs, at)) = (own, self.reach.route(offset, length))
            && length <= PIECE_BYTES
        {
            return self.writing(|_| {
                let copied = theirs.write_from(at, own, from_offset, length);
                copied.map_err(peer_fault)
            });
        }
        self.write_by_steps(offset, from, from_offset, length)
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        self.count_call(offset, bytes.len() as u64)?;
        self.put_bytes(offset, bytes)
    }

    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.count_call(offset, length)?;
        match mapping_of(to, to_offset, length) {
            Some((own, to_offset)) => self.copy(offset, own, to_offset, length, Direction::FromPeer),
            None if self.copy_application(offset, to, to_offset, length, Direction::FromPeer) => Ok(()),
            None => self.copy_buffered(length, |buffer, done| {
                self.read_bytes(offset + done, buffer)?;
                to.write(to_offset + done, buffer).map_err(PeerFault::Own)
            }),
        }
    }

    fn is_apart(&self) -> bool {
        self.own_place.is_some()
    }

    fn of_part(&self, part: usize) -> Option<Arc<dyn PeerMemory>> {
        let place = self.own_place.as_ref()?.of_part(part)?;
        Some(Arc::new(Granted {
            place: place.number,
            own_place: Some(place),
            ..self.clone()
        }))
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// Returns the fault of a copy from own memory to the peer's.
fn peer_fault(error: CopyError) -> PeerFault {
    match error {
        CopyError::From(fault) => PeerFault::Own(fault),
        CopyError::To(_) => PeerFault::Ended,
    }
}

/// Returns the mapping of this process that has a range of a memory, and the offset in it.
#[inline]
pub(crate) fn mapping_of(memory: &dyn Memory, offset: u64, length: u64) -> Option<(&Mapping, u64)> {
    let any = memory.as_any()?;
    if let Some(memory) = any.downcast_ref::<AnonymousMemory>() {
        return Some((memory.mapping(), offset));
    }
    let memory = any.downcast_ref::<ApplicationMemory>()?;
    let address = memory.address().checked_add(offset)?;
    memory.shared_pages()?.mapping_of(address, length)
}
