//! Accesses to memory on media, carried out on threads where blocking does no harm.

use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmux_rnic::{AccessJob, Accessed, Fault, Medium, Memory, Qpn};
use rdmux_verbs::sync::{Condvar, Mutex, MutexGuard};
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
    waiting: VecDeque<(Turn, AccessJob)>,
    running: Option<Running>,
    turns: u64,
    /// Set while somebody waits for the end of some.
    is_awaited: bool,
}

/// Position in the order in which a medium's accesses are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn(u64);

/// The access that the thread carries out.
#[derive(Clone, Copy, Debug)]
struct Running {
    turn: Turn,
    qpn: Qpn,
    /// Address of its memory.
    memory: usize,
}

impl Jobs {
    /// Returns the oldest access that has not ended.
    fn oldest(&self) -> Option<Turn> {
        let waiting = self.waiting.front().map(|(turn, _)| *turn);
        self.running.map(|running| running.turn).or(waiting)
    }

    /// Returns the last access of a memory that has not ended.
    fn last_of(&self, memory: usize) -> Option<Turn> {
        let of_memory = |(_, job): &&(Turn, AccessJob)| address(&job.memory) == memory;
        let waiting = self.waiting.iter().rev().find(of_memory).map(|(turn, _)| *turn);
        let running = self.running.filter(|running| running.memory == memory);
        waiting.or(running.map(|running| running.turn))
    }
}

/// Accesses that had not ended at some moment.
#[derive(Debug)]
pub(crate) struct InProgress {
    queue: Arc<Queue>,
    last: Turn,
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
        jobs.turns += 1;
        let turn = Turn(jobs.turns);
        jobs.waiting.push_back((turn, job));
        if jobs.waiting.len() == 1 {
            self.more.notify_one();
        }
    }

    /// Takes the next access, which runs from then on. Waits for one for a while, if `waits`.
    fn take(&self, waits: bool) -> Option<AccessJob> {
        let mut jobs = self.lock();
        if waits {
            let idle = |jobs: &mut Jobs| jobs.waiting.is_empty();
            (jobs, _) = self.more.wait_timeout_while(jobs, IDLE, idle);
        }
        let (turn, job) = jobs.waiting.pop_front()?;
        jobs.running = Some(Running {
            turn,
            qpn: job.qpn,
            memory: address(&job.memory),
        });
        Some(job)
    }

    /// Notes that the running access has ended.
    fn end(&self) {
        let mut jobs = self.lock();
        jobs.running = None;
        if std::mem::take(&mut jobs.is_awaited) {
            self.ended.notify_all();
        }
    }
}

impl Media {
    fn lock(&self) -> MutexGuard<'_, HashMap<Medium, Arc<Queue>>> {
        self.queues.lock()
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
            let (of_qp, others) = std::mem::take(&mut jobs.waiting)
                .into_iter()
                .partition::<VecDeque<_>, _>(|(_, job)| job.qpn == qpn);
            jobs.waiting = others;
            withdrawn.extend(of_qp.into_iter().map(|(_, job)| job));
            let last = jobs.running.filter(|running| running.qpn == qpn);
            running.extend(last.map(|running| InProgress {
                queue: queue.clone(),
                last: running.turn,
            }));
            // Somebody may wait for one that was withdrawn.
            if std::mem::take(&mut jobs.is_awaited) {
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
        loop {
            let (mut ended, mut bytes) = (Vec::new(), 0);
            while let Some(job) = queue.take(ended.is_empty()) {
                let result = carry_out(&job);
                queue.end();
                bytes += job.bytes();
                ended.push((job, result));
                if ended.len() == REPORT_JOBS || bytes >= REPORT_BYTES {
                    break;
                }
            }
            if !ended.is_empty() {
                self.report(ended);
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

/// Carries out an access. One that panics has failed; the thread goes on.
pub(super) fn carry_out(job: &AccessJob) -> Result<Accessed, Fault> {
    let run = panic::catch_unwind(AssertUnwindSafe(|| job.run()));
    run.unwrap_or(Err(Fault::Io(Errno::IO.raw_os_error())))
}

/// Returns the address of a memory, by which its accesses are found.
fn address(memory: &Arc<dyn Memory>) -> usize {
    Arc::as_ptr(memory).cast::<()>() as usize
}
