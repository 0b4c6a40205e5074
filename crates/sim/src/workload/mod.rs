//! Operations by seed, and the checks of their results.
//!
//! The model is a second copy of each host's memory. Operations in flight at the same time never touch the same bytes, so the
//! effect of an operation is written into the model when it is posted, and compared when it completes. At the end all of both
//! memories is compared: nothing else may have changed. Atomic operations may work on the same words; the values that they
//! returned must fit one order of them all ([`words`]).

use std::collections::VecDeque;

use rdmux_rnic::{Access, Cause, Cqn, Event, Path, Psn, QpAttributes, QpState, Qpn, Status, WcOpcode};

use crate::dice::Dice;
use crate::tap::Agreed;
use crate::world::{Faults, Shape, Step, World};
use crate::{Ending, Report, Settings, seen};

mod check;
mod ending;
mod keys;
mod path;
mod post;
mod shared;
mod side;
mod skip;
mod words;

use side::{GUARD, Layout, NARROW, Piece, SHARED, Service, Side};
use words::WordOp;

/// Maximum number of steps for each operation; a run that takes more does not become idle.
const STEPS_PER_OPERATION: u64 = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpKind {
    Send,
    Write,
    Read,
    Flush,
    FetchAdd,
    CompareSwap,
    AtomicWrite,
    Bind,
    Register,
    LocalInvalidate,
    /// A request that must be refused.
    Probe,
}

#[derive(Debug)]
struct Op {
    wr_id: u64,
    kind: OpKind,
    bytes: u64,
    local: Vec<Piece>,
    remote: Option<Piece>,
    signaled: bool,
    /// WRITE: set when a later FLUSH checks its bytes and frees them.
    held: bool,
    /// Pieces that must be on the medium when it completes; ATOMIC WRITE: pieces that may be freed then.
    covers: Vec<Piece>,
    /// READ: set when a WRITE behind it sends on the bytes that it brings, and frees them.
    lends: bool,
    /// FLUSH: set when an ATOMIC WRITE behind it frees what it covers.
    publishes: bool,
    /// Key of the peer that it uses, or key of its own end that it changes.
    key: Option<usize>,
    word: Option<WordOp>,
}

#[derive(Debug)]
struct Recv {
    wr_id: u64,
    pieces: Vec<Piece>,
    /// Shared receive queue that it is for; then the message brings its content along.
    shared: Option<usize>,
    data: Vec<u8>,
    byte_len: u32,
    imm: Option<u32>,
    opcode: WcOpcode,
    solicited: bool,
    /// Key of the receiver that the message invalidates.
    invalidates: Option<usize>,
}

/// Progress of the send queue through SQD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drain {
    No,
    Asked,
    Drained,
}

/// One direction of one connection.
#[derive(Debug)]
struct Flow {
    todo: u32,
    depth: usize,
    outstanding: VecDeque<Op>,
    /// Receives of the other end, in the order in which messages need them; the posted ones come first.
    recvs: VecDeque<Recv>,
    recvs_posted: usize,
    held: Vec<Piece>,
    /// Pieces that the next operation, an ATOMIC WRITE, declares to be on the medium.
    to_publish: Option<Vec<Piece>>,
    /// Pieces that the next operation, a WRITE behind a fence, sends on: a READ fills them with these bytes.
    to_forward: Option<(Vec<Piece>, Vec<u8>)>,
    next_wr_id: u64,
    next_recv_id: u64,
    /// Status of the first operation that failed.
    failed: Option<Status>,
    recv_failed: bool,
    own_failed: bool,
    /// Set when a READ whose data was lost was flushed: the refusal of a request behind it must follow.
    refusal_owed: bool,
    paused: bool,
    /// Set while nothing is posted until the connection is idle and its PSNs have been moved on.
    rests: bool,
    drain: Drain,
}

