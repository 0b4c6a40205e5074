//! Two devices on one host: connect, move bytes, end.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use common::{End, LONG, connect, connect_ends, connected, private};
use rdmux_verbs::*;

fn end_with(address: IpAddr, bytes: usize, options: Options) -> End {
    End::on(&common::open_with(address, options).unwrap(), private(bytes))
}

fn send(wr_id: u64, operation: Operation, sges: SgeList) -> SendRequest {
    SendRequest {
        wr_id,
        operation,
        sges,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

fn write_read_send(address: &str) {
    let end = |()| End::on(&common::open(address.parse().unwrap()).unwrap(), private(4 << 20));
    let [client, server] = [(); 2].map(end);
    let [c, _s] = connect_ends(&client, &server);
    let bytes: Vec<u8> = (0..3usize << 20).map(|i| (i * 7 + i / 255) as u8).collect();
    client.memory.write(0, &bytes).unwrap();
    let (va, rkey) = (server.mr.iova(), server.mr.rkey());
    let whole = client.mr.sge(0, bytes.len() as u32);
    client
        .qp
        .post_send(send(1, Operation::Write { va, rkey, imm: None }, whole.into()))
        .unwrap();
    let wc = client.wait();
    assert_eq!((wc.wr_id, wc.status), (1, Status::Success));
    let mut there = vec![0; bytes.len()];
    server.memory.read(0, &mut there).unwrap();
    assert!(there == bytes, "written bytes differ");

    client.memory.write(0, &vec![0; bytes.len()]).unwrap();
    client
        .qp
        .post_send(send(2, Operation::Read { va, rkey }, whole.into()))
        .unwrap();
    let wc = client.wait();
    assert_eq!((wc.wr_id, wc.status), (2, Status::Success));
    client.memory.read(0, &mut there).unwrap();
    assert!(there == bytes, "read bytes differ");

    server
        .qp
        .post_recv(RecvRequest {
            wr_id: 3,
            sges: server.mr.sge(0, 100).into(),
        })
        .unwrap();
    client
        .qp
        .post_send(send(
            4,
            Operation::Send { imm: Some(5) },
            client.mr.sge(0, 100).into(),
        ))
        .unwrap();
    let wc = server.cq.wait(LONG).unwrap().expect("a receive");
    assert_eq!(
        (wc.wr_id, wc.status, wc.byte_len, wc.imm),
        (3, Status::Success, 100, Some(5))
    );

    server
        .qp
        .post_recv(RecvRequest {
            wr_id: 6,
            sges: server.mr.sge(0, 100).into(),
        })
        .unwrap();
    c.disconnect_and_wait(LONG);
    let wc = server.cq.wait(LONG).unwrap().expect("the end");
    assert_eq!((wc.wr_id, wc.status), (6, Status::Flushed));
}

#[test]
fn connection__moves_bytes_over_ipv4() {
    write_read_send("127.0.0.31");
}

#[test]
fn connection__moves_bytes_over_ipv6() {
    write_read_send("::1");
}

#[test]
fn connect__to_a_port_nobody_listens_on_is_refused_at_once() {
    let client = End::new([127, 0, 0, 32]);
    let result = client.device.connect(
        &client.qp,
        "127.0.0.32:7174".parse().unwrap(),
        &ConnectParams::default(),
        &[],
    );
    assert!(
        matches!(
            result,
            Err(ConnectError::Rejected {
                reason: RejReason::INVALID_SERVICE_ID,
                ..
            })
        ),
        "{result:?}"
    );
}

#[test]
fn listen__on_a_port_that_another_device_of_the_address_has_fails() {
    let address = [127, 0, 0, 33];
    let (one, two) = (End::new(address), End::new(address));
    let _listener = one.device.listen(7174).unwrap();
    assert!(two.device.listen(7174).is_err());
}

/// Receive buffer that an ordinary user's socket holds by default: the kernel doubles this request to 212,992.
const DEFAULT_BUFFER_BYTES: usize = 106_496;

#[test]
fn write__of_several_clients_at_once_survives_default_socket_buffers() {
    const BYTES: usize = 4 << 20;
    const CLIENTS: usize = 4;
    let address: IpAddr = "127.0.0.34".parse().unwrap();
    let small = Options {
        receive_buffer_bytes: Some(DEFAULT_BUFFER_BYTES),
        ..Default::default()
    };
    let server = end_with(address, CLIENTS * BYTES, small);
    let listener = server.device.listen(7174).unwrap();
    std::thread::scope(|scope| {
        for i in 0..CLIENTS {
            let (va, rkey) = (server.mr.iova() + (i * BYTES) as u64, server.mr.rkey());
            scope.spawn(move || {
                let client = end_with(address, BYTES, small);
                let bytes: Vec<u8> = (0..BYTES).map(|j| (j * 13 + j / 253 + i) as u8).collect();
                client.memory.write(0, &bytes).unwrap();
                let peer = SocketAddr::new(address, 7174);
                let c = client
                    .device
                    .connect(&client.qp, peer, &ConnectParams::default(), &[])
                    .unwrap();
                for round in 0..4 {
                    let whole = client.mr.sge(0, BYTES as u32);
                    client
                        .qp
                        .post_send(send(
                            round,
                            Operation::Write { va, rkey, imm: None },
                            whole.into(),
                        ))
                        .unwrap();
                    let wc = client.wait();
                    assert_eq!((wc.wr_id, wc.status), (round, Status::Success), "client {i}");
                }
                let back = client.mr.sge(0, BYTES as u32);
                client.memory.write(0, &vec![0; BYTES]).unwrap();
                client
                    .qp
                    .post_send(send(9, Operation::Read { va, rkey }, back.into()))
                    .unwrap();
                let wc = client.wait();
                assert_eq!((wc.wr_id, wc.status), (9, Status::Success), "client {i}");
                let mut there = vec![0; BYTES];
                client.memory.read(0, &mut there).unwrap();
                assert!(there == bytes, "client {i} reads back what it wrote");
                c.disconnect_and_wait(LONG);
            });
        }
        let mut held = Vec::new();
        for _ in 0..CLIENTS {
            let request = listener.accept(LONG).expect("a request");
            // All QPs of a server may share its domain if all may reach the same region.
            let qp = server.qp.pd().create_qp(&QpOptions::new(&server.cq)).unwrap();
            held.push(request.accept(&qp, &ConnectParams::default(), &[]).unwrap());
        }
        for connection in &held {
            assert!(connection.wait_established());
            while !connection.is_ended() {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn disconnect__sends_the_acknowledgement_that_is_owed() {
    let (client, server, [_c, s]) = connected([127, 0, 0, 35]);
    server
        .qp
        .post_recv(RecvRequest {
            wr_id: 1,
            sges: server.mr.sge(0, 100).into(),
        })
        .unwrap();
    client
        .qp
        .post_send(send(
            2,
            Operation::Send { imm: None },
            client.mr.sge(0, 100).into(),
        ))
        .unwrap();
    // A polling caller takes the message and leaves at once.
    while server.cq.poll().is_none() {}
    s.disconnect();
    let wc = client.wait();
    assert_eq!((wc.wr_id, wc.status), (2, Status::Success), "it was delivered");
}

#[test]
fn connection__that_is_dropped_does_not_end_the_next_one_of_its_queue_pair() {
    let (client, server, [first, _s]) = connected([127, 0, 0, 36]);
    drop(first);
    client
        .qp
        .modify(QpState::Reset, &QpAttributes::default())
        .unwrap();
    let qp = server.qp.pd().create_qp(&QpOptions::new(&server.cq)).unwrap();
    let [c, _s] = connect(&client.qp, &qp, &ConnectParams::default());
    assert!(!c.is_ended());
    let operation = Operation::Write {
        va: server.mr.iova(),
        rkey: server.mr.rkey(),
        imm: None,
    };
    client
        .qp
        .post_send(send(5, operation, client.mr.sge(0, 100).into()))
        .unwrap();
    let wc = client.wait();
    assert_eq!((wc.wr_id, wc.status), (5, Status::Success));
}

#[test]
fn post_recv__in_error_wakes_who_waits() {
    let (client, _server, [c, _s]) = connected([127, 0, 0, 37]);
    c.disconnect();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.cq.wait(LONG).unwrap());
        // The other thread must see the receive, whether it is posted before or after that thread sleeps.
        client
            .qp
            .post_recv(RecvRequest {
                wr_id: 8,
                sges: SgeList::EMPTY,
            })
            .unwrap();
        let wc = waiting.join().unwrap().expect("a completion");
        assert_eq!((wc.wr_id, wc.status), (8, Status::Flushed));
    });
}

/// The client posts its receives before it connects, as some programs do.
#[test]
fn connect__after_a_refusal_with_a_queue_pair_that_has_receives() {
    let address = IpAddr::from([127, 0, 12, 17]);
    let (client, server) = (End::new(address), End::new(address));
    let init = QpAttributes {
        access: Some(Access::REMOTE_WRITE),
        ..QpAttributes::default()
    };
    client.qp.modify(QpState::Init, &init).unwrap();
    let sges = client.mr.sge(0, 64).into();
    client.qp.post_recv(RecvRequest { wr_id: 9, sges }).unwrap();
    let at = (address, 7199).into();
    let params = ConnectParams::default();
    let device = client.qp.pd().device();
    let refused = device.connect(&client.qp, at, &params, b"");
    assert!(
        matches!(refused, Err(ConnectError::Rejected { .. })),
        "{refused:?}"
    );
    assert_eq!(client.qp.query().unwrap().state, QpState::Init);

    let listener = server.qp.pd().device().listen(7199).unwrap();
    std::thread::scope(|scope| {
        let connected = scope.spawn(|| device.connect(&client.qp, at, &params, b"").unwrap());
        let request = listener.accept(LONG).expect("a request");
        let accepted = request.accept(&server.qp, &params, b"").unwrap();
        assert!(accepted.wait_established());
        let operation = Operation::Send { imm: None };
        server
            .qp
            .post_send(send(1, operation, SgeList::inline(b"there")))
            .unwrap();
        let wc = client.cq.wait(LONG).unwrap().expect("what was posted first");
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (9, Status::Success, 5));
        drop(connected.join().unwrap());
    });
}

#[test]
fn connect__asks_for_a_smaller_packet_when_the_peer_wants_less() {
    let address: IpAddr = "127.0.0.38".parse().unwrap();
    let (client, server) = (End::new(address), End::new(address));
    let listener = server.device.listen(7174).unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let small = ConnectParams {
                path_mtu_max: PathMtu::Bytes1024,
                ..Default::default()
            };
            loop {
                if let Ok(connection) =
                    listener
                        .accept(LONG)
                        .expect("a request")
                        .accept(&server.qp, &small, &[])
                {
                    assert!(connection.wait_established());
                    return connection;
                }
            }
        });
        let peer = SocketAddr::new(address, 7174);
        let c = client
            .device
            .connect(&client.qp, peer, &ConnectParams::default(), &[])
            .unwrap();
        assert_eq!(client.qp.query().unwrap().path_mtu, 1024);
        drop(c);
        drop(accepting.join().unwrap());
    });
}

