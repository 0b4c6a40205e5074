//! A hostile peer: a process of the same user that breaks every rule. A device that it has a link to goes on with others, and is neither
//! damaged nor delayed.
#![allow(unsafe_code, reason = "the peer's calls into this process")]

use std::thread;
use std::time::SystemTime;

use rdmux_memory::AnonymousMemory;
use rdmux_memory::mapping::{Mapping, Order, Passage, allows_calls_into_processes};
use rdmux_rnic::{
    Access, Fault, Memory, Operation, Path, Psn, QpAttributes, QpState, RecvRequest, SendFlags as WrFlags,
    SendRequest, SgeList, Status, Target,
};
use rdmux_shm::revocation::{self, Words};
use rdmux_shm::ring::{Producer, RingMemory, Word};
use rdmux_shm::segment::GrantWords;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::resources::places::connect_slot;
use rdmux_verbs::{Carrier, CompletionQueue, ConnectParams, Device, MemoryRegion, QpOptions, QueuePair};
use rdmux_wire::roce::{Bth, Opcode, Operation as Op, Position, Transport, coalesced};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendFlags, SocketAddrUnix};

use super::*;
use crate::skip::skip;
use crate::testing::{Inside, open};

const LONG: Duration = Duration::from_secs(60);

/// Steele, Lea and Flood's generator, as `SplittableRandom` has it.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// Returns a generator and prints its seed, which the environment may choose.
fn random() -> Random {
    let seed = std::env::var("RDMUX_HOSTILE_SEED").ok();
    let seed = seed.map_or_else(
        || u64::from(SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos()),
        |seed| seed.parse().unwrap(),
    );
    println!("RDMUX_HOSTILE_SEED={seed}");
    Random(seed)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

fn slot(device: &Device) -> u8 {
    device.engine().lock().rnic.config().slot
}

fn links(device: &Device) -> usize {
    device.engine().lock().links.list.len()
}

/// Returns the number of links to other addresses than the given one.
fn links_but_to(device: &Device, address: IpAddr) -> usize {
    let core = device.engine().lock();
    let others = |link: &&ShmLink| link.peer.is_none_or(|peer| peer.0 != address);
    core.links.list.iter().filter(others).count()
}

fn connect(device: &Device, qp: &QueuePair, peer: (IpAddr, Qpn)) {
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let init = QpAttributes {
        access: Some(access),
        ..Default::default()
    };
    let rtr = QpAttributes {
        path: Some(Path {
            src: device.address(),
            dst: peer.0,
            src_port: device.source_port(peer.1).unwrap(),
            traffic_class: 0,
        }),
        path_mtu: Some(1024),
        dest_qpn: Some(peer.1),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(16),
        min_rnr_timer: Some(1),
        ..Default::default()
    };
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(16),
        ..Default::default()
    };
    for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        qp.modify(to, &attr).unwrap();
    }
}

/// One end of an honest connection.
struct HonestEnd {
    device: Device,
    cq: CompletionQueue,
    qp: QueuePair,
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
}

const AREA_BYTES: usize = 64 << 10;

impl HonestEnd {
    fn new(device: &Device) -> HonestEnd {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let memory = Arc::new(AnonymousMemory::shareable(3 * AREA_BYTES).unwrap());
        // The region is in the middle, between canaries.
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let (offset, length) = (AREA_BYTES as u64, AREA_BYTES as u64);
        let mr = pd.reg_mr(memory.clone(), offset, length, 0, access).unwrap();
        let device = device.clone();
        HonestEnd {
            device,
            cq,
            qp,
            memory,
            mr,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; AREA_BYTES];
        self.memory.read(AREA_BYTES as u64, &mut bytes).unwrap();
        bytes
    }

    fn has_canaries(&self) -> bool {
        let mut bytes = vec![1; 2 * AREA_BYTES];
        let (before, behind) = bytes.split_at_mut(AREA_BYTES);
        self.memory.read(0, before).unwrap();
        self.memory.read(2 * AREA_BYTES as u64, behind).unwrap();
        bytes.iter().all(|byte| *byte == 0)
    }

    fn post(&self, operation: Operation, sges: SgeList) {
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: WrFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qp.post_send(request).unwrap();
    }

    fn done(&self) {
        let wc = self.cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!(wc.status, Status::Success);
    }
}

/// A victim, and the honest peer that it is connected to.
struct Honest {
    victim: HonestEnd,
    other: HonestEnd,
    random: Random,
}

impl Honest {
    fn new(victim: [u8; 4], other: [u8; 4]) -> Honest {
        let [victim, other] = [victim, other].map(|address| HonestEnd::new(&open(address.into()).unwrap()));
        let honest = Honest {
            victim,
            other,
            random: Random(1),
        };
        let ends = [&honest.victim, &honest.other];
        for (end, peer) in ends.into_iter().zip(ends.into_iter().rev()) {
            connect(&end.device, &end.qp, (peer.device.address(), peer.qp.qpn()));
        }
        until("a link of the honest", || honest.have_link());
        honest
    }

    fn have_link(&self) -> bool {
        let ends = [&self.victim, &self.other];
        ends.into_iter()
            .all(|end| end.qp.carrier() == Some(Carrier::SharedMemory))
    }

    /// Checks that bytes go both ways, by WRITE and SEND, and arrive as they were sent.
    fn check(&mut self) {
        let ends = [&self.victim, &self.other];
        for (from, to) in ends.into_iter().zip(ends.into_iter().rev()) {
            let bytes = self.random.bytes(AREA_BYTES);
            from.memory.write(AREA_BYTES as u64, &bytes).unwrap();
            let whole: SgeList = from.mr.sge(0, AREA_BYTES as u32).into();
            let (va, rkey) = (to.mr.iova(), to.mr.rkey());
            from.post(Operation::Write { va, rkey, imm: None }, whole.clone());
            from.done();
            assert!(to.bytes() == bytes, "written bytes differ");
            to.memory.write(AREA_BYTES as u64, &vec![0; AREA_BYTES]).unwrap();
            let sges = to.mr.sge(0, AREA_BYTES as u32).into();
            to.qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
            from.post(Operation::Send { imm: None }, whole);
            from.done();
            to.done();
            assert!(to.bytes() == bytes, "sent bytes differ");
            assert!(from.has_canaries() && to.has_canaries());
        }
    }

