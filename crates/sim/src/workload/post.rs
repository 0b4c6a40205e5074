//! Choice and posting of operations.

use rdmux_rnic::{
    Access, INLINE_BYTES_MAX, LKey, Operation, Placement, QpState, RKey, RecvRequest, Selectivity, SendFlags,
    SendRequest, SgeList, Target, WcOpcode,
};

use super::keys;
use super::words::WordOp;
use super::{Checked, GUARD, Op, OpKind, Piece, Recv, USER_POST, USER_RECV, Workload, tag};
use crate::memory::Promise;

/// Longest READ whose bytes are sent on.
const FORWARDED_MAX: u64 = 8 << 10;

/// Returns the bits of a receive's number that say where it was posted; the low bits hold its own number.
pub(super) fn recv_tag(shared: Option<usize>) -> u64 {
    1 << 63 | shared.map_or(0, |n| n as u64 + 1) << 48
}

/// Returns the shared receive queue and the number of a receive.
pub(super) fn untag(wr_id: u64) -> (Option<usize>, u64) {
    let shared = (wr_id >> 48 & 0x7fff) as usize;
    (shared.checked_sub(1), wr_id & 0xffff_ffff_ffff)
}

/// Pieces of an operation, while it is assembled.
#[derive(Debug, Default)]
struct Taken {
    local: Vec<Piece>,
    remote: Option<Piece>,
    /// Address of `remote`, and the key that grants it.
    va: u64,
    rkey: Option<RKey>,
    key: Option<usize>,
    recv: Vec<Piece>,
}

impl Workload {
    fn size(&mut self) -> u64 {
        let usual = self.bytes_max.min(16 << 10);
        if self.bytes_max > usual && self.dice.one_in(40) {
            return match self.dice.below(8) {
                0 => self.bytes_max,
                _ => self.dice.log_uniform(self.bytes_max),
            };
        }
        match self.dice.below(10) {
            0 => 0,
            1 => {
                let packets = self.dice.between(1, 5);
                (packets * self.mtu + self.dice.below(3) - 1).min(self.bytes_max)
            }
            _ => self.dice.log_uniform(usual),
        }
    }

    /// Returns whether a QP that an outage may have ended still works.
    fn goes_on(&self, qp: usize, host: usize) -> bool {
        let qpn = self.sides[host].ends[qp].send_qpn;
        let info = self.world.hosts[host].rnic.query_qp(qpn);
        self.ending == crate::Ending::LinkDown
            && self.flows[qp][host].failed.is_none()
            && info.is_some_and(|info| matches!(info.state, QpState::Rts | QpState::Sqd))
    }

    pub(super) fn post_some(&mut self, qp: usize, host: usize) -> Checked {
        loop {
            let flow = &self.flows[qp][host];
            if flow.todo == 0 || flow.paused || flow.rests || flow.outstanding.len() >= flow.depth {
                return Ok(());
            }
            if self.is_affected(qp) && !self.goes_on(qp, host) {
                return Ok(());
            }
            if self.dice.one_in(12) {
                self.flows[qp][host].paused = true;
                let delay = self.dice.log_uniform(2_000_000);
                self.world.call_back(delay, tag(USER_POST, qp, host));
                return Ok(());
            }
            if !self.post_one(qp, host)? {
                return Ok(());
            }
        }
    }

    /// Takes `len` bytes in 1 to 5 pieces, seldom in 32.
    pub(super) fn take_pieces(&mut self, host: usize, len: u64) -> Option<Vec<Piece>> {
        let parts = match self.dice.below(30) {
            0 => 32,
            1..10 => self.dice.between(1, 5),
            _ => 1,
        };
        let mut pieces = Vec::new();
        let mut left = len;
        for part in 0..parts {
            let n = if part + 1 == parts {
                left
            } else {
                self.dice.below(2 * left / (parts - part) + 1)
            };
            left -= n;
            // The odd byte moves the next piece to another alignment.
            let slack = self.dice.below(4);
            let Some(at) = self.sides[host].space.take(n + slack) else {
                self.sides[host].give(&pieces);
                return None;
            };
            self.sides[host].space.give(at + n, slack);
            pieces.push(Piece { at, len: n });
        }
        Some(pieces)
    }

    fn draw_kind(&mut self, qp: usize, host: usize) -> OpKind {
        let flow = &self.flows[qp][host];
        if flow.to_publish.is_some() {
            return OpKind::AtomicWrite;
        }
        if flow.to_forward.is_some() {
            return OpKind::Write;
        }
        if flow.held.len() >= 4 {
            return OpKind::Flush;
        }
        match self.dice.below(100) {
            0..23 => OpKind::Send,
            23..55 => OpKind::Write,
            55..76 => OpKind::Read,
            76..86 => OpKind::Flush,
            86..91 => OpKind::FetchAdd,
            91..97 => OpKind::CompareSwap,
            _ => OpKind::AtomicWrite,
        }
    }

