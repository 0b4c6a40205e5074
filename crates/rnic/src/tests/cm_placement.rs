//! Two devices of one address listen for the same services, and a peer asks for them.

use std::net::IpAddr;

use rand_chacha::ChaCha12Rng;
use rand_core::SeedableRng;
use rdmux_wire::cm::{CmMessage, MAD_LEN, RejReason, ServiceId, SidrStatus};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use crate::cm::{Cm, CmEvent, CmId, ConnectionState, Endpoint, Request};
use crate::{Config, Time};

const OURS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const SERVICE: ServiceId = ServiceId::udp(7174);
const NOW: Time = Time(1);

fn device(address: IpAddr, slot: u8) -> Cm {
    let config = Config {
        address,
        slot,
        seed: [slot; 32],
        guid: slot.into(),
        gsi_src_port: 0xc000,
        receive_window_bytes: 1 << 18,
        traffic: crate::Traffic::default(),
        mtu: 1024,
    };
    Cm::new(&config, ChaCha12Rng::from_seed([slot; 32]))
}

/// The peer, and two devices of an address that listen.
fn devices() -> (Cm, [Cm; 2]) {
    let ours = [1, 2].map(|slot| {
        let mut cm = device(OURS, slot);
        cm.listen(SERVICE);
        cm.defer_requests();
        cm
    });
    (device(PEER, 3), ours)
}

fn endpoint(qpn: u32) -> Endpoint {
    Endpoint {
        transport: Transport::Rc,
        qpn: Qpn::new(qpn),
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 7,
        retry_count: 7,
        srq: false,
        ack_timeout: 14,
        path_mtu: PathMtu::Bytes1024,
        traffic_class: 0,
        extensions: None,
        plain: false,
    }
}

fn connect(peer: &mut Cm, qpn: u32) -> CmId {
    let local = endpoint(qpn);
    peer.connect(NOW, OURS, SERVICE, None, &local, b"hello").unwrap()
}

/// Takes the messages that a device sends.
fn sent(cm: &mut Cm) -> Vec<[u8; MAD_LEN]> {
    let mads = std::iter::from_fn(|| cm.poll_transmit());
    mads.map(|(_, _, mad)| *mad).collect()
}

/// Hands the peer's messages to a device, which leaves the requests to its user.
fn requests(peer: &mut Cm, to: &mut Cm) -> Vec<Request> {
    for mad in sent(peer) {
        to.handle_mad(NOW, PEER, &mad);
    }
    assert_eq!(to.poll_event(), None);
    to.take_deferred()
}

fn request(peer: &mut Cm, to: &mut Cm) -> Request {
    let requests: [Request; 1] = requests(peer, to).try_into().unwrap();
    requests[0]
}

fn handle(cm: &mut Cm, request: &Request) -> CmId {
    cm.handle_request(NOW, request);
    match cm.poll_event() {
        Some(CmEvent::Request { id, private_data, .. }) => {
            assert_eq!(&private_data[..5], b"hello");
            id
        }
        Some(CmEvent::SidrRequest { id, .. }) => id,
        other => panic!("{other:?}"),
    }
}

/// Lets the peer repeat its request; returns it.
fn repeated(peer: &mut Cm, to: &mut Cm) -> Request {
    peer.handle_timeout(peer.poll_timeout().unwrap());
    request(peer, to)
}

#[test]
fn request__is_left_to_the_user_and_handled_where_the_user_says() {
    let (mut peer, [mut first, mut second]) = devices();
    let active = connect(&mut peer, 7);
    let request = request(&mut peer, &mut first);
    assert_eq!(request.service(), SERVICE);
    assert!(!first.knows(&request) && !second.knows(&request));
    let id = handle(&mut second, &request);
    assert_eq!(id.0 >> 24, 2);
    second.accept(NOW, id, &endpoint(9), b"welcome").unwrap();
    for mad in sent(&mut second) {
        peer.handle_mad(NOW, OURS, &mad);
    }
    let Some(CmEvent::Reply { remote, .. }) = peer.poll_event() else {
        panic!("no reply")
    };
    assert_eq!(remote.qpn, Qpn::new(9));
    // The rest of the exchange is no request.
    peer.establish(active);
    for mad in sent(&mut peer) {
        second.handle_mad(NOW, PEER, &mad);
    }
    assert_eq!(second.poll_event(), Some(CmEvent::Established { id }));
}

