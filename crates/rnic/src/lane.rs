//! Requests that the threads of a program carry out in a peer's memory without the device.
//!
//! A QP whose requests have all been answered, and whose peer is on this host, has a *lane*: what its last requests needed to know of the
//! peer's grants and of its own regions. A thread that posts a request which the lane covers carries it out under the lane's own lock, so
//! that the QPs of several threads do not wait for each other, nor for whoever drives the device. All other requests go to the device,
//! which teaches the lane what it finds out ([`DirectLane::learn`]).
//!
//! Nothing overtakes: the device closes the lane before it queues a request, and a lane does nothing while a place of the send queue is
//! taken, which includes requests that were left to the driver. Only the device opens a lane. A caller that makes a change of which no later
//! request may be ignorant waits until the lane's lock is free ([`DirectLane::close`], [`DirectLane::forget_key`]). Whoever holds that lock
//! never waits for the device, so that the device may wait for the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_wire::roce::MESSAGE_BYTES_MAX;
use rdmux_wire::{Qpn, RKey};

use crate::cq::{CompletionQueue, Cqn, Pushed, Status};
use crate::memory::{Access, Memory, PeerMemory};
use crate::probes;
use crate::qp::bare_completion;
use crate::qp::message::opcode_of;
use crate::qp::requester::direct::{Grant, reaches};
use crate::queue::SendQueue;
use crate::region::{Pd, Regions, View};
use crate::sync::{Mutex, MutexGuard};
use crate::time::Time;
use crate::work::{SendFlags, SendRequest, Sge, SgeList, Target};

/// Most own regions that a lane knows; it forgets the oldest first.
const KEYS_MAX: usize = 16;

/// Outcome of [`DirectLane::post`].
#[derive(Debug)]
#[must_use]
pub enum Directly {
    /// The lane does not cover the request: the caller must post it to the device.
    Not,
    /// The request is complete.
    Done,
    /// The request is complete, and the device has to know: the caller calls [`crate::Rnic::deliver`], or has the driver call it.
    DoneAndTell(Delivery),
}

/// A completion with a consequence for the device: a waiter to notify, or a queue that overran.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    pub(crate) cqn: Cqn,
    pub(crate) qpn: Qpn,
    pub(crate) pushed: Pushed,
}

/// The lane of a QP, shared by the device and the threads that post to the QP.
#[derive(Clone, Debug)]
pub struct DirectLane(Arc<Lane>);

#[derive(Debug)]
struct Lane {
    qpn: Qpn,
    cqn: Cqn,
    cq: CompletionQueue,
    sends: SendQueue,
    /// Set while callers may post without the device.
    open: AtomicBool,
    /// Requests carried out, and their bytes; only the holder of the lock counts.
    requests: AtomicU64,
    bytes: AtomicU64,
    known: Mutex<Known>,
}

/// Grants and regions that a lane knows.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Set when the QP takes READs.
    reads: bool,
    grants: Vec<(RKey, Grant)>,
    keys: Vec<OwnKey>,
}

/// A plain region of the QP's protection domain. Its owner keeps the memory alive until the lanes have forgotten it, so that no lane drops
/// the last handle of a memory.
#[derive(Debug)]
pub(crate) struct OwnKey {
    pub(crate) lkey: u32,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) memory_offset: u64,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: Access,
}

impl OwnKey {
    fn view(&self) -> View<'_> {
        View {
            memory: &self.memory,
            memory_offset: self.memory_offset,
            length: self.length,
            iova: self.iova,
        }
    }
}

/// Returns the element that satisfies a condition; the most recent one is the first to be looked at.
#[inline]
fn find_recent<T>(list: &mut [T], is_it: impl Fn(&T) -> bool) -> Option<&T> {
    if !list.first().is_some_and(&is_it) {
        let at = list.iter().position(is_it)?;
        list.swap(0, at);
    }
    list.first()
}

/// Copies an element to an offset in a peer's memory, or from there; returns whether that succeeded.
#[inline(always)]
fn copy(memory: &dyn PeerMemory, at: u64, keys: &mut [OwnKey], sge: &Sge, writes: bool) -> bool {
    let Some(key) = find_recent(keys, |key| key.lkey == sge.lkey) else {
        return false;
    };
    let length = u64::from(sge.length);
    let Some(begin) = key.view().offset_of(sge.addr, length) else {
        return false;
    };
    if writes {
        memory.write(at, &*key.memory, begin, length).is_ok()
    } else {
        let may = key.access.contains(Access::LOCAL_WRITE);
        may && memory.read(at, &*key.memory, begin, length).is_ok()
    }
}

/// Copies as [`copy`] does, inline bytes or the elements of a list.
fn copy_list(
    memory: &dyn PeerMemory,
    mut at: u64,
    keys: &mut [OwnKey],
    list: &SgeList,
    writes: bool,
) -> bool {
    if let Some(inline) = list.as_inline() {
        return memory.write_bytes(at, inline).is_ok();
    }
    for sge in list.as_slice().iter().filter(|sge| sge.length > 0) {
        if !copy(memory, at, keys, sge, writes) {
            return false;
        }
        at += u64::from(sge.length);
    }
    true
}

