//! The connections of NVMe/TCP.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_runtime::{DescriptorId, Interest};
use rdmux_wire::nvme::Status;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, getsockname, recv, shutdown, sockopt};

use super::{Core, Job, LOOK_EVERY, Listen};
use crate::tcp::{self, Buffers, Connection, Work};
use crate::tls::{self, Channel, Keys};

/// Maximum number of connections of a reactor.
const CONNECTIONS_MAX: usize = 4096;
/// Receives from one connection before others have their turn.
const RECEIVES_MAX: usize = 16;
/// Bytes of I/Os and of messages of one connection before others have their turn.
const TURN_BYTES: usize = 4 << 20;
/// I/Os of media that one connection begins before others have their turn, and before those that are done are answered: a host sends the next ones
/// meanwhile.
const TURN_MEDIA: usize = 8;
/// Slices of one message to a socket: the answers to 32 reads and more, so that a host with so many in flight is woken once.
const SLICES_MAX: usize = 128;
/// Connections that are accepted at once.
const ACCEPTS_MAX: usize = 64;
/// Time for which nothing is accepted when the system has no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Time for a host to take the last responses of a connection that is over, and to close it.
const LINGER: Duration = Duration::from_secs(1);
/// Time without a packet after which the kernel probes a host, time between probes, and their number.
const PROBES: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// A message to the connections of a reactor.
#[derive(Debug)]
pub(super) enum Mail {
    /// A connection that another reactor has accepted, and its listener.
    Socket(OwnedFd, Listen),
    /// An I/O of a connection is done.
    Finished(DescriptorId, Work, Status),
    /// A connection has more to do than its last turn allowed.
    Turn(DescriptorId),
}

impl From<Mail> for super::Mail {
    fn from(mail: Mail) -> super::Mail {
        super::Mail::Tcp(mail)
    }
}

/// The listeners and connections of a reactor.
#[derive(Debug, Default)]
pub(super) struct Tcp {
    /// With each its settings.
    listeners: HashMap<DescriptorId, (TcpListener, Listen)>,
    /// There once a connection begins with TLS.
    tls: Option<tls::Server>,
    connections: HashMap<DescriptorId, Served>,
    /// Connections that are over, with the number of I/Os that media have: these have buffers until they end.
    ending: HashMap<DescriptorId, usize>,
    /// Connections of which media have ended I/Os that were not yet answered.
    finished: Vec<DescriptorId>,
    /// The reactor that gets the next accepted connection.
    next_mailbox: usize,
    buffers: Buffers,
    /// Listeners are not looked at before this time.
    accepts_again: Option<Instant>,
}

#[derive(Debug)]
struct Served {
    channel: Channel,
    connection: Connection,
    interest: Interest,
    /// I/Os that media have.
    at_media: usize,
    /// It is among [`Tcp::finished`].
    has_finished: bool,
    /// A turn of it is among this reactor's messages.
    has_turn: bool,
    /// Set once it is over: until then its host may take the last responses.
    closes_at: Option<Instant>,
}

