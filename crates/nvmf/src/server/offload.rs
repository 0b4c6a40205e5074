//! The offload engine: on a thread of its own, it has reads, writes and flushes go between the queue pairs of hosts and a queue pair of each drive.
//!
//! It stands where ConnectX has its NVMe over Fabrics offload: the data go by static memory of the host or by the drive's own, and no other thread of the
//! target has work with a command. All other commands are the software target's: the threads of the media. So is each command that a drive has failed, which is
//! carried out once more there, and all of them once the engine has panicked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_drive::{Action, Buffer, Command, Completion, Outcome, RefusedReason};
use rdmux_wire::nvme::Status;

use super::media::Job;
use crate::backend::Backend;
use crate::backend::drive::{DriveBackend, Moving};
use crate::backend::offload::OffloadCounter;
use crate::backend::peer::PeerData;
use crate::target::Operation;

/// Polls that find nothing before the engine sleeps between two.
const IDLE_POLLS: u32 = 50;
/// Polls of the reactor after which it looks at its timers.
const POLLS_MAX: u32 = 64;
/// Longest sleep while a drive has commands: it tells nobody that it is done.
const SLEEP: Duration = Duration::from_micros(50);

/// End of a command for the engine.
#[derive(Debug)]
enum Ended {
    /// The drive has carried it out.
    Done(PeerData),
    /// The software target carries it out.
    HandedUp(PeerData),
    /// It has failed.
    Failed(Status),
}

/// The engine, with the I/Os of its commands.
#[derive(Debug, Default)]
pub(super) struct Offload {
    /// By token. The engine does not have them: they are here whatever becomes of it.
    jobs: HashMap<u64, Job>,
    next_token: u64,
    engine: Engine,
    has_panicked: bool,
    ended: VecDeque<(u64, Ended)>,
    /// Polls since the reactor has looked at its timers, and those that found nothing.
    polls: u32,
    idle_polls: u32,
}

impl Offload {
    /// Begins an I/O.
    ///
    /// # Errors
    /// The I/O, which is the software target's.
    pub(super) fn begin(&mut self, mut job: Job) -> Result<(), Job> {
        if self.has_panicked {
            return Err(job);
        }
        let Some((action, data)) = job.begin_offloaded() else {
            return Err(job);
        };
        let io = job.io();
        let fua = matches!(io.operation, Operation::Write { fua: true });
        let asked = Asked {
            action,
            offset: io.offset,
            length: io.length.into(),
            fua,
        };
        let (namespace, backend) = (io.namespace.key(), io.namespace.backend.clone());
        let token = self.next_token;
        self.next_token += 1;
        self.jobs.insert(token, job);
        self.run(|engine, ended| engine.begin(namespace, backend, token, asked, data, ended));
        Ok(())
    }

    /// Has the engine work. Its panic ends the engine, and nothing else.
    fn run(&mut self, work: impl FnOnce(&mut Engine, &mut VecDeque<(u64, Ended)>)) {
        let (engine, ended) = (&mut self.engine, &mut self.ended);
        // What it has done is not looked at afterwards, but for the ends of commands, each of which is one push.
        let ran = catch_unwind(AssertUnwindSafe(|| work(engine, ended)));
        if ran.is_err() {
            self.has_panicked = true;
            // Memory that drives have comes back by their completions.
            self.engine = Engine::default();
        }
    }

    /// Looks at the drives.
    pub(super) fn poll(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let before = self.ended.len();
        match self.has_panicked {
            false => self.run(Engine::poll),
            true => self.drain(),
        }
        match self.ended.len() > before {
            true => self.idle_polls = 0,
            false => self.idle_polls = self.idle_polls.saturating_add(1),
        }
    }

    /// Fails the commands of an engine that is no more, each once its drive has none of them: their hosts may send them again, and until then a drive may
    /// still move their data.
    fn drain(&mut self) {
        let known: HashSet<u64> = self.ended.iter().map(|(token, _)| *token).collect();
        let mut drained = HashMap::new();
        for (token, job) in self.jobs.iter().filter(|(token, _)| !known.contains(token)) {
            let namespace = &job.io().namespace;
            let is_drained = drained.entry(namespace.key()).or_insert_with(|| {
                let drive = namespace.backend.peer();
                drive.is_none_or(DriveBackend::drain_offloaded)
            });
            if *is_drained {
                let drive = namespace.backend.peer().and_then(DriveBackend::offload);
                drive.into_iter().for_each(|counts| {
                    counts.count(OffloadCounter::NumErrorCmd);
                    counts.set(OffloadCounter::QueueDepth, 0);
                });
                self.ended
                    .push_back((*token, Ended::Failed(Status::INTERNAL_ERROR)));
            }
        }
    }

