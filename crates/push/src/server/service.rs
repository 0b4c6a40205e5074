//! The service itself: clients, their mappings, and who must release a range for whom. No I/O and no clock: the caller passes
//! messages and time in, and the service acts on memory and connections through a [`Driver`].

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdmux_verbs::{Access, Status};
use rdmux_wire::push::{Change, Extent, Message, Ways};

use super::event::Refusals;
use super::id::{ClientId, MappingId, OperationId, Owner, RegionId};
use super::lease::{LeaseId, Leases};
use super::requests::{Pending, Welcoming};
use super::session::{EndReason, Map, Session, Shared};
use super::work::{Finished, Job, Lane, Outcome, Task, Ticket};
use super::{HANDSHAKE_TIMEOUT, ServerEvent};
use crate::region::Mapped;

/// The place that an outgoing message takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplySlot {
    /// The answer to the message that came into this slot, which takes the next message once this one has left.
    Answer(usize),
    /// The same of the last message to a client: the driver reports that it has left ([`Service::handle_sent`]).
    Last(usize),
    /// A notice, of which one is in flight at a time.
    Notice,
}

/// A client's way to a mapping.
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    /// The extent that RDMA reaches; `None` if only messages reach the mapping, through the server's processor.
    pub extent: Option<Extent>,
    /// The ways to durability that the server offers.
    pub ways: Ways,
}

/// The operations that a [`Service`] needs from outside. Each has taken full effect when it returns.
pub trait Driver {
    /// Registers the memory of a mapping for a client. The error is the reason.
    fn register(
        &mut self,
        client: ClientId,
        map: &Map,
        memory: Arc<Mapped>,
        rights: Access,
    ) -> Result<Registered, String>;

    /// Invalidates the keys of a mapping. When this returns, nothing reaches the memory through them, and what was in flight is
    /// placed: the revocation point.
    fn deregister(&mut self, client: ClientId, mapping: MappingId);

    /// Sends a message. Returns false if the connection accepts nothing more.
    fn send(&mut self, client: ClientId, slot: ReplySlot, request: u64, message: &Message) -> bool;

    /// Makes a slot ready for the next message. Returns false if the connection accepts nothing more.
    fn receive(&mut self, client: ClientId, slot: usize) -> bool;

    /// Ends a connection, which then does nothing more. A connection that `failed` may stay for a moment to report why.
    fn disconnect(&mut self, client: ClientId, failed: bool);

    /// Runs a job and returns its result, or hands it on and calls [`Service::finished`] later. Jobs that change or read the
    /// same region run in order.
    fn work(&mut self, job: Job) -> Option<Finished>;

    /// Lets programs of the host continue that wait for the file of the region with this number.
    fn let_others(&mut self, region: RegionId);

    /// Returns whether no program of the host has the file of the region with this number open.
    fn is_alone(&mut self, region: RegionId) -> bool;
}

/// A mapping. Without its lease it cannot be accessed, and can only be flushed.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) lease: Option<LeaseId>,
    pub(super) memory: Arc<Mapped>,
    /// Number of the region.
    pub(super) number: RegionId,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) transfer: u64,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) peer: IpAddr,
    pub(super) session: Session,
    pub(super) mappings: BTreeMap<MappingId, Mapping>,
    /// Deadline of the handshake, or of the last message.
    pub(super) deadline: Option<Duration>,
    /// Reason of the end, which follows once the last message has left.
    pub(super) closing: Option<EndReason>,
    /// Name of the client over several connections; zeros if it has given none.
    pub(super) id: [u8; 16],
    /// Changes to notify the client of: the last one of each mapping.
    pub(super) changes: BTreeMap<MappingId, Change>,
    /// Number of the notice that the client has not taken yet.
    pub(super) notice: Option<u64>,
    pub(super) notices_so_far: u64,
    /// Set when the client has ended; its long jobs read it.
    pub(super) gone: Arc<AtomicBool>,
    refusals: Refusals,
}

/// Jobs of a client that change or read a region and are not done.
#[derive(Debug)]
struct Running {
    /// The client's name over several connections.
    id: [u8; 16],
    jobs: usize,
}

