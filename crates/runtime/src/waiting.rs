//! The waiting policy of one thread, with the clock and the load of the machine.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rdmux_verbs::waiting::{Conditions, Plan, Policy, WaitMode};
use rdmux_verbs::{Load, wake_cost_ns};
use rustix::thread::{ClockId, clock_nanosleep_relative, set_current_timer_slack};

/// Decides whether its thread polls or sleeps ([`rdmux_verbs::waiting`]): [`Waiting::pause`] between two polls of a wait, and one of the
/// other calls at its end. What the first poll finds was no wait.
#[derive(Debug)]
pub struct Waiting {
    policy: Policy,
    load: Load,
    since: Instant,
    /// Set if a wake-up began the present run of the handler, and not a poll.
    woken: bool,
    /// Set if this wait was held off: how long it would have been without is unknown.
    held: bool,
    /// Waits until one that is not held off, from which the policy learns the gap.
    until_sample: u32,
}

/// One wait in so many is not held off.
const SAMPLE_EVERY: u32 = 16;

impl Waiting {
    /// Makes a policy, pinned to a mode or, with `None`, to that of the environment, if there is one.
    pub fn new(pinned: Option<WaitMode>) -> Waiting {
        let mut policy = Policy::new(wake_cost_ns());
        policy.pin(pinned.or_else(WaitMode::of_environment));
        Waiting {
            policy,
            load: Load::default(),
            since: Instant::now(),
            woken: false,
            held: false,
            until_sample: SAMPLE_EVERY,
        }
    }

    /// Pauses between two polls of a wait that began at `began`. Returns false once the thread should sleep.
    pub fn pause(&mut self, began: Instant) -> bool {
        match self.plan(elapsed_ns(began)) {
            Plan::Sleep => return false,
            Plan::Yield => std::thread::yield_now(),
            Plan::Spin { .. } => std::hint::spin_loop(),
        }
        true
    }

    fn plan(&mut self, waited_ns: u64) -> Plan {
        // Reading the machine's load costs something: only a thread that would poll reads it.
        if self.policy.plan(waited_ns, Conditions::default()) == Plan::Sleep {
            return Plan::Sleep;
        }
        let now_ns = elapsed_ns(self.since);
        self.policy.plan(waited_ns, self.load.look(now_ns))
    }

    /// Ends a run of the handler, which has found nothing more. Returns whether a wake-up began it.
    pub fn end_run(&mut self) -> bool {
        self.held = false;
        std::mem::take(&mut self.woken)
    }

    /// Delays the look after which the thread would sleep, by what moderation says, so that it finds more. Moderation alone decides on the
    /// delay, and the policy alone whether the thread polls; the policy does not learn from waits that were delayed, so neither acts on what the
    /// other has caused.
    pub fn hold_off(&mut self, by: Option<Duration>, deadline: Option<Instant>) {
        let Some(by) = by else { return };
        self.until_sample -= 1;
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY;
            return;
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let by = left.map_or(by, |left| left.min(by));
        if by.is_zero() {
            return;
        }
        set_timer_slack();
        let _ = clock_nanosleep_relative(ClockId::Monotonic, &by.try_into().unwrap_or_default());
        self.held = true;
        self.woken = true;
    }

    /// Records a wait that found something without sleeping.
    pub fn came(&mut self, began: Instant) {
        if !self.held {
            self.policy.came(elapsed_ns(began));
        }
    }

    /// Records a wait that slept, and what ended it: something that came, or its deadline.
    pub fn slept(&mut self, began: Instant, woken: bool) {
        self.woken |= woken;
        match woken {
            _ if self.held => {}
            true => self.policy.woke(elapsed_ns(began), None),
            false => self.policy.gave_up(elapsed_ns(began)),
        }
    }

    /// Records a wait that polled until its deadline.
    pub fn gave_up(&mut self, began: Instant) {
        if !self.held {
            self.policy.gave_up(elapsed_ns(began));
        }
    }
}

/// Has the kernel end this thread's sleeps when they are over, and not up to 50 us later.
fn set_timer_slack() {
    thread_local!(static IS_SET: Cell<bool> = const { Cell::new(false) });
    if !IS_SET.replace(true) {
        let _ = set_current_timer_slack(NonZeroU64::new(1));
    }
}

fn elapsed_ns(began: Instant) -> u64 {
    began.elapsed().as_nanos() as u64
}
