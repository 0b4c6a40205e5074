//! Two hosts, a clock and the links between them.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_rnic::cm::CmEvent;
use rdmux_rnic::faults::{Line, Spec, Stream, damage, late_ns};
use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{
    AccessJob, Arrival, Config, Cqn, Delivery, Directly, Event, Fault, Fill, FlushId, FlushJob, LKey,
    LinkProgress, Memory, Part, Path, PeerFault, PeerRing, PostError, Put, QpType, RKey, Recent, RingBytes,
    Rings, Rnic, Room, SendRequest, Taken, Ticket, Time, TransmitBuf, WorkCompletion, end_packet,
};

use rdmux_rnic::ECN_MARKED;
use rdmux_wire::Qpn;
use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{Aeth, Bth, ICRC_LEN, Operation, UDP_PORT};

use crate::dice::Dice;
use crate::machine::{Change, GrantMessage, Lends, Machine, Named};
use crate::memory::{begin, carry_out};
use crate::seen::{self, Seen};
use crate::tap::Tap;

/// Bytes of a READ response without data, and the syndrome of a NAK, which no READ response has.
const FORGED_BYTES: usize = Bth::LEN + Aeth::LEN + ICRC_LEN;
const NAK_SEQUENCE: u8 = 0x60;

/// Faults of a link, in percent of its packets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) loss: f64,
    pub(crate) dup: f64,
    pub(crate) reorder: f64,
    pub(crate) corrupt: f64,
}

/// Counts of the links.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Carried {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    pub(crate) reordered: u64,
    pub(crate) corrupted: u64,
    /// Times that the path between the hosts changed.
    pub(crate) path_changes: u64,
}

/// Configuration of the two hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) ipv6: bool,
    pub(crate) gso: bool,
    pub(crate) gro: bool,
    /// Set when the driver polls acknowledgements only once a host has been idle for a while.
    pub(crate) lazy_acks: bool,
    pub(crate) latency_ns: u64,
    /// Maximum time that a flush takes.
    pub(crate) flush_ns_max: u64,
    /// Set when the hosts are processes of one machine.
    pub(crate) one_machine: bool,
}

enum Happening {
    Arrive {
        to: usize,
        path: Path,
        bytes: Vec<u8>,
        segment_bytes: usize,
        local: bool,
    },
    /// A request comes in the ring of a link.
    Request {
        to: usize,
        link: u32,
        path: Path,
        request: SimRequest,
    },
    /// A host learns that its peer has taken a request.
    Taken {
        to: usize,
        link: u32,
        ticket: Ticket,
        taken: Taken,
    },
    /// The link of two hosts on one machine changes, or carries a message.
    Change(Change),
    GrantMessage {
        to: usize,
        link: u32,
        message: GrantMessage,
    },
    FlushRuns(usize, FlushJob),
    FlushEnds(usize, FlushId, Result<(), Fault>),
    /// The medium of a host has done the oldest of its accesses.
    AccessEnds(usize),
    /// A host's driver takes in what callers left for it.
    Left(usize),
    Idle(usize),
    User(u64),
}

pub(crate) struct Host {
    pub(crate) rnic: Rnic,
    pub(crate) address: IpAddr,
    /// Armed completion queues that gave an event.
    pub(crate) completed: Vec<Cqn>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) cm_events: VecDeque<CmEvent>,
    /// Accesses to its medium, in order; the medium works on the first.
    accesses: VecDeque<AccessJob>,
    /// Requests that its lanes have put into the ring of a link.
    by_lane: Arc<LaneRequests>,
    /// Requests that callers left for the driver, each with a place in its queue.
    left: Vec<(Qpn, SendRequest)>,
    /// Set when nothing goes in or out any more.
    pub(crate) vanished: bool,
    idle_pending: bool,
    arrival_last: Time,
    /// Time until which nothing reaches it.
    cut_off_until: Time,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing is left to happen.
    Rest,
    Moved,
    /// An event of the user's own.
    User(u64),
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) hosts: [Host; 2],
    pub(crate) faults: Faults,
    pub(crate) carried: Carried,
    pub(crate) tap: Tap,
    pub(crate) seen: Seen,
    pub(crate) steps: u64,
    pub(crate) flushes_running: u32,
    shape: Shape,
    latency_ns: u64,
    /// Time until which every other packet is lost.
    lossy_until: Time,
    /// Time until which switches mark the packets that may be marked (ECN).
    marking_until: Time,
    /// QPs of each host that nothing reaches, and the time until which that lasts.
    cut_off: BTreeMap<(usize, Qpn), Time>,
    /// Set when acknowledgements from this host to this QP become responses that nothing asked for.
    forged: Option<(usize, Qpn)>,
    /// Present when the hosts are processes of one machine.
    pub(crate) machine: Option<Machine>,
    /// Faults of the links to each host.
    lines: [Line; 2],
    agenda: BTreeMap<(Time, u64), Happening>,
    next: u64,
    dice: Dice,
    buf: TransmitBuf,
}