impl Known {
    /// Carries out a request in the peer's memory; returns false if something that it needs is not known, or failed. Then some of the bytes
    /// may be in place, as those of a request that is sent in packets may be before it has ended.
    #[inline(always)]
    fn carry_out(
        &mut self,
        (rkey, va, access): (RKey, u64, Access),
        request: &SendRequest,
        bytes: u32,
    ) -> bool {
        let Some((_, grant)) = find_recent(&mut self.grants, |(key, _)| *key == rkey) else {
            return false;
        };
        let Some(at) = grant.offset_of(va, bytes, access) else {
            return false;
        };
        let memory = &*grant.memory;
        let writes = access == Access::REMOTE_WRITE;
        if let Some(sge) = request.sges.only() {
            return copy(memory, at, &mut self.keys, sge, writes);
        }
        copy_list(memory, at, &mut self.keys, &request.sges, writes)
    }
}

impl DirectLane {
    pub(crate) fn new(qpn: Qpn, cqn: Cqn, cq: CompletionQueue, sends: SendQueue) -> DirectLane {
        DirectLane(Arc::new(Lane {
            qpn,
            cqn,
            cq,
            sends,
            open: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            known: Mutex::default(),
        }))
    }

    /// Carries out a send request if the lane covers it. Calls `now` only rarely. The outcome is that of [`crate::Rnic::post_send`].
    #[inline]
    pub fn post(&self, request: &SendRequest, now: impl Fn() -> Time) -> Directly {
        let lane = &*self.0;
        if !matches!(request.to, Target::Connected) {
            return Directly::Not;
        }
        // The device refuses an invalid request.
        let bytes = match request.sges.only() {
            Some(sge) if sge.length <= MESSAGE_BYTES_MAX => sge.length,
            _ => match request.check() {
                Ok(bytes) => bytes,
                Err(_) => return Directly::Not,
            },
        };
        let Some(reached) = reaches(&request.operation, bytes) else {
            return Directly::Not;
        };
        let mut known = lane.known.lock();
        // In this order: when the device gives back the last place, the lane is closed already.
        if !lane.sends.is_idle() || !lane.open.load(Ordering::Acquire) {
            return Directly::Not;
        }
        let (.., access) = reached;
        let may = known.reads || access == Access::REMOTE_WRITE;
        if !may || !known.carry_out(reached, request, bytes) {
            return Directly::Not;
        }
        let add = |count: &AtomicU64, more| {
            count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        };
        add(&lane.requests, 1);
        add(&lane.bytes, u64::from(bytes));
        probe!(post_direct, lane.qpn.value(), request.wr_id, bytes);
        if !request.flags.contains(SendFlags::SIGNALED) {
            return Directly::Done;
        }
        let opcode = opcode_of(&request.operation);
        let mut wc = bare_completion(lane.qpn, request.wr_id, Status::Success, opcode);
        wc.byte_len = bytes;
        probe!(
            completion,
            wc.qpn.value(),
            wc.wr_id,
            probes::status(wc.status),
            probes::opcode(wc.opcode),
            wc.byte_len,
        );
        match lane.cq.push(wc, false, now) {
            Pushed::Quiet => Directly::Done,
            pushed => {
                if matches!(pushed, Pushed::Overrun { .. }) {
                    // The device puts the QP in error.
                    self.close_soon();
                }
                let (cqn, qpn) = (lane.cqn, lane.qpn);
                Directly::DoneAndTell(Delivery { cqn, qpn, pushed })
            }
        }
    }

    /// Returns the numbers of requests and bytes.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (count(&self.0.requests), count(&self.0.bytes))
    }

    /// Waits until no caller is inside of an access under a grant of the QP. None begins until the guard is dropped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock()
    }

    /// Makes callers ask the device from here on. Requests of other threads that have begun may still end.
    #[inline]
    pub(crate) fn close_soon(&self) {
        self.0.open.store(false, Ordering::Release);
    }

    /// Makes callers ask the device from here on, and waits for the end of requests that have begun.
    pub(crate) fn close(&self) {
        self.close_soon();
        drop(self.lock());
    }

    /// Lets callers post without the device. The device calls this when it has carried out a request of the QP directly.
    pub(crate) fn open(&self, reads: bool) {
        let mut known = self.lock();
        known.reads = reads;
        self.0.open.store(true, Ordering::Release);
    }

    /// Learns what a request has needed: the grant of a key, and the regions of its own elements.
    pub(crate) fn learn(&self, regions: &mut Regions, pd: Pd, (rkey, grant): (RKey, &Grant), sges: &[Sge]) {
        let mut known = self.lock();
        if known.grants.iter().all(|(key, _)| *key != rkey) {
            known.grants.push((rkey, grant.clone()));
        }
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            if known.keys.iter().any(|key| key.lkey == sge.lkey) {
                continue;
            }
            let Some(key) = regions.lend(sge.lkey, pd, self) else {
                continue;
            };
            if known.keys.len() == KEYS_MAX
                && let Some(oldest) = known.keys.pop()
            {
                regions.end_loan(oldest.lkey, self);
            }
            known.keys.insert(0, key);
        }
    }

    /// Forgets a grant: waits for the end of requests that use it.
    pub(crate) fn forget_grant(&self, rkey: RKey) {
        self.lock().grants.retain(|(key, _)| *key != rkey);
    }

    /// Forgets all grants, and closes the lane.
    pub(crate) fn forget_grants(&self) {
        self.close_soon();
        self.lock().grants.clear();
    }

    /// Forgets a region: waits for the end of requests that use it.
    pub(crate) fn forget_key(&self, lkey: u32) {
        self.lock().keys.retain(|key| key.lkey != lkey);
    }

    /// Forgets everything, and closes the lane.
    pub(crate) fn clear(&self, regions: &mut Regions) {
        self.forget_grants();
        let keys = std::mem::take(&mut self.lock().keys);
        for key in keys {
            regions.end_loan(key.lkey, self);
        }
    }

    pub(crate) fn is(&self, other: &DirectLane) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
