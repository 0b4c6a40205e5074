//! Two nodes joined by a queue pair that keeps to the rules of RC, and applications that post random requests. Everything happens in a random
//! order: when a request is carried out, when its end is known, when a message is looked at, when a key is told. Each run is named by its seed.
//! The queue pair carries out requests packet by packet, and may fail between any two of them.

mod recovery;
mod runs;

use rdmux_rnic::{Answered, Done, Psn, Remains, Selectivity, Sge, Unfinished};
use rdmux_wire::node::mux::SLOT_LEN;
use rdmux_wire::roce::Placement;
use rdmux_wire::{LKey, RKey};

use super::super::post::takes_slot;
use super::keys::{Extent, OwnRegions, PeerKey, PeerKeys};
use super::*;

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

const START: u64 = 0x10_0000;
/// Bytes of an application's region, one for each end of a connection.
const REGION: u64 = 4 << 20;
/// In the keys that only nodes know.
const SHADOW: u32 = 1 << 31;

#[derive(Debug, Default)]
struct TestKeys {
    own: OwnRegions<(LKey, RKey)>,
    peer: PeerKeys,
    asked: VecDeque<(u64, RKey)>,
}

impl Keys for TestKeys {
    fn own(&mut self, domain: u64, lkey: LKey, range: (u64, u64), access: Access) -> Option<(LKey, RKey)> {
        self.own.get(domain, lkey, range, access).copied()
    }

    fn peer(&mut self, domain: u64, rkey: RKey, range: (u64, u64), access: Access) -> PeerKey {
        let found = self.peer.get(domain, rkey, range, access);
        while let Some(wanted) = self.peer.poll_wanted() {
            self.asked.push_back(wanted);
        }
        found
    }
}

/// Expected outcome of a request or receive.
#[derive(Clone, Debug)]
struct Expected {
    wr_id: u64,
    status: Status,
    opcode: WcOpcode,
    /// Memory that then holds these bytes: at the peer, or of the own application.
    at_peer: Option<(u64, Vec<u8>)>,
    own: Vec<(u64, Vec<u8>)>,
    byte_len: u32,
    imm: Option<u32>,
    is_solicited: bool,
    /// Requests of the sender whose bytes are there too.
    after: usize,
}

/// One end of a connection.
struct Flow {
    id: ConnectionId,
    to_post: VecDeque<SendRequest>,
    /// Requests that are not complete, and what the scheduler knows of them.
    fifo: VecDeque<SendRequest>,
    sent: usize,
    offset: u32,
    in_flight: usize,
    refused: Option<Status>,
    is_awake: bool,
    receives: VecDeque<RecvRequest>,
    sends: Vec<Expected>,
    recvs: Vec<Expected>,
    done: (usize, usize),
    /// Expected failure, if one is.
    failure: Option<Failure>,
    has_failed: bool,
    /// Failures of queue pairs that its requests have caused.
    caused: usize,
    /// Set if the other end may fail, or is killed: then nothing has to complete.
    is_doomed: bool,
    /// Set once a request in flight has failed.
    has_lost: bool,
    is_killed: bool,
    has_ended: bool,
    /// Its memory, which its application may deregister.
    region: Region,
    free: u64,
    counter: (u64, u64),
}

/// The memory of an end of a connection.
#[derive(Debug, PartialEq, Eq)]
enum Region {
    Stays,
    /// Its application deregisters it at any time.
    MayGo,
    /// Its application has deregistered it, and so many uses of it have not ended.
    Goes(usize),
    /// Nobody uses it any more, and it had these bytes then.
    Gone(Vec<u8>),
}

struct Node {
    mux: Mux,
    keys: TestKeys,
    memory: Vec<u8>,
    flows: Vec<Flow>,
    /// Posted and not carried out; carried out and not completed.
    wire: VecDeque<Sent>,
    done: VecDeque<(Sent, Option<Answer>)>,
    /// Completions of a queue pair that has failed.
    returned: VecDeque<(u64, Status)>,
    /// PSN of the next request, and of the next packet to be carried out.
    psns: (Psn, Psn),
    remains: Option<Remains>,
    /// Requests that the peer has executed, and would answer anew.
    answers: VecDeque<(Psn, Answered)>,
    refused: Option<(Psn, Status)>,
    /// Times that each byte of the memory was written to by the peer.
    written: Vec<u8>,
    is_resumed: bool,
    /// Messages in slots.
    inbox: VecDeque<Vec<u8>>,
    buffers: HashSet<u16>,
    resources: u32,
    messages: usize,
}

/// Bytes that a READ or an atomic operation brings, and where they go once that is known.
type Answer = (SgeList, Vec<u8>);

/// A request on the wire, and how many of its packets have been carried out.
struct Sent {
    post: Post,
    first: Psn,
    count: u32,
    executed: u32,
}

/// Bytes of a packet.
const MTU: u32 = 256;
/// Requests that a queue pair would answer anew.
const ANSWERS: usize = 16;

struct World {
    dice: Dice,
    /// Set from a failure of the queue pair on, until both ends know what has been carried out.
    is_ending: bool,
    /// Set if the ends cannot tell what they have carried out, except for messages.
    has_ledger: bool,
    /// Set if requests may fail because nobody knows whether they took effect.
    may_lose: bool,
    /// Memory of each node that cannot be accessed.
    faulty: [Option<u64>; 2],
    /// Set while nothing arrives as long as anything else can happen.
    is_stalled: bool,
    /// Deregistered regions that were in use.
    used: usize,
    /// Set if nodes do not wait for their peers until nobody uses a deregistered region any more.
    is_impatient: bool,
    nodes: [Node; 2],
    slots: u16,
    seed: u64,
    /// Steps so far.
    steps: usize,
}

/// Most steps of a world: many times those of the longest run.
const STEPS_MAX: usize = 100_000;

const ALL: Access = Access::from_bits_truncate(0x30f);
const RESOURCES: u32 = 3;

fn base(at: usize) -> u64 {
    START + at as u64 * REGION
}

