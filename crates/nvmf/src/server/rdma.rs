//! The connections of NVMe/RDMA.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmux_runtime::{
    AcceptOptions, Buffer, Completed, ConnectionEnd, ConnectionId, EstablishError, ListenAtError,
    MessageConnection, PortId, PreparedPort, Recipient, Request, SIGNAL_EVERY, SendSlot, Sizes,
};
use rdmux_verbs::{
    Access, ConnectParams, Device, Features, ListenError, Memory as _, Operation, Sge, Status as WorkStatus,
};
use rdmux_wire::nvme::{CQE_LEN, Cqe, SQE_LEN, Status};
use rdmux_wire::nvme_rdma::{self, Accept, Reject};

use super::media::{Job, Media};
use super::peers::{ROOM_LOOK, ROOM_WAIT, Regions};
use super::{Core, LOOK_EVERY, Listen, ServeError};
use crate::backend::peer::{PeerData, PeerToPeer};
use crate::rdma::{self, Action, Connection, Memory, Response, Work};
use crate::slab::Slab;
use crate::target::Port;
use crate::tcp::Buffers;

/// Bytes of data in the capsule of an I/O command, unless a listener says something else.
pub(super) const IN_CAPSULE_DEFAULT: u32 = 4 << 10;
/// Commands of a queue: as many as its entries.
const RECEIVES_MAX: usize = rdma::port(0).entries_max as usize;
/// Maximum number of connections of a reactor at each listener.
pub(super) const CONNECTIONS_MAX: usize = 1024;
/// Receives that the connections of a listener share, where the device can do that.
pub(super) const SHARED_RECEIVES: usize = 8 * RECEIVES_MAX;
/// Requests for events that a controller holds: their responses take slots of their own.
const EVENTS: usize = 4;
/// RDMA READs of one connection in flight.
const READS_MAX: u8 = 64;
/// Bytes of buffers that all commands of a reactor have at a time. Commands whose data do not fit wait, and their connections take turns.
const BUFFERED_MAX: usize = 64 << 20;
/// Those of one connection.
const CONNECTION_BUFFERED_MAX: usize = 4 << 20;
/// Bytes of a buffer that may be free later than when its command is done, and of a connection's buffers while that is so.
const LATER_MAX: usize = 16 << 10;
const CONNECTION_LATER_MAX: usize = 256 << 10;
/// Retries of a response for which the host has no receive.
const RNR_RETRY_MAX: u8 = 6;
/// A connection is over if none of its RDMA operations has completed for so long while some have buffers: other connections wait for these.
const STALL_MAX: Duration = Duration::from_secs(10);
/// Bytes of I/Os of one connection before others have their turn.
const TURN_BYTES: usize = 4 << 20;

/// Returns the sizes of a queue of so many entries. A host that goes on as soon as it sees a response may acknowledge many together, so there are
/// more slots than commands (IBTA Vol 1, 9.7.5.1.2).
const fn sizes(entries: usize, capsule_bytes: usize) -> Sizes {
    let answers = 2 * entries + SIGNAL_EVERY;
    Sizes {
        message_bytes: capsule_bytes,
        sent_bytes: CQE_LEN,
        receives: entries,
        answers,
        own: EVENTS,
        // A READ before a response, or a WRITE that keeps its place in the send queue until the response behind it is acknowledged.
        operations: answers,
    }
}

/// Returns the sizes of the largest queue, where capsules may have so many bytes of data.
pub(super) const fn sizes_max(in_capsule: u32) -> Sizes {
    sizes(RECEIVES_MAX, SQE_LEN + in_capsule as usize)
}

/// A message to the connections of a reactor.
#[derive(Debug)]
pub(super) enum Mail {
    /// An I/O of a connection is done.
    Finished(ConnectionId, Work, Status),
    /// A connection has more to do than its last turn allowed.
    Turn(ConnectionId),
}

impl From<Mail> for super::Mail {
    fn from(mail: Mail) -> super::Mail {
        super::Mail::Rdma(mail)
    }
}

/// A listener, or one that has gone and still has connections, and what the connections of a reactor have there in common.
#[derive(Debug)]
struct RdmaPort {
    at: SocketAddr,
    device: Device,
    slab: Slab,
    regions: Regions,
    invalidates: Arc<Invalidates>,
    properties: Port,
    /// Connections are accepted.
    listens: bool,
    connections: usize,
}

/// SEND with invalidate, at one device: whether it declares that, and has not failed it yet.
#[derive(Debug)]
struct Invalidates(AtomicBool);

