//! One end of the memory that two devices share.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdmux_memory::{AnonymousMemory, ApplicationMemory};
use rdmux_rnic::{
    Access, Fault, Fill, Grant, Grantable, LKey, Lending, LinkProgress, Memory as _, PARTS_MAX, Part, Put,
    Qpn, RKey, Room as _, Sharing, Taken, Ticket,
};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType};

use crate::ends::Ends;
use crate::gate::Gate;
use crate::grant::{Addresses, Granted, MAPPED, Process, Reach, Window};
use crate::lend::{Borrower, Lender, NamedBytes, NamedPart, NotLent};
use crate::nap::NapWord;
use crate::place::{COMMON, Place, Places};
use crate::record::{HeldBytes, RecordBytes};
use crate::revocation::{self, Inside};
use crate::ring::{Corrupt, Meta, PART_BYTES, Record};
use crate::segment::{GRANTS, GrantWords, PLACES, Segment, Side};
use crate::stay::{Given, Stay, Stays};
use rdmux_verbs::provider::{NotDirect, Refusal};

/// Most bytes that wait for room in a ring; trains beyond that count as lost on a network.
pub const WAITING_BYTES_MAX: usize = 16 << 20;
/// Calls under one grant after which a peer asks again: by then it is worth while to share the memory.
const CALLS_BEFORE_ASKING_AGAIN: u64 = 32;
/// Rings of one peer's doorbell taken per pass.
const RINGS_PER_PASS: usize = 64;

/// Reason why a request that names its payload is not in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// The peer cannot read it.
    NotLent(NotLent),
    /// The peer has written nonsense into the ring.
    Corrupt,
}

impl From<NotLent> for NameError {
    fn from(not: NotLent) -> NameError {
        NameError::NotLent(not)
    }
}

impl From<Corrupt> for NameError {
    fn from(Corrupt: Corrupt) -> NameError {
        NameError::Corrupt
    }
}

/// A grant, as its owner describes it to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Key of the region.
    pub rkey: RKey,
    /// The QP that asked.
    pub by: Qpn,
    /// Index of the word in the segment that holds [`Offer::generation`] as long as the grant lasts.
    pub index: u32,
    /// Tells this grant from others at the same index.
    pub generation: u32,
    /// Rights of the peer.
    pub access: Access,
    /// Address of the region's first byte in requests.
    pub iova: u64,
    /// Length of the region in bytes.
    pub length: u64,
    /// Start of the region: in the descriptor's memory, or without a descriptor in the address space of the granting process.
    pub offset: u64,
    /// Without a descriptor: address in the granting process to which calls of the first place write first, see
    /// [`rdmux_memory::mapping::Passage`].
    pub gate: u64,
    /// The same: address to which they write last.
    pub left: u64,
    /// Start and end of the whole pages that the descriptor's memory has, if it does not have all of the region's bytes: the rest is in the
    /// address space of the granting process, and so is [`Offer::offset`]. Otherwise the same number twice.
    pub pages: (u64, u64),
    /// Calls after which the peer should ask again, since the memory may be shared by then; 0: never.
    pub calls: u64,
}

/// One end of the memory that two devices share: a ring each way, the doorbell, and the grants to the peer. Dropping it revokes them.
#[derive(Debug)]
pub struct Channel {
    segment: Arc<Segment>,
    side: Side,
    /// The rings, which threads without the engine's lock use too.
    ends: Arc<Ends>,
    doorbell: Doorbell,
    /// Regions granted to the peer, by the grants' indices.
    given: Vec<Option<Given>>,
    generation: u32,
    /// Gate of the next grants that need one; `None` before the first of them.
    gate: Option<Arc<Gate>>,
    process: Option<Arc<Process>>,
    stays: Arc<Stays>,
    /// Places of the queue pairs that hold grants of the peer.
    places: Places,
    /// Regions that requests of this end may name, and those that requests of the peer may.
    lender: Lender,
    borrower: Borrower,
}

