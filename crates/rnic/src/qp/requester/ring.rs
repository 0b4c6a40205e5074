//! Requests in the ring to a peer on this host: [`crate::local`].

use rdmux_wire::Psn;
use rdmux_wire::roce::Bth;

use super::transmit::{HEADS_MAX, RequestPacket};
use super::{Broken, Cursor, Requester};
use crate::cq::Status;
use crate::local::{RingBytes, Rings, Taken, Ticket};
use crate::qp::message::gather_into;
use crate::qp::{Env, Head};
use crate::transmit::TransmitBuf;
use crate::work::Operation;

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
        let data = |wqe: &super::Wqe| is_data(&wqe.request.operation);
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
        let path = head.path.as_ref().ok_or(Status::LocalQpOperation)?;
        let psn = self.begin(env, head, wqe).plus(index);
        let request = &self.queue[wqe];
        let mut packet = RequestPacket::new(head, path, request, index, psn, room);
        packet.coalesce_by(usize::MAX);
        let mut heads = [0; HEADS_MAX];
        let data = packet.emit_data(&mut heads)?;
        let (bth, count) = (packet.bth, packet.count);
        let end = psn.plus(count);
        let ticket = Ticket {
            qpn: head.qpn,
            end,
            incarnation: head.incarnation,
        };
        let mut copied = Ok(());
        let len = data.heads + data.bytes;
        let put = rings.put(
            (path.dst, head.dest_qpn),
            ticket,
            len,
            &mut |record: &dyn RingBytes| {
                record.write(0, &heads[..data.heads]);
                let place = (record, data.heads, data.bytes);
                copied = gather_into(env, head.init.pd, &request.request.sges, data.done, place);
                copied.is_ok()
            },
        );
        copied?;
        if !put {
            return Ok(false);
        }
        buf.charge(len);
        // No response is asked for, and none is timed.
        self.advance(
            &Bth {
                ack_req: false,
                ..bth
            },
            count,
            env.now,
        );
        env.counters.sent_pkts += u64::from(count);
        env.counters.sent_bytes += len as u64;
        if self.deadline.is_none() {
            self.arm(env.now);
        }
        Ok(true)
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
        self.heard = Some(env.now);
        let past = u32::from(mutant!(TakenPast));
        self.acknowledge(env, head, end.plus(past)).map(|_| ())
    }
}
