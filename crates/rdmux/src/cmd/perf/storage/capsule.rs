//! The capsules of `rdmux perf storage`, whose layout the module above shows. Parsing panics on no input; what is parsed still has to be
//! checked against the drives ([`Geometry::offset_of`]).

use std::time::Duration;

/// Bytes of a command.
pub(super) const COMMAND_LEN: usize = 64;
/// Bytes of a response without what follows it.
pub(super) const RESPONSE_LEN: usize = 16;
/// Bytes of the longest response.
pub(super) const MESSAGE_LEN_MAX: usize = 256;
/// Commands of a connection in flight at a time.
pub(super) const QUEUE_MAX: usize = 128;
/// Bytes of a logical block: the unit of LBAs and lengths.
pub(super) const LBA_BYTES: u64 = 512;
/// Bytes of the longest read or write.
pub(super) const TRANSFER_MAX: u32 = 1 << 20;
const MAGIC: [u8; 4] = *b"RDPS";
const VERSION: u8 = 1;
/// Maximum bytes of the name of a moderation policy.
const WORDS_MAX: usize = 64;

/// Operation of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opcode {
    /// Asks for the server's settings: [`Identity`] follows the response.
    Identify,
    /// Bytes from a drive into the client's buffer.
    Read,
    /// Bytes from the client's buffer to a drive.
    Write,
    /// Asks for the server's counters since it began: [`Statistics`] follows the response.
    Statistics,
}

impl Opcode {
    const ALL: [Opcode; 4] = [Opcode::Identify, Opcode::Read, Opcode::Write, Opcode::Statistics];
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// Number of the client's choice, which the response returns.
    pub(super) id: u16,
    pub(super) opcode: Opcode,
    pub(super) drive: u32,
    pub(super) lba: u64,
    /// Bytes to move.
    pub(super) bytes: u32,
    /// The client's buffer.
    pub(super) va: u64,
    pub(super) rkey: u32,
}

impl Command {
    /// Returns a command that has no bytes to move.
    pub(super) fn of(id: u16, opcode: Opcode) -> Command {
        Command {
            id,
            opcode,
            drive: 0,
            lba: 0,
            bytes: 0,
            va: 0,
            rkey: 0,
        }
    }

    pub(super) fn emit(&self) -> [u8; COMMAND_LEN] {
        let mut b = [0; COMMAND_LEN];
        b[..4].copy_from_slice(&MAGIC);
        b[4] = VERSION;
        b[5] = self.opcode as u8;
        b[6..8].copy_from_slice(&self.id.to_be_bytes());
        b[8..12].copy_from_slice(&self.drive.to_be_bytes());
        b[12..16].copy_from_slice(&self.bytes.to_be_bytes());
        b[16..24].copy_from_slice(&self.lba.to_be_bytes());
        b[24..32].copy_from_slice(&self.va.to_be_bytes());
        b[32..36].copy_from_slice(&self.rkey.to_be_bytes());
        b
    }

    pub(super) fn parse(b: &[u8]) -> Result<Command, Malformed> {
        let Ok(b): Result<&[u8; COMMAND_LEN], _> = b.try_into() else {
            return Err(Malformed::Length(b.len()));
        };
        if b[..4] != MAGIC {
            return Err(Malformed::Magic);
        }
        let id = u16::from_be_bytes([b[6], b[7]]);
        if b[4] != VERSION {
            return Err(Malformed::Refused(id, Status::UnknownVersion));
        }
        let Some(opcode) = Opcode::ALL.get(usize::from(b[5])) else {
            return Err(Malformed::Refused(id, Status::UnknownOpcode));
        };
        let mut rest = Reader(&b[8..]);
        Ok(Command {
            id,
            opcode: *opcode,
            drive: rest.number(4) as u32,
            bytes: rest.number(4) as u32,
            lba: rest.number(8),
            va: rest.number(8),
            rkey: rest.number(4) as u32,
        })
    }
}

/// Why bytes are no command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("a command has {COMMAND_LEN} bytes, this message {0}")]
    Length(usize),
    #[error("the message does not begin as a command does")]
    Magic,
    /// The client is told so: it may be of another version.
    #[error("{1}")]
    Refused(u16, Status),
}

/// Outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Status {
    #[error("success")]
    Success,
    #[error("the server does not have this operation")]
    UnknownOpcode,
    #[error("the server does not have this drive")]
    NoDrive,
    #[error("the blocks lie beyond the end of the drive")]
    OutOfRange,
    #[error("the length is no multiple of 512 from 512 to 1 MiB")]
    BadLength,
    #[error("the server speaks another version of the protocol: use the same version of rdmux at both ends")]
    UnknownVersion,
}

impl Status {
    const ALL: [Status; 6] = [
        Status::Success,
        Status::UnknownOpcode,
        Status::NoDrive,
        Status::OutOfRange,
        Status::BadLength,
        Status::UnknownVersion,
    ];
}

/// A response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) id: u16,
    pub(super) status: Status,
    /// Bytes moved.
    pub(super) bytes: u32,
}

impl Response {
    pub(super) fn emit(&self) -> [u8; RESPONSE_LEN] {
        let mut b = [0; RESPONSE_LEN];
        b[..2].copy_from_slice(&self.id.to_be_bytes());
        b[2] = self.status as u8;
        b[4..8].copy_from_slice(&self.bytes.to_be_bytes());
        b
    }

    /// Returns a response and what follows it. `None`: the bytes are no response.
    pub(super) fn parse(b: &[u8]) -> Option<(Response, &[u8])> {
        let (b, rest) = b.split_first_chunk::<RESPONSE_LEN>()?;
        let response = Response {
            id: u16::from_be_bytes([b[0], b[1]]),
            status: *Status::ALL.get(usize::from(b[2]))?,
            bytes: u32::from_be_bytes([b[4], b[5], b[6], b[7]]),
        };
        Some((response, rest))
    }
}

/// Size of a server's drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) drives: u32,
    /// Bytes of each drive.
    pub(super) drive_bytes: u64,
}

impl Geometry {
    /// Returns the bytes of all drives.
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.drives) * self.drive_bytes
    }

    /// Returns the offset of a command's blocks in the memory of all drives, if there are such blocks.
    pub(super) fn offset_of(self, command: &Command) -> Result<u64, Status> {
        if command.drive >= self.drives {
            return Err(Status::NoDrive);
        }
        let bytes = u64::from(command.bytes);
        if bytes == 0 || command.bytes > TRANSFER_MAX || !bytes.is_multiple_of(LBA_BYTES) {
            return Err(Status::BadLength);
        }
        let offset = command.lba.checked_mul(LBA_BYTES);
        let offset = offset.filter(|offset| {
            let end = offset.checked_add(bytes);
            end.is_some_and(|end| end <= self.drive_bytes)
        });
        let offset = offset.ok_or(Status::OutOfRange)?;
        Ok(u64::from(command.drive) * self.drive_bytes + offset)
    }
}

/// Settings of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) geometry: Geometry,
    /// Time that a drive needs for a command.
    pub(super) latency: Duration,
    /// Commands that a drive executes at a time.
    pub(super) depth: u32,
    /// Commands of a connection in flight at a time.
    pub(super) queue: u32,
    pub(super) reactors: u32,
    /// The names of [`super::Queues`] and of the moderation policy.
    pub(super) queues: String,
    pub(super) moderation: String,
}

impl Identity {
    pub(super) fn emit(&self, into: &mut Vec<u8>) {
        into.extend(self.geometry.drives.to_be_bytes());
        into.extend(self.geometry.drive_bytes.to_be_bytes());
        into.extend((self.latency.as_nanos() as u64).to_be_bytes());
        into.extend(self.depth.to_be_bytes());
        into.extend(self.queue.to_be_bytes());
        into.extend(self.reactors.to_be_bytes());
        for words in [&self.queues, &self.moderation] {
            let words = words.as_bytes();
            let words = &words[..words.len().min(WORDS_MAX)];
            into.push(words.len() as u8);
            into.extend(words);
        }
    }

    /// Returns what the bytes say. `None`: they are no identity, or one of drives that cannot be used.
    pub(super) fn parse(b: &[u8]) -> Option<Identity> {
        if b.len() < 32 {
            return None;
        }
        let mut rest = Reader(b);
        let geometry = Geometry {
            drives: rest.number(4) as u32,
            drive_bytes: rest.number(8),
        };
        let identity = Identity {
            geometry,
            latency: Duration::from_nanos(rest.number(8)),
            depth: rest.number(4) as u32,
            queue: rest.number(4) as u32,
            reactors: rest.number(4) as u32,
            queues: rest.words()?,
            moderation: rest.words()?,
        };
        let blocks = geometry.drive_bytes / LBA_BYTES;
        let usable =
            geometry.drives > 0 && blocks > 0 && blocks.checked_mul(geometry.drives.into()).is_some();
        usable.then_some(identity)
    }
}

