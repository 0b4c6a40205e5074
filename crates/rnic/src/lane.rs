//! Requests that the threads of a program carry out without the device.
//!
//! A QP whose peer is on this host has a *lane*: what its last requests needed to know of the peer's grants, of its own regions and of the
//! ring to the peer. A thread that posts a request which the lane covers carries it out under the lane's own lock, so that the QPs of several
//! threads do not wait for each other, nor for whoever drives the device. All other requests go to the device, which teaches the lane what it
//! finds out ([`DirectLane::learn`]).
//!
//! A lane in which threads meet is split into *parts*, each with a lock, with its own copy of the grants and regions, and with its own way into
//! the peer's memory: WRITEs and READs of several threads on one QP, which have no order, then do not wait for each other either. The device
//! changes all parts.
//!
//! - A WRITE or READ that a grant covers is carried out in the peer's memory, once all requests before it are done.
//! - A SEND goes into the ring to the peer ([`outgoing`]), and whoever learns that the peer has taken it completes it ([`Lanes::end`]).
//! - A SEND of the peer is taken out of the peer's ring by whoever polls, and executed ([`incoming`], [`Lanes::take`]).
//!
//! Nothing overtakes: the device closes the lane before it queues a request, and a lane does nothing while a place of the send queue is
//! taken by a request that is not the lane's, which includes those that were left to the driver. Only the device opens a lane. For SENDs it
//! lends the lane the state of the QP's requester and responder, and takes it back before it does anything with the QP. A caller that makes
//! a change of which no later request may be ignorant waits until the lane's locks are free ([`DirectLane::close`],
//! [`DirectLane::forget_key`]). Whoever holds one of them never waits for the device, so that the device may wait for the lock. The two are
//! never held together.

mod incoming;
mod outgoing;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rdmux_wire::roce::MESSAGE_BYTES_MAX;
use rdmux_wire::{Psn, Qpn, RKey};

use crate::cq::{CompletionQueue, Cqn, Pushed, Status, WcOpcode};
use crate::device::RECORD_READ_BYTES;
use crate::local::{Put, RingBytes, Ticket};
use crate::memory::{Access, Memory, PeerMemory};
use crate::probes;
use crate::qp::bare_completion;
use crate::qp::message::opcode_of;
use crate::qp::requester::direct::{Grant, reaches};
use crate::queue::SendQueue;
use crate::region::{NumberMap, Pd, Regions, View};
use crate::sync::{Mutex, MutexGuard, RwLock};
use crate::time::Time;
use crate::work::{SendFlags, SendRequest, Sge, SgeList, Target};

use self::incoming::Incoming;
pub(crate) use self::incoming::{Receiving, Turn};
use self::outgoing::Outgoing;
pub(crate) use self::outgoing::{Sending, Sent};

/// Most PSNs that a lane may have before the device looks at the sequence again, which compares PSNs that are at most 2^23 apart.
pub(crate) const PSNS_LENT: u32 = 1 << 22;
/// Parts of a lane that is split, besides the first.
const PARTS: usize = 16;
/// Meetings of threads after which a lane is split: the device too enters it now and then.
const MEETINGS_MAX: u32 = 64;
/// Most own regions that a part of a lane knows; it forgets the oldest first.
const KEYS_MAX: usize = 16;

/// Outcome of [`DirectLane::post`].
#[derive(Debug)]
#[must_use]
pub enum Directly {
    /// The lane does not cover the request: the caller must post it to the device.
    Not,
    /// The request is complete, or sent.
    Done,
    /// The request is complete, and the device has to know: the caller calls [`crate::Rnic::deliver`], or has the driver call it.
    DoneAndTell(Delivery),
    /// The request is sent, and others have ended of which the peer tells nobody who sleeps: the caller looks for the ends.
    DoneAndEnded,
}

/// A completion with a consequence for the device: a waiter to notify, or a queue that overran.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    pub(crate) cqn: Cqn,
    pub(crate) qpn: Qpn,
    pub(crate) pushed: Pushed,
}

