//! Two devices, a virtual clock and a link between them.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use crate::*;

/// Bytes of each side's memory.
pub(super) const MEMORY: usize = 4 << 20;
/// Address of each side's memory.
pub(super) const IOVA: u64 = 0x7000_0000_0000;
pub(super) const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::FLUSH_GLOBAL);

pub(super) struct Side {
    pub(super) rnic: Rnic,
    pub(super) memory: Arc<HeapMemory>,
    pub(super) pd: Pd,
    pub(super) lkey: LKey,
    pub(super) rkey: RKey,
    pub(super) cq: Cqn,
    pub(super) qpn: Qpn,
    pub(super) address: IpAddr,
    /// Datagrams in flight to this side: path, bytes, segment size, and whether they go through memory.
    pub(super) inbox: VecDeque<(Path, Vec<u8>, usize, bool)>,
}

impl Side {
    fn new(last: u8, traffic: Traffic) -> Side {
        let address = IpAddr::from([10, 0, 0, last]);
        let config = Config {
            address,
            slot: last,
            seed: [last; 32],
            guid: u64::from(last),
            gsi_src_port: 0xc000,
            receive_window_bytes: 1 << 18,
            traffic,
            mtu: 1024,
        };
        let mut rnic = Rnic::new(config);
        let memory = Arc::new(HeapMemory::new(MEMORY));
        let pd = rnic.alloc_pd();
        let spec = RegionSpec {
            memory: memory.clone(),
            memory_offset: 0,
            length: MEMORY as u64,
            iova: IOVA,
            access: ALL_ACCESS,
        };
        let (lkey, rkey) = rnic.reg_mr(pd, spec).unwrap();
        let cq = rnic.create_cq(1 << 16);
        let init = QpInit {
            max_send_wr: 1 << 12,
            max_recv_wr: 1 << 12,
            ..QpInit::new(pd, cq)
        };
        let qpn = rnic.create_qp(init).unwrap();
        Side {
            rnic,
            memory,
            pd,
            lkey,
            rkey,
            cq,
            qpn,
            address,
            inbox: VecDeque::new(),
        }
    }

    pub(super) fn sge(&self, offset: u64, length: u32) -> SgeList {
        Sge::new(IOVA + offset, length, self.lkey).into()
    }

    pub(super) fn completions(&mut self) -> Vec<WorkCompletion> {
        std::iter::from_fn(|| self.rnic.poll_cq(self.cq)).collect()
    }

    /// Returns the id and the status of each completion, which is all that most tests look at.
    pub(super) fn completed(&mut self) -> Vec<(u64, Status)> {
        let all = self.completions();
        all.iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    pub(super) fn state(&self) -> QpState {
        self.rnic.query_qp(self.qpn).unwrap().state
    }
}

/// Memory whose persistent flush the driver executes; with `immediate` set the flush ends at once with `result`.
#[derive(Debug)]
pub(super) struct SlowMemory {
    pub(super) heap: HeapMemory,
    pub(super) immediate: bool,
    pub(super) result: Result<(), Fault>,
}

impl Memory for SlowMemory {
    fn len(&self) -> u64 {
        self.heap.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.heap.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.heap.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.heap.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.immediate || !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        self.result
    }
}

type Deliver = dyn FnMut(usize, &mut Vec<u8>) -> bool;

/// A connected pair of RC QPs. Tests call side 0 the requester, though both sides can send requests.
pub(super) struct Pair {
    pub(super) sides: [Side; 2],
    pub(super) now: Time,
    /// Called with each datagram and the side that it goes to; returning false drops the datagram.
    pub(super) deliver: Box<Deliver>,
    /// Sides to which packets are ECN-marked in flight, if they are ECN capable.
    pub(super) marked: [bool; 2],
    /// Sides that do nothing; datagrams to them wait.
    pub(super) stopped: [bool; 2],
    /// Number of datagrams that each side has taken.
    taken: [u32; 2],
    buf: TransmitBuf,
}

pub(super) const PSN: u32 = 0xff_fff0;

impl Pair {
    pub(super) fn new() -> Pair {
        Pair::with(|_, _| {})
    }