/// This process's end of a pair of sockets; a byte sent wakes the peer. Nothing that the peer does with its end makes a sender wait. (Any
/// other holder of an eventfd can make its writers block. So can that of a pipe, also a writer with `RWF_NOWAIT`: the kernel copies the bytes
/// to a reader while it holds the pipe's mutex, which the writer needs, and the reader's memory may be of a file system that never answers,
/// or of `userfaultfd`.)
#[derive(Debug)]
struct Doorbell {
    socket: Arc<OwnedFd>,
    /// The epoll set that contains the socket, once it rings for this process.
    doorbells: Option<Arc<OwnedFd>>,
}

impl Channel {
    /// Makes an end of a segment that both ends have, with its end of a pair of `SOCK_SEQPACKET` sockets as the doorbell. `process` is that
    /// of the peer; without it, the end of the doorbell stands for the end of the process. `stays` collects the peers that were inside of a
    /// grant when it was revoked.
    pub fn new(
        segment: Arc<Segment>,
        side: Side,
        doorbell: OwnedFd,
        process: Option<Arc<Process>>,
        stays: &Arc<Stays>,
    ) -> Channel {
        let doorbell = Arc::new(doorbell);
        Channel {
            ends: Arc::new(Ends::new(&segment, side, &doorbell)),
            lender: Lender::new(&segment, side),
            borrower: Borrower::default(),
            segment,
            side,
            doorbell: Doorbell {
                socket: doorbell,
                doorbells: None,
            },
            given: Vec::new(),
            generation: 0,
            gate: None,
            process,
            stays: Arc::clone(stays),
            places: Places::default(),
        }
    }

    /// Returns the rings, for threads without the engine's lock.
    #[inline]
    pub fn ends(&self) -> &Arc<Ends> {
        &self.ends
    }

    /// Returns the CPU on which the peer last looked for packets, if it is known.
    #[inline]
    pub fn peer_cpu(&self) -> Option<u32> {
        let cpu = self.segment.cpu(self.side.other());
        cpu.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Shows the peer the CPU on which this process looks for its packets.
    #[inline]
    pub fn tell_cpu(&self, cpu: u32) {
        let word = self.segment.cpu(self.side);
        if word.load(Ordering::Relaxed) != cpu + 1 {
            word.store(cpu + 1, Ordering::Relaxed);
        }
    }

    /// Shows the peer whether packets get lost on purpose at this end.
    pub fn tell_loses(&self, loses: bool) {
        let word = self.segment.loses(self.side);
        word.store(u32::from(loses), Ordering::Relaxed);
    }

    /// Returns whether packets get lost on purpose at the peer's end.
    #[inline]
    pub fn peer_loses(&self) -> bool {
        self.segment.loses(self.side.other()).load(Ordering::Relaxed) != 0
    }

    /// Puts a train of packets into the ring, or makes it wait for room. A train beyond [`WAITING_BYTES_MAX`] is lost.
    #[inline]
    pub fn send(&mut self, meta: Meta, bytes: &[u8]) -> Result<(), Corrupt> {
        self.ends.send(meta, bytes)
    }

    /// Puts a request into the ring. Returns false if there is no room, or `fill` fails.
    #[inline]
    pub fn request(&mut self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Result<bool, Corrupt> {
        Ok(self.ends.request(ticket, bytes, fill)? != Put::Not)
    }

    /// Puts a request into the ring that names its payload. Returns false if there is no room.
    pub fn request_named(&mut self, ticket: Ticket, heads: &[u8], parts: &[Part]) -> Result<bool, NameError> {
        // No other thread makes trains wait.
        if self.ends.has_waiting() {
            return Ok(false);
        }
        let named = self.lender.name(ticket.qpn, parts)?;
        let count = parts.len().min(PARTS_MAX);
        let begin = count * PART_BYTES;
        let put = self
            .ends
            .request_with_parts(ticket, begin + heads.len(), count, |area, slot| {
                let record = RecordBytes::new(area, slot);
                NamedPart::write_all(&named[..count], &record);
                record.write(begin, heads);
                true
            });
        Ok(put? != Put::Not)
    }

    /// Looks how far the peer has come with requests. The peer's responses to what came before them are in its ring by then (a peer that has
    /// trains waiting defers requests), and are to be received before [`Channel::ended`].
    #[inline]
    pub fn look_for_ends(&mut self) -> Result<(), Corrupt> {
        self.ends.look_for_ends()
    }

    /// Returns the oldest request that the peer had taken at the last look, and how.
    #[inline]
    pub fn ended(&mut self) -> Option<(Ticket, Taken)> {
        self.ends.ended()
    }

    /// Returns whether requests have ended of which the peer tells nobody: those who sleep were about to be told when they ended.
    #[inline]
    pub fn has_untold_ends(&self) -> bool {
        self.ends.has_untold_ends()
    }

    /// Returns whether trains wait for room.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.ends.has_waiting()
    }

    /// Puts the trains that wait into the ring, as far as there is room.
    pub fn send_waiting(&mut self) -> Result<(), Corrupt> {
        self.ends.send_waiting()
    }

    /// Returns whether [`Channel::receive`] is worth calling. Costs one load.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.ends.is_ready()
    }

