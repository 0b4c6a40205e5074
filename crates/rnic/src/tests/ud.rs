//! Unreliable datagrams and multicast. IBTA Vol 1, 9.8.3, 10.2.5, 10.5.

use std::net::IpAddr;

use super::util::*;
use crate::*;

const QKEY: u32 = 0x1234_5678;

fn datagrams() -> Pair {
    let mut pair = Pair::new();
    pair.sides[0].memory.with(|m| {
        m[..4096]
            .iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = (i * 3) as u8)
    });
    for i in 0..2 {
        pair.sides[i].qpn = pair.ud_qp(i, QKEY);
    }
    pair
}

fn to_peer(pair: &Pair) -> Target {
    Target::Datagram {
        path: pair.path(0, pair.sides[1].address),
        qpn: pair.sides[1].qpn,
        qkey: QKEY,
    }
}

fn to_group(pair: &Pair, group: IpAddr) -> Target {
    Target::Datagram {
        path: pair.path(0, group),
        qpn: Qpn::MULTICAST,
        qkey: QKEY,
    }
}

fn send(pair: &mut Pair, to: Target, length: u32) {
    let sges = pair.sides[0].sge(0, length);
    pair.try_post(0, to, Operation::Send { imm: None }, sges).unwrap();
    pair.run();
}

#[test]
fn send__is_placed_behind_the_header_and_completes_with_its_source() {
    let mut pair = datagrams();
    pair.recv(1, 9, 100, 40 + 1024);
    let sges = pair.sides[0].sge(0, 1000);
    let to = to_peer(&pair);
    pair.try_post(0, to, Operation::Send { imm: Some(0xfeed) }, sges)
        .unwrap();
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    let received = pair.sides[1].completions();
    assert_eq!(received.len(), 1);
    assert_eq!(
        (
            received[0].wr_id,
            received[0].byte_len,
            received[0].imm,
            received[0].src_qpn
        ),
        (9, 1040, Some(0xfeed), Some(pair.sides[0].qpn))
    );
    pair.sides[1].memory.with(|m| {
        assert_eq!(m[100..120], [0; 20]);
        assert_eq!(m[120], 0x45);
        assert_eq!(m[132..140], [10, 0, 0, 1, 10, 0, 0, 2]);
        let sent: Vec<u8> = (0..1000).map(|i| (i * 3) as u8).collect();
        assert_eq!(m[140..1140], sent);
        assert!(m[1140..4096].iter().all(|b| *b == 0), "only there");
    });
}

#[test]
fn send__of_nothing_brings_the_header_alone() {
    let mut pair = datagrams();
    pair.recv(1, 9, 0, 40);
    let to = to_peer(&pair);
    send(&mut pair, to, 0);
    assert_eq!(pair.sides[1].completions()[0].byte_len, 40);
}

#[test]
fn send__gathers_and_takes_bytes_inline() {
    let mut pair = datagrams();
    pair.recv(1, 9, 0, 100);
    let to = to_peer(&pair);
    pair.try_post(0, to, Operation::Send { imm: None }, SgeList::inline(b"hello"))
        .unwrap();
    pair.run();
    pair.sides[1].memory.with(|m| assert_eq!(&m[40..45], b"hello"));
}

#[test]
fn send__to_a_qp_of_the_same_device() {
    let mut pair = datagrams();
    let other = pair.ud_qp(0, QKEY);
    pair.recv_at(0, other, 9, 8192, 2000);
    let to = Target::Datagram {
        path: pair.path(0, pair.sides[0].address),
        qpn: other,
        qkey: QKEY,
    };
    send(&mut pair, to, 10);
    assert_eq!(
        pair.sides[0].completed(),
        [(7, Status::Success), (9, Status::Success)]
    );
}

#[test]
fn send__from_many_senders_uses_the_receives_in_order() {
    let mut pair = datagrams();
    for n in 0..3 {
        pair.recv(1, n, n * 2000, 2000);
    }
    let to = to_peer(&pair);
    send(&mut pair, to, 10);
    let other = pair.ud_qp(0, QKEY);
    let mine = std::mem::replace(&mut pair.sides[0].qpn, other);
    send(&mut pair, to, 20);
    pair.sides[0].qpn = mine;
    send(&mut pair, to, 30);
    let received = pair.sides[1].completions();
    let seen: Vec<_> = received
        .iter()
        .map(|wc| (wc.wr_id, wc.byte_len, wc.src_qpn))
        .collect();
    assert_eq!(
        seen,
        [(0, 50, Some(mine)), (1, 60, Some(other)), (2, 70, Some(mine))]
    );
}

