//! Regions with release consistency: memory of its own kinds beside the frames, and the tasks of [`release::Node`].

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Access as Rights, MemoryRegion, ProtectionDomain, RKey, RemoteBuffer, Sge};
use rdmux_wire::dsm::notice::{HEADER_LEN, LOG_LEN, Run};
use rdmux_wire::dsm::{MESSAGE_LEN, Message, NodeId};

use super::{Driver, Pull, Read, Region};
use crate::memory::Access;
use crate::peers::Ahead;
use crate::protocol;
use crate::region::Pages;
use crate::release::log::{Reader, Rest};
use crate::release::{Action, Looked, Node, SLOTS, diff, log, run_max};
use crate::session::Error;
use crate::stat::RegionCounter;

/// Memory of a region with release consistency beside its frames. Others read the twins and the log. What is not used takes no memory.
#[derive(Debug)]
pub(crate) struct Shadow {
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
    layout: Layout,
    /// Keys of the others' shadows, by the numbers of the nodes.
    keys: Vec<Option<RemoteBuffer>>,
}

/// Places in a shadow, in bytes, at each node the same: the twins of the units, the node's log, copies of units and their twins for each flush, and
/// copies of the others' logs.
#[derive(Clone, Copy, Debug)]
struct Layout {
    frames: u64,
    unit: u64,
}

impl Layout {
    /// Returns the units of a flush at most.
    fn run_max(&self) -> u32 {
        run_max(self.unit)
    }

    /// Returns the bytes of units.
    fn bytes(&self, run: Run) -> Range<u64> {
        let units = run.units();
        units.start * self.unit..units.end * self.unit
    }

    fn log(&self) -> u64 {
        self.frames
    }

    /// Returns the place of the copies of a flush.
    fn slot(&self, slot: usize) -> u64 {
        let logs = (LOG_LEN as u64).next_multiple_of(self.unit);
        self.log() + logs + 2 * self.run_bytes() * slot as u64
    }

    /// Returns the place of the twins of a flush.
    fn slot_twins(&self, slot: usize) -> u64 {
        self.slot(slot) + self.run_bytes()
    }

    fn run_bytes(&self) -> u64 {
        self.unit * u64::from(self.run_max())
    }

    fn look(&self, node: u32) -> u64 {
        self.slot(SLOTS) + LOG_LEN as u64 * u64::from(node)
    }
}

impl Shadow {
    /// Makes the shadow of a region, whose units have so many bytes.
    ///
    /// # Errors
    /// The system lacks memory, or the device.
    pub(crate) fn new(pd: &ProtectionDomain, bytes: u64, unit: u64, nodes: u32) -> Result<Shadow, Error> {
        let layout = Layout { frames: bytes, unit };
        let all = layout
            .look(nodes)
            .next_multiple_of(rustix::param::page_size() as u64);
        let memory = usize::try_from(all).map_err(io::Error::other);
        let memory = memory.and_then(AnonymousMemory::shareable);
        let memory = Arc::new(memory.map_err(|error| Error::NoMemory { bytes, error })?);
        let advised = memory.mapping().refuse_huge_pages();
        advised.map_err(|error| Error::NoMemory { bytes, error })?;
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_READ;
        Ok(Shadow {
            mr: pd.reg_mr_all(memory.clone(), 0, rights)?,
            memory,
            layout,
            keys: vec![None; nodes as usize],
        })
    }

    /// Returns the key by which others read it.
    pub(crate) fn key(&self) -> u32 {
        self.mr.rkey().0
    }

    /// Returns the words of a unit at an offset.
    fn words(&self, at: u64) -> &[AtomicU64] {
        let words = self.layout.unit as usize / 8;
        self.memory.mapping().double_words(at as usize, words)
    }
}

/// State machine that decides who may access a unit of a region.
#[derive(Debug)]
pub(super) enum Coherence {
    /// Sequential consistency.
    Sequential(Box<protocol::Node>),
    /// Release consistency.
    Release(Box<Part>),
}

/// A node's part of a region with release consistency.
#[derive(Debug)]
pub(super) struct Part {
    node: Node,
    shadow: Shadow,
    /// Reads in progress of flushes, by slot.
    fetches: [Reads; SLOTS],
    /// Those of logs, by node.
    looks: Vec<(Reader, Reads)>,
}

