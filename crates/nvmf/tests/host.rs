//! The host against our server on loopback, by each transport, and against targets that misbehave.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod serve;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_nvmf::auth::{Offer, Secret, Secrets};
use rdmux_nvmf::backend::{Backend, FileBackend, MemoryBackend};
use rdmux_nvmf::host::command::{flush, read, write};
use rdmux_nvmf::host::{Controller, Event, HostError, Options, Session, Transport};
use rdmux_nvmf::server::Handle;
use rdmux_nvmf::target::{Authentication, Hosts, Listener, Namespace, Subsystem, Terms};
use rdmux_verbs::{ConnectParams, ConnectionRequest, Device, QpOptions};
use rdmux_wire::nvme::{
    Cns, Connect, ConnectData, Cqe, DISCOVERY_NQN, DhGroup, FabricsType, HashId, Nqn, NsId, Opcode, Property,
    Register, Status, SubsystemKind, TransportKind,
};
use rdmux_wire::nvme_rdma::{Accept, Reject};
use rdmux_wire::nvme_tcp::{COMMON_LEN, Common, DataLayout, Digests, Flags, Header, Initialize, Transfer};

const SUBSYSTEM: &str = "nqn.2014-08.org.example:host";
const BLOCK: u32 = 4096;
/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(60);

