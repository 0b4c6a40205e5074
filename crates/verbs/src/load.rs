//! Conditions of the machine for a thread that waits: how many CPUs there are, whether other threads need this one, and the cost of a
//! wake-up. This module measures; [`crate::waiting`] decides.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::waiting::{Conditions, WAKE_NS_DEFAULT};
use crate::waker::Waker;

/// Time for which an answer of [`Load::look`] is valid.
const LOOK_NS: u64 = 1_000_000;
/// Time for which a number of CPUs is valid: administrators change it, and asking takes 30 µs.
const CPUS_NS: u64 = 1_000_000_000;
/// Divisor of the elapsed time: others need the CPU when the thread was in the run queue for more than 1 / `WAITED_PART` of it.
const WAITED_PART: u64 = 5;
/// Time without spinning after others needed the CPU. A thread that sleeps is in no run queue: only spinning again shows whether they still
/// need it, and that may cost a time slice.
const HOLD_NS_MIN: u64 = 100_000_000;
/// Upper limit of the time without spinning, which doubles each time that others still need the CPU at its end.
const HOLD_NS_MAX: u64 = 1_600_000_000;
/// Longest time for the measurement of a wake-up.
const MEASURE_TIME: Duration = Duration::from_millis(2);
/// Round trips of that measurement.
const MEASURE_ROUNDS: usize = 40;
/// Fewest round trips for a result: on a busy machine some take a hundred times as long.
const MEASURE_ROUNDS_MIN: usize = 8;

/// Returns the CPU that this thread runs on at the moment.
pub fn current_cpu() -> u32 {
    sched_getcpu() as u32
}

/// Returns whether this thread and all that it could wait for share one CPU: the machine has no more, or the cgroups' quotas pay for no
/// more, rounded down (with a quota of one and a half CPUs, two spinners would be stopped for a quarter of the time). Returns false for a
/// thread that is pinned to one of several CPUs: its peers run on others, or report that they do not.
fn has_one_cpu() -> bool {
    let allowed = thread::available_parallelism().map_or(1, usize::from);
    let pinned = sched_getaffinity(None).is_ok_and(|cpus| cpus.count() == 1);
    allowed == 1 && (!pinned || online_cpus() == Some(1))
}

/// Returns the number of completion vectors of a device that has one for each CPU, as drivers give RNICs.
pub fn vector_per_cpu() -> u32 {
    // As many as long as the process lives, also when CPUs come and go: programs keep the number.
    static VECTORS: LazyLock<u32> = LazyLock::new(|| {
        let cpus = online_cpus().or_else(|| thread::available_parallelism().ok().map(usize::from));
        cpus.and_then(|cpus| u32::try_from(cpus).ok()).unwrap_or(1).max(1)
    });
    *VECTORS
}

fn online_cpus() -> Option<usize> {
    parse_online(fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim())
}

/// Returns the number of CPUs in a list of numbers and ranges: `0-3,8`.
fn parse_online(text: &str) -> Option<usize> {
    text.split(',').try_fold(0, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(sum + last.checked_sub(first)? + 1)
    })
}

thread_local! {
    static LOAD: RefCell<Load> = RefCell::default();
}

/// Calls [`Load::look`] for this thread, with a time of the engines' clock.
pub fn conditions(now_ns: u64) -> Conditions {
    LOAD.with_borrow_mut(|load| load.look(now_ns))
}

/// Watches whether a thread that spins keeps others from running. A value describes the thread that calls it: each thread has its own.
#[derive(Debug, Default)]
pub struct Load {
    one_cpu: bool,
    cpus_until_ns: u64,
    run_queue: RunQueue,
    conditions: Conditions,
    conditions_until_ns: u64,
}

impl Load {
    /// Returns the conditions of the machine, at most a millisecond old; `now_ns` is of any clock that does not go back. The caller adds
    /// whether the peer shares the CPU.
    ///
    /// The call costs nothing most of the time, and 7 µs once a millisecond: a thread calls it when it is about to spin.
    pub fn look(&mut self, now_ns: u64) -> Conditions {
        if now_ns < self.conditions_until_ns {
            return self.conditions;
        }
        if now_ns >= self.cpus_until_ns {
            self.one_cpu = has_one_cpu();
            self.cpus_until_ns = now_ns.saturating_add(CPUS_NS);
        }
        let oversubscribed = self.one_cpu || waited_ns().is_some_and(|ns| self.run_queue.see(now_ns, ns));
        self.conditions = Conditions {
            oversubscribed,
            ..Conditions::default()
        };
        self.conditions_until_ns = now_ns.saturating_add(LOOK_NS);
        self.conditions
    }
}

/// Time that a thread has spent in a run queue, read from time to time.
#[derive(Debug, Default)]
struct RunQueue {
    /// Time of the last reading, and how long the thread had waited until then.
    seen: Option<(u64, u64)>,
    hold_ns: u64,
    hold_until_ns: u64,
}