impl Invalidates {
    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reactor's part of a listener.
#[derive(Debug)]
pub(super) struct Part {
    prepared: PreparedPort,
    port: RdmaPort,
}

/// Listens on an address for all reactors, each of which gets a part; `known`: the device, if one of them has it.
pub(super) fn listen(
    recipients: &[Recipient],
    known: Option<Device>,
    listen: &Listen,
    options: rdmux_verbs::Options,
) -> Result<Vec<Part>, ServeError> {
    let address = listen.listener.address;
    let device = known.map_or_else(|| Device::open_with(address.ip(), options), Ok);
    let device = device.map_err(|source| ServeError::Open { address, source })?;
    let sizes = sizes_max(listen.in_capsule_bytes);
    PreparedPort::listen(recipients, &device, address.port(), &sizes)
        .and_then(|prepared| Ok(parts(prepared, listen)?))
        .map_err(|source| ServeError::ListenRdma { address, source })
}

/// Prepares other settings of a listener whose parts are on these devices.
pub(super) fn renewal(
    recipients: &[Recipient],
    devices: &[Device],
    listen: &Listen,
) -> Result<Vec<Part>, ServeError> {
    let address = listen.listener.address;
    PreparedPort::renewal(recipients, devices, &sizes_max(listen.in_capsule_bytes))
        .and_then(|prepared| parts(prepared, listen))
        .map_err(ListenAtError::from)
        .map_err(|source| ServeError::ListenRdma { address, source })
}

fn parts(prepared: Vec<PreparedPort>, listen: &Listen) -> Result<Vec<Part>, EstablishError> {
    let first = prepared.first().map(PreparedPort::device);
    let invalidates = first.is_some_and(|device| device.features().contains(Features::SEND_INVALIDATE));
    let invalidates = Arc::new(Invalidates(AtomicBool::new(invalidates)));
    let part = |prepared: PreparedPort| {
        let device = prepared.device().clone();
        let port = RdmaPort {
            at: listen.listener.address,
            // The host reaches nothing of the target.
            slab: Slab::new(device.alloc_pd()?, Access::LOCAL_WRITE),
            regions: Regions::default(),
            device,
            invalidates: invalidates.clone(),
            properties: rdma::port(listen.in_capsule_bytes),
            listens: true,
            connections: 0,
        };
        Ok(Part { prepared, port })
    };
    prepared.into_iter().map(part).collect()
}

impl RdmaPort {
    /// Returns a piece of registered memory, for a request.
    fn sge(&self, registered: &Registered, length: u32) -> Result<Sge, Broken> {
        match registered {
            Registered::Slab(buffer) => Ok(buffer.sge(0, length)),
            Registered::Peer(data) => self.regions.sge(data, length).ok_or(Broken),
        }
    }
}

/// The connections of a reactor.
#[derive(Debug)]
pub(super) struct Rdma {
    connections: HashMap<ConnectionId, Served>,
    ports: BTreeMap<PortId, RdmaPort>,
    buffers: Buffers,
    budget: Budget,
    /// Connections whose next command waits for room in a drive's memory.
    without_room: Vec<ConnectionId>,
}

/// Bytes of buffers that commands may have.
#[derive(Debug)]
struct Budget {
    left: usize,
    /// Connections that wait for some, in their order.
    waiting: VecDeque<ConnectionId>,
}

#[derive(Debug)]
struct Served {
    connection: Connection,
    port: PortId,
    /// By the slot of the response, as far as slots were used.
    places: Vec<Place>,
    /// Bytes of buffers of its commands.
    buffered: usize,
    /// Those of them that I/Os have which a medium carries out.
    at_media: usize,
    /// It is among those that wait for buffers.
    is_waiting: bool,
    /// Time since which its next command waits for room in a drive's memory.
    no_room_since: Option<Instant>,
    /// RDMA operations whose completions come as soon as the host has acknowledged them.
    operations: usize,
    /// Time at which the first of them began, or the last one completed.
    moved_at: Instant,
    /// The reactor probes its host.
    is_watched: bool,
    /// A turn of it is among this reactor's messages.
    has_turn: bool,
    /// Its deadline had passed when it was looked at last. This thread may have been held up then, with messages of the host to be looked at.
    is_late: bool,
    /// It has sent a response that invalidates a key.
    has_invalidated: bool,
    /// Responses to requests for events that wait for a slot.
    events: VecDeque<Cqe>,
}

/// The driver's part of a command.
#[derive(Debug, Default)]
struct Place {
    /// Memory that an RDMA operation uses.
    registered: Option<Registered>,
    /// Its completion comes as soon as the host has acknowledged it.
    is_soon: bool,
    /// Bytes that count among those of buffers.
    counted: usize,
}

/// Registered memory.
#[derive(Debug)]
enum Registered {
    Slab(Buffer),
    Peer(PeerData),
}

/// Fate of a command that waits for memory.
enum Next {
    /// It has some of a drive, or has failed.
    Gone,
    /// It waits for room in a drive.
    Waits,
    /// It takes a buffer.
    Buffer,
}

/// The connection accepts nothing more, or there is no memory for it.
struct Broken;

impl Default for Rdma {
    fn default() -> Rdma {
        Rdma {
            connections: HashMap::new(),
            ports: BTreeMap::new(),
            buffers: Buffers::default(),
            budget: Budget {
                left: BUFFERED_MAX,
                waiting: VecDeque::new(),
            },
            without_room: Vec::new(),
        }
    }
}

impl Rdma {
    /// Returns the device for another listener, if connections have come by its address or may come.
    ///
    /// # Errors
    /// It listens there.
    pub(super) fn device_for(&self, at: SocketAddr) -> Result<Option<Device>, ServeError> {
        if self.listener(at).is_some() {
            let source = ListenError::Io(io::ErrorKind::AddrInUse.into()).into();
            return Err(ServeError::ListenRdma { address: at, source });
        }
        let address = at.ip().to_canonical();
        let mut ports = self.ports.values();
        let port = ports.find(|port| port.device.address() == address);
        Ok(port.map(|port| port.device.clone()))
    }

