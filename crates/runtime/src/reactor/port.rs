//! The ports of reactors, and their preparation.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_verbs::{
    CompletionQueue, ConnectionRequest, CqPool, Device, Features, ListenError, Listener, OpenError, Qpn,
};

use super::{Established, Limits};
use crate::connection::{EstablishError, Sizes};
use crate::mailbox::Mailbox;
use crate::queues::{PortQueues, Queues, Seat};
use crate::receives::SharedReceives;
use crate::work_id::WorkId;

/// A port of a reactor. Numbers are never used again in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub(super) u64);

/// The state of several ports that listen for one service together. A port that is renewed passes it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServiceKey(u64);

/// Returns a number that has not been returned before.
fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A request that another reactor passes on.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) service: ServiceKey,
    pub(super) request: ConnectionRequest,
}

/// A reactor as other threads know it, to prepare ports for it.
#[derive(Clone, Debug)]
pub struct Recipient {
    pub(super) passing: Mailbox<Passed>,
    pub(super) limits: Limits,
}

/// A port of a reactor with all that it needs. It is made on any thread, since that may take a while, and fail; giving it to its reactor does
/// neither ([`Reactor::add_port`](crate::Reactor::add_port), [`Reactor::renew_port`](crate::Reactor::renew_port)).
#[derive(Debug)]
pub struct PreparedPort(pub(super) ReactorPort);

impl PreparedPort {
    /// Listens on a port of a device for several reactors, each of which has a part: requests for connections are spread over them. If
    /// the device can have engines ([`Device::open_engine`]), each part listens on an engine of its own, which it does not share with the
    /// others on the path of data. If not, the first reactor passes requests on to each in turn. The connections have at most these sizes.
    ///
    /// # Errors
    /// The port cannot be listened on, or there is not enough for the connections. Then no part listens.
    pub fn listen(
        recipients: &[Recipient],
        device: &Device,
        port: u16,
        sizes: &Sizes,
    ) -> Result<Vec<PreparedPort>, ListenAtError> {
        let mut devices = vec![device.clone()];
        for _ in 1..recipients.len() {
            match device.open_engine() {
                Ok(engine) => devices.push(engine),
                Err(OpenError::Unsupported(_)) => devices.push(device.clone()),
                Err(error) => return Err(error.into()),
            }
        }
        let mut prepared = PreparedPort::renewal(recipients, &devices, sizes)?;
        for (at, PreparedPort(own)) in prepared.iter_mut().enumerate() {
            if at == 0 || !own.device.is(device) {
                own.listener = Some(own.device.listen(port)?);
            }
        }
        Ok(prepared)
    }

    /// Prepares ports without listeners for several reactors, each on a device of its own or on the first one: each is to take over the listener
    /// of another port of that device ([`Reactor::renew_port`](crate::Reactor::renew_port)), with other sizes.
    ///
    /// # Errors
    /// There is not enough for the connections.
    pub fn renewal(
        recipients: &[Recipient],
        devices: &[Device],
        sizes: &Sizes,
    ) -> Result<Vec<PreparedPort>, EstablishError> {
        let limits = recipients.iter().map(|recipient| &recipient.limits);
        let size = limits.clone().map(|limits| limits.completions_max(sizes)).max();
        let common = limits.map(Limits::receives_in_common).max();
        let [size, common] = [size, common].map(|nr| nr.unwrap_or(0) as u32);
        if devices.is_empty() {
            return Ok(Vec::new());
        }
        let pool = CqPool::with_common(devices.to_vec(), size, common);
        let service = ServiceKey(number());
        let mut prepared = Vec::new();
        for ((recipient, device), vector) in recipients.iter().zip(devices).zip(0..) {
            let seat = Seat {
                pool: pool.clone(),
                vector,
            };
            let mut port = ReactorPort::new(device, true, Some(seat), sizes, &recipient.limits)?;
            port.service = service;
            prepared.push(PreparedPort(port));
        }
        let passing = recipients.iter().zip(devices).skip(1);
        let passing = passing.filter(|(_, device)| device.is(&devices[0]));
        let takers = passing.map(|(recipient, _)| recipient.passing.clone());
        if let Some(PreparedPort(first)) = prepared.first_mut() {
            first.takers = takers.collect();
        }
        Ok(prepared)
    }

    /// Returns the number that it has in its reactor.
    pub fn id(&self) -> PortId {
        self.0.id
    }

    /// Returns its device, or engine of a device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }
}

impl Limits {
    /// Returns the number of receives that connections of one port may share.
    pub(super) fn receives_in_common(&self) -> usize {
        self.shared_receives.map_or(0, |common| common + self.connections)
    }

    /// Returns the number of completions that connections of one port, of these sizes, may have at a time.
    pub(super) fn completions_max(&self, sizes: &Sizes) -> usize {
        self.connections * sizes.completions() + self.receives_in_common()
    }
}