#[test]
fn wait__for_ever_is_a_duration_too() {
    let (client, _server, [c, _s]) = connected([127, 0, 0, 39]);
    client
        .qp
        .post_recv(RecvRequest {
            wr_id: 1,
            sges: SgeList::EMPTY,
        })
        .unwrap();
    c.disconnect();
    assert!(client.cq.wait(Duration::MAX).unwrap().is_some());
}

#[test]
fn connect__uc() {
    let address = [127, 0, 0, 40];
    let (client, server) = (
        End::of_type(address, QpType::Uc),
        End::of_type(address, QpType::Uc),
    );
    let listener = server.device.listen_for(7174, &[QpType::Rc, QpType::Uc]).unwrap();
    let nothing = || RecvRequest {
        wr_id: 9,
        sges: SgeList::EMPTY,
    };
    let (c, s) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let mut request = listener.accept(LONG).expect("a request");
            assert_eq!(request.qp_type(), QpType::Uc);
            let prepare = || {
                server.qp.post_recv(nothing()).unwrap();
                Ok(())
            };
            let accepted = request.accept_after(&server.qp, &ConnectParams::default(), &[], prepare);
            let connection = accepted.unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(address.into(), 7174);
        let c = client
            .device
            .connect(&client.qp, peer, &ConnectParams::default(), &[])
            .unwrap();
        (c, accepting.join().unwrap())
    });
    client.qp.post_recv(nothing()).unwrap();
    for (from, to) in [(&client, &server), (&server, &client)] {
        let sent = from.does(Operation::Send { imm: Some(7) }, SgeList::EMPTY);
        assert_eq!(sent.status, Status::Success);
        let wc = to.wait();
        assert_eq!((wc.wr_id, wc.status, wc.imm), (9, Status::Success, Some(7)));
    }
    server.qp.post_recv(nothing()).unwrap();
    c.disconnect_and_wait(LONG);
    assert!(s.wait_ended(LONG));
    assert_eq!(server.wait().status, Status::Flushed);
}

