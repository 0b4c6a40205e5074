//! A drive, and the states by which it comes up and goes down.
//!
//! Read the doc of [`Drive`] first; the specification's sections are NVMe Base 2.0, 3.5 (initialization) and 3.6 (shutdown), and NVMe over PCIe
//! Transport 1.0, 3.

mod change;
mod ready;
mod regions;
mod start;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::ledger::{Class, Ledger, Location, Route, book};
use rdmux_wire::nvme::{
    CmbLayout, Configuration, ControllerStatus, DatasetRange, DriveController, NsId, PcieCapabilities,
    PmrCapabilities, Register, Status,
};

use crate::Function;
use crate::command::{Action, Command, Completion, Outcome, Refused, RefusedReason};
use crate::memory::{Buffer, MemoryKind, PAGE, Pool};
use crate::namespace::{DriveNamespace, Unusable};
use crate::prp;
use crate::queue::{ENTRIES_MAX, Queue};
use regions::{open_cmb, open_pmr};
use start::Admin;

/// Time between two looks at the status of a drive that has commands.
const LOOK: Duration = Duration::from_millis(10);
/// Time between two looks at one that is to change its state.
const LOOK_AT_CHANGE: Duration = Duration::from_millis(1);
/// Unit of the drive's longest time to change its state (CAP.TO).
const TIMEOUT_UNIT: Duration = Duration::from_millis(500);
/// Longest time in which a drive shuts down, after which it is switched off.
const SHUT_DOWN_MAX: Duration = Duration::from_secs(10);
/// Resets in a row between which no command was completed.
const RESETS_MAX: u32 = 3;
/// Most queue pairs.
const QUEUES_MAX: u16 = 64;

/// Settings of a drive.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs, 1 to 64; the drive may give fewer.
    pub queues: u16,
    /// Entries of each, 2 to 64; the drive may take fewer. One less is the number of commands at a time.
    pub entries: u16,
    /// Bytes of the host's memory for data.
    pub dram_bytes: usize,
    /// Uses the drive's Controller Memory Buffer, which it must have.
    pub cmb: bool,
    /// Uses the drive's Persistent Memory Region, which it must have.
    pub pmr: bool,
    /// Time after which a command is aborted, and the drive reset if that has not helped after the same time.
    pub timeout: Duration,
    /// Bytes of a second memory of the host for data ([`Drive::staging`]); 0: none.
    pub staging_bytes: usize,
    /// Ledger of the bytes that cross the drive's links.
    pub ledger: Option<Arc<Ledger>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            queues: 1,
            entries: ENTRIES_MAX,
            dram_bytes: 4 << 20,
            cmb: false,
            pmr: false,
            timeout: Duration::from_secs(10),
            staging_bytes: 0,
            ledger: None,
        }
    }
}

/// Reason for which a drive cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DriveError {
    /// It does not answer.
    #[error("the drive does not answer: it was removed, has no power, or its memory space is off")]
    Gone,
    /// It reports that it has failed.
    #[error("the drive reports a fatal error: power it off and on, or replace it")]
    Fatal,
    /// It has not stopped within its own time.
    #[error("the drive did not stop within {0:?}, its own limit: power it off and on")]
    NotStopped(Duration),
    /// It has not started within its own time.
    #[error("the drive did not start within {0:?}, its own limit: power it off and on")]
    NotStarted(Duration),
    /// It did not complete commands, and resets did not help.
    #[error("the drive did not answer commands, after {0} resets: power it off and on")]
    NoAnswers(u32),
    /// Its pages are too large.
    #[error(
        "the drive has pages of at least {0} bytes, and this driver those of 4096: leave it to the kernel's driver"
    )]
    PageSize(u64),
    /// It lacks the NVM command set, or entries of the usual size.
    #[error("the drive has no {0}: leave it to the kernel's driver")]
    Lacks(&'static str),
    /// Its doorbells do not lie in its BAR.
    #[error("the drive has doorbells behind its registers, which end at {0} bytes: replace it")]
    Doorbells(u64),
    /// It has refused a command of its start.
    #[error("the drive refuses {what}: {status}")]
    Refused {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// It has no memory of a kind that is to be used.
    #[error("the drive has no {0}: use other buffers, as buffers=dram")]
    NoMemory(MemoryKind),
    /// Memory of it cannot be used.
    #[error("{} cannot be used: {why}", memory(*kind))]
    Memory {
        /// The memory.
        kind: MemoryKind,
        /// The reason.
        why: Arc<io::Error>,
    },
}

fn memory(kind: MemoryKind) -> String {
    match kind {
        MemoryKind::Dram => "memory of the host".to_owned(),
        MemoryKind::Cmb | MemoryKind::Pmr => format!("the drive's {kind}"),
    }
}

/// State of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It starts, or is reset: it will be ready, or fail.
    Starting,
    /// It takes commands.
    Ready,
    /// It shuts down.
    Stopping,
    /// It is off.
    Off,
    /// It cannot be used any more: [`Drive::failure`] says why.
    Failed,
}

