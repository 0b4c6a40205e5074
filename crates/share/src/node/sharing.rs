//! Connections of applications on shared queue pairs of the node's device.
//!
//! [`Sharing`] decides where the connection of an application's RC queue pair goes: once it is to be RTR, the peer's node is asked. If there is
//! one, the connection goes over a queue pair that connections of both tenants and this class share ([`Mux`]), and the application's queue pair
//! is one of the device by its number alone: the device's stays in Init. Otherwise the device's own goes to RTR as the application has asked.
//! Until that is known, requests wait in their flow and receives here.
//!
//! It waits for nothing. Its owner calls [`Sharing::look`] and [`Sharing::poll`] in its loop, and takes [`Sharing::next_news`].

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_rnic::sched::{Entitlement, TenantId, class_of};
use rdmux_rnic::{
    Access, LKey, Memory, PostError, QpAttributes, QpState, Qpn, RKey, RecvRequest, RegionSpec, SendFlags,
    SendRequest, Sge, SgeList, Status, Target, Time, WorkCompletion,
};
use rdmux_verbs::{CompletionQueue, EngineWatch, EventQueue, MemoryRegion};
use rdmux_wire::node::mux::{HEADER_LEN, SLOT_LEN};
use rdmux_wire::node::peer::{Binding, TenantName};

use super::config::DEFAULT_TENANT;
use super::egress::{self, Egress, FlowId, GroupId, GroupOptions, Owner, PieceId};
use super::mux::keys::{Extent, Keys, OwnRegions, PeerKey, PeerKeys};
use super::mux::receiver::Receiver;
use super::mux::sender;
use super::mux::{
    Admission, Bound, ConnectionId, Event, Failure, Mux, Post, Posted, Received, Violation, flushed,
};
use super::peer::{
    Asked, DOUBT_AFTER, Ended, PeerEvent, PeerId, Peers, PeersError, RECEIVE, RELEASE_TIME, RemoteKey, SENDS,
    SLOTS, SharedBy, SharedId, Shares,
};
use super::quarantine::Quarantine;
use super::snapshot::{self, Route};
use super::tenants::Charge;
use super::worker::arm;

/// States into which an application may bring a queue pair before its peer's node has answered: RTR, RTS, SQD and RTS again.
const STATES_MAX: usize = 4;
/// Times that a queue pair in use does not go although others are wanted, before it has to: each of them is at least 20 ms.
const STAYS_MAX: u32 = 3;
/// Time for what is in flight on a queue pair that has to go. The peer's node waits for the answer for longer.
const HOLD_TIME: Duration = Duration::from_millis(200);
/// Completions that are taken at once.
const BATCH: usize = 64;
/// Pieces of a shared queue pair in flight: each takes up to two requests, and messages of the nodes take some.
const DEPTH: u32 = SENDS / 4;

/// Part of the device's queue pairs that applications leave to the node at most, as a divisor.
const OTHERS_PART: usize = 4;

/// News for the application of a queue pair.
#[derive(Debug)]
pub(super) enum News {
    /// A receive has completed.
    Received(WorkCompletion),
    /// The queue pair is in error.
    Failed(Failure),
    /// The connection goes over the device's queue pair: it is to be brought to these states, and then takes these receives.
    Own(Vec<(QpState, QpAttributes)>, Vec<RecvRequest>),
}

/// An own region: its memory, and the same memory in the domain of shared queue pairs.
#[derive(Debug)]
struct OwnRegion {
    spec: RegionSpec,
    shadow: Option<Arc<MemoryRegion>>,
    /// Set once a peer's node may have been told to write into it.
    may_be_written: bool,
}

impl OwnRegion {
    /// Returns the place of an address in the memory.
    fn place(&self, addr: u64) -> Option<u64> {
        let start = match self.spec.access.contains(Access::ZERO_BASED) {
            true => 0,
            false => self.spec.iova,
        };
        self.spec.memory_offset.checked_add(addr.checked_sub(start)?)
    }
}

/// For each shared queue pair, the number of the next piece at some time: whatever was in flight then has a lower one.
type InFlight = Vec<(SharedId, u64)>;

/// A region that was deregistered and is still in use. [`Peers`] keeps it, so that no other region gets its keys.
// Its charges end after it.
#[derive(Debug)]
struct Retired {
    _shadow: Option<Arc<MemoryRegion>>,
    _charges: [Charge; 2],
    /// Uses that have not ended: those on shared queue pairs ([`Mux::withdraw`]), and that of peers which know its key.
    uses: usize,
    /// Time at which it goes although shared queue pairs still use it.
    until: Instant,
}