fn names(node: usize, at: usize) -> Qpn {
    Qpn::new(0x100 * (node as u32 + 1) + at as u32)
}

fn domain(node: usize, at: usize) -> u64 {
    (node * 10 + at % 3) as u64
}

fn lkey(at: usize) -> LKey {
    LKey(0x1000 + at as u32)
}

fn rkey(at: usize) -> RKey {
    RKey(0x2000 + at as u32)
}

impl World {
    /// Returns the outcome of the next request of a connection, without bytes and memory.
    fn expects(&self, node: usize, at: usize, status: Status, opcode: WcOpcode) -> Expected {
        Expected {
            wr_id: self.nodes[node].flows[at].sends.len() as u64,
            status,
            opcode,
            at_peer: None,
            own: Vec::new(),
            byte_len: 0,
            imm: None,
            is_solicited: false,
            after: 0,
        }
    }

    fn new(seed: u64, connections: usize, slots: u16) -> World {
        let node = |node: usize| {
            let mut mux = Mux::new(slots);
            let mut keys = TestKeys::default();
            let flows = (0..connections).map(|at| {
                let extent = Extent {
                    start: base(at),
                    length: REGION,
                    access: ALL,
                };
                let shadow = (LKey(lkey(at).0 | SHADOW), RKey(rkey(at).0 | SHADOW));
                keys.own
                    .insert(domain(node, at), (lkey(at), rkey(at)), extent, shadow);
                let bound = Bound {
                    own: names(node, at),
                    peer: names(1 - node, at),
                    domain: domain(node, at),
                    peer_domain: domain(1 - node, at),
                    peer_access: ALL,
                    replays_writes: false,
                };
                let id = mux.bind(bound, Receiver::new(1024)).unwrap();
                Flow {
                    id,
                    to_post: VecDeque::new(),
                    fifo: VecDeque::new(),
                    sent: 0,
                    offset: 0,
                    in_flight: 0,
                    refused: None,
                    is_awake: false,
                    receives: VecDeque::new(),
                    sends: Vec::new(),
                    recvs: Vec::new(),
                    done: (0, 0),
                    failure: None,
                    has_failed: false,
                    caused: 0,
                    is_doomed: false,
                    has_lost: false,
                    is_killed: false,
                    has_ended: false,
                    region: Region::Stays,
                    free: base(at),
                    counter: (0, 0),
                }
            });
            let flows = flows.collect();
            Node {
                mux,
                keys,
                memory: vec![0; connections * REGION as usize],
                written: vec![0; connections * REGION as usize],
                returned: VecDeque::new(),
                psns: (Psn::new(0xff_fff0), Psn::new(0xff_fff0)),
                remains: None,
                answers: VecDeque::new(),
                refused: None,
                is_resumed: true,
                flows,
                wire: VecDeque::new(),
                done: VecDeque::new(),
                inbox: VecDeque::new(),
                buffers: HashSet::new(),
                resources: RESOURCES,
                messages: 0,
            }
        };
        World {
            dice: Dice(seed),
            is_ending: false,
            has_ledger: false,
            may_lose: false,
            faulty: [None; 2],
            is_stalled: false,
            used: 0,
            is_impatient: false,
            nodes: [node(0), node(1)],
            slots,
            seed,
            steps: 0,
        }
    }

    fn length(&mut self) -> usize {
        match self.dice.below(8) {
            0 => 0,
            1 => BODY_LEN_MAX - 1 + self.dice.below(3),
            2 => self.dice.below(70_000),
            3 => self.dice.below(10_000),
            _ => self.dice.below(300),
        }
    }

    fn allocate(&mut self, node: usize, at: usize, length: usize) -> u64 {
        let flow = &mut self.nodes[node].flows[at];
        let va = flow.free;
        flow.free += (length as u64).next_multiple_of(8) + 8;
        assert!(flow.free <= base(at) + REGION, "the region is too small");
        va
    }

    fn memory(&mut self, node: usize, va: u64, length: usize) -> &mut [u8] {
        let at = (va - START) as usize;
        &mut self.nodes[node].memory[at..at + length]
    }

    /// Divides a length into elements in the region, and returns them.
    fn elements(&mut self, node: usize, at: usize, length: usize) -> Vec<Sge> {
        let mut list = Vec::new();
        let mut left = length;
        let count = 1 + self.dice.below(4);
        for n in 0..count {
            let part = match n + 1 == count {
                true => left,
                false => self.dice.below(left + 1),
            };
            left -= part;
            let va = self.allocate(node, at, part);
            list.push(Sge::new(va, part as u32, lkey(at)));
        }
        list
    }

    fn fill(&mut self, node: usize, list: &[Sge]) -> Vec<u8> {
        let mut all = Vec::new();
        for sge in list {
            let bytes = self.dice.bytes(sge.length as usize);
            self.memory(node, sge.addr, bytes.len()).copy_from_slice(&bytes);
            all.extend(bytes);
        }
        all
    }

    fn places(list: &[Sge], bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut places = Vec::new();
        let mut rest = bytes;
        for sge in list {
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            places.push((sge.addr, now.to_vec()));
            rest = later;
        }
        assert!(rest.is_empty());
        places
    }

    /// Adds a random request of a connection's end to what its application is to post.
    fn add_request(&mut self, node: usize, at: usize) {
        let kind = self.dice.below(12);
        self.add_request_of(node, at, kind);
    }

