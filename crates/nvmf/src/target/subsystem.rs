//! Subsystems and their namespaces, which the queues of all reactors share.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdmux_verbs::ledger::Ledger;
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::{
    AnaLog, AnaState, ConnectData, DISCOVERY_NQN, HealthLog, HostId, Nqn, NsId, ReservationController,
    ReservationNotice, ReservationReport, Status, TransportKind,
};

use super::ana::{ANA_GROUP_MAX, AnaRule, AnaStates, check_group};
use super::association::Association;
use super::discovery::Referral;
use super::hosts::{Hosts, Terms};
use super::keys::Keys;
use super::limit::Limit;
use super::namespace::{Medium, Namespace, SharedNamespace};
use super::passed::PassedDrive;
use super::reservation::{ReservationStore, Reservations};
use super::tally::Tally;
use crate::auth::{Authenticator, Parties};
use crate::passthrough::PassedController;
use crate::tls::psk::Psk;

/// The highest namespace id.
pub(crate) const NAMESPACES_MAX: u32 = 1024;
/// The highest controller id. 0xfff0 and above are reserved (NVMe Base 2.0, 3.1.2).
pub(crate) const CNTLID_MAX: u16 = 0xffef;
/// Time of a host for its first command, TLS before it and authentication after it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The namespaces of a subsystem at one time.
pub(super) type Namespaces = Arc<BTreeMap<NsId, Arc<SharedNamespace>>>;

/// Reason for which a namespace was not added or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// The id is invalid.
    #[error("{0} is not a namespace id: give 1 to {NAMESPACES_MAX}")]
    Id(NsId),
    /// The id is taken.
    #[error("namespace {0} exists")]
    Exists(NsId),
    /// There is no such namespace.
    #[error("there is no namespace {0}")]
    Missing(NsId),
    /// The backend does not tell its size.
    #[error("namespace {0} cannot be resized: {1}")]
    Backend(NsId, String),
    /// The backend is shorter than a block.
    #[error("a namespace has at least one block of {0} bytes")]
    Empty(u32),
    /// The group is invalid.
    #[error("{0} is not a group of namespaces: give 1 to {ANA_GROUP_MAX}")]
    Group(u32),
    /// Its reservations cannot be read.
    #[error("cannot read the reservations of namespace {0}: {1}")]
    Reservations(NsId, String),
}

/// A subsystem: namespaces under one name.
#[derive(Debug)]
pub struct Subsystem {
    nqn: Nqn,
    serial: String,
    /// Changes with the namespaces, so that a queue knows without a lock that what it has is current.
    generation: AtomicU64,
    cntlids: RangeInclusive<u16>,
    reservations: Option<Arc<dyn ReservationStore>>,
    /// The controller that commands pass to.
    drive: Option<PassedDrive>,
    tally: Arc<Tally>,
    state: Mutex<State>,
}

/// A controller, to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Its id.
    pub cntlid: u16,
    /// Name of its host.
    pub host: Nqn,
    /// Id of its host.
    pub host_id: HostId,
    /// Number of its I/O queues.
    pub queues: usize,
    /// Number and bytes of what these have carried out.
    pub counts: HealthLog,
}

#[derive(Debug, Default)]
struct State {
    namespaces: Namespaces,
    hosts: Hosts,
    ana: AnaStates,
    controllers: BTreeMap<u16, Arc<Association>>,
    /// Limits of the hosts of controllers, and of those whose turns have not come.
    limits: BTreeMap<Nqn, Arc<Limit>>,
    /// Controllers that are over, as long as I/Os of them run.
    ending: Vec<Arc<Association>>,
    keys: Keys,
    last_cntlid: u16,
}

impl State {
    /// Forgets controllers that are over of which no I/O runs.
    fn forget_quiet(&mut self) {
        self.ending.retain(|ending| !ending.is_quiet());
    }
}