/// Has each of these tests run by each transport.
macro_rules! by_each_transport {
    ($($name:ident)*) => {
        mod by_tcp {
            $(#[test] fn $name() { super::$name(super::Transport::Tcp); })*
        }

        mod by_rdma {
            $(#[test] fn $name() { super::$name(super::Transport::Rdma); })*
        }
    };
}

by_each_transport! {
    discovery__lists_the_subsystem_and_the_service
    namespace__is_described
    connect__says_what_is_wrong
    io__of_every_size_with_every_digest_and_flow_control
    io__of_several_queues_keeps_its_depth
    authentication__by_every_hash_and_group_in_one_and_both_directions
    authentication__fails_on_either_side
    session__survives_a_server_that_is_replaced
    session__of_several_queues_has_one_new_controller_for_all
    session__gives_up_after_its_time
    events__come_again_after_each_change
}

struct Running {
    subsystem: Arc<Subsystem>,
    transport: Transport,
    address: SocketAddr,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Returns an address to listen on that no other test has.
fn any_address(transport: Transport) -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    match transport {
        Transport::Tcp => "127.0.0.1:0".parse().unwrap(),
        Transport::Rdma => ([127, 0, 33, NEXT.fetch_add(1, Ordering::SeqCst)], 4420).into(),
    }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

impl Running {
    fn start(
        (transport, listen): (Transport, SocketAddr),
        hosts: Hosts,
        backend: Arc<dyn Backend>,
        uuid: u8,
    ) -> Running {
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", hosts);
        let listener = Listener {
            transport: match transport {
                Transport::Tcp => TransportKind::Tcp,
                Transport::Rdma => TransportKind::Rdma,
            },
            address: listen,
        };
        let (subsystem, address, handle, thread) = serve::serve(subsystem, (backend, uuid), listener, 1);
        Running {
            subsystem,
            transport,
            address,
            handle,
            thread: Some(thread),
        }
    }

    fn memory(transport: Transport, hosts: Hosts) -> Running {
        let backend = Arc::new(MemoryBackend::new(16 << 20).unwrap());
        Running::start((transport, any_address(transport)), hosts, backend, 1)
    }

    fn options(&self) -> Options {
        self.options_of(SUBSYSTEM)
    }

    fn options_of(&self, subsystem: &str) -> Options {
        Options {
            transport: self.transport,
            ..Options::new(vec![self.address], nqn(subsystem))
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

/// Returns bytes that differ from block to block.
fn pattern(first: u64, blocks: u32) -> Vec<u8> {
    let block = |number: u64| (0..BLOCK as u64 / 8).flat_map(move |word| (number << 20 | word).to_le_bytes());
    (first..first + u64::from(blocks)).flat_map(block).collect()
}

fn discovery__lists_the_subsystem_and_the_service(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let options = server.options_of(DISCOVERY_NQN);
    let controller = Controller::connect(&Arc::new(options), 0).unwrap();
    let log = controller.discovery_log().unwrap();
    let entries: Vec<_> = log.entries.into_iter().map(Result::unwrap).collect();
    let kinds: Vec<_> = entries.iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [SubsystemKind::Discovery, SubsystemKind::Nvm]);
    let kind = match transport {
        Transport::Tcp => TransportKind::Tcp,
        Transport::Rdma => TransportKind::Rdma,
    };
    let place = entries.iter().map(|entry| (entry.transport, entry.address));
    assert_eq!(place.collect::<Vec<_>>(), [(kind, server.address); 2]);
    assert_eq!(entries[1].subsystem, nqn(SUBSYSTEM));
}

fn namespace__is_described(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let controller = Controller::connect(&Arc::new(server.options()), 0).unwrap();
    assert_eq!(controller.info().identify.subsystem, nqn(SUBSYSTEM));
    assert_eq!(controller.namespaces().unwrap(), [NsId(1)]);
    let namespace = controller.namespace(NsId(1)).unwrap();
    assert_eq!((namespace.bytes(), namespace.block_bytes()), (16 << 20, 4096));
    assert_eq!(namespace.ids.uuid, [1; 16]);
    let error = controller.namespace(NsId(7)).unwrap_err().to_string();
    assert!(error.contains("no namespace 7"), "{error}");
    // A refused command leaves the controller as it was.
    assert!(controller.identify(Cns(0xff), NsId::NONE).is_err());
    assert_eq!(
        controller.identify(Cns::CONTROLLER, NsId::NONE).unwrap().len(),
        4096
    );
    controller.close();
}

fn connect__says_what_is_wrong(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let fails = |options: Options, part: &str| {
        let error = Controller::connect(&Arc::new(options), 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    };
    let mut options = server.options();
    options.subsystem = nqn("nqn.2014-08.org.example:other");
    fails(options, "no subsystem of this name");
    let mut options = server.options();
    options.requires_authentication = true;
    fails(options, "does not ask for the secret");
    let mut options = server.options();
    let nobody = match transport {
        Transport::Tcp => TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap(),
        Transport::Rdma => SocketAddr::new(server.address.ip(), 4421),
    };
    options.addresses = vec![nobody];
    fails(options.clone(), "does a target listen there?");
    // The next address is tried.
    options.addresses.push(server.address);
    assert_eq!(
        Controller::connect(&Arc::new(options), 0).unwrap().address(),
        server.address
    );
}

fn io__of_every_size_with_every_digest_and_flow_control(transport: Transport) {
    let server = Running::memory(transport, any_host());
    // Digests are for TCP.
    for bits in 0..if transport == Transport::Tcp { 4 } else { 1 } {
        for flow_control in [false, true] {
            let mut options = server.options();
            options.digests = Digests::from_bits(bits).unwrap();
            options.flow_control = flow_control;
            let session = Session::connect(options, 1).unwrap();
            let mut queue = session.queue(1, 8).unwrap();
            // In the capsule, at its limit, above it by R2T, and the largest.
            for (at, blocks) in [(0, 1), (1, 4), (5, 5), (10, 256)] {
                let bytes = pattern(at + u64::from(bits), blocks);
                let len = blocks * BLOCK;
                queue
                    .run("Write", write(NsId(1), at, blocks, len, bytes.clone()))
                    .unwrap();
                let done = queue.run("Read", read(NsId(1), at, blocks, len, vec![0; len as usize]));
                assert_eq!(done.unwrap().bytes(), bytes, "{bits} {blocks}");
            }
            queue.run("Flush", flush(NsId(1))).unwrap();
            let beyond = queue
                .run("Read", read(NsId(1), 4096, 1, BLOCK, vec![0; 4096]))
                .unwrap_err();
            assert!(beyond.to_string().contains("LBA out of range"), "{beyond}");
        }
    }
}

fn io__of_several_queues_keeps_its_depth(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let session = Session::connect(server.options(), 4).unwrap();
    std::thread::scope(|scope| {
        for qid in 1..=4u16 {
            let session = &session;
            scope.spawn(move || {
                let mut queue = session.queue(qid, 32).unwrap();
                let base = u64::from(qid - 1) * 1024;
                for at in 0..32 {
                    let bytes = pattern(base + at, 1);
                    queue.submit(write(NsId(1), base + at, 1, BLOCK, bytes));
                }
                assert_eq!((queue.room(), queue.in_flight()), (0, 32));
                let (mut written, mut checked) = (0, 0);
                while checked < 2_000 {
                    queue.wait().unwrap();
                    while let Some(done) = queue.poll() {
                        assert!(done.status.is_success(), "{:?}", done.status);
                        let at = (written + checked) % 32;
                        if written < 32 {
                            written += 1;
                        } else {
                            let number = done.command.token;
                            assert_eq!(done.bytes(), pattern(base + number, 1), "{number}");
                            checked += 1;
                        }
                        if written == 32 {
                            let mut next = read(NsId(1), base + at, 1, BLOCK, vec![0; 4096]);
                            next.token = at;
                            queue.submit(next);
                        }
                    }
                }
            });
        }
    });
}

fn secrets(controller: Option<u8>) -> Secrets {
    Secrets {
        host: Secret::new([1; 32]),
        controller: controller.map(|byte| Secret::new([byte; 32])),
    }
}

fn with_secrets(controller: Option<u8>) -> Hosts {
    Hosts::any(Terms {
        authentication: Some(Authentication {
            secrets: secrets(controller),
            random: || rdmux_key::random_nonce().ok(),
        }),
        ..Terms::default()
    })
}

fn any_host() -> Hosts {
    Hosts::any(Terms::default())
}

fn authentication__by_every_hash_and_group_in_one_and_both_directions(transport: Transport) {
    let server = Running::memory(transport, with_secrets(Some(2)));
    for hash in HashId::ALL {
        for group in DhGroup::ALL {
            // The largest groups take long: once is enough.
            if group > DhGroup::Ffdhe3072 && hash != HashId::Sha256 {
                continue;
            }
            for controller in [None, Some(2)] {
                let mut options = server.options();
                options.secrets = Some(secrets(controller));
                options.requires_authentication = true;
                options.offer = Offer {
                    hashes: vec![hash],
                    groups: vec![group],
                };
                let session = Session::connect(options, 1).unwrap();
                let mut queue = session.queue(1, 1).unwrap();
                let done = queue.run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]));
                assert!(done.is_ok(), "{hash:?} {group:?}");
            }
        }
    }
}

fn authentication__fails_on_either_side(transport: Transport) {
    let server = Running::memory(transport, with_secrets(Some(2)));
    let mut options = server.options();
    let fails = |options: &Options, part: &str| {
        let error = Controller::connect(&Arc::new(options.clone()), 0).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        assert!(!error.is_of_path());
    };
    fails(&options, "give the file that has it");
    options.secrets = Some(Secrets {
        host: Secret::new([9; 32]),
        controller: None,
    });
    fails(&options, "wrong secret");
    options.secrets = Some(secrets(Some(3)));
    fails(&options, "did not prove that it has its secret");
    options.secrets = Some(secrets(Some(2)));
    Controller::connect(&Arc::new(options.clone()), 0).unwrap();
    // A target without a secret of its own cannot prove that it has one.
    let server = Running::memory(transport, with_secrets(None));
    options.addresses = vec![server.address];
    fails(&options, "wrong secret");
}

/// Starts a server on a file, always with the same port, in place of one that has ended.
fn restart(address: (Transport, SocketAddr), file: &std::path::Path, uuid: u8) -> Running {
    // The last one keeps the file locked until its I/Os are done.
    let began = Instant::now();
    let backend = loop {
        match FileBackend::open(file, false, 4096) {
            Ok(backend) => break Arc::new(backend),
            Err(error) => assert!(began.elapsed() < LONG, "{error}"),
        }
        // A lock of a file tells nobody that it is free, unless who asks blocks.
        std::thread::sleep(Duration::from_millis(1));
    };
    Running::start(address, any_host(), backend, uuid)
}

fn session__survives_a_server_that_is_replaced(transport: Transport) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let mut server = Some(restart((transport, any_address(transport)), file.path(), 1));
    let address = (transport, server.as_ref().unwrap().address);
    let session = Session::connect(server.as_ref().unwrap().options(), 1).unwrap();
    let namespace = session.open_namespace(NsId(1)).unwrap();
    let mut queue = session.queue(1, 8).unwrap();
    let (mut begun, mut done) = (0, 0);
    while done < 512 {
        while queue.room() > 0 && begun < 512 {
            queue.submit(write(NsId(1), begun, 1, BLOCK, pattern(begun, 1)));
            begun += 1;
        }
        if matches!(done, 100..108 | 300..308) && queue.in_flight() == 8 {
            server.take();
            server = Some(restart(address, file.path(), 1));
        }
        queue.wait().unwrap();
        while let Some(completion) = queue.poll() {
            assert!(completion.status.is_success(), "{:?}", completion.status);
            done += 1;
        }
    }
    assert!(session.generation() >= 2, "no controller was lost");
    let mut at = 0;
    while at < 512 {
        let bytes = 256 * BLOCK;
        let all = queue.run("Read", read(NsId(1), at, 256, bytes, vec![0; bytes as usize]));
        assert!(all.unwrap().bytes() == pattern(at, 256), "{at}");
        at += 256;
    }
    // A namespace with other blocks is not the one that was written.
    server.take();
    let _other = restart(address, file.path(), 2);
    let error = queue
        .run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]))
        .unwrap_err();
    assert!(error.to_string().contains("its blocks are gone"), "{error}");
    assert_eq!(namespace.blocks, 4096);
}

