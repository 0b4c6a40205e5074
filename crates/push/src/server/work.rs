//! What may wait for a medium: done on threads, so that no client waits for another's disk. One thread a region keeps reads,
//! writes and flushes of it in order; checksums, which take long, have another.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use rdmux_verbs::{Fault, Memory, Placement, Reach};
use rdmux_wire::push::{ErrorCode, Message};

use super::lease::LeaseId;
use super::{Done, wake};
use crate::crc::crc64_while;
use crate::region::{Mapped, Region};

/// Whose job it is, and where the answer goes.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    /// The client's number, which is never another's.
    pub(super) client: u64,
    pub(super) slot: usize,
    pub(super) request: u64,
    /// To be released when the job is done.
    pub(super) lease: Option<LeaseId>,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Task {
    Checksum {
        region: Arc<Region>,
        offset: u64,
        length: u64,
        /// Whether its client has gone: nobody wants it any more.
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
    },
    Read {
        memory: Arc<Mapped>,
        offset: u64,
        length: u64,
    },
}

/// What a [`Service`](super::Service) wants done.
#[derive(Debug)]
pub struct Job {
    /// Number of the region.
    pub(super) region: usize,
    pub(super) ticket: Ticket,
    pub(super) task: Task,
    /// It waits for no medium, and for no job before it.
    pub(super) at_once: bool,
    /// It is one of those that a client is not welcome before they are done.
    pub(super) counted: bool,
    /// It carries bytes that came or go by message, or flushes what did.
    pub(super) by_message: bool,
}

impl Job {
    /// The client that it is done for.
    pub fn client(&self) -> u64 {
        self.ticket.client
    }

    /// Whether it takes no longer than processors and their memory do.
    pub fn is_immediate(&self) -> bool {
        self.at_once
    }

    /// Does it.
    pub fn run(self) -> Finished {
        let answer = self.task.run();
        Finished {
            ticket: self.ticket,
            answer,
            counted: self.counted,
            by_message: self.by_message,
            cpu_ns: 0,
        }
    }

