//! Two hosts that are processes of one machine: their packets go through memory, in order and without loss, and each grants the
//! other memory of its own, for as long as it likes. The link between them may break and come back at any moment; meanwhile
//! packets take the network. Each host learns of such a change in its own time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{
    Grant, Grantable, LKey, Lending, Memory, Part, PeerFault, PeerMemory, QpState, Qpn, RKey, Rnic, Time,
};

use crate::dice::Dice;

/// Bytes copied between two checks of a grant.
const PIECE_BYTES: u64 = 4096;
/// Maximum number of keys that a QP may have asked for and be granted at one time; a further key replaces the first.
const KEYS_MAX: usize = 64;
/// Maximum time that a message takes: a request for a link or for memory.
const MESSAGE_NS_MAX: u64 = 20_000;
/// Maximum time until the other end of a link learns that it broke.
const NOTICED_NS_MAX: u64 = 50_000;
/// Maximum time for which a link stays broken.
const BROKEN_NS_MAX: u64 = 3_000_000;
/// Maximum time that a packet takes.
const PACKET_NS_MAX: u64 = 5_000;

/// Memory of a peer, for as long as the peer grants it.
#[derive(Debug)]
pub(crate) struct Granted {
    memory: Arc<dyn Memory>,
    open: AtomicBool,
    /// Bytes after which the grant is revoked, even in the middle of a copy.
    bytes_left: AtomicU64,
    /// Set when a request has learned that the grant ended: the QP may ask for it again.
    told: AtomicBool,
    /// Requests that learned that after some of their bytes were copied.
    half_way: Arc<AtomicU64>,
}

impl Granted {
    fn take_back(&self) {
        self.open.store(false, Ordering::Relaxed);
    }

    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    fn ended(&self, done: u64) -> PeerFault {
        self.told.store(true, Ordering::Relaxed);
        self.half_way.fetch_add(u64::from(done > 0), Ordering::Relaxed);
        PeerFault::Ended
    }

    /// Copies piece by piece, until all is copied or the grant ends. A failure of the owner's memory ends it too.
    fn copy(
        &self,
        length: u64,
        mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), Option<PeerFault>>,
    ) -> Result<(), PeerFault> {
        let mut buffer = vec![0; length.min(PIECE_BYTES) as usize];
        let mut done = 0;
        while done < length {
            if !self.is_open() {
                return Err(self.ended(done));
            }
            let left = self.bytes_left.load(Ordering::Relaxed);
            let n = (length - done).min(PIECE_BYTES).min(left);
            copy(done, &mut buffer[..n as usize]).map_err(|own| own.unwrap_or_else(|| self.ended(done)))?;
            self.bytes_left.store(left - n, Ordering::Relaxed);
            if left == n {
                self.take_back();
            }
            done += n;
        }
        Ok(())
    }
}

impl PeerMemory for Granted {
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.copy(length, |done, buffer| {
            let read = from.read(from_offset + done, buffer);
            read.map_err(|fault| Some(PeerFault::Own(fault)))?;
            self.memory.write(offset + done, buffer).map_err(|_| None)
        })
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        self.copy(bytes.len() as u64, |done, buffer| {
            let piece = &bytes[done as usize..][..buffer.len()];
            self.memory.write(offset + done, piece).map_err(|_| None)
        })
    }

    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.copy(length, |done, buffer| {
            self.memory.read(offset + done, buffer).map_err(|_| None)?;
            let written = to.write(to_offset + done, buffer);
            written.map_err(|fault| Some(PeerFault::Own(fault)))
        })
    }
}

/// A grant as its owner knows it.
#[derive(Debug)]
struct Given {
    /// QP whose peer it was given to.
    of: Qpn,
    /// The region.
    lkey: LKey,
    /// QP of the peer that asked for it; `rkey` is the key that it asked by.
    by: Qpn,
    rkey: RKey,
    memory: Arc<Granted>,
}

/// A region that requests of a QP may name.
#[derive(Clone, Debug)]
struct Lent {
    of: Qpn,
    lkey: LKey,
    memory: Arc<dyn Memory>,
    /// Where the region begins in the memory, and its bytes.
    begin: u64,
    length: u64,
    open: Arc<AtomicBool>,
}

/// Regions that requests of a host may name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lends(Arc<Mutex<Vec<Lent>>>);