#[test]
fn connect__xrc() {
    let address = [127, 0, 0, 51];
    let client = End::of_type(address, QpType::XrcSend);
    let device = common::open(address.into()).unwrap();
    let (server, srq) = End::xrc_target(&device, private(4096));
    let sges = server.mr.sge(0, 64).into();
    srq.post_recv(RecvRequest { wr_id: 9, sges }).unwrap();
    let listener = device.listen_for(7174, &[QpType::XrcRecv]).unwrap();
    let (c, s) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            let number = srq.srqn().0.to_be_bytes();
            let accepted = request.accept(&server.qp, &ConnectParams::default(), &number);
            let connection = accepted.unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(address.into(), 7174);
        let c = client
            .device
            .connect(&client.qp, peer, &ConnectParams::default(), &[])
            .unwrap();
        (c, accepting.join().unwrap())
    });
    let srqn = Srqn(u32::from_be_bytes(*c.private_data().first_chunk().unwrap()));
    assert!(c.remote().unwrap().srq);
    let (operation, text) = (Operation::Send { imm: None }, SgeList::inline(b"to the queue"));
    client.try_post(operation, text, Target::Srq(srqn)).unwrap();
    client.wait_success();
    let wc = server.wait();
    assert_eq!((wc.wr_id, wc.status, wc.byte_len), (9, Status::Success, 12));
    c.disconnect_and_wait(LONG);
    assert!(s.wait_ended(LONG));
}

