//! A queue pair of any transport service that is driven into a state, and every event that can happen to it there.

use std::net::IpAddr;

use rdmux_wire::roce::cnp::Cnp;
use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{
    Aeth, AtomicEth, Bth, Deth, Feth, NakCode, Opcode, Operation as Op, Packet, Reth, Syndrome, Transport,
};

use crate::tests::util::*;
use crate::*;

/// Every event. The name of an answer may end in `for` and the operation that is answered; the default is a WRITE.
pub(super) const EVENTS: &[&str] = &[
    "post SEND",
    "post SEND, key gone",
    "post SEND, no target",
    "post WRITE",
    "post READ",
    "post READ, fenced",
    "post FETCH ADD",
    "post ATOMIC WRITE",
    "post FLUSH",
    "post LOCAL INVALIDATE",
    "post receive",
    "modify Reset",
    "modify Init",
    "modify RTR",
    "modify RTR, incomplete",
    "modify RTS",
    "modify SQD",
    "modify SQE",
    "modify Error",
    "modify Error, SRQ",
    "destroy",
    "CQ overruns",
    "too short",
    "unknown opcode",
    "wrong transport",
    "wrong P_Key",
    "wrong peer",
    "wrong ICRC",
    "CNP",
    "marked",
    "SEND",
    "SEND, no receive",
    "SEND, no such SRQ",
    "SEND, SRQ limit",
    "SEND, too long",
    "SEND, key gone",
    "SEND, last first",
    "SEND, first twice",
    "SEND, gap inside",
    "SEND, wrong Q_Key",
    "SEND to a group",
    "SEND invalidate",
    "SEND invalidate, no right",
    "WRITE",
    "WRITE imm",
    "WRITE imm, no receive",
    "WRITE of nothing",
    "WRITE, no such key",
    "WRITE, other PD",
    "WRITE, out of bounds",
    "WRITE, no right",
    "WRITE, not allowed",
    "WRITE, too short",
    "WRITE, too long",
    "WRITE, last first",
    "WRITE, first twice",
    "READ",
    "READ of nothing",
    "READ, no such key",
    "READ, out of bounds",
    "READ, not allowed",
    "COMPARE SWAP",
    "FETCH ADD",
    "FETCH ADD, odd",
    "FETCH ADD, not allowed",
    "ATOMIC WRITE",
    "ATOMIC WRITE, odd",
    "FLUSH",
    "FLUSH fails",
    "FLUSH, not allowed",
    "FLUSH runs",
    "WRITE behind FLUSH",
    "FETCH ADD behind FLUSH",
    "repeated SEND",
    "repeated WRITE",
    "repeated READ",
    "repeated FETCH ADD",
    "repeated ATOMIC WRITE",
    "repeated FLUSH",
    "repeated FLUSH that runs",
    "after a gap",
    "after a gap twice",
    "gap closes",
    "ACK",
    "ACK again",
    "ACK of nothing",
    "ACK for SEND",
    "ACK for READ",
    "ACK for FETCH ADD",
    "ACK for ATOMIC WRITE",
    "ACK for FLUSH",
    "NAK sequence",
    "NAK sequence, time over",
    "NAK sequence, key gone",
    "NAK sequence for READ",
    "NAK bitmap",
    "NAK invalid",
    "NAK access",
    "NAK operation",
    "NAK reserved",
    "NAK access for READ",
    "NAK operation for FLUSH",
    "RNR NAK",
    "RNR NAK, time over",
    "RNR NAKs to end",
    "data",
    "data for READ",
    "data for READ, a part",
    "data for READ, a gap",
    "data for READ, a gap, time over",
    "data for READ, too long",
    "data for READ, key gone",
    "data for FETCH ADD",
    "original",
    "original for READ",
    "original for FETCH ADD",
    "done for ATOMIC WRITE",
    "done for FLUSH",
    "timeout",
    "timeouts to end",
];

/// Transport service of a table's QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Rc,
    /// RC between peers that retransmit selectively.
    Selective,
    XrcSend,
    XrcRecv,
    Uc,
    Ud,
}

impl Kind {
    fn qp_type(self) -> QpType {
        match self {
            Kind::Rc | Kind::Selective => QpType::Rc,
            Kind::XrcSend => QpType::XrcSend,
            Kind::XrcRecv => QpType::XrcRecv,
            Kind::Uc => QpType::Uc,
            Kind::Ud => QpType::Ud,
        }
    }

    fn transport(self) -> Transport {
        match self {
            Kind::Rc | Kind::Selective => Transport::Rc,
            Kind::XrcSend | Kind::XrcRecv => Transport::Xrc,
            Kind::Uc => Transport::Uc,
            Kind::Ud => Transport::Ud,
        }
    }

    /// Returns whether its requests wait for responses.
    fn is_answered(self) -> bool {
        matches!(self, Kind::Rc | Kind::Selective | Kind::XrcSend)
    }
}

const QKEY: u32 = 0x33;
const MTU: usize = 1024;
/// Number of completions that the QP's CQ holds.
const CQ_DEPTH: u32 = 16;
/// PSN of the request without a response.
const ASKED: i32 = 0;

