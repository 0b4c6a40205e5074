//! The waiting policy of one thread, with the clock and the load of the machine.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rdmux_verbs::waiting::{Conditions, Handler, Plan, Policy, WaitMode};
use rdmux_verbs::{Load, wake_cost_ns};
use rustix::thread::set_current_timer_slack;

/// Longest time for which a look is held off: as long as a caller that polls is trusted to come back.
const HOLD_OFF_MAX: Duration = Duration::from_millis(2);

/// Decides whether its thread polls, holds its next look off, or sleeps ([`Handler`]): [`Waiting::end_run`] when there is nothing more to
/// take, [`Waiting::pause`] between two polls of a wait, and one of the other calls at its end. What the first poll finds was no wait.
#[derive(Debug)]
pub struct Waiting {
    handler: Handler,
    load: Load,
    since: Instant,
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
        policy.pin(pinned.or_else(WaitMode::of_environment));
        Waiting {
            handler: Handler::new(policy),
            load: Load::default(),
            since: Instant::now(),
        }
    }

    /// Returns the mode in which it waits.
    pub fn mode(&self) -> WaitMode {
        self.handler.mode()
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
