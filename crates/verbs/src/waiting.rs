//! Waiting: a waiter polls (looks) again and again, or sleeps until woken. The policy is pure: it reads no clock and makes no
//! system call.
//!
//! A wake-up takes some 20 µs, a poll far less than 1 µs, and nobody knows beforehand how long a wait will be. A waiter that polls
//! for as long as a wake-up takes, and only then sleeps, never pays more than twice what the best choice would have cost (Karlin,
//! Manasse, Rudolph, Sleator: "Competitive snoopy caching", Algorithmica 3, 1988). [`Policy`] does that where waits have been
//! short, and sleeps at once where they have been long. Where another task needs the CPU, the waiter yields it between two polls: a
//! time slice of that task costs less than a wake-up, and a peer on the same CPU can answer only while the waiter yields.
//!
//! A wait begins when a poll has found nothing. Its *gap* is the time from then until what is waited for arrives. What the first
//! poll finds was no wait and is not reported: a batch that is taken without waiting says nothing about the wait after it.
//!
//! ```
//! use rdmux_verbs::waiting::{Conditions, Plan, Policy};
//! # use std::time::Instant;
//! # struct Queue;
//! # impl Queue {
//! #     fn look(&self) -> Option<u32> { Some(1) }
//! #     fn arm(&self) {}
//! #     fn sleep(&self) -> Option<u64> { None }
//! # }
//! # fn wait(queue: &Queue, policy: &mut Policy, conditions: impl Fn() -> Conditions) -> u32 {
//! let began = Instant::now();
//! let elapsed_ns = || began.elapsed().as_nanos() as u64;
//! loop {
//!     match policy.plan(elapsed_ns(), conditions()) {
//!         Plan::Spin { .. } => std::hint::spin_loop(),
//!         Plan::Yield => std::thread::yield_now(),
//!         Plan::Sleep => break,
//!     }
//!     if let Some(found) = queue.look() {
//!         policy.came(elapsed_ns());
//!         return found;
//!     }
//! }
//! loop {
//!     queue.arm();
//!     if let Some(found) = queue.look() {
//!         policy.came(elapsed_ns());
//!         return found;
//!     }
//!     let wake_ns = queue.sleep();
//!     if let Some(found) = queue.look() {
//!         policy.woke(elapsed_ns(), wake_ns);
//!         return found;
//!     }
//! }
//! # }
//! # wait(&Queue, &mut Policy::new(20_000), Conditions::default);
//! ```

mod handler;

pub use handler::Handler;

/// Assumed cost of a wake-up before one was measured.
pub const WAKE_NS_DEFAULT: u64 = 20_000;
/// A wake-up on the sleeper's own CPU takes 1 µs; less than this is an error of measurement.
const WAKE_NS_MIN: u64 = 200;
/// Longest cost of a wake-up that counts: on a machine where a waiter would poll for longer, polling does not pay.
const WAKE_NS_MAX: u64 = 200_000;
/// A gap counts as no more than this many wake-ups, so that after an idle hour, as after an idle moment, a few short gaps are
/// enough to be believed.
const GAP_WAKES_MAX: u64 = 4;
/// A new gap's part of the mean is one in this many.
const GAP_WEIGHT: u64 = 8;
/// A new wake-up's part of the mean is one in this many.
const WAKE_WEIGHT: u64 = 8;
/// In [`WaitMode::Interrupted`] one wait in this many polls for twice as long.
const PROBE_EVERY: u32 = 16;

/// Effort of a waiter for a short wait, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum WaitMode {
    /// Sleeps at once: what it waits for is more than two wake-ups away.
    Blocked,
    /// Polls for one wake-up's time, then sleeps: what it waits for is one or two wake-ups away.
    ///
    /// The answer of a peer that itself sleeps is that far away. Where both sides sleep, each sees a wake-up's time in the other's
    /// gaps, and only by polling does it find out that the gaps could be short.
    Interrupted,
    /// Polls until it arrives, for one wake-up's time at most: what it waits for is less than that away.
    Running,
}

impl WaitMode {
    /// Returns the mode that the environment variable `RDMUX_WAIT` pins.
    pub fn of_environment() -> Option<WaitMode> {
        std::env::var("RDMUX_WAIT").ok()?.parse().ok()
    }

