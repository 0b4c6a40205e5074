//! Moderation by the rate of completions, a policy for where [`dim`](super::dim) is weak: it finds its moderation in one window instead of
//! one profile after the other, also under a steady load, and leaves it with the first event after a pause.
//!
//! A wake-up may wait for as long as [`PERIOD_US`], if at least [`WORTHWHILE`] completions come in that time at the present rate. Where
//! peers have few requests in flight they wait for the handler, not the handler for them: the rate then falls, the policy takes the
//! moderation back, and tries again after a time that doubles with each failure.

use rdmux_rnic::{Moderation, Time};

/// Longest time that a wake-up waits, in microseconds.
pub const PERIOD_US: u16 = 64;
/// Completions expected in that time from which waiting is worthwhile.
pub const WORTHWHILE: u64 = 4;
/// Most completions that a wake-up waits for.
pub const COUNT_MAX: u64 = 256;
/// A window ends with this many events, if it lasted 0.5 ms.
pub const EVENTS: u32 = 16;
const WINDOW_NS_MIN: u64 = 500_000;
/// A pause between two events after which nothing is known about the load.
pub const PAUSE_NS: u64 = 1_000_000;
/// A rate that falls by more than so many percent when moderation begins has fallen by it.
const FALL_PERCENT: u64 = 5;
/// Time without moderation after the first failure, and the longest.
const RETRY_NS: u64 = 10_000_000;
const RETRY_NS_MAX: u64 = 1_000_000_000;

/// Moderation of one queue by its rate.
#[derive(Clone, Debug, Default)]
pub struct Rate {
    moderation: Option<Moderation>,
    window: Option<Window>,
    last: Time,
    /// Completions per second without moderation, while the first window with it runs.
    before: Option<u64>,
    failures: u32,
    retry_at: Time,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    began: Time,
    events: u32,
    completions: u64,
}

impl Window {
    fn new(began: Time) -> Window {
        Window {
            began,
            events: 0,
            completions: 0,
        }
    }
}

impl Rate {
    /// Notes an event, and returns the moderation from now on ([`super::Moderator::event`]).
    pub fn event(&mut self, now: Time, completions: u32) -> Option<Moderation> {
        self.look_at_pause(now);
        let Some(window) = &mut self.window else {
            // The completions of this event came before the window.
            self.window = Some(Window::new(now));
            return self.moderation;
        };
        window.events += 1;
        window.completions += u64::from(completions);
        let ns = now.since_ns(window.began);
        if window.events >= EVENTS && ns >= WINDOW_NS_MIN || ns >= PAUSE_NS {
            let per_second = window.completions * 1_000_000_000 / ns;
            self.window = None;
            self.decide(now, per_second);
            self.window = Some(Window::new(now));
        }
        self.moderation
    }

    /// Notes a run of the handler that polling began: it is no event, but its completions belong to the rate. The moderation of a handler that polls
    /// for long stays as it is.
    pub fn polled(&mut self, now: Time, completions: u32) {
        self.look_at_pause(now);
        let Some(window) = &mut self.window else {
            return;
        };
        window.completions += u64::from(completions);
        if now.since_ns(window.began) >= PAUSE_NS {
            *window = Window::new(now);
            // A rate of so long ago says nothing about the effect of moderation.
            self.before = None;
        }
    }

    /// Forgets the load after a pause.
    fn look_at_pause(&mut self, now: Time) {
        if now.since_ns(self.last) >= PAUSE_NS {
            self.moderation = None;
            self.before = None;
            self.window = None;
        }
        self.last = now;
    }

    fn decide(&mut self, now: Time, per_second: u64) {
        if let Some(before) = self.before.take() {
            if per_second * 100 < before * (100 - FALL_PERCENT) {
                self.moderation = None;
                self.retry_at = now + (RETRY_NS << self.failures.min(20)).min(RETRY_NS_MAX);
                self.failures += 1;
                return;
            }
            self.failures = 0;
        }
        let expected = per_second * u64::from(PERIOD_US) / 1_000_000;
        let wanted = (expected >= WORTHWHILE).then(|| Moderation {
            count: expected.min(COUNT_MAX) as u16,
            period_us: PERIOD_US,
        });
        match (self.moderation, wanted) {
            (None, Some(_)) if now < self.retry_at => {}
            (None, Some(wanted)) => {
                self.before = Some(per_second);
                self.moderation = Some(wanted);
            }
            // A rate that hardly differs is no reason to change a queue's moderation, which may be a system call.
            (Some(has), Some(wanted))
                if u32::from(has.count.abs_diff(wanted.count)) * 4 < has.count.into() => {}
            (_, wanted) => self.moderation = wanted,
        }
    }
}