    /// Adds a request of a kind: a SEND if it is below 4.
    fn add_request_of(&mut self, node: usize, at: usize, kind: usize) {
        let peer = 1 - node;
        let length = self.length();
        let key = rkey(at);
        let mut expected = Expected {
            is_solicited: self.dice.one_in(3),
            ..self.expects(node, at, Status::Success, WcOpcode::Send)
        };
        let imm = kind.is_multiple_of(2).then_some(self.dice.next() as u32);
        let request = match kind {
            0..=6 => {
                let is_inline = length <= 1024 && self.dice.one_in(3);
                let (list, bytes) = match is_inline {
                    true => {
                        let bytes = self.dice.bytes(length);
                        (SgeList::inline(&bytes), bytes)
                    }
                    false => {
                        let list = self.elements(node, at, length);
                        let bytes = self.fill(node, &list);
                        (list.as_slice().into(), bytes)
                    }
                };
                expected.byte_len = length as u32;
                let operation = match kind < 4 {
                    true => {
                        self.add_receive(peer, at, &expected, Some(&bytes), imm);
                        Operation::Send { imm }
                    }
                    false => {
                        expected.opcode = WcOpcode::Write;
                        let va = self.allocate(peer, at, length);
                        expected.at_peer = Some((va, bytes));
                        if imm.is_some() {
                            self.add_receive(peer, at, &expected, None, imm);
                        }
                        Operation::Write { va, rkey: key, imm }
                    }
                };
                SendRequest::new(operation, list)
            }
            7 | 8 => {
                expected.opcode = WcOpcode::Read;
                expected.byte_len = length as u32;
                let va = self.allocate(peer, at, length);
                let bytes = self.fill(peer, &[Sge::new(va, length as u32, LKey(0))]);
                let list = self.elements(node, at, length);
                expected.own = World::places(&list, &bytes);
                SendRequest::new(Operation::Read { va, rkey: key }, list.as_slice())
            }
            9 => {
                expected.byte_len = 8;
                let own = self.allocate(node, at, 8);
                let flow = &mut self.nodes[node].flows[at];
                let (value, _) = flow.counter;
                let counter = base(at) + REGION - 8;
                expected.own = vec![(own, value.to_le_bytes().to_vec())];
                let list = Sge::new(own, 8, lkey(at));
                let operation = match value % 2 {
                    0 => {
                        flow.counter.0 += 3;
                        expected.opcode = WcOpcode::FetchAdd;
                        Operation::FetchAdd {
                            va: counter,
                            rkey: key,
                            add: 3,
                        }
                    }
                    _ => {
                        flow.counter.0 += 1;
                        expected.opcode = WcOpcode::CompareSwap;
                        Operation::CompareSwap {
                            va: counter,
                            rkey: key,
                            compare: value,
                            swap: value + 1,
                        }
                    }
                };
                SendRequest::new(operation, list)
            }
            10 => {
                expected.opcode = WcOpcode::AtomicWrite;
                expected.byte_len = 8;
                let bytes = self.dice.bytes(8);
                let va = self.allocate(peer, at, 8);
                expected.at_peer = Some((va, bytes.clone()));
                SendRequest::new(Operation::AtomicWrite { va, rkey: key }, SgeList::inline(&bytes))
            }
            _ => {
                expected.opcode = WcOpcode::Flush;
                let operation = Operation::Flush {
                    va: base(at),
                    rkey: key,
                    length: length as u32,
                    placement: Placement::GLOBAL,
                    selectivity: match imm {
                        Some(_) => Selectivity::MemoryRegion,
                        None => Selectivity::Range,
                    },
                };
                SendRequest::new(operation, SgeList::EMPTY)
            }
        };
        let read = match request.operation {
            Operation::Read { .. } => request.sges.as_slice().to_vec(),
            _ => Vec::new(),
        };
        let bytes: Vec<u8> = expected.own.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        self.add(node, at, request, expected);
        if !read.is_empty() && self.dice.one_in(2) {
            self.send_on(node, at, &read, &bytes);
        }
    }

    /// Adds a request that sends on what the one before it has read.
    fn send_on(&mut self, node: usize, at: usize, read: &[Sge], bytes: &[u8]) {
        let mut expected = Expected {
            byte_len: bytes.len() as u32,
            ..self.expects(node, at, Status::Success, WcOpcode::Send)
        };
        let operation = match self.dice.one_in(2) {
            true => {
                self.add_receive(1 - node, at, &expected, Some(bytes), None);
                Operation::Send { imm: None }
            }
            false => {
                let va = self.allocate(1 - node, at, bytes.len());
                expected.at_peer = Some((va, bytes.to_vec()));
                Operation::Write {
                    va,
                    rkey: rkey(at),
                    imm: None,
                }
            }
        };
        self.add(node, at, SendRequest::new(operation, read).fence(), expected);
    }

    fn add(&mut self, node: usize, at: usize, request: SendRequest, expected: Expected) {
        let mut request = request.wr_id(expected.wr_id);
        if expected.is_solicited {
            request = request.solicited();
        }
        if self.dice.one_in(4) {
            request = request.fence();
        }
        let flow = &mut self.nodes[node].flows[at];
        flow.to_post.push_back(request);
        flow.sends.push(expected);
    }

    /// Adds the receive of a message of the other end.
    fn add_receive(
        &mut self,
        node: usize,
        at: usize,
        sent: &Expected,
        bytes: Option<&[u8]>,
        imm: Option<u32>,
    ) {
        let more = self.length();
        let list = self.elements(node, at, bytes.map_or(0, <[u8]>::len) + more);
        let own = bytes.map_or(Vec::new(), |bytes| World::places(&list, bytes));
        let flow = &mut self.nodes[node].flows[at];
        let wr_id = 1_000_000 + flow.recvs.len() as u64;
        flow.recvs.push(Expected {
            wr_id,
            opcode: match bytes {
                Some(_) => WcOpcode::Recv,
                None => WcOpcode::RecvRdmaWithImm,
            },
            own,
            imm,
            at_peer: None,
            after: sent.wr_id as usize,
            ..sent.clone()
        });
        flow.receives.push_back(RecvRequest::new(wr_id, list.as_slice()));
    }

