//! Fuzzing of the engine: the input says what users, links and clocks do to two connected QPs, hostile packets with a right
//! ICRC included. It runs under the coverage-guided fuzzer and, by stable means, in every test run.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_rnic::{
    Access, Config, Cqn, FlushId, LKey, Memory, Operation, Path, Placement, QpAttributes, QpInit, QpState,
    RKey, RecvRequest, RegionSpec, Rnic, Selectivity, SendFlags, SendRequest, Sge, Target, Time, TransmitBuf,
};
use rdmux_wire::roce::{Bth, GSI_QKEY, ICRC_LEN};
use rdmux_wire::{Psn, Qpn};

use crate::memory::{Door, SimMemory};

const IOVA: u64 = 0x1000;
const REGION: u64 = 1 << 14;
const GUARD: u64 = 256;
const GUARD_BYTE: u8 = 0xa5;
const SEND_WR_MAX: u32 = 64;
/// Packets that wait on the link at most.
const LINK_PACKETS: usize = 512;
/// Packets that one input event may cause: a few windows of both QPs and what they owe.
const BURST_PACKETS: usize = 1 << 15;
/// Timers that fire at most until a device whose peer is silent comes to rest.
const TIMERS_TO_REST: usize = 2_000;

struct Side {
    rnic: Rnic,
    address: IpAddr,
    memory: Arc<SimMemory>,
    lkey: LKey,
    rkey: RKey,
    cq: Cqn,
    qpn: Qpn,
    flushes: Vec<FlushId>,
    posted: usize,
    completed: usize,
    /// On their way to this side: source port and bytes.
    link: VecDeque<(u16, Vec<u8>)>,
}

/// What is left of the input.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }
}

/// Panics when the engine does, or when one of its invariants is broken.
pub fn rnic(input: &[u8]) {
    let mut input = Input(input);
    let shape = input.byte();
    let mut pair = Pair::new(shape);
    while !input.0.is_empty() {
        pair.event(&mut input);
        pair.settle();
    }
    pair.rest();
}

struct Pair {
    now: Time,
    sides: [Side; 2],
    buf: TransmitBuf,
}

impl Pair {
    fn new(shape: u8) -> Pair {
        let sides = [1u8, 2].map(|n| Side::new(n, shape & 1 != 0));
        let mut pair = Pair {
            now: Time(1),
            sides,
            buf: TransmitBuf::new(64 << 10, shape & 2 != 0),
        };
        for i in 0..2 {
            pair.connect(i, shape);
        }
        pair
    }