pub(crate) struct Workload {
    world: World,
    sides: [Side; 2],
    /// `flows[qp][host]`: the operations that `host` posts on `qp`.
    flows: Vec<[Flow; 2]>,
    dice: Dice,
    layout: Layout,
    bytes_max: u64,
    mtu: u64,
    window_bytes: u32,
    rnr_percent: f64,
    ending: Ending,
    /// (host, QP) of the ending, if it concerns one QP; `ended`: whether it has happened yet.
    ending_at: (usize, usize),
    ended: bool,
    ending_after: u32,
    /// Connections made after a restart.
    second: std::ops::Range<usize>,
    /// By connection: whether it retransmits selectively.
    selective: Vec<bool>,
    lossless: bool,
    /// The shortest local ACK timeout.
    timeout_ns: u64,
    /// Set when the outage was longer than every connection bears.
    outage_ends_all: bool,
    report: Report,
    scratch: Vec<u8>,
}

type Checked = Result<(), String>;

const USER_POST: u64 = 0;
const USER_RECV: u64 = 1;
const USER_SQD: u64 = 2;
const USER_RTS: u64 = 3;
const USER_POLL: u64 = 4;
const USER_FILL: u64 = 5;
const USER_RECONNECT: u64 = 6;
const USER_PATH: u64 = 7;
const USER_SKIP: u64 = 8;

fn tag(what: u64, qp: usize, host: usize) -> u64 {
    what << 32 | (qp as u64) << 1 | host as u64
}

impl Workload {
    pub(crate) fn new(settings: &Settings) -> Workload {
        let mut dice = Dice::new(settings.seed, 0);
        let ending = settings.ending;
        let shape = Shape {
            ipv6: dice.one_in(2),
            gso: !dice.one_in(4),
            gro: !dice.one_in(4),
            lazy_acks: dice.one_in(3),
            latency_ns: dice.log_uniform(300_000) + 1_000,
            // An RNR NAK delays an atomic operation behind a FLUSH; that must not use up few retries.
            flush_ns_max: dice.log_uniform(if ending == Ending::NoReceive {
                100
            } else {
                60_000_000
            }),
            one_machine: settings.one_machine,
        };
        let mtu = u64::from(dice.pick(&[256u32, 512, 1024, 1024, 2048, 4096, 4096]));
        let window_bytes = dice.pick(&[1u64, 4, 8, 16, 64, 256, 1024]) * mtu;
        let bytes_max = u64::from(settings.bytes_max).max(1);
        let faults = Faults {
            loss: settings.loss_percent,
            dup: settings.dup_percent,
            reorder: settings.reorder_percent,
            corrupt: settings.corrupt_percent,
        };
        let mut world = World::new(settings.seed, shape, faults, window_bytes as u32);
        let qps = settings.qps.max(1) as usize;
        let layout = Layout {
            // Room for a few of the longest operations, or for many short ones.
            room: (6 * bytes_max).max(96 * 1024 * qps as u64),
            shared_room: 64 << 10,
            // Twice as many connections after a restart.
            flows: 4 * qps,
        };
        let sides = [0, 1].map(|host| Side::new(&mut world, host, &mut dice, layout));
        let mut report = Report::new(settings);
        report.address_family = if shape.ipv6 { "IPv6" } else { "IPv4" };
        report.path_mtu = mtu as u32;
        report.window_bytes = window_bytes as u32;
        report.latency_ns = shape.latency_ns;
        report.trains = shape.gso;
        let ending_at = (dice.below(2) as usize, dice.below(qps as u64) as usize);
        let ending_after = dice.below(u64::from(settings.operations.max(1))) as u32;
        let rnr_percent = dice.pick(&[0.0, 5.0, 30.0]);
        let mut workload = Workload {
            world,
            sides,
            flows: Vec::new(),
            layout,
            bytes_max,
            mtu,
            window_bytes: window_bytes as u32,
            rnr_percent: if ending == Ending::NoReceive {
                0.0
            } else {
                rnr_percent
            },
            ending,
            ending_at,
            ended: false,
            ending_after,
            second: 0..0,
            selective: Vec::new(),
            lossless: settings.loss_percent + settings.corrupt_percent + settings.reorder_percent == 0.0
                && !settings.path_changes
                && !settings.one_machine,
            timeout_ns: u64::MAX,
            outage_ends_all: false,
            dice,
            report,
            scratch: Vec::new(),
        };
        workload.add_connections(qps, settings.operations);
        if settings.path_changes {
            workload.plan_path_changes();
        }
        workload
    }

