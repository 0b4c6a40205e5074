//! Two devices of one host, the driver's part between them, and steps of test programs for them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::tests::util::*;
use crate::*;

/// Regions of side 1. Each covers the whole memory of the side, except [`Key::Part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Whole,
    WriteOnly,
    ReadOnly,
    /// Addresses count from 0.
    ZeroBased,
    /// The bytes at [`PART`].
    Part,
    /// Bound to a memory window of type 1.
    Window,
    /// Filled by a work request.
    Fast,
}

pub(super) const KEYS: [Key; 7] = [
    Key::Whole,
    Key::WriteOnly,
    Key::ReadOnly,
    Key::ZeroBased,
    Key::Part,
    Key::Window,
    Key::Fast,
];
/// Offset of the small region; its length follows.
pub(super) const PART: u64 = 0x4000;
pub(super) const PART_BYTES: u64 = 0x1000;
/// Number of the own memory that faults; that of the own memory that the device may only read follows.
pub(super) const OWN_FAULTS: u64 = 1;
pub(super) const OWN_READ_ONLY: u64 = 2;
/// Distance in own memory between the bytes of one request and those of the next.
pub(super) const OWN_STRIDE: u64 = 0x1_0000;

/// Operation of a request at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Write,
    WriteImm,
    Read,
    Send,
    FetchAdd,
    AtomicWrite,
    Flush,
    /// Bind of an own window, which the device executes alone.
    Bind,
}

/// Location of a request's own bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    Memory,
    /// Split into this many elements.
    Pieces(u32),
    Inline,
    /// The second half has a key that does not exist.
    NoKey,
    /// The range extends beyond the region.
    OutOfBounds,
    Faults,
    ReadOnly,
}

/// A request of side 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) what: What,
    pub(super) key: Key,
    pub(super) at: u64,
    pub(super) bytes: u32,
    pub(super) own: Own,
    pub(super) fence: bool,
    pub(super) silent: bool,
}

impl Ask {
    pub(super) fn key(self, key: Key) -> Ask {
        Ask { key, ..self }
    }

    pub(super) fn own(self, own: Own) -> Ask {
        Ask { own, ..self }
    }

    pub(super) fn fence(self) -> Ask {
        Ask { fence: true, ..self }
    }

    pub(super) fn silent(self) -> Ask {
        Ask { silent: true, ..self }
    }
}

pub(super) fn ask(what: What, at: u64, bytes: u32) -> Ask {
    Ask {
        what,
        key: Key::Whole,
        at,
        bytes,
        own: Own::Memory,
        fence: false,
        silent: false,
    }
}

pub(super) fn write(at: u64, bytes: u32) -> Ask {
    ask(What::Write, at, bytes)
}

pub(super) fn read(at: u64, bytes: u32) -> Ask {
    ask(What::Read, at, bytes)
}

pub(super) fn send(bytes: u32) -> Ask {
    ask(What::Send, 0, bytes)
}

/// A step of a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Do {
    Post(Ask),
    /// Side 1 posts a receive.
    Recv(u32),
    /// Runs both sides until nothing is left to do.
    Rest,
    /// Moves side `0`'s QP to this state, or changes it in this state.
    Modify(usize, QpState),
    /// Changes the rights of side 1's QP.
    Rights(Access),
    /// Changes side 0's QP in RTS.
    RateLimit(u64),
    /// Changes side 1's QP in SQD.
    MaxDestRdAtomic(u8),
    /// Changes side 0's QP in SQD.
    MaxRdAtomic(u8),
    Destroy(usize),
    /// Deregisters a region of side 1; the next variant registers it over other memory.
    Dereg(Key),
    Rereg(Key),
    /// The owner revokes all grants.
    TakeBack,
    /// The grant ends after this many more bytes.
    EndsAfter(u64),
}

/// A peer's memory; access ends when the grant is revoked.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) memory: Arc<dyn Memory>,
    pub(super) open: AtomicBool,
    pub(super) bytes_left: AtomicU64,
    pub(super) calls: AtomicU64,
    /// Accesses by parts of a lane.
    pub(super) by_parts: AtomicU64,
    pub(super) this: Weak<Granted>,
}

/// A grant as a part of a lane has it.
#[derive(Debug)]
struct OfPart(Arc<Granted>);