#[derive(Debug)]
enum Phase {
    /// It is to become not ready, after which nothing moves.
    Disabling {
        deadline: Instant,
        then: Then,
    },
    /// Its persistent memory region is to become ready.
    EnablingPmr {
        deadline: Instant,
    },
    /// It is to become ready.
    Enabling {
        deadline: Instant,
    },
    /// It is asked what it has, and gets its queues.
    SetUp,
    Ready,
    ShuttingDown {
        deadline: Instant,
    },
    Off,
    Failed,
}

/// Next step after a drive was disabled.
#[derive(Clone, Debug)]
enum Then {
    Start,
    Off,
    Fail(DriveError),
}

/// A command of a namespace.
#[derive(Clone, Copy, Debug)]
struct Io {
    token: u64,
    /// Data that the drive moves for it.
    bytes: usize,
    at: Location,
}

/// A queue pair for I/O, and a page for each of its commands: a PRP list, or the range of Deallocate.
#[derive(Debug)]
struct IoQueue {
    queue: Queue<Io>,
    pages: Buffer,
}

/// A drive.
///
/// It has neither a thread nor a clock. [`Drive::new`] begins its start; from then on its owner calls [`Drive::poll`] until it returns nothing, again and
/// again while commands are outstanding, and by [`Drive::next_look`] at the latest: all that happens, happens there. Once it is
/// [`State::Ready`], [`Drive::submit`] gives it commands. [`Drive::shut_down`] ends it, and calls of `poll` until it is off.
///
/// A command that has taken too long is aborted; if that does not help, the drive is reset, which ends all its commands. A buffer comes back with its
/// command's completion, after the drive has let go of it; that of a drive which cannot be stopped stays with the driver, and is leaked with it.
///
/// Whatever the drive says is checked: a wrong answer is an error, or skipped.
#[derive(Debug)]
pub struct Drive {
    function: Arc<dyn Function>,
    options: Options,
    capabilities: PcieCapabilities,
    phase: Phase,
    failure: Option<DriveError>,
    /// Memory of the host, the CMB and the PMR, as far as they are used; the host's second memory is not among them.
    pools: Vec<Arc<Pool>>,
    staging: Option<Arc<Pool>>,
    cmb: Option<CmbLayout>,
    pmr: Option<PmrCapabilities>,
    admin: Queue<Admin>,
    /// Page for what Identify returns.
    page: Buffer,
    queues: Vec<IoQueue>,
    /// Number of them that the drive has.
    created: usize,
    controller: DriveController,
    listed: Vec<NsId>,
    namespaces: Vec<DriveNamespace>,
    unusable: Vec<(NsId, Unusable)>,
    completions: VecDeque<Completion>,
    next_look: Instant,
    resets: u32,
    /// Of commands that a drive has which did not stop.
    held: Vec<Buffer>,
}

