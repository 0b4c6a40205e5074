//! Checks the column `rdmux` of the table in docs/features.md: each cell is what devices show over UDP, and over shared memory.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{End, LONG, RIGHTS, shareable};
use rdmux_memory::{AnonymousMemory, FileMemory, PersistenceDomain};
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use skip::skip;

const QKEY: u32 = RDMA_UDP_QKEY;
const BYTES: usize = 64 << 10;
const YES: &str = "yes";
const NO: &str = "no";

/// Check of a row: returns the cell that it found for rdmux.
type Check = fn(&Bed) -> String;

const CHECKS: [(&str, Check); 41] = [
    ("RC", |bed| works(&bed.pair(QpType::Rc))),
    ("UC", |bed| works(&bed.pair(QpType::Uc))),
    ("UD", |bed| works(&bed.pair(QpType::Ud))),
    ("XRC", |bed| works(&bed.pair(QpType::XrcSend))),
    ("raw packets, DC", |_| other_transports()),
    ("SEND with immediate data", send_imm),
    ("SEND with invalidate", send_invalidate),
    ("RDMA WRITE", |bed| bed.pair(QpType::Rc).does(write)),
    ("RDMA WRITE with immediate data", write_imm),
    ("RDMA READ", |bed| bed.pair(QpType::Rc).does(read)),
    ("atomics, 64 bits", atomics),
    ("ATOMIC WRITE", |bed| bed.pair(QpType::Rc).does(atomic_write)),
    ("FLUSH to global visibility", flush_global),
    ("FLUSH to persistence", flush_persistent),
    ("RDMA WRITE on UC", |bed| bed.pair(QpType::Uc).does(write)),
    ("RDMA READ, atomics, FLUSH on UC", only_reliable),
    ("RDMA WRITE on UD", |bed| bed.pair(QpType::Ud).does(write)),
    ("inline data, bytes", inline_bytes),
    ("scatter/gather elements of a request", sges),
    ("longest message, bytes", longest_message),
    ("READs and atomics under way on a QP", reads_under_way),
    ("path MTUs, bytes", path_mtus),
    ("IPv4", |bed| works(&bed.pair(QpType::Rc))),
    ("IPv6", |bed| {
        works(&bed.pair_at(QpType::Rc, [IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]); 2]))
    }),
    ("shared receive queues, limit event, resizing", shared_receives),
    ("memory windows of type 1", window_1),
    ("memory windows of type 2", window_2),
    ("fast registration, local invalidate", fast_registration),
    ("registering without pinning", unpinned),
    ("multicast", multicast),
    ("send queue drained (SQD)", drained),
    ("rate limit of a QP", rate_limit),
    ("solicited events", solicited),
    ("event of a completion queue that overran", overrun),
    ("resizing of completion queues", cq_resized),
    ("moderation of completion queues", cq_moderated),
    ("times of completions", cq_times),
    ("retransmission", retransmission),
    ("congestion control", congestion),
    ("traffic classes", |_| sched::CLASSES.to_string()),
    ("services by SIDR", sidr),
];

/// One carrier, and addresses that no other test has.
struct Bed {
    shared_memory: SharedMemory,
    net: u8,
    host: Cell<u8>,
}

/// Two ends, brought up: by CM if the transport has connections.
struct Pair {
    a: End,
    b: End,
    /// Queue of an XRC target.
    xrc_srq: Option<SharedReceiveQueue>,
    to: Target,
    _connections: Option<[Connection; 2]>,
}

impl Bed {
    /// Returns a port of the bed's own: the tests that run beside each other share `::1`.
    fn port(&self) -> u16 {
        7000 + u16::from(self.net)
    }

    fn address(&self) -> IpAddr {
        let host = self.host.get();
        self.host.set(host + 1);
        [127, 0, self.net, host].into()
    }

    fn open(&self, address: IpAddr, faults: Option<faults::Spec>) -> Device {
        let options = Options {
            shared_memory: self.shared_memory,
            faults,
            ..Options::default()
        };
        common::open_with(address, options).unwrap()
    }

    fn pair(&self, qp_type: QpType) -> Pair {
        self.pair_at(qp_type, [self.address(), self.address()])
    }

    fn pair_at(&self, qp_type: QpType, at: [IpAddr; 2]) -> Pair {
        let devices = at.map(|address| self.open(address, None));
        self.pair_of(qp_type, devices, &ConnectParams::default())
    }

