//! How a handler of completion queues waits: the one place where polling ([`Policy`]) meets moderation
//! ([`crate::moderation`]).

use super::{Conditions, Plan, Policy, WaitMode};

/// One wait in so many is not held off, so that the policy learns how long waits are without.
const SAMPLE_EVERY: u32 = 16;

/// Decides for one handler whether it polls, holds its next look off, or sleeps.
///
/// The policy alone decides on polling, and moderation alone on holding off; neither learns from what the other has caused, so that they do
/// not oscillate. A run of the handler that polling began is no event for moderation ([`Handler::end_run`]), and a wait that was held off
/// is no gap for the policy.
///
/// Calls: [`Handler::end_run`] when nothing more is to be taken; [`Handler::plan`] as often as wanted, and if it says [`Plan::Sleep`] once
/// [`Handler::hold_off`]; at the end of the wait one of [`Handler::came`], [`Handler::slept`] and [`Handler::gave_up`].
#[derive(Clone, Debug)]
pub struct Handler {
    policy: Policy,
    /// Set if a wake-up began the present run, and not a poll.
    woken: bool,
    /// Set if the present wait was held off.
    held: bool,
    until_sample: u32,
}

impl Handler {
    /// Makes a handler that has not waited yet.
    pub fn new(policy: Policy) -> Handler {
        Handler {
            policy,
            woken: false,
            held: false,
            until_sample: SAMPLE_EVERY,
        }
    }

    /// Ends a run, which has found nothing more: a wait begins. Returns whether a wake-up began the run, so that it is an event for moderation.
    pub fn end_run(&mut self) -> bool {
        self.held = false;
        std::mem::take(&mut self.woken)
    }

    /// Returns the next step of a wait that began `elapsed_ns` ago.
    pub fn plan(&self, elapsed_ns: u64, conditions: Conditions) -> Plan {
        self.policy.plan(elapsed_ns, conditions)
    }

    /// Returns how long the handler holds its look off before it sleeps, where moderation allows `allowed_ns`; `None`: not at all. A handler
    /// holds off by a sleep, so it does not where moderation allows less than a wake-up takes: the wait would be longer than allowed, and
    /// cost the wake-up that it is to save.
    pub fn hold_off(&mut self, allowed_ns: Option<u64>) -> Option<u64> {
        let allowed_ns = allowed_ns.filter(|&ns| ns > self.policy.wake_ns())?;
        // The next run is an event for moderation, also if the sample finds something at once.
        self.woken = true;
        self.until_sample -= 1;
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY;
            return None;
        }
        self.held = true;
        Some(allowed_ns)
    }

    /// Records the end of a wait that did not sleep, `waited_ns` after it began.
    pub fn came(&mut self, waited_ns: u64) {
        if !self.held {
            self.policy.came(waited_ns);
        }
    }

    /// Records the end of a wait that slept, `waited_ns` after it began, and what ended it: something that came, or its deadline.
    pub fn slept(&mut self, waited_ns: u64, woken: bool) {
        self.woken |= woken;
        match woken {
            _ if self.held => {}
            true => self.policy.woke(waited_ns, None),
            false => self.policy.gave_up(waited_ns),
        }
    }

    /// Records the end of a wait that found nothing.
    pub fn gave_up(&mut self, waited_ns: u64) {
        if !self.held {
            self.policy.gave_up(waited_ns);
        }
    }

    /// Returns the mode in which it waits.
    pub fn mode(&self) -> WaitMode {
        self.policy.mode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAKE_NS: u64 = 20_000;

    #[test]
    fn end_run__is_an_event_only_after_a_wake_up() {
        let mut handler = Handler::new(Policy::new(WAKE_NS));
        assert!(!handler.end_run());
        handler.came(100);
        assert!(!handler.end_run(), "a run that polling began");
        handler.slept(50_000, true);
        assert!(handler.end_run());
        assert!(!handler.end_run());
        handler.slept(50_000, false);
        assert!(!handler.end_run(), "nothing came");
        assert_eq!(handler.hold_off(Some(60_000)), Some(60_000));
        handler.came(60_000);
        assert!(handler.end_run());
    }

    #[test]
    fn hold_off__leaves_the_policy_the_waits_that_it_learns_from() {
        let mut handler = Handler::new(Policy::new(WAKE_NS));
        let gap_before = handler.policy.gap_ns();
        let mut samples = 0;
        for _ in 0..160 {
            let _ = handler.end_run();
            if handler.hold_off(Some(60_000)).is_some() {
                handler.came(60_000);
                continue;
            }
            samples += 1;
            if samples == 1 {
                assert_eq!(handler.policy.gap_ns(), gap_before);
            }
            handler.slept(25_000, true);
        }
        assert_eq!(samples, 10);
        assert_eq!(handler.policy.gap_ns(), Some(5_000));
        // A run after a sample that found something at once is an event, too.
        for _ in 0..SAMPLE_EVERY {
            let _ = handler.hold_off(Some(60_000));
            handler.came(0);
            assert!(handler.end_run());
        }
        assert_eq!(handler.hold_off(None), None);
        assert_eq!(handler.hold_off(Some(0)), None);
    }

    #[test]
    fn hold_off__is_longer_than_a_wake_up() {
        let mut handler = Handler::new(Policy::new(WAKE_NS));
        assert_eq!(handler.hold_off(Some(WAKE_NS)), None);
        assert!(!handler.end_run(), "a wait that was not held off");
        assert_eq!(handler.hold_off(Some(WAKE_NS + 1)), Some(WAKE_NS + 1));
    }
}
