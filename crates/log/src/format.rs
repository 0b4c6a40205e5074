//! Layout of a replica, big endian throughout:
//!
//! ```text
//! region     0  header, slot 0
//!         4096  header, slot 1
//!         8192  the ring: `area` bytes; the byte at position p of the log stands at 8192 + p mod area
//!
//! header     0  magic "rdmuxlog"
//!            8  version u16 (1) | replicas u16: how many hold the log | flags u32: 1 joining
//!           16  log id u64: random, the same in all replicas
//!           24  replica id u64: random, one for each
//!           32  generation u64: the valid slot with the higher one counts
//!           40  promise: term u64, writer u64: no writer with a lower epoch may write here any more
//!           56  area u64
//!           64  head: position u64, sequence u64, term u64, writer u64, chain u64: what the first frame follows
//!          104  acknowledged u64: the highest sequence number known to be so
//!          112  CRC-64/NVME of bytes 0 to 112
//!
//! frame      0  magic u32: "Rrec" a record, "Repo" the start of an epoch
//!            4  length u32 of the payload
//!            8  sequence u64: of the record; at the start of an epoch, of the record before
//!           16  epoch: term u64, writer u64: who wrote it first
//!           32  acknowledged u64: the highest sequence number that its writer knew to be so
//!           40  chain u64: CRC-64/NVME of the chain of the frame before, bytes 0 to 40 and the payload
//!           48  payload, then zeros to a multiple of 8
//! ```
//!
//! A frame belongs to the log if the frame before it does and its chain matches. So a torn frame, a frame from before the ring wrapped,
//! or a frame that another writer left there ends the log. The chain of a frame identifies the whole log up to it.

use super::defect::defect;
use super::{Epoch, RECORD_BYTES_MAX};
use rdmux_push::Crc64;

/// Offset of the second header slot.
const SLOT: u64 = 4096;
/// Bytes of a header.
pub(super) const HEADER_LEN: usize = 120;
/// Offset of the ring, and the number of bytes to read for both headers.
pub(super) const AREA_AT: u64 = 2 * SLOT;
/// Bytes of a frame before its payload.
pub(super) const FRAME_LEN: usize = 48;
/// Smallest size of a ring in bytes.
pub(super) const AREA_MIN: u64 = 4096;
const MAGIC: &[u8; 8] = b"rdmuxlog";
/// Version of the layout.
pub const VERSION: u16 = 1;
const JOINING: u32 = 1;
const RECORD: u32 = u32::from_be_bytes(*b"Rrec");
const EPOCH: u32 = u32::from_be_bytes(*b"Repo");

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8]
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    (u64_at(bytes, at) >> 32) as u32
}

fn epoch_at(bytes: &[u8], at: usize) -> Epoch {
    Epoch {
        term: u64_at(bytes, at),
        writer: u64_at(bytes, at + 8),
    }
}

fn crc_of(parts: &[&[u8]]) -> u64 {
    let mut crc = Crc64::default();
    for part in parts {
        crc.update(part);
    }
    crc.value()
}

/// A position between two frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    /// Bytes of all frames before it, since the log began.
    pub(super) position: u64,
    /// Sequence number of the last record before it.
    pub(super) sequence: u64,
    /// Epoch of the frame before it.
    pub(super) epoch: Epoch,
    /// Chain of the frame before it.
    pub(super) chain: u64,
}

impl Point {
    /// Returns the point at which a log begins.
    pub(super) fn origin(log: u64) -> Point {
        Point {
            chain: crc_of(&[MAGIC, &log.to_be_bytes()]),
            ..Point::default()
        }
    }
}

/// A replica's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) replicas: u16,
    /// Set while the replica lacks records that were acknowledged before it joined: it has no say in a recovery.
    pub(super) joining: bool,
    pub(super) log: u64,
    pub(super) replica: u64,
    pub(super) generation: u64,
    pub(super) promise: Epoch,
    pub(super) area: u64,
    pub(super) head: Point,
    pub(super) acknowledged: u64,
}

/// Contents of a replica's header slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Zeros: never used.
    Blank,
    /// Something other than a log, or a damaged log.
    Other,
    /// A log.
    Log(Header),
}

impl Header {
    /// Returns the offset of its slot: the slot that does not hold the previous header.
    pub(super) fn offset(&self) -> u64 {
        self.generation % 2 * SLOT
    }

