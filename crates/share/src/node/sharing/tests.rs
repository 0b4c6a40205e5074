use std::path::PathBuf;

use rdmux_key::Key;
use rdmux_rnic::sched::Quanta;
use rdmux_rnic::{Path, Psn};
use rdmux_verbs::Options;
use rdmux_verbs::moderation::now;
use rdmux_wire::node::mux::{Extra, Header, Kind};

use super::super::config::{Limits, Resource};
use super::super::limits;
use super::super::tenants::Account;
use super::*;

const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 55, 90));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 55, 91));

/// A queue pair of the peer.
const ASKED: Qpn = Qpn::new(0x777);

/// Opens what a node with a device at this address shares.
fn open(address: IpAddr) -> (Sharing, Egress<SendRequest>, EventQueue) {
    rdmux_soft::register();
    let options = Options {
        provider: Some("soft"),
        ..Options::default()
    };
    let device = rdmux_verbs::Device::open_with(address, options).unwrap();
    let events = EventQueue::new().unwrap();
    let mut egress = Egress::new(now(), limits::of_device("soft", Quanta::default(), None));
    let shares = Shares::of_engines(&[device], &Key::new([1; 32]), (8, true)).unwrap();
    let shares = shares.into_iter().next().unwrap();
    let sharing = Sharing::open(&events, &mut egress, shares).unwrap();
    (sharing, egress, events)
}

/// Adds the state machine of a line, of which the peers know nothing.
fn add_line(sharing: &mut Sharing, id: u64) -> SharedId {
    add_line_to(sharing, id, PEER)
}

fn add_line_to(sharing: &mut Sharing, id: u64, address: IpAddr) -> SharedId {
    let buffers = Arc::new(AnonymousMemory::new(4096).unwrap());
    let pd = sharing.peers.pd();
    let peer = PeerId { address, engine: 0 };
    let line = Line {
        mux: Mux::new(SLOTS),
        group: None,
        buffers_region: pd.reg_mr_all(buffers.clone(), 0, Access::empty()).unwrap(),
        buffers,
        peer,
        by: SharedBy {
            peer,
            here: TenantName::default(),
            there: TenantName::default(),
            class: 0,
        },
        seen: (0, 0),
        oldest: None,
        is_due: false,
    };
    sharing.lines.insert(SharedId(id), line);
    SharedId(id)
}

/// Has a message of the peer's node come over a line.
fn use_line(sharing: &mut Sharing, id: SharedId) {
    receive(sharing, id, Kind::Slots, (Qpn::new(0), Qpn::new(0)));
}

fn receive(sharing: &mut Sharing, id: SharedId, kind: Kind, (source, destination): (Qpn, Qpn)) {
    let header = Header {
        kind,
        is_solicited: false,
        destination,
        source,
        sequence: 0,
        length: 0,
        extra: Extra::None,
        emptied: 0,
    };
    let mut bytes = [0; HEADER_LEN];
    header.emit(&mut bytes);
    let (line, mut keys) = line!(sharing, id).unwrap();
    line.mux.handle_message(&bytes, &mut keys).unwrap();
}

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
    asks(sharing, qpn, ASKED)
}

/// Has an application connect a queue pair to this one of the peer. Returns whether the connection may go over a shared queue pair.
fn asks(sharing: &mut Sharing, qpn: Qpn, dest: Qpn) -> bool {
    let path = Path {
        src: ADDRESS,
        dst: PEER,
        src_port: 0xc000,
        traffic_class: 0,
    };
    let attributes = QpAttributes {
        path: Some(path),
        dest_qpn: Some(dest),
        rq_psn: Some(Psn::new(0)),
        ..QpAttributes::default()
    };
    sharing.modify(Instant::now(), qpn, QpState::Rtr, &attributes)
}

