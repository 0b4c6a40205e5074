//! The send queues of all applications of a node, and the scheduler that takes pieces of requests out of them.
//!
//! A *flow* is an application's queue pair: the requests that were accepted and are not complete, in their order. A *group* stands for a send
//! queue of the device, into which the pieces of its flows go in the order in which they are picked; that of a flow alone, or one that flows
//! share. Whatever is posted to the device is sent in the device's order, so the scheduler ([`Hierarchy`]) decides only about what
//! waits here: the device gets as much as its paths carry, and no more ([`Window`](rdmux_rnic::sched::Window), for each group, and
//! [`DeviceWindow`] for all of them).
//!
//! [`Egress`] is a pure state machine: it neither posts nor reads a clock, and knows of a request only what [`Request`] says. The caller
//! - [submits](Egress::submit) requests, with a body of its own that says what is to be posted;
//! - takes pieces by [`Egress::next`] as long as there are any, and posts each at once to the send queue of the piece's group, with the
//!   piece's id as the number of the request, and with a completion if the piece is signaled;
//! - reports what the device completes ([`Egress::completed`], [`Egress::failed`]), in the order of the group;
//! - passes what [`Egress::poll_done`] returns on to the applications: one [`Done`] for each request that asks for a completion or does
//!   not succeed, in the order of its flow.
//!
//! As on a queue pair of its own, a flow whose request has failed sends no more; what it has left is flushed once all its pieces are back.
//!
//! No call does more than a constant amount of work and allocates in the long run, apart from those that end a flow or a group.

mod flow;
mod group;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use rdmux_rnic::sched::{
    self, DeviceLimits, DeviceWindow, Entitlement, Hierarchy, Quanta, TenantId, WindowLimits,
};
use rdmux_rnic::{Status, Time, WcOpcode};

use super::snapshot::Counts;
use super::table::Table;
use flow::{Bound, Entry, Flow};
use group::{Group, Posted};

pub(super) use group::GroupOptions;

/// Bits of the ids of flows and groups that say where they are: each queue pair of each application can have one.
const SLOT_BITS: u32 = 21;
/// Flows and groups of a node.
const FLOWS_MAX: usize = 1 << SLOT_BITS;

/// Bytes that a piece counts for at least: its headers. [`Limits`] has those for the work that it costs.
const CHARGE_MIN: u32 = 64;

/// Largest path MTU.
const PATH_MTU_MAX: u32 = 4096;

/// Names a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FlowId(u32);

/// Names a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupId(u32);

/// Number of a piece among the requests that a send queue of the device has: the group, and the piece's place in it. No other piece of the
/// group has that number before 2^31 more have been posted, and hardly one of another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PieceId {
    group: GroupId,
    place: u32,
}

/// Bit of a number of a request that makes it that of a piece.
const PIECE_BIT: u64 = 1 << 63;
/// Bits of the place of a piece.
const PLACE_BITS: u32 = 31;

impl PieceId {
    /// Returns the number of the request that posts the piece.
    pub(super) fn wr_id(self) -> u64 {
        PIECE_BIT | u64::from(self.group.0) << PLACE_BITS | u64::from(self.place)
    }

    /// Returns the piece that a request of this number posts; `None` if it is another request.
    pub(super) fn of_wr_id(wr_id: u64) -> Option<PieceId> {
        (wr_id & PIECE_BIT != 0).then_some(PieceId {
            group: GroupId((wr_id >> PLACE_BITS) as u32),
            place: (wr_id & ((1 << PLACE_BITS) - 1)) as u32,
        })
    }
}

/// Queue pair to which a flow belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// The application.
    pub(super) application: u32,
    /// The application's queue pair.
    pub(super) qp: u32,
}