#[test]
fn knows__a_repeated_request_until_its_answer_is_forgotten() {
    let (mut peer, [mut first, mut second]) = devices();
    connect(&mut peer, 7);
    let asked = request(&mut peer, &mut first);
    let id = handle(&mut second, &asked);
    let again = repeated(&mut peer, &mut first);
    assert!(second.knows(&again) && !first.knows(&again));
    // It makes no second connection.
    second.handle_request(NOW, &again);
    assert_eq!((second.poll_event(), second.len()), (None, 1));
    second.reject(NOW, id, RejReason::CONSUMER, &[]);
    sent(&mut second);
    // In TimeWait its answer is kept, also when nobody listens.
    second.unlisten(NOW, SERVICE);
    assert!(second.knows(&again) && !first.knows(&again));
    second.handle_request(NOW, &again);
    assert_eq!(sent(&mut second).len(), 1);
    second.handle_timeout(Time(u64::MAX / 2));
    assert!(!second.knows(&again));
}

#[test]
fn knows__the_qp_of_a_peer_that_forgot() {
    let (mut peer, [mut first, mut second]) = devices();
    connect(&mut peer, 7);
    let asked = request(&mut peer, &mut first);
    let id = handle(&mut second, &asked);
    second.accept(NOW, id, &endpoint(9), b"").unwrap();
    second.establish(id);
    connect(&mut peer, 7);
    connect(&mut peer, 8);
    let [same, other] = requests(&mut peer, &mut first).try_into().unwrap();
    assert!(second.knows(&same) && !second.knows(&other));
    second.handle_request(NOW, &same);
    assert_eq!(second.state(id), Some(ConnectionState::DreqSent));
}

#[test]
fn release__gives_a_request_to_another_device() {
    let (mut peer, [mut first, mut second]) = devices();
    let (connected, resolved) = (connect(&mut peer, 7), {
        peer.resolve(NOW, OURS, SERVICE, None, b"hello").unwrap()
    });
    for asked in requests(&mut peer, &mut first) {
        let id = handle(&mut first, &asked);
        let released = first.release(id).unwrap();
        assert!(!first.knows(&asked) && first.is_empty() && first.release(id).is_none());
        let load = first.listener_load(SERVICE).unwrap();
        assert_eq!((load.undecided, load.connections), (0, 0));
        let id = handle(&mut second, &released);
        assert!(second.knows(&asked));
        let (status, qpn) = (SidrStatus::VALID, Qpn::new(9));
        if second.answer(NOW, id, status, qpn, 1, b"").is_err() {
            second.accept(NOW, id, &endpoint(9), b"").unwrap();
        }
        for mad in sent(&mut second) {
            peer.handle_mad(NOW, OURS, &mad);
        }
    }
    assert!(matches!(peer.poll_event(), Some(CmEvent::Reply { id, .. }) if id == connected));
    assert!(matches!(peer.poll_event(), Some(CmEvent::SidrReply { id, .. }) if id == resolved));
}

#[test]
fn release__of_what_is_decided_gives_nothing() {
    let (mut peer, [mut first, _]) = devices();
    connect(&mut peer, 7);
    let asked = request(&mut peer, &mut first);
    let id = handle(&mut first, &asked);
    first.accept(NOW, id, &endpoint(9), b"").unwrap();
    assert!(first.release(id).is_none() && first.release_all(SERVICE).is_empty());
    assert_eq!(first.state(id), Some(ConnectionState::RepSent));
}

#[test]
fn listener_load__is_less_for_who_has_decided_on_more_and_then_had_fewer() {
    let (mut peer, [mut first, mut second]) = devices();
    let load = |cm: &Cm| cm.listener_load(SERVICE);
    for qpn in [7, 8] {
        connect(&mut peer, qpn);
    }
    let [one, other] = requests(&mut peer, &mut first).try_into().unwrap();
    let at_first = handle(&mut first, &one);
    first.accept(NOW, at_first, &endpoint(9), b"").unwrap();
    assert!(load(&second) < load(&first));
    let at_second = handle(&mut second, &other);
    assert!(load(&first) < load(&second));
    second.accept(NOW, at_second, &endpoint(9), b"").unwrap();
    assert_eq!(load(&first), load(&second));
    first.destroy(at_first);
    assert!(load(&first) < load(&second));
    second.destroy(at_second);
    // Resolutions leave nothing that could be counted.
    peer.resolve(NOW, OURS, SERVICE, None, b"").unwrap();
    let asked = request(&mut peer, &mut first);
    let id = handle(&mut first, &asked);
    first
        .answer(NOW, id, SidrStatus::VALID, Qpn::new(9), 1, b"")
        .unwrap();
    assert!(load(&second) < load(&first));
    second.unlisten(NOW, SERVICE);
    assert_eq!(load(&second), None);
}

#[test]
fn take_deferred__of_a_flood_is_bounded() {
    let (mut peer, [mut first, _]) = devices();
    connect(&mut peer, 7);
    let [mad] = sent(&mut peer).try_into().unwrap();
    assert!(matches!(CmMessage::parse(&mad), Ok((_, CmMessage::Req(_)))));
    (0..10_000).for_each(|_| first.handle_mad(NOW, PEER, &mad));
    assert_eq!(first.take_deferred().len(), crate::cm::BACKLOG_MAX);
}