impl RunQueue {
    /// Adds a reading of how long the thread has waited in all. Returns whether others need its CPU, or did lately.
    fn see(&mut self, now_ns: u64, waited_ns: u64) -> bool {
        if let Some((at_ns, before_ns)) = self.seen.replace((now_ns, waited_ns)) {
            let elapsed = now_ns.saturating_sub(at_ns);
            let waited = waited_ns.saturating_sub(before_ns);
            if waited > elapsed / WAITED_PART {
                self.hold(now_ns);
            }
        }
        now_ns < self.hold_until_ns
    }

    fn hold(&mut self, now_ns: u64) {
        if now_ns >= self.hold_until_ns {
            let tried_in_vain = now_ns - self.hold_until_ns < self.hold_ns;
            let longer = if tried_in_vain { 2 * self.hold_ns } else { 0 };
            self.hold_ns = longer.clamp(HOLD_NS_MIN, HOLD_NS_MAX);
        }
        self.hold_until_ns = now_ns.saturating_add(self.hold_ns);
    }
}

/// Returns how long this thread has been in run queues since it began. `None` if the system does not report it.
fn waited_ns() -> Option<u64> {
    parse_schedstat(&fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

/// Returns the second of three numbers: nanoseconds on a CPU, nanoseconds in a run queue, time slices.
fn parse_schedstat(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns the cost of a wake-up from one CPU to another. The first call measures it, which takes 2 ms at most.
pub fn wake_cost_ns() -> u64 {
    static COST: OnceLock<u64> = OnceLock::new();
    *COST.get_or_init(|| measure_wake_cost().ok().flatten().unwrap_or(WAKE_NS_DEFAULT))
}

/// Lets two threads wake each other in turn, and returns half the median round trip. `None` when too few were done in time, or both threads
/// would run on the one CPU that this process is pinned to: its peers have others.
fn measure_wake_cost() -> io::Result<Option<u64>> {
    if sched_getaffinity(None).is_ok_and(|cpus| cpus.count() == 1) && online_cpus() != Some(1) {
        return Ok(None);
    }
    let ends = Instant::now() + MEASURE_TIME;
    let left = move || Some(ends.saturating_duration_since(Instant::now()));
    let wakers = Arc::new([Waker::new()?, Waker::new()?]);
    // Nothing waits for the thread's end: on a busy machine that comes late.
    let cpu = sched_getcpu();
    crate::thread::spawn("rdmux-wake", {
        let wakers = wakers.clone();
        move || {
            leave_cpu(cpu);
            wakers[1].wake();
            while wakers[0].wait(left()) {
                wakers[1].wake();
            }
        }
    })?;
    let mut rounds = Vec::with_capacity(MEASURE_ROUNDS);
    let mut is_there = wakers[1].wait(left());
    while is_there && rounds.len() < MEASURE_ROUNDS {
        let start = Instant::now();
        wakers[0].wake();
        is_there = wakers[1].wait(left());
        // A thread that has moved to the other's CPU would measure less.
        if is_there && sched_getcpu() == cpu {
            rounds.push(start.elapsed().as_nanos() as u64);
        }
    }
    rounds.sort_unstable();
    let enough = rounds.len() >= MEASURE_ROUNDS_MIN;
    Ok(enough.then(|| rounds[rounds.len() / 2] / 2))
}

/// Keeps this thread off a CPU, if there is another.
fn leave_cpu(cpu: usize) {
    if let Ok(mut cpus) = sched_getaffinity(None) {
        cpus.unset(cpu);
        let _ = sched_setaffinity(None, &cpus);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::thread::CpuSet;

    use super::*;
    use crate::skip::skip;

    const MS: u64 = 1_000_000;
    const LONG: Duration = Duration::from_secs(60);

    fn now_ns() -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    fn stay_on(cpu: usize) {
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        sched_setaffinity(None, &cpus).unwrap();
    }

    #[test]
    fn parse_schedstat__what_kernels_say() {
        // Linux 6.18, 6.12, and a kernel that keeps no such statistics.
        assert_eq!(parse_schedstat("93419 2914042 2\n"), Some(2_914_042));
        assert_eq!(
            parse_schedstat("1342517732 18446744073709551615 3021\n"),
            Some(u64::MAX)
        );
        assert_eq!(parse_schedstat("0 0 0\n"), Some(0));
    }

    #[test]
    fn parse_schedstat__anything_else_is_no_answer() {
        for text in [
            "",
            "\n",
            "93419",
            "93419 many 2",
            "93419 -1 2",
            "1 18446744073709551616 2",
        ] {
            assert_eq!(parse_schedstat(text), None, "{text:?}");
        }
    }

    #[test]
    fn see__a_fifth_of_the_time_in_the_queue() {
        let mut queue = RunQueue::default();
        // The time that the thread had waited before the first reading does not count.
        assert!(!queue.see(MS, 50 * MS));
        assert!(!queue.see(2 * MS, 50 * MS));
        assert!(!queue.see(3 * MS, 50 * MS + MS / 5));
        assert!(queue.see(4 * MS, 50 * MS + MS / 2));
        // Another thread had a time slice.
        let mut queue = RunQueue::default();
        assert!(!queue.see(MS, 0));
        assert!(queue.see(6 * MS, 4 * MS));
    }

    #[test]
    fn see__holds_for_a_while() {
        let mut queue = RunQueue::default();
        queue.see(0, 0);
        assert!(queue.see(MS, MS));
        assert!(queue.see(MS + HOLD_NS_MIN - 1, MS));
        assert!(!queue.see(MS + HOLD_NS_MIN, MS));
    }

    #[test]
    fn see__holds_longer_when_it_was_tried_in_vain() {
        let mut queue = RunQueue::default();
        queue.see(0, 0);
        let (mut now, mut waited) = (0, 0);
        let mut held = Vec::new();
        for _ in 0..7 {
            (now, waited) = (now + MS, waited + MS);
            assert!(queue.see(now, waited));
            let ends = (0..).find(|_| {
                now += MS;
                !queue.see(now, waited)
            });
            held.push((ends.unwrap() + 1) * MS);
        }
        assert_eq!(held[..4], [1, 2, 4, 8].map(|n| n * HOLD_NS_MIN));
        assert_eq!(held[4..], [HOLD_NS_MAX; 3]);
        // Nobody needed the CPU for long enough, so the next hold is short again.
        now += 2 * HOLD_NS_MAX;
        assert!(!queue.see(now, waited));
        assert!(queue.see(now + MS, waited + MS));
        assert!(!queue.see(now + MS + HOLD_NS_MIN, waited + MS));
    }

    #[test]
    fn see__needed_all_the_time_is_not_tried_in_vain() {
        let mut queue = RunQueue::default();
        for at_ns in 0..1_000 {
            queue.see(at_ns * MS, at_ns * MS);
        }
        assert!(!queue.see(999 * MS + HOLD_NS_MIN, 999 * MS));
    }

    #[test]
    fn see__clock_that_stands_still_or_overflows() {
        let mut queue = RunQueue::default();
        for waited in [0, 0, u64::MAX, 0, 1] {
            queue.see(0, waited);
        }
        for at_ns in [u64::MAX - 1, u64::MAX, u64::MAX, 0] {
            queue.see(at_ns, at_ns);
        }
    }

    #[test]
    fn waited_ns__spinners_on_one_cpu_are_noticed() {
        let schedstat = fs::read_to_string("/proc/thread-self/schedstat");
        if schedstat.is_ok_and(|text| text.starts_with("0 0 0")) || waited_ns().is_none() {
            return skip("the kernel keeps no schedstat");
        }
        let cpu = sched_getcpu();
        let done = AtomicBool::new(false);
        let spin = || {
            stay_on(cpu);
            let mut queue = RunQueue::default();
            let deadline = Instant::now() + LONG;
            let mut next = 0;
            while !done.load(Ordering::Relaxed) && Instant::now() < deadline {
                if now_ns() >= next {
                    next = now_ns() + LOOK_NS;
                    if queue.see(now_ns(), waited_ns().unwrap()) {
                        done.store(true, Ordering::Relaxed);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(spin);
            }
        });
        assert!(done.into_inner());
    }

    #[test]
    fn look__pinned_to_one_of_several_is_not_one_cpu() {
        if online_cpus().is_none_or(|cpus| cpus < 2) || has_one_cpu() {
            return;
        }
        let cpu = sched_getcpu();
        let look = move || {
            stay_on(cpu);
            (has_one_cpu(), current_cpu())
        };
        assert_eq!(thread::spawn(look).join().unwrap(), (false, cpu as u32));
    }

    #[test]
    fn parse_online__numbers_and_ranges() {
        for (text, cpus) in [
            ("0", Some(1)),
            ("0-1", Some(2)),
            ("0-3,8", Some(5)),
            ("0,2-3", Some(3)),
        ] {
            assert_eq!(parse_online(text), cpus, "{text}");
        }
        for text in ["", "x", "1-0", "0-", "0--1"] {
            assert_eq!(parse_online(text), None, "{text}");
        }
    }

    #[test]
    fn look__keeps_its_answer_for_a_millisecond() {
        let mut load = Load::default();
        let first = load.look(0);
        load.conditions.oversubscribed = !first.oversubscribed;
        assert_ne!(load.look(LOOK_NS - 1), first);
        assert_eq!(load.conditions_until_ns, LOOK_NS);
        load.look(LOOK_NS);
        assert_eq!(load.conditions_until_ns, 2 * LOOK_NS);
    }

    #[test]
    fn wake_cost_ns__measured_once() {
        let cost = wake_cost_ns();
        println!("a wake-up costs {cost} ns, measured {:?}", measure_wake_cost());
        assert!(cost > 0 && cost <= MEASURE_TIME.as_nanos() as u64);
        assert_eq!(wake_cost_ns(), cost);
    }
}
