//! Connections between two devices: side 0 is the active one.

use std::net::IpAddr;

use rdmux_wire::cm::{
    Answered, CmMessage, Dreq, IpAddressing, MAD_LEN, Mra, PrivateData, Rej, RejReason, Rep, Req, ServiceId,
    SidrReq, SidrStatus,
};
use rdmux_wire::roce::{Bth, Deth, PathMtu, Transport};

use super::util::*;
use crate::cm::{BACKLOG_MAX, CmError, CmEvent, CmId, Endpoint, OUT_MAX, RESTING_MAX};
use crate::*;

const SERVICE: ServiceId = ServiceId::tcp(7174);
const SECOND: u64 = 1_000_000_000;

fn endpoint(pair: &Pair, side: usize) -> Endpoint {
    Endpoint {
        transport: Transport::Rc,
        qpn: pair.sides[side].qpn,
        starting_psn: Psn::new(100 + side as u32),
        responder_resources: 3,
        initiator_depth: 5,
        rnr_retry_count: 7,
        retry_count: 6,
        srq: false,
        ack_timeout: 14,
        path_mtu: PathMtu::Bytes1024,
        traffic_class: 0,
        extensions: None,
        plain: false,
    }
}

fn address(pair: &Pair, side: usize) -> IpAddr {
    pair.sides[side].rnic.config().address
}

fn event(pair: &mut Pair, side: usize) -> Option<CmEvent> {
    pair.sides[side].rnic.cm().poll_event()
}

fn connections(pair: &mut Pair) -> [usize; 2] {
    [0, 1].map(|side| pair.sides[side].rnic.cm().len())
}

fn connect(pair: &mut Pair) -> CmId {
    let (local, peer, now) = (endpoint(pair, 0), address(pair, 1), pair.now);
    pair.sides[0]
        .rnic
        .cm()
        .connect(now, peer, SERVICE, None, &local, b"hello")
        .unwrap()
}

/// Runs a connection until side 1 has the request.
fn requested(pair: &mut Pair) -> (CmId, CmId) {
    pair.sides[1].rnic.cm().listen(SERVICE);
    let active = connect(pair);
    pair.step();
    let Some(CmEvent::Request { id, .. }) = event(pair, 1) else {
        panic!("no request came");
    };
    (active, id)
}

fn accept(pair: &mut Pair, id: CmId) {
    let (local, now) = (endpoint(pair, 1), pair.now);
    let accepted = pair.sides[1].rnic.cm().accept(now, id, &local, b"welcome");
    assert_eq!(accepted, Ok(()));
}

fn established(pair: &mut Pair) -> (CmId, CmId) {
    let (active, passive) = requested(pair);
    accept(pair, passive);
    pair.step();
    assert!(matches!(event(pair, 0), Some(CmEvent::Reply { .. })));
    pair.sides[0].rnic.cm().establish(active);
    pair.step();
    assert_eq!(event(pair, 1), Some(CmEvent::Established { id: passive }));
    (active, passive)
}

fn disconnect(pair: &mut Pair, side: usize, id: CmId) {
    let now = pair.now;
    pair.sides[side].rnic.cm().disconnect(now, id);
}

/// Returns the attribute id of a CM message; `None` for other packets.
fn attribute(bytes: &[u8]) -> Option<u8> {
    let mad = bytes.get(Bth::LEN + Deth::LEN..)?;
    (bytes[0] == 0x64 && mad.len() >= MAD_LEN).then(|| mad[17])
}

const REQ: u8 = 0x10;
const REP: u8 = 0x13;
const RTU: u8 = 0x14;
const DREQ: u8 = 0x15;
const DREP: u8 = 0x16;

/// Drops the first `n` messages of a kind.
fn lose(pair: &mut Pair, kind: u8, mut n: u32) {
    pair.deliver = Box::new(move |_, bytes| {
        if attribute(bytes) == Some(kind) && n > 0 {
            n -= 1;
            return false;
        }
        true
    });
}

#[test]
fn connect__tells_each_side_of_the_other_and_disconnects() {
    let mut pair = Pair::new();
    pair.sides[1].rnic.cm().listen(SERVICE);
    let active = connect(&mut pair);
    pair.step();
    let Some(CmEvent::Request {
        id: passive,
        service,
        peer,
        addressing,
        remote,
        private_data,
    }) = event(&mut pair, 1)
    else {
        panic!("no request came");
    };
    assert_eq!((service, peer, addressing), (SERVICE, address(&pair, 0), None));
    let told = endpoint(&pair, 0);
    assert_eq!(
        remote,
        Endpoint {
            extensions: remote.extensions,
            ..told
        }
    );
    assert_eq!(remote.extensions.unwrap().receive_window_log2, 18);
    assert!(remote.extensions.unwrap().selective);
    assert!(remote.extensions.unwrap().carried_acks);
    assert_eq!(private_data.len(), 92);
    assert_eq!(&private_data[..5], b"hello");

    accept(&mut pair, passive);
    pair.step();
    let Some(CmEvent::Reply {
        id,
        remote,
        private_data,
    }) = event(&mut pair, 0)
    else {
        panic!("no reply came");
    };
    assert_eq!(id, active);
    let told = endpoint(&pair, 1);
    assert_eq!(
        (remote.qpn, remote.starting_psn, remote.responder_resources),
        (told.qpn, told.starting_psn, 3)
    );
    assert_eq!((private_data.len(), &private_data[..7]), (196, &b"welcome"[..]));
    pair.sides[0].rnic.cm().establish(active);
    pair.step();
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Established { id: passive }));

    disconnect(&mut pair, 1, passive);
    pair.run();
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id: active }));
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn connect__carries_private_data_of_full_size_and_refuses_more() {
    let addressing = IpAddressing {
        src_port: 1234,
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
    };
    for (addressing, room) in [(None, 92), (Some(addressing), 56)] {
        let mut pair = Pair::new();
        pair.sides[1].rnic.cm().listen(SERVICE);
        let (local, peer, now) = (endpoint(&pair, 0), address(&pair, 1), pair.now);
        let data: Vec<u8> = (1..=room as u8).collect();
        let cm = pair.sides[0].rnic.cm();
        assert_eq!(
            cm.connect(now, peer, SERVICE, addressing, &local, &vec![1; room + 1]),
            Err(CmError::PrivateDataTooLong)
        );
        cm.connect(now, peer, SERVICE, addressing, &local, &data).unwrap();
        pair.step();
        let Some(CmEvent::Request {
            id,
            private_data,
            addressing: told,
            ..
        }) = event(&mut pair, 1)
        else {
            panic!("no request came");
        };
        assert_eq!((private_data, told), (data, addressing));
        let local = endpoint(&pair, 1);
        let now = pair.now;
        let cm = pair.sides[1].rnic.cm();
        let mut accept = |bytes| cm.accept(now, id, &local, &vec![1; bytes]);
        assert_eq!(accept(197), Err(CmError::PrivateDataTooLong));
        assert_eq!(accept(196), Ok(()));
        assert_eq!(accept(196), Err(CmError::NoSuchRequest));
        pair.step();
        assert!(
            matches!(event(&mut pair, 0), Some(CmEvent::Reply { private_data, .. }) if private_data == [1; 196])
        );
    }
}

