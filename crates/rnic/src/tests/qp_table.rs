//! Queue pairs as a table: each state with each event. IBTA Vol 1, 10.3.1 (states), 9.7 and 9.9 (what comes in); the last
//! column has the section of the event.
//!
//! A cell says what becomes of the QP: its next state (`=` as before, `gone` destroyed), the packets that it sends and what its
//! user is told: completions by operation, with `!` and the status if that is an error, and asynchronous events by name (`-`
//! nothing); `.` stands for `= - -`. `!` alone is an error of the user's call.
//!
//! From Init on a receive is posted; in RTS and SQD a WRITE was sent and is not answered. Drained is SQD when it has been.

use rdmux_wire::roce::{
    Aeth, AtomicEth, Bth, Feth, NakCode, Opcode, Operation as Op, Packet, Reth, Syndrome,
};

use super::table::check;
use super::util::*;
use crate::*;

const TABLE: &str = "
event              | Reset     | Init               | RTR                                                | RTS                                                | SQD                                                | Drained                                | Error          | section
post SEND          | !         | !                  | !                                                  | = SendOnly -                                       | .                                                  | .                                      | = - Send!Flush | 10.3.1, 11.4.1.1
post READ          | !         | !                  | !                                                  | = ReadRequest -                                    | .                                                  | .                                      | = - Read!Flush | 10.3.1, 11.4.1.1
post receive       | !         | .                  | .                                                  | .                                                  | .                                                  | .                                      | = - Recv!Flush | 10.3.1, 11.4.1.2
modify Reset       | .         | Reset - -          | Reset - -                                          | Reset - -                                          | Reset - -                                          | Reset - -                              | Reset - -      | 10.3.1.1
modify Init        | Init - -  | .                  | !                                                  | !                                                  | !                                                  | !                                      | !              | 10.3.1.2
modify RTR         | !         | RTR - -            | !                                                  | !                                                  | !                                                  | !                                      | !              | 10.3.1.3
modify RTS         | !         | !                  | RTS - -                                            | .                                                  | RTS - -                                            | RTS - -                                | !              | 10.3.1.4
modify SQD         | !         | !                  | !                                                  | SQD - -                                            | .                                                  | .                                      | !              | 10.3.1.5
modify Error       | Error - - | Error - Recv!Flush | Error - Recv!Flush                                 | Error - Write!Flush+Recv!Flush                     | Error - Write!Flush+Recv!Flush                     | Error - Recv!Flush                     | .              | 10.3.1.7
destroy            | gone - -  | gone - -           | gone - -                                           | gone - -                                           | gone - -                                           | gone - -                               | gone - -       | 11.2.4.4
SEND               | .         | .                  | = ACK Recv+Established                             | = ACK Recv                                         | = ACK Recv                                         | = ACK Recv                             | .              | 9.7.5.1.2
SEND, no receive   | .         | .                  | = RNR Established                                  | = RNR -                                            | = RNR -                                            | = RNR -                                | .              | 9.7.5.2.8
SEND, too long     | .         | .                  | Error NAK:InvReq Recv!Length+Established+QP:InvReq | Error NAK:InvReq Recv!Length+Write!Flush+QP:InvReq | Error NAK:InvReq Recv!Length+Write!Flush+QP:InvReq | Error NAK:InvReq Recv!Length+QP:InvReq | .              | 9.7.4.1.7
SEND invalidate    | .         | .                  | Error - Recv!InvReq+Established+QP:InvReq          | Error - Recv!InvReq+Write!Flush+QP:InvReq          | Error - Recv!InvReq+Write!Flush+QP:InvReq          | Error - Recv!InvReq+QP:InvReq          | .              | 9.9.3.1.3 (class J)
WRITE              | .         | .                  | = ACK Established                                  | = ACK -                                            | = ACK -                                            | = ACK -                                | .              | 9.7.5.1.2
WRITE imm          | .         | .                  | = ACK RecvRdmaWithImm+Established                  | = ACK RecvRdmaWithImm                              | = ACK RecvRdmaWithImm                              | = ACK RecvRdmaWithImm                  | .              | 9.7.5.1.2
WRITE, no such key | .         | .                  | Error NAK:Access Recv!Flush+Established+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Recv!Flush+QP:Access  | .              | 9.7.4.1.5
WRITE, no right    | .         | .                  | Error NAK:Access Recv!Flush+Established+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Recv!Flush+QP:Access  | .              | 9.7.4.1.5
WRITE, last first  | .         | .                  | Error NAK:InvReq Recv!Flush+Established+QP:InvReq  | Error NAK:InvReq Write!Flush+Recv!Flush+QP:InvReq  | Error NAK:InvReq Write!Flush+Recv!Flush+QP:InvReq  | Error NAK:InvReq Recv!Flush+QP:InvReq  | .              | 9.7.4.1.2
READ               | .         | .                  | = Data Established                                 | = Data -                                           | = Data -                                           | = Data -                               | .              | 9.7.5.1.3
READ, no such key  | .         | .                  | Error NAK:Access Recv!Flush+Established+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Write!Flush+Recv!Flush+QP:Access  | Error NAK:Access Recv!Flush+QP:Access  | .              | 9.7.4.1.5
FETCH ADD          | .         | .                  | = Original Established                             | = Original -                                       | = Original -                                       | = Original -                           | .              | 9.7.5.1.4
FETCH ADD, odd     | .         | .                  | Error NAK:InvReq Recv!Flush+Established+QP:InvReq  | Error NAK:InvReq Write!Flush+Recv!Flush+QP:InvReq  | Error NAK:InvReq Write!Flush+Recv!Flush+QP:InvReq  | Error NAK:InvReq Recv!Flush+QP:InvReq  | .              | 9.4.5
ATOMIC WRITE       | .         | .                  | = Done Established                                 | = Done -                                           | = Done -                                           | = Done -                               | .              | A19.4
FLUSH              | .         | .                  | = Done Established                                 | = Done -                                           | = Done -                                           | = Done -                               | .              | A19.4
FLUSH fails        | .         | .                  | Error NAK:Op Recv!Flush+Established+QP:Op          | Error NAK:Op Write!Flush+Recv!Flush+QP:Op          | Error NAK:Op Write!Flush+Recv!Flush+QP:Op          | Error NAK:Op Recv!Flush+QP:Op          | .              | A19.4, 9.9.3
repeated WRITE     | .         | .                  | = ACK -                                            | = ACK -                                            | = ACK -                                            | = ACK -                                | .              | 9.7.5.1.4
repeated READ      | .         | .                  | = Data -                                           | = Data -                                           | = Data -                                           | = Data -                               | .              | 9.7.5.1.5
after a gap        | .         | .                  | = NAK:Seq -                                        | = NAK:Seq -                                        | = NAK:Seq -                                        | = NAK:Seq -                            | .              | 9.7.5.2.8
after a gap twice  | .         | .                  | .                                                  | .                                                  | .                                                  | .                                      | .              | 9.7.5.2.8
wrong ICRC         | .         | .                  | .                                                  | .                                                  | .                                                  | .                                      | .              | 9.6.1.1
wrong transport    | .         | .                  | .                                                  | .                                                  | .                                                  | .                                      | .              | 9.6.1.3
ACK                | .         | .                  | .                                                  | = - Write                                          | = - Write+Drained                                  | .                                      | .              | 9.7.6.1
ACK of nothing     | .         | .                  | .                                                  | .                                                  | .                                                  | .                                      | .              | 9.7.5.1.1
NAK sequence       | .         | .                  | .                                                  | = WriteOnly -                                      | = WriteOnly -                                      | .                                      | .              | 9.7.5.2.2
NAK invalid        | .         | .                  | .                                                  | Error - Write!InvReq+Recv!Flush                    | Error - Write!InvReq+Recv!Flush                    | .                                      | .              | 9.9.2.2
NAK access         | .         | .                  | .                                                  | Error - Write!Access+Recv!Flush                    | Error - Write!Access+Recv!Flush                    | .                                      | .              | 9.9.2.2
NAK operation      | .         | .                  | .                                                  | Error - Write!Op+Recv!Flush                        | Error - Write!Op+Recv!Flush                        | .                                      | .              | 9.9.2.2
RNR NAK            | .         | .                  | .                                                  | .                                                  | .                                                  | .                                      | .              | 9.7.5.2.8
RNR NAKs to end    | .         | .                  | .                                                  | Error - Write!RnrRetry+Recv!Flush                  | Error - Write!RnrRetry+Recv!Flush                  | .                                      | .              | 9.9.2.1.1
READ response      | .         | .                  | .                                                  | Error - Write!BadResp+Recv!Flush                   | Error - Write!BadResp+Recv!Flush                   | .                                      | .              | 9.9.2.1
timeouts to end    | .         | .                  | .                                                  | Error - Write!Retry+Recv!Flush                     | Error - Write!Retry+Recv!Flush                     | .                                      | .              | 9.9.2.1.1
";