fn group() -> IpAddr {
    [239, 0, 0, 1].into()
}

/// A packet for the QP, which may be changed before it is sent.
struct Crafted {
    bth: Bth,
    ext: Vec<u8>,
    payload: Vec<u8>,
    src: IpAddr,
    dst: IpAddr,
    traffic_class: u8,
    /// Bits to flip in the ICRC.
    flip: u8,
}

impl Crafted {
    fn bytes(&self) -> Vec<u8> {
        let pad = (4 - self.payload.len() % 4) % 4;
        let bth = Bth {
            pad: pad as u8,
            ..self.bth
        };
        let mut bytes = vec![0; Bth::LEN];
        bth.emit(&mut bytes);
        bytes.extend_from_slice(&self.ext);
        bytes.extend_from_slice(&self.payload);
        bytes.resize(bytes.len() + pad, 0);
        bytes
    }
}

/// A pair whose side 1 has the QP; side 0 only provides the peer's address.
pub(super) struct Bench {
    pair: Pair,
    kind: Kind,
    qpn: Qpn,
    cq: Cqn,
    /// Shared receive queue for its receives; `None` if the QP has its own receive queue.
    srq: Option<Srqn>,
    /// Key of a region whose flushes the test completes.
    slow: RKey,
    /// Key of a region that a work request registered.
    fast: RKey,
    /// Rights of peers on the QP.
    access: Access,
    gone: bool,
}

impl Bench {
    /// Drives a QP into the state of a column; some events need additional preparation.
    pub(super) fn in_state(kind: Kind, column: &str, event: &str) -> Bench {
        let mut bench = Bench::new(kind, event);
        let way = match column {
            "Reset" => 0,
            "Init" => 1,
            "RTR" => 2,
            _ => 3,
        };
        for state in [QpState::Init, QpState::Rtr, QpState::Rts].iter().take(way) {
            bench.modify(*state).expect("the way to RTS");
        }
        if way > 0 && kind != Kind::XrcSend && !event.ends_with("no receive") {
            bench.post_recv().expect("receives are taken from Init on");
        }
        if kind.is_answered() && matches!(column, "RTS" | "SQD") {
            for operation in bench.asked(event) {
                bench.post(operation).expect("sends are taken in RTS");
            }
        }
        bench.outcome();
        match column {
            "SQD" | "Drained" => bench.modify(QpState::Sqd).expect("from RTS to SQD"),
            "SQE" => assert!(bench.apply("post SEND, key gone"), "sends are taken in RTS"),
            "Error" => bench.modify(QpState::Error).expect("from any state to Error"),
            _ => {}
        }
        bench.outcome();
        bench
    }

    fn new(kind: Kind, event: &str) -> Bench {
        let mut pair = Pair::new();
        let slow = pair.slow_region(false, Ok(()));
        let side = &mut pair.sides[1];
        let cq = side.rnic.create_cq(CQ_DEPTH);
        let xrc = (kind == Kind::XrcRecv).then(|| (side.rnic.alloc_xrcd(), cq));
        let shares = xrc.is_some() || kind != Kind::XrcSend && event.contains(", SRQ");
        let (pd, max_wr) = (side.pd, 8);
        let srq = shares.then(|| side.rnic.create_srq(SrqInit { pd, max_wr, xrc }));
        let srq = srq.map(|created| created.expect("PD and CQ are there"));
        let init = QpInit {
            qp_type: kind.qp_type(),
            srq: srq.filter(|_| xrc.is_none()),
            xrcd: xrc.map(|(xrcd, _)| xrcd),
            ..QpInit::new(side.pd, cq)
        };
        let qpn = side.rnic.create_qp(init).expect("what it needs is there");
        if kind == Kind::Ud {
            side.rnic.attach_mcast(qpn, group()).expect("a UD QP");
        }
        let fast = register_by_request(&mut pair);
        Bench {
            pair,
            kind,
            qpn,
            cq,
            srq,
            slow,
            fast,
            access: match event.ends_with("not allowed") {
                true => Access::empty(),
                false => ALL_ACCESS | Access::FLUSH_PERSISTENT,
            },
            gone: false,
        }
    }

    /// Returns the requests that have no response yet when an event occurs.
    fn asked(&self, event: &str) -> Vec<Operation> {
        let (write, behind) = (self.operation("WRITE"), event.split_once(" for "));
        match behind {
            _ if event == "NAK bitmap" => vec![write; 5],
            Some((_, asked)) => {
                let asked = asked.split(',').next().unwrap_or(asked);
                vec![self.operation(asked)]
            }
            None => vec![write],
        }
    }

    /// Returns an operation at the peer by its name.
    fn operation(&self, name: &str) -> Operation {
        let (va, rkey) = (IOVA, self.pair.sides[0].rkey);
        match name {
            "SEND" => Operation::Send { imm: None },
            "WRITE" => Operation::Write { va, rkey, imm: None },
            "READ" => Operation::Read { va, rkey },
            "FETCH ADD" => Operation::FetchAdd { va, rkey, add: 1 },
            "ATOMIC WRITE" => Operation::AtomicWrite { va, rkey },
            "FLUSH" => Operation::Flush {
                va,
                rkey,
                length: 8,
                placement: Placement::GLOBAL,
                selectivity: Selectivity::Range,
            },
            "LOCAL INVALIDATE" => Operation::LocalInvalidate { rkey: self.fast },
            other => panic!("no operation {other}"),
        }
    }

