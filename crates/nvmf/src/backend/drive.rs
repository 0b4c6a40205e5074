//! A namespace of a drive that is driven from user space.
//!
//! Data are copied between a host's buffers and memory that the drive reaches: the target's, or the drive's own. Threads of the media wait for the
//! drive, and whoever waits polls it for all.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_drive::{
    Action, Buffer, Command, Completion, Drive, DriveError, DriveNamespace, DriveOpenError, Function,
    MemoryKind, Options, Outcome, PAGE, PciAddress, Pool, RefusedReason, State, Unusable,
};
use rdmux_verbs::ledger::{Class, Ledger, Route, book};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::{NsId, Status};

use super::ending::Endings;
use super::offload::OffloadCounts;
use super::peer::{PeerCounts, PeerData, PeerToPeer};
use super::{Backend, Flushes, Flushing};

/// Polls of the drive before its waiter sleeps between two.
pub(crate) const POLLS: u32 = 50;
/// Sleep between two polls.
pub(crate) const SLEEP: Duration = Duration::from_micros(50);
/// Longest wait for a drive that starts anew, before a command fails for now.
const RESTART_WAIT: Duration = Duration::from_secs(20);
/// Longest wait for a drive to shut down.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(15);
/// Bytes that one command moves at most: what waits for memory beside it gets some too.
const CHUNK_MAX: usize = 256 << 10;
/// Bytes of memory of the host for data that the offload engine has between queue pairs and the drive.
const STAGING_BYTES: usize = 8 << 20;
/// The queue pair of threads, and that of the offload engine.
const THREADS_QUEUE: usize = 0;
pub(super) const OFFLOAD_QUEUE: usize = 1;
/// Set in the tokens of the offload engine's commands.
pub(super) const OFFLOAD_TOKEN: u64 = 1 << 63;
/// Blocks of a command without data, which name more than they move.
const BLOCKS_MAX: u64 = 1 << 16;

/// A namespace of a drive, as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrivePlace {
    /// The drive.
    pub address: PciAddress,
    /// Its namespace; `None`: the first that can be used.
    pub nsid: Option<NsId>,
}

impl fmt::Display for DrivePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)?;
        match self.nsid {
            Some(nsid) => write!(f, "/{nsid}"),
            None => Ok(()),
        }
    }
}

impl FromStr for DrivePlace {
    type Err = String;

    /// Parses `0000:00:04.0` or, with a namespace, `0000:00:04.0/1`.
    fn from_str(text: &str) -> Result<DrivePlace, String> {
        let (address, nsid) = match text.split_once('/') {
            Some((address, nsid)) => (address, Some(nsid)),
            None => (text, None),
        };
        let number = |text: &str| {
            let nsid = text.parse().ok().filter(|nsid| (1..u32::MAX).contains(nsid));
            nsid.map(NsId)
                .ok_or_else(|| format!("'{text}' is no namespace of a drive: give its number, from 1"))
        };
        Ok(DrivePlace {
            address: address
                .parse()
                .map_err(|error: DriveOpenError| error.to_string())?,
            nsid: nsid.map(number).transpose()?,
        })
    }
}