/// Reads that belong together.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    left: u32,
    has_failed: bool,
}

impl Reads {
    fn begin(&mut self, left: u32) {
        let has_failed = false;
        *self = Reads { left, has_failed };
    }

    /// Notes the end of one. Returns whether all have landed, after the last one.
    fn end(&mut self, has_landed: bool) -> Option<bool> {
        self.has_failed |= !has_landed;
        self.left = self.left.saturating_sub(1);
        (self.left == 0).then_some(!self.has_failed)
    }
}

/// Reads of another node's memory that only regions with release consistency have.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReleaseRead {
    /// Copies of units for a flush, into a slot.
    Copies { run: Run, slot: usize },
    /// Their twins.
    Twins { run: Run, slot: usize },
    /// Units for the flush of a slot, into the frames.
    Frames { run: Run, slot: usize },
    /// The header of a log.
    Header,
    /// Bytes of a log, and then its header again.
    Rest { start: u32, end: u32 },
}

impl ReleaseRead {
    /// Counts what has landed, by the bytes of a unit.
    fn count(self, unit: u64, count: impl Fn(RegionCounter, u64)) {
        let of_flush = |run: Run| count(RegionCounter::FlushReadBytes, u64::from(run.count) * unit);
        let of_log = |bytes| {
            count(RegionCounter::LogReads, 1);
            count(RegionCounter::LogReadBytes, bytes);
        };
        match self {
            ReleaseRead::Copies { run, .. } => {
                count(RegionCounter::MergedUnits, run.count.into());
                of_flush(run);
            }
            ReleaseRead::Twins { run, .. } => of_flush(run),
            ReleaseRead::Frames { run, .. } => {
                count(RegionCounter::LandedUnits, run.count.into());
                of_flush(run);
            }
            ReleaseRead::Header => of_log(HEADER_LEN as u64),
            ReleaseRead::Rest { start, end } => of_log(u64::from(end - start)),
        }
    }
}

impl Part {
    fn new(node: Node, shadow: Shadow) -> Part {
        Part {
            node,
            fetches: [Reads::default(); SLOTS],
            looks: vec![(Reader::default(), Reads::default()); shadow.keys.len()],
            shadow,
        }
    }
}

impl Coherence {
    /// Makes the part of a node.
    pub(super) fn new(own: NodeId, settings: &protocol::Settings, shadow: Option<Shadow>) -> Coherence {
        match shadow {
            Some(shadow) => {
                let node = Node::new(own, settings, SLOTS, shadow.layout.run_max());
                Coherence::Release(Box::new(Part::new(node, shadow)))
            }
            None => Coherence::Sequential(Box::new(protocol::Node::new(own, settings))),
        }
    }

    /// Notes the key of another node's shadow.
    pub(super) fn learn_key(&mut self, from: u32, key: u32) {
        if let Coherence::Release(part) = self
            && let Some(place) = part.shadow.keys.get_mut(from as usize)
        {
            *place = Some(RemoteBuffer {
                address: 0,
                length: part.shadow.mr.length(),
                rkey: RKey(key),
            });
        }
    }

    pub(super) fn handle_fault(&mut self, unit: u64, access: Access) {
        match self {
            Coherence::Sequential(node) => node.handle_fault(unit, access),
            Coherence::Release(part) => part.node.handle_fault(unit, access),
        }
    }

    pub(super) fn handle_message(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead> {
        match self {
            Coherence::Sequential(node) => node.handle_message(from, message),
            Coherence::Release(part) => part.node.handle_message(from, message),
        }
    }

    pub(super) fn handle_pulled(&mut self, unit: u64, task: u64, has_landed: bool) {
        match self {
            Coherence::Sequential(node) => node.handle_pulled(unit, task, has_landed),
            Coherence::Release(part) => part.node.handle_pulled(unit, task, has_landed),
        }
    }

    pub(super) fn handle_gone(&mut self, epoch: u64, gone: &[NodeId]) {
        match self {
            Coherence::Sequential(node) => node.handle_gone(epoch, gone),
            Coherence::Release(part) => part.node.handle_gone(epoch, gone),
        }
    }

    pub(super) fn is_awaited(&self, unit: u64) -> bool {
        match self {
            Coherence::Sequential(node) => node.is_awaited(unit),
            Coherence::Release(part) => part.node.is_awaited(unit),
        }
    }

    /// Returns the waits for other nodes.
    pub(super) fn waits(&self) -> Box<dyn Iterator<Item = protocol::Wait> + '_> {
        match self {
            Coherence::Sequential(node) => Box::new(node.waits()),
            Coherence::Release(part) => Box::new(part.node.waits()),
        }
    }