    fn target(&self) -> Target {
        match self.kind {
            Kind::XrcSend => Target::Srq(Srqn(5)),
            Kind::Ud => Target::Datagram {
                path: self.pair.path(1, self.pair.sides[0].address),
                qpn: Qpn::new(5),
                qkey: QKEY,
            },
            Kind::Rc | Kind::Selective | Kind::XrcRecv | Kind::Uc => Target::Connected,
        }
    }

    fn post(&mut self, operation: Operation) -> Result<(), PostError> {
        let bytes = match operation {
            Operation::Flush { .. } | Operation::LocalInvalidate { .. } => 0,
            // The response has two packets.
            Operation::Read { .. } => MTU as u32 + 8,
            _ => 8,
        };
        let sges = match bytes {
            0 => SgeList::EMPTY,
            _ => self.pair.sides[1].sge(0, bytes),
        };
        self.post_with(operation, sges, self.target(), SendFlags::empty())
    }

    fn post_with(
        &mut self,
        operation: Operation,
        sges: SgeList,
        to: Target,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: flags | SendFlags::SIGNALED,
            to,
        };
        let rnic = &mut self.pair.sides[1].rnic;
        rnic.post_send(self.pair.now, self.qpn, request)
    }

    fn post_recv(&mut self) -> Result<(), PostError> {
        let side = &mut self.pair.sides[1];
        let sges = side.sge(0x8000, 40 + 64);
        let request = RecvRequest { wr_id: 2, sges };
        match self.srq {
            Some(srqn) => side.rnic.post_srq_recv(srqn, request),
            None => side.rnic.post_recv(self.pair.now, self.qpn, request),
        }
    }

    /// Modifies the QP with the attributes that the transition needs.
    fn modify(&mut self, to: QpState) -> Result<(), ModifyError> {
        let comes_back = matches!(self.qp_state(), QpState::Rts | QpState::Sqd | QpState::Sqe);
        let mut attr = match to {
            QpState::Rts if comes_back => QpAttributes::default(),
            _ => self.pair.attributes(1, Qpn::new(5), to),
        };
        // Low counts, so that the retries are soon exhausted.
        (attr.retry_count, attr.rnr_retry) = (attr.retry_count.and(Some(1)), attr.rnr_retry.and(Some(1)));
        attr.access = attr.access.and(Some(self.access));
        let (answers, asks) = match self.kind {
            Kind::Rc | Kind::Selective => (true, true),
            Kind::XrcSend => (false, true),
            Kind::XrcRecv => (true, false),
            Kind::Uc | Kind::Ud => (false, false),
        };
        if !answers {
            (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (None, None);
        }
        if !asks {
            (attr.retry_count, attr.rnr_retry, attr.max_rd_atomic) = (None, None, None);
        }
        if !answers && !asks {
            (attr.timeout, attr.window_bytes) = (None, None);
        }
        if self.kind == Kind::Ud {
            attr = QpAttributes {
                qkey: attr.access.map(|_| QKEY),
                sq_psn: attr.sq_psn,
                ..Default::default()
            };
        }
        attr.selective = (self.kind == Kind::Selective && to == QpState::Rtr).then_some(true);
        let rnic = &mut self.pair.sides[1].rnic;
        rnic.modify_qp(self.pair.now, self.qpn, to, &attr)
    }

    fn qp_state(&self) -> QpState {
        let info = self.pair.sides[1].rnic.query_qp(self.qpn);
        info.expect("it is there").state
    }

    pub(super) fn state(&self) -> String {
        if self.gone {
            return "gone".to_owned();
        }
        match self.qp_state() {
            state @ (QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) => {
                format!("{state:?}").to_uppercase()
            }
            other => format!("{other:?}"),
        }
    }

    // Packets for the QP; PSNs count from the first one of the connection.

    fn crafted(&self, op: Op, psn: i32, ext: &[u8], payload: &[u8]) -> Crafted {
        let transport = self.kind.transport();
        let opcode = Opcode {
            transport,
            operation: op,
        };
        let psn = Psn::new(PSN.wrapping_add_signed(psn));
        let mut bth = Bth::new(opcode, self.qpn, psn);
        bth.ack_req = true;
        let mut heads = match transport {
            Transport::Xrc if !op.is_response() => self.srq.map_or(5, |srqn| srqn.0).to_be_bytes().to_vec(),
            Transport::Ud => deth(QKEY),
            _ => Vec::new(),
        };
        heads.extend_from_slice(ext);
        Crafted {
            bth,
            ext: heads,
            payload: payload.to_vec(),
            src: self.pair.sides[0].address,
            dst: self.pair.sides[1].address,
            traffic_class: 0,
            flip: 0,
        }
    }

    fn deliver(&mut self, crafted: &Crafted) {
        self.deliver_bytes(crafted, crafted.bytes());
    }

    fn deliver_bytes(&mut self, crafted: &Crafted, mut bytes: Vec<u8>) {
        let path = Path {
            src: crafted.src,
            dst: crafted.dst,
            src_port: 0xc001,
            traffic_class: crafted.traffic_class,
        };
        let icrc = path.flow().icrc(&bytes, 0).to_le_bytes();
        bytes.extend_from_slice(&[icrc[0], icrc[1], icrc[2], icrc[3] ^ crafted.flip]);
        let arrival = Arrival {
            src: path.src,
            src_port: path.src_port,
            dst: path.dst,
            traffic_class: path.traffic_class,
            bytes: &bytes,
            segment_bytes: bytes.len(),
            local: false,
        };
        self.pair.sides[1].rnic.handle_arrival(self.pair.now, &arrival);
    }

    fn arrive(&mut self, op: Op, psn: i32, ext: &[u8], payload: &[u8]) {
        let crafted = self.crafted(op, psn, ext, payload);
        self.deliver(&crafted);
    }

    fn answer(&mut self, op: Op, psn: i32, syndrome: Syndrome, behind: &[u8]) {
        let mut ext = vec![0; Aeth::LEN];
        Aeth { syndrome, msn: 0 }.emit(&mut ext);
        self.arrive(op, psn, &ext, behind);
    }

    fn ack(&mut self, psn: i32, syndrome: Syndrome) {
        self.answer(Op::Acknowledge, psn, syndrome, &[]);
    }

    fn send(&mut self, psn: i32) {
        self.arrive(Op::SendOnly, psn, &[], &[1; 8]);
    }

    fn write(&mut self, psn: i32, rkey: RKey, length: u32) {
        self.arrive(Op::WriteOnly, psn, &reth(IOVA, rkey, length), &[1; 8]);
    }

    /// Delivers the first packet of a two-packet WRITE.
    fn write_first(&mut self, psn: i32) {
        let rkey = self.pair.sides[1].rkey;
        self.arrive(Op::WriteFirst, psn, &reth(IOVA, rkey, MTU as u32 + 8), &[1; MTU]);
    }

    fn fetch_add(&mut self, psn: i32, va: u64) {
        let rkey = self.pair.sides[1].rkey;
        self.arrive(Op::FetchAdd, psn, &atomic(va, rkey), &[]);
    }

    fn flush(&mut self, psn: i32) {
        let mut ext = vec![0; Feth::LEN];
        let (placement, selectivity) = (Placement::PERSISTENT, Selectivity::Range);
        Feth {
            placement,
            selectivity,
        }
        .emit(&mut ext);
        ext.extend(reth(IOVA, self.slow, 8));
        self.arrive(Op::Flush, psn, &ext, &[]);
    }

    fn end_flush(&mut self, result: Result<(), Fault>) {
        let rnic = &mut self.pair.sides[1].rnic;
        if let Some(job) = rnic.poll_flush() {
            rnic.handle_flush(self.pair.now, job.id, result);
        }
    }

    fn time_out(&mut self) -> bool {
        let rnic = &mut self.pair.sides[1].rnic;
        let Some(at) = rnic.poll_timeout() else {
            return false;
        };
        self.pair.now = at;
        rnic.handle_timeout(at);
        true
    }

    /// Deregisters the region that the QP's and its peer's requests use.
    fn end_region(&mut self) {
        let side = &mut self.pair.sides[1];
        side.rnic.dereg_mr(side.lkey).expect("it is there");
    }

    /// Applies an event; returns false if the event is a call that is refused.
    pub(super) fn apply(&mut self, event: &str) -> bool {
        if let Some(call) = event.strip_prefix("post ") {
            return self.apply_post(call);
        }
        if let Some(to) = event.strip_prefix("modify ") {
            return self.apply_modify(to);
        }
        match event {
            "destroy" => {
                self.pair.sides[1].rnic.destroy_qp(self.qpn);
                self.gone = true;
            }
            "CQ overruns" => self.overrun_cq(),
            "timeout" => {
                self.time_out();
            }
            "timeouts to end" => {
                // The cell shows the effect of the last timeout.
                while self.time_out() && self.pair.sides[1].rnic.poll_timeout().is_some() {
                    self.outcome();
                }
            }
            _ if EVENTS.iter().position(|e| *e == event) < EVENTS.iter().position(|e| *e == "SEND") => {
                self.apply_link(event);
            }
            _ if EVENTS.iter().position(|e| *e == event) < EVENTS.iter().position(|e| *e == "ACK") => {
                self.apply_request(event);
            }
            _ => self.apply_answer(event),
        }
        true
    }

    fn apply_post(&mut self, call: &str) -> bool {
        let side = &self.pair.sides[1];
        let (own, two, to) = (side.sge(0, 8), side.sge(0, MTU as u32 + 8), self.target());
        let none = SendFlags::empty();
        let (send, read) = (self.operation("SEND"), self.operation("READ"));
        let posted = match call {
            "receive" if self.srq.is_none() => self.post_recv(),
            "receive" => {
                let request = RecvRequest { wr_id: 2, sges: own };
                let rnic = &mut self.pair.sides[1].rnic;
                rnic.post_recv(self.pair.now, self.qpn, request)
            }
            "SEND, key gone" => {
                let gone = Sge::new(IOVA, 8, LKey(0x55)).into();
                let posted = self.post_with(send, gone, to, none);
                // The request fails when its bytes are needed.
                self.transmit();
                posted
            }
            "SEND, no target" => {
                let other = match to {
                    Target::Connected => Target::Srq(Srqn(5)),
                    Target::Datagram { .. } | Target::Srq(_) => Target::Connected,
                };
                self.post_with(send, own, other, none)
            }
            "READ, fenced" => {
                let first = self.post_with(self.operation("FETCH ADD"), own, to, none);
                first.and_then(|()| self.post_with(read, two, to, SendFlags::FENCE))
            }
            name => self.post(self.operation(name)),
        };
        posted.is_ok()
    }

    fn apply_modify(&mut self, to: &str) -> bool {
        let to = match to {
            "RTR, incomplete" => {
                let rnic = &mut self.pair.sides[1].rnic;
                let bare = QpAttributes::default();
                let result = rnic.modify_qp(self.pair.now, self.qpn, QpState::Rtr, &bare);
                return result.is_ok();
            }
            "Reset" => QpState::Reset,
            "Init" => QpState::Init,
            "RTR" => QpState::Rtr,
            "RTS" => QpState::Rts,
            "SQD" => QpState::Sqd,
            "SQE" => QpState::Sqe,
            "Error" | "Error, SRQ" => QpState::Error,
            other => panic!("no state {other}"),
        };
        self.modify(to).is_ok()
    }

    /// Fills the CQ by another QP that completes to it.
    fn overrun_cq(&mut self) {
        let side = &mut self.pair.sides[1];
        let other = side.rnic.create_qp(QpInit::new(side.pd, self.cq));
        let other = other.expect("PD and CQ are there");
        let bare = QpAttributes::default();
        let failed = side.rnic.modify_qp(self.pair.now, other, QpState::Error, &bare);
        failed.expect("from any state to Error");
        for _ in 0..=CQ_DEPTH {
            let request = RecvRequest {
                wr_id: 3,
                sges: SgeList::EMPTY,
            };
            let posted = side.rnic.post_recv(self.pair.now, other, request);
            posted.expect("it is flushed at once");
        }
    }

    /// Applies an event of a packet that does not depend on its request: an invalid packet, an ECN mark, a CNP.
    fn apply_link(&mut self, event: &str) {
        let mut packet = self.crafted(Op::SendOnly, 0, &[], &[1; 8]);
        match event {
            "too short" => {
                // A packet without the headers that its opcode requires.
                if self.kind != Kind::Ud {
                    packet.bth.opcode.operation = Op::WriteOnly;
                }
                let bytes = packet.bytes()[..Bth::LEN].to_vec();
                return self.deliver_bytes(&packet, bytes);
            }
            "unknown opcode" => {
                let mut bytes = packet.bytes();
                bytes[0] |= 0x1f;
                return self.deliver_bytes(&packet, bytes);
            }
            "wrong transport" => {
                packet.bth.opcode.transport = match self.kind.transport() {
                    Transport::Rc => Transport::Uc,
                    _ => Transport::Rc,
                };
                packet.ext.clear();
            }
            "wrong P_Key" => packet.bth.pkey = 0x8001,
            "wrong peer" => packet.src = [10, 0, 0, 9].into(),
            "wrong ICRC" => packet.flip = 1,
            "marked" => packet.traffic_class = 3,
            "CNP" => {
                let mut bytes = vec![0; Cnp::LEN];
                Cnp::new(self.qpn).emit(&mut bytes);
                return self.deliver_bytes(&packet, bytes);
            }
            other => panic!("no event {other}"),
        }
        self.deliver(&packet);
    }

    fn apply_request(&mut self, event: &str) {
        let rkey = self.pair.sides[1].rkey;
        let (own, unknown) = (reth(IOVA, rkey, 8), RKey(rkey.0 ^ 0x100));
        let outside = reth(IOVA + MEMORY as u64 - 4, rkey, 8);
        match event {
            "SEND" | "SEND, no receive" => self.send(0),
            "SEND, no such SRQ" => {
                let other = self.srq.map_or(5, |srqn| srqn.0 ^ 1);
                let mut packet = self.crafted(Op::SendOnly, 0, &[], &[1; 8]);
                packet.bth.opcode.transport = Transport::Xrc;
                packet.ext = other.to_be_bytes().to_vec();
                self.deliver(&packet);
            }
            "SEND, SRQ limit" => {
                if let Some(srqn) = self.srq {
                    let armed = self.pair.sides[1].rnic.modify_srq(srqn, None, Some(1));
                    armed.expect("it is within its size");
                }
                self.send(0);
            }
            "SEND, too long" => self.arrive(Op::SendOnly, 0, &[], &[1; 105]),
            "SEND, key gone" => {
                self.end_region();
                self.send(0);
            }
            "SEND, last first" => self.arrive(Op::SendLast, 0, &[], &[1; 8]),
            "SEND, first twice" => {
                self.write_first(0);
                self.send(1);
            }
            "SEND, gap inside" => {
                self.write_first(0);
                self.arrive(Op::WriteLastImm, 2, &[0; 4], &[1; 8]);
            }
            "SEND, wrong Q_Key" => {
                let mut packet = self.crafted(Op::SendOnly, 0, &[], &[1; 8]);
                packet.bth.opcode.transport = Transport::Ud;
                packet.ext = deth(QKEY + 1);
                self.deliver(&packet);
            }
            "SEND to a group" => {
                let mut packet = self.crafted(Op::SendOnly, 0, &[], &[1; 8]);
                (packet.dst, packet.bth.dest_qpn) = (group(), Qpn::MULTICAST);
                self.deliver(&packet);
            }
            "SEND invalidate" => {
                let key = self.fast.0.to_be_bytes();
                self.arrive(Op::SendOnlyInvalidate, 0, &key, &[1; 8]);
            }
            "SEND invalidate, no right" => {
                // The key of a region that cannot be invalidated.
                let key = rkey.0.to_be_bytes();
                self.arrive(Op::SendOnlyInvalidate, 0, &key, &[1; 8]);
            }
            "WRITE" | "WRITE, not allowed" => self.write(0, rkey, 8),
            "WRITE imm" | "WRITE imm, no receive" => {
                let ext = [&own[..], &[0; 4]].concat();
                self.arrive(Op::WriteOnlyImm, 0, &ext, &[1; 8]);
            }
            "WRITE of nothing" => self.arrive(Op::WriteOnly, 0, &reth(7, unknown, 0), &[]),
            "WRITE, no such key" => self.write(0, unknown, 8),
            "WRITE, other PD" => {
                let side = &mut self.pair.sides[1];
                let pd = side.rnic.alloc_pd();
                let moved = side.rnic.rereg_mr(side.lkey, Some(pd), |_| {});
                moved.expect("the PD is there");
                self.write(0, rkey, 8);
            }
            "WRITE, out of bounds" => self.arrive(Op::WriteOnly, 0, &outside, &[1; 8]),
            "WRITE, no right" => {
                let side = &mut self.pair.sides[1];
                let changed = side
                    .rnic
                    .rereg_mr(side.lkey, None, |spec| spec.access = Access::LOCAL_WRITE);
                changed.expect("fewer rights are always allowed");
                self.write(0, rkey, 8);
            }
            "WRITE, too short" => self.write(0, rkey, 16),
            "WRITE, too long" => self.write(0, rkey, 4),
            "WRITE, last first" => self.arrive(Op::WriteLast, 0, &[], &[1; 8]),
            "WRITE, first twice" => {
                self.write_first(0);
                self.outcome();
                self.write_first(1);
            }
            "READ" | "READ, not allowed" => self.arrive(Op::ReadRequest, 0, &own, &[]),
            "READ of nothing" => self.arrive(Op::ReadRequest, 0, &reth(7, unknown, 0), &[]),
            "READ, no such key" => {
                self.arrive(Op::ReadRequest, 0, &reth(IOVA, unknown, 8), &[]);
            }
            "READ, out of bounds" => self.arrive(Op::ReadRequest, 0, &outside, &[]),
            "COMPARE SWAP" => self.arrive(Op::CompareSwap, 0, &atomic(IOVA, rkey), &[]),
            "FETCH ADD" | "FETCH ADD, not allowed" => self.fetch_add(0, IOVA),
            "FETCH ADD, odd" => self.fetch_add(0, IOVA + 1),
            "ATOMIC WRITE" => self.arrive(Op::AtomicWrite, 0, &own, &[1; 8]),
            "ATOMIC WRITE, odd" => {
                self.arrive(Op::AtomicWrite, 0, &reth(IOVA + 1, rkey, 8), &[1; 8]);
            }
            "FLUSH" | "FLUSH, not allowed" => {
                self.flush(0);
                self.end_flush(Ok(()));
            }
            "FLUSH fails" => {
                self.flush(0);
                self.end_flush(Err(Fault::Io(5)));
            }
            "FLUSH runs" => self.flush(0),
            "WRITE behind FLUSH" => {
                self.flush(0);
                self.write(1, rkey, 8);
            }
            "FETCH ADD behind FLUSH" => {
                self.flush(0);
                self.outcome();
                self.fetch_add(1, IOVA);
                // The response comes after that of the FLUSH, so the FLUSH must end first.
                self.end_flush(Ok(()));
            }
            "repeated FLUSH that runs" => {
                self.flush(0);
                self.outcome();
                self.flush(0);
            }
            "after a gap" => self.send(1),
            "after a gap twice" => {
                self.send(1);
                self.outcome();
                self.send(2);
            }
            "gap closes" => {
                self.send(1);
                self.outcome();
                self.write(0, rkey, 8);
            }
            other => {
                let Some(name) = other.strip_prefix("repeated ") else {
                    panic!("no event {other}");
                };
                self.apply_request(name);
                self.outcome();
                self.apply_request(name);
            }
        }
    }

    fn apply_answer(&mut self, event: &str) {
        let nak = |code| Syndrome::Nak(code);
        let rnr = Syndrome::RnrNak { timer: 1 };
        match event {
            "ACK again" => self.ack(ASKED - 1, Syndrome::ACK),
            "ACK of nothing" => self.ack(100, Syndrome::ACK),
            "ACK" | "ACK for SEND" | "ACK for FETCH ADD" | "ACK for ATOMIC WRITE" | "ACK for FLUSH" => {
                self.ack(ASKED, Syndrome::ACK);
            }
            "ACK for READ" => self.ack(ASKED + 1, Syndrome::ACK),
            "NAK sequence" | "NAK sequence for READ" => self.ack(ASKED, nak(NakCode::PsnSequence)),
            "NAK sequence, time over" => {
                self.ack(ASKED, nak(NakCode::PsnSequence));
                self.outcome();
                self.time_out();
            }
            "NAK sequence, key gone" => {
                self.end_region();
                self.ack(ASKED, nak(NakCode::PsnSequence));
                self.transmit();
                self.time_out();
            }
            "NAK bitmap" => {
                // The first and the third packet are missing, and three others have arrived.
                let mut bitmap = [0; 4];
                Sack::emit([1, 3, 4].into_iter(), &mut bitmap);
                self.answer(Op::Acknowledge, ASKED, nak(NakCode::PsnSequence), &bitmap);
            }
            "NAK invalid" => self.ack(ASKED, nak(NakCode::InvalidRequest)),
            "NAK access" | "NAK access for READ" => self.ack(ASKED, nak(NakCode::RemoteAccess)),
            "NAK operation" | "NAK operation for FLUSH" => {
                self.ack(ASKED, nak(NakCode::RemoteOperation));
            }
            "NAK reserved" => self.arrive(Op::Acknowledge, ASKED, &[0x7f, 0, 0, 0], &[]),
            "RNR NAK" => self.ack(ASKED, rnr),
            "RNR NAK, time over" => {
                self.ack(ASKED, rnr);
                self.outcome();
                self.time_out();
            }
            "RNR NAKs to end" => {
                for _ in 0..4 {
                    self.ack(ASKED, rnr);
                    self.transmit();
                    self.time_out();
                }
            }
            "data" => self.answer(Op::ReadResponseOnly, ASKED, Syndrome::ACK, &[1; 8]),
            "data for READ" => {
                self.answer(Op::ReadResponseFirst, ASKED, Syndrome::ACK, &[1; MTU]);
                self.answer(Op::ReadResponseLast, ASKED + 1, Syndrome::ACK, &[1; 8]);
            }
            "data for READ, a part" => {
                self.answer(Op::ReadResponseFirst, ASKED, Syndrome::ACK, &[1; MTU]);
            }
            "data for READ, a gap" => {
                self.answer(Op::ReadResponseLast, ASKED + 1, Syndrome::ACK, &[1; 8]);
            }
            "data for READ, a gap, time over" => {
                self.answer(Op::ReadResponseLast, ASKED + 1, Syndrome::ACK, &[1; 8]);
                self.outcome();
                self.time_out();
            }
            "data for READ, too long" => {
                self.answer(Op::ReadResponseFirst, ASKED, Syndrome::ACK, &[1; MTU]);
                self.answer(Op::ReadResponseLast, ASKED + 1, Syndrome::ACK, &[1; 12]);
            }
            "data for READ, key gone" => {
                self.end_region();
                self.answer(Op::ReadResponseFirst, ASKED, Syndrome::ACK, &[1; MTU]);
            }
            "data for FETCH ADD" => {
                self.answer(Op::ReadResponseOnly, ASKED, Syndrome::ACK, &[1; 8]);
            }
            // The AtomicAckETH is in the place of a payload.
            "original" | "original for READ" | "original for FETCH ADD" => {
                self.answer(Op::AtomicAcknowledge, ASKED, Syndrome::ACK, &[0; 8]);
            }
            "done for ATOMIC WRITE" | "done for FLUSH" => {
                self.answer(Op::ReadResponseOnly, ASKED, Syndrome::ACK, &[]);
            }
            other => panic!("no event {other}"),
        }
    }

    /// Returns the packets that the QP sends.
    fn transmit(&mut self) -> TransmitBuf {
        let mut buf = TransmitBuf::new(1 << 20, false);
        let rnic = &mut self.pair.sides[1].rnic;
        while rnic.poll_transmit(self.pair.now, &mut buf, true) {}
        buf
    }

    /// Returns the packets sent and the notifications of the user.
    pub(super) fn outcome(&mut self) -> (String, String) {
        let buf = self.transmit();
        let sent = buf
            .trains()
            .iter()
            .map(|train| sent_name(&buf.bytes()[train.range.clone()]));
        let sent: Vec<String> = sent.collect();
        let rnic = &mut self.pair.sides[1].rnic;
        let completions = std::iter::from_fn(|| rnic.poll_cq(self.cq));
        let own = completions.filter(|wc| wc.qpn == self.qpn);
        let mut told: Vec<String> = own.map(|wc| completion_name(&wc)).collect();
        told.extend(std::iter::from_fn(|| rnic.poll_event()).filter_map(|event| event_name(&event)));
        let or_nothing = |all: Vec<String>| match all.is_empty() {
            true => "-".to_owned(),
            false => all.join("+"),
        };
        (or_nothing(sent), or_nothing(told))
    }
}

