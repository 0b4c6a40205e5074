//! Selective retransmission between peers that agreed to it.

use std::cell::RefCell;
use std::rc::Rc;

use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{Bth, NakCode, Opcode, Operation as Op, Packet, Reth, Syndrome};

use super::util::*;
use crate::*;

const WINDOW: u32 = 64;

/// Returns a pair that agreed on selective retransmission, has measured a round trip and sends each packet as a datagram of its own.
fn pair() -> Pair {
    let mut pair = Pair::with(|rtr, _| rtr.selective = Some(true));
    pair.disable_trains();
    pair.write(0, 0, 8);
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 1);
    pair
}

/// Drops the first packet to a side for which `is_it` holds; returns a log of all packets: destination side, opcode, PSN.
fn lose_once(
    pair: &mut Pair,
    to: usize,
    is_it: impl Fn(&Packet<'_>) -> bool + 'static,
) -> Rc<RefCell<Vec<(usize, u8, u32)>>> {
    let sent: Rc<RefCell<Vec<_>>> = Rc::default();
    let (log, mut lost) = (sent.clone(), false);
    pair.deliver = Box::new(move |side, bytes| {
        let packet = Packet::parse(bytes).unwrap();
        log.borrow_mut().push((side, bytes[0], packet.bth.psn.value()));
        let loses = !lost && side == to && is_it(&packet);
        lost |= loses;
        !loses
    });
    sent
}

fn psn(of_second_request: u32) -> u32 {
    Psn::new(PSN).plus(1 + of_second_request).value()
}

fn fill(pair: &Pair, side: usize, at: u64, len: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 1024) as u8).collect();
    pair.sides[side].memory.write(at, &bytes).unwrap();
    bytes
}

fn holds(pair: &Pair, side: usize, at: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    pair.sides[side].memory.read(at, &mut found).unwrap();
    found == bytes
}

fn counters(pair: &Pair, side: usize) -> Counters {
    pair.sides[side].rnic.counters()
}

#[test]
fn write__only_the_lost_packet_is_sent_again() {
    let mut pair = pair();
    let bytes = fill(&pair, 0, 0, 30 * 1024);
    let sent = lose_once(&mut pair, 1, |packet| packet.bth.psn.value() == psn(4));
    pair.write(0, 1 << 20, 30 * 1024);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
    assert!(holds(&pair, 1, 1 << 20, &bytes));
    let to_1: Vec<u32> = sent.borrow().iter().filter(|p| p.0 == 1).map(|p| p.2).collect();
    assert_eq!(to_1.iter().filter(|at| **at == psn(4)).count(), 2);
    assert_eq!(to_1.len(), 31);
    assert_eq!(counters(&pair, 0).retransmitted_packets, 1);
    assert_eq!(counters(&pair, 0).local_ack_timeout_err, 0);
    assert_eq!(counters(&pair, 1).kept_requests, 25);
}

#[test]
fn write__a_packet_that_was_overtaken_is_not_sent_again() {
    let mut pair = pair();
    let held: Rc<RefCell<Option<Vec<u8>>>> = Rc::default();
    let hold = held.clone();
    pair.deliver = Box::new(move |side, bytes| {
        let holds = side == 1 && Packet::parse(bytes).unwrap().bth.psn.value() == psn(1);
        if holds {
            *hold.borrow_mut() = Some(bytes.clone());
        }
        !holds
    });
    let bytes = fill(&pair, 0, 0, 5 * 1024);
    pair.write(0, 1 << 20, 5 * 1024);
    pair.step();
    assert_eq!(counters(&pair, 1).kept_requests, 3);
    let late = held.borrow_mut().take().unwrap();
    pair.inject(&late);
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 1);
    assert!(holds(&pair, 1, 1 << 20, &bytes));
    assert_eq!(counters(&pair, 0).retransmitted_packets, 0);
}

