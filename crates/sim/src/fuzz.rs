//! Fuzzing of the engine: the input determines what users, links and clocks do to two devices with QPs of every transport
//! service, including hostile packets with a correct ICRC. It runs under the coverage-guided fuzzer and, on stable Rust, in
//! every test run.

mod input;
mod packet;
mod side;

use std::collections::VecDeque;
use std::net::IpAddr;

use rdmux_rnic::cm::{CmId, Endpoint, Peering};
use rdmux_rnic::{
    Access, Arm, Arrival, Bind, Directly, Fault, LinkProgress, Memory, Moderation, ModerationKind, Operation,
    Path, PeerFault, Placement, QpAttributes, QpState, QpType, Qpn, Registration, RingBytes, Selectivity,
    SendFlags, SendRequest, Sge, SgeList, Srqn, Taken, Target, Ticket, Time, TransmitBuf, end_packet,
};
use rdmux_wire::cm::{RejReason, ServiceId, SidrStatus};
use rdmux_wire::roce::{Bth, ICRC_LEN, Packet, PathMtu, Transport};
use rdmux_wire::{LKey, Psn};

use crate::machine::Machine;
use crate::memory::MemoryKind;
use crate::world::{SimRequest, SimRing};
use input::Input;
pub use input::Reach;
use side::{FENCED, IOVA, PSN, QKEY, QpKind, REGION, Side};
use strum::VariantArray;

/// Maximum number of packets that wait on the link.
const LINK_PACKETS: usize = 512;
/// Maximum number of packets that one input event may cause: a few windows of all QPs and their pending responses.
const BURST_PACKETS: usize = 1 << 15;
/// Bytes that hold the headers of every request of data.
const HEADS_BYTES: usize = 48;
/// Maximum number of timers that fire until a device whose peer is silent becomes idle.
const TIMERS_TO_REST: usize = 20_000;
/// Exchanges after which everything has completed once no packet is lost.
const STEPS_TO_FINISH: usize = 100_000;

/// A packet in flight.
#[derive(Clone, Debug)]
struct Wire {
    path: Path,
    bytes: Vec<u8>,
    /// Set when the packet goes through memory of one machine.
    local: bool,
    /// Set for a request in a ring.
    ticket: Option<Ticket>,
}

/// Panics when the engine does, or when one of its invariants is broken. Returns what the input reached.
pub fn rnic(input: &[u8]) -> Reach {
    let mut input = Input(input);
    let mut pair = Pair::new(&mut input);
    while !input.0.is_empty() {
        pair.event(&mut input);
        pair.settle();
    }
    if pair.heals {
        pair.finish();
    }
    pair.rest();
    for side in &pair.sides {
        side.check_rest();
    }
    let [mut reach, other] = pair.sides.map(|mut side| side.take_reach());
    reach.add(other);
    reach
}

struct Pair {
    now: Time,
    sides: [Side; 2],
    /// Packets in flight to each side.
    links: [VecDeque<Wire>; 2],
    /// News for each side of requests that its peer has taken.
    taken: [VecDeque<(Ticket, Taken)>; 2],
    buf: TransmitBuf,
    shape: u8,
    /// QPs that this input exercises.
    focus: Vec<usize>,
    /// Set when the input exercises connections instead.
    connects: bool,
    /// Set when the link is whole at the end; otherwise it is cut.
    heals: bool,
    /// Present when both sides are processes of one machine.
    machine: Option<Machine>,
}

/// A request that names memory.
#[derive(Debug)]
struct Named<'a> {
    request: &'a SimRequest,
    /// Set when the memory can no longer be read.
    ended: bool,
}

impl RingBytes for Named<'_> {
    fn bytes(&self) -> usize {
        self.request.held()
    }

    fn held(&self) -> usize {
        HEADS_BYTES
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        match at + out.len() > HEADS_BYTES && self.ended {
            true => Err(PeerFault::Ended),
            false => self.request.read(at, out),
        }
    }

    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault> {
        match self.ended {
            true => Err(PeerFault::Ended),
            false => self.request.read_to(at, to, offset, len),
        }
    }
}

impl Pair {
    fn new(input: &mut Input<'_>) -> Pair {
        let (shape, focus) = (input.byte(), input.byte());
        let kind = MemoryKind {
            gathers: focus & 1 != 0,
            on_medium: shape & 8 != 0,
        };
        let sides = [1u8, 2].map(|n| Side::new(n, shape & 1 != 0, kind));
        // Few QPs, so that each of them makes progress.
        let first = usize::from(focus >> 1) % QpKind::VARIANTS.len();
        let (second, ends) = (usize::from(focus >> 5), input.byte());
        let mut pair = Pair {
            now: Time(1),
            sides,
            links: Default::default(),
            taken: Default::default(),
            buf: TransmitBuf::new(64 << 10, shape & 2 != 0),
            shape,
            focus: vec![first, peer_of(first), second % QpKind::VARIANTS.len()],
            connects: ends & 3 == 3,
            heals: ends & 4 != 0,
            machine: (ends >> 3 & 7 == 7).then(|| Machine::new(0, 1).0),
        };
        for at in 0..QpKind::VARIANTS.len() {
            pair.connect(0, at, shape, QpState::Rts);
            pair.connect(1, at, shape, QpState::Rts);
        }
        pair
    }

