//! Posting to work queues without the device.

use super::util::*;
use crate::*;

fn send(wr_id: u64) -> SendRequest {
    SendRequest {
        wr_id,
        operation: Operation::Send { imm: None },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

fn receive(wr_id: u64) -> RecvRequest {
    let sges = SgeList::EMPTY;
    RecvRequest { wr_id, sges }
}

/// Returns a connection whose queues hold 16 requests each.
fn small() -> (Pair, Qpn, Qpn) {
    let mut pair = Pair::new();
    let (a, b) = pair.second_qps();
    (pair, a, b)
}

#[test]
fn reserve__holds_no_more_than_the_queue_was_made_for() {
    let (mut pair, a, _) = small();
    let sends = pair.sides[0].rnic.send_queue(a).unwrap();
    for wr_id in 0..16 {
        assert!(sends.reserve(&send(wr_id)), "{wr_id}");
    }
    let now = pair.now;
    let rnic = &mut pair.sides[0].rnic;
    assert!(!sends.reserve(&send(16)));
    assert_eq!(rnic.post_send(now, a, send(16)), Err(PostError::QueueFull));
    rnic.post_reserved(now, a, send(0));
    assert_eq!(rnic.post_send(now, a, send(16)), Err(PostError::QueueFull));
}

#[test]
fn reserve__finds_room_when_requests_are_complete() {
    let (mut pair, a, b) = small();
    let sends = pair.sides[0].rnic.send_queue(a).unwrap();
    let receives = pair.sides[1].rnic.receive_queue(b).unwrap();
    for round in 0..4 {
        for wr_id in 0..16 {
            receives.post(receive(wr_id)).unwrap();
            assert!(sends.reserve(&send(wr_id)), "round {round}");
            pair.sides[0].rnic.post_reserved(pair.now, a, send(wr_id));
        }
        assert!(!sends.reserve(&send(16)), "round {round}");
        pair.run();
        for side in [0, 1] {
            let done: Vec<_> = (0..16).map(|wr_id| (wr_id, Status::Success)).collect();
            assert_eq!(pair.sides[side].completed(), done, "side {side}");
        }
    }
}

#[test]
fn reserve__leaves_to_the_device_what_it_may_refuse() {
    let (mut pair, a, _) = small();
    let rnic = &mut pair.sides[0].rnic;
    let sends = rnic.send_queue(a).unwrap();
    let datagram = SendRequest {
        to: Target::Srq(Srqn(1)),
        ..send(0)
    };
    let too_long = SendRequest {
        sges: SgeList::inline(&[0; INLINE_BYTES_MAX + 1]),
        ..send(0)
    };
    let (va, rkey) = (0, RKey(1));
    let read = SendRequest {
        operation: Operation::Read { va, rkey },
        ..send(0)
    };
    assert!(!sends.reserve(&datagram) && !sends.reserve(&too_long));
    assert!(sends.reserve(&read));
    for state in [QpState::Error, QpState::Reset, QpState::Init] {
        rnic.modify_qp(pair.now, a, state, &QpAttributes::default())
            .or_else(|_| {
                let attributes = QpAttributes {
                    access: Some(ALL_ACCESS),
                    ..Default::default()
                };
                rnic.modify_qp(pair.now, a, state, &attributes)
            })
            .unwrap();
        assert!(!sends.reserve(&send(0)), "{state:?}");
    }
    // A UD QP accepts no message longer than one packet.
    let ud = pair.ud_qp(0, 7);
    let sends = pair.sides[0].rnic.send_queue(ud).unwrap();
    let of = |length| SendRequest {
        sges: pair.sides[0].sge(0, length),
        to: Target::Datagram {
            path: pair.path(0, pair.sides[1].address),
            qpn: Qpn::new(5),
            qkey: 7,
        },
        ..send(0)
    };
    assert!(sends.reserve(&of(1024)) && !sends.reserve(&of(1025)));
}

#[test]
fn reserve__takes_no_read_where_none_may_be_under_way() {
    let mut pair = Pair::with(|_, rts| rts.max_rd_atomic = Some(0));
    let side = &mut pair.sides[0];
    let sends = side.rnic.send_queue(side.qpn).unwrap();
    let (va, rkey) = (IOVA, side.rkey);
    let read = SendRequest {
        operation: Operation::Read { va, rkey },
        ..send(0)
    };
    assert!(!sends.reserve(&read) && sends.reserve(&send(0)));
}

#[test]
fn post_reserved__to_a_qp_that_has_failed_is_flushed_behind_the_others() {
    let (mut pair, a, _) = small();
    let sends = pair.sides[0].rnic.send_queue(a).unwrap();
    assert!((1..=2).all(|wr_id| sends.reserve(&send(wr_id))));
    let now = pair.now;
    let side = &mut pair.sides[0];
    side.rnic.post_send(now, a, send(0)).unwrap();
    side.rnic
        .modify_qp(now, a, QpState::Error, &QpAttributes::default())
        .unwrap();
    for wr_id in 1..=2 {
        side.rnic.post_reserved(now, a, send(wr_id));
    }
    let flushed = (0..=2).map(|wr_id| (wr_id, Status::Flushed)).collect::<Vec<_>>();
    assert_eq!(side.completed(), flushed);
}

#[test]
fn post_reserved__that_is_flushed_gives_its_place_back() {
    for (mut pair, places) in [(Pair::new(), 1 << 12), (Pair::uc(), 128)] {
        let [qpn, peer] = [0, 1].map(|side| pair.sides[side].qpn);
        let sends = pair.sides[0].rnic.send_queue(qpn).unwrap();
        let reserve_all = || (0..5_000).filter(|wr_id| sends.reserve(&send(*wr_id))).count();
        assert_eq!(reserve_all(), places);
        pair.modify(0, QpState::Error, &QpAttributes::default());
        for wr_id in 0..places as u64 {
            pair.sides[0].rnic.post_reserved(pair.now, qpn, send(wr_id));
        }
        assert_eq!(pair.sides[0].completed().len(), places);
        pair.modify(0, QpState::Reset, &QpAttributes::default());
        pair.connect_qp(0, qpn, peer, &|_, _| {}, QpState::Rts);
        assert_eq!(reserve_all(), places);
    }
}

#[test]
fn post_reserved__to_a_qp_that_was_reset_is_forgotten_and_its_place_is_free() {
    let (mut pair, a, b) = small();
    let sends = pair.sides[0].rnic.send_queue(a).unwrap();
    let now = pair.now;
    pair.sides[0].rnic.post_send(now, a, send(0)).unwrap();
    assert!((1..16).all(|wr_id| sends.reserve(&send(wr_id))));
    let side = &mut pair.sides[0];
    side.rnic
        .modify_qp(now, a, QpState::Reset, &QpAttributes::default())
        .unwrap();
    for wr_id in 1..16 {
        side.rnic.post_reserved(now, a, send(wr_id));
    }
    assert_eq!(side.completed(), []);
    for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let attributes = pair.attributes(0, b, to);
        pair.sides[0].rnic.modify_qp(now, a, to, &attributes).unwrap();
    }
    assert!((0..16).all(|wr_id| sends.reserve(&send(wr_id))) && !sends.reserve(&send(16)));
}

#[test]
fn post_reserved__that_the_qp_takes_no_more_ends_it() {
    let (mut pair, a, _) = small();
    let now = pair.now;
    let (va, rkey) = (IOVA, pair.sides[1].rkey);
    let read = SendRequest {
        operation: Operation::Read { va, rkey },
        ..send(3)
    };
    let side = &mut pair.sides[0];
    let sends = side.rnic.send_queue(a).unwrap();
    assert!(sends.reserve(&read));
    side.rnic
        .modify_qp(now, a, QpState::Sqd, &QpAttributes::default())
        .unwrap();
    let none = QpAttributes {
        max_rd_atomic: Some(0),
        ..Default::default()
    };
    side.rnic.modify_qp(now, a, QpState::Sqd, &none).unwrap();
    side.rnic.post_reserved(now, a, read);
    assert_eq!(side.completed(), [(3, Status::LocalQpOperation)]);
    assert_eq!(side.rnic.query_qp(a).unwrap().state, QpState::Error);
}

#[test]
fn receive_queue__leaves_to_the_device_what_depends_on_the_state() {
    let (mut pair, a, _) = small();
    let now = pair.now;
    let rnic = &mut pair.sides[0].rnic;
    let receives = rnic.receive_queue(a).unwrap();
    for wr_id in 0..16 {
        receives.post(receive(wr_id)).unwrap();
    }
    let full = receives.post(receive(16));
    assert!(
        matches!(full, Err(NotPosted::Refused(PostError::QueueFull))),
        "{full:?}"
    );
    assert_eq!(rnic.query_qp(a).unwrap().recv_posted, 16);
    rnic.modify_qp(now, a, QpState::Error, &QpAttributes::default())
        .unwrap();
    let undecided = receives.post(receive(16));
    assert!(matches!(undecided, Err(NotPosted::Undecided(_))), "{undecided:?}");
    rnic.post_recv(now, a, receive(16)).unwrap();
    let flushed = (0..=16).map(|wr_id| (wr_id, Status::Flushed)).collect::<Vec<_>>();
    assert_eq!(pair.sides[0].completed(), flushed);
    let rnic = &mut pair.sides[0].rnic;
    rnic.modify_qp(now, a, QpState::Reset, &QpAttributes::default())
        .unwrap();
    assert!(matches!(receives.post(receive(0)), Err(NotPosted::Undecided(_))));
    assert_eq!(rnic.post_recv(now, a, receive(0)), Err(PostError::WrongState));
}
