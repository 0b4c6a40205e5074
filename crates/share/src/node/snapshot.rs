//! State and counters of a node at a moment, for programs that show them.
//!
//! All counters only grow, as long as what they belong to is there: a viewer takes two snapshots and divides the difference by that of their
//! times ([`Counts::since`]). A node makes a snapshot when somebody asks for one ([`Viewer`]); otherwise it only adds to plain words.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, mpsc};

use rdmux_rnic::Histogram;
use rdmux_rnic::sched::Entitlement;
use rdmux_runtime::Mailbox;
use rdmux_verbs::Device;
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::waiting::WaitMode;
use serde::{Deserialize, Serialize};

use super::tenants::Tenants;
use super::worker::Order;

/// Connections in a snapshot; the others are only counted.
pub const CONNECTIONS_MAX: usize = 1024;

/// State of a node at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The node itself.
    pub node: NodeState,
    /// Tenants, by name.
    pub tenants: Vec<Tenant>,
    /// Applications, in the order in which they have come.
    pub applications: Vec<Application>,
    /// Queue pairs of the applications, by application; at most [`CONNECTIONS_MAX`].
    pub connections: Vec<Connection>,
    /// Queue pairs that are left out because there are more.
    pub connections_left_out: u64,
    /// Queue pairs that connections share.
    pub shared_qps: Vec<SharedQp>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Address of its device.
    pub address: IpAddr,
    /// The device's provider.
    pub provider: String,
    /// Time of the snapshot in ns, by a clock that never goes back (CLOCK_MONOTONIC).
    pub time_ns: u64,
    /// Effort for a short wait of the worker that makes the greatest: `running`, `interrupted` or `blocked`.
    pub waiting: String,
    /// Packets that the device has retransmitted, those of all connections together.
    pub retransmitted_packets: u64,
    /// Set if the snapshot has all applications; otherwise, it has those of one user alone.
    pub is_whole: bool,
}

/// Bytes and requests that a tenant, an application or a connection has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests of send queues that have succeeded.
    pub requests: u64,
    /// Bytes of these requests' messages: WRITEs and SENDs send them, READs receive them.
    pub bytes: u64,
    /// Requests and receives that have ended with an error, those flushed included.
    pub errors: u64,
    /// Receives that have completed with a message.
    pub receives: u64,
    /// Bytes of these messages.
    pub received_bytes: u64,
    /// Requests of send queues that are not complete.
    pub waiting_requests: u64,
    /// Bytes of their messages.
    pub waiting_bytes: u64,
    /// Times from the node's taking of a request to its successful completion, of requests that ask for one. The node reads
    /// the clock when a pass over its applications begins, and before it looks for completions.
    #[serde(with = "latency")]
    pub latency: Histogram,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Number of its applications.
    pub applications: u32,
    /// Part of what guaranteed rates leave, in proportion to others; `None` without a configuration.
    #[serde(default)]
    pub weight: Option<u16>,
    /// Rate in bits per second that it has before others exceed theirs.
    #[serde(default)]
    pub rate_bps: Option<u64>,
    /// Rate in bits per second that it never exceeds.
    #[serde(default)]
    pub ceiling_bps: Option<u64>,
    /// Moved by its applications, those that have ended included.
    pub counts: Counts,
}

/// An application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// Its number; no other application of the node's life has it.
    pub id: u64,
    /// Its process, as the node sees it; `None` if that is in a PID namespace which the node does not see into.
    pub pid: Option<u32>,
    /// Its user; `None` if several users have this number in the node's user namespace.
    pub uid: Option<u32>,
    /// The name that it has given itself, without control characters.
    pub name: String,
    /// Name of its tenant.
    pub tenant: String,
    /// Number of its queue pairs.
    pub queue_pairs: u32,
    /// Moved by it.
    pub counts: Counts,
}

/// A queue pair of an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Number of its application.
    pub application: u64,
    /// Its number, which the application knows.
    pub qpn: u32,
    /// Address of the peer, once it is known.
    pub peer: Option<IpAddr>,
    /// Class of the scheduler, from 0 to 7, once it is connected.
    pub class: Option<u8>,
    /// The way of its requests to the peer.
    pub route: Route,
    /// The shared queue pair, with [`Route::Shared`].
    pub shared_qp: Option<u64>,
    /// Moved by it.
    pub counts: Counts,
}

