//! WRITEs and READs that need no packet: the peer is on this host and has granted us access to its memory.
//!
//! A grant is only a shortcut. A request is carried out directly when all requests before it are answered, so that none overtakes
//! another. Requests that no grant covers, and all requests after the grant has ended, are sent in packets, and the peer's
//! responder allows or refuses them.

use std::sync::Arc;

use rdmux_wire::RKey;

use super::{Requester, Wqe};
use crate::cq::Status;
use crate::lane::DirectLane;
use crate::memory::{Access, PeerFault, PeerMemory};
use crate::qp::message::{memory_of, opcode_of};
use crate::qp::{Env, Event, Head, QpState, QpType, bare_completion};
use crate::region::Regions;
use crate::work::{Operation, SendFlags, SendRequest, Target};

/// Most regions of a peer for which a QP asks for grants; the QP forgets the oldest first.
const GRANTS_MAX: usize = 64;
/// A request of more bytes waits for those before it instead of being divided into packets.
const WAITS_BYTES: u32 = 4_096;

/// A region of the peer that we may access directly, under the rules for a peer of its QP that uses its key.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The memory.
    pub memory: Arc<dyn PeerMemory>,
    /// Offset in the memory at which the region begins.
    pub memory_offset: u64,
    /// Address of the region's first byte in requests.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Granted rights out of [`Access::REMOTE_WRITE`] and [`Access::REMOTE_READ`].
    pub access: Access,
}

impl Grant {
    /// Returns the offset in the memory at which a request begins, if the grant covers the request.
    #[inline]
    pub(crate) fn offset_of(&self, va: u64, bytes: u32, access: Access) -> Option<u64> {
        let at = va.checked_sub(self.iova)?;
        let limit = self.length + u64::from(mutant!(GrantOffByOne));
        let inside = at.checked_add(bytes.into()).is_some_and(|end| end <= limit);
        (inside && self.access.contains(access)).then(|| self.memory_offset + at)
    }
}

/// Numbers of WRITEs and READs to a peer on this host that were sent in packets, each counted under the first reason that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByPackets {
    /// WRITE with immediate data: it uses up a receive of the peer's.
    pub immediate: u64,
    /// The QP sends at a limited rate.
    pub rate_limited: u64,
    /// The peer had not granted the memory that the request names.
    pub not_granted: u64,
    /// Requests before it were not answered yet.
    pub behind_others: u64,
}

/// Memory that a QP may access directly.
#[derive(Debug, Default)]
pub(super) struct Direct {
    /// Keys for which the QP asked for a grant, with the grant if the peer gave one.
    grants: Vec<(RKey, Option<Grant>)>,
    by_packets: ByPackets,
    /// The way of callers that do without the device, if the driver has asked for it.
    lane: Option<DirectLane>,
}

/// Returns the key, address and right that a request of `bytes` needs at the peer, if a grant could cover it. A request without
/// bytes names no memory, and checks that the peer lives.
#[inline]
pub(crate) fn reaches(operation: &Operation, bytes: u32) -> Option<(RKey, u64, Access)> {
    match *operation {
        _ if bytes == 0 => None,
        Operation::Write { va, rkey, imm: None } => Some((rkey, va, Access::REMOTE_WRITE)),
        Operation::Read { va, rkey } => Some((rkey, va, Access::REMOTE_READ)),
        _ => None,
    }
}

impl Requester {
    /// Forgets all grants: the peer cannot be reached directly.
    pub(crate) fn forget_grants(&mut self) {
        self.direct.grants.clear();
        if let Some(lane) = &self.direct.lane {
            lane.forget_grants();
        }
    }

    pub(crate) fn lane(&self) -> Option<&DirectLane> {
        self.direct.lane.as_ref()
    }

    pub(crate) fn set_lane(&mut self, lane: Option<DirectLane>) {
        self.direct.lane = lane;
    }

    /// Ends the use of the lane by the QP's present connection.
    pub(crate) fn end_lane(&self, regions: &mut Regions) {
        if let Some(lane) = &self.direct.lane {
            lane.clear(regions);
        }
    }

    /// Returns the lane, if it has the requests.
    #[inline]
    pub(crate) fn lane_with_sends(&self) -> Option<&DirectLane> {
        self.direct.lane.as_ref().filter(|lane| lane.has_sends())
    }

    fn forget_grant_in_lane(&self, rkey: RKey) {
        if let Some(lane) = &self.direct.lane {
            lane.forget_grant(rkey);
        }
    }

    /// Makes callers post to the device, because a request is about to wait in the queue.
    pub(crate) fn close_lane_soon(&self) {
        if let Some(lane) = &self.direct.lane {
            lane.close_soon();
        }
    }