    fn device(&self) -> &Device {
        &self.victim.device
    }

    /// Returns the number of the victim's links to peers other than the honest one.
    fn others(&self) -> usize {
        links_but_to(self.device(), self.other.device.address())
    }
}

/// A process that has a slot, but no engine.
struct Forger {
    address: IpAddr,
    slot: u8,
    listener: OwnedFd,
}

struct Forged {
    socket: OwnedFd,
    segment: Arc<Segment>,
    file: OwnedFd,
    doorbell: OwnedFd,
}

fn doorbells() -> [OwnedFd; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    [a, b]
}

impl Forger {
    fn new(address: [u8; 4], slot: u8) -> Forger {
        let address = IpAddr::from(address);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let name = format!("rdmux-4791-{address}-slot-{slot}");
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&listener, &name).unwrap();
        rustix::net::listen(&listener, BACKLOG).unwrap();
        Forger {
            address,
            slot,
            listener,
        }
    }

    fn qpn(&self) -> Qpn {
        Qpn::new(u32::from(self.slot) << 16 | 9)
    }

    /// Returns a connection on which nothing has been sent.
    fn reach(victim: &Device) -> OwnedFd {
        let mut socket = None;
        until("a connection", || {
            socket = connect_slot(victim.address(), slot(victim)).ok();
            socket.is_some()
        });
        socket.unwrap()
    }

    fn hello(&self) -> LinkMessage {
        LinkMessage::Hello {
            address: self.address,
            slot: self.slot,
        }
    }

    /// Returns a link that the victim accepts.
    fn link(&self, victim: &Device) -> Forged {
        // Drop connections to the forger's name: nobody answers them.
        while rustix::net::accept(&self.listener).is_ok() {}
        let [doorbell, theirs] = doorbells();
        let socket = Forger::reach(victim);
        let (segment, file) = Segment::create().unwrap();
        say(&socket, &self.hello(), &[file.as_fd(), theirs.as_fd()]).unwrap();
        let forged = Forged {
            socket,
            segment,
            file,
            doorbell,
        };
        assert_eq!(forged.hear(), Some(LinkMessage::Welcome));
        forged
    }

    /// Returns a queue pair of the victim that is connected to the forger.
    fn queue_pair(&self, victim: &Device) -> HonestEnd {
        let end = HonestEnd::new(victim);
        connect(victim, &end.qp, (self.address, self.qpn()));
        end
    }
}

impl Forged {
    /// Returns the next message of the victim; `None` if it has ended the link.
    fn hear(&self) -> Option<LinkMessage> {
        let mut buffer = [0; message::LEN_MAX];
        let mut heard = None;
        until("a message", || {
            match receive_with_descriptors(&self.socket, &mut buffer) {
                Err(Errno::AGAIN) => false,
                Err(_) | Ok((0, _)) => true,
                Ok((len, _)) => {
                    heard = LinkMessage::decode(&buffer[..len]);
                    true
                }
            }
        });
        heard
    }

    fn say(&self, message: &LinkMessage) {
        say(&self.socket, message, &[]).unwrap();
    }
}