    /// Returns the nodes that an acquire waits for to settle, each with the epoch, of a region with release consistency.
    pub(super) fn awaits_settled(&self) -> Option<impl Iterator<Item = (u64, NodeId)>> {
        match self {
            Coherence::Sequential(_) => None,
            Coherence::Release(part) => Some(part.node.awaits_settled()),
        }
    }
}

/// A release or an acquire of all regions, which a thread waits for.
#[derive(Debug)]
pub(crate) struct Rounds {
    began: Instant,
    /// The number of each region and of its round, which is 0 where nothing is to be done.
    of: Vec<(u32, u64)>,
}

impl Driver {
    /// Begins something in all regions with release consistency. Of one that is not made the program has no copies, and the log of a node that has not
    /// mapped it cannot be read.
    fn begin(&mut self, counter: RegionCounter, f: impl Fn(&mut Node) -> u64) -> Rounds {
        let mut rounds = Rounds {
            began: Instant::now(),
            of: Vec::new(),
        };
        for number in 0..self.regions.len() as u32 {
            let is_made = self.region(number).is_some_and(|it| it.is_made);
            if is_made && let Some(part) = self.part(number) {
                let round = f(&mut part.node);
                rounds.of.push((number, round));
                self.sheet.raise_region(number, counter, round);
                self.decided(number);
            }
        }
        rounds
    }

    /// Begins to release all that the threads of this node have written.
    pub(crate) fn begin_release(&mut self) -> Rounds {
        self.begin(RegionCounter::Releases, Node::handle_release)
    }

    /// Begins to acquire what others have released.
    pub(crate) fn begin_acquire(&mut self) -> Rounds {
        self.begin(RegionCounter::Acquires, Node::handle_acquire)
    }

    /// Returns whether a release has ended.
    ///
    /// # Errors
    /// The home of units that had to be flushed.
    pub(crate) fn released(&mut self, rounds: &Rounds) -> Result<bool, NodeId> {
        self.carry_out();
        let mut failed = None;
        for (number, round) in &rounds.of {
            let outcome = self
                .part(*number)
                .map_or(Some(Ok(())), |part| part.node.released(*round));
            match outcome {
                None => return Ok(false),
                Some(outcome) => failed = failed.or(outcome.err()),
            }
        }
        self.count_wait(rounds, RegionCounter::ReleaseWaitNs);
        failed.map_or(Ok(true), Err)
    }

    /// Returns whether an acquire has ended.
    pub(crate) fn acquired(&mut self, rounds: &Rounds) -> bool {
        self.carry_out();
        let has_ended =
            |(number, round): &(u32, u64)| self.part(*number).is_none_or(|part| part.node.acquired(*round));
        let have_ended = rounds.of.iter().all(has_ended);
        if have_ended {
            self.count_wait(rounds, RegionCounter::AcquireWaitNs);
        }
        have_ended
    }

    /// Counts the time that a thread has waited.
    fn count_wait(&self, rounds: &Rounds, counter: RegionCounter) {
        let time = rounds.began.elapsed().as_nanos() as u64;
        for (number, _) in rounds.of.iter().filter(|(_, round)| *round > 0) {
            self.sheet.count_region(*number, counter, time);
        }
    }

    /// Returns this node's part of a region, if that has release consistency.
    fn part(&mut self, number: u32) -> Option<&mut Part> {
        match &mut self.region(number)?.coherence {
            Coherence::Release(part) => Some(part),
            Coherence::Sequential(_) => None,
        }
    }

