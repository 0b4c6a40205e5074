//! The control connections of a node: what carries the messages of [`Machine`].

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdmux_key::random_nonce;
use rdmux_runtime::{Completed, KeepAlive, MessageConnection, PendingConnection, SIGNAL_EVERY, Sizes};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, ConnectionRequest, CreateError, EventQueue, Extensions, Listener,
    ProtectionDomain, QpType, Qpn, WorkCompletion,
};
use rdmux_wire::node::peer::{MESSAGE_LEN_MAX, PORT, RECEIVES, SERVICE, emit_wanted, parse_wanted};

use super::knock::Knock;
use super::machine::{Action, LinkId, Machine};
use super::{PeersError, Shares};

/// A node that has answered nothing between two probes is gone.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// Time after which a peer that has not answered a probe, or taken what was sent to it, may have ended and started again.
pub(crate) const DOUBT_AFTER: Duration = Duration::from_millis(100);
/// Peers whose hosts are asked at a time.
const KNOCKS_MAX: usize = 64;
/// Requests of peers, and completions, that are handled in a row.
const BATCH: usize = 64;

/// The sizes of a connection: there are at most [`RECEIVES`] messages of each end on the way.
const SIZES: Sizes = Sizes {
    message_bytes: MESSAGE_LEN_MAX,
    sent_bytes: MESSAGE_LEN_MAX,
    receives: RECEIVES,
    answers: 0,
    own: RECEIVES + SIGNAL_EVERY,
    operations: 0,
};

/// Marks the tokens of the node's event queue that are for this module: of a link, or of the listener.
const TOKEN: u64 = 1 << 63;
const LISTENER: u64 = TOKEN | 1 << 62;

/// Returns whether a token is for [`super::Peers::happened`].
pub(crate) fn is_token(word: u64) -> bool {
    word & TOKEN != 0
}

#[derive(Debug)]
enum Carrier {
    Attempt(PendingConnection),
    Made(MessageConnection),
}

/// The control connections.
// Connections end before their protection domain and queue.
#[derive(Debug)]
pub(super) struct Links {
    carriers: HashMap<LinkId, Carrier>,
    by_qpn: HashMap<Qpn, LinkId>,
    /// The engines of the device listen together, and a request may arrive at any of them.
    listener: Listener,
    shares: Shares,
    /// A domain of its own: who connects has shown nothing yet.
    pd: ProtectionDomain,
    cq: CompletionQueue,
    /// Completions that the queue has room for.
    room: u32,
    events: EventQueue,
    keepalive: KeepAlive,
    /// Time at which those that have not answered the last probe are doubted.
    doubts_at: Option<Instant>,
    /// Of peers that are doubted, at most [`KNOCKS_MAX`].
    knocks: HashMap<IpAddr, Knock>,
    completions: VecDeque<WorkCompletion>,
    bytes: Vec<u8>,
}

/// Completions that the queue of a node without links has room for.
const ROOM_MIN: u32 = 512;

fn params() -> ConnectParams {
    ConnectParams {
        // Probes are empty WRITEs.
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        initiator_depth: 0,
        responder_resources: 0,
        ..ConnectParams::default()
    }
}

impl Links {
    pub(super) fn open(shares: Shares, events: &EventQueue) -> Result<Links, PeersError> {
        let device = shares.device();
        let listener = device.listen_service(SERVICE, &[QpType::Rc])?;
        listener.notify(events, LISTENER);
        Ok(Links {
            carriers: HashMap::new(),
            by_qpn: HashMap::new(),
            listener,
            pd: device.alloc_pd()?,
            cq: device.create_cq(ROOM_MIN)?,
            room: ROOM_MIN,
            events: events.clone(),
            keepalive: KeepAlive::new(KEEPALIVE),
            doubts_at: None,
            knocks: HashMap::new(),
            completions: VecDeque::new(),
            bytes: Vec::new(),
            shares,
        })
    }

    pub(super) fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Makes room for the completions of one more link.
    fn reserve(&mut self) -> Result<(), CreateError> {
        let needed = (self.carriers.len() as u32 + 1) * SIZES.completions() as u32;
        if needed > self.room {
            let room = needed.next_power_of_two();
            self.cq.resize(room).map_err(|_| CreateError::NoRoom)?;
            self.room = room;
        }
        Ok(())
    }

