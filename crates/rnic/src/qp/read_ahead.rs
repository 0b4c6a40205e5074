//! Bytes read at once for several packets of one turn, where each access to memory costs a system call ([`crate::Memory::gathers`]).

use rdmux_wire::{Psn, RKey};

use crate::qp::execute::GATHER_BYTES;

/// What packets of a turn take their bytes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The request whose first packet has this PSN.
    Request(Psn),
    /// A region that the peer reads.
    Region(RKey),
}

/// What was read of one source in the turn under way.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    known: Known,
    /// Keeps its length, so that it is cleared once: `filled` of it are the source's.
    bytes: Vec<u8>,
    filled: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Known {
    #[default]
    Nothing,
    /// Its memory is as well read packet by packet.
    Plain(Origin),
    /// Its bytes from there are here.
    From(Origin, u64),
}

impl ReadAhead {
    /// Forgets what was read: another turn begins, and the memory may have changed.
    pub(crate) fn forget(&mut self) {
        self.known = Known::Nothing;
    }

    /// The `len` bytes at `at` of a source, of which as many as `left` are about to be asked for, read with others where they are not
    /// here yet. `None`: there is nothing to gain, since they are all that is left, or its memory does not gather.
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
