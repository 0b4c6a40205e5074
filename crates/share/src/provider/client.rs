//! The control connection of this process with a node. Requests wait for their answers; a thread receives those, and events.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use rdmux_memory::own_memory;
use rdmux_verbs::provider::{AsyncEvents, Inbox, Object, Waker};
use rdmux_verbs::sync::{Condvar, Mutex};
use rdmux_verbs::thread::spawn;
use rdmux_verbs::{Arrival, AsyncEvent, Features, Limits};
use rdmux_wire::node::control::{ErrorCode, EventKind, Kind, Message, VERSION};
use rdmux_wire::roce::PathMtu;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::rings::Rings;
use crate::control::convert::{Refusal, event_of, limits_of, status_of};
use crate::control::{Channel, Ended, Received, receive};
use crate::node::ADDRESS_HANDLES_MAX;
use crate::place;
use crate::ring::{ApplicationEnd, Files, Layout};

/// Longest wait for a node's answer to the first message. A node answers in microseconds; this one was stopped.
const ATTACH_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Why the device of a node cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No node serves the address.
    #[error(
        "no node of this user serves {0}, nor one for the host: start `rdmux node --device {0}`, or choose another provider"
    )]
    NoNode(IpAddr),
    /// The node refuses this process, or is of another version.
    #[error("the node of {address} refuses this process: {why}")]
    Refused {
        /// The address.
        address: IpAddr,
        /// The node's words.
        why: String,
    },
    /// The node does not answer.
    #[error("the node of {0} does not answer: it may be stopped")]
    Silent(IpAddr),
    /// A system call failed.
    #[error("attaching to the node of {address}: {source}")]
    Io {
        /// The address.
        address: IpAddr,
        /// Cause.
        source: io::Error,
    },
}

/// Answer of a node that attaches an application.
#[derive(Clone, Copy, Debug)]
pub(super) struct Welcome {
    pub(super) features: Features,
    pub(super) limits: Limits,
    pub(super) active_mtu: PathMtu,
    pub(super) vectors: u32,
}

/// Inbox of a listener, an attempt or a connection: messages, and when they arrived.
pub(super) type Events = Inbox<(Arrival, Message)>;

/// A request that waits for its answer.
#[derive(Debug)]
struct Pending {
    answer: Option<Message>,
    /// The object that the request makes reports here, from its answer on.
    reports: Option<(Kind, Arc<Events>)>,
}

#[derive(Debug, Default)]
struct Requests {
    next: u32,
    pending: HashMap<u32, Pending>,
}

/// Address handles in the node, with the oldest one first.
#[derive(Debug, Default)]
pub(super) struct AddressHandles {
    ids: HashMap<(IpAddr, u8), u32>,
    order: VecDeque<(IpAddr, u8)>,
}

impl AddressHandles {
    /// Returns the node's address handle for datagrams to an address. The node keeps so many of those that were used first. The caller puts
    /// the requests that name it into the ring before another call.
    pub(super) fn get(
        &mut self,
        client: &Client,
        address: IpAddr,
        traffic_class: u8,
    ) -> Result<u32, Refusal> {
        let key = (address, traffic_class);
        if let Some(id) = self.ids.get(&key) {
            return Ok(*id);
        }
        if self.order.len() >= ADDRESS_HANDLES_MAX
            && let Some(id) = self.order.pop_front().and_then(|key| self.ids.remove(&key))
        {
            // The node takes the requests that name it first, if it sees them.
            client.rings.publish();
            client.destroy(Kind::AddressHandle, id);
        }
        let request = Message::CreateAddressHandle {
            address,
            traffic_class,
        };
        match client.request(&request)? {
            Message::Made { id } => {
                self.ids.insert(key, id);
                self.order.push_back(key);
                Ok(id)
            }
            _ => Err(Refusal::new(ErrorCode::Protocol, no_answer().to_string())),
        }
    }
}

