//! Time as the engine knows it: nanoseconds since a moment that the driver chose. The time is always an argument.

use std::ops::Add;
use std::time::Duration;

/// A moment, in nanoseconds since a moment that the driver chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Returns the nanoseconds from `earlier` to this moment, or 0 if `earlier` is not earlier.
    pub const fn since_ns(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Time {
    type Output = Time;

    /// Returns the moment `ns` nanoseconds later.
    fn add(self, ns: u64) -> Time {
        Time(self.0.saturating_add(ns))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, duration: Duration) -> Time {
        self + u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
    }
}
