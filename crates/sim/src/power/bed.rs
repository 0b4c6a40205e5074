//! A client and a server with a [`Shadow`]: both run on the engine, over links that lose, duplicate and reorder packets, and
//! the power of the server can be cut at any moment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use rdmux_rnic::{
    Access, Bind, Cqn, HeapMemory, LKey, Memory, Operation, Pd, Placement, QpInit, QpState, Qpn, RKey,
    RecvRequest, RegionSpec, Selectivity, SendFlags, SendRequest, Sge, SgeList, Status, Target, WindowType,
    WorkCompletion,
};

use super::ledger::Ledger;
use super::platform::{Defect, Domain, Platform};
use super::shadow::{Lane, Mailbox, Shadow, UNIT};
use crate::dice::Dice;
use crate::memory::Space;
use crate::pair::{Terms, bring_up};
use crate::world::{Carried, Faults, Shape, Step, World};

const SERVER: usize = 0;
const CLIENT: usize = 1;

/// A message that asks for a software flush: operation, offset, length. Its answer: operation, and whether it was done.
const MESSAGE_BYTES: u64 = 24;
const ANSWER_BYTES: u64 = 16;
/// Messages that each side has room for.
const SLOTS: u64 = 8;
/// Local memory of a client's connection.
const ROOM: u64 = 64 << 10;
/// Longest WRITE or READ.
pub const REQUEST_BYTES_MAX: u64 = 16 << 10;
/// Address by which each side names its own memory.
const OWN_IOVA: u64 = 1 << 40;
/// Maximum time that the server's processor takes for a message, and that a flush takes.
const SERVER_NS_MAX: u64 = 200_000;

/// A connection and the mapping that it reaches. It is never used again once it is revoked or a power cut has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MappedConnection(usize);

/// Request of a client. Offsets are those of the server's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// RDMA WRITE.
    Write {
        /// Offset.
        at: u64,
        /// Bytes to write.
        bytes: Vec<u8>,
    },
    /// RDMA READ.
    Read {
        /// Offset.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// ATOMIC WRITE of 8 bytes at a multiple of 8.
    AtomicWrite {
        /// Offset.
        at: u64,
        /// Bytes to write.
        bytes: [u8; UNIT],
    },
    /// FETCH and ADD at a multiple of 8.
    FetchAdd {
        /// Offset.
        at: u64,
        /// Number to add.
        add: u64,
    },
    /// FLUSH.
    Flush {
        /// Offset.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Placement types.
        placement: Placement,
        /// Set to flush the whole mapping, whatever range the request names.
        whole: bool,
    },
    /// A message that the server answers after its processor wrote the range back.
    SoftwareFlush {
        /// Offset.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Done.
    Done,
    /// The server answered that it does not support this; the connection goes on.
    Refused,
    /// The request failed, and the connection with it.
    Failed(Status),
}

/// A request that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its connection.
    pub link: MappedConnection,
    /// The operation's number.
    pub operation: u64,
    /// Its outcome.
    pub ended: Ended,
    /// READ: the bytes that it returned; FETCH and ADD: the 8 bytes before.
    pub bytes: Vec<u8>,
}

/// Settings of a [`Bed`], besides what it draws from the seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BedSettings {
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// The server.
    pub platform: Platform,
    /// A defect of the server.
    pub defect: Option<Defect>,
    /// Packets lost, duplicated and reordered, in percent.
    pub loss_percent: f64,
    /// Packets that arrive twice, in percent.
    pub dup_percent: f64,
    /// Packets overtaken by later ones, in percent.
    pub reorder_percent: f64,
}

/// State of an operation in flight, at the client.
#[derive(Debug)]
struct Operated {
    link: usize,
    /// Local memory that it uses.
    piece: Option<(u64, u64)>,
    takes_bytes: bool,
    /// Set when its answer is a message; before that arrives, the operation ends only if it fails.
    by_message: bool,
}

/// One end of a connection.
#[derive(Debug)]
struct ConnectionEnd {
    qpn: Qpn,
    lkey: LKey,
}

