//! Limits of a host's I/Os, which all of its queues share, whatever reactors they are with: no lock, and no timer of their own.
//!
//! A limit is a time that I/Os use up. A queue books a part of it ([`QUANTUM`]) when it has none left, and goes on when that part begins: so queues
//! have their parts in the order in which they ask. The I/O for which a queue books runs at once, and the one behind it waits.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for which a host may save what it has not used.
const BURST: Duration = Duration::from_millis(10);
/// Time that a queue books, unless one I/O takes longer: a reactor that wakes for each I/O would spend more on waking than on I/Os.
const QUANTUM: Duration = Duration::from_millis(1);

/// Limits of the I/Os of a host, over all of its controllers of a subsystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// I/O commands a second.
    pub ios: Option<NonZeroU64>,
    /// Bytes a second that reads, writes, compares and copies move.
    pub bytes: Option<NonZeroU64>,
}

impl Rates {
    /// The least number of I/Os a second, of which a queue may have 127 in flight: hosts give a command up after half a minute.
    pub const IOS_MIN: u64 = 100;
    /// The least number of bytes a second: the largest command takes a second.
    pub const BYTES_MIN: u64 = 1 << 20;
}

/// The limits of a host in force.
#[derive(Debug)]
pub(super) struct Limit {
    ios: Pace,
    bytes: Pace,
    /// Number of changes of the rates: what was booked before does not count any more.
    changes: AtomicU64,
    /// Times are counted from here.
    origin: Instant,
}

/// The part of a queue.
#[derive(Debug, Default)]
pub(super) struct Share {
    /// Time that it has booked and not used, in nanoseconds.
    ios: u64,
    bytes: u64,
    /// The time begins then, if that was later than when it was booked.
    begins: Option<Instant>,
    /// Changes of the limit when it was booked.
    changes: u64,
}

/// One limit.
#[derive(Debug)]
struct Pace {
    /// Units a second; 0: any number.
    rate: AtomicU64,
    /// Begin of the time that is free, in nanoseconds.
    next: AtomicU64,
}

impl Limit {
    pub(super) fn new(rates: &Rates, now: Instant) -> Limit {
        let pace = || Pace {
            rate: AtomicU64::new(0),
            next: AtomicU64::new(0),
        };
        let limit = Limit {
            ios: pace(),
            bytes: pace(),
            changes: AtomicU64::new(0),
            origin: now,
        };
        limit.set(rates);
        limit
    }

    /// Changes the rates, if they are other ones. They hold from the next I/O on, whatever was booked before.
    pub(super) fn set(&self, rates: &Rates) {
        let both = [(&self.ios, rates.ios), (&self.bytes, rates.bytes)];
        let mut is_other = false;
        for (pace, rate) in both {
            let rate = rate.map_or(0, NonZeroU64::get);
            if pace.rate.swap(rate, Ordering::Relaxed) != rate {
                pace.next.store(0, Ordering::Relaxed);
                is_other = true;
            }
        }
        if is_other {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Uses up what an I/O of so many bytes costs a queue, and books more if it has not enough.
    pub(super) fn spend(&self, share: &mut Share, bytes: u64, now: Instant) {
        let changes = self.changes.load(Ordering::Relaxed);
        if share.changes != changes {
            *share = Share {
                changes,
                ..Share::default()
            };
        }
        let since = now.saturating_duration_since(self.origin).as_nanos() as u64;
        let begins = [
            self.ios.spend(&mut share.ios, 1, since),
            self.bytes.spend(&mut share.bytes, bytes, since),
        ];
        let begins = begins.into_iter().flatten().max();
        if let Some(begins) = begins.filter(|begins| *begins > since) {
            share.begins = Some(self.origin + Duration::from_nanos(begins));
        }
    }

    /// Takes bytes back that were spent and not moved.
    pub(super) fn give_back(&self, bytes: u64) {
        if let Some(cost) = self.bytes.cost(bytes) {
            let moved = |next: u64| Some(next.saturating_sub(cost));
            let _ = self
                .bytes
                .next
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved);
        }
    }

    /// Returns when a queue may go on, if it is not now.
    pub(super) fn held_until(&self, share: &Share, now: Instant) -> Option<Instant> {
        let begins = share.begins.filter(|begins| *begins > now)?;
        // A share that was given back since, ahead of this part or in it, is not waited for.
        let [ios, bytes] = [&self.ios, &self.bytes].map(|pace| pace.next.load(Ordering::Relaxed));
        let begins = begins.min(self.origin + Duration::from_nanos(ios.max(bytes)));
        if begins <= now || mutant!(LimitIgnored) {
            return None;
        }
        (share.changes == self.changes.load(Ordering::Relaxed)).then_some(begins)
    }

    /// Returns true if all time that was booked is over.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.origin).as_nanos() as u64;
        [&self.ios, &self.bytes]
            .iter()
            .all(|pace| pace.next.load(Ordering::Relaxed) <= since)
    }
}

impl Pace {
    /// Returns the cost of units in nanoseconds; `None`: there is no limit.
    fn cost(&self, units: u64) -> Option<u64> {
        let rate = NonZeroU64::new(self.rate.load(Ordering::Relaxed))?;
        let cost = (u128::from(units) * 1_000_000_000).div_ceil(rate.get().into());
        Some(u64::try_from(cost).unwrap_or(u64::MAX))
    }

