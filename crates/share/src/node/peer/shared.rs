//! The shared queue pairs of a node: RC, between two nodes, in one protection domain of each. [`Pool`] decides which there are; the QPNs are exchanged
//! over the control channel.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use rdmux_key::random_nonce;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, CreateError, Device, Extensions, Fault, Memory, MemoryRegion, ModifyError, Path,
    PathMtu, PostError, ProtectionDomain, Psn, QpAttributes, QpOptions, QpState, Qpn, QueuePair, RecvRequest,
};
use rdmux_wire::node::mux::SLOT_LEN;
use rdmux_wire::node::peer::{Message, Reason, SharedEnd};

use super::machine::{Event, Machine};
use super::pool::{Pool, Step};
use super::{PeerEvent, SharedBy, SharedId};

/// Messages that a shared queue pair can receive before it has to take one.
pub(crate) const SLOTS: u16 = 64;
/// Requests that the send queue of a shared queue pair holds.
pub(crate) const SENDS: u32 = 1024;
/// READs, atomics and FLUSHes that a shared queue pair answers at a time.
const RD_ATOMIC: u8 = 16;
/// Marks the work request ids of receives. The other bits are the slot.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// Local ACK timeout code, as connections have it that CM has made: 67 ms.
const ACK_TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
const MIN_RNR_TIMER: u8 = 12;

/// Completions that the queue of a node without shared queue pairs has room for.
const ROOM_MIN: u32 = 256;

/// One end of a shared queue pair.
// The queue pair ends before the memory that it receives into.
#[derive(Debug)]
pub(crate) struct SharedQp {
    qp: QueuePair,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
    by: SharedBy,
    psn: Psn,
    far: Option<SharedEnd>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The peer has been asked for its end.
    Asked,
    /// The peer was told of this end.
    Answered,
    /// Both ends are ready.
    Ready,
}

impl SharedQp {
    fn new(pd: &ProtectionDomain, cq: &CompletionQueue, by: &SharedBy, stage: Stage) -> Option<SharedQp> {
        let options = QpOptions {
            max_send_wr: SENDS,
            max_recv_wr: SLOTS.into(),
            ..QpOptions::new(cq)
        };
        let qp = pd.create_qp(&options).ok()?;
        let memory = Arc::new(AnonymousMemory::new(usize::from(SLOTS) * SLOT_LEN).ok()?);
        let mr = pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).ok()?;
        let nonce = random_nonce().ok()?;
        let init = QpAttributes {
            access: Some(
                Access::LOCAL_WRITE
                    | Access::REMOTE_WRITE
                    | Access::REMOTE_READ
                    | Access::REMOTE_ATOMIC
                    | Access::FLUSH_GLOBAL
                    | Access::FLUSH_PERSISTENT,
            ),
            ..QpAttributes::default()
        };
        qp.modify(QpState::Init, &init).ok()?;
        let shared = SharedQp {
            qp,
            mr,
            memory,
            by: by.clone(),
            psn: Psn::new(u32::from_be_bytes([0, nonce[0], nonce[1], nonce[2]])),
            far: None,
            stage,
        };
        for slot in 0..SLOTS {
            shared.post_slot(slot).ok()?;
        }
        Some(shared)
    }

    /// Returns what the peer has to know. `mtu`: of the path to it.
    fn end(&self, path_mtu: PathMtu) -> SharedEnd {
        SharedEnd {
            qpn: self.qp.qpn(),
            psn: self.psn,
            slots: SLOTS,
            rd_atomic: RD_ATOMIC,
            path_mtu,
        }
    }

    /// Brings the queue pair up towards the peer's end. `extensions`: those of the peer's device.
    fn bring_up(
        &mut self,
        mine: PathMtu,
        far: SharedEnd,
        extensions: Option<Extensions>,
    ) -> Result<(), ModifyError> {
        let device = self.qp.pd().device();
        let path = Path {
            src: device.address(),
            dst: self.by.peer,
            src_port: device.source_port(far.qpn).unwrap_or(0xc000),
            traffic_class: self.by.class,
        };
        let receive = QpAttributes {
            path: Some(path),
            path_mtu: Some(mine.min(far.path_mtu).bytes()),
            dest_qpn: Some(far.qpn),
            rq_psn: Some(far.psn),
            max_dest_rd_atomic: Some(RD_ATOMIC),
            min_rnr_timer: Some(MIN_RNR_TIMER),
            ..QpAttributes::default()
        };
        // Both devices know of each other, by the control connection, what they can do beyond the specification.
        let receive = match extensions {
            Some(extensions) => QpAttributes {
                window_bytes: Some(1 << extensions.receive_window_log2.min(30)),
                peer_is_rdmux: Some(true),
                selective: Some(extensions.selective),
                carried_acks: Some(extensions.carried_acks),
                ..receive
            },
            None => receive,
        };
        self.qp.modify(QpState::Rtr, &receive)?;
        let send = QpAttributes {
            sq_psn: Some(self.psn),
            timeout: Some(ACK_TIMEOUT),
            retry_count: Some(RETRIES),
            rnr_retry: Some(7),
            max_rd_atomic: Some(far.rd_atomic.min(RD_ATOMIC)),
            ..QpAttributes::default()
        };
        self.qp.modify(QpState::Rts, &send)?;
        self.far = Some(far);
        Ok(())
    }

    /// Returns the queue pair.
    pub(crate) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Returns who uses it.
    pub(crate) fn by(&self) -> &SharedBy {
        &self.by
    }

    /// Returns the number of messages that the peer can receive before it tells that it has room again.
    pub(crate) fn slots_there(&self) -> u16 {
        self.far.map_or(0, |far| far.slots)
    }

    /// Returns the number of READs, atomics and FLUSHes that may be in flight.
    pub(crate) fn rd_atomic(&self) -> u8 {
        self.far.map_or(0, |far| far.rd_atomic.min(RD_ATOMIC))
    }

    /// Reads bytes that a slot has received, from an offset on.
    pub(crate) fn read_slot(&self, slot: u16, at: usize, into: &mut [u8]) -> Result<(), Fault> {
        let start = usize::from(slot) * SLOT_LEN + at;
        self.memory.read(start as u64, into)
    }

    /// Has a slot receive the next message. Its completion has the work request id [`RECEIVE`] with the slot.
    pub(crate) fn post_slot(&self, slot: u16) -> Result<(), PostError> {
        let at = usize::from(slot) * SLOT_LEN;
        self.qp.post_recv(RecvRequest {
            wr_id: RECEIVE | u64::from(slot),
            sges: self.mr.sge(at as u64, SLOT_LEN as u32).into(),
        })
    }
}

