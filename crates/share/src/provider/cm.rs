//! Connections: the node's device makes them, and the node tells what happens to them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{Access, QpAttributes, QpState, QpType};
use rdmux_verbs::provider::{
    self, Connection as _, QueuePair as _, accepting_type, deadline_after, no_external, own,
};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{
    Arrival, ConnectError, ConnectPair, ConnectParams, Endpoint, EventQueue, ListenError, Progress,
};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::node::control::{ErrorCode, Kind, Message, PrivateData};

use super::client::{Client, Events, gone, no_answer};
use super::device::Device;
use super::qp::{QpShared, QueuePair};
use crate::control::convert::{Refusal, endpoint_of, params_to_wire};

/// Longest wait for the peer's last message.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until something has changed in an inbox since `look` found nothing. Returns `None` at the deadline, or if the node has gone.
fn wait<T>(
    client: &Client,
    events: &Events,
    deadline: Option<Instant>,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    loop {
        let seen = events.seen();
        if let Some(found) = look() {
            return Some(found);
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let is_over = left.is_some_and(|left| left.is_zero()) || client.has_told_end();
        if is_over || !events.wait(seen, left) {
            return look();
        }
    }
}

/// Returns the error of an attempt to connect that the node refuses.
fn connect_error(refusal: &Refusal, peer: IpAddr) -> ConnectError {
    match refusal.code {
        ErrorCode::Unreachable => ConnectError::Unreachable(peer),
        _ => ConnectError::Io(refusal.to_io()),
    }
}

/// A service of this process.
#[derive(Debug)]
pub(super) struct Listener {
    device: Device,
    id: u32,
    events: Arc<Events>,
    /// Reports only this service's events, for its descriptor.
    own: EventQueue,
}

impl Listener {
    pub(super) fn new(
        device: &Device,
        service: ServiceId,
        qp_types: &[QpType],
    ) -> Result<Listener, ListenError> {
        let own = EventQueue::new()?;
        let events = Arc::new(Events::with_events(&own));
        let request = Message::Listen {
            service,
            unreliable: qp_types.contains(&QpType::Uc),
        };
        let reports = Some((Kind::Listener, events.clone()));
        let answer = device.client().request_with(&request, None, reports);
        let id = match answer {
            Ok(Message::Made { id }) => id,
            Ok(_) => return Err(no_answer().into()),
            Err(refusal) if refusal.code == ErrorCode::InUse => {
                return Err(ListenError::InUse(refusal.into()));
            }
            Err(refusal) => return Err(ListenError::Io(refusal.to_io())),
        };
        Ok(Listener {
            device: device.clone(),
            id,
            events,
            own,
        })
    }
}

impl provider::Listener for Listener {
    fn accept(&self, qp_types: &[QpType], timeout: Duration) -> Option<Box<dyn provider::ConnectionRequest>> {
        let deadline = deadline_after(timeout);
        loop {
            let (arrival, message) = wait(self.device.client(), &self.events, deadline, || {
                self.events.poll()
            })?;
            let Message::Requested {
                request,
                peer,
                peer_port,
                remote,
                private_data,
                ..
            } = message
            else {
                continue;
            };
            let remote = endpoint_of(&remote);
            let mut request = ConnectionRequest {
                device: self.device.clone(),
                id: request,
                arrival,
                peer,
                peer_port,
                remote,
                private_data,
                decided: false,
            };
            if qp_types.contains(&accepting_type(remote.transport)) {
                return Some(Box::new(request));
            }
            request.refuse(&[]);
        }
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let client = self.device.client();
        client.destroy(Kind::Listener, self.id);
        client.forget(Kind::Listener, self.id);
    }
}

/// A peer's request to connect. Dropping it undecided refuses it.
#[derive(Debug)]
struct ConnectionRequest {
    device: Device,
    id: u32,
    arrival: Arrival,
    peer: IpAddr,
    peer_port: u16,
    remote: Endpoint,
    private_data: PrivateData,
    decided: bool,
}

impl ConnectionRequest {
    fn refuse(&mut self, private_data: &[u8]) {
        self.decided = true;
        let _ = self.device.client().request(&Message::Reject {
            request: self.id,
            private_data: PrivateData::new(private_data).unwrap_or_default(),
        });
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
        self.private_data.bytes()
    }

    fn accept(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: provider::Prepare<'_>,
    ) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let qp = pair.own().ok_or_else(no_external)?;
        let qp = own::<QueuePair>(qp).ok_or(ConnectError::OtherDevice)?;
        let private_data = PrivateData::new(private_data).ok_or(ConnectError::PrivateData)?;
        if qp.shared.state() == QpState::Reset {
            // From here on it takes receives.
            let attributes = QpAttributes {
                access: Some(Access::empty()),
                ..QpAttributes::default()
            };
            qp.modify(QpState::Init, &attributes)?;
        }
        let accepted = prepare().and_then(|()| {
            let events = Arc::new(Events::new());
            let request = Message::Accept {
                request: self.id,
                qp: qp.shared.id,
                params: params_to_wire(params),
                private_data,
            };
            let reports = Some((Kind::Connection, events.clone()));
            let client = self.device.client();
            // The node has decided it, whatever comes of it.
            self.decided = true;
            match client.request_with(&request, None, reports) {
                Ok(Message::Made { id }) => Ok((id, events)),
                Ok(_) => Err(no_answer().into()),
                Err(refusal) => Err(connect_error(&refusal, self.peer)),
            }
        });
        let (id, events) = accepted.inspect_err(|_| {
            let _ = qp.modify(QpState::Error, &QpAttributes::default());
        })?;
        qp.shared.set_state(QpState::Rts);
        let connection = Connection::new(&self.device, id, qp.shared.clone(), events);
        Ok(Box::new(Connection {
            remote: Some(self.remote),
            private_data: self.private_data.clone(),
            ..connection
        }))
    }

    fn reject(&mut self, private_data: &[u8]) {
        self.refuse(private_data);
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.decided {
            self.refuse(&[]);
        }
    }
}

