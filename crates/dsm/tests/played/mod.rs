//! A node that a test plays: it joins as any other one does, and then sends whatever the test wants.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_dsm::Cluster;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectParams, Connection, Device, Memory, MemoryRegion,
    ProtectionDomain, QpOptions, QueuePair, RKey, RecvRequest, RemoteBuffer, SendRequest, SgeList, Status,
    WcOpcode, WorkCompletion,
};
use rdmux_wire::dsm::frame::{FRAME_LEN, Frame, RING_LEN, SLOTS};
use rdmux_wire::dsm::joining::{Hello, Joining, Step, VERSION};
use rdmux_wire::dsm::membership::Membership;
use rdmux_wire::dsm::{MESSAGE_LEN, NodeId};

use crate::common::LONG;

/// Receives for bells, and sends.
const REQUESTS: u32 = 256;

/// Bytes of the played node's region.
const REGION: usize = 1 << 20;

pub(crate) type Message = [u8; MESSAGE_LEN];

/// Another node, as the played one is connected to it.
pub(crate) struct Peer {
    pub(crate) qp: QueuePair,
    connection: Connection,
    ring: Arc<AnonymousMemory>,
    _ring_mr: MemoryRegion,
    buffer: Arc<AnonymousMemory>,
    buffer_mr: MemoryRegion,
    pub(crate) their_ring: RKey,
    /// Frames sent, of those what the other one has handled, and its frames that are handled here.
    sent: u32,
    taken: u32,
    handled: u32,
    /// Requests whose completion has not come.
    outstanding: u32,
    /// A request has failed: the other one has ended the connection.
    pub(crate) is_ended: bool,
    /// Messages that have come.
    came: VecDeque<Message>,
    /// R_Key of the region of the other one.
    pub(crate) region: RKey,
}

/// The played node.
pub(crate) struct Played {
    pub(crate) own: u32,
    /// By number; `None` for this node.
    pub(crate) peers: Vec<Option<Peer>>,
    /// It answers questions whether it is there.
    pub(crate) is_present: bool,
    cq: CompletionQueue,
    region: MemoryRegion,
    memory: Arc<AnonymousMemory>,
    /// Twins and log of a region with release consistency, as this node lets the others read them.
    pub(crate) shadow: Arc<AnonymousMemory>,
    shadow_mr: MemoryRegion,
}

/// Answer to a node that connects.
pub(crate) enum Answer {
    /// A connection, with these bytes as the greeting.
    Accept(Vec<u8>),
    /// A refusal with these bytes.
    Reject(Vec<u8>),
    /// None at all.
    Nothing,
}

/// Answers the nodes that connect to a node of a cluster, until a condition holds. The function gets the greeting that a correct node sends.
pub(crate) fn answer_all(
    cluster: &Cluster,
    answer: impl Fn(Hello) -> Answer,
    mut is_met: impl FnMut() -> bool,
) {
    let device = Device::open(address(cluster, cluster.own().number()).ip()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16 * REQUESTS).unwrap();
    let listener = device
        .listen(address(cluster, cluster.own().number()).port())
        .unwrap();
    let deadline = Instant::now() + 2 * LONG;
    let (mut connected, mut unanswered) = (Vec::new(), Vec::new());
    while !is_met() {
        assert!(Instant::now() < deadline, "a node hangs");
        let Some(request) = listener.accept(Duration::from_millis(20)) else {
            continue;
        };
        let prepared = prepare(&pd, &cq, 0);
        match answer(hello(cluster, prepared.ring_mr.rkey().0)) {
            Answer::Accept(bytes) => {
                let connection = request.accept(&prepared.qp, &params(), &bytes);
                connected.push((prepared, connection));
            }
            Answer::Reject(bytes) => request.reject(&bytes),
            Answer::Nothing => unanswered.push(request),
        }
    }
}

/// Returns the greeting of a node.
pub(crate) fn hello(cluster: &Cluster, ring: u32) -> Hello {
    Hello {
        version: VERSION,
        node: cluster.own().number(),
        nodes: cluster.nodes().count() as u32,
        page_bytes: rustix::param::page_size() as u32,
        session: cluster.session,
        ring,
    }
}

/// Memory and queue pair for another node.
struct Prepared {
    qp: QueuePair,
    ring: Arc<AnonymousMemory>,
    ring_mr: MemoryRegion,
    buffer: Arc<AnonymousMemory>,
    buffer_mr: MemoryRegion,
}