    /// Returns a pair whose attributes to RTR and to RTS are changed by `change`.
    pub(super) fn with(change: impl Fn(&mut QpAttributes, &mut QpAttributes)) -> Pair {
        Pair::with_traffic(Traffic::default(), change)
    }

    /// Like [`Pair::with`], with another traffic configuration of the devices.
    pub(super) fn with_traffic(
        traffic: Traffic,
        change: impl Fn(&mut QpAttributes, &mut QpAttributes),
    ) -> Pair {
        let mut pair = Pair {
            sides: [Side::new(1, traffic), Side::new(2, traffic)],
            now: Time(1),
            deliver: Box::new(|_, _| true),
            marked: [false; 2],
            stopped: [false; 2],
            taken: [0; 2],
            buf: TransmitBuf::new(1 << 18, true),
        };
        for i in 0..2 {
            pair.connect(i, &change);
        }
        pair
    }

    fn connect(&mut self, i: usize, change: &impl Fn(&mut QpAttributes, &mut QpAttributes)) {
        let (qpn, dest_qpn) = (self.sides[i].qpn, self.sides[1 - i].qpn);
        self.connect_qp(i, qpn, dest_qpn, change, QpState::Rts);
    }

    /// Returns the attributes for the transition of a side's QP to `to` from the state before it.
    pub(super) fn attributes(&self, i: usize, dest_qpn: Qpn, to: QpState) -> QpAttributes {
        match to {
            QpState::Init => QpAttributes {
                access: Some(ALL_ACCESS | Access::FLUSH_PERSISTENT),
                ..Default::default()
            },
            QpState::Rtr => QpAttributes {
                path: Some(self.path(i, self.sides[1 - i].address)),
                path_mtu: Some(1024),
                dest_qpn: Some(dest_qpn),
                rq_psn: Some(Psn::new(PSN)),
                max_dest_rd_atomic: Some(16),
                min_rnr_timer: Some(1),
                window_bytes: Some(64 << 10),
                peer_is_rdmux: Some(true),
                ..Default::default()
            },
            QpState::Rts => QpAttributes {
                sq_psn: Some(Psn::new(PSN)),
                timeout: Some(10),
                retry_count: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(16),
                ..Default::default()
            },
            QpState::Reset | QpState::Sqd | QpState::Sqe | QpState::Error => QpAttributes::default(),
        }
    }

    pub(super) fn connect_qp(
        &mut self,
        i: usize,
        qpn: Qpn,
        dest_qpn: Qpn,
        change: &impl Fn(&mut QpAttributes, &mut QpAttributes),
        to: QpState,
    ) {
        let [init, mut rtr, mut rts] =
            [QpState::Init, QpState::Rtr, QpState::Rts].map(|state| self.attributes(i, dest_qpn, state));
        change(&mut rtr, &mut rts);
        let rnic = &mut self.sides[i].rnic;
        match rnic.query_qp(qpn).unwrap().qp_type {
            QpType::XrcSend => (rtr.max_dest_rd_atomic, rtr.min_rnr_timer) = (None, None),
            QpType::XrcRecv => (rts.retry_count, rts.rnr_retry, rts.max_rd_atomic) = (None, None, None),
            QpType::Uc => {
                rtr = QpAttributes {
                    max_dest_rd_atomic: None,
                    min_rnr_timer: None,
                    window_bytes: None,
                    peer_is_rdmux: None,
                    ..rtr
                };
                rts = QpAttributes {
                    sq_psn: rts.sq_psn,
                    ..Default::default()
                };
            }
            QpType::Rc | QpType::Ud => {}
        }
        for (state, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            rnic.modify_qp(self.now, qpn, state, &attr).unwrap();
            if state == to {
                break;
            }
        }
    }

