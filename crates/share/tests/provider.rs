//! Devices of provider `shared`, on a node in a thread of this process, whose device is a soft one.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use common::{BYTES, LONG, Served, Side, connect, open};
use rdmux_memory::AnonymousMemory;
use rdmux_rnic::HeapMemory;
use rdmux_share::node::NodeOptions;
use rdmux_share::node::snapshot::Route;
use rdmux_verbs::{
    Access, Arm, AsyncEvent, CompletionQueue, ConnectError, ConnectParams, Memory, Path, PostError,
    ProtectionDomain, Psn, QpAttributes, QpOptions, QpState, QpType, QueuePair, RecvRequest, RejReason,
    SendRequest, Sge, SgeList, SharedReceiveQueue, Status, WcOpcode,
};

const PORT: u16 = 7174;

fn serve(number: u8) -> Served {
    Served::at([127, 0, 52, number], None)
}

impl Served {
    /// Attaches an application.
    fn side(&self) -> Side {
        self.side_with(8)
    }

    /// As [`Served::side`], with a send queue for so many requests.
    fn side_with(&self, max_send_wr: u32) -> Side {
        let make = |pd: &ProtectionDomain, cq: &CompletionQueue| {
            let options = QpOptions {
                max_send_wr,
                max_recv_wr: 8,
                ..QpOptions::new(cq)
            };
            let qp = pd.create_qp(&options).unwrap();
            qp.init().unwrap();
            qp
        };
        Side::of(open(self.address, "shared"), 64 + max_send_wr, make)
    }

    /// Attaches two applications and connects them.
    fn pair(&self) -> (Side, Side) {
        self.pair_with(8)
    }

    /// As [`Served::pair`], with send queues for so many requests.
    fn pair_with(&self, max_send_wr: u32) -> (Side, Side) {
        let side = || self.side_with(max_send_wr);
        let (mut client, mut server) = (side(), side());
        connect(&mut client, &mut server, PORT, &ConnectParams::default());
        (client, server)
    }

    /// Waits until the node's device has no objects of applications.
    fn wait_until_empty(&self) {
        let deadline = Instant::now() + LONG;
        while self.device.object_counts() != (0, 0, 0) {
            assert!(Instant::now() < deadline, "{:?}", self.device.object_counts());
            std::thread::yield_now();
        }
    }
}

#[test]
fn post_send__each_operation() {
    let served = serve(1);
    let (client, server) = served.pair();
    client.put(0, b"written");
    let remote = server.mr.remote(100..107).unwrap();
    client
        .qp
        .post_send(SendRequest::write(client.sge(0, 7), remote).wr_id(1).signaled())
        .unwrap();
    client.expect(1, WcOpcode::Write);
    assert_eq!(server.got(100, 7), b"written");

    let read = SendRequest::read(client.sge(1000, 7), remote);
    client.qp.post_send(read.wr_id(2).signaled()).unwrap();
    assert_eq!(client.expect(2, WcOpcode::Read).byte_len, 7);
    assert_eq!(client.got(1000, 7), b"written");

    server
        .qp
        .post_recv(RecvRequest::new(77, server.sge(2000, 64)))
        .unwrap();
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
    assert_eq!(
        client.got(64, 16),
        [5u64.to_ne_bytes(), 8u64.to_ne_bytes()].concat()
    );
    assert_eq!(server.got(8, 8), 9u64.to_ne_bytes());
}

#[test]
fn post_send__inline_of_any_length() {
    let served = serve(2);
    let (client, server) = served.pair();
    for len in [0, 1, 32, 33, 96, 1024] {
        let bytes: Vec<u8> = (0..len).map(|n| n as u8).collect();
        let remote = server.mr.remote(..).unwrap();
        let write = SendRequest::write(SgeList::inline(&bytes), remote);
        client.qp.post_send(write.wr_id(len).signaled()).unwrap();
        client.expect(len, WcOpcode::Write);
        assert_eq!(server.got(0, bytes.len()), bytes);
    }
}

#[test]
fn post_send__queue_is_full_and_has_room_again() {
    let served = serve(3);
    let (client, server) = served.pair();
    let write = || SendRequest::write(client.sge(0, 8), server.mr.remote(..).unwrap());
    // A program that asks for no completion has room again all the same.
    let deadline = Instant::now() + LONG;
    let post = |request: &SendRequest| {
        while client.qp.post_send(request.clone()) == Err(PostError::QueueFull) {
            assert!(Instant::now() < deadline);
            client.device.progress();
        }
    };
    (0..1000).for_each(|_| post(&write()));
    assert_eq!(client.cq.poll(), None);
    post(&write().wr_id(9).signaled());
    client.expect(9, WcOpcode::Write);
    let nine = (0..9).map(|n| RecvRequest::new(n, server.sge(0, 8)));
    let posted: Vec<_> = nine.map(|receive| server.qp.post_recv(receive)).collect();
    assert_eq!(posted.iter().filter(|posted| posted.is_ok()).count(), 8);
    assert_eq!(posted[8], Err(PostError::QueueFull));
}