    /// Makes connections that perform `operations` in all.
    fn add_connections(&mut self, qps: usize, operations: u32) {
        let timeout = self.timeout();
        let parts = 2 * qps as u32;
        for qp in 0..qps {
            // Only a queue with receives of its own can run out of them.
            let plain = self.ending == Ending::NoReceive && qp == self.ending_at.1;
            let service = if !plain && self.dice.one_in(3) {
                Service::Xrc
            } else {
                Service::Rc
            };
            let is_narrow = |host| self.ending == Ending::Overrun && self.ending_at == (host, qp);
            let narrow = [0, 1].map(is_narrow);
            for (host, narrow) in narrow.into_iter().enumerate() {
                let (shape, dice) = ((plain, narrow), &mut self.dice);
                self.sides[host].add_end(&mut self.world, host, dice, service, shape);
                if self.ending == Ending::NoRight {
                    self.sides[host].add_key_of_one_right(&mut self.world, host, dice);
                }
            }
            let flows = [0, 1].map(|host| {
                let extra = operations % parts > 2 * qp as u32 + host;
                // A request with nothing before it needs no packet on one machine.
                let deepest = match () {
                    () if narrow[host as usize] => NARROW,
                    () if self.report.settings.one_machine && self.dice.one_in(2) => 2,
                    () => 32,
                };
                let depth = self.dice.log_uniform(deepest.into()) as usize;
                Flow::new(operations / parts + u32::from(extra), depth)
            });
            self.flows.push(flows);
            let qp = self.flows.len() - 1;
            self.connect(qp, service, timeout);
        }
    }

    fn timeout(&mut self) -> u8 {
        // A round trip is at most 2 x 4.25 latencies, reordering included.
        let mut timeout = 1;
        while 4_096u64 << timeout < 12 * self.report.latency_ns + 100_000 {
            timeout += 1;
        }
        let timeout = timeout + self.dice.below(3) as u8;
        self.timeout_ns = self.timeout_ns.min(4_096 << timeout);
        timeout
    }

    /// Returns a PSN by which packets from before the restart would fit into a connection that was made after it.
    fn psn_before_restart(&mut self, qp: usize, host: usize) -> Option<Psn> {
        let before = qp.checked_sub(self.second.start)?;
        let to = self.sides[1 - host].ends[before].recv_qpn;
        let psn = self
            .world
            .tap
            .requested(host, to)
            .filter(|_| self.second.contains(&qp))?;
        Some(psn.minus(self.dice.below(4) as u32))
    }

