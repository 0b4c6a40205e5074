//! Bytes read at once for several packets of one turn, where each access to memory costs a system call ([`crate::Memory::gathers`]).

use crate::qp::execute::GATHER_BYTES;

/// What was read of one source in the turn under way.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    /// Which source the bytes are of, and where in it they begin.
    of: Option<(u32, u64)>,
    /// Keeps its length, so that it is cleared once: `filled` of it are the source's.
    bytes: Vec<u8>,
    filled: usize,
}

impl ReadAhead {
    /// Forgets what was read: another turn begins, and the memory may have changed.
    pub(crate) fn forget(&mut self) {
        self.of = None;
    }

    /// The `len` bytes at `at` of a source, of which as many as `left` are about to be asked for, read with others where they are not
    /// here yet. `None`: they are all that is left, and there is nothing to gain.
    pub(crate) fn bytes<E>(
        &mut self,
        source: u32,
        at: u64,
        len: usize,
        left: usize,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Option<&[u8]>, E> {
        let here = self.of.filter(|(of, _)| *of == source);
        let here = here.and_then(|(_, begin)| usize::try_from(at.checked_sub(begin)?).ok());
        if let Some(here) = here.filter(|here| here + len <= self.filled) {
            return Ok(Some(&self.bytes[here..here + len]));
        }
        let filled = left.min(GATHER_BYTES);
        if filled <= len {
            return Ok(None);
        }
        if self.bytes.len() < filled {
            self.bytes.resize(filled, 0);
        }
        self.of = None;
        read(&mut self.bytes[..filled])?;
        (self.of, self.filled) = (Some((source, at)), filled);
        Ok(Some(&self.bytes[..len]))
    }
}