    /// Returns an I/O that has ended, with its status; without one the software target is to carry it out.
    pub(super) fn pop(&mut self) -> Option<(Job, Option<Status>)> {
        loop {
            let (token, end) = self.ended.pop_front()?;
            let Some(mut job) = self.jobs.remove(&token) else {
                continue;
            };
            let (data, status) = match end {
                Ended::Done(data) => (data, Some(Status::SUCCESS)),
                Ended::HandedUp(data) => (data, None),
                Ended::Failed(status) => (PeerData::default(), Some(status)),
            };
            job.end_offloaded(data);
            return Some((job, status));
        }
    }

    /// Returns true if the reactor is to poll, and not to sleep: a drive has commands, and tells nobody that it has carried them out.
    pub(super) fn polls(&mut self) -> bool {
        if self.jobs.is_empty() || self.polls >= POLLS_MAX || self.idle_polls >= IDLE_POLLS {
            self.polls = 0;
            return false;
        }
        self.polls += 1;
        if self.idle_polls > 0 {
            std::thread::yield_now();
        }
        true
    }

    /// Returns when to look at drives again, whatever else happens.
    pub(super) fn next_look(&self, now: Instant) -> Option<Instant> {
        match self.jobs.is_empty() {
            true => None,
            false if self.idle_polls < IDLE_POLLS => Some(now),
            false => Some(now + SLEEP),
        }
    }

    /// Lets the drives go of namespaces that are no more, each with its last command.
    pub(super) fn retain(&mut self, keys: &HashSet<usize>) {
        let drives = self.engine.drives.iter_mut();
        drives.for_each(|(key, lane)| lane.is_leaving = !keys.contains(key));
        self.engine.drop_unused();
    }
}

/// Work of a command.
#[derive(Clone, Copy, Debug)]
struct Asked {
    action: Action,
    /// Offset and length in bytes.
    offset: u64,
    length: u64,
    /// A Flush follows.
    fua: bool,
}

/// The engine: commands without their hosts.
#[derive(Debug, Default)]
struct Engine {
    /// By namespace.
    drives: HashMap<usize, Lane>,
}

/// A drive with the commands of one of its namespaces.
#[derive(Debug)]
struct Lane {
    backend: Arc<dyn Backend>,
    commands: HashMap<u64, InFlight>,
    /// Those of which a part is to be submitted, in their order.
    waiting: VecDeque<u64>,
    /// Its namespace is no more.
    is_leaving: bool,
}

#[derive(Debug)]
struct InFlight {
    asked: Asked,
    moving: Moving,
    /// What the drive's queue pair has not taken.
    next: Option<(Command, Vec<Buffer>)>,
    /// A Flush is left, after the data.
    flushes: bool,
    /// The drive has no more of it than that Flush.
    is_flushing: bool,
    began: Instant,
}

impl Engine {
    fn begin(
        &mut self,
        namespace: usize,
        backend: Arc<dyn Backend>,
        token: u64,
        asked: Asked,
        data: PeerData,
        ended: &mut VecDeque<(u64, Ended)>,
    ) {
        let lane = self.drives.entry(namespace).or_insert_with(|| Lane {
            backend,
            commands: HashMap::new(),
            waiting: VecDeque::new(),
            is_leaving: false,
        });
        lane.begin(token, asked, data, ended);
    }

    fn poll(&mut self, ended: &mut VecDeque<(u64, Ended)>) {
        for lane in self.drives.values_mut() {
            lane.poll(ended);
        }
        self.drop_unused();
    }

    fn drop_unused(&mut self) {
        self.drives
            .retain(|_, lane| !lane.is_leaving || !lane.commands.is_empty());
    }
}

impl Lane {
    fn begin(&mut self, token: u64, asked: Asked, data: PeerData, ended: &mut VecDeque<(u64, Ended)>) {
        let backend = self.backend.clone();
        let Some(drive) = backend.peer() else {
            return ended.push_back((token, Ended::HandedUp(data)));
        };
        let in_flight = InFlight {
            asked,
            moving: Moving::new(drive, asked.action, asked.offset, asked.length, data),
            next: None,
            flushes: backend.has_write_cache() && (asked.fua || asked.action == Action::Flush),
            is_flushing: false,
            began: Instant::now(),
        };
        self.commands.insert(token, in_flight);
        self.waiting.push_back(token);
        self.submit(drive, ended);
    }

