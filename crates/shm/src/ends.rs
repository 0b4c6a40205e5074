//! The rings of one end of a link, for all threads of its process.
//!
//! The holder of the engine's lock uses the rings by the [`crate::Channel`]. Other threads put requests into the ring, take those of the peer,
//! and learn the ends of their own, by the [`Ends`] that belong to the channel, and do not wait for the engine.
//!
//! # Locks
//! Each side of the two rings has a lock: the producer's side, with the trains that wait for room and the announcement of who sleeps, and
//! the consumer's. No thread holds both. No sleeper is woken under either, which takes a system call: whoever has stored something for one
//! unlocks first, and then rings the doorbell or ends the nap.
//!
//! The engine's lock comes before the consumer's, that before those of queue pairs, and those before the producer's: [`Ends::take_requests`]
//! calls back under the consumer's lock, and the callee may take locks of queue pairs. So whoever has one of those calls [`Ends::request`],
//! [`Ends::take_end`] and what takes no lock, which do not wait for the consumer's lock, and nothing else of this type.
//!
//! # Requests that the engine has
//! The engine takes a record first and executes it afterwards, without the lock. As long as it has such records, that is until
//! [`crate::Channel::release`], no other thread takes any: the order of requests would be lost, and a release would return the slots of
//! records that the engine still reads.
//!
//! A train, a request that names its payload, and what the callee refuses is left to the engine. So is everything while responses of this
//! end wait for room: the ends of requests would overtake them.
//!
//! # Looking without a lock
//! A thread that polls looks at a word of shared memory, at a position that is copied whenever a lock is released. A copy may be stale while
//! another thread has the lock.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rdmux_rnic::{Fill, LinkProgress, Put, Taken, Ticket};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::net::SendFlags;

use crate::channel::WAITING_BYTES_MAX;
use crate::nap;
use crate::record::{HeldBytes, RecordBytes};
use crate::ring::{
    Consumer, Corrupt, Meta, Producer, PushError, Record, RingMemory as _, Wake, has_moved, is_record_at,
};
use crate::segment::{Area, Segment, Side};

#[cfg(test)]
mod tests;

/// Cost of a waiting train besides its bytes: its place in the queue, which may be twice as long as needed, and the allocator's overhead.
const WAITING_ENTRY_BYTES: usize = 2 * size_of::<(Meta, Box<[u8]>)>() + 16;
/// Most bytes of a request whose release may come late: a longer one holds room that the peer may need.
const LATE_BYTES_MAX: usize = 256;

// Flags of `TxSide::news`, above the 32 bits of a position.
const HAS_REQUESTS: u64 = 1 << 32;
const HAS_ENDED: u64 = 2 << 32;
const HAS_UNTOLD_ENDS: u64 = 4 << 32;
const HAS_WAITING: u64 = 8 << 32;

/// Both sides of an end's rings, each under its lock. It may outlive the channel; a request that is put into the ring then never ends.
#[derive(Debug)]
pub struct Ends {
    segment: Arc<Segment>,
    side: Side,
    /// The socket by which the peer is woken. It is the channel's: a peer may take its end for that of the process, and threads may have
    /// this for longer than the link lasts.
    doorbell: Weak<OwnedFd>,
    tx: TxSide,
    rx: RxSide,
}

/// The producer's side. Threads at the two sides share no cache lines, nor pairs of them.
#[derive(Debug)]
#[repr(align(128))]
struct TxSide {
    state: Mutex<Tx>,
    /// Position that the producer has seen, and flags: copies of the state.
    news: AtomicU64,
    area: Area,
}

#[derive(Debug)]
struct Tx {
    producer: Producer<Area>,
    /// Position that the producer had seen when the engine looked for ends.
    looked: u32,
    /// Trains that wait for room, and their bytes.
    waiting: VecDeque<(Meta, Box<[u8]>)>,
    waiting_bytes: usize,
    /// Set while somebody sleeps on the doorbell, and while somebody naps.
    sleeps: bool,
    naps: bool,
    /// Set when the peer rings the doorbell as soon as there is room, or it has taken requests; stale once it has rung, until
    /// [`Tx::announce`].
    waits: bool,
}