impl Lends {
    fn take_back(&self, is_it: impl Fn(Qpn, LKey) -> bool) {
        self.0.lock().retain(|lent| {
            let ends = is_it(lent.of, lent.lkey);
            if ends {
                lent.open.store(false, Ordering::Relaxed);
            }
            !ends
        });
    }

    /// Returns parts of regions as the peer reads them; or the first region that is not lent.
    pub(crate) fn name(&self, of: Qpn, parts: &[Part]) -> Result<Vec<Named>, LKey> {
        let list = self.0.lock();
        let named = parts.iter().map(|part| {
            let lent = list.iter().find(|lent| (lent.of, lent.lkey) == (of, part.lkey));
            let lent = lent.ok_or(part.lkey)?;
            assert!(part.offset + u64::from(part.len) <= lent.length);
            Ok(Named {
                memory: Arc::clone(&lent.memory),
                at: lent.begin + part.offset,
                len: part.len as usize,
                open: Arc::clone(&lent.open),
            })
        });
        named.collect()
    }
}

/// A part of memory that a request names.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    memory: Arc<dyn Memory>,
    at: u64,
    pub(crate) len: usize,
    open: Arc<AtomicBool>,
}

impl Named {
    /// Reads bytes, if the peer may do so now.
    pub(crate) fn read(&self, from: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        // A peer may read what is lent no more, and discards it; here that would count as an access to what has ended.
        if !self.open.load(Ordering::Relaxed) {
            return Err(PeerFault::Ended);
        }
        self.memory
            .read(self.at + from as u64, out)
            .map_err(|_| PeerFault::Ended)
    }
}

#[derive(Debug)]
struct LentFor(Qpn, Lends);

impl Lending for LentFor {
    fn end(&self) {
        self.1.take_back(|of, _| of == self.0);
    }
}

/// Message between the hosts, besides packets.
#[derive(Clone, Debug)]
pub(crate) enum GrantMessage {
    /// `by` asks to reach what `rkey` names at its peer `of`.
    Ask { of: Qpn, by: Qpn, rkey: RKey },
    /// The answer.
    Answer {
        by: Qpn,
        rkey: RKey,
        grant: Option<Grant>,
    },
}

/// A change of the link, to be scheduled.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// The link breaks, and a host learns of it.
    Breaks(usize),
    /// A host learns that this link broke.
    Noticed(usize, u32),
    /// There is a link again, and a host learns of it.
    Begins(usize),
    /// The other host learns of this link.
    Welcome(usize, u32),
    /// A host revokes a grant.
    TakesBack(usize),
}

/// One end of the link.
#[derive(Debug, Default)]
struct LinkEnd {
    /// True while its packets go through memory.
    up: bool,
    /// Arrival time of the youngest packet sent to it.
    arrival_last: Time,
    /// Trains that it has taken.
    taken: u32,
    given: Vec<Given>,
    /// Keys that it asked for and does not know to have ended.
    asked: Vec<(Qpn, RKey)>,
    lends: Lends,
}

impl LinkEnd {
    fn take_back(&self, is_it: impl Fn(Qpn, LKey) -> bool) {
        for given in self.given.iter().filter(|given| is_it(given.of, given.lkey)) {
            given.memory.take_back();
        }
        self.lends.take_back(is_it);
    }
}

#[derive(Debug)]
pub(crate) struct Machine {
    ends: [LinkEnd; 2],
    /// Number of the link.
    link: u32,
    /// True while nobody reads what goes into the link.
    dead: bool,
    dice: Dice,
    pub(crate) breaks: u64,
    half_way: Arc<AtomicU64>,
}

impl Machine {
    /// Creates two hosts without a link. Returns the changes of the link to schedule, too.
    pub(crate) fn new(seed: u64, latency_ns: u64) -> (Machine, Vec<(u64, Change)>) {
        let mut dice = Dice::new(seed, 6);
        let span = 40 * latency_ns + 5_000_000;
        let begins = if dice.one_in(2) { 0 } else { dice.log_uniform(span) };
        let mut changes = vec![(begins, Change::Begins(dice.below(2) as usize))];
        for _ in 0..dice.below(4) {
            changes.push((dice.log_uniform(span), Change::Breaks(dice.below(2) as usize)));
        }
        for _ in 0..dice.below(8) {
            changes.push((dice.log_uniform(span), Change::TakesBack(dice.below(2) as usize)));
        }
        let machine = Machine {
            ends: Default::default(),
            link: 0,
            dead: true,
            dice,
            breaks: 0,
            half_way: Arc::default(),
        };
        (machine, changes)
    }

