//! Subsystems and their namespaces, which the queues of all reactors share.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::{
    ConnectData, DISCOVERY_NQN, HostId, IdentifyNamespace, NamespaceIdentifiers, Nqn, NsId, Status,
    TransportKind,
};

use super::hosts::{Hosts, Terms};
use crate::auth::{Authenticator, Parties};
use crate::backend::Backend;

/// The highest namespace id.
pub(super) const NAMESPACES_MAX: u32 = 1024;
/// The highest controller id. 0xfff0 and above are reserved (NVMe Base 2.0, 3.1.2).
const CNTLID_MAX: u16 = 0xffef;

/// A namespace: blocks of a backend.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its id in the subsystem.
    pub nsid: NsId,
    /// Bytes of a block as a power of two, 9 to 16.
    pub block_shift: u8,
    /// By which hosts know it over controllers and restarts.
    pub uuid: [u8; 16],
    /// It takes no writes.
    pub is_protected: bool,
    /// The storage of its blocks.
    pub backend: Arc<dyn Backend>,
}

impl Namespace {
    /// Returns the number of its blocks.
    pub fn blocks(&self) -> u64 {
        self.backend.bytes() >> self.block_shift
    }

    /// Checks that it can be in a subsystem.
    ///
    /// # Errors
    /// Its id is invalid, or it has no block.
    pub(crate) fn check(&self) -> Result<(), NamespaceError> {
        if !(1..=NAMESPACES_MAX).contains(&self.nsid.0) {
            return Err(NamespaceError::Id(self.nsid));
        }
        match self.blocks() {
            0 => Err(NamespaceError::Empty(1 << self.block_shift)),
            _ => Ok(()),
        }
    }

    pub(super) fn identify(&self) -> IdentifyNamespace {
        IdentifyNamespace {
            blocks: self.blocks(),
            block_shift: self.block_shift,
            zeroes: true,
            is_shared: true,
            is_protected: self.is_protected,
            nguid: self.uuid,
        }
    }

    pub(super) fn identifiers(&self) -> NamespaceIdentifiers {
        NamespaceIdentifiers {
            nguid: self.uuid,
            uuid: self.uuid,
        }
    }
}

/// The namespaces of a subsystem at one time.
pub(super) type Namespaces = Arc<BTreeMap<NsId, Arc<Namespace>>>;

/// Reason for which a namespace was not added.
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
}

/// A subsystem: namespaces under one name.
#[derive(Debug)]
pub struct Subsystem {
    nqn: Nqn,
    serial: String,
    /// Changes with the namespaces, so that a queue knows without a lock that what it has is current.
    generation: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    namespaces: Namespaces,
    hosts: Hosts,
    controllers: BTreeMap<u16, Arc<Association>>,
    /// Controllers that are over, as long as I/Os of them run.
    ending: Vec<Arc<Association>>,
    last_cntlid: u16,
}

/// A controller as all of its queues know it.
#[derive(Debug)]
pub(crate) struct Association {
    pub(super) cntlid: u16,
    pub(super) host: Nqn,
    pub(super) host_id: HostId,
    /// CSTS.RDY: I/O queues may take commands.
    pub(super) is_ready: AtomicBool,
    /// Its host may not use the subsystem any more.
    is_expelled: AtomicBool,
    /// Maximum number of its I/O queues.
    pub(super) queues_max: u16,
    /// Number of resets: I/O queues end with the next one. Odd once the controller is over.
    epoch: AtomicU32,
    /// I/Os that run on media.
    running: AtomicUsize,
    queues: Mutex<BTreeSet<u16>>,
}

impl Association {
    /// Takes an I/O queue's id. Returns false if it is taken.
    pub(super) fn take(&self, qid: u16) -> bool {
        self.queues.lock().insert(qid)
    }

    pub(super) fn give_back(&self, qid: u16) {
        self.queues.lock().remove(&qid);
    }

    /// Ends all I/O queues, whose I/Os that have not begun never run.
    pub(super) fn reset(&self) {
        self.is_ready.store(false, Ordering::Release);
        self.epoch.fetch_add(2, Ordering::SeqCst);
    }

    /// Ends it, with its admin queue.
    fn expel(&self) {
        self.is_expelled.store(true, Ordering::Release);
        self.reset();
    }

    /// Returns true if its host may not use the subsystem any more.
    pub(super) fn is_expelled(&self) -> bool {
        self.is_expelled.load(Ordering::Acquire)
    }

    /// Returns true if no I/O of an earlier epoch runs.
    pub(super) fn is_quiet(&self) -> bool {
        self.running.load(Ordering::SeqCst) == 0
    }
}

/// The time of a controller from one reset to the next.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) association: Arc<Association>,
    epoch: u32,
}

impl Session {
    pub(super) fn new(association: Arc<Association>) -> Session {
        let epoch = association.epoch.load(Ordering::SeqCst);
        Session { association, epoch }
    }

    /// Returns true once the controller was reset or is over.
    pub(super) fn is_over(&self) -> bool {
        self.association.epoch.load(Ordering::SeqCst) != self.epoch
    }

    /// Begins an I/O on a medium, which is running until the result is dropped. `None` if it must not run: its host may already have
    /// written the same blocks through another controller.
    pub(super) fn enter(&self) -> Option<Running> {
        self.association.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.association.clone());
        (!self.is_over()).then_some(running)
    }
}