/// A request, as far as the scheduler knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Number that its completion returns.
    pub(super) number: u64,
    /// Kind.
    pub(super) opcode: WcOpcode,
    /// Bytes of the message.
    pub(super) length: u32,
    /// Bytes of the message that the node keeps until it has posted them: those of data inline.
    pub(super) kept_bytes: u32,
    /// Set if it completes also on success.
    pub(super) asks: bool,
    /// Set if it may be posted in pieces.
    pub(super) cuts: bool,
    /// Set if each piece of it takes one of the group's slots for READs and atomic operations.
    pub(super) takes_slot: bool,
    /// The status with which it completes when its turn comes, if it cannot be posted.
    pub(super) refused: Option<Status>,
}

/// A piece of a request, to be posted at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a piece is posted, or given back by `Egress::refused`"]
pub(super) struct Piece {
    /// Its number on the send queue.
    pub(super) id: PieceId,
    /// Its group, which stands for the send queue.
    pub(super) group: GroupId,
    /// Its flow.
    pub(super) flow: FlowId,
    /// The flow's queue pair.
    pub(super) owner: Owner,
    /// Where it begins in the message.
    pub(super) offset: u32,
    /// Bytes.
    pub(super) length: u32,
    /// Set for the last piece of its request; the first one begins at 0.
    pub(super) last: bool,
    /// Set if the device is to complete it also on success.
    pub(super) signaled: bool,
    /// Place of its request in the flow.
    entry: u32,
}

impl Piece {
    /// Returns whether it is all of its request.
    pub(super) fn is_whole(&self) -> bool {
        self.offset == 0 && self.last
    }
}

/// A request that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    /// The queue pair.
    pub(super) owner: Owner,
    /// Number of the request.
    pub(super) number: u64,
    /// Kind.
    pub(super) opcode: WcOpcode,
    /// Outcome.
    pub(super) status: Status,
    /// Bytes of the message, after a success.
    pub(super) length: u32,
}

/// Answer of a [`Gate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It may be posted; if it may be cut, in pieces of at most so many bytes.
    Post(u32),
    /// It may be posted in pieces of at most so many bytes, even if it could not be cut on a queue pair of its own.
    Cut(u32),
    /// It lacks something: the flow sends nothing until [`Egress::release`].
    Hold,
    /// It fails with this status, once those before it are complete, and those behind it are flushed.
    Refuse(Status),
}

/// Decides whether a request may be posted now: what it needs of its receiver, such as credits and keys, is known to the caller alone.
pub(super) trait Gate<B> {
    /// Decides about a piece of a flow's next request that begins at `offset`.
    fn admit(&mut self, flow: FlowId, request: &Request, body: &B, offset: u32) -> Admission;
}

/// Lets everything be posted.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Open;

#[cfg(test)]
impl<B> Gate<B> for Open {
    fn admit(&mut self, _flow: FlowId, _request: &Request, _body: &B, _offset: u32) -> Admission {
        Admission::Post(u32::MAX)
    }
}

/// Sizes of a scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Turns.
    pub(super) quanta: Quanta,
    /// Bytes in flight of each group.
    pub(super) windows: WindowLimits,
    /// Bytes in flight of all groups.
    pub(super) device: DeviceLimits,
    /// Set if pieces of a flow that may have little to send are long: the device sends the packets of a piece together, in less time than
    /// those of several. Windows that are measured need pieces of equal length.
    pub(super) long_pieces: bool,
    /// Bytes for which a piece counts at least.
    pub(super) piece_bytes_min: u32,
}

/// A flow has as many requests as it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// See the module.
#[derive(Debug)]
pub(super) struct Egress<B> {
    hierarchy: Hierarchy<FlowId>,
    flows: Table<Flow<B>, SLOT_BITS>,
    groups: Table<Group, SLOT_BITS>,
    windows: WindowLimits,
    /// Without it, the window of each group would decide what the group gets, and not the hierarchy.
    device: DeviceWindow,
    long_pieces: bool,
    piece_bytes_min: u32,
    done: VecDeque<Done>,
    /// Bytes of requests that are kept, for each application.
    kept_bytes: Vec<u64>,
    /// Bytes and requests that each application has moved.
    counts: Vec<Counts>,
}