/// The connection with a node. The thread and each object of the device hold it.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) welcome: Welcome,
    channel: Mutex<Channel>,
    /// The same socket, for the thread.
    socket: OwnedFd,
    requests: Mutex<Requests>,
    answered: Condvar,
    reports: Mutex<HashMap<(Kind, u32), Arc<Events>>>,
    pub(super) rings: Rings,
    pub(super) async_events: Mutex<AsyncEvents>,
    pub(super) async_waker: Arc<Waker>,
    pub(super) is_active: AtomicBool,
    /// Address handles in the node, by what they stand for. Locked before a queue of a queue pair.
    pub(super) handles: Mutex<AddressHandles>,
    /// Set once the node has the memory of this process.
    has_memory: Mutex<bool>,
    /// Number of completion queues.
    pub(super) queues: AtomicUsize,
    /// Set once the node has gone.
    has_ended: AtomicBool,
    /// Set once its connections have been told that, too.
    has_told_end: AtomicBool,
}

/// The connection with its thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) client: Arc<Client>,
    thread: Option<JoinHandle<()>>,
}

impl Attached {
    /// Attaches this process to the node of an address.
    pub(super) fn open(address: IpAddr) -> Result<Attached, AttachError> {
        let failed = |source: io::Error| AttachError::Io { address, source };
        let socket = place::attach(address).map_err(|error| match place::is_none(&error) {
            true => AttachError::NoNode(address),
            false => failed(error),
        })?;
        let second = socket.try_clone().map_err(failed)?;
        let mut channel = Channel::new(second);
        let (welcome, rings) = greet(&mut channel, address)?;
        let events = AsyncEvents::new().map_err(failed)?;
        let client = Arc::new(Client {
            welcome,
            channel: Mutex::new(channel),
            socket,
            requests: Mutex::default(),
            answered: Condvar::new(),
            reports: Mutex::default(),
            rings,
            async_waker: events.waker().clone(),
            async_events: Mutex::new(events),
            is_active: AtomicBool::new(true),
            handles: Mutex::default(),
            has_memory: Mutex::new(false),
            queues: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            has_told_end: AtomicBool::new(false),
        });
        let own = client.clone();
        let thread = spawn("rdmux-shared", move || own.serve()).map_err(failed)?;
        Ok(Attached {
            client,
            thread: Some(thread),
        })
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // The node ends what this process has, and the thread finds the end of the connection.
        let _ = shutdown(&self.client.socket, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the name of this program, as the kernel has it.
fn own_name() -> String {
    let mut name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.truncate(name.trim_end().len());
    name
}

/// Exchanges the first messages.
fn greet(channel: &mut Channel, address: IpAddr) -> Result<(Welcome, Rings), AttachError> {
    let failed = |source: io::Error| AttachError::Io { address, source };
    let attach = Message::Attach {
        version_min: VERSION,
        version_max: VERSION,
        name: own_name(),
    };
    let refused = |why: String| AttachError::Refused { address, why };
    // A node that refuses the process says so before it ends the connection, and takes no message more.
    match channel.send(1, &attach) {
        Ok(()) | Err(Ended::Gone) => {}
        Err(ended) => return Err(refused(ended.to_string())),
    }
    let received = loop {
        match channel.receive().map_err(|ended| refused(ended.to_string()))? {
            Some(received) => break received,
            None => match poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&ATTACH_TIMEOUT)) {
                Ok(0) => return Err(AttachError::Silent(address)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            },
        }
    };
    let (features, limits, active_mtu, vectors, slots) = match received.message {
        Message::Attached {
            features,
            limits,
            active_mtu,
            vectors,
            submission_slots,
            completion_slots,
            ..
        } => (
            features,
            limits,
            active_mtu,
            vectors,
            (submission_slots, completion_slots),
        ),
        Message::Error { text, .. } => return Err(refused(text)),
        other => return Err(refused(format!("it answers {}", other.name()))),
    };
    let files = <[OwnedFd; Files::COUNT]>::try_from(received.descriptors)
        .map_err(|found| refused(format!("it sends {} descriptors", found.len())))?;
    let layout = Layout::new(1, slots.0, 1, slots.1).map_err(|error| refused(error.to_string()))?;
    let end = ApplicationEnd::attach(layout, Files::from_fds(files))
        .map_err(|error| failed(io::Error::other(error)))?;
    let welcome = Welcome {
        features: Features::from_bits_truncate(features),
        limits: limits_of(&limits),
        active_mtu,
        vectors,
    };
    Ok((welcome, Rings::new(end)))
}

/// Returns the error of a node whose answer is not that of the request.
pub(super) fn no_answer() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the node's answer is that of another request",
    )
}

