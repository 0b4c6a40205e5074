//! Accelerators of a server, as our host uses them, by both transports.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod serve;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_nvmf::accelerator::Accelerator as Backend;
use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::jobs::{Accelerator, Destination, Done, JobEvent, Jobs, Request};
use rdmux_nvmf::host::{Options, Session, Transport, command};
use rdmux_nvmf::server::Handle;
use rdmux_nvmf::target::{Hosts, Listener, Namespace, Subsystem, Terms};
use rdmux_wire::accel::{AcceleratorInfo, Algorithm, JobKind, JobStatus};
use rdmux_wire::nvme::{HostId, Nqn, NsId, TransportKind};

use serve::serve;

const SUBSYSTEM: &str = "nqn.2014-08.org.example:accelerators";
/// Longer than a server takes to end a connection.
const LONG: Duration = Duration::from_secs(60);
const BLOCK: u64 = 4096;
const WINDOW: u64 = 1 << 20;

/// Namespace 1 stores; 2 and 3 are for zstd, 4 is for lz4.
struct Node {
    subsystem: Arc<Subsystem>,
    accelerators: Vec<Arc<Backend>>,
    address: SocketAddr,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    fn start(transport: TransportKind, address: SocketAddr, reactors: usize) -> Node {
        let hosts = Hosts::any(Terms::default());
        let subsystem = Subsystem::new(Nqn::new(SUBSYSTEM).unwrap(), "serial", hosts);
        let accelerators: Vec<_> = [Algorithm::Zstd, Algorithm::Zstd, Algorithm::Lz4]
            .into_iter()
            .map(|algorithm| {
                let info = AcceleratorInfo {
                    algorithm,
                    level: u8::from(algorithm == Algorithm::Zstd),
                    windows: 3,
                    window_bytes: WINDOW,
                };
                Arc::new(Backend::new(info, 4))
            })
            .collect();
        for (nsid, backend) in (2..).zip(&accelerators) {
            let namespace = Namespace {
                nsid: NsId(nsid),
                block_shift: 12,
                uuid: [nsid as u8; 16],
                is_protected: false,
                backend: backend.clone(),
            };
            subsystem.add_namespace(namespace).unwrap();
        }
        let memory = Arc::new(MemoryBackend::new(16 << 20).unwrap());
        let listener = Listener { transport, address };
        let (subsystem, address, handle, thread) = serve(subsystem, (memory, 1), listener, reactors);
        Node {
            subsystem,
            accelerators,
            address,
            handle,
            thread: Some(thread),
        }
    }

