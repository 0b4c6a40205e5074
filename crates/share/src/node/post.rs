//! Moves work requests from an application's ring to its flows, pieces of them to the device, and completions back to its ring.
//!
//! [`Application::post_pieces`] is the one place where requests reach send queues of the device; receives go there at once.

use std::time::Instant;

use rdmux_rnic::PostError;
use rdmux_rnic::sched::{TenantId, class_of};
use rdmux_rnic::{Cause, QpAttributes, Target, Time, WcOpcode, WorkCompletion};
use rdmux_rnic::{Operation, QpState, RecvRequest, SendFlags, SendRequest, Sge, SgeList, Status};
use rdmux_verbs::{AsyncEvent, EngineWatch};
use rdmux_wire::node::control::Message;
use rdmux_wire::node::{DESCRIPTOR_BYTES, Descriptor, QueueId, Work, WorkFlags, WorkOperation};

use super::application::{Application, Detached, Kept, Qp, Shared, WORK_REQUESTS_ALL_MAX};
use super::cut::{may_cut, part_of};
use super::egress::{Done, Egress, Full, GroupOptions, Piece, PieceId, Request};
use super::mux::Failure;
use super::sharing::News;
use super::worker::arm;
use crate::control::convert::{completion_to_wire, event_to_wire, status_to_wire};
use crate::ring::{
    BellWaiter, Consumer, Corrupt, NodeEnd, Producer, PushError, ReadyArea, ReadySet, RingArea, SLOTS_MAX,
    Tell, WorkBytes,
};

/// Requests that are taken in a row before a message, and completions that are taken at once.
pub(super) const BATCH: usize = 64;

/// Completions in hand beyond which no requests are taken.
const KEPT_MAX: usize = 2 * BATCH;
/// Completions in hand beyond which an application is detached: all its requests and receives, and once a whole ring.
const KEPT_EVER_MAX: usize = WORK_REQUESTS_ALL_MAX as usize + SLOTS_MAX as usize;

/// Bytes inline in requests that wait, beyond which no requests are taken, and beyond which an application is detached that makes the node
/// take them all the same, by messages about its objects.
const INLINE_MAX: u64 = 16 << 20;
const INLINE_EVER_MAX: u64 = 64 << 20;

/// The ring of requests, and that of completions.
const SUBMISSIONS: u32 = 0;
const COMPLETIONS: u32 = 0;

/// The node's end of the rings of an application.
#[derive(Debug)]
pub(super) struct Rings {
    end: NodeEnd,
    submissions: Consumer<RingArea>,
    completions: Producer<RingArea>,
    ready: ReadySet<ReadyArea>,
    /// Set while the completions in hand wait for room.
    is_full: bool,
    /// Set while the application wakes the node.
    sleeps: bool,
}

impl Rings {
    pub(super) fn new(end: NodeEnd) -> Rings {
        Rings {
            submissions: end.submission(SUBMISSIONS),
            completions: end.completion(COMPLETIONS),
            ready: end.ready(),
            end,
            is_full: false,
            sleeps: false,
        }
    }

    /// Returns what becomes readable when the application rings.
    pub(super) fn waiter(&self) -> &BellWaiter {
        self.end.waiter()
    }

    fn tell_of_submissions(&self, tell: Tell) {
        self.end.tell(SUBMISSIONS, tell);
    }

    fn tell_of_completions(&self, tell: Tell) {
        self.end
            .tell(self.end.layout().completion_ring(COMPLETIONS), tell);
    }
}

impl From<Corrupt> for Detached {
    fn from(corrupt: Corrupt) -> Detached {
        Detached::Protocol(corrupt.to_string())
    }
}

/// How many requests to take out of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    /// So many at most, if the application takes its completions and its requests do not pile up.
    Turn(usize),
    /// Those before a message, which comes after them.
    All,
}

impl Application {
    /// Takes requests out of the ring: those for send queues wait in their flows then. Returns whether there were any.
    pub(super) fn take_work(
        &mut self,
        shared: &mut Shared,
        now: Time,
        bytes: &mut WorkBytes,
        take: Take,
    ) -> Result<bool, Detached> {
        let batch = match take {
            Take::Turn(batch) => batch,
            Take::All => BATCH,
        };
        let mut taken = 0;
        while taken < batch {
            let (kept, inline) = (self.kept.len(), shared.egress.kept_bytes(self.slot));
            match take {
                // Each refused request leaves a completion here.
                Take::Turn(_) if kept >= KEPT_MAX || inline >= INLINE_MAX => break,
                Take::All if kept >= KEPT_EVER_MAX || inline >= INLINE_EVER_MAX => {
                    return Err(Detached::Protocol("it leaves too much to the node".into()));
                }
                Take::Turn(_) | Take::All => {}
            }
            let Some(rings) = &mut self.rings else { break };
            let Some(work) = rings.submissions.take_work(bytes)? else {
                break;
            };
            taken += 1;
            self.accept_work(shared, now, &work, bytes.bytes())?;
        }
        if let Some(rings) = &mut self.rings {
            let tell = rings.submissions.release();
            rings.tell_of_submissions(tell);
        }
        Ok(taken > 0)
    }

