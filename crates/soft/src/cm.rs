//! Connecting queue pairs of a soft device.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmError, CmEvent, CmId, Endpoint};
use rdmux_rnic::{Path, Psn, QpAttributes, QpState, QpType, Qpn};
use rdmux_verbs::provider::{
    self, ACK_TIMEOUT, Connection as _, Seen, accepting_type, deadline_after, own, transport_of,
};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{Arrival, ConnectError, ConnectPair, ConnectParams, EventQueue, ListenError, Progress};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};

use super::device::Device;
use super::engine::{CmQueue, CmSink, ConnectionEntry, Core, ListenerEntry, path_mtu_to};
use super::qp::QueuePair;

/// Window towards a peer that is not rdmux and so does not announce how much it can receive.
const FOREIGN_WINDOW_BYTES: u32 = 64 << 10;
/// Longest wait for the peer's last message.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);

impl Device {
    /// Sleeps until an inbox has changed since a moment. Returns false at the deadline.
    pub(super) fn wait_changed(&self, events: &CmQueue, since: Seen, deadline: Option<Instant>) -> bool {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        !left.is_some_and(|left| left.is_zero()) && self.sleep_while(|| events.wait(since, left))
    }

    /// Waits until an attempt has a result. The engine ends an attempt that the peer does not answer.
    pub(super) fn wait_result<T>(&self, events: &CmQueue, mut poll: impl FnMut() -> Option<T>) -> T {
        loop {
            let seen = events.seen();
            if let Some(result) = poll() {
                return result;
            }
            self.wait_changed(events, seen, None);
        }
    }

    /// Ends an attempt that nobody waits for any more.
    pub(super) fn withdraw(&self, id: CmId) {
        self.with(|core, now| {
            core.rnic.cm().disconnect(now, id);
            core.forget_connection(id);
        });
    }
}

/// An attempt to connect. Dropping it withdraws it.
#[derive(Debug)]
pub(crate) struct Connecting {
    device: Device,
    pair: ConnectedPair,
    peer: SocketAddr,
    params: ConnectParams,
    private_data: Vec<u8>,
    path_mtu: PathMtu,
    events: Arc<CmQueue>,
    /// The request; `None` once it is decided.
    id: Option<CmId>,
    starting_psn: Psn,
}