fn session__of_several_queues_has_one_new_controller_for_all(transport: Transport) {
    const QUEUES: u16 = 3;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let mut server = Some(restart((transport, any_address(transport)), file.path(), 1));
    let address = (transport, server.as_ref().unwrap().address);
    let session = Session::connect(server.as_ref().unwrap().options(), QUEUES).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    let (sender, ready) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let mut resumes = Vec::new();
        for qid in 1..=QUEUES {
            let (resume, wait) = std::sync::mpsc::channel::<()>();
            resumes.push(resume);
            let (session, sender) = (&session, sender.clone());
            scope.spawn(move || {
                let mut queue = session.queue(qid, 4).unwrap();
                let first = u64::from(qid) * 512;
                for at in first..first + 256 {
                    if at == first + 128 {
                        sender.send(()).unwrap();
                        wait.recv().unwrap();
                    }
                    let bytes = write(NsId(1), at, 1, BLOCK, pattern(at, 1));
                    queue.run("Write", bytes).unwrap();
                }
                let bytes = 256 * BLOCK;
                let all = read(NsId(1), first, 256, bytes, vec![0; bytes as usize]);
                assert!(queue.run("Read", all).unwrap().bytes() == pattern(first, 256));
            });
        }
        // All are in the middle: the server is another one then.
        (0..QUEUES).for_each(|_| ready.recv_timeout(LONG).unwrap());
        server.take();
        server = Some(restart(address, file.path(), 1));
        resumes.iter().for_each(|resume| resume.send(()).unwrap());
    });
    assert_eq!(session.generation(), 2);
}