/// Counters of a server since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Statistics {
    /// Time since it began.
    pub(super) time_ns: u64,
    /// Processor time of its process, and of its reactors' threads.
    pub(super) cpu_ns: u64,
    pub(super) reactor_cpu_ns: u64,
    /// Voluntary context switches of its reactors' threads, and of its other threads: each is a sleep, and a wake-up.
    pub(super) reactor_wakeups: u64,
    pub(super) other_wakeups: u64,
    /// Completions that its reactors have reported: messages and RDMA READs. Sends and RDMA WRITEs have hardly any.
    pub(super) completions: u64,
    pub(super) reads: u64,
    pub(super) writes: u64,
    /// Commands that were refused.
    pub(super) refused: u64,
}

impl Statistics {
    const LEN: usize = 9 * 8;

    fn words(&self) -> [u64; 9] {
        [
            self.time_ns,
            self.cpu_ns,
            self.reactor_cpu_ns,
            self.reactor_wakeups,
            self.other_wakeups,
            self.completions,
            self.reads,
            self.writes,
            self.refused,
        ]
    }

    fn of_words(words: [u64; 9]) -> Statistics {
        let [
            time_ns,
            cpu_ns,
            reactor_cpu_ns,
            reactor_wakeups,
            other_wakeups,
            completions,
            reads,
            writes,
            refused,
        ] = words;
        Statistics {
            time_ns,
            cpu_ns,
            reactor_cpu_ns,
            reactor_wakeups,
            other_wakeups,
            completions,
            reads,
            writes,
            refused,
        }
    }

    pub(super) fn emit(&self, into: &mut Vec<u8>) {
        into.extend(self.words().into_iter().flat_map(u64::to_be_bytes));
    }

    pub(super) fn parse(b: &[u8]) -> Option<Statistics> {
        (b.len() >= Statistics::LEN).then(|| {
            let mut rest = Reader(b);
            Statistics::of_words(std::array::from_fn(|_| rest.number(8)))
        })
    }

    /// Returns what was done since `before`.
    pub(super) fn since(&self, before: &Statistics) -> Statistics {
        let (after, before) = (self.words(), before.words());
        Statistics::of_words(std::array::from_fn(|at| after[at].saturating_sub(before[at])))
    }
}

