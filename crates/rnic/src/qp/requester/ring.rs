//! Requests in the ring to a peer on this host: [`crate::local`].

use rdmux_wire::Psn;
use rdmux_wire::roce::coalesced;

use super::selective::Selective;
use super::transmit::{DataPacket, HEADS_MAX, RequestPacket};
use super::{Broken, Cursor, Requester, Wqe, takes};
use crate::cq::Status;
use crate::lane::{DirectLane, PSNS_LENT, Sending, Sent};
use crate::local::{NAMED_BYTES_MAX, Rings, Taken, Ticket};
use crate::probes;
use crate::qp::message::{gather_into, opcode_of, packets_of, parts};
use crate::qp::{Env, Head, QpState};
use crate::time::Time;
use crate::transmit::TransmitBuf;
use crate::work::{Operation, SendFlags, SendRequest};

/// Most PSNs that a lane has in flight: memory loses nothing, and the ring bounds them too.
const LANE_WINDOW: u32 = 1_024;

impl Requester {
    /// Returns whether the packet at the cursor may go by the ring: one of data that was never sent. What is sent again goes in packets,
    /// as the peer then answers in any case.
    pub(super) fn goes_by_ring(&self, head: &Head) -> bool {
        let is_data = |operation: &Operation| {
            matches!(
                operation,
                Operation::Send { .. } | Operation::SendInvalidate { .. } | Operation::Write { .. }
            )
        };
        let data = |wqe: &Wqe| is_data(&wqe.request.operation);
        head.local
            && head.rate.is_free()
            && self.cursor_psn() == self.high
            && self.queue.get(self.cursor.wqe).is_some_and(data)
    }

    /// Puts the packet at the cursor into the ring. Returns false if that has no room.
    pub(super) fn put_one(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
    ) -> Result<bool, Status> {
        let Cursor { wqe, packet: index } = self.cursor;
        let room = self.room(head);
        let psn = self.begin(env, head, wqe).plus(index);
        let path = head.path.as_ref().ok_or(Status::LocalQpOperation)?;
        let new = |bytes| {
            let mut packet = RequestPacket::new(head, path, &self.queue[wqe], index, psn, room);
            packet.coalesce_by(bytes);
            packet
        };
        let mut packet = new(NAMED_BYTES_MAX);
        let mut put_len = put_named(env, rings, &mut packet)?;
        if put_len.is_none() {
            packet = new(coalesced::PAYLOAD_BYTES_MAX);
            put_len = put(env, rings, &mut packet)?;
        }
        let Some(len) = put_len else {
            return Ok(false);
        };
        // The packet asks for an acknowledgement in case the peer leaves it to packets. Otherwise none comes, so none is timed.
        let (bth, count) = (packet.bth, packet.count);
        buf.charge(len);
        self.advance(&bth, count, false, env.now);
        if self.deadline.is_none() {
            self.arm(env.now);
        }
        Ok(true)
    }

