//! A drive, and the states by which it comes up and goes down.
//!
//! Read the doc of [`Drive`] first; the specification's sections are NVMe Base 2.0, 3.5 (initialization) and 3.6 (shutdown), and NVMe over PCIe
//! Transport 1.0, 3.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::ledger::{Class, Ledger, Location, Route, book};
use rdmux_wire::nvme::{
    Cid, CmbControl, CmbLayout, Cns, Configuration, ControllerStatus, Cqe, DatasetRange, DriveController,
    IDENTIFY_LEN, NsId, Opcode, PMR_ENABLE, PMR_NOT_READY, PMR_SPACE, PcieCapabilities, PmrCapabilities,
    Register, Sqe, Status, parse_namespace_list,
};

use crate::Function;
use crate::command::{Action, Command, Completion, Outcome, Refused, RefusedReason};
use crate::memory::{Buffer, MemoryKind, PAGE, Pool};
use crate::namespace::{DriveNamespace, Unusable};
use crate::prp;
use crate::queue::{ENTRIES_MAX, Outstanding, Queue};

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
/// Most namespaces that are looked at.
const NAMESPACES_MAX: usize = 1024;
/// Set Features: number of queues. 5.27.1.5.
const NUMBER_OF_QUEUES: u32 = 0x07;

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

/// A command of the start.
#[derive(Clone, Copy, Debug)]
enum Step {
    Controller,
    QueueCount,
    CompletionQueue(u16),
    SubmissionQueue(u16),
    /// Namespaces behind the one named.
    Namespaces(NsId),
    Namespace(usize),
}

impl Step {
    /// Returns true if it is Identify, which has data.
    fn has_data(self) -> bool {
        matches!(self, Step::Controller | Step::Namespaces(_) | Step::Namespace(_))
    }

    fn what(self) -> &'static str {
        match self {
            Step::Controller => "Identify of the controller",
            Step::QueueCount => "Set Features for the number of queues",
            Step::CompletionQueue(_) => "to create a completion queue",
            Step::SubmissionQueue(_) => "to create a submission queue",
            Step::Namespaces(_) => "Identify of its namespaces",
            Step::Namespace(_) => "Identify of a namespace",
        }
    }
}

/// Purpose of a command on the admin queue.
#[derive(Clone, Copy, Debug)]
enum Admin {
    Step(Step),
    Abort,
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
    /// Memory of the host, the CMB and the PMR, as far as they are used.
    pools: Vec<Arc<Pool>>,
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
        let pool = self.pools.iter().find(|pool| first.is_of(pool));
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

    /// Looks if a drive has changed its state as it was told to.
    fn step_change(&mut self, now: Instant) {
        let status = self.status();
        if status.is_gone() {
            self.end(DriveError::Gone);
            return;
        }
        match &self.phase {
            Phase::Disabling { deadline, then } => {
                if !status.is_ready() {
                    let then = then.clone();
                    self.disabled(now, then);
                } else if now >= *deadline {
                    self.hold();
                    self.fail(DriveError::NotStopped(self.limit()));
                }
            }
            Phase::EnablingPmr { deadline } => {
                let pmr = self.function.read_u32(Register::PMR_STATUS.0);
                if pmr & PMR_NOT_READY == 0 {
                    self.enable(now);
                } else if now >= *deadline {
                    let why = "it did not become ready within its own limit";
                    let error = DriveError::Memory {
                        kind: MemoryKind::Pmr,
                        why: Arc::new(io::Error::other(why)),
                    };
                    self.disable(now, Then::Fail(error));
                }
            }
            Phase::Enabling { deadline } => {
                if status.is_fatal() {
                    self.disable(now, Then::Fail(DriveError::Fatal));
                } else if status.is_ready() {
                    self.begin(now, Step::Controller);
                } else if now >= *deadline {
                    let error = DriveError::NotStarted(self.limit());
                    self.disable(now, Then::Fail(error));
                }
            }
            _ => {}
        }
    }

    /// Tells a drive to stop: it lets go of all memory when it is not ready any more.
    fn disable(&mut self, now: Instant, then: Then) {
        self.function.write_u32(Register::CONFIGURATION.0, 0);
        if mutant!(ResetNotAwaited) {
            self.end_commands(Outcome::Reset);
        }
        let deadline = now + self.limit();
        self.phase = Phase::Disabling { deadline, then };
        self.next_look = now;
    }