fn session__gives_up_after_its_time(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let mut options = server.options();
    options.loss_timeout = Duration::from_millis(300);
    let session = Session::connect(options, 1).unwrap();
    let mut queue = session.queue(1, 1).unwrap();
    drop(server);
    let error = queue
        .run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]))
        .unwrap_err();
    assert!(matches!(error, HostError::GaveUp { .. }), "{error}");
    // By RDMA a try takes longer.
    let is_said = error.to_string().contains("cannot connect to");
    assert!(is_said || transport == Transport::Rdma, "{error}");
}

/// A target whose bytes pass through this, until it is told to hold them back.
fn relay(to: SocketAddr, stalls: Arc<std::sync::atomic::AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let pump = move |mut from: TcpStream, mut to: TcpStream, stalls: Arc<std::sync::atomic::AtomicBool>| {
        let mut bytes = [0; 4096];
        while let Ok(len) = from.read(&mut bytes) {
            if stalls.load(Ordering::SeqCst) {
                // As a host that has gone: the connection stays, and nothing comes.
                std::thread::park();
            }
            if len == 0 || to.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    };
    std::thread::spawn(move || {
        while let Ok((host, _)) = listener.accept() {
            let target = TcpStream::connect(to).unwrap();
            let (a, b) = (host.try_clone().unwrap(), target.try_clone().unwrap());
            let (one, two) = (stalls.clone(), stalls.clone());
            std::thread::spawn(move || pump(a, target, one));
            std::thread::spawn(move || pump(b, host, two));
        }
    });
    address
}

#[test]
fn keep_alive__finds_a_target_that_stalls() {
    let server = Running::memory(Transport::Tcp, any_host());
    let stalls = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut options = server.options();
    options.addresses = vec![relay(server.address, stalls.clone())];
    options.keep_alive = Duration::from_millis(200);
    options.connect_timeout = Duration::from_millis(300);
    options.loss_timeout = Duration::from_millis(500);
    let session = Session::connect(options, 1).unwrap();
    let mut queue = session.queue(1, 4).unwrap();
    queue
        .run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]))
        .unwrap();
    stalls.store(true, Ordering::SeqCst);
    let began = Instant::now();
    let error = queue
        .run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]))
        .unwrap_err();
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!(began.elapsed() < LONG);
}