    fn pair_of(&self, qp_type: QpType, [a, b]: [Device; 2], params: &ConnectParams) -> Pair {
        let a = end(&a, qp_type);
        let (b, xrc_srq) = match qp_type {
            QpType::XrcSend => {
                let (b, srq) = End::xrc_target(&b, shareable(BYTES));
                (b, Some(srq))
            }
            _ => (end(&b, qp_type), None),
        };
        if qp_type == QpType::Ud {
            a.qp.ready_datagram(QKEY).unwrap();
            b.qp.ready_datagram(QKEY).unwrap();
            let to = a
                .device
                .create_ah(b.device.address(), 0)
                .to(b.qp.qpn(), QKEY)
                .unwrap();
            return Pair {
                a,
                b,
                xrc_srq,
                to,
                _connections: None,
            };
        }
        let listener = b.device.listen_for(self.port(), &[b.qp.qp_type()]).unwrap();
        let connections = thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let request = listener.accept(LONG).expect("a request");
                let connection = request.accept(&b.qp, &ConnectParams::default(), &[]).unwrap();
                assert!(connection.wait_established());
                connection
            });
            let peer = SocketAddr::new(b.device.address(), self.port());
            [
                a.device.connect(&a.qp, peer, params, &[]).unwrap(),
                accepted.join().unwrap(),
            ]
        });
        self.wait_for_carrier(&a.qp);
        let to = xrc_srq
            .as_ref()
            .map_or(Target::Connected, |srq| Target::Srq(srq.srqn()));
        Pair {
            a,
            b,
            xrc_srq,
            to,
            _connections: Some(connections),
        }
    }

    /// Waits until packets go as this bed has it.
    fn wait_for_carrier(&self, qp: &QueuePair) {
        let deadline = Instant::now() + LONG;
        let shared = || qp.carrier() == Some(Carrier::SharedMemory);
        while self.shared_memory == SharedMemory::Auto && !shared() {
            assert!(Instant::now() < deadline, "{:?}", qp.carrier());
            thread::yield_now();
        }
        assert_eq!(shared(), self.shared_memory == SharedMemory::Auto);
    }
}

/// Makes an end with memory that a peer may reach by the bed's carrier.
fn end(device: &Device, qp_type: QpType) -> End {
    End::with(device, shareable(BYTES), |_, options| QpOptions {
        qp_type,
        ..options
    })
}

impl End {
    fn event(&self, wanted: impl Fn(&AsyncEvent) -> bool) {
        while !wanted(&self.device.wait_async_event(LONG).expect("the event")) {}
    }

    /// Posts a request and returns the status of its completion.
    fn ends(&self, operation: Operation, sges: SgeList) -> Status {
        self.does(operation, sges).status
    }
}

impl Pair {
    /// Posts a receive of the second end.
    fn receive(&self, wr_id: u64) {
        let sges = self.b.mr.sge(32 << 10, 8 << 10).into();
        let request = RecvRequest { wr_id, sges };
        match &self.xrc_srq {
            Some(srq) => srq.post_recv(request).unwrap(),
            None => self.b.qp.post_recv(request).unwrap(),
        }
    }

    /// Returns whether a request succeeds, or is refused because the transport does not have it.
    fn does(&self, request: fn(&Pair) -> (Operation, SgeList)) -> String {
        let (operation, sges) = request(self);
        match self.a.try_post(operation, sges, self.to) {
            Err(PostError::Invalid) => NO.into(),
            Err(error) => panic!("{error}"),
            Ok(()) => {
                assert_eq!(self.a.wait().status, Status::Success);
                YES.into()
            }
        }
    }

    fn peer(&self) -> (u64, RKey) {
        (self.b.mr.iova(), self.b.mr.rkey())
    }
}

/// Checks that a SEND arrives.
fn works(pair: &Pair) -> String {
    pair.receive(7);
    pair.a
        .try_post(Operation::Send { imm: None }, SgeList::inline(b"hello"), pair.to)
        .unwrap();
    assert_eq!(pair.a.wait().status, Status::Success);
    let wc = pair.b.wait();
    // The payload of a datagram is behind the 40 bytes of its GRH.
    let grh = if pair.b.qp.qp_type() == QpType::Ud { 40 } else { 0 };
    assert_eq!((wc.status, wc.wr_id, wc.byte_len), (Status::Success, 7, grh + 5));
    let mut bytes = [0; 5];
    pair.b
        .memory
        .read((32 << 10) + u64::from(grh), &mut bytes)
        .unwrap();
    assert_eq!(&bytes, b"hello");
    YES.into()
}

