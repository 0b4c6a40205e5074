//! A server and its clients in one process, over the soft NIC on loopback addresses.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_push::client::{Handshake, Next};
use rdmux_push::server::{Config, EndReason, Event, Stopper};
use rdmux_push::{
    Access, Client, Crc64, Domain, Error, ErrorCode, Key, Name, Options, Placement, Region, Server,
};
use rdmux_verbs::{
    AnonymousMemory, Atomic, CompletionQueue, ConnectParams, Connection, Device, Fault, FileMemory, Memory,
    MemoryRegion, Operation, QpOptions, QueuePair, RKey, RecvRequest, Selectivity, SendFlags, SendRequest,
    SgeList, Status, Target,
};
use rdmux_wire::push::{MESSAGE_LEN_MAX, Message};

const LONG: Duration = Duration::from_secs(20);

fn key() -> Key {
    Key::new([7; 32])
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn memory_region(text: &str, bytes: u64) -> Region {
    Region::anonymous(name(text), bytes).unwrap()
}

/// A server in a thread of its own, ended when dropped.
struct Running {
    address: SocketAddr,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
    events: mpsc::Receiver<Event>,
    regions: Vec<Arc<Region>>,
}

impl Running {
    fn start(address: &str, regions: Vec<Region>, keepalive: Duration) -> Running {
        let address = address.parse().unwrap();
        let config = Config {
            listen: vec![address],
            key: key(),
            regions,
            keepalive,
            device: rdmux_verbs::Options::default(),
        };
        let server = Server::bind(config).unwrap();
        let (tx, events) = mpsc::channel();
        Running {
            address,
            stopper: server.stopper(),
            regions: server.regions().to_vec(),
            thread: Some(std::thread::spawn(move || {
                server
                    .run(|event| {
                        let _ = tx.send(event.clone());
                    })
                    .unwrap();
            })),
            events,
        }
    }

    fn client(&self) -> Client {
        let options = Options {
            from: Some(self.address.ip()),
            ..Options::default()
        };
        Client::connect(self.address, &key(), &options).unwrap()
    }

    /// The next end of a connection.
    fn end(&self) -> (EndReason, usize) {
        loop {
            match self.events.recv_timeout(LONG).expect("the end of a connection") {
                Event::Ended { reason, mappings, .. } => return (reason, mappings),
                _ => continue,
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 255 + seed) as u8).collect()
}

fn crc(bytes: &[u8]) -> u64 {
    let mut crc = Crc64::default();
    crc.update(bytes);
    crc.value()
}

const RW: Access = Access::READ.union(Access::WRITE);

#[test]
fn write_flush_read__round_trip() {
    let server = Running::start("127.0.9.1:7174", vec![memory_region("m", 5 << 20)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    assert_eq!(
        (mapping.region_bytes(), mapping.domain()),
        (5 << 20, Domain::None)
    );
    let bytes = pattern(3_000_001, 1);
    client.write(&mapping, 1_234_567, &bytes).unwrap();
    client
        .flush(&mapping, 1_234_567, bytes.len() as u64, Placement::GLOBAL)
        .unwrap();
    let mut back = vec![0; bytes.len()];
    client.read(&mapping, 1_234_567, &mut back).unwrap();
    assert!(back == bytes, "bytes differ");
    let there = client
        .checksum(&name("m"), 1_234_567, bytes.len() as u64)
        .unwrap();
    assert_eq!(there, crc(&bytes));
    client.unmap(mapping).unwrap();
    client.close();
    assert_eq!(server.end(), (EndReason::Goodbye, 0));
}

#[test]
fn connect__over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        println!("skipped: this host has no IPv6");
        return;
    }
    let server = Running::start("[::1]:7981", vec![memory_region("m", 4096)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    client.write(&mapping, 0, b"over IPv6").unwrap();
    let mut back = [0; 9];
    client.read(&mapping, 0, &mut back).unwrap();
    assert_eq!(&back, b"over IPv6");
}

#[test]
fn list_and_stat__tell_what_there_is() {
    let regions = vec![memory_region("a", 1000), memory_region("b", 2000)];
    let server = Running::start("127.0.9.2:7174", regions, LONG);
    let mut client = server.client();
    let (regions, total) = client.list().unwrap();
    let names: Vec<_> = regions.iter().map(|r| (r.name.as_str(), r.bytes)).collect();
    assert_eq!((names, total), (vec![("a", 1000), ("b", 2000)], 2));
    assert_eq!(client.stat(&name("b"), 0).unwrap().bytes, 2000);
    let error = client.stat(&name("c"), 0).unwrap_err();
    assert!(
        error.to_string().contains("no region 'c'; the server has a, b"),
        "{error}"
    );
}

#[test]
fn connect__with_another_key_is_refused() {
    let server = Running::start("127.0.9.3:7174", vec![memory_region("m", 10)], LONG);
    let options = Options {
        from: Some(server.address.ip()),
        ..Options::default()
    };
    let error = Client::connect(server.address, &Key::new([8; 32]), &options).unwrap_err();
    assert!(matches!(error, Error::WrongKey(_)), "{error}");
    server.client().stat(&name("m"), 0).unwrap();
}

#[test]
fn map__errors_leave_the_connection_usable() {
    let constant = memory_region("constant", 100);
    let constant = Region::new(name("constant"), constant.memory().clone(), Domain::None, true);
    let server = Running::start("127.0.9.4:7174", vec![memory_region("m", 100), constant], LONG);
    let mut client = server.client();
    for (region, access, offset, length, code) in [
        ("x", RW, 0, 1, ErrorCode::NoSuchRegion),
        ("constant", RW, 0, 1, ErrorCode::ReadOnly),
        ("m", RW, 50, 51, ErrorCode::OutOfRange),
        ("m", RW, u64::MAX, 1, ErrorCode::OutOfRange),
    ] {
        let error = client.map(&name(region), access, offset, length, 0).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { code: c, .. } if *c == code),
            "{error}"
        );
    }
    let mapping = client.map(&name("constant"), Access::READ, 0, 0, 0).unwrap();
    let error = client.write(&mapping, 0, &[1]).unwrap_err();
    assert!(matches!(error, Error::NoRight { .. }), "{error}");
    let mapping = client.map(&name("m"), RW, 10, 20, 0).unwrap();
    for (offset, length) in [(9, 1), (10, 21), (30, 1), (29, 2)] {
        let error = client.write(&mapping, offset, &vec![1; length]).unwrap_err();
        assert!(
            matches!(error, Error::OutOfRange { .. }),
            "{offset} {length}: {error}"
        );
    }
    client.write(&mapping, 10, &[1; 20]).unwrap();
}

#[test]
fn map__two_of_one_client_are_independent() {
    let regions = vec![memory_region("a", 8192), memory_region("b", 8192)];
    let server = Running::start("127.0.9.5:7174", regions, LONG);
    let mut client = server.client();
    let a = client.map(&name("a"), RW, 0, 4096, 0).unwrap();
    let b = client.map(&name("b"), RW, 4096, 4096, 0).unwrap();
    client.write(&a, 0, &pattern(4096, 1)).unwrap();
    client.write(&b, 4096, &pattern(4096, 2)).unwrap();
    client.unmap(a).unwrap();
    client.write(&b, 4096, &pattern(4096, 3)).unwrap();
    let mut there = vec![0; 8192];
    server.regions[0].memory().read(0, &mut there).unwrap();
    assert!(there[..4096] == pattern(4096, 1) && there[4096..] == [0; 4096]);
    server.regions[1].memory().read(0, &mut there).unwrap();
    assert!(there[..4096] == [0; 4096] && there[4096..] == pattern(4096, 3));
}

#[test]
fn map__up_to_the_limit() {
    let server = Running::start("127.0.9.6:7174", vec![memory_region("m", 10)], LONG);
    let mut client = server.client();
    let mut mappings = Vec::new();
    let error = loop {
        match client.map(&name("m"), Access::READ, 0, 0, 0) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert_eq!(mappings.len(), 64);
    assert!(
        matches!(
            error,
            Error::Refused {
                code: ErrorCode::Busy,
                ..
            }
        ),
        "{error}"
    );
}

/// A client that speaks verbs, so that it can do what [`Client`] does not.
struct Raw {
    _connection: Connection,
    qp: QueuePair,
    cq: CompletionQueue,
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
}

impl Raw {
    const MESSAGE: u64 = 8 * MESSAGE_LEN_MAX as u64;

    fn connect(address: SocketAddr) -> Raw {
        let device = Device::open(address.ip()).unwrap();
        let pd = device.alloc_pd();
        let cq = device.create_cq(64).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let memory = Arc::new(AnonymousMemory::new(10 * MESSAGE_LEN_MAX).unwrap());
        let mr = pd
            .reg_mr_all(memory.clone(), 0, rdmux_verbs::Access::LOCAL_WRITE)
            .unwrap();
        let connection = device
            .connect(&qp, address, &ConnectParams::default(), &[])
            .unwrap();
        let raw = Raw {
            _connection: connection,
            qp,
            cq,
            memory,
            mr,
        };
        for slot in 0..8 {
            let sge = raw.mr.sge(slot * MESSAGE_LEN_MAX as u64, MESSAGE_LEN_MAX as u32);
            let request = RecvRequest {
                wr_id: slot,
                sges: sge.into(),
            };
            raw.qp.post_recv(request).unwrap();
        }
        raw
    }

    fn ready(address: SocketAddr) -> Raw {
        let raw = Raw::connect(address);
        let mut handshake = Handshake::new(key(), [1; 32]);
        let mut message = handshake.hello();
        while let Next::Send(next) = handshake.handle(raw.ask(&message).unwrap()).unwrap() {
            message = next;
        }
        raw
    }

    fn send_bytes(&self, bytes: &[u8]) {
        self.memory.write(Raw::MESSAGE, bytes).unwrap();
        let sges = self.mr.sge(Raw::MESSAGE, bytes.len() as u32).into();
        self.post(Operation::Send { imm: None }, sges);
    }

    fn post(&self, operation: Operation, sges: SgeList) {
        let request = SendRequest {
            wr_id: 100,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qp.post_send(request).unwrap();
    }

    /// Sends a message and waits for one; `None` when the connection ends instead.
    fn ask(&self, message: &Message) -> Option<Message> {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        self.send_bytes(&bytes);
        self.receive()
    }

    fn receive(&self) -> Option<Message> {
        loop {
            let wc = self.cq.wait(LONG).unwrap().expect("a completion");
            if wc.status != Status::Success {
                return None;
            }
            if wc.wr_id < 8 {
                let mut bytes = vec![0; wc.byte_len as usize];
                self.memory
                    .read(wc.wr_id * MESSAGE_LEN_MAX as u64, &mut bytes)
                    .unwrap();
                return Some(Message::parse(&bytes).unwrap().1);
            }
        }
    }

    /// Waits until a data request is done.
    fn status(&self) -> Status {
        loop {
            let wc = self.cq.wait(LONG).unwrap().expect("a completion");
            if wc.wr_id == 100 {
                return wc.status;
            }
        }
    }

    fn map(&self, region: &str, access: Access, offset: u64, length: u64) -> (u64, u64, RKey) {
        let message = Message::Map {
            region: name(region),
            access,
            offset,
            length,
            transfer: 0,
        };
        match self.ask(&message) {
            Some(Message::Mapped { mapping, extents, .. }) => (mapping, extents[0].va, extents[0].rkey),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn access__outside_of_a_mapping_ends_that_connection_only() {
    let server = Running::start("127.0.9.7:7174", vec![memory_region("m", 65536)], LONG);
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    let cases = [
        ("one byte past its end", 4096, 1, true),
        ("over its end", 4000, 97, true),
        ("before its start", -1, 2, true),
        ("a READ past its end", 4096, 1, false),
    ];
    for (what, at, length, write) in cases {
        let raw = Raw::ready(server.address);
        let (_, va, rkey) = raw.map("m", RW, 4096, 4096);
        let va = va.wrapping_add_signed(at);
        let operation = if write {
            Operation::Write { va, rkey, imm: None }
        } else {
            Operation::Read { va, rkey }
        };
        raw.post(operation, raw.mr.sge(0, length).into());
        assert_eq!(raw.status(), Status::RemoteAccess, "{what}");
        let (reason, mappings) = server.end();
        assert!(
            matches!(&reason, EndReason::Failed(why) if why.contains("outside")),
            "{what}: {reason}"
        );
        assert_eq!(mappings, 1);
        other.write(&others, 0, &[1; 100]).unwrap();
    }
    let mut there = vec![0; 65536 - 100];
    server.regions[0].memory().read(100, &mut there).unwrap();
    assert!(there.iter().all(|b| *b == 0), "nothing was written outside");
}

#[test]
fn access__with_the_key_of_another_client_or_of_an_ended_mapping() {
    let server = Running::start("127.0.9.8:7174", vec![memory_region("m", 4096)], LONG);
    let owner = Raw::ready(server.address);
    let (mapping, va, rkey) = owner.map("m", RW, 0, 0);
    let thief = Raw::ready(server.address);
    thief.post(
        Operation::Write { va, rkey, imm: None },
        thief.mr.sge(0, 8).into(),
    );
    assert_eq!(thief.status(), Status::RemoteAccess);
    owner.post(
        Operation::Write { va, rkey, imm: None },
        owner.mr.sge(0, 8).into(),
    );
    assert_eq!(owner.status(), Status::Success);
    assert_eq!(owner.ask(&Message::Unmap { mapping }), Some(Message::Unmapped));
    owner.post(
        Operation::Write { va, rkey, imm: None },
        owner.mr.sge(0, 8).into(),
    );
    assert_eq!(owner.status(), Status::RemoteAccess);
}

#[test]
fn access__write_through_a_mapping_for_reading() {
    let server = Running::start("127.0.9.9:7174", vec![memory_region("m", 4096)], LONG);
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map("m", Access::READ, 0, 0);
    raw.post(Operation::Write { va, rkey, imm: None }, raw.mr.sge(0, 8).into());
    assert_eq!(raw.status(), Status::RemoteAccess);
}

fn flush(va: u64, rkey: RKey, placement: Placement) -> Operation {
    Operation::Flush {
        va,
        rkey,
        length: 8,
        placement,
        selectivity: Selectivity::Range,
    }
}

#[test]
fn flush__persistent_of_memory_is_refused() {
    let server = Running::start("127.0.9.10:7174", vec![memory_region("m", 4096)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    assert_eq!(
        (mapping.placement(), mapping.strongest()),
        (Placement::GLOBAL, Placement::GLOBAL)
    );
    let error = client.flush(&mapping, 0, 8, Placement::PERSISTENT).unwrap_err();
    assert!(
        error.to_string().contains("keeps nothing over a loss of power"),
        "{error}"
    );
    client.flush(&mapping, 0, 8, Placement::GLOBAL).unwrap();
    // A client that does not care loses its connection, not its illusions.
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map("m", RW, 0, 0);
    raw.post(flush(va, rkey, Placement::PERSISTENT), SgeList::EMPTY);
    assert_eq!(raw.status(), Status::RemoteAccess);
}

#[test]
fn flush__persistent_of_a_file_in_memory_is_refused() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: /dev/shm cannot be written");
        return;
    };
    let region = Region::file(name("f"), &folder.path().join("f"), Some(4096), false).unwrap();
    let server = Running::start("127.0.9.11:7174", vec![region], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("f"), RW, 0, 0, 0).unwrap();
    assert_eq!(mapping.domain(), Domain::None);
    let error = client.flush(&mapping, 0, 8, Placement::PERSISTENT).unwrap_err();
    assert!(matches!(error, Error::NotPersistent { .. }), "{error}");
}

/// A file whose flushes a test holds, lets go, or fails.
#[derive(Debug)]
struct Disk {
    memory: AnonymousMemory,
    gate: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    shut: bool,
    fails: bool,
    waiting: usize,
}

impl Disk {
    fn new(shut: bool) -> Arc<Disk> {
        Arc::new(Disk {
            memory: AnonymousMemory::new(1 << 20).unwrap(),
            gate: Mutex::new(Gate {
                shut,
                ..Gate::default()
            }),
            changed: Condvar::new(),
        })
    }

    fn set(&self, change: impl FnOnce(&mut Gate)) {
        change(&mut self.gate.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait_until_held(&self) {
        let gate = self.gate.lock().unwrap();
        let (_gate, late) = self
            .changed
            .wait_timeout_while(gate, LONG, |gate| gate.waiting == 0)
            .unwrap();
        assert!(!late.timed_out(), "no flush came");
    }

    fn region(self: &Arc<Disk>) -> Region {
        Region::new(name("disk"), self.clone(), Domain::File, false)
    }
}

impl Memory for Disk {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.memory.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.memory.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.memory.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, _: u64, _: u64, placement: Placement) -> Result<(), Fault> {
        if !placement.contains(Placement::PERSISTENT) {
            return Ok(());
        }
        let mut gate = self.gate.lock().unwrap();
        gate.waiting += 1;
        self.changed.notify_all();
        let mut gate = self.changed.wait_while(gate, |gate| gate.shut).unwrap();
        gate.waiting -= 1;
        if gate.fails { Err(Fault::Io(5)) } else { Ok(()) }
    }
}

#[test]
fn flush__is_held_as_long_as_the_disk_takes_and_others_go_on() {
    let disk = Disk::new(true);
    let server = Running::start(
        "127.0.9.12:7174",
        vec![disk.region(), memory_region("m", 4096)],
        LONG,
    );
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.write(&mapping, 0, &[1; 8192]).unwrap();
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    let held = Instant::now();
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| client.flush(&mapping, 0, 8192, Placement::PERSISTENT));
        disk.wait_until_held();
        // Longer than all retries of the transport together: the client is put off, not given up.
        while held.elapsed() < Duration::from_secs(4) {
            other.write(&others, 0, &[1; 100]).unwrap();
            assert_eq!(
                other.stat(&name("disk"), 5).unwrap().durable,
                0,
                "not durable yet"
            );
            assert!(
                !flushing.is_finished(),
                "the flush was acknowledged before it was done"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        disk.set(|gate| gate.shut = false);
        flushing.join().unwrap().unwrap();
    });
    assert_eq!(other.stat(&name("disk"), 5).unwrap().durable, 8192);
}

#[test]
fn flush__that_fails_ends_the_connection_and_writing_for_good() {
    let disk = Disk::new(false);
    let server = Running::start(
        "127.0.9.13:7174",
        vec![disk.region(), memory_region("m", 4096)],
        LONG,
    );
    let mut other = server.client();
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.write(&mapping, 0, &[1; 8192]).unwrap();
    disk.set(|gate| gate.fails = true);
    let error = client
        .flush(&mapping, 0, 8192, Placement::PERSISTENT)
        .unwrap_err();
    assert!(error.to_string().contains("file failed"), "{error}");
    let (reason, _) = server.end();
    assert!(
        matches!(&reason, EndReason::Failed(why) if why.contains("errno 5")),
        "{reason}"
    );
    assert_eq!(other.stat(&name("disk"), 5).unwrap().durable, 0);
    // A later success would hide what was lost.
    disk.set(|gate| gate.fails = false);
    let error = other.map(&name("disk"), RW, 0, 0, 0).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                code: ErrorCode::Io,
                ..
            }
        ),
        "{error}"
    );
    other.map(&name("disk"), Access::READ, 0, 0, 0).unwrap();
    other.map(&name("m"), RW, 0, 0, 0).unwrap();
}

#[test]
fn write__to_a_file_that_another_process_truncates() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let region = Region::file(name("f"), &path, Some(1 << 20), false).unwrap();
    let server = Running::start("127.0.9.14:7174", vec![region, memory_region("m", 4096)], LONG);
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    for what in ["write", "read", "flush"] {
        let mut client = server.client();
        let mapping = client.map(&name("f"), RW, 0, 0, 0).unwrap();
        client.write(&mapping, 0, &[1; 65536]).unwrap();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        let result = match what {
            "write" => client.write(&mapping, 65536, &[1; 65536]),
            "read" => client.read(&mapping, 65536, &mut [1; 65536]),
            _ => client.flush(&mapping, 0, 65536, mapping.strongest()),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{what}: {error}");
        let (reason, _) = server.end();
        assert!(
            matches!(&reason, EndReason::Failed(why) if why.contains("truncated")),
            "{what}: {reason}"
        );
        other.write(&others, 0, &[1; 100]).unwrap();
        // Put right again, for the next turn.
        drop(FileMemory::open(&path, Some(1 << 20), false).unwrap());
    }
}

#[test]
fn map__same_upload_takes_over_and_another_is_kept_out() {
    let server = Running::start("127.0.9.15:7174", vec![memory_region("m", 65536)], LONG);
    let mut first = server.client();
    let mapping = first.map(&name("m"), Access::WRITE, 0, 4096, 5).unwrap();
    first.write(&mapping, 0, &[1; 1000]).unwrap();
    first.flush(&mapping, 0, 1000, Placement::GLOBAL).unwrap();
    let mut second = server.client();
    let error = second.map(&name("m"), Access::WRITE, 4000, 4096, 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                code: ErrorCode::Busy,
                ..
            }
        ),
        "{error}"
    );
    second.map(&name("m"), Access::WRITE, 4096, 4096, 6).unwrap();
    let taken = second.map(&name("m"), Access::WRITE, 0, 4096, 5).unwrap();
    assert_eq!(server.end().0, EndReason::TakenOver);
    assert_eq!(second.stat(&name("m"), 5).unwrap().durable, 1000);
    let error = first.write(&mapping, 0, &[2; 10]).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    second.write(&taken, 1000, &[3; 10]).unwrap();
    let mut there = [0; 10];
    server.regions[0].memory().read(0, &mut there).unwrap();
    assert_eq!(there, [1; 10], "nothing of the first came through");
}

#[test]
fn handshake__not_finished_in_time_ends() {
    let server = Running::start("127.0.9.16:7174", vec![memory_region("m", 10)], LONG);
    let begun = Instant::now();
    let raw = Raw::connect(server.address);
    assert!(matches!(
        raw.ask(&Handshake::new(key(), [1; 32]).hello()),
        Some(Message::Challenge { .. })
    ));
    assert_eq!(server.end().0, EndReason::HandshakeTimeout);
    let took = begun.elapsed();
    assert!((4.5..9.0).contains(&took.as_secs_f64()), "{took:?}");
    assert_eq!(raw.receive(), None);
}

#[test]
fn handshake__more_half_open_clients_than_allowed() {
    let server = Running::start("127.0.9.17:7174", vec![memory_region("m", 10)], LONG);
    let device = Device::open(server.address.ip()).unwrap();
    let pd = device.alloc_pd();
    let cq = device.create_cq(4096).unwrap();
    let mut open = Vec::new();
    for at in 0..65 {
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let connection = device.connect(&qp, server.address, &ConnectParams::default(), &[]);
        assert_eq!(connection.is_ok(), at < 64, "{at}");
        open.push((connection, qp));
    }
    let options = Options {
        from: Some(server.address.ip()),
        ..Options::default()
    };
    let error = Client::connect(server.address, &key(), &options).unwrap_err();
    assert!(error.to_string().contains("refused the connection"), "{error}");
    drop(open);
    server.end();
    server.client();
}

#[test]
fn handshake__garbage_or_a_request_before_welcome() {
    let server = Running::start("127.0.9.18:7174", vec![memory_region("m", 10)], LONG);
    let raw = Raw::connect(server.address);
    raw.send_bytes(&[0xff; 100]);
    assert_eq!(raw.receive(), None);
    assert!(matches!(server.end().0, EndReason::Protocol(_)));
    let raw = Raw::connect(server.address);
    let answer = raw.ask(&Message::List);
    assert!(
        matches!(
            answer,
            Some(Message::Error {
                code: ErrorCode::Protocol,
                ..
            })
        ),
        "{answer:?}"
    );
    assert!(matches!(server.end().0, EndReason::Protocol(_)));
}

#[test]
fn request__more_at_a_time_than_the_server_has_slots() {
    let server = Running::start("127.0.9.19:7174", vec![memory_region("m", 1 << 20)], LONG);
    let raw = Raw::ready(server.address);
    let mut bytes = Vec::new();
    let checksum = Message::Checksum {
        region: name("m"),
        offset: 0,
        length: 1 << 20,
    };
    checksum.emit(1, &mut bytes);
    // The server takes four and puts off the others until it has answered.
    for _ in 0..8 {
        raw.send_bytes(&bytes);
    }
    // Two of the client's eight receives served the handshake.
    for _ in 0..6 {
        let answer = raw.receive();
        assert!(matches!(answer, Some(Message::Checksummed { .. })), "{answer:?}");
    }
}

#[test]
fn stop__tells_the_clients() {
    let server = Running::start("127.0.9.20:7174", vec![memory_region("m", 10)], LONG);
    let mut client = server.client();
    drop(server);
    let error = client.stat(&name("m"), 0).unwrap_err();
    assert!(matches!(error, Error::Lost { .. } | Error::Post(_)), "{error}");
}

#[test]
fn bind__port_in_use_or_names_that_collide() {
    let server = Running::start("127.0.9.21:7174", vec![memory_region("m", 10)], LONG);
    let config = |regions| Config {
        listen: vec![server.address],
        key: key(),
        regions,
        keepalive: LONG,
        device: rdmux_verbs::Options::default(),
    };
    let error = Server::bind(config(vec![memory_region("m", 10)])).unwrap_err();
    assert!(error.to_string().contains("127.0.9.21:7174"), "{error}");
    let error = Server::bind(config(vec![memory_region("m", 10), memory_region("m", 10)])).unwrap_err();
    assert!(error.to_string().contains("named m"), "{error}");
}