/// Bytes whose number was checked: missing ones count as 0.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// Takes a number of so many bytes, the most significant first.
    fn number(&mut self, bytes: usize) -> u64 {
        let (number, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        number.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// Takes a text behind its length; control characters are left out.
    fn words(&mut self) -> Option<String> {
        let (length, rest) = self.0.split_first()?;
        let (words, rest) = rest.split_at_checked(usize::from(*length))?;
        self.0 = rest;
        let words = String::from_utf8_lossy(words);
        Some(words.chars().filter(|c| !c.is_control()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: Command = Command {
        id: 0x1234,
        opcode: Opcode::Write,
        drive: 3,
        lba: 0x0102_0304_0506,
        bytes: 4096,
        va: 0x7fff_0000_1000,
        rkey: 0xdead_beef,
    };
    const GEOMETRY: Geometry = Geometry {
        drives: 4,
        drive_bytes: 1 << 20,
    };

    fn identity() -> Identity {
        Identity {
            geometry: GEOMETRY,
            latency: Duration::from_micros(20),
            depth: 64,
            queue: 128,
            reactors: 2,
            queues: "pool".into(),
            moderation: "16,32us".into(),
        }
    }

    #[test]
    fn command__emit_and_parse_are_inverse() {
        for opcode in Opcode::ALL {
            let command = Command { opcode, ..COMMAND };
            assert_eq!(Command::parse(&command.emit()), Ok(command));
        }
        let bytes = COMMAND.emit();
        assert_eq!(&bytes[..8], b"RDPS\x01\x02\x12\x34");
        assert_eq!(bytes[36..], [0; 28]);
    }

    #[test]
    fn command__parse_refuses_what_is_malformed() {
        let bytes = COMMAND.emit();
        for length in (0..COMMAND_LEN).chain([COMMAND_LEN + 1, 1000]) {
            let mut other = bytes.to_vec();
            other.resize(length, 0);
            assert_eq!(Command::parse(&other), Err(Malformed::Length(length)));
        }
        let with = |at: usize, byte: u8| {
            let mut other = bytes;
            other[at] = byte;
            Command::parse(&other)
        };
        assert_eq!(with(0, b'X'), Err(Malformed::Magic));
        assert_eq!(
            with(4, 2),
            Err(Malformed::Refused(0x1234, Status::UnknownVersion))
        );
        for opcode in 4..=u8::MAX {
            let refused = Malformed::Refused(0x1234, Status::UnknownOpcode);
            assert_eq!(with(5, opcode), Err(refused));
        }
    }

    #[test]
    fn offset_of__blocks_of_each_drive() {
        let at = |drive, lba, bytes| {
            GEOMETRY.offset_of(&Command {
                drive,
                lba,
                bytes,
                ..COMMAND
            })
        };
        assert_eq!(at(0, 0, 512), Ok(0));
        assert_eq!(at(3, 8, 4096), Ok((3 << 20) + 4096));
        assert_eq!(at(3, 2047, 512), Ok((4 << 20) - 512));
        assert_eq!(at(0, 0, TRANSFER_MAX), Ok(0));
        assert_eq!(at(4, 0, 512), Err(Status::NoDrive));
        assert_eq!(at(u32::MAX, 0, 512), Err(Status::NoDrive));
        assert_eq!(at(0, 2048, 512), Err(Status::OutOfRange));
        assert_eq!(at(0, 2047, 1024), Err(Status::OutOfRange));
        assert_eq!(at(0, u64::MAX, 512), Err(Status::OutOfRange));
        assert_eq!(at(0, u64::MAX / 512, 512), Err(Status::OutOfRange));
        for bytes in [0, 1, 513, TRANSFER_MAX + 512, u32::MAX] {
            assert_eq!(at(0, 0, bytes), Err(Status::BadLength), "{bytes}");
        }
    }

    #[test]
    fn response__emit_and_parse_are_inverse() {
        for status in Status::ALL {
            let response = Response {
                id: 0xabcd,
                status,
                bytes: 4096,
            };
            let mut bytes = response.emit().to_vec();
            bytes.push(9);
            assert_eq!(Response::parse(&bytes), Some((response, &[9][..])));
        }
    }

    #[test]
    fn response__parse_refuses_what_is_malformed() {
        let response = Response {
            id: 1,
            status: Status::Success,
            bytes: 0,
        };
        let mut bytes = response.emit();
        for length in 0..RESPONSE_LEN {
            assert_eq!(Response::parse(&bytes[..length]), None);
        }
        bytes[2] = 6;
        assert_eq!(Response::parse(&bytes), None);
    }

    #[test]
    fn identity__emit_and_parse_are_inverse_and_a_part_is_refused() {
        let mut bytes = Vec::new();
        identity().emit(&mut bytes);
        assert_eq!(Identity::parse(&bytes), Some(identity()));
        for length in 0..bytes.len() {
            assert_eq!(Identity::parse(&bytes[..length]), None, "{length}");
        }
    }

    #[test]
    fn identity__of_no_drives_is_refused() {
        for geometry in [
            Geometry {
                drives: 0,
                ..GEOMETRY
            },
            Geometry {
                drive_bytes: 511,
                ..GEOMETRY
            },
        ] {
            let mut bytes = Vec::new();
            Identity {
                geometry,
                ..identity()
            }
            .emit(&mut bytes);
            assert_eq!(Identity::parse(&bytes), None);
        }
    }

    #[test]
    fn identity__the_longest_fits_a_message() {
        let mut bytes = vec![0; RESPONSE_LEN];
        Identity {
            queues: "q".repeat(1000),
            moderation: "m".repeat(1000),
            ..identity()
        }
        .emit(&mut bytes);
        assert!(bytes.len() <= MESSAGE_LEN_MAX && RESPONSE_LEN + Statistics::LEN <= MESSAGE_LEN_MAX);
    }

    #[test]
    fn statistics__emit_and_parse_are_inverse_and_a_part_is_refused() {
        let statistics = Statistics::of_words(std::array::from_fn(|at| at as u64 + 1));
        let mut bytes = Vec::new();
        statistics.emit(&mut bytes);
        assert_eq!(Statistics::parse(&bytes), Some(statistics));
        assert_eq!(Statistics::parse(&bytes[1..]), None);
        assert_eq!(statistics.since(&statistics), Statistics::default());
    }
}