/// The shared queue pairs of a node.
// Queue pairs end before their completion queue.
#[derive(Debug)]
pub(super) struct SharedQps {
    qps: HashMap<SharedId, SharedQp>,
    by_qpn: HashMap<Qpn, SharedId>,
    pool: Pool,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    room: u32,
}

impl SharedQps {
    pub(super) fn new(device: &Device, pd: &ProtectionDomain, max: usize) -> Result<SharedQps, CreateError> {
        Ok(SharedQps {
            qps: HashMap::new(),
            by_qpn: HashMap::new(),
            pool: Pool::new(max),
            pd: pd.clone(),
            cq: device.create_cq(ROOM_MIN)?,
            room: ROOM_MIN,
        })
    }

    pub(super) fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    pub(super) fn get(&self, id: SharedId) -> Option<&SharedQp> {
        self.qps.get(&id).filter(|qp| qp.stage == Stage::Ready)
    }

    pub(super) fn by_qpn(&self, qpn: Qpn) -> Option<SharedId> {
        self.by_qpn.get(&qpn).copied()
    }

    pub(super) fn want(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        self.pool.want(now, by)
    }

    pub(super) fn set_busy(&mut self, now: Instant, id: SharedId, is_busy: bool) {
        self.pool.set_busy(now, id, is_busy);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.pool.len()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pool.deadline()
    }

    pub(super) fn check_time(&mut self, now: Instant) {
        self.pool.check_time(now);
    }

    /// Does what the pool wants.
    pub(super) fn work(&mut self, now: Instant, machine: &mut Machine, out: &mut VecDeque<PeerEvent>) {
        while let Some(step) = self.pool.next_step() {
            match step {
                Step::Open(id, by) => {
                    let mtu = self.mtu_to(by.peer);
                    let end = self.make(id, &by, Stage::Asked).map(|qp| qp.end(mtu));
                    if !end.is_some_and(|end| machine.open(now, id, &by, end)) {
                        self.destroy(id);
                        self.pool.ended(now, id);
                        out.push_back(PeerEvent::QpRefused { by });
                    }
                }
                Step::Close(id) => {
                    let far = self.qps.get(&id).and_then(|qp| Some((qp.by.peer, qp.far?.qpn)));
                    if !far.is_some_and(|far| machine.close(now, id, far, false)) {
                        self.gone(now, id, out);
                    }
                }
            }
        }
    }

    fn mtu_to(&self, peer: IpAddr) -> PathMtu {
        self.pd.device().path_mtu_to(peer).unwrap_or(PathMtu::Bytes1024)
    }

    fn make(&mut self, id: SharedId, by: &SharedBy, stage: Stage) -> Option<&mut SharedQp> {
        let needed = (self.qps.len() as u32 + 1) * (SENDS + u32::from(SLOTS));
        if needed > self.room {
            let room = needed.next_power_of_two();
            self.cq.resize(room).ok()?;
            self.room = room;
        }
        let qp = SharedQp::new(&self.pd, &self.cq, by, stage)?;
        self.destroy(id);
        self.by_qpn.insert(qp.qp.qpn(), id);
        self.qps.insert(id, qp);
        self.qps.get_mut(&id)
    }

    /// Destroys a queue pair. Returns whether it was ready.
    fn destroy(&mut self, id: SharedId) -> bool {
        let Some(qp) = self.qps.remove(&id) else {
            return false;
        };
        self.by_qpn.remove(&qp.qp.qpn());
        qp.stage == Stage::Ready
    }

