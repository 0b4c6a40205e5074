//! Threads for what blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::io;
use std::sync::Arc;

use crate::mailbox::Mailbox;
use rdmux_verbs::sync::{Condvar, Mutex, MutexGuard};

/// Runs jobs that may block, so that the thread that owns the connections does not wait. Jobs of one lane run in order on one thread,
/// which starts with the lane's first job and takes all that wait at once; lanes do not wait for each other. Results are messages to a
/// mailbox. When this is dropped, jobs that have not begun are dropped too, and each thread ends after the result that it reports next.
#[derive(Debug)]
pub struct Workers<L, J, M> {
    name: &'static str,
    jobs_max: usize,
    run: Run<J, M>,
    mailbox: Mailbox<M>,
    lanes: HashMap<L, Arc<Lane<J>>>,
}

/// Runs jobs of a lane, in order, and reports each result. `report` returns false once nobody wants more results: the function then drops
/// the jobs that it has not begun. It must not panic.
pub type Run<J, M> = fn(jobs: Vec<J>, report: &mut dyn FnMut(M) -> bool);

/// Why a job was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Too many jobs wait in its lane.
    #[error("too many jobs wait")]
    Full,
    /// Its lane has no thread.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

#[derive(Debug)]
struct Lane<J> {
    queue: Mutex<Queue<J>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Queue<J> {
    waiting: Vec<J>,
    /// Jobs that have not begun are dropped.
    is_over: bool,
    /// No jobs come any more; those that are there are carried out.
    is_retired: bool,
}

impl<J> Lane<J> {
    fn lock(&self) -> MutexGuard<'_, Queue<J>> {
        self.queue.lock()
    }

    /// Waits for jobs. Returns `None` when the lane is over.
    fn take(&self) -> Option<Vec<J>> {
        let idle = |queue: &mut Queue<J>| queue.waiting.is_empty() && !queue.is_over && !queue.is_retired;
        let mut queue = self.changed.wait_while(self.lock(), idle);
        let has_jobs = !queue.is_over && !queue.waiting.is_empty();
        has_jobs.then(|| std::mem::take(&mut queue.waiting))
    }
}

impl<L: Eq + Hash, J: Send + 'static, M: Send + 'static> Workers<L, J, M> {
    /// Makes workers without threads. `name` is that of their threads. In each lane `jobs_max` jobs may wait, beside those that its thread
    /// has taken.
    pub fn new(name: &'static str, jobs_max: usize, run: Run<J, M>, mailbox: Mailbox<M>) -> Workers<L, J, M> {
        Workers {
            name,
            jobs_max,
            run,
            mailbox,
            lanes: HashMap::new(),
        }
    }

    /// Ends the threads of lanes that are not to be kept, each after its jobs.
    pub fn retain(&mut self, keep: impl Fn(&L) -> bool) {
        self.lanes.retain(|id, lane| {
            let keeps = keep(id);
            if !keeps {
                lane.lock().is_retired = true;
                lane.changed.notify_one();
            }
            keeps
        });
    }

    /// Accepts a job, or returns it with the reason.
    pub fn submit(&mut self, lane: L, job: J) -> Result<(), (J, SubmitError)> {
        let lane = match self.lanes.entry(lane) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => match start(self.name, self.run, &self.mailbox) {
                Ok(lane) => vacant.insert(lane),
                Err(error) => return Err((job, SubmitError::Thread(error))),
            },
        };
        let mut queue = lane.lock();
        if queue.waiting.len() >= self.jobs_max {
            return Err((job, SubmitError::Full));
        }
        queue.waiting.push(job);
        drop(queue);
        lane.changed.notify_one();
        Ok(())
    }
}

fn start<J: Send + 'static, M: Send + 'static>(
    name: &str,
    run: Run<J, M>,
    mailbox: &Mailbox<M>,
) -> io::Result<Arc<Lane<J>>> {
    let queue = Queue {
        waiting: Vec::new(),
        is_over: false,
        is_retired: false,
    };
    let lane = Arc::new(Lane {
        queue: Mutex::new(queue),
        changed: Condvar::new(),
    });
    let (jobs, mailbox) = (lane.clone(), mailbox.clone());
    rdmux_verbs::thread::spawn(name, move || {
        while let Some(batch) = jobs.take() {
            run(batch, &mut |result| mailbox.send(result) && !jobs.lock().is_over);
        }
    })?;
    Ok(lane)
}