    /// Path MTU of all connections.
    fn mtu(&self) -> u32 {
        if self.shape & 4 == 0 { 256 } else { 1024 }
    }

    fn path(&self, from: usize) -> Path {
        Path {
            src: self.sides[from].address,
            dst: self.sides[1 - from].address,
            src_port: 0xc001,
            traffic_class: self.shape & 0xe0,
        }
    }

    /// Returns the attributes that a transition of a QP needs.
    fn attributes(&self, i: usize, at: usize, to: QpState, shape: u8) -> QpAttributes {
        let kind = self.sides[i].queues[at].kind;
        let qp_type = kind.qp_type();
        let is_ud = qp_type == QpType::Ud;
        let answers = matches!(qp_type, QpType::Rc | QpType::XrcRecv);
        let asks = matches!(qp_type, QpType::Rc | QpType::XrcSend);
        let deep = if shape & 8 == 0 { 1 } else { 8 };
        let access = Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL
            | Access::FLUSH_PERSISTENT;
        match to {
            QpState::Init => QpAttributes {
                access: (!is_ud).then_some(access),
                qkey: is_ud.then_some(QKEY),
                ..Default::default()
            },
            QpState::Rtr if is_ud => QpAttributes::default(),
            QpState::Rtr => QpAttributes {
                path: Some(self.path(i)),
                path_mtu: Some(self.mtu()),
                dest_qpn: Some(self.sides[1 - i].queues[peer_of(at)].qpn),
                rq_psn: Some(Psn::new(PSN)),
                max_dest_rd_atomic: answers.then_some(deep),
                min_rnr_timer: answers.then_some(1),
                window_bytes: (answers || asks).then_some(if shape & 16 == 0 { 1 } else { 1 << 16 }),
                peer_is_rdmux: Some(shape & 32 == 0),
                selective: (kind == QpKind::Selective).then_some(true),
                carried_acks: (kind == QpKind::Selective).then_some(true),
                ..Default::default()
            },
            QpState::Rts => QpAttributes {
                sq_psn: Some(Psn::new(PSN)),
                timeout: (answers || asks).then_some(if shape & 128 == 0 { 8 } else { 0 }),
                retry_count: asks.then_some(7),
                rnr_retry: asks.then_some(if shape & 64 == 0 { 7 } else { 1 }),
                max_rd_atomic: asks.then_some(deep),
                ..Default::default()
            },
            QpState::Reset | QpState::Sqd | QpState::Sqe | QpState::Error => QpAttributes::default(),
        }
    }

