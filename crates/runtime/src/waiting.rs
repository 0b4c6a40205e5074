//! The waiting policy of one thread, with the clock and the load of the machine.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rdmux_verbs::thread::{Policy as SchedulingPolicy, policy};
use rdmux_verbs::waiting::{Conditions, Handler, Plan, Policy, WaitMode};
use rdmux_verbs::{Load, wake_cost_ns};
use rustix::thread::{gettid, set_current_timer_slack};

/// Longest time for which a look is held off: as long as a caller that polls is trusted to come back.
const HOLD_OFF_MAX: Duration = Duration::from_millis(2);

/// Time of a yield from which on a thread that computes has had the CPU: more than a thread that passes a message on needs.
const SLICE_MIN: Duration = Duration::from_micros(500);

/// Shortest and longest time for which a thread sleeps that has lost a slice. Then it yields again, to learn whether the other one still computes, and
/// may lose another slice. The time doubles with each one that it loses in a row.
const SLEEPS_MIN: Duration = Duration::from_millis(8);
const SLEEPS_MAX: Duration = Duration::from_millis(256);

/// Decides whether its thread polls, holds its next look off, or sleeps ([`Handler`]): [`Waiting::end_run`] when there is nothing more to
/// take, [`Waiting::pause`] between two polls of a wait, and one of the other calls at its end. What the first poll finds was no wait.
#[derive(Debug)]
pub struct Waiting {
    handler: Handler,
    load: Load,
    since: Instant,
    /// It never sleeps.
    polls_always: bool,
    /// The last pause was a spin.
    keeps_cpu: bool,
    /// `None` if the thread yields however long that takes.
    slices: Option<Slices>,
}

/// Time slices that a thread has lost by yields, to threads that compute.
#[derive(Debug, Default)]
struct Slices {
    /// Until then the thread sleeps instead.
    sleeps_until: Option<Instant>,
    /// Time for which it does so.
    sleeps_for: Duration,
}

impl Slices {
    /// Yields the CPU. Returns false if the thread should sleep instead.
    fn yields(&mut self) -> bool {
        let began = Instant::now();
        if self.has_lost_one(began) {
            return false;
        }
        std::thread::yield_now();
        self.yielded(began, Instant::now());
        true
    }

    /// Returns whether the thread has lost a slice lately.
    fn has_lost_one(&self, now: Instant) -> bool {
        self.sleeps_until.is_some_and(|until| now < until)
    }

    /// Notes a yield.
    fn yielded(&mut self, began: Instant, ended: Instant) {
        let is_lost = ended - began >= SLICE_MIN;
        self.sleeps_for = match is_lost {
            true => (2 * self.sleeps_for).clamp(SLEEPS_MIN, SLEEPS_MAX),
            false => Duration::ZERO,
        };
        self.sleeps_until = is_lost.then(|| ended + self.sleeps_for);
    }
}

impl Waiting {
    /// Makes a policy, pinned to a mode or, with `None`, to that of the environment, if there is one.
    pub fn new(pinned: Option<WaitMode>) -> Waiting {
        Waiting::chained(pinned, 1)
    }

    /// Makes such a policy for a thread whose sleep ends after so many wake-ups, one after the other: of the device's thread, of others that
    /// pass on what has come, and its own.
    pub fn chained(pinned: Option<WaitMode>, wakes: u32) -> Waiting {
        let mut policy = Policy::new(wake_cost_ns() * u64::from(wakes));
        let pinned = pinned.or_else(WaitMode::of_environment);
        policy.pin(pinned);
        Waiting {
            handler: Handler::new(policy),
            load: Load::default(),
            since: Instant::now(),
            polls_always: pinned == Some(WaitMode::Running),
            keeps_cpu: false,
            slices: None,
        }
    }

    /// Has the thread sleep for a while where a yield has given its CPU to a thread that computes. After a yield it waits for the end of that one's time
    /// slice, some milliseconds; after a sleep whoever wakes it has it run at once, if the thread that calls this, and that waits later, has the policy
    /// `SCHED_OTHER`. One of another policy, or that is to poll all the time, yields all the same.
    pub fn beside_computing(mut self) -> Waiting {
        let preempts = policy(gettid()).is_ok_and(|policy| policy == SchedulingPolicy::Other);
        self.slices = (preempts && !self.polls_always).then(Slices::default);
        self
    }