#[test]
fn io_timeout__is_a_loss_of_the_controller() {
    let server = Running::memory(Transport::Tcp, any_host());
    let stalls = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut options = server.options();
    // Without a keep-alive nothing but the I/O's own time ends it.
    options.addresses = vec![relay(server.address, stalls.clone()), server.address];
    options.keep_alive = Duration::ZERO;
    options.io_timeout = Duration::from_millis(200);
    options.connect_timeout = Duration::from_millis(200);
    options.loss_timeout = Duration::from_millis(600);
    let session = Session::connect(options, 1).unwrap();
    let mut queue = session.queue(1, 4).unwrap();
    stalls.store(true, Ordering::SeqCst);
    let error = queue
        .run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]))
        .unwrap_err();
    assert!(matches!(error, HostError::GaveUp { .. }), "{error}");
}

fn events__come_again_after_each_change(transport: Transport) {
    let server = Running::memory(transport, any_host());
    let mut options = server.options();
    options.keep_alive = Duration::from_millis(200);
    let controller = Controller::connect(&Arc::new(options), 1).unwrap();
    for nsid in [2, 3] {
        let namespace = Namespace {
            nsid: NsId(nsid),
            block_shift: 12,
            uuid: [nsid as u8; 16],
            is_protected: false,
            backend: Arc::new(MemoryBackend::new(1 << 20).unwrap()),
        };
        server.subsystem.add_namespace(namespace).unwrap();
        let began = Instant::now();
        // They come with the keep-alives.
        while controller.take_events() != [Event::NamespacesChanged] {
            assert!(began.elapsed() < LONG && controller.lost().is_none(), "{nsid}");
            // The library is asked for events: it has no wait for one.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(controller.namespaces().unwrap(), [1, 2, 3].map(NsId));
}

/// A target of one namespace whose answers to reads are the test's, without digests.
fn scripted(answer: impl Fn(u32) -> Status + Clone + Send + 'static) -> SocketAddr {
    scripted_with(answer, |_| true)
}

/// Such a target that has the controller of some connects of I/O queues, by their number.
fn scripted_with(
    answer: impl Fn(u32) -> Status + Clone + Send + 'static,
    connects: impl Fn(u32) -> bool + Clone + Send + 'static,
) -> SocketAddr {
    let number = Arc::new(AtomicU32::new(0));
    let connects = move || connects(number.fetch_add(1, Ordering::SeqCst));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((socket, _)) = listener.accept() {
            let (answer, connects) = (answer.clone(), connects.clone());
            std::thread::spawn(move || serve(socket, answer, connects));
        }
    });
    address
}

