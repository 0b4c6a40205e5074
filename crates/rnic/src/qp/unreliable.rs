//! The sending half of UC and UD QPs. Requests leave in order, as fast as the device sends them. A request is complete when its
//! last packet is built, since no peer answers it. IBTA Vol 1, 9.8.

use std::collections::VecDeque;

use rdmux_wire::roce::{Bth, Deth, Operation as Op, Position, Reth};
use rdmux_wire::{Psn, Qpn};

use crate::cq::Status;
use crate::qp::message::{gather, note_failed, opcode_of, packets_of, perform_local};
use crate::qp::{Env, Event, Head, QpAttributes, QpState, QpType, bare_completion};
use crate::queue::Place;
use crate::retired::Held;
use crate::sched::class_of;
use crate::transmit::TransmitBuf;
use crate::work::{Operation, PostError, SendFlags, SendRequest, Target};

/// For Q_Keys in requests of at least this value the QP sends its own Q_Key. IBTA Vol 1, 10.2.5.
const QKEY_OF_QP: u32 = 0x8000_0000;

#[derive(Debug)]
struct Wqe {
    request: SendRequest,
    /// Guard that keeps the request's memory beyond the end of the request.
    _memory: Option<Box<Held>>,
    bytes: u32,
    /// Number of packets; 0 for an operation that the device carries out alone.
    packets: u32,
}

#[derive(Debug)]
pub(crate) struct Sender {
    queue: VecDeque<Wqe>,
    /// Number of packets of the oldest request that were built.
    built: u32,
    next: Psn,
    /// Set when the QP went to SQD and its user was not notified yet that the send queue has drained.
    draining: bool,
}

impl Sender {
    pub(crate) fn new() -> Sender {
        Sender {
            queue: VecDeque::new(),
            built: 0,
            next: Psn::new(0),
            draining: false,
        }
    }

    pub(crate) fn set(&mut self, attr: &QpAttributes) {
        self.next = attr.sq_psn.unwrap_or(self.next);
    }

    /// Posts a send request. In SQE and Error it completes at once, as flushed.
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
        if head.init.qp_type == QpType::Ud && bytes > head.mtu {
            return Err(PostError::TooLong);
        }
        match head.state {
            QpState::Rts | QpState::Sqd => {}
            QpState::Error | QpState::Sqe => {
                place.give_back(head);
                complete(env, head, &request, Status::Flushed, 0);
                return Ok(());
            }
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::WrongState),
        }
        if !place.take(head) {
            return Err(PostError::QueueFull);
        }
        let packets = packets_of(&request.operation, bytes, head.mtu);
        self.queue.push_back(Wqe {
            _memory: env.regions.retired.hold(&request.operation),
            request,
            bytes,
            packets,
        });
        Ok(())
    }

    pub(crate) fn next_psn(&self) -> Psn {
        self.next
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.queue.len()
    }

    /// Completes every request as flushed.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>, head: &Head) {
        head.sends.give_back(self.queue.len());
        for wqe in std::mem::take(&mut self.queue) {
            complete(env, head, &wqe.request, Status::Flushed, 0);
        }
        self.built = 0;
    }

    /// Completes the oldest request with this status, and those behind it as flushed.
    pub(crate) fn break_off(&mut self, env: &mut Env<'_>, head: &Head, status: Status) {
        if let Some(wqe) = self.queue.pop_front() {
            head.sends.give_back(1);
            note_failed(env, head, &wqe.request, wqe.bytes, status);
            complete(env, head, &wqe.request, status, 0);
        }
        self.flush(env, head);
    }

    /// Notes that the QP goes to SQD: one event follows when the requests that were begun have ended.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
    }

    /// Reports that the send queue has drained, if so. IBTA Vol 1, 10.3.1.5.
    pub(crate) fn tell_drained(&mut self, env: &mut Env<'_>, head: &Head) {
        if self.draining && head.state == QpState::Sqd && self.built == 0 {
            self.draining = false;
            env.events.push_back(Event::SqDrained(head.qpn));
        }
    }

    /// Returns the traffic class of the next packet, if the request determines it instead of the QP.
    pub(crate) fn class(&self) -> Option<usize> {
        match self.queue.front()?.request.to {
            Target::Datagram { path, .. } => Some(class_of(path.traffic_class)),
            Target::Connected | Target::Srq(_) => None,
        }
    }

    pub(crate) fn wants_transmit(&self, head: &Head) -> bool {
        let may_begin = head.state == QpState::Rts || (head.state == QpState::Sqd && self.built > 0);
        may_begin && head.rate.held_until.is_none() && !self.queue.is_empty()
    }

    /// Builds packets until the buffer is full for this quantum. An error concerns the oldest request.
    pub(crate) fn transmit(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
    ) -> Result<(), Status> {
        while !buf.is_full()
            && self.wants_transmit(head)
            && let Some(wqe) = self.queue.front()
        {
            if wqe.packets == 0 {
                perform_local(env, head, &wqe.request.operation)?;
            } else {
                push_packet(env, head, buf, wqe, self.built, self.next)?;
                self.next = self.next.plus(1);
                self.built += 1;
                env.counters.sent_pkts += 1;
            }
            if self.built == wqe.packets {
                head.sends.give_back(1);
                if wqe.request.flags.contains(SendFlags::SIGNALED) {
                    complete(env, head, &wqe.request, Status::Success, wqe.bytes);
                }
                self.queue.pop_front();
                self.built = 0;
            }
        }
        self.tell_drained(env, head);
        Ok(())
    }
}