    /// Returns whether packets from a host go through memory.
    pub(crate) fn is_up(&self, host: usize) -> bool {
        self.ends[host].up
    }

    /// Returns the time at which a packet that is sent through memory now arrives; `None` if nobody reads it.
    pub(crate) fn arrival(&mut self, now: Time, to: usize) -> Option<Time> {
        let at = now + self.dice.between(50, PACKET_NS_MAX);
        let last = &mut self.ends[to].arrival_last;
        *last = at.max(*last);
        (!self.dead).then_some(*last)
    }

    /// Returns the number of requests for which a ring has room.
    pub(crate) fn room(&mut self) -> usize {
        if self.dice.one_in(4) {
            self.dice.below(4) as usize
        } else {
            usize::MAX
        }
    }

    /// Records that a host takes a train that was sent to it.
    pub(crate) fn takes(&mut self, host: usize) {
        self.ends[host].taken = self.ends[host].taken.wrapping_add(1);
    }

    /// Returns the number of trains that a host has taken.
    pub(crate) fn taken(&self, host: usize) -> u32 {
        self.ends[host].taken
    }

    pub(crate) fn message_ns(&mut self) -> u64 {
        self.dice.log_uniform(MESSAGE_NS_MAX)
    }

    /// Returns the number of the link, to which messages on it belong.
    pub(crate) fn link(&self) -> Option<u32> {
        (!self.dead).then_some(self.link)
    }

    /// Breaks the link, if there is one. Returns whether packets in flight are lost, and the changes to schedule: the other end
    /// learns of the break, and the next link begins.
    pub(crate) fn breaks(&mut self, host: usize) -> Option<(bool, [(u64, Change); 2])> {
        if self.dead {
            return None;
        }
        self.dead = true;
        self.breaks += 1;
        self.part(host);
        let noticed = self.dice.log_uniform(NOTICED_NS_MAX);
        let back = noticed + self.dice.log_uniform(BROKEN_NS_MAX);
        let changes = [
            (noticed, Change::Noticed(1 - host, self.link)),
            (back, Change::Begins(self.dice.below(2) as usize)),
        ];
        Some((self.dice.one_in(2), changes))
    }

    /// Detaches an end: it reaches nothing, and nobody reaches what it granted.
    pub(crate) fn part(&mut self, host: usize) {
        self.ends[host].up = false;
        self.ends[host].asked.clear();
        for end in &self.ends {
            end.take_back(|_, _| true);
        }
        self.ends[1 - host].given.clear();
    }

    /// Lets an end learn that its link broke. Returns whether it did.
    pub(crate) fn notices(&mut self, host: usize, link: u32) -> bool {
        let notices = self.dead && self.link == link && self.ends[host].up;
        if notices {
            self.part(host);
        }
        notices
    }

    /// Begins another link, unless there is one. Returns the time after which the other end learns of it.
    pub(crate) fn begins(&mut self, host: usize) -> Option<(u64, Change)> {
        if !self.dead || self.ends.iter().any(|end| end.up) {
            return None;
        }
        self.dead = false;
        self.link += 1;
        self.ends[host].up = true;
        let other = self.dice.log_uniform(NOTICED_NS_MAX);
        Some((other, Change::Welcome(1 - host, self.link)))
    }

    /// Joins an end to the link. Returns whether it joined.
    pub(crate) fn welcome(&mut self, host: usize, link: u32) -> bool {
        let joins = self.link() == Some(link);
        self.ends[host].up |= joins;
        joins
    }

    /// Decides whether a host hangs. A host that hangs revokes nothing any more, and reaches nothing.
    pub(crate) fn hangs(&mut self, host: usize) -> bool {
        let hangs = self.dice.one_in(2);
        if hangs {
            self.ends[1 - host].take_back(|_, _| true);
        }
        hangs
    }

    // Grants.

    /// Records that a QP asks for a grant. Returns an error if it has asked before.
    pub(crate) fn asks(&mut self, host: usize, by: Qpn, rkey: RKey) -> Result<(), String> {
        let given = &mut self.ends[1 - host].given;
        let before = given.len();
        given.retain(|given| {
            let told = given.memory.told.load(Ordering::Relaxed);
            !told || (given.by, given.rkey) != (by, rkey)
        });
        let ended = given.len() < before;
        let end = &mut self.ends[host];
        let before = end.asked.iter().position(|asked| *asked == (by, rkey));
        let of_qp = end.asked.iter().filter(|(qpn, _)| *qpn == by).count();
        if before.is_some() && !ended && of_qp < KEYS_MAX {
            return Err(format!("{by:?} of host {host} asks again for {rkey:?}"));
        }
        if before.is_none() {
            end.asked.push((by, rkey));
        }
        Ok(())
    }