impl Drive {
    /// Begins the start of a drive.
    ///
    /// # Errors
    /// It does not answer, lacks something that is needed, or the system has no memory that it reaches.
    pub fn new(function: Arc<dyn Function>, options: Options, now: Instant) -> Result<Drive, DriveError> {
        let register = function.read_u64(Register::CAPABILITIES.0);
        let version = function.read_u32(Register::VERSION.0);
        if register == u64::MAX || version == u32::MAX || version == 0 {
            return Err(DriveError::Gone);
        }
        let capabilities = PcieCapabilities::parse(register);
        if usize::from(capabilities.page_shift_min) > PAGE.ilog2() as usize {
            return Err(DriveError::PageSize(1 << capabilities.page_shift_min));
        }
        if !capabilities.nvm {
            return Err(DriveError::Lacks("NVM command set"));
        }
        let io_queues = options.queues.clamp(1, QUEUES_MAX);
        let last_doorbell = Register::head_doorbell(io_queues, capabilities.doorbell_stride);
        if u64::from(last_doorbell.0) + 4 > function.register_bytes() {
            return Err(DriveError::Doorbells(function.register_bytes()));
        }
        let dram = |error| DriveError::Memory {
            kind: MemoryKind::Dram,
            why: Arc::new(error),
        };
        let entries = u32::from(options.entries.clamp(2, ENTRIES_MAX)).min(capabilities.common.queue_entries);
        let entries = entries.max(2) as u16;
        // Rings, the page of Identify, and a page for each command.
        let own = 3 + usize::from(io_queues) * (2 + usize::from(entries));
        let rings = Pool::dram(&*function, own * PAGE).map_err(dram)?;
        let data = Pool::dram(&*function, options.dram_bytes).map_err(dram)?;
        let mut pools = vec![data];
        let staging = match options.staging_bytes {
            0 => None,
            bytes => Some(Pool::dram(&*function, bytes).map_err(dram)?),
        };
        let cmb = match options.cmb {
            true => Some(open_cmb(&*function, capabilities, &mut pools)?),
            false => None,
        };
        let pmr = match options.pmr {
            true => Some(open_pmr(&*function, capabilities, &mut pools)?),
            false => None,
        };
        let ring = |pool: &Arc<Pool>| {
            pool.allocate(PAGE)
                .ok_or_else(|| dram(io::ErrorKind::OutOfMemory.into()))
        };
        let stride = if mutant!(StrideIgnored) {
            4
        } else {
            capabilities.doorbell_stride
        };
        let admin_entries = ENTRIES_MAX;
        let ledger = options.ledger.clone();
        let admin = Queue::new(0, admin_entries, stride, ring(&rings)?, ring(&rings)?, ledger);
        let mut queues = Vec::new();
        for qid in 1..=io_queues {
            // A queue in the drive's memory spares the drive a read over the bus.
            let in_cmb = cmb.filter(|cmb| cmb.submission_queues);
            let in_cmb = in_cmb.and_then(|_| pools.iter().find(|pool| pool.kind() == MemoryKind::Cmb));
            let submission = ring(in_cmb.unwrap_or(&rings))?;
            let ledger = options.ledger.clone();
            let queue = Queue::new(qid, entries, stride, submission, ring(&rings)?, ledger);
            let pages = rings.allocate(usize::from(entries) * PAGE);
            let pages = pages.ok_or_else(|| dram(io::ErrorKind::OutOfMemory.into()))?;
            queues.push(IoQueue { queue, pages });
        }
        let mut drive = Drive {
            page: ring(&rings)?,
            function,
            options,
            capabilities,
            phase: Phase::Off,
            failure: None,
            pools,
            staging,
            cmb,
            pmr,
            admin,
            queues,
            created: 0,
            controller: DriveController::default(),
            listed: Vec::new(),
            namespaces: Vec::new(),
            unusable: Vec::new(),
            completions: VecDeque::new(),
            next_look: now,
            resets: 0,
            held: Vec::new(),
        };
        drive.disable(now, Then::Start);
        Ok(drive)
    }

    /// Returns what it does.
    pub fn state(&self) -> State {
        match self.phase {
            Phase::Disabling {
                then: Then::Start, ..
            }
            | Phase::EnablingPmr { .. }
            | Phase::Enabling { .. }
            | Phase::SetUp => State::Starting,
            Phase::Ready => State::Ready,
            Phase::Disabling { .. } | Phase::ShuttingDown { .. } => State::Stopping,
            Phase::Off => State::Off,
            Phase::Failed => State::Failed,
        }
    }

