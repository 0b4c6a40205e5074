//! UC and UD queue pairs as tables, written as those of RC are: each state with each event. IBTA Vol 1, 10.3.1 (states), 9.8 and
//! 9.9.3 (what comes in).
//!
//! From Init on a receive is posted. Nothing of the send queue is ever open: a request is complete when it has left.

use rdmux_wire::roce::{Bth, Deth, Opcode, Operation as Op, Packet, Reth, Transport};

use super::qp_table::{completion_name, event_name};
use super::table::check;
use super::util::*;
use crate::*;

const UC: &str = "
event                  | Reset     | Init               | RTR                                       | RTS                           | SQD                           | SQE                           | Error          | section
post SEND              | !         | !                  | !                                         | = SendOnly Send               | .                             | = - Send!Flush                | = - Send!Flush | 10.3.1, 11.4.1.1
post SEND, no such key | !         | !                  | !                                         | SQE - Send!Protection         | .                             | = - Send!Flush                | = - Send!Flush | 10.3.1.6, 9.9.2
post READ              | !         | !                  | !                                         | !                             | !                             | !                             | !              | 10.3.1, 11.4.1.1
post receive           | !         | .                  | .                                         | .                             | .                             | .                             | = - Recv!Flush | 10.3.1, 11.4.1.2
modify Reset           | .         | Reset - -          | Reset - -                                 | Reset - -                     | Reset - -                     | Reset - -                     | Reset - -      | 10.3.1.1
modify Init            | Init - -  | .                  | !                                         | !                             | !                             | !                             | !              | 10.3.1.2
modify RTR             | !         | RTR - -            | !                                         | !                             | !                             | !                             | !              | 10.3.1.3
modify RTS             | !         | !                  | RTS - -                                   | .                             | RTS - -                       | RTS - -                       | !              | 10.3.1.4
modify SQD             | !         | !                  | !                                         | SQD - Drained                 | .                             | !                             | !              | 10.3.1.5
modify Error           | Error - - | Error - Recv!Flush | Error - Recv!Flush                        | Error - Recv!Flush            | Error - Recv!Flush            | Error - Recv!Flush            | .              | 10.3.1.7
destroy                | gone - -  | gone - -           | gone - -                                  | gone - -                      | gone - -                      | gone - -                      | gone - -       | 11.2.4.4
SEND                   | .         | .                  | = - Recv+Established                      | = - Recv                      | = - Recv                      | = - Recv                      | .              | 9.8.2.2
SEND, no receive       | .         | .                  | = - Established                           | .                             | .                             | .                             | .              | 9.9.3
SEND, too long         | .         | .                  | Error - Recv!Length+Established+QP:Length | Error - Recv!Length+QP:Length | Error - Recv!Length+QP:Length | Error - Recv!Length+QP:Length | .              | 9.9.3
SEND, last first       | .         | .                  | = - Established                           | .                             | .                             | .                             | .              | 9.8.2.2
SEND, first twice      | .         | .                  | = - Recv+Established                      | = - Recv                      | = - Recv                      | = - Recv                      | .              | 9.8.2.2
WRITE                  | .         | .                  | = - Established                           | .                             | .                             | .                             | .              | 9.8.2.2
WRITE imm              | .         | .                  | = - RecvRdmaWithImm+Established           | = - RecvRdmaWithImm           | = - RecvRdmaWithImm           | = - RecvRdmaWithImm           | .              | 9.8.2.2
WRITE, no such key     | .         | .                  | = - Established                           | .                             | .                             | .                             | .              | 9.9.3
after a gap            | .         | .                  | = - Recv+Established                      | = - Recv                      | = - Recv                      | = - Recv                      | .              | 9.8.2.2
gap in a message       | .         | .                  | = - Established                           | .                             | .                             | .                             | .              | 9.8.2.2
repeated SEND          | .         | .                  | .                                         | .                             | .                             | .                             | .              | see qp/uc.rs
wrong ICRC             | .         | .                  | .                                         | .                             | .                             | .                             | .              | 9.6.1.1
wrong transport        | .         | .                  | .                                         | .                             | .                             | .                             | .              | 9.6.1.3
";

