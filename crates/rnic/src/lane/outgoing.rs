//! SENDs that callers put into the ring to the QP's peer.
//!
//! While the lane has them, the QP's requester has no queue: the lane holds the requests that are not done, with their PSNs. The device takes
//! them back before it does anything with the QP ([`Requester::recall`](crate::qp::requester::Requester)), and is then where it would be if
//! it had put them into the ring itself.

use std::collections::VecDeque;
use std::sync::Arc;

use rdmux_wire::roce::{Bth, Opcode, Operation as Op, Transport, coalesced};
use rdmux_wire::{Psn, Qpn};

use super::{OwnKey, find_recent};
use crate::local::{PeerRing, Put, Room, Ticket};
use crate::qp::requester::Wqe;
use crate::queue::SendQueue;
use crate::work::{Operation, SendFlags, SendRequest};

/// Bytes of the headers of a SEND: BTH and immediate data.
const HEADS_BYTES: usize = Bth::LEN + 4;

/// Attributes of a QP with which its lane sends.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) ring: Arc<dyn PeerRing>,
    pub(crate) qpn: Qpn,
    pub(crate) dest_qpn: Qpn,
    /// See [`Ticket::incarnation`].
    pub(crate) incarnation: u32,
    /// Path MTU in bytes.
    pub(crate) mtu: u32,
    /// Number of PSNs that may be in flight.
    pub(crate) window: u32,
    /// Payload bytes from which on the device sends a message.
    pub(crate) bytes_end: u32,
}

/// The requests of a QP from the oldest that is not done on, all of them sent.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) queue: VecDeque<Wqe>,
    /// Oldest PSN that is not acknowledged, and that of the next request.
    pub(crate) una: Psn,
    pub(crate) next: Psn,
    /// Number of PSNs until the device has to look at the sequence: it compares PSNs with those of older requests.
    pub(crate) left: u32,
}

/// The SENDs of a lane, while it has them.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    lent: Option<(Sending, Sent)>,
    /// Packets sent, and their bytes.
    pub(super) packets: u64,
    pub(super) bytes: u64,
}

impl Outgoing {
    pub(super) fn lend(&mut self, sending: Sending, sent: Sent) {
        self.lent = Some((sending, sent));
    }

    pub(super) fn take_back(&mut self) -> Option<Sent> {
        self.lent.take().map(|(_, sent)| sent)
    }

    pub(super) fn sent(&self) -> Option<&Sent> {
        self.lent.as_ref().map(|(_, sent)| sent)
    }

    /// Puts a SEND of `bytes` bytes into the ring, and takes it; [`Put::Not`] if the device has to post it.
    #[inline]
    pub(super) fn post(
        &mut self,
        sends: &SendQueue,
        keys: &mut [OwnKey],
        taken: &mut Option<SendRequest>,
        bytes: u32,
    ) -> Put {
        let (Some((sending, sent)), Some(request)) = (&mut self.lent, taken.as_ref()) else {
            return Put::Not;
        };
        let Operation::Send { imm } = request.operation else {
            return Put::Not;
        };
        let packets = if bytes <= sending.mtu {
            1
        } else {
            bytes.div_ceil(sending.mtu)
        };
        let in_flight = sent.next.since(sent.una) as u32;
        let may = bytes < sending.bytes_end
            && packets <= coalesced::COUNT_MAX
            && in_flight + packets <= sending.window
            && packets <= sent.left
            && !request.flags.contains(SendFlags::FENCE);
        // A place that is not of the lane's requests is that of one which was left to the driver: it comes first.
        let is_first = sends.outstanding() == sent.queue.len();
        if !may || !is_first || !sends.take_place() {
            return Put::Not;
        }
        let place = TakenPlace(sends);
        let mut heads = [0; HEADS_BYTES];
        let len = sending.emit(&mut heads, request, imm, (sent.next, packets, bytes));
        let ticket = Ticket {
            qpn: sending.qpn,
            end: sent.next.plus(packets),
            incarnation: sending.incarnation,
        };
        let put = sending
            .ring
            .put(ticket, len + bytes as usize, &mut |room: &dyn Room| {
                room.write(0, &heads[..len]);
                fill(room, len, keys, request)
            });
        if put == Put::Not {
            return put;
        }
        std::mem::forget(place);
        if let Some(request) = taken.take() {
            sent.queue
                .push_back(Wqe::sent(request, bytes, packets, sent.next));
        }
        sent.next = ticket.end;
        sent.left -= packets;
        self.packets += u64::from(packets);
        self.bytes += (len + bytes as usize) as u64;
        put
    }

