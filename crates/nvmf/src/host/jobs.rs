//! Jobs of accelerators: data go into windows of the accelerators of a subsystem, and results come out, many at a time. `docs/accelerators.md` has the format.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_wire::accel::{AcceleratorInfo, DATA_OFFSET, Header, Job, JobKind, JobStatus, Outcome};
use rdmux_wire::nvme::{CopyFormat, IdentifyNamespace, NsId, Status};

use super::queue::Completion;
use super::{HostError, IoQueue, NamespaceInfo, Session, command};

/// Times that a job is given anew, because its window was lost with a controller.
const TRIES_MAX: u8 = 8;
/// Time between two looks at a job that runs although its last write is done: that was sent twice, by two ways.
const LOOK_AFTER: Duration = Duration::from_millis(20);
/// Bits of a command's token for the offset in the window.
const OFFSET_BITS: u32 = 40;

/// An accelerator of a subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// Its namespace.
    pub nsid: NsId,
    /// Its description.
    pub info: AcceleratorInfo,
    block_bytes: u64,
}

impl Accelerator {
    /// Returns the accelerator that a namespace is; `None`: it is none.
    ///
    /// # Errors
    /// Its description cannot be.
    pub fn of(namespace: &NamespaceInfo) -> Result<Option<Accelerator>, HostError> {
        let info = IdentifyNamespace::parse(&namespace.identify_bytes)?.accelerator;
        let accelerator = info.map(|info| Accelerator {
            nsid: namespace.nsid,
            info,
            block_bytes: namespace.block_bytes(),
        });
        let is_whole = |one: &Accelerator| {
            u64::from(one.info.windows).checked_mul(one.info.window_bytes) == Some(namespace.bytes())
                && one.block_bytes <= DATA_OFFSET
        };
        if accelerator.as_ref().is_some_and(|one| !is_whole(one)) {
            return Err(HostError::Inconsistent {
                what: "accelerator",
                why: format!(
                    "in namespace {} has windows of another size than it",
                    namespace.nsid
                ),
            });
        }
        Ok(accelerator)
    }

    /// Returns those of a subsystem, in the order of their namespaces.
    ///
    /// # Errors
    /// The controller does not tell.
    pub fn list(session: &Session) -> Result<Vec<Accelerator>, HostError> {
        let mut found = Vec::new();
        for nsid in session.controller().namespaces()? {
            let namespace = session.controller().namespace(nsid)?;
            if let Some(accelerator) = Accelerator::of(&namespace)? {
                session.open_namespace(nsid)?;
                found.push(accelerator);
            }
        }
        Ok(found)
    }
}

/// A job to be done.
#[derive(Debug)]
pub struct Request {
    /// Chosen by the caller.
    pub token: u64,
    /// Its kind, which the accelerators take.
    pub kind: JobKind,
    /// Level of a compression; 0 is the accelerator's own.
    pub level: u8,
    /// The result of a compression is padded to a multiple of this.
    pub align: u32,
    /// Its data, no more than a window has room for.
    pub data: Vec<u8>,
    /// The result stays in its window, until it is [stored](Jobs::store) or [dropped](Jobs::release).
    pub stays: bool,
}

/// A job that is done.
#[derive(Debug)]
pub struct Done {
    /// The job, as it was given.
    pub request: Request,
    /// The outcome.
    pub outcome: Outcome,
    /// The result; empty if it stays in the window.
    pub result: Vec<u8>,
    /// Its window, if it stays.
    pub window: usize,
}

/// An event of [`Jobs`].
#[derive(Debug)]
pub enum JobEvent {
    /// A job is done.
    Done(Done),
    /// A result is stored; its window is free.
    Stored {
        /// The window.
        window: usize,
    },
}

/// A place in a namespace for results.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    nsid: NsId,
    block_bytes: u64,
    /// Blocks of one Copy.
    step: u32,
}