    fn of(gap_ns: u64, wake_ns: u64) -> WaitMode {
        if gap_ns < wake_ns {
            WaitMode::Running
        } else if gap_ns <= 2 * wake_ns {
            WaitMode::Interrupted
        } else {
            WaitMode::Blocked
        }
    }
}

/// State of the machine, as it concerns a waiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Set when the peer that is waited for runs on this CPU: it cannot run while the waiter polls.
    pub shares_cpu: bool,
    /// Set when more tasks want to run than there are CPUs for them.
    pub oversubscribed: bool,
}

impl Conditions {
    fn need_this_cpu(self) -> bool {
        self.shares_cpu || self.oversubscribed
    }
}

/// Next step of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Arm, poll once more, sleep.
    Sleep,
    /// Poll again and again for this long, then plan again.
    Spin {
        /// At least 1; `u64::MAX` for ever.
        ns: u64,
    },
    /// Yield the CPU, poll, and plan again. What is waited for comes from one of the tasks that want the CPU, or they have it for
    /// so long that the next plan is to sleep.
    Yield,
}

/// Decides how one waiter waits, based on its previous waits.
///
/// Calls: [`plan`](Policy::plan) in a wait, as often as wanted; at its end one of [`came`](Policy::came),
/// [`woke`](Policy::woke) and [`gave_up`](Policy::gave_up).
#[derive(Clone, Debug)]
pub struct Policy {
    pinned: Option<WaitMode>,
    mode: WaitMode,
    wake_ns: u64,
    /// Moving mean; `None` before the first wait has ended.
    gap_ns: Option<u64>,
    /// Number of waits until one that may poll for twice as long.
    until_probe: u32,
}

impl Policy {
    /// Makes a policy that knows what a wake-up costs, and nothing yet about gaps.
    pub fn new(wake_ns: u64) -> Policy {
        Policy {
            pinned: None,
            mode: WaitMode::Interrupted,
            wake_ns: wake_ns.clamp(WAKE_NS_MIN, WAKE_NS_MAX),
            gap_ns: None,
            until_probe: PROBE_EVERY - 1,
        }
    }

    /// Pins the policy to one mode, or (`None`) lets it choose the one that fits.
    ///
    /// A waiter that is pinned to [`WaitMode::Running`] never sleeps, but yields where its CPU is needed.
    pub fn pin(&mut self, mode: Option<WaitMode>) {
        self.pinned = mode;
    }

    /// Records the end of a wait that did not sleep, `waited_ns` after it began.
    pub fn came(&mut self, waited_ns: u64) {
        self.see_gap(waited_ns);
    }

    /// Records the end of a wait that slept, `waited_ns` after it began. `wake_ns`, where known: how long ago the waker woke it.
    pub fn woke(&mut self, waited_ns: u64, wake_ns: Option<u64>) {
        // A wake-up takes some time, and begins after the wait: otherwise the clock is too coarse, or the wake-up was another
        // wait's.
        let measured = wake_ns.filter(|&wake| 0 < wake && wake <= waited_ns);
        if let Some(wake) = measured {
            self.see_wake(wake);
        }
        let wake_ns = measured.unwrap_or(self.wake_ns);
        self.see_gap(waited_ns.saturating_sub(wake_ns));
    }

    /// Records the end of a wait that found nothing.
    pub fn gave_up(&mut self, waited_ns: u64) {
        // The gap is at least that long, which is news if it was expected to be shorter.
        if waited_ns > self.gap_ns.unwrap_or(self.wake_ns) {
            self.see_gap(waited_ns);
        }
    }

    /// Returns the next step of a wait that began `elapsed_ns` ago.
    pub fn plan(&self, elapsed_ns: u64, conditions: Conditions) -> Plan {
        if self.pinned == Some(WaitMode::Running) {
            return if conditions.need_this_cpu() {
                Plan::Yield
            } else {
                Plan::Spin { ns: u64::MAX }
            };
        }
        match self.budget_ns().saturating_sub(elapsed_ns) {
            0 => Plan::Sleep,
            _ if conditions.need_this_cpu() => Plan::Yield,
            ns => Plan::Spin { ns },
        }
    }

    /// Returns the mode in which it waits.
    pub fn mode(&self) -> WaitMode {
        self.pinned.unwrap_or(self.mode)
    }

    /// Returns the cost of a wake-up.
    pub fn wake_ns(&self) -> u64 {
        self.wake_ns
    }