impl Connecting {
    pub(super) fn start(
        device: &Device,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connecting, ConnectError> {
        let pair = ConnectedPair::of(pair)?;
        let path_mtu = path_mtu_to(device.address(), peer.ip())?.min(params.path_mtu_max);
        let mut connecting = Connecting {
            device: device.clone(),
            pair,
            peer,
            params: params.clone(),
            private_data: private_data.to_vec(),
            path_mtu,
            events: Arc::new(CmQueue::new()),
            id: None,
            starting_psn: Psn::new(0),
        };
        connecting.request()?;
        Ok(connecting)
    }

    /// Sends a request.
    fn request(&mut self) -> Result<(), ConnectError> {
        let Connecting {
            pair, peer, params, ..
        } = &*self;
        let addressing = IpAddressing {
            src_port: params.source_port,
            src: self.device.address(),
            dst: peer.ip(),
        };
        let service = params.service.unwrap_or(ServiceId::tcp(peer.port()));
        let (id, starting_psn) = self.device.with(|core, now| {
            let starting_psn = Psn::new(core.rnic.random());
            let endpoint = local_endpoint(pair, starting_psn, params, self.path_mtu);
            let (peer, cm) = (peer.ip(), core.rnic.cm());
            let id = cm.connect(
                now,
                peer,
                service,
                Some(addressing),
                &endpoint,
                &self.private_data,
            )?;
            let (sink, qpn, record) = (CmSink::of(&self.events), pair.managed(), None);
            core.add_connection(id, ConnectionEntry { sink, qpn, record });
            Ok::<_, CmError>((id, starting_psn))
        })?;
        (self.id, self.starting_psn) = (Some(id), starting_psn);
        Ok(())
    }

    /// Handles a rejection. The queue pair is as it was: it can be connected again.
    fn rejected(
        &mut self,
        reason: RejReason,
        private_data: Vec<u8>,
    ) -> Result<Option<Connection>, ConnectError> {
        self.id = None;
        if reason != RejReason::INVALID_PATH_MTU || self.path_mtu == PathMtu::Bytes256 {
            return Err(ConnectError::Rejected { reason, private_data });
        }
        // The peer's link carries smaller packets than ours: ask for a smaller path MTU.
        self.path_mtu = PathMtu::from_bytes(self.path_mtu.bytes() / 2).unwrap_or(PathMtu::Bytes256);
        self.request().map(|()| None)
    }

    /// Brings up the queue pair after the peer's answer.
    fn answered(
        &mut self,
        arrival: Arrival,
        remote: Endpoint,
        private_data: Vec<u8>,
    ) -> Result<Option<Connection>, ConnectError> {
        let Some(id) = self.id.take() else {
            return Ok(None);
        };
        let Connecting { pair, params, .. } = &*self;
        let (peer, path_mtu) = (self.peer.ip(), self.path_mtu);
        // From here on an error ends the connection, which the peer may regard as established.
        let mut connection = Connection::new(&self.device, pair.qpn, id, self.events.clone());
        let agreed = self.device.with(|core, now| {
            let remote = Endpoint {
                path_mtu,
                traffic_class: params.traffic_class,
                ..remote
            };
            let retries = (params.ack_timeout.unwrap_or(ACK_TIMEOUT), params.retry_count);
            let agreed = Agreed::new(core, pair, peer, params, &remote, self.starting_psn, retries)?;
            if pair.external {
                return Ok(agreed);
            }
            // The connection has ended since the peer answered, which moved the queue pair to Error.
            if !core.connections.contains_key(&id) {
                return Err(ConnectError::Unreachable(peer));
            }
            bring_up(core, now, &agreed)?;
            core.rnic.cm().establish(id);
            Ok(agreed)
        })?;
        if !pair.external {
            connection.known().establish(arrival);
        }
        connection.remote = Some(remote);
        connection.private_data = private_data;
        connection.agreed = Some(agreed);
        Ok(Some(connection))
    }
}

impl provider::Connecting for Connecting {
    fn poll(&mut self) -> Option<Result<Box<dyn provider::Connection>, ConnectError>> {
        loop {
            let (arrival, event) = self.events.poll()?;
            let result = match event {
                CmEvent::Reply {
                    remote, private_data, ..
                } => self.answered(arrival, remote, private_data),
                CmEvent::Rejected {
                    reason, private_data, ..
                } => self.rejected(reason, private_data),
                CmEvent::Unreachable { .. } | CmEvent::Disconnected { .. } => {
                    self.id = None;
                    Err(ConnectError::Unreachable(self.peer.ip()))
                }
                _ => continue,
            };
            return match result {
                Ok(None) => continue,
                Ok(Some(connection)) => Some(Ok(Box::new(connection))),
                Err(error) => Some(Err(error)),
            };
        }
    }

    fn wait(&mut self) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let (device, events) = (self.device.clone(), self.events.clone());
        device.wait_result(&events, || self.poll())
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.device.withdraw(id);
        }
    }
}

/// A queue pair as a connection knows it.
#[derive(Clone, Copy, Debug)]
struct ConnectedPair {
    qpn: Qpn,
    qp_type: QpType,
    srq: bool,
    /// Set when its owner brings it up.
    external: bool,
}

impl ConnectedPair {
    fn of(pair: ConnectPair<'_>) -> Result<ConnectedPair, ConnectError> {
        Ok(match pair {
            ConnectPair::Own(qp) => {
                let qp = own::<QueuePair>(qp).ok_or(ConnectError::OtherDevice)?;
                ConnectedPair {
                    qpn: qp.qpn,
                    qp_type: qp.qp_type,
                    srq: qp.has_srq,
                    external: false,
                }
            }
            ConnectPair::External(pair) => ConnectedPair {
                qpn: pair.qpn,
                qp_type: pair.qp_type,
                srq: pair.srq,
                external: true,
            },
        })
    }

    /// Returns its number, if the connection brings it up and takes it down.
    fn managed(&self) -> Option<Qpn> {
        (!self.external).then_some(self.qpn)
    }
}

