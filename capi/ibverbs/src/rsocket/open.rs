//! Streams from their port to their connection: `rbind`, `rlisten`, `raccept`, `rconnect`.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Access, ConnectError, ConnectPair, ConnectParams, Connecting, Connection, ConnectionRequest, Device,
    Listener,
};
use rdmux_wire::rsocket::ConnData;

use super::resources::Resources;
use super::stream::Stream;
use super::{Role, Socket, SocketState};
use crate::cm::{device_at, route, services, some_port};
use crate::cm_thread::Handler;

/// A port of streams. The socket holds it from `rbind` on; only then is it certain that no other socket has it.
pub(super) struct Listening {
    listeners: Vec<(IpAddr, Listener)>,
    /// Set when `rlisten` was called.
    pub(super) accepts: bool,
    /// Connections that wait to be accepted.
    requests: VecDeque<StreamRequest>,
}

/// A peer that speaks the protocol and wants to connect.
struct StreamRequest {
    /// Address that it asked; `device`: device of that address.
    local: IpAddr,
    device: Device,
    request: ConnectionRequest,
    peer: ConnData,
}

/// Requests that are taken before a program accepts them: others wait at the device.
const REQUESTS_MAX: usize = 16;

impl Listening {
    pub(super) fn fds(&self, fds: &mut Vec<RawFd>) {
        fds.extend(
            self.listeners
                .iter()
                .map(|(_, listener)| listener.as_fd().as_raw_fd()),
        );
    }

    /// Takes requests in, and refuses those that do not come from rsockets. Returns whether any came.
    pub(super) fn progress(&mut self) -> bool {
        let before = self.requests.len();
        for (local, listener) in &self.listeners {
            while self.accepts && self.requests.len() < REQUESTS_MAX {
                let Some(request) = listener.accept(Duration::ZERO) else {
                    break;
                };
                if let Ok(peer) = parse(request.private_data()) {
                    self.requests.push_back(StreamRequest {
                        local: *local,
                        device: listener.device().clone(),
                        request,
                        peer,
                    });
                }
            }
        }
        self.requests.len() > before
    }

    /// Returns whether a request waits to be accepted.
    pub(super) fn has_request(&self) -> bool {
        !self.requests.is_empty()
    }
}

/// Parses the private data of a peer. Returns an error if it is of no use.
fn parse(private_data: &[u8]) -> Result<ConnData, c_int> {
    match ConnData::parse(private_data) {
        Ok(peer) if peer.table.length > 0 => Ok(peer),
        _ => Err(libc::ECONNREFUSED),
    }
}

fn parameters(source_port: u16) -> ConnectParams {
    ConnectParams {
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        initiator_depth: 0,
        responder_resources: 0,
        source_port,
        ..ConnectParams::default()
    }
}

impl SocketState {
    /// Binds a port; 0: any.
    pub(super) fn bind(&mut self, address: SocketAddr) -> Result<(), c_int> {
        if !matches!(self.role, Role::New) {
            return Err(libc::EINVAL);
        }
        let (port, listeners) = services(Some(address), false, |device, port| device.listen(port))?;
        self.local = Some(SocketAddr::new(address.ip(), port));
        let accepts = false;
        let requests = VecDeque::new();
        self.role = Role::Bound(Listening {
            listeners,
            accepts,
            requests,
        });
        Ok(())
    }
}

/// Accepts the next connection request. Returns `None` when there is none.
pub(super) fn accept(on: &Socket, state: &mut SocketState) -> Option<Result<Arc<Socket>, c_int>> {
    let listening = match &mut state.role {
        Role::Bound(listening) if listening.accepts && !state.closed => listening,
        _ => return Some(Err(if state.closed { libc::EBADF } else { libc::EINVAL })),
    };
    let request = listening.requests.pop_front()?;
    Some(answer(on, state, request))
}

fn answer(on: &Socket, state: &SocketState, asked: StreamRequest) -> Result<Arc<Socket>, c_int> {
    let StreamRequest {
        local,
        device,
        mut request,
        peer,
    } = asked;
    let local = SocketAddr::new(local, state.local.map_or(0, |local| local.port()));
    let own = Resources::new(&device, &state.options)?;
    let remote = SocketAddr::new(request.peer(), request.peer_port());
    let socket = Socket::new(on.domain, Role::New, state.options.clone())?;
    let accepted = socket.queue().and_then(|(queue, token)| {
        // Locked until the socket has the stream to which the events belong.
        let mut made = socket.lock();
        let stream = accept_stream(own, &mut request, peer)?;
        stream.connection.notify(queue, token);
        (made.local, made.remote) = (Some(local), Some(remote));
        made.role = Role::Stream(Box::new(stream));
        Ok(())
    });
    accepted.inspect_err(|_| drop(Socket::take(socket.number())))?;
    Ok(socket)
}

