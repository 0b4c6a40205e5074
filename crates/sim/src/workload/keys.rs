//! Keys that come and go while operations are in flight: memory windows, and regions that get other memory by work requests or
//! by re-registration.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdmux_rnic::{Access, Bind, LKey, Operation, Pd, RKey, RegionSpec, Registration, Rnic, WindowType};

use super::side::{Piece, Reg, Service};
use crate::dice::Dice;
use crate::memory::{Door, SimMemory, Space};

/// Maximum number of bytes that one of these keys grants.
const BYTES_MAX: u64 = 32 << 10;
const BOTH: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyKind {
    WindowOne,
    WindowTwo,
    /// Registered by work requests.
    Fast,
    /// Registered again by a verb.
    Region,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyState {
    Idle,
    /// The work request that opens it is in flight.
    Opening,
    Open,
    /// The request that ends it is in flight.
    Closing,
    /// It has ended, but operations that used it have not completed yet.
    Ended,
}

/// A key of one end, for its peer.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) kind: KeyKind,
    pub(super) state: KeyState,
    pub(super) rkey: RKey,
    /// Rights of peers by this key.
    rights: Access,
    arena: Piece,
    /// Arena that a type 1 window is bound to until the new binding is done.
    before: Option<Piece>,
    /// Free part of the arena.
    space: Space,
    /// Address of the arena's first byte.
    iova: u64,
    uses_left: u32,
    users: u32,
    door: Option<Arc<Door>>,
    /// A key that no longer grants anything, and an address that it granted.
    ended: Option<(RKey, u64)>,
}

impl Key {
    pub(super) fn some(rnic: &mut Rnic, pd: Pd, dice: &mut Dice, service: Service) -> Vec<Key> {
        let kinds = [
            KeyKind::WindowOne,
            KeyKind::WindowTwo,
            KeyKind::Fast,
            KeyKind::Region,
        ];
        // A type 2 window serves only the QP that bound it: on XRC that is one that takes no requests.
        let kinds = kinds
            .into_iter()
            .filter(|kind| service == Service::Rc || *kind != KeyKind::WindowTwo);
        let kinds: Vec<KeyKind> = kinds.filter(|_| dice.one_in(2)).collect();
        let new = |kind| Key::new(rnic, pd, kind, BOTH);
        kinds.into_iter().map(new).collect()
    }

    /// Creates a key that allows WRITE or READ alone.
    pub(super) fn of_one_right(rnic: &mut Rnic, pd: Pd, dice: &mut Dice) -> Key {
        let rights = dice.pick(&[Access::REMOTE_WRITE, Access::REMOTE_READ]);
        Key::new(rnic, pd, KeyKind::Region, rights)
    }

    fn new(rnic: &mut Rnic, pd: Pd, kind: KeyKind, rights: Access) -> Key {
        let made = match kind {
            KeyKind::WindowOne => rnic.alloc_mw(pd, WindowType::One),
            KeyKind::WindowTwo => rnic.alloc_mw(pd, WindowType::Two),
            KeyKind::Fast => rnic.alloc_mr(pd, BYTES_MAX).map(|(_, rkey)| rkey),
            KeyKind::Region => Ok(RKey(0)),
        };
        let nothing = Piece { at: 0, len: 0 };
        Key {
            kind,
            state: KeyState::Idle,
            rkey: made.expect("there are keys"),
            rights,
            arena: nothing,
            before: None,
            space: Space::new(0..0),
            iova: 0,
            uses_left: 0,
            users: 0,
            door: None,
            ended: None,
        }
    }

    /// Gives the key memory, and draws the number of its uses.
    fn take_arena(&mut self, space: &mut Space, dice: &mut Dice) -> bool {
        let len = dice.log_uniform(BYTES_MAX);
        let Some(at) = space.take(len) else { return false };
        if self.state == KeyState::Open {
            self.before = Some(self.arena);
            self.ended = Some((self.rkey, self.iova));
        }
        self.arena = Piece { at, len };
        self.space = Space::new(at..at + len);
        self.uses_left = dice.between(1, 6) as u32;
        true
    }

    fn spec(&self, memory: &Arc<SimMemory>) -> (Arc<Door>, RegionSpec) {
        let door = Arc::new(Door::new(memory.clone()));
        let spec = RegionSpec {
            memory: door.clone(),
            memory_offset: self.arena.at,
            length: self.arena.len,
            iova: self.iova,
            access: Access::LOCAL_WRITE | self.rights,
        };
        (door, spec)
    }

    /// Opens a key for which that takes a work request, and returns the request; for a type 1 window the key in it is the
    /// current one.
    pub(super) fn open(
        &mut self,
        reg: &Reg,
        memory: &Arc<SimMemory>,
        space: &mut Space,
        dice: &mut Dice,
    ) -> Option<Operation> {
        if !self.take_arena(space, dice) {
            return None;
        }
        self.state = KeyState::Opening;
        if self.kind == KeyKind::Fast {
            self.iova = dice.below(1 << 47);
            self.rkey = self.rkey.next();
            let (door, spec) = self.spec(memory);
            self.door = Some(door);
            let registration = Registration { key: self.rkey, spec };
            return Some(Operation::Register(Box::new(registration)));
        }
        let zero_based = dice.one_in(3);
        let va = reg.va(self.arena.at);
        self.iova = if zero_based { 0 } else { va };
        if self.kind == KeyKind::WindowTwo {
            self.rkey = self.rkey.next();
        }
        let mut access = self.rights;
        access.set(Access::ZERO_BASED, zero_based);
        Some(Operation::Bind(Bind {
            window: self.rkey,
            region: reg.lkey,
            va,
            length: self.arena.len,
            access,
        }))
    }