impl Delivery {
    /// Returns the consequence of a QP's completion for the device, if it has one.
    #[inline]
    fn of(cqn: Cqn, qpn: Qpn, pushed: Pushed) -> Option<Delivery> {
        (pushed != Pushed::Quiet).then_some(Delivery { cqn, qpn, pushed })
    }
}

/// The lane of a QP, shared by the device and the threads that post to the QP.
#[derive(Clone, Debug)]
pub struct DirectLane(Arc<Lane>);

#[derive(Debug)]
struct Lane {
    qpn: Qpn,
    cqn: Cqn,
    cq: CompletionQueue,
    sends: SendQueue,
    /// Set while callers may post without the device.
    open: AtomicBool,
    /// Set when the QP takes READs.
    reads: AtomicBool,
    /// The part that has the SENDs, and all requests until threads meet in it.
    first: Part,
    /// Meetings of threads in that part.
    meetings: AtomicU32,
    /// The parts of WRITEs and READs, once there are some, and how many of them threads may use.
    others: OnceLock<Box<[Part]>>,
    usable: AtomicUsize,
    /// Set while the lane has SENDs, of this QP and of its peer.
    sends_lent: AtomicBool,
    receives_lent: AtomicBool,
    incoming: Mutex<Incoming>,
}

/// A part of a lane. Threads of different parts write to no cache line in common.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(Mutex<Known>);

/// Grants and regions that a part of a lane knows, and in the first part the SENDs that the lane has.
#[derive(Debug, Default)]
pub(crate) struct Known {
    grants: Vec<(RKey, Grant)>,
    keys: Vec<OwnKey>,
    outgoing: Outgoing,
    /// Requests carried out, and their bytes.
    requests: u64,
    bytes: u64,
}

/// Returns a number of this thread, by which it has its part.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that ends may still post.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

/// Numbers of what lanes did without the device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaneCounts {
    /// WRITEs and READs, and their bytes.
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// Packets of SENDs sent and received, and their bytes.
    pub(crate) sent: (u64, u64),
    pub(crate) received: (u64, u64),
}

/// A plain region of the QP's protection domain. Its owner keeps the memory alive until the lanes have forgotten it, so that no lane drops
/// the last handle of a memory.
#[derive(Clone, Debug)]
pub(crate) struct OwnKey {
    pub(crate) lkey: u32,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) memory_offset: u64,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: Access,
}

impl OwnKey {
    fn view(&self) -> View<'_> {
        View {
            memory: &self.memory,
            memory_offset: self.memory_offset,
            length: self.length,
            iova: self.iova,
        }
    }
}

/// Returns the element that satisfies a condition; the most recent one is the first to be looked at.
#[inline]
fn find_recent<T>(list: &mut [T], is_it: impl Fn(&T) -> bool) -> Option<&T> {
    if !list.first().is_some_and(&is_it) {
        let at = list.iter().position(is_it)?;
        list.swap(0, at);
    }
    list.first()
}

/// Copies an element to an offset in a peer's memory, or from there; returns whether that succeeded.
#[inline(always)]
fn copy(memory: &dyn PeerMemory, at: u64, keys: &mut [OwnKey], sge: &Sge, writes: bool) -> bool {
    let Some(key) = find_recent(keys, |key| key.lkey == sge.lkey) else {
        return false;
    };
    let length = u64::from(sge.length);
    let Some(begin) = key.view().offset_of(sge.addr, length) else {
        return false;
    };
    if writes {
        memory.write(at, &*key.memory, begin, length).is_ok()
    } else {
        let may = key.access.contains(Access::LOCAL_WRITE);
        may && memory.read(at, &*key.memory, begin, length).is_ok()
    }
}

/// Copies as [`copy`] does, inline bytes or the elements of a list.
fn copy_list(
    memory: &dyn PeerMemory,
    mut at: u64,
    keys: &mut [OwnKey],
    list: &SgeList,
    writes: bool,
) -> bool {
    if let Some(inline) = list.as_inline() {
        return memory.write_bytes(at, inline).is_ok();
    }
    for sge in list.as_slice().iter().filter(|sge| sge.length > 0) {
        if !copy(memory, at, keys, sge, writes) {
            return false;
        }
        at += u64::from(sge.length);
    }
    true
}

