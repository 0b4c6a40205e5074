//! Connecting all nodes with each other.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Access, ConnectError, ConnectPair, ConnectParams, Connection, ConnectionRequest, Device, EventQueue,
    ListenError, Listener, ProtectionDomain, QueuePair, RejReason,
};
use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::joining::{Hello, VERSION};

use super::Error;
use crate::cluster::Cluster;
use crate::driver::Queues;
use crate::link::{COMPLETIONS, Link, Prepared};

/// Pause before a node is asked again that is not there yet.
const AGAIN: Duration = Duration::from_millis(20);

/// Time in which the port of this node may still be closing.
const CLOSING: Duration = Duration::from_millis(500);

/// The connections of a node to all others, by their numbers.
#[derive(Debug)]
pub(super) struct Joined {
    pub pd: ProtectionDomain,
    pub queues: Queues,
    pub links: Vec<Option<Link>>,
}

/// Listens at a port, also if it has been closed just now: a process that is being started has copies of its parent's descriptors until it executes
/// its program, and they keep the port.
fn listen(device: &Device, port: u16) -> Result<Listener, ListenError> {
    let began = Instant::now();
    loop {
        match device.listen(port) {
            Err(ListenError::InUse(_)) if began.elapsed() < CLOSING => {
                // Time is meant: nothing tells when the copies are closed.
                std::thread::sleep(AGAIN);
            }
            outcome => return outcome,
        }
    }
}

/// Connects to the nodes of lower numbers, and waits for those of higher ones.
pub(super) fn join(cluster: &Cluster, timeout: Duration) -> Result<Joined, Error> {
    let nodes = cluster.nodes().count();
    let own = cluster.own();
    let address = address_of(cluster, own);
    let device = Device::open(address.ip())?;
    let pd = device.alloc_pd()?;
    let completions = COMPLETIONS * nodes as u32;
    let queues = Queues {
        work: device.create_cq(completions)?,
        bells: device.create_cq(completions)?,
    };
    let listener = listen(&device, address.port()).map_err(|error| Error::Listen {
        node: own.number(),
        address,
        error,
    })?;
    let mut joining = Join {
        cluster,
        params: params(),
        deadline: Instant::now() + timeout,
        timeout,
        device,
        pd,
        queues,
        events: EventQueue::new()?,
        links: (0..nodes).map(|_| None).collect(),
    };
    for node in cluster.nodes().filter(|node| *node < own) {
        joining.connect(node)?;
    }
    joining.accept(&listener)?;
    let Join {
        pd, queues, links, ..
    } = joining;
    Ok(Joined { pd, queues, links })
}

fn address_of(cluster: &Cluster, node: NodeId) -> SocketAddr {
    let unspecified = SocketAddr::from(([0; 4], 0));
    cluster.address(node).unwrap_or(unspecified)
}

/// Rights of the peer: it reads frames, and asks by empty WRITEs whether this node is there.
fn params() -> ConnectParams {
    ConnectParams {
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        ..ConnectParams::default()
    }
}

struct Join<'a> {
    cluster: &'a Cluster,
    params: ConnectParams,
    deadline: Instant,
    timeout: Duration,
    device: Device,
    pd: ProtectionDomain,
    queues: Queues,
    /// Of all attempts to connect: each connection keeps it.
    events: EventQueue,
    links: Vec<Option<Link>>,
}

