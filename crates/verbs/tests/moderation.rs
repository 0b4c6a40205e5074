//! Replays arrivals of completions, recorded and generated, through each moderation policy, under a clock of the test's.
//!
//! `traces/NAME.txt` has the arrivals: the microseconds since the one before. `traces/NAME.table` is the expected result: a row for
//! each tenth of the trace, with the wake-ups of the handler, the time by which moderation has delayed a completion on average, and the
//! moderation at the row's end. `RDMUX_WRITE_TABLES=1 cargo test -p rdmux-verbs --test moderation` writes the tables anew.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fmt::Write as _;
use std::path::PathBuf;

use rdmux_rnic::{Moderation, Time};
use rdmux_verbs::moderation::rate::{self, PAUSE_NS};
use rdmux_verbs::moderation::{ModerationPolicy, Moderator, dim};
use rdmux_verbs::waiting::{Conditions, Handler, Plan, Policy, WaitMode};

/// Time from a wake-up's cause to the handler's run.
const WAKE_NS: u64 = 20_000;
/// Time that the handler needs for a completion.
const WORK_NS: u64 = 500;
const ROWS: u64 = 10;
/// Arrivals of commands at a server of `rdmux perf storage`, over UDP: they come in batches, as the clients take CPUs.
const RECORDED: [&str; 5] = ["bursty", "steady", "mixed", "idle", "step"];
/// Generated ones, as they come from clients on other machines: evenly, in a surge, in bunches with pauses.
const GENERATED: [&str; 3] = ["even", "surge", "bunches"];

/// Result of a replay, or of a part of it.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    completions: u64,
    wakes: u64,
    delay_ns: u64,
    moderation: Option<Moderation>,
}

impl Row {
    fn mean_delay_us(&self) -> f64 {
        self.delay_ns as f64 / self.completions.max(1) as f64 / 1_000.0
    }
}

fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/traces");
    folder.join(name)
}

/// Returns the arrivals of a trace.
fn trace(name: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(file(&format!("{name}.txt"))).unwrap();
    let arrivals = text.split_ascii_whitespace().scan(0, |at, us| {
        *at += us.parse::<u64>().unwrap() * 1_000;
        Some(*at)
    });
    arrivals.collect()
}

/// Has a handler that sleeps between its runs take these arrivals; calls `at_run` after each run.
fn replay(arrivals: &[u64], moderator: &mut Moderator, mut at_run: impl FnMut(u64, Row)) {
    let mut next = 0;
    while let Some(&first) = arrivals.get(next) {
        let notified = match moderator.moderation() {
            None => first,
            Some(Moderation { count, period_us }) => {
                let last = next + usize::from(count.max(1)) - 1;
                let period_ns = u64::from(period_us) * 1_000;
                let counted = arrivals.get(last).copied().unwrap_or(u64::MAX);
                counted.min(first + period_ns)
            }
        };
        let mut now = notified + WAKE_NS;
        let mut row = Row {
            wakes: 1,
            ..Row::default()
        };
        while let Some(&arrival) = arrivals.get(next).filter(|&&arrival| arrival <= now) {
            row.completions += 1;
            row.delay_ns += notified.saturating_sub(arrival);
            now += WORK_NS;
            next += 1;
        }
        moderator.event(Time(now), row.completions as u32);
        row.moderation = moderator.moderation();
        at_run(now, row);
    }
}

fn rows(arrivals: &[u64], policy: ModerationPolicy) -> Vec<Row> {
    let length = arrivals.last().unwrap() / ROWS + 1;
    let mut rows = vec![Row::default(); ROWS as usize];
    replay(arrivals, &mut Moderator::new(policy), |now, run| {
        let row = &mut rows[(now / length).min(ROWS - 1) as usize];
        row.completions += run.completions;
        row.wakes += run.wakes;
        row.delay_ns += run.delay_ns;
        row.moderation = run.moderation;
    });
    rows
}

fn sum(rows: &[Row]) -> Row {
    rows.iter().fold(Row::default(), |sum, row| Row {
        completions: sum.completions + row.completions,
        wakes: sum.wakes + row.wakes,
        delay_ns: sum.delay_ns + row.delay_ns,
        moderation: row.moderation,
    })
}

const POLICIES: [ModerationPolicy; 3] = [
    ModerationPolicy::Off,
    ModerationPolicy::Dim,
    ModerationPolicy::Rate,
];