/// A device of one's own takes what its queues have room for, however many completions nobody has polled.
#[test]
fn post_send__without_a_look_at_completions() {
    const REQUESTS: u32 = 1 << 14;
    let served = serve(25);
    let (client, server) = served.pair_with(REQUESTS);
    let write = SendRequest::write(client.sge(0, 8), server.mr.remote(..).unwrap());
    for number in 0..REQUESTS.into() {
        let posted = client.qp.post_send(write.clone().wr_id(number).signaled());
        assert_eq!(posted, Ok(()), "{number}");
    }
    let srq = client.pd.create_srq(REQUESTS).unwrap();
    for number in 0..REQUESTS.into() {
        let posted = srq.post_recv(RecvRequest::new(number, client.sge(0, 8)));
        assert_eq!(posted, Ok(()), "{number}");
    }
    for number in 0..REQUESTS.into() {
        client.expect(number, WcOpcode::Write);
    }
}

#[test]
fn post__not_in_every_state() {
    let served = serve(4);
    let side = served.side();
    let send = || SendRequest::send(side.sge(0, 8));
    assert_eq!(side.qp.post_send(send()), Err(PostError::WrongState));
    let fresh = side.pd.create_qp(&QpOptions::new(&side.cq)).unwrap();
    let receive = RecvRequest::new(0, side.sge(0, 8));
    assert_eq!(fresh.post_recv(receive.clone()), Err(PostError::WrongState));
    assert!(fresh.modify(QpState::Rts, &QpAttributes::default()).is_err());
    // Posted requests are flushed when the queue pair goes to Error.
    side.qp.post_recv(RecvRequest::new(5, side.sge(0, 8))).unwrap();
    side.qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    side.qp.post_send(send().wr_id(6)).unwrap();
    let mut flushed = [side.next(), side.next()].map(|wc| (wc.wr_id, wc.status));
    flushed.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(flushed, [(5, Status::Flushed), (6, Status::Flushed)]);
    side.qp.modify(QpState::Reset, &QpAttributes::default()).unwrap();
    assert_eq!(side.qp.query().unwrap().state, QpState::Reset);
}

#[test]
fn error__of_a_request_is_that_of_a_private_device() {
    let served = serve(5);
    let (client, server) = served.pair();
    let mut remote = server.mr.remote(..64).unwrap();
    remote.rkey = rdmux_verbs::RKey(remote.rkey.0 ^ 0x5500);
    let write = SendRequest::write(client.sge(0, 8), remote);
    client.qp.post_send(write.wr_id(1)).unwrap();
    let wc = client.next();
    assert_eq!((wc.wr_id, wc.status), (1, Status::RemoteAccess));
    assert_eq!(client.qp.error(), Some(Status::RemoteAccess));
    let event = server.device.wait_async_event(LONG);
    assert_eq!(event, Some(AsyncEvent::QpAccessError(server.qp.qpn())));
}

#[test]
fn lkey__of_another_protection_domain() {
    let served = serve(6);
    let (client, server) = served.pair();
    let other = client.device.alloc_pd().unwrap();
    let memory = Arc::new(AnonymousMemory::shareable(4096).unwrap());
    let mr = other
        .reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)
        .unwrap();
    let write = SendRequest::write(mr.slice(..8).unwrap(), server.mr.remote(..).unwrap());
    client.qp.post_send(write.wr_id(1).signaled()).unwrap();
    assert_eq!(client.next().status, Status::LocalProtection);
}

#[test]
fn register__refusals() {
    let served = serve(7);
    let side = served.side();
    let heap = Arc::new(HeapMemory::new(4096));
    let refused = side.pd.reg_mr_all(heap, 0, Access::empty()).unwrap_err();
    assert!(
        refused.to_string().contains("allocate it as shareable"),
        "{refused}"
    );
    let shareable = side.memory.clone();
    let refused = side
        .pd
        .reg_mr(shareable.clone(), 1, BYTES, 0, Access::empty())
        .unwrap_err();
    assert_eq!(refused, rdmux_verbs::RegisterError::OutOfRange);
    let refused = side
        .pd
        .reg_mr_all(shareable, 0, Access::REMOTE_WRITE)
        .unwrap_err();
    assert_eq!(refused, rdmux_verbs::RegisterError::NeedsLocalWrite);
}