impl Destination {
    /// Returns that of a namespace of the accelerators' subsystem.
    ///
    /// # Errors
    /// The controller does not copy from other namespaces.
    pub fn new(session: &Arc<Session>, namespace: &NamespaceInfo) -> Result<Destination, HostError> {
        let identify = IdentifyNamespace::parse(&namespace.identify_bytes)?;
        let formats = session.controller().info().identify.copy_formats;
        let (range, all) = identify.copy_blocks;
        let step = u32::from(range).min(all);
        if formats & CopyFormat::Any.bit() == 0 || step == 0 {
            return Err(HostError::Inconsistent {
                what: "subsystem",
                why: "does not copy between namespaces: leave --to out".to_owned(),
            });
        }
        Ok(Destination {
            nsid: namespace.nsid,
            block_bytes: namespace.block_bytes(),
            step,
        })
    }
}

/// Reason for which jobs do not go on.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The connection is over.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The target refuses a command.
    #[error("the target refused {what} in namespace {nsid}: {status}")]
    Refused {
        /// The command.
        what: &'static str,
        /// The namespace.
        nsid: NsId,
        /// The status.
        status: Status,
    },
    /// A result was lost with its controller while it was copied.
    #[error("accelerator {0} was lost while a result was copied: begin again")]
    ResultLost(NsId),
    /// Windows are lost again and again.
    #[error("accelerator {0} has lost a job {TRIES_MAX} times: does another program of this host use it?")]
    Lost(NsId),
}

/// Jobs, on one I/O queue. Each window of each accelerator has one at a time.
#[derive(Debug)]
pub struct Jobs {
    queue: IoQueue,
    transfer_max: u64,
    windows: Vec<WindowSlot>,
    next_id: u64,
    buffers: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct WindowSlot {
    accelerator: Accelerator,
    /// Its first byte in the namespace.
    start: u64,
    job: Option<Running>,
}

#[derive(Debug)]
struct Running {
    request: Request,
    id: u64,
    tries: u8,
    /// Commands in flight, of this phase.
    in_flight: u32,
    phase: Phase,
    outcome: Option<Outcome>,
    result: Vec<u8>,
    /// That of the queue when the header told the outcome. Later the window may be another controller's, and empty.
    generation: u64,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Writes, from this offset of the window on.
    Send { next: u64 },
    /// Reads the header, not before a time.
    Look { after: Option<Instant> },
    /// Reads the header once more: the result may have come from another controller.
    Confirm { stored: bool },
    /// All is done, and the caller is to be told.
    End { stored: bool },
    /// Reads the result, from this offset of the window on.
    Fetch { next: u64 },
    /// The result stays, and the caller is to be told.
    Report,
    /// The caller knows.
    Stay,
    /// Copies the result, from this offset of the window on, to a block.
    Store { next: u64, to: Destination, block: u64 },
}

impl Running {
    /// Ends the job, if all that it has read or copied is of the controller that told its outcome.
    fn end(&mut self, stored: bool, generation: u64) {
        self.phase = match self.generation == generation {
            true => Phase::End { stored },
            false => Phase::Confirm { stored },
        };
    }

    /// Takes the outcome that the header has; `None`: the window has no header of this job.
    fn look(
        &mut self,
        outcome: Option<Outcome>,
        accelerator: &Accelerator,
        generation: u64,
    ) -> Result<(), JobError> {
        let nsid = accelerator.nsid;
        let over = outcome.filter(|outcome| outcome.status.is_over());
        let room = accelerator.info.data_bytes();
        if let Some(outcome) = over.filter(|outcome| outcome.length > room) {
            return Err(JobError::Host(HostError::Inconsistent {
                what: "accelerator",
                why: format!(
                    "in namespace {nsid} tells of a result of {} bytes in a window of {room}",
                    outcome.length
                ),
            }));
        }
        self.phase = match (self.phase, over) {
            (Phase::Confirm { stored: true }, None) => return Err(JobError::ResultLost(nsid)),
            // It was there all the time: no other job has this id.
            (Phase::Confirm { stored }, Some(_)) => Phase::End { stored },
            (_, Some(outcome)) => {
                (self.outcome, self.generation) = (Some(outcome), generation);
                match self.request.stays {
                    true => Phase::Report,
                    false => Phase::Fetch { next: DATA_OFFSET },
                }
            }
            (_, None) if outcome.is_some_and(|outcome| outcome.status == JobStatus::Running) => Phase::Look {
                after: Some(Instant::now() + LOOK_AFTER),
            },
            (_, None) => {
                self.tries += 1;
                if self.tries >= TRIES_MAX {
                    return Err(JobError::Lost(nsid));
                }
                self.result.clear();
                Phase::Send { next: 0 }
            }
        };
        Ok(())
    }