    fn gone(&mut self, now: Instant, id: SharedId, out: &mut VecDeque<PeerEvent>) {
        if self.destroy(id) {
            out.push_back(PeerEvent::QpGone { id });
        }
        self.pool.ended(now, id);
    }

    /// Ends a queue pair that has failed, at both ends.
    pub(super) fn fail(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        id: SharedId,
        out: &mut VecDeque<PeerEvent>,
    ) {
        if let Some(far) = self.qps.get(&id).and_then(|qp| Some((qp.by.peer, qp.far?.qpn))) {
            machine.close(now, id, far, true);
        }
        self.gone(now, id, out);
    }

    /// Ends the queue pairs to a peer that is gone.
    pub(super) fn peer_gone(&mut self, now: Instant, peer: IpAddr, out: &mut VecDeque<PeerEvent>) {
        let of_peer = |(id, qp): (&SharedId, &SharedQp)| (qp.by.peer == peer).then_some(*id);
        let ids: Vec<SharedId> = self.qps.iter().filter_map(of_peer).collect();
        for id in ids {
            if let Some(qp) = self.qps.get(&id)
                && qp.stage != Stage::Ready
            {
                let by = qp.by.clone();
                out.push_back(PeerEvent::QpRefused { by });
            }
            self.gone(now, id, out);
        }
        for by in self.pool.forget(peer) {
            out.push_back(PeerEvent::QpRefused { by });
        }
    }

    /// Returns a queue pair with a peer, by its number.
    fn with(&self, peer: IpAddr, qpn: Qpn) -> Option<SharedId> {
        let id = self.by_qpn(qpn)?;
        (self.qps.get(&id)?.by.peer == peer).then_some(id)
    }

    /// Handles what a peer has said about shared queue pairs. `extensions`: those of a peer's device.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        extensions: impl Fn(IpAddr) -> Option<Extensions>,
        event: Event,
        out: &mut VecDeque<PeerEvent>,
    ) {
        match event {
            Event::OpenAsked { asked, by, end } => {
                let is_self = by.peer == self.pd.device().address();
                let ours = self.pool.asked_for(&by).filter(|_| !is_self);
                if ours.is_some() && machine.precedes(by.peer) {
                    return machine.refuse(asked, Reason::Collides);
                }
                let Some(id) = self.pool.accept(now, &by, ours) else {
                    return machine.refuse(asked, Reason::Limit);
                };
                let mtu = self.mtu_to(by.peer);
                let made = self.make(id, &by, Stage::Answered).and_then(|qp| {
                    qp.bring_up(mtu, end, extensions(by.peer)).ok()?;
                    Some(qp.end(mtu))
                });
                match made {
                    Some(end) => machine.answer(asked, Message::QpOpened { end }),
                    None => {
                        self.gone(now, id, out);
                        out.push_back(PeerEvent::QpRefused { by });
                        machine.refuse(asked, Reason::Device);
                    }
                }
            }
            Event::Opened { id, end } => {
                let mtu_to = |peer| self.pd.device().path_mtu_to(peer);
                let Some(qp) = self.qps.get_mut(&id).filter(|qp| qp.stage == Stage::Asked) else {
                    return;
                };
                let by = qp.by.clone();
                let mtu = mtu_to(by.peer).unwrap_or(PathMtu::Bytes1024);
                match end {
                    Ok(far) if qp.bring_up(mtu, far, extensions(by.peer)).is_ok() => {
                        qp.stage = Stage::Ready;
                        self.pool.opened(now, id);
                        machine.tell_ready(now, by.peer, far.qpn);
                        out.push_back(PeerEvent::QpReady { id });
                    }
                    Ok(far) => {
                        machine.close(now, id, (by.peer, far.qpn), true);
                        self.gone(now, id, out);
                        out.push_back(PeerEvent::QpRefused { by });
                    }
                    Err(Reason::Limit | Reason::Collides) => {
                        self.destroy(id);
                        self.pool.later(now, id);
                    }
                    Err(_) => {
                        self.gone(now, id, out);
                        out.push_back(PeerEvent::QpRefused { by });
                    }
                }
            }
            Event::ReadyTold { peer, qpn } => {
                if let Some(id) = self.with(peer, qpn)
                    && let Some(qp) = self.qps.get_mut(&id)
                    && qp.stage == Stage::Answered
                {
                    qp.stage = Stage::Ready;
                    self.pool.opened(now, id);
                    out.push_back(PeerEvent::QpReady { id });
                }
            }
            Event::CloseAsked {
                asked,
                peer,
                qpn,
                failed,
            } => {
                if let Some(id) = self.with(peer, qpn) {
                    if !failed && !self.pool.is_idle(id) {
                        return machine.refuse(asked, Reason::Busy);
                    }
                    self.gone(now, id, out);
                }
                machine.answer(asked, Message::Done {});
            }
            Event::Closed { id, is_closed: true } => self.gone(now, id, out),
            Event::Closed { id, .. } => self.pool.stays(now, id),
            Event::Peer(_) | Event::KeyAsked { .. } | Event::KeyReleased { .. } => {}
        }
    }
}
