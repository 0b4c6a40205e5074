//! Bytes that are read at once for several packets of one quantum, for memory where each access costs a system call
//! ([`crate::Memory::gathers`]).

use rdmux_wire::{Psn, RKey};

use crate::qp::execute::GATHER_BYTES;

/// Source of the bytes of the packets of a quantum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The request whose first packet has this PSN.
    Request(Psn),
    /// A region that the peer reads.
    Region(RKey),
}

/// Bytes read from one source in the current quantum.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    known: Known,
    /// Keeps its length, so that it is zeroed once: the first `filled` bytes belong to the source.
    bytes: Vec<u8>,
    filled: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Known {
    #[default]
    Nothing,
    /// The source's memory is read packet by packet at no higher cost.
    Plain(Origin),
    /// The buffer holds the source's bytes from this offset on.
    From(Origin, u64),
}

impl ReadAhead {
    /// Forgets the bytes read: another quantum begins, and the memory may have changed.
    pub(crate) fn forget(&mut self) {
        self.known = Known::Nothing;
    }

    /// Returns the `len` bytes at `at` of a source. The caller is about to ask for `left` bytes; unless the buffer holds the first
    /// `len`, this reads as many of them at once as fit. Returns `None` when there is nothing to gain: no more than `len` bytes are
    /// left, or the source's memory does not gather.
    pub(crate) fn bytes<E>(
        &mut self,
        source: Origin,
        at: u64,
        len: usize,
        left: usize,
        gathers: impl FnOnce() -> bool,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Option<&[u8]>, E> {
        match self.known {
            Known::Plain(of) if of == source => return Ok(None),
            Known::From(of, begin) if of == source => {
                let here = at.checked_sub(begin).and_then(|here| usize::try_from(here).ok());
                if let Some(here) = here.filter(|here| here + len <= self.filled) {
                    return Ok(Some(&self.bytes[here..here + len]));
                }
            }
            _ if left <= len => return Ok(None),
            _ if !gathers() => {
                self.known = Known::Plain(source);
                return Ok(None);
            }
            _ => {}
        }
        self.known = Known::Nothing;
        let filled = left.min(GATHER_BYTES);
        if filled <= len {
            return Ok(None);
        }
        if self.bytes.len() < filled {
            self.bytes.resize(filled, 0);
        }
        read(&mut self.bytes[..filled])?;
        (self.known, self.filled) = (Known::From(source, at), filled);
        Ok(Some(&self.bytes[..len]))
    }
}