fn forget_windows(state: &State, association: &Association) {
    let (host, id) = (&association.host, &association.host_id);
    if state.controllers.values().any(|other| other.is_of_host(host, id)) {
        return;
    }
    for namespace in state.namespaces.values() {
        if let Some(accelerator) = namespace.backend.accelerator() {
            accelerator.forget(host, id);
        }
    }
}

impl Subsystem {
    /// Makes a subsystem without namespaces. `serial` has at most 20 characters of ASCII.
    pub fn new(nqn: Nqn, serial: &str, hosts: Hosts) -> Subsystem {
        Subsystem {
            nqn,
            serial: serial.to_owned(),
            generation: AtomicU64::new(0),
            cntlids: 1..=CNTLID_MAX,
            reservations: None,
            drive: None,
            tally: Arc::default(),
            state: Mutex::new(State {
                hosts,
                ..State::default()
            }),
        }
    }

    /// Limits the ids of its controllers. Nodes that serve one name need ranges of their own: hosts refuse two controllers of one id.
    ///
    /// # Panics
    /// The range is empty, or not within 1 to 0xffef.
    #[must_use]
    pub fn with_cntlids(mut self, cntlids: RangeInclusive<u16>) -> Subsystem {
        let (first, last) = (*cntlids.start(), *cntlids.end());
        assert!(1 <= first && first <= last && last <= CNTLID_MAX, "{cntlids:?}");
        self.cntlids = cntlids;
        self
    }

    /// Gives its first controller the id at that place of the range, which begins again at the end. A random one each time has what a host still
    /// sends to a controller of an earlier run hardly ever meet another.
    #[must_use]
    pub fn with_first_cntlid(self, place: u16) -> Subsystem {
        let before = self.cntlids.start() - 1;
        self.state().last_cntlid = before + place % (self.cntlids.end() - before);
        self
    }

    /// Keeps reservations over restarts, for hosts that ask for it. Namespaces that are added after this find again what was kept.
    #[must_use]
    pub fn with_reservations(mut self, store: Arc<dyn ReservationStore>) -> Subsystem {
        self.reservations = Some(store);
        self
    }

    /// Has commands pass to a drive's controller, whose namespaces are all that it has.
    #[must_use]
    pub fn with_drive(mut self, controller: PassedController) -> Subsystem {
        let drive = PassedDrive::new(controller);
        let namespaces = drive.namespaces().into_iter();
        let namespaces = namespaces.map(|namespace| (namespace.nsid, Arc::new(namespace)));
        self.state().namespaces = Arc::new(namespaces.collect());
        self.drive = Some(drive);
        self
    }

    /// Returns the controller that commands pass to.
    pub(super) fn drive(&self) -> Option<&PassedDrive> {
        self.drive.as_ref()
    }

    /// Has namespaces take the blocks that the drive gives them now, and tells hosts.
    pub(super) fn renew_namespaces(&self) {
        let mut state = self.state();
        for namespace in state.namespaces.clone().values() {
            self.put(&mut state, namespace.again());
        }
    }

    /// Returns its name.
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    /// Returns the range of its controllers' ids.
    pub fn cntlids(&self) -> RangeInclusive<u16> {
        self.cntlids.clone()
    }

    /// Returns the terms of a host; `None`: it is refused.
    pub(super) fn terms(&self, host: &Nqn) -> Option<Terms> {
        self.state().hosts.terms(host).cloned()
    }

    /// Returns what authenticates a host on its terms, if they ask for it.
    pub(super) fn authenticator(&self, host: &Nqn, terms: &Terms) -> Option<Authenticator> {
        let authentication = terms.authentication.as_ref()?;
        let parties = Parties {
            host: host.clone(),
            subsystem: self.nqn.clone(),
            secrets: authentication.secrets.clone(),
        };
        Some(Authenticator::new(parties, authentication.random))
    }

    /// Returns the hosts that may use it.
    pub fn hosts(&self) -> Hosts {
        self.state().hosts.clone()
    }

