//! UC, UD and multicast by seed, and the checks of their results.
//!
//! Every message has a number, from which its bytes follow; its receiver gets the number as immediate data, or recognises the
//! message by the bytes. So each receive tells which message it took, and that message determines what the receive must hold,
//! which QPs may have it and how often. The receives of a QP are used in their order and none is lost; the messages of a UC
//! connection keep their order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_rnic::{
    Access, Cqn, LKey, Operation, Path, Pd, PostError, Psn, QpAttributes, QpInit, QpState, QpType, Qpn, RKey,
    RecvRequest, RegionSpec, SendFlags, SendRequest, Sge, SgeList, Status, Target, WcOpcode, WorkCompletion,
};

use crate::dice::Dice;
use crate::memory::{Door, MemoryKind, SimMemory, Space};
use crate::world::{Faults, Shape, Step, World};
use crate::{Report, Settings};

type Checked = Result<(), String>;

/// Bytes of each host's memory; nobody may touch the first and the last.
const MEMORY: u64 = 3 << 20;
const GUARD: u64 = 4096;
const IOVA: u64 = 1 << 40;
const GRH: usize = 40;
/// Minimum length of messages that are told apart by their bytes.
const KNOWN_BY_BYTES: u64 = 16;
/// Longest datagram: the device's own.
const DATAGRAM_MAX: u64 = 4096;
const KEY: u32 = 0x1111_1111;
/// Maximum number of steps for each message; a run that takes more does not become idle.
const STEPS_PER_MESSAGE: u64 = 2_000;

const ACT: u64 = 0;
const PATH: u64 = 1;

#[derive(Clone, Copy, Debug)]
struct Piece {
    at: u64,
    len: u64,
}

/// A message that was sent.
#[derive(Debug)]
struct Message {
    from: usize,
    bytes: usize,
    /// Destination address of a datagram.
    dst: Option<IpAddr>,
    /// WRITE: location of its bytes at the receiver.
    placed: Option<Piece>,
    /// QPs that may receive it.
    receivers: BTreeSet<usize>,
    /// Number of times that each QP received it.
    had: BTreeMap<usize, u32>,
    /// QPs that left the group before they received it.
    excused: BTreeSet<usize>,
    traffic_class: u8,
    /// Set for a message without immediate data.
    is_plain: bool,
}

#[derive(Debug)]
struct Queue {
    host: usize,
    qpn: Qpn,
    /// QP that it is connected with; UD has none.
    peer: Option<usize>,
    groups: Vec<IpAddr>,
    recvs: VecDeque<(u64, Piece)>,
    next_recv: u64,
    /// Number of receives to keep posted.
    depth: usize,
    /// Posted requests, with the status that each must complete with.
    sends: VecDeque<(u64, Status)>,
    next_send: u64,
    /// Last message of UC that arrived.
    last: Option<u32>,
    /// Set when a request of its own failed.
    broken: bool,
}

struct Side {
    pd: Pd,
    cq: Cqn,
    memory: Arc<SimMemory>,
    model: Vec<u8>,
    space: Space,
    /// Bytes that messages may or may not have changed.
    unknown: Vec<Piece>,
    lkey: LKey,
    rkey: RKey,
}

struct Run {
    world: World,
    sides: [Side; 2],
    queues: Vec<Queue>,
    messages: Vec<Message>,
    groups: Vec<IpAddr>,
    dice: Dice,
    seed: u64,
    left: u32,
    bytes_max: u64,
    datagram_max: u64,
    /// Set when nothing is lost, copied or overtaken, and receives are posted: then everything arrives, once.
    faultless: bool,
    report: Report,
}

pub(crate) fn run(settings: &Settings) -> Report {
    let mut run = Run::new(settings);
    let result = run.drive();
    run.report.violation = result.err();
    run.report.world(&run.world);
    run.report
}

