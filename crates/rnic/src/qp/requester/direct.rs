//! WRITEs and READs that need no packet: the peer is on this host and has granted us its memory.
//!
//! A grant is only a shorter way. Such a request is done when everything before it is answered, so that nothing overtakes
//! anything; what a grant does not cover, and every request when it has ended, goes by packets, and it is the peer's responder
//! that allows or refuses it.

use std::sync::Arc;

use rdmux_wire::RKey;

use super::{Requester, Wqe};
use crate::cq::Status;
use crate::memory::{Access, PeerFault, PeerMemory};
use crate::qp::message::{memory_of, opcode_of};
use crate::qp::{Env, Event, Head, QpState, QpType, bare_completion};
use crate::work::{Operation, SendFlags, SendRequest, Target};

/// Regions of a peer that a QP asks for at most; the ones asked for first are forgotten first.
const GRANTS_MAX: usize = 64;
/// A request of more bytes waits for those before it rather than being cut into packets.
const WAITS_BYTES: u32 = 4_096;

/// A region of the peer that we may reach ourselves, as a peer of its QP and by its key.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The memory.
    pub memory: Arc<dyn PeerMemory>,
    /// Where in the memory the region begins.
    pub memory_offset: u64,
    /// Address by which requests name the region's first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// What of [`Access::REMOTE_WRITE`] and [`Access::REMOTE_READ`] is granted.
    pub access: Access,
}

impl Grant {
    /// Where in the memory a request begins, if the grant covers it.
    fn offset_of(&self, va: u64, bytes: u32, access: Access) -> Option<u64> {
        let at = va.checked_sub(self.iova)?;
        let limit = self.length + u64::from(mutant!(GrantOffByOne));
        let inside = at.checked_add(bytes.into()).is_some_and(|end| end <= limit);
        (inside && self.access.contains(access)).then(|| self.memory_offset + at)
    }
}

/// WRITEs and READs to a peer on this host that went by packets, each by the first reason that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByPackets {
    /// WRITE with immediate data: it takes a receive of the peer's.
    pub immediate: u64,
    /// The QP sends at a limited rate.
    pub rate_limited: u64,
    /// The peer had not granted what they reach.
    pub not_granted: u64,
    /// Requests before them were not answered yet.
    pub behind_others: u64,
}

/// What a QP may reach itself.
#[derive(Debug, Default)]
pub(super) struct Direct {
    /// Keys that were asked for, with what came of it.
    grants: Vec<(RKey, Option<Grant>)>,
    by_packets: ByPackets,
}

/// What a request of `bytes` reaches at the peer, if a grant could cover it: key, address and right. One without bytes names no
/// memory, and asks whether the peer lives.
fn reaches(operation: &Operation, bytes: u32) -> Option<(RKey, u64, Access)> {
    match *operation {
        _ if bytes == 0 => None,
        Operation::Write { va, rkey, imm: None } => Some((rkey, va, Access::REMOTE_WRITE)),
        Operation::Read { va, rkey } => Some((rkey, va, Access::REMOTE_READ)),
        _ => None,
    }
}

impl Requester {
    /// The peer is out of reach.
    pub(crate) fn forget_grants(&mut self) {
        self.direct.grants.clear();
    }

    /// The peer's answer to [`Event::WantsGrant`].
    pub(crate) fn set_grant(&mut self, rkey: RKey, grant: Option<Grant>) {
        if let Some(asked) = self.direct.grants.iter_mut().find(|(key, _)| *key == rkey) {
            asked.1 = grant;
        }
    }

