//! Connections of applications of two nodes, which share queue pairs of the nodes' devices.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, Served, Side, config, open};
use rdmux_key::Key;
use rdmux_memory::AnonymousMemory;
use rdmux_share::node::NodeOptions;
use rdmux_share::node::snapshot::Route;
use rdmux_verbs::{
    Access, AsyncEvent, CompletionQueue, ConnectParams, Device, Memory, Options, Path, ProtectionDomain, Psn,
    QpAttributes, QpOptions, QpState, Qpn, QueuePair, RKey, RecvRequest, RemoteBuffer, SendRequest, SgeList,
    Status, WcOpcode,
};

/// Starts a node that shares queue pairs with those of the same key.
fn serve(number: u8, key: u8) -> Served {
    Served::at([127, 0, 54, number], Some([key; 32]))
}

/// Starts such a node with so many engines, on a device with such faults.
fn serve_with(number: u8, engines: usize, faults: Option<&str>) -> Served {
    let options = NodeOptions {
        key: Some(Key::new([1; 32])),
        engines,
        ..NodeOptions::default()
    };
    Served::with_options([127, 0, 54, number], options, faults)
}

/// Returns what tells the engine of a queue pair from the others of its device.
fn engine_of(side: &Side) -> u32 {
    side.qp.qpn().value() >> 16
}

/// Returns the number of queue pairs of the node's device.
fn qps(node: &Served) -> usize {
    node.device.object_counts().0
}

/// Attaches an application.
fn side(node: &Served) -> Side {
    Side::of(open(node.address, "shared"), 1024, new_qp)
}

fn new_qp(pd: &ProtectionDomain, cq: &CompletionQueue) -> QueuePair {
    let options = QpOptions {
        max_send_wr: 64,
        max_recv_wr: 64,
        ..QpOptions::new(cq)
    };
    let qp = pd.create_qp(&options).unwrap();
    let init = QpAttributes {
        access: Some(
            Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        ),
        ..QpAttributes::default()
    };
    qp.modify(QpState::Init, &init).unwrap();
    qp
}

/// Brings up a queue pair as programs do that exchange QPNs by themselves.
fn bring_up(qp: &QueuePair, src: IpAddr, dst: IpAddr, dest: Qpn) {
    let path = Path {
        src,
        dst,
        src_port: 0,
        traffic_class: 0,
    };
    bring_up_on(qp, path, dest);
}

fn bring_up_on(qp: &QueuePair, path: Path, dest: Qpn) {
    let rtr = QpAttributes {
        path: Some(path),
        path_mtu: Some(1024),
        dest_qpn: Some(dest),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(4),
        min_rnr_timer: Some(12),
        ..QpAttributes::default()
    };
    qp.modify(QpState::Rtr, &rtr).unwrap();
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..QpAttributes::default()
    };
    qp.modify(QpState::Rts, &rts).unwrap();
}

fn connect(a: (&Served, &QueuePair), b: (&Served, &QueuePair)) {
    bring_up(a.1, a.0.address, b.0.address, b.1.qpn());
    bring_up(b.1, b.0.address, a.0.address, a.1.qpn());
}

fn pair(a: &Served, b: &Served) -> (Side, Side) {
    let (client, server) = (side(a), side(b));
    connect((a, &client.qp), (b, &server.qp));
    (client, server)
}

