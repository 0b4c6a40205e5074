//! Unreliable connections. IBTA Vol 1, 9.8.2.

use super::util::*;
use crate::*;

fn byte(i: usize) -> u8 {
    (i * 7 + i / 251) as u8
}

fn connected() -> Pair {
    let mut pair = Pair::uc();
    pair.disable_trains();
    pair.sides[0].memory.with(|m| {
        m[..1 << 16]
            .iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = byte(i))
    });
    pair
}

/// Drops some of the packets to side 1, numbered from one.
fn lose(pair: &mut Pair, lost: std::ops::Range<usize>) {
    let mut count = 0;
    pair.deliver = Box::new(move |to, _| {
        count += usize::from(to == 1);
        to != 1 || !lost.contains(&count)
    });
}

fn send(pair: &mut Pair, offset: u64, length: u32) {
    let sges = pair.sides[0].sge(offset, length);
    pair.post(0, Operation::Send { imm: None }, sges);
    pair.run();
}

fn write(pair: &mut Pair, to: u64, length: u32, imm: Option<u32>) {
    let (va, rkey) = (IOVA + to, pair.sides[1].rkey);
    let sges = pair.sides[0].sge(0, length);
    pair.post(0, Operation::Write { va, rkey, imm }, sges);
    pair.run();
}

fn expect_bytes(pair: &Pair, at: usize, from: usize, length: usize) {
    let expected: Vec<u8> = (from..from + length).map(byte).collect();
    pair.sides[1]
        .memory
        .with(|m| assert_eq!(m[at..at + length], expected));
}

fn counters(pair: &Pair) -> Counters {
    pair.sides[1].rnic.counters()
}

/// Delivers a packet to side 1: opcode, PSN relative to the first, and the bytes behind the BTH.
fn inject(pair: &mut Pair, opcode: u8, psn: u32, rest: &[u8]) {
    let pad = rest.len().wrapping_neg() & 3;
    let mut packet = vec![opcode, (pad as u8) << 4, 0xff, 0xff, 0];
    packet.extend_from_slice(&pair.sides[1].qpn.value().to_be_bytes()[1..]);
    packet.push(0);
    packet.extend_from_slice(&Psn::new(PSN).plus(psn).value().to_be_bytes()[1..]);
    packet.extend_from_slice(rest);
    packet.resize(packet.len() + pad, 0);
    let bytes = pair.craft(&packet);
    pair.inject(&bytes);
}

const SEND_FIRST: u8 = 0x20;
const SEND_MIDDLE: u8 = 0x21;
const SEND_LAST: u8 = 0x22;
const SEND_ONLY: u8 = 0x24;
const WRITE_FIRST: u8 = 0x26;
const WRITE_MIDDLE: u8 = 0x27;
const WRITE_ONLY: u8 = 0x2a;

fn reth(va: u64, rkey: RKey, length: u32) -> Vec<u8> {
    let mut bytes = va.to_be_bytes().to_vec();
    bytes.extend_from_slice(&rkey.0.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

#[test]
fn send__of_every_interesting_length_arrives() {
    for length in [0, 1, 3, 1023, 1024, 1025, 2048, 50_000] {
        let mut pair = connected();
        pair.recv(1, 9, 4096, 1 << 16);
        let sges = pair.sides[0].sge(0, length);
        pair.post(0, Operation::Send { imm: Some(3) }, sges);
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
        let received = pair.sides[1].completions();
        assert_eq!((received[0].byte_len, received[0].imm), (length, Some(3)));
        assert_eq!(received[0].src_qpn, None);
        expect_bytes(&pair, 4096, 0, length as usize);
    }
}

#[test]
fn send__needs_no_answer() {
    let mut pair = connected();
    lose(&mut pair, 1..100);
    send(&mut pair, 0, 5000);
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    assert_eq!(pair.sides[0].rnic.poll_timeout(), None);
}

#[test]
fn write__with_and_without_immediate_data() {
    let mut pair = connected();
    pair.recv(1, 9, 0, 0);
    write(&mut pair, 4096, 3000, None);
    expect_bytes(&pair, 4096, 0, 3000);
    assert_eq!(pair.sides[1].completed(), []);
    write(&mut pair, 8192, 3000, Some(5));
    let received = pair.sides[1].completions();
    assert_eq!(
        (received[0].opcode, received[0].byte_len, received[0].imm),
        (WcOpcode::RecvRdmaWithImm, 3000, Some(5))
    );
}

#[test]
fn window__is_bound_on_the_connection() {
    let mut pair = connected();
    let side = &mut pair.sides[0];
    let RKey(unbound) = side.rnic.alloc_mw(side.pd, WindowType::Two).unwrap();
    let window = RKey(unbound ^ 1);
    let region = side.lkey;
    let bind = Bind {
        window,
        region,
        va: IOVA,
        length: 64,
        access: Access::REMOTE_WRITE,
    };
    pair.post(0, Operation::Bind(bind), SgeList::EMPTY);
    pair.post(0, Operation::LocalInvalidate { rkey: window }, SgeList::EMPTY);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 2]);
}

