//! A simulated drive: it says when each command is done, and moves no bytes.

use std::collections::VecDeque;
use std::time::Duration;

/// The queue of a drive that executes up to `depth` commands at a time and needs the same time for each. Further commands wait, and begin in
/// the order in which they were submitted.
///
/// It reads no clock. [`Drive::submit`] and [`Drive::poll`] take the time, which must not decrease; [`Drive::poll_timeout`] returns when the
/// next command is done. A command behind `depth` others begins when the drive has finished the first of these, however late its end is
/// polled: the drive does not wait for its host.
#[derive(Debug)]
pub(super) struct Drive<T> {
    latency: Duration,
    depth: usize,
    /// Commands that were not polled, and when each is done, in the order of both.
    queue: VecDeque<(Duration, T)>,
}

impl<T> Drive<T> {
    /// Makes a drive without commands. A depth of 0 counts as 1.
    pub(super) fn new(latency: Duration, depth: usize) -> Drive<T> {
        let depth = depth.max(1);
        Drive {
            latency,
            depth,
            queue: VecDeque::with_capacity(depth),
        }
    }

    /// Submits a command.
    pub(super) fn submit(&mut self, now: Duration, command: T) {
        let before = self.queue.len().checked_sub(self.depth);
        let begins = before
            .and_then(|at| self.queue.get(at))
            .map_or(now, |(done, _)| now.max(*done));
        self.queue.push_back((begins + self.latency, command));
    }

    /// Returns when the next command is done.
    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        self.queue.front().map(|(done, _)| *done)
    }

    /// Takes the next command that is done.
    pub(super) fn poll(&mut self, now: Duration) -> Option<T> {
        self.poll_timeout().filter(|done| *done <= now)?;
        self.queue.pop_front().map(|(_, command)| command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    fn done(drive: &mut Drive<u32>, now: Duration) -> Vec<u32> {
        std::iter::from_fn(|| drive.poll(now)).collect()
    }

    #[test]
    fn poll__a_command_is_done_after_the_latency_and_not_before() {
        let mut drive = Drive::new(US(20), 4);
        assert_eq!(drive.poll_timeout(), None);
        drive.submit(US(5), 1);
        assert_eq!(drive.poll_timeout(), Some(US(25)));
        assert_eq!(drive.poll(US(24)), None);
        assert_eq!(drive.poll(US(25)), Some(1));
        assert_eq!(drive.poll(US(25)), None);
        assert_eq!(drive.poll_timeout(), None);
    }

    #[test]
    fn poll__commands_within_the_depth_are_executed_together() {
        let mut drive = Drive::new(US(20), 3);
        (1..=3).for_each(|command| drive.submit(US(0), command));
        assert!(done(&mut drive, US(19)).is_empty());
        assert_eq!(done(&mut drive, US(20)), [1, 2, 3]);
    }

    #[test]
    fn submit__commands_beyond_the_depth_wait_in_order() {
        let mut drive = Drive::new(US(20), 2);
        (1..=5).for_each(|command| drive.submit(US(0), command));
        assert_eq!(done(&mut drive, US(20)), [1, 2]);
        assert_eq!(drive.poll_timeout(), Some(US(40)));
        assert_eq!(done(&mut drive, US(40)), [3, 4]);
        assert!(done(&mut drive, US(59)).is_empty());
        assert_eq!(done(&mut drive, US(60)), [5]);
    }

    #[test]
    fn submit__a_late_poll_delays_no_other_command() {
        let mut drive = Drive::new(US(20), 1);
        drive.submit(US(0), 1);
        drive.submit(US(0), 2);
        // The first was done at 20, so that the second is done at 40, though nobody has polled.
        assert_eq!(done(&mut drive, US(40)), [1, 2]);
        // A completed command that was not polled takes no place.
        drive.submit(US(50), 3);
        drive.submit(US(100), 4);
        assert_eq!(done(&mut drive, US(119)), [3]);
        assert_eq!(done(&mut drive, US(120)), [4]);
    }

    #[test]
    fn submit__without_latency_a_command_is_done_at_once() {
        let mut drive = Drive::new(Duration::ZERO, 1);
        for command in 1..=3 {
            drive.submit(US(7), command);
        }
        assert_eq!(done(&mut drive, US(7)), [1, 2, 3]);
    }

    #[test]
    fn submit__a_depth_of_zero_counts_as_one() {
        let mut drive = Drive::new(US(10), 0);
        drive.submit(US(0), 1);
        drive.submit(US(0), 2);
        assert_eq!(done(&mut drive, US(10)), [1]);
        assert_eq!(done(&mut drive, US(20)), [2]);
    }
}
