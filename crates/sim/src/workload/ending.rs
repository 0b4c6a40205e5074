//! Early endings, and the statuses that operations may end with then.

use std::sync::atomic::Ordering;

use rdmux_rnic::{
    Access, Bind, LKey, Operation, QpAttributes, QpState, RKey, SendFlags, Sge, SgeList, Status,
};

use super::side::{NARROW, Objects};
use super::{Checked, Op, OpKind, Piece, Recv, USER_RECONNECT, Workload, tag};
use crate::{Ending, seen};

impl Workload {
    /// Returns whether the ending is due. Memory fails under a FLUSH, if there is one soon.
    pub(super) fn is_time(&self) -> bool {
        let done = self.report.completed();
        let (host, qp) = self.ending_at;
        let mut open = self.flows[qp][1 - host].outstanding.iter();
        let waits = self.ending == Ending::MemoryFails
            && done < self.report.settings.operations * 3 / 4
            && !open.any(|op| !op.covers.is_empty() && op.kind == OpKind::Flush);
        done >= self.ending_after && !waits
    }

    pub(super) fn end_something(&mut self) -> Checked {
        self.ended = true;
        let (host, qp) = self.ending_at;
        self.world.seen.happened(format!("{:?}", self.ending));
        match self.ending {
            Ending::None => {}
            Ending::PeerVanishes => self.world.vanish(host),
            Ending::UserError => {
                let end = &self.sides[host].ends[qp];
                for qpn in [end.send_qpn, end.recv_qpn] {
                    self.modify(host, qpn, QpState::Error, &QpAttributes::default())?;
                }
            }
            Ending::Deregister => {
                let reg = self.sides[host].ends[qp].reg.clone();
                let ended = self.world.with(host, |rnic, _| {
                    rnic.unbind_mws(reg.lkey);
                    rnic.dereg_mr(reg.lkey)
                });
                self.world.take_back_region(host, reg.lkey);
                ended.map_err(|error| format!("deregistering: {error}"))?;
                reg.door.shut.store(true, Ordering::Relaxed);
            }
            Ending::MemoryFails => {
                let door = &self.sides[host].ends[qp].reg.door;
                // A medium may fail while cached bytes are still served.
                door.flush_fails.store(true, Ordering::Relaxed);
                door.fails.store(self.dice.one_in(3), Ordering::Relaxed);
            }
            Ending::DestroyQp => {
                self.poll_lazy_quietly(host)?;
                let end = &mut self.sides[host].ends[qp];
                let qpns = [end.send_qpn, end.recv_qpn];
                end.gone = true;
                self.world
                    .with(host, |rnic, _| qpns.map(|qpn| rnic.destroy_qp(qpn)));
            }
            Ending::Restart => self.restart(host)?,
            Ending::LinkDown => self.break_for_long(),
            Ending::FalseAnswer => {
                let asks = self.sides[host].ends[qp].send_qpn;
                self.world.forge(1 - host, asks);
            }
            Ending::Overrun => self.overrun(qp, host)?,
            _ => self.probe(qp, host)?,
        }
        self.take_events()?;
        self.take_completions()
    }

    /// Posts more requests than the completion queue takes, and no longer polls it.
    fn overrun(&mut self, qp: usize, host: usize) -> Checked {
        self.sides[host].ends[qp].narrow_unpolled = true;
        for _ in 0..2 * NARROW {
            let (va, rkey, imm) = (self.dice.next(), RKey(0), None);
            let operation = Operation::Write { va, rkey, imm };
            let shared = self.shared_of(qp, 1 - host);
            let op = Op::bare(OpKind::Write);
            self.submit(
                qp,
                host,
                op,
                operation,
                SgeList::EMPTY,
                SendFlags::empty(),
                shared,
            )?;
        }
        Ok(())
    }

    /// Polls the completions, so that none is left of a QP that is about to be destroyed.
    fn poll_lazy_quietly(&mut self, host: usize) -> Checked {
        let waits = self.sides[host].objects.lazy_cq;
        let told = self.world.hosts[host].completed.contains(&waits);
        self.world.hosts[host].completed.retain(|cq| *cq != waits);
        self.poll_lazy(host, told)
    }

    /// Restarts a host, which loses all its state; later both hosts make new connections.
    fn restart(&mut self, host: usize) -> Checked {
        self.note_restart();
        self.world.restart(host);
        if self.dice.one_in(2) {
            // Packets in flight are then overtaken by those of the new connections.
            self.world.change_latency((self.report.latency_ns / 100).max(1));
        }
        let side = &mut self.sides[host];
        for end in &mut side.ends {
            end.gone = true;
            for door in std::iter::once(&end.reg.door).chain(end.keys.iter().filter_map(|key| key.door())) {
                door.shut.store(true, Ordering::Relaxed);
                side.shut.push(door.clone());
            }
        }
        let common = side.objects.common.door.clone();
        common.shut.store(true, Ordering::Relaxed);
        side.shut.push(common);
        // Messages may have arrived in part.
        let receives = side.objects.shared.iter();
        let receives: Vec<Piece> = receives
            .flat_map(|shared| shared.recvs.values().copied())
            .collect();
        side.accept(&receives);
        side.objects = Objects::new(&mut self.world, host, &mut self.dice, &side.memory, self.layout);
        for n in 0..side.objects.shared.len() {
            self.fill(host, n)?;
        }
        let delay = self.dice.log_uniform(20_000_000);
        self.world.call_back(delay, tag(USER_RECONNECT, 0, host));
        Ok(())
    }