/// All sessions of a server, and the leases between them. The caller reports events through the `handle_*` methods and
/// [`Service::finished`], which call the [`Driver`], and calls [`Service::handle_timeout`] at [`Service::poll_timeout`]. `now`
/// counts from any fixed moment.
#[derive(Debug)]
pub struct Service<D> {
    pub(super) driver: D,
    pub(super) shared: Arc<Shared>,
    /// Time of the call in progress.
    pub(super) now: Duration,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) leases: Leases,
    pub(super) carrying_out: bool,
    /// Client and number of each mapping, by lease.
    pub(super) leased: HashMap<LeaseId, (ClientId, MappingId)>,
    /// Requests that wait for a lease.
    pub(super) pending: HashMap<LeaseId, Pending>,
    /// Clients whose jobs from earlier connections are not done.
    pub(super) welcoming: Vec<Welcoming>,
    running: HashMap<ClientId, Running>,
    /// Leases of local operations, by number.
    pub(super) locals: HashMap<OperationId, LeaseId>,
    pub(super) locals_so_far: u64,
    /// Regions whose file others may have open, and the access that they have.
    pub(super) open: HashMap<RegionId, rdmux_wire::push::Access>,
    pub(super) events: Vec<ServerEvent>,
}

impl<D: Driver> Service<D> {
    /// Creates a service without clients. Holders of mappings have `break_timeout` to release them.
    pub fn new(driver: D, shared: Arc<Shared>, break_timeout: Duration) -> Service<D> {
        Service {
            driver,
            shared,
            now: Duration::ZERO,
            clients: BTreeMap::new(),
            leases: Leases::new(break_timeout),
            carrying_out: false,
            leased: HashMap::new(),
            pending: HashMap::new(),
            welcoming: Vec::new(),
            running: HashMap::new(),
            locals: HashMap::new(),
            locals_so_far: 0,
            open: HashMap::new(),
            events: Vec::new(),
        }
    }

    /// Handles a new connection, of a client with a number that no other client gets; `nonce` is random.
    pub fn handle_connected(&mut self, now: Duration, number: ClientId, peer: IpAddr, nonce: [u8; 32]) {
        self.now = now;
        let client = Client {
            peer,
            session: Session::new(self.shared.clone(), nonce),
            mappings: BTreeMap::new(),
            deadline: Some(now + HANDSHAKE_TIMEOUT),
            closing: None,
            id: [0; 16],
            changes: BTreeMap::new(),
            notice: None,
            notices_so_far: 0,
            gone: Arc::default(),
            refusals: Refusals::default(),
        };
        self.clients.insert(number, client);
    }

    /// Handles the last message of a client that has left. A driver may report other answers too: their slots take the next message.
    pub fn handle_sent(&mut self, now: Duration, client: ClientId, slot: usize) {
        self.now = now;
        let Some(known) = self.clients.get_mut(&client) else {
            return;
        };
        match known.closing.take() {
            Some(reason) => self.end(client, reason),
            None => self.receive_again(client, slot),
        }
    }

    /// Handles a connection that failed or ended; `status` is the cause, if the queue pair knows it.
    pub fn handle_disconnected(&mut self, now: Duration, client: ClientId, status: Option<Status>) {
        self.now = now;
        if let Some(known) = self.clients.get(&client) {
            let reason = known.why_ended(status);
            self.end(client, reason);
        }
    }

    /// Handles a client that does not answer.
    pub fn handle_dead(&mut self, now: Duration, client: ClientId) {
        self.now = now;
        self.end(client, EndReason::Dead);
    }

    /// Handles a connection that accepts nothing more.
    pub fn handle_lost(&mut self, now: Duration, client: ClientId) {
        self.now = now;
        self.end(client, EndReason::Failed("connection lost".into()));
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.now = now;
        let mut late = Vec::new();
        for (client, known) in &mut self.clients {
            if known.deadline.is_some_and(|deadline| deadline <= now) {
                let reason = known.closing.take().unwrap_or(EndReason::HandshakeTimeout);
                late.push((*client, reason));
            }
        }
        for (client, reason) in late {
            self.end(client, reason);
        }
        self.leases.handle_timeout(now);
        self.carry_out();
    }

