//! Checks of completions against the model, and of the state when everything is idle.

use std::sync::atomic::Ordering;

use rdmux_rnic::{Arm, Cqn, QpState, Qpn, Status, WorkCompletion};

use super::post::untag;
use super::{Checked, Drain, Op, OpKind, USER_POLL, Workload, keys, tag};

impl Workload {
    pub(super) fn take_completions(&mut self) -> Checked {
        for host in 0..2 {
            while let Some(cq) = self.world.hosts[host].completed.pop() {
                if cq == self.sides[host].objects.lazy_cq {
                    self.poll_lazy(host, true)?;
                    continue;
                }
                if self.is_unpolled(host, cq) {
                    continue;
                }
                self.world.hosts[host].rnic.arm_cq(cq, Arm::Next);
                while let Some(wc) = self.world.poll_cq(host, cq) {
                    self.completion(host, &wc)?;
                }
            }
            let lazy = self.sides[host].objects.lazy_cq;
            let waiting = self.world.hosts[host].rnic.cq_state(lazy);
            if waiting.is_some_and(|(n, _)| n > 0) && !self.sides[host].lazy_poll_planned {
                self.sides[host].lazy_poll_planned = true;
                let delay = self.dice.log_uniform(3_000_000);
                self.world.call_back(delay, tag(USER_POLL, 0, host));
            }
        }
        Ok(())
    }

    fn is_unpolled(&self, host: usize, cq: Cqn) -> bool {
        let end = &self.sides[host].ends[self.ending_at.1];
        end.narrow == Some(cq) && end.narrow_unpolled
    }

    pub(super) fn completion(&mut self, host: usize, wc: &WorkCompletion) -> Checked {
        let Some(qp) = self.sides[host].end_of(wc.qpn) else {
            return Err(format!("host {host}: completion of an unknown QP: {wc:?}"));
        };
        let checked = if wc.wr_id >> 63 == 1 {
            self.received(qp, host, wc).map(drop)
        } else {
            self.sent(qp, host, wc)
        };
        checked.map_err(|what| format!("QP {qp} host {host}: {what} ({wc:?})"))
    }

    /// Polls the queue that gives events for solicited messages and errors only.
    pub(super) fn poll_lazy(&mut self, host: usize, told: bool) -> Checked {
        let cq = self.sides[host].objects.lazy_cq;
        self.world.hosts[host].rnic.arm_cq(cq, Arm::Solicited);
        let mut any = false;
        while let Some(wc) = self.world.poll_cq(host, cq) {
            let Some(qp) = self.sides[host].end_of(wc.qpn) else {
                return Err(format!("host {host}: completion of an unknown QP: {wc:?}"));
            };
            let speaks = self.received(qp, host, &wc);
            any |= speaks.map_err(|what| format!("QP {qp} host {host}: {what} ({wc:?})"))?;
        }
        // A completion that came after the event may have been polled already.
        if any && !told && self.world.hosts[host].completed.is_empty() {
            return Err(format!("host {host}: no event for a solicited message"));
        }
        if told && !any {
            return Err(format!("host {host}: event for an unsolicited message"));
        }
        Ok(())
    }