#[test]
fn gap__each_packet_of_a_message_drops_it_whole() {
    for lost in 1..=4 {
        let mut pair = connected();
        pair.recv(1, 1, 4096, 8192);
        pair.recv(1, 2, 1 << 15, 8192);
        lose(&mut pair, lost..lost + 1);
        send(&mut pair, 0, 4096);
        assert_eq!(pair.sides[1].completed(), [], "packet {lost}");
        // The receive of the dropped message is still there for the next one.
        send(&mut pair, 100, 3000);
        assert_eq!(pair.sides[1].completed(), [(1, Status::Success)], "packet {lost}");
        expect_bytes(&pair, 4096, 100, 3000);
        send(&mut pair, 200, 10);
        assert_eq!(pair.sides[1].completed(), [(2, Status::Success)]);
        assert_eq!(pair.sides[1].state(), QpState::Rts);
    }
}

#[test]
fn gap__between_messages_costs_only_what_was_lost() {
    let mut pair = connected();
    for n in 0..3 {
        pair.recv(1, n, 4096 * n, 4096);
    }
    lose(&mut pair, 2..3);
    for n in 0..3 {
        send(&mut pair, n * 100, 100);
    }
    assert_eq!(
        pair.sides[1].completed(),
        [(0, Status::Success), (1, Status::Success)]
    );
    expect_bytes(&pair, 0, 0, 100);
    expect_bytes(&pair, 4096, 200, 100);
    assert_eq!(counters(&pair).out_of_sequence, 1);
}

#[test]
fn gap__a_write_may_be_placed_in_part_and_says_nothing() {
    let mut pair = connected();
    pair.recv(1, 9, 0, 0);
    lose(&mut pair, 2..3);
    write(&mut pair, 4096, 3000, Some(1));
    assert_eq!(pair.sides[1].completed(), []);
    expect_bytes(&pair, 4096, 0, 1024);
    pair.sides[1]
        .memory
        .with(|m| assert!(m[5120..8192].iter().all(|b| *b == 0)));
    assert_eq!(counters(&pair).dropped_messages, 1);
}

#[test]
fn late__copies_and_stragglers_are_dropped() {
    let mut pair = connected();
    pair.recv(1, 1, 4096, 100);
    pair.recv(1, 2, 8192, 100);
    inject(&mut pair, SEND_ONLY, 1, b"second");
    inject(&mut pair, SEND_ONLY, 0, b"first");
    inject(&mut pair, SEND_ONLY, 1, b"second");
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
    assert_eq!(counters(&pair).duplicate_request, 2);
    // A PSN far behind counts as far ahead: the sender continued during an outage.
    inject(&mut pair, SEND_ONLY, 0x80_0000, b"third");
    assert_eq!(pair.sides[1].completed(), [(2, Status::Success)]);
}