    pub(super) fn emit(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_LEN);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&self.replicas.to_be_bytes());
        let flags = if self.joining { JOINING } else { 0 };
        out.extend_from_slice(&flags.to_be_bytes());
        let numbers = [
            self.log,
            self.replica,
            self.generation,
            self.promise.term,
            self.promise.writer,
            self.area,
            self.head.position,
            self.head.sequence,
            self.head.epoch.term,
            self.head.epoch.writer,
            self.head.chain,
            self.acknowledged,
        ];
        for number in numbers {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out.extend_from_slice(&crc_of(&[&out]).to_be_bytes());
        out
    }

    fn parse(bytes: &[u8]) -> Option<Header> {
        let bytes = bytes.get(..HEADER_LEN)?;
        let first = u64_at(bytes, 8);
        let (version, replicas, flags) = ((first >> 48) as u16, (first >> 32) as u16, first as u32);
        let header = Header {
            replicas,
            joining: flags & JOINING != 0,
            log: u64_at(bytes, 16),
            replica: u64_at(bytes, 24),
            generation: u64_at(bytes, 32),
            promise: epoch_at(bytes, 40),
            area: u64_at(bytes, 56),
            head: Point {
                position: u64_at(bytes, 64),
                sequence: u64_at(bytes, 72),
                epoch: epoch_at(bytes, 80),
                chain: u64_at(bytes, 96),
            },
            acknowledged: u64_at(bytes, 104),
        };
        let sane = bytes.starts_with(MAGIC)
            && crc_of(&[&bytes[..112]]) == u64_at(bytes, 112)
            && version == VERSION
            && flags & !JOINING == 0
            && header.replicas > 0
            && header.area >= AREA_MIN
            && header.area.is_multiple_of(8)
            && header.area < u64::MAX / 4
            && header.head.position.is_multiple_of(8)
            // Sums stay far from overflow, and a log does not reach these values by normal growth.
            && [header.generation, header.head.position, header.head.sequence, header.promise.term, header.head.epoch.term]
                .iter()
                .all(|number| *number < 1 << 62);
        sane.then_some(header)
    }

    /// Finds the valid header in the first [`AREA_AT`] bytes of a region.
    pub(super) fn find(bytes: &[u8]) -> Found {
        let slots = [
            bytes.get(..HEADER_LEN),
            bytes.get(SLOT as usize..SLOT as usize + HEADER_LEN),
        ];
        let valid = slots.iter().flatten().filter_map(|slot| Header::parse(slot));
        match valid.max_by_key(|header| header.generation) {
            Some(header) => Found::Log(header),
            None if Header::is_blank(bytes) => Found::Blank,
            None => Found::Other,
        }
    }

    /// Returns whether the slots hold zeros, or zeros over which the first header, which goes to slot 1, was being written when
    /// the power failed: any 8 bytes of it may have survived.
    fn is_blank(bytes: &[u8]) -> bool {
        let first = SLOT as usize..SLOT as usize + HEADER_LEN;
        let zero = |(at, byte): (usize, &u8)| *byte == 0 || first.contains(&at);
        let magic = bytes.get(SLOT as usize..SLOT as usize + 8).unwrap_or_default();
        bytes.iter().enumerate().all(zero) && (magic == MAGIC || magic.iter().all(|byte| *byte == 0))
    }
}

/// A parsed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The point after the frame.
    pub(super) end: Point,
    pub(super) is_record: bool,
    pub(super) length: u32,
    pub(super) acknowledged: u64,
}

/// Result of scanning a position of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// A frame of the log.
    Frame(Frame),
    /// Perhaps a frame: this many bytes are needed to decide.
    Need(usize),
    /// No frame: the log ends before this position.
    End,
}

/// Returns the number of bytes that a payload takes, with frame and padding.
pub(super) fn frame_len(payload: usize) -> u64 {
    (FRAME_LEN + payload.next_multiple_of(8)) as u64
}

impl Frame {
    /// Builds the frame that follows `after`, and its bytes. A record gets the next sequence number.
    pub(super) fn emit(
        after: &Point,
        record: Option<&[u8]>,
        epoch: Epoch,
        acknowledged: u64,
    ) -> (Frame, Vec<u8>) {
        let payload = record.unwrap_or_default();
        let sequence = after.sequence + u64::from(record.is_some());
        let mut out = Vec::with_capacity(frame_len(payload.len()) as usize);
        out.extend_from_slice(&if record.is_some() { RECORD } else { EPOCH }.to_be_bytes());
        out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        for number in [sequence, epoch.term, epoch.writer, acknowledged] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        let chain = crc_of(&[&after.chain.to_be_bytes(), &out, payload]);
        out.extend_from_slice(&chain.to_be_bytes());
        out.extend_from_slice(payload);
        out.resize(out.len().next_multiple_of(8), 0);
        let end = Point {
            position: after.position + out.len() as u64,
            sequence,
            epoch,
            chain,
        };
        let frame = Frame {
            end,
            is_record: record.is_some(),
            length: payload.len() as u32,
            acknowledged,
        };
        (frame, out)
    }