#[derive(Debug)]
struct Connection {
    range: Range<u64>,
    client: ConnectionEnd,
    own: Arc<HeapMemory>,
    space: Space,
    server: ConnectionEnd,
    lane: Lane,
    mailbox: Arc<Mailbox>,
    mapping: Option<Mapping>,
    rkey: RKey,
    iova: u64,
    /// Set for a connection of before a power cut.
    gone: bool,
    answers: u64,
}

/// Object that a mapping is made of, at the server.
#[derive(Clone, Copy, Debug)]
enum Mapping {
    Region(LKey),
    /// A type 2 window of a region of the whole memory.
    Window(RKey),
}

/// Work that the server does on behalf of a message.
#[derive(Debug)]
struct Job {
    link: usize,
    slot: u64,
}

/// A client, a server and the links between them. Everything is drawn from one seed. Call [`Bed::map`], [`Bed::ask`],
/// [`Bed::step`] and [`Bed::poll`] in any order; between any two of these the power may be cut.
pub struct Bed {
    world: World,
    shadow: Arc<Shadow>,
    dice: Dice,
    connections: Vec<Connection>,
    by_qpn: [BTreeMap<u32, usize>; 2],
    /// QPNs that were used. A QPN of before a power cut is not used again, because old packets would fit.
    used: [BTreeSet<u32>; 2],
    cqs: [Cqn; 2],
    operations: BTreeMap<u64, Operated>,
    next: u64,
    jobs: BTreeMap<u64, Job>,
    done: VecDeque<Done>,
    mtu: u32,
    window_bytes: u32,
    /// The shadow stirs in one of so many steps; 0: never.
    stirs: u64,
    domain: Domain,
}

impl std::fmt::Debug for Bed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bed")
            .field("shadow", &self.shadow)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

impl Bed {
    /// Creates a server whose memory holds these bytes, padded with zeros to a whole line.
    pub fn new(settings: &BedSettings, bytes: Vec<u8>) -> Bed {
        let mut dice = Dice::new(settings.seed, 8);
        let shape = Shape {
            ipv6: dice.one_in(2),
            gso: dice.one_in(2),
            gro: dice.one_in(2),
            lazy_acks: dice.one_in(3),
            latency_ns: dice.log_uniform(1_000_000),
            flush_ns_max: SERVER_NS_MAX,
            one_machine: false,
        };
        let faults = Faults {
            loss: settings.loss_percent,
            dup: settings.dup_percent,
            reorder: settings.reorder_percent,
            corrupt: 0.0,
        };
        let window_bytes = dice.pick(&[4 << 10, 16 << 10, 256 << 10]);
        let mut world = World::new(settings.seed, shape, faults, window_bytes);
        let shadow = Shadow::new(
            settings.platform,
            settings.defect,
            bytes,
            (dice.one_in(2), dice.one_in(3)),
        );
        let cqs = [0, 1].map(|host: usize| world.hosts[host].rnic.create_cq(1 << 16));
        Bed {
            world,
            shadow: Arc::new(shadow),
            connections: Vec::new(),
            by_qpn: Default::default(),
            used: Default::default(),
            cqs,
            operations: BTreeMap::new(),
            next: 1,
            jobs: BTreeMap::new(),
            done: VecDeque::new(),
            mtu: dice.pick(&[256, 512, 1024, 4096]),
            window_bytes,
            stirs: dice.pick(&[0, 1, 3, 10, 40]),
            domain: settings.platform.domain,
            dice,
        }
    }

    /// Returns the server's memory.
    pub fn shadow(&self) -> &Shadow {
        &self.shadow
    }

    /// Returns the maximum number of bytes of a packet, the unit in which a WRITE is placed.
    pub fn mtu(&self) -> usize {
        self.mtu as usize
    }

    /// Returns the counts of the links.
    pub(super) fn carried(&self) -> Carried {
        self.world.carried
    }

    /// Returns the number of requests that came to the server and had been executed before.
    pub fn duplicates(&self) -> u64 {
        self.world.hosts[SERVER].rnic.counters().duplicate_request
    }

    /// Returns the number of packets that came to the server for a QP that does not exist: late ones from before a power cut.
    pub fn strangers(&self) -> u64 {
        self.world.hosts[SERVER].rnic.counters().no_qp
    }

    /// Returns the time, in nanoseconds since the beginning.
    pub fn now_ns(&self) -> u64 {
        self.world.now.0
    }

