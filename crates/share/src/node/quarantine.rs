//! Applications whose requests make shared queue pairs fail, again and again: they get queue pairs of their own for further connections.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Failures of shared queue pairs in [`PERIOD`] that an application may cause. Each of them is a pause of some round trips for all that use the queue
/// pair. Memory that fails once may fail for a few requests that are in flight on several queue pairs; an application that goes on has more.
const FAILURES_MAX: usize = 4;
const PERIOD: Duration = Duration::from_secs(60);

/// The applications that have caused failures, by their slots, as long as they are attached.
#[derive(Debug, Default)]
pub(super) struct Quarantine(HashMap<u32, Past>);

#[derive(Debug)]
enum Past {
    /// The last failures that it has caused.
    Failures(VecDeque<Instant>),
    /// It has caused too many.
    Isolated,
}

impl Quarantine {
    /// Takes note that an application has made a queue pair fail. Returns true if it is quarantined from now on.
    pub(super) fn caused(&mut self, now: Instant, application: u32) -> bool {
        let past = self
            .0
            .entry(application)
            .or_insert_with(|| Past::Failures(VecDeque::new()));
        let Past::Failures(failures) = past else {
            return false;
        };
        failures.retain(|at| now < *at + PERIOD);
        failures.push_back(now);
        let has_too_many = failures.len() > FAILURES_MAX;
        if has_too_many {
            *past = Past::Isolated;
        }
        has_too_many
    }

    /// Returns whether an application gets queue pairs of its own.
    pub(super) fn has(&self, application: u32) -> bool {
        matches!(self.0.get(&application), Some(Past::Isolated))
    }

    /// Forgets an application that is gone.
    pub(super) fn forget(&mut self, application: u32) {
        self.0.remove(&application);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caused__too_many_in_a_minute() {
        let (mut quarantine, began) = (Quarantine::default(), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        // One each 15 s: four in a minute.
        for n in 0..20 {
            assert!(!quarantine.caused(after(15 * n), 1));
        }
        assert!(!quarantine.has(1));
        let last = 15 * 19;
        assert!(quarantine.caused(after(last + 1), 1));
        assert!(quarantine.has(1) && !quarantine.has(2));
        // That is told once, and holds as long as the application is there.
        assert!(!quarantine.caused(after(last + 2), 1));
        assert!(!quarantine.caused(after(last + 600), 1));
        assert!(quarantine.has(1));
        quarantine.forget(1);
        assert!(!quarantine.has(1) && !quarantine.caused(after(last + 601), 1));
    }
}