const UD: &str = "
event                  | Reset     | Init               | RTR                           | RTS                           | SQD                           | SQE                           | Error          | section
post SEND              | !         | !                  | !                             | = SendOnly Send               | .                             | = - Send!Flush                | = - Send!Flush | 10.3.1, 11.4.1.1
post SEND, no such key | !         | !                  | !                             | SQE - Send!Protection         | .                             | = - Send!Flush                | = - Send!Flush | 10.3.1.6, 9.9.2
post WRITE             | !         | !                  | !                             | !                             | !                             | !                             | !              | 10.3.1, 11.4.1.1
post receive           | !         | .                  | .                             | .                             | .                             | .                             | = - Recv!Flush | 10.3.1, 11.4.1.2
modify Reset           | .         | Reset - -          | Reset - -                     | Reset - -                     | Reset - -                     | Reset - -                     | Reset - -      | 10.3.1.1
modify Init            | Init - -  | .                  | !                             | !                             | !                             | !                             | !              | 10.3.1.2
modify RTR             | !         | RTR - -            | !                             | !                             | !                             | !                             | !              | 10.3.1.3
modify RTS             | !         | !                  | RTS - -                       | .                             | RTS - -                       | RTS - -                       | !              | 10.3.1.4
modify SQD             | !         | !                  | !                             | SQD - Drained                 | .                             | !                             | !              | 10.3.1.5
modify Error           | Error - - | Error - Recv!Flush | Error - Recv!Flush            | Error - Recv!Flush            | Error - Recv!Flush            | Error - Recv!Flush            | .              | 10.3.1.7
destroy                | gone - -  | gone - -           | gone - -                      | gone - -                      | gone - -                      | gone - -                      | gone - -       | 11.2.4.4
SEND                   | .         | .                  | = - Recv                      | = - Recv                      | = - Recv                      | = - Recv                      | .              | 9.8.3
SEND, no receive       | .         | .                  | .                             | .                             | .                             | .                             | .              | 9.9.3
SEND, too long         | .         | .                  | Error - Recv!Length+QP:Length | Error - Recv!Length+QP:Length | Error - Recv!Length+QP:Length | Error - Recv!Length+QP:Length | .              | 9.9.3
SEND, wrong Q_Key      | .         | .                  | .                             | .                             | .                             | .                             | .              | 10.2.5
SEND to a group        | .         | .                  | = - Recv                      | = - Recv                      | = - Recv                      | = - Recv                      | .              | 10.5.2.1
wrong ICRC             | .         | .                  | .                             | .                             | .                             | .                             | .              | 9.6.1.1
wrong transport        | .         | .                  | .                             | .                             | .                             | .                             | .              | 9.6.1.3
";

const UC_EVENTS: [&str; 24] = [
    "post SEND",
    "post SEND, no such key",
    "post READ",
    "post receive",
    "modify Reset",
    "modify Init",
    "modify RTR",
    "modify RTS",
    "modify SQD",
    "modify Error",
    "destroy",
    "SEND",
    "SEND, no receive",
    "SEND, too long",
    "SEND, last first",
    "SEND, first twice",
    "WRITE",
    "WRITE imm",
    "WRITE, no such key",
    "after a gap",
    "gap in a message",
    "repeated SEND",
    "wrong ICRC",
    "wrong transport",
];

const UD_EVENTS: [&str; 18] = [
    "post SEND",
    "post SEND, no such key",
    "post WRITE",
    "post receive",
    "modify Reset",
    "modify Init",
    "modify RTR",
    "modify RTS",
    "modify SQD",
    "modify Error",
    "destroy",
    "SEND",
    "SEND, no receive",
    "SEND, too long",
    "SEND, wrong Q_Key",
    "SEND to a group",
    "wrong ICRC",
    "wrong transport",
];

