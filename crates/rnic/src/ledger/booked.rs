//! Memory whose accesses by an RNIC are booked.

use std::sync::Arc;

use super::{Class, Ledger, Location, Route};
use crate::memory::{Atomic, Fault, Medium, Memory, Placement};

/// Memory as the device of a region reaches it, which books what the device reads and writes: on the RNIC's link to the memory, and as payload on the wire.
///
/// A service registers this in place of the memory, and keeps the memory for its own accesses, which are not booked. All accesses have to pass here: so peers on the
/// host do not map it, and the device reads and writes it for them. A provider whose device accesses memory by itself, an RNIC of the host, does not take it.
#[derive(Debug)]
pub struct Booked {
    memory: Arc<dyn Memory>,
    ledger: Arc<Ledger>,
    class: Class,
}

impl Booked {
    /// Returns the memory for a region that is for a class of bytes; without a ledger the memory itself.
    pub fn wrap(memory: Arc<dyn Memory>, ledger: Option<&Arc<Ledger>>, class: Class) -> Arc<dyn Memory> {
        match ledger {
            None => memory,
            Some(ledger) => Arc::new(Booked {
                memory,
                ledger: ledger.clone(),
                class,
            }),
        }
    }

    fn book<T>(&self, result: Result<T, Fault>, bytes: usize) -> Result<T, Fault> {
        if result.is_ok() {
            for route in [Route::Wire, Route::Nic(self.memory.location())] {
                self.ledger.book(route, self.class, bytes as u64);
            }
        }
        result
    }
}

impl Memory for Booked {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.book(self.memory.read(offset, out), out.len())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.book(self.memory.write(offset, bytes), bytes.len())
    }

    fn write_in_any_order(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.book(self.memory.write_in_any_order(offset, bytes), bytes.len())
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.book(self.memory.atomic(offset, atomic), 8)
    }

    fn medium(&self) -> Option<Medium> {
        self.memory.medium()
    }

    fn read_at_once(&self, offset: u64, out: &mut [u8]) -> Option<Result<(), Fault>> {
        let result = self.memory.read_at_once(offset, out)?;
        Some(self.book(result, out.len()))
    }

    fn location(&self) -> Location {
        self.memory.location()
    }

    fn placement(&self) -> Placement {
        self.memory.placement()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.memory.flush_is_immediate(placement)
    }

    fn gathers(&self) -> bool {
        self.memory.gathers()
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.memory.flush(offset, length, placement)
    }
}
