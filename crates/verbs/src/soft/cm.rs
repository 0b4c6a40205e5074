//! Connecting queue pairs of a soft device.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmEvent, CmId, Endpoint};
use rdmux_rnic::{Path, Psn, QpAttributes, QpState, QpType, Qpn};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};

use super::device::Device;
use super::engine::{Accepted, CmQueue, CmSink, ConnectionEntry, Core, ListenerEntry, path_mtu_to};
use super::qp::QueuePair;
use crate::cm::{ConnectError, ConnectParams, ListenError, accepting_type, deadline_after, transport_of};

/// The window towards a peer that is not rdmux and so does not say what it can take.
const FOREIGN_WINDOW_BYTES: u32 = 64 << 10;
/// Longest wait for the peer's answer, MRAs included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the peer's last message.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);

/// Events of one connection or listener, with someone to wake.
#[derive(Debug)]
pub(super) struct Events(Arc<CmQueue>);

impl Events {
    pub(super) fn new() -> io::Result<(CmSink, Events)> {
        let queue = Arc::new(CmQueue::new()?);
        Ok((CmSink(Arc::downgrade(&queue)), Events(queue)))
    }

    /// Readable when there may be an event.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.waker().fd().as_fd()
    }

    /// The next event; sleeps until there is one. `None`: the time is over. One thread waits at a time.
    pub(super) fn wait(&self, device: &Device, deadline: Option<Instant>) -> Option<CmEvent> {
        loop {
            if let Some(event) = self.0.poll() {
                return Some(event);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !device.sleep(self.0.waker(), left) {
                self.0.waker().reset_if_woken();
                return self.0.poll();
            }
        }
    }
}

impl Device {
    pub(crate) fn listen(&self, port: u16) -> Result<Service, ListenError> {
        Service::offer(self, ServiceId::tcp(port), false)
    }

