//! Peers on this host: what goes through memory that the device shares with them, and which of its regions they reach.

use std::net::IpAddr;
use std::sync::Arc;

use rdmux_wire::roce::{Bth, ICRC_LEN, Opcode, Packet};
use rdmux_wire::{LKey, Qpn, RKey};

use super::{PAD_MAX, RECORD_READ_BYTES, Rnic, set_timer};
use crate::lane::dest_qpn;
use crate::local::{Lending, NAMED_BYTES_MAX, RingBytes, Taken, Ticket};
use crate::memory::{Access, Memory};
use crate::qp::message::Payload;
use crate::qp::requester::direct::{Grant, Grantable, NotGranted};
use crate::qp::{Cause, Env, Head, Qp, QpType};
use crate::time::Time;

impl Rnic {
    /// Sets whether a QP reaches its peer through memory of this host. If so, its packets need no ICRC, and [`Event::WantsGrant`]
    /// asks for memory that the QP could access itself. If not, the QP forgets all grants, and takes requests without an answer for
    /// lost with the link. The driver must call this again after a reset of the QP.
    pub fn set_local(&mut self, qpn: Qpn, local: bool) {
        if let Some(qp) = self.qps.get_mut(&qpn.value()) {
            if !local {
                // The QP sends the requests that are not done again at once.
                qp.recall(|| Time(0));
            }
            qp.set_local(local);
            set_timer(qp, &mut self.timers);
        }
    }

    /// Makes the requests of a QP and of its peer come to the device from here on, and forgets the grants of the peer, for which further
    /// requests ask again.
    pub fn forget_grants(&mut self, now: Time, qpn: Qpn) {
        self.with_qp(now, qpn, |qp, _| {
            if let Some(requester) = qp.requester() {
                requester.forget_grants();
            }
        });
    }

    /// Returns the value that [`Rnic::set_local`] set last.
    pub fn is_local(&self, qpn: Qpn) -> bool {
        self.qps.get(&qpn.value()).is_some_and(|qp| qp.head.local)
    }

    /// Returns the QPs whose path leads to an address and whose peer's QPN satisfies `is_it`.
    pub fn qps_to(&self, dst: IpAddr, is_it: impl Fn(Qpn) -> bool) -> Vec<Qpn> {
        let to = |qp: &&Qp| qp.head.path.is_some_and(|path| path.dst == dst) && is_it(qp.head.dest_qpn);
        self.qps.values().filter(to).map(|qp| qp.head.qpn).collect()
    }

    /// Passes in the peer's answer to [`Event::WantsGrant`].
    pub fn set_grant(&mut self, now: Time, qpn: Qpn, rkey: RKey, grant: Option<Grant>) {
        self.with_qp(now, qpn, |qp, _| {
            if let Some(requester) = qp.requester() {
                requester.set_grant(rkey, grant);
            }
        });
    }

    /// Returns the grants that a QP holds from its peer, which may have revoked them since.
    pub fn grants(&self, qpn: Qpn) -> impl Iterator<Item = &Grant> {
        let qp = self.qps.get(&qpn.value());
        qp.into_iter().flat_map(Qp::held_grants)
    }

    /// Returns the memory and rights that the peer of a QP may be granted for the region of a key. The grant is valid until
    /// [`Rnic::poll_revoked`] returns the QP, or the region is registered anew or deregistered.
    pub fn grantable(&mut self, qpn: Qpn, rkey: RKey) -> Result<Grantable, NotGranted> {
        let qp = self.qps.get_mut(&qpn.value()).ok_or(NotGranted::NoQp)?;
        let allowed = qp.grants().ok_or(NotGranted::NoQp)?;
        let spec = self.regions.plain(rkey.0, qp.head.init.pd);
        let spec = spec.ok_or(NotGranted::NoRegion)?;
        qp.head.granted = true;
        self.counters.grants += 1;
        Ok(Grantable {
            memory: spec.memory.clone(),
            memory_offset: spec.memory_offset,
            iova: spec.view().iova,
            length: spec.length,
            access: allowed & spec.access,
            lkey: LKey(rkey.0),
        })
    }

    /// Returns a region of which a QP's requests may name parts for the peer to read ([`Rings::put_named`]), whatever rights the region
    /// gives. The peer may until [`Rnic::poll_revoked`] returns the QP, the region is registered anew or deregistered, or `lending` ends
    /// what the driver lends the peer for the QP.
    pub fn lendable(
        &mut self,
        qpn: Qpn,
        lkey: LKey,
        lending: Arc<dyn Lending>,
    ) -> Result<Grantable, NotGranted> {
        let qp = self.qps.get_mut(&qpn.value()).ok_or(NotGranted::NoQp)?;
        qp.grants().ok_or(NotGranted::NoQp)?;
        let spec = self.regions.plain(lkey.0, qp.head.init.pd);
        let spec = spec.ok_or(NotGranted::NoRegion)?;
        qp.head.granted = true;
        qp.head.lending = Some(lending);
        Ok(Grantable {
            memory: spec.memory.clone(),
            memory_offset: spec.memory_offset,
            iova: spec.view().iova,
            length: spec.length,
            access: Access::REMOTE_READ,
            lkey,
        })
    }