    /// Returns the event of its end; `None` if it has not run.
    fn report(&mut self, window: usize) -> Option<JobEvent> {
        let request = Request {
            data: std::mem::take(&mut self.request.data),
            ..self.request
        };
        Some(JobEvent::Done(Done {
            request,
            outcome: self.outcome?,
            result: std::mem::take(&mut self.result),
            window,
        }))
    }
}

impl Jobs {
    /// Uses all windows of accelerators, by a queue of its own.
    pub fn new(session: &Session, queue: IoQueue, accelerators: &[Accelerator], first_id: u64) -> Jobs {
        // Windows of different cores in turn.
        let windows = accelerators.iter().map(|one| one.info.windows).max().unwrap_or(0);
        let slot = |window: u32, accelerator: &Accelerator| WindowSlot {
            accelerator: *accelerator,
            start: u64::from(window) * accelerator.info.window_bytes,
            job: None,
        };
        let slots = (0..windows).flat_map(|window| {
            let having = accelerators.iter().filter(move |one| window < one.info.windows);
            having.map(move |one| slot(window, one))
        });
        Jobs {
            queue,
            // Whole pages, so that the data of each command begin at a block.
            transfer_max: u64::from(session.transfer_max()) / DATA_OFFSET * DATA_OFFSET,
            windows: slots.collect(),
            next_id: first_id,
            buffers: Vec::new(),
        }
    }

    /// Returns true if a window is free.
    pub fn has_room(&self) -> bool {
        self.windows.iter().any(|window| window.job.is_none())
    }

    /// Returns true if no job is under way or stays.
    pub fn is_empty(&self) -> bool {
        self.windows.iter().all(|window| window.job.is_none())
    }

    /// Begins a job.
    ///
    /// # Panics
    /// There is no [room](Jobs::has_room), or the data are too long.
    pub fn submit(&mut self, request: Request) {
        let mut free = self.windows.iter_mut().filter(|window| window.job.is_none());
        let slot = free.next().expect("the caller has looked for room");
        let room = slot.accelerator.info.data_bytes() as usize;
        assert!(
            request.data.len() <= room,
            "{} bytes in a window of {room}",
            request.data.len()
        );
        slot.job = Some(Running {
            request,
            id: self.next_id,
            tries: 0,
            in_flight: 0,
            phase: Phase::Send { next: 0 },
            outcome: None,
            result: Vec::new(),
            generation: 0,
        });
        self.next_id = self.next_id.wrapping_add(1);
    }

    /// Stores a result that stays, from a block on. Its window is free after [`JobEvent::Stored`].
    pub fn store(&mut self, window: usize, to: Destination, block: u64) {
        if let Some(job) = &mut self.windows[window].job {
            job.phase = Phase::Store {
                next: DATA_OFFSET,
                to,
                block,
            };
        }
    }

    /// Returns the queue. Jobs that are not done have no result.
    pub fn into_queue(self) -> IoQueue {
        self.queue
    }

    /// Drops a result that stays.
    pub fn release(&mut self, window: usize) {
        self.windows[window].job = None;
    }

    /// Sleeps until something has happened. Returns `None` when there is nothing left to wait for.
    ///
    /// # Errors
    /// Jobs do not go on.
    pub fn wait(&mut self) -> Result<Option<JobEvent>, JobError> {
        loop {
            let now = Instant::now();
            let mut looks_at: Option<Instant> = None;
            for at in 0..self.windows.len() {
                if let Some(event) = self.advance(at, now, &mut looks_at)? {
                    return Ok(Some(event));
                }
            }
            match (self.queue.in_flight(), looks_at) {
                (0, None) => return Ok(None),
                (_, Some(time)) => self.queue.wait_until(time)?,
                (_, None) => self.queue.wait()?,
            }
            while let Some(completion) = self.queue.poll() {
                self.handle(completion)?;
            }
        }
    }

