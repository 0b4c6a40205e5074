//! I/Os at the media: started and ended in any order, and within each other.
//!
//! A thread of a medium runs beside others. Here one thread runs all: while the shipped code carries an I/O out ([`Jobs::execute`]), each call of
//! the disk ([`stir`]) may start or end others, as an io_uring and its kernel would. That needs no lock of the shipped
//! code but those that it takes without waiting.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_nvmf::target::Operation;
use rdmux_runtime::{Direction, FileAccess};
use rdmux_wire::nvme::Status;

use super::disk::Disk;
use super::stream::LinkId;
use super::transport::Work;
use crate::dice::Dice;

/// Looks at writes that do not end, beyond which the fence hangs.
const PAUSES_MAX: u32 = 100;

/// An I/O that a medium has.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) link: LinkId,
    pub(super) host: usize,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    Waiting(Work),
    /// The ring has refused it, or it has failed there.
    OfThread(Work),
    Started(FileAccess<Work>),
}

/// The I/Os that media have.
#[derive(Debug)]
pub(super) struct Jobs {
    all: BTreeMap<u64, Job>,
    next: u64,
    dice: Dice,
    disks: BTreeMap<u32, Arc<Disk>>,
    /// I/Os that are done, and not reported.
    pub(super) finished: Vec<(LinkId, Work, Status)>,
    /// I/Os that were started within others: their end is to be scheduled.
    pub(super) started: Vec<u64>,
    /// Host whose I/O runs.
    running: Option<usize>,
    pauses: u32,
    pub(super) nested: u64,
    pub(super) waits: u64,
}

thread_local! {
    /// Set while the shipped code carries an I/O out.
    static JOBS: RefCell<Option<Jobs>> = const { RefCell::new(None) };
}

/// Forgets what a run has left that has panicked.
pub(super) fn forget() {
    JOBS.take();
}

/// Returns the host whose I/O runs.
pub(super) fn running_host() -> Option<usize> {
    JOBS.with_borrow(|jobs| jobs.as_ref()?.running)
}

/// Lets other I/Os run within the one that calls the disk.
pub(super) fn stir() {
    let Some(mut jobs) = JOBS.take() else {
        return;
    };
    for _ in 0..2 {
        if !jobs.all.is_empty() && jobs.dice.one_in(3) {
            jobs.step();
        }
    }
    JOBS.set(Some(jobs));
}

/// Lets a write of a namespace end that somebody waits for.
///
/// # Panics
/// There is none: the wait would have no end.
pub(super) fn pause(nsid: u32) {
    let Some(mut jobs) = JOBS.take() else {
        return;
    };
    jobs.waits += 1;
    let of_namespace = jobs.all.iter().filter(|(_, job)| match &job.stage {
        Stage::Started(access) => {
            access.direction == Direction::Write && access.token.io().namespace.nsid.0 == nsid
        }
        _ => false,
    });
    let started: Vec<u64> = of_namespace.map(|(id, _)| *id).collect();
    if started.is_empty() {
        jobs.pauses += 1;
    } else {
        let id = jobs.dice.pick(&started);
        jobs.land(id);
    }
    let hangs = jobs.pauses > PAUSES_MAX;
    JOBS.set(Some(jobs));
    assert!(
        !hangs,
        "somebody waits for writes of namespace {nsid}, of which none runs"
    );
}

impl Jobs {
    pub(super) fn new(next: u64, dice: Dice, disks: BTreeMap<u32, Arc<Disk>>) -> Jobs {
        Jobs {
            all: BTreeMap::new(),
            next,
            dice,
            disks,
            finished: Vec::new(),
            started: Vec::new(),
            running: None,
            pauses: 0,
            nested: 0,
            waits: 0,
        }
    }

    pub(super) fn add(&mut self, link: LinkId, host: usize, work: Work) -> u64 {
        self.next += 1;
        let stage = Stage::Waiting(work);
        self.all.insert(self.next, Job { link, host, stage });
        self.next
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, id: u64) -> Option<&Job> {
        self.all.get(&id)
    }

