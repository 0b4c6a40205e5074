//! A window of one host.

use rdmux_wire::accel::{AcceleratorInfo, DATA_OFFSET, Header, JOB_LEN, Job, JobStatus, Outcome};

use crate::core::takes;
use crate::frames::zeroes;

/// Granularity of what has arrived: the least block that a namespace has.
const BLOCK: u64 = 512;

/// Reason for which a window takes no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// They are no header that the core can follow, or no data of the header's job.
    Header,
    /// The job that they belong to is running, or another one; or the header before them was wrong.
    Sequence,
    /// There is no memory.
    Memory,
}

/// A window: data that arrive, then the result of a job.
#[derive(Debug, Default)]
pub struct Window {
    /// Data that have arrived, or the result. Empty while the core has it.
    bytes: Vec<u8>,
    /// Blocks that have arrived, a bit each, without those of the header's page.
    arrived: Vec<u64>,
    state: State,
    /// Number of its jobs that were complete: what a core returns may be of an earlier one.
    jobs: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// Nothing has arrived.
    #[default]
    Empty,
    Receiving(Option<Job>),
    /// A header was wrong: data that come now may be of its job, and must not become those of the next.
    Refused,
    /// All data are here.
    Complete(Job),
    /// The core has them.
    Running(Job),
    Over(Job, Outcome),
}

/// A job whose data are complete, for [`Window::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobNumber(u64);

/// A job for a core.
#[derive(Debug)]
pub struct Started {
    /// The job.
    pub job: Job,
    /// The window's data, from the first byte on.
    pub bytes: Vec<u8>,
    pub(crate) number: JobNumber,
}

impl Started {
    /// Returns a job of no window, with its data at the beginning of a buffer as long as a result may be.
    pub fn of(job: Job, bytes: Vec<u8>) -> Started {
        Started {
            job,
            bytes,
            number: JobNumber(0),
        }
    }
}

/// A job that has run.
#[derive(Debug)]
pub struct Ran {
    /// The result, from the first byte on, in a buffer as long as that of [`Started`].
    pub bytes: Vec<u8>,
    /// The outcome.
    pub outcome: Outcome,
    pub(crate) number: JobNumber,
}

