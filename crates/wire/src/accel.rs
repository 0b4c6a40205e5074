//! Jobs of accelerators: the header of a data window, and the description of an accelerator in Identify Namespace. `docs/accelerators.md` is their
//! specification.

use std::ops::RangeInclusive;

use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};
use crate::nvme::{Opcode, Sqe};

/// Bytes of a window in front of its data, of which the header takes the first [`JOB_LEN`].
pub const DATA_OFFSET: u64 = 4096;
/// Bytes of a header.
pub const JOB_LEN: usize = 64;
/// Bytes of a window, a power of two. A smaller one might have no room for a padded result.
pub const WINDOW_BYTES: RangeInclusive<u64> = 256 << 10..=1 << 30;
/// Largest block to whose multiples a result is padded.
pub const ALIGN_MAX: u32 = 64 << 10;

const JOB_MAGIC: [u8; 8] = *b"RDMUXJOB";
const ACCELERATOR_MAGIC: [u8; 8] = *b"RDMUXACC";
const VERSION: u16 = 1;

/// Returns an enum's variant of a number.
macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident, $what:literal: $($(#[$variant_doc:meta])* $variant:ident = $number:literal $text:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// Returns its name.
            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)*
                }
            }

            fn parse(number: u8) -> Result<$name, Malformed> {
                let known = $name::ALL.iter().find(|known| **known as u8 == number);
                known.copied().ok_or(Malformed::Undefined {
                    what: $what,
                    value: number.into(),
                })
            }
        }
    };
}

numbered! {
    /// Work of an accelerator's core.
    Algorithm, "algorithm of a job":
    /// None: the result is the data.
    Null = 0 "null",
    /// DEFLATE, in members of gzip (RFC 1951 and 1952).
    Deflate = 1 "deflate",
    /// Zstandard, in frames (RFC 8878).
    Zstd = 2 "zstd",
    /// LZ4, in frames.
    Lz4 = 3 "lz4",
    /// CRC-32C (RFC 3720, appendix B.4).
    Crc32c = 4 "crc32c",
    /// CRC-64/NVME (NVM 1.1, 5.2.1.3.4).
    Crc64Nvme = 5 "crc64nvme",
}

numbered! {
    /// Direction of the work.
    JobKind, "kind of a job":
    /// The result is the compressed data.
    Compress = 1 "compress",
    /// The result is the data that were compressed.
    Decompress = 2 "decompress",
    /// The checksum is in the header, and there is no result.
    Checksum = 3 "checksum",
    /// The result is the data.
    Pass = 4 "pass",
}

numbered! {
    /// Progress of a job.
    JobStatus, "status of a job":
    /// The window waits for a header, or for data.
    Receiving = 1 "receiving",
    /// The core has it, or is busy with others.
    Running = 2 "running",
    /// It is done.
    Done = 3 "done",
    /// The result does not fit the window.
    TooLong = 0x80 "result longer than the window",
    /// The data were not compressed by this algorithm, or have changed.
    Corrupt = 0x81 "data that this algorithm has not compressed",
    /// The compressed data end too early.
    Truncated = 0x82 "data end too early",
    /// The core has failed.
    Failed = 0x83 "core failed",
}

impl JobStatus {
    /// Returns true if the job has run.
    pub const fn is_over(self) -> bool {
        !matches!(self, JobStatus::Receiving | JobStatus::Running)
    }
}

impl Algorithm {
    /// Returns the algorithm of a name.
    pub fn named(name: &str) -> Option<Algorithm> {
        let known = Algorithm::ALL.iter().find(|known| known.name() == name);
        known.copied()
    }

    /// Returns true if a core of it takes jobs of a kind.
    pub const fn takes(self, kind: JobKind) -> bool {
        match self {
            Algorithm::Null => matches!(kind, JobKind::Pass),
            Algorithm::Deflate | Algorithm::Zstd | Algorithm::Lz4 => {
                matches!(kind, JobKind::Compress | JobKind::Decompress)
            }
            Algorithm::Crc32c | Algorithm::Crc64Nvme => matches!(kind, JobKind::Checksum),
        }
    }
}

/// A job, as a host describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its kind.
    pub kind: JobKind,
    /// Algorithm of the core.
    pub algorithm: Algorithm,
    /// Level of the compression; 0 is the core's own, which is the highest that it takes.
    pub level: u8,
    /// The host's number for it.
    pub id: u64,
    /// Bytes of its data.
    pub length: u32,
    /// The result of a compression is padded to multiples of this, by frames that decompress to nothing; 0 and 1 pad nothing.
    pub align: u32,
}