    /// Returns the device, or engine of a device, on which this reactor listens at an address.
    pub(super) fn listens_on(&self, at: SocketAddr) -> Option<Device> {
        let id = self.listener(at)?;
        self.ports.get(&id).map(|port| port.device.clone())
    }

    fn listener(&self, at: SocketAddr) -> Option<PortId> {
        let mut ports = self.ports.iter();
        let found = ports.find(|(_, port)| port.listens && port.at == at);
        found.map(|(id, _)| *id)
    }

    /// Accepts connections at another listener, or in place of one at that address, whose connections stay.
    pub(super) fn listen(&mut self, core: &mut Core, Part { prepared, mut port }: Part) {
        let id = prepared.id();
        port.slab.book_in(core.target.ledger().cloned());
        match self.listener(port.at) {
            Some(old) => {
                core.reactor.renew_port(old, prepared);
                if let Some(old) = self.ports.get(&old) {
                    port.invalidates = old.invalidates.clone();
                }
                self.leave(old);
            }
            None => core.reactor.add_port(prepared),
        }
        self.ports.insert(id, port);
    }

    /// Listens no more at an address. Returns false if it did not.
    pub(super) fn stop_listening(&mut self, core: &mut Core, at: SocketAddr) -> bool {
        let Some(id) = self.listener(at) else {
            return false;
        };
        core.reactor.remove_port(id);
        self.leave(id);
        true
    }

    /// Has a port go with its last connection.
    fn leave(&mut self, id: PortId) {
        if let Some(port) = self.ports.get_mut(&id) {
            port.listens = false;
        }
        self.drop_unused(id);
    }

    fn drop_unused(&mut self, id: PortId) {
        let port = self.ports.get(&id);
        if port.is_some_and(|port| !port.listens && port.connections == 0) {
            self.ports.remove(&id);
        }
    }

    /// Accepts a host's request for a queue, or rejects it with the reason.
    pub(super) fn handle_request(&mut self, core: &mut Core, request: Request, now: Instant) {
        let id_of_port = request.port();
        let Some(port) = self.ports.get_mut(&id_of_port) else {
            return request.refuse_with(&Reject::Resources.emit());
        };
        let properties = port.properties;
        let checked = nvme_rdma::Request::parse(request.private_data()).and_then(|asked| {
            rdma::check(&asked, request.remote().responder_resources > 0, &properties)?;
            match core.reactor.has_room(&request) {
                true => Ok(asked),
                false => Err(Reject::Resources),
            }
        });
        let asked = match checked {
            Ok(asked) => asked,
            Err(reject) => return request.refuse_with(&reject.emit()),
        };
        let entries = asked.sends + 1;
        let in_capsule = if asked.qid == 0 {
            0
        } else {
            properties.in_capsule_max
        };
        let sizes = sizes(entries.into(), SQE_LEN + in_capsule as usize);
        let params = ConnectParams {
            // The host reaches nothing of the target: the target reaches its memory.
            access: Access::LOCAL_WRITE,
            initiator_depth: READS_MAX,
            responder_resources: 0,
            rnr_retry: 7,
            // A host has a receive posted for each response: one that has none must not hold buffers for ever.
            rnr_retry_max: RNR_RETRY_MAX,
            ..ConnectParams::default()
        };
        let options = AcceptOptions {
            sizes,
            pd: Some(port.slab.pd()),
            private_data: &Accept { receives: entries }.emit(),
            refusal: &Reject::Resources.emit(),
        };
        let local = port.device.address();
        let Ok(id) = core.reactor.accept_with(request, &params, &options) else {
            return;
        };
        let places = sizes.answers;
        let connection = Connection::new(core.target.clone(), properties, asked, places, local, now);
        port.connections += 1;
        let served = Served::new(connection, id_of_port, now);
        self.connections.insert(id, served);
        core.look_by(now + LOOK_EVERY);
    }