    /// Returns the memories of the regions that are no windows and are not filled by work requests.
    pub fn memories(&self) -> impl Iterator<Item = (LKey, Arc<dyn Memory>)> {
        self.regions
            .memories()
            .map(|(lkey, memory)| (lkey, Arc::clone(memory)))
    }

    /// Returns a QP that takes no more requests, or takes other ones: the driver must revoke all grants to its peer before anything
    /// else.
    pub fn poll_revoked(&mut self) -> Option<Qpn> {
        self.revoked.pop()
    }

    /// Handles a request that came in the ring of a process at an address. Returns how it was taken; `None`: the driver is
    /// to pass it on as a packet, or if it cannot read all of it, as [`Taken::Again`].
    pub fn handle_request(&mut self, now: Time, src: IpAddr, record: &dyn RingBytes) -> Option<Taken> {
        let (len, in_record) = (record.bytes(), record.held());
        // The headers, and a short payload, are read at once; a longer one goes from the record to its place.
        let mut bytes = [0; RECORD_READ_BYTES + PAD_MAX + ICRC_LEN];
        let read = in_record.min(len).min(RECORD_READ_BYTES);
        record.read(0, &mut bytes[..read]).ok()?;
        if in_record == len && self.take_by_lane(now, src, (record, &bytes[..read])) {
            return Some(Taken::Done);
        }
        let heads = Bth::LEN + Opcode::from_code(bytes[0])?.ext().len();
        let tail = usize::from(bytes[1] >> 4 & 3) + ICRC_LEN;
        let held = if len == read { read } else { heads };
        if held > read || len > heads + NAMED_BYTES_MAX {
            return None;
        }
        bytes[held..held + tail].fill(0);
        let mut packet = Packet::parse_local(&bytes[..held + tail]).ok()?;
        // Whoever takes it out of the ring acknowledges it.
        packet.bth.ack_req = false;
        let payload = if len == read {
            Payload::Packet(packet.payload())
        } else {
            Payload::Ring(record, heads, len - heads)
        };
        let (opcode, qpn) = (packet.bth.opcode, packet.bth.dest_qpn);
        let is_data = opcode.operation.is_send() || opcode.operation.is_write();
        let qp = self.qps.get_mut(&qpn.value())?;
        // The receive of one that has to come again waits in its QP, and those of XRC share receives.
        let takes_named = |head: &Head| in_record == len || head.init.qp_type == QpType::Rc;
        let is_for = |head: &Head| {
            head.takes(opcode) && head.takes_now(opcode) && head.is_from_peer(src) && takes_named(head)
        };
        if !is_data || packet.bth.pkey & 0x7fff != 0x7fff || !is_for(&qp.head) {
            return None;
        }
        let mut env = env_of!(self, now);
        qp.recall_receives();
        let (taken, failed) = qp.take_request(&mut env, &packet, payload);
        if !self.overrun.is_empty() {
            self.fail_overrun(now);
        }
        if let Some(status) = failed {
            self.with_qp(now, qpn, |qp, env| {
                qp.fail(env, Some((status, Cause::PeerRequest)))
            });
        } else if taken == Some(Taken::Deferred) {
            // A response is pending.
            self.with_qp(now, qpn, |_, _| ());
        }
        let taken = taken?;
        if taken == Taken::Again {
            return Some(taken);
        }
        if let Some(qp) = self.qps.get_mut(&qpn.value()).filter(|_| taken == Taken::Done) {
            qp.lend_receives(&self.srqs);
        }
        let count = u64::from(packet.count());
        self.counters.rcvd_bytes += (len + tail) as u64;
        self.counters.rcvd_pkts += count;
        self.counters.rcvd_pkts_local += count;
        if taken == Taken::Done && in_record < len {
            self.counters.rcvd_pkts_named += count;
        }
        Some(taken)
    }

    /// Has the lane of a QP execute a request, if the lane has the QP's turn. Returns whether it did.
    fn take_by_lane(&mut self, now: Time, src: IpAddr, record: (&dyn RingBytes, &[u8])) -> bool {
        let Some(qp) = dest_qpn(record.1).and_then(|qpn| self.qps.get(&qpn.value())) else {
            return false;
        };
        let Some(lane) = qp.lane_with_receives().cloned() else {
            return false;
        };
        let mut taken = lane.take(src, record, || now);
        let shared = qp.head.init.srq.and_then(|srqn| self.srqs.get(&srqn.0));
        let pd = shared.map_or(qp.head.init.pd, |srq| srq.init.pd);
        if taken.is_none() && lane.learn_receive(&mut self.regions, pd) {
            taken = lane.take(src, record, || now);
        }
        let is_taken = taken.is_some();
        if let Some(delivery) = taken.flatten() {
            self.deliver(now, delivery);
        }
        is_taken
    }

    /// Handles the news of how the peer has taken a request, after the packets that the peer had sent before.
    pub fn handle_taken(&mut self, now: Time, ticket: Ticket, taken: Taken) {
        let qp = self.qps.get(&ticket.qpn.value()).filter(|_| taken == Taken::Done);
        if let Some(lane) = qp.and_then(Qp::lane_with_sends) {
            let mut deliveries = Vec::new();
            let is_done = lane.end(ticket, &|| now, &mut deliveries);
            for delivery in deliveries {
                self.deliver(now, delivery);
            }
            if is_done {
                return;
            }
        }
        self.with_qp(now, ticket.qpn, |qp, env| qp.handle_taken(env, ticket, taken));
    }
}
