use std::net::Ipv4Addr;

use rdmux_key::Key;

use super::super::session::ANSWER_TIME;
use super::*;

fn ip(host: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, host).into()
}

/// An engine of a host, which has the queue pairs with this number as the upper bits of theirs.
fn engine(host: u8, engine: u8) -> PeerId {
    let address = ip(host);
    PeerId { address, engine }
}

/// The first engine, mostly the only one.
fn peer_id(host: u8) -> PeerId {
    engine(host, 0)
}

fn qpn(number: u32) -> Qpn {
    Qpn::new(number)
}

fn tenant(name: &str) -> TenantName {
    TenantName::new(name).unwrap()
}

/// A message on its way, or the end of a link.
#[derive(Clone, Debug)]
enum Carried {
    Message(Vec<u8>),
    End,
}

/// Nodes whose links lose nothing. Each test says when what is on the way arrives.
struct Net {
    nodes: BTreeMap<PeerId, Machine>,
    /// The other end of each end of a link.
    pairs: HashMap<(PeerId, LinkId), (PeerId, LinkId)>,
    carried: BTreeMap<(PeerId, LinkId), VecDeque<Carried>>,
    /// Attempts that nobody has answered: from where, and the engine that is wanted.
    attempts: Vec<(PeerId, LinkId, PeerId)>,
    events: Vec<(PeerId, Event)>,
    now: Instant,
    nonce: u8,
}

impl Net {
    fn new() -> Net {
        Net {
            nodes: BTreeMap::new(),
            pairs: HashMap::new(),
            carried: BTreeMap::new(),
            attempts: Vec::new(),
            events: Vec::new(),
            now: Instant::now(),
            nonce: 0,
        }
    }

    /// Two nodes with one key, and an application's queue pair at each: 11 at the first, 22 at the second.
    fn pair() -> Net {
        let mut net = Net::new();
        for host in [1, 2] {
            net.add(host, 7, host);
            net.node(host).add_qp(
                qpn(u32::from(host) * 11),
                host.into(),
                tenant(&format!("t{host}")),
            );
        }
        net
    }

    fn add(&mut self, host: u8, key: u8, node: u8) {
        self.add_engines(host, key, node, 1);
    }

    /// Adds a node with so many engines.
    fn add_engines(&mut self, host: u8, key: u8, node: u8, count: u8) {
        let upper_bits: Vec<u8> = (0..count).collect();
        let warned = Warned::default();
        for own in 0..count {
            let identity = Identity {
                key: Key::new([key; 32]),
                node: NodeId([node; 16]),
                address: ip(host),
                engines: Engines::new(own, &upper_bits).unwrap(),
            };
            let machine = Machine::new(identity, warned.clone());
            self.nodes.insert(engine(host, own), machine);
        }
    }

    fn node(&mut self, host: u8) -> &mut Machine {
        self.engine_of(host, 0)
    }

    /// Returns the engine of a host that has a queue pair.
    fn engine_of(&mut self, host: u8, number: u32) -> &mut Machine {
        let engine = engine(host, (number >> 16) as u8);
        self.nodes.get_mut(&engine).unwrap()
    }

    fn nonce(&mut self) -> [u8; 32] {
        self.nonce = self.nonce.wrapping_add(1);
        [self.nonce; 32]
    }

    fn bind(&mut self, host: u8, own: u32, peer: u8, dest: u32) {
        let (now, nonce) = (self.now, self.nonce());
        self.engine_of(host, own)
            .bind(now, qpn(own), (ip(peer), qpn(dest), 0), own, nonce);
        self.act();
    }

    /// Has all nodes do what they want.
    fn act(&mut self) {
        let mut bytes = Vec::new();
        let all: Vec<PeerId> = self.nodes.keys().copied().collect();
        for at in all {
            while let Some(action) = self.nodes.get_mut(&at).unwrap().next_action() {
                match action {
                    Action::Connect(link, address, wanted) => {
                        let peer = |engine| PeerId { address, engine };
                        let wanted = Some(peer(Engines::upper_bits(wanted)));
                        // As links have it: the first one has what nobody has.
                        let found = wanted.filter(|wanted| self.nodes.contains_key(wanted));
                        self.attempts.push((at, link, found.unwrap_or(peer(0))));
                    }
                    Action::Send(link) | Action::Close(link, _) => {
                        let Some(other) = self.pairs.get(&(at, link)).copied() else {
                            continue;
                        };
                        let node = self.nodes.get_mut(&at).unwrap();
                        while node.next_message(self.now, link, &mut bytes) {
                            let message = Carried::Message(bytes.clone());
                            self.carried.entry(other).or_default().push_back(message);
                        }
                        if let Action::Close(_, last) = action {
                            let last = last.into_iter().map(Carried::Message);
                            self.carried.entry(other).or_default().extend(last);
                            self.carried.entry(other).or_default().push_back(Carried::End);
                            self.pairs.remove(&(at, link));
                        }
                    }
                }
            }
            while let Some(event) = self.nodes.get_mut(&at).unwrap().next_event() {
                self.events.push((at, event));
            }
        }
    }