impl World {
    pub(crate) fn new(seed: u64, shape: Shape, faults: Faults, receive_window_bytes: u32) -> World {
        let mut dice = Dice::new(seed, 1);
        let hosts = [1u8, 2].map(|n| {
            let address = if shape.ipv6 {
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)])
            } else {
                IpAddr::from([10, 0, 0, n])
            };
            let mut seed = [0; 32];
            dice.fill(&mut seed);
            Host {
                rnic: Rnic::new(Config {
                    address,
                    slot: n,
                    seed,
                    guid: 0x1000 + u64::from(n),
                    gsi_src_port: 0xc000 + u16::from(n),
                    receive_window_bytes,
                    traffic: rdmux_rnic::Traffic::default(),
                    mtu: 4096,
                }),
                address,
                completed: Vec::new(),
                events: VecDeque::new(),
                cm_events: VecDeque::new(),
                accesses: VecDeque::new(),
                by_lane: Arc::default(),
                left: Vec::new(),
                vanished: false,
                idle_pending: false,
                arrival_last: Time(0),
                cut_off_until: Time(0),
            }
        });
        let spec = Spec {
            seed,
            loss: faults.loss,
            dup: faults.dup,
            reorder: faults.reorder,
            corrupt: faults.corrupt,
            ..Spec::default()
        };
        let mut world = World {
            now: Time(1),
            hosts,
            faults,
            carried: Carried::default(),
            tap: Tap::default(),
            seen: Seen::default(),
            steps: 0,
            flushes_running: 0,
            shape,
            latency_ns: shape.latency_ns,
            lossy_until: Time(0),
            marking_until: Time(0),
            cut_off: BTreeMap::new(),
            forged: None,
            machine: None,
            lines: [Stream::Sent, Stream::Received].map(|stream| Line::new(spec, stream)),
            agenda: BTreeMap::new(),
            next: 0,
            dice,
            buf: TransmitBuf::new(32 << 10, shape.gso),
        };
        if shape.one_machine {
            world.join(seed);
        }
        world
    }

    /// Calls a verb, and carries on what it causes.
    pub(crate) fn with<R>(&mut self, host: usize, f: impl FnOnce(&mut Rnic, Time) -> R) -> R {
        self.post_left(host);
        let result = f(&mut self.hosts[host].rnic, self.now);
        self.settle(host);
        result
    }

    /// Posts a send request in the shortest way that there is.
    pub(crate) fn post_send(&mut self, host: usize, qpn: Qpn, request: SendRequest) -> Result<(), PostError> {
        let mut request = Some(request);
        if self.post_to_lane(host, qpn, &mut request) {
            return Ok(());
        }
        let Some(request) = request else {
            return Ok(());
        };
        let sends = self.hosts[host].rnic.send_queue(qpn);
        if self.machine.is_some()
            && self.dice.one_in(16)
            && sends.is_some_and(|sends| sends.reserve(&request))
        {
            // Somebody else is just driving.
            self.hosts[host].left.push((qpn, request));
            let delay = self.dice.between(1, 2_000);
            self.plan(self.now + delay, Happening::Left(host));
            return Ok(());
        }
        self.post_left(host);
        let rnic = &mut self.hosts[host].rnic;
        if rnic.post_directly(|| self.now, qpn, &request) {
            if !rnic.is_quiet() {
                self.settle(host);
            }
            return Ok(());
        }
        let mut buf = std::mem::replace(&mut self.buf, TransmitBuf::new(0, false));
        buf.clear();
        let mut ring = self.ring(host);
        let rnic = &mut self.hosts[host].rnic;
        let posted = rnic.post_send_into(self.now, qpn, request, &mut buf, &mut ring);
        self.take_back_revoked(host);
        self.send_requests(host, ring);
        self.send(host, &buf);
        self.buf = buf;
        self.settle(host);
        posted
    }

    /// Posts a request without the device, if the lane of its queue pair covers it.
    fn post_to_lane(&mut self, host: usize, qpn: Qpn, request: &mut Option<SendRequest>) -> bool {
        let room = self.machine.as_mut().map_or(0, Machine::room);
        let this = &mut self.hosts[host];
        this.by_lane.lock().room = room;
        let Some(lane) = this.rnic.direct_lane(qpn) else {
            return false;
        };
        let posted = lane.post(request, || self.now);
        let requests = std::mem::take(&mut this.by_lane.lock().requests);
        match posted {
            Directly::Not => return false,
            Directly::Done | Directly::DoneAndEnded => {}
            Directly::DoneAndTell(delivery) => {
                this.rnic.deliver(self.now, delivery);
                self.settle(host);
            }
        }
        if !requests.is_empty() {
            self.seen.happened(seen::SENT_BY_LANE);
            let mut ring = SimRing::new(None, 0);
            for (link, ticket, bytes) in requests {
                ring.link = Some(link);
                ring.requests.push(SimRequest::held(ticket, bytes));
            }
            self.send_requests(host, ring);
        }
        true
    }

    /// Posts the requests that callers left.
    fn post_left(&mut self, host: usize) {
        let this = &mut self.hosts[host];
        for (qpn, request) in std::mem::take(&mut this.left) {
            this.rnic.post_reserved(self.now, qpn, request);
        }
    }

    /// Passes what lanes have found to a host's device.
    fn deliver(&mut self, host: usize, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            self.hosts[host].rnic.deliver(self.now, delivery);
        }
    }

    /// Polls the oldest completion of a host's queue.
    pub(crate) fn poll_cq(&mut self, host: usize, cq: Cqn) -> Option<WorkCompletion> {
        let wc = self.hosts[host].rnic.poll_cq(cq)?;
        self.seen.completion(wc.opcode, wc.status);
        Some(wc)
    }

    /// Restarts a host: it loses all its state and comes back at once, with the same address and GUID.
    pub(crate) fn restart(&mut self, host: usize) {
        self.leave(host);
        let mut config = *self.hosts[host].rnic.config();
        self.dice.fill(&mut config.seed);
        let before = self.agenda.len();
        self.agenda.retain(|_, happening| match happening {
            Happening::FlushRuns(of, _) | Happening::FlushEnds(of, ..) => *of != host,
            _ => true,
        });
        self.flushes_running -= (before - self.agenda.len()) as u32;
        self.agenda
            .retain(|_, happening| !matches!(happening, Happening::AccessEnds(of) if *of == host));
        let host = &mut self.hosts[host];
        host.accesses.clear();
        host.rnic = Rnic::new(config);
        host.completed.clear();
        host.events.clear();
        host.cm_events.clear();
    }

    pub(crate) fn latency_ns(&self) -> u64 {
        self.latency_ns
    }

    /// Lets packets take a path of this latency from now on; packets in flight stay on theirs.
    pub(crate) fn change_latency(&mut self, latency_ns: u64) {
        self.carried.path_changes += 1;
        self.latency_ns = latency_ns;
        for host in &mut self.hosts {
            host.arrival_last = Time(0);
        }
    }

    /// Loses everything that is sent to this host, for a while.
    pub(crate) fn break_link(&mut self, to: usize, for_ns: u64) {
        self.carried.path_changes += 1;
        self.hosts[to].cut_off_until = self.now + for_ns;
    }

    /// Loses everything that is sent to a QP of this host, for a while.
    pub(crate) fn cut_off(&mut self, to: usize, qpn: Qpn, for_ns: u64) {
        self.cut_off.insert((to, qpn), self.now + for_ns);
    }

    fn is_cut_off(&self, to: usize, packet: &[u8]) -> bool {
        let &[_, _, _, _, _, high, middle, low, ..] = packet else {
            return false;
        };
        let qpn = Qpn::new(u32::from_be_bytes([0, high, middle, low]));
        let until = self.cut_off.get(&(to, qpn));
        until.is_some_and(|until| self.now < *until)
    }

    /// Loses every other packet for a while.
    pub(crate) fn lose_more(&mut self, for_ns: u64) {
        self.carried.path_changes += 1;
        self.lossy_until = self.now + for_ns;
    }

    /// Lets switches mark packets for a while.
    pub(crate) fn mark(&mut self, for_ns: u64) {
        self.carried.path_changes += 1;
        self.marking_until = self.now + for_ns;
    }

    /// Lets a host, from now on, acknowledge nothing to this QP of the other, but send false responses.
    pub(crate) fn forge(&mut self, host: usize, to: Qpn) {
        self.forged = Some((host, to));
    }

    /// Schedules `Step::User(tag)` after `delay_ns`.
    pub(crate) fn call_back(&mut self, delay_ns: u64, tag: u64) {
        self.plan(self.now + delay_ns, Happening::User(tag));
    }

    fn plan(&mut self, at: Time, happening: Happening) {
        self.next += 1;
        self.agenda.insert((at, self.next), happening);
    }

    /// Lets the next event happen.
    pub(crate) fn step(&mut self) -> Step {
        self.steps += 1;
        let timer = |host: &Host| host.rnic.poll_timeout().unwrap_or(Time(u64::MAX));
        let timers = [timer(&self.hosts[0]), timer(&self.hosts[1])];
        let planned = self.agenda.keys().next().map_or(Time(u64::MAX), |key| key.0);
        let at = timers[0].min(timers[1]).min(planned);
        if at == Time(u64::MAX) {
            return Step::Rest;
        }
        self.now = self.now.max(at);
        if planned > at {
            let host = usize::from(timers[1] < timers[0]);
            let link = self.link_progress(host);
            let rnic = &mut self.hosts[host].rnic;
            rnic.handle_timeout_with(self.now, &|_, _| link);
            self.settle(host);
            return Step::Moved;
        }
        let Some((_, happening)) = self.agenda.pop_first() else {
            return Step::Rest;
        };
        match happening {
            Happening::Arrive {
                to,
                path,
                bytes,
                segment_bytes,
                local,
            } => {
                if !self.hosts[to].vanished {
                    let arrival = Arrival {
                        src: path.src,
                        src_port: path.src_port,
                        dst: path.dst,
                        traffic_class: path.traffic_class,
                        bytes: &bytes,
                        segment_bytes,
                        local,
                    };
                    if let Some(machine) = self.machine.as_mut().filter(|_| local) {
                        machine.takes(to);
                    }
                    self.hosts[to].rnic.handle_arrival(self.now, &arrival);
                    self.settle(to);
                }
            }
            Happening::Request {
                to,
                link,
                path,
                request,
            } => self.take_request(to, link, path, request),
            Happening::Taken {
                to,
                link,
                ticket,
                taken,
            } => {
                let is_up = |machine: &Machine| machine.is_up(to) && machine.link() == Some(link);
                if !self.hosts[to].vanished && self.machine.as_ref().is_some_and(is_up) {
                    self.end_request(to, ticket, taken);
                    self.settle(to);
                }
            }
            Happening::Change(change) => self.change(change),
            Happening::GrantMessage { to, link, message } => self.say(to, link, message),
            Happening::FlushRuns(host, job) => {
                // A flush may have done its work long before it reports that.
                let result = job.memory.flush(job.offset, job.length, job.placement);
                let rest = if self.dice.one_in(2) {
                    0
                } else {
                    self.dice.log_uniform(self.shape.flush_ns_max)
                };
                self.plan(self.now + rest, Happening::FlushEnds(host, job.id, result));
            }
            Happening::FlushEnds(host, id, result) => {
                self.flushes_running -= 1;
                self.hosts[host].rnic.handle_flush(self.now, id, result);
                self.settle(host);
            }
            Happening::Left(host) => {
                self.post_left(host);
                self.settle(host);
            }
            Happening::AccessEnds(host) => {
                self.end_access(host);
                self.work_on_medium(host);
                self.settle(host);
            }
            Happening::Idle(host) => {
                self.hosts[host].idle_pending = false;
                self.transmit(host, true);
                self.collect(host);
            }
            Happening::User(tag) => return Step::User(tag),
        }
        Step::Moved
    }

    /// Polls everything that a host has pending.
    fn settle(&mut self, host: usize) {
        self.post_left(host);
        self.take_back_revoked(host);
        if self.shape.lazy_acks {
            self.transmit(host, false);
            if !self.hosts[host].idle_pending {
                self.hosts[host].idle_pending = true;
                let delay = self.dice.between(1, 20_000);
                self.plan(self.now + delay, Happening::Idle(host));
            }
        } else {
            self.transmit(host, true);
        }
        self.collect(host);
    }

    fn collect(&mut self, host: usize) {
        self.take_back_revoked(host);
        let mut wanted = Vec::new();
        while let Some(job) = self.hosts[host].rnic.poll_flush() {
            self.flushes_running += 1;
            let delay = self.dice.log_uniform(self.shape.flush_ns_max);
            self.plan(self.now + delay, Happening::FlushRuns(host, job));
        }
        while let Some(job) = self.hosts[host].rnic.poll_access() {
            begin(&job);
            self.hosts[host].accesses.push_back(job);
            if self.hosts[host].accesses.len() == 1 {
                self.work_on_medium(host);
            }
        }
        let this = &mut self.hosts[host];
        drop(this.rnic.poll_ended_memories());
        while let Some(event) = this.rnic.poll_event() {
            self.seen.event(&event);
            match event {
                Event::Completion(cq) => this.completed.push(cq),
                Event::WantsGrant(by, rkey) => wanted.push((by, rkey)),
                other => this.events.push_back(other),
            }
        }
        while let Some(event) = this.rnic.cm().poll_event() {
            self.seen.cm_event(&event);
            this.cm_events.push_back(event);
        }
        for (by, rkey) in wanted {
            self.ask(host, by, rkey);
        }
    }

    /// Lets a host's medium work on its oldest access.
    fn work_on_medium(&mut self, host: usize) {
        if !self.hosts[host].accesses.is_empty() {
            // Most accesses are short; a few take as long as a flush.
            let most = self.shape.flush_ns_max;
            let most = if self.dice.one_in(16) {
                most
            } else {
                most.min(20_000)
            };
            let delay = self.dice.log_uniform(most);
            self.plan(self.now + delay, Happening::AccessEnds(host));
        }
    }

    /// Carries out a host's oldest access to its medium.
    fn end_access(&mut self, host: usize) {
        let this = &mut self.hosts[host];
        if let Some(job) = this.accesses.pop_front() {
            let result = carry_out(&job);
            this.rnic.handle_access(self.now, job.id, result);
        }
    }

    fn transmit(&mut self, from: usize, all: bool) {
        let mut buf = std::mem::replace(&mut self.buf, TransmitBuf::new(0, false));
        loop {
            buf.clear();
            let mut ring = self.ring(from);
            let rnic = &mut self.hosts[from].rnic;
            let more = rnic.poll_transmit_with(self.now, &mut buf, &mut ring, all);
            self.send_requests(from, ring);
            self.send(from, &buf);
            if !more {
                break;
            }
        }
        self.buf = buf;
    }

    fn send(&mut self, from: usize, buf: &TransmitBuf) {
        let up = self.machine.as_ref().is_some_and(|machine| machine.is_up(from));
        for train in buf.trains() {
            let bytes = &buf.bytes()[train.range.clone()];
            if train.local && !up && !self.hosts[from].vanished {
                let what = || format!("host {from} sends through a link that broke");
                self.tap.violation.get_or_insert_with(what);
            }
            for packet in bytes.chunks(train.segment_bytes) {
                self.tap.look(from, Some(&train.path), packet);
            }
            let dst = train.path.dst;
            for to in 0..2 {
                let reaches = dst.is_multicast() || dst == self.hosts[to].address;
                if !reaches || self.hosts[from].vanished {
                    continue;
                }
                let mut path = train.path;
                if train.local {
                    self.carry_local(to, path, bytes, train.segment_bytes);
                    continue;
                }
                if self.now < self.marking_until && path.traffic_class & ECN_MARKED != 0 {
                    path.traffic_class |= ECN_MARKED;
                }
                self.carry(to, path, bytes, train.segment_bytes);
            }
        }
    }

    /// Takes a train over the link, packet by packet; neighbours that arrive side by side may arrive as one.
    fn carry(&mut self, to: usize, path: Path, bytes: &[u8], segment_bytes: usize) {
        let latency = self.latency_ns;
        let loss = match () {
            () if self.now < self.hosts[to].cut_off_until => 100.0,
            () if self.now < self.lossy_until => 50.0_f64.max(self.faults.loss),
            () => self.faults.loss,
        };
        let mut joined: Vec<u8> = Vec::new();
        let mut at = self.now + latency + self.dice.below(latency / 4 + 1);
        at = at.max(self.hosts[to].arrival_last);
        for packet in bytes.chunks(segment_bytes) {
            self.carried.packets += 1;
            self.carried.bytes += packet.len() as u64;
            let fate = self.lines[to].next_fate_with_loss(loss);
            if fate.lost || self.is_cut_off(to, packet) {
                self.carried.lost += 1;
                self.arrive(at, to, path, std::mem::take(&mut joined), segment_bytes);
                continue;
            }
            let mut packet = packet.to_vec();
            if self.forged.is_some_and(|(from, _)| from != to) {
                self.forge_answer(&path, &mut packet);
            }
            if let Some(draw) = fate.corrupted {
                self.carried.corrupted += 1;
                damage(&mut packet, draw);
            }
            if let Some(part) = fate.duplicated {
                self.carried.duplicated += 1;
                let late = at + late_ns(part, latency * 3);
                let copy = packet.clone();
                let segment = copy.len();
                self.arrive(late, to, path, copy, segment);
            }
            if let Some(part) = fate.reordered {
                self.carried.reordered += 1;
                let late = at + late_ns(part, latency * 3);
                let segment = packet.len();
                self.arrive(late, to, path, packet, segment);
                continue;
            }
            let short = packet.len() != segment_bytes;
            if packet.len() > segment_bytes {
                let segment = packet.len();
                self.arrive(at, to, path, packet, segment);
                continue;
            }
            joined.append(&mut packet);
            if short || !self.shape.gro {
                self.arrive(at, to, path, std::mem::take(&mut joined), segment_bytes);
            }
        }
        self.arrive(at, to, path, joined, segment_bytes);
        self.hosts[to].arrival_last = at;
    }

    /// Turns an acknowledgement into a READ response that refuses.
    fn forge_answer(&self, path: &Path, packet: &mut Vec<u8>) {
        let acknowledges = matches!(packet[0] & 0x1f, 0x10..=0x12) && packet[0] >> 5 != 3;
        let to_forged = self.forged.is_some_and(|(_, qpn)| {
            packet[5..8] == qpn.value().to_be_bytes()[1..] && packet.len() >= FORGED_BYTES
        });
        if acknowledges && to_forged {
            packet.truncate(FORGED_BYTES - ICRC_LEN);
            packet[0] = packet[0] & 0xe0 | Operation::ReadResponseOnly as u8;
            packet[1] &= !0x30;
            packet[Bth::LEN] = NAK_SEQUENCE;
            let flow = Flow {
                src: path.src,
                dst: path.dst,
                src_port: path.src_port,
                dst_port: UDP_PORT,
            };
            let icrc = flow.icrc(packet, 0).to_le_bytes();
            packet.extend_from_slice(&icrc);
        }
    }

    fn arrive(&mut self, at: Time, to: usize, path: Path, bytes: Vec<u8>, segment_bytes: usize) {
        if !bytes.is_empty() {
            self.plan(
                at,
                Happening::Arrive {
                    to,
                    path,
                    bytes,
                    segment_bytes,
                    local: false,
                },
            );
        }
    }

    // One machine.

    fn join(&mut self, seed: u64) {
        let (machine, changes) = Machine::new(seed, self.latency_ns);
        self.machine = Some(machine);
        self.seen.happened(seen::ONE_MACHINE);
        self.plan_changes(changes);
    }

    fn plan_changes(&mut self, changes: impl IntoIterator<Item = (u64, Change)>) {
        for (delay, change) in changes {
            self.plan(self.now + delay, Happening::Change(change));
        }
    }

    fn change(&mut self, change: Change) {
        let gone = self.hosts.iter().any(|host| host.vanished);
        let Some(machine) = &mut self.machine else { return };
        match change {
            Change::Breaks(host) => {
                let Some((lost, changes)) = machine.breaks(host) else {
                    return;
                };
                self.plan_changes(changes);
                if lost {
                    self.lose_local(|_| true);
                }
                self.set_local(host, false);
            }
            Change::Noticed(host, link) if machine.notices(host, link) => self.set_local(host, false),
            Change::Begins(host) if !gone => {
                if let Some(other) = machine.begins(host) {
                    self.plan_changes([other]);
                    self.set_local(host, true);
                }
            }
            Change::Welcome(host, link) if machine.welcome(host, link) => self.set_local(host, true),
            Change::TakesBack(host) if !self.hosts[host].vanished => machine.revoke_any(host),
            _ => {}
        }
    }

    /// Returns how far the other host has come with the packets that this one sends it through memory. A host that hangs takes
    /// none.
    fn link_progress(&self, host: usize) -> Option<LinkProgress> {
        let machine = self.machine.as_ref().filter(|machine| machine.is_up(host))?;
        let waits = |of: usize| {
            let to_it = |happening: &Happening| {
                matches!(happening, Happening::Arrive { to, local: true, .. }
                    | Happening::Request { to, .. }
                    | Happening::Taken { to, .. } if *to == of)
            };
            self.agenda.values().any(to_it)
        };
        Some(LinkProgress {
            taken: machine.taken(1 - host),
            all: !self.hosts[1 - host].vanished && !waits(0) && !waits(1),
        })
    }

    /// Loses packets that are in flight in memory to these hosts.
    fn lose_local(&mut self, to_these: impl Fn(usize) -> bool) {
        let lost = &mut self.carried.lost;
        self.agenda.retain(|_, happening| match happening {
            Happening::Arrive {
                to,
                bytes,
                segment_bytes,
                local: true,
                ..
            } if to_these(*to) => {
                *lost += bytes.len().div_ceil(*segment_bytes) as u64;
                false
            }
            Happening::Request { to, .. } if to_these(*to) => {
                *lost += 1;
                false
            }
            Happening::Taken { to, .. } => !to_these(*to),
            _ => true,
        });
    }

    /// Tells a host whether its peer is on the same machine.
    fn set_local(&mut self, host: usize, local: bool) {
        let peer = self.hosts[1 - host].address;
        let rnic = &mut self.hosts[host].rnic;
        for qpn in rnic.qps_to(peer, |_| true) {
            rnic.set_local(qpn, local);
        }
        self.settle(host);
    }

    /// Tells a QP, which has just learned its peer, whether that is on the same machine.
    pub(crate) fn meet(&mut self, host: usize, qpn: Qpn) {
        let local = self.machine.as_ref().is_some_and(|machine| machine.is_up(host));
        self.hosts[host].rnic.set_local(qpn, local);
    }

    /// Lets nothing go in or out of a host any more: it died, or it hangs.
    pub(crate) fn vanish(&mut self, host: usize) {
        self.hosts[host].vanished = true;
        if self.machine.as_mut().is_some_and(|machine| !machine.hangs(host)) {
            self.leave(host);
        }
    }

    /// Ends a host, with its end of the link.
    fn leave(&mut self, host: usize) {
        self.change(Change::Breaks(host));
        if let Some(machine) = &mut self.machine {
            machine.part(host);
            self.lose_local(|to| to == host);
        }
    }

    /// Returns whether packets to a QP of a host are in flight.
    pub(crate) fn has_packets_for(&self, host: usize, qpn: Qpn) -> bool {
        let of_qp = |packet: &[u8]| packet.get(5..8) == Some(&qpn.value().to_be_bytes()[1..]);
        self.agenda.values().any(|happening| match happening {
            Happening::Arrive {
                to,
                bytes,
                segment_bytes,
                ..
            } if *to == host => bytes.chunks(*segment_bytes).any(of_qp),
            _ => false,
        })
    }

    /// Revokes grants of a region that a host deregisters or gives other memory: nobody reaches the old memory.
    pub(crate) fn take_back_region(&mut self, host: usize, lkey: LKey) {
        if let Some(machine) = &mut self.machine {
            machine.revoke_region(host, lkey);
        }
    }

    fn take_back_revoked(&mut self, host: usize) {
        let rnic = &mut self.hosts[host].rnic;
        while let Some(qpn) = rnic.poll_revoked() {
            if let Some(machine) = &mut self.machine {
                machine.revoke_qp(host, qpn);
            }
        }
        if let Some(machine) = &self.machine
            && let Some(qpn) = machine.outlived(host, rnic)
        {
            let what = || format!("host {host}: {qpn:?} takes no requests, and its grants are still open");
            self.tap.violation.get_or_insert_with(what);
        }
    }

    /// Asks for a grant of a key, with which requests of a host would need no packet.
    fn ask(&mut self, host: usize, by: Qpn, rkey: RKey) {
        let info = self.hosts[host].rnic.query_qp(by);
        let Some((machine, info)) = self.machine.as_mut().zip(info) else {
            return;
        };
        let wrong = match machine.asks(host, by, rkey) {
            _ if !machine.is_up(host) => None,
            _ if info.qp_type != QpType::Rc => Some(format!("{:?} of host {host} asks", info.qp_type)),
            asked => asked.err(),
        };
        self.tap.violation = self.tap.violation.take().or(wrong);
        let of = info.dest_qpn;
        self.tell(1 - host, GrantMessage::Ask { of, by, rkey });
    }

    /// Sends a message on the link.
    fn tell(&mut self, to: usize, message: GrantMessage) {
        if let Some(machine) = &mut self.machine
            && let Some(link) = machine.link()
        {
            let at = self.now + machine.message_ns();
            self.plan(at, Happening::GrantMessage { to, link, message });
        }
    }

    fn say(&mut self, to: usize, link: u32, message: GrantMessage) {
        let heard = self
            .machine
            .as_mut()
            .filter(|machine| machine.link() == Some(link));
        let Some(machine) = heard.filter(|_| self.hosts.iter().all(|host| !host.vanished)) else {
            return;
        };
        let rnic = &mut self.hosts[to].rnic;
        match message {
            GrantMessage::Ask { of, by, rkey } if machine.answers() => {
                let granted = rnic.grantable(of, rkey).ok();
                let grant = granted.map(|granted| machine.give(to, of, by, rkey, granted));
                self.tell(1 - to, GrantMessage::Answer { by, rkey, grant });
            }
            GrantMessage::Ask { .. } => {}
            GrantMessage::Answer { by, rkey, grant } => {
                rnic.set_grant(self.now, by, rkey, grant);
                self.settle(to);
            }
        }
    }

    /// Returns the ring from a host to the other one, as it is now.
    fn ring(&mut self, from: usize) -> SimRing {
        let link = self.machine.as_ref().filter(|machine| machine.is_up(from));
        // Acknowledgements are forged only where there are any.
        let link = link.and_then(Machine::link).filter(|_| self.forged.is_none());
        let mut ring = SimRing::new(link, self.machine.as_mut().map_or(0, Machine::room));
        if let Some(machine) = self.machine.as_mut().filter(|_| link.is_some()) {
            (ring.lends, ring.named_bytes_min) = machine.lends(from);
        }
        if let Some(link) = link.filter(|_| !self.dice.one_in(4)) {
            let requests = Arc::clone(&self.hosts[from].by_lane);
            ring.for_lanes = Some(Arc::new(LaneRing { link, requests }));
        }
        ring
    }

    /// Carries the requests of a ring.
    fn send_requests(&mut self, from: usize, ring: SimRing) {
        let (Some(link), to) = (ring.link, 1 - from) else {
            return;
        };
        for request in ring.requests {
            if self.hosts[from].vanished {
                continue;
            }
            let path = Path {
                src: self.hosts[from].address,
                dst: self.hosts[to].address,
                src_port: UDP_PORT,
                traffic_class: 0,
            };
            // The queue pair may have failed since, and ended what its requests name.
            if let Ok(mut packet) = request.whole() {
                end_packet(&mut packet);
                self.tap.look(from, None, &packet);
            }
            self.carried.packets += 1;
            self.carried.bytes += RingBytes::bytes(&request) as u64;
            let arrival = |machine: &mut Machine| machine.arrival(self.now, to);
            let Some(at) = self.machine.as_mut().and_then(arrival) else {
                self.carried.lost += 1;
                continue;
            };
            let request = Happening::Request {
                to,
                link,
                path,
                request,
            };
            self.plan(at, request);
        }
        for (of, lkey) in ring.wanted {
            if let Some(machine) = &mut self.machine {
                machine.lend(from, &mut self.hosts[from].rnic, of, lkey);
            }
        }
    }

    /// Takes a request out of a ring.
    fn take_request(&mut self, to: usize, link: u32, path: Path, request: SimRequest) {
        if self.hosts[to].vanished {
            return;
        }
        if let Some(machine) = &mut self.machine {
            machine.takes(to);
            if !request.named.is_empty() {
                machine.ends_loans(1 - to);
            }
        }
        let ticket = request.ticket;
        let is_held = request.named.is_empty();
        // The first to poll takes it: a thread, or the device.
        let by_lane = is_held && self.dice.one_in(2) && self.take_by_lane(to, path.src, &request);
        let rnic = &mut self.hosts[to].rnic;
        let outcome = match by_lane {
            true => Some(Taken::Done),
            false => rnic.handle_request(self.now, path.src, &request),
        };
        let whole = outcome.is_none().then(|| request.whole().ok()).flatten();
        let whole_is_there = whole.is_some();
        if let Some(mut bytes) = whole {
            end_packet(&mut bytes);
            let arrival = Arrival {
                src: path.src,
                src_port: path.src_port,
                dst: path.dst,
                traffic_class: path.traffic_class,
                bytes: &bytes,
                segment_bytes: bytes.len(),
                local: true,
            };
            rnic.handle_arrival(self.now, &arrival);
        }
        let otherwise = if whole_is_there {
            Taken::Deferred
        } else {
            Taken::Again
        };
        let taken = outcome.unwrap_or(otherwise);
        self.seen.happened(match taken {
            Taken::Done if is_held => seen::REQUEST_DONE,
            Taken::Done => seen::NAMED_REQUEST_DONE,
            Taken::Deferred => seen::REQUEST_DEFERRED,
            Taken::Again => seen::REQUEST_AGAIN,
        });
        // The sender finds in its ring what was sent before, and looks at the end of the request then.
        let back = 1 - to;
        if let Some(at) = self
            .machine
            .as_mut()
            .and_then(|machine| machine.arrival(self.now, back))
        {
            let taken = Happening::Taken {
                to: back,
                link,
                ticket,
                taken,
            };
            self.plan(at, taken);
        }
        self.settle(to);
    }

    /// Has a lane execute a request, if one covers it.
    fn take_by_lane(&mut self, to: usize, src: IpAddr, request: &SimRequest) -> bool {
        let (lanes, mut deliveries) = (self.hosts[to].rnic.lanes(), Vec::new());
        let taken = lanes.take(src, request, &mut Recent::default(), || self.now, &mut deliveries);
        self.deliver(to, deliveries);
        if taken {
            self.seen.happened(seen::TAKEN_BY_LANE);
        }
        taken
    }

    /// Handles the end of a request in a ring.
    fn end_request(&mut self, of: usize, ticket: Ticket, taken: Taken) {
        if taken == Taken::Done && self.dice.one_in(2) {
            let (lanes, mut recent, mut deliveries) =
                (self.hosts[of].rnic.lanes(), Recent::default(), Vec::new());
            let ended = lanes.has(&ticket, &mut recent)
                && lanes.end(ticket, &mut recent, || self.now, &mut deliveries);
            self.deliver(of, deliveries);
            if ended {
                self.seen.happened(seen::ENDED_BY_LANE);
                return;
            }
        }
        self.hosts[of].rnic.handle_taken(self.now, ticket, taken);
    }

    /// Carries a train through memory.
    fn carry_local(&mut self, to: usize, path: Path, bytes: &[u8], segment_bytes: usize) {
        let forges = self.forged.is_some_and(|(from, _)| from != to);
        let together = if forges { segment_bytes } else { bytes.len() };
        for part in bytes.chunks(together) {
            let packets = part.len().div_ceil(segment_bytes) as u64;
            self.carried.packets += packets;
            self.carried.bytes += part.len() as u64;
            let mut bytes = part.to_vec();
            if forges {
                self.forge_answer(&path, &mut bytes);
            }
            let at = self
                .machine
                .as_mut()
                .and_then(|machine| machine.arrival(self.now, to));
            let Some(at) = at else {
                self.carried.lost += packets;
                continue;
            };
            let arrive = Happening::Arrive {
                to,
                path,
                bytes,
                segment_bytes,
                local: true,
            };
            self.plan(at, arrive);
        }
    }
}