impl Job {
    /// Checks that some accelerator can have it.
    fn check(&self) -> Result<(), Malformed> {
        let undefined = |what, value| Err(Malformed::Undefined { what, value });
        if !self.algorithm.takes(self.kind) {
            return undefined("kind of a job", self.kind as u64);
        }
        if self.align > ALIGN_MAX || (self.align > 0 && !self.align.is_power_of_two()) {
            return undefined("alignment of a job's result", self.align.into());
        }
        Ok(())
    }
}

/// Outcome of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The status.
    pub status: JobStatus,
    /// Bytes of the result.
    pub length: u32,
    /// Bytes of the data that the result stands for: a decompression ends with the last frame that is whole and has room.
    pub consumed: u32,
    /// The checksum.
    pub checksum: u64,
}

/// The header of a window.
///
/// ```text
///  0  "RDMUXJOB"
///  8  version u16 | kind u8 | algorithm u8 | level u8 | status u8 (a host writes 0) | 0 u16
/// 16  id u64
/// 24  bytes of data u32 | alignment of the result u32
/// 32  bytes of the result u32 | bytes consumed u32
/// 40  checksum u64
/// 48  0, up to 64
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The job.
    pub job: Job,
    /// Its outcome; `None` in what a host writes.
    pub outcome: Option<Outcome>,
}

impl Header {
    /// Parses a header.
    ///
    /// # Errors
    /// There are fewer than [`JOB_LEN`] bytes, or they are no header, or the job is none that an accelerator can have.
    pub fn parse(bytes: &[u8]) -> Result<Header, Malformed> {
        need("header of a job", bytes, JOB_LEN)?;
        let undefined = |what, value| Err(Malformed::Undefined { what, value });
        if bytes[..8] != JOB_MAGIC {
            return undefined("mark of a job", le64(bytes, 0));
        }
        if le16(bytes, 8) != VERSION {
            return undefined("version of a job", le16(bytes, 8).into());
        }
        let job = Job {
            kind: JobKind::parse(bytes[10])?,
            algorithm: Algorithm::parse(bytes[11])?,
            level: bytes[12],
            id: le64(bytes, 16),
            length: le32(bytes, 24),
            align: le32(bytes, 28),
        };
        job.check()?;
        let outcome = match bytes[13] {
            0 => None,
            status => Some(Outcome {
                status: JobStatus::parse(status)?,
                length: le32(bytes, 32),
                consumed: le32(bytes, 36),
                checksum: le64(bytes, 40),
            }),
        };
        Ok(Header { job, outcome })
    }

    /// Writes [`JOB_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..JOB_LEN].fill(0);
        put(bytes, 0, &JOB_MAGIC);
        put(bytes, 8, &VERSION.to_le_bytes());
        bytes[10] = self.job.kind as u8;
        bytes[11] = self.job.algorithm as u8;
        bytes[12] = self.job.level;
        put(bytes, 16, &self.job.id.to_le_bytes());
        put(bytes, 24, &self.job.length.to_le_bytes());
        put(bytes, 28, &self.job.align.to_le_bytes());
        if let Some(outcome) = &self.outcome {
            bytes[13] = outcome.status as u8;
            put(bytes, 32, &outcome.length.to_le_bytes());
            put(bytes, 36, &outcome.consumed.to_le_bytes());
            put(bytes, 40, &outcome.checksum.to_le_bytes());
        }
    }
}

/// A vendor's command of a job, for programs that send commands and not blocks.
///
/// ```text
/// dword 10  window
/// dword 11  offset in the data, or in the result
/// dword 12  bytes of data                      (SUBMIT only, as all below)
/// dword 13  kind u8 | algorithm u8 | level u8
/// dword 14  alignment of the result
/// dword 15  id
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobCommand {
    /// Brings a part of a job's data. All parts of a job describe it. The result of the part that completes them is the bytes of the job's result.
    Submit {
        /// The window, from 0.
        window: u32,
        /// Offset of the part in the data, a multiple of 512.
        offset: u32,
        /// The job.
        job: Job,
    },
    /// Gets a part of a result. The command's result is the bytes of the whole.
    Fetch {
        /// The window, from 0.
        window: u32,
        /// Offset in the result.
        offset: u32,
    },
}

impl JobCommand {
    /// Opcode of [`JobCommand::Submit`]: to the controller, as its lowest bit says.
    pub const SUBMIT: Opcode = Opcode(0x81);
    /// Opcode of [`JobCommand::Fetch`].
    pub const FETCH: Opcode = Opcode(0x82);

