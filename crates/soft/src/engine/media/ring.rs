//! Reads of files through an io_uring, so that a disk works on many at once.
//!
//! The ring belongs to the thread of a medium ([`super::Media`]), and not to whoever drives the engine. The kernel ends a read by work of
//! the thread that started it: that work would end a system call of a program's own thread with EINTR, and would wait while that thread
//! sleeps for something else.
#![allow(unsafe_code, reason = "the kernel writes to buffers that it is told of")]

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};
use rdmux_memory::FileMemory;
use rdmux_rnic::{AccessJob, Accessed};
use rdmux_verbs::provider::Waker;
use rustix::event::{PollFd, PollFlags, poll};

use super::Ticket;

/// Reads that the kernel works on at the same time.
const READS_MAX: u32 = 64;

/// The reads of a medium's files that the kernel works on. The ring is made for the first one.
#[derive(Debug, Default)]
pub(super) struct Reads {
    ring: Option<Ring>,
    /// Set when the system refuses a ring, as in many containers.
    is_refused: bool,
}

/// A read that the kernel has ended. `None`: it read fewer bytes, or none; whoever reads again learns why.
pub(super) type Ended = (Ticket, AccessJob, Option<Accessed>);

impl Reads {
    /// Makes reads without a ring.
    #[cfg(test)]
    pub(super) fn refused() -> Reads {
        Reads {
            ring: None,
            is_refused: true,
        }
    }

    /// Returns whether the system allows a ring.
    #[cfg(test)]
    pub(super) fn are_possible() -> bool {
        Ring::new().is_ok()
    }

    /// Returns whether another read can be added.
    pub(super) fn have_room(&self) -> bool {
        self.ring
            .as_ref()
            .is_none_or(|ring| ring.reads.len() < READS_MAX as usize)
    }

    /// Returns whether reads have not ended.
    pub(super) fn are_open(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| !ring.reads.is_empty())
    }

    /// Adds a read of a file, which [`Reads::start`] starts. Returns the job as the error when it is something else, or when there is no
    /// ring.
    pub(super) fn add(&mut self, ticket: Ticket, job: AccessJob) -> Result<(), AccessJob> {
        if self.is_refused || job.read_length().is_none() || FileMemory::of(&*job.memory).is_none() {
            return Err(job);
        }
        if self.ring.is_none() {
            self.ring = Ring::new().ok();
            self.is_refused = self.ring.is_none();
        }
        match &mut self.ring {
            Some(ring) => ring.add(ticket, job),
            None => Err(job),
        }
    }

    /// Starts the reads that were added. Returns those that the kernel did not take.
    pub(super) fn start(&mut self) -> Vec<(Ticket, AccessJob)> {
        let refused = self.ring.as_mut().map_or_else(Vec::new, Ring::submit);
        self.is_refused |= !refused.is_empty();
        refused
    }

    /// Takes the reads that have ended.
    pub(super) fn take_ended(&mut self) -> Vec<Ended> {
        self.ring.as_mut().map_or_else(Vec::new, Ring::take_ended)
    }

    /// Returns the waker that ends [`Reads::wait`], if there is a ring.
    pub(super) fn waker(&self) -> Option<&Arc<Waker>> {
        self.ring.as_ref().map(|ring| &ring.waker)
    }

    /// Waits until a read has ended, or somebody wakes the thread.
    pub(super) fn wait(&self) {
        if let Some(ring) = &self.ring {
            let fds = [ring.waker.fd().as_fd(), ring.fd()];
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let _ = poll(&mut fds, None);
            ring.waker.reset_if_woken();
        }
    }
}

/// An io_uring and the reads that it carries out.
struct Ring {
    uring: IoUring,
    /// Reads that the kernel has, or gets by the next system call.
    reads: HashMap<Ticket, Read>,
    /// Reads added since the last system call, the oldest first.
    added: Vec<Ticket>,
    waker: Arc<Waker>,
}

/// A read, and the buffer for its bytes, which nothing touches before the kernel has reported the end.
struct Read {
    job: AccessJob,
    bytes: Vec<u8>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("reads", &self.reads.len()).finish()
    }
}

impl Ring {
    /// # Errors
    /// The system has no io_uring with reads (Linux 5.6), or does not allow this process to use it.
    fn new() -> io::Result<Ring> {
        let uring = IoUring::builder().dontfork().build(READS_MAX)?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Ring {
            uring,
            reads: HashMap::new(),
            added: Vec::new(),
            waker: Arc::new(Waker::new()?),
        })
    }

    /// Returns the ring's descriptor, which is readable while ended reads wait to be taken.
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `uring` owns the descriptor, and the result borrows it.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }

    fn add(&mut self, ticket: Ticket, job: AccessJob) -> Result<(), AccessJob> {
        let (Some(file), Some(length)) = (FileMemory::of(&*job.memory), job.read_length()) else {
            return Err(job);
        };
        let Ok(entry_length) = u32::try_from(length) else {
            return Err(job);
        };
        let mut bytes = vec![0; length];
        let fd = types::Fd(file.file().as_raw_fd());
        let read = opcode::Read::new(fd, bytes.as_mut_ptr(), entry_length)
            .offset(job.offset)
            .build()
            .user_data(ticket.0);
        // SAFETY: the buffer has `length` bytes and stays in `reads`, where nothing touches it, until the completion of this read has been
        // taken; `drop` leaks it if that never happens. The kernel takes its own reference to the file when the read is submitted, and
        // until then `job` keeps the file open.
        if unsafe { self.uring.submission().push(&read) }.is_err() {
            return Err(job);
        }
        self.reads.insert(ticket, Read { job, bytes });
        self.added.push(ticket);
        Ok(())
    }

    /// Submits the reads that were added. Those that the kernel does not take stay in the submission queue, so that the caller must not
    /// add any more.
    fn submit(&mut self) -> Vec<(Ticket, AccessJob)> {
        let mut added = mem::take(&mut self.added);
        while !added.is_empty() {
            match self.uring.submit() {
                Ok(taken) if taken > 0 => drop(added.drain(..taken.min(added.len()))),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        let refused = added.into_iter();
        refused
            .filter_map(|ticket| Some((ticket, self.reads.remove(&ticket)?.job)))
            .collect()
    }

    fn take_ended(&mut self) -> Vec<Ended> {
        let completions: Vec<_> = self.uring.completion().collect();
        let ended = completions.into_iter().filter_map(|completion| {
            let ticket = Ticket(completion.user_data());
            let Read { job, bytes } = self.reads.remove(&ticket)?;
            let is_whole = usize::try_from(completion.result()) == Ok(bytes.len());
            // A file that was truncated, and has grown again since, reads as zeros.
            let stands = FileMemory::of(&*job.memory)
                .is_some_and(|file| file.check(job.offset, bytes.len() as u64).is_ok());
            let read = (is_whole && stands).then_some(Accessed::Read(bytes));
            Some((ticket, job, read))
        });
        ended.collect()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write to the buffers of reads whose end has not been reported.
        for (_, read) in self.reads.drain() {
            mem::forget(read.bytes);
        }
    }
}