/// Registers a region by a work request, so that a request can invalidate it.
fn register_by_request(pair: &mut Pair) -> RKey {
    let side = &mut pair.sides[1];
    let (_, key) = side.rnic.alloc_mr(side.pd, 64).expect("there are keys");
    let spec = RegionSpec {
        memory: side.memory.clone(),
        memory_offset: 0,
        length: 64,
        iova: IOVA,
        access: ALL_ACCESS,
    };
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Register(Box::new(Registration { key, spec })),
        sges: SgeList::EMPTY,
        flags: SendFlags::empty(),
        to: Target::Connected,
    };
    side.rnic
        .post_send(pair.now, side.qpn, request)
        .expect("it is in RTS");
    let mut buf = TransmitBuf::new(1 << 20, false);
    while side.rnic.poll_transmit(pair.now, &mut buf, true) {}
    key
}

fn reth(va: u64, rkey: RKey, length: u32) -> Vec<u8> {
    let mut ext = vec![0; Reth::LEN];
    Reth { va, rkey, length }.emit(&mut ext);
    ext
}

fn atomic(va: u64, rkey: RKey) -> Vec<u8> {
    let mut ext = vec![0; AtomicEth::LEN];
    let (swap_or_add, compare) = (1, 0);
    AtomicEth {
        va,
        rkey,
        swap_or_add,
        compare,
    }
    .emit(&mut ext);
    ext
}