/// Requests that a host puts into its ring.
pub(crate) struct SimRing {
    /// The link; `None` if there is none.
    link: Option<u32>,
    /// Number of requests for which there is room.
    room: usize,
    lends: Lends,
    named_bytes_min: usize,
    /// Regions that requests would name.
    wanted: Vec<(Qpn, LKey)>,
    pub(crate) requests: Vec<SimRequest>,
    /// The ring as lanes use it.
    for_lanes: Option<Arc<LaneRing>>,
}

/// Requests that the lanes of a host have put into the ring of a link, for which there was room.
pub(crate) type LaneRequests = Mutex<ByLane>;

#[derive(Debug, Default)]
pub(crate) struct ByLane {
    room: usize,
    requests: Vec<(u32, Ticket, Vec<u8>)>,
}

/// The ring of a link, as lanes use it.
#[derive(Debug)]
struct LaneRing {
    link: u32,
    requests: Arc<LaneRequests>,
}

impl PeerRing for LaneRing {
    fn put(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Put {
        let mut by_lane = self.requests.lock();
        let request = SimRequest::held(ticket, vec![0; bytes]);
        if by_lane.requests.len() >= by_lane.room || !fill(&request) {
            return Put::Not;
        }
        by_lane
            .requests
            .push((self.link, ticket, request.bytes.into_inner()));
        Put::Done
    }
}

impl SimRing {
    pub(crate) fn new(link: Option<u32>, room: usize) -> SimRing {
        SimRing {
            link,
            room,
            lends: Lends::default(),
            named_bytes_min: usize::MAX,
            wanted: Vec::new(),
            requests: Vec::new(),
            for_lanes: None,
        }
    }