#[test]
fn listen_for__refuses_what_it_does_not_offer() {
    let address = [127, 0, 0, 52];
    let server = common::open(address.into()).unwrap();
    let connected = server.listen(7174).unwrap();
    let unreliable = server.listen_for(7175, &[QpType::Uc]).unwrap();
    let cases = [
        (&connected, 7174, QpType::Rc, QpType::Uc),
        (&unreliable, 7175, QpType::Uc, QpType::Rc),
    ];
    for (listener, port, offered, other) in cases {
        std::thread::scope(|scope| {
            // The program drops the request that may come, and so refuses it.
            let refusing = scope.spawn(|| listener.accept(LONG).map(|request| request.qp_type()));
            for qp_type in [QpType::XrcSend, other, offered] {
                let client = End::of_type(address, qp_type);
                let peer = SocketAddr::new(address.into(), port);
                let refused = client
                    .device
                    .connect(&client.qp, peer, &ConnectParams::default(), &[]);
                let wanted = match qp_type == offered {
                    true => RejReason::CONSUMER,
                    false => RejReason::INVALID_TRANSPORT,
                };
                assert!(
                    matches!(refused, Err(ConnectError::Rejected { reason, .. }) if reason == wanted),
                    "{qp_type:?} at {port}: {refused:?}"
                );
            }
            assert_eq!(refusing.join().unwrap(), Some(offered));
        });
    }
}