/// Returns a file of `bytes` bytes.
fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn receive__anything_in_the_segment() {
    let mut honest = Honest::new([127, 0, 1, 111], [127, 0, 1, 112]);
    let forger = Forger::new([127, 0, 1, 113], 3);
    let end = forger.queue_pair(honest.device());
    let mut random = random();
    let mut ended = 0;
    for round in 0..60 {
        let forged = forger.link(honest.device());
        let len = Segment::bytes();
        let whole = Mapping::of_sealed_file(&forged.file, 0, len, true).unwrap();
        let stop = AtomicBool::new(false);
        let seed = random.next();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random(seed);
                // Writes everything, or here and there, or bytes that look like records.
                while !stop.load(Ordering::Relaxed) {
                    match round % 3 {
                        0 => whole.copy_in(0, &random.bytes(len)).unwrap(),
                        1 => {
                            let at = random.below(len as u64 - 64);
                            let bytes = 1 + random.below(64) as usize;
                            whole.copy_in(at, &random.bytes(bytes)).unwrap();
                        }
                        _ => {
                            let mut ring = Producer::new(forged.segment.ring(Side::Asking));
                            loop {
                                let bytes = 1 + random.below(4096) as usize;
                                let bytes = random.bytes(bytes);
                                let segment_bytes = 64 + random.below(4096) as u16;
                                let meta = Meta {
                                    segment_bytes,
                                    traffic_class: 0,
                                };
                                let pushed = ring.push(meta, &bytes);
                                let _ = rustix::net::send(&forged.doorbell, &[0], SendFlags::DONTWAIT);
                                if pushed.is_err() || stop.load(Ordering::Relaxed) {
                                    break;
                                }
                            }
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    let _ = rustix::net::send(&forged.doorbell, &[0], SendFlags::DONTWAIT);
                }
            });
            for _ in 0..8 {
                let whole: SgeList = end.mr.sge(0, AREA_BYTES as u32).into();
                let write = Operation::Write {
                    va: 0,
                    rkey: end.mr.rkey(),
                    imm: None,
                };
                let request = SendRequest {
                    wr_id: 3,
                    operation: write,
                    sges: whole,
                    flags: WrFlags::SIGNALED,
                    to: Target::Connected,
                };
                // The queue refuses requests once it is full.
                let _ = end.qp.post_send(request);
                honest.check();
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(end.has_canaries());
        ended += usize::from(end.qp.carrier() != Some(Carrier::SharedMemory));
        drop(forged);
        until("the end of the link", || honest.others() == 0);
    }
    assert!(honest.have_link());
    assert!(ended > 0, "nonsense was never noticed");
}

#[test]
fn part__of_a_peer_that_goes_on_sending() {
    let mut honest = Honest::new([127, 0, 1, 114], [127, 0, 1, 115]);
    let forger = Forger::new([127, 0, 1, 116], 3);
    let forged = forger.link(honest.device());
    let Forged {
        socket,
        segment,
        doorbell,
        ..
    } = forged;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // A ring without end: records that were never taken are overwritten.
            let meta = Meta {
                segment_bytes: 64,
                traffic_class: 0,
            };
            let area = segment.ring(Side::Asking);
            let mut ring = Producer::new(segment.ring(Side::Asking));
            let mut position = 0u32;
            while !stop.load(Ordering::Relaxed) {
                area.store(Word::Head, position, Ordering::Release);
                assert!(ring.push(meta, &[0; 40]).is_ok(), "room was made");
                position = position.wrapping_add(1);
                let _ = rustix::net::send(&doorbell, &[0], SendFlags::DONTWAIT);
            }
        });
        drop(socket);
        until("the end of the link", || honest.others() == 0);
        honest.check();
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn hear__anything_in_messages() {
    let mut honest = Honest::new([127, 0, 1, 117], [127, 0, 1, 118]);
    let forger = Forger::new([127, 0, 1, 119], 3);
    let end = forger.queue_pair(honest.device());
    let mut random = random();
    for round in 0..300 {
        let [doorbell, theirs] = doorbells();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let unsealed = file(1 << 20, SealFlags::empty());
        let short = file(4096, SealFlags::SHRINK);
        let sealed = file(16 << 20, SealFlags::SHRINK);
        let folder = OwnedFd::from(std::fs::File::open("/").unwrap());
        let files = [&doorbell, &theirs, &pipe, &unsealed, &short, &sealed, &folder];
        let linked = (round % 2 == 0).then(|| forger.link(honest.device()));
        let fresh = linked.is_none().then(|| Forger::reach(honest.device()));
        let socket = linked
            .as_ref()
            .map_or_else(|| fresh.as_ref().unwrap(), |l| &l.socket);
        for _ in 0..20 {
            let (rkey, by, of) = (end.mr.rkey(), forger.qpn(), end.qp.qpn());
            let message = match random.below(12) {
                8 => LinkMessage::Lent {
                    index: random.next() as u32,
                    generation: random.next() as u32,
                    accepts: true,
                },
                kind @ (9..) => LinkMessage::Lend(Offer {
                    gate: random.next(),
                    left: random.next(),
                    pages: (random.next() % 4 * 4096, random.next() % 4 * 4096),
                    calls: random.next() % 3,
                    rkey,
                    by: of,
                    index: random.next() as u32 % if kind == 9 { 8 } else { u32::MAX },
                    generation: random.next() as u32,
                    access: Access::REMOTE_READ,
                    iova: random.next(),
                    length: random.next() >> random.below(64),
                    offset: random.next() >> random.below(64),
                }),
                0 => forger.hello(),
                1 => LinkMessage::Welcome,
                2 | 3 => LinkMessage::Ask { rkey, of, by },
                4 => LinkMessage::Denied {
                    rkey,
                    by: of,
                    reason: Refusal::Full,
                },
                5 => LinkMessage::Refused(Refusal::Off),
                _ => LinkMessage::Granted(Offer {
                    gate: 0,
                    left: 0,
                    pages: (random.next() % 4 * 4096, random.next() % 4 * 4096),
                    calls: random.next() % 3,
                    rkey,
                    by: of,
                    index: random.next() as u32,
                    generation: random.next() as u32,
                    access: Access::REMOTE_WRITE,
                    iova: random.next(),
                    length: random.next() >> random.below(64),
                    offset: random.next() >> random.below(64),
                }),
            };
            let mut bytes = message.encode();
            match random.below(6) {
                0 => bytes.truncate(random.below(bytes.len() as u64) as usize + 1),
                1 => {
                    let more = random.below(9000) as usize;
                    bytes.extend(random.bytes(more));
                }
                2 => {
                    let at = random.below(bytes.len() as u64) as usize;
                    bytes[at] = random.next() as u8;
                }
                3 => bytes = random.bytes(40),
                _ => {}
            }
            let count = random.below(4).min(random.below(4)) as usize;
            let mut with: Vec<BorrowedFd<'_>> = (0..count)
                .map(|_| files[random.below(files.len() as u64) as usize].as_fd())
                .collect();
            if random.below(10) == 0 {
                with.push(socket.as_fd());
            }
            if send_bytes(socket, &bytes, &with).is_err() {
                break;
            }
        }
        // Truncated after it was given.
        let _ = ftruncate(&unsealed, 0);
        let _ = ftruncate(&sealed, 0);
        if round % 10 == 0 {
            honest.check();
        }
    }
    until("the end of the links", || honest.others() == 0);
    assert!(honest.have_link() && end.has_canaries());
}