impl Tcp {
    /// Listens on an address, and returns it with its port.
    pub(super) fn listen(&mut self, core: &mut Core, listen: &Listen) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(listen.listener.address)?;
        listener.set_nonblocking(true)?;
        let descriptor = listener.try_clone()?.into();
        let address = listener.local_addr()?;
        let id = core.reactor.add_descriptor(descriptor, Interest::READABLE)?;
        self.listeners.insert(id, (listener, *listen));
        Ok(address)
    }

    /// Listens no more on an address. Returns false if it did not.
    pub(super) fn stop_listening(&mut self, core: &mut Core, address: SocketAddr) -> bool {
        let is_there = |listener: &TcpListener| listener.local_addr().is_ok_and(|own| own == address);
        let id = self
            .listeners
            .iter()
            .find(|(_, (listener, _))| is_there(listener));
        let Some(id) = id.map(|(id, _)| *id) else {
            return false;
        };
        core.reactor.remove_descriptor(id);
        if let Some((listener, _)) = self.listeners.remove(&id) {
            // A child that any thread of the process forks has the socket as well, and hosts would come to it, until the child executes its program.
            // Fails for no listener: nobody else ends it.
            let _ = shutdown(&listener, Shutdown::Both);
        }
        true
    }

    /// Has connections that come to a listener have other settings. Returns false if it does not listen there.
    pub(super) fn set(&mut self, listen: &Listen) -> bool {
        let address = listen.listener.address;
        let mut listeners = self.listeners.values_mut();
        let found = listeners.find(|(listener, _)| listener.local_addr().is_ok_and(|own| own == address));
        let is_there = found.is_some();
        found.into_iter().for_each(|(_, known)| *known = *listen);
        is_there
    }

    /// Returns when to call [`Tcp::accept_again`].
    pub(super) fn accepts_again(&self) -> Option<Instant> {
        self.accepts_again
    }

    /// Looks at the listeners again once the pause is over.
    pub(super) fn accept_again(&mut self, core: &mut Core, now: Instant) -> io::Result<()> {
        if self.accepts_again.is_none_or(|again| again > now) {
            return Ok(());
        }
        self.accepts_again = None;
        self.watch_listeners(core, Interest::READABLE)
    }

    pub(super) fn handle_readable(
        &mut self,
        core: &mut Core,
        id: DescriptorId,
        now: Instant,
    ) -> io::Result<()> {
        match self.listeners.contains_key(&id) {
            true => self.accept(core, id, now)?,
            false => self.receive(core, id, now),
        }
        Ok(())
    }

    pub(super) fn handle_mail(&mut self, core: &mut Core, mail: Mail, now: Instant) {
        match mail {
            Mail::Socket(socket, listen) => self.begin(core, socket, &listen, now),
            Mail::Turn(id) => {
                if let Some(served) = self.connections.get_mut(&id) {
                    served.has_turn = false;
                    match served.channel.has_bytes() {
                        true => self.receive(core, id, now),
                        false => self.pump(core, id, now),
                    }
                }
            }
            Mail::Finished(id, work, status) => {
                let Some(served) = self.connections.get_mut(&id) else {
                    return self.ended(id);
                };
                served.at_media -= 1;
                served.connection.complete(work, status, &mut self.buffers);
                if !std::mem::replace(&mut served.has_finished, true) {
                    self.finished.push(id);
                }
            }
        }
    }

    /// Answers what media have ended: the answers of a connection by one message, as far as they were ended together.
    pub(super) fn answer_finished(&mut self, core: &mut Core, now: Instant) {
        while let Some(id) = self.finished.pop() {
            if let Some(served) = self.connections.get_mut(&id) {
                served.has_finished = false;
                self.pump(core, id, now);
            }
        }
    }

    /// Looks at what queues share with those of other connections.
    pub(super) fn handle_change(&mut self, core: &mut Core, now: Instant) {
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            if let Some(served) = self.connections.get_mut(&id) {
                served.connection.handle_change();
            }
            self.pump(core, id, now);
        }
    }

    fn watch_listeners(&mut self, core: &mut Core, interest: Interest) -> io::Result<()> {
        for id in self.listeners.keys() {
            core.reactor.set_interest(*id, interest)?;
        }
        Ok(())
    }

    /// Accepts what waits at a listener, and passes it to the reactors in turn.
    fn accept(&mut self, core: &mut Core, id: DescriptorId, now: Instant) -> io::Result<()> {
        let Some((listener, listen)) = self.listeners.get(&id) else {
            return Ok(());
        };
        for _ in 0..ACCEPTS_MAX {
            match listener.accept() {
                Ok((socket, _)) => {
                    let mailbox = &core.mailboxes[self.next_mailbox % core.tcp_reactors];
                    self.next_mailbox += 1;
                    mailbox.send(Mail::Socket(socket.into(), *listen).into());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A host that has gone again.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    // The listener stays readable: it would wake this thread for ever.
                    self.accepts_again = Some(now + ACCEPT_PAUSE);
                    return self.watch_listeners(core, Interest::default());
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, core: &mut Core, socket: OwnedFd, listen: &Listen, now: Instant) {
        // One whose I/Os have not ended still has their buffers.
        if self.connections.len() + self.ending.len() >= CONNECTIONS_MAX {
            return;
        }
        let Ok(local) = prepare(&socket) else {
            return;
        };
        let Some(channel) = self.channel(core, listen.tls) else {
            return;
        };
        let Ok(id) = core.reactor.add_descriptor(socket, Interest::READABLE) else {
            return;
        };
        let port = tcp::port(listen.in_capsule_bytes);
        let mut connection = Connection::new(core.target.clone(), port, local, now);
        if listen.tls {
            connection.require_tls();
        }
        let served = Served {
            channel,
            connection,
            interest: Interest::READABLE,
            at_media: 0,
            has_finished: false,
            has_turn: false,
            closes_at: None,
        };
        self.connections.insert(id, served);
        core.look_by(now + LOOK_EVERY);
    }

    /// Returns the way by which bytes of a connection come; `None` if there can be none.
    fn channel(&mut self, core: &Core, tls: bool) -> Option<Channel> {
        if !tls {
            return Some(Channel::Plain);
        }
        if self.tls.is_none() {
            let target = core.target.clone();
            let keys = Keys(Arc::new(move |host, subsystem| {
                target.psks(host, subsystem, Instant::now())
            }));
            self.tls = tls::Server::new(keys).ok();
        }
        let session = self.tls.as_ref()?.accept().ok()?;
        Some(Channel::Open(Box::new(session)))
    }

    /// Receives from a connection, and does what that asks for.
    fn receive(&mut self, core: &mut Core, id: DescriptorId, now: Instant) {
        if !self.is_ready(core, id) {
            return;
        }
        for _ in 0..RECEIVES_MAX {
            let Some(served) = self.connections.get_mut(&id) else {
                return;
            };
            let is_over = served.closes_at.is_some();
            if !is_over && !served.connection.wants_bytes() {
                break;
            }
            let Some(socket) = core.reactor.descriptor(id) else {
                return;
            };
            let mut unwanted = [0; 4096];
            let (received, wanted) = if is_over {
                let received = recv(socket, &mut unwanted, RecvFlags::DONTWAIT);
                (received.map(|(bytes, _)| bytes), unwanted.len())
            } else {
                let space = served.connection.space();
                let wanted = space.len();
                let received = served.channel.receive(socket, space, RecvFlags::DONTWAIT);
                (received, wanted)
            };
            match received {
                Ok(0) => return self.close(core, id),
                Ok(bytes) => {
                    if !is_over {
                        served.connection.received(bytes, &mut self.buffers, now);
                    }
                    if served.channel.is_drained(bytes, wanted) {
                        break;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return self.close(core, id),
            }
        }
        self.pump(core, id, now);
    }

    /// Takes the handshake of a connection further, if it begins with one, and returns true once that is over. Ends a connection of which it
    /// fails.
    fn is_ready(&mut self, core: &mut Core, id: DescriptorId) -> bool {
        let Some(served) = self.connections.get_mut(&id) else {
            return false;
        };
        // One that has not ended its handshake in time has nothing to send.
        if served.channel.is_ready() || served.closes_at.is_some() || served.connection.end().is_some() {
            return true;
        }
        let Some(socket) = core.reactor.descriptor(id) else {
            return false;
        };
        let Ok(is_ready) = served.channel.handshake(socket) else {
            self.close(core, id);
            return false;
        };
        if let Some(proof) = served.channel.take_proof() {
            served.connection.set_proof(proof);
        }
        if is_ready {
            return true;
        }
        let interest = Interest {
            readable: true,
            writable: served.channel.is_blocked(),
        };
        if served.interest != interest {
            served.interest = interest;
            if core.reactor.set_interest(id, interest).is_err() {
                self.close(core, id);
            }
        }
        false
    }

    /// Carries out the I/Os of a connection and sends what it has to send, as much as a turn allows, and closes it if it is over.
    pub(super) fn pump(&mut self, core: &mut Core, id: DescriptorId, now: Instant) {
        if !self.is_ready(core, id) {
            return;
        }
        let Some(served) = self.connections.get_mut(&id) else {
            return;
        };
        let connection = &mut served.connection;
        let Some(socket) = core.reactor.descriptor(id) else {
            return;
        };
        let mut left = TURN_BYTES;
        let is_blocked = loop {
            let mut has_run = false;
            while left > 0
                && let Some(mut work) = connection.poll_io(&mut self.buffers, now)
            {
                has_run = true;
                if let Some(status) = work.execute_quick() {
                    left = left.saturating_sub(work.io().length as usize);
                    connection.complete(work, status, &mut self.buffers);
                    continue;
                }
                left = left.saturating_sub(TURN_BYTES / TURN_MEDIA);
                served.at_media += 1;
                if let Err(Job::Tcp(_, work)) = core.media.begin(Job::Tcp(id, work)) {
                    served.at_media -= 1;
                    connection.complete(work, Status::INTERRUPTED, &mut self.buffers);
                }
            }
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let number = connection.slices(&mut slices);
            if number == 0 && !has_run {
                break false;
            }
            if number == 0 {
                continue;
            }
            match served.channel.send(socket, &slices[..number]) {
                Ok(bytes) => {
                    left = left.saturating_sub(bytes);
                    connection.sent(bytes, &mut self.buffers);
                }
                Err(Errno::AGAIN) => break true,
                Err(Errno::INTR) => {}
                Err(_) => return self.close(core, id),
            }
            if left == 0 {
                if !served.has_turn {
                    served.has_turn = true;
                    core.reactor.mailbox().send(Mail::Turn(id).into());
                }
                break false;
            }
        };
        // The socket does not tell of these.
        if !is_blocked && !served.has_turn && connection.wants_bytes() && served.channel.has_bytes() {
            served.has_turn = true;
            core.reactor.mailbox().send(Mail::Turn(id).into());
        }
        let held_until = connection.held_until(now);
        let has_reset = connection.take_reset();
        let deadline = connection.deadline();
        let is_over = connection.end().is_some();
        if is_over && !is_blocked && !served.has_turn {
            // A socket that is closed while bytes wait to be received loses what the host has not yet taken.
            let _ = shutdown(socket, Shutdown::Write);
        }
        if is_over && served.closes_at.is_none() {
            served.closes_at = Some(now + LINGER);
        }
        let interest = Interest {
            readable: is_over || connection.wants_bytes(),
            writable: is_blocked,
        };
        let closes_at = served.closes_at;
        if served.interest != interest {
            served.interest = interest;
            if core.reactor.set_interest(id, interest).is_err() {
                return self.close(core, id);
            }
        }
        if let Some(deadline) = deadline.into_iter().chain(closes_at).chain(held_until).min() {
            core.look_by(deadline);
        }
        if has_reset {
            core.tell_of_change();
        }
    }

    fn close(&mut self, core: &mut Core, id: DescriptorId) {
        core.reactor.remove_descriptor(id);
        let Some(served) = self.connections.remove(&id) else {
            return;
        };
        if served.at_media > 0 {
            self.ending.insert(id, served.at_media);
        }
        if served.connection.has_io_queues() {
            drop(served);
            core.tell_of_change();
        }
    }

    /// An I/O of a connection that is over has ended.
    fn ended(&mut self, id: DescriptorId) {
        if let Some(left) = self.ending.get_mut(&id) {
            *left -= 1;
            if *left == 0 {
                self.ending.remove(&id);
            }
        }
    }

    pub(super) fn look_at_deadlines(&mut self, core: &mut Core, now: Instant) {
        let held = self
            .connections
            .iter()
            .filter(|(_, served)| served.connection.is_held());
        let held: Vec<_> = held.map(|(id, _)| *id).collect();
        for id in held {
            // Has the next look be at the right time, if it is not yet time.
            self.pump(core, id, now);
        }
        let is_due = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let due = self
            .connections
            .iter()
            .filter(|(_, served)| is_due(served.deadline()));
        let due: Vec<_> = due.map(|(id, _)| *id).collect();
        for id in due {
            // This thread may have been held up: the host may have sent in time.
            self.receive(core, id, now);
            let Some(served) = self.connections.get_mut(&id) else {
                continue;
            };
            if is_due(served.closes_at) {
                self.close(core, id);
                continue;
            }
            served.connection.handle_timeout(now);
            self.pump(core, id, now);
        }
        if let Some(first) = self.connections.values().filter_map(Served::deadline).min() {
            core.look_by(first.max(now + LOOK_EVERY));
        }
    }
}

impl Served {
    fn deadline(&self) -> Option<Instant> {
        match self.closes_at {
            Some(closes_at) => Some(closes_at),
            None => self.connection.deadline(),
        }
    }
}

/// Prepares a socket, and returns the address at which the host has reached it.
fn prepare(socket: &OwnedFd) -> io::Result<SocketAddr> {
    rustix::io::ioctl_fionbio(socket, true)?;
    // Responses are small and must not wait for each other.
    sockopt::set_tcp_nodelay(socket, true)?;
    // A host without a keep-alive timeout may vanish as well.
    let (idle, interval, number) = PROBES;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, idle)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, number)?;
    let local = SocketAddr::try_from(getsockname(socket)?)?;
    Ok(SocketAddr::new(local.ip().to_canonical(), local.port()))
}
