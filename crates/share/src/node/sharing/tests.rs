use rdmux_key::Key;
use rdmux_rnic::sched::Quanta;
use rdmux_rnic::{Path, Psn};
use rdmux_verbs::Options;
use rdmux_verbs::moderation::now;

use super::super::limits;
use super::*;

const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 55, 90));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 55, 91));

fn owner(application: u32) -> Owner {
    Owner { application, qp: 0 }
}

/// Adds a queue pair of an application, in Init.
fn add(sharing: &mut Sharing, egress: &mut Egress<SendRequest>, qpn: u32, application: u32) -> Qpn {
    let (qpn, domain) = (Qpn::new(qpn), sharing.new_domain());
    egress.begin_counts(application);
    let flow = egress.add_flow(owner(application), 16).unwrap();
    sharing.add_qp(qpn, (owner(application), flow), domain, (16, false), ("", None));
    let init = QpAttributes::default();
    assert!(!sharing.modify(Instant::now(), qpn, QpState::Init, &init));
    qpn
}

/// Returns whether a queue pair that is connected may go over a shared one.
fn may_share(sharing: &mut Sharing, qpn: Qpn) -> bool {
    let path = Path {
        src: ADDRESS,
        dst: PEER,
        src_port: 0xc000,
        traffic_class: 0,
    };
    let attributes = QpAttributes {
        path: Some(path),
        dest_qpn: Some(Qpn::new(0x777)),
        rq_psn: Some(Psn::new(0)),
        ..QpAttributes::default()
    };
    sharing.modify(Instant::now(), qpn, QpState::Rtr, &attributes)
}

/// An application whose requests make shared queue pairs fail has queue pairs of its own from some time on; others share them.
#[test]
fn modify__in_quarantine() {
    rdmux_soft::register();
    let options = Options {
        provider: Some("soft"),
        ..Options::default()
    };
    let device = rdmux_verbs::Device::open_with(ADDRESS, options).unwrap();
    let events = EventQueue::new().unwrap();
    let mut egress = Egress::new(now(), limits::of_device("soft", Quanta::default(), None));
    let shares = Shares::of_engines(&[device], &Key::new([1; 32]), (8, true)).unwrap();
    let shares = shares.into_iter().next().unwrap();
    let mut sharing = Sharing::open(&events, &mut egress, shares).unwrap();
    let first = add(&mut sharing, &mut egress, 0x101, 1);
    assert!(may_share(&mut sharing, first));
    let id = SharedId(9);
    let bound = Bound {
        own: first,
        peer: Qpn::new(0x777),
        domain: 1,
        peer_domain: 1,
        peer_access: Access::empty(),
        replays_writes: false,
    };
    let connection = Mux::new(SLOTS).bind(bound, Receiver::new(16)).unwrap();
    sharing.connections.insert((id, connection), first);
    let waiting = add(&mut sharing, &mut egress, 0x102, 1);
    for _ in 0..4 {
        sharing.connection_has_news(&mut egress, now(), id, Event::Culprit(connection));
    }
    assert_eq!(sharing.next_quarantined(), None);
    sharing.connection_has_news(&mut egress, now(), id, Event::Culprit(connection));
    assert_eq!(sharing.next_quarantined(), Some(1));
    assert!(!may_share(&mut sharing, waiting));
    let (later, other) = (
        add(&mut sharing, &mut egress, 0x103, 1),
        add(&mut sharing, &mut egress, 0x104, 2),
    );
    assert!(!may_share(&mut sharing, later));
    assert!(may_share(&mut sharing, other));
    // The next application in its slot has caused nothing.
    sharing.forget_application(1);
    let next = add(&mut sharing, &mut egress, 0x105, 1);
    assert!(may_share(&mut sharing, next));
}