    pub(crate) fn connect(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connection, ConnectError> {
        let mut path_mtu = path_mtu_to(self.address(), peer.ip())?.min(params.path_mtu_max);
        loop {
            match self.connect_at(qp, peer, params, private_data, path_mtu) {
                // The peer's link carries less than ours: ask for less.
                Err(ConnectError::Rejected {
                    reason: RejReason::INVALID_PATH_MTU,
                    ..
                }) if path_mtu > PathMtu::Bytes256 => {
                    path_mtu = PathMtu::from_bytes(path_mtu.bytes() / 2).unwrap_or(PathMtu::Bytes256);
                }
                result => return result,
            }
        }
    }

    fn connect_at(
        &self,
        qp: &QueuePair,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
        path_mtu: PathMtu,
    ) -> Result<Connection, ConnectError> {
        let local = self.address();
        let (sink, events) = Events::new()?;
        let addressing = IpAddressing {
            src_port: 0,
            src: local,
            dst: peer.ip(),
        };
        let (id, starting_psn) = self.with(|core, now| {
            let starting_psn = Psn::new(core.rnic.random());
            let endpoint = local_endpoint(qp, starting_psn, params, path_mtu);
            let service = ServiceId::tcp(peer.port());
            let id =
                core.rnic
                    .cm()
                    .connect(now, peer.ip(), service, Some(addressing), &endpoint, private_data);
            if let Ok(id) = id {
                core.connections.insert(
                    id,
                    ConnectionEntry {
                        sink,
                        qpn: Some(qp.qpn),
                        record: None,
                    },
                );
            }
            id.map(|id| (id, starting_psn)).map_err(ConnectError::from)
        })?;
        let mut connection = Connection::new(self, qp.qpn, id, events);
        loop {
            match connection.events.wait(self, deadline_after(CONNECT_TIMEOUT)) {
                Some(CmEvent::Reply {
                    remote, private_data, ..
                }) => {
                    connection.remote = Some(remote);
                    connection.private_data = private_data;
                    let remote = Endpoint {
                        path_mtu,
                        traffic_class: params.traffic_class,
                        ..remote
                    };
                    self.with(|core, now| {
                        let retries = (params.ack_timeout, params.retry_count);
                        let rts = ready_to_send(qp, params, &remote, retries);
                        ready_to_receive(core, now, qp, peer.ip(), params, &remote, starting_psn)?;
                        core.rnic.modify_qp(now, qp.qpn, QpState::Rts, &rts)?;
                        core.rnic.cm().establish(id);
                        Ok::<_, ConnectError>(())
                    })?;
                    connection
                        .phase
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .established = true;
                    return Ok(connection);
                }
                // The queue pair stays as it was: it can be connected again.
                Some(CmEvent::Rejected {
                    reason, private_data, ..
                }) => {
                    connection.left.store(true, Ordering::Release);
                    return Err(ConnectError::Rejected { reason, private_data });
                }
                Some(CmEvent::Unreachable { .. } | CmEvent::Disconnected { .. }) | None => {
                    connection.left.store(true, Ordering::Release);
                    self.with(|core, now| {
                        core.rnic.cm().disconnect(now, id);
                        core.connections.remove(&id);
                    });
                    return Err(ConnectError::Unreachable(peer.ip()));
                }
                Some(_) => {}
            }
        }
    }
}

fn local_endpoint(qp: &QueuePair, starting_psn: Psn, params: &ConnectParams, path_mtu: PathMtu) -> Endpoint {
    // What is not acknowledged has no READs, and no retries.
    let reliable = qp.qp_type != QpType::Uc;
    let if_reliable = |value: u8| if reliable { value } else { 0 };
    Endpoint {
        transport: transport_of(qp.qp_type).unwrap_or(Transport::Rc),
        qpn: qp.qpn,
        starting_psn,
        responder_resources: if_reliable(params.responder_resources),
        initiator_depth: if_reliable(params.initiator_depth),
        rnr_retry_count: if_reliable(params.rnr_retry),
        retry_count: if_reliable(params.retry_count),
        srq: qp.has_srq,
        ack_timeout: params.ack_timeout,
        path_mtu,
        traffic_class: params.traffic_class,
        extensions: None,
    }
}

/// Moves a queue pair from Reset to RTR as both ends agreed.
fn ready_to_receive(
    core: &mut Core,
    now: rdmux_rnic::Time,
    qp: &QueuePair,
    peer: IpAddr,
    params: &ConnectParams,
    remote: &Endpoint,
    rq_psn: Psn,
) -> Result<(), ConnectError> {
    let (qpn, qp_type) = (qp.qpn, qp.qp_type);
    let reliable = qp_type != QpType::Uc;
    let answers = reliable && qp_type != QpType::XrcSend;
    let src_port = core.source_port(remote.qpn)?;
    let config = *core.rnic.config();
    let window = match remote.extensions {
        Some(extensions) => (1u32 << extensions.receive_window_log2.min(30)).min(config.receive_window_bytes),
        None => FOREIGN_WINDOW_BYTES.min(config.receive_window_bytes),
    };
    let selective = remote.extensions.is_some_and(|extensions| extensions.selective);
    let init = QpAttributes {
        access: Some(params.access),
        ..Default::default()
    };
    core.rnic.modify_qp(now, qpn, QpState::Init, &init)?;
    let rtr = QpAttributes {
        path: Some(Path {
            src: config.address,
            dst: peer,
            src_port,
            traffic_class: remote.traffic_class,
        }),
        path_mtu: Some(remote.path_mtu.bytes()),
        dest_qpn: Some(remote.qpn),
        rq_psn: Some(rq_psn),
        max_dest_rd_atomic: answers.then_some(params.responder_resources),
        min_rnr_timer: answers.then_some(params.min_rnr_timer),
        window_bytes: reliable.then_some(window),
        peer_is_rdmux: Some(remote.extensions.is_some()),
        selective: reliable.then_some(selective),
        ..Default::default()
    };
    core.rnic.modify_qp(now, qpn, QpState::Rtr, &rtr)?;
    core.meet(qpn);
    Ok(())
}

/// With what a queue pair goes from RTR to RTS as both ends agreed.
fn ready_to_send(
    qp: &QueuePair,
    params: &ConnectParams,
    remote: &Endpoint,
    (ack_timeout, retry_count): (u8, u8),
) -> QpAttributes {
    let reliable = qp.qp_type != QpType::Uc;
    let asks = reliable && qp.qp_type != QpType::XrcRecv;
    // What the peer can answer bounds what we may ask: of some peers nothing.
    let depth = params.initiator_depth.min(remote.responder_resources);
    QpAttributes {
        sq_psn: Some(remote.starting_psn),
        timeout: reliable.then_some(ack_timeout),
        retry_count: asks.then_some(retry_count),
        rnr_retry: asks.then_some(remote.rnr_retry_count.min(7)),
        max_rd_atomic: asks.then_some(depth),
        ..Default::default()
    }
}

/// A service that a device offers, until it is dropped.
#[derive(Debug)]
pub(crate) struct Service {
    pub(super) device: Device,
    id: ServiceId,
    events: Events,
}

impl Service {
    pub(super) fn offer(device: &Device, id: ServiceId, datagrams: bool) -> Result<Service, ListenError> {
        let (sink, events) = Events::new()?;
        // Last of what can fail: only a service that stands is given back when it is dropped.
        device.register_service(id)?;
        let mut core = device.lock();
        core.listeners.insert(id, ListenerEntry { sink, datagrams });
        core.rnic.cm().listen(id);
        drop(core);
        let device = device.clone();
        Ok(Service { device, id, events })
    }

