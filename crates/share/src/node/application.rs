//! One application of a node: its control connection, its rings, and the objects that it has in the node's device.
//!
//! Nothing that an application sends is trusted. It names objects by ids among its own, whose number is bounded; each of its protection domains
//! is one of the device, whose engine checks keys and ranges against it. So the worst that it can do is to have itself detached.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use rdmux_memory::ProcessMemory;
use rdmux_rnic::sched::{Entitlement, TenantId};
use rdmux_rnic::{SendRequest, Time};
use rdmux_verbs::{
    AddressHandle, CompletionQueue, Connecting, Connection, ConnectionRequest, CreateError, Device,
    EventQueue, Listener, MemoryRegion, ProtectionDomain, Qpn, QueuePair, SharedReceiveQueue, WorkCompletion,
};
use rdmux_wire::node::control::{ErrorCode, Kind, Message};

use super::config::Resource;
use super::egress::{Egress, FlowId, GroupId};
use super::identity::Identity;
use super::post::Rings;
use super::services::{Claim, Services};
use super::sharing::Sharing;
use super::snapshot::Counts;
use super::table::Table;
use super::tenants::{Account, Charge, Seat};
use crate::control::convert::Refusal;
use crate::control::{Channel, Ended};

/// Protection domains of an application.
const PDS_MAX: usize = 256;
/// Regions of an application.
pub(super) const REGIONS_MAX: usize = 4096;
/// Queue pairs of an application.
pub(super) const QPS_MAX: usize = 2048;
/// Shared receive queues of an application.
pub(crate) const SRQS_MAX: usize = 1024;
/// Address handles of an application.
pub(crate) const ADDRESS_HANDLES_MAX: usize = 4096;
/// Listeners of an application.
const LISTENERS_MAX: usize = 256;
/// Requests of peers that an application has not decided.
const REQUESTS_MAX: usize = 1024;
/// Connections and attempts of an application: some may have lost their queue pairs.
const CONNECTIONS_MAX: usize = 2 * QPS_MAX;
/// Requests that a queue of a queue pair can hold.
pub(super) const WORK_REQUESTS_MAX: u32 = 1 << 14;
/// Requests that all queues of an application can hold: the node keeps the completions of so many.
pub(super) const WORK_REQUESTS_ALL_MAX: u32 = 1 << 20;
/// Fewest requests of the device's send queue of a queue pair that has one: so many pieces of a single request can be in flight.
const DEPTH_MIN: u32 = 128;

/// A queue pair of an application.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) qp: QueuePair,
    /// Requests that the device's send queue holds.
    pub(super) depth: u32,
    /// Most completions that the device keeps of it.
    pub(super) completions: u32,
    /// Requests that the application has posted to its send queue.
    pub(super) flow: FlowId,
    /// The device's send queue, as the scheduler knows it, from the first request on after it was connected.
    pub(super) group: Option<GroupId>,
    /// Address of its peer then.
    pub(super) peer: Option<IpAddr>,
    /// Set once the application knows that it has failed.
    pub(super) failed: bool,
    /// Set once the application knows that its connection has ended.
    pub(super) has_ended: bool,
    /// Charges of the tenant: for the queue pair, and for its requests.
    pub(super) charges: [Charge; 2],
}

/// A region of an application.
#[derive(Debug)]
pub(super) struct Region {
    /// Destroyed before it is charged no more.
    pub(super) region: MemoryRegion,
    /// Charges of the tenant: for the region, and for its bytes.
    pub(super) charges: [Charge; 2],
}

impl Region {
    pub(super) fn new(region: MemoryRegion, charges: [Charge; 2]) -> Region {
        Region { region, charges }
    }
}