#[test]
fn connect__to_a_service_that_nobody_offers_is_rejected() {
    let mut pair = Pair::new();
    let id = connect(&mut pair);
    pair.run();
    let Some(CmEvent::Rejected {
        id: rejected, reason, ..
    }) = event(&mut pair, 0)
    else {
        panic!("not rejected");
    };
    assert_eq!((rejected, reason), (id, RejReason::INVALID_SERVICE_ID));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn connect__to_silence_is_unreachable() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, _| false);
    let id = connect(&mut pair);
    pair.run();
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Unreachable { id }));
    assert_eq!(connections(&mut pair), [0, 0]);
    assert!(
        pair.now.0 > 8 * SECOND && pair.now.0 < 9 * SECOND,
        "{:?}",
        pair.now
    );
}

#[test]
fn reject__carries_reason_and_private_data() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    let now = pair.now;
    pair.sides[1]
        .rnic
        .cm()
        .reject(now, passive, RejReason::CONSUMER, &[7; 148]);
    pair.run();
    assert_eq!(
        event(&mut pair, 0),
        Some(CmEvent::Rejected {
            id: active,
            reason: RejReason::CONSUMER,
            ari: vec![],
            private_data: vec![7; 148],
        })
    );
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn reject__of_a_reply_ends_the_passive_side() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    accept(&mut pair, passive);
    pair.step();
    event(&mut pair, 0);
    // The rejection is lost: the repeated reply names no connection and is rejected for that reason.
    let mut lost = false;
    pair.deliver = Box::new(move |to, _| to == 0 || std::mem::replace(&mut lost, true));
    let now = pair.now;
    pair.sides[0]
        .rnic
        .cm()
        .reject(now, active, RejReason::CONSUMER, b"no");
    pair.run();
    assert!(
        matches!(event(&mut pair, 1), Some(CmEvent::Rejected { id, reason: RejReason::INVALID_COMM_ID, .. }) if id == passive)
    );
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn lost__messages_of_each_kind_come_again() {
    for kind in [REQ, REP, RTU, DREQ, DREP] {
        let mut pair = Pair::new();
        lose(&mut pair, kind, 3);
        pair.sides[1].rnic.cm().listen(SERVICE);
        let active = connect(&mut pair);
        let (mut seen, mut passive) = (Vec::new(), None);
        for _ in 0..400 {
            pair.pass(50_000_000);
            while let Some(event) = event(&mut pair, 1) {
                seen.push(format!("{event:?}").split(' ').next().unwrap().to_owned());
                match event {
                    CmEvent::Request { id, .. } => {
                        passive = Some(id);
                        accept(&mut pair, id);
                    }
                    CmEvent::Established { id } => disconnect(&mut pair, 1, id),
                    _ => {}
                }
            }
            while let Some(event) = event(&mut pair, 0) {
                seen.push(format!("{event:?}").split(' ').next().unwrap().to_owned());
                if let CmEvent::Reply { id, .. } = event {
                    assert_eq!(id, active);
                    pair.sides[0].rnic.cm().establish(id);
                }
            }
        }
        seen.sort();
        assert_eq!(
            seen,
            ["Disconnected", "Disconnected", "Established", "Reply", "Request"],
            "messages of kind {kind:#x} lost"
        );
        assert!(passive.is_some());
        assert_eq!(connections(&mut pair), [0, 0]);
    }
}

#[test]
fn duplicate__request_makes_one_connection_and_uses_up_no_tries() {
    let mut pair = Pair::new();
    let (_, passive) = requested(&mut pair);
    accept(&mut pair, passive);
    // The replies are lost while the peer keeps repeating its request.
    pair.deliver = Box::new(|to, _| to == 1);
    pair.pass(3 * SECOND);
    assert_eq!(event(&mut pair, 1), None, "neither a request nor the end of it");
    pair.deliver = Box::new(|_, _| true);
    pair.pass(4 * SECOND);
    assert!(matches!(event(&mut pair, 0), Some(CmEvent::Reply { .. })));
}

