//! The loop of one thread.

mod port;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::ledger::Ledger;
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{
    CompletionQueue, ConnectParams, ConnectionRequest, Device, Endpoint, EngineWatch, EventQueue,
    ModerationPolicy, ProtectionDomain, Qpn, Status, WorkCompletion,
};
use rustix::event::{PollFd, PollFlags};

use crate::connection::{Completed, EstablishError, MessageConnection, PendingConnection, Sizes};
use crate::descriptors::{DescriptorId, Descriptors, Interest, Report};
use crate::keepalive::KeepAlive;
use crate::mailbox::{Inbox, Mailbox, mailbox};
use crate::queues::{PortQueues, Queues};
use crate::receives::ReceiveShare;
use crate::waiting::{Waiting, set_timer_slack};
use crate::work_id::WorkId;

pub use self::port::{ListenAtError, PortId, PreparedPort, Recipient};
use self::port::{Passed, ReactorPort};

/// In one poll of so many, messages of other threads, connections and descriptors come first: completions alone could keep a thread busy.
const OTHERS_EVERY: u32 = 16;
/// Tokens of the connection events: those of connections have this bit, and the connection's number below it. Others are ports.
const CONNECTION: u64 = 1 << 63;

/// A connection of a reactor. Numbers begin at 1 and are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Limits of a reactor.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections through one listener, and those that begin at one device.
    pub connections: usize,
    /// Time of silence after which the peer of a watched connection is taken for dead.
    pub keepalive: Duration,
    /// The connections of a listener share so many receives, and add one each, if the device can do that
    /// ([`Features::SHARED_RECEIVES`](rdmux_verbs::Features::SHARED_RECEIVES)). Each of their completion queues has room for all of these. `None`: each connection has
    /// [`Sizes::receives`] of its own.
    pub shared_receives: Option<usize>,
    /// Where the completion queues of the connections come from.
    pub queues: Queues,
    /// Books the messages that the devices of its listeners receive, as commands, and send, as completions, where they can ([`Device::booked`]).
    pub ledger: Option<Arc<Ledger>>,
}

/// An event that the reactor hands to the service.
#[derive(Debug)]
pub enum ReactorEvent<M> {
    /// A peer wants a connection: accept it ([`Reactor::accept`]) or refuse it. Dropping it refuses it.
    Request(Request),
    /// The listener has accepted ([`Reactor::connect`]), or there is no connection, for this reason.
    Connected(ConnectionId, Result<(), EstablishError>),
    /// A message has arrived, or a request is done. Never [`Completed::Nothing`].
    Completed(ConnectionId, Completed),
    /// A connection is over, which is reported once: no event of it follows. It stays until [`Reactor::close`], which may be called before.
    Ended(ConnectionId, ConnectionEnd),
    /// A message from another thread.
    Mail(M),
    /// A descriptor of the service is readable, hung up or failed ([`Reactor::add_descriptor`]).
    Readable(DescriptorId),
    /// A descriptor of the service is writable, hung up or failed.
    Writable(DescriptorId),
}

impl<M> From<Report> for ReactorEvent<M> {
    fn from(report: Report) -> ReactorEvent<M> {
        match report {
            Report::Readable(id) => ReactorEvent::Readable(id),
            Report::Writable(id) => ReactorEvent::Writable(id),
        }
    }
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
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
    port: PortId,
    request: ConnectionRequest,
}

impl Request {
    /// Returns the port at which it has arrived.
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Returns the peer's address.
    pub fn peer(&self) -> IpAddr {
        self.request.peer()
    }

    /// Returns the peer's endpoint, as it has shown it.
    pub fn remote(&self) -> &Endpoint {
        self.request.remote()
    }

    /// Returns the private data that the peer's user sent, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        self.request.private_data()
    }

    /// Refuses the request, and tells the peer why.
    pub fn refuse(self, why: &str) {
        self.request.reject(why.as_bytes());
    }

    /// Refuses the request, with private data as the protocol has it.
    pub fn refuse_with(self, private_data: &[u8]) {
        self.request.reject(private_data);
    }
}

/// Settings of a connection that is accepted, where they are not those of its reactor.
#[derive(Clone, Copy, Debug)]
pub struct AcceptOptions<'a> {
    /// Sizes of its queues. Those of the reactor are the largest that a connection can have.
    pub sizes: Sizes,
    /// Protection domain, of the device of the port at which the request has arrived ([`Request::port`]). Connections in one domain may use the same registered
    /// memory. A peer that has the key of memory with remote rights reaches it through any of them, so such memory must not be there.
    /// `None`: a domain of its own.
    pub pd: Option<&'a ProtectionDomain>,
    /// Private data of the answer.
    pub private_data: &'a [u8],
    /// Private data of the rejection, if the connection cannot be made.
    pub refusal: &'a [u8],
}