    fn sent(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Checked {
        if wc.status != Status::Success {
            return self.send_failed(qp, host, wc);
        }
        if self.flows[qp][host].failed.is_some() {
            return Err("success after a failure".to_owned());
        }
        if self.flows[qp][host].drain == Drain::Drained {
            return Err("a request ended that was not to begin: the queue had drained".to_owned());
        }
        loop {
            let Some(op) = self.flows[qp][host].outstanding.pop_front() else {
                return Err("a completion of nothing".to_owned());
            };
            if op.wr_id > wc.wr_id {
                return Err(format!("out of order: #{} was next", op.wr_id));
            }
            let itself = op.wr_id == wc.wr_id;
            if !itself && op.signaled {
                return Err(format!("#{} was passed over", op.wr_id));
            }
            if itself {
                if op.kind == OpKind::Probe {
                    return Err("a request succeeded that was to be refused".to_owned());
                }
                if wc.opcode != op.kind.opcode() || u64::from(wc.byte_len) != op.bytes {
                    return Err(format!(
                        "wrong opcode or length for {:?} of {}",
                        op.kind, op.bytes
                    ));
                }
            }
            self.done(qp, host, op)?;
            if itself {
                break;
            }
        }
        self.post_some(qp, host)?;
        // Room was freed on both sides: other flows may have waited for it.
        let other = self.dice.below(self.flows.len() as u64) as usize;
        self.post_some(other, 1 - host)
    }

    /// Checks the effects of an operation that succeeded.
    pub(super) fn done(&mut self, qp: usize, host: usize, op: Op) -> Checked {
        let peer = 1 - host;
        self.report.book(op.kind.index(), op.bytes);
        self.sides[peer].ends[qp].served |= !op.kind.is_local();
        match op.kind {
            OpKind::Write => {
                self.sides[peer].check(op.remote.as_slice(), "bytes written")?;
                if !op.held {
                    self.give_remote(qp, peer, &op);
                }
            }
            OpKind::Read => {
                self.sides[host].check(&op.local, "bytes read")?;
                self.give_remote(qp, peer, &op);
            }
            OpKind::Flush => {
                let image = self.sides[peer].memory.lock();
                for piece in &op.covers {
                    let range = piece.at as usize..(piece.at + piece.len) as usize;
                    if image.medium[range.clone()] != self.sides[peer].model[range] {
                        return Err(format!(
                            "FLUSH #{} is complete, but the {} bytes written at {} before it are not on the medium",
                            op.wr_id, piece.len, piece.at
                        ));
                    }
                }
                drop(image);
                if !op.publishes {
                    self.sides[peer].give(&op.covers);
                }
            }
            OpKind::FetchAdd | OpKind::CompareSwap => {
                let found = self.sides[host].accept(&op.local);
                let found = found.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
                if let Some(word) = &op.word {
                    self.sides[peer].words.done(word, found)?;
                }
            }
            OpKind::AtomicWrite => self.sides[peer].give(&op.covers),
            OpKind::Bind | OpKind::Register | OpKind::LocalInvalidate => self.key_done(qp, host, &op),
            OpKind::Send | OpKind::Probe => {}
        }
        if !op.lends {
            self.sides[host].give(&op.local);
        }
        Ok(())
    }

    fn give_remote(&mut self, qp: usize, peer: usize, op: &Op) {
        let Some(piece) = op.remote else { return };
        let side = &mut self.sides[peer];
        let freed = match op.key {
            Some(n) => side.ends[qp].keys[n].used(piece),
            None => Some(piece),
        };
        side.give(freed.as_slice());
    }

    /// Handles the completion of a work request on a key.
    fn key_done(&mut self, qp: usize, host: usize, op: &Op) {
        let Some(n) = op.key else { return };
        let key = &mut self.sides[host].ends[qp].keys[n];
        if key.state == keys::KeyState::Closing {
            self.close_key(qp, host, n);
        } else {
            let freed = key.opened();
            self.sides[host].give(freed.as_slice());
        }
    }

    fn close_key(&mut self, qp: usize, host: usize, n: usize) {
        let side = &mut self.sides[host];
        let (freed, door) = side.ends[qp].keys[n].close();
        side.shut.extend(door);
        side.give(freed.as_slice());
    }

    /// Checks a completed receive. Returns true for a message that makes an armed queue give an event.
    fn received(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Result<bool, String> {
        let (shared, id) = untag(wc.wr_id);
        let own = shared.and_then(|n| {
            self.sides[host].objects.shared[n]
                .take(id)
                .map(|piece| (n, piece))
        });
        if shared.is_some() && own.is_none() {
            return Err("a receive of nothing".to_owned());
        }
        let flow = &mut self.flows[qp][1 - host];
        if wc.status != Status::Success {
            let first = !std::mem::replace(&mut flow.recv_failed, true);
            let expected = self.expected_of_receive();
            if !self.is_affected(qp)
                || !(wc.status == Status::Flushed || first && expected.contains(&wc.status))
            {
                return Err("a receive failed".to_owned());
            }
            let pieces = match own {
                Some((_, piece)) => vec![piece],
                None => self.next_recv(qp, host, id)?.pieces,
            };
            self.sides[host].unknown.extend(pieces);
            return Ok(true);
        }
        // The completion queues of XRC are polled at different times.
        if flow.recv_failed && !self.sides[host].ends[qp].xrc {
            return Err("a receive succeeded after one that failed".to_owned());
        }
        let recv = if shared.is_some() {
            let next = flow.recvs.iter().position(|recv| recv.shared == shared);
            next.and_then(|at| flow.recvs.remove(at))
                .ok_or("a message of nobody")?
        } else {
            self.next_recv(qp, host, id)?
        };
        if (wc.opcode, wc.byte_len, wc.imm) != (recv.opcode, recv.byte_len, recv.imm) {
            return Err(format!("expected {} bytes, imm {:?}", recv.byte_len, recv.imm));
        }
        let ended = recv.invalidates.map(|n| self.sides[host].ends[qp].keys[n].rkey);
        if wc.invalidated != ended {
            return Err(format!("expected the end of {ended:?}"));
        }
        if let Some(n) = recv.invalidates {
            self.close_key(qp, host, n);
        }
        self.report.received += 1;
        match own {
            Some((n, piece)) => {
                let side = &mut self.sides[host];
                side.write_model(&[piece], &recv.data);
                side.check(&[piece], "bytes received")?;
                side.objects.shared[n].give(piece);
                let empty = side.objects.shared[n].is_empty(&self.world.hosts[host].rnic);
                if empty || self.dice.one_in(2) {
                    self.fill(host, n)?;
                }
            }
            None => {
                self.sides[host].check(&recv.pieces, "bytes received")?;
                self.sides[host].give(&recv.pieces);
            }
        }
        Ok(recv.solicited)
    }

    /// Takes the receive that the next message of the peer of `host` uses.
    fn next_recv(&mut self, qp: usize, host: usize, id: u64) -> Result<super::Recv, String> {
        let flow = &mut self.flows[qp][1 - host];
        let Some(recv) = flow.recvs.pop_front().filter(|_| flow.recvs_posted > 0) else {
            return Err("a receive of nothing".to_owned());
        };
        flow.recvs_posted -= 1;
        if recv.wr_id != id {
            return Err(format!("receives out of order: #{} was next", recv.wr_id));
        }
        Ok(recv)
    }

    fn send_failed(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Checked {
        if !self.is_affected(qp) {
            return Err("an operation failed".to_owned());
        }
        // The operations before it that were to complete silently have succeeded, unless it is flushed: then they are flushed
        // too.
        let flow = &mut self.flows[qp][host];
        let before: Vec<Op> = {
            let at = flow.outstanding.iter().position(|op| op.wr_id == wc.wr_id);
            let Some(at) = at else {
                return Err("a completion of nothing, or a second one".to_owned());
            };
            flow.outstanding.drain(..at).collect()
        };
        let op = flow.outstanding.pop_front().ok_or("nothing open")?;
        // A request that fails by its own memory may have older requests before it, which end as flushed; so may a request that
        // the peer refused, behind a READ whose data was lost.
        let local = matches!(
            wc.status,
            Status::LocalProtection | Status::LocalQpOperation | Status::MemoryBind
        );
        let own = local && !flow.own_failed;
        flow.own_failed |= own;
        let refused = flow.refusal_owed
            && matches!(
                wc.status,
                Status::RemoteAccess
                    | Status::RemoteOperation
                    | Status::RemoteInvalidRequest
                    | Status::RnrRetryExceeded
            );
        flow.refusal_owed &= !refused;
        let first = flow.failed.is_none() || own || refused;
        flow.failed.get_or_insert(wc.status);
        let refuses = self.peer_refuses(host);
        if let Some(passed) = before.iter().find(|op| op.signaled || !first) {
            return Err(format!("#{} was passed over", passed.wr_id));
        }
        if first && refuses && op.kind.takes_answer() && wc.status == Status::Flushed {
            self.flows[qp][host].refusal_owed = true;
            self.report.failed += 1;
            self.unsure(qp, host, &op);
            return before.into_iter().try_for_each(|op| self.done(qp, host, op));
        }
        for op in before {
            self.done(qp, host, op)?;
        }
        let expected = if first {
            self.expected(host, &op)
        } else {
            &[Status::Flushed]
        };
        if !expected.contains(&wc.status) {
            return Err(format!(
                "{:?} failed otherwise than by one of {expected:?}",
                op.kind
            ));
        }
        self.report.failed += 1;
        self.unsure(qp, host, &op);
        Ok(())
    }

    /// Records that an operation may have taken effect, perhaps in part.
    fn unsure(&mut self, _qp: usize, host: usize, op: &Op) {
        let peer = 1 - host;
        if op.kind.takes_answer() || op.kind == OpKind::Probe {
            self.sides[host].unknown.extend(&op.local);
        }
        if matches!(op.kind, OpKind::Write | OpKind::AtomicWrite) {
            self.sides[peer].unknown.extend(op.remote);
        }
        if let Some(word) = &op.word {
            self.sides[peer].words.unsure(word);
        }
    }

    // The end.

    /// Handles an idle run that still has operations to post: there was no room for them. Returns false when everything is
    /// done.
    pub(super) fn unblock(&mut self) -> Result<bool, String> {
        let open = |flow: &super::Flow| flow.todo > 0;
        let blocked: Vec<(usize, usize)> = (0..self.flows.len())
            .flat_map(|qp| [(qp, 0), (qp, 1)])
            .filter(|(qp, host)| open(&self.flows[*qp][*host]) && !self.is_affected(*qp))
            .collect();
        if blocked.is_empty() {
            return Ok(false);
        }
        for (qp, host) in blocked {
            self.end_silent(qp, host)?;
            let held = std::mem::take(&mut self.flows[qp][host].held);
            self.sides[1 - host].give(&held);
            let before = self.report.posted;
            self.post_some(qp, host)?;
            if self.report.posted > before || self.flows[qp][host].paused {
                return Ok(true);
            }
        }
        Err("no room in memory for the next operation".to_owned())
    }

    /// Ends silent operations when the run is idle: only these can be open, and the engine has none of them left.
    fn end_silent(&mut self, qp: usize, host: usize) -> Checked {
        let info = self.world.hosts[host]
            .rnic
            .query_qp(self.sides[host].ends[qp].send_qpn);
        let silent = self.flows[qp][host].outstanding.iter().all(|op| !op.signaled);
        if !silent || info.is_none_or(|info| info.send_outstanding > 0) {
            return Err(format!(
                "QP {qp} host {host} is idle with open operations; {}",
                self.what_is_open()
            ));
        }
        for op in std::mem::take(&mut self.flows[qp][host].outstanding) {
            self.done(qp, host, op)?;
        }
        Ok(())
    }

    pub(super) fn check_rest(&mut self) -> Checked {
        if self.world.flushes_running != 0 {
            return Err("flushes remain".to_owned());
        }
        for qp in 0..self.flows.len() {
            for host in 0..2 {
                self.check_end(qp, host)
                    .map_err(|what| format!("QP {qp} host {host} idle: {what}"))?;
            }
        }
        self.forget_affected();
        for host in 0..2 {
            self.check_shared(host)?;
            let side = &mut self.sides[host];
            side.compare_all()
                .map_err(|what| format!("host {host}: {what}"))?;
            self.destroy_all(host)?;
        }
        Ok(())
    }

    /// Records that operations left open on affected connections may be done or not.
    fn forget_affected(&mut self) {
        for qp in 0..self.flows.len() {
            if !self.is_affected(qp) {
                continue;
            }
            for host in 0..2 {
                // Messages that never arrived, and operations that completed silently except for their last response.
                let flow = &mut self.flows[qp][host];
                let outstanding = std::mem::take(&mut flow.outstanding);
                let recvs = flow.recvs.iter().flat_map(|recv| recv.pieces.iter().copied());
                self.sides[1 - host].unknown.extend(recvs);
                for op in outstanding {
                    self.unsure(qp, host, &op);
                }
                if let Some(at) = self.sides[host].ends[qp].srq {
                    let shared = &self.sides[host].objects.shared[at];
                    self.sides[host].unknown.extend(shared.recvs.values());
                }
            }
            for side in &mut self.sides {
                if side.ends[qp].xrc {
                    let shared = side.objects.shared.iter();
                    side.unknown
                        .extend(shared.flat_map(|shared| shared.recvs.values()));
                }
            }
        }
    }

    /// Checks that every receive posted to a shared queue is still there, or was used.
    fn check_shared(&self, host: usize) -> Checked {
        let rnic = &self.world.hosts[host].rnic;
        for shared in &self.sides[host].objects.shared {
            let posted = rnic.query_srq(shared.srqn).map_or(0, |info| info.posted);
            let lost = shared.recvs.len().saturating_sub(posted);
            if posted > shared.recvs.len() || lost > 0 && !self.ended {
                return Err(format!(
                    "host {host}: {posted} of {} receives remain in a shared queue",
                    shared.recvs.len()
                ));
            }
        }
        Ok(())
    }

    fn destroy_all(&mut self, host: usize) -> Checked {
        let side = &self.sides[host];
        let objects = &side.objects;
        let ends = side.ends.iter().filter(|end| !end.gone);
        let narrow: Vec<_> = ends.filter_map(|end| end.narrow).collect();
        for cq in [objects.cq, objects.lazy_cq] {
            if self.world.hosts[host].rnic.cq_state(cq) != Some((0, false)) {
                return Err(format!("host {host}: the completion queue is not idle"));
            }
        }
        let ends = side.ends.iter().filter(|end| !end.gone);
        let qpns: Vec<Qpn> = ends.flat_map(|end| [end.send_qpn, end.recv_qpn]).collect();
        let srqns: Vec<_> = objects.shared.iter().map(|shared| shared.srqn).collect();
        let (pd, xrcd, cqs) = (objects.pd, objects.xrcd, [objects.cq, objects.lazy_cq]);
        let left = self.world.with(host, |rnic, _| {
            for qpn in qpns {
                rnic.destroy_qp(qpn);
            }
            for srqn in srqns {
                rnic.destroy_srq(srqn).map_err(|error| error.to_string())?;
            }
            rnic.dealloc_xrcd(xrcd);
            rnic.dealloc_pd(pd);
            for cq in cqs.into_iter().chain(narrow) {
                rnic.destroy_cq(cq);
            }
            Ok::<_, String>((rnic.object_counts(), rnic.poll_timeout()))
        })?;
        if left != ((0, 0, 0), None) {
            return Err(format!("host {host}: objects or timers remain: {left:?}"));
        }
        Ok(())
    }

    fn check_end(&self, qp: usize, host: usize) -> Checked {
        let flow = &self.flows[qp][host];
        let end = &self.sides[host].ends[qp];
        if end.gone {
            return Ok(());
        }
        let rnic = &self.world.hosts[host].rnic;
        let (Some(send), Some(recv)) = (rnic.query_qp(end.send_qpn), rnic.query_qp(end.recv_qpn)) else {
            return Err("the QP is gone".to_owned());
        };
        let silent = flow.outstanding.iter().all(|op| !op.signaled);
        let affected = self.is_affected(qp);
        // The model keeps an operation that completes silently when no operation was posted after it.
        if !(flow.outstanding.is_empty() || affected && silent || end.overrun) || send.send_outstanding != 0 {
            return Err(format!(
                "{} operations are open, {} in the engine",
                flow.outstanding.len(),
                send.send_outstanding
            ));
        }
        let recvs = &self.flows[qp][1 - host];
        if recv.state == QpState::Error {
            if !affected {
                return Err("the QP is in error".to_owned());
            }
            if recv.recv_posted != 0 || recvs.recvs_posted != 0 {
                return Err(format!(
                    "in error, and {} receives are not flushed",
                    recvs.recvs_posted
                ));
            }
            if end.srq.is_some() && end.last_wqe != 1 {
                return Err("in error, without an event for the last receive".to_owned());
            }
        } else if !affected && (recv.recv_posted != 0 || !recvs.recvs.is_empty()) {
            return Err(format!("{} receives are left over", recv.recv_posted));
        }
        let by_user = self.ending == crate::Ending::UserError && self.ending_at == (host, qp);
        let failed = [send.state, recv.state].map(|state| state == QpState::Error);
        let errors = u32::from(failed[0]) + u32::from(failed[1] && end.xrc);
        if end.errors != errors && !by_user {
            return Err(format!("{errors} QPs are in error, {} events", end.errors));
        }
        if recv.state == QpState::Rtr && u32::from(end.served) > end.established {
            return Err("no event for the arrival of requests".to_owned());
        }
        if !affected && send.state != QpState::Rts {
            return Err(format!("in {:?}", send.state));
        }
        if flow.refusal_owed {
            return Err("a READ was flushed, and nothing behind it was refused".to_owned());
        }
        if flow.failed.is_some() && send.state != QpState::Error {
            return Err(format!("an operation failed, yet the QP is in {:?}", send.state));
        }
        if end.narrow_unpolled && !end.overrun && flow.failed.is_none() {
            return Err("the queue overran without an event".to_owned());
        }
        let trespasses = end.reg.door.trespasses.load(Ordering::Relaxed);
        if trespasses != 0 {
            return Err(format!("{trespasses} accesses through a region that ended"));
        }
        Ok(())
    }
}