    fn is_full(&self) -> bool {
        self.link.is_none() || self.requests.len() >= self.room
    }
}

impl Rings for SimRing {
    fn reach(&mut self, _: (IpAddr, Qpn)) -> bool {
        self.link.is_some()
    }

    fn put(&mut self, _: (IpAddr, Qpn), ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> bool {
        let request = SimRequest::held(ticket, vec![0; bytes]);
        if self.is_full() || !fill(&request) {
            return false;
        }
        self.requests.push(request);
        true
    }

    fn ring_to(&mut self, _: (IpAddr, Qpn)) -> Option<Arc<dyn PeerRing>> {
        let ring: Arc<dyn PeerRing> = self.for_lanes.clone()?;
        Some(ring)
    }

    fn named_bytes_min(&self) -> usize {
        self.named_bytes_min
    }

    fn put_named(&mut self, _: (IpAddr, Qpn), ticket: Ticket, heads: &[u8], parts: &[Part]) -> bool {
        if self.is_full() {
            return false;
        }
        match self.lends.name(ticket.qpn, parts) {
            Ok(named) => {
                let mut request = SimRequest::held(ticket, heads.to_vec());
                request.named = named;
                self.requests.push(request);
                true
            }
            Err(lkey) => {
                self.wanted.push((ticket.qpn, lkey));
                false
            }
        }
    }
}

/// A request in a ring.
#[derive(Debug)]
pub(crate) struct SimRequest {
    pub(crate) ticket: Ticket,
    /// The bytes that the record holds, and the rest that it names.
    pub(crate) bytes: RefCell<Vec<u8>>,
    named: Vec<Named>,
}

impl SimRequest {
    pub(crate) fn held(ticket: Ticket, bytes: Vec<u8>) -> SimRequest {
        SimRequest {
            ticket,
            bytes: RefCell::new(bytes),
            named: Vec::new(),
        }
    }