impl PeerMemory for OfPart {
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.0.by_parts.fetch_add(1, Ordering::Relaxed);
        self.0.write(offset, from, from_offset, length)
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        self.0.by_parts.fetch_add(1, Ordering::Relaxed);
        self.0.write_bytes(offset, bytes)
    }

    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.0.by_parts.fetch_add(1, Ordering::Relaxed);
        self.0.read(offset, to, to_offset, length)
    }
}

impl Granted {
    /// Executes an access of `length` bytes piece by piece until the grant ends.
    fn pieces(
        &self,
        length: u64,
        mut f: impl FnMut(u64, &mut [u8]) -> Result<(), PeerFault>,
    ) -> Result<(), PeerFault> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut done = 0;
        while done < length || length == 0 {
            if !self.open.load(Ordering::Relaxed) {
                return Err(PeerFault::Ended);
            }
            let left = self.bytes_left.load(Ordering::Relaxed);
            let n = (length - done).min(100).min(left);
            f(done, &mut vec![0; n as usize])?;
            self.bytes_left.store(left - n, Ordering::Relaxed);
            if left == n {
                self.open.store(false, Ordering::Relaxed);
            }
            done += n;
            if length == 0 {
                break;
            }
        }
        Ok(())
    }
}

impl PeerMemory for Granted {
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.pieces(length, |done, buffer| {
            from.read(from_offset + done, buffer).map_err(PeerFault::Own)?;
            let written = self.memory.write(offset + done, buffer);
            written.map_err(|_| PeerFault::Ended)
        })
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        self.pieces(bytes.len() as u64, |done, buffer| {
            let piece = &bytes[done as usize..][..buffer.len()];
            let written = self.memory.write(offset + done, piece);
            written.map_err(|_| PeerFault::Ended)
        })
    }

    fn read(&self, offset: u64, to: &dyn Memory, to_offset: u64, length: u64) -> Result<(), PeerFault> {
        self.pieces(length, |done, buffer| {
            let read = self.memory.read(offset + done, buffer);
            read.map_err(|_| PeerFault::Ended)?;
            to.write(to_offset + done, buffer).map_err(PeerFault::Own)
        })
    }

    fn of_part(&self, _: usize) -> Option<Arc<dyn PeerMemory>> {
        Some(Arc::new(OfPart(self.this.upgrade()?)))
    }
}

/// Memory whose every access faults.
#[derive(Debug)]
pub(super) struct Faulty(HeapMemory);

impl Memory for Faulty {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::Io(5))
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }
}

/// Two devices on one host, or, for comparison, on two hosts.
pub(super) struct Host {
    pub(super) pair: Pair,
    /// Set when the peers are on one host and grant memory.
    pub(super) grants: bool,
    /// Set when requests are first tried without being queued.
    pub(super) posts_directly: bool,
    /// Set when they are tried without the device before that.
    pub(super) posts_to_lane: bool,
    /// Requests that were carried out without the device.
    pub(super) by_lane: u64,
    pub(super) keys: Vec<(Key, RKey, u64)>,
    pub(super) own_keys: Vec<(u64, LKey)>,
    pub(super) own_window: RKey,
    /// Side 1's grants, each with the QP it was made for.
    pub(super) given: Vec<(Qpn, LKey, Arc<Granted>)>,
    /// Keys for which side 0 requested a grant.
    pub(super) asked: Vec<RKey>,
    pub(super) posted: u64,
    /// Log of receive completions, send completions and events.
    pub(super) log: Vec<String>,
}

pub(super) fn region(memory: Arc<dyn Memory>, at: u64, length: u64, access: Access) -> RegionSpec {
    RegionSpec {
        memory,
        memory_offset: at,
        length,
        iova: IOVA + at,
        access,
    }
}