    fn options(&self, transport: Transport, host: u8) -> Options {
        Options {
            transport,
            host: Nqn::new(&format!("nqn.2014-08.org.example:host-{host}")).unwrap(),
            host_id: HostId([host; 16]),
            ..Options::new(vec![self.address], Nqn::new(SUBSYSTEM).unwrap())
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

/// Returns data that compress, others for each seed.
fn data(seed: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let len = 1 + random.next_u32() as usize % (WINDOW as usize * 3 / 4);
    let words: Vec<[u8; 4]> = (0..256).map(|_| random.next_u32().to_le_bytes()).collect();
    let mut bytes = Vec::with_capacity(len + 4);
    while bytes.len() < len {
        bytes.extend(words[random.next_u32() as usize % 256]);
    }
    bytes.truncate(len);
    bytes
}

fn request(token: u64, kind: JobKind, data: Vec<u8>, stays: bool) -> Request {
    Request {
        token,
        kind,
        level: 0,
        align: if stays { BLOCK as u32 } else { 0 },
        data,
        stays,
    }
}

/// Runs jobs, of data by their numbers, and returns the results. `look` is called after each.
fn run(jobs: &mut Jobs, kind: JobKind, all: &[Vec<u8>], mut look: impl FnMut(usize)) -> Vec<Vec<u8>> {
    let (mut next, mut results) = (0, BTreeMap::new());
    loop {
        while next < all.len() && jobs.has_room() {
            jobs.submit(request(next as u64, kind, all[next].clone(), false));
            next += 1;
        }
        match jobs.wait().unwrap() {
            Some(JobEvent::Done(Done {
                request,
                outcome,
                result,
                ..
            })) => {
                assert_eq!(outcome.status, JobStatus::Done, "job {}", request.token);
                assert_eq!(outcome.consumed as usize, request.data.len());
                assert!(results.insert(request.token, result).is_none());
                look(results.len());
            }
            Some(JobEvent::Stored { .. }) => unreachable!(),
            None => break,
        }
    }
    assert_eq!(results.len(), all.len());
    results.into_values().collect()
}

fn jobs(session: &Arc<Session>, algorithm: Algorithm) -> Jobs {
    let mut accelerators = Accelerator::list(session).unwrap();
    accelerators.retain(|one| one.info.algorithm == algorithm);
    assert!(!accelerators.is_empty());
    Jobs::new(session, session.queue(1, 8).unwrap(), &accelerators, 1)
}

#[test]
fn jobs__compress_and_decompress_by_both_transports() {
    for (kind, transport, address) in [
        (TransportKind::Tcp, Transport::Tcp, "127.0.0.1:0"),
        (TransportKind::Rdma, Transport::Rdma, "127.0.41.1:4420"),
    ] {
        // Reactors share the cores.
        let node = Node::start(kind, address.parse().unwrap(), 2);
        let hosts = [1, 2].map(|host| {
            let options = node.options(transport, host);
            std::thread::spawn(move || {
                let session = Session::connect(options, 1).unwrap();
                let all: Vec<_> = (0..20).map(|seed| data(seed + 100 * u64::from(host))).collect();
                for algorithm in [Algorithm::Zstd, Algorithm::Lz4] {
                    let mut jobs = jobs(&session, algorithm);
                    let packed = run(&mut jobs, JobKind::Compress, &all, |_| {});
                    assert!(packed.iter().map(Vec::len).sum::<usize>() < all.iter().map(Vec::len).sum());
                    assert!(
                        run(&mut jobs, JobKind::Decompress, &packed, |_| {}) == all,
                        "{algorithm:?}"
                    );
                }
                session.close();
            })
        });
        for host in hosts {
            host.join().unwrap();
        }
        assert!(node.subsystem.counts().writes > 0);
        // Windows go with their hosts, once the server has taken note of that.
        let until = Instant::now() + LONG;
        while node.accelerators.iter().any(|one| one.hosts() > 0) {
            assert!(Instant::now() < until, "windows stay without a host");
            std::thread::yield_now();
        }
    }
}

#[test]
fn jobs__leave_results_at_the_target() {
    let node = Node::start(TransportKind::Tcp, "127.0.0.1:0".parse().unwrap(), 1);
    let session = Session::connect(node.options(Transport::Tcp, 1), 1).unwrap();
    let namespace = session.open_namespace(NsId(1)).unwrap();
    let to = Destination::new(&session, &namespace).unwrap();
    let mut jobs = jobs(&session, Algorithm::Zstd);
    let all: Vec<_> = (0..10).map(data).collect();
    let (mut next, mut block, mut places) = (0, 0, BTreeMap::new());
    let mut stored = 0;
    while stored < all.len() {
        while next < all.len() && jobs.has_room() {
            jobs.submit(request(next as u64, JobKind::Compress, all[next].clone(), true));
            next += 1;
        }
        match jobs.wait().unwrap() {
            Some(JobEvent::Done(done)) => {
                assert!(done.result.is_empty() && u64::from(done.outcome.length).is_multiple_of(BLOCK));
                jobs.store(done.window, to, block);
                let blocks = u64::from(done.outcome.length) / BLOCK;
                places.insert(done.request.token, (block, blocks));
                block += blocks;
            }
            Some(JobEvent::Stored { .. }) => stored += 1,
            None => panic!("{stored} results are stored, and nothing is under way"),
        }
    }
    assert!(jobs.is_empty());
    // The drive has what decompresses to the data.
    let mut queue = jobs.into_queue();
    let packed = places.values().map(|(block, blocks)| {
        let bytes = (blocks * BLOCK) as u32;
        let read = command::read(NsId(1), *block, *blocks as u32, bytes, vec![0; bytes as usize]);
        queue.run("Read", read).unwrap().command.buffer
    });
    let packed: Vec<_> = packed.collect();
    drop(queue);
    let mut jobs = self::jobs(&session, Algorithm::Zstd);
    assert!(run(&mut jobs, JobKind::Decompress, &packed, |_| {}) == all);
    drop(jobs);
    session.close();
}

#[test]
fn jobs__are_given_anew_to_a_target_that_has_lost_them() {
    let node = Node::start(TransportKind::Tcp, "127.0.0.1:0".parse().unwrap(), 1);
    let (address, options) = (node.address, node.options(Transport::Tcp, 1));
    let session = Session::connect(options, 1).unwrap();
    let mut jobs = jobs(&session, Algorithm::Zstd);
    let all: Vec<_> = (0..30).map(data).collect();
    let mut node = Some(node);
    let packed = run(&mut jobs, JobKind::Compress, &all, |done| {
        if done == 10 || done == 20 {
            // Its windows, full or not, are gone.
            drop(node.take());
            node = Some(Node::start(TransportKind::Tcp, address, 1));
        }
    });
    assert!(session.generation() > 1, "it has connected again");
    assert!(run(&mut jobs, JobKind::Decompress, &packed, |_| {}) == all);
    drop(jobs);
    session.close();
}