/// Reason for which a namespace of a drive is no backend.
#[derive(Debug, thiserror::Error)]
pub enum DriveBackendError {
    /// The drive is not to be had.
    #[error(transparent)]
    Open(#[from] DriveOpenError),
    /// It does not start.
    #[error("{address}: {error}")]
    Start {
        /// The drive.
        address: String,
        /// The cause.
        error: DriveError,
    },
    /// It has no such namespace.
    #[error("{address} has no namespace {asked}: it has {}", listed(has))]
    NoNamespace {
        /// The drive.
        address: String,
        /// The namespace.
        asked: NsId,
        /// Those that it has.
        has: Vec<NsId>,
    },
    /// It has none at all.
    #[error("{0} has no namespace: make one with nvme create-ns and attach-ns")]
    Empty(String),
    /// The namespace cannot be used.
    #[error("{address}: namespace {nsid} cannot be used: {why}")]
    Unusable {
        /// The drive.
        address: String,
        /// The namespace.
        nsid: NsId,
        /// The reason.
        why: Unusable,
    },
    /// The memory takes the data of one direction alone.
    #[error("{address}: its {kind} does not take the data of {what}: use buffers=dram")]
    Direction {
        /// The drive.
        address: String,
        /// The memory.
        kind: MemoryKind,
        /// Reads or writes.
        what: &'static str,
    },
    /// The target's memory is no drive's.
    #[error("{0}: p2p is for the drive's own memory: use buffers=cmb or buffers=pmr, or p2p=off")]
    NoPeer(String),
    /// The offload engine needs a queue pair of its own.
    #[error(
        "{0} has one queue pair for I/O, and the offload engine needs one of its own: leave --offload out"
    )]
    NoQueue(String),
    /// The memory is smaller than one block.
    #[error("{address}: its {kind} has {bytes} bytes, less than a block: use buffers=dram")]
    Small {
        /// The drive.
        address: String,
        /// The memory.
        kind: MemoryKind,
        /// Its bytes.
        bytes: u64,
    },
}

