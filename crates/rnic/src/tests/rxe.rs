//! Differences of Linux's rxe and librdmacm from the specification, and how this implementation deals with them.

use std::cell::Cell;
use std::rc::Rc;

use rdmux_wire::cm::CmMessage;
use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{Opcode, Operation as Op};

use super::util::*;
use crate::cm::{CmEvent, Endpoint};
use crate::*;

/// Returns whether the ICRC of a FLUSH is that of rxe (else it is the standard one); `None` for other packets.
fn flush_of_rxe(packet: &[u8]) -> Option<bool> {
    let (covered, icrc) = packet.split_last_chunk().unwrap();
    let flow = Flow {
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
        src_port: 0xc001,
        dst_port: 4791,
    };
    if covered[0] != Opcode::rc(Op::Flush).code() {
        return None;
    }
    let icrc = u32::from_le_bytes(*icrc);
    let of_rxe = flow.rxe_flush_icrc(covered, 0) == icrc;
    assert!(of_rxe || flow.icrc(covered, 0) == icrc, "neither");
    Some(of_rxe)
}

/// Returns a pair whose side 1 accepts FLUSHes with only one of the ICRCs, and a count of the FLUSHes sent to it.
fn pair(takes_of_rxe: bool) -> (Pair, Rc<Cell<u32>>) {
    let mut pair = Pair::with(|rtr, _| rtr.peer_is_rdmux = Some(false));
    pair.disable_trains();
    let sent = Rc::new(Cell::new(0));
    let count = sent.clone();
    pair.deliver = Box::new(move |to, packet| match flush_of_rxe(packet).filter(|_| to == 1) {
        Some(of_rxe) => {
            count.set(count.get() + 1);
            of_rxe == takes_of_rxe
        }
        None => true,
    });
    (pair, sent)
}

fn flush(pair: &mut Pair) {
    let rkey = pair.sides[1].rkey;
    let operation = Operation::Flush {
        va: IOVA,
        rkey,
        length: 64,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    pair.post(0, operation, SgeList::EMPTY);
}

fn flush_and_count(pair: &mut Pair, sent: &Cell<u32>) -> u32 {
    sent.set(0);
    flush(pair);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::Success);
    sent.get()
}

#[test]
fn flush__towards_rxe_costs_one_resend_at_first() {
    let (mut pair, sent) = pair(true);
    assert_eq!(flush_and_count(&mut pair, &sent), 2);
    assert_eq!(flush_and_count(&mut pair, &sent), 1);
    assert_eq!(pair.sides[1].rnic.counters().rxe_flush_icrc, 2);
}

#[test]
fn flush__towards_rxe_with_writes_behind_it() {
    let (mut pair, _) = pair(true);
    flush(&mut pair);
    pair.write(0, 0, 5_000);
    flush(&mut pair);
    pair.run();
    let statuses: Vec<_> = pair.sides[0].completions().iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [Status::Success; 3]);
}

#[test]
fn flush__towards_the_specification_is_right_at_once_and_stays_so_after_a_loss() {
    let (mut pair, sent) = pair(false);
    assert_eq!(flush_and_count(&mut pair, &sent), 1);
    let lose = Rc::new(Cell::new(true));
    let mut deliver = std::mem::replace(&mut pair.deliver, Box::new(|_, _| true));
    pair.deliver = Box::new(move |to, packet| {
        let lost = flush_of_rxe(packet).is_some() && lose.replace(false);
        deliver(to, packet) && !lost
    });
    assert_eq!(flush_and_count(&mut pair, &sent), 2);
}

#[test]
fn flush__first_one_lost_towards_the_specification_tries_both() {
    let (mut pair, sent) = pair(false);
    let mut deliver = std::mem::replace(&mut pair.deliver, Box::new(|_, _| true));
    let mut lose = true;
    pair.deliver = Box::new(move |to, packet| deliver(to, packet) && !std::mem::take(&mut lose));
    assert_eq!(flush_and_count(&mut pair, &sent), 3);
    assert_eq!(flush_and_count(&mut pair, &sent), 1);
}