impl<B> Egress<B> {
    /// Returns one without tenants.
    pub(super) fn new(now: Time, limits: Limits) -> Egress<B> {
        Egress {
            hierarchy: Hierarchy::new(limits.quanta),
            flows: Table::new(FLOWS_MAX),
            groups: Table::new(FLOWS_MAX),
            windows: limits.windows,
            device: DeviceWindow::new(now, limits.device),
            long_pieces: limits.long_pieces,
            piece_bytes_min: limits.piece_bytes_min.max(CHARGE_MIN),
            done: VecDeque::new(),
            kept_bytes: Vec::new(),
            counts: Vec::new(),
        }
    }

    /// Adds a tenant.
    pub(super) fn add_tenant(&mut self, entitlement: &Entitlement) -> TenantId {
        self.hierarchy.add_tenant(entitlement)
    }

    /// Changes what a tenant is entitled to.
    pub(super) fn set_tenant(&mut self, now: Time, tenant: TenantId, entitlement: &Entitlement) {
        self.hierarchy.set_tenant(now, tenant, entitlement);
    }

    /// Returns how many flows of a tenant wait to be sent.
    pub(super) fn waiting(&self, tenant: TenantId) -> u32 {
        self.hierarchy.waiting(tenant)
    }

    /// Returns whether a tenant has a group.
    pub(super) fn has_groups(&self, tenant: TenantId) -> bool {
        self.hierarchy.has_groups(tenant)
    }

    /// Removes a tenant, all of whose groups have been removed.
    ///
    /// # Panics
    /// When the tenant has a group.
    pub(super) fn remove_tenant(&mut self, tenant: TenantId) {
        self.hierarchy.remove_tenant(tenant);
    }

    /// Sets the rate, in bits per second, that all tenants together do not exceed; `None`: there is none.
    pub(super) fn set_rate(&mut self, now: Time, rate_bps: Option<u64>) {
        self.hierarchy.set_rate(now, rate_bps);
    }

    /// Moves a group of a single flow to another tenant. What is posted to its send queue stays there. Does nothing if READs have slots of the
    /// group, as where flows share the send queue.
    pub(super) fn move_group(&mut self, now: Time, group: GroupId, flow: FlowId, tenant: TenantId) {
        let Some(moving) = self.groups.get(group.0).filter(|moving| !moving.has_slots) else {
            return;
        };
        let Some(to) = self.hierarchy.add_group(tenant, moving.class) else {
            return;
        };
        self.unbind(now, flow);
        if let Some(moving) = self.groups.get_mut(group.0) {
            let from = std::mem::replace(&mut moving.id, to);
            self.hierarchy.remove_group(from);
        }
        self.reopen(now, group);
        self.bind(now, flow, group);
    }

    /// Adds a group of a tenant, for a send queue of the device that is empty; `None` if there is no such tenant, or no room.
    pub(super) fn add_group(
        &mut self,
        now: Time,
        tenant: TenantId,
        options: &GroupOptions,
    ) -> Option<GroupId> {
        if !self.groups.has_room() {
            return None;
        }
        let group = self.hierarchy.add_group(tenant, options.class)?;
        if let Some(slots) = options.slots {
            self.hierarchy.add_slots(now, group, slots);
        }
        let group = Group::new(now, group, options, self.windows);
        self.groups.insert(group).map(GroupId)
    }

    /// Removes a group, no flow of which is bound. What is posted to its send queue completes no more.
    ///
    /// # Panics
    /// When a flow is bound to it.
    pub(super) fn remove_group(&mut self, group: GroupId) {
        let Some(removed) = self.groups.remove(group.0) else {
            return;
        };
        self.hierarchy.remove_group(removed.id);
        for posted in removed.posted {
            if let Some((_, of_device)) = posted.in_flight {
                self.device.lost(of_device);
            }
            if self.came_back(posted.flow).is_some() {
                self.flush_if_over(posted.flow);
            }
        }
    }