    /// Answers the oldest attempt.
    fn answer_attempt(&mut self) -> bool {
        if self.attempts.is_empty() {
            return false;
        }
        let (from, link, to) = self.attempts.remove(0);
        let nonce = self.nonce();
        let now = self.now;
        let accepted = self
            .nodes
            .get_mut(&to)
            .and_then(|node| node.accepted(now, from.address, nonce));
        let node = self.nodes.get_mut(&from).unwrap();
        match accepted {
            Some(other) => {
                self.pairs.insert((from, link), (to, other));
                self.pairs.insert((to, other), (from, link));
                node.connected(link);
            }
            None => node.lost(now, link),
        }
        self.act();
        true
    }

    /// Has the oldest message for an end of a link arrive.
    fn deliver(&mut self, end: (PeerId, LinkId)) -> bool {
        let Some(carried) = self.carried.get_mut(&end).and_then(VecDeque::pop_front) else {
            return false;
        };
        if let Some(node) = self.nodes.get_mut(&end.0) {
            match carried {
                Carried::Message(bytes) => node.heard(self.now, end.1, &bytes),
                Carried::End => node.lost(self.now, end.1),
            }
        }
        self.act();
        true
    }

    /// Has everything arrive.
    fn run(&mut self) {
        self.act();
        for _ in 0..100_000 {
            let waiting = self.carried.iter().find(|(_, queue)| !queue.is_empty());
            let end = waiting.map(|(end, _)| *end);
            let any = match end {
                Some(end) => self.deliver(end),
                None => self.answer_attempt(),
            };
            if !any {
                return;
            }
        }
        panic!("there is no end of messages");
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        for node in self.nodes.values_mut() {
            if node.deadline().is_some_and(|deadline| deadline <= now) {
                node.check_time(now);
            }
        }
        self.act();
    }

    /// The node of a host is there no more. Its peers do not learn that.
    fn kill(&mut self, host: u8) {
        self.nodes.retain(|at, _| at.address != ip(host));
        self.pairs
            .retain(|(at, _), (to, _)| at.address != ip(host) && to.address != ip(host));
    }

    fn take(&mut self, host: u8) -> Vec<Event> {
        let (mine, others) = std::mem::take(&mut self.events)
            .into_iter()
            .partition(|(at, _)| at.address == ip(host));
        self.events = others;
        mine.into_iter().map(|(_, event)| event).collect()
    }
}

fn bound(own: u32, peer: u8, dest: u32) -> Event {
    Event::Peer(PeerEvent::Bound {
        qpn: qpn(own),
        peer: engine(peer, (dest >> 16) as u8),
        dest: qpn(dest),
        binding: Binding {
            domain: peer.into(),
            access: dest,
            tenant: tenant(&format!("t{peer}")),
        },
    })
}

fn own(number: u32, why: Why) -> Event {
    let qpn = qpn(number);
    Event::Peer(PeerEvent::Own { qpn, why })
}

fn unbound(number: u32) -> Event {
    let qpn = qpn(number);
    Event::Peer(PeerEvent::Unbound { qpn })
}

fn gone(peer: u8) -> Event {
    let peer = peer_id(peer);
    Event::Peer(PeerEvent::Gone { peer })
}

#[test]
fn bind__both_ends_of_a_connection() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.run();
    assert_eq!(net.events, [], "the peer's queue pair is not in RTR");
    net.bind(2, 22, 1, 11);
    net.run();
    assert_eq!(net.take(1), [bound(11, 2, 22)]);
    assert_eq!(net.take(2), [bound(22, 1, 11)]);
    // One link was enough, and nothing is kept.
    assert_eq!(net.node(1).counts(), (1, 0));
    assert_eq!(net.node(2).counts(), (1, 0));
}

/// Both nodes connect and ask at once; whatever the order in which attempts and messages arrive, both ends agree, of each pair of engines.
#[test]
fn bind__at_once_in_any_order() {
    for (engines, rounds) in [([1, 1], 2000), ([2, 1], 1000), ([2, 3], 1000)] {
        bind_at_once(engines, rounds);
    }
}