    /// Changes the hosts that may use it. Controllers of those that may no more, or that would have to prove something else, end; the
    /// others do not notice.
    fn set_hosts(&self, hosts: Hosts) {
        let mut state = self.state();
        for association in state.controllers.values() {
            let host = &association.host;
            let stays = match (hosts.terms(host), state.hosts.terms(host)) {
                // Without a key before, no connection is by TLS.
                (Some(now), Some(before)) => {
                    now.authentication == before.authentication
                        && (before.psk.is_none() || now.psk == before.psk)
                        && (now.concat || !before.concat)
                }
                _ => false,
            };
            if !stays {
                association.expel();
            }
        }
        for (host, limit) in &state.limits {
            if let Some(terms) = hosts.terms(host) {
                limit.set(&terms.rates);
            }
        }
        let State {
            keys, hosts: before, ..
        } = &mut *state;
        // The secrets that have led to them have to be worth the same.
        let proof = |hosts: &Hosts, host: &Nqn| {
            let terms = hosts.terms(host).filter(|terms| terms.concat)?;
            terms.authentication.clone()
        };
        keys.retain(|host| proof(&hosts, host).is_some_and(|now| Some(now) == proof(before, host)));
        state.hosts = hosts;
    }

    /// Returns its controllers, in the order of their ids.
    pub fn controllers(&self) -> Vec<ControllerInfo> {
        let controllers: Vec<_> = self.state().controllers.values().cloned().collect();
        let info = |controller: Arc<Association>| ControllerInfo {
            cntlid: controller.cntlid,
            host: controller.host.clone(),
            host_id: controller.host_id,
            queues: controller.queues(),
            counts: controller.health(),
        };
        controllers.into_iter().map(info).collect()
    }

    /// Returns number and bytes of what all controllers have carried out, also those that are over.
    pub fn counts(&self) -> HealthLog {
        self.tally.sum()
    }

