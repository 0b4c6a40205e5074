//! An I/O command that a backend carries out.

use std::cell::Cell;
use std::fs::File;
use std::sync::Arc;

use rdmux_runtime::{Direction, Pages};
use rdmux_wire::accel::JobCommand;
use rdmux_wire::nvme::{
    Cid, Copy, CopyFormat, CopyRange, DatasetRange, NsId, Opcode, ReservationCommand, ReservationKeys, Rw,
    Sqe, Status,
};

use super::association;
use super::fused::Own;
use super::namespace::{COPY_BYTES_MAX, COPY_RANGES_MAX, Seat};
use super::passed::Passed;
use super::view::View;
use crate::accelerator::WindowJob;
use crate::backend::Backend as _;
use crate::backend::drive::DriveBackend;
use crate::backend::peer::PeerData;
use crate::passthrough::Transfer;

/// An I/O of more bytes does not run on a reactor's thread, whose other connections would wait.
const INLINE_MAX: u32 = 1 << 20;
/// Bytes that are read, compared or copied at once.
const PART: usize = 64 << 10;
/// Bytes of zeros that are written at once where that does not wait for a medium: what wants to be alone waits no longer.
const ZEROES_PART: u64 = 1 << 20;
/// As [`ZEROES_PART`], for backends that may wait.
const ZEROES_PART_WAITING: u64 = 256 << 20;

/// An I/O command that was checked: its blocks are in its namespace, and its data are as long as they.
#[derive(Clone, Debug)]
pub struct Io {
    /// The namespace.
    pub namespace: Arc<Seat>,
    /// The operation.
    pub operation: Operation,
    /// Offset in the namespace, in bytes.
    pub offset: u64,
    /// Length in bytes; 0 if the operation has no one range.
    pub length: u32,
    pub(super) cid: Cid,
    /// Set if the controller or the queue itself asks for it.
    pub(super) own: Option<Arc<Own>>,
    /// Its part of a job, or its command of a drive, if it has one.
    pub(super) part: Option<Box<Part>>,
}

/// A part of an accelerator's job, or a command of a drive's controller.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    /// The command of a drive's controller.
    pub(super) passed: Option<Passed>,
    /// The vendor's command.
    pub(super) command: Option<JobCommand>,
    /// The job that the data have completed: all that is left to do.
    pub(super) job: Option<Arc<WindowJob>>,
    /// Result of the command.
    pub(super) result: Cell<u64>,
}

/// An operation of the NVM command set. NVM 3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads into the data.
    Read,
    /// Writes the data.
    Write {
        /// The bytes are durable when the command is done.
        fua: bool,
    },
    /// Compares the data with the blocks.
    Compare,
    /// Makes what was written durable.
    Flush,
    /// Writes zeros.
    WriteZeroes {
        /// The bytes are durable when the command is done.
        fua: bool,
    },
    /// Reads, and discards what was read.
    Verify,
    /// The host tells about ranges of blocks, which are the data.
    DatasetManagement {
        /// Number of ranges.
        ranges: u16,
        /// The host needs the blocks no more.
        deallocates: bool,
    },
    /// Copies from ranges of blocks, which are the data, to the offset.
    Copy {
        /// Number of ranges.
        ranges: u16,
        /// Their format.
        format: CopyFormat,
        /// The bytes are durable when the command is done.
        fua: bool,
    },
    /// Brings data of an accelerator's job, by a vendor's command.
    Submit,
    /// Gets data of an accelerator's job, by a vendor's command.
    Fetch,
    /// Changes reservations; the data are keys.
    Reserve(ReservationCommand),
    /// A drive's own controller carries it out.
    Pass {
        /// Direction of its data.
        transfer: Transfer,
        /// It may change blocks.
        changes: bool,
    },
    /// Something that the queue itself asks for; it has no data.
    Own,
}

impl Operation {
    /// Returns true if the host sends the data.
    pub const fn is_to_controller(self) -> bool {
        self.has_data() && !self.is_to_host()
    }

