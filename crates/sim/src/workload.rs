//! Operations by seed, and what must come of them.
//!
//! The model is a second copy of each host's memory. Operations that are under way at one time never touch the same bytes,
//! so what an operation will have done is written into the model when it is posted, and compared when it completes. At the
//! end all of both memories is compared: nothing else may have changed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdmux_rnic::{
    Access, Arm, Cqn, LKey, Operation, Path, Pd, Placement, QpAttributes, QpInit, QpState, RKey, RecvRequest,
    RegionSpec, Selectivity, SendFlags, SendRequest, Sge, SgeList, Status, Target, WcOpcode, WorkCompletion,
};
use rdmux_wire::{Psn, Qpn};

use crate::dice::Dice;
use crate::memory::{Door, SimMemory, Space};
use crate::world::{Faults, Shape, Step, World};
use crate::{Ending, Report, Settings};

/// Bytes before and after every region that nobody may touch.
const GUARD: u64 = 4096;
/// A run that needs more steps than this for each operation and each KiB does not come to rest.
const STEPS_PER_OPERATION: u64 = 20_000;

/// A piece of a host's memory, taken from its [`Space`].
#[derive(Clone, Copy, Debug)]
struct Piece {
    at: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    Read,
    Flush,
    /// One byte too far: to be refused.
    Probe,
}

#[derive(Debug)]
struct Op {
    wr_id: u64,
    kind: Kind,
    bytes: u64,
    local: Vec<Piece>,
    remote: Option<Piece>,
    signaled: bool,
    /// WRITE: its bytes are checked by a later FLUSH, which frees them.
    held: bool,
    /// FLUSH: what must be on the medium when it completes.
    covers: Vec<Piece>,
}

#[derive(Debug)]
struct Recv {
    wr_id: u64,
    pieces: Vec<Piece>,
    byte_len: u32,
    imm: Option<u32>,
    opcode: WcOpcode,
}

/// What goes one way on one QP.
#[derive(Debug)]
struct Flow {
    todo: u32,
    depth: usize,
    outstanding: VecDeque<Op>,
    /// Receives of the other end, in the order in which messages need them: those posted first.
    recvs: VecDeque<Recv>,
    recvs_posted: usize,
    held: Vec<Piece>,
    next_wr_id: u64,
    next_recv_id: u64,
    failed: bool,
    recv_failed: bool,
    own_failed: bool,
    /// A READ whose data was lost was flushed: the refusal of a request behind it is to come.
    refusal_owed: bool,
    paused: bool,
}

/// One end of a QP.
#[derive(Debug)]
struct End {
    qpn: Qpn,
    door: Arc<Door>,
    lkey: LKey,
    rkey: RKey,
    iova: u64,
}

struct Side {
    pd: Pd,
    cq: Cqn,
    memory: Arc<SimMemory>,
    model: Vec<u8>,
    space: Space,
    /// Bytes that failed operations may or may not have changed.
    unknown: Vec<Piece>,
    ends: Vec<End>,
}

pub(crate) struct Workload {
    world: World,
    sides: [Side; 2],
    /// `flows[qp][host]`: what `host` asks for on `qp`.
    flows: Vec<[Flow; 2]>,
    dice: Dice,
    bytes_max: u64,
    mtu: u64,
    rnr_percent: f64,
    ending: Ending,
    /// (host, QP) of the ending, if it is one QP's; happened yet?
    ending_at: (usize, usize),
    ended: bool,
    ending_after: u32,
    lossless: bool,
    report: Report,
    scratch: Vec<u8>,
}

type Checked = Result<(), String>;

const USER_POST: u64 = 0;
const USER_RECV: u64 = 1;

fn tag(what: u64, qp: usize, host: usize) -> u64 {
    what << 32 | (qp as u64) << 1 | host as u64
}