#[test]
fn duplicate__every_message_twice_changes_nothing() {
    let mut pair = Pair::new();
    let log = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let keep = log.clone();
    pair.deliver = Box::new(move |to, bytes| {
        keep.lock().unwrap().push((to, bytes.clone()));
        true
    });
    let again = |pair: &mut Pair| {
        for (to, bytes) in std::mem::take(&mut *log.lock().unwrap()) {
            let src = address(pair, 1 - to);
            let now = pair.now;
            pair.sides[to]
                .rnic
                .handle_datagram(now, src, 0xc000, &bytes, bytes.len());
        }
        pair.step();
        log.lock().unwrap().clear();
    };
    let (active, passive) = requested(&mut pair);
    again(&mut pair);
    accept(&mut pair, passive);
    pair.step();
    again(&mut pair);
    assert!(matches!(event(&mut pair, 0), Some(CmEvent::Reply { .. })));
    pair.sides[0].rnic.cm().establish(active);
    pair.step();
    again(&mut pair);
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Established { id: passive }));
    disconnect(&mut pair, 0, active);
    pair.step();
    pair.step();
    again(&mut pair);
    for side in [0, 1] {
        assert!(matches!(
            event(&mut pair, side),
            Some(CmEvent::Disconnected { .. })
        ));
        assert_eq!(event(&mut pair, side), None);
    }
    pair.run();
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn disconnect__from_both_sides_at_once_ends_once_each() {
    let mut pair = Pair::new();
    let (active, passive) = established(&mut pair);
    disconnect(&mut pair, 0, active);
    disconnect(&mut pair, 1, passive);
    pair.run();
    for (side, id) in [(0, active), (1, passive)] {
        assert_eq!(event(&mut pair, side), Some(CmEvent::Disconnected { id }));
        assert_eq!(event(&mut pair, side), None);
    }
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn peer_gone__ends_what_it_had_and_nothing_else() {
    let mut pair = Pair::new();
    let (active, passive) = established(&mut pair);
    let (now, own, peer) = (pair.now, address(&pair, 0), address(&pair, 1));
    let its = pair.sides[1].qpn;
    let gone = |pair: &mut Pair, at, had| {
        pair.sides[0].rnic.cm().peer_gone(now, at, |qpn| qpn == had);
        event(pair, 0)
    };
    assert_eq!(gone(&mut pair, own, its), None, "another address");
    assert_eq!(gone(&mut pair, peer, Qpn::new(7)), None, "another device's QP");
    assert_eq!(
        gone(&mut pair, peer, its),
        Some(CmEvent::Disconnected { id: active })
    );
    assert_eq!(gone(&mut pair, peer, its), None, "once");
    disconnect(&mut pair, 1, passive);
    pair.run();
    assert_eq!(event(&mut pair, 0), None);
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn peer_gone__before_the_connection_stands() {
    let mut pair = Pair::new();
    let (_, passive) = requested(&mut pair);
    let (now, active, its) = (pair.now, address(&pair, 0), pair.sides[0].qpn);
    pair.sides[1].rnic.cm().peer_gone(now, active, |qpn| qpn == its);
    assert_eq!(event(&mut pair, 1), None, "the user has not answered yet");
    accept(&mut pair, passive);
    pair.sides[1].rnic.cm().peer_gone(now, active, |qpn| qpn == its);
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
}

#[test]
fn disconnect__from_a_silent_peer_ends_all_the_same() {
    let mut pair = Pair::new();
    let (active, _) = established(&mut pair);
    pair.deliver = Box::new(|_, _| false);
    disconnect(&mut pair, 0, active);
    pair.run();
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id: active }));
}

#[test]
fn disconnect__while_the_request_is_decided_on_leaves_nothing() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    disconnect(&mut pair, 0, active);
    accept(&mut pair, passive);
    pair.run();
    assert!(matches!(event(&mut pair, 1), Some(CmEvent::Rejected { id, .. }) if id == passive));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn establish__on_data_before_the_last_message() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    accept(&mut pair, passive);
    pair.step();
    event(&mut pair, 0);
    lose(&mut pair, RTU, u32::MAX);
    pair.sides[0].rnic.cm().establish(active);
    pair.sides[1].rnic.cm().establish(passive);
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Established { id: passive }));
    pair.run();
    assert_eq!(event(&mut pair, 1), None);
    assert_eq!(connections(&mut pair), [1, 1]);
}

#[test]
fn stale__qp_of_a_peer_that_forgot_is_rejected_and_the_old_connection_ended() {
    let mut pair = Pair::new();
    let (active, passive) = established(&mut pair);
    pair.sides[0].rnic.cm().destroy(active);
    let again = connect(&mut pair);
    pair.run();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, reason: RejReason::STALE_CONNECTION, .. }) if id == again)
    );
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
    assert_eq!(connections(&mut pair), [0, 0]);
    // Both sides have forgotten the connection, so a new one succeeds.
    connect(&mut pair);
    pair.step();
    assert!(matches!(event(&mut pair, 1), Some(CmEvent::Request { .. })));
}

/// Returns the messages that side 0 has to send.
fn said(pair: &mut Pair) -> Vec<CmMessage> {
    let mut buf = TransmitBuf::new(1 << 20, false);
    let now = pair.now;
    while pair.sides[0].rnic.poll_transmit(now, &mut buf, true) {}
    let mads = buf.trains().iter().map(|train| {
        let bytes = &buf.bytes()[train.range.clone()];
        CmMessage::parse(&bytes[Bth::LEN + Deth::LEN..][..MAD_LEN])
            .unwrap()
            .1
    });
    mads.collect()
}

/// Returns a request to side 0, made from side 0's own pending request; each `n` makes a different one.
fn request_of(pair: &mut Pair, n: u32) -> Req {
    let said = said(pair);
    let Some(CmMessage::Req(sent)) = said.first() else {
        panic!("no request is to be sent: {said:?}");
    };
    numbered(sent, n)
}

fn numbered(sent: &Req, n: u32) -> Req {
    Req {
        local_comm_id: n,
        ca_guid: 77,
        qpn: Qpn::new(n),
        dst_gid: sent.src_gid,
        ..*sent
    }
}