    fn connect(&mut self, i: usize, shape: u8) {
        let psn = |side: usize| Psn::new(0xff_fffe + side as u32);
        let init = QpAttributes {
            access: Some(Side::ACCESS),
            ..Default::default()
        };
        let rtr = QpAttributes {
            path: Some(Path {
                src: self.sides[i].address,
                dst: self.sides[1 - i].address,
                src_port: 0xc001,
                traffic_class: 0,
            }),
            path_mtu: Some(if shape & 4 == 0 { 256 } else { 1024 }),
            dest_qpn: Some(self.sides[1 - i].qpn),
            rq_psn: Some(psn(1 - i)),
            max_dest_rd_atomic: Some(if shape & 8 == 0 { 1 } else { 8 }),
            min_rnr_timer: Some(1),
            window_bytes: Some(if shape & 16 == 0 { 1 } else { 1 << 16 }),
            peer_is_rdmux: Some(shape & 32 == 0),
            selective: Some(shape & 128 == 0),
            ..Default::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(psn(i)),
            timeout: Some(8),
            retry_count: Some(7),
            rnr_retry: Some(if shape & 64 == 0 { 7 } else { 1 }),
            max_rd_atomic: Some(if shape & 8 == 0 { 1 } else { 8 }),
            ..Default::default()
        };
        let (now, qpn) = (self.now, self.sides[i].qpn);
        for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            // After a reset in mid-run this is the way back.
            let _ = self.sides[i].rnic.modify_qp(now, qpn, to, &attr);
        }
    }

    fn event(&mut self, input: &mut Input<'_>) {
        let what = input.byte();
        let i = usize::from(what & 1);
        match what >> 1 & 15 {
            0 | 1 => self.post(i, input),
            2 | 3 => {
                for _ in 0..=input.byte() {
                    let Some((port, bytes)) = self.sides[i].link.pop_front() else {
                        break;
                    };
                    self.deliver(i, port, &bytes);
                }
            }
            4 => drop(self.sides[i].link.pop_front()),
            5 => {
                if let Some(packet) = self.sides[i].link.front().cloned() {
                    self.sides[i].link.push_back(packet);
                }
            }
            6 => {
                // Changed on the way by somebody who can compute an ICRC.
                if let Some((port, mut bytes)) = self.sides[i].link.pop_front() {
                    for _ in 0..=input.byte() & 3 {
                        let at = usize::from(input.byte()) % (bytes.len() - ICRC_LEN);
                        bytes[at] = input.byte();
                    }
                    self.seal(i, port, &mut bytes);
                    self.deliver(i, port, &bytes);
                }
            }
            7 => {
                let n = usize::from(input.byte());
                let mut bytes = input.bytes(n);
                bytes.resize(bytes.len().max(Bth::LEN) + ICRC_LEN, 0);
                let qpn = self.sides[i].qpn.value().to_be_bytes();
                bytes[1] &= 0xf0;
                bytes[2..4].fill(0xff);
                bytes[5..8].copy_from_slice(&qpn[1..]);
                // Near the window, or nothing would ever happen.
                let psn = 0xff_fffe_u32.wrapping_add(u32::from(bytes[11])).to_be_bytes();
                bytes[9..12].copy_from_slice(&psn[1..]);
                self.seal(i, 0xc001, &mut bytes);
                self.deliver(i, 0xc001, &bytes);
            }
            8 => {
                self.now = self.now + (u64::from(input.word()) << (input.byte() % 24));
                for i in 0..2 {
                    self.fire(i);
                }
            }
            9 | 10 => {
                let length = u32::from(input.word() % 2048);
                let side = &mut self.sides[i];
                let sge = Sge::new(IOVA + u64::from(input.word() % 0x3800), length, side.lkey);
                let request = RecvRequest {
                    wr_id: 1,
                    sges: sge.into(),
                };
                side.posted += usize::from(side.rnic.post_recv(self.now, side.qpn, request).is_ok());
            }
            11 => {
                let side = &mut self.sides[i];
                if !side.flushes.is_empty() {
                    let at = usize::from(input.byte()) % side.flushes.len();
                    let id = side.flushes.swap_remove(at);
                    let result = if input.byte() & 15 == 15 {
                        Err(rdmux_rnic::Fault::Io(5))
                    } else {
                        Ok(())
                    };
                    side.rnic.handle_flush(self.now, id, result);
                }
            }
            12 => {
                let side = &mut self.sides[i];
                match input.byte() & 7 {
                    0 => drop(side.rnic.dereg_mr(side.lkey)),
                    1 => {
                        let to = QpAttributes::default();
                        let _ = side.rnic.modify_qp(self.now, side.qpn, QpState::Error, &to);
                    }
                    2 => {
                        let to = QpAttributes::default();
                        let _ = side.rnic.modify_qp(self.now, side.qpn, QpState::Reset, &to);
                        let shape = input.byte();
                        // What was posted is forgotten without a completion.
                        side.posted = side.completed;
                        self.connect(i, shape);
                    }
                    _ => {}
                }
            }
            13 => {
                let mut bytes = vec![0; Bth::LEN + 8];
                bytes[0] = 0x64;
                bytes[2..4].fill(0xff);
                bytes[7] = 1;
                bytes[12..16].copy_from_slice(&GSI_QKEY.to_be_bytes());
                let mad = [1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
                bytes.extend_from_slice(&mad);
                bytes.push(0x10 + input.byte() % 12);
                let n = usize::from(input.byte());
                bytes.extend(input.bytes(n));
                bytes.resize(Bth::LEN + 8 + 256 + ICRC_LEN, 0);
                self.seal(i, 0xc000, &mut bytes);
                self.deliver(i, 0xc000, &bytes);
            }
            14 => {
                let n = usize::from(input.byte());
                let (bytes, segment) = (input.bytes(n), usize::from(input.byte()));
                let src = self.sides[1 - i].address;
                self.sides[i]
                    .rnic
                    .handle_datagram(self.now, src, 0xc001, &bytes, segment);
            }
            _ => {
                let links = self.sides[i].link.make_contiguous();
                links.reverse();
            }
        }
    }

    fn post(&mut self, i: usize, input: &mut Input<'_>) {
        let kind = input.byte();
        let length = u32::from(input.word() % 4096);
        // Most lie inside of the region, some do not.
        let (from, to) = (u64::from(input.word()) % 0x3400, u64::from(input.word()) % 0x3400);
        let (va, rkey) = (IOVA + to, self.sides[1 - i].rkey);
        let operation = match kind & 7 {
            0 | 1 => Operation::Send {
                imm: (kind & 8 != 0).then_some(7),
            },
            2 | 3 => Operation::Write {
                va,
                rkey,
                imm: (kind & 8 != 0).then_some(7),
            },
            4 | 5 => Operation::Read { va, rkey },
            _ => Operation::Flush {
                va,
                rkey,
                length,
                placement: if kind & 8 == 0 {
                    Placement::PERSISTENT
                } else {
                    Placement::GLOBAL
                },
                selectivity: Selectivity::Range,
            },
        };
        let side = &mut self.sides[i];
        let sges = if kind & 7 >= 6 {
            rdmux_rnic::SgeList::EMPTY
        } else {
            Sge::new(IOVA + from, length, side.lkey).into()
        };
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::FENCE, kind & 16 != 0);
        let request = SendRequest {
            wr_id: 2,
            operation,
            sges,
            flags,
            to: Target::Connected,
        };
        side.posted += usize::from(side.rnic.post_send(self.now, side.qpn, request).is_ok());
    }

    /// Puts the right ICRC at the end.
    fn seal(&self, to: usize, src_port: u16, bytes: &mut [u8]) {
        let path = Path {
            src: self.sides[1 - to].address,
            dst: self.sides[to].address,
            src_port,
            traffic_class: 0,
        };
        let body = bytes.len() - ICRC_LEN;
        let icrc = path.flow().icrc(&bytes[..body], 0);
        bytes[body..].copy_from_slice(&icrc.to_le_bytes());
    }

    fn deliver(&mut self, to: usize, src_port: u16, bytes: &[u8]) {
        let src = self.sides[1 - to].address;
        self.sides[to]
            .rnic
            .handle_datagram(self.now, src, src_port, bytes, bytes.len());
    }

    fn fire(&mut self, i: usize) {
        let rnic = &mut self.sides[i].rnic;
        rnic.handle_timeout(self.now);
        assert!(
            rnic.poll_timeout().is_none_or(|at| at > self.now),
            "a timer that was handled is due again at once"
        );
    }

    /// Polls both sides empty and checks what must hold between any two events.
    fn settle(&mut self) {
        for i in 0..2 {
            let mut packets = 0;
            loop {
                self.buf.clear();
                let more = self.sides[i].rnic.poll_transmit(self.now, &mut self.buf, true);
                for train in self.buf.trains() {
                    assert!(train.range.len() <= rdmux_rnic::TRAIN_BYTES_MAX);
                    packets += train.packets;
                    for bytes in self.buf.bytes()[train.range.clone()].chunks(train.segment_bytes) {
                        if self.sides[1 - i].link.len() < LINK_PACKETS {
                            let packet = (train.path.src_port, bytes.to_vec());
                            self.sides[1 - i].link.push_back(packet);
                        }
                    }
                }
                assert!(packets < BURST_PACKETS, "packets without end");
                if !more {
                    break;
                }
            }
            let side = &mut self.sides[i];
            while let Some(job) = side.rnic.poll_flush() {
                side.flushes.push(job.id);
            }
            while side.rnic.poll_event().is_some() {}
            while side.rnic.cm().poll_event().is_some() {}
            while side.rnic.poll_cq(side.cq).is_some() {
                side.completed += 1;
            }
            assert!(side.completed <= side.posted, "more completions than requests");
            if let Some(info) = side.rnic.query_qp(side.qpn) {
                assert!(info.send_outstanding <= SEND_WR_MAX as usize);
                let open = info.send_outstanding + info.recv_posted;
                assert!(side.completed + open <= side.posted, "completed and still open");
                let idle = matches!(info.state, QpState::Error | QpState::Reset);
                assert!(!idle || open == 0, "requests open in {:?}", info.state);
            }
            let image = side.memory.lock();
            let len = image.bytes.len();
            let guards = [
                &image.bytes[..GUARD as usize],
                &image.bytes[len - GUARD as usize..],
            ];
            assert!(
                guards.iter().all(|guard| guard.iter().all(|b| *b == GUARD_BYTE)),
                "bytes outside of the region changed"
            );
        }
    }

    /// From now on nothing arrives: every retry runs out and no timer is left.
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