    pub(super) fn handle_completed(
        &mut self,
        core: &mut Core,
        id: ConnectionId,
        completed: Completed,
        now: Instant,
    ) {
        let Some(served) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(port) = self.ports.get_mut(&served.port) else {
            return;
        };
        match completed {
            Completed::Message {
                slot: Some(slot),
                mut bytes,
            } => {
                if slot.index() >= served.places.len() {
                    served.places.resize_with(slot.index() + 1, Place::default);
                }
                served
                    .connection
                    .handle_capsule(slot.index() as u16, &mut bytes, now);
                if let Some(link) = core.reactor.connection(id) {
                    link.reuse(bytes);
                }
            }
            Completed::Operation(place) => {
                let Some(registered) = served.places[place as usize].registered.take() else {
                    return;
                };
                served.moved(now);
                match registered {
                    Registered::Slab(buffer) => {
                        let copy = |bytes: &mut [u8]| {
                            // It is this process's own memory, and as long.
                            let _ = buffer.memory().read(0, bytes);
                        };
                        served.connection.fetched(place as u16, copy, now);
                        port.slab.give(buffer);
                    }
                    Registered::Peer(data) => served.connection.fetched_peer(place as u16, data, now),
                }
            }
            Completed::Sent(slot) => {
                let Some(link) = core.reactor.connection(id) else {
                    return;
                };
                let mut sent = Some(slot);
                while let Some(slot) = sent {
                    served.free(slot, port, &mut self.budget, now);
                    link.give_back(slot);
                    sent = link.poll_sent();
                }
            }
            Completed::Message { slot: None, .. } | Completed::Nothing => return,
        }
        self.pump(core, id, now);
        self.feed(core, now);
    }

    pub(super) fn handle_mail(&mut self, core: &mut Core, mail: Mail, now: Instant) {
        let id = match mail {
            Mail::Turn(id) => {
                let Some(served) = self.connections.get_mut(&id) else {
                    return;
                };
                served.has_turn = false;
                id
            }
            Mail::Finished(id, work, status) => {
                let Some(served) = self.connections.get_mut(&id) else {
                    // Its connection is over.
                    self.budget.left += work.counted();
                    drop(work);
                    return self.feed(core, now);
                };
                served.at_media -= work.counted();
                served.connection.complete(work, status);
                id
            }
        };
        self.pump(core, id, now);
        self.feed(core, now);
    }

    /// A connection is over.
    pub(super) fn handle_ended(
        &mut self,
        core: &mut Core,
        id: ConnectionId,
        end: ConnectionEnd,
        now: Instant,
    ) {
        if let Some(served) = self.connections.get(&id)
            && served.has_invalidated
            && end == ConnectionEnd::Failed(WorkStatus::LocalQpOperation)
            && let Some(port) = self.ports.get(&served.port)
        {
            // The device has declared more than it can do. The host connects again, and gets plain SENDs.
            port.invalidates.0.store(false, Ordering::Relaxed);
        }
        self.close(core, id);
        self.feed(core, now);
    }

    /// Looks at what queues share with those of other connections.
    pub(super) fn handle_change(&mut self, core: &mut Core, now: Instant) {
        self.ports
            .values_mut()
            .for_each(|port| port.regions.forget_gone());
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            if let Some(served) = self.connections.get_mut(&id) {
                served.connection.handle_change();
            }
            self.pump(core, id, now);
        }
        self.feed(core, now);
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
        let mut over = Vec::new();
        for (id, served) in &mut self.connections {
            let is_due = served.deadline().is_some_and(|deadline| deadline <= now);
            let was_late = std::mem::replace(&mut served.is_late, is_due);
            if is_due && was_late {
                over.push(*id);
            }
        }
        for id in over {
            let Some(served) = self.connections.get_mut(&id) else {
                continue;
            };
            if served.stalls_at().is_some_and(|stalls| stalls <= now) {
                self.close(core, id);
                continue;
            }
            served.connection.handle_timeout(now);
            self.pump(core, id, now);
        }
        self.feed(core, now);
        let first = self.connections.values().filter_map(Served::deadline).min();
        if let Some(first) = first {
            core.look_by(first.max(now + LOOK_EVERY));
        }
    }

