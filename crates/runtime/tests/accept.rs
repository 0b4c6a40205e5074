//! Connections with sizes, a protection domain and private data of their own, and messages behind RDMA operations.
#![allow(non_snake_case, reason = "names of tests are function__case")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_runtime::{
    AcceptOptions, Buffer, Completed, ConnectionId, EstablishError, Limits, MessageConnection,
    PendingConnection, Queues, Reactor, ReactorEvent, SendError, SendSlot, Sizes,
};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectParams, Device, Memory, Operation, ProtectionDomain, RKey,
    RegionSpec, Registration, SgeList, WorkCompletion,
};

/// Time for what happens at once unless something is wrong.
const LONG: Duration = Duration::from_secs(60);
const SIZES: Sizes = Sizes {
    message_bytes: 256,
    sent_bytes: 16,
    receives: 8,
    answers: 24,
    own: 1,
    operations: 24,
};
/// Those of the peers, whose messages take no slots for answers.
const PEER_SIZES: Sizes = Sizes {
    message_bytes: 16,
    sent_bytes: 256,
    receives: 8,
    answers: 0,
    own: 8,
    operations: 4,
};

fn reactor(address: SocketAddr) -> Reactor<()> {
    rdmux_soft::register();
    let limits = Limits {
        connections: 8,
        keepalive: 2 * LONG,
        shared_receives: Some(4),
        queues: Queues::Pool,
        ledger: None,
    };
    let mut reactor = Reactor::new(SIZES, limits, None).unwrap();
    reactor
        .listen(&Device::open(address.ip()).unwrap(), address.port())
        .unwrap();
    reactor
}

/// A peer that has sent its request.
struct Peer {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    pending: PendingConnection,
}

impl Peer {
    fn start(from: &str, to: SocketAddr, private_data: &[u8]) -> Peer {
        let device = Device::open(from.parse().unwrap()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
        let params = ConnectParams::default();
        let pending =
            MessageConnection::start_with(&pd, &cq, to, &params, &PEER_SIZES, private_data).unwrap();
        Peer { pd, cq, pending }
    }
}

/// Returns the reactor's next event that `wanted` takes.
fn next<T>(
    reactor: &mut Reactor<()>,
    mut wanted: impl FnMut(&mut Reactor<()>, ReactorEvent<()>) -> Option<T>,
) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        assert!(Instant::now() < deadline, "nothing happens");
        if let Some(event) = reactor.next(Some(deadline)).unwrap()
            && let Some(found) = wanted(reactor, event)
        {
            return found;
        }
    }
}

fn accept(reactor: &mut Reactor<()>, sizes: Sizes, pd: Option<&ProtectionDomain>) -> ConnectionId {
    next(reactor, |reactor, event| match event {
        ReactorEvent::Request(request) => {
            assert_eq!(request.private_data()[..3], *b"ask");
            let options = AcceptOptions {
                sizes,
                pd,
                private_data: b"answer",
                refusal: &[],
            };
            let params = ConnectParams::default();
            Some(reactor.accept_with(request, &params, &options).unwrap())
        }
        _ => None,
    })
}

fn completed(reactor: &mut Reactor<()>, of: ConnectionId) -> Completed {
    next(reactor, |_, event| match event {
        ReactorEvent::Completed(id, completed) if id == of => Some(completed),
        _ => None,
    })
}