/// The node reaches memory that it cannot map in the process of the application.
#[test]
fn register__memory_of_the_process() {
    let served = serve(20);
    let (client, server) = served.pair();
    let ours = Arc::new(AnonymousMemory::new(3 * 4096).unwrap());
    let theirs = Arc::new(AnonymousMemory::new(3 * 4096).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let local = client
        .pd
        .reg_mr_all(ours.clone(), ours.address(), access)
        .unwrap();
    let remote = server.pd.reg_mr_all(theirs.clone(), 0, access).unwrap();
    let bytes: Vec<u8> = (0..8000).map(|n| (n % 253) as u8).collect();
    ours.write(100, &bytes).unwrap();
    let write = SendRequest::write(local.slice(100..8100).unwrap(), remote.remote(200..8200).unwrap());
    client.qp.post_send(write.wr_id(1).signaled()).unwrap();
    client.expect(1, WcOpcode::Write);
    let mut placed = vec![0; 8000];
    theirs.read(200, &mut placed).unwrap();
    assert!(placed == bytes);
    let read = SendRequest::read(local.slice(0..3000).unwrap(), remote.remote(300..3300).unwrap());
    client.qp.post_send(read.wr_id(2).signaled()).unwrap();
    client.expect(2, WcOpcode::Read);
    let mut back = vec![0; 3000];
    ours.read(0, &mut back).unwrap();
    assert!(back == bytes[100..3100]);
    theirs.write(8, &5_u64.to_ne_bytes()).unwrap();
    let add = SendRequest::fetch_add(local.slice(0..8).unwrap(), remote.remote(8..16).unwrap(), 7);
    client.qp.post_send(add.wr_id(3).signaled()).unwrap();
    client.expect(3, WcOpcode::FetchAdd);
    let mut word = [0; 8];
    theirs.read(8, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 12);
    // A receive there, and the bounds of a region.
    let receive = RecvRequest::new(9, remote.slice(4096..4196).unwrap());
    server.qp.post_recv(receive).unwrap();
    let send = SendRequest::send(local.slice(100..200).unwrap());
    client.qp.post_send(send.wr_id(4)).unwrap();
    assert_eq!(server.expect(9, WcOpcode::Recv).byte_len, 100);
    let mut beyond = remote.remote(0..8).unwrap();
    beyond.address += 3 * 4096 - 4;
    let write = SendRequest::write(local.slice(0..8).unwrap(), beyond);
    client.qp.post_send(write.wr_id(5).signaled()).unwrap();
    assert_eq!(client.next().status, Status::RemoteAccess);
}

/// Makes two queue pairs of an application that share receives, each connected to one of `clients`.
fn sharing(served: &Served, server: &Side, srq: &SharedReceiveQueue) -> Vec<(QueuePair, Side)> {
    let pairs = [0, 1].map(|_| {
        let client = served.side();
        let options = QpOptions {
            srq: Some(srq.clone()),
            ..QpOptions::new(&server.cq)
        };
        let qp = server.pd.create_qp(&options).unwrap();
        qp.init().unwrap();
        for (own, peer) in [(&qp, &client.qp), (&client.qp, &qp)] {
            let psn = Psn::new(77);
            let rtr = QpAttributes {
                path: Some(Path {
                    src: served.address,
                    dst: served.address,
                    src_port: 0,
                    traffic_class: 0,
                }),
                path_mtu: Some(1024),
                dest_qpn: Some(peer.qpn()),
                rq_psn: Some(psn),
                max_dest_rd_atomic: Some(1),
                min_rnr_timer: Some(1),
                ..QpAttributes::default()
            };
            let rts = QpAttributes {
                sq_psn: Some(psn),
                timeout: Some(14),
                retry_count: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(1),
                ..QpAttributes::default()
            };
            let init = QpAttributes {
                access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
                ..QpAttributes::default()
            };
            own.modify(QpState::Init, &init).unwrap();
            own.modify(QpState::Rtr, &rtr).unwrap();
            own.modify(QpState::Rts, &rts).unwrap();
        }
        (qp, client)
    });
    pairs.into()
}

#[test]
fn srq__receives_in_order_for_all_its_queue_pairs() {
    let served = serve(21);
    let server = served.side();
    let srq = server.pd.create_srq(4).unwrap();
    let pairs = sharing(&served, &server, &srq);
    let numbers = [1, u64::MAX, 1 << 62, 4];
    for (at, number) in (0..).zip(numbers) {
        let receive = RecvRequest::new(number, server.sge(at * 64, 64));
        srq.post_recv(receive).unwrap();
    }
    let more = RecvRequest::new(5, server.sge(0, 64));
    assert_eq!(srq.post_recv(more.clone()), Err(PostError::QueueFull));
    assert_eq!(pairs[0].0.post_recv(more.clone()), Err(PostError::HasSrq));
    for (round, (at, number)) in (0_u64..).zip(numbers).enumerate() {
        let (qp, client) = &pairs[round % 2];
        client.put(0, &[round as u8 + 1; 8]);
        client
            .qp
            .post_send(SendRequest::send(client.sge(0, 8)).wr_id(7).signaled())
            .unwrap();
        client.expect(7, WcOpcode::Send);
        let wc = server.next();
        assert_eq!((wc.wr_id, wc.qpn, wc.byte_len), (number, qp.qpn(), 8));
        assert_eq!(server.got(at * 64, 8), [round as u8 + 1; 8]);
    }
    let info = srq.query().unwrap();
    assert_eq!((info.max_wr, info.posted, info.limit), (4, 0, None));
    srq.post_recv(more).unwrap();
    srq.modify(Some(8), Some(1)).unwrap();
    let (_, client) = &pairs[1];
    client
        .qp
        .post_send(SendRequest::send(client.sge(0, 8)).wr_id(8))
        .unwrap();
    assert_eq!(server.next().wr_id, 5);
    let event = server.device.wait_async_event(LONG);
    assert_eq!(event, Some(AsyncEvent::SrqLimitReached(srq.srqn())));
}

#[test]
fn srq__modified_while_receives_complete() {
    let served = serve(27);
    let server = served.side();
    let srq = server.pd.create_srq(64).unwrap();
    let pairs = sharing(&served, &server, &srq);
    let (_, client) = &pairs[0];
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            for number in 0..2000 {
                srq.post_recv(RecvRequest::new(number, server.sge(0, 8))).unwrap();
                let send = SendRequest::send(client.sge(0, 8)).signaled();
                client.qp.post_send(send).unwrap();
                assert_eq!(server.next().wr_id, number);
                client.next();
            }
        });
        let sizes = (1..).map(|n| 64 + n % 64);
        for size in sizes {
            srq.modify(Some(size), None).unwrap();
            if traffic.is_finished() {
                break;
            }
        }
    });
}