/// Requests that name memory which the peer has lent, has lent otherwise, or has not lent; some of it is cut off, so that it faults.
#[test]
fn take__requests_that_name_anything() {
    let mut honest = Honest::new([127, 0, 1, 108], [127, 0, 1, 109]);
    let forger = Forger::new([127, 0, 1, 110], 3);
    let mut random = random();
    for _ in 0..40 {
        let end = forger.queue_pair(honest.device());
        let forged = forger.link(honest.device());
        for index in 0..4 {
            let bytes = 1 << 20;
            let memory = file(bytes, SealFlags::SHRINK);
            let offer = Offer {
                gate: 0,
                left: 0,
                pages: (0, 0),
                calls: 0,
                rkey: RKey(0),
                by: end.qp.qpn(),
                index,
                generation: index + 1,
                access: Access::REMOTE_READ,
                iova: 0,
                length: bytes >> (index % 2),
                offset: 0,
            };
            let word = forged.segment.grant(Side::Asking, index);
            word.store(if index == 3 { 77 } else { index + 1 }, Ordering::Release);
            send_bytes(
                &forged.socket,
                &LinkMessage::Lend(offer).encode(),
                &[memory.as_fd()],
            )
            .unwrap();
            let answer = forged.hear();
            assert!(
                matches!(answer, Some(LinkMessage::Lent { accepts: true, .. })),
                "{answer:?}"
            );
        }
        let mut ring = Producer::new(forged.segment.ring(Side::Asking));
        let ticket = Ticket {
            qpn: forger.qpn(),
            end: Psn::new(0),
            incarnation: 0,
        };
        for psn in 0..40 {
            let request = RecvRequest {
                wr_id: 0,
                sges: end.mr.sge(0, AREA_BYTES as u32).into(),
            };
            end.qp.post_recv(request).unwrap();
            let count = random.below(5) as usize;
            let mut bytes = Vec::new();
            for _ in 0..count {
                let index = random.below(5) as u32;
                bytes.extend(index.to_ne_bytes());
                bytes.extend((index + 1 + u32::from(random.below(8) == 0)).to_ne_bytes());
                bytes.extend((random.next() >> random.below(64)).to_ne_bytes());
                let len = (random.next() as u32) >> random.below(32);
                bytes.extend(u64::from(len % (1 << (4 + random.below(28)))).to_ne_bytes());
            }
            let mut heads = [0; Bth::LEN];
            let operation = Op::of_data(false, Position::Only, false, false);
            let opcode = Opcode {
                transport: Transport::Rc,
                operation,
            };
            Bth::new(opcode, end.qp.qpn(), Psn::new(psn)).emit(&mut heads);
            coalesced::set_count(&mut heads, 1 + random.below(64) as u32);
            bytes.extend(heads);
            let put = ring.request_with_parts(ticket, bytes.len(), count, |area, slot| {
                area.write(slot, &bytes);
                true
            });
            let _ = rustix::net::send(&forged.doorbell, &[0], SendFlags::DONTWAIT);
            if put.is_err() || ring.look_for_ends().is_err() {
                break;
            }
            while end.cq.poll().is_some() {}
        }
        honest.check();
        assert!(end.has_canaries());
        drop(forged);
        until("the end of the link", || honest.others() == 0);
    }
    assert!(honest.have_link());
    let copied = honest.device().counters().rcvd_pkts_named;
    assert!(copied > 0, "none was right");
}

#[test]
fn hear__nonsense_ends_the_link_and_no_connection() {
    let mut honest = Honest::new([127, 0, 1, 120], [127, 0, 1, 121]);
    let [a, b] = [&honest.victim.device, &honest.other.device];
    let [x, y] = [a, b].map(|device| {
        let qp = device
            .alloc_pd()
            .unwrap()
            .create_qp(&QpOptions::new(&honest.victim.cq));
        (device.clone(), qp)
    });
    // The two ends of a connection that connection management knows.
    let (pd, cq) = (y.0.alloc_pd().unwrap(), y.0.create_cq(16).unwrap());
    let listener = y.0.listen(7174).unwrap();
    let params = ConnectParams::default();
    let asking = x.1.unwrap();
    let (asking, asked) = thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
            let request = listener.accept(LONG).unwrap();
            let connection = request.accept(&qp, &params, &[]).unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = std::net::SocketAddr::new(y.0.address(), 7174);
        let connection = x.0.connect(&asking, peer, &params, &[]).unwrap();
        (connection, accepting.join().unwrap())
    });
    // Each side may have asked the other, so there may be two links.
    let garbage = [&[0xff; 20][..], &[0; 200]];
    let mut turn = garbage.iter().cycle();
    until("the end of the links", || {
        for link in &b.engine().lock().links.list {
            let _ = send_bytes(&link.socket, turn.next().unwrap(), &[]);
        }
        links(a) + links(b) == 0
    });
    assert!(!asking.is_ended() && !asked.is_ended());
    honest.check();
}