/// Checks that there is no queue pair type for them.
fn other_transports() -> String {
    match QpType::Rc {
        QpType::Rc | QpType::Uc | QpType::Ud | QpType::XrcSend | QpType::XrcRecv => NO.into(),
    }
}

fn write(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    (
        Operation::Write { va, rkey, imm: None },
        pair.a.mr.sge(0, 8).into(),
    )
}

fn read(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    (Operation::Read { va, rkey }, pair.a.mr.sge(0, 8).into())
}

fn fetch_add(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    (
        Operation::FetchAdd { va, rkey, add: 5 },
        pair.a.mr.sge(0, 8).into(),
    )
}

fn compare_swap(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    let (compare, swap) = (5, 9);
    let operation = Operation::CompareSwap {
        va,
        rkey,
        compare,
        swap,
    };
    (operation, pair.a.mr.sge(0, 8).into())
}

fn atomic_write(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    (Operation::AtomicWrite { va, rkey }, SgeList::inline(&[1; 8]))
}

fn flush(pair: &Pair) -> (Operation, SgeList) {
    let (va, rkey) = pair.peer();
    (flush_of(va, rkey, Placement::GLOBAL), SgeList::EMPTY)
}

fn flush_of(va: u64, rkey: RKey, placement: Placement) -> Operation {
    Operation::Flush {
        va,
        rkey,
        length: 8,
        placement,
        selectivity: Selectivity::Range,
    }
}

fn send_imm(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    pair.receive(7);
    let sent = pair.a.ends(Operation::Send { imm: Some(77) }, SgeList::EMPTY);
    assert_eq!((sent, pair.b.wait().imm), (Status::Success, Some(77)));
    YES.into()
}

fn write_imm(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    pair.receive(7);
    let (va, rkey) = pair.peer();
    let imm = Some(78);
    let written = pair
        .a
        .ends(Operation::Write { va, rkey, imm }, SgeList::inline(b"x"));
    let wc = pair.b.wait();
    assert_eq!(
        (written, wc.imm, wc.opcode),
        (Status::Success, imm, WcOpcode::RecvRdmaWithImm)
    );
    YES.into()
}

/// Binds a window of type 2 to the first 16 bytes.
fn bound(end: &End, window: &MemoryWindow) -> RKey {
    let key = window.rkey().next();
    let bind = Bind {
        window: key,
        region: end.mr.lkey(),
        va: end.mr.iova(),
        length: 16,
        access: Access::REMOTE_WRITE,
    };
    assert_eq!(end.ends(Operation::Bind(bind), SgeList::EMPTY), Status::Success);
    key
}

fn writes_by(pair: &Pair, key: RKey, at: u64) -> Status {
    let write = Operation::Write {
        va: pair.b.mr.iova() + at,
        rkey: key,
        imm: None,
    };
    pair.a.ends(write, SgeList::inline(&[1; 8]))
}

fn send_invalidate(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let window = pair.b.pd.alloc_mw(WindowType::Two).unwrap();
    let key = bound(&pair.b, &window);
    pair.receive(7);
    let sent = pair
        .a
        .ends(Operation::SendInvalidate { rkey: key }, SgeList::EMPTY);
    assert_eq!((sent, pair.b.wait().invalidated), (Status::Success, Some(key)));
    assert_eq!(writes_by(&pair, key, 0), Status::RemoteAccess);
    YES.into()
}

fn window_1(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let window = pair.b.pd.alloc_mw(WindowType::One).unwrap();
    let range = pair.b.mr.iova()..pair.b.mr.iova() + 16;
    let (access, flags) = (Access::REMOTE_WRITE, SendFlags::SIGNALED);
    let key = pair
        .b
        .qp
        .bind_mw(2, &window, &pair.b.mr, range, access, flags)
        .unwrap();
    assert_eq!(pair.b.wait().status, Status::Success);
    assert_eq!(writes_by(&pair, key, 8), Status::Success);
    assert_eq!(writes_by(&pair, key, 16), Status::RemoteAccess);
    YES.into()
}

fn window_2(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let window = pair.b.pd.alloc_mw(WindowType::Two).unwrap();
    let key = bound(&pair.b, &window);
    assert_eq!(writes_by(&pair, key, 8), Status::Success);
    assert_eq!(writes_by(&pair, key, 16), Status::RemoteAccess);
    YES.into()
}

