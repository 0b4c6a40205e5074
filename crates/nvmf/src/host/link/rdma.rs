//! A connection of NVMe/RDMA on a queue pair: sends capsules, and sleeps once for all responses.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_runtime::{Buffer, Completed, EstablishError, MessageConnection, SIGNAL_EVERY, SendError, Sizes};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectParams, Device, EventQueue, Memory, QpAttributes, QpState,
    QueuePair, RejReason, Status, WorkCompletion,
};
use rdmux_wire::nvme::CQE_LEN;
use rdmux_wire::nvme_rdma::{Accept, Reject, Request};

use super::super::queue::{Command, Completion, Data};
use super::super::rdma::{Config, Connection};
use super::super::{HostError, Options};
use super::{Breaker, QueueParams, Route};
use crate::rdma::Remote;
use crate::slab::Slab;

/// RDMA READs of the target that are answered at a time.
const READS_MAX: u8 = 16;
/// Rights of the target: on the queue pair, and on memory of commands.
const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE);

/// Opens the device from which a target is reached.
pub(in crate::host) fn open_device(options: &Options, target: SocketAddr) -> Result<Device, HostError> {
    if let Some(device) = &options.device {
        return Ok(device.clone());
    }
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| HostError::Device {
        target,
        source: source.into(),
    };
    let from = match options.from {
        Some(from) => from,
        None => Device::address_to(target).map_err(|error| failed(error.into()))?,
    };
    match Device::open(from) {
        // If another user has the loopback address that the route takes, the target's own address may work.
        Err(_) if options.from.is_none() && target.ip().is_loopback() => Device::open(target.ip()),
        opened => opened,
    }
    .map_err(|error| failed(error.into()))
}

/// A queue pair with its memory, and the connection on it.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub(super) struct Link {
    link: MessageConnection,
    cq: CompletionQueue,
    connection: Connection,
    /// Memory of the commands in flight, by their places.
    places: Vec<Option<Buffer>>,
    /// Memory that commands have had, and the next ones will. The target reaches it as long as this queue is there: it holds nothing but what
    /// commands of this queue have carried.
    slab: Slab,
    /// Fails the next wait.
    failure: Option<HostError>,
}

impl Link {
    /// Connects, and has the target agree to the size of the queue.
    pub(super) fn open(options: &Options, route: &Route, queue: &QueueParams) -> Result<Link, HostError> {
        let address = route.address;
        let device = match &route.device {
            Some(device) => device.clone(),
            None => open_device(options, address)?,
        };
        let config = Config {
            entries: queue.entries,
            in_capsule_max: if queue.qid == 0 { 0 } else { queue.in_capsule_max },
            is_io: queue.qid > 0,
        };
        let sizes = Sizes {
            message_bytes: CQE_LEN,
            sent_bytes: config.capsule_bytes(),
            // A response for each command, also for those that are sent as soon as others are done.
            receives: queue.entries.into(),
            answers: 0,
            // A response may come before the capsule of its command is acknowledged.
            own: usize::from(queue.entries) + SIGNAL_EVERY,
            operations: 0,
        };
        let request = Request {
            qid: queue.qid,
            receives: queue.entries,
            sends: queue.entries - 1,
            cntlid: queue.cntlid,
        };
        let params = ConnectParams {
            access: ACCESS,
            // Only the target reads.
            initiator_depth: 0,
            responder_resources: READS_MAX,
            ..ConnectParams::default()
        };
        let failed = |error: EstablishError| refused(address, error);
        let pd = device.alloc_pd().map_err(|error| failed(error.into()))?;
        let cq = device.create_cq(sizes.completions() as u32);
        let cq = cq.map_err(|error| failed(error.into()))?;
        let events = EventQueue::new()?;
        let pending = MessageConnection::start_with(&pd, &cq, address, &params, &sizes, &request.emit());
        let mut pending = pending.map_err(failed)?;
        pending.notify(&events, 0);
        let deadline = Instant::now() + options.connect_timeout;
        let link = loop {
            if let Some(result) = pending.poll() {
                break result.map_err(failed)?;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(ConnectError::Unreachable(address.ip()).into()));
            }
            events.wait(left);
        };
        let accept = Accept::parse(link.private_data())?;
        if accept.receives < queue.entries - 1 {
            return Err(HostError::Inconsistent {
                what: "answer to the request for a queue",
                why: format!(
                    "has {} receives for {} commands (CRQSIZE)",
                    accept.receives,
                    queue.entries - 1
                ),
            });
        }
        Ok(Link {
            link,
            cq,
            connection: Connection::new(config),
            places: (0..queue.entries).map(|_| None).collect(),
            slab: Slab::new(pd, ACCESS),
            failure: None,
        })
    }

    /// Returns memory for a command's data, with those that it sends.
    fn prepare(&mut self, command: &Command, bytes: usize) -> Result<Buffer, HostError> {
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
            HostError::Memory(Arc::new(io::Error::other(error)))
        };
        let buffer = self.slab.take(bytes).map_err(|error| failed(error.into()))?;
        if matches!(command.data, Data::Out(_)) || self.connection.fills_memory() {
            let copied = buffer.memory().write_in_any_order(0, &command.buffer[..bytes]);
            copied.map_err(|error| failed(error.into()))?;
        }
        Ok(buffer)
    }

    /// Sends the capsules for which there are slots.
    fn send(&mut self) -> Result<(), HostError> {
        while self.connection.has_capsule()
            && let Some(slot) = self.link.take_slot()
            && let Some(capsule) = self.connection.next_capsule()
        {
            self.link
                .send_parts(slot, &capsule)
                .map_err(|error| match error {
                    // The queue pair takes nothing more.
                    SendError::Post(_) => self.over(),
                    error => io::Error::other(error).into(),
                })?;
        }
        Ok(())
    }

    /// Returns why the connection is over, as far as it is known.
    fn over(&self) -> HostError {
        self.link
            .qp()
            .error()
            .map_or(HostError::Closed(None), failed_with)
    }

    fn handle(&mut self, wc: &WorkCompletion) -> Result<(), HostError> {
        let Completed::Message { bytes, .. } = self.link.handle(wc).map_err(failed_with)? else {
            return Ok(());
        };
        let places = &self.places;
        let done = self.connection.handle_response(&bytes, |at, data| {
            if let Some(buffer) = &places[usize::from(at)] {
                // It is this process's own memory, and as long.
                let _ = buffer.memory().read(0, data);
            }
        });
        self.link.reuse(bytes);
        if let Some(at) = done
            && let Some(buffer) = self.places[usize::from(at)].take()
        {
            self.slab.give(buffer);
        }
        match self.connection.end() {
            Some(end) => Err(end.into()),
            None => Ok(()),
        }
    }
}

