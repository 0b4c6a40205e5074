//! A host of a run: its objects in the engine, its memory, and the model of both.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdmux_rnic::{
    Access, Arm, Cqn, LKey, Pd, QpInit, QpType, Qpn, RKey, RegionSpec, Rnic, Sge, SrqInit, Xrcd,
};

use super::Checked;
use super::keys::Key;
use super::shared::SharedQueue;
use super::words::Words;
use crate::dice::Dice;
use crate::memory::{Door, MemoryKind, SimMemory, Space};
use crate::world::World;

/// Bytes before and after every region that no operation may touch.
pub(super) const GUARD: u64 = 4096;

/// All rights of a peer.
pub(super) const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::FLUSH_PERSISTENT);

/// Capacity of a small completion queue.
pub(super) const NARROW: u32 = 16;

/// A piece of a host's memory, taken from its [`Space`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) at: u64,
    pub(super) len: u64,
}

/// A region over all of a host's memory except for the guards.
#[derive(Clone, Debug)]
pub(super) struct Reg {
    pub(super) door: Arc<Door>,
    pub(super) lkey: LKey,
    pub(super) rkey: RKey,
    pub(super) iova: u64,
}

impl Reg {
    pub(super) fn new(rnic: &mut Rnic, pd: Pd, memory: &Arc<SimMemory>, length: u64, iova: u64) -> Reg {
        let door = Arc::new(Door::new(memory.clone()));
        let spec = RegionSpec {
            memory: door.clone(),
            memory_offset: GUARD,
            length,
            iova,
            access: RIGHTS,
        };
        let (lkey, rkey) = rnic.reg_mr(pd, spec).expect("a region inside of its memory");
        Reg {
            door,
            lkey,
            rkey,
            iova,
        }
    }

    pub(super) fn va(&self, at: u64) -> u64 {
        self.iova + at - GUARD
    }

    pub(super) fn sges(&self, pieces: &[Piece]) -> Vec<Sge> {
        let sge = |p: &Piece| Sge::new(self.va(p.at), p.len as u32, self.lkey);
        pieces.iter().map(sge).collect()
    }
}

/// One end of a connection: an RC QP, or an XRC initiator and the target of the peer's initiator.
#[derive(Debug)]
pub(super) struct ConnectionEnd {
    pub(super) send_qpn: Qpn,
    pub(super) recv_qpn: Qpn,
    pub(super) xrc: bool,
    /// Shared receive queue that it takes its receives from.
    pub(super) srq: Option<usize>,
    pub(super) reg: Reg,
    pub(super) keys: Vec<Key>,
    /// Small completion queue of its own, to which its requests complete, and whether nobody polls it.
    pub(super) narrow: Option<Cqn>,
    pub(super) narrow_unpolled: bool,
    /// Set when that queue overran.
    pub(super) overrun: bool,
    /// Set when the end was destroyed, or lost with its host: it completes nothing.
    pub(super) gone: bool,
    /// Numbers of asynchronous events that came.
    pub(super) errors: u32,
    pub(super) last_wqe: u32,
    pub(super) established: u32,
    /// Set when a request of the peer was executed here.
    pub(super) served: bool,
}

impl ConnectionEnd {
    pub(super) fn has(&self, qpn: Qpn) -> bool {
        !self.gone && (self.send_qpn == qpn || self.recv_qpn == qpn)
    }
}

/// Objects in the engine that a host's users share.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) pd: Pd,
    pub(super) xrcd: Xrcd,
    /// Completion queue polled at each completion.
    pub(super) cq: Cqn,
    /// Completion queue armed for solicited events, and polled now and then.
    pub(super) lazy_cq: Cqn,
    /// Region for words and shared receive queues.
    pub(super) common: Reg,
    pub(super) shared: Vec<SharedQueue>,
}

pub(super) struct Side {
    pub(super) objects: Objects,
    pub(super) memory: Arc<SimMemory>,
    pub(super) model: Vec<u8>,
    pub(super) space: Space,
    /// Bytes of each region.
    pub(super) length: u64,
    pub(super) words: Words,
    /// Bytes that failed operations may or may not have changed.
    pub(super) unknown: Vec<Piece>,
    pub(super) ends: Vec<ConnectionEnd>,
    /// Doors of regions that ended.
    pub(super) shut: Vec<Arc<Door>>,
    pub(super) lazy_poll_planned: bool,
    /// Set when a QPN of before the restart was drawn again.
    repeated_qpn: bool,
}