/// Returns side 0 with a listener and a connection request of its own, and a request to it.
fn listening() -> (Pair, CmId, Req) {
    let mut pair = Pair::new();
    let id = connect(&mut pair);
    let req = request_of(&mut pair, 1);
    pair.sides[0].rnic.cm().listen(SERVICE);
    (pair, id, req)
}

fn rej(local_comm_id: u32, remote_comm_id: u32) -> CmMessage {
    CmMessage::Rej(Rej {
        local_comm_id,
        remote_comm_id,
        answered: Answered::Rep,
        reason: RejReason::CONSUMER,
        ari_len: 0,
        ari: [0; 72],
        private_data: PrivateData::default(),
    })
}

/// Delivers a MAD from side 1 to side 0.
fn mad(pair: &mut Pair, message: &CmMessage) {
    let mut mad = [0; MAD_LEN];
    message.emit(1, &mut mad);
    let (src, now) = (address(pair, 1), pair.now);
    pair.sides[0].rnic.cm().handle_mad(now, src, &mad);
}

#[test]
fn mra__makes_the_active_side_wait_as_long_as_it_says() {
    let mut pair = Pair::new();
    let mut requests = 0;
    let (count, counted) = std::sync::mpsc::channel();
    pair.deliver = Box::new(move |_, bytes| {
        requests += u32::from(attribute(bytes) == Some(REQ));
        let _ = count.send(requests);
        false
    });
    let id = connect(&mut pair);
    pair.step();
    let mra = Mra {
        local_comm_id: 99,
        remote_comm_id: id.0,
        answered: Answered::Req,
        service_timeout: 20,
        private_data: PrivateData::default(),
    };
    mad(&mut pair, &CmMessage::Mra(mra));
    pair.pass(4 * SECOND);
    assert_eq!(counted.try_iter().last(), Some(1), "4.3 s have not passed");
    pair.pass(SECOND / 2);
    assert!(counted.try_iter().last() > Some(1));
}

#[test]
fn mra__again_and_again_does_not_hold_the_active_side_for_ever() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, _| false);
    let id = connect(&mut pair);
    let mra = Mra {
        local_comm_id: 99,
        remote_comm_id: id.0,
        answered: Answered::Req,
        service_timeout: 20,
        private_data: PrivateData::default(),
    };
    let mut seconds = 0;
    let event = loop {
        mad(&mut pair, &CmMessage::Mra(mra));
        pair.pass(SECOND);
        seconds += 1;
        match event(&mut pair, 0) {
            None => assert!(seconds < 76, "the attempt goes on"),
            Some(event) => break event,
        }
    };
    assert_eq!(event, CmEvent::Unreachable { id });
    assert_eq!(seconds, 75);
}

#[test]
fn request__with_the_id_of_an_answered_one_is_another() {
    let (mut pair, _, req) = listening();
    let ask = |pair: &mut Pair, tid| {
        let mut bytes = [0; MAD_LEN];
        CmMessage::Req(req).emit(tid, &mut bytes);
        let (src, now) = (address(pair, 1), pair.now);
        pair.sides[0].rnic.cm().handle_mad(now, src, &bytes);
        event(pair, 0)
    };
    let Some(CmEvent::Request { id, .. }) = ask(&mut pair, 1) else {
        panic!("no request came");
    };
    let now = pair.now;
    pair.sides[0].rnic.cm().reject(now, id, RejReason::CONSUMER, &[]);
    assert_eq!(ask(&mut pair, 1), None, "the same one gets the same answer");
    assert!(matches!(ask(&mut pair, 2), Some(CmEvent::Request { .. })));
}

#[test]
fn unknown__messages_make_no_connection_and_no_event() {
    let mut pair = Pair::new();
    let id = connect(&mut pair);
    for remote_comm_id in [0, id.0 ^ 1, u32::MAX] {
        let rtu = rdmux_wire::cm::Rtu {
            local_comm_id: 1,
            remote_comm_id,
            private_data: PrivateData::default(),
        };
        mad(&mut pair, &CmMessage::Rtu(rtu));
        let dreq = Dreq {
            local_comm_id: 1,
            remote_comm_id,
            remote_qpn: Qpn::new(5),
            private_data: PrivateData::default(),
        };
        mad(&mut pair, &CmMessage::Dreq(dreq));
    }
    assert_eq!(event(&mut pair, 0), None);
    assert_eq!(pair.sides[0].rnic.cm().len(), 1);
}

#[test]
fn request__of_a_nameless_peer_does_not_end_what_is_being_made() {
    // Before the answer arrives, a connection has a remote QPN and GUID of zero.
    let mut pair = Pair::new();
    let id = connect(&mut pair);
    pair.sides[0].rnic.cm().listen(SERVICE);
    let mut seen = None;
    let req = Req {
        ca_guid: 0,
        qpn: Qpn::new(0),
        ..request_of(&mut pair, 1)
    };
    mad(&mut pair, &CmMessage::Req(req));
    while let Some(event) = event(&mut pair, 0) {
        seen = Some(event);
    }
    assert!(matches!(seen, Some(CmEvent::Request { .. })));
    assert_eq!(pair.sides[0].rnic.cm().len(), 2);
    disconnect(&mut pair, 0, id);
    assert_eq!(pair.sides[0].rnic.cm().len(), 1);
}

