//! Polls of a quiet engine. A caller that spins drives the engine at every poll that finds nothing: it reads the clock, and looks at
//! links, timers and sockets. What arrives in the middle of that is noticed late. So after two drives in a row that have found nothing, and
//! have left nothing to do before somebody else does something, the next polls only look at the words that a peer's next step changes; for
//! as long as everything else may be late.
//!
//! Such a poll holds the engine's lock as a drive does, and whoever takes the lock for anything else ends the quiet ([`Quiet::end`]): so
//! what was true when it began is true. Without the lock, others only put completions into queues, at which callers look before they
//! poll, and leave items beside the lock, for which a quiet poll looks when it unlocks.

use rdmux_rnic::Time;

use super::{Core, SERVE_NS};

/// Duration of the quiet. Datagrams, timers and messages of other engines, which only a drive notices, are late by about as much at most:
/// less than a datagram takes.
const QUIET_NS: u64 = 2_000;
/// Most polls of that duration: as many as the fastest caller makes in it.
const POLLS_MAX: u64 = 128;

/// The quiet of an engine.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    /// Number of polls for which it lasts; 0: the engine is not quiet.
    polls: u32,
    /// Time of the last drive by a poll, number of polls by then, and whether it found nothing.
    driven: (Time, u32),
    idle: bool,
}

impl Quiet {
    /// Makes the next poll drive.
    #[inline]
    pub(super) fn end(&mut self) {
        self.polls = 0;
    }

    /// Begins a quiet of as many polls as take [`QUIET_NS`] at the pace of those between the last two drives: callers do other work between
    /// their polls, too.
    fn begin(&mut self, (since, before): (Time, u32), now: Time, polls: u32) {
        let count = u64::from(polls.wrapping_sub(before));
        let fit = count * QUIET_NS / now.since_ns(since).max(1);
        self.polls = fit.min(POLLS_MAX) as u32;
    }
}

impl Core {
    /// Polls on behalf of a caller, unless the caller is to drive: the engine is not quiet, or a peer has done something.
    #[inline]
    /// `polls`: the number of polls for which this one stands.
    pub(super) fn poll_quietly(&mut self, polls: u32) -> bool {
        self.quiet.polls > 0 && self.look_at_links(polls)
    }

    fn look_at_links(&mut self, polls: u32) -> bool {
        if self.links.have_news() {
            return false;
        }
        self.quiet.polls = self.quiet.polls.saturating_sub(polls);
        self.polls = self.polls.wrapping_add(1);
        true
    }

    /// Notes that a poll has driven. If that found nothing (`idle`), nor did the drive before, and everything else can wait, the engine is
    /// quiet. Callers that find something at every other poll gain nothing by a quiet, and do not pay for its beginning.
    #[inline]
    pub(super) fn has_driven(&mut self, now: Time, idle: bool) {
        let before = std::mem::replace(&mut self.quiet.driven, (now, self.polls));
        let was_idle = std::mem::replace(&mut self.quiet.idle, idle);
        if idle && was_idle {
            self.become_quiet(before, now);
        }
    }

    fn become_quiet(&mut self, before: (Time, u32), now: Time) {
        let until = now + QUIET_NS;
        // A device whose sockets are in use ends here.
        if !self.looks.is_due(until) && self.can_wait(until) {
            self.quiet.begin(before, now, self.polls);
        }
    }

    /// Returns whether there is nothing to do until then, unless somebody else does something.
    fn can_wait(&self, until: Time) -> bool {
        until.since_ns(self.served_at) <= SERVE_NS
            && self.rnic.poll_timeout().is_none_or(|at| at > until)
            && self.rnic.is_quiet()
            && !self.rnic.has_transmit(true)
            && !self.rnic.sees_packets()
            && self.blocked.is_none()
            && self.links.can_wait()
    }
}

#[cfg(test)]
mod tests;