    /// Brings both ends to RTS by hand: connection management has its own runs.
    fn connect(&mut self, qp: usize, service: Service, timeout: u8) {
        let near_wrap = self.dice.one_in(2);
        let selective = self.dice.one_in(2);
        let carried_acks = service == Service::Rc && self.dice.one_in(2);
        // One sequence each way, on RC and on XRC.
        let psns = [0, 1].map(|host| {
            if let Some(psn) = self.psn_before_restart(qp, host) {
                psn
            } else if near_wrap {
                Psn::new(0x100_0000 - self.dice.log_uniform(400) as u32)
            } else {
                Psn::new(self.dice.next() as u32)
            }
        });
        self.selective.push(selective);
        let depths = [0, 1].map(|_| self.dice.pick(&[1u8, 1, 2, 4, 16, 128]));
        let rnr_timer = self.dice.between(1, 16) as u8;
        let few = self.ending == Ending::NoReceive && qp == self.ending_at.1;
        for host in 0..2 {
            let path = Path {
                src: self.world.hosts[host].address,
                dst: self.world.hosts[1 - host].address,
                src_port: 0xc000 + qp as u16,
                traffic_class: 0,
            };
            let init = QpAttributes {
                access: Some(side::RIGHTS.difference(Access::MW_BIND | Access::LOCAL_WRITE)),
                ..Default::default()
            };
            let (own, peer) = (&self.sides[host].ends[qp], &self.sides[1 - host].ends[qp]);
            let rtr = QpAttributes {
                path: Some(path),
                path_mtu: Some(self.mtu as u32),
                dest_qpn: Some(peer.send_qpn),
                rq_psn: Some(psns[1 - host]),
                max_dest_rd_atomic: Some(depths[1 - host]),
                min_rnr_timer: Some(rnr_timer),
                window_bytes: Some(self.window_bytes),
                peer_is_rdmux: Some(true),
                selective: Some(selective),
                carried_acks: (service == Service::Rc).then_some(carried_acks),
                ..Default::default()
            };
            let rts = QpAttributes {
                sq_psn: Some(psns[host]),
                timeout: Some(timeout),
                retry_count: Some(7),
                rnr_retry: Some(if few { 2 } else { 7 }),
                max_rd_atomic: Some(depths[host]),
                ..Default::default()
            };
            let mut ways = vec![(own.send_qpn, rtr, Some(rts))];
            if service == Service::Xrc {
                let send = QpAttributes {
                    dest_qpn: Some(peer.recv_qpn),
                    max_dest_rd_atomic: None,
                    min_rnr_timer: None,
                    ..rtr
                };
                let target = QpAttributes {
                    sq_psn: Some(psns[host]),
                    timeout: Some(timeout),
                    ..Default::default()
                };
                // A target responds in RTR too.
                let target = (!self.dice.one_in(2)).then_some(target);
                ways = vec![(own.send_qpn, send, Some(rts)), (own.recv_qpn, rtr, target)];
            }
            for (qpn, rtr, rts) in ways {
                if let Some(peer) = rtr.dest_qpn {
                    let agreed = Agreed {
                        path,
                        selective,
                        carried_acks,
                    };
                    self.world.tap.agree(host, peer, agreed);
                }
                self.world.with(host, |rnic, now| {
                    let steps = [
                        Some((QpState::Init, init)),
                        Some((QpState::Rtr, rtr)),
                        rts.map(|rts| (QpState::Rts, rts)),
                    ];
                    for (to, attr) in steps.into_iter().flatten() {
                        rnic.modify_qp(now, qpn, to, &attr).expect("as the table has it");
                    }
                });
                self.world.meet(host, qpn);
            }
        }
    }

    pub(crate) fn run(mut self) -> Report {
        let result = self.drive();
        let report = &mut self.report;
        report.violation = result.err();
        let strangers: u64 = (self.world.hosts.iter())
            .map(|host| host.rnic.counters().no_qp)
            .sum();
        if self.ended && self.ending == Ending::Restart && strangers > 0 {
            self.world.seen.happened(seen::OLD_PACKETS);
        }
        report.world(&self.world);
        self.report
    }

    fn drive(&mut self) -> Checked {
        for host in 0..2 {
            for n in 0..SHARED as usize {
                self.fill(host, n)?;
            }
        }
        self.begin(0..self.flows.len())?;
        let operations = u64::from(self.report.settings.operations);
        let limit = STEPS_PER_OPERATION * operations.max(10);
        loop {
            match self.world.step() {
                Step::Rest => {
                    if !self.unblock()? {
                        break;
                    }
                }
                Step::Moved => {}
                Step::User(tag) => {
                    // Results of the step come before what the user does now.
                    self.take_events()?;
                    self.user(tag)?;
                }
            }
            self.take_events()?;
            self.take_completions()?;
            if let Some(what) = self.world.tap.violation.take() {
                return Err(what);
            }
            if !self.ended && self.ending != Ending::None && self.is_time() {
                self.end_something()?;
            }
            if self.world.steps > limit {
                return Err(format!("not idle after {limit} steps; {}", self.what_is_open()));
            }
        }
        self.check_rest()
    }

