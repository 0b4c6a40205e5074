//! Serves a [`Target`] over NVMe/TCP: reactors, each with connections of its own, which stay with it.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_runtime::{
    DescriptorId, Interest, Limits, Mailbox, Queues, Reactor, ReactorEvent, Run, Sizes, Workers,
};
use rdmux_verbs::waiting::WaitMode;
use rdmux_wire::nvme::{Status, TransportKind};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, getsockname, recv, sendmsg, shutdown, sockopt,
};

use crate::target::{Listener, Target};
use crate::tcp::{Buffers, Connection, Work};

/// Maximum number of connections of a reactor.
const CONNECTIONS_MAX: usize = 4096;
/// Receives from one connection before others have their turn.
const RECEIVES_MAX: usize = 16;
/// Bytes of I/Os and of messages of one connection before others have their turn.
const TURN_BYTES: usize = 4 << 20;
/// Slices of one message to a socket.
const SLICES_MAX: usize = 64;
/// Jobs of one lane that wait for a medium; those beyond fail, and their hosts repeat them.
const JOBS_MAX: usize = 64 << 10;
/// Lanes of a namespace whose medium may have to be waited for.
const LANES: usize = 4;
/// Connections that are accepted at once.
const ACCEPTS_MAX: usize = 64;
/// Time for which nothing is accepted when the system has no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Time for a host to take the last responses of a connection that is over, and to close it.
const LINGER: Duration = Duration::from_secs(1);
/// Time without a packet after which the kernel probes a host, time between probes, and their number.
const PROBES: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);
/// Time between two looks at the deadlines of connections.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Settings of a server.
#[derive(Debug)]
pub struct Config {
    /// Subsystems that it serves.
    pub target: Arc<Target>,
    /// Addresses and ports to listen on, by TCP.
    pub listen: Vec<SocketAddr>,
    /// Number of reactors, each a thread.
    pub reactors: usize,
    /// Pins how reactors wait.
    pub waiting: Option<WaitMode>,
}

/// Reason for which a server could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address or port is not free.
    #[error(
        "cannot listen on {address}: {source} (choose another with --listen tcp:ADDR:PORT, or end the other server)"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Ends a server from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Vec<Mailbox<Mail>>);

impl Stopper {
    /// Makes [`Server::run`] return.
    pub fn stop(&self) {
        for mailbox in &self.0 {
            mailbox.send(Mail::Stop);
        }
    }
}

/// Stops a server when it is dropped.
struct StopOnDrop(Stopper);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[derive(Debug)]
enum Mail {
    Stop,
    /// A connection that another reactor has accepted.
    Socket(OwnedFd),
    /// An I/O of a connection is done.
    Finished(DescriptorId, Work, Status),
    /// A change of a subsystem or a controller, which queues of this reactor may share.
    Changed,
    /// A connection has more to do than its last turn allowed.
    Turn(DescriptorId),
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    reactors: Vec<ServerReactor>,
    addresses: Vec<SocketAddr>,
}

/// A reactor with its connections.
#[derive(Debug)]
struct ServerReactor {
    reactor: Reactor<Mail>,
    target: Arc<Target>,
    listeners: HashMap<DescriptorId, TcpListener>,
    connections: HashMap<DescriptorId, Served>,
    /// All reactors of the server, to which accepted connections go in turn.
    mailboxes: Vec<Mailbox<Mail>>,
    next_mailbox: usize,
    buffers: Buffers,
    media: Workers<(usize, usize), Job, Mail>,
    next_lane: usize,
    next_look: Option<Instant>,
    /// Listeners are not looked at before this time.
    accepts_again: Option<Instant>,
}

#[derive(Debug)]
struct Served {
    connection: Connection,
    interest: Interest,
    /// A turn of it is among this reactor's messages.
    has_turn: bool,
    /// Set once it is over: until then its host may take the last responses.
    closes_at: Option<Instant>,
}