#[test]
fn reply__that_nobody_waits_for_is_rejected() {
    let mut pair = Pair::new();
    let rep = Rep {
        local_comm_id: 42,
        remote_comm_id: 43,
        ece: None,
        qkey: 0,
        qpn: Qpn::new(9),
        eecn: 0,
        starting_psn: Psn::new(0),
        responder_resources: 1,
        initiator_depth: 1,
        target_ack_delay: 0,
        failover: 0,
        flow_control: false,
        rnr_retry_count: 0,
        srq: false,
        ca_guid: 1,
        private_data: PrivateData::default(),
    };
    mad(&mut pair, &CmMessage::Rep(rep));
    let mut buf = TransmitBuf::new(1 << 16, false);
    let now = pair.now;
    pair.sides[0].rnic.poll_transmit(now, &mut buf, true);
    let (_, message) = CmMessage::parse(&buf.bytes()[Bth::LEN + Deth::LEN..][..MAD_LEN]).unwrap();
    assert!(
        matches!(message, CmMessage::Rej(rej) if rej.reason == RejReason::INVALID_COMM_ID && rej.remote_comm_id == 42)
    );
}

#[test]
fn out__of_a_flood_that_cannot_be_answered_is_bounded() {
    let mut pair = Pair::new();
    for local_comm_id in 0..2 * OUT_MAX as u32 {
        let dreq = Dreq {
            local_comm_id,
            remote_comm_id: 1,
            remote_qpn: Qpn::new(5),
            private_data: PrivateData::default(),
        };
        mad(&mut pair, &CmMessage::Dreq(dreq));
    }
    assert_eq!(said(&mut pair).len(), OUT_MAX);
}

#[test]
fn backlog__takes_so_many_requests_and_again_as_many_as_are_decided_on() {
    let (mut pair, _, req) = listening();
    for n in 1..=BACKLOG_MAX as u32 + 10 {
        mad(&mut pair, &CmMessage::Req(numbered(&req, n)));
    }
    let ids: Vec<CmId> = std::iter::from_fn(|| event(&mut pair, 0))
        .map(|event| match event {
            CmEvent::Request { id, .. } => id,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ids.len(), BACKLOG_MAX);
    assert!(
        said(&mut pair).is_empty(),
        "what is too much is dropped in silence"
    );
    let (local, now) = (endpoint(&pair, 0), pair.now);
    let cm = pair.sides[0].rnic.cm();
    cm.accept(now, ids[0], &local, &[]).unwrap();
    cm.reject(now, ids[1], RejReason::CONSUMER, &[]);
    cm.destroy(ids[2]);
    for n in 1_000..1_010 {
        mad(&mut pair, &CmMessage::Req(numbered(&req, n)));
    }
    let taken = std::iter::from_fn(|| event(&mut pair, 0)).count();
    assert_eq!(taken, 3);
}

#[test]
fn request__that_nobody_decides_on_expires() {
    let mut pair = Pair::new();
    let (_, passive) = requested(&mut pair);
    pair.pass(59 * SECOND);
    assert_eq!(event(&mut pair, 1), None);
    pair.pass(2 * SECOND);
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn request__with_a_qp_that_is_known_to_a_service_that_is_not_is_rejected_as_that() {
    let mut pair = Pair::new();
    let (active, passive) = established(&mut pair);
    let now = pair.now;
    pair.sides[1].rnic.cm().unlisten(now, SERVICE);
    pair.sides[0].rnic.cm().destroy(active);
    let again = connect(&mut pair);
    pair.step();
    pair.step();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, reason: RejReason::INVALID_SERVICE_ID, .. }) if id == again)
    );
    assert_eq!(event(&mut pair, 1), None, "{passive:?} goes on");
}

#[test]
fn rejection__without_the_right_id_ends_nothing_once_the_peer_has_answered() {
    for wrong in [0, 99] {
        // States of the passive side: requested, replied to, established, being disconnected.
        let (mut pair, _, req) = listening();
        mad(&mut pair, &CmMessage::Req(req));
        let Some(CmEvent::Request { id, .. }) = event(&mut pair, 0) else {
            panic!("no request came");
        };
        let (local, now) = (endpoint(&pair, 0), pair.now);
        for step in 0..4 {
            mad(&mut pair, &rej(wrong, id.0));
            assert_eq!(event(&mut pair, 0), None, "step {step}, id {wrong}");
            let cm = pair.sides[0].rnic.cm();
            match step {
                0 => cm.accept(now, id, &local, &[]).unwrap(),
                1 => cm.establish(id),
                _ => cm.disconnect(now, id),
            }
            while pair.sides[0].rnic.cm().poll_event().is_some() {}
        }
        mad(&mut pair, &rej(1, id.0));
        assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id }));
    }
}

#[test]
fn rejection__of_a_request_may_come_under_any_id() {
    for local in [0, 99] {
        let (mut pair, id, _) = listening();
        mad(&mut pair, &rej(local, id.0));
        assert!(
            matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id: rejected, .. }) if rejected == id)
        );
    }
}

#[test]
fn ids__do_not_count_up() {
    let mut pair = Pair::new();
    let ids: Vec<u32> = (0..100).map(|_| connect(&mut pair).0).collect();
    assert!(ids.iter().all(|id| id >> 24 == 1));
    let near = ids.windows(2).filter(|w| w[0].abs_diff(w[1]) < 1_000).count();
    assert!(near < 5, "{ids:x?}");
}

#[test]
fn unlisten__rejects_what_is_not_decided_on() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    let now = pair.now;
    pair.sides[1].rnic.cm().unlisten(now, SERVICE);
    pair.step();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, reason: RejReason::INVALID_SERVICE_ID, .. }) if id == active)
    );
    assert_eq!(connections(&mut pair), [0, 0]);
    let (local, now) = (endpoint(&pair, 1), pair.now);
    let cm = pair.sides[1].rnic.cm();
    assert_eq!(cm.accept(now, passive, &local, &[]), Err(CmError::NoSuchRequest));
}

#[test]
fn unlisten__leaves_what_was_accepted() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    accept(&mut pair, passive);
    let now = pair.now;
    pair.sides[1].rnic.cm().unlisten(now, SERVICE);
    pair.step();
    assert!(matches!(event(&mut pair, 0), Some(CmEvent::Reply { id, .. }) if id == active));
}

