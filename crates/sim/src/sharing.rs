//! A shared send queue under the virtual clock: long messages in a closed loop and short ones at random times, whose pieces a scheduler
//! posts to one device. It is a flow-level model, not a NIC: the device sends one piece after another at its rate, and each completes a
//! fixed time after its last byte. The scheduler and the window are those of `rdmux_rnic::sched`.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rdmux_rnic::Time;
use rdmux_rnic::sched::{
    CLASSES, ConnectionId, DeviceFlight, DeviceLimits, DeviceWindow, Entitlement, GroupId, Hierarchy,
    InFlight, Policy, Quanta, Turn, Window, WindowLimits, piece_bytes,
};

use crate::dice::Dice;

/// The device and what posting costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceModel {
    /// Time in which the device sends a byte, in picoseconds.
    pub byte_ps: u64,
    /// Time from the last byte of a piece to its completion.
    pub completion_ns: u64,
    /// CPU time for each piece.
    pub post_ns: u64,
}

/// 100 Gbit/s, as in the reference figures.
pub const DEVICE: DeviceModel = DeviceModel {
    byte_ps: 80,
    completion_ns: 4_000,
    post_ns: 150,
};

/// Order in which pieces are posted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// Whole messages in the order in which they come, without a window: a send queue that connections share natively.
    Whole,
    /// Pieces of messages in the order in which these come.
    Fifo,
    /// A piece of each connection in turn.
    RoundRobin,
    /// [`Hierarchy`], with one tenant.
    Hierarchy(Quanta),
}

/// How a run posts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Posting {
    /// Order of pieces.
    pub order: Order,
    /// Bytes of a piece; `None` for [`piece_bytes`].
    pub piece_bytes: Option<u32>,
    /// Bytes in flight; `None` for [`Window`].
    pub window_bytes: Option<u32>,
}

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// Bytes of each message.
    pub message_bytes: u32,
    /// Mean of the messages a second, which come at random times; `None` if a message is followed by another one when it completes.
    pub per_second: Option<u32>,
    /// Messages that are outstanding in that case.
    pub outstanding: u32,
    /// Set for a strict class.
    pub strict: bool,
    /// The QP on which it is, which has a window of its own, in [`Order::Hierarchy`].
    pub qp: usize,
}

/// Result of a connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flowed {
    /// Bytes of pieces that completed.
    pub bytes: u64,
    /// Time of each message, from the arrival to its completion, in nanoseconds, in ascending order.
    pub latencies_ns: Vec<u64>,
}

impl Flowed {
    /// Returns the latency that `percent` of the messages do not exceed, in microseconds.
    pub fn percentile_us(&self, percent: usize) -> f64 {
        let at = (self.latencies_ns.len() * percent / 100).min(self.latencies_ns.len().saturating_sub(1));
        self.latencies_ns
            .get(at)
            .map_or(f64::NAN, |ns| *ns as f64 / 1000.0)
    }

    /// Returns the rate in Gbit/s.
    pub fn gbps(&self, measured_ns: u64) -> f64 {
        self.bytes as f64 * 8.0 / measured_ns as f64
    }
}

/// Returns Jain's index of fairness.
pub fn fairness<'a>(flows: impl IntoIterator<Item = &'a Flowed>) -> f64 {
    let bytes: Vec<f64> = flows.into_iter().map(|flow| flow.bytes as f64).collect();
    let squares: f64 = bytes.iter().map(|bytes| bytes * bytes).sum();
    bytes.iter().sum::<f64>().powi(2) / (bytes.len() as f64 * squares)
}

#[derive(Clone, Copy, Debug)]
struct Message {
    arrived_ps: u64,
    /// Bytes that are not posted.
    left: u32,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    flow: usize,
    bytes: u32,
    /// Arrival of the message of which this is the last piece.
    ends: Option<u64>,
    in_flight: InFlight,
    of_device: DeviceFlight,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrives(usize),
    Completes(Piece),
    /// The CPU is free to post the next piece.
    Posted,
}

/// A hierarchy with the connections and, for each QP, the groups of the sharing and the strict class.
struct Shared {
    hierarchy: Hierarchy<usize>,
    connections: Vec<ConnectionId>,
    groups: Vec<[GroupId; 2]>,
}

/// Connections that have something to post, in the order of a policy.
enum Picker {
    Fifo(VecDeque<usize>),
    RoundRobin(VecDeque<usize>),
    Hierarchy(Box<Shared>),
}

struct Run<'a> {
    device: &'a DeviceModel,
    posting: &'a Posting,
    flows: &'a [Flow],
    dice: Dice,
    now_ps: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    /// The events by number.
    planned: Vec<Option<Event>>,
    queues: Vec<VecDeque<Message>>,
    picker: Picker,
    windows: Vec<Window>,
    device_window: DeviceWindow,
    in_flight: u64,
    device_free_ps: u64,
    posting_until_ps: u64,
}