    /// Adds a flow with at most `requests_max` requests; `None` if there is no room. Its requests wait until it is bound.
    pub(super) fn add_flow(&mut self, owner: Owner, requests_max: u32) -> Option<FlowId> {
        let flow = Flow::new(owner, requests_max);
        let id = self.flows.insert(flow)?;
        let application = owner.application as usize;
        if application >= self.kept_bytes.len() {
            self.kept_bytes.resize(application + 1, 0);
            self.counts.resize(application + 1, Counts::default());
        }
        Some(FlowId(id))
    }

    /// Returns the number of flows, with those that are removed and have pieces in flight.
    pub(super) fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Removes a flow with its requests, none of which completes.
    pub(super) fn remove_flow(&mut self, now: Time, flow: FlowId) {
        self.unbind(now, flow);
        self.forget_requests(flow);
        if let Some(removed) = self.flows.get_mut(flow.0) {
            removed.is_removed = true;
            // A later flow must not take this one's pieces for its own.
            if removed.in_flight == 0 {
                self.flows.remove(flow.0);
            }
        }
    }

    /// Accounts for a piece that has come back. Returns its flow, unless that is removed.
    fn came_back(&mut self, flow: FlowId) -> Option<&mut Flow<B>> {
        let state = self.flows.get_mut(flow.0)?;
        state.in_flight -= 1;
        if state.is_removed {
            if state.in_flight == 0 {
                self.flows.remove(flow.0);
            }
            return None;
        }
        self.flows.get_mut(flow.0)
    }

    /// Has the pieces of a flow go into a group from now on. All that went into another one have come back, or will not.
    pub(super) fn bind(&mut self, now: Time, flow: FlowId, group: GroupId) {
        self.unbind(now, flow);
        let (Some(bound), Some(of)) = (self.flows.get_mut(flow.0), self.groups.get(group.0)) else {
            return;
        };
        if let Some(connection) = self.hierarchy.add_connection(of.id, flow) {
            bound.bound = Some(Bound { group, connection });
            self.wake(now, flow);
        }
    }

    /// Has a flow wait until it is bound again.
    pub(super) fn unbind(&mut self, now: Time, flow: FlowId) {
        if let Some(bound) = self.flows.get_mut(flow.0).and_then(|flow| flow.bound.take()) {
            self.hierarchy.remove_connection(now, bound.connection);
        }
    }

    /// Accepts a request of a flow. One of a flow that has failed is flushed.
    ///
    /// # Errors
    /// The flow has as many requests as it may have.
    pub(super) fn submit(&mut self, now: Time, flow: FlowId, request: Request, body: B) -> Result<(), Full> {
        let Some(into) = self.flows.get_mut(flow.0) else {
            return Ok(());
        };
        if into.entries.len() >= into.requests_max as usize {
            return Err(Full);
        }
        let entry = Entry {
            request,
            body: Some(body),
            posted_bytes: 0,
            submitted: now,
        };
        for counts in [
            &mut into.counts,
            &mut self.counts[into.owner.application as usize],
        ] {
            counts.waiting_requests += 1;
            counts.waiting_bytes += u64::from(request.length);
        }
        if request.kept_bytes > 0 {
            self.kept_bytes[into.owner.application as usize] += u64::from(request.kept_bytes);
        }
        into.entries.push_back(entry);
        if into.failed {
            self.flush_if_over(flow);
        } else if into.entries.len() == into.posted as usize + 1 {
            self.wake(now, flow);
        }
        Ok(())
    }

    /// Returns the bytes that are kept for requests of an application.
    pub(super) fn kept_bytes(&self, application: u32) -> u64 {
        self.kept_bytes.get(application as usize).copied().unwrap_or(0)
    }

