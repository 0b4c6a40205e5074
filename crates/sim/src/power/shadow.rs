//! Memory with the path of a byte to the media: buffers, caches, queues, and what a power cut leaves of each.
//!
//! ```text
//! WRITE -> (RNIC, when it acknowledges early) -> I/O buffers, in order per QP -+-> last level cache -> write pending -> media
//!                                                                             +-> write pending queue, DDIO off    ----^
//! ```
//!
//! A line is 64 bytes; it is torn into units of 8. The versions of a line reach the media in the order in which they reached
//! the cache; of two lines either may be first.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_rnic::{Atomic, Fault, Memory, Placement};

use super::choice::{Chance, Choose, Walk};
use super::platform::{Defect, Domain, Inbound, Platform};
use crate::dice::Dice;

/// Bytes of a cache line.
pub const LINE: usize = 64;
/// Bytes that are placed whole or not at all when a line is torn.
pub const UNIT: usize = 8;

/// Place of a version of a line, in the order of the way to the media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// In the last level cache, or the page cache of a file.
    Cache,
    /// There too, with a write-back requested: that may be in progress, and is done when a fence is.
    WritingBack,
    /// In the memory controller's write pending queue.
    Pending,
}

impl Place {
    /// Returns the place of bytes that leave the I/O buffers.
    fn first(platform: Platform) -> Place {
        match platform.inbound {
            Inbound::Cache => Place::Cache,
            Inbound::Queue => Place::Pending,
            Inbound::Stores => Place::WritingBack,
        }
    }
}

/// Some bytes of a line.
#[derive(Clone, Copy, Debug)]
struct Piece {
    line: usize,
    /// Mask of the bytes.
    mask: u64,
    bytes: [u8; LINE],
}

impl Piece {
    fn apply(&self, mask: u64, to: &mut [u8]) {
        let at = self.line * LINE;
        for i in 0..LINE {
            if mask >> i & 1 != 0 {
                to[at + i] = self.bytes[i];
            }
        }
    }

    /// Returns the masks of the units that it has bytes of.
    fn units(&self) -> impl Iterator<Item = u64> + use<> {
        let mask = self.mask;
        let unit = move |n: usize| mask & 0xff << (n * UNIT);
        (0..LINE / UNIT).map(unit).filter(|unit| *unit != 0)
    }

    /// Returns the bytes that are there after it was torn: any of its units, but not all.
    fn torn(&self, by: &mut dyn Choose) -> u64 {
        if !by.tears() {
            return 0;
        }
        let units: Vec<u64> = self.units().collect();
        let chosen = by.choose((1 << units.len()) - 1);
        let kept = units
            .iter()
            .enumerate()
            .filter(|(n, _)| chosen >> n & 1 != 0)
            .map(|(_, unit)| unit);
        kept.fold(0, |all, unit| all | unit)
    }
}

/// Entry that waits in a lane.
#[derive(Clone, Copy, Debug)]
enum LaneEntry {
    Line(Piece),
    /// A message in this slot, which goes to ordinary memory.
    Message(u64),
}

/// The buffers of one QP.
#[derive(Clone, Debug, Default)]
struct Buffers {
    entries: VecDeque<LaneEntry>,
    /// Number of entries that have left the RNIC. On a platform that acknowledges late all have.
    out_of_rnic: usize,
    /// Set when no entry may come any more.
    shut: bool,
}

/// Counts of a shadow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Bytes placed by peers, in calls of the engine.
    pub placed_bytes: u64,
    /// Lines that left a buffer because the scheduler decided so.
    pub drained: u64,
    /// Lines that the cache evicted.
    pub evicted: u64,
    /// Persistent flushes.
    pub flushes: u64,
    /// Accesses through a mapping that had ended.
    pub trespasses: u64,
    /// Lines that a power cut tore.
    pub torn: u64,
}