impl Known {
    /// Carries out a request in the peer's memory; returns false if something that it needs is not known, or failed. Then some of the bytes
    /// may be in place, as those of a request that is sent in packets may be before it has ended.
    #[inline(always)]
    fn carry_out(
        &mut self,
        (rkey, va, access): (RKey, u64, Access),
        request: &SendRequest,
        bytes: u32,
    ) -> bool {
        let Some((_, grant)) = find_recent(&mut self.grants, |(key, _)| *key == rkey) else {
            return false;
        };
        let Some(at) = grant.offset_of(va, bytes, access) else {
            return false;
        };
        let memory = &*grant.memory;
        let writes = access == Access::REMOTE_WRITE;
        if let Some(sge) = request.sges.only() {
            return copy(memory, at, &mut self.keys, sge, writes);
        }
        copy_list(memory, at, &mut self.keys, &request.sges, writes)
    }
}

impl Lane {
    /// Enters the thread's part. `None`: the device has to see to the parts.
    #[inline]
    fn enter(&self) -> Option<MutexGuard<'_, Known>> {
        let usable = self.usable.load(Ordering::Relaxed);
        if usable > 0 {
            return self.enter_own(usable);
        }
        match self.first.0.try_lock() {
            None => self.meet(),
            known => known,
        }
    }

    /// Enters the thread's part of a lane that is split.
    #[inline(never)]
    fn enter_own(&self, usable: usize) -> Option<MutexGuard<'_, Known>> {
        let part = self.others.get()?.get(thread_number() % usable)?;
        Some(part.0.lock())
    }

    /// Enters the first part after the thread has met somebody there: another thread, or the device. Splits the lane if that happens often.
    #[cold]
    fn meet(&self) -> Option<MutexGuard<'_, Known>> {
        let first = self.first.0.lock();
        let meetings = self.meetings.fetch_add(1, Ordering::Relaxed);
        if meetings != MEETINGS_MAX {
            return Some(first);
        }
        self.split();
        None
    }

    /// Adds parts. The caller has locked the first.
    fn split(&self) {
        self.others
            .get_or_init(|| (0..PARTS).map(|_| Part::default()).collect());
    }
}

impl DirectLane {
    /// `of_sends` and `of_receives`: the QP's completion queues.
    pub(crate) fn new(
        qpn: Qpn,
        of_sends: (Cqn, CompletionQueue),
        of_receives: (Cqn, CompletionQueue),
        sends: SendQueue,
    ) -> DirectLane {
        DirectLane(Arc::new(Lane {
            qpn,
            cqn: of_sends.0,
            cq: of_sends.1,
            sends,
            open: AtomicBool::new(false),
            reads: AtomicBool::new(false),
            first: Part::default(),
            meetings: AtomicU32::new(0),
            others: OnceLock::new(),
            usable: AtomicUsize::new(0),
            sends_lent: AtomicBool::new(false),
            receives_lent: AtomicBool::new(false),
            incoming: Mutex::new(Incoming::new(of_receives.0, of_receives.1)),
        }))
    }