#[test]
fn answer_doorbells__of_no_use() {
    let mut honest = Honest::new([127, 0, 1, 122], [127, 0, 1, 123]);
    let forger = Forger::new([127, 0, 1, 124], 3);
    let (segment, file) = Segment::create().unwrap();
    let ready = || {
        let core = honest.victim.device.engine().lock();
        let mut fds = [PollFd::new(&core.links.doorbells, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    };
    // The victim refuses descriptors that are no doorbells.
    let (pipe, other) = rustix::pipe::pipe().unwrap();
    let stream = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    for no_doorbell in [&pipe, &other, &stream.0] {
        let socket = Forger::reach(honest.device());
        say(&socket, &forger.hello(), &[file.as_fd(), no_doorbell.as_fd()]).unwrap();
        let forged = Forged {
            socket,
            segment: Arc::clone(&segment),
            file: file.try_clone().unwrap(),
            doorbell: other.try_clone().unwrap(),
        };
        assert_ne!(forged.hear(), Some(LinkMessage::Welcome));
    }
    drop(other);
    until("peace", || !ready());
    // The victim does not keep looking at a doorbell that has ended, or that the peer keeps beyond the link's end.
    for kept in [false, true] {
        let [doorbell, theirs] = doorbells();
        let socket = Forger::reach(honest.device());
        say(&socket, &forger.hello(), &[file.as_fd(), theirs.as_fd()]).unwrap();
        let forged = Forged {
            socket,
            segment: Arc::clone(&segment),
            file: file.try_clone().unwrap(),
            doorbell: doorbell.try_clone().unwrap(),
        };
        assert_eq!(forged.hear(), Some(LinkMessage::Welcome));
        if kept {
            drop(forged);
            until("the end of the link", || honest.others() == 0);
            let _ = rustix::net::send(&doorbell, &[0], SendFlags::DONTWAIT);
            until("peace", || !ready());
        } else {
            drop((forged.doorbell, doorbell, theirs));
            until("peace", || !ready());
        }
    }
    honest.check();
}

#[test]
fn answer_doorbells__without_end() {
    let mut honest = Honest::new([127, 0, 1, 125], [127, 0, 1, 126]);
    let forger = Forger::new([127, 0, 1, 127], 3);
    let forged = forger.link(honest.device());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = rustix::net::send(&forged.doorbell, &[0], SendFlags::DONTWAIT);
                }
            });
        }
        for _ in 0..20 {
            honest.check();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn ask__ten_thousand_times_and_read_nothing() {
    let mut honest = Honest::new([127, 0, 1, 128], [127, 0, 1, 129]);
    let forger = Forger::new([127, 0, 1, 130], 3);
    let end = forger.queue_pair(honest.device());
    let forged = forger.link(honest.device());
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let (rkey, of, by) = (end.mr.rkey(), end.qp.qpn(), forger.qpn());
    for i in 0..10_000 {
        let asked = say(&forged.socket, &LinkMessage::Ask { rkey, of, by }, &[]);
        if asked == Err(Errno::PIPE) || asked == Err(Errno::CONNRESET) {
            break;
        }
        if i % 1000 == 0 {
            honest.check();
        }
    }
    honest.check();
    let core = honest.device().engine().lock();
    let given = core.links.list.iter().filter_map(|link| match &link.state {
        LinkState::Up(channel) if link.peer == Some((forger.address, forger.slot)) => {
            Some(channel.grant_words())
        }
        _ => None,
    });
    assert!(given.sum::<usize>() <= 1, "what is granted is not granted again");
    drop(core);
    // Other tests of this process have descriptors of their own.
    assert!(descriptors() < before + 200);
    assert!(honest.have_link());
}

/// Place by which a forged peer enters grants.
const PLACE: u32 = 9;

/// A queue pair of an honest device whose peer is forged, and has a grant of the device's region.
struct GrantedTo {
    qp: QueuePair,
    link: Forged,
    granted: Offer,
    /// The entry, as a writing peer has it.
    entry: u32,
}

impl GrantedTo {
    fn new(forger: &Forger, end: &HonestEnd) -> GrantedTo {
        let qp = end.qp.pd().create_qp(&QpOptions::new(&end.cq)).unwrap();
        connect(&end.device, &qp, (forger.address, forger.qpn()));
        let link = forger.link(&end.device);
        let (rkey, of, by) = (end.mr.rkey(), qp.qpn(), forger.qpn());
        link.say(&LinkMessage::Ask { rkey, of, by });
        let Some(LinkMessage::Granted(granted)) = link.hear() else {
            panic!("it is granted")
        };
        let mut granted_to = GrantedTo {
            qp,
            link,
            granted,
            entry: 0,
        };
        granted_to.entry = granted_to.enter().unwrap();
        granted_to
    }

    fn words(&self) -> GrantWords<'_> {
        GrantWords {
            segment: &self.link.segment,
            holder: Side::Asking,
        }
    }

    fn enter(&self) -> Option<u32> {
        revocation::enter(&self.words(), PLACE, self.granted.index, self.granted.generation)
    }

    /// Makes a call as the peer does once it has entered.
    fn call(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let passage = Passage {
            gate: self.granted.gate + 64 * u64::from(PLACE),
            left: self.granted.left + 128 * u64::from(PLACE),
            entry: self.entry,
        };
        let pid = std::process::id().cast_signed();
        // SAFETY: the tests' memory, which they read by copies alone.
        unsafe { Mapping::write_process(pid, address, bytes, Order::LastWordLast, Some(passage)) }
    }

    /// Returns whether the owner has revoked the grant.
    fn has_ended(&self) -> bool {
        self.words().grant(self.granted.index, Ordering::Acquire) == 0
    }

    fn stays(&self, device: &Device) -> usize {
        device.engine().lock().links.stays_of_qp(self.qp.qpn()).len()
    }
}

