//! Reactors and connections over the soft device.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{
    Access, Arm, CompletionQueue, ConnectError, ConnectParams, Device, OpenError, Operation, Options,
    PathMtu, QpAttributes, QpState, RKey, SendRequest, Sge, SgeList, Status, WorkCompletion,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{OTHERS_EVERY, PortQueues, Stage};
use crate::{
    Completed, ConnectionEnd, ConnectionError, ConnectionId, EstablishError, Interest, Limits, Mailbox,
    MessageConnection, Queues, Reactor, ReactorEvent, SendSlot, Sizes, WorkId,
};

/// Time for what happens at once unless something is wrong.
const LONG: Duration = Duration::from_secs(60);

const SIZES: Sizes = Sizes {
    message_bytes: 64,
    sent_bytes: 64,
    receives: 4,
    answers: 12,
    own: 0,
    operations: 0,
};
const PEER_SIZES: Sizes = Sizes {
    message_bytes: 64,
    sent_bytes: 64,
    receives: 8,
    answers: 0,
    own: 8,
    operations: 4,
};

/// Opens a soft device.
fn open(address: IpAddr) -> Result<Device, OpenError> {
    rdmux_soft::register();
    Device::open(address)
}

/// Limits of a reactor whose connections share few receives.
fn limits(connections: usize) -> Limits {
    Limits {
        connections,
        keepalive: 2 * LONG,
        shared_receives: Some(2),
        queues: Queues::Pool,
        ledger: None,
    }
}

fn reactor<M>(address: SocketAddr, connections: usize) -> Reactor<M> {
    reactor_of(address, SIZES, limits(connections))
}

fn reactor_of<M>(address: SocketAddr, sizes: Sizes, limits: Limits) -> Reactor<M> {
    let mut reactor = Reactor::new(sizes, limits, None).unwrap();
    reactor
        .listen(&open(address.ip()).unwrap(), address.port())
        .unwrap();
    reactor
}

/// A peer of a reactor, which has a queue and thread of its own.
#[derive(Debug)]
struct Peer {
    cq: CompletionQueue,
    link: MessageConnection,
    /// Number of completions of messages.
    sent: usize,
}

impl Peer {
    fn connect(to: SocketAddr) -> Result<Peer, EstablishError> {
        let device = open(to.ip()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
        let params = ConnectParams::default();
        let link = MessageConnection::connect(&pd, &cq, to, &params, &PEER_SIZES)?;
        Ok(Peer { cq, link, sent: 0 })
    }

    /// Connects once a place is free, which it is when the reactor has noticed the end of another connection.
    fn connect_soon(to: SocketAddr) -> Peer {
        let deadline = Instant::now() + LONG;
        loop {
            match Peer::connect(to) {
                Ok(peer) => return peer,
                Err(why) => assert!(Instant::now() < deadline, "no place is free: {why}"),
            }
        }
    }

    fn wait(&mut self) -> Result<Completed, Status> {
        let wc: WorkCompletion = self.cq.wait(LONG).unwrap().expect("a completion");
        self.sent += usize::from(matches!(WorkId::from(wc.wr_id), WorkId::Send(_)));
        self.link.handle(&wc)
    }

    /// Sends a message, and returns it if a slot was free.
    fn send(&mut self, message: &[u8]) -> bool {
        let slot = self.link.take_slot();
        slot.is_some_and(|slot| self.link.send(slot, message).is_ok())
    }

    /// Sends a message, once a slot is free.
    fn send_soon(&mut self, message: &[u8]) {
        while !self.send(message) {
            assert_eq!(self.wait(), Ok(Completed::Nothing));
        }
    }

    fn message(&mut self) -> Result<Vec<u8>, Status> {
        loop {
            if let Completed::Message { slot, bytes } = self.wait()? {
                assert_eq!(slot, None);
                return Ok(bytes);
            }
        }
    }
}

/// A reactor on a thread of its own that sends each message back, until it is stopped. The thread returns the ends of connections.
struct Echo {
    stop: Mailbox<()>,
    thread: JoinHandle<Vec<(ConnectionId, ConnectionEnd)>>,
}

impl Echo {
    fn start(address: SocketAddr, connections: usize) -> Echo {
        Echo::of(reactor(address, connections))
    }

    fn of(mut reactor: Reactor<()>) -> Echo {
        Echo {
            stop: reactor.mailbox(),
            thread: std::thread::spawn(move || {
                let mut ends = Vec::new();
                loop {
                    match reactor.next(None).unwrap() {
                        Some(ReactorEvent::Mail(())) => return ends,
                        Some(event) => echo(&mut reactor, event, &mut ends),
                        None => {}
                    }
                }
            }),
        }
    }