impl Workload {
    pub(crate) fn new(settings: &Settings) -> Workload {
        let mut dice = Dice::new(settings.seed, 0);
        let shape = Shape {
            ipv6: dice.one_in(2),
            gso: !dice.one_in(4),
            gro: !dice.one_in(4),
            lazy_acks: dice.one_in(3),
            latency_ns: dice.log_uniform(300_000) + 1_000,
            flush_ns_max: dice.log_uniform(60_000_000),
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
        // Room for a few of the longest operations, or for many short ones.
        let room = (6 * bytes_max).max(64 * 1024 * qps as u64);
        let sides = [0, 1].map(|host| Side::new(&mut world, host, &mut dice, qps, room));
        let per_flow = settings.operations / (2 * qps as u32);
        let flows = (0..qps)
            .map(|qp| {
                [0, 1].map(|host| {
                    let extra = settings.operations % (2 * qps as u32) > 2 * qp as u32 + host;
                    Flow::new(per_flow + u32::from(extra), dice.log_uniform(32) as usize)
                })
            })
            .collect();
        let mut report = Report::new(settings);
        report.address_family = if shape.ipv6 { "IPv6" } else { "IPv4" };
        report.path_mtu = mtu as u32;
        report.window_bytes = window_bytes as u32;
        report.latency_ns = shape.latency_ns;
        report.trains = shape.gso;
        let ending_at = (dice.below(2) as usize, dice.below(qps as u64) as usize);
        let ending_after = dice.below(u64::from(settings.operations.max(1))) as u32;
        let mut workload = Workload {
            world,
            sides,
            flows,
            bytes_max,
            mtu,
            rnr_percent: dice.pick(&[0.0, 5.0, 30.0]),
            ending: settings.ending,
            ending_at,
            ended: false,
            ending_after,
            lossless: settings.loss_percent + settings.corrupt_percent + settings.reorder_percent == 0.0,
            dice,
            report,
            scratch: Vec::new(),
        };
        workload.connect(window_bytes as u32, shape.latency_ns);
        workload
    }

    /// Brings every QP to RTS, by hand: connection management has its own runs.
    fn connect(&mut self, window_bytes: u32, latency_ns: u64) {
        // A round trip is at most 2 x 4.25 latencies, reordering included.
        let mut timeout = 1;
        while 4_096u64 << timeout < 12 * latency_ns + 100_000 {
            timeout += 1;
        }
        timeout += self.dice.below(3) as u8;
        for qp in 0..self.flows.len() {
            let near_wrap = self.dice.one_in(2);
            let selective = self.dice.one_in(2);
            let psns = [0, 1].map(|_| {
                if near_wrap {
                    Psn::new(0x100_0000 - self.dice.log_uniform(400) as u32)
                } else {
                    Psn::new(self.dice.next() as u32)
                }
            });
            let depths = [0, 1].map(|_| self.dice.pick(&[1u8, 1, 2, 4, 16, 128]));
            let rnr_timer = self.dice.between(1, 16) as u8;
            for host in 0..2 {
                let path = Path {
                    src: self.world.hosts[host].address,
                    dst: self.world.hosts[1 - host].address,
                    src_port: 0xc000 + qp as u16,
                    traffic_class: 0,
                };
                let init = QpAttributes {
                    access: Some(
                        Access::LOCAL_WRITE
                            | Access::REMOTE_WRITE
                            | Access::REMOTE_READ
                            | Access::FLUSH_GLOBAL
                            | Access::FLUSH_PERSISTENT,
                    ),
                    ..Default::default()
                };
                let rtr = QpAttributes {
                    path: Some(path),
                    path_mtu: Some(self.mtu as u32),
                    dest_qpn: Some(self.sides[1 - host].ends[qp].qpn),
                    rq_psn: Some(psns[1 - host]),
                    max_dest_rd_atomic: Some(depths[1 - host]),
                    min_rnr_timer: Some(rnr_timer),
                    window_bytes: Some(window_bytes),
                    peer_is_rdmux: Some(true),
                    selective: Some(selective),
                    ..Default::default()
                };
                let rts = QpAttributes {
                    sq_psn: Some(psns[host]),
                    timeout: Some(timeout),
                    retry_count: Some(7),
                    rnr_retry: Some(7),
                    max_rd_atomic: Some(depths[host]),
                    ..Default::default()
                };
                let qpn = self.sides[host].ends[qp].qpn;
                self.world.with(host, |rnic, now| {
                    for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
                        rnic.modify_qp(now, qpn, to, &attr).expect("as the table has it");
                    }
                });
            }
        }
    }

    pub(crate) fn run(mut self) -> Report {
        let result = self.drive();
        let report = &mut self.report;
        report.violation = result.err();
        report.virtual_ns = self.world.now.0;
        report.steps = self.world.steps;
        report.link(&self.world.carried);
        for host in &self.world.hosts {
            report.count(host.rnic.counters());
        }
        self.report
    }

