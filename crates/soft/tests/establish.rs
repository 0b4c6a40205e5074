//! Connection establishment when its last message is late or lost. The peer is an engine that the test drives itself, so that it
//! chooses which messages are lost.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_rnic::cm::{CmEvent, CmId, Endpoint};
use rdmux_rnic::{Arrival, Config, Cqn, QpInit, Rnic, Time, TransmitBuf};
use rdmux_soft::udp::{Outgoing, ROCE_PORT, RxBatch, RxSocket, TxSocket};
use rdmux_verbs::*;
use rdmux_wire::cm::CmMessage;
use rdmux_wire::roce::{Packet, Transport};

const LONG: Duration = Duration::from_secs(60);
const PORT: u16 = 7174;

/// The active side. Its RTUs are lost.
struct Peer {
    rnic: Rnic,
    cq: Cqn,
    qpn: Qpn,
    rx: RxSocket,
    tx: TxSocket,
    batch: RxBatch,
    buf: TransmitBuf,
    start: Instant,
    lost: u32,
}

impl Peer {
    fn new(address: IpAddr) -> Peer {
        let rx = RxSocket::bind(SocketAddr::new(address, ROCE_PORT), false).unwrap();
        let tx = TxSocket::bind(address).unwrap();
        let mut rnic = Rnic::new(Config {
            address,
            slot: 1,
            seed: [7; 32],
            guid: 7,
            gsi_src_port: tx.local_addr().port(),
            receive_window_bytes: 1 << 16,
            traffic: Traffic::default(),
            mtu: 1024,
        });
        let (pd, cq) = (rnic.alloc_pd(), rnic.create_cq(16));
        let qpn = rnic.create_qp(QpInit::new(pd, cq)).unwrap();
        Peer {
            rnic,
            cq,
            qpn,
            rx,
            tx,
            batch: RxBatch::new(),
            buf: TransmitBuf::new(1 << 16, false),
            start: Instant::now(),
            lost: 0,
        }
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// Receives and sends until `found` finds something.
    fn until<T>(&mut self, mut found: impl FnMut(&mut Rnic) -> Option<T>) -> T {
        loop {
            if let Some(found) = found(&mut self.rnic) {
                return found;
            }
            assert!(self.start.elapsed() < 2 * LONG, "it does not happen");
            self.handle_next();
        }
    }

    fn handle_next(&mut self) {
        let now = self.now();
        if self.rx.recv_batch(&mut self.batch).unwrap() == 0 {
            thread::yield_now();
        }
        for datagram in self.batch.iter() {
            let arrival = Arrival {
                src: datagram.src.ip(),
                src_port: datagram.src.port(),
                dst: self.rx.local_addr().ip(),
                traffic_class: datagram.tos,
                bytes: datagram.bytes,
                segment_bytes: datagram.segment_size,
                local: false,
            };
            self.rnic.handle_arrival(now, &arrival);
        }
        if self.rnic.poll_timeout().is_some_and(|at| at <= now) {
            self.rnic.handle_timeout(now);
        }
        self.buf.clear();
        self.rnic.poll_transmit(now, &mut self.buf, true);
        for train in self.buf.trains() {
            let bytes = &self.buf.bytes()[train.range.clone()];
            if is_rtu(bytes) {
                self.lost += 1;
                continue;
            }
            let outgoing = Outgoing {
                dst: SocketAddr::new(train.path.dst, ROCE_PORT),
                segment_size: None,
                tos: train.path.traffic_class,
                parts: &[IoSlice::new(bytes)],
            };
            self.tx.send_batch(&[outgoing]).unwrap();
        }
    }

    /// Asks for a connection.
    fn ask(&mut self, to: IpAddr, own_psn: Psn) -> CmId {
        let now = self.now();
        let local = Endpoint {
            transport: Transport::Rc,
            qpn: self.qpn,
            starting_psn: own_psn,
            responder_resources: 4,
            initiator_depth: 4,
            rnr_retry_count: 7,
            retry_count: 7,
            srq: false,
            ack_timeout: 14,
            path_mtu: PathMtu::Bytes1024,
            traffic_class: 0,
            extensions: None,
            plain: false,
        };
        let service = ServiceId::tcp(PORT);
        let id = self.rnic.cm().connect(now, to, service, None, &local, b"");
        id.unwrap()
    }

    /// Connects as far as it can: only the other side's notification is missing.
    fn connect(&mut self, to: IpAddr) -> CmId {
        let (now, own_psn) = (self.now(), Psn::new(100));
        let id = self.ask(to, own_psn);
        let remote = self.until(|rnic| match rnic.cm().poll_event()? {
            CmEvent::Reply { remote, .. } => Some(remote),
            other => panic!("{other:?}"),
        });
        let init = QpAttributes {
            access: Some(Access::REMOTE_WRITE),
            ..Default::default()
        };
        let rtr = QpAttributes {
            path: Some(Path {
                src: self.rnic.config().address,
                dst: to,
                src_port: self.tx.local_addr().port(),
                traffic_class: 0,
            }),
            path_mtu: Some(1024),
            dest_qpn: Some(remote.qpn),
            rq_psn: Some(own_psn),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            // Both ends follow what the REQ and the REP said.
            selective: Some(remote.extensions.is_some_and(|e| e.selective)),
            carried_acks: Some(remote.extensions.is_some_and(|e| e.carried_acks)),
            ..Default::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(remote.starting_psn),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(4),
            ..Default::default()
        };
        for (state, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            self.rnic.modify_qp(now, self.qpn, state, &attr).unwrap();
        }
        self.rnic.cm().establish(id);
        id
    }

    fn completion(&mut self) -> WorkCompletion {
        let cq = self.cq;
        self.until(|rnic| rnic.poll_cq(cq))
    }
}

fn is_rtu(packet: &[u8]) -> bool {
    let packet = Packet::parse(packet).unwrap();
    packet.bth.dest_qpn == Qpn::GSI
        && matches!(CmMessage::parse(packet.payload()), Ok((_, CmMessage::Rtu(_))))
}

struct Server {
    device: Device,
    cq: CompletionQueue,
    qp: QueuePair,
    listener: Listener,
}

impl Server {
    fn new(address: IpAddr) -> Server {
        rdmux_soft::register();
        let device = Device::open(address).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let listener = device.listen(PORT).unwrap();
        Server {
            device,
            cq,
            qp,
            listener,
        }
    }

