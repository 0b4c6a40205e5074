//! The driver without its thread: the test takes each turn itself.

use rdmux_rnic::{Access, Operation, Path, Psn, RecvRequest, SendFlags, SendRequest, SgeList, Target};

use super::*;
use crate::device::{Device, QpOptions, QueuePair};

const LONG: Duration = Duration::from_secs(20);

/// Two queue pairs of one device that are connected to each other.
struct Pair {
    device: Device,
    qps: [QueuePair; 2],
}

impl Pair {
    fn new(address: [u8; 4]) -> Pair {
        let device = Device::open(IpAddr::from(address)).unwrap();
        let cq = device.create_cq(64).unwrap();
        let pd = device.alloc_pd();
        let qps = [(); 2].map(|()| pd.create_qp(&QpOptions::new(&cq)).unwrap());
        for (qp, peer) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
            connect(&device, qp, peer.qpn());
        }
        Pair { device, qps }
    }

    fn engine(&self) -> &Engine {
        self.device.engine()
    }

    /// Keeps the engine's thread from the socket for good, as a caller does that polls.
    fn take_over(&self) {
        self.engine().polled_at_ns.store(u64::MAX, Ordering::SeqCst);
        self.engine().kick.wake();
        while !self.engine().leased.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }

    /// Posts a request to the first queue pair.
    fn post(&self, operation: Operation) {
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qps[0].post_send(request).unwrap();
    }
}

fn connect(device: &Device, qp: &QueuePair, peer: Qpn) {
    let address = device.address();
    let init = QpAttributes {
        access: Some(Access::FLUSH_PERSISTENT),
        ..Default::default()
    };
    let rtr = QpAttributes {
        path: Some(Path {
            src: address,
            dst: address,
            src_port: device.source_port(peer).unwrap(),
            traffic_class: 0,
        }),
        path_mtu: Some(1024),
        dest_qpn: Some(peer),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..Default::default()
    };
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..Default::default()
    };
    for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        qp.modify(to, &attr).unwrap();
    }
}

#[test]
fn handle_mad__acknowledges_the_data_that_it_takes_in() {
    let pair = Pair::new([127, 0, 14, 2]);
    let sges = SgeList::EMPTY;
    pair.qps[1].post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
    pair.take_over();
    pair.post(Operation::Send { imm: None });
    let empty = MadDatagram {
        src: SocketAddr::new(pair.device.address(), ROCE_PORT),
        bytes: Vec::new(),
    };
    let deadline = Instant::now() + LONG;
    while pair.device.counters().rcvd_pkts == 0 && Instant::now() < deadline {
        pair.engine().handle_mad(&empty);
    }
    // Nobody looks at the socket any more: what is owed now stays owed.
    assert_eq!(pair.device.counters().sent_pkts, 2, "the request and its answer");
}
