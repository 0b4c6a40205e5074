//! I/Os that may wait for a medium: by an io_uring, which the reactor sleeps on, by the offload engine, or by threads.

use std::collections::{HashMap, HashSet};
use std::io;
use std::time::Instant;

use rdmux_drive::Action;
use rdmux_runtime::{
    ConnectionId, DescriptorId, FileAccess, FileRing, Interest, Mailbox, Pages, Reactor, Run, Workers,
};
use rdmux_wire::nvme::Status;

use super::offload::Offload;
use super::{Mail, rdma, tcp};
use crate::backend::peer::PeerData;
use crate::target::{Io, Target};

/// Jobs of one lane that wait for a thread; those beyond fail, and their hosts repeat them.
const JOBS_MAX: usize = 64 << 10;
/// Threads of a namespace, but for the one that takes what is long.
const LANES: usize = 4;
/// I/Os of a namespace that the ring has at a time: one whose medium hangs leaves room for others.
const IN_RING_MAX: u32 = 512;

/// An I/O that may wait for a medium, and the connection that has it.
#[derive(Debug)]
pub(super) enum Job {
    Tcp(DescriptorId, crate::tcp::Work),
    Rdma(ConnectionId, crate::rdma::Work),
}

impl Job {
    pub(super) fn io(&self) -> &Io {
        match self {
            Job::Tcp(_, work) => work.io(),
            Job::Rdma(_, work) => work.io(),
        }
    }

    fn execute(self) -> Mail {
        match self {
            Job::Tcp(id, mut work) => {
                let status = work.execute();
                Job::Tcp(id, work).end(status)
            }
            Job::Rdma(id, mut work) => {
                let status = work.execute();
                Job::Rdma(id, work).end(status)
            }
        }
    }

    /// Returns the message that reports its end.
    fn end(self, status: Status) -> Mail {
        match self {
            Job::Tcp(id, work) => Mail::Tcp(tcp::Mail::Finished(id, work, status)),
            Job::Rdma(id, work) => Mail::Rdma(rdma::Mail::Finished(id, work, status)),
        }
    }

    /// Turns it into an access of an io_uring, if it can be one.
    fn into_access(self) -> Result<FileAccess<Job>, Job> {
        match self {
            Job::Tcp(id, work) => work
                .into_access(|work| Job::Tcp(id, work))
                .map_err(|work| Job::Tcp(id, work)),
            Job::Rdma(id, work) => work
                .into_access(|work| Job::Rdma(id, work))
                .map_err(|work| Job::Rdma(id, work)),
        }
    }

    /// Begins it for the offload engine, which serves hosts by RDMA.
    pub(super) fn begin_offloaded(&mut self) -> Option<(Action, PeerData)> {
        match self {
            Job::Tcp(..) => None,
            Job::Rdma(_, work) => work.begin_offloaded(),
        }
    }

    /// Returns true if the data of a write came in its capsule.
    pub(super) fn is_inline(&self) -> bool {
        match self {
            Job::Tcp(..) => false,
            Job::Rdma(_, work) => work.is_inline(),
        }
    }

    pub(super) fn end_offloaded(&mut self, data: PeerData) {
        if let Job::Rdma(_, work) = self {
            work.end_offloaded(data);
        }
    }

    fn end_access(mut self, buffer: Pages) -> Job {
        match &mut self {
            Job::Tcp(_, work) => work.end_access(buffer),
            Job::Rdma(_, work) => work.end_access(buffer),
        }
        self
    }
}

/// The media of a reactor.
#[derive(Debug)]
pub(super) struct Media {
    /// With the number by which the reactor reports it. `None` if the system allows no io_uring.
    ring: Option<(FileRing<Job>, DescriptorId)>,
    /// The offload engine, if this reactor's thread is its own.
    offload: Option<Offload>,
    /// Their lanes: the namespace, and a number.
    workers: Workers<(usize, usize), Job, Mail>,
    next_lane: usize,
    /// Number of I/Os of each namespace that the ring has.
    in_ring: HashMap<usize, u32>,
    /// Those that neither the ring nor a thread has taken.
    failed: Vec<Job>,
}

impl Media {
    pub(super) fn new(mailbox: Mailbox<Mail>, offload: Option<Offload>) -> Media {
        let run: Run<Job, Mail> = |jobs, report| {
            for job in jobs {
                if !report(job.execute()) {
                    return;
                }
            }
        };
        Media {
            ring: None,
            offload,
            workers: Workers::new("nvmf-media", JOBS_MAX, run, mailbox),
            next_lane: 0,
            in_ring: HashMap::new(),
            failed: Vec::new(),
        }
    }

    /// Makes the io_uring, on the thread that will use it.
    pub(super) fn start(&mut self, reactor: &mut Reactor<Mail>) -> io::Result<()> {
        let Ok(ring) = FileRing::new() else {
            return Ok(());
        };
        let id = reactor.add_descriptor(ring.descriptor()?, Interest::READABLE)?;
        self.ring = Some((ring, id));
        Ok(())
    }

