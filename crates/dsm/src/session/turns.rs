//! Turns at the driver: whoever holds it takes them, one thread at a time. The last thread that sleeps ensures
//! that incoming frames and completions wake the service thread; the last one that leaves sets an alarm, at which the service thread takes turns.
//!
//! A thread that waits counts among the pollers, takes turns, and looks after each whether it has what it waits for. When it sleeps it holds the
//! driver until the condition variable has it, so nothing changes between its last look and its sleep. Somebody always takes what comes: a
//! poller; or the service thread, which is awake, or sleeps on descriptors that become readable, that of the alarm among them.

mod driving;

use crate::driver::Driver;
use crate::driver::rest::rest;
use crate::stat::NodeCounter;

pub(crate) use self::driving::{Drive, Driving, Pause, Service, Turns};

/// Locks, atomics, functions of the system and limits that the turns need.
mod sync {
    pub(super) use std::hint::spin_loop;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32 as Pollers, AtomicU32 as Sleepers, Ordering};
    pub(super) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

    pub(super) use rdmux_verbs::provider::Waker;

    use super::super::LOOK;
    pub(super) use super::super::alarm::Alarm;

    /// Turns of a waiting thread, of which the last one drives the device; where packets carry frames, each does.
    pub(super) const TURNS: u32 = 64;

    /// Times that a thread prepares for rest before it wakes the service thread.
    pub(super) const RESTS: u32 = 4;

    /// Sleeps while nothing has changed, or for a while. Returns with the guard held.
    pub(super) fn wait_while<'a, T>(
        changed: &Condvar,
        guard: MutexGuard<'a, T>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let slept = changed.wait_timeout_while(guard, LOOK, condition);
        slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drive for Driver {
    fn turn(&mut self, thoroughly: bool) -> bool {
        Driver::turn(self, thoroughly)
    }

    fn uses_packets(&self) -> bool {
        Driver::uses_packets(self)
    }

    fn rest(&mut self) -> bool {
        rest(self)
    }

    fn tell_awake(&mut self) {
        Driver::tell_awake(self);
    }

    fn settle(&mut self, stage: NodeCounter) {
        Driver::settle(self);
        self.count_events(stage);
    }

    fn changes(&self) -> u64 {
        Driver::changes(self)
    }
}

#[cfg(test)]
mod tests;