impl Run {
    fn new(settings: &Settings) -> Run {
        let mut dice = Dice::new(settings.seed, 5);
        let shape = Shape {
            ipv6: dice.one_in(2),
            gso: !dice.one_in(4),
            gro: dice.one_in(2),
            lazy_acks: dice.one_in(2),
            latency_ns: dice.log_uniform(1_000_000) + 100,
            flush_ns_max: 1,
            one_machine: settings.one_machine,
        };
        let faults = Faults {
            loss: settings.loss_percent,
            dup: settings.dup_percent,
            reorder: settings.reorder_percent,
            // Over IPv4 16 of the check bits remain, which is too few for so many runs.
            corrupt: if shape.ipv6 { settings.corrupt_percent } else { 0.0 },
        };
        let mut report = Report::new(settings);
        report.address_family = if shape.ipv6 { "IPv6" } else { "IPv4" };
        report.latency_ns = shape.latency_ns;
        report.trains = shape.gso;
        report.path_mtu = dice.pick(&[256, 512, 1024, 2048, 4096]);
        let mut world = World::new(settings.seed, shape, faults, 1 << 18);
        let sides = [0, 1].map(|host| Side::new(&mut world, host, &mut dice));
        let groups = [1u8, 2].map(|n| {
            if shape.ipv6 {
                IpAddr::from([0xff0e, 0, 0, 0, 0, 0, 0, u16::from(n)])
            } else {
                IpAddr::from([239, 0, 0, n])
            }
        });
        let mut run = Run {
            world,
            sides,
            queues: Vec::new(),
            messages: Vec::new(),
            groups: groups.to_vec(),
            seed: settings.seed,
            left: settings.operations,
            bytes_max: u64::from(settings.bytes_max).min(8 << 10),
            datagram_max: dice.log_uniform(DATAGRAM_MAX),
            faultless: faults.loss + faults.dup + faults.reorder + faults.corrupt == 0.0
                && !settings.path_changes
                && !settings.one_machine,
            dice,
            report,
        };
        for _ in 0..settings.qps.div_ceil(2) {
            run.add_connection();
            run.add_datagram_qps();
        }
        run
    }

    fn add_qp(&mut self, host: usize, qp_type: QpType) -> usize {
        let side = &self.sides[host];
        let init = QpInit {
            qp_type,
            max_send_wr: 64,
            max_recv_wr: 512,
            ..QpInit::new(side.pd, side.cq)
        };
        let qpn = self.world.hosts[host].rnic.create_qp(init);
        // Now and then no receive is posted.
        let few = !self.faultless && self.dice.one_in(3);
        self.queues.push(Queue {
            host,
            qpn: qpn.expect("there are QPNs"),
            peer: None,
            groups: Vec::new(),
            recvs: VecDeque::new(),
            next_recv: 0,
            depth: if few { self.dice.below(3) as usize } else { 24 },
            sends: VecDeque::new(),
            next_send: 0,
            last: None,
            broken: false,
        });
        self.queues.len() - 1
    }

    fn modify(&mut self, qp: usize, steps: &[(QpState, QpAttributes)]) {
        let Queue { host, qpn, .. } = self.queues[qp];
        self.world.with(host, |rnic, now| {
            for (to, attr) in steps {
                rnic.modify_qp(now, qpn, *to, attr).expect("as the table has it");
            }
        });
    }

    fn psn(&mut self) -> Psn {
        // Near the wrap every other time.
        if self.dice.one_in(2) {
            Psn::new(0x100_0000 - self.dice.log_uniform(200) as u32)
        } else {
            Psn::new(self.dice.next() as u32)
        }
    }

    fn add_connection(&mut self) {
        let ends = [0, 1].map(|host| self.add_qp(host, QpType::Uc));
        let psns = [0, 1].map(|_| self.psn());
        for host in 0..2 {
            let (qp, peer) = (ends[host], ends[1 - host]);
            self.queues[qp].peer = Some(peer);
            let init = QpAttributes {
                access: Some(Access::REMOTE_WRITE),
                ..Default::default()
            };
            let rtr = QpAttributes {
                path: Some(self.path(host, self.world.hosts[1 - host].address)),
                path_mtu: Some(self.report.path_mtu),
                dest_qpn: Some(self.queues[peer].qpn),
                rq_psn: Some(psns[1 - host]),
                peer_is_rdmux: Some(true),
                ..Default::default()
            };
            let rts = QpAttributes {
                sq_psn: Some(psns[host]),
                ..Default::default()
            };
            self.modify(
                qp,
                &[(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)],
            );
        }
    }