#[test]
fn connect__with_a_queue_pair_that_is_not_for_it() {
    let address = [127, 0, 0, 53];
    let peer = SocketAddr::new(address.into(), 7174);
    let device = common::open(address.into()).unwrap();
    let (target, _srq) = End::xrc_target(&device, private(4096));
    let datagrams = End::of_type(address, QpType::Ud);
    for (end, qp_type) in [(datagrams, QpType::Ud), (target, QpType::XrcRecv)] {
        let refused = end.device.connect(&end.qp, peer, &ConnectParams::default(), &[]);
        assert!(matches!(refused, Err(ConnectError::QpType(t)) if t == qp_type));
    }
    let server = End::of_type(address, QpType::Uc);
    let listener = server.device.listen(7174).unwrap();
    let client = End::new(address);
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            request
                .accept(&server.qp, &ConnectParams::default(), &[])
                .map(drop)
        });
        let refused = client
            .device
            .connect(&client.qp, peer, &ConnectParams::default(), &[]);
        assert!(matches!(refused, Err(ConnectError::Rejected { .. })));
        let accepted = accepting.join().unwrap();
        assert!(matches!(accepted, Err(ConnectError::QpType(QpType::Uc))));
    });
}

#[test]
fn connecting__dropped_is_withdrawn() {
    let address: IpAddr = "127.0.0.59".parse().unwrap();
    let (client, server) = (End::new(address), End::new(address));
    let listener = server.device.listen(7174).unwrap();
    let params = ConnectParams::default();
    let connecting = start_connect(&client, address);
    let mut request = listener.accept(LONG).unwrap();
    drop(connecting);
    // The peer may not have learnt of it yet.
    if let Ok(connection) = request.accept_pair(ConnectPair::Own(&server.qp), &params, b"") {
        assert!(!connection.wait_established());
    }
    assert_eq!(client.qp.query().unwrap().state, QpState::Reset);
    // A request for a datagram service.
    let service = client.device.listen_datagram(7174).unwrap();
    let resolving = client
        .device
        .start_resolve(0, SocketAddr::new(address, 7174), b"");
    let request = service.accept(LONG);
    drop(resolving);
    assert!(request.is_some());
}

fn start_connect(end: &End, address: IpAddr) -> Connecting {
    let (pair, peer) = (ConnectPair::Own(&end.qp), SocketAddr::new(address, 7174));
    end.device
        .start_connect(pair, peer, &ConnectParams::default(), b"")
        .unwrap()
}

#[test]
fn connecting__refused_reports_why() {
    let address = IpAddr::from([127, 0, 14, 31]);
    let (client, server) = (End::new(address), End::new(address));
    let events = EventQueue::new().unwrap();
    let result_of = |mut connecting: Connecting| loop {
        if let Some(result) = connecting.poll() {
            return result.map(drop);
        }
        assert_eq!(events.wait(LONG), Some(3));
    };
    // Nobody listens.
    let connecting = start_connect(&client, address);
    connecting.notify(&events, 3);
    let result = result_of(connecting);
    assert!(
        matches!(result, Err(ConnectError::Rejected { reason, .. }) if reason == RejReason::INVALID_SERVICE_ID)
    );
    let listener = server.device.listen(7174).unwrap();
    let connecting = start_connect(&client, address);
    connecting.notify(&events, 3);
    listener.accept(LONG).unwrap().reject(b"no");
    let result = result_of(connecting);
    assert!(
        matches!(result, Err(ConnectError::Rejected { reason, private_data }) if reason == RejReason::CONSUMER && private_data.starts_with(b"no"))
    );
    assert_eq!(client.qp.query().unwrap().state, QpState::Reset);
}

#[test]
fn rests_for__until_the_numbers_may_be_used_again() {
    let (_client, _server, [c, s]) = connected([127, 0, 0, 60]);
    assert_eq!((c.rests_for(), s.rests_for()), (None, None));
    c.disconnect_and_wait(LONG);
    assert!(s.wait_ended(LONG));
    for connection in [c, s] {
        while let Some(left) = connection.rests_for() {
            assert!(left <= Duration::from_millis(68), "{left:?}");
            // The test needs time to pass: numbers rest for this long, and no event shows when they rest no more.
            std::thread::sleep(left);
        }
    }
}