/// Returns an end whose memory peers reach by calls, where the system permits that.
fn end_by_calls(device: &Device) -> HonestEnd {
    let mut end = HonestEnd::new(device);
    end.memory = Arc::new(AnonymousMemory::new(3 * AREA_BYTES).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let (offset, length) = (AREA_BYTES as u64, AREA_BYTES as u64);
    let pd = end.qp.pd();
    end.mr = pd.reg_mr(end.memory.clone(), offset, length, 0, access).unwrap();
    end
}

#[test]
fn revoke__of_peers_stopped_before_they_write() {
    if !allows_calls_into_processes() {
        return skip("calls into processes are refused");
    }
    let mut honest = Honest::new([127, 0, 1, 131], [127, 0, 1, 132]);
    let forgers: Vec<Forger> = (3..9).map(|slot| Forger::new([127, 0, 1, 133], slot)).collect();
    let end = end_by_calls(honest.device());
    let granted: Vec<GrantedTo> = forgers
        .iter()
        .map(|forger| GrantedTo::new(forger, &end))
        .collect();
    let HonestEnd { mr, memory, .. } = end;
    // The peers have entered and copy nothing yet: the deregistration does not wait for them.
    drop(mr);
    for peer in &granted {
        assert!(peer.has_ended());
        // The peers go on.
        for bytes in [1, 8, 5000] {
            assert_eq!(peer.call(memory.address(), &vec![1; bytes]), Err(Fault::Unmapped));
        }
        assert_eq!(peer.enter(), None);
        assert_eq!(peer.qp.carrier(), Some(Carrier::SharedMemory), "the link stands");
    }
    let mut bytes = vec![1; 3 * AREA_BYTES];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    honest.check();
    // The gate is open again to who is granted something new.
    let end = end_by_calls(honest.device());
    let peer = &granted[0];
    let (rkey, of, by) = (end.mr.rkey(), peer.qp.qpn(), forgers[0].qpn());
    peer.link.say(&LinkMessage::Ask { rkey, of, by });
    assert!(
        matches!(peer.link.hear(), Some(LinkMessage::Denied { .. })),
        "another domain's"
    );
}

/// Deregisters while a peer is inside, which leaves when `leave` is called; meanwhile others go on.
fn revoke_while_inside(honest: &mut Honest, end: HonestEnd, peer: &GrantedTo, leave: impl FnOnce()) {
    let device = honest.device().clone();
    let over = AtomicBool::new(false);
    let HonestEnd { mr, .. } = end;
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(mr);
            over.store(true, Ordering::SeqCst);
        });
        until("the end of the grant", || peer.has_ended());
        for _ in 0..3 {
            honest.check();
        }
        assert_eq!(peer.stays(&device), 1);
        assert!(!over.load(Ordering::SeqCst), "the peer may still write");
        leave();
    });
    honest.check();
}

#[test]
fn revoke__waits_for_a_call_under_way() {
    if !allows_calls_into_processes() {
        return skip("calls into processes are refused");
    }
    let mut honest = Honest::new([127, 0, 1, 142], [127, 0, 1, 143]);
    let forger = Forger::new([127, 0, 1, 144], 3);
    let end = end_by_calls(honest.device());
    let peer = GrantedTo::new(&forger, &end);
    // The call has passed the gate, and has not signalled its end.
    peer.call(1, &[1]).unwrap_err();
    revoke_while_inside(&mut honest, end, &peer, || {
        peer.link
            .segment
            .left(Side::Asking, PLACE)
            .store(peer.entry, Ordering::SeqCst);
    });
}

#[test]
fn revoke__waits_for_who_has_mapped_the_memory() {
    let mut honest = Honest::new([127, 0, 1, 145], [127, 0, 1, 146]);
    let forger = Forger::new([127, 0, 1, 147], 3);
    let end = HonestEnd::new(honest.device());
    let peer = GrantedTo::new(&forger, &end);
    revoke_while_inside(&mut honest, end, &peer, || {
        revocation::leave(&peer.words(), PLACE, peer.entry)
    });
}

#[test]
fn revoke__waits_for_a_peer_whose_link_has_ended() {
    let mut honest = Honest::new([127, 0, 1, 148], [127, 0, 1, 149]);
    let forger = Forger::new([127, 0, 1, 150], 3);
    let end = HonestEnd::new(honest.device());
    let peer = GrantedTo::new(&forger, &end);
    peer.link.say(&LinkMessage::Over);
    until("the end of the link", || honest.others() == 0);
    revoke_while_inside(&mut honest, end, &peer, || {
        revocation::leave(&peer.words(), PLACE, peer.entry)
    });
}

/// A stopped peer is inside for as long as it is stopped.
#[test]
fn cut_off__ends_the_grants_of_peers_without_waiting_for_one_that_is_inside() {
    let mut honest = Honest::new([127, 0, 1, 181], [127, 0, 1, 182]);
    let forger = Forger::new([127, 0, 1, 183], 3);
    let end = HonestEnd::new(honest.device());
    let peer = GrantedTo::new(&forger, &end);
    assert!(peer.qp.cut_off(), "the peer is inside");
    assert!(peer.has_ended());
    assert_eq!(peer.stays(honest.device()), 1);
    honest.check();
    // The peer goes on.
    revocation::leave(&peer.words(), PLACE, peer.entry);
    assert!(!peer.qp.cut_off());
    assert_eq!(peer.enter(), None);
}

/// Asks for a region, and returns the grant.
fn ask_for(peer: &GrantedTo, forger: &Forger, rkey: RKey) -> Offer {
    let (of, by) = (peer.qp.qpn(), forger.qpn());
    peer.link.say(&LinkMessage::Ask { rkey, of, by });
    match peer.link.hear() {
        Some(LinkMessage::Granted(granted)) => granted,
        other => panic!("{other:?}"),
    }
}

/// A peer with grants of two regions through one gate, and a third region to ask for.
struct ByOneGate {
    honest: Honest,
    forger: Forger,
    end: HonestEnd,
    second: MemoryRegion,
    third: MemoryRegion,
    /// The peer is inside of the region of `end`.
    peer: GrantedTo,
    /// The grant of `second`.
    granted: Offer,
}

impl ByOneGate {
    fn new(hosts: [u8; 3]) -> ByOneGate {
        let [own, other, forging] = hosts.map(|host| [127, 0, 1, host]);
        let honest = Honest::new(own, other);
        let forger = Forger::new(forging, 3);
        let end = end_by_calls(honest.device());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = |offset| {
            end.qp
                .pd()
                .reg_mr(end.memory.clone(), offset, 4096, 0, access)
                .unwrap()
        };
        let (second, third) = (region(0), region(4096));
        let peer = GrantedTo::new(&forger, &end);
        let granted = ask_for(&peer, &forger, second.rkey());
        assert_eq!(granted.gate, peer.granted.gate);
        ByOneGate {
            honest,
            forger,
            end,
            second,
            third,
            peer,
            granted,
        }
    }
}