    /// Carries out a send request if the lane covers it, and may take it then. Calls `now` only rarely. The outcome is that of
    /// [`crate::Rnic::post_send`].
    #[inline]
    pub fn post(&self, taken: &mut Option<SendRequest>, now: impl Fn() -> Time) -> Directly {
        let lane = &*self.0;
        let Some(request) = taken else {
            return Directly::Not;
        };
        if !matches!(request.to, Target::Connected) {
            return Directly::Not;
        }
        // The device refuses an invalid request.
        let bytes = match request.sges.only() {
            Some(sge) if sge.length <= MESSAGE_BYTES_MAX => sge.length,
            _ => match request.check() {
                Ok(bytes) => bytes,
                Err(_) => return Directly::Not,
            },
        };
        let Some(reached) = reaches(&request.operation, bytes) else {
            return self.send(taken, bytes);
        };
        let Some(mut known) = lane.enter() else {
            return Directly::Not;
        };
        // In this order: when the device gives back the last place, the lane is closed already.
        if !lane.sends.is_idle() || !lane.open.load(Ordering::Acquire) {
            return Directly::Not;
        }
        let (.., access) = reached;
        let may = access == Access::REMOTE_WRITE || lane.reads.load(Ordering::Relaxed);
        if !may || !known.carry_out(reached, request, bytes) {
            return Directly::Not;
        }
        known.requests += 1;
        known.bytes += u64::from(bytes);
        probe!(post_direct, lane.qpn.value(), request.wr_id, bytes);
        if !request.flags.contains(SendFlags::SIGNALED) {
            return Directly::Done;
        }
        let opcode = opcode_of(&request.operation);
        let mut wc = bare_completion(lane.qpn, request.wr_id, Status::Success, opcode);
        wc.byte_len = bytes;
        let pushed = lane.cq.push(wc, false, now);
        if matches!(pushed, Pushed::Overrun { .. } | Pushed::ShareOverrun) {
            // The device puts the QP in error.
            self.close_soon();
        }
        Delivery::of(lane.cqn, lane.qpn, pushed).map_or(Directly::Done, Directly::DoneAndTell)
    }

    /// Puts a SEND into the ring to the peer, if the lane has the QP's SENDs.
    #[inline]
    fn send(&self, taken: &mut Option<SendRequest>, bytes: u32) -> Directly {
        let lane = &*self.0;
        if !self.has_sends() {
            return Directly::Not;
        }
        let wr_id = taken.as_ref().map_or(0, |request| request.wr_id);
        let mut known = self.lock_first();
        let Known { outgoing, keys, .. } = &mut *known;
        let put = outgoing.post(&lane.sends, keys, taken, bytes);
        drop(known);
        let done = match put {
            Put::Not => return Directly::Not,
            Put::Done => Directly::Done,
            Put::DoneAndEnded => Directly::DoneAndEnded,
        };
        let opcode = probes::opcode(WcOpcode::Send);
        probe!(post_send, lane.qpn.value(), wr_id, opcode, bytes);
        done
    }

    /// Completes the SENDs that a ticket ends. Returns false if the device has to handle the ticket. Adds to `deliveries` what the device
    /// has to know.
    pub(crate) fn end(&self, ticket: Ticket, now: &dyn Fn() -> Time, deliveries: &mut Vec<Delivery>) -> bool {
        let lane = &*self.0;
        let mut known = self.lock_first();
        let ended = known.outgoing.end(ticket, |wqe| {
            // Before the completion shows: whoever sees it may post again.
            lane.sends.give_back(1);
            if !wqe.request.flags.contains(SendFlags::SIGNALED) {
                return;
            }
            let mut wc = bare_completion(lane.qpn, wqe.request.wr_id, Status::Success, WcOpcode::Send);
            wc.byte_len = wqe.bytes;
            let pushed = lane.cq.push(wc, false, now);
            deliveries.extend(Delivery::of(lane.cqn, lane.qpn, pushed));
        });
        ended.is_some()
    }

    /// Executes a request of the peer at `src`. Returns what the device has to know, if that is anything; `None` if the device has to handle
    /// the request.
    ///
    /// With the record come its first [`RECORD_READ_BYTES`] bytes, or all of them.
    #[inline]
    pub(crate) fn take(
        &self,
        src: IpAddr,
        record: (&dyn RingBytes, &[u8]),
        now: impl Fn() -> Time,
    ) -> Option<Option<Delivery>> {
        if !self.has_receives() {
            return None;
        }
        self.0.incoming.lock().take(src, record, now)
    }

