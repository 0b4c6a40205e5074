//! Victims beside attackers on one node, under a virtual clock: what an application does to the latency and the bandwidth of another one.
//!
//! The node's parts are the real ones: [`Egress`] with its hierarchy and windows, [`Mux`] at both ends with its slots, credits and keys, and
//! [`Turns`]. Modelled are its thread, each of whose steps takes a time, in the order of `Worker::pass`; a device that sends at a rate and
//! completes each request some time after its last byte; and a peer's node whose thread is never busy.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use rdmux_rnic::sched::{Entitlement, Quanta};
use rdmux_rnic::{Access, LKey, Operation, Qpn, RKey, SendFlags, SgeList, WcOpcode};
use rdmux_rnic::{RecvRequest, SendRequest, Sge, Status, Target, Time};
use rdmux_wire::node::mux::HEADER_LEN;

use super::cut::may_cut;
use super::egress::{self, Egress, FlowId, GroupId, GroupOptions, Owner, PieceId};
use super::limits;
use super::mux::keys::{Extent, Keys, OwnRegions, PeerKey, PeerKeys};
use super::mux::receiver::Receiver;
use super::mux::{Bound, ConnectionId, Event as MuxEvent, Mux, Post, Posted};
use super::peer::{SENDS, SLOTS};
use super::post::{BATCH, takes_slot};
use super::turns::{Batches, Turn, Turns};

/// Time of the node's thread for a request that it takes, for a piece that it posts, for a completion, and for a pass besides.
const TAKE_NS: u64 = 100;
const POST_NS: u64 = 150;
const COMPLETE_NS: u64 = 100;
const PASS_NS: u64 = 100;
/// Time of the node's thread for a registration, and to connect or disconnect.
const REGISTER_NS: u64 = 20_000;
const CONNECT_NS: u64 = 50_000;
/// The link, of 100 Gbit/s in both directions: time for a byte in picoseconds. Time from the last byte to the completion, and to the peer.
const BYTE_PS: u64 = 80;
const COMPLETION_NS: u64 = 4_000;
const WAY_NS: u64 = 2_000;
/// Time in which an application answers a completion with the next request.
const APPLICATION_NS: u64 = 100;
/// READs and atomic operations that a shared queue pair may have in flight.
const READS: u32 = 16;

const START: u64 = 1 << 20;
const REGION: u64 = 1 << 30;
const KIB: u32 = 1 << 10;
const MIB: u32 = 1 << 20;

/// The work that the connections of an application do, again and again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Write,
    Read,
    Send,
    /// A WRITE with a key that does not exist; then they connect anew.
    BadKey,
    /// Registrations of memory.
    Register,
    /// They connect, WRITE once and disconnect.
    Connect,
}

/// An application.
#[derive(Clone, Copy, Debug)]
struct Load {
    kind: Kind,
    bytes: u32,
    /// Requests of a connection that are outstanding.
    outstanding: usize,
    connections: usize,
    /// The first so many of which the other application never posts receives for.
    without_receives: usize,
    /// Time in which it answers a completion with the next request.
    answer_ns: u64,
}

const fn load(kind: Kind, bytes: u32, outstanding: usize, connections: usize) -> Load {
    Load {
        kind,
        bytes,
        outstanding,
        connections,
        without_receives: 0,
        answer_ns: APPLICATION_NS,
    }
}

/// Result of the first application.
#[derive(Clone, Debug, Default)]
struct Measured {
    latencies_ns: Vec<u64>,
    bytes: u64,
    ns: u64,
    /// Passes that have posted something: the requests of each are posted as one list to each queue pair.
    lists: u64,
}

impl Measured {
    fn p(&self, percent: usize) -> f64 {
        self.latencies_ns[self.latencies_ns.len() * percent / 100] as f64 / 1000.0
    }

    fn gbps(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.ns as f64
    }
}

#[derive(Debug)]
enum Event {
    /// An application posts a request on a connection.
    Posts(usize, usize),
    /// An application asks for something about its objects.
    Asks(usize),
    /// A request of a shared queue pair completes.
    Completes(usize, u64),
    /// A message arrives at the peer's node, and from there.
    Arrives(usize, Vec<u8>),
    Answers(usize, Vec<u8>),
    /// A message of the peer's node completes.
    PeerCompletes(usize, u64),
    /// The peer's node answers about a key.
    KeyTold(usize, u64, RKey),
}