/// Every operation between applications of two nodes, of lengths with and without a receive to be written into.
fn operations(client: &Side, server: &Side) {
    client.put(0, b"written");
    let remote = server.mr.remote(100..107).unwrap();
    let write = SendRequest::write(client.sge(0, 7), remote);
    client.qp.post_send(write.wr_id(1).signaled()).unwrap();
    client.expect(1, WcOpcode::Write);
    assert_eq!(server.got(100, 7), b"written");

    let read = SendRequest::read(client.sge(1000, 7), remote);
    client.qp.post_send(read.wr_id(2).signaled()).unwrap();
    assert_eq!(client.expect(2, WcOpcode::Read).byte_len, 7);
    assert_eq!(client.got(1000, 7), b"written");

    let receive = |wr_id, at, len| RecvRequest::new(wr_id, server.sge(at, len));
    server.qp.post_recv(receive(77, 2000, 64)).unwrap();
    let list = [client.sge(0, 3), client.sge(5, 1), client.sge(3, 2)];
    let send = SendRequest::send(&list[..]);
    client.qp.post_send(send.wr_id(3).imm(0xabcd).signaled()).unwrap();
    client.expect(3, WcOpcode::Send);
    let wc = server.expect(77, WcOpcode::Recv);
    assert_eq!((wc.byte_len, wc.imm), (6, Some(0xabcd)));
    assert_eq!(server.got(2000, 6), b"wriett");

    server.put(8, &5u64.to_ne_bytes());
    let word = server.mr.remote(8..16).unwrap();
    let add = SendRequest::fetch_add(client.sge(64, 8), word, 3);
    client.qp.post_send(add.wr_id(4).signaled()).unwrap();
    client.expect(4, WcOpcode::FetchAdd);
    let swap = SendRequest::compare_swap(client.sge(72, 8), word, 8, 9);
    client.qp.post_send(swap.wr_id(5).signaled()).unwrap();
    client.expect(5, WcOpcode::CompareSwap);
    let found = [5u64.to_ne_bytes(), 8u64.to_ne_bytes()].concat();
    assert_eq!(client.got(64, 16), found);

    let bytes: Vec<u8> = (0..300_000_u32).map(|n| (n * 7) as u8).collect();
    client.put(4096, &bytes);
    let all = server.mr.remote(200_000..).unwrap();
    let write = SendRequest::write(client.sge(4096, 300_000), all);
    server.qp.post_recv(receive(78, 0, 0)).unwrap();
    client.qp.post_send(write.wr_id(6).imm(99).signaled()).unwrap();
    client.expect(6, WcOpcode::Write);
    let wc = server.expect(78, WcOpcode::RecvRdmaWithImm);
    assert_eq!((wc.byte_len, wc.imm), (300_000, Some(99)));
    assert_eq!(server.got(200_000, 300_000), bytes);

    server
        .qp
        .post_recv(RecvRequest::new(
            79,
            &[server.sge(600_000, 50_000), server.sge(660_000, 200_000)][..],
        ))
        .unwrap();
    let send = SendRequest::send(client.sge(4096, 200_000));
    client.qp.post_send(send.wr_id(7).signaled()).unwrap();
    client.expect(7, WcOpcode::Send);
    assert_eq!(server.expect(79, WcOpcode::Recv).byte_len, 200_000);
    assert_eq!(server.got(600_000, 50_000), bytes[..50_000]);
    assert_eq!(server.got(660_000, 150_000), bytes[50_000..200_000]);

    let inline: Vec<u8> = (0..1000).map(|n| n as u8).collect();
    server.qp.post_recv(receive(80, 5000, 2000)).unwrap();
    let send = SendRequest::send(SgeList::inline(&inline));
    client.qp.post_send(send.wr_id(8).signaled()).unwrap();
    client.expect(8, WcOpcode::Send);
    assert_eq!(server.expect(80, WcOpcode::Recv).byte_len, 1000);
    assert_eq!(server.got(5000, 1000), inline);
}

#[test]
fn post_send__each_operation() {
    let (here, there) = (serve(1, 1), serve(2, 1));
    let (client, server) = pair(&here, &there);
    operations(&client, &server);
    operations(&server, &client);
    for side in [&client, &server] {
        assert!(format!("{:?}", side.qp.carrier()).contains("share"));
    }
}

/// Connections that are made by address and port.
#[test]
fn connect__by_address_and_port() {
    let (here, there) = (serve(9, 1), serve(10, 1));
    let (client, server) = (side(&here), side(&there));
    connect_by_address(&client, (&server, there.address));
}

/// The one that listens is on the second engine.
#[test]
fn connect__by_address_and_port_to_another_engine() {
    let (here, there) = (serve_with(42, 2, None), serve_with(43, 2, None));
    let (client, first, server) = (side(&here), side(&there), side(&there));
    assert_ne!(engine_of(&first), engine_of(&server));
    connect_by_address(&client, (&server, there.address));
}

fn connect_by_address(client: &Side, (server, there): (&Side, IpAddr)) {
    let listener = server.device.listen(7175).unwrap();
    let params = ConnectParams::default();
    let (connected, accepted) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(LONG).unwrap();
            let accepted = request.accept(&server.qp, &params, b"ho").unwrap();
            assert!(accepted.wait_established());
            accepted
        });
        let address = (there, 7175).into();
        let connected = client.device.connect(&client.qp, address, &params, b"hey");
        (connected.unwrap(), accepted.join().unwrap())
    });
    operations(client, server);
    operations(server, client);
    assert!(format!("{:?}", client.qp.carrier()).contains("share"));
    // The end of a connection ends its queue pairs.
    server
        .qp
        .post_recv(RecvRequest::new(1, server.sge(0, 8)))
        .unwrap();
    client
        .qp
        .post_recv(RecvRequest::new(2, client.sge(0, 8)))
        .unwrap();
    drop(connected);
    for (side, wr_id) in [(server, 1), (client, 2)] {
        let wc = side.next();
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Flushed));
    }
    assert!(accepted.wait_ended(LONG));
}