    /// Parses a command of one of the opcodes.
    ///
    /// # Errors
    /// It is another one, or its job is none that an accelerator can have.
    pub fn parse(sqe: &Sqe) -> Result<JobCommand, Malformed> {
        let (window, offset) = (sqe.dword(10), sqe.dword(11));
        match sqe.opcode() {
            JobCommand::FETCH => Ok(JobCommand::Fetch { window, offset }),
            JobCommand::SUBMIT => {
                let [kind, algorithm, level, _] = sqe.dword(13).to_le_bytes();
                let job = Job {
                    kind: JobKind::parse(kind)?,
                    algorithm: Algorithm::parse(algorithm)?,
                    level,
                    id: sqe.dword(15).into(),
                    length: sqe.dword(12),
                    align: sqe.dword(14),
                };
                job.check()?;
                Ok(JobCommand::Submit { window, offset, job })
            }
            Opcode(other) => Err(Malformed::Undefined {
                what: "opcode of a job",
                value: other.into(),
            }),
        }
    }

    /// Writes the dwords into a command, whose opcode is chosen already. The id has its low 4 bytes.
    pub fn emit(&self, sqe: &mut Sqe) {
        let (JobCommand::Submit { window, offset, .. } | JobCommand::Fetch { window, offset }) = self;
        sqe.set_dword(10, *window);
        sqe.set_dword(11, *offset);
        if let JobCommand::Submit { job, .. } = self {
            sqe.set_dword(12, job.length);
            sqe.set_dword(
                13,
                u32::from_le_bytes([job.kind as u8, job.algorithm as u8, job.level, 0]),
            );
            sqe.set_dword(14, job.align);
            sqe.set_dword(15, job.id as u32);
        }
    }
}

/// An accelerator, as the vendor's part of Identify Namespace describes it (from byte 384 on).
///
/// ```text
///  0  "RDMUXACC"
///  8  version u16 | algorithm u8 | level u8 | windows u32
/// 16  bytes of a window u64
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorInfo {
    /// Algorithm of its core.
    pub algorithm: Algorithm,
    /// Highest level of its compressions, and that of jobs that have none; 0 if it has no levels.
    pub level: u8,
    /// Number of its windows.
    pub windows: u32,
    /// Bytes of a window, with those in front of its data.
    pub window_bytes: u64,
}

impl AcceleratorInfo {
    /// Bytes of the description.
    pub const LEN: usize = 24;
    /// Its offset in Identify Namespace.
    pub const OFFSET: usize = 384;

    /// Parses the description; `None`: the bytes are something else.
    ///
    /// # Errors
    /// They describe what cannot be.
    pub fn parse(bytes: &[u8]) -> Result<Option<AcceleratorInfo>, Malformed> {
        if bytes.len() < AcceleratorInfo::LEN || bytes[..8] != ACCELERATOR_MAGIC {
            return Ok(None);
        }
        if le16(bytes, 8) != VERSION {
            return Err(Malformed::Undefined {
                what: "version of an accelerator",
                value: le16(bytes, 8).into(),
            });
        }
        let info = AcceleratorInfo {
            algorithm: Algorithm::parse(bytes[10])?,
            level: bytes[11],
            windows: le32(bytes, 12),
            window_bytes: le64(bytes, 16),
        };
        let fits = WINDOW_BYTES.contains(&info.window_bytes) && info.window_bytes.is_power_of_two();
        if !fits || info.windows == 0 {
            return Err(Malformed::Undefined {
                what: "bytes of a window",
                value: info.window_bytes,
            });
        }
        Ok(Some(info))
    }