/// An I/O that may wait for a medium.
type Job = (DescriptorId, Work);

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// An address is not free, or the system refuses a descriptor.
    pub fn bind(config: Config) -> Result<Server, ServeError> {
        // The connections of RDMA have sizes; TCP's have not.
        let sizes = Sizes {
            message_bytes: 0,
            receives: 0,
            answers: 0,
            own: 0,
            operations: 0,
        };
        let limits = Limits {
            connections: CONNECTIONS_MAX,
            keepalive: Duration::from_secs(30),
            shared_receives: None,
            queues: Queues::Private,
        };
        let mut reactors = Vec::new();
        for _ in 0..config.reactors.max(1) {
            reactors.push(Reactor::new(sizes, limits, config.waiting)?);
        }
        let mailboxes: Vec<_> = reactors.iter().map(Reactor::mailbox).collect();
        let mut reactors: Vec<_> = reactors
            .into_iter()
            .map(|reactor| ServerReactor::new(reactor, config.target.clone(), mailboxes.clone()))
            .collect();
        let mut addresses = Vec::new();
        for address in config.listen {
            let failed = |source| ServeError::Listen { address, source };
            let listener = TcpListener::bind(address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            reactors[0].listen(listener).map_err(failed)?;
            config.target.add_listener(Listener {
                transport: TransportKind::Tcp,
                address,
            });
            addresses.push(address);
        }
        Ok(Server { reactors, addresses })
    }

    /// Returns the addresses on which it listens, with the ports that the system chose.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns a handle that ends it.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.reactors.iter().map(|own| own.reactor.mailbox()).collect())
    }

    /// Serves until it is stopped: the first reactor on this thread, the others on threads of their own.
    ///
    /// # Errors
    /// A system call of a reactor failed.
    pub fn run(self) -> io::Result<()> {
        let stopper = self.stopper();
        let mut reactors = self.reactors.into_iter();
        let first = reactors.next();
        let mut threads: Vec<JoinHandle<io::Result<()>>> = Vec::new();
        let mut result = Ok(());
        for mut own in reactors {
            let others = stopper.clone();
            let run = move || {
                // Also if it panics: its controllers are gone then.
                let _stop = StopOnDrop(others);
                own.run()
            };
            match std::thread::Builder::new().name("nvmf".to_owned()).spawn(run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    result = Err(error);
                    stopper.stop();
                }
            }
        }
        if let Some(mut first) = first {
            result = result.and(first.run());
        }
        stopper.stop();
        for thread in threads {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a reactor has panicked")));
            result = result.and(ended);
        }
        result
    }
}

impl ServerReactor {
    fn new(reactor: Reactor<Mail>, target: Arc<Target>, mailboxes: Vec<Mailbox<Mail>>) -> ServerReactor {
        let run: Run<Job, Mail> = |jobs, report| {
            for (connection, mut work) in jobs {
                let status = work.execute();
                if !report(Mail::Finished(connection, work, status)) {
                    return;
                }
            }
        };
        let media = Workers::new("nvmf-media", JOBS_MAX, run, reactor.mailbox());
        ServerReactor {
            reactor,
            target,
            listeners: HashMap::new(),
            connections: HashMap::new(),
            mailboxes,
            next_mailbox: 0,
            buffers: Buffers::default(),
            media,
            next_lane: 0,
            next_look: None,
            accepts_again: None,
        }
    }

    fn listen(&mut self, listener: TcpListener) -> io::Result<()> {
        let descriptor = listener.try_clone()?.into();
        let id = self.reactor.add_descriptor(descriptor, Interest::READABLE)?;
        self.listeners.insert(id, listener);
        Ok(())
    }

    fn run(&mut self) -> io::Result<()> {
        loop {
            let deadline = self.next_look.into_iter().chain(self.accepts_again).min();
            let event = self.reactor.next(deadline)?;
            let now = Instant::now();
            match event {
                Some(ReactorEvent::Readable(id)) => match self.listeners.contains_key(&id) {
                    true => self.accept(id, now)?,
                    false => self.receive(id, now),
                },
                Some(ReactorEvent::Writable(id)) => self.pump(id, now),
                Some(ReactorEvent::Mail(Mail::Stop)) => return Ok(()),
                Some(ReactorEvent::Mail(Mail::Socket(socket))) => self.begin(socket, now),
                Some(ReactorEvent::Mail(Mail::Turn(id))) => {
                    if let Some(served) = self.connections.get_mut(&id) {
                        served.has_turn = false;
                        self.pump(id, now);
                    }
                }
                Some(ReactorEvent::Mail(Mail::Finished(id, work, status))) => {
                    if let Some(served) = self.connections.get_mut(&id) {
                        served.connection.complete(work, status, &mut self.buffers);
                        self.pump(id, now);
                    }
                }
                Some(ReactorEvent::Mail(Mail::Changed)) => {
                    let ids: Vec<_> = self.connections.keys().copied().collect();
                    for id in ids {
                        if let Some(served) = self.connections.get_mut(&id) {
                            served.connection.handle_change();
                        }
                        self.pump(id, now);
                    }
                }
                Some(_) | None => {}
            }
            if self.next_look.is_some_and(|look| look <= now) {
                self.look_at_deadlines(now);
            }
            if self.accepts_again.is_some_and(|again| again <= now) {
                self.accepts_again = None;
                self.watch_listeners(Interest::READABLE)?;
            }
        }
    }

    fn watch_listeners(&mut self, interest: Interest) -> io::Result<()> {
        for id in self.listeners.keys() {
            self.reactor.set_interest(*id, interest)?;
        }
        Ok(())
    }

