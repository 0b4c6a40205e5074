//! Reservations of a namespace: which hosts may use it. 8.19.
//!
//! An I/O takes no lock: each change of who may do what gives the reservations another generation, and a queue looks a host's rights up
//! anew when the generation is not that of its last look. A change runs alone ([`super::fence`]): when the command that asked for it is done, no write
//! runs that had been let in before.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::{
    HostId, IdentifyNamespace, ReservationAction, ReservationCommand, ReservationKeys, ReservationNotice,
    ReservationType, Status,
};

/// Hosts that may register with a namespace.
const REGISTRANTS_MAX: usize = 1024;

/// Keeps reservations over restarts of the target, for hosts that ask for it (PTPL).
pub trait ReservationStore: std::fmt::Debug + Send + Sync {
    /// Returns what was kept for the storage with a UUID; `None` if nothing was.
    ///
    /// # Errors
    /// It cannot be read: to serve the storage without it could let hosts write that must not.
    fn load(&self, storage: &[u8; 16]) -> io::Result<Option<ReservationState>>;

    /// Keeps the state of a storage, so that it is there after a loss of power; with `None` there is nothing to keep any more.
    ///
    /// # Errors
    /// It was not kept.
    fn save(&self, storage: &[u8; 16], state: Option<&ReservationState>) -> io::Result<()>;
}

/// Registrants of a namespace, and the reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationState {
    /// Number of changes of registrants.
    pub generation: u32,
    /// Keys of registrants, by host identifier.
    pub registrants: BTreeMap<[u8; 16], u64>,
    /// The host that has acquired the reservation, and its type. If all registrants hold it, the host may have gone.
    pub holder: Option<([u8; 16], ReservationType)>,
}

/// The rights of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rights {
    pub(super) reads: bool,
    pub(super) writes: bool,
}

impl ReservationState {
    pub(super) fn holds(&self, host: &HostId) -> bool {
        self.holder.is_some_and(|(holder, kind)| match kind.is_of_all() {
            true => self.registrants.contains_key(&host.0),
            false => holder == host.0,
        })
    }

    /// Returns what a host may do. NVMe Base 2.0, 8.19.7.
    pub(super) fn rights(&self, host: &HostId) -> Rights {
        let Some((_, kind)) = self.holder else {
            return Rights {
                reads: true,
                writes: true,
            };
        };
        let is_registrant = self.registrants.contains_key(&host.0);
        let writes = self.holds(host) || (is_registrant && kind.is_for_registrants());
        Rights {
            reads: writes || kind.lets_read(),
            writes,
        }
    }

    /// Ends the reservation, and returns those to be told: the other registrants, if it was one of registrants.
    fn release(&mut self, host: &HostId, notices: &mut Vec<(HostId, ReservationNotice)>) {
        if let Some((_, kind)) = self.holder.take()
            && kind.is_for_registrants()
        {
            self.tell_others(host, ReservationNotice::Released, notices);
        }
    }

    fn tell_others(
        &self,
        host: &HostId,
        notice: ReservationNotice,
        notices: &mut Vec<(HostId, ReservationNotice)>,
    ) {
        let others = self.registrants.keys().filter(|other| **other != host.0);
        notices.extend(others.map(|other| (HostId(*other), notice)));
    }

    /// Applies a command of a host. On an error nothing has changed that counts: the caller drops the state.
    fn apply(
        &mut self,
        host: &HostId,
        command: &ReservationCommand,
        keys: &ReservationKeys,
    ) -> Result<Vec<(HostId, ReservationNotice)>, Status> {
        const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
        const INVALID: Status = Status::INVALID_FIELD.do_not_retry();
        let mut notices = Vec::new();
        let own = self.registrants.get(&host.0).copied();
        if command.action == ReservationAction::Register {
            if keys.other == 0 {
                return Err(INVALID);
            }
            if own.is_none() && self.registrants.len() >= REGISTRANTS_MAX {
                return Err(Status::INTERNAL_ERROR);
            }
            if own.is_some_and(|own| own != keys.other) {
                return Err(CONFLICT);
            }
            if own.is_none() {
                self.registrants.insert(host.0, keys.other);
                self.generation = self.generation.wrapping_add(1);
            }
            return Ok(notices);
        }
        let own = own.ok_or(CONFLICT)?;
        if own != keys.current && !command.ignores_key {
            return Err(CONFLICT);
        }
        match command.action {
            ReservationAction::Register => {}
            ReservationAction::Unregister => {
                let held = self.holds(host);
                self.registrants.remove(&host.0);
                let is_of_all = self.holder.is_some_and(|(_, kind)| kind.is_of_all());
                // A reservation of all ends with the last of them.
                if held && (!is_of_all || self.registrants.is_empty()) {
                    self.release(host, &mut notices);
                }
                self.generation = self.generation.wrapping_add(1);
            }
            ReservationAction::Replace => {
                if keys.other == 0 {
                    return Err(INVALID);
                }
                self.registrants.insert(host.0, keys.other);
                self.generation = self.generation.wrapping_add(1);
            }
            ReservationAction::Acquire(kind) => match self.holder {
                None => self.holder = Some((host.0, kind)),
                Some((_, held)) if held == kind && self.holds(host) => {}
                Some(_) => return Err(CONFLICT),
            },
            ReservationAction::Preempt { kind, .. } => {
                self.preempt(host, kind, keys.other, &mut notices)?;
                self.generation = self.generation.wrapping_add(1);
            }
            ReservationAction::Release(kind) => {
                if self.holds(host) {
                    if self.holder.is_some_and(|(_, held)| held != kind) {
                        return Err(INVALID);
                    }
                    self.release(host, &mut notices);
                }
            }
            ReservationAction::Clear => {
                self.tell_others(host, ReservationNotice::Preempted, &mut notices);
                self.holder = None;
                self.registrants.clear();
                self.generation = self.generation.wrapping_add(1);
            }
        }
        Ok(notices)
    }

