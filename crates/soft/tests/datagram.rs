//! Datagrams, multicast and unreliable connections over sockets, between devices and between processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use common::{ChildProcess, End, LONG};
use rdmux_verbs::*;

/// Long enough to see that nothing arrives, if something would arrive at once.
const SHORT: Duration = Duration::from_millis(100);
const QKEY: u32 = RDMA_UDP_QKEY;

impl End {
    fn ud(address: impl Into<IpAddr>) -> End {
        let end = End::of_type(address, QpType::Ud);
        end.qp.ready_datagram(QKEY).unwrap();
        end
    }

    fn recv(&self, wr_id: u64) {
        let sges = self.mr.sge(wr_id * 8192, 8192).into();
        self.qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }

    fn send(&self, to: Target, operation: Operation, sges: SgeList) {
        let request = SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to,
        };
        self.qp.post_send(request).unwrap();
        assert_eq!(self.wait_success().opcode, WcOpcode::Send);
    }

    fn send_text(&self, to: Target, text: &[u8]) {
        self.send(to, Operation::Send { imm: None }, SgeList::inline(text));
    }

    fn bytes(&self, wc: &WorkCompletion) -> Vec<u8> {
        let mut bytes = vec![0; wc.byte_len as usize];
        self.memory.read(wc.wr_id * 8192, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn ud__there_and_back() {
    let (a, b) = (End::ud([127, 0, 30, 1]), End::ud([127, 0, 30, 2]));
    a.recv(1);
    b.recv(1);
    let to = a.device.create_ah(b.device.address(), 0x40);
    let to = to.to(b.qp.qpn(), QKEY).unwrap();
    a.send(to, Operation::Send { imm: Some(9) }, SgeList::inline(b"ping"));
    let wc = b.wait_success();
    assert_eq!((wc.imm, wc.byte_len, wc.src_qpn), (Some(9), 44, Some(a.qp.qpn())));
    let bytes = b.bytes(&wc);
    // The traffic class is the one that the socket saw.
    assert_eq!((bytes[20], bytes[21]), (0x45, 0x40));
    assert_eq!(bytes[32..40], [127, 0, 30, 1, 127, 0, 30, 2]);
    assert_eq!(bytes[40..], *b"ping");
    let back = b.device.create_ah_from_grh(bytes.first_chunk().unwrap()).unwrap();
    let back = back.to(wc.src_qpn.unwrap(), QKEY).unwrap();
    b.send_text(back, b"pong");
    let wc = a.wait_success();
    let bytes = a.bytes(&wc);
    assert_eq!(bytes[40..], *b"pong");
    assert_eq!(
        bytes[21], 0x40,
        "the answer has the traffic class of the question"
    );
}

#[test]
fn ud__over_ipv6_and_to_itself() {
    let address: IpAddr = [0, 0, 0, 0, 0, 0, 0, 1].into();
    let end = End::ud(address);
    end.recv(1);
    let to = end.device.create_ah(address, 0);
    let to = to.to(end.qp.qpn(), QKEY).unwrap();
    let full = vec![5; 4096];
    end.memory.write(0, &full).unwrap();
    end.send(to, Operation::Send { imm: None }, end.mr.sge(0, 4096).into());
    let wc = end.wait_success();
    assert_eq!(wc.byte_len, 4096 + 40);
    let bytes = end.bytes(&wc);
    assert_eq!((bytes[0] >> 4, bytes[23], bytes[39]), (6, 1, 1));
    assert_eq!(bytes[40..], full);
    // The datagram is longer than the loopback interface's MTU allows.
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Send { imm: None },
        sges: end.mr.sge(0, 4097).into(),
        flags: SendFlags::empty(),
        to,
    };
    assert_eq!(end.qp.post_send(request), Err(PostError::TooLong));
}

#[test]
fn uc__messages_and_writes() {
    let a = End::of_type([127, 0, 30, 3], QpType::Uc);
    let b = End::of_type([127, 0, 30, 4], QpType::Uc);
    a.bring_up(&b);
    b.bring_up(&a);
    b.recv(1);
    b.recv(2);
    let text: Vec<u8> = (0..5000).map(|i| i as u8).collect();
    a.memory.write(0, &text).unwrap();
    a.send(
        Target::Connected,
        Operation::Send { imm: None },
        a.mr.sge(0, 5000).into(),
    );
    let wc = b.wait_success();
    assert_eq!((wc.wr_id, b.bytes(&wc)), (1, text.clone()));
    let write = SendRequest {
        wr_id: 0,
        operation: Operation::Write {
            va: b.mr.iova() + 40_000,
            rkey: b.mr.rkey(),
            imm: Some(77),
        },
        sges: a.mr.sge(0, 5000).into(),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    a.qp.post_send(write).unwrap();
    assert_eq!(a.wait_success().opcode, WcOpcode::Write);
    let wc = b.wait_success();
    assert_eq!((wc.imm, wc.byte_len), (Some(77), 5000));
    let mut there = vec![0; 5000];
    b.memory.read(40_000, &mut there).unwrap();
    assert_eq!(there, text);
}

#[test]
fn multicast__devices_of_one_host() {
    let group: IpAddr = [239, 30, 0, 1].into();
    // Two devices share an address, as processes do.
    let ends = [[127, 0, 30, 5], [127, 0, 30, 6], [127, 0, 30, 6]].map(End::ud);
    let stranger = End::ud([127, 0, 30, 7]);
    for end in ends.iter().chain([&stranger]) {
        end.recv(1);
    }
    for end in &ends {
        end.qp.attach_mcast(group).unwrap();
    }
    let other: IpAddr = [239, 30, 0, 2].into();
    stranger.qp.attach_mcast(other).unwrap();
    let to = ends[0].device.create_ah(group, 0).to_group(QKEY).unwrap();
    ends[0].send_text(to, b"to all");
    for end in &ends {
        let wc = end.wait_success();
        let bytes = end.bytes(&wc);
        assert_eq!(bytes[36..40], [239, 30, 0, 1]);
        assert_eq!(
            (&bytes[40..], wc.src_qpn),
            (&b"to all"[..], Some(ends[0].qp.qpn()))
        );
    }
    assert_eq!(stranger.cq.wait(SHORT).unwrap(), None);

    ends[1].qp.detach_mcast(group).unwrap();
    for end in &ends {
        end.recv(2);
    }
    ends[0].send_text(to, b"to two");
    assert_eq!(ends[2].wait_success().wr_id, 2);
    assert_eq!(ends[0].wait_success().wr_id, 2);
    assert_eq!(ends[1].cq.wait(SHORT).unwrap(), None);
}

#[test]
fn attach_mcast__refusals() {
    let end = End::ud([127, 0, 30, 8]);
    let refused = end.qp.attach_mcast([10, 0, 0, 1].into());
    assert!(matches!(
        refused,
        Err(AttachError::Refused(McastError::BadAddress))
    ));
    let uc = End::of_type([127, 0, 30, 8], QpType::Uc);
    let refused = uc.qp.attach_mcast([239, 30, 0, 3].into());
    assert!(matches!(refused, Err(AttachError::Refused(McastError::NotUd))));
    let refused = end.qp.detach_mcast([239, 30, 0, 3].into());
    assert_eq!(refused, Err(McastError::NotAttached));
}

// Services.

/// Runs both sides at once: the one that is asked, and the one that asks.
fn together<A: Send, B>(asked: impl FnOnce() -> A + Send, asks: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let answering = scope.spawn(asked);
        let result = asks();
        (answering.join().unwrap(), result)
    })
}