fn prepare(pd: &ProtectionDomain, cq: &CompletionQueue, node: u32) -> Prepared {
    let mut options = QpOptions::new(cq);
    options.max_send_wr = REQUESTS;
    options.max_recv_wr = REQUESTS;
    let qp = pd.create_qp(&options).unwrap();
    let ring = Arc::new(AnonymousMemory::shareable(RING_LEN).unwrap());
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let ring_mr = pd.reg_mr_all(ring.clone(), 0, rights).unwrap();
    let buffer = Arc::new(AnonymousMemory::new(SLOTS as usize * FRAME_LEN).unwrap());
    let buffer_mr = pd.reg_mr_all(buffer.clone(), 0, Access::LOCAL_WRITE).unwrap();
    qp.init().unwrap();
    for _ in 0..REQUESTS {
        qp.post_recv(RecvRequest::new(node.into(), SgeList::EMPTY))
            .unwrap();
    }
    Prepared {
        qp,
        ring,
        ring_mr,
        buffer,
        buffer_mr,
    }
}

impl Prepared {
    fn connected(self, connection: Connection, ring: u32) -> Peer {
        Peer {
            qp: self.qp,
            connection,
            ring: self.ring,
            _ring_mr: self.ring_mr,
            buffer: self.buffer,
            buffer_mr: self.buffer_mr,
            their_ring: RKey(ring),
            sent: 0,
            taken: 0,
            handled: 0,
            outstanding: 0,
            is_ended: false,
            came: VecDeque::new(),
            region: RKey(0),
        }
    }
}

/// Rights of others on a queue pair of a node.
pub(crate) fn params() -> ConnectParams {
    ConnectParams {
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        ..ConnectParams::default()
    }
}

fn address(cluster: &Cluster, node: u32) -> SocketAddr {
    cluster.address(NodeId::new(node).unwrap()).unwrap()
}

impl Played {
    /// Joins a cluster as the node that it describes.
    pub(crate) fn join(cluster: &Cluster) -> Played {
        let (own, nodes) = (cluster.own().number(), cluster.nodes().count() as u32);
        Played::join_some(cluster, nodes - own - 1)
    }

