//! Connections that go on with PSNs far from those before, as after millions of packets, which no simulation has the time for.

use super::{Checked, USER_SKIP, Workload, tag};
use crate::seen;

/// Half of all PSNs; a QP moves on by less than this at once.
const HALF: u64 = 1 << 23;
/// Maximum time until a connection becomes idle.
const RESTS_NS_MAX: u64 = 5_000_000;

impl Workload {
    pub(super) fn plan_skip(&mut self, qp: usize) {
        let delay = self.dice.log_uniform(RESTS_NS_MAX);
        self.world.call_back(delay, tag(USER_SKIP, qp, 0));
    }

    /// Lets a connection become idle; once it is, moves the PSNs of both its directions on.
    pub(super) fn skip_psns(&mut self, qp: usize) -> Checked {
        let over = self.is_affected(qp) || self.flows[qp].iter().all(|flow| flow.todo == 0);
        let rests = over || self.is_at_rest(qp);
        for flow in &mut self.flows[qp] {
            flow.rests = !rests;
        }
        if !rests {
            let delay = self.dice.log_uniform(4 * self.report.latency_ns) + 1;
            self.world.call_back(delay, tag(USER_SKIP, qp, 0));
            return Ok(());
        }
        if !over {
            for _ in 0..self.dice.between(1, 3) {
                self.skip_once(qp)?;
            }
            self.world.seen.happened(seen::PSNS_SKIPPED);
            self.plan_skip(qp);
        }
        (0..2).try_for_each(|host| self.post_some(qp, host))
    }

    fn is_at_rest(&mut self, qp: usize) -> bool {
        let ways = self.ways(qp, [0, 0]);
        ways.into_iter().all(|(host, qpn, ..)| {
            !self.world.has_packets_for(host, qpn)
                && self.world.with(host, |rnic, now| rnic.skip_psns(now, qpn, 0, 0))
        })
    }

    /// Moves a connection on by less than half of all PSNs each way, often only just.
    fn skip_once(&mut self, qp: usize) -> Checked {
        let psns = [0, 1].map(|_| (HALF - self.dice.log_uniform(HALF)) as u32);
        for (host, qpn, sent, received) in self.ways(qp, psns) {
            let skipped = self
                .world
                .with(host, |rnic, now| rnic.skip_psns(now, qpn, sent, received));
            if !skipped {
                return Err(format!("host {host}, {qpn:?}: no longer idle"));
            }
        }
        Ok(())
    }

    /// Returns the QPs of a connection, and how far each moves on when the requests of each host do: as sender, as receiver.
    fn ways(&self, qp: usize, psns: [u32; 2]) -> Vec<(usize, rdmux_rnic::Qpn, u32, u32)> {
        let of_host = |host: usize| {
            let end = &self.sides[host].ends[qp];
            let (sent, received) = (psns[host], psns[1 - host]);
            if end.xrc {
                vec![(host, end.send_qpn, sent, 0), (host, end.recv_qpn, 0, received)]
            } else {
                vec![(host, end.send_qpn, sent, received)]
            }
        };
        (0..2).flat_map(of_host).collect()
    }
}
