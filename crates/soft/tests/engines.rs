//! Several engines of a device: they listen for services together, and connect to each other.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::stdin;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_soft::metrics;
use rdmux_verbs::resources::{self, Item};
use rdmux_verbs::*;

use common::{ChildProcess, End, LONG, private};

const PORT: u16 = 7_900;
/// Bytes of the memory of each end.
const BYTES: usize = 4_096;
/// In the environment of [`child`]: the address.
const CHILD: &str = "RDMUX_ENGINES";

impl End {
    /// Makes a queue pair that has a receive before it is connected.
    fn ready(device: &Device) -> End {
        let end = End::on(device, private(BYTES));
        end.qp.init().unwrap();
        end.receive();
        end
    }

    fn receive(&self) {
        let place = self.mr.slice(512..576).unwrap();
        self.qp.post_recv(RecvRequest::new(9, place)).unwrap();
    }

    /// Its memory, as private data.
    fn buffer(&self) -> Vec<u8> {
        self.mr.remote(..).unwrap().to_bytes().to_vec()
    }

    fn done(&self, request: SendRequest) {
        self.qp.post_send(request.signaled()).unwrap();
        self.wait_success();
    }

    /// Writes to the peer's memory, reads it back and adds to it.
    fn exchange(&self, peer: RemoteBuffer, tag: u64) {
        let piece = |at| self.mr.slice(at..at + 8).unwrap();
        let there = |at| peer.slice(at..at + 8).unwrap();
        self.memory.write(0, &tag.to_ne_bytes()).unwrap();
        self.done(SendRequest::write(piece(0), there(64)));
        self.done(SendRequest::fetch_add(piece(16), there(64), 5));
        self.done(SendRequest::compare_swap(piece(24), there(64), tag + 5, tag + 6));
        self.done(SendRequest::read(piece(8), there(64)));
        let seen = [8, 16, 24].map(|at| self.word(at));
        assert_eq!(seen, [tag + 6, tag, tag + 5]);
    }

    /// Sends to the peer, which has a receive.
    fn send(&self) {
        self.done(SendRequest::send(self.mr.slice(0..8).unwrap()));
    }
}

/// A connection of a client.
struct Client {
    end: End,
    connection: Connection,
    peer: RemoteBuffer,
}

impl Client {
    fn of(end: End, connection: Connection) -> Client {
        let peer = RemoteBuffer::from_bytes(connection.private_data()[..20].try_into().unwrap());
        Client {
            end,
            connection,
            peer,
        }
    }

    fn connect(device: &Device, to: SocketAddr) -> Client {
        let end = End::ready(device);
        let connection = device.connect(&end.qp, to, &ConnectParams::default(), b"hello");
        Client::of(end, connection.unwrap())
    }

    fn exchange(&self, tag: u64) {
        self.end.exchange(self.peer, tag);
    }

    /// The slot of the engine that serves it.
    fn slot(&self) -> u8 {
        slot(self.connection.remote().unwrap().qpn)
    }
}

fn slot(qpn: Qpn) -> u8 {
    (qpn.value() >> 16) as u8
}

/// An attempt to connect.
fn start(device: &Device, to: SocketAddr) -> (End, Connecting) {
    let end = End::ready(device);
    let pair = ConnectPair::Own(&end.qp);
    let attempt = device.start_connect(pair, to, &ConnectParams::default(), b"hello");
    (end, attempt.unwrap())
}

fn accept(engine: &Device, request: ConnectionRequest) -> (End, Connection) {
    assert_eq!(&request.private_data()[..5], b"hello");
    let end = End::ready(engine);
    let buffer = end.buffer();
    let connection = request.accept(&end.qp, &ConnectParams::default(), &buffer);
    (end, connection.unwrap())
}