    /// Parses the frame that follows `after` from `bytes`; the frame takes `area` bytes at most.
    pub(super) fn scan(after: &Point, bytes: &[u8], area: u64) -> Scan {
        if bytes.len() < FRAME_LEN {
            return Scan::Need(FRAME_LEN);
        }
        let (magic, length) = (u32_at(bytes, 0), u32_at(bytes, 4));
        let is_record = magic == RECORD;
        let whole = frame_len(length as usize);
        let (sequence, epoch) = (u64_at(bytes, 8), epoch_at(bytes, 16));
        let follows = (is_record || magic == EPOCH && length == 0)
            && length <= RECORD_BYTES_MAX
            && whole <= area
            && Some(sequence) == after.sequence.checked_add(is_record.into())
            && epoch >= after.epoch;
        if !follows {
            return Scan::End;
        }
        let used = FRAME_LEN + length as usize;
        if bytes.len() < used {
            return Scan::Need(used);
        }
        let chain = u64_at(bytes, 40);
        let computed = crc_of(&[&after.chain.to_be_bytes(), &bytes[..40], &bytes[FRAME_LEN..used]]);
        if computed != chain && !defect!(ChecksumIgnored) {
            return Scan::End;
        }
        Scan::Frame(Frame {
            end: Point {
                position: after.position + whole,
                sequence,
                epoch,
                chain,
            },
            is_record,
            length,
            acknowledged: u64_at(bytes, 32),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(term: u64) -> Epoch {
        Epoch { term, writer: 7 }
    }

    fn header(generation: u64) -> Header {
        Header {
            replicas: 3,
            joining: generation.is_multiple_of(2),
            log: 5,
            replica: 6,
            generation,
            promise: epoch(9),
            area: 8192,
            head: Point::origin(5),
            acknowledged: 4,
        }
    }

    fn slots(headers: &[Header]) -> Vec<u8> {
        let mut bytes = vec![0; AREA_AT as usize];
        for header in headers {
            let at = header.offset() as usize;
            bytes[at..at + HEADER_LEN].copy_from_slice(&header.emit());
        }
        bytes
    }

    #[test]
    fn header__the_newer_slot_counts_and_a_torn_one_does_not() {
        assert_eq!(Header::find(&slots(&[])), Found::Blank);
        let mut bytes = slots(&[header(4), header(5)]);
        assert_eq!(Header::find(&bytes), Found::Log(header(5)));
        for at in 0..HEADER_LEN {
            bytes[SLOT as usize + at] ^= 1;
            assert_eq!(Header::find(&bytes), Found::Log(header(4)), "byte {at}");
            bytes[SLOT as usize + at] ^= 1;
        }
        bytes[SLOT as usize] ^= 1;
        bytes[0] ^= 1;
        assert_eq!(Header::find(&bytes), Found::Other);
        assert_eq!(Header::find(&[0; 10]), Found::Blank);
    }

    #[test]
    fn header__the_first_one_torn_leaves_a_blank_replica() {
        let whole = slots(&[header(1)]);
        for lost in 0..HEADER_LEN / 8 {
            let mut bytes = whole.clone();
            let at = SLOT as usize + 8 * lost;
            let was_zero = bytes[at..at + 8].iter().all(|byte| *byte == 0);
            bytes[at..at + 8].fill(0);
            let found = if was_zero {
                Found::Log(header(1))
            } else {
                Found::Blank
            };
            assert_eq!(Header::find(&bytes), found, "unit {lost}");
            bytes[9000 % AREA_AT as usize] = 1;
            assert!(matches!(Header::find(&bytes), Found::Other | Found::Log(_)));
        }
    }

    #[test]
    fn scan__each_byte_of_a_frame_counts() {
        let after = Point::origin(1);
        for record in [None, Some(&b"some record"[..]), Some(&[][..])] {
            let (frame, mut bytes) = Frame::emit(&after, record, epoch(2), 0);
            let used = FRAME_LEN + record.map_or(0, <[u8]>::len);
            assert_eq!(bytes.len() as u64, frame_len(used - FRAME_LEN));
            assert_eq!(Frame::scan(&after, &bytes, 4096), Scan::Frame(frame));
            for at in 0..used {
                bytes[at] ^= 0x10;
                assert!(
                    !matches!(Frame::scan(&after, &bytes, 4096), Scan::Frame(_)),
                    "byte {at}"
                );
                bytes[at] ^= 0x10;
            }
            for cut in 0..used {
                assert!(
                    matches!(Frame::scan(&after, &bytes[..cut], 4096), Scan::Need(_)),
                    "{cut} bytes"
                );
            }
        }
    }

    #[test]
    fn scan__a_frame_belongs_behind_its_predecessor_alone() {
        let origin = Point::origin(1);
        let (first, _) = Frame::emit(&origin, Some(b"a"), epoch(2), 0);
        let (other, _) = Frame::emit(&origin, Some(b"b"), epoch(2), 0);
        let (_, second) = Frame::emit(&first.end, Some(b"c"), epoch(2), 0);
        assert!(matches!(Frame::scan(&first.end, &second, 4096), Scan::Frame(_)));
        assert_eq!(Frame::scan(&other.end, &second, 4096), Scan::End);
        let later = Point {
            epoch: epoch(3),
            ..first.end
        };
        assert_eq!(Frame::scan(&later, &second, 4096), Scan::End);
    }
}
