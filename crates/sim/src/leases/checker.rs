//! The region's bytes and their checker, which verifies the mapping or operation that each byte came from and whether that
//! still may write.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use rdmux_push::server::{ClientId, MappingId, OperationId};
use rdmux_push::{Access, Mapped};
use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_rnic::{Atomic, Fault, Memory, Placement};

use crate::dice::Dice;

/// Bytes of a unit. Every write consists of whole units, each of which holds the number of its push.
pub(super) const UNIT: u64 = 8;

/// Permanent identity of a mapping: the server's own numbers start again when it restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Uid(usize);

/// Current writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Nobody,
    Mapping(Uid),
    /// The server's processor, on behalf of this client.
    Operation(ClientId),
}

/// A right to a range.
#[derive(Clone, Debug)]
pub(super) struct Right {
    /// Number of the client; `None` for the server itself.
    pub(super) client: Option<ClientId>,
    pub(super) range: Range<u64>,
    pub(super) access: Access,
    pub(super) share: Access,
}

impl Right {
    /// Returns whether the two rights cannot be held at the same time.
    fn excludes(&self, other: &Right) -> bool {
        let apart = self.range.end <= other.range.start || other.range.end <= self.range.start;
        let one = self.client.is_some() && self.client == other.client;
        let both = self.share.contains(other.access) && other.share.contains(self.access);
        !(apart || one || both)
    }
}

/// WRITEs that a device has accepted and that have not reached memory yet, in order.
#[derive(Debug, Default)]
struct Lane(VecDeque<(u64, Vec<u8>)>);

#[derive(Debug)]
struct Mapping {
    right: Right,
    memory: Arc<Mapped>,
    lane: Lane,
    /// Reason why it is past its revocation point.
    over: Option<String>,
}

#[derive(Debug)]
struct Push {
    /// `None` for an ordinary write.
    through: Option<Uid>,
    range: Range<u64>,
    landed: u64,
    acknowledged: bool,
}

#[derive(Debug, Default)]
struct CheckerState {
    bytes: Vec<u8>,
    mappings: Vec<Mapping>,
    /// By number of client and of mapping, in this life of the server.
    numbers: BTreeMap<(ClientId, MappingId), Uid>,
    pushes: Vec<Push>,
    /// Clients for which a later connection is welcome, so that nothing of theirs may land any more.
    succeeded: Vec<ClientId>,
    /// Rights that the server itself holds.
    own: Vec<(OperationId, Right)>,
    /// Writes of an operation that is reported done although it is not.
    held_back: Option<Vec<(u64, Vec<u8>)>>,
    violation: Option<String>,
    drained: u64,
}

/// A region's memory.
#[derive(Debug)]
pub(super) struct Checker {
    state: Mutex<CheckerState>,
    writer: Mutex<Writer>,
    len: u64,
}

impl Checker {
    pub(super) fn new(len: u64) -> Checker {
        Checker {
            state: Mutex::new(CheckerState {
                bytes: vec![0; len as usize],
                ..CheckerState::default()
            }),
            writer: Mutex::new(Writer::Nobody),
            len,
        }
    }