/// A listener, or a device at which connections begin, and the completion queues of these connections.
#[derive(Debug)]
pub(super) struct ReactorPort {
    pub(super) id: PortId,
    pub(super) service: ServiceKey,
    pub(super) device: Device,
    /// Largest sizes of its connections.
    pub(super) sizes: Sizes,
    pub(super) queues: PortQueues,
    /// Set if this thread has the place of the device's engine, or had it when it waited last.
    pub(super) in_place: bool,
    pub(super) receives: Option<Arc<SharedReceives>>,
    /// Closed connections until the completion of [`WorkId::Last`]: only then are all shared receives that they have taken posted again.
    pub(super) closed: HashMap<Qpn, Established>,
    /// Set if it is for connections that are accepted.
    pub(super) accepts: bool,
    /// Set if it goes with its last connection.
    pub(super) leaves: bool,
    pub(super) listener: Option<Listener>,
    /// Set if requests may wait at the listener.
    pub(super) has_requests: bool,
    /// Requests that another reactor has passed on, and that wait for the place of a closed connection.
    pub(super) delayed: VecDeque<ConnectionRequest>,
    /// Reactors that take requests in turn with this one.
    pub(super) takers: Vec<Mailbox<Passed>>,
    pub(super) next_taker: usize,
    /// Attempts, too, and connections that linger or were closed.
    pub(super) connections: usize,
    /// Those of them in [`Stage::Ending`](super::Stage::Ending).
    pub(super) ending: usize,
}

impl ReactorPort {
    /// Makes a port without a listener; `seat`: its place in a pool that several reactors share, or else it has one of its own.
    pub(super) fn new(
        device: &Device,
        accepts: bool,
        seat: Option<Seat>,
        sizes: &Sizes,
        limits: &Limits,
    ) -> Result<ReactorPort, EstablishError> {
        let connections = limits.connections;
        let shared = limits.shared_receives;
        let shared = shared.filter(|_| accepts && sizes.receives > 0);
        let shared = shared.filter(|_| device.features().contains(Features::SHARED_RECEIVES));
        let ledger = limits.ledger.as_ref();
        let receives = shared.map(|common| SharedReceives::new(device, sizes, common, connections, ledger));
        let receives = receives.transpose()?;
        let in_common = receives
            .as_ref()
            .map_or(0, |_| limits.receives_in_common() as u32);
        let queues = match limits.queues {
            Queues::Private => PortQueues::private(device, in_common),
            Queues::Pool => {
                let vectors = vec![device.clone()];
                let of_its_own = || Seat {
                    pool: CqPool::with_common(vectors, limits.completions_max(sizes) as u32, in_common),
                    vector: 0,
                };
                PortQueues::of_pool(seat.unwrap_or_else(of_its_own), sizes.completions() as u32)?
            }
        };
        Ok(ReactorPort {
            id: PortId(number()),
            service: ServiceKey(number()),
            device: device.clone(),
            sizes: *sizes,
            queues,
            in_place: false,
            receives,
            closed: HashMap::new(),
            accepts,
            leaves: false,
            listener: None,
            has_requests: false,
            delayed: VecDeque::new(),
            takers: Vec::new(),
            next_taker: 0,
            connections: 0,
            ending: 0,
        })
    }

    /// Accepts no more. Requests that nobody has decided on go to ports that listen for the same service, or are refused.
    pub(super) fn leave(&mut self) {
        self.leaves = true;
        self.listener = None;
        self.has_requests = false;
        self.delayed.clear();
        self.takers.clear();
    }

    /// Frees the place of a connection whose queue pair is gone, or of an attempt.
    pub(super) fn freed(&mut self, cq: CompletionQueue) {
        self.connections -= 1;
        self.left(&cq);
    }

    /// Notes that a queue pair that used a queue is gone.
    pub(super) fn left(&mut self, cq: &CompletionQueue) {
        if !self.queues.leave(cq) {
            return;
        }
        // Nobody polls it any more.
        while let Some(wc) = cq.poll() {
            if let (WorkId::Receive(index), Some(receives)) = (WorkId::from(wc.wr_id), &self.receives) {
                receives.repost(index);
            }
        }
    }

    /// Returns a request that arrived at this port, or passes it on if another reactor is the next to take one.
    pub(super) fn pass(&mut self, mut request: ConnectionRequest) -> Option<ConnectionRequest> {
        loop {
            let next = self.next_taker;
            self.next_taker = (next + 1) % (self.takers.len() + 1);
            let Some(taker) = next.checked_sub(1).and_then(|at| self.takers.get(at)) else {
                return Some(request);
            };
            let service = self.service;
            request = taker.pass(Passed { service, request })?.request;
            // The reactor is gone: the one after it takes the request.
            self.takers.remove(next - 1);
            self.next_taker = next % (self.takers.len() + 1);
        }
    }
}

/// Reason for which a reactor does not listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenAtError {
    /// The port cannot be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Another engine of the device does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is no completion queue, or there are no receives, for its connections.
    #[error(transparent)]
    Establish(#[from] EstablishError),
}