fn listed(nsids: &[NsId]) -> String {
    match nsids {
        [] => "none".to_owned(),
        nsids => nsids
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// Use of a drive by this process.
#[derive(Clone, Debug, Default)]
pub struct DriveSettings {
    /// Memory that takes the data.
    pub buffers: MemoryKind,
    /// Commands whose data go between the queue pair and the drive's own memory.
    pub p2p: PeerToPeer,
    /// The offload engine has a queue pair of the drive, and the data of NVMe/RDMA go between queue pairs and memory that the drive reaches, as with
    /// [`PeerToPeer::Prefer`].
    pub offload: bool,
    /// Ledger of the bytes that cross the drive's links.
    pub ledger: Option<Arc<Ledger>>,
    /// Takes the drive when its last user lets it go. Whoever drops the last reference to this waits until it has shut down.
    pub endings: Arc<Endings>,
}

/// A namespace of a drive that this process drives.
#[derive(Debug)]
pub struct DriveBackend {
    /// `None` once this is dropped.
    shared: Option<Mutex<Shared>>,
    address: String,
    endings: Arc<Endings>,
    namespace: DriveNamespace,
    /// Memory that the option names.
    pool: Arc<Pool>,
    /// Memory for data that the processor copies: the target's, if the other one is for queue pairs.
    copies: Arc<Pool>,
    /// Bytes that a command moves at most, a multiple of a block and of a page.
    chunk: usize,
    p2p: PeerToPeer,
    ledger: Option<Arc<Ledger>>,
    /// Bytes in a row for one command's data in the drive's memory.
    peer_bytes_max: usize,
    peers: PeerCounts,
    /// Set if the offload engine has a queue pair.
    pub(super) offload: Option<OffloadCounts>,
    has_write_cache: bool,
    writes_zeroes: bool,
    deallocates: bool,
    /// Tells the namespace from all others.
    name: String,
    pub(super) flushes: Flushes,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) drive: Drive,
    /// Commands that have ended, of waiters that have not looked yet.
    ended: HashMap<u64, Completion>,
    /// Those of the offload engine.
    pub(super) offloaded: VecDeque<Completion>,
    /// A Flush of the engine that the drive has, by its token.
    pub(super) flushing: Option<(u64, Flushing)>,
    next_token: u64,
}

impl Shared {
    /// Takes what has ended.
    pub(super) fn poll(&mut self) {
        let now = Instant::now();
        while let Some(completion) = self.drive.poll(now) {
            if completion.token & OFFLOAD_TOKEN == 0 {
                self.ended.insert(completion.token, completion);
                continue;
            }
            let flushing = self.flushing.take_if(|(token, _)| *token == completion.token);
            if let (Some((_, flushing)), Outcome::Done(status)) = (flushing, completion.outcome)
                && has_lost(status.of_drive())
            {
                flushing.fail();
            }
            self.offloaded.push_back(completion);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let start = Instant::now();
        self.drive.shut_down(start);
        let mut turn = 0;
        // One that does not stop in time keeps the memory that it knows.
        while self.drive.state() == State::Stopping && start.elapsed() < SHUT_DOWN_WAIT {
            self.poll();
            pause(turn);
            turn += 1;
        }
    }
}

/// Lets some time pass between two looks at a drive, which tells nobody that it is done.
fn pause(turn: u32) {
    match turn {
        ..POLLS => std::thread::yield_now(),
        // Time is meant: without interrupts the drive is looked at again and again, and the processor has more to do.
        _ => std::thread::sleep(SLEEP),
    }
}

impl DriveBackend {
    /// Opens and starts a drive.
    ///
    /// # Errors
    /// The drive is not to be had, does not start, or has no such namespace or memory.
    pub fn open(
        place: &DrivePlace,
        unbind: bool,
        settings: DriveSettings,
    ) -> Result<DriveBackend, DriveBackendError> {
        settings.endings.wait_for(&place.address.to_string());
        let function = rdmux_drive::open(&place.address, unbind)?;
        DriveBackend::of_function(function, place.nsid, settings)
    }

    /// Starts the drive that a function is.
    ///
    /// # Errors
    /// As those of [`DriveBackend::open`].
    pub fn of_function(
        function: Arc<dyn Function>,
        nsid: Option<NsId>,
        settings: DriveSettings,
    ) -> Result<DriveBackend, DriveBackendError> {
        let DriveSettings {
            buffers,
            p2p,
            offload,
            ledger,
            endings,
        } = settings;
        let address = function.address().to_owned();
        if p2p != PeerToPeer::Off && buffers == MemoryKind::Dram && !offload {
            return Err(DriveBackendError::NoPeer(address));
        }
        let p2p = match p2p {
            PeerToPeer::Off if offload => PeerToPeer::Prefer,
            asked => asked,
        };
        let start = |error| DriveBackendError::Start {
            address: address.clone(),
            error,
        };
        let options = Options {
            cmb: buffers == MemoryKind::Cmb,
            pmr: buffers == MemoryKind::Pmr,
            queues: 1 + u16::from(offload),
            staging_bytes: match buffers {
                MemoryKind::Dram if offload => STAGING_BYTES,
                _ => 0,
            },
            ledger: ledger.clone(),
            ..Options::default()
        };
        let drive = Drive::new(function, options, Instant::now()).map_err(start)?;
        let mut shared = Shared {
            drive,
            ended: HashMap::new(),
            offloaded: VecDeque::new(),
            flushing: None,
            next_token: 0,
        };
        let mut turn = 0;
        while shared.drive.state() == State::Starting {
            shared.poll();
            pause(turn);
            turn += 1;
        }
        let drive = &shared.drive;
        if let Some(error) = drive.failure() {
            return Err(start(error.clone()));
        }
        if offload && drive.queues() <= OFFLOAD_QUEUE {
            return Err(DriveBackendError::NoQueue(address));
        }
        let namespace = find(drive, &address, nsid)?;
        // The drive that was started has it.
        let pool_of = |kind| {
            let pool = drive.pool(kind).cloned();
            pool.ok_or_else(|| start(DriveError::NoMemory(kind)))
        };
        let pool = match drive.staging() {
            Some(staging) => staging.clone(),
            None => pool_of(buffers)?,
        };
        let copies = match p2p {
            PeerToPeer::Off => pool.clone(),
            _ => pool_of(MemoryKind::Dram)?,
        };
        for (action, what) in [(Action::Read, "reads"), (Action::Write, "writes")] {
            if !pool.takes(action) {
                return Err(DriveBackendError::Direction {
                    address,
                    kind: buffers,
                    what,
                });
            }
        }
        // Several commands have room at a time where there is room for several.
        let block = (1usize << namespace.block_shift).max(PAGE);
        let room = usize::try_from(pool.bytes().min(copies.bytes())).unwrap_or(usize::MAX);
        let most = drive.data_bytes_max().min(CHUNK_MAX).min(room);
        let chunk = most.min((room / 8).max(PAGE)).max(block) / block * block;
        if chunk > most {
            return Err(DriveBackendError::Small {
                address,
                kind: buffers,
                bytes: pool.bytes(),
            });
        }
        let controller = drive.controller();
        Ok(DriveBackend {
            namespace,
            peer_bytes_max: pool.room(),
            pool,
            copies,
            chunk,
            p2p,
            ledger,
            peers: PeerCounts::default(),
            offload: offload.then(OffloadCounts::default),
            has_write_cache: controller.has_write_cache,
            writes_zeroes: drive.has(Action::WriteZeroes),
            deallocates: drive.has(Action::Deallocate) && namespace.zeroes,
            name: format!("{} {} {}", controller.model, controller.serial, namespace.nsid),
            flushes: Flushes::default(),
            shared: Some(Mutex::new(shared)),
            address,
            endings,
        })
    }

    pub(super) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.as_ref().expect("only a drop takes it").lock()
    }

    /// Returns bytes of a block as a power of two.
    pub fn block_shift(&self) -> u8 {
        self.namespace.block_shift
    }

    /// Returns model and serial number of the drive, and the namespace: the same at each start.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn command(&self, action: Action, offset: u64, length: u64) -> Command {
        Command {
            action,
            nsid: self.namespace.nsid,
            slba: offset >> self.namespace.block_shift,
            blocks: (length >> self.namespace.block_shift) as u32,
        }
    }

    /// Takes memory for data. Whoever has some waits for the drive alone, so that there is some in the end.
    ///
    /// # Errors
    /// The drive is out of use: one that did not stop has kept the memory of its commands.
    fn allocate(&self, bytes: usize) -> Result<Buffer, Status> {
        let mut turn = 0;
        loop {
            if let Some(buffer) = self.copies.allocate(bytes) {
                return Ok(buffer);
            }
            self.check_in_use()?;
            pause(turn);
            turn += 1;
        }
    }

    /// Checks that memory which the drive's commands have will be free.
    ///
    /// # Errors
    /// The drive is out of use: one that did not stop has kept it.
    pub(crate) fn check_in_use(&self) -> Result<(), Status> {
        let mut shared = self.shared();
        shared.poll();
        match shared.drive.state() {
            State::Starting | State::Ready => Ok(()),
            State::Stopping | State::Off | State::Failed => Err(Status::NAMESPACE_NOT_READY.do_not_retry()),
        }
    }

    /// Returns true if a drive that is ready has the blocks that hosts know: after a reset it may have others.
    pub(super) fn has_same_blocks(&self, drive: &Drive) -> bool {
        let known = &self.namespace;
        drive.namespaces().iter().any(|now| {
            now.nsid == known.nsid && now.block_shift == known.block_shift && now.blocks >= known.blocks
        })
    }

    /// Books bytes that the processor has copied from or to a buffer, which cross a link if that lies in the drive.
    pub(super) fn book_copy(&self, buffer: &Buffer, bytes: &[u8]) {
        if buffer.kind() != MemoryKind::Dram {
            let ledger = self.ledger.as_ref();
            book(ledger, Route::Processor, Class::Data, bytes.len() as u64);
        }
    }

    /// Has the drive carry out a command, and returns its buffers.
    fn run(&self, command: Command, mut data: Vec<Buffer>) -> Result<Vec<Buffer>, Status> {
        let give_up = Instant::now() + RESTART_WAIT;
        let mut turn = 0;
        let token = loop {
            let mut shared = self.shared();
            if shared.drive.state() == State::Ready && !self.has_same_blocks(&shared.drive) {
                return Err(Status::NAMESPACE_NOT_READY.do_not_retry());
            }
            let (now, token) = (Instant::now(), shared.next_token);
            match shared.drive.submit(now, THREADS_QUEUE, command, data, token) {
                Ok(()) => {
                    shared.next_token += 1;
                    break token;
                }
                Err(refused) => {
                    data = refused.data;
                    match refused.reason {
                        // The commands before it end in bounded time.
                        RefusedReason::Full => {}
                        RefusedReason::NotReady if now < give_up => {}
                        RefusedReason::NotReady => return Err(Status::NAMESPACE_NOT_READY),
                        RefusedReason::Ended => return Err(Status::NAMESPACE_NOT_READY.do_not_retry()),
                        _ => return Err(Status::INTERNAL_ERROR.do_not_retry()),
                    }
                    shared.poll();
                }
            }
            drop(shared);
            pause(turn);
            turn += 1;
        };
        let mut turn = 0;
        let completion = loop {
            let mut shared = self.shared();
            shared.poll();
            if let Some(completion) = shared.ended.remove(&token) {
                break completion;
            }
            drop(shared);
            pause(turn);
            turn += 1;
        };
        match status_of(completion.outcome) {
            Status::SUCCESS => Ok(completion.data),
            status => Err(status),
        }
    }

    /// Returns the commands whose data its own memory takes.
    pub fn p2p(&self) -> PeerToPeer {
        self.p2p
    }

    /// Returns the counts of them.
    pub fn peers(&self) -> &PeerCounts {
        &self.peers
    }

    /// Returns the most bytes of a command that its own memory takes.
    pub fn peer_bytes_max(&self) -> usize {
        self.peer_bytes_max
    }

    /// Returns the memory of its buffers.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Takes memory for the data of one command. `None`: there is no room now.
    pub(crate) fn take_peer(&self, bytes: usize) -> Option<PeerData> {
        Some(PeerData(vec![self.pool.allocate(bytes)?]))
    }

    /// Reads into its own memory, from the start of the data on.
    pub(crate) fn read_to_peer(&self, offset: u64, length: u64, data: &mut PeerData) -> Result<(), Status> {
        self.run_on_peer(Action::Read, offset, length, data)
    }

    /// Writes from its own memory.
    pub(crate) fn write_from_peer(
        &self,
        offset: u64,
        length: u64,
        data: &mut PeerData,
    ) -> Result<(), Status> {
        self.flushes.check()?;
        self.run_on_peer(Action::Write, offset, length, data)
    }

    /// Has the drive move data between blocks and its own memory, in as many commands as it takes.
    fn run_on_peer(
        &self,
        action: Action,
        offset: u64,
        length: u64,
        data: &mut PeerData,
    ) -> Result<(), Status> {
        let mut moving = Moving::new(self, action, offset, length, data.take());
        while let Some((command, part)) = moving.next(self) {
            moving.moved(self.run(command, part)?);
        }
        *data = moving.into_data();
        self.peers.count_direct();
        Ok(())
    }

    /// Has the drive carry out a command without data on blocks of any number.
    fn run_in_parts(&self, action: Action, offset: u64, length: u64) -> Result<(), Status> {
        let part_max = BLOCKS_MAX << self.namespace.block_shift;
        let mut at = 0;
        while at < length {
            let part = (length - at).min(part_max);
            self.run(self.command(action, offset + at, part), Vec::new())?;
            at += part;
        }
        Ok(())
    }
}