    /// Posts a receive, or has a request for a send queue wait in its flow.
    fn accept_work(
        &mut self,
        shared: &mut Shared,
        now: Time,
        work: &Work,
        bytes: &[u8],
    ) -> Result<(), Detached> {
        if work.operation == WorkOperation::SharedRecv {
            return self.post_shared(work, bytes);
        }
        let tenant = self.tenant;
        let to = self.target_of(&work.operation);
        let Some(qp) = self.qps.get_mut(work.queue.0) else {
            return Err(Detached::Protocol(format!(
                "a request for queue pair {}, which it does not have",
                work.queue.0
            )));
        };
        let Some((opcode, operation)) = operation_of(&work.operation) else {
            if PieceId::of_wr_id(work.wr_id).is_some() {
                return Err(Detached::Protocol(format!(
                    "a receive with number {:#x}, beyond any place in a queue",
                    work.wr_id
                )));
            }
            let request = RecvRequest {
                wr_id: work.wr_id,
                sges: list_of(work, bytes),
            };
            let is_posted = {
                let sharing = shared.sharing.as_mut();
                let left = match sharing {
                    Some(sharing) => sharing.post_recv(qp.qp.qpn(), request),
                    None => Ok(Some(request)),
                };
                match left {
                    Ok(Some(request)) => qp.qp.post_recv(request).is_ok(),
                    Ok(None) => true,
                    Err(_) => false,
                }
            };
            if !is_posted {
                self.refuse(shared, now, work, WcOpcode::Recv);
            }
            return Ok(());
        };
        let Ok(to) = to else {
            self.refuse(shared, now, work, opcode);
            return Ok(());
        };
        let request = SendRequest {
            wr_id: 0,
            operation,
            sges: list_of(work, bytes),
            flags: flags_of(work.flags),
            to,
        };
        let qpn = qp.qp.qpn();
        let is_shared = shared.sharing.as_ref().is_some_and(|sharing| sharing.has(qpn));
        if qp.group.is_none() && !is_shared {
            qp.bind(shared, now, tenant);
        }
        let checked = request.check();
        let known = Request {
            number: work.wr_id,
            opcode,
            length: checked.unwrap_or(0),
            kept_bytes: request.sges.as_inline().map_or(0, |bytes| bytes.len() as u32),
            asks: request.flags.contains(SendFlags::SIGNALED),
            cuts: may_cut(&request),
            takes_slot: takes_slot(&request.operation),
            refused: checked.err().map(|_| Status::LocalQpOperation),
        };
        let flow = qp.flow;
        match shared.egress.submit(now, flow, known, request) {
            Ok(()) if checked.is_ok() => {}
            Ok(()) => {
                qp.fail(shared);
                shared.egress.fail(now, flow);
            }
            Err(Full) => self.refuse(shared, now, work, opcode),
        }
        Ok(())
    }

    /// Posts a receive to its shared receive queue. An application counts what such a queue holds, and posts no more.
    fn post_shared(&mut self, work: &Work, bytes: &[u8]) -> Result<(), Detached> {
        let id = work.queue.0;
        let refused =
            |why: String| Detached::Protocol(format!("a receive for shared receive queue {id}: {why}"));
        if PieceId::of_wr_id(work.wr_id).is_some() {
            return Err(refused(format!("its number is {:#x}", work.wr_id)));
        }
        let request = RecvRequest {
            wr_id: work.wr_id,
            sges: list_of(work, bytes),
        };
        let srq = self.srqs.get(id);
        let posted = srq.map_or(Err(PostError::NoSrq), |srq| srq.queue.post_recv(request));
        posted.map_err(|error| refused(error.to_string()))
    }

    /// Returns the destination of a request on a send queue.
    fn target_of(&self, operation: &WorkOperation) -> Result<Target, PostError> {
        let WorkOperation::Datagram { to, .. } = operation else {
            return Ok(Target::Connected);
        };
        let handle = self.handles.get(to.handle).ok_or(PostError::Invalid)?;
        handle.to(to.qpn, to.qkey).map_err(|_| PostError::Invalid)
    }