/// Connects two applications by address and port, and has the server send into receives that its peer posted before.
fn connect_with_receives(client: &Side, server: &Side, there: IpAddr) {
    let listener = server.device.listen(7176).unwrap();
    let params = ConnectParams::default();
    let receive = |side: &Side| side.qp.post_recv(RecvRequest::new(1, side.sge(0, 64))).unwrap();
    receive(client);
    receive(server);
    let (_connected, _accepted) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(LONG).unwrap();
            let accepted = request.accept(&server.qp, &params, &[]).unwrap();
            assert!(accepted.wait_established());
            accepted
        });
        let connected = client
            .device
            .connect(&client.qp, (there, 7176).into(), &params, &[]);
        (connected.unwrap(), accepted.join().unwrap())
    });
    for (from, to) in [(client, server), (server, client)] {
        let send = SendRequest::send(SgeList::inline(b"hello"));
        from.qp.post_send(send.wr_id(2).signaled()).unwrap();
        from.expect(2, WcOpcode::Send);
        assert_eq!(to.expect(1, WcOpcode::Recv).byte_len, 5);
        assert_eq!(to.got(0, 5), b"hello");
    }
    assert!(!format!("{:?}", client.qp.carrier()).contains("share"));
}

/// The applications of one node have queue pairs of their own, with the receives that they have posted before.
#[test]
fn connect__within_a_node() {
    let node = serve(12, 1);
    let (client, server) = (side(&node), side(&node));
    connect_with_receives(&client, &server, node.address);
}

/// So does an application with memory that it can take away: a shared queue pair would fail for all.
#[test]
fn connect__with_memory_of_the_process() {
    let (here, there) = (serve(13, 1), serve(14, 1));
    let (client, server) = (side(&here), side(&there));
    let memory = Arc::new(AnonymousMemory::new(4096).unwrap());
    let mr = client.pd.reg_mr_all(memory, 0, Access::LOCAL_WRITE);
    connect_with_receives(&client, &server, there.address);
    drop(mr);
}

/// Receives of a queue pair that goes to Error before it is connected are flushed.
#[test]
fn modify__from_init_to_error() {
    let node = serve(15, 1);
    let side = side(&node);
    let receive = |wr_id| {
        side.qp
            .post_recv(RecvRequest::new(wr_id, side.sge(0, 8)))
            .unwrap()
    };
    receive(1);
    side.qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    receive(2);
    for wr_id in [1, 2] {
        let wc = side.next();
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Flushed));
    }
}

/// Memory of receives of which the peer's node was told goes once that writes into it no more, though others' connections stay.
#[test]
fn deregister__memory_of_receives() {
    const LEN: u64 = 64 << 10;
    let (here, there) = (serve(120, 1), serve(121, 1));
    let (client, server) = pair(&here, &there);
    operations(&client, &server);
    let regions = || there.device.object_counts().1;
    let wait_until_there_are = |expected: usize| {
        let deadline = Instant::now() + LONG;
        while regions() != expected {
            assert!(Instant::now() < deadline, "{} regions, not {expected}", regions());
        }
    };
    let before = regions();
    // Posts so many receives, of which one is used.
    let receives = |client: &Side, server: &Side, count: u64| {
        let memory = Arc::new(AnonymousMemory::shareable(LEN as usize).unwrap());
        let mr = server.pd.reg_mr_all(memory, 0, Access::LOCAL_WRITE).unwrap();
        for _ in 0..count {
            let receive = RecvRequest::new(1, mr.slice(0..LEN).unwrap());
            server.qp.post_recv(receive).unwrap();
        }
        let send = SendRequest::send(client.sge(0, LEN)).wr_id(1).signaled();
        client.qp.post_send(send).unwrap();
        client.expect(1, WcOpcode::Send);
        server.expect(1, WcOpcode::Recv);
        mr
    };
    // Its receive has come: nobody writes any more.
    drop(receives(&client, &server, 1));
    wait_until_there_are(before);
    // Those that have not come, of an application that goes.
    let (other_client, other_server) = pair(&here, &there);
    let mr = receives(&other_client, &other_server, 4);
    drop((mr, other_server));
    wait_until_there_are(before);
    operations(&client, &server);
}