/// Returns the end of a command as the host gets it.
pub(crate) fn status_of(outcome: Outcome) -> Status {
    match outcome {
        Outcome::Done(status) if status.is_success() => Status::SUCCESS,
        Outcome::Done(status) => status.of_drive(),
        Outcome::Reset => Status::INTERNAL_ERROR,
        Outcome::Gone => Status::NAMESPACE_NOT_READY.do_not_retry(),
    }
}

/// Returns true if a Flush with this status has lost data that were written.
fn has_lost(status: Status) -> bool {
    !status.is_success() && (status.is_final() || status.is(Status::WRITE_FAULT))
}

/// Data in memory that a drive moves to or from blocks, a part with each of its commands.
#[derive(Debug)]
pub(crate) struct Moving {
    action: Action,
    /// Those that are left.
    offset: u64,
    end: u64,
    rest: VecDeque<Buffer>,
    moved: Vec<Buffer>,
}

impl Moving {
    /// Moves `length` bytes, from or to `offset` of the namespace.
    pub(crate) fn new(
        drive: &DriveBackend,
        action: Action,
        offset: u64,
        length: u64,
        data: PeerData,
    ) -> Moving {
        let mut parts = VecDeque::new();
        for mut rest in data.0 {
            while let Some(part) = rest.split(drive.chunk) {
                parts.push_back(part);
            }
            parts.push_back(rest);
        }
        Moving {
            action,
            offset,
            end: offset + length,
            rest: parts,
            moved: Vec::new(),
        }
    }

