//! Common beginnings of several of the tests here.
#![allow(dead_code, unused_imports, reason = "not every test needs all of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use rdmux_verbs::*;

mod child;
mod end;
mod talker;

pub(crate) use child::ChildProcess;
pub(crate) use end::{END_BYTES, End, RIGHTS, connect_ends, connected, private, shareable};
pub(crate) use talker::{
    Pair, Random, TALKER_BYTES, Talked, Talker, Turns, nothing_is_left, pair, pairs, seed, talker_end,
};

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Opens a soft device.
pub(crate) fn open(address: IpAddr) -> Result<Device, OpenError> {
    open_with(address, Options::default())
}

/// Opens a soft device with options.
pub(crate) fn open_with(address: IpAddr, options: Options) -> Result<Device, OpenError> {
    rdmux_soft::register();
    Device::open_with(address, options)
}

/// Connects two queue pairs, the first of which asks as `params` say. Returns their connections.
pub(crate) fn connect(client: &QueuePair, server: &QueuePair, params: &ConnectParams) -> [Connection; 2] {
    connect_at(7174, client, server, params)
}

/// Connects two queue pairs as [`connect`] does, by a port that the caller chooses.
pub(crate) fn connect_at(
    port: u16,
    client: &QueuePair,
    server: &QueuePair,
    params: &ConnectParams,
) -> [Connection; 2] {
    let [asking, asked] = [client, server].map(|qp| qp.pd().device());
    let listener = asked.listen(port).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            assert_eq!(&request.private_data()[..5], b"hello");
            let connection = request
                .accept(server, &ConnectParams::default(), b"welcome")
                .unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(asked.address(), port);
        let connection = asking.connect(client, peer, params, b"hello").unwrap();
        assert_eq!(&connection.private_data()[..7], b"welcome");
        [connection, accepting.join().unwrap()]
    })
}

/// Returns the steps that bring up a queue pair by hand, RC or UC, towards one of a peer that need not be rdmux.
pub(crate) fn towards(
    qp: &QueuePair,
    peer: IpAddr,
    dest_qpn: Qpn,
    traffic_class: u8,
) -> [(QpState, QpAttributes); 3] {
    let (device, is_rc) = (qp.pd().device(), qp.qp_type() == QpType::Rc);
    let path = Path {
        src: device.address(),
        dst: peer,
        src_port: device.source_port(dest_qpn).unwrap(),
        traffic_class,
    };
    let init = QpAttributes {
        access: Some(Access::REMOTE_WRITE),
        ..Default::default()
    };
    let to_receive = QpAttributes {
        path: Some(path),
        path_mtu: Some(1024),
        dest_qpn: Some(dest_qpn),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: is_rc.then_some(1),
        min_rnr_timer: is_rc.then_some(1),
        ..Default::default()
    };
    let to_send = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: is_rc.then_some(14),
        retry_count: is_rc.then_some(7),
        rnr_retry: is_rc.then_some(7),
        max_rd_atomic: is_rc.then_some(1),
        ..Default::default()
    };
    [
        (QpState::Init, init),
        (QpState::Rtr, to_receive),
        (QpState::Rts, to_send),
    ]
}

/// Brings a queue pair up, without a message of connection management.
pub(crate) fn bring_up(qp: &QueuePair, steps: [(QpState, QpAttributes); 3]) {
    for (to, attributes) in steps {
        qp.modify(to, &attributes).unwrap();
    }
}

/// Returns what another process reports: its lines after `@ `, which a test's own output does not have.
pub(crate) fn told(stdout: impl Read + Send + 'static) -> Receiver<String> {
    let (tx, events) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if let Some((_, event)) = line.split_once("@ ") {
                let _ = tx.send(event.to_owned());
            }
        }
    });
    events
}