/// Makes a connection to an engine that listens.
fn pair(client: &Device, engine: &Device, listener: &Listener) -> (Client, (End, Connection)) {
    let (end, attempt) = start(client, SocketAddr::new(engine.address(), PORT));
    let request = listener.accept(LONG).expect("a request");
    let accepted = accept(engine, request);
    (Client::of(end, attempt.wait().unwrap()), accepted)
}

fn slot_of(device: &Device) -> u8 {
    slot(End::ready(device).qp.qpn())
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

/// A device with two engines that listen.
fn two(address: [u8; 4]) -> [(Device, Listener); 2] {
    let device = common::open(address.into()).unwrap();
    let other = device.open_engine().unwrap();
    [device, other].map(|engine| {
        let listener = engine.listen(PORT).unwrap();
        (engine, listener)
    })
}

// Another process.

/// Body of the other process: two engines that listen and accept everything, until standard input ends.
#[test]
fn child() {
    let Ok(address) = std::env::var(CHILD) else { return };
    let device = common::open(address.parse().unwrap()).unwrap();
    let engines = [device.open_engine().unwrap(), device];
    let events = EventQueue::new().unwrap();
    let listen = |i: usize| {
        let listener = engines[i].listen(PORT).unwrap();
        listener.notify(&events, i as u64);
        listener
    };
    let mut listeners = [0, 1].map(|i| Some(listen(i)));
    println!("@ ready {} {}", slot_of(&engines[0]), slot_of(&engines[1]));
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let mut lines = stdin().lines().map_while(Result::ok);
        lines.try_for_each(|line| tell.send(line))
    });
    let (mut kept, mut requests) = (Vec::new(), 0);
    loop {
        // The lines come without an event; nothing depends on how soon they are seen.
        if let Some(i) = events.wait(Duration::from_millis(10)) {
            let (engine, listener) = (&engines[i as usize], &listeners[i as usize]);
            while let Some(request) = listener.as_ref().and_then(|l| l.accept(Duration::ZERO)) {
                requests += 1;
                kept.push(accept(engine, request));
            }
        }
        match told.try_recv().as_deref() {
            Ok("count") => println!("@ {requests}"),
            Ok(line) => {
                let i: usize = line[line.len() - 1..].parse().unwrap();
                listeners[i] = line.starts_with("listen").then(|| listen(i));
                println!("@ done");
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => std::process::exit(0),
        }
    }
}

/// A process whose device has two engines.
struct Server {
    process: ChildProcess,
    slots: [u8; 2],
    at: SocketAddr,
}

impl Server {
    fn start(address: [u8; 4], faults: &str) -> Server {
        let at = SocketAddr::new(IpAddr::from(address), PORT);
        let process = ChildProcess::start(|command| {
            command.env(CHILD, at.ip().to_string()).env("RDMUX_FAULT", faults);
        });
        let ready = process.next();
        let slots = ready.strip_prefix("ready ").unwrap().split(' ');
        let slots: Vec<u8> = slots.map(|slot| slot.parse().unwrap()).collect();
        Server {
            process,
            slots: slots.try_into().unwrap(),
            at,
        }
    }

    fn ask(&mut self, line: &str) -> String {
        self.process.tell(line);
        self.process.next()
    }

    fn tell(&mut self, line: &str) {
        assert_eq!(self.ask(line), "done");
    }
}

