//! Times at which a polling caller looks at the sockets. A look is a system call and costs as much as a whole message between processes of
//! one host. So the longer the sockets have been silent, the longer the next look can wait: the delay is small beside the silence.

use rdmux_rnic::Time;

/// The wait for the next look is the silence divided by this: packets are late by 1.6 % of the silence at most.
const PART: u64 = 64;
/// Upper limit of that wait, about the time of a few wake-ups: 20,000 looks per second.
const WAIT_NS_MAX: u64 = 50_000;

/// Times of the last datagram in or out, and of the next look at the sockets.
#[derive(Debug, Default)]
pub(super) struct Looks {
    active_at: Time,
    next_at: Time,
}

impl Looks {
    #[inline]
    pub(super) fn is_due(&self, now: Time) -> bool {
        now >= self.next_at
    }

    /// Records that somebody has looked at the sockets.
    pub(super) fn looked(&mut self, now: Time, found: bool) {
        if found {
            self.active_at = now;
        }
        self.next_at = now + (now.since_ns(self.active_at) / PART).min(WAIT_NS_MAX);
    }

    /// Returns how long no datagram has come or gone.
    pub(super) fn silence_ns(&self, now: Time) -> u64 {
        now.since_ns(self.active_at)
    }

    /// Records that a datagram was sent: its response may come as soon as the network allows.
    pub(super) fn sent(&mut self, now: Time) {
        (self.active_at, self.next_at) = (now, now);
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    const POLL_NS: u64 = 100;

    /// Polls from one time to another, and finds nothing; returns the number of looks, and the longest wait for a look.
    fn poll(looks: &mut Looks, from: u64, to: u64) -> (u64, u64) {
        let (mut count, mut last, mut longest) = (0, from, 0);
        for now in (from..to).step_by(POLL_NS as usize) {
            if looks.is_due(Time(now)) {
                looks.looked(Time(now), false);
                longest = longest.max(now - last);
                (count, last) = (count + 1, now);
            }
        }
        (count, longest)
    }

    #[test]
    fn is_due__seldom_on_a_silent_device() {
        let mut looks = Looks::default();
        poll(&mut looks, 0, 10_000_000);
        let (count, _) = poll(&mut looks, 10_000_000, 1_010_000_000);
        assert!((19_000..=20_001).contains(&count), "{count} looks in a second");
    }

    #[test]
    fn is_due__late_by_a_small_part_of_the_silence() {
        for silence_ns in [1_000, 20_000, 1_000_000, 100_000_000] {
            let mut looks = Looks::default();
            looks.looked(Time(5), true);
            let (_, longest) = poll(&mut looks, 5, 5 + silence_ns);
            assert!(
                longest <= silence_ns / PART + POLL_NS,
                "{longest} of {silence_ns}"
            );
        }
    }

    #[test]
    fn is_due__at_once_when_something_was_sent_or_found() {
        let mut looks = Looks::default();
        poll(&mut looks, 0, 100_000_000);
        assert!(!looks.is_due(Time(100_000_000)));
        looks.sent(Time(100_000_000));
        assert!(looks.is_due(Time(100_000_000)));
        poll(&mut looks, 100_000_000, 200_000_000);
        looks.looked(Time(200_000_000), true);
        assert!(looks.is_due(Time(200_000_000)));
    }
}