#[test]
fn send__qkey_with_the_high_bit_is_the_senders_own() {
    let mut pair = datagrams();
    pair.recv(1, 9, 0, 100);
    let Target::Datagram { path, qpn, .. } = to_peer(&pair) else {
        unreachable!()
    };
    let to = Target::Datagram {
        path,
        qpn,
        qkey: 0x8000_0001,
    };
    send(&mut pair, to, 1);
    assert_eq!(pair.sides[1].completed(), [(9, Status::Success)]);
}

#[test]
fn send__psns_count_on() {
    let mut pair = datagrams();
    let psns = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let seen = psns.clone();
    pair.deliver = Box::new(move |_, bytes| {
        seen.borrow_mut()
            .push(u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]));
        true
    });
    for _ in 0..3 {
        let to = to_peer(&pair);
        send(&mut pair, to, 1);
    }
    assert_eq!(*psns.borrow(), [PSN, PSN + 1, PSN + 2]);
}

#[test]
fn receive__wrong_qkey_is_dropped_and_counted() {
    let mut pair = datagrams();
    pair.recv(1, 9, 0, 100);
    let Target::Datagram { path, qpn, .. } = to_peer(&pair) else {
        unreachable!()
    };
    send(
        &mut pair,
        Target::Datagram {
            path,
            qpn,
            qkey: QKEY ^ 1,
        },
        1,
    );
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    assert_eq!(pair.sides[1].completed(), []);
    assert_eq!(pair.sides[1].rnic.counters().bad_qkey, 1);
    let to = to_peer(&pair);
    send(&mut pair, to, 1);
    assert_eq!(
        pair.sides[1].completed(),
        [(9, Status::Success)],
        "the receive is still there"
    );
}

#[test]
fn receive__none_posted_is_dropped_and_counted() {
    let mut pair = datagrams();
    let to = to_peer(&pair);
    send(&mut pair, to, 1);
    assert_eq!(pair.sides[1].rnic.counters().resources_dropped, 1);
    assert_eq!(
        (pair.sides[1].completed(), pair.sides[1].state()),
        (vec![], QpState::Rts)
    );
}

#[test]
fn receive__too_short_drops_the_datagram_and_is_kept() {
    for length in [0, 39, 40 + 99] {
        let mut pair = datagrams();
        pair.recv(1, 1, 0, length);
        pair.recv(1, 2, 4096, 2000);
        let to = to_peer(&pair);
        send(&mut pair, to, 100);
        assert_eq!(pair.sides[1].completed(), [], "{length} bytes");
        assert_eq!(pair.sides[1].state(), QpState::Rts);
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
        assert_eq!(pair.sides[1].rnic.counters().dropped_messages, 1);
    }
    let mut pair = datagrams();
    pair.recv(1, 1, 0, 40 + 99);
    let to = to_peer(&pair);
    send(&mut pair, to, 100);
    send(&mut pair, to, 99);
    assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
}

#[test]
fn receive__memory_that_is_not_there_ends_the_qp() {
    let mut pair = datagrams();
    let sge = Sge::new(IOVA, 1000, LKey(0x55));
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    let request = RecvRequest {
        wr_id: 1,
        sges: sge.into(),
    };
    pair.sides[1].rnic.post_recv(now, qpn, request).unwrap();
    let to = to_peer(&pair);
    send(&mut pair, to, 100);
    assert_eq!(pair.sides[1].completed(), [(1, Status::LocalProtection)]);
    assert_eq!(pair.sides[1].state(), QpState::Error);
}

#[test]
fn receive__from_a_shared_receive_queue() {
    let mut pair = datagrams();
    let side = &mut pair.sides[1];
    let srq = side.rnic.create_srq(SrqInit {
        pd: side.pd,
        max_wr: 4,
        xrc: None,
    });
    let init = QpInit {
        qp_type: QpType::Ud,
        srq,
        ..QpInit::new(side.pd, side.cq)
    };
    side.qpn = side.rnic.create_qp(init).unwrap();
    let sges = side.sge(0, 100);
    side.rnic
        .post_srq_recv(srq.unwrap(), RecvRequest { wr_id: 5, sges })
        .unwrap();
    pair.ready_datagram(1, pair.sides[1].qpn, QKEY);
    let to = to_peer(&pair);
    send(&mut pair, to, 60);
    assert_eq!(pair.sides[1].completed(), [(5, Status::Success)]);
}

