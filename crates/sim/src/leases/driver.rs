//! Driver that carries out the service's decisions: the engine of the server, jobs that take time, and the checker that watches.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use rdmux_push::Mapped;
use rdmux_push::server::{ClientId, Driver, Finished, Job, Map, MappingId, RegionId, Registered, ReplySlot};
use rdmux_rnic::{
    Access, Cqn, HeapMemory, LKey, Operation, Pd, QpInit, Qpn, RKey, RecvRequest, RegionSpec, SendFlags,
    SendRequest, Sge, SgeList, Target, WorkCompletion,
};
use rdmux_wire::push::{ChangeKind, Extent, Message};

use super::checker::{Checker, MappedMemory, Right, Uid};
use super::{Counts, Defect};
use crate::dice::Dice;
use crate::world::World;

pub(super) const SERVER: usize = 0;
pub(super) const CLIENT: usize = 1;

/// Messages that each side has room for, per connection.
pub(super) const SLOTS: usize = 16;
/// Bytes of each slot.
pub(super) const SLOT_BYTES: u64 = 1024;
/// Address by which each side names its slots.
const OWN_IOVA: u64 = 1 << 40;

/// Bits of the work request ids; the id of a receive also has its slot's number.
pub(super) const RECV: u64 = 1 << 63;
const ANSWER: u64 = 1 << 62;
const NOTICE: u64 = 1 << 61;

/// Time for which a failed connection stays, so that its peer learns the reason.
const LINGER_NS: u64 = 200_000_000;
/// Maximum time that a job takes.
const JOB_NS_MAX: u64 = 4_000_000;

/// Maximum time until the server's thread looks, and for which the server has a region to itself.
pub(super) const WAKE_NS_MAX: u64 = 1_000_000;
pub(super) const OWN_NS_MAX: u64 = 4_000_000;
/// Time that passing a lease on takes besides the break: a job, an operation of the server's own, the thread.
const SLACK_NS: u64 = JOB_NS_MAX + OWN_NS_MAX + 2 * WAKE_NS_MAX;

/// Event scheduled with `World::call_back`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// The server's thread handles what has arrived.
    Wake,
    /// The time has come at which the service asked to be called.
    Timeout,
    /// A job is done.
    Job(u64),
    /// An InvalidatedLate server performs a pending deregistration.
    Owed(u64),
    /// The server destroys a connection that failed.
    Free(u64),
    /// A client performs an action.
    Act(u64),
    /// A client handles what has arrived.
    Hear(u64),
    /// A client that had stopped goes on.
    GoOn(u64),
    /// The links or the server do something.
    Fault,
    /// An operation of the server's own ends.
    OwnEnds(u64),
}

impl Tag {
    pub(super) fn pack(self) -> u64 {
        let (kind, number) = match self {
            Tag::Wake => (0, 0),
            Tag::Timeout => (1, 0),
            Tag::Job(n) => (2, n),
            Tag::Owed(n) => (3, n),
            Tag::Free(n) => (4, n),
            Tag::Act(n) => (5, n),
            Tag::Hear(n) => (6, n),
            Tag::GoOn(n) => (7, n),
            Tag::Fault => (8, 0),
            Tag::OwnEnds(n) => (9, n),
        };
        kind << 56 | number
    }

    pub(super) fn unpack(packed: u64) -> Tag {
        let number = packed & ((1 << 56) - 1);
        match packed >> 56 {
            0 => Tag::Wake,
            1 => Tag::Timeout,
            2 => Tag::Job(number),
            3 => Tag::Owed(number),
            4 => Tag::Free(number),
            5 => Tag::Act(number),
            6 => Tag::Hear(number),
            7 => Tag::GoOn(number),
            8 => Tag::Fault,
            _ => Tag::OwnEnds(number),
        }
    }
}

/// One end of a connection: a queue pair, and room for the messages that come to it.
#[derive(Debug)]
pub(super) struct MessageQp {
    pub(super) qpn: Qpn,
    pd: Pd,
    lkey: LKey,
    memory: Arc<HeapMemory>,
}

impl MessageQp {
    /// Returns the message in a slot.
    pub(super) fn message(&self, slot: usize, bytes: usize) -> Vec<u8> {
        let at = slot * SLOT_BYTES as usize;
        self.memory
            .with(|all| all[at..at + bytes.min(SLOT_BYTES as usize)].to_vec())
    }
}

