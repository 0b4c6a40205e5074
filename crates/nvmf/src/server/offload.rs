//! The offload engine: a thread that carries out reads, writes and flushes of drives between the queue pairs of hosts and a queue pair of each drive.
//!
//! It stands where ConnectX has its NVMe over Fabrics offload: the data go by static memory of the host or by the drive's own, and no other thread of the
//! target has work with a command. All other commands are the software target's: the threads of the media. So is each command that a drive has failed, which is
//! carried out once more there, and so are all of them once the engine has panicked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_drive::{Action, Buffer, Command, Completion, Outcome, RefusedReason};
use rdmux_wire::nvme::Status;

use super::media::Job;
use crate::backend::Backend;
use crate::backend::drive::{DriveBackend, Moving, POLLS, SLEEP, status_of};
use crate::backend::offload::OffloadCounter;
use crate::backend::peer::PeerData;
use crate::target::Operation;

/// Polls of the reactor after which it looks at its timers.
const POLLS_MAX: u32 = 64;
/// Longest time of a command that the software target tries once more: one that took longer to fail would, with the second time, take longer than its host waits.
const TRIED_AGAIN_WITHIN: Duration = Duration::from_secs(1);

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

/// Commands that have ended, by token.
type Ends = VecDeque<(u64, Ended)>;

/// The engine, with the I/Os of its commands.
#[derive(Debug, Default)]
pub(super) struct Offload {
    /// By token. They are kept apart from the engine, so that a panic of it loses none.
    jobs: HashMap<u64, Job>,
    next_token: u64,
    engine: Engine,
    has_panicked: bool,
    ended: Ends,
    /// Polls since the reactor has looked at its timers, and those that found nothing.
    polls: u32,
    idle_polls: u32,
}

impl Offload {
    /// Returns true if the engine has not panicked.
    pub(super) fn works(&self) -> bool {
        !self.has_panicked
    }

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
        let asked = Asked {
            action,
            offset: io.offset,
            length: io.length.into(),
            fua: matches!(io.operation, Operation::Write { fua: true }),
            is_inline: job.is_inline(),
        };
        let backend = io.namespace.backend.clone();
        let token = self.next_token;
        self.next_token += 1;
        self.idle_polls = 0;
        self.jobs.insert(token, job);
        self.run(|engine, ended| engine.begin(backend, token, asked, data, ended));
        Ok(())
    }

    /// Has the engine work. Its panic ends the engine, and nothing else.
    fn run(&mut self, work: impl FnOnce(&mut Engine, &mut Ends)) {
        let (engine, ended) = (&mut self.engine, &mut self.ended);
        // After a panic nothing of the engine is looked at but the ends of commands, each of which is one push.
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
            let backend = &job.io().namespace.backend;
            let Some(drive) = backend.peer() else {
                continue;
            };
            let is_drained = drained
                .entry(key(drive))
                .or_insert_with(|| drive.drain_offloaded());
            if *is_drained {
                drive.count_offloaded(OffloadCounter::NumErrorCmd);
                set_depth(drive, 0);
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
        if self.jobs.is_empty() || self.polls >= POLLS_MAX || self.idle_polls >= POLLS {
            self.polls = 0;
            return false;
        }
        self.polls += 1;
        if self.idle_polls > 0 {
            std::thread::yield_now();
        }
        true
    }

    /// Returns the time of the next look at drives, whatever else happens.
    pub(super) fn next_look(&self, now: Instant) -> Option<Instant> {
        match self.jobs.is_empty() {
            true => None,
            false if self.idle_polls < POLLS => Some(now),
            false => Some(now + SLEEP),
        }
    }
}

/// Returns the number that tells a drive from all others that somebody has.
fn key(drive: &DriveBackend) -> usize {
    std::ptr::from_ref(drive).addr()
}

fn set_depth(drive: &DriveBackend, commands: usize) {
    let counts = drive.offload().into_iter();
    counts.for_each(|counts| counts.set(OffloadCounter::QueueDepth, commands as u64));
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
    /// Its data came in its capsule.
    is_inline: bool,
}

/// The engine: commands without their hosts.
#[derive(Debug, Default)]
struct Engine {
    /// Drives that have commands.
    drives: HashMap<usize, Lane>,
}

/// A drive with its commands.
#[derive(Debug)]
struct Lane {
    /// It is here as long as the lane, so no other drive has its key.
    backend: Arc<dyn Backend>,
    commands: HashMap<u64, InFlight>,
    /// Those of which data are to be submitted, in their order.
    waiting: VecDeque<u64>,
    /// Those of which a Flush is. A drive has one of them at a time.
    flushing: VecDeque<u64>,
}

#[derive(Debug)]
struct InFlight {
    asked: Asked,
    moving: Moving,
    /// A command that the drive's queue pair has not taken.
    next: Option<(Command, Vec<Buffer>)>,
    /// A Flush is left, after the data.
    flushes: bool,
    began: Instant,
}