#[test]
fn receive__states_that_take_no_datagram() {
    for to in [QpState::Reset, QpState::Init, QpState::Error] {
        let mut pair = datagrams();
        pair.sides[1].qpn = pair.create_qp(1, QpType::Ud);
        let init = QpAttributes {
            qkey: Some(QKEY),
            ..Default::default()
        };
        if to != QpState::Reset {
            pair.modify(1, QpState::Init, &init);
        }
        if to == QpState::Error {
            pair.modify(1, to, &QpAttributes::default());
        }
        let target = to_peer(&pair);
        send(&mut pair, target, 1);
        assert_eq!(pair.sides[1].rnic.counters().wrong_state, 1, "{to:?}");
    }
}

#[test]
fn receive__other_transports_are_dropped() {
    let mut pair = datagrams();
    let Target::Datagram { path, qkey, .. } = to_peer(&pair) else {
        unreachable!()
    };
    let (_, rc) = pair.second_qps();
    send(&mut pair, Target::Datagram { path, qpn: rc, qkey }, 1);
    assert_eq!(pair.sides[1].rnic.counters().no_qp, 1);
}

#[test]
fn post_send__refusals() {
    let mut pair = datagrams();
    let sges = pair.sides[0].sge(0, 8);
    let (rkey, va) = (pair.sides[1].rkey, IOVA);
    let bind = Bind {
        window: rkey,
        region: pair.sides[0].lkey,
        va,
        length: 1,
        access: Access::REMOTE_READ,
    };
    let operations = [
        Operation::SendInvalidate { rkey },
        Operation::Write { va, rkey, imm: None },
        Operation::Read { va, rkey },
        Operation::CompareSwap {
            va,
            rkey,
            compare: 0,
            swap: 0,
        },
        Operation::FetchAdd { va, rkey, add: 1 },
        Operation::AtomicWrite { va, rkey },
        Operation::Bind(bind),
        Operation::LocalInvalidate { rkey },
    ];
    let to = to_peer(&pair);
    for operation in operations {
        let refused = pair.try_post(0, to, operation.clone(), sges.clone());
        assert_eq!(refused, Err(PostError::Invalid), "{operation:?}");
    }
    let Target::Datagram { path, qpn, qkey } = to else {
        unreachable!()
    };
    let group = IpAddr::from([224, 1, 2, 3]);
    let targets = [
        Target::Connected,
        Target::Srq(Srqn(1)),
        Target::Datagram {
            path: Path {
                dst: [0xfd00, 0, 0, 0, 0, 0, 0, 1].into(),
                ..path
            },
            qpn,
            qkey,
        },
        // A group address without the multicast QPN, and vice versa.
        Target::Datagram {
            path: Path { dst: group, ..path },
            qpn,
            qkey,
        },
        Target::Datagram {
            path,
            qpn: Qpn::MULTICAST,
            qkey,
        },
        Target::Datagram {
            path: Path {
                dst: [0, 0, 0, 0].into(),
                ..path
            },
            qpn,
            qkey,
        },
    ];
    let send = Operation::Send { imm: None };
    for to in targets {
        let refused = pair.try_post(0, to, send.clone(), sges.clone());
        assert_eq!(refused, Err(PostError::Invalid), "{to:?}");
    }
    let long = pair.sides[0].sge(0, 1025);
    assert_eq!(pair.try_post(0, to, send.clone(), long), Err(PostError::TooLong));
    let fits = pair.sides[0].sge(0, 1024);
    assert_eq!(pair.try_post(0, to, send, fits), Ok(()));
}

#[test]
fn post_send__a_connected_qp_takes_no_datagram() {
    for mut pair in [Pair::new(), Pair::uc()] {
        let (to, sges) = (to_peer(&pair), pair.sides[0].sge(0, 8));
        let refused = pair.try_post(0, to, Operation::Send { imm: None }, sges);
        assert_eq!(refused, Err(PostError::Invalid));
    }
}

#[test]
fn sqe__flushes_sends_takes_receives_and_ends_by_modify() {
    let mut pair = datagrams();
    pair.recv(0, 3, 0, 200);
    let to = to_peer(&pair);
    let bad: SgeList = Sge::new(IOVA, 10, LKey(0x55)).into();
    let send = Operation::Send { imm: None };
    let good = pair.sides[0].sge(0, 10);
    for sges in [good.clone(), bad, good.clone()] {
        pair.try_post(0, to, send.clone(), sges).unwrap();
    }
    pair.run();
    assert_eq!(
        pair.sides[0].completed(),
        [
            (7, Status::Success),
            (7, Status::LocalProtection),
            (7, Status::Flushed)
        ]
    );
    assert_eq!(pair.sides[0].state(), QpState::Sqe);
    pair.try_post(0, to, send.clone(), good.clone()).unwrap();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Flushed)]);
    // Receives continue.
    let back = Target::Datagram {
        path: pair.path(1, pair.sides[0].address),
        qpn: pair.sides[0].qpn,
        qkey: QKEY,
    };
    let request = SendRequest {
        wr_id: 8,
        operation: send.clone(),
        sges: pair.sides[1].sge(0, 10),
        flags: SendFlags::empty(),
        to: back,
    };
    let (now, peer) = (pair.now, pair.sides[1].qpn);
    pair.sides[1].rnic.post_send(now, peer, request).unwrap();
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(3, Status::Success)]);

    pair.modify(0, QpState::Rts, &QpAttributes::default());
    pair.recv(1, 9, 0, 200);
    pair.try_post(0, to, send, good).unwrap();
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    assert_eq!(pair.sides[1].completed(), [(9, Status::Success)]);
}