#[test]
fn read__only_the_lost_data_is_asked_for_again() {
    let mut pair = pair();
    let bytes = fill(&pair, 1, 0, 20 * 1024);
    let sent = lose_once(&mut pair, 0, |packet| packet.bth.psn.value() == psn(7));
    let (rkey, sges) = (pair.sides[1].rkey, pair.sides[0].sge(1 << 20, 20 * 1024));
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
    assert!(holds(&pair, 0, 1 << 20, &bytes));
    let sent = sent.borrow();
    let asked: Vec<u32> = sent.iter().filter(|p| p.0 == 1).map(|p| p.2).collect();
    assert_eq!(asked, [psn(0), psn(7)]);
    assert_eq!(sent.iter().filter(|p| p.0 == 0).count(), 21);
    assert_eq!(counters(&pair, 0).kept_responses, 12);
}

#[test]
fn read__whose_data_was_lost_completes_before_what_was_done_behind_it() {
    let mut pair = pair();
    let bytes = fill(&pair, 1, 0, 1024);
    lose_once(&mut pair, 0, |packet| {
        packet.bth.opcode.operation.is_read_response()
    });
    let (rkey, sges) = (pair.sides[1].rkey, pair.sides[0].sge(1 << 20, 1024));
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.write(0, 1 << 20, 2048);
    pair.run();
    let done: Vec<WcOpcode> = pair.sides[0].completions().iter().map(|wc| wc.opcode).collect();
    assert_eq!(done, [WcOpcode::Read, WcOpcode::Write]);
    assert!(holds(&pair, 0, 1 << 20, &bytes));
    // The requester kept the acknowledgement of the WRITE.
    assert_eq!(counters(&pair, 0).retransmitted_packets, 1);
    assert_eq!(counters(&pair, 0).tail_probes, 0);
}

#[test]
fn tail__the_last_packets_are_mended_by_a_probe() {
    for lost_behind in [0, 3, 9] {
        let mut pair = pair();
        let bytes = fill(&pair, 0, 0, 10 * 1024);
        let mut lost: Vec<u32> = (lost_behind..10).map(psn).collect();
        pair.deliver = Box::new(move |side, bytes| {
            let psn = Packet::parse(bytes).unwrap().bth.psn.value();
            let at = lost.iter().position(|at| side == 1 && *at == psn);
            at.map(|at| lost.remove(at)).is_none()
        });
        let begun = pair.now;
        pair.write(0, 1 << 20, 10 * 1024);
        // This is twice the shortest wait; the specification's timeout is 4.2 ms.
        pair.pass(400_000);
        assert_eq!(pair.sides[0].completions().len(), 1, "{lost_behind}");
        assert!(holds(&pair, 1, 1 << 20, &bytes));
        assert_eq!(counters(&pair, 0).tail_probes, 1);
        assert_eq!(counters(&pair, 0).local_ack_timeout_err, 0);
        assert!(pair.now.since_ns(begun) < 1_000_000);
    }
}

#[test]
fn tail__a_flush_that_takes_long_is_not_probed() {
    let mut pair = pair();
    let rkey = pair.slow_region(false, Ok(()));
    pair.flush(rkey);
    // This is less than the specification's timeout of 4.2 ms.
    pair.pass(4_000_000);
    assert_eq!(counters(&pair, 0).tail_probes, 0);
    assert_eq!(counters(&pair, 0).retransmitted_packets, 0);
    let job = pair.sides[1].rnic.poll_flush().unwrap();
    pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
}

#[test]
fn retries__last_as_long_as_without_agreement() {
    let ends = [true, false].map(|selective| {
        let mut pair = Pair::with(|rtr, _| rtr.selective = Some(selective));
        pair.write(0, 0, 8);
        pair.run();
        pair.sides[0].completions();
        let begun = pair.now;
        pair.deliver = Box::new(|_, _| false);
        pair.write(0, 0, 8);
        pair.run();
        assert_eq!(pair.sides[0].completions()[0].status, Status::RetryExceeded);
        let probes = counters(&pair, 0).tail_probes;
        assert!(probes < 40, "{probes} probes");
        (pair.now.since_ns(begun), counters(&pair, 0).local_ack_timeout_err)
    });
    assert_eq!(ends[0], ends[1]);
}