fn fast_registration(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let region = pair.b.pd.alloc_mr(4096).unwrap();
    let key = region.rkey().next();
    let spec = RegionSpec {
        memory: pair.b.memory.clone(),
        memory_offset: 0,
        length: 4096,
        iova: pair.b.mr.iova(),
        access: RIGHTS,
    };
    let register = Operation::Register(Box::new(Registration { key, spec }));
    assert_eq!(pair.b.ends(register, SgeList::EMPTY), Status::Success);
    assert_eq!(writes_by(&pair, key, 0), Status::Success);
    let invalidated = pair
        .b
        .ends(Operation::LocalInvalidate { rkey: key }, SgeList::EMPTY);
    assert_eq!(
        (invalidated, writes_by(&pair, key, 0)),
        (Status::Success, Status::RemoteAccess)
    );
    YES.into()
}

fn atomics(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    assert_eq!([pair.does(fetch_add), pair.does(compare_swap)], [YES, YES]);
    let mut word = [0; 8];
    pair.b.memory.read(0, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 9);
    YES.into()
}

fn flush_global(bed: &Bed) -> String {
    bed.pair(QpType::Rc).does(flush)
}

/// Flushes to a file, which makes its bytes durable; memory that keeps nothing is refused.
fn flush_persistent(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let rights = RIGHTS | Access::FLUSH_PERSISTENT;
    let refused = pair.b.pd.reg_mr_all(pair.b.memory.clone(), 0, rights);
    assert!(matches!(refused, Err(RegisterError::FlushNotSupported)));
    let folder = FilePath::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("features-{}-{}", std::process::id(), bed.net));
    let file = Arc::new(FileMemory::open(&path, Some(4096), false).unwrap());
    let found = match pair.b.pd.reg_mr_all(file.clone(), 0, rights & !Access::MW_BIND) {
        Ok(mr) => {
            let flushed = flush_of(0, mr.rkey(), Placement::PERSISTENT);
            assert_eq!(pair.a.ends(flushed, SgeList::EMPTY), Status::Success);
            YES
        }
        // A file in memory is durable nowhere.
        Err(RegisterError::FlushNotSupported) if file.domain() == PersistenceDomain::None => {
            skip(format!("{} is on no disk", folder.display()));
            YES
        }
        Err(error) => panic!("{error}"),
    };
    std::fs::remove_file(&path).unwrap();
    found.into()
}

fn only_reliable(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Uc);
    let found = [read, fetch_add, compare_swap, atomic_write, flush].map(|request| pair.does(request));
    assert!(found.iter().all(|cell| *cell == found[0]), "{found:?}");
    found[0].clone()
}

/// Returns the greatest number that is accepted; one more is refused with `refusal`.
fn greatest(taken: usize, refusal: PostError, post: impl Fn(usize) -> Result<(), PostError>) -> String {
    assert_eq!(post(taken), Ok(()));
    assert_eq!(post(taken + 1), Err(refusal));
    taken.to_string()
}

fn inline_bytes(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let found = greatest(INLINE_BYTES_MAX, PostError::TooLong, |bytes| {
        pair.a
            .try_post(write(&pair).0, SgeList::inline(&vec![7; bytes]), pair.to)
    });
    assert_eq!(pair.a.wait().status, Status::Success);
    found
}

fn sges(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let found = greatest(SGE_MAX, PostError::TooManySges, |n| {
        let list: Vec<Sge> = (0..n as u64).map(|i| pair.a.mr.sge(i * 8, 8)).collect();
        pair.a.try_post(write(&pair).0, list[..].into(), pair.to)
    });
    assert_eq!(pair.a.wait().status, Status::Success);
    found
}

/// Posts the longest message, of 2 GiB: the request is accepted, and ends where the region does.
fn longest_message(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    greatest(1 << 31, PostError::TooLong, |bytes| {
        let half = Sge::new(pair.a.mr.iova(), 1 << 30, pair.a.mr.lkey());
        let rest = Sge {
            length: (bytes - (1 << 30)) as u32,
            ..half
        };
        pair.a.try_post(write(&pair).0, [half, rest][..].into(), pair.to)
    })
}