    /// Posts a SEND by putting it into the ring, and takes `request`, if nothing is to be sent before it and one packet holds it.
    pub(crate) fn post_by_ring(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: &mut Option<SendRequest>,
        rings: &mut dyn Rings,
    ) {
        let Some(wanted) = request.as_ref() else { return };
        let is_send = matches!(
            wanted.operation,
            Operation::Send { .. } | Operation::SendInvalidate { .. }
        );
        let has_sent_all = self.cursor.wqe == self.queue.len() && self.next == self.high;
        let begins = head.state == QpState::Rts && self.rnr_until.is_none() && !self.lost;
        if !is_send
            || !has_sent_all
            || !begins
            || !head.rate.is_free()
            || wanted.flags.contains(SendFlags::FENCE)
            || !takes(head.init.qp_type, wanted)
        {
            return;
        }
        // The code that queues a request refuses an invalid one.
        let Ok(bytes) = wanted.check() else { return };
        let packets = packets_of(&wanted.operation, bytes, head.mtu);
        // The driver puts longer ones into the ring, which may name their memory.
        let fits = packets <= coalesced::COUNT_MAX
            && bytes as usize <= coalesced::PAYLOAD_BYTES_MAX
            && (bytes as usize) < rings.named_bytes_min();
        let room = self.room(head);
        let Some(path) = head.path.as_ref().filter(|_| fits && packets <= room) else {
            return;
        };
        if !head.sends.take_place() {
            return;
        }
        let Some(request_of) = request.take() else { return };
        let wqe = Wqe {
            request: request_of,
            _memory: None,
            bytes,
            packets,
            first: Some(self.next),
            posted: Some(env.now),
        };
        let mut packet = RequestPacket::new(head, path, &wqe, 0, self.next, room);
        packet.coalesce_by(coalesced::PAYLOAD_BYTES_MAX);
        if !matches!(put(env, rings, &mut packet), Ok(Some(_))) {
            // A failure of own memory occurs again when the request is sent in order, and is reported then.
            head.sends.give_back(1);
            *request = Some(wqe.request);
            return;
        }
        probe!(
            post_send,
            head.qpn.value(),
            wqe.request.wr_id,
            probes::opcode(opcode_of(&wqe.request.operation)),
            bytes,
        );
        self.next = self.next.plus(packets);
        self.high = self.next;
        self.queue.push_back(wqe);
        self.cursor.wqe += 1;
        if self.deadline.is_none() {
            self.arm(env.now);
        }
    }

    /// Lends the lane the requests, so that callers go on without the device: all that are not done are SENDs that were sent, and nothing
    /// delays what comes behind them. `request` is the last of them.
    pub(crate) fn lend(&mut self, env: &mut Env<'_>, head: &Head, rings: &mut dyn Rings) {
        let Some(lane) = self.lane().cloned() else { return };
        let is_send = |wqe: &Wqe| matches!(wqe.request.operation, Operation::Send { .. });
        let may = self.cursor.wqe == self.queue.len()
            && self.next == self.high
            && head.state == QpState::Rts
            && head.rate.is_free()
            && self.rnr_until.is_none()
            && !self.lost
            && self.resources.is_empty()
            && self.selective.as_deref().is_none_or(Selective::is_calm)
            && self.queue.iter().all(is_send);
        let Some(path) = head.path.as_ref().filter(|_| may) else {
            return;
        };
        let Some(ring) = rings.ring_to((path.dst, head.dest_qpn)) else {
            return;
        };
        let sending = Sending {
            ring,
            qpn: head.qpn,
            dest_qpn: head.dest_qpn,
            incarnation: head.incarnation,
            mtu: head.mtu,
            window: if head.selective { head.reach() } else { LANE_WINDOW },
            bytes_end: rings.named_bytes_min().min(coalesced::PAYLOAD_BYTES_MAX) as u32,
        };
        if let Some(last) = self.queue.back() {
            lane.learn(env.regions, head.init.pd, last.request.sges.as_slice());
        }
        let sent = Sent {
            queue: std::mem::take(&mut self.queue),
            una: self.una,
            next: self.next,
            left: PSNS_LENT,
        };
        lane.lend_sends(sending, sent);
        self.cursor = Cursor::default();
        // The timer of the oldest request runs on, so that a peer that is silent gains no time by a loan. What the lane sends is looked at
        // when it fires. The ring loses nothing for which to probe.
        if let Some(selective) = &mut self.selective {
            selective.disarm();
        }
    }

    /// Takes the requests back from the lane, as if they had been put into the ring here.
    pub(crate) fn recall(&mut self, now: Time) {
        let lane = self.lane_with_sends();
        let Some(sent) = lane.and_then(DirectLane::take_back_sends) else {
            return;
        };
        self.queue = sent.queue;
        self.cursor = Cursor {
            wqe: self.queue.len(),
            packet: 0,
        };
        let youngest = self.queue.back().and_then(|wqe| wqe.first);
        let next = youngest
            .filter(|_| mutant!(LaneRecallForgets))
            .unwrap_or(sent.next);
        (self.next, self.high) = (next, next);
        if !self.queue.is_empty() {
            // The device gives their places back before it completes them, and no WRITE by the lane may come in between.
            self.close_lane_soon();
        }
        if sent.una.since(self.una) > 0 {
            // Time counts from here on for those that are not done.
            self.heard = self.heard.max(Some(now));
            self.progress(now, sent.una);
        }
    }

