//! Jobs that may wait for a medium run on threads, so that no client waits for another's disk. One thread per region runs its
//! reads, writes and flushes in order; checksums, which take long, have another, and so has the search for the region's file, for which
//! mappings wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdmux_runtime::Mailbox;
use rdmux_verbs::{Fault, Memory, Placement, Reach};
use rdmux_wire::push::{ErrorCode, Message};

use super::id::{ClientId, RegionId};
use super::lease::LeaseId;
use super::{CONNECTIONS_MAX, Mail, RECEIVES};
use crate::crc::crc64_while;
use crate::region::{Mapped, Region};

/// Maximum number of jobs that wait for one region: more than the messages of all clients of an address.
const JOBS_MAX: usize = CONNECTIONS_MAX * RECEIVES;

/// A job's client, and where the answer goes.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    /// The client's number, which is never reused.
    pub(super) client: ClientId,
    pub(super) slot: usize,
    pub(super) request: u64,
    /// Lease to release when the job is done.
    pub(super) lease: Option<LeaseId>,
}

/// The work of a job.
#[derive(Debug)]
pub(super) enum Task {
    Checksum {
        region: Arc<Region>,
        offset: u64,
        length: u64,
        /// Set when the client has gone: nobody wants the checksum then.
        gone: Arc<AtomicBool>,
    },
    Flush {
        memory: Arc<Mapped>,
        offset: u64,
        length: u64,
        placement: Placement,
    },
    Write {
        memory: Arc<Mapped>,
        offset: u64,
        bytes: Vec<u8>,
        placement: Placement,
        /// Set if it fails unless the region is in place ([`Region::check_place`]).
        in_place: bool,
    },
    Read {
        memory: Arc<Mapped>,
        offset: u64,
        length: u64,
        /// As for a write.
        in_place: bool,
    },
    /// Checks that the region is in place before it is mapped with a lease.
    Locate { region: Arc<Region>, lease: LeaseId },
}

/// The result of a job.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// The answer to the client.
    Answer(Message),
    /// The region that is to be mapped with this lease is in place, or why it is not.
    Located(LeaseId, Result<(), Failure>),
}

/// Why a request is refused: code and text of [`Message::Error`].
pub(super) type Failure = (ErrorCode, String);

/// Work that a [`Service`](super::Service) hands to its driver.
#[derive(Debug)]
pub struct Job {
    /// Number of the region.
    pub(super) region: RegionId,
    pub(super) ticket: Ticket,
    pub(super) task: Task,
    /// Set if the job waits for no medium, and for no job before it.
    pub(super) at_once: bool,
    /// Set if the client is welcome on a new connection only after this job is done.
    pub(super) counted: bool,
    /// Set if the job carries bytes that come or go by message, or flushes such bytes.
    pub(super) by_message: bool,
}

impl Job {
    /// Returns the client for which the job runs.
    pub fn client(&self) -> ClientId {
        self.ticket.client
    }

    /// Returns whether the job waits for nothing but processors and their memory.
    pub fn is_immediate(&self) -> bool {
        self.at_once
    }

    /// Runs the job.
    pub fn run(self) -> Finished {
        let outcome = self.task.run();
        Finished {
            ticket: self.ticket,
            outcome,
            counted: self.counted,
            by_message: self.by_message,
            cpu_ns: 0,
        }
    }

    /// Returns the failure of a job that could not begin.
    fn failed(self, text: &str) -> Finished {
        let outcome = self.task.failed((ErrorCode::Busy, text.into()));
        Finished {
            ticket: self.ticket,
            outcome,
            counted: self.counted,
            by_message: self.by_message,
            cpu_ns: 0,
        }
    }
}

/// A job that is done.
#[derive(Debug)]
pub struct Finished {
    pub(super) ticket: Ticket,
    pub(super) outcome: Outcome,
    pub(super) counted: bool,
    pub(super) by_message: bool,
    /// Processor time that a thread took for the job, if it is by message and ran on a thread.
    pub(super) cpu_ns: u64,
}

/// The jobs of a region that wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    Accesses,
    Checksums,
    Places,
}

/// Threads for jobs.
pub(super) type Workers = rdmux_runtime::Workers<(RegionId, Lane), Job, Mail>;

pub(super) fn workers(server: Mailbox<Mail>) -> Workers {
    Workers::new("push-work", JOBS_MAX, run_all, server)
}

/// Runs a job: at once if it waits for nothing, otherwise on a thread.
pub(super) fn submit(workers: &mut Workers, job: Job) -> Option<Finished> {
    if job.at_once {
        return Some(job.run());
    }
    let lane = (job.region, job.task.lane());
    let (job, error) = workers.submit(lane, job).err()?;
    Some(job.failed(&format!("the server cannot take this request now: {error}")))
}

fn run_all(jobs: Vec<Job>, report: &mut dyn FnMut(Mail) -> bool) {
    let mut jobs = jobs.into_iter().peekable();
    while let Some(mut job) = jobs.next() {
        // Flushes of one mapping that wait together become one: the bytes that each covers were placed before.
        let mut others = Vec::new();
        while let Some(other) = jobs.next_if(|next| job.task.absorb(&next.task)) {
            others.push((other.ticket, other.counted));
        }
        let began_ns = thread_cpu_ns();
        let mut finished = job.run();
        if finished.by_message {
            finished.cpu_ns = thread_cpu_ns().saturating_sub(began_ns);
        }
        let (outcome, by_message) = (finished.outcome.clone(), finished.by_message);
        let others = others.into_iter().map(|(ticket, counted)| Finished {
            ticket,
            outcome: outcome.clone(),
            counted,
            by_message,
            cpu_ns: 0,
        });
        for finished in std::iter::once(finished).chain(others) {
            if !report(Mail::Finished(finished)) {
                return;
            }
        }
    }
}