fn reads_under_way(bed: &Bed) -> String {
    let devices = [bed.address(), bed.address()].map(|address| bed.open(address, None));
    let params = ConnectParams {
        initiator_depth: u8::MAX,
        responder_resources: u8::MAX,
        ..ConnectParams::default()
    };
    let pair = bed.pair_of(QpType::Rc, devices, &params);
    assert_eq!(pair.does(read), YES);
    u8::MAX.to_string()
}

fn path_mtus(bed: &Bed) -> String {
    let mut found = Vec::new();
    for mtu in [128, 256, 512, 1024, 2048, 4096, 8192] {
        let pair = bed.pair(QpType::Uc);
        let none = QpAttributes::default();
        for qp in [&pair.a.qp, &pair.b.qp] {
            qp.modify(QpState::Reset, &none).unwrap();
        }
        if bring_up(&pair.a, &pair.b, mtu, 0) && bring_up(&pair.b, &pair.a, mtu, 0) {
            assert_eq!(
                (works(&pair).as_str(), pair.does(write).as_str()),
                (YES, YES),
                "{mtu}"
            );
            found.push(mtu.to_string());
        }
    }
    found.join(", ")
}

/// Brings up a UC QP with this path MTU; returns false if there is no such path MTU.
fn bring_up(from: &End, to: &End, mtu: u32, traffic_class: u8) -> bool {
    let mut steps = common::towards(&from.qp, to.device.address(), to.qp.qpn(), traffic_class);
    steps[1].1.path_mtu = Some(mtu);
    for (state, attributes) in steps {
        match from.qp.modify(state, &attributes) {
            Err(ModifyError::Value("path_mtu")) => return false,
            other => other.unwrap(),
        }
    }
    true
}

fn shared_receives(bed: &Bed) -> String {
    let devices = [bed.address(), bed.address()].map(|address| bed.open(address, None));
    let [a, b] = devices.map(|device| end(&device, QpType::Rc));
    let srq = b.pd.create_srq(4).unwrap();
    let options = QpOptions {
        srq: Some(srq.clone()),
        ..QpOptions::new(&b.cq)
    };
    let qp = b.pd.create_qp(&options).unwrap();
    let listener = b.device.listen(bed.port()).unwrap();
    let _connections = thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            let connection = request.accept(&qp, &ConnectParams::default(), &[]).unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(b.device.address(), bed.port());
        let connection = a
            .device
            .connect(&a.qp, peer, &ConnectParams::default(), &[])
            .unwrap();
        (connection, accepted.join().unwrap())
    });
    for wr_id in 0..2 {
        let sges = b.mr.sge(0, 64).into();
        srq.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    srq.modify(Some(32), Some(2)).unwrap();
    assert_eq!(
        a.ends(Operation::Send { imm: None }, SgeList::inline(b"x")),
        Status::Success
    );
    assert_eq!(b.wait().status, Status::Success);
    b.event(|event| *event == AsyncEvent::SrqLimitReached(srq.srqn()));
    assert_eq!(srq.query().map(|info| info.max_wr), Some(32));
    YES.into()
}

/// Registers more than there is memory, in no time.
fn unpinned(bed: &Bed) -> String {
    let device = bed.open(bed.address(), None);
    let pd = device.alloc_pd().unwrap();
    let memory = Arc::new(AnonymousMemory::new(256 << 30).unwrap());
    let mr = pd.reg_mr_all(memory, 0, RIGHTS | Access::ON_DEMAND).unwrap();
    assert_eq!(mr.length(), 256 << 30);
    YES.into()
}

fn multicast(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Ud);
    let group: IpAddr = [239, 0, bed.net, 1].into();
    pair.b.qp.attach_mcast(group).unwrap();
    pair.receive(7);
    let to = pair.a.device.create_ah(group, 0).to_group(QKEY).unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        // A network may lose a packet.
        pair.a
            .try_post(Operation::Send { imm: None }, SgeList::inline(b"all"), to)
            .unwrap();
        assert_eq!(pair.a.wait().status, Status::Success);
        if let Some(wc) = pair.b.cq.wait(Duration::from_millis(100)).unwrap() {
            assert_eq!((wc.status, wc.byte_len), (Status::Success, 43));
            return YES.into();
        }
        assert!(Instant::now() < deadline);
    }
}

fn drained(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let none = QpAttributes::default();
    pair.a.qp.modify(QpState::Sqd, &none).unwrap();
    pair.a
        .event(|event| *event == AsyncEvent::SqDrained(pair.a.qp.qpn()));
    let (operation, sges) = write(&pair);
    pair.a.try_post(operation, sges, pair.to).unwrap();
    assert_eq!(pair.a.cq.poll(), None, "nothing new begins");
    pair.a.qp.modify(QpState::Rts, &none).unwrap();
    assert_eq!(pair.a.wait().status, Status::Success);
    YES.into()
}