#[test]
fn srq__queue_pair_that_ends_is_drained_first() {
    let served = serve(22);
    let server = served.side();
    let srq = server.pd.create_srq(64).unwrap();
    let pairs = sharing(&served, &server, &srq);
    for number in 0..64 {
        let receive = RecvRequest::new(number, server.sge(number * 64, 64));
        srq.post_recv(receive).unwrap();
    }
    let (qp, client) = &pairs[0];
    for _ in 0..8 {
        let send = SendRequest::send(client.sge(0, 8)).wr_id(7).signaled();
        client.qp.post_send(send).unwrap();
    }
    for _ in 0..8 {
        client.expect(7, WcOpcode::Send);
    }
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    let event = server.device.wait_async_event(LONG);
    assert_eq!(event, Some(AsyncEvent::LastWqeReached(qp.qpn())));
    // All that it has received is in the completion queue by now.
    let mut numbers = Vec::new();
    while let Some(wc) = server.cq.poll() {
        numbers.push((wc.wr_id, wc.status));
    }
    let expected: Vec<_> = (0..8).map(|number| (number, Status::Success)).collect();
    assert_eq!(numbers, expected);
    // The others go on with what is left.
    let (_, client) = &pairs[1];
    client
        .qp
        .post_send(SendRequest::send(client.sge(0, 8)).wr_id(9).signaled())
        .unwrap();
    client.expect(9, WcOpcode::Send);
    assert_eq!(server.next().wr_id, 8);
    assert_eq!(srq.query().unwrap().posted, 55);
}