/// The way of the requests of a queue pair to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Route {
    /// By a queue pair of the device that it has alone, or will have.
    Own,
    /// The peer's node is asked.
    Asking,
    /// By a queue pair of the node that connections share.
    Shared,
    /// Not at all: a connection that went by a shared queue pair has ended.
    Over,
}

impl Route {
    /// Returns the route in a word, as JSON has it.
    pub fn word(self) -> &'static str {
        match self {
            Route::Own => "own",
            Route::Asking => "asking",
            Route::Shared => "shared",
            Route::Over => "over",
        }
    }
}

/// A queue pair of the node that connections share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedQp {
    /// Its number among those of the node.
    pub id: u64,
    /// Address of the other node.
    pub peer: IpAddr,
    /// The tenant at this node.
    pub tenant: String,
    /// The tenant at the other node.
    pub peer_tenant: String,
    /// Class of the scheduler, from 0 to 7.
    pub class: u8,
    /// Number of connections.
    pub connections: u32,
    /// Bytes that may be in flight.
    pub window_bytes: u64,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
}

impl Counts {
    /// Adds what another one has moved.
    pub fn add(&mut self, other: &Counts) {
        let all = self.words().into_iter().zip(other.words_of());
        for (own, others) in all {
            *own = own.saturating_add(others);
        }
        self.latency.add(&other.latency);
    }

    /// Returns what was moved since an earlier snapshot, and what waits now.
    pub fn since(&self, earlier: &Counts) -> Counts {
        let mut since = *self;
        for (own, before) in since.words().into_iter().zip(earlier.words_of()) {
            *own = own.saturating_sub(before);
        }
        since.latency = self.latency.since(&earlier.latency);
        (since.waiting_requests, since.waiting_bytes) = (self.waiting_requests, self.waiting_bytes);
        since
    }

    /// Returns what was moved, of what waits nothing: the rest of something that has ended.
    pub(super) fn moved(&self) -> Counts {
        Counts {
            waiting_requests: 0,
            waiting_bytes: 0,
            ..*self
        }
    }

    fn words(&mut self) -> [&mut u64; 7] {
        [
            &mut self.requests,
            &mut self.bytes,
            &mut self.errors,
            &mut self.receives,
            &mut self.received_bytes,
            &mut self.waiting_requests,
            &mut self.waiting_bytes,
        ]
    }

    fn words_of(mut self) -> [u64; 7] {
        self.words().map(|word| *word)
    }
}

impl Tenant {
    fn new(name: &str, entitlement: Option<Entitlement>) -> Tenant {
        Tenant {
            name: name.to_owned(),
            applications: 0,
            weight: entitlement.as_ref().map(|its| its.weight.get()),
            rate_bps: entitlement
                .as_ref()
                .map(|its| its.rate_bps)
                .filter(|bps| *bps > 0),
            ceiling_bps: entitlement.and_then(|its| its.ceiling_bps),
            counts: Counts::default(),
        }
    }
}

impl Snapshot {
    /// Returns what a user may see: everything for root and for the node's own user, else the user's own applications, and tenants and shared
    /// queue pairs as far as these applications are concerned.
    pub fn visible_to(&self, uid: u32, own: u32) -> Snapshot {
        let mut seen = self.clone();
        if uid == 0 || uid == own {
            return seen;
        }
        seen.node.is_whole = false;
        seen.node.retransmitted_packets = 0;
        seen.applications
            .retain(|application| application.uid == Some(uid));
        let is_seen = |id| seen.applications.iter().any(|application| application.id == id);
        seen.connections
            .retain(|connection| is_seen(connection.application));
        let all: u64 = seen
            .applications
            .iter()
            .map(|application| u64::from(application.queue_pairs))
            .sum();
        seen.connections_left_out = all.saturating_sub(seen.connections.len() as u64);
        seen.tenants.retain_mut(|tenant| {
            (tenant.applications, tenant.counts) = (0, Counts::default());
            let of_tenant = seen.applications.iter().filter(|one| one.tenant == tenant.name);
            for application in of_tenant {
                tenant.applications += 1;
                tenant.counts.add(&application.counts);
            }
            tenant.applications > 0
        });
        // Windows and what is in flight are those of all applications together.
        seen.shared_qps.clear();
        seen
    }

