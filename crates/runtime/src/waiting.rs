//! The waiting policy of one thread, with the clock and the load of the machine.

use std::time::Instant;

use rdmux_verbs::waiting::{Conditions, Plan, Policy, WaitMode};
use rdmux_verbs::{Load, wake_cost_ns};

/// Decides whether its thread polls or sleeps ([`rdmux_verbs::waiting`]): [`Waiting::pause`] between two polls of a wait, and one of the
/// other calls at its end. What the first poll finds was no wait.
#[derive(Debug)]
pub struct Waiting {
    policy: Policy,
    load: Load,
    since: Instant,
}

impl Waiting {
    /// Makes a policy, pinned to a mode or, with `None`, to that of the environment, if there is one.
    pub fn new(pinned: Option<WaitMode>) -> Waiting {
        let mut policy = Policy::new(wake_cost_ns());
        policy.pin(pinned.or_else(WaitMode::of_environment));
        Waiting {
            policy,
            load: Load::default(),
            since: Instant::now(),
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

    /// Records a wait that found something without sleeping.
    pub fn came(&mut self, began: Instant) {
        self.policy.came(elapsed_ns(began));
    }

    /// Records a wait that slept, and what ended it: something that came, or its deadline.
    pub fn slept(&mut self, began: Instant, woken: bool) {
        match woken {
            true => self.policy.woke(elapsed_ns(began), None),
            false => self.policy.gave_up(elapsed_ns(began)),
        }
    }

    /// Records a wait that polled until its deadline.
    pub fn gave_up(&mut self, began: Instant) {
        self.policy.gave_up(elapsed_ns(began));
    }
}

fn elapsed_ns(began: Instant) -> u64 {
    began.elapsed().as_nanos() as u64
}