    /// Refuses a request: it puts its queue pair in error, as one that an RNIC finds malformed does.
    fn refuse(&mut self, shared: &mut Shared, now: Time, work: &Work, opcode: WcOpcode) {
        let Some(qp) = self.qps.get(work.queue.0) else {
            return;
        };
        qp.fail(shared);
        shared.egress.fail(now, qp.flow);
        let wc = WorkCompletion {
            wr_id: work.wr_id,
            status: Status::LocalQpOperation,
            opcode,
            qpn: qp.qp.qpn(),
            ..WorkCompletion::default()
        };
        let qp = work.queue.0;
        self.kept.push_back(Kept { qp, wc });
    }

    /// Posts pieces of requests to their queue pair, which is the same for all. The engine checks their keys and ranges against the queue
    /// pair's protection domain. One that the device refuses puts the queue pair in error.
    pub(super) fn post_pieces(&mut self, shared: &mut Shared, now: Time, pieces: &[Piece]) {
        let egress = &mut shared.egress;
        let Some(qp) = pieces.first().and_then(|first| self.qps.get(first.owner.qp)) else {
            return egress.refused(now, pieces, Status::LocalQpOperation);
        };
        let requests: Vec<SendRequest> = pieces
            .iter()
            .map_while(|piece| request_of(egress, piece))
            .collect();
        let count = requests.len();
        let posted = match qp.qp.post_send_list(requests) {
            Ok(()) => count,
            Err(error) => error.index,
        };
        if posted < pieces.len() {
            let _ = qp.qp.modify(QpState::Error, &QpAttributes::default());
            egress.refused(now, &pieces[posted..], Status::LocalQpOperation);
        }
    }

    /// Takes completions out of the device's queue. Those of pieces become completions of requests ([`Application::done`]). Returns whether
    /// there were any.
    pub(super) fn take_completions(&mut self, shared: &mut Shared, now: impl Fn() -> Time) -> bool {
        self.has_all = self.rings.is_none() || self.cq.poll_many(BATCH, &mut self.found) == 0;
        if self.has_all {
            return false;
        }
        let now = now();
        while let Some(wc) = self.found.pop_front() {
            match (PieceId::of_wr_id(wc.wr_id), wc.status) {
                (None, _) => {
                    // Completions of a queue pair that is gone concern nobody.
                    if let Some(qp) = self.by_qpn.get(&wc.qpn) {
                        self.received(shared, *qp, wc);
                    }
                }
                (Some(piece), Status::Success) => shared.egress.completed(now, piece),
                (Some(piece), status) => shared.egress.failed(now, piece, status),
            }
            // Completions of a send queue and a receive queue keep their order.
            while let Some(done) = shared.egress.poll_done_of(self.slot) {
                self.done(&done);
            }
        }
        true
    }

    /// Handles news of a queue pair that the device does not use by itself.
    pub(super) fn has_news(
        &mut self,
        shared: &mut Shared,
        now: Time,
        id: u32,
        news: News,
    ) -> Result<(), Detached> {
        let tenant = self.tenant;
        let Some(qp) = self.qps.get_mut(id) else {
            return Ok(());
        };
        let qpn = qp.qp.qpn();
        match news {
            News::Received(wc) => self.received(shared, id, wc),
            News::Failed(failure) => {
                shared.egress.fail(now, qp.flow);
                // The end of a connection makes its queue pair fail as if the application had done so.
                let is_end = qp.has_ended && failure == Failure::Own;
                if std::mem::replace(&mut qp.failed, true) || is_end {
                    return Ok(());
                }
                let (status, event) = match failure {
                    Failure::Own => (Status::Flushed, None),
                    Failure::Receive(status) => (status, None),
                    Failure::Access(status) => {
                        let event = AsyncEvent::of_qp_error(qpn, status, Cause::PeerRequest);
                        (status, event)
                    }
                    Failure::Shared => (Status::RetryExceeded, None),
                };
                self.tell(&Message::Failed {
                    qp: id,
                    status: status_to_wire(status),
                })?;
                if let Some((kind, _)) = event.and_then(event_to_wire) {
                    self.tell(&Message::Event { kind, object: id })?;
                }
            }
            News::Own(states, receives) => {
                let mut done = states
                    .iter()
                    .all(|(to, attributes)| qp.qp.modify(*to, attributes).is_ok());
                for receive in receives {
                    done &= qp.qp.post_recv(receive).is_ok();
                }
                if !done {
                    qp.fail(shared);
                    shared.egress.fail(now, qp.flow);
                } else if !states.is_empty() {
                    qp.bind(shared, now, tenant);
                }
            }
        }
        Ok(())
    }