/// A receive into memory that was deregistered takes no message, and nobody writes into that memory, as on a queue pair of its own.
#[test]
fn deregister__memory_of_a_receive_that_waits() {
    const LEN: u64 = 64 << 10;
    let (here, there) = (serve(124, 1), serve(125, 1));
    let (client, server) = pair(&here, &there);
    let (other_client, other_server) = pair(&here, &there);
    operations(&client, &server);
    let before = there.device.object_counts().1;
    let memory = Arc::new(AnonymousMemory::shareable(LEN as usize).unwrap());
    let mr = server
        .pd
        .reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE)
        .unwrap();
    let receive = || RecvRequest::new(1, mr.slice(0..LEN).unwrap());
    (0..2).for_each(|_| server.qp.post_recv(receive()).unwrap());
    client.put(0, &[1; LEN as usize]);
    let send = || SendRequest::send(client.sge(0, LEN)).wr_id(1).signaled();
    // Once a message has come, the other node knows of both receives.
    client.qp.post_send(send()).unwrap();
    client.expect(1, WcOpcode::Send);
    server.expect(1, WcOpcode::Recv);
    drop(mr);
    assert_eq!(there.device.object_counts().1, before);
    memory.write(0, &[2; LEN as usize]).unwrap();
    client.qp.post_send(send()).unwrap();
    let (sent, received) = (client.next(), server.next());
    assert_eq!((sent.wr_id, sent.status), (1, Status::RemoteOperation));
    assert_eq!((received.wr_id, received.status), (1, Status::LocalProtection));
    let mut bytes = [0; LEN as usize];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 2));
    operations(&other_client, &other_server);
}

/// A queue pair on a shared one is not connected a second time: neither within its node, where it would have one of its own, nor elsewhere.
#[test]
fn connect__a_second_time() {
    let (here, there) = (serve(122, 1), serve(123, 1));
    let (client, server) = pair(&here, &there);
    operations(&client, &server);
    for address in [here.address, there.address] {
        let params = ConnectParams::default();
        let again = client
            .device
            .connect(&client.qp, (address, 7177).into(), &params, &[]);
        let why = again.unwrap_err().to_string();
        assert!(why.contains("is, or was, connected"), "{why}");
    }
    operations(&server, &client);
    drop((client, server));
    let deadline = Instant::now() + LONG;
    while here.viewer.snapshot().unwrap().shared_qps[0].connections > 0 {
        assert!(Instant::now() < deadline, "the connection stays");
    }
}

/// A node with another key, or none, is no peer: the connection has queue pairs of its own.
#[test]
fn peers__that_do_not_agree_have_queue_pairs_of_their_own() {
    let (here, there) = (serve(3, 1), serve(4, 2));
    let (client, server) = pair(&here, &there);
    operations(&client, &server);
}

/// Four applications of each node, with 16 connections each.
#[test]
fn connections__share_one_queue_pair() {
    let (here, there) = (serve(5, 1), serve(6, 1));
    let sides: Vec<_> = (0..4).map(|_| pair(&here, &there)).collect();
    let mut more = Vec::new();
    for (client, server) in &sides {
        for _ in 0..15 {
            let ends = (new_qp(&client.pd, &client.cq), new_qp(&server.pd, &server.cq));
            connect((&here, &ends.0), (&there, &ends.1));
            more.push(ends);
        }
    }
    for (client, server) in &sides {
        operations(client, server);
    }
    for (at, (client, _)) in more.iter().enumerate() {
        let (of, to) = &sides[at / 15];
        of.put(0, &[at as u8; 8]);
        let remote = to.mr.remote(64..72).unwrap();
        let write = SendRequest::write(of.sge(0, 8), remote);
        client.post_send(write.wr_id(at as u64).signaled()).unwrap();
        let wc = of.next();
        let expected = (at as u64, Status::Success, WcOpcode::Write, client.qpn());
        assert_eq!((wc.wr_id, wc.status, wc.opcode, wc.qpn), expected);
        assert_eq!(to.got(64, 8), [at as u8; 8]);
    }
    let snapshot = here.viewer.snapshot().unwrap();
    let [shared] = &snapshot.shared_qps[..] else {
        panic!("{snapshot:?}");
    };
    assert_eq!((shared.peer, shared.connections), (there.address, 64));
    assert_eq!((&*shared.tenant, shared.in_flight_bytes), ("default", 0));
    assert!(shared.window_bytes > 0);
    assert_eq!(snapshot.connections.len(), 64);
    for connection in &snapshot.connections {
        assert_eq!(
            (connection.route, connection.shared_qp, connection.peer),
            (Route::Shared, Some(shared.id), Some(there.address))
        );
        assert!(connection.counts.requests > 0 && connection.counts.errors == 0);
    }
    // Those of the applications, one that is shared, and one or two of the control channel.
    for served in [&here, &there] {
        let qps = qps(served);
        assert!((66..=67).contains(&qps), "{qps}");
    }
}