    /// Returns its serial number.
    pub fn serial(&self) -> &str {
        &self.serial
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Checks that no namespace has an id.
    ///
    /// # Errors
    /// One has.
    pub fn check_free(&self, nsid: NsId) -> Result<(), NamespaceError> {
        match self.state().namespaces.contains_key(&nsid) {
            true => Err(NamespaceError::Exists(nsid)),
            false => Ok(()),
        }
    }

    /// Adds a namespace, to group 1 of those that share a state of access.
    ///
    /// # Errors
    /// Its id is invalid or taken, it has no block, or its reservations cannot be read.
    pub fn add_namespace(&self, namespace: Namespace) -> Result<(), NamespaceError> {
        let uuid = namespace.uuid;
        self.add_prepared(self.prepare_namespace(namespace, 1, uuid, None)?)
    }

    /// Prepares a namespace, in a group of those that share a state of access, with the reservations that are kept for its storage, whose UUID is
    /// given, or with what another subsystem's namespace of the same storage has.
    ///
    /// # Errors
    /// Its id or group is invalid, it has no block, or its reservations cannot be read.
    pub(crate) fn prepare_namespace(
        &self,
        namespace: Namespace,
        group: u32,
        storage: [u8; 16],
        medium: Option<Arc<Medium>>,
    ) -> Result<SharedNamespace, NamespaceError> {
        let nsid = namespace.nsid;
        namespace.check()?;
        check_group(group)?;
        let medium = medium.unwrap_or_else(|| {
            let store = self.reservations.clone();
            let reservations = store.map(Reservations::in_store).unwrap_or_default();
            Arc::new(Medium::new(reservations))
        });
        let reservations = medium.reservations();
        let begun = reservations.add_name(storage);
        // Storage that several subsystems have was once known by a namespace of one of them.
        let begun = begun.and_then(|()| reservations.take_name(namespace.uuid));
        begun.map_err(|error| NamespaceError::Reservations(nsid, error.to_string()))?;
        Ok(SharedNamespace::new(namespace, medium, group))
    }

    /// Adds a namespace that has been prepared for this subsystem.
    ///
    /// # Errors
    /// Its id is taken.
    pub(crate) fn add_prepared(&self, namespace: SharedNamespace) -> Result<(), NamespaceError> {
        let mut state = self.state();
        if state.namespaces.contains_key(&namespace.nsid) {
            return Err(NamespaceError::Exists(namespace.nsid));
        }
        self.put(&mut state, namespace);
        Ok(())
    }

    fn put(&self, state: &mut State, namespace: SharedNamespace) {
        let mut namespaces = BTreeMap::clone(&state.namespaces);
        namespaces.insert(namespace.nsid, Arc::new(namespace));
        state.namespaces = Arc::new(namespaces);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Removes a namespace. Commands of it that were admitted are carried out; then its backend is dropped.
    ///
    /// # Errors
    /// There is none of that id.
    pub fn remove_namespace(&self, nsid: NsId) -> Result<(), NamespaceError> {
        let mut state = self.state();
        let mut namespaces = BTreeMap::clone(&state.namespaces);
        let removed = namespaces.remove(&nsid).ok_or(NamespaceError::Missing(nsid))?;
        let before = std::mem::replace(&mut state.namespaces, Arc::new(namespaces));
        self.generation.fetch_add(1, Ordering::Release);
        // Without the lock: a drive that ends here takes its time, and holds up no host.
        drop(state);
        drop((before, removed));
        Ok(())
    }

    /// Has a namespace take the size that its backend has now, and tells hosts if it is another one. Returns true then.
    ///
    /// # Errors
    /// There is none of that id, its backend cannot tell its size, or it has no block any more, in which case nothing changes.
    pub fn resize_namespace(&self, nsid: NsId) -> Result<bool, NamespaceError> {
        let missing = NamespaceError::Missing(nsid);
        let namespace = self.state().namespaces.get(&nsid).cloned();
        let namespace = namespace.ok_or(missing.clone())?;
        let blocks = namespace.blocks();
        // Without the lock: a file system that hangs holds up no host.
        namespace
            .backend
            .measure(1 << namespace.block_shift)
            .map_err(|error| NamespaceError::Backend(nsid, error.to_string()))?;
        let mut state = self.state();
        let now = state.namespaces.get(&nsid).ok_or(missing)?;
        if now.blocks() == blocks {
            return Ok(false);
        }
        // Hosts are told of a namespace that is another object.
        let resized = now.again();
        self.put(&mut state, resized);
        Ok(true)
    }

    /// Returns the namespaces, in the order of their ids.
    pub fn list(&self) -> Vec<Arc<SharedNamespace>> {
        self.state().namespaces.values().cloned().collect()
    }

    /// Puts a namespace into a group whose state of access it has. Returns true if it is another one.
    ///
    /// # Errors
    /// There is no such namespace, or the group is invalid.
    pub fn set_ana_group(&self, nsid: NsId, group: u32) -> Result<bool, NamespaceError> {
        check_group(group)?;
        let mut state = self.state();
        let namespace = state.namespaces.get(&nsid).ok_or(NamespaceError::Missing(nsid))?;
        if namespace.ana_group() == group {
            return Ok(false);
        }
        namespace.set_ana_group(group);
        state.ana.moved();
        self.generation.fetch_add(1, Ordering::Release);
        Ok(true)
    }

    /// Changes the state of access to a group, or to all, for hosts that have come by a listener, or by any: it holds wherever the rule applies, whatever
    /// was set before. Returns false if nothing is different. Queues see it with their next command; whoever calls this has the driver tell of the
    /// change, so that hosts get their event.
    ///
    /// # Errors
    /// The group is invalid.
    pub fn set_ana_state(&self, rule: AnaRule) -> Result<bool, NamespaceError> {
        self.change_ana(|ana| ana.set(rule))
    }

    /// Forgets all states of access that were set, and sets others, one after the other. Returns false if nothing is different.
    ///
    /// # Errors
    /// A group is invalid; then nothing has changed.
    pub fn set_ana_rules(&self, rules: &[AnaRule]) -> Result<bool, NamespaceError> {
        self.change_ana(|ana| ana.replace(rules))
    }

    fn change_ana(
        &self,
        change: impl FnOnce(&mut AnaStates) -> Result<bool, NamespaceError>,
    ) -> Result<bool, NamespaceError> {
        let is_other = change(&mut self.state().ana)?;
        if is_other {
            self.generation.fetch_add(1, Ordering::Release);
        }
        Ok(is_other)
    }

    /// Returns the log of access to the namespaces for hosts that have come by a listener.
    pub fn ana_log(&self, listener: Listener) -> AnaLog {
        let state = self.state();
        let namespaces = state.namespaces.values();
        let namespaces = namespaces.map(|namespace| (namespace.nsid, namespace.ana_group()));
        state.ana.log(namespaces, listener)
    }

    /// Returns the number of changes of the access to namespaces.
    pub(super) fn ana_changes(&self) -> u64 {
        self.state().ana.changes()
    }

    /// Returns generation, namespaces, and the states of their groups for hosts that have come by a listener.
    pub(super) fn snapshot(&self, listener: Listener) -> (u64, Namespaces, BTreeMap<u32, AnaState>) {
        let state = self.state();
        let groups = state.namespaces.values().map(|namespace| namespace.ana_group());
        let states = groups.map(|group| (group, state.ana.state(group, listener)));
        (self.generation(), state.namespaces.clone(), states.collect())
    }

    /// Returns a namespace if hosts that have come by a listener have access to it.
    pub(super) fn reach(&self, nsid: NsId, listener: Listener) -> Result<Arc<SharedNamespace>, Status> {
        let state = self.state();
        let namespace = state.namespaces.get(&nsid);
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        match state.ana.state(namespace.ana_group(), listener).refusal() {
            Some(status) => Err(status),
            None => Ok(namespace.clone()),
        }
    }

    /// Notifies the controllers of hosts of changes of a namespace's reservations, also those of other subsystems that have its storage.
    pub(super) fn notify(&self, namespace: &SharedNamespace, notices: &[(HostId, ReservationNotice)]) {
        self.notify_own(namespace.nsid, notices);
        let medium = namespace.medium();
        for other in medium.subsystems() {
            if std::ptr::eq(&*other, self) {
                continue;
            }
            for same in other
                .list()
                .iter()
                .filter(|same| Arc::ptr_eq(same.medium(), medium))
            {
                other.notify_own(same.nsid, notices);
            }
        }
    }

    fn notify_own(&self, nsid: NsId, notices: &[(HostId, ReservationNotice)]) {
        let state = self.state();
        for (host, notice) in notices {
            let controllers = state.controllers.values();
            for controller in controllers.filter(|controller| controller.host_id == *host) {
                controller.notify(nsid, *notice);
            }
        }
    }

    /// Returns what Reservation Report tells of a namespace. Its controllers are those of this subsystem: a host that has come to another one alone is
    /// a registrant without a controller.
    pub(super) fn report(&self, namespace: &SharedNamespace) -> ReservationReport {
        let (reservations, persists) = namespace.reservations().state();
        let state = self.state();
        let mut controllers = Vec::new();
        for (host, key) in &reservations.registrants {
            let host = HostId(*host);
            let entry = |cntlid| ReservationController {
                cntlid,
                is_holder: reservations.holds(&host),
                key: *key,
                host,
            };
            let of_host = state
                .controllers
                .values()
                .filter(|controller| controller.host_id == host);
            let before = controllers.len();
            controllers.extend(of_host.map(|controller| entry(controller.cntlid)));
            if controllers.len() == before {
                controllers.push(entry(u16::MAX));
            }
        }
        ReservationReport {
            generation: reservations.generation,
            kind: reservations.holder.map(|(_, kind)| kind),
            persists,
            controllers,
        }
    }

    /// Returns a number that changes with the namespaces, and the access to them.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the namespaces, and their generation.
    pub(super) fn namespaces(&self) -> (u64, Namespaces) {
        let state = self.state();
        (self.generation(), state.namespaces.clone())
    }

    /// Begins a controller for a host.
    pub(super) fn associate(
        &self,
        data: &ConnectData,
        terms: &Terms,
        queues_max: u16,
        now: Instant,
    ) -> Result<Arc<Association>, Status> {
        let mut state = self.state();
        // They may have changed since they were looked up: the host tries again, on those of now.
        if state.hosts.terms(&data.host) != Some(terms) {
            return Err(Status::CONNECT_BUSY);
        }
        let after = state.last_cntlid;
        let is_free = |cntlid: &u16| !state.controllers.contains_key(cntlid);
        let after = after.max(self.cntlids.start() - 1);
        let later = after + 1..=*self.cntlids.end();
        let cntlid = later.chain(*self.cntlids.start()..=after).find(is_free);
        let cntlid = cntlid.ok_or(Status::CONNECT_BUSY)?;
        // A host that connects again finds what it has booked.
        state
            .limits
            .retain(|_, limit| Arc::strong_count(limit) > 1 || !limit.is_idle(now));
        let limit = state.limits.entry(data.host.clone());
        let limit = limit
            .or_insert_with(|| Arc::new(Limit::new(&terms.rates, now)))
            .clone();
        let association = Arc::new(Association::new(
            cntlid,
            data,
            queues_max,
            limit,
            self.tally.clone(),
        ));
        if state
            .ending
            .iter()
            .any(|ending| ending.is_of_host(&data.host, &data.host_id))
        {
            association.await_endings();
        }
        state.last_cntlid = cntlid;
        state.controllers.insert(cntlid, association.clone());
        Ok(association)
    }

    /// Keeps the key of TLS that a controller and its host have agreed on, in place of those that the controller's queues use.
    pub(super) fn keep_key(&self, association: &Association, psk: Psk, now: Instant) {
        let mut state = self.state();
        // Its host may be one that has to prove something else.
        if !association.is_expelled() {
            state.keys.forget_of(association.cntlid);
            state.keys.add(&association.host, psk, now);
        }
    }

    /// Has a queue of a controller use a key of TLS that an authentication has led to. Returns false if it may not.
    pub(super) fn use_key(&self, association: &Association, psk: &Psk, qid: u16) -> bool {
        let key = (&association.host, psk);
        self.state().keys.use_by(key, association.cntlid, qid)
    }

    pub(super) fn association(&self, cntlid: u16) -> Option<Arc<Association>> {
        self.state().controllers.get(&cntlid).cloned()
    }

    /// Ends a controller.
    pub(super) fn dissociate(&self, association: &Arc<Association>) {
        association.end();
        let mut state = self.state();
        state.controllers.remove(&association.cntlid);
        forget_windows(&state, association);
        state.keys.forget_of(association.cntlid);
        state.ending.push(association.clone());
        state.forget_quiet();
        if state.ending.is_empty() {
            return;
        }
        for other in state.controllers.values() {
            if association.is_of_host(&other.host, &other.host_id) {
                other.await_endings();
            }
        }
    }

    /// Has accelerators forget a host whose controllers are all over.
    pub(super) fn forget_windows(&self, association: &Association) {
        forget_windows(&self.state(), association);
    }

    /// Returns true if it has an accelerator.
    pub(super) fn is_accelerator(&self) -> bool {
        let namespaces = self.state().namespaces.clone();
        let mut backends = namespaces.values().map(|namespace| &namespace.backend);
        backends.any(|backend| backend.accelerator().is_some())
    }

    /// Returns true if no I/O runs of the controllers of an association's host that are over. Before that the host's next controller is not ready.
    pub(super) fn is_quiet(&self, host: &Association) -> bool {
        !self.any_ending(|ending| ending.is_of_host(&host.host, &host.host_id))
    }

    /// Returns true if no I/O that changes blocks runs of those controllers. Before that the host's others take no commands: what it writes must not
    /// be overwritten by what was written before.
    pub(super) fn is_still(&self, host: &Association) -> bool {
        if !host.awaits_endings() {
            return true;
        }
        let mut state = self.state();
        state.forget_quiet();
        let is_others = |ending: &Arc<Association>| !ending.is_of_host(&host.host, &host.host_id);
        let mut ending = state.ending.iter();
        let is_still = ending.all(|ending| is_others(ending) || ending.is_still());
        if is_still {
            host.found_still();
        }
        is_still
    }

    /// Returns true if a host's controller is over, and I/Os of it run.
    pub(super) fn is_ending(&self, cntlid: u16, host: &Nqn, host_id: &HostId) -> bool {
        self.any_ending(|ending| ending.cntlid == cntlid && ending.is_of_host(host, host_id))
    }

    /// Returns true if such a controller is over, and I/Os of it run.
    fn any_ending(&self, is_such: impl Fn(&Association) -> bool) -> bool {
        let mut state = self.state();
        state.forget_quiet();
        state.ending.iter().any(|ending| is_such(ending))
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            TransportKind::Tcp => "tcp",
            TransportKind::Rdma => "rdma",
        };
        write!(f, "{transport}:{}", self.address)
    }
}

/// A way to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The transport.
    pub transport: TransportKind,
    /// The address.
    pub address: SocketAddr,
}

