//! Dynamic interrupt moderation (DIM) of completion queues: chooses how many completions one wake-up waits for, and how long, by the load.
//! Bit-exact to Linux's `rdma_dim` (lib/dim), quirks included, so that a service moves as it does on the kernel's verbs; improvements belong
//! into a policy of their own.
//!
//! A pure state machine. It measures windows of 64 events, where an event is one run of the handler of a queue. It compares the rate of
//! completions and the completions per event with those of the window before, and moves to the next profile in the same direction as long as
//! that gets better, else back.

use rdmux_rnic::{Moderation, Time};

/// Events that a window has.
const EVENTS: u32 = 64;
/// A change by more than so many percent, in whole percents, is significant.
const SIGNIFICANT_PERCENT: u64 = 10;

/// The profiles, from the least to the most moderation.
pub const PROFILES: [Moderation; 9] = {
    const fn profile(period_us: u16, count: u16) -> Moderation {
        Moderation { count, period_us }
    }
    [
        profile(1, 1),
        profile(1, 4),
        profile(2, 4),
        profile(2, 8),
        profile(4, 8),
        profile(16, 8),
        profile(16, 16),
        profile(32, 16),
        profile(32, 32),
    ]
};

/// Dynamic moderation of one completion queue.
#[derive(Clone, Debug, Default)]
pub struct Dim {
    state: State,
    /// Counters of all events, and of all completions, modulo their size.
    now: Sample,
    start: Sample,
    previous: Stats,
    profile: usize,
    goes_left: bool,
    /// Runs in a row that polling began.
    polled: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// The next event begins a window.
    #[default]
    Start,
    InProgress,
    /// The new profile is not in effect yet.
    Apply,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    at: Time,
    events: u16,
    completions: u32,
}

/// Rates of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stats {
    /// Completions and events in a millisecond.
    completions: u64,
    events: u64,
    /// Completions per event, times 100.
    ratio: u64,
}

/// A window beside the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Same,
    Better,
    Worse,
}

impl Dim {
    /// Returns the profile in effect, or about to be: an index into [`PROFILES`].
    pub fn profile(&self) -> usize {
        self.profile
    }

    /// Notes an event: a run of the handler of the queue at some time, which took so many completions. Returns the moderation that the
    /// queue is to get, if it is another one than before; events do not count until [`Dim::applied`].
    #[must_use]
    pub fn event(&mut self, now: Time, completions: u32) -> Option<Moderation> {
        self.polled = 0;
        self.now = Sample {
            at: now,
            events: self.now.events.wrapping_add(1),
            completions: self.now.completions.wrapping_add(completions),
        };
        match self.state {
            State::Start => {
                self.start = self.now;
                self.state = State::InProgress;
            }
            State::InProgress => {
                // The original subtracts 16-bit counters as 32-bit ones: where the counter wraps around, the window ends an event early.
                let events = u32::from(self.now.events).wrapping_sub(u32::from(self.start.events));
                if events >= EVENTS
                    && let Some(stats) = self.stats()
                {
                    return self.decide(stats);
                }
            }
            State::Apply => {}
        }
        None
    }

    /// Notes that the queue has the moderation that [`Dim::event`] has returned.
    pub fn applied(&mut self) {
        self.state = State::Start;
    }

    /// Notes a run of the handler that polling began: it is no event, but its completions belong to the rate. After as many such runs in a row as a
    /// window has events, the handler does not wait for wake-ups: the window is discarded, and the profile stays.
    pub fn polled(&mut self, completions: u32) {
        self.now.completions = self.now.completions.wrapping_add(completions);
        self.polled += 1;
        if self.polled >= EVENTS {
            self.polled = 0;
            if self.state == State::InProgress {
                self.state = State::Start;
            }
        }
    }