    /// Creates a QP of another type on a side, in Reset.
    pub(super) fn create_qp(&mut self, i: usize, qp_type: QpType) -> Qpn {
        let side = &mut self.sides[i];
        let init = QpInit {
            qp_type,
            ..QpInit::new(side.pd, side.cq)
        };
        side.rnic.create_qp(init).unwrap()
    }

    /// Creates a UD QP that is ready to send.
    pub(super) fn ud_qp(&mut self, i: usize, qkey: u32) -> Qpn {
        let qpn = self.create_qp(i, QpType::Ud);
        self.ready_datagram(i, qpn, qkey);
        qpn
    }

    pub(super) fn ready_datagram(&mut self, i: usize, qpn: Qpn, qkey: u32) {
        let init = QpAttributes {
            qkey: Some(qkey),
            ..Default::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(PSN)),
            ..Default::default()
        };
        let steps = [
            (QpState::Init, init),
            (QpState::Rtr, QpAttributes::default()),
            (QpState::Rts, rts),
        ];
        for (to, attr) in steps {
            self.sides[i].rnic.modify_qp(self.now, qpn, to, &attr).unwrap();
        }
    }

    /// Returns a pair of UC QPs.
    pub(super) fn uc() -> Pair {
        let mut pair = Pair::new();
        let side = &pair.sides[1];
        let answering = QpInit {
            qp_type: QpType::Uc,
            ..QpInit::new(side.pd, side.cq)
        };
        pair.replace_qps(QpType::Uc, answering);
        pair
    }

    /// Returns the path from a side to an address.
    pub(super) fn path(&self, from: usize, dst: IpAddr) -> Path {
        Path {
            src: self.sides[from].address,
            dst,
            src_port: 0xc001,
            traffic_class: 0,
        }
    }

    /// Moves a side's QP back to RTR, as if it had never been further.
    pub(super) fn back_to_rtr(&mut self, i: usize) {
        let (qpn, dest_qpn) = (self.sides[i].qpn, self.sides[1 - i].qpn);
        self.modify(i, QpState::Reset, &QpAttributes::default());
        self.connect_qp(i, qpn, dest_qpn, &|_, _| {}, QpState::Rtr);
    }

    /// Creates a second connection between the same sides.
    pub(super) fn second_qps(&mut self) -> (Qpn, Qpn) {
        let [a, b] = [0, 1].map(|i| {
            let side = &mut self.sides[i];
            let init = QpInit {
                max_send_wr: 16,
                max_recv_wr: 16,
                ..QpInit::new(side.pd, side.cq)
            };
            side.rnic.create_qp(init).unwrap()
        });
        self.connect_qp(0, a, b, &|_, _| {}, QpState::Rts);
        self.connect_qp(1, b, a, &|_, _| {}, QpState::Rts);
        (a, b)
    }

    /// Replaces the first QPs: side 0's by one of another type, side 1's by one made with `answering`.
    pub(super) fn replace_qps(&mut self, asking: QpType, answering: QpInit) {
        let asking = QpInit {
            qp_type: asking,
            ..QpInit::new(self.sides[0].pd, self.sides[0].cq)
        };
        for (side, init) in self.sides.iter_mut().zip([asking, answering]) {
            side.rnic.destroy_qp(side.qpn);
            side.qpn = side.rnic.create_qp(init).unwrap();
        }
        for i in 0..2 {
            self.connect(i, &|_, _| {});
        }
    }

    /// Moves a side's QP to a state.
    pub(super) fn modify(&mut self, i: usize, to: QpState, attributes: &QpAttributes) {
        let side = &mut self.sides[i];
        side.rnic.modify_qp(self.now, side.qpn, to, attributes).unwrap();
    }

    pub(super) fn try_post(
        &mut self,
        i: usize,
        to: Target,
        operation: Operation,
        sges: SgeList,
    ) -> Result<(), PostError> {
        let request = SendRequest {
            wr_id: 7,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to,
        };
        let side = &mut self.sides[i];
        side.rnic.post_send(self.now, side.qpn, request)
    }

