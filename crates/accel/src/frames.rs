//! Compressed data, as the tools zstd, lz4 and gzip read and write them: frames that stand one behind the other.

use std::io::Write;

use libdeflater::{CompressionLvl, Compressor, DecompressionError, Decompressor};
use lz4_flex::block::{DecompressError, decompress_into_with_dict};
use lz4_flex::frame::{BlockSize, FrameEncoder, FrameInfo};
use rdmux_wire::accel::{Algorithm, JobStatus};
use twox_hash::XxHash32;
use zstd::zstd_safe::{self, CCtx, DCtx};

/// Length and fields of a member of gzip that this crate makes, up to its DEFLATE data: the header (RFC 1952, 2.3), and a field "RX" with the bytes of the whole
/// member, since nothing else says where one ends.
const GZIP_HEADER: usize = 20;
/// CRC-32 and length of the data behind them.
const GZIP_TRAILER: usize = 8;
const MEMBER_FIELD: [u8; 2] = *b"RX";
const FILLER_FIELD: [u8; 2] = *b"PD";
/// DEFLATE data of nothing: a last block, of fixed codes.
const EMPTY_DEFLATE: [u8; 2] = [3, 0];
/// Bytes of a member of nothing, with a field to fill it up.
const EMPTY_MEMBER: usize = GZIP_HEADER + 4 + EMPTY_DEFLATE.len() + GZIP_TRAILER;
/// Most bytes of such a member: all fields together have fewer than 64 KiB.
const EMPTY_MEMBER_MAX: usize = EMPTY_MEMBER + 65_535 - 12;
/// Mark of a frame that readers of zstd and LZ4 skip; its low 4 bits are anything.
const SKIPPABLE: u32 = 0x184d_2a50;
const SKIPPABLE_HEADER: usize = 8;
const LZ4_MAGIC: u32 = 0x184d_2204;
/// Bit of a block's size: the block is not compressed.
const LZ4_UNCOMPRESSED: u32 = 1 << 31;
/// Bytes of a block's size, and of a checksum.
const LZ4_WORD: usize = 4;
/// Bytes in front of a block that it may refer to, unless the frame's blocks are independent.
const LZ4_WINDOW: usize = 64 << 10;

/// Makes a buffer of zeros. The system gives a large one its memory as that is first used, so this takes no time.
///
/// # Errors
/// There is not so much memory.
pub(crate) fn zeroes(len: usize) -> Result<Vec<u8>, ()> {
    // `vec!` ends the process where there is no memory.
    let mut asked: Vec<u8> = Vec::new();
    asked.try_reserve_exact(len).map_err(|_| ())?;
    drop(std::hint::black_box(asked));
    Ok(vec![0; len])
}

/// A compressor and a decompressor.
pub(crate) enum Codec {
    Deflate(Box<Deflate>),
    Zstd(CCtx<'static>, DCtx<'static>),
    Lz4,
}

/// Compressors have their level for good.
pub(crate) struct Deflate {
    compressor: Option<(u8, Compressor)>,
    decompressor: Decompressor,
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Codec::Deflate(_) => "Deflate",
            Codec::Zstd(..) => "Zstd",
            Codec::Lz4 => "Lz4",
        })
    }
}

impl Codec {
    /// Makes that of an algorithm; `None` if it compresses nothing.
    pub(crate) fn new(algorithm: Algorithm) -> Option<Codec> {
        match algorithm {
            Algorithm::Deflate => Some(Codec::Deflate(Box::new(Deflate {
                compressor: None,
                decompressor: Decompressor::new(),
            }))),
            Algorithm::Zstd => Some(Codec::Zstd(CCtx::create(), DCtx::create())),
            Algorithm::Lz4 => Some(Codec::Lz4),
            Algorithm::Null | Algorithm::Crc32c | Algorithm::Crc64Nvme => None,
        }
    }