fn accept_stream(own: Resources, request: &mut ConnectionRequest, peer: ConnData) -> Result<Stream, c_int> {
    let no_room = |_| ConnectError::Io(std::io::ErrorKind::OutOfMemory.into());
    let accepted = request.accept_after(&own.qp, &parameters(0), &own.conn_data(), || {
        own.post_receives().map_err(no_room)
    });
    let connection = accepted.map_err(|_| libc::ECONNABORTED)?;
    Ok(Stream::new(own, connection, peer, false))
}

/// Returns the device from which a peer is reached.
pub(super) fn device_towards(peer: SocketAddr, bound: Option<SocketAddr>) -> Result<Device, c_int> {
    let local = match bound.filter(|bound| !bound.ip().is_unspecified()) {
        Some(bound) => return device_at(bound.ip()),
        None => route(peer)?,
    };
    // Peers at an address of this host are reached from that address.
    device_at(local).or_else(|_| device_at(peer.ip()))
}

/// Begins to connect.
pub(super) fn connect(socket: &Arc<Socket>, peer: SocketAddr) -> Result<(), c_int> {
    let mut state = socket.lock();
    match &state.role {
        Role::New | Role::Failed => {}
        Role::Bound(listening) if !listening.accepts => {}
        Role::Opening(_) => return Err(libc::EALREADY),
        Role::Stream(_) => return Err(libc::EISCONN),
        Role::Bound(_) | Role::Datagram(_) => return Err(libc::EINVAL),
    }
    let device = device_towards(peer, state.local)?;
    let own = Resources::new(&device, &state.options)?;
    let port = state.local.map_or_else(some_port, |local| local.port());
    let (queue, token) = socket.queue()?;
    let pair = ConnectPair::Own(&own.qp);
    let connecting = device
        .start_connect(pair, peer, &parameters(port), &own.conn_data())
        .map_err(|error| errno_of(&error))?;
    connecting.notify(queue, token);
    state.local = Some(SocketAddr::new(device.address(), port));
    state.remote = Some(peer);
    state.error = 0;
    state.role = Role::Opening(Box::new(Opening { connecting, own }));
    Ok(())
}

/// A stream that is being connected.
pub(super) struct Opening {
    connecting: Connecting,
    own: Resources,
}

impl Opening {
    /// Makes the stream of its connection.
    fn stream(self, connection: Connection) -> Result<Stream, c_int> {
        let said = parse(connection.private_data())?;
        self.own.post_receives()?;
        Ok(Stream::new(self.own, connection, said, true))
    }
}

fn errno_of(error: &ConnectError) -> c_int {
    match error {
        ConnectError::Rejected { .. } => libc::ECONNREFUSED,
        ConnectError::Unreachable(_) => libc::ETIMEDOUT,
        ConnectError::Family { .. } => libc::ENETUNREACH,
        ConnectError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EIO,
    }
}

impl Handler for Socket {
    fn handle(self: Arc<Socket>) -> Option<Instant> {
        let mut state = self.lock();
        match &mut state.role {
            Role::Opening(opening) => {
                let result = opening.connecting.poll()?;
                let Role::Opening(opening) = std::mem::replace(&mut state.role, Role::Failed) else {
                    return None;
                };
                let result = result.map_err(|error| errno_of(&error));
                match result.and_then(|connection| opening.stream(connection)) {
                    Ok(stream) => state.role = Role::Stream(Box::new(stream)),
                    Err(errno) => state.error = errno,
                }
            }
            Role::Stream(stream) => {
                let progress = stream.connection.progress();
                if progress.established.is_none() && progress.ended.is_some() {
                    stream.fail();
                }
            }
            Role::New | Role::Bound(_) | Role::Failed | Role::Datagram(_) => {}
        }
        state.wake();
        None
    }
}

impl SocketState {
    /// Ends the connection, which nobody uses any more.
    pub(super) fn close(&mut self) {
        self.closed = true;
        if let Role::Opening(_) = &self.role {
            (self.role, self.error) = (Role::Failed, libc::EBADF);
        }
        if let Role::Stream(stream) = &mut self.role {
            stream.connection.disconnect();
            stream.fail();
        }
        self.wake();
    }
}