    /// Returns the piece to post next, or `None` if nothing waits that may be posted now.
    pub(super) fn next(&mut self, now: Time, gate: &mut impl Gate<B>) -> Option<Piece> {
        self.device.advance(now);
        if !self.device.is_open(self.piece_bytes(now, PATH_MTU_MAX)) {
            return None;
        }
        loop {
            let turn = self.hierarchy.pick(now)?;
            let id = turn.id;
            // Flows that are removed leave the hierarchy.
            let flow = self.flows.get_mut(id.0)?;
            let bound = flow.bound?;
            let group = self.groups.get_mut(bound.group.0)?;
            if !flow.may_send() {
                // A slot was kept for it that it needs no more.
                self.hierarchy.end(now, turn, 0, false);
                continue;
            }
            let at = flow.posted;
            let entry = &mut flow.entries[at as usize];
            let (request, offset) = (entry.request, entry.posted_bytes);
            let admission = match (&entry.body, request.refused) {
                (Some(body), None) => gate.admit(id, &request, body, offset),
                (_, refused) => Admission::Refuse(refused.unwrap_or(Status::LocalQpOperation)),
            };
            let (admitted, cuts) = match admission {
                Admission::Post(longest) => (longest.max(1), request.cuts),
                Admission::Cut(longest) => (longest.max(1), true),
                Admission::Hold => {
                    flow.held = true;
                    self.hierarchy.end(now, turn, 0, false);
                    continue;
                }
                Admission::Refuse(status) => {
                    entry.request.refused = Some(status);
                    self.hierarchy.end(now, turn, 0, false);
                    self.fail(now, id);
                    continue;
                }
            };
            let takes_slot = group.has_slots && request.takes_slot;
            if takes_slot && !self.hierarchy.take_slot(now, turn.connection) {
                self.hierarchy.end(now, turn, 0, true);
                continue;
            }
            let rest = request.length - offset;
            let piece_bytes = sched::piece_bytes(now, self.hierarchy.sparse_seen(), group.path_mtu);
            let longest = match self.long_pieces {
                true => sched::piece_bytes(now, turn.sparse_seen, group.path_mtu),
                false => piece_bytes,
            };
            let length = match cuts {
                true => rest.min(longest).min(admitted),
                false => rest,
            };
            let last = length == rest;
            entry.posted_bytes += length;
            let place = flow.first.wrapping_add(at);
            flow.posted += u32::from(last);
            flow.in_flight += 1;
            let more = (flow.posted as usize) < flow.entries.len();
            let charge = length.max(self.piece_bytes_min);
            let posted = Posted {
                flow: id,
                entry: place,
                last,
                takes_slot,
                in_flight: None,
            };
            let asks = last && request.asks;
            let (of_group, signaled) = group.post(now, posted, charge, asks, piece_bytes, &mut self.device);
            let (group_id, opens) = (group.id, group.takes(piece_bytes));
            self.hierarchy.end(now, turn, charge, more);
            if !opens {
                self.hierarchy.set_open(now, group_id, false);
            }
            return Some(Piece {
                id: PieceId {
                    group: bound.group,
                    place: of_group,
                },
                group: bound.group,
                flow: id,
                owner: flow.owner,
                offset,
                length,
                last,
                signaled,
                entry: place,
            });
        }
    }

    /// Returns the body of the request of a piece that was just taken.
    pub(super) fn body(&self, piece: &Piece) -> Option<&B> {
        self.flows.get(piece.flow.0)?.entry(piece.entry)?.body.as_ref()
    }

    /// Returns and forgets the body of the request whose last piece was just taken.
    pub(super) fn take_body(&mut self, piece: &Piece) -> Option<B> {
        let flow = self.flows.get_mut(piece.flow.0)?;
        let owner = flow.owner;
        let entry = flow.entry_mut(piece.entry)?;
        let kept = std::mem::take(&mut entry.request.kept_bytes);
        if kept > 0 {
            self.kept_bytes[owner.application as usize] -= u64::from(kept);
        }
        entry.body.take()
    }