/// A client's connection, at the server.
#[derive(Debug)]
struct ServerConnection {
    end: MessageQp,
    mappings: BTreeMap<MappingId, (LKey, Uid)>,
}

/// Writes of a client's job.
type Late = (ClientId, Vec<(u64, Vec<u8>)>);

/// A request that the server has not answered.
#[derive(Clone, Debug)]
struct Asked {
    since_ns: u64,
    /// Latest time at which it may be answered.
    until_ns: u64,
    /// Mapping that it ends.
    ends: Option<MappingId>,
}

/// Both engines, the network, and the server's side except for its decisions.
#[derive(Debug)]
pub(super) struct SimDriver {
    pub(super) world: World,
    pub(super) checker: Arc<Checker>,
    pub(super) dice: Dice,
    pub(super) counts: Counts,
    /// Messages that a defect makes up.
    pub(super) made_up: VecDeque<(ClientId, Vec<u8>)>,
    pub(super) cqs: [Cqn; 2],
    pub(super) mtu: u32,
    pub(super) window_bytes: u32,
    defect: Option<Defect>,
    links: BTreeMap<ClientId, ServerConnection>,
    by_qpn: BTreeMap<Qpn, ClientId>,
    /// QPNs that were used. None is used twice, because old packets would fit.
    used: [BTreeSet<Qpn>; 2],
    jobs: BTreeMap<u64, Job>,
    /// Writes of jobs that were reported too early.
    late: BTreeMap<u64, Late>,
    /// Time at which the last job ends: jobs run in order.
    busy_until_ns: u64,
    owed: BTreeMap<u64, (LKey, Uid)>,
    lingering: BTreeMap<u64, MessageQp>,
    next: u64,
    /// Requests without an answer, by client and slot.
    asked: BTreeMap<(ClientId, usize), Asked>,
    /// Names that clients give themselves.
    names: BTreeMap<ClientId, [u8; 16]>,
    /// Number of operations of the server's own that wait or run.
    pub(super) own: usize,
    break_ns: u64,
    pub(super) violation: Option<String>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}

impl SimDriver {
    pub(super) fn new(
        mut world: World,
        checker: Arc<Checker>,
        mut dice: Dice,
        defect: Option<Defect>,
        break_ns: u64,
        window_bytes: u32,
    ) -> SimDriver {
        let cqs = [0, 1].map(|host: usize| world.hosts[host].rnic.create_cq(1 << 16));
        SimDriver {
            world,
            checker,
            counts: Counts::default(),
            made_up: VecDeque::new(),
            cqs,
            mtu: dice.pick(&[256, 512, 1024, 4096]),
            window_bytes,
            dice,
            defect,
            links: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            used: Default::default(),
            jobs: BTreeMap::new(),
            late: BTreeMap::new(),
            busy_until_ns: 0,
            owed: BTreeMap::new(),
            lingering: BTreeMap::new(),
            next: 0,
            asked: BTreeMap::new(),
            names: BTreeMap::new(),
            own: 0,
            break_ns,
            violation: None,
        }
    }

    pub(super) fn has(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }

    pub(super) fn later(&mut self, delay_ns: u64, tag: Tag) {
        self.world.call_back(delay_ns, tag.pack());
    }

