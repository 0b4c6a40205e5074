//! The data of jobs, cut off a file, and their results in order.

use std::collections::VecDeque;
use std::io::{self, Read};

use anyhow::{Result, bail, ensure};
use rdmux_accel::frame_len;
use rdmux_nvmf::host::jobs::{Accelerator, Done, JobEvent, Jobs, Request};
use rdmux_wire::accel::{Algorithm, JobKind, JobStatus};

/// Small frames go into a window together, up to so many bytes.
const PACK_BYTES: usize = 64 << 10;

/// Cuts the data of jobs off a file.
pub(super) struct Feed<'a> {
    input: &'a mut dyn Read,
    kind: JobKind,
    algorithm: Algorithm,
    /// Most bytes of a job.
    room: usize,
    /// Bytes that were read and not yet given to a job.
    read: Vec<u8>,
    is_over: bool,
}

impl<'a> Feed<'a> {
    /// Begins with bytes that were read already.
    pub(super) fn new(
        input: &'a mut dyn Read,
        kind: JobKind,
        accelerators: &[Accelerator],
        read: Vec<u8>,
    ) -> Feed<'a> {
        let infos = accelerators.iter().map(|one| &one.info);
        let room = infos.map(|info| match kind {
            JobKind::Compress => info.compress_max(),
            _ => info.data_bytes(),
        });
        Feed {
            input,
            kind,
            algorithm: accelerators[0].info.algorithm,
            room: room.min().unwrap_or(0) as usize,
            read,
            is_over: false,
        }
    }

    /// Returns the data of the next job; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>> {
        self.fill(self.room)?;
        if self.read.is_empty() {
            return Ok(None);
        }
        let length = match self.kind {
            JobKind::Decompress => self.frames()?,
            _ => self.read.len().min(self.room),
        };
        let rest = self.read.split_off(length);
        Ok(Some(std::mem::replace(&mut self.read, rest)))
    }

    /// Reads until there are so many bytes, or all.
    fn fill(&mut self, bytes: usize) -> io::Result<()> {
        let had = self.read.len();
        if self.is_over || had >= bytes {
            return Ok(());
        }
        let wanted = (bytes - had) as u64;
        let found = self.input.take(wanted).read_to_end(&mut self.read)? as u64;
        self.is_over = found < wanted;
        Ok(())
    }

    /// Returns the bytes of the whole frames that go into one job.
    fn frames(&mut self) -> Result<usize> {
        let mut length = 0;
        loop {
            let rest = &self.read[length..];
            let frame = match frame_len(self.algorithm, rest) {
                // A member of gzip by other programs is all that there is.
                Ok(None) => rest.len(),
                Ok(Some(frame)) => frame,
                Err(JobStatus::Truncated) => rest.len() + 1,
                Err(status) => bail!("{}", status.name()),
            };
            let fits = frame <= rest.len();
            if fits && length + frame <= self.room.min(PACK_BYTES) && frame < rest.len() {
                length += frame;
                continue;
            }
            if fits && length == 0 {
                return Ok(frame);
            }
            if length > 0 {
                return Ok(if fits && length + frame <= PACK_BYTES {
                    length + frame
                } else {
                    length
                });
            }
            ensure!(
                !self.is_over,
                "it ends in the middle of a frame: the file is not complete"
            );
            bail!(
                "a frame has more than the {} bytes of a window: export the accelerators with a larger window=",
                self.room
            );
        }
    }
}

/// Jobs in the order of their data.
pub(super) struct Pipeline {
    jobs: Jobs,
    kind: JobKind,
    level: u8,
    align: u32,
    stays: bool,
    /// From the first one on whose result is not yet taken.
    order: VecDeque<State>,
    first: u64,
}

enum State {
    /// Data that have not had a window so far.
    Waits(Vec<u8>),
    Runs,
    Done(Done),
}

impl Pipeline {
    pub(super) fn new(jobs: Jobs, kind: JobKind, level: u8, align: u32, stays: bool) -> Pipeline {
        Pipeline {
            jobs,
            kind,
            level,
            align,
            stays,
            order: VecDeque::new(),
            first: 0,
        }
    }

    pub(super) fn into_jobs(self) -> Jobs {
        self.jobs
    }

    fn request(&self, token: u64, data: Vec<u8>) -> Request {
        Request {
            token,
            kind: self.kind,
            level: self.level,
            align: self.align,
            data,
            stays: self.stays,
        }
    }

    /// Runs jobs until there are no more data. `take` gets the results in order; it stores those that stay.
    pub(super) fn run(
        &mut self,
        feed: &mut Feed<'_>,
        mut take: impl FnMut(&mut Jobs, &Done) -> Result<()>,
    ) -> Result<()> {
        let mut is_over = false;
        loop {
            while self.jobs.has_room() {
                let (token, data) = if let Some(State::Waits(data)) = self.order.front_mut() {
                    (self.first, std::mem::take(data))
                } else {
                    let next = if is_over { None } else { feed.next()? };
                    let Some(data) = next else {
                        is_over = true;
                        break;
                    };
                    self.order.push_back(State::Runs);
                    (self.first + self.order.len() as u64 - 1, data)
                };
                let request = self.request(token, data);
                self.jobs.submit(request);
                self.order[(token - self.first) as usize] = State::Runs;
            }
            match self.jobs.wait()? {
                Some(JobEvent::Done(done)) => {
                    let at = (done.request.token - self.first) as usize;
                    self.order[at] = State::Done(done);
                }
                Some(JobEvent::Stored { .. }) => {}
                None if is_over && self.order.is_empty() => return Ok(()),
                None => {}
            }
            while let Some(State::Done(_)) = self.order.front() {
                let Some(State::Done(done)) = self.order.pop_front() else {
                    break;
                };
                check(&done)?;
                take(&mut self.jobs, &done)?;
                let consumed = done.outcome.consumed as usize;
                if consumed < done.request.data.len() {
                    ensure!(
                        consumed > 0,
                        "{}: a frame has a longer content than a window",
                        JobStatus::TooLong.name()
                    );
                    // The rest did not fit: it comes before all that follow.
                    let mut data = done.request.data;
                    data.drain(..consumed);
                    self.order.push_front(State::Waits(data));
                    break;
                }
                self.first += 1;
            }
        }
    }
}

fn check(done: &Done) -> Result<()> {
    let advice = match done.outcome.status {
        JobStatus::Done => return Ok(()),
        JobStatus::TooLong => ": export the accelerators with a larger window=",
        JobStatus::Corrupt | JobStatus::Truncated => ": is the file complete?",
        _ => "",
    };
    bail!("{}{advice}", done.outcome.status.name())
}