    fn accept(&self) -> Connection {
        let mut request = self.listener.accept(LONG).expect("a request");
        let prepare = || {
            self.qp.post_recv(nothing(9)).unwrap();
            Ok(())
        };
        request
            .accept_after(&self.qp, &ConnectParams::default(), b"", prepare)
            .unwrap()
    }
}

fn nothing(wr_id: u64) -> RecvRequest {
    RecvRequest {
        wr_id,
        sges: SgeList::EMPTY,
    }
}

fn send(wr_id: u64) -> SendRequest {
    SendRequest {
        wr_id,
        operation: Operation::Send { imm: None },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

#[test]
fn accept__a_request_establishes_the_connection_when_the_last_message_is_lost() {
    let server = Server::new([127, 0, 32, 1].into());
    let mut peer = Peer::new([127, 0, 32, 2].into());
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let connection = server.accept();
            // The server sends before it knows that the connection is established, as rdma_accept(3) allows.
            assert_eq!(server.qp.query().unwrap().state, QpState::Rts);
            server.qp.post_send(send(1)).unwrap();
            let wc = server.cq.wait(LONG).unwrap().unwrap();
            assert_eq!((wc.wr_id, wc.status), (1, Status::Success));
            assert!(connection.wait_established());
            assert_eq!(server.cq.wait(LONG).unwrap().unwrap().wr_id, 9);
            assert!(connection.wait_ended(LONG));
            // The server's program did not bring up the queue pair itself, and needs no event that it received.
            assert_eq!(server.device.wait_async_event(Duration::ZERO), None);
            connection
        });
        let id = peer.connect(server.device.address());
        // The REP came again, so that the RTU was sent, and lost, more than once.
        let now = peer.now();
        let (cq, qpn) = (peer.cq, peer.qpn);
        peer.rnic.post_recv(now, qpn, nothing(5)).unwrap();
        assert_eq!(peer.completion().wr_id, 5);
        while peer.lost < 2 {
            peer.handle_next();
        }
        let now = peer.now();
        peer.rnic.post_send(now, qpn, send(4)).unwrap();
        assert_eq!((peer.completion().wr_id, peer.rnic.poll_cq(cq)), (4, None));
        let now = peer.now();
        peer.rnic.cm().disconnect(now, id);
        peer.until(|rnic| rnic.cm().poll_event());
        serving.join().unwrap();
    });
}

#[test]
fn accept__ends_when_neither_the_last_message_nor_a_request_comes() {
    let server = Server::new([127, 0, 32, 3].into());
    let mut peer = Peer::new([127, 0, 32, 4].into());
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let connection = server.accept();
            assert!(!connection.wait_established());
            let wc = server.cq.wait(LONG).unwrap().unwrap();
            assert_eq!((wc.wr_id, wc.status), (9, Status::Flushed));
        });
        peer.connect(server.device.address());
        peer.until(|rnic| match rnic.cm().poll_event()? {
            CmEvent::Disconnected { .. } => Some(()),
            other => panic!("{other:?}"),
        });
        assert!(peer.lost > 2);
        serving.join().unwrap();
    });
}

#[test]
fn accept__hands_out_no_request_that_was_withdrawn() {
    let server = Server::new([127, 0, 32, 5].into());
    let mut peer = Peer::new([127, 0, 32, 6].into());
    for n in 0..300 {
        let id = peer.ask(server.device.address(), Psn::new(n));
        peer.handle_next();
        let now = peer.now();
        peer.rnic.cm().disconnect(now, id);
        peer.handle_next();
    }
    // A request whose withdrawal the server has not received would be handed out.
    peer.until(|_| (server.device.counters().rcvd_pkts >= 600).then_some(()));
    thread::scope(|scope| {
        // The first request to be handed out is the one that was not withdrawn.
        let serving = scope.spawn(|| server.accept());
        peer.connect(server.device.address());
        serving.join().unwrap();
    });
}
