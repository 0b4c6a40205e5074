//! Schedule for probing clients.

use std::time::{Duration, Instant};

/// The time of the next probes. There is none without clients: a server without clients has no timer.
#[derive(Debug)]
pub(super) struct Probes {
    period: Duration,
    pub(super) next: Option<Instant>,
}

impl Probes {
    pub(super) fn new(period: Duration) -> Probes {
        Probes { period, next: None }
    }

    /// Returns whether the server must probe its clients now: first one period after the first client connected.
    pub(super) fn are_due(&mut self, now: Instant, is_anybody_there: bool) -> bool {
        let due = is_anybody_there && self.next.is_some_and(|next| next <= now);
        if !is_anybody_there {
            self.next = None;
        } else if due || self.next.is_none() {
            self.next = Some(now + self.period);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    #[test]
    fn are_due__only_while_there_are_clients() {
        const PERIOD: Duration = Duration::from_secs(2);
        let (mut probes, began) = (Probes::new(PERIOD), Instant::now());
        assert!(!probes.are_due(began, false));
        assert_eq!(probes.next, None, "an idle server sleeps without a timer");

        let came = began + Duration::from_secs(60);
        assert!(!probes.are_due(came, true));
        assert_eq!(probes.next, Some(came + PERIOD));
        assert!(!probes.are_due(came + PERIOD / 2, true));
        assert_eq!(probes.next, Some(came + PERIOD));
        let late = came + PERIOD + PERIOD / 4;
        assert!(probes.are_due(late, true));
        assert_eq!(probes.next, Some(late + PERIOD));

        assert!(!probes.are_due(late + 2 * PERIOD, false));
        assert_eq!(probes.next, None, "the last client has gone");
    }
}