impl Side {
    const ACCESS: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ)
        .union(Access::FLUSH_GLOBAL)
        .union(Access::FLUSH_PERSISTENT);

    fn new(n: u8, ipv6: bool) -> Side {
        let address = if ipv6 {
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)])
        } else {
            IpAddr::from([10, 0, 0, n])
        };
        let mut rnic = Rnic::new(Config {
            address,
            slot: n,
            seed: [n; 32],
            guid: u64::from(n),
            gsi_src_port: 0xc000,
            receive_window_bytes: 1 << 16,
            traffic: rdmux_rnic::Traffic::default(),
            mtu: 4096,
        });
        let memory = Arc::new(SimMemory::new(
            vec![GUARD_BYTE; (REGION + 2 * GUARD) as usize],
            true,
        ));
        let pd = rnic.alloc_pd();
        let door: Arc<dyn Memory> = Arc::new(Door::new(memory.clone()));
        let spec = RegionSpec {
            memory: door,
            memory_offset: GUARD,
            length: REGION,
            iova: IOVA,
            access: Side::ACCESS,
        };
        let (lkey, rkey) = rnic.reg_mr(pd, spec).expect("a region inside of its memory");
        let cq = rnic.create_cq(1 << 16);
        let init = QpInit {
            max_send_wr: SEND_WR_MAX,
            max_recv_wr: 64,
            ..QpInit::new(pd, cq)
        };
        let qpn = rnic.create_qp(init).expect("there are QPNs");
        rnic.cm().listen(rdmux_wire::cm::ServiceId(0));
        Side {
            rnic,
            address,
            memory,
            lkey,
            rkey,
            cq,
            qpn,
            flushes: Vec::new(),
            posted: 0,
            completed: 0,
            link: VecDeque::new(),
        }
    }
}