    /// Carries an I/O out, with others within it.
    pub(super) fn execute(&mut self, host: usize, work: &mut Work) -> Status {
        let dice = Dice::new(self.dice.next(), 0);
        let empty = Jobs::new(0, dice, BTreeMap::new());
        let mut jobs = std::mem::replace(self, empty);
        jobs.running = Some(host);
        JOBS.set(Some(jobs));
        let status = work.execute();
        if let Some(jobs) = JOBS.take() {
            *self = jobs;
        }
        self.running = None;
        self.pauses = 0;
        status
    }

    /// Returns true if an I/O would wait until others have ended.
    pub(super) fn would_wait(&self, id: u64) -> bool {
        let Some(Stage::Waiting(work) | Stage::OfThread(work)) = self.all.get(&id).map(|job| &job.stage)
        else {
            return false;
        };
        let is_alone = matches!(work.io().operation, Operation::Own | Operation::Reserve(_));
        let namespace = work.io().namespace.key();
        is_alone
            && self.all.values().any(|job| match &job.stage {
                Stage::Started(access) => {
                    access.direction == Direction::Write && access.token.io().namespace.key() == namespace
                }
                _ => false,
            })
    }

    /// Takes a job that a thread is to carry out.
    pub(super) fn take(&mut self, id: u64) -> Option<Job> {
        self.all.remove(&id)
    }

    /// Starts an I/O, if an io_uring can carry it out. Returns false if a thread has to.
    pub(super) fn start(&mut self, id: u64) -> bool {
        let Some(Job { link, host, stage }) = self.all.remove(&id) else {
            return true;
        };
        let stage = match stage {
            Stage::Waiting(work) => match work.into_access() {
                Ok(access) => {
                    if access.direction == Direction::Read {
                        self.disk(access.token.io().namespace.nsid.0)
                            .check(Some(host), false);
                    }
                    Stage::Started(access)
                }
                Err(work) => Stage::OfThread(work),
            },
            stage => stage,
        };
        let has_started = matches!(stage, Stage::Started(_));
        self.all.insert(id, Job { link, host, stage });
        has_started
    }

    fn disk(&self, nsid: u32) -> Arc<Disk> {
        self.disks[&nsid].clone()
    }

    /// Ends an I/O that was started. Returns false if a thread has to repeat it.
    pub(super) fn land(&mut self, id: u64) -> bool {
        let Some(Job { link, host, stage }) = self.all.remove(&id) else {
            return true;
        };
        let Stage::Started(mut access) = stage else {
            self.all.insert(id, Job { link, host, stage });
            return false;
        };
        let disk = self.disk(access.token.io().namespace.nsid.0);
        let (offset, bytes) = (access.offset, &mut access.buffer[..access.length as usize]);
        let is_done = match access.direction {
            Direction::Read => {
                disk.read(offset, bytes);
                true
            }
            Direction::Write => disk.write(Some(host), offset, bytes),
        };
        let mut work = access.token;
        work.end_access(access.buffer);
        match is_done {
            true => self.finished.push((link, work, Status::SUCCESS)),
            false => {
                let stage = Stage::OfThread(work);
                self.all.insert(id, Job { link, host, stage });
                self.started.push(id);
            }
        }
        is_done
    }

    /// Starts or ends one of them.
    fn step(&mut self) {
        let ids: Vec<u64> = self.all.keys().copied().collect();
        let id = self.dice.pick(&ids);
        self.nested += 1;
        let may_start = match self.all.get(&id).map(|job| &job.stage) {
            Some(Stage::Waiting(work)) => {
                matches!(
                    work.io().operation,
                    Operation::Read | Operation::Write { fua: false }
                )
            }
            Some(Stage::Started(_)) => {
                self.land(id);
                false
            }
            _ => false,
        };
        if may_start && self.start(id) {
            self.started.push(id);
            if self.dice.one_in(2) {
                self.land(id);
            }
        }
    }

    /// The target dies: of writes that were started, any blocks may be written.
    pub(super) fn die(&mut self) {
        for (_, job) in std::mem::take(&mut self.all) {
            if let Stage::Started(access) = &job.stage
                && access.direction == Direction::Write
            {
                let disk = self.disk(access.token.io().namespace.nsid.0);
                disk.tear(access.offset, &access.buffer[..access.length as usize]);
            }
        }
    }
}