    /// Posts one operation. Returns false when there is no room now.
    fn post_one(&mut self, qp: usize, host: usize) -> Result<bool, String> {
        let may_tend = self.flows[qp][host].to_publish.is_none();
        let seldom = if self.ending == crate::Ending::EndedKey {
            3
        } else {
            8
        };
        if may_tend && self.dice.one_in(seldom) && self.tend_keys(qp, host)? {
            return Ok(true);
        }
        let peer = 1 - host;
        let kind = self.draw_kind(qp, host);
        let shared = self.shared_of(qp, peer);
        let mut bytes = match kind {
            OpKind::Flush => 0,
            OpKind::FetchAdd | OpKind::CompareSwap | OpKind::AtomicWrite => 8,
            _ => self.size(),
        };
        if let (OpKind::Send, Some(n)) = (kind, shared) {
            bytes = bytes.min(self.sides[peer].objects.shared[n].len);
        }
        let forwarded = self.flows[qp][host].to_forward.as_ref();
        let forwards = forwarded.map(|(_, data)| data.len() as u64);
        bytes = forwards.unwrap_or(bytes);
        let may_be_inline =
            matches!(kind, OpKind::Send | OpKind::Write | OpKind::AtomicWrite) && forwards.is_none();
        let inline = may_be_inline && bytes <= INLINE_BYTES_MAX as u64 && self.dice.one_in(4);
        let imm = match kind {
            OpKind::Send => self.dice.one_in(2),
            OpKind::Write => self.dice.one_in(4),
            _ => false,
        };
        let imm = imm.then(|| self.dice.next() as u32);
        let receives = kind == OpKind::Send || imm.is_some();
        let invalidates = (kind == OpKind::Send && imm.is_none())
            .then(|| self.key_to_invalidate(qp, peer))
            .flatten();

        let local = if inline || forwards.is_some() { 0 } else { bytes };
        let Some(mut taken) = self.take(qp, host, kind, local, bytes, receives && shared.is_none()) else {
            return Ok(false);
        };
        if let Some(n) = invalidates {
            self.sides[peer].ends[qp].keys[n].state = keys::KeyState::Closing;
        }

        // Draws the content, and computes the effect of the operation.
        self.scratch.resize(bytes as usize, 0);
        let mut data = std::mem::take(&mut self.scratch);
        self.dice.fill(&mut data);
        if let Some((pieces, read)) = self.flows[qp][host].to_forward.take() {
            data.copy_from_slice(&read);
            taken.local = pieces;
        }
        match kind {
            OpKind::Send => {
                self.sides[host].write_both(&taken.local, &data);
                self.sides[peer].write_model(&taken.recv, &data);
            }
            OpKind::Write => {
                if forwards.is_none() {
                    self.sides[host].write_both(&taken.local, &data);
                }
                self.sides[peer].write_model(taken.remote.as_slice(), &data);
            }
            OpKind::Read => {
                self.sides[peer].write_both(taken.remote.as_slice(), &data);
                self.sides[host].write_model(&taken.local, &data);
            }
            OpKind::AtomicWrite => {
                data.copy_from_slice(&self.sides[peer].words.fresh().to_ne_bytes());
                self.sides[host].write_both(&taken.local, &data);
                self.sides[peer].write_model(taken.remote.as_slice(), &data);
            }
            _ => {}
        }
        let (mut covers, mut publishes, mut word) = (Vec::new(), false, None);
        let last = self.flows[qp][host].todo == 1;
        let (va, rkey) = (taken.va, taken.rkey.unwrap_or(RKey(0)));
        let operation = match (kind, invalidates) {
            (OpKind::Send, Some(n)) => Operation::SendInvalidate {
                rkey: self.sides[peer].ends[qp].keys[n].rkey,
            },
            (OpKind::Send, None) => Operation::Send { imm },
            (OpKind::Write, _) => Operation::Write { va, rkey, imm },
            (OpKind::Read, _) => Operation::Read { va, rkey },
            (OpKind::FetchAdd | OpKind::CompareSwap, _) => {
                let (op, operation) = self.word_operation(kind, peer);
                word = Some(op);
                operation
            }
            (OpKind::AtomicWrite, _) => {
                covers = self.flows[qp][host].to_publish.take().unwrap_or_default();
                if let Some(value) = data.first_chunk()
                    && !covers.is_empty()
                {
                    let range = |p: &Piece| p.at as usize..(p.at + p.len) as usize;
                    let ranges = covers.iter().map(range).collect();
                    let (at, value) = (taken.remote.map_or(0, |p| p.at), *value);
                    let promise = Promise { at, value, ranges };
                    self.sides[peer].memory.lock().promises.push(promise);
                }
                Operation::AtomicWrite { va, rkey }
            }
            _ => {
                covers = std::mem::take(&mut self.flows[qp][host].held);
                publishes = !covers.is_empty() && !last && self.dice.one_in(2);
                if publishes {
                    self.flows[qp][host].to_publish = Some(covers.clone());
                }
                self.flush_of(peer, qp, &covers)
            }
        };
        let lends = kind == OpKind::Read
            && (1..=FORWARDED_MAX).contains(&bytes)
            && self.flows[qp][host].todo > 2
            && self.dice.one_in(8);
        if lends {
            self.flows[qp][host].to_forward = Some((taken.local.clone(), data.clone()));
        }
        let held = kind == OpKind::Write
            && !last
            && taken.key.is_none()
            && bytes < self.bytes_max / 8
            && self.dice.one_in(2);
        if held && let Some(piece) = taken.remote {
            self.flows[qp][host].held.push(piece);
        }
        let mut flags = SendFlags::empty();
        // A READ before it must not be retransmitted after the key has ended.
        flags.set(
            SendFlags::FENCE,
            invalidates.is_some()
                || forwards.is_some()
                || self.dice.one_in(8)
                || word.is_some() && self.dice.one_in(2),
        );
        flags.set(SendFlags::SOLICITED, self.dice.one_in(4));
        let solicited = flags.contains(SendFlags::SOLICITED);
        if receives {
            let flow = &mut self.flows[qp][host];
            let wr_id = flow.next_recv_id;
            flow.next_recv_id += 1;
            let content = kind == OpKind::Send && shared.is_some();
            flow.recvs.push_back(Recv {
                wr_id,
                pieces: taken.recv,
                shared,
                data: if content { data.clone() } else { Vec::new() },
                byte_len: bytes as u32,
                imm,
                opcode: if kind == OpKind::Write {
                    WcOpcode::RecvRdmaWithImm
                } else {
                    WcOpcode::Recv
                },
                solicited,
                invalidates,
            });
            if shared.is_some() {
            } else if self.dice.percent(self.rnr_percent) {
                let delay = self.dice.log_uniform(10_000_000);
                self.world.call_back(delay, tag(USER_RECV, qp, host));
            } else {
                self.post_recv(qp, host)?;
            }
        }
        let sges = if inline {
            SgeList::inline(&data)
        } else {
            let reg = &self.sides[host].ends[qp].reg;
            SgeList::from(&reg.sges(&taken.local)[..])
        };
        self.scratch = data;
        let op = Op {
            wr_id: 0,
            kind,
            bytes,
            local: taken.local,
            remote: taken.remote,
            signaled: false,
            held,
            covers,
            lends,
            publishes,
            key: taken.key,
            word,
        };
        self.submit(qp, host, op, operation, sges, flags, shared)?;
        Ok(true)
    }

