//! Accesses to memory on media, carried out on threads where blocking does no harm. Each thread has the kernel read files, as many at once
//! as come ([`ring`]); it carries out the rest itself, in their order.

mod ring;

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::panic::{self, AssertUnwindSafe};
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmux_rnic::{AccessJob, Accessed, Fault, Medium, Memory, Qpn};
use rdmux_verbs::sync::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use self::ring::Reads;
use super::flush::spawn_thread;
use super::{Engine, Waker};

/// Time for which an idle thread waits for more accesses.
const IDLE: Duration = Duration::from_secs(5);
/// Results that a thread reports together: until so many have ended, or have copied so many bytes.
const REPORT_JOBS: usize = 16;
const REPORT_BYTES: usize = 64 << 10;

/// Threads that carry out accesses, one for each medium that is in use, so that a medium that stalls delays only those who use it.
#[derive(Debug, Default)]
pub(crate) struct Media {
    pub(super) engine: Mutex<Weak<Engine>>,
    /// Queues by medium; an entry exists as long as the thread.
    queues: Mutex<HashMap<Medium, Arc<Queue>>>,
    /// The system is taken for one that allows no io_uring.
    #[cfg(test)]
    pub(super) no_ring: AtomicBool,
}

/// Accesses to a medium.
#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<(Ticket, AccessJob)>,
    /// The accesses that the thread, or the kernel for it, carries out.
    running: Vec<Running>,
    submitted: u64,
    /// Wakes the thread, while it waits for reads and does not look at `more`.
    waker: Option<Arc<Waker>>,
    /// Set while somebody waits for the end of some.
    is_awaited: bool,
}

/// Position in the order in which a medium's accesses arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ticket(u64);

/// An access that has begun.
#[derive(Clone, Copy, Debug)]
struct Running {
    ticket: Ticket,
    qpn: Qpn,
    /// Address of its memory.
    memory: usize,
}

impl Jobs {
    /// Returns the oldest access that has not ended.
    fn oldest(&self) -> Option<Ticket> {
        let waiting = self.waiting.front().map(|(ticket, _)| *ticket);
        let running = self.running.iter().map(|running| running.ticket).min();
        running.or(waiting)
    }

    /// Returns the last access of a memory that has not ended.
    fn last_of(&self, memory: usize) -> Option<Ticket> {
        let of_memory = |(_, job): &&(Ticket, AccessJob)| address(&job.memory) == memory;
        let waiting = self
            .waiting
            .iter()
            .rev()
            .find(of_memory)
            .map(|(ticket, _)| *ticket);
        waiting.or(self.last_running(|running| running.memory == memory))
    }

    /// Returns the last of some accesses that have begun.
    fn last_running(&self, which: impl Fn(&Running) -> bool) -> Option<Ticket> {
        let running = self.running.iter().filter(|running| which(running));
        running.map(|running| running.ticket).max()
    }
}

/// Accesses that had not ended at some moment.
#[derive(Debug)]
pub(crate) struct InProgress {
    queue: Arc<Queue>,
    last: Ticket,
}

impl InProgress {
    /// Waits until they have ended.
    pub(crate) fn wait(self) {
        let is_open = |jobs: &mut Jobs| {
            let is_open = jobs.oldest().is_some_and(|oldest| oldest <= self.last);
            jobs.is_awaited |= is_open;
            is_open
        };
        drop(self.queue.ended.wait_while(self.queue.lock(), is_open));
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock()
    }

    fn push(&self, job: AccessJob) {
        let mut jobs = self.lock();
        jobs.submitted += 1;
        let ticket = Ticket(jobs.submitted);
        jobs.waiting.push_back((ticket, job));
        match &jobs.waker {
            Some(waker) => waker.wake(),
            None if jobs.waiting.len() == 1 => self.more.notify_one(),
            None => {}
        }
    }

    /// Takes the next access, which runs from then on.
    fn take(&self) -> Option<(Ticket, AccessJob)> {
        let mut jobs = self.lock();
        let (ticket, job) = jobs.waiting.pop_front()?;
        jobs.running.push(Running {
            ticket,
            qpn: job.qpn,
            memory: address(&job.memory),
        });
        Some((ticket, job))
    }

    /// Notes that an access has ended.
    fn end(&self, ticket: Ticket) {
        let mut jobs = self.lock();
        jobs.running.retain(|running| running.ticket != ticket);
        if mem::take(&mut jobs.is_awaited) {
            self.ended.notify_all();
        }
    }

    /// Waits for an access, for a while. With reads that have not ended, waits for one of them or for an access.
    fn wait(&self, reads: &Reads) {
        let mut jobs = self.lock();
        if !reads.are_open() {
            let idle = |jobs: &mut Jobs| jobs.waiting.is_empty();
            drop(self.more.wait_timeout_while(jobs, IDLE, idle));
            return;
        }
        // Nothing is taken while the kernel works on as many reads as it may.
        if jobs.waiting.is_empty() {
            jobs.waker = reads.waker().cloned();
        } else if reads.have_room() {
            return;
        }
        drop(jobs);
        reads.wait();
        self.lock().waker = None;
    }
}

