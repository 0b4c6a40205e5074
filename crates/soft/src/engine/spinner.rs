//! Trust in a caller that polls. While callers poll again and again, the engine's thread need not watch. A program that sleeps polls a few
//! times, and then arms a completion queue and sleeps: the thread watches from then on. But a library may arm a queue for rare events, and
//! poll another one for all its life, as UCX does. If no queue has been armed for some time, and somebody has polled throughout, the thread
//! leaves the sockets to that caller here too. While it polls, its polls bring what comes for the owner of the armed queue. Once it polls no
//! more, the owner may wait for a lease ([`POLLER_LEASE_NS`]), which is short beside the time for which nothing came for that queue.

use rdmux_rnic::Time;

use super::handover::POLLER_LEASE_NS;

/// Polls that find no queue armed, after which the caller is trusted.
pub(super) const POLLS: u32 = 64;
/// Time of polling beside an armed queue after which the caller is trusted.
const BESIDE_ARMED_NS: u64 = 10 * POLLER_LEASE_NS;
/// Time between two of these polls that ends the trust: for a caller that comes back later the owner of the queue would wait longer than for
/// a wake-up.
const PAUSE_NS: u64 = 50_000;

/// Polls by callers that drive. Protected by the engine's lock.
#[derive(Debug, Default)]
pub(super) struct Spinner {
    /// Polls in a row that found no queue armed.
    unarmed: u32,
    /// Times of the last poll, and of the first one after the last pause or arming of a queue.
    last: Time,
    since: Time,
}

impl Spinner {
    /// Notes a poll; returns whether the caller will soon poll again.
    #[inline]
    pub(super) fn polls(&mut self, now: Time, is_any_armed: bool) -> bool {
        if now.since_ns(self.last) > PAUSE_NS {
            self.since = now;
        }
        self.last = now;
        if is_any_armed {
            self.unarmed = 0;
            return now.since_ns(self.since) >= BESIDE_ARMED_NS;
        }
        self.unarmed = self.unarmed.saturating_add(1);
        self.unarmed > POLLS
    }

    /// Notes that a caller sleeps, or may do so since it has armed a queue.
    pub(super) fn somebody_sleeps(&mut self, now: Time) {
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = PAUSE_NS;

    /// Polls beside an armed queue until it is trusted; returns for how long.
    fn polls_until_trusted(spinner: &mut Spinner, from: Time) -> u64 {
        let trusted = (0..1_000).find(|i| spinner.polls(from + i * STEP_NS, true));
        trusted.expect("trust") * STEP_NS
    }

    #[test]
    fn polls__beside_an_armed_queue_are_trusted_after_a_time_without_a_pause() {
        let mut spinner = Spinner::default();
        let begin = Time(1 << 40);
        assert_eq!(polls_until_trusted(&mut spinner, begin), BESIDE_ARMED_NS);
        let later = begin + BESIDE_ARMED_NS + PAUSE_NS + 1;
        assert_eq!(polls_until_trusted(&mut spinner, later), BESIDE_ARMED_NS);
        let armed_at = later + BESIDE_ARMED_NS;
        spinner.somebody_sleeps(armed_at);
        assert_eq!(polls_until_trusted(&mut spinner, armed_at), BESIDE_ARMED_NS);
    }

    #[test]
    fn polls__with_pauses_beside_an_armed_queue_are_never_trusted() {
        let mut spinner = Spinner::default();
        let trusted = (1..1_000).find(|i| spinner.polls(Time(i * (PAUSE_NS + 1)), true));
        assert_eq!(trusted, None);
    }

    #[test]
    fn polls__without_an_armed_queue_are_trusted_after_some() {
        let mut spinner = Spinner::default();
        let trusted = (1..).find(|_| spinner.polls(Time(1), false));
        assert_eq!(trusted, Some(POLLS + 1));
        assert!(!spinner.polls(Time(2), true));
        assert!(!spinner.polls(Time(3), false));
    }
}