/// Lets `flows` share `device` for `warm_up_ns`, and then for `measured_ns`, whose results it returns.
pub fn share(
    device: &DeviceModel,
    posting: &Posting,
    flows: &[Flow],
    seed: u64,
    warm_up_ns: u64,
    measured_ns: u64,
) -> Vec<Flowed> {
    let qps = flows.iter().map(|flow| flow.qp + 1).max().unwrap_or(0);
    let limits = WindowLimits {
        device_bps: 8_000_000_000_000 / device.byte_ps,
        // The window of the device keeps short what waits for others.
        target_ns: u64::MAX,
        ..WindowLimits::default()
    };
    let mut run = Run {
        device,
        posting,
        flows,
        dice: Dice::new(seed, 0),
        now_ps: 0,
        events: BinaryHeap::new(),
        planned: Vec::new(),
        queues: vec![VecDeque::new(); flows.len()],
        picker: Picker::new(posting, flows),
        windows: vec![Window::new(Time(0), limits); qps],
        device_window: DeviceWindow::new(Time(0), DeviceLimits::default()),
        in_flight: 0,
        device_free_ps: 0,
        posting_until_ps: 0,
    };
    for (at, flow) in flows.iter().enumerate() {
        if flow.per_second.is_some() {
            run.plan_arrival(at);
        } else {
            (0..flow.outstanding).for_each(|_| run.arrive(at));
        }
    }
    run.plan(0, Event::Posted);
    let begin_ps = warm_up_ns * 1000;
    let end_ps = begin_ps + measured_ns * 1000;
    let mut flowed = vec![Flowed::default(); flows.len()];
    while let Some(Reverse((at_ps, number))) = run.events.pop() {
        if at_ps > end_ps {
            break;
        }
        run.now_ps = at_ps;
        match run.planned[number as usize].take().expect("each event once") {
            Event::Arrives(flow) => {
                run.arrive(flow);
                run.plan_arrival(flow);
            }
            Event::Completes(piece) => {
                run.complete(piece);
                if at_ps > begin_ps {
                    let flow = &mut flowed[piece.flow];
                    flow.bytes += u64::from(piece.bytes);
                    if let Some(arrived_ps) = piece.ends.filter(|arrived_ps| *arrived_ps >= begin_ps) {
                        flow.latencies_ns.push((at_ps - arrived_ps) / 1000);
                    }
                }
            }
            Event::Posted => {}
        }
        run.post();
    }
    flowed
        .iter_mut()
        .for_each(|flow| flow.latencies_ns.sort_unstable());
    flowed
}

impl Run<'_> {
    fn now(&self) -> Time {
        Time(self.now_ps / 1000)
    }

    fn plan(&mut self, at_ps: u64, event: Event) {
        self.events.push(Reverse((at_ps, self.planned.len() as u64)));
        self.planned.push(Some(event));
    }

    /// Plans the next message of a flow whose messages come at random times: exponentially distributed intervals.
    fn plan_arrival(&mut self, flow: usize) {
        let per_second = f64::from(self.flows[flow].per_second.expect("messages at random times"));
        let uniform = (self.dice.below(1 << 53) + 1) as f64 / (1u64 << 53) as f64;
        let interval_ps = -uniform.ln() / per_second * 1e12;
        self.plan(self.now_ps + interval_ps as u64, Event::Arrives(flow));
    }

    fn arrive(&mut self, flow: usize) {
        self.queues[flow].push_back(Message {
            arrived_ps: self.now_ps,
            left: self.flows[flow].message_bytes,
        });
        self.picker
            .arrive(Time(self.now_ps / 1000), flow, self.queues[flow].len() == 1);
    }

    fn complete(&mut self, piece: Piece) {
        self.in_flight -= u64::from(piece.bytes);
        let piece_bytes = self.piece_bytes();
        let (now, qp) = (self.now(), self.flows[piece.flow].qp);
        self.windows[qp].completed(now, piece.in_flight, piece_bytes);
        self.device_window.completed(now, piece.of_device);
        if piece.ends.is_some() && self.flows[piece.flow].per_second.is_none() {
            self.arrive(piece.flow);
        }
    }

    fn piece_bytes(&self) -> u32 {
        let sparse_seen = match &self.picker {
            Picker::Hierarchy(shared) => shared.hierarchy.sparse_seen(),
            _ => None,
        };
        let by_rule = || piece_bytes(self.now(), sparse_seen, 4096);
        self.posting.piece_bytes.unwrap_or_else(by_rule)
    }

    /// Returns whether a piece may be posted; whether one of a certain QP may, the hierarchy knows.
    fn may_post(&self) -> bool {
        match (self.posting.order, self.posting.window_bytes) {
            (Order::Whole, _) => true,
            (_, None) => self.device_window.is_open(self.piece_bytes()),
            (_, Some(bytes)) => self.in_flight < u64::from(bytes),
        }
    }

    /// Opens the groups of QPs whose windows are open, and shuts the others.
    fn open(&mut self, piece_bytes: u32) {
        let now = self.now();
        if let (Picker::Hierarchy(shared), None) = (&mut self.picker, self.posting.window_bytes) {
            for (window, groups) in self.windows.iter().zip(&shared.groups) {
                let open = window.is_open(piece_bytes);
                for group in groups {
                    shared.hierarchy.set_open(now, *group, open);
                }
            }
        }
    }

    /// Posts a piece, if the CPU is free and the window open.
    fn post(&mut self) {
        let piece_bytes = self.piece_bytes();
        if self.now_ps < self.posting_until_ps || !self.may_post() {
            return;
        }
        self.open(piece_bytes);
        let Some((flow, turn)) = self.picker.pick(self.now()) else {
            return;
        };
        let queue = &mut self.queues[flow];
        let message = queue.front_mut().expect("what is picked has something to send");
        let bytes = match self.posting.order {
            Order::Whole => message.left,
            _ => message.left.min(piece_bytes),
        };
        message.left -= bytes;
        let ends = (message.left == 0).then_some(message.arrived_ps);
        if ends.is_some() {
            queue.pop_front();
        }
        let more = !queue.is_empty();
        self.posting_until_ps = self.now_ps + self.device.post_ns * 1000;
        self.device_free_ps =
            self.device_free_ps.max(self.posting_until_ps) + u64::from(bytes) * self.device.byte_ps;
        self.in_flight += u64::from(bytes);
        let now = self.now();
        let qp = self.flows[flow].qp;
        let in_flight = self.windows[qp].posted(now, bytes, piece_bytes);
        let of_device = self.device_window.posted(now, bytes, true, piece_bytes);
        let piece = Piece {
            flow,
            bytes,
            ends,
            in_flight,
            of_device,
        };
        self.plan(
            self.device_free_ps + self.device.completion_ns * 1000,
            Event::Completes(piece),
        );
        self.plan(self.posting_until_ps, Event::Posted);
        self.picker.end(now, flow, turn, bytes, more, ends.is_some());
    }
}