    pub(super) fn post(&mut self, i: usize, operation: Operation, sges: SgeList) {
        self.try_post(i, Target::Connected, operation, sges).unwrap();
    }

    /// Posts a receive to a side's QP.
    pub(super) fn recv(&mut self, i: usize, wr_id: u64, offset: u64, length: u32) {
        self.recv_at(i, self.sides[i].qpn, wr_id, offset, length);
    }

    /// Posts a receive to another QP of a side.
    pub(super) fn recv_at(&mut self, i: usize, qpn: Qpn, wr_id: u64, offset: u64, length: u32) {
        let side = &mut self.sides[i];
        let sges = side.sge(offset, length);
        let request = RecvRequest { wr_id, sges };
        side.rnic.post_recv(self.now, qpn, request).unwrap();
    }

    /// Sends every packet as a datagram of its own from here on.
    pub(super) fn disable_trains(&mut self) {
        self.buf.disable_gso();
    }

    /// Registers memory at side 1 that accepts persistent flushes.
    pub(super) fn slow_region(&mut self, immediate: bool, result: Result<(), Fault>) -> RKey {
        let spec = RegionSpec {
            memory: Arc::new(SlowMemory {
                heap: HeapMemory::new(1 << 16),
                immediate,
                result,
            }),
            memory_offset: 0,
            length: 1 << 16,
            iova: IOVA,
            access: ALL_ACCESS | Access::FLUSH_PERSISTENT,
        };
        let side = &mut self.sides[1];
        side.rnic.reg_mr(side.pd, spec).unwrap().1
    }

    /// Posts a persistent FLUSH of the whole region at side 0.
    pub(super) fn flush(&mut self, rkey: RKey) {
        let operation = Operation::Flush {
            va: 0,
            rkey,
            length: 0,
            placement: Placement::PERSISTENT,
            selectivity: Selectivity::MemoryRegion,
        };
        self.post(0, operation, SgeList::EMPTY);
    }

    /// Lets `ns` pass and handles the timers and datagrams in between.
    pub(super) fn pass(&mut self, ns: u64) {
        let end = self.now + ns;
        loop {
            while self.step() {}
            let Some(next) = self.next_timer().filter(|at| *at <= end) else {
                break;
            };
            self.now = self.now.max(next);
            self.handle_timeouts();
        }
        self.now = end;
    }

    pub(super) fn write(&mut self, from: u64, to: u64, length: u32) {
        let operation = Operation::Write {
            va: IOVA + to,
            rkey: self.sides[1].rkey,
            imm: None,
        };
        let sges = self.sides[0].sge(from, length);
        self.post(0, operation, sges);
    }

    /// Delivers the datagrams in flight in both directions until none is left, then advances the clock to the next timer. Ends when no
    /// timer is left.
    pub(super) fn run(&mut self) {
        for _ in 0..100_000 {
            if self.step() {
                continue;
            }
            let Some(next) = self.next_timer() else { return };
            // A stale timer, left over from before some progress, fires without effect.
            self.now = self.now.max(next);
            self.handle_timeouts();
        }
        panic!("the pair does not come to rest");
    }

    fn next_timer(&self) -> Option<Time> {
        let running = self
            .sides
            .iter()
            .zip(self.stopped)
            .filter(|(_, stopped)| !stopped);
        running.filter_map(|(side, _)| side.rnic.poll_timeout()).min()
    }

    fn handle_timeouts(&mut self) {
        let waits = self.sides.each_ref().map(|side| !side.inbox.is_empty());
        for (i, side) in self.sides.iter_mut().enumerate() {
            let link = LinkProgress {
                taken: self.taken[1 - i],
                all: waits == [false; 2],
            };
            if !self.stopped[i] {
                side.rnic.handle_timeout_with(self.now, &|_, _| Some(link));
            }
        }
    }