/// A shared queue pair.
// The buffers' region ends before their memory.
#[derive(Debug)]
struct Line {
    mux: Mux,
    /// In the scheduler, once there is a connection, and the tenant there.
    group: Option<(GroupId, TenantId)>,
    buffers_region: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    peer: PeerId,
    by: SharedBy,
    /// [`Mux::activity`] as the queue pair was asked whether it can go, and how often it has stayed in use although another one was wanted.
    seen: (u64, u32),
    /// [`Mux::oldest`] when it was last looked at.
    oldest: Option<u64>,
    /// Set while it is in [`Sharing::due`].
    is_due: bool,
}

/// Reason why a request of a shared queue pair was not posted.
#[derive(Clone, Copy, Debug)]
enum NotPosted {
    /// The memory of its application fails.
    Memory,
    /// The queue pair or the node's own memory does.
    Device,
}

/// Progress of a connection of an application.
#[derive(Debug)]
enum Stage {
    /// It is not connected.
    Open,
    /// The peer's node is asked.
    Asking,
    /// The shared queue pair is being made.
    Wanting(SharedBy, Bound),
    Shared(SharedId, ConnectionId),
    /// It has failed, or has ended, and is not reset.
    Over,
}

/// A queue pair of an application that is not used by itself, at least not yet.
#[derive(Debug)]
struct Virtual {
    owner: Owner,
    flow: FlowId,
    tenant: (TenantName, TenantId),
    domain: u64,
    receives_max: u32,
    /// See [`Bound::replays_writes`].
    replays_writes: bool,
    receiver: Option<Receiver>,
    /// Accesses that it allows its peer.
    access: Access,
    state: QpState,
    stage: Stage,
    /// The states to which its application has brought it, from RTR on.
    states: Vec<(QpState, QpAttributes)>,
}

impl Line {
    /// Has the next pass look at it.
    fn touch(&mut self, id: SharedId, due: &mut Vec<SharedId>) {
        if !std::mem::replace(&mut self.is_due, true) {
            due.push(id);
        }
    }
}