    fn drive(&mut self) -> Checked {
        for host in 0..2 {
            let cq = self.sides[host].cq;
            self.world.hosts[host].rnic.arm_cq(cq, Arm::Next);
        }
        for qp in 0..self.flows.len() {
            for host in 0..2 {
                self.post_some(qp, host)?;
            }
        }
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
                    let (qp, host) = ((tag as u32 >> 1) as usize, (tag & 1) as usize);
                    match tag >> 32 {
                        USER_POST => {
                            self.flows[qp][host].paused = false;
                            self.post_some(qp, host)?;
                        }
                        _ => self.post_recv(qp, host)?,
                    }
                }
            }
            self.take_completions()?;
            if !self.ended && self.ending != Ending::None && self.report.completed() >= self.ending_after {
                self.end_something()?;
            }
            if self.world.steps > limit {
                return Err(format!("no rest after {limit} steps; {}", self.what_is_open()));
            }
        }
        self.check_rest()
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

    // Posting.

    fn size(&mut self) -> u64 {
        let usual = self.bytes_max.min(16 << 10);
        if self.bytes_max > usual && self.dice.one_in(40) {
            return match self.dice.below(8) {
                0 => self.bytes_max,
                _ => self.dice.log_uniform(self.bytes_max),
            };
        }
        match self.dice.below(10) {
            0 => 0,
            1 => {
                let packets = self.dice.between(1, 5);
                (packets * self.mtu + self.dice.below(3) - 1).min(self.bytes_max)
            }
            _ => self.dice.log_uniform(usual),
        }
    }

    fn post_some(&mut self, qp: usize, host: usize) -> Checked {
        loop {
            let flow = &self.flows[qp][host];
            if flow.todo == 0 || flow.paused || flow.outstanding.len() >= flow.depth {
                return Ok(());
            }
            if self.is_affected(qp) {
                return Ok(());
            }
            if self.dice.one_in(12) {
                self.flows[qp][host].paused = true;
                let delay = self.dice.log_uniform(2_000_000);
                self.world.call_back(delay, tag(USER_POST, qp, host));
                return Ok(());
            }
            if !self.post_one(qp, host)? {
                return Ok(());
            }
        }
    }

    /// Whether the ending concerns this QP, so that its operations may fail.
    fn is_affected(&self, qp: usize) -> bool {
        self.ended && (self.ending == Ending::PeerVanishes || self.ending_at.1 == qp)
    }

    /// Takes `len` bytes in 1 to 5 pieces.
    fn take_pieces(&mut self, host: usize, len: u64) -> Option<Vec<Piece>> {
        let parts = if self.dice.one_in(3) {
            self.dice.between(1, 5)
        } else {
            1
        };
        let mut pieces = Vec::new();
        let mut left = len;
        for part in 0..parts {
            let n = if part + 1 == parts {
                left
            } else {
                self.dice.below(left + 1)
            };
            left -= n;
            // The odd byte moves the next piece to another alignment.
            let slack = self.dice.below(4);
            let Some(at) = self.sides[host].space.take(n + slack) else {
                self.give_pieces(host, &pieces);
                return None;
            };
            self.sides[host].space.give(at + n, slack);
            pieces.push(Piece { at, len: n });
        }
        Some(pieces)
    }

    fn give_pieces(&mut self, host: usize, pieces: &[Piece]) {
        for piece in pieces {
            self.sides[host].space.give(piece.at, piece.len);
        }
    }

    /// False: there is no room now.
    fn post_one(&mut self, qp: usize, host: usize) -> Result<bool, String> {
        let peer = 1 - host;
        let must_flush = self.flows[qp][host].held.len() >= 4;
        let kind = match self.dice.below(100) {
            _ if must_flush => Kind::Flush,
            0..25 => Kind::Send,
            25..62 => Kind::Write,
            62..87 => Kind::Read,
            _ => Kind::Flush,
        };
        let bytes = if kind == Kind::Flush { 0 } else { self.size() };
        let with_imm = match kind {
            Kind::Send => self.dice.one_in(2),
            Kind::Write => self.dice.one_in(4),
            _ => false,
        };
        let local = if kind == Kind::Flush {
            Vec::new()
        } else {
            let Some(pieces) = self.take_pieces(host, bytes) else {
                return Ok(false);
            };
            pieces
        };
        let remote = if matches!(kind, Kind::Write | Kind::Read) {
            let Some(at) = self.sides[peer].space.take(bytes) else {
                self.give_pieces(host, &local);
                return Ok(false);
            };
            Some(Piece { at, len: bytes })
        } else {
            None
        };
        let receives = kind == Kind::Send || with_imm;
        let mut recv_pieces = Vec::new();
        if receives {
            let spare = self.dice.below(3) * self.dice.below(100);
            let need = if kind == Kind::Send { bytes + spare } else { spare };
            let Some(pieces) = self.take_pieces(peer, need) else {
                self.give_pieces(host, &local);
                if let Some(remote) = remote {
                    self.give_pieces(peer, &[remote]);
                }
                return Ok(false);
            };
            recv_pieces = pieces;
        }

        // The content, and what the operation will make of it.
        let imm = with_imm.then(|| self.dice.next() as u32);
        self.scratch.resize(bytes as usize, 0);
        let mut data = std::mem::take(&mut self.scratch);
        self.dice.fill(&mut data);
        match kind {
            Kind::Send => {
                self.sides[host].write_both(&local, &data);
                self.sides[peer].write_model(&recv_pieces, &data);
            }
            Kind::Write => {
                self.sides[host].write_both(&local, &data);
                self.sides[peer].write_model(remote.as_slice(), &data);
            }
            Kind::Read => {
                self.sides[peer].write_both(remote.as_slice(), &data);
                self.sides[host].write_model(&local, &data);
            }
            Kind::Flush | Kind::Probe => {}
        }
        self.scratch = data;

        let (rkey, iova) = {
            let end = &self.sides[peer].ends[qp];
            (end.rkey, end.iova)
        };
        let va = remote.map_or_else(|| self.dice.next(), |piece| iova + piece.at - GUARD);
        let mut covers = Vec::new();
        let operation = match kind {
            Kind::Send => Operation::Send { imm },
            Kind::Write => Operation::Write { va, rkey, imm },
            Kind::Read => Operation::Read { va, rkey },
            _ => {
                covers = std::mem::take(&mut self.flows[qp][host].held);
                self.flush_of(peer, qp, &covers)
            }
        };
        let last = self.flows[qp][host].todo == 1;
        let held = kind == Kind::Write && !last && bytes < self.bytes_max / 8 && self.dice.one_in(2);
        if held && let Some(piece) = remote {
            self.flows[qp][host].held.push(piece);
        }
        let flow = &self.flows[qp][host];
        // The last that fits must speak for the silent ones before it.
        let signaled = last || flow.outstanding.len() + 1 >= flow.depth || !self.dice.one_in(6);
        let wr_id = self.flows[qp][host].next_wr_id;
        let lists: Vec<Sge> = self.sides[host].sges(qp, &local);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, signaled);
        flags.set(SendFlags::FENCE, self.dice.one_in(8));
        flags.set(SendFlags::SOLICITED, self.dice.one_in(4));
        let request = SendRequest {
            wr_id,
            operation,
            sges: SgeList::from(&lists[..]),
            flags,
            to: Target::Connected,
        };
        let flow = &mut self.flows[qp][host];
        flow.next_wr_id += 1;
        flow.todo -= 1;
        flow.outstanding.push_back(Op {
            wr_id,
            kind,
            bytes,
            local,
            remote,
            signaled,
            held,
            covers,
        });
        self.report.posted += 1;
        if receives {
            let id = flow.next_recv_id;
            flow.next_recv_id += 1;
            flow.recvs.push_back(Recv {
                wr_id: id,
                pieces: recv_pieces,
                byte_len: bytes as u32,
                imm,
                opcode: if kind == Kind::Write {
                    WcOpcode::RecvRdmaWithImm
                } else {
                    WcOpcode::Recv
                },
            });
            if self.dice.percent(self.rnr_percent) {
                let delay = self.dice.log_uniform(10_000_000);
                self.world.call_back(delay, tag(USER_RECV, qp, host));
            } else {
                self.post_recv(qp, host)?;
            }
        }
        let qpn = self.sides[host].ends[qp].qpn;
        self.world
            .with(host, |rnic, now| rnic.post_send(now, qpn, request))
            .map_err(|error| format!("QP {qp} host {host}: post_send #{wr_id}: {error}"))?;
        Ok(true)
    }

    fn flush_of(&mut self, peer: usize, qp: usize, covers: &[Piece]) -> Operation {
        let end = &self.sides[peer].ends[qp];
        let (rkey, iova) = (end.rkey, end.iova);
        let first = covers.iter().map(|p| p.at).min().unwrap_or(GUARD);
        let last = covers.iter().map(|p| p.at + p.len).max().unwrap_or(GUARD + 64);
        let whole = self.dice.one_in(4);
        let placement = if !covers.is_empty() || self.dice.one_in(2) {
            let both = self.dice.one_in(3);
            Placement::PERSISTENT
                | if both {
                    Placement::GLOBAL
                } else {
                    Placement::empty()
                }
        } else {
            Placement::GLOBAL
        };
        Operation::Flush {
            va: if whole {
                self.dice.next()
            } else {
                iova + first - GUARD
            },
            rkey,
            length: (last - first) as u32,
            placement,
            selectivity: if whole {
                Selectivity::MemoryRegion
            } else {
                Selectivity::Range
            },
        }
    }

    /// Posts the next receive that the messages of `host` need at the other end.
    fn post_recv(&mut self, qp: usize, host: usize) -> Checked {
        let flow = &mut self.flows[qp][host];
        let Some(recv) = flow.recvs.get(flow.recvs_posted) else {
            return Ok(());
        };
        flow.recvs_posted += 1;
        let peer = 1 - host;
        let request = RecvRequest {
            wr_id: recv.wr_id | 1 << 63,
            sges: SgeList::from(&self.sides[peer].sges(qp, &recv.pieces)[..]),
        };
        let qpn = self.sides[peer].ends[qp].qpn;
        self.world
            .with(peer, |rnic, now| rnic.post_recv(now, qpn, request))
            .map_err(|error| format!("QP {qp} host {peer}: post_recv: {error}"))
    }

    /// Nothing happens any more although there is something to do: there was no room. False: all is done.
    fn unblock(&mut self) -> Result<bool, String> {
        let open = |flow: &Flow| flow.todo > 0;
        let blocked: Vec<(usize, usize)> = (0..self.flows.len())
            .flat_map(|qp| [(qp, 0), (qp, 1)])
            .filter(|(qp, host)| open(&self.flows[*qp][*host]) && !self.is_affected(*qp))
            .collect();
        if blocked.is_empty() {
            return Ok(false);
        }
        for (qp, host) in blocked {
            self.end_silent(qp, host)?;
            let held = std::mem::take(&mut self.flows[qp][host].held);
            self.give_pieces(1 - host, &held);
            let before = self.report.posted;
            self.post_some(qp, host)?;
            if self.report.posted > before || self.flows[qp][host].paused {
                return Ok(true);
            }
        }
        Err("no room in memory for the next operation".to_owned())
    }

    /// At rest, what is open can only be operations that complete silently, and the engine has none of them left.
    fn end_silent(&mut self, qp: usize, host: usize) -> Checked {
        let info = self.world.hosts[host]
            .rnic
            .query_qp(self.sides[host].ends[qp].qpn);
        let silent = self.flows[qp][host].outstanding.iter().all(|op| !op.signaled);
        if !silent || info.is_none_or(|info| info.send_outstanding > 0) {
            return Err(format!(
                "QP {qp} host {host} is stuck at rest; {}",
                self.what_is_open()
            ));
        }
        for op in std::mem::take(&mut self.flows[qp][host].outstanding) {
            self.done(qp, host, op)?;
        }
        Ok(())
    }

    // Completions.

    fn take_completions(&mut self) -> Checked {
        for host in 0..2 {
            while let Some(cq) = self.world.hosts[host].completed.pop() {
                self.world.hosts[host].rnic.arm_cq(cq, Arm::Next);
                while let Some(wc) = self.world.hosts[host].rnic.poll_cq(cq) {
                    let qp = self.sides[host].ends.iter().position(|end| end.qpn == wc.qpn);
                    let Some(qp) = qp else {
                        return Err(format!("host {host}: completion of an unknown QP: {wc:?}"));
                    };
                    let checked = if wc.wr_id >> 63 == 1 {
                        self.received(qp, host, &wc)
                    } else {
                        self.sent(qp, host, &wc)
                    };
                    checked.map_err(|what| format!("QP {qp} host {host}: {what} ({wc:?})"))?;
                }
            }
        }
        Ok(())
    }

    fn sent(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Checked {
        if wc.status != Status::Success {
            return self.send_failed(qp, host, wc);
        }
        if self.flows[qp][host].failed {
            return Err("success after a failure".to_owned());
        }
        loop {
            let Some(op) = self.flows[qp][host].outstanding.pop_front() else {
                return Err("a completion of nothing".to_owned());
            };
            if op.wr_id > wc.wr_id {
                return Err(format!("out of order: #{} was next", op.wr_id));
            }
            let itself = op.wr_id == wc.wr_id;
            if !itself && op.signaled {
                return Err(format!("#{} was passed over", op.wr_id));
            }
            if itself {
                let opcode = match op.kind {
                    Kind::Send => WcOpcode::Send,
                    Kind::Write => WcOpcode::Write,
                    Kind::Read => WcOpcode::Read,
                    Kind::Flush | Kind::Probe => WcOpcode::Flush,
                };
                if op.kind == Kind::Probe {
                    return Err("an access one byte out of bounds succeeded".to_owned());
                }
                if wc.opcode != opcode || u64::from(wc.byte_len) != op.bytes {
                    return Err(format!(
                        "wrong opcode or length for {:?} of {}",
                        op.kind, op.bytes
                    ));
                }
            }
            self.done(qp, host, op)?;
            if itself {
                break;
            }
        }
        self.post_some(qp, host)?;
        // Room was freed on both sides: others may have waited for it.
        let other = self.dice.below(self.flows.len() as u64) as usize;
        self.post_some(other, 1 - host)
    }

    /// An operation succeeded: what it did must be there.
    fn done(&mut self, qp: usize, host: usize, op: Op) -> Checked {
        let peer = 1 - host;
        self.report.book(op.kind_index(), op.bytes);
        match op.kind {
            Kind::Write => {
                self.sides[peer].check(op.remote.as_slice(), "bytes written")?;
                if !op.held {
                    self.give_pieces(peer, op.remote.as_slice());
                }
            }
            Kind::Read => {
                self.sides[host].check(&op.local, "bytes read")?;
                self.give_pieces(peer, op.remote.as_slice());
            }
            Kind::Flush => {
                let image = self.sides[peer].memory.lock();
                for piece in &op.covers {
                    let range = piece.at as usize..(piece.at + piece.len) as usize;
                    if image.medium[range.clone()] != self.sides[peer].model[range] {
                        return Err(format!(
                            "FLUSH #{} is complete, but the {} bytes written at {} before it are not on the medium",
                            op.wr_id, piece.len, piece.at
                        ));
                    }
                }
                drop(image);
                self.give_pieces(peer, &op.covers);
            }
            Kind::Send | Kind::Probe => {}
        }
        self.give_pieces(host, &op.local);
        let _ = qp;
        Ok(())
    }

    fn received(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Checked {
        let flow = &mut self.flows[qp][1 - host];
        let Some(recv) = flow.recvs.pop_front().filter(|_| flow.recvs_posted > 0) else {
            return Err("a receive of nothing".to_owned());
        };
        flow.recvs_posted -= 1;
        if recv.wr_id | 1 << 63 != wc.wr_id {
            return Err(format!("receives out of order: #{} was next", recv.wr_id));
        }
        if wc.status != Status::Success {
            let first = !std::mem::replace(&mut flow.recv_failed, true);
            let broken = first && wc.status == Status::LocalProtection && self.ending == Ending::Deregister;
            if !self.is_affected(qp) || !(wc.status == Status::Flushed || broken) {
                return Err("a receive failed".to_owned());
            }
            self.sides[host].unknown.extend(recv.pieces);
            return Ok(());
        }
        if flow.recv_failed {
            return Err("a receive succeeded after one that failed".to_owned());
        }
        if (wc.opcode, wc.byte_len, wc.imm) != (recv.opcode, recv.byte_len, recv.imm) {
            return Err(format!("expected {} bytes, imm {:?}", recv.byte_len, recv.imm));
        }
        self.report.received += 1;
        self.sides[host].check(&recv.pieces, "bytes received")?;
        self.give_pieces(host, &recv.pieces);
        Ok(())
    }

    fn send_failed(&mut self, qp: usize, host: usize, wc: &WorkCompletion) -> Checked {
        if !self.is_affected(qp) {
            return Err("an operation failed".to_owned());
        }
        // Those before it that were to complete silently have; unless it is flushed, when they are too.
        let flow = &mut self.flows[qp][host];
        let before: Vec<Op> = {
            let at = flow.outstanding.iter().position(|op| op.wr_id == wc.wr_id);
            let Some(at) = at else {
                return Err("a completion of nothing, or a second one".to_owned());
            };
            flow.outstanding.drain(..at).collect()
        };
        let op = flow.outstanding.pop_front().ok_or("nothing open")?;
        // The request that found its own memory gone may have older ones before it, which end as flushed; so may one that the
        // peer refused, behind a READ whose data was lost.
        let own =
            self.ending == Ending::Deregister && wc.status == Status::LocalProtection && !flow.own_failed;
        flow.own_failed |= own;
        let refused =
            flow.refusal_owed && matches!(wc.status, Status::RemoteAccess | Status::RemoteOperation);
        flow.refusal_owed &= !refused;
        let first = !std::mem::replace(&mut flow.failed, true) || own || refused;
        let refuses = match self.ending {
            Ending::OutOfBounds => self.ending_at.0 == host,
            Ending::Deregister => self.ending_at.0 != host,
            Ending::None | Ending::PeerVanishes | Ending::UserError => false,
        };
        if let Some(passed) = before.iter().find(|op| op.signaled || !first) {
            return Err(format!("#{} was passed over", passed.wr_id));
        }
        if first && refuses && op.kind == Kind::Read && wc.status == Status::Flushed {
            flow.refusal_owed = true;
            self.report.failed += 1;
            self.sides[host].unknown.extend(op.local);
            return before.into_iter().try_for_each(|op| self.done(qp, host, op));
        }
        for op in before {
            self.done(qp, host, op)?;
        }
        let expected: &[Status] = if !first {
            &[Status::Flushed]
        } else {
            match (self.ending, self.ending_at.0 == host) {
                (Ending::None, _) => &[],
                (Ending::PeerVanishes, _) => &[Status::RetryExceeded],
                (Ending::UserError, true) => &[Status::Flushed],
                (Ending::UserError, false) => &[Status::RetryExceeded],
                (Ending::Deregister, true) => {
                    &[Status::LocalProtection, Status::Flushed, Status::RetryExceeded]
                }
                (Ending::Deregister, false) => &[
                    Status::RemoteAccess,
                    Status::RemoteOperation,
                    Status::RetryExceeded,
                ],
                (Ending::OutOfBounds, true) if op.kind == Kind::Probe && self.lossless => {
                    &[Status::RemoteAccess]
                }
                (Ending::OutOfBounds, true) => &[Status::RemoteAccess, Status::RetryExceeded],
                (Ending::OutOfBounds, false) => &[Status::Flushed, Status::RetryExceeded],
            }
        };
        if !expected.contains(&wc.status) {
            return Err(format!("failed otherwise than by one of {expected:?}"));
        }
        self.report.failed += 1;
        let peer = 1 - host;
        if op.kind != Kind::Send {
            self.sides[host].unknown.extend(op.local);
        }
        if op.kind == Kind::Write {
            self.sides[peer].unknown.extend(op.remote);
        }
        Ok(())
    }

    // Endings.

    fn end_something(&mut self) -> Checked {
        self.ended = true;
        let (host, qp) = self.ending_at;
        match self.ending {
            Ending::None => {}
            Ending::PeerVanishes => self.world.hosts[host].vanished = true,
            Ending::UserError => {
                let qpn = self.sides[host].ends[qp].qpn;
                self.world
                    .with(host, |rnic, now| {
                        rnic.modify_qp(now, qpn, QpState::Error, &QpAttributes::default())
                    })
                    .map_err(|error| error.to_string())?;
            }
            Ending::Deregister => {
                let end = &self.sides[host].ends[qp];
                let lkey = end.lkey;
                self.world.with(host, |rnic, _| rnic.dereg_mr(lkey));
                end.door.shut.store(true, Ordering::Relaxed);
            }
            Ending::OutOfBounds => self.post_probe(qp, host)?,
        }
        self.take_completions()
    }

    /// An access to the last byte of a region and the one after it.
    fn post_probe(&mut self, qp: usize, host: usize) -> Checked {
        let length = self.dice.between(1, 3 * self.mtu);
        let Some(at) = self.sides[host].space.take(length) else {
            return Ok(());
        };
        let local = vec![Piece { at, len: length }];
        let peer = &self.sides[1 - host];
        let (end, size) = (&peer.ends[qp], peer.model.len() as u64 - 2 * GUARD);
        let before = self.dice.one_in(4);
        let va = if before {
            end.iova - 1
        } else {
            end.iova + size + 1 - length
        };
        let rkey = end.rkey;
        let operation = match self.dice.below(3) {
            0 => Operation::Read { va, rkey },
            _ => Operation::Write { va, rkey, imm: None },
        };
        let flow = &mut self.flows[qp][host];
        let wr_id = flow.next_wr_id;
        flow.next_wr_id += 1;
        flow.outstanding.push_back(Op {
            wr_id,
            kind: Kind::Probe,
            bytes: length,
            local: local.clone(),
            remote: None,
            signaled: true,
            held: false,
            covers: Vec::new(),
        });
        let request = SendRequest {
            wr_id,
            operation,
            sges: SgeList::from(&self.sides[host].sges(qp, &local)[..]),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let qpn = self.sides[host].ends[qp].qpn;
        self.world
            .with(host, |rnic, now| rnic.post_send(now, qpn, request))
            .map_err(|error| error.to_string())
    }

    // The end.

    fn check_rest(&mut self) -> Checked {
        if self.world.flushes_running != 0 {
            return Err("flushes are left over".to_owned());
        }
        for qp in 0..self.flows.len() {
            for host in 0..2 {
                self.check_end(qp, host)
                    .map_err(|what| format!("QP {qp} host {host} at rest: {what}"))?;
            }
        }
        for side in &self.sides {
            for end in &side.ends {
                match end.door.trespasses.load(Ordering::Relaxed) {
                    0 => {}
                    n => return Err(format!("{n} accesses through a region that was deregistered")),
                }
            }
        }
        for qp in 0..self.flows.len() {
            if !self.is_affected(qp) {
                continue;
            }
            for host in 0..2 {
                // What never arrived, or completed silently but for its last answer.
                let flow = &self.flows[qp][host];
                let recvs = flow.recvs.iter().flat_map(|recv| recv.pieces.iter().copied());
                self.sides[1 - host].unknown.extend(recvs);
                let remote = flow.outstanding.iter().filter_map(|op| op.remote);
                self.sides[1 - host].unknown.extend(remote);
                let local = flow.outstanding.iter().filter(|op| op.kind == Kind::Read);
                let local = local.flat_map(|op| op.local.iter().copied());
                self.sides[host].unknown.extend(local);
            }
        }
        for (host, side) in self.sides.iter_mut().enumerate() {
            side.compare_all()
                .map_err(|what| format!("host {host}: {what}"))?;
        }
        for host in 0..2 {
            let side = &self.sides[host];
            let (cq, pd) = (side.cq, side.pd);
            if self.world.hosts[host].rnic.cq_state(cq) != Some((0, false)) {
                return Err(format!("host {host}: the completion queue is not at rest"));
            }
            let qpns: Vec<Qpn> = side.ends.iter().map(|end| end.qpn).collect();
            let left = self.world.with(host, |rnic, _| {
                for qpn in qpns {
                    rnic.destroy_qp(qpn);
                }
                rnic.dealloc_pd(pd);
                rnic.destroy_cq(cq);
                (rnic.object_counts(), rnic.poll_timeout())
            });
            if left != ((0, 0, 0), None) {
                return Err(format!("host {host}: objects or timers are left over: {left:?}"));
            }
        }
        Ok(())
    }

    fn check_end(&self, qp: usize, host: usize) -> Checked {
        let flow = &self.flows[qp][host];
        let qpn = self.sides[host].ends[qp].qpn;
        let Some(info) = self.world.hosts[host].rnic.query_qp(qpn) else {
            return Err("the QP is gone".to_owned());
        };
        let silent = flow.outstanding.iter().all(|op| !op.signaled);
        let affected = self.is_affected(qp);
        // An operation that completes silently stays in our books when nothing after it was posted.
        if !(flow.outstanding.is_empty() || affected && silent) || info.send_outstanding != 0 {
            return Err(format!(
                "{} operations are open, {} in the engine",
                flow.outstanding.len(),
                info.send_outstanding
            ));
        }
        let recvs = &self.flows[qp][1 - host];
        if info.state == QpState::Error {
            if !affected {
                return Err("the QP is in error".to_owned());
            }
            if info.recv_posted != 0 || recvs.recvs_posted != 0 {
                return Err(format!(
                    "in error, and {} receives are not flushed",
                    recvs.recvs_posted
                ));
            }
        } else if !affected && (info.recv_posted != 0 || !recvs.recvs.is_empty()) {
            return Err(format!("{} receives are left over", info.recv_posted));
        }
        if !affected && info.state != QpState::Rts {
            return Err(format!("in {:?}", info.state));
        }
        if flow.refusal_owed {
            return Err("a READ was flushed, and nothing behind it was refused".to_owned());
        }
        if flow.failed && info.state != QpState::Error {
            return Err(format!("an operation failed, yet the QP is in {:?}", info.state));
        }
        Ok(())
    }
}

impl Op {
    fn kind_index(&self) -> usize {
        match self.kind {
            Kind::Send => 0,
            Kind::Write => 1,
            Kind::Read => 2,
            Kind::Flush | Kind::Probe => 3,
        }
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
            next_wr_id: 0,
            next_recv_id: 0,
            failed: false,
            recv_failed: false,
            own_failed: false,
            refusal_owed: false,
            paused: false,
        }
    }
}

impl Side {
    fn new(world: &mut World, host: usize, dice: &mut Dice, qps: usize, room: u64) -> Side {
        let mut model = vec![0; (room + 2 * GUARD) as usize];
        dice.fill(&mut model);
        let memory = Arc::new(SimMemory::new(model.clone(), dice.below(2) == 0));
        let rnic = &mut world.hosts[host].rnic;
        let pd = rnic.alloc_pd();
        let cq = rnic.create_cq(1 << 16);
        let ends = (0..qps)
            .map(|_| {
                let door = Arc::new(Door::new(memory.clone()));
                let iova = dice.below(1 << 47) + (1 << 20);
                let spec = RegionSpec {
                    memory: door.clone(),
                    memory_offset: GUARD,
                    length: room,
                    iova,
                    access: Access::LOCAL_WRITE
                        | Access::REMOTE_WRITE
                        | Access::REMOTE_READ
                        | Access::FLUSH_GLOBAL
                        | Access::FLUSH_PERSISTENT,
                };
                let (lkey, rkey) = rnic.reg_mr(pd, spec).expect("a region inside of its memory");
                let init = QpInit {
                    max_send_wr: 64,
                    max_recv_wr: 4096,
                    ..QpInit::new(pd, cq)
                };
                let qpn = rnic.create_qp(init).expect("there are QPNs");
                End {
                    qpn,
                    door,
                    lkey,
                    rkey,
                    iova,
                }
            })
            .collect();
        Side {
            pd,
            cq,
            memory,
            model,
            space: Space::new(GUARD..GUARD + room),
            unknown: Vec::new(),
            ends,
        }
    }

    fn sges(&self, qp: usize, pieces: &[Piece]) -> Vec<Sge> {
        let end = &self.ends[qp];
        pieces
            .iter()
            .map(|p| Sge::new(end.iova + p.at - GUARD, p.len as u32, end.lkey))
            .collect()
    }

    /// Writes `data` into the pieces, as far as it goes.
    fn write_model(&mut self, pieces: &[Piece], mut data: &[u8]) {
        for piece in pieces {
            let n = (piece.len as usize).min(data.len());
            let at = piece.at as usize;
            self.model[at..at + n].copy_from_slice(&data[..n]);
            data = &data[n..];
        }
    }

    /// Writes `data` as the application would.
    fn write_both(&mut self, pieces: &[Piece], mut data: &[u8]) {
        self.write_model(pieces, data);
        let mut image = self.memory.lock();
        for piece in pieces {
            let n = piece.len as usize;
            let at = piece.at as usize;
            image.bytes[at..at + n].copy_from_slice(&data[..n]);
            data = &data[n..];
        }
    }

    fn check(&self, pieces: &[Piece], what: &str) -> Checked {
        let image = self.memory.lock();
        for piece in pieces {
            let range = piece.at as usize..(piece.at + piece.len) as usize;
            if image.bytes[range.clone()] != self.model[range] {
                return Err(format!("{what}: {} bytes at {} are wrong", piece.len, piece.at));
            }
        }
        Ok(())
    }

    fn compare_all(&mut self) -> Checked {
        let image = self.memory.lock();
        for piece in &self.unknown {
            let range = piece.at as usize..(piece.at + piece.len) as usize;
            self.model[range.clone()].copy_from_slice(&image.bytes[range]);
        }
        if image.bytes == self.model {
            return Ok(());
        }
        let at = image.bytes.iter().zip(&self.model).position(|(a, b)| a != b);
        Err(format!("memory differs from the model first at {at:?}"))
    }
}
