//! The storage of a namespace: blocks in a volatile cache, which a failed flush forgets and a power cut loses in part.
//!
//! A block is the number of the write that it comes from; its bytes follow from that. What the reservations are is kept here
//! too, so that each block that is written or read is checked against them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdmux_nvmf::backend::{Backend, Flushes};
use rdmux_nvmf::target::{ReservationState, ReservationStore};
use rdmux_runtime::Direction;
use rdmux_wire::nvme::Status;

use super::media;
use super::reserve::Model;
use crate::dice::Dice;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;

/// Number of a write; 0 are zeros.
pub(crate) type Value = u64;

/// Returns the bytes of a block.
pub(crate) fn fill(value: Value, out: &mut [u8]) {
    let mut word = value;
    for chunk in out.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
        if value != 0 {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(value);
        }
    }
}

/// Returns the write that a block comes from; `None` if its bytes are not those of one write.
pub(crate) fn value(bytes: &[u8]) -> Option<Value> {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let value = u64::from_le_bytes(first);
    let mut expected = [0; BLOCK];
    fill(value, &mut expected);
    (bytes == expected).then_some(value)
}

/// Counts what the hosts see happen, so that no two events are at one time.
#[derive(Debug, Default)]
pub(crate) struct Ticks(AtomicU64);

impl Ticks {
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Properties of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) nsid: u32,
    /// Commands run where they may wait.
    pub(crate) may_wait: bool,
    /// A write may be lost before a flush.
    pub(crate) has_cache: bool,
    /// Reads and writes may be started and end later, as those of an io_uring.
    pub(crate) has_file: bool,
}

#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) shape: Shape,
    ticks: Arc<Ticks>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dice: Dice,
    blocks: u64,
    cached: Vec<Value>,
    media: Vec<Value>,
    /// By block, what was written since it was flushed last.
    dirty: BTreeMap<usize, Vec<Value>>,
    /// As `dirty`, of blocks that the system takes for written since a flush of them has failed.
    forgotten: BTreeMap<usize, Vec<Value>>,
    fails: Fails,
    reservations: Model,
    /// Reservations over time.
    history: Vec<(u64, Model)>,
    violation: Option<String>,
    /// Time of the first failed flush since it was opened, and of the last one ever.
    failed: Option<u64>,
    failed_last: u64,
    flush_failures: u64,
    write_failures: u64,
}

/// Failures, each in one of so many calls; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fails {
    pub(crate) write: u64,
    pub(crate) flush: u64,
}