/// An attempt to connect. Dropping it withdraws it.
#[derive(Debug)]
pub(super) struct Connecting {
    device: Device,
    /// `None` once it is decided.
    id: Option<u32>,
    peer: IpAddr,
    qp: Arc<QpShared>,
    events: Arc<Events>,
}

impl Connecting {
    pub(super) fn start(
        device: &Device,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Connecting, ConnectError> {
        let qp = pair.own().ok_or_else(no_external)?;
        let qp = own::<QueuePair>(qp).ok_or(ConnectError::OtherDevice)?;
        let events = Arc::new(Events::new());
        let request = Message::Connect {
            qp: qp.shared.id,
            peer,
            params: params_to_wire(params),
            private_data: PrivateData::new(private_data).ok_or(ConnectError::PrivateData)?,
        };
        let reports = Some((Kind::Connection, events.clone()));
        match device.client().request_with(&request, None, reports) {
            Ok(Message::Made { id }) => Ok(Connecting {
                device: device.clone(),
                id: Some(id),
                peer: peer.ip(),
                qp: qp.shared.clone(),
                events,
            }),
            Ok(_) => Err(no_answer().into()),
            Err(refusal) => Err(connect_error(&refusal, peer.ip())),
        }
    }

    fn decide(&mut self) -> Option<Result<Box<dyn provider::Connection>, ConnectError>> {
        loop {
            let Some((arrival, message)) = self.events.poll() else {
                let ended = self.device.client().has_ended() && self.id.take().is_some();
                return ended.then(|| Err(ConnectError::Io(gone().to_io())));
            };
            match message {
                Message::Connected {
                    connection: id,
                    remote,
                    private_data,
                } => {
                    self.id = None;
                    self.qp.set_state(QpState::Rts);
                    let (qp, events) = (self.qp.clone(), self.events.clone());
                    let connection = Connection::new(&self.device, id, qp, events);
                    connection.known.lock().establish(arrival);
                    return Some(Ok(Box::new(Connection {
                        remote: remote.as_ref().map(endpoint_of),
                        private_data,
                        ..connection
                    })));
                }
                Message::Refused {
                    connection,
                    reason,
                    private_data,
                    code,
                    text,
                } => {
                    self.id = None;
                    self.device.client().forget(Kind::Connection, connection);
                    let error = match reason {
                        Some(reason) => ConnectError::Rejected {
                            reason,
                            private_data: private_data.bytes().to_vec(),
                        },
                        None => connect_error(&Refusal::new(code, text), self.peer),
                    };
                    return Some(Err(error));
                }
                _ => {}
            }
        }
    }
}

impl provider::Connecting for Connecting {
    fn poll(&mut self) -> Option<Result<Box<dyn provider::Connection>, ConnectError>> {
        self.decide()
    }