    /// Returns the rates of the window that ends now; `None` if it took no time.
    fn stats(&self) -> Option<Stats> {
        let us = (self.now.at.since_ns(self.start.at) / 1_000) as u32;
        if us == 0 {
            return None;
        }
        let per_ms = |count: u32| (u64::from(count) * 1_000).div_ceil(us.into());
        let completions = per_ms(self.now.completions.wrapping_sub(self.start.completions));
        // A window that has more events counts as one of so many.
        let events = per_ms(EVENTS);
        Some(Stats {
            completions,
            events,
            ratio: completions * 100 / events,
        })
    }

    fn decide(&mut self, stats: Stats) -> Option<Moderation> {
        let before = self.profile;
        match stats.beside(&self.previous) {
            Change::Same if stats.ratio <= 50 * self.profile as u64 => self.profile = 0,
            Change::Same => {}
            Change::Better => self.step(),
            Change::Worse => {
                self.goes_left = !self.goes_left;
                self.step();
            }
        }
        self.previous = stats;
        if self.profile == before {
            self.start = self.now;
            return None;
        }
        self.state = State::Apply;
        PROFILES.get(self.profile).copied()
    }

    /// Moves to the next profile in the direction; turns where there is none.
    fn step(&mut self) {
        match self.goes_left {
            false if self.profile + 1 < PROFILES.len() => self.profile += 1,
            true if self.profile > 0 => self.profile -= 1,
            _ => self.goes_left = !self.goes_left,
        }
    }
}

impl Stats {
    fn beside(&self, previous: &Stats) -> Change {
        let pairs = [
            (self.completions, previous.completions),
            (self.ratio, previous.ratio),
        ];
        if previous.completions == 0 {
            return Change::Same;
        }
        let significant = |(value, reference): &(u64, u64)| {
            *reference != 0 && 100 * value.abs_diff(*reference) / reference > SIGNIFICANT_PERCENT
        };
        match pairs.iter().find(|pair| significant(pair)) {
            None => Change::Same,
            Some((value, reference)) if value > reference => Change::Better,
            Some(_) => Change::Worse,
        }
    }
}

#[cfg(test)]
mod tests {
    //! The expected values are those of the original, compiled with a clock of the test's.
    use super::*;

    /// Has a window of 64 events over `us` microseconds with some completions; returns profile and direction after it.
    fn window(dim: &mut Dim, now: &mut u64, us: u64, completions: u32) -> (usize, char) {
        if dim.state == State::Start {
            assert_eq!(dim.event(Time(*now * 1_000), 0), None);
        }
        let began = *now;
        for i in 1..=64 {
            *now = began + us * i / 64;
            let count = if i == 64 { completions } else { 0 };
            if let Some(moderation) = dim.event(Time(*now * 1_000), count) {
                assert_eq!((i, moderation), (64, PROFILES[dim.profile()]));
                dim.applied();
            }
        }
        (dim.profile(), if dim.goes_left { 'L' } else { 'R' })
    }

    /// Checks windows of a duration in microseconds and a number of completions.
    fn check(windows: &[(u64, u32, usize, char)]) {
        let (mut dim, mut now) = (Dim::default(), 1_000_000);
        for (i, (us, completions, profile, direction)) in windows.iter().enumerate() {
            let after = window(&mut dim, &mut now, *us, *completions);
            assert_eq!(after, (*profile, *direction), "window {i}: {windows:?}");
        }
    }

    fn check_each_of(us: u64, windows: &[(u32, usize, char)]) {
        let windows: Vec<_> = windows
            .iter()
            .map(|(count, ix, to)| (us, *count, *ix, *to))
            .collect();
        check(&windows);
    }

    #[test]
    fn event__load_that_rises_and_falls() {
        check_each_of(
            1_000,
            &[
                (64, 0, 'R'),
                (64, 0, 'R'),
                (640, 1, 'R'),
                (1_280, 2, 'R'),
                (1_400, 2, 'R'),
                (1_550, 2, 'R'),
                (1_500, 2, 'R'),
                (1_200, 1, 'L'),
                (1_000, 2, 'R'),
                (1_000, 2, 'R'),
                (100, 1, 'L'),
                (200, 0, 'L'),
                (400, 0, 'R'),
            ],
        );
    }

