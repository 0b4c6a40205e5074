//! Reservations as the specification has them, written a second time: the checker's own. NVMe Base 2.0, 7.2 to 7.4 and 8.19.

use std::collections::BTreeMap;

use rdmux_wire::nvme::{ReservationAction, ReservationCommand, ReservationKeys, ReservationType, Status};

/// Registrants and reservation of a namespace, by the number of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Model {
    keys: BTreeMap<usize, u64>,
    held: Option<(usize, ReservationType)>,
    persists: bool,
}

/// Access that the table of 8.19.7 gives a host: read, write.
const fn table(kind: ReservationType, holds: bool, registered: bool) -> (bool, bool) {
    use ReservationType::*;
    match (kind, holds, registered) {
        (_, true, _) => (true, true),
        (WriteExclusive, false, _) => (true, false),
        (ExclusiveAccess, false, _) => (false, false),
        (WriteExclusiveRegistrants | WriteExclusiveAll, false, registered) => (true, registered),
        (ExclusiveAccessRegistrants | ExclusiveAccessAll, false, registered) => (registered, registered),
    }
}

const fn is_of_all(kind: ReservationType) -> bool {
    matches!(
        kind,
        ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll
    )
}

impl Model {
    pub(super) fn key(&self, host: usize) -> Option<u64> {
        self.keys.get(&host).copied()
    }

    /// Returns the key of another registrant, and the type that is held.
    pub(super) fn other_key(&self, host: usize) -> Option<u64> {
        let mut others = self.keys.iter().filter(|(other, _)| **other != host);
        others.next().map(|(_, key)| *key)
    }

    pub(super) fn kind(&self) -> Option<ReservationType> {
        self.held.map(|(_, kind)| kind)
    }

    fn holds(&self, host: usize) -> bool {
        match self.held {
            Some((_, kind)) if is_of_all(kind) => self.keys.contains_key(&host),
            Some((holder, _)) => holder == host,
            None => false,
        }
    }

    /// Returns true if a host may write, or read.
    pub(super) fn lets(&self, host: usize, writes: bool) -> bool {
        let Some((_, kind)) = self.held else {
            return true;
        };
        let (may_read, may_write) = table(kind, self.holds(host), self.keys.contains_key(&host));
        if writes { may_write } else { may_read }
    }

    /// The target has lost what does not persist.
    pub(super) fn restart(&mut self) {
        if !self.persists {
            *self = Model::default();
        }
    }

    /// Carries a command out; an error changes nothing.
    pub(super) fn apply(
        &mut self,
        host: usize,
        command: &ReservationCommand,
        keys: &ReservationKeys,
    ) -> Result<(), Status> {
        let mut next = self.clone();
        next.act(host, command, keys)?;
        if let Some(persists) = command.persists {
            next.persists = persists;
        }
        *self = next;
        Ok(())
    }

    fn act(
        &mut self,
        host: usize,
        command: &ReservationCommand,
        keys: &ReservationKeys,
    ) -> Result<(), Status> {
        const CONFLICT: Status = Status::RESERVATION_CONFLICT;
        const INVALID: Status = Status::INVALID_FIELD;
        let own = self.key(host);
        if command.action == ReservationAction::Register {
            return match (keys.other, own) {
                (0, _) => Err(INVALID),
                (new, Some(own)) if own != new => Err(CONFLICT),
                (new, _) => {
                    self.keys.insert(host, new);
                    Ok(())
                }
            };
        }
        if own.is_none_or(|own| own != keys.current && !command.ignores_key) {
            return Err(CONFLICT);
        }
        match command.action {
            ReservationAction::Register => {}
            ReservationAction::Replace if keys.other == 0 => return Err(INVALID),
            ReservationAction::Replace => {
                self.keys.insert(host, keys.other);
            }
            ReservationAction::Unregister => self.leave(host),
            ReservationAction::Acquire(kind) => match self.held {
                None => self.held = Some((host, kind)),
                Some((_, held)) if held == kind && self.holds(host) => {}
                Some(_) => return Err(CONFLICT),
            },
            ReservationAction::Release(kind) => match self.held {
                Some((_, held)) if self.holds(host) && held != kind => return Err(INVALID),
                Some(_) if self.holds(host) => self.held = None,
                _ => {}
            },
            ReservationAction::Clear => {
                self.keys.clear();
                self.held = None;
            }
            ReservationAction::Preempt { kind, .. } => self.preempt(host, kind, keys.other)?,
        }
        Ok(())
    }

    /// A host is a registrant no more.
    fn leave(&mut self, host: usize) {
        self.keys.remove(&host);
        let ends = match self.held {
            Some((_, kind)) if is_of_all(kind) => self.keys.is_empty(),
            Some((holder, _)) => holder == host,
            None => false,
        };
        if ends {
            self.held = None;
        }
    }

    fn preempt(&mut self, host: usize, kind: ReservationType, key: u64) -> Result<(), Status> {
        let of_all = self.held.is_some_and(|(_, kind)| is_of_all(kind));
        if key == 0 {
            // All others, where all hold it.
            if !of_all {
                return Err(Status::INVALID_FIELD);
            }
            self.keys.retain(|other, _| *other == host);
            self.held = Some((host, kind));
            return Ok(());
        }
        if !self.keys.values().any(|known| *known == key) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        let holder_has_it = match self.held {
            Some((holder, held)) if !is_of_all(held) => self.key(holder) == Some(key),
            _ => false,
        };
        if holder_has_it {
            self.keys.retain(|other, known| *known != key || *other == host);
            self.held = Some((host, kind));
            return Ok(());
        }
        self.keys.retain(|_, known| *known != key);
        if of_all && self.keys.is_empty() {
            self.held = None;
        }
        Ok(())
    }
}