    /// The next request. `None`: the time is over.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> Option<CmEvent> {
        self.events.wait(&self.device, deadline)
    }

    /// Readable when a request may have come.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.device.with(|core, now| {
            core.rnic.cm().unlisten(now, self.id);
            core.listeners.remove(&self.id);
        });
        self.device.unregister_service(self.id);
    }
}

impl Service {
    /// The next request for a connection to a queue pair of one of these types; others are refused.
    pub(crate) fn accept(&self, qp_types: &[QpType], timeout: Duration) -> Option<ConnectionRequest> {
        let deadline = deadline_after(timeout);
        loop {
            let CmEvent::Request {
                id,
                peer,
                remote,
                private_data,
                ..
            } = self.wait(deadline)?
            else {
                continue;
            };
            let mut request = ConnectionRequest {
                device: self.device.clone(),
                id,
                peer,
                remote,
                private_data,
                decided: false,
            };
            if qp_types.contains(&accepting_type(remote.transport)) {
                return Some(request);
            }
            request.reject_with(RejReason::INVALID_TRANSPORT, &[], &[]);
        }
    }
}

/// A peer's request to connect. Dropped undecided, it is refused.
#[derive(Debug)]
pub(crate) struct ConnectionRequest {
    device: Device,
    id: CmId,
    pub(crate) peer: IpAddr,
    pub(crate) remote: Endpoint,
    pub(crate) private_data: Vec<u8>,
    decided: bool,
}

impl ConnectionRequest {
    pub(crate) fn accept_after(
        &mut self,
        qp: &QueuePair,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: impl FnOnce() -> Result<(), ConnectError>,
    ) -> Result<Connection, ConnectError> {
        let local_mtu = path_mtu_to(self.device.address(), self.peer)?.min(params.path_mtu_max);
        if self.remote.path_mtu > local_mtu {
            self.reject_with(RejReason::INVALID_PATH_MTU, &[local_mtu.code()], &[]);
            return Err(ConnectError::Rejected {
                reason: RejReason::INVALID_PATH_MTU,
                private_data: Vec::new(),
            });
        }
        let (sink, events) = Events::new()?;
        let (id, peer, remote) = (self.id, self.peer, self.remote);
        let mut psn = Psn::new(0);
        self.device.with(|core, now| {
            psn = Psn::new(core.rnic.random());
            ready_to_receive(core, now, qp, peer, params, &remote, psn)
        })?;
        let retries = (remote.ack_timeout.max(1), remote.retry_count);
        let rts = ready_to_send(qp, params, &remote, retries);
        let mut connection = Connection::new(&self.device, qp.qpn, id, events);
        prepare()?;
        let accepted = self.device.with(|core, now| {
            let mut local = local_endpoint(qp, psn, params, remote.path_mtu);
            local.initiator_depth = local.initiator_depth.min(remote.responder_resources);
            let accepted = core.rnic.cm().accept(now, id, &local, private_data);
            // Not before: a request that the peer has withdrawn meanwhile would leave its entry behind.
            if accepted.is_ok() {
                let (qpn, record) = (Some(qp.qpn), None);
                let entry = ConnectionEntry { sink, qpn, record };
                core.connections.insert(id, entry);
                core.accepted.insert(qp.qpn, Accepted { id, rts });
                core.record(id);
            }
            accepted
        });
        self.decided = true;
        accepted?;
        connection.remote = Some(remote);
        connection.private_data = std::mem::take(&mut self.private_data);
        Ok(connection)
    }