    fn preempt(
        &mut self,
        host: &HostId,
        kind: ReservationType,
        key: u64,
        notices: &mut Vec<(HostId, ReservationNotice)>,
    ) -> Result<(), Status> {
        let held = self.holder;
        let is_of_all = held.is_some_and(|(_, kind)| kind.is_of_all());
        // Key 0 means all other registrants, where all of them hold the reservation.
        if key == 0 && !is_of_all {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let takes = match held {
            Some(_) if is_of_all => key == 0,
            Some((holder, _)) => self.registrants.get(&holder) == Some(&key),
            None => false,
        };
        let is_meant = |other: &[u8; 16], of: u64| match key {
            0 => *other != host.0,
            key => of == key,
        };
        if key != 0 && !self.registrants.iter().any(|(other, of)| is_meant(other, *of)) {
            return Err(Status::RESERVATION_CONFLICT.do_not_retry());
        }
        let mut gone: Vec<_> = self
            .registrants
            .iter()
            .filter(|(other, of)| is_meant(other, **of))
            .map(|(other, _)| *other)
            .collect();
        // A host that preempts itself changes the type, and stays.
        gone.retain(|other| *other != host.0 || !takes);
        for other in &gone {
            if !mutant!(PreemptedStay) {
                self.registrants.remove(other);
            }
            if *other != host.0 {
                notices.push((HostId(*other), ReservationNotice::RegistrationPreempted));
            }
        }
        if takes {
            for other in &gone {
                let was_holder = is_of_all || held.is_some_and(|(holder, _)| holder == *other);
                if was_holder {
                    notices.push((HostId(*other), ReservationNotice::Preempted));
                }
            }
            if held.is_some_and(|(_, before)| before != kind && before.is_for_registrants()) {
                self.tell_others(host, ReservationNotice::Released, notices);
            }
            self.holder = Some((host.0, kind));
        } else if is_of_all && self.registrants.is_empty() {
            self.holder = None;
        }
        Ok(())
    }
}

/// Returns true if no host has used reservations, and none are kept.
fn is_unused((state, persists): &(ReservationState, bool)) -> bool {
    !persists && *state == ReservationState::default()
}

/// Reservations of a namespace.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    /// Changes with what hosts may do.
    generation: AtomicU64,
    state: Mutex<(ReservationState, bool)>,
    /// Held during a change, which may wait for a medium; `state` is not, since reactors look at it.
    changing: Mutex<()>,
    /// The store that keeps them.
    store: Option<Arc<dyn ReservationStore>>,
    /// Their names there, each of which has all: one as long as users name no others. Locked after `changing`.
    names: Mutex<Vec<[u8; 16]>>,
}

impl Reservations {
    /// Makes reservations that a store keeps under the names that are [added](Reservations::add_name).
    pub(super) fn in_store(store: Arc<dyn ReservationStore>) -> Reservations {
        Reservations {
            store: Some(store),
            ..Reservations::default()
        }
    }

