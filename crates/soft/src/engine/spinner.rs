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
/// Longest time between two polls of a caller that does nothing else.
const PAUSE_NS: u64 = 50_000;
/// Time of polling that outweighs a pause of the same length. A caller that loses its CPU now and then is trusted; for one that polls between
/// other work, the owner of the queue would wait longer than for a wake-up.
const PER_PAUSE: u64 = 8;

/// Polls by callers that drive. Protected by the engine's lock.
#[derive(Debug, Default)]
pub(super) struct Spinner {
    /// Polls in a row that found no queue armed.
    unarmed: u32,
    last: Time,
    /// Time of polling, less what pauses outweigh, since a queue was armed: twice [`BESIDE_ARMED_NS`] at most.
    polled_ns: u64,
}

impl Spinner {
    /// Notes a poll; returns whether the caller will soon poll again.
    #[inline]
    pub(super) fn polls(&mut self, now: Time, is_any_armed: bool) -> bool {
        let since_ns = now.since_ns(std::mem::replace(&mut self.last, now));
        self.polled_ns = match since_ns {
            ..=PAUSE_NS => (self.polled_ns + since_ns).min(2 * BESIDE_ARMED_NS),
            _ => self.polled_ns.saturating_sub(PER_PAUSE.saturating_mul(since_ns)),
        };
        if is_any_armed {
            self.unarmed = 0;
            return self.polled_ns >= BESIDE_ARMED_NS;
        }
        self.unarmed = self.unarmed.saturating_add(1);
        self.unarmed > POLLS
    }

    /// Notes that a caller sleeps, or may do so since it has armed a queue.
    pub(super) fn somebody_sleeps(&mut self) {
        self.polled_ns = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls beside an armed queue until it is trusted; returns for how long.
    fn polls_until_trusted(spinner: &mut Spinner, now: &mut Time) -> u64 {
        let from = *now;
        while !spinner.polls(*now, true) {
            *now = *now + PAUSE_NS;
            assert!(now.since_ns(from) < 10 * BESIDE_ARMED_NS);
        }
        now.since_ns(from)
    }

    #[test]
    fn polls__beside_an_armed_queue_are_trusted_after_a_time() {
        let mut spinner = Spinner::default();
        let mut now = Time(1 << 40);
        assert_eq!(polls_until_trusted(&mut spinner, &mut now), BESIDE_ARMED_NS);
        spinner.somebody_sleeps();
        assert_eq!(polls_until_trusted(&mut spinner, &mut now), BESIDE_ARMED_NS);
        // A pause costs eight times its length, here all that the caller has polled.
        now = now + BESIDE_ARMED_NS;
        assert_eq!(polls_until_trusted(&mut spinner, &mut now), BESIDE_ARMED_NS);
    }

    #[test]
    fn polls__with_few_pauses_beside_an_armed_queue_stay_trusted() {
        let mut spinner = Spinner::default();
        let mut now = Time(1 << 40);
        polls_until_trusted(&mut spinner, &mut now);
        for poll in 0..10_000_u64 {
            now = now
                + if poll.is_multiple_of(100) {
                    2 * PAUSE_NS
                } else {
                    PAUSE_NS
                };
            let has_polled = poll > 1_000;
            assert!(spinner.polls(now, true) || !has_polled);
        }
        // One that polls between other work is trusted no more.
        let trusted = (0..100).filter(|_| {
            now = now + POLLER_LEASE_NS / 2;
            spinner.polls(now, true)
        });
        assert!(trusted.count() <= 2);
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