fn rate_limit(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    let limit = QpAttributes {
        rate_limit_bps: Some(8_000_000),
        ..QpAttributes::default()
    };
    pair.a.qp.modify(QpState::Rts, &limit).unwrap();
    let began = Instant::now();
    let (va, rkey) = pair.peer();
    for _ in 0..4 {
        let write = Operation::Write { va, rkey, imm: None };
        pair.a
            .try_post(write, pair.a.mr.sge(0, BYTES as u32).into(), pair.to)
            .unwrap();
    }
    for _ in 0..4 {
        assert_eq!(pair.a.wait().status, Status::Success);
    }
    // 256 KiB at 1 MB/s, but for a burst at the beginning. If it is faster, the rate was not limited; a machine may be as slow as
    // it likes.
    assert!(began.elapsed() > Duration::from_millis(100));
    YES.into()
}

fn solicited(bed: &Bed) -> String {
    let pair = bed.pair(QpType::Rc);
    pair.receive(1);
    pair.receive(2);
    pair.b.cq.arm(Arm::Solicited);
    let woken = |timeout: Duration| {
        let mut fds = [PollFd::new(&pair.b.cq, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::try_from(timeout).unwrap())).unwrap() > 0
    };
    assert_eq!(
        pair.a.ends(Operation::Send { imm: None }, SgeList::EMPTY),
        Status::Success
    );
    assert!(!woken(Duration::ZERO));
    let mut request = SendRequest {
        wr_id: 1,
        operation: Operation::Send { imm: None },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED | SendFlags::SOLICITED,
        to: pair.to,
    };
    request.wr_id = 2;
    pair.a.qp.post_send(request).unwrap();
    assert_eq!(pair.a.wait().status, Status::Success);
    assert!(woken(LONG));
    YES.into()
}

/// Sends two datagrams, whose completions go to a queue for one that was prepared.
fn two_to_a_small_queue(bed: &Bed, prepare: impl FnOnce(&CompletionQueue)) -> (End, CompletionQueue) {
    let device = bed.open(bed.address(), None);
    let end = end(&device, QpType::Ud);
    let small = end.device.create_cq(1).unwrap();
    let options = QpOptions {
        qp_type: QpType::Ud,
        ..QpOptions::new(&small)
    };
    let qp = end.pd.create_qp(&options).unwrap();
    qp.ready_datagram(QKEY).unwrap();
    let to = end
        .device
        .create_ah(end.device.address(), 0)
        .to(end.qp.qpn(), QKEY)
        .unwrap();
    prepare(&small);
    for wr_id in 0..2 {
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to,
        };
        qp.post_send(request).unwrap();
    }
    (end, small)
}

fn overrun(bed: &Bed) -> String {
    let (end, small) = two_to_a_small_queue(bed, |_| {});
    end.event(|event| *event == AsyncEvent::CqError(small.cqn()));
    YES.into()
}

fn cq_resized(bed: &Bed) -> String {
    let (_end, cq) = two_to_a_small_queue(bed, |cq| cq.resize(2).unwrap());
    for wr_id in 0..2 {
        assert_eq!(cq.wait(LONG).unwrap().expect("a completion").wr_id, wr_id);
    }
    YES.into()
}

/// Checks that a thread that sleeps receives the event when the first completion is old.
fn cq_moderated(bed: &Bed) -> String {
    let moderation = Moderation {
        count: 100,
        period_us: 1000,
    };
    let (_end, cq) = two_to_a_small_queue(bed, |cq| {
        cq.resize(2).unwrap();
        cq.moderate(ModerationPolicy::Fixed(moderation)).unwrap();
        cq.arm(Arm::Next);
    });
    let timeout = Timespec::try_from(LONG).unwrap();
    assert_eq!(
        poll(&mut [PollFd::new(&cq, PollFlags::IN)], Some(&timeout)),
        Ok(1)
    );
    YES.into()
}

fn cq_times(bed: &Bed) -> String {
    let before = Instant::now();
    let (_end, cq) = two_to_a_small_queue(bed, |cq| {
        cq.resize(2).unwrap();
        cq.keep_times().unwrap();
    });
    let (_, came) = std::iter::repeat_with(|| cq.poll_with_time())
        .take_while(|_| before.elapsed() < LONG)
        .flatten()
        .next()
        .expect("a completion");
    assert!(before <= came && came <= Instant::now());
    YES.into()
}