    /// Gives memory to connections that wait for it, in their order; buffers one for each turn.
    fn feed(&mut self, core: &mut Core, now: Instant) {
        for id in std::mem::take(&mut self.without_room) {
            self.pump(core, id, now);
        }
        while let Some(&id) = self.budget.waiting.front() {
            let served = self.connections.get_mut(&id);
            let wanted = served
                .as_ref()
                .and_then(|served| served.connection.wants_buffer());
            let Some(bytes) = wanted else {
                self.budget.waiting.pop_front();
                served.into_iter().for_each(|served| served.is_waiting = false);
                continue;
            };
            if self.budget.left < Buffers::size(bytes) {
                return;
            }
            self.budget.waiting.pop_front();
            if let Some(served) = served {
                served.is_waiting = false;
                served.grant(&mut self.budget, &mut self.buffers, bytes, now);
            }
            self.pump(core, id, now);
        }
    }

    /// Does what a connection has to do, as much as a turn allows, and closes it if it is over.
    fn pump(&mut self, core: &mut Core, id: ConnectionId, now: Instant) {
        let Some(served) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(port) = self.ports.get_mut(&served.port) else {
            return;
        };
        let buffers = &mut self.buffers;
        served.connection.resume(now);
        let mut left = TURN_BYTES;
        let mut is_broken = false;
        loop {
            served.take_buffers(id, port, &mut self.budget, buffers, now);
            if left == 0 {
                if !served.has_turn {
                    served.has_turn = true;
                    core.reactor.mailbox().send(Mail::Turn(id).into());
                }
                break;
            }
            let Some(link) = core.reactor.connection(id) else {
                break;
            };
            let done = match served.connection.poll() {
                Some(Action::Run(work)) => {
                    left = left.saturating_sub(served.run(id, work, link, buffers, &mut core.media));
                    Ok(())
                }
                Some(Action::Fetch {
                    place,
                    from,
                    length,
                    peer,
                }) => served.fetch(link, port, (place, from, length), peer, now),
                Some(Action::Respond(response)) => {
                    served.respond(link, port, response, buffers, &mut self.budget, now)
                }
                Some(Action::Release(place)) => {
                    let slot = SendSlot::new(place.into());
                    served.free(slot, port, &mut self.budget, now);
                    link.give_back(slot);
                    Ok(())
                }
                None => match served.send_event(link) {
                    Ok(true) => Ok(()),
                    Ok(false) => break,
                    Err(broken) => Err(broken),
                },
            };
            if let Err(Broken) = done {
                is_broken = true;
                break;
            }
        }
        if let Some(until) = served.connection.held_until(now) {
            core.look_by(until);
        }
        if served.no_room_since.is_some() {
            if !self.without_room.contains(&id) {
                self.without_room.push(id);
            }
            core.look_by(now + ROOM_LOOK);
        }
        let has_reset = served.connection.take_reset();
        if let Some(deadline) = served.deadline() {
            core.look_by(deadline);
        }
        // An I/O queue, or the admin queue of a controller without keep-alive: nothing else shows that their host is gone.
        if served.connection.deadline().is_none() && !served.is_watched {
            served.is_watched = true;
            core.reactor.watch(id);
        }
        if has_reset {
            core.tell_of_change();
        }
        if is_broken || served.connection.end().is_some() {
            self.close(core, id);
        }
    }

    /// Has memory of drives that operations may use last as long as their queue pairs: it is not this process's alone, and would be used again.
    pub(super) fn keep_peers(&mut self, core: &mut Core) {
        for (id, served) in &mut self.connections {
            served.keep_peers(core, *id);
        }
    }

    fn close(&mut self, core: &mut Core, id: ConnectionId) {
        if let Some(served) = self.connections.get_mut(&id) {
            served.keep_peers(core, id);
        }
        core.reactor.close(id, None);
        let Some(served) = self.connections.remove(&id) else {
            return;
        };
        // Buffers of operations that have not completed are not used again: they end here. Those of I/Os end when these do.
        self.budget.left += served.buffered - served.at_media;
        let port = served.port;
        if let Some(port) = self.ports.get_mut(&port) {
            port.connections -= 1;
        }
        if served.connection.has_io_queues() {
            drop(served);
            core.tell_of_change();
        }
        self.drop_unused(port);
    }
}

