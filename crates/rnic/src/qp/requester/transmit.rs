//! Request packets: which may be sent, and how they are built.

use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{AtomicEth, Bth, Feth, Operation as Op, Position, Reth};
use rdmux_wire::roce::{carried, coalesced};
use rdmux_wire::{Psn, RKey};

use super::selective::Selective;
use super::{Broken, Cursor, Requester, Wqe};
use crate::cq::Status;
use crate::local::Rings;
use crate::qp::message::{gather, gathers, perform_local};
use crate::qp::read_ahead::Origin;
use crate::qp::{Env, Head, QpState};
use crate::srq::Srqn;
use crate::time::Time;
use crate::transmit::{Path, TransmitBuf};
use crate::work::{Operation, SendFlags, Target};

/// Most packets of a message from one request for an acknowledgement to the next.
const ACK_REQ_PACKETS: u32 = 32;
/// Bytes in flight to a peer on this host whose window was not agreed: half of what a ring holds.
const LOCAL_WINDOW_BYTES: u32 = 128 << 10;
/// Bytes of the XRC extended transport header. A14.
const XRCETH_LEN: usize = 4;
/// Bytes of the longest headers of a packet of data.
pub(super) const HEADS_MAX: usize = 64;
/// Packets of a train that fills a datagram at path MTU 4096.
const TRAIN_PACKETS: u32 = 15;

impl Requester {
    /// Returns the number of PSNs that may be in flight. Memory of the host loses nothing and has room for more than the window of a
    /// network on which a loss costs the whole window again.
    fn window(&self, head: &Head) -> u32 {
        let window = self.window.min(self.congestion_window);
        if head.local && self.selective.is_none() {
            window.max((LOCAL_WINDOW_BYTES / head.mtu).min(head.reach()))
        } else {
            window
        }
    }

    /// Returns the number of PSNs that may still be sent before a response must come.
    pub(super) fn room(&self, head: &Head) -> u32 {
        let in_flight = self.cursor_psn().since(self.una).max(0) as u32;
        let window = self.window(head);
        match &self.selective {
            None => window.saturating_sub(in_flight),
            Some(selective) => selective.room(window, in_flight),
        }
    }

    /// Returns whether a hole is to be filled, before new packets are sent.
    fn has_due(&self, head: &Head) -> bool {
        self.selective.as_deref().is_some_and(Selective::has_due)
            && matches!(head.state, QpState::Rts | QpState::Sqd)
            && self.rnr_until.is_none()
            && head.rate.held_until.is_none()
    }

    /// Returns whether packets can be sent that are worth sending.
    pub(crate) fn wants_transmit(&self, head: &Head) -> bool {
        if self.has_due(head) {
            return true;
        }
        let least = self.queue.get(self.cursor.wqe).map_or(1, |wqe| {
            self.worth_sending(head, wqe.is_read(), wqe.packets - self.cursor.packet)
        });
        self.may_transmit(head, least)
    }

    /// Returns whether the next packet can be sent with `least` PSNs free in the window.
    fn may_transmit(&self, head: &Head, least: u32) -> bool {
        if !matches!(head.state, QpState::Rts | QpState::Sqd) || self.rnr_until.is_some() {
            return false;
        }
        let Some(wqe) = self.queue.get(self.cursor.wqe) else {
            return false;
        };
        if wqe.first.is_none() && head.state == QpState::Sqd && !mutant!(SqdBeginsNew) {
            return false;
        }
        let fenced = wqe.request.flags.contains(SendFlags::FENCE)
            && self.cursor.packet == 0
            && self.answers_wait_before_cursor();
        // A retransmission reads memory again: a key is invalidated when no request before can need it any longer. 10.8.3.3.
        let ends_key = matches!(wqe.request.operation, Operation::LocalInvalidate { .. });
        if fenced || ends_key && self.cursor.wqe > 0 {
            return false;
        }
        if wqe.is_local() {
            return true;
        }
        if let Some(at_once) = self.directly(head) {
            return at_once;
        }
        if self.room(head) < least.max(1) || head.rate.held_until.is_some() {
            return false;
        }
        let cursor = self.cursor_psn();
        // The request that the cursor is inside of holds a resource already and is only retransmitted in part.
        let before = self
            .resources
            .iter()
            .take_while(|(first, n)| first.plus(*n).since(cursor) <= 0)
            .count();
        // Requests that were posted before the depth became 0 are sent all the same.
        let waits = wqe.takes_resource() && before >= usize::from(self.max_rd_atomic.max(1));
        !waits || mutant!(InitiatorDepthIgnored)
    }