/// Process and tenant of an application.
#[derive(Debug)]
pub(super) struct Belonging {
    /// Number of the application among all that the node has had.
    pub(super) number: u64,
    pub(super) identity: Identity,
    pub(super) account: Arc<Account>,
    /// Its place among the connections of the tenant's processes.
    pub(super) seat: Seat,
    /// Charge of the tenant for the application, once it is attached: a connection that only holds the node is none.
    pub(super) charge: Option<Charge>,
}

/// A shared receive queue of an application.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) queue: SharedReceiveQueue,
    /// Most completions that the node keeps of it.
    pub(super) completions: u32,
    /// Charge of the tenant for its receives.
    pub(super) charge: Charge,
}

/// A connection of an application, or an attempt to connect.
#[derive(Debug)]
pub(super) enum Link {
    Attempt(Connecting),
    Made {
        connection: Connection,
        /// Events that the application knows of: established, ended.
        known: (bool, bool),
    },
}

/// A connection with its queue pair.
#[derive(Debug)]
pub(super) struct Linked {
    pub(super) link: Link,
    pub(super) qp: u32,
}

/// Why a node detaches an application.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Detached {
    /// Its control connection ended.
    #[error(transparent)]
    Ended(#[from] Ended),
    /// It sent what no application sends.
    #[error("{0}")]
    Protocol(String),
}

/// A completion for an application's ring.
#[derive(Debug)]
pub(super) struct Kept {
    /// The queue pair.
    pub(super) qp: u32,
    pub(super) wc: WorkCompletion,
}

/// Objects that the applications of a node have in common.
#[derive(Debug)]
pub(super) struct Shared {
    /// Queue pairs that it shares with other nodes, if it does.
    // They end before the device's other objects.
    pub(super) sharing: Option<Sharing>,
    pub(super) device: Device,
    /// Requests of all of them, and the order in which they are sent.
    pub(super) egress: Egress<SendRequest>,
    /// Reports what happens to listeners, attempts and connections.
    pub(super) events: EventQueue,
    /// Those of all applications of the node.
    pub(super) services: Services,
}

/// An application that is attached, or about to.
#[derive(Debug)]
pub(super) struct Application {
    pub(super) channel: Channel,
    /// Set while messages wait in the channel, and the application gets a turn once it has read some.
    pub(super) awaits_room: bool,
    /// Its slot, which the tokens of its objects begin with.
    pub(super) slot: u32,
    pub(super) name: String,
    /// The tenant to which all that it sends belongs.
    pub(super) tenant: TenantId,
    /// Set if that is the application alone.
    pub(super) is_tenant: bool,
    /// The rings, once it is attached.
    pub(super) rings: Option<Rings>,
    // A connection ends before its queue pair, and a queue pair before its memory.
    pub(super) connections: Table<Linked>,
    pub(super) requests: Table<ConnectionRequest>,
    pub(super) listeners: Table<(Listener, Claim)>,
    pub(super) qps: Table<Qp>,
    pub(super) by_qpn: HashMap<Qpn, u32>,
    pub(super) srqs: Table<Srq>,
    /// The ids of shared receive queues, by their numbers.
    pub(super) by_srqn: HashMap<u32, u32>,
    /// Queue pairs that consume no further receives of their shared receive queues: the application learns that behind their completions.
    pub(super) drained: BTreeSet<u32>,
    /// Set while the device's queue had no more completions at the last look.
    pub(super) has_all: bool,
    pub(super) handles: Table<AddressHandle>,
    pub(super) regions: Table<Region>,
    /// The requests to deregister regions that are still in use, by their keys.
    pub(super) going: HashMap<rdmux_verbs::RKey, u32>,
    pub(super) pds: Table<ProtectionDomain>,
    /// The memory of its process, once it has offered that.
    pub(super) memory: Option<Arc<ProcessMemory>>,
    /// The names of protection domains for other nodes.
    pub(super) domains: HashMap<u32, u64>,
    /// The device's queue for all its completions.
    pub(super) cq: CompletionQueue,
    /// Completions that the queue has room for, and those that it needs room for.
    room: u32,
    needed: u32,
    /// Completions that are being taken out of the queue.
    pub(super) found: VecDeque<WorkCompletion>,
    /// Completions for the ring. They are taken out of the device's queue even if the ring is full, since others wait for what they say about the
    /// device. There are no more of them than the queue pairs hold requests, and than [`Application::take_work`] allows for.
    pub(super) kept: VecDeque<Kept>,
    /// Its process and its tenant, which is charged until everything above has gone.
    pub(super) belonging: Belonging,
    /// Bytes and requests that it had moved when it came to its tenant.
    pub(super) before: Counts,
}