fn bind_at_once(engines: [u8; 2], rounds: u32) {
    let mut state = 0x0123_4567_89ab_cdef_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let connection = |n: u32| {
        let [first, second] = engines.map(u32::from);
        let engines = [n % first, n / first % second];
        [
            engines[0] << 16 | (11 + 100 * n),
            engines[1] << 16 | (22 + 100 * n),
        ]
    };
    let connections: Vec<[u32; 2]> = (0..6).map(connection).collect();
    let mut with_two_links = 0;
    for round in 0..rounds {
        let mut net = Net::new();
        let mut to_bind = Vec::new();
        for (host, count) in [1, 2].into_iter().zip(engines) {
            net.add_engines(host, 7, host, count);
            let (own, far) = (usize::from(host - 1), usize::from(2 - host));
            for ends in &connections {
                let number = ends[own];
                let tenant = tenant(&format!("t{host}"));
                net.engine_of(host, number)
                    .add_qp(qpn(number), host.into(), tenant);
                to_bind.push((host, number, 3 - host, ends[far]));
            }
        }
        loop {
            let ends: Vec<_> = net
                .carried
                .iter()
                .filter(|(_, queue)| !queue.is_empty())
                .map(|(end, _)| *end)
                .collect();
            let choices = to_bind.len() + ends.len() + net.attempts.len();
            if choices == 0 {
                break;
            }
            let choice = random(choices);
            if choice < to_bind.len() {
                let (host, mine, peer, dest) = to_bind.swap_remove(choice);
                net.bind(host, mine, peer, dest);
            } else if choice < to_bind.len() + ends.len() {
                net.deliver(ends[choice - to_bind.len()]);
            } else {
                let at = choice - to_bind.len() - ends.len();
                net.attempts.swap(0, at);
                net.answer_attempt();
            }
        }
        for (host, peer) in [(1, 2), (2, 1)] {
            let (own, far) = (usize::from(host - 1), usize::from(peer - 1));
            let mut events = net.take(host);
            let order = |event: &Event| match event {
                Event::Peer(PeerEvent::Bound { qpn, .. }) => qpn.value() & 0xffff,
                other => panic!("round {round}: {other:?}"),
            };
            events.sort_by_key(order);
            let expected = connections.iter().map(|ends| bound(ends[own], peer, ends[far]));
            assert_eq!(events, expected.collect::<Vec<_>>(), "round {round}");
            let of_host = net.nodes.iter().filter(|(at, _)| at.address == ip(host));
            for (links, kept) in of_host.map(|(_, machine)| machine.counts()) {
                let peers = usize::from(engines[far]);
                assert!(kept == 0 && (peers..=2 * peers).contains(&links), "round {round}");
                with_two_links += usize::from(links == 2 * peers);
            }
        }
    }
    assert!(with_two_links > 10, "{with_two_links}");
}

/// Adds a queue pair to each of two engines of both hosts, and connects those of the engines with the same number: 11 and 22, 0x1_000b and 0x1_0016.
fn two_engines() -> Net {
    let mut net = Net::new();
    for host in [1, 2] {
        net.add_engines(host, 7, host, 2);
        for engine in [0, 1 << 16] {
            let number = engine + 11 * u32::from(host);
            let tenant = tenant(&format!("t{host}"));
            net.engine_of(host, number)
                .add_qp(qpn(number), host.into(), tenant);
        }
    }
    for engine in [0, 1 << 16] {
        net.bind(1, engine | 11, 2, engine | 22);
        net.run();
        net.bind(2, engine | 22, 1, engine | 11);
    }
    net.run();
    let second = 1 << 16;
    assert_eq!(
        net.take(1),
        [bound(11, 2, 22), bound(second | 11, 2, second | 22)]
    );
    net.events.clear();
    net
}

#[test]
fn lost__ends_what_was_agreed_with_one_engine_alone() {
    let mut net = two_engines();
    let second = engine(1, 1);
    let end = *net.pairs.keys().find(|(at, _)| *at == second).unwrap();
    let now = net.now;
    net.nodes.get_mut(&second).unwrap().lost(now, end.1);
    net.run();
    let gone = Event::Peer(PeerEvent::Gone { peer: engine(2, 1) });
    assert_eq!(net.take(1), [unbound(1 << 16 | 11), gone]);
}