    /// Returns true if a readable descriptor is the ring's: [`Media::pop`] is to be called then.
    pub(super) fn is_ring(&self, id: DescriptorId) -> bool {
        self.ring.as_ref().is_some_and(|(_, own)| *own == id)
    }

    /// Returns true if the offload engine works on the reactor's thread.
    pub(super) fn has_offload(&self) -> bool {
        self.offload.as_ref().is_some_and(Offload::works)
    }

    /// Begins an I/O: by the offload engine, by the ring, once [`Media::submit`] is called, or on a thread.
    ///
    /// # Errors
    /// The I/O, if too many wait.
    pub(super) fn begin(&mut self, mut job: Job) -> Result<(), Job> {
        if let Some(offload) = &mut self.offload
            && job.io().offloading().is_some()
        {
            match offload.begin(job) {
                Ok(()) => return Ok(()),
                Err(own) => job = own,
            }
        }
        let Some((ring, _)) = &mut self.ring else {
            return self.begin_on_thread(job);
        };
        let in_ring = self.in_ring.entry(job.io().namespace.key()).or_default();
        if *in_ring >= IN_RING_MAX {
            return self.begin_on_thread(job);
        }
        let refused = match job.into_access() {
            Ok(access) => match ring.add(access) {
                Ok(()) => {
                    *in_ring += 1;
                    return Ok(());
                }
                Err(access) => access.token.end_access(access.buffer),
            },
            Err(job) => job,
        };
        self.begin_on_thread(refused)
    }

    fn begin_on_thread(&mut self, job: Job) -> Result<(), Job> {
        self.next_lane = (self.next_lane + 1) % LANES;
        let lane = match job.io() {
            io if io.is_serial() => 0,
            io if io.is_long() => LANES,
            _ => self.next_lane,
        };
        let namespace = job.io().namespace.key();
        let submitted = self.workers.submit((namespace, lane), job);
        submitted.map_err(|(job, _)| job)
    }

    /// Has the kernel start what was begun.
    pub(super) fn submit(&mut self) {
        let Some((ring, _)) = &mut self.ring else {
            return;
        };
        for access in ring.submit() {
            let job = self.left_ring(access);
            if let Err(job) = self.begin_on_thread(job) {
                self.failed.push(job);
            }
        }
    }

    fn left_ring(&mut self, access: FileAccess<Job>) -> Job {
        let job = access.token.end_access(access.buffer);
        if let Some(number) = self.in_ring.get_mut(&job.io().namespace.key()) {
            *number -= 1;
        }
        job
    }

    /// Looks for ends of what the offload engine has, which [`Media::pop`] returns.
    pub(super) fn poll(&mut self) {
        self.offload.iter_mut().for_each(Offload::poll);
    }

    /// Returns true if the reactor is to poll, and not to sleep.
    pub(super) fn polls(&mut self) -> bool {
        self.offload.as_mut().is_some_and(Offload::polls)
    }

    /// Returns when to call [`Media::poll`] again, whatever else happens.
    pub(super) fn next_look(&self, now: Instant) -> Option<Instant> {
        self.offload.as_ref()?.next_look(now)
    }

    /// Ends the threads of namespaces that are no more.
    pub(super) fn handle_change(&mut self, target: &Target) {
        let subsystems = target.subsystems();
        let namespaces = subsystems.iter().flat_map(|subsystem| subsystem.list());
        let keys: HashSet<usize> = namespaces.map(|namespace| namespace.key()).collect();
        self.workers.retain(|(namespace, _)| keys.contains(namespace));
        self.in_ring
            .retain(|namespace, number| *number > 0 || keys.contains(namespace));
    }

    /// Returns the report of an I/O that the ring or the offload engine has ended. One that the ring has moved fewer bytes of, or none, and one that the engine gives
    /// up, go to a thread, which repeats them and learns why.
    pub(super) fn pop(&mut self) -> Option<Mail> {
        if let Some(job) = self.failed.pop() {
            return Some(job.end(Status::INTERRUPTED));
        }
        while let Some((job, status)) = self.offload.as_mut().and_then(Offload::pop) {
            let left = match status {
                Some(status) => return Some(job.end(status)),
                None => self.begin_on_thread(job),
            };
            if let Err(job) = left {
                return Some(job.end(Status::INTERRUPTED));
            }
        }
        loop {
            let (access, moved) = self.ring.as_mut()?.0.pop()?;
            let is_whole = moved.is_ok_and(|moved| moved == access.length);
            let job = self.left_ring(access);
            if is_whole {
                return Some(job.end(Status::SUCCESS));
            }
            if let Err(job) = self.begin_on_thread(job) {
                return Some(job.end(Status::INTERRUPTED));
            }
        }
    }
}