    fn add_datagram_qps(&mut self) {
        for host in 0..2 {
            let qp = self.add_qp(host, QpType::Ud);
            let init = QpAttributes {
                qkey: Some(KEY),
                ..Default::default()
            };
            let rts = QpAttributes {
                sq_psn: Some(self.psn()),
                ..Default::default()
            };
            let rtr = QpAttributes::default();
            self.modify(
                qp,
                &[(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)],
            );
            for group in self.groups.clone() {
                if self.dice.one_in(2) {
                    let qpn = self.queues[qp].qpn;
                    let rnic = &mut self.world.hosts[host].rnic;
                    rnic.attach_mcast(qpn, group).expect("a UD QP and a group");
                    self.queues[qp].groups.push(group);
                }
            }
        }
    }

    fn path(&self, host: usize, dst: IpAddr) -> Path {
        Path {
            src: self.world.hosts[host].address,
            dst,
            src_port: 0xc123,
            traffic_class: 0,
        }
    }

    fn drive(&mut self) -> Checked {
        for qp in 0..self.queues.len() {
            self.post_recvs(qp)?;
        }
        self.world.call_back(1, ACT);
        if self.report.settings.path_changes {
            for _ in 0..self.dice.between(1, 4) {
                let delay = self.dice.log_uniform(40 * self.report.latency_ns);
                self.world.call_back(delay, PATH);
            }
        }
        let limit = STEPS_PER_MESSAGE * u64::from(self.left.max(10));
        loop {
            match self.world.step() {
                Step::Rest => break,
                Step::Moved => {}
                Step::User(PATH) => self.change_path(),
                Step::User(_) => {
                    self.act()?;
                    if self.left > 0 {
                        let delay = self.dice.log_uniform(self.report.latency_ns);
                        self.world.call_back(delay, ACT);
                    }
                }
            }
            self.take_completions()?;
            if self.world.steps > limit {
                return Err(format!("not idle after {limit} steps"));
            }
        }
        self.check_rest()
    }

    fn change_path(&mut self) {
        let for_ns = 10 * self.report.latency_ns;
        match self.dice.below(4) {
            0 => self.world.lose_more(for_ns),
            _ => self.world.change_latency(self.dice.log_uniform(for_ns)),
        }
    }

    fn post_recvs(&mut self, qp: usize) -> Checked {
        while self.queues[qp].recvs.len() < self.queues[qp].depth {
            let queue = &mut self.queues[qp];
            let len = match queue.peer {
                Some(_) => self.bytes_max,
                None => GRH as u64 + self.datagram_max,
            };
            let side = &mut self.sides[queue.host];
            let Some(at) = side.space.take(len) else { break };
            let wr_id = queue.next_recv;
            queue.next_recv += 1;
            queue.recvs.push_back((wr_id, Piece { at, len }));
            // In two elements, whose border sometimes falls into the header.
            let cut = self.dice.below(len.min(100)) as u32;
            let sges = [
                Sge::new(IOVA + at, cut, side.lkey),
                Sge::new(IOVA + at + u64::from(cut), len as u32 - cut, side.lkey),
            ];
            let request = RecvRequest {
                wr_id,
                sges: SgeList::from(&sges[..]),
            };
            let (host, qpn) = (queue.host, queue.qpn);
            self.world
                .with(host, |rnic, now| rnic.post_recv(now, qpn, request))
                .map_err(|error| format!("a receive was refused: {error}"))?;
        }
        Ok(())
    }

    fn act(&mut self) -> Checked {
        let burst = self.dice.log_uniform(16) as u32;
        for _ in 0..burst.min(self.left) {
            let qp = self.dice.below(self.queues.len() as u64) as usize;
            if self.queues[qp].broken {
                self.mend(qp)?;
            }
            if self.queues[qp].sends.len() < 60 {
                self.left -= 1;
                match (self.dice.one_in(20), self.queues[qp].peer) {
                    (true, _) => self.post_bad(qp)?,
                    (false, Some(peer)) => self.post_connected(qp, peer)?,
                    (false, None) => self.post_datagram(qp)?,
                }
            }
        }
        Ok(())
    }

    /// Moves a QP from SQE back to RTS.
    fn mend(&mut self, qp: usize) -> Checked {
        let Queue { host, qpn, .. } = self.queues[qp];
        let result = self.world.with(host, |rnic, now| {
            rnic.modify_qp(now, qpn, QpState::Rts, &QpAttributes::default())
        });
        self.queues[qp].broken = false;
        result.map_err(|error| format!("out of SQE: {error}"))
    }