impl Picker {
    fn new(posting: &Posting, flows: &[Flow]) -> Picker {
        match posting.order {
            Order::Whole | Order::Fifo => Picker::Fifo(VecDeque::new()),
            Order::RoundRobin => Picker::RoundRobin(VecDeque::new()),
            Order::Hierarchy(quanta) => {
                let mut hierarchy = Hierarchy::new(quanta);
                let mut classes = [Policy::default(); CLASSES];
                classes[CLASSES - 1] = Policy::Strict;
                let tenant = hierarchy.add_tenant(&Entitlement {
                    classes,
                    ..Entitlement::default()
                });
                let qps = flows.iter().map(|flow| flow.qp + 1).max().unwrap_or(0);
                let mut group = |class| hierarchy.add_group(tenant, class).expect("a tenant");
                let groups: Vec<[GroupId; 2]> = (0..qps).map(|_| [group(0), group(CLASSES - 1)]).collect();
                let connections = flows.iter().enumerate().map(|(at, flow)| {
                    let group = groups[flow.qp][usize::from(flow.strict)];
                    hierarchy.add_connection(group, at).expect("a group")
                });
                let connections = connections.collect();
                Picker::Hierarchy(Box::new(Shared {
                    hierarchy,
                    connections,
                    groups,
                }))
            }
        }
    }

    /// Accounts for a message, which is the only one of its connection or not.
    fn arrive(&mut self, now: Time, flow: usize, first: bool) {
        match self {
            Picker::Fifo(queue) => queue.push_back(flow),
            Picker::RoundRobin(queue) if first => queue.push_back(flow),
            Picker::RoundRobin(_) => {}
            Picker::Hierarchy(shared) => shared.hierarchy.wake(now, shared.connections[flow]),
        }
    }

    fn pick(&mut self, now: Time) -> Option<(usize, Option<Turn<usize>>)> {
        match self {
            Picker::Fifo(queue) => queue.front().map(|flow| (*flow, None)),
            Picker::RoundRobin(queue) => queue.pop_front().map(|flow| (flow, None)),
            Picker::Hierarchy(shared) => shared.hierarchy.pick(now).map(|turn| (turn.id, Some(turn))),
        }
    }

    /// Accounts for a piece, with which a message has ended or not.
    fn end(
        &mut self,
        now: Time,
        flow: usize,
        turn: Option<Turn<usize>>,
        bytes: u32,
        more: bool,
        ended: bool,
    ) {
        match self {
            Picker::Fifo(queue) if ended => drop(queue.pop_front()),
            Picker::RoundRobin(queue) if more => queue.push_back(flow),
            Picker::Hierarchy(shared) => {
                let turn = turn.expect("what was picked");
                shared.hierarchy.end(now, turn, bytes, more);
            }
            _ => {}
        }
    }
}