    /// Brings a QP from Reset to a state on the way to RTS.
    fn connect(&mut self, i: usize, at: usize, shape: u8, last: QpState) {
        for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let attr = self.attributes(i, at, to, shape);
            let side = &mut self.sides[i];
            let qpn = side.queues[at].qpn;
            let brought = side.rnic.modify_qp(self.now, qpn, to, &attr);
            // The transition fails only if the QP's completion queue overran.
            assert!(brought.is_ok() || side.state(at) == QpState::Error);
            side.queues[at].set_timeout(attr.timeout);
            side.rnic.set_local(qpn, self.machine.is_some());
            if to == last {
                break;
            }
        }
    }

    fn event(&mut self, input: &mut Input<'_>) {
        let what = input.byte();
        let i = usize::from(what & 1);
        let at = self.focus[usize::from(what >> 1) % self.focus.len()];
        match input.byte() % 64 {
            0..=11 if self.connects => self.connections(i, at, input),
            0..=13 => {
                let many = if input.one_in(8) { input.byte() % 32 } else { 0 };
                for _ in 0..=many {
                    self.post(i, at, input);
                }
            }
            14..=18 => self.post_recv(i, at, input),
            19..=28 => {
                while !self.taken[i].is_empty() && !input.one_in(8) {
                    self.take(i, None);
                }
                for _ in 0..=input.byte() / 4 {
                    let Some(wire) = self.links[i].pop_front() else {
                        break;
                    };
                    self.deliver(i, &wire);
                }
            }
            29..=38 => {
                let bytes = packet::forged(&self.sides[i], at, self.mtu() as usize, input);
                // Rarely many packets, as a peer that respects no limits could send them.
                let many = if input.one_in(16) { input.word() % 2048 } else { 0 };
                for n in 0..=u32::from(many) {
                    let mut bytes = bytes.clone();
                    packet::count_on(&mut bytes, n);
                    self.seal_and_deliver(i, bytes, 0);
                }
            }
            39 | 40 => self.damage(i, input),
            41 => {
                let qpn = self.sides[i].queues[at].qpn;
                let bytes = packet::raw(qpn, input);
                self.seal_and_deliver(i, bytes, u16::from(input.byte()));
            }
            42 => {
                let bytes = packet::mad(input);
                self.seal_and_deliver(i, bytes, u16::from(input.byte() & 3) << 7);
            }
            43 => {
                let n = usize::from(input.byte());
                let (bytes, segment) = (input.bytes(n), usize::from(input.byte()));
                let src = self.sides[1 - i].address;
                let rnic = &mut self.sides[i].rnic;
                rnic.handle_datagram(self.now, src, 0xc001, &bytes, segment);
            }
            44 => drop(self.links[i].pop_front()),
            45 => self.deliver_in_vain(i, input),
            46 => {
                if let Some(wire) = self.links[i].front().cloned() {
                    self.links[i].push_back(wire);
                }
            }
            47 if input.one_in(2) => self.links[i].make_contiguous().reverse(),
            47 => {
                let n = usize::from(input.byte()) % self.links[i].len().max(1);
                self.links[i].rotate_left(n);
            }
            48 => {
                for wire in self.links[i].iter_mut().take(usize::from(input.byte())) {
                    wire.path.traffic_class |= 3;
                }
            }
            49..=52 => {
                self.now = self.now + (u64::from(input.word()) << (input.byte() % 24));
                self.fire(0);
                self.fire(1);
            }
            53 => {
                // Advances to the next timer, as a punctual driver does.
                if let Some(at) = self.sides[i].rnic.poll_timeout() {
                    self.now = self.now.max(at);
                    self.fire(0);
                    self.fire(1);
                }
            }
            54 => self.finish_flush(i, input),
            55 => self.finish_access(i, input),
            56 | 57 => self.modify(i, at, input),
            58 => self.renew(at, input),
            59 | 60 => self.objects(i, at, input),
            61 => self.take(i, Some(input)),
            _ => self.connections(i, at, input),
        }
    }

    // Actions of users.

    fn post(&mut self, i: usize, at: usize, input: &mut Input<'_>) {
        let (kind, modes) = (input.byte(), input.byte());
        let length = match modes & 15 {
            0 => 0,
            1 => u32::from(input.word()) << 15,
            2 | 3 => u32::from(input.word() % 8192),
            _ => u32::from(input.byte()) * 5,
        };
        let operation = self.operation(i, kind, length, input);
        let side = &self.sides[i];
        let sges = match operation {
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } | Operation::AtomicWrite { .. } => {
                Sge::new(IOVA + u64::from(input.byte()) * 8, 8, side.lkey).into()
            }
            Operation::Flush { .. }
            | Operation::Bind(_)
            | Operation::Register(_)
            | Operation::LocalInvalidate { .. } => SgeList::EMPTY,
            _ => self.own(i, length, modes >> 4, input),
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, kind & 0xc0 != 0);
        flags.set(SendFlags::FENCE, modes & 0x80 != 0);
        flags.set(SendFlags::SOLICITED, modes & 0x40 != 0);
        let to = self.target(i, at, input);
        let side = &mut self.sides[i];
        let (qpn, wr_id) = (side.queues[at].qpn, side.send_number());
        let taken = match operation {
            Operation::Bind(bind) if bind.window == side.keys[3] => {
                let bound = side.rnic.bind_mw(self.now, qpn, wr_id, bind, flags);
                bound.map(|key| side.keys[3] = key)
            }
            operation => {
                let request = SendRequest {
                    wr_id,
                    operation,
                    sges,
                    flags,
                    to,
                };
                match side
                    .rnic
                    .direct_lane(qpn)
                    .map(|lane| lane.post(&mut Some(request.clone()), || self.now))
                {
                    Some(Directly::Done | Directly::DoneAndEnded) => Ok(()),
                    Some(Directly::DoneAndTell(delivery)) => {
                        side.rnic.deliver(self.now, delivery);
                        Ok(())
                    }
                    _ if side.rnic.post_directly(|| self.now, qpn, &request) => Ok(()),
                    _ => side.rnic.post_send(self.now, qpn, request),
                }
            }
        };
        if taken.is_ok() {
            side.sent(at, wr_id, flags.contains(SendFlags::SIGNALED));
        }
    }

    fn operation(&mut self, i: usize, kind: u8, length: u32, input: &mut Input<'_>) -> Operation {
        // Most addresses lie inside the region, some at its end, some outside.
        let va = match input.byte() {
            n @ 0..=7 => (IOVA + REGION + u64::from(n & 1)).wrapping_sub(length.into()),
            _ => IOVA + u64::from(input.word()) % (REGION - 0x800),
        };
        let aligned = if input.one_in(32) { va | 1 } else { va & !7 };
        let rkey = match input.byte() {
            n @ 0..=31 => self.sides[1 - i].keys[usize::from(n) % 6],
            _ => self.sides[1 - i].keys[0],
        };
        let imm = (kind & 32 != 0).then_some(7);
        match kind & 31 {
            0..=6 => Operation::Send { imm },
            7 => Operation::SendInvalidate { rkey },
            8..=13 => Operation::Write { va, rkey, imm },
            14..=18 => Operation::Read { va, rkey },
            19 | 20 => Operation::CompareSwap {
                va: aligned,
                rkey,
                compare: 0,
                swap: va,
            },
            21 | 22 => Operation::FetchAdd {
                va: aligned,
                rkey,
                add: 1,
            },
            23 => Operation::AtomicWrite { va: aligned, rkey },
            24..=26 => Operation::Flush {
                va,
                rkey,
                length,
                placement: input.pick(&[Placement::PERSISTENT, Placement::GLOBAL, Placement::all()]),
                selectivity: input.pick(&[Selectivity::Range, Selectivity::MemoryRegion]),
            },
            27 | 28 => {
                let side = &mut self.sides[i];
                let own = usize::from(3 + (input.byte() & 1));
                // A type 2 window takes its new key from its user.
                if own == 4 {
                    side.keys[4] = side.keys[4].next();
                }
                Operation::Bind(Bind {
                    window: side.keys[own],
                    region: side.lkey,
                    va: aligned,
                    length: u64::from(input.word() % 0x1000),
                    access: input.pick(&[
                        Access::REMOTE_WRITE | Access::REMOTE_READ,
                        Access::REMOTE_READ,
                        Access::REMOTE_ATOMIC | Access::REMOTE_WRITE | Access::ZERO_BASED,
                        Access::all(),
                    ]),
                })
            }
            29 | 30 => {
                let side = &mut self.sides[i];
                side.keys[5] = side.keys[5].next();
                let (at, length) = (u64::from(input.byte()) * 8, u64::from(input.word()));
                let (key, spec) = (side.keys[5], side.spec(at, length % REGION));
                Operation::Register(Box::new(Registration { key, spec }))
            }
            _ => {
                let keys = self.sides[i].keys;
                let rkey = input.pick(&[keys[5], keys[4], keys[0]]);
                Operation::LocalInvalidate { rkey }
            }
        }
    }

    /// Returns the local memory of a request.
    fn own(&self, i: usize, length: u32, mode: u8, input: &mut Input<'_>) -> SgeList {
        let lkey = match input.byte() {
            0 => LKey(0x55),
            1 => LKey(self.sides[i].keys[1].0),
            _ => self.sides[i].lkey,
        };
        let from = IOVA + u64::from(input.word()) % (REGION - 0x800);
        match mode & 7 {
            0 => SgeList::inline(&vec![7; length.min(1100) as usize]),
            1 => {
                let n = u32::from(input.byte() % 34) + 1;
                let pieces =
                    (0..n).map(|n| Sge::new(from + u64::from(n) * 16, length / 8 % 64 + n % 3, lkey));
                pieces.collect::<Vec<_>>().as_slice().into()
            }
            2 => [
                Sge::new(from, length / 2, lkey),
                Sge::new(IOVA, length.div_ceil(2), lkey),
            ][..]
                .into(),
            _ => Sge::new(from, length, lkey).into(),
        }
    }

    fn target(&self, i: usize, at: usize, input: &mut Input<'_>) -> Target {
        let peer = &self.sides[1 - i];
        let how = input.byte();
        match self.sides[i].queues[at].kind {
            _ if how == 0 => Target::Connected,
            QpKind::XrcSend => Target::Srq(if how < 8 { Srqn(7) } else { peer.xrc_srq }),
            QpKind::Ud => {
                let is_group = how & 3 == 3;
                Target::Datagram {
                    path: Path {
                        dst: if is_group { group(self.shape) } else { peer.address },
                        ..self.path(i)
                    },
                    qpn: match how {
                        _ if is_group => Qpn::MULTICAST,
                        1 => Qpn::GSI,
                        _ => peer.queues[at].qpn,
                    },
                    qkey: if how == 2 { 0x8000_0000 } else { QKEY },
                }
            }
            _ => Target::Connected,
        }
    }

    fn post_recv(&mut self, i: usize, at: usize, input: &mut Input<'_>) {
        let length = u32::from(input.word() % 2048);
        for _ in 0..=input.byte() % 4 {
            let sges = self.own(i, length, 3, input);
            let side = &mut self.sides[i];
            match side.queues[at].kind {
                QpKind::Shared => side.post_srq_recv(false, sges),
                QpKind::XrcRecv => side.post_srq_recv(true, sges),
                _ => side.post_recv(self.now, at, sges),
            }
        }
    }

    fn finish_flush(&mut self, i: usize, input: &mut Input<'_>) {
        let side = &mut self.sides[i];
        if side.flushes.is_empty() {
            return;
        }
        let job = side
            .flushes
            .swap_remove(usize::from(input.byte()) % side.flushes.len());
        let result = if input.one_in(16) {
            Err(Fault::Io(5))
        } else {
            job.memory.flush(job.offset, job.length, job.placement)
        };
        side.rnic.handle_flush(self.now, job.id, result);
    }

    fn finish_access(&mut self, i: usize, input: &mut Input<'_>) {
        let side = &mut self.sides[i];
        if let Some(job) = side.accesses.pop_front() {
            let result = if input.one_in(16) {
                Err(Fault::Io(5))
            } else {
                job.run()
            };
            side.rnic.handle_access(self.now, job.id, result);
        }
    }

    fn modify(&mut self, i: usize, at: usize, input: &mut Input<'_>) {
        let to = input.pick(&[
            QpState::Rts,
            QpState::Rts,
            QpState::Sqd,
            QpState::Sqd,
            QpState::Rtr,
            QpState::Init,
            QpState::Error,
        ]);
        let before = self.sides[i].state(at);
        let mut attr = match (before, to) {
            (QpState::Rts | QpState::Sqd | QpState::Sqe, _) => QpAttributes::default(),
            _ => self.attributes(i, at, to, self.shape),
        };
        match input.byte() & 15 {
            0 => attr.rate_limit_bps = Some(1 << (input.byte() % 40)),
            1 => attr.rate_limit_bps = Some(0),
            2 => attr.access = Some(Access::REMOTE_READ),
            3 => attr.min_rnr_timer = Some(input.byte()),
            4 => attr.window_bytes = Some(1 << (input.byte() % 32)),
            5 => attr.path_mtu = Some(input.word().into()),
            6 => attr.qkey = Some(QKEY),
            7 => attr.max_dest_rd_atomic = Some(input.byte()),
            8 => (attr.timeout, attr.retry_count) = (Some(input.byte() % 33), Some(input.byte() % 8)),
            9 => attr.path = Some(self.path(usize::from(input.byte() & 1))),
            10 => attr.max_rd_atomic = Some(input.byte()),
            _ => {}
        }
        let side = &mut self.sides[i];
        let qpn = side.queues[at].qpn;
        let modified = side.rnic.modify_qp(self.now, qpn, to, &attr);
        assert!(modified.is_err() || side.state(at) == to);
        if modified.is_ok() {
            side.queues[at].repaired();
            side.queues[at].set_timeout(attr.timeout);
        }
        assert!(
            modified.is_ok() || side.state(at) == before,
            "changed by a refusal"
        );
    }

    /// Ends a connection and begins another, on the same QPs or on new ones.
    fn renew(&mut self, at: usize, input: &mut Input<'_>) {
        let (how, shape) = (input.byte(), input.byte());
        let ends = [(0, at), (1, peer_of(at))];
        for (i, at) in ends {
            let side = &mut self.sides[i];
            // After an overrun the QP's completion queue no longer works.
            if how & (1 << i) != 0 || side.is_overrun(side.queues[at].cq) {
                side.renew(at);
            } else {
                let reset = QpAttributes::default();
                let qpn = side.queues[at].qpn;
                let done = side.rnic.modify_qp(self.now, qpn, QpState::Reset, &reset);
                done.expect("from any state to Reset");
                side.queues[at].forget();
            }
        }
        for (i, at) in ends {
            let waits = i == 1 && how & 8 != 0;
            self.connect(i, at, shape, if waits { QpState::Rtr } else { QpState::Rts });
        }
    }

    fn objects(&mut self, i: usize, at: usize, input: &mut Input<'_>) {
        let group = group(self.shape);
        let side = &mut self.sides[i];
        let qpn = side.queues[at].qpn;
        let n = input.byte();
        if let (Some(machine), 0 | 1) = (&mut self.machine, n % 16) {
            machine.revoke_region(i, side.lkey);
        }
        match n % 16 {
            0 => drop(
                side.rnic
                    .rereg_mr(side.lkey, None, |spec| spec.access = Access::LOCAL_WRITE),
            ),
            1 => side.renew_region(),
            2..=5 => drop(
                side.rnic
                    .attach_mcast(side.queues[QpKind::Ud as usize].qpn, group),
            ),
            6 => drop(side.rnic.detach_mcast(qpn, group)),
            7 => drop(
                side.rnic
                    .modify_srq(side.srq, Some(64), Some(u32::from(input.byte() % 70))),
            ),
            8 => drop(side.rnic.modify_srq(side.xrc_srq, None, Some(3))),
            9 => assert!(side.rnic.destroy_srq(side.srq).is_err(), "it is in use"),
            10 | 11 => {
                let at = usize::from(n & 1);
                let arm = input.pick(&[Arm::Next, Arm::Solicited]);
                side.rnic.arm_cq(side.cqs[at], arm);
            }
            12 => {
                // Deallocates a window, bound or not, and allocates another in its place.
                let of = usize::from(3 + (input.byte() & 1));
                side.rnic.dealloc_mw(side.keys[of]);
                let types = [rdmux_rnic::WindowType::One, rdmux_rnic::WindowType::Two];
                let window = side.rnic.alloc_mw(side.pd, types[of - 3]);
                side.keys[of] = window.expect("there are keys");
            }
            13 => {
                drop(side.rnic.dereg_mr(LKey(side.keys[5].0)));
                let (_, key) = side.rnic.alloc_mr(side.pd, REGION).expect("there are keys");
                side.keys[5] = key;
            }
            14 => {
                // Another PD with a region, which is deallocated at once.
                let pd = side.rnic.alloc_pd();
                let spec = side.spec(0, FENCED);
                side.rnic.reg_mr(pd, spec).expect("it is inside");
                assert_eq!(side.rnic.dealloc_pd(pd).len(), 1);
            }
            _ => {
                let word = input.word();
                let _ = side.rnic.query_qp(Qpn::new(word.into()));
                let moderation = Moderation {
                    count: word % 5,
                    period_us: word % 3,
                };
                let cq = side.cqs[usize::from(word & 1)];
                side.rnic.moderate_cq(cq, ModerationKind::Dim, Some(moderation));
            }
        }
    }

    fn connections(&mut self, i: usize, at: usize, input: &mut Input<'_>) {
        let peer = self.sides[1 - i].address;
        let service = input.pick(&[0, 0, 0, 0x0111_1c06, 0x0111_1c06, 9].map(ServiceId));
        let now = self.now;
        let what = input.byte();
        let private = vec![3; usize::from(input.byte()) / if what & 0x80 == 0 { 4 } else { 1 }];
        let side = &mut self.sides[i];
        let local = endpoint(side.queues[at].qpn, side.queues[at].kind);
        // Mostly the newest id.
        let back = usize::from(input.byte() / 64);
        let known = side.cm_ids.iter().rev().nth(back).copied();
        let id = known.unwrap_or(CmId(u32::from(input.byte())));
        match what % 16 {
            0 | 1 => {
                if let Ok(id) = side.rnic.cm().connect(now, peer, service, None, &local, &private) {
                    side.cm_begins(id);
                }
            }
            2 => {
                if let Ok(id) = side.rnic.cm().resolve(now, peer, service, None, &private) {
                    side.cm_begins(id);
                }
            }
            3..=5 => drop(side.rnic.cm().accept(now, id, &local, &private)),
            6 => {
                let reason = RejReason(u16::from(input.byte()));
                side.rnic.cm().reject_with(now, id, reason, &private, &private);
            }
            7..=9 => side.rnic.cm().establish(id),
            10 => side.rnic.cm().disconnect(now, id),
            11 => {
                side.rnic.cm().destroy(id);
                side.cm_ends(id);
            }
            12 | 13 => {
                let status = SidrStatus(input.byte() % 4);
                let qpn = side.queues[QpKind::Ud as usize].qpn;
                let _ = side.rnic.cm().answer(now, id, status, qpn, QKEY, &private);
            }
            14 => {
                if input.one_in(4) {
                    side.rnic.cm().unlisten(now, service);
                } else {
                    side.rnic.cm().listen(service);
                }
            }
            _ => {
                // As after the death of another process, whose connection ends here.
                let peering = Peering {
                    id: CmId(u32::from(input.word())),
                    local_qpn: side.queues[at].qpn,
                    peer,
                    remote_id: input.word().into(),
                    remote_qpn: Qpn::new(9),
                };
                side.cm_begins(peering.id);
                side.rnic.cm().disconnect_orphan(now, &peering);
            }
        }
    }

    // Actions of the link.

    /// Changes a packet in flight, as an attacker that can compute an ICRC would.
    fn damage(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(mut wire) = self.links[i].pop_front() else {
            return;
        };
        let body = wire.bytes.len() - ICRC_LEN;
        for _ in 0..=input.byte() & 3 {
            let at = usize::from(input.byte()) % body;
            wire.bytes[at] = input.byte();
        }
        let icrc = wire.path.flow().icrc(&wire.bytes[..body], 0);
        wire.bytes[body..].copy_from_slice(&icrc.to_le_bytes());
        self.deliver(i, &wire);
    }

    /// Delivers the next packet damaged or from another source, and checks that it has no effect.
    fn deliver_in_vain(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(mut wire) = self.links[i].pop_front() else {
            return;
        };
        let dest_qpn = Bth::parse(&wire.bytes).map_or(Qpn::new(0), |bth| bth.dest_qpn);
        let connected = self.sides[i]
            .queue_of(dest_qpn)
            .is_some_and(|at| at != QpKind::Ud as usize);
        // IPv4 hides a field that the ICRC covers, so some wrong ICRCs are as good as right ones.
        if wire.path.src.is_ipv6() {
            let at = usize::from(input.byte()) % wire.bytes.len();
            // The ICRC does not cover byte 4.
            let covered = at != 4;
            wire.bytes[at] ^= if covered { 1 << (input.byte() & 7) } else { 0 };
            if !covered {
                return;
            }
        } else if connected {
            wire.path.src = IpAddr::from([10, 0, 0, 9]);
        } else {
            return;
        }
        // On one machine nobody can tamper with packets.
        (wire.local, wire.ticket) = (false, None);
        let before = self.sides[i].snapshot();
        self.deliver(i, &wire);
        self.sides[i].assert_unchanged(&before);
    }

    /// Appends the correct ICRC for an IPv4 identification to a packet of the other side, and delivers the packet.
    fn seal_and_deliver(&mut self, to: usize, mut bytes: Vec<u8>, ip_id: u16) {
        let path = self.path(1 - to);
        let icrc = path.flow().icrc(&bytes, ip_id);
        bytes.extend_from_slice(&icrc.to_le_bytes());
        self.note_psn(to, &bytes);
        let local = false;
        let ticket = None;
        self.deliver(
            to,
            &Wire {
                path,
                bytes,
                local,
                ticket,
            },
        );
    }

    fn deliver(&mut self, to: usize, wire: &Wire) {
        let side = &mut self.sides[to];
        if let Ok(packet) = Packet::parse(&wire.bytes)
            && let Some(at) = side.queue_of(packet.bth.dest_qpn)
        {
            let kind = side.queues[at].kind as u8;
            let state = side.state(at) as u8;
            side.reach.packets.insert((kind, state, wire.bytes[0]));
        }
        if let Some(ticket) = wire.ticket {
            let tail = Bth::parse(&wire.bytes).map_or(0, |bth| usize::from(bth.pad)) + ICRC_LEN;
            let len = wire.bytes.len().saturating_sub(tail);
            let request = SimRequest::held(ticket, wire.bytes[..len].to_vec());
            let (now, src) = (self.now, wire.path.src);
            let ended = len % 8 == 7;
            let taken = if len > HEADS_BYTES && len % 2 == 1 {
                let named = Named {
                    request: &request,
                    ended,
                };
                let taken = side.rnic.handle_request(now, src, &named);
                taken.or(ended.then_some(Taken::Again))
            } else {
                side.rnic.handle_request(now, src, &request)
            };
            let told = taken.unwrap_or(Taken::Deferred);
            self.taken[1 - to].push_back((ticket, told));
            if taken.is_some() {
                return;
            }
        }
        let arrival = Arrival {
            src: wire.path.src,
            src_port: wire.path.src_port,
            dst: wire.path.dst,
            traffic_class: wire.path.traffic_class,
            bytes: &wire.bytes,
            segment_bytes: wire.bytes.len(),
            local: wire.local,
        };
        side.rnic.handle_arrival(self.now, &arrival);
    }

    /// Tells a device how its peer has taken the oldest request; the input may change what it hears.
    fn take(&mut self, i: usize, input: Option<&mut Input<'_>>) {
        let Some((mut ticket, mut taken)) = self.taken[i].pop_front() else {
            return;
        };
        if let Some(input) = input
            && input.one_in(4)
        {
            ticket.end = ticket.end.plus(u32::from(input.byte()));
            ticket.incarnation ^= u32::from(input.byte() & 1);
            taken = match input.byte() % 4 {
                0 => Taken::Deferred,
                1 => Taken::Again,
                _ => Taken::Done,
            };
        }
        self.sides[i].rnic.handle_taken(self.now, ticket, taken);
    }

    /// Records where the window of a connection is.
    fn note_psn(&mut self, to: usize, bytes: &[u8]) {
        let Ok(bth) = Bth::parse(bytes) else { return };
        let Some(at) = self.sides[to].queue_of(bth.dest_qpn) else {
            return;
        };
        if bth.opcode.operation.is_response() {
            return;
        }
        let receiver = &mut self.sides[to].queues[at].near.0;
        if (0..64).contains(&bth.psn.since(*receiver)) {
            *receiver = bth.psn;
        }
        self.sides[1 - to].queues[peer_of(at)].near.1 = bth.psn;
    }

    fn fire(&mut self, i: usize) {
        // At every other timer the peer on the same host has not run since the previous one.
        let stalled = self.machine.is_some() && self.now.0.is_multiple_of(2);
        let link = stalled.then_some(LinkProgress { taken: 0, all: false });
        let rnic = &mut self.sides[i].rnic;
        rnic.handle_timeout_with(self.now, &|_, _| link);
        assert!(
            rnic.poll_timeout().is_none_or(|at| at > self.now),
            "a timer that was handled is due again at once"
        );
    }

    /// Polls both sides empty and checks the invariants that hold between any two events.
    fn settle(&mut self) {
        for i in 0..2 {
            self.take_back(i);
            self.transmit(i);
            self.take_back(i);
            let side = &mut self.sides[i];
            while let Some(job) = side.rnic.poll_flush() {
                side.flushes.push(job);
            }
            side.accesses
                .extend(std::iter::from_fn(|| side.rnic.poll_access()));
            drop(side.rnic.poll_ended_memories());
            side.hear();
            side.check();
            self.grant(i);
        }
    }

    /// Revokes the grants of those QPs of a side that take no requests any more.
    fn take_back(&mut self, i: usize) {
        let rnic = &mut self.sides[i].rnic;
        while let Some(qpn) = rnic.poll_revoked() {
            let machine = self.machine.as_mut().expect("nothing was granted");
            machine.revoke_qp(i, qpn);
        }
        if let Some(machine) = &self.machine {
            assert_eq!(machine.outlived(i, rnic), None, "its grants are still open");
        }
    }

    /// Grants a side the memory of the other that it asked for, where that is allowed.
    fn grant(&mut self, i: usize) {
        for (by, rkey) in std::mem::take(&mut self.sides[i].wanted) {
            let machine = self.machine.as_mut().expect("nobody is near");
            let Some(of) = self.sides[i].rnic.query_qp(by).map(|info| info.dest_qpn) else {
                continue;
            };
            let granted = self.sides[1 - i].rnic.grantable(of, rkey).ok();
            let grant = granted.map(|granted| machine.give(1 - i, of, by, rkey, granted));
            self.sides[i].rnic.set_grant(self.now, by, rkey, grant);
        }
    }

    fn transmit(&mut self, i: usize) {
        let mut packets = 0;
        loop {
            self.buf.clear();
            let mut ring = SimRing::new(self.machine.as_ref().and(Some(0)), usize::MAX);
            let rnic = &mut self.sides[i].rnic;
            let more = rnic.poll_transmit_with(self.now, &mut self.buf, &mut ring, true);
            let mut sent = Vec::new();
            for request in ring.requests {
                let (ticket, mut bytes) = (request.ticket, request.bytes.into_inner());
                packets += 1;
                end_packet(&mut bytes);
                sent.push(Wire {
                    path: self.path(i),
                    bytes,
                    local: true,
                    ticket: Some(ticket),
                });
            }
            for train in self.buf.trains() {
                assert!(train.range.len() <= rdmux_rnic::TRAIN_BYTES_MAX);
                packets += train.packets;
                let bytes = &self.buf.bytes()[train.range.clone()];
                sent.extend(bytes.chunks(train.segment_bytes).map(|bytes| Wire {
                    path: train.path,
                    bytes: bytes.to_vec(),
                    local: train.local,
                    ticket: None,
                }));
            }
            for wire in sent {
                for to in 0..2 {
                    let is_there = wire.path.dst == self.sides[to].address;
                    if (is_there || wire.path.dst.is_multicast()) && self.links[to].len() < LINK_PACKETS {
                        self.note_psn(to, &wire.bytes);
                        self.links[to].push_back(wire.clone());
                    }
                }
            }
            assert!(packets < BURST_PACKETS, "packets without end");
            if !more {
                return;
            }
        }
    }

    /// Lets the link lose nothing, flushes succeed and receives be posted, until everything open has ended.
    fn finish(&mut self) {
        for _ in 0..STEPS_TO_FINISH {
            self.settle();
            for i in 0..2 {
                let side = &mut self.sides[i];
                for job in std::mem::take(&mut side.flushes) {
                    side.rnic.handle_flush(self.now, job.id, Ok(()));
                }
                for job in std::mem::take(&mut side.accesses) {
                    side.rnic.handle_access(self.now, job.id, job.run());
                }
                side.post_missing_recvs(self.now);
                // Users decide on all connections.
                for id in std::mem::take(&mut side.cm_ids) {
                    side.rnic.cm().disconnect(self.now, id);
                }
                while !self.taken[i].is_empty() {
                    self.take(i, None);
                }
                while let Some(wire) = self.links[i].pop_front() {
                    self.deliver(i, &wire);
                }
            }
            self.settle();
            let moves = self.links.iter().any(|link| !link.is_empty());
            if moves || self.taken.iter().any(|taken| !taken.is_empty()) {
                continue;
            }
            let timers = self.sides.iter().filter_map(|side| side.rnic.poll_timeout());
            let Some(next) = timers.min() else { return };
            self.now = self.now.max(next);
            self.fire(0);
            self.fire(1);
        }
        panic!("open requests do not complete");
    }

    /// Delivers nothing more: every retry runs out and no timer is left.
    fn rest(&mut self) {
        for i in 0..2 {
            let mut fired = 0;
            while let Some(at) = self.sides[i].rnic.poll_timeout() {
                self.now = self.now.max(at);
                self.fire(i);
                self.settle();
                fired += 1;
                assert!(fired < TIMERS_TO_REST, "timers without end");
            }
        }
    }
}

/// Returns the index of a QP's peer among the QPs of the other side.
fn peer_of(at: usize) -> usize {
    QpKind::VARIANTS[at].of_peer() as usize
}

fn group(shape: u8) -> IpAddr {
    if shape & 1 != 0 {
        IpAddr::from([0xff0e, 0, 0, 0, 0, 0, 0, 1])
    } else {
        IpAddr::from([239, 0, 0, 1])
    }
}

fn endpoint(qpn: Qpn, kind: QpKind) -> Endpoint {
    Endpoint {
        transport: match kind.qp_type() {
            QpType::Rc => Transport::Rc,
            QpType::Uc => Transport::Uc,
            QpType::Ud => Transport::Ud,
            QpType::XrcSend | QpType::XrcRecv => Transport::Xrc,
        },
        qpn,
        starting_psn: Psn::new(PSN),
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 7,
        retry_count: 7,
        srq: kind == QpKind::Shared,
        ack_timeout: 14,
        path_mtu: PathMtu::Bytes1024,
        traffic_class: 0,
        extensions: None,
        plain: false,
    }
}
