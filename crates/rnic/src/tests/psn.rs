//! PSN wraparound: a QP must forget state that it keeps by PSN before another request gets that PSN, or seems to precede it.

use std::cell::RefCell;
use std::rc::Rc;

use rdmux_wire::roce::{Aeth, Bth, NakCode, Opcode, Operation as Op, Packet, Syndrome};

use super::util::*;
use crate::*;

/// Half of the PSN space: a packet whose PSN is at most this far before `expected` is a repeat. IBTA Vol 1, 9.7.2.
const HALF: u32 = 1 << 23;
const MTU: u32 = 256;

fn pair(selective: bool) -> Pair {
    let mut pair = Pair::with(|rtr, _| {
        (rtr.peer_is_rdmux, rtr.path_mtu) = (Some(selective), Some(MTU));
        rtr.selective = Some(selective);
    });
    pair.disable_trains();
    pair
}

/// Advances the PSNs of both ends, as requests of side 0 would.
fn skip(pair: &mut Pair, mut psns: u32) {
    while psns > 0 {
        let part = psns.min(HALF - 1);
        let [asking, answering] = [0, 1].map(|i| pair.sides[i].qpn);
        assert!(pair.sides[0].rnic.skip_psns(pair.now, asking, part, 0));
        assert!(pair.sides[1].rnic.skip_psns(pair.now, answering, 0, part));
        psns -= part;
    }
}

/// Posts an operation at side 0, waits for its end, and returns its status.
fn done(pair: &mut Pair, operation: Operation, length: u32) -> Status {
    let sges = match length {
        0 => SgeList::EMPTY,
        _ => pair.sides[0].sge(1 << 20, length),
    };
    pair.post(0, operation, sges);
    pair.run();
    pair.sides[0].completions()[0].status
}

/// Executes a WRITE whose first acknowledgement is lost.
fn write_with_lost_ack(pair: &mut Pair) -> Status {
    let mut lost = false;
    pair.deliver = Box::new(move |side, bytes| {
        let packet = Packet::parse(bytes).unwrap();
        let is_ack = side == 0 && packet.bth.opcode.operation == Op::Acknowledge;
        !is_ack || std::mem::replace(&mut lost, true)
    });
    pair.write(0, 0, 100);
    pair.run();
    pair.deliver = Box::new(|_, _| true);
    pair.sides[0].completions()[0].status
}

/// Returns the operations that the responder keeps for replay, with the byte count of each.
fn kept(rkey: RKey) -> [(Operation, u32); 5] {
    let va = IOVA;
    let flush = Operation::Flush {
        va,
        rkey,
        length: 64,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    [
        (Operation::Read { va, rkey }, 8),
        (Operation::Read { va, rkey }, 5_000 * MTU - 3),
        (Operation::FetchAdd { va, rkey, add: 1 }, 8),
        (Operation::AtomicWrite { va, rkey }, 8),
        (flush, 0),
    ]
}

#[test]
fn duplicate__any_distance_from_what_is_kept() {
    let distances = [
        0,
        1,
        HALF - 5_001,
        HALF - 2_500,
        HALF - 2,
        HALF - 1,
        HALF,
        HALF + 1,
        HALF + 2_500,
        2 * HALF - 5_001,
        2 * HALF - 2,
        2 * HALF - 1,
        2 * HALF,
        3 * HALF - 1,
        3 * HALF,
    ];
    for selective in [false, true] {
        for n in 0..5 {
            for distance in distances {
                let mut pair = pair(selective);
                let (operation, length) = kept(pair.sides[1].rkey)[n].clone();
                let status = done(&mut pair, operation.clone(), length);
                assert_eq!(status, Status::Success);
                skip(&mut pair, distance);
                let status = write_with_lost_ack(&mut pair);
                let what = format!("{distance:#x} PSNs after {operation:?}, selective: {selective}");
                assert_eq!(status, Status::Success, "{what}");
                assert_eq!(pair.sides[1].rnic.counters().duplicate_request, 1, "{what}");
            }
        }
    }
}

/// Delivers a packet to side 1 again and returns the answers: the operation, and the PSN relative to the first one.
fn repeat(pair: &mut Pair, packet: &[u8]) -> Vec<(Op, i32)> {
    pair.inject(packet);
    let mut buf = TransmitBuf::new(1 << 20, false);
    while pair.sides[1].rnic.poll_transmit(pair.now, &mut buf, true) {}
    let answers = buf.trains().iter().map(|train| {
        let answer = Packet::parse(&buf.bytes()[train.range.clone()]).unwrap();
        (answer.bth.opcode.operation, answer.bth.psn.since(Psn::new(PSN)))
    });
    answers.collect()
}

#[test]
fn duplicate__half_of_the_psns_back() {
    let mut pair = pair(false);
    let sent: Rc<RefCell<Vec<Vec<u8>>>> = Rc::default();
    let log = sent.clone();
    pair.deliver = Box::new(move |side, bytes| {
        if side == 1 {
            log.borrow_mut().push(bytes.clone());
        }
        true
    });
    pair.write(0, 0, 8);
    let (rkey, va) = (pair.sides[1].rkey, IOVA);
    done(&mut pair, Operation::Read { va, rkey }, 8);
    let [write, read]: [Vec<u8>; 2] = sent.take().try_into().unwrap();
    skip(&mut pair, HALF - 2);
    assert_eq!(
        repeat(&mut pair, &write),
        [(Op::Acknowledge, 0)],
        "before the READ"
    );
    assert_eq!(repeat(&mut pair, &read), [(Op::ReadResponseOnly, 1)]);
    skip(&mut pair, 1);
    assert_eq!(repeat(&mut pair, &read), [(Op::ReadResponseOnly, 1)]);
    assert_eq!(pair.sides[1].rnic.counters().duplicate_request, 3);
}

#[test]
fn acknowledgement__of_what_is_not_in_flight() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        pair.deliver = Box::new(|side, _| side == 0);
        pair.write(0, 0, 4 * MTU);
        pair.step();
        // PSNs before the oldest packet in flight, and behind the last of the four.
        let stale = [
            -2,
            -3,
            -100,
            1 - (1 << 22),
            1 - (1 << 23),
            -(1 << 23),
            4,
            5,
            (1 << 23) - 1,
        ];
        for (n, offset) in stale.into_iter().enumerate() {
            for syndrome in [
                Syndrome::ACK,
                Syndrome::RnrNak { timer: 1 },
                Syndrome::Nak(NakCode::PsnSequence),
                Syndrome::Nak(NakCode::RemoteAccess),
            ] {
                let psn = Psn::new(PSN).plus(offset as u32);
                let bth = Bth::new(Opcode::rc(Op::Acknowledge), pair.sides[0].qpn, psn);
                let mut packet = [0; Bth::LEN + Aeth::LEN];
                bth.emit(&mut packet);
                Aeth { syndrome, msn: 1 }.emit(&mut packet[Bth::LEN..]);
                pair.inject_back(&packet);
                assert_eq!(pair.sides[0].completions(), [], "{offset}: {syndrome:?}");
                assert_eq!(pair.sides[0].state(), QpState::Rts, "{offset}: {syndrome:?}");
            }
            let stale = pair.sides[0].rnic.counters().stale_responses;
            assert_eq!(stale, 4 * (n as u64 + 1), "{offset}");
        }
        pair.deliver = Box::new(|_, _| true);
        pair.run();
        assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
    }
}