    /// Returns the extensions of the device of an address, as a connection to it has shown them.
    pub(super) fn extensions_of(&self, address: IpAddr) -> Option<Extensions> {
        let mut made = self.carriers.values().filter_map(|carrier| match carrier {
            Carrier::Made(connection) if connection.peer() == address => connection.remote(),
            _ => None,
        });
        made.find_map(|endpoint| endpoint.extensions)
    }

    /// Does what the machine wants.
    pub(super) fn act(&mut self, now: Instant, action: Action, machine: &mut Machine) {
        match action {
            Action::Connect(link, address, wanted) => {
                if !self.connect(link, address, wanted) {
                    machine.lost(now, link);
                }
            }
            Action::Send(link) => self.send(now, link, machine),
            Action::Close(link, last) => {
                if let Some(Carrier::Made(connection)) = self.carriers.get_mut(&link) {
                    for message in last {
                        if let Some(slot) = connection.take_slot() {
                            let _ = connection.send(slot, &message);
                        }
                    }
                }
                self.close(link);
            }
        }
    }

    fn connect(&mut self, link: LinkId, address: IpAddr, wanted: Qpn) -> bool {
        if self.reserve().is_err() {
            return false;
        }
        let (peer, wanted) = (SocketAddr::new(address, PORT), emit_wanted(wanted));
        match MessageConnection::start_with(&self.pd, &self.cq, peer, &params(), &SIZES, &wanted) {
            Ok(attempt) => {
                attempt.notify(&self.events, TOKEN | link.0);
                self.carriers.insert(link, Carrier::Attempt(attempt));
                true
            }
            Err(_) => false,
        }
    }

    fn send(&mut self, now: Instant, id: LinkId, machine: &mut Machine) {
        let Some(Carrier::Made(connection)) = self.carriers.get_mut(&id) else {
            return;
        };
        while connection.has_slot() && machine.next_message(now, id, &mut self.bytes) {
            let Some(slot) = connection.take_slot() else {
                return;
            };
            if connection.send(slot, &self.bytes).is_err() {
                self.close(id);
                return machine.lost(now, id);
            }
        }
    }

    fn close(&mut self, id: LinkId) {
        // Its drop ends a connection, after what was posted before.
        if let Some(Carrier::Made(connection)) = self.carriers.remove(&id) {
            self.by_qpn.remove(&connection.qp().qpn());
            self.knocks.remove(&connection.peer());
        }
    }

    fn lost(&mut self, now: Instant, id: LinkId, machine: &mut Machine) {
        self.close(id);
        machine.lost(now, id);
    }

    /// Takes completions. Returns whether there were any.
    pub(super) fn poll(&mut self, now: Instant, machine: &mut Machine) -> bool {
        let count = self.cq.poll_many(BATCH, &mut self.completions);
        while let Some(wc) = self.completions.pop_front() {
            let Some(id) = self.by_qpn.get(&wc.qpn).copied() else {
                continue;
            };
            let Some(Carrier::Made(connection)) = self.carriers.get_mut(&id) else {
                continue;
            };
            match connection.handle(&wc) {
                Ok(Completed::Message { bytes, .. }) => machine.heard(now, id, &bytes),
                // A slot may have become free.
                Ok(_) => self.send(now, id, machine),
                Err(_) => self.lost(now, id, machine),
            }
        }
        count > 0
    }

    /// Handles a token of the event queue.
    pub(super) fn happened(&mut self, now: Instant, token: u64, machine: &mut Machine) {
        if token == LISTENER {
            return self.accept(now, machine);
        }
        let id = LinkId(token & !TOKEN);
        match self.carriers.get_mut(&id) {
            Some(Carrier::Attempt(attempt)) => match attempt.poll() {
                None => {}
                Some(Ok(connection)) => {
                    self.by_qpn.insert(connection.qp().qpn(), id);
                    self.carriers.insert(id, Carrier::Made(connection));
                    machine.connected(id);
                }
                Some(Err(_)) => self.lost(now, id, machine),
            },
            Some(Carrier::Made(connection)) if connection.end().is_some() => {
                // Messages that the peer has sent before come first.
                while self.poll(now, machine) {}
                self.lost(now, id, machine);
            }
            Some(Carrier::Made(_)) | None => {}
        }
    }