    /// Returns the next command with its buffers, which come back by [`Moving::moved`].
    pub(crate) fn next(&mut self, drive: &DriveBackend) -> Option<(Command, Vec<Buffer>)> {
        let part = self.rest.pop_front()?;
        let bytes = (self.end - self.offset).min(part.bytes() as u64);
        let command = drive.command(self.action, self.offset, bytes);
        self.offset += bytes;
        Some((command, vec![part]))
    }

    /// Takes the buffers of that command back.
    pub(crate) fn moved(&mut self, data: Vec<Buffer>) {
        self.moved.extend(data);
    }

    /// Returns all of the memory, in its order.
    pub(crate) fn into_data(self) -> PeerData {
        PeerData(self.moved.into_iter().chain(self.rest).collect())
    }
}

/// Returns the namespace that is asked for, or else the first.
fn find(drive: &Drive, address: &str, asked: Option<NsId>) -> Result<DriveNamespace, DriveBackendError> {
    let usable = drive.namespaces();
    let found = usable
        .iter()
        .find(|namespace| asked.is_none_or(|asked| asked == namespace.nsid));
    let mut unusable = drive.unusable().iter();
    let unusable = unusable.find(|(nsid, _)| asked.is_none_or(|asked| asked == *nsid));
    let address = address.to_owned();
    match (found, unusable, asked) {
        (Some(namespace), ..) => Ok(*namespace),
        (None, Some((nsid, why)), _) => Err(DriveBackendError::Unusable {
            address,
            nsid: *nsid,
            why: why.clone(),
        }),
        (None, None, None) => Err(DriveBackendError::Empty(address)),
        (None, None, Some(asked)) => Err(DriveBackendError::NoNamespace {
            address,
            asked,
            has: usable.iter().map(|namespace| namespace.nsid).collect(),
        }),
    }
}

