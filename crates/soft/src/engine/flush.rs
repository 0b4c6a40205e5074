//! Flushes, carried out on threads where blocking does no harm.

use std::collections::HashMap;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rdmux_rnic::{Fault, FlushJob};
use rdmux_verbs::sync::{Condvar, Mutex};
use rustix::io::Errno;

use super::Engine;

/// Time for which an idle thread waits for more jobs.
const FLUSHER_IDLE: Duration = Duration::from_secs(5);

/// Threads that carry out flushes, one per memory that is being flushed, so that a slow medium delays nobody else.
#[derive(Debug, Default)]
pub(super) struct Flushers {
    pub(super) engine: Mutex<Weak<Engine>>,
    /// Jobs by memory; an entry exists as long as the memory's thread.
    jobs: Mutex<HashMap<usize, Vec<FlushJob>>>,
    more: Condvar,
    /// Jobs that are not done.
    pub(super) busy: AtomicUsize,
}

impl Flushers {
    /// Queues a job. Returns it as the error when no thread can be created.
    pub(super) fn submit(this: &Arc<Flushers>, job: FlushJob) -> Result<(), FlushJob> {
        let key = Arc::as_ptr(&job.memory).cast::<()>() as usize;
        let mut jobs = this.jobs.lock();
        if let Some(queue) = jobs.get_mut(&key) {
            queue.push(job);
            this.more.notify_all();
        } else {
            let flushers = this.clone();
            // The thread first waits for the lock on the jobs, which this function holds.
            if spawn_thread("rdmux-flush", move || flushers.run(key)).is_err() {
                return Err(job);
            }
            jobs.insert(key, vec![job]);
        }
        this.busy.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn run(&self, key: usize) {
        loop {
            let batch = {
                let mut jobs = self.jobs.lock();
                if jobs.get(&key).is_some_and(Vec::is_empty) {
                    let wait =
                        |jobs: &mut HashMap<usize, Vec<FlushJob>>| jobs.get(&key).is_some_and(Vec::is_empty);
                    (jobs, _) = self.more.wait_timeout_while(jobs, FLUSHER_IDLE, wait);
                }
                match jobs.get_mut(&key) {
                    Some(queue) if !queue.is_empty() => std::mem::take(queue),
                    _ => {
                        jobs.remove(&key);
                        return;
                    }
                }
            };
            // One flush of the whole requested range serves every waiter: the data that each job covers was placed before.
            let (Some(start), Some(end)) = (
                batch.iter().map(|j| j.offset).min(),
                batch.iter().map(|j| j.offset.saturating_add(j.length)).max(),
            ) else {
                continue;
            };
            let placement = batch
                .iter()
                .fold(batch[0].placement, |all, job| all | job.placement);
            let began = Instant::now();
            // A flush that panics has failed. The thread goes on: later flushes of its memory come here too.
            let flush = || batch[0].memory.flush(start, end - start, placement);
            let result = panic::catch_unwind(AssertUnwindSafe(flush))
                .unwrap_or(Err(Fault::Io(Errno::IO.raw_os_error())));
            let took_ns = began.elapsed().as_nanos() as u64;
            let engine = self.engine.lock().upgrade();
            let Some(engine) = engine else { return };
            let jobs = batch.len();
            engine.with(|core, now| {
                core.flush_times.record(took_ns);
                for job in &batch {
                    core.rnic.handle_flush(now, job.id, result);
                }
                core.finish(now, true);
            });
            self.busy.fetch_sub(jobs, Ordering::Relaxed);
        }
    }
}

/// Creates a thread for what may block.
pub(super) fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(test)]
    if super::tests::NO_THREADS.get() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    rdmux_verbs::thread::spawn(name, run).map(drop)
}
