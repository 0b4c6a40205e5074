//! Compares the blocks that hosts read with those that they have written, and with the answers that they got.
//!
//! A block is a register. A write is open from its submission until nothing of it can act any more: its completion, or the end
//! of the controller that had it. It is certain from its acknowledgement on, or since somebody has read it; a power cut makes those uncertain that were not
//! durable. A read may return a write that began before the read ended, unless a write that was certain when the read
//! began began after that one was over. A block that Copy writes is any that its source may have held meanwhile.

use std::collections::BTreeMap;
use std::fmt;

use super::disk::Value;

/// A block: its namespace, and its number.
pub(crate) type Place = (u32, u64);

/// A write of one block: its place, and its position among those there.
pub(crate) type WriteId = (Place, usize);

const NEVER: u64 = u64::MAX;
/// Copies of copies of a block that are followed; beyond them it may hold anything.
const COPIES_MAX: u32 = 4;

#[derive(Clone, Copy, Debug)]
struct Write {
    host: usize,
    data: Written,
    begin: u64,
    /// Nothing of it acts after this.
    end: u64,
    /// Nothing of it acts after anything that its host has begun after this.
    end_own: u64,
    /// It is done for certain by this time.
    certain: u64,
    is_durable: bool,
    /// It was refused: it must not act.
    is_refused: bool,
}

/// The data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Value(Value),
    /// The block that is there while it runs.
    CopyOf(Place),
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Written::Value(value) => write!(f, "{value}"),
            Written::CopyOf((nsid, block)) => write!(f, "a copy of block {block} of namespace {nsid}"),
        }
    }
}

/// A fused pair that was acknowledged.
#[derive(Clone, Copy, Debug)]
struct Pair {
    host: usize,
    new: Value,
    write: WriteId,
}

#[derive(Debug, Default)]
pub(crate) struct Checker {
    places: BTreeMap<Place, Vec<Write>>,
    /// By place, and the value that a pair has replaced.
    pairs: BTreeMap<(Place, Value), Pair>,
    /// By value that a pair has written or tried to: the value that it replaces.
    before: BTreeMap<Value, Value>,
    last_value: Value,
    /// Time of the last power cut.
    cut: u64,
    pub(crate) reads_checked: u64,
    pub(crate) lost_writes: u64,
}

impl Checker {
    fn at(&mut self, place: Place) -> &mut Vec<Write> {
        let zeros = Write {
            host: usize::MAX,
            data: Written::Value(0),
            begin: 0,
            end: 0,
            end_own: 0,
            certain: 0,
            is_durable: true,
            is_refused: false,
        };
        self.places.entry(place).or_insert_with(|| vec![zeros])
    }

    /// Returns a value that no write has.
    pub(crate) fn value(&mut self) -> Value {
        self.last_value += 1;
        self.last_value
    }

    pub(crate) fn begin(&mut self, host: usize, place: Place, value: Value, now: u64) -> WriteId {
        self.begin_any(host, place, Written::Value(value), now)
    }

    /// As [`Checker::begin`], for a block that becomes a copy of another one.
    pub(crate) fn begin_copy(&mut self, host: usize, place: Place, source: Place, now: u64) -> WriteId {
        self.begin_any(host, place, Written::CopyOf(source), now)
    }

    fn begin_any(&mut self, host: usize, place: Place, data: Written, now: u64) -> WriteId {
        let writes = self.at(place);
        writes.push(Write {
            host,
            data,
            begin: now,
            end: NEVER,
            end_own: NEVER,
            certain: NEVER,
            is_durable: false,
            is_refused: false,
        });
        (place, writes.len() - 1)
    }

    fn get(&mut self, (place, at): WriteId) -> &mut Write {
        &mut self.at(place)[at]
    }

    /// It is acknowledged, as it was sent last at a time.
    pub(crate) fn done(&mut self, write: WriteId, is_durable: bool, sent: u64, now: u64) {
        // The power may have been cut while the acknowledgement was on its way.
        let is_certain = is_durable || sent > self.cut;
        let write = self.get(write);
        write.end = write.end.min(now);
        write.is_durable |= is_durable;
        if is_certain {
            write.certain = write.certain.min(now);
        }
    }