/// Division of a host's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Bytes for operations.
    pub(super) room: u64,
    /// Bytes for the receives of each shared receive queue.
    pub(super) shared_room: u64,
    /// Flows, whose words for ATOMIC WRITE follow those for atomics.
    pub(super) flows: usize,
}

/// Shared receive queues of a host: the first for RC, the others for XRC.
pub(super) const SHARED: u64 = 3;

impl Layout {
    fn words_at(self) -> u64 {
        GUARD + self.room + SHARED * self.shared_room
    }

    fn length(self) -> u64 {
        self.words_at() - GUARD + Words::bytes(self.flows)
    }
}

impl Side {
    pub(super) fn new(world: &mut World, host: usize, dice: &mut Dice, layout: Layout) -> Side {
        let length = layout.length();
        let mut model = vec![0; (length + 2 * GUARD) as usize];
        dice.fill(&mut model);
        let words = Words::new(dice, layout.words_at(), &model);
        let memory = Arc::new(SimMemory::new(model.clone(), MemoryKind::random(dice)));
        let objects = Objects::new(world, host, dice, &memory, layout);
        Side {
            objects,
            memory,
            model,
            space: Space::new(GUARD..GUARD + layout.room),
            length,
            words,
            unknown: Vec::new(),
            ends: Vec::new(),
            shut: Vec::new(),
            lazy_poll_planned: false,
            repeated_qpn: false,
        }
    }

    /// Creates an end in Reset; a plain one has receives of its own, a narrow one a small completion queue.
    pub(super) fn add_end(
        &mut self,
        world: &mut World,
        host: usize,
        dice: &mut Dice,
        kind: Service,
        (plain, narrow): (bool, bool),
    ) {
        let rnic = &mut world.hosts[host].rnic;
        let objects = &self.objects;
        let pd = objects.pd;
        let iova = dice.below(1 << 47) + (1 << 20);
        let reg = Reg::new(rnic, pd, &self.memory, self.length, iova);
        let srq = (kind == Service::Rc && !plain && dice.one_in(3)).then_some(0);
        let recv_cq = if dice.one_in(3) {
            objects.lazy_cq
        } else {
            objects.cq
        };
        let narrow = narrow.then(|| rnic.create_cq(NARROW));
        if let Some(cq) = narrow {
            rnic.arm_cq(cq, Arm::Next);
        }
        let init = QpInit {
            max_send_wr: 64,
            max_recv_wr: 4096,
            recv_cq,
            srq: srq.map(|srq: usize| objects.shared[srq].srqn),
            ..QpInit::new(pd, narrow.unwrap_or(objects.cq))
        };
        let before: Vec<Qpn> = (self.ends.iter())
            .flat_map(|end| [end.send_qpn, end.recv_qpn])
            .collect();
        let mut create = |init| {
            let qpn = rnic.create_qp(init).expect("there are QPNs");
            // By chance, one time in many thousand, the engine draws a QPN of before a restart, whose old packets would fit. It
            // is replaced once.
            if !before.contains(&qpn) || std::mem::replace(&mut self.repeated_qpn, true) {
                return qpn;
            }
            rnic.destroy_qp(qpn);
            rnic.create_qp(init).expect("there are QPNs")
        };
        let (send_qpn, recv_qpn) = match kind {
            Service::Rc => {
                let qpn = create(init);
                (qpn, qpn)
            }
            Service::Xrc => {
                let send = QpInit {
                    qp_type: QpType::XrcSend,
                    ..init
                };
                let recv = QpInit {
                    qp_type: QpType::XrcRecv,
                    xrcd: Some(objects.xrcd),
                    ..init
                };
                (create(send), create(recv))
            }
        };
        let keys = Key::some(rnic, pd, dice, kind);
        self.ends.push(ConnectionEnd {
            send_qpn,
            recv_qpn,
            xrc: kind == Service::Xrc,
            srq,
            reg,
            keys,
            narrow,
            narrow_unpolled: false,
            overrun: false,
            gone: false,
            errors: 0,
            last_wqe: 0,
            established: 0,
            served: false,
        });
    }

    /// Gives the youngest end a key that allows WRITE or READ alone.
    pub(super) fn add_key_of_one_right(&mut self, world: &mut World, host: usize, dice: &mut Dice) {
        let (rnic, pd) = (&mut world.hosts[host].rnic, self.objects.pd);
        let mut key = Key::of_one_right(rnic, pd, dice);
        let done = key.register(rnic, pd, &self.memory, &mut self.space, dice);
        done.expect("a region inside of its memory");
        if let Some(end) = self.ends.last_mut() {
            end.keys.insert(0, key);
        }
    }

