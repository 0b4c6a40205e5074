//! Many nodes under a virtual clock: how many shared queue pairs they have, how long a message waits for one, and what each application gets.
//!
//! Of each node run the real pool of shared queue pairs and the real scheduler with its windows. Links have a rate; what is posted in a step
//! completes in the next one, and so do the nodes' messages to each other. An application sends a message after the other, most of
//! them to a few neighbours and the others to anybody.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use rdmux_rnic::sched::{Entitlement, Quanta, TenantId};
use rdmux_rnic::{Time, WcOpcode};
use rdmux_wire::node::mux::SLOT_LEN;
use rdmux_wire::node::peer::TenantName;

use super::egress::{self, Egress, FlowId, GroupId, GroupOptions, Owner, PieceId};
use super::limits;
use super::mux::Mux;
use super::peer::pool::{Pool, Step};
use super::peer::{PeerId, SENDS, SLOTS, SharedBy, SharedId};

/// A step: the round trip of everything.
const STEP_NS: u64 = 20_000;
/// Bytes that a link of 100 Gbit/s sends in a step.
const STEP_BYTES: u64 = STEP_NS * 25 / 2;
/// Connections of an application that send at any time, and neighbours to whom nine of ten messages go.
const OUTSTANDING: u32 = 2;
const NEIGHBOURS: u64 = 16;
/// Requests of a connection that are not complete.
const REQUESTS_MAX: u32 = 1 << 10;
/// Length of a message.
const LENGTH: u32 = 256 << 10;

/// Settings of a simulation.
#[derive(Clone, Copy, Debug)]
struct Settings {
    /// Nodes, at least 2.
    nodes: u32,
    /// Applications of a node.
    applications: u32,
    /// Traffic classes: application `n` has class `n` modulo so many.
    classes: u32,
    /// Shared queue pairs of a node.
    queue_pairs_max: usize,
    /// Virtual time in nanoseconds.
    virtual_ns: u64,
    /// Seed of the traffic.
    seed: u64,
}