/// The consumer's side.
#[derive(Debug)]
#[repr(align(128))]
struct RxSide {
    state: Mutex<Rx>,
    /// Copies of the consumer's position, of [`Rx::unreleased`], and of whether the consumer owes the peer a wake-up.
    position: AtomicU32,
    unreleased: AtomicBool,
    owes_ends: AtomicBool,
    area: Area,
}

#[derive(Debug)]
struct Rx {
    consumer: Consumer<Area>,
    /// Set while the engine has records that it has not released.
    held: bool,
    /// Set while a record is executed but not released.
    unreleased: bool,
}

/// Outcome of [`Ends::take_requests`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TookRequests {
    /// Number of requests.
    pub taken: usize,
    /// Set when there is a record that was not taken.
    pub is_more: bool,
}

/// The producer's side, locked.
struct TxGuard<'a> {
    tx: MutexGuard<'a, Tx>,
    news: &'a AtomicU64,
}

/// The consumer's side, locked.
struct RxGuard<'a> {
    rx: MutexGuard<'a, Rx>,
    side: &'a RxSide,
}

impl TxSide {
    fn new(area: impl Fn() -> Area) -> TxSide {
        let tx = Tx {
            producer: Producer::new(area()),
            looked: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            sleeps: false,
            naps: false,
            waits: false,
        };
        TxSide {
            state: Mutex::new(tx),
            news: AtomicU64::new(0),
            area: area(),
        }
    }

    #[inline]
    fn lock(&self) -> TxGuard<'_> {
        let tx = self.state.lock();
        let news = &self.news;
        TxGuard { tx, news }
    }

    #[inline]
    fn try_lock(&self) -> Option<TxGuard<'_>> {
        let tx = self.state.try_lock()?;
        let news = &self.news;
        Some(TxGuard { tx, news })
    }

    #[inline]
    fn has(&self, flag: u64) -> bool {
        self.news.load(Ordering::Relaxed) & flag != 0
    }
}

impl RxSide {
    fn new(area: impl Fn() -> Area) -> RxSide {
        let rx = Rx {
            consumer: Consumer::new(area()),
            held: false,
            unreleased: false,
        };
        RxSide {
            state: Mutex::new(rx),
            position: AtomicU32::new(0),
            unreleased: AtomicBool::new(false),
            owes_ends: AtomicBool::new(false),
            area: area(),
        }
    }

    #[inline]
    fn lock(&self) -> RxGuard<'_> {
        let rx = self.state.lock();
        RxGuard { rx, side: self }
    }

    #[inline]
    fn try_lock(&self) -> Option<RxGuard<'_>> {
        let rx = self.state.try_lock()?;
        Some(RxGuard { rx, side: self })
    }
}

impl Deref for TxGuard<'_> {
    type Target = Tx;

    #[inline]
    fn deref(&self) -> &Tx {
        &self.tx
    }
}

impl DerefMut for TxGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Tx {
        &mut self.tx
    }
}

impl Drop for TxGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.news.store(self.tx.news(), Ordering::Relaxed);
    }
}

impl Deref for RxGuard<'_> {
    type Target = Rx;

    #[inline]
    fn deref(&self) -> &Rx {
        &self.rx
    }
}

impl DerefMut for RxGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Rx {
        &mut self.rx
    }
}

impl Drop for RxGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let position = self.rx.consumer.position();
        self.side.position.store(position, Ordering::Relaxed);
        self.side.unreleased.store(self.rx.unreleased, Ordering::Relaxed);
        let owes_ends = self.rx.consumer.owes_wake();
        self.side.owes_ends.store(owes_ends, Ordering::Relaxed);
    }
}

impl Tx {
    /// Returns the position that the producer has seen, and the flags.
    #[inline]
    fn news(&self) -> u64 {
        let mut news = u64::from(self.producer.seen());
        if self.producer.has_requests() {
            news |= HAS_REQUESTS;
            if self.producer.has_ended() {
                news |= HAS_ENDED;
                if self.is_to_announce() {
                    news |= HAS_UNTOLD_ENDS;
                }
            }
        }
        if !self.waiting.is_empty() {
            news |= HAS_WAITING;
        }
        news
    }

    /// Returns whether somebody sleeps of whom the peer does not know. The peer rings once for those who sleep, until they have woken.
    #[inline]
    fn is_to_announce(&self) -> bool {
        (self.sleeps || self.naps) && !self.waits
    }

