//! Acknowledgements that requests carry, between peers that agreed to it.

use std::cell::RefCell;
use std::rc::Rc;

use rdmux_wire::roce::{Bth, Opcode, Operation as Op, Packet, Reth, carried};

use super::util::*;
use crate::*;

/// The packets to each side, a datagram each: operation, bytes of payload, and the PSN that the packet carries.
type Log = Rc<RefCell<[Vec<Sent>; 2]>>;
type Sent = (Op, usize, Option<Psn>);

/// Returns a pair that agreed, and a log. `loses` decides by side and index which datagrams are lost.
fn pair_with(
    change: impl Fn(&mut QpAttributes, &mut QpAttributes),
    loses: impl Fn(usize, usize) -> bool + 'static,
) -> (Pair, Log) {
    let mut pair = Pair::with(|rtr, rts| {
        rtr.carried_acks = Some(true);
        change(rtr, rts);
    });
    pair.disable_trains();
    let sent: Log = Rc::default();
    let log = sent.clone();
    pair.deliver = Box::new(move |to, bytes| {
        let mut packet = Packet::parse(bytes).unwrap();
        packet.take_carried().unwrap();
        let log = &mut log.borrow_mut()[to];
        log.push((
            packet.bth.opcode.operation,
            packet.payload().len(),
            packet.carried(),
        ));
        !loses(to, log.len() - 1)
    });
    (pair, sent)
}

fn pair() -> (Pair, Log) {
    pair_with(|_, _| {}, |_, _| false)
}

/// Posts a WRITE of `length` bytes from a side to the other.
fn write_from(pair: &mut Pair, side: usize, length: u32) {
    let rkey = pair.sides[1 - side].rkey;
    let va = IOVA + 4096;
    let sges = pair.sides[side].sge(0, length);
    pair.post(side, Operation::Write { va, rkey, imm: None }, sges);
}

fn psn(of_request: u32) -> Psn {
    Psn::new(PSN).plus(of_request)
}

fn is_done(pair: &mut Pair, side: usize, count: usize) {
    let done = pair.sides[side].completed();
    assert_eq!(done, vec![(7, Status::Success); count], "side {side}");
}

#[test]
fn write__carries_the_acknowledgement_of_the_peers() {
    let (mut pair, log) = pair();
    pair.sides[0].memory.write(0, b"forth").unwrap();
    pair.sides[1].memory.write(0, b"back").unwrap();
    write_from(&mut pair, 0, 5);
    pair.step();
    write_from(&mut pair, 1, 4);
    pair.step();
    is_done(&mut pair, 0, 1);
    write_from(&mut pair, 0, 5);
    pair.run();
    is_done(&mut pair, 0, 1);
    is_done(&mut pair, 1, 1);
    let log = log.borrow();
    assert_eq!(
        log[1],
        [(Op::WriteOnly, 5, None), (Op::WriteOnly, 5, Some(psn(0)))]
    );
    assert_eq!(
        log[0],
        [(Op::WriteOnly, 4, Some(psn(0))), (Op::Acknowledge, 0, None)]
    );
    let mut found = [0; 6];
    pair.sides[0].memory.read(4096, &mut found).unwrap();
    assert_eq!(&found, b"back\0\0");
    pair.sides[1].memory.read(4096, &mut found).unwrap();
    assert_eq!(&found, b"forth\0");
}

#[test]
fn write__carries_nothing_without_agreement_or_through_memory() {
    for (agreed, local) in [(false, false), (true, true)] {
        let (mut pair, log) = pair_with(|rtr, _| rtr.carried_acks = Some(agreed), |_, _| false);
        pair.set_local(local);
        write_from(&mut pair, 0, 8);
        pair.step();
        write_from(&mut pair, 1, 8);
        pair.run();
        is_done(&mut pair, 0, 1);
        is_done(&mut pair, 1, 1);
        let log = log.borrow();
        assert!(log.iter().flatten().all(|sent| sent.2.is_none()));
        assert_eq!((log[0].len(), log[1].len()), (2, 2));
    }
}