    /// Returns the number of PSNs that must be free before the next packets of a request with `left` packets are sent: a READ is
    /// divided into few pieces, and data leaves in trains that are worth their system call.
    fn worth_sending(&self, head: &Head, is_read: bool, left: u32) -> u32 {
        let window = self.window(head);
        left.min(if is_read {
            window.div_ceil(2)
        } else {
            (window / 4).clamp(1, TRAIN_PACKETS)
        })
    }

    fn answers_wait_before_cursor(&self) -> bool {
        self.queue.iter().take(self.cursor.wqe).any(Wqe::takes_answer)
    }

    /// Builds packets until the window is used up, or the buffer is full for this quantum.
    pub(crate) fn transmit(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
    ) -> Result<(), Broken> {
        let mut sent = false;
        buf.ahead.forget();
        while !buf.is_full() {
            if self.has_due(head) {
                self.transmit_due(env, head, buf)?;
                continue;
            }
            // A train that was worth starting continues to the edge of the window.
            let begun = sent && self.queue.get(self.cursor.wqe).is_some_and(|wqe| !wqe.is_read());
            if !(if begun {
                self.may_transmit(head, 1)
            } else {
                self.wants_transmit(head)
            }) {
                break;
            }
            let request = self.cursor.wqe;
            if self.queue[request].is_local() {
                self.do_local(env, head)
            } else if self.directly(head) == Some(true) {
                self.do_direct(env, head)
            } else {
                self.transmit_next(env, head, buf, rings)
            }
            .map_err(|status| Broken { status, request })?;
            sent = true;
        }
        Ok(())
    }

    /// Puts the packet at the cursor into the ring to the peer, or builds it.
    fn transmit_next(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
    ) -> Result<(), Status> {
        if self.goes_by_ring(head) {
            let peer = head.path.map(|path| (path.dst, head.dest_qpn));
            if !buf.is_empty() && peer.is_some_and(|peer| rings.reach(peer)) {
                buf.stop();
                return Ok(());
            }
            if self.put_one(env, head, buf, rings)? {
                return Ok(());
            }
        }
        self.transmit_one(env, head, buf, self.cursor, None)
    }

