//! Round-trip measurements and the waiting times derived from them: the estimator of Jacobson and Karels as in RFC 6298, and the
//! probe timeout of RFC 8985, 7.2.

use rdmux_wire::Psn;

use crate::time::Time;

/// Shortest wait before the requester probes the peer. A receiver that sleeps takes about this long to wake.
const PROBE_NS_MIN: u64 = 200_000;

#[derive(Debug, Default)]
pub(super) struct Rtt {
    /// 0 until a round trip was measured.
    smoothed_ns: u64,
    variation_ns: u64,
    /// The packet that is being timed. It was sent once and requests a response (Karn).
    timed: Option<(Psn, Time)>,
}

impl Rtt {
    pub(super) fn is_timing(&self) -> bool {
        self.timed.is_some()
    }

    /// Returns the packet that is being timed.
    pub(super) fn timed(&self) -> Option<Psn> {
        self.timed.map(|(psn, _)| psn)
    }

    pub(super) fn begin(&mut self, psn: Psn, now: Time) {
        self.timed = Some((psn, now));
    }

    /// Stops timing: the response does not measure a round trip any longer.
    pub(super) fn give_up(&mut self) {
        self.timed = None;
    }

    /// Ends a measurement: the packet that is being timed was answered.
    pub(super) fn end(&mut self, now: Time) {
        let Some((_, at)) = self.timed.take() else { return };
        let ns = now.since_ns(at).max(1);
        if self.smoothed_ns == 0 {
            (self.smoothed_ns, self.variation_ns) = (ns, ns / 2);
        } else {
            let off = self.smoothed_ns.abs_diff(ns);
            self.variation_ns = (3 * self.variation_ns + off) / 4;
            self.smoothed_ns = (7 * self.smoothed_ns + ns) / 8;
        }
    }

    /// Returns the time to wait for a response before a probe; `None` before the first measurement.
    pub(super) fn probe_ns(&self) -> Option<u64> {
        let wait = self.answer_ns()?.max(2 * self.smoothed_ns);
        Some(wait.max(PROBE_NS_MIN))
    }

    /// Returns the time in which a response comes unless something was lost.
    pub(super) fn answer_ns(&self) -> Option<u64> {
        (self.smoothed_ns > 0).then(|| self.smoothed_ns + 4 * self.variation_ns.max(self.smoothed_ns / 16))
    }

    /// Returns the time for which other packets may overtake a packet before it is taken for lost. RFC 8985, 6.2.
    pub(super) fn reorder_ns(&self) -> Option<u64> {
        (self.smoothed_ns > 0).then_some(self.smoothed_ns / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(samples_ns: &[u64]) -> Rtt {
        let mut rtt = Rtt::default();
        for ns in samples_ns {
            rtt.begin(Psn::new(0), Time(0));
            rtt.end(Time(*ns));
        }
        rtt
    }

    #[test]
    fn probe_ns__follows_the_round_trip() {
        assert_eq!(measured(&[]).probe_ns(), None);
        // 1 ms + 4 x 0.5 ms.
        assert_eq!(measured(&[1_000_000]).probe_ns(), Some(3_000_000));
        let steady = measured(&[1_000_000; 40]).probe_ns();
        assert_eq!(steady, Some(2_000_000));
        let slower = measured(&[&[1_000_000; 40][..], &[3_000_000]].concat()).probe_ns();
        assert!(slower > steady);
        assert_eq!(measured(&[10_000; 9]).probe_ns(), Some(PROBE_NS_MIN));
    }

    #[test]
    fn end__only_what_is_timed() {
        let mut rtt = measured(&[1_000]);
        rtt.begin(Psn::new(1), Time(5));
        rtt.give_up();
        rtt.end(Time(1_000_000));
        assert_eq!(rtt.smoothed_ns, 1_000);
    }
}