fn serve(mut socket: TcpStream, answer: impl Fn(u32) -> Status, connects: impl Fn() -> bool) -> Option<()> {
    let mut reads = 0;
    loop {
        let mut bytes = vec![0; COMMON_LEN];
        socket.read_exact(&mut bytes).ok()?;
        let common = Common::parse(&bytes, Digests::empty()).ok()?;
        bytes.resize(common.pdu_len, 0);
        socket.read_exact(&mut bytes[COMMON_LEN..]).ok()?;
        let mut say = |header: Header, flags, data: &[u8]| {
            let layout = DataLayout {
                len: data.len(),
                ..DataLayout::default()
            };
            let mut bytes = vec![0; 256];
            let len = header.emit(flags, layout, &mut bytes).data_offset;
            socket.write_all(&[&bytes[..len], data].concat()).ok()
        };
        let sqe = match Header::parse(common.kind, &bytes).ok()? {
            Header::IcReq(request) => {
                let limit = 4096;
                say(
                    Header::IcResp(Initialize { limit, ..request }),
                    Flags::empty(),
                    &[],
                )?;
                continue;
            }
            Header::CapsuleCmd(sqe) => sqe,
            _ => return None,
        };
        let (mut result, mut status, mut data) = (0, Status::SUCCESS, Vec::new());
        match (sqe.opcode(), FabricsType::of(&sqe)) {
            (Opcode::FABRICS, FabricsType::CONNECT) if Connect::parse(&sqe).qid > 0 && !connects() => {
                status = Status::CONNECT_INVALID.do_not_retry();
                result = u64::from(ConnectData::CNTLID_AT) | 1 << 16;
            }
            (Opcode::FABRICS, FabricsType::CONNECT) => result = 1,
            (Opcode::FABRICS, FabricsType::PROPERTY_GET) => {
                result = match Property::parse(&sqe).register {
                    Register::CAPABILITIES => 127 | 1 << 24,
                    Register::STATUS => 1,
                    _ => 0,
                }
            }
            (Opcode::IDENTIFY, _) => {
                data = vec![0; 4096];
                if sqe.dword(10) == 1 {
                    (data[78], data[111], data[320], data[536]) = (1, 1, 10, 1);
                    data[768..772].copy_from_slice(b"nqn.");
                    data[1792] = 4;
                } else {
                    (data[0], data[130]) = (64, 12);
                }
            }
            // The same number as an admin command of logs.
            (Opcode::READ, _) => {
                reads += 1;
                status = answer(reads);
                // It ends without an answer.
                if status.is(Status::SQ_DELETED) {
                    return None;
                }
                if status.is_success() {
                    data = vec![reads as u8; BLOCK as usize];
                }
            }
            _ => {}
        }
        let cid = sqe.cid();
        if !data.is_empty() {
            let transfer = Transfer {
                cid,
                tag: 0,
                offset: 0,
                length: data.len() as u32,
            };
            say(Header::C2hData(transfer), Flags::LAST, &data)?;
        }
        let cqe = Cqe {
            result,
            sq_head: 0,
            cid,
            status,
        };
        say(Header::CapsuleResp(cqe), Flags::empty(), &[])?;
    }
}

/// Returns the first byte of a block that is read from such a target.
fn read_from(answer: impl Fn(u32) -> Status + Clone + Send + 'static) -> Result<u8, String> {
    let options = Options::new(vec![scripted(answer)], nqn(SUBSYSTEM));
    let session = Session::connect(options, 1).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    let mut queue = session.queue(1, 2).unwrap();
    let done = queue.run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]));
    done.map(|done| done.bytes()[0])
        .map_err(|error| error.to_string())
}

#[test]
fn status__that_asks_for_another_try_gets_it() {
    let until = |last: u32, status: Status| {
        move |reads| match reads > last {
            true => Status::SUCCESS,
            false => status,
        }
    };
    assert_eq!(read_from(until(2, Status::INTERRUPTED)), Ok(3));
    // Not for ever, and not where the target calls it final, or says that the medium is at fault.
    let never = read_from(until(u32::MAX, Status::INTERRUPTED)).unwrap_err();
    assert!(never.contains("refused Read: command interrupted"), "{never}");
    for status in [Status::INTERRUPTED.do_not_retry(), Status::READ_ERROR] {
        assert!(read_from(until(1, status)).is_err(), "{status:?}");
    }
}

#[test]
fn session__tries_again_when_its_controller_is_gone_before_it_has_a_queue() {
    // The controllers of the first queue and of the fourth are there. With the second the host asks whether the first one is gone.
    let ends = Arc::new(AtomicU32::new(0));
    let answer = move |_| match ends.fetch_add(1, Ordering::SeqCst) {
        0 => Status::SQ_DELETED,
        _ => Status::SUCCESS,
    };
    let address = scripted_with(answer, |number| matches!(number, 0 | 3));
    let session = Session::connect(Options::new(vec![address], nqn(SUBSYSTEM)), 1).unwrap();
    let mut queue = session.queue(1, 1).unwrap();
    let done = queue.run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]));
    assert_eq!(done.unwrap().bytes()[0], 1);
    assert_eq!(session.generation(), 2);
    // The same before the first queue.
    let address = scripted_with(|_| Status::SUCCESS, |number| number == 1);
    let session = Session::connect(Options::new(vec![address], nqn(SUBSYSTEM)), 1).unwrap();
    let mut queue = session.queue(1, 1).unwrap();
    let done = queue.run("Read", read(NsId(1), 0, 1, BLOCK, vec![0; 4096]));
    assert_eq!((done.unwrap().bytes()[0], session.generation()), (1, 1));
}