#[test]
fn sequence__a_message_that_never_began_is_dropped() {
    for opcode in [SEND_MIDDLE, SEND_LAST, WRITE_MIDDLE, 0x28] {
        let mut pair = connected();
        pair.recv(1, 1, 4096, 4096);
        inject(&mut pair, opcode, 0, &[5; 1024]);
        assert_eq!(pair.sides[1].completed(), [], "{opcode:#x}");
        inject(&mut pair, SEND_ONLY, 1, b"good");
        assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
    }
}

#[test]
fn sequence__a_message_inside_of_another_replaces_it() {
    for first in [SEND_FIRST, SEND_ONLY] {
        let mut pair = connected();
        pair.recv(1, 1, 4096, 4096);
        inject(&mut pair, SEND_FIRST, 0, &[1; 1024]);
        inject(&mut pair, first, 1, &[2; 1024]);
        if first == SEND_FIRST {
            inject(&mut pair, SEND_LAST, 2, &[3; 4]);
        }
        assert_eq!(pair.sides[1].completed(), [(1, Status::Success)], "{first:#x}");
        pair.sides[1].memory.with(|m| assert_eq!(m[4096], 2));
        assert_eq!(counters(&pair).dropped_messages, 1);
    }
}

#[test]
fn sequence__the_rest_of_another_operation_drops_the_message() {
    let mut pair = connected();
    pair.recv(1, 1, 4096, 4096);
    inject(&mut pair, SEND_FIRST, 0, &[1; 1024]);
    inject(&mut pair, WRITE_MIDDLE, 1, &[2; 1024]);
    inject(&mut pair, SEND_LAST, 2, &[3; 4]);
    assert_eq!(pair.sides[1].completed(), []);
    inject(&mut pair, SEND_ONLY, 3, b"good");
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
}

#[test]
fn length__that_does_not_fit_its_place_drops_the_message() {
    for (opcode, length) in [
        (SEND_FIRST, 1023),
        (SEND_FIRST, 1025),
        (SEND_ONLY, 1025),
        (SEND_FIRST, 0),
    ] {
        let mut pair = connected();
        pair.recv(1, 1, 4096, 4096);
        inject(&mut pair, opcode, 0, &vec![1; length]);
        inject(&mut pair, SEND_LAST, 1, &[2; 8]);
        assert_eq!(pair.sides[1].completed(), [], "{opcode:#x} of {length}");
        assert_eq!(
            (counters(&pair).dropped_messages, pair.sides[1].state()),
            (1, QpState::Rts)
        );
    }
    // A last packet must carry at least one byte.
    let mut pair = connected();
    pair.recv(1, 1, 4096, 4096);
    inject(&mut pair, SEND_FIRST, 0, &[1; 1024]);
    inject(&mut pair, SEND_LAST, 1, &[]);
    assert_eq!(pair.sides[1].completed(), []);
}

#[test]
fn receive__none_posted_drops_the_whole_message() {
    let mut pair = connected();
    inject(&mut pair, SEND_FIRST, 0, &[1; 1024]);
    pair.recv(1, 1, 4096, 4096);
    inject(&mut pair, SEND_LAST, 1, &[1; 100]);
    assert_eq!(pair.sides[1].completed(), []);
    assert_eq!(counters(&pair).resources_dropped, 1);
    inject(&mut pair, SEND_ONLY, 2, b"good");
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
}

#[test]
fn receive__none_posted_for_immediate_data_drops_that() {
    let mut pair = connected();
    write(&mut pair, 4096, 2000, Some(1));
    assert_eq!(counters(&pair).resources_dropped, 1);
    pair.recv(1, 1, 0, 0);
    write(&mut pair, 4096, 2000, Some(2));
    assert_eq!(pair.sides[1].completions()[0].imm, Some(2));
}

#[test]
fn receive__too_short_drops_the_message_and_is_kept() {
    let mut pair = connected();
    pair.recv(1, 1, 4096, 1500);
    send(&mut pair, 0, 1501);
    assert_eq!(
        (pair.sides[1].completed(), pair.sides[1].state()),
        (vec![], QpState::Rts)
    );
    assert_eq!(counters(&pair).dropped_messages, 1);
    send(&mut pair, 0, 1500);
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
}