    /// Numbers an operation and posts it to the engine.
    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    pub(super) fn submit(
        &mut self,
        qp: usize,
        host: usize,
        mut op: Op,
        operation: Operation,
        sges: SgeList,
        mut flags: SendFlags,
        shared: Option<usize>,
    ) -> Checked {
        let flow = &mut self.flows[qp][host];
        // The last operation that fits must be signaled, on behalf of the silent ones before it.
        let last = flow.todo <= 1 || flow.outstanding.len() + 1 >= flow.depth;
        op.signaled = last || op.kind == OpKind::Probe || !self.dice.one_in(6);
        flags.set(SendFlags::SIGNALED, op.signaled);
        op.wr_id = flow.next_wr_id;
        let wr_id = op.wr_id;
        flow.next_wr_id += 1;
        flow.todo = flow.todo.saturating_sub(1);
        self.report.posted += u64::from(op.kind != OpKind::Probe);
        let (end, peer) = (&self.sides[host].ends[qp], &self.sides[1 - host]);
        let to = match shared.filter(|_| end.xrc) {
            Some(n) if !operation.is_local() => Target::Srq(peer.objects.shared[n].srqn),
            _ => Target::Connected,
        };
        let qpn = end.send_qpn;
        let key = op.key.filter(|_| operation.is_local());
        flow.outstanding.push_back(op);
        let done = if let (Operation::Bind(bind), Some(keys::KeyKind::WindowOne)) =
            (&operation, key.map(|n| end.keys[n].kind))
        {
            let bind = *bind;
            let bound = (self.world).with(host, |rnic, now| rnic.bind_mw(now, qpn, wr_id, bind, flags));
            bound.map(|rkey| {
                if let Some(n) = key {
                    self.sides[host].ends[qp].keys[n].rkey = rkey;
                }
            })
        } else {
            let request = SendRequest {
                wr_id,
                operation,
                sges,
                flags,
                to,
            };
            self.world.post_send(host, qpn, request)
        };
        done.map_err(|error| format!("QP {qp} host {host}: post_send #{wr_id}: {error}"))
    }