    fn wrong(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// Makes an end of a connection, with receives.
    pub(super) fn make_end(&mut self, host: usize) -> MessageQp {
        let rnic = &mut self.world.hosts[host].rnic;
        let pd = rnic.alloc_pd();
        let memory = Arc::new(HeapMemory::new(SLOTS * SLOT_BYTES as usize));
        let spec = RegionSpec {
            memory: memory.clone(),
            memory_offset: 0,
            length: SLOTS as u64 * SLOT_BYTES,
            iova: OWN_IOVA,
            access: Access::LOCAL_WRITE,
        };
        let (lkey, _) = rnic.reg_mr(pd, spec).expect("the whole memory");
        let init = QpInit {
            max_send_wr: 256,
            max_recv_wr: SLOTS as u32,
            ..QpInit::new(pd, self.cqs[host])
        };
        let mut qpn = rnic.create_qp(init).expect("there are QPNs");
        while !self.used[host].insert(qpn) {
            rnic.destroy_qp(qpn);
            qpn = rnic.create_qp(init).expect("there are QPNs");
        }
        MessageQp {
            qpn,
            pd,
            lkey,
            memory,
        }
    }

    /// Posts the receive of a slot. Returns false when the queue pair accepts no receives any more.
    pub(super) fn post_recv(&mut self, host: usize, end: (Qpn, LKey), slot: usize) -> bool {
        let at = OWN_IOVA + slot as u64 * SLOT_BYTES;
        let request = RecvRequest {
            wr_id: RECV | slot as u64,
            sges: Sge::new(at, SLOT_BYTES as u32, end.1).into(),
        };
        let posted = self
            .world
            .with(host, |rnic, now| rnic.post_recv(now, end.0, request));
        posted.is_ok()
    }

    pub(super) fn ready(&mut self, host: usize, end: &MessageQp, slot: usize) -> bool {
        self.post_recv(host, (end.qpn, end.lkey), slot)
    }

    pub(super) fn send_message(
        &mut self,
        host: usize,
        qpn: Qpn,
        wr_id: u64,
        request: u64,
        message: &Message,
    ) -> bool {
        let mut bytes = Vec::new();
        message.emit(request, &mut bytes);
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: SgeList::inline(&bytes),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.world.post_send(host, qpn, request).is_ok()
    }

    /// Destroys a queue pair and what belongs to it.
    pub(super) fn destroy(&mut self, host: usize, end: &MessageQp) {
        self.world.with(host, |rnic, _| {
            rnic.destroy_qp(end.qpn);
            drop(rnic.dealloc_pd(end.pd));
        });
    }

    /// Records that a client has connected.
    pub(super) fn connected(&mut self, client: ClientId, end: MessageQp) {
        for slot in 0..SLOTS {
            self.ready(SERVER, &end, slot);
        }
        self.by_qpn.insert(end.qpn, client);
        self.links.insert(
            client,
            ServerConnection {
                end,
                mappings: BTreeMap::new(),
            },
        );
    }

    pub(super) fn server_qpn(&self, client: ClientId) -> Option<Qpn> {
        self.links.get(&client).map(|link| link.end.qpn)
    }

    /// Ends the server's process and begins another.
    pub(super) fn restart(&mut self) {
        self.counts.strangers += self.world.hosts[SERVER].rnic.counters().no_qp;
        self.world.restart(SERVER);
        self.cqs[SERVER] = self.world.hosts[SERVER].rnic.create_cq(1 << 16);
        self.checker.restarted();
        self.links.clear();
        self.by_qpn.clear();
        self.jobs.clear();
        self.late.clear();
        self.owed.clear();
        self.lingering.clear();
        self.asked.clear();
        self.names.clear();
        self.made_up.clear();
        self.own = 0;
    }

    /// Returns the client and the meaning of a completion at the server.
    pub(super) fn what(&self, wc: &WorkCompletion) -> Option<(ClientId, Came)> {
        let client = *self.by_qpn.get(&wc.qpn)?;
        let slot = (wc.wr_id & 0xffff) as usize;
        Some((
            client,
            match wc.wr_id {
                id if id & RECV != 0 => Came::Message(slot, wc.byte_len as usize),
                id if id & ANSWER != 0 => Came::Sent(slot),
                _ => Came::Nothing,
            },
        ))
    }

    /// Takes a message for the service, and tells the checker what it has to know about it.
    pub(super) fn take(&mut self, client: ClientId, slot: usize, bytes: usize) -> Option<Vec<u8>> {
        // A completion arrives behind the writes before it.
        self.checker.drain_client(client);
        let message = self.links.get(&client)?.end.message(slot, bytes);
        if let Ok((_, parsed)) = Message::parse(&message) {
            let ends = match parsed {
                Message::Release { mapping } | Message::Unmap { mapping } => Some(MappingId(mapping)),
                Message::Proof { client: name, .. } => {
                    self.names.insert(client, name);
                    None
                }
                _ => None,
            };
            if parsed != Message::Noticed {
                let until_ns = self.longest_wait();
                let asked = Asked {
                    since_ns: self.world.now.0,
                    until_ns,
                    ends,
                };
                self.asked.insert((client, slot), asked);
            }
        }
        Some(message)
    }

    /// Returns the time by which a request made now has what it asks for.
    pub(super) fn longest_wait(&self) -> u64 {
        let ahead = self.asked.len() + self.jobs.len() + self.own;
        self.world.now.0 + (ahead as u64 + 1) * (self.break_ns + SLACK_NS)
    }

    /// Reports a violation if a request has waited for too long.
    pub(super) fn check_waits(&mut self) {
        let now = self.world.now.0;
        let late = self.asked.iter().find(|(_, asked)| asked.until_ns < now);
        if let Some(((client, _), asked)) = late {
            let by_ms = (now - asked.until_ns) / 1_000_000;
            self.wrong(format!(
                "a request of client {client} waits {by_ms} ms longer than the breaks before it"
            ));
        }
    }

    /// Returns whether all requests are answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.asked.is_empty() && self.jobs.is_empty()
    }

