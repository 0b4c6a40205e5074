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
    /// Bytes that were read.
    read: Vec<u8>,
    /// Number of them that jobs have got.
    given: usize,
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
            given: 0,
            is_over: false,
        }
    }

    /// Returns bytes that were read and not yet given to a job.
    fn rest(&self) -> &[u8] {
        &self.read[self.given..]
    }

    /// Returns the data of the next job; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>> {
        self.fill(self.room)?;
        if self.rest().is_empty() {
            return Ok(None);
        }
        let length = match self.kind {
            JobKind::Decompress => self.frames()?,
            _ => self.rest().len().min(self.room),
        };
        if self.given == 0 && length == self.read.len() {
            return Ok(Some(std::mem::take(&mut self.read)));
        }
        let data = self.rest()[..length].to_vec();
        self.given += length;
        Ok(Some(data))
    }

    /// Reads until there are so many bytes, or all.
    fn fill(&mut self, bytes: usize) -> io::Result<()> {
        let had = self.rest().len();
        if self.is_over || had >= bytes {
            return Ok(());
        }
        // Not for each job: those of small frames would move a large window each time.
        if self.given >= had {
            self.read.drain(..self.given);
            self.given = 0;
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
            let rest = &self.rest()[length..];
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

#[cfg(test)]
mod tests {
    use rdmux_accel::{Core, Started};
    use rdmux_wire::accel::Job;

    use super::*;

    #[test]
    fn next__gives_all_data_in_order() {
        let data: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
        for room in [1, 7, 1000, 9999, 10_000, 20_000] {
            for begun in [0, 5, room.min(data.len())] {
                let mut input = &data[begun..];
                let mut feed = Feed {
                    input: &mut input,
                    kind: JobKind::Compress,
                    algorithm: Algorithm::Zstd,
                    room,
                    read: data[..begun].to_vec(),
                    given: 0,
                    is_over: false,
                };
                let mut given = Vec::new();
                while let Some(job) = feed.next().unwrap() {
                    assert!(!job.is_empty() && job.len() <= room);
                    given.extend(job);
                }
                assert!(given == data, "{room} bytes of room, {begun} read before");
            }
        }
    }

    /// Returns a frame of some bytes.
    fn frame(bytes: usize) -> Vec<u8> {
        let job = Job {
            kind: JobKind::Compress,
            algorithm: Algorithm::Zstd,
            level: 1,
            id: 0,
            length: bytes as u32,
            align: 0,
        };
        let data = [vec![7; bytes], vec![0; bytes + 1024]].concat();
        let ran = Core::new(Algorithm::Zstd, 1).run(Started::of(job, data));
        ran.bytes[..ran.outcome.length as usize].to_vec()
    }

    #[test]
    fn next__packs_small_frames_and_moves_what_follows_seldom() {
        let frame = frame(512);
        let data = frame.repeat((4 << 20) / frame.len());
        let mut input = &data[..];
        let mut feed = Feed {
            input: &mut input,
            kind: JobKind::Decompress,
            algorithm: Algorithm::Zstd,
            room: 1 << 20,
            read: Vec::new(),
            given: 0,
            is_over: false,
        };
        let (mut given, mut moved) = (Vec::new(), 0);
        loop {
            let before = feed.given;
            let Some(job) = feed.next().unwrap() else { break };
            assert!(job.len().is_multiple_of(frame.len()) && job.len() <= PACK_BYTES);
            if feed.given <= before {
                moved += feed.rest().len();
            }
            given.extend(job);
        }
        assert!(given == data);
        assert!(moved <= 3 * data.len(), "{moved} bytes moved of {}", data.len());
    }
}