impl<L, J, M> Drop for Workers<L, J, M> {
    fn drop(&mut self) {
        for lane in self.lanes.values() {
            let mut queue = lane.lock();
            queue.is_over = true;
            // The jobs are dropped without the lock: that may run their owners' code.
            let dropped = std::mem::take(&mut queue.waiting);
            drop(queue);
            lane.changed.notify_one();
            drop(dropped);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::mailbox::{Inbox, mailbox};

    /// A job that reports its number once its gate opens.
    #[derive(Debug)]
    struct Job {
        number: u32,
        begun: mpsc::Sender<u32>,
        gate: mpsc::Receiver<()>,
    }

    fn run(jobs: Vec<Job>, report: &mut dyn FnMut(u32) -> bool) {
        for job in jobs {
            let _ = job.begun.send(job.number);
            let _ = job.gate.recv();
            if !report(job.number) {
                return;
            }
        }
    }

    struct Bench {
        workers: Workers<&'static str, Job, u32>,
        inbox: Inbox<u32>,
        begun_tx: mpsc::Sender<u32>,
        begun: mpsc::Receiver<u32>,
    }

    impl Bench {
        fn new(jobs_max: usize) -> Bench {
            let (mailbox, inbox) = mailbox().unwrap();
            let (begun_tx, begun) = mpsc::channel();
            Bench {
                workers: Workers::new("worker", jobs_max, run, mailbox),
                inbox,
                begun_tx,
                begun,
            }
        }

        /// Submits a job, and returns what opens its gate.
        fn submit(
            &mut self,
            lane: &'static str,
            number: u32,
        ) -> Result<mpsc::Sender<()>, (Job, SubmitError)> {
            let (open, gate) = mpsc::channel();
            let job = Job {
                number,
                begun: self.begun_tx.clone(),
                gate,
            };
            self.workers.submit(lane, job).map(|()| open)
        }

        fn result(&self) -> u32 {
            loop {
                if let Some(result) = self.inbox.take() {
                    return result;
                }
                self.inbox.sleep(&[], None).unwrap();
            }
        }
    }

    #[test]
    fn submit__a_lane_that_is_blocked_holds_up_no_other() {
        let mut bench = Bench::new(8);
        let blocked = bench.submit("a", 1).unwrap();
        drop(bench.submit("a", 2).unwrap());
        assert_eq!(bench.begun.recv(), Ok(1));
        drop(bench.submit("b", 3).unwrap());
        assert_eq!(bench.result(), 3);
        drop(blocked);
        assert_eq!([bench.result(), bench.result()], [1, 2]);
    }

    #[test]
    fn submit__more_jobs_than_may_wait_are_returned() {
        let mut bench = Bench::new(2);
        let first = bench.submit("a", 1).unwrap();
        assert_eq!(bench.begun.recv(), Ok(1));
        let waiting = [bench.submit("a", 2).unwrap(), bench.submit("a", 3).unwrap()];
        let (job, error) = bench.submit("a", 4).unwrap_err();
        assert!(job.number == 4 && matches!(error, SubmitError::Full), "{error}");
        drop((first, waiting));
        assert_eq!([bench.result(), bench.result(), bench.result()], [1, 2, 3]);
        drop(bench.submit("a", 5).unwrap());
        assert_eq!(bench.result(), 5);
    }

    #[test]
    fn retain__lanes_end_after_their_jobs() {
        let mut bench = Bench::new(8);
        let first = bench.submit("a", 1).unwrap();
        assert_eq!(bench.begun.recv(), Ok(1));
        drop(bench.submit("a", 2).unwrap());
        drop(bench.submit("b", 3).unwrap());
        assert_eq!((bench.begun.recv(), bench.result()), (Ok(3), 3));
        bench.workers.retain(|lane| *lane == "b");
        // Another thread: that of the old lane waits for its first job.
        drop(bench.submit("a", 4).unwrap());
        assert_eq!((bench.begun.recv(), bench.result()), (Ok(4), 4));
        drop(first);
        assert_eq!([bench.result(), bench.result()], [1, 2]);
        bench.workers.retain(|_| false);
        drop(bench.begun_tx);
        assert_eq!(bench.begun.recv(), Ok(2));
        assert_eq!(bench.begun.recv(), Err(mpsc::RecvError), "the threads have ended");
    }

    #[test]
    fn drop__jobs_that_have_not_begun_are_dropped() {
        let mut bench = Bench::new(8);
        let running = bench.submit("a", 1).unwrap();
        assert_eq!(bench.begun.recv(), Ok(1));
        let waiting = bench.submit("a", 2).unwrap();
        drop(bench.workers);
        assert!(waiting.send(()).is_err(), "the job is gone with its gate");
        // The job that runs may go on; its result is a message like any other.
        drop(running);
        while bench.inbox.take() != Some(1) {
            bench.inbox.sleep(&[], None).unwrap();
        }
        drop(bench.begun_tx);
        assert_eq!(bench.begun.recv(), Err(mpsc::RecvError), "the thread has ended");
    }

    #[test]
    fn drop__jobs_that_the_thread_has_taken_and_not_begun_are_dropped() {
        let mut bench = Bench::new(8);
        let gates: Vec<_> = (0..3).map(|number| bench.submit("a", number).unwrap()).collect();
        let [first, second, third] = gates.try_into().unwrap();
        assert_eq!(bench.begun.recv(), Ok(0));
        // The thread takes both others at once if it has not taken them with the first.
        drop(first);
        assert_eq!(bench.begun.recv(), Ok(1));
        drop((bench.workers, bench.begun_tx));
        drop((second, third));
        assert_eq!(
            bench.begun.recv(),
            Err(mpsc::RecvError),
            "the third does not begin"
        );
    }

    #[test]
    fn drop__results_after_the_end_of_the_inbox() {
        let mut bench = Bench::new(8);
        let gates: Vec<_> = (0..4).map(|number| bench.submit("a", number).unwrap()).collect();
        assert_eq!(bench.begun.recv(), Ok(0));
        drop((bench.inbox, bench.workers, bench.begun_tx));
        drop(gates);
        let begun_later: Vec<u32> = bench.begun.iter().collect();
        assert_eq!(begun_later, [], "nobody wants the result of the first");
    }
}