    /// Carries out the local operation at the cursor.
    fn do_local(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Status> {
        let wqe = &mut self.queue[self.cursor.wqe];
        if wqe.first.is_none() {
            perform_local(env, head, &wqe.request.operation)?;
            wqe.first = Some(self.next);
        }
        self.cursor = Cursor {
            wqe: self.cursor.wqe + 1,
            packet: 0,
        };
        self.complete_local(env, head);
        Ok(())
    }

    /// Builds the packet at `at`: the cursor's, which then advances, or one that fills a hole of `hole` PSNs.
    pub(super) fn transmit_one(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
        at: Cursor,
        hole: Option<u32>,
    ) -> Result<(), Status> {
        let room = hole.unwrap_or_else(|| self.room(head));
        let path = head.path.as_ref().ok_or(Status::LocalQpOperation)?;
        let psn = self.begin(env, head, at.wqe).plus(at.packet);
        let wqe = &self.queue[at.wqe];
        let mut packet = RequestPacket::new(head, path, wqe, at.packet, psn, room);
        let packets = self.build(env, buf, &mut packet)?;
        if packets == 0 {
            return Ok(());
        }
        let (bth, count, asks) = (packet.bth, packet.count, packet.asks);
        let is_first = hole.is_none() && self.advance(&bth, packets, asks, env.now);
        if !is_first {
            env.counters.retransmitted_packets += u64::from(count);
            probe!(retransmission, head.qpn.value(), psn.value());
        }
        env.counters.sent_pkts += u64::from(count);
        if self.deadline.is_none() {
            self.arm(env.now);
        }
        Ok(())
    }

    /// Returns the PSN of a request's first packet. The request gets its PSNs when that packet is built.
    pub(super) fn begin(&mut self, env: &mut Env<'_>, head: &Head, index: usize) -> Psn {
        if let Some(first) = self.queue[index].first {
            return first;
        }
        self.count_by_packets(env, head, index);
        let wqe = &mut self.queue[index];
        let first = self.next;
        self.next = first.plus(wqe.packets);
        wqe.first = Some(first);
        first
    }

    /// Builds a packet. Returns the number of its PSNs, 0 for an operation without packets.
    fn build(
        &self,
        env: &Env<'_>,
        buf: &mut TransmitBuf,
        packet: &mut RequestPacket<'_>,
    ) -> Result<u32, Status> {
        let (head, wqe) = (packet.head, packet.wqe);
        match wqe.request.operation {
            Operation::Read { va, rkey } => {
                let psn = packet.bth.psn;
                let asked = self.resource_covering(psn);
                let left = asked.map_or(wqe.packets - packet.index, |(first, n)| {
                    first.plus(n).since(psn) as u32
                });
                let packets = packet.room.min(left);
                packet.push_read(buf, (va, rkey), packets)?;
                return Ok(packets);
            }
            Operation::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            } => {
                packet.bth.opcode = head.opcode(Op::CompareSwap);
                let eth = AtomicEth {
                    va,
                    rkey,
                    swap_or_add: swap,
                    compare,
                };
                packet.push_atomic(buf, eth)?;
            }
            Operation::FetchAdd { va, rkey, add } => {
                packet.bth.opcode = head.opcode(Op::FetchAdd);
                let eth = AtomicEth {
                    va,
                    rkey,
                    swap_or_add: add,
                    compare: 0,
                };
                packet.push_atomic(buf, eth)?;
            }
            Operation::AtomicWrite { va, rkey } => {
                packet.bth.opcode = head.opcode(Op::AtomicWrite);
                packet.push_atomic_write(env, buf, Reth { va, rkey, length: 8 })?;
            }
            Operation::Flush {
                va,
                rkey,
                length,
                placement,
                selectivity,
            } => {
                packet.bth.opcode = head.opcode(Op::Flush);
                let feth = Feth {
                    placement,
                    selectivity,
                };
                let of_rxe = self.flush_icrc.is_of_rxe();
                packet.push_flush(buf, feth, Reth { va, rkey, length }, of_rxe)?;
            }
            Operation::Send { .. } | Operation::SendInvalidate { .. } | Operation::Write { .. } => {
                packet.coalesce(buf);
                packet.bth.ack_req = self.pauses(head, buf, packet.room, packet.count);
                packet.answered_behind = self.is_answered_behind(packet, buf);
                packet.ends_queue =
                    packet.bth.psn == self.cursor_psn() && self.cursor.wqe + 1 == self.queue.len();
                packet.push_data(env, buf)?;
                return Ok(packet.count);
            }
            // `do_local` carries these out without packets.
            Operation::Bind(_) | Operation::Register(_) | Operation::LocalInvalidate { .. } => return Ok(0),
        }
        Ok(1)
    }

    /// Returns whether the packet of data to be built next requests an acknowledgement, even if its message continues. Whatever stops
    /// the train, its last packet does, which opens the window again.
    fn pauses(&self, head: &Head, buf: &TransmitBuf, room: u32, count: u32) -> bool {
        let fills_turn = head.rate.is_limited() && buf.is_filled_by(count * head.mtu);
        let ack_every = (self.window(head) / 2).clamp(1, ACK_REQ_PACKETS);
        room <= count || fills_turn || self.since_ack_req + count >= ack_every
    }