    /// Takes back the pieces of a group that were taken last, in their order, since they could not be posted. The request of the first one fails with
    /// `status`, after those before it, and its flow with it.
    pub(super) fn refused(&mut self, now: Time, pieces: &[Piece], status: Status) {
        // The group takes back only its last one.
        for piece in pieces.iter().rev() {
            let Some(group) = self.groups.get_mut(piece.group.0) else {
                return;
            };
            let Some(posted) = group.take_back(piece.id.place) else {
                return;
            };
            if let Some(in_flight) = posted.in_flight {
                group.lost(in_flight, &mut self.device);
            }
            if posted.takes_slot {
                let group = group.id;
                self.hierarchy.return_slot(now, group);
            }
            self.reopen(now, piece.group);
            self.came_back(piece.flow);
        }
        let Some(first) = pieces.first() else { return };
        let flow = self.flows.get_mut(first.flow.0);
        if let Some(entry) = flow.and_then(|flow| flow.entry_mut(first.entry)) {
            entry.request.refused = Some(status);
            self.fail(now, first.flow);
        }
    }

    /// Accounts for a piece that the device has completed, and for all before it in its group.
    pub(super) fn completed(&mut self, now: Time, piece: PieceId) {
        self.settle(now, piece, Status::Success);
    }

    /// Accounts for a piece that has failed, or was flushed because the send queue has failed. All before it in its group are complete.
    pub(super) fn failed(&mut self, now: Time, piece: PieceId, status: Status) {
        self.settle(now, piece, status);
    }

    fn settle(&mut self, now: Time, piece: PieceId, outcome: Status) {
        let Some(group) = self.groups.get_mut(piece.group.0) else {
            return;
        };
        let Some(count) = group.count_through(piece.place) else {
            return;
        };
        for left in (0..count).rev() {
            let Some(group) = self.groups.get_mut(piece.group.0) else {
                return;
            };
            let Some(posted) = group.take_first() else { return };
            let status = if left == 0 { outcome } else { Status::Success };
            if let Some(in_flight) = posted.in_flight {
                match status {
                    Status::Success => {
                        let sparse_seen = self.hierarchy.sparse_seen();
                        let piece_bytes = sched::piece_bytes(now, sparse_seen, group.path_mtu);
                        group.completed(now, in_flight, piece_bytes, &mut self.device);
                    }
                    _ => group.lost(in_flight, &mut self.device),
                }
            }
            let group = group.id;
            if posted.takes_slot {
                self.hierarchy.return_slot(now, group);
            }
            self.settle_piece(now, &posted, status);
        }
        self.reopen(now, piece.group);
    }

    fn settle_piece(&mut self, now: Time, posted: &Posted, status: Status) {
        let Some(flow) = self.came_back(posted.flow) else {
            return;
        };
        // The request may be over, because an earlier piece of it has failed, or because the flow was reset.
        if flow.entry(posted.entry).is_some() && (posted.last || status != Status::Success) {
            let owner = flow.owner;
            if let Some(entry) = flow.pop() {
                let is_timed = status == Status::Success && entry.request.asks;
                let latency_ns = is_timed.then(|| now.since_ns(entry.submitted));
                flow.counts.ended(&entry.request, status, latency_ns);
                self.end(owner, &entry, status, latency_ns);
            }
            if status != Status::Success {
                return self.fail(now, posted.flow);
            }
        }
        self.flush_if_over(posted.flow);
    }

    /// Ends a request, which its flow has counted.
    fn end(&mut self, owner: Owner, entry: &Entry<B>, status: Status, latency_ns: Option<u64>) {
        let request = &entry.request;
        self.counts[owner.application as usize].ended(request, status, latency_ns);
        if request.kept_bytes > 0 {
            self.kept_bytes[owner.application as usize] -= u64::from(request.kept_bytes);
        }
        let succeeded = status == Status::Success;
        if request.asks || !succeeded {
            self.done.push_back(Done {
                owner,
                number: request.number,
                opcode: request.opcode,
                status: request.refused.filter(|_| !succeeded).unwrap_or(status),
                length: if succeeded { request.length } else { 0 },
            });
        }
    }