    /// Removes control characters from all text in it: the node may be anybody's.
    pub(crate) fn remove_control_characters(&mut self) {
        let node = [&mut self.node.provider, &mut self.node.waiting];
        let tenants = self.tenants.iter_mut().map(|tenant| &mut tenant.name);
        let applications = self.applications.iter_mut();
        let applications = applications.flat_map(|one| [&mut one.name, &mut one.tenant]);
        let shared = self.shared_qps.iter_mut();
        let shared = shared.flat_map(|shared| [&mut shared.tenant, &mut shared.peer_tenant]);
        let texts = node.into_iter().chain(tenants).chain(applications).chain(shared);
        texts.for_each(|text| text.retain(|c| !c.is_control()));
    }
}

/// Asks a node for snapshots, from other threads.
#[derive(Clone, Debug)]
pub struct Viewer {
    workers: Vec<Mailbox<Order>>,
    tenants: Arc<Mutex<Tenants>>,
    device: Device,
}

/// The node has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node has ended")]
pub struct Ended;

impl Viewer {
    pub(super) fn new(workers: Vec<Mailbox<Order>>, tenants: Arc<Mutex<Tenants>>, device: Device) -> Viewer {
        Viewer {
            workers,
            tenants,
            device,
        }
    }

    /// Returns a snapshot of everything. Waits until each of the node's workers has told its part, between two of its passes.
    ///
    /// # Errors
    /// The node has ended.
    pub fn snapshot(&self) -> Result<Snapshot, Ended> {
        let (answer, answered) = mpsc::channel();
        for worker in &self.workers {
            worker.send(Order::Show(CONNECTIONS_MAX / self.workers.len(), answer.clone()));
        }
        drop(answer);
        let known = self.tenants.lock();
        let mut tenants: BTreeMap<String, Tenant> = known
            .names()
            .map(|name| (name.to_owned(), Tenant::new(name, known.entitlement(name))))
            .collect();
        drop(known);
        let mut snapshot = Snapshot {
            node: NodeState {
                address: self.device.address(),
                provider: self.device.provider().to_owned(),
                time_ns: 0,
                waiting: String::new(),
                retransmitted_packets: 0,
                is_whole: true,
            },
            tenants: Vec::new(),
            applications: Vec::new(),
            connections: Vec::new(),
            connections_left_out: 0,
            shared_qps: Vec::new(),
        };
        let mut waiting = WaitMode::Blocked;
        for _ in &self.workers {
            let part = answered.recv().map_err(|_| Ended)?;
            waiting = waiting.max(part.waiting);
            snapshot.node.time_ns = snapshot.node.time_ns.max(part.time.0);
            snapshot.node.retransmitted_packets += part.retransmitted_packets;
            for (name, applications, counts) in part.tenants {
                let tenant = tenants.entry(name);
                let tenant = tenant.or_insert_with_key(|name| Tenant::new(name, None));
                tenant.applications += applications;
                tenant.counts.add(&counts);
            }
            snapshot.applications.extend(part.applications);
            snapshot.connections.extend(part.connections);
            snapshot.connections_left_out += part.connections_left_out;
            snapshot.shared_qps.extend(part.shared_qps);
        }
        snapshot.node.waiting = word(waiting).to_owned();
        snapshot.tenants = tenants.into_values().collect();
        snapshot.shared_qps.sort_by_key(|shared| shared.id);
        snapshot.applications.sort_by_key(|application| application.id);
        snapshot
            .connections
            .sort_by_key(|connection| (connection.application, connection.qpn));
        Ok(snapshot)
    }
}

fn word(mode: WaitMode) -> &'static str {
    match mode {
        WaitMode::Blocked => "blocked",
        WaitMode::Interrupted => "interrupted",
        WaitMode::Running => "running",
    }
}

/// JSON of a histogram: the sum of the durations in ns, and the number of durations in each bucket, without the empty ones at the end. The
/// first bucket ends with 256 ns, each further one with twice as much.
mod latency {
    use rdmux_rnic::Histogram;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Latency {
        sum_ns: u64,
        buckets: Vec<u64>,
    }

    pub(super) fn serialize<S: Serializer>(histogram: &Histogram, to: S) -> Result<S::Ok, S::Error> {
        let buckets = histogram.buckets();
        let used = buckets.iter().rposition(|n| *n > 0).map_or(0, |last| last + 1);
        let (sum_ns, buckets) = (histogram.sum_ns(), buckets[..used].to_vec());
        Latency { sum_ns, buckets }.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Histogram, D::Error> {
        let Latency { sum_ns, buckets } = Latency::deserialize(from)?;
        Histogram::from_buckets(&buckets, sum_ns).ok_or_else(|| D::Error::custom("too many buckets"))
    }
}

#[cfg(test)]
mod tests;