    fn lock(&self) -> MutexGuard<'_, CheckerState> {
        self.state.lock()
    }

    /// Returns the first violation.
    pub(super) fn violation(&self) -> Option<String> {
        self.lock().violation.take()
    }

    /// Returns the number of writes that landed only when their mapping ended.
    pub(super) fn drained(&self) -> u64 {
        self.lock().drained
    }

    // Events at the server.

    /// Records that a mapping is made: whatever excludes it must be over.
    pub(super) fn begin(&self, number: (ClientId, MappingId), right: Right, memory: Arc<Mapped>) -> Uid {
        let mut state = self.lock();
        let uid = Uid(state.mappings.len());
        if let Some((_, own)) = state.own.iter().find(|(_, own)| own.excludes(&right)) {
            let what = format!("mapping {right:?} is made while the server itself has {own:?}");
            state.violation.get_or_insert(what);
        }
        state.end_excluded(&right, "another mapping was made");
        state.mappings.push(Mapping {
            right,
            memory,
            lane: Lane::default(),
            over: None,
        });
        state.numbers.insert(number, uid);
        uid
    }

    /// Records that the server itself begins an operation.
    pub(super) fn begin_own(&self, number: OperationId, right: Right) {
        let mut state = self.lock();
        state.end_excluded(&right, "the server itself went on");
        state.own.push((number, right));
    }

    pub(super) fn end_own(&self, number: OperationId) {
        self.lock().own.retain(|(own, _)| *own != number);
    }

    /// Records that a mapping is over: somebody was notified of that.
    pub(super) fn over(&self, client: ClientId, mapping: MappingId, why: &str) {
        let mut state = self.lock();
        if let Some(uid) = state.numbers.get(&(client, mapping)).copied() {
            state.end(uid, why);
        }
    }

    /// Records that all mappings of a client are over.
    pub(super) fn client_over(&self, client: ClientId, why: &str) {
        let mut state = self.lock();
        let of = (client, MappingId(0))..=(client, MappingId(u64::MAX));
        let all: Vec<Uid> = state.numbers.range(of).map(|(_, uid)| *uid).collect();
        for uid in all {
            state.end(uid, why);
        }
    }

    /// Records that a later connection of the same client is welcome: nothing of this one may land.
    pub(super) fn succeeded(&self, client: ClientId) {
        self.client_over(client, "its client is welcome on another connection");
        self.lock().succeeded.push(client);
    }

    /// Records that the server has lost its state; the host lives, and what was on its way has arrived.
    pub(super) fn restarted(&self) {
        let count = self.lock().mappings.len();
        for at in 0..count {
            self.drain(Uid(at));
            self.lock().end(Uid(at), "the server ended");
        }
        let mut state = self.lock();
        state.numbers.clear();
        state.succeeded.clear();
        state.own.clear();
    }

    /// Lets everything of a mapping that is on its way land. Returns the number of writes.
    pub(super) fn drain(&self, uid: Uid) -> u64 {
        let mut landed = 0;
        while self.land(uid) {
            landed += 1;
        }
        landed
    }

    /// Lets everything land that was on its way when a mapping ended, and counts it.
    pub(super) fn drain_last(&self, uid: Uid) {
        let landed = self.drain(uid);
        self.lock().drained += landed;
    }

    /// Lets everything land that came before a message of that client.
    pub(super) fn drain_client(&self, client: ClientId) {
        let state = self.lock();
        let of = (client, MappingId(0))..=(client, MappingId(u64::MAX));
        let all: Vec<Uid> = state.numbers.range(of).map(|(_, uid)| *uid).collect();
        drop(state);
        for uid in all {
            self.drain(uid);
        }
    }

    pub(super) fn drain_all(&self) {
        let count = self.lock().mappings.len();
        for at in 0..count {
            self.drain(Uid(at));
        }
    }

    /// Lets some writes that are on their way land, or none.
    pub(super) fn stir(&self, dice: &mut Dice) {
        let state = self.lock();
        let waiting = state.mappings.iter().enumerate();
        let waiting: Vec<usize> = waiting
            .filter(|(_, mapping)| !mapping.lane.0.is_empty())
            .map(|(at, _)| at)
            .collect();
        drop(state);
        if !waiting.is_empty() {
            let uid = Uid(dice.pick(&waiting));
            for _ in 0..dice.log_uniform(8) {
                self.land(uid);
            }
        }
    }

    fn land(&self, uid: Uid) -> bool {
        let mut state = self.lock();
        let mapping = &mut state.mappings[uid.0];
        let Some((at, bytes)) = mapping.lane.0.pop_front() else {
            return false;
        };
        let memory = mapping.memory.clone();
        drop(state);
        let written = self.write_as(Writer::Mapping(uid), || memory.write(at, &bytes));
        written.expect("its bounds were looked at");
        true
    }

    fn write_as<R>(&self, writer: Writer, f: impl FnOnce() -> R) -> R {
        *self.writer.lock() = writer;
        let result = f();
        *self.writer.lock() = Writer::Nobody;
        result
    }

    /// Runs `f` for a client on the server's processor.
    pub(super) fn operate<R>(&self, client: ClientId, f: impl FnOnce() -> R) -> R {
        self.write_as(Writer::Operation(client), f)
    }

    /// Runs `f` for a client, but leaves its writes to [`Checker::land_late`].
    pub(super) fn pretend<R>(&self, client: ClientId, f: impl FnOnce() -> R) -> (R, Vec<(u64, Vec<u8>)>) {
        self.lock().held_back = Some(Vec::new());
        let result = self.operate(client, f);
        (result, self.lock().held_back.take().unwrap_or_default())
    }

    pub(super) fn land_late(&self, client: ClientId, writes: &[(u64, Vec<u8>)]) {
        for (at, bytes) in writes {
            let written = self.operate(client, || self.write(*at, bytes));
            written.expect("its bounds were looked at");
        }
    }

    // Actions of clients.

    pub(super) fn uid(&self, client: ClientId, mapping: MappingId) -> Option<Uid> {
        self.lock().numbers.get(&(client, mapping)).copied()
    }

    /// Records a posted write. Returns its number, of which its bytes consist.
    pub(super) fn posted(&self, through: Option<Uid>, range: Range<u64>) -> u64 {
        let mut state = self.lock();
        state.pushes.push(Push {
            through,
            range,
            landed: 0,
            acknowledged: false,
        });
        state.pushes.len() as u64
    }

    /// Records that a write is acknowledged.
    pub(super) fn acknowledged(&self, push: u64) {
        let mut state = self.lock();
        let known = &mut state.pushes[push as usize - 1];
        known.acknowledged = true;
        let through = known.through;
        let whole = known.is_whole();
        let over = through.is_none_or(|uid| state.mappings[uid.0].over.is_some());
        if over && !whole {
            state.missing(push, "when it was acknowledged");
        }
    }

    /// Records that a FLUSH behind these pushes was answered.
    pub(super) fn flushed(&self, pushes: &[u64]) {
        let mut state = self.lock();
        for push in pushes {
            if !state.pushes[*push as usize - 1].is_whole() {
                state.missing(*push, "when a FLUSH behind it was answered");
            }
        }
    }

    /// Checks that everything acknowledged is there, once nothing more happens.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        for push in 1..=state.pushes.len() as u64 {
            let known = &state.pushes[push as usize - 1];
            if known.acknowledged && !known.is_whole() {
                state.missing(push, "in the end");
            }
        }
    }
}