#[test]
fn sqd__holds_sends_back_and_tells_at_once() {
    let mut pair = datagrams();
    let (qpn, none) = (pair.sides[0].qpn, QpAttributes::default());
    pair.recv(1, 9, 0, 200);
    pair.modify(0, QpState::Sqd, &none);
    let events: Vec<Event> = std::iter::from_fn(|| pair.sides[0].rnic.poll_event()).collect();
    assert_eq!(events, [Event::SqDrained(qpn)]);
    let to = to_peer(&pair);
    send(&mut pair, to, 10);
    assert_eq!(
        (pair.sides[0].completed(), pair.sides[1].completed()),
        (vec![], vec![])
    );
    pair.modify(0, QpState::Rts, &none);
    pair.run();
    assert_eq!(pair.sides[1].completed(), [(9, Status::Success)]);
}

#[test]
fn error__flushes_sends_and_receives_in_order() {
    let mut pair = datagrams();
    pair.recv(0, 1, 0, 100);
    pair.recv(0, 2, 0, 100);
    let to = to_peer(&pair);
    let sges = pair.sides[0].sge(0, 10);
    pair.try_post(0, to, Operation::Send { imm: None }, sges).unwrap();
    pair.modify(0, QpState::Error, &QpAttributes::default());
    let flushed = |wr_id| (wr_id, Status::Flushed);
    assert_eq!(pair.sides[0].completed(), [flushed(7), flushed(1), flushed(2)]);
    pair.recv(0, 3, 0, 100);
    assert_eq!(pair.sides[0].completed(), [flushed(3)]);
}

// Multicast.

fn group() -> IpAddr {
    [239, 1, 2, 3].into()
}

#[test]
fn multicast__every_attached_qp_gets_a_copy_the_senders_too() {
    let mut pair = datagrams();
    let second = pair.ud_qp(1, QKEY);
    let stranger = pair.ud_qp(1, QKEY);
    let sender = pair.sides[0].qpn;
    for (i, qpn, wr_id) in [
        (0, sender, 1),
        (1, pair.sides[1].qpn, 2),
        (1, second, 3),
        (1, stranger, 4),
    ] {
        pair.recv_at(i, qpn, wr_id, 4096 * wr_id, 200);
        if qpn != stranger {
            pair.sides[i].rnic.attach_mcast(qpn, group()).unwrap();
        }
    }
    // A second attach changes nothing.
    pair.sides[1].rnic.attach_mcast(second, group()).unwrap();
    let to = to_group(&pair, group());
    send(&mut pair, to, 100);
    assert_eq!(
        pair.sides[0].completed(),
        [(7, Status::Success), (1, Status::Success)]
    );
    assert_eq!(
        pair.sides[1].completed(),
        [(2, Status::Success), (3, Status::Success)]
    );
    pair.sides[1].memory.with(|m| {
        for at in [8192, 12288] {
            assert_eq!(
                m[at + 36..at + 40],
                [239, 1, 2, 3],
                "the group's address is the destination"
            );
            assert_eq!(m[at + 40 + 50], 150);
        }
    });
}

#[test]
fn multicast__detached_qps_get_nothing() {
    let mut pair = datagrams();
    let rnic = &mut pair.sides[1].rnic;
    rnic.attach_mcast(pair.sides[1].qpn, group()).unwrap();
    rnic.detach_mcast(pair.sides[1].qpn, group()).unwrap();
    assert_eq!(
        rnic.detach_mcast(pair.sides[1].qpn, group()),
        Err(McastError::NotAttached)
    );
    assert!(!rnic.has_mcast_group(group()));
    pair.recv(1, 9, 0, 100);
    let to = to_group(&pair, group());
    send(&mut pair, to, 10);
    assert_eq!(pair.sides[1].completed(), []);
    assert_eq!(pair.sides[1].rnic.counters().no_qp, 1);
}