    /// It could not be begun.
    fn failed(self, text: &str) -> Finished {
        let answer = Message::Error {
            code: ErrorCode::Busy,
            text: text.into(),
        };
        Finished {
            ticket: self.ticket,
            answer,
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
    pub(super) answer: Message,
    pub(super) counted: bool,
    pub(super) by_message: bool,
    /// What it took of a thread's processor time, if it is by message and a thread did it.
    pub(super) cpu_ns: u64,
}

/// The threads, each made when it is needed first.
#[derive(Debug)]
pub(super) struct Workers {
    done: mpsc::Sender<Done>,
    wake: Arc<OwnedFd>,
    /// By number of the region, and whether it is the one for checksums.
    threads: HashMap<(usize, bool), mpsc::Sender<Job>>,
}

impl Workers {
    pub(super) fn new(done: mpsc::Sender<Done>, wake: Arc<OwnedFd>) -> Workers {
        Workers {
            done,
            wake,
            threads: HashMap::new(),
        }
    }

    /// Does a job: at once when it waits for nothing, else on a thread.
    pub(super) fn submit(&mut self, job: Job) -> Option<Finished> {
        if job.at_once {
            return Some(job.run());
        }
        let which = (job.region, job.task.is_checksum());
        let thread = match self.threads.get(&which) {
            Some(thread) => thread.clone(),
            None => {
                let Ok(thread) = self.spawn() else {
                    return Some(job.failed("the server has no thread for this"));
                };
                self.threads.insert(which, thread.clone());
                thread
            }
        };
        // The thread lives as long as its queue.
        let _ = thread.send(job);
        None
    }

    fn spawn(&self) -> std::io::Result<mpsc::Sender<Job>> {
        let (tx, rx) = mpsc::channel::<Job>();
        let (done, wake_fd) = (self.done.clone(), self.wake.clone());
        thread::Builder::new().name("push-work".into()).spawn(move || {
            while let Ok(first) = rx.recv() {
                let mut batch = vec![first];
                batch.extend(rx.try_iter());
                let mut batch = batch.into_iter().peekable();
                while let Some(mut job) = batch.next() {
                    // Flushes of one mapping that wait together are one: whatever each covers was placed before.
                    let mut others = Vec::new();
                    while let Some(other) = batch.next_if(|next| job.task.absorb(&next.task)) {
                        others.push((other.ticket, other.counted));
                    }
                    let began_ns = thread_cpu_ns();
                    let mut finished = job.run();
                    if finished.by_message {
                        finished.cpu_ns = thread_cpu_ns().saturating_sub(began_ns);
                    }
                    let (answer, by_message) = (finished.answer.clone(), finished.by_message);
                    let others = others.into_iter().map(|(ticket, counted)| Finished {
                        ticket,
                        answer: answer.clone(),
                        counted,
                        by_message,
                        cpu_ns: 0,
                    });
                    for finished in std::iter::once(finished).chain(others) {
                        if done.send(Done::Finished(finished)).is_err() {
                            return;
                        }
                    }
                    wake(&wake_fd);
                }
            }
        })?;
        Ok(tx)
    }
}

/// The processor time that this thread has had.
pub(super) fn thread_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

impl Task {
    /// Bytes that it carries which came or go by message; `None`: it has nothing to do with such. `reach` says how devices get at the
    /// bytes of a flush.
    pub(super) fn bytes_by_message(&self, reach: impl FnOnce(&Region) -> Reach) -> Option<u64> {
        match self {
            Task::Checksum { .. } => None,
            Task::Write { bytes, .. } => Some(bytes.len() as u64),
            Task::Read { length, .. } => Some(*length),
            Task::Flush { memory, .. } => (reach(memory.region()) == Reach::Processor).then_some(0),
        }
    }

    pub(super) fn is_checksum(&self) -> bool {
        matches!(self, Task::Checksum { .. })
    }

    /// Whether it waits for no medium: for processors and their memory at most.
    pub(super) fn is_immediate(&self) -> bool {
        let in_memory = |memory: &Mapped| memory.region().domain() != rdmux_wire::push::Domain::File;
        match self {
            Task::Checksum { .. } => false,
            Task::Flush {
                memory, placement, ..
            } => memory.flush_is_immediate(*placement),
            Task::Write {
                memory, placement, ..
            } => in_memory(memory) && (placement.is_empty() || memory.flush_is_immediate(*placement)),
            Task::Read { memory, .. } => in_memory(memory),
        }
    }

    /// Takes another flush of the same mapping in.
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

    fn run(self) -> Message {
        // What panics has not done it; the thread goes on.
        let run = std::panic::AssertUnwindSafe(|| self.run_inner());
        let failed = std::panic::catch_unwind(run).unwrap_or(Err(Fault::Io(5)));
        failed.unwrap_or_else(|fault| Message::Error {
            code: match fault {
                Fault::NotSupported => ErrorCode::NotSupported,
                _ => ErrorCode::Io,
            },
            text: format!("the region's memory or file failed: {fault}"),
        })
    }

    fn run_inner(self) -> Result<Message, Fault> {
        Ok(match self {
            Task::Checksum {
                region,
                offset,
                length,
                gone,
            } => {
                let wanted = || !gone.load(Ordering::Relaxed);
                match crc64_while(&**region.memory(), offset, length, wanted)? {
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
                memory.flush(offset, length, placement)?;
                Message::Flushed
            }
            Task::Write {
                memory,
                offset,
                bytes,
                placement,
            } => {
                memory.write(offset, &bytes)?;
                if !placement.is_empty() {
                    memory.flush(offset, bytes.len() as u64, placement)?;
                }
                Message::Written
            }
            Task::Read {
                memory,
                offset,
                length,
            } => {
                let mut bytes = vec![0; length as usize];
                memory.read(offset, &mut bytes)?;
                Message::Bytes { bytes }
            }
        })
    }
}