    /// What the peer granted, and may have taken back since.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.direct.grants.iter().filter_map(|(_, grant)| grant.as_ref())
    }

    /// Requests that went by packets although the peer is on this host.
    pub(crate) fn by_packets(&self) -> ByPackets {
        self.direct.by_packets
    }

    /// Counts a request whose first packet is about to be built.
    pub(super) fn count_by_packets(&mut self, env: &mut Env<'_>, head: &Head, wqe: usize) {
        let wqe = &self.queue[wqe];
        let may_be_direct = head.local && head.init.qp_type == QpType::Rc && wqe.bytes > 0;
        if !may_be_direct || wqe.first.is_some() {
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

    /// Asks the peer for what a request would reach, once.
    pub(super) fn ask(&mut self, env: &mut Env<'_>, head: &Head, request: &SendRequest, bytes: u32) {
        if !head.local || head.init.qp_type != QpType::Rc {
            return;
        }
        let Some((rkey, ..)) = reaches(&request.operation, bytes) else {
            return;
        };
        if self.direct.grants.iter().any(|(key, _)| *key == rkey) && !mutant!(GrantAskedTwice) {
            return;
        }
        if self.direct.grants.len() == GRANTS_MAX {
            self.direct.grants.remove(0);
        }
        self.direct.grants.push((rkey, None));
        env.events.push_back(Event::WantsGrant(head.qpn, rkey));
    }

    /// The grant that covers a request, and where in its memory the request begins.
    fn grant_for(&self, operation: &Operation, bytes: u32) -> Option<(&Grant, u64)> {
        let (rkey, va, access) = reaches(operation, bytes)?;
        let asked = self.direct.grants.iter().find(|(key, _)| *key == rkey)?;
        let grant = asked.1.as_ref()?;
        Some((grant, grant.offset_of(va, bytes, access)?))
    }

    /// Whether the request at the cursor is to be done directly: `Some(true)` now, `Some(false)` when those before it are done.
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
        // Packets would keep those behind waiting for packets too: wait once, if all goes directly from then on.
        let covered = |wqe: &Wqe| self.grant_for(&wqe.request.operation, wqe.bytes).is_some();
        let waits = wqe.bytes > WAITS_BYTES || self.queue.iter().take(self.cursor.wqe).all(covered);
        waits.then_some(false)
    }

    /// Whether a request that is posted now may go directly.
    #[inline]
    pub(crate) fn may_go_directly(&self) -> bool {
        !self.direct.grants.is_empty() && (self.queue.is_empty() || mutant!(DirectOvertakes))
    }

    /// Does a request at once, if nothing is before it; false: it is to be queued.
    #[inline]
    pub(crate) fn post_directly(&mut self, env: &mut Env<'_>, head: &Head, request: &SendRequest) -> bool {
        let is_plain = match request.operation {
            Operation::Write { imm: None, .. } => true,
            Operation::Read { .. } => self.max_rd_atomic > 0,
            _ => false,
        };
        let may = request.to == Target::Connected && head.init.max_send_wr > 0;
        let begins = head.state == QpState::Rts || head.state == QpState::Sqd && mutant!(DirectInSqd);
        if !is_plain || !may || !begins || !head.rate.is_free() {
            return false;
        }
        // What cannot be is refused by who queues it.
        let Ok(bytes) = request.check() else { return false };
        if self.reach(env, head, request, bytes) != Some(Ok(())) {
            // What fails of own memory is found again, and told in its turn.
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

    /// Does the request at the cursor, the oldest, directly. When the grant has ended, it goes by packets.
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

    /// Does what a request asks for in the peer's memory. `None`: it is not ours to do.
    fn reach(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: &SendRequest,
        bytes: u32,
    ) -> Option<Result<(), Status>> {
        let (grant, mut at) = self.grant_for(&request.operation, bytes)?;
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
                // It may be granted anew, as after a change of the QP's rights.
                self.direct.grants.retain(|(key, _)| *key != rkey);
                None
            }
        }
    }
}

/// A region of ours that a peer may be granted.
#[derive(Clone, Debug)]
pub struct Grantable {
    /// Its memory, and what else a [`Grant`] says.
    pub memory: Arc<dyn crate::memory::Memory>,
    /// Where in the memory the region begins.
    pub memory_offset: u64,
    /// Address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// The region.
    pub lkey: rdmux_wire::LKey,
}

/// Why a peer is not granted a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotGranted {
    /// There is no such QP, or it takes no requests now.
    NoQp,
    /// The key is none of the QP's domain, or names a window or a region that work requests fill: their ends must hold at once.
    NoRegion,
}