/// Returns whether the transport service, UC or UD, supports a request.
pub(crate) fn takes(qp_type: QpType, request: &SendRequest) -> bool {
    has(qp_type, &request.operation) && is_addressed(qp_type, &request.to)
}

/// Returns whether a transport service supports an operation. IBTA Vol 1, 9.4 and 10.8.2: UC neither reads nor invalidates at the
/// peer, UD only sends.
fn has(qp_type: QpType, operation: &Operation) -> bool {
    match operation {
        Operation::Send { .. } => true,
        Operation::Write { .. } => qp_type == QpType::Uc,
        _ => qp_type == QpType::Uc && operation.is_local(),
    }
}

/// Returns whether a request has a target of the kind that its transport service needs. Both the address and the QPN of a multicast
/// target must be those of a group. IBTA Vol 1, 10.5.2.1.
fn is_addressed(qp_type: QpType, to: &Target) -> bool {
    match to {
        Target::Connected => qp_type == QpType::Uc,
        Target::Datagram { path, qpn, .. } => {
            qp_type == QpType::Ud
                && path.src.is_ipv4() == path.dst.is_ipv4()
                && !path.dst.is_unspecified()
                && path.dst.is_multicast() == (*qpn == Qpn::MULTICAST)
        }
        Target::Srq(_) => false,
    }
}

fn complete(env: &mut Env<'_>, head: &Head, request: &SendRequest, status: Status, byte_len: u32) {
    let mut wc = bare_completion(head.qpn, request.wr_id, status, opcode_of(&request.operation));
    wc.byte_len = byte_len;
    env.complete(head.init.send_cq, wc, false);
}

/// Builds packet `index` of a request.
fn push_packet(
    env: &Env<'_>,
    head: &Head,
    buf: &mut TransmitBuf,
    wqe: &Wqe,
    index: u32,
    psn: Psn,
) -> Result<(), Status> {
    let (path, dest_qpn, deth) = match wqe.request.to {
        Target::Datagram { path, qpn, qkey } => {
            let qkey = if qkey < QKEY_OF_QP { qkey } else { head.qkey };
            let src_qpn = head.qpn;
            let mut path = path;
            if mutant!(UdTrafficClassLost) {
                path.traffic_class = 0;
            }
            (path, qpn, Some(Deth { qkey, src_qpn }))
        }
        Target::Connected | Target::Srq(_) => {
            (head.path.ok_or(Status::LocalQpOperation)?, head.dest_qpn, None)
        }
    };
    let position = Position::of(index == 0, index + 1 == wqe.packets);
    let (reth, imm) = match wqe.request.operation {
        Operation::Write { va, rkey, imm } => {
            let length = wqe.bytes;
            (Some(Reth { va, rkey, length }), imm)
        }
        Operation::Send { imm } => (None, imm),
        _ => return Err(Status::LocalQpOperation),
    };
    let operation = Op::of_data(reth.is_some(), position, imm.is_some(), false);
    let done = index * head.mtu;
    let bytes = (wqe.bytes - done).min(head.mtu) as usize;
    let mut bth = Bth::new(head.opcode(operation), dest_qpn, psn);
    bth.pad = ((4 - bytes % 4) % 4) as u8;
    // Only a packet that uses up a receive can wake a waiter at the peer.
    bth.solicited = position.ends()
        && (reth.is_none() || imm.is_some())
        && wqe.request.flags.contains(SendFlags::SOLICITED);
    let heads = Bth::LEN + bth.opcode.ext().len();
    buf.push(&path, heads + bytes + usize::from(bth.pad), |b| {
        bth.emit(b);
        let mut at = Bth::LEN;
        if let Some(deth) = deth {
            deth.emit(&mut b[at..]);
            at += Deth::LEN;
        }
        if let Some(reth) = reth.filter(|_| position.begins()) {
            reth.emit(&mut b[at..]);
            at += Reth::LEN;
        }
        if let Some(imm) = imm.filter(|_| position.ends()) {
            b[at..at + 4].copy_from_slice(&imm.to_be_bytes());
            at += 4;
        }
        let out = &mut b[at..at + bytes];
        gather(env, head.init.pd, &wqe.request.sges, done.into(), out)
    })
}
