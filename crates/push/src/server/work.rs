//! What may wait for a medium: done on threads, so that no client waits for another's disk. One thread a region keeps reads,
//! writes and flushes of it in order; checksums, which take long, have another.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use rdmux_verbs::{Fault, Memory, Placement};
use rdmux_wire::push::{ErrorCode, Message};

use super::lease::LeaseId;
use super::{ConnectionKey, Done, wake};
use crate::crc::crc64_while;
use crate::region::{Mapped, Region};

/// Whose job it is, and where the answer goes.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    pub(super) key: ConnectionKey,
    /// The client's number: its queue pair's number may be another's when the job is done.
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

/// A job that is done.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) ticket: Ticket,
    pub(super) answer: Message,
    /// It was queued.
    pub(super) counted: bool,
}

type Job = (Ticket, Task);

/// The threads, each made when it is needed first.
#[derive(Debug)]
pub(super) struct Workers {
    done: mpsc::Sender<Done>,
    wake: Arc<OwnedFd>,
    /// By number of the region, and whether it is the one for checksums.
    threads: HashMap<(usize, bool), mpsc::Sender<Job>>,
    /// Reads, writes and flushes of a client that are not done.
    running: HashMap<u64, Running>,
}

#[derive(Debug)]
struct Running {
    /// The client's name over several connections.
    id: [u8; 16],
    jobs: usize,
}

impl Workers {
    pub(super) fn new(done: mpsc::Sender<Done>, wake: Arc<OwnedFd>) -> Workers {
        Workers {
            done,
            wake,
            threads: HashMap::new(),
            running: HashMap::new(),
        }
    }

    /// Does a job: at once when it waits for no medium, else on a thread. `id` is the client's.
    pub(super) fn submit(
        &mut self,
        number: usize,
        id: [u8; 16],
        ticket: Ticket,
        task: Task,
    ) -> Option<Finished> {
        let is_checksum = matches!(task, Task::Checksum { .. });
        let waits_behind = self
            .running
            .get(&ticket.client)
            .is_some_and(|running| running.jobs > 0);
        if task.is_immediate() && !waits_behind {
            let answer = task.run();
            return Some(Finished {
                ticket,
                answer,
                counted: false,
            });
        }
        let thread = match self.threads.get(&(number, is_checksum)) {
            Some(thread) => thread.clone(),
            None => {
                let Ok(thread) = self.spawn() else {
                    let answer = Message::Error {
                        code: ErrorCode::Busy,
                        text: "the server has no thread for this".into(),
                    };
                    return Some(Finished {
                        ticket,
                        answer,
                        counted: false,
                    });
                };
                self.threads.insert((number, is_checksum), thread.clone());
                thread
            }
        };
        if !is_checksum {
            let running = self
                .running
                .entry(ticket.client)
                .or_insert(Running { id, jobs: 0 });
            running.jobs += 1;
        }
        // The thread lives as long as its queue.
        let _ = thread.send((ticket, task));
        None
    }

    /// Takes in that a job is done.
    pub(super) fn finished(&mut self, finished: &Finished) {
        if !finished.counted {
            return;
        }
        if let Some(running) = self.running.get_mut(&finished.ticket.client) {
            running.jobs -= 1;
            if running.jobs == 0 {
                self.running.remove(&finished.ticket.client);
            }
        }
    }

    /// Whether something runs for a client of that name, on a connection other than this.
    pub(super) fn runs_for(&self, id: [u8; 16], but: u64) -> bool {
        self.running
            .iter()
            .any(|(client, running)| running.id == id && *client != but)
    }

    fn spawn(&self) -> std::io::Result<mpsc::Sender<Job>> {
        let (tx, rx) = mpsc::channel::<Job>();
        let (done, wake_fd) = (self.done.clone(), self.wake.clone());
        thread::Builder::new().name("push-work".into()).spawn(move || {
            while let Ok(first) = rx.recv() {
                let mut batch = vec![first];
                batch.extend(rx.try_iter());
                let mut batch = batch.into_iter().peekable();
                while let Some((ticket, task)) = batch.next() {
                    // Flushes of one mapping that wait together are one: whatever each covers was placed before.
                    let (mut task, mut tickets) = (task, vec![ticket]);
                    while let Some((ticket, _)) = batch.next_if(|(_, next)| task.absorb(next)) {
                        tickets.push(ticket);
                    }
                    let counted = !matches!(task, Task::Checksum { .. });
                    let answer = task.run();
                    for ticket in tickets {
                        let answer = answer.clone();
                        let finished = Finished {
                            ticket,
                            answer,
                            counted,
                        };
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

impl Task {
    /// Whether it waits for no medium: for processors and their memory at most.
    fn is_immediate(&self) -> bool {
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