#[test]
fn write__of_a_full_packet_carries_one_too() {
    for length in [0, 1, 1020, 1021, 1024, 2044, 2048] {
        let (mut pair, log) = pair();
        write_from(&mut pair, 0, 8);
        pair.step();
        write_from(&mut pair, 1, length);
        pair.run();
        is_done(&mut pair, 0, 1);
        is_done(&mut pair, 1, 1);
        let log = log.borrow();
        let carrier = log[0].iter().position(|sent| sent.2.is_some());
        let packets = length.div_ceil(1024).max(1) as usize;
        assert_eq!((carrier, log[0].len()), (Some(packets - 1), packets), "{length}");
    }
}

#[test]
fn carries__a_link_of_the_path_mtu() {
    let path = |src: &str, dst: &str| Path {
        src: src.parse().unwrap(),
        dst: dst.parse().unwrap(),
        src_port: 1,
        traffic_class: 0,
    };
    // A full WRITE Only is as long as the link allows by IPv6, and 20 bytes shorter by IPv4.
    let write = Bth::LEN + Reth::LEN + 1024;
    for (path, spare) in [
        (path("fd00::1", "fd00::2"), 0),
        (path("10.0.0.1", "10.0.0.2"), 20),
    ] {
        assert!(path.carries(write + spare, 1024));
        assert!(!path.carries(write + spare + 1, 1024));
    }
}

#[test]
fn write__carries_nothing_that_would_cost_a_datagram() {
    // A train of two packets, the second of which is the shorter one by that many bytes, and the acknowledgement.
    for (shorter, carries) in [(0, false), (4, true), (8, true)] {
        let mut pair = Pair::with(|rtr, _| rtr.carried_acks = Some(true));
        let datagrams: Rc<RefCell<Vec<usize>>> = Rc::default();
        let log = datagrams.clone();
        pair.deliver = Box::new(move |to, bytes| {
            if to == 0 {
                log.borrow_mut().push(bytes.len());
            }
            true
        });
        write_from(&mut pair, 0, 8);
        pair.step();
        write_from(&mut pair, 1, 64);
        write_from(&mut pair, 1, 64 - shorter);
        pair.step();
        pair.step();
        is_done(&mut pair, 0, 1);
        let write = Bth::LEN + Reth::LEN + 64 + 4;
        let rest = if carries { carried::LEN } else { Bth::LEN + 4 + 4 };
        assert_eq!(
            *datagrams.borrow(),
            [2 * write - shorter as usize + rest],
            "{shorter}"
        );
    }
}

#[test]
fn send__an_rnr_nak_is_a_packet_of_its_own() {
    let (mut pair, log) = pair();
    let sges = pair.sides[0].sge(0, 8);
    pair.post(0, Operation::Send { imm: None }, sges);
    pair.step();
    write_from(&mut pair, 1, 8);
    pair.step();
    assert_eq!(
        log.borrow()[0],
        [(Op::WriteOnly, 8, None), (Op::Acknowledge, 0, None)]
    );
    pair.recv(1, 9, 0, 8);
    pair.run();
    is_done(&mut pair, 0, 1);
}

#[test]
fn carried__late_and_twice() {
    let (mut pair, _) = pair();
    let late: Rc<RefCell<Vec<u8>>> = Rc::default();
    let keep = late.clone();
    write_from(&mut pair, 0, 8);
    pair.step();
    pair.deliver = Box::new(move |to, bytes| {
        if to == 0 && keep.borrow().is_empty() {
            keep.borrow_mut().clone_from(bytes);
        }
        true
    });
    write_from(&mut pair, 1, 8);
    pair.run();
    is_done(&mut pair, 0, 1);
    let src = pair.sides[1].address;
    // The requests that are sent since are lost on their way: nothing but the late packet could acknowledge them.
    pair.deliver = Box::new(|_, _| false);
    for _ in 0..70 {
        write_from(&mut pair, 0, 8);
        pair.step();
        let late = late.borrow().clone();
        pair.sides[0]
            .rnic
            .handle_datagram(pair.now, src, 0xc001, &late, late.len());
    }
    assert_eq!(pair.sides[0].completed(), []);
    pair.deliver = Box::new(|_, _| true);
    pair.run();
    is_done(&mut pair, 0, 70);
}

