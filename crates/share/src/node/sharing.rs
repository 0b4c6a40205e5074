//! Connections of applications on shared queue pairs of the node's device.
//!
//! [`Sharing`] decides where the connection of an application's RC queue pair goes: once it is to be RTR, the peer's node is asked. If there is
//! one, the connection goes over a queue pair that connections of both tenants and this class share ([`Mux`]), and the application's queue pair
//! is one of the device by its number alone: the device's stays in Init. Otherwise the device's own goes to RTR as the application has asked.
//! Until that is known, requests wait in their flow and receives here.
//!
//! It waits for nothing. Its owner calls [`Sharing::look`] and [`Sharing::poll`] in its loop, and takes [`Sharing::next_news`].

use std::collections::{HashMap, VecDeque};
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

use super::egress::{self, Egress, FlowId, GroupId, GroupOptions, Owner, PieceId};
use super::mux::keys::{Extent, Keys, OwnRegions, PeerKey, PeerKeys};
use super::mux::receiver::Receiver;
use super::mux::sender;
use super::mux::{
    Admission, Bound, ConnectionId, Event, Failure, Mux, Post, Posted, Received, Violation, flushed,
};
use super::peer::{
    Asked, DOUBT_AFTER, Ended, PeerEvent, PeerId, Peers, PeersError, RECEIVE, RemoteKey, SENDS, SLOTS,
    SharedBy, SharedId, Shares,
};
use super::quarantine::Quarantine;
use super::snapshot::{self, Route};
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
    may_be_told: bool,
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

/// The memory of a region that was deregistered, on shared queue pairs.
#[derive(Debug)]
struct Retired {
    _shadow: Arc<MemoryRegion>,
    /// The key of the application's region.
    lkey: LKey,
    in_flight: InFlight,
    /// Connections whose peers may write into it: they were told of receives that have it.
    writers: Vec<(SharedId, ConnectionId)>,
}

/// A shared queue pair.
// The buffers' region ends before their memory.
#[derive(Debug)]
struct Line {
    mux: Mux,
    /// In the scheduler, once there is a connection.
    group: Option<GroupId>,
    buffers_region: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    peer: PeerId,
    by: SharedBy,
    /// [`Mux::activity`] as the queue pair was asked whether it can go, and how often it has stayed since it was not in use.
    seen: (u64, u32),
    /// [`Mux::oldest`] when it was last looked at.
    oldest: Option<u64>,
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

/// See the module.
#[derive(Debug)]
pub(super) struct Sharing {
    peers: Peers,
    lines: HashMap<SharedId, Line>,
    /// Those of `lines`, for passes over all of them.
    order: Vec<SharedId>,
    qps: HashMap<Qpn, Virtual>,
    flows: HashMap<FlowId, Qpn>,
    connections: HashMap<(SharedId, ConnectionId), Qpn>,
    regions: OwnRegions<OwnRegion>,
    /// Keys of own regions, by those on shared queue pairs.
    by_shadow: HashMap<u32, LKey>,
    keys: HashMap<PeerId, PeerKeys>,
    tickets: HashMap<u64, (PeerId, u64, RKey)>,
    ticket: u64,
    /// Memory that was deregistered, kept for what is in flight.
    retired: Vec<Retired>,
    /// Peers' questions about keys that are going, and what is in flight with them.
    going: Vec<(Asked, InFlight)>,
    /// Keys of regions that peers no longer use.
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
    /// Time of the next look at what has not arrived.
    stalls_at: Instant,
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
        region.may_be_told |= access.contains(Access::LOCAL_WRITE);
        let shadow = region.shadow.as_ref()?;
        Some((shadow.lkey(), shadow.rkey()))
    }

    fn peer(&mut self, domain: u64, rkey: RKey, range: (u64, u64), access: Access) -> PeerKey {
        self.of_peer.get(domain, rkey, range, access)
    }
}