impl Disk {
    pub(crate) fn new(shape: Shape, blocks: u64, blocks_max: u64, ticks: Arc<Ticks>, dice: Dice) -> Disk {
        Disk {
            shape,
            ticks,
            state: Mutex::new(State {
                dice,
                blocks,
                cached: vec![0; blocks_max as usize],
                media: vec![0; blocks_max as usize],
                dirty: BTreeMap::new(),
                forgotten: BTreeMap::new(),
                fails: Fails::default(),
                reservations: Model::default(),
                history: vec![(0, Model::default())],
                violation: None,
                failed: None,
                failed_last: 0,
                flush_failures: 0,
                write_failures: 0,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_fails(&self, fails: Fails) {
        self.state().fails = fails;
    }

    pub(crate) fn resize(&self, blocks: u64) {
        self.state().blocks = blocks;
    }

    /// Returns flushes and writes that have failed.
    pub(crate) fn failures(&self) -> (u64, u64) {
        let state = self.state();
        (state.flush_failures, state.write_failures)
    }

    /// Returns the time of the first failed flush since it was opened, and of the last one ever.
    pub(crate) fn failed_at(&self) -> (Option<u64>, u64) {
        let state = self.state();
        (state.failed, state.failed_last)
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.state().violation.clone()
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.state().blocks
    }

    /// Makes blocks durable as they are, and no others.
    pub(crate) fn keep(&self, block: u64, number: u64) {
        let mut state = self.state();
        for block in block as usize..(block + number) as usize {
            state.dirty.remove(&block);
            state.forgotten.remove(&block);
            state.media[block] = state.cached[block];
        }
    }

    /// Returns what a block holds.
    pub(crate) fn block(&self, block: u64) -> Value {
        self.state().cached[block as usize]
    }

    /// The reservations change.
    pub(in crate::nvme) fn reserve<T>(&self, change: impl FnOnce(&mut Model) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state.reservations);
        let now = (self.ticks.next(), state.reservations.clone());
        state.history.push(now);
        result
    }

    pub(in crate::nvme) fn reservations(&self) -> Model {
        self.state().reservations.clone()
    }

    /// Returns true if at some time between two the reservations kept a host from writing, or reading.
    pub(crate) fn kept_out(&self, host: usize, writes: bool, begin: u64, end: u64) -> bool {
        let state = self.state();
        let at_begin = state.history.iter().rposition(|(tick, _)| *tick <= begin);
        let mut during = state.history[at_begin.unwrap_or(0)..].iter();
        during.any(|(tick, model)| *tick <= end && !model.lets(host, writes))
    }

    /// Checks that a host may read or write now.
    pub(crate) fn check(&self, host: Option<usize>, writes: bool) {
        let mut state = self.state();
        let Some(host) = host.filter(|host| !state.reservations.lets(*host, writes)) else {
            return;
        };
        let what = if writes { "writes to" } else { "reads from" };
        let shown = format!(
            "host {host} {what} namespace {} without the right: {:?}",
            self.shape.nsid, state.reservations
        );
        state.violation.get_or_insert(shown);
    }

    /// Writes blocks in their order, as far as the disk does. Returns false if that fails.
    pub(crate) fn write(&self, host: Option<usize>, offset: u64, bytes: &[u8]) -> bool {
        self.check(host, true);
        let mut state = self.state();
        let number = bytes.len() / BLOCK;
        let one_in = state.fails.write;
        let fails = one_in > 0 && state.dice.one_in(one_in);
        for (at, block) in bytes.chunks_exact(BLOCK).enumerate() {
            // A failed write has written any of its blocks.
            if fails && state.dice.one_in(2) {
                continue;
            }
            match value(block) {
                Some(value) => state.put(offset as usize / BLOCK + at, value, self.shape.has_cache),
                None => {
                    let what = format!("block {at} of a write of {number} is garbled");
                    state.violation.get_or_insert(what);
                }
            }
        }
        state.write_failures += u64::from(fails);
        !fails
    }

    /// Writes some blocks of a write that was not over when its process died.
    pub(crate) fn tear(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.state();
        for (at, block) in bytes.chunks_exact(BLOCK).enumerate() {
            if let Some(value) = value(block)
                && state.dice.one_in(2)
            {
                state.put(offset as usize / BLOCK + at, value, self.shape.has_cache);
            }
        }
    }

    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) {
        let state = self.state();
        for (at, block) in out.chunks_exact_mut(BLOCK).enumerate() {
            fill(state.cached[offset as usize / BLOCK + at], block);
        }
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        let now = self.ticks.next();
        let mut state = self.state();
        let State {
            dice,
            cached,
            media,
            dirty,
            forgotten,
            fails,
            ..
        } = &mut *state;
        if fails.flush > 0 && dice.one_in(fails.flush) {
            // Blocks that were not written are taken for written from now on.
            for (block, values) in std::mem::take(dirty) {
                match dice.one_in(2) {
                    true => media[block] = cached[block],
                    false => forgotten.entry(block).or_default().extend(values),
                }
            }
            state.flush_failures += 1;
            state.failed_last = now;
            state.failed.get_or_insert(now);
            return Err(io::Error::other("the medium has failed"));
        }
        for block in std::mem::take(dirty).into_keys() {
            media[block] = cached[block];
        }
        Ok(())
    }

    /// The power is cut: of each block that was not flushed, any version since then may be left.
    pub(crate) fn cut_power(&self) {
        let mut state = self.state();
        let State {
            dice,
            cached,
            media,
            dirty,
            forgotten,
            ..
        } = &mut *state;
        let lost = std::mem::take(forgotten).into_iter();
        for (block, values) in lost.chain(std::mem::take(dirty)) {
            let kept = dice.below(values.len() as u64 + 1) as usize;
            if let Some(value) = values.get(kept) {
                media[block] = *value;
            }
        }
        cached.clone_from(media);
    }
}

impl State {
    fn put(&mut self, block: usize, value: Value, has_cache: bool) {
        self.cached[block] = value;
        match has_cache {
            true => {
                // A forgotten block is written with the next one at its place.
                self.forgotten.remove(&block);
                self.dirty.entry(block).or_default().push(value);
            }
            false => self.media[block] = value,
        }
    }
}

/// A disk as one life of the target has it open.
#[derive(Debug)]
pub(crate) struct SimBackend {
    disk: Arc<Disk>,
    bytes: AtomicU64,
    flushes: Flushes,
    /// Nothing uses it: accesses of the simulated io_uring are the simulation's.
    file: Arc<File>,
}

impl SimBackend {
    pub(crate) fn open(disk: Arc<Disk>, file: Arc<File>) -> SimBackend {
        let mut state = disk.state();
        state.failed = None;
        let bytes = state.blocks * BLOCK as u64;
        drop(state);
        SimBackend {
            disk,
            bytes: AtomicU64::new(bytes),
            flushes: Flushes::default(),
            file,
        }
    }

    /// Writes in two parts, between which others run.
    fn write_parts(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let host = media::running_host();
        let first = bytes.len() / BLOCK / 2 * BLOCK;
        for (at, part) in [(0, &bytes[..first]), (first, &bytes[first..])] {
            if part.is_empty() {
                continue;
            }
            media::stir();
            if !self.disk.write(host, offset + at as u64, part) {
                return Err(Status::WRITE_FAULT);
            }
        }
        Ok(())
    }
}

impl Backend for SimBackend {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn measure(&self, _: u64) -> io::Result<()> {
        let blocks = self.disk.state().blocks;
        self.bytes.store(blocks * BLOCK as u64, Ordering::Relaxed);
        Ok(())
    }

    fn may_wait(&self) -> bool {
        self.disk.shape.may_wait
    }

    fn file(&self, direction: Direction) -> Option<&Arc<File>> {
        let takes = direction == Direction::Read || self.flushes.check().is_ok();
        (self.disk.shape.has_file && takes).then_some(&self.file)
    }

    fn has_write_cache(&self) -> bool {
        self.disk.shape.has_cache
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        self.disk.check(media::running_host(), false);
        let first = out.len() / BLOCK / 2 * BLOCK;
        let (begin, rest) = out.split_at_mut(first);
        self.disk.read(offset, begin);
        media::stir();
        self.disk.read(offset + first as u64, rest);
        media::stir();
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.flushes.check()?;
        self.write_parts(offset, bytes)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.flushes.check()?;
        self.write_parts(offset, &vec![0; length as usize])
    }

    fn flush(&self) -> Result<(), Status> {
        media::stir();
        self.flushes.run(|| self.disk.sync())
    }

    fn pause(&self) {
        media::pause(self.disk.shape.nsid);
    }
}

/// Reservations that outlast the target, by namespace.
#[derive(Debug, Default)]
pub(crate) struct Store(Mutex<Stored>);

#[derive(Debug, Default)]
struct Stored {
    states: BTreeMap<[u8; 16], ReservationState>,
    /// Saves that fail, from the next one on.
    failing: u32,
    failed: bool,
}

impl Store {
    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fail_next(&self) {
        self.stored().failing = 1;
    }

    /// Returns true once after a save has failed.
    pub(crate) fn take_failed(&self) -> bool {
        std::mem::take(&mut self.stored().failed)
    }
}

impl ReservationStore for Store {
    fn load(&self, namespace: &[u8; 16]) -> io::Result<Option<ReservationState>> {
        Ok(self.stored().states.get(namespace).cloned())
    }

    fn save(&self, namespace: &[u8; 16], state: Option<&ReservationState>) -> io::Result<()> {
        let mut stored = self.stored();
        if stored.failing > 0 {
            stored.failing -= 1;
            stored.failed = true;
            return Err(io::Error::other("the disk is full"));
        }
        match state {
            Some(state) => stored.states.insert(*namespace, state.clone()),
            None => stored.states.remove(namespace),
        };
        Ok(())
    }
}