#[test]
fn multicast__a_destroyed_qp_is_detached() {
    let mut pair = datagrams();
    let (first, second) = (pair.sides[1].qpn, pair.ud_qp(1, QKEY));
    let rnic = &mut pair.sides[1].rnic;
    rnic.attach_mcast(first, group()).unwrap();
    rnic.attach_mcast(second, group()).unwrap();
    rnic.destroy_qp(first);
    assert!(rnic.has_mcast_group(group()), "the other QP is attached");
    rnic.destroy_qp(second);
    assert!(!rnic.has_mcast_group(group()));
}

#[test]
fn multicast__qkey_and_receives_are_each_qps_own() {
    let mut pair = datagrams();
    let other_key = pair.ud_qp(1, QKEY + 1);
    for qpn in [pair.sides[1].qpn, other_key] {
        pair.sides[1].rnic.attach_mcast(qpn, group()).unwrap();
    }
    pair.recv_at(1, other_key, 5, 0, 100);
    let to = to_group(&pair, group());
    send(&mut pair, to, 10);
    let counters = pair.sides[1].rnic.counters();
    assert_eq!((counters.bad_qkey, counters.resources_dropped), (1, 1));
    assert_eq!(pair.sides[1].completed(), []);
}

#[test]
fn multicast__both_address_and_qpn_must_say_so() {
    // A packet to a QP with a group's address, and a packet to the multicast QPN with the device's address.
    let mut pair = datagrams();
    pair.recv(1, 9, 0, 100);
    let rnic = &mut pair.sides[1].rnic;
    rnic.attach_mcast(pair.sides[1].qpn, group()).unwrap();
    for (dst, qpn) in [
        (group(), pair.sides[1].qpn),
        (pair.sides[1].address, Qpn::MULTICAST),
    ] {
        let path = pair.path(0, dst);
        let mut packet = vec![0x64, 0x40, 0xff, 0xff, 0];
        packet.extend_from_slice(&qpn.value().to_be_bytes()[1..]);
        packet.extend_from_slice(&[0, 0, 0, 1]);
        packet.extend_from_slice(&QKEY.to_be_bytes());
        packet.extend_from_slice(&[0, 0, 0, 77]);
        let icrc = path.flow().icrc(&packet, 0);
        packet.extend_from_slice(&icrc.to_le_bytes());
        let arrival = Arrival {
            src: path.src,
            src_port: path.src_port,
            dst,
            traffic_class: 0,
            bytes: &packet,
            segment_bytes: packet.len(),
            local: false,
        };
        pair.sides[1].rnic.handle_arrival(pair.now, &arrival);
    }
    assert_eq!(pair.sides[1].completed(), []);
    assert_eq!(pair.sides[1].rnic.counters().no_qp, 2);
}

#[test]
fn attach_mcast__refusals() {
    let mut pair = datagrams();
    let ud = pair.sides[0].qpn;
    let [rc, uc] = [QpType::Rc, QpType::Uc].map(|qp_type| pair.create_qp(0, qp_type));
    let rnic = &mut pair.sides[0].rnic;
    assert_eq!(rnic.attach_mcast(rc, group()), Err(McastError::NotUd));
    assert_eq!(rnic.attach_mcast(uc, group()), Err(McastError::NotUd));
    assert_eq!(rnic.attach_mcast(Qpn::new(5), group()), Err(McastError::NoQp));
    for bad in ["10.0.0.2", "0.0.0.0", "255.255.255.255", "ff0e::1", "::1"] {
        let refused = rnic.attach_mcast(ud, bad.parse().unwrap());
        assert_eq!(refused, Err(McastError::BadAddress), "{bad}");
    }
    // An IPv4 group in the form of a GID.
    rnic.attach_mcast(ud, "::ffff:239.1.2.3".parse().unwrap())
        .unwrap();
    assert!(rnic.has_mcast_group(group()));
    for n in 1..MCAST_GROUPS_MAX as u32 {
        rnic.attach_mcast(ud, IpAddr::from((0xe100_0000 + n).to_be_bytes()))
            .unwrap();
    }
    let one_more = rnic.attach_mcast(ud, [226, 0, 0, 0].into());
    assert_eq!(one_more, Err(McastError::TooManyGroups));
    for n in 1..=MCAST_QPS_MAX {
        let qpn = pair.create_qp(0, QpType::Ud);
        let result = pair.sides[0].rnic.attach_mcast(qpn, group());
        let expected = if n < MCAST_QPS_MAX {
            Ok(())
        } else {
            Err(McastError::TooManyQps)
        };
        assert_eq!(result, expected, "QP {n}");
    }
}