#[test]
fn resolve__finds_the_queue_pair_and_carries_private_data_of_full_size() {
    let (a, b) = (End::ud([127, 0, 30, 13]), End::ud([127, 0, 30, 14]));
    let listener = b.device.listen_datagram(7174).unwrap();
    b.recv(1);
    let (question, answer) = ([3; 180], [4; 136]);
    let (_, service) = together(
        || {
            let mut request = listener.accept(LONG).expect("a request");
            assert_eq!(request.peer(), a.device.address());
            assert_eq!(request.private_data(), question);
            request.accept(&b.qp, &answer).unwrap();
        },
        || a.device.resolve("127.0.30.14:7174".parse().unwrap(), &question),
    );
    let service = service.unwrap();
    assert_eq!((service.qpn(), service.qkey()), (b.qp.qpn(), QKEY));
    assert_eq!(service.private_data(), answer);
    a.send_text(service.target(0).unwrap(), b"found");
    let wc = b.wait_success();
    assert_eq!(b.bytes(&wc)[40..], *b"found");
}

#[test]
fn resolve__over_ipv6_and_to_itself() {
    let address: IpAddr = [0, 0, 0, 0, 0, 0, 0, 1].into();
    let end = End::ud(address);
    let listener = end.device.listen_datagram(7175).unwrap();
    let (answered, service) = together(
        || listener.accept(LONG).expect("a request").accept(&end.qp, b""),
        || end.device.resolve(SocketAddr::new(address, 7175), b""),
    );
    answered.unwrap();
    assert_eq!(service.unwrap().qpn(), end.qp.qpn());
}

