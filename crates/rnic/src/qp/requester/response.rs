//! Responses: acknowledgements, NAKs, and the data of READs and atomics.

use rdmux_wire::Psn;
use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{Aeth, NakCode, Operation as Op, Packet, Syndrome, rnr_timer_ns};

use super::selective::later;
use super::{Broken, Requester, Wqe};
use crate::cq::Status;
use crate::qp::message::scatter;
use crate::qp::responder::{ATOMIC_WAITS_TIMER, MEDIUM_TIMER};
use crate::qp::{Env, Head};
use crate::time::Time;
use crate::trace::Note;
use crate::work::Operation;

impl Requester {
    /// Handles a response.
    pub(crate) fn handle_response(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
    ) -> Result<(), Broken> {
        let psn = packet.bth.psn;
        // Only packets in flight can be answered; any other response is stale or forged. 9.7.5.1.1.
        if psn.since(self.high) >= 0 || psn.since(self.una) < -1 {
            env.counters.stale_responses += 1;
            return Ok(());
        }
        self.heard = Some(env.now);
        let operation = packet.bth.opcode.operation;
        if operation.is_read_response() || operation == Op::AtomicAcknowledge {
            return self.handle_data_response(env, head, packet);
        }
        let Some(Aeth { syndrome, .. }) = packet.aeth() else {
            return Ok(());
        };
        if !matches!(syndrome, Syndrome::Ack { .. }) {
            probe!(nak_in, head.qpn.value(), psn.value(), syndrome.code());
        }
        match syndrome {
            Syndrome::Ack { .. } => self.acknowledge(env, head, psn.plus(1)).map(|_| ()),
            Syndrome::RnrNak { timer } => self.handle_rnr_nak(env, head, psn, timer),
            Syndrome::Nak(NakCode::PsnSequence) => self.handle_gap_nak(env, head, packet),
            Syndrome::Nak(code) => self.handle_fatal_nak(env, head, psn, code),
        }
    }

    /// Handles an acknowledgement that a request of the peer carries. The request may be a late or a repeated one, and the
    /// acknowledgement then says nothing new.
    pub(crate) fn handle_carried(&mut self, env: &mut Env<'_>, head: &Head, psn: Psn) -> Result<(), Broken> {
        if psn.since(self.high) >= 0 || psn.since(self.una) < 0 {
            return Ok(());
        }
        self.heard = Some(env.now);
        self.acknowledge(env, head, psn.plus(1)).map(|_| ())
    }

    /// Handles an RNR NAK: the packet is to be sent again after a time.
    fn handle_rnr_nak(&mut self, env: &mut Env<'_>, head: &Head, psn: Psn, timer: u8) -> Result<(), Broken> {
        env.counters.rcvd_rnr_err += 1;
        // A copy of an RNR NAK that is being waited out says nothing new.
        if psn.since(self.una) < 0 || self.rnr_until.is_some() && psn == self.rnr_psn {
            return Ok(());
        }
        if mutant!(RnrIsAck) {
            return self.acknowledge(env, head, psn.plus(1)).map(|_| ());
        }
        // The rest of a READ that is in progress may be asked for again, and has nothing before it.
        let has_more = psn.since(self.una) > 0;
        if has_more && !self.acknowledge(env, head, psn)? && self.selective.is_none() {
            return Ok(());
        }
        let request = self.locate(psn).wqe;
        // An rdmux peer answers so while a medium works, however long that takes.
        let medium_works = head.peer_is_rdmux
            && (timer == MEDIUM_TIMER
                || timer == ATOMIC_WAITS_TIMER && self.queue.get(request).is_some_and(Wqe::takes_resource));
        let is_counted = self.rnr_retry < 7 && !medium_works;
        let note = Note::RnrNak {
            psn,
            wait_ns: rnr_timer_ns(timer),
            tries: self.rnr_tries,
            rnr_retry: self.rnr_retry,
            is_last: is_counted && self.rnr_tries >= self.rnr_retry,
        };
        env.note(head.qpn, note);
        if is_counted {
            if self.rnr_tries >= self.rnr_retry {
                let status = Status::RnrRetryExceeded;
                return Err(Broken { status, request });
            }
            self.rnr_tries += 1;
        }
        // The peer lives, so this does not lead to a timeout.
        self.lives();
        self.deadline = None;
        self.rnr_until = Some(env.now + rnr_timer_ns(timer));
        self.rnr_psn = psn;
        if self.selective.is_some() {
            self.fill_again(env.now, psn);
        } else {
            self.rewind(psn);
        }
        Ok(())
    }