/// Reason for which a subsystem was not added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The name is taken.
    #[error("subsystem {0} exists")]
    Exists(Nqn),
    /// There is no such subsystem.
    #[error("there is no subsystem {0}")]
    Missing(Nqn),
}

/// The subsystems of a target, and the ways to them: what its discovery service reports.
#[derive(Debug)]
pub struct Target {
    subsystems: Mutex<BTreeMap<Nqn, Arc<Subsystem>>>,
    /// With each whether it requires TLS.
    listeners: Mutex<Vec<(Listener, bool)>>,
    referrals: Mutex<Vec<Referral>>,
    /// Discovery controllers need ids as well.
    discovery: Arc<Subsystem>,
    generation: AtomicU64,
    connect_timeout: Duration,
    /// Books the data that devices of RDMA move at this side.
    ledger: Option<Arc<Ledger>>,
}

impl Default for Target {
    fn default() -> Target {
        let discovery = Nqn::new(DISCOVERY_NQN).expect("the name is valid");
        Target {
            subsystems: Mutex::default(),
            listeners: Mutex::default(),
            referrals: Mutex::default(),
            discovery: Arc::new(Subsystem::new(
                discovery,
                "discovery",
                Hosts::any(Terms::default()),
            )),
            generation: AtomicU64::new(0),
            connect_timeout: CONNECT_TIMEOUT,
            ledger: None,
        }
    }
}

