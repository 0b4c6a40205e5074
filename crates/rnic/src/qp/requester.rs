//! The requesting half of an RC QP: send queue, window, retransmission. IBTA Vol 1, 9.7.
//!
//! A request gets its PSNs when its first packet is built. `cursor` points to the next packet to build. To retransmit, the
//! requester moves the cursor back, since packets are built again from the request's own memory. A READ takes as many PSNs as its
//! response has packets. It is sent as several READ requests that each fit the window, so that the responses never overrun our own
//! receive buffer.
//!
//! Retries: after a timeout without progress, the requester retransmits from the oldest packet without a response. The
//! specification lets a period last up to four times the timeout (9.7.6.1.3). So each of the `retry_count` retries retransmits
//! twice within its period, and the period grows to four times: a lost retransmission costs one timeout instead of a retry. The
//! period also grows that far if responses were measured to take longer than the timeout.
//!
//! Within a host nothing is lost while the link lives. There only this timer prompts the peer for a response, and it retransmits
//! nothing while the peer has not taken all packets sent to it: the peer is stopped, or waits for a CPU. Such a timeout uses up its
//! part of a retry all the same, so that a peer that stays stopped is given up after the time that the user set.

pub(crate) mod direct;
mod response;
mod ring;
mod rtt;
mod selective;
mod transmit;

use std::collections::VecDeque;

use rdmux_wire::Psn;
use rdmux_wire::roce::ack_timeout_ns;

use crate::cq::Status;
use crate::device::LinkProgress;
use crate::qp::flush_icrc::FlushIcrc;
use crate::qp::message::{note_failed, opcode_of, packets_of};
use crate::qp::remains::Unfinished;
use crate::qp::{
    Env, Event, Head, QpAttributes, QpState, QpType, WINDOW_PACKETS_DEFAULT, WINDOW_PACKETS_MIN,
    bare_completion, earlier,
};
use crate::queue::Place;
use crate::retired::Held;
use crate::time::Time;
use crate::trace::Note;
use crate::work::{Operation, PostError, SendFlags, SendRequest, Target};

use direct::Direct;
use selective::Selective;

#[derive(Debug)]
pub(crate) struct Wqe {
    pub(crate) request: SendRequest,
    /// Guard that keeps the request's memory beyond the end of the request.
    pub(crate) _memory: Option<Box<Held>>,
    /// Bytes of payload, in requests or in responses.
    pub(crate) bytes: u32,
    /// Number of PSNs of the request.
    pub(crate) packets: u32,
    /// PSN of the first packet, once it was built; for a local operation that of the next packet, once the operation was done.
    pub(crate) first: Option<Psn>,
    /// Time of the post; `None` if a lane has sent it, which does not read the clock.
    pub(crate) posted: Option<Time>,
}

impl Wqe {
    fn is_read(&self) -> bool {
        matches!(self.request.operation, Operation::Read { .. })
    }

    /// Returns whether only data from the peer completes the request: READ and atomics.
    fn takes_answer(&self) -> bool {
        self.request.operation.takes_answer()
    }

    fn is_flush(&self) -> bool {
        matches!(self.request.operation, Operation::Flush { .. })
    }

    fn is_local(&self) -> bool {
        self.request.operation.is_local()
    }

    fn takes_resource(&self) -> bool {
        takes_resource(&self.request.operation)
    }
}

/// Returns whether an operation takes one of the responder's replay resources.
pub(crate) fn takes_resource(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::Read { .. }
            | Operation::Flush { .. }
            | Operation::CompareSwap { .. }
            | Operation::FetchAdd { .. }
            | Operation::AtomicWrite { .. }
    )
}

/// Returns whether the transport service, RC or XRC, supports a request. An XRC target has no send queue. IBTA Vol 1, A14.
pub(crate) fn takes(qp_type: QpType, request: &SendRequest) -> bool {
    match (qp_type, request.to) {
        (QpType::XrcSend, Target::Srq(_)) | (QpType::Rc, Target::Connected) => true,
        (QpType::XrcSend, _) => request.operation.is_local(),
        _ => false,
    }
}

/// The next packet to build.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    wqe: usize,
    packet: u32,
}