    /// Compresses into one frame, and pads it to a multiple of `align` bytes. Returns the bytes of both.
    pub(crate) fn compress(
        &mut self,
        data: &[u8],
        level: u8,
        align: u32,
        out: &mut [u8],
    ) -> Result<usize, JobStatus> {
        let length = match self {
            Codec::Deflate(deflate) => deflate.compress(data, level, out)?,
            Codec::Zstd(compressor, _) => compressor
                .compress(out, data, level.into())
                .map_err(|code| zstd_status(code, JobStatus::Failed))?,
            Codec::Lz4 => compress_lz4(data, out)?,
        };
        self.pad(length, align as usize, out)
    }

    /// Decompresses the whole frames that have room. Returns the bytes of the result, and those of the frames.
    ///
    /// # Errors
    /// Not even the first one can be decompressed.
    pub(crate) fn decompress(&mut self, data: &[u8], out: &mut [u8]) -> Result<(usize, usize), JobStatus> {
        let (mut length, mut consumed) = (0, 0);
        while consumed < data.len() {
            match self.decompress_frame(&data[consumed..], &mut out[length..]) {
                Ok((produced, used)) => {
                    length += produced;
                    consumed += used;
                }
                // The next job begins with it, and reports that.
                Err(_) if consumed > 0 => break,
                Err(status) => return Err(status),
            }
        }
        Ok((length, consumed))
    }

    /// Returns the bytes of a frame's content, and of the frame.
    fn decompress_frame(&mut self, data: &[u8], out: &mut [u8]) -> Result<(usize, usize), JobStatus> {
        let algorithm = match self {
            Codec::Deflate(_) => Algorithm::Deflate,
            Codec::Zstd(..) => Algorithm::Zstd,
            Codec::Lz4 => Algorithm::Lz4,
        };
        // A member of other programs does not tell its length: it is all that there is.
        let frame = frame_len(algorithm, data)?.unwrap_or(data.len());
        let frame = data.get(..frame).ok_or(JobStatus::Truncated)?;
        let length = match self {
            _ if is_skippable(frame) => 0,
            Codec::Deflate(deflate) => deflate.decompress(frame, out)?,
            Codec::Zstd(_, decompressor) => decompressor
                .decompress(out, frame)
                .map_err(|code| zstd_status(code, JobStatus::Corrupt))?,
            Codec::Lz4 => decompress_lz4(frame, out)?,
        };
        Ok((length, frame.len()))
    }

    /// Adds frames of nothing up to a multiple of `align`.
    fn pad(&self, length: usize, align: usize, out: &mut [u8]) -> Result<usize, JobStatus> {
        if align <= 1 || length.is_multiple_of(align) {
            return Ok(length);
        }
        let least = match self {
            Codec::Deflate(_) => EMPTY_MEMBER,
            _ => SKIPPABLE_HEADER,
        };
        let end = (length + least).next_multiple_of(align);
        let mut filler = out.get_mut(length..end).ok_or(JobStatus::TooLong)?;
        if let Codec::Deflate(_) = self {
            while filler.len() > EMPTY_MEMBER_MAX {
                let (member, rest) = filler.split_at_mut(EMPTY_MEMBER);
                emit_empty_member(member);
                filler = rest;
            }
            emit_empty_member(filler);
        } else {
            filler.fill(0);
            filler[..4].copy_from_slice(&SKIPPABLE.to_le_bytes());
            let content = (filler.len() - SKIPPABLE_HEADER) as u32;
            filler[4..8].copy_from_slice(&content.to_le_bytes());
        }
        Ok(end)
    }
}

fn is_skippable(data: &[u8]) -> bool {
    data.len() >= 4 && data[0] & 0xf0 == 0x50 && data[1..4] == SKIPPABLE.to_le_bytes()[1..]
}

fn zstd_status(code: usize, otherwise: JobStatus) -> JobStatus {
    // An error is a small negative number.
    match 0usize.wrapping_sub(code) as u32 {
        code if code == zstd_safe::zstd_sys::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as u32 => {
            JobStatus::TooLong
        }
        code if code == zstd_safe::zstd_sys::ZSTD_ErrorCode::ZSTD_error_srcSize_wrong as u32 => {
            JobStatus::Truncated
        }
        _ => otherwise,
    }
}