impl Target {
    /// Sets the time of a host for its first command, TLS before it and authentication after it, in place of 10 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Target {
        self.connect_timeout = timeout;
        self
    }

    /// Has the data booked that devices of RDMA move between hosts and this side.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Arc<Ledger>) -> Target {
        self.ledger = Some(ledger);
        self
    }

    /// Returns the ledger of such data.
    pub(crate) fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.as_ref()
    }

    /// Returns the time of a host for its first command, TLS before it and authentication after it.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// Adds a subsystem.
    ///
    /// # Errors
    /// Its name is taken.
    pub fn add_subsystem(&self, subsystem: Arc<Subsystem>) -> Result<(), TargetError> {
        let mut subsystems = self.subsystems.lock();
        let nqn = subsystem.nqn().clone();
        if nqn.as_str() == DISCOVERY_NQN || subsystems.contains_key(&nqn) {
            return Err(TargetError::Exists(nqn));
        }
        subsystems.insert(nqn, subsystem);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Removes a subsystem: its controllers end.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn remove_subsystem(&self, nqn: &Nqn) -> Result<(), TargetError> {
        let removed = self.subsystems.lock().remove(nqn);
        removed
            .ok_or_else(|| TargetError::Missing(nqn.clone()))?
            .set_hosts(Hosts::default());
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Changes the hosts that may use a subsystem. Controllers of those that may no more, or that would have to prove something else, end once
    /// their reactors look ([`crate::server::Handle::tell_of_change`]); the others do not notice.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn set_hosts(&self, nqn: &Nqn, hosts: Hosts) -> Result<(), TargetError> {
        let subsystem = self.subsystems.lock().get(nqn).cloned();
        subsystem
            .ok_or_else(|| TargetError::Missing(nqn.clone()))?
            .set_hosts(hosts);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Has the discovery service report a way to all subsystems.
    pub fn add_listener(&self, listener: Listener) {
        self.add_way(listener, false);
    }

    /// Has the discovery service report a way to all subsystems, which may require TLS.
    pub(crate) fn add_way(&self, listener: Listener, tls: bool) {
        let mut listeners = self.listeners.lock();
        match listeners.iter_mut().find(|(known, _)| *known == listener) {
            Some((_, known)) if *known == tls => return,
            Some((_, known)) => *known = tls,
            None => listeners.push((listener, tls)),
        }
        drop(listeners);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Has the discovery service report a way no more.
    pub fn remove_listener(&self, listener: &Listener) {
        self.listeners.lock().retain(|(known, _)| known != listener);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Has the discovery service refer hosts to these others, and to no more.
    pub fn set_referrals(&self, referrals: Vec<Referral>) {
        self.change_referrals(|known| *known = referrals);
    }

    /// Has the discovery service refer hosts to another, or on other terms than before.
    pub fn add_referral(&self, referral: Referral) {
        self.change_referrals(
            |known| match known.iter_mut().find(|known| known.is_to(&referral)) {
                Some(known) => *known = referral,
                None => known.push(referral),
            },
        );
    }

    /// Has the discovery service refer hosts to another no more, whatever its terms are. Returns false if it did not.
    pub fn remove_referral(&self, referral: &Referral) -> bool {
        self.change_referrals(|known| known.retain(|known| !known.is_to(referral)))
    }

    /// Returns true if they are other ones then: hosts are told of no other changes.
    fn change_referrals(&self, change: impl FnOnce(&mut Vec<Referral>)) -> bool {
        let mut known = self.referrals.lock();
        let before = known.clone();
        change(&mut known);
        let is_other = *known != before;
        if is_other {
            self.generation.fetch_add(1, Ordering::Release);
        }
        is_other
    }

    /// Returns the discovery services to which hosts are referred.
    pub fn referrals(&self) -> Vec<Referral> {
        self.referrals.lock().clone()
    }

    /// Returns the subsystems, in the order of their names.
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.subsystems.lock().values().cloned().collect()
    }

    pub(super) fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        match nqn.as_str() {
            DISCOVERY_NQN => Some(self.discovery.clone()),
            _ => self.subsystems.lock().get(nqn).cloned(),
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the ways that the discovery service reports.
    pub fn listeners(&self) -> Vec<Listener> {
        let listeners = self.listeners.lock();
        listeners.iter().map(|(listener, _)| *listener).collect()
    }

    /// Returns the ways that the discovery service reports, with each whether it requires TLS.
    pub(crate) fn ways(&self) -> Vec<(Listener, bool)> {
        self.listeners.lock().clone()
    }

    /// Returns the keys of TLS that a host may have for a subsystem: for the discovery service the configured ones for any.
    pub(crate) fn psks(&self, host: &Nqn, subsystem: &Nqn, now: Instant) -> Vec<Psk> {
        let is_asked_for = |nqn: &Nqn| subsystem.as_str() == DISCOVERY_NQN || subsystem == nqn;
        let subsystems = self.subsystems.lock();
        let asked_for = subsystems.values().filter(|known| is_asked_for(&known.nqn));
        let mut all: Vec<_> = asked_for.filter_map(|known| known.terms(host)?.psk).collect();
        if let Some(known) = subsystems.get(subsystem) {
            all.extend(known.state().keys.of_host(host, now));
        }
        all
    }

    /// Returns the names of the subsystems that a host may use.
    pub(super) fn names(&self, host: &Nqn) -> Vec<Nqn> {
        let subsystems = self.subsystems.lock();
        let known = subsystems
            .iter()
            .filter(|(_, subsystem)| subsystem.terms(host).is_some());
        known.map(|(nqn, _)| nqn.clone()).collect()
    }
}