    /// Writes [`AcceleratorInfo::LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, &ACCELERATOR_MAGIC);
        put(bytes, 8, &VERSION.to_le_bytes());
        bytes[10] = self.algorithm as u8;
        bytes[11] = self.level;
        put(bytes, 12, &self.windows.to_le_bytes());
        put(bytes, 16, &self.window_bytes.to_le_bytes());
    }

    /// Returns the bytes that a window has for data or a result.
    pub const fn data_bytes(&self) -> u32 {
        (self.window_bytes - DATA_OFFSET) as u32
    }

    /// Returns the bytes of data of which a compression fits the window, whatever they are: DEFLATE, LZ4 and zstd add less than one in 128, and the
    /// result may be padded to a block.
    pub const fn compress_max(&self) -> u32 {
        let data = self.data_bytes();
        (data - data / 128).saturating_sub(ALIGN_MAX + 1024) / 4096 * 4096
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::{Cid, NsId};

    const HEADER: Header = Header {
        job: Job {
            kind: JobKind::Compress,
            algorithm: Algorithm::Zstd,
            level: 3,
            id: 0x1122_3344_5566_7788,
            length: 1_000_000,
            align: 512,
        },
        outcome: Some(Outcome {
            status: JobStatus::TooLong,
            length: 7,
            consumed: 9,
            checksum: 11,
        }),
    };

    #[test]
    fn header__stands_where_the_documentation_has_it() {
        let mut bytes = [0xff; JOB_LEN];
        HEADER.emit(&mut bytes);
        assert_eq!(&bytes[..16], b"RDMUXJOB\x01\0\x01\x02\x03\x80\0\0");
        assert_eq!(&bytes[16..24], &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(&bytes[24..32], &[0x40, 0x42, 0x0f, 0, 0, 2, 0, 0]);
        assert_eq!(&bytes[32..48], &[7, 0, 0, 0, 9, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Header::parse(&bytes), Ok(HEADER));
        let asked = Header {
            outcome: None,
            ..HEADER
        };
        asked.emit(&mut bytes);
        assert_eq!(Header::parse(&bytes), Ok(asked));
    }

    #[test]
    fn header__refuses_what_no_accelerator_can_do() {
        let mut good = [0; JOB_LEN];
        HEADER.emit(&mut good);
        assert!(Header::parse(&good[..63]).is_err());
        for (at, value, what) in [
            (0, b'r', "mark of a job"),
            (8, 2, "version of a job"),
            (10, 0, "kind of a job"),
            // A checksum by a compressor.
            (10, 3, "kind of a job"),
            (11, 6, "algorithm of a job"),
            (13, 4, "status of a job"),
            (28, 3, "alignment of a job's result"),
            (31, 1, "alignment of a job's result"),
        ] {
            let mut bytes = good;
            bytes[at] = value;
            let error = Header::parse(&bytes).unwrap_err();
            assert!(
                matches!(error, Malformed::Undefined { what: told, .. } if told == what),
                "{at}: {error}"
            );
        }
    }

    #[test]
    fn command__has_the_dwords_of_the_documentation() {
        let submit = JobCommand::Submit {
            window: 3,
            offset: 512,
            job: Job {
                id: 0x1234,
                ..HEADER.job
            },
        };
        let mut sqe = Sqe::new(JobCommand::SUBMIT, Cid(0), NsId(1));
        submit.emit(&mut sqe);
        let dwords: Vec<u32> = (10..16).map(|at| sqe.dword(at)).collect();
        assert_eq!(dwords, [3, 512, 1_000_000, 0x0003_0201, 512, 0x1234]);
        assert_eq!(JobCommand::parse(&sqe), Ok(submit));
        assert!(sqe.is_to_controller());
        sqe.set_dword(13, 0x0003_0203);
        assert!(JobCommand::parse(&sqe).is_err(), "a checksum by a compressor");
        let fetch = JobCommand::Fetch { window: 3, offset: 7 };
        let mut sqe = Sqe::new(JobCommand::FETCH, Cid(0), NsId(1));
        fetch.emit(&mut sqe);
        assert_eq!(JobCommand::parse(&sqe), Ok(fetch));
        assert!(JobCommand::parse(&Sqe::new(Opcode(0x83), Cid(0), NsId(1))).is_err());
    }

    #[test]
    fn accelerator__is_known_by_its_mark() {
        let info = AcceleratorInfo {
            algorithm: Algorithm::Crc64Nvme,
            level: 0,
            windows: 16,
            window_bytes: 4 << 20,
        };
        let mut bytes = [0; 32];
        assert_eq!(AcceleratorInfo::parse(&bytes), Ok(None));
        info.emit(&mut bytes);
        assert_eq!(AcceleratorInfo::parse(&bytes), Ok(Some(info)));
        assert_eq!(info.data_bytes(), (4 << 20) - 4096);
        for (at, value) in [(9, 1), (10, 9), (12, 0), (16, 1), (23, 1)] {
            let mut bytes = bytes;
            bytes[at] = value;
            assert!(AcceleratorInfo::parse(&bytes).is_err(), "{at}");
        }
        // The smallest one has room for what is compressed.
        for (window_bytes, fits) in [
            (128 << 10, false),
            (256 << 10, true),
            (1 << 30, true),
            (1 << 31, false),
        ] {
            let info = AcceleratorInfo { window_bytes, ..info };
            info.emit(&mut bytes);
            assert_eq!(AcceleratorInfo::parse(&bytes).is_ok(), fits, "{window_bytes}");
            assert!(!fits || info.compress_max() > 0, "{window_bytes}");
        }
    }
}