    /// Adds a request that fails both ends.
    fn add_bad_request(&mut self, node: usize, at: usize) {
        let own = self.allocate(node, at, 100_000);
        let sge = Sge::new(own, 64, lkey(at));
        let write = |va, rkey| Operation::Write { va, rkey, imm: None };
        let (refused, invalid) = (Status::RemoteAccess, Status::RemoteInvalidRequest);
        let mut last = None;
        let (request, status, failure) = match self.dice.below(7) {
            0 => (
                SendRequest::send(Sge::new(own, 64, lkey(at + 1))),
                Status::LocalProtection,
                None,
            ),
            1 => (
                SendRequest::new(write(base(at), rkey(at)), Sge::new(base(at) - 8, 64, lkey(at))),
                Status::LocalProtection,
                None,
            ),
            2 => (
                SendRequest::new(write(base(at), RKey(77)), sge),
                refused,
                Some(Failure::Access(refused)),
            ),
            3 => (
                SendRequest::new(write(base(at) + REGION - 63, rkey(at)), sge),
                refused,
                Some(Failure::Access(refused)),
            ),
            4 => {
                let operation = Operation::FetchAdd {
                    va: base(at) + 4,
                    rkey: rkey(at),
                    add: 1,
                };
                let failure = Some(Failure::Access(invalid));
                (
                    SendRequest::new(operation, Sge::new(own, 8, lkey(at))),
                    invalid,
                    failure,
                )
            }
            5 => {
                // The key of another application's region.
                let other = (at + 1) % 3;
                let operation = Operation::Read {
                    va: base(other),
                    rkey: rkey(other),
                };
                (
                    SendRequest::new(operation, sge),
                    refused,
                    Some(Failure::Access(refused)),
                )
            }
            _ => {
                let length = 1 + self.length();
                last = Some(Status::LocalLength);
                let list = self.elements(1 - node, at, length - 1);
                let flow = &mut self.nodes[1 - node].flows[at];
                let wr_id = 1_000_000 + flow.recvs.len() as u64;
                flow.receives.push_back(RecvRequest::new(wr_id, list.as_slice()));
                (
                    SendRequest::send(Sge::new(own, length as u32, lkey(at))),
                    invalid,
                    Some(Failure::Receive(Status::LocalLength)),
                )
            }
        };
        let expected = self.expects(node, at, status, WcOpcode::Send);
        if let Some(status) = last {
            let flow = &mut self.nodes[1 - node].flows[at];
            flow.recvs.push(Expected {
                wr_id: 1_000_000 + flow.recvs.len() as u64,
                status,
                opcode: WcOpcode::Recv,
                ..expected.clone()
            });
        }
        self.add(node, at, request, expected);
        self.fails(node, at, failure);
    }

    /// Adds a WRITE or READ of the peer's memory that fails there.
    fn add_faulty_request(&mut self, node: usize, at: usize) {
        let length = 8 + self.dice.below(2000);
        let own = self.allocate(node, at, length);
        let va = self.allocate(1 - node, at, length);
        self.faulty[1 - node] = Some(va);
        let operation = match self.dice.one_in(2) {
            true => Operation::Read { va, rkey: rkey(at) },
            false => Operation::Write {
                va,
                rkey: rkey(at),
                imm: None,
            },
        };
        // In one piece: what follows has another address.
        let request = SendRequest::new(operation, Sge::new(own, length as u32, lkey(at)));
        let expected = self.expects(node, at, Status::RemoteAccess, WcOpcode::Write);
        self.add(node, at, request, expected);
        self.fails(node, at, Some(Failure::Access(Status::RemoteAccess)));
    }

    /// Has the application of one end of a connection deregister its memory at any time, while the other end sends messages into it.
    fn region_may_go(&mut self, node: usize, at: usize) {
        let ends = [node, 1 - node].map(|node| &self.nodes[node].flows[at]);
        assert!(ends.iter().all(|flow| flow.sends.is_empty()), "it has requests");
        self.nodes[node].flows[at].region = Region::MayGo;
        for _ in 0..12 {
            let kind = self.dice.below(4);
            self.add_request_of(1 - node, at, kind);
            self.add_request(node, at);
        }
    }

    /// Returns whether memory of a connection may go: then it fails at any time.
    fn has_region_that_goes(&self, at: usize) -> bool {
        let mut regions = self.nodes.iter().map(|it| &it.flows[at].region);
        regions.any(|region| *region != Region::Stays)
    }

    fn deregister(&mut self, node: usize, at: usize) {
        let it = &mut self.nodes[node];
        let (own, domain) = ((lkey(at), rkey(at)), domain(node, at));
        let (of, shared) = it.keys.own.remove(own.0).unwrap();
        assert_eq!(of, domain);
        let uses = it.mux.withdraw(domain, own, shared, true);
        it.flows[at].region = Region::Goes(uses);
        self.used += usize::from(uses > 0);
        self.is_gone_if_unused(node, at);
    }

    /// Returns whether nobody but a peer may use a region that goes.
    fn waits_for_peer(&self, node: usize, at: usize) -> bool {
        let it = &self.nodes[node];
        let goes = matches!(it.flows[at].region, Region::Goes(_));
        goes && !it.mux.flight.uses(LKey(lkey(at).0 | SHADOW))
    }

    fn is_gone_if_unused(&mut self, node: usize, at: usize) {
        if self.nodes[node].flows[at].region == Region::Goes(0) {
            let bytes = self.memory(node, base(at), REGION as usize).to_vec();
            self.nodes[node].flows[at].region = Region::Gone(bytes);
        }
    }

    /// Returns whether a node's device refuses an access, since the memory has gone without the peer's leave.
    fn refuses(&self, node: usize, va: u64) -> bool {
        let at = ((va - START) / REGION) as usize;
        self.is_impatient && matches!(self.nodes[node].flows[at].region, Region::Gone(_))
    }

    /// Checks that memory is registered.
    fn is_there(&self, node: usize, at: usize) {
        let is_gone = matches!(self.nodes[node].flows[at].region, Region::Gone(_));
        assert!(!is_gone, "seed {}: an access after the end", self.seed);
    }

    /// Notes that a connection is to fail at this end, and then at the other one.
    fn fails(&mut self, node: usize, at: usize, failure: Option<Failure>) {
        self.nodes[node].flows[at].failure = Some(Failure::Own);
        // Without requests of its own, the other end notices only what it is told.
        let peer = &mut self.nodes[1 - node].flows[at];
        peer.failure = failure;
        peer.is_doomed = true;
        peer.to_post.clear();
        peer.sends.clear();
    }