/// An application whose requests make shared queue pairs fail has queue pairs of its own from some time on; others share them.
#[test]
fn modify__in_quarantine() {
    let (mut sharing, mut egress, _events) = open(ADDRESS);
    let first = add(&mut sharing, &mut egress, 0x101, 1);
    assert!(may_share(&mut sharing, first));
    let id = SharedId(9);
    let bound = Bound {
        own: first,
        peer: ASKED,
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

/// A queue pair in use stays as long as there is room, and gives way to another one after a few times.
#[test]
fn may_end__in_use() {
    let (mut sharing, ..) = open([127, 0, 55, 92].into());
    let id = add_line(&mut sharing, 9);
    for _ in 0..10 * STAYS_MAX {
        use_line(&mut sharing, id);
        sharing.may_end(id, false);
        assert!(sharing.yielding.is_empty(), "nobody lacks the room");
    }
    for _ in 0..STAYS_MAX {
        use_line(&mut sharing, id);
        sharing.may_end(id, true);
        assert!(sharing.yielding.is_empty(), "it is in use");
    }
    use_line(&mut sharing, id);
    sharing.may_end(id, true);
    assert!(matches!(sharing.yielding[..], [(one, _)] if one == id));
    sharing.yielding.clear();
    // Nobody has used it since.
    sharing.may_end(id, false);
    assert!(matches!(sharing.yielding[..], [(one, _)] if one == id));
}

/// A pass looks at the lines to which something has happened, and at no others.
#[test]
fn poll__with_many_lines_of_which_few_are_in_use() {
    let (mut sharing, mut egress, _events) = open([127, 0, 55, 93].into());
    let ids: Vec<_> = (0..1000).map(|id| add_line(&mut sharing, id)).collect();
    let mut looks = |sharing: &mut Sharing| {
        let before = sharing.looks;
        sharing.poll(&mut egress, now());
        sharing.looks - before
    };
    assert_eq!(looks(&mut sharing), 0);
    for in_use in [1, 10] {
        for id in &ids[..in_use] {
            use_line(&mut sharing, *id);
            use_line(&mut sharing, *id);
        }
        assert_eq!(looks(&mut sharing), in_use);
        assert_eq!(looks(&mut sharing), 0, "nothing has happened since");
    }
    // One that is asked whether it can go.
    sharing.may_end(ids[500], true);
    assert_eq!((looks(&mut sharing), looks(&mut sharing)), (1, 0));
}

/// Returns the kinds of messages that a shared queue pair takes.
fn messages(sharing: &mut Sharing, id: SharedId) -> Vec<Kind> {
    let mut kinds = Vec::new();
    while let Some((line, mut keys)) = line!(sharing, id) {
        let Some(post) = line.mux.poll_message(&mut keys) else {
            break;
        };
        line.mux.handle_completion(post.number, Status::Success);
        if let Posted::Message { header, body, .. } = post.request {
            let bytes = [&header[..], body.as_inline().unwrap_or_default()].concat();
            kinds.push(Header::parse(&bytes).unwrap().0.kind);
        }
    }
    kinds
}

/// A region into which a peer may write stays, and is charged, until the peer answers, but not for ever.
#[test]
fn remove_region__of_a_peer_that_does_not_answer() {
    let (mut sharing, mut egress, _events) = open([127, 0, 55, 94].into());
    let domain = sharing.new_domain();
    let bound = Bound {
        own: Qpn::new(0x101),
        peer: ASKED,
        domain,
        peer_domain: 1,
        peer_access: Access::empty(),
        replays_writes: false,
    };
    let id = add_line(&mut sharing, 9);
    let connection = line!(&mut sharing, id)
        .unwrap()
        .0
        .mux
        .bind(bound, Receiver::new(16))
        .unwrap();
    let account = Account::new("tenant", PathBuf::new(), (&Limits::default(), 1), 1);
    let pd = sharing.peers.pd().device().alloc_pd().unwrap();
    let memory = Arc::new(AnonymousMemory::shareable(8192).unwrap());
    let region = pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).unwrap();
    let rkey = region.rkey();
    let spec = RegionSpec {
        memory,
        memory_offset: 0,
        length: 8192,
        iova: 0,
        access: Access::LOCAL_WRITE,
    };
    sharing.add_region(domain, (region.lkey(), rkey), spec);
    let receive = RecvRequest::new(1, Sge::new(0, 8192, region.lkey()));
    line!(&mut sharing, id)
        .unwrap()
        .0
        .mux
        .post_recv(connection, receive)
        .unwrap();
    assert_eq!(messages(&mut sharing, id), [Kind::Receives]);

    let began = Instant::now();
    let charges = [(Resource::Regions, 1), (Resource::Bytes, 8192)];
    let charges = charges.map(|(resource, amount)| account.charge(resource, amount).unwrap());
    assert!(!sharing.remove_region(began, region, charges));
    assert_eq!(messages(&mut sharing, id), [Kind::Withdraw]);
    let is_charged = || Arc::strong_count(&account) > 1;
    for (passed, is_gone) in [
        (RELEASE_TIME - Duration::from_millis(1), false),
        (RELEASE_TIME, true),
    ] {
        assert!(is_charged());
        assert_eq!(sharing.next_overdue(), Some((began + RELEASE_TIME, rkey)));
        assert_eq!(sharing.look_at_overdue(began + passed), is_gone);
        sharing.work(&mut egress, now());
        assert_eq!(sharing.next_region_gone(), is_gone.then_some(rkey));
        assert_eq!(is_charged(), !is_gone);
    }
    assert_eq!(sharing.next_overdue(), None);
    assert_eq!(sharing.lines[&id].mux.connections(), 1);
}

/// Messages wait as long as the connection of which they are may yet be bound to that line. Others are answered: their senders wait for it.
#[test]
fn work_on__answers_all_but_the_peer_that_is_asked() {
    let (mut sharing, mut egress, _events) = open([127, 0, 55, 95].into());
    let other = Qpn::new(0x778);
    // Whether the peer's node has answered already.
    for is_bound in [false, true] {
        let first = 10 * u64::from(is_bound);
        let line = add_line(&mut sharing, first);
        let elsewhere = add_line_to(&mut sharing, first + 1, [127, 0, 55, 96].into());
        let of_class = add_line(&mut sharing, first + 2);
        sharing.lines.get_mut(&of_class).unwrap().by.class = 1;
        let qpn = add(&mut sharing, &mut egress, 0x101 + u32::from(is_bound), 1);
        assert!(asks(&mut sharing, qpn, ASKED));
        if is_bound {
            let peer = sharing.lines[&line].peer;
            let binding = Binding {
                domain: 1,
                access: 0,
                tenant: TenantName::default(),
            };
            sharing.bound(&mut egress, now(), qpn, (peer, ASKED), &binding);
            assert!(matches!(sharing.qps[&qpn].stage, Stage::Wanting(..)));
        }
        for (id, source, answers, waits) in [
            (line, other, 1, false),
            (elsewhere, ASKED, 1, false),
            (of_class, ASKED, 1, false),
            (line, ASKED, 1, true),
        ] {
            receive(&mut sharing, id, Kind::Send, (source, qpn));
            sharing.work_on(&mut egress, now(), id);
            let mux = &sharing.lines[&id].mux;
            assert_eq!(
                (mux.posted(), mux.has_early()),
                (answers, waits),
                "{id:?} {source:?}"
            );
        }
        // The application changes its mind.
        for to in [QpState::Reset, QpState::Init] {
            sharing.modify(Instant::now(), qpn, to, &QpAttributes::default());
        }
        assert!(asks(&mut sharing, qpn, other));
        sharing.work_on(&mut egress, now(), line);
        let mux = &mut sharing.lines.get_mut(&line).unwrap().mux;
        assert!(!mux.has_early());
        // The first answer found no queue pair.
        assert_eq!(mux.resume().len(), 1);
        assert_eq!(messages(&mut sharing, line), [Kind::Fail]);
    }
}