    fn post(&mut self, qp: usize, request: SendRequest, end: Status) -> Checked {
        let queue = &mut self.queues[qp];
        let wr_id = queue.next_send;
        queue.next_send += 1;
        queue.sends.push_back((wr_id, end));
        self.report.posted += 1;
        let (host, qpn) = (queue.host, queue.qpn);
        let request = SendRequest { wr_id, ..request };
        self.world
            .with(host, |rnic, now| rnic.post_send(now, qpn, request))
            .map_err(|error| format!("a request was refused: {error}"))
    }

    /// Posts a request whose local memory does not exist: it ends in error and takes the QP to SQE.
    fn post_bad(&mut self, qp: usize) -> Checked {
        let to = match self.queues[qp].peer {
            Some(_) => Target::Connected,
            None => self.choose_target(qp).0,
        };
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: Sge::new(IOVA, 8, LKey(0x77)).into(),
            flags: SendFlags::SIGNALED,
            to,
        };
        self.queues[qp].broken = true;
        self.post(qp, request, Status::LocalProtection)?;
        let Queue { host, qpn, .. } = self.queues[qp];
        match self.world.hosts[host].rnic.query_qp(qpn).map(|info| info.state) {
            Some(QpState::Sqe) => Ok(()),
            state => Err(format!("in {state:?} after a request of its own failed")),
        }
    }

    fn contents(&self, number: u32, bytes: usize) -> Vec<u8> {
        let mut contents = vec![0; bytes];
        Dice::new(self.seed ^ u64::from(number) << 32, 6).fill(&mut contents);
        contents
    }

    /// Records a message and writes its bytes into the sender's memory.
    fn message(&mut self, message: Message) -> Option<(u32, SgeList)> {
        let host = self.queues[message.from].host;
        let (number, bytes) = (self.messages.len() as u32, message.bytes);
        let contents = self.contents(number, bytes);
        let sges = if bytes <= 200 && self.dice.one_in(2) {
            SgeList::inline(&contents)
        } else {
            // The message leaves at once, or after others of its QP; its memory is not used again.
            let side = &mut self.sides[host];
            let at = side.space.take(bytes.max(1) as u64)?;
            side.write_both(at, &contents);
            Sge::new(IOVA + at, bytes as u32, side.lkey).into()
        };
        self.messages.push(message);
        Some((number, sges))
    }

    fn post_connected(&mut self, qp: usize, peer: usize) -> Checked {
        let host = self.queues[qp].host;
        let longest = self.dice.log_uniform(self.bytes_max);
        let bytes = self.dice.below(longest + 1);
        let writes = self.dice.one_in(3);
        // A few bytes might also be those of another message.
        let is_plain = bytes >= KNOWN_BY_BYTES && self.dice.one_in(3);
        let there = &mut self.sides[1 - host];
        let placed = if writes {
            let len = bytes;
            there.space.take(len.max(1)).map(|at| Piece { at, len })
        } else {
            None
        };
        there.unknown.extend(placed);
        let rkey = there.rkey;
        let message = Message {
            from: qp,
            bytes: bytes as usize,
            dst: None,
            placed,
            // A WRITE without immediate data takes no receive.
            receivers: (!(writes && is_plain)).then_some(peer).into_iter().collect(),
            had: BTreeMap::new(),
            excused: BTreeSet::new(),
            traffic_class: 0,
            is_plain,
        };
        let Some((number, sges)) = self.message(message) else {
            return Ok(());
        };
        let imm = (!is_plain).then_some(number);
        let request = SendRequest {
            wr_id: 0,
            operation: match placed {
                Some(piece) => Operation::Write {
                    va: IOVA + piece.at,
                    rkey,
                    imm,
                },
                None => Operation::Send { imm },
            },
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let kind = usize::from(placed.is_some());
        self.report.book(kind, bytes);
        self.post(qp, request, Status::Success)
    }

    /// Draws the target of a datagram, and the QPs that may receive it.
    fn choose_target(&mut self, qp: usize) -> (Target, IpAddr, BTreeSet<usize>) {
        let host = self.queues[qp].host;
        let wrong_key = self.dice.one_in(10);
        let qkey = match self.dice.below(3) {
            _ if wrong_key => KEY ^ 1 << self.dice.below(31),
            // The sender's own Q_Key, which is the same.
            0 => 0x8000_0000 | self.dice.next() as u32,
            _ => KEY,
        };
        let datagram = |queue: &Queue| queue.peer.is_none();
        let (dst, qpn, mut receivers) = if self.dice.one_in(3) {
            let group = self.dice.pick(&self.groups);
            let attached = |(at, queue): (usize, &Queue)| queue.groups.contains(&group).then_some(at);
            let receivers = self.queues.iter().enumerate().filter_map(attached);
            (group, Qpn::MULTICAST, receivers.collect())
        } else {
            let all: Vec<usize> = (0..self.queues.len())
                .filter(|at| datagram(&self.queues[*at]))
                .collect();
            let to = self.dice.pick(&all);
            let queue = &self.queues[to];
            let address = self.world.hosts[queue.host].address;
            (address, queue.qpn, BTreeSet::from([to]))
        };
        if wrong_key {
            receivers.clear();
        }
        let path = self.path(host, dst);
        (Target::Datagram { path, qpn, qkey }, dst, receivers)
    }

    /// Posts a datagram that is longer than any packet: the engine refuses it at once.
    fn post_too_long(&mut self, qp: usize) -> Checked {
        let (to, ..) = self.choose_target(qp);
        let Queue { host, qpn, .. } = self.queues[qp];
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: Sge::new(IOVA, DATAGRAM_MAX as u32 + 1, self.sides[host].lkey).into(),
            flags: SendFlags::SIGNALED,
            to,
        };
        match (self.world).with(host, |rnic, now| rnic.post_send(now, qpn, request)) {
            Err(PostError::TooLong) => Ok(()),
            other => Err(format!("a datagram that is too long: {other:?}")),
        }
    }

    /// Detaches a QP from a group that it is in.
    fn detach(&mut self, qp: usize) -> Checked {
        let queue = &mut self.queues[qp];
        let Some(group) = queue.groups.pop() else {
            return Ok(());
        };
        let rnic = &mut self.world.hosts[queue.host].rnic;
        let done = rnic.detach_mcast(queue.qpn, group);
        for message in self
            .messages
            .iter_mut()
            .filter(|message| message.dst == Some(group))
        {
            message.excused.insert(qp);
        }
        done.map_err(|error| format!("out of a group: {error}"))
    }

    fn post_datagram(&mut self, qp: usize) -> Checked {
        if self.dice.one_in(30) {
            self.detach(qp)?;
        }
        if self.dice.one_in(30) {
            return self.post_too_long(qp);
        }
        let bytes = self.dice.below(self.datagram_max + 1) as usize;
        let (mut to, dst, receivers) = self.choose_target(qp);
        // Each address handle has its own service type.
        let traffic_class = self.dice.next() as u8 & !3;
        if let Target::Datagram { path, .. } = &mut to {
            path.traffic_class = traffic_class;
        }
        let message = Message {
            from: qp,
            bytes,
            dst: Some(dst),
            placed: None,
            receivers,
            had: BTreeMap::new(),
            excused: BTreeSet::new(),
            traffic_class,
            is_plain: false,
        };
        let Some((number, sges)) = self.message(message) else {
            return Ok(());
        };
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: Some(number) },
            sges,
            flags: SendFlags::SIGNALED,
            to,
        };
        self.report.book(0, bytes as u64);
        self.post(qp, request, Status::Success)
    }

    // Completions.

    fn take_completions(&mut self) -> Checked {
        for host in 0..2 {
            let cq = self.sides[host].cq;
            while let Some(wc) = self.world.poll_cq(host, cq) {
                let qp = self.queues.iter().position(|queue| queue.qpn == wc.qpn);
                let qp = qp.ok_or("a completion of no QP")?;
                let taken = if matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
                    self.take_recv(qp, &wc)
                } else {
                    self.take_send(qp, &wc)
                };
                taken.map_err(|what| format!("QP {qp} host {host}, {wc:?}: {what}"))?;
            }
        }
        Ok(())
    }

    fn take_send(&mut self, qp: usize, wc: &WorkCompletion) -> Checked {
        let Some((wr_id, end)) = self.queues[qp].sends.pop_front() else {
            return Err("a request completed twice".to_owned());
        };
        if wc.wr_id != wr_id {
            return Err(format!("request {wr_id} was to complete"));
        }
        if wc.status != end {
            return Err(format!("was to be {end:?}"));
        }
        self.report.failed += u64::from(end != Status::Success);
        Ok(())
    }

    /// Returns the message to a QP that has these bytes.
    fn known_by_bytes(&self, qp: usize, piece: Piece, len: usize) -> Option<u32> {
        let image = self.sides[self.queues[qp].host].memory.lock();
        let bytes = &image.bytes[piece.at as usize..piece.at as usize + len];
        let fits = |(_, message): &(usize, &Message)| {
            message.is_plain && message.bytes == len && message.receivers.contains(&qp)
        };
        let mut fitting = self.messages.iter().enumerate().filter(fits);
        let found = fitting.find(|(number, _)| self.contents(*number as u32, len) == bytes);
        found.map(|(number, _)| number as u32)
    }

    /// Checks that the bytes of a WRITE that took no receive are there.
    fn check_plain_write(&self, number: usize, message: &Message) -> Checked {
        let Some(piece) = message.placed.filter(|_| message.is_plain) else {
            return Ok(());
        };
        let image = self.sides[1 - self.queues[message.from].host].memory.lock();
        let bytes = &image.bytes[piece.at as usize..(piece.at + piece.len) as usize];
        match bytes == self.contents(number as u32, message.bytes) {
            true => Ok(()),
            false => Err(format!(
                "the bytes of message {number} are not there: {message:?}"
            )),
        }
    }

    fn take_recv(&mut self, qp: usize, wc: &WorkCompletion) -> Checked {
        let queue = &mut self.queues[qp];
        let host = queue.host;
        let Some((wr_id, piece)) = queue.recvs.pop_front() else {
            return Err("no receive was posted".to_owned());
        };
        if wc.wr_id != wr_id {
            return Err(format!("receive {wr_id} was to be used"));
        }
        if wc.status != Status::Success {
            return Err("a receive failed".to_owned());
        }
        let by_bytes = || self.known_by_bytes(qp, piece, wc.byte_len as usize);
        let number = wc.imm.or_else(by_bytes).ok_or("without immediate data")?;
        let contents = {
            let message = self.messages.get(number as usize).ok_or("a message of nobody")?;
            self.contents(number, message.bytes)
        };
        let (message, queue) = (&mut self.messages[number as usize], &mut self.queues[qp]);
        if !message.receivers.contains(&qp) {
            return Err("the message was for others".to_owned());
        }
        let had = message.had.entry(qp).or_default();
        *had += 1;
        let copies = 1 + u32::from(self.world.faults.dup > 0.0 && message.dst.is_some());
        if *had > copies {
            return Err(format!("came {had} times"));
        }
        let side = &mut self.sides[host];
        let image = side.memory.lock();
        let bytes = |at: u64, len: usize| &image.bytes[at as usize..at as usize + len];
        let (headers, opcode) = match message.dst {
            Some(dst) => {
                let from = &self.queues[message.from];
                if wc.src_qpn != Some(from.qpn) {
                    return Err("from another QP".to_owned());
                }
                let src = self.world.hosts[from.host].address;
                check_grh(bytes(piece.at, GRH), src, dst, message.traffic_class)?;
                (GRH, WcOpcode::Recv)
            }
            None => {
                if queue.last.replace(number).is_some_and(|last| last >= number) {
                    return Err("after a later message".to_owned());
                }
                let write = message.placed.is_some();
                (0, [WcOpcode::Recv, WcOpcode::RecvRdmaWithImm][usize::from(write)])
            }
        };
        if wc.opcode != opcode || wc.byte_len as usize != headers + message.bytes {
            return Err(format!("was to be {opcode:?} of {} bytes", message.bytes));
        }
        let at = message
            .placed
            .map_or(piece.at + headers as u64, |placed| placed.at);
        if *bytes(at, message.bytes) != contents {
            return Err("its bytes are wrong".to_owned());
        }
        drop(image);
        side.accept(piece);
        side.space.give(piece.at, piece.len);
        self.report.received += 1;
        self.post_recvs(qp)
    }

    // The end.

    fn check_rest(&mut self) -> Checked {
        for (qp, queue) in self.queues.iter().enumerate() {
            let info = self.world.hosts[queue.host].rnic.query_qp(queue.qpn);
            let info = info.ok_or("a QP is gone")?;
            if !queue.sends.is_empty() || info.send_outstanding != 0 {
                return Err(format!("QP {qp}: {} requests are open", queue.sends.len()));
            }
            // A UC message whose end was lost occupies one of the receives.
            let begun = usize::from(queue.peer.is_some() && !self.faultless);
            if !(queue.recvs.len().saturating_sub(begun)..=queue.recvs.len()).contains(&info.recv_posted) {
                return Err(format!(
                    "QP {qp}: {} receives of {} are posted",
                    info.recv_posted,
                    queue.recvs.len()
                ));
            }
            let state = if queue.broken { QpState::Sqe } else { QpState::Rts };
            if info.state != state {
                return Err(format!("QP {qp}: in {:?}, not {state:?}", info.state));
            }
        }
        if self.faultless {
            for (number, message) in self.messages.iter().enumerate() {
                let had = |qp: &usize| message.had.contains_key(qp) || message.excused.contains(qp);
                if !message.receivers.iter().all(had) {
                    return Err(format!("message {number} did not arrive: {message:?}"));
                }
                self.check_plain_write(number, message)?;
            }
        }
        for queue in &self.queues {
            let side = &mut self.sides[queue.host];
            side.unknown.extend(queue.recvs.iter().map(|(_, piece)| *piece));
        }
        for (host, side) in self.sides.iter_mut().enumerate() {
            for piece in std::mem::take(&mut side.unknown) {
                side.accept(piece);
            }
            if side.memory.lock().bytes != side.model {
                return Err(format!("host {host}: bytes changed that nobody sent"));
            }
        }
        Ok(())
    }
}