/// It has one engine now, with other queue pairs.
#[test]
fn agreed__a_node_that_was_started_again_with_other_engines() {
    let mut net = two_engines();
    let number = 1 << 16 | 44;
    net.engine_of(2, number).add_qp(qpn(number), 2, tenant("t2"));
    net.node(1).add_qp(qpn(12), 1, tenant("t1"));
    net.bind(1, 12, 2, number);
    net.run();
    assert_eq!(net.node(1).counts(), (2, 0));
    net.kill(2);
    net.events.clear();
    net.add(2, 7, 9);
    net.node(2).add_qp(qpn(24), 2, tenant("t2"));
    net.node(1).add_qp(qpn(13), 1, tenant("t1"));
    net.bind(2, 24, 1, 13);
    net.run();
    let events = net.take(1);
    for peer in [0, 1] {
        let gone = Event::Peer(PeerEvent::Gone {
            peer: engine(2, peer),
        });
        assert!(events.contains(&gone), "{events:?}");
    }
    assert!(
        events.contains(&unbound(11)) && events.contains(&own(12, Why::NoNode)),
        "{events:?}"
    );
    net.bind(1, 13, 2, 24);
    net.run();
    assert_eq!(net.take(1), [bound(13, 2, 24)]);
}

/// A peer is believed what its node has told: where it answers, which engines there are, and whose queue pairs it speaks of.
#[test]
fn agreed__engines_that_contradict() {
    let broken = |why| Why::Protocol(Broken::Unexpected(why));
    let mut net = Net::new();
    net.add(1, 7, 1);
    net.add_engines(2, 7, 2, 2);
    net.node(1).add_qp(qpn(11), 1, tenant(""));
    net.bind(1, 11, 2, 22);
    net.attempts[0].2 = engine(2, 1);
    net.run();
    let why = broken("another engine than the one that was asked");
    assert_eq!(net.take(1), [own(11, why)]);
    assert_eq!(net.node(1).counts(), (0, 0));

    // The second engine tells of a third one.
    let mut net = two_engines();
    let identity = Identity {
        key: Key::new([7; 32]),
        node: NodeId([2; 16]),
        address: ip(2),
        engines: Engines::new(2, &[0, 1, 2]).unwrap(),
    };
    let third = Machine::new(identity, Warned::default());
    net.nodes.insert(engine(2, 2), third);
    let number = 2 << 16 | 22;
    net.engine_of(2, number).add_qp(qpn(number), 2, tenant(""));
    net.node(1).add_qp(qpn(12), 1, tenant(""));
    net.bind(2, number, 1, 12);
    net.run();
    assert_eq!(net.node(1).counts(), (1, 0));
    assert_eq!(net.take(1), []);
    assert_eq!(net.take(2), [own(number, Why::NoNode), gone(1)]);
    assert_eq!(net.node(1).take_warnings().len(), 1);
}

#[test]
fn question__of_a_queue_pair_of_another_engine() {
    let (source, dest) = (qpn(1 << 16 | 5), qpn(11));
    let binding = Binding {
        domain: 1,
        access: 0,
        tenant: tenant(""),
    };
    for message in [
        Message::Unbind { source, dest },
        Message::Settled {
            source,
            dest,
            binding: None,
        },
        Message::Bind {
            source,
            dest,
            class: 0,
            binding,
        },
    ] {
        let mut net = two_engines();
        let (_, link) = *net.pairs.keys().find(|(at, _)| *at == peer_id(1)).unwrap();
        let mut bytes = Vec::new();
        message.emit(1000, &mut bytes);
        let now = net.now;
        net.node(1).heard(now, link, &bytes);
        net.run();
        assert_eq!(net.take(1), [unbound(11), gone(2)], "{message:?}");
    }
}

#[test]
fn bind__a_peer_without_a_node_is_not_asked_for_some_time() {
    let mut net = Net::pair();
    net.kill(2);
    net.bind(1, 11, 2, 22);
    net.run();
    assert_eq!(net.take(1), [own(11, Why::NoNode)]);
    net.node(1).add_qp(qpn(12), 1, tenant(""));
    net.bind(1, 12, 2, 22);
    assert_eq!(net.take(1), [own(12, Why::NoNode)]);
    assert!(net.attempts.is_empty());
    net.pass(NONE_TIME);
    net.node(1).add_qp(qpn(13), 1, tenant(""));
    net.bind(1, 13, 2, 22);
    assert_eq!(net.attempts.len(), 1);
}