    /// Lets one thing happen, chosen at random among those that can. Returns false if none can.
    ///
    /// # Panics
    /// If the world does not come to an end.
    fn step(&mut self) -> bool {
        self.steps += 1;
        let muxes = || self.nodes.each_ref().map(|it| &it.mux);
        assert!(
            self.steps <= STEPS_MAX,
            "seed {}: no end: {:?}",
            self.seed,
            muxes()
        );
        let (mut choices, mut may_go) = (Vec::new(), Vec::new());
        for node in 0..2 {
            let it = &self.nodes[node];
            for (at, flow) in it.flows.iter().enumerate() {
                if flow.is_killed {
                    continue;
                }
                if !flow.to_post.is_empty() {
                    choices.push((node, 0, at));
                }
                if !flow.receives.is_empty() {
                    choices.push((node, 1, at));
                }
                if flow.region == Region::MayGo {
                    may_go.push((node, 10, at));
                }
                if self.is_impatient && self.waits_for_peer(node, at) {
                    choices.push((node, 11, at));
                }
                let next = flow.fifo.get(flow.sent).filter(|_| flow.is_awake);
                let takes = next.is_some_and(|next| takes_slot(&next.operation));
                if next.is_some() && (!takes || it.resources > 0) {
                    choices.push((node, 2, at));
                    choices.push((node, 2, at));
                }
            }
            if !it.wire.is_empty() && !self.is_ending {
                choices.extend([(node, 3, 0); 6]);
            }
            if !it.done.is_empty() && !self.is_ending {
                choices.extend([(node, 4, 0); 6]);
            }
            if self.is_ending && (!it.returned.is_empty() || !it.mux.is_stopped) {
                choices.extend([(node, 7, 0); 3]);
            }
            let wants = self
                .nodes
                .iter()
                .any(|it| it.mux.wants_to_resume() || it.is_resumed);
            if !self.is_ending && !it.is_resumed && wants {
                choices.push((node, 9, 0));
            }
            if !it.inbox.is_empty() {
                choices.extend([(node, 5, 0); 6]);
            }
            if !it.keys.asked.is_empty() {
                choices.push((node, 6, 0));
            }
        }
        let is_over = |it: &Node| it.mux.is_stopped && it.mux.is_drained() && it.inbox.is_empty();
        if self.is_ending && self.nodes.iter().all(is_over) {
            choices.push((0, 8, 0));
        }
        if !may_go.is_empty() && (choices.is_empty() || self.dice.one_in(20)) {
            choices.append(&mut may_go);
        }
        if choices.is_empty() {
            return false;
        }
        self.is_stalled |= self.dice.one_in(50);
        if self.is_stalled {
            let of_applications = |choice: &(usize, usize, usize)| choice.1 < 3;
            match choices.iter().any(of_applications) {
                true => choices.retain(of_applications),
                false => self.is_stalled = false,
            }
        }
        let (node, what, at) = choices[self.dice.below(choices.len())];
        match what {
            0 => {
                let flow = &mut self.nodes[node].flows[at];
                if let Some(request) = flow.to_post.pop_front() {
                    flow.is_awake |= flow.fifo.len() == flow.sent;
                    flow.fifo.push_back(request);
                }
            }
            1 => {
                let it = &mut self.nodes[node];
                let receive = it.flows[at].receives.pop_front().unwrap();
                it.mux.post_recv(it.flows[at].id, receive).unwrap();
            }
            2 => self.turn(node, at),
            3 => self.carry_out(node),
            4 => {
                let (sent, answer) = self.nodes[node].done.pop_front().unwrap();
                if let Some((list, bytes)) = answer {
                    self.scatter(node, &list, &bytes);
                }
                self.nodes[node]
                    .mux
                    .handle_completion(sent.post.number, Status::Success);
            }
            5 => self.look_at_message(node),
            6 => self.answer_key(node),
            7 => self.notice(node),
            8 => self.carry_over(),
            9 => self.resume(node),
            10 => self.deregister(node, at),
            _ => self.nodes[node].mux.release(rkey(at)),
        }
        self.drain(node);
        true
    }

    /// Does what the scheduler does when it is a connection's turn.
    fn turn(&mut self, node: usize, at: usize) {
        let longest = 1 + self.dice.below(9000) as u32;
        let it = &mut self.nodes[node];
        let flow = &mut it.flows[at];
        let request = &flow.fifo[flow.sent];
        let length = request.sges.bytes() as u32;
        let admitted = match it.mux.admit(flow.id, request, flow.offset, &mut it.keys) {
            Admission::Post(bytes) => bytes,
            Admission::Wait(_) => {
                flow.is_awake = false;
                return;
            }
            Admission::Refuse(status) => {
                flow.refused = Some(status);
                self.drain(node);
                return self.end_failed(node, at);
            }
        };
        let takes = takes_slot(&request.operation);
        if takes && it.resources == 0 {
            return;
        }
        let rest = length - flow.offset;
        let piece = match sender::may_cut(request) {
            true => rest.min(admitted).min(longest),
            false => rest,
        };
        let part = (flow.offset, piece);
        let is_last = rest == piece;
        let index = flow.done.0 + flow.sent;
        let tag = (at as u64) << 40 | (index as u64) << 2 | u64::from(takes) << 1 | u64::from(is_last);
        let posts = it.mux.send(flow.id, request, part, is_last, tag, &mut it.keys);
        let posts = posts.unwrap();
        flow.in_flight += 1;
        flow.offset += piece;
        if is_last {
            flow.sent += 1;
            flow.offset = 0;
        }
        it.resources -= u32::from(takes);
        for post in [posts.first, posts.then].into_iter().flatten() {
            self.post(node, post);
        }
    }