    fn stop(self) -> Vec<(ConnectionId, ConnectionEnd)> {
        self.stop.send(());
        self.thread.join().unwrap()
    }
}

fn echo<M>(reactor: &mut Reactor<M>, event: ReactorEvent<M>, ends: &mut Vec<(ConnectionId, ConnectionEnd)>) {
    match event {
        ReactorEvent::Request(request) => drop(reactor.accept(request, &ConnectParams::default())),
        ReactorEvent::Completed(id, Completed::Message { slot, bytes }) => {
            let connection = reactor.connection(id).unwrap();
            let _ = connection.send(slot.unwrap(), &bytes);
        }
        ReactorEvent::Ended(id, end) => {
            ends.push((id, end));
            reactor.close(id, None);
        }
        ReactorEvent::Completed(..)
        | ReactorEvent::Mail(_)
        | ReactorEvent::Connected(..)
        | ReactorEvent::Readable(_)
        | ReactorEvent::Writable(_) => {}
    }
}

#[test]
fn next__messages_of_several_connections_are_answered_in_order() {
    let address = "127.0.12.1:7174".parse().unwrap();
    for shared_receives in [None, Some(0), Some(2)] {
        let limits = Limits {
            shared_receives,
            ..limits(8)
        };
        let server = Echo::of(reactor_of(address, SIZES, limits));
        let mut peers: Vec<Peer> = (0..3).map(|_| Peer::connect(address).unwrap()).collect();
        for round in 0..100u32 {
            for (at, peer) in (0u32..).zip(&mut peers) {
                peer.send_soon(&[at.to_be_bytes(), round.to_be_bytes()].concat());
            }
            for (at, peer) in (0u32..).zip(&mut peers) {
                let answer = peer.message().unwrap();
                assert_eq!(answer, [at.to_be_bytes(), round.to_be_bytes()].concat());
            }
        }
        assert_eq!(server.stop(), []);
    }
}

#[test]
fn send__slots_become_free_though_few_messages_have_a_completion() {
    let address = "127.0.12.2:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let mut peer = Peer::connect(address).unwrap();
    for round in 0..400u32 {
        peer.send_soon(&round.to_be_bytes());
        assert_eq!(peer.message().unwrap(), round.to_be_bytes());
    }
    assert!(
        (1..=400 / 8).contains(&peer.sent),
        "{} completions of messages",
        peer.sent
    );
    server.stop();
}

#[test]
fn send__the_last_free_slot_comes_back() {
    let address = "127.0.12.3:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let mut peer = Peer::connect(address).unwrap();
    for _ in 0..20 {
        let count = (0..).take_while(|_| peer.send(b"all at once")).count();
        assert!(count > 0);
        for _ in 0..count {
            peer.message().unwrap();
        }
        while !peer.link.has_slot() {
            peer.wait().unwrap();
        }
    }
    server.stop();
}

#[test]
fn send_reported__the_slot_stays_with_the_caller() {
    let address = "127.0.12.4:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let mut peer = Peer::connect(address).unwrap();
    let slot = peer.link.take_slot().unwrap();
    for round in 0..20u32 {
        peer.link.send_reported(slot, &round.to_be_bytes()).unwrap();
        let (mut sent, mut answered) = (false, false);
        while !(sent && answered) {
            match peer.wait().unwrap() {
                Completed::Sent(of) => sent = of == slot,
                Completed::Message { bytes, .. } => answered = bytes == round.to_be_bytes(),
                other => panic!("{other:?}"),
            }
        }
    }
    let too_long = peer.link.send(slot, &[0; PEER_SIZES.message_bytes + 1]);
    assert!(matches!(too_long, Err(crate::SendError::TooLong)));
    peer.link.give_back(slot);
    server.stop();
}

#[test]
fn handle__no_receive_without_a_slot_for_the_answer() {
    let address: SocketAddr = "127.0.12.5:7174".parse().unwrap();
    let own = Limits {
        shared_receives: None,
        ..limits(1)
    };
    let mut reactor = reactor_of::<Peer>(address, SIZES, own);
    let mailbox = reactor.mailbox();
    // The peer sends as much as it can, and waits for no answer.
    let connecting = std::thread::spawn(move || {
        let mut peer = Peer::connect(address).unwrap();
        for round in 0..SIZES.answers as u32 + 2 {
            while !peer.send(&round.to_be_bytes()) {
                peer.wait().unwrap();
            }
        }
        mailbox.send(peer);
    });
    let (mut slots, mut link, mut peer) = (Vec::new(), None, None);
    while peer.is_none() || slots.len() < SIZES.answers {
        match next(&mut reactor) {
            ReactorEvent::Request(request) => {
                link = Some(reactor.accept(request, &ConnectParams::default()).unwrap());
            }
            ReactorEvent::Completed(_, Completed::Message { slot, .. }) => slots.push(slot.unwrap()),
            ReactorEvent::Mail(came) => peer = Some(came),
            other => panic!("{other:?}"),
        }
    }
    connecting.join().unwrap();
    let id = link.unwrap();
    assert_eq!(
        reactor.connection(id).unwrap().own_receives(),
        0,
        "all slots are taken: the peer's last messages wait at the peer"
    );
    reactor.connection(id).unwrap().give_back(slots.pop().unwrap());
    match next(&mut reactor) {
        ReactorEvent::Completed(_, Completed::Message { bytes, .. }) => {
            assert_eq!(bytes, (SIZES.answers as u32).to_be_bytes());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn accept__more_connections_than_allowed_are_refused() {
    let address = "127.0.12.6:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let mut first = Peer::connect(address).unwrap();
    let refused = Peer::connect(address).map(drop).unwrap_err();
    assert!(refused.to_string().contains("refused"), "{refused}");
    assert!(first.send(b"still there"));
    assert_eq!(first.message().unwrap(), b"still there");
    first.link.close(LONG);
    let mut again = Peer::connect_soon(address);
    assert!(again.send(b"next"));
    assert_eq!(again.message().unwrap(), b"next");
    server.stop();
}

#[test]
fn ended__a_connection_killed_at_any_moment_ends_alone_and_leaves_nothing() {
    let address: SocketAddr = "127.0.12.7:7174".parse().unwrap();
    let mut reactor = reactor::<Option<Peer>>(address, 8);
    let mailbox = reactor.mailbox();
    let peers = std::thread::spawn(move || {
        let mut lasting = Peer::connect(address).unwrap();
        for messages in 0..24 {
            let mut victim = Peer::connect(address).unwrap();
            // Some are killed with messages in flight, some with answers, some in the middle of their operations.
            for step in 0..messages {
                victim.send(b"last words");
                if step % 3 == 2 {
                    let _ = victim.message();
                }
            }
            drop(victim);
            lasting.send_soon(b"unharmed");
            assert_eq!(lasting.message().unwrap(), b"unharmed");
        }
        mailbox.send(Some(lasting));
    });
    let (mut ends, mut lasting) = (Vec::new(), None);
    while lasting.is_none() || ends.len() < 24 {
        match next(&mut reactor) {
            ReactorEvent::Mail(peer) => lasting = peer,
            event => echo(&mut reactor, event, &mut ends),
        }
    }
    peers.join().unwrap();
    let mut victims: Vec<u64> = ends.iter().map(|(ConnectionId(number), _)| *number).collect();
    victims.sort_unstable();
    assert_eq!(victims, (2..=25).collect::<Vec<_>>());
    assert_eq!(reactor.connections(), 1);
    while reactor.poll().is_some() {}
    let device = reactor.devices().next().unwrap();
    let (qps, ..) = device.object_counts();
    assert_eq!(qps, 1, "of the connection that lasts");
}

/// Serves peers with several reactors; returns how many connections each has accepted.
fn spread(address: SocketAddr, reactors: Vec<Reactor<()>>, peers: usize) -> Vec<usize> {
    let served: Vec<_> = reactors
        .into_iter()
        .map(|mut reactor| {
            let stop = reactor.mailbox();
            let thread = std::thread::spawn(move || {
                let mut accepted = 0;
                loop {
                    match next(&mut reactor) {
                        ReactorEvent::Mail(()) => return accepted,
                        event => {
                            accepted += usize::from(matches!(event, ReactorEvent::Request(_)));
                            echo(&mut reactor, event, &mut Vec::new());
                        }
                    }
                }
            });
            (stop, thread)
        })
        .collect();
    let mut peers: Vec<Peer> = (0..peers).map(|_| Peer::connect(address).unwrap()).collect();
    for round in 0..10u32 {
        for peer in &mut peers {
            peer.send_soon(&round.to_be_bytes());
        }
        for peer in &mut peers {
            assert_eq!(peer.message().unwrap(), round.to_be_bytes());
        }
    }
    let counts = served.into_iter().map(|(stop, thread)| {
        stop.send(());
        thread.join().unwrap()
    });
    counts.collect()
}

fn reactors(count: usize) -> Vec<Reactor<()>> {
    let new = |_| Reactor::new(SIZES, limits(12), None).unwrap();
    (0..count).map(new).collect()
}

#[test]
fn listen_together__connections_are_spread_over_the_reactors() {
    let address: SocketAddr = "127.0.12.27:7174".parse().unwrap();
    let mut reactors = reactors(3);
    let device = open(address.ip()).unwrap();
    Reactor::listen_together(&mut reactors, &device, address.port()).unwrap();
    assert_eq!(spread(address, reactors, 12), [4, 4, 4]);
}

#[test]
fn listen_together__after_an_error_none_listens() {
    let address: SocketAddr = "127.0.12.23:7174".parse().unwrap();
    let device = open(address.ip()).unwrap();
    let mut others = reactors(2);
    // A service has one listener on an engine: the third reactor of this device cannot have its own.
    others[1].listen(&device, address.port()).unwrap();
    let failed = Reactor::listen_together(&mut others, &device, address.port());
    assert!(failed.is_err());
    assert_eq!(others[0].devices().count(), 0);
    assert_eq!(others[1].devices().count(), 1, "what it listened on before stays");
}

#[test]
fn pass_to__a_device_without_engines_serves_several_reactors() {
    let address: SocketAddr = "127.0.12.28:7174".parse().unwrap();
    let mut reactors = reactors(4);
    let device = open(address.ip()).unwrap();
    let (first, others) = reactors.split_first_mut().unwrap();
    first.listen(&device, address.port()).unwrap();
    for other in others {
        first.pass_to(other).unwrap();
    }
    // One that is gone takes none.
    drop(reactors.remove(2));
    assert_eq!(spread(address, reactors, 12), [4, 4, 4]);
}

#[test]
fn pass_to__a_request_waits_for_the_place_of_a_closed_connection() {
    let mut both = Both::new("127.0.12.33:7174", SIZES, 1);
    let mut taker = Reactor::<()>::new(SIZES, limits(1), None).unwrap();
    both.server.pass_to(&mut taker).unwrap();
    let params = ConnectParams::default();
    for _ in 0..3 {
        both.connect();
        // The next is the taker's.
        let here = both.client.connect(&both.device, both.address, &params).unwrap();
        let began = Instant::now();
        let polled = loop {
            assert!(began.elapsed() < LONG, "no request");
            assert!(both.server.poll().is_none());
            match taker.poll_others() {
                None if !taker.ports[0].delayed.is_empty() => break None,
                None => std::thread::yield_now(),
                some => break some,
            }
        };
        // The completion that frees the place comes before the request.
        let ReactorEvent::Request(request) = polled.unwrap_or_else(|| next(&mut taker)) else {
            panic!("no request");
        };
        let there = taker.accept(request, &params).unwrap();
        assert!(matches!(next(&mut both.client), ReactorEvent::Connected(of, Ok(())) if of == here));
        both.client.close(here, None);
        assert!(matches!(next(&mut taker), ReactorEvent::Ended(of, _) if of == there));
        taker.close(there, None);
    }
}

#[test]
fn pass_to__a_request_that_waits_for_a_place_delays_no_other_listeners() {
    let mut taker = Reactor::<()>::new(SIZES, limits(1), None).unwrap();
    let mut sides = ["127.0.12.42:7174", "127.0.12.43:7174"].map(|address| Both::new(address, SIZES, 1));
    for side in &mut sides {
        side.server.pass_to(&mut taker).unwrap();
        side.connect();
        // The next is the taker's.
        let params = ConnectParams::default();
        side.client.connect(&side.device, side.address, &params).unwrap();
    }
    // The only place of the first port is that of a connection that is over.
    (taker.ports[0].connections, taker.ports[0].ending) = (1, 1);
    let began = Instant::now();
    let mut passed = None;
    for (port, side) in sides.iter_mut().enumerate() {
        while passed.is_none() && (port == 1 || taker.ports[0].delayed.is_empty()) {
            assert!(began.elapsed() < LONG, "no request at port {port}");
            assert!(side.server.poll().is_none());
            passed = taker.poll_others();
        }
    }
    let of_port = |event: Option<ReactorEvent<()>>| match event {
        Some(ReactorEvent::Request(request)) => Some(request.port),
        _ => None,
    };
    let [first, second] = [0, 1].map(|at| taker.ports[at].id);
    assert_eq!(of_port(passed), Some(second));
    taker.ports[0].connections = 0;
    assert_eq!(of_port(taker.poll_others()), Some(first));
}

#[test]
fn ended__a_marker_that_is_executed_ends_the_connection() {
    let mut both = Both::new("127.0.12.44:7174", SIZES, 4);
    let [there, here] = both.connect();
    let mut slots = Vec::new();
    for round in 0..SIZES.answers as u8 {
        both.send(here, &[round]);
        slots.push(both.receive(there, &[round]));
    }
    both.send(here, b"waits for a slot");
    assert!(both.server.poll().is_none(), "no slot is free");
    arm(&both.server, 0);
    let known = both.server.connections.get_mut(&there).unwrap();
    known.link.post_empty(WorkId::End).unwrap();
    wait_for_completion(&both.server, 0);
    // The next poll begins with completions.
    both.server.polls = 0;
    let known = both.server.connections.get_mut(&there).unwrap();
    known.link.give_back(slots.remove(0));
    known.stage = Stage::Ending;
    both.server.ports[0].ending = 1;
    both.receive(there, b"waits for a slot");
    assert!(
        matches!(next(&mut both.server), ReactorEvent::Ended(of, ConnectionEnd::Disconnected) if of == there)
    );
    assert_eq!(both.server.ports[0].ending, 0);
}

#[test]
fn ended__a_failed_request_has_its_status() {
    let address: SocketAddr = "127.0.12.8:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let mut peer = Peer::connect(address).unwrap();
    let write = Operation::Write {
        va: 0,
        rkey: RKey(0x1234_5678),
        imm: None,
    };
    let pd = peer.link.pd().clone();
    let memory = Arc::new(AnonymousMemory::new(8).unwrap());
    let mr = pd.reg_mr_all(memory, 0, Access::LOCAL_WRITE).unwrap();
    peer.link.post(7, write, mr.sge(0, 8).into()).unwrap();
    assert_eq!(peer.wait(), Err(Status::RemoteAccess));
    let empty = Operation::Write {
        va: 0,
        rkey: RKey(0),
        imm: None,
    };
    drop(peer);
    let mut peer = Peer::connect_soon(address);
    peer.link.post(7, empty, SgeList::EMPTY).unwrap();
    assert_eq!(peer.wait(), Ok(Completed::Operation(7)));
    assert_eq!(server.stop().len(), 1);
}

#[test]
fn watch__a_peer_that_answers_no_probe_is_silent() {
    let address: SocketAddr = "127.0.12.9:7174".parse().unwrap();
    let mut reactor = reactor::<Peer>(address, 2);
    let mailbox = reactor.mailbox();
    let connecting = std::thread::spawn(move || {
        mailbox.send(Peer::connect(address).unwrap());
        mailbox.send(Peer::connect(address).unwrap());
    });
    let (mut ids, mut peers) = (Vec::new(), Vec::new());
    while peers.len() < 2 {
        match next(&mut reactor) {
            ReactorEvent::Request(request) => {
                ids.push(reactor.accept(request, &ConnectParams::default()).unwrap());
            }
            ReactorEvent::Mail(peer) => peers.push(peer),
            other => panic!("{other:?}"),
        }
    }
    connecting.join().unwrap();
    reactor.watch(ids[0]);
    let (period, mut now) = (LONG, Instant::now());
    reactor.handle_timers(now);
    for _ in 0..3 {
        now += period;
        reactor.handle_timers(now);
        assert!(reactor.poll().is_none(), "the peers are not silent");
        while reactor.connection(ids[0]).unwrap().is_probing() {
            assert!(reactor.poll().is_none(), "the answer to a probe is no event");
        }
        assert!(!reactor.connection(ids[1]).unwrap().is_probing());
    }
    // The queue pair does not send this probe.
    stop_sending(&mut reactor, ids[0]);
    now += period;
    reactor.handle_timers(now);
    assert!(reactor.poll().is_none());
    now += period;
    reactor.handle_timers(now);
    let ended = reactor.poll();
    assert!(
        matches!(ended, Some(ReactorEvent::Ended(id, ConnectionEnd::Silent)) if id == ids[0]),
        "{ended:?}"
    );
    // The peer is not silent any more.
    arm(&reactor, 0);
    assert!(peers[0].send(b"still there"));
    wait_for_completion(&reactor, 0);
    assert!(reactor.poll().is_none(), "no event follows the end");
}

/// Has the queue pair of a connection send no request that is posted from now on.
fn stop_sending<M>(reactor: &mut Reactor<M>, connection: ConnectionId) {
    let qp = reactor.connection(connection).unwrap().qp();
    qp.modify(QpState::Sqd, &QpAttributes::default()).unwrap();
}

/// Arms the completion queue of a port for [`wait_for_completion`].
fn arm<M>(reactor: &Reactor<M>, port: usize) {
    let cq = reactor.ports[port].queues.all().next().unwrap();
    cq.take_event();
    cq.arm(Arm::Next);
}

/// Waits until the completion queue of a port has a completion that came after [`arm`], and leaves it there.
fn wait_for_completion<M>(reactor: &Reactor<M>, port: usize) {
    let fd = reactor.ports[port].queues.all().next().unwrap().as_fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = Timespec::try_from(LONG).unwrap();
    assert_eq!(
        rustix::event::poll(&mut fds, Some(&timeout)),
        Ok(1),
        "no completion"
    );
}

#[test]
fn watch__an_answer_that_waits_for_the_thread_counts() {
    let mut both = Both::new("127.0.12.40:7174", SIZES, 4);
    let [there, here] = both.connect();
    both.server.watch(there);
    let mut now = Instant::now();
    both.server.handle_timers(now);
    now += LONG;
    arm(&both.server, 0);
    both.server.handle_timers(now);
    assert!(both.server.poll().is_none());
    assert!(both.server.connection(there).unwrap().is_probing());
    wait_for_completion(&both.server, 0);
    both.send(here, b"meanwhile");
    // The thread has not looked for longer than a peer may be silent, and its next poll does not begin with completions.
    now += LONG;
    both.server.polls = OTHERS_EVERY - 1;
    both.server.handle_timers(now);
    let slot = both.receive(there, b"meanwhile");
    both.server.connection(there).unwrap().give_back(slot);
    assert!(both.server.poll().is_none(), "the peer has answered");
    assert!(
        both.server.connection(there).unwrap().is_probing(),
        "the next probe"
    );
}

#[test]
fn watch__a_silent_peer_is_noticed_beside_completions_that_keep_coming() {
    let mut both = Both::new("127.0.12.45:7174", SIZES, 4);
    let ([silent, _], [there, here]) = (both.connect(), both.connect());
    both.server.watch(silent);
    let mut now = Instant::now();
    both.server.handle_timers(now);
    stop_sending(&mut both.server, silent);
    now += LONG;
    both.server.handle_timers(now);
    assert!(both.server.poll().is_none());
    (0..2).for_each(|_| both.send(here, b"on and on"));
    now += LONG;
    both.server.handle_timers(now);
    // The queue of completions is never empty.
    let mut messages = 0;
    let end = loop {
        match both.server.poll() {
            Some(ReactorEvent::Completed(of, Completed::Message { slot, .. })) if of == there => {
                both.server.connection(there).unwrap().give_back(slot.unwrap());
                both.send(here, b"on and on");
                messages += 1;
                assert!(messages < 10_000, "the silent peer is not noticed");
            }
            Some(ReactorEvent::Ended(of, end)) => break (of, end),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(end, (silent, ConnectionEnd::Silent));
}

#[test]
fn close__a_lingering_connection_reports_nothing_and_goes_at_its_time() {
    let address: SocketAddr = "127.0.12.10:7174".parse().unwrap();
    let own = Limits {
        shared_receives: None,
        ..limits(1)
    };
    let mut reactor = reactor_of::<Peer>(address, SIZES, own);
    let mailbox = reactor.mailbox();
    let connecting = std::thread::spawn(move || mailbox.send(Peer::connect(address).unwrap()));
    let (mut id, mut peer) = (None, None);
    while peer.is_none() {
        match next(&mut reactor) {
            ReactorEvent::Request(request) => {
                id = Some(reactor.accept(request, &ConnectParams::default()).unwrap());
            }
            ReactorEvent::Mail(came) => peer = Some(came),
            other => panic!("{other:?}"),
        }
    }
    assert!(connecting.join().unwrap());
    let mut peer = peer.unwrap();
    let began = Instant::now();
    reactor.close(id.unwrap(), Some(LONG));
    assert_eq!(reactor.connections(), 0);
    assert!(peer.send(b"nobody handles this"));
    let due = reactor.handle_timers(began).expect("a time at which it goes");
    assert!(due >= began + LONG);
    reactor.handle_timers(due);
    while peer.wait() != Err(Status::Flushed) {}
    assert!(reactor.poll().is_none());
}

#[test]
fn close__connections_go_in_the_order_of_their_times() {
    let mut both = Both::new("127.0.12.41:7174", SIZES, 0);
    let own = Limits {
        shared_receives: None,
        ..limits(2)
    };
    both.server = Reactor::new(SIZES, own, None).unwrap();
    both.server.listen(&both.device, both.address.port()).unwrap();
    let ([late, _], [early, its_peer]) = (both.connect(), both.connect());
    let began = Instant::now();
    both.server.close(late, Some(3 * LONG));
    both.server.close(early, Some(LONG));
    let due = both.server.handle_timers(began).unwrap();
    assert!(due < began + 2 * LONG, "the first to go is the first that is due");
    let due = both.server.handle_timers(due).unwrap();
    assert!(due >= began + 2 * LONG);
    assert!(matches!(next(&mut both.client), ReactorEvent::Ended(of, _) if of == its_peer));
}

/// A reactor that listens nowhere, and a device from which it connects.
fn dialer(from: &str, connections: usize, waiting: Option<WaitMode>) -> (Reactor<()>, Device) {
    let reactor = Reactor::new(PEER_SIZES, limits(connections), waiting).unwrap();
    (reactor, open(from.parse().unwrap()).unwrap())
}

fn next<M>(reactor: &mut Reactor<M>) -> ReactorEvent<M> {
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        if let Some(event) = reactor.next(Some(deadline)).unwrap() {
            return event;
        }
    }
    panic!("nothing has happened");
}

#[test]
fn connect__many_connections_of_one_thread_carry_messages() {
    let address = "127.0.12.11:7174".parse().unwrap();
    let server = Echo::start(address, 16);
    for waiting in [None, Some(WaitMode::Running), Some(WaitMode::Blocked)] {
        let (mut reactor, device) = dialer("127.0.12.12", 16, waiting);
        let ids: Vec<ConnectionId> = (0..16)
            .map(|_| {
                reactor
                    .connect(&device, address, &ConnectParams::default())
                    .unwrap()
            })
            .collect();
        let more = reactor.connect(&device, address, &ConnectParams::default());
        assert!(matches!(more, Err(ConnectionError::TooMany)), "{more:?}");
        let mut answered = Vec::new();
        while answered.len() < ids.len() {
            match next(&mut reactor) {
                ReactorEvent::Connected(id, result) => {
                    result.unwrap();
                    let connection = reactor.connection(id).unwrap();
                    let slot = connection.take_slot().unwrap();
                    connection.send(slot, &id.0.to_be_bytes()).unwrap();
                }
                ReactorEvent::Completed(id, Completed::Message { bytes, .. }) => {
                    assert_eq!(bytes, id.0.to_be_bytes());
                    answered.push(id);
                }
                other => panic!("{other:?}"),
            }
        }
        answered.sort_unstable();
        assert_eq!(answered, ids);
        for id in ids {
            reactor.close(id, None);
        }
        let again = reactor.connect(&device, address, &ConnectParams::default());
        assert!(again.is_ok(), "places are free again");
    }
    server.stop();
}

#[test]
fn connect__nobody_listens_and_withdrawn() {
    let address = "127.0.12.13:7174".parse().unwrap();
    let (mut reactor, device) = dialer("127.0.12.14", 1, None);
    let _listens_elsewhere = open("127.0.12.13".parse().unwrap()).unwrap();
    let id = reactor
        .connect(&device, address, &ConnectParams::default())
        .unwrap();
    match next(&mut reactor) {
        ReactorEvent::Connected(of, Err(EstablishError::Connect(ConnectError::Rejected { .. }))) => {
            assert_eq!(of, id);
        }
        other => panic!("{other:?}"),
    }
    let withdrawn = reactor
        .connect(&device, address, &ConnectParams::default())
        .unwrap();
    reactor.close(withdrawn, None);
    let id = reactor
        .connect(&device, address, &ConnectParams::default())
        .unwrap();
    assert!(matches!(next(&mut reactor), ReactorEvent::Connected(of, Err(_)) if of == id));
    assert_eq!(device.object_counts().0, 0, "queue pairs");
}

#[test]
fn connect__refused_and_then_accepted() {
    let mut both = Both::new("127.0.12.34:7174", SIZES, 1);
    let params = ConnectParams::default();
    for _ in 0..5 {
        let here = both.client.connect(&both.device, both.address, &params).unwrap();
        let ReactorEvent::Request(request) = next(&mut both.server) else {
            panic!("no request");
        };
        request.refuse("closed today");
        match next(&mut both.client) {
            ReactorEvent::Connected(
                of,
                Err(EstablishError::Connect(ConnectError::Rejected { private_data, .. })),
            ) => {
                assert_eq!(of, here);
                assert!(private_data.starts_with(b"closed today"), "{private_data:?}");
            }
            other => panic!("{other:?}"),
        }
        assert!(both.client.connection(here).is_none());
    }
    assert_eq!(
        posted_receives(&both.server),
        1,
        "a request that is refused adds none"
    );
    // All places are free.
    for round in 0..4 {
        let [there, here] = both.connect();
        both.send(here, &[round]);
        both.receive(there, &[round]);
    }
}

#[test]
fn add_descriptor__is_reported_while_it_is_readable() {
    for waiting in [None, Some(WaitMode::Running), Some(WaitMode::Blocked)] {
        let (mut reactor, _) = dialer("127.0.12.15", 1, waiting);
        let (silent, _silent) = UnixStream::pair().unwrap();
        let (read, mut write) = UnixStream::pair().unwrap();
        let ids = [silent, read].map(|socket| {
            let added = reactor.add_descriptor(socket.into(), Interest::READABLE);
            added.unwrap()
        });
        let writing = std::thread::spawn(move || {
            write.write_all(b"x").unwrap();
            write
        });
        for _ in 0..3 {
            assert!(matches!(next(&mut reactor), ReactorEvent::Readable(id) if id == ids[1]));
        }
        assert!(reactor.remove_descriptor(ids[1]).is_some());
        assert!(reactor.remove_descriptor(ids[1]).is_none());
        assert!(reactor.next(Some(Instant::now())).unwrap().is_none());
        drop(writing.join().unwrap());
    }
}

#[test]
fn next__a_look_that_is_held_off_loses_nothing() {
    for policy in ["rate", "dim", "100,500us"] {
        let address: SocketAddr = "127.0.12.29:7174".parse().unwrap();
        rdmux_soft::register();
        let options = Options {
            moderation: Some(policy.parse().unwrap()),
            ..Options::default()
        };
        let device = Device::open_with(address.ip(), options).unwrap();
        let mut reactor: Reactor<()> = Reactor::new(SIZES, limits(2), Some(WaitMode::Blocked)).unwrap();
        reactor.listen(&device, address.port()).unwrap();
        let sending: Vec<_> = (0..2)
            .map(|_| {
                std::thread::spawn(move || {
                    let mut peer = Peer::connect(address).unwrap();
                    for i in 0..500_u32 {
                        peer.send_soon(&i.to_be_bytes());
                        assert_eq!(peer.message().unwrap(), i.to_be_bytes());
                    }
                })
            })
            .collect();
        let mut ends = Vec::new();
        while ends.len() < 2 {
            let event = next(&mut reactor);
            echo(&mut reactor, event, &mut ends);
        }
        sending.into_iter().for_each(|peer| peer.join().unwrap());
        assert!(reactor.next(Some(Instant::now())).unwrap().is_none());
    }
}

#[test]
fn next__a_descriptor_is_reported_beside_a_stream_of_messages() {
    let address: SocketAddr = "127.0.12.16:7174".parse().unwrap();
    let mut reactor = reactor::<()>(address, 1);
    let ends = &mut Vec::new();
    let (read, mut write) = UnixStream::pair().unwrap();
    write.write_all(b"x").unwrap();
    let id = reactor.add_descriptor(read.into(), Interest::READABLE).unwrap();
    let stopped = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = stopped.clone();
    let sending = std::thread::spawn(move || {
        let mut peer = Peer::connect(address).unwrap();
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            if !peer.send(b"on and on") {
                peer.wait().unwrap();
            }
        }
        peer
    });
    let (mut messages, mut reported) = (0, 0);
    // A descriptor that is always readable leaves no wait without an event: only the thread's end tells that the peer has failed.
    while (messages < 100 || reported < 10) && !sending.is_finished() {
        match next(&mut reactor) {
            ReactorEvent::Readable(of) if of == id => reported += 1,
            event => {
                messages += u32::from(matches!(event, ReactorEvent::Completed(..)));
                echo(&mut reactor, event, ends);
            }
        }
    }
    stopped.store(true, std::sync::atomic::Ordering::Relaxed);
    while !sending.is_finished() {
        let event = next(&mut reactor);
        echo(&mut reactor, event, ends);
    }
    drop(sending.join().expect("the peer's thread"));
    assert!(
        messages >= 100 && reported >= 10,
        "{messages} messages, {reported} reports"
    );
}

#[test]
fn next__takes_the_place_of_the_engine_while_it_sleeps() {
    let address: SocketAddr = "127.0.12.17:7174".parse().unwrap();
    let device = open(address.ip()).unwrap();
    let limits = limits(1);
    let mut reactor = Reactor::<bool>::new(SIZES, limits, Some(WaitMode::Blocked)).unwrap();
    for port in [7174, 7175] {
        reactor.listen(&device, port).unwrap();
    }
    let mailbox = reactor.mailbox();
    let thread = std::thread::spawn(move || {
        loop {
            if let Some(ReactorEvent::Mail(true)) = reactor.next(None).unwrap() {
                return;
            }
        }
    });
    let deadline = Instant::now() + LONG;
    // As long as this thread has the place, the other one sleeps without it, until it is woken.
    while device.watch().is_some() {
        assert!(Instant::now() < deadline, "the reactor never takes the place");
        mailbox.send(false);
        std::thread::yield_now();
    }
    mailbox.send(true);
    thread.join().unwrap();
    assert!(device.watch().is_some(), "the place is given back");
}

#[test]
fn ended__a_connection_without_receives_reports_its_end() {
    let address: SocketAddr = "127.0.12.18:7174".parse().unwrap();
    let limits = limits(1);
    let none = Sizes {
        receives: 0,
        answers: 0,
        ..PEER_SIZES
    };
    let device = open(address.ip()).unwrap();
    for accepts in [true, false] {
        let mut server = Reactor::<()>::new(none, limits.clone(), None).unwrap();
        server.listen(&device, address.port()).unwrap();
        let mut client = Reactor::<()>::new(none, limits.clone(), None).unwrap();
        let attempt = client
            .connect(&device, address, &ConnectParams::default())
            .unwrap();
        let ReactorEvent::Request(request) = next(&mut server) else {
            panic!("no request");
        };
        let accepted = server.accept(request, &ConnectParams::default()).unwrap();
        assert!(matches!(
            next(&mut client),
            ReactorEvent::Connected(id, Ok(())) if id == attempt
        ));
        let (ending, staying, ended) = match accepts {
            true => (&mut client, &mut server, accepted),
            false => (&mut server, &mut client, attempt),
        };
        ending.close(if accepts { attempt } else { accepted }, None);
        assert!(matches!(
            next(staying),
            ReactorEvent::Ended(id, ConnectionEnd::Disconnected) if id == ended
        ));
        staying.close(ended, None);
        assert!(staying.poll().is_none());
    }
}

#[test]
fn watch__of_an_attempt_holds_for_its_connection() {
    let address = "127.0.12.19:7174".parse().unwrap();
    let server = Echo::start(address, 1);
    let (mut reactor, device) = dialer("127.0.12.22", 1, None);
    let id = reactor
        .connect(&device, address, &ConnectParams::default())
        .unwrap();
    reactor.watch(id);
    assert!(matches!(next(&mut reactor), ReactorEvent::Connected(of, Ok(())) if of == id));
    let began = Instant::now();
    reactor.handle_timers(began);
    reactor.handle_timers(began + LONG);
    assert!(reactor.poll().is_none());
    assert!(reactor.connection(id).unwrap().is_probing());
    server.stop();
}

/// Returns the number of receives that are posted for all connections of the first port.
fn posted_receives<M>(reactor: &Reactor<M>) -> usize {
    let receives = reactor.ports[0].receives.as_ref();
    receives.map_or(0, |receives| receives.posted())
}

/// A listening reactor and one that connects to it, both of this thread.
struct Both {
    server: Reactor<()>,
    client: Reactor<()>,
    device: Device,
    address: SocketAddr,
}

impl Both {
    fn new(address: &str, sizes: Sizes, shared_receives: usize) -> Both {
        let address: SocketAddr = address.parse().unwrap();
        let limits = Limits {
            shared_receives: Some(shared_receives),
            queues: Queues::Pool,
            ledger: None,
            ..limits(4)
        };
        let (client, device) = dialer(&address.ip().to_string(), 4, None);
        Both {
            server: reactor_of(address, sizes, limits),
            client,
            device,
            address,
        }
    }

    /// Connects; returns the connection as the server and the client know it.
    fn connect(&mut self) -> [ConnectionId; 2] {
        let params = ConnectParams {
            path_mtu_max: PathMtu::Bytes256,
            ..ConnectParams::default()
        };
        let here = self.client.connect(&self.device, self.address, &params).unwrap();
        let ReactorEvent::Request(request) = next(&mut self.server) else {
            panic!("no request");
        };
        let there = self.server.accept(request, &params).unwrap();
        assert!(matches!(next(&mut self.client), ReactorEvent::Connected(of, Ok(())) if of == here));
        [there, here]
    }

    fn send(&mut self, from: ConnectionId, message: &[u8]) {
        let link = self.client.connection(from).unwrap();
        let slot = link.take_slot().unwrap();
        link.send_reported(slot, message).unwrap();
        // The server's device has the message once it has acknowledged it.
        let event = loop {
            match next(&mut self.client) {
                // Each flushed request reports the end of another connection.
                ReactorEvent::Ended(of, _) if of != from => {}
                event => break event,
            }
        };
        assert!(
            matches!(event, ReactorEvent::Completed(of, Completed::Sent(sent)) if (of, sent) == (from, slot)),
            "{event:?}"
        );
        self.client.connection(from).unwrap().give_back(slot);
    }

    /// Waits until the server's device has noticed that a connection is over.
    fn wait_ended(&mut self, there: ConnectionId) {
        let began = Instant::now();
        while self.server.connection(there).unwrap().end().is_none() {
            assert!(began.elapsed() < LONG, "the connection goes on");
            std::thread::yield_now();
        }
    }

    #[track_caller]
    fn receive(&mut self, at: ConnectionId, message: &[u8]) -> SendSlot {
        match next(&mut self.server) {
            ReactorEvent::Completed(of, Completed::Message { slot, bytes }) => {
                assert_eq!((of, &*bytes), (at, message));
                slot.unwrap()
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn ended__behind_the_messages_of_a_connection_that_shares_receives() {
    let mut both = Both::new("127.0.12.24:7174", SIZES, 4);
    for others_first in [false, true] {
        let [there, here] = both.connect();
        (0..3).for_each(|round| both.send(here, &[round]));
        both.client.close(here, None);
        if others_first {
            // The queue of events, which reports the end of the connection, may be the first to be polled.
            both.wait_ended(there);
            assert!(both.server.poll_others().is_none());
        }
        for round in 0..3 {
            let event = next(&mut both.server);
            assert!(
                matches!(event, ReactorEvent::Completed(of, Completed::Message { bytes, .. }) if (of, &*bytes) == (there, &[round]))
            );
        }
        assert!(
            matches!(next(&mut both.server), ReactorEvent::Ended(of, ConnectionEnd::Disconnected) if of == there)
        );
        both.server.close(there, None);
        assert!(both.server.poll().is_none());
        assert_eq!(both.device.object_counts().0, 0, "queue pairs");
    }
}

#[test]
fn ended__completions_of_other_connections_that_keep_coming_delay_no_end() {
    let mut both = Both::new("127.0.12.30:7174", SIZES, 4);
    let ([ending, its_peer], [there, here]) = (both.connect(), both.connect());
    both.client.close(its_peer, None);
    both.wait_ended(ending);
    let ahead = 2;
    (0..ahead).for_each(|_| both.send(here, b"on and on"));
    let mut event = both.server.poll_others();
    // The queue of completions is never empty.
    let mut messages = 0;
    loop {
        match event.take().or_else(|| both.server.poll()) {
            Some(ReactorEvent::Completed(of, Completed::Message { slot, .. })) if of == there => {
                both.server.connection(there).unwrap().give_back(slot.unwrap());
                both.send(here, b"on and on");
                messages += 1;
            }
            Some(ReactorEvent::Ended(of, ConnectionEnd::Disconnected)) if of == ending => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(messages, ahead, "those before the end");
}

#[test]
fn ended__a_connection_that_stays_reports_its_end_once() {
    let mut both = Both::new("127.0.12.31:7174", SIZES, 4);
    let [there, here] = both.connect();
    let link = both.server.connection(there).unwrap();
    both.client.connection(here).unwrap().disconnect();
    // Each of these requests is flushed.
    for slot in 0..3 {
        link.send_reported(SendSlot::new(slot), b"answer").unwrap();
    }
    assert!(matches!(next(&mut both.server), ReactorEvent::Ended(of, _) if of == there));
    both.wait_ended(there);
    for _ in 0..100 {
        assert!(both.server.poll().is_none());
    }
    both.server.close(there, None);
    assert!(both.server.poll().is_none());
    assert_eq!(posted_receives(&both.server), 5, "none is lost");
}

#[test]
fn ended__a_peer_that_exceeds_its_credits_ends_alone() {
    let address: SocketAddr = "127.0.12.32:7174".parse().unwrap();
    let mut reactor = reactor::<Peer>(address, 2);
    let mailbox = reactor.mailbox();
    let flooding = std::thread::spawn(move || {
        let mut peer = Peer::connect(address).unwrap();
        loop {
            while peer.send(b"flood") {}
            if let Err(status) = peer.wait() {
                return status;
            }
        }
    });
    let going_on = std::thread::spawn(move || {
        let mut peer = Peer::connect(address).unwrap();
        for round in 0..200u32 {
            peer.send_soon(&round.to_be_bytes());
            assert_eq!(peer.message().unwrap(), round.to_be_bytes());
        }
        mailbox.send(peer);
    });
    let (mut flooded, mut ends, mut last) = (None, Vec::new(), None);
    while ends.is_empty() || last.is_none() {
        match next(&mut reactor) {
            // These get no answer, so that they keep their slots.
            ReactorEvent::Completed(id, Completed::Message { bytes, .. }) if bytes == b"flood" => {
                flooded = Some(id);
            }
            ReactorEvent::Mail(peer) => last = Some(peer),
            event => echo(&mut reactor, event, &mut ends),
        }
    }
    let excess = ConnectionEnd::Failed(Status::RemoteInvalidRequest);
    assert_eq!(ends, [(flooded.unwrap(), excess)]);
    flooding.join().unwrap();
    going_on.join().unwrap();
    assert!(reactor.poll().is_none());
    // Two for all, one for the connection that goes on, and perhaps that of the other, until it is used.
    assert!((3..=4).contains(&posted_receives(&reactor)), "none is lost");
}

#[test]
fn ended__an_access_that_is_refused_ends_a_connection_that_shares_receives() {
    let mut both = Both::new("127.0.12.25:7174", SIZES, 4);
    let [there, here] = both.connect();
    // The event of the establishment is taken before, so that only that of the failure wakes the reactor.
    assert!(both.server.poll().is_none());
    let link = both.client.connection(here).unwrap();
    let memory = Arc::new(AnonymousMemory::new(8).unwrap());
    let mr = link.pd().reg_mr_all(memory, 0, Access::LOCAL_WRITE).unwrap();
    let write = Operation::Write {
        va: 0,
        rkey: RKey(0x1234_5678),
        imm: None,
    };
    link.post(7, write, mr.sge(0, 8).into()).unwrap();
    let event = next(&mut both.server);
    let refused = ConnectionEnd::Failed(Status::RemoteAccess);
    assert!(
        matches!(event, ReactorEvent::Ended(of, end) if (of, end) == (there, refused)),
        "{event:?}"
    );
}

#[test]
fn next__messages_of_a_connection_that_shares_receives_wait_for_slots() {
    let mut both = Both::new("127.0.12.26:7174", SIZES, 1);
    let [there, here] = both.connect();
    let mut taken = VecDeque::new();
    for round in 0..SIZES.answers as u8 {
        both.send(here, &[round]);
        taken.push_back(both.receive(there, &[round]));
    }
    let more = SIZES.answers as u8..(SIZES.answers + SIZES.receives) as u8;
    for round in more.clone() {
        both.send(here, &[round]);
        assert!(both.server.poll().is_none(), "no slot is free");
    }
    for round in more {
        let slot = taken.pop_front().unwrap();
        both.server.connection(there).unwrap().give_back(slot);
        taken.push_back(both.receive(there, &[round]));
        assert!(both.server.poll().is_none(), "no slot is free");
    }
    // A peer that sends more than it may is disconnected.
    for round in 0..SIZES.receives as u8 {
        both.send(here, &[round]);
        assert!(both.server.poll().is_none(), "no slot is free");
    }
    both.send(here, b"one too many");
    let event = next(&mut both.server);
    let excess = ConnectionEnd::Failed(Status::RemoteInvalidRequest);
    assert!(
        matches!(event, ReactorEvent::Ended(of, end) if (of, end) == (there, excess)),
        "{event:?}"
    );
}

#[test]
fn next__peers_that_never_finish_a_message_keep_no_receive_of_the_others() {
    // What one packet carries within a host.
    const FIRST_BYTES: u32 = 32 << 10;
    let sizes = Sizes {
        message_bytes: 2 * (FIRST_BYTES as usize),
        sent_bytes: 2 * (FIRST_BYTES as usize),
        ..SIZES
    };
    let mut both = Both::new("127.0.12.27:7174", sizes, 0);
    let [there, here] = both.connect();
    for _ in 0..3 {
        let [stuck_there, stuck] = both.connect();
        let link = both.client.connection(stuck).unwrap();
        let memory = Arc::new(AnonymousMemory::new(FIRST_BYTES as usize).unwrap());
        let mr = link.pd().reg_mr_all(memory, 0, Access::LOCAL_WRITE).unwrap();
        // The first packet leaves; the second cannot be built.
        let none = Sge {
            lkey: 0x1234_5678,
            ..mr.sge(0, 256)
        };
        let half = SendRequest::send(SgeList::from(&[mr.sge(0, FIRST_BYTES), none][..]));
        link.qp().post_send(half.signaled()).unwrap();
        assert!(
            matches!(next(&mut both.client), ReactorEvent::Ended(of, ConnectionEnd::Failed(_)) if of == stuck)
        );
        let began = Instant::now();
        while posted_receives(&both.server) != 1 {
            assert!(
                began.elapsed() < LONG,
                "the first packet takes one of the two receives"
            );
        }
        for round in 0..20 {
            both.send(here, &[round]);
            let slot = both.receive(there, &[round]);
            both.server.connection(there).unwrap().give_back(slot);
        }
        both.client.close(stuck, None);
        assert!(matches!(next(&mut both.server), ReactorEvent::Ended(of, _) if of == stuck_there));
        both.server.close(stuck_there, None);
        assert!(both.server.poll().is_none());
        assert_eq!(posted_receives(&both.server), 2, "none is lost");
    }
}

#[test]
fn accept__the_place_of_a_closed_connection_is_free_at_once() {
    let mut both = Both::new("127.0.12.28:7174", SIZES, 1);
    let mut connected: Vec<_> = (0..4).map(|_| both.connect()).collect();
    for round in 0..40 {
        let [there, here] = connected.remove(0);
        both.send(here, b"last words");
        both.client.close(here, None);
        loop {
            match next(&mut both.server) {
                ReactorEvent::Completed(of, Completed::Message { .. }) => assert_eq!(of, there),
                ReactorEvent::Ended(of, _) => break assert_eq!(of, there),
                other => panic!("{round}: {other:?}"),
            }
        }
        // A peer whose queue pair has not failed does not linger: it would take receives.
        both.server.close(there, Some(LONG));
        connected.push(both.connect());
    }
    connected
        .drain(..)
        .for_each(|[there, _]| both.server.close(there, None));
    assert!(both.server.poll().is_none());
    assert_eq!(posted_receives(&both.server), 5, "none is lost");
}

mod descriptors;
mod ports;
mod queues;

#[test]
fn poll_armed__an_end_that_no_completion_will_tell_is_returned_before_a_sleep() {
    let mut both = Both::new("127.0.12.46:7174", SIZES, 4);
    both.server.limits.queues = Queues::Private;
    let device = both.server.ports[0].device.clone();
    both.server.ports[0].queues = PortQueues::private(&device, 0);
    let [there, here] = both.connect();
    // The next messages overrun it.
    both.server.connections[&there].cq.resize(1).unwrap();
    for message in [b"1", b"2"] {
        let link = both.client.connection(here).unwrap();
        let slot = link.take_slot().unwrap();
        link.send(slot, message).unwrap();
    }
    let began = Instant::now();
    // A look before the second message has come would make room for it.
    while both.server.connection(there).unwrap().qp().query().unwrap().state != QpState::Error {
        assert!(began.elapsed() < LONG, "the queue is not overrun");
    }
    loop {
        match both.server.poll_armed(&mut Vec::new()).unwrap() {
            Some(ReactorEvent::Ended(of, _)) if of == there => return,
            Some(_) => {}
            // The thread may sleep now.
            None => assert_eq!(both.server.connections[&there].stage, Stage::Open),
        }
        assert!(began.elapsed() < LONG, "the end is not returned");
    }
}