#[test]
fn flush__a_peer_that_sent_one_with_the_icrc_of_rxe_is_answered_in_kind() {
    let (mut pair, sent) = pair(true);
    assert_eq!(flush_and_count(&mut pair, &sent), 2);
    // Side 1 has learned the ICRC from the FLUSHes that it received.
    let first = Rc::new(Cell::new(None));
    let seen = first.clone();
    pair.deliver = Box::new(move |to, packet| {
        if to == 0 && packet[0] == Opcode::rc(Op::Flush).code() {
            let (covered, icrc) = packet.split_last_chunk().unwrap();
            let flow = Flow {
                src: [10, 0, 0, 2].into(),
                dst: [10, 0, 0, 1].into(),
                src_port: 0xc001,
                dst_port: 4791,
            };
            seen.set(Some(flow.rxe_flush_icrc(covered, 0) == u32::from_le_bytes(*icrc)));
        }
        true
    });
    let rkey = pair.sides[0].rkey;
    let operation = Operation::Flush {
        va: IOVA,
        rkey,
        length: 64,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    pair.post(1, operation, SgeList::EMPTY);
    pair.run();
    assert_eq!(pair.sides[1].completions()[0].status, Status::Success);
    assert_eq!(first.get(), Some(true));
}

#[test]
fn flush__with_the_icrc_of_rxe_is_dropped_from_a_peer_that_is_rdmux() {
    let mut pair = Pair::with(|rtr, _| rtr.peer_is_rdmux = Some(true));
    pair.deliver = Box::new(|_, packet| {
        if flush_of_rxe(packet) == Some(false) {
            let end = packet.len() - 4;
            let flow = Flow {
                src: [10, 0, 0, 1].into(),
                dst: [10, 0, 0, 2].into(),
                src_port: 0xc001,
                dst_port: 4791,
            };
            let icrc = flow.rxe_flush_icrc(&packet[..end], 0);
            packet[end..].copy_from_slice(&icrc.to_le_bytes());
        }
        true
    });
    flush(&mut pair);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::RetryExceeded);
    assert!(pair.sides[1].rnic.counters().rx_icrc_encapsulated > 0);
}

/// Connects and returns the ECE of the REP; the REQ arrives with or without ECE.
fn rep_ece(req_with_ece: bool) -> Option<rdmux_wire::cm::Ece> {
    let mut pair = Pair::new();
    let now = pair.now;
    let endpoint = Endpoint {
        transport: rdmux_wire::roce::Transport::Rc,
        srq: false,
        qpn: pair.sides[0].qpn,
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 7,
        retry_count: 7,
        ack_timeout: 14,
        path_mtu: rdmux_wire::roce::PathMtu::Bytes1024,
        traffic_class: 0,
        extensions: None,
        plain: false,
    };
    let service = rdmux_wire::cm::ServiceId::tcp(7174);
    let [a, b] = &mut pair.sides;
    b.rnic.cm().listen(service);
    let peer = [10, 0, 0, 2].into();
    a.rnic
        .cm()
        .connect(now, peer, service, None, &endpoint, &[])
        .unwrap();
    let (_, _, mut mad) = a.rnic.cm().poll_transmit().unwrap();
    let (tid, CmMessage::Req(mut req)) = CmMessage::parse(&mad[..]).unwrap() else {
        panic!("not a REQ")
    };
    assert!(req.ece.is_some());
    if !req_with_ece {
        req.ece = None;
    }
    CmMessage::Req(req).emit(tid, &mut mad);
    b.rnic.cm().handle_mad(now, [10, 0, 0, 1].into(), &mad[..]);
    let Some(CmEvent::Request { id, .. }) = b.rnic.cm().poll_event() else {
        panic!("no request")
    };
    b.rnic.cm().accept(now, id, &endpoint, &[]).unwrap();
    let (_, _, mad) = b.rnic.cm().poll_transmit().unwrap();
    let (_, CmMessage::Rep(rep)) = CmMessage::parse(&mad[..]).unwrap() else {
        panic!("not a REP")
    };
    rep.ece
}

#[test]
fn accept__a_rep_has_ece_only_if_the_req_had() {
    assert_eq!(
        rep_ece(true).map(|ece| ece.vendor),
        Some(rdmux_wire::cm::Extensions::VENDOR)
    );
    assert_eq!(rep_ece(false), None);
}
