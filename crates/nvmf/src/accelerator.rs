//! An accelerator: a namespace whose blocks are windows, through which hosts give jobs to a core. `docs/accelerators.md` describes it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_accel::{Core, JobNumber, Refusal, Window};
use rdmux_verbs::sync::Mutex;
use rdmux_wire::accel::{AcceleratorInfo, DATA_OFFSET, Job, JobStatus, Outcome};
use rdmux_wire::nvme::{HostId, Nqn, Status};

use crate::backend::Backend;

#[cfg(test)]
thread_local! {
    /// The next core that runs a job on this thread panics.
    pub(crate) static PANICS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A host: its windows are nobody else's. Its name alone may be proved by a secret, so a wrong id of another host finds nothing.
pub(crate) type Owner<'a> = (&'a Nqn, &'a HostId);

/// An accelerator. Each host has windows of its own, at the same blocks, from its first write until its last controller ends.
#[derive(Debug)]
pub struct Accelerator {
    info: AcceleratorInfo,
    hosts_max: usize,
    hosts: Mutex<Hosts>,
    /// Jobs run one at a time.
    core: Mutex<Core>,
}

type Windows = Box<[Mutex<Window>]>;
/// Windows of hosts by their names, and the ids that came with a name.
type Hosts = BTreeMap<Nqn, Vec<(HostId, Arc<Windows>)>>;

/// A job of which all data are there: the window has them until the core takes them.
#[derive(Debug)]
pub(crate) struct WindowJob {
    windows: Arc<Windows>,
    window: usize,
    number: JobNumber,
    /// It came by a vendor's command, whose status is the job's.
    by_command: bool,
    /// Bytes of the result.
    result: AtomicU32,
}

impl WindowJob {
    /// Returns the bytes of the result; 0 before the job has run.
    pub(crate) fn result(&self) -> u32 {
        self.result.load(Ordering::Relaxed)
    }
}

/// One that was aborted, or has found no thread.
impl Drop for WindowJob {
    fn drop(&mut self) {
        self.windows[self.window].lock().give_up(self.number);
    }
}

/// Returns the status of a vendor's command whose job has failed: of the vendor's type, with the job's status as its code.
fn check(outcome: &Outcome) -> Result<(), Status> {
    match outcome.status {
        JobStatus::Done => Ok(()),
        status => Err(Status(0x700 | status as u16).do_not_retry()),
    }
}

fn windows_of(hosts: &Hosts, (nqn, id): Owner<'_>) -> Option<Arc<Windows>> {
    let windows = hosts.get(nqn)?.iter().find(|(known, _)| known == id);
    windows.map(|(_, windows)| windows.clone())
}

fn job_of(
    taken: Result<Option<JobNumber>, Refusal>,
    windows: Arc<Windows>,
    window: usize,
    by_command: bool,
) -> Result<Option<WindowJob>, Status> {
    let number = taken.map_err(|refusal| match refusal {
        Refusal::Header => Status::INVALID_FIELD.do_not_retry(),
        Refusal::Sequence => Status::COMMAND_SEQUENCE_ERROR.do_not_retry(),
        Refusal::Memory => Status::INTERNAL_ERROR,
    })?;
    Ok(number.map(|number| WindowJob {
        windows,
        window,
        number,
        by_command,
        result: AtomicU32::new(0),
    }))
}

impl Accelerator {
    /// Makes one for so many hosts at a time, which bounds the memory of windows.
    pub fn new(info: AcceleratorInfo, hosts_max: u32) -> Accelerator {
        Accelerator {
            core: Mutex::new(Core::new(info.algorithm, info.level)),
            info,
            hosts_max: hosts_max as usize,
            hosts: Mutex::default(),
        }
    }

    /// Returns the description that Identify has.
    pub fn info(&self) -> AcceleratorInfo {
        self.info
    }

    /// Returns the number of hosts that have windows.
    pub fn hosts(&self) -> usize {
        self.hosts.lock().values().map(Vec::len).sum()
    }

    fn windows(&self, owner: Owner<'_>) -> Option<Arc<Windows>> {
        windows_of(&self.hosts.lock(), owner)
    }

    /// Returns the windows of a host, which it gets if it has none.
    fn own_windows(&self, owner: Owner<'_>) -> Result<Arc<Windows>, Status> {
        // One lock for both: queues of a host may write for the first time at once.
        let mut hosts = self.hosts.lock();
        if let Some(windows) = windows_of(&hosts, owner) {
            return Ok(windows);
        }
        if hosts.values().map(Vec::len).sum::<usize>() >= self.hosts_max {
            return Err(Status::CAPACITY_EXCEEDED.do_not_retry());
        }
        let windows = (0..self.info.windows).map(|_| Mutex::default()).collect();
        let windows = Arc::new(windows);
        let (nqn, id) = owner;
        hosts
            .entry(nqn.clone())
            .or_default()
            .push((*id, Arc::clone(&windows)));
        Ok(windows)
    }

    /// Returns the window of an offset, and the offset in it.
    fn place(&self, offset: u64) -> (usize, u64) {
        let bytes = self.info.window_bytes;
        ((offset / bytes) as usize, offset % bytes)
    }

    /// Reads what a host sees: its own windows, and zeros where it has none.
    pub(crate) fn read_of(&self, owner: Owner<'_>, offset: u64, out: &mut [u8]) {
        let Some(windows) = self.windows(owner) else {
            return out.fill(0);
        };
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let (window, within) = self.place(at);
            let length = rest.len().min((self.info.window_bytes - within) as usize);
            let (part, others) = rest.split_at_mut(length);
            windows[window].lock().read(within, part);
            at += length as u64;
            rest = others;
        }
    }

    /// Takes data of a host. Returns the job that they complete.
    ///
    /// # Errors
    /// They lie in two windows, begin with a header that is wrong, or come too early or in too large a number.
    pub(crate) fn write_of(
        &self,
        owner: Owner<'_>,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Option<WindowJob>, Status> {
        let (window, within) = self.place(offset);
        if within + bytes.len() as u64 > self.info.window_bytes {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let windows = self.own_windows(owner)?;
        let written = windows[window].lock().write(&self.info, within, bytes);
        job_of(written, windows, window, false)
    }

    /// Takes a part of a job's data by a vendor's command. Returns the job if it is complete.
    ///
    /// # Errors
    /// There is no such window, the part is not of such a job, or it comes too early.
    pub(crate) fn submit_of(
        &self,
        owner: Owner<'_>,
        (window, offset): (u32, u32),
        job: Job,
        bytes: &[u8],
    ) -> Result<Option<WindowJob>, Status> {
        if window >= self.info.windows {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let windows = self.own_windows(owner)?;
        let window = window as usize;
        let submitted = windows[window]
            .lock()
            .submit(&self.info, job, offset.into(), bytes);
        job_of(submitted, windows, window, true)
    }

    /// Reads a part of a result, and zeros behind it. Returns the bytes of the whole.
    ///
    /// # Errors
    /// There is no such window, or no result in it; the job's own status, if it has failed.
    pub(crate) fn fetch_of(
        &self,
        owner: Owner<'_>,
        (window, offset): (u32, u32),
        out: &mut [u8],
    ) -> Result<u32, Status> {
        if window >= self.info.windows || offset > self.info.data_bytes() {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let early = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
        let windows = self.windows(owner).ok_or(early)?;
        let window = windows[window as usize].lock();
        let outcome = window.outcome().ok_or(early)?;
        check(&outcome)?;
        window.read(DATA_OFFSET + u64::from(offset), out);
        Ok(outcome.length)
    }

    /// Clears the windows of a host in a range: they read as zeros.
    pub(crate) fn clear_of(&self, owner: Owner<'_>, offset: u64, length: u64) {
        let Some(windows) = self.windows(owner).filter(|_| length > 0) else {
            return;
        };
        let (first, _) = self.place(offset);
        let (last, _) = self.place(offset + length - 1);
        for window in &windows[first..=last] {
            window.lock().clear();
        }
    }

    /// Forgets a host. Jobs of it that wait do not keep its data.
    pub(crate) fn forget(&self, nqn: &Nqn, id: &HostId) {
        let mut hosts = self.hosts.lock();
        let Some(windows) = windows_of(&hosts, (nqn, id)) else {
            return;
        };
        if let Some(known) = hosts.get_mut(nqn) {
            known.retain(|(known, _)| known != id);
            if known.is_empty() {
                hosts.remove(nqn);
            }
        }
        drop(hosts);
        for window in &*windows {
            window.lock().clear();
        }
    }

    /// Runs a job, once those before it have run. It takes long.
    ///
    /// # Errors
    /// The core has failed, or the job has, of a vendor's command: others have its status in the window's header.
    pub(crate) fn run(&self, job: &WindowJob) -> Result<(), Status> {
        let window = &job.windows[job.window];
        let mut core = self.core.lock();
        let taken = window.lock().take(job.number);
        let Some(started) = taken else {
            // The window was cleared since: nothing of the data is left, as behind a Write of other blocks.
            return match job.by_command {
                true => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
                false => Ok(()),
            };
        };
        // A defect of a codec must not end the target. Nothing of the core is used again after one.
        let ran = catch_unwind(AssertUnwindSafe(|| {
            #[cfg(test)]
            assert!(!PANICS.take(), "a deliberate panic");
            core.run(started)
        }));
        match ran {
            Ok(ran) => {
                drop(core);
                let outcome = ran.outcome;
                window.lock().finish(ran);
                job.result.store(outcome.length, Ordering::Relaxed);
                match outcome.status {
                    JobStatus::Failed => Err(Status::INTERNAL_ERROR.do_not_retry()),
                    _ if job.by_command => check(&outcome),
                    _ => Ok(()),
                }
            }
            Err(_) => {
                *core = Core::new(self.info.algorithm, self.info.level);
                drop(core);
                window.lock().fail(job.number);
                Err(Status::INTERNAL_ERROR.do_not_retry())
            }
        }
    }
}

/// Without a host it stores nothing.
impl Backend for Accelerator {
    fn bytes(&self) -> u64 {
        u64::from(self.info.windows) * self.info.window_bytes
    }

    fn accelerator(&self) -> Option<&Accelerator> {
        Some(self)
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Status> {
        out.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Status> {
        Err(Status::INVALID_FIELD.do_not_retry())
    }

    fn write_zeroes(&self, _: u64, _: u64) -> Result<(), Status> {
        Ok(())
    }

    fn flush(&self) -> Result<(), Status> {
        Ok(())
    }
}