/// A connection of an application.
#[derive(Debug)]
struct Connection {
    flow: FlowId,
    id: ConnectionId,
    far: ConnectionId,
    /// Requests that it has posted and that are not over, and when.
    posted: VecDeque<(u64, u64)>,
    has_failed: bool,
}

#[derive(Debug)]
struct Application {
    load: Load,
    line: usize,
    connections: Vec<Connection>,
    /// Requests in its ring: the connection, and when it was posted.
    ring: VecDeque<(usize, u64)>,
    registered: u32,
}

/// A shared queue pair, both ends of it.
struct Line {
    near: Mux,
    far: Mux,
    group: GroupId,
    near_keys: Keyring,
    far_keys: Keyring,
    /// Connections by their ids here and there.
    by_id: HashMap<ConnectionId, (usize, usize)>,
    by_far: HashMap<ConnectionId, (usize, usize)>,
    last_completion_ps: u64,
}

#[derive(Debug, Default)]
struct Keyring {
    own: OwnRegions<()>,
    of_peer: PeerKeys,
}

impl Keys for Keyring {
    fn own(&mut self, domain: u64, lkey: LKey, range: (u64, u64), access: Access) -> Option<(LKey, RKey)> {
        self.own.get(domain, lkey, range, access)?;
        Some((lkey, RKey(lkey.0)))
    }

    fn peer(&mut self, domain: u64, rkey: RKey, range: (u64, u64), access: Access) -> PeerKey {
        self.of_peer.get(domain, rkey, range, access)
    }
}

const ALL: Access = Access::from_bits_truncate(0x30f);
const EXTENT: Extent = Extent {
    start: START,
    length: REGION,
    access: ALL,
};

/// Entries of the completion queue of the shared queue pairs: completed requests, and messages.
#[derive(Debug)]
enum Found {
    Completed(usize, u64),
    Message(usize, Vec<u8>),
}

struct World {
    now_ps: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    planned: HashMap<u64, Event>,
    number: u64,
    egress: Egress<SendRequest>,
    turns: Turns,
    lines: Vec<Line>,
    cq: VecDeque<Found>,
    applications: Vec<Application>,
    by_flow: HashMap<FlowId, (usize, usize)>,
    /// Times from which the link sends, there and back.
    free_ps: [u64; 2],
    next_qpn: u32,
    next_key: u32,
    measured_from_ps: u64,
    measured: Measured,
}

/// Decides about requests as `sharing::Gate` does.
struct Gate<'a> {
    lines: &'a mut [Line],
    applications: &'a [Application],
    by_flow: &'a HashMap<FlowId, (usize, usize)>,
}

impl egress::Gate<SendRequest> for Gate<'_> {
    fn admit(
        &mut self,
        flow: FlowId,
        _request: &egress::Request,
        body: &SendRequest,
        offset: u32,
    ) -> egress::Admission {
        let (application, connection) = self.by_flow[&flow];
        let application = &self.applications[application];
        let Line { near, near_keys, .. } = &mut self.lines[application.line];
        let admitted = near.admit(application.connections[connection].id, body, offset, near_keys);
        super::sharing::admission(admitted, body)
    }
}

impl World {
    /// `loads`: the applications, and the queue pairs that they share.
    fn new(loads: &[(Load, usize)]) -> World {
        let limits = limits::of_device("hw", Quanta::default(), None);
        let mut egress = Egress::new(Time(0), limits);
        let count = loads.iter().map(|(_, line)| line + 1).max().unwrap_or(0);
        let lines = (0..count).map(|_| {
            let tenant = egress.add_tenant(&Entitlement::default());
            let options = GroupOptions {
                class: 0,
                path_mtu: 4096,
                depth: SENDS / 4,
                slots: Some(READS),
                may_be_quiet: false,
            };
            Line {
                near: Mux::new(SLOTS),
                far: Mux::new(SLOTS),
                group: egress.add_group(Time(0), tenant, &options).unwrap(),
                near_keys: Keyring::default(),
                far_keys: Keyring::default(),
                by_id: HashMap::new(),
                by_far: HashMap::new(),
                last_completion_ps: 0,
            }
        });
        let lines = lines.collect();
        let mut world = World {
            now_ps: 0,
            events: BinaryHeap::new(),
            planned: HashMap::new(),
            number: 0,
            egress,
            turns: Turns::new(Time(0)),
            lines,
            cq: VecDeque::new(),
            applications: Vec::new(),
            by_flow: HashMap::new(),
            free_ps: [0; 2],
            next_qpn: 0x100,
            next_key: 1 << 24,
            measured_from_ps: u64::MAX,
            measured: Measured::default(),
        };
        for (at, (load, line)) in loads.iter().enumerate() {
            world.applications.push(Application {
                load: *load,
                line: *line,
                connections: Vec::new(),
                ring: VecDeque::new(),
                registered: 0,
            });
            let region = (LKey(at as u32 + 1), RKey(at as u32 + 1));
            let Line {
                near_keys, far_keys, ..
            } = &mut world.lines[*line];
            near_keys.own.insert(at as u64, region, EXTENT, ());
            far_keys.own.insert(at as u64, region, EXTENT, ());
            for connection in 0..load.connections {
                world.connect(at, connection);
                for _ in 0..load.outstanding {
                    world.plan(0, Event::Posts(at, connection));
                }
            }
            if matches!(load.kind, Kind::Register | Kind::Connect) {
                world.plan(0, Event::Asks(at));
            }
        }
        world
    }

