//! Buffers of a program that its peer writes at an offset: `riomap`, `riounmap`, `riowrite`.

use std::ffi::c_int;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Memory, MemoryRegion};
use rdmux_wire::rsocket::{Iomap, Order, Target};

use super::resources::BUFFERS;

/// A buffer that the program has mapped.
struct Own {
    mr: MemoryRegion,
    /// Offset by which the peer knows it, and its index in the peer's table; `None`: it is not for the peer.
    shown: Option<(u64, u16)>,
    told: bool,
}

pub(super) struct Iomaps {
    own: Vec<Own>,
    /// Numbers of entries of the table here, and of the peer's.
    here: u16,
    there: u16,
}

/// A location in the peer's memory.
pub(super) struct Mapped {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    /// Number of bytes from there on.
    pub(super) bytes: u64,
}

impl Iomaps {
    pub(super) fn new(here: u16, there: u16) -> Iomaps {
        Iomaps {
            own: Vec::new(),
            here,
            there,
        }
    }

    /// Keeps a buffer. With an offset, the peer learns of it before the next data.
    ///
    /// # Errors
    /// `ENOMEM`: the peer's table is full.
    pub(super) fn add(&mut self, mr: MemoryRegion, offset: Option<u64>) -> Result<(), c_int> {
        let is_free = |index: &u16| {
            !self
                .own
                .iter()
                .any(|own| own.shown.is_some_and(|(_, at)| at == *index))
        };
        let shown = match offset {
            Some(offset) => Some((offset, (0..self.there).find(is_free).ok_or(libc::ENOMEM)?)),
            None => None,
        };
        let told = shown.is_none();
        self.own.push(Own { mr, shown, told });
        Ok(())
    }

    /// Removes a buffer: the peer no longer reaches it.
    pub(super) fn remove(&mut self, address: u64, length: u64) -> Result<(), c_int> {
        let is_it = |own: &Own| own.mr.iova() == address && own.mr.length() == length;
        let at = self.own.iter().position(is_it).ok_or(libc::EINVAL)?;
        self.own.remove(at);
        Ok(())
    }

    /// Returns whether the peer knows of all buffers.
    pub(super) fn are_told(&self) -> bool {
        self.own.iter().all(|own| own.told)
    }

    /// Returns the next buffer to report to the peer: its index, and the entry.
    pub(super) fn tell_next(&mut self, order: Order) -> Option<(u16, [u8; Iomap::LEN])> {
        let own = self.own.iter_mut().find(|own| !own.told)?;
        own.told = true;
        let (offset, index) = own.shown?;
        let target = Target {
            addr: own.mr.iova(),
            rkey: own.mr.rkey().0,
            length: own.mr.length() as u32,
        };
        let mut entry = [0; Iomap::LEN];
        Iomap { offset, target }.emit(&mut entry, order);
        Some((index, entry))
    }

    /// Returns the location of an offset in the peer's memory.
    ///
    /// # Errors
    /// `EINVAL`: the peer has mapped nothing there.
    pub(super) fn find(&self, tables: &AnonymousMemory, offset: u64) -> Result<Mapped, c_int> {
        for index in 0..u64::from(self.here) {
            let at = BUFFERS * Target::LEN as u64 + index * Iomap::LEN as u64;
            let mut entry = [0; Iomap::LEN];
            tables.read(at, &mut entry).map_err(|_| libc::EINVAL)?;
            let iomap = Iomap::parse(&entry, Order::NATIVE).map_err(|_| libc::EINVAL)?;
            let inside = offset.checked_sub(iomap.offset);
            if let Some(inside) = inside.filter(|inside| *inside < iomap.target.length.into()) {
                return Ok(Mapped {
                    addr: iomap.target.addr.wrapping_add(inside),
                    rkey: iomap.target.rkey,
                    bytes: u64::from(iomap.target.length) - inside,
                });
            }
        }
        Err(libc::EINVAL)
    }
}
