//! Write notices: which units a node of a region with release consistency has written, as the others read it by RDMA READ.
//!
//! Each node has a *log* in its memory, little-endian, which only it writes:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | begun: runs that it has begun to write so far |
//! | 8..16 | ended: runs that are written |
//! | 16.. | [`RUNS`] runs of 8 bytes; run n, counted from 0, is at place n % [`RUNS`] |
//!
//! | bytes of a run | field |
//! |---|---|
//! | 0..4 | first unit |
//! | 4..8 | number of units, not 0 |
//!
//! The node stores *begun*, then the run, then *ended*. A reader reads *ended*, then runs before that number, then *begun*: of these runs, each that
//! is not [`RUNS`] or more behind *begun* is whole. Each field is aligned and stored at once.

use std::ops::Range;

use crate::Malformed;
use crate::bytes::{le64, need};

/// Runs that a log has room for.
pub const RUNS: u64 = 1022;

/// Bytes of a log before its runs.
pub const HEADER_LEN: usize = 16;

/// Bytes of a run.
pub const RUN_LEN: usize = 8;

/// Bytes of a log.
pub const LOG_LEN: usize = HEADER_LEN + RUNS as usize * RUN_LEN;

/// Counts of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Runs that the node has begun to write.
    pub begun: u64,
    /// Runs that are written.
    pub ended: u64,
}

impl Header {
    /// Reads the counts, of which either may be the older one.
    ///
    /// # Errors
    /// Fewer than [`HEADER_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Header, Malformed> {
        need("log of a node", bytes, HEADER_LEN)?;
        Ok(Header {
            begun: le64(bytes, 0),
            ended: le64(bytes, 8),
        })
    }
}

/// Units in a row that a node has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first unit.
    pub first: u32,
    /// Number of units.
    pub count: u32,
}

impl Run {
    /// Reads a run.
    ///
    /// # Errors
    /// It has no units, or some whose numbers are too high.
    pub fn parse(bytes: [u8; RUN_LEN]) -> Result<Run, Malformed> {
        let value = u64::from_le_bytes(bytes);
        let run = Run {
            first: value as u32,
            count: (value >> 32) as u32,
        };
        match run.count > 0 && run.first.checked_add(run.count).is_some() {
            true => Ok(run),
            false => super::undefined("run of units", value),
        }
    }

    /// Returns the units.
    pub fn units(self) -> Range<u64> {
        let first = u64::from(self.first);
        first..first + u64::from(self.count)
    }

    /// Writes the run.
    pub fn emit(self) -> [u8; RUN_LEN] {
        (u64::from(self.count) << 32 | u64::from(self.first)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run__is_read_as_it_was_written() {
        for (first, count) in [(0, 1), (0x0102_0304, 0x0506_0708), (u32::MAX - 1, 1)] {
            let run = Run { first, count };
            assert_eq!(Run::parse(run.emit()), Ok(run));
        }
        assert_eq!(Run { first: 1, count: 2 }.emit(), [1, 0, 0, 0, 2, 0, 0, 0]);
    }

    #[test]
    fn run__without_units_or_beyond_all_is_refused() {
        for (first, count) in [(7, 0), (u32::MAX, 1), (2, u32::MAX - 1)] {
            assert!(Run::parse(Run { first, count }.emit()).is_err());
        }
    }

    #[test]
    fn run__has_one_way_to_be_written() {
        let run = Run {
            first: 0xffff_fefe,
            count: 0x0000_0101,
        };
        for at in 0..RUN_LEN {
            for value in 0..=u8::MAX {
                let mut changed = run.emit();
                changed[at] = value;
                if let Ok(run) = Run::parse(changed) {
                    assert_eq!(run.emit(), changed);
                    assert!(run.count > 0 && run.units().end <= u64::from(u32::MAX));
                }
            }
        }
    }

    #[test]
    fn header__is_read_from_its_bytes_alone() {
        let mut bytes = [0xee; 2 * HEADER_LEN];
        for at in 0..HEADER_LEN {
            for value in 0..=u8::MAX {
                bytes[at] = value;
                let header = Header::parse(&bytes).unwrap();
                let counts = [header.begun, header.ended].map(u64::to_le_bytes).concat();
                assert_eq!(counts, bytes[..HEADER_LEN]);
            }
        }
    }

    #[test]
    fn header__is_two_numbers() {
        let mut bytes = [0; HEADER_LEN];
        (bytes[0], bytes[15]) = (1, 2);
        let (begun, ended) = (1, 2 << 56);
        assert_eq!(Header::parse(&bytes), Ok(Header { begun, ended }));
        assert!(Header::parse(&bytes[1..]).is_err());
    }
}