    /// Lets the peer ring the doorbell for room and for the ends of requests as long as somebody here sleeps or naps. Returns false if
    /// there is room, or requests have ended.
    fn announce(&mut self) -> Result<bool, Corrupt> {
        let sleeps = self.sleeps || self.naps;
        let waits = match (sleeps, self.waiting.is_empty()) {
            (true, false) => self.producer.wants_room()?,
            (true, true) if self.producer.has_requests() => self.producer.wants_ends()?,
            _ => {
                if std::mem::take(&mut self.waits) {
                    self.producer.no_longer_waits();
                }
                return Ok(true);
            }
        };
        self.waits = waits;
        Ok(waits)
    }

    /// Puts the first of the trains that wait into the ring, if there is one and room for it.
    fn send_first(&mut self) -> Result<Option<Wake>, Corrupt> {
        let Some((meta, bytes)) = self.waiting.front() else {
            return Ok(None);
        };
        let wake = match self.producer.push(*meta, bytes) {
            Ok(wake) => wake,
            Err(PushError::Corrupt(corrupt)) => return Err(corrupt),
            Err(PushError::Full) => return Ok(None),
        };
        self.waiting_bytes -= WAITING_ENTRY_BYTES + bytes.len();
        self.waiting.pop_front();
        Ok(Some(wake))
    }

    #[inline]
    fn take_end(&mut self, may: &mut dyn FnMut(&Ticket) -> bool) -> Result<Option<Ticket>, Corrupt> {
        self.producer.look_for_ends()?;
        let mut last: Option<Ticket> = None;
        while let Some((ticket, Taken::Done)) = self.producer.oldest_end() {
            let goes_on = match &last {
                Some(last) => (last.qpn, last.incarnation) == (ticket.qpn, ticket.incarnation),
                None => may(&ticket),
            };
            if !goes_on {
                break;
            }
            self.producer.pass_end();
            last = Some(ticket);
        }
        self.announce_left();
        Ok(last)
    }

    /// Lets the peer ring the doorbell for the ends of the requests that are left, if somebody sleeps of whom it does not know: when they were
    /// put, others had ended that nobody had looked at.
    fn announce_left(&mut self) {
        if self.is_to_announce() && self.producer.has_requests() && !self.producer.has_ended() {
            // The next look finds what is wrong with a ring.
            let _ = self.announce();
        }
    }
}

impl Rx {
    /// Releases what is executed but not released, and tells a peer that waits for its end: whoever calls this is about to sleep.
    fn settle(&mut self) -> Wake {
        if self.held {
            return Wake::Nobody;
        }
        let wake = if std::mem::take(&mut self.unreleased) {
            self.consumer.release()
        } else {
            Wake::Nobody
        };
        // Another thread may have released others, and leave the peer to whoever sleeps.
        match wake {
            Wake::Nobody => self.consumer.tell_ends(),
            wake => wake,
        }
    }
}

/// For threads without the engine's lock.
impl Ends {
    /// Puts a request into the ring, unless trains wait for room. `fill` is called under the producer's lock, and uses nothing of this
    /// type.
    #[inline]
    pub fn request(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Result<Put, Corrupt> {
        self.request_with_parts(ticket, bytes, 0, |area, slot| fill(&RecordBytes::new(area, slot)))
    }

    /// Returns whether there is a record to take. Takes no lock; costs one load of shared memory.
    #[inline]
    pub fn is_ready(&self) -> bool {
        is_record_at(&self.rx.area, self.rx.position.load(Ordering::Relaxed))
    }

    /// Returns whether the peer has sent something, or has taken requests. Takes no lock; costs two loads of shared memory at most.
    #[inline]
    pub fn has_news(&self) -> bool {
        if self.is_ready() {
            return true;
        }
        let news = self.tx.news.load(Ordering::Relaxed);
        let seen = news as u32;
        news & HAS_REQUESTS != 0 && (news & HAS_ENDED != 0 || has_moved(&self.tx.area, seen))
    }

    /// Returns whether trains wait for room. Takes no lock.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.tx.has(HAS_WAITING)
    }