/// Returns the refusal of a node that has gone.
pub(super) fn gone() -> Refusal {
    Refusal::new(
        ErrorCode::Protocol,
        "the node has gone: open the device again once `rdmux node` runs",
    )
}

impl Client {
    /// Makes a request, and waits for its answer.
    ///
    /// # Errors
    /// The node refuses it, or has gone.
    pub(super) fn request(&self, message: &Message) -> Result<Message, Refusal> {
        self.request_with(message, None, None)
    }

    /// Makes a request with a descriptor, whose object reports to an inbox.
    pub(super) fn request_with(
        &self,
        message: &Message,
        descriptor: Option<BorrowedFd<'_>>,
        reports: Option<(Kind, Arc<Events>)>,
    ) -> Result<Message, Refusal> {
        let number = {
            let mut requests = self.requests.lock();
            // 0 numbers events.
            requests.next = requests.next.checked_add(1).unwrap_or(1);
            let number = requests.next;
            let answer = None;
            requests.pending.insert(number, Pending { answer, reports });
            number
        };
        let sent = self.send(number, message, descriptor);
        let mut requests = self.requests.lock();
        if sent.is_err() {
            requests.pending.remove(&number);
            return Err(gone());
        }
        let waits = |requests: &mut Requests| {
            let pending = requests.pending.get(&number);
            pending.is_some_and(|pending| pending.answer.is_none()) && !self.has_ended()
        };
        let mut requests = self.answered.wait_while(requests, waits);
        let pending = requests.pending.remove(&number);
        match pending.and_then(|pending| pending.answer) {
            None => Err(gone()),
            Some(Message::Error { code, number, text }) => Err(Refusal { code, number, text }),
            Some(answer) => Ok(answer),
        }
    }