    fn note_restart(&mut self) {
        let flows = self.flows.iter().zip(&self.selective);
        let busy = flows.filter(|(flows, _)| flows.iter().any(|flow| !flow.outstanding.is_empty()));
        for (_, selective) in busy {
            let what = [seen::RESTARTED_GO_BACK, seen::RESTARTED_SELECTIVE][usize::from(*selective)];
            self.world.seen.happened(what);
        }
    }

    pub(super) fn reconnect(&mut self) -> Checked {
        let first = self.flows.len();
        self.second = first..2 * first;
        let operations = self.report.settings.operations / 2;
        self.add_connections(first, operations);
        self.begin(self.second.clone())
    }

    /// Posts a request that the engine or the peer must refuse.
    fn probe(&mut self, qp: usize, host: usize) -> Checked {
        let peer = 1 - host;
        let shared = self.shared_of(qp, peer);
        let length = match self.ending {
            Ending::Misaligned => 8,
            // Any key that still granted something, or had the right, would grant this.
            Ending::EndedKey | Ending::NoRight => 1,
            Ending::BadBind | Ending::BadInvalidate => 0,
            Ending::ShortReceive => shared.map_or_else(
                || self.dice.between(1, 3 * self.mtu),
                |n| self.sides[peer].objects.shared[n].len + 1,
            ),
            _ => self.dice.between(1, 3 * self.mtu),
        };
        let Some(at) = self.sides[host].space.take(length) else {
            return Ok(());
        };
        let local = vec![Piece { at, len: length }];
        let mut sges = SgeList::from(&self.sides[host].ends[qp].reg.sges(&local)[..]);
        let access = |dice: &mut crate::dice::Dice, va, rkey| match dice.below(3) {
            0 => Operation::Read { va, rkey },
            _ => Operation::Write { va, rkey, imm: None },
        };
        let size = self.sides[peer].length;
        let end = &self.sides[peer].ends[qp];
        let (reg, common) = (&end.reg, &self.sides[peer].objects.common);
        let operation = match self.ending {
            Ending::EndedKey => {
                let ends = self.sides[peer].ends.iter().enumerate();
                let others = ends
                    .filter(|(other, _)| *other != qp)
                    .flat_map(|(_, end)| &end.keys);
                let foreign: Vec<_> = others.filter_map(|key| key.foreign()).collect();
                let nothing = end.keys.iter().filter_map(|key| key.nothing());
                let mut nothing: Vec<_> = nothing.collect();
                if nothing.is_empty() || self.dice.one_in(2) {
                    nothing.extend(foreign);
                }
                // Another key, or the same key with another tag.
                let wrong = [0x1234_5600, self.dice.between(1, 255) as u32];
                nothing.extend(wrong.map(|bits| (RKey(reg.rkey.0 ^ bits), reg.iova)));
                let (rkey, va) = self.dice.pick(&nothing);
                access(&mut self.dice, va, rkey)
            }
            Ending::NoRight => {
                let lacking = end.keys.iter().find_map(|key| key.lacking());
                match lacking.unwrap_or((RKey(reg.rkey.0 ^ 1), reg.iova, Access::REMOTE_READ)) {
                    (rkey, va, Access::REMOTE_READ) => Operation::Read { va, rkey },
                    (rkey, va, _) => Operation::Write { va, rkey, imm: None },
                }
            }
            Ending::Misaligned => Operation::FetchAdd {
                va: common.iova + self.dice.between(1, 7),
                rkey: common.rkey,
                add: 1,
            },
            Ending::BadLocalKey => {
                let lkey = LKey(self.sides[host].ends[qp].reg.lkey.0 ^ 0x1234_5600);
                sges = Sge::new(0, length as u32, lkey).into();
                let (va, rkey, imm) = (reg.iova, reg.rkey, None);
                Operation::Write { va, rkey, imm }
            }
            Ending::BadBind => {
                sges = SgeList::EMPTY;
                let own = &self.sides[host];
                let mut keys = own.ends.iter().flat_map(|end| &end.keys);
                let window = keys.find_map(|key| key.to_bind());
                Operation::Bind(Bind {
                    window: window.unwrap_or(RKey(self.dice.next() as u32)),
                    region: own.ends[qp].reg.lkey,
                    va: own.ends[qp].reg.iova,
                    length: own.length + 1,
                    access: Access::REMOTE_READ,
                })
            }
            Ending::ShortReceive | Ending::NoReceive => Operation::Send { imm: None },
            Ending::BadInvalidate => Operation::SendInvalidate { rkey: reg.rkey },
            _ => {
                let before = self.dice.one_in(4);
                let va = if before {
                    reg.iova - 1
                } else {
                    reg.iova + size + 1 - length
                };
                access(&mut self.dice, va, reg.rkey)
            }
        };
        if matches!(self.ending, Ending::ShortReceive | Ending::BadInvalidate) && shared.is_none() {
            self.receive_for_probe(qp, host, length.saturating_sub(1))?;
        }
        let op = Op {
            bytes: length,
            local,
            ..Op::bare(OpKind::Probe)
        };
        self.submit(qp, host, op, operation, sges, SendFlags::empty(), shared)
    }