/// A tenant goes from the configuration, and comes back: its applications share with those of the tenant in which they are, and with no others.
#[test]
fn apply__applications_that_move_to_another_tenant() {
    let options = NodeOptions {
        key: Some(Key::new([1; 32])),
        config: Some(config("[tenant.a]\nuid = [OWN]")),
        ..NodeOptions::default()
    };
    let here = Served::with_options([127, 0, 54, 94], options, None);
    let there = serve(95, 1);
    let tenants = || {
        let snapshot = here.viewer.snapshot().unwrap();
        let shared = snapshot.shared_qps.iter();
        shared.map(|shared| shared.tenant.clone()).collect::<Vec<_>>()
    };
    let (mut client, mut server) = pair(&here, &there);
    operations(&client, &server);
    assert_eq!(tenants(), ["a"]);
    for tenant in ["b", "a"] {
        let (next, next_there) = (side(&here), side(&there));
        here.apply(&format!("[tenant.{tenant}]\nuid = [OWN]"));
        // Both ends of a connection learn of its end.
        for (one, other) in [(&client, &server), (&server, &client)] {
            let ended = std::iter::repeat_with(|| {
                let write = SendRequest::write(one.sge(0, 8), other.mr.remote(0..8).unwrap());
                one.qp.post_send(write.wr_id(5).signaled()).unwrap();
                one.next().status
            });
            // The peer may not know yet.
            let error = { ended }.find(|status| *status != Status::Success).unwrap();
            assert!(
                matches!(error, Status::Flushed | Status::RetryExceeded),
                "{error:?}"
            );
        }
        connect((&here, &next.qp), (&there, &next_there.qp));
        operations(&next, &next_there);
        assert!(tenants().contains(&tenant.into()), "{:?}", tenants());
        // So do those that an application makes after it has moved.
        let more = (new_qp(&next.pd, &next.cq), new_qp(&next_there.pd, &next_there.cq));
        connect((&here, &more.0), (&there, &more.1));
        let write = SendRequest::write(next.sge(0, 8), next_there.mr.remote(0..8).unwrap());
        more.0.post_send(write.wr_id(6).signaled()).unwrap();
        let wc = next.next();
        assert_eq!((wc.wr_id, wc.status), (6, Status::Success));
        (client, server) = (next, next_there);
    }
    assert_eq!(tenants().iter().filter(|tenant| *tenant == "a").count(), 1);
}

/// Connections of more traffic classes than the nodes may have shared queue pairs, all of them in constant use: each has its turn, and everything
/// takes effect once. Then all are idle, and those that were put away are used again.
#[test]
fn connections__on_more_lines_than_queue_pairs() {
    const LINES: u8 = 6;
    const ROUNDS: u64 = 200;
    let serve = |number| {
        let options = NodeOptions {
            key: Some(Key::new([1; 32])),
            shared_queue_pairs: 2,
            ..NodeOptions::default()
        };
        Served::with_options([127, 0, 54, number], options, None)
    };
    let (here, there) = (serve(40), serve(41));
    let sides: Vec<_> = (0..LINES)
        .map(|line| {
            let (client, server) = (side(&here), side(&there));
            let path = |from: &Served, to: &Served| Path {
                src: from.address,
                dst: to.address,
                src_port: 0,
                traffic_class: line << 5,
            };
            bring_up_on(&client.qp, path(&here, &there), server.qp.qpn());
            bring_up_on(&server.qp, path(&there, &here), client.qp.qpn());
            (client, server)
        })
        .collect();
    let round = |(client, server): &(Side, Side), n: u64| {
        let word = server.mr.remote(0..8).unwrap();
        let receive = RecvRequest::new(n, server.sge(64, 8));
        server.qp.post_recv(receive).unwrap();
        let add = SendRequest::fetch_add(client.sge(0, 8), word, 1);
        client.qp.post_send(add.wr_id(n).signaled()).unwrap();
        let send = SendRequest::send(SgeList::inline(&n.to_ne_bytes()));
        client.qp.post_send(send.wr_id(n).signaled()).unwrap();
        client.expect(n, WcOpcode::FetchAdd);
        assert_eq!(client.got(0, 8), n.to_ne_bytes(), "each took effect once");
        client.expect(n, WcOpcode::Send);
        server.expect(n, WcOpcode::Recv);
        assert_eq!(server.got(64, 8), n.to_ne_bytes());
    };
    std::thread::scope(|scope| {
        for side in &sides {
            scope.spawn(|| (0..ROUNDS).for_each(|n| round(side, n)));
        }
    });
    for side in &sides {
        round(side, ROUNDS);
    }
    // Those of the applications, two that are shared, and one or two of the control channel.
    for served in [&here, &there] {
        let qps = qps(served);
        assert!(qps <= usize::from(LINES) + 4, "{qps}");
    }
}

