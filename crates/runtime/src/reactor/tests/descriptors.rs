//! Descriptors of a service beside each other, mail, and requests.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{SendFlags, send};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::DescriptorId;
use crate::descriptors::BATCH;

const MODES: [Option<WaitMode>; 3] = [None, Some(WaitMode::Running), Some(WaitMode::Blocked)];

/// A reactor of a service without devices.
fn alone<M>(waiting: Option<WaitMode>) -> Reactor<M> {
    Reactor::new(SIZES, limits(1), waiting).unwrap()
}

fn pair() -> [UnixStream; 2] {
    let (socket, peer) = UnixStream::pair().unwrap();
    for end in [&socket, &peer] {
        end.set_nonblocking(true).unwrap();
    }
    [socket, peer]
}

/// Adds a descriptor that is readable until it is removed.
fn add_readable<M>(reactor: &mut Reactor<M>) -> DescriptorId {
    let readable = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    reactor.add_descriptor(readable, Interest::READABLE).unwrap()
}

/// Waits until the deadline, before which nothing must happen.
fn nothing_happens<M: std::fmt::Debug>(reactor: &mut Reactor<M>, deadline: Instant) {
    while Instant::now() < deadline {
        let event = reactor.next(Some(deadline)).unwrap();
        assert!(event.is_none(), "{event:?}");
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(5)
}

/// Writes as much as fits.
fn fill(socket: &mut impl Write) -> usize {
    let mut bytes = 0;
    loop {
        match socket.write(&[7; 4096]) {
            Ok(written) => bytes += written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return bytes,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn next__a_full_socket_is_reported_once_it_has_room() {
    for waiting in MODES {
        let mut reactor = alone::<()>(waiting);
        let [mut socket, mut peer] = pair();
        let own = socket.try_clone().unwrap();
        let id = reactor.add_descriptor(own.into(), Interest::BOTH).unwrap();
        assert!(matches!(next(&mut reactor), ReactorEvent::Writable(of) if of == id));
        let filled = fill(&mut socket);
        while reactor.poll().is_some() {}
        nothing_happens(&mut reactor, soon());
        let reading = std::thread::spawn(move || {
            peer.set_nonblocking(false).unwrap();
            peer.read_exact(&mut vec![0; filled]).unwrap();
            peer
        });
        assert!(matches!(next(&mut reactor), ReactorEvent::Writable(of) if of == id));
        let mut peer = reading.join().unwrap();
        reactor.set_interest(id, Interest::READABLE).unwrap();
        nothing_happens(&mut reactor, soon());
        peer.write_all(b"x").unwrap();
        assert!(matches!(next(&mut reactor), ReactorEvent::Readable(of) if of == id));
    }
}

#[test]
fn set_interest__what_is_not_asked_is_not_reported() {
    for waiting in MODES {
        let mut reactor = alone::<()>(waiting);
        let [socket, mut peer] = pair();
        let id = reactor.add_descriptor(socket.into(), Interest::BOTH).unwrap();
        peer.write_all(b"x").unwrap();
        assert!(matches!(next(&mut reactor), ReactorEvent::Readable(of) if of == id));
        reactor.set_interest(id, Interest::default()).unwrap();
        nothing_happens(&mut reactor, soon());
        drop(peer);
        nothing_happens(&mut reactor, soon());
        reactor.set_interest(id, Interest::READABLE).unwrap();
        for _ in 0..3 {
            assert!(matches!(next(&mut reactor), ReactorEvent::Readable(of) if of == id));
        }
    }
}

#[test]
fn next__one_of_many_sockets_is_ready() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, most).unwrap();
    for waiting in MODES {
        let mut reactor = alone::<()>(waiting);
        let mut peers = Vec::new();
        for _ in 0..500 {
            let [socket, peer] = pair();
            let id = reactor.add_descriptor(socket.into(), Interest::READABLE).unwrap();
            peers.push((id, peer));
        }
        nothing_happens(&mut reactor, soon());
        for at in [0, 499, 250] {
            let (id, peer) = &mut peers[at];
            peer.write_all(b"x").unwrap();
            for _ in 0..3 {
                assert!(matches!(next(&mut reactor), ReactorEvent::Readable(of) if of == *id));
            }
            let socket = reactor.descriptor(*id).unwrap();
            assert_eq!(rustix::io::read(socket, &mut [0]), Ok(1));
            // It may have been taken once more before it was read.
            while reactor.poll().is_some() {}
            nothing_happens(&mut reactor, soon());
        }
    }
}

#[test]
fn remove_descriptor__is_not_reported_though_it_was_ready() {
    for waiting in MODES {
        let mut reactor = alone::<()>(waiting);
        let ids = [(); 3].map(|()| add_readable(&mut reactor));
        let ReactorEvent::Readable(first) = next(&mut reactor) else {
            panic!("nothing else is there");
        };
        let [other, stays] = match ids.iter().position(|id| *id == first) {
            Some(0) => [ids[1], ids[2]],
            Some(1) => [ids[2], ids[0]],
            _ => [ids[0], ids[1]],
        };
        // Both are ready, and taken from the system together.
        assert!(reactor.remove_descriptor(first).is_some());
        assert!(reactor.remove_descriptor(other).is_some());
        for _ in 0..3 {
            assert!(matches!(next(&mut reactor), ReactorEvent::Readable(of) if of == stays));
        }
    }
}

#[test]
fn poll__without_ports_looks_at_descriptors_each_time() {
    let mut reactor = alone::<()>(None);
    for _ in 0..2 * OTHERS_EVERY {
        assert!(reactor.poll().is_none());
        let id = add_readable(&mut reactor);
        assert!(matches!(reactor.poll(), Some(ReactorEvent::Readable(of)) if of == id));
        reactor.remove_descriptor(id);
    }
}

#[test]
fn poll__with_ports_looks_at_descriptors_at_times() {
    let mut reactor = reactor::<()>("127.0.12.60:7174".parse().unwrap(), 1);
    let id = add_readable(&mut reactor);
    for _ in 0..3 {
        let polls = (0..OTHERS_EVERY).map(|_| reactor.poll());
        let reports = polls.flatten().count();
        assert!(reports >= 1);
    }
    reactor.remove_descriptor(id);
}

#[test]
fn poll__mail_and_descriptors_leave_each_other_their_turns() {
    for ports in [false, true] {
        let mut reactor = match ports {
            false => alone::<u32>(None),
            true => reactor::<u32>("127.0.12.61:7174".parse().unwrap(), 1),
        };
        let ids: Vec<_> = (0..2 * BATCH).map(|_| add_readable(&mut reactor)).collect();
        let mailbox = reactor.mailbox();
        for round in 0..10 {
            for _ in 0..BATCH {
                assert!(matches!(next(&mut reactor), ReactorEvent::Readable(_)));
            }
            mailbox.send(round);
            let mut events = (0..OTHERS_EVERY).filter_map(|_| reactor.poll());
            assert!(events.any(|event| matches!(event, ReactorEvent::Mail(of) if of == round)));
        }
        for id in &ids[1..] {
            reactor.remove_descriptor(*id);
        }
        (0..10 * OTHERS_EVERY).for_each(|mail| assert!(mailbox.send(mail)));
        let mut expected = 0;
        for _ in 0..5 {
            let mut reports = 0;
            for _ in 0..2 * OTHERS_EVERY {
                match reactor.poll() {
                    Some(ReactorEvent::Readable(id)) if id == ids[0] => reports += 1,
                    Some(ReactorEvent::Mail(mail)) if mail == expected => expected += 1,
                    other => panic!("{other:?}"),
                }
            }
            assert!(reports >= 1);
        }
        assert!(expected >= 5);
    }
}

#[test]
fn next__a_request_is_reported_beside_ready_descriptors() {
    let address: SocketAddr = "127.0.12.62:7174".parse().unwrap();
    let mut reactor = reactor::<()>(address, 1);
    let ids: Vec<_> = (0..2 * BATCH).map(|_| add_readable(&mut reactor)).collect();
    let connecting = std::thread::spawn(move || Peer::connect(address).unwrap());
    let deadline = Instant::now() + LONG;
    let request = loop {
        assert!(Instant::now() < deadline, "no request");
        match next(&mut reactor) {
            ReactorEvent::Request(request) => break request,
            ReactorEvent::Readable(_) => {}
            other => panic!("{other:?}"),
        }
    };
    for id in ids {
        reactor.remove_descriptor(id);
    }
    reactor.accept(request, &ConnectParams::default()).unwrap();
    drop(connecting.join().unwrap());
    let ended = next(&mut reactor);
    assert!(matches!(ended, ReactorEvent::Ended(..)), "{ended:?}");
}

#[test]
fn next__returns_at_the_deadline_beside_silent_descriptors() {
    for waiting in MODES {
        let mut reactor = alone::<()>(waiting);
        let [socket, _peer] = pair();
        reactor.add_descriptor(socket.into(), Interest::READABLE).unwrap();
        for ms in [0, 1, 20] {
            let deadline = Instant::now() + Duration::from_millis(ms);
            assert!(reactor.next(Some(deadline)).unwrap().is_none());
            assert!(Instant::now() >= deadline);
        }
        let mailbox = reactor.mailbox();
        let sending = std::thread::spawn(move || mailbox.send(()));
        assert!(matches!(next(&mut reactor), ReactorEvent::Mail(())));
        assert!(sending.join().unwrap());
    }
}

/// A TCP service that sends each byte back, and takes no more from a client that does not take its answers.
struct TcpEcho {
    reactor: Reactor<()>,
    listener: TcpListener,
    listens: DescriptorId,
    accepted: usize,
    /// Bytes that wait for room.
    answers: HashMap<DescriptorId, Vec<u8>>,
    /// Told of each client from which no more is taken.
    stalled: mpsc::Sender<DescriptorId>,
}

impl TcpEcho {
    /// Bytes of answers beyond which nothing is read.
    const ANSWERS_MAX: usize = 64 * 1024;

    /// Serves so many clients, until all are gone.
    fn serve(&mut self, clients: usize) {
        let deadline = Instant::now() + LONG;
        while self.accepted < clients || !self.answers.is_empty() {
            assert!(Instant::now() < deadline, "{} clients", self.answers.len());
            match self.reactor.next(Some(deadline)).unwrap() {
                Some(ReactorEvent::Readable(id)) if id == self.listens => self.accept(),
                Some(ReactorEvent::Readable(id)) => self.read(id),
                Some(ReactorEvent::Writable(id)) => self.write(id),
                None => {}
                Some(other) => panic!("{other:?}"),
            }
        }
    }

    fn accept(&mut self) {
        while let Ok((client, _)) = self.listener.accept() {
            client.set_nonblocking(true).unwrap();
            set_socket_send_buffer_size(&client, TcpEcho::ANSWERS_MAX / 4).unwrap();
            let id = self.reactor.add_descriptor(client.into(), Interest::READABLE);
            self.answers.insert(id.unwrap(), Vec::new());
            self.accepted += 1;
        }
    }

    fn read(&mut self, id: DescriptorId) {
        let mut bytes = [0; 4096];
        let answers = self.answers.get_mut(&id).unwrap();
        match rustix::io::read(self.reactor.descriptor(id).unwrap(), &mut bytes) {
            Ok(0) => {
                assert!(answers.is_empty());
                self.answers.remove(&id);
                drop(self.reactor.remove_descriptor(id).unwrap());
            }
            Ok(count) => {
                answers.extend(&bytes[..count]);
                self.write(id);
            }
            Err(Errno::AGAIN) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn write(&mut self, id: DescriptorId) {
        let answers = self.answers.get_mut(&id).unwrap();
        match send(self.reactor.descriptor(id).unwrap(), answers, SendFlags::NOSIGNAL) {
            Ok(count) => drop(answers.drain(..count)),
            Err(Errno::AGAIN) => {}
            Err(error) => panic!("{error}"),
        }
        let interest = Interest {
            readable: answers.len() < TcpEcho::ANSWERS_MAX,
            writable: !answers.is_empty(),
        };
        self.reactor.set_interest(id, interest).unwrap();
        if !interest.readable {
            let _ = self.stalled.send(id);
        }
    }
}

#[test]
fn next__tcp_clients_beside_one_that_takes_its_answers_late() {
    const CLIENTS: u8 = 20;
    // More than the sockets hold.
    const BYTES: usize = 4 << 20;
    let listener = TcpListener::bind("127.0.12.63:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let mut reactor = alone::<()>(None);
    let own = listener.try_clone().unwrap().into();
    let listens = reactor.add_descriptor(own, Interest::READABLE).unwrap();
    let (stalled, is_stalled) = mpsc::channel();
    let mut service = TcpEcho {
        reactor,
        listener,
        listens,
        accepted: 0,
        answers: HashMap::new(),
        stalled,
    };
    std::thread::scope(|scope| {
        scope.spawn(move || service.serve(usize::from(CLIENTS) + 1));
        let mut late = TcpStream::connect(address).unwrap();
        set_socket_recv_buffer_size(&late, 64 * 1024).unwrap();
        let mut writes = late.try_clone().unwrap();
        scope.spawn(move || writes.write_all(&vec![7; BYTES]).unwrap());
        is_stalled.recv_timeout(LONG).unwrap();
        let echoes = (0..CLIENTS).map(|client| {
            scope.spawn(move || {
                let mut socket = TcpStream::connect(address).unwrap();
                socket.write_all(&[client; 1000]).unwrap();
                let mut answers = [!client; 1000];
                socket.read_exact(&mut answers).unwrap();
                assert_eq!(answers, [client; 1000]);
            })
        });
        let echoes: Vec<_> = echoes.collect();
        echoes.into_iter().for_each(|client| client.join().unwrap());
        let mut answers = vec![0; BYTES];
        late.read_exact(&mut answers).unwrap();
        assert!(answers.iter().all(|byte| *byte == 7));
    });
}