    /// Returns whether a request was taken that is not released. Takes no lock.
    #[inline]
    pub fn is_unreleased(&self) -> bool {
        self.rx.unreleased.load(Ordering::Relaxed)
    }

    /// Takes at most `max` requests that hold their payload, and releases them, which tells the peer that they are executed. Returns `None` if
    /// another thread has the consumer's side, or the engine has records that it has not released.
    ///
    /// `take` executes the request whose bytes it gets, and returns true; or it returns false, and the record stays for the engine, with
    /// all behind it. It is called under the consumer's lock, and uses nothing of this type.
    ///
    /// With `late`, a single short request is not released yet, so that the caller's answer to it reaches the peer first. The caller calls
    /// [`Ends::release`] after that. One request at a time is late.
    #[inline]
    pub fn take_requests(
        &self,
        max: usize,
        late: bool,
        take: &mut dyn FnMut(&HeldBytes<'_>) -> bool,
    ) -> Option<Result<TookRequests, Corrupt>> {
        let mut rx = self.rx.try_lock()?;
        if rx.held {
            return None;
        }
        let mut took = TookRequests::default();
        let mut is_short = true;
        while took.taken < max {
            let next = match rx.consumer.peek() {
                Ok(Some(next)) => next,
                Ok(None) => break,
                Err(corrupt) if took.taken == 0 => return Some(Err(corrupt)),
                // This call releases the executed ones first. The next look finds the same.
                Err(Corrupt) => {
                    took.is_more = true;
                    break;
                }
            };
            let Record {
                slot,
                bytes,
                train,
                parts,
            } = next.record;
            let held = HeldBytes::new(RecordBytes::new(&self.rx.area, slot), bytes);
            if train.is_some() || parts > 0 || self.has_waiting() || !take(&held) {
                took.is_more = true;
                break;
            }
            rx.consumer.advance(&next);
            is_short = bytes <= LATE_BYTES_MAX;
            took.taken += 1;
        }
        if took.taken == max {
            took.is_more = rx.consumer.is_ready();
        }
        if took.taken == 0 {
            return Some(Ok(took));
        }
        if late && took.taken == 1 && is_short && !rx.unreleased {
            rx.unreleased = true;
            return Some(Ok(took));
        }
        rx.unreleased = false;
        let wake = rx.consumer.release();
        drop(rx);
        self.rouse_if(wake);
        Some(Ok(took))
    }

    /// Releases what [`Ends::take_requests`] has not released. Takes no lock if there is nothing to release.
    #[inline]
    pub fn release(&self) {
        if !self.is_unreleased() {
            return;
        }
        let mut rx = self.rx.lock();
        // The engine releases it with its own.
        if rx.held || !rx.unreleased {
            return;
        }
        rx.unreleased = false;
        let wake = rx.consumer.release();
        drop(rx);
        self.rouse_if(wake);
    }

    /// Returns whether requests have ended while somebody sleeps whom the peer does not wake for them: the engine is to look at them. Takes
    /// no lock.
    #[inline]
    pub fn has_untold_ends(&self) -> bool {
        self.tx.has(HAS_UNTOLD_ENDS)
    }

    /// Returns whether the peer may wait for the ends of requests that were released, and [`Ends::tell_ends`] is to be called when there is
    /// nothing else to do. Takes no lock.
    #[inline]
    pub fn owes_ends(&self) -> bool {
        self.rx.owes_ends.load(Ordering::Relaxed)
    }

    /// Wakes the peer if it waits for the ends of requests.
    pub fn tell_ends(&self) {
        let wake = self.rx.lock().consumer.tell_ends();
        self.rouse_if(wake);
    }

    /// Looks how far the peer has come, and takes the ends of the oldest requests that the peer has executed: those of one queue pair, up to
    /// the first of another one, or one that the peer has not executed, which is the engine's. Returns the last of their tickets, which
    /// ends those before it too. Returns `None` if another thread has the producer's side.
    ///
    /// `may` says whether the caller handles the ends of the queue pair with this ticket; if not, they are the engine's. The peer's responses
    /// to what came before these requests are in its ring, but the engine may not have received them: `may` allows only a queue pair
    /// that waits for none. It is called under the producer's lock, and takes no lock of a queue pair.
    #[inline]
    pub fn take_end(&self, may: &mut dyn FnMut(&Ticket) -> bool) -> Option<Result<Option<Ticket>, Corrupt>> {
        let mut tx = self.tx.try_lock()?;
        Some(tx.take_end(may))
    }
}

/// For the engine, by its [`crate::Channel`].
impl Ends {
    pub(crate) fn new(segment: &Arc<Segment>, side: Side, doorbell: &Arc<OwnedFd>) -> Ends {
        Ends {
            segment: Arc::clone(segment),
            side,
            doorbell: Arc::downgrade(doorbell),
            tx: TxSide::new(|| segment.ring(side)),
            rx: RxSide::new(|| segment.ring(side.other())),
        }
    }