impl Served {
    fn new(connection: Connection, port: PortId, now: Instant) -> Served {
        Served {
            connection,
            port,
            places: Vec::new(),
            buffered: 0,
            at_media: 0,
            is_waiting: false,
            no_room_since: None,
            operations: 0,
            moved_at: now,
            is_watched: false,
            has_turn: false,
            is_late: false,
            has_invalidated: false,
            events: VecDeque::new(),
        }
    }

    fn keep_peers(&mut self, core: &mut Core, id: ConnectionId) {
        let Some(link) = core.reactor.connection(id) else {
            return;
        };
        for place in &mut self.places {
            if let Some(Registered::Peer(data)) = &mut place.registered {
                link.keep(Box::new(data.take()));
            }
        }
    }

    /// Takes memory of a drive for the next command, if it is to have some.
    fn take_peer(&mut self, port: &mut RdmaPort, bytes: usize, now: Instant) -> Next {
        let Some(drive) = self.connection.wants_peer() else {
            return Next::Buffer;
        };
        let since = self.no_room_since.take().unwrap_or(now);
        let pool = drive.pool();
        let has_way = bytes <= drive.peer_bytes_max() && port.regions.reach(&port.slab, pool);
        let data = if has_way { drive.take_peer(bytes) } else { None };
        match (data, drive.p2p()) {
            (Some(data), _) => {
                self.connection.granted_peer(data, now);
            }
            (None, PeerToPeer::Require) if !has_way => {
                self.connection.refuse(Status::INTERNAL_ERROR.do_not_retry());
            }
            (None, PeerToPeer::Require) => match drive.check_in_use() {
                Err(status) => self.connection.refuse(status),
                Ok(()) if now < since + ROOM_WAIT => {
                    self.no_room_since = Some(since);
                    return Next::Waits;
                }
                Ok(()) => self.connection.refuse(Status::INTERRUPTED),
            },
            (None, _) => {
                drive.peers().count_copied();
                self.connection.forgo_peer();
                return Next::Buffer;
            }
        }
        Next::Gone
    }

    /// Takes memory for the next commands, as far as they fit and no other connection waits.
    fn take_buffers(
        &mut self,
        id: ConnectionId,
        port: &mut RdmaPort,
        budget: &mut Budget,
        buffers: &mut Buffers,
        now: Instant,
    ) {
        while !self.is_waiting
            && let Some(bytes) = self.connection.wants_buffer()
        {
            match self.take_peer(port, bytes, now) {
                Next::Gone => continue,
                Next::Waits => return,
                Next::Buffer => {}
            }
            let size = Buffers::size(bytes);
            if self.buffered > 0 && self.buffered + size > CONNECTION_BUFFERED_MAX {
                // Its own commands free them.
                return;
            }
            if !budget.waiting.is_empty() || budget.left < size {
                self.is_waiting = true;
                budget.waiting.push_back(id);
                return;
            }
            self.grant(budget, buffers, bytes, now);
        }
    }

    fn grant(&mut self, budget: &mut Budget, buffers: &mut Buffers, bytes: usize, now: Instant) {
        let size = Buffers::size(bytes);
        budget.left -= size;
        self.buffered += size;
        if let Some(place) = self.connection.granted(buffers.take(bytes), now) {
            self.places[usize::from(place)].counted = size;
        }
    }

    /// The response from a slot is acknowledged: the memory of its command is free.
    fn free(&mut self, slot: SendSlot, port: &mut RdmaPort, budget: &mut Budget, now: Instant) {
        let Some(place) = self.places.get_mut(slot.index()) else {
            return;
        };
        let was_soon = std::mem::take(&mut place.is_soon);
        if let Some(Registered::Slab(buffer)) = place.registered.take() {
            port.slab.give(buffer);
        }
        let counted = std::mem::take(&mut place.counted);
        self.buffered -= counted;
        budget.left += counted;
        if was_soon {
            self.moved(now);
        }
    }

    /// An RDMA operation begins.
    fn begins(&mut self, now: Instant) {
        if self.operations == 0 {
            self.moved_at = now;
        }
        self.operations += 1;
    }

    /// An RDMA operation has completed.
    fn moved(&mut self, now: Instant) {
        self.operations -= 1;
        self.moved_at = now;
    }

    /// Returns the time at which the connection is over unless its RDMA operations move on.
    fn stalls_at(&self) -> Option<Instant> {
        (self.operations > 0).then(|| self.moved_at + STALL_MAX)
    }

    fn deadline(&self) -> Option<Instant> {
        self.connection
            .deadline()
            .into_iter()
            .chain(self.stalls_at())
            .min()
    }