/// Completions that the queue of an application without queue pairs has room for.
const ROOM_MIN: u32 = 256;

impl Application {
    /// Begins to serve the process at the other end of a channel. `tenant`: its tenant in the scheduler; `None`: it is one of its own.
    pub(super) fn new(
        shared: &mut Shared,
        channel: Channel,
        slot: u32,
        belonging: Belonging,
        tenant: Option<TenantId>,
    ) -> Result<Application, CreateError> {
        let cq = shared.device.create_cq(ROOM_MIN)?;
        shared.egress.begin_counts(slot);
        Ok(Application {
            channel,
            awaits_room: false,
            slot,
            name: String::new(),
            // Without a configuration applications share equally.
            tenant: tenant.unwrap_or_else(|| shared.egress.add_tenant(&Entitlement::default())),
            is_tenant: tenant.is_none(),
            rings: None,
            connections: Table::new(CONNECTIONS_MAX),
            requests: Table::new(REQUESTS_MAX),
            listeners: Table::new(LISTENERS_MAX),
            qps: Table::new(QPS_MAX),
            by_qpn: HashMap::new(),
            srqs: Table::new(SRQS_MAX),
            by_srqn: HashMap::new(),
            drained: BTreeSet::new(),
            has_all: false,
            handles: Table::new(ADDRESS_HANDLES_MAX),
            memory: None,
            regions: Table::new(REGIONS_MAX),
            going: HashMap::new(),
            pds: Table::new(PDS_MAX),
            domains: HashMap::new(),
            cq,
            room: ROOM_MIN,
            needed: 0,
            found: VecDeque::new(),
            kept: VecDeque::new(),
            belonging,
            before: Counts::default(),
        })
    }

    /// Charges the tenant for an object: for the object itself, and for so much of another resource in it.
    pub(super) fn charge(
        &self,
        object: Resource,
        (content, amount): (Resource, u64),
    ) -> Result<[Charge; 2], Refusal> {
        let account = &self.belonging.account;
        Ok([account.charge(object, 1)?, account.charge(content, amount)?])
    }

    /// Moves the application with all that it has to another tenant. What is in flight stays where it is; connections on shared queue pairs end.
    pub(super) fn move_to(
        &mut self,
        shared: &mut Shared,
        now: Time,
        account: &Arc<Account>,
        tenant: Option<TenantId>,
    ) {
        self.before = shared.egress.counts_of(self.slot).moved();
        self.belonging.account = account.clone();
        self.belonging.seat.move_to(account);
        if let Some(charge) = &mut self.belonging.charge {
            charge.move_to(account);
        }
        let regions = self.regions.iter_mut().flat_map(|region| &mut region.charges);
        regions.for_each(|charge| charge.move_to(account));
        self.srqs.iter_mut().for_each(|srq| srq.charge.move_to(account));
        let Some(tenant) = tenant else { return };
        let former = std::mem::replace(&mut self.tenant, tenant);
        for qp in self.qps.iter_mut() {
            qp.charges.iter_mut().for_each(|charge| charge.move_to(account));
            if let Some(group) = qp.group {
                shared.egress.move_group(now, group, qp.flow, tenant);
            }
        }
        if let Some(sharing) = &mut shared.sharing {
            sharing.move_qps(Instant::now(), self.slot, (account.name(), tenant));
        }
        if std::mem::take(&mut self.is_tenant) {
            shared.egress.remove_tenant(former);
        }
    }