/// Checks that packets behind a gap are kept.
fn retransmission(bed: &Bed) -> String {
    let faults = "loss=5%,seed=3".parse().unwrap();
    let devices = [
        bed.open(bed.address(), Some(faults)),
        bed.open(bed.address(), None),
    ];
    let pair = bed.pair_of(QpType::Rc, devices, &ConnectParams::default());
    let (va, rkey) = pair.peer();
    for _ in 0..40 {
        let write = Operation::Write { va, rkey, imm: None };
        assert_eq!(
            pair.a.ends(write, pair.a.mr.sge(0, BYTES as u32).into()),
            Status::Success
        );
    }
    assert!(pair.a.device.counters().retransmitted_packets > 0);
    let kept = pair.b.device.counters().kept_requests;
    if kept > 0 { "selective" } else { "go-back-N" }.into()
}

/// Checks that a packet that was marked on its way causes a notification, which the sender heeds.
fn congestion(bed: &Bed) -> String {
    const MARKED: u8 = 0b11;
    assert!(Traffic::default().congestion.is_some());
    // Nothing marks packets that stay in the memory of a host.
    if bed.shared_memory == SharedMemory::Off {
        let options = Options {
            shared_memory: bed.shared_memory,
            traffic: Traffic {
                congestion_on_loopback: true,
                ..Traffic::default()
            },
            ..Options::default()
        };
        let open = || end(&common::open_with(bed.address(), options).unwrap(), QpType::Uc);
        let (a, b) = (open(), open());
        assert!(bring_up(&a, &b, 1024, MARKED) && bring_up(&b, &a, 1024, 0));
        let (va, rkey, imm) = (b.mr.iova(), b.mr.rkey(), None);
        assert_eq!(
            a.ends(Operation::Write { va, rkey, imm }, SgeList::inline(b"x")),
            Status::Success
        );
        let deadline = Instant::now() + LONG;
        while a.device.counters().rp_cnp_handled == 0 {
            assert!(Instant::now() < deadline, "no notification came");
            thread::yield_now();
        }
    }
    "DCQCN".into()
}

fn sidr(bed: &Bed) -> String {
    let [a, b] = [bed.address(), bed.address()].map(|address| end(&bed.open(address, None), QpType::Ud));
    b.qp.ready_datagram(QKEY).unwrap();
    let listener = b.device.listen_datagram(bed.port()).unwrap();
    let service = thread::scope(|scope| {
        scope.spawn(|| {
            listener
                .accept(LONG)
                .expect("a request")
                .accept(&b.qp, b"")
                .unwrap()
        });
        a.device
            .resolve(SocketAddr::new(b.device.address(), bed.port()), b"")
            .unwrap()
    });
    assert_eq!((service.qpn(), service.qkey()), (b.qp.qpn(), QKEY));
    YES.into()
}

/// Returns name and cell of rdmux in each row of the table.
fn rows() -> Vec<(String, String)> {
    let text = include_str!("../../../docs/features.md");
    let table = text
        .lines()
        .skip_while(|line| !line.starts_with("| feature | rdmux |"))
        .skip(2);
    let rows = table.take_while(|line| line.starts_with('|'));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 5, "{line}");
        for foreign in &cells[2..] {
            let has_source = foreign.ends_with(']') && foreign.contains(" [");
            assert!(
                has_source || *foreign == "?",
                "a cell without a source: {foreign} in {line}"
            );
        }
        (cells[0].to_owned(), cells[1].to_owned())
    })
    .collect()
}

fn check_all(shared_memory: SharedMemory, net: u8) {
    let host = Cell::new(1);
    let bed = Bed {
        shared_memory,
        net,
        host,
    };
    let rows = rows();
    let names: Vec<&str> = rows.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, CHECKS.map(|(name, _)| name), "each row has its check");
    for ((name, cell), (_, check)) in rows.iter().zip(CHECKS) {
        println!("{name}");
        assert_eq!(check(&bed), *cell, "{name}");
    }
}

#[test]
fn features__over_udp() {
    check_all(SharedMemory::Off, 90);
}

#[test]
fn features__over_shared_memory() {
    check_all(SharedMemory::Auto, 91);
}