impl Virtual {
    /// Returns whether its connection may yet be one of a line, with this queue pair of the peer. Its application may have asked another one since it
    /// was reset.
    fn may_join(&self, line: &SharedBy, peer: Qpn) -> bool {
        match &self.stage {
            Stage::Asking => self.states.first().is_some_and(|(_, asked)| {
                let path = asked.path.as_ref().map(|path| (path.dst, path.traffic_class));
                let is_there = (path, asked.dest_qpn) == (Some((line.peer.address, line.class)), Some(peer));
                is_there && self.tenant.0 == line.here
            }),
            Stage::Wanting(by, bound) => (by, bound.peer) == (line, peer),
            Stage::Open | Stage::Shared(..) | Stage::Over => false,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Sharing {
    peers: Peers,
    lines: HashMap<SharedId, Line>,
    /// Lines to look at, each once: something has happened to their state machines.
    due: Vec<SharedId>,
    /// Lines with messages of connections that may yet be bound.
    early: BTreeSet<SharedId>,
    /// Looks at lines.
    #[cfg(test)]
    looks: usize,
    /// Queue pairs whose connections may wait for a shared one.
    waiting: HashMap<SharedBy, BTreeSet<Qpn>>,
    qps: HashMap<Qpn, Virtual>,
    flows: HashMap<FlowId, Qpn>,
    connections: HashMap<(SharedId, ConnectionId), Qpn>,
    /// Queue pairs of the device that applications can have: the others are for shared ones and control connections.
    qps_max: usize,
    regions: OwnRegions<OwnRegion>,
    /// Keys of own regions, by those on shared queue pairs.
    by_shadow: HashMap<u32, LKey>,
    keys: HashMap<PeerId, PeerKeys>,
    tickets: HashMap<u64, (PeerId, u64, RKey)>,
    ticket: u64,
    /// Regions that were deregistered and are still in use, by their keys.
    retired: HashMap<RKey, Retired>,
    /// The times of those, in order, and of some that are gone.
    overdue: VecDeque<(Instant, RKey)>,
    /// Peers' questions about keys that are going, and what is in flight with them.
    going: Vec<(Asked, InFlight)>,
    /// Keys of deregistered regions that nobody uses any more.
    regions_gone: Vec<RKey>,
    /// The tenant of shared queue pairs of applications without one.
    tenant: TenantId,
    news: VecDeque<(Owner, News)>,
    found: VecDeque<WorkCompletion>,
    /// Requests for one shared queue pair, which are posted together.
    list_of: Option<SharedId>,
    list: Vec<Post>,
    /// Queue pairs whose completions have not all come since they were ended.
    ending: Vec<SharedId>,
    /// Queue pairs that can go once nothing is in flight, and when they stay if something still is.
    yielding: Vec<(SharedId, Instant)>,
    /// Time of the next look at what has not arrived, while something is in flight.
    stalls_at: Option<Instant>,
    quarantine: Quarantine,
    /// Applications that are quarantined, to be told to a person.
    quarantined: Vec<u32>,
}

/// The keys that a connection's requests need.
struct NodeKeys<'a> {
    regions: &'a mut OwnRegions<OwnRegion>,
    by_shadow: &'a mut HashMap<u32, LKey>,
    peers: &'a mut Peers,
    of_peer: &'a mut PeerKeys,
}

impl Keys for NodeKeys<'_> {
    fn own(&mut self, domain: u64, lkey: LKey, range: (u64, u64), access: Access) -> Option<(LKey, RKey)> {
        let region = self.regions.get(domain, lkey, range, access)?;
        if region.shadow.is_none() {
            region.shadow = self.peers.shadow(domain, lkey);
            let shadow = region.shadow.as_ref();
            self.by_shadow
                .extend(shadow.map(|shadow| (shadow.lkey().0, lkey)));
        }
        region.may_be_written |= access.contains(Access::LOCAL_WRITE);
        let shadow = region.shadow.as_ref()?;
        Some((shadow.lkey(), shadow.rkey()))
    }

    fn peer(&mut self, domain: u64, rkey: RKey, range: (u64, u64), access: Access) -> PeerKey {
        self.of_peer.get(domain, rkey, range, access)
    }
}

/// Returns the state machine of a shared queue pair, which is then looked at, and the keys for it.
macro_rules! line {
    ($sharing:expr, $id:expr) => {{
        let sharing: &mut Sharing = $sharing;
        match sharing.lines.get_mut(&$id) {
            Some(line) => {
                line.touch($id, &mut sharing.due);
                let keys = NodeKeys {
                    regions: &mut sharing.regions,
                    by_shadow: &mut sharing.by_shadow,
                    peers: &mut sharing.peers,
                    of_peer: sharing.keys.entry(line.peer).or_default(),
                };
                Some((line, keys))
            }
            None => None,
        }
    }};
}

mod messages;
mod requests;

impl Sharing {
    /// Begins to share queue pairs with nodes that have the same key.
    pub(super) fn open(
        events: &EventQueue,
        egress: &mut Egress<SendRequest>,
        shares: Shares,
    ) -> Result<Sharing, PeersError> {
        let peers = Peers::open(events, shares)?;
        let device_max = peers.pd().device().limits().queue_pairs as usize;
        let others = (2 * peers.shared_max()).min(device_max / OTHERS_PART);
        Ok(Sharing {
            qps_max: device_max - others,
            peers,
            lines: HashMap::new(),
            due: Vec::new(),
            early: BTreeSet::new(),
            #[cfg(test)]
            looks: 0,
            waiting: HashMap::new(),
            qps: HashMap::new(),
            flows: HashMap::new(),
            connections: HashMap::new(),
            regions: OwnRegions::default(),
            by_shadow: HashMap::new(),
            keys: HashMap::new(),
            tickets: HashMap::new(),
            ticket: 0,
            retired: HashMap::new(),
            overdue: VecDeque::new(),
            regions_gone: Vec::new(),
            going: Vec::new(),
            tenant: egress.add_tenant(&Entitlement::default()),
            news: VecDeque::new(),
            found: VecDeque::new(),
            list_of: None,
            list: Vec::new(),
            ending: Vec::new(),
            yielding: Vec::new(),
            stalls_at: None,
            quarantine: Quarantine::default(),
            quarantined: Vec::new(),
        })
    }

    /// Returns the queues whose completions wake the node.
    pub(super) fn cqs(&self) -> [&CompletionQueue; 2] {
        [self.peers.control_cq(), self.peers.shared_cq()]
    }

    // Objects of applications.

