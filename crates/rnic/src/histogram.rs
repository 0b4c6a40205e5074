//! Histograms of durations with buckets of powers of two: cheap enough to record every request, fine enough to locate outliers.

use strum::VariantArray;

use std::ops::Index;

use crate::cq::WcOpcode;

/// Binary logarithm of the first bucket's bound in ns.
const FIRST_LOG2: u32 = 8;
/// Buckets with a bound.
const BOUNDED: usize = 28;

/// A histogram of durations. It only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The last bucket counts durations that exceed all bounds.
    buckets: [u64; BOUNDED + 1],
    sum_ns: u64,
}

impl Histogram {
    /// Records a duration.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        // The logarithm, rounded up: a duration equal to a bound belongs to the bucket that ends there.
        let log2 = u64::BITS - ns.saturating_sub(1).leading_zeros();
        let bucket = (log2.saturating_sub(FIRST_LOG2) as usize).min(BOUNDED);
        self.buckets[bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Returns the number of durations recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the sum of the durations recorded, in ns.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns, for each bound in ns in ascending order from 256 ns to 34 s, the number of durations that do not exceed it.
    pub fn cumulative(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut so_far = 0;
        let bounded = self.buckets[..BOUNDED].iter().enumerate();
        bounded.map(move |(i, n)| {
            so_far += n;
            (1 << (FIRST_LOG2 + i as u32), so_far)
        })
    }
}

/// Latencies of requests by opcode, from the call that posted a request to the call that completed it, in the time that the driver
/// passed to these calls. Only successful requests on a reliable transport are counted, except those that the device completed
/// within the post ([`crate::Event::WantsGrant`]): they take none of the driver's time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies(Box<[Histogram; WcOpcode::VARIANTS.len()]>);

impl Latencies {
    #[inline]
    pub(crate) fn record(&mut self, opcode: WcOpcode, ns: u64) {
        self.0[opcode as usize].record(ns);
    }
}

impl Index<WcOpcode> for Latencies {
    type Output = Histogram;

    fn index(&self, opcode: WcOpcode) -> &Histogram {
        &self.0[opcode as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record__bounds_are_in_the_bucket_that_they_end() {
        for (ns, bound) in [
            (0, Some(256)),
            (1, Some(256)),
            (256, Some(256)),
            (257, Some(512)),
            (512, Some(512)),
            (1_000_000, Some(1 << 20)),
            (1 << 35, Some(1 << 35)),
            ((1 << 35) + 1, None),
            (u64::MAX, None),
        ] {
            let mut histogram = Histogram::default();
            histogram.record(ns);
            let found = histogram.cumulative().find(|(_, n)| *n == 1);
            assert_eq!(found.map(|(bound, _)| bound), bound, "{ns} ns");
            assert_eq!((histogram.count(), histogram.sum_ns()), (1, ns));
        }
    }

    #[test]
    fn cumulative__ascends() {
        let mut histogram = Histogram::default();
        for ns in [100, 300, 300, 5_000, u64::MAX] {
            histogram.record(ns);
        }
        let found: Vec<_> = histogram.cumulative().collect();
        assert_eq!(found[..2], [(256, 1), (512, 3)]);
        assert_eq!(*found.last().unwrap(), (1 << 35, 4));
        assert!(
            found
                .windows(2)
                .all(|two| two[0].0 * 2 == two[1].0 && two[0].1 <= two[1].1)
        );
        assert_eq!((histogram.count(), histogram.sum_ns()), (5, u64::MAX));
    }

    #[test]
    fn latencies__one_of_each_opcode() {
        let mut latencies = Latencies::default();
        for (i, opcode) in WcOpcode::VARIANTS.iter().copied().enumerate() {
            (0..=i).for_each(|_| latencies.record(opcode, 1000));
        }
        for (i, opcode) in WcOpcode::VARIANTS.iter().copied().enumerate() {
            assert_eq!(latencies[opcode].count(), i as u64 + 1);
        }
    }
}
