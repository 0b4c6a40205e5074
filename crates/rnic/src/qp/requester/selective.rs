//! Selective retransmission: the packets known to be missing, the times of their retransmission, and probes for losses of which no
//! response tells. Only for peers that agreed to it; see [`rdmux_wire::roce::sack`] for their reports.
//!
//! A *hole* is a request packet that the peer misses, or data of a READ that we miss. Both are filled by sending the request packet
//! again; for a READ it requests only the missing part. Holes come from three sources: a bitmap, READ data behind a gap or an
//! acknowledgement that overtakes READ data, and the probe. A hole is filled at once when so many packets behind it have come that
//! it cannot be mere reordering, else a quarter of a round trip after it was seen. It is filled again when a response to that
//! should have come. This follows RACK and TLP (RFC 8985) and IRN (Mittal et al., SIGCOMM 2018).
//!
//! The window limits packets in flight: packets that the peer has reported, and data that is kept here, no longer count. So a hole
//! does not stop the packets behind it, up to [`Head::reach`] PSNs. Losses are taken for the link's own as long as they stay below
//! an eighth of a window; more halve it, once a window. ECN handles the rest.
//!
//! When the peer reports nothing new for two round trips, the requester sends the oldest and the last packet in flight again. The
//! response reports the rest. Such probes do not count as retries: only timeouts of the specification's timer do. A peer on this
//! host is not probed.

use std::collections::VecDeque;

use rdmux_wire::Psn;
use rdmux_wire::roce::Packet;
use rdmux_wire::roce::sack::Sack;

use super::rtt::Rtt;
use super::{Broken, Cursor, Requester, Wqe};
use crate::device::LinkProgress;
use crate::qp::reorder::Reorder;
use crate::qp::{Env, Head, WINDOW_PACKETS_MIN};
use crate::time::Time;
use crate::transmit::TransmitBuf;

/// Numbers of packets behind a hole from which the hole is taken for a loss: the initial one, and the highest one after packets
/// were seen to overtake others.
const REORDER_PACKETS_MIN: u32 = 3;
const REORDER_PACKETS_MAX: u32 = 64;
/// Additional wait for a probe of a peer on this host: longer than the interval of the system's timer, 1 to 10 ms.
const LOCAL_PROBE_NS: u64 = 10_000_000;
/// Divisor of the window: losses up to this part of it are taken for the link's own.
const LOST_PART: u32 = 8;
/// Divisor of the specification's timeout for waits before the first round trip was measured.
const UNMEASURED_PART: u64 = 64;
/// Wait before the first round trip was measured when there is no timeout.
const UNMEASURED_NS: u64 = 1_000_000;

/// PSNs that are missing, at the peer or here.
#[derive(Clone, Copy, Debug)]
struct Hole {
    psn: Psn,
    packets: u32,
    seen: Time,
    /// Time at which it was last filled.
    sent: Option<Time>,
    /// Set when it is to be filled now.
    due: bool,
}

impl Hole {
    fn end(&self) -> Psn {
        self.psn.plus(self.packets)
    }
}

#[derive(Debug)]
pub(super) struct Selective {
    /// Sorted and disjoint. Holes before `told` are READ data, those from there on requests.
    holes: VecDeque<Hole>,
    /// Number of holes to be filled now.
    due: u32,
    /// Responses that came ahead of missing READ data.
    early: Reorder,
    /// The peer has executed all requests before this PSN, although READ data may be missing. Not before `una`, as the two below.
    told: Psn,
    /// The peer has answered everything before this PSN: responses that have not come are late or lost. Not after `told`.
    answered: Psn,
    /// Requests before this PSN have arrived or are in `holes`.
    requests_upto: Psn,
    /// The newest bitmap's PSN, and the number of packets that it reports as kept.
    reported: (Psn, u32),
    reach: u32,
    /// Number of packets behind a hole from which the hole is taken for a loss.
    reorder: u32,
    /// Packets lost in the window that ends at [`Requester::recover`].
    lost: u32,
    rtt: Rtt,
    /// The last FLUSH that was sent: responses behind it come when the medium is done.
    flush: Option<Psn>,
    /// Number of probes since the last news from the peer.
    probes: u32,
    probe_at: Option<Time>,
    /// Time at which holes that may be mere reordering are taken for losses.
    suspect_at: Option<Time>,
}