    /// Returns a name for a protection domain.
    pub(super) fn new_domain(&mut self) -> u64 {
        self.peers.new_domain()
    }

    /// Adds a region of an application.
    pub(super) fn add_region(&mut self, domain: u64, keys: (LKey, RKey), spec: RegionSpec) {
        let extent = Extent {
            start: match spec.access.contains(Access::ZERO_BASED) {
                true => 0,
                false => spec.iova,
            },
            length: spec.length,
            access: spec.access,
        };
        self.peers.add_region(domain, keys, spec.clone());
        let region = OwnRegion {
            spec,
            shadow: None,
            may_be_written: false,
        };
        self.regions.insert(domain, keys, extent, region);
    }

    /// Removes a region, as its application deregisters it. Returns false if it is in use: it stays, and is charged, until nobody can access it any
    /// more ([`Sharing::next_region_gone`]).
    pub(super) fn remove_region(&mut self, now: Instant, region: MemoryRegion, charges: [Charge; 2]) -> bool {
        let own = (region.lkey(), region.rkey());
        let (mut shadow, mut uses) = (None, 0);
        if let Some((domain, removed)) = self.regions.remove(own.0)
            && let Some(its) = removed.shadow
        {
            let shared = (its.lkey(), its.rkey());
            self.by_shadow.remove(&shared.0.0);
            let is_written = removed.may_be_written;
            for (id, line) in &mut self.lines {
                let of_line = line.mux.withdraw(domain, own, shared, is_written);
                if of_line > 0 {
                    line.touch(*id, &mut self.due);
                }
                uses += of_line;
            }
            shadow = Some(its);
        }
        uses += usize::from(self.peers.region_goes(now, region));
        if uses == 0 {
            self.peers.remove_region(own.1);
            return true;
        }
        let retired = Retired {
            _shadow: shadow,
            _charges: charges,
            uses,
            until: now + RELEASE_TIME,
        };
        self.overdue.push_back((retired.until, own.1));
        self.retired.insert(own.1, retired);
        false
    }

    /// Returns the deregistered region that is to go next, and when.
    fn next_overdue(&mut self) -> Option<(Instant, RKey)> {
        while let Some((until, rkey)) = self.overdue.front().copied() {
            if self
                .retired
                .get(&rkey)
                .is_some_and(|retired| retired.until == until)
            {
                return Some((until, rkey));
            }
            self.overdue.pop_front();
        }
        None
    }

    /// Takes note that a use of a deregistered region has ended.
    fn use_ended(&mut self, rkey: RKey) {
        let Some(retired) = self.retired.get_mut(&rkey) else {
            return;
        };
        retired.uses -= 1;
        if retired.uses == 0 {
            self.peers.remove_region(rkey);
            self.retired.remove(&rkey);
            self.regions_gone.push(rkey);
        }
    }

    /// Returns what is in flight on shared queue pairs.
    fn in_flight(&self, of: impl Fn(&Line) -> bool) -> InFlight {
        let lines = self.lines.iter().filter(|(_, line)| of(line));
        lines.map(|(id, line)| (*id, line.mux.posted())).collect()
    }

    /// Returns whether something of it is still in flight.
    fn is_in_flight(&self, in_flight: &InFlight) -> bool {
        in_flight.iter().any(|(id, end)| {
            let line = self.lines.get(id);
            line.is_some_and(|line| line.mux.completed() < *end)
        })
    }

    /// Answers peers whose keys nothing in flight has any more.
    fn release(&mut self) {
        for (asked, in_flight) in std::mem::take(&mut self.going) {
            match self.is_in_flight(&in_flight) {
                true => self.going.push((asked, in_flight)),
                false => self.peers.key_unused(Instant::now(), asked),
            }
        }
    }

    /// Returns the most queue pairs that all applications together can have: the node needs some of the device's.
    pub(super) fn qps_max(&self) -> usize {
        self.qps_max
    }

    /// Adds an RC queue pair of an application.
    /// `replays_writes`: see [`Bound::replays_writes`]. `tenant`: its name, and the one in the scheduler if it has a name.
    pub(super) fn add_qp(
        &mut self,
        qpn: Qpn,
        (owner, flow): (Owner, FlowId),
        domain: u64,
        (receives_max, replays_writes): (u32, bool),
        tenant: (&str, Option<TenantId>),
    ) {
        let (name, tenant) = self.tenant_of(tenant);
        self.peers.add_qp(qpn, domain, name.clone());
        self.flows.insert(flow, qpn);
        let added = Virtual {
            owner,
            flow,
            tenant: (name, tenant),
            domain,
            receives_max,
            replays_writes,
            receiver: Some(Receiver::new(receives_max)),
            access: Access::empty(),
            state: QpState::Reset,
            stage: Stage::Open,
            states: Vec::new(),
        };
        self.qps.insert(qpn, added);
    }