    fn send(&self, number: u32, message: &Message, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Ended> {
        loop {
            if self.has_ended() {
                return Err(Ended::Gone);
            }
            let sent = {
                let mut channel = self.channel.lock();
                channel.flush()?;
                match channel.has_waiting() {
                    true => Err(Ended::System(Errno::AGAIN)),
                    false => channel.send_with(number, message, descriptor.as_slice()),
                }
            };
            match sent {
                Err(Ended::System(Errno::AGAIN)) => {
                    let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
                    let _ = poll(&mut fds, None);
                }
                sent => return sent,
            }
        }
    }

    /// Makes a request whose answer nobody waits for. For callers that must not wait, such as the thread that receives answers.
    pub(super) fn send_only(&self, message: &Message) {
        let number = {
            let mut requests = self.requests.lock();
            requests.next = requests.next.checked_add(1).unwrap_or(1);
            requests.next
        };
        // A node that takes no more messages has gone, or is about to end this connection.
        let _ = self.channel.lock().send(number, message);
    }

    /// Makes a request that nobody waits for the effect of.
    pub(super) fn destroy(&self, kind: Kind, id: u32) {
        // A node that has gone has destroyed everything.
        let _ = self.request(&Message::Destroy { kind, id });
    }

    /// Offers the memory of this process to the node, unless it has that.
    pub(super) fn offer_memory(&self) -> Result<(), Refusal> {
        let mut has_memory = self.has_memory.lock();
        if !*has_memory {
            let memory = own_memory()?;
            self.request_with(&Message::OfferMemory {}, Some(memory.as_fd()), None)?;
            *has_memory = true;
        }
        Ok(())
    }

    /// Returns whether the node has gone.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Returns whether the node has gone, and no event will follow.
    pub(super) fn has_told_end(&self) -> bool {
        self.has_told_end.load(Ordering::Acquire)
    }

    /// Stops to pass events of an object on.
    pub(super) fn forget(&self, kind: Kind, id: u32) {
        self.reports.lock().remove(&(kind, id));
    }

    /// Receives answers and events, and takes completions that somebody sleeps for, until the node has gone.
    fn serve(&self) {
        while self.receive_all().is_ok() {
            if self.rings.take_for_sleepers(self).is_err() {
                break;
            }
            let bell = self.rings.waiter();
            let mut fds = [
                PollFd::new(&self.socket, PollFlags::IN),
                PollFd::new(&bell, PollFlags::IN),
            ];
            let _ = poll(&mut fds, None);
        }
        self.end();
    }

    fn receive_all(&self) -> Result<(), Ended> {
        while let Some(received) = receive(&self.socket)? {
            self.handle(received);
        }
        Ok(())
    }

    fn handle(&self, received: Received) {
        let Received { request, message, .. } = received;
        if request == 0 {
            return self.handle_event(message);
        }
        let mut requests = self.requests.lock();
        let Some(pending) = requests.pending.get_mut(&request) else {
            return;
        };
        if let (Message::Made { id }, Some((kind, events))) = (&message, pending.reports.take()) {
            // Its first event may be the next message.
            self.reports.lock().insert((kind, *id), events);
        }
        pending.answer = Some(message);
        self.answered.notify_all();
    }

    fn handle_event(&self, message: Message) {
        let object = match &message {
            Message::Requested { listener, .. } => (Kind::Listener, *listener),
            Message::Connected { connection, .. } | Message::Refused { connection, .. } => {
                (Kind::Connection, *connection)
            }
            Message::Progressed { connection, .. } => (Kind::Connection, *connection),
            Message::Failed { qp, status } => {
                if let Some(qp) = self.rings.qp(*qp) {
                    qp.fail(status_of(*status));
                }
                return;
            }
            Message::Event { kind, object } => {
                if *kind == EventKind::LastWqeReached {
                    // The ring has the completions that the program may have before it.
                    let _ = self.rings.take_now(self);
                }
                let qpn = self.rings.qp(*object).map(|qp| qp.qpn);
                let srqn = self.rings.srqn(*object);
                if let Some(event) = event_of(*kind, qpn, srqn) {
                    self.raise(event);
                }
                return;
            }
            _ => return,
        };
        let events = self.reports.lock().get(&object).cloned();
        if let Some(events) = events {
            events.push((Arrival::next(), message));
        }
    }

    /// Raises an asynchronous event.
    pub(super) fn raise(&self, event: AsyncEvent) {
        match event {
            AsyncEvent::PortActive => self.is_active.store(true, Ordering::Relaxed),
            AsyncEvent::PortError | AsyncEvent::DeviceFatal => self.is_active.store(false, Ordering::Relaxed),
            _ => {}
        }
        self.async_events.lock().push(event);
    }

    /// Removes the events of an object that is destroyed.
    pub(super) fn forget_events(&self, object: Object) {
        self.async_events.lock().forget(object);
    }

    /// Ends the device after its node has gone: what is in flight is flushed, and whoever waits learns it.
    fn end(&self) {
        // First: who meets a consequence of the end finds its cause.
        self.raise(AsyncEvent::DeviceFatal);
        self.has_ended.store(true, Ordering::Release);
        // Held, so that no request begins to wait without seeing the end.
        drop(self.requests.lock());
        self.answered.notify_all();
        // Requests that the node has completed before count.
        let _ = self.rings.take(self);
        self.rings.flush_all(self);
        let reports = std::mem::take(&mut *self.reports.lock());
        for ((_, id), events) in reports.iter().filter(|((kind, _), _)| *kind == Kind::Connection) {
            let ended = Message::Progressed {
                connection: *id,
                established: false,
                ended: true,
            };
            events.push((Arrival::next(), ended));
        }
        self.has_told_end.store(true, Ordering::Release);
        reports.values().for_each(|events| events.wake());
    }
}