fn local_endpoint(
    pair: &ConnectedPair,
    starting_psn: Psn,
    params: &ConnectParams,
    path_mtu: PathMtu,
) -> Endpoint {
    // A transport without acknowledgements has no READs, and no retries.
    let reliable = pair.qp_type != QpType::Uc;
    let if_reliable = |value: u8| if reliable { value } else { 0 };
    Endpoint {
        transport: transport_of(pair.qp_type).unwrap_or(Transport::Rc),
        qpn: pair.qpn,
        starting_psn,
        responder_resources: if_reliable(params.responder_resources),
        initiator_depth: if_reliable(params.initiator_depth),
        rnr_retry_count: if_reliable(params.rnr_retry),
        retry_count: if_reliable(params.retry_count),
        srq: pair.srq,
        ack_timeout: params.ack_timeout.unwrap_or(ACK_TIMEOUT),
        path_mtu,
        traffic_class: params.traffic_class,
        extensions: None,
        plain: pair.external,
    }
}

/// Parameters that both ends of a connection have agreed on, for bringing up a queue pair.
#[derive(Clone, Debug)]
struct Agreed {
    pair: ConnectedPair,
    path: Path,
    params: ConnectParams,
    remote: Endpoint,
    rq_psn: Psn,
    /// Local ACK timeout code and retry count.
    retries: (u8, u8),
}

impl Agreed {
    fn new(
        core: &mut Core,
        pair: &ConnectedPair,
        peer: IpAddr,
        params: &ConnectParams,
        remote: &Endpoint,
        rq_psn: Psn,
        retries: (u8, u8),
    ) -> io::Result<Agreed> {
        let path = Path {
            src: core.rnic.config().address,
            dst: peer,
            src_port: core.source_port(remote.qpn)?,
            traffic_class: remote.traffic_class,
        };
        Ok(Agreed {
            pair: *pair,
            path,
            params: params.clone(),
            remote: *remote,
            rq_psn,
            retries,
        })
    }

    /// Returns the attributes for moving the queue pair to a state, in the order Init, RTR, RTS; none for other states.
    fn attributes(&self, to: QpState) -> QpAttributes {
        match to {
            QpState::Init => QpAttributes {
                access: Some(self.params.access),
                ..Default::default()
            },
            QpState::Rtr => self.receive(),
            QpState::Rts => self.ready_to_send(),
            _ => QpAttributes::default(),
        }
    }

    fn receive(&self) -> QpAttributes {
        let qp_type = self.pair.qp_type;
        let answers = !matches!(qp_type, QpType::Uc | QpType::XrcSend);
        QpAttributes {
            path: Some(self.path),
            path_mtu: Some(self.remote.path_mtu.bytes()),
            dest_qpn: Some(self.remote.qpn),
            rq_psn: Some(self.rq_psn),
            max_dest_rd_atomic: answers.then_some(self.params.responder_resources),
            min_rnr_timer: answers.then_some(self.params.min_rnr_timer),
            ..Default::default()
        }
    }

    fn ready_to_send(&self) -> QpAttributes {
        let reliable = self.pair.qp_type != QpType::Uc;
        let asks = reliable && self.pair.qp_type != QpType::XrcRecv;
        let (ack_timeout, retry_count) = self.retries;
        // The peer's responder resources bound the initiator depth: of some peers they are 0.
        let depth = self.params.initiator_depth.min(self.remote.responder_resources);
        QpAttributes {
            sq_psn: Some(self.remote.starting_psn),
            timeout: reliable.then_some(ack_timeout),
            retry_count: asks.then_some(retry_count),
            rnr_retry: asks.then_some(self.remote.rnr_retry_count.min(self.params.rnr_retry_max).min(7)),
            max_rd_atomic: asks.then_some(depth),
            ..Default::default()
        }
    }
}