    /// Returns the number of steps so far.
    pub fn steps(&self) -> u64 {
        self.world.steps
    }

    /// Returns the number of the next operation.
    pub fn next_operation(&self) -> u64 {
        self.next
    }

    /// Returns a ledger of a range, initialised with what the server's programs see there.
    pub fn ledger(&self, range: Range<u64>) -> Ledger {
        let visible = self.shadow.visible();
        let found = &visible[range.start as usize..range.end as usize];
        Ledger::new(range, found)
    }

    /// Connects, and maps a range of the server's memory, by a region or a window: the dice decide.
    ///
    /// # Panics
    /// When the range is outside of the memory.
    pub fn map(&mut self, range: Range<u64>) -> MappedConnection {
        let number = self.connections.len();
        let lane = self.shadow.lane();
        let mailbox = Arc::new(lane.mailbox(SLOTS, MESSAGE_BYTES));
        let iova = (self.dice.below(1 << 46) + (1 << 46)) & !7 | range.start & 7;
        let (server, pd) = self.make_end(SERVER, mailbox.clone());
        let own = Arc::new(HeapMemory::new(ROOM as usize));
        let (client, _) = self.make_end(CLIENT, own.clone());
        let terms = Terms {
            mtu: self.mtu,
            window_bytes: self.window_bytes,
            src_port: 0xc000 + self.connections.len() as u16 % 1024,
        };
        bring_up(&mut self.world, &mut self.dice, [server.qpn, client.qpn], terms);
        let (mapping, rkey) = self.grant(pd, server.qpn, &lane, range.clone(), iova);
        for (host, end) in [(SERVER, &server), (CLIENT, &client)] {
            self.by_qpn[host].insert(end.qpn.value(), number);
            for slot in 0..SLOTS {
                post_recv(&mut self.world, host, end, slot);
            }
        }
        self.connections.push(Connection {
            range,
            client,
            own,
            space: Space::new(SLOTS * ANSWER_BYTES..ROOM),
            server,
            lane,
            mailbox,
            mapping: Some(mapping),
            rkey,
            iova,
            gone: false,
            answers: 0,
        });
        MappedConnection(number)
    }