fn compress_lz4(data: &[u8], out: &mut [u8]) -> Result<usize, JobStatus> {
    let room = out.len();
    let mut rest = out;
    let info = FrameInfo::new()
        .block_size(BlockSize::Max4MB)
        .content_size(Some(data.len() as u64))
        .content_checksum(true);
    let mut encoder = FrameEncoder::with_frame_info(info, &mut rest);
    // A slice fails alone for want of room.
    encoder.write_all(data).map_err(|_| JobStatus::TooLong)?;
    encoder.finish().map_err(|_| JobStatus::TooLong)?;
    Ok(room - rest.len())
}

/// Decompresses block by block into the place of the result. The reader of `lz4_flex` fills a buffer of the frame's largest block for each frame: short
/// frames would take a thousand times as long as others.
fn decompress_lz4(frame: &[u8], out: &mut [u8]) -> Result<usize, JobStatus> {
    let header = Lz4Header::parse(frame)?;
    let (mut at, mut length) = (header.bytes, 0);
    while let Some(block) = header.block(frame, at)? {
        at = block.end;
        if block
            .checksum
            .is_some_and(|checksum| checksum != XxHash32::oneshot(0, block.bytes))
        {
            return Err(JobStatus::Corrupt);
        }
        let (content, room) = out.split_at_mut(length);
        length += if block.is_compressed {
            let window = match header.is_independent {
                true => &[],
                false => &content[length.saturating_sub(LZ4_WINDOW)..],
            };
            let most = room.len().min(header.block_max);
            decompress_into_with_dict(block.bytes, &mut room[..most], window).map_err(
                |error| match error {
                    DecompressError::OutputTooSmall { .. } if most < header.block_max => JobStatus::TooLong,
                    _ => JobStatus::Corrupt,
                },
            )?
        } else {
            let room = room.get_mut(..block.bytes.len()).ok_or(JobStatus::TooLong)?;
            room.copy_from_slice(block.bytes);
            room.len()
        };
    }
    let is_whole = header.content_size.is_none_or(|size| size == length as u64)
        && (!header.has_content_checksum
            || XxHash32::oneshot(0, &out[..length]) == u32_at(frame, at + LZ4_WORD)?);
    is_whole.then_some(length).ok_or(JobStatus::Corrupt)
}

/// Returns the bytes of the frame with which compressed data begin, which may be more than there are; `None` if it does not tell, as a member of
/// gzip by other programs.
///
/// # Errors
/// It is no such frame, or ends too early.
pub fn frame_len(algorithm: Algorithm, data: &[u8]) -> Result<Option<usize>, JobStatus> {
    if algorithm == Algorithm::Deflate {
        return Ok(parse_gzip_header(data)?.1);
    }
    if is_skippable(data) {
        return Ok(Some(SKIPPABLE_HEADER + u32_at(data, 4)? as usize));
    }
    match algorithm {
        Algorithm::Zstd => zstd_safe::find_frame_compressed_size(data)
            .map(Some)
            .map_err(|code| zstd_status(code, JobStatus::Corrupt)),
        Algorithm::Lz4 => Lz4Header::parse(data)?.frame_len(data).map(Some),
        _ => Err(JobStatus::Corrupt),
    }
}

/// Descriptor of a frame of LZ4 (lz4_Frame_format.md, 1.6).
struct Lz4Header {
    /// Bytes of magic and descriptor.
    bytes: usize,
    is_independent: bool,
    has_block_checksums: bool,
    has_content_checksum: bool,
    content_size: Option<u64>,
    /// Most bytes of a block, compressed or not.
    block_max: usize,
}

/// A block of a frame of LZ4.
struct Lz4Block<'a> {
    bytes: &'a [u8],
    is_compressed: bool,
    checksum: Option<u32>,
    /// Offset of the next one.
    end: usize,
}