    pub(super) fn end_of(&self, qpn: Qpn) -> Option<usize> {
        self.ends.iter().rposition(|end| end.has(qpn))
    }

    /// Writes `data` into the pieces, as far as it fits.
    pub(super) fn write_model(&mut self, pieces: &[Piece], mut data: &[u8]) {
        for piece in pieces {
            let n = (piece.len as usize).min(data.len());
            let at = piece.at as usize;
            self.model[at..at + n].copy_from_slice(&data[..n]);
            data = &data[n..];
        }
    }

    /// Writes `data` as the application would.
    pub(super) fn write_both(&mut self, pieces: &[Piece], mut data: &[u8]) {
        self.write_model(pieces, data);
        let mut image = self.memory.lock();
        for piece in pieces {
            let n = piece.len as usize;
            let at = piece.at as usize;
            image.bytes[at..at + n].copy_from_slice(&data[..n]);
            data = &data[n..];
        }
    }

    /// Accepts what is there as correct, and returns it.
    pub(super) fn accept(&mut self, pieces: &[Piece]) -> Vec<u8> {
        let image = self.memory.lock();
        let mut all = Vec::new();
        for piece in pieces {
            let range = piece.at as usize..(piece.at + piece.len) as usize;
            self.model[range.clone()].copy_from_slice(&image.bytes[range.clone()]);
            all.extend_from_slice(&image.bytes[range]);
        }
        all
    }

    pub(super) fn check(&self, pieces: &[Piece], what: &str) -> Checked {
        let image = self.memory.lock();
        for piece in pieces {
            let range = piece.at as usize..(piece.at + piece.len) as usize;
            if image.bytes[range.clone()] != self.model[range] {
                return Err(format!("{what}: {} bytes at {} are wrong", piece.len, piece.at));
            }
        }
        Ok(())
    }

    pub(super) fn give(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            self.space.give(piece.at, piece.len);
        }
    }

    /// Checks that all of memory is as the model has it, except for unknown bytes, and that nothing passed a door after it was
    /// shut.
    pub(super) fn compare_all(&mut self) -> Checked {
        let words = self.words.check(&self.memory.lock().bytes);
        words?;
        let mut unknown = std::mem::take(&mut self.unknown);
        unknown.push(self.words.of_atomics());
        self.accept(&unknown);
        let image = self.memory.lock();
        if image.promises_broken > 0 {
            return Err("an ATOMIC WRITE took effect before the FLUSH in front of it".to_owned());
        }
        let trespasses: u64 = (self.shut.iter())
            .map(|door| door.trespasses.load(Ordering::Relaxed))
            .sum();
        if trespasses > 0 {
            return Err(format!("{trespasses} accesses through a region that ended"));
        }
        if image.bytes == self.model {
            return Ok(());
        }
        let at = image.bytes.iter().zip(&self.model).position(|(a, b)| a != b);
        Err(format!("memory differs from the model first at {at:?}"))
    }
}

/// Service of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    Rc,
    Xrc,
}

impl Objects {
    pub(super) fn new(
        world: &mut World,
        host: usize,
        dice: &mut Dice,
        memory: &Arc<SimMemory>,
        layout: Layout,
    ) -> Objects {
        let rnic = &mut world.hosts[host].rnic;
        let pd = rnic.alloc_pd();
        let xrcd = rnic.alloc_xrcd();
        let (cq, lazy_cq) = (rnic.create_cq(1 << 16), rnic.create_cq(1 << 16));
        rnic.arm_cq(cq, Arm::Next);
        rnic.arm_cq(lazy_cq, Arm::Solicited);
        let iova = (dice.below(1 << 47) + (1 << 20)) & !7;
        let common = Reg::new(rnic, pd, memory, layout.length(), iova);
        let shared = (0..SHARED).map(|n| {
            let completions = if dice.one_in(2) { cq } else { lazy_cq };
            let depth = dice.between(2, 24) as u32;
            let init = SrqInit {
                pd,
                max_wr: depth,
                xrc: (n > 0).then_some((xrcd, completions)),
            };
            let srqn = rnic.create_srq(init).expect("its PD and CQ are there");
            let begin = GUARD + layout.room + n * layout.shared_room;
            SharedQueue::new(srqn, depth, begin..begin + layout.shared_room, dice)
        });
        let shared = shared.collect();
        Objects {
            pd,
            xrcd,
            cq,
            lazy_cq,
            common,
            shared,
        }
    }
}