#[test]
fn bind__a_peer_that_does_not_answer_costs_half_a_second() {
    for answers in 0..4 {
        let mut net = Net::pair();
        net.bind(1, 11, 2, 22);
        // It falls silent at some point of the handshake.
        for step in 0..answers {
            match step {
                0 => drop(net.answer_attempt()),
                _ => {
                    let end = *net.carried.iter().find(|(_, queue)| !queue.is_empty()).unwrap().0;
                    net.deliver(end);
                }
            }
        }
        net.node(1).next_event();
        net.pass(ANSWER_TIME - Duration::from_millis(1));
        assert_eq!(net.take(1), []);
        net.pass(Duration::from_millis(1));
        assert_eq!(net.take(1), [own(11, Why::NoNode)], "after {answers} steps");
        assert_eq!(net.node(1).counts(), (0, 0));
        assert_eq!(net.node(1).deadline(), None);
    }
}

#[test]
fn bind__other_keys_are_no_agreement_and_a_warning_a_minute() {
    let mut net = Net::pair();
    net.add(2, 8, 2);
    for second in 0..100 {
        let number = 1000 + second;
        net.node(1).add_qp(qpn(number), 1, tenant(""));
        net.bind(1, number, 2, 22);
        net.run();
        assert_eq!(net.take(1), [own(number, Why::Key)]);
        assert_eq!(net.take(2), []);
        net.pass(Duration::from_secs(1));
    }
    for host in [1, 2] {
        let warnings = net.node(host).take_warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        let other = ip(3 - host).to_string();
        assert!(
            warnings[0].contains(&other) && warnings[0].contains("--key"),
            "{warnings:?}"
        );
        assert_eq!(net.node(host).counts(), (0, 0));
    }
}

#[test]
fn bind__what_the_peer_does_not_have_or_has_connected_otherwise() {
    let mut net = Net::pair();
    net.node(1).add_qp(qpn(12), 1, tenant(""));
    net.bind(1, 12, 2, 99);
    net.run();
    assert_eq!(net.take(1), [own(12, Why::Refused(Reason::NoQp))]);
    // The peer's queue pair is kept for two, and connects to one of them.
    net.node(1).add_qp(qpn(13), 1, tenant(""));
    net.bind(1, 13, 2, 22);
    net.bind(1, 11, 2, 22);
    net.run();
    assert_eq!(net.node(2).counts(), (1, 2));
    net.bind(2, 22, 1, 11);
    net.run();
    let events = net.take(1);
    assert!(events.contains(&bound(11, 2, 22)), "{events:?}");
    assert!(events.contains(&own(13, Why::Refused(Reason::Own))), "{events:?}");
    net.node(1).add_qp(qpn(14), 1, tenant(""));
    net.bind(1, 14, 2, 22);
    net.run();
    assert_eq!(net.take(1), [own(14, Why::Refused(Reason::OtherPeer))]);
}

#[test]
fn remove_qp__while_the_peer_waits_or_is_bound() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.run();
    let now = net.now;
    net.node(2).remove_qp(now, qpn(22));
    net.run();
    assert_eq!(net.take(1), [own(11, Why::Refused(Reason::Own))]);
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    let now = net.now;
    net.node(1).remove_qp(now, qpn(11));
    net.run();
    assert_eq!(net.take(2), [unbound(22)]);
    // One that asked and has gone is kept no longer.
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.run();
    let now = net.now;
    net.node(1).remove_qp(now, qpn(11));
    net.run();
    assert_eq!(net.node(2).counts(), (1, 0));
    // Its number may be that of another one.
    net.node(1).add_qp(qpn(11), 1, tenant("t1"));
    net.bind(2, 22, 1, 11);
    net.bind(1, 11, 2, 22);
    net.run();
    assert_eq!(net.take(1), [bound(11, 2, 22)]);
}

#[test]
fn lost__ends_what_was_agreed_at_both_ends_and_it_can_be_agreed_again() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    let (end, other) = net.pairs.iter().next().map(|(a, b)| (*a, *b)).unwrap();
    net.pairs.clear();
    let now = net.now;
    for (at, link) in [end, other] {
        net.nodes.get_mut(&at).unwrap().lost(now, link);
    }
    net.run();
    assert_eq!(net.take(1), [unbound(11), gone(2)]);
    assert_eq!(net.take(2), [unbound(22), gone(1)]);
    for (host, number) in [(1, 12), (2, 23)] {
        net.node(host)
            .add_qp(qpn(number), host.into(), tenant(&format!("t{host}")));
    }
    net.bind(1, 12, 2, 23);
    net.bind(2, 23, 1, 12);
    net.run();
    assert_eq!(net.take(1), [bound(12, 2, 23)]);
}

/// Two nodes that have agreed on a connection of 11 and 22.
fn agreed_pair() -> Net {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.run();
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    net
}

