//! Knowledge of a client about its mapping: every value that each unit of 8 bytes may have, and the oldest that a cut may
//! leave.

use std::collections::VecDeque;
use std::ops::Range;

use super::shadow::UNIT;

/// A value of a unit.
#[derive(Clone, Copy, Debug)]
struct Value {
    bytes: [u8; UNIT],
    /// Mask of the bytes that the operation wrote.
    mask: u8,
    /// Operation that wrote it; 0 when it was found in memory.
    by: u64,
    /// Set for an ATOMIC WRITE: everything flushed before it is durable once its value is there.
    publishes: bool,
}

/// A unit's values in the order of the operations that wrote them. Values older than the first are gone for good.
#[derive(Clone, Debug)]
struct Unit(VecDeque<Value>);

/// A flush whose answer has not come.
#[derive(Clone, Debug)]
struct Flush {
    by: u64,
    range: Range<u64>,
    /// Set when ATOMIC WRITEs wait for it.
    orders: bool,
}

/// Operations that a client posted to one mapping, and the answers that it received. Operations are numbered upwards.
#[derive(Clone, Debug)]
pub struct Ledger {
    range: Range<u64>,
    units: Vec<Unit>,
    flushes: Vec<Flush>,
}

impl Ledger {
    /// Creates the ledger of a mapping of this range of the server's memory, which holds `found`. The range begins and ends at
    /// a unit.
    ///
    /// # Panics
    /// When `found` is not as long as the range.
    pub fn new(range: Range<u64>, found: &[u8]) -> Ledger {
        assert_eq!(found.len() as u64, range.end - range.start, "the range's bytes");
        let mut ledger = Ledger {
            range,
            units: Vec::new(),
            flushes: Vec::new(),
        };
        ledger.find(found);
        ledger
    }

    /// Returns the range of the mapping.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Takes the values that are there now as the only ones.
    fn find(&mut self, found: &[u8]) {
        self.flushes.clear();
        let value = |bytes: &[u8]| Value {
            bytes: bytes.try_into().expect("a unit"),
            mask: 0,
            by: 0,
            publishes: false,
        };
        let units = found
            .chunks_exact(UNIT)
            .map(|bytes| Unit(VecDeque::from([value(bytes)])));
        self.units = units.collect();
    }

    /// Returns the units that a range touches: the number of each, and the bytes of it that are touched.
    fn touched(&self, range: &Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let (from, to) = (
            (range.start - self.range.start) as usize,
            (range.end - self.range.start) as usize,
        );
        let units = if range.is_empty() {
            0..0
        } else {
            from / UNIT..to.div_ceil(UNIT)
        };
        units.map(move |n| {
            let at = n * UNIT;
            (n, from.max(at) - at..to.min(at + UNIT) - at)
        })
    }

    fn write(&mut self, by: u64, at: u64, bytes: &[u8], publishes: bool) {
        for (n, touched) in self.touched(&(at..at + bytes.len() as u64)) {
            let unit = &mut self.units[n].0;
            let mut value = *unit.back().expect("a unit has a value");
            let from = (self.range.start + (n * UNIT + touched.start) as u64 - at) as usize;
            value.bytes[touched.clone()].copy_from_slice(&bytes[from..from + touched.len()]);
            value.mask = mask(&touched);
            (value.by, value.publishes) = (by, publishes);
            unit.push_back(value);
        }
    }

    /// Records a posted WRITE, which travels in packets of `mtu` bytes. The bytes of each packet are placed separately.
    pub fn posted_write(&mut self, by: u64, at: u64, bytes: &[u8], mtu: usize) {
        for (n, packet) in bytes.chunks(mtu).enumerate() {
            self.write(by, at + (n * mtu) as u64, packet, false);
        }
    }

    /// Records a posted ATOMIC WRITE, behind the flushes of the same QP.
    pub fn posted_atomic_write(&mut self, by: u64, at: u64, bytes: [u8; UNIT]) {
        self.write(by, at, &bytes, true);
    }

    /// Records a posted fetch-and-add. Returns the value that it will find.
    pub fn posted_fetch_add(&mut self, by: u64, at: u64, add: u64) -> u64 {
        let last = self.units[((at - self.range.start) as usize) / UNIT].0.back();
        let before = u64::from_ne_bytes(last.expect("a unit has a value").bytes);
        self.write(by, at, &before.wrapping_add(add).to_ne_bytes(), false);
        before
    }

    /// Records a posted operation whose answer says that what was posted before it is durable. `orders`: the operation is a
    /// FLUSH, for which an ATOMIC WRITE behind it waits. IBTA Vol 1, A19.
    pub fn posted_flush(&mut self, by: u64, range: Range<u64>, orders: bool) {
        self.flushes.push(Flush { by, range, orders });
    }