/// Returns the state machine of a shared queue pair, and the keys for it.
macro_rules! line {
    ($sharing:expr, $id:expr) => {{
        let sharing: &mut Sharing = $sharing;
        match sharing.lines.get_mut(&$id) {
            Some(line) => {
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

impl Sharing {
    /// Begins to share queue pairs with nodes that have the same key.
    pub(super) fn open(
        events: &EventQueue,
        egress: &mut Egress<SendRequest>,
        shares: Shares,
    ) -> Result<Sharing, PeersError> {
        Ok(Sharing {
            peers: Peers::open(events, shares)?,
            lines: HashMap::new(),
            order: Vec::new(),
            qps: HashMap::new(),
            flows: HashMap::new(),
            connections: HashMap::new(),
            regions: OwnRegions::default(),
            by_shadow: HashMap::new(),
            keys: HashMap::new(),
            tickets: HashMap::new(),
            ticket: 0,
            retired: Vec::new(),
            regions_gone: Vec::new(),
            going: Vec::new(),
            tenant: egress.add_tenant(&Entitlement::default()),
            news: VecDeque::new(),
            found: VecDeque::new(),
            list_of: None,
            list: Vec::new(),
            ending: Vec::new(),
            yielding: Vec::new(),
            stalls_at: Instant::now(),
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
            may_be_told: false,
        };
        self.regions.insert(domain, keys, extent, region);
    }

    /// Removes a region, as its application deregisters it. Returns false if peers know its key: it stays until they no longer use it
    /// ([`Sharing::next_region_gone`]).
    pub(super) fn remove_region(&mut self, now: Instant, region: MemoryRegion) -> bool {
        let lkey = region.lkey();
        if let Some((domain, removed)) = self.regions.remove(lkey)
            && let Some(shadow) = removed.shadow
        {
            self.by_shadow.remove(&shadow.lkey().0);
            let lines = self.lines.iter().filter(|_| removed.may_be_told);
            let writers = lines.flat_map(|(id, line)| {
                let writers = line.mux.writers(domain, lkey);
                writers.map(|connection| (*id, connection))
            });
            let retired = Retired {
                _shadow: shadow,
                lkey,
                in_flight: self.in_flight(|_| true),
                writers: writers.collect(),
            };
            self.retired.push(retired);
        }
        self.peers.remove_region(now, region).is_some()
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

    /// Lets go of what nothing in flight needs any more.
    fn release(&mut self) {
        let mut retired = std::mem::take(&mut self.retired);
        retired.retain_mut(|one| {
            let lkey = one.lkey;
            one.writers.retain(|(id, connection)| {
                let line = self.lines.get(id);
                line.is_some_and(|line| line.mux.may_be_written(*connection, lkey))
            });
            !one.writers.is_empty() || self.is_in_flight(&one.in_flight)
        });
        self.retired = retired;
        for (asked, in_flight) in std::mem::take(&mut self.going) {
            match self.is_in_flight(&in_flight) {
                true => self.going.push((asked, in_flight)),
                false => self.peers.key_unused(Instant::now(), asked),
            }
        }
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
        let (name, tenant) = match (TenantName::new(tenant.0), tenant.1) {
            (Some(name), Some(tenant)) => (name, tenant),
            _ => (TenantName::default(), self.tenant),
        };
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

    /// Removes a queue pair.
    pub(super) fn remove_qp(&mut self, now: Instant, qpn: Qpn) {
        self.leave(qpn);
        if let Some(removed) = self.qps.remove(&qpn) {
            self.flows.remove(&removed.flow);
        }
        self.peers.remove_qp(now, qpn);
    }

    /// Ends the connection of a queue pair, whose application hears no more of it.
    fn leave(&mut self, qpn: Qpn) {
        let Some(left) = self.qps.get_mut(&qpn) else {
            return;
        };
        if let Stage::Shared(id, connection) = std::mem::replace(&mut left.stage, Stage::Over) {
            self.connections.remove(&(id, connection));
            if let Some(line) = self.lines.get_mut(&id) {
                line.mux.abandon(connection);
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
                let (class, in_flight_bytes, window_bytes) = egress.state_of_group(now, line.group?)?;
                Some(snapshot::SharedQp {
                    id: id.0,
                    peer: by.peer.address,
                    tenant: by.here.to_string(),
                    peer_tenant: by.there.to_string(),
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
                qp.state = to;
                if let Some(line) = self.lines.get_mut(id) {
                    line.mux.fail(*connection);
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
                let line = self.lines.get_mut(id).ok_or(PostError::NoQp)?;
                line.mux.post_recv(*connection, receive)?;
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

    // Requests.

    fn of_flow(&self, flow: FlowId) -> Option<(SharedId, ConnectionId)> {
        match self.qps.get(self.flows.get(&flow)?)?.stage {
            Stage::Shared(id, connection) => Some((id, connection)),
            _ => None,
        }
    }

    /// Adds a piece to those that [`Sharing::post_list`] posts. Returns false if its flow goes over the device's own queue pair.
    pub(super) fn add_piece(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        piece: &egress::Piece,
    ) -> bool {
        let Some((id, connection)) = self.of_flow(piece.flow) else {
            return false;
        };
        let Some((line, mut keys)) = line!(self, id) else {
            egress.refused(now, piece, Status::LocalQpOperation);
            return true;
        };
        let Some(request) = egress.body(piece) else {
            egress.refused(now, piece, Status::LocalQpOperation);
            return true;
        };
        let part = (piece.offset, piece.length);
        let tag = piece.id.wr_id();
        let posts = line
            .mux
            .send(connection, request, part, piece.last, tag, &mut keys);
        match posts {
            Ok(posts) => {
                if piece.last {
                    egress.take_body(piece);
                }
                if self.list_of != Some(id) {
                    self.post_list();
                    self.list_of = Some(id);
                }
                self.list.extend([posts.first, posts.then].into_iter().flatten());
            }
            Err(status) => egress.refused(now, piece, status),
        }
        true
    }

    /// Posts the requests of pieces that wait for it.
    pub(super) fn post_list(&mut self) {
        let Some(id) = self.list_of.take() else { return };
        let mut list = std::mem::take(&mut self.list);
        self.post_all(id, list.drain(..));
        self.list = list;
    }

    /// Posts requests to a shared queue pair, in this order. If one is not, the queue pair ends, and the next one has those behind it.
    fn post_all(&mut self, id: SharedId, posts: impl IntoIterator<Item = Post>) {
        let (mut numbers, mut requests) = (Vec::new(), Vec::new());
        let mut refused = None;
        for post in posts {
            numbers.push(post.number);
            if refused.is_none() {
                match self.request_of(id, post) {
                    Ok(request) => requests.push(request),
                    Err(reason) => refused = Some(reason),
                }
            }
        }
        let count = requests.len();
        let posted =
            self.peers
                .shared_qp(id)
                .map_or(0, |shared| match shared.qp().post_send_list(requests) {
                    Ok(()) => count,
                    Err(error) => error.index,
                });
        let Some(not_posted) = numbers.get(posted..).filter(|rest| !rest.is_empty()) else {
            return;
        };
        if let Some(line) = self.lines.get_mut(&id) {
            for (nth, number) in (posted..).zip(not_posted) {
                match refused {
                    Some(NotPosted::Memory) if nth == count && posted == count => {
                        line.mux.refused(*number, Status::LocalProtection);
                    }
                    _ => line.mux.not_posted(*number),
                }
            }
        }
        self.peers.end_qp(Instant::now(), id);
    }

    /// Returns a request for the device.
    fn request_of(&self, id: SharedId, post: Post) -> Result<SendRequest, NotPosted> {
        let Some(line) = self.lines.get(&id) else {
            return Err(NotPosted::Device);
        };
        let (operation, sges) = match post.request {
            Posted::Direct(operation, list) => (operation, list),
            Posted::Message { buffer, header, body } => {
                let at = usize::from(buffer) * SLOT_LEN;
                let inline = body.as_inline().unwrap_or_default();
                let bytes = [&header[..], inline].concat();
                let written = line.buffers.write_in_any_order(at as u64, &bytes);
                written.map_err(|_| NotPosted::Device)?;
                let own = line.buffers_region.sge(at as u64, bytes.len() as u32);
                let list: SgeList = match body.as_slice() {
                    [] => own.into(),
                    [only] => [own, *only].as_slice().into(),
                    all if all.len() < rdmux_rnic::SGE_MAX => {
                        let all: Vec<Sge> = std::iter::once(own).chain(all.iter().copied()).collect();
                        all.as_slice().into()
                    }
                    all => {
                        // One element more than a request can have.
                        let bytes = self.read_shadows(all).ok_or(NotPosted::Memory)?;
                        let behind = (at + HEADER_LEN) as u64;
                        let written = line.buffers.write_in_any_order(behind, &bytes);
                        written.map_err(|_| NotPosted::Device)?;
                        let length = (HEADER_LEN + bytes.len()) as u32;
                        line.buffers_region.sge(at as u64, length).into()
                    }
                };
                (rdmux_rnic::Operation::Send { imm: None }, list)
            }
        };
        Ok(SendRequest {
            wr_id: post.number,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })
    }

    /// Returns the bytes of elements with keys of shared queue pairs.
    fn read_shadows(&self, list: &[Sge]) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        for sge in list {
            let region = self.regions.of_lkey(*self.by_shadow.get(&sge.lkey)?)?;
            let mut bytes = vec![0; sge.length as usize];
            let at = region.place(sge.addr)?;
            region.spec.memory.read(at, &mut bytes).ok()?;
            all.extend(bytes);
        }
        Some(all)
    }

    /// Writes bytes to elements with keys of shared queue pairs. Returns false if their memory is gone.
    fn write_shadows(&self, list: &[Sge], bytes: &[u8]) -> bool {
        let mut rest = bytes;
        list.iter().all(|sge| {
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            rest = later;
            let region = self
                .by_shadow
                .get(&sge.lkey)
                .and_then(|lkey| self.regions.of_lkey(*lkey));
            let place = region.and_then(|region| Some((region, region.place(sge.addr)?)));
            place.is_some_and(|(region, at)| region.spec.memory.write_in_any_order(at, now).is_ok())
        })
    }

    // Messages and events.

    /// Handles the control channel. Returns whether there was anything.
    pub(super) fn look(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let instant = Instant::now();
        self.look_at_stalls(instant);
        let any = self.peers.look(instant);
        self.handle_events(egress, now) || any
    }

    /// Doubts the peers that have taken nothing since the last look: their nodes may have ended.
    fn look_at_stalls(&mut self, now: Instant) {
        if now < self.stalls_at {
            return;
        }
        self.stalls_at = now + DOUBT_AFTER;
        for line in self.lines.values_mut() {
            let oldest = line.mux.oldest();
            let before = std::mem::replace(&mut line.oldest, oldest);
            if oldest.is_some() && before == oldest {
                self.peers.doubt(now, line.peer.address);
            }
        }
    }

    /// Handles a token of the node's event queue.
    pub(super) fn happened(&mut self, egress: &mut Egress<SendRequest>, now: Time, token: u64) {
        self.peers.happened(Instant::now(), token);
        self.handle_events(egress, now);
    }

    /// Returns when [`Sharing::look`] is to be called.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        let yielding = self.yielding.iter().map(|(_, until)| *until);
        let is_busy = self.lines.values().any(|line| line.mux.oldest().is_some());
        let stalls_at = is_busy.then_some(self.stalls_at);
        yielding.chain(stalls_at).chain(self.peers.deadline()).min()
    }

    /// Prepares a sleep. Returns false if there is something to do.
    pub(super) fn prepare_sleep(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        mut watch: Option<&mut EngineWatch>,
    ) -> bool {
        arm(self.peers.shared_cq(), watch.as_deref_mut());
        let sleeps = self.peers.prepare_sleep(Instant::now(), watch);
        !self.handle_events(egress, now) && !self.poll(egress, now) && sleeps
    }

    /// Takes the key of a region that is gone, after [`Sharing::remove_region`].
    pub(super) fn next_region_gone(&mut self) -> Option<RKey> {
        self.regions_gone.pop()
    }

    /// Takes what a person should know.
    pub(super) fn take_warnings(&mut self) -> Vec<String> {
        self.peers.take_warnings()
    }

    /// Takes the slot of an application that gets queue pairs of its own from now on, since it has made too many shared ones fail.
    pub(super) fn next_quarantined(&mut self) -> Option<u32> {
        self.quarantined.pop()
    }

    /// Forgets an application, which has left.
    pub(super) fn forget_application(&mut self, slot: u32) {
        self.quarantine.forget(slot);
    }

    /// Takes news for an application.
    pub(super) fn next_news(&mut self) -> Option<(Owner, News)> {
        self.news.pop_front()
    }

    /// Handles completions of shared queue pairs. Returns whether there were any.
    pub(super) fn poll(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let mut found = std::mem::take(&mut self.found);
        let count = self.peers.shared_cq().poll_many(BATCH, &mut found);
        if count > 0 {
            // Control messages that were sent before come first.
            self.look(egress, now);
        }
        for wc in found.drain(..) {
            let Some(id) = self.peers.shared_by_qpn(wc.qpn) else {
                continue;
            };
            if wc.wr_id & RECEIVE == 0 {
                if let Some(line) = self.lines.get_mut(&id) {
                    line.mux.handle_completion(wc.wr_id, wc.status);
                }
            } else {
                if let Some(shared) = self.peers.shared_qp(id) {
                    shared.slot_came();
                }
                if wc.status == Status::Success {
                    self.message(id, (wc.wr_id & !RECEIVE) as u16, wc.byte_len);
                }
            }
            if wc.status != Status::Success {
                self.peers.end_qp(Instant::now(), id);
            }
        }
        self.found = found;
        self.work(egress, now);
        count > 0
    }

    /// Handles a message in a slot.
    fn message(&mut self, id: SharedId, slot: u16, length: u32) {
        let mut bytes = vec![0; (length as usize).min(SLOT_LEN)];
        let Some(shared) = self.peers.shared_qp(id) else {
            return;
        };
        // The slot is free once its bytes are here.
        if shared.read_slot(slot, 0, &mut bytes).is_err() {
            return self.fail_line(id);
        }
        if !self.ending.contains(&id) && shared.post_slot(slot).is_err() {
            self.peers.end_qp(Instant::now(), id);
        }
        // The peer may be a little ahead.
        if !self.lines.contains_key(&id) && !self.add_line(id) {
            return self.fail_line(id);
        }
        let Some((line, mut keys)) = line!(self, id) else {
            return;
        };
        let received = line.mux.handle_message(&bytes, &mut keys);
        self.received(id, &bytes, received);
    }

    fn received(&mut self, id: SharedId, bytes: &[u8], received: Result<Option<Received>, Violation>) {
        let mut received = match received {
            Ok(Some(received)) => received,
            Ok(None) => return,
            Err(_) => return self.fail_line(id),
        };
        let Some(qpn) = self.connections.get(&(id, received.id)).copied() else {
            return;
        };
        let Some((owner, domain)) = self.qps.get(&qpn).map(|qp| (qp.owner, qp.domain)) else {
            return;
        };
        let body = bytes.get(HEADER_LEN..).unwrap_or_default();
        for copy in &received.copies {
            let bytes = body.get(copy.from..copy.from + copy.to.length as usize);
            let range = (copy.to.addr, u64::from(copy.to.length));
            let region = self
                .regions
                .get(domain, LKey(copy.to.lkey), range, Access::LOCAL_WRITE);
            let written = region.zip(bytes).is_some_and(|(region, bytes)| {
                let at = region.place(copy.to.addr);
                at.is_some_and(|at| region.spec.memory.write_in_any_order(at, bytes).is_ok())
            });
            if !written {
                received.completion.status = Status::LocalQpOperation;
            }
        }
        self.news.push_back((owner, News::Received(received.completion)));
        if received.completion.status != Status::Success
            && let Some(line) = self.lines.get_mut(&id)
        {
            line.mux.fail(received.id);
        }
    }

    /// Ends a shared queue pair for good, with its connections.
    fn fail_line(&mut self, id: SharedId) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.mux.close();
        }
        self.peers.fail_qp(Instant::now(), id);
    }

    /// Posts the messages of the nodes, and handles what has happened to connections and queue pairs.
    pub(super) fn work(&mut self, egress: &mut Egress<SendRequest>, now: Time) {
        loop {
            for at in (0..self.order.len()).rev() {
                self.work_on(egress, now, self.order[at]);
            }
            self.ask_for_keys();
            self.look_at_ending();
            self.look_at_yielding();
            if !self.take_events(egress, now) {
                break;
            }
        }
        if !self.retired.is_empty() || !self.going.is_empty() {
            self.release();
        }
    }

    fn work_on(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        if let Some(line) = self.lines.get_mut(&id) {
            let qps = &self.qps;
            line.mux.answer_strays(|qpn| {
                let stage = qps.get(&qpn).map(|qp| &qp.stage);
                matches!(stage, Some(Stage::Asking | Stage::Wanting(..)))
            });
        }
        while let Some((line, mut keys)) = line!(self, id) {
            let Some(post) = line.mux.poll_message(&mut keys) else {
                break;
            };
            self.post_all(id, [post]);
        }
        while let Some(event) = self.lines.get_mut(&id).and_then(|line| line.mux.poll_event()) {
            self.connection_has_news(egress, now, id, event);
        }
        let Some(line) = self.lines.get(&id) else { return };
        if line.mux.wants_to_resume() {
            self.peers.want_qp(Instant::now(), &line.by);
        } else if line.mux.is_unused() && self.peers.shared_qp(id).is_none() {
            self.peers.forget_qp(Instant::now(), id);
            self.remove_line(egress, id);
        }
    }

    /// Tells which queue pairs have nothing more to come.
    fn look_at_ending(&mut self) {
        for id in std::mem::take(&mut self.ending) {
            let slots = self.peers.shared_qp(id).map_or(0, |shared| shared.slots_out());
            let is_drained = self.lines.get(&id).is_none_or(|line| line.mux.is_drained());
            match slots == 0 && is_drained {
                true => self.drained(id),
                false => self.ending.push(id),
            }
        }
    }

    /// Decides whether a queue pair goes so that another one has its place. One that was used since it was asked before stays, a few times.
    fn may_end(&mut self, id: SharedId) {
        let now = Instant::now();
        let Some(line) = self.lines.get_mut(&id) else {
            return self.peers.may_end(now, id, true);
        };
        let activity = line.mux.activity();
        let (before, stayed) = line.seen;
        if activity != before && stayed < STAYS_MAX {
            line.seen = (activity, stayed + 1);
            return self.peers.may_end(now, id, false);
        }
        line.seen = (activity, 0);
        line.mux.hold();
        self.yielding.push((id, now + HOLD_TIME));
    }

    /// Lets go of queue pairs on which nothing is in flight any more.
    fn look_at_yielding(&mut self) {
        for (id, until) in std::mem::take(&mut self.yielding) {
            let now = Instant::now();
            let Some(line) = self.lines.get_mut(&id) else {
                continue;
            };
            let is_held = line.mux.is_held();
            if is_held && !line.mux.is_empty() && now < until {
                self.yielding.push((id, until));
                continue;
            }
            let may = is_held && line.mux.is_empty();
            if is_held && !may {
                let posts = line.mux.resume();
                self.post_all(id, posts);
            }
            // One that has ended meanwhile needs no answer.
            self.peers.may_end(now, id, may);
        }
    }

    fn drained(&mut self, id: SharedId) {
        let line = self.lines.get(&id);
        let messages = line.map_or(0, |line| line.mux.messages_handled());
        self.peers.drained(Instant::now(), id, messages);
    }

    fn connection_has_news(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        id: SharedId,
        event: Event,
    ) {
        let qp_of = |sharing: &Sharing, connection| {
            let qpn = sharing.connections.get(&(id, connection))?;
            let qp = sharing.qps.get(qpn)?;
            Some((*qpn, qp.owner, qp.flow))
        };
        match event {
            Event::Wake(connection) => {
                if let Some((_, _, flow)) = qp_of(self, connection) {
                    egress.release(now, flow);
                }
            }
            Event::Landed(tag, status) => {
                if let Some(piece) = PieceId::of_wr_id(tag) {
                    match status {
                        Status::Success => egress.completed(now, piece),
                        failed => egress.failed(now, piece, failed),
                    }
                }
            }
            Event::Answer(connection, list, original) => {
                if !self.write_shadows(list.as_slice(), &original.to_ne_bytes())
                    && let Some(line) = self.lines.get_mut(&id)
                {
                    line.mux.fail(connection);
                }
            }
            Event::Culprit(connection) => {
                if let Some((_, owner, _)) = qp_of(self, connection)
                    && self.quarantine.caused(Instant::now(), owner.application)
                {
                    self.quarantined.push(owner.application);
                }
            }
            Event::Received(connection, completion) => {
                if let Some((_, owner, _)) = qp_of(self, connection) {
                    self.news.push_back((owner, News::Received(completion)));
                }
            }
            Event::Failed(connection, failure) => {
                if let Some((qpn, owner, flow)) = qp_of(self, connection) {
                    egress.fail(now, flow);
                    if let Some(qp) = self.qps.get_mut(&qpn) {
                        qp.state = QpState::Error;
                    }
                    self.news.push_back((owner, News::Failed(failure)));
                }
            }
            Event::Ended(_) => {}
        }
    }

    fn ask_for_keys(&mut self) {
        let mut asked = Vec::new();
        for (peer, keys) in &mut self.keys {
            while let Some((domain, rkey)) = keys.poll_wanted() {
                asked.push((*peer, domain, rkey));
            }
        }
        for (peer, domain, rkey) in asked {
            self.ticket += 1;
            self.tickets.insert(self.ticket, (peer, domain, rkey));
            self.peers
                .resolve_key(Instant::now(), peer, (domain, rkey), self.ticket);
        }
    }

    fn handle_events(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let any = self.take_events(egress, now);
        if any {
            self.work(egress, now);
        }
        any
    }

    fn take_events(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let mut any = false;
        while let Some(event) = self.peers.next_event() {
            any = true;
            self.handle_event(egress, now, event);
        }
        any
    }

    fn handle_event(&mut self, egress: &mut Egress<SendRequest>, now: Time, event: PeerEvent) {
        match event {
            PeerEvent::Bound {
                qpn,
                peer,
                dest,
                binding,
            } => self.bound(egress, now, qpn, (peer, dest), &binding),
            PeerEvent::Own { qpn, .. } => {
                if self
                    .qps
                    .get(&qpn)
                    .is_some_and(|qp| matches!(qp.stage, Stage::Asking))
                {
                    self.becomes_own(qpn);
                }
            }
            // A connection that is on a shared queue pair tells by itself, in order, when it ends.
            PeerEvent::Unbound { qpn } => {
                let waits = |qp: &Virtual| matches!(qp.stage, Stage::Wanting(..));
                if self.qps.get(&qpn).is_some_and(waits) {
                    self.fail_unbound(qpn, Failure::Shared);
                }
            }
            // Nobody would tell when a key of it is gone, and its next run gives other names.
            PeerEvent::Gone { peer } => {
                self.keys.remove(&peer);
                self.tickets.retain(|_, (of, ..)| *of != peer);
            }
            PeerEvent::RegionGone { rkey } => self.regions_gone.push(rkey),
            PeerEvent::Key { ticket, key } => self.key_told(ticket, key),
            PeerEvent::KeyGone {
                asked,
                peer,
                domain,
                rkey,
            } => {
                if let Some(keys) = self.keys.get_mut(&peer) {
                    keys.forget(domain, rkey);
                }
                let in_flight = self.in_flight(|line| line.peer == peer);
                self.going.push((asked, in_flight));
            }
            PeerEvent::QpReady { id } => self.ready(egress, now, id),
            PeerEvent::QpRefused { by } => {
                let refused = |qp: &Virtual| matches!(&qp.stage, Stage::Wanting(its, _) if *its == by);
                let qpns: Vec<Qpn> = self
                    .qps
                    .iter()
                    .filter(|(_, qp)| refused(qp))
                    .map(|(qpn, _)| *qpn)
                    .collect();
                for qpn in qpns {
                    self.fail_unbound(qpn, Failure::Shared);
                }
            }
            PeerEvent::QpEnding { id } => {
                if let Some(line) = self.lines.get_mut(&id) {
                    line.mux.stop();
                }
                self.yielding.retain(|(other, _)| *other != id);
                self.ending.push(id);
            }
            PeerEvent::QpOverdue { id } => {
                self.ending.retain(|other| *other != id);
                self.drained(id);
            }
            PeerEvent::QpEnded { id, ended } => {
                let Ended {
                    own,
                    theirs,
                    messages,
                } = *ended;
                if let Some(line) = self.lines.get_mut(&id)
                    && line.mux.carry_over(own, theirs, messages).is_err()
                {
                    self.fail_line(id);
                }
            }
            PeerEvent::MayEnd { id } => self.may_end(id),
            PeerEvent::QpGone { id } => self.gone(egress, now, id),
        }
    }

    fn key_told(&mut self, ticket: u64, key: Option<RemoteKey>) {
        let Some((peer, domain, rkey)) = self.tickets.remove(&ticket) else {
            return;
        };
        let answer = key.map(|key| {
            let extent = Extent {
                start: key.start,
                length: key.length,
                access: Access::from_bits_truncate(key.access),
            };
            (key.rkey, extent)
        });
        self.keys.entry(peer).or_default().answered(domain, rkey, answer);
        for line in self.lines.values_mut().filter(|line| line.peer == peer) {
            line.mux.keys_answered();
        }
    }

    /// Has a connection go over a shared queue pair.
    fn bound(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        qpn: Qpn,
        (peer, dest): (PeerId, Qpn),
        binding: &Binding,
    ) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let path = qp
            .states
            .first()
            .and_then(|(_, attributes)| attributes.path.as_ref());
        let (Stage::Asking, Some(path)) = (&qp.stage, path) else {
            return;
        };
        let by = SharedBy {
            peer,
            here: qp.tenant.0.clone(),
            there: binding.tenant.clone(),
            class: path.traffic_class,
        };
        let bound = Bound {
            own: qpn,
            peer: dest,
            domain: qp.domain,
            peer_domain: binding.domain,
            peer_access: Access::from_bits_truncate(binding.access),
            replays_writes: qp.replays_writes,
        };
        qp.stage = Stage::Wanting(by.clone(), bound);
        if let Some(id) = self.peers.want_qp(Instant::now(), &by) {
            self.ready(egress, now, id);
        }
    }

    /// Has the connections that wait for a shared queue pair go over it.
    fn ready(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        let Some(shared) = self.peers.shared_qp(id) else {
            return;
        };
        let by = shared.by().clone();
        let waits = |qp: &Virtual| matches!(&qp.stage, Stage::Wanting(its, _) if *its == by);
        let waiting: Vec<(Qpn, TenantId)> = self
            .qps
            .iter()
            .filter(|(_, qp)| waits(qp))
            .map(|(qpn, qp)| (*qpn, qp.tenant.1))
            .collect();
        if let Some((_, tenant)) = waiting.first().copied() {
            let has_line = self.lines.contains_key(&id) || self.add_line(id);
            if !has_line || !self.add_group(egress, now, id, tenant) {
                return self.fail_line(id);
            }
        }
        for (qpn, _) in waiting {
            self.join(egress, now, id, qpn);
        }
        if let Some(line) = self.lines.get_mut(&id) {
            let posts = line.mux.resume();
            self.post_all(id, posts);
        }
    }

    fn join(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId, qpn: Qpn) {
        let (Some(line), Some(qp)) = (self.lines.get_mut(&id), self.qps.get_mut(&qpn)) else {
            return;
        };
        let Stage::Wanting(_, bound) = &qp.stage else {
            return;
        };
        let receiver = qp
            .receiver
            .take()
            .unwrap_or_else(|| Receiver::new(qp.receives_max));
        let connection = match line.mux.bind(*bound, receiver) {
            Ok(connection) => connection,
            Err(receiver) => {
                qp.receiver = Some(receiver);
                return self.fail_unbound(qpn, Failure::Shared);
            }
        };
        qp.stage = Stage::Shared(id, connection);
        self.connections.insert((id, connection), qpn);
        if let Some(group) = line.group {
            egress.bind(now, qp.flow, group);
        }
        while let Some((line, mut keys)) = line!(self, id) {
            let Some(bytes) = line.mux.poll_early() else { break };
            let received = line.mux.handle_early(&bytes, &mut keys);
            self.received(id, &bytes, received);
        }
    }

    /// Adds the state machine of a shared queue pair, stopped. Returns false if the node has no memory for it.
    fn add_line(&mut self, id: SharedId) -> bool {
        let line = self.make_line(id);
        let is_there = line.is_some();
        if let Some(line) = line {
            self.lines.insert(id, line);
            self.order.push(id);
        }
        is_there
    }

    fn make_line(&mut self, id: SharedId) -> Option<Line> {
        let shared = self.peers.shared_qp(id)?;
        if shared.slots_there() != SLOTS {
            return None;
        }
        let by = shared.by().clone();
        let bytes = usize::from(Mux::buffers_of(SLOTS)) * SLOT_LEN;
        let buffers = Arc::new(AnonymousMemory::new(bytes).ok()?);
        let pd = self.peers.pd();
        let buffers_region = pd.reg_mr_all(buffers.clone(), 0, Access::empty()).ok()?;
        let mut mux = Mux::new(SLOTS);
        mux.stop();
        Some(Line {
            mux,
            group: None,
            buffers_region,
            buffers,
            peer: by.peer,
            by,
            seen: (0, 0),
            oldest: None,
        })
    }

    /// Adds a shared queue pair to the scheduler, for its first connection.
    fn add_group(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        id: SharedId,
        tenant: TenantId,
    ) -> bool {
        let (Some(line), Some(shared)) = (self.lines.get_mut(&id), self.peers.shared_qp(id)) else {
            return false;
        };
        let info = shared.qp().query();
        if line.group.is_none()
            && let Some(info) = info
        {
            let options = GroupOptions {
                class: class_of(line.by.class),
                path_mtu: info.path_mtu,
                depth: DEPTH,
                slots: Some(shared.rd_atomic().into()),
                may_be_quiet: false,
            };
            line.group = egress.add_group(now, tenant, &options);
        }
        self.lines.get(&id).is_some_and(|line| line.group.is_some())
    }

    /// Ends the connections of a shared queue pair that is gone.
    fn gone(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.mux.close();
        }
        self.ending.retain(|other| *other != id);
        self.yielding.retain(|(other, _)| *other != id);
        self.work_on(egress, now, id);
        let of_line: Vec<_> = self
            .connections
            .iter()
            .filter(|((its, _), _)| *its == id)
            .map(|(key, qpn)| (*key, *qpn))
            .collect();
        for (key, qpn) in of_line {
            self.connections.remove(&key);
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.stage = Stage::Over;
                egress.unbind(now, qp.flow);
            }
        }
        self.remove_line(egress, id);
    }

    fn remove_line(&mut self, egress: &mut Egress<SendRequest>, id: SharedId) {
        let Some(line) = self.lines.remove(&id) else {
            return;
        };
        self.order.retain(|other| *other != id);
        if let Some(group) = line.group {
            egress.remove_group(group);
        }
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

impl From<PeersError> for super::NodeError {
    fn from(error: PeersError) -> super::NodeError {
        super::NodeError::Peers(error)
    }
}

#[cfg(test)]
mod tests;