#[test]
fn reject__cuts_off_private_data_that_is_too_long() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    let now = pair.now;
    let cm = pair.sides[1].rnic.cm();
    cm.reject(now, passive, RejReason::CONSUMER, &[7; 149]);
    pair.step();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, private_data, .. }) if id == active && private_data == [7; 148])
    );
}

/// Returns the attribute ids of the messages that side 0 has to send, and delivers none of them.
fn kinds(pair: &mut Pair) -> Vec<u16> {
    said(pair).iter().map(CmMessage::attribute).collect()
}

#[test]
fn mra__of_a_slow_user_comes_at_half_the_time_that_the_peer_gives() {
    let (mut pair, id, req) = listening();
    pair.sides[0].rnic.cm().destroy(id);
    let request = Req {
        remote_response_timeout: 18,
        ..req
    };
    mad(&mut pair, &CmMessage::Req(request));
    pair.now = pair.sides[0].rnic.poll_timeout().unwrap();
    assert_eq!(pair.now.0, 1 + (4_096 << 18) / 2);
    let now = pair.now;
    pair.sides[0].rnic.handle_timeout(now);
    let said = said(&mut pair);
    assert!(
        matches!(said[..], [CmMessage::Mra(mra)] if mra.answered == Answered::Req && mra.remote_comm_id == 1)
    );
}

#[test]
fn mra__lets_a_user_think_for_half_a_minute() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    pair.pass(30 * SECOND);
    assert_eq!(event(&mut pair, 0), None);
    accept(&mut pair, passive);
    pair.step();
    assert!(matches!(event(&mut pair, 0), Some(CmEvent::Reply { id, .. }) if id == active));
    pair.pass(30 * SECOND);
    assert_eq!(event(&mut pair, 1), None);
    pair.sides[0].rnic.cm().establish(active);
    pair.step();
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Established { id: passive }));
}

#[test]
fn accept__repeats_no_more_often_than_the_peer_allows() {
    for (max_cm_retries, sent) in [(0, 1), (2, 3), (15, 7)] {
        let (mut pair, id, req) = listening();
        pair.sides[0].rnic.cm().destroy(id);
        let request = Req {
            max_cm_retries,
            local_response_timeout: 19,
            ..req
        };
        mad(&mut pair, &CmMessage::Req(request));
        let Some(CmEvent::Request { id, .. }) = event(&mut pair, 0) else {
            panic!("no request came");
        };
        let (local, start) = (endpoint(&pair, 0), pair.now);
        let accepted = pair.sides[0].rnic.cm().accept(start, id, &local, &[]);
        assert_eq!(accepted, Ok(()));
        let mut seen = Vec::new();
        while event(&mut pair, 0).is_none() {
            seen.extend(kinds(&mut pair));
            pair.now = pair.sides[0].rnic.poll_timeout().unwrap();
            let now = pair.now;
            pair.sides[0].rnic.handle_timeout(now);
        }
        assert_eq!(seen, vec![u16::from(REP); sent]);
        let waited = pair.now.since_ns(start);
        assert!(
            waited >= 4_096 << 19,
            "{waited} ns are less than the peer may take"
        );
        assert_eq!(kinds(&mut pair), [0x12], "the peer hears that nobody waits");
    }
}

#[test]
fn disconnect__withdraws_a_request_before_it_is_decided_on() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    disconnect(&mut pair, 0, active);
    pair.step();
    assert!(
        matches!(event(&mut pair, 1), Some(CmEvent::Rejected { id, reason: RejReason::TIMEOUT, .. }) if id == passive)
    );
    let (local, now) = (endpoint(&pair, 1), pair.now);
    let cm = pair.sides[1].rnic.cm();
    assert_eq!(cm.accept(now, passive, &local, &[]), Err(CmError::NoSuchRequest));
    assert_eq!(event(&mut pair, 0), None);
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn reject__says_what_would_be_accepted() {
    let mut pair = Pair::new();
    let (active, passive) = requested(&mut pair);
    let now = pair.now;
    let cm = pair.sides[1].rnic.cm();
    cm.reject_with(now, passive, RejReason::INVALID_PATH_MTU, &[2], &[]);
    pair.step();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, ari, .. }) if id == active && ari == [2])
    );
    // A REQ with a foreign GID is rejected, and the rejection names our GID.
    let (mut pair, id, req) = listening();
    pair.sides[0].rnic.cm().destroy(id);
    let request = Req {
        dst_gid: std::net::Ipv6Addr::LOCALHOST,
        ..req
    };
    mad(&mut pair, &CmMessage::Req(request));
    let said = said(&mut pair);
    assert!(
        matches!(&said[..], [CmMessage::Rej(rej)] if rej.reason == RejReason::INVALID_GID
        && rej.ari[..usize::from(rej.ari_len)] == req.dst_gid.octets())
    );
}