fn deth(qkey: u32) -> Vec<u8> {
    let mut ext = vec![0; Deth::LEN];
    let src_qpn = Qpn::new(5);
    Deth { qkey, src_qpn }.emit(&mut ext);
    ext
}

fn sent_name(bytes: &[u8]) -> String {
    if Cnp::is_cnp(bytes) {
        return "CNP".to_owned();
    }
    let packet = Packet::parse(bytes).expect("what is sent can be read");
    let syndrome = packet.aeth().map(|aeth| aeth.syndrome);
    match (packet.bth.opcode.operation, syndrome) {
        (Op::Acknowledge, Some(Syndrome::Ack { .. })) => "ACK".into(),
        (Op::Acknowledge, Some(Syndrome::RnrNak { .. })) => "RNR".into(),
        (Op::Acknowledge, Some(Syndrome::Nak(code))) => match code {
            NakCode::PsnSequence if !packet.payload().is_empty() => "NAK:Bitmap".into(),
            NakCode::PsnSequence => "NAK:Seq".into(),
            NakCode::InvalidRequest => "NAK:InvReq".into(),
            NakCode::RemoteAccess => "NAK:Access".into(),
            NakCode::RemoteOperation => "NAK:Op".into(),
        },
        (Op::ReadResponseOnly, _) if packet.payload().is_empty() => "Done".into(),
        (Op::ReadResponseOnly, _) => "Data".into(),
        (Op::AtomicAcknowledge, _) => "Original".into(),
        (other, _) => format!("{other:?}"),
    }
}