    /// Accepts what waits at a listener, and passes it to the reactors in turn.
    fn accept(&mut self, id: DescriptorId, now: Instant) -> io::Result<()> {
        let Some(listener) = self.listeners.get(&id) else {
            return Ok(());
        };
        for _ in 0..ACCEPTS_MAX {
            match listener.accept() {
                Ok((socket, _)) => {
                    let mailbox = &self.mailboxes[self.next_mailbox % self.mailboxes.len()];
                    self.next_mailbox += 1;
                    mailbox.send(Mail::Socket(socket.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A host that has gone again.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    // The listener stays readable: it would wake this thread for ever.
                    self.accepts_again = Some(now + ACCEPT_PAUSE);
                    return self.watch_listeners(Interest::default());
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, socket: OwnedFd, now: Instant) {
        if self.connections.len() >= CONNECTIONS_MAX {
            return;
        }
        let Ok(local) = prepare(&socket) else {
            return;
        };
        let Ok(id) = self.reactor.add_descriptor(socket, Interest::READABLE) else {
            return;
        };
        let served = Served {
            connection: Connection::new(self.target.clone(), local, now),
            interest: Interest::READABLE,
            has_turn: false,
            closes_at: None,
        };
        self.connections.insert(id, served);
        self.look_by(now + LOOK_EVERY);
    }

    fn look_by(&mut self, time: Instant) {
        self.next_look = self.next_look.into_iter().chain([time]).min();
    }

    /// Receives from a connection, and does what that asks for.
    fn receive(&mut self, id: DescriptorId, now: Instant) {
        for _ in 0..RECEIVES_MAX {
            let Some(served) = self.connections.get_mut(&id) else {
                return;
            };
            let is_over = served.closes_at.is_some();
            if !is_over && !served.connection.wants_bytes() {
                break;
            }
            let Some(socket) = self.reactor.descriptor(id) else {
                return;
            };
            let mut unwanted = [0; 4096];
            let space = if is_over {
                &mut unwanted[..]
            } else {
                served.connection.space()
            };
            let wanted = space.len();
            match recv(socket, space, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return self.close(id),
                Ok((bytes, _)) => {
                    if !is_over {
                        served.connection.received(bytes, &mut self.buffers, now);
                    }
                    if bytes < wanted {
                        break;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return self.close(id),
            }
        }
        self.pump(id, now);
    }

    /// Carries out the I/Os of a connection and sends what it has to send, as much as a turn allows, and closes it if it is over.
    fn pump(&mut self, id: DescriptorId, now: Instant) {
        let Some(served) = self.connections.get_mut(&id) else {
            return;
        };
        let connection = &mut served.connection;
        let Some(socket) = self.reactor.descriptor(id) else {
            return;
        };
        let mut left = TURN_BYTES;
        let is_blocked = loop {
            let mut has_run = false;
            while left > 0
                && let Some(mut work) = connection.poll_io()
            {
                has_run = true;
                if !work.io().may_wait() {
                    left = left.saturating_sub(work.io().length as usize);
                    let status = work.execute();
                    connection.complete(work, status, &mut self.buffers);
                    continue;
                }
                self.next_lane = (self.next_lane + 1) % LANES;
                let namespace = Arc::as_ptr(&work.io().namespace).addr();
                if let Err(((_, work), _)) = self.media.submit((namespace, self.next_lane), (id, work)) {
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
            match send(socket, &slices[..number]) {
                Ok(bytes) => {
                    left = left.saturating_sub(bytes);
                    connection.sent(bytes, &mut self.buffers);
                }
                Err(Errno::AGAIN) => break true,
                Err(Errno::INTR) => {}
                Err(_) => return self.close(id),
            }
            if left == 0 {
                if !served.has_turn {
                    served.has_turn = true;
                    self.reactor.mailbox().send(Mail::Turn(id));
                }
                break false;
            }
        };
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
            if self.reactor.set_interest(id, interest).is_err() {
                return self.close(id);
            }
        }
        if let Some(deadline) = deadline.into_iter().chain(closes_at).min() {
            self.look_by(deadline);
        }
        if has_reset {
            self.tell_of_change();
        }
    }

    /// Has all reactors look at their connections: I/O queues of a controller may be with any of them.
    fn tell_of_change(&self) {
        for mailbox in &self.mailboxes {
            mailbox.send(Mail::Changed);
        }
    }

    fn close(&mut self, id: DescriptorId) {
        self.reactor.remove_descriptor(id);
        let Some(served) = self.connections.remove(&id) else {
            return;
        };
        if served.connection.has_io_queues() {
            drop(served);
            self.tell_of_change();
        }
    }

    fn look_at_deadlines(&mut self, now: Instant) {
        self.next_look = None;
        let is_due = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let due = self
            .connections
            .iter()
            .filter(|(_, served)| is_due(served.deadline()));
        let due: Vec<_> = due.map(|(id, _)| *id).collect();
        for id in due {
            // This thread may have been held up: the host may have sent in time.
            self.receive(id, now);
            let Some(served) = self.connections.get_mut(&id) else {
                continue;
            };
            if is_due(served.closes_at) {
                self.close(id);
                continue;
            }
            served.connection.handle_timeout(now);
            self.pump(id, now);
        }
        if let Some(first) = self.connections.values().filter_map(Served::deadline).min() {
            self.look_by(first.max(now + LOOK_EVERY));
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
fn prepare(socket: &OwnedFd) -> io::Result<IpAddr> {
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
    Ok(local.ip().to_canonical())
}

fn send(socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> rustix::io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags)
}
