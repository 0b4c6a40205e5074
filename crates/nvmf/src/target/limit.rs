//! Limits of a host's I/Os, which all of its queues share, whatever reactors they are with: no lock, and no timer of their own.
//!
//! A limit is the time at which the next I/O may begin. Each I/O moves that time on by its cost, so the last of a burst may go beyond the limit,
//! and those after it wait until the time has caught up.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a host has not used within this time it cannot use later.
const BURST: Duration = Duration::from_millis(10);
/// Least time for which a queue is held up: a reactor that wakes for each I/O would spend more on waking than on I/Os.
const PAUSE: Duration = Duration::from_millis(1);

/// Limits of the I/Os of a host, over all of its controllers of a subsystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// I/O commands a second.
    pub ios: Option<NonZeroU64>,
    /// Bytes a second that reads, writes, compares and copies move.
    pub bytes: Option<NonZeroU64>,
}

impl Rates {
    /// The least number of I/Os a second: a host gives a command up that takes half a minute, and a queue has up to 127 of them.
    pub const IOS_MIN: u64 = 100;
    /// The least number of bytes a second, those of the largest command, for the same reason.
    pub const BYTES_MIN: u64 = 1 << 20;
}

/// The limits of a host in force.
#[derive(Debug)]
pub(super) struct Limit {
    ios: Pace,
    bytes: Pace,
    /// Times are counted from here.
    origin: Instant,
}

/// One limit.
#[derive(Debug)]
struct Pace {
    /// Units a second; 0: any number.
    rate: AtomicU64,
    /// The next I/O may begin then, in nanoseconds.
    next: AtomicU64,
}

impl Limit {
    pub(super) fn new(rates: &Rates, now: Instant) -> Limit {
        let pace = || Pace {
            rate: AtomicU64::new(0),
            next: AtomicU64::new(0),
        };
        let limit = Limit {
            ios: pace(),
            bytes: pace(),
            origin: now,
        };
        limit.set(rates);
        limit
    }

    /// Changes the rates. What was used before counts at the rates of before.
    pub(super) fn set(&self, rates: &Rates) {
        let rate = |rate: Option<NonZeroU64>| rate.map_or(0, NonZeroU64::get);
        self.ios.rate.store(rate(rates.ios), Ordering::Relaxed);
        self.bytes.rate.store(rate(rates.bytes), Ordering::Relaxed);
    }

    /// Returns when the next I/O may begin; `None`: now.
    pub(super) fn held_until(&self, now: Instant) -> Option<Instant> {
        let next = self.ios.next().max(self.bytes.next())?;
        let next = self.origin + Duration::from_nanos(next);
        (next > now).then(|| next.max(now + PAUSE))
    }

    /// Counts an I/O that begins.
    pub(super) fn spend(&self, bytes: u32, now: Instant) {
        let now = now.saturating_duration_since(self.origin).as_nanos() as u64;
        self.ios.spend(1, now);
        self.bytes.spend(bytes.into(), now);
    }

    /// Counts bytes of an I/O that has begun.
    pub(super) fn spend_more(&self, bytes: u64) {
        self.bytes.spend(bytes, 0);
    }
}

impl Pace {
    fn next(&self) -> Option<u64> {
        (self.rate.load(Ordering::Relaxed) > 0).then(|| self.next.load(Ordering::Relaxed))
    }

    fn spend(&self, units: u64, now: u64) {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 || units == 0 {
            return;
        }
        let cost = (u128::from(units) * 1_000_000_000).div_ceil(rate.into());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let earliest = now.saturating_sub(BURST.as_nanos() as u64);
        let moved = |next: u64| Some(next.max(earliest).saturating_add(cost));
        let _ = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the I/Os that a host has done after so many seconds, of those that it always has ready.
    fn run(limit: &Limit, from: Instant, seconds: u32, bytes: u32) -> u64 {
        let (mut now, mut done) = (from, 0);
        while now < from + Duration::from_secs(seconds.into()) {
            match limit.held_until(now) {
                Some(until) => now = until,
                None => {
                    limit.spend(bytes, now);
                    done += 1;
                    // It takes some time as well.
                    now += Duration::from_nanos(700);
                }
            }
        }
        done
    }

    fn rates(ios: u64, bytes: u64) -> Rates {
        Rates {
            ios: NonZeroU64::new(ios),
            bytes: NonZeroU64::new(bytes),
        }
    }

    /// Checks that so many I/Os were done as the rate allows, and a burst more at most.
    #[track_caller]
    fn assert_about(done: u64, rate: u64, seconds: u64) {
        let most = rate * seconds + rate / 100 + 1;
        assert!((rate * seconds * 99 / 100..=most).contains(&done), "{done}");
    }

    #[test]
    fn held_until__keeps_a_host_to_the_lower_of_its_rates() {
        let from = Instant::now();
        assert_about(run(&Limit::new(&rates(1000, 0), from), from, 3, 4096), 1000, 3);
        assert_about(
            run(&Limit::new(&rates(100_000, 0), from), from, 3, 4096),
            100_000,
            3,
        );
        assert_about(
            run(&Limit::new(&rates(100_000, 40_960_000), from), from, 3, 4096),
            10_000,
            3,
        );
    }

    #[test]
    fn held_until__gives_nothing_for_time_unused() {
        let from = Instant::now();
        let limit = Limit::new(&rates(1000, 0), from);
        run(&limit, from, 1, 4096);
        let later = from + Duration::from_secs(3600);
        assert_about(run(&limit, later, 1, 4096), 1000, 1);
    }

    #[test]
    fn set__holds_from_then_on() {
        let from = Instant::now();
        let limit = Limit::new(&Rates::default(), from);
        assert!(run(&limit, from, 1, 4096) > 1_000_000);
        limit.set(&rates(1000, 0));
        let from = from + Duration::from_secs(1);
        assert_about(run(&limit, from, 1, 4096), 1000, 1);
        limit.set(&Rates::default());
        assert_eq!(limit.held_until(from), None);
    }

    #[test]
    fn spend_more__counts_what_a_copy_moves() {
        let from = Instant::now();
        let limit = Limit::new(&rates(0, 1 << 20), from);
        limit.spend(32, from);
        assert_eq!(limit.held_until(from + Duration::from_millis(1)), None);
        limit.spend_more(2 << 20);
        assert!(limit.held_until(from + Duration::from_millis(1900)).is_some());
        assert_eq!(limit.held_until(from + Duration::from_millis(2100)), None);
    }
}
