//! Ranges of blocks that commands have as data: Dataset Management and Copy. NVM 3.2.3 and 3.2.2.

use super::{NsId, Sqe};
use crate::bytes::{le16, le32, le64, put};

/// A range of Dataset Management.
///
/// ```text
///  0  context attributes u32 | number of blocks u32
///  8  first block u64
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetRange {
    /// First block.
    pub slba: u64,
    /// Number of blocks; 0 is none.
    pub blocks: u32,
}

impl DatasetRange {
    /// Bytes of a range.
    pub const LEN: usize = 16;
    /// Dword 11: the host needs the blocks no more.
    pub const DEALLOCATE: u32 = 1 << 2;

    /// Returns the number of ranges that a command has, 1 to 256.
    pub fn count(sqe: &Sqe) -> u16 {
        (sqe.dword(10) & 0xff) as u16 + 1
    }

    /// Reads the ranges of a command's data.
    pub fn parse(bytes: &[u8]) -> impl Iterator<Item = DatasetRange> + Clone {
        bytes.chunks_exact(DatasetRange::LEN).map(|range| DatasetRange {
            slba: le64(range, 8),
            blocks: le32(range, 4),
        })
    }

    /// Writes a range.
    ///
    /// # Panics
    /// `bytes` is shorter than a range.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..DatasetRange::LEN].fill(0);
        put(bytes, 4, &self.blocks.to_le_bytes());
        put(bytes, 8, &self.slba.to_le_bytes());
    }
}

/// Format of the source ranges of Copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CopyFormat {
    /// Of the command's namespace.
    Same = 0,
    /// Of any namespace of the subsystem. The host enables it by feature 16h (TP4130).
    Any = 2,
}

impl CopyFormat {
    /// Returns the bit of the format where formats are a set: OCFS, and CDFE of feature 16h.
    pub const fn bit(self) -> u16 {
        1 << self as u16
    }
}

/// Copy: dwords 10 to 12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// First block of the destination.
    pub slba: u64,
    /// Number of source ranges, 1 to 256.
    pub ranges: u16,
    /// Format of the source ranges, as its number.
    pub format: u8,
    /// Force Unit Access: what is written is durable when the command is done.
    pub fua: bool,
}

impl Copy {
    /// Reads the dwords of a command.
    pub fn parse(sqe: &Sqe) -> Copy {
        let dword = sqe.dword(12);
        Copy {
            slba: u64::from(sqe.dword(10)) | u64::from(sqe.dword(11)) << 32,
            ranges: (dword & 0xff) as u16 + 1,
            format: (dword >> 8 & 0xf) as u8,
            fua: dword & 1 << 30 != 0,
        }
    }

    /// Writes the dwords into a command.
    ///
    /// # Panics
    /// There is no range.
    pub fn emit(&self, sqe: &mut Sqe) {
        assert!((1..=256).contains(&self.ranges), "{} ranges", self.ranges);
        sqe.set_dword(10, self.slba as u32);
        sqe.set_dword(11, (self.slba >> 32) as u32);
        let fua = u32::from(self.fua) << 30;
        sqe.set_dword(
            12,
            u32::from(self.ranges - 1) | u32::from(self.format & 0xf) << 8 | fua,
        );
    }
}

/// A source range of Copy, formats 0 and 2.
///
/// ```text
///  0  namespace id u32, format 2 only
///  8  first block u64
/// 16  number of blocks u16, less 1
/// 22  options u16, format 2 only: bit 15 asks for a fast copy
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The namespace; format 0 ignores it.
    pub nsid: NsId,
    /// First block.
    pub slba: u64,
    /// Number of blocks, 1 to 65,536.
    pub blocks: u32,
    /// The copy must be fast, or fail.
    pub fast_only: bool,
}

impl CopyRange {
    /// Bytes of a range.
    pub const LEN: usize = 32;
    const FAST_ONLY: u16 = 1 << 15;

    /// Reads the ranges of a command's data.
    pub fn parse(bytes: &[u8]) -> impl Iterator<Item = CopyRange> + Clone {
        bytes.chunks_exact(CopyRange::LEN).map(|range| CopyRange {
            nsid: NsId(le32(range, 0)),
            slba: le64(range, 8),
            blocks: u32::from(le16(range, 16)) + 1,
            fast_only: le16(range, 22) & CopyRange::FAST_ONLY != 0,
        })
    }

    /// Writes a range.
    ///
    /// # Panics
    /// `bytes` is shorter than a range, or the number of blocks is 0 or too large.
    pub fn emit(&self, bytes: &mut [u8]) {
        assert!((1..=0x1_0000).contains(&self.blocks), "{} blocks", self.blocks);
        bytes[..CopyRange::LEN].fill(0);
        put(bytes, 0, &self.nsid.0.to_le_bytes());
        put(bytes, 8, &self.slba.to_le_bytes());
        put(bytes, 16, &((self.blocks - 1) as u16).to_le_bytes());
        let options = if self.fast_only { CopyRange::FAST_ONLY } else { 0 };
        put(bytes, 22, &options.to_le_bytes());
    }
}