#[test]
fn stale__qp_in_a_reply_is_rejected_and_the_old_connection_ended() {
    let mut pair = Pair::new();
    let (old, forgotten) = established(&mut pair);
    pair.sides[1].rnic.cm().destroy(forgotten);
    // A different own QP, so that the peer does not consider the request stale.
    let (peer, now) = (address(&pair, 1), pair.now);
    let local = Endpoint {
        qpn: Qpn::new(0x01_4321),
        ..endpoint(&pair, 0)
    };
    let cm = pair.sides[0].rnic.cm();
    let again = cm.connect(now, peer, SERVICE, None, &local, &[]).unwrap();
    pair.step();
    let Some(CmEvent::Request { id, .. }) = event(&mut pair, 1) else {
        panic!("no request came");
    };
    accept(&mut pair, id);
    pair.run();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::Rejected { id, reason: RejReason::STALE_CONNECTION, .. }) if id == again)
    );
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id: old }));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn time_wait__keeps_the_qpn_and_the_id() {
    let mut pair = Pair::new();
    let (active, _) = established(&mut pair);
    let qpn = pair.sides[0].qpn;
    disconnect(&mut pair, 0, active);
    pair.step();
    pair.step();
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id: active }));
    let cm = pair.sides[0].rnic.cm();
    assert_eq!((cm.len(), cm.resting(), cm.has_qpn(qpn)), (0, 1, true));
    let until = cm.next_deadline(active).unwrap();
    let rest = until.since_ns(pair.now);
    pair.pass(rest - 1);
    let cm = pair.sides[0].rnic.cm();
    assert_eq!((cm.next_deadline(active), cm.has_qpn(qpn)), (Some(until), true));
    pair.pass(1);
    let cm = pair.sides[0].rnic.cm();
    assert_eq!((cm.resting(), cm.has_qpn(qpn)), (0, false));
    assert_eq!(cm.next_deadline(active), None);
}

#[test]
fn disconnect__keeps_the_qpn_until_the_peer_has_agreed() {
    let mut pair = Pair::new();
    let (active, _) = established(&mut pair);
    let qpn = pair.sides[0].qpn;
    disconnect(&mut pair, 0, active);
    pair.sides[0].rnic.destroy_qp(qpn);
    assert!(pair.sides[0].rnic.cm().has_qpn(qpn));
    pair.run();
    assert!(!pair.sides[0].rnic.cm().has_qpn(qpn));
}

#[test]
fn time_wait__of_requests_does_not_end_that_of_connections() {
    let (mut pair, id, req) = listening();
    let qpn = pair.sides[0].qpn;
    disconnect(&mut pair, 0, id);
    for n in 1..=RESTING_MAX as u32 + 10 {
        mad(&mut pair, &CmMessage::Req(numbered(&req, n)));
        let Some(CmEvent::Request { id, .. }) = event(&mut pair, 0) else {
            panic!("request {n} was not told");
        };
        let now = pair.now;
        pair.sides[0].rnic.cm().reject(now, id, RejReason::CONSUMER, &[]);
    }
    let cm = pair.sides[0].rnic.cm();
    assert_eq!((cm.resting(), cm.has_qpn(qpn)), (RESTING_MAX + 1, true));
}

#[test]
fn time_wait__has_so_many_entries() {
    let mut pair = Pair::new();
    for _ in 0..RESTING_MAX + 10 {
        let id = connect(&mut pair);
        disconnect(&mut pair, 0, id);
    }
    let cm = pair.sides[0].rnic.cm();
    assert_eq!((cm.len(), cm.resting()), (0, RESTING_MAX));
    pair.pass(10 * SECOND);
    assert_eq!(pair.sides[0].rnic.cm().resting(), 0);
    assert_eq!(pair.sides[0].rnic.poll_timeout(), None);
}

#[test]
fn connect__tells_transport_and_shared_receive_queue() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Xrc] {
        let mut pair = Pair::new();
        pair.sides[1].rnic.cm().listen(SERVICE);
        let (peer, now) = (address(&pair, 1), pair.now);
        let of = |pair: &Pair, side| Endpoint {
            transport,
            srq: true,
            ..endpoint(pair, side)
        };
        let (local, answer) = (of(&pair, 0), of(&pair, 1));
        let cm = pair.sides[0].rnic.cm();
        cm.connect(now, peer, SERVICE, None, &local, &[]).unwrap();
        pair.step();
        let Some(CmEvent::Request { id, remote, .. }) = event(&mut pair, 1) else {
            panic!("no request came");
        };
        assert_eq!(
            (remote.transport, remote.srq, remote.qpn),
            (transport, true, local.qpn)
        );
        pair.sides[1].rnic.cm().accept(now, id, &answer, &[]).unwrap();
        pair.step();
        let Some(CmEvent::Reply { remote, .. }) = event(&mut pair, 0) else {
            panic!("no reply came");
        };
        assert_eq!(
            (remote.transport, remote.srq, remote.qpn),
            (transport, true, answer.qpn)
        );
    }
    let mut pair = Pair::new();
    let (peer, now) = (address(&pair, 1), pair.now);
    let local = Endpoint {
        transport: Transport::Ud,
        ..endpoint(&pair, 0)
    };
    let refused = pair.sides[0]
        .rnic
        .cm()
        .connect(now, peer, SERVICE, None, &local, &[]);
    assert_eq!(refused, Err(CmError::InvalidTransport));
}

const DATAGRAMS: ServiceId = ServiceId::udp(7174);

fn resolve(pair: &mut Pair) -> CmId {
    let (peer, now) = (address(pair, 1), pair.now);
    let resolved = pair.sides[0]
        .rnic
        .cm()
        .resolve(now, peer, DATAGRAMS, None, b"who");
    resolved.unwrap()
}

fn answer(pair: &mut Pair, id: CmId) {
    let (now, qpn) = (pair.now, Qpn::new(0x02_0042));
    let cm = pair.sides[1].rnic.cm();
    let answered = cm.answer(now, id, SidrStatus::VALID, qpn, 0x0123_4567, b"I");
    assert_eq!(answered, Ok(()));
}

/// Runs a resolution until side 1 has the request.
fn asked(pair: &mut Pair) -> (CmId, CmId) {
    pair.sides[1].rnic.cm().listen(DATAGRAMS);
    let id = resolve(pair);
    pair.step();
    let Some(CmEvent::SidrRequest { id: request, .. }) = event(pair, 1) else {
        panic!("no request came");
    };
    (id, request)
}