    /// Carries out what a region's state machine has decided. Returns false if it has another kind of consistency.
    pub(super) fn carry_out_release(&mut self, number: u32) -> bool {
        while let Some(region) = self.region(number) {
            let Coherence::Release(part) = &mut region.coherence else {
                return false;
            };
            let action = part.node.poll_action();
            // Rights are changed together, before all that relies on them. Copying does not: nobody could write such a unit before.
            match action {
                Some(Action::Protect { unit, right }) => {
                    region.protections.push((unit, 0, right));
                    continue;
                }
                Some(Action::Copy { unit }) => {
                    let at = unit * part.shadow.layout.unit;
                    diff::copy(words(&region.pages, at, &part.shadow), part.shadow.words(at));
                    region.sheet.count_region(number, RegionCounter::Twins, 1);
                    continue;
                }
                _ => {}
            }
            match region.protect() {
                Ok(0) => {}
                Ok(_) => self.changes += 1,
                Err(error) => self.fail(error),
            }
            let Some(action) = action else { return true };
            self.carry_out_release_action(number, action);
        }
        true
    }

    fn carry_out_release_action(&mut self, number: u32, action: Action) {
        let Some(region) = self.region(number) else { return };
        let Coherence::Release(part) = &mut region.coherence else {
            return;
        };
        let shadow = &part.shadow;
        match action {
            Action::Send { to, message } => {
                self.count_message(number, to, message.body);
                let mut bytes = [0; MESSAGE_LEN];
                message.emit(&mut bytes);
                self.send(to.number(), bytes);
            }
            Action::Pull { unit, task, from } => {
                self.read_from(number, from, Read::Contents { unit, task });
            }
            // Those are carried out before.
            Action::Copy { .. } | Action::Protect { .. } => {}
            Action::Wake { unit } => {
                let woken = region.pages.wake(unit as u32);
                self.changes += 1;
                self.note_failure(woken);
            }
            Action::Poison { unit, node } => {
                let poisoned = region.pages.poison(unit as u32, node);
                self.changes += 1;
                self.note_failure(poisoned);
            }
            Action::Compare { run, task } => {
                let differs = |unit: u64| {
                    let at = unit * shadow.layout.unit;
                    diff::differ(words(&region.pages, at, shadow), shadow.words(at))
                };
                let differ: Vec<bool> = run.units().map(differs).collect();
                part.node.handle_compared(task, &differ);
            }
            Action::Fetch { run, slot, from } => {
                part.fetches[slot].begin(2);
                for read in [
                    ReleaseRead::Copies { run, slot },
                    ReleaseRead::Twins { run, slot },
                ] {
                    self.read_from(number, from, Read::Release(read));
                }
            }
            Action::Land { run, slot, from } => {
                part.fetches[slot].begin(1);
                self.read_from(number, from, Read::Release(ReleaseRead::Frames { run, slot }));
            }
            Action::Apply { run, slot, is_shared } => {
                let Layout { unit: bytes, .. } = shadow.layout;
                let (copies, twins) = (shadow.layout.slot(slot), shadow.layout.slot_twins(slot));
                let store = |(index, unit): (u64, u64)| {
                    let copy = shadow.words(copies + index * bytes);
                    let twin = shadow.words(twins + index * bytes);
                    let frame = words(&region.pages, unit * bytes, shadow);
                    match is_shared {
                        true => diff::store_changes_beside_writers(copy, twin, frame),
                        false => diff::store_changes(copy, twin, frame),
                    }
                };
                let are_same: Vec<bool> = (0..).zip(run.units()).map(store).collect();
                part.node.handle_applied(slot, &are_same);
            }
            Action::Append { run } => {
                log::append(shadow.memory.mapping(), shadow.layout.log() as usize, run);
            }
            Action::Look { node } => self.read_from(number, node, Read::Release(ReleaseRead::Header)),
            Action::Ended => self.changes += 1,
            Action::Accuse { node, violation } => self.lose(node.number(), violation.into()),
        }
    }

    /// Begins to read memory of another node.
    fn read_from(&mut self, region: u32, from: NodeId, read: Read) {
        let from = from.number();
        self.read_memory(Pull { region, from, read });
    }