    /// Returns whether the peer has sent something, or has taken requests. Costs two loads at most.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.ends.has_news()
    }

    /// Takes the next record of the peer, if there is one. [`Channel::release`] returns its room to the peer.
    #[inline]
    pub fn receive(&mut self) -> Result<Option<Record>, Corrupt> {
        self.ends.receive()
    }

    /// Replaces the contents of `out` by the bytes of a record that was received.
    #[inline]
    pub fn read(&self, record: &Record, out: &mut Vec<u8>) {
        self.ends.read(record, out);
    }

    /// Returns the bytes of a request that was received and names no memory.
    #[inline]
    pub fn bytes(&self, record: &Record) -> HeldBytes<'_> {
        HeldBytes::new(self.ends.bytes(record), record.bytes)
    }

    /// Returns the bytes of a request that was received and names memory.
    pub fn named_bytes(&self, record: &Record) -> NamedBytes<'_> {
        self.borrower
            .request(self.ends.bytes(record), record.bytes, record.parts)
    }

    /// Tells the peer how a request is taken, if it is not done.
    #[inline]
    pub fn answer(&self, record: &Record, taken: Taken) {
        self.ends.answer(record, taken);
    }

    /// Returns the room of all received records to the peer, which acknowledges the requests among them. The peer may wait for
    /// that ([`Ends::owes_ends`]).
    #[inline]
    pub fn release(&mut self) {
        self.ends.release_all();
    }

    /// Wakes the peer if it waits for the ends of requests.
    pub fn tell_ends(&mut self) {
        self.ends.tell_ends();
    }

    /// Returns how far the peer has come with the data sent to it.
    #[inline]
    pub fn progress(&self) -> LinkProgress {
        self.ends.progress()
    }

    /// Prepares for a sleep on the doorbell: the peer rings it for packets, for room that trains wait for, and when it has taken requests.
    /// Returns false if something is there already.
    #[inline]
    pub fn prepare_sleep(&mut self) -> Result<bool, Corrupt> {
        self.ends.prepare_sleep()
    }

    /// Ends a sleep: the peer stops ringing the doorbell. Returns whether it had rung, and takes one ring then.
    #[inline]
    pub fn awake(&mut self) -> bool {
        self.ends.awake() && self.doorbell.answer_one()
    }

    /// Prepares for a nap of one thread of this process ([`crate::nap`]): the peer ends it by the next packet. Returns the word to nap
    /// on; `None` if a packet is there already. [`Channel::end_nap`] comes next in any case. The caller has no train that waits for room
    /// ([`Channel::has_waiting`]), for which the peer rings the doorbell alone.
    #[inline]
    pub fn prepare_nap(&mut self) -> Option<NapWord> {
        self.ends.prepare_nap().then(|| NapWord {
            segment: Arc::clone(&self.segment),
            from: self.side.other(),
        })
    }

    #[cfg(test)]
    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Lets the peer ring the doorbell again for the ends of requests during a nap, after it has rung. Returns false if some have ended, or
    /// the peer wrote nonsense.
    pub fn announce_nap(&mut self) -> bool {
        self.ends.announce_nap()
    }

    /// Ends a nap: the peer makes no further call to end it.
    #[inline]
    pub fn end_nap(&mut self) {
        self.ends.end_nap();
    }

    /// Takes the pending rings of the doorbell.
    pub fn answer_doorbell(&mut self) {
        self.doorbell.answer();
    }

    /// Adds the doorbell to the epoll set on which sleepers wait.
    ///
    /// # Errors
    /// `EINVAL` if the peer's descriptor is no doorbell.
    pub fn add_doorbell_to(&mut self, doorbells: &Arc<OwnedFd>) -> Result<(), Errno> {
        self.doorbell.add_to(doorbells)
    }

    /// Returns the number of words in the segment that grants to the peer have used so far.
    pub fn grant_words(&self) -> usize {
        self.given.len()
    }

    /// Revokes grants. Returns whether the peer may be inside of one: then the stays include it.
    pub fn take_back(&mut self, is_it: impl Fn(&Given) -> bool) -> bool {
        let is_index = |index: &usize| self.given[*index].as_ref().is_some_and(&is_it);
        let indices: Vec<u32> = (0..self.given.len()).filter(is_index).map(|i| i as u32).collect();
        if indices.is_empty() {
            return false;
        }
        let holder = self.side.other();
        let words = GrantWords {
            segment: &self.segment,
            holder,
        };
        let inside = revocation::take_back(&words, 0..PLACES, &indices);
        let taken: Vec<_> = indices.iter().map(|i| self.given[*i as usize].take()).collect();
        self.lender.forget(&indices);
        let mut is_inside = false;
        for Inside { place, entry, index } in inside {
            let at = indices.iter().position(|i| *i == index);
            let Some(given) = at.and_then(|at| taken[at].clone()) else {
                continue;
            };
            is_inside = true;
            self.stays.add(Stay {
                given,
                entry,
                place,
                segment: Arc::clone(&self.segment),
                holder,
                process: self.process.clone(),
                doorbell: Arc::clone(&self.doorbell.socket),
            });
        }
        is_inside
    }

    /// Returns the gate for the peer's calls under its next grants.
    fn open_gate(&mut self) -> Result<Arc<Gate>, Errno> {
        let gate = match self.gate.take().filter(|gate| !gate.is_closed()) {
            Some(gate) => gate,
            None => Arc::new(Gate::new()?),
        };
        self.gate = Some(Arc::clone(&gate));
        Ok(gate)
    }

    /// Returns whether the peer was granted a region for a queue pair.
    pub fn has_given(&self, of: Qpn, lkey: LKey) -> bool {
        let is_it = |given: &Given| given.qpn == of && given.lkey == lkey && !given.lent;
        self.given.iter().flatten().any(is_it)
    }

    /// Grants the peer a region of queue pair `of`, for which its queue pair `by` has asked. Returns the offer, and the descriptor that goes
    /// with it. The caller has checked that the two queue pairs are connected.
    pub fn grant(
        &mut self,
        grantable: &Grantable,
        rkey: RKey,
        of: Qpn,
        by: Qpn,
    ) -> Result<(Offer, Option<OwnedFd>), Refusal> {
        let reach = Reached::of(grantable)?;
        let gate = if reach.by_calls {
            Some(self.open_gate().map_err(|_| Refusal::Full)?)
        } else {
            None
        };
        self.give(grantable, reach, gate, (rkey, of, by), false)
    }

    /// Returns the handle by which the device ends what is lent to the peer for a queue pair.
    pub fn lending(&self, of: Qpn) -> Arc<dyn Lending> {
        self.lender.lending(of)
    }

    /// Returns whether a region is offered or lent for the requests of a queue pair.
    pub fn has_lent(&self, of: Qpn, lkey: LKey) -> bool {
        self.lender.has(of, lkey)
    }

    /// Lends the peer a region for requests of queue pair `of` to its queue pair `by`. Returns the offer, and the descriptor that goes with
    /// it. [`Channel::answered`] gets the peer's answer.
    pub fn lend(
        &mut self,
        grantable: &Grantable,
        of: Qpn,
        by: Qpn,
    ) -> Result<(Offer, Option<OwnedFd>), Refusal> {
        if !self.lender.has_room() {
            return Err(Refusal::Full);
        }
        let reach = Reached::of(grantable)?;
        let may_be_shared = reach.may_be_shared;
        // A peer that reads passes no gate: what it copied after the end of the grant counts for nothing.
        let reach = Reached {
            may_be_shared: false,
            ..reach
        };
        let keys = (RKey(grantable.lkey.0), of, by);
        let (offer, file) = self.give(grantable, reach, None, keys, true)?;
        self.lender.offered(of, grantable.lkey, &offer, may_be_shared);
        Ok((offer, file))
    }

    /// Handles the peer's answer to an offer to lend it a region.
    pub fn answered(&mut self, index: u32, generation: u32, accepts: bool) {
        self.lender.answered(index, generation, accepts);
    }

    fn give(
        &mut self,
        grantable: &Grantable,
        reach: Reached,
        gate: Option<Arc<Gate>>,
        (rkey, of, by): (RKey, Qpn, Qpn),
        lent: bool,
    ) -> Result<(Offer, Option<OwnedFd>), Refusal> {
        // A peer that has forgotten an earlier grant gets the same grant again.
        let is_it = |given: &Given| (given.qpn, given.lkey, given.lent) == (of, grantable.lkey, lent);
        let before = self
            .given
            .iter()
            .position(|given| given.as_ref().is_some_and(is_it));
        let free = || self.given.iter().position(Option::is_none);
        let index = before.or_else(free).unwrap_or(self.given.len());
        if index >= GRANTS as usize {
            return Err(Refusal::Full);
        }
        let is_open = |given: &Given| given.gate.as_ref().is_none_or(|gate| !gate.is_closed());
        let before = self
            .given
            .get(index)
            .cloned()
            .flatten()
            .filter(is_open)
            .filter(|given| given.mapped == reach.file.is_some());
        let mapped = reach.file.is_some();
        let given = before.unwrap_or_else(|| {
            self.generation = self.generation.wrapping_add(1).max(1);
            Given {
                qpn: of,
                lkey: grantable.lkey,
                lent,
                generation: self.generation,
                gate,
                mapped,
            }
        });
        let (generation, gate) = (
            given.generation,
            given.gate.as_ref().map_or(0, |gate| gate.address()),
        );
        if index == self.given.len() {
            self.given.push(Some(given));
        } else {
            self.given[index] = Some(given);
        }
        let index = index as u32;
        let word = self.segment.grant(self.side, index);
        word.store(generation, Ordering::Release);
        let offer = Offer {
            rkey,
            by,
            index,
            generation,
            access: grantable.access,
            iova: grantable.iova,
            length: grantable.length,
            offset: reach.offset,
            gate,
            left: self.segment.left_address(self.side.other()),
            pages: (reach.pages.start, reach.pages.end),
            calls: if reach.may_be_shared {
                CALLS_BEFORE_ASKING_AGAIN
            } else {
                0
            },
        };
        Ok((offer, reach.file))
    }

    /// Accepts a grant by the peer, if this process can reach the memory. The grant holds while `open` is set.
    pub fn take(
        &mut self,
        offer: &Offer,
        descriptors: Vec<OwnedFd>,
        process: &Result<Arc<Process>, NotDirect>,
        open: &Arc<AtomicBool>,
    ) -> Result<Grant, NotDirect> {
        let own_place = self.places.of(offer.by);
        let (memory, memory_offset) = self.accept(offer, descriptors, process, open, own_place)?;
        Ok(Grant {
            memory: Arc::new(memory),
            memory_offset,
            iova: offer.iova,
            length: offer.length,
            access: offer.access,
        })
    }

    /// Accepts a region that the peer lends, as [`Channel::take`] does.
    pub fn borrow(
        &mut self,
        offer: &Offer,
        descriptors: Vec<OwnedFd>,
        process: &Result<Arc<Process>, NotDirect>,
        open: &Arc<AtomicBool>,
    ) -> Result<(), NotDirect> {
        // This end only reads.
        let offer = Offer {
            access: Access::REMOTE_READ,
            ..*offer
        };
        let (memory, begin) = self.accept(&offer, descriptors, process, open, None)?;
        self.borrower.add(memory, begin, offer.length);
        Ok(())
    }

    /// Returns the memory of a grant, and where the region begins in it.
    fn accept(
        &self,
        offer: &Offer,
        descriptors: Vec<OwnedFd>,
        process: &Result<Arc<Process>, NotDirect>,
        open: &Arc<AtomicBool>,
        own_place: Option<Arc<Place>>,
    ) -> Result<(Granted, u64), NotDirect> {
        if offer.index >= GRANTS || offer.length == 0 {
            return Err(NotDirect::Unmappable);
        }
        let end = offer.offset.checked_add(offer.length);
        let end = end.ok_or(NotDirect::Unmappable)?;
        let addresses = || {
            let process = process.as_ref().map_err(|reason| *reason)?;
            // This shows now, not with the first request, whether the system permits calls into the peer.
            let tried = process.read(offer.offset, &mut [0]);
            tried.map_err(|fault| NotDirect::Calls(errno_of(fault)))?;
            Ok(Addresses {
                process: Arc::clone(process),
                range: offer.offset..end,
                writable: offer.access.contains(Access::REMOTE_WRITE),
            })
        };
        let (reach, memory_offset) = match descriptors.first() {
            Some(file) if offer.pages.0 >= offer.pages.1 => {
                let window = map(file, offer, end).ok_or(NotDirect::Unmappable)?;
                let in_page = offer.offset % rustix::param::page_size() as u64;
                (Reach::Mapped(window), in_page)
            }
            Some(file) => {
                let pages = offer.pages.0..offer.pages.1;
                let writable = offer.access.contains(Access::REMOTE_WRITE);
                let len = usize::try_from(pages.end - pages.start).map_err(|_| NotDirect::Unmappable)?;
                let window = Window::of_file(&MAPPED, file.as_fd(), 0, len, writable);
                let window = window.ok_or(NotDirect::Unmappable)?;
                (Reach::Pages(window, pages, addresses()?), offer.offset)
            }
            None => (Reach::Process(addresses()?), offer.offset),
        };
        let calls_left = u32::try_from(offer.calls).ok().filter(|calls| *calls > 0);
        let granted = Granted {
            reach: Arc::new(reach),
            segment: Arc::clone(&self.segment),
            side: self.side,
            index: offer.index,
            generation: offer.generation,
            gate: offer.gate,
            left: offer.left,
            place: own_place.as_ref().map_or(COMMON, |place| place.number),
            own_place,
            open: Arc::clone(open),
            calls_left: calls_left.map(|calls| Arc::new(AtomicU32::new(calls))),
        };
        Ok((granted, memory_offset))
    }
}