    /// Flushes the requests of a flow that has failed, once no piece of it is in flight.
    fn flush_if_over(&mut self, flow: FlowId) {
        loop {
            let Some(over) = self.flows.get_mut(flow.0) else {
                return;
            };
            if !over.failed || over.in_flight > 0 {
                return;
            }
            let owner = over.owner;
            let Some(entry) = over.pop() else { return };
            over.counts.ended(&entry.request, Status::Flushed, None);
            self.end(owner, &entry, Status::Flushed, None);
        }
    }

    /// Ends the requests of a flow, whose queue pair is in Error: those in flight as the device completes them, the others as flushed.
    pub(super) fn fail(&mut self, now: Time, flow: FlowId) {
        let Some(failing) = self.flows.get_mut(flow.0) else {
            return;
        };
        if !std::mem::replace(&mut failing.failed, true) {
            self.withdraw(now, flow);
        }
        self.flush_if_over(flow);
    }

    /// Has a flow go on whose queue pair sends again: from SQD, or from SQE.
    pub(super) fn resume(&mut self, now: Time, flow: FlowId) {
        if let Some(resumed) = self.flows.get_mut(flow.0) {
            (resumed.paused, resumed.failed) = (false, false);
            self.wake(now, flow);
        }
    }

    /// Has a flow begin no more pieces until it is [resumed](Egress::resume): its queue pair is in SQD.
    pub(super) fn pause(&mut self, now: Time, flow: FlowId) {
        if let Some(paused) = self.flows.get_mut(flow.0) {
            paused.paused = true;
            self.withdraw(now, flow);
        }
    }

    /// Has a flow wait no more, neither for its turn nor for a slot.
    fn withdraw(&mut self, now: Time, flow: FlowId) {
        if let Some(flow_state) = self.flows.get_mut(flow.0)
            && let Some(bound) = flow_state.bound.take()
            && let Some(group) = self.groups.get(bound.group.0)
        {
            self.hierarchy.remove_connection(now, bound.connection);
            let connection = self.hierarchy.add_connection(group.id, flow);
            flow_state.bound = connection.map(|connection| Bound { connection, ..bound });
        }
    }

    /// Has a flow go on that a [`Gate`] has stopped.
    pub(super) fn release(&mut self, now: Time, flow: FlowId) {
        if let Some(released) = self.flows.get_mut(flow.0)
            && std::mem::take(&mut released.held)
        {
            self.wake(now, flow);
        }
    }

    /// Forgets the requests of a flow, none of which completes, and what its queue pair was in: it was reset.
    pub(super) fn reset(&mut self, now: Time, flow: FlowId) {
        self.unbind(now, flow);
        self.forget_requests(flow);
        if let Some(reset) = self.flows.get_mut(flow.0) {
            (reset.failed, reset.paused, reset.held) = (false, false, false);
        }
    }

    fn forget_requests(&mut self, flow: FlowId) {
        let Some(flow) = self.flows.get_mut(flow.0) else {
            return;
        };
        let owner = flow.owner;
        while let Some(entry) = flow.pop() {
            self.kept_bytes[owner.application as usize] -= u64::from(entry.request.kept_bytes);
            for counts in [&mut flow.counts, &mut self.counts[owner.application as usize]] {
                counts.left(&entry.request);
            }
        }
        self.done.retain(|done| done.owner != owner);
    }

    /// Returns a request that is over, in the order of its flow.
    pub(super) fn poll_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// As [`Egress::poll_done`], if the request is of this application.
    pub(super) fn poll_done_of(&mut self, application: u32) -> Option<Done> {
        let of_it = self.done.front()?.owner.application == application;
        if of_it { self.done.pop_front() } else { None }
    }