    fn landed(&mut self, node: usize, tag: u64, status: Status) {
        let at = (tag >> 40) as usize;
        let index = (tag >> 2 & 0xffff_ffff) as usize;
        let it = &mut self.nodes[node];
        it.resources += u32::from(tag & 2 != 0);
        assert!(it.resources <= RESOURCES);
        let flow = &mut it.flows[at];
        flow.in_flight -= 1;
        if flow.is_killed {
            return;
        }
        if flow.has_lost {
            assert_eq!(status, Status::Flushed, "seed {}", self.seed);
            return self.end_failed(node, at);
        }
        assert_eq!(index, flow.done.0, "seed {}", self.seed);
        if status != Status::Success {
            flow.has_lost = true;
            // The rest of the same request may have been refused.
            let refused = flow.refused.take_if(|_| flow.sent == 0);
            let status = refused.unwrap_or(status);
            let request = flow.fifo.pop_front().unwrap();
            flow.sent = flow.sent.saturating_sub(1);
            self.lost(node, at, &request, status);
            return self.end_failed(node, at);
        }
        if tag & 1 != 0 {
            let request = flow.fifo.pop_front().unwrap();
            flow.sent -= 1;
            self.check_send(node, at, request.wr_id, Status::Success);
        }
        self.end_failed(node, at);
    }

    /// Ends the request that was refused, once those before it are complete.
    fn end_failed(&mut self, node: usize, at: usize) {
        let flow = &mut self.nodes[node].flows[at];
        if flow.in_flight > 0 {
            return;
        }
        if let Some(status) = flow.refused.take() {
            let request = flow.fifo.pop_front().unwrap();
            self.check_send(node, at, request.wr_id, status);
        }
        let flow = &mut self.nodes[node].flows[at];
        if flow.has_failed {
            flow.fifo.clear();
            flow.sent = 0;
            flow.to_post.clear();
        }
    }

    fn post(&mut self, node: usize, post: Post) {
        let it = &mut self.nodes[node];
        if let Posted::Message { buffer, .. } = &post.request {
            assert!(*buffer < Mux::buffers_of(self.slots));
            assert!(it.buffers.insert(*buffer), "a buffer is in use");
            it.messages += 1;
        }
        if self.is_ending {
            // It is in error already.
            it.returned.push_back((post.number, Status::Flushed));
            return;
        }
        let bytes = match &post.request {
            Posted::Direct(_, list) => list.bytes() as u32,
            Posted::Message { body, .. } => HEADER_LEN as u32 + body.bytes() as u32,
        };
        let count = bytes.div_ceil(MTU).max(1);
        let first = it.psns.0;
        it.psns.0 = first.plus(count);
        it.wire.push_back(Sent {
            post,
            first,
            count,
            executed: 0,
        });
    }

    /// Returns the bytes of a list, whose keys must be good.
    fn gather(&mut self, node: usize, list: &SgeList) -> Vec<u8> {
        if let Some(bytes) = list.as_inline() {
            return bytes.to_vec();
        }
        let mut all = Vec::new();
        for sge in list.as_slice() {
            let at = (sge.lkey & !SHADOW) as usize - 0x1000;
            assert!(sge.lkey & SHADOW != 0);
            let inside = sge.addr >= base(at) && sge.addr + u64::from(sge.length) <= base(at) + REGION;
            assert!(inside, "seed {}", self.seed);
            self.is_there(node, at);
            all.extend_from_slice(self.memory(node, sge.addr, sge.length as usize));
        }
        all
    }

    fn scatter(&mut self, node: usize, list: &SgeList, bytes: &[u8]) {
        self.gather(node, list);
        for (va, bytes) in World::places(list.as_slice(), bytes) {
            self.memory(node, va, bytes.len()).copy_from_slice(&bytes);
        }
    }

    fn remote(&mut self, node: usize, va: u64, rkey: RKey, length: usize) -> &mut [u8] {
        assert!(rkey.0 & SHADOW != 0);
        let at = (rkey.0 & !SHADOW) as usize - 0x2000;
        assert!(va >= base(at) && va + length as u64 <= base(at) + REGION);
        self.is_there(node, at);
        self.memory(node, va, length)
    }

    /// Carries out some packets of the next request of a node.
    fn carry_out(&mut self, node: usize) {
        let peer = 1 - node;
        let packets = 1 + self.dice.below(12) as u32;
        let Some(mut sent) = self.nodes[node].wire.pop_front() else {
            return;
        };
        let from = sent.executed;
        let is_write = matches!(sent.post.request, Posted::Direct(Operation::Write { .. }, _));
        let is_message = matches!(sent.post.request, Posted::Message { .. });
        sent.executed = match is_write || is_message {
            true => (from + packets).min(sent.count),
            false => sent.count,
        };
        if let Posted::Direct(operation, _) = &sent.post.request
            && let Operation::Write { va, .. } | Operation::Read { va, .. } = operation
            && (self.faulty[peer].is_some_and(|faulty| *va == faulty) || self.refuses(peer, *va))
        {
            self.nodes[peer].refused = Some((sent.first.plus(from), Status::RemoteAccess));
            // The peer's end may be told of the failure before the answer is here.
            let status = match self.dice.one_in(2) {
                true => Status::RemoteAccess,
                false => Status::Flushed,
            };
            sent.executed = from;
            self.nodes[node].wire.push_front(sent);
            self.fail_queue_pair(node, status);
            return;
        }
        self.nodes[node].psns.1 = sent.first.plus(sent.executed);
        let is_whole = sent.executed == sent.count;
        let mut answer = None;
        match &sent.post.request {
            Posted::Message { buffer, header, body } => {
                if is_whole {
                    let bytes = [&header[..], &self.gather(node, body)].concat();
                    assert!(bytes.len() <= SLOT_LEN);
                    self.nodes[peer].inbox.push_back(bytes);
                    let waiting = self.nodes[peer].inbox.len();
                    assert!(waiting <= self.slots.into(), "seed {}: no slot", self.seed);
                    self.nodes[node].buffers.remove(buffer);
                }
            }
            Posted::Direct(operation, list) => match *operation {
                Operation::Write { va, rkey, imm: None } => {
                    let bytes = self.gather(node, list);
                    let end = bytes.len().min((sent.executed * MTU) as usize);
                    let part = &bytes[(from * MTU) as usize..end];
                    self.write_remote(peer, va + u64::from(from * MTU), rkey, part);
                }
                Operation::AtomicWrite { va, rkey } => {
                    let bytes = self.gather(node, list);
                    self.write_remote(peer, va, rkey, &bytes);
                    self.answers(peer, sent.first, Answered::Done);
                }
                Operation::Read { va, rkey } => {
                    let bytes = self.remote(peer, va, rkey, list.bytes() as usize).to_vec();
                    answer = Some((list.clone(), bytes));
                }
                Operation::FetchAdd { va, rkey, add } => {
                    let cell = self.remote(peer, va, rkey, 8);
                    let old = u64::from_le_bytes((*cell).try_into().unwrap());
                    cell.copy_from_slice(&(old + add).to_le_bytes());
                    answer = Some((list.clone(), old.to_le_bytes().to_vec()));
                    self.answers(peer, sent.first, Answered::Original(old));
                }
                Operation::CompareSwap {
                    va,
                    rkey,
                    compare,
                    swap,
                } => {
                    let cell = self.remote(peer, va, rkey, 8);
                    let old = u64::from_le_bytes((*cell).try_into().unwrap());
                    if old == compare {
                        cell.copy_from_slice(&swap.to_le_bytes());
                    }
                    answer = Some((list.clone(), old.to_le_bytes().to_vec()));
                    self.answers(peer, sent.first, Answered::Original(old));
                }
                Operation::Flush { va, rkey, .. } => {
                    self.remote(peer, va, rkey, 0);
                    self.answers(peer, sent.first, Answered::Done);
                }
                ref other => panic!("{other:?}"),
            },
        }
        match is_whole {
            true => self.nodes[node].done.push_back((sent, answer)),
            false => self.nodes[node].wire.push_front(sent),
        }
    }