#[test]
fn receive__of_a_shared_queue_is_kept_for_the_next_message() {
    let mut pair = connected();
    let side = &mut pair.sides[1];
    let srq = side.rnic.create_srq(SrqInit {
        pd: side.pd,
        max_wr: 4,
        xrc: None,
    });
    let init = QpInit {
        qp_type: QpType::Uc,
        srq,
        ..QpInit::new(side.pd, side.cq)
    };
    let sges = side.sge(4096, 4096);
    side.rnic
        .post_srq_recv(srq.unwrap(), RecvRequest { wr_id: 5, sges })
        .unwrap();
    pair.replace_qps(QpType::Uc, init);
    inject(&mut pair, SEND_FIRST, 0, &[1; 1024]);
    inject(&mut pair, SEND_ONLY, 2, b"next");
    assert_eq!(pair.sides[1].completed(), [(5, Status::Success)]);
}

#[test]
fn access__not_granted_drops_the_message_and_keeps_the_qp() {
    let mut pair = connected();
    let side = &pair.sides[1];
    let (good, end) = (side.rkey, IOVA + MEMORY as u64);
    for (n, head) in [
        reth(IOVA, RKey(good.0 ^ 0x100), 4),
        reth(end - 3, good, 4),
        reth(IOVA - 1, good, 4),
        reth(IOVA, good, 5),
    ]
    .into_iter()
    .enumerate()
    {
        let rest = [head, vec![9; 4]].concat();
        inject(&mut pair, WRITE_ONLY, n as u32, &rest);
        assert_eq!(counters(&pair).dropped_messages, n as u64 + 1);
    }
    // The rest of such a message is dropped too.
    let rest = [reth(end - 3, good, 1028), vec![9; 1024]].concat();
    inject(&mut pair, WRITE_FIRST, 4, &rest);
    inject(&mut pair, 0x28, 5, &[9; 4]);
    assert_eq!(pair.sides[1].state(), QpState::Rts);
    pair.sides[1].memory.with(|m| assert!(m.iter().all(|b| *b == 0)));
}

#[test]
fn access__not_granted_by_the_qp_drops_the_message() {
    let mut pair = connected();
    let none = QpAttributes {
        access: Some(Access::empty()),
        ..Default::default()
    };
    pair.modify(1, QpState::Rts, &none);
    write(&mut pair, 4096, 100, None);
    assert_eq!(
        (counters(&pair).dropped_messages, pair.sides[1].state()),
        (1, QpState::Rts)
    );
    pair.sides[1].memory.with(|m| assert!(m.iter().all(|b| *b == 0)));
}

#[test]
fn packets__of_other_transports_and_addresses_are_dropped() {
    let mut pair = connected();
    pair.recv(1, 1, 4096, 4096);
    inject(&mut pair, 0x04, 0, b"RC SEND");
    inject(&mut pair, 0x11, 0, &[0; 4]);
    assert_eq!(counters(&pair).no_qp, 2);
    let mut packet = vec![SEND_ONLY, 0, 0xff, 0xff, 0];
    packet.extend_from_slice(&pair.sides[1].qpn.value().to_be_bytes()[1..]);
    packet.extend_from_slice(&[0, 0xff, 0xff, 0xf0, 1, 2, 3, 4]);
    let path = Path {
        src: [10, 0, 0, 9].into(),
        ..pair.path(0, pair.sides[1].address)
    };
    packet.extend_from_slice(&path.flow().icrc(&packet.clone(), 0).to_le_bytes());
    let (now, length) = (pair.now, packet.len());
    pair.sides[1]
        .rnic
        .handle_datagram(now, path.src, path.src_port, &packet, length);
    assert_eq!(counters(&pair).wrong_peer, 1);
    assert_eq!(pair.sides[1].completed(), []);
}

#[test]
fn rtr__the_first_packet_tells_of_the_connection() {
    let mut pair = connected();
    pair.back_to_rtr(1);
    pair.recv(1, 1, 4096, 100);
    send(&mut pair, 0, 10);
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
    let event = pair.sides[1].rnic.poll_event();
    assert_eq!(event, Some(Event::CommunicationEstablished(pair.sides[1].qpn)));
}

