//! Bytes that a connection has to send: headers, and between them data, which stay in their buffers.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;

use crc_fast::{CrcAlgorithm, checksum};
use rdmux_wire::nvme_tcp::{DIGEST_LEN, DataLayout, Flags, HEADER_LEN_MAX, Header};

/// Bytes that are sent stay until all are, or so many.
const SENT_MAX: usize = 64 << 10;

/// Bytes to be sent, in their order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Headers and digests; those before `at` are sent.
    bytes: Vec<u8>,
    at: usize,
    parts: VecDeque<Part>,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    /// So many of the bytes.
    Bytes(usize),
    /// A range of the data of a slot.
    Data { slot: u16, at: usize, end: usize },
}

impl Outbox {
    /// Appends the header of a PDU, with its digest and the padding before data.
    pub(crate) fn push(&mut self, header: &Header, flags: Flags, layout: DataLayout) {
        let mut bytes = [0; 2 * HEADER_LEN_MAX + DIGEST_LEN];
        let common = header.emit(flags, layout, &mut bytes);
        let end = common.kind.header_len();
        if common.flags.contains(Flags::HEADER_DIGEST) {
            let digest = checksum(CrcAlgorithm::Crc32Iscsi, &bytes[..end]) as u32;
            bytes[end..end + DIGEST_LEN].copy_from_slice(&digest.to_le_bytes());
        }
        self.push_bytes(&bytes[..common.data_offset]);
    }

    /// Appends bytes.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        match self.parts.back_mut() {
            Some(Part::Bytes(len)) => *len += bytes.len(),
            _ => self.parts.push_back(Part::Bytes(bytes.len())),
        }
    }

    /// Appends a range of the data of a slot.
    pub(crate) fn push_data(&mut self, slot: u16, range: Range<usize>) {
        self.parts.push_back(Part::Data {
            slot,
            at: range.start,
            end: range.end,
        });
    }

    /// Returns the bytes of headers that wait.
    pub(crate) fn unsent_bytes(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Fills in what is to be sent next, and returns the number of slices. `data` returns the data of a slot.
    pub(crate) fn slices<'a>(&'a self, data: impl Fn(u16) -> &'a [u8], slices: &mut [IoSlice<'a>]) -> usize {
        let mut bytes = &self.bytes[self.at..];
        for (slice, part) in slices.iter_mut().zip(&self.parts) {
            *slice = IoSlice::new(match *part {
                Part::Bytes(len) => {
                    let (part, rest) = bytes.split_at(len);
                    bytes = rest;
                    part
                }
                Part::Data { slot, at, end } => &data(slot)[at..end],
            });
        }
        slices.len().min(self.parts.len())
    }

    /// Takes note of `left` bytes that were sent, until a range of the data of a slot is: then it returns that slot, and is to be called again.
    pub(crate) fn sent(&mut self, left: &mut usize) -> Option<u16> {
        loop {
            match self.parts.front_mut()? {
                Part::Bytes(len) => {
                    let sent = (*left).min(*len);
                    (*left, *len, self.at) = (*left - sent, *len - sent, self.at + sent);
                    if *len > 0 {
                        return None;
                    }
                }
                Part::Data { slot, at, end } => {
                    let sent = (*left).min(*end - *at);
                    (*left, *at) = (*left - sent, *at + sent);
                    if at < end {
                        return None;
                    }
                    let slot = *slot;
                    self.parts.pop_front();
                    return Some(slot);
                }
            }
            self.parts.pop_front();
            if self.at == self.bytes.len() || self.at > SENT_MAX {
                self.bytes.drain(..self.at);
                self.at = 0;
            }
        }
    }
}