impl Engine {
    fn begin(
        &mut self,
        backend: Arc<dyn Backend>,
        token: u64,
        asked: Asked,
        data: PeerData,
        ended: &mut Ends,
    ) {
        let known = backend.clone();
        let Some(drive) = known.peer() else {
            return ended.push_back((token, Ended::HandedUp(data)));
        };
        let lane = self.drives.entry(key(drive)).or_insert_with(|| Lane {
            backend,
            commands: HashMap::new(),
            waiting: VecDeque::new(),
            flushing: VecDeque::new(),
        });
        let in_flight = InFlight {
            asked,
            moving: Moving::new(drive, asked.action, asked.offset, asked.length, data),
            next: None,
            flushes: known.has_write_cache() && (asked.fua || asked.action == Action::Flush),
            began: Instant::now(),
        };
        lane.commands.insert(token, in_flight);
        lane.waiting.push_back(token);
        lane.submit(drive, ended);
    }

    fn poll(&mut self, ended: &mut Ends) {
        self.drives.retain(|_, lane| {
            lane.poll(ended);
            !lane.commands.is_empty()
        });
    }
}

impl Lane {
    fn poll(&mut self, ended: &mut Ends) {
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
    fn submit(&mut self, drive: &DriveBackend, ended: &mut Ends) {
        while let Some(&token) = self.waiting.front() {
            let command = self.commands.get_mut(&token);
            let is_taken = match command.and_then(|command| command.next_data(drive)) {
                Some(next) => self.submit_one(drive, token, next, ended),
                None => {
                    self.go_on(drive, token, ended);
                    true
                }
            };
            if !is_taken {
                break;
            }
            self.waiting.pop_front();
        }
        while let Some(&token) = self.flushing.front() {
            let flush = (drive.command(Action::Flush, 0, 0), Vec::new());
            if !self.submit_one(drive, token, flush, ended) {
                break;
            }
            self.flushing.pop_front();
        }
        set_depth(drive, self.commands.len());
    }

    /// Submits a command. Returns false if the queue pair is full.
    fn submit_one(
        &mut self,
        drive: &DriveBackend,
        token: u64,
        (next, data): (Command, Vec<Buffer>),
        ended: &mut Ends,
    ) -> bool {
        let Err(refused) = drive.submit_offloaded(next, data, token) else {
            return true;
        };
        let Some(command) = self.commands.get_mut(&token) else {
            return true;
        };
        if refused.reason != RefusedReason::Full {
            command.moving.moved(refused.data);
            self.hand_up(drive, token, ended);
            return true;
        }
        if next.action != Action::Flush {
            command.next = Some((next, refused.data));
        }
        false
    }

    /// Flushes after a command whose data have moved, or ends it.
    fn go_on(&mut self, drive: &DriveBackend, token: u64, ended: &mut Ends) {
        let Some(command) = self.commands.get_mut(&token) else {
            return;
        };
        if std::mem::take(&mut command.flushes) {
            return self.flushing.push_back(token);
        }
        let Some(command) = self.commands.remove(&token) else {
            return;
        };
        let Asked {
            action,
            length,
            is_inline,
            ..
        } = command.asked;
        if let Some(counts) = drive.offload() {
            let blocks = length >> drive.block_shift();
            counts.count_done(action, blocks, is_inline, command.began.elapsed());
        }
        if action != Action::Flush && !is_inline {
            drive.peers().count_direct();
        }
        ended.push_back((token, Ended::Done(command.moving.into_data())));
    }

    fn completed(&mut self, drive: &DriveBackend, completion: Completion, ended: &mut Ends) {
        let token = completion.token;
        let Some(command) = self.commands.get_mut(&token) else {
            return;
        };
        command.moving.moved(completion.data);
        let status = status_of(completion.outcome);
        if status.is_success() {
            return self.waiting.push_back(token);
        }
        drive.count_offloaded(OffloadCounter::NumBackendErrorCmd);
        let is_told = matches!(completion.outcome, Outcome::Done(_));
        if is_told && command.began.elapsed() < TRIED_AGAIN_WITHIN {
            return self.hand_up(drive, token, ended);
        }
        self.commands.remove(&token);
        drive.count_offloaded(OffloadCounter::NumErrorCmd);
        ended.push_back((token, Ended::Failed(status)));
    }

    /// Has the software target carry a command out, from its begin.
    fn hand_up(&mut self, drive: &DriveBackend, token: u64, ended: &mut Ends) {
        let Some(command) = self.commands.remove(&token) else {
            return;
        };
        drive.count_offloaded(OffloadCounter::NumErrorCmd);
        let data = command.moving.into_data();
        // A drive that did not stop has kept the memory, or a part of it.
        let is_whole = data.bytes() as u64 >= command.asked.length;
        ended.push_back((
            token,
            match is_whole {
                true => Ended::HandedUp(data),
                false => Ended::Failed(Status::NAMESPACE_NOT_READY.do_not_retry()),
            },
        ));
    }
}

impl InFlight {
    /// Returns the next command that moves data, with their memory. `None`: all have moved.
    fn next_data(&mut self, drive: &DriveBackend) -> Option<(Command, Vec<Buffer>)> {
        self.next.take().or_else(|| self.moving.next(drive))
    }
}