    /// Returns the token under which an object reports.
    pub(super) fn token(&self, kind: Kind, id: u32) -> u64 {
        Token {
            slot: self.slot,
            kind,
            id,
        }
        .word()
    }

    /// Returns a queue pair.
    pub(super) fn qp(&self, id: u32) -> Result<&Qp, Refusal> {
        self.qps.get(id).ok_or_else(|| no_object(Kind::Qp))
    }

    /// Returns the requests that the device's send queue of a queue pair holds: pieces of long requests take room, too.
    pub(super) fn depth_of(shared: &Shared, max_send_wr: u32) -> u32 {
        match max_send_wr {
            0 => 0,
            _ => {
                let most = shared.device.limits().work_requests;
                max_send_wr.max(most.map_or(DEPTH_MIN, |most| most.min(DEPTH_MIN)))
            }
        }
    }

    /// Makes room for the completions of one more queue pair.
    pub(super) fn reserve(&mut self, completions: u32) -> Result<(), Refusal> {
        let needed = self.needed.saturating_add(completions);
        if needed > WORK_REQUESTS_ALL_MAX {
            return Err(limit("requests of all queue pairs"));
        }
        if needed > self.room {
            let room = needed.next_power_of_two();
            let resized = self.cq.resize(room);
            resized.map_err(|error| Refusal::new(ErrorCode::Limit, error.to_string()))?;
            self.room = room;
        }
        self.needed = needed;
        Ok(())
    }

    /// Gives room back.
    pub(super) fn release(&mut self, completions: u32) {
        self.needed = self.needed.saturating_sub(completions);
    }

    /// Sends an event.
    pub(super) fn tell(&mut self, event: &Message) -> Result<(), Detached> {
        Ok(self.channel.send(0, event)?)
    }

    /// Tells the application that a queue pair has failed, unless it knows.
    pub(super) fn tell_failure(&mut self, shared: &mut Shared, now: Time, qp: u32) -> Result<(), Detached> {
        let Some(Qp {
            qp: pair,
            failed,
            flow,
            ..
        }) = self.qps.get_mut(qp)
        else {
            return Ok(());
        };
        let Some(status) = pair.error().filter(|_| !*failed) else {
            return Ok(());
        };
        *failed = true;
        // If it is in SQD, no piece of it will find that out.
        shared.egress.fail(now, *flow);
        let status = crate::control::convert::status_to_wire(status);
        self.tell(&Message::Failed { qp, status })
    }
}

/// Names an object of an application to an [`EventQueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) slot: u32,
    pub(super) kind: Kind,
    pub(super) id: u32,
}

impl Token {
    fn word(self) -> u64 {
        let kind = u64::from(self.kind == Kind::Listener);
        u64::from(self.slot) << 33 | kind << 32 | u64::from(self.id)
    }

    /// Returns the token of a word: of a listener, or of a connection.
    pub(super) fn of_word(word: u64) -> Token {
        Token {
            slot: (word >> 33) as u32,
            kind: match word >> 32 & 1 {
                0 => Kind::Connection,
                _ => Kind::Listener,
            },
            id: word as u32,
        }
    }
}

pub(super) fn no_object(kind: Kind) -> Refusal {
    Refusal::new(
        ErrorCode::NoObject,
        format!("no object of this kind and id: {kind:?}"),
    )
}

pub(super) fn limit(what: &str) -> Refusal {
    Refusal::new(ErrorCode::Limit, format!("the application has too many {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_word__each_token() {
        for (slot, kind, id) in [
            (0, Kind::Listener, 0),
            (7, Kind::Connection, u32::MAX),
            (0xffff, Kind::Listener, 1 << 16),
        ] {
            let token = Token { slot, kind, id };
            assert_eq!(Token::of_word(token.word()), token);
        }
    }
}