    #[inline]
    pub(crate) fn send(&self, meta: Meta, bytes: &[u8]) -> Result<(), Corrupt> {
        let mut tx = self.tx.lock();
        if tx.waiting.is_empty() {
            match tx.producer.push(meta, bytes) {
                Ok(wake) => {
                    drop(tx);
                    self.ring(wake);
                    return Ok(());
                }
                Err(PushError::Corrupt(corrupt)) => return Err(corrupt),
                Err(PushError::Full) => {}
            }
        }
        if tx.waiting_bytes + WAITING_ENTRY_BYTES + bytes.len() <= WAITING_BYTES_MAX {
            tx.waiting_bytes += WAITING_ENTRY_BYTES + bytes.len();
            tx.waiting.push_back((meta, bytes.into()));
        }
        Ok(())
    }

    pub(crate) fn send_waiting(&self) -> Result<(), Corrupt> {
        loop {
            let Some(wake) = self.tx.lock().send_first()? else {
                return Ok(());
            };
            self.ring(wake);
        }
    }

    /// Puts a request into the ring whose first bytes describe `parts` parts, unless trains wait for room.
    #[inline]
    pub(crate) fn request_with_parts(
        &self,
        ticket: Ticket,
        bytes: usize,
        parts: usize,
        fill: impl FnOnce(&Area, u32) -> bool,
    ) -> Result<Put, Corrupt> {
        let mut tx = self.tx.lock();
        if !tx.waiting.is_empty() {
            return Ok(Put::Not);
        }
        let wake = match tx.producer.request_with_parts(ticket, bytes, parts, fill) {
            Ok(Some(wake)) => wake,
            Ok(None) | Err(PushError::Full) => return Ok(Put::Not),
            Err(PushError::Corrupt(corrupt)) => return Err(corrupt),
        };
        let mut put = Ok(Put::Done);
        if tx.is_to_announce() {
            put = tx.announce().map(|_| Put::Done);
            if put.is_ok() && tx.is_to_announce() && tx.producer.has_ended() {
                put = Ok(Put::DoneAndEnded);
            }
        }
        drop(tx);
        // The record is there, so a sleeper is woken whatever the announcement has found.
        self.ring(wake);
        put
    }

    #[inline]
    pub(crate) fn look_for_ends(&self) -> Result<(), Corrupt> {
        let mut tx = self.tx.lock();
        tx.producer.look_for_ends()?;
        tx.looked = tx.producer.seen();
        Ok(())
    }

    /// Returns the oldest request that the peer had taken when the engine looked. Other threads look too: the engine has not received the
    /// responses before the ends that they have found.
    #[inline]
    pub(crate) fn ended(&self) -> Option<(Ticket, Taken)> {
        let mut tx = self.tx.lock();
        let looked = tx.looked;
        let ended = tx.producer.ended_before(looked);
        if ended.is_none() {
            tx.announce_left();
        }
        ended
    }

    #[inline]
    pub(crate) fn receive(&self) -> Result<Option<Record>, Corrupt> {
        let mut rx = self.rx.lock();
        let record = rx.consumer.pop()?;
        rx.held |= record.is_some();
        Ok(record)
    }

    #[inline]
    pub(crate) fn read(&self, record: &Record, out: &mut Vec<u8>) {
        out.clear();
        self.rx.area.read(record.slot, record.bytes, out);
    }

    /// Returns the bytes of a record that was received.
    #[inline]
    pub(crate) fn bytes(&self, record: &Record) -> RecordBytes<'_> {
        RecordBytes::new(&self.rx.area, record.slot)
    }