    /// Returns the reason for which it has failed.
    pub fn failure(&self) -> Option<&DriveError> {
        self.failure.as_ref()
    }

    /// Returns its function.
    pub fn function(&self) -> &Arc<dyn Function> {
        &self.function
    }

    /// Returns what it says of itself, once it is ready.
    pub fn controller(&self) -> &DriveController {
        &self.controller
    }

    /// Returns the layout of its Controller Memory Buffer, if that is used.
    pub fn cmb(&self) -> Option<&CmbLayout> {
        self.cmb.as_ref()
    }

    /// Returns its namespaces that can be used, once it is ready.
    pub fn namespaces(&self) -> &[DriveNamespace] {
        &self.namespaces
    }

    /// Returns those that cannot.
    pub fn unusable(&self) -> &[(NsId, Unusable)] {
        &self.unusable
    }

    /// Returns the number of its queues, once it is ready.
    pub fn queues(&self) -> usize {
        self.created
    }

    /// Returns the most commands that a queue has at a time.
    pub fn commands_max(&self) -> usize {
        self.queues
            .first()
            .map_or(0, |queue| usize::from(queue.queue.entries()) - 1)
    }

    /// Returns the most bytes of data of a command, once it is ready.
    pub fn data_bytes_max(&self) -> usize {
        let page = u32::from(self.capabilities.page_shift_min);
        match self.controller.mdts {
            0 => prp::DATA_BYTES_MAX,
            mdts => 1usize
                .checked_shl(page + u32::from(mdts))
                .map_or(prp::DATA_BYTES_MAX, |bytes| bytes.min(prp::DATA_BYTES_MAX)),
        }
    }

    /// Returns true if it has the command.
    pub fn has(&self, action: Action) -> bool {
        let optional = action.optional();
        self.controller.optional_commands & optional == optional
    }

    /// Returns memory of a kind, if the drive has it and is to use it.
    pub fn pool(&self, kind: MemoryKind) -> Option<&Arc<Pool>> {
        self.pools.iter().find(|pool| pool.kind() == kind)
    }

    /// Returns the host's second memory for data, so that those who use one of both never wait for those who use the other.
    pub fn staging(&self) -> Option<&Arc<Pool>> {
        self.staging.as_ref()
    }

    /// Returns the number of commands that a queue has.
    pub fn outstanding(&self, queue: usize) -> usize {
        self.queues
            .get(queue)
            .map_or(0, |queue| queue.queue.outstanding().count())
    }

    /// Returns the time by which [`Drive::poll`] is to be called though nothing was completed; `None` if nothing is to happen.
    pub fn next_look(&self) -> Option<Instant> {
        match self.phase {
            Phase::Off | Phase::Failed => None,
            Phase::Ready => {
                let mut io = self.queues.iter().flat_map(|queue| queue.queue.outstanding());
                io.next().map(|_| self.next_look)
            }
            _ => Some(self.next_look),
        }
    }