    /// Returns whether the response to the request behind a WRITE answers the WRITE too, which then requests no acknowledgement. That
    /// request is sent at once: it has room, and neither a fence, the initiator depth, a rate nor a grant holds it back until the
    /// WRITE is answered. A WRITE that is sent again requests an acknowledgement, because what follows it may have been answered
    /// meanwhile. So does every WRITE to a peer that is not rdmux.
    fn is_answered_behind(&self, packet: &RequestPacket<'_>, buf: &TransmitBuf) -> bool {
        let head = packet.head;
        let Some(next) = self.queue.get(self.cursor.wqe + 1).filter(|_| head.peer_is_rdmux) else {
            return false;
        };
        let is_new = packet.bth.psn.since(self.high) >= 0 && head.state == QpState::Rts;
        let is_write = matches!(packet.wqe.request.operation, Operation::Write { .. });
        let answers = next.is_flush() || next.is_read() && !head.local;
        if !is_new || !is_write || !answers || next.request.flags.contains(SendFlags::FENCE) {
            return false;
        }
        let room = packet.room.saturating_sub(packet.count);
        room >= self.worth_sending(head, next.is_read(), next.packets).max(1)
            && self.resources.len() < usize::from(self.max_rd_atomic)
            && !head.rate.is_limited()
            // Both leave in this quantum.
            && buf.room() > (packet.count * head.mtu) as usize + HEADS_MAX
    }

    /// Advances the cursor past the packet that was built there, of `packets` PSNs. `asks`: whether a response to it comes at once.
    /// Returns whether it was sent for the first time, at least in part.
    pub(super) fn advance(&mut self, bth: &Bth, packets: u32, asks: bool, now: Time) -> bool {
        let at = self.cursor;
        let wqe = &self.queue[at.wqe];
        let whole = at.packet + packets == wqe.packets;
        if wqe.takes_resource() {
            self.keep_resource(bth.psn, packets);
        }
        self.cursor = if whole {
            Cursor {
                wqe: at.wqe + 1,
                packet: 0,
            }
        } else {
            Cursor {
                packet: at.packet + packets,
                ..at
            }
        };
        self.since_ack_req = if bth.ack_req {
            0
        } else {
            self.since_ack_req + packets
        };
        if let Some(selective) = &mut self.selective {
            selective.sent(bth.psn, asks, now);
            if bth.opcode.operation == Op::Flush {
                selective.sent_flush(bth.psn);
            }
        }
        let end = bth.psn.plus(packets);
        let is_first = end.since(self.high) > 0;
        if is_first {
            self.high = end;
        }
        is_first
    }

    /// Records a request that takes a resource: as a new entry, or by dividing the entry that it lies in.
    fn keep_resource(&mut self, psn: Psn, packets: u32) {
        let covers = |&(first, n): &(Psn, u32)| psn.since(first) >= 0 && psn.since(first.plus(n)) < 0;
        let Some(at) = self.resources.iter().position(covers) else {
            self.resources.push_back((psn, packets));
            return;
        };
        let (first, n) = self.resources[at];
        let (before, end) = (psn.since(first) as u32, psn.plus(packets));
        let after = first.plus(n).since(end) as u32;
        let parts = [(first, before), (psn, packets), (end, after)];
        self.resources.remove(at);
        // Ranges before `una` are answered and count no longer.
        let open = |(first, n): &(Psn, u32)| *n > 0 && first.plus(*n).since(self.una) > 0;
        for part in parts.into_iter().rev().filter(open) {
            self.resources.insert(at, part);
        }
    }
}

/// A request packet to be built.
pub(super) struct RequestPacket<'a> {
    pub(super) head: &'a Head,
    pub(super) path: &'a Path,
    pub(super) wqe: &'a Wqe,
    /// Index of the packet in its request.
    index: u32,
    pub(super) bth: Bth,
    /// The shared receive queue that the extended header of XRC names.
    srqn: Option<Srqn>,
    /// Number of PSNs that may be sent, the packet's included.
    room: u32,
    /// Number of packets that this one stands for. More than 1 only for data that goes through memory of this host.
    pub(super) count: u32,
    /// Set when the response to the request behind this one answers its message too.
    answered_behind: bool,
    /// Set when a response to this packet comes at once.
    asks: bool,
    /// Set when no request waits behind that of the packet.
    ends_queue: bool,
}

/// A packet of data without its payload.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataPacket {
    /// Bytes of its headers.
    pub(super) heads: usize,
    /// Bytes of its payload.
    pub(super) bytes: usize,
    /// Bytes of the message before it.
    pub(super) done: u64,
}

