//! The host against our server on loopback, by TLS.
#![cfg(feature = "tls")]
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_nvmf::auth::{AuthError, Secret, Secrets};
use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::command::{identify, log_page, read, write};
use rdmux_nvmf::host::queue::{Command, Completion};
use rdmux_nvmf::host::setup::{Setup, Step};
use rdmux_nvmf::host::{Controller, HostError, Options, Session, tcp};
use rdmux_nvmf::server::{Config, Handle, Listen, Server};
use rdmux_nvmf::target::{Authentication, Hosts, Listener, Namespace, Subsystem, Target, Terms};
use rdmux_nvmf::tls::psk::Psk;
use rdmux_wire::nvme::{
    AuthFailure, Cid, Cns, DISCOVERY_NQN, DhGroup, LogId, Nqn, NsId, Opcode, Sqe, Status, TransportKind,
};
use rdmux_wire::nvme_tcp::Digests;

const SUBSYSTEM: &str = "nqn.2014-08.org.example:tls";
const BLOCK: u32 = 4096;
/// Bytes of the namespace.
const SIZE: u64 = 8 << 20;

struct Running {
    target: Arc<Target>,
    /// With TLS, and without.
    addresses: [SocketAddr; 2],
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

fn key() -> Psk {
    Psk::new([7; 32])
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

/// Returns the hosts of a subsystem that all need a key.
fn hosts(key: &Psk) -> Hosts {
    Hosts::any(Terms {
        psk: Some(key.clone()),
        ..Terms::default()
    })
}

fn secrets(controller: bool) -> Secrets {
    Secrets {
        host: Secret::new([1; 32]),
        controller: controller.then(|| Secret::new([2; 32])),
    }
}

/// Returns the hosts of a subsystem that all need a secret, and have no key.
fn secret_hosts(secrets: Secrets) -> Hosts {
    Hosts::any(Terms {
        authentication: Some(Authentication {
            secrets,
            random: || rdmux_key::random_nonce().ok(),
        }),
        concat: true,
        ..Terms::default()
    })
}

impl Running {
    fn start(hosts: Hosts, reactors: usize) -> Running {
        Running::start_with(Target::default(), hosts, reactors)
    }

    fn start_with(target: Target, hosts: Hosts, reactors: usize) -> Running {
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", hosts);
        let namespace = Namespace {
            nsid: NsId(1),
            block_shift: 12,
            uuid: [1; 16],
            is_protected: false,
            backend: Arc::new(MemoryBackend::new(SIZE).unwrap()),
        };
        subsystem.add_namespace(namespace).unwrap();
        let target = Arc::new(target);
        target.add_subsystem(Arc::new(subsystem)).unwrap();
        let listener = Listener {
            transport: TransportKind::Tcp,
            address: "127.0.0.1:0".parse().unwrap(),
        };
        let secure = Listen {
            tls: true,
            ..listener.into()
        };
        let server = Server::bind(Config {
            target: target.clone(),
            listen: vec![secure, listener.into()],
            reactors,
            offload: false,
            waiting: None,
        })
        .unwrap();
        let addresses = [0, 1].map(|at| server.listeners()[at].address);
        let handle = server.handle();
        let thread = std::thread::spawn(move || server.run().unwrap());
        Running {
            target,
            addresses,
            handle,
            thread: Some(thread),
        }
    }

    fn options(&self, key: &Psk) -> Options {
        let mut options = Options::new(vec![self.addresses[0]], nqn(SUBSYSTEM));
        options.psk = Some(key.clone());
        options
    }

    /// Returns the settings of a host that has a secret alone.
    fn secret_options(&self) -> Options {
        let mut options = Options::new(vec![self.addresses[0]], nqn(SUBSYSTEM));
        options.secrets = Some(secrets(true));
        options.requires_authentication = true;
        options.concat = true;
        options
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn io__of_every_size_and_digest_arrives_by_tls() {
    let sha384 = "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
    for key in [key(), Psk::parse(sha384).unwrap()] {
        let running = Running::start(hosts(&key), 2);
        for digests in [Digests::empty(), Digests::HEADER | Digests::DATA] {
            let mut options = running.options(&key);
            options.digests = digests;
            let session = Session::connect(options, 2).unwrap();
            let namespace = session.open_namespace(NsId(1)).unwrap();
            for qid in 1..=2 {
                let mut queue = session.queue(qid, 32).unwrap();
                for (seed, blocks) in [1, 2, 4, 5, 64, 256].into_iter().enumerate() {
                    let len = blocks * BLOCK;
                    let data = bytes(seed as u64, len as usize);
                    // Many at a time: what the socket does not take waits, and reads come back in many records.
                    for at in 0..8 {
                        queue.submit(write(namespace.nsid, at * 256, blocks, len, data.clone()));
                    }
                    let mut done = 0;
                    while done < 8 {
                        queue.wait().unwrap();
                        while let Some(completion) = queue.poll() {
                            assert_eq!(completion.status, Status::SUCCESS);
                            done += 1;
                        }
                    }
                    for at in 0..8 {
                        let space = vec![0; len as usize];
                        queue.submit(read(namespace.nsid, at * 256, blocks, len, space));
                    }
                    while done < 16 {
                        queue.wait().unwrap();
                        while let Some(completion) = queue.poll() {
                            assert!(completion.bytes() == data, "{blocks} blocks");
                            done += 1;
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn handshakes__of_many_queues_all_end() {
    let running = Running::start(hosts(&key()), 2);
    let session = Session::connect(running.options(&key()), 100).unwrap();
    let mut queues: Vec<_> = (1..=100).map(|qid| session.queue(qid, 2).unwrap()).collect();
    for queue in &mut queues {
        queue.submit(read(NsId(1), 0, 1, BLOCK, vec![0; BLOCK as usize]));
        while queue.poll().is_none() {
            queue.wait().unwrap();
        }
    }
}

#[test]
fn discovery__tells_where_tls_is_required() {
    let running = Running::start(hosts(&key()), 1);
    let mut options = running.options(&key());
    options.subsystem = nqn(DISCOVERY_NQN);
    let controller = Controller::connect(&Arc::new(options), 0).unwrap();
    let log = controller.discovery_log().unwrap();
    for entry in &log.entries {
        let entry = entry.as_ref().unwrap();
        assert_eq!(entry.is_secure, entry.address == running.addresses[0]);
    }
    assert_eq!(log.entries.len(), 4);
}

#[test]
fn connect__with_another_key_or_without_one_fails() {
    let running = Running::start(hosts(&key()), 1);
    let mut options = running.options(&Psk::new([8; 32]));
    // Only one that waits for what never comes needs this long.
    options.connect_timeout = Duration::from_secs(60);
    let fails = |options: &Options| Controller::connect(&Arc::new(options.clone()), 0).unwrap_err();
    let error = fails(&options);
    assert!(error.to_string().contains("is the key right?"), "{error}");
    // A subsystem that there is not has no key.
    options.psk = Some(key());
    options.subsystem = nqn("nqn.2014-08.org.example:other");
    assert!(matches!(fails(&options), HostError::Tls { .. }));
    // Plain bytes where TLS is required, and TLS where it is not.
    options.subsystem = nqn(SUBSYSTEM);
    options.psk = None;
    assert!(is_refused(&fails(&options)));
    options.psk = Some(key());
    options.addresses = vec![running.addresses[1]];
    assert!(matches!(fails(&options), HostError::Tls { .. }));
    // Others do not notice.
    options.addresses = vec![running.addresses[0]];
    Controller::connect(&Arc::new(options), 0).unwrap();
}

#[test]
fn connect__works_while_others_do_not_end_their_handshakes() {
    let running = Running::start(hosts(&key()), 1);
    let open = || TcpStream::connect(running.addresses[0]).unwrap();
    let mut others: Vec<_> = (0..100).map(|_| open()).collect();
    for (at, other) in others.iter_mut().enumerate() {
        // The beginning of a ClientHello.
        let hello = [22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3];
        other.write_all(&hello[..at % hello.len()]).unwrap();
    }
    let mut wrong = open();
    wrong.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    Controller::connect(&Arc::new(running.options(&key())), 0).unwrap();
    // The wrong one is closed, and nothing else: its time is not over.
    wrong.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut rest = Vec::new();
    // A reset, if there were bytes that nobody has read.
    let _ = wrong.read_to_end(&mut rest);
    others[0].set_nonblocking(true).unwrap();
    let error = others[0].read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn controllers__of_a_key_end_with_it() {
    let running = Running::start(hosts(&key()), 1);
    let mut options = running.options(&key());
    options.loss_timeout = Duration::ZERO;
    let session = Session::connect(options, 1).unwrap();
    let mut queue = session.queue(1, 2).unwrap();
    let other = Psk::new([8; 32]);
    running.target.set_hosts(&nqn(SUBSYSTEM), hosts(&other)).unwrap();
    running.handle.tell_of_change();
    queue.submit(read(NsId(1), 0, 1, BLOCK, vec![0; BLOCK as usize]));
    let ended = loop {
        match queue.wait() {
            Err(error) => break error,
            // It was carried out before the target looked.
            Ok(()) => {
                while queue.poll().is_some() {
                    queue.submit(read(NsId(1), 0, 1, BLOCK, vec![0; BLOCK as usize]));
                }
            }
        }
    };
    println!("{ended}");
    Controller::connect(&Arc::new(running.options(&other)), 0).unwrap();
}

fn is_refused(error: &HostError) -> bool {
    matches!(error, HostError::Refused { status, .. } if status.is(Status::CONNECT_INVALID_HOST))
}

#[test]
fn handshake__has_a_limit_of_time() {
    let target = Target::default().with_connect_timeout(Duration::from_millis(1));
    let running = Running::start_with(target, hosts(&key()), 1);
    // Nothing, the beginning of a ClientHello, and that of a connection without TLS.
    for begin in [&[][..], &[22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3], &[0, 0, 128]] {
        let mut socket = TcpStream::connect(running.addresses[0]).unwrap();
        socket.write_all(begin).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let closed = match socket.read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        };
        assert!(closed, "{begin:?}");
    }
}

/// Writes and reads a block by a queue.
fn exchange(session: &Arc<Session>, qid: u16) {
    let mut queue = session.queue(qid, 8).unwrap();
    let data = bytes(qid.into(), BLOCK as usize);
    queue.submit(write(NsId(1), qid.into(), 1, BLOCK, data.clone()));
    let space = || vec![0; BLOCK as usize];
    for is_written in [true, false] {
        let completion = loop {
            match queue.poll() {
                Some(completion) => break completion,
                None => queue.wait().unwrap(),
            }
        };
        assert_eq!(completion.status, Status::SUCCESS);
        match is_written {
            true => queue.submit(read(NsId(1), qid.into(), 1, BLOCK, space())),
            false => assert!(completion.bytes() == data),
        }
    }
}

#[test]
fn concat__has_a_host_with_a_secret_alone_use_tls() {
    for of_both in [true, false] {
        let running = Running::start(secret_hosts(secrets(of_both)), 2);
        let mut options = running.secret_options();
        options.secrets = Some(secrets(of_both));
        let session = Session::connect(options, 4).unwrap();
        (1..=2).for_each(|qid| exchange(&session, qid));
        // With another key.
        session.controller().renew_key().unwrap();
        exchange(&session, 3);
        session.controller().renew_key().unwrap();
        session.controller().renew_key().unwrap();
        exchange(&session, 4);
        assert!(session.controller().lost().is_none());
    }
}

#[test]
fn concat__of_a_session_survives_the_loss_of_a_connection() {
    let running = Running::start(secret_hosts(secrets(true)), 1);
    let session = Session::connect(running.secret_options(), 1).unwrap();
    exchange(&session, 1);
    let first = session.controller();
    // The controller ends, and all that it knew.
    let none = Hosts::default();
    running.target.set_hosts(&nqn(SUBSYSTEM), none).unwrap();
    let hosts = secret_hosts(secrets(true));
    running.target.set_hosts(&nqn(SUBSYSTEM), hosts).unwrap();
    running.handle.tell_of_change();
    exchange(&session, 1);
    assert!(!Arc::ptr_eq(&first, &session.controller()));
}

#[test]
fn concat__is_refused_without_what_it_needs() {
    let running = Running::start(secret_hosts(secrets(true)), 1);
    let fails = |change: &dyn Fn(&mut Options)| {
        let mut options = running.secret_options();
        change(&mut options);
        Controller::connect(&Arc::new(options), 0).unwrap_err()
    };
    let refused = |error: &HostError, why: AuthFailure| matches!(error, HostError::Authentication(AuthError::Refused(failure)) if *failure == why);
    // A listener without TLS.
    let error = fails(&|options| options.addresses = vec![running.addresses[1]]);
    assert!(refused(&error, AuthFailure::Concatenation), "{error}");
    // No group from which a key would follow.
    let error = fails(&|options| options.offer.groups = vec![DhGroup::Null]);
    assert!(refused(&error, AuthFailure::Group), "{error}");
    let error = fails(&|options| {
        let secrets = options.secrets.as_mut().unwrap();
        secrets.host = Secret::new([9; 32]);
    });
    assert!(refused(&error, AuthFailure::Failed), "{error}");
    let error = fails(&|options| {
        let secrets = options.secrets.as_mut().unwrap();
        secrets.controller = Some(Secret::new([9; 32]));
    });
    let expected = HostError::Authentication(AuthError::ControllerFailed);
    assert_eq!(error.to_string(), expected.to_string());
    assert!(matches!(
        fails(&|options| options.secrets = None),
        HostError::NoSecret
    ));
    // A host that does not ask for a key, and the discovery service, with which nobody has a secret.
    let error = fails(&|options| options.concat = false);
    assert!(matches!(error, HostError::NoSecureChannel), "{error}");
    let error = fails(&|options| options.subsystem = nqn(DISCOVERY_NQN));
    assert!(is_refused(&error), "{error}");
    Controller::connect(&Arc::new(running.secret_options()), 0).unwrap();
}

fn keep_alive() -> Command {
    Command::new(Sqe::new(Opcode::KEEP_ALIVE, Cid(0), NsId::NONE))
}

/// A connection without TLS, whose commands a test chooses.
struct Plain {
    socket: TcpStream,
    connection: tcp::Connection,
}

impl Plain {
    fn open(address: SocketAddr) -> Plain {
        let config = tcp::Config {
            digests: Digests::empty(),
            entries: 32,
            in_capsule_max: 8192,
            is_io: false,
        };
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut plain = Plain {
            socket,
            connection: tcp::Connection::new(config),
        };
        plain.exchange(|connection| connection.is_ready());
        plain
    }

    /// Sends and receives until something is so. Returns false if the target has closed the connection.
    fn exchange(&mut self, is_so: impl Fn(&tcp::Connection) -> bool) -> bool {
        while !is_so(&self.connection) {
            let mut slices = [std::io::IoSlice::new(&[]); 16];
            let number = self.connection.slices(&mut slices);
            if number > 0 {
                let sent = self.socket.write_vectored(&slices[..number]).unwrap();
                self.connection.sent(sent);
                continue;
            }
            match self.socket.read(self.connection.space()) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("the target does not answer")
                }
                Ok(0) | Err(_) => return false,
                Ok(received) => self.connection.received(received),
            }
        }
        true
    }

    fn run(&mut self, command: Command) -> Option<Completion> {
        self.connection.submit(command, None);
        self.exchange(tcp::Connection::has_completions);
        self.connection.poll()
    }

    /// Carries out a setup.
    fn set_up(&mut self, setup: &mut Setup<'_>) -> Result<(), HostError> {
        loop {
            match setup.next()? {
                Step::Submit(what, command) => {
                    let completion = self.run(*command).ok_or(HostError::Closed(Some(what)))?;
                    setup.handle(what, &completion)?;
                }
                Step::Done => return Ok(()),
                step => panic!("{step:?}"),
            }
        }
    }
}

#[test]
fn concat__leaves_nothing_else_to_the_connection_without_tls() {
    let running = Running::start(secret_hosts(secrets(true)), 1);
    let options = running.secret_options();
    let mut plain = Plain::open(running.addresses[0]);
    plain.set_up(&mut Setup::new_psk(&options)).unwrap();
    let log = |log| log_page(log, NsId::NONE, 0, 4, true);
    let refused = |plain: &mut Plain, command| {
        let status = plain.run(command).unwrap().status;
        status.is(Status::AUTHENTICATION_REQUIRED)
    };
    for command in [
        identify(Cns::ACTIVE_NAMESPACES, NsId::NONE),
        identify(Cns::NAMESPACE, NsId(1)),
        Command::new(Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(0), NsId::NONE)),
        log(LogId::CHANGED_NAMESPACES),
        log(LogId::RESERVATIONS),
    ] {
        assert!(refused(&mut plain, command));
    }
    // Linux's host does so before it comes back.
    for command in [
        keep_alive(),
        identify(Cns::CONTROLLER, NsId::NONE),
        log(LogId::EFFECTS),
        log(LogId::ANA),
    ] {
        assert!(!refused(&mut plain, command));
    }
    // No I/O queue, also of a controller that has one by TLS.
    let controller = Controller::connect(&Arc::new(options.clone()), 1).unwrap();
    let cntlid = controller.info().cntlid;
    let mut other = Plain::open(running.addresses[0]);
    let error = other.set_up(&mut Setup::io(&options, 1, 2, cntlid)).unwrap_err();
    assert!(is_refused(&error), "{error}");
}

#[test]
fn concat__has_keys_for_one_host_and_one_controller() {
    let running = Running::start(secret_hosts(secrets(true)), 1);
    let mut options = running.secret_options();
    let agree = || {
        let mut setup = Setup::new_psk(&options);
        Plain::open(running.addresses[0]).set_up(&mut setup).unwrap();
        setup.take_psk().unwrap()
    };
    let (one, other) = (agree(), agree());
    assert_ne!(one, other);
    (options.concat, options.psk) = (false, Some(one));
    let connect = |options: &Options| Controller::connect(&Arc::new(options.clone()), 1);
    // Another host has not got it, nor is it one for another subsystem.
    let mut others = options.clone();
    others.host = nqn("nqn.2014-08.org.example:other");
    assert!(matches!(connect(&others), Err(HostError::Tls { .. })));
    let mut discovery = options.clone();
    discovery.subsystem = nqn(DISCOVERY_NQN);
    assert!(matches!(connect(&discovery), Err(HostError::Tls { .. })));
    let controller = connect(&options).unwrap();
    let error = connect(&options).unwrap_err();
    assert!(is_refused(&error), "{error}");
    drop(controller);
    // The target learns of the end in its turn.
    let patience = Instant::now() + Duration::from_secs(60);
    loop {
        match connect(&options) {
            Err(HostError::Tls { .. }) => break,
            result => assert!(is_refused(&result.unwrap_err())),
        }
        assert!(Instant::now() < patience, "an old key is still one");
    }
    options.psk = Some(other);
    connect(&options).unwrap();
}