const QKEY: u32 = 0x33;

/// A pair whose side 1 has the QP in some state; side 0 only lends its address.
struct Bench {
    pair: Pair,
    qp_type: QpType,
    qpn: Qpn,
    gone: bool,
}

impl Bench {
    fn in_state(qp_type: QpType, column: &str, event: &str) -> Bench {
        let mut pair = Pair::new();
        let qpn = pair.create_qp(1, qp_type);
        if qp_type == QpType::Ud {
            let group = group();
            pair.sides[1].rnic.attach_mcast(qpn, group).expect("a UD QP");
        }
        let mut bench = Bench {
            pair,
            qp_type,
            qpn,
            gone: false,
        };
        let way = match column {
            "Reset" => 0,
            "Init" => 1,
            "RTR" => 2,
            _ => 3,
        };
        for state in [QpState::Init, QpState::Rtr, QpState::Rts].iter().take(way) {
            bench.modify(*state).expect("the way to RTS");
        }
        if way > 0 && event != "SEND, no receive" {
            bench.post_recv().expect("receives are taken from Init on");
        }
        match column {
            "SQD" => bench.modify(QpState::Sqd).expect("from RTS to SQD"),
            "SQE" => assert!(bench.apply("post SEND, no such key"), "sends are taken in RTS"),
            "Error" => bench.modify(QpState::Error).expect("from any state to Error"),
            _ => {}
        }
        bench.outcome();
        bench
    }

    fn target(&self) -> Target {
        if self.qp_type == QpType::Uc {
            return Target::Connected;
        }
        Target::Datagram {
            path: self.pair.path(1, self.pair.sides[0].address),
            qpn: Qpn::new(5),
            qkey: QKEY,
        }
    }