    /// Carries out an I/O, or has a thread do it. Returns the bytes that it took of the turn.
    fn run(
        &mut self,
        id: ConnectionId,
        mut work: Work,
        link: &mut MessageConnection,
        buffers: &mut Buffers,
        media: &mut Media,
    ) -> usize {
        if let Some(status) = work.execute_quick() {
            let bytes = work.io().length as usize;
            self.connection.complete(work, status);
            return bytes;
        }
        if let Some(capsule) = work.stage(media.has_offload()) {
            link.reuse(capsule);
        }
        // At most as much as its receives may carry.
        if work.in_capsule() > 0
            && let Some(capsule) = work.leave_capsule(buffers.take(work.in_capsule()))
        {
            link.reuse(capsule);
        }
        self.at_media += work.counted();
        if let Err(Job::Rdma(_, work)) = media.begin(Job::Rdma(id, work)) {
            self.at_media -= work.counted();
            self.connection.complete(work, Status::INTERRUPTED);
        }
        0
    }

    fn fetch(
        &mut self,
        link: &mut MessageConnection,
        port: &mut RdmaPort,
        (place, from, length): (u16, rdma::Remote, u32),
        peer: Option<PeerData>,
        now: Instant,
    ) -> Result<(), Broken> {
        let registered = match peer {
            Some(data) => Registered::Peer(data),
            None => Registered::Slab(port.slab.take(length as usize).map_err(|_| Broken)?),
        };
        let read = Operation::Read {
            va: from.address,
            rkey: from.rkey,
        };
        let sge = port.sge(&registered, length)?;
        link.post(place.into(), read, sge.into()).map_err(|_| Broken)?;
        self.places[usize::from(place)].registered = Some(registered);
        self.begins(now);
        Ok(())
    }

    fn respond(
        &mut self,
        link: &mut MessageConnection,
        port: &mut RdmaPort,
        response: Response,
        buffers: &mut Buffers,
        budget: &mut Budget,
        now: Instant,
    ) -> Result<(), Broken> {
        let Some(at) = response.place else {
            self.events.push_back(response.cqe);
            return Ok(());
        };
        let slot = SendSlot::new(at.into());
        let place = &mut self.places[usize::from(at)];
        let mut message = [0; CQE_LEN];
        response.cqe.emit(&mut message);
        let invalidate = response.invalidate.filter(|_| port.invalidates.get());
        self.has_invalidated |= invalidate.is_some();
        let (registered, memory) = match (response.write, response.memory) {
            (Some((_, length)), Memory::Buffer(bytes)) => {
                let buffer = port.slab.take(length as usize).map_err(|_| Broken)?;
                let copied = buffer.memory().write_in_any_order(0, &bytes[..length as usize]);
                copied.map_err(|_| Broken)?;
                (Some(Registered::Slab(buffer)), Memory::Buffer(bytes))
            }
            (Some(_), Memory::Peer(data)) => (Some(Registered::Peer(data)), Memory::None),
            (_, memory) => (None, memory),
        };
        match (response.write, registered) {
            (Some((to, length)), Some(registered)) => {
                let write = Operation::Write {
                    va: to.address,
                    rkey: to.rkey,
                    imm: None,
                };
                let write = (write, port.sge(&registered, length)?.into());
                // Small buffers may be free later, which saves a wake-up, unless they are short.
                let soon = matches!(registered, Registered::Peer(_))
                    || length as usize > LATER_MAX
                    || self.buffered > CONNECTION_LATER_MAX
                    || budget.left < BUFFERED_MAX / 2;
                // Its data may be on their way even if the response is not.
                place.registered = Some(registered);
                let sent = link.send_behind(write, slot, &message, invalidate, soon);
                sent.map_err(|_| Broken)?;
                place.is_soon = soon;
                if soon {
                    self.begins(now);
                }
            }
            _ => {
                let sent = match invalidate {
                    Some(rkey) => link.send_invalidate(slot, &message, rkey),
                    None => link.send(slot, &message),
                };
                sent.map_err(|_| Broken)?;
                let counted = std::mem::take(&mut place.counted);
                self.buffered -= counted;
                budget.left += counted;
            }
        }
        match memory {
            Memory::Capsule(capsule) => link.reuse(capsule),
            Memory::Buffer(buffer) => buffers.give(buffer),
            Memory::Peer(_) | Memory::None => {}
        }
        Ok(())
    }