#[derive(Debug)]
pub(crate) struct Requester {
    queue: VecDeque<Wqe>,
    cursor: Cursor,
    /// Oldest PSN without a response.
    una: Psn,
    /// PSN that the next request begins with.
    next: Psn,
    /// First PSN that was never sent.
    high: Psn,
    /// READ requests, atomics and FLUSHes that were sent and have no response: first PSN and number of PSNs. A retransmission must lie
    /// inside of one request that the peer may know, so these ranges are only ever divided.
    resources: VecDeque<(Psn, u32)>,
    since_ack_req: u32,

    window: u32,
    congestion_window: u32,
    acked_since_growth: u32,
    /// Losses before this PSN belong to a congestion event that the window was reduced for already.
    recover: Psn,

    timeout_ns: Option<u64>,
    retry_count: u8,
    rnr_retry: u8,
    max_rd_atomic: u8,

    /// Timeouts since the last progress: each retransmitted something, except for `stalls` of them.
    resends: u8,
    stalls: u8,
    rnr_tries: u8,
    deadline: Option<Time>,
    rnr_until: Option<Time>,
    /// PSN of the packet that the peer answered with an RNR NAK, while the requester waits that out.
    rnr_psn: Psn,
    /// Time of the last packet from the peer.
    heard: Option<Time>,
    /// Time since which no response has made progress, once something was retransmitted for that.
    stuck_since: Time,
    /// Set when a gap at `una` was reported and retransmitted; the next retransmission waits for the timer.
    gap_resent: bool,
    /// Set when the QP went to SQD and its user was not notified yet that the send queue has drained.
    draining: bool,
    pub(crate) flush_icrc: FlushIcrc,
    /// State of selective retransmission, if the peer agreed to it. Then `cursor` never goes back, and holes are filled instead.
    selective: Option<Box<Selective>>,
    /// Set when packets are lost that the peer had not taken: the link to it broke, or it could not read the memory that a request names.
    lost: bool,
    /// [`LinkProgress::taken`] at the last timeout.
    taken: Option<u32>,
    direct: Direct,
    /// The requests that had not completed when the QP failed, if it is to keep them.
    ended: Option<Vec<Unfinished>>,
}

/// The requester cannot continue: one request ends with this status and the QP goes to Error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broken {
    pub(crate) status: Status,
    /// Index of the request in the queue, counted from the oldest.
    request: usize,
}

impl Broken {
    fn oldest(status: Status) -> Broken {
        Broken { status, request: 0 }
    }
}

impl Requester {
    pub(crate) fn new() -> Requester {
        let zero = Psn::new(0);
        Requester {
            queue: VecDeque::new(),
            cursor: Cursor::default(),
            una: zero,
            next: zero,
            high: zero,
            resources: VecDeque::new(),
            since_ack_req: 0,
            window: WINDOW_PACKETS_DEFAULT,
            congestion_window: WINDOW_PACKETS_DEFAULT,
            acked_since_growth: 0,
            recover: zero,
            timeout_ns: None,
            retry_count: 0,
            rnr_retry: 0,
            max_rd_atomic: 1,
            resends: 0,
            stalls: 0,
            rnr_tries: 0,
            deadline: None,
            rnr_until: None,
            rnr_psn: zero,
            heard: None,
            stuck_since: Time(0),
            gap_resent: false,
            draining: false,
            flush_icrc: FlushIcrc::default(),
            selective: None,
            lost: false,
            taken: None,
            direct: Direct::default(),
            ended: None,
        }
    }

    /// Makes it keep the requests that do not complete.
    pub(crate) fn keep_remains(&mut self) {
        self.ended.get_or_insert_default();
    }

    /// Takes the requests that did not complete, if it has kept them.
    pub(crate) fn take_ended(&mut self) -> Option<Vec<Unfinished>> {
        self.ended.take()
    }