fn doubt(net: &mut Net, host: u8, peer: u8) {
    let (now, nonce) = (net.now, net.nonce());
    net.node(host).doubt(now, ip(peer), nonce);
    net.act();
}

/// A node that is slow, and no other run, stays as it is, and is not asked all the time.
#[test]
fn doubt__of_the_same_run_changes_nothing() {
    let mut net = agreed_pair();
    doubt(&mut net, 2, 3);
    assert!(net.attempts.is_empty(), "there is no such peer");
    for (host, peer) in [(1, 2), (2, 1)] {
        doubt(&mut net, host, peer);
        doubt(&mut net, host, peer);
        assert_eq!(net.attempts.len(), 1);
        net.run();
        doubt(&mut net, host, peer);
        assert!(net.attempts.is_empty());
    }
    assert_eq!(net.events, []);
    assert_eq!((net.node(1).counts(), net.node(2).counts()), ((1, 0), (1, 0)));
    net.pass(SAME_TIME);
    doubt(&mut net, 1, 2);
    // It has the time of a handshake. What was agreed stays if it does not answer.
    net.pass(ANSWER_TIME);
    assert_eq!(net.node(1).counts(), (1, 0));
    assert_eq!(net.events, []);
    net.attempts.clear();
    for (host, number) in [(1, 12), (2, 23)] {
        net.node(host)
            .add_qp(qpn(number), host.into(), tenant(&format!("t{host}")));
    }
    net.bind(1, 12, 2, 23);
    net.bind(2, 23, 1, 12);
    net.run();
    assert_eq!(net.take(1), [bound(12, 2, 23)]);
}

/// The other run of a peer's node knows nothing of what was agreed with the former one.
#[test]
fn doubt__of_a_node_that_was_started_again_ends_what_was_agreed() {
    let mut net = agreed_pair();
    net.kill(2);
    doubt(&mut net, 1, 2);
    net.run();
    assert_eq!(net.events, [], "nobody answers");
    net.pass(DOUBT_TIME);
    net.add(2, 7, 9);
    doubt(&mut net, 1, 2);
    net.run();
    assert_eq!(net.take(1), [unbound(11), gone(2)]);
    assert_eq!((net.node(1).counts(), net.node(2).counts()), ((0, 0), (0, 0)));
    for (host, number) in [(1, 12), (2, 23)] {
        net.node(host)
            .add_qp(qpn(number), host.into(), tenant(&format!("t{host}")));
    }
    net.bind(1, 12, 2, 23);
    net.bind(2, 23, 1, 12);
    net.run();
    assert_eq!(net.take(1), [bound(12, 2, 23)]);
}

/// The end of the former run becomes known while a link is to show it.
#[test]
fn doubt__that_is_settled_otherwise() {
    for order in 0..2 {
        let mut net = agreed_pair();
        let link = *net.pairs.keys().find(|(at, _)| *at == peer_id(1)).unwrap();
        net.kill(2);
        doubt(&mut net, 1, 2);
        let now = net.now;
        net.node(1).lost(now, link.1);
        net.add(2, 7, 9);
        for (host, number) in [(1, 12), (2, 23)] {
            net.node(host)
                .add_qp(qpn(number), host.into(), tenant(&format!("t{host}")));
        }
        net.bind(1, 12, 2, 23);
        net.bind(2, 23, 1, 12);
        assert_eq!(net.attempts.len(), 3);
        net.attempts.swap(0, order);
        net.run();
        assert_eq!(net.take(1), [unbound(11), gone(2), bound(12, 2, 23)]);
        net.pass(ANSWER_TIME);
        assert_eq!(net.events, [(peer_id(2), bound(23, 1, 12))]);
    }
}

/// The other run of a peer's node connects while a link is to show which run it is, in any order.
#[test]
fn doubt__while_the_next_run_connects() {
    for seed in 1..400_u64 {
        let mut state = seed;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        let mut net = agreed_pair();
        net.kill(2);
        net.add(2, 7, 9);
        for (host, number) in [(1, 12), (2, 23)] {
            net.node(host)
                .add_qp(qpn(number), host.into(), tenant(&format!("t{host}")));
        }
        doubt(&mut net, 1, 2);
        net.bind(2, 23, 1, 12);
        loop {
            let waiting = net.carried.iter().filter(|(_, queue)| !queue.is_empty());
            let ends: Vec<_> = waiting.map(|(end, _)| *end).collect();
            let choices = ends.len() + net.attempts.len();
            if choices == 0 {
                break;
            }
            let choice = random(choices);
            match ends.get(choice) {
                Some(end) => drop(net.deliver(*end)),
                None => {
                    net.attempts.swap(0, choice - ends.len());
                    net.answer_attempt();
                }
            }
        }
        assert_eq!(net.take(1), [unbound(11), gone(2)], "seed {seed}");
        net.bind(1, 12, 2, 23);
        net.run();
        net.pass(ANSWER_TIME);
        net.run();
        assert_eq!(net.take(1), [bound(12, 2, 23)], "seed {seed}");
        assert_eq!(net.take(2), [bound(23, 1, 12)], "seed {seed}");
    }
}