#[test]
fn send__without_a_receive_is_sent_again_alone() {
    let mut pair = pair();
    for at in 0..4u64 {
        let sges = pair.sides[0].sge(at * 100, 100);
        pair.post(0, Operation::Send { imm: None }, sges);
    }
    pair.step();
    // The RNR NAK is in flight; the other three SENDs are kept.
    assert_eq!(counters(&pair, 1).kept_requests, 3);
    for at in 0..4u64 {
        let side = &mut pair.sides[1];
        let request = RecvRequest {
            wr_id: at,
            sges: side.sge((1 << 20) + at * 100, 100),
        };
        side.rnic.post_recv(pair.now, side.qpn, request).unwrap();
    }
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 4);
    let received: Vec<u64> = pair.sides[1].completions().iter().map(|wc| wc.wr_id).collect();
    assert_eq!(received, [0, 1, 2, 3]);
    assert_eq!(counters(&pair, 0).retransmitted_packets, 1);
}

/// Returns a WRITE of one packet, `ahead` PSNs after the next one.
fn stray(pair: &Pair, ahead: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; Bth::LEN + Reth::LEN + len];
    let at = Psn::new(PSN).plus(1 + ahead);
    Bth::new(Opcode::rc(Op::WriteOnly), pair.sides[1].qpn, at).emit(&mut bytes);
    let reth = Reth {
        va: IOVA,
        rkey: pair.sides[1].rkey,
        length: len as u32,
    };
    reth.emit(&mut bytes[Bth::LEN..]);
    pair.craft(&bytes)
}

#[test]
fn keep__no_more_than_the_reach_and_no_longer_packets() {
    let mut pair = pair();
    for ahead in 1..8 * WINDOW {
        let packet = stray(&pair, ahead, 4);
        pair.inject(&packet);
        pair.inject(&packet);
    }
    assert_eq!(counters(&pair, 1).kept_requests, u64::from(4 * WINDOW));
    let long = stray(&pair, 1, 2048);
    pair.inject(&long);
    assert_eq!(counters(&pair, 1).kept_requests, u64::from(4 * WINDOW));
}

#[test]
fn nak__tells_what_was_kept_only_to_peers_that_agreed() {
    for selective in [true, false] {
        let mut pair = Pair::with(|rtr, _| rtr.selective = Some(selective));
        let seen: Rc<RefCell<Vec<Vec<u8>>>> = Rc::default();
        let log = seen.clone();
        pair.deliver = Box::new(move |_, bytes| {
            log.borrow_mut().push(bytes.clone());
            false
        });
        for ahead in [0, 2, 39] {
            let packet = stray(&pair, ahead, 4);
            pair.inject(&packet);
        }
        pair.step();
        let seen = seen.borrow();
        let packet = Packet::parse(seen.last().unwrap()).unwrap();
        assert_eq!(
            packet.aeth().unwrap().syndrome,
            Syndrome::Nak(NakCode::PsnSequence)
        );
        assert_eq!(packet.bth.psn.value(), PSN);
        let held = Sack::of(&packet).map(|sack| {
            let sack = sack.unwrap();
            (0..100)
                .filter(|offset| sack.holds(*offset))
                .collect::<Vec<u32>>()
        });
        assert_eq!(held, selective.then(|| vec![1, 3, 40]));
        assert_eq!(counters(&pair, 1).kept_requests, if selective { 3 } else { 0 });
    }
}