/// Result of a run. Means are over nodes.
#[derive(Clone, Debug, Default)]
struct Report {
    /// Shared queue pairs of a node at the end: the mean, and the most.
    queue_pairs: (f64, usize),
    /// Those that a node has opened in a second, and those that it has closed.
    opened_per_second: f64,
    /// As [`Report::opened_per_second`].
    closed_per_second: f64,
    /// Messages that were complete.
    messages: u64,
    /// Part of the messages that waited for a queue pair, and the 99th percentile of their waits in microseconds.
    waited: f64,
    /// See [`Report::waited`].
    wait_p99_us: f64,
    /// Part of the links' rate that was used.
    used: f64,
    /// Jain's index of fairness over the applications of a node: the mean, and the least.
    fairness: (f64, f64),
    /// Bytes of the buffers of a node's shared queue pairs.
    buffer_bytes: f64,
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// A message, and the connection on which it is.
#[derive(Clone, Copy, Debug)]
struct Sending {
    application: u32,
    wanted_ns: u64,
}

/// A shared queue pair of a node.
#[derive(Debug)]
struct Line {
    group: GroupId,
    by: SharedBy,
    /// The connections of applications that have used it.
    flows: HashMap<u32, FlowId>,
    /// Messages that are not posted yet.
    messages: u32,
}

#[derive(Debug)]
struct Node {
    pool: Pool,
    egress: Egress<()>,
    tenant: TenantId,
    lines: HashMap<SharedId, Line>,
    /// The same queue pair at the other end.
    ends: HashMap<SharedId, (u32, SharedId)>,
    waiting: HashMap<SharedBy, Vec<Sending>>,
    by_flow: HashMap<FlowId, SharedId>,
    posted: VecDeque<PieceId>,
    sent: Vec<u64>,
    budget: i64,
    opened: u64,
    closed: u64,
}

/// A question of a node to another one, which answers in the next step.
#[derive(Debug)]
enum Question {
    Open(u32, SharedId, SharedBy),
    Close(u32, SharedId),
}

struct World {
    settings: Settings,
    dice: Dice,
    began: Instant,
    now_ns: u64,
    nodes: Vec<Node>,
    asked: Vec<Question>,
    report: Report,
    waits_ns: Vec<u64>,
}

/// Simulates nodes.
///
/// # Panics
/// When a node's state contradicts itself: it has more shared queue pairs than it may have.
fn run(settings: &Settings) -> Report {
    let mut world = World::new(settings);
    while world.now_ns < settings.virtual_ns {
        world.step();
    }
    world.report()
}

fn id_of(node: u32) -> PeerId {
    PeerId {
        address: Ipv4Addr::from(0x0a00_0000 + node).into(),
        engine: 0,
    }
}

fn number(peer: PeerId) -> u32 {
    match peer.address {
        IpAddr::V4(address) => u32::from(address) - 0x0a00_0000,
        IpAddr::V6(_) => unreachable!("nodes have IPv4 addresses"),
    }
}

impl World {
    fn new(settings: &Settings) -> World {
        let began = Instant::now();
        let limits = limits::of_device("hw", Quanta::default(), None);
        let nodes = (0..settings.nodes).map(|_| {
            let mut egress = Egress::new(Time(0), limits);
            Node {
                pool: Pool::new(settings.queue_pairs_max),
                tenant: egress.add_tenant(&Entitlement::default()),
                egress,
                lines: HashMap::new(),
                ends: HashMap::new(),
                waiting: HashMap::new(),
                by_flow: HashMap::new(),
                posted: VecDeque::new(),
                sent: vec![0; settings.applications as usize],
                budget: 0,
                opened: 0,
                closed: 0,
            }
        });
        let mut world = World {
            settings: *settings,
            dice: Dice(settings.seed),
            began,
            now_ns: 0,
            nodes: nodes.collect(),
            asked: Vec::new(),
            report: Report::default(),
            waits_ns: Vec::new(),
        };
        for node in 0..settings.nodes {
            for application in 0..settings.applications {
                (0..OUTSTANDING).for_each(|_| world.send(node, application));
            }
        }
        world
    }

    fn instant(&self) -> Instant {
        self.began + Duration::from_nanos(self.now_ns)
    }

    /// Has an application send a message to somebody.
    fn send(&mut self, node: u32, application: u32) {
        let others = u64::from(self.settings.nodes) - 1;
        let ahead = match self.dice.below(10) {
            0 => self.dice.below(others),
            _ => self.dice.below(NEIGHBOURS.min(others)),
        };
        let peer = (node + 1 + ahead as u32) % self.settings.nodes;
        let by = SharedBy {
            peer: id_of(peer),
            here: TenantName::default(),
            there: TenantName::default(),
            class: (application % self.settings.classes) as u8,
        };
        let sending = Sending {
            application,
            wanted_ns: self.now_ns,
        };
        let instant = self.instant();
        match self.nodes[node as usize].pool.want(instant, &by) {
            Some(id) => self.begin(node, id, sending),
            None => self.nodes[node as usize]
                .waiting
                .entry(by)
                .or_default()
                .push(sending),
        }
        self.take_steps(node);
    }

    /// Has a message go over a shared queue pair.
    fn begin(&mut self, node: u32, id: SharedId, sending: Sending) {
        let now = Time(self.now_ns);
        let waited_ns = self.now_ns - sending.wanted_ns;
        if waited_ns > 0 {
            self.waits_ns.push(waited_ns);
        }
        let of = &mut self.nodes[node as usize];
        let line = of.lines.get_mut(&id).expect("a queue pair that is open");
        line.messages += 1;
        let flow = *line.flows.entry(sending.application).or_insert_with(|| {
            let owner = Owner {
                application: sending.application,
                qp: 0,
            };
            let flow = of.egress.add_flow(owner, REQUESTS_MAX).expect("room for a flow");
            of.egress.bind(now, flow, line.group);
            of.by_flow.insert(flow, id);
            flow
        });
        let request = egress::Request {
            number: 0,
            opcode: WcOpcode::Write,
            length: LENGTH,
            kept_bytes: 0,
            asks: false,
            cuts: true,
            takes_slot: false,
            refused: None,
        };
        of.egress
            .submit(now, flow, request, ())
            .expect("room for a request");
    }