    /// Goes on with a drive that has stopped.
    fn disabled(&mut self, now: Instant, then: Then) {
        self.created = 0;
        self.end_commands(Outcome::Reset);
        match then {
            Then::Start => self.start(now),
            Then::Off => self.phase = Phase::Off,
            Then::Fail(error) => self.fail(error),
        }
    }

    /// Ends all commands, of a drive that moves nothing any more.
    fn end_commands(&mut self, outcome: Outcome) {
        self.admin.take_all();
        for queue in &mut self.queues {
            let ended = queue.queue.take_all().into_iter();
            self.completions.extend(ended.map(|command| Completion {
                token: command.token.token,
                outcome,
                data: command.data,
            }));
        }
    }

    /// Ends all commands of a drive that may still move their data.
    fn hold(&mut self) {
        let first = self.completions.len();
        self.end_commands(Outcome::Reset);
        if mutant!(HeldGivenBack) {
            return;
        }
        for completion in self.completions.range_mut(first..) {
            self.held.append(&mut completion.data);
        }
    }

    /// Ends a drive that is not there any more.
    fn end(&mut self, error: DriveError) {
        self.end_commands(Outcome::Gone);
        // It moves nothing.
        self.held.clear();
        self.fail(error);
    }

    fn fail(&mut self, error: DriveError) {
        self.created = 0;
        self.failure = Some(error);
        self.phase = Phase::Failed;
    }

    /// Stops a drive and starts it anew, unless that has not helped before.
    fn reset(&mut self, now: Instant, error: DriveError) {
        self.resets += 1;
        let then = match self.resets > RESETS_MAX {
            true => Then::Fail(error),
            false => Then::Start,
        };
        self.disable(now, then);
    }

    /// Starts a drive that has stopped.
    fn start(&mut self, now: Instant) {
        let emptied = self.admin.reset();
        let emptied = self
            .queues
            .iter_mut()
            .fold(emptied, |emptied, queue| emptied.and(queue.queue.reset()));
        if emptied.is_err() {
            self.end(DriveError::Gone);
            return;
        }
        if self.cmb.is_some()
            && self.capabilities.cmb
            && let Some(pool) = self.pool(MemoryKind::Cmb)
        {
            // Commands reach it by the address that it has on the bus.
            let control = CmbControl::at(pool.address());
            self.function.write_u64(Register::CMB_CONTROL.0, control.0);
            if self.function.read_u32(Register::CMB_STATUS.0) & 1 != 0 {
                let why = "the drive refuses its address on the bus";
                self.fail(DriveError::Memory {
                    kind: MemoryKind::Cmb,
                    why: Arc::new(io::Error::other(why)),
                });
                return;
            }
        }
        let Some((pmr, pool)) = self.pmr.zip(self.pool(MemoryKind::Pmr)) else {
            self.enable(now);
            return;
        };
        let address = pool.address();
        self.function
            .write_u32(Register::PMR_CONTROL_HIGH.0, (address >> 32) as u32);
        self.function
            .write_u32(Register::PMR_CONTROL_LOW.0, address as u32 | PMR_SPACE);
        self.function.write_u32(Register::PMR_CONTROL.0, PMR_ENABLE);
        let deadline = now + Duration::from_millis(pmr.timeout_ms.max(500).into());
        self.phase = Phase::EnablingPmr { deadline };
    }

    fn enable(&mut self, now: Instant) {
        let entries = u32::from(self.admin.entries()) - 1;
        self.function
            .write_u32(Register::ADMIN_QUEUES.0, entries << 16 | entries);
        self.function
            .write_u64(Register::ADMIN_SUBMISSION.0, self.admin.submission.address(0));
        self.function
            .write_u64(Register::ADMIN_COMPLETION.0, self.admin.completion.address(0));
        self.function
            .write_u32(Register::CONFIGURATION.0, Configuration::enabled().0);
        let deadline = now + self.limit();
        self.phase = Phase::Enabling { deadline };
        self.next_look = now;
    }

