//! A device with a QP of every transport service, and checks of what its user may expect of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_rnic::cm::{CmEvent, CmId};
use rdmux_rnic::{
    Access, AccessJob, Config, Counters, Cqn, Event, FlushJob, LKey, Memory, Pd, Psn, QpInit, QpState,
    QpType, Qpn, RKey, RecvRequest, RegionSpec, Rnic, Sge, SrqInit, Srqn, Status, Time, Traffic, WcOpcode,
    WindowType, WorkCompletion, Xrcd,
};
use rdmux_wire::cm::ServiceId;
use strum::VariantArray;

use super::Reach;
use crate::memory::{Door, MemoryKind, SimMemory};

pub(super) const IOVA: u64 = 0x1000;
/// Bytes of the region that peers may change.
pub(super) const REGION: u64 = 1 << 14;
/// Bytes of each region that no peer may change: one grants only READ, one belongs to a PD of its own.
pub(super) const FENCED: u64 = 1 << 10;
const GUARD: u64 = 256;
const GUARD_BYTE: u8 = 0xa5;
pub(super) const SEND_WR_MAX: u32 = 64;
const RECV_WR_MAX: u32 = 64;
const SRQ_WR_MAX: u32 = 64;
/// Capacity of the small completion queue.
const SMALL_CQ: u32 = 12;
/// Maximum number of connections in progress that a user remembers.
const CM_IDS: usize = 64;

/// First PSN of every connection: it soon wraps around.
pub(super) const PSN: u32 = 0xff_fff8;
pub(super) const QKEY: u32 = 0x33;

/// Kind of a QP. XRC targets and initiators are each other's peers; the peer of any other QP is of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub(super) enum QpKind {
    Rc,
    /// Retransmits selectively, and has requests carry acknowledgements.
    Selective,
    /// Takes its receives from a shared receive queue, and completes to a small queue.
    Shared,
    Uc,
    Ud,
    XrcSend,
    XrcRecv,
}

impl QpKind {
    pub(super) fn qp_type(self) -> QpType {
        match self {
            QpKind::Rc | QpKind::Selective | QpKind::Shared => QpType::Rc,
            QpKind::Uc => QpType::Uc,
            QpKind::Ud => QpType::Ud,
            QpKind::XrcSend => QpType::XrcSend,
            QpKind::XrcRecv => QpType::XrcRecv,
        }
    }

    pub(super) fn of_peer(self) -> QpKind {
        match self {
            QpKind::XrcSend => QpKind::XrcRecv,
            QpKind::XrcRecv => QpKind::XrcSend,
            other => other,
        }
    }
}

/// A QP, and the requests posted to it that have not completed.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) kind: QpKind,
    pub(super) qpn: Qpn,
    pub(super) cq: Cqn,
    /// Send requests: number, and whether they complete when they succeed.
    sends: VecDeque<(u64, bool)>,
    recvs: VecDeque<u64>,
    /// Set when a send request was flushed: no request behind it succeeds.
    flushed: bool,
    /// Set when a send request has failed: the requests behind it are flushed.
    broken: bool,
    /// Set when the QP gives up in the end if no response comes.
    times_out: bool,
    /// PSNs of the last request to this QP, and of the last request that it sent.
    pub(super) near: (Psn, Psn),
}

impl Queue {
    /// Forgets what was posted.
    pub(super) fn forget(&mut self) {
        self.sends.clear();
        self.recvs.clear();
        (self.flushed, self.broken) = (false, false);
        self.near = (Psn::new(PSN), Psn::new(PSN));
    }

    pub(super) fn set_timeout(&mut self, code: Option<u8>) {
        self.times_out = code.map_or(self.times_out, |code| code > 0);
    }

    /// Handles a change of the state by the user: UC and UD recover from errors of their requests.
    pub(super) fn repaired(&mut self) {
        if matches!(self.kind, QpKind::Uc | QpKind::Ud) {
            (self.flushed, self.broken) = (false, false);
        }
    }
}

/// Queue that a request was posted to, encoded in the low bits of its number.
#[derive(Clone, Copy)]
enum Posted {
    Send,
    Recv,
    Srq,
    Xrc,
}