#[test]
fn queues__beyond_those_allowed_are_refused() {
    let options = Options::new(vec![scripted(|_| Status::SUCCESS)], nqn(SUBSYSTEM));
    let error = Session::connect(options, 2).unwrap_err().to_string();
    assert!(error.contains("allows 1 I/O queues, not 2"), "{error}");
}

#[test]
fn queue__that_a_target_rejects_by_rdma() {
    let server = Running::memory(Transport::Rdma, any_host());
    let session = Session::connect(server.options(), 1).unwrap();
    let error = session.queue(129, 4).unwrap_err();
    let part = "refused a queue: the queue's id is invalid";
    assert!(error.to_string().contains(part), "{error}");
    assert!(!error.is_of_path());
}

#[test]
fn stranger__is_no_target_by_rdma() {
    rdmux_soft::register();
    let address = any_address(Transport::Rdma);
    let device = Device::open(address.ip()).unwrap();
    let listener = device.listen(address.port()).unwrap();
    let mut options = Options::new(vec![address], nqn(SUBSYSTEM));
    options.transport = Transport::Rdma;
    options.connect_timeout = LONG;
    // For the one that is silent.
    options.admin_timeout = Duration::from_millis(300);
    let options = Arc::new(options);
    let full = Reject::Resources.emit();
    let answers = [
        (Some(&b""[..]), "does a target listen there?"),
        (Some(&full), "no room for the queue"),
        (None, "does a target listen there?"),
    ];
    let accept = |request: ConnectionRequest, receives| {
        let cq = device.create_cq(64).unwrap();
        let pd = device.alloc_pd().unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let data = Accept { receives }.emit();
        request.accept(&qp, &ConnectParams::default(), &data).unwrap()
    };
    let next = || listener.accept(LONG).unwrap();
    let error = || Controller::connect(&options, 0).unwrap_err();
    std::thread::scope(|scope| {
        for (answer, part) in answers {
            let next = &next;
            let thread = scope.spawn(move || match answer {
                Some(private_data) => next().reject(private_data),
                None => drop(next()),
            });
            let error = error();
            assert!(error.to_string().contains(part), "{error}");
            // It may be about to come up, or to be free.
            assert!(error.is_of_path(), "{error}");
            thread.join().unwrap();
        }
        // One that takes fewer commands than the queue has, and one that is silent.
        for (receives, part) in [(4, "4 receives for 31 commands"), (32, "did not answer Connect")] {
            let (next, accept) = (&next, &accept);
            let (over, is_over) = std::sync::mpsc::channel::<()>();
            let thread = scope.spawn(move || {
                let accepted = accept(next(), receives);
                let _ = is_over.recv_timeout(LONG);
                drop(accepted);
            });
            let error = error();
            assert!(error.to_string().contains(part), "{error}");
            drop(over);
            thread.join().unwrap();
        }
    });
}

#[test]
fn stranger__is_no_target() {
    // A server that says something else, and one that says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = |connect_timeout| {
        let options = Options::new(vec![listener.local_addr().unwrap()], nqn(SUBSYSTEM));
        Arc::new(Options {
            connect_timeout,
            ..options
        })
    };
    let (patient, impatient) = (options(LONG), options(Duration::from_millis(300)));
    let answers = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let silent = listener.accept().unwrap();
        let (closes, _) = listener.accept().unwrap();
        drop(closes);
        (socket, silent)
    });
    let error = |options| Controller::connect(options, 0).unwrap_err().to_string();
    let first = error(&patient);
    assert!(first.contains("a PDU with an invalid header"), "{first}");
    let second = error(&impatient);
    assert!(second.contains("ICReq"), "{second}");
    let third = error(&patient);
    assert!(third.contains("closed the connection at"), "{third}");
    answers.join().unwrap();
}