/// An I/O that is running.
#[derive(Debug)]
pub(crate) struct Running(Arc<Association>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Subsystem {
    /// Makes a subsystem without namespaces. `serial` has at most 20 characters of ASCII.
    pub fn new(nqn: Nqn, serial: &str, hosts: Hosts) -> Subsystem {
        Subsystem {
            nqn,
            serial: serial.to_owned(),
            generation: AtomicU64::new(0),
            state: Mutex::new(State {
                hosts,
                ..State::default()
            }),
        }
    }

    /// Returns its name.
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
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
        let authentication = |hosts: &Hosts, host: &Nqn| Some(hosts.terms(host)?.authentication.clone());
        for association in state.controllers.values() {
            let host = &association.host;
            let stays = authentication(&hosts, host).is_some_and(|authentication_now| {
                Some(authentication_now) == authentication(&state.hosts, host)
            });
            if !stays {
                association.expel();
            }
        }
        state.hosts = hosts;
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

    /// Adds a namespace.
    ///
    /// # Errors
    /// Its id is invalid or taken, or it has no block.
    pub fn add_namespace(&self, namespace: Namespace) -> Result<(), NamespaceError> {
        namespace.check()?;
        let mut state = self.state();
        if state.namespaces.contains_key(&namespace.nsid) {
            return Err(NamespaceError::Exists(namespace.nsid));
        }
        self.put(&mut state, namespace);
        Ok(())
    }

    fn put(&self, state: &mut State, namespace: Namespace) {
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
        namespaces.remove(&nsid).ok_or(NamespaceError::Missing(nsid))?;
        state.namespaces = Arc::new(namespaces);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Has a namespace take the size that its backend has now, and tells hosts if it is another one. Returns true then.
    ///
    /// # Errors
    /// There is none of that id, its backend cannot tell its size, or it has no block any more, in which case nothing changes.
    pub fn resize_namespace(&self, nsid: NsId) -> Result<bool, NamespaceError> {
        let mut state = self.state();
        let namespace = state.namespaces.get(&nsid);
        let namespace = namespace.ok_or(NamespaceError::Missing(nsid))?;
        let blocks = namespace.blocks();
        let resized = Namespace::clone(namespace);
        resized
            .backend
            .measure(1 << resized.block_shift)
            .map_err(|error| NamespaceError::Backend(nsid, error.to_string()))?;
        if resized.blocks() == blocks {
            return Ok(false);
        }
        // Hosts are told of a namespace that is another object.
        self.put(&mut state, resized);
        Ok(true)
    }

    /// Returns the namespaces, in the order of their ids.
    pub fn list(&self) -> Vec<Arc<Namespace>> {
        self.state().namespaces.values().cloned().collect()
    }

    /// Returns a number that changes with the namespaces.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the namespaces, and their generation.
    pub(super) fn namespaces(&self) -> (u64, Namespaces) {
        let state = self.state();
        (self.generation(), state.namespaces.clone())
    }

    /// Begins a controller for a host.
    pub(super) fn associate(&self, data: &ConnectData, queues_max: u16) -> Result<Arc<Association>, Status> {
        let mut state = self.state();
        // It may have been refused since its terms were looked up.
        if state.hosts.terms(&data.host).is_none() {
            return Err(Status::CONNECT_INVALID_HOST.do_not_retry());
        }
        let after = state.last_cntlid;
        let is_free = |cntlid: &u16| !state.controllers.contains_key(cntlid);
        let cntlid = (after + 1..=CNTLID_MAX).chain(1..=after).find(is_free);
        let cntlid = cntlid.ok_or(Status::CONNECT_BUSY)?;
        let association = Arc::new(Association {
            cntlid,
            host: data.host.clone(),
            host_id: data.host_id,
            is_ready: AtomicBool::new(false),
            is_expelled: AtomicBool::new(false),
            queues_max,
            epoch: AtomicU32::new(0),
            running: AtomicUsize::new(0),
            queues: Mutex::default(),
        });
        state.last_cntlid = cntlid;
        state.controllers.insert(cntlid, association.clone());
        Ok(association)
    }

    pub(super) fn association(&self, cntlid: u16) -> Option<Arc<Association>> {
        self.state().controllers.get(&cntlid).cloned()
    }

    /// Ends a controller.
    pub(super) fn dissociate(&self, association: &Arc<Association>) {
        association.is_ready.store(false, Ordering::Release);
        association.epoch.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state();
        state.controllers.remove(&association.cntlid);
        state.ending.push(association.clone());
        state.ending.retain(|ending| !ending.is_quiet());
    }

    /// Returns true if no I/O runs of a host's controllers that are over. Before that the host's next controller is not ready: what it writes must not be
    /// overwritten by what was written before.
    pub(super) fn is_quiet(&self, host: &HostId) -> bool {
        let mut state = self.state();
        state.ending.retain(|ending| !ending.is_quiet());
        !state.ending.iter().any(|ending| ending.host_id == *host)
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
    listeners: Mutex<Vec<Listener>>,
    /// Discovery controllers need ids as well.
    discovery: Arc<Subsystem>,
    generation: AtomicU64,
}

impl Default for Target {
    fn default() -> Target {
        let discovery = Nqn::new(DISCOVERY_NQN).expect("the name is valid");
        Target {
            subsystems: Mutex::default(),
            listeners: Mutex::default(),
            discovery: Arc::new(Subsystem::new(
                discovery,
                "discovery",
                Hosts::any(Terms::default()),
            )),
            generation: AtomicU64::new(0),
        }
    }
}

impl Target {
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
        self.listeners.lock().push(listener);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Has the discovery service report a way no more.
    pub fn remove_listener(&self, listener: &Listener) {
        self.listeners.lock().retain(|known| known != listener);
        self.generation.fetch_add(1, Ordering::Release);
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
        self.listeners.lock().clone()
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