    /// Returns the number of requests and the next PSN of the lane that has them.
    pub(super) fn lent_out(&self) -> Option<(usize, Psn)> {
        self.lane_with_sends().and_then(DirectLane::sending)
    }

    /// Handles the news of how the peer has taken the request that ends before a PSN.
    pub(crate) fn handle_taken(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        end: Psn,
        taken: Taken,
    ) -> Result<(), Broken> {
        // The timer runs for those that packets answer.
        let is_open = end.since(self.una) > 0 && end.since(self.high) <= 0;
        if taken == Taken::Deferred && !mutant!(DeferredIsDone) || !is_open {
            return Ok(());
        }
        if taken == Taken::Again && !mutant!(AgainIsDone) {
            self.lost();
            return Ok(());
        }
        self.heard = Some(env.now);
        let past = u32::from(mutant!(TakenPast));
        self.acknowledge(env, head, end.plus(past)).map(|_| ())
    }
}

/// Puts a packet of data into the ring that names its payload's memory. Returns its bytes, or `None` if the peer cannot read that, or it is
/// not worth while, or there is no room.
fn put_named(
    env: &mut Env<'_>,
    rings: &mut dyn Rings,
    packet: &mut RequestPacket<'_>,
) -> Result<Option<usize>, Status> {
    let least = rings.named_bytes_min();
    let operation = &packet.wqe.request.operation;
    let is_send = matches!(
        operation,
        Operation::Send { .. } | Operation::SendInvalidate { .. }
    );
    if !is_send || (packet.wqe.bytes as usize) < least {
        return Ok(None);
    }
    let mut heads = [0; HEADS_MAX];
    let data = packet.emit_data(&mut heads)?;
    if data.bytes < least {
        return Ok(None);
    }
    let (head, sges) = (packet.head, &packet.wqe.request.sges);
    let Some((parts, count)) = parts(env, head.init.pd, sges, data.done, data.bytes)? else {
        return Ok(None);
    };
    let peer = (packet.path.dst, head.dest_qpn);
    let (heads, parts) = (&heads[..data.heads], &parts[..count]);
    let put = rings.put_named(peer, ticket_of(packet), heads, parts);
    Ok(put.then(|| count_put(env, packet, data)))
}

fn ticket_of(packet: &RequestPacket<'_>) -> Ticket {
    Ticket {
        qpn: packet.head.qpn,
        end: packet.bth.psn.plus(packet.count),
        incarnation: packet.head.incarnation,
    }
}

/// Counts a packet that is in the ring; returns its bytes.
fn count_put(env: &mut Env<'_>, packet: &RequestPacket<'_>, data: DataPacket) -> usize {
    let len = data.heads + data.bytes;
    env.counters.sent_pkts += u64::from(packet.count);
    env.counters.sent_bytes += len as u64;
    len
}

/// Puts a packet of data into the ring. Returns its bytes, or `None` if there is no room.
fn put(
    env: &mut Env<'_>,
    rings: &mut dyn Rings,
    packet: &mut RequestPacket<'_>,
) -> Result<Option<usize>, Status> {
    let mut heads = [0; HEADS_MAX];
    let data = packet.emit_data(&mut heads)?;
    let (head, path, wqe) = (packet.head, packet.path, packet.wqe);
    let ticket = ticket_of(packet);
    let len = data.heads + data.bytes;
    let mut copied = Ok(());
    let put = rings.put((path.dst, head.dest_qpn), ticket, len, &mut |room| {
        room.write(0, &heads[..data.heads]);
        let place = (room, data.heads, data.bytes);
        copied = gather_into(env, head.init.pd, &wqe.request.sges, data.done, place);
        copied.is_ok()
    });
    copied?;
    Ok(put.then(|| count_put(env, packet, data)))
}