    /// Submits a command to a queue, counted from 0. Data begin at the first buffer's first byte.
    ///
    /// # Errors
    /// The drive does not take it; the buffers are in the error.
    pub fn submit(
        &mut self,
        now: Instant,
        queue: usize,
        command: Command,
        mut data: Vec<Buffer>,
        token: u64,
    ) -> Result<(), Refused> {
        let bytes = match self.check(queue, &command, &data) {
            Ok(bytes) => bytes,
            Err(reason) => return Err(Refused { reason, data }),
        };
        let IoQueue { queue, pages } = &mut self.queues[queue];
        let Some(slot) = queue.free_slot() else {
            return Err(Refused {
                reason: RefusedReason::Full,
                data,
            });
        };
        if mutant!(FlushNotSent) && command.action == Action::Flush {
            self.completions.push_back(Completion {
                token,
                outcome: Outcome::Done(Status::SUCCESS),
                data,
            });
            return Ok(());
        }
        let list_slot = if mutant!(ListsShared) { 0 } else { slot };
        let page = pages.address(list_slot);
        let mut written = Ok(());
        let mut list_bytes = 0;
        let mut io = Io {
            token,
            bytes,
            at: data
                .first()
                .map_or(Location::Dram, |buffer| buffer.kind().location()),
        };
        let prps = if command.action == Action::Deallocate {
            io.bytes = DatasetRange::LEN;
            let range = DatasetRange {
                slba: command.slba,
                blocks: command.blocks,
            };
            let mut bytes = [0; DatasetRange::LEN];
            range.emit(&mut bytes);
            written = pages.write(list_slot * PAGE, &bytes);
            [page, 0]
        } else {
            let copied =
                mutant!(CopiedThroughDram) && command.action == Action::Write && io.at == Location::Drive;
            let copied = copied.then(|| copy_of(&*self.function, &data, bytes)).flatten();
            let moved = copied.as_ref().map_or(&data[..], std::slice::from_ref);
            let Some((prps, list)) = prp::entries(moved, bytes, page) else {
                return Err(Refused {
                    reason: RefusedReason::Short,
                    data,
                });
            };
            if !list.is_empty() {
                let list: Vec<u8> = list.iter().flat_map(|entry| entry.to_le_bytes()).collect();
                written = pages.write(list_slot * PAGE, &list);
                list_bytes = list.len() as u64;
            }
            // It lasts as long as the command.
            data.extend(copied);
            prps
        };
        let sqe = command.sqe(queue.next_cid(slot), prps);
        let deadline = now + self.options.timeout;
        let submitted = match written {
            Ok(()) => queue.submit(&*self.function, slot, &sqe, (io, data, deadline)),
            Err(fault) => Err((fault, data)),
        };
        match submitted {
            Ok(()) => {
                // Lists lie in the host's memory, as ranges do.
                let route = Route::Drive(Location::Dram);
                book(self.options.ledger.as_ref(), route, Class::Command, list_bytes);
                Ok(())
            }
            // Memory of a drive that has gone; the next look at its status ends it.
            Err((_, data)) => Err(Refused {
                reason: RefusedReason::NotReady,
                data,
            }),
        }
    }

    /// Returns the bytes of a command's data.
    fn check(&self, queue: usize, command: &Command, data: &[Buffer]) -> Result<usize, RefusedReason> {
        match self.state() {
            State::Ready => {}
            State::Starting => return Err(RefusedReason::NotReady),
            State::Stopping | State::Off | State::Failed => return Err(RefusedReason::Ended),
        }
        if queue >= self.created {
            return Err(RefusedReason::NoQueue);
        }
        let mut namespaces = self.namespaces.iter();
        let namespace = namespaces.find(|namespace| namespace.nsid == command.nsid);
        let namespace = namespace.ok_or(RefusedReason::NoNamespace)?;
        if !self.has(command.action) {
            return Err(RefusedReason::Unsupported);
        }
        if command.action != Action::Flush {
            let end = command.slba.checked_add(command.blocks.into());
            let is_within = end.is_some_and(|end| end <= namespace.blocks);
            if !is_within || !(1..=0x1_0000).contains(&command.blocks) {
                return Err(RefusedReason::Range);
            }
        }
        if !command.action.has_data() {
            return Ok(0);
        }
        let bytes = u64::from(command.blocks) << namespace.block_shift;
        if bytes > self.data_bytes_max() as u64 {
            return Err(RefusedReason::TooLong);
        }
        let Some((first, others)) = data.split_first() else {
            return Err(RefusedReason::Short);
        };
        if others.iter().any(|buffer| buffer.kind() != first.kind()) && !mutant!(KindsMixed) {
            return Err(RefusedReason::MixedKinds);
        }
        let mut pools = self.pools.iter().chain(&self.staging);
        let pool = pools.find(|pool| first.is_of(pool));
        let pool = pool.ok_or(RefusedReason::Foreign)?;
        if !others.iter().all(|buffer| buffer.is_of(pool)) && !mutant!(KindsMixed) {
            return Err(RefusedReason::Foreign);
        }
        if !pool.takes(command.action) {
            return Err(RefusedReason::Direction(first.kind()));
        }
        match data.iter().map(Buffer::bytes).sum::<usize>() < bytes as usize {
            true => Err(RefusedReason::Short),
            false => Ok(bytes as usize),
        }
    }