    /// Returns the gap to expect, no more than four wake-ups; `None` before the first wait has ended.
    pub fn gap_ns(&self) -> Option<u64> {
        self.gap_ns
    }

    /// Returns how long a wait may poll. Shorter gaps do not lower it: a gap that is a little longer than usual would then cost a
    /// wake-up where it could have cost next to nothing, and the polling that this saves, once in a burst, costs less than a
    /// wake-up.
    fn budget_ns(&self) -> u64 {
        match self.mode() {
            WaitMode::Blocked => 0,
            // If the peer is itself woken first and then takes some time, polling for one wake-up's time always just misses its
            // answer.
            WaitMode::Interrupted if self.until_probe == 0 => 2 * self.wake_ns,
            WaitMode::Interrupted | WaitMode::Running => self.wake_ns,
        }
    }

    fn see_gap(&mut self, gap_ns: u64) {
        let max = GAP_WAKES_MAX * self.wake_ns;
        let new = gap_ns.min(max);
        let gap = match self.gap_ns {
            None => new,
            Some(old) => moved(old.min(max), new, GAP_WEIGHT),
        };
        let least = WaitMode::of(gap, self.wake_ns);
        let mode = match self.gap_ns {
            None => least,
            // The policy polls more as soon as that should pay, and less only when it clearly does not pay: gaps vary.
            Some(_) => self.mode.clamp(least, WaitMode::of(gap - gap / 3, self.wake_ns)),
        };
        let begins_to_look = self.mode == WaitMode::Blocked && mode > WaitMode::Blocked;
        self.until_probe = match self.until_probe {
            _ if begins_to_look => 0,
            0 => PROBE_EVERY - 1,
            waits => waits - 1,
        };
        self.mode = mode;
        self.gap_ns = Some(gap);
    }

    /// Takes a wake-up's time into the mean. One wake-up that took long, because another task had the CPU, moves it by a sixteenth
    /// at most.
    fn see_wake(&mut self, wake_ns: u64) {
        let half = self.wake_ns / 2;
        let near = wake_ns.clamp(self.wake_ns - half, self.wake_ns + half);
        self.wake_ns = moved(self.wake_ns, near, WAKE_WEIGHT).clamp(WAKE_NS_MIN, WAKE_NS_MAX);
    }
}