impl Selective {
    pub(super) fn new(psn: Psn, reach: u32) -> Selective {
        Selective {
            holes: VecDeque::new(),
            due: 0,
            early: Reorder::default(),
            told: psn,
            answered: psn,
            requests_upto: psn,
            reported: (psn, 0),
            reach,
            reorder: REORDER_PACKETS_MIN,
            lost: 0,
            rtt: Rtt::default(),
            flush: None,
            probes: 0,
            probe_at: None,
            suspect_at: None,
        }
    }

    /// Sets the reach after a change of the window.
    pub(super) fn set_reach(&mut self, reach: u32) {
        self.reach = reach;
    }

    pub(super) fn kept(&self) -> usize {
        self.early.len()
    }

    pub(super) fn has_due(&self) -> bool {
        self.due > 0
    }

    /// Returns the next moment at which [`Requester::selective_timeout`] has something to do.
    ///
    /// To a peer on this host that is later than the probe, of which such a peer has no need unless packets get lost on purpose: a sleeper with a
    /// timer that expires before the system's own sets the processor's timer, which takes longer than the rest of the sleep.
    pub(super) fn deadline(&self, local: bool) -> Option<Time> {
        let probe_at = match local {
            true => self.probe_at.map(|at| at + LOCAL_PROBE_NS),
            false => self.probe_at,
        };
        match (probe_at, self.suspect_at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Returns the number of PSNs that may be sent when `in_flight` are not answered, with a window of `window`.
    pub(super) fn room(&self, window: u32, in_flight: u32) -> u32 {
        let arrived = if mutant!(ArrivedStillInFlight) {
            0
        } else {
            self.reported.1 + self.early.len() as u32
        };
        window
            .saturating_sub(in_flight.saturating_sub(arrived))
            .min(self.reach.saturating_sub(in_flight))
    }

    /// Notes that a packet was sent for the first time. `asks`: a response to it comes at once.
    pub(super) fn sent(&mut self, psn: Psn, asks: bool, now: Time) {
        if asks && self.flush.is_none() && !self.rtt.is_timing() {
            self.rtt.begin(psn, now);
        }
    }

    /// Notes that a FLUSH was sent.
    pub(super) fn sent_flush(&mut self, psn: Psn) {
        self.flush = Some(psn);
    }

    /// Handles progress: everything before `una` is answered.
    pub(super) fn progress(&mut self, una: Psn, now: Time) {
        if let Some(psn) = self.rtt.timed()
            && una.since(psn) > 0
        {
            // Behind a hole the response was late for another reason.
            if self.holes.is_empty() {
                self.rtt.end(now);
            } else {
                self.rtt.give_up();
            }
        }
        self.probes = 0;
        // A mark that stayed behind by half of all PSNs would seem to lie ahead.
        for mark in [&mut self.told, &mut self.answered, &mut self.requests_upto] {
            *mark = later(*mark, una);
        }
        self.flush = self.flush.filter(|flush| flush.since(una) >= 0);
        if una.since(self.reported.0) > 0 {
            self.reported = (una, 0);
        }
        while let Some(hole) = self.holes.front_mut() {
            if una.since(hole.end()) >= 0 {
                self.due -= u32::from(hole.due);
                self.holes.pop_front();
                continue;
            }
            let gone = una.since(hole.psn);
            if gone > 0 {
                hole.psn = una;
                hole.packets -= gone as u32;
            }
            break;
        }
        if self.holes.is_empty() {
            self.suspect_at = None;
        }
    }

    /// Returns the time in which a response comes, once it was measured.
    pub(super) fn answer_ns(&self) -> Option<u64> {
        self.rtt.answer_ns()
    }

    /// Sets the time of the next probe, if that is before `latest`.
    pub(super) fn arm(&mut self, now: Time, latest: Option<Time>) {
        let at = self.rtt.probe_ns().map(|ns| now + (ns << self.probes.min(16)));
        // The specification's timer also probes, and counts a retry.
        self.probe_at = at.filter(|at| latest.is_some_and(|latest| *at < latest));
    }

    /// Returns whether nothing is missing, as far as is known.
    pub(super) fn is_calm(&self) -> bool {
        self.holes.is_empty() && self.early.is_empty()
    }

    /// Stops probing: nothing is in flight, or the peer sent an RNR NAK.
    pub(super) fn disarm(&mut self) {
        self.probe_at = None;
        self.suspect_at = None;
        self.rtt.give_up();
    }

    /// Forgets everything: the QP failed.
    pub(super) fn clear(&mut self) {
        self.holes.clear();
        self.due = 0;
        self.early.clear();
        self.reported.1 = 0;
        self.disarm();
    }

    /// Returns the index of the hole that begins at or contains `psn`, or the index that such a hole would get.
    fn place(&self, psn: Psn) -> usize {
        self.holes.partition_point(|hole| hole.end().since(psn) <= 0)
    }

    /// Notes that PSNs are missing, unless that is known.
    fn miss(&mut self, psn: Psn, packets: u32, now: Time, due: bool) {
        let at = self.place(psn);
        match self.holes.get_mut(at) {
            Some(hole) if hole.psn.since(psn.plus(packets)) < 0 => {
                self.due += u32::from(due && !hole.due);
                hole.due |= due;
            }
            _ => {
                let hole = Hole {
                    psn,
                    packets,
                    seen: now,
                    sent: None,
                    due,
                };
                self.due += u32::from(due);
                self.holes.insert(at, hole);
            }
        }
    }

    /// Notes that one PSN is no longer missing.
    fn fill(&mut self, psn: Psn) {
        let at = self.place(psn);
        let Some(hole) = self
            .holes
            .get(at)
            .copied()
            .filter(|hole| psn.since(hole.psn) >= 0)
        else {
            return;
        };
        self.holes.remove(at);
        self.due -= u32::from(hole.due);
        let behind = psn.plus(1);
        let parts = [
            (hole.psn, psn.since(hole.psn) as u32),
            (behind, hole.end().since(behind) as u32),
        ];
        for (psn, packets) in parts.into_iter().rev().filter(|(_, packets)| *packets > 0) {
            self.due += u32::from(hole.due);
            self.holes.insert(at, Hole { psn, packets, ..hole });
        }
    }

    /// Forgets the holes for which `filled` holds. Returns whether there were any.
    fn forget(&mut self, mut filled: impl FnMut(&Hole) -> bool) -> bool {
        let before = self.holes.len();
        let due = &mut self.due;
        self.holes.retain(|hole| {
            let filled = filled(hole);
            *due -= u32::from(filled && hole.due);
            !filled
        });
        self.holes.len() < before
    }

    /// Notes that the peer has executed all requests before `upto`.
    fn tell(&mut self, upto: Psn) {
        let told = self.told;
        if upto.since(told) > 0 {
            self.told = upto;
            // Requests missing there have arrived; whether their data has, is another matter.
            self.forget(|hole| hole.psn.since(told) >= 0 && hole.psn.since(upto) < 0);
        }
    }

    /// Raises the reordering threshold: a hole was filled by a packet that had been in flight all the time, which others overtook
    /// by `packets`.
    fn overtaken(&mut self, packets: u32) {
        self.reorder = self.reorder.max(packets + 1).min(REORDER_PACKETS_MAX);
    }

    fn waits_ns(&self, timeout_ns: Option<u64>) -> (u64, u64) {
        let unmeasured = timeout_ns.map_or(UNMEASURED_NS, |ns| ns / UNMEASURED_PART);
        let reorder = self.rtt.reorder_ns().unwrap_or(unmeasured);
        (reorder, self.rtt.answer_ns().unwrap_or(2 * unmeasured))
    }

    /// Decides which holes are losses and which were filled in vain. Returns the number of packets that were found to be lost.
    fn judge(&mut self, now: Time, timeout_ns: Option<u64>) -> u32 {
        let (reorder_ns, answer_ns) = self.waits_ns(timeout_ns);
        let data_end = self.early.psns().next_back().map(|psn| psn.plus(1));
        let (mut lost, mut suspect_at) = (0, None::<Time>);
        for hole in &mut self.holes {
            if hole.due {
                continue;
            }
            let Some(sent) = hole.sent else {
                let end = if hole.psn.since(self.told) < 0 {
                    data_end
                } else {
                    Some(self.requests_upto)
                };
                let behind = end.map_or(0, |end| end.since(hole.end()));
                let patience_ends = hole.seen + reorder_ns;
                if behind >= self.reorder as i32 || patience_ends <= now {
                    hole.due = true;
                    self.due += 1;
                    lost += 1;
                } else {
                    suspect_at = Some(suspect_at.map_or(patience_ends, |at| at.min(patience_ends)));
                }
                continue;
            };
            if now.since_ns(sent) >= answer_ns && !mutant!(HoleFilledOnce) {
                hole.due = true;
                self.due += 1;
            }
        }
        self.suspect_at = suspect_at;
        lost
    }
}

pub(super) fn later(a: Psn, b: Psn) -> Psn {
    if a.since(b) > 0 { a } else { b }
}

/// PSNs that are sent, or come back, together: a packet, or the rest of a READ.
struct Unit {
    psn: Psn,
    packets: u32,
    is_read: bool,
}

impl Unit {
    fn end(&self) -> Psn {
        self.psn.plus(self.packets)
    }
}

impl Requester {
    /// Returns the unit that begins at `psn`, which is at `at` in the queue.
    fn unit(&self, at: Cursor, psn: Psn) -> Option<Unit> {
        let sent = |wqe: &&Wqe| wqe.first.is_some() && !wqe.is_local();
        let wqe = self.queue.get(at.wqe).filter(sent)?;
        let packets = if wqe.is_read() {
            self.resource_covering(psn)
                .map_or(1, |(first, n)| first.plus(n).since(psn) as u32)
        } else {
            1
        };
        Some(Unit {
            psn,
            packets,
            is_read: wqe.is_read(),
        })
    }

    pub(super) fn resource_covering(&self, psn: Psn) -> Option<(Psn, u32)> {
        let covers = |(first, n): &&(Psn, u32)| psn.since(*first) >= 0 && psn.since(first.plus(*n)) < 0;
        self.resources.iter().find(covers).copied()
    }

    /// Returns the units from `psn` on.
    fn units(&self, psn: Psn) -> impl Iterator<Item = Unit> {
        let (mut at, mut psn) = (self.locate(psn), psn);
        std::iter::from_fn(move || {
            while self.queue.get(at.wqe).is_some_and(Wqe::is_local) {
                at.wqe += 1;
            }
            let unit = self.unit(at, psn).filter(|unit| unit.psn.since(self.high) < 0)?;
            psn = unit.end();
            at.packet += unit.packets;
            if self.queue.get(at.wqe).is_some_and(|wqe| at.packet >= wqe.packets) {
                at = Cursor {
                    wqe: at.wqe + 1,
                    packet: 0,
                };
            }
            Some(unit)
        })
    }

    /// Returns the PSN of the first READ data that is missing; data behind it is kept.
    fn next_data(&self) -> Psn {
        let sent = self.queue.iter().map_while(|wqe| Some((wqe.first?, wqe)));
        let mut asked = sent.filter(|(_, wqe)| wqe.takes_answer());
        asked
            .next()
            .map_or(self.high, |(first, _)| later(first, self.una))
    }

    /// Returns whether a response must wait for READ data before it.
    pub(super) fn is_early(&self, psn: Psn) -> bool {
        self.selective.is_some() && psn.since(self.next_data()) > 0
    }

    /// Keeps a response until the READ data before it has come.
    pub(super) fn keep_response(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        let Some(selective) = &mut self.selective else {
            return;
        };
        env.counters.out_of_seq_responses += 1;
        if packet.payload().len() > head.mtu as usize || !selective.early.keep(psn, 1, || packet.to_local()) {
            return;
        }
        env.counters.kept_responses += 1;
        selective.fill(psn);
        let end = self
            .resource_covering(psn)
            .map_or(psn.plus(1), |(first, n)| first.plus(n));
        if let Some(selective) = &mut self.selective {
            selective.tell(end);
        }
        self.data_is_missing(env, psn.plus(1));
        self.hear(env);
    }

    /// Handles kept responses that are next in order, after READ data came in order.
    pub(super) fn handle_kept(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Broken> {
        loop {
            let first = self
                .selective
                .as_ref()
                .and_then(|selective| selective.early.first());
            let Some(psn) = first.filter(|psn| !self.is_early(*psn)) else {
                break;
            };
            let Some(selective) = &mut self.selective else {
                break;
            };
            let Some(bytes) = selective.early.take(psn) else {
                break;
            };
            if psn.since(self.una) < 0 {
                continue;
            }
            if let Ok(packet) = Packet::parse(&bytes) {
                self.take_response(env, head, &packet)?;
            }
        }
        match &self.selective {
            Some(selective) if selective.answered.since(self.una) > 0 => {
                let answered = if mutant!(AnsweredIsAll) {
                    self.high
                } else {
                    selective.answered
                };
                self.acknowledge(env, head, answered).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Handles an acknowledgement of all requests before `upto` while READ data is missing.
    pub(super) fn done_without_data(&mut self, env: &Env<'_>, upto: Psn) {
        let Some(selective) = &mut self.selective else {
            return;
        };
        if upto.since(selective.answered) > 0 {
            selective.tell(upto);
            self.data_is_missing(env, upto);
            self.hear(env);
        }
    }

    /// Notes the READ data before `upto` that has not come as missing.
    fn data_is_missing(&mut self, env: &Env<'_>, upto: Psn) {
        let Some(mut selective) = self.selective.take() else {
            return;
        };
        // Data before this PSN was checked when its absence became known.
        let from = later(selective.answered, self.una);
        selective.answered = later(selective.answered, upto);
        for (first, packets) in &self.resources {
            let mut at = later(*first, from);
            let end = first.plus(*packets);
            let end = if end.since(upto) < 0 { end } else { upto };
            if end.since(at) <= 0 || !self.queue.get(self.locate(at).wqe).is_some_and(Wqe::takes_answer) {
                continue;
            }
            while end.since(at) > 0 {
                let there = selective.early.first_from(at).filter(|psn| psn.since(end) < 0);
                let missing = there.unwrap_or(end).since(at) as u32;
                if missing > 0 {
                    selective.miss(at, missing, env.now, false);
                }
                at = at.plus(missing + 1);
            }
        }
        self.selective = Some(selective);
    }

    /// Handles a selective NAK, by which the peer reports missing and kept packets.
    pub(super) fn handle_sack(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        expected: Psn,
        sack: Option<Sack<'_>>,
    ) -> Result<(), Broken> {
        let before = expected.plus(u32::from(mutant!(SackAcknowledgesHole)));
        self.acknowledge(env, head, before)?;
        let Some(mut selective) = self.selective.take() else {
            return Ok(());
        };
        let holds = |psn: Psn| {
            let offset = psn.since(expected);
            offset > 0 && sack.is_some_and(|sack| sack.holds(offset as u32))
        };
        let last = expected.plus(sack.map_or(0, |sack| sack.last()));
        let mut overtaken = 0;
        let mut news = selective.forget(|hole| {
            let filled = holds(hole.psn);
            if filled && hole.sent.is_none() {
                overtaken = overtaken.max(last.since(hole.psn));
            }
            filled
        });
        if overtaken > 0 {
            selective.overtaken(overtaken as u32);
        }
        let told = selective.told;
        let from = later(later(expected, told), selective.requests_upto);
        for unit in self.units(from) {
            // The missing packet itself counts, even when none behind it could be kept.
            if unit.psn.since(last) > 0 {
                break;
            }
            if !holds(unit.psn) {
                selective.miss(unit.psn, unit.packets, env.now, false);
            }
            selective.requests_upto = unit.end();
            news = true;
        }
        if expected.since(told) >= 0
            && let Some(unit) = self.unit(self.locate(expected), expected)
        {
            selective.miss(unit.psn, unit.packets, env.now, false);
        }
        let count = sack.map_or(0, |sack| sack.count());
        match expected.since(selective.reported.0) {
            1.. => selective.reported = (expected, count),
            0 => selective.reported.1 = selective.reported.1.max(count),
            _ => {}
        }
        if selective.rtt.timed().is_some_and(holds) {
            selective.rtt.end(env.now);
        }
        self.selective = Some(selective);
        if news {
            self.hear(env);
        } else {
            self.judge_holes(env.now);
        }
        Ok(())
    }

    /// Handles news from the peer other than an acknowledgement: the peer lives.
    fn hear(&mut self, env: &Env<'_>) {
        if let Some(selective) = &mut self.selective {
            selective.probes = 0;
        }
        self.lives();
        self.judge_holes(env.now);
        if self.high != self.una {
            self.arm(env.now);
        }
    }

    fn judge_holes(&mut self, now: Time) {
        let Some(selective) = &mut self.selective else {
            return;
        };
        if self.una.since(self.recover) >= 0 {
            self.recover = self.high;
            selective.lost = 0;
        }
        let tolerated = if mutant!(EveryLossHalves) {
            0
        } else {
            (self.congestion_window / LOST_PART).max(WINDOW_PACKETS_MIN)
        };
        let before = selective.lost;
        selective.lost += selective.judge(now, self.timeout_ns);
        if before <= tolerated && selective.lost > tolerated {
            self.congestion_window = (self.congestion_window / 2).max(WINDOW_PACKETS_MIN);
            self.acked_since_growth = 0;
        }
    }

    /// Makes a packet due for retransmission whatever else the peer has: the peer answered it with an RNR NAK.
    pub(super) fn fill_again(&mut self, now: Time, psn: Psn) {
        let unit = self.unit(self.locate(psn), psn);
        if let (Some(selective), Some(unit)) = (&mut self.selective, unit) {
            selective.disarm();
            selective.miss(unit.psn, unit.packets, now, true);
        }
    }

    /// Sends a probe, since the peer was silent for too long: the oldest packet and the last are sent again, with all that are
    /// known to be missing.
    pub(super) fn probe(&mut self, env: &mut Env<'_>) {
        let Some(mut selective) = self.selective.take() else {
            return;
        };
        env.counters.tail_probes += 1;
        selective.probes += 1;
        for hole in &mut selective.holes {
            selective.due += u32::from(!hole.due);
            hole.due = true;
        }
        if let Some(unit) = self.unit(self.locate(self.una), self.una) {
            let there = selective.early.first_from(unit.psn);
            let there = there.map_or(unit.packets, |psn| psn.since(unit.psn) as u32);
            selective.miss(unit.psn, unit.packets.min(there).max(1), env.now, true);
        }
        if let Some(unit) = self.last_unit()
            && unit.psn.since(self.una) > 0
            && unit.psn.since(selective.told) >= 0
            && unit.psn.since(selective.requests_upto) >= 0
        {
            selective.miss(unit.psn, unit.packets, env.now, true);
        }
        self.selective = Some(selective);
    }

    /// Returns the last unit in flight. A FLUSH is not suitable for a probe: the peer answers a repetition of one that runs with an
    /// RNR NAK.
    fn last_unit(&self) -> Option<Unit> {
        let last = self.high.minus(1);
        let at = self.locate(last);
        let wqe = self.queue.get(at.wqe)?;
        if wqe.is_flush() {
            return None;
        }
        let unit = self.unit(at, last)?;
        if !unit.is_read {
            return Some(unit);
        }
        let (psn, packets) = self.resource_covering(last)?;
        Some(Unit { psn, packets, ..unit })
    }

    /// Handles due timers when the time of [`Selective::deadline`] has come.
    pub(super) fn selective_timeout(&mut self, env: &mut Env<'_>, link: Option<LinkProgress>) {
        let Some(selective) = &mut self.selective else {
            return;
        };
        let due = |at: Option<Time>| at.is_some_and(|at| at <= env.now);
        if due(selective.suspect_at) {
            selective.suspect_at = None;
            self.judge_holes(env.now);
        }
        let Some(selective) = &mut self.selective else {
            return;
        };
        if due(selective.probe_at) {
            selective.probe_at = None;
            // A FLUSH takes as long as the medium does: only the specification's timer probes for it. On a link that loses nothing
            // the response is late because the peer is.
            let flushes = self.queue.front().is_some_and(Wqe::is_flush);
            if !flushes && link.is_none() {
                self.probe(env);
                let latest = self.deadline;
                if let Some(selective) = &mut self.selective {
                    selective.arm(env.now, latest);
                }
            }
        }
    }

    /// Fills the first hole that is due.
    pub(super) fn transmit_due(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
    ) -> Result<(), Broken> {
        let Some(selective) = &mut self.selective else {
            return Ok(());
        };
        let Some(hole) = selective.holes.iter_mut().find(|hole| hole.due) else {
            selective.due = 0;
            return Ok(());
        };
        hole.due = false;
        hole.sent = Some(env.now);
        let Hole { psn, packets, .. } = *hole;
        selective.due -= 1;
        if selective
            .rtt
            .timed()
            .is_some_and(|timed| timed.since(psn) >= 0 && timed.since(psn.plus(packets)) < 0)
        {
            selective.rtt.give_up();
        }
        let at = self.locate(psn);
        let is_open = self.queue.get(at.wqe).is_some_and(|wqe| wqe.first.is_some());
        if !is_open {
            return Ok(());
        }
        self.transmit_one(env, head, buf, at, Some(packets))
            .map_err(|status| Broken {
                status,
                request: at.wqe,
            })
    }
}