/// Errors of one connection are those of a queue pair of its own, and concern no other one.
#[test]
fn errors__of_one_connection() {
    let (here, there) = (serve(7, 1), serve(8, 1));
    let (bystander, of_bystander) = pair(&here, &there);
    operations(&bystander, &of_bystander);

    // A key that does not exist.
    let (client, server) = pair(&here, &there);
    let mut remote = server.mr.remote(..64).unwrap();
    remote.rkey = RKey(remote.rkey.0 ^ 0x5500);
    let write = SendRequest::write(client.sge(0, 8), remote);
    client.qp.post_send(write.wr_id(1)).unwrap();
    let wc = client.next();
    assert_eq!((wc.wr_id, wc.status), (1, Status::RemoteAccess));
    wait_for(&server, AsyncEvent::QpAccessError(server.qp.qpn()));

    // A queue pair that allows its peer nothing.
    let (client, server) = (side(&here), side(&there));
    let qp = server.pd.create_qp(&QpOptions::new(&server.cq)).unwrap();
    qp.init().unwrap();
    connect((&here, &client.qp), (&there, &qp));
    let write = SendRequest::write(client.sge(0, 8), server.mr.remote(..64).unwrap());
    client.qp.post_send(write.wr_id(4)).unwrap();
    let wc = client.next();
    assert_eq!((wc.wr_id, wc.status), (4, Status::RemoteInvalidRequest));
    wait_for(&server, AsyncEvent::QpRequestError(qp.qpn()));

    // A message that does not fit.
    let (client, server) = pair(&here, &there);
    server
        .qp
        .post_recv(RecvRequest::new(5, server.sge(0, 8)))
        .unwrap();
    server
        .qp
        .post_recv(RecvRequest::new(6, server.sge(0, 8)))
        .unwrap();
    let send = SendRequest::send(client.sge(0, 9));
    client.qp.post_send(send.wr_id(2)).unwrap();
    let wc = client.next();
    assert_eq!((wc.wr_id, wc.status), (2, Status::RemoteInvalidRequest));
    let found = [server.next(), server.next()].map(|wc| (wc.wr_id, wc.status));
    assert_eq!(found, [(5, Status::LocalLength), (6, Status::Flushed)]);

    // An application that goes while its peer sends.
    let (client, server) = pair(&here, &there);
    operations(&client, &server);
    drop(client);
    let write = |wr_id| SendRequest::send(server.sge(0, 8)).wr_id(wr_id);
    server.qp.post_send(write(3)).unwrap();
    let wc = server.next();
    assert_eq!((wc.wr_id, wc.status), (3, Status::RetryExceeded));

    operations(&bystander, &of_bystander);
    operations(&of_bystander, &bystander);
}

fn wait_for(side: &Side, event: AsyncEvent) {
    let deadline = Instant::now() + LONG;
    while side.device.poll_async_event() != Some(event) {
        assert!(Instant::now() < deadline, "{event:?}");
        std::thread::yield_now();
    }
}

/// The shared queue pair fails at either end while applications use it: none of them notices.
#[test]
fn shared_queue_pair__fails_under_load() {
    let mut number = 20;
    for faults in [["qp-error=200", "qp-error=350"], ["qp-error=500", "qp-error=301"]] {
        let [here, there] = faults.map(|faults| {
            number += 1;
            Served::with_faults([127, 0, 54, number], Some([1; 32]), Some(faults))
        });
        let pairs: Vec<_> = (0..4).map(|_| pair(&here, &there)).collect();
        std::thread::scope(|scope| {
            for (client, server) in &pairs {
                scope.spawn(move || {
                    for _ in 0..3 {
                        operations(client, server);
                        operations(server, client);
                    }
                });
            }
        });
        for node in [&here, &there] {
            let counts = node.device.fault_counts().unwrap();
            assert_eq!(counts.qp_errors, 1, "{counts:?}");
        }
    }
}

/// Variable that allows WRITEs to take effect twice.
const REPLAY_WRITE: &str = "RDMUX_REPLAY_WRITE";