    fn begin(&mut self, qps: std::ops::Range<usize>) -> Checked {
        for qp in qps {
            if self.report.settings.psn_skips {
                self.plan_skip(qp);
            }
            for host in 0..2 {
                if self.dice.one_in(3) {
                    let delay = self.dice.log_uniform(5_000_000);
                    self.world.call_back(delay, tag(USER_SQD, qp, host));
                }
                self.post_some(qp, host)?;
            }
        }
        Ok(())
    }

    fn user(&mut self, tag: u64) -> Checked {
        let (qp, host) = ((tag as u32 >> 1) as usize, (tag & 1) as usize);
        match tag >> 32 {
            USER_POST => {
                self.flows[qp][host].paused = false;
                self.post_some(qp, host)
            }
            USER_RECV => self.post_recv(qp, host),
            USER_SQD => self.drain(qp, host),
            USER_RTS => self.resume(qp, host),
            USER_POLL => {
                self.sides[host].lazy_poll_planned = false;
                self.poll_lazy(host, false)
            }
            USER_FILL => self.fill(host, qp),
            USER_SKIP => self.skip_psns(qp),
            USER_PATH => {
                self.change_path();
                Ok(())
            }
            _ => self.reconnect(),
        }
    }

    fn what_is_open(&self) -> String {
        let mut text = String::new();
        for (qp, flows) in self.flows.iter().enumerate() {
            for (host, flow) in flows.iter().enumerate() {
                if let Some(op) = flow.outstanding.front() {
                    text += &format!(
                        "QP {qp} host {host}: {} open, oldest {:?} #{} of {} bytes; ",
                        flow.outstanding.len(),
                        op.kind,
                        op.wr_id,
                        op.bytes
                    );
                }
            }
        }
        text
    }

    /// Returns whether the ending concerns this QP, so that its operations may fail.
    fn is_affected(&self, qp: usize) -> bool {
        let all = self.ending_is_everywhere();
        let concerned = all || self.ending != Ending::LinkDown && self.ending_at.1 == qp;
        self.ended && !self.second.contains(&qp) && concerned
    }

    // SQD. IBTA Vol 1, 10.3.1.5.

    fn drain(&mut self, qp: usize, host: usize) -> Checked {
        if self.is_affected(qp) || self.flows[qp][host].drain != Drain::No {
            return Ok(());
        }
        self.flows[qp][host].drain = Drain::Asked;
        let qpn = self.sides[host].ends[qp].send_qpn;
        self.modify(host, qpn, QpState::Sqd, &QpAttributes::default())
    }

    /// Moves a QP back to RTS, perhaps over another path.
    fn resume(&mut self, qp: usize, host: usize) -> Checked {
        if std::mem::replace(&mut self.flows[qp][host].drain, Drain::No) != Drain::Drained {
            return Ok(());
        }
        let qpn = self.sides[host].ends[qp].send_qpn;
        let info = self.world.hosts[host].rnic.query_qp(qpn);
        let Some(info) = info.filter(|info| info.state == QpState::Sqd) else {
            return if self.is_affected(qp) {
                Ok(())
            } else {
                Err(format!("QP {qp} host {host}: not in SQD"))
            };
        };
        if self.dice.one_in(2)
            && let Some(path) = info.path
        {
            let before = path;
            let path = Path {
                src_port: 0xc000 | self.dice.next() as u16,
                traffic_class: (self.dice.next() as u8) & !3,
                ..path
            };
            let attr = QpAttributes {
                path: Some(path),
                ..Default::default()
            };
            self.world.tap.reroute(host, info.dest_qpn, before, path);
            self.modify(host, qpn, QpState::Sqd, &attr)?;
            let longer = QpAttributes {
                path_mtu: Some(4096),
                ..Default::default()
            };
            if self.modify(host, qpn, QpState::Sqd, &longer).is_ok() {
                return Err(format!("QP {qp} host {host}: the path MTU changed in SQD"));
            }
        }
        self.modify(host, qpn, QpState::Rts, &QpAttributes::default())?;
        if self.dice.one_in(2) {
            let delay = self.dice.log_uniform(5_000_000);
            self.world.call_back(delay, tag(USER_SQD, qp, host));
        }
        Ok(())
    }