fn refusal(result: Result<DatagramService, ResolveError>) -> (SidrStatus, Vec<u8>) {
    match result {
        Err(ResolveError::Refused { status, private_data }) => (status, private_data),
        other => panic!("{other:?}"),
    }
}

#[test]
fn resolve__refusals() {
    let (a, b) = (End::ud([127, 0, 30, 15]), End::ud([127, 0, 30, 16]));
    let (at, elsewhere) = ([127, 0, 30, 16].into(), [127, 0, 30, 17]);
    let listener = b.device.listen_datagram(7174).unwrap();
    // Connections have other ports.
    let _connections = b.device.listen(7175).unwrap();
    let ask = |port| refusal(a.device.resolve(SocketAddr::new(at, port), b""));
    assert_eq!(ask(7175).0, SidrStatus::UNSUPPORTED);
    assert_eq!(ask(7176).0, SidrStatus::UNSUPPORTED);

    let request = || listener.accept(LONG).expect("a request");
    let (_, (status, told)) = together(|| request().reject(&[9; 136]), || ask(7174));
    assert_eq!((status, told), (SidrStatus::REJECT, vec![9; 136]));
    let (_, (status, _)) = together(|| drop(request()), || ask(7174));
    assert_eq!(status, SidrStatus::REJECT);

    // The listener cannot answer with a queue pair that cannot serve, and the peer is notified.
    let uc = End::of_type(elsewhere, QpType::Uc);
    let raw = End::of_type(elsewhere, QpType::Ud);
    for qp in [&uc.qp, &raw.qp] {
        let (answered, (status, _)) = together(|| request().accept(qp, b""), || ask(7174));
        assert_eq!(
            (answered, status),
            (Err(AnswerError::NotReady), SidrStatus::REJECT)
        );
    }
    let (answered, (status, _)) = together(|| request().accept(&b.qp, &[0; 137]), || ask(7174));
    assert_eq!(
        (answered, status),
        (Err(AnswerError::PrivateData), SidrStatus::REJECT)
    );

    // A peer cannot connect to a datagram service either, nor resolve a service of connections.
    let rc = End::of_type(elsewhere, QpType::Rc);
    let connected = rc
        .device
        .connect(&rc.qp, SocketAddr::new(at, 7174), &ConnectParams::default(), b"");
    assert!(matches!(
        connected,
        Err(ConnectError::Rejected {
            reason: RejReason::INVALID_SERVICE_ID,
            ..
        })
    ));
    let long = a.device.resolve(SocketAddr::new(at, 7174), &[0; 181]);
    assert!(matches!(long, Err(ResolveError::PrivateData)));
    let v6 = a.device.resolve("[::1]:7174".parse().unwrap(), b"");
    assert!(matches!(v6, Err(ResolveError::Family { .. })));
    drop(listener);
    assert_eq!(ask(7174).0, SidrStatus::UNSUPPORTED);
}