/// A gate that was closed for one region still serves the regions that were granted through it.
#[test]
fn revoke__through_a_gate_that_the_link_uses_no_more() {
    if !allows_calls_into_processes() {
        return skip("calls into processes are refused");
    }
    let ByOneGate {
        honest,
        forger,
        end,
        second,
        third,
        mut peer,
        granted,
    } = ByOneGate::new([159, 160, 161]);
    // The peer is inside of the first region, which is revoked. It leaves, and is in a call to the second before the gate is closed.
    let revoke = |mr: &MemoryRegion| honest.device().engine().lock().links.revoke_region(mr.lkey());
    let stays = revoke(&end.mr);
    assert_eq!(stays.len(), 1);
    revocation::leave(&peer.words(), PLACE, peer.entry);
    peer.granted = granted;
    peer.entry = peer.enter().unwrap();
    peer.call(1, &[1]).unwrap_err();
    stays[0].close_gate();
    // The link uses another gate for later grants.
    assert_ne!(ask_for(&peer, &forger, third.rkey()).gate, granted.gate);
    let stays = revoke(&second);
    assert_eq!(stays.len(), 1);
    assert!(!stays[0].is_over(), "the call is under way");
    peer.link
        .segment
        .left(Side::Asking, PLACE)
        .store(peer.entry, Ordering::SeqCst);
    until("the end of the call", || stays[0].is_over());
}

/// Nothing else gets the address of a closed gate while a grant names it.
#[test]
fn revoke__keeps_the_address_of_a_closed_gate() {
    if !allows_calls_into_processes() {
        return skip("calls into processes are refused");
    }
    let ByOneGate {
        honest,
        forger,
        end,
        second,
        third,
        mut peer,
        granted,
    } = ByOneGate::new([162, 163, 164]);
    // Deregisters the region while the peer is inside; the peer then leaves.
    let HonestEnd { mr, memory, .. } = end;
    drop(mr);
    ask_for(&peer, &forger, third.rkey());
    revocation::leave(&peer.words(), PLACE, peer.entry);
    drop(third);
    assert_eq!(peer.stays(honest.device()), 0);
    let pages: Vec<Mapping> = (0..1024).map(|_| Mapping::anonymous(4096).unwrap()).collect();
    assert!(pages.iter().all(|page| page.address() != granted.gate));
    // The second region keeps its grant, through the closed gate.
    peer.granted = granted;
    peer.entry = peer.enter().unwrap();
    assert_eq!(peer.call(memory.address(), &[1]), Err(Fault::Unmapped));
    revocation::leave(&peer.words(), PLACE, peer.entry);
    // A new grant of the region goes through the open gate.
    peer.granted = ask_for(&peer, &forger, second.rkey());
    peer.entry = peer.enter().unwrap();
    assert_eq!(peer.call(memory.address(), &[1]), Ok(()));
}

/// A grant index that is used again gets another generation.
#[test]
fn grant__generations_differ() {
    let honest = Honest::new([127, 0, 1, 151], [127, 0, 1, 152]);
    let forger = Forger::new([127, 0, 1, 153], 3);
    let end = HonestEnd::new(honest.device());
    let first = GrantedTo::new(&forger, &end);
    revocation::leave(&first.words(), PLACE, first.entry);
    let pd = end.qp.pd();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let second = pd.reg_mr(end.memory.clone(), 0, 4096, 0, access).unwrap();
    drop(end.mr);
    let (rkey, of, by) = (second.rkey(), first.qp.qpn(), forger.qpn());
    first.link.say(&LinkMessage::Ask { rkey, of, by });
    let Some(LinkMessage::Granted(granted)) = first.link.hear() else {
        panic!("it is granted")
    };
    assert_eq!(granted.index, first.granted.index, "the place is used again");
    assert_ne!(granted.generation, first.granted.generation);
    assert_eq!(first.enter(), None);
}

/// A peer that wrote directly to a region cannot do so after the region was registered anew with fewer rights.
#[test]
fn rereg__takes_back_what_was_granted() {
    let mut honest = Honest::new([127, 0, 1, 154], [127, 0, 1, 155]);
    let writes = |honest: &Honest| {
        let (from, to) = (&honest.victim, &honest.other);
        let (va, rkey) = (to.mr.iova(), to.mr.rkey());
        from.post(Operation::Write { va, rkey, imm: None }, from.mr.sge(0, 8).into());
        from.cq.wait(LONG).unwrap().expect("a completion").status
    };
    until("a direct request", || {
        assert_eq!(writes(&honest), Status::Success);
        honest.device().counters().direct_requests > 0
    });
    let other = &mut honest.other;
    other.memory.write(AREA_BYTES as u64, &[3; 8]).unwrap();
    let (memory, at) = (other.memory.clone(), AREA_BYTES as u64);
    let read_only = Access::LOCAL_WRITE | Access::REMOTE_READ;
    other.mr.rereg(memory, at, at, 0, read_only).unwrap();
    assert_eq!(writes(&honest), Status::RemoteAccess);
    assert_eq!(honest.other.bytes()[..8], [3; 8]);
}