    fn poll(&mut self, ended: &mut VecDeque<(u64, Ended)>) {
        if self.commands.is_empty() {
            return;
        }
        let backend = self.backend.clone();
        let Some(drive) = backend.peer() else {
            return;
        };
        while let Some(completion) = drive.poll_offloaded() {
            self.completed(drive, completion, ended);
        }
        self.submit(drive, ended);
    }

    /// Submits what is next of the commands that wait, as far as the drive's queue pair takes it.
    fn submit(&mut self, drive: &DriveBackend, ended: &mut VecDeque<(u64, Ended)>) {
        while let Some(&token) = self.waiting.front() {
            let Some(command) = self.commands.get_mut(&token) else {
                self.waiting.pop_front();
                continue;
            };
            let Some((next, data)) = command.next(drive) else {
                self.waiting.pop_front();
                self.end(drive, token, ended);
                continue;
            };
            match drive.submit_offloaded(next, data, token) {
                Ok(()) => {}
                Err(refused) if refused.reason == RefusedReason::Full => {
                    command.next = Some((next, refused.data));
                    break;
                }
                Err(refused) => {
                    command.moving.moved(refused.data);
                    self.hand_up(drive, token, ended);
                }
            }
            self.waiting.pop_front();
        }
        self.count_depth(drive);
    }

    fn completed(
        &mut self,
        drive: &DriveBackend,
        completion: Completion,
        ended: &mut VecDeque<(u64, Ended)>,
    ) {
        let token = completion.token;
        let Some(command) = self.commands.get_mut(&token) else {
            return;
        };
        command.moving.moved(completion.data);
        match completion.outcome {
            Outcome::Done(status) if status.is_success() => {
                self.waiting.push_back(token);
                return;
            }
            Outcome::Done(status) if command.is_flushing => drive.flush_failed(status),
            _ => {}
        }
        let counts = drive.offload().into_iter();
        counts.for_each(|counts| counts.count(OffloadCounter::NumBackendErrorCmd));
        self.hand_up(drive, token, ended);
    }

    /// Ends a command that the drive has carried out.
    fn end(&mut self, drive: &DriveBackend, token: u64, ended: &mut VecDeque<(u64, Ended)>) {
        let Some(command) = self.commands.remove(&token) else {
            return;
        };
        let Asked { action, length, .. } = command.asked;
        let blocks = length >> drive.block_shift();
        if let Some(counts) = drive.offload() {
            counts.count_done(action, blocks, command.began.elapsed());
        }
        if action != Action::Flush {
            drive.peers().count_direct();
        }
        ended.push_back((token, Ended::Done(command.moving.into_data())));
    }

    /// Has the software target carry a command out, from its begin.
    fn hand_up(&mut self, drive: &DriveBackend, token: u64, ended: &mut VecDeque<(u64, Ended)>) {
        let Some(command) = self.commands.remove(&token) else {
            return;
        };
        let counts = drive.offload().into_iter();
        counts.for_each(|counts| counts.count(OffloadCounter::NumErrorCmd));
        let data = command.moving.into_data();
        ended.push_back((
            token,
            // A drive that did not stop has kept the memory, or a part of it.
            match (data.bytes() as u64) < command.asked.length {
                true => Ended::Failed(Status::NAMESPACE_NOT_READY.do_not_retry()),
                false => Ended::HandedUp(data),
            },
        ));
    }

    fn count_depth(&self, drive: &DriveBackend) {
        let counts = drive.offload().into_iter();
        counts.for_each(|counts| counts.set(OffloadCounter::QueueDepth, self.commands.len() as u64));
    }
}

impl InFlight {
    /// Returns what the drive is to do next, with the memory of its data. `None`: nothing is left.
    fn next(&mut self, drive: &DriveBackend) -> Option<(Command, Vec<Buffer>)> {
        if let Some(next) = self.next.take().or_else(|| self.moving.next(drive)) {
            return Some(next);
        }
        self.is_flushing = std::mem::take(&mut self.flushes);
        let flush = || (drive.command(Action::Flush, 0, 0), Vec::new());
        self.is_flushing.then(flush)
    }
}