    fn tenant_of(&self, tenant: (&str, Option<TenantId>)) -> (TenantName, TenantId) {
        match (TenantName::new(tenant.0), tenant.1) {
            (Some(name), Some(tenant)) => (name, tenant),
            _ => (TenantName::default(), self.tenant),
        }
    }

    /// Moves the queue pairs of an application to another tenant. Connections on shared queue pairs end, those too that are about to come to one:
    /// the nodes have agreed that they share it with connections of the former tenant.
    pub(super) fn move_qps(&mut self, now: Instant, slot: u32, tenant: (&str, TenantId)) {
        let tenant = self.tenant_of((tenant.0, Some(tenant.1)));
        let of_slot = |(qpn, qp): (&Qpn, &Virtual)| (qp.owner.application == slot).then_some(*qpn);
        let moved: Vec<Qpn> = self.qps.iter().filter_map(of_slot).collect();
        for qpn in moved {
            let Some(qp) = self.qps.get_mut(&qpn) else {
                continue;
            };
            qp.tenant = tenant.clone();
            match qp.stage {
                Stage::Open => self.peers.set_tenant(qpn, tenant.0.clone()),
                Stage::Asking | Stage::Wanting(..) | Stage::Shared(..) => drop(self.fail(now, qpn)),
                Stage::Over => {}
            }
        }
    }

    /// Ends the lines of tenants that are gone, after their applications have [moved](Sharing::move_qps): another tenant may get the name.
    pub(super) fn end_lines(&mut self, keeps: impl Fn(TenantId) -> bool) {
        let goes = |(id, line): (&SharedId, &Line)| {
            let (_, tenant) = line.group?;
            (tenant != self.tenant && !keeps(tenant)).then_some(*id)
        };
        let going: Vec<SharedId> = self.lines.iter().filter_map(goes).collect();
        going.into_iter().for_each(|id| self.fail_line(id));
    }

    /// Removes a queue pair.
    pub(super) fn remove_qp(&mut self, now: Instant, qpn: Qpn) {
        self.leave(qpn);
        if let Some(removed) = self.qps.remove(&qpn) {
            self.flows.remove(&removed.flow);
        }
        self.peers.remove_qp(now, qpn);
    }

    /// Returns the state machine of a shared queue pair, to which something happens: it is looked at afterwards.
    fn touch(&mut self, id: SharedId) -> Option<&mut Mux> {
        let line = self.lines.get_mut(&id)?;
        line.touch(id, &mut self.due);
        Some(&mut line.mux)
    }

    /// Ends the connection of a queue pair, whose application hears no more of it.
    fn leave(&mut self, qpn: Qpn) {
        let Some(left) = self.qps.get_mut(&qpn) else {
            return;
        };
        if let Stage::Shared(id, connection) = std::mem::replace(&mut left.stage, Stage::Over) {
            self.connections.remove(&(id, connection));
            if let Some(mux) = self.touch(id) {
                mux.abandon(connection);
            }
        }
    }

    /// Returns the state of a queue pair whose device's queue pair has another one, and the attributes with which it came there.
    pub(super) fn state(&self, qpn: Qpn) -> Option<(QpState, Option<&QpAttributes>)> {
        let found = self.qps.get(&qpn)?;
        let is_virtual = !matches!(found.stage, Stage::Open);
        is_virtual.then(|| {
            (
                found.state,
                found.states.first().map(|(_, attributes)| attributes),
            )
        })
    }

    /// Returns how the requests of a queue pair reach its peer, the shared queue pair that they take, and the peer; `None` if the device's own
    /// is used by itself, or may be.
    pub(super) fn route(&self, qpn: Qpn) -> Option<(Route, Option<u64>, Option<IpAddr>)> {
        let found = self.qps.get(&qpn)?;
        let (route, shared) = match &found.stage {
            Stage::Open => return None,
            Stage::Asking | Stage::Wanting(..) => (Route::Asking, None),
            Stage::Shared(id, _) => (Route::Shared, Some(id.0)),
            Stage::Over => (Route::Over, None),
        };
        let path = found.states.first().and_then(|(_, attributes)| attributes.path);
        Some((route, shared, path.map(|path| path.dst)))
    }

