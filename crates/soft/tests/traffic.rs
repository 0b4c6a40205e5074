//! Traffic classes, marks and rates over real sockets.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use common::{End, LONG, connect, private};
use rdmux_soft::udp::{ROCE_PORT, RxBatch, RxSocket};
use rdmux_verbs::*;

/// Expedited forwarding, DSCP 46.
const EF: u8 = 46 << 2;
/// ECN field: marked.
const MARKED: u8 = 0b11;
const BYTES: u32 = 1 << 20;

fn end(address: IpAddr, traffic: Traffic) -> End {
    let options = Options {
        traffic,
        // The test checks the network.
        shared_memory: SharedMemory::Off,
        ..Options::default()
    };
    let device = common::open_with(address, options).unwrap();
    End::on(&device, private(BYTES as usize))
}

impl End {
    /// Brings the queue pair up by hand, towards a peer that need not be rdmux.
    fn bring_up_towards(&self, dst: IpAddr, dest_qpn: Qpn, traffic_class: u8) {
        common::bring_up(&self.qp, common::towards(&self.qp, dst, dest_qpn, traffic_class));
    }

    fn write(&self, rkey: RKey, va: u64) {
        let operation = Operation::Write { va, rkey, imm: None };
        self.post(operation, self.mr.sge(0, BYTES));
    }
}

#[test]
fn traffic_class__is_on_the_wire() {
    let (own, peer): (IpAddr, IpAddr) = ([127, 0, 71, 1].into(), [127, 0, 71, 2].into());
    let rx = RxSocket::bind(SocketAddr::new(peer, ROCE_PORT), false).unwrap();
    let end = end(own, Traffic::default());
    end.bring_up_towards(peer, Qpn::new(0x12_3456), EF);
    end.write(RKey(1), 0);
    let (mut batch, deadline) = (RxBatch::new(), Instant::now() + LONG);
    while rx.recv_batch(&mut batch).unwrap() == 0 {
        assert!(Instant::now() < deadline, "nothing came");
    }
    for datagram in batch.iter() {
        assert_eq!((datagram.src.ip(), datagram.tos), (own, EF));
    }
}

#[test]
fn marked__packets_bring_a_cnp() {
    let addresses: [IpAddr; 2] = [[127, 0, 72, 1].into(), [127, 0, 72, 2].into()];
    let traffic = Traffic {
        congestion_on_loopback: true,
        ..Traffic::default()
    };
    let [a, b] = addresses.map(|address| end(address, traffic));
    // The packets are sent with the mark, as if a switch had marked them on their way.
    a.bring_up_towards(addresses[1], b.qp.qpn(), EF | MARKED);
    b.bring_up_towards(addresses[0], a.qp.qpn(), EF);
    a.write(b.mr.rkey(), b.mr.iova());
    a.wait_success();
    let deadline = Instant::now() + LONG;
    while a.device.counters().rp_cnp_handled == 0 {
        assert!(Instant::now() < deadline, "no CNP came");
        std::thread::yield_now();
    }
    let counters = b.device.counters();
    assert!(counters.np_ecn_marked_roce_packets > 0 && counters.np_cnp_sent > 0);
    // Its own packets were not marked.
    assert_eq!(a.device.counters().np_ecn_marked_roce_packets, 0);
}

#[test]
fn connect__both_ends_use_the_class_of_the_request_and_keep_a_rate() {
    let address: IpAddr = [127, 0, 73, 1].into();
    let [client, server] = [(); 2].map(|()| end(address, Traffic::default()));
    let params = ConnectParams {
        traffic_class: EF,
        ..ConnectParams::default()
    };
    let _held = connect(&client.qp, &server.qp, &params);
    for end in [&client, &server] {
        // ECN is left alone on loopback.
        assert_eq!(end.qp.query().unwrap().path.unwrap().traffic_class, EF);
    }
    let limit = QpAttributes {
        rate_limit_bps: Some(200_000_000),
        ..Default::default()
    };
    client.qp.modify(QpState::Rts, &limit).unwrap();
    let begin = Instant::now();
    client.write(server.mr.rkey(), server.mr.iova());
    client.wait_success();
    // 1 MiB at 200 Mbit/s, headers left out, and a train that the rate has credit for.
    assert!(
        begin.elapsed() >= Duration::from_millis(39),
        "{:?}",
        begin.elapsed()
    );
}