fn table(arrivals: &[u64]) -> String {
    let by_policy = POLICIES.map(|policy| rows(arrivals, policy));
    let mut text = String::from("   ms  completions |   off |   dim  delay  now    |  rate  delay  now\n");
    let mut line = |ms: String, [off, dim, rate]: [&Row; 3]| {
        let now = |row: &Row| {
            row.moderation
                .map_or("-".to_owned(), |to| format!("{},{}", to.count, to.period_us))
        };
        let completions = off.completions;
        writeln!(
            text,
            "{ms:>5} {completions:>12} | {:>5} | {:>5} {:>6.1}  {:<6} | {:>5} {:>6.1}  {}",
            off.wakes,
            dim.wakes,
            dim.mean_delay_us(),
            now(dim),
            rate.wakes,
            rate.mean_delay_us(),
            now(rate),
        )
        .unwrap();
    };
    let length = arrivals.last().unwrap() / ROWS + 1;
    let [off, dim, rate] = &by_policy;
    for (i, rows) in (1..).zip(off.iter().zip(dim).zip(rate)) {
        let ((off, dim), rate) = rows;
        line((i * length / 1_000_000).to_string(), [off, dim, rate]);
    }
    let sums = by_policy.map(|rows| sum(&rows));
    line("all".to_owned(), [&sums[0], &sums[1], &sums[2]]);
    text
}

#[test]
fn event__traces_give_these_tables() {
    for name in RECORDED.into_iter().chain(GENERATED) {
        let (table, expected) = (table(&trace(name)), file(&format!("{name}.table")));
        if std::env::var_os("RDMUX_WRITE_TABLES").is_some() {
            std::fs::write(&expected, &table).unwrap();
        }
        let expected = std::fs::read_to_string(expected).unwrap();
        assert_eq!(table, expected, "trace {name}:\n{table}");
    }
}

#[test]
fn event__light_load_is_not_delayed() {
    let idle = trace("idle");
    assert_eq!(sum(&rows(&idle, ModerationPolicy::Rate)).delay_ns, 0);
    // The second profile waits for 1 us.
    let dim = sum(&rows(&idle, ModerationPolicy::Dim));
    assert!(dim.mean_delay_us() <= 1.0, "{dim:?}");
}

/// Replays a load of so many completions a second for a second, and then one completion every `gap_us`. Returns the number of events and
/// the time after the change until nothing is delayed any more.
fn time_to_leave(policy: ModerationPolicy, per_second: u64, gap_us: u64) -> (u32, u64) {
    let mut arrivals: Vec<u64> = (0..per_second).map(|i| i * 1_000_000_000 / per_second).collect();
    let change = *arrivals.last().unwrap();
    arrivals.extend((1..2_000).map(|i| change + i * gap_us * 1_000));
    let (mut left, mut events) = (None, 0);
    replay(&arrivals, &mut Moderator::new(policy), |now, row| {
        if now < change {
            return;
        }
        let delays = row.moderation.is_some_and(|to| to.count > 1);
        events += u32::from(left.is_none());
        match (delays, left) {
            (false, None) => left = Some(now - change),
            (true, Some(_)) => left = None,
            _ => {}
        }
    });
    (events, left.expect("it delays for ever"))
}

#[test]
fn event__rate_leaves_moderation_within_two_windows() {
    for per_second in [150_000, 400_000, 1_500_000] {
        for gap_us in [100, 1_000, 50_000] {
            let (events, ns) = time_to_leave(ModerationPolicy::Rate, per_second, gap_us);
            assert!(
                events <= 2 * rate::EVENTS + 2 && ns <= 4 * PAUSE_NS + 2 * gap_us * 1_000,
                "{per_second} a second, then one every {gap_us} us: {events} events, {ns} ns"
            );
        }
    }
}

#[test]
fn event__rate_moderates_a_steady_load_at_once_and_dim_never() {
    let arrivals: Vec<u64> = (0..100_000).map(|i| i * 2_500).collect();
    let mut first = None;
    replay(
        &arrivals,
        &mut Moderator::new(ModerationPolicy::Rate),
        |now, row| {
            first = first.or(row.moderation.map(|_| now));
        },
    );
    assert!(first.unwrap() <= 2 * PAUSE_NS, "{first:?}");
    let dim = rows(&arrivals, ModerationPolicy::Dim);
    assert!(
        dim.iter().all(|row| row.moderation == Some(dim::PROFILES[0])),
        "{dim:?}"
    );
}

/// A handler whose peers have `depth` requests in flight, and each sends the next one some time after the answer.
fn closed_loop(policy: ModerationPolicy, depth: u64, think_ns: u64, ms: u64) -> (u64, u64, u64) {
    let mut moderator = Moderator::new(policy);
    let mut arrivals: std::collections::BinaryHeap<std::cmp::Reverse<u64>> =
        (0..depth).map(|i| std::cmp::Reverse(i * 100)).collect();
    let (mut done, mut wakes, mut changes) = (0, 0, 0);
    let mut now = 0;
    while now < ms * 1_000_000 {
        let mut waiting: Vec<u64> = arrivals.iter().map(|at| at.0).collect();
        waiting.sort_unstable();
        let first = waiting[0].max(now);
        let notified = match moderator.moderation() {
            None => first,
            Some(Moderation { count, period_us }) => {
                let counted = waiting.get(usize::from(count) - 1).copied().unwrap_or(u64::MAX);
                counted.max(first).min(first + u64::from(period_us) * 1_000)
            }
        };
        now = notified + WAKE_NS;
        wakes += 1;
        let mut taken = 0;
        // Where there is always something, the handler never sleeps.
        while now < ms * 1_000_000 && arrivals.peek().is_some_and(|at| at.0 <= now) {
            arrivals.pop();
            now += WORK_NS;
            arrivals.push(std::cmp::Reverse(now + think_ns));
            taken += 1;
        }
        done += u64::from(taken);
        changes += u64::from(moderator.event(Time(now), taken));
    }
    (done, wakes, changes)
}