    fn modify(&mut self, host: usize, qpn: Qpn, to: QpState, attr: &QpAttributes) -> Checked {
        let done = self
            .world
            .with(host, |rnic, now| rnic.modify_qp(now, qpn, to, attr));
        done.map_err(|error| format!("host {host}, {qpn:?}: {error}"))
    }

    // Asynchronous events.

    fn take_events(&mut self) -> Checked {
        for host in 0..2 {
            // Others look at completions, after which receives are posted: a limit would seem not to be reached.
            let events = self.world.hosts[host].events.make_contiguous();
            events.sort_by_key(|event| !matches!(event, Event::SrqLimitReached(_)));
            while let Some(event) = self.world.hosts[host].events.pop_front() {
                self.event(host, &event)
                    .map_err(|what| format!("host {host}: {what} ({event:?})"))?;
            }
            let rnic = &self.world.hosts[host].rnic;
            for shared in &mut self.sides[host].objects.shared {
                shared.look(rnic).map_err(|what| format!("host {host}: {what}"))?;
            }
        }
        Ok(())
    }

    fn event(&mut self, host: usize, event: &Event) -> Checked {
        let qpn = match event {
            Event::CqError(cq) => return self.queue_overran(host, *cq),
            Event::SrqLimitReached(srqn) => return self.limit_reached(host, *srqn),
            Event::QpError(qpn, ..)
            | Event::CommunicationEstablished(qpn)
            | Event::SqDrained(qpn)
            | Event::LastWqeReached(qpn) => *qpn,
            _ => return Err("unexpected".to_owned()),
        };
        let qp = self.sides[host].end_of(qpn).ok_or("of an unknown QP")?;
        let affected = self.is_affected(qp);
        let end = &mut self.sides[host].ends[qp];
        match event {
            Event::QpError(_, status, cause) => {
                end.errors += 1;
                // An XRC end consists of two QPs.
                if !affected || end.errors > if end.xrc { 2 } else { 1 } {
                    return Err("not to be expected".to_owned());
                }
                let failed = self.flows[qp][host].failed;
                if *cause == Cause::OwnRequest && *status == Status::Flushed {
                    return Err(format!("its request ended with {failed:?}"));
                }
            }
            Event::CommunicationEstablished(_) => {
                end.established += 1;
                if !end.xrc || end.established > 1 {
                    return Err("in RTS, or twice".to_owned());
                }
            }
            Event::LastWqeReached(_) => {
                end.last_wqe += 1;
                if end.srq.is_none() || end.last_wqe > 1 || !affected {
                    return Err("not to be expected".to_owned());
                }
            }
            _ => {
                if self.flows[qp][host].drain != Drain::Asked {
                    return Err("not asked for, or twice".to_owned());
                }
                // Completions of the same step came before.
                self.take_completions()?;
                self.flows[qp][host].drain = Drain::Drained;
                let delay = self.dice.log_uniform(500_000);
                self.world.call_back(delay, tag(USER_RTS, qp, host));
            }
        }
        Ok(())
    }