/// Every event, in the order of the rows.
const EVENTS: [&str; 42] = [
    "post SEND",
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
    "SEND invalidate",
    "WRITE",
    "WRITE imm",
    "WRITE, no such key",
    "WRITE, no right",
    "WRITE, last first",
    "READ",
    "READ, no such key",
    "FETCH ADD",
    "FETCH ADD, odd",
    "ATOMIC WRITE",
    "FLUSH",
    "FLUSH fails",
    "repeated WRITE",
    "repeated READ",
    "after a gap",
    "after a gap twice",
    "wrong ICRC",
    "wrong transport",
    "ACK",
    "ACK of nothing",
    "NAK sequence",
    "NAK invalid",
    "NAK access",
    "NAK operation",
    "RNR NAK",
    "RNR NAKs to end",
    "READ response",
    "timeouts to end",
];

/// A pair whose side 1 has the QP in some state; side 0 only lends its address.
struct Bench {
    pair: Pair,
    /// A region at side 1 whose flushes are up to the test.
    slow: RKey,
    gone: bool,
}

impl Bench {
    fn in_state(column: &str, event: &str) -> Bench {
        let mut pair = Pair::new();
        let slow = pair.slow_region(false, Ok(()));
        let mut bench = Bench {
            pair,
            slow,
            gone: false,
        };
        let way = match column {
            "Reset" => 1,
            "Init" => 2,
            "RTR" => 3,
            _ => 4,
        };
        for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts]
            .iter()
            .take(way)
        {
            bench.modify(*state).expect("the way to RTS");
        }
        if way > 1 && event != "SEND, no receive" {
            bench.post_recv().expect("receives are taken from Init on");
        }
        if matches!(column, "RTS" | "SQD") {
            bench.post(bench.write()).expect("sends are taken in RTS");
        }
        bench.outcome();
        match column {
            "SQD" | "Drained" => bench.modify(QpState::Sqd).expect("from RTS to SQD"),
            "Error" => bench.modify(QpState::Error).expect("from any state to Error"),
            _ => {}
        }
        bench.outcome();
        bench
    }

    fn write(&self) -> Operation {
        Operation::Write {
            va: IOVA,
            rkey: self.pair.sides[0].rkey,
            imm: None,
        }
    }

    fn post(&mut self, operation: Operation) -> Result<(), PostError> {
        let side = &mut self.pair.sides[1];
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges: side.sge(0, 8),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        side.rnic.post_send(self.pair.now, side.qpn, request)
    }

    fn post_recv(&mut self) -> Result<(), PostError> {
        let side = &mut self.pair.sides[1];
        let sges = side.sge(0x8000, 64);
        let request = RecvRequest { wr_id: 2, sges };
        side.rnic.post_recv(self.pair.now, side.qpn, request)
    }

    /// With the attributes that the transition needs.
    fn modify(&mut self, to: QpState) -> Result<(), ModifyError> {
        let back = matches!(self.qp_state(), QpState::Rts | QpState::Sqd);
        let mut attr = match to {
            QpState::Rts if back => QpAttributes::default(),
            _ => self.pair.attributes(1, self.pair.sides[0].qpn, to),
        };
        // Few, so that they soon end.
        (attr.retry_count, attr.rnr_retry) = (attr.retry_count.and(Some(1)), attr.rnr_retry.and(Some(1)));
        let side = &mut self.pair.sides[1];
        side.rnic.modify_qp(self.pair.now, side.qpn, to, &attr)
    }

    fn qp_state(&self) -> QpState {
        let side = &self.pair.sides[1];
        side.rnic.query_qp(side.qpn).expect("it is there").state
    }

    fn state(&self) -> String {
        if self.gone {
            return "gone".to_owned();
        }
        match self.qp_state() {
            QpState::Rtr => "RTR".to_owned(),
            QpState::Rts => "RTS".to_owned(),
            QpState::Sqd => "SQD".to_owned(),
            other => format!("{other:?}"),
        }
    }

    /// A packet for the QP; `psn` counts from the first one of the connection.
    fn arrive(&mut self, op: Op, psn: i32, ext: &[u8], payload: &[u8]) {
        let bytes = self.packet(Opcode::rc(op), psn, ext, payload);
        let bytes = self.pair.craft(&bytes);
        self.pair.inject(&bytes);
    }

    fn packet(&self, opcode: Opcode, psn: i32, ext: &[u8], payload: &[u8]) -> Vec<u8> {
        let psn = Psn::new(PSN.wrapping_add_signed(psn));
        let mut bth = Bth::new(opcode, self.pair.sides[1].qpn, psn);
        bth.ack_req = true;
        bth.pad = ((4 - payload.len() % 4) % 4) as u8;
        let mut bytes = vec![0; Bth::LEN];
        bth.emit(&mut bytes);
        bytes.extend_from_slice(ext);
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len() + usize::from(bth.pad), 0);
        bytes
    }

    fn answer(&mut self, psn: i32, syndrome: Syndrome) {
        let mut ext = [0; Aeth::LEN];
        Aeth { syndrome, msn: 0 }.emit(&mut ext);
        self.arrive(Op::Acknowledge, psn, &ext, &[]);
    }

    fn reth(&self, rkey: RKey, length: u32) -> Vec<u8> {
        let mut ext = vec![0; Reth::LEN];
        let va = IOVA;
        Reth { va, rkey, length }.emit(&mut ext);
        ext
    }

    /// Applies an event; false when it is a call that is refused.
    fn apply(&mut self, event: &str) -> bool {
        let rkey = self.pair.sides[1].rkey;
        let (own, unknown) = (self.reth(rkey, 8), self.reth(RKey(rkey.0 ^ 0x100), 8));
        let write = |bench: &mut Bench, psn| bench.arrive(Op::WriteOnly, psn, &own, &[1; 8]);
        match event {
            "post SEND" => return self.post(Operation::Send { imm: None }).is_ok(),
            "post READ" => {
                let read = Operation::Read { va: IOVA, rkey };
                return self.post(read).is_ok();
            }
            "post receive" => return self.post_recv().is_ok(),
            "modify Reset" => return self.modify(QpState::Reset).is_ok(),
            "modify Init" => return self.modify(QpState::Init).is_ok(),
            "modify RTR" => return self.modify(QpState::Rtr).is_ok(),
            "modify RTS" => return self.modify(QpState::Rts).is_ok(),
            "modify SQD" => return self.modify(QpState::Sqd).is_ok(),
            "modify Error" => return self.modify(QpState::Error).is_ok(),
            "destroy" => {
                let side = &mut self.pair.sides[1];
                side.rnic.destroy_qp(side.qpn);
                self.gone = true;
            }
            "SEND" | "SEND, no receive" => self.arrive(Op::SendOnly, 0, &[], &[1; 8]),
            "SEND, too long" => self.arrive(Op::SendOnly, 0, &[], &[1; 65]),
            "SEND invalidate" => {
                // Of a region that is there for good.
                self.arrive(Op::SendOnlyInvalidate, 0, &rkey.0.to_be_bytes(), &[1; 8]);
            }
            "WRITE" => write(self, 0),
            "WRITE imm" => {
                let ext = [&own[..], &[0; 4]].concat();
                self.arrive(Op::WriteOnlyImm, 0, &ext, &[1; 8]);
            }
            "WRITE, no such key" => self.arrive(Op::WriteOnly, 0, &unknown, &[1; 8]),
            "WRITE, no right" => {
                let side = &mut self.pair.sides[1];
                let changed = side
                    .rnic
                    .rereg_mr(side.lkey, None, |spec| spec.access = Access::LOCAL_WRITE);
                changed.expect("fewer rights are always allowed");
                write(self, 0);
            }
            "WRITE, last first" => self.arrive(Op::WriteLast, 0, &[], &[1; 8]),
            "READ" => self.arrive(Op::ReadRequest, 0, &own, &[]),
            "READ, no such key" => self.arrive(Op::ReadRequest, 0, &unknown, &[]),
            "FETCH ADD" | "FETCH ADD, odd" => {
                let va = IOVA + u64::from(event.ends_with("odd"));
                let mut ext = [0; AtomicEth::LEN];
                let (swap_or_add, compare) = (1, 0);
                AtomicEth {
                    va,
                    rkey,
                    swap_or_add,
                    compare,
                }
                .emit(&mut ext);
                self.arrive(Op::FetchAdd, 0, &ext, &[]);
            }
            "ATOMIC WRITE" => self.arrive(Op::AtomicWrite, 0, &own, &[1; 8]),
            "FLUSH" | "FLUSH fails" => {
                let mut ext = vec![0; Feth::LEN];
                let feth = Feth {
                    placement: Placement::PERSISTENT,
                    selectivity: Selectivity::Range,
                };
                feth.emit(&mut ext);
                ext.extend(self.reth(self.slow, 8));
                self.arrive(Op::Flush, 0, &ext, &[]);
                let side = &mut self.pair.sides[1];
                if let Some(job) = side.rnic.poll_flush() {
                    let result = if event == "FLUSH" {
                        Ok(())
                    } else {
                        Err(Fault::Io(5))
                    };
                    side.rnic.handle_flush(self.pair.now, job.id, result);
                }
            }
            "repeated WRITE" => {
                write(self, 0);
                self.outcome();
                write(self, 0);
            }
            "repeated READ" => {
                self.arrive(Op::ReadRequest, 0, &own, &[]);
                self.outcome();
                self.arrive(Op::ReadRequest, 0, &own, &[]);
            }
            "after a gap" => write(self, 1),
            "after a gap twice" => {
                write(self, 1);
                self.outcome();
                write(self, 2);
            }
            "wrong ICRC" => {
                let bytes = self.packet(Opcode::rc(Op::WriteOnly), 0, &own, &[1; 8]);
                let mut bytes = self.pair.craft(&bytes);
                *bytes.last_mut().expect("an ICRC") ^= 1;
                self.pair.inject(&bytes);
            }
            "wrong transport" => {
                let opcode = Opcode {
                    transport: rdmux_wire::roce::Transport::Uc,
                    operation: Op::WriteOnly,
                };
                let bytes = self.packet(opcode, 0, &own, &[1; 8]);
                let bytes = self.pair.craft(&bytes);
                self.pair.inject(&bytes);
            }
            "ACK" => self.answer(0, Syndrome::ACK),
            "ACK of nothing" => self.answer(100, Syndrome::ACK),
            "NAK sequence" => self.answer(0, Syndrome::Nak(NakCode::PsnSequence)),
            "NAK invalid" => self.answer(0, Syndrome::Nak(NakCode::InvalidRequest)),
            "NAK access" => self.answer(0, Syndrome::Nak(NakCode::RemoteAccess)),
            "NAK operation" => self.answer(0, Syndrome::Nak(NakCode::RemoteOperation)),
            "RNR NAK" => self.answer(0, Syndrome::RnrNak { timer: 1 }),
            "RNR NAKs to end" => {
                for _ in 0..4 {
                    self.answer(0, Syndrome::RnrNak { timer: 1 });
                    self.transmit();
                    if let Some(at) = self.pair.sides[1].rnic.poll_timeout() {
                        self.pair.now = at;
                        self.pair.sides[1].rnic.handle_timeout(at);
                    }
                }
            }
            "READ response" => {
                let mut ext = [0; Aeth::LEN];
                let (syndrome, msn) = (Syndrome::ACK, 0);
                Aeth { syndrome, msn }.emit(&mut ext);
                self.arrive(Op::ReadResponseOnly, 0, &ext, &[1; 8]);
            }
            "timeouts to end" => {
                // What is shown is what follows the last one.
                while let Some(at) = self.pair.sides[1].rnic.poll_timeout() {
                    self.outcome();
                    self.pair.now = at;
                    self.pair.sides[1].rnic.handle_timeout(at);
                }
            }
            other => panic!("no event {other}"),
        }
        true
    }

    /// Takes what the QP sends.
    fn transmit(&mut self) -> TransmitBuf {
        let mut buf = TransmitBuf::new(1 << 20, false);
        while self.pair.sides[1]
            .rnic
            .poll_transmit(self.pair.now, &mut buf, true)
        {}
        buf
    }

    /// Packets sent and what the user is told.
    fn outcome(&mut self) -> (String, String) {
        let buf = self.transmit();
        let side = &mut self.pair.sides[1];
        let sent = buf.trains().iter().map(|train| {
            let packet = Packet::parse(&buf.bytes()[train.range.clone()]).expect("what is sent can be read");
            sent_name(&packet)
        });
        let sent: Vec<String> = sent.collect();
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

fn sent_name(packet: &Packet<'_>) -> String {
    match (
        packet.bth.opcode.operation,
        packet.aeth().map(|aeth| aeth.syndrome),
    ) {
        (Op::Acknowledge, Some(Syndrome::Ack { .. })) => "ACK".into(),
        (Op::Acknowledge, Some(Syndrome::RnrNak { .. })) => "RNR".into(),
        (Op::Acknowledge, Some(Syndrome::Nak(code))) => match code {
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

pub(super) fn completion_name(wc: &WorkCompletion) -> String {
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

/// The name of an asynchronous event.
pub(super) fn event_name(event: &Event) -> Option<String> {
    match event {
        Event::QpError(_, status, Cause::PeerRequest) => Some(format!("QP:{}", status_name(*status))),
        // The completion says it.
        Event::QpError(..) => None,
        Event::CommunicationEstablished(_) => Some("Established".into()),
        Event::SqDrained(_) => Some("Drained".into()),
        other => Some(format!("{other:?}")),
    }
}

/// What a cell of the table would have to say.
fn observed(column: &str, event: &str) -> String {
    let mut bench = Bench::in_state(column, event);
    let before = bench.state();
    let taken = bench.apply(event);
    let after = bench.state();
    let (sent, told) = bench.outcome();
    // A QP that fails while it sends is in error only then.
    let after = if bench.gone { after } else { bench.state() };
    let next = if after == before { "=".to_owned() } else { after };
    match format!("{next} {sent} {told}") {
        _ if !taken => "!".to_owned(),
        cell if cell == "= - -" => ".".to_owned(),
        cell => cell,
    }
}

#[test]
fn table__rc() {
    check(TABLE, &EVENTS, observed);
}