    /// Returns the mode in which it waits.
    pub fn mode(&self) -> WaitMode {
        self.handler.mode()
    }

    /// Pauses between two polls of a wait that began at `began`. Returns false once the thread should sleep.
    pub fn pause(&mut self, began: Instant) -> bool {
        let plan = self.plan(elapsed_ns(began));
        self.keeps_cpu = matches!(plan, Plan::Spin { .. });
        match plan {
            Plan::Sleep => return false,
            Plan::Yield => match &mut self.slices {
                Some(slices) => return slices.yields(),
                None => std::thread::yield_now(),
            },
            Plan::Spin { .. } => std::hint::spin_loop(),
        }
        true
    }

    /// Returns whether the last pause has yielded the CPU to nobody, as no other task wants it.
    pub fn keeps_cpu(&self) -> bool {
        self.keeps_cpu
    }

    fn plan(&mut self, waited_ns: u64) -> Plan {
        // Reading the machine's load costs something: only a thread that would poll reads it.
        if self.handler.plan(waited_ns, Conditions::default()) == Plan::Sleep {
            return Plan::Sleep;
        }
        let now_ns = elapsed_ns(self.since);
        self.handler.plan(waited_ns, self.load.look(now_ns))
    }

    /// Ends a run of the handler, which has found nothing more. Returns whether a wake-up began it.
    pub fn end_run(&mut self) -> bool {
        self.handler.end_run()
    }

    /// Returns until when to hold off the look after which the thread would sleep, so that it finds more: as moderation allows.
    pub fn hold_off(&mut self, allowed: Option<Duration>) -> Option<Instant> {
        let allowed = allowed.map(|time| time.min(HOLD_OFF_MAX).as_nanos() as u64);
        let ns = self.handler.hold_off(allowed)?;
        Some(Instant::now() + Duration::from_nanos(ns))
    }

    /// Records a wait that found something without sleeping.
    pub fn came(&mut self, began: Instant) {
        self.handler.came(elapsed_ns(began));
    }

    /// Records a wait that slept, and what ended it: something that came, or its deadline.
    pub fn slept(&mut self, began: Instant, woken: bool) {
        self.handler.slept(elapsed_ns(began), woken);
    }

    /// Records a wait that polled until its deadline.
    pub fn gave_up(&mut self, began: Instant) {
        self.handler.gave_up(elapsed_ns(began));
    }
}

/// Has the kernel end this thread's sleeps when they are over, and not up to 50 us later.
pub fn set_timer_slack() {
    thread_local!(static IS_SET: Cell<bool> = const { Cell::new(false) });
    if !IS_SET.replace(true) {
        let _ = set_current_timer_slack(NonZeroU64::new(1));
    }
}

fn elapsed_ns(began: Instant) -> u64 {
    began.elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_lost_one__is_true_for_a_while_after_each_long_yield() {
        let mut slices = Slices::default();
        let began = Instant::now();
        assert!(!slices.has_lost_one(began));
        slices.yielded(began, began + SLICE_MIN / 2);
        assert!(!slices.has_lost_one(began + SLICE_MIN));
        let ended = began + 3 * SLICE_MIN;
        for time in [SLEEPS_MIN, 2 * SLEEPS_MIN] {
            slices.yielded(began, ended);
            assert!(slices.has_lost_one(ended) && slices.has_lost_one(ended + time / 2));
            assert!(!slices.has_lost_one(ended + time));
        }
        for _ in 0..20 {
            slices.yielded(began, ended);
        }
        assert!(!slices.has_lost_one(ended + SLEEPS_MAX));
        slices.yielded(ended, ended);
        assert!(!slices.has_lost_one(ended));
        slices.yielded(began, ended);
        assert!(!slices.has_lost_one(ended + SLEEPS_MIN));
    }
}