    pub(crate) fn reject(&mut self, private_data: &[u8]) {
        self.reject_with(RejReason::CONSUMER, &[], private_data);
    }

    fn reject_with(&mut self, reason: RejReason, ari: &[u8], private_data: &[u8]) {
        self.decided = true;
        let id = self.id;
        self.device
            .with(|core, now| core.rnic.cm().reject_with(now, id, reason, ari, private_data));
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.decided {
            self.reject_with(RejReason::CONSUMER, &[], &[]);
        }
    }
}

/// A connection of a queue pair. Dropped, it is ended.
#[derive(Debug)]
pub(crate) struct Connection {
    device: Device,
    qpn: Qpn,
    id: CmId,
    events: Events,
    pub(crate) remote: Option<Endpoint>,
    pub(crate) private_data: Vec<u8>,
    phase: Mutex<Phase>,
    /// This side has ended it.
    left: AtomicBool,
}

/// How far a connection has come. One that ended may have been established before anybody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Phase {
    established: bool,
    ended: bool,
}

impl Connection {
    fn new(device: &Device, qpn: Qpn, id: CmId, events: Events) -> Connection {
        Connection {
            device: device.clone(),
            qpn,
            id,
            events,
            remote: None,
            private_data: Vec::new(),
            phase: Mutex::default(),
            left: AtomicBool::new(false),
        }
    }

    fn note(&self, event: &CmEvent) -> Phase {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            CmEvent::Established { .. } => phase.established = true,
            CmEvent::Disconnected { .. } | CmEvent::Unreachable { .. } | CmEvent::Rejected { .. } => {
                phase.ended = true
            }
            _ => {}
        }
        *phase
    }

    /// How far it has come by what is known now.
    fn phase(&self) -> Phase {
        while let Some(event) = self.events.0.poll() {
            self.note(&event);
        }
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`; false when the time is over.
    fn wait_until(&self, deadline: Option<Instant>, done: impl Fn(Phase) -> bool) -> bool {
        while !done(self.phase()) {
            match self.events.wait(&self.device, deadline) {
                Some(event) => self.note(&event),
                None => return done(self.phase()),
            };
        }
        true
    }

    pub(crate) fn wait_established(&self) -> bool {
        self.wait_until(deadline_after(ESTABLISH_TIMEOUT), |phase| {
            phase.established || phase.ended
        });
        let established = self.phase().established;
        if !established {
            self.disconnect();
        }
        established
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.phase().ended
    }

    pub(crate) fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(deadline_after(timeout), |phase| phase.ended)
    }

    pub(crate) fn disconnect(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let (id, qpn) = (self.id, self.qpn);
        let established = self.phase().established;
        self.device.with(|core, now| {
            core.finish(now, true);
            // Once a connection has ended its queue pair is its owner's to use again.
            let entry = core.connections.get_mut(&id);
            if entry.is_some_and(|entry| entry.qpn.take().is_some()) {
                core.accepted.remove(&qpn);
                let _ = core
                    .rnic
                    .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
            }
            core.rnic.cm().disconnect(now, id);
            if !established {
                // Nothing more will be heard of it.
                core.connections.remove(&id);
            }
        });
        if !established {
            self.phase.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
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
    use super::*;
    use crate::device::{Device, QpOptions};

    #[test]
    fn ready_to_send__asks_nothing_of_a_peer_that_answers_nothing() {
        let device = Device::open(IpAddr::from([127, 0, 14, 6])).unwrap();
        let cq = device.create_cq(16).unwrap();
        let qp = device
            .alloc_pd()
            .unwrap()
            .create_qp(&QpOptions::new(&cq))
            .unwrap();
        let qp = qp.provided().soft().unwrap();
        let params = ConnectParams::default();
        for (resources, depth) in [(0, 0), (4, 4), (255, params.initiator_depth)] {
            let remote = Endpoint {
                responder_resources: resources,
                ..local_endpoint(qp, Psn::new(0), &params, PathMtu::Bytes1024)
            };
            let rts = ready_to_send(qp, &params, &remote, (14, 7));
            assert_eq!(rts.max_rd_atomic, Some(depth));
        }
    }
}