    pub(crate) fn set(&mut self, attr: &QpAttributes, head: &Head) {
        if let Some(psn) = attr.sq_psn {
            (self.una, self.next, self.high, self.recover) = (psn, psn, psn, psn);
        }
        if attr.window_bytes.is_some() {
            self.window = head.window;
            self.congestion_window = self.window;
        }
        if head.selective {
            self.window = self.window.min(head.reach());
            self.congestion_window = self.congestion_window.min(self.window);
            if attr.selective.is_some() || attr.sq_psn.is_some() {
                self.selective = Some(Box::new(Selective::new(self.una, head.reach())));
            } else if let Some(selective) = &mut self.selective {
                selective.set_reach(head.reach());
            }
        }
        if let Some(code) = attr.timeout {
            self.timeout_ns = ack_timeout_ns(code);
        }
        self.retry_count = attr.retry_count.unwrap_or(self.retry_count);
        self.rnr_retry = attr.rnr_retry.unwrap_or(self.rnr_retry);
        self.max_rd_atomic = attr.max_rd_atomic.unwrap_or(self.max_rd_atomic);
        if attr.peer_is_rdmux == Some(true) {
            self.flush_icrc.settle(false);
        }
    }

    /// Posts a send request. In Error it completes at once, as flushed.
    pub(crate) fn post(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: SendRequest,
        place: Place,
    ) -> Result<(), PostError> {
        // A request that the transport service does not support is invalid in any state.
        if !takes(head.init.qp_type, &request) {
            return Err(PostError::Invalid);
        }
        let bytes = request.check()?;
        match head.state {
            // Requests are taken in SQD too, and begun when the QP is back in RTS. 10.3.1.5.
            QpState::Rts | QpState::Sqd => {}
            QpState::Error | QpState::Sqe => {
                let opcode = opcode_of(&request.operation);
                let wc = bare_completion(head.qpn, request.wr_id, Status::Flushed, opcode);
                place.give_back(head);
                env.complete(head.init.send_cq, wc, false);
                return Ok(());
            }
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::WrongState),
        }
        // The peer keeps no such request for replay, or the user allows none.
        if takes_resource(&request.operation) && !self.has_resources() {
            return Err(PostError::Invalid);
        }
        self.ask(env, head, &request, bytes);
        if self.may_go_directly() && self.post_directly(env, head, &request) {
            // The place is given back after the completion: a caller that sees the completion and finds no free place calls the
            // device, which is executing this code.
            place.give_back(head);
            self.open_lane(env, head, &request);
            return Ok(());
        }
        if !place.take(head) {
            return Err(PostError::QueueFull);
        }
        self.close_lane_soon();
        let packets = packets_of(&request.operation, bytes, head.mtu);
        let wqe = Wqe {
            _memory: env.regions.retired.hold(&request.operation),
            request,
            bytes,
            packets,
            first: None,
            posted: Some(env.now),
        };
        self.queue.push_back(wqe);
        Ok(())
    }

    /// Returns whether requests may take resources of the peer at all.
    pub(crate) fn has_resources(&self) -> bool {
        self.max_rd_atomic > 0
    }

    /// Completes every request as flushed.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>, head: &Head) {
        head.end_lending();
        if mutant!(FlushedBackwards) {
            self.queue.make_contiguous().reverse();
        }
        head.sends.give_back(self.queue.len());
        if let Some(ended) = &mut self.ended {
            ended.extend(self.queue.iter().map(Unfinished::of));
        }
        for wqe in std::mem::take(&mut self.queue) {
            let wc = bare_completion(
                head.qpn,
                wqe.request.wr_id,
                Status::Flushed,
                opcode_of(&wqe.request.operation),
            );
            env.complete(head.init.send_cq, wc, false);
        }
        self.cursor = Cursor::default();
        self.resources.clear();
        self.deadline = None;
        self.rnr_until = None;
        self.lost = false;
        if let Some(selective) = &mut self.selective {
            selective.clear();
        }
    }

    /// Completes the request that broke with its status, and those before it as flushed; the caller then fails the QP.
    pub(crate) fn end_broken(&mut self, env: &mut Env<'_>, head: &Head, broken: Broken) {
        head.end_lending();
        for i in 0..=broken.request {
            let Some(wqe) = self.queue.pop_front() else { break };
            if let Some(ended) = &mut self.ended {
                ended.push(Unfinished::of(&wqe));
            }
            head.sends.give_back(1);
            let status = if i == broken.request {
                note_failed(env, head, &wqe.request, wqe.bytes, broken.status);
                broken.status
            } else {
                Status::Flushed
            };
            env.complete(
                head.init.send_cq,
                bare_completion(
                    head.qpn,
                    wqe.request.wr_id,
                    status,
                    opcode_of(&wqe.request.operation),
                ),
                false,
            );
        }
    }

    /// Returns the number of packets kept.
    pub(crate) fn kept(&self) -> usize {
        self.selective.as_deref().map_or(0, Selective::kept)
    }

    pub(crate) fn next_psn(&self) -> Psn {
        self.lent_out().map_or(self.next, |(_, next)| next)
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.lent_out()
            .map_or(self.queue.len(), |(outstanding, _)| outstanding)
    }

    /// Advances by `psns`, fewer than 2^23, as if requests of so many packets had been answered. No request may be posted.
    pub(crate) fn skip(&mut self, env: &Env<'_>, psns: u32) {
        self.next = self.next.plus(psns);
        self.high = self.next;
        self.progress(env.now, self.next);
    }

    /// Returns the moment at which [`Requester::handle_timeout`] is due. `local`: the peer is on this host.
    pub(crate) fn deadline(&self, local: bool) -> Option<Time> {
        if self.lost {
            return Some(Time(0));
        }
        let selective = self.selective.as_deref();
        let selective = selective.and_then(|selective| selective.deadline(local));
        earlier(earlier(self.deadline, self.rnr_until), selective)
    }

    /// Handles due timers. `link`: the progress of a peer on this host, to which no packet is lost.
    pub(crate) fn handle_timeout(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        link: Option<LinkProgress>,
    ) -> Result<(), Broken> {
        if std::mem::take(&mut self.lost) && self.awaits_answer() {
            self.send_again(env, self.una);
        }
        if self.rnr_until.is_some_and(|until| until <= env.now) {
            self.rnr_until = None;
            // The packet that the peer had no receive for may have been executed meanwhile, with nothing left to retransmit.
            if self.selective.is_some() && self.high != self.una {
                self.arm(env.now);
            }
        }
        if self.deadline.is_some_and(|deadline| deadline <= env.now) {
            self.deadline = None;
            if self.is_stalled(link) {
                self.stall(env, head)?;
            } else {
                self.time_out(env, head)?;
            }
        }
        self.selective_timeout(env, link);
        Ok(())
    }

    /// Retransmits, since no response came in time.
    fn time_out(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Broken> {
        env.counters.local_ack_timeout_err += 1;
        let note = Note::TimedOut {
            psn: self.una,
            resends: self.resends - self.stalls,
            retry_count: self.retry_count,
        };
        env.note(head.qpn, note);
        self.congested();
        self.gap_resent = false;
        self.resend_from(env, head, self.una)
    }

    /// Counts a timeout at which nothing is lost.
    fn stall(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Broken> {
        env.counters.local_stalls += 1;
        env.note(head.qpn, Note::PeerStalled { psn: self.una });
        self.count_retry(env, head)?;
        self.stalls = self.stalls.saturating_add(1);
        self.arm(env.now);
        Ok(())
    }

    /// Makes the next [`Requester::handle_timeout`], due at once, retransmit all packets without a response.
    pub(crate) fn lost(&mut self) {
        self.lost = self.awaits_answer();
    }

    /// Retransmits packets that the peer dropped because its queue pair was not in RTR. A peer that has answered anything was in
    /// RTR.
    pub(crate) fn peer_is_ready(&mut self, env: &mut Env<'_>) {
        if self.heard.is_none() && self.awaits_answer() {
            self.send_again(env, self.una);
        }
    }

    /// Returns whether a request was sent and has no response. After [`Requester::flush`] there is none, whatever the PSNs are.
    fn awaits_answer(&self) -> bool {
        !self.queue.is_empty() && self.high != self.una
    }

    /// Returns whether packets wait for the peer and it has taken none since the last timeout. A peer that has taken some since then,
    /// possibly for another queue pair, runs and does not answer.
    fn is_stalled(&mut self, link: Option<LinkProgress>) -> bool {
        let Some(link) = link.filter(|link| !link.all) else {
            self.taken = None;
            return false;
        };
        let before = self.taken.replace(link.taken);
        before.is_none_or(|before| before == link.taken)
    }

    /// Notes that the QP goes to SQD: one event follows when the requests that were begun have ended.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
    }

    /// Reports that the send queue has drained, if so. IBTA Vol 1, 10.3.1.5.
    pub(crate) fn tell_drained(&mut self, env: &mut Env<'_>, head: &Head) {
        let begun = self.queue.front().is_some_and(|wqe| wqe.first.is_some());
        if self.draining && head.state == QpState::Sqd && !begun {
            self.draining = false;
            env.events.push_back(Event::SqDrained(head.qpn));
        }
    }

    fn complete_oldest(&mut self, env: &mut Env<'_>, head: &Head) {
        let Some(wqe) = self.queue.pop_front() else { return };
        head.sends.give_back(1);
        let opcode = opcode_of(&wqe.request.operation);
        if let Some(posted) = wqe.posted {
            env.latencies.record(opcode, env.now.since_ns(posted));
        }
        if wqe.request.flags.contains(SendFlags::SIGNALED) {
            let mut wc = bare_completion(head.qpn, wqe.request.wr_id, Status::Success, opcode);
            wc.byte_len = wqe.bytes;
            env.complete(head.init.send_cq, wc, false);
        }
        self.cursor = match self.cursor.wqe.checked_sub(1) {
            Some(wqe) => Cursor { wqe, ..self.cursor },
            None => Cursor::default(),
        };
    }

    /// Completes local operations that no request before them holds back.
    fn complete_local(&mut self, env: &mut Env<'_>, head: &Head) {
        while self
            .queue
            .front()
            .is_some_and(|wqe| wqe.is_local() && wqe.first.is_some())
        {
            self.complete_oldest(env, head);
        }
    }

    fn arm(&mut self, now: Time) {
        // While an RNR NAK is waited out, nothing is sent, so no response can be late.
        if self.rnr_until.is_some() {
            return;
        }
        let shift = u32::from(self.resends / 2).min(2);
        let answer_ns = self.selective.as_deref().and_then(Selective::answer_ns);
        self.deadline = self
            .timeout_ns
            .map(|ns| now + (ns << shift).max(answer_ns.unwrap_or(0)).min(ns << 2));
        if let Some(selective) = &mut self.selective {
            selective.arm(now, self.deadline);
        }
    }

    /// Notes that the peer lives: retries are counted from 0 again.
    fn lives(&mut self) {
        self.resends = 0;
        self.stalls = 0;
        self.taken = None;
    }

    // The cursor.

    fn cursor_psn(&self) -> Psn {
        match self.queue.get(self.cursor.wqe).and_then(|wqe| wqe.first) {
            Some(first) => first.plus(self.cursor.packet),
            None => self.next,
        }
    }

    fn locate(&self, psn: Psn) -> Cursor {
        let begun = |wqe: &Wqe| {
            wqe.first
                .is_some_and(|first| self.begins_before(first, psn.plus(1)))
        };
        let behind = self.queue.partition_point(begun);
        let inside = behind.checked_sub(1).and_then(|wqe| {
            let packet = psn.since(self.queue[wqe].first?) as u32;
            (packet < self.queue[wqe].packets).then_some(Cursor { wqe, packet })
        });
        inside.unwrap_or(Cursor {
            wqe: behind,
            packet: 0,
        })
    }

    /// Returns whether a request that began with `first` began before `psn`, which is not before `una`. The distances are counted
    /// from `una`, since the longest message takes half of all PSNs.
    fn begins_before(&self, first: Psn, psn: Psn) -> bool {
        first.since(self.una) < psn.since(self.una)
    }

    fn rewind(&mut self, psn: Psn) {
        self.cursor = self.locate(psn);
    }

    // Retransmission.

    fn resend_from(&mut self, env: &mut Env<'_>, head: &Head, psn: Psn) -> Result<(), Broken> {
        if self.queue.is_empty() {
            return Ok(());
        }
        self.count_retry(env, head)?;
        self.send_again(env, psn);
        Ok(())
    }

    /// Uses up a part of a retry.
    fn count_retry(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Broken> {
        if self.resends == 0 {
            self.stuck_since = Time(env.now.0.saturating_sub(self.timeout_ns.unwrap_or(0)));
        }
        if self.resends >= 2 * self.retry_count && !mutant!(RetriesNeverEnd) {
            env.counters.retry_exceeded_err += 1;
            let note = Note::RetriesUsed {
                psn: self.una,
                resends: self.resends - self.stalls,
                retry_count: self.retry_count,
                stuck_ns: env.now.since_ns(self.stuck_since),
                heard_ns: self.heard.map(|heard| env.now.since_ns(heard)),
            };
            env.note(head.qpn, note);
            return Err(Broken::oldest(Status::RetryExceeded));
        }
        self.resends = self.resends.saturating_add(1);
        Ok(())
    }

    /// Retransmits packets without a response: all from a PSN on, or with selective retransmission those that the peer then reports
    /// missing.
    fn send_again(&mut self, env: &mut Env<'_>, psn: Psn) {
        if self.selective.is_some() {
            self.probe(env);
            self.arm(env.now);
            return;
        }
        self.rewind(psn);
        if self
            .queue
            .get(self.cursor.wqe)
            .is_some_and(|wqe| matches!(wqe.request.operation, Operation::Flush { .. }))
        {
            self.flush_icrc.resend();
        }
        if mutant!(LastNotResent) {
            self.skip_last_packet();
        }
        self.arm(env.now);
    }

    /// A deliberate defect: moves the cursor past the last packet of a message.
    fn skip_last_packet(&mut self) {
        let Cursor { wqe, packet } = self.cursor;
        if self.queue.get(wqe).is_some_and(|wqe| packet + 1 == wqe.packets) {
            self.cursor = Cursor {
                wqe: wqe + 1,
                packet: 0,
            };
        }
    }

    /// Reduces the number of packets in flight after a loss, once for all losses of one window.
    fn congested(&mut self) {
        if self.una.since(self.recover) >= 0 {
            self.congestion_window = (self.congestion_window / 2).max(WINDOW_PACKETS_MIN);
            self.acked_since_growth = 0;
            self.recover = self.high;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::device::Traffic;
    use crate::qp::{Qp, QpInit};
    use crate::region::{NumberMap, Regions};
    use crate::{Counters, Cqn, Pd, Qpn, SgeList};

    /// A requester that has sent two requests, the first with the most packets of 256 bytes: 2^23 PSNs, of which the last 4 have no
    /// response.
    fn longest() -> (Requester, Psn) {
        let first = Psn::new(0xff_0000);
        let behind = first.plus(1 << 23);
        let wqe = |first, bytes: u32| Wqe {
            request: SendRequest {
                wr_id: 0,
                operation: Operation::Send { imm: None },
                sges: SgeList::EMPTY,
                flags: SendFlags::empty(),
                to: Target::Connected,
            },
            _memory: None,
            bytes,
            packets: bytes.div_ceil(256).max(1),
            first: Some(first),
            posted: None,
        };
        let mut requester = Requester::new();
        requester.queue = VecDeque::from([wqe(first, 1 << 31), wqe(behind, 1024)]);
        (requester.una, requester.next) = (behind.minus(4), behind.plus(4));
        requester.high = requester.next;
        requester.cursor = Cursor { wqe: 2, packet: 0 };
        (requester, behind)
    }

    #[test]
    fn acknowledge__past_the_longest_message() {
        let (mut requester, behind) = longest();
        let mut env = Env {
            regions: &mut Regions::default(),
            srqs: &mut NumberMap::default(),
            cqs: &mut NumberMap::default(),
            events: &mut VecDeque::new(),
            flushes: &mut Default::default(),
            accesses: &mut Default::default(),
            counters: &mut Counters::default(),
            latencies: &mut Default::default(),
            overrun: &mut Vec::new(),
            traffic: &Traffic::default(),
            rnr_faults: &mut None,
            tracer: &mut None,
            moderated: &mut Default::default(),
            now: Time(1),
        };
        let qp = Qp::new(Qpn::new(5), QpInit::new(Pd(0), Cqn(0)), 256);
        let done = requester.acknowledge(&mut env, &qp.head, behind.plus(2));
        assert!(done.is_ok_and(|done| done));
        assert_eq!((requester.outstanding(), requester.una), (1, behind.plus(2)));
    }

    #[test]
    fn locate__behind_the_longest_message() {
        let (requester, behind) = longest();
        let at = |psn| {
            let Cursor { wqe, packet } = requester.locate(psn);
            (wqe, packet)
        };
        assert_eq!(at(behind.minus(1)), (0, (1 << 23) - 1));
        assert_eq!(at(behind), (1, 0));
        assert_eq!(at(behind.plus(3)), (1, 3));
    }
}