/// A shared queue pair of nodes that do as those of RNICs fails: nobody knows whether the WRITEs in flight took effect. They fail the connection, unless the
/// application allows that they take effect twice. It says so by the variable, or by the option of its device.
#[test]
fn write__of_unknown_effect_is_replayed_where_that_is_allowed() {
    const BYTES: u64 = 1 << 18;
    const WRITES: u64 = 120;
    const DEPTH: u64 = 8;
    let of_variable = std::env::var_os(REPLAY_WRITE).is_some();
    let number = if of_variable { 32 } else { 30 };
    let serve = |number, faults| {
        let options = NodeOptions {
            key: Some(Key::new([1; 32])),
            tells_executed: false,
            ..NodeOptions::default()
        };
        Served::with_options([127, 0, 54, number], options, faults)
    };
    let (here, there) = (serve(number, Some("qp-error=400")), serve(number + 1, None));
    let mut pairs = [None, Some(!of_variable)].map(|replay_writes| {
        let options = Options {
            provider: Some("shared"),
            replay_writes,
            ..Options::default()
        };
        let device = Device::open_with(here.address, options).unwrap();
        let (client, server) = (Side::of(device, 1024, new_qp), side(&there));
        connect((&here, &client.qp), (&there, &server.qp));
        (
            replay_writes.unwrap_or(of_variable),
            client,
            server,
            Status::Success,
        )
    });
    let post = |client: &Side, server: &Side, wr_id: u64, bytes: u64| {
        let write = SendRequest::write(client.sge(0, bytes), server.mr.remote(..bytes).unwrap());
        client.qp.post_send(write.wr_id(wr_id).signaled()).unwrap();
    };
    for (_, client, server, _) in &pairs {
        client.put(0, &[number; BYTES as usize]);
        // The nodes have the keys of both then.
        post(client, server, 0, 8);
        client.expect(0, WcOpcode::Write);
    }
    for (_, client, server, _) in &pairs {
        (0..DEPTH).for_each(|wr_id| post(client, server, wr_id, BYTES));
    }
    for wr_id in 0..WRITES {
        for (_, client, server, status) in &mut pairs {
            if *status != Status::Success {
                continue;
            }
            let wc = client.next();
            assert_eq!(wc.wr_id, wr_id);
            *status = wc.status;
            if wc.status == Status::Success && wr_id + DEPTH < WRITES {
                post(client, server, wr_id + DEPTH, BYTES);
            }
        }
    }
    for (is_allowed, _, server, status) in &pairs {
        let expected = match is_allowed {
            true => Status::Success,
            false => Status::RetryExceeded,
        };
        assert_eq!(*status, expected, "allowed: {is_allowed}");
        if *is_allowed {
            assert_eq!(server.got(0, BYTES as usize), [number; BYTES as usize]);
        }
    }
    if !of_variable {
        let name = "write__of_unknown_effect_is_replayed_where_that_is_allowed";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(REPLAY_WRITE, "1")
            .status();
        assert!(child.unwrap().success());
    }
}

/// Connects four applications of each of two nodes so that each pair of their engines has one.
fn engine_pairs(here: &Served, there: &Served) -> Vec<(Side, Side)> {
    let [clients, servers] = [here, there].map(|node| (0..4).map(|_| side(node)).collect::<Vec<_>>());
    let mut servers: Vec<_> = servers.into_iter().map(Some).collect();
    let mut connected = |(client, to): (Side, usize)| {
        let server = servers[to].take().unwrap();
        connect((here, &client.qp), (there, &server.qp));
        (client, server)
    };
    // An application goes to the engine with the fewest: to each in turn.
    clients
        .into_iter()
        .zip([0, 1, 3, 2])
        .map(&mut connected)
        .collect()
}

/// Applications on different engines of nodes with as many engines, or with fewer: each pair of engines has shared queue pairs of its own.
#[test]
fn connections__of_several_engines() {
    for (number, engines) in [(44, [2, 2]), (46, [2, 1]), (48, [1, 3])] {
        let [here, there] = [0, 1].map(|at| serve_with(number + at as u8, engines[at], None));
        let pairs = engine_pairs(&here, &there);
        let lines: BTreeSet<_> = pairs.iter().map(|(a, b)| (engine_of(a), engine_of(b))).collect();
        let clients: BTreeSet<_> = pairs.iter().map(|(client, _)| engine_of(client)).collect();
        assert_eq!(clients.len(), engines[0]);
        std::thread::scope(|scope| {
            for (client, server) in &pairs {
                scope.spawn(move || {
                    operations(client, server);
                    operations(server, client);
                });
            }
        });
        for (node, peer) in [(&here, &there), (&there, &here)] {
            let snapshot = node.viewer.snapshot().unwrap();
            let shared: BTreeSet<_> = snapshot.shared_qps.iter().map(|shared| shared.id).collect();
            assert_eq!(
                (shared.len(), snapshot.shared_qps.len()),
                (lines.len(), lines.len())
            );
            assert!(
                snapshot
                    .shared_qps
                    .iter()
                    .all(|shared| shared.peer == peer.address)
            );
            let used: BTreeSet<_> = snapshot.connections.iter().map(|one| one.shared_qp).collect();
            assert_eq!(used, shared.into_iter().map(Some).collect());
        }
        // One application goes: its peer sees that, and nobody else.
        let mut pairs = pairs.into_iter();
        let (client, server) = pairs.next().unwrap();
        drop(client);
        let send = SendRequest::send(server.sge(0, 8)).wr_id(3);
        server.qp.post_send(send).unwrap();
        let wc = server.next();
        assert_eq!((wc.wr_id, wc.status), (3, Status::RetryExceeded));
        for (client, server) in pairs {
            operations(&client, &server);
        }
    }
}

/// Connections between applications of one node on two engines have queue pairs of their own.
#[test]
fn connect__between_engines_of_a_node() {
    let node = serve_with(50, 2, None);
    let (client, server) = (side(&node), side(&node));
    assert_ne!(engine_of(&client), engine_of(&server));
    connect_with_receives(&client, &server, node.address);
    // So have those that are brought up by hand.
    let (client, server) = pair(&node, &node);
    assert_ne!(engine_of(&client), engine_of(&server));
    operations(&client, &server);
}