#[test]
fn carried__in_a_request_that_is_kept() {
    // The first SEND of side 1 is lost, and the second carries the acknowledgement.
    let (mut pair, log) = pair_with(
        |rtr, _| rtr.selective = Some(true),
        |to, index| (to, index) == (0, 0),
    );
    for n in 0..2 {
        pair.recv(0, n, 2048 + 64 * n, 64);
    }
    let bytes = pattern(32);
    pair.sides[1].memory.write(0, &bytes).unwrap();
    write_from(&mut pair, 0, 8);
    pair.step();
    for length in [8, 7] {
        let sges = pair.sides[1].sge(0, length);
        pair.post(1, Operation::Send { imm: None }, sges);
    }
    pair.step();
    is_done(&mut pair, 0, 1);
    pair.run();
    assert_eq!(log.borrow()[0][1], (Op::SendOnly, 7, Some(psn(0))));
    let received: Vec<(u64, u32)> = pair.sides[0]
        .completions()
        .iter()
        .map(|wc| (wc.wr_id, wc.byte_len))
        .collect();
    assert_eq!(received, [(0, 8), (1, 7)]);
    let mut found = [0; 8];
    pair.sides[0].memory.read(2048 + 64, &mut found).unwrap();
    assert_eq!((&found[..7], found[7]), (&bytes[..7], 0));
    assert_eq!(pair.sides[0].rnic.counters().kept_requests, 1);
}

#[test]
fn carried__completes_whatever_is_lost() {
    for selective in [false, true] {
        for lost in 0..8usize {
            let (mut pair, _) = pair_with(
                |rtr, _| rtr.selective = Some(selective),
                move |to, index| (to, index) == (lost & 1, lost / 2),
            );
            for _ in 0..3 {
                for side in 0..2 {
                    write_from(&mut pair, side, 8);
                    pair.step();
                }
            }
            pair.run();
            is_done(&mut pair, 0, 3);
            is_done(&mut pair, 1, 3);
        }
    }
}

/// Returns a SEND of 8 bytes from side 0 with the bit set, without its ICRC; `acked`: the acknowledgement behind the bytes.
fn forged(pair: &Pair, opcode: Op, acked: Option<Psn>) -> Vec<u8> {
    let mut packet = vec![0; Bth::LEN];
    Bth::new(Opcode::rc(opcode), pair.sides[1].qpn, psn(0)).emit(&mut packet);
    packet.resize(Bth::LEN + Opcode::rc(opcode).ext().len() + 8 + carried::LEN, 0);
    carried::emit(&mut packet, acked.unwrap_or(Psn::new(0)));
    packet
}

#[test]
fn carried__means_nothing_without_agreement() {
    let (mut pair, _) = pair_with(|rtr, _| rtr.carried_acks = Some(false), |_, _| false);
    pair.recv(1, 3, 0, 64);
    let packet = pair.craft(&forged(&pair, Op::SendOnly, None));
    pair.inject(&packet);
    assert_eq!(pair.sides[1].completions()[0].byte_len, 12);
}

#[test]
fn carried__of_what_was_never_sent_is_ignored() {
    let (mut pair, _) = pair();
    pair.recv(1, 3, 0, 64);
    pair.deliver = Box::new(|_, _| false);
    write_from(&mut pair, 1, 8);
    pair.step();
    let packet = pair.craft(&forged(&pair, Op::SendOnly, Some(psn(1))));
    pair.inject(&packet);
    let done = pair.sides[1].completions();
    assert_eq!(done.len(), 1);
    assert_eq!((done[0].wr_id, done[0].byte_len), (3, 8));
}

#[test]
fn carried__malformed() {
    let (mut pair, _) = pair();
    pair.recv(1, 3, 0, 64);
    let mut wrong = forged(&pair, Op::SendOnly, None);
    let at = wrong.len() - carried::LEN;
    wrong[at] = 0x60;
    let short = forged(&pair, Op::SendOnly, None)[..Bth::LEN].to_vec();
    let of_read = forged(&pair, Op::ReadRequest, None);
    for (n, packet) in [wrong, short, of_read].iter().enumerate() {
        let packet = pair.craft(packet);
        pair.inject(&packet);
        assert_eq!(pair.sides[1].rnic.counters().malformed, n as u64 + 1);
    }
    assert_eq!(pair.sides[1].state(), QpState::Rts);
    assert_eq!(pair.sides[1].completed(), []);
}