    /// Runs a job whose time is over.
    pub(super) fn job(&mut self, number: u64) -> Option<Finished> {
        if let Some((client, writes)) = self.late.remove(&number) {
            self.checker.land_late(client, &writes);
        }
        let job = self.jobs.remove(&number)?;
        let client = job.client();
        Some(self.checker.operate(client, || job.run()))
    }

    /// Performs a deregistration that should have been done before.
    pub(super) fn owed(&mut self, number: u64) {
        if let Some((lkey, uid)) = self.owed.remove(&number) {
            let _ = self.world.with(SERVER, |rnic, _| rnic.dereg_mr(lkey));
            self.checker.drain(uid);
        }
    }

    pub(super) fn free(&mut self, number: u64) {
        if let Some(end) = self.lingering.remove(&number) {
            self.destroy(SERVER, &end);
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Tells the checker what a message says to its recipient.
    fn told(&mut self, client: ClientId, slot: ReplySlot, message: &Message) {
        if let ReplySlot::Answer(slot) | ReplySlot::Last(slot) = slot
            && let Some(asked) = self.asked.remove(&(client, slot))
        {
            let now = self.world.now.0;
            self.counts.waited += u64::from(now > asked.since_ns + SLACK_NS);
            if let (Some(mapping), Message::Released | Message::Unmapped) = (asked.ends, message) {
                self.checker.over(client, mapping, "its release was acknowledged");
            }
        }
        match message {
            Message::Welcome { .. } => {
                self.counts.welcomes += 1;
                let name = self.names.get(&client).copied().unwrap_or_default();
                let earlier = self.names.iter().filter(|(n, id)| **n < client && **id == name);
                let earlier: Vec<ClientId> = earlier.map(|(n, _)| *n).collect();
                self.counts.reconnects += u64::from(!earlier.is_empty());
                for client in earlier {
                    self.checker.succeeded(client);
                }
            }
            Message::Written | Message::Bytes { .. } => self.counts.ordinary += 1,
            Message::Notice { changes } => {
                for change in changes {
                    match change.kind {
                        ChangeKind::Break => {
                            self.assume_acknowledged(client, MappingId(change.mapping));
                        }
                        ChangeKind::Revoked => {
                            self.checker
                                .over(client, MappingId(change.mapping), "its holder was told so");
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// Returns whether another connection of the same client has shown the key.
    fn has_successor(&self, client: ClientId) -> bool {
        let name = self.names.get(&client);
        self.names
            .range(ClientId(client.0 + 1)..)
            .any(|(_, other)| Some(other) == name)
    }

    fn assume_acknowledged(&mut self, client: ClientId, mapping: MappingId) {
        if self.has(Defect::AcknowledgementAssumed) {
            if let Some(link) = self.links.get_mut(&client) {
                link.mappings.remove(&mapping);
            }
            let mut bytes = Vec::new();
            Message::Release { mapping: mapping.0 }.emit(0, &mut bytes);
            self.made_up.push_back((client, bytes));
        }
    }
}

/// Meaning of a completion at the server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Came {
    /// A message: its slot and its length in bytes.
    Message(usize, usize),
    /// The answer to a slot's message has left.
    Sent(usize),
    Nothing,
}

impl Driver for SimDriver {
    fn register(
        &mut self,
        client: ClientId,
        map: &Map,
        memory: Arc<Mapped>,
        rights: Access,
    ) -> Result<Registered, String> {
        let right = Right {
            client: Some(client),
            range: map.offset..map.offset + map.length,
            access: map.access,
            share: map.share,
        };
        let uid = self.checker.begin((client, map.mapping), right, memory.clone());
        let memory = MappedMemory {
            checker: self.checker.clone(),
            memory,
            uid,
        };
        let link = self.links.get_mut(&client).ok_or("no such client")?;
        let spec = RegionSpec {
            memory: Arc::new(memory),
            memory_offset: map.offset,
            length: map.length,
            iova: map.offset,
            access: rights,
        };
        let pd = link.end.pd;
        let registered = self.world.hosts[SERVER].rnic.reg_mr(pd, spec);
        let (lkey, rkey) = registered.map_err(|error| error.to_string())?;
        link.mappings.insert(map.mapping, (lkey, uid));
        self.counts.mappings += 1;
        let extent = Extent {
            offset: map.offset,
            length: map.length,
            va: map.offset,
            rkey: RKey(rkey.0),
        };
        Ok(Registered {
            extent: Some(extent),
            ways: map.region.ways(),
        })
    }

    fn deregister(&mut self, client: ClientId, mapping: MappingId) {
        let Some(link) = self.links.get_mut(&client) else {
            return;
        };
        let Some((lkey, uid)) = link.mappings.remove(&mapping) else {
            return;
        };
        let lives = self.has(Defect::OldConnectionLives) && self.has_successor(client);
        if lives || self.has(Defect::NeverInvalidated) {
            return;
        }
        if self.has(Defect::InvalidatedLate) {
            let number = self.number();
            self.owed.insert(number, (lkey, uid));
            let delay = self.dice.log_uniform(self.break_ns);
            return self.later(delay, Tag::Owed(number));
        }
        let ended = self.world.with(SERVER, |rnic, _| rnic.dereg_mr(lkey).is_ok());
        assert!(ended, "no window is bound to it");
        if !self.has(Defect::NotDrained) {
            self.checker.drain_last(uid);
        }
    }

    fn send(&mut self, client: ClientId, slot: ReplySlot, request: u64, message: &Message) -> bool {
        let Some(qpn) = self.server_qpn(client) else {
            return false;
        };
        self.told(client, slot, message);
        let wr_id = match slot {
            ReplySlot::Answer(slot) | ReplySlot::Last(slot) => ANSWER | slot as u64,
            ReplySlot::Notice => NOTICE,
        };
        self.send_message(SERVER, qpn, wr_id, request, message)
    }

    fn receive(&mut self, client: ClientId, slot: usize) -> bool {
        let end = self.links.get(&client).map(|link| (link.end.qpn, link.end.lkey));
        // A message that a defect made up came into no slot.
        slot >= SLOTS || end.is_some_and(|end| self.post_recv(SERVER, end, slot))
    }

    fn disconnect(&mut self, client: ClientId, failed: bool) {
        let of = (client, 0)..=(client, usize::MAX);
        let asked: Vec<_> = self.asked.range(of).map(|(at, _)| *at).collect();
        for at in asked {
            self.asked.remove(&at);
        }
        let Some(link) = self.links.remove(&client) else {
            return;
        };
        self.by_qpn.remove(&link.end.qpn);
        if self.has(Defect::OldConnectionLives) && self.has_successor(client) {
            return;
        }
        self.checker.client_over(client, "its connection had ended");
        if failed {
            let number = self.number();
            self.lingering.insert(number, link.end);
            self.later(LINGER_NS, Tag::Free(number));
        } else {
            self.destroy(SERVER, &link.end);
        }
    }

    fn work(&mut self, job: Job) -> Option<Finished> {
        let client = job.client();
        if job.is_immediate() {
            return Some(self.checker.operate(client, || job.run()));
        }
        let number = self.number();
        // Jobs are done in order.
        let takes = self.dice.log_uniform(JOB_NS_MAX);
        let ends = self.busy_until_ns.max(self.world.now.0) + takes;
        self.busy_until_ns = ends;
        self.later(ends - self.world.now.0, Tag::Job(number));
        if self.has(Defect::WriteReportedEarly) {
            let (finished, writes) = self.checker.pretend(client, || job.run());
            self.late.insert(number, (client, writes));
            return Some(finished);
        }
        self.jobs.insert(number, job);
        None
    }

    fn let_others(&mut self, _: RegionId) {}

    fn is_alone(&mut self, _: RegionId) -> bool {
        true
    }
}