    /// Returns all bytes, as they are now, if they can be read.
    fn whole(&self) -> Result<Vec<u8>, PeerFault> {
        let mut all = vec![0; RingBytes::bytes(self)];
        self.read(0, &mut all)?;
        Ok(all)
    }
}

impl Room for SimRequest {
    fn write(&self, at: usize, bytes: &[u8]) {
        self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn write_from(&self, at: usize, from: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault> {
        from.read(offset, &mut self.bytes.borrow_mut()[at..at + len])
    }
}

impl RingBytes for SimRequest {
    fn bytes(&self) -> usize {
        self.held() + self.named.iter().map(|named| named.len).sum::<usize>()
    }

    fn held(&self) -> usize {
        self.bytes.borrow().len()
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        let held = self.held();
        let heads = held.saturating_sub(at).min(out.len());
        if heads > 0 {
            out[..heads].copy_from_slice(&self.bytes.borrow()[at..][..heads]);
        }
        let (mut skip, mut done) = (at.saturating_sub(held), heads);
        for named in &self.named {
            let n = named.len.saturating_sub(skip).min(out.len() - done);
            if n == 0 && done == out.len() {
                break;
            }
            named.read(skip.min(named.len), &mut out[done..done + n])?;
            skip = skip.saturating_sub(named.len);
            done += n;
        }
        assert_eq!(done, out.len());
        Ok(())
    }

    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault> {
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes)?;
        to.write(offset, &bytes).map_err(PeerFault::Own)
    }
}
