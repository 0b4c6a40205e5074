//! What a client knows of its mapping: every value that each unit of 8 bytes may have, and the oldest that a cut may leave.

use std::collections::VecDeque;
use std::ops::Range;

use super::shadow::UNIT;

/// A value of a unit.
#[derive(Clone, Copy, Debug)]
struct Value {
    bytes: [u8; UNIT],
    /// Bytes that the operation wrote.
    mask: u8,
    /// The operation that wrote it; 0: it was found.
    by: u64,
    /// It was an ATOMIC WRITE: everything flushed before it is durable once it stands.
    publishes: bool,
}

/// A unit's values in the order of the operations that wrote them. Older ones than the first are gone for good.
#[derive(Clone, Debug)]
struct Unit(VecDeque<Value>);

/// A flush whose answer has not come.
#[derive(Clone, Debug)]
struct Flush {
    by: u64,
    range: Range<u64>,
    /// ATOMIC WRITEs wait for it.
    orders: bool,
}

/// What a client posted and was told about one mapping. Operations are numbered upwards.
#[derive(Clone, Debug)]
pub struct Ledger {
    range: Range<u64>,
    units: Vec<Unit>,
    flushes: Vec<Flush>,
}

impl Ledger {
    /// A mapping of this range of the server's memory, which holds `found`. The range begins and ends at a unit.
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

    /// The range that it is about.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Takes what stands there now as all that there is.
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

    /// The units that a range touches: number, the bytes of it that are touched.
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

    /// A WRITE was posted, which travels in packets of `mtu` bytes. Each places its bytes apart.
    pub fn posted_write(&mut self, by: u64, at: u64, bytes: &[u8], mtu: usize) {
        for (n, packet) in bytes.chunks(mtu).enumerate() {
            self.write(by, at + (n * mtu) as u64, packet, false);
        }
    }

    /// An ATOMIC WRITE was posted, behind the flushes of the same QP.
    pub fn posted_atomic_write(&mut self, by: u64, at: u64, bytes: [u8; UNIT]) {
        self.write(by, at, &bytes, true);
    }

    /// A fetch-and-add was posted; what it will find.
    pub fn posted_fetch_add(&mut self, by: u64, at: u64, add: u64) -> u64 {
        let last = self.units[((at - self.range.start) as usize) / UNIT].0.back();
        let before = u64::from_ne_bytes(last.expect("a unit has a value").bytes);
        self.write(by, at, &before.wrapping_add(add).to_ne_bytes(), false);
        before
    }

    /// Something was posted whose answer says that what was posted before it is durable. `orders`: it is a FLUSH, which an
    /// ATOMIC WRITE behind it waits for. IBTA Vol 1, A19.
    pub fn posted_flush(&mut self, by: u64, range: Range<u64>, orders: bool) {
        self.flushes.push(Flush { by, range, orders });
    }

    /// Its answer came: what it covers is durable.
    pub fn flushed(&mut self, by: u64) {
        if let Some(at) = self.flushes.iter().position(|flush| flush.by == by) {
            let flush = self.flushes.remove(at);
            self.durable(by, &flush.range);
        }
    }

    /// What was posted before operation `before` and lies in the range is durable.
    pub fn durable(&mut self, before: u64, range: &Range<u64>) {
        for (n, touched) in self.touched(range) {
            let unit = &mut self.units[n].0;
            let covered = |value: &Value| value.by < before && value.mask & mask(&touched) != 0;
            if let Some(at) = unit.iter().rposition(covered) {
                unit.drain(..at);
            }
        }
    }

    /// Whether these bytes are what may be read by a READ that was posted as operation `by`.
    ///
    /// # Errors
    /// What differs.
    pub fn check_read(&self, by: u64, at: u64, bytes: &[u8]) -> Result<(), String> {
        for (n, touched) in self.touched(&(at..at + bytes.len() as u64)) {
            let unit = &self.units[n].0;
            let from = (self.range.start + (n * UNIT + touched.start) as u64 - at) as usize;
            let read = &bytes[from..from + touched.len()];
            // Of a unit that something later made durable the older values are forgotten.
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

    /// The server restarted with these bytes. They become all that there is.
    ///
    /// # Errors
    /// A unit that has no value that it may have: something durable is lost, or something that nobody wrote is there.
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

    /// The mapping was revoked, and these bytes are visible there. Whatever was posted and is not there never will be.
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

    /// Everything that was posted is done: whether these bytes are visible then.
    ///
    /// # Errors
    /// What differs.
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
    /// The latest of its values that looks like this.
    fn latest(&self, bytes: &[u8]) -> Option<&Value> {
        self.0.iter().rev().find(|value| value.bytes == *bytes)
    }
}

/// The bits of these bytes of a unit.
fn mask(bytes: &Range<usize>) -> u8 {
    ((1u16 << bytes.end) - (1u16 << bytes.start)) as u8
}