    /// Does what the pool of a node wants.
    fn take_steps(&mut self, node: u32) {
        let of = &mut self.nodes[node as usize];
        assert!(
            of.pool.len() <= self.settings.queue_pairs_max,
            "too many queue pairs"
        );
        while let Some(step) = of.pool.next_step() {
            self.asked.push(match step {
                Step::Open(id, by) => Question::Open(node, id, by),
                Step::Close { id, .. } => Question::Close(node, id),
            });
        }
    }

    fn open(&mut self, node: u32, id: SharedId, by: SharedBy) {
        if self.nodes[node as usize].ends.contains_key(&id) {
            // The other one has asked, too, and its question counted.
            return;
        }
        let (peer, instant) = (number(by.peer), self.instant());
        let theirs = SharedBy {
            peer: id_of(node),
            here: by.there,
            there: by.here.clone(),
            class: by.class,
        };
        let there = &mut self.nodes[peer as usize];
        if there.pool.asked_for(&theirs).is_some() && peer < node {
            // Both have asked: the other one's question counts.
            return;
        }
        let accepted = there.pool.accept(instant, &theirs);
        self.take_steps(peer);
        let Some(at_peer) = accepted else {
            self.nodes[node as usize].pool.later(instant, id);
            return self.take_steps(node);
        };
        let by = SharedBy {
            peer: id_of(peer),
            here: theirs.there.clone(),
            there: theirs.here.clone(),
            class: theirs.class,
        };
        self.opened(node, id, by, (peer, at_peer));
        self.opened(peer, at_peer, theirs, (node, id));
    }

    fn opened(&mut self, node: u32, id: SharedId, by: SharedBy, end: (u32, SharedId)) {
        let (now, instant) = (Time(self.now_ns), self.instant());
        let of = &mut self.nodes[node as usize];
        let options = GroupOptions {
            class: by.class.into(),
            path_mtu: 4096,
            depth: SENDS / 4,
            slots: None,
            may_be_quiet: false,
        };
        let group = of
            .egress
            .add_group(now, of.tenant, &options)
            .expect("room for a group");
        of.ends.insert(id, end);
        of.opened += 1;
        of.pool.opened(instant, id);
        let line = Line {
            group,
            by,
            flows: HashMap::new(),
            messages: 0,
        };
        of.lines.insert(id, line);
        self.begin_waiting(node, id);
        self.take_steps(node);
    }

    /// Has the messages that wait for a shared queue pair go over it.
    fn begin_waiting(&mut self, node: u32, id: SharedId) {
        let of = &mut self.nodes[node as usize];
        let line = of.lines.get(&id);
        let waiting = line.and_then(|line| of.waiting.remove(&line.by));
        for sending in waiting.unwrap_or_default() {
            self.begin(node, id, sending);
        }
    }

    /// Puts a queue pair away once nothing is in flight at both ends, which begin nothing more on it.
    fn close(&mut self, node: u32, id: SharedId) {
        let (now, instant) = (Time(self.now_ns), self.instant());
        let Some((peer, at_peer)) = self.nodes[node as usize].ends.get(&id).copied() else {
            return;
        };
        let ends = [(node, id), (peer, at_peer)];
        for (node, id) in ends {
            self.nodes[node as usize].pool.ends(id);
        }
        let is_idle = |(node, id): &(u32, SharedId)| {
            let line = self.nodes[*node as usize].lines.get(id);
            line.is_none_or(|line| line.messages == 0)
        };
        if !ends.iter().all(is_idle) {
            return self.asked.push(Question::Close(node, id));
        }
        self.asked.retain(
            |question| !matches!(question, Question::Close(node, id) if ends.contains(&(*node, *id))),
        );
        for (node, id) in ends {
            let of = &mut self.nodes[node as usize];
            of.ends.remove(&id);
            of.closed += 1;
            if let Some(line) = of.lines.remove(&id) {
                for flow in line.flows.into_values() {
                    of.egress.remove_flow(now, flow);
                    of.by_flow.remove(&flow);
                }
                of.egress.remove_group(line.group);
            }
            of.pool.away(instant, id);
        }
        self.take_steps(node);
        self.take_steps(peer);
    }