/// Moves a queue pair from Reset to RTS as both ends agreed.
fn bring_up(core: &mut Core, now: rdmux_rnic::Time, agreed: &Agreed) -> Result<(), ConnectError> {
    let (pair, remote) = (&agreed.pair, &agreed.remote);
    let reliable = pair.qp_type != QpType::Uc;
    let config = *core.rnic.config();
    let window = match remote.extensions {
        Some(extensions) => (1u32 << extensions.receive_window_log2.min(30)).min(config.receive_window_bytes),
        None => FOREIGN_WINDOW_BYTES.min(config.receive_window_bytes),
    };
    let selective = remote.extensions.is_some_and(|extensions| extensions.selective);
    let carried_acks = remote
        .extensions
        .is_some_and(|extensions| extensions.carried_acks);
    let init = agreed.attributes(QpState::Init);
    core.rnic.modify_qp(now, pair.qpn, QpState::Init, &init)?;
    let rtr = QpAttributes {
        window_bytes: reliable.then_some(window),
        peer_is_rdmux: Some(remote.extensions.is_some()),
        selective: reliable.then_some(selective),
        carried_acks: (pair.qp_type == QpType::Rc).then_some(carried_acks),
        ..agreed.receive()
    };
    core.rnic.modify_qp(now, pair.qpn, QpState::Rtr, &rtr)?;
    core.rnic
        .modify_qp(now, pair.qpn, QpState::Rts, &agreed.ready_to_send())?;
    core.meet(pair.qpn);
    Ok(())
}

/// A service that a device offers, until it is dropped.
#[derive(Debug)]
pub(crate) struct Service {
    pub(super) device: Device,
    id: ServiceId,
    pub(super) events: Arc<CmQueue>,
    /// Reports only this service's events, for its descriptor.
    pub(super) own: EventQueue,
}

impl Service {
    pub(super) fn offer(device: &Device, id: ServiceId, datagrams: bool) -> Result<Service, ListenError> {
        let own = EventQueue::new()?;
        let events = Arc::new(CmQueue::with_events(&own));
        let sink = CmSink::of(&events);
        // Registered last of all steps that can fail: dropping a complete service unregisters it, and nothing else does.
        device.engines.register(device, id, datagrams)?;
        let mut core = device.lock();
        core.listeners.insert(id, ListenerEntry { sink, datagrams });
        core.rnic.cm().listen(id);
        drop(core);
        Ok(Service {
            device: device.clone(),
            id,
            events,
            own,
        })
    }

    /// Returns the next request; `None` at the deadline.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> Option<(Arrival, CmEvent)> {
        loop {
            let seen = self.events.seen();
            if let Some(event) = self.events.poll() {
                return Some(event);
            }
            if !self.device.wait_changed(&self.events, seen, deadline) {
                return self.events.poll();
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.device.engines.unregister(&self.device, self.id);
    }
}

impl provider::Listener for Service {
    fn accept(&self, qp_types: &[QpType], timeout: Duration) -> Option<Box<dyn provider::ConnectionRequest>> {
        let deadline = deadline_after(timeout);
        loop {
            let (
                arrival,
                CmEvent::Request {
                    id,
                    peer,
                    addressing,
                    remote,
                    private_data,
                    ..
                },
            ) = self.wait(deadline)?
            else {
                continue;
            };
            let starting_psn = Psn::new(self.device.lock().rnic.random());
            let mut request = ConnectionRequest {
                device: self.device.clone(),
                id,
                arrival,
                peer,
                peer_port: addressing.map_or(0, |from| from.src_port),
                remote,
                private_data,
                starting_psn,
                decided: false,
            };
            if qp_types.contains(&accepting_type(remote.transport)) {
                return Some(Box::new(request));
            }
            request.reject_with(RejReason::INVALID_TRANSPORT, &[], &[]);
        }
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}

/// A peer's request to connect. Dropping it undecided rejects it.
#[derive(Debug)]
pub(crate) struct ConnectionRequest {
    device: Device,
    id: CmId,
    arrival: Arrival,
    peer: IpAddr,
    peer_port: u16,
    remote: Endpoint,
    private_data: Vec<u8>,
    /// PSN at which the peer is to start sending.
    starting_psn: Psn,
    decided: bool,
}

impl ConnectionRequest {
    fn agree(&self, core: &mut Core, pair: &ConnectedPair, params: &ConnectParams) -> io::Result<Agreed> {
        let (peer, remote) = (self.peer, &self.remote);
        let ack_timeout = params.ack_timeout.unwrap_or(remote.ack_timeout.max(1));
        let retries = (ack_timeout, remote.retry_count);
        Agreed::new(core, pair, peer, params, remote, self.starting_psn, retries)
    }