    fn answers(&mut self, node: usize, psn: Psn, answered: Answered) {
        let answers = &mut self.nodes[node].answers;
        answers.push_back((psn, answered));
        if answers.len() > ANSWERS {
            answers.pop_front();
        }
    }

    fn write_remote(&mut self, node: usize, va: u64, rkey: RKey, bytes: &[u8]) {
        self.remote(node, va, rkey, bytes.len()).copy_from_slice(bytes);
        let at = (va - START) as usize;
        let written = &mut self.nodes[node].written[at..at + bytes.len()];
        written.iter_mut().for_each(|times| *times += 1);
        let replays = self.nodes[1 - node].flows[((va - START) / REGION) as usize].id;
        let replays = self.nodes[1 - node].mux.connection(replays);
        let replays = replays.is_some_and(|it| it.bound.replays_writes);
        let written = &self.nodes[node].written[at..at + bytes.len()];
        let is_once = self.has_ledger && replays || written.iter().all(|times| *times == 1);
        // The bytes of which a message tells may be there before it.
        assert!(is_once || self.has_ledger, "seed {}: written twice", self.seed);
    }

    fn look_at_message(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let Some(message) = it.inbox.pop_front() else {
            return;
        };
        let received = it.mux.handle_message(&message, &mut it.keys);
        let Some(received) = received.unwrap() else { return };
        let body = &message[HEADER_LEN..];
        let at = self.flow_of(node, received.id);
        for copy in &received.copies {
            self.is_there(node, at);
            let bytes = &body[copy.from..copy.from + copy.to.length as usize];
            self.memory(node, copy.to.addr, bytes.len())
                .copy_from_slice(bytes);
        }
        self.check_receive(node, at, &received.completion, Some(received.is_solicited));
    }

    fn answer_key(&mut self, node: usize) {
        let Some((domain, rkey)) = self.nodes[node].keys.asked.pop_front() else {
            return;
        };
        let answer = self.nodes[1 - node].keys.own.get_remote(domain, rkey);
        let answer = answer.map(|(extent, keys)| (keys.1, extent));
        let it = &mut self.nodes[node];
        it.keys.peer.answered(domain, rkey, answer);
        it.mux.keys_answered();
    }

    /// Posts what the node wants to send, and handles its events.
    fn drain(&mut self, node: usize) {
        loop {
            let it = &mut self.nodes[node];
            let post = it.mux.poll_message(&mut it.keys);
            let Some(post) = post else { break };
            self.post(node, post);
        }
        while let Some(event) = self.nodes[node].mux.poll_event() {
            match event {
                Event::Wake(id) => {
                    let at = self.flow_of(node, id);
                    self.nodes[node].flows[at].is_awake = true;
                }
                Event::Landed(tag, status) => self.landed(node, tag, status),
                Event::Answer(_, list, original) => {
                    self.scatter(node, &list, &original.to_ne_bytes());
                }
                Event::Culprit(id) => {
                    let at = self.flow_of(node, id);
                    self.nodes[node].flows[at].caused += 1;
                }
                Event::Received(id, completion) => {
                    let at = self.flow_of(node, id);
                    self.check_receive(node, at, &completion, None);
                }
                Event::Failed(id, failure) => {
                    let at = self.flow_of(node, id);
                    let flow = &mut self.nodes[node].flows[at];
                    if flow.is_killed {
                        continue;
                    }
                    assert!(!flow.has_failed);
                    if self.has_region_that_goes(at) {
                        let is_expected = match failure {
                            Failure::Own | Failure::Receive(Status::LocalProtection) => true,
                            Failure::Shared => self.may_lose,
                            Failure::Access(Status::RemoteAccess) => self.is_impatient,
                            Failure::Receive(_) | Failure::Access(_) => false,
                        };
                        assert!(is_expected, "seed {}: {failure:?}", self.seed);
                        self.nodes[node].flows[at].failure = Some(failure);
                        self.nodes[1 - node].flows[at].is_doomed = true;
                    }
                    let flow = &mut self.nodes[node].flows[at];
                    if self.may_lose && (failure == Failure::Shared || flow.is_doomed) {
                        flow.failure = Some(failure);
                        self.nodes[1 - node].flows[at].is_doomed = true;
                    }
                    let flow = &mut self.nodes[node].flows[at];
                    assert_eq!(flow.failure, Some(failure), "seed {}", self.seed);
                    flow.has_failed = true;
                    self.end_failed(node, at);
                }
                Event::Released(rkey) => {
                    let at = (rkey.0 - 0x2000) as usize;
                    match &mut self.nodes[node].flows[at].region {
                        Region::Goes(uses) if *uses > 0 => *uses -= 1,
                        other => panic!("seed {}: {other:?}", self.seed),
                    }
                    self.is_gone_if_unused(node, at);
                }
                Event::Ended(id) => {
                    let at = self.flow_of(node, id);
                    let flow = &mut self.nodes[node].flows[at];
                    assert!(flow.is_killed && !flow.has_ended);
                    flow.has_ended = true;
                }
            }
        }
    }