    fn accept(&mut self, now: Instant, machine: &mut Machine) {
        for _ in 0..BATCH {
            // One that is dropped is refused.
            let Some(request) = self.listener.accept(Duration::ZERO) else {
                return;
            };
            let Some(request) = self.keep_or_pass(request) else {
                continue;
            };
            let Ok(nonce) = random_nonce() else { continue };
            if self.reserve().is_err() {
                continue;
            }
            let Some(id) = machine.accepted(now, request.peer(), nonce) else {
                continue;
            };
            match MessageConnection::accept(request, &self.pd, &self.cq, &params(), &SIZES) {
                Ok(connection) => {
                    connection.notify(&self.events, TOKEN | id.0);
                    self.by_qpn.insert(connection.qp().qpn(), id);
                    self.carriers.insert(id, Carrier::Made(connection));
                }
                Err(_) => machine.lost(now, id),
            }
        }
        // There may be more.
        self.listener.notify(&self.events, LISTENER);
    }

    /// Returns a request that is for this engine, and passes others on to theirs.
    fn keep_or_pass(&self, request: ConnectionRequest) -> Option<ConnectionRequest> {
        let Shares { engines, devices, .. } = &self.shares;
        let engine = engines.of(parse_wanted(request.private_data()));
        if engine == engines.own() {
            return Some(request);
        }
        // One that fails is refused.
        let _ = request.pass_to(&devices[usize::from(engine)]);
        None
    }

    /// Returns when [`Links::probe`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.keepalive.next(), self.doubts_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// Finds out whether the node of a peer has ended, for which more calls may be needed.
    pub(super) fn doubt(&mut self, now: Instant, peer: IpAddr, machine: &mut Machine) {
        if self.is_port_closed(peer) {
            for id in machine.links_to(peer) {
                self.lost(now, id, machine);
            }
        } else if let Ok(nonce) = random_nonce() {
            machine.doubt(now, peer, nonce);
        }
    }

    /// Returns whether the host of a peer has said that no process has the port of the device.
    fn is_port_closed(&mut self, peer: IpAddr) -> bool {
        // An RNIC's port is not one of the kernel.
        if !self.knocks.contains_key(&peer)
            && self.knocks.len() < KNOCKS_MAX
            && self.extensions_of(peer).is_some()
            && let Ok(knock) = Knock::new(self.pd.device().address(), peer)
        {
            self.knocks.insert(peer, knock);
        }
        self.knocks.get(&peer).is_some_and(Knock::is_refused)
    }

    /// Returns the number of peers whose hosts are asked.
    #[cfg(test)]
    pub(super) fn knocks(&self) -> usize {
        self.knocks.len()
    }

    /// Doubts the peers that have not answered the last probe, if it is time.
    fn doubt_silent(&mut self, now: Instant, machine: &mut Machine) -> bool {
        if self.doubts_at.is_none_or(|at| now < at) {
            return false;
        }
        let silent: BTreeSet<IpAddr> = self
            .carriers
            .values()
            .filter_map(|carrier| match carrier {
                Carrier::Made(connection) => connection.is_probing().then(|| connection.peer()),
                Carrier::Attempt(_) => None,
            })
            .collect();
        self.doubts_at = (!silent.is_empty()).then_some(now + DOUBT_AFTER);
        self.knocks.retain(|peer, _| silent.contains(peer));
        for peer in silent {
            self.doubt(now, peer, machine);
        }
        true
    }

    /// Probes the peers, if it is time. A peer whose device has not answered the last probe is gone. Returns whether there is something to do.
    pub(super) fn probe(&mut self, now: Instant, machine: &mut Machine) -> bool {
        let doubts = self.doubt_silent(now, machine);
        if !self.keepalive.is_due(now, !self.carriers.is_empty()) {
            return doubts;
        }
        self.doubts_at = Some(now + DOUBT_AFTER);
        let silent = |carrier: &mut Carrier| match carrier {
            Carrier::Made(connection) => !connection.probe().unwrap_or(false),
            Carrier::Attempt(_) => false,
        };
        let silent: Vec<LinkId> = self
            .carriers
            .iter_mut()
            .filter_map(|(id, carrier)| silent(carrier).then_some(*id))
            .collect();
        for id in &silent {
            self.lost(now, *id, machine);
        }
        doubts || !silent.is_empty()
    }
}
