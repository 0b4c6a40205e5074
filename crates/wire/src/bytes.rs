//! Fields at fixed offsets of a slice. The callers check its length first, with [`need`]; all others panic beyond its end.

use crate::Malformed;

/// Checks that `bytes` has at least `min` bytes, so that fixed fields can be read.
pub fn need(what: &'static str, bytes: &[u8], min: usize) -> Result<(), Malformed> {
    if bytes.len() < min {
        return Err(Malformed::Truncated {
            what,
            len: bytes.len(),
            min,
        });
    }
    Ok(())
}

/// Returns the big-endian number of 2 bytes at an offset.
pub fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

/// Returns the big-endian number of 3 bytes at an offset.
pub fn be24(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([0, b[at], b[at + 1], b[at + 2]])
}

/// Returns the big-endian number of 4 bytes at an offset.
pub fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Returns the big-endian number of 8 bytes at an offset.
pub fn be64(b: &[u8], at: usize) -> u64 {
    (u64::from(be32(b, at)) << 32) | u64::from(be32(b, at + 4))
}

/// Returns the little-endian number of 2 bytes at an offset.
pub fn le16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(at_offset(b, at))
}

/// Returns the little-endian number of 4 bytes at an offset.
pub fn le32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(at_offset(b, at))
}

/// Returns the little-endian number of 8 bytes at an offset.
pub fn le64(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(at_offset(b, at))
}

fn at_offset<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&b[at..at + N]);
    bytes
}

/// Writes bytes at an offset.
pub fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes the low 3 bytes of a number, big-endian, at an offset.
pub fn put24(b: &mut [u8], at: usize, value: u32) {
    b[at..at + 3].copy_from_slice(&value.to_be_bytes()[1..]);
}