/// Shared queue pairs of each engine fail while applications use them: none of them notices.
#[test]
fn shared_queue_pair__fails_under_load_on_several_engines() {
    // Each engine counts its own packets. When all keys are known, none of them is one of a control connection, which would end all of its connections.
    let faults = [("qp-error=1000", 51), ("qp-error=1700", 52)];
    let [here, there] = faults.map(|(faults, number)| serve_with(number, 2, Some(faults)));
    let pairs = engine_pairs(&here, &there);
    let repeat = |rounds| {
        std::thread::scope(|scope| {
            for (client, server) in &pairs {
                scope.spawn(move || {
                    for _ in 0..rounds {
                        operations(client, server);
                        operations(server, client);
                    }
                });
            }
        });
    };
    repeat(1);
    let counts = || [&here, &there].map(|node| node.device.fault_counts().unwrap().qp_errors);
    assert_eq!(counts(), [0, 0]);
    repeat(12);
    assert_eq!(counts(), [1, 1]);
}

/// A port is that of one application of a node, whatever their engines.
#[test]
fn listen__where_another_application_does() {
    let node = serve_with(53, 2, None);
    let (first, second) = (side(&node), side(&node));
    assert_ne!(engine_of(&first), engine_of(&second));
    let listener = first.device.listen(7177).unwrap();
    let refused = second.device.listen(7177).unwrap_err().to_string();
    assert!(refused.contains("port 7177 is in use"), "{refused}");
    // Nor has it the node's own.
    assert!(second.device.listen(7173).is_err());
    drop(listener);
    // A process that another test starts has copies of all descriptors until it executes its program, and they keep the port.
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(refused) = second.device.listen(7177) {
        assert!(Instant::now() < deadline, "{refused}");
        // A look at the condition again and again: nothing tells when that process has closed them.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Set for a process that is an application of a node: the node's address, and the peer's and its QPN.
const CHILD: &str = "RDMUX_SHARING_CHILD";

/// An application in a process of its own. It tells where its memory is, and waits for its end.
#[test]
fn child() {
    let Ok(told) = std::env::var(CHILD) else { return };
    rdmux_share::register();
    let mut told = told.split(' ');
    let [address, peer]: [IpAddr; 2] = [(); 2].map(|()| told.next().unwrap().parse().unwrap());
    let dest = Qpn::new(told.next().unwrap().parse().unwrap());
    let device = open(address, "shared");
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64).unwrap();
    let qp = new_qp(&pd, &cq);
    bring_up(&qp, address, peer, dest);
    let memory = Arc::new(AnonymousMemory::shareable(1 << 20).unwrap());
    let mr = pd
        .reg_mr_all(memory, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    let remote = mr.remote(..).unwrap();
    println!("child: {} {} {}", qp.qpn().value(), remote.address, remote.rkey.0);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// Tells others that it is over, also in a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An application is killed while its peer writes to its memory, again and again: its peer sees that, and nobody else.
#[test]
fn killed_process__fails_its_peer_alone() {
    let (here, there) = (serve(25, 1), serve(26, 1));
    let others: Vec<_> = (0..3).map(|_| pair(&here, &there)).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (client, server) in &others {
            let is_over = &is_over;
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    operations(client, server);
                }
            });
        }
        let _over = Over(&is_over);
        for _ in 0..6 {
            let client = side(&here);
            let told = format!("{} {} {}", there.address, here.address, client.qp.qpn().value());
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child", "--nocapture"])
                .env(CHILD, told)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let told = lines.map(Result::unwrap).find_map(|line| {
                let (_, told) = line.split_once("child: ")?;
                Some(told.to_owned())
            });
            let told = told.expect("the child tells");
            let mut told = told.split(' ').map(|number| number.parse::<u64>().unwrap());
            let [dest, address, rkey] = [(); 3].map(|()| told.next().unwrap());
            bring_up(&client.qp, here.address, there.address, Qpn::new(dest as u32));
            let remote = RemoteBuffer {
                address,
                length: 1 << 20,
                rkey: RKey(rkey as u32),
            };
            let write = || SendRequest::write(client.sge(0, 1 << 20), remote).signaled();
            (0..8).for_each(|_| client.qp.post_send(write()).unwrap());
            client.expect(0, WcOpcode::Write);
            child.kill().unwrap();
            child.wait().unwrap();
            let status = loop {
                let wc = client.next();
                if wc.status != Status::Success {
                    break wc.status;
                }
                client.qp.post_send(write()).unwrap();
            };
            let expected = [Status::RemoteAccess, Status::RetryExceeded];
            assert!(expected.contains(&status), "{status:?}");
        }
    });
    for (client, server) in &others {
        operations(server, client);
    }
}
