//! The schedule of the probes of silent peers.

use std::time::{Duration, Instant};

/// The time of the next probes. There is none without connections: a thread without connections has no timer.
#[derive(Debug)]
pub struct KeepAlive {
    period: Duration,
    next: Option<Instant>,
}

impl KeepAlive {
    /// Makes a schedule of probes each period.
    pub fn new(period: Duration) -> KeepAlive {
        KeepAlive { period, next: None }
    }

    /// Returns when the next probes are due.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Returns whether the peers are to be probed now: first one period after the first of them was there.
    pub fn is_due(&mut self, now: Instant, is_anybody_there: bool) -> bool {
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
    use super::*;

    #[test]
    fn is_due__only_while_there_are_connections() {
        const PERIOD: Duration = Duration::from_secs(2);
        let (mut keepalive, began) = (KeepAlive::new(PERIOD), Instant::now());
        assert!(!keepalive.is_due(began, false));
        assert_eq!(keepalive.next(), None, "an idle thread sleeps without a timer");

        let came = began + Duration::from_secs(60);
        assert!(!keepalive.is_due(came, true));
        assert_eq!(keepalive.next(), Some(came + PERIOD));
        assert!(!keepalive.is_due(came + PERIOD / 2, true));
        assert_eq!(keepalive.next(), Some(came + PERIOD));
        let late = came + PERIOD + PERIOD / 4;
        assert!(keepalive.is_due(late, true));
        assert_eq!(keepalive.next(), Some(late + PERIOD));

        assert!(!keepalive.is_due(late + 2 * PERIOD, false));
        assert_eq!(keepalive.next(), None, "the last connection has gone");
    }
}