    /// Sends the response to a request for events. Returns false if there is none, or no slot is free: then one becomes free later.
    fn send_event(&mut self, link: &mut MessageConnection) -> Result<bool, Broken> {
        let Some(cqe) = self.events.front() else {
            return Ok(false);
        };
        let Some(slot) = link.take_slot() else {
            return Ok(false);
        };
        let mut message = [0; CQE_LEN];
        cqe.emit(&mut message);
        // The report has this connection's turn come again, for responses that wait for a slot.
        link.send_reported(slot, &message).map_err(|_| Broken)?;
        self.events.pop_front();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdmux_runtime::{Limits, Queues, Reactor};
    use rdmux_wire::nvme::TransportKind;

    use super::super::ServerReactor;
    use super::*;
    use crate::target::{Listener, Target};

    const ADDRESS: &str = "127.0.32.1:4420";

    /// Returns a reactor that listens on a device, and its port there.
    fn listening(address: &str) -> (ServerReactor, PortId) {
        rdmux_soft::register();
        let limits = Limits {
            connections: 1,
            keepalive: Duration::from_secs(60),
            shared_receives: None,
            queues: Queues::Pool,
            ledger: None,
        };
        let reactor = Reactor::new(sizes_max(IN_CAPSULE_DEFAULT), limits, None).unwrap();
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: address.parse().unwrap(),
        };
        let options = rdmux_verbs::Options::default();
        let mut parts = listen(&[reactor.recipient()], None, &listener.into(), options).unwrap();
        let mailboxes = vec![reactor.mailbox()];
        let mut own = ServerReactor::new(reactor, Arc::new(Target::default()), mailboxes, 1, None);
        let part = parts.remove(0);
        let port = part.prepared.id();
        own.rdma.listen(&mut own.core, part);
        (own, port)
    }

    /// Has a reactor serve a connection.
    fn serve(own: &mut ServerReactor, id_of_port: PortId, now: Instant) -> (ConnectionId, &mut Served) {
        let asked = nvme_rdma::Request {
            qid: 0,
            receives: 32,
            sends: 31,
            cntlid: 0,
        };
        let id = ConnectionId(1);
        let port = own.rdma.ports.get_mut(&id_of_port).unwrap();
        port.connections += 1;
        let local = port.device.address();
        let connection = Connection::new(own.core.target.clone(), rdma::port(0), asked, 1, local, now);
        let served = Served::new(connection, id_of_port, now);
        (id, own.rdma.connections.entry(id).insert_entry(served).into_mut())
    }

    #[test]
    fn handle_ended__a_device_that_fails_what_it_declares_gets_send() {
        let (mut own, port) = listening(ADDRESS);
        let mut end = |has_invalidated, end| {
            let now = Instant::now();
            let (id, served) = serve(&mut own, port, now);
            served.has_invalidated = has_invalidated;
            own.rdma
                .handle_ended(&mut own.core, id, ConnectionEnd::Failed(end), now);
            assert!(own.rdma.connections.is_empty());
            own.rdma.ports[&port].invalidates.get()
        };
        assert!(end(true, WorkStatus::RetryExceeded));
        assert!(end(false, WorkStatus::LocalQpOperation));
        assert!(!end(true, WorkStatus::LocalQpOperation));
    }

    #[test]
    fn look_at_deadlines__a_host_that_acknowledges_nothing_keeps_no_buffers() {
        let (mut own, port) = listening("127.0.32.2:4420");
        let began = Instant::now();
        // The time for its Connect is far away.
        let (_, served) = serve(&mut own, port, began + 10 * STALL_MAX);
        served.begins(began);
        served.begins(began);
        served.moved(began + STALL_MAX / 2);
        served.buffered = 1 << 20;
        own.rdma.budget.left -= 1 << 20;
        let mut look = |now| {
            own.rdma.look_at_deadlines(&mut own.core, now);
            own.rdma.connections.len()
        };
        let stalls = began + STALL_MAX / 2 + STALL_MAX;
        assert_eq!(look(stalls - LOOK_EVERY), 1);
        assert_eq!((look(stalls), look(stalls + LOOK_EVERY)), (1, 0));
        assert_eq!(own.rdma.budget.left, BUFFERED_MAX);
    }

    #[test]
    fn close__buffers_of_ios_that_run_count_until_these_end() {
        let (mut own, port) = listening("127.0.32.3:4420");
        let now = Instant::now();
        let work = rdma::tests::read_into_a_buffer();
        let bytes = work.counted();
        let (id, served) = serve(&mut own, port, now);
        (served.buffered, served.at_media) = (2 * bytes, bytes);
        own.rdma.budget.left -= 2 * bytes;
        own.rdma.handle_ended(&mut own.core, id, ConnectionEnd::Lost, now);
        assert_eq!(own.rdma.budget.left, BUFFERED_MAX - bytes);
        let finished = Mail::Finished(id, work, Status::SUCCESS);
        own.rdma.handle_mail(&mut own.core, finished, now);
        assert_eq!(own.rdma.budget.left, BUFFERED_MAX);
    }
}