    /// Opens the key by a verb.
    pub(super) fn register(
        &mut self,
        rnic: &mut Rnic,
        pd: Pd,
        memory: &Arc<SimMemory>,
        space: &mut Space,
        dice: &mut Dice,
    ) -> Result<(), String> {
        if !self.take_arena(space, dice) {
            return Ok(());
        }
        self.iova = dice.below(1 << 47);
        let (door, spec) = self.spec(memory);
        let done = if self.rkey == RKey(0) {
            rnic.reg_mr(pd, spec).map(|(_, rkey)| self.rkey = rkey)
        } else {
            rnic.rereg_mr(LKey(self.rkey.0), None, |old| *old = spec)
                .map(drop)
        };
        self.door = Some(door);
        self.state = KeyState::Open;
        done.map_err(|error| format!("registering anew: {error}"))
    }

    /// Returns the request that ends a type 1 window.
    pub(super) fn unbind(&self, reg: &Reg) -> Option<Operation> {
        (self.kind == KeyKind::WindowOne).then(|| {
            Operation::Bind(Bind {
                window: self.rkey,
                region: reg.lkey,
                va: 0,
                length: 0,
                access: Access::empty(),
            })
        })
    }

    /// Returns a key and an address that grant nothing.
    pub(super) fn nothing(&self) -> Option<(RKey, u64)> {
        let (rkey, iova) = self.ended.filter(|_| self.kind != KeyKind::Region)?;
        match self.state {
            KeyState::Open | KeyState::Closing | KeyState::Opening if rkey == self.rkey => None,
            // The window is being bound again, and its current key is valid until that is done.
            KeyState::Opening if self.before.is_some() => None,
            // Another tag, and an address that the key itself grants.
            KeyState::Open => Some((rkey, self.iova)),
            _ => Some((rkey, iova)),
        }
    }

    /// Returns a key and an address that grant something only on the QP of its own end.
    pub(super) fn foreign(&self) -> Option<(RKey, u64)> {
        (self.kind == KeyKind::WindowTwo && self.state == KeyState::Open).then_some((self.rkey, self.iova))
    }

    /// Returns a key, an address that it grants, and the right that it lacks.
    pub(super) fn lacking(&self) -> Option<(RKey, u64, Access)> {
        let lacks = BOTH.difference(self.rights);
        (self.state == KeyState::Open && !lacks.is_empty()).then_some((self.rkey, self.iova, lacks))
    }

    /// Returns the key that a window would be bound with, while it is unbound.
    pub(super) fn to_bind(&self) -> Option<RKey> {
        (self.kind == KeyKind::WindowTwo && self.state == KeyState::Idle).then(|| self.rkey.next())
    }

    pub(super) fn door(&self) -> Option<&Arc<Door>> {
        self.door.as_ref()
    }

    /// Handles the completion of the request that opens it. Returns the memory that it had before.
    pub(super) fn opened(&mut self) -> Option<Piece> {
        self.state = KeyState::Open;
        self.before.take()
    }

    pub(super) fn wants_close(&self) -> bool {
        self.state == KeyState::Open && self.uses_left == 0
    }

    /// Returns whether its own user may end it: no operation needs it any more.
    pub(super) fn may_close(&self) -> bool {
        self.wants_close() && self.users == 0
    }

    /// Takes memory for an operation of the peer. Returns its location, and the address for it.
    pub(super) fn use_it(&mut self, bytes: u64, right: Access) -> Option<(Piece, u64)> {
        if self.state != KeyState::Open || self.uses_left == 0 || !self.rights.contains(right) {
            return None;
        }
        let at = self.space.take(bytes)?;
        self.uses_left -= 1;
        self.users += 1;
        Some((Piece { at, len: bytes }, self.iova + at - self.arena.at))
    }

    /// Takes back the use of an operation that was never posted.
    pub(super) fn not_used(&mut self, piece: Piece) {
        self.uses_left += 1;
        self.users -= 1;
        self.space.give(piece.at, piece.len);
    }

    /// Handles the completion of an operation that used it. Returns memory that is no longer needed.
    pub(super) fn used(&mut self, piece: Piece) -> Option<Piece> {
        self.users -= 1;
        self.space.give(piece.at, piece.len);
        self.rest()
    }

    /// Handles the end of the key, which grants nothing any more. Returns memory that is no longer needed, and the door that
    /// was shut.
    pub(super) fn close(&mut self) -> (Option<Piece>, Option<Arc<Door>>) {
        self.ended = Some((self.rkey, self.iova));
        self.state = KeyState::Ended;
        let door = self.door.take();
        if let Some(door) = &door {
            door.shut.store(true, Ordering::Relaxed);
        }
        (self.rest(), door)
    }

    fn rest(&mut self) -> Option<Piece> {
        if self.state != KeyState::Ended || self.users > 0 {
            return None;
        }
        self.state = KeyState::Idle;
        Some(self.arena)
    }
}