    /// Lets callers do without the device, after a request that was carried out directly at once.
    pub(crate) fn open_lane(&self, env: &mut Env<'_>, head: &Head, request: &SendRequest) {
        let Some(lane) = &self.direct.lane else { return };
        let (Some((rkey, ..)), Some((grant, _))) = (
            reaches(&request.operation, 1),
            self.grant_for(&request.operation, 1),
        ) else {
            return;
        };
        // The device is certain to see the other requests, which it makes wait for each other.
        if grant.memory.is_apart() {
            lane.learn_grant(rkey, grant);
            lane.learn(env.regions, head.init.pd, request.sges.as_slice());
            lane.open(self.max_rd_atomic > 0);
        }
    }

    /// Handles the peer's answer to [`Event::WantsGrant`].
    pub(crate) fn set_grant(&mut self, rkey: RKey, grant: Option<Grant>) {
        if let Some(asked) = self.direct.grants.iter_mut().find(|(key, _)| *key == rkey) {
            asked.1 = grant;
            self.forget_grant_in_lane(rkey);
        }
    }

    /// Returns the peer's grants, which the peer may have revoked since.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.direct.grants.iter().filter_map(|(_, grant)| grant.as_ref())
    }

    /// Returns the numbers of requests that were sent in packets although the peer is on this host.
    pub(crate) fn by_packets(&self) -> ByPackets {
        self.direct.by_packets
    }

    /// Counts a request whose first packet is about to be built.
    pub(super) fn count_by_packets(&mut self, env: &mut Env<'_>, head: &Head, wqe: usize) {
        let wqe = &self.queue[wqe];
        let may_be_direct = head.local && head.init.qp_type == QpType::Rc && wqe.bytes > 0;
        if !may_be_direct {
            return;
        }
        let is_granted = self.grant_for(&wqe.request.operation, wqe.bytes).is_some();
        let (own, all) = (&mut self.direct.by_packets, &mut *env.counters);
        let (own, all) = match wqe.request.operation {
            Operation::Write { imm: Some(_), .. } => (&mut own.immediate, &mut all.by_packets_immediate),
            Operation::Write { .. } | Operation::Read { .. } => {
                if head.rate.is_limited() {
                    (&mut own.rate_limited, &mut all.by_packets_rate_limited)
                } else if is_granted {
                    (&mut own.behind_others, &mut all.by_packets_behind_others)
                } else {
                    (&mut own.not_granted, &mut all.by_packets_not_granted)
                }
            }
            _ => return,
        };
        *own += 1;
        *all += 1;
    }

    /// Asks the peer, once for each key, for a grant of the memory that a request names.
    pub(super) fn ask(&mut self, env: &mut Env<'_>, head: &Head, request: &SendRequest, bytes: u32) {
        if !head.local || head.init.qp_type != QpType::Rc {
            return;
        }
        let Some((rkey, ..)) = reaches(&request.operation, bytes) else {
            return;
        };
        if self.direct.grants.iter().any(|(key, _)| *key == rkey) {
            return;
        }
        if self.direct.grants.len() == GRANTS_MAX {
            let (oldest, _) = self.direct.grants.remove(0);
            self.forget_grant_in_lane(oldest);
        }
        self.direct.grants.push((rkey, None));
        env.events.push_back(Event::WantsGrant(head.qpn, rkey));
    }

    /// Returns the grant that covers a request, and the offset in its memory at which the request begins.
    fn grant_for(&self, operation: &Operation, bytes: u32) -> Option<(&Grant, u64)> {
        let (rkey, va, access) = reaches(operation, bytes)?;
        let asked = self.direct.grants.iter().find(|(key, _)| *key == rkey)?;
        let grant = asked.1.as_ref()?;
        Some((grant, grant.offset_of(va, bytes, access)?))
    }

    /// Returns whether the request at the cursor is to be carried out directly: `Some(true)` now, `Some(false)` when those before
    /// it are done.
    pub(super) fn directly(&self, head: &Head) -> Option<bool> {
        if self.direct.grants.is_empty() || head.rate.is_limited() {
            return None;
        }
        let wqe = self.queue.get(self.cursor.wqe)?;
        if wqe.first.is_some() || self.cursor.packet > 0 {
            return None;
        }
        self.grant_for(&wqe.request.operation, wqe.bytes)?;
        if self.cursor.wqe == 0 {
            return Some(true);
        }
        // Packets would make later requests wait for packets too: wait once, if all are carried out directly from then on.
        let covered = |wqe: &Wqe| self.grant_for(&wqe.request.operation, wqe.bytes).is_some();
        let waits = wqe.bytes > WAITS_BYTES || self.queue.iter().take(self.cursor.wqe).all(covered);
        waits.then_some(false)
    }

    /// Returns whether a request that is posted now may be carried out directly.
    #[inline]
    pub(crate) fn may_go_directly(&self) -> bool {
        !self.direct.grants.is_empty() && self.queue.is_empty()
    }

    /// Carries out a request at once, if no request is before it; returns false if the caller must queue it instead.
    #[inline]
    pub(crate) fn post_directly(&mut self, env: &mut Env<'_>, head: &Head, request: &SendRequest) -> bool {
        let is_plain = match request.operation {
            Operation::Write { imm: None, .. } => true,
            Operation::Read { .. } => self.max_rd_atomic > 0,
            _ => false,
        };
        let may = request.to == Target::Connected && head.init.max_send_wr > 0;
        let begins = head.state == QpState::Rts;
        if !is_plain || !may || !begins || !head.rate.is_free() {
            return false;
        }
        // The code that queues a request refuses an invalid one.
        let Ok(bytes) = request.check() else { return false };
        if self.reach(env, head, request, bytes) != Some(Ok(())) {
            // A failure of own memory occurs again when the request is executed in order, and is reported then.
            return false;
        }
        probe!(post_direct, head.qpn.value(), request.wr_id, bytes);
        if request.flags.contains(SendFlags::SIGNALED) {
            let opcode = opcode_of(&request.operation);
            let mut wc = bare_completion(head.qpn, request.wr_id, Status::Success, opcode);
            wc.byte_len = bytes;
            env.complete(head.init.send_cq, wc, false);
        }
        true
    }

    /// Carries out the request at the cursor, the oldest, directly. If the grant has ended, the request is sent in packets.
    pub(super) fn do_direct(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Status> {
        let Some(wqe) = self.queue.pop_front() else {
            return Ok(());
        };
        let done = self.reach(env, head, &wqe.request, wqe.bytes);
        self.queue.push_front(wqe);
        match done {
            Some(Ok(())) => {
                self.complete_oldest(env, head);
                self.complete_local(env, head);
                self.tell_drained(env, head);
                Ok(())
            }
            Some(Err(status)) => Err(status),
            None => Ok(()),
        }
    }

    /// Carries out a request in the peer's memory. Returns `None` if no valid grant covers it.
    fn reach(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: &SendRequest,
        bytes: u32,
    ) -> Option<Result<(), Status>> {
        let (grant, mut at) = self.grant_for(&request.operation, bytes)?;
        // The accesses by one grant come one after another, those of the lane's first part too.
        let alone = self.direct.lane.as_ref().map(DirectLane::lock_first);
        let memory = &*grant.memory;
        let writes = matches!(request.operation, Operation::Write { .. });
        let access = if writes {
            Access::empty()
        } else {
            Access::LOCAL_WRITE
        };
        let mut outcome = Ok(());
        if let Some(inline) = request.sges.as_inline() {
            outcome = memory.write_bytes(at, inline);
        }
        for sge in request.sges.as_slice().iter().filter(|sge| sge.length > 0) {
            let (own, begin) = match memory_of(env, head.init.pd, sge, access) {
                Ok(found) => found,
                Err(status) => return Some(Err(status)),
            };
            let length = u64::from(sge.length);
            outcome = if writes {
                memory.write(at, &**own, begin, length)
            } else {
                memory.read(at, &**own, begin, length)
            };
            if outcome.is_err() {
                break;
            }
            at += length;
        }
        drop(alone);
        match outcome {
            Err(PeerFault::Ended) if mutant!(EndedIsDone) => Some(Ok(())),
            Ok(()) => {
                env.counters.direct_requests += 1;
                env.counters.direct_bytes += u64::from(bytes);
                Some(Ok(()))
            }
            Err(PeerFault::Own(_)) => Some(Err(Status::LocalQpOperation)),
            Err(PeerFault::Ended) => {
                let (rkey, ..) = reaches(&request.operation, bytes)?;
                // The peer may grant the memory again, for instance after a change of its QP's rights.
                self.direct.grants.retain(|(key, _)| *key != rkey);
                self.forget_grant_in_lane(rkey);
                None
            }
        }
    }
}

/// A region of ours that a peer may be granted.
#[derive(Clone, Debug)]
pub struct Grantable {
    /// The region's memory. The other fields are those of a [`Grant`].
    pub memory: Arc<dyn crate::memory::Memory>,
    /// Offset in the memory at which the region begins.
    pub memory_offset: u64,
    /// Address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// The region's key.
    pub lkey: rdmux_wire::LKey,
}

/// Reason for which a peer is not granted a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotGranted {
    /// There is no such QP, or it takes no requests now.
    NoQp,
    /// The key belongs to no region of the QP's domain, or to a window or a region that work requests fill: the invalidation of
    /// these must take effect at once.
    NoRegion,
}