    /// Accounts for a receive that is over.
    fn received(&mut self, shared: &mut Shared, id: u32, wc: WorkCompletion) {
        if let Some(qp) = self.qps.get(id) {
            shared.egress.received(qp.flow, wc.status, wc.byte_len);
        }
        self.kept.push_back(Kept { qp: id, wc });
    }

    /// Accounts for a request that is over.
    pub(super) fn done(&mut self, done: &Done) {
        let Some(qp) = self.qps.get(done.owner.qp) else {
            return;
        };
        let wc = WorkCompletion {
            wr_id: done.number,
            status: done.status,
            opcode: done.opcode,
            byte_len: done.length,
            qpn: qp.qp.qpn(),
            ..WorkCompletion::default()
        };
        let qp = done.owner.qp;
        self.kept.push_back(Kept { qp, wc });
    }

    /// Puts completions into the ring, as far as there is room. Returns whether there were any.
    pub(super) fn put_completions(&mut self) -> Result<bool, Detached> {
        let Some(rings) = &mut self.rings else {
            return Ok(false);
        };
        let mut put = 0;
        rings.is_full = false;
        while let Some(Kept { qp, wc }) = self.kept.front() {
            // The queue pair may be gone by now.
            if self.qps.get(*qp).is_some() {
                let mut descriptor: Descriptor = [0; DESCRIPTOR_BYTES];
                completion_to_wire(QueueId(*qp), wc).emit(&mut descriptor);
                match rings.completions.push(&[descriptor]) {
                    Ok(()) => put += 1,
                    Err(PushError::Full) => {
                        rings.is_full = true;
                        break;
                    }
                    Err(PushError::Corrupt(corrupt)) => return Err(corrupt.into()),
                }
            }
            self.kept.pop_front();
        }
        let tell = rings.completions.publish();
        rings.tell_of_completions(tell);
        Ok(put > 0)
    }

    /// Returns whether the ring has all completions, and something waits for that.
    pub(super) fn has_drained(&self) -> bool {
        !self.drained.is_empty() && self.has_all && self.kept.is_empty()
    }

    /// Prepares a sleep until the application or the device has something, after a pass has found nothing. Returns false if one of them has
    /// something now. [`Application::awake`] ends the sleep in either case.
    pub(super) fn prepare_sleep(
        &mut self,
        shared: &mut Shared,
        now: impl Fn() -> Time,
        watch: Option<&mut EngineWatch>,
    ) -> Result<bool, Detached> {
        let Some(rings) = &mut self.rings else {
            return Ok(true);
        };
        rings.sleeps = true;
        // An application that lets so many completions wait has to make room for them before its requests are taken, and one whose requests
        // have piled up waits for the device.
        let takes = self.kept.len() < KEPT_MAX && shared.egress.kept_bytes(self.slot) < INLINE_MAX;
        let mut sleeps = !takes || rings.submissions.prepare_sleep()?;
        if rings.is_full {
            sleeps &= rings.completions.wants_room()?;
        }
        arm(&self.cq, watch);
        sleeps &= rings.ready.prepare_sleep();
        // A completion that came before the queue was armed raises no event.
        let waits = self.drained.is_empty() || !self.kept.is_empty();
        Ok(!self.take_completions(shared, now) && sleeps && waits)
    }

    /// Ends a sleep.
    pub(super) fn awake(&mut self) {
        let Some(rings) = self.rings.as_mut().filter(|rings| rings.sleeps) else {
            return;
        };
        rings.sleeps = false;
        rings.ready.awake();
        // A bit for a ring that does not exist changes nothing: both rings are looked at in each pass.
        let _ = rings.ready.take(|_| {});
        rings.submissions.awake();
        rings.completions.no_longer_waits();
    }
}

/// Returns the request of a piece for the device.
fn request_of(egress: &mut Egress<SendRequest>, piece: &Piece) -> Option<SendRequest> {
    let request = match piece.is_whole() {
        true => egress.take_body(piece),
        false => {
            let part = egress.body(piece);
            let part = part.map(|request| part_of(request, piece.offset, piece.length));
            if piece.last {
                egress.take_body(piece);
            }
            part
        }
    };
    let mut request = request?;
    request.wr_id = piece.id.wr_id();
    request.flags.set(SendFlags::SIGNALED, piece.signaled);
    Some(request)
}