#[test]
fn datagram__with_its_header_and_only_with_the_key() {
    let served = serve(23);
    let (one, other) = (served.side(), served.side());
    let ready = |side: &Side| {
        let options = QpOptions {
            qp_type: QpType::Ud,
            max_send_wr: 8,
            max_recv_wr: 8,
            ..QpOptions::new(&side.cq)
        };
        let qp = side.pd.create_qp(&options).unwrap();
        qp.ready_datagram(0x1234).unwrap();
        qp
    };
    let (from, to) = (ready(&one), ready(&other));
    for number in [1, 2] {
        to.post_recv(RecvRequest::new(number, other.sge(0, 4096)))
            .unwrap();
    }
    one.put(0, b"datagram");
    let handle = one.device.create_ah(served.address, 0);
    for (qkey, imm) in [(0x4321, None), (0x1234, Some(0xabc)), (0x1234, None)] {
        let target = handle.to(to.qpn(), qkey).unwrap();
        let send = SendRequest::send(one.sge(0, 8)).to(target).wr_id(3).signaled();
        let send = imm.iter().fold(send, |send, imm| send.imm(*imm));
        from.post_send(send).unwrap();
        let wc = one.next();
        assert_eq!((wc.wr_id, wc.status), (3, Status::Success));
    }
    for (number, imm) in [(1, Some(0xabc)), (2, None)] {
        let wc = other.next();
        assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (number, 48, imm));
        assert_eq!((wc.src_qpn, wc.qpn), (Some(from.qpn()), to.qpn()));
        assert_eq!(other.got(40, 8), b"datagram");
        let grh = other.got(0, 40).try_into().unwrap();
        assert!(other.device.create_ah_from_grh(&grh).is_some());
    }
    // A connected queue pair takes no datagrams, nor one of datagrams other requests.
    let send = SendRequest::send(one.sge(0, 8));
    assert_eq!(from.post_send(send.clone()), Err(PostError::Invalid));
    let group = one
        .device
        .create_ah([239, 1, 2, 3].into(), 0)
        .to_group(7)
        .unwrap();
    assert!(from.post_send(send.to(group)).is_err());
    assert_eq!(to.query().unwrap().qkey, 0x1234);
}

/// The node keeps so many address handles of an application. Another datagram takes the place of the first one's, which is in no node so far.
#[test]
fn datagram__to_more_addresses_than_the_node_keeps() {
    const HANDLES: u32 = 4096;
    let served = serve(26);
    let side = served.side();
    let options = QpOptions {
        qp_type: QpType::Ud,
        max_send_wr: 8,
        ..QpOptions::new(&side.cq)
    };
    let qp = side.pd.create_qp(&options).unwrap();
    qp.ready_datagram(7).unwrap();
    let send = |number: u32| {
        let [.., high, low] = number.to_be_bytes();
        let handle = side.device.create_ah([127, 1, high, low].into(), 0);
        let target = handle.to(qp.qpn(), 7).unwrap();
        let send = SendRequest::send(side.sge(0, 8)).to(target);
        send.wr_id(number.into()).signaled()
    };
    let sent = |number: u32| {
        let wc = side.next();
        assert_eq!((wc.wr_id, wc.status), (number.into(), Status::Success));
    };
    for number in 1..=HANDLES {
        qp.post_send(send(number)).unwrap();
        sent(number);
    }
    qp.post_send_list(vec![send(1), send(HANDLES + 1)]).unwrap();
    sent(1);
    sent(HANDLES + 1);
}

#[test]
fn connect__refused_and_to_nobody() {
    let served = serve(8);
    let (client, server) = (served.side(), served.side());
    let listener = server.device.listen(PORT).unwrap();
    assert!(client.device.listen(PORT).is_err(), "the port has a listener");
    let address = SocketAddr::new(served.address, PORT);
    let params = ConnectParams::default();
    std::thread::scope(|scope| {
        scope.spawn(|| listener.accept(LONG).unwrap().reject(b"go away"));
        let refused = client.device.connect(&client.qp, address, &params, b"");
        let Err(ConnectError::Rejected { reason, private_data }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(
            (reason, &private_data[..7]),
            (RejReason::CONSUMER, &b"go away"[..])
        );
    });
    drop(listener);
    let refused = client.device.connect(&client.qp, address, &params, b"");
    assert!(
        matches!(refused, Err(ConnectError::Rejected { .. })),
        "{refused:?}"
    );
}

#[test]
fn disconnect__both_ends_learn_it() {
    let served = serve(9);
    let (client, mut server) = served.pair();
    server
        .qp
        .post_recv(RecvRequest::new(3, server.sge(0, 8)))
        .unwrap();
    let connection = server.connection.take().unwrap();
    client.connection.as_ref().unwrap().disconnect_and_wait(LONG);
    assert!(connection.wait_ended(LONG));
    let wc = server.next();
    assert_eq!((wc.wr_id, wc.status), (3, Status::Flushed));
}

/// Long WRITEs and READs go to the device in pieces, of whatever list.
#[test]
fn post_send__long_lists() {
    let served = serve(13);
    let (client, server) = served.pair();
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at * 7 / 3) as u8).collect();
    client.put(0, &bytes);
    let parts = [(40_000, 20_001), (0, 5), (100, 30_000), (62_000, 1)];
    let list: Vec<Sge> = parts.iter().map(|(at, len)| client.sge(*at, *len)).collect();
    let expected: Vec<u8> = parts
        .iter()
        .flat_map(|(at, len)| bytes[*at as usize..(*at + *len) as usize].to_vec())
        .collect();
    let length = expected.len() as u64;
    let remote = server.mr.remote(3..3 + length).unwrap();
    let write = SendRequest::write(list.as_slice(), remote);
    client.qp.post_send(write.wr_id(1).signaled()).unwrap();
    assert_eq!(u64::from(client.expect(1, WcOpcode::Write).byte_len), length);
    assert_eq!(server.got(3, expected.len()), expected);
    client.put(0, &vec![0; BYTES as usize]);
    let read = SendRequest::read(list.as_slice(), remote);
    client.qp.post_send(read.wr_id(2).signaled().fence()).unwrap();
    assert_eq!(u64::from(client.expect(2, WcOpcode::Read).byte_len), length);
    for (at, len) in parts {
        let range = at as usize..(at + len) as usize;
        assert_eq!(client.got(at, len as usize), bytes[range]);
    }
}