impl Backend for DriveBackend {
    fn bytes(&self) -> u64 {
        self.namespace.blocks << self.namespace.block_shift
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn peer(&self) -> Option<&DriveBackend> {
        (self.p2p != PeerToPeer::Off).then_some(self)
    }

    fn has_write_cache(&self) -> bool {
        self.has_write_cache
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        let mut at = offset;
        for part in out.chunks_mut(self.chunk) {
            let buffer = self.allocate(part.len())?;
            let command = self.command(Action::Read, at, part.len() as u64);
            let data = self.run(command, vec![buffer])?;
            if let Some(buffer) = data.first() {
                buffer.read(0, part).map_err(|_| Status::READ_ERROR)?;
                self.book_copy(buffer, part);
            }
            at += part.len() as u64;
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.flushes.check()?;
        let mut at = offset;
        for part in bytes.chunks(self.chunk) {
            let buffer = self.allocate(part.len())?;
            buffer.write(0, part).map_err(|_| Status::WRITE_FAULT)?;
            self.book_copy(&buffer, part);
            let command = self.command(Action::Write, at, part.len() as u64);
            self.run(command, vec![buffer])?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.flushes.check()?;
        if self.writes_zeroes {
            return self.run_in_parts(Action::WriteZeroes, offset, length);
        }
        let zeroes = vec![0; length.min(self.chunk as u64) as usize];
        for at in (0..length).step_by(zeroes.len().max(1)) {
            let part = (length - at).min(zeroes.len() as u64) as usize;
            self.write(offset + at, &zeroes[..part])?;
        }
        Ok(())
    }

    fn deallocate(&self, offset: u64, length: u64) -> Result<(), Status> {
        if !self.deallocates {
            return self.write_zeroes(offset, length);
        }
        self.flushes.check()?;
        self.run_in_parts(Action::Deallocate, offset, length)
    }

    fn flush(&self) -> Result<(), Status> {
        self.flushes.check()?;
        if !self.has_write_cache {
            return Ok(());
        }
        let mut for_now = Ok(());
        self.flushes.run(|| {
            let flushed = self.run(self.command(Action::Flush, 0, 0), Vec::new());
            match flushed {
                Ok(_) => Ok(()),
                Err(status) if has_lost(status) => Err(io::Error::other(status.to_string())),
                // The drive has not said that it failed.
                Err(status) => {
                    for_now = Err(status);
                    Ok(())
                }
            }
        })?;
        for_now
    }
}

impl Drop for DriveBackend {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            self.endings.end(std::mem::take(&mut self.address), shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function that has no drive, or one with pages of a size.
    #[derive(Debug)]
    struct Registers(u64);

    impl Function for Registers {
        fn address(&self) -> &str {
            "0000:00:04.0"
        }
        fn register_bytes(&self) -> u64 {
            16 << 10
        }
        fn read_u32(&self, _: u32) -> u32 {
            self.0 as u32
        }
        fn read_u64(&self, _: u32) -> u64 {
            self.0
        }
        fn write_u32(&self, _: u32, _: u32) {}
        fn write_u64(&self, _: u32, _: u64) {}
        fn bar(&self, _: u8) -> io::Result<rdmux_drive::Bar> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn dma(&self, _: usize) -> io::Result<rdmux_drive::DmaMemory> {
            Err(io::Error::other("memlock"))
        }
    }

    #[test]
    fn open__says_in_a_line_what_a_drive_lacks() {
        let nvm = 1 << 37 | 0x3f;
        for (capabilities, part) in [
            (u64::MAX, "0000:00:04.0: the drive does not answer"),
            (0x3f, "0000:00:04.0: the drive has no NVM command set"),
            (nvm | 1 << 48, "pages of at least 8192 bytes"),
            (nvm | 0xf << 32, "has doorbells behind its registers"),
            (nvm, "memory of the host cannot be used: memlock"),
        ] {
            let function = Arc::new(Registers(capabilities));
            let error = DriveBackend::of_function(function, None, DriveSettings::default()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn place__is_a_drive_or_a_namespace_of_it() {
        let parse = |text: &str| text.parse::<DrivePlace>().map(|place| place.to_string());
        assert_eq!(parse("00:04.0").as_deref(), Ok("0000:00:04.0"));
        assert_eq!(parse("0000:00:04.0/3").as_deref(), Ok("0000:00:04.0/3"));
        for text in ["00:04.0/0", "00:04.0/x", "00:04.0/4294967295"] {
            assert!(parse(text).unwrap_err().contains("is no namespace of a drive"));
        }
        assert!(parse("/dev/nvme0").unwrap_err().contains("is no address"));
    }
}