impl<'a> RequestPacket<'a> {
    /// Returns a packet of a READ; another operation sets its own opcode.
    pub(super) fn new(
        head: &'a Head,
        path: &'a Path,
        wqe: &'a Wqe,
        index: u32,
        psn: Psn,
        room: u32,
    ) -> RequestPacket<'a> {
        let mut bth = Bth::new(head.opcode(Op::ReadRequest), head.dest_qpn, psn);
        bth.ack_req = true;
        let srqn = match wqe.request.to {
            Target::Srq(srqn) => Some(srqn),
            Target::Connected | Target::Datagram { .. } => None,
        };
        RequestPacket {
            head,
            path,
            wqe,
            index,
            bth,
            srqn,
            room,
            count: 1,
            answered_behind: false,
            asks: true,
            ends_queue: false,
        }
    }

    /// Makes this packet of data stand for those behind it as well, as far as the window allows. It may exceed the sender's quantum, as
    /// every last packet of one may, but not a limit of the rate.
    fn coalesce(&mut self, buf: &TransmitBuf) {
        if self.head.local {
            let quantum = self.head.rate.is_limited().then(|| buf.room());
            let most = coalesced::PAYLOAD_BYTES_MAX;
            self.coalesce_by(quantum.map_or(most, |room| room.min(most)));
        }
    }

    /// Makes this packet of data stand for those behind it as well, as far as the window and `bytes` allow.
    pub(super) fn coalesce_by(&mut self, bytes: usize) {
        let left = self.wqe.packets - self.index;
        if left == 1 {
            return;
        }
        let most = (bytes as u32 / self.head.mtu).clamp(1, coalesced::COUNT_MAX);
        self.count = left.min(self.room).min(most).max(1);
    }

    /// Returns the length of the headers that every request begins with. On XRC its extended header comes before all others. A14.
    fn heads_len(&self) -> usize {
        Bth::LEN + self.srqn.map_or(0, |_| XRCETH_LEN)
    }

    /// Writes the headers that every request begins with; returns their length.
    fn emit_heads(&self, b: &mut [u8]) -> usize {
        self.bth.emit(b);
        if self.count > 1 {
            coalesced::set_count(b, self.count);
        }
        if let Some(Srqn(number)) = self.srqn {
            b[Bth::LEN..Bth::LEN + XRCETH_LEN].copy_from_slice(&number.to_be_bytes());
        }
        self.heads_len()
    }

    /// Adds the packet to the buffer: the headers that every request begins with, and `len` bytes that `fill` writes behind them.
    fn push(
        &self,
        buf: &mut TransmitBuf,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Status>,
    ) -> Result<(), Status> {
        buf.push(self.path, self.heads_len() + len, |b| {
            let at = self.emit_heads(b);
            fill(&mut b[at..])
        })
    }

    /// Adds a READ of `packets` PSNs. `(va, rkey)`: where the bytes of the whole request begin.
    fn push_read(&self, buf: &mut TransmitBuf, (va, rkey): (u64, RKey), packets: u32) -> Result<(), Status> {
        let done = self.index * self.head.mtu;
        let reth = Reth {
            va: va.wrapping_add(u64::from(done)),
            rkey,
            length: (packets * self.head.mtu).min(self.wqe.bytes - done),
        };
        self.push(buf, Reth::LEN, |b| {
            reth.emit(b);
            Ok(())
        })
    }

    fn push_atomic(&self, buf: &mut TransmitBuf, eth: AtomicEth) -> Result<(), Status> {
        self.push(buf, AtomicEth::LEN, |b| {
            eth.emit(b);
            Ok(())
        })
    }

    fn push_atomic_write(&self, env: &Env<'_>, buf: &mut TransmitBuf, reth: Reth) -> Result<(), Status> {
        self.push(buf, Reth::LEN + 8, |b| {
            reth.emit(b);
            let (pd, sges) = (self.head.init.pd, &self.wqe.request.sges);
            gather(env, pd, sges, 0, &mut b[Reth::LEN..])
        })
    }

    fn push_flush(&self, buf: &mut TransmitBuf, feth: Feth, reth: Reth, of_rxe: bool) -> Result<(), Status> {
        let icrc = if of_rxe { Flow::rxe_flush_icrc } else { Flow::icrc };
        let len = self.heads_len() + Feth::LEN + Reth::LEN;
        buf.push_with_icrc(self.path, len, icrc, |b| {
            let at = self.emit_heads(b);
            feth.emit(&mut b[at..]);
            reth.emit(&mut b[at + Feth::LEN..]);
            Ok(())
        })
    }

    /// Writes the headers of a packet of a SEND or WRITE to `out`, which is zero and long enough. The last packet requests an acknowledgement
    /// in any case.
    pub(super) fn emit_data(&mut self, out: &mut [u8]) -> Result<DataPacket, Status> {
        let (head, wqe, index) = (self.head, self.wqe, self.index);
        let last = index + self.count == wqe.packets;
        let position = Position::of(index == 0, last);
        let (write, imm, invalidate) = match wqe.request.operation {
            Operation::Write { va, rkey, imm } => (Some((va, rkey)), imm, None),
            Operation::SendInvalidate { rkey } => (None, None, Some(rkey)),
            Operation::Send { imm } => (None, imm, None),
            _ => return Err(Status::LocalQpOperation),
        };
        let operation = Op::of_data(write.is_some(), position, imm.is_some(), invalidate.is_some());
        let done = index * head.mtu;
        let bytes = (wqe.bytes - done).min(self.count * head.mtu) as usize;
        let bth = &mut self.bth;
        bth.opcode = head.opcode(operation);
        bth.pad = ((4 - bytes % 4) % 4) as u8;
        bth.ack_req |= last && !self.answered_behind;
        self.asks = bth.ack_req || last;
        bth.solicited =
            last && (write.is_none() || imm.is_some()) && wqe.request.flags.contains(SendFlags::SOLICITED);
        let mut at = self.emit_heads(out);
        if let Some((va, rkey)) = write
            && position.begins()
        {
            let length = wqe.bytes;
            Reth { va, rkey, length }.emit(&mut out[at..]);
            at += Reth::LEN;
        }
        if let Some(word) = imm.or(invalidate.map(|rkey| rkey.0))
            && last
        {
            out[at..at + 4].copy_from_slice(&word.to_be_bytes());
            at += 4;
        }
        Ok(DataPacket {
            heads: at,
            bytes,
            done: done.into(),
        })
    }

    /// Adds a packet of a SEND or WRITE.
    fn push_data(&mut self, env: &Env<'_>, buf: &mut TransmitBuf) -> Result<(), Status> {
        let (head, wqe, index) = (self.head, self.wqe, self.index);
        let mut heads = [0; HEADS_MAX];
        let DataPacket {
            heads: at,
            bytes,
            done,
        } = self.emit_data(&mut heads)?;
        let bth = &self.bth;
        let len = at + bytes + usize::from(bth.pad);
        // Only the last packet of all carries one: it would be longer than those behind it, and end their train.
        let last = index + self.count == wqe.packets;
        let fits = last && self.ends_queue && self.path.carries(len + carried::LEN, head.mtu);
        let carried = buf
            .carried
            .filter(|_| fits && buf.may_grow(self.path, len, carried::LEN));
        let len = len + carried.map_or(0, |_| carried::LEN);
        let source = Origin::Request(bth.psn.minus(index));
        let soon = (self.room.saturating_mul(head.mtu).min(wqe.bytes - done as u32) as usize).min(buf.room());
        let mut ahead = std::mem::take(&mut buf.ahead);
        let built = buf.push(self.path, len, |b| {
            b[..at].copy_from_slice(&heads[..at]);
            if let Some(psn) = carried {
                b[at + bytes..].fill(0);
                carried::emit(b, psn.plus(mutant!(CarriedPast).into()));
            }
            let (pd, sges, out) = (head.init.pd, &wqe.request.sges, &mut b[at..at + bytes]);
            if self.count > 1 {
                return gather(env, pd, sges, done, out);
            }
            let (asks, read) = (
                || gathers(env, pd, sges),
                |several: &mut [u8]| gather(env, pd, sges, done, several),
            );
            match ahead.bytes(source, done, bytes, soon, asks, read)? {
                Some(bytes) => out.copy_from_slice(bytes),
                None => gather(env, pd, sges, done, out)?,
            }
            Ok(())
        });
        buf.ahead = ahead;
        if built.is_ok() && carried.is_some() {
            buf.carried = None;
        }
        built
    }
}