    /// Takes the end of such a read.
    pub(super) fn release_read(&mut self, number: u32, from: u32, read: ReleaseRead, has_landed: bool) {
        let Some(region) = self.region(number) else { return };
        let Coherence::Release(part) = &mut region.coherence else {
            return;
        };
        let Part {
            node,
            shadow,
            fetches,
            looks,
        } = &mut **part;
        if has_landed {
            let count = |counter, n| region.sheet.count_region(number, counter, n);
            read.count(shadow.layout.unit, count);
        }
        if let ReleaseRead::Copies { slot, .. }
        | ReleaseRead::Twins { slot, .. }
        | ReleaseRead::Frames { slot, .. } = read
        {
            if let Some(have_landed) = fetches[slot].end(has_landed) {
                node.handle_fetched(slot, have_landed);
            }
            return;
        }
        let (Some((reader, reads)), Some(peer)) = (looks.get_mut(from as usize), NodeId::new(from)) else {
            return;
        };
        let at = shadow.layout.look(from);
        let copy = |bytes: &mut [u8]| {
            let copied = shadow.memory.mapping().read(at, bytes);
            copied.expect("the shadow has a place for each log");
        };
        match read {
            _ if !has_landed => {
                reads.end(false);
                node.handle_looked(peer, Looked::Failed);
            }
            ReleaseRead::Header => {
                let mut header = [0; HEADER_LEN];
                copy(&mut header);
                match reader.begin(&header) {
                    Rest::Done(looked) => node.handle_looked(peer, looked),
                    Rest::Read(parts) => {
                        let parts = parts.into_iter().chain(std::iter::once(0..HEADER_LEN));
                        let parts: Vec<Range<usize>> = parts.filter(|it| !it.is_empty()).collect();
                        reads.begin(parts.len() as u32);
                        for Range { start, end } in parts {
                            let (start, end) = (start as u32, end as u32);
                            self.read_from(number, peer, Read::Release(ReleaseRead::Rest { start, end }));
                        }
                    }
                }
            }
            _ => {
                if reads.end(true) == Some(true) {
                    let mut bytes = vec![0; LOG_LEN];
                    copy(&mut bytes);
                    node.handle_looked(peer, reader.end(&bytes));
                }
            }
        }
    }
}

/// Returns the words of a unit at an offset in the frames.
fn words<'a>(pages: &'a Pages, at: u64, shadow: &Shadow) -> &'a [AtomicU64] {
    let mapping = pages.view().alias().mapping();
    mapping.double_words(at as usize, shadow.layout.unit as usize / 8)
}

impl Region {
    /// Returns the memory here and there of a read.
    pub(super) fn release_buffers(&self, from: u32, read: ReleaseRead) -> Option<(Sge, RemoteBuffer)> {
        let Coherence::Release(part) = &self.coherence else {
            return None;
        };
        let Shadow { mr, layout, keys, .. } = &part.shadow;
        let from = from as usize;
        let shadow = keys.get(from).copied().flatten()?;
        let frames = self.keys.get(from).copied().flatten();
        let (key, at, into, len) = match read {
            ReleaseRead::Frames { run, .. } => {
                let bytes = layout.bytes(run);
                let into = self.mr.sge(bytes.start, (bytes.end - bytes.start) as u32);
                return Some((into, frames?.slice(bytes)?));
            }
            ReleaseRead::Copies { run, slot } => {
                let bytes = layout.bytes(run);
                (frames?, bytes.start, layout.slot(slot), bytes.end - bytes.start)
            }
            ReleaseRead::Twins { run, slot } => {
                let bytes = layout.bytes(run);
                (
                    shadow,
                    bytes.start,
                    layout.slot_twins(slot),
                    bytes.end - bytes.start,
                )
            }
            ReleaseRead::Header => (shadow, layout.log(), layout.look(from as u32), HEADER_LEN as u64),
            ReleaseRead::Rest { start, end } => {
                let (start, len) = (u64::from(start), u64::from(end - start));
                (
                    shadow,
                    layout.log() + start,
                    layout.look(from as u32) + start,
                    len,
                )
            }
        };
        Some((mr.sge(into, len as u32), key.slice(at..at + len)?))
    }
}