    /// Makes a side take the next datagram that waits for it and ignore it.
    pub(super) fn ignore_one(&mut self, i: usize) {
        self.taken[i] += u32::from(self.sides[i].inbox.pop_front().is_some());
    }

    /// Sets for both sides whether packets go through memory.
    pub(super) fn set_local(&mut self, local: bool) {
        for side in &mut self.sides {
            side.rnic.set_local(side.qpn, local);
        }
    }

    /// Sends and delivers the pending datagrams of both sides once; returns whether there were any.
    pub(super) fn step(&mut self) -> bool {
        let mut moved = false;
        for i in 0..2 {
            while !self.stopped[i] {
                self.buf.clear();
                let more = self.sides[i].rnic.poll_transmit(self.now, &mut self.buf, true);
                for train in self.buf.trains() {
                    moved = true;
                    let dst = train.path.dst;
                    for to in 0..2 {
                        if dst != self.sides[to].address && !dst.is_multicast() {
                            continue;
                        }
                        let mut path = train.path;
                        if self.marked[to] && path.traffic_class & ECN_MARKED != 0 {
                            path.traffic_class |= ECN_MARKED;
                        }
                        let mut bytes = self.buf.bytes()[train.range.clone()].to_vec();
                        if (self.deliver)(to, &mut bytes) {
                            let segment_bytes = train.segment_bytes;
                            let datagram = (path, bytes, segment_bytes, train.local);
                            self.sides[to].inbox.push_back(datagram);
                        }
                    }
                }
                if !more {
                    break;
                }
            }
        }
        for (i, side) in self.sides.iter_mut().enumerate() {
            while !self.stopped[i]
                && let Some((path, bytes, segment_bytes, local)) = side.inbox.pop_front()
            {
                self.taken[i] += 1;
                moved = true;
                let arrival = Arrival {
                    src: path.src,
                    src_port: path.src_port,
                    dst: path.dst,
                    traffic_class: path.traffic_class,
                    bytes: &bytes,
                    segment_bytes,
                    local,
                };
                side.rnic.handle_arrival(self.now, &arrival);
            }
        }
        moved
    }

    /// Returns a packet as side 0 would send it to side 1's QP, ICRC included.
    pub(super) fn craft(&self, packet_without_icrc: &[u8]) -> Vec<u8> {
        self.craft_with_id(packet_without_icrc, 0)
    }

    /// Like [`Pair::craft`], with an IPv4 identification.
    pub(super) fn craft_with_id(&self, packet_without_icrc: &[u8], ip_id: u16) -> Vec<u8> {
        self.craft_from(0, packet_without_icrc, ip_id)
    }

    fn craft_from(&self, from: usize, packet_without_icrc: &[u8], ip_id: u16) -> Vec<u8> {
        let path = Path {
            src: self.sides[from].address,
            dst: self.sides[1 - from].address,
            src_port: 0xc001,
            traffic_class: 0,
        };
        let icrc = path.flow().icrc(packet_without_icrc, ip_id);
        let mut bytes = packet_without_icrc.to_vec();
        bytes.extend_from_slice(&icrc.to_le_bytes());
        bytes
    }

    /// Delivers a packet from side 1 to side 0; the ICRC is added here.
    pub(super) fn inject_back(&mut self, packet_without_icrc: &[u8]) {
        let bytes = self.craft_from(1, packet_without_icrc, 0);
        let src = self.sides[1].address;
        self.sides[0]
            .rnic
            .handle_datagram(self.now, src, 0xc001, &bytes, bytes.len());
    }

    /// Delivers a datagram from side 0 to side 1.
    pub(super) fn inject(&mut self, bytes: &[u8]) {
        let src = self.sides[0].address;
        self.sides[1]
            .rnic
            .handle_datagram(self.now, src, 0xc001, bytes, bytes.len());
    }
}

/// Returns bytes whose values depend on their offset.
pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}