    #[inline]
    pub(crate) fn answer(&self, record: &Record, taken: Taken) {
        if taken != Taken::Done {
            self.rx.lock().consumer.answer(record, taken);
        }
    }

    /// Releases all records that were taken, also those of other threads.
    #[inline]
    pub(crate) fn release_all(&self) {
        let mut rx = self.rx.lock();
        (rx.held, rx.unreleased) = (false, false);
        let wake = rx.consumer.release();
        drop(rx);
        self.rouse_if(wake);
    }

    #[inline]
    pub(crate) fn progress(&self) -> LinkProgress {
        if self.is_unreleased() {
            let wake = self.rx.lock().settle();
            self.rouse_if(wake);
        }
        let is_ready = self.is_ready();
        let tx = self.tx.lock();
        let (taken, all) = tx.producer.taken();
        LinkProgress {
            taken,
            all: all && tx.waiting.is_empty() && !is_ready && !tx.producer.has_requests(),
        }
    }

    #[inline]
    pub(crate) fn prepare_sleep(&self) -> Result<bool, Corrupt> {
        let has_ended = loop {
            let mut tx = self.tx.lock();
            tx.sleeps = true;
            let announced = tx.announce()?;
            let has_ended = tx.producer.has_ended();
            if announced || has_ended || tx.waiting.is_empty() {
                break has_ended;
            }
            drop(tx);
            self.send_waiting()?;
        };
        let mut rx = self.rx.lock();
        let wake = rx.settle();
        let sleeps = rx.consumer.prepare_sleep();
        drop(rx);
        self.rouse_if(wake);
        Ok(!has_ended && sleeps)
    }

    /// Ends a sleep. Returns whether the peer had rung.
    #[inline]
    pub(crate) fn awake(&self) -> bool {
        let mut tx = self.tx.lock();
        tx.sleeps = false;
        let waited = tx.waits;
        // The thread that is awake looks at the ring next.
        let _ = tx.announce();
        drop(tx);
        self.rx.lock().consumer.awake() || waited
    }

    /// Returns whether the napper may nap.
    #[inline]
    pub(crate) fn prepare_nap(&self) -> bool {
        let mut tx = self.tx.lock();
        tx.naps = true;
        let calm = tx.announce().unwrap_or(false);
        drop(tx);
        let mut rx = self.rx.lock();
        let wake = rx.settle();
        let naps = rx.consumer.prepare_nap();
        drop(rx);
        self.rouse_if(wake);
        calm && naps
    }

    pub(crate) fn announce_nap(&self) -> bool {
        let mut tx = self.tx.lock();
        !tx.naps || tx.announce().unwrap_or(true)
    }

    #[inline]
    pub(crate) fn end_nap(&self) {
        let mut tx = self.tx.lock();
        tx.naps = false;
        let _ = tx.announce();
        drop(tx);
        self.rx.lock().consumer.end_nap();
    }

    /// Returns the bytes of each train that waits for room.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> Vec<usize> {
        self.tx
            .lock()
            .waiting
            .iter()
            .map(|(_, bytes)| bytes.len())
            .collect()
    }

    /// Wakes the peer after something was put into the ring.
    #[inline]
    fn ring(&self, wake: Wake) {
        if wake != Wake::Nobody {
            self.ring_for_all(wake);
        }
    }

    /// Wakes the peer, which needs no other ring for the ends of its requests then. If another thread has the consumer's side, that one
    /// rings too, which does no harm.
    #[cold]
    fn ring_for_all(&self, wake: Wake) {
        if let Some(mut rx) = self.rx.try_lock() {
            rx.consumer.is_told();
        }
        self.rouse(wake);
    }

    #[inline]
    fn rouse_if(&self, wake: Wake) {
        if wake != Wake::Nobody {
            self.rouse(wake);
        }
    }

    /// Wakes the peer. The caller has neither lock.
    #[cold]
    fn rouse(&self, wake: Wake) {
        if matches!(wake, Wake::Napper | Wake::Both) {
            nap::end(self.segment.napping(self.side));
        }
        if matches!(wake, Wake::Peer | Wake::Both)
            && let Some(doorbell) = self.doorbell.upgrade()
        {
            // If the socket is full, earlier rings in it are not taken yet.
            let _ = rustix::net::send(&doorbell, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}