    fn step(&mut self) {
        self.now_ns += STEP_NS;
        let (now, instant) = (Time(self.now_ns), self.instant());
        for question in std::mem::take(&mut self.asked) {
            match question {
                Question::Open(node, id, by) => self.open(node, id, by),
                Question::Close(node, id) => self.close(node, id),
            }
        }
        for node in 0..self.settings.nodes {
            let of = &mut self.nodes[node as usize];
            if of.pool.deadline().is_some_and(|deadline| deadline <= instant) {
                of.pool.check_time(instant);
            }
            while let Some(piece) = of.posted.pop_front() {
                of.egress.completed(now, piece);
            }
            of.budget = of.budget.min(0) + STEP_BYTES as i64;
            while self.nodes[node as usize].budget > 0 {
                let of = &mut self.nodes[node as usize];
                let Some(piece) = of.egress.next(now, &mut egress::Open) else {
                    break;
                };
                of.budget -= i64::from(piece.length);
                of.sent[piece.owner.application as usize] += u64::from(piece.length);
                of.posted.push_back(piece.id);
                if piece.last {
                    self.end(node, piece.owner.application, piece.flow);
                }
            }
            self.take_steps(node);
        }
    }

    /// Ends a message, all of which is posted. The next one follows.
    fn end(&mut self, node: u32, application: u32, flow: FlowId) {
        let of = &mut self.nodes[node as usize];
        let id = of.by_flow[&flow];
        let line = of.lines.get_mut(&id).expect("a queue pair in use");
        line.messages -= 1;
        self.report.messages += 1;
        self.send(node, application);
    }

    fn report(mut self) -> Report {
        let count = self.nodes.len() as f64;
        let seconds = self.settings.virtual_ns as f64 / 1e9;
        let mean = |of: &dyn Fn(&Node) -> f64| self.nodes.iter().map(of).sum::<f64>() / count;
        let fairness = |node: &Node| {
            let bytes = node.sent.iter().map(|bytes| *bytes as f64);
            let squares: f64 = bytes.clone().map(|bytes| bytes * bytes).sum();
            bytes.sum::<f64>().powi(2) / (node.sent.len() as f64 * squares)
        };
        let queue_pairs = mean(&|node| node.pool.len() as f64);
        let of_queue_pair = (usize::from(SLOTS) + usize::from(Mux::buffers_of(SLOTS))) * SLOT_LEN;
        let rate = |of: &dyn Fn(&Node) -> u64| mean(&|node| of(node) as f64) / seconds;
        let sent = mean(&|node| node.sent.iter().sum::<u64>() as f64);
        self.waits_ns.sort_unstable();
        let p99 = self.waits_ns.get(self.waits_ns.len() * 99 / 100);
        Report {
            queue_pairs: (
                queue_pairs,
                self.nodes.iter().map(|node| node.pool.len()).max().unwrap_or(0),
            ),
            opened_per_second: rate(&|node| node.opened),
            closed_per_second: rate(&|node| node.closed),
            messages: self.report.messages,
            waited: self.waits_ns.len() as f64 / (self.report.messages.max(1)) as f64,
            wait_p99_us: p99.map_or(0.0, |ns| *ns as f64 / 1000.0),
            used: sent / (seconds * 12.5e9),
            fairness: (
                mean(&fairness),
                self.nodes.iter().map(fairness).fold(1.0, f64::min),
            ),
            buffer_bytes: queue_pairs * of_queue_pair as f64,
        }
    }
}

mod tests;