    /// Connects to all nodes of lower numbers, and waits for so many of the others. It has no part in the cluster unless these are all.
    pub(crate) fn join_some(cluster: &Cluster, higher: u32) -> Played {
        let (own, nodes) = (cluster.own().number(), cluster.nodes().count() as u32);
        let device = Device::open(address(cluster, own).ip()).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(4 * REQUESTS * nodes).unwrap();
        let listener = device.listen(address(cluster, own).port()).unwrap();
        let deadline = Instant::now() + LONG;
        let mut peers: Vec<Option<Peer>> = (0..nodes).map(|_| None).collect();
        for node in 0..own {
            loop {
                let prepared = prepare(&pd, &cq, node);
                let greeting = hello(cluster, prepared.ring_mr.rkey().0).emit();
                match device.connect(&prepared.qp, address(cluster, node), &params(), &greeting) {
                    Ok(connection) => {
                        let ring = Hello::parse(connection.private_data()).unwrap().ring;
                        peers[node as usize] = Some(prepared.connected(connection, ring));
                        break;
                    }
                    Err(ConnectError::Rejected { .. } | ConnectError::Unreachable { .. })
                        if Instant::now() < deadline => {}
                    Err(error) => panic!("node {node}: {error}"),
                }
                // Time is meant: the node may not listen yet, and nothing tells when it does.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        for _ in 0..higher {
            let request = listener.accept(LONG).expect("a node that connects");
            let theirs = Hello::parse(request.private_data()).unwrap();
            let prepared = prepare(&pd, &cq, theirs.node);
            let greeting = hello(cluster, prepared.ring_mr.rkey().0).emit();
            let connection = request.accept(&prepared.qp, &params(), &greeting).unwrap();
            connection.wait_established();
            peers[theirs.node as usize] = Some(prepared.connected(connection, theirs.ring));
        }
        let memory = Arc::new(AnonymousMemory::shareable(REGION).unwrap());
        let shadow = Arc::new(AnonymousMemory::shareable(REGION).unwrap());
        let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = pd.reg_mr_all(memory.clone(), 0, rights).unwrap();
        let shadow_mr = pd.reg_mr_all(shadow.clone(), 0, rights).unwrap();
        Played {
            own,
            peers,
            is_present: true,
            cq,
            region,
            memory,
            shadow,
            shadow_mr,
        }
    }

    pub(crate) fn peer(&mut self, node: u32) -> &mut Peer {
        self.peers[node as usize].as_mut().expect("another node")
    }

    /// Returns the other nodes.
    pub(crate) fn others(&self) -> Vec<u32> {
        (0..self.peers.len() as u32)
            .filter(|it| *it != self.own)
            .collect()
    }

    /// Takes what has come.
    pub(crate) fn pump(&mut self) {
        let mut completions = [WorkCompletion::default(); 64];
        let found = self.cq.poll_into(&mut completions);
        for it in &completions[..found] {
            let node = it.wr_id as u32;
            let peer = self.peer(node);
            if it.status != Status::Success {
                peer.is_ended = true;
            } else if it.opcode == WcOpcode::Recv {
                let _ = peer.qp.post_recv(RecvRequest::new(node.into(), SgeList::EMPTY));
            } else {
                peer.outstanding -= 1;
            }
        }
        for node in self.others() {
            let mut answers = 0;
            let peer = self.peer(node);
            loop {
                let at = (peer.handled % SLOTS) as usize * FRAME_LEN;
                let last = peer.ring.mapping().double_word(at + FRAME_LEN - 8);
                if (last.load(Ordering::Acquire).to_le() >> 32) as u32 != peer.handled.wrapping_add(1) {
                    break;
                }
                let frame = Frame::parse(&peer.ring.mapping().load_line(at)).unwrap();
                (peer.taken, peer.handled) = (frame.handled, peer.handled.wrapping_add(1));
                let Some(message) = frame.message else { continue };
                match Membership::parse(&message) {
                    Ok(Membership::Probe) => answers += 1,
                    _ => peer.came.push_back(message),
                }
            }
            for _ in 0..answers {
                if self.is_present {
                    self.send(node, Membership::Present.emit());
                }
            }
        }
    }

    /// Returns the next message of a node for which a function returns something, after those before it; `None` if the node has ended the connection.
    pub(crate) fn receive<R>(&mut self, node: u32, mut find: impl FnMut(&Message) -> Option<R>) -> Option<R> {
        let deadline = Instant::now() + LONG;
        loop {
            self.pump();
            while let Some(message) = self.peer(node).came.pop_front() {
                if let Some(found) = find(&message) {
                    return Some(found);
                }
            }
            if self.peer(node).is_ended {
                return None;
            }
            assert!(
                Instant::now() < deadline,
                "node {node} does not send what it should"
            );
            std::thread::yield_now();
        }
    }

    /// Takes what comes for some time, or until a condition holds.
    pub(crate) fn pump_until(&mut self, time: Duration, mut is_met: impl FnMut(&mut Played) -> bool) -> bool {
        let deadline = Instant::now() + time;
        loop {
            self.pump();
            if is_met(self) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            // Time is meant: as a node that looks from time to time.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a message in a frame as a node does.
    pub(crate) fn send(&mut self, node: u32, message: Message) {
        self.send_frame(node, |handled, count| {
            let frame = Frame {
                message: Some(message),
                handled,
                sleeps: 0,
                is_direct: false,
                count,
            };
            frame.emit()
        });
    }

    /// Sends a frame, which may be anything, where the next one belongs, and rings the bell. Waits for room. The function gets the number of frames
    /// handled and the frame's count.
    pub(crate) fn send_frame(&mut self, node: u32, frame: impl FnOnce(u32, u32) -> [u8; FRAME_LEN]) {
        let deadline = Instant::now() + LONG;
        loop {
            let peer = self.peer(node);
            if peer.is_ended {
                return;
            }
            if peer.sent.wrapping_sub(peer.taken) < SLOTS - 2 && peer.outstanding + 2 < REQUESTS / 2 {
                break;
            }
            assert!(Instant::now() < deadline, "node {node} takes no frames");
            self.pump();
            std::thread::yield_now();
        }
        let peer = self.peer(node);
        let at = u64::from(peer.sent % SLOTS) * FRAME_LEN as u64;
        peer.sent = peer.sent.wrapping_add(1);
        peer.buffer.write(at, &frame(peer.handled, peer.sent)).unwrap();
        let to = RemoteBuffer {
            address: at,
            length: FRAME_LEN as u64,
            rkey: peer.their_ring,
        };
        let write = SendRequest::write(peer.buffer_mr.sge(at, FRAME_LEN as u32), to);
        self.post(node, write);
        self.post(node, SendRequest::send(SgeList::EMPTY));
    }

    /// Posts a request, whose completion is taken by and by.
    pub(crate) fn post(&mut self, node: u32, request: SendRequest) {
        let peer = self.peer(node);
        match peer.qp.post_send(request.signaled().wr_id(node.into())) {
            Ok(()) => peer.outstanding += 1,
            Err(_) => peer.is_ended = true,
        }
    }

    /// Reads bytes of a node's region into the same ones of this node's.
    pub(crate) fn fetch(&mut self, from: u32, at: u64, len: u32) {
        let remote = RemoteBuffer {
            address: at,
            length: len.into(),
            rkey: self.peer(from).region,
        };
        let into = self.region.sge(at, len);
        self.post(from, SendRequest::read(into, remote));
        let is_done = |it: &mut Played| it.peer(from).outstanding == 0;
        assert!(self.pump_until(LONG, is_done), "node {from} lets nobody read");
    }

    /// Returns memory of this node for a request.
    pub(crate) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// Ends all connections.
    pub(crate) fn leave(&mut self) {
        for node in self.others() {
            let peer = self.peer(node);
            peer.is_ended = true;
            peer.connection.disconnect();
        }
    }

    /// Returns the frames of this node, which are those of all its regions.
    pub(crate) fn memory(&self) -> &AnonymousMemory {
        &self.memory
    }

    /// Returns the next message that has come from a node.
    pub(crate) fn take(&mut self, node: u32) -> Option<Message> {
        self.peer(node).came.pop_front()
    }

    /// Takes part in making region 0, as a node that is not the first. Returns its pages.
    pub(crate) fn make_region(&mut self) -> u64 {
        self.make(0, 0)
    }

    /// Does that with a region with release consistency, of which the others read its twins and log.
    pub(crate) fn make_release_region(&mut self, region: u32) -> u64 {
        self.make(region, self.shadow_mr.rkey().0)
    }

    /// Does that with a region of a number, and the key of the memory with its twins and log.
    pub(crate) fn make(&mut self, region: u32, shadow: u32) -> u64 {
        let (_, pages) = self.wait_for_offer(0, region);
        self.end_making(0, region, shadow);
        pages
    }

    /// Takes part in making region 0, as a node that is not the first and where the addresses of the first attempts are taken. Returns all addresses
    /// that were offered.
    pub(crate) fn make_after(&mut self, taken: u32) -> Vec<u64> {
        let mut offered = Vec::new();
        for attempt in 0..taken {
            offered.push(self.wait_for_offer(attempt, 0).0);
            self.tell_all_of(attempt, 0, Step::Taken);
        }
        offered.push(self.wait_for_offer(taken, 0).0);
        self.end_making(taken, 0, 0);
        offered
    }

    /// Returns address and pages of an offer.
    fn wait_for_offer(&mut self, attempt: u32, region: u32) -> (u64, u64) {
        let offer = self.receive(0, |message| match step_at(message, region, attempt)? {
            Step::Propose { address, pages, .. } => Some((address, pages)),
            _ => None,
        });
        offer.expect("an offer")
    }

    /// Maps a region in an attempt, and waits until all have.
    fn end_making(&mut self, attempt: u32, region: u32, shadow: u32) {
        self.map(attempt, region, shadow);
        self.receive(0, |message| {
            (step_at(message, region, attempt)? == Step::Agreed).then_some(())
        });
    }

    /// Makes a region as the first node, at an address that the others have free.
    pub(crate) fn lead(&mut self, region: u32, offer: Step) {
        self.lead_in(0, region, offer);
    }

    /// Does that in an attempt.
    pub(crate) fn lead_in(&mut self, attempt: u32, region: u32, offer: Step) {
        self.tell_all_of(attempt, region, offer);
        self.map(attempt, region, 0);
        self.tell_all_of(attempt, region, Step::Agreed);
    }

    /// Tells all others the first attempt's step of making a region.
    pub(crate) fn tell_all(&mut self, region: u32, step: Step) {
        self.tell_all_of(0, region, step);
    }

    /// Tells all others a step of an attempt.
    pub(crate) fn tell_all_of(&mut self, attempt: u32, region: u32, step: Step) {
        let message = Joining {
            region,
            attempt,
            step,
        };
        self.others()
            .into_iter()
            .for_each(|node| self.send(node, message.emit()));
    }

    /// Tells all others that this node has mapped a region in an attempt, and learns their keys.
    fn map(&mut self, attempt: u32, region: u32, shadow: u32) {
        let key = self.region.rkey().0;
        self.tell_all_of(attempt, region, Step::Mapped { key, shadow });
        for node in self.others() {
            let key = self.receive(node, |message| match step_at(message, region, attempt)? {
                Step::Mapped { key, .. } => Some(key),
                _ => None,
            });
            self.peer(node).region = RKey(key.expect("a key"));
        }
    }
}

/// Returns what a message says about the making of a region, if it is about that.
pub(crate) fn step_of(message: &Message, region: u32) -> Option<Step> {
    let joining = Joining::parse(message).ok()?;
    (joining.region == region).then_some(joining.step)
}

/// Does that if it is about one attempt.
pub(crate) fn step_at(message: &Message, region: u32, attempt: u32) -> Option<Step> {
    let joining = Joining::parse(message).ok()?;
    (joining.attempt == attempt).then_some(())?;
    step_of(message, region)
}
