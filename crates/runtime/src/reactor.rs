//! The loop of one thread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{
    CompletionQueue, ConnectParams, ConnectionRequest, CreateError, Device, EventQueue, ListenError,
    Listener, Qpn, Status, WorkCompletion,
};

use crate::connection::{Completed, EstablishError, MessageConnection, Sizes};
use crate::keepalive::KeepAlive;
use crate::mailbox::{Inbox, Mailbox, mailbox};
use crate::waiting::Waiting;

/// In one poll of so many, messages of other threads and requests for connections come first: completions alone could keep a thread
/// busy.
const OTHERS_EVERY: u32 = 16;

/// A connection of a reactor. Numbers begin at 1 and are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Limits of a reactor.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections through one listener.
    pub connections: usize,
    /// Time of silence after which the peer of a watched connection is taken for dead.
    pub keepalive: Duration,
}

/// An event that the reactor hands to the service.
#[derive(Debug)]
pub enum Event<M> {
    /// A peer wants a connection: accept it ([`Reactor::accept`]) or refuse it. Dropping it refuses it.
    Request(Request),
    /// A message has arrived, or a request is done. Never [`Completed::Nothing`].
    Completed(ConnectionId, Completed),
    /// A connection is over. It stays until [`Reactor::close`], which may be called before.
    Ended(ConnectionId, End),
    /// A message from another thread.
    Mail(M),
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The peer has ended it.
    Disconnected,
    /// A request has failed with this status.
    Failed(Status),
    /// The peer's device has not answered for the keep-alive time.
    Silent,
    /// The queue pair accepts nothing more.
    Lost,
}

/// A peer's request for a connection.
#[derive(Debug)]
pub struct Request {
    listener: usize,
    request: ConnectionRequest,
}

impl Request {
    /// Returns the peer's address.
    pub fn peer(&self) -> IpAddr {
        self.request.peer()
    }

    /// Refuses the request, and tells the peer why.
    pub fn refuse(self, why: &str) {
        self.request.reject(why.as_bytes());
    }
}

/// Why a request was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The listener has as many connections as it may have.
    #[error("too many connections")]
    TooMany,
    /// The connection was not established.
    #[error(transparent)]
    Establish(#[from] EstablishError),
}

/// A listener, and the completion queue of its connections.
#[derive(Debug)]
struct Port {
    device: Device,
    cq: CompletionQueue,
    listener: Listener,
    connections: usize,
}

#[derive(Debug)]
struct Known {
    link: MessageConnection,
    listener: usize,
    watched: bool,
}

/// The loop of one thread: it owns the thread's connections, and waits for everything that concerns them at once, by polling or
/// asleep ([`rdmux_verbs::waiting`]). Other threads send it messages by a [`Mailbox`].
#[derive(Debug)]
pub struct Reactor<M> {
    sizes: Sizes,
    limits: Limits,
    /// Connections that have failed, and when each is dropped. The oldest is first.
    lingering: VecDeque<(Instant, Known)>,
    connections: HashMap<ConnectionId, Known>,
    by_qpn: HashMap<(usize, Qpn), ConnectionId>,
    connections_so_far: u64,
    ports: Vec<Port>,
    /// The port to poll next.
    next_port: usize,
    polls: u32,
    /// Reports the ports at which requests for connections have arrived.
    requests: EventQueue,
    /// A port that may have more requests.
    requested: Option<usize>,
    /// Ends of connections that were noticed and not reported.
    ended: VecDeque<(ConnectionId, End)>,
    keepalive: KeepAlive,
    mailbox: Mailbox<M>,
    inbox: Inbox<M>,
    waiting: Waiting,
}