/// Checks the header before a datagram: addresses, next protocol, version, traffic class.
fn check_grh(grh: &[u8], src: IpAddr, dst: IpAddr, traffic_class: u8) -> Checked {
    let right = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            grh[..20] == [0; 20]
                && grh[20] == 0x45
                && grh[21] == traffic_class
                && grh[29] == 17
                && grh[32..36] == src.octets()
                && grh[36..] == dst.octets()
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            grh[0] >> 4 == 6
                && grh[0] << 4 | grh[1] >> 4 == traffic_class
                && grh[6] == 17
                && grh[8..24] == src.octets()
                && grh[24..] == dst.octets()
        }
        _ => false,
    };
    if right {
        Ok(())
    } else {
        Err("the header before it is wrong".to_owned())
    }
}

impl Side {
    fn new(world: &mut World, host: usize, dice: &mut Dice) -> Side {
        let mut model = vec![0; MEMORY as usize];
        dice.fill(&mut model);
        let kind = MemoryKind {
            gathers: dice.one_in(2),
            ..MemoryKind::default()
        };
        let memory = Arc::new(SimMemory::new(model.clone(), kind));
        let rnic = &mut world.hosts[host].rnic;
        let (pd, cq) = (rnic.alloc_pd(), rnic.create_cq(1 << 14));
        let spec = RegionSpec {
            memory: Arc::new(Door::new(memory.clone())),
            memory_offset: 0,
            length: MEMORY,
            iova: IOVA,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        };
        let (lkey, rkey) = rnic.reg_mr(pd, spec).expect("a region inside of its memory");
        Side {
            pd,
            cq,
            memory,
            model,
            space: Space::new(GUARD..MEMORY - GUARD),
            unknown: Vec::new(),
            lkey,
            rkey,
        }
    }

    /// Writes bytes as the application would.
    fn write_both(&mut self, at: u64, bytes: &[u8]) {
        let range = at as usize..at as usize + bytes.len();
        self.model[range.clone()].copy_from_slice(bytes);
        self.memory.lock().bytes[range].copy_from_slice(bytes);
    }

    /// Accepts the bytes of a piece as correct.
    fn accept(&mut self, piece: Piece) {
        let range = piece.at as usize..(piece.at + piece.len) as usize;
        self.model[range.clone()].copy_from_slice(&self.memory.lock().bytes[range]);
    }
}