#[test]
fn resolve__tells_qpn_and_qkey() {
    let mut pair = Pair::new();
    let (id, request) = asked(&mut pair);
    answer(&mut pair, request);
    pair.step();
    let Some(CmEvent::SidrReply {
        id: answered,
        status,
        qpn,
        qkey,
        private_data,
    }) = event(&mut pair, 0)
    else {
        panic!("no answer came");
    };
    assert_eq!((answered, status), (id, SidrStatus::VALID));
    assert_eq!((qpn, qkey), (Qpn::new(0x02_0042), 0x0123_4567));
    assert_eq!((private_data.len(), private_data[0]), (136, b'I'));
    assert_eq!(connections(&mut pair), [0, 0]);
}

#[test]
fn resolve__carries_private_data_of_full_size_and_refuses_more() {
    let addressing = IpAddressing {
        src_port: 1234,
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
    };
    for (addressing, room) in [(None, 216), (Some(addressing), 180)] {
        let mut pair = Pair::new();
        pair.sides[1].rnic.cm().listen(DATAGRAMS);
        let (peer, now) = (address(&pair, 1), pair.now);
        let data: Vec<u8> = (1..=room as u8).collect();
        let cm = pair.sides[0].rnic.cm();
        assert_eq!(
            cm.resolve(now, peer, DATAGRAMS, addressing, &vec![1; room + 1]),
            Err(CmError::PrivateDataTooLong)
        );
        cm.resolve(now, peer, DATAGRAMS, addressing, &data).unwrap();
        pair.step();
        let Some(CmEvent::SidrRequest {
            id,
            service,
            addressing: told,
            private_data,
            ..
        }) = event(&mut pair, 1)
        else {
            panic!("no request came");
        };
        assert_eq!((service, told, private_data), (DATAGRAMS, addressing, data));
        let cm = pair.sides[1].rnic.cm();
        let mut answer = |n| cm.answer(now, id, SidrStatus::REJECT, Qpn::new(0), 0, &vec![1; n]);
        assert_eq!(answer(137), Err(CmError::PrivateDataTooLong));
        assert_eq!(answer(136), Ok(()));
        assert_eq!(answer(136), Err(CmError::NoSuchRequest));
        pair.step();
        assert!(
            matches!(event(&mut pair, 0), Some(CmEvent::SidrReply { status: SidrStatus::REJECT, private_data, .. }) if private_data == [1; 136])
        );
    }
}

#[test]
fn resolve__lost_messages_come_again_and_the_answer_is_remembered() {
    for kind in [0x17, 0x18] {
        let mut pair = Pair::new();
        lose(&mut pair, kind, 3);
        pair.sides[1].rnic.cm().listen(DATAGRAMS);
        let id = resolve(&mut pair);
        let (mut requests, mut replies) = (0, 0);
        for _ in 0..400 {
            pair.pass(10_000_000);
            while let Some(event) = event(&mut pair, 1) {
                if let CmEvent::SidrRequest { id, .. } = event {
                    requests += 1;
                    answer(&mut pair, id);
                }
            }
            while let Some(event) = event(&mut pair, 0) {
                assert!(matches!(event, CmEvent::SidrReply { id: answered, .. } if answered == id));
                replies += 1;
            }
        }
        assert_eq!((requests, replies), (1, 1), "messages of kind {kind:#x} lost");
    }
}

#[test]
fn resolve__of_a_service_that_nobody_offers_or_from_silence() {
    let mut pair = Pair::new();
    let id = resolve(&mut pair);
    pair.run();
    assert!(
        matches!(event(&mut pair, 0), Some(CmEvent::SidrReply { id: refused, status: SidrStatus::UNSUPPORTED, .. }) if refused == id)
    );
    pair.deliver = Box::new(|_, _| false);
    let id = resolve(&mut pair);
    pair.run();
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Unreachable { id }));
}

#[test]
fn resolve__takes_so_many_requests_and_again_as_many_as_are_answered() {
    let mut pair = Pair::new();
    pair.sides[0].rnic.cm().listen(DATAGRAMS);
    let ask = |pair: &mut Pair, request_id| {
        let req = SidrReq {
            request_id,
            pkey: 0xffff,
            service_id: DATAGRAMS,
            private_data: PrivateData::default(),
        };
        mad(pair, &CmMessage::SidrReq(req));
    };
    for n in 0..BACKLOG_MAX as u32 + 10 {
        ask(&mut pair, n);
    }
    let ids: Vec<_> = std::iter::from_fn(|| event(&mut pair, 0)).collect();
    assert_eq!(ids.len(), BACKLOG_MAX);
    assert!(said(&mut pair).is_empty());
    let CmEvent::SidrRequest { id, .. } = ids[0] else {
        panic!("{:?}", ids[0])
    };
    let now = pair.now;
    let cm = pair.sides[0].rnic.cm();
    cm.answer(now, id, SidrStatus::NO_QP, Qpn::new(0), 0, &[])
        .unwrap();
    ask(&mut pair, 1_000);
    ask(&mut pair, 1_001);
    assert_eq!(std::iter::from_fn(|| event(&mut pair, 0)).count(), 1);
}

#[test]
fn disconnect_orphan__ends_the_connection_of_a_device_that_has_gone() {
    let mut pair = Pair::new();
    let (active, passive) = established(&mut pair);
    let peering = pair.sides[0].rnic.cm().peering(active).unwrap();
    pair.sides[0].rnic.cm().destroy(active);
    lose(&mut pair, DREQ, 2);
    let now = pair.now;
    pair.sides[0].rnic.cm().disconnect_orphan(now, &peering);
    pair.sides[0].rnic.cm().disconnect_orphan(now, &peering);
    pair.run();
    assert_eq!(event(&mut pair, 1), Some(CmEvent::Disconnected { id: passive }));
    assert_eq!(event(&mut pair, 0), Some(CmEvent::Disconnected { id: active }));
    assert_eq!(event(&mut pair, 0), None);
    assert_eq!(connections(&mut pair), [0, 0]);
}