    /// Takes the requests that a ticket ends. Returns `None` if the device has to handle it.
    #[inline]
    pub(super) fn end(&mut self, ticket: Ticket, mut each: impl FnMut(Wqe)) -> Option<()> {
        let (sending, sent) = self.lent.as_mut()?;
        if sending.incarnation != ticket.incarnation {
            return None;
        }
        let is_open = ticket.end.since(sent.una) > 0 && ticket.end.since(sent.next) <= 0;
        if !is_open {
            return Some(());
        }
        sent.una = ticket.end;
        while sent.queue.front().is_some_and(|wqe| wqe.ends_by(ticket.end))
            && let Some(wqe) = sent.queue.pop_front()
        {
            each(wqe);
        }
        if mutant!(LaneEndsPast)
            && let Some(wqe) = sent.queue.pop_front()
        {
            sent.una = sent.una.plus(wqe.packets);
            each(wqe);
        }
        Some(())
    }
}

/// A place of a request that is not sent. It is given back when this is dropped, also while a panic of the request's memory unwinds.
struct TakenPlace<'a>(&'a SendQueue);

impl Drop for TakenPlace<'_> {
    fn drop(&mut self) {
        self.0.give_back(1);
    }
}

impl Sending {
    /// Writes the headers of a SEND; returns their length.
    #[inline]
    fn emit(
        &self,
        out: &mut [u8; HEADS_BYTES],
        request: &SendRequest,
        imm: Option<u32>,
        (psn, packets, bytes): (Psn, u32, u32),
    ) -> usize {
        let operation = if imm.is_some() {
            Op::SendOnlyImm
        } else {
            Op::SendOnly
        };
        let opcode = Opcode {
            transport: Transport::Rc,
            operation,
        };
        let mut bth = Bth::new(opcode, self.dest_qpn, psn);
        // In case the peer leaves it to packets.
        bth.ack_req = true;
        bth.pad = ((4 - bytes % 4) % 4) as u8;
        bth.solicited = request.flags.contains(SendFlags::SOLICITED);
        bth.emit(&mut out[..]);
        if packets > 1 {
            coalesced::set_count(&mut out[..], packets);
        }
        match imm {
            Some(imm) => {
                out[Bth::LEN..].copy_from_slice(&imm.to_be_bytes());
                HEADS_BYTES
            }
            None => Bth::LEN,
        }
    }
}

/// Writes the payload of a request behind its headers; returns false if the lane does not know its memory, or that failed.
#[inline]
fn fill(room: &dyn Room, mut at: usize, keys: &mut [OwnKey], request: &SendRequest) -> bool {
    if let Some(inline) = request.sges.as_inline() {
        room.write(at, inline);
        return true;
    }
    for sge in request.sges.as_slice().iter().filter(|sge| sge.length > 0) {
        let Some(key) = find_recent(keys, |key| key.lkey == sge.lkey) else {
            return false;
        };
        let Some(begin) = key.view().offset_of(sge.addr, sge.length.into()) else {
            return false;
        };
        let len = sge.length as usize;
        if room.write_from(at, &*key.memory, begin, len).is_err() {
            return false;
        }
        at += len;
    }
    true
}

impl Wqe {
    /// Makes the entry of a request that was sent, with the PSN of its first packet. (A SEND keeps no memory.)
    fn sent(request: SendRequest, bytes: u32, packets: u32, first: Psn) -> Wqe {
        Wqe {
            request,
            _memory: None,
            bytes,
            packets,
            first: Some(first),
            posted: None,
        }
    }

    /// Returns whether all its packets come before a PSN.
    #[inline]
    fn ends_by(&self, psn: Psn) -> bool {
        self.first
            .is_some_and(|first| first.plus(self.packets).since(psn) <= 0)
    }
}