impl Lz4Header {
    /// Parses it. Dictionaries are not known here: such a frame is refused.
    fn parse(data: &[u8]) -> Result<Lz4Header, JobStatus> {
        if u32_at(data, 0)? != LZ4_MAGIC {
            return Err(JobStatus::Corrupt);
        }
        let [flags, block_size] = *data[4..].first_chunk().ok_or(JobStatus::Truncated)?;
        // Version 1, no dictionary, and bits that are 0.
        if flags & 0xc3 != 0x40 || block_size & 0x8f != 0 || block_size < 0x40 {
            return Err(JobStatus::Corrupt);
        }
        let has_size = flags & 1 << 3 != 0;
        let checked = if has_size { 14 } else { 6 };
        let checksum = *data.get(checked).ok_or(JobStatus::Truncated)?;
        if checksum != XxHash32::oneshot(0, &data[4..checked]).to_le_bytes()[1] {
            return Err(JobStatus::Corrupt);
        }
        let size = data[6..].first_chunk().filter(|_| has_size);
        Ok(Lz4Header {
            bytes: checked + 1,
            is_independent: flags & 1 << 5 != 0,
            has_block_checksums: flags & 1 << 4 != 0,
            has_content_checksum: flags & 1 << 2 != 0,
            content_size: size.map(|size| u64::from_le_bytes(*size)),
            block_max: 1 << (8 + 2 * (block_size >> 4)),
        })
    }

    /// Returns the block at an offset; `None`: the frame's blocks end there.
    fn block<'a>(&self, data: &'a [u8], at: usize) -> Result<Option<Lz4Block<'a>>, JobStatus> {
        let word = u32_at(data, at)?;
        if word == 0 {
            return Ok(None);
        }
        let bytes = (word & !LZ4_UNCOMPRESSED) as usize;
        if bytes > self.block_max {
            return Err(JobStatus::Corrupt);
        }
        let (start, end) = (at + LZ4_WORD, at + LZ4_WORD + bytes);
        let checksum = match self.has_block_checksums {
            true => Some(u32_at(data, end)?),
            false => None,
        };
        Ok(Some(Lz4Block {
            bytes: data.get(start..end).ok_or(JobStatus::Truncated)?,
            is_compressed: word & LZ4_UNCOMPRESSED == 0,
            checksum,
            end: end + checksum.map_or(0, |_| LZ4_WORD),
        }))
    }

    /// Walks the blocks. Returns the bytes of the frame.
    fn frame_len(&self, data: &[u8]) -> Result<usize, JobStatus> {
        let mut at = self.bytes;
        while let Some(block) = self.block(data, at)? {
            at = block.end;
        }
        let checksum = if self.has_content_checksum { LZ4_WORD } else { 0 };
        Ok(at + LZ4_WORD + checksum)
    }
}

fn u32_at(data: &[u8], at: usize) -> Result<u32, JobStatus> {
    let bytes = data.get(at..).and_then(|bytes| bytes.first_chunk());
    bytes
        .map(|bytes| u32::from_le_bytes(*bytes))
        .ok_or(JobStatus::Truncated)
}

/// Writes what is in front of a member's DEFLATE data, but for its length. RFC 1952, 2.3.
fn emit_gzip_header(out: &mut [u8], fields: u16) {
    // No time, and an unknown system.
    out[..10].copy_from_slice(&[0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255]);
    out[10..12].copy_from_slice(&fields.to_le_bytes());
    out[12..14].copy_from_slice(&MEMBER_FIELD);
    out[14..16].copy_from_slice(&4u16.to_le_bytes());
}

fn set_member_length(member: &mut [u8]) {
    let length = member.len() as u32;
    member[16..20].copy_from_slice(&length.to_le_bytes());
}

/// Writes a member that decompresses to nothing, of [`EMPTY_MEMBER`] to [`EMPTY_MEMBER_MAX`] bytes.
fn emit_empty_member(out: &mut [u8]) {
    out.fill(0);
    let filler = out.len() - EMPTY_MEMBER;
    emit_gzip_header(out, (12 + filler) as u16);
    set_member_length(out);
    out[20..22].copy_from_slice(&FILLER_FIELD);
    out[22..24].copy_from_slice(&(filler as u16).to_le_bytes());
    let at = GZIP_HEADER + 4 + filler;
    out[at..at + 2].copy_from_slice(&EMPTY_DEFLATE);
}