    fn wait(&mut self) -> Result<Box<dyn provider::Connection>, ConnectError> {
        let (device, events) = (self.device.clone(), self.events.clone());
        let decided = wait(device.client(), &events, None, || self.decide());
        decided.unwrap_or_else(|| Err(ConnectError::Io(gone().to_io())))
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let client = self.device.client();
            client.destroy(Kind::Connection, id);
            client.forget(Kind::Connection, id);
        }
    }
}

/// A connection of a queue pair. Dropping it ends it.
#[derive(Debug)]
struct Connection {
    link: Link,
    qp: Arc<QpShared>,
    events: Arc<Events>,
    remote: Option<Endpoint>,
    private_data: PrivateData,
    /// Progress according to the events that were taken.
    known: Mutex<Progress>,
    /// Set when this side has ended it.
    left: AtomicBool,
}

/// The node's connection, until it is dropped.
#[derive(Debug)]
struct Link {
    device: Device,
    id: u32,
}

impl Connection {
    fn new(device: &Device, id: u32, qp: Arc<QpShared>, events: Arc<Events>) -> Connection {
        Connection {
            link: Link {
                device: device.clone(),
                id,
            },
            qp,
            events,
            remote: None,
            private_data: PrivateData::default(),
            known: Mutex::default(),
            left: AtomicBool::new(false),
        }
    }

    /// Waits until `done` holds; returns false at the deadline.
    fn wait_until(&self, deadline: Option<Instant>, done: impl Fn(Progress) -> bool) -> bool {
        let client = self.link.device.client();
        let look = || done(self.progress()).then_some(());
        wait(client, &self.events, deadline, look).is_some()
    }
}

impl provider::Connection for Connection {
    fn remote(&self) -> Option<&Endpoint> {
        self.remote.as_ref()
    }

    fn private_data(&self) -> &[u8] {
        self.private_data.bytes()
    }

    fn notify(&self, events: &EventQueue, token: u64) {
        self.events.notify(events, token);
    }

    fn progress(&self) -> Progress {
        // Locked while events are taken, so that another thread that finds none left sees their effect.
        let mut known = self.known.lock();
        while let Some((arrival, message)) = self.events.poll() {
            if let Message::Progressed {
                established, ended, ..
            } = message
            {
                if established {
                    known.establish(arrival);
                }
                if ended {
                    known.end(arrival);
                    self.qp.set_state(QpState::Error);
                }
            }
        }
        *known
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

    fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(deadline_after(timeout), |progress| progress.ended.is_some())
    }

    fn disconnect(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let Link { device, id } = &self.link;
        let _ = device.client().request(&Message::Disconnect { connection: *id });
        self.qp.set_state(QpState::Error);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The node disconnects what it destroys.
        let client = self.device.client();
        client.destroy(Kind::Connection, self.id);
        client.forget(Kind::Connection, self.id);
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> io::Error {
        refusal.to_io()
    }
}
