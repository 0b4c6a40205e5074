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

    /// Returns the number of durations in each bucket: the first one ends with 256 ns, each further one with twice as much, and the last one
    /// has durations that exceed all bounds.
    pub fn buckets(&self) -> &[u64] {
        &self.buckets
    }

    /// Returns a histogram with these [buckets](Histogram::buckets), those that are missing empty; `None` if there are too many.
    pub fn from_buckets(buckets: &[u64], sum_ns: u64) -> Option<Histogram> {
        let mut histogram = Histogram {
            sum_ns,
            ..Histogram::default()
        };
        histogram
            .buckets
            .get_mut(..buckets.len())?
            .copy_from_slice(buckets);
        Some(histogram)
    }

    /// Adds the durations of another histogram.
    pub fn add(&mut self, other: &Histogram) {
        for (own, others) in self.buckets.iter_mut().zip(other.buckets) {
            *own = own.saturating_add(others);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Returns the durations recorded since an earlier state of the same histogram.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let mut since = *self;
        for (own, before) in since.buckets.iter_mut().zip(earlier.buckets) {
            *own = own.saturating_sub(before);
        }
        since.sum_ns = self.sum_ns.saturating_sub(earlier.sum_ns);
        since
    }

    /// Returns an estimate, in ns, of the duration that this part of the durations, from 0 to 1, does not exceed: durations are taken to be
    /// spread evenly over their bucket. `None` if none is recorded, or the duration exceeds all bounds.
    pub fn quantile(&self, part: f64) -> Option<u64> {
        let total = self.buckets.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
        let wanted = ((total as f64 * part).ceil() as u64).clamp(1, total.max(1));
        let mut before = 0_u64;
        for (i, n) in self.buckets[..BOUNDED].iter().enumerate() {
            let through = before.saturating_add(*n);
            if through >= wanted {
                let end = 1_u64 << (FIRST_LOG2 + i as u32);
                let start = if i == 0 { 0 } else { end / 2 };
                let within = (wanted - before) as f64 / *n as f64;
                return Some(start + ((end - start) as f64 * within) as u64);
            }
            before = through;
        }
        None
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
    fn quantile__within_the_bucket() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        for _ in 0..98 {
            histogram.record(1000);
        }
        histogram.record(100_000);
        histogram.record(u64::MAX);
        for (part, from, to) in [
            (0.0, 512, 530),
            (0.5, 760, 780),
            (0.98, 1024, 1024),
            (0.99, 1 << 17, 1 << 17),
        ] {
            let found = histogram.quantile(part).unwrap();
            assert!((from..=to).contains(&found), "{part}: {found}");
        }
        assert_eq!(histogram.quantile(1.0), None);
    }

    #[test]
    fn since__what_was_added() {
        let (mut earlier, mut more) = (Histogram::default(), Histogram::default());
        for ns in [10, 1000, u64::MAX / 2] {
            earlier.record(ns);
            more.record(ns / 3);
        }
        let mut later = earlier;
        later.add(&more);
        assert_eq!(later.since(&earlier), more);
        assert_eq!(earlier.since(&later), Histogram::default());
    }

    #[test]
    fn from_buckets__what_buckets_returned() {
        let mut histogram = Histogram::default();
        for ns in [1, 300, u64::MAX] {
            histogram.record(ns);
        }
        let (buckets, sum_ns) = (histogram.buckets(), histogram.sum_ns());
        assert_eq!(Histogram::from_buckets(buckets, sum_ns), Some(histogram));
        let first = Histogram::from_buckets(&[2], 7).unwrap();
        assert_eq!((first.count(), first.sum_ns()), (2, 7));
        assert_eq!(Histogram::from_buckets(&[0; BOUNDED + 2], 0), None);
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