impl Host {
    pub(super) fn new(grants: bool) -> Host {
        let mut pair = Pair::new();
        for (i, side) in pair.sides.iter().enumerate() {
            let bytes: Vec<u8> = pattern(MEMORY).into_iter().map(|b| b ^ (i as u8)).collect();
            side.memory.with(|m| m.copy_from_slice(&bytes));
        }
        let (pd, memory) = (pair.sides[1].pd, pair.sides[1].memory.clone());
        let whole_key = pair.sides[1].rkey;
        let rnic = &mut pair.sides[1].rnic;
        let whole = MEMORY as u64;
        let keys = KEYS.map(|key| {
            let (at, length, access) = match key {
                Key::WriteOnly => (0, whole, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
                Key::ReadOnly => (0, whole, Access::REMOTE_READ),
                Key::ZeroBased => (0, whole, ALL_ACCESS | Access::ZERO_BASED),
                Key::Part => (PART, PART_BYTES, ALL_ACCESS),
                _ => (0, whole, ALL_ACCESS),
            };
            let spec = region(memory.clone(), at, length, access);
            let rkey = match key {
                Key::Whole => whole_key,
                Key::Window => rnic.alloc_mw(pd, WindowType::One).unwrap(),
                Key::Fast => rnic.alloc_mr(pd, whole).unwrap().1,
                _ => rnic.reg_mr(pd, spec).unwrap().1,
            };
            (key, rkey, if key == Key::ZeroBased { 0 } else { IOVA })
        });
        let pd = pair.sides[0].pd;
        let own = [
            (
                OWN_FAULTS,
                region(Arc::new(Faulty(HeapMemory::new(MEMORY))), 0, whole, ALL_ACCESS),
            ),
            (
                OWN_READ_ONLY,
                region(pair.sides[0].memory.clone(), 0, whole, Access::empty()),
            ),
        ];
        let own_window = pair.sides[0].rnic.alloc_mw(pd, WindowType::One).unwrap();
        let own_keys = own.map(|(n, spec)| (n, pair.sides[0].rnic.reg_mr(pd, spec).unwrap().0));
        let mut host = Host {
            pair,
            grants,
            posts_directly: false,
            posts_to_lane: false,
            by_lane: 0,
            keys: keys.to_vec(),
            own_keys: own_keys.to_vec(),
            own_window,
            given: Vec::new(),
            asked: Vec::new(),
            posted: 0,
            log: Vec::new(),
        };
        host.open_keys();
        host.set_local(grants);
        host
    }

    /// Binds the window and fills the region that work requests fill.
    pub(super) fn open_keys(&mut self) {
        let (qpn, now) = (self.pair.sides[1].qpn, self.pair.now);
        let (lkey, memory) = (self.pair.sides[1].lkey, self.pair.sides[1].memory.clone());
        let bind = Bind {
            window: self.key(Key::Window).0,
            region: lkey,
            va: IOVA,
            length: MEMORY as u64,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ,
        };
        let rnic = &mut self.pair.sides[1].rnic;
        let bound = rnic.bind_mw(now, qpn, 0, bind, SendFlags::empty()).unwrap();
        let key = self.key(Key::Fast).0.next();
        let spec = region(memory, 0, MEMORY as u64, ALL_ACCESS);
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Register(Box::new(Registration { key, spec })),
            sges: SgeList::EMPTY,
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        self.pair.sides[1].rnic.post_send(now, qpn, request).unwrap();
        for (of, rkey, _) in &mut self.keys {
            match of {
                Key::Window => *rkey = bound,
                Key::Fast => *rkey = key,
                _ => {}
            }
        }
        self.rest();
    }

    /// Makes side 0 request and receive the grants of all keys that may be granted.
    pub(super) fn warm(&mut self) {
        for key in KEYS {
            let ask = if key == Key::ReadOnly {
                read(PART, 1)
            } else {
                write(PART, 1)
            };
            self.post(ask.key(key)).unwrap();
            self.rest();
        }
    }

    pub(super) fn key(&self, key: Key) -> (RKey, u64) {
        let found = self.keys.iter().find(|(of, ..)| *of == key).unwrap();
        (found.1, found.2)
    }

    pub(super) fn set_local(&mut self, local: bool) {
        for side in &mut self.pair.sides {
            side.rnic.set_local(side.qpn, local);
        }
    }

    pub(super) fn post(&mut self, ask: Ask) -> Result<(), PostError> {
        let (rkey, base) = self.key(ask.key);
        let va = base + ask.at;
        let lkey_of = |n| self.own_keys.iter().find(|(of, _)| *of == n).unwrap().1;
        let (side, own) = (&self.pair.sides[0], IOVA + self.posted % 32 * OWN_STRIDE);
        let half = ask.bytes / 2;
        let sges = match ask.own {
            Own::Memory => Sge::new(own, ask.bytes, side.lkey).into(),
            Own::Pieces(n) => {
                let each = ask.bytes / n;
                let piece = |i| {
                    let bytes = if i + 1 == n { ask.bytes - i * each } else { each };
                    Sge::new(own + u64::from(2 * i * each), bytes, side.lkey)
                };
                SgeList::from(&(0..n).map(piece).collect::<Vec<_>>()[..])
            }
            Own::Inline => SgeList::inline(&pattern(ask.bytes as usize)),
            Own::NoKey => {
                let pieces = [
                    Sge::new(own, half, side.lkey),
                    Sge::new(own, ask.bytes - half, LKey(side.lkey.0 ^ 0x100)),
                ];
                SgeList::from(&pieces[..])
            }
            Own::OutOfBounds => Sge::new(IOVA + MEMORY as u64 - 1, ask.bytes, side.lkey).into(),
            Own::Faults => Sge::new(own, ask.bytes, lkey_of(OWN_FAULTS)).into(),
            Own::ReadOnly => Sge::new(own, ask.bytes, lkey_of(OWN_READ_ONLY)).into(),
        };
        let operation = match ask.what {
            What::Write => Operation::Write { va, rkey, imm: None },
            What::WriteImm => Operation::Write {
                va,
                rkey,
                imm: Some(9),
            },
            What::Read => Operation::Read { va, rkey },
            What::Send => Operation::Send { imm: None },
            What::FetchAdd => Operation::FetchAdd { va, rkey, add: 1 },
            What::AtomicWrite => Operation::AtomicWrite { va, rkey },
            What::Flush => Operation::Flush {
                va,
                rkey,
                length: 1,
                placement: Placement::GLOBAL,
                selectivity: Selectivity::Range,
            },
            What::Bind => {
                let region = side.lkey;
                let (window, va, length, access) = (self.own_window, IOVA, 8, Access::REMOTE_READ);
                Operation::Bind(Bind {
                    window,
                    region,
                    va,
                    length,
                    access,
                })
            }
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, !ask.silent);
        flags.set(SendFlags::FENCE, ask.fence);
        let request = SendRequest {
            wr_id: self.posted,
            operation,
            sges: if ask.bytes == 0 { SgeList::EMPTY } else { sges },
            flags,
            to: Target::Connected,
        };
        self.posted += 1;
        let (side, now) = (&mut self.pair.sides[0], self.pair.now);
        if let Operation::Bind(bind) = request.operation {
            let bound = side.rnic.bind_mw(now, side.qpn, request.wr_id, bind, flags);
            self.own_window = bound?;
            return Ok(());
        }
        if self.posts_to_lane {
            let lane = side.rnic.direct_lane(side.qpn);
            match lane.map(|lane| lane.post(&mut Some(request.clone()), || now)) {
                None | Some(Directly::Not) => {}
                Some(Directly::Done | Directly::DoneAndEnded) => {
                    self.by_lane += 1;
                    return Ok(());
                }
                Some(Directly::DoneAndTell(delivery)) => {
                    side.rnic.deliver(now, delivery);
                    self.by_lane += 1;
                    return Ok(());
                }
            }
        }
        if self.posts_directly && side.rnic.post_directly(|| now, side.qpn, &request) {
            return Ok(());
        }
        side.rnic.post_send(now, side.qpn, request)
    }

    /// Acts as the driver: revokes grants, requests wanted grants from the peer, logs everything else. Returns whether grants were wanted.
    pub(super) fn serve(&mut self) -> bool {
        let mut wanted = Vec::new();
        for (i, side) in self.pair.sides.iter_mut().enumerate() {
            while let Some(qpn) = side.rnic.poll_revoked() {
                let of_qp = |(by, ..): &&(Qpn, LKey, Arc<Granted>)| (i, *by) == (1, qpn);
                for (.., granted) in self.given.iter().filter(of_qp) {
                    granted.open.store(false, Ordering::Relaxed);
                }
            }
            while let Some(event) = side.rnic.poll_event() {
                match event {
                    Event::WantsGrant(qpn, rkey) => wanted.push((i, qpn, rkey)),
                    other => self.log.push(format!("{i}: {other:?}")),
                }
            }
            for wc in side.completions() {
                self.log.push(format!("{i}: {wc:?}"));
            }
        }
        let any = !wanted.is_empty();
        for (i, qpn, rkey) in wanted {
            assert!(self.grants && i == 0, "side {i} asks");
            self.asked.push(rkey);
            self.grant(qpn, rkey);
        }
        any
    }

    pub(super) fn grant(&mut self, to: Qpn, rkey: RKey) {
        let of = self.pair.sides[1].qpn;
        let grantable = self.pair.sides[1].rnic.grantable(of, rkey);
        let grant = grantable.ok().map(|of_region| {
            let granted = Arc::new_cyclic(|this| Granted {
                memory: of_region.memory,
                open: AtomicBool::new(true),
                bytes_left: AtomicU64::new(u64::MAX),
                calls: AtomicU64::new(0),
                by_parts: AtomicU64::new(0),
                this: this.clone(),
            });
            self.given.push((of, of_region.lkey, granted.clone()));
            Grant {
                memory: granted,
                memory_offset: of_region.memory_offset,
                iova: of_region.iova,
                length: of_region.length,
                access: of_region.access,
            }
        });
        self.pair.sides[0].rnic.set_grant(self.pair.now, to, rkey, grant);
    }

    pub(super) fn rest(&mut self) {
        loop {
            self.pair.run();
            if !self.serve() {
                break;
            }
        }
    }

    /// Changes the state or an attribute of a side's QP.
    pub(super) fn modify(&mut self, i: usize, to: QpState, attributes: QpAttributes) {
        self.pair.modify(i, to, &attributes);
        self.serve();
    }

    pub(super) fn state(&self, i: usize) -> QpState {
        self.pair.sides[i].state()
    }

    pub(super) fn perform(&mut self, step: Do) {
        let attributes = QpAttributes::default();
        match step {
            Do::Post(ask) => {
                let posted = self.post(ask);
                if let Err(error) = posted {
                    self.log.push(format!("not posted: {error}"));
                }
            }
            Do::Recv(bytes) => self.pair.recv(1, 99, 0x30_0000, bytes),
            Do::Rest => self.rest(),
            Do::Modify(i, to) => self.modify(i, to, attributes),
            Do::Rights(access) => {
                let access = Some(access);
                let state = self.state(1);
                self.modify(1, state, QpAttributes { access, ..attributes });
            }
            Do::RateLimit(bps) => {
                let rate_limit_bps = Some(bps);
                let to = QpAttributes {
                    rate_limit_bps,
                    ..attributes
                };
                self.modify(0, QpState::Rts, to);
            }
            Do::MaxDestRdAtomic(n) => {
                let max_dest_rd_atomic = Some(n);
                let to = QpAttributes {
                    max_dest_rd_atomic,
                    ..attributes
                };
                self.modify(1, QpState::Sqd, to);
            }
            Do::MaxRdAtomic(n) => {
                let max_rd_atomic = Some(n);
                let to = QpAttributes {
                    max_rd_atomic,
                    ..attributes
                };
                self.modify(0, QpState::Sqd, to);
            }
            Do::Destroy(i) => {
                let side = &mut self.pair.sides[i];
                side.rnic.destroy_qp(side.qpn);
                self.serve();
            }
            Do::Dereg(key) => {
                let lkey = LKey(self.key(key).0.0);
                self.take_back(|of| of == lkey);
                let rnic = &mut self.pair.sides[1].rnic;
                rnic.unbind_mws(lkey);
                rnic.dereg_mr(lkey).unwrap();
            }
            Do::Rereg(key) => {
                let lkey = LKey(self.key(key).0.0);
                self.take_back(|of| of == lkey);
                let other = Arc::new(HeapMemory::new(MEMORY));
                let rnic = &mut self.pair.sides[1].rnic;
                rnic.rereg_mr(lkey, None, |spec| spec.memory = other).unwrap();
            }
            Do::TakeBack => self.take_back(|_| true),
            Do::EndsAfter(bytes) => {
                for (.., granted) in &self.given {
                    granted.bytes_left.store(bytes, Ordering::Relaxed);
                }
            }
        }
    }

    pub(super) fn take_back(&mut self, is_it: impl Fn(LKey) -> bool) {
        for (.., granted) in self.given.iter().filter(|(_, lkey, _)| is_it(*lkey)) {
            granted.open.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn direct(&self) -> u64 {
        self.pair.sides[0].rnic.counters().direct_requests
    }

    pub(super) fn calls(&self) -> u64 {
        let calls = self.given.iter().map(|(.., granted)| &granted.calls);
        calls.map(|calls| calls.load(Ordering::Relaxed)).sum()
    }
}