impl Media {
    fn lock(&self) -> MutexGuard<'_, HashMap<Medium, Arc<Queue>>> {
        self.queues.lock()
    }

    /// Returns whether the system allows io_uring.
    #[cfg(test)]
    pub(super) fn has_ring() -> bool {
        Reads::are_possible()
    }

    /// Queues an access. Returns it as the error when no thread can be created.
    pub(super) fn submit(this: &Arc<Media>, job: AccessJob) -> Result<(), AccessJob> {
        let mut queues = this.lock();
        if let Some(queue) = queues.get(&job.medium) {
            queue.push(job);
            return Ok(());
        }
        let (media, medium, queue) = (this.clone(), job.medium, Arc::<Queue>::default());
        let of_thread = queue.clone();
        if spawn_thread("rdmux-medium", move || media.run(medium, &of_thread)).is_err() {
            return Err(job);
        }
        queue.push(job);
        queues.insert(medium, queue);
        Ok(())
    }

    /// Returns the accesses of a memory that have not ended, if there are any.
    pub(crate) fn in_progress(&self, memory: &Arc<dyn Memory>) -> Option<InProgress> {
        let queue = self.lock().get(&memory.medium()?)?.clone();
        let last = queue.lock().last_of(address(memory))?;
        Some(InProgress { queue, last })
    }

    /// Withdraws the accesses of a queue pair: returns those that had not begun, which nobody carries out any more, and those that run.
    pub(super) fn withdraw(&self, qpn: Qpn) -> (Vec<AccessJob>, Vec<InProgress>) {
        let (mut withdrawn, mut running) = (Vec::new(), Vec::new());
        for queue in self.lock().values() {
            let mut jobs = queue.lock();
            let (of_qp, others) = mem::take(&mut jobs.waiting)
                .into_iter()
                .partition::<VecDeque<_>, _>(|(_, job)| job.qpn == qpn);
            jobs.waiting = others;
            withdrawn.extend(of_qp.into_iter().map(|(_, job)| job));
            let last = jobs.last_running(|running| running.qpn == qpn);
            running.extend(last.map(|last| InProgress {
                queue: queue.clone(),
                last,
            }));
            // Somebody may wait for one that was withdrawn.
            if mem::take(&mut jobs.is_awaited) {
                queue.ended.notify_all();
            }
        }
        (withdrawn, running)
    }

    /// Returns the number of accesses that have not begun.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.lock().values().map(|queue| queue.lock().waiting.len()).sum()
    }

    fn run(&self, medium: Medium, queue: &Queue) {
        let mut reads = Reads::default();
        #[cfg(test)]
        if self.no_ring.load(Ordering::Relaxed) {
            reads = Reads::refused();
        }
        loop {
            let ended = serve(queue, &mut reads);
            if !ended.is_empty() {
                self.report(ended);
                continue;
            }
            queue.wait(&reads);
            if reads.are_open() {
                continue;
            }
            let mut queues = self.lock();
            // Nobody adds accesses while the queues are locked.
            if queue.lock().waiting.is_empty() {
                queues.remove(&medium);
                return;
            }
        }
    }

    /// Passes results to the engine.
    fn report(&self, ended: Vec<(AccessJob, Result<Accessed, Fault>)>) {
        let engine = self.engine.lock().upgrade();
        // The memories are dropped after the engine is unlocked.
        let mut memories = Vec::with_capacity(ended.len());
        if let Some(engine) = engine {
            engine.with(|core, now| {
                for (job, result) in ended {
                    core.rnic.handle_access(now, job.id, result);
                    memories.push(job);
                }
                core.finish(now, true);
            });
        }
    }
}

/// Has the kernel read files, and carries out other accesses in their order. Returns those that have ended, with their results.
fn serve(queue: &Queue, reads: &mut Reads) -> Vec<(AccessJob, Result<Accessed, Fault>)> {
    let (mut ended, mut bytes) = (Vec::new(), 0);
    let mut end = |ticket, job: AccessJob, result| {
        queue.end(ticket);
        bytes += job.bytes();
        ended.push((job, result));
        ended.len() >= REPORT_JOBS || bytes >= REPORT_BYTES
    };
    while reads.have_room()
        && let Some((ticket, job)) = queue.take()
    {
        let Err(job) = reads.add(ticket, job) else {
            continue;
        };
        let result = carry_out(&job);
        if end(ticket, job, result) {
            break;
        }
    }
    for (ticket, job) in reads.start() {
        let result = carry_out(&job);
        end(ticket, job, result);
    }
    for (ticket, job, read) in reads.take_ended() {
        // The memory's own read tells the reason, and the memory learns of it.
        let result = read.map_or_else(|| carry_out(&job), Ok);
        end(ticket, job, result);
    }
    ended
}

/// Carries out an access. One that panics has failed; the thread goes on.
pub(super) fn carry_out(job: &AccessJob) -> Result<Accessed, Fault> {
    let run = panic::catch_unwind(AssertUnwindSafe(|| job.run()));
    run.unwrap_or(Err(Fault::Io(Errno::IO.raw_os_error())))
}

/// Returns the address of a memory, by which its accesses are found.
fn address(memory: &Arc<dyn Memory>) -> usize {
    Arc::as_ptr(memory).cast::<()>() as usize
}