    /// Handles a NAK that reports a gap: the peer misses a packet and executed everything before it.
    fn handle_gap_nak(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) -> Result<(), Broken> {
        let psn = packet.bth.psn;
        env.counters.packet_seq_err += 1;
        if psn.since(self.una) < 0 {
            return Ok(());
        }
        env.note(head.qpn, Note::GapNak { psn });
        if self.selective.is_some() {
            let sack = Sack::of(packet).and_then(Result::ok);
            return self.handle_sack(env, head, psn, sack);
        }
        let from = if mutant!(GapNakAcknowledges) {
            psn.plus(1)
        } else {
            psn
        };
        if self.acknowledge(env, head, from)? {
            self.congested();
            self.resend_from(env, head, from)?;
        }
        Ok(())
    }

    /// Handles a NAK by which the peer refuses a request.
    fn handle_fatal_nak(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        psn: Psn,
        code: NakCode,
    ) -> Result<(), Broken> {
        if psn.since(self.una) < 0 {
            return Ok(());
        }
        env.note(head.qpn, Note::FatalNak { psn, code });
        // A READ before it may still lack its data; no packet brings that any longer, and the retries do not matter.
        let _ = self.acknowledge(env, head, psn);
        let status = match code {
            NakCode::RemoteAccess => Status::RemoteAccess,
            NakCode::RemoteOperation => Status::RemoteOperation,
            NakCode::InvalidRequest | NakCode::PsnSequence => Status::RemoteInvalidRequest,
        };
        let request = self.locate(psn).wqe;
        Err(Broken { status, request })
    }

    /// Handles the news that the peer has executed everything before `upto`. Returns false when a READ before it still lacks data:
    /// its response was lost, and the READ was sent again. 9.7.5.1.1.
    pub(super) fn acknowledge(&mut self, env: &mut Env<'_>, head: &Head, upto: Psn) -> Result<bool, Broken> {
        while let Some(wqe) = self.queue.front() {
            let Some(first) = wqe.first else { break };
            if !self.begins_before(first, upto) {
                break;
            }
            if wqe.is_local() {
                self.complete_oldest(env, head);
                continue;
            }
            if wqe.takes_answer() && !mutant!(AckCompletesRead) {
                // All requests before the READ are done; only its data completes the READ itself.
                if first.since(self.una) > 0 {
                    self.progress(env.now, first);
                }
                if self.selective.is_some() {
                    self.done_without_data(env, upto);
                } else if !self.gap_resent {
                    self.gap_resent = true;
                    self.congested();
                    self.resend_from(env, head, self.una)?;
                }
                return Ok(false);
            }
            if first.plus(wqe.packets).since(upto) > 0 {
                break;
            }
            self.complete_oldest(env, head);
        }
        self.complete_local(env, head);
        if upto.since(self.una) > 0 {
            self.progress(env.now, upto);
        }
        self.tell_drained(env, head);
        Ok(true)
    }

    /// Advances `una`: the peer lives, and the window opens.
    pub(super) fn progress(&mut self, now: Time, una: Psn) {
        let acked = una.since(self.una).max(0) as u32;
        self.una = una;
        // `recover` advances with `una`: half of all PSNs behind it, it would seem to lie ahead.
        self.recover = later(self.recover, una);
        while self
            .resources
            .front()
            .is_some_and(|(first, n)| una.since(first.plus(*n)) >= 0)
        {
            self.resources.pop_front();
        }
        if self.cursor_psn().since(una) < 0 {
            self.cursor = self.locate(una);
        }
        self.lives();
        self.rnr_tries = 0;
        self.gap_resent = false;
        self.rnr_until = None;
        if let Some(selective) = &mut self.selective {
            selective.progress(una, now);
        }
        if self.high == una {
            self.deadline = None;
            if let Some(selective) = &mut self.selective {
                selective.disarm();
            }
        } else {
            self.arm(now);
        }
        self.acked_since_growth += acked;
        if self.acked_since_growth >= self.congestion_window {
            self.acked_since_growth = 0;
            self.congestion_window =
                (self.congestion_window + 1 + self.congestion_window / 16).min(self.window);
        }
    }