    fn flow_of(&self, node: usize, id: ConnectionId) -> usize {
        let flows = &self.nodes[node].flows;
        flows.iter().position(|flow| flow.id == id).unwrap()
    }

    fn check_send(&mut self, node: usize, at: usize, wr_id: u64, status: Status) {
        let flow = &mut self.nodes[node].flows[at];
        assert!(!flow.is_killed, "seed {}", self.seed);
        let expected = flow.sends[flow.done.0].clone();
        flow.done.0 += 1;
        if self.may_lose && status == Status::RetryExceeded {
            return;
        }
        let is_refused = match status {
            Status::LocalProtection | Status::RemoteOperation | Status::RetryExceeded => true,
            Status::RemoteAccess => self.is_impatient,
            _ => false,
        };
        if self.has_region_that_goes(at) && is_refused {
            assert_eq!(wr_id, expected.wr_id, "seed {}", self.seed);
            return;
        }
        assert_eq!(
            (wr_id, status),
            (expected.wr_id, expected.status),
            "seed {}",
            self.seed
        );
        if status == Status::Success {
            self.check_bytes(node, &expected);
        }
    }

    fn check_bytes(&mut self, node: usize, expected: &Expected) {
        let seed = self.seed;
        for (va, bytes) in &expected.own {
            assert_eq!(
                self.memory(node, *va, bytes.len()),
                bytes.as_slice(),
                "seed {seed}"
            );
        }
        if let Some((va, bytes)) = &expected.at_peer {
            let memory = self.memory(1 - node, *va, bytes.len());
            assert_eq!(memory, bytes.as_slice(), "seed {seed}");
        }
    }

    fn check_receive(
        &mut self,
        node: usize,
        at: usize,
        completion: &WorkCompletion,
        is_solicited: Option<bool>,
    ) {
        let seed = self.seed;
        let may_fail = self.has_region_that_goes(at) || self.may_lose;
        let flow = &mut self.nodes[node].flows[at];
        if flow.is_killed {
            return;
        }
        if completion.status == Status::Flushed {
            let may_fail = flow.failure.is_some() || flow.is_doomed || may_fail;
            assert!(may_fail, "seed {seed}: flow {at}");
            assert_eq!(completion.wr_id, 1_000_000 + flow.done.1 as u64);
            flow.done.1 += 1;
            return;
        }
        let expected = flow.recvs[flow.done.1].clone();
        flow.done.1 += 1;
        assert_eq!(completion.wr_id, expected.wr_id, "seed {seed}");
        if self.has_region_that_goes(at) && completion.status == Status::LocalProtection {
            return;
        }
        assert_eq!(completion.status, expected.status, "seed {seed}");
        if completion.status != Status::Success {
            return;
        }
        assert_eq!(
            (completion.opcode, completion.byte_len, completion.imm),
            (expected.opcode, expected.byte_len, expected.imm),
            "seed {seed}"
        );
        assert_eq!(is_solicited, Some(expected.is_solicited));
        self.check_bytes(node, &expected);
        let earlier = self.nodes[1 - node].flows[at].sends[..=expected.after].to_vec();
        for sent in earlier.iter().filter(|sent| sent.status == Status::Success) {
            let sent = Expected {
                own: Vec::new(),
                ..sent.clone()
            };
            self.check_bytes(1 - node, &sent);
        }
    }

    fn run(&mut self) {
        while self.step() {}
        for node in &self.nodes {
            for (at, flow) in node.flows.iter().enumerate() {
                let (sends, recvs) = (flow.sends.len(), flow.recvs.len());
                let peer = self.nodes.iter().find(|other| !std::ptr::eq(*other, node));
                let peer = &peer.unwrap().flows[at];
                match &flow.region {
                    Region::Stays => {}
                    Region::Gone(bytes) => {
                        let from = (base(at) - START) as usize;
                        let now = &node.memory[from..from + REGION as usize];
                        assert!(now == bytes, "seed {}: written after its end", self.seed);
                    }
                    region => panic!("seed {}: {region:?}", self.seed),
                }
                if flow.is_killed || peer.is_killed {
                    assert!(!flow.is_killed || flow.has_ended || !peer.is_killed);
                } else if flow.failure.is_some() || peer.failure.is_some() {
                    assert_eq!(flow.has_failed, flow.failure.is_some(), "seed {}", self.seed);
                    let has_all = flow.done.0 == sends || self.may_lose || self.has_region_that_goes(at);
                    assert!(flow.failure != Some(Failure::Own) || has_all);
                } else {
                    assert_eq!(flow.done, (sends, recvs), "seed {}: flow {at}", self.seed);
                }
            }
            assert_eq!(node.mux.posted(), node.mux.completed());
            assert_eq!(node.resources, RESOURCES);
            assert!(node.buffers.is_empty());
        }
    }
}

/// Variable with the seed of the only run, or with seeds such as `0..1500`.
const SEEDS: &str = "RDMUX_MUX_SEED";

/// Returns whether seeds were given: they need not show all that can happen.
fn has_seeds() -> bool {
    std::env::var(SEEDS).is_ok()
}

/// Returns the seeds that were given, or so many.
fn runs(default: u64) -> std::ops::Range<u64> {
    let Ok(given) = std::env::var(SEEDS) else {
        return 0..default;
    };
    let seed = |text: &str| text.parse::<u64>().expect(SEEDS);
    match given.split_once("..") {
        Some((first, end)) => seed(first)..seed(end),
        None => seed(&given)..seed(&given) + 1,
    }
}