    /// Returns the shared queue pairs, for those who look at the node.
    pub(super) fn shown(&self, egress: &Egress<SendRequest>, now: Time) -> Vec<snapshot::SharedQp> {
        let mut shown: Vec<_> = self
            .lines
            .iter()
            .filter_map(|(id, line)| {
                let by = self.peers.shared_qp(*id)?.by();
                let (class, in_flight_bytes, window_bytes) = egress.state_of_group(now, line.group?.0)?;
                Some(snapshot::SharedQp {
                    id: id.0,
                    peer: by.peer.address,
                    tenant: name_of(&by.here),
                    peer_tenant: name_of(&by.there),
                    class: class as u8,
                    connections: line.mux.connections() as u32,
                    window_bytes,
                    in_flight_bytes,
                })
            })
            .collect();
        shown.sort_by_key(|shared| shared.id);
        shown
    }

    /// Returns whether a queue pair may yet go over a shared one.
    pub(super) fn may_share(&self, qpn: Qpn) -> bool {
        self.qps.contains_key(&qpn)
    }

    /// Returns whether requests of a queue pair wait here, or go over a shared queue pair.
    pub(super) fn has(&self, qpn: Qpn) -> bool {
        self.state(qpn).is_some()
    }

    /// Notes that an application brings a queue pair to a state. Returns true if the device's queue pair is not to be changed.
    pub(super) fn modify(&mut self, now: Instant, qpn: Qpn, to: QpState, attributes: &QpAttributes) -> bool {
        let own_address = self.peers.pd().device().address();
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return false;
        };
        qp.access = attributes.access.unwrap_or(qp.access);
        let path = attributes.path.as_ref().filter(|path| path.dst != own_address);
        match (&qp.stage, to) {
            (_, QpState::Reset) => {
                let (domain, tenant) = (qp.domain, qp.tenant.0.clone());
                self.leave(qpn);
                self.peers.remove_qp(now, qpn);
                self.peers.add_qp(qpn, domain, tenant);
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    qp.receiver = Some(Receiver::new(qp.receives_max));
                    qp.stage = Stage::Open;
                    qp.state = QpState::Reset;
                    qp.states.clear();
                }
                false
            }
            (Stage::Open, QpState::Rtr) if qp.state == QpState::Init => {
                qp.state = to;
                let is_quarantined = self.quarantine.has(qp.owner.application);
                let (Some(path), Some(dest), false) = (path, attributes.dest_qpn, is_quarantined) else {
                    // The device knows what to say, and carries it out.
                    return false;
                };
                qp.stage = Stage::Asking;
                qp.states.push((to, *attributes));
                let (peer, class) = (path.dst, path.traffic_class);
                let access = qp.access;
                self.peers.bind(now, qpn, (peer, dest, class), access);
                true
            }
            (Stage::Open, QpState::Error) => {
                self.flush(qpn);
                false
            }
            (Stage::Open, _) => {
                qp.state = to;
                false
            }
            (Stage::Shared(id, connection), QpState::Error) => {
                let (id, connection) = (*id, *connection);
                qp.state = to;
                if let Some(mux) = self.touch(id) {
                    mux.fail(connection);
                }
                true
            }
            (_, QpState::Error) => {
                qp.state = to;
                self.fail_unbound(qpn, Failure::Own);
                true
            }
            (stage, _) => {
                // Only the device's queue pair would need them, which goes by RTR and RTS.
                let may_become_own = matches!(stage, Stage::Asking | Stage::Wanting(..));
                if may_become_own {
                    // RTS and SQD alternate from there on.
                    qp.states.truncate(STATES_MAX - 1);
                    qp.states.push((to, *attributes));
                }
                qp.state = to;
                true
            }
        }
    }

    /// Puts a queue pair in error, as its connection has ended. Returns false if the device's queue pair has it.
    pub(super) fn fail(&mut self, now: Instant, qpn: Qpn) -> bool {
        self.has(qpn) && self.modify(now, qpn, QpState::Error, &QpAttributes::default())
    }

    /// Has the device's queue pair be used by itself, as its peer has no node.
    fn becomes_own(&mut self, qpn: Qpn) {
        if let Some((own, receives)) = self.remove_own(qpn) {
            self.news.push_back((own.owner, News::Own(own.states, receives)));
        }
    }

    /// Has the device's queue pair be used by itself from here on, unless it is connected already, or about to. Returns the receives that it
    /// takes.
    pub(super) fn make_own(&mut self, qpn: Qpn) -> Vec<RecvRequest> {
        if self.has(qpn) {
            return Vec::new();
        }
        let Some((_, receives)) = self.remove_own(qpn) else {
            return Vec::new();
        };
        self.peers.keep_own(Instant::now(), qpn);
        receives
    }

    fn remove_own(&mut self, qpn: Qpn) -> Option<(Virtual, Vec<RecvRequest>)> {
        let mut own = self.qps.remove(&qpn)?;
        self.flows.remove(&own.flow);
        let receiver = own.receiver.take();
        let receives = receiver.map(|mut receiver| std::iter::from_fn(|| receiver.pop()).collect());
        Some((own, receives.unwrap_or_default()))
    }

    /// Fails a queue pair that is bound to no shared one: its receives are flushed.
    fn fail_unbound(&mut self, qpn: Qpn, failure: Failure) {
        self.flush(qpn);
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.stage = Stage::Over;
        self.news.push_back((qp.owner, News::Failed(failure)));
    }

    /// Flushes the receives of a queue pair that is bound to no shared one, now and from here on.
    fn flush(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.state = QpState::Error;
        let (owner, receiver) = (qp.owner, qp.receiver.take());
        if let Some(mut receiver) = receiver {
            while let Some(receive) = receiver.pop() {
                let flushed = flushed(qpn, receive.wr_id);
                self.news.push_back((owner, News::Received(flushed)));
            }
        }
    }

    /// Takes a receive of a queue pair. `None`: the device's queue pair takes it.
    pub(super) fn post_recv(
        &mut self,
        qpn: Qpn,
        receive: RecvRequest,
    ) -> Result<Option<RecvRequest>, PostError> {
        let Some(qp) = self.qps.get_mut(&qpn).filter(|qp| qp.state != QpState::Reset) else {
            return Ok(Some(receive));
        };
        match (&qp.stage, &mut qp.receiver) {
            (Stage::Shared(id, connection), _) => {
                let (id, connection) = (*id, *connection);
                let mux = self.touch(id).ok_or(PostError::NoQp)?;
                mux.post_recv(connection, receive)?;
            }
            (_, Some(receiver)) => receiver.post(receive)?,
            (_, None) => {
                receive.check()?;
                let flushed = flushed(qpn, receive.wr_id);
                self.news.push_back((qp.owner, News::Received(flushed)));
            }
        }
        Ok(None)
    }
}