#[test]
fn post_send__refusals() {
    let mut pair = connected();
    let (rkey, va) = (pair.sides[1].rkey, IOVA);
    let sges = pair.sides[0].sge(0, 8);
    let flush = Operation::Flush {
        va,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    for operation in [
        Operation::SendInvalidate { rkey },
        Operation::Read { va, rkey },
        Operation::CompareSwap {
            va,
            rkey,
            compare: 0,
            swap: 0,
        },
        Operation::FetchAdd { va, rkey, add: 1 },
        Operation::AtomicWrite { va, rkey },
        flush,
    ] {
        let refused = pair.try_post(0, Target::Connected, operation.clone(), sges.clone());
        assert_eq!(refused, Err(PostError::Invalid), "{operation:?}");
    }
    pair.modify(0, QpState::Reset, &QpAttributes::default());
    let refused = pair.try_post(0, Target::Connected, Operation::Send { imm: None }, sges);
    assert_eq!(refused, Err(PostError::WrongState));
}

#[test]
fn post_send__no_more_than_the_queue_holds() {
    let mut pair = connected();
    let sges = pair.sides[0].sge(0, 8);
    for n in 0..=128 {
        let result = pair.try_post(0, Target::Connected, Operation::Send { imm: None }, sges.clone());
        let expected = if n < 128 {
            Ok(())
        } else {
            Err(PostError::QueueFull)
        };
        assert_eq!(result, expected, "request {n}");
    }
}

#[test]
fn sqe__in_the_middle_of_a_message_drops_it_at_the_peer() {
    let mut pair = connected();
    pair.recv(1, 1, 4096, 8192);
    let side = &pair.sides[0];
    let half = [Sge::new(IOVA, 2048, side.lkey), Sge::new(IOVA, 2048, LKey(0x55))];
    let good = side.sge(0, 100);
    let send = Operation::Send { imm: None };
    pair.post(0, send.clone(), SgeList::from(&half[..]));
    pair.post(0, send.clone(), good.clone());
    pair.run();
    assert_eq!(
        pair.sides[0].completed(),
        [(7, Status::LocalProtection), (7, Status::Flushed)]
    );
    assert_eq!(pair.sides[0].state(), QpState::Sqe);
    pair.modify(0, QpState::Rts, &QpAttributes::default());
    pair.post(0, send, good);
    pair.run();
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
    expect_bytes(&pair, 4096, 0, 100);
}

#[test]
fn sqe__a_bind_that_fails_leads_there() {
    let mut pair = connected();
    let bind = Bind {
        window: RKey(0x1234_5600),
        region: pair.sides[0].lkey,
        va: IOVA,
        length: 8,
        access: Access::REMOTE_READ,
    };
    pair.post(0, Operation::Bind(bind), SgeList::EMPTY);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::MemoryBind)]);
    assert_eq!(pair.sides[0].state(), QpState::Sqe);
}

#[test]
fn sqd__ends_the_message_under_way_then_tells() {
    let mut pair = connected();
    pair.recv(1, 1, 0, 1 << 20);
    pair.recv(1, 2, 0, 1 << 20);
    let side = &mut pair.sides[0];
    let long = side.sge(0, 200_000);
    let send = Operation::Send { imm: None };
    pair.post(0, send.clone(), long.clone());
    pair.post(0, send, long);
    // One quantum sends only a part.
    let mut buf = TransmitBuf::new(10_000, true);
    assert!(pair.sides[0].rnic.poll_transmit(pair.now, &mut buf, true));
    pair.modify(0, QpState::Sqd, &QpAttributes::default());
    assert_eq!(pair.sides[0].rnic.poll_event(), None);
    pair.run();
    let qpn = pair.sides[0].qpn;
    let rnic = &mut pair.sides[0].rnic;
    assert_eq!(rnic.poll_event(), Some(Event::SqDrained(qpn)));
    assert_eq!(rnic.query_qp(qpn).unwrap().send_outstanding, 1);
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
}
