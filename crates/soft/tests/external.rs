//! Queue pairs that their owners bring up, connected by address and port.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};

use common::{End, LONG};
use rdmux_verbs::*;

const PORT: u16 = 7174;

impl End {
    fn pair(&self) -> ExternalPair {
        ExternalPair {
            qpn: self.qp.qpn(),
            qp_type: QpType::Rc,
            srq: false,
        }
    }

    fn modify_by(&self, attributes: impl Fn(QpState) -> QpAttributes) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            self.qp.modify(state, &attributes(state)).unwrap();
        }
    }

    fn receive(&self) {
        let sges = SgeList::EMPTY;
        self.qp.post_recv(RecvRequest { wr_id: 7, sges }).unwrap();
    }

    fn send(&self) {
        self.post(Operation::Send { imm: Some(9) }, SgeList::EMPTY);
    }
}

/// Connects two queue pairs. `active` and `passive` say whose queue pair its owner brings up.
fn connect(address: [u8; 4], active: bool, passive: bool) {
    let address = IpAddr::from(address);
    let (server, client) = (End::new(address), End::new(address));
    let listener = server.device.listen(PORT).unwrap();
    let params = ConnectParams::default();
    let there = std::thread::spawn(move || {
        let mut request = listener.accept(LONG).expect("a request");
        assert_eq!(request.peer_port(), 4711);
        let connection = if passive {
            server.modify_by(|to| request.attributes(to, &params).unwrap());
            server.receive();
            request
                .accept_pair(ConnectPair::External(&server.pair()), &params, b"yes")
                .unwrap()
        } else {
            let receive = || {
                server.receive();
                Ok(())
            };
            request
                .accept_after(&server.qp, &params, b"yes", receive)
                .unwrap()
        };
        assert!(connection.wait_established());
        server.wait_success();
        server.send();
        server.wait_success();
        assert!(connection.wait_ended(LONG));
        // Only its owner ends an external queue pair.
        let state = server.qp.query().unwrap().state;
        assert_eq!(state == QpState::Rts, passive, "{state:?}");
    });
    let peer = SocketAddr::new(address, PORT);
    let params = ConnectParams {
        source_port: 4711,
        ..ConnectParams::default()
    };
    let connection = if active {
        let connection = client
            .device
            .start_connect(ConnectPair::External(&client.pair()), peer, &params, b"may I")
            .and_then(Connecting::wait)
            .unwrap();
        assert_eq!(client.qp.query().unwrap().state, QpState::Reset);
        client.modify_by(|to| connection.attributes(to).unwrap());
        client.receive();
        connection.establish();
        connection
    } else {
        client
            .device
            .connect(&client.qp, peer, &params, b"may I")
            .unwrap()
    };
    assert_eq!(&connection.private_data()[..3], b"yes");
    assert_eq!(connection.qp().is_none(), active);
    if !active {
        client.receive();
    }
    client.send();
    client.wait_success();
    client.wait_success();
    connection.disconnect();
    there.join().unwrap();
}

#[test]
fn start_connect__external_both() {
    connect([127, 0, 14, 21], true, true);
}

#[test]
fn start_connect__external_towards_one_that_is_brought_up() {
    connect([127, 0, 14, 22], true, false);
}

#[test]
fn accept_pair__external_of_one_that_is_brought_up() {
    connect([127, 0, 14, 23], false, true);
}

/// Checks that a connection that is never established ends when its owner leaves it, and that its peer is notified.
#[test]
fn start_connect__external_left_before_it_stands() {
    let address = IpAddr::from([127, 0, 14, 24]);
    let (server, client) = (End::new(address), End::new(address));
    let listener = server.device.listen(PORT).unwrap();
    let there = std::thread::spawn(move || {
        let request = listener.accept(LONG).expect("a request");
        let connection = request
            .accept(&server.qp, &ConnectParams::default(), b"")
            .unwrap();
        assert!(!connection.wait_established());
        assert!(connection.wait_ended(LONG));
    });
    let (peer, params) = (SocketAddr::new(address, PORT), ConnectParams::default());
    let pair = client.pair();
    let connecting = client
        .device
        .start_connect(ConnectPair::External(&pair), peer, &params, b"");
    drop(connecting.and_then(Connecting::wait).unwrap());
    there.join().unwrap();
}