/// Decides which requests may be posted: those of shared queue pairs need what [`Mux`] knows.
pub(super) struct Gate<'a>(pub(super) Option<&'a mut Sharing>);

impl egress::Gate<SendRequest> for Gate<'_> {
    fn admit(
        &mut self,
        flow: FlowId,
        _request: &egress::Request,
        body: &SendRequest,
        offset: u32,
    ) -> egress::Admission {
        let Some(sharing) = self.0.as_deref_mut() else {
            return egress::Admission::Post(u32::MAX);
        };
        let Some((id, connection)) = sharing.of_flow(flow) else {
            return egress::Admission::Post(u32::MAX);
        };
        let Some((line, mut keys)) = line!(sharing, id) else {
            return egress::Admission::Hold;
        };
        admission(line.mux.admit(connection, body, offset, &mut keys), body)
    }
}

/// Returns for the scheduler what a shared queue pair says about a piece of a request.
pub(super) fn admission(admitted: Admission, body: &SendRequest) -> egress::Admission {
    match admitted {
        Admission::Post(bytes) if sender::may_cut(body) => egress::Admission::Cut(bytes),
        Admission::Post(bytes) => egress::Admission::Post(bytes),
        Admission::Wait(_) => egress::Admission::Hold,
        Admission::Refuse(status) => egress::Admission::Refuse(status),
    }
}

/// Returns the name of a tenant for people: nodes call that of processes which match no other one by the empty name.
fn name_of(tenant: &TenantName) -> String {
    match tenant.to_string() {
        none if none.is_empty() => DEFAULT_TENANT.to_owned(),
        name => name,
    }
}

impl From<PeersError> for super::NodeError {
    fn from(error: PeersError) -> super::NodeError {
        super::NodeError::Peers(error)
    }
}

#[cfg(test)]
mod tests;