#[derive(Clone, Debug)]
struct ShadowState {
    platform: Platform,
    defect: Option<Defect>,
    /// Set when a persistent flush completes within the engine's call.
    flushes_at_once: bool,
    gathers: bool,
    media: Vec<u8>,
    /// Bytes that a processor sees: all that left the I/O buffers.
    visible: Vec<u8>,
    /// By line: versions that are not on the media, oldest first.
    lines: BTreeMap<usize, Vec<(Piece, Place)>>,
    lanes: Vec<Buffers>,
    /// Set while a fence is pending that comes too late.
    fence_owed: bool,
    passed: Passed,
}

/// A server's memory, with caches and buffers in front of it.
#[derive(Debug)]
pub struct Shadow {
    state: Mutex<ShadowState>,
    len: u64,
}

impl Shadow {
    /// Creates memory that holds these bytes. `flushes_at_once`: the engine is not told to wait for persistent flushes, as with
    /// mapped persistent memory; otherwise they run beside it, as with files. `gathers`: see [`Memory::gathers`].
    pub(super) fn new(
        platform: Platform,
        defect: Option<Defect>,
        bytes: Vec<u8>,
        (flushes_at_once, gathers): (bool, bool),
    ) -> Shadow {
        let len = bytes.len().next_multiple_of(LINE);
        let mut media = bytes;
        media.resize(len, 0);
        Shadow {
            len: len as u64,
            state: Mutex::new(ShadowState {
                platform,
                defect,
                flushes_at_once,
                gathers,
                visible: media.clone(),
                media,
                lines: BTreeMap::new(),
                lanes: Vec::new(),
                fence_owed: false,
                passed: Passed::default(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ShadowState> {
        self.state.lock()
    }

    fn range(&self, offset: u64, len: u64) -> Result<Range<usize>, Fault> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        Ok(offset as usize..end.ok_or(Fault::Unmapped)? as usize)
    }

    /// Returns the counts of the shadow.
    pub fn passed(&self) -> Passed {
        self.lock().passed
    }

    /// Returns the bytes that the server's programs see.
    pub fn visible(&self) -> Vec<u8> {
        self.lock().visible.clone()
    }

    /// Returns the path of one QP to this memory.
    pub(super) fn lane(self: &Arc<Shadow>) -> Lane {
        let mut state = self.lock();
        state.lanes.push(Buffers::default());
        Lane {
            shadow: self.clone(),
            number: state.lanes.len() - 1,
        }
    }

    /// Drains all buffers.
    pub(super) fn drain(&self) {
        let mut state = self.lock();
        for lane in 0..state.lanes.len() {
            state.drain(lane);
        }
    }

    /// Lets something happen by itself: a buffer drains, the cache evicts a line, a queue empties.
    pub(super) fn stir(&self, dice: &mut Dice) {
        self.lock().stir(dice);
    }

    /// Replaces the memory by what a power cut now leaves: one of all possibilities, by chance.
    pub(super) fn cut(&self, dice: &mut Dice) {
        let mut state = self.lock();
        let left = state.left(&mut Chance::new(dice));
        state.restart(left);
    }

    /// Replaces the memory by what a kill of the server's process leaves: whatever the host accepted is there.
    pub(super) fn kill(&self) {
        let mut state = self.lock();
        for lane in 0..state.lanes.len() {
            state.drain(lane);
        }
        let left = match state.platform.domain {
            Domain::None => vec![0; state.media.len()],
            _ => state.visible.clone(),
        };
        state.restart(left);
    }

    /// Returns every memory that a power cut now may leave, or `None` when there are more than `max`. Lines are torn only if
    /// the caller asks for that.
    pub fn all_left(&self, tears: bool, max: usize) -> Option<Vec<Vec<u8>>> {
        let mut walk = Walk::new(tears);
        let mut all = Vec::new();
        let state = self.lock();
        loop {
            if all.len() == max {
                return None;
            }
            all.push(state.clone().left(&mut walk));
            if !walk.advance() {
                return Some(all);
            }
        }
    }
}

impl ShadowState {
    fn push(&mut self, lane: usize, entry: LaneEntry) {
        let buffers = &mut self.lanes[lane];
        buffers.entries.push_back(entry);
        if !self.platform.acks_early {
            buffers.out_of_rnic += 1;
        }
        if !self.platform.buffers() {
            self.drain(lane);
        }
    }

    fn place(&mut self, lane: usize, at: usize, bytes: &[u8]) {
        self.passed.placed_bytes += bytes.len() as u64;
        let mut done = 0;
        while done < bytes.len() {
            let (line, from) = ((at + done) / LINE, (at + done) % LINE);
            let n = (LINE - from).min(bytes.len() - done);
            let mut piece = Piece {
                line,
                mask: (u64::MAX >> (LINE - n)) << from,
                bytes: [0; LINE],
            };
            piece.bytes[from..from + n].copy_from_slice(&bytes[done..done + n]);
            self.push(lane, LaneEntry::Line(piece));
            done += n;
        }
    }

    /// Moves the oldest entry of a lane on.
    fn drain_one(&mut self, lane: usize) -> Option<LaneEntry> {
        let buffers = &mut self.lanes[lane];
        let entry = buffers.entries.pop_front()?;
        buffers.out_of_rnic = buffers.out_of_rnic.saturating_sub(1);
        if let LaneEntry::Line(piece) = &entry {
            piece.apply(piece.mask, &mut self.visible);
            let place = Place::first(self.platform);
            self.lines.entry(piece.line).or_default().push((*piece, place));
        }
        Some(entry)
    }

    fn drain(&mut self, lane: usize) {
        while self.drain_one(lane).is_some() {}
    }

    /// Does what READs, atomic operations and FLUSHes do first: everything that their QP wrote becomes visible, and moves as
    /// far as it gets by itself.
    fn order(&mut self, lane: usize) {
        self.drain(lane);
        if self.platform.inbound == Inbound::Stores {
            self.fence();
        }
    }

    /// Moves on what was written before a message when the processor is notified of the message.
    fn completed(&mut self, lane: usize, slot: u64) {
        let waits = |entry: &LaneEntry| matches!(entry, LaneEntry::Message(of) if *of == slot);
        if self.lanes[lane].entries.iter().any(waits) {
            while self.drain_one(lane).is_some_and(|entry| !waits(&entry)) {}
        }
    }

    fn write_back(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let lines = range.start / LINE..range.end.div_ceil(LINE);
        for (_, place) in self.lines.range_mut(lines).flat_map(|(_, versions)| versions) {
            *place = (*place).max(Place::WritingBack);
        }
    }

    fn fence(&mut self) {
        self.fence_owed = false;
        for (_, place) in self.lines.values_mut().flatten() {
            if *place == Place::WritingBack {
                *place = Place::Pending;
            }
        }
    }

    fn flush(&mut self, lane: usize, range: Range<usize>, placement: Placement) -> Result<(), Fault> {
        if !placement.contains(Placement::PERSISTENT) {
            self.order(lane);
            return Ok(());
        }
        if self.platform.domain == Domain::None {
            return Err(Fault::NotSupported);
        }
        self.passed.flushes += 1;
        if self.defect == Some(Defect::WriteBackBeforeDrain) {
            self.write_back(range.clone());
        }
        self.drain(lane);
        self.flush_cache(range);
        Ok(())
    }

    /// Does the second half of a persistent flush: writes back and fences.
    fn flush_cache(&mut self, range: Range<usize>) {
        match self.defect {
            Some(Defect::WriteBackDropped | Defect::WriteBackBeforeDrain) => self.fence(),
            Some(Defect::AckBeforeFence) => {
                self.write_back(range);
                self.fence_owed = true;
            }
            Some(Defect::LineShort) if !range.is_empty() => {
                let last = (range.end - 1) / LINE * LINE;
                self.write_back(range.start..last.max(range.start));
                self.fence();
            }
            _ => {
                self.write_back(range);
                self.fence();
            }
        }
    }

    fn stir(&mut self, dice: &mut Dice) {
        match dice.below(8) {
            0..4 => {
                let waiting: Vec<usize> = (0..self.lanes.len())
                    .filter(|lane| !self.lanes[*lane].entries.is_empty())
                    .collect();
                if waiting.is_empty() {
                    return;
                }
                let lane = dice.pick(&waiting);
                let buffers = &mut self.lanes[lane];
                if buffers.out_of_rnic < buffers.entries.len() && dice.one_in(2) {
                    buffers.out_of_rnic += 1;
                    return;
                }
                for _ in 0..dice.log_uniform(16) {
                    self.passed.drained += u64::from(self.drain_one(lane).is_some());
                }
            }
            4..6 => {
                // The whole line goes, with all its versions.
                if let Some(line) = self.any_line(dice) {
                    self.passed.evicted += 1;
                    for (piece, _) in self.lines.remove(&line).unwrap_or_default() {
                        piece.apply(piece.mask, &mut self.media);
                    }
                }
            }
            6 => {
                if let Some(line) = self.any_line(dice) {
                    let versions = self.lines.get_mut(&line).expect("it was just seen");
                    let pending = versions.iter().take_while(|(_, place)| *place == Place::Pending);
                    let n = pending.count();
                    for (piece, _) in versions.drain(..n) {
                        piece.apply(piece.mask, &mut self.media);
                    }
                    if versions.is_empty() {
                        self.lines.remove(&line);
                    }
                }
            }
            _ if self.fence_owed => self.fence(),
            _ => {}
        }
    }

    fn any_line(&self, dice: &mut Dice) -> Option<usize> {
        let n = dice.below(self.lines.len() as u64) as usize;
        self.lines.keys().nth(n).copied()
    }

    /// Returns what a power cut leaves.
    fn left(&mut self, by: &mut dyn Choose) -> Vec<u8> {
        let domain = self.platform.domain;
        if domain == Domain::None {
            return vec![0; self.media.len()];
        }
        // Some entries leave the buffers at the last moment.
        for lane in 0..self.lanes.len() {
            let held = self.lanes[lane].out_of_rnic as u64;
            let drains = match domain {
                Domain::WholeSystem => held,
                _ => by.choose(held + 1),
            };
            for _ in 0..drains {
                self.drain_one(lane);
            }
            let next = self.lanes[lane].entries.front().copied();
            if let Some(LaneEntry::Line(piece)) = next
                && self.lanes[lane].out_of_rnic > 0
            {
                let mask = piece.torn(by);
                if mask != 0 {
                    let place = Place::first(self.platform);
                    let torn = Piece { mask, ..piece };
                    self.lines.entry(piece.line).or_default().push((torn, place));
                }
            }
        }
        let safe_from = match domain {
            Domain::None | Domain::File | Domain::Adr => Place::Pending,
            Domain::Eadr | Domain::WholeSystem => Place::Cache,
        };
        let mut left = self.media.clone();
        for versions in self.lines.values() {
            let safe = versions.iter().take_while(|(_, place)| *place >= safe_from);
            let safe = safe.count();
            let more = by.choose((versions.len() - safe + 1) as u64) as usize;
            for (piece, _) in &versions[..safe + more] {
                piece.apply(piece.mask, &mut left);
            }
            if let Some((piece, _)) = versions.get(safe + more) {
                let mask = piece.torn(by);
                self.passed.torn += u64::from(mask != 0);
                piece.apply(mask, &mut left);
            }
        }
        left
    }

    fn restart(&mut self, left: Vec<u8>) {
        self.visible.clone_from(&left);
        self.media = left;
        self.lines.clear();
        self.fence_owed = false;
        for lane in &mut self.lanes {
            *lane = Buffers {
                shut: true,
                ..Buffers::default()
            };
        }
    }
}

/// Path of one QP to a [`Shadow`], over which a region of that QP is registered.
#[derive(Clone, Debug)]
pub struct Lane {
    shadow: Arc<Shadow>,
    number: usize,
}

impl Lane {
    /// Returns memory for the messages of this QP, `slots` of `slot_bytes`: bytes written before a message arrive before it.
    pub(super) fn mailbox(&self, slots: u64, slot_bytes: u64) -> Mailbox {
        Mailbox {
            lane: self.clone(),
            slot_bytes,
            bytes: Mutex::new(vec![0; (slots * slot_bytes) as usize]),
        }
    }

    /// Records that the server's processor was notified of a message in this slot.
    pub(super) fn completed(&self, slot: u64) {
        let mut state = self.shadow.lock();
        if state.defect != Some(Defect::MessageTooEarly) {
            state.completed(self.number, slot);
        }
    }

    /// Makes a range durable by the server's processor, on behalf of a message.
    pub(super) fn flush_by_processor(&self, range: Range<u64>) {
        let mut state = self.shadow.lock();
        state.passed.flushes += 1;
        state.flush_cache(range.start as usize..range.end as usize);
    }

    /// Ends the mapping: what was accepted moves on, and nothing comes after it.
    pub(super) fn shut(&self) {
        let mut state = self.shadow.lock();
        if state.defect != Some(Defect::RevokedUndrained) {
            state.drain(self.number);
        }
        state.lanes[self.number].shut = true;
    }

    /// Returns whether bytes are on their way to the caches.
    pub(super) fn waits(&self) -> bool {
        !self.shadow.lock().lanes[self.number].entries.is_empty()
    }

    fn enter(&self) -> Result<MutexGuard<'_, ShadowState>, Fault> {
        let mut state = self.shadow.lock();
        if state.lanes[self.number].shut {
            state.passed.trespasses += 1;
            return Err(Fault::Unmapped);
        }
        Ok(state)
    }
}

impl Memory for Lane {
    fn len(&self) -> u64 {
        self.shadow.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = self.shadow.range(offset, out.len() as u64)?;
        let mut state = self.enter()?;
        // A READ pushes the posted writes of its QP ahead of itself. PCI Express, transaction ordering.
        if state.defect != Some(Defect::ReadUnfenced) {
            state.order(self.number);
        }
        out.copy_from_slice(&state.visible[range]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let range = self.shadow.range(offset, bytes.len() as u64)?;
        self.enter()?.place(self.number, range.start, bytes);
        Ok(())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        let range = self.shadow.range(offset, UNIT as u64)?;
        let mut state = self.enter()?;
        state.order(self.number);
        let mut before = [0; UNIT];
        before.copy_from_slice(&state.visible[range.clone()]);
        state.place(self.number, range.start, &atomic.apply(before));
        Ok(u64::from_ne_bytes(before))
    }

    fn placement(&self) -> Placement {
        match self.shadow.lock().platform.domain {
            Domain::None => Placement::GLOBAL,
            _ => Placement::GLOBAL | Placement::PERSISTENT,
        }
    }

    fn gathers(&self) -> bool {
        self.shadow.lock().gathers
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT) || self.shadow.lock().flushes_at_once
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        let range = self.shadow.range(offset, length)?;
        // A flush that was begun before its mapping ended does no harm.
        self.shadow.lock().flush(self.number, range, placement)
    }
}

/// Ordinary memory for the messages of a QP, behind what the QP wrote before.
#[derive(Debug)]
pub(super) struct Mailbox {
    lane: Lane,
    slot_bytes: u64,
    bytes: Mutex<Vec<u8>>,
}

impl Mailbox {
    /// Returns the bytes of a slot.
    pub(super) fn take(&self, slot: u64) -> Vec<u8> {
        let bytes = self.bytes.lock();
        let at = (slot * self.slot_bytes) as usize;
        bytes[at..at + self.slot_bytes as usize].to_vec()
    }
}

impl Memory for Mailbox {
    fn len(&self) -> u64 {
        self.bytes.lock().len() as u64
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Err(Fault::NotSupported)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut all = self.bytes.lock();
        let end = offset.saturating_add(bytes.len() as u64);
        if end > all.len() as u64 {
            return Err(Fault::Unmapped);
        }
        all[offset as usize..end as usize].copy_from_slice(bytes);
        let slot = offset / self.slot_bytes;
        self.lane
            .shadow
            .lock()
            .push(self.lane.number, LaneEntry::Message(slot));
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Err(Fault::NotSupported)
    }
}