    /// Begins a step of the start.
    fn begin(&mut self, now: Instant, step: Step) {
        self.phase = Phase::SetUp;
        let page = self.page.address(0);
        let identify = |nsid, cns: Cns| {
            let mut sqe = Sqe::in_memory(Opcode::IDENTIFY, Cid(0), nsid, [page, 0]);
            sqe.set_dword(10, cns.0.into());
            sqe
        };
        let queue = |opcode, qid: u16, memory: &Buffer, entries: u16, flags: u32| {
            let mut sqe = Sqe::in_memory(opcode, Cid(0), NsId::NONE, [memory.address(0), 0]);
            sqe.set_dword(10, u32::from(qid) | u32::from(entries - 1) << 16);
            // Physically contiguous.
            sqe.set_dword(11, 1 | flags);
            sqe
        };
        let sqe = match step {
            Step::Controller => identify(NsId::NONE, Cns::CONTROLLER),
            Step::QueueCount => {
                let mut sqe = Sqe::in_memory(Opcode::SET_FEATURES, Cid(0), NsId::NONE, [0; 2]);
                let number = self.queues.len() as u32 - 1;
                sqe.set_dword(10, NUMBER_OF_QUEUES);
                sqe.set_dword(11, number << 16 | number);
                sqe
            }
            Step::CompletionQueue(qid) => {
                let own = &self.queues[usize::from(qid) - 1].queue;
                queue(
                    Opcode::CREATE_COMPLETION_QUEUE,
                    qid,
                    &own.completion,
                    own.entries(),
                    0,
                )
            }
            Step::SubmissionQueue(qid) => {
                let own = &self.queues[usize::from(qid) - 1].queue;
                let completion = u32::from(qid) << 16;
                queue(
                    Opcode::CREATE_SUBMISSION_QUEUE,
                    qid,
                    &own.submission,
                    own.entries(),
                    completion,
                )
            }
            Step::Namespaces(behind) => identify(behind, Cns::ACTIVE_NAMESPACES),
            Step::Namespace(at) => match self.listed.get(at) {
                Some(nsid) => identify(*nsid, Cns::NAMESPACE),
                None => {
                    self.phase = Phase::Ready;
                    self.next_look = now;
                    return;
                }
            },
        };
        if self.submit_admin(now, sqe, Admin::Step(step)).is_none() {
            self.end(DriveError::Gone);
        }
    }

    /// `None` if the queue is full, or its memory has gone.
    fn submit_admin(&mut self, now: Instant, mut sqe: Sqe, purpose: Admin) -> Option<()> {
        let slot = self.admin.free_slot()?;
        sqe.set_cid(self.admin.next_cid(slot));
        let deadline = now + self.options.timeout;
        let submitted = self
            .admin
            .submit(&*self.function, slot, &sqe, (purpose, Vec::new(), deadline));
        submitted.ok()
    }

    /// Takes what was completed on the admin queue.
    fn take_admin(&mut self, now: Instant) {
        let Ok(completed) = self.admin.complete(&*self.function) else {
            self.end(DriveError::Gone);
            return;
        };
        for (command, cqe) in completed {
            if mutant!(AbortTrusted) && matches!(command.token, Admin::Abort) {
                self.end_commands(Outcome::Reset);
            }
            if let Admin::Step(step) = command.token
                && matches!(self.phase, Phase::SetUp)
            {
                self.end_step(now, step, cqe);
            }
        }
    }