impl Window {
    /// Takes bytes of a host at an offset of the window, within it and in blocks of 512 bytes. Returns the job's number if they complete one:
    /// [`Window::take`] gives it to a core then.
    ///
    /// Bytes that come after a job is over belong to the next one. They may come before its header, but for those after a header that was wrong.
    ///
    /// # Errors
    /// They are refused. A header that is wrong, or data behind the last page of its job, end the job: it has to come anew.
    pub fn write(
        &mut self,
        info: &AcceleratorInfo,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Option<JobNumber>, Refusal> {
        self.prepare(info)?;
        if offset == 0 && !bytes.is_empty() {
            let header = Header::parse(&bytes[..JOB_LEN.min(bytes.len())]);
            self.describe(info, header.ok().map(|header| header.job))?;
        } else if let State::Refused = self.state {
            return Err(Refusal::Sequence);
        }
        let skipped = DATA_OFFSET.saturating_sub(offset).min(bytes.len() as u64);
        let at = (offset + skipped).saturating_sub(DATA_OFFSET);
        self.place(at, &bytes[skipped as usize..]);
        self.check_end()?;
        Ok(self.complete())
    }

    /// Checks that nothing has arrived behind the last page of the job: a host that writes more would write it after the job is over as well, and it would
    /// become data of the next.
    fn check_end(&mut self) -> Result<(), Refusal> {
        let State::Receiving(Some(job)) = self.state else {
            return Ok(());
        };
        let pages = u64::from(job.length).div_ceil(DATA_OFFSET);
        let end = (pages * DATA_OFFSET / BLOCK) as usize;
        let (word, rest) = (end / 64, end % 64);
        let first = self.arrived.get(word).map_or(0, |word| word >> rest);
        let behind = self.arrived.get(word + 1..).unwrap_or_default();
        match first == 0 && behind.iter().all(|word| *word == 0) {
            true => Ok(()),
            false => Err(self.refuse()),
        }
    }

    /// Ends a job that was described in a wrong way. The memory stays for the next one: hosts may be wrong often.
    fn refuse(&mut self) -> Refusal {
        self.begin(None);
        self.state = State::Refused;
        Refusal::Header
    }

    /// Takes a part of a job's data, at an offset that is a multiple of 512, with the description of the job. Returns the job's number if it is
    /// complete, as [`Window::write`] does.
    ///
    /// # Errors
    /// It is refused; if it is not of the job's data, the job has to come anew.
    pub fn submit(
        &mut self,
        info: &AcceleratorInfo,
        job: Job,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Option<JobNumber>, Refusal> {
        self.prepare(info)?;
        let end = offset + bytes.len() as u64;
        let is_part = offset.is_multiple_of(BLOCK)
            && end <= job.length.into()
            && (end.is_multiple_of(BLOCK) || end == u64::from(job.length));
        self.describe(info, Some(job).filter(|_| is_part))?;
        self.place(offset, bytes);
        Ok(self.complete())
    }

    /// Makes room, for a new job if the last one is over.
    fn prepare(&mut self, info: &AcceleratorInfo) -> Result<(), Refusal> {
        if let State::Complete(_) | State::Running(_) = self.state {
            return Err(Refusal::Sequence);
        }
        let len = info.data_bytes() as usize;
        if self.bytes.len() != len {
            self.bytes = zeroes(len).map_err(|()| Refusal::Memory)?;
            self.arrived = vec![0; (len as u64 / BLOCK).div_ceil(64) as usize];
        }
        if let State::Empty | State::Over(..) = self.state {
            self.begin(None);
        }
        Ok(())
    }

    /// Takes note of the job that the window is to have.
    fn describe(&mut self, info: &AcceleratorInfo, job: Option<Job>) -> Result<(), Refusal> {
        let Some(job) =
            job.filter(|job| takes(info.algorithm, info.level, job) && job.length <= info.data_bytes())
        else {
            return Err(self.refuse());
        };
        match self.state {
            State::Refused => self.begin(Some(job)),
            State::Receiving(Some(known)) if known != job => self.begin(Some(job)),
            // The host sends it again, or it comes behind its data.
            _ => self.state = State::Receiving(Some(job)),
        }
        Ok(())
    }

    /// Places data at an offset of them. Behind a job's last block there may be more: it is not the job's.
    fn place(&mut self, at: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = at + bytes.len() as u64;
        self.bytes[at as usize..end as usize].copy_from_slice(bytes);
        self.arrive(at / BLOCK, end.div_ceil(BLOCK));
    }

    /// Returns the number of the job if its data are complete.
    fn complete(&mut self) -> Option<JobNumber> {
        match self.state {
            State::Receiving(Some(job)) if self.has_arrived(u64::from(job.length).div_ceil(BLOCK)) => {
                self.state = State::Complete(job);
                self.jobs += 1;
                Some(JobNumber(self.jobs))
            }
            _ => None,
        }
    }

    fn is_of(&self, number: JobNumber) -> bool {
        number.0 == self.jobs
    }

    /// Takes a complete job out, for a core; the window waits for [`Window::finish`] then. `None`: the window was cleared since.
    pub fn take(&mut self, number: JobNumber) -> Option<Started> {
        match self.state {
            State::Complete(job) if self.is_of(number) => {
                self.state = State::Running(job);
                Some(Started {
                    job,
                    bytes: std::mem::take(&mut self.bytes),
                    number,
                })
            }
            _ => None,
        }
    }

    /// Returns the outcome of a job that is over.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::Over(_, outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Takes back a job that has run.
    pub fn finish(&mut self, ran: Ran) {
        if let State::Running(job) = self.state
            && self.is_of(ran.number)
        {
            self.bytes = ran.bytes;
            self.state = State::Over(job, ran.outcome);
        }
    }

    /// Gives up a job that no core is to take, as if its last part had not come: the host may send that again.
    pub fn give_up(&mut self, number: JobNumber) {
        if let State::Complete(job) = self.state
            && self.is_of(number)
        {
            self.state = State::Receiving(Some(job));
        }
    }

    /// Ends a job whose core has failed, and has lost its data.
    pub fn fail(&mut self, number: JobNumber) {
        self.finish(Ran {
            bytes: Vec::new(),
            number,
            outcome: Outcome {
                status: JobStatus::Failed,
                length: 0,
                consumed: 0,
                checksum: 0,
            },
        });
    }

    /// Reads at an offset of the window, within it.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        if let Some(header) = self.header()
            && offset < JOB_LEN as u64
        {
            let mut bytes = [0; JOB_LEN];
            header.emit(&mut bytes);
            let bytes = &bytes[offset as usize..];
            let len = bytes.len().min(out.len());
            out[..len].copy_from_slice(&bytes[..len]);
        }
        let State::Over(_, outcome) = &self.state else {
            return;
        };
        let skipped = DATA_OFFSET.saturating_sub(offset).min(out.len() as u64);
        let at = (offset + skipped).saturating_sub(DATA_OFFSET) as usize;
        let result = self.bytes[..outcome.length as usize].get(at..).unwrap_or(&[]);
        let out = &mut out[skipped as usize..];
        let len = result.len().min(out.len());
        out[..len].copy_from_slice(&result[..len]);
    }

    /// Forgets everything: it reads as zeros, and a job that runs has no result.
    pub fn clear(&mut self) {
        self.state = State::Empty;
        (self.bytes, self.arrived) = (Vec::new(), Vec::new());
    }

    fn header(&self) -> Option<Header> {
        let progress = |status| Outcome {
            status,
            length: 0,
            consumed: 0,
            checksum: 0,
        };
        let (job, outcome) = match self.state {
            State::Empty | State::Refused | State::Receiving(None) => return None,
            State::Receiving(Some(job)) => (job, progress(JobStatus::Receiving)),
            State::Complete(job) | State::Running(job) => (job, progress(JobStatus::Running)),
            State::Over(job, outcome) => (job, outcome),
        };
        Some(Header {
            job,
            outcome: Some(outcome),
        })
    }

    fn begin(&mut self, job: Option<Job>) {
        self.state = State::Receiving(job);
        self.arrived.fill(0);
    }

    /// Marks blocks, from the first up to the one before `end`.
    fn arrive(&mut self, first: u64, end: u64) {
        for block in first..end {
            self.arrived[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    /// Returns true if the first blocks have arrived.
    fn has_arrived(&self, blocks: u64) -> bool {
        let (whole, rest) = ((blocks / 64) as usize, blocks % 64);
        self.arrived[..whole].iter().all(|word| *word == u64::MAX)
            && (rest == 0 || !self.arrived[whole] & ((1 << rest) - 1) == 0)
    }
}