fn completion_name(wc: &WorkCompletion) -> String {
    match wc.status {
        Status::Success => format!("{:?}", wc.opcode),
        status => format!("{:?}!{}", wc.opcode, status_name(status)),
    }
}

fn status_name(status: Status) -> &'static str {
    match status {
        Status::Flushed => "Flush",
        Status::LocalLength => "Length",
        Status::LocalProtection => "Protection",
        Status::RemoteInvalidRequest => "InvReq",
        Status::RemoteAccess => "Access",
        Status::RemoteOperation => "Op",
        Status::RetryExceeded => "Retry",
        Status::RnrRetryExceeded => "RnrRetry",
        Status::BadResponse => "BadResp",
        other => panic!("no cell has {other:?}"),
    }
}

/// Returns the name of an asynchronous event.
fn event_name(event: &Event) -> Option<String> {
    Some(match event {
        Event::QpError(_, status, Cause::PeerRequest) => format!("QP:{}", status_name(*status)),
        Event::QpError(_, _, Cause::QueueOverrun | Cause::ShareOverrun) => "QP:Overrun".into(),
        Event::QpError(_, _, Cause::Injected) => panic!("no fault is asked for"),
        // The completion reports this error.
        Event::QpError(_, _, Cause::OwnRequest) => return None,
        Event::CqError(_) => "CQ:Overrun".into(),
        Event::CommunicationEstablished(_) => "Established".into(),
        Event::SqDrained(_) => "Drained".into(),
        Event::LastWqeReached(_) => "LastWqe".into(),
        Event::SrqLimitReached(_) => "SrqLimit".into(),
        Event::Completion(_) => panic!("no queue is armed"),
        Event::WantsGrant(..) => panic!("no peer is on this host"),
        Event::FirstRequest(_) => panic!("nobody asks for it"),
    })
}