/// Returns the processor time of this thread.
pub(super) fn thread_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

impl Task {
    /// Returns how many bytes the task carries by message; `None` if it has nothing to do with such bytes. `reach` returns how
    /// devices access the bytes of a flush.
    pub(super) fn bytes_by_message(&self, reach: impl FnOnce(&Region) -> Reach) -> Option<u64> {
        match self {
            Task::Checksum { .. } | Task::Locate { .. } => None,
            Task::Write { bytes, .. } => Some(bytes.len() as u64),
            Task::Read { length, .. } => Some(*length),
            Task::Flush { memory, .. } => (reach(memory.region()) == Reach::Processor).then_some(0),
        }
    }

    /// Returns the lane. Before a client's accesses are done, it is not welcome again.
    pub(super) fn lane(&self) -> Lane {
        match self {
            Task::Flush { .. } | Task::Write { .. } | Task::Read { .. } => Lane::Accesses,
            Task::Checksum { .. } => Lane::Checksums,
            Task::Locate { .. } => Lane::Places,
        }
    }

    /// Returns whether the task waits for no medium: for processors and their memory at most.
    pub(super) fn is_immediate(&self) -> bool {
        let in_memory = |region: &Region| region.domain() != rdmux_wire::push::Domain::File;
        match self {
            Task::Checksum { .. } => false,
            // A file system that maps persistent memory keeps its directories there too.
            Task::Locate { region, .. } => in_memory(region),
            Task::Flush {
                memory, placement, ..
            } => memory.flush_is_immediate(*placement),
            Task::Write {
                memory, placement, ..
            } => {
                in_memory(memory.region()) && (placement.is_empty() || memory.flush_is_immediate(*placement))
            }
            Task::Read { memory, .. } => in_memory(memory.region()),
        }
    }

    /// Merges another flush of the same mapping into this one; returns whether it did.
    fn absorb(&mut self, other: &Task) -> bool {
        match (self, other) {
            (
                Task::Flush {
                    memory,
                    offset,
                    length,
                    placement,
                },
                Task::Flush {
                    memory: other,
                    offset: other_offset,
                    length: other_length,
                    placement: other_placement,
                },
            ) if Arc::ptr_eq(memory, other) => {
                let end = (*offset + *length).max(other_offset + other_length);
                *offset = (*offset).min(*other_offset);
                *length = end - *offset;
                *placement |= *other_placement;
                true
            }
            _ => false,
        }
    }

    /// Returns the region whose file must be the one at its path. A checksum is the last request of a push: the client reports that its
    /// bytes are durable in the file of that name.
    fn must_be_in_place(&self) -> Option<&Region> {
        match self {
            Task::Checksum { region, .. } | Task::Locate { region, .. } => Some(&**region),
            Task::Write { memory, in_place, .. } | Task::Read { memory, in_place, .. } => {
                in_place.then(|| &**memory.region())
            }
            Task::Flush { .. } => None,
        }
    }

    /// Returns the outcome of the task if it has failed.
    fn failed(&self, failure: Failure) -> Outcome {
        match self {
            Task::Locate { lease, .. } => Outcome::Located(*lease, Err(failure)),
            _ => {
                let (code, text) = failure;
                Outcome::Answer(Message::Error { code, text })
            }
        }
    }

    fn run(&self) -> Outcome {
        // A task that panics has failed; the thread continues.
        let run = std::panic::AssertUnwindSafe(|| self.run_inner());
        let failed = std::panic::catch_unwind(run).unwrap_or(Err(Fault::Io(5)));
        failed.unwrap_or_else(|fault| {
            let code = match fault {
                Fault::NotSupported => ErrorCode::NotSupported,
                _ => ErrorCode::Io,
            };
            self.failed((code, format!("the region's memory or file failed: {fault}")))
        })
    }

    fn run_inner(&self) -> Result<Outcome, Fault> {
        if let Some(region) = self.must_be_in_place()
            && let Err(failure) = region.check_place()
        {
            return Ok(self.failed(failure));
        }
        Ok(Outcome::Answer(match self {
            Task::Locate { lease, .. } => return Ok(Outcome::Located(*lease, Ok(()))),
            Task::Checksum {
                region,
                offset,
                length,
                gone,
            } => {
                let wanted = || !gone.load(Ordering::Relaxed);
                match crc64_while(&**region.memory(), *offset, *length, wanted)? {
                    Some(crc) => Message::Checksummed { crc },
                    None => Message::Error {
                        code: ErrorCode::Revoked,
                        text: "the connection has ended".into(),
                    },
                }
            }
            Task::Flush {
                memory,
                offset,
                length,
                placement,
            } => {
                memory.flush(*offset, *length, *placement)?;
                Message::Flushed
            }
            Task::Write {
                memory,
                offset,
                bytes,
                placement,
                ..
            } => {
                memory.write(*offset, bytes)?;
                if !placement.is_empty() {
                    memory.flush(*offset, bytes.len() as u64, *placement)?;
                }
                Message::Written
            }
            Task::Read {
                memory,
                offset,
                length,
                ..
            } => {
                let mut bytes = vec![0; *length as usize];
                memory.read(*offset, &mut bytes)?;
                Message::Bytes { bytes }
            }
        }))
    }
}
