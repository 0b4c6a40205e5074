//! Accesses to memory on media, carried out on threads where blocking does no harm.

use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rdmux_rnic::{AccessId, AccessJob, Accessed, Fault, Medium, Memory};
use rustix::io::Errno;

use super::Engine;
use super::flush::spawn_thread;

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
    waiting: Vec<AccessJob>,
    /// Accesses that have not ended, with the addresses of their memories, in order.
    open: VecDeque<(AccessId, usize)>,
    /// Set while somebody waits for the end of some.
    is_awaited: bool,
}

/// Accesses of a memory that had not ended at some moment.
#[derive(Debug)]
pub(crate) struct InProgress {
    queue: Arc<Queue>,
    last: AccessId,
}

impl InProgress {
    /// Waits until they have ended.
    pub(crate) fn wait(self) {
        let is_open = |jobs: &mut Jobs| {
            let first = jobs.open.front();
            let is_open = first.is_some_and(|(id, _)| *id <= self.last);
            jobs.is_awaited |= is_open;
            is_open
        };
        let ended = self.queue.ended.wait_while(self.queue.lock(), is_open);
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: AccessJob) {
        let mut jobs = self.lock();
        jobs.open.push_back((job.id, address(&job.memory)));
        jobs.waiting.push(job);
        if jobs.waiting.len() == 1 {
            self.more.notify_one();
        }
    }

    /// Waits for accesses for a while, and takes them.
    fn take(&self) -> Vec<AccessJob> {
        let idle = |jobs: &mut Jobs| jobs.waiting.is_empty();
        let woken = self.more.wait_timeout_while(self.lock(), IDLE, idle);
        let (mut jobs, _) = woken.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut jobs.waiting)
    }

    /// Notes that the oldest accesses have ended.
    fn end(&self, count: usize) {
        let mut jobs = self.lock();
        jobs.open.drain(..count);
        if std::mem::take(&mut jobs.is_awaited) {
            self.ended.notify_all();
        }
    }
}

impl Media {
    fn lock(&self) -> MutexGuard<'_, HashMap<Medium, Arc<Queue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
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
        let of_memory = |(_, of): &&(AccessId, usize)| *of == address(memory);
        let last = queue
            .lock()
            .open
            .iter()
            .rev()
            .find(of_memory)
            .map(|(id, _)| *id)?;
        Some(InProgress { queue, last })
    }

    fn run(&self, medium: Medium, queue: &Queue) {
        loop {
            let jobs = queue.take();
            if jobs.is_empty() {
                let mut queues = self.lock();
                // Nobody adds accesses while the queues are locked.
                if queue.lock().waiting.is_empty() {
                    queues.remove(&medium);
                    return;
                }
                continue;
            }
            let (mut ended, mut bytes) = (Vec::new(), 0);
            for job in jobs {
                let result = carry_out(&job);
                bytes += job.bytes();
                ended.push((job, result));
                if ended.len() == REPORT_JOBS || bytes >= REPORT_BYTES {
                    self.report(queue, std::mem::take(&mut ended));
                    bytes = 0;
                }
            }
            self.report(queue, ended);
        }
    }

    /// Passes results to the engine.
    fn report(&self, queue: &Queue, ended: Vec<(AccessJob, Result<Accessed, Fault>)>) {
        queue.end(ended.len());
        let engine = self
            .engine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .upgrade();
        // The memories are dropped after the engine is unlocked.
        let mut memories = Vec::with_capacity(ended.len());
        if let Some(engine) = engine.filter(|_| !ended.is_empty()) {
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

/// Carries out an access. One that panics has failed; the thread goes on.
fn carry_out(job: &AccessJob) -> Result<Accessed, Fault> {
    let run = panic::catch_unwind(AssertUnwindSafe(|| job.run()));
    run.unwrap_or(Err(Fault::Io(Errno::IO.raw_os_error())))
}

/// Returns the address of a memory, by which its accesses are found.
fn address(memory: &Arc<dyn Memory>) -> usize {
    Arc::as_ptr(memory).cast::<()>() as usize
}
