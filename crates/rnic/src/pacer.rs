//! A token bucket that holds one train, kept as the time at which the next burst may begin.

use crate::sched::QUANTUM_BYTES;
use crate::time::Time;

/// Time whose worth of bytes at the current rate forms a burst, within the bounds of [`burst_bytes`]. More frequent timers would cost
/// more than smoother sending gains, and CNPs do not arrive more often either.
const BURST_NS: u64 = 50_000;

/// Returns the bytes that may be sent in one burst at a rate: at least one packet, at most one train.
pub(crate) fn burst_bytes(rate_bps: u64, packet_bytes: u32) -> u32 {
    let bytes = u128::from(rate_bps) * u128::from(BURST_NS) / 8_000_000_000;
    (bytes.min(u128::from(QUANTUM_BYTES)) as u32).max(packet_bytes)
}

/// A token bucket; see the module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pacer {
    /// Time at which the next burst may begin; a time in the past is credit.
    next: Time,
}

impl Pacer {
    /// Returns when the next burst may begin, if that is in the future.
    pub(crate) fn waits_until(&self, now: Time) -> Option<Time> {
        (self.next > now).then_some(self.next)
    }

    /// Accounts for `bytes` that were sent. A sender that comes late may catch up by at most one train.
    pub(crate) fn charge(&mut self, now: Time, bytes: u64, rate_bps: u64) {
        let ns = |bytes: u64| {
            let ns = u128::from(bytes) * 8_000_000_000 / u128::from(rate_bps.max(1));
            u64::try_from(ns).unwrap_or(u64::MAX)
        };
        let earliest = Time(now.0.saturating_sub(ns(QUANTUM_BYTES.into())));
        self.next = self.next.max(earliest) + ns(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1_000_000_000;

    /// Returns the bytes that a sender sends in `total_ns` if it sends each burst as soon as it may, the nth time `late_ns(n)` late.
    fn sent(total_ns: u64, rate_bps: u64, late_ns: impl Fn(u64) -> u64) -> u64 {
        let (mut pacer, mut now, mut sent, mut n) = (Pacer::default(), Time(1_000_000_000), 0, 0);
        let end = now + total_ns;
        let burst = burst_bytes(rate_bps, 1024);
        while now < end {
            match pacer.waits_until(now) {
                Some(at) => {
                    now = at + late_ns(n);
                    n += 1;
                }
                None => {
                    // The last packet may exceed the burst.
                    let bytes = u64::from(burst) + n % 500;
                    sent += bytes;
                    pacer.charge(now, bytes, rate_bps);
                }
            }
        }
        sent
    }

    #[test]
    fn charge__holds_the_rate() {
        for rate in [10_000_000, RATE, 25_000_000_000] {
            // The pacer begins with credit for one train.
            let bytes = (sent(1_000_000_000, rate, |_| 0) - u64::from(QUANTUM_BYTES)) as f64;
            let expected = rate as f64 / 8.0;
            assert!(
                (bytes / expected - 1.0).abs() < 0.01,
                "{rate}: {bytes} of {expected}"
            );
        }
    }

    #[test]
    fn charge__a_late_timer_is_made_up_for_by_one_train() {
        let bytes = sent(1_000_000_000, RATE, |_| 300_000) as f64;
        assert!((bytes / (RATE as f64 / 8.0) - 1.0).abs() < 0.01, "{bytes}");
        // Always 10 ms late: the sender gets the burst that is due and one train of saved credit.
        let bytes = sent(1_000_000_000, RATE, |_| 10_000_000) as f64;
        assert!(bytes <= 101.0 * (f64::from(QUANTUM_BYTES) + 20_000.0), "{bytes}");
    }

    #[test]
    fn burst_bytes__between_a_packet_and_a_train() {
        assert_eq!(burst_bytes(1, 1024), 1024);
        assert_eq!(burst_bytes(RATE, 1024), 6250);
        assert_eq!(burst_bytes(u64::MAX, 1024), QUANTUM_BYTES);
    }
}