    /// Returns the shared receive queue that the next message to this end uses.
    pub(super) fn shared_of(&mut self, qp: usize, host: usize) -> Option<usize> {
        let end = &self.sides[host].ends[qp];
        if end.xrc {
            Some(self.dice.between(1, super::SHARED - 1) as usize)
        } else {
            end.srq
        }
    }

    fn take(
        &mut self,
        qp: usize,
        host: usize,
        kind: OpKind,
        local: u64,
        bytes: u64,
        receives: bool,
    ) -> Option<Taken> {
        let mut taken = Taken {
            va: self.dice.next(),
            ..Taken::default()
        };
        taken.local = self.take_pieces(host, local)?;
        let peer = 1 - host;
        if matches!(kind, OpKind::Write | OpKind::Read) {
            let right = if kind == OpKind::Write {
                Access::REMOTE_WRITE
            } else {
                Access::REMOTE_READ
            };
            if !self.take_by_key(qp, peer, bytes, right, &mut taken) {
                let Some(at) = self.sides[peer].space.take(bytes) else {
                    self.sides[host].give(&taken.local);
                    return None;
                };
                let reg = &self.sides[peer].ends[qp].reg;
                (taken.va, taken.rkey) = (reg.va(at), Some(reg.rkey));
                taken.remote = Some(Piece { at, len: bytes });
            }
        } else if kind == OpKind::AtomicWrite {
            let side = &self.sides[peer];
            let word = side.words.published(2 * qp + host);
            let common = &side.objects.common;
            (taken.va, taken.rkey) = (common.va(word.at), Some(common.rkey));
            taken.remote = Some(word);
        }
        if receives {
            let spare = self.dice.below(3) * self.dice.below(100);
            let need = if kind == OpKind::Send {
                bytes + spare
            } else {
                spare
            };
            let Some(pieces) = self.take_pieces(peer, need) else {
                self.sides[host].give(&taken.local);
                match (taken.remote, taken.key) {
                    (Some(piece), Some(n)) => self.sides[peer].ends[qp].keys[n].not_used(piece),
                    (Some(piece), None) => self.sides[peer].give(&[piece]),
                    _ => {}
                }
                return None;
            };
            taken.recv = pieces;
        }
        Some(taken)
    }

    fn take_by_key(&mut self, qp: usize, peer: usize, bytes: u64, right: Access, taken: &mut Taken) -> bool {
        if !self.dice.one_in(2) {
            return false;
        }
        let keys = &mut self.sides[peer].ends[qp].keys;
        for (n, key) in keys.iter_mut().enumerate() {
            if let Some((piece, va)) = key.use_it(bytes, right) {
                (taken.remote, taken.va) = (Some(piece), va);
                (taken.rkey, taken.key) = (Some(key.rkey), Some(n));
                return true;
            }
        }
        false
    }

    fn word_operation(&mut self, kind: OpKind, peer: usize) -> (WordOp, Operation) {
        let side = &mut self.sides[peer];
        let add = kind == OpKind::FetchAdd;
        let op = if add {
            side.words.add(&mut self.dice)
        } else {
            side.words.compare_swap(&mut self.dice)
        };
        let common = &side.objects.common;
        let (va, rkey) = (common.va(side.words.at(&op)), common.rkey);
        let operation = if add {
            Operation::FetchAdd {
                va,
                rkey,
                add: op.add,
            }
        } else {
            Operation::CompareSwap {
                va,
                rkey,
                compare: op.compare,
                swap: op.swap,
            }
        };
        (op, operation)
    }

