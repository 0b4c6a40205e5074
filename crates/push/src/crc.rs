//! The checksum with which both ends compare their bytes: CRC-64/NVME.

use crc_fast::{CrcAlgorithm, Digest};
use rdmux_verbs::{Fault, Memory};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// A CRC-64/NVME that grows with the bytes given.
#[derive(Clone, Debug)]
pub struct Crc64(Digest);

impl Default for Crc64 {
    fn default() -> Crc64 {
        Crc64(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Crc64 {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes so far.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

/// Returns the checksum of a part of a memory.
pub fn crc64_of(memory: &dyn Memory, offset: u64, length: u64) -> Result<u64, Fault> {
    crc64_while(memory, offset, length, || true).map(Option::unwrap_or_default)
}

/// Like [`crc64_of`], but calls `wanted` before each chunk and returns `None` once it returns false.
pub(crate) fn crc64_while(
    memory: &dyn Memory,
    offset: u64,
    length: u64,
    wanted: impl Fn() -> bool,
) -> Result<Option<u64>, Fault> {
    let mut crc = Crc64::default();
    let mut buffer = vec![0; CHUNK.min(length.try_into().unwrap_or(usize::MAX))];
    let (mut at, mut left) = (offset, length);
    while left > 0 {
        if !wanted() {
            return Ok(None);
        }
        let chunk = &mut buffer[..left.min(CHUNK as u64) as usize];
        memory.read(at, chunk)?;
        crc.update(chunk);
        at += chunk.len() as u64;
        left -= chunk.len() as u64;
    }
    Ok(Some(crc.value()))
}

/// Returns a name for an upload, so that it can be resumed: the same for the same source and place. It is the CRC-64/NVME of
/// the source's size, its modification time and the offset in the region, each as 16 big-endian bytes, and the source's base
/// name; never 0.
pub fn transfer_id(name: &[u8], size: u64, modified_ns: i128, offset: u64) -> u64 {
    let mut crc = Crc64::default();
    for number in [size.into(), modified_ns, offset.into()] {
        crc.update(&number.to_be_bytes());
    }
    crc.update(name);
    crc.value().max(1)
}

#[cfg(test)]
mod tests {
    use rdmux_memory::AnonymousMemory;

    use super::*;

    #[test]
    fn value__of_the_check_string() {
        let mut crc = Crc64::default();
        crc.update(b"12345");
        crc.update(b"6789");
        // The check value of CRC-64/NVME; NVMe NVM Command Set specification, 5.2.1.3.4.
        assert_eq!(crc.value(), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn crc64_while__ends_at_the_next_chunk_when_nobody_wants_it() {
        let memory = AnonymousMemory::new(8 << 20).unwrap();
        let asked = std::cell::Cell::new(0);
        let wanted = || asked.replace(asked.get() + 1) < 2;
        assert_eq!(crc64_while(&memory, 0, 8 << 20, wanted), Ok(None));
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn transfer_id__depends_on_all_that_it_is_made_of() {
        let id = transfer_id(b"a", 1, 2, 3);
        assert_eq!(id, transfer_id(b"a", 1, 2, 3));
        for other in [
            transfer_id(b"b", 1, 2, 3),
            transfer_id(b"a", 2, 2, 3),
            transfer_id(b"a", 1, 3, 3),
            transfer_id(b"a", 1, 2, 4),
        ] {
            assert_ne!(id, other);
        }
    }

    #[test]
    fn crc64_of__a_part_over_several_chunks() {
        let memory = AnonymousMemory::new(3 * CHUNK).unwrap();
        let bytes: Vec<u8> = (0..2 * CHUNK + 77).map(|i| (i * 31 + i / 251) as u8).collect();
        memory.write(5, &bytes).unwrap();
        let mut crc = Crc64::default();
        crc.update(&bytes);
        assert_eq!(crc64_of(&memory, 5, bytes.len() as u64), Ok(crc.value()));
        assert_eq!(crc64_of(&memory, 5, 0), Ok(Crc64::default().value()));
        assert_eq!(crc64_of(&memory, 3 << 20, 1), Err(Fault::Unmapped));
    }
}