    /// Lets happen what is to happen, and returns the end of a command, if one has ended.
    pub fn poll(&mut self, now: Instant) -> Option<Completion> {
        if self.completions.is_empty() {
            self.step(now);
        }
        self.completions.pop_front()
    }

    /// Begins to shut it down, with what it has in volatile caches. Commands that are outstanding end.
    pub fn shut_down(&mut self, now: Instant) {
        match self.phase {
            Phase::Off | Phase::Failed | Phase::ShuttingDown { .. } => {}
            Phase::Disabling { ref mut then, .. } => {
                if matches!(then, Then::Start) {
                    *then = Then::Off;
                }
            }
            Phase::Ready => {
                let configuration = Configuration::enabled().0 | Configuration::SHUT_DOWN;
                self.function.write_u32(Register::CONFIGURATION.0, configuration);
                let deadline = now + SHUT_DOWN_MAX;
                self.phase = Phase::ShuttingDown { deadline };
                self.next_look = now;
            }
            Phase::EnablingPmr { .. } | Phase::Enabling { .. } | Phase::SetUp => {
                self.disable(now, Then::Off);
            }
        }
    }

    fn limit(&self) -> Duration {
        TIMEOUT_UNIT * u32::from(self.capabilities.common.timeout.max(1))
    }

    fn status(&self) -> ControllerStatus {
        ControllerStatus(self.function.read_u32(Register::STATUS.0))
    }

    /// Returns true once in the time between looks.
    fn looks(&mut self, now: Instant, every: Duration) -> bool {
        let looks = now >= self.next_look;
        if looks {
            self.next_look = now + every;
        }
        looks
    }

    fn step(&mut self, now: Instant) {
        match self.phase {
            Phase::Off | Phase::Failed => {}
            Phase::Ready => self.step_ready(now),
            Phase::SetUp => {
                self.take_admin(now);
                self.check_admin(now);
                if matches!(self.phase, Phase::SetUp) && self.looks(now, LOOK_AT_CHANGE) {
                    self.check_status(now);
                }
            }
            Phase::ShuttingDown { deadline } => {
                self.take_io();
                if self.looks(now, LOOK_AT_CHANGE) {
                    let status = self.status();
                    if status.is_gone() {
                        self.end(DriveError::Gone);
                    } else if status.is_shut_down()
                        || status.is_fatal()
                        || now >= deadline
                        || mutant!(ShutdownNotAwaited)
                    {
                        self.disable(now, Then::Off);
                    }
                }
            }
            Phase::Disabling { .. } | Phase::EnablingPmr { .. } | Phase::Enabling { .. } => {
                if self.looks(now, LOOK_AT_CHANGE) {
                    self.step_change(now);
                }
            }
        }
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        let is_stopped = match self.phase {
            Phase::Off => true,
            Phase::Failed => !matches!(self.failure, Some(DriveError::NotStopped(_))),
            _ => false,
        };
        if is_stopped || mutant!(FreedWhileRunning) {
            return;
        }
        self.function.write_u32(Register::CONFIGURATION.0, 0);
        let status = self.status();
        if status.is_gone() || !status.is_ready() {
            return;
        }
        // The drive may move data for a while: the memory that it knows must not become anything else. Each buffer keeps its pool.
        for queue in self.queues.drain(..) {
            std::mem::forget(queue);
        }
        std::mem::forget(std::mem::take(&mut self.held));
        std::mem::forget(std::mem::take(&mut self.pools));
        std::mem::forget(self.staging.take());
    }
}

/// Returns a copy of data in the host's memory: of a deliberate defect.
fn copy_of(function: &dyn Function, data: &[Buffer], bytes: usize) -> Option<Buffer> {
    let copy = Pool::dram(function, bytes).ok()?.allocate(bytes)?;
    let mut at = 0;
    for buffer in data {
        let mut part = vec![0; buffer.bytes().min(bytes - at)];
        buffer.read(0, &mut part).ok()?;
        copy.write(at, &part).ok()?;
        at += part.len();
    }
    Some(copy)
}