    /// Resets a drive that does not answer a command of the admin queue.
    fn check_admin(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::SetUp | Phase::Ready) {
            return;
        }
        let is_late = self.admin.outstanding().any(|command| now >= command.deadline);
        if is_late {
            self.reset(now, DriveError::NoAnswers(RESETS_MAX));
        }
    }

    fn end_step(&mut self, now: Instant, step: Step, cqe: Cqe) {
        // A namespace that was listed may have gone since.
        let may_fail = matches!(step, Step::Namespace(_));
        if !cqe.status.is_success() && !may_fail {
            let error = DriveError::Refused {
                what: step.what(),
                status: cqe.status,
            };
            self.disable(now, Then::Fail(error));
            return;
        }
        if cqe.status.is_success() && step.has_data() {
            let route = Route::Drive(Location::Dram);
            book(
                self.options.ledger.as_ref(),
                route,
                Class::Data,
                IDENTIFY_LEN as u64,
            );
        }
        let mut bytes = vec![0; PAGE];
        if self.page.read(0, &mut bytes).is_err() {
            self.end(DriveError::Gone);
            return;
        }
        let next = match step {
            Step::Controller => {
                // There are as many bytes as it needs.
                self.controller = DriveController::parse(&bytes).unwrap_or_default();
                if !self.controller.has_usual_entries() {
                    self.disable(now, Then::Fail(DriveError::Lacks("entries of the usual size")));
                    return;
                }
                Step::QueueCount
            }
            Step::QueueCount => {
                let submission = (cqe.result & 0xffff) as usize + 1;
                let completion = (cqe.result >> 16 & 0xffff) as usize + 1;
                self.created = self.queues.len().min(submission).min(completion);
                Step::CompletionQueue(1)
            }
            Step::CompletionQueue(qid) if usize::from(qid) < self.created => Step::CompletionQueue(qid + 1),
            Step::CompletionQueue(_) => Step::SubmissionQueue(1),
            Step::SubmissionQueue(qid) if usize::from(qid) < self.created => Step::SubmissionQueue(qid + 1),
            Step::SubmissionQueue(_) => {
                self.listed.clear();
                self.namespaces.clear();
                self.unusable.clear();
                Step::Namespaces(NsId::NONE)
            }
            Step::Namespaces(behind) => {
                let room = NAMESPACES_MAX - self.listed.len();
                // In ascending order, so that a drive which repeats itself comes to an end.
                let mut last = behind;
                for nsid in parse_namespace_list(&bytes).take(room) {
                    if nsid > last && nsid != NsId::ALL {
                        self.listed.push(nsid);
                        last = nsid;
                    }
                }
                let is_full = parse_namespace_list(&bytes).count() == PAGE / 4;
                match is_full && last > behind && self.listed.len() < NAMESPACES_MAX {
                    true => Step::Namespaces(last),
                    false => Step::Namespace(0),
                }
            }
            Step::Namespace(at) => {
                let nsid = self.listed[at];
                let namespace = match cqe.status.is_success() {
                    true => DriveNamespace::parse(nsid, &bytes),
                    false => Err(Unusable::Refused(cqe.status)),
                };
                match namespace {
                    Ok(namespace) => self.namespaces.push(namespace),
                    Err(error) => self.unusable.push((nsid, error)),
                }
                Step::Namespace(at + 1)
            }
        };
        self.begin(now, next);
    }

    fn step_ready(&mut self, now: Instant) {
        self.take_io();
        self.take_admin(now);
        if !matches!(self.phase, Phase::Ready) {
            return;
        }
        let looks = self.looks(now, LOOK);
        if looks {
            self.check_status(now);
            self.check_deadlines(now);
            self.check_admin(now);
        }
    }

    /// Takes what was completed on the queues for I/O.
    fn take_io(&mut self) {
        for at in 0..self.created {
            let Ok(completed) = self.queues[at].queue.complete(&*self.function) else {
                self.end(DriveError::Gone);
                return;
            };
            let ended = completed
                .into_iter()
                .map(|(command, cqe): (Outstanding<Io>, Cqe)| {
                    if cqe.status.is_success() {
                        let Io { bytes, at, .. } = command.token;
                        book(
                            self.options.ledger.as_ref(),
                            Route::Drive(at),
                            Class::Data,
                            bytes as u64,
                        );
                    }
                    let status = if mutant!(StatusIgnored) {
                        Status::SUCCESS
                    } else {
                        cqe.status
                    };
                    Completion {
                        token: command.token.token,
                        outcome: Outcome::Done(status),
                        data: command.data,
                    }
                });
            let before = self.completions.len();
            self.completions.extend(ended);
            if self.completions.len() > before {
                self.resets = 0;
            }
        }
    }

    /// Ends or resets a drive that is not as it was.
    fn check_status(&mut self, now: Instant) {
        let status = self.status();
        if status.is_gone() {
            self.end(DriveError::Gone);
        } else if status.is_fatal() {
            self.reset(now, DriveError::Fatal);
        } else if !status.is_ready() {
            // Behind some bridges a function that has gone reads as zeros.
            match self.function.read_u32(Register::VERSION.0) {
                0 | u32::MAX => self.end(DriveError::Gone),
                _ => self.reset(now, DriveError::Fatal),
            }
        }
    }

    /// Aborts commands that have taken too long, or resets the drive.
    fn check_deadlines(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Ready) {
            return;
        }
        let deadline = now + self.options.timeout;
        let mut free = usize::from(self.controller.aborts).saturating_sub(self.admin.outstanding().count());
        let mut late = Vec::new();
        let mut is_lost = false;
        for (at, queue) in self.queues.iter_mut().enumerate() {
            for command in queue.queue.outstanding_mut() {
                if now < command.deadline {
                    continue;
                }
                is_lost |= command.is_aborted;
                // Those beyond the drive's limit are looked at again after the first ones.
                if free > 0 && !command.is_aborted {
                    free -= 1;
                    command.is_aborted = true;
                    command.deadline = deadline;
                    late.push((at, command.cid()));
                }
            }
        }
        if mutant!(EndedAtTimeout) && !late.is_empty() {
            self.end_commands(Outcome::Reset);
            return;
        }
        if is_lost {
            self.reset(now, DriveError::NoAnswers(RESETS_MAX));
            return;
        }
        for (at, cid) in late {
            let mut sqe = Sqe::in_memory(Opcode::ABORT, Cid(0), NsId::NONE, [0; 2]);
            // Queues are counted from 1. 5.1.
            sqe.set_dword(10, (at as u32 + 1) | u32::from(cid.0) << 16);
            if self.submit_admin(now, sqe, Admin::Abort).is_none() {
                self.reset(now, DriveError::NoAnswers(RESETS_MAX));
                return;
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

/// Looks for the Controller Memory Buffer, by either scheme: that of version 1.4, where hosts enable it, or the one before. 3.1.3.11 and 8.5.
fn open_cmb(
    function: &dyn Function,
    capabilities: PcieCapabilities,
    pools: &mut Vec<Arc<Pool>>,
) -> Result<CmbLayout, DriveError> {
    let kind = MemoryKind::Cmb;
    if capabilities.cmb {
        // It tells of its buffer from then on.
        function.write_u64(Register::CMB_CONTROL.0, CmbControl::REGISTERS);
    }
    let location = function.read_u32(Register::CMB_LOCATION.0);
    let layout = CmbLayout::parse(location, function.read_u32(Register::CMB_SIZE.0));
    let layout = layout.ok_or(DriveError::NoMemory(kind))?;
    let failed = |error| DriveError::Memory {
        kind,
        why: Arc::new(error),
    };
    let bar = function.bar(layout.bar).map_err(failed)?;
    let address = bar
        .address
        .checked_add(layout.offset)
        .filter(|address| address.is_multiple_of(PAGE as u64))
        .ok_or_else(|| failed(io::Error::other("it does not begin at a page")))?;
    let directions = (layout.reads, layout.writes);
    let pool = Pool::of_bar(kind, &bar, layout.offset, layout.bytes, address, directions);
    if pool.bytes() == 0 {
        return Err(failed(io::Error::other("it lies outside of its BAR")));
    }
    pools.push(pool);
    Ok(layout)
}

/// Looks for the Persistent Memory Region. 8.14.
fn open_pmr(
    function: &dyn Function,
    capabilities: PcieCapabilities,
    pools: &mut Vec<Arc<Pool>>,
) -> Result<PmrCapabilities, DriveError> {
    let kind = MemoryKind::Pmr;
    if !capabilities.pmr {
        return Err(DriveError::NoMemory(kind));
    }
    let pmr = PmrCapabilities::parse(function.read_u32(Register::PMR_CAPABILITIES.0));
    let failed = |error| DriveError::Memory {
        kind,
        why: Arc::new(error),
    };
    if !pmr.space {
        let why = "commands do not reach it (PMRCAP.CMSS)";
        return Err(failed(io::Error::other(why)));
    }
    let bar = function.bar(pmr.bar).map_err(failed)?;
    let bytes = bar.memory.len();
    if !bar.address.is_multiple_of(PAGE as u64) || bytes < PAGE as u64 {
        return Err(failed(io::Error::other("its BAR has no whole page")));
    }
    let pool = Pool::of_bar(kind, &bar, 0, bytes, bar.address, (pmr.reads, pmr.writes));
    pools.push(pool);
    Ok(pmr)
}
