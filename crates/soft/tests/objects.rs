//! Windows, shared receive queues, XRC and asynchronous events between two devices on one host.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{END_BYTES, End, LONG, RIGHTS, connect_ends, private};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;

/// Returns a connected pair, the second with a shared receive queue of 16.
fn connected(address: [u8; 4]) -> (End, End, SharedReceiveQueue, [Connection; 2]) {
    let client = End::new(address);
    let mut queue = None;
    let device = common::open(address.into()).unwrap();
    let server = End::with(&device, private(END_BYTES), |pd, options| QpOptions {
        srq: Some(queue.insert(pd.create_srq(16).unwrap()).clone()),
        ..options
    });
    let connections = connect_ends(&client, &server);
    (client, server, queue.unwrap(), connections)
}

#[test]
fn atomics__are_done_in_the_peers_memory() {
    let (client, server, _, _held) = connected([127, 0, 11, 1]);
    let (va, rkey) = (server.mr.iova() + 64, server.mr.rkey());
    let own = || client.mr.sge(0, 8);
    assert_eq!(
        client
            .does(Operation::FetchAdd { va, rkey, add: 5 }, own())
            .status,
        Status::Success
    );
    let (compare, swap) = (5, 9);
    let swapped = client.does(
        Operation::CompareSwap {
            va,
            rkey,
            compare,
            swap,
        },
        own(),
    );
    assert_eq!((swapped.status, client.word(0)), (Status::Success, 5));
    assert_eq!(server.word(64), 9);
    let written = client.does(
        Operation::AtomicWrite { va, rkey },
        SgeList::inline(&7u64.to_ne_bytes()),
    );
    assert_eq!((written.status, server.word(64)), (Status::Success, 7));
}

#[test]
fn window__opens_and_closes_a_part_of_a_region() {
    let (client, server, queue, _held) = connected([127, 0, 11, 2]);
    let window = server.pd.alloc_mw(WindowType::One).unwrap();
    let range = server.mr.iova()..server.mr.iova() + 16;
    let bind = |range, access| {
        server
            .qp
            .bind_mw(2, &window, &server.mr, range, access, SendFlags::SIGNALED)
    };
    let rkey = bind(range.clone(), Access::REMOTE_WRITE).unwrap();
    assert_eq!(
        server.cq.wait(LONG).unwrap().unwrap().opcode,
        WcOpcode::BindWindow
    );
    let write = |va, rkey| Operation::Write { va, rkey, imm: None };
    assert_eq!(
        client
            .does(write(range.start + 8, rkey), SgeList::inline(&[1; 8]))
            .status,
        Status::Success
    );

    // Type 2: the peer's own message ends the window.
    let window = server.pd.alloc_mw(WindowType::Two).unwrap();
    let rkey = window.rkey().next();
    let bind = Bind {
        window: rkey,
        region: server.mr.lkey(),
        va: range.start,
        length: 16,
        access: Access::REMOTE_WRITE,
    };
    assert_eq!(
        server.does(Operation::Bind(bind), SgeList::EMPTY).status,
        Status::Success
    );
    let sges = server.mr.sge(1024, 64).into();
    queue.post_recv(RecvRequest { wr_id: 5, sges }).unwrap();
    assert_eq!(
        client
            .does(Operation::SendInvalidate { rkey }, SgeList::EMPTY)
            .status,
        Status::Success
    );
    assert_eq!(server.cq.wait(LONG).unwrap().unwrap().invalidated, Some(rkey));
    assert_eq!(
        client
            .does(write(range.start, rkey), SgeList::inline(&[1; 8]))
            .status,
        Status::RemoteAccess
    );
    let told = std::iter::from_fn(|| server.device.wait_async_event(LONG))
        .find(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_)));
    assert_eq!(told, Some(AsyncEvent::LastWqeReached(server.qp.qpn())));
    assert_eq!(
        server.device.wait_async_event(LONG),
        Some(AsyncEvent::QpAccessError(server.qp.qpn()))
    );
}

#[test]
fn error__is_forgotten_when_the_queue_pair_is_reset() {
    let (client, server, _, _held) = connected([127, 0, 11, 5]);
    let write = Operation::Write {
        va: server.mr.iova(),
        rkey: RKey(server.mr.rkey().0 ^ 1 << 20),
        imm: None,
    };
    assert_eq!(
        client.does(write, SgeList::inline(b"x")).status,
        Status::RemoteAccess
    );
    assert_eq!(client.qp.error(), Some(Status::RemoteAccess));
    let none = QpAttributes::default();
    client.qp.modify(QpState::Reset, &none).unwrap();
    assert_eq!(client.qp.error(), None);
}

#[test]
fn srq__tells_when_its_limit_is_reached() {
    let (client, server, queue, _held) = connected([127, 0, 11, 3]);
    for wr_id in 0..2 {
        let sges = server.mr.sge(wr_id * 64, 64).into();
        queue.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    queue.modify(Some(32), Some(2)).unwrap();
    assert_eq!(
        client
            .does(Operation::Send { imm: None }, SgeList::inline(b"x"))
            .status,
        Status::Success
    );
    let limit = std::iter::from_fn(|| server.device.wait_async_event(LONG))
        .find(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_)));
    assert_eq!(limit, Some(AsyncEvent::SrqLimitReached(queue.srqn())));
    assert_eq!(
        queue.query().map(|info| (info.max_wr, info.posted)),
        Some((32, 1))
    );
}

#[test]
fn reg_mr__of_256_gib_neither_pins_nor_touches_them() {
    let device = common::open("127.0.11.4".parse().unwrap()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let memory = Arc::new(AnonymousMemory::new(256 << 30).unwrap());
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (before, start) = (resident(), Instant::now());
    let mr = pd
        .reg_mr_all(memory.clone(), memory.address(), RIGHTS | Access::ON_DEMAND)
        .unwrap();
    println!("registered in {:?}", start.elapsed());
    assert_eq!(mr.length(), 256 << 30);
    // There are 67 million pages. The tests beside this one touch some of their own.
    let touched = resident().saturating_sub(before);
    assert!(touched < 16_384, "{touched} pages were touched");
}

#[test]
fn create_qp__with_another_devices_queue_is_refused() {
    let [one, two] = ["127.0.11.7", "127.0.11.8"].map(|at| common::open(at.parse().unwrap()).unwrap());
    let (own, others) = (one.create_cq(16).unwrap(), two.create_cq(16).unwrap());
    let pd = one.alloc_pd().unwrap();
    let refused = |options: QpOptions| matches!(pd.create_qp(&options), Err(CreateError::OtherDevice));
    assert!(refused(QpOptions::new(&others)));
    assert!(refused(QpOptions {
        recv_cq: others.clone(),
        ..QpOptions::new(&own)
    }));
    let srq = two.alloc_pd().unwrap().create_srq(4).unwrap();
    assert!(refused(QpOptions {
        srq: Some(srq),
        ..QpOptions::new(&own)
    }));
    let xrc = pd.create_xrc_srq(4, &one.alloc_xrcd().unwrap(), &others);
    assert!(matches!(xrc, Err(CreateError::OtherDevice)));
    let qp = pd.create_qp(&QpOptions::new(&own)).unwrap();
    let peer = "127.0.11.8:7174".parse().unwrap();
    let connected = two.connect(&qp, peer, &ConnectParams::default(), &[]);
    assert!(matches!(connected, Err(ConnectError::OtherDevice)));
}