    /// Submits what a job can send now. Returns the event if its phase is the last one.
    fn advance(
        &mut self,
        at: usize,
        now: Instant,
        looks_at: &mut Option<Instant>,
    ) -> Result<Option<JobEvent>, JobError> {
        let slot = &mut self.windows[at];
        let Some(job) = &mut slot.job else {
            return Ok(None);
        };
        let (nsid, block) = (slot.accelerator.nsid, slot.accelerator.block_bytes);
        let lba = |offset: u64| (slot.start + offset) / block;
        let token = |offset: u64| (at as u64) << OFFSET_BITS | offset;
        loop {
            let has_room = self.queue.room() > 0;
            match &mut job.phase {
                Phase::Send { next } => {
                    let end = DATA_OFFSET + (job.request.data.len() as u64).next_multiple_of(block);
                    if *next == end {
                        if job.in_flight > 0 {
                            return Ok(None);
                        }
                        job.phase = Phase::Look { after: None };
                        continue;
                    }
                    if !has_room {
                        return Ok(None);
                    }
                    let bytes = (end - *next).min(self.transfer_max);
                    let mut buffer = self.buffers.pop().unwrap_or_default();
                    fill(&mut buffer, &slot.accelerator, job.id, &job.request, *next, bytes);
                    let mut write =
                        command::write(nsid, lba(*next), (bytes / block) as u32, bytes as u32, buffer);
                    write.token = token(*next);
                    self.queue.submit(write);
                    *next += bytes;
                }
                Phase::Look { .. } | Phase::Confirm { .. } => {
                    if let Phase::Look { after: Some(time) } = job.phase
                        && time > now
                    {
                        *looks_at = Some(looks_at.map_or(time, |first| first.min(time)));
                        return Ok(None);
                    }
                    if job.in_flight > 0 || !has_room {
                        return Ok(None);
                    }
                    let mut read = command::read(
                        nsid,
                        lba(0),
                        1,
                        block as u32,
                        self.buffers.pop().unwrap_or_default(),
                    );
                    read.buffer.resize(block as usize, 0);
                    read.token = token(0);
                    self.queue.submit(read);
                }
                Phase::Fetch { next } => {
                    let length = u64::from(job.outcome.map_or(0, |outcome| outcome.length));
                    let end = DATA_OFFSET + length.next_multiple_of(block);
                    if *next == end {
                        if job.in_flight > 0 {
                            return Ok(None);
                        }
                        job.result.truncate(length as usize);
                        job.end(false, self.queue.generation());
                        continue;
                    }
                    if !has_room {
                        return Ok(None);
                    }
                    let bytes = (end - *next).min(self.transfer_max);
                    let mut buffer = self.buffers.pop().unwrap_or_default();
                    buffer.resize(buffer.len().max(bytes as usize), 0);
                    let mut read =
                        command::read(nsid, lba(*next), (bytes / block) as u32, bytes as u32, buffer);
                    read.token = token(*next);
                    self.queue.submit(read);
                    *next += bytes;
                }
                Phase::End { stored: true } => {
                    slot.job = None;
                    return Ok(Some(JobEvent::Stored { window: at }));
                }
                Phase::End { stored: false } => {
                    let done = job.report(at);
                    slot.job = None;
                    return Ok(done);
                }
                Phase::Report => {
                    job.phase = Phase::Stay;
                    return Ok(job.report(at));
                }
                Phase::Stay => return Ok(None),
                Phase::Store {
                    next,
                    to,
                    block: first,
                } => {
                    let length = u64::from(job.outcome.map_or(0, |outcome| outcome.length));
                    let end = DATA_OFFSET + length.next_multiple_of(block);
                    if *next == end {
                        if job.in_flight > 0 {
                            return Ok(None);
                        }
                        job.end(true, self.queue.generation());
                        continue;
                    }
                    if !has_room {
                        return Ok(None);
                    }
                    // The target checks that both have blocks of one size.
                    let blocks = ((end - *next) / block).min(to.step.into());
                    let behind = (*next - DATA_OFFSET) / to.block_bytes;
                    let mut copy = command::copy(to.nsid, *first + behind, nsid, lba(*next), blocks as u32);
                    copy.token = token(*next);
                    self.queue.submit(copy);
                    *next += blocks * block;
                }
            }
            job.in_flight += 1;
        }
    }