    /// Returns true if the host gets the data.
    pub const fn is_to_host(self) -> bool {
        match self {
            Operation::Pass { transfer, .. } => matches!(transfer, Transfer::ToHost),
            _ => matches!(self, Operation::Read | Operation::Fetch),
        }
    }

    /// Returns true if the command has data.
    pub const fn has_data(self) -> bool {
        match self {
            Operation::Pass { transfer, .. } => !matches!(transfer, Transfer::None),
            _ => !matches!(
                self,
                Operation::Flush | Operation::WriteZeroes { .. } | Operation::Verify | Operation::Own
            ),
        }
    }

    const fn changes(self) -> bool {
        match self {
            Operation::Write { .. }
            | Operation::WriteZeroes { .. }
            | Operation::Copy { .. }
            | Operation::Submit => true,
            Operation::DatasetManagement { deallocates, .. } => deallocates,
            Operation::Pass { changes, .. } => changes,
            _ => false,
        }
    }

    /// Returns whether reservations have to let the host write, or read; `None` if they do not count. NVMe Base 2.0, 8.19.7 and NVM 5.10.
    const fn needs(self) -> Option<bool> {
        match self {
            Operation::Read | Operation::Compare | Operation::Verify | Operation::Fetch => Some(false),
            Operation::Write { .. }
            | Operation::Submit
            | Operation::WriteZeroes { .. }
            | Operation::Copy { .. }
            | Operation::DatasetManagement { .. }
            | Operation::Flush => Some(true),
            // A drive that commands pass to has no reservations of the target.
            Operation::Reserve(_) | Operation::Pass { .. } | Operation::Own => None,
        }
    }
}

/// The I/O commands that there are, and whether each changes blocks.
pub(super) const SUPPORTED: [(Opcode, bool); 12] = [
    (Opcode::FLUSH, false),
    (Opcode::WRITE, true),
    (Opcode::READ, false),
    (Opcode::COMPARE, false),
    (Opcode::WRITE_ZEROES, true),
    (Opcode::DATASET_MANAGEMENT, true),
    (Opcode::VERIFY, false),
    (Opcode::RESERVATION_REGISTER, false),
    (Opcode::RESERVATION_REPORT, false),
    (Opcode::RESERVATION_ACQUIRE, false),
    (Opcode::RESERVATION_RELEASE, false),
    (Opcode::COPY, true),
];

/// Ranges of namespaces: offset and length in bytes.
type Sources = Vec<(Arc<Seat>, u64, u64)>;

/// An I/O that an io_uring or the offload engine carries out: it runs until this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    seat: Arc<Seat>,
    writes: bool,
    /// It is a command of a drive's controller.
    passes: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.writes {
            self.seat.fence().leave(self.seat.stripe());
        }
        if let Some(user) = self.seat.user() {
            if let Some(drive) = user.subsystem.drive().filter(|_| self.passes) {
                drive.controller.end(self.seat.stripe());
            }
            user.session.leave(self.writes);
        }
    }
}