    fn handle_data_response(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
    ) -> Result<(), Broken> {
        let psn = packet.bth.psn;
        if psn.since(self.una) < 0 {
            env.counters.stale_responses += 1;
            return Ok(());
        }
        if packet
            .aeth()
            .is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack { .. }))
        {
            return Err(Broken::oldest(Status::BadResponse));
        }
        if self.is_early(psn) {
            self.keep_response(env, head, packet);
            return Ok(());
        }
        self.take_response(env, head, packet)?;
        self.handle_kept(env, head)
    }

    /// Handles the response that is next in order.
    pub(super) fn take_response(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
    ) -> Result<(), Broken> {
        let psn = packet.bth.psn;
        // The response acknowledges all requests before the one that it answers.
        let at = self.locate(psn);
        let Some(wqe) = self.queue.get(at.wqe) else {
            return Ok(());
        };
        let Some(first) = wqe.first else { return Ok(()) };
        if !self.acknowledge(env, head, first)? {
            return Ok(());
        }
        // The request that it answers is now the oldest.
        let Some(wqe) = self.queue.front() else {
            return Ok(());
        };
        let is_atomic = packet.bth.opcode.operation == Op::AtomicAcknowledge;
        match wqe.request.operation {
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } if psn == self.una => {
                place_original(env, head, wqe, packet)?;
                self.complete_oldest(env, head);
                self.complete_local(env, head);
                self.progress(env.now, psn.plus(1));
                self.tell_drained(env, head);
            }
            _ if is_atomic => return Err(Broken::oldest(Status::BadResponse)),
            Operation::AtomicWrite { .. } => {
                check_empty(packet)?;
                self.acknowledge(env, head, psn.plus(1))?;
            }
            Operation::Flush { .. } => {
                check_empty(packet)?;
                self.flush_icrc.answered();
                self.acknowledge(env, head, psn.plus(1))?;
            }
            Operation::Read { .. } => {
                if psn != self.una {
                    return self.request_missing(env, head);
                }
                if place_read(env, head, wqe, at.packet, packet)? {
                    self.complete_oldest(env, head);
                    self.complete_local(env, head);
                }
                self.progress(env.now, psn.plus(1));
                self.tell_drained(env, head);
            }
            // A response of a kind that no request asked for. 9.9.2.1.
            _ => return Err(Broken::oldest(Status::BadResponse)),
        }
        Ok(())
    }

    /// Requests a READ again, once, from the oldest response on, which is missing.
    fn request_missing(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Broken> {
        env.counters.out_of_seq_responses += 1;
        if !self.gap_resent {
            self.gap_resent = true;
            self.congested();
            self.resend_from(env, head, self.una)?;
        }
        Ok(())
    }
}

/// Places the original value that the response to an atomic request carries.
fn place_original(env: &mut Env<'_>, head: &Head, wqe: &Wqe, packet: &Packet<'_>) -> Result<(), Broken> {
    let is_atomic = packet.bth.opcode.operation == Op::AtomicAcknowledge;
    let original = packet.atomic_ack().filter(|_| is_atomic);
    let original = original.ok_or(Broken::oldest(Status::BadResponse))?;
    let bytes = original.to_ne_bytes();
    scatter(env, head.init.pd, &wqe.request.sges, 0, &bytes).map_err(Broken::oldest)
}

/// Checks the response to an ATOMIC WRITE or FLUSH: that of a READ of 0 bytes.
fn check_empty(packet: &Packet<'_>) -> Result<(), Broken> {
    match packet.bth.opcode.operation == Op::ReadResponseOnly && packet.payload().is_empty() {
        true => Ok(()),
        false => Err(Broken::oldest(Status::BadResponse)),
    }
}

/// Checks the response to a READ, which is its packet with the index `at`, and places its bytes. Returns whether it is the last one.
fn place_read(
    env: &mut Env<'_>,
    head: &Head,
    wqe: &Wqe,
    at: u32,
    packet: &Packet<'_>,
) -> Result<bool, Broken> {
    let done = at * head.mtu;
    let expected = head.mtu.min(wqe.bytes - done) as usize;
    let is_last = at + 1 >= wqe.packets;
    let ends = packet.bth.opcode.operation.position().ends();
    if packet.payload().len() != expected || (is_last && !ends) {
        return Err(Broken::oldest(Status::BadResponse));
    }
    let place_at = if mutant!(ReadPlacedLow) {
        done.saturating_sub(head.mtu)
    } else {
        done
    };
    let list = &wqe.request.sges;
    scatter(env, head.init.pd, list, place_at.into(), packet.payload()).map_err(Broken::oldest)?;
    Ok(is_last)
}