impl Join<'_> {
    /// Returns the greeting for a node that writes the ring of this key.
    fn hello(&self, ring: u32) -> Hello {
        Hello {
            version: VERSION,
            node: self.cluster.own().number(),
            nodes: self.links.len() as u32,
            page_bytes: rustix::param::page_size() as u32,
            session: self.cluster.session,
            ring,
        }
    }

    /// Connects to a node, again and again until it listens.
    fn connect(&mut self, node: NodeId) -> Result<(), Error> {
        let address = address_of(self.cluster, node);
        loop {
            let prepared = self.prepare(node)?;
            let hello = self.hello(prepared.ring_key()).emit();
            let error = match self.attempt(prepared.qp(), address, &hello) {
                Ok(connection) => {
                    let answer = Hello::parse(connection.private_data()).ok();
                    let ring = self.check(node, answer)?;
                    self.links[node.number() as usize] = Some(prepared.connected(connection, ring));
                    return Ok(());
                }
                Err(error) => error,
            };
            if let ConnectError::Rejected {
                reason: RejReason::CONSUMER,
                private_data,
            } = &error
            {
                let _ = self.check(node, Hello::parse(private_data).ok())?;
                return Err(Error::Stranger {
                    node: node.number(),
                    address,
                });
            }
            if Instant::now() >= self.deadline {
                return Err(Error::Absent {
                    node: node.number(),
                    address,
                    seconds: self.timeout.as_secs(),
                    error,
                });
            }
            // Time is meant: the node may not listen yet, and nothing tells when it does.
            std::thread::sleep(AGAIN);
        }
    }

    /// Connects a queue pair to a node, unless the time is over before the node answers.
    fn attempt(&self, qp: &QueuePair, address: SocketAddr, hello: &[u8]) -> Result<Connection, ConnectError> {
        let pair = ConnectPair::Own(qp);
        let mut attempt = self.device.start_connect(pair, address, &self.params, hello)?;
        attempt.notify(&self.events, 0);
        loop {
            if let Some(result) = attempt.poll() {
                return result;
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConnectError::Unreachable(address.ip()));
            }
            // Earlier attempts may end it, too.
            self.events.wait(left);
        }
    }

    /// Waits until all nodes of higher numbers have connected.
    fn accept(&mut self, listener: &Listener) -> Result<(), Error> {
        loop {
            let own = self.cluster.own();
            let links = &self.links;
            let is_missing = |node: &NodeId| *node > own && links[node.number() as usize].is_none();
            let missing: Vec<String> = self
                .cluster
                .nodes()
                .filter(is_missing)
                .map(|node| node.number().to_string())
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            let Some(request) = listener.accept(left) else {
                return Err(Error::Missing {
                    nodes: missing.join(", "),
                    seconds: self.timeout.as_secs(),
                });
            };
            self.answer(request)?;
        }
    }

    /// Accepts a node that is missing, and refuses anybody else.
    fn answer(&mut self, request: ConnectionRequest) -> Result<(), Error> {
        let own = self.hello(0);
        let hello = Hello::parse(request.private_data()).ok();
        let node = hello.and_then(|hello| NodeId::new(hello.node));
        let is_missing = |node: &NodeId| {
            *node > self.cluster.own() && matches!(self.links.get(node.number() as usize), Some(None))
        };
        let known = hello.filter(|hello| {
            let (node, ring) = (own.node, own.ring);
            Hello { node, ring, ..*hello } == own
        });
        let (Some(node), Some(hello)) = (node.filter(is_missing), known) else {
            // Only a node of this session may learn it.
            let session = hello.map(|hello| hello.session).filter(|it| *it == own.session);
            let session = session.unwrap_or_default();
            request.reject(&Hello { session, ..own }.emit());
            // A node of this session that is of another version never joins.
            return match (hello, node) {
                (Some(hello), Some(node)) if hello.session == own.session => {
                    self.check(node, Some(hello)).map(|_| ())
                }
                _ => Ok(()),
            };
        };
        let prepared = self.prepare(node)?;
        let own = self.hello(prepared.ring_key()).emit();
        if let Ok(connection) = request.accept(prepared.qp(), &self.params, &own) {
            // A node that has this one's answer finds it gone at worst, not absent; and one that left at once has joined, and is gone.
            connection.wait_established();
            self.links[node.number() as usize] = Some(prepared.connected(connection, hello.ring));
        }
        Ok(())
    }

    fn prepare(&self, node: NodeId) -> Result<Prepared, Error> {
        let Queues { work, bells } = &self.queues;
        Ok(Prepared::new(node.number(), &self.pd, work, bells)?)
    }

    /// Checks a node's greeting. Returns the key of its ring.
    fn check(&self, node: NodeId, hello: Option<Hello>) -> Result<u32, Error> {
        let own = self.hello(0);
        let number = node.number();
        let stranger = Error::Stranger {
            node: number,
            address: address_of(self.cluster, node),
        };
        let Some(hello) = hello else { return Err(stranger) };
        if hello.version != VERSION {
            return Err(Error::Version {
                node: number,
                version: hello.version,
            });
        }
        if hello.page_bytes != own.page_bytes {
            return Err(Error::PageSize {
                node: number,
                theirs: hello.page_bytes,
                ours: own.page_bytes,
            });
        }
        let (node, ring) = (number, hello.ring);
        match hello == (Hello { node, ring, ..own }) {
            true => Ok(ring),
            false => Err(stranger),
        }
    }
}