    /// Decides whether an owner answers at all.
    pub(crate) fn answers(&mut self) -> bool {
        !self.dice.one_in(8)
    }

    /// Makes a grant of what a host may grant.
    pub(crate) fn give(&mut self, host: usize, of: Qpn, by: Qpn, rkey: RKey, what: Grantable) -> Grant {
        let bytes_left = match self.dice.below(4) {
            0 => self.dice.log_uniform(64 << 10),
            _ => u64::MAX,
        };
        let memory = Arc::new(Granted {
            memory: what.memory,
            open: AtomicBool::new(true),
            bytes_left: AtomicU64::new(bytes_left),
            told: AtomicBool::new(false),
            half_way: self.half_way.clone(),
        });
        self.ends[host].given.push(Given {
            of,
            lkey: what.lkey,
            by,
            rkey,
            memory: memory.clone(),
        });
        Grant {
            memory,
            memory_offset: what.memory_offset,
            iova: what.iova,
            length: what.length,
            access: what.access,
        }
    }

    /// Revokes what a host granted for a QP.
    pub(crate) fn revoke_qp(&mut self, host: usize, qpn: Qpn) {
        self.ends[host].take_back(|of, _| of == qpn);
    }

    /// Revokes what a host granted of a region.
    pub(crate) fn revoke_region(&mut self, host: usize, lkey: LKey) {
        self.ends[host].take_back(|_, of| of == lkey);
    }

    /// Revokes one of the grants of a host, at random.
    pub(crate) fn revoke_any(&mut self, host: usize) {
        let given = &self.ends[host].given;
        let n = self.dice.below(given.len() as u64) as usize;
        if let Some(given) = given.get(n) {
            given.memory.take_back();
        }
        let last = self.ends[host].lends.0.lock().last().map(|lent| lent.lkey);
        if let Some(last) = last {
            self.ends[host].lends.take_back(|_, lkey| lkey == last);
        }
    }

    // Regions that requests name.

    /// Returns what requests of a host may name, and the number of bytes from which on they do.
    pub(crate) fn lends(&mut self, host: usize) -> (Lends, usize) {
        let least = self.dice.log_uniform(64 << 10) as usize;
        (self.ends[host].lends.clone(), least)
    }

    /// Now and then ends what requests of a host may name, just when the peer is about to read it.
    pub(crate) fn ends_loans(&mut self, host: usize) {
        if self.dice.one_in(8) {
            self.ends[host].lends.take_back(|_, _| true);
        }
    }

    /// Lets requests of a QP name a region, or not.
    pub(crate) fn lend(&mut self, host: usize, rnic: &mut Rnic, of: Qpn, lkey: LKey) {
        let lends = &self.ends[host].lends;
        let lending = Arc::new(LentFor(of, lends.clone()));
        if self.dice.one_in(4) {
            return;
        }
        if let Ok(what) = rnic.lendable(of, lkey, lending) {
            lends.0.lock().push(Lent {
                of,
                lkey,
                memory: what.memory,
                begin: what.memory_offset,
                length: what.length,
                open: Arc::new(AtomicBool::new(true)),
            });
        }
    }

    /// Returns a QP of a host that takes no requests, but whose peer still reaches its memory.
    pub(crate) fn outlived(&self, host: usize, rnic: &Rnic) -> Option<Qpn> {
        let takes = |qpn| {
            let info = rnic.query_qp(qpn);
            info.is_some_and(|info| matches!(info.state, QpState::Rtr | QpState::Rts | QpState::Sqd))
        };
        let open = self.ends[host]
            .given
            .iter()
            .filter(|given| given.memory.is_open());
        let lends = self.ends[host].lends.0.lock();
        let lent = lends.iter().map(|lent| lent.of);
        open.map(|given| given.of).chain(lent).find(|of| !takes(*of))
    }

    /// Returns the number of copies that ended half-way.
    pub(crate) fn half_way(&self) -> u64 {
        self.half_way.load(Ordering::Relaxed)
    }
}
