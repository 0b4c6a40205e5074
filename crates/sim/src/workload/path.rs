//! Paths that change under traffic: they get slower or faster, so that old packets come after new ones; they break for a while,
//! in one direction or both, or lose every other packet.

use super::{USER_PATH, Workload, tag};
use crate::{Ending, seen};

/// Maximum factor by which a path gets slower than the timeouts are made for, and factor by which it gets faster. Timeouts
/// allow for twelve times the latency, and all retries together for 46 timeouts: a response that takes ten times as long is in
/// time.
const SLOWER: u64 = 10;
const FASTER: u64 = 100;
/// Maximum number of timeouts for which a path breaks: four of the fourteen retransmissions of the oldest packet.
const BROKEN_TIMEOUTS: u64 = 2;
/// Maximum time for which packets are marked. It causes few congestion notifications: rates stay such that timeouts are long
/// enough.
const MARKED_NS_MAX: u64 = 200_000;
/// Maximum number of timeouts for an outage that ends connections.
const OUTAGE_TIMEOUTS: u64 = 120;

impl Workload {
    /// Schedules the path changes of a run.
    pub(super) fn plan_path_changes(&mut self) {
        for _ in 0..self.dice.between(1, 4) {
            let delay = self.dice.log_uniform(40 * self.report.latency_ns + 5_000_000);
            self.world.call_back(delay, tag(USER_PATH, 0, 0));
        }
    }

    pub(super) fn change_path(&mut self) {
        let for_ns = self.dice.log_uniform(BROKEN_TIMEOUTS * self.timeout_ns);
        match self.dice.below(7) {
            0 => self.break_links(for_ns),
            1 => self.world.lose_more(for_ns),
            2 => self.world.mark(for_ns.min(MARKED_NS_MAX)),
            _ => {
                let step = (self.report.latency_ns / FASTER).max(1);
                let latency_ns = step * self.dice.log_uniform(SLOWER * FASTER);
                let (tenfold, before) = (10 * latency_ns, self.world.latency_ns());
                if latency_ns >= 10 * before {
                    self.world.seen.happened(seen::SLOWER);
                } else if tenfold <= before {
                    self.world.seen.happened(seen::FASTER);
                }
                self.world.change_latency(latency_ns);
            }
        }
    }

    fn break_links(&mut self, for_ns: u64) {
        match self.dice.below(3) {
            2 => (0..2).for_each(|host| self.world.break_link(host, for_ns)),
            host => self.world.break_link(host as usize, for_ns),
        }
    }

    /// Breaks the links for an outage that lasts less or more than the retries bear.
    pub(super) fn break_for_long(&mut self) {
        let timeouts = self.dice.log_uniform(OUTAGE_TIMEOUTS);
        self.outage_ends_all = timeouts > BROKEN_TIMEOUTS;
        let what = [seen::OUTAGE_SHORT, seen::OUTAGE_LONG][usize::from(self.outage_ends_all)];
        self.world.seen.happened(what);
        self.break_links(timeouts * self.timeout_ns);
    }

    /// Returns whether the ending may concern every connection.
    pub(super) fn ending_is_everywhere(&self) -> bool {
        match self.ending {
            Ending::PeerVanishes | Ending::Restart => true,
            Ending::LinkDown => self.outage_ends_all,
            _ => false,
        }
    }
}