#[test]
fn connect__private_data_of_full_size_and_no_more() {
    let address: IpAddr = "127.0.0.54".parse().unwrap();
    let (client, server) = (End::new(address), End::new(address));
    let listener = server.device.listen(7174).unwrap();
    let peer = SocketAddr::new(address, 7174);
    let connect = |data: &[u8]| {
        client
            .device
            .connect(&client.qp, peer, &ConnectParams::default(), data)
    };
    assert!(matches!(connect(&[1; 57]), Err(ConnectError::PrivateData)));
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).unwrap();
            request.reject(&[3; 148]);
            let request = listener.accept(LONG).unwrap();
            assert_eq!(request.private_data(), [1; 56]);
            request
                .accept(&server.qp, &ConnectParams::default(), &[2; 196])
                .unwrap()
        });
        match connect(&[1; 56]) {
            Err(ConnectError::Rejected { reason, private_data }) => {
                assert_eq!((reason, private_data), (RejReason::CONSUMER, vec![3; 148]));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(connect(&[1; 56]).unwrap().private_data(), [2; 196]);
        accepting.join().unwrap();
    });
}

#[test]
fn init__takes_receives_before_the_queue_pair_is_connected() {
    let address = IpAddr::from([127, 0, 11, 61]);
    let (client, server) = (End::new(address), End::new(address));
    for end in [&client, &server] {
        let receive = || {
            end.qp.post_recv(RecvRequest {
                wr_id: 2,
                sges: end.mr.sge(0, 8).into(),
            })
        };
        assert_eq!(receive(), Err(PostError::WrongState));
        end.qp.init().unwrap();
        receive().unwrap();
    }
    // Without its receive, a message would end the connection.
    let params = ConnectParams {
        rnr_retry: 0,
        ..ConnectParams::default()
    };
    let peer = SocketAddr::new(address, 7174);
    let connect_client = || client.device.connect(&client.qp, peer, &params, b"");
    // Nobody listens: the queue pair is as it was.
    assert!(matches!(connect_client(), Err(ConnectError::Rejected { .. })));
    let listener = server.device.listen(7174).unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            let connection = request.accept(&server.qp, &params, b"").unwrap();
            (connection, exchange(&server))
        });
        let connection = connect_client().unwrap();
        let statuses = exchange(&client);
        let (_accepted, theirs) = accepting.join().unwrap();
        assert_eq!((statuses, theirs), ([Status::Success; 2], [Status::Success; 2]));
        drop(connection);
    });
}

/// Sends, and takes the completions of the send and of the receive.
fn exchange(end: &End) -> [Status; 2] {
    let request = send(1, Operation::Send { imm: None }, end.mr.sge(8, 8).into());
    end.qp.post_send(request).unwrap();
    [(); 2].map(|()| end.wait().status)
}

#[test]
fn drop__of_a_connection_that_has_ended_leaves_its_queue_pair_alone() {
    let (_client, server, [c, s]) = connected([127, 0, 11, 60]);
    c.disconnect();
    assert!(s.wait_ended(LONG));
    for state in [QpState::Reset, QpState::Init] {
        let access = (state == QpState::Init).then_some(Access::empty());
        let attr = QpAttributes {
            access,
            ..Default::default()
        };
        server.qp.modify(state, &attr).unwrap();
    }
    drop(s);
    assert_eq!(server.qp.query().unwrap().state, QpState::Init);
}

/// A thread waits for the end while another one checks whether it has come, and so is the first to see it.
#[test]
fn wait_ended__when_another_thread_looks_first() {
    let (client, server, [c, s]) = connected([127, 0, 0, 97]);
    drop((c, s));
    for _ in 0..100 {
        let qp = |end: &End| end.qp.pd().create_qp(&QpOptions::new(&end.cq)).unwrap();
        let (own, other) = (qp(&client), qp(&server));
        let [c, s] = connect(&own, &other, &ConnectParams::default());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| c.wait_ended(Duration::from_secs(3_600)));
            s.disconnect();
            while !c.is_ended() {}
            assert!(waits.join().unwrap());
        });
    }
}
