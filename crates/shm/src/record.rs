//! The bytes of a record of a ring.

use rdmux_memory::ApplicationMemory;
use rdmux_memory::mapping::Mapping;
use rdmux_rnic::{Fault, Memory, PeerFault, RingBytes, Room};

use crate::grant::mapping_of;
use crate::ring::payload_offset;
use crate::segment::Area;

/// Bytes of the buffer on the stack for copies between a record and a memory that is not mapped here.
const BUFFER_BYTES: usize = 4096;

/// The bytes of a record that the ring has found to lie within it.
#[derive(Debug)]
pub(crate) struct RecordBytes<'a> {
    mapping: &'a Mapping,
    begin: u64,
}

impl<'a> RecordBytes<'a> {
    pub(crate) fn new(area: &'a Area, slot: u32) -> RecordBytes<'a> {
        RecordBytes {
            mapping: area.mapping(),
            begin: (area.begin() + payload_offset(slot)) as u64,
        }
    }

    /// Returns the bytes from an offset on.
    pub(crate) fn from(self, at: usize) -> RecordBytes<'a> {
        RecordBytes {
            begin: self.at(at),
            ..self
        }
    }

    fn at(&self, at: usize) -> u64 {
        self.begin + at as u64
    }
}

/// Calls `f` for each piece of a length that fits a buffer, with the piece's offset and the buffer.
fn by_buffer(len: usize, mut f: impl FnMut(usize, &mut [u8]) -> Result<(), Fault>) -> Result<(), Fault> {
    let mut buffer = [0; BUFFER_BYTES];
    let mut done = 0;
    while done < len {
        let n = (len - done).min(BUFFER_BYTES);
        f(done, &mut buffer[..n])?;
        done += n;
    }
    Ok(())
}

fn application(memory: &dyn Memory) -> Option<&ApplicationMemory> {
    memory.as_any()?.downcast_ref()
}

impl Room for RecordBytes<'_> {
    #[inline]
    fn write(&self, at: usize, bytes: &[u8]) {
        // The ring has checked that the range is inside, here and below.
        let _ = self.mapping.copy_in(self.at(at), bytes);
    }

    fn write_from(&self, at: usize, from: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault> {
        if let Some((own, own_at)) = mapping_of(from, offset, len as u64) {
            let copied = self.mapping.write_from(self.at(at), own, own_at, len as u64);
            return copied.map_err(|error| error.fault());
        }
        if let Some(own) = application(from) {
            return own.copy_to(offset, self.mapping, self.at(at), len as u64);
        }
        by_buffer(len, |done, buffer| {
            from.read(offset + done as u64, buffer)?;
            self.write(at + done, buffer);
            Ok(())
        })
    }
}

impl RecordBytes<'_> {
    #[inline]
    pub(crate) fn copy_out(&self, at: usize, out: &mut [u8]) {
        let _ = self.mapping.read(self.at(at), out);
    }

    fn copy_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault> {
        if let Some((own, own_at)) = mapping_of(to, offset, len as u64) {
            let copied = own.write_from(own_at, self.mapping, self.at(at), len as u64);
            return copied.map_err(|error| error.fault());
        }
        if let Some(own) = application(to) {
            return own.copy_from(offset, self.mapping, self.at(at), len as u64);
        }
        by_buffer(len, |done, buffer| {
            self.copy_out(at + done, buffer);
            to.write(offset + done as u64, buffer)
        })
    }
}

/// The bytes of a request that holds its payload.
#[derive(Debug)]
pub struct HeldBytes<'a> {
    bytes: RecordBytes<'a>,
    len: usize,
}

impl<'a> HeldBytes<'a> {
    pub(crate) fn new(bytes: RecordBytes<'a>, len: usize) -> HeldBytes<'a> {
        HeldBytes { bytes, len }
    }
}

impl RingBytes for HeldBytes<'_> {
    #[inline]
    fn bytes(&self) -> usize {
        self.len
    }

    #[inline]
    fn held(&self) -> usize {
        self.len
    }

    #[inline]
    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        self.bytes.copy_out(at, out);
        Ok(())
    }

    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault> {
        self.bytes.copy_to(at, to, offset, len).map_err(PeerFault::Own)
    }
}