/// How a peer reaches a region of this process.
struct Reached {
    /// The memory that the peer maps.
    file: Option<OwnedFd>,
    /// Where the region begins, see [`Offer::offset`].
    offset: u64,
    pages: Range<u64>,
    /// Set when the peer reaches some of it by calls into this process.
    by_calls: bool,
    /// Set when it may be possible to map later.
    may_be_shared: bool,
}

impl Reached {
    fn of(grantable: &Grantable) -> Result<Reached, Refusal> {
        let memory = grantable.memory.as_any().ok_or(Refusal::NotShareable)?;
        let writable = grantable.access.contains(Access::REMOTE_WRITE);
        let opened = |file: BorrowedFd<'_>| {
            if writable {
                return file.try_clone_to_owned().map(Some).map_err(|_| Refusal::Full);
            }
            // Memory that cannot be opened for reading alone is left to calls.
            Ok(read_only(file))
        };
        let by_calls = |address: u64, may_be_shared| Reached {
            file: None,
            offset: address.wrapping_add(grantable.memory_offset),
            pages: 0..0,
            by_calls: true,
            may_be_shared,
        };
        if let Some(memory) = memory.downcast_ref::<AnonymousMemory>() {
            let file = memory.file().map(opened).transpose()?.flatten();
            let offset = grantable.memory_offset;
            return Ok(match file {
                None => by_calls(memory.address(), false),
                file => Reached {
                    file,
                    offset,
                    pages: 0..0,
                    by_calls: false,
                    may_be_shared: false,
                },
            });
        }
        let memory = memory
            .downcast_ref::<ApplicationMemory>()
            .ok_or(Refusal::NotShareable)?;
        let calls = by_calls(
            memory.address(),
            matches!(memory.sharing(), Some(Sharing::NotYet | Sharing::Moving)),
        );
        let Some(shared) = memory.shared_pages() else {
            return Ok(calls);
        };
        let Some(file) = opened(shared.file)? else {
            return Ok(calls);
        };
        let pages = shared.addresses;
        let all = pages.start <= calls.offset && calls.offset + grantable.length <= pages.end;
        Ok(Reached {
            file: Some(file),
            offset: if all {
                calls.offset - pages.start
            } else {
                calls.offset
            },
            pages: if all { 0..0 } else { pages.clone() },
            by_calls: !all,
            may_be_shared: false,
        })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // A peer that has not noticed the end of the link can no longer reach any memory.
        self.take_back(|_| true);
    }
}