    /// Counts a receive that is over.
    pub(super) fn received(&mut self, flow: FlowId, status: Status, bytes: u32) {
        let Some(flow) = self.flows.get_mut(flow.0) else {
            return;
        };
        for counts in [
            &mut flow.counts,
            &mut self.counts[flow.owner.application as usize],
        ] {
            match status {
                Status::Success => {
                    counts.receives += 1;
                    counts.received_bytes += u64::from(bytes);
                }
                _ => counts.errors += 1,
            }
        }
    }

    /// Begins to count for an application that has no flows yet.
    pub(super) fn begin_counts(&mut self, application: u32) {
        if let Some(counts) = self.counts.get_mut(application as usize) {
            *counts = Counts::default();
        }
    }

    /// Returns what an application has moved.
    pub(super) fn counts_of(&self, application: u32) -> Counts {
        self.counts.get(application as usize).copied().unwrap_or_default()
    }

    /// Returns what a flow has moved, and the class of the group that it is bound to.
    pub(super) fn state_of(&self, flow: FlowId) -> Option<(Counts, Option<usize>)> {
        let flow = self.flows.get(flow.0)?;
        let group = flow.bound.and_then(|bound| self.groups.get(bound.group.0));
        Some((flow.counts, group.map(|group| group.class)))
    }

    /// Returns the class of a group, the bytes that it has in flight, and those that it may have.
    pub(super) fn state_of_group(&self, now: Time, group: GroupId) -> Option<(usize, u64, u64)> {
        let group = self.groups.get(group.0)?;
        let (in_flight, window) = group.window(self.piece_bytes(now, group.path_mtu));
        Some((group.class, in_flight, window))
    }

    /// Returns when to ask for a piece again if there is none now; `None`: once something is submitted or completed.
    pub(super) fn next_time(&mut self, now: Time) -> Option<Time> {
        let is_open = self.device.is_open(self.piece_bytes(now, PATH_MTU_MAX));
        let of_device = (!is_open).then(|| self.device.next_time());
        let of_tenants = self.hierarchy.next_time();
        of_device.into_iter().chain(of_tenants).min()
    }

    /// Returns whether a flow that may have little to send has begun to send lately: others make room for it.
    pub(super) fn is_beside_short(&self, now: Time) -> bool {
        self.piece_bytes(now, 1) == sched::PIECE_BYTES_SHARED
    }

    fn piece_bytes(&self, now: Time, path_mtu: u32) -> u32 {
        sched::piece_bytes(now, self.hierarchy.sparse_seen(), path_mtu)
    }

    /// Has the hierarchy know that a flow has something to send, if that is so.
    fn wake(&mut self, now: Time, flow: FlowId) {
        if let Some(flow) = self.flows.get(flow.0)
            && flow.may_send()
            && let Some(bound) = flow.bound
        {
            self.hierarchy.wake(now, bound.connection);
        }
    }

    /// Opens or shuts a group after its window has changed.
    fn reopen(&mut self, now: Time, group: GroupId) {
        if let Some(group) = self.groups.get(group.0) {
            let bytes = self.piece_bytes(now, group.path_mtu);
            self.hierarchy.set_open(now, group.id, group.takes(bytes));
        }
    }
}

impl Counts {
    /// Counts a request that is over.
    fn ended(&mut self, request: &Request, status: Status, latency_ns: Option<u64>) {
        self.left(request);
        match status {
            Status::Success => {
                self.requests += 1;
                self.bytes += u64::from(request.length);
            }
            _ => self.errors += 1,
        }
        if let Some(ns) = latency_ns {
            self.latency.record(ns);
        }
    }

    /// Takes a request out of those that wait.
    fn left(&mut self, request: &Request) {
        self.waiting_requests -= 1;
        self.waiting_bytes -= u64::from(request.length);
    }
}