    /// Takes the completion of a command.
    fn handle(&mut self, completion: Completion) -> Result<(), JobError> {
        let token = completion.command.token;
        let (at, offset) = ((token >> OFFSET_BITS) as usize, token & ((1 << OFFSET_BITS) - 1));
        let accelerator = self.windows[at].accelerator;
        let nsid = accelerator.nsid;
        let Some(job) = &mut self.windows[at].job else {
            return Ok(());
        };
        job.in_flight -= 1;
        let refused = |what| JobError::Refused {
            what,
            nsid,
            status: completion.status,
        };
        let is_done = completion.status.is_success();
        match &mut job.phase {
            // It was sent by another way before, and has completed the job there: the header tells.
            Phase::Send { .. } if completion.status.is(Status::COMMAND_SEQUENCE_ERROR) => {}
            Phase::Send { .. } if !is_done => return Err(refused("data of a job")),
            Phase::Send { .. } | Phase::Report | Phase::Stay | Phase::End { .. } => {}
            Phase::Look { .. } | Phase::Confirm { .. } | Phase::Fetch { .. } if !is_done => {
                return Err(refused("to read a result"));
            }
            Phase::Look { .. } | Phase::Confirm { .. } => {
                let header = Header::parse(completion.bytes()).ok();
                let outcome = header
                    .filter(|header| header.job.id == job.id)
                    .and_then(|header| header.outcome);
                job.look(outcome, &accelerator, self.queue.generation())?;
            }
            Phase::Fetch { .. } => {
                let (from, bytes) = ((offset - DATA_OFFSET) as usize, completion.bytes());
                let end = from + bytes.len();
                job.result.resize(job.result.len().max(end), 0);
                job.result[from..end].copy_from_slice(bytes);
            }
            Phase::Store { .. } if !is_done => return Err(refused("to copy a result")),
            Phase::Store { .. } => {}
        }
        self.buffers.push(completion.command.buffer);
        Ok(())
    }
}

/// Writes a part of what a window is to have.
fn fill(
    buffer: &mut Vec<u8>,
    accelerator: &Accelerator,
    id: u64,
    request: &Request,
    offset: u64,
    bytes: u64,
) {
    buffer.clear();
    if offset == 0 {
        buffer.resize(DATA_OFFSET as usize, 0);
        let job = Job {
            kind: request.kind,
            algorithm: accelerator.info.algorithm,
            level: request.level,
            id,
            length: request.data.len() as u32,
            align: request.align,
        };
        Header { job, outcome: None }.emit(buffer);
    }
    let from = offset.saturating_sub(DATA_OFFSET) as usize;
    let rest = request.data.get(from..).unwrap_or_default();
    let room = bytes as usize - buffer.len();
    buffer.extend_from_slice(&rest[..rest.len().min(room)]);
    buffer.resize(bytes as usize, 0);
}

#[cfg(test)]
mod tests {
    use rdmux_wire::accel::Algorithm;

    use super::*;

    #[test]
    fn look__refuses_a_result_that_is_longer_than_its_window() {
        let accelerator = Accelerator {
            nsid: NsId(2),
            info: AcceleratorInfo {
                algorithm: Algorithm::Null,
                level: 0,
                windows: 1,
                window_bytes: 1 << 20,
            },
            block_bytes: 4096,
        };
        let room = accelerator.info.data_bytes();
        for stays in [false, true] {
            let look = |status, length| {
                let mut job = Running {
                    request: Request {
                        token: 0,
                        kind: JobKind::Pass,
                        level: 0,
                        align: 0,
                        data: Vec::new(),
                        stays,
                    },
                    id: 1,
                    tries: 0,
                    in_flight: 0,
                    phase: Phase::Look { after: None },
                    outcome: None,
                    result: Vec::new(),
                    generation: 0,
                };
                let outcome = Outcome {
                    status,
                    length,
                    consumed: 0,
                    checksum: 0,
                };
                job.look(Some(outcome), &accelerator, 1)
            };
            for length in [0, room] {
                assert!(look(JobStatus::Done, length).is_ok());
            }
            for (status, length) in [
                (JobStatus::Done, room + 1),
                (JobStatus::Done, u32::MAX),
                (JobStatus::Corrupt, u32::MAX),
            ] {
                let error = look(status, length).unwrap_err();
                assert!(matches!(
                    error,
                    JobError::Host(HostError::Inconsistent {
                        what: "accelerator",
                        ..
                    })
                ));
                assert!(error.to_string().contains(&format!("{length} bytes")), "{error}");
            }
        }
    }
}