    /// Returns the numbers of requests, packets and bytes.
    pub(crate) fn counts(&self) -> LaneCounts {
        let mut counts = LaneCounts::default();
        self.each(|known| {
            counts.requests += known.requests;
            counts.bytes += known.bytes;
            counts.sent.0 += known.outgoing.packets;
            counts.sent.1 += known.outgoing.bytes;
        });
        let incoming = self.0.incoming.lock();
        counts.received = (incoming.packets, incoming.bytes);
        counts
    }

    /// Splits the lane as threads that meet in it do.
    #[cfg(test)]
    pub(crate) fn split(&self) {
        let _first = self.lock_first();
        self.0.split();
    }

    // Loans of the device.

    /// Returns whether the lane has the QP's SENDs.
    #[inline]
    pub(crate) fn has_sends(&self) -> bool {
        self.0.sends_lent.load(Ordering::Relaxed)
    }

    /// Returns whether the lane executes the peer's SENDs.
    #[inline]
    pub(crate) fn has_receives(&self) -> bool {
        self.0.receives_lent.load(Ordering::Relaxed)
    }

    /// Gives the lane the QP's SENDs.
    pub(crate) fn lend_sends(&self, sending: Sending, sent: Sent) {
        self.lock_first().outgoing.lend(sending, sent);
        self.0.sends_lent.store(true, Ordering::Relaxed);
    }

    /// Takes the QP's SENDs back: callers post to the device from here on.
    pub(crate) fn take_back_sends(&self) -> Option<Sent> {
        self.0.sends_lent.store(false, Ordering::Relaxed);
        self.lock_first().outgoing.take_back()
    }

    /// Returns the number of SENDs that are not done, and the PSN of the next one, while the lane has them.
    pub(crate) fn sending(&self) -> Option<(usize, Psn)> {
        let known = self.lock_first();
        known.outgoing.sent().map(|sent| (sent.queue.len(), sent.next))
    }

    /// Lets callers execute the peer's SENDs.
    pub(crate) fn lend_receives(&self, receiving: Receiving, turn: Turn) {
        self.0.incoming.lock().lend(receiving, turn);
        self.0.receives_lent.store(true, Ordering::Relaxed);
    }

    /// Makes callers leave the peer's requests to the device from here on.
    pub(crate) fn take_back_receives(&self) -> Option<Turn> {
        self.0.receives_lent.store(false, Ordering::Relaxed);
        self.0.incoming.lock().take_back()
    }

    /// Returns the PSN that is expected next, while the lane executes the peer's SENDs.
    pub(crate) fn expected(&self) -> Option<Psn> {
        self.0.incoming.lock().turn().map(|turn| turn.expected)
    }

    /// Learns the region that the last receive needed which the device had to handle for that. Returns whether there is one.
    pub(crate) fn learn_receive(&self, regions: &mut Regions, pd: Pd) -> bool {
        let wanted = self.0.incoming.lock().wanted.take();
        let Some(key) = wanted.and_then(|lkey| regions.lend(lkey, pd, self)) else {
            return false;
        };
        let mut incoming = self.0.incoming.lock();
        let oldest = remember(&mut incoming.keys, key);
        drop(incoming);
        self.end_loan(regions, oldest);
        true
    }