    /// Handles an overrun: completions that the queue holds can still be polled; nothing more comes.
    fn queue_overran(&mut self, host: usize, cq: Cqn) -> Checked {
        let (at, qp) = self.ending_at;
        let end = &mut self.sides[host].ends[qp];
        if at != host || end.narrow != Some(cq) || !end.narrow_unpolled || end.overrun {
            return Err("not to be expected".to_owned());
        }
        end.overrun = true;
        let mut held = 0;
        while let Some(wc) = self.world.poll_cq(host, cq) {
            held += 1;
            self.completion(host, &wc)?;
        }
        if held != NARROW {
            return Err(format!("an overrun queue of {NARROW} held {held}"));
        }
        Ok(())
    }

    // Shared receive queues.

    fn limit_reached(&mut self, host: usize, srqn: rdmux_rnic::Srqn) -> Checked {
        let shared = &mut self.sides[host].objects.shared;
        let n = shared.iter().position(|shared| shared.srqn == srqn);
        let n = n.ok_or("of an unknown queue")?;
        shared[n].limit_reached(&self.world.hosts[host].rnic)?;
        if self.dice.one_in(2) {
            let delay = self.dice.log_uniform(1_000_000);
            self.world.call_back(delay, tag(USER_FILL, n, host));
            return Ok(());
        }
        self.fill(host, n)
    }

    fn fill(&mut self, host: usize, n: usize) -> Checked {
        let objects = &mut self.sides[host].objects;
        let (common, dice) = (&objects.common, &mut self.dice);
        objects.shared[n]
            .fill(
                &mut self.world.hosts[host].rnic,
                dice,
                common,
                post::recv_tag(Some(n)),
            )
            .map_err(|what| format!("host {host}: {what}"))
    }
}

impl OpKind {
    /// Returns the index in [`Report::done`].
    fn index(self) -> usize {
        match self {
            OpKind::Send => 0,
            OpKind::Write => 1,
            OpKind::Read => 2,
            OpKind::Flush => 3,
            OpKind::FetchAdd | OpKind::CompareSwap => 4,
            OpKind::AtomicWrite => 5,
            OpKind::Bind | OpKind::Register | OpKind::LocalInvalidate | OpKind::Probe => 6,
        }
    }

    fn opcode(self) -> WcOpcode {
        match self {
            OpKind::Send | OpKind::Probe => WcOpcode::Send,
            OpKind::Write => WcOpcode::Write,
            OpKind::Read => WcOpcode::Read,
            OpKind::Flush => WcOpcode::Flush,
            OpKind::FetchAdd => WcOpcode::FetchAdd,
            OpKind::CompareSwap => WcOpcode::CompareSwap,
            OpKind::AtomicWrite => WcOpcode::AtomicWrite,
            OpKind::Bind => WcOpcode::BindWindow,
            OpKind::Register => WcOpcode::Register,
            OpKind::LocalInvalidate => WcOpcode::LocalInvalidate,
        }
    }

    /// Returns whether the operation needs no peer.
    fn is_local(self) -> bool {
        matches!(self, OpKind::Bind | OpKind::Register | OpKind::LocalInvalidate)
    }

    /// Returns whether only data from the peer completes the operation.
    fn takes_answer(self) -> bool {
        matches!(self, OpKind::Read | OpKind::FetchAdd | OpKind::CompareSwap)
    }
}

impl Flow {
    fn new(todo: u32, depth: usize) -> Flow {
        Flow {
            todo,
            depth: depth.max(1),
            outstanding: VecDeque::new(),
            recvs: VecDeque::new(),
            recvs_posted: 0,
            held: Vec::new(),
            to_publish: None,
            to_forward: None,
            next_wr_id: 0,
            next_recv_id: 0,
            failed: None,
            recv_failed: false,
            own_failed: false,
            refusal_owed: false,
            paused: false,
            rests: false,
            drain: Drain::No,
        }
    }
}