#[test]
fn granted__by_somebody_else() {
    let honest = Honest::new([127, 0, 1, 134], [127, 0, 1, 135]);
    let forger = Forger::new([127, 0, 1, 136], 3);
    let forged = forger.link(honest.device());
    // The first WRITE asks for a grant, and goes by packets. The test forges the answer before the next WRITE.
    let (victim, other) = (&honest.victim, &honest.other);
    let (va, rkey) = (other.mr.iova(), other.mr.rkey());
    let memory = file(1 << 20, SealFlags::SHRINK);
    forged.segment.grant(Side::Asking, 7).store(5, Ordering::SeqCst);
    let granted = LinkMessage::Granted(Offer {
        rkey,
        by: victim.qp.qpn(),
        index: 7,
        generation: 5,
        access: Access::REMOTE_WRITE,
        iova: va,
        length: AREA_BYTES as u64,
        offset: 0,
        gate: 0,
        left: 0,
        pages: (0, 0),
        calls: 0,
    });
    victim.memory.write(AREA_BYTES as u64, &[7; AREA_BYTES]).unwrap();
    for round in 0..50 {
        let whole = victim.mr.sge(0, AREA_BYTES as u32).into();
        victim.post(Operation::Write { va, rkey, imm: None }, whole);
        victim.done();
        assert!(other.bytes() == [7; AREA_BYTES], "round {round}");
        other.memory.write(AREA_BYTES as u64, &[0; AREA_BYTES]).unwrap();
        if say(&forged.socket, &granted, &[memory.as_fd()]).is_err() {
            break;
        }
        // The victim has processed the grant once it answers the message after it.
        let (of, by) = (victim.qp.qpn(), forger.qpn());
        forged.say(&LinkMessage::Ask { rkey, of, by });
        assert!(matches!(forged.hear(), Some(LinkMessage::Denied { .. })));
    }
}

/// The accepting side is in RTS at once, and sends by a link that is up: its SEND may arrive before its peer is in RTR.
#[test]
fn accept__and_speak_first() {
    let honest = Honest::new([127, 0, 1, 173], [127, 0, 1, 174]);
    let [server, client] = [&honest.victim.device, &honest.other.device];
    let listener = server.listen(7333).unwrap();
    let queue_pair = |device: &Device| {
        let cq = device.create_cq(16).unwrap();
        let pd = device.alloc_pd().unwrap();
        (pd.create_qp(&QpOptions::new(&cq)).unwrap(), cq)
    };
    // 69 s: a request that waits for the timer waits too long.
    let params = ConnectParams {
        ack_timeout: Some(24),
        ..ConnectParams::default()
    };
    for _ in 0..50 {
        let ((speaks, cq), (hears, _cq)) = (queue_pair(server), queue_pair(client));
        hears.init().unwrap();
        let sges = SgeList::EMPTY;
        hears.post_recv(RecvRequest { wr_id: 1, sges }).unwrap();
        thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                let to = (server.address(), 7333).into();
                client.connect(&hears, to, &ConnectParams::default(), b"")
            });
            let request = listener.accept(LONG).unwrap();
            let accepted = request.accept(&speaks, &params, b"").unwrap();
            speaks
                .post_send(SendRequest {
                    wr_id: 1,
                    operation: Operation::Send { imm: None },
                    sges: SgeList::EMPTY,
                    flags: WrFlags::SIGNALED,
                    to: Target::Connected,
                })
                .unwrap();
            let wc = cq.wait(LONG).unwrap().expect("the timer is not needed");
            assert_eq!(wc.status, Status::Success);
            drop((connecting.join().unwrap().unwrap(), accepted));
        });
    }
    assert_eq!(server.counters().local_ack_timeout_err, 0);
}

#[test]
fn accept__hundreds_of_connections() {
    let mut honest = Honest::new([127, 0, 1, 137], [127, 0, 1, 138]);
    let silent: Vec<OwnedFd> = (0..300).map(|_| Forger::reach(honest.device())).collect();
    // The first connections have made room for the last.
    until("room", || {
        let mut fds = [PollFd::new(
            &silent[silent.len() - 2 * LINKS_MAX],
            PollFlags::RDHUP,
        )];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    });
    assert!(links(honest.device()) <= LINKS_MAX);
    honest.check();
    // An honest device still finds room.
    let third = HonestEnd::new(&open([127, 0, 1, 139].into()).unwrap());
    let end = HonestEnd::new(honest.device());
    for (end, peer) in [(&third, &end), (&end, &third)] {
        connect(&end.device, &end.qp, (peer.device.address(), peer.qp.qpn()));
    }
    until("a link", || end.qp.carrier() == Some(Carrier::SharedMemory));
    drop(silent);
    drop((third, end));
    until("the end of the others", || honest.others() == 0);
    honest.check();
    assert!(honest.have_link());
}

/// Packets that a peer sent before it died arrive, although the peer rang no doorbell for them.
#[test]
fn part__takes_what_is_in_the_ring() {
    let mut honest = Honest::new([127, 0, 1, 156], [127, 0, 1, 157]);
    let forger = Forger::new([127, 0, 1, 158], 3);
    let meta = Meta {
        segment_bytes: 64,
        traffic_class: 0,
    };
    for _ in 0..20 {
        let forged = forger.link(honest.device());
        // Under the engine's lock, so that the engine finds both at the same time.
        let core = honest.device().engine().lock();
        let before = core.rnic.counters().rcvd_pkts_local;
        let mut ring = Producer::new(forged.segment.ring(Side::Asking));
        for _ in 0..3 {
            let _ = ring.push(meta, &[0; 64]).unwrap();
        }
        drop((forged.socket, forged.doorbell));
        drop(core);
        until("the end of the link", || honest.others() == 0);
        let after = honest.device().counters().rcvd_pkts_local;
        assert_eq!(after - before, 3);
    }
    honest.check();
}

#[test]
fn serve__a_process_whose_socket_outlives_it() {
    let honest = Honest::new([127, 0, 1, 140], [127, 0, 1, 141]);
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    // The test holds the other end, as a forked child would.
    let [socket, _held] = doorbells();
    let mut core = honest.device().engine().lock();
    let pid = process.id() as i32;
    let other = Process::of(pid, socket.as_fd());
    core.links
        .add(socket, pid, other, None, LinkState::Unknown)
        .unwrap();
    let its = core.links.list.last().unwrap().process.clone().unwrap();
    drop(core);
    assert!(its.lives());
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(!its.lives());
    until("the end of the link", || honest.others() == 0);
    until("a process that is not reached", || {
        its.read(1 << 20, &mut [0]) == Err(Fault::Unmapped)
    });
}