#[test]
fn listen__of_two_engines_serves_the_connections_of_another_process() {
    const COUNT: usize = 24;
    let mut server = Server::start([127, 0, 40, 1], "");
    let device = common::open([127, 0, 40, 2].into()).unwrap();
    let connect = || Client::connect(&device, server.at);
    let mut clients: Vec<Client> = (0..COUNT).map(|_| connect()).collect();
    let mut served = BTreeMap::new();
    for client in &clients {
        *served.entry(client.slot()).or_default() += 1;
    }
    // Each got the next one while it had fewer.
    assert_eq!(served, server.slots.map(|slot| (slot, COUNT / 2)).into());
    for (client, tag) in clients.iter().zip(1_000..) {
        let remote = client.connection.remote().unwrap();
        assert!(remote.extensions.is_some_and(|extensions| extensions.selective));
        client.end.send();
        client.exchange(tag);
    }
    // New connections go to who listens, and the others go on.
    for (closed, open) in [(0, 1), (1, 0)] {
        server.tell(&format!("close {closed}"));
        let more: Vec<Client> = (0..4).map(|_| Client::connect(&device, server.at)).collect();
        assert!(more.iter().all(|client| client.slot() == server.slots[open]));
        clients.extend(more);
        clients.iter().zip(2_000..).for_each(|(c, tag)| c.exchange(tag));
        server.tell(&format!("listen {closed}"));
    }
    server.tell("close 0");
    server.tell("close 1");
    let (_end, attempt) = start(&device, server.at);
    let refused = attempt.wait().err();
    let Some(ConnectError::Rejected { reason, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(reason, RejReason::INVALID_SERVICE_ID);
    server.tell("listen 1");
    assert_eq!(Client::connect(&device, server.at).slot(), server.slots[1]);
    // Nothing has ended meanwhile.
    assert!(clients.iter().all(|client| !client.connection.is_ended()));
}

/// Connects under faults of the messages of connection management, at both ends.
fn connect_under(faults: &str, server: [u8; 4], client: [u8; 4]) {
    const COUNT: usize = 40;
    for seed in 1..4 {
        let faults = format!("{faults},only=cm,seed={seed}");
        println!("{faults}");
        let mut server = Server::start(server, &faults);
        let options = Options {
            faults: Some(faults.parse().unwrap()),
            ..Options::default()
        };
        let device = common::open_with(client.into(), options).unwrap();
        let attempts: Vec<_> = (0..COUNT).map(|_| start(&device, server.at)).collect();
        let connect = |(end, attempt): (End, Connecting)| Client::of(end, attempt.wait().unwrap());
        let clients: Vec<Client> = attempts.into_iter().map(connect).collect();
        clients.iter().zip(1_000..).for_each(|(c, tag)| c.exchange(tag));
        let slots: BTreeSet<u8> = clients.iter().map(Client::slot).collect();
        assert_eq!(slots, server.slots.into());
        assert_eq!(server.ask("count"), COUNT.to_string());
        assert!(clients.iter().all(|client| !client.connection.is_ended()));
    }
}

#[test]
fn connect__of_duplicated_messages_makes_one_connection_each() {
    connect_under("dup=80%", [127, 0, 40, 3], [127, 0, 40, 4]);
}

#[test]
fn connect__of_lost_and_late_messages_makes_one_connection_each() {
    connect_under(
        "loss=5%,dup=30%,delay=0ms..100ms",
        [127, 0, 40, 5],
        [127, 0, 40, 6],
    );
}

/// Kills a process with two engines. Others of its address end the connections of both.
fn killed(addresses: [[u8; 4]; 2], is_first: bool) {
    let [address, client] = addresses;
    let survivor = || common::open(address.into()).unwrap();
    let before = (!is_first).then(survivor);
    let mut server = Server::start(address, "");
    let _survivor = before.unwrap_or_else(survivor);
    // Without shared memory, whose link would end with the process.
    let options = Options {
        shared_memory: SharedMemory::Off,
        ..Options::default()
    };
    let device = common::open_with(client.into(), options).unwrap();
    let clients: Vec<Client> = (0..6).map(|_| Client::connect(&device, server.at)).collect();
    let slots: BTreeSet<u8> = clients.iter().map(Client::slot).collect();
    assert_eq!(slots, server.slots.into());
    server.process.kill();
    for client in &clients {
        assert!(client.connection.wait_ended(LONG));
    }
}

#[test]
fn kill__of_the_first_process_ends_the_connections_of_both_engines() {
    killed([[127, 0, 40, 7], [127, 0, 40, 8]], true);
}

#[test]
fn kill__of_a_later_process_ends_the_connections_of_both_engines() {
    killed([[127, 0, 40, 9], [127, 0, 40, 10]], false);
}

// Within this process.

#[test]
fn open_engine__of_a_device_connects_to_its_other_engine() {
    for (address, shared_memory) in [
        ([127, 0, 40, 11], SharedMemory::Auto),
        ([127, 0, 40, 12], SharedMemory::Off),
    ] {
        let options = Options {
            shared_memory,
            ..Options::default()
        };
        let one = common::open_with(address.into(), options).unwrap();
        let other = one.open_engine().unwrap();
        assert_eq!(one.address(), other.address());
        let listener = other.listen(PORT).unwrap();
        let (client, (served, connection)) = pair(&one, &other, &listener);
        assert!(connection.wait_established());
        assert_ne!(slot(client.end.qp.qpn()), slot(served.qp.qpn()));
        if shared_memory == SharedMemory::Auto {
            until("a link", || {
                client.end.qp.carrier() == Some(Carrier::SharedMemory)
            });
            // The first request asks for the grant.
            until("a direct request", || {
                client.exchange(1);
                one.counters().direct_requests > 0
            });
        } else {
            assert!(matches!(client.end.qp.carrier(), Some(Carrier::Udp(_))));
        }
        client.exchange(2);
        client.end.send();
        assert_eq!(served.wait_success().opcode, WcOpcode::Recv);
        served.send();
        assert_eq!(client.end.wait_success().opcode, WcOpcode::Recv);
        // Deregistration waits for the other engine, which is of this process.
        drop((served, connection));
        assert!(client.connection.wait_ended(LONG));
    }
}

#[test]
fn listen__once_for_each_engine_and_for_no_other_device() {
    let [(one, listener), (other, _other)] = two([127, 0, 40, 13]);
    let stranger = common::open(one.address()).unwrap();
    for device in [&one, &other, &stranger] {
        let refused = device.listen(PORT).err();
        assert!(refused.is_some_and(|e| e.to_string().contains("in use")));
    }
    // An engine whose listener has gone can listen again.
    drop(listener);
    assert!(stranger.listen(PORT).is_err());
    let listener = one.listen(PORT).unwrap();
    drop((listener, _other));
    // A child that another test starts meanwhile has the descriptors of this process until it executes its program.
    let deadline = Instant::now() + LONG;
    while let Err(error) = stranger.listen(PORT) {
        assert!(Instant::now() < deadline, "{error}");
        thread::yield_now();
    }
}

#[test]
fn drop__of_a_listener_leaves_its_requests_to_the_others() {
    let [(one, listener), (other, remains)] = two([127, 0, 40, 14]);
    let client = common::open([127, 0, 40, 15].into()).unwrap();
    let to = SocketAddr::new(one.address(), PORT);
    let attempts: Vec<_> = (0..6).map(|_| start(&client, to)).collect();
    // Each engine gets three. Of those of the first, two are in the hands of the program.
    let taken = [(); 2].map(|()| listener.accept(LONG).unwrap());
    drop(listener);
    let accepted = (0..6).map(|_| accept(&other, remains.accept(LONG).unwrap()));
    let _accepted: Vec<_> = accepted.collect();
    for taken in taken {
        let late = taken.accept(&End::ready(&one).qp, &ConnectParams::default(), b"");
        assert!(late.is_err());
    }
    for (end, attempt) in attempts {
        let client = Client::of(end, attempt.wait().unwrap());
        assert_eq!(client.slot(), slot_of(&other));
        client.exchange(3);
    }
    assert!(remains.accept(Duration::ZERO).is_none());
    // The last one refuses what it has.
    let (_end, attempt) = start(&client, to);
    let _taken = remains.accept(LONG).unwrap();
    drop(remains);
    assert!(matches!(attempt.wait(), Err(ConnectError::Rejected { .. })));
}

#[test]
fn listen__while_listeners_come_and_go_loses_no_request() {
    const CONNECTIONS: usize = 60;
    let device = common::open([127, 0, 40, 23].into()).unwrap();
    let engines = [device.open_engine().unwrap(), device.open_engine().unwrap()];
    let to = SocketAddr::new(device.address(), PORT);
    // One listens all the time, so that no request may be refused.
    let stays = device.listen(PORT).unwrap();
    let is_over = AtomicBool::new(false);
    let serve = |engine: &Device, listener: &Listener, kept: &mut Vec<(End, Connection)>| {
        if let Some(request) = listener.accept(Duration::from_millis(1)) {
            kept.push(accept(engine, request));
        }
    };
    thread::scope(|scope| {
        let (serve, is_over, stays) = (&serve, &is_over, &stays);
        scope.spawn(move || {
            let mut kept = Vec::new();
            while !is_over.load(Ordering::Acquire) {
                serve(&device, stays, &mut kept);
            }
        });
        for engine in &engines {
            scope.spawn(move || {
                let mut kept = Vec::new();
                while !is_over.load(Ordering::Acquire) {
                    let listener = engine.listen(PORT).unwrap();
                    (0..3).for_each(|_| serve(engine, &listener, &mut kept));
                }
            });
        }
        let clients = [24, 25].map(|host| {
            scope.spawn(move || {
                let client = common::open([127, 0, 40, host].into()).unwrap();
                let attempts: Vec<_> = (0..CONNECTIONS).map(|_| start(&client, to)).collect();
                let connect = |(end, attempt): (End, Connecting)| Client::of(end, attempt.wait().unwrap());
                let clients: Vec<Client> = attempts.into_iter().map(connect).collect();
                clients.iter().zip(1_000..).for_each(|(c, tag)| c.exchange(tag));
                // And one after the other.
                for tag in 0..CONNECTIONS as u64 {
                    Client::connect(&client, to).exchange(tag);
                }
            })
        });
        let ended = clients.map(|client| client.join());
        is_over.store(true, Ordering::Release);
        assert!(ended.iter().all(Result::is_ok));
    });
}

#[test]
fn pass_to__gives_a_request_to_the_engine_of_choice() {
    let [(one, listener), (other, at_other)] = two([127, 0, 40, 16]);
    let client = common::open([127, 0, 40, 17].into()).unwrap();
    let stranger = common::open(one.address()).unwrap();
    let to = SocketAddr::new(one.address(), PORT);
    let mut kept = Vec::new();
    for _ in 0..4 {
        // The other engine has more connections, so requests go to this one.
        let (end, attempt) = start(&client, to);
        listener.accept(LONG).unwrap().pass_to(&other).unwrap();
        let accepted = accept(&other, at_other.accept(LONG).unwrap());
        let client = Client::of(end, attempt.wait().unwrap());
        client.exchange(4);
        assert_eq!(client.slot(), slot_of(&other));
        kept.push((client, accepted));
    }
    let (_end, attempt) = start(&client, to);
    let passed = listener.accept(LONG).unwrap().pass_to(&stranger);
    assert!(matches!(passed, Err(ConnectError::OtherDevice)));
    assert!(matches!(attempt.wait(), Err(ConnectError::Rejected { .. })));
    drop(at_other);
    let (_end, attempt) = start(&client, to);
    listener.accept(LONG).unwrap().pass_to(&other).unwrap();
    assert!(matches!(attempt.wait(), Err(ConnectError::Rejected { .. })));
}

#[test]
fn drop__of_an_engine_ends_its_connections_and_no_other() {
    // The first engine holds the address.
    let [(one, listener), (other, at_other)] = two([127, 0, 40, 18]);
    let client = common::open([127, 0, 40, 19].into()).unwrap();
    let (first, served) = pair(&client, &one, &listener);
    let (second, _served) = pair(&client, &other, &at_other);
    assert_ne!(first.slot(), second.slot());
    drop((served, listener, one));
    assert!(first.connection.wait_ended(LONG));
    second.exchange(5);
    let (third, _served_too) = pair(&client, &other, &at_other);
    third.exchange(6);
    // A further engine joins.
    let again = other.open_engine().unwrap();
    let at_again = again.listen(PORT).unwrap();
    let (fourth, _served_again) = pair(&client, &again, &at_again);
    fourth.exchange(7);
    assert!(!second.connection.is_ended());
}

#[test]
fn listen_datagram__of_two_engines_shares_the_requests() {
    let device = common::open([127, 0, 40, 20].into()).unwrap();
    let engines = [device.open_engine().unwrap(), device];
    let client = common::open([127, 0, 40, 21].into()).unwrap();
    let to = SocketAddr::new(engines[0].address(), PORT);
    let ends = engines.each_ref().map(|engine| {
        let (pd, cq) = (engine.alloc_pd().unwrap(), engine.create_cq(16).unwrap());
        let qp_type = QpType::Ud;
        let qp = pd.create_qp(&QpOptions {
            qp_type,
            ..QpOptions::new(&cq)
        });
        let qp = qp.unwrap();
        qp.ready_datagram(RDMA_UDP_QKEY).unwrap();
        qp
    });
    let mut listeners = engines.each_ref().map(|engine| engine.listen_datagram(PORT).ok());
    let events = EventQueue::new().unwrap();
    for (listener, token) in listeners.iter().flatten().zip(0..) {
        listener.notify(&events, token);
    }
    let resolve = |listeners: &[Option<DatagramListener>; 2]| {
        let resolving = client.start_resolve(0, to, b"").unwrap();
        let i = events.wait(LONG).unwrap() as usize;
        let mut request = listeners[i].as_ref().unwrap().accept(LONG).unwrap();
        request.accept(&ends[i], b"").unwrap();
        assert_eq!(resolving.wait().unwrap().qpn(), ends[i].qpn());
        i
    };
    let served: BTreeSet<usize> = (0..2).map(|_| resolve(&listeners)).collect();
    assert_eq!(served, [0, 1].into());
    // Both have one that waits; one of them goes, and the other gets both.
    let waiting = [(); 2].map(|()| client.start_resolve(0, to, b"").unwrap());
    let seen: BTreeSet<u64> = [events.wait(LONG).unwrap(), events.wait(LONG).unwrap()].into();
    assert_eq!(seen, [0, 1].into());
    listeners[0] = None;
    let remains = listeners[1].as_ref().unwrap();
    for _ in 0..2 {
        let mut request = remains.accept(LONG).unwrap();
        request.accept(&ends[1], b"").unwrap();
    }
    for resolving in waiting {
        assert_eq!(resolving.wait().unwrap().qpn(), ends[1].qpn());
    }
}

#[test]
fn open_engine__is_shown_as_a_device_of_its_own() {
    let address = IpAddr::from([127, 0, 40, 22]);
    let device = common::open(address).unwrap();
    let engines = [device.open_engine().unwrap(), device];
    let ends = engines.each_ref().map(End::ready);
    let slots: BTreeSet<u8> = ends.iter().map(|end| slot(end.qp.qpn())).collect();
    assert_eq!(slots.len(), 2);
    let counted = metrics::devices().into_iter();
    let counted = counted.filter(|device| device.address == address);
    assert_eq!(counted.map(|device| device.slot).collect::<BTreeSet<_>>(), slots);
    let mut listed = resources::devices();
    listed.retain(|device| device.address == address);
    assert_eq!(
        listed.iter().map(|device| device.slot).collect::<BTreeSet<_>>(),
        slots
    );
    for (device, told) in resources::ask(&listed, resources::Object::Qp, LONG) {
        let Ok([Item::Qp(shown)]) = told.as_ref().map(|told| &told.items[..]) else {
            panic!("{told:?}")
        };
        assert!(ends.iter().any(|end| end.qp.qpn() == shown.qpn) && slot(shown.qpn) == device.slot);
    }
}