    /// Returns when the caller must call [`Service::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Duration> {
        let deadlines = self.clients.values().filter_map(|client| client.deadline);
        deadlines.chain(self.leases.next_timeout()).min()
    }

    /// Returns the new events, for people to read.
    pub fn poll_events(&mut self) -> impl Iterator<Item = ServerEvent> + '_ {
        self.events.drain(..)
    }

    /// Ends all clients, as the server ends.
    pub fn shut_down(&mut self, now: Duration) {
        self.now = now;
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            self.end(client, EndReason::Shutdown);
        }
    }

    /// Forgets everything, as when a process ends: without an event or a call of the driver.
    pub fn forget(&mut self) {
        self.clients.clear();
        self.leases.clear();
        self.leased.clear();
        self.pending.clear();
        self.welcoming.clear();
        self.running.clear();
        self.locals.clear();
        self.open.clear();
        self.events.clear();
    }

    /// Returns the driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Returns the driver.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Returns whether a client has proved that it has the key.
    pub fn is_ready(&self, client: ClientId) -> bool {
        self.clients
            .get(&client)
            .is_some_and(|known| known.session.is_ready())
    }

    /// Returns the number of clients that have not yet proved that they have the key.
    pub fn half_open(&self) -> usize {
        self.clients
            .values()
            .filter(|client| !client.session.is_ready())
            .count()
    }

    pub(super) fn send(&mut self, client: ClientId, slot: usize, request: u64, message: &Message) {
        let Some(known) = self.clients.get_mut(&client) else {
            return;
        };
        let slot = match known.closing {
            None => ReplySlot::Answer(slot),
            Some(_) => ReplySlot::Last(slot),
        };
        // The event of the end tells why a last message is an error.
        if let (Message::Error { text, .. }, ReplySlot::Answer(_)) = (message, slot)
            && let Some(unreported) = known.refusals.count(self.now)
        {
            self.events.push(ServerEvent::RequestRefused {
                client,
                why: text.clone(),
                unreported,
            });
        }
        if !self.driver.send(client, slot, request, message) {
            self.end(client, EndReason::Failed("connection lost".into()));
        }
    }

    pub(super) fn receive_again(&mut self, client: ClientId, slot: usize) {
        if self.clients.contains_key(&client) && !self.driver.receive(client, slot) {
            self.end(client, EndReason::Failed("connection lost".into()));
        }
    }

    pub(super) fn end(&mut self, client: ClientId, reason: EndReason) {
        let Some(mut known) = self.clients.remove(&client) else {
            return;
        };
        known.gone.store(true, Ordering::Relaxed);
        // The mappings end first: once nothing of the client reaches a region any more, others may.
        let mut mappings = 0;
        for (mapping, known) in &mut known.mappings {
            if let Some(lease) = known.lease.take() {
                self.driver.deregister(client, *mapping);
                self.leased.remove(&lease);
                mappings += 1;
            }
        }
        self.pending.retain(|_, pending| !pending.is_of(client));
        self.welcoming.retain(|welcoming| welcoming.client() != client);
        self.leases.owner_ended(self.now, Owner::Client(client));
        self.carry_out();
        let failed = matches!(reason, EndReason::Failed(_));
        self.events.push(ServerEvent::Ended {
            client,
            peer: known.peer,
            reason,
            mappings,
        });
        self.driver.disconnect(client, failed);
    }

    pub(super) fn work(&mut self, region: RegionId, ticket: Ticket, task: Task) {
        let client = ticket.client;
        let at_once = task.is_immediate() && !self.running.contains_key(&client);
        let counted = !at_once && task.lane() == Lane::Accesses;
        if counted {
            let id = self.clients.get(&client).map_or([0; 16], |client| client.id);
            let running = self.running.entry(client).or_insert(Running { id, jobs: 0 });
            running.jobs += 1;
        }
        let job = Job {
            region,
            ticket,
            task,
            at_once,
            counted,
            by_message: false,
        };
        if let Some(finished) = self.driver.work(job) {
            self.job_finished(finished);
        }
    }

    /// Handles a job that is done.
    pub fn finished(&mut self, now: Duration, finished: Finished) {
        self.now = now;
        self.job_finished(finished);
    }

    fn job_finished(&mut self, finished: Finished) {
        let Finished {
            ticket,
            outcome,
            counted,
            ..
        } = finished;
        if counted && let Some(running) = self.running.get_mut(&ticket.client) {
            running.jobs -= 1;
            if running.jobs == 0 {
                self.running.remove(&ticket.client);
            }
        }
        if let Some(lease) = ticket.lease {
            self.leases.release(self.now, lease);
            self.carry_out();
        }
        match outcome {
            Outcome::Answer(answer) => self.send(ticket.client, ticket.slot, ticket.request, &answer),
            Outcome::Located(lease, place) => self.located(lease, place),
        }
        self.welcome_all();
    }

    /// Returns whether a job runs for the client of this name on a connection other than `but`.
    pub(super) fn runs_for(&self, id: [u8; 16], but: ClientId) -> bool {
        self.running
            .iter()
            .any(|(client, running)| running.id == id && *client != but)
    }
}

impl Client {
    /// Returns why a connection ended whose queue pair reports `status`.
    fn why_ended(&self, status: Option<Status>) -> EndReason {
        let fault = self.mappings.values().find_map(|mapping| {
            let fault = mapping.memory.fault()?;
            Some((mapping.memory.region().name().clone(), fault))
        });
        if let Some((region, fault)) = fault {
            return EndReason::Failed(format!("region {region} failed: {fault}"));
        }
        match status {
            None if !self.session.is_ready() => EndReason::LeftHandshake,
            None => EndReason::Disconnected,
            Some(Status::RetryExceeded) => EndReason::Dead,
            Some(Status::RemoteAccess) => EndReason::Failed("access outside its mappings".into()),
            Some(other) => EndReason::Failed(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