    fn flush_of(&mut self, peer: usize, qp: usize, covers: &[Piece]) -> Operation {
        let reg = &self.sides[peer].ends[qp].reg;
        let first = covers.iter().map(|p| p.at).min().unwrap_or(GUARD);
        let last = covers.iter().map(|p| p.at + p.len).max().unwrap_or(GUARD + 64);
        let (va, rkey) = (reg.va(first), reg.rkey);
        let whole = self.dice.one_in(4);
        let placement = if !covers.is_empty() || self.dice.one_in(2) {
            let both = self.dice.one_in(3);
            Placement::PERSISTENT
                | if both {
                    Placement::GLOBAL
                } else {
                    Placement::empty()
                }
        } else {
            Placement::GLOBAL
        };
        Operation::Flush {
            va: if whole { self.dice.next() } else { va },
            rkey,
            length: (last - first) as u32,
            placement,
            selectivity: if whole {
                Selectivity::MemoryRegion
            } else {
                Selectivity::Range
            },
        }
    }

    /// Posts the next receive that the messages of `host` need at the other end.
    pub(super) fn post_recv(&mut self, qp: usize, host: usize) -> Checked {
        let peer = 1 - host;
        let flow = &mut self.flows[qp][host];
        let Some(recv) = flow.recvs.get(flow.recvs_posted) else {
            return Ok(());
        };
        if self.sides[peer].ends[qp].gone {
            return Ok(());
        }
        flow.recvs_posted += 1;
        let end = &self.sides[peer].ends[qp];
        let request = RecvRequest {
            wr_id: recv.wr_id | recv_tag(None),
            sges: SgeList::from(&end.reg.sges(&recv.pieces)[..]),
        };
        let qpn = end.recv_qpn;
        self.world
            .with(peer, |rnic, now| rnic.post_recv(now, qpn, request))
            .map_err(|error| format!("QP {qp} host {peer}: post_recv: {error}"))
    }

    // Keys.

    /// Opens, moves or ends a key of this end. Returns true when that took a work request.
    fn tend_keys(&mut self, qp: usize, host: usize) -> Result<bool, String> {
        let side = &mut self.sides[host];
        let keys = side.ends[qp].keys.len() as u64;
        if keys == 0 {
            return Ok(false);
        }
        let n = self.dice.below(keys) as usize;
        let end = &mut side.ends[qp];
        let (key, reg) = (&mut end.keys[n], &end.reg);
        let idle = key.state == keys::KeyState::Idle;
        let by_peer =
            matches!(key.kind, keys::KeyKind::WindowTwo | keys::KeyKind::Fast) && self.dice.one_in(2);
        if !idle && (!key.may_close() || by_peer) {
            return Ok(false);
        }
        let moves = key.kind == keys::KeyKind::WindowOne && self.dice.one_in(2);
        let (kind, operation) = if key.kind == keys::KeyKind::Region {
            let (mut freed, mut door) = (None, None);
            if !idle {
                (freed, door) = key.close();
                self.world.take_back_region(host, LKey(key.rkey.0));
            }
            let (rnic, pd) = (&mut self.world.hosts[host].rnic, side.objects.pd);
            let done = key.register(rnic, pd, &side.memory, &mut side.space, &mut self.dice);
            side.shut.extend(door);
            side.give(freed.as_slice());
            return done.map(|()| false);
        } else if idle || moves {
            let opened = key.open(reg, &side.memory, &mut side.space, &mut self.dice);
            let Some(operation) = opened else { return Ok(false) };
            let kind = if matches!(operation, Operation::Bind(_)) {
                OpKind::Bind
            } else {
                OpKind::Register
            };
            (kind, operation)
        } else {
            key.state = keys::KeyState::Closing;
            match key.unbind(reg) {
                Some(operation) => (OpKind::Bind, operation),
                None => (
                    OpKind::LocalInvalidate,
                    Operation::LocalInvalidate { rkey: key.rkey },
                ),
            }
        };
        let op = Op {
            key: Some(n),
            ..Op::bare(kind)
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::FENCE, self.dice.one_in(4));
        self.submit(qp, host, op, operation, SgeList::EMPTY, flags, None)?;
        Ok(true)
    }

    /// Returns a key of the peer that a SEND may invalidate now.
    fn key_to_invalidate(&self, qp: usize, peer: usize) -> Option<usize> {
        let keys = &self.sides[peer].ends[qp].keys;
        let ends = |key: &keys::Key| {
            matches!(key.kind, keys::KeyKind::WindowTwo | keys::KeyKind::Fast) && key.wants_close()
        };
        keys.iter().position(ends)
    }
}

impl Op {
    /// Creates an operation that moves no bytes.
    pub(super) fn bare(kind: OpKind) -> Op {
        Op {
            wr_id: 0,
            kind,
            bytes: 0,
            local: Vec::new(),
            remote: None,
            signaled: true,
            held: false,
            covers: Vec::new(),
            lends: false,
            publishes: false,
            key: None,
            word: None,
        }
    }
}