#[test]
fn resolve__of_a_service_that_does_not_answer_ends() {
    let end = End::ud([127, 0, 30, 18]);
    let listener = end.device.listen_datagram(7174).unwrap();
    let at = SocketAddr::new(end.device.address(), 7174);
    let (nobody, ignored) = together(
        || end.device.resolve("127.0.30.19:7174".parse().unwrap(), b""),
        || end.device.resolve(at, b""),
    );
    for result in [nobody, ignored] {
        assert!(matches!(result, Err(ResolveError::Unreachable(_))), "{result:?}");
    }
    // A late answer goes nowhere, and does no harm.
    listener
        .accept(LONG)
        .expect("a request")
        .accept(&end.qp, b"")
        .unwrap();
}

// Between processes.

/// Starts another process, and waits until it is ready.
fn start(address: &str, role: &str) -> ChildProcess {
    let child = ChildProcess::start(|command| {
        command
            .env("RDMUX_DATAGRAM_AT", address)
            .env("RDMUX_DATAGRAM_ROLE", role);
    });
    child.expect("ready");
    child
}

/// Body of the other process.
#[test]
fn child() {
    let Ok(address) = std::env::var("RDMUX_DATAGRAM_AT") else {
        return;
    };
    let role = std::env::var("RDMUX_DATAGRAM_ROLE").unwrap();
    match role.parse() {
        Ok(port) => serve(&address, port),
        Err(_) => join_and_receive(&address),
    }
}

/// Answers a peer that asks for its port, and reports what it receives.
fn serve(address: &str, port: u16) {
    let end = End::ud(address.parse::<IpAddr>().unwrap());
    let listener = end.device.listen_datagram(port).unwrap();
    end.recv(1);
    println!("@ ready");
    let mut request = listener.accept(LONG).expect("a request");
    request.accept(&end.qp, &port.to_be_bytes()).unwrap();
    let wc = end.wait_success();
    println!("@ {}", String::from_utf8_lossy(&end.bytes(&wc)[40..]));
    // The process runs until it is killed.
    let _ = std::io::stdin().lines().map_while(Result::ok).count();
}

#[test]
fn resolve__each_process_of_an_address_has_its_own_services() {
    let at = "127.0.30.20";
    let mut children = [7001, 7002, 7003].map(|port: u16| (port, start(at, &port.to_string())));
    // One end asks from the same address, one from another.
    let ends = [End::ud([127, 0, 30, 20]), End::ud([127, 0, 30, 21])];
    let ask = |end: &End, port| {
        end.device
            .resolve(SocketAddr::new(at.parse().unwrap(), port), b"")
    };
    for (i, (port, child)) in children.iter_mut().enumerate() {
        let end = &ends[i % 2];
        let service = ask(end, *port).unwrap();
        assert_eq!(service.private_data()[..2], port.to_be_bytes());
        end.send_text(service.target(0).unwrap(), format!("for {port}").as_bytes());
        child.expect(&format!("for {port}"));
    }
    // A service ends with its process, whoever holds the port then.
    for (port, child) in &mut children {
        child.kill();
        for end in &ends {
            assert_eq!(refusal(ask(end, *port)).0, SidrStatus::UNSUPPORTED);
        }
    }
}

/// Joins a group and reports what it receives.
fn join_and_receive(address: &str) {
    let end = End::ud(address.parse::<IpAddr>().unwrap());
    end.recv(1);
    end.qp.attach_mcast([239, 30, 0, 9].into()).unwrap();
    println!("@ ready");
    let wc = end.wait_success();
    println!("@ {}", String::from_utf8_lossy(&end.bytes(&wc)[40..]));
}

#[test]
fn multicast__each_process_of_a_host_gets_a_copy() {
    let sender = End::ud([127, 0, 30, 10]);
    // The first shares the sender's address, the others have one of their own.
    let children = ["127.0.30.10", "127.0.30.11", "127.0.30.11"].map(|address| start(address, "join"));
    let group = sender.device.create_ah([239, 30, 0, 9].into(), 0);
    sender.send_text(group.to_group(QKEY).unwrap(), b"hello, all");
    for mut child in children {
        child.expect("hello, all");
        assert!(child.wait().success());
    }
}