#[test]
fn refuse_with__the_peer_gets_the_private_data() {
    let address = "127.0.12.90:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let peer = Peer::start("127.0.12.91", address, b"ask");
    next(&mut reactor, |_, event| match event {
        ReactorEvent::Request(request) => {
            request.refuse_with(&[0, 0, 6, 0]);
            Some(())
        }
        _ => None,
    });
    match peer.pending.wait() {
        Err(EstablishError::Connect(ConnectError::Rejected { private_data, .. })) => {
            assert_eq!(private_data[..4], [0, 0, 6, 0]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn accept_with__a_connection_that_cannot_be_made_is_refused() {
    let address = "127.0.12.88:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let peer = Peer::start("127.0.12.89", address, b"ask");
    next(&mut reactor, |reactor, event| match event {
        ReactorEvent::Request(request) => {
            let options = AcceptOptions {
                sizes: SIZES,
                // Of another device.
                pd: Some(&peer.pd),
                private_data: &[],
                refusal: &[0, 0, 6, 0],
            };
            let accepted = reactor.accept_with(request, &ConnectParams::default(), &options);
            assert!(accepted.is_err());
            Some(())
        }
        _ => None,
    });
    match peer.pending.wait() {
        Err(EstablishError::Connect(ConnectError::Rejected { private_data, .. })) => {
            assert_eq!(private_data[..4], [0, 0, 6, 0]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn accept_with__a_connection_is_as_large_as_its_sizes() {
    let address = "127.0.12.92:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let peer = Peer::start("127.0.12.93", address, b"ask");
    let sizes = Sizes {
        // More than the reactor's: it has its answers.
        answers: 1000,
        sent_bytes: 8,
        ..SIZES
    };
    let id = accept(&mut reactor, sizes, None);
    let mut link = peer.pending.wait().unwrap();
    let slot = link.take_slot().unwrap();
    link.send(slot, b"hello").unwrap();
    match completed(&mut reactor, id) {
        Completed::Message {
            slot: Some(slot),
            bytes,
        } => {
            assert_eq!((slot.index() < SIZES.answers, &bytes[..]), (true, &b"hello"[..]));
            let server = reactor.connection(id).unwrap();
            assert!(matches!(server.send(slot, &[0; 9]), Err(SendError::TooLong)));
            server.reuse(bytes);
            server.send(slot, &[1; 8]).unwrap();
        }
        other => panic!("{other:?}"),
    }
    loop {
        let wc = peer.cq.wait(LONG).unwrap().unwrap();
        if let Completed::Message { bytes, .. } = link.handle(&wc).unwrap() {
            assert_eq!(bytes, [1; 8]);
            return;
        }
    }
}

#[test]
fn send_behind__the_peer_has_the_data_with_the_message() {
    let address: SocketAddr = "127.0.12.94:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let mut pd = None;
    // Connections in one domain write from the same buffer.
    let mut peers = Vec::new();
    for from in ["127.0.12.95", "127.0.12.96"] {
        let peer = Peer::start(from, address, b"ask");
        let pd = pd.get_or_insert_with(|| reactor.devices().next().unwrap().alloc_pd().unwrap());
        let id = accept(&mut reactor, SIZES, Some(pd));
        peers.push((id, peer.pd, peer.cq, peer.pending.wait().unwrap()));
    }
    let buffer = Buffer::new(pd.as_ref().unwrap(), 4096).unwrap();
    for (id, pd, cq, mut link) in peers {
        let memory = Arc::new(AnonymousMemory::new(4096).unwrap());
        let region = pd.alloc_mr(4096).unwrap();
        let mut key = region.rkey();
        for round in 1..=40u8 {
            key = key.next();
            let spec = RegionSpec {
                memory: memory.clone(),
                memory_offset: 0,
                length: 4096,
                iova: 0,
                access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            };
            let register = Operation::Register(Box::new(Registration { key, spec }));
            link.post(1, register, SgeList::EMPTY).unwrap();
            while let Some(wc) = cq.poll() {
                link.handle(&wc).unwrap();
            }
            let slot = link.take_slot().unwrap();
            link.send(slot, &key.0.to_be_bytes()).unwrap();
            let Completed::Message {
                slot: Some(slot),
                bytes,
            } = completed(&mut reactor, id)
            else {
                panic!("no message");
            };
            let rkey = RKey(u32::from_be_bytes(bytes[..].try_into().unwrap()));
            buffer.memory().write(0, &[round; 4096]).unwrap();
            let write = Operation::Write {
                va: 0,
                rkey,
                imm: None,
            };
            let server = reactor.connection(id).unwrap();
            let invalidate = (round % 2 == 0).then_some(rkey);
            server
                .send_behind(
                    (write, buffer.sge(0, 4096).into()),
                    slot,
                    &[round],
                    invalidate,
                    true,
                )
                .unwrap();
            let invalidated = loop {
                let wc = cq.wait(LONG).unwrap().unwrap();
                if let Completed::Message { bytes, .. } = link.handle(&wc).unwrap() {
                    assert_eq!(bytes, [round]);
                    break wc.invalidated;
                }
            };
            assert_eq!(invalidated, invalidate);
            let mut arrived = [0; 4096];
            memory.read(0, &mut arrived).unwrap();
            assert!(arrived == [round; 4096]);
            // It stands for both.
            assert_eq!(completed(&mut reactor, id), Completed::Sent(slot));
            reactor.connection(id).unwrap().give_back(slot);
            if invalidate.is_none() {
                let invalidate = Operation::LocalInvalidate { rkey: key };
                link.post(2, invalidate, SgeList::EMPTY).unwrap();
            }
        }
    }
}

#[test]
fn send_invalidate__a_message_alone_takes_the_key() {
    let address = "127.0.12.97:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let peer = Peer::start("127.0.12.98", address, b"ask");
    let id = accept(&mut reactor, SIZES, None);
    let mut link = peer.pending.wait().unwrap();
    let region = peer.pd.alloc_mr(4096).unwrap();
    let key = region.rkey().next();
    let spec = RegionSpec {
        memory: Arc::new(AnonymousMemory::new(4096).unwrap()),
        memory_offset: 0,
        length: 4096,
        iova: 0,
        access: Access::LOCAL_WRITE,
    };
    let register = Operation::Register(Box::new(Registration { key, spec }));
    link.post(1, register, SgeList::EMPTY).unwrap();
    let slot = link.take_slot().unwrap();
    link.send(slot, b"x").unwrap();
    let Completed::Message { slot: Some(slot), .. } = completed(&mut reactor, id) else {
        panic!("no message");
    };
    let server = reactor.connection(id).unwrap();
    server.send_invalidate(slot, b"y", key).unwrap();
    loop {
        let wc = peer.cq.wait(LONG).unwrap().unwrap();
        if let Completed::Message { .. } = link.handle(&wc).unwrap() {
            assert_eq!(wc.invalidated, Some(key));
            return;
        }
    }
}

/// Handles a completion of a peer's, and returns the number of messages that it has brought.
fn handle_answer(link: &mut MessageConnection, wc: &WorkCompletion) -> usize {
    usize::from(matches!(link.handle(wc).unwrap(), Completed::Message { .. }))
}

#[test]
fn poll_sent__one_completion_stands_for_several_messages() {
    let address = "127.0.12.100:7174".parse().unwrap();
    let mut reactor = reactor(address);
    let peer = Peer::start("127.0.12.101", address, b"ask");
    let id = accept(&mut reactor, SIZES, None);
    let mut link = peer.pending.wait().unwrap();
    let memory = Arc::new(AnonymousMemory::new(4096).unwrap());
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = peer.pd.reg_mr_all(memory.clone(), 0, rights).unwrap();
    let pd = reactor.connection(id).unwrap().pd().clone();
    let buffer = Buffer::new(&pd, 4096).unwrap();
    let mut waiting = Vec::new();
    let (mut reports, mut answers) = (0, 0);
    let mut reported = |server: &mut MessageConnection, waiting: &mut Vec<SendSlot>, first| {
        reports += 1;
        let mut sent = Some(first);
        while let Some(slot) = sent {
            // In the order in which they were sent.
            assert_eq!(waiting.remove(0), slot);
            server.give_back(slot);
            sent = server.poll_sent();
        }
    };
    for round in 0..100u8 {
        // Without a free receive the peer does not acknowledge anything.
        while let Some(wc) = peer.cq.poll() {
            answers += handle_answer(&mut link, &wc);
        }
        let slot = loop {
            if let Some(slot) = link.take_slot() {
                break slot;
            }
            answers += handle_answer(&mut link, &peer.cq.wait(LONG).unwrap().unwrap());
        };
        link.send(slot, &[round]).unwrap();
        let slot = loop {
            match completed(&mut reactor, id) {
                Completed::Message { slot, bytes } => {
                    assert_eq!(bytes, [round]);
                    break slot.unwrap();
                }
                Completed::Sent(first) => {
                    reported(reactor.connection(id).unwrap(), &mut waiting, first);
                }
                other => panic!("{other:?}"),
            }
        };
        let write = Operation::Write {
            va: 0,
            rkey: region.rkey(),
            imm: None,
        };
        let write = (write, buffer.sge(0, 64).into());
        let server = reactor.connection(id).unwrap();
        server.send_behind(write, slot, &[round], None, false).unwrap();
        waiting.push(slot);
    }
    // The device acknowledges messages once there are receives for them, and a report may come later than the messages behind it.
    while answers < 100 {
        answers += handle_answer(&mut link, &peer.cq.wait(LONG).unwrap().unwrap());
    }
    while waiting.len() > 8 {
        match completed(&mut reactor, id) {
            Completed::Sent(first) => reported(reactor.connection(id).unwrap(), &mut waiting, first),
            other => panic!("{other:?}"),
        }
    }
    // Where slots run short, messages are reported sooner.
    assert!((1..=100 / 4).contains(&reports), "{reports}");
}