impl super::Connection for Link {
    fn room(&self) -> usize {
        self.connection.room()
    }

    fn in_flight(&self) -> usize {
        self.connection.in_flight()
    }

    fn has_expired(&self, now: Instant) -> bool {
        self.connection.has_expired(now)
    }

    fn take_commands(&mut self) -> Vec<Command> {
        self.connection.take_commands()
    }

    fn submit(&mut self, command: Command, deadline: Option<Instant>) {
        let (buffer, memory) = match self.connection.needs_memory(&command) {
            0 => (None, None),
            bytes => match self.prepare(&command, bytes) {
                Ok(buffer) => {
                    let rkey = buffer.rkey();
                    (Some(buffer), Some(Remote { address: 0, rkey }))
                }
                Err(error) => {
                    // The command stays with the queue, and is not sent.
                    self.failure.get_or_insert(error);
                    let rkey = rdmux_wire::RKey(0);
                    (None, Some(Remote { address: 0, rkey }))
                }
            },
        };
        let at = self.connection.submit(command, deadline, memory);
        self.places[usize::from(at)] = buffer;
    }

    fn has_completions(&self) -> bool {
        self.connection.has_completions()
    }

    fn poll(&mut self) -> Option<Completion> {
        self.connection.poll()
    }

    fn wait(&mut self, longest: Duration) -> Result<(), HostError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.send()?;
        if self.connection.has_completions() {
            return Ok(());
        }
        let mut found = self.cq.wait(longest)?;
        if found.is_none() && self.link.end().is_some() {
            return Err(self.over());
        }
        while let Some(wc) = found {
            self.handle(&wc)?;
            found = self.cq.poll();
        }
        // Slots may have become free.
        self.send()
    }

    fn end(&mut self) {
        self.link.disconnect();
    }

    fn breaker(&self) -> Result<Box<dyn Breaker>, HostError> {
        Ok(Box::new(self.link.qp().clone()))
    }
}

impl Breaker for QueuePair {
    fn break_off(&self) {
        // Its receives complete, which ends a sleep.
        let _ = self.modify(QpState::Error, &QpAttributes::default());
    }
}

/// Returns the error of a request that has failed.
fn failed_with(status: Status) -> HostError {
    match status {
        Status::Flushed => HostError::Closed(None),
        status => io::Error::other(status).into(),
    }
}

/// Returns why a target has no connection for this host.
fn refused(address: SocketAddr, error: EstablishError) -> HostError {
    let connect = |source: io::Error| HostError::Connect {
        address,
        source: Arc::new(source),
    };
    match error {
        EstablishError::Connect(ConnectError::Rejected { reason, private_data }) => {
            match Reject::parse(&private_data) {
                Ok(reject) if reason == RejReason::CONSUMER => HostError::Rejected { address, reject },
                _ if reason == RejReason::CONSUMER => HostError::NoTarget { address },
                _ => connect(io::Error::new(
                    io::ErrorKind::ConnectionRefused,
                    reason.to_string(),
                )),
            }
        }
        EstablishError::Io(error) => connect(error),
        EstablishError::Connect(ConnectError::Io(error)) => connect(error),
        error => connect(io::Error::other(error)),
    }
}