    /// Nothing of it acts any more. It may have acted.
    pub(crate) fn close(&mut self, write: WriteId, now: u64) {
        let write = self.get(write);
        write.end = write.end.min(now);
    }

    /// As [`Checker::close`], for what its host begins after this: it may act until that does.
    pub(crate) fn close_own(&mut self, write: WriteId, now: u64) {
        let write = self.get(write);
        write.end_own = write.end_own.min(now);
    }

    /// It is sent again, and may act once more.
    pub(crate) fn reopen(&mut self, write: WriteId) {
        let write = self.get(write);
        (write.end, write.end_own) = (NEVER, NEVER);
    }

    /// It was refused, and never acts.
    pub(crate) fn refused(&mut self, write: WriteId, now: u64) -> Option<String> {
        let write = self.get(write);
        write.end = write.end.min(now);
        write.is_refused = true;
        (write.certain != NEVER).then(|| {
            format!(
                "the write {} of host {} was refused, and was read before",
                write.data, write.host
            )
        })
    }

    /// A flush that began at a time was acknowledged: what was certain then is durable.
    pub(crate) fn flushed(&mut self, nsid: u32, begin: u64, not_before: u64) {
        let places = self.places.range_mut((nsid, 0)..=(nsid, u64::MAX));
        for write in places.flat_map(|(_, writes)| writes) {
            write.is_durable |= write.certain <= begin && write.begin >= not_before;
        }
    }

    /// The target dies: nothing that it was asked for acts any more. With a power cut, what is not durable may be gone.
    pub(crate) fn target_died(&mut self, with_power_cut: bool, now: u64) {
        for write in self.places.values_mut().flatten() {
            write.end = write.end.min(now);
            if with_power_cut && !write.is_durable && write.certain != NEVER {
                write.certain = NEVER;
                self.lost_writes += 1;
            }
        }
        if with_power_cut {
            self.cut = now;
            let places = &self.places;
            self.pairs
                .retain(|_, pair| places[&pair.write.0][pair.write.1].certain != NEVER);
        }
    }

    fn is_stale(writes: &[Write], write: &Write, begin: u64) -> Option<Write> {
        let mut later = writes.iter().filter(|other| {
            let end = match other.host == write.host {
                true => write.end.min(write.end_own),
                false => write.end,
            };
            other.certain < begin && other.begin > end
        });
        later.next().copied()
    }

    /// Checks what a read between two times has returned.
    pub(crate) fn read(&mut self, place: Place, value: Value, begin: u64, end: u64) -> Result<(), String> {
        self.reads_checked += 1;
        let cut = self.cut;
        let found_by_pair = self.before.get(&value).copied();
        self.at(place);
        let writes = &self.places[&place];
        let mut why = None;
        let mut found = None;
        let all = writes.iter().enumerate();
        let candidates = all.filter(|(_, write)| write.begin < end);
        for (at, write) in candidates {
            if !self.may_be(write, value, end, COPIES_MAX) {
                continue;
            } else if write.is_refused {
                why = Some(format!("host {} was refused that write", write.host));
            } else if let Some(later) = Checker::is_stale(writes, write, begin) {
                why = Some(format!(
                    "host {} wrote it ({} to {}), and host {} wrote {} later ({} to {})",
                    write.host, write.begin, write.end, later.host, later.data, later.begin, later.certain
                ));
            } else {
                found = Some(at);
                break;
            }
        }
        let Some(at) = found else {
            let why = why.unwrap_or_else(|| "nobody wrote that there".to_owned());
            let (nsid, block) = place;
            return Err(format!(
                "block {block} of namespace {nsid} holds {value} ({begin} to {end}): {why}"
            ));
        };
        if let Some(old) = found_by_pair.filter(|old| *old != 0)
            && let Some(between) = Checker::came_between(writes, old, value, begin)
        {
            return Err(format!(
                "block {} of namespace {} holds {value}, by a fused pair that found {old}, and host {} wrote {} between both ({} to {})",
                place.1, place.0, between.host, between.data, between.begin, between.certain
            ));
        }
        // Zeros, and what was copied, may be those of several writes.
        if value != 0 && begin > cut {
            let write = self.get((place, at));
            let is_that = write.data == Written::Value(value);
            let until = if is_that { end } else { NEVER };
            write.certain = write.certain.min(until);
        }
        Ok(())
    }