/// Posts WRITEs, each with whether it asks for a completion, whether its key is right, and its bytes.
fn post_writes(client: &Side, server: &Side, writes: &[(bool, bool, u64)]) {
    for ((asks, right, bytes), wr_id) in writes.iter().zip(0..) {
        let mut remote = server.mr.remote(0..*bytes).unwrap();
        if !right {
            remote.rkey.0 ^= 0x55;
        }
        let mut write = SendRequest::write(client.sge(0, *bytes), remote).wr_id(wr_id);
        if *asks {
            write = write.signaled();
        }
        client.qp.post_send(write).unwrap();
    }
}

fn outcomes(side: &Side, count: usize) -> Vec<(u64, Status)> {
    let completions = (0..count).map(|_| side.next());
    completions.map(|wc| (wc.wr_id, wc.status)).collect()
}

#[test]
fn error__flushes_what_is_behind_it_in_order() {
    let served = serve(14);
    let (client, server) = served.pair();
    let writes = [
        (false, true, 8),
        (true, true, 60_000),
        (true, false, 60_000),
        (false, true, 60_000),
        (true, true, 8),
    ];
    post_writes(&client, &server, &writes);
    let expected = [
        (1, Status::Success),
        (2, Status::RemoteAccess),
        (3, Status::Flushed),
        (4, Status::Flushed),
    ];
    assert_eq!(outcomes(&client, 4), expected);
    assert_eq!(client.cq.poll(), None);
    // So does what comes later.
    post_writes(&client, &server, &[(false, true, 8)]);
    assert_eq!(outcomes(&client, 1), [(0, Status::Flushed)]);
    assert_eq!(client.qp.error(), Some(Status::RemoteAccess));
}

#[test]
fn modify__requests_that_wait_in_sqd() {
    let served = serve(15);
    let (client, server) = served.pair();
    let to = |state| client.qp.modify(state, &QpAttributes::default()).unwrap();
    let writes = [(true, true, 60_000), (true, true, 8)];
    to(QpState::Sqd);
    post_writes(&client, &server, &writes);
    // The node has begun all that it begins in SQD before it answers.
    assert_eq!(client.qp.query().unwrap().state, QpState::Sqd);
    assert_eq!(client.cq.poll(), None);
    to(QpState::Rts);
    assert_eq!(outcomes(&client, 2), [(0, Status::Success), (1, Status::Success)]);
    to(QpState::Sqd);
    post_writes(&client, &server, &writes);
    to(QpState::Error);
    assert_eq!(outcomes(&client, 2), [(0, Status::Flushed), (1, Status::Flushed)]);
    to(QpState::Reset);
    client.qp.init().unwrap();
    assert_eq!(client.cq.poll(), None);
}

#[test]
fn modify__reset_forgets_what_waits() {
    let served = serve(16);
    let (client, server) = served.pair();
    let to = |state| client.qp.modify(state, &QpAttributes::default()).unwrap();
    to(QpState::Sqd);
    post_writes(&client, &server, &[(true, true, 60_000), (true, true, 8)]);
    to(QpState::Error);
    to(QpState::Reset);
    assert_eq!(client.cq.poll(), None);
    assert_eq!(client.qp.query().unwrap().send_outstanding, 0);
}

