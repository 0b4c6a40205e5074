//! Peers that may still be writing to memory that was revoked from them.
//!
//! The engine waits only briefly, under its lock, for a peer whose grant is revoked while the peer writes. If the peer does not leave,
//! because the system has stopped it or runs something else on its CPU, the engine keeps its *stay*. Whoever gives the memory back to the
//! program (deregistration, the end of a queue pair) waits for the stays that concern it, without the lock.
//!
//! A stay ends when the peer leaves or its process ends. The gate also ends the stay of a peer in a call of the kernel: once the gate is
//! closed, the kernel shows whether the call is over or will fail, however long the peer is stopped (`gate.rs`). A peer that has
//! mapped the memory copies in user space; only its own progress, or its death, ends that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_rnic::{LKey, Qpn};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::gate::Gate;
use crate::grant::Process;
use crate::revocation;
use crate::segment::{GrantWords, Segment, Side};

/// Time for which the engine waits for a running peer, which copies a mebibyte at a time.
const BRIEFLY: Duration = Duration::from_micros(100);
/// Interval between two checks of a stopped peer; its death is noticed at once.
const LOOK_AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// A region that was granted to the peer of a queue pair.
#[derive(Clone, Debug)]
pub struct Given {
    /// The queue pair, whose peer has the grant.
    pub qpn: Qpn,
    /// The region.
    pub lkey: LKey,
    /// Set when the region is lent to the peer, which did not ask for it ([`crate::lend`]).
    pub(crate) lent: bool,
    pub(crate) generation: u32,
    /// Gate of the peer's calls, whose address stays reserved as long as the grant lasts; `None` if the peer maps all of the memory.
    pub(crate) gate: Option<Arc<Gate>>,
    /// Set when the peer maps the memory, or some of it: then the gate does not show where the peer is.
    pub(crate) mapped: bool,
}

/// A peer that was inside of a grant when that was revoked.
#[derive(Debug)]
pub struct Stay {
    pub(crate) given: Given,
    /// The peer's entry, and the place of its word.
    pub(crate) entry: u32,
    pub(crate) place: u32,
    pub(crate) segment: Arc<Segment>,
    /// The peer's side.
    pub(crate) holder: Side,
    pub(crate) process: Option<Arc<Process>>,
    /// Hangs up when the peer ends.
    pub(crate) doorbell: Arc<OwnedFd>,
}

impl Stay {
    /// Returns whether the peer can no longer reach the memory, whatever it does.
    pub fn is_over(&self) -> bool {
        self.is_past_the_gate() || self.has_left()
    }

    /// Returns whether the peer has left, or its process has ended.
    fn has_left(&self) -> bool {
        let words = GrantWords {
            segment: &self.segment,
            holder: self.holder,
        };
        revocation::has_left(&words, self.place, self.entry) || self.peer_has_ended(&NOT_AT_ALL)
    }

    /// Returns whether the peer's call is over, or will fail.
    fn is_past_the_gate(&self) -> bool {
        if self.given.mapped {
            return false;
        }
        let gate = self.given.gate.as_ref();
        match gate.and_then(|gate| gate.last_through(self.place)) {
            None => false,
            Some(last) if last != self.entry => true,
            Some(_) => self.segment.left(self.holder, self.place).load(Ordering::Acquire) == self.entry,
        }
    }

    /// Returns whether the peer's process has ended, or ends within a time.
    fn peer_has_ended(&self, within: &Timespec) -> bool {
        let (fd, flags) = match &self.process {
            Some(process) => (process.fd(), PollFlags::IN),
            None => (self.doorbell.as_fd(), PollFlags::RDHUP),
        };
        poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(within)).is_ok_and(|n| n > 0)
    }

    fn wait(&self) {
        // Most peers run, and have left by this time. Closing a gate ends all grants that use it.
        if self.has_left() {
            return;
        }
        self.close_gate();
        while !self.is_over() && !self.peer_has_ended(&LOOK_AGAIN) {
            // The system may have had no room to close it.
            self.close_gate();
        }
    }

    /// Closes the gate of the peer's calls, if there is one.
    pub fn close_gate(&self) {
        if let Some(gate) = &self.given.gate {
            gate.close();
        }
    }
}

const NOT_AT_ALL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Waits until each of the stays is over. The caller must not hold the engine's lock.
pub fn wait(stays: &[Arc<Stay>]) {
    for stay in stays {
        stay.wait();
    }
}

/// Stays of an engine's peers.
#[derive(Debug, Default)]
pub struct Stays {
    list: Mutex<Vec<Arc<Stay>>>,
}

impl Stays {
    pub(crate) fn add(&self, stay: Stay) {
        let mut list = self.list();
        // An entry belongs to one grant: a later grant at the same index has nothing to do with it.
        let is_known = |known: &Arc<Stay>| {
            (known.place, known.entry) == (stay.place, stay.entry)
                && Arc::ptr_eq(&known.segment, &stay.segment)
        };
        if !list.iter().any(is_known) {
            list.push(Arc::new(stay));
        }
    }

    /// Returns the stays of some grants whose peers have not left. (The waiter checks whether the gates have ended them: the kernel may be
    /// slow to answer.)
    pub fn of(&self, is_it: impl Fn(&Given) -> bool) -> Vec<Arc<Stay>> {
        let mut list = self.list();
        // A later call writes to the gate's address, so the address stays reserved until the peer leaves.
        list.retain(|stay| !stay.has_left());
        let concerns = |stay: &&Arc<Stay>| is_it(&stay.given);
        list.iter().filter(concerns).cloned().collect()
    }

    /// Waits a moment for the peers of some grants to leave, as running peers do.
    pub fn wait_briefly(&self, is_it: impl Fn(&Given) -> bool) {
        let since = Instant::now();
        while !self.of(&is_it).is_empty() && since.elapsed() < BRIEFLY {
            std::hint::spin_loop();
        }
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Stay>>> {
        self.list.lock()
    }
}

impl Drop for Stays {
    fn drop(&mut self) {
        for stay in self.list().drain(..) {
            if !stay.has_left() {
                // Keeps the gate's address reserved, as above.
                std::mem::forget(stay);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    /// A closed gate shows that a peer's call is over, but nothing of a peer that copies by a mapping.
    #[test]
    fn is_over__by_the_gate_only_if_the_peer_maps_nothing() {
        let (segment, _file) = Segment::create().unwrap();
        let (_, socket) = std::os::unix::net::UnixStream::pair().unwrap();
        let doorbell = Arc::new(OwnedFd::from(socket.try_clone().unwrap()));
        for mapped in [false, true] {
            let gate = Arc::new(Gate::new().unwrap());
            let stay = Stay {
                given: Given {
                    qpn: Qpn::new(7),
                    lkey: LKey(0x700),
                    lent: false,
                    generation: 1,
                    gate: Some(gate),
                    mapped,
                },
                entry: 5,
                place: 2,
                segment: Arc::clone(&segment),
                holder: Side::Asking,
                process: None,
                doorbell: Arc::clone(&doorbell),
            };
            stay.close_gate();
            assert_eq!(stay.is_past_the_gate(), !mapped);
        }
    }
}
