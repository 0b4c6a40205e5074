//! Memory of a peer that this process reaches itself.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rdmux_rnic::{Fault, Memory, PeerFault, PeerMemory};

use super::segment::{Segment, Side};
use crate::mapping::{CopyError, Mapping, Way};
use crate::memory::AnonymousMemory;

/// Bytes copied between two looks at the grant: taking one back waits for a copy of that many.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of a copy through the stack.
const BUFFER_BYTES: usize = 4096;

/// How a peer's memory is reached.
#[derive(Debug)]
pub(super) enum Reach {
    /// It is mapped here too.
    Mapped(Mapping),
    /// The kernel copies between the processes; offsets are the peer's addresses.
    Process(i32),
}

/// A grant of a peer. Used under the engine's lock alone: an end of a link is inside of one grant at a time.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) reach: Reach,
    pub(super) segment: Arc<Segment>,
    /// Our side of the link.
    pub(super) side: Side,
    pub(super) index: u32,
    pub(super) generation: u32,
    /// The link stands.
    pub(super) open: Arc<AtomicBool>,
}

impl Granted {
    /// Whether it has not been taken back.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        let grant = self.segment.grant(self.side.other(), self.index);
        grant.load(Ordering::Acquire) == self.generation && self.open.load(Ordering::Relaxed)
    }

    /// Calls `f` while the grant holds, and lets its owner see that somebody is inside.
    #[inline]
    fn inside<R>(&self, f: impl FnOnce() -> Result<R, PeerFault>) -> Result<R, PeerFault> {
        let inside = self.segment.inside(self.side);
        let entered = inside.load(Ordering::Relaxed) | 1;
        inside.store(entered, Ordering::Relaxed);
        // The owner takes the grant back and then looks whether somebody is inside; here it is the other way round.
        fence(Ordering::SeqCst);
        let result = if self.holds() { f() } else { Err(PeerFault::Ended) };
        inside.store(entered.wrapping_add(1), Ordering::Release);
        result
    }

    /// Copies between `own`, which is mapped, and the peer's memory.
    fn copy(&self, at: u64, own: &Mapping, own_at: u64, length: u64, way: Way) -> Result<(), PeerFault> {
        let mut done = 0;
        while done < length {
            let n = (length - done).min(PIECE_BYTES);
            let (at, own_at) = (at + done, own_at + done);
            self.inside(|| {
                let copied = match (&self.reach, way) {
                    (Reach::Mapped(theirs), Way::ToProcess) => theirs.write_from(at, own, own_at, n),
                    (Reach::Mapped(theirs), Way::FromProcess) => {
                        own.write_from(own_at, theirs, at, n).map_err(CopyError::swapped)
                    }
                    (Reach::Process(pid), way) => own.copy_process(own_at, *pid, at, n, way),
                };
                copied.map_err(|error| match error {
                    CopyError::From(fault) => PeerFault::Own(fault),
                    CopyError::To(_) => PeerFault::Ended,
                })
            })?;
            done += n;
        }
        Ok(())
    }

    /// Copies piece by piece through a buffer.
    fn copy_buffered(
        &self,
        length: u64,
        mut copy: impl FnMut(&mut [u8], u64) -> Result<(), PeerFault>,
    ) -> Result<(), PeerFault> {
        let mut buffer = [0; BUFFER_BYTES];
        let mut done = 0;
        while done < length {
            let n = (length - done).min(BUFFER_BYTES as u64);
            copy(&mut buffer[..n as usize], done)?;
            done += n;
        }
        Ok(())
    }

    fn read_bytes(&self, at: u64, out: &mut [u8]) -> Result<(), PeerFault> {
        let ended = |_: Fault| PeerFault::Ended;
        self.inside(|| match &self.reach {
            Reach::Mapped(theirs) => theirs.read(at, out).map_err(ended),
            Reach::Process(pid) => Mapping::read_process(*pid, at, out).map_err(ended),
        })
    }
}

impl PeerMemory for Granted {
    #[inline]
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        match mapping_of(from) {
            Some(own) => self.copy(offset, own, from_offset, length, Way::ToProcess),
            None => self.copy_buffered(length, |buffer, done| {
                from.read(from_offset + done, buffer).map_err(PeerFault::Own)?;
                self.write_bytes(offset + done, buffer)
            }),
        }
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        let ended = |_: Fault| PeerFault::Ended;
        self.inside(|| match &self.reach {
            Reach::Mapped(theirs) => theirs.write(offset, bytes).map_err(ended),
            Reach::Process(pid) => Mapping::write_process(*pid, offset, bytes).map_err(ended),
        })
    }

    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault> {
        match mapping_of(to) {
            Some(own) => self.copy(offset, own, to_offset, length, Way::FromProcess),
            None => self.copy_buffered(length, |buffer, done| {
                self.read_bytes(offset + done, buffer)?;
                to.write(to_offset + done, buffer).map_err(PeerFault::Own)
            }),
        }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[inline]
fn mapping_of(memory: &dyn Memory) -> Option<&Mapping> {
    let any = memory.as_any()?;
    any.downcast_ref::<AnonymousMemory>()
        .map(AnonymousMemory::mapping)
}