impl Deflate {
    fn compress(&mut self, data: &[u8], level: u8, out: &mut [u8]) -> Result<usize, JobStatus> {
        if self.compressor.as_ref().is_none_or(|(has, _)| *has != level) {
            let level_of_library = CompressionLvl::new(level.into()).map_err(|_| JobStatus::Failed)?;
            self.compressor = Some((level, Compressor::new(level_of_library)));
        }
        let (_, compressor) = self.compressor.as_mut().ok_or(JobStatus::Failed)?;
        let end = out.len().checked_sub(GZIP_TRAILER).ok_or(JobStatus::TooLong)?;
        let body = out.get_mut(GZIP_HEADER..end).ok_or(JobStatus::TooLong)?;
        let length = compressor
            .deflate_compress(data, body)
            .map_err(|_| JobStatus::TooLong)?;
        let member = &mut out[..GZIP_HEADER + length + GZIP_TRAILER];
        emit_gzip_header(member, 8);
        set_member_length(member);
        let trailer = &mut member[GZIP_HEADER + length..];
        trailer[..4].copy_from_slice(&crc32fast::hash(data).to_le_bytes());
        trailer[4..].copy_from_slice(&(data.len() as u32).to_le_bytes());
        Ok(member.len())
    }

    fn decompress(&mut self, member: &[u8], out: &mut [u8]) -> Result<usize, JobStatus> {
        let (header, _) = parse_gzip_header(member)?;
        let end = member
            .len()
            .checked_sub(GZIP_TRAILER)
            .ok_or(JobStatus::Truncated)?;
        let body = member.get(header..end).ok_or(JobStatus::Truncated)?;
        let length = self
            .decompressor
            .deflate_decompress(body, out)
            .map_err(|error| match error {
                DecompressionError::InsufficientSpace => JobStatus::TooLong,
                DecompressionError::BadData => JobStatus::Corrupt,
            })?;
        let trailer = &member[end..];
        let is_whole = trailer[..4] == crc32fast::hash(&out[..length]).to_le_bytes()
            && trailer[4..] == (length as u32).to_le_bytes();
        is_whole.then_some(length).ok_or(JobStatus::Corrupt)
    }
}

/// Returns the bytes in front of a member's DEFLATE data, and those of the member, if it tells. RFC 1952, 2.3.
fn parse_gzip_header(data: &[u8]) -> Result<(usize, Option<usize>), JobStatus> {
    let fixed = data.get(..10).ok_or(JobStatus::Truncated)?;
    let flags = fixed[3];
    if fixed[..3] != [0x1f, 0x8b, 8] || flags & 0xe0 != 0 {
        return Err(JobStatus::Corrupt);
    }
    let (mut at, mut member) = (10, None);
    if flags & 4 != 0 {
        let length = data.get(at..at + 2).ok_or(JobStatus::Truncated)?;
        at += 2;
        let end = at + usize::from(u16::from_le_bytes([length[0], length[1]]));
        let mut fields = data.get(at..end).ok_or(JobStatus::Truncated)?;
        while let [a, b, low, high, rest @ ..] = fields {
            let length = usize::from(u16::from_le_bytes([*low, *high]));
            let Some((field, rest)) = rest.split_at_checked(length) else {
                return Err(JobStatus::Corrupt);
            };
            if [*a, *b] == MEMBER_FIELD
                && let [a, b, c, d] = *field
            {
                member = Some(u32::from_le_bytes([a, b, c, d]) as usize);
            }
            fields = rest;
        }
        at = end;
    }
    // The name of the file, and a comment.
    for flag in [8, 16] {
        if flags & flag != 0 {
            let text = data.get(at..).ok_or(JobStatus::Truncated)?;
            let end = text.iter().position(|byte| *byte == 0);
            at += end.ok_or(JobStatus::Truncated)? + 1;
        }
    }
    // A checksum of the header.
    at += if flags & 2 != 0 { 2 } else { 0 };
    Ok((at, member))
}