/// Applications whose queues are full get the same, whoever was first, and one with little to send does not wait for them.
#[test]
fn post_send__applications_share_the_device() {
    const WRITES: u64 = 16_000;
    let served = serve(17);
    let pairs = [served.pair_with(WRITES as u32), served.pair_with(WRITES as u32)];
    let (little, little_server) = served.pair();
    let to = |side: &Side, state| side.qp.modify(state, &QpAttributes::default()).unwrap();
    let mut seen = Vec::new();
    // The operating system may let the device run between the two calls that start them: then there is little to see.
    for _ in 0..20 {
        for (client, server) in &pairs {
            to(client, QpState::Sqd);
            for wr_id in 0..WRITES {
                let remote = server.mr.remote(..).unwrap();
                let write = SendRequest::write(client.sge(0, BYTES), remote).wr_id(wr_id);
                // The ring has room for fewer requests than the queue.
                while client.qp.post_send(write.clone().signaled()).is_err() {
                    std::thread::yield_now();
                }
            }
        }
        pairs.iter().for_each(|(client, _)| to(client, QpState::Rts));
        post_writes(&little, &little_server, &[(true, true, 8)]);
        // The second one begins while the first one sends; from then on they share, until one has nothing left.
        let (mut done, mut second_began, mut shared, mut beside_little) = ([0; 2], None, None, None);
        while done != [WRITES; 2] || beside_little.is_none() {
            for ((client, _), done) in pairs.iter().zip(&mut done) {
                for _ in 0..16 {
                    let Some(wc) = client.cq.poll() else { break };
                    assert_eq!((wc.status, wc.wr_id), (Status::Success, *done));
                    *done += 1;
                }
            }
            if beside_little.is_none() && little.cq.poll().is_some() {
                beside_little = Some(done[0] + done[1]);
            }
            if second_began.is_none() && done[1] > 0 {
                second_began = Some(done);
            }
            if let Some(began) = second_began
                && shared.is_none()
                && done.contains(&WRITES)
            {
                shared = Some([done[0] - began[0], done[1] - began[1]]);
            }
        }
        seen.push((shared, beside_little));
        if let (Some([first, second]), Some(beside_little)) = (shared, beside_little)
            && first.min(second) > WRITES / 8
            && first.abs_diff(second) < first.max(second) / 4
            && beside_little < 2 * WRITES - WRITES / 8
        {
            return;
        }
    }
    panic!("{seen:?}");
}

#[test]
fn drop__of_applications_leaves_nothing() {
    let served = serve(10);
    let (client, server) = served.pair();
    let counts = served.device.object_counts();
    assert_eq!((counts.0, counts.1), (2, 2));
    assert_eq!(client.device.object_counts(), (1, 1, 1));
    drop((client, server));
    served.wait_until_empty();
}

#[test]
fn arm__makes_the_descriptor_readable_once_there_is_a_completion() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let served = serve(11);
    let (client, server) = served.pair();
    let is_readable = |timeout: Timespec| {
        let mut fds = [PollFd::new(&client.cq, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).unwrap() == 1
    };
    let write = || SendRequest::write(client.sge(0, 8), server.mr.remote(..).unwrap()).signaled();
    for _ in 0..100 {
        client.cq.arm(Arm::Next);
        assert_eq!(client.cq.poll(), None);
        assert!(!is_readable(Timespec::default()));
        client.qp.post_send(write()).unwrap();
        assert!(is_readable(LONG.try_into().unwrap()));
        assert_eq!(client.cq.poll().unwrap().status, Status::Success);
    }
}

#[test]
fn node__that_ends_flushes_and_wakes_everybody() {
    let mut served = serve(12);
    let (client, server) = served.pair();
    let listener = client.device.listen(PORT + 1).unwrap();
    server
        .qp
        .post_recv(RecvRequest::new(8, server.sge(0, 8)))
        .unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept(LONG).is_none());
        let waiting = scope.spawn(|| server.next());
        served.stop();
        let wc = waiting.join().unwrap();
        assert_eq!((wc.wr_id, wc.status), (8, Status::Flushed));
        assert!(accepting.join().unwrap());
    });
    for side in [&client, &server] {
        assert_eq!(side.device.wait_async_event(LONG), Some(AsyncEvent::DeviceFatal));
        assert!(side.connection.as_ref().unwrap().wait_ended(LONG));
        assert!(!side.device.is_active());
    }
    client
        .qp
        .post_send(SendRequest::send(client.sge(0, 8)).wr_id(9))
        .unwrap();
    let wc = client.next();
    assert_eq!((wc.wr_id, wc.status), (9, Status::Flushed));
    let error = client.device.alloc_pd().unwrap_err();
    assert!(error.to_string().contains("the node has gone"), "{error}");
}