    /// Waits until no caller is inside of an access by the QP's own grants. None begins until the guard is dropped.
    pub(crate) fn lock_first(&self) -> MutexGuard<'_, Known> {
        self.0.first.0.lock()
    }

    /// Calls `f` with each part, without callers in it. Parts are added under the lock of the first, so that a caller of one which is added
    /// behind that call sees what the device has done before.
    fn each(&self, mut f: impl FnMut(&mut Known)) {
        f(&mut self.lock_first());
        for part in self.0.others.get().into_iter().flatten() {
            f(&mut part.0.lock());
        }
    }

    /// Returns whether a part satisfies a condition.
    fn any_part(&self, is_it: impl Fn(&Known) -> bool) -> bool {
        let mut any = false;
        self.each(|known| any |= is_it(known));
        any
    }

    /// Makes callers ask the device from here on. Requests of other threads that have begun may still end.
    #[inline]
    pub(crate) fn close_soon(&self) {
        self.0.open.store(false, Ordering::Release);
    }

    /// Makes callers ask the device from here on, and waits for the end of requests that have begun.
    pub(crate) fn close(&self) {
        self.close_soon();
        self.each(|_| {});
    }

    /// Lets callers post without the device. The device calls this when it has carried out a request of the QP directly.
    pub(crate) fn open(&self, reads: bool) {
        self.0.reads.store(reads, Ordering::Relaxed);
        self.0.open.store(true, Ordering::Release);
    }

    /// Learns a grant that a request has needed.
    pub(crate) fn learn_grant(&self, rkey: RKey, grant: &Grant) {
        learn_as(&mut self.lock_first(), rkey, || Some(grant.clone()));
        let others = self.0.others.get().into_iter().flatten().enumerate();
        let usable = others.take_while(|(at, part)| {
            let of_part = || {
                let memory = grant.memory.of_part(*at)?;
                Some(Grant {
                    memory,
                    ..grant.clone()
                })
            };
            learn_as(&mut part.0.lock(), rkey, of_part)
        });
        self.0.usable.store(usable.count(), Ordering::Relaxed);
    }

    /// Learns the regions of a request's own elements.
    pub(crate) fn learn(&self, regions: &mut Regions, pd: Pd, sges: &[Sge]) {
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let knows = |known: &Known| known.keys.iter().any(|key| key.lkey == sge.lkey);
            if !self.any_part(|known| !knows(known)) {
                continue;
            }
            let Some(key) = regions.lend(sge.lkey, pd, self) else {
                continue;
            };
            let mut oldest = Vec::new();
            self.each(|known| {
                if !knows(known) {
                    oldest.extend(remember(&mut known.keys, key.clone()));
                }
            });
            for oldest in oldest {
                self.end_loan(regions, Some(oldest));
            }
        }
    }

    /// Notes that a region was forgotten, unless another part of the lane still knows it, or the other direction.
    fn end_loan(&self, regions: &mut Regions, forgotten: Option<OwnKey>) {
        let Some(OwnKey { lkey, .. }) = forgotten else {
            return;
        };
        let knows = |keys: &[OwnKey]| keys.iter().any(|key| key.lkey == lkey);
        if !self.any_part(|known| knows(&known.keys)) && !knows(&self.0.incoming.lock().keys) {
            regions.end_loan(lkey, self);
        }
    }

    /// Forgets a grant: waits for the end of requests that use it.
    pub(crate) fn forget_grant(&self, rkey: RKey) {
        self.each(|known| known.grants.retain(|(key, _)| *key != rkey));
    }

    /// Forgets all grants, and closes the lane.
    pub(crate) fn forget_grants(&self) {
        self.close_soon();
        self.each(|known| known.grants.clear());
    }

    /// Forgets a region: waits for the end of requests that use it.
    pub(crate) fn forget_key(&self, lkey: u32) {
        self.each(|known| known.keys.retain(|key| key.lkey != lkey));
        self.0.incoming.lock().keys.retain(|key| key.lkey != lkey);
    }

    /// Forgets everything, and closes the lane.
    pub(crate) fn clear(&self, regions: &mut Regions) {
        self.forget_grants();
        let mut keys = std::mem::take(&mut self.0.incoming.lock().keys);
        self.each(|known| keys.append(&mut known.keys));
        for key in keys {
            regions.end_loan(key.lkey, self);
        }
    }

    pub(crate) fn is(&self, other: &DirectLane) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Adds a grant, unless it is known. Returns false if there is none.
fn learn_as(known: &mut Known, rkey: RKey, grant: impl FnOnce() -> Option<Grant>) -> bool {
    if known.grants.iter().any(|(key, _)| *key == rkey) {
        return true;
    }
    let grant = grant();
    let is_known = grant.is_some();
    known.grants.extend(grant.map(|grant| (rkey, grant)));
    is_known
}