/// Returns a mean, moved towards a new value by one part in `weight`.
fn moved(mean: u64, new: u64, weight: u64) -> u64 {
    let step = mean.abs_diff(new).div_ceil(weight);
    if new > mean { mean + step } else { mean - step }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: u64 = 20_000;
    const FREE: Conditions = Conditions {
        shares_cpu: false,
        oversubscribed: false,
    };

    /// SplitMix64 (Steele, Lea, Flood, 2014).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        fn unit(&mut self) -> f64 {
            (self.next() >> 11) as f64 / (1u64 << 53) as f64
        }

        fn within(&mut self, low: u64, high: u64) -> u64 {
            low + (self.unit() * (high - low) as f64) as u64
        }

        fn exponential(&mut self, mean: u64) -> u64 {
            (-(1.0 - self.unit()).ln() * mean as f64) as u64
        }
    }

    fn spin_ns(policy: &Policy) -> u64 {
        match policy.plan(0, FREE) {
            Plan::Spin { ns } => ns,
            Plan::Sleep => 0,
            Plan::Yield => panic!("yields on a free machine"),
        }
    }

    /// Runs one wait with this gap. Returns its cost: the time spent polling, and the wake-up if it slept.
    fn wait(policy: &mut Policy, gap_ns: u64) -> u64 {
        let budget = spin_ns(policy);
        if gap_ns <= budget {
            policy.came(gap_ns);
            gap_ns
        } else {
            policy.woke(gap_ns + B, Some(B));
            budget + B
        }
    }

    fn after(gaps: &[u64]) -> Policy {
        let mut policy = Policy::new(B);
        for &gap in gaps {
            wait(&mut policy, gap);
        }
        policy
    }

    #[test]
    fn plan__table_of_the_rules() {
        let table = [
            // Gap, mode, time for which it polls.
            (0, WaitMode::Running, B),
            (500, WaitMode::Running, B),
            (B - 1, WaitMode::Running, B),
            (B, WaitMode::Interrupted, B),
            (2 * B, WaitMode::Interrupted, B),
            (2 * B + 1, WaitMode::Blocked, 0),
            (50 * B, WaitMode::Blocked, 0),
            (u64::MAX / 2, WaitMode::Blocked, 0),
        ];
        for (gap, mode, spin) in table {
            let policy = after(&[gap; 3]);
            assert_eq!((policy.mode(), spin_ns(&policy)), (mode, spin), "gap {gap}");
        }
    }

    #[test]
    fn plan__first_wait_looks_for_one_wake_up() {
        let policy = Policy::new(B);
        assert_eq!(policy.plan(0, FREE), Plan::Spin { ns: B });
        assert_eq!(policy.plan(B - 1, FREE), Plan::Spin { ns: 1 });
        assert_eq!(policy.plan(B, FREE), Plan::Sleep);
        assert_eq!(policy.plan(u64::MAX, FREE), Plan::Sleep);
    }

    #[test]
    fn plan__never_spins_where_the_cpu_is_needed() {
        for needed in [
            Conditions {
                shares_cpu: true,
                ..FREE
            },
            Conditions {
                oversubscribed: true,
                ..FREE
            },
        ] {
            for gap in [0, 500, B, 100 * B] {
                let mut policy = after(&[gap; 20]);
                for pinned in [None, Some(WaitMode::Blocked), Some(WaitMode::Interrupted)] {
                    policy.pin(pinned);
                    let plan = if policy.mode() == WaitMode::Blocked {
                        Plan::Sleep
                    } else {
                        Plan::Yield
                    };
                    assert_eq!(policy.plan(0, needed), plan, "gap {gap}, {pinned:?}");
                    assert_eq!(policy.plan(2 * B, needed), Plan::Sleep, "gap {gap}, {pinned:?}");
                }
            }
        }
    }

    #[test]
    fn plan__looks_again_when_the_cpu_is_free_again() {
        let policy = after(&[500; 5]);
        let needed = Conditions {
            oversubscribed: true,
            ..FREE
        };
        assert_eq!(policy.plan(1_000, needed), Plan::Yield);
        assert_eq!(policy.plan(1_000, FREE), Plan::Spin { ns: B - 1_000 });
    }

    #[test]
    fn pin__running_spins_without_end_or_yields() {
        let mut policy = after(&[100 * B; 20]);
        policy.pin(Some(WaitMode::Running));
        assert_eq!(policy.mode(), WaitMode::Running);
        assert_eq!(policy.plan(u64::MAX, FREE), Plan::Spin { ns: u64::MAX });
        let shares_cpu = Conditions {
            shares_cpu: true,
            ..FREE
        };
        assert_eq!(policy.plan(0, shares_cpu), Plan::Yield);
        let oversubscribed = Conditions {
            oversubscribed: true,
            ..FREE
        };
        assert_eq!(policy.plan(0, oversubscribed), Plan::Yield);
    }

    #[test]
    fn pin__blocked_never_spins_and_learns_all_the_same() {
        let mut policy = Policy::new(B);
        policy.pin(Some(WaitMode::Blocked));
        for _ in 0..20 {
            assert_eq!(policy.plan(0, FREE), Plan::Sleep);
            policy.woke(500 + B, Some(B));
        }
        policy.pin(None);
        assert_eq!(policy.mode(), WaitMode::Running);
    }

    #[test]
    fn mode__shape_of_what_was_measured() {
        // Round trips of 0.5 µs, and pauses of a millisecond between requests.
        assert_eq!(after(&[500; 10]).mode(), WaitMode::Running);
        assert_eq!(after(&[1_000_000; 10]).mode(), WaitMode::Blocked);
        // Polling for 20 µs catches what comes every 10 µs; polling for 5 µs would cost its CPU and the wake-up.
        assert_eq!(wait(&mut after(&[10_000; 10]), 10_000), 10_000);
        // Polling never pays for pauses of 100 µs.
        assert_eq!(wait(&mut after(&[100_000; 10]), 100_000), B);
    }

    #[test]
    fn see_gap__a_few_short_gaps_after_a_long_idle_time_are_believed() {
        for idle in [10 * B, 3_600_000_000_000, u64::MAX / 2] {
            let mut policy = after(&[idle; 100]);
            assert_eq!(spin_ns(&policy), 0);
            let waits = (1..).find(|_| {
                wait(&mut policy, 500);
                policy.mode() > WaitMode::Blocked
            });
            assert_eq!(waits, Some(6), "idle for {idle}");
            for _ in 0..5 {
                assert_eq!(wait(&mut policy, 500), 500, "idle for {idle}");
            }
            assert_eq!(policy.mode(), WaitMode::Running, "idle for {idle}");
        }
    }

    #[test]
    fn see_gap__a_single_pause_changes_nothing() {
        let mut policy = after(&[500; 100]);
        wait(&mut policy, 1_000_000_000);
        assert_eq!(policy.mode(), WaitMode::Running);
    }

    #[test]
    fn see_gap__traffic_that_ends_is_noticed() {
        let mut policy = after(&[0; 100]);
        let spun = (0..100).filter(|_| wait(&mut policy, 1_000_000) > B).count();
        assert_eq!((spun, policy.mode()), (11, WaitMode::Blocked));
    }

    #[test]
    fn gave_up__counts_as_a_gap_where_that_is_news() {
        let mut policy = after(&[10_000; 10]);
        policy.gave_up(100);
        assert_eq!(policy.gap_ns(), Some(10_000));
        for _ in 0..10 {
            policy.gave_up(1_000_000);
        }
        assert_eq!(policy.mode(), WaitMode::Blocked);

        let mut idle = Policy::new(B);
        idle.gave_up(1_000_000_000);
        assert_eq!(idle.mode(), WaitMode::Blocked);
    }

    #[test]
    fn woke__subtracts_the_wake_up_from_the_gap() {
        let mut policy = Policy::new(B);
        policy.woke(90_000, Some(80_000));
        assert_eq!(policy.gap_ns(), Some(10_000));
        // The wait was shorter than the estimate, and no wake-up was measured: the gap is zero.
        for wake in [None, Some(0), Some(9_000_000)] {
            let mut policy = Policy::new(B);
            policy.woke(5_000, wake);
            assert_eq!((policy.gap_ns(), policy.wake_ns()), (Some(0), B));
        }
    }

    #[test]
    fn see_wake__follows_the_machine_and_ignores_preemption() {
        let mut random = Random(1);
        let mut policy = Policy::new(B);
        for i in 0..1_000 {
            let wake = if i % 10 == 0 {
                10_000_000
            } else {
                random.within(B - 4_000, B + 4_000)
            };
            policy.woke(wake, Some(wake));
            assert!(
                (B * 8 / 10..B * 13 / 10).contains(&policy.wake_ns()),
                "{}",
                policy.wake_ns()
            );
        }
        for (wake, within) in [(60_000, 30), (1_100, 80)] {
            for _ in 0..within {
                policy.woke(wake, Some(wake));
            }
            assert!(
                policy.wake_ns().abs_diff(wake) < wake / 10,
                "{}",
                policy.wake_ns()
            );
        }
    }

    #[test]
    fn policy__withstands_any_numbers() {
        let values = [0, 1, 199, B, u64::MAX / 2, u64::MAX - 1, u64::MAX];
        for first in values {
            let mut policy = Policy::new(first);
            for i in 0..5_000 {
                let (a, b) = (values[i % 7], values[i / 7 % 7]);
                match i % 4 {
                    0 => policy.came(a),
                    1 => policy.woke(a, Some(b)),
                    2 => policy.woke(a, None),
                    _ => policy.gave_up(a),
                }
                assert!((WAKE_NS_MIN..=WAKE_NS_MAX).contains(&policy.wake_ns()));
                assert!(spin_ns(&policy) <= 2 * WAKE_NS_MAX);
                let _ = policy.plan(b, FREE);
            }
        }
    }

    #[test]
    fn policy__clock_that_stands_still() {
        let mut policy = Policy::new(B);
        for _ in 0..100 {
            policy.woke(0, Some(0));
            policy.came(0);
        }
        assert_eq!((policy.mode(), policy.wake_ns()), (WaitMode::Running, B));
    }

    /// Returns the number of changes of mode in `waits` waits, after some waits to learn.
    fn changes(mut gap: impl FnMut() -> u64, waits: u32) -> u32 {
        let mut policy = Policy::new(B);
        let mut changes = 0;
        for i in 0..waits + 32 {
            let before = policy.mode();
            wait(&mut policy, gap());
            changes += u32::from(i >= 32 && policy.mode() != before);
        }
        changes
    }

    #[test]
    fn mode__keeps_still_under_a_steady_load() {
        let mut random = Random(2);
        for mean in (1..=80).map(|i| i * B / 20) {
            assert_eq!(changes(|| mean, 10_000), 0, "gap {mean}");
            // The mode may still settle, but must not change back.
            let jitter = changes(|| random.within(mean * 3 / 4, mean * 5 / 4), 10_000);
            assert!(jitter <= 1, "gap {mean} give or take a quarter: {jitter} changes");
            let exponential = changes(|| random.exponential(mean), 10_000);
            assert!(exponential <= 500, "gap {mean}, Poisson: {exponential} changes");
        }
    }

    /// Returns the cost of 20,000 waits, relative to their cost if every gap is known beforehand.
    fn ratio(seed: u64, mut gap: impl FnMut(&mut Random) -> u64) -> f64 {
        let mut random = Random(seed);
        let mut policy = Policy::new(B);
        let (mut cost, mut best) = (0, 0);
        for _ in 0..20_000 {
            let gap = gap(&mut random);
            cost += wait(&mut policy, gap);
            best += gap.min(B);
        }
        cost as f64 / best as f64
    }

    #[test]
    fn policy__costs_about_twice_the_clairvoyant_optimum_at_most() {
        // Probes cost a sixteenth of a wake-up per wait.
        const AT_MOST: f64 = 2.0 + 1.0 / PROBE_EVERY as f64 + 0.02;
        let mut worst = (0.0, "", 0, 0);
        for seed in 0..4 {
            for i in 1..=100 {
                let (mean, part) = (i * B / 20, i as f64 / 100.0);
                let (mut left, mut idle) = (0u64, false);
                let loads = [
                    ("constant", ratio(seed, |_| mean)),
                    ("uniform", ratio(seed, |r| r.within(0, 2 * mean))),
                    ("exponential", ratio(seed, |r| r.exponential(mean))),
                    (
                        "pauses",
                        ratio(seed, |r| if r.unit() < part { 1_000_000 } else { 200 }),
                    ),
                    (
                        "just missed",
                        ratio(seed, |r| if r.unit() < part { B + 1_000 } else { 200 }),
                    ),
                    (
                        "Pareto",
                        ratio(seed, |r| {
                            (200.0 * r.unit().powf(-1.0 / (0.2 + part))).min(1e12) as u64
                        }),
                    ),
                    (
                        "bursts",
                        ratio(seed, |r| {
                            if left == 0 {
                                idle = !idle;
                                left = 1 + r.exponential(i);
                            }
                            left -= 1;
                            if idle { 1_000_000 } else { 500 }
                        }),
                    ),
                ];
                for (load, ratio) in loads {
                    assert!(ratio <= AT_MOST, "{load} {i}, seed {seed}: {ratio:.3}");
                    if ratio > worst.0 {
                        worst = (ratio, load, i, seed);
                    }
                }
            }
        }
        let (ratio, load, i, seed) = worst;
        println!("worst: {ratio:.3} times the optimum, {load} {i}, seed {seed}");
    }

    /// Lets two sides answer each other's messages after `service_ns`, at first from sleep. Returns how many messages, of 2,000, it
    /// takes until neither side waits for a wake-up.
    fn messages_until_awake(random: &mut Random, service_ns: u64, wake_ns: (u64, u64)) -> u32 {
        let mut sides = [after(&[100 * B; 20]), after(&[100 * B; 20])];
        let mut last_asleep = 0;
        let mut gap = 100 * B;
        for message in 0..2_000 {
            let side = &mut sides[message as usize % 2];
            if gap <= spin_ns(side) {
                side.came(gap);
                gap = service_ns;
            } else {
                let wake = random.within(wake_ns.0, wake_ns.1);
                side.woke(gap + wake, Some(wake));
                gap = wake + service_ns;
                last_asleep = message;
            }
        }
        last_asleep
    }

    #[test]
    fn policy__two_sleepers_find_out_that_they_could_run() {
        for seed in 0..20 {
            let mut random = Random(seed);
            for service in [0, 500, 4_000, 8_000, 12_000, 16_000] {
                for wake in [(B, B), (B * 9 / 10, B * 11 / 10), (B * 7 / 10, B * 13 / 10)] {
                    let messages = messages_until_awake(&mut random, service, wake);
                    assert!(
                        messages < 100,
                        "seed {seed}, service {service}, wake {wake:?}: {messages}"
                    );
                }
            }
        }
    }
}