    fn post(&mut self, operation: Operation, sges: SgeList) -> bool {
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: self.target(),
        };
        let rnic = &mut self.pair.sides[1].rnic;
        rnic.post_send(self.pair.now, self.qpn, request).is_ok()
    }

    fn post_recv(&mut self) -> Result<(), PostError> {
        let side = &mut self.pair.sides[1];
        let sges = side.sge(0x8000, 40 + 64);
        let request = RecvRequest { wr_id: 2, sges };
        side.rnic.post_recv(self.pair.now, self.qpn, request)
    }

    /// With the attributes that the transition needs.
    fn modify(&mut self, to: QpState) -> Result<(), ModifyError> {
        let is_ud = self.qp_type == QpType::Ud;
        let comes_back = matches!(self.qp_state(), QpState::Rts | QpState::Sqd | QpState::Sqe);
        let attr = match to {
            QpState::Init if is_ud => QpAttributes {
                qkey: Some(QKEY),
                ..Default::default()
            },
            QpState::Init => QpAttributes {
                access: Some(ALL_ACCESS),
                ..Default::default()
            },
            QpState::Rtr if !is_ud => QpAttributes {
                path: Some(self.pair.path(1, self.pair.sides[0].address)),
                path_mtu: Some(256),
                dest_qpn: Some(Qpn::new(5)),
                rq_psn: Some(Psn::new(PSN)),
                ..Default::default()
            },
            QpState::Rts if !comes_back => QpAttributes {
                sq_psn: Some(Psn::new(PSN)),
                ..Default::default()
            },
            _ => QpAttributes::default(),
        };
        let rnic = &mut self.pair.sides[1].rnic;
        rnic.modify_qp(self.pair.now, self.qpn, to, &attr)
    }

    fn qp_state(&self) -> QpState {
        let info = self.pair.sides[1].rnic.query_qp(self.qpn);
        info.expect("it is there").state
    }

    fn state(&self) -> String {
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

    /// A packet for the QP, from side 0.
    fn arrive(&mut self, opcode: Opcode, psn: u32, ext: &[u8], payload: &[u8]) {
        self.arrive_at(self.pair.sides[1].address, self.qpn, opcode, psn, ext, payload, 0);
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one packet")]
    fn arrive_at(
        &mut self,
        dst: std::net::IpAddr,
        qpn: Qpn,
        opcode: Opcode,
        psn: u32,
        ext: &[u8],
        payload: &[u8],
        flip: u8,
    ) {
        let mut bth = Bth::new(opcode, qpn, Psn::new(PSN).plus(psn));
        bth.pad = ((4 - payload.len() % 4) % 4) as u8;
        let mut bytes = vec![0; Bth::LEN];
        bth.emit(&mut bytes);
        bytes.extend_from_slice(ext);
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len() + usize::from(bth.pad), 0);
        let path = self.pair.path(0, dst);
        let icrc = path.flow().icrc(&bytes, 0).to_le_bytes();
        bytes.extend_from_slice(&[icrc[0], icrc[1], icrc[2], icrc[3] ^ flip]);
        let arrival = Arrival {
            src: path.src,
            src_port: path.src_port,
            dst,
            traffic_class: 0,
            bytes: &bytes,
            segment_bytes: bytes.len(),
        };
        self.pair.sides[1].rnic.handle_arrival(self.pair.now, &arrival);
    }

    /// Applies an event; false when it is a call that is refused.
    fn apply(&mut self, event: &str) -> bool {
        let side = &self.pair.sides[1];
        let (rkey, own) = (side.rkey, side.sge(0, 8));
        let uc = |operation| Opcode {
            transport: Transport::Uc,
            operation,
        };
        let ud = Opcode {
            transport: Transport::Ud,
            operation: Op::SendOnly,
        };
        let is_uc = self.qp_type == QpType::Uc;
        let reth = |rkey, length| {
            let mut ext = vec![0; Reth::LEN];
            let va = IOVA;
            Reth { va, rkey, length }.emit(&mut ext);
            ext
        };
        let deth = |qkey| {
            let mut ext = vec![0; Deth::LEN];
            let src_qpn = Qpn::new(5);
            Deth { qkey, src_qpn }.emit(&mut ext);
            ext
        };
        let (opcode, ext) = match is_uc {
            true => (uc(Op::SendOnly), vec![]),
            false => (ud, deth(QKEY)),
        };
        let here = self.pair.sides[1].address;
        match event {
            "post SEND" => return self.post(Operation::Send { imm: None }, own),
            "post SEND, no such key" => {
                let sges = Sge::new(IOVA, 8, LKey(0x55)).into();
                let posted = self.post(Operation::Send { imm: None }, sges);
                // It fails when its bytes are needed.
                self.transmit();
                return posted;
            }
            "post READ" => return self.post(Operation::Read { va: IOVA, rkey }, own),
            "post WRITE" => {
                let (va, imm) = (IOVA, None);
                return self.post(Operation::Write { va, rkey, imm }, own);
            }
            "post receive" => return self.post_recv().is_ok(),
            "modify Reset" => return self.modify(QpState::Reset).is_ok(),
            "modify Init" => return self.modify(QpState::Init).is_ok(),
            "modify RTR" => return self.modify(QpState::Rtr).is_ok(),
            "modify RTS" => return self.modify(QpState::Rts).is_ok(),
            "modify SQD" => return self.modify(QpState::Sqd).is_ok(),
            "modify Error" => return self.modify(QpState::Error).is_ok(),
            "destroy" => {
                self.pair.sides[1].rnic.destroy_qp(self.qpn);
                self.gone = true;
            }
            "SEND" | "SEND, no receive" => self.arrive(opcode, 0, &ext, &[1; 8]),
            "SEND, too long" => self.arrive(opcode, 0, &ext, &[1; 105]),
            "SEND, last first" => self.arrive(uc(Op::SendLast), 0, &[], &[1; 8]),
            "SEND, first twice" => {
                self.arrive(uc(Op::WriteFirst), 0, &reth(rkey, 264), &[1; 256]);
                self.arrive(opcode, 1, &[], &[1; 8]);
            }
            "SEND, wrong Q_Key" => self.arrive(ud, 0, &deth(QKEY + 1), &[1; 8]),
            "SEND to a group" => self.arrive_at(group(), Qpn::MULTICAST, ud, 0, &ext, &[1; 8], 0),
            "WRITE" => self.arrive(uc(Op::WriteOnly), 0, &reth(rkey, 8), &[1; 8]),
            "WRITE imm" => {
                let ext = [reth(rkey, 8), vec![0; 4]].concat();
                self.arrive(uc(Op::WriteOnlyImm), 0, &ext, &[1; 8]);
            }
            "WRITE, no such key" => {
                let unknown = RKey(rkey.0 ^ 0x100);
                self.arrive(uc(Op::WriteOnly), 0, &reth(unknown, 8), &[1; 8]);
            }
            "after a gap" => self.arrive(opcode, 3, &[], &[1; 8]),
            "gap in a message" => {
                self.arrive(uc(Op::WriteFirst), 0, &reth(rkey, 264), &[1; 256]);
                self.arrive(uc(Op::WriteLastImm), 2, &[0; 4], &[1; 8]);
            }
            "repeated SEND" => {
                self.arrive(uc(Op::WriteOnly), 0, &reth(rkey, 8), &[1; 8]);
                self.outcome();
                self.arrive(opcode, 0, &[], &[1; 8]);
            }
            "wrong ICRC" => self.arrive_at(here, self.qpn, opcode, 0, &ext, &[1; 8], 1),
            "wrong transport" => self.arrive(Opcode::rc(Op::SendOnly), 0, &[], &[1; 8]),
            other => panic!("no event {other}"),
        }
        true
    }

    /// Takes what the QP sends.
    fn transmit(&mut self) -> TransmitBuf {
        let mut buf = TransmitBuf::new(1 << 20, false);
        let rnic = &mut self.pair.sides[1].rnic;
        while rnic.poll_transmit(self.pair.now, &mut buf, true) {}
        buf
    }

    /// Packets sent and what the user is told.
    fn outcome(&mut self) -> (String, String) {
        let buf = self.transmit();
        let sent = buf.trains().iter().map(|train| {
            let packet = Packet::parse(&buf.bytes()[train.range.clone()]);
            let operation = packet.expect("what is sent can be read").bth.opcode.operation;
            format!("{operation:?}")
        });
        let sent: Vec<String> = sent.collect();
        let side = &mut self.pair.sides[1];
        let completions = side.completions();
        let events = std::iter::from_fn(|| side.rnic.poll_event()).filter_map(|event| event_name(&event));
        let told: Vec<String> = completions.iter().map(completion_name).chain(events).collect();
        let or_nothing = |all: Vec<String>| match all.is_empty() {
            true => "-".to_owned(),
            false => all.join("+"),
        };
        (or_nothing(sent), or_nothing(told))
    }
}

fn group() -> std::net::IpAddr {
    [239, 0, 0, 1].into()
}

/// What a cell of a table would have to say.
fn observed(qp_type: QpType, column: &str, event: &str) -> String {
    let mut bench = Bench::in_state(qp_type, column, event);
    let before = bench.state();
    let taken = bench.apply(event);
    let (sent, told) = bench.outcome();
    let after = bench.state();
    let next = if after == before { "=".to_owned() } else { after };
    match format!("{next} {sent} {told}") {
        _ if !taken => "!".to_owned(),
        cell if cell == "= - -" => ".".to_owned(),
        cell => cell,
    }
}

#[test]
fn table__uc() {
    check(UC, &UC_EVENTS, |column, event| {
        observed(QpType::Uc, column, event)
    });
}

#[test]
fn table__ud() {
    check(UD, &UD_EVENTS, |column, event| {
        observed(QpType::Ud, column, event)
    });
}
