//! Naps of the leader. A leader that sleeps on descriptors needs four system calls for a message of a process on this host, the peer's
//! included: `poll`, and the byte in and out of a doorbell. A leader that naps, in a futex on the words of its links, needs two, and wakes
//! sooner. A napper sees no datagram, so the engine's thread *guards* meanwhile: it sleeps in its epoll set, where the sockets
//! wake it, and reads them. What it then completes wakes the napper, as every completion that another thread takes in does.
//!
//! That costs two wake-ups for a datagram. So a leader naps only while no datagram comes or goes: messages of other hosts wake the leader
//! directly, which sleeps on descriptors then. The thread begins to guard when it looks at the state of things, after at most a lease, and
//! is not woken for that; until then the leader sleeps on descriptors.
//!
//! A leader naps only beside a thread that guards. The thread goes on to guard while a leader naps, and otherwise watches by itself,
//! sockets and doorbells. So somebody watches the sockets at any time.

use std::sync::OnceLock;
use std::time::Duration;

use rdmux_rnic::Time;
use rdmux_shm::{NapWord, nap};
use rdmux_verbs::provider::Nap;

use super::sleep::timespec;
use super::{Core, Engine, RECEIVES_PER_PASS};

/// Time without datagrams after which a leader may nap: many wake-ups, so that a message that the thread has to pass on is a rare one.
const SILENCE_NS: u64 = 10_000_000;

impl Core {
    /// Begins a sleep of the leader; returns whether it is a nap. [`Core::end_sleep`] ends it. `None`: something is there already, and nobody
    /// sleeps.
    pub(super) fn begin_sleep(&mut self, now: Time, nap: &Nap, words: &mut Vec<NapWord>) -> Option<bool> {
        let may = self.naps && self.guarded && !self.is_watched && self.looks.silence_ns(now) >= SILENCE_NS;
        if !may || !self.links.can_nap() {
            return self.links.prepare_sleep().then_some(false);
        }
        if !self.links.prepare_nap(words) {
            return None;
        }
        self.napping = true;
        #[cfg(test)]
        {
            self.napped += 1;
        }
        nap.begin();
        Some(true)
    }

    /// Ends the leader's sleep.
    pub(super) fn end_sleep(&mut self, naps: bool, nap: &Nap) {
        if !naps {
            return self.links.awake();
        }
        self.napping = false;
        nap.end();
        self.links.end_nap();
    }

    /// Returns whether the thread is to guard while a leader is in its place.
    fn is_to_guard(&mut self, now: Time) -> bool {
        let leader_slept = std::mem::take(&mut self.leader_slept);
        self.napping
            || leader_slept
                && self.naps
                && self.looks.silence_ns(now) >= SILENCE_NS
                && self.links.can_nap()
                && is_supported()
    }
}

impl Engine {
    /// Lets the thread sleep while callers are in its place: until somebody wakes it, or for a time. Returns false if that is over. Beside a
    /// leader that naps it guards.
    pub(super) fn rest(&self, timeout: Option<Duration>) -> bool {
        {
            let mut core = self.lock();
            core.guarded = core.is_to_guard(self.now());
            let guards = core.guarded;
            self.report_to_thread(&mut core, guards);
            if !guards {
                drop(core);
                return self.kick.wait(timeout);
            }
        }
        let timeout = timeout.map(|timeout| timespec(timeout.as_nanos() as u64));
        let happened = self.epoll.wait_for(self, timeout.as_ref());
        if happened.arrivals {
            let mut core = self.lock();
            core.thread_reported = false;
            let now = self.now();
            core.receive(now, RECEIVES_PER_PASS);
            // A doorbell that stays rung would end each sleep.
            core.links.answer_doorbells();
            core.finish(now, true);
            // The peer has rung for the ends of requests, perhaps, and does so again only when it is asked to.
            while !core.links.announce_nap() {
                core.receive(now, 1);
                core.finish(now, true);
            }
            self.wake_early(&core);
        }
        happened.kicked || happened.arrivals
    }
}

fn is_supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(nap::is_supported)
}

#[cfg(test)]
mod tests;