/// The second application is on the second engine, and sends.
#[test]
fn snapshot__retransmissions_of_all_engines() {
    let options = NodeOptions {
        engines: 2,
        ..NodeOptions::default()
    };
    let served = Served::with_options([127, 0, 52, 39], options, Some("loss=5%"));
    let (client, server) = served.pair();
    let deadline = Instant::now() + LONG;
    let of_first = || served.device.counters().retransmitted_packets;
    while served.viewer.snapshot().unwrap().node.retransmitted_packets <= of_first() {
        assert!(Instant::now() < deadline, "the second engine retransmits nothing");
        post_writes(&server, &client, &[(true, true, 4096); 4]);
        let expected = [0, 1, 2, 3].map(|id| (id, Status::Success));
        assert_eq!(outcomes(&server, 4), expected);
    }
}

#[test]
fn snapshot__what_each_application_has_moved() {
    let served = serve(34);
    assert!(served.viewer.snapshot().unwrap().applications.is_empty());
    let (client, server) = served.pair();
    post_writes(&client, &server, &[(true, true, 4096); 3]);
    assert_eq!(outcomes(&client, 3), [0, 1, 2].map(|id| (id, Status::Success)));
    server
        .qp
        .post_recv(RecvRequest::new(7, server.sge(0, 100)))
        .unwrap();
    let send = SendRequest::send(client.sge(0, 50));
    client.qp.post_send(send.wr_id(8).signaled()).unwrap();
    client.expect(8, WcOpcode::Send);
    server.expect(7, WcOpcode::Recv);
    let before = served.viewer.snapshot().unwrap();
    assert_eq!(before.connections_left_out, 0);
    let [to, from] = &before.connections[..] else {
        panic!("{before:?}");
    };
    assert_eq!(
        (to.qpn, from.qpn),
        (client.qp.qpn().value(), server.qp.qpn().value())
    );
    assert_eq!(
        (to.route, to.peer, to.class),
        (Route::Own, Some(served.address), Some(0))
    );
    let sent = &to.counts;
    assert_eq!((sent.requests, sent.bytes, sent.errors), (4, 3 * 4096 + 50, 0));
    assert_eq!((sent.waiting_requests, sent.waiting_bytes), (0, 0));
    assert_eq!(sent.latency.count(), 4);
    assert!(sent.latency.quantile(0.99).unwrap() < 10_000_000_000);
    let received = &from.counts;
    assert_eq!((received.receives, received.received_bytes), (1, 50));
    // An application has what its connections have, and a tenant what its applications have.
    let counts: Vec<_> = before.applications.iter().map(|it| &it.counts).collect();
    assert_eq!(counts, [sent, received]);
    assert!(
        before
            .applications
            .iter()
            .all(|it| it.pid == Some(std::process::id()) && it.queue_pairs == 1)
    );
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(before.applications[0].name, name.trim_end());
    let [tenant] = &before.tenants[..] else {
        panic!("{before:?}");
    };
    assert_eq!((&*tenant.name, tenant.applications), ("default", 2));
    assert_eq!(
        (tenant.counts.bytes, tenant.counts.received_bytes),
        (sent.bytes, 50)
    );
    // A bad key: the request and the one behind it have failed.
    post_writes(&client, &server, &[(true, false, 64), (true, true, 64)]);
    let expected = [(0, Status::RemoteAccess), (1, Status::Flushed)];
    assert_eq!(outcomes(&client, 2), expected);
    let after = served.viewer.snapshot().unwrap();
    let counts = &after.connections[0].counts;
    assert_eq!(
        (counts.errors, counts.waiting_requests, counts.bytes),
        (2, 0, sent.bytes)
    );
    assert_eq!(after.applications[0].counts, *counts);
    // Its bytes stay in the tenant's counters.
    drop((client, server));
    served.wait_until_empty();
    let gone = served.viewer.snapshot().unwrap();
    assert_eq!((gone.applications.len(), gone.connections.len()), (0, 0));
    assert_eq!(gone.tenants[0].counts, after.tenants[0].counts);
    let viewer = served.viewer.clone();
    drop(served);
    assert!(viewer.snapshot().is_err());
}