impl Push {
    fn is_whole(&self) -> bool {
        self.landed == self.range.end - self.range.start
    }
}

impl CheckerState {
    fn missing(&mut self, push: u64, when: &str) {
        let known = &self.pushes[push as usize - 1];
        let what = format!(
            "push {push} to {:?} is acknowledged, and {when} only {} bytes of it are there",
            known.range, known.landed
        );
        self.violation.get_or_insert(what);
    }

    fn end_excluded(&mut self, right: &Right, why: &str) {
        for at in 0..self.mappings.len() {
            if self.mappings[at].over.is_none() && self.mappings[at].right.excludes(right) {
                self.end(Uid(at), why);
            }
        }
    }

    /// Records that a mapping is past its revocation point: what was acknowledged must be there, and nothing more may come.
    fn end(&mut self, uid: Uid, why: &str) {
        let over = &mut self.mappings[uid.0].over;
        if over.is_some() {
            return;
        }
        *over = Some(why.to_owned());
        let lacks = |push: &Push| push.through == Some(uid) && push.acknowledged && !push.is_whole();
        if let Some(at) = self.pushes.iter().position(lacks) {
            self.missing(at as u64 + 1, &format!("when its mapping was over ({why})"));
        }
    }

    fn landed(&mut self, writer: Writer, at: u64, bytes: &[u8]) {
        let range = at..at + bytes.len() as u64;
        match writer {
            Writer::Nobody => {
                let what = format!("somebody unknown writes to {range:?}");
                self.violation.get_or_insert(what);
            }
            Writer::Mapping(uid) => {
                let mapping = &self.mappings[uid.0];
                if let Some(why) = &mapping.over {
                    let what = format!(
                        "{} bytes at {at} land through a mapping of client {} after its revocation point: {why}",
                        bytes.len(),
                        mapping.right.client.map_or(0, |ClientId(number)| number)
                    );
                    self.violation.get_or_insert(what);
                }
            }
            Writer::Operation(client) => self.operates(client, range, Access::WRITE),
        }
        for (nth, unit) in bytes.chunks_exact(UNIT as usize).enumerate() {
            let number = unit.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
            let at = at + nth as u64 * UNIT;
            let push = (number as usize)
                .checked_sub(1)
                .and_then(|n| self.pushes.get_mut(n));
            match push.filter(|push| push.range.contains(&at)) {
                Some(push) => push.landed += UNIT,
                None => {
                    let what = format!("push {number} lands at {at}, where it was not meant to");
                    self.violation.get_or_insert(what);
                    continue;
                }
            }
            let push = &self.pushes[number as usize - 1];
            if push.landed > push.range.end - push.range.start {
                let what = format!("push {number} to {:?} lands twice", push.range);
                self.violation.get_or_insert(what);
            }
        }
    }