impl Doorbell {
    /// Adds the doorbell to the epoll set on which sleepers wait.
    fn add_to(&mut self, doorbells: &Arc<OwnedFd>) -> Result<(), Errno> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        // The peer may have sent any descriptor, and polling some of them takes as long as their makers like.
        let is_doorbell = socket_domain(&self.socket)? == AddressFamily::UNIX
            && socket_type(&self.socket)? == SocketType::SEQPACKET;
        if !is_doorbell {
            return Err(Errno::INVAL);
        }
        let data = epoll::EventData::new_u64(0);
        epoll::add(doorbells, &self.socket, data, epoll::EventFlags::IN)?;
        self.doorbells = Some(Arc::clone(doorbells));
        Ok(())
    }

    /// Takes the pending rings of the doorbell.
    fn answer(&mut self) {
        for _ in 0..RINGS_PER_PASS {
            if !self.answer_one() {
                return;
            }
        }
    }

    /// Takes one ring of the doorbell; returns false if there was none. A doorbell that the peer has closed leaves the epoll set.
    fn answer_one(&mut self) -> bool {
        match rustix::net::recv(&self.socket, &mut [0; 64], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => true,
            Err(Errno::AGAIN) => false,
            _ => {
                self.remove();
                false
            }
        }
    }

    fn remove(&mut self) {
        if let Some(doorbells) = self.doorbells.take() {
            let _ = epoll::delete(&doorbells, &self.socket);
        }
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // Closing it is not enough: a peer may hold this end too.
        self.remove();
    }
}

/// Maps the memory that a peer granted, from the page in which it begins to its end.
fn map(file: &OwnedFd, offer: &Offer, end: u64) -> Option<Window> {
    let begin = offer.offset - offer.offset % rustix::param::page_size() as u64;
    let len = usize::try_from(end - begin).ok()?;
    let writable = offer.access.contains(Access::REMOTE_WRITE);
    Window::of_file(&MAPPED, file.as_fd(), begin, len, writable)
}

fn errno_of(fault: Fault) -> Errno {
    match fault {
        Fault::Io(errno) => Errno::from_raw_os_error(errno),
        _ => Errno::FAULT,
    }
}

/// Opens a second descriptor of a file, which can only read.
fn read_only(file: BorrowedFd<'_>) -> Option<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(std::fs::File::open(path).ok()?.into())
}

#[cfg(test)]
mod tests;