impl Io {
    /// Checks a command of which the transport moves `data_len` bytes, `data_max` at most. `copy_formats` are those that the host has enabled.
    pub(super) fn check(
        view: &View,
        sqe: &Sqe,
        data_len: u32,
        data_max: u32,
        copy_formats: u16,
    ) -> Result<Io, Status> {
        let fua = Rw::parse(sqe).fua;
        let reserve = |command: Option<ReservationCommand>| match command {
            Some(command) => Ok(Operation::Reserve(command)),
            None => Err(Status::INVALID_FIELD.do_not_retry()),
        };
        let operation = match sqe.opcode() {
            Opcode::READ => Operation::Read,
            Opcode::WRITE => Operation::Write { fua },
            Opcode::FLUSH => Operation::Flush,
            Opcode::COMPARE => Operation::Compare,
            Opcode::WRITE_ZEROES => Operation::WriteZeroes { fua },
            Opcode::VERIFY => Operation::Verify,
            Opcode::DATASET_MANAGEMENT => Operation::DatasetManagement {
                ranges: DatasetRange::count(sqe),
                deallocates: sqe.dword(11) & DatasetRange::DEALLOCATE != 0,
            },
            Opcode::COPY => {
                let copy = Copy::parse(sqe);
                let formats = [CopyFormat::Same, CopyFormat::Any].into_iter();
                let mut enabled =
                    formats.filter(|format| *format == CopyFormat::Same || copy_formats & format.bit() != 0);
                let format = enabled.find(|format| *format as u8 == copy.format);
                Operation::Copy {
                    ranges: copy.ranges,
                    format: format.ok_or(Status::INVALID_FIELD.do_not_retry())?,
                    fua: copy.fua,
                }
            }
            JobCommand::SUBMIT | JobCommand::FETCH => {
                if view.seat(sqe.nsid())?.accelerator().is_none() {
                    return Err(Status::INVALID_OPCODE.do_not_retry());
                }
                match JobCommand::parse(sqe).map_err(|_| Status::INVALID_FIELD.do_not_retry())? {
                    JobCommand::Submit { .. } => Operation::Submit,
                    JobCommand::Fetch { .. } => Operation::Fetch,
                }
            }
            Opcode::RESERVATION_REGISTER => reserve(ReservationCommand::register(sqe))?,
            Opcode::RESERVATION_ACQUIRE => reserve(ReservationCommand::acquire(sqe))?,
            Opcode::RESERVATION_RELEASE => reserve(ReservationCommand::release(sqe))?,
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        let namespace = view.seat(sqe.nsid())?.clone();
        let mut io = Io {
            namespace,
            operation,
            offset: 0,
            length: 0,
            cid: sqe.cid(),
            own: None,
            part: None,
        };
        if let Some(writes) = operation.needs() {
            io.namespace.check_reservation(writes)?;
        }
        if operation.changes() && io.namespace.is_protected {
            return Err(Status::WRITE_PROTECTED.do_not_retry());
        }
        if let Operation::Submit | Operation::Fetch = operation {
            io.part = Some(Box::new(Part {
                command: JobCommand::parse(sqe).ok(),
                ..Part::default()
            }));
            // No transport moves data of no bytes.
            if data_len == 0 || data_len > data_max {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            io.length = data_len;
            return Ok(io);
        }
        // A list of ranges may come in a longer buffer.
        let list = match operation {
            Operation::Flush => return Ok(io),
            Operation::DatasetManagement { ranges, .. } => Some((DatasetRange::LEN, ranges)),
            Operation::Copy { ranges, .. } if ranges > COPY_RANGES_MAX => {
                return Err(Status::COPY_TOO_LONG.do_not_retry());
            }
            Operation::Copy { ranges, .. } => Some((CopyRange::LEN, ranges)),
            Operation::Reserve(_) if sqe.opcode() == Opcode::RESERVATION_RELEASE => {
                Some((ReservationKeys::RELEASE_LEN, 1))
            }
            Operation::Reserve(_) => Some((ReservationKeys::LEN, 1)),
            _ => None,
        };
        if let Some((bytes, number)) = list {
            let bytes = (bytes * usize::from(number)) as u32;
            if data_len < bytes || data_len > data_max.min(8192) {
                return Err(Status::SGL_LENGTH_INVALID.do_not_retry());
            }
            if let Operation::Copy { .. } = operation {
                (io.offset, _) = io.namespace.range(Copy::parse(sqe).slba, 1)?;
            }
            return Ok(io);
        }
        let rw = Rw::parse(sqe);
        // At most 2^16 blocks of 2^16 bytes.
        let (offset, length) = io.namespace.range(rw.slba, rw.blocks)?;
        let Ok(length) = u32::try_from(length) else {
            return Err(Status::INVALID_FIELD.do_not_retry());
        };
        if operation.has_data() {
            if length > data_max {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            if length != data_len {
                return Err(Status::SGL_LENGTH_INVALID.do_not_retry());
            }
        }
        (io.offset, io.length) = (offset, length);
        Ok(io)
    }

    /// Returns true if [`Io::execute`] may take long: then it must not run on a reactor's thread.
    pub fn may_wait(&self) -> bool {
        let is_long = match self.operation {
            // They wait until they are alone, or have many blocks.
            Operation::Reserve(_)
            | Operation::Own
            | Operation::Copy { .. }
            | Operation::DatasetManagement { .. } => true,
            _ => self.length > INLINE_MAX,
        };
        is_long || self.job().is_some() || self.namespace.backend.may_wait()
    }

    /// Returns true if one thread is to carry out all that may take long of the namespace.
    pub(crate) fn is_serial(&self) -> bool {
        self.namespace.accelerator().is_some()
    }

    /// Carries the command out on a reactor's thread, as far as that is quick. `None`: [`Io::execute`] does the rest, on another thread. `data` has the
    /// command's length if it has data.
    pub fn execute_quick(&mut self, data: &mut [u8]) -> Option<Status> {
        if self.may_wait() {
            return None;
        }
        let feeds = match self.operation {
            Operation::Write { .. } => self.is_serial(),
            Operation::Submit => true,
            _ => false,
        };
        if !feeds {
            return Some(self.execute(data));
        }
        match self.feed(data) {
            Ok(None) => Some(Status::SUCCESS),
            Ok(Some(job)) => {
                self.part.get_or_insert_default().job = Some(Arc::new(job));
                None
            }
            Err(status) => Some(status),
        }
    }

    /// Gives an accelerator data. Returns the job that they complete.
    fn feed(&self, data: &[u8]) -> Result<Option<WindowJob>, Status> {
        let _running = self.enter(true)?;
        self.write(|| match self.command() {
            Some(JobCommand::Submit { window, offset, job }) => {
                self.namespace.submit((window, offset), job, data)
            }
            _ => self.namespace.write(self.offset, data),
        })
    }

    fn command(&self) -> Option<JobCommand> {
        self.part.as_ref()?.command
    }

    fn job(&self) -> Option<&Arc<WindowJob>> {
        self.part.as_ref()?.job.as_ref()
    }

    /// Returns the result that the completion has, in its first dwords.
    pub(crate) fn result(&self) -> u64 {
        self.part.as_ref().map_or(0, |part| part.result.get())
    }

    /// Runs a job of the accelerator that the namespace is.
    fn run(&self, job: &WindowJob) -> Result<(), Status> {
        self.namespace.run(job)?;
        if let (Operation::Submit, Some(part)) = (self.operation, &self.part) {
            part.result.set(job.result().into());
        }
        Ok(())
    }

    /// Returns the file, and the direction, by which an io_uring moves the data between the range and their buffer, if one can: otherwise [`Io::execute`] carries
    /// it out, or tells why it must not run, on a thread that may wait. It runs until the last result is dropped.
    pub(crate) fn start(&self) -> Option<(Arc<File>, Direction, Running)> {
        let direction = match self.operation {
            Operation::Read => Direction::Read,
            Operation::Write { fua: false } => Direction::Write,
            Operation::Pass { .. } => self.passed_counts()?,
            _ => return None,
        };
        let file = self.namespace.backend.file(direction)?.clone();
        Some((
            file,
            direction,
            self.start_elsewhere(direction == Direction::Write)?,
        ))
    }

    /// Begins what is carried out neither here nor on a thread of a medium, if it may be: otherwise [`Io::execute`] tells why it must not run. It runs until
    /// the result is dropped.
    pub(crate) fn start_elsewhere(&self, writes: bool) -> Option<Running> {
        let seat = self.namespace.clone();
        // Somebody may want to be alone with the namespace.
        if writes && !seat.fence().try_enter(seat.stripe()) {
            return None;
        }
        let passes = matches!(self.operation, Operation::Pass { .. });
        if passes && !self.begin_passed() {
            if writes {
                seat.fence().leave(seat.stripe());
            }
            return None;
        }
        if let Some(user) = seat.user() {
            user.session.begin(writes);
        }
        // From here on its drop undoes that.
        let running = Running { seat, writes, passes };
        let seat = &running.seat;
        let is_over = seat.user().is_some_and(|user| user.session.is_over());
        let is_let = || match self.operation.needs() {
            Some(writes) => seat.check_reservation(writes).is_ok(),
            None => true,
        };
        let may_run = !is_over && seat.check_wanted(self.cid).is_ok() && is_let();
        may_run.then_some(running)
    }

    /// Carries the command out. `data` has the command's length if it has data.
    pub fn execute(&self, data: &mut [u8]) -> Status {
        match self.try_execute(data) {
            Ok(()) => Status::SUCCESS,
            Err(status) => status,
        }
    }

    /// Returns the drive whose own memory may take the data.
    pub(crate) fn peer(&self) -> Option<&DriveBackend> {
        match self.operation {
            Operation::Read | Operation::Write { .. } if self.own.is_none() => self.namespace.backend.peer(),
            _ => None,
        }
    }

    /// Returns the drive of which the offload engine may carry it out.
    pub(crate) fn offloading(&self) -> Option<&DriveBackend> {
        let is_offloaded = matches!(
            self.operation,
            Operation::Read | Operation::Write { .. } | Operation::Flush
        );
        let drive = self.namespace.backend.peer()?;
        let is_offloaded = is_offloaded && self.own.is_none() && drive.offload().is_some();
        is_offloaded.then_some(drive)
    }

    /// Carries out a read or a write whose data are in the drive's memory.
    pub(crate) fn execute_on_peer(&self, data: &mut PeerData) -> Status {
        match self.try_execute_on_peer(data) {
            Ok(()) => Status::SUCCESS,
            Err(status) => status,
        }
    }

    fn try_execute_on_peer(&self, data: &mut PeerData) -> Result<(), Status> {
        let drive = self.peer().ok_or(Status::INTERNAL_ERROR.do_not_retry())?;
        let _running = self.enter(self.operation.changes())?;
        let (offset, length) = (self.offset, self.length.into());
        let Operation::Write { fua } = self.operation else {
            self.namespace.check_reservation(false)?;
            return drive.read_to_peer(offset, length, data);
        };
        self.write(|| drive.write_from_peer(offset, length, data))?;
        if fua { drive.flush() } else { Ok(()) }
    }

    /// Begins something on a thread of a medium, or a change of blocks.
    pub(super) fn enter(&self, changes: bool) -> Result<Option<association::Running<'_>>, Status> {
        // A reset, after which the host may write the same blocks by another reactor, waits for both.
        let is_counted = changes || self.may_wait();
        let Some(user) = self.namespace.user().filter(|_| is_counted) else {
            return Ok(None);
        };
        let running = user.session.enter(changes).ok_or(Status::SQ_DELETED)?;
        self.namespace.check_wanted(self.cid)?;
        Ok(Some(running))
    }

    fn try_execute(&self, data: &mut [u8]) -> Result<(), Status> {
        let backend = &self.namespace.backend;
        if let Some(own) = &self.own {
            own.execute(self);
            return Ok(());
        }
        let _running = self.enter(self.operation.changes())?;
        if let Some(job) = self.job() {
            return self.run(job);
        }
        match self.operation {
            Operation::Read => {
                self.namespace.check_reservation(false)?;
                self.namespace.read(self.offset, data)
            }
            Operation::Write { fua } => {
                if let Some(job) = self.write(|| self.namespace.write(self.offset, data))? {
                    return self.run(&job);
                }
                if fua && !mutant!(FuaNotFlushed) {
                    backend.flush()
                } else {
                    Ok(())
                }
            }
            Operation::WriteZeroes { fua } => {
                self.zeroes(self.offset, self.length.into(), false)?;
                if fua { backend.flush() } else { Ok(()) }
            }
            Operation::Flush => {
                self.namespace.check_reservation(true)?;
                backend.flush()
            }
            Operation::Compare => {
                self.namespace.check_reservation(false)?;
                self.compare(data)
            }
            Operation::Verify => {
                self.namespace.check_reservation(false)?;
                self.by_parts(|_, _| Ok(()))
            }
            Operation::DatasetManagement { ranges, deallocates } => self.manage(ranges, deallocates, data),
            Operation::Copy { ranges, format, fua } => {
                self.copy(ranges, format, data)?;
                if fua { backend.flush() } else { Ok(()) }
            }
            Operation::Submit | Operation::Fetch => match self.command() {
                Some(JobCommand::Submit { window, offset, job }) => {
                    let submitted = self.write(|| self.namespace.submit((window, offset), job, data))?;
                    submitted.map_or(Ok(()), |job| self.run(&job))
                }
                Some(JobCommand::Fetch { window, offset }) => {
                    self.namespace.check_reservation(false)?;
                    let whole = self.namespace.fetch((window, offset), data)?;
                    if let Some(part) = &self.part {
                        part.result.set(whole.into());
                    }
                    Ok(())
                }
                None => Err(Status::INTERNAL_ERROR),
            },
            Operation::Reserve(command) => self.reserve(&command, data),
            Operation::Pass { .. } => self.pass(data),
            Operation::Own => Ok(()),
        }
    }

    /// Runs one write of the backend, if reservations let the host write.
    pub(super) fn write<T>(&self, write: impl FnOnce() -> Result<T, Status>) -> Result<T, Status> {
        let _writing = self.namespace.fence().write(self.namespace.stripe());
        if !mutant!(ReservationCheckedOnce) {
            self.namespace.check_reservation(true)?;
        }
        write()
    }

    /// Writes zeros in parts, or deallocates in parts.
    fn zeroes(&self, offset: u64, length: u64, deallocates: bool) -> Result<(), Status> {
        let part_max = match self.namespace.backend.may_wait() {
            true => ZEROES_PART_WAITING,
            false => ZEROES_PART,
        };
        let mut at = 0;
        while at < length {
            let part = (length - at).min(part_max);
            self.write(|| self.namespace.clear(offset + at, part, deallocates))?;
            at += part;
        }
        Ok(())
    }

    pub(super) fn compare(&self, data: &[u8]) -> Result<(), Status> {
        self.by_parts(|at, stored| {
            let given = data.get(at..at + stored.len());
            match given == Some(stored) {
                true => Ok(()),
                false => Err(Status::COMPARE_FAILURE.do_not_retry()),
            }
        })
    }

    /// Reads the blocks in parts.
    fn by_parts(&self, mut part: impl FnMut(usize, &[u8]) -> Result<(), Status>) -> Result<(), Status> {
        let length = self.length as usize;
        let mut stored = Pages::new(length.min(PART));
        for at in (0..length).step_by(PART) {
            let stored = &mut stored[..(length - at).min(PART)];
            self.namespace.read(self.offset + at as u64, stored)?;
            part(at, stored)?;
        }
        Ok(())
    }

    fn manage(&self, ranges: u16, deallocates: bool, data: &[u8]) -> Result<(), Status> {
        let ranges = DatasetRange::parse(data).take(ranges.into());
        // All of them are checked before blocks of the first are gone.
        for range in ranges.clone() {
            self.namespace.range(range.slba, range.blocks)?;
        }
        if !deallocates {
            return Ok(());
        }
        for range in ranges {
            let (offset, length) = self.namespace.range(range.slba, range.blocks)?;
            self.zeroes(offset, length, true)?;
        }
        Ok(())
    }

    /// Returns the bytes that count for the limit of its host: for a Copy, whose ranges are not there yet, the most that it may have.
    pub(super) fn moves(&self) -> u64 {
        match self.operation {
            Operation::Read
            | Operation::Write { .. }
            | Operation::Compare
            | Operation::Verify
            | Operation::Submit
            | Operation::Fetch => self.length.into(),
            Operation::Copy { .. } => COPY_BYTES_MAX,
            Operation::Pass { .. } => self.passed_bytes(),
            _ => 0,
        }
    }

    /// Returns the direction in which it counts as a read or a write.
    pub(super) fn counts(&self) -> Option<Direction> {
        match self.operation {
            Operation::Read | Operation::Compare | Operation::Verify => Some(Direction::Read),
            Operation::Write { .. } => Some(Direction::Write),
            Operation::Pass { .. } => self.passed_counts(),
            _ => None,
        }
    }

    /// Copies. All ranges are checked before the first is copied, so one that is refused has changed nothing.
    fn copy(&self, ranges: u16, format: CopyFormat, data: &[u8]) -> Result<(), Status> {
        let checked = self.copy_ranges(ranges, format, data);
        let bytes = checked.as_ref().map_or(0, |(.., length)| *length);
        if let Some(user) = self.namespace.user() {
            user.session.association.limit.give_back(COPY_BYTES_MAX - bytes);
        }
        let (sources, mut to_offset, length) = checked?;
        let to = &*self.namespace;
        let mut buffer = Pages::new(PART.min(length as usize));
        for (from, offset, length) in &sources {
            let mut at = 0;
            while at < *length {
                let part = (length - at).min(PART as u64) as usize;
                from.read(offset + at, &mut buffer[..part])?;
                if let Some(job) = self.write(|| to.write(to_offset, &buffer[..part]))? {
                    to.run(&job)?;
                }
                at += part as u64;
                to_offset += part as u64;
            }
            if mutant!(CopyRangesPiled) {
                to_offset -= length;
            }
        }
        Ok(())
    }

    /// Returns the ranges of a Copy, with their offsets and lengths in bytes, and the offset and length of what they become.
    fn copy_ranges(
        &self,
        ranges: u16,
        format: CopyFormat,
        data: &[u8],
    ) -> Result<(Sources, u64, u64), Status> {
        let to = &*self.namespace;
        let ranges = CopyRange::parse(data).take(ranges.into());
        let mut sources = Vec::with_capacity(ranges.clone().count());
        let mut total = 0;
        for range in ranges {
            let from = match format {
                CopyFormat::Same => self.namespace.clone(),
                CopyFormat::Any => self.source(range.nsid)?,
            };
            if from.block_shift != to.block_shift {
                return Err(Status::COPY_INCOMPATIBLE.do_not_retry());
            }
            if range.fast_only && format == CopyFormat::Any {
                return Err(Status::COPY_NOT_FAST.do_not_retry());
            }
            if !mutant!(CopySourceUnchecked) {
                from.check_reservation(false)?;
            }
            total += u64::from(range.blocks);
            if total > to.copy_blocks_max().into() {
                return Err(Status::COPY_TOO_LONG.do_not_retry());
            }
            let (offset, length) = from.range(range.slba, range.blocks)?;
            sources.push((from, offset, length));
        }
        // At most the blocks of one Copy.
        let (offset, length) = to.range(self.offset >> to.block_shift, total as u32)?;
        let overlaps = sources
            .iter()
            .any(|(from, at, long)| from.nsid == to.nsid && *at < offset + length && offset < at + long);
        if overlaps {
            return Err(Status::COPY_OVERLAPS.do_not_retry());
        }
        Ok((sources, offset, length))
    }

    /// Returns a namespace of the same subsystem.
    fn source(&self, nsid: NsId) -> Result<Arc<Seat>, Status> {
        if nsid == self.namespace.nsid {
            return Ok(self.namespace.clone());
        }
        let user = self.namespace.user().ok_or(Status::INVALID_NAMESPACE)?;
        let shared = user.subsystem.reach(nsid, user.local)?;
        Ok(Arc::new(Seat::new(shared, Some(user.clone()))))
    }

    fn reserve(&self, command: &ReservationCommand, data: &[u8]) -> Result<(), Status> {
        let user = self.namespace.user().ok_or(Status::INTERNAL_ERROR)?;
        let association = &user.session.association;
        let keys = ReservationKeys::parse(data);
        let reservations = self.namespace.reservations();
        let alone = |set: &mut dyn FnMut()| self.namespace.alone(set);
        let notices = reservations.apply(alone, &association.host_id, command, &keys)?;
        if !notices.is_empty() {
            user.subsystem.notify(&self.namespace, &notices);
            association.tell();
        }
        Ok(())
    }
}
