//! The engine's only idea of time: nanoseconds since a moment that the driver chose. It is always an argument.

use std::ops::Add;
use std::time::Duration;

/// A moment, in nanoseconds since the driver's own start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Nanoseconds from `earlier` to this moment; 0 when it is not earlier.
    pub const fn since_ns(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Time {
    type Output = Time;

    /// The moment `ns` nanoseconds later.
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