    /// Keeps them under one more name, and begins with what is kept there, unless hosts have used them before. The caller may wait.
    ///
    /// # Errors
    /// The store does not read or write.
    pub(super) fn add_name(&self, name: [u8; 16]) -> io::Result<()> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let _changing = self.changing.lock();
        if self.names.lock().contains(&name) {
            return Ok(());
        }
        match (store.load(&name)?, self.state()) {
            (Some(kept), current) if is_unused(&current) => self.begin(store, kept)?,
            (kept, (state, true)) if kept.as_ref() != Some(&state) => store.save(&name, Some(&state))?,
            (Some(_), (_, false)) => store.save(&name, None)?,
            (Some(_), (_, true)) | (None, _) => {}
        }
        self.names.lock().push(name);
        Ok(())
    }

    /// Takes what is kept under a name that is not used any more. The caller may wait.
    ///
    /// # Errors
    /// The store does not read or write.
    pub(super) fn take_name(&self, old: [u8; 16]) -> io::Result<()> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let _changing = self.changing.lock();
        if self.names.lock().contains(&old) {
            return Ok(());
        }
        let Some(kept) = store.load(&old)? else {
            return Ok(());
        };
        if is_unused(&self.state()) {
            self.begin(store, kept)?;
        }
        store.save(&old, None)
    }

    /// Begins with what was kept.
    fn begin(&self, store: &Arc<dyn ReservationStore>, kept: ReservationState) -> io::Result<()> {
        for name in &*self.names.lock() {
            store.save(name, Some(&kept))?;
        }
        self.set(kept, true);
        Ok(())
    }

    /// Returns RESCAP.
    pub(super) fn capabilities(&self) -> u8 {
        IdentifyNamespace::RESERVATION_TYPES | u8::from(self.store.is_some())
    }

    /// Returns registrants and reservation, and whether they persist.
    pub(super) fn state(&self) -> (ReservationState, bool) {
        self.state.lock().clone()
    }

    /// Carries a command out, and returns the hosts to be told. `alone` runs what it is given while no write of the namespace does: when this
    /// returns, none runs that had been let in before. The caller may wait.
    pub(super) fn apply(
        &self,
        alone: impl FnOnce(&mut dyn FnMut()),
        host: &HostId,
        command: &ReservationCommand,
        keys: &ReservationKeys,
    ) -> Result<Vec<(HostId, ReservationNotice)>, Status> {
        let _changing = self.changing.lock();
        let (mut state, persisted) = self.state();
        let notices = state.apply(host, command, keys)?;
        let persists = command.persists.unwrap_or(persisted);
        self.save(&state, persists)?;
        if mutant!(ReservationNotAwaited) {
            self.set(state, persists);
            return Ok(notices);
        }
        alone(&mut || self.set(std::mem::take(&mut state), persists));
        Ok(notices)
    }

    /// Has the state persist, or no more. The caller may wait.
    pub(super) fn set_persists(&self, persists: bool) -> Result<(), Status> {
        let _changing = self.changing.lock();
        let (state, _) = self.state();
        self.save(&state, persists)?;
        self.set(state, persists);
        Ok(())
    }

    /// Keeps a state that will be set. Nobody waits for the medium meanwhile but who changes reservations.
    fn save(&self, state: &ReservationState, persists: bool) -> Result<(), Status> {
        if persists && self.store.is_none() {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let (old, persisted) = self.state();
        if let Some(store) = &self.store
            && (persists || persisted)
            && (persists != persisted || *state != old)
            && !mutant!(ReservationsNotKept)
        {
            for name in &*self.names.lock() {
                let saved = store.save(name, persists.then_some(state));
                saved.map_err(|_| Status::INTERNAL_ERROR)?;
            }
        }
        Ok(())
    }

    fn set(&self, state: ReservationState, persists: bool) {
        let mut current = self.state.lock();
        *current = (state, persists);
        // With the lock: who looks the rights up by this generation finds this state.
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}

/// The rights of a host, as they were looked up last: the generation, and a bit each for reads and writes.
#[derive(Debug)]
pub(super) struct Verdict(AtomicU64);

impl Default for Verdict {
    fn default() -> Verdict {
        // No reservation yet.
        Verdict(AtomicU64::new(u64::MAX))
    }
}

impl Verdict {
    const READS: u64 = 1;
    const WRITES: u64 = 1 << 1;

    pub(super) fn lets(&self, reservations: &Reservations, host: &HostId, writes: bool) -> bool {
        let generation = reservations.generation.load(Ordering::SeqCst);
        let mut verdict = self.0.load(Ordering::Relaxed);
        if verdict >> 2 != generation {
            let state = reservations.state.lock();
            let rights = state.0.rights(host);
            let generation = reservations.generation.load(Ordering::SeqCst);
            let reads = if rights.reads { Verdict::READS } else { 0 };
            let writes = if rights.writes { Verdict::WRITES } else { 0 };
            verdict = generation << 2 | reads | writes;
            self.0.store(verdict, Ordering::Relaxed);
        }
        let wanted = if writes { Verdict::WRITES } else { Verdict::READS };
        verdict & wanted != 0
    }
}
