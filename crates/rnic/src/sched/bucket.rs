//! A token bucket, kept as the time at which it holds tokens again. Bytes are exact: what is left of a division goes into the next one.

use crate::time::Time;

/// Time whose worth of bytes at the rate a full bucket holds: a timer that comes so late costs nothing of the rate.
const BURST_NS: u64 = 100_000;
/// Bytes that a full bucket holds at least: two of the longest pieces.
const BURST_BYTES_MIN: u64 = 128 << 10;

const BITS_AND_NS: u64 = 8_000_000_000;

/// Returns the bytes that may be sent at once, beyond a piece, after a time without any: at the device's rate, and at a tenant's ceiling.
pub fn burst_bytes(rate_bps: u64) -> u64 {
    let bytes = u128::from(rate_bps) * u128::from(BURST_NS) / u128::from(BITS_AND_NS);
    u64::try_from(bytes).unwrap_or(u64::MAX).max(BURST_BYTES_MIN)
}

/// See the module. A new bucket is full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    rate_bps: u64,
    /// Time from which the bucket has tokens; a time in the past is what it has saved up.
    next: Time,
    /// Remainder of the divisions, below `rate_bps`.
    rest: u64,
}

impl Bucket {
    pub(super) fn new(rate_bps: u64) -> Bucket {
        Bucket {
            rate_bps: rate_bps.max(1),
            next: Time(0),
            rest: 0,
        }
    }

    /// Returns whether the bucket has tokens, so that a piece may begin.
    pub(super) fn is_open(&self, now: Time) -> bool {
        self.next <= now
    }

    /// When the bucket has tokens.
    pub(super) fn next(&self) -> Time {
        self.next
    }

    /// Takes `bytes`, which may exceed the tokens.
    pub(super) fn charge(&mut self, now: Time, bytes: u64) {
        let full = self.full_since(now);
        if self.next < full {
            (self.next, self.rest) = (full, 0);
        }
        let product = u128::from(bytes) * u128::from(BITS_AND_NS) + u128::from(self.rest);
        let (ns, rest) = match u64::try_from(product) {
            Ok(product) => (product / self.rate_bps, product % self.rate_bps),
            Err(_) => {
                let ns = product / u128::from(self.rate_bps);
                let rest = product % u128::from(self.rate_bps);
                (u64::try_from(ns).unwrap_or(u64::MAX), rest as u64)
            }
        };
        self.next = self.next + ns;
        self.rest = rest;
    }

    /// Changes the rate; tokens and debt, in bytes, remain.
    pub(super) fn set_rate(&mut self, now: Time, rate_bps: u64) {
        let rate_bps = rate_bps.max(1);
        let scale = |ns: u64| {
            let scaled = u128::from(ns) * u128::from(self.rate_bps) / u128::from(rate_bps);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let next = self.next.max(self.full_since(now));
        self.next = if next > now {
            now + scale(next.since_ns(now))
        } else {
            Time(now.0.saturating_sub(scale(now.since_ns(next))))
        };
        (self.rate_bps, self.rest) = (rate_bps, 0);
    }

    /// Returns the value of `next` of a bucket that is full now.
    fn full_since(&self, now: Time) -> Time {
        let ns = u128::from(burst_bytes(self.rate_bps)) * u128::from(BITS_AND_NS) / u128::from(self.rate_bps);
        Time(now.0.saturating_sub(u64::try_from(ns).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that pass in `total_ns` if a piece is sent whenever the bucket has tokens.
    fn passed(bucket: &mut Bucket, now: &mut Time, total_ns: u64, piece_bytes: u64) -> u64 {
        let (end, mut bytes) = (*now + total_ns, 0);
        loop {
            *now = (*now).max(bucket.next());
            if *now >= end {
                *now = end;
                return bytes;
            }
            bucket.charge(*now, piece_bytes);
            bytes += piece_bytes;
        }
    }

    #[test]
    fn charge__the_rate_and_one_burst() {
        for rate_bps in [1_000_000, 7_000_000_001, 100_000_000_000] {
            for piece in [8, 1500, 64 << 10] {
                let mut now = Time(1_000_000_000_000);
                let mut bucket = Bucket::new(rate_bps);
                let total_ns = 10_000_000;
                let bytes = passed(&mut bucket, &mut now, total_ns, piece);
                let rate = (u128::from(rate_bps) * u128::from(total_ns) / u128::from(BITS_AND_NS)) as u64;
                let most = rate + burst_bytes(rate_bps) + piece;
                let least = rate + burst_bytes(rate_bps);
                assert!(
                    (least..=most).contains(&bytes),
                    "{rate_bps} {piece}: {bytes} not in {least}..={most}"
                );
            }
        }
    }

    #[test]
    fn set_rate__debt_in_bytes_remains() {
        let mut bucket = Bucket::new(8_000_000_000);
        let now = Time(1_000_000_000);
        bucket.charge(now, BURST_BYTES_MIN + 1_000);
        assert_eq!(bucket.next(), now + 1_000);
        bucket.set_rate(now, 80_000_000_000);
        assert_eq!(bucket.next(), now + 100);
        bucket.set_rate(now, 8_000);
        assert_eq!(bucket.next(), now + 1_000_000_000);
    }

    #[test]
    fn set_rate__tokens_in_bytes_remain() {
        let mut bucket = Bucket::new(8_000_000_000);
        let now = Time(1_000_000_000);
        bucket.charge(now, BURST_BYTES_MIN - 1_000);
        bucket.set_rate(now, 16_000_000_000);
        assert!(bucket.is_open(now));
        bucket.charge(now, 1_200);
        assert_eq!(bucket.next(), now + 100);
    }
}