/// The link that asks for the run reaches the next one after both have agreed anew.
#[test]
fn doubt__answered_after_the_next_run_has_agreed() {
    let mut net = two_engines();
    net.kill(2);
    doubt(&mut net, 1, 2);
    let asking = net.attempts.pop().unwrap();
    net.add_engines(2, 7, 9, 2);
    let second = 1 << 16;
    for (host, number) in [(1, 12), (2, 23), (1, second | 12), (2, second | 23)] {
        let tenant = tenant(&format!("t{host}"));
        net.engine_of(host, number)
            .add_qp(qpn(number), host.into(), tenant);
    }
    net.bind(2, 23, 1, 12);
    net.run();
    net.bind(1, 12, 2, 23);
    net.run();
    assert!(net.take(1).contains(&bound(12, 2, 23)));
    net.attempts.push(asking);
    net.run();
    net.pass(ANSWER_TIME);
    net.run();
    assert!(net.take(1).is_empty() && net.take(2).iter().all(|event| *event == bound(23, 1, 12)));
}

/// A node that was killed and started again comes before its peer knows that the first one is gone.
#[test]
fn agreed__a_node_that_was_started_again() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    net.kill(2);
    net.add(2, 7, 9);
    net.node(2).add_qp(qpn(24), 2, tenant("t2"));
    net.node(1).add_qp(qpn(13), 1, tenant("t1"));
    net.bind(2, 24, 1, 13);
    net.run();
    assert_eq!(net.take(1), [unbound(11), gone(2)]);
    net.bind(1, 13, 2, 24);
    net.run();
    assert_eq!(net.take(1), [bound(13, 2, 24)]);
    assert_eq!(net.take(2), [bound(24, 1, 13)]);
    assert_eq!(net.node(1).counts(), (1, 0));
}

#[test]
fn bind__a_node_is_its_own_peer() {
    let mut net = Net::new();
    net.add(1, 7, 1);
    net.node(1).add_qp(qpn(11), 1, tenant("t1"));
    net.node(1).add_qp(qpn(12), 1, tenant("t1"));
    net.bind(1, 11, 1, 12);
    net.bind(1, 12, 1, 11);
    net.run();
    let mut events = net.take(1);
    events.sort_by_key(|event| match event {
        Event::Peer(PeerEvent::Bound { qpn, .. }) => qpn.value(),
        other => panic!("{other:?}"),
    });
    assert_eq!(events, [bound(11, 1, 12), bound(12, 1, 11)]);
    assert_eq!(net.node(1).counts(), (2, 0));
}

#[test]
fn accepted__strangers_are_bounded_and_have_half_a_second() {
    let mut net = Net::pair();
    let now = net.now;
    let accepted = (0..200).filter(|n| net.node(2).accepted(now, ip(*n), [0; 32]).is_some());
    let accepted: Vec<u8> = accepted.collect();
    assert_eq!(accepted.len(), STRANGERS_MAX);
    net.pass(ANSWER_TIME);
    assert_eq!(net.node(2).counts(), (0, 0));
    let now = net.now;
    assert!(net.node(2).accepted(now, ip(1), [0; 32]).is_some());
}

#[test]
fn bind_asked__at_most_so_many_are_kept() {
    let mut net = Net::pair();
    let count = KEPT_MAX as u32 + 10;
    for number in 0..count {
        net.node(1).add_qp(qpn(0x1000 + number), 1, tenant(""));
        net.bind(1, 0x1000 + number, 2, 22);
    }
    net.run();
    assert_eq!(net.node(2).counts(), (1, KEPT_MAX));
    let refused = net.take(1);
    assert_eq!(refused.len(), 10);
    assert!(matches!(
        &refused[0],
        Event::Peer(PeerEvent::Own {
            why: Why::Refused(Reason::Limit),
            ..
        })
    ));
}