    /// Gives a QP a range of the memory, by a region of its own or by a window.
    fn grant(&mut self, pd: Pd, qpn: Qpn, lane: &Lane, range: Range<u64>, iova: u64) -> (Mapping, RKey) {
        let rights = Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::for_flush(lane.placement());
        let region = |range: &Range<u64>, iova, access| RegionSpec {
            memory: Arc::new(lane.clone()),
            memory_offset: range.start,
            length: range.end - range.start,
            iova,
            access,
        };
        let rnic = &mut self.world.hosts[SERVER].rnic;
        let by_window = self.dice.one_in(3);
        if !by_window {
            let spec = region(&range, iova, rights | Access::LOCAL_WRITE);
            let (lkey, rkey) = rnic.reg_mr(pd, spec).expect("the range lies in the memory");
            return (Mapping::Region(lkey), rkey);
        }
        let whole = 0..lane.len();
        let flushes = Access::for_flush(lane.placement());
        let spec = region(
            &whole,
            iova - range.start,
            Access::LOCAL_WRITE | Access::MW_BIND | flushes,
        );
        let (lkey, _) = rnic.reg_mr(pd, spec).expect("all of the memory");
        let window = rnic.alloc_mw(pd, WindowType::Two).expect("there are windows");
        let (va, length) = (iova, range.end - range.start);
        let bind = SendRequest {
            wr_id: 0,
            operation: Operation::Bind(Bind {
                window: window.next(),
                region: lkey,
                va,
                length,
                access: rights,
            }),
            sges: SgeList::EMPTY,
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        let bound = self.world.post_send(SERVER, qpn, bind);
        bound.expect("a fresh QP has room");
        (Mapping::Window(window.next()), window.next())
    }

    fn make_end(&mut self, host: usize, memory: Arc<dyn Memory>) -> (ConnectionEnd, Pd) {
        let rnic = &mut self.world.hosts[host].rnic;
        let pd = rnic.alloc_pd();
        let length = memory.len();
        let spec = RegionSpec {
            memory,
            memory_offset: 0,
            length,
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
        while !self.used[host].insert(qpn.value()) {
            rnic.destroy_qp(qpn);
            qpn = rnic.create_qp(init).expect("there are QPNs");
        }
        (ConnectionEnd { qpn, lkey }, pd)
    }

    /// Posts a request. Returns its number, by which it will be [`Done`], or `None` when there is no room now or the connection
    /// has ended.
    ///
    /// Ranges are not checked: a request that reaches out of a mapping, or into one that was revoked, fails like any such
    /// request.
    ///
    /// # Panics
    /// When a WRITE or READ is longer than [`REQUEST_BYTES_MAX`].
    pub fn ask(&mut self, link: MappedConnection, ask: &Ask) -> Option<u64> {
        let connection = &mut self.connections[link.0];
        let number = self.next;
        // An offset before the mapping wraps to an address that is out of the mapping too.
        let va = |at: u64| {
            connection
                .iova
                .wrapping_add(at.wrapping_sub(connection.range.start))
        };
        let rkey = connection.rkey;
        let (operation, bytes, takes) = match ask {
            Ask::Write { at, bytes } => (
                Operation::Write {
                    va: va(*at),
                    rkey,
                    imm: None,
                },
                bytes.clone(),
                0,
            ),
            Ask::Read { at, len } => (Operation::Read { va: va(*at), rkey }, Vec::new(), *len),
            Ask::AtomicWrite { at, bytes } => {
                (Operation::AtomicWrite { va: va(*at), rkey }, bytes.to_vec(), 0)
            }
            Ask::FetchAdd { at, add } => (
                Operation::FetchAdd {
                    va: va(*at),
                    rkey,
                    add: *add,
                },
                Vec::new(),
                UNIT as u64,
            ),
            Ask::Flush {
                at,
                len,
                placement,
                whole,
            } => (
                Operation::Flush {
                    va: va(*at),
                    rkey,
                    length: *len as u32,
                    placement: *placement,
                    selectivity: if *whole {
                        Selectivity::MemoryRegion
                    } else {
                        Selectivity::Range
                    },
                },
                Vec::new(),
                0,
            ),
            Ask::SoftwareFlush { at, len } => {
                let words = [number, *at, *len].map(u64::to_le_bytes).concat();
                (Operation::Send { imm: None }, words, 0)
            }
        };
        assert!(
            bytes.len() as u64 <= REQUEST_BYTES_MAX && takes <= REQUEST_BYTES_MAX,
            "a long request"
        );
        let by_message = matches!(ask, Ask::SoftwareFlush { .. });
        let waiting = self.operations.values();
        if by_message && waiting.filter(|one| one.by_message && one.link == link.0).count() as u64 == SLOTS {
            return None;
        }
        let length = (bytes.len() as u64).max(takes);
        let inline = by_message || takes == 0 && length <= 64;
        let piece = if inline || length == 0 {
            None
        } else {
            // Rounded up, so that every piece is aligned.
            let room = length.next_multiple_of(64);
            let at = connection.space.take(room)?;
            connection
                .own
                .with(|all| all[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes));
            Some((at, room))
        };
        let sges = match piece {
            Some((at, _)) => Sge::new(OWN_IOVA + at, length as u32, connection.client.lkey).into(),
            None if bytes.is_empty() => SgeList::EMPTY,
            None => SgeList::inline(&bytes),
        };
        let request = SendRequest {
            wr_id: number,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let qpn = connection.client.qpn;
        if self.world.post_send(CLIENT, qpn, request).is_err() {
            if let Some((at, room)) = piece {
                self.connections[link.0].space.give(at, room);
            }
            return None;
        }
        self.next += 1;
        self.operations.insert(
            number,
            Operated {
                link: link.0,
                piece,
                takes_bytes: takes > 0,
                by_message,
            },
        );
        Some(number)
    }

    /// Lets the next event happen; returns false when no event is left.
    ///
    /// # Errors
    /// Describes what the engine did that it must not do.
    pub fn step(&mut self) -> Result<bool, String> {
        let step = self.world.step();
        if let Step::User(job) = step {
            self.do_job(job);
        }
        if self.stirs > 0 && self.dice.one_in(self.stirs) {
            self.shadow.stir(&mut self.dice);
        }
        while let Some(wc) = self.world.poll_cq(SERVER, self.cqs[SERVER]) {
            self.server_completes(&wc);
        }
        while let Some(wc) = self.world.poll_cq(CLIENT, self.cqs[CLIENT]) {
            self.client_completes(&wc)?;
        }
        let trespasses = self.shadow.passed().trespasses;
        if trespasses > 0 {
            return Err(format!("{trespasses} accesses through a mapping that had ended"));
        }
        match self.world.tap.violation.take() {
            Some(what) => Err(what),
            None => Ok(step != Step::Rest),
        }
    }

    /// Loses what the server sends, for a while.
    pub fn lose_answers(&mut self, for_ns: u64) {
        self.world.break_link(CLIENT, for_ns);
    }

    /// Drains all buffers of the server.
    pub fn drain(&mut self) {
        self.shadow.drain();
    }

    /// Returns a request that has ended.
    pub fn poll(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Returns whether a connection may still be used.
    pub fn is_up(&self, link: MappedConnection) -> bool {
        let connection = &self.connections[link.0];
        let info = self.world.hosts[CLIENT].rnic.query_qp(connection.client.qpn);
        !connection.gone && info.is_some_and(|info| info.state == QpState::Rts)
    }

    /// Returns the state of the server's end of a connection; `None` when that QP no longer exists.
    pub fn server_state(&self, link: MappedConnection) -> Option<QpState> {
        let connection = &self.connections[link.0];
        let info = self.world.hosts[SERVER].rnic.query_qp(connection.server.qpn);
        info.filter(|_| !connection.gone).map(|info| info.state)
    }

    /// Returns whether bytes of a connection are on their way to the server's caches.
    pub fn is_draining(&self, link: MappedConnection) -> bool {
        self.connections[link.0].lane.waits()
    }

    /// Revokes a mapping at the server: its key ends, and what the server had accepted drains. From then on nothing may change
    /// through it.
    pub fn revoke(&mut self, link: MappedConnection) {
        let connection = &mut self.connections[link.0];
        if let Some(mapping) = connection.mapping.take() {
            let ended = self.world.with(SERVER, |rnic, _| match mapping {
                Mapping::Region(lkey) => rnic.dereg_mr(lkey).is_ok(),
                Mapping::Window(window) => rnic.dealloc_mw(window),
            });
            assert!(ended, "the mapping was there");
            connection.lane.shut();
        }
    }

    /// Cuts the power of the server and restores it. Its memory is what survived. All connections are gone, though the client
    /// is not notified and goes on sending for a while. Operations in flight never become [`Done`].
    pub fn cut(&mut self) {
        self.shadow.cut(&mut self.dice);
        self.restart();
    }

    /// Kills the server's process and starts it again: like [`Bed::cut`], but memory that outlives a process is untouched.
    pub fn kill(&mut self) {
        self.shadow.kill();
        self.restart();
    }

    fn restart(&mut self) {
        self.world.restart(SERVER);
        self.cqs[SERVER] = self.world.hosts[SERVER].rnic.create_cq(1 << 16);
        self.jobs.clear();
        self.operations.clear();
        self.done.clear();
        for connection in &mut self.connections {
            connection.gone = true;
            connection.mapping = None;
        }
    }

    fn server_completes(&mut self, wc: &WorkCompletion) {
        let Some(link) = self.by_qpn[SERVER].get(&wc.qpn.value()).copied() else {
            return;
        };
        if let Some(slot) = slot_of(wc)
            && wc.status == Status::Success
        {
            let job = slot << 32 | link as u64;
            self.jobs.insert(job, Job { link, slot });
            let delay = self.dice.log_uniform(SERVER_NS_MAX);
            self.world.call_back(delay, job);
        }
    }

    /// Acts as the server's processor: looks at a message, writes its range back, answers.
    fn do_job(&mut self, job: u64) {
        let Some(Job { link, slot }) = self.jobs.remove(&job) else {
            return;
        };
        let connection = &mut self.connections[link];
        connection.lane.completed(slot);
        let message = connection.mailbox.take(slot);
        let word = |n: usize| u64::from_le_bytes(message[n * 8..n * 8 + 8].try_into().expect("8 bytes"));
        let (operation, at, len) = (word(0), word(1), word(2));
        let inside = at >= connection.range.start
            && at.checked_add(len).is_some_and(|end| end <= connection.range.end);
        let does = inside && connection.mapping.is_some() && self.domain != Domain::None;
        if does {
            connection.lane.flush_by_processor(at..at + len);
        }
        connection.answers += 1;
        let answer = [operation, u64::from(does)].map(u64::to_le_bytes).concat();
        let request = SendRequest {
            wr_id: connection.answers,
            operation: Operation::Send { imm: None },
            sges: SgeList::inline(&answer),
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        let qpn = connection.server.qpn;
        post_recv(&mut self.world, SERVER, &self.connections[link].server, slot);
        // A connection that ended takes no answer.
        let _ = self.world.post_send(SERVER, qpn, request);
    }

    fn client_completes(&mut self, wc: &WorkCompletion) -> Result<(), String> {
        let Some(link) = self.by_qpn[CLIENT].get(&wc.qpn.value()).copied() else {
            return Ok(());
        };
        if self.connections[link].gone {
            return Ok(());
        }
        let failed = wc.status != Status::Success;
        if failed {
            self.end_messages(link);
        }
        if let Some(slot) = slot_of(wc) {
            return if failed { Ok(()) } else { self.answered(link, slot) };
        }
        let Some(operated) = self.operations.get(&wc.wr_id) else {
            // This is the message of a software flush that was answered first.
            return Ok(());
        };
        if operated.by_message && !failed {
            return Ok(());
        }
        let operated = self.operations.remove(&wc.wr_id).expect("it was just seen");
        let connection = &mut self.connections[link];
        let mut bytes = Vec::new();
        if let Some((at, room)) = operated.piece {
            if operated.takes_bytes && !failed {
                let from = at as usize;
                bytes = connection
                    .own
                    .with(|all| all[from..from + wc.byte_len as usize].to_vec());
            }
            connection.space.give(at, room);
        }
        let ended = if failed {
            Ended::Failed(wc.status)
        } else {
            Ended::Done
        };
        self.done.push_back(Done {
            link: MappedConnection(link),
            operation: wc.wr_id,
            ended,
            bytes,
        });
        Ok(())
    }

    /// Ends the operations of a connection that ended which wait for a message: the server answers none of them any more.
    fn end_messages(&mut self, link: usize) {
        let done = &mut self.done;
        self.operations.retain(|operation, one| {
            let ends = one.by_message && one.link == link;
            if ends {
                done.push_back(Done {
                    link: MappedConnection(link),
                    operation: *operation,
                    ended: Ended::Failed(Status::Flushed),
                    bytes: Vec::new(),
                });
            }
            !ends
        });
    }

    /// Handles the answer to a software flush.
    fn answered(&mut self, link: usize, slot: u64) -> Result<(), String> {
        let connection = &self.connections[link];
        let at = (slot * ANSWER_BYTES) as usize;
        let word = |n: usize| {
            let at = at + n * 8;
            let bytes = connection.own.with(|all| all[at..at + 8].to_vec());
            u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
        };
        let (operation, done) = (word(0), word(1));
        post_recv(&mut self.world, CLIENT, &self.connections[link].client, slot);
        if self.operations.remove(&operation).is_none() {
            return Err(format!("software flush {operation} is answered twice"));
        }
        let ended = if done != 0 { Ended::Done } else { Ended::Refused };
        self.done.push_back(Done {
            link: MappedConnection(link),
            operation,
            ended,
            bytes: Vec::new(),
        });
        Ok(())
    }
}

/// Bit set in the numbers of receives.
const RECV: u64 = 1 << 63;

/// Returns the slot of a receive.
fn slot_of(wc: &WorkCompletion) -> Option<u64> {
    (wc.wr_id & RECV != 0).then_some(wc.wr_id & !RECV)
}

/// Posts the receive of a slot, unless the QP has ended.
fn post_recv(world: &mut World, host: usize, end: &ConnectionEnd, slot: u64) {
    let bytes = if host == SERVER {
        MESSAGE_BYTES
    } else {
        ANSWER_BYTES
    };
    let request = RecvRequest {
        wr_id: RECV | slot,
        sges: Sge::new(OWN_IOVA + slot * bytes, bytes as u32, end.lkey).into(),
    };
    let _ = world.with(host, |rnic, now| rnic.post_recv(now, end.qpn, request));
}