    /// Records that an ordinary read or write goes on: what excludes it is over.
    fn operates(&mut self, client: ClientId, range: Range<u64>, access: Access) {
        if access == Access::WRITE && self.succeeded.contains(&client) {
            let what = format!(
                "an ordinary write of client {client} to {range:?} lands when it is welcome on another connection"
            );
            self.violation.get_or_insert(what);
        }
        let right = Right {
            client: Some(client),
            range,
            access,
            share: Access::all(),
        };
        if let Some((_, own)) = self.own.iter().find(|(_, own)| own.excludes(&right)) {
            let what = format!("{right:?} goes on while the server itself has {own:?}");
            self.violation.get_or_insert(what);
        }
        self.end_excluded(&right, "an ordinary operation went on");
    }
}

impl Memory for Checker {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let end = offset.checked_add(out.len() as u64).ok_or(Fault::Unmapped)?;
        let writer = *self.writer.lock();
        let mut state = self.lock();
        let bytes = state.bytes.get(offset as usize..end as usize);
        out.copy_from_slice(bytes.ok_or(Fault::Unmapped)?);
        if let Writer::Operation(client) = writer {
            state.operates(client, offset..end, Access::READ);
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let end = offset.checked_add(bytes.len() as u64).ok_or(Fault::Unmapped)?;
        let writer = *self.writer.lock();
        let mut state = self.lock();
        if let Some(held_back) = &mut state.held_back {
            held_back.push((offset, bytes.to_vec()));
            return Ok(());
        }
        let to = state.bytes.get_mut(offset as usize..end as usize);
        to.ok_or(Fault::Unmapped)?.copy_from_slice(bytes);
        state.landed(writer, offset, bytes);
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

/// Memory that a mapping's region is registered over: the region, behind the device's buffers.
#[derive(Debug)]
pub(super) struct MappedMemory {
    pub(super) checker: Arc<Checker>,
    pub(super) memory: Arc<Mapped>,
    pub(super) uid: Uid,
}

impl Memory for MappedMemory {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        // A READ pushes the posted writes of its queue pair ahead of itself. PCI Express, transaction ordering.
        self.checker.drain(self.uid);
        self.memory.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut state = self.checker.lock();
        let lane = &mut state.mappings[self.uid.0].lane;
        lane.0.push_back((offset, bytes.to_vec()));
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        self.memory.placement()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.memory.flush_is_immediate(placement)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.checker.drain(self.uid);
        self.memory.flush(offset, length, placement)
    }
}