/// Adds a region as the most recent one. Returns the one that is forgotten for it.
fn remember(keys: &mut Vec<OwnKey>, key: OwnKey) -> Option<OwnKey> {
    let oldest = if keys.len() == KEYS_MAX { keys.pop() } else { None };
    keys.insert(0, key);
    oldest
}

/// Returns the QPN for which a packet is.
#[inline]
pub(crate) fn dest_qpn(packet: &[u8]) -> Option<Qpn> {
    let &[_, _, _, _, _, high, middle, low] = packet.first_chunk()?;
    Some(Qpn::new(u32::from_be_bytes([0, high, middle, low])))
}

/// The lanes of a device by their QPs, for threads that move requests between rings and lanes without the device.
#[derive(Clone, Debug, Default)]
pub struct Lanes(Arc<All>);

#[derive(Debug, Default)]
struct All {
    lanes: RwLock<NumberMap<DirectLane>>,
    /// Number of changes of the map.
    changes: AtomicU64,
}

/// The lane that was found last, and the number of changes by then.
#[derive(Debug, Default)]
pub struct Recent(Option<(DirectLane, u64)>);

impl Lanes {
    pub(crate) fn insert(&self, lane: DirectLane) {
        self.change(|lanes| lanes.insert(lane.0.qpn.value(), lane));
    }

    pub(crate) fn remove(&self, qpn: Qpn) {
        self.change(|lanes| lanes.remove(&qpn.value()));
    }

    fn change(&self, change: impl FnOnce(&mut NumberMap<DirectLane>) -> Option<DirectLane>) {
        let before = change(&mut self.0.lanes.write());
        self.0.changes.fetch_add(1, Ordering::Relaxed);
        drop(before);
    }

    #[inline]
    fn find<'a>(&self, qpn: Qpn, recent: &'a mut Recent) -> Option<&'a DirectLane> {
        let changes = self.0.changes.load(Ordering::Relaxed);
        let is_it = |(lane, then): &(DirectLane, u64)| lane.0.qpn == qpn && *then == changes;
        if !recent.0.as_ref().is_some_and(is_it) {
            let found = self.0.lanes.read().get(&qpn.value()).cloned();
            recent.0 = found.map(|lane| (lane, changes));
        }
        recent.0.as_ref().map(|(lane, _)| lane)
    }

    /// Executes a request that the process at an address has put into its ring. Returns false if the driver has to pass it to
    /// [`crate::Rnic::handle_request`]. Adds to `deliveries` what the caller passes to [`crate::Rnic::deliver`].
    #[inline]
    pub fn take(
        &self,
        src: IpAddr,
        record: &dyn RingBytes,
        recent: &mut Recent,
        now: impl Fn() -> Time,
        deliveries: &mut Vec<Delivery>,
    ) -> bool {
        let mut head = [0; RECORD_READ_BYTES];
        let head = &mut head[..record.bytes().min(RECORD_READ_BYTES)];
        if record.read(0, head).is_err() {
            return false;
        }
        let lane = dest_qpn(head).and_then(|qpn| self.find(qpn, recent));
        match lane.and_then(|lane| lane.take(src, (record, head), now)) {
            Some(None) => true,
            Some(Some(delivery)) => {
                deliveries.push(delivery);
                true
            }
            None => false,
        }
    }

    /// Returns whether [`Lanes::end`] may handle a ticket. Locks nothing of a lane.
    #[inline]
    pub fn has(&self, ticket: &Ticket, recent: &mut Recent) -> bool {
        self.find(ticket.qpn, recent).is_some_and(DirectLane::has_sends)
    }

    /// Completes the requests that a ticket ends, as [`crate::Rnic::handle_taken`] does for [`crate::Taken::Done`]. Returns false if the
    /// caller has to pass the ticket to that.
    #[inline]
    pub fn end(
        &self,
        ticket: Ticket,
        recent: &mut Recent,
        now: impl Fn() -> Time,
        deliveries: &mut Vec<Delivery>,
    ) -> bool {
        self.find(ticket.qpn, recent)
            .is_some_and(|lane| lane.end(ticket, &now, deliveries))
    }
}