    /// Posts all receives that are pending, and one for the probe.
    fn receive_for_probe(&mut self, qp: usize, host: usize, length: u64) -> Checked {
        while self.flows[qp][host].recvs_posted < self.flows[qp][host].recvs.len() {
            self.post_recv(qp, host)?;
        }
        let peer = 1 - host;
        let at = self.sides[peer].space.take(length).ok_or("no room")?;
        let flow = &mut self.flows[qp][host];
        let wr_id = flow.next_recv_id;
        flow.next_recv_id += 1;
        flow.recvs.push_back(Recv {
            wr_id,
            pieces: vec![Piece { at, len: length }],
            shared: None,
            data: Vec::new(),
            byte_len: 0,
            imm: None,
            opcode: rdmux_rnic::WcOpcode::Recv,
            solicited: false,
            invalidates: None,
        });
        self.post_recv(qp, host)
    }

    /// Returns whether the peer of `host` may refuse its requests.
    pub(super) fn peer_refuses(&self, host: usize) -> bool {
        let own = self.ending_at.0 == host;
        match self.ending {
            Ending::OutOfBounds
            | Ending::NoRight
            | Ending::EndedKey
            | Ending::ShortReceive
            | Ending::NoReceive
            | Ending::Misaligned => own,
            Ending::Deregister | Ending::MemoryFails => !own,
            _ => false,
        }
    }

    /// Returns the statuses, besides flushed, with which a receive of an affected QP may end.
    pub(super) fn expected_of_receive(&self) -> &'static [Status] {
        match self.ending {
            // The latter status is that of a message that was to invalidate a window.
            Ending::Deregister => &[Status::LocalProtection, Status::RemoteInvalidRequest],
            Ending::ShortReceive => &[Status::LocalLength],
            Ending::BadInvalidate => &[Status::RemoteInvalidRequest],
            Ending::MemoryFails => &[Status::LocalQpOperation],
            _ => &[],
        }
    }

    /// Returns the statuses with which the first operation of `host` that fails may end.
    pub(super) fn expected(&self, host: usize, op: &Op) -> &'static [Status] {
        use Status::{
            BadResponse, Flushed, LocalProtection, LocalQpOperation, MemoryBind, RemoteAccess,
            RemoteInvalidRequest, RemoteOperation, RetryExceeded, RnrRetryExceeded,
        };
        let sure = op.kind == OpKind::Probe && self.lossless;
        match (self.ending, self.ending_at.0 == host) {
            (Ending::None, _) => &[],
            (Ending::PeerVanishes | Ending::LinkDown, _) => &[RetryExceeded],
            (Ending::Restart | Ending::DestroyQp, true) => &[],
            (Ending::Restart | Ending::DestroyQp, false) => &[RetryExceeded],
            (Ending::UserError, true) => &[Flushed],
            (Ending::UserError, false) => &[RetryExceeded],
            (Ending::Deregister, true) => &[
                LocalProtection,
                LocalQpOperation,
                MemoryBind,
                Flushed,
                RetryExceeded,
            ],
            (Ending::Deregister, false) => &[RemoteAccess, RemoteOperation, RetryExceeded],
            (Ending::MemoryFails, true) => &[LocalQpOperation, Flushed, RetryExceeded],
            (Ending::MemoryFails, false) => &[RemoteOperation, RetryExceeded],
            (Ending::OutOfBounds | Ending::NoRight | Ending::EndedKey, true) if sure => &[RemoteAccess],
            (Ending::OutOfBounds | Ending::NoRight | Ending::EndedKey, true) => {
                &[RemoteAccess, RetryExceeded]
            }
            (Ending::ShortReceive | Ending::Misaligned, true) if sure => &[RemoteInvalidRequest],
            (Ending::ShortReceive | Ending::Misaligned, true) => &[RemoteInvalidRequest, RetryExceeded],
            (Ending::NoReceive, true) if sure => &[RnrRetryExceeded],
            (Ending::NoReceive, true) => &[RnrRetryExceeded, RetryExceeded],
            (Ending::BadLocalKey, true) => &[LocalProtection, Flushed],
            (Ending::BadBind, true) => &[MemoryBind, Flushed],
            (Ending::BadInvalidate, true) => &[RetryExceeded],
            (Ending::FalseAnswer, true) => &[BadResponse, RetryExceeded],
            (Ending::Overrun, true) => &[],
            (_, false) => &[Flushed, RetryExceeded],
        }
    }
}