#[test]
fn event__rate_costs_a_shallow_queue_nothing() {
    for depth in [1, 4, 8, 16, 32] {
        for think_ns in [2_000, 10_000, 50_000] {
            let (off, ..) = closed_loop(ModerationPolicy::Off, depth, think_ns, 2_000);
            let (done, ..) = closed_loop(ModerationPolicy::Rate, depth, think_ns, 2_000);
            let percent = if depth == 1 { 100 } else { 95 };
            assert!(
                done * 100 >= off * percent,
                "depth {depth}, {think_ns} ns: {done} of {off}"
            );
        }
    }
}

/// A handler with its moderator, as a reactor in its engine's place has them.
struct Handled {
    handler: Handler,
    moderator: Moderator,
    now: u64,
    next: u64,
    taken: u32,
    mode: WaitMode,
    /// Changes of the mode.
    modes: u32,
    wake_ups: u32,
}

impl Handled {
    fn new(policy: ModerationPolicy) -> Handled {
        let handler = Handler::new(Policy::new(WAKE_NS));
        Handled {
            mode: handler.mode(),
            handler,
            moderator: Moderator::new(policy),
            now: 0,
            next: 0,
            taken: 0,
            modes: 0,
            wake_ups: 0,
        }
    }

    /// Handles `batch` completions every `gap_ns`, for so long or until something holds. Returns the time that this took.
    fn run(&mut self, ns: u64, gap_ns: u64, batch: u32, holds: impl Fn(&Moderator) -> bool) -> u64 {
        let began = self.now;
        while self.now < began + ns && !holds(&self.moderator) {
            while self.next <= self.now {
                self.next += gap_ns;
                self.now += WORK_NS * u64::from(batch);
                self.taken += batch;
            }
            self.wait();
            if self.handler.mode() != self.mode {
                self.mode = self.handler.mode();
                self.modes += 1;
            }
        }
        self.now - began
    }

    fn wait(&mut self) {
        match self.handler.end_run() {
            true => drop(self.moderator.event(Time(self.now), self.taken)),
            false if self.taken > 0 => self.moderator.polled(Time(self.now), self.taken),
            false => {}
        }
        self.taken = 0;
        let waited = self.next - self.now;
        let polls_ns = match self.handler.plan(0, Conditions::default()) {
            Plan::Spin { ns } => ns,
            _ => 0,
        };
        if waited <= polls_ns {
            self.now = self.next;
            self.handler.came(waited);
            return;
        }
        let began = self.now;
        self.now += polls_ns;
        let allowed = self.moderator.moderation().filter(|to| to.count > 1);
        self.wake_ups += 1;
        match self
            .handler
            .hold_off(allowed.map(|to| u64::from(to.period_us) * 1_000))
        {
            Some(ns) if self.now + ns >= self.next => {
                self.now += ns;
                self.handler.came(self.now - began);
            }
            _ => {
                self.now = self.next.max(self.now) + WAKE_NS;
                self.handler.slept(self.now - began, true);
            }
        }
    }
}

#[test]
fn handler__polling_and_moderation_do_not_make_each_other_oscillate() {
    // A load at the edge: gaps of about a wake-up, so that polling and sleeping cost the same.
    for gap_ns in [2_500, 5_000, 10_000, 20_000, 30_000, 40_000] {
        let mut handled = Handled::new(ModerationPolicy::Rate);
        handled.run(1_000_000_000, gap_ns, 1, |_| false);
        assert!(
            handled.modes <= 2,
            "gaps of {gap_ns} ns: {} changes of mode",
            handled.modes
        );
        let changes = handled.moderator.changes();
        assert!(changes <= 20, "gaps of {gap_ns} ns: {changes} changes");
    }
}

/// The policy polls in one wait of some: that must not keep moderation from learning, nor from being undone.
#[test]
fn handler__that_polls_now_and_then_is_moderated_and_stops_being_so() {
    for gap_us in [45, 60, 80, 100] {
        let mut handled = Handled::new(ModerationPolicy::Rate);
        let is_on = |moderator: &Moderator| moderator.moderation().is_some();
        let after = handled.run(1_000_000_000, gap_us * 1_000, 8, is_on);
        assert!(is_on(&handled.moderator), "bunches of 8 every {gap_us} us");
        assert!(after <= 5_000_000, "bunches of 8 every {gap_us} us: {after} ns");
        handled.run(20_000_000, gap_us * 1_000, 8, |_| false);
        let after = handled.run(1_000_000_000, 200_000, 1, |moderator| !is_on(moderator));
        assert!(!is_on(&handled.moderator), "one every 200 us, after {gap_us} us");
        assert!(
            after <= 10_000_000,
            "one every 200 us, after {gap_us} us: {after} ns"
        );
    }
}
