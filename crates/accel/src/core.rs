//! A core: one algorithm, on one job at a time.

use std::ops::RangeInclusive;

use crc_fast::CrcAlgorithm;
use rdmux_wire::accel::{Algorithm, Job, JobKind, JobStatus, Outcome};

use crate::frames::{self, Codec};
use crate::window::{Ran, Started};

/// Returns the levels of an algorithm's compressions, and the one that a core has if its owner names none; `None` if it has no levels.
pub const fn level_range(algorithm: Algorithm) -> Option<(RangeInclusive<u8>, u8)> {
    match algorithm {
        Algorithm::Deflate => Some((1..=12, 1)),
        // Above, the memory of a compression grows to hundreds of MiB.
        Algorithm::Zstd => Some((1..=19, 1)),
        Algorithm::Null | Algorithm::Lz4 | Algorithm::Crc32c | Algorithm::Crc64Nvme => None,
    }
}

/// A core. It allocates for its largest job once, and nothing grows with what a host sends.
#[derive(Debug)]
pub struct Core {
    algorithm: Algorithm,
    /// Highest level of a job, and that of jobs that have none.
    level: u8,
    codec: Option<Codec>,
    /// Room for a result; the window of the job takes it, and leaves its own.
    scratch: Vec<u8>,
}

impl Core {
    /// Makes a core, with the highest level of compressions, which jobs have that name none.
    pub fn new(algorithm: Algorithm, level: u8) -> Core {
        Core {
            algorithm,
            level,
            codec: Codec::new(algorithm),
            scratch: Vec::new(),
        }
    }

    /// Returns true if it can do a job.
    pub fn takes(&self, job: &Job) -> bool {
        takes(self.algorithm, self.level, job)
    }

    /// Runs a job, which it takes.
    pub fn run(&mut self, started: Started) -> Ran {
        let Started {
            job,
            mut bytes,
            number,
        } = started;
        let outcome = self.work(&job, &mut bytes);
        Ran {
            bytes,
            number,
            outcome,
        }
    }

    /// Replaces data by the result.
    fn work(&mut self, job: &Job, bytes: &mut Vec<u8>) -> Outcome {
        let done = |length: usize, consumed: usize| Outcome {
            status: JobStatus::Done,
            length: length as u32,
            consumed: consumed as u32,
            checksum: 0,
        };
        let failed = |status| Outcome {
            status,
            length: 0,
            consumed: 0,
            checksum: 0,
        };
        let Some(data) = bytes.get(..job.length as usize) else {
            return failed(JobStatus::Failed);
        };
        let Some(codec) = &mut self.codec else {
            return match job.kind {
                JobKind::Checksum => Outcome {
                    checksum: checksum(self.algorithm, data),
                    ..done(0, data.len())
                },
                _ => done(data.len(), data.len()),
            };
        };
        if self.scratch.len() != bytes.len() {
            let Ok(scratch) = frames::zeroes(bytes.len()) else {
                return failed(JobStatus::Failed);
            };
            self.scratch = scratch;
        }
        let level = if job.level == 0 { self.level } else { job.level };
        let result = match job.kind {
            JobKind::Compress => codec
                .compress(data, level, job.align, &mut self.scratch)
                .map(|length| (length, data.len())),
            _ => codec.decompress(data, &mut self.scratch),
        };
        match result {
            Ok((length, consumed)) => {
                std::mem::swap(bytes, &mut self.scratch);
                done(length, consumed)
            }
            Err(status) => failed(status),
        }
    }
}

/// Returns true if a core of an algorithm, with this highest level, can do a job.
pub(crate) fn takes(algorithm: Algorithm, level_max: u8, job: &Job) -> bool {
    job.algorithm == algorithm && algorithm.takes(job.kind) && job.level <= level_max
}

fn checksum(algorithm: Algorithm, data: &[u8]) -> u64 {
    let algorithm = match algorithm {
        Algorithm::Crc64Nvme => CrcAlgorithm::Crc64Nvme,
        _ => CrcAlgorithm::Crc32Iscsi,
    };
    crc_fast::checksum(algorithm, data)
}