    fn now(&self) -> Time {
        Time(self.now_ps / 1000)
    }

    fn plan(&mut self, after_ns: u64, event: Event) {
        self.plan_at(self.now_ps + after_ns * 1000, event);
    }

    fn plan_at(&mut self, at_ps: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at_ps, self.number)));
        self.planned.insert(self.number, event);
    }

    /// Has a connection go over the shared queue pair of its application, in place of the one that it was.
    fn connect(&mut self, at: usize, connection: usize) {
        let now = self.now();
        self.disconnect(at, connection);
        let application = &mut self.applications[at];
        let line = &mut self.lines[application.line];
        let owner = Owner {
            application: at as u32,
            qp: connection as u32,
        };
        let flow = self.egress.add_flow(owner, 4096).unwrap();
        let [own, peer] = [self.next_qpn, self.next_qpn + 1].map(Qpn::new);
        self.next_qpn = (self.next_qpn + 2) % (1 << 24);
        let bound = Bound {
            own,
            peer,
            domain: at as u64,
            peer_domain: at as u64,
            peer_access: ALL,
            replays_writes: false,
        };
        let far = Bound {
            own: peer,
            peer: own,
            ..bound
        };
        let id = line.near.bind(bound, Receiver::new(64)).unwrap();
        let mut receives = Receiver::new(64);
        if connection >= application.load.without_receives {
            (0..64).for_each(|_| receives.post(receive(at)).unwrap());
        }
        let far = line.far.bind(far, receives).unwrap();
        line.by_id.insert(id, (at, connection));
        line.by_far.insert(far, (at, connection));
        self.by_flow.insert(flow, (at, connection));
        self.egress.bind(now, flow, line.group);
        let connected = Connection {
            flow,
            id,
            far,
            posted: VecDeque::new(),
            has_failed: false,
        };
        match application.connections.get_mut(connection) {
            Some(place) => *place = connected,
            None => application.connections.push(connected),
        }
        let line = application.line;
        self.peer_works(line);
    }

    /// Ends a connection, as the node does when a queue pair is destroyed.
    fn disconnect(&mut self, at: usize, connection: usize) {
        let now = self.now();
        let application = &mut self.applications[at];
        let Some(old) = application.connections.get(connection) else {
            return;
        };
        let line = &mut self.lines[application.line];
        line.by_id.remove(&old.id);
        line.by_far.remove(&old.far);
        line.near.abandon(old.id);
        line.far.abandon(old.far);
        self.egress.remove_flow(now, old.flow);
        self.by_flow.remove(&old.flow);
        application.ring.retain(|(of, _)| *of != connection);
        let line = application.line;
        self.peer_works(line);
    }

    fn request(&mut self, at: usize) -> SendRequest {
        let load = self.applications[at].load;
        let key = at as u32 + 1;
        let (va, rkey) = (START, RKey(key));
        let operation = match load.kind {
            Kind::Read => Operation::Read { va, rkey },
            Kind::Send => Operation::Send { imm: None },
            Kind::BadKey => {
                self.next_key += 1;
                let rkey = RKey(self.next_key);
                Operation::Write { va, rkey, imm: None }
            }
            Kind::Write | Kind::Register | Kind::Connect => Operation::Write { va, rkey, imm: None },
        };
        SendRequest {
            wr_id: 0,
            operation,
            sges: Sge::new(START, load.bytes, LKey(key)).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        }
    }

    /// Has happen what happens up to now besides the node's thread.
    fn happen(&mut self) {
        while let Some(Reverse((at_ps, number))) = self.events.peek().copied()
            && at_ps <= self.now_ps
        {
            self.events.pop();
            let event = self.planned.remove(&number).expect("each event once");
            match event {
                Event::Posts(at, connection) => {
                    self.applications[at].ring.push_back((connection, at_ps));
                }
                Event::Asks(at) => self.turns.want(Turn::Message(at as u32)),
                Event::Completes(line, number) => self.cq.push_back(Found::Completed(line, number)),
                Event::Answers(line, bytes) => self.cq.push_back(Found::Message(line, bytes)),
                Event::PeerCompletes(line, number) => {
                    self.lines[line].far.handle_completion(number, Status::Success);
                    self.peer_works(line);
                }
                Event::Arrives(line, bytes) => {
                    let Line { far, far_keys, .. } = &mut self.lines[line];
                    let received = far.handle_message(&bytes, far_keys).expect("a message of a node");
                    if let Some(received) = received
                        && let Some((at, _)) = self.lines[line].by_far.get(&received.id).copied()
                    {
                        let _ = self.lines[line].far.post_recv(received.id, receive(at));
                    }
                    self.peer_works(line);
                }
                Event::KeyTold(line, domain, rkey) => {
                    let Line {
                        near,
                        near_keys,
                        far_keys,
                        ..
                    } = &mut self.lines[line];
                    let told = far_keys.own.get_remote(domain, rkey);
                    let told = told.map(|(extent, ())| (rkey, extent));
                    near_keys.of_peer.answered(domain, rkey, told);
                    near.keys_answered();
                }
            }
        }
    }

    /// Has the peer's node send what it has to say.
    fn peer_works(&mut self, line: usize) {
        let mut posts = Vec::new();
        let Line { far, far_keys, .. } = &mut self.lines[line];
        while let Some(post) = far.poll_message(far_keys) {
            posts.push(post);
        }
        while far.poll_event().is_some() {}
        for post in posts {
            let Posted::Message { header, body, .. } = post.request else {
                panic!("the peer's application sends nothing");
            };
            self.plan(WAY_NS, Event::Answers(line, message(&header, &body)));
            self.plan(COMPLETION_NS, Event::PeerCompletes(line, post.number));
        }
    }

    fn works(&mut self, ns: u64) {
        self.now_ps += ns * 1000;
        self.happen();
    }

    /// A pass of the node's thread. Returns whether there was anything to do.
    fn pass(&mut self) -> bool {
        self.works(PASS_NS);
        let began = self.now();
        let batches = Batches::of(self.egress.is_beside_short(began), self.turns.are_together(began));
        let mut any = false;
        for at in 0..self.applications.len() {
            for _ in 0..batches.requests {
                let Some((connection, posted_ps)) = self.applications[at].ring.pop_front() else {
                    break;
                };
                any = true;
                self.turns.moved(began, at as u32);
                self.take(at, connection, posted_ps);
                self.works(TAKE_NS);
            }
        }
        let posted = self.post(batches);
        if posted && self.now_ps >= self.measured_from_ps {
            self.measured.lists += 1;
        }
        any |= posted;
        any |= self.share();
        let told = self.tell();
        let turn = self.take_turn();
        any || told || turn
    }

    fn take(&mut self, at: usize, connection: usize, posted_ps: u64) {
        let now = self.now();
        let request = self.request(at);
        self.number += 1;
        let known = egress::Request {
            number: self.number,
            opcode: WcOpcode::Write,
            length: request.check().unwrap(),
            kept_bytes: 0,
            asks: true,
            cuts: may_cut(&request),
            takes_slot: takes_slot(&request.operation),
            refused: None,
        };
        let of = &mut self.applications[at].connections[connection];
        of.posted.push_back((self.number, posted_ps));
        self.egress.submit(now, of.flow, known, request).unwrap();
    }

    fn post(&mut self, mut batch: Batches) -> bool {
        let mut any = false;
        while batch.has_room() {
            let now = self.now();
            let mut gate = Gate {
                lines: &mut self.lines,
                applications: &self.applications,
                by_flow: &self.by_flow,
            };
            let next = self.egress.next(now, &mut gate);
            self.ask_for_keys();
            let Some(piece) = next else { break };
            any = true;
            batch.posted(piece.length);
            let (at, connection) = self.by_flow[&piece.flow];
            let line = self.applications[at].line;
            let id = self.applications[at].connections[connection].id;
            let request = self.egress.body(&piece).unwrap();
            let Line { near, near_keys, .. } = &mut self.lines[line];
            let part = (piece.offset, piece.length);
            let sent = near.send(id, request, part, piece.last, piece.id.wr_id(), near_keys);
            if piece.last {
                self.egress.take_body(&piece);
            }
            let posts = sent.expect("a piece that was admitted");
            self.works(POST_NS);
            for post in [posts.first, posts.then].into_iter().flatten() {
                self.device_posts(line, post);
            }
        }
        any
    }

    fn ask_for_keys(&mut self) {
        for line in 0..self.lines.len() {
            while let Some((domain, rkey)) = self.lines[line].near_keys.of_peer.poll_wanted() {
                self.plan(2 * WAY_NS, Event::KeyTold(line, domain, rkey));
            }
        }
    }

    /// Sends a request of a shared queue pair.
    fn device_posts(&mut self, line: usize, post: Post) {
        let sent_ps = |free_ps: &mut u64, from_ps: u64, bytes: u64| {
            *free_ps = (*free_ps).max(from_ps) + bytes * BYTE_PS;
            *free_ps
        };
        let end_ps = match &post.request {
            Posted::Direct(Operation::Read { .. }, list) => {
                let there_ps = sent_ps(&mut self.free_ps[0], self.now_ps, 0) + WAY_NS * 1000;
                sent_ps(&mut self.free_ps[1], there_ps, list.bytes()) + WAY_NS * 1000
            }
            Posted::Direct(_, list) => {
                sent_ps(&mut self.free_ps[0], self.now_ps, list.bytes()) + COMPLETION_NS * 1000
            }
            Posted::Message { header, body, .. } => {
                let bytes = message(header, body);
                let there_ps = sent_ps(&mut self.free_ps[0], self.now_ps, bytes.len() as u64);
                self.plan_at(there_ps + WAY_NS * 1000, Event::Arrives(line, bytes));
                there_ps + COMPLETION_NS * 1000
            }
        };
        // A queue pair completes its requests in order.
        let last_ps = &mut self.lines[line].last_completion_ps;
        *last_ps = (*last_ps).max(end_ps);
        let end_ps = *last_ps;
        self.plan_at(end_ps, Event::Completes(line, post.number));
    }

    /// Handles completions and messages of shared queue pairs, as `Sharing::poll` does.
    fn share(&mut self) -> bool {
        let mut any = false;
        for _ in 0..BATCH {
            match self.cq.pop_front() {
                None => break,
                Some(Found::Completed(line, number)) => {
                    self.lines[line].near.handle_completion(number, Status::Success);
                }
                Some(Found::Message(line, bytes)) => {
                    let Line { near, near_keys, .. } = &mut self.lines[line];
                    near.handle_message(&bytes, near_keys)
                        .expect("a message of a node");
                }
            }
            any = true;
            self.works(COMPLETE_NS);
        }
        for line in 0..self.lines.len() {
            loop {
                let Line { near, near_keys, .. } = &mut self.lines[line];
                let Some(post) = near.poll_message(near_keys) else {
                    break;
                };
                self.works(POST_NS);
                self.device_posts(line, post);
            }
            while let Some(event) = self.lines[line].near.poll_event() {
                any = true;
                self.has_news(line, event);
            }
        }
        any
    }

    fn has_news(&mut self, line: usize, event: MuxEvent) {
        let now = self.now();
        match event {
            MuxEvent::Landed(tag, status) => {
                let piece = PieceId::of_wr_id(tag).unwrap();
                assert_eq!(status, Status::Success);
                self.egress.completed(now, piece);
            }
            MuxEvent::Wake(id) | MuxEvent::Failed(id, _) => {
                let Some((at, connection)) = self.lines[line].by_id.get(&id).copied() else {
                    return;
                };
                let flow = self.applications[at].connections[connection].flow;
                match event {
                    MuxEvent::Wake(_) => self.egress.release(now, flow),
                    _ => self.egress.fail(now, flow),
                }
            }
            MuxEvent::Answer(..)
            | MuxEvent::Culprit(_)
            | MuxEvent::Received(..)
            | MuxEvent::Released(_)
            | MuxEvent::Ended(_) => {}
        }
    }

    /// Tells applications which of their requests are over.
    fn tell(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.egress.poll_done() {
            any = true;
            let (at, connection) = (done.owner.application as usize, done.owner.qp as usize);
            let (now, told_ps) = (self.now(), self.now_ps);
            let application = &mut self.applications[at];
            let of = &mut application.connections[connection];
            let Some((number, posted_ps)) = of.posted.pop_front() else {
                continue;
            };
            assert_eq!(number, done.number, "completions in order");
            self.turns.moved(now, at as u32);
            if done.status != Status::Success {
                assert!(application.load.kind == Kind::BadKey, "{done:?}");
                if !std::mem::replace(&mut of.has_failed, true) {
                    self.plan(APPLICATION_NS, Event::Asks(at));
                }
                continue;
            }
            if at == 0 && told_ps >= self.measured_from_ps {
                self.measured.latencies_ns.push((told_ps - posted_ps) / 1000);
                self.measured.bytes += u64::from(done.length);
            }
            let load = application.load;
            match load.kind {
                Kind::Connect => self.plan(APPLICATION_NS, Event::Asks(at)),
                _ => self.plan(load.answer_ns, Event::Posts(at, connection)),
            }
        }
        any
    }

    fn take_turn(&mut self) -> bool {
        let began = self.now();
        let Some(turn) = self.turns.next(began, self.egress.is_beside_short(began)) else {
            return false;
        };
        let Turn::Message(at) = turn else {
            panic!("{turn:?}");
        };
        let at = at as usize;
        match self.applications[at].load.kind {
            Kind::Register => {
                let application = &mut self.applications[at];
                application.registered += 1;
                let key = (1 << 30) + application.registered;
                let keys = &mut self.lines[application.line].near_keys.own;
                keys.insert(at as u64, (LKey(key), RKey(key)), EXTENT, ());
                if application.registered > 1000 {
                    keys.remove(LKey(key - 1000));
                }
                self.works(REGISTER_NS);
                self.plan(APPLICATION_NS, Event::Asks(at));
            }
            Kind::Connect => {
                let load = self.applications[at].load;
                let connection = self.applications[at].registered as usize % load.connections;
                self.applications[at].registered += 1;
                self.connect(at, connection);
                self.works(CONNECT_NS);
                (0..load.outstanding).for_each(|_| self.plan(APPLICATION_NS, Event::Posts(at, connection)));
                self.plan(APPLICATION_NS, Event::Asks(at));
            }
            Kind::BadKey => {
                let failed = self.applications[at]
                    .connections
                    .iter()
                    .position(|it| it.has_failed);
                if let Some(connection) = failed {
                    let load = self.applications[at].load;
                    self.connect(at, connection);
                    self.works(CONNECT_NS);
                    (0..load.outstanding)
                        .for_each(|_| self.plan(APPLICATION_NS, Event::Posts(at, connection)));
                    self.plan(APPLICATION_NS, Event::Asks(at));
                }
            }
            other => panic!("{other:?} asks for nothing"),
        }
        self.turns.took(self.now(), turn, self.now().since_ns(began));
        true
    }

    /// Runs for `warm_up_ns`, and then for `measured_ns`, whose results of the first application it returns.
    fn run(mut self, warm_up_ns: u64, measured_ns: u64) -> Measured {
        self.measured_from_ps = warm_up_ns * 1000;
        let end_ps = self.measured_from_ps + measured_ns * 1000;
        while self.now_ps < end_ps {
            self.happen();
            if self.pass() {
                continue;
            }
            let now = self.now();
            let event = self.events.peek().map(|Reverse((at_ps, _))| *at_ps);
            let turn = self.turns.next_time(self.egress.is_beside_short(now));
            let sent = self.egress.next_time(now);
            let timer = turn.into_iter().chain(sent).map(|at| at.0 * 1000 + 1000).min();
            let next_ps = event
                .into_iter()
                .chain(timer)
                .min()
                .expect("somebody has something");
            self.now_ps = self.now_ps.max(next_ps);
        }
        self.measured.ns = measured_ns;
        self.measured.latencies_ns.sort_unstable();
        self.measured
    }
}

fn receive(at: usize) -> RecvRequest {
    RecvRequest {
        wr_id: 0,
        sges: Sge::new(START, MIB, LKey(at as u32 + 1)).into(),
    }
}

fn message(header: &[u8; HEADER_LEN], body: &SgeList) -> Vec<u8> {
    let mut bytes = header.to_vec();
    match body.as_inline() {
        Some(inline) => bytes.extend(inline),
        None => bytes.resize(HEADER_LEN + body.bytes() as usize, 0),
    }
    bytes
}

#[cfg(test)]
mod tests;