    fn reject_with(&mut self, reason: RejReason, ari: &[u8], private_data: &[u8]) {
        self.decided = true;
        let id = self.id;
        self.device
            .with(|core, now| core.rnic.cm().reject_with(now, id, reason, ari, private_data));
    }
}

impl provider::ConnectionRequest for ConnectionRequest {
    fn peer(&self) -> IpAddr {
        self.peer
    }

    fn peer_port(&self) -> u16 {
        self.peer_port
    }

    fn arrival(&self) -> Arrival {
        self.arrival
    }

    fn remote(&self) -> &Endpoint {
        &self.remote
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn accept(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: provider::Prepare<'_>,
    ) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let pair = &ConnectedPair::of(pair)?;
        let local_mtu = path_mtu_to(self.device.address(), self.peer)?.min(params.path_mtu_max);
        if self.remote.path_mtu > local_mtu {
            self.reject_with(RejReason::INVALID_PATH_MTU, &[local_mtu.code()], &[]);
            return Err(ConnectError::Rejected {
                reason: RejReason::INVALID_PATH_MTU,
                private_data: Vec::new(),
            });
        }
        let events = Arc::new(CmQueue::new());
        let sink = CmSink::of(&events);
        let (id, psn, remote) = (self.id, self.starting_psn, self.remote);
        let agreed = self.device.with(|core, now| {
            let agreed = self.agree(core, pair, params)?;
            if !pair.external {
                bring_up(core, now, &agreed)?;
                core.rnic.tell_first_request(pair.qpn);
            }
            Ok::<_, ConnectError>(agreed)
        })?;
        let mut connection = Connection::new(&self.device, pair.qpn, id, events);
        let accept = || {
            self.device.with(|core, now| {
                let mut local = local_endpoint(pair, psn, params, remote.path_mtu);
                local.initiator_depth = local.initiator_depth.min(remote.responder_resources);
                let accepted = core.rnic.cm().accept(now, id, &local, private_data);
                // Inserted only after the accept: a request that the peer has withdrawn meanwhile would leave its entry behind.
                if accepted.is_ok() {
                    let (qpn, record) = (pair.managed(), None);
                    let entry = ConnectionEntry { sink, qpn, record };
                    core.add_connection(id, entry);
                    core.record(id);
                }
                accepted.map_err(ConnectError::from)
            })
        };
        prepare().and_then(|()| accept()).inspect_err(|_| {
            // Otherwise the queue pair would send, and receive, without a connection.
            if let Some(qpn) = pair.managed() {
                self.device.with(|core, now| {
                    let _ = core
                        .rnic
                        .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
                });
            }
        })?;
        self.decided = true;
        connection.remote = Some(remote);
        connection.agreed = Some(agreed);
        connection.private_data = std::mem::take(&mut self.private_data);
        Ok(Box::new(connection))
    }

    fn attributes(&self, to: QpState, params: &ConnectParams) -> Result<QpAttributes, ConnectError> {
        let pair = ConnectedPair {
            qpn: Qpn::new(0),
            qp_type: accepting_type(self.remote.transport),
            srq: false,
            external: true,
        };
        let agreed = self.device.with(|core, _| self.agree(core, &pair, params))?;
        Ok(agreed.attributes(to))
    }

    fn pass_to(&mut self, engine: &rdmux_verbs::Device) -> bool {
        let engine = own::<Device>(engine);
        let Some(engine) = engine.filter(|engine| Arc::ptr_eq(&self.device.engines, &engine.engines)) else {
            return false;
        };
        self.decided = true;
        engine.engines.pass(&self.device, self.id, engine);
        true
    }

    fn reject(&mut self, private_data: &[u8]) {
        self.reject_with(RejReason::CONSUMER, &[], private_data);
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.decided {
            self.reject_with(RejReason::CONSUMER, &[], &[]);
        }
    }
}

/// A connection of a queue pair. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Connection {
    device: Device,
    qpn: Qpn,
    id: CmId,
    events: Arc<CmQueue>,
    remote: Option<Endpoint>,
    agreed: Option<Agreed>,
    private_data: Vec<u8>,
    /// Progress according to the events that were taken.
    known: Mutex<Progress>,
    /// Set when this side has ended it.
    left: AtomicBool,
}

impl Connection {
    fn new(device: &Device, qpn: Qpn, id: CmId, events: Arc<CmQueue>) -> Connection {
        Connection {
            device: device.clone(),
            qpn,
            id,
            events,
            remote: None,
            agreed: None,
            private_data: Vec::new(),
            known: Mutex::default(),
            left: AtomicBool::new(false),
        }
    }