    /// Returns true if a write may have written a value before a time.
    fn may_be(&self, write: &Write, value: Value, end: u64, copies: u32) -> bool {
        let source = match write.data {
            Written::Value(own) => return own == value,
            Written::CopyOf(_) if copies == 0 => return true,
            Written::CopyOf(source) => source,
        };
        let (begin, end) = (write.begin, write.end.min(end));
        // One that nobody has written is zeros.
        let Some(writes) = self.places.get(&source) else {
            return value == 0;
        };
        writes.iter().any(|write| {
            let may_act = write.begin < end && !write.is_refused;
            may_act
                && Checker::is_stale(writes, write, begin).is_none()
                && self.may_be(write, value, end, copies - 1)
        })
    }

    /// Returns a write that is certain at a time when a pair's value is read, and began after the value was written that the pair has found: if it was done before the pair,
    /// the pair has not found that value, and if after it, its own is gone.
    fn came_between(writes: &[Write], old: Value, new: Value, begin: u64) -> Option<Write> {
        // A copy may have brought the old value back.
        let is_copy = |write: &Write| matches!(write.data, Written::CopyOf(_));
        if writes.iter().any(is_copy) {
            return None;
        }
        let found = writes.iter().find(|write| write.data == Written::Value(old))?;
        let mut others = writes.iter().filter(|write| write.data != Written::Value(new));
        others
            .find(|write| write.certain < begin && write.begin > found.end)
            .copied()
    }

    /// Returns true if a block may have held another value at some time between two.
    pub(crate) fn may_differ(&mut self, place: Place, value: Value, begin: u64, end: u64) -> bool {
        let writes = self.at(place);
        writes.iter().any(|write| {
            let may_act = write.data != Written::Value(value) && write.begin < end && !write.is_refused;
            may_act && Checker::is_stale(writes, write, begin).is_none()
        })
    }

    /// A pair is sent that replaces a value.
    pub(crate) fn pair_begins(&mut self, old: Value, new: Value) {
        self.before.insert(new, old);
    }

    /// A pair is acknowledged: no other one has replaced the same value.
    pub(crate) fn pair_done(
        &mut self,
        host: usize,
        (place, old): (Place, Value),
        new: Value,
        write: WriteId,
    ) -> Result<(), String> {
        if self.get(write).certain == NEVER {
            return Ok(());
        }
        let pair = Pair { host, new, write };
        match self.pairs.insert((place, old), pair) {
            Some(other) => Err(format!(
                "block {} of namespace {} went from {old} to {} by host {} and to {new} by host {host}: a fused pair was interrupted",
                place.1, place.0, other.new, other.host
            )),
            None => Ok(()),
        }
    }

    /// Checks at the end that all acknowledged pairs of a block led to what it holds. Returns their number.
    pub(crate) fn check_pairs(&self, place: Place, last: Value) -> Result<u64, String> {
        let mut chain = Vec::new();
        let mut value = last;
        while let Some(old) = self.before.get(&value) {
            chain.push((*old, value));
            value = *old;
        }
        let of_place = self.pairs.iter().filter(|((at, _), _)| *at == place);
        let mut number = 0;
        for ((_, old), pair) in of_place {
            number += 1;
            if !chain.contains(&(*old, pair.new)) {
                return Err(format!(
                    "the pair of host {} that made {} of {old} in block {} of namespace {} is lost: it holds {last}",
                    pair.host, pair.new, place.1, place.0
                ));
            }
        }
        Ok(number)
    }
}