impl Qp {
    /// Puts the queue pair in error.
    pub(super) fn fail(&self, shared: &mut Shared) {
        let sharing = shared.sharing.as_mut();
        if !sharing.is_some_and(|sharing| sharing.fail(Instant::now(), self.qp.qpn())) {
            let _ = self.qp.modify(QpState::Error, &QpAttributes::default());
        }
    }

    /// Puts a queue pair in error whose connection has ended, if it is not one that the device itself has connected.
    pub(super) fn end_external(&mut self, shared: &mut Shared) {
        if shared.sharing.is_some() {
            // The application has ended the connection, or is told that the peer has, which is no failure.
            self.has_ended = true;
            self.fail(shared);
        }
    }

    /// Gives the flow a group of its own, for the queue pair's send queue. Only now is it known to which path and class that belongs: the
    /// queue pair may have been connected by the device.
    fn bind(&mut self, shared: &mut Shared, now: Time, tenant: TenantId) {
        let info = self.qp.query();
        let path = info.as_ref().and_then(|info| info.path.as_ref());
        self.peer = path.map(|path| path.dst);
        let options = GroupOptions {
            class: path.map_or(0, |path| class_of(path.traffic_class)),
            path_mtu: info.as_ref().map_or(0, |info| info.path_mtu),
            depth: self.depth,
            slots: None,
            may_be_quiet: true,
        };
        self.group = shared.egress.add_group(now, tenant, &options);
        if let Some(group) = self.group {
            shared.egress.bind(now, self.flow, group);
        }
    }

    /// Takes the flow off its group: what is posted completes no more.
    pub(super) fn unbind(&mut self, shared: &mut Shared, now: Time) {
        shared.egress.unbind(now, self.flow);
        if let Some(group) = self.group.take() {
            shared.egress.remove_group(group);
        }
    }
}

/// Returns whether an operation counts among the READs and atomic operations that a queue pair may have in flight.
pub(super) fn takes_slot(operation: &Operation) -> bool {
    operation.takes_answer() || matches!(operation, Operation::Flush { .. } | Operation::AtomicWrite { .. })
}

/// Returns the operation of a request on a send queue.
fn operation_of(operation: &WorkOperation) -> Option<(WcOpcode, Operation)> {
    Some(match *operation {
        WorkOperation::Send { imm } | WorkOperation::Datagram { imm, .. } => {
            (WcOpcode::Send, Operation::Send { imm })
        }
        WorkOperation::SendInvalidate { rkey } => (WcOpcode::Send, Operation::SendInvalidate { rkey }),
        WorkOperation::Write { remote, imm } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::Write, Operation::Write { va, rkey, imm })
        }
        WorkOperation::Read { remote } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::Read, Operation::Read { va, rkey })
        }
        WorkOperation::CompareSwap {
            remote,
            compare,
            swap,
        } => {
            let operation = Operation::CompareSwap {
                va: remote.va,
                rkey: remote.rkey,
                compare,
                swap,
            };
            (WcOpcode::CompareSwap, operation)
        }
        WorkOperation::FetchAdd { remote, add } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::FetchAdd, Operation::FetchAdd { va, rkey, add })
        }
        WorkOperation::AtomicWrite { remote } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::AtomicWrite, Operation::AtomicWrite { va, rkey })
        }
        WorkOperation::Flush {
            remote,
            length,
            placement,
            selectivity,
        } => {
            let operation = Operation::Flush {
                va: remote.va,
                rkey: remote.rkey,
                length,
                placement,
                selectivity,
            };
            (WcOpcode::Flush, operation)
        }
        WorkOperation::Recv | WorkOperation::SharedRecv => return None,
    })
}

fn list_of(work: &Work, bytes: &[u8]) -> SgeList {
    let inline = work.inline(bytes);
    if !inline.is_empty() {
        return SgeList::inline(inline);
    }
    let sge = |element: rdmux_wire::node::Element| Sge::new(element.addr, element.length, element.lkey);
    let mut elements = work.elements(bytes);
    match (elements.next(), elements.next()) {
        (None, _) => SgeList::EMPTY,
        (Some(only), None) => sge(only).into(),
        (Some(first), Some(second)) => {
            let all: Vec<Sge> = [first, second].into_iter().chain(elements).map(sge).collect();
            all.as_slice().into()
        }
    }
}

fn flags_of(flags: WorkFlags) -> SendFlags {
    SendFlags::from_bits_truncate(flags.bits().into())
}