/// Why a reactor has accepted or begun no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The listener, or the device at which connections begin, has as many as it may have.
    #[error("too many connections")]
    TooMany,
    /// The connection was not established.
    #[error(transparent)]
    Establish(#[from] EstablishError),
}

/// An established connection.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
struct Established {
    link: MessageConnection,
    cq: CompletionQueue,
    port: PortId,
    watched: bool,
    stage: Stage,
    /// Set if it is among those that hold messages.
    is_holding: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// Its events have told that it is over. The completion of [`WorkId::End`] reports it, at the latest.
    Ending,
    /// Its end is among those to be reported.
    Ended,
    /// Its end is reported: no event follows.
    Reported,
}

/// An attempt to connect.
#[derive(Debug)]
struct Attempt {
    pending: PendingConnection,
    cq: CompletionQueue,
    port: PortId,
    watched: bool,
}

/// The loop of one thread: it owns the thread's connections, and waits for everything that concerns them at once, by polling or
/// asleep ([`rdmux_verbs::waiting`]). Asleep, it takes the place of its devices' engines ([`Device::watch`]): packets wake this thread
/// itself. Other threads send it messages by a [`Mailbox`].
#[derive(Debug)]
pub struct Reactor<M> {
    sizes: Sizes,
    limits: Limits,
    /// Connections that have failed, and when each is dropped, in the order of these times.
    lingering: VecDeque<(Instant, Established)>,
    connections: HashMap<ConnectionId, Established>,
    attempts: HashMap<ConnectionId, Attempt>,
    by_qpn: HashMap<(PortId, Qpn), ConnectionId>,
    connections_so_far: u64,
    ports: Vec<ReactorPort>,
    /// Number of ports that were removed, and still have connections.
    leaving: usize,
    /// The port to poll next.
    next_port: usize,
    /// Set if peers are to be probed, once the completions that had come when that was due are polled.
    probes: bool,
    polls: u32,
    /// Reports the ports at which requests for connections have arrived, attempts that may have a result, and connections that may be over.
    news: EventQueue,
    descriptors: Descriptors,
    /// The source besides completions that has the next turn.
    next_other: usize,
    /// Connections with messages that wait for slots.
    holding: Vec<ConnectionId>,
    /// Ends of connections that were noticed and not reported.
    ended: VecDeque<(ConnectionId, ConnectionEnd)>,
    keepalive: KeepAlive,
    mailbox: Mailbox<M>,
    inbox: Inbox<M>,
    /// Requests that another reactor passes on to this one.
    passing: Mailbox<Passed>,
    passed: Inbox<Passed>,
    waiting: Waiting,
}