    #[test]
    fn event__load_that_doubles_to_the_last_profile_and_turns_there() {
        let mut windows = vec![(64, 0, 'R')];
        windows.extend((1..=8).map(|ix| (64 << ix, ix, 'R')));
        windows.extend([
            (32_768, 8, 'L'),
            (65_536, 7, 'L'),
            (65_536, 7, 'L'),
            (20_000, 8, 'R'),
            (20_000, 8, 'R'),
        ]);
        check_each_of(3_200, &windows);
    }

    #[test]
    fn event__windows_of_different_durations() {
        check(&[
            (1_000, 64, 0, 'R'),
            (2_000, 64, 0, 'R'),
            (1_000, 640, 1, 'R'),
            (1_100, 640, 1, 'R'),
            (1_110, 640, 1, 'R'),
            (1_000, 704, 2, 'R'),
            (900, 704, 3, 'R'),
            (500, 352, 2, 'L'),
        ]);
    }

    #[test]
    fn event__few_completions_per_event_reset_the_profile() {
        check_each_of(
            1_000,
            &[
                (64, 0, 'R'),
                (128, 1, 'R'),
                (256, 2, 'R'),
                (512, 3, 'R'),
                (1_024, 4, 'R'),
                (2_048, 5, 'R'),
                (128, 4, 'L'),
                (128, 0, 'L'),
                (128, 0, 'L'),
                (640, 0, 'R'),
                (1_280, 1, 'R'),
            ],
        );
    }

    #[test]
    fn event__a_change_of_eleven_percent_is_significant() {
        check_each_of(
            1_000,
            &[
                (100, 0, 'R'),
                (110, 0, 'R'),
                (111, 0, 'R'),
                (123, 0, 'R'),
                (137, 1, 'R'),
            ],
        );
    }

    #[test]
    fn event__the_window_at_which_the_counter_wraps_around_is_short() {
        let mut dim = Dim::default();
        let mut windows = Vec::new();
        for event in 1..=65_600_u64 {
            let before = dim.start.events;
            assert_eq!(dim.event(Time(event * 10_000), 1), None);
            if dim.start.events != before {
                windows.push((event, dim.previous));
            }
        }
        let stats = |completions, events, ratio| Stats {
            completions,
            events,
            ratio,
        };
        for (event, seen) in windows.into_iter().skip(1) {
            let expected = match event {
                65_536 => stats(100, 102, 98),
                _ => stats(100, 100, 100),
            };
            assert_eq!(seen, expected, "event {event}");
        }
    }

    #[test]
    fn event__none_counts_until_the_profile_is_applied() {
        let mut dim = Dim::default();
        let events = |dim: &mut Dim, from: u64, completions| {
            (from..from + 64).find_map(|us| dim.event(Time(us * 1_000), completions))
        };
        assert_eq!(dim.event(Time(0), 0), None);
        assert_eq!(events(&mut dim, 1, 1), None);
        assert_eq!(events(&mut dim, 65, 2), Some(PROFILES[1]));
        assert_eq!(events(&mut dim, 129, 9), None);
        dim.applied();
        assert_eq!(dim.event(Time(200_000), 0), None);
        assert_eq!(events(&mut dim, 201, 9), Some(PROFILES[2]));
    }

    #[test]
    fn event__a_window_that_took_no_time_goes_on() {
        let mut dim = Dim::default();
        assert!((0..200).all(|_| dim.event(Time(5), 1).is_none()));
        assert_eq!(dim.previous, Stats::default());
        assert_eq!(dim.event(Time(1_000_005), 1), None);
        assert_ne!(dim.previous, Stats::default());
    }
}