    /// Records the answer to such an operation: what it covers is durable.
    pub fn flushed(&mut self, by: u64) {
        if let Some(at) = self.flushes.iter().position(|flush| flush.by == by) {
            let flush = self.flushes.remove(at);
            self.durable(by, &flush.range);
        }
    }

    /// Records that everything posted before operation `before` is durable, as far as it lies in the range.
    pub fn durable(&mut self, before: u64, range: &Range<u64>) {
        for (n, touched) in self.touched(range) {
            let unit = &mut self.units[n].0;
            let covered = |value: &Value| value.by < before && value.mask & mask(&touched) != 0;
            if let Some(at) = unit.iter().rposition(covered) {
                unit.drain(..at);
            }
        }
    }

    /// Checks whether a READ that was posted as operation `by` may return these bytes.
    ///
    /// # Errors
    /// Describes the difference.
    pub fn check_read(&self, by: u64, at: u64, bytes: &[u8]) -> Result<(), String> {
        for (n, touched) in self.touched(&(at..at + bytes.len() as u64)) {
            let unit = &self.units[n].0;
            let from = (self.range.start + (n * UNIT + touched.start) as u64 - at) as usize;
            let read = &bytes[from..from + touched.len()];
            // The older values of a unit are forgotten once something later has made it durable.
            let Some(before) = unit.iter().rposition(|value| value.by < by) else {
                continue;
            };
            let mut may = unit.iter().skip(before);
            if !may.any(|value| value.bytes[touched.clone()] == *read) {
                return Err(format!(
                    "READ: unit at {} has {read:02x?}, which is not what was written before it",
                    self.range.start + (n * UNIT) as u64
                ));
            }
        }
        Ok(())
    }

    /// Records that the server restarted with these bytes. They become the only values.
    ///
    /// # Errors
    /// A unit does not hold a value that it may have: something durable is lost, or something that nobody wrote is there.
    pub fn recover(&mut self, found: &[u8]) -> Result<(), String> {
        let published = self
            .units
            .iter()
            .zip(found.chunks_exact(UNIT))
            .filter_map(|(unit, bytes)| unit.latest(bytes))
            .filter(|value| value.publishes);
        if let Some(published) = published.map(|value| value.by).max() {
            let before = |flush: &&Flush| flush.orders && flush.by < published;
            let done: Vec<u64> = self.flushes.iter().filter(before).map(|flush| flush.by).collect();
            for by in done {
                self.flushed(by);
            }
        }
        let wrong = self.wrong(found);
        self.find(found);
        wrong.map_or(Ok(()), Err)
    }

    fn wrong(&self, found: &[u8]) -> Option<String> {
        let units = self.units.iter().zip(found.chunks_exact(UNIT)).enumerate();
        let mut wrong = units.filter(|(_, (unit, bytes))| unit.latest(bytes).is_none());
        let (n, (unit, bytes)) = wrong.next()?;
        let at = self.range.start + (n * UNIT) as u64;
        let first = unit.0.front()?;
        Some(format!(
            "unit at {at} has {bytes:02x?}; the oldest that it may have is {:02x?} by operation {}, of {} values ({} more units are wrong)",
            first.bytes,
            first.by,
            unit.0.len(),
            wrong.count()
        ))
    }

    /// Records that the mapping was revoked while these bytes were visible. Operations posted whose bytes are not there never
    /// take effect.
    ///
    /// # Errors
    /// As of [`Ledger::recover`].
    pub fn revoked(&mut self, visible: &[u8]) -> Result<(), String> {
        if let Some(wrong) = self.wrong(visible) {
            return Err(wrong);
        }
        self.flushes.clear();
        for (unit, bytes) in self.units.iter_mut().zip(visible.chunks_exact(UNIT)) {
            if let Some(at) = unit.0.iter().rposition(|value| value.bytes == *bytes) {
                unit.0.truncate(at + 1);
            }
        }
        Ok(())
    }

    /// Checks whether these bytes are visible once everything posted is done.
    ///
    /// # Errors
    /// Describes the difference.
    pub fn check_last(&self, visible: &[u8]) -> Result<(), String> {
        let units = self.units.iter().zip(visible.chunks_exact(UNIT)).enumerate();
        let differs = |unit: &Unit, bytes: &[u8]| unit.0.back().is_none_or(|value| value.bytes != *bytes);
        match units.into_iter().find(|(_, (unit, bytes))| differs(unit, bytes)) {
            None => Ok(()),
            Some((n, _)) => Err(format!(
                "unit at {} is not what was written last",
                self.range.start + (n * UNIT) as u64
            )),
        }
    }
}

impl Unit {
    /// Returns the latest of its values with these bytes.
    fn latest(&self, bytes: &[u8]) -> Option<&Value> {
        self.0.iter().rev().find(|value| value.bytes == *bytes)
    }
}

/// Returns the mask of these bytes of a unit.
fn mask(bytes: &Range<usize>) -> u8 {
    ((1u16 << bytes.end) - (1u16 << bytes.start)) as u8
}