#[test]
fn reorder__a_hole_with_little_behind_it_is_filled_within_a_quarter_of_a_round_trip() {
    const ROUND_TRIP_NS: u64 = 400_000;
    let mut pair = Pair::with(|rtr, _| rtr.selective = Some(true));
    pair.disable_trains();
    let answer: Rc<RefCell<Option<Vec<u8>>>> = Rc::default();
    let hold = answer.clone();
    pair.deliver = Box::new(move |side, bytes| {
        if side == 0 {
            *hold.borrow_mut() = Some(bytes[..bytes.len() - 4].to_vec());
        }
        side == 1
    });
    pair.write(0, 0, 8);
    pair.pass(ROUND_TRIP_NS);
    let answer = answer.borrow_mut().take().unwrap();
    pair.inject_back(&answer);
    assert_eq!(pair.sides[0].completions().len(), 1);

    lose_once(&mut pair, 1, |packet| packet.bth.psn.value() == psn(0));
    pair.write(0, 0, 2 * 1024);
    pair.pass(ROUND_TRIP_NS / 8);
    assert_eq!(counters(&pair, 0).retransmitted_packets, 0);
    pair.pass(ROUND_TRIP_NS / 8);
    assert_eq!(counters(&pair, 0).retransmitted_packets, 1);
    assert_eq!(pair.sides[0].completions().len(), 1);
    assert_eq!(counters(&pair, 0).tail_probes, 0);
}

#[test]
fn timeout__gives_the_answer_the_time_that_answers_were_seen_to_take() {
    let mut pair = Pair::with(|rtr, _| rtr.selective = Some(true));
    pair.disable_trains();
    let answer: Rc<RefCell<Option<Vec<u8>>>> = Rc::default();
    let hold = answer.clone();
    pair.deliver = Box::new(move |side, bytes| {
        if side == 0 {
            *hold.borrow_mut() = Some(bytes[..bytes.len() - 4].to_vec());
        }
        side == 1
    });
    // The timeout of code 10 is 4.2 ms.
    for ms in [3, 6] {
        pair.write(0, 0, 8);
        pair.pass(ms * 1_000_000);
        let answer = answer.borrow_mut().take().unwrap();
        pair.inject_back(&answer);
        assert_eq!(pair.sides[0].completions().len(), 1);
        assert_eq!(counters(&pair, 0).local_ack_timeout_err, 0);
    }
}

#[test]
fn after_half_of_the_psns__loss_is_seen_and_mended_as_before() {
    let mut pair = Pair::with(|rtr, _| {
        rtr.selective = Some(true);
        rtr.path_mtu = Some(256);
    });
    for _ in 0..=(1 << 23) / (MEMORY / 256) {
        pair.write(0, 0, MEMORY as u32);
        pair.run();
        assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
    }
    pair.disable_trains();

    let mut writes = 0;
    pair.deliver = Box::new(move |side, bytes| {
        writes += u32::from(side == 1 && Packet::parse(bytes).unwrap().bth.opcode.operation.is_write());
        side == 0 || writes != 5
    });
    let before = counters(&pair, 0);
    pair.write(0, 1 << 20, 30 * 256);
    pair.run();
    let after = counters(&pair, 0);
    assert_eq!(after.local_ack_timeout_err, before.local_ack_timeout_err);
    assert_eq!(after.tail_probes, before.tail_probes);
    assert_eq!(after.retransmitted_packets, before.retransmitted_packets + 1);
    assert_eq!(pair.sides[0].completions().len(), 1);

    // The answer to a READ does not complete a WRITE behind it.
    pair.deliver =
        Box::new(|side, bytes| side == 0 || !Packet::parse(bytes).unwrap().bth.opcode.operation.is_write());
    let (rkey, sges) = (pair.sides[1].rkey, pair.sides[0].sge(1 << 20, 8));
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.write(0, 1 << 20, 1024);
    for _ in 0..10 {
        pair.step();
    }
    let done = pair.sides[0].completions();
    assert_eq!((done.len(), done[0].opcode), (1, WcOpcode::Read));
}

#[test]
fn modify__of_the_window_moves_the_reach_with_it() {
    // With the narrowest window the reach is 16 packets.
    let mut pair = Pair::with(|rtr, _| (rtr.selective, rtr.window_bytes) = (Some(true), Some(1)));
    let wider = QpAttributes {
        window_bytes: Some(1 << 20),
        ..Default::default()
    };
    for i in 0..2 {
        pair.modify(i, QpState::Rts, &wider);
    }
    let bytes = fill(&pair, 1, 0, 40 * 1024);
    let read = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(1 << 20, 40 * 1024);
    pair.post(0, read, sges);
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 1);
    assert!(holds(&pair, 0, 1 << 20, &bytes));
}