    fn known(&self) -> MutexGuard<'_, Progress> {
        self.known.lock()
    }

    /// Waits until `done` holds; returns false at the deadline.
    fn wait_until(&self, deadline: Option<Instant>, done: impl Fn(Progress) -> bool) -> bool {
        loop {
            let seen = self.events.seen();
            if done(self.progress()) {
                return true;
            }
            if !self.device.wait_changed(&self.events, seen, deadline) {
                return done(self.progress());
            }
        }
    }
}

impl provider::Connection for Connection {
    fn remote(&self) -> Option<&Endpoint> {
        self.remote.as_ref()
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }

    fn progress(&self) -> Progress {
        // Locked while events are taken, so that another thread that finds none left sees their effect.
        let mut known = self.known();
        while let Some((arrival, event)) = self.events.poll() {
            match event {
                CmEvent::Established { .. } => known.establish(arrival),
                CmEvent::Disconnected { .. } | CmEvent::Unreachable { .. } | CmEvent::Rejected { .. } => {
                    known.end(arrival);
                }
                _ => {}
            }
        }
        *known
    }

    fn attributes(&self, to: QpState) -> Option<QpAttributes> {
        Some(self.agreed.as_ref()?.attributes(to))
    }

    fn establish(&self) {
        self.device.with(|core, _| core.rnic.cm().establish(self.id));
        self.known().establish(Arrival::next());
    }

    fn wait_established(&self) -> bool {
        self.wait_until(deadline_after(ESTABLISH_TIMEOUT), |progress| {
            progress.established.or(progress.ended).is_some()
        });
        let established = self.progress().established.is_some();
        if !established {
            self.disconnect();
        }
        established
    }

    fn rests_for(&self) -> Option<Duration> {
        self.device.with(|core, now| {
            let until = core.rnic.cm().next_deadline(self.id)?;
            // The engine may handle the deadline a moment later.
            Some(Duration::from_nanos(until.since_ns(now)).max(Duration::from_millis(1)))
        })
    }

    fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(deadline_after(timeout), |progress| progress.ended.is_some())
    }

    fn disconnect(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let (id, qpn) = (self.id, self.qpn);
        let established = self.progress().established.is_some();
        self.device.with(|core, now| {
            core.say_last(now, qpn);
            // After the end of a connection its owner may use the queue pair again.
            let entry = core.connections.get_mut(&id);
            if entry.is_some_and(|entry| entry.qpn.take().is_some()) {
                core.disconnected(id, qpn);
                let _ = core
                    .rnic
                    .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
            }
            core.rnic.cm().disconnect(now, id);
            if !established {
                // No further event comes for it.
                core.forget_connection(id);
            }
        });
        if !established {
            self.known().end(Arrival::next());
            self.events.wake();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use rdmux_verbs::QpOptions;

    use super::*;
    use crate::testing::open;

    #[test]
    fn ready_to_send__asks_nothing_of_a_peer_that_answers_nothing() {
        let device = open(IpAddr::from([127, 0, 14, 6])).unwrap();
        let cq = device.create_cq(16).unwrap();
        let qp = device
            .alloc_pd()
            .unwrap()
            .create_qp(&QpOptions::new(&cq))
            .unwrap();
        let (pair, params) = (
            ConnectedPair::of(ConnectPair::Own(&qp)).unwrap(),
            ConnectParams::default(),
        );
        let qp = own::<QueuePair>(&qp).unwrap();
        for (resources, depth) in [(0, 0), (4, 4), (255, params.initiator_depth)] {
            let remote = Endpoint {
                responder_resources: resources,
                ..local_endpoint(&pair, Psn::new(0), &params, PathMtu::Bytes1024)
            };
            let agreed = qp.device.with(|core, _| {
                let peer = IpAddr::from([127, 0, 14, 6]);
                Agreed::new(core, &pair, peer, &params, &remote, Psn::new(0), (14, 7)).unwrap()
            });
            let rts = agreed.ready_to_send();
            assert_eq!(rts.max_rd_atomic, Some(depth));
        }
    }
}
