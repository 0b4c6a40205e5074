//! Streams from their port to their connection: `rbind`, `rlisten`, `raccept`, `rconnect`.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rdmux_verbs::{Access, ConnectError, ConnectParams, Connection, ConnectionRequest, Device, Listener};
use rdmux_wire::rsocket::ConnData;

use super::resources::Resources;
use super::stream::Stream;
use super::{Role, Socket, State};
use crate::cm::{device_at, route, services};

/// A port of streams. It is held from when it is bound; only then can nobody else have it.
pub(super) struct Listening {
    listeners: Vec<(IpAddr, Listener)>,
    /// `rlisten` was called.
    pub(super) accepts: bool,
}

impl Listening {
    pub(super) fn fds(&self, fds: &mut Vec<RawFd>) {
        fds.extend(
            self.listeners
                .iter()
                .map(|(_, listener)| listener.as_fd().as_raw_fd()),
        );
    }

    /// The next request of one who speaks the protocol.
    fn request(&self) -> Option<(IpAddr, Device, ConnectionRequest, ConnData)> {
        for (address, listener) in &self.listeners {
            while let Some(request) = listener.accept(Duration::ZERO) {
                // Others are refused.
                if let Ok(peer) = parse(request.private_data()) {
                    return Some((*address, listener.device().clone(), request, peer));
                }
            }
        }
        None
    }

    /// Whether there may be a request.
    pub(super) fn has_request(&self) -> bool {
        let mut fds = Vec::new();
        self.fds(&mut fds);
        let mut fds: Vec<libc::pollfd> = fds
            .iter()
            .map(|fd| super::poll::entry(*fd, libc::POLLIN))
            .collect();
        super::poll::kernel(&mut fds, Some(Duration::ZERO)).is_ok_and(|n| n > 0)
    }
}

/// What a peer said of itself, where it is of use.
fn parse(private_data: &[u8]) -> Result<ConnData, c_int> {
    match ConnData::parse(private_data) {
        Ok(peer) if peer.table.length > 0 => Ok(peer),
        _ => Err(libc::ECONNREFUSED),
    }
}

fn parameters() -> ConnectParams {
    ConnectParams {
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        initiator_depth: 0,
        responder_resources: 0,
        ..ConnectParams::default()
    }
}

impl State {
    /// Takes a port; 0: any.
    pub(super) fn bind(&mut self, address: SocketAddr) -> Result<(), c_int> {
        if !matches!(self.role, Role::New) {
            return Err(libc::EINVAL);
        }
        let (port, listeners) = services(Some(address), false, |device, port| device.listen(port))?;
        self.local = Some(SocketAddr::new(address.ip(), port));
        let accepts = false;
        self.role = Role::Bound(Listening { listeners, accepts });
        Ok(())
    }
}

/// Takes the next connection that somebody asks for. `None`: there is none.
pub(super) fn accept(on: &Socket, state: &mut State) -> Option<Result<Arc<Socket>, c_int>> {
    let Role::Bound(listening) = &state.role else {
        return Some(Err(if state.closed { libc::EBADF } else { libc::EINVAL }));
    };
    if state.closed || !listening.accepts {
        return Some(Err(if state.closed { libc::EBADF } else { libc::EINVAL }));
    }
    let port = state.local.map_or(0, |local| local.port());
    let (address, device, request, peer) = listening.request()?;
    Some(answer(
        on,
        state,
        SocketAddr::new(address, port),
        &device,
        request,
        peer,
    ))
}

fn answer(
    on: &Socket,
    state: &State,
    local: SocketAddr,
    device: &Device,
    mut request: ConnectionRequest,
    peer: ConnData,
) -> Result<Arc<Socket>, c_int> {
    let own = Resources::new(device, &state.options)?;
    let remote = SocketAddr::new(request.peer(), 0);
    let said = own.conn_data();
    let no_room = |_| ConnectError::Io(std::io::ErrorKind::OutOfMemory.into());
    let accepted = request.accept_after(&own.qp, &parameters(), &said, || {
        own.post_receives().map_err(no_room)
    });
    let connection = Arc::new(accepted.map_err(|_| libc::ECONNABORTED)?);
    let stream = Stream::new(own, connection.clone(), peer, false);
    let socket = Socket::new(on.domain, Role::Stream(Box::new(stream)), state.options.clone())?;
    let mut made = socket.lock();
    (made.local, made.remote) = (Some(local), Some(remote));
    drop(made);
    let waits = Arc::downgrade(&socket);
    thread::spawn(move || establish(&waits, &connection));
    Ok(socket)
}

/// Waits until a connection that was accepted stands, and tells those who wait for that.
fn establish(socket: &Weak<Socket>, connection: &Connection) {
    let stands = connection.wait_established();
    if let Some(socket) = socket.upgrade() {
        let mut state = socket.lock();
        if let Role::Stream(stream) = &mut state.role
            && !stands
        {
            stream.fail();
        }
        state.wake();
    }
}

/// The device that a peer is reached from.
pub(super) fn device_towards(peer: SocketAddr, bound: Option<SocketAddr>) -> Result<Device, c_int> {
    let local = match bound.filter(|bound| !bound.ip().is_unspecified()) {
        Some(bound) => return device_at(bound.ip()),
        None => route(peer)?,
    };
    // Peers at an address of this host's are reached from there.
    device_at(local).or_else(|_| device_at(peer.ip()))
}

/// Begins to connect: what is to be waited for happens in a thread.
pub(super) fn connect(socket: &Arc<Socket>, peer: SocketAddr) -> Result<(), c_int> {
    let mut state = socket.lock();
    match &state.role {
        Role::New | Role::Failed => {}
        Role::Bound(listening) if !listening.accepts => {}
        Role::Opening => return Err(libc::EALREADY),
        Role::Stream(_) => return Err(libc::EISCONN),
        Role::Bound(_) | Role::Datagram(_) => return Err(libc::EINVAL),
    }
    let device = device_towards(peer, state.local)?;
    let own = Resources::new(&device, &state.options)?;
    let port = state.local.map_or(0, |local| local.port());
    state.local = Some(SocketAddr::new(device.address(), port));
    state.remote = Some(peer);
    state.error = 0;
    state.role = Role::Opening;
    drop(state);
    let socket = socket.clone();
    thread::spawn(move || {
        let connected = open(&device, own, peer);
        let mut state = socket.lock();
        match connected {
            // Nobody wants it any more: it ends.
            Ok(_) if state.closed => {}
            Ok(stream) => state.role = Role::Stream(Box::new(stream)),
            Err(errno) => (state.role, state.error) = (Role::Failed, errno),
        }
        state.wake();
    });
    Ok(())
}

fn open(device: &Device, own: Resources, peer: SocketAddr) -> Result<Stream, c_int> {
    let connected = device.connect(&own.qp, peer, &parameters(), &own.conn_data());
    let connection = connected.map_err(|error| match error {
        ConnectError::Rejected { .. } => libc::ECONNREFUSED,
        ConnectError::Unreachable(_) => libc::ETIMEDOUT,
        ConnectError::Family { .. } => libc::ENETUNREACH,
        ConnectError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EIO,
    })?;
    let said = parse(connection.private_data())?;
    own.post_receives()?;
    Ok(Stream::new(own, Arc::new(connection), said, true))
}

impl State {
    /// Ends what there is: nobody uses it any more.
    pub(super) fn close(&mut self) {
        self.closed = true;
        if let Role::Stream(stream) = &mut self.role {
            stream.connection.disconnect();
            stream.fail();
        }
        self.wake();
    }
}