pub(super) struct Side {
    pub(super) rnic: Rnic,
    pub(super) address: IpAddr,
    memory: Arc<SimMemory>,
    pub(super) pd: Pd,
    pub(super) lkey: LKey,
    /// Keys that peers may try: of the region, of the regions that no peer may change, of windows, of a region without memory.
    pub(super) keys: [RKey; 6],
    pub(super) queues: Vec<Queue>,
    pub(super) cqs: [Cqn; 2],
    pub(super) srq: Srqn,
    pub(super) xrc_srq: Srqn,
    xrcd: Xrcd,
    /// Receives posted to the shared queues that have not completed.
    shared: [BTreeSet<u64>; 2],
    next_wr: u64,
    pub(super) flushes: Vec<FlushJob>,
    pub(super) accesses: VecDeque<AccessJob>,
    pub(super) cm_ids: VecDeque<CmId>,
    /// Ids for which no further event may arrive.
    cm_gone: BTreeSet<u32>,
    /// Completion queues whose overrun was reported, with the number of reports.
    overrun: BTreeMap<u32, u32>,
    /// Keys of the other side that a QP asks to reach without packets.
    pub(super) wanted: Vec<(Qpn, RKey)>,
    pub(super) reach: Reach,
}

impl Side {
    const ACCESS: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ)
        .union(Access::REMOTE_ATOMIC)
        .union(Access::MW_BIND)
        .union(Access::FLUSH_GLOBAL)
        .union(Access::FLUSH_PERSISTENT);

    pub(super) fn new(n: u8, ipv6: bool, kind: MemoryKind) -> Side {
        let address = if ipv6 {
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)])
        } else {
            IpAddr::from([10, 0, 0, n])
        };
        let mut rnic = Rnic::new(Config {
            address,
            slot: n,
            seed: [n; 32],
            guid: u64::from(n),
            gsi_src_port: 0xc000,
            receive_window_bytes: 1 << 16,
            traffic: Traffic::default(),
            mtu: 4096,
        });
        let bytes = 4 * GUARD + REGION + 2 * FENCED;
        let memory = Arc::new(SimMemory::new(vec![GUARD_BYTE; bytes as usize], kind));
        let (pd, other_pd) = (rnic.alloc_pd(), rnic.alloc_pd());
        let (lkey, rkey) = register(&mut rnic, &memory, pd, GUARD, REGION, Side::ACCESS);
        let read_at = 2 * GUARD + REGION;
        let (_, read_only) = register(&mut rnic, &memory, pd, read_at, FENCED, Access::REMOTE_READ);
        let other_at = read_at + FENCED + GUARD;
        let (_, other) = register(&mut rnic, &memory, other_pd, other_at, FENCED, Side::ACCESS);
        let windows = [WindowType::One, WindowType::Two].map(|window_type| {
            let window = rnic.alloc_mw(pd, window_type);
            window.expect("there are keys")
        });
        let (_, fast) = rnic.alloc_mr(pd, REGION).expect("there are keys");
        let cqs = [rnic.create_cq(1 << 16), rnic.create_cq(SMALL_CQ)];
        let (xrcd, max_wr) = (rnic.alloc_xrcd(), SRQ_WR_MAX);
        let [srq, xrc_srq] = [None, Some((xrcd, cqs[0]))].map(|xrc| {
            let made = rnic.create_srq(SrqInit { pd, max_wr, xrc });
            made.expect("PD and CQ are there")
        });
        for service in [ServiceId(0), ServiceId::udp(7174)] {
            rnic.cm().listen(service);
        }
        let mut side = Side {
            rnic,
            address,
            memory,
            pd,
            lkey,
            keys: [rkey, read_only, other, windows[0], windows[1], fast],
            queues: Vec::new(),
            cqs,
            srq,
            xrc_srq,
            xrcd,
            shared: Default::default(),
            next_wr: 0,
            flushes: Vec::new(),
            accesses: VecDeque::new(),
            cm_ids: VecDeque::new(),
            cm_gone: BTreeSet::new(),
            overrun: BTreeMap::new(),
            wanted: Vec::new(),
            reach: Reach::default(),
        };
        for &kind in QpKind::VARIANTS {
            let (qpn, cq) = side.create(kind);
            let mut queue = Queue {
                kind,
                qpn,
                cq,
                sends: VecDeque::new(),
                recvs: VecDeque::new(),
                flushed: false,
                broken: false,
                times_out: false,
                near: (Psn::new(0), Psn::new(0)),
            };
            queue.forget();
            side.queues.push(queue);
        }
        side
    }

    fn create(&mut self, kind: QpKind) -> (Qpn, Cqn) {
        let cq = self.cqs[usize::from(kind == QpKind::Shared)];
        let init = QpInit {
            qp_type: kind.qp_type(),
            max_send_wr: SEND_WR_MAX,
            max_recv_wr: RECV_WR_MAX,
            srq: (kind == QpKind::Shared).then_some(self.srq),
            xrcd: (kind == QpKind::XrcRecv).then_some(self.xrcd),
            ..QpInit::new(self.pd, cq)
        };
        (self.rnic.create_qp(init).expect("there are QPNs"), cq)
    }

    /// Destroys a QP and creates another in its place, with a new completion queue after an overrun.
    pub(super) fn renew(&mut self, at: usize) {
        let kind = self.queues[at].kind;
        self.rnic.destroy_qp(self.queues[at].qpn);
        if kind == QpKind::Shared && self.is_overrun(self.cqs[1]) {
            self.rnic.destroy_cq(self.cqs[1]);
            self.cqs[1] = self.rnic.create_cq(SMALL_CQ);
        }
        let (qpn, cq) = self.create(kind);
        let queue = &mut self.queues[at];
        (queue.qpn, queue.cq) = (qpn, cq);
        queue.forget();
    }

    /// Deregisters the region and registers it again, under other keys.
    pub(super) fn renew_region(&mut self) {
        drop(self.rnic.dereg_mr(self.lkey));
        let key = register(&mut self.rnic, &self.memory, self.pd, GUARD, REGION, Side::ACCESS);
        (self.lkey, self.keys[0]) = key;
    }

    /// Returns the part of the region that a request may register.
    pub(super) fn spec(&self, at: u64, length: u64) -> RegionSpec {
        RegionSpec {
            memory: Arc::new(Door::new(self.memory.clone())),
            memory_offset: GUARD + at,
            length,
            iova: IOVA,
            access: Side::ACCESS,
        }
    }

    pub(super) fn state(&self, at: usize) -> QpState {
        let info = self.rnic.query_qp(self.queues[at].qpn);
        info.expect("it is there").state
    }

    pub(super) fn queue_of(&self, qpn: Qpn) -> Option<usize> {
        self.queues.iter().position(|queue| queue.qpn == qpn)
    }

    pub(super) fn is_overrun(&self, cq: Cqn) -> bool {
        self.rnic.cq_state(cq).is_some_and(|(_, overrun)| overrun)
    }

    fn number(&mut self, posted: Posted) -> u64 {
        self.next_wr += 4;
        self.next_wr | posted as u64
    }

    // Requests: each number is used once.

    pub(super) fn send_number(&mut self) -> u64 {
        self.number(Posted::Send)
    }

    /// Records a send request that the engine has accepted.
    pub(super) fn sent(&mut self, at: usize, wr_id: u64, signaled: bool) {
        self.queues[at].sends.push_back((wr_id, signaled));
    }

    pub(super) fn post_recv(&mut self, now: Time, at: usize, sges: rdmux_rnic::SgeList) {
        let wr_id = self.number(Posted::Recv);
        let qpn = self.queues[at].qpn;
        if self.rnic.post_recv(now, qpn, RecvRequest { wr_id, sges }).is_ok() {
            self.queues[at].recvs.push_back(wr_id);
        }
    }

    pub(super) fn post_srq_recv(&mut self, xrc: bool, sges: rdmux_rnic::SgeList) {
        let (posted, srqn) = match xrc {
            true => (Posted::Xrc, self.xrc_srq),
            false => (Posted::Srq, self.srq),
        };
        let wr_id = self.number(posted);
        if self.rnic.post_srq_recv(srqn, RecvRequest { wr_id, sges }).is_ok() {
            self.shared[usize::from(xrc)].insert(wr_id);
        }
    }

    // Invariants.

    /// Polls all events and completions, as the user would.
    pub(super) fn hear(&mut self) {
        while let Some(event) = self.rnic.poll_event() {
            self.reach.event(&event);
            if let Event::WantsGrant(by, rkey) = event {
                self.wanted.push((by, rkey));
            }
            if let Event::CqError(cq) = event {
                *self.overrun.entry(cq.0).or_default() += 1;
                assert_eq!(self.overrun[&cq.0], 1, "an overrun is reported once");
            }
        }
        for cq in self.cqs {
            while let Some(wc) = self.rnic.poll_cq(cq) {
                self.completed(&wc);
            }
            let told = self.overrun.contains_key(&cq.0);
            assert_eq!(self.is_overrun(cq), told, "an overrun is reported");
        }
        while let Some(event) = self.rnic.cm().poll_event() {
            self.cm_event(&event);
        }
        // Only here: an id that is destroyed before the loop above would still receive the events queued by then.
        while self.cm_ids.len() > CM_IDS
            && let Some(oldest) = self.cm_ids.pop_front()
        {
            self.rnic.cm().destroy(oldest);
            self.cm_ends(oldest);
        }
    }

    /// Checks that a request completes at most once, in the order of its queue, and as flushed after one that failed.
    fn completed(&mut self, wc: &WorkCompletion) {
        let at = self.queue_of(wc.qpn);
        let at = at.unwrap_or_else(|| panic!("a completion of a QP that is gone: {wc:?}"));
        let queue = &mut self.queues[at];
        self.reach.completed(queue.kind, wc.opcode, wc.status);
        let is_recv = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        assert_eq!(wc.wr_id & 3 != Posted::Send as u64, is_recv, "{wc:?}");
        match wc.wr_id & 3 {
            0 => {
                let place = queue.sends.iter().position(|(wr_id, _)| *wr_id == wc.wr_id);
                let place = place.unwrap_or_else(|| panic!("{:?}: not open: {wc:?}", queue.kind));
                let before = queue.sends.drain(..=place).take(place);
                let left_out = before.filter(|(_, signaled)| *signaled).count();
                assert_eq!(left_out, 0, "{:?}: out of order: {wc:?}", queue.kind);
                // UC and UD recover from an error.
                let may = !queue.flushed || wc.status != Status::Success;
                let must = !queue.broken || wc.status == Status::Flushed;
                assert!(may && must, "after an error: {wc:?}");
                queue.flushed |= wc.status == Status::Flushed;
                queue.broken |= !matches!(wc.status, Status::Success | Status::Flushed);
            }
            1 => {
                let first = queue.recvs.pop_front();
                assert_eq!(first, Some(wc.wr_id), "{:?}: out of order: {wc:?}", queue.kind);
            }
            shared => {
                let open = &mut self.shared[usize::from(shared == Posted::Xrc as u64)];
                assert!(open.remove(&wc.wr_id), "not open: {wc:?}");
            }
        }
    }

    fn cm_event(&mut self, event: &CmEvent) {
        self.reach.cm_event(event);
        let (id, begins, ends) = match event {
            CmEvent::Request { id, .. } | CmEvent::SidrRequest { id, .. } => (id, true, false),
            CmEvent::Reply { id, .. } | CmEvent::Established { id } => (id, false, false),
            CmEvent::Rejected { id, .. }
            | CmEvent::Unreachable { id }
            | CmEvent::Disconnected { id }
            | CmEvent::SidrReply { id, .. } => (id, false, true),
        };
        if begins {
            self.cm_begins(*id);
        }
        assert!(
            !self.cm_gone.contains(&id.0),
            "of a connection that is gone: {event:?}"
        );
        if ends {
            self.cm_gone.insert(id.0);
        }
    }

    /// Records that a connection begins, under an id that may have been another's.
    pub(super) fn cm_begins(&mut self, id: CmId) {
        self.cm_gone.remove(&id.0);
        self.cm_ids.retain(|other| *other != id);
        self.cm_ids.push_back(id);
    }

    pub(super) fn cm_ends(&mut self, id: CmId) {
        self.cm_gone.insert(id.0);
    }

    /// Checks the invariants that hold between any two events.
    pub(super) fn check(&mut self) {
        for queue in &self.queues {
            let Some(info) = self.rnic.query_qp(queue.qpn) else {
                panic!("a QP is gone: {queue:?}");
            };
            let kind = queue.kind;
            assert!(info.send_outstanding <= SEND_WR_MAX as usize, "{kind:?}");
            assert!(info.recv_posted <= RECV_WR_MAX as usize + 1, "{kind:?}");
            let idle = matches!(info.state, QpState::Error | QpState::Reset);
            assert!(
                !queue.broken || idle || info.state == QpState::Sqe,
                "{kind:?} goes on after an error"
            );
            let open = info.send_outstanding + info.recv_posted;
            assert!(!idle || open == 0, "{kind:?}: requests open in {:?}", info.state);
            assert!(
                info.send_outstanding <= queue.sends.len(),
                "{kind:?}: completed and open"
            );
            if self.is_overrun(queue.cq) {
                // Completions after the overrun are lost.
                assert!(idle, "{kind:?} works although its completion queue does not");
                continue;
            }
            let signaled = queue.sends.iter().filter(|(_, signaled)| *signaled).count();
            assert!(
                signaled <= info.send_outstanding,
                "{kind:?}: a request has gone without a completion"
            );
            if kind != QpKind::Shared {
                let inside = queue.recvs.len().wrapping_sub(info.recv_posted);
                assert!(
                    inside <= usize::from(!idle),
                    "{kind:?}: a receive is lost or used twice"
                );
            }
        }
        for (srqn, open) in [self.srq, self.xrc_srq].iter().zip(&self.shared) {
            let info = self.rnic.query_srq(*srqn).expect("it is in use");
            assert!(info.posted <= open.len() && info.posted <= SRQ_WR_MAX as usize);
        }
        let backlog = self.rnic.backlog();
        assert!(backlog.is_bounded(self.queues.len()), "{backlog:?}");
        let image = self.memory.lock();
        let (before, behind) = image.bytes.split_at(GUARD as usize);
        let fenced = [before, &behind[REGION as usize..]];
        let intact = fenced.iter().all(|part| part.iter().all(|b| *b == GUARD_BYTE));
        assert!(intact, "bytes outside of the region changed");
    }

    /// Checks, once nothing arrives and no timer is left, that no request waits for a response that nothing asks for.
    pub(super) fn check_rest(&self) {
        for queue in &self.queues {
            let info = self.rnic.query_qp(queue.qpn).expect("it is there");
            let waits = info.state == QpState::Rts && info.send_outstanding > 0;
            let is_answered = !matches!(queue.kind, QpKind::Uc | QpKind::Ud);
            assert!(
                !waits || is_answered && !queue.times_out,
                "{:?}: a request never completes",
                queue.kind
            );
        }
    }

    /// Posts receives to queues that hold few.
    pub(super) fn post_missing_recvs(&mut self, now: Time) {
        for at in 0..self.queues.len() {
            let info = self.rnic.query_qp(self.queues[at].qpn).expect("it is there");
            match self.queues[at].kind {
                QpKind::Shared | QpKind::XrcRecv | QpKind::XrcSend => {}
                _ if info.recv_posted < 8 && info.state != QpState::Error => {
                    self.post_recv(now, at, Sge::new(IOVA, 1 << 13, self.lkey).into());
                }
                _ => {}
            }
        }
        for (xrc, srqn) in [(false, self.srq), (true, self.xrc_srq)] {
            if self.rnic.query_srq(srqn).is_some_and(|info| info.posted < 8) {
                self.post_srq_recv(xrc, Sge::new(IOVA, 1 << 13, self.lkey).into());
            }
        }
    }

    /// Returns the state that a dropped packet may not change.
    pub(super) fn snapshot(&self) -> Snapshot {
        let infos = self
            .queues
            .iter()
            .map(|queue| format!("{:?}", self.rnic.query_qp(queue.qpn)));
        Snapshot {
            queues: infos.collect(),
            bytes: self.memory.lock().bytes.clone(),
            counters: self.rnic.counters(),
        }
    }

    /// Checks that a dropped packet changed nothing but the counters of dropped packets.
    pub(super) fn assert_unchanged(&self, before: &Snapshot) {
        let now = self.snapshot();
        assert!(now.queues == before.queues && now.bytes == before.bytes);
        for ((name, value, _), (_, old, _)) in now.counters.iter().zip(before.counters.iter()) {
            assert!(
                value == old || DROPPED.contains(&name),
                "{name} counts what is dropped"
            );
        }
    }

    /// Records which counters were incremented.
    pub(super) fn take_reach(&mut self) -> Reach {
        let counters = self.rnic.counters();
        let counted = counters.iter().filter(|(_, value, _)| *value > 0);
        self.reach.counters.extend(counted.map(|(name, ..)| name));
        std::mem::take(&mut self.reach)
    }
}

/// See [`Side::snapshot`].
pub(super) struct Snapshot {
    queues: Vec<String>,
    bytes: Vec<u8>,
    counters: Counters,
}

/// Counters that packets without effect may increment.
const DROPPED: [&str; 8] = [
    "rcvd_pkts",
    "rcvd_bytes",
    "malformed",
    "rx_icrc_encapsulated",
    "no_qp",
    "wrong_peer",
    "bad_pkey",
    "wrong_state",
];

fn register(
    rnic: &mut Rnic,
    memory: &Arc<SimMemory>,
    pd: Pd,
    memory_offset: u64,
    length: u64,
    access: Access,
) -> (LKey, RKey) {
    let door: Arc<dyn Memory> = Arc::new(Door::new(memory.clone()));
    let spec = RegionSpec {
        memory: door,
        memory_offset,
        length,
        iova: IOVA,
        access,
    };
    rnic.reg_mr(pd, spec).expect("a region inside of its memory")
}