#[test]
fn keys__are_asked_for_and_go() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    let now = net.now;
    let rkey = RKey(5);
    net.node(1).resolve_key(now, peer_id(2), (2, rkey), 77);
    net.node(1).resolve_key(now, peer_id(2), (2, RKey(6)), 78);
    net.node(1).resolve_key(now, peer_id(9), (2, RKey(6)), 79);
    net.run();
    let key = RemoteKey {
        rkey: RKey(50),
        start: 4096,
        length: 100,
        access: 3,
    };
    for event in net.take(2) {
        let Event::KeyAsked {
            asked,
            domain: 2,
            rkey: wanted,
        } = event
        else {
            panic!("{event:?}");
        };
        let found = (wanted == rkey).then_some(key);
        net.node(2).answer_key(asked, wanted, found);
    }
    net.run();
    let answer = |ticket, key| Event::Peer(PeerEvent::Key { ticket, key });
    assert_eq!(
        net.take(1),
        [answer(79, None), answer(77, Some(key)), answer(78, None)]
    );

    // Nobody has asked for the other one.
    let now = net.now;
    assert!(!net.node(2).key_goes(now, 2, RKey(6)));
    assert!(net.node(2).key_goes(now, 2, rkey));
    net.run();
    assert_eq!(net.take(2), [], "the peer may use it");
    let [Event::Peer(PeerEvent::KeyGone { asked, peer, .. })] = net.take(1)[..] else {
        panic!("no news of the key");
    };
    assert_eq!(peer, peer_id(2));
    net.node(1).answer(asked, Message::Done {});
    net.run();
    assert_eq!(net.take(2), [Event::KeyReleased { rkey }]);
}

#[test]
fn keys__of_a_peer_that_does_not_let_go() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    let now = net.now;
    net.node(1).resolve_key(now, peer_id(2), (2, RKey(5)), 1);
    net.run();
    let events = net.take(2);
    let Some(Event::KeyAsked { asked, .. }) = events.last() else {
        panic!("{events:?}");
    };
    let key = RemoteKey {
        rkey: RKey(50),
        start: 0,
        length: 1,
        access: 3,
    };
    net.node(2).answer_key(*asked, RKey(5), Some(key));
    net.run();
    assert!(net.node(2).key_goes(now, 2, RKey(5)));
    net.run();
    net.pass(ANSWER_TIME);
    assert_eq!(net.take(2), []);
    net.pass(Duration::from_secs(5));
    let events = net.take(2);
    assert!(
        events.contains(&Event::KeyReleased { rkey: RKey(5) }),
        "{events:?}"
    );
    assert!(events.contains(&gone(1)), "{events:?}");
}

#[test]
fn lost__questions_end_without_an_answer() {
    let mut net = Net::pair();
    net.bind(1, 11, 2, 22);
    net.bind(2, 22, 1, 11);
    net.run();
    net.events.clear();
    let now = net.now;
    for ticket in 0..100 {
        net.node(1).resolve_key(now, peer_id(2), (2, RKey(5)), ticket);
    }
    net.act();
    net.kill(2);
    net.pass(ANSWER_TIME);
    let mut tickets: Vec<u64> = net
        .take(1)
        .iter()
        .filter_map(|event| match event {
            Event::Peer(PeerEvent::Key { ticket, key: None }) => Some(*ticket),
            _ => None,
        })
        .collect();
    tickets.sort_unstable();
    assert_eq!(tickets, (0..100).collect::<Vec<_>>());
}

/// Valid messages with changed bytes, from a peer that has the key: nothing panics, and everything stays bounded.
#[test]
fn heard__anything_from_one_that_has_the_key() {
    let mut state = 0x1357_9bdf_0246_8ace_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/node_peer");
    let seeds: Vec<Vec<u8>> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    let mut ended = 0;
    for round in 0..500 {
        let mut net = Net::pair();
        net.bind(1, 11, 2, 22);
        net.run();
        let end = *net.pairs.keys().find(|(at, _)| *at == peer_id(2)).unwrap();
        net.pairs.clear();
        for _ in 0..100 {
            let mut bytes = seeds[random(seeds.len())].clone();
            for _ in 0..random(4) {
                let at = random(bytes.len());
                bytes[at] = [0, 1, 2, 11, 22, random(256) as u8][random(6)];
            }
            // Most numbers of questions are new ones.
            bytes[4..8].copy_from_slice(&(random(1000) as u32).to_be_bytes());
            let now = net.now;
            net.node(2).heard(now, end.1, &bytes);
            net.act();
            let (links, kept) = net.node(2).counts();
            assert!(links <= 1 && kept <= 100, "round {round}");
            if links == 0 {
                ended += 1;
                break;
            }
        }
    }
    assert!(ended > 400, "{ended}");
}