impl<M> Reactor<M> {
    /// Makes a reactor whose connections have these sizes; `waiting` pins how it waits.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new(sizes: Sizes, limits: Limits, waiting: Option<WaitMode>) -> io::Result<Reactor<M>> {
        let (mailbox, inbox) = mailbox()?;
        Ok(Reactor {
            sizes,
            limits,
            lingering: VecDeque::new(),
            connections: HashMap::new(),
            by_qpn: HashMap::new(),
            connections_so_far: 0,
            ports: Vec::new(),
            next_port: 0,
            polls: 0,
            requests: EventQueue::new()?,
            requested: None,
            ended: VecDeque::new(),
            // A peer that has not answered a probe by the next one was silent for that time, and before the probe for no more.
            keepalive: KeepAlive::new(limits.keepalive / 2),
            mailbox,
            inbox,
            waiting: Waiting::new(waiting),
        })
    }

    /// Listens on a port of a device.
    pub fn listen(&mut self, device: &Device, port: u16) -> Result<(), ListenAtError> {
        let cq = self.completion_queue(device)?;
        let listener = device.listen(port)?;
        listener.notify(&self.requests, self.ports.len() as u64);
        self.ports.push(Port {
            device: device.clone(),
            cq,
            listener,
            connections: 0,
        });
        Ok(())
    }

    /// Returns the completion queue of the connections of one listener. This is where a pool of shared queues would give one.
    fn completion_queue(&self, device: &Device) -> Result<CompletionQueue, CreateError> {
        device.create_cq((self.limits.connections * self.sizes.completions()) as u32)
    }

    /// Returns the devices that it listens on, one for each listener.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.ports.iter().map(|port| &port.device)
    }

    /// Returns a mailbox for messages to this reactor's thread.
    pub fn mailbox(&self) -> Mailbox<M> {
        self.mailbox.clone()
    }

    /// Accepts a request, with a protection domain of its own: no key of one connection is valid for another.
    pub fn accept(
        &mut self,
        mut request: Request,
        params: &ConnectParams,
    ) -> Result<ConnectionId, AcceptError> {
        let port = &mut self.ports[request.listener];
        if port.connections >= self.limits.connections {
            request.refuse(&AcceptError::TooMany.to_string());
            return Err(AcceptError::TooMany);
        }
        let pd = port.device.alloc_pd().map_err(EstablishError::Create)?;
        let link = MessageConnection::accept(&mut request.request, &pd, &port.cq, params, &self.sizes)?;
        port.connections += 1;
        self.connections_so_far += 1;
        let connection = ConnectionId(self.connections_so_far);
        self.by_qpn
            .insert((request.listener, link.qp().qpn()), connection);
        let known = Known {
            link,
            listener: request.listener,
            watched: false,
        };
        self.connections.insert(connection, known);
        Ok(connection)
    }

    /// Returns a connection, until it is closed.
    pub fn connection(&mut self, connection: ConnectionId) -> Option<&mut MessageConnection> {
        self.connections.get_mut(&connection).map(|known| &mut known.link)
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Probes the peer of a connection from now on, so that its death is noticed.
    pub fn watch(&mut self, connection: ConnectionId) {
        if let Some(known) = self.connections.get_mut(&connection) {
            known.watched = true;
        }
    }

    /// Ends a connection, of which no event follows. It disconnects after `linger`, if given: a peer whose access has failed gets the
    /// NAK that names the cause before it is disconnected.
    pub fn close(&mut self, connection: ConnectionId, linger: Option<Duration>) {
        let Some(known) = self.connections.remove(&connection) else {
            return;
        };
        self.by_qpn.remove(&(known.listener, known.link.qp().qpn()));
        match linger {
            Some(linger) => self.lingering.push_back((Instant::now() + linger, known)),
            None => self.dropped(known),
        }
    }

    fn dropped(&mut self, known: Known) {
        self.ports[known.listener].connections -= 1;
        drop(known);
    }

    /// Returns what has happened, without waiting.
    pub fn poll(&mut self) -> Option<Event<M>> {
        self.polls = self.polls.wrapping_add(1);
        let others_first = self.polls.is_multiple_of(OTHERS_EVERY);
        if others_first && let Some(event) = self.poll_others() {
            return Some(event);
        }
        self.poll_completions().or_else(|| self.poll_others())
    }

    fn poll_completions(&mut self) -> Option<Event<M>> {
        for _ in 0..self.ports.len() {
            let at = self.next_port % self.ports.len();
            self.next_port = at + 1;
            while let Some(wc) = self.ports[at].cq.poll() {
                if let Some(event) = self.completed(at, &wc) {
                    return Some(event);
                }
            }
        }
        None
    }

    pub(crate) fn poll_others(&mut self) -> Option<Event<M>> {
        if let Some((connection, end)) = self.ended.pop_front() {
            return Some(Event::Ended(connection, end));
        }
        if let Some(mail) = self.inbox.take() {
            return Some(Event::Mail(mail));
        }
        loop {
            // The queue reports a port once, however many requests have arrived there.
            let reported = || self.requests.poll().map(|token| token as usize);
            let listener = self.requested.take().or_else(reported)?;
            if let Some(request) = self.ports[listener].listener.accept(Duration::ZERO) {
                self.requested = Some(listener);
                return Some(Event::Request(Request { listener, request }));
            }
        }
    }

    fn completed(&mut self, port: usize, wc: &WorkCompletion) -> Option<Event<M>> {
        let connection = *self.by_qpn.get(&(port, wc.qpn))?;
        let link = &mut self.connections.get_mut(&connection)?.link;
        match link.handle(wc) {
            Ok(Completed::Nothing) => None,
            Ok(completed) => Some(Event::Completed(connection, completed)),
            Err(Status::Flushed) => Some(Event::Ended(connection, End::Disconnected)),
            Err(status) => Some(Event::Ended(connection, End::Failed(status))),
        }
    }

    /// Does what is due at `now`; returns when the next is due.
    pub(crate) fn handle_timers(&mut self, now: Instant) -> Option<Instant> {
        if self.keepalive.is_due(now, !self.connections.is_empty()) {
            // All at once, so that the machine wakes up once.
            for (connection, known) in self.connections.iter_mut().filter(|(_, known)| known.watched) {
                let end = match known.link.probe() {
                    Ok(true) => continue,
                    Ok(false) => End::Silent,
                    Err(_) => End::Lost,
                };
                self.ended.push_back((*connection, end));
            }
        }
        while self.lingering.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, known)) = self.lingering.pop_front()
        {
            self.dropped(known);
        }
        let lingering = self.lingering.front().map(|(until, _)| *until);
        lingering.into_iter().chain(self.keepalive.next).min()
    }

    /// Returns what happens next. Returns `None` at the deadline, and also earlier.
    pub fn next(&mut self, deadline: Option<Instant>) -> io::Result<Option<Event<M>>> {
        let began = Instant::now();
        let due = self.handle_timers(began);
        if let Some(event) = self.poll() {
            return Ok(Some(event));
        }
        let deadline = deadline.into_iter().chain(due).min();
        while self.waiting.pause(began) {
            if let Some(event) = self.poll() {
                self.waiting.came(began);
                return Ok(Some(event));
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.waiting.gave_up(began);
                return Ok(None);
            }
        }
        for at in 0..self.ports.len() {
            // A wait of zero time arms the queue and polls once more: no completion is missed.
            while let Some(wc) = self.ports[at].cq.wait(Duration::ZERO)? {
                if let Some(event) = self.completed(at, &wc) {
                    self.waiting.came(began);
                    return Ok(Some(event));
                }
            }
        }
        let mut fds = vec![self.requests.as_fd()];
        fds.extend(self.ports.iter().map(|port| port.cq.as_fd()));
        let woken = self.inbox.sleep(&fds, deadline)?;
        self.waiting.slept(began, woken);
        Ok(self.poll())
    }
}

/// Why a reactor does not listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenAtError {
    /// The port cannot be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// There is no completion queue for its connections.
    #[error(transparent)]
    Create(#[from] CreateError),
}