    /// Takes the cost of units off the time that a queue has. Returns the begin of the time that it had to book for that.
    fn spend(&self, left: &mut u64, units: u64, now: u64) -> Option<u64> {
        let cost = self.cost(units)?;
        if let Some(rest) = left.checked_sub(cost) {
            *left = rest;
            return None;
        }
        let booked = (cost - *left).max(QUANTUM.as_nanos() as u64);
        let burst = if mutant!(LimitSaved) {
            u64::MAX
        } else {
            BURST.as_nanos() as u64
        };
        let earliest = now.saturating_sub(burst);
        let moved = |next: u64| Some(next.max(earliest).saturating_add(booked));
        let before = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved);
        *left = left.saturating_add(booked).saturating_sub(cost);
        Some(before.unwrap_or_else(|next| next).max(earliest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the I/Os that queues have done after so many seconds, of those that they always have ready. The queues are asked in the same order each time.
    fn run(limit: &Limit, queues: usize, from: Instant, seconds: u32, bytes: u64) -> Vec<u64> {
        let end = from + Duration::from_secs(seconds.into());
        let (mut now, mut done) = (from, vec![0; queues]);
        let mut shares: Vec<_> = (0..queues).map(|_| Share::default()).collect();
        while now < end {
            let mut first: Option<Instant> = None;
            for (done, share) in done.iter_mut().zip(&mut shares) {
                // As much at a time as it may.
                while now < end {
                    if let Some(until) = limit.held_until(share, now) {
                        first = first.into_iter().chain([until]).min();
                        break;
                    }
                    limit.spend(share, bytes, now);
                    *done += 1;
                    // It takes some time as well.
                    now += Duration::from_nanos(700);
                }
            }
            now = now.max(first.unwrap_or(now));
        }
        done
    }

    fn rates(ios: u64, bytes: u64) -> Rates {
        Rates {
            ios: NonZeroU64::new(ios),
            bytes: NonZeroU64::new(bytes),
        }
    }

    /// Checks that so many I/Os were done as the rate allows, and a burst more at most.
    #[track_caller]
    fn assert_about(done: &[u64], rate: u64, seconds: u64) {
        let sum: u64 = done.iter().sum();
        let most = rate * seconds + rate / 50 + 2 * done.len() as u64;
        assert!((rate * seconds * 99 / 100..=most).contains(&sum), "{done:?}");
    }

    #[test]
    fn spend__keeps_a_host_to_the_lower_of_its_rates() {
        let from = Instant::now();
        let run = |rates, queues| run(&Limit::new(&rates, from), queues, from, 3, 4096);
        assert_about(&run(rates(1000, 0), 1), 1000, 3);
        assert_about(&run(rates(100_000, 0), 1), 100_000, 3);
        assert_about(&run(rates(100_000, 40_960_000), 1), 10_000, 3);
    }

    #[test]
    fn spend__gives_each_queue_its_part() {
        let from = Instant::now();
        for rates in [rates(1000, 0), rates(100_000, 0), rates(0, 4_096_000)] {
            let done = run(&Limit::new(&rates, from), 4, from, 3, 4096);
            let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
            assert!(*least * 10 >= *most * 9, "{done:?}");
        }
    }

    #[test]
    fn spend__gives_nothing_for_time_unused() {
        let from = Instant::now();
        let limit = Limit::new(&rates(1000, 0), from);
        run(&limit, 1, from, 1, 4096);
        let later = from + Duration::from_secs(3600);
        assert!(limit.is_idle(later));
        assert_about(&run(&limit, 1, later, 1, 4096), 1000, 1);
    }

    #[test]
    fn set__holds_from_then_on() {
        let from = Instant::now();
        let limit = Limit::new(&Rates::default(), from);
        assert!(run(&limit, 1, from, 1, 4096)[0] > 1_000_000);
        limit.set(&rates(100, 0));
        let from = from + Duration::from_secs(1);
        assert_about(&run(&limit, 1, from, 1, 4096), 100, 1);
        let (mut share, now) = (Share::default(), from + Duration::from_secs(1));
        (0..10).for_each(|_| limit.spend(&mut share, 0, now));
        limit.set(&rates(100, 0));
        assert!(limit.held_until(&share, now).is_some(), "nothing has changed");
        limit.set(&Rates::default());
        assert!(limit.held_until(&share, now).is_none());
        limit.spend(&mut share, 1 << 30, now);
        assert!(limit.held_until(&share, now).is_none());
    }

    #[test]
    fn give_back__takes_off_what_was_not_moved() {
        let from = Instant::now();
        let limit = Limit::new(&rates(0, 1 << 20), from);
        let mut share = Share::default();
        limit.spend(&mut share, 8 << 20, from);
        assert!(limit.held_until(&share, from).is_none());
        limit.give_back(7 << 20);
        limit.spend(&mut share, 4096, from);
        let until = limit.held_until(&share, from).unwrap();
        assert_eq!(until, from + Duration::from_secs(1));
    }

    #[test]
    fn give_back__lets_queues_go_on_that_wait_for_it() {
        let from = Instant::now();
        let limit = Limit::new(&rates(0, 1 << 20), from);
        let mut shares = [Share::default(), Share::default()];
        // Copies that turn out to be short.
        for share in &mut shares {
            limit.spend(share, 8 << 20, from);
        }
        let until = limit.held_until(&shares[1], from).unwrap();
        assert!(until > from + Duration::from_secs(7));
        for _ in 0..2 {
            limit.give_back((8 << 20) - 4096);
        }
        let until = limit.held_until(&shares[1], from);
        assert!(until.is_none_or(|until| until < from + Duration::from_millis(20)));
    }
}