impl<M> Reactor<M> {
    /// Makes a reactor whose connections have these sizes; `waiting` pins how it waits.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new(sizes: Sizes, limits: Limits, waiting: Option<WaitMode>) -> io::Result<Reactor<M>> {
        let (mailbox, inbox) = mailbox()?;
        let (passing, passed) = inbox.beside();
        // A peer that has not answered a probe by the next one was silent for that time, and before the probe for no more.
        let keepalive = KeepAlive::new(limits.keepalive / 2);
        Ok(Reactor {
            sizes,
            limits,
            lingering: VecDeque::new(),
            connections: HashMap::new(),
            attempts: HashMap::new(),
            by_qpn: HashMap::new(),
            connections_so_far: 0,
            ports: Vec::new(),
            leaving: 0,
            next_port: 0,
            probes: false,
            polls: 0,
            news: EventQueue::new()?,
            descriptors: Descriptors::new()?,
            next_other: 0,
            holding: Vec::new(),
            ended: VecDeque::new(),
            keepalive,
            mailbox,
            inbox,
            passing,
            passed,
            waiting: Waiting::new(waiting),
        })
    }

    /// Listens on a port of a device.
    pub fn listen(&mut self, device: &Device, port: u16) -> Result<(), ListenAtError> {
        Reactor::listen_together(std::slice::from_mut(self), device, port)
    }

    /// Listens on a port of a device with several reactors, one for each thread of a service, as [`PreparedPort::listen`] does. After an error,
    /// none listens.
    ///
    /// ```no_run
    /// # use rdmux_runtime::{Limits, Reactor, Sizes};
    /// # fn serve(mut reactor: Reactor<()>) {}
    /// # fn start(sizes: Sizes, limits: Limits) -> Result<(), Box<dyn std::error::Error>> {
    /// let cores = std::thread::available_parallelism()?.get();
    /// let new = |_| Reactor::new(sizes, limits.clone(), None);
    /// let mut reactors = (0..cores).map(new).collect::<Result<Vec<_>, _>>()?;
    /// let device = rdmux_verbs::Device::open("127.0.0.1".parse()?)?;
    /// Reactor::listen_together(&mut reactors, &device, 7174)?;
    /// let threads: Vec<_> = reactors.into_iter().map(|reactor| std::thread::spawn(|| serve(reactor))).collect();
    /// # Ok(())
    /// # }
    /// ```
    pub fn listen_together(
        reactors: &mut [Reactor<M>],
        device: &Device,
        port: u16,
    ) -> Result<(), ListenAtError> {
        let recipients: Vec<Recipient> = reactors.iter().map(Reactor::recipient).collect();
        let Some(sizes) = reactors.first().map(|first| first.sizes) else {
            return Ok(());
        };
        let prepared = PreparedPort::listen(&recipients, device, port, &sizes)?;
        for (reactor, prepared) in reactors.iter_mut().zip(prepared) {
            reactor.add_port(prepared);
        }
        Ok(())
    }

    /// Returns what other threads need to prepare ports for it.
    pub fn recipient(&self) -> Recipient {
        Recipient {
            passing: self.passing.clone(),
            limits: self.limits.clone(),
        }
    }

    /// Listens at a port that was prepared for this reactor. Of several reactors that listen together the first one has its part last: it may
    /// pass requests on to the others.
    pub fn add_port(&mut self, PreparedPort(port): PreparedPort) {
        if let Some(listener) = &port.listener {
            listener.notify(&self.news, port.id.0);
        }
        self.ports.push(port);
    }

    /// Has a prepared port accept connections in place of another one of the same device, whose connections stay. Returns false, and drops the
    /// prepared one, if there is no such port.
    pub fn renew_port(&mut self, id: PortId, PreparedPort(mut port): PreparedPort) -> bool {
        let Some(old) = self.port(id).filter(|old| old.accepts && !old.leaves) else {
            return false;
        };
        port.service = old.service;
        port.listener = old.listener.take();
        port.delayed = std::mem::take(&mut old.delayed);
        // The registration of the listener reports from here on for the new port.
        port.has_requests = port.listener.is_some();
        self.add_port(PreparedPort(port));
        self.remove_port(id)
    }

    /// Accepts no more connections at a port. Those that there are stay, and the port goes with the last one of them. Returns false if there
    /// is no such port.
    pub fn remove_port(&mut self, id: PortId) -> bool {
        let Some(port) = self.port(id).filter(|port| port.accepts && !port.leaves) else {
            return false;
        };
        port.leave();
        self.leaving += 1;
        self.drop_left();
        true
    }

    /// Drops ports that were left, and have no connection any more.
    fn drop_left(&mut self) {
        if self.leaving > 0 {
            self.ports.retain(|port| !port.leaves || port.connections > 0);
            self.leaving = self.ports.iter().filter(|port| port.leaves).count();
        }
    }

    fn port(&mut self, id: PortId) -> Option<&mut ReactorPort> {
        self.ports.iter_mut().find(|port| port.id == id)
    }

    /// Has one more reactor take requests that arrive at the last port, in turn.
    #[cfg(test)]
    pub(crate) fn pass_to(&mut self, other: &mut Reactor<M>) -> Result<(), EstablishError> {
        if let Some(port) = self.ports.last_mut() {
            let mut taker = ReactorPort::new(&port.device, true, None, &other.sizes, &other.limits)?;
            taker.service = port.service;
            port.takers.push(other.passing.clone());
            other.add_port(PreparedPort(taker));
        }
        Ok(())
    }

    /// Returns the devices that it listens on, one for each listener.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        let listening = self.ports.iter().filter(|port| port.accepts && !port.leaves);
        listening.map(|port| &port.device)
    }

    /// Returns a mailbox for messages to this reactor's thread.
    pub fn mailbox(&self) -> Mailbox<M> {
        self.mailbox.clone()
    }

    /// Accepts a request, with a protection domain of its own: no key of one connection is valid for another.
    pub fn accept(
        &mut self,
        request: Request,
        params: &ConnectParams,
    ) -> Result<ConnectionId, ConnectionError> {
        if !self.has_room(&request) {
            request.refuse(&ConnectionError::TooMany.to_string());
            return Err(ConnectionError::TooMany);
        }
        let of_port = self.port(request.port).map(|port| port.sizes);
        let options = AcceptOptions {
            sizes: of_port.unwrap_or(self.sizes),
            pd: None,
            private_data: &[],
            refusal: &[],
        };
        self.accept_with(request, params, &options)
    }

    /// Returns whether the listener may have another connection.
    pub fn has_room(&self, request: &Request) -> bool {
        let mut ports = self.ports.iter();
        let port = ports.find(|port| port.id == request.port && !port.leaves);
        port.is_some_and(|port| port.connections < self.limits.connections)
    }

    /// Accepts a request as [`Reactor::accept`] does, with settings of its own. A request that finds no room is refused without private data.
    pub fn accept_with(
        &mut self,
        request: Request,
        params: &ConnectParams,
        options: &AcceptOptions<'_>,
    ) -> Result<ConnectionId, ConnectionError> {
        let has_room = self.has_room(&request);
        let ledger = self.limits.ledger.clone();
        let Request { port: id, request } = request;
        let Some(port) = self.port(id).filter(|_| has_room) else {
            request.reject(options.refusal);
            return Err(ConnectionError::TooMany);
        };
        let sizes = options.sizes.within(&port.sizes);
        let pd = match options.pd {
            Some(pd) => Ok(pd.clone()),
            None => port.device.alloc_pd().map_err(EstablishError::Create),
        };
        let joined = pd.and_then(|pd| Ok((pd, port.queues.join(sizes.completions() as u32)?)));
        let (pd, cq) = match joined {
            Ok(joined) => joined,
            Err(error) => {
                request.reject(options.refusal);
                return Err(error.into());
            }
        };
        let share = port.receives.as_ref().map(ReceiveShare::new).transpose();
        let link = match share {
            Ok(share) => {
                let answers = (options.private_data, options.refusal);
                MessageConnection::accept_sharing(
                    request,
                    (&pd, &cq),
                    params,
                    &sizes,
                    answers,
                    share,
                    ledger.as_ref(),
                )
            }
            Err(error) => {
                request.reject(options.refusal);
                Err(EstablishError::Post(error))
            }
        };
        let link = match link {
            Ok(link) => link,
            Err(error) => {
                port.left(&cq);
                return Err(error.into());
            }
        };
        port.connections += 1;
        let connection = self.next_connection();
        link.notify(&self.news, CONNECTION | connection.0);
        self.established(connection, (link, cq), id, false);
        Ok(connection)
    }

    /// Starts to connect to a listener from a device. [`ReactorEvent::Connected`] has the result; the connection can be closed before.
    pub fn connect(
        &mut self,
        device: &Device,
        peer: SocketAddr,
        params: &ConnectParams,
    ) -> Result<ConnectionId, ConnectionError> {
        let begins = |port: &ReactorPort| !port.accepts && port.device.is(device);
        let at = match self.ports.iter().position(begins) {
            Some(at) => at,
            None => {
                let port = ReactorPort::new(device, false, None, &self.sizes, &self.limits)?;
                self.ports.push(port);
                self.ports.len() - 1
            }
        };
        let port = &mut self.ports[at];
        if port.connections >= self.limits.connections {
            return Err(ConnectionError::TooMany);
        }
        let pd = device.alloc_pd().map_err(EstablishError::Create)?;
        let cq = port.queues.join(self.sizes.completions() as u32);
        let cq = cq.map_err(EstablishError::from)?;
        let pending = match MessageConnection::start(&pd, &cq, peer, params, &self.sizes) {
            Ok(pending) => pending,
            Err(error) => {
                port.left(&cq);
                return Err(error.into());
            }
        };
        port.connections += 1;
        let port = port.id;
        let connection = self.next_connection();
        pending.notify(&self.news, CONNECTION | connection.0);
        let attempt = Attempt {
            pending,
            cq,
            port,
            watched: false,
        };
        self.attempts.insert(connection, attempt);
        Ok(connection)
    }

    fn next_connection(&mut self) -> ConnectionId {
        self.connections_so_far += 1;
        ConnectionId(self.connections_so_far)
    }

    fn established(
        &mut self,
        connection: ConnectionId,
        (link, cq): (MessageConnection, CompletionQueue),
        port: PortId,
        watched: bool,
    ) {
        self.by_qpn.insert((port, link.qp().qpn()), connection);
        let known = Established {
            link,
            cq,
            port,
            watched,
            stage: Stage::Open,
            is_holding: false,
        };
        self.connections.insert(connection, known);
    }

    /// Reports from now on whenever what `interest` asks for is so of a descriptor: a socket's, a timer's, an io_uring's. It is reported again
    /// and again for as long as it is so. The descriptor must not block: a report may come after the service has read everything.
    ///
    /// # Errors
    /// The system cannot watch it, as a file, or refuses. The descriptor is closed.
    pub fn add_descriptor(&mut self, descriptor: OwnedFd, interest: Interest) -> io::Result<DescriptorId> {
        self.descriptors.add(descriptor, interest)
    }

    /// Changes what is reported of a descriptor: nothing while the service takes no more from a peer, writable as well while an answer waits
    /// for room. Without a change it costs no system call.
    ///
    /// # Errors
    /// There is no such descriptor ([`io::ErrorKind::NotFound`]), or the system refuses.
    pub fn set_interest(&mut self, id: DescriptorId, interest: Interest) -> io::Result<()> {
        self.descriptors.set_interest(id, interest)
    }

    /// Returns a descriptor, until it is removed.
    pub fn descriptor(&self, id: DescriptorId) -> Option<BorrowedFd<'_>> {
        self.descriptors.get(id)
    }

    /// Reports a descriptor no more, and returns it.
    pub fn remove_descriptor(&mut self, id: DescriptorId) -> Option<OwnedFd> {
        self.descriptors.remove(id)
    }

    /// Returns a connection, until it is closed.
    pub fn connection(&mut self, connection: ConnectionId) -> Option<&mut MessageConnection> {
        self.connections.get_mut(&connection).map(|known| &mut known.link)
    }

    /// Returns the number of established connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Probes the peer of a connection from now on, so that its death is noticed.
    pub fn watch(&mut self, connection: ConnectionId) {
        if let Some(known) = self.connections.get_mut(&connection) {
            known.watched = true;
        }
        if let Some(attempt) = self.attempts.get_mut(&connection) {
            attempt.watched = true;
        }
    }

    /// Ends a connection, of which no event follows, or withdraws an attempt. It disconnects after `linger`, if given: a peer whose
    /// access has failed gets the NAK that names the cause before it is disconnected. Messages that wait for slots are dropped.
    pub fn close(&mut self, connection: ConnectionId, linger: Option<Duration>) {
        if let Some(Attempt {
            pending, cq, port, ..
        }) = self.attempts.remove(&connection)
        {
            drop(pending);
            self.freed(port, cq);
        }
        let Some(known) = self.connections.remove(&connection) else {
            return;
        };
        self.by_qpn.remove(&(known.port, known.link.qp().qpn()));
        let was_ending = known.stage == Stage::Ending;
        if let Some(port) = self.port(known.port).filter(|_| was_ending) {
            port.ending -= 1;
        }
        // One that has not failed would go on taking receives of the others.
        let linger = linger.filter(|_| !known.link.shares_receives() || known.link.qp().error().is_some());
        match linger {
            Some(linger) => {
                let until = Instant::now() + linger;
                let at = self.lingering.partition_point(|(other, _)| *other <= until);
                self.lingering.insert(at, (until, known));
            }
            None => self.dropped(known),
        }
    }

    /// Drops a closed connection, which frees its place: if it shares receives, behind the completions of those that it has taken.
    fn dropped(&mut self, known: Established) {
        let Some(port) = self.port(known.port) else {
            return;
        };
        if known.link.shares_receives() {
            known.link.disconnect();
            if known.link.post_empty(WorkId::Last).is_ok() && !known.cq.has_lost(known.link.qp()) {
                port.closed.insert(known.link.qp().qpn(), known);
                return;
            }
        }
        let Established { link, cq, .. } = known;
        drop(link);
        port.freed(cq);
    }

    /// Frees the place of an attempt at a port.
    fn freed(&mut self, port: PortId, cq: CompletionQueue) {
        if let Some(port) = self.port(port) {
            port.freed(cq);
        }
    }

    /// Has the end of a connection reported, unless it was.
    fn report_end(&mut self, connection: ConnectionId, end: ConnectionEnd) {
        let Some(known) = self.connections.get_mut(&connection) else {
            return;
        };
        let before = std::mem::replace(&mut known.stage, Stage::Ended);
        let port = known.port;
        match before {
            Stage::Open => {}
            Stage::Ending => self.port(port).into_iter().for_each(|port| port.ending -= 1),
            Stage::Ended | Stage::Reported => {
                known.stage = before;
                return;
            }
        }
        self.ended.push_back((connection, end));
    }

    /// Returns what has happened, without waiting.
    pub fn poll(&mut self) -> Option<ReactorEvent<M>> {
        self.polls = self.polls.wrapping_add(1);
        let others_first = self.polls.is_multiple_of(OTHERS_EVERY);
        if others_first {
            // The next sleep reports an error.
            let _ = self.descriptors.look();
            if let Some(event) = self.poll_others() {
                return Some(event);
            }
        }
        if let Some(event) = self.poll_completions().or_else(|| self.poll_others()) {
            return Some(event);
        }
        // A look at the descriptors costs a system call, which would delay completions if it came with each poll.
        if others_first || !self.ports.is_empty() {
            return None;
        }
        let _ = self.descriptors.look();
        self.descriptors.report().map(ReactorEvent::from)
    }

    fn poll_completions(&mut self) -> Option<ReactorEvent<M>> {
        for _ in 0..self.ports.len() {
            let at = self.next_port % self.ports.len();
            self.next_port = at + 1;
            for _ in 0..self.ports[at].queues.len() {
                let queue = self.ports[at].queues.turn();
                while let Some(wc) = self.ports[at].queues.poll(queue) {
                    if let Some(event) = self.completed(at, &wc) {
                        return Some(event);
                    }
                }
            }
        }
        None
    }

    /// Returns a message that waited for a slot.
    fn poll_held(&mut self) -> Option<ReactorEvent<M>> {
        let mut at = 0;
        while let Some(connection) = self.holding.get(at) {
            match self.connections.get_mut(connection) {
                Some(known) if known.stage != Stage::Reported && known.link.holds_messages() => {
                    if let Some(message) = known.link.next_held() {
                        return Some(ReactorEvent::Completed(*connection, message));
                    }
                    at += 1;
                }
                known => {
                    known.into_iter().for_each(|known| known.is_holding = false);
                    self.holding.swap_remove(at);
                }
            }
        }
        None
    }

    fn poll_ended(&mut self) -> Option<ReactorEvent<M>> {
        while let Some((connection, end)) = self.ended.pop_front() {
            // It may have been closed since.
            if let Some(known) = self.connections.get_mut(&connection) {
                known.stage = Stage::Reported;
                return Some(ReactorEvent::Ended(connection, end));
            }
        }
        None
    }

    pub(crate) fn poll_others(&mut self) -> Option<ReactorEvent<M>> {
        self.probe();
        if let Some(event) = self.poll_held().or_else(|| self.poll_ended()) {
            return Some(event);
        }
        // Each of these may have something at all times: they take turns.
        for _ in 0..3 {
            let source = self.next_other;
            self.next_other = (source + 1) % 3;
            let event = match source {
                0 => self.inbox.take().map(ReactorEvent::Mail),
                1 => self.descriptors.report().map(ReactorEvent::from),
                _ => self.poll_news().or_else(|| self.poll_requests()),
            };
            if event.is_some() {
                return event;
            }
        }
        None
    }

    fn poll_requests(&mut self) -> Option<ReactorEvent<M>> {
        let request = self.poll_passed().or_else(|| self.poll_listeners());
        request.map(ReactorEvent::Request)
    }

    /// Returns the result of an attempt to connect. Takes note of connections that are over, and of listeners that have requests.
    fn poll_news(&mut self) -> Option<ReactorEvent<M>> {
        while let Some(token) = self.news.poll() {
            if token & CONNECTION == 0 {
                // A port that was removed may be gone.
                if let Some(port) = self.port(PortId(token)) {
                    port.has_requests = true;
                }
                continue;
            }
            let connection = ConnectionId(token & !CONNECTION);
            if let Some(result) = self.attempted(connection) {
                return Some(ReactorEvent::Connected(connection, result));
            }
            self.check_end(connection);
        }
        None
    }

    /// Returns a request that another reactor has passed on to this one.
    fn poll_passed(&mut self) -> Option<Request> {
        for at in 0..self.ports.len() {
            if !self.awaits_place(at)
                && let Some(request) = self.ports[at].delayed.pop_front()
            {
                let port = self.ports[at].id;
                return Some(Request { port, request });
            }
        }
        while let Some(Passed { service, request }) = self.passed.take() {
            let takes = |port: &ReactorPort| port.service == service && !port.leaves;
            // Otherwise the port was removed: the request is refused.
            if let Some(at) = self.ports.iter().position(takes) {
                if !self.awaits_place(at) {
                    let port = self.ports[at].id;
                    return Some(Request { port, request });
                }
                self.ports[at].delayed.push_back(request);
            }
        }
        None
    }

    /// Returns a request that has arrived at a listener, unless another reactor is the next to take one.
    fn poll_listeners(&mut self) -> Option<Request> {
        for at in 0..self.ports.len() {
            while self.ports[at].has_requests && !self.awaits_place(at) {
                let port = &mut self.ports[at];
                let listener = port.listener.as_ref();
                match listener.and_then(|listener| listener.accept(Duration::ZERO)) {
                    Some(request) => {
                        let id = port.id;
                        if let Some(request) = port.pass(request) {
                            return Some(Request { port: id, request });
                        }
                    }
                    None => port.has_requests = false,
                }
            }
        }
        None
    }

    /// Returns whether a port has no place for another connection, but may soon have that of one that is over or closed. Its requests
    /// wait for that.
    fn awaits_place(&self, port: usize) -> bool {
        let port = &self.ports[port];
        port.connections >= self.limits.connections && (port.ending > 0 || !port.closed.is_empty())
    }

    /// Returns the result of an attempt to connect, once there is one.
    fn attempted(&mut self, connection: ConnectionId) -> Option<Result<(), EstablishError>> {
        let attempt = self.attempts.get_mut(&connection)?;
        let result = attempt.pending.poll()?;
        let Attempt {
            pending,
            cq,
            port,
            watched,
        } = self.attempts.remove(&connection)?;
        Some(match result {
            Ok(link) => {
                self.established(connection, (link, cq), port, watched);
                Ok(())
            }
            Err(error) => {
                drop(pending);
                self.freed(port, cq);
                Err(error)
            }
        })
    }

    fn completed(&mut self, at: usize, wc: &WorkCompletion) -> Option<ReactorEvent<M>> {
        let port = &mut self.ports[at];
        let connection = self.by_qpn.get(&(port.id, wc.qpn)).copied();
        let id = WorkId::from(wc.wr_id);
        match (id, &port.receives) {
            (WorkId::Last, _) => {
                if let Some(Established { link, cq, .. }) = port.closed.remove(&wc.qpn) {
                    drop(link);
                    port.freed(cq);
                }
            }
            // No connection takes a message of it.
            (WorkId::Receive(index), Some(receives))
                if connection.is_none() || wc.status != Status::Success =>
            {
                receives.repost(index);
            }
            _ => {}
        }
        let connection = connection?;
        let known = self.connections.get_mut(&connection)?;
        let result = known.link.handle(wc);
        let result = result.map(|completed| match completed {
            // A slot may have become free.
            Completed::Nothing if id != WorkId::End => known.link.next_held().unwrap_or(Completed::Nothing),
            other => other,
        });
        if known.stage == Stage::Reported {
            return None;
        }
        if known.link.holds_messages() && !known.is_holding {
            known.is_holding = true;
            self.holding.push(connection);
        }
        let end = match result {
            // The queue pair was not in Error when it executed the request.
            Ok(Completed::Nothing) if id == WorkId::End => {
                known.link.end().unwrap_or(ConnectionEnd::Disconnected)
            }
            Ok(Completed::Nothing) => return None,
            Ok(completed) => return Some(ReactorEvent::Completed(connection, completed)),
            Err(Status::Flushed) => ConnectionEnd::Disconnected,
            Err(status) => ConnectionEnd::Failed(status),
        };
        // Messages that waited for a slot come first, as far as there are slots.
        self.report_end(connection, end);
        self.poll_held().or_else(|| self.poll_ended())
    }

    /// Takes note that an established connection is over, if it is. Its end is reported behind the messages that have arrived, however
    /// many completions of other connections keep coming.
    fn check_end(&mut self, connection: ConnectionId) {
        let known = self.connections.get_mut(&connection);
        let Some(known) = known.filter(|known| known.stage == Stage::Open) else {
            return;
        };
        let Some(end) = known.link.end() else {
            return;
        };
        // A queue that has lost a completion has none for the marker.
        if known.link.post_empty(WorkId::End).is_ok() && !known.cq.has_lost(known.link.qp()) {
            known.stage = Stage::Ending;
            let port = known.port;
            self.port(port).into_iter().for_each(|port| port.ending += 1);
        } else {
            self.report_end(connection, end);
        }
    }

    /// Probes all watched connections at once, so that the machine wakes up once, and has the end of those reported that have not
    /// answered the last probe. It waits for the completions that had come when this was due, with answers among them: this thread may not
    /// have looked for longer than a peer may be silent.
    fn probe(&mut self) {
        if !self.probes || !self.ports.iter().all(|port| port.queues.may_probe()) {
            return;
        }
        self.probes = false;
        let is_open = |known: &Established| known.watched && known.stage == Stage::Open;
        let mut ends = Vec::new();
        for (connection, known) in self.connections.iter_mut().filter(|(_, known)| is_open(known)) {
            match known.link.probe() {
                Ok(true) => {}
                Ok(false) => ends.push((*connection, ConnectionEnd::Silent)),
                Err(_) => ends.push((*connection, ConnectionEnd::Lost)),
            }
        }
        for (connection, end) in ends {
            self.report_end(connection, end);
        }
    }

    /// Does what is due at `now`, or has the next polls do it; returns when the next is due.
    pub(crate) fn handle_timers(&mut self, now: Instant) -> Option<Instant> {
        if self.keepalive.is_due(now, !self.connections.is_empty()) {
            self.probes = true;
            // Peers may keep completions coming. No more than so many came before now.
            for port in &mut self.ports {
                let completions = self.limits.completions_max(&port.sizes);
                port.queues.poll_before_probes(completions);
            }
        }
        while self.lingering.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, known)) = self.lingering.pop_front()
        {
            self.dropped(known);
        }
        self.drop_left();
        let lingering = self.lingering.front().map(|(until, _)| *until);
        lingering.into_iter().chain(self.keepalive.next()).min()
    }

    /// Returns what happens next. Returns `None` at the deadline, after a signal, and also earlier.
    pub fn next(&mut self, deadline: Option<Instant>) -> io::Result<Option<ReactorEvent<M>>> {
        let began = Instant::now();
        let due = self.handle_timers(began);
        if let Some(event) = self.poll() {
            return Ok(Some(event));
        }
        let hold_off = self.end_run();
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
        let mut watches: Vec<(usize, EngineWatch)> = Vec::new();
        let of_pool = |(_, port): &(usize, &ReactorPort)| port.queues.are_of_pool();
        for (at, port) in self.ports.iter().enumerate().filter(of_pool) {
            watches.extend(port.device.watch().map(|watch| (at, watch)));
        }
        self.note_places(&watches);
        // Only a handler in the engines' place decides when packets are looked at.
        let is_in_place = self.ports.iter().all(|port| port.in_place);
        if let Some(until) = self.waiting.hold_off(hold_off.filter(|_| is_in_place)) {
            // Packets wake nobody meanwhile; all else does.
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            if self.sleep(&[], Some(until))? == Woken::Signal {
                return Ok(None);
            }
        }
        let mut has_slept = false;
        loop {
            // Packets that woke this thread are processed first, then the completions of all packets are polled.
            let mut sleeps = true;
            for (_, watch) in &mut watches {
                sleeps &= watch.prepare();
            }
            if let Some(event) = self.poll_armed(&mut watches)? {
                match has_slept {
                    true => self.waiting.slept(began, true),
                    false => self.waiting.came(began),
                }
                return Ok(Some(event));
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.waiting.gave_up(began);
                return Ok(None);
            }
            if sleeps {
                has_slept = true;
                let event = match self.sleep(&watches, deadline)? {
                    Woken::Signal => return Ok(None),
                    // A look at the engines and queues would cost system calls and find nothing.
                    Woken::Others => self.poll_others(),
                    Woken::Any => None,
                };
                if event.is_some() {
                    self.waiting.slept(began, true);
                    return Ok(event);
                }
            }
            let before = watches.len();
            watches.retain(|(_, watch)| !watch.serves_others());
            if watches.len() < before {
                self.note_places(&watches);
            }
        }
    }

    /// Notes at which ports this thread has the place of the engine.
    fn note_places(&mut self, watches: &[(usize, EngineWatch)]) {
        for at in 0..self.ports.len() {
            self.ports[at].in_place = self.place_at(at, watches).is_some();
        }
    }

    /// Returns which of the places is that of a port's engine, which several ports may have.
    fn place_at(&self, port: usize, watches: &[(usize, EngineWatch)]) -> Option<usize> {
        let device = &self.ports[port].device;
        watches
            .iter()
            .position(|(of, _)| self.ports[*of].device.is(device))
    }

    /// Ends a run of the handler: all completions are taken. Returns the time by which to delay the next look, if it comes to sleep: the
    /// shortest that moderation allows. A queue whose rate asks for no moderation may be delayed by that of another one; one whose policy is `off`
    /// never is.
    fn end_run(&mut self) -> Option<Duration> {
        let woken = self.waiting.end_run();
        // Elsewhere the device counts the events of the queues, and delays them.
        let queues = || {
            let in_place = self.ports.iter().filter(|port| port.in_place);
            in_place.flat_map(|port| port.queues.all())
        };
        let moderations = queues().filter_map(|cq| cq.handled(woken));
        let delaying = moderations.filter(|moderation| moderation.count > 1);
        let least_us = delaying.map(|moderation| moderation.period_us).min()?;
        if queues().any(|cq| cq.moderation().0 == ModerationPolicy::Off) {
            return None;
        }
        Some(Duration::from_micros(least_us.into()))
    }

    /// Polls once more, with the queues armed: no completion after that is missed.
    fn poll_armed(&mut self, watches: &mut [(usize, EngineWatch)]) -> io::Result<Option<ReactorEvent<M>>> {
        for at in 0..self.ports.len() {
            let place = self.place_at(at, watches);
            for queue in 0..self.ports[at].queues.len() {
                let mut arm = |queues: &mut PortQueues| {
                    let watch = place.and_then(|place| watches.get_mut(place));
                    queues.arm(queue, watch.map(|(_, watch)| watch))
                };
                while let Some(wc) = arm(&mut self.ports[at].queues)? {
                    if let Some(event) = self.completed(at, &wc) {
                        return Ok(Some(event));
                    }
                }
            }
        }
        // The last news may tell of an end that no completion will report.
        Ok(self.poll_others().or_else(|| self.poll_ended()))
    }

    /// Sleeps until something has happened, or the deadline.
    fn sleep(&mut self, watches: &[(usize, EngineWatch)], deadline: Option<Instant>) -> io::Result<Woken> {
        let mut fds = Vec::with_capacity(3 + self.ports.len() + watches.len());
        fds.push(PollFd::new(&self.news, PollFlags::IN));
        let queues = self.ports.iter().flat_map(|port| port.queues.all());
        fds.extend(queues.map(|cq| PollFd::new(cq, PollFlags::IN)));
        fds.extend(watches.iter().map(|(_, watch)| PollFd::new(watch, PollFlags::IN)));
        let of_devices = fds.len();
        let has_descriptors = !self.descriptors.is_empty();
        if has_descriptors {
            fds.push(PollFd::new(&self.descriptors, PollFlags::IN));
        }
        let others = fds.len();
        set_timer_slack();
        match self.inbox.sleep_beside(&mut fds, deadline) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Woken::Signal),
            Err(error) => return Err(error),
        }
        let has_come = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let woken = match fds[..of_devices].iter().any(has_come) {
            true => Woken::Any,
            false => Woken::Others,
        };
        if has_descriptors && has_come(&fds[others - 1]) {
            self.descriptors.look()?;
        }
        Ok(woken)
    }
}

/// End of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// A signal has ended it.
    Signal,
    /// Devices have something new.
    Any,
    /// They have not: messages of other threads and descriptors may have.
    Others,
}

#[cfg(test)]
mod tests;
