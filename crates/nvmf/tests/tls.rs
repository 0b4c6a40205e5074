//! The host against our server on loopback, by TLS.
#![cfg(feature = "tls")]
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::command::{read, write};
use rdmux_nvmf::host::{Controller, HostError, Options, Session};
use rdmux_nvmf::server::{Config, Handle, Listen, Server};
use rdmux_nvmf::target::{Hosts, Listener, Namespace, Subsystem, Target, Terms};
use rdmux_nvmf::tls::psk::Psk;
use rdmux_wire::nvme::{DISCOVERY_NQN, Nqn, NsId, Status, TransportKind};
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

impl Running {
    fn start(hosts: Hosts, reactors: usize) -> Running {
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", hosts);
        let namespace = Namespace {
            nsid: NsId(1),
            block_shift: 12,
            uuid: [1; 16],
            is_protected: false,
            backend: Arc::new(MemoryBackend::new(SIZE).unwrap()),
        };
        subsystem.add_namespace(namespace).unwrap();
        let target = Arc::new(Target::default());
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
    assert!(matches!(fails(&options), HostError::Closed(_) | HostError::Io(_)));
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
