//! A host that reaches a subsystem by several paths, and networks and targets that fail it.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod serve;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_nvmf::backend::{Backend, MemoryBackend};
use rdmux_nvmf::host::command::{read, write};
use rdmux_nvmf::host::queue::Command;
use rdmux_nvmf::host::{HostError, IoQueue, Options, Session, Transport};
use rdmux_nvmf::server::Handle;
use rdmux_nvmf::target::{AnaRule, Hosts, Listener, Subsystem, Terms};
use rdmux_wire::nvme::{AnaState, Nqn, NsId, TransportKind};

use serve::serve;

const SUBSYSTEM: &str = "nqn.2014-08.org.example:paths";
const BLOCK: u32 = 4096;
/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(60);

/// A node that serves the subsystem by TCP, with ids of controllers of its own.
struct Node {
    subsystem: Arc<Subsystem>,
    address: SocketAddr,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    fn start(number: u16, backend: Arc<dyn Backend>, uuid: u8) -> Node {
        Node::start_by(TransportKind::Tcp, number, backend, uuid)
    }

    fn start_by(transport: TransportKind, number: u16, backend: Arc<dyn Backend>, uuid: u8) -> Node {
        let hosts = Hosts::any(Terms::default());
        let cntlids = number * 100..=number * 100 + 99;
        let subsystem = Subsystem::new(Nqn::new(SUBSYSTEM).unwrap(), "serial", hosts).with_cntlids(cntlids);
        let listener = Listener {
            transport,
            address: match transport {
                TransportKind::Tcp => "127.0.0.1:0".parse().unwrap(),
                TransportKind::Rdma => ([127, 0, 34, number as u8], 4420).into(),
            },
        };
        let (subsystem, address, handle, thread) = serve(subsystem, (backend, uuid), listener, 1);
        Node {
            subsystem,
            address,
            handle,
            thread: Some(thread),
        }
    }

    /// Starts nodes whose namespace has the same blocks.
    fn pair() -> [Node; 2] {
        let backend = Arc::new(MemoryBackend::new(16 << 20).unwrap());
        [1, 2].map(|number| Node::start(number, backend.clone(), 1))
    }

    fn set(&self, state: AnaState) {
        let rule = AnaRule {
            group: None,
            at: None,
            state,
        };
        self.subsystem.set_ana_state(rule).unwrap();
        self.handle.tell_of_change();
    }

    /// Returns the number of writes that it has carried out.
    fn writes(&self) -> u64 {
        self.subsystem.counts().writes
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

fn options(address: SocketAddr) -> Options {
    Options::new(vec![address], Nqn::new(SUBSYSTEM).unwrap())
}

/// Options of a host that writes again so much sooner after it has lost a path.
fn options_with(keep_alive: Duration, address: SocketAddr) -> Options {
    Options {
        keep_alive,
        ..options(address)
    }
}

/// Connects by paths to nodes, for so many queues.
fn connect(nodes: &[Node], queues: u16) -> Arc<Session> {
    let paths = nodes.iter().map(|node| options(node.address)).collect();
    let session = Session::connect_by(paths, queues).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    session
}

fn writing(at: u64, value: u8) -> Command {
    write(NsId(1), at, 1, BLOCK, vec![value; BLOCK as usize])
}

/// Returns the value of a block.
fn value(queue: &mut IoQueue, at: u64) -> u8 {
    let done = queue.run("Read", read(NsId(1), at, 1, BLOCK, vec![0; BLOCK as usize]));
    let done = done.unwrap();
    assert!(
        done.bytes().iter().all(|byte| *byte == done.bytes()[0]),
        "block {at} is torn"
    );
    done.bytes()[0]
}

#[test]
fn io__goes_by_the_best_path_at_any_time() {
    let nodes = Node::pair();
    nodes[0].set(AnaState::NonOptimized);
    let session = connect(&nodes, 1);
    let mut queue = session.queue(1, 4).unwrap();
    let mut expected = [0, 0];
    let mut next = 0;
    let mut write = |queue: &mut IoQueue, at: usize| {
        next += 1;
        queue.run("Write", writing(next, next as u8)).unwrap();
        expected[at] += 1;
        assert_eq!([nodes[0].writes(), nodes[1].writes()], expected);
    };
    write(&mut queue, 1);
    // Commands are refused, which says that another path has to be taken.
    nodes[1].set(AnaState::Inaccessible);
    write(&mut queue, 0);
    nodes[1].set(AnaState::NonOptimized);
    nodes[0].set(AnaState::Change);
    write(&mut queue, 1);
    assert_eq!(session.generation(), 3);
    drop(queue);
    session.close();
}

#[test]
fn io__goes_to_a_path_that_becomes_optimized() {
    let nodes = Node::pair();
    nodes[0].set(AnaState::NonOptimized);
    nodes[1].set(AnaState::NonOptimized);
    let session = connect(&nodes, 1);
    let mut queue = session.queue(1, 4).unwrap();
    queue.run("Write", writing(0, 1)).unwrap();
    let other = usize::from(nodes[0].writes() > 0);
    nodes[other].set(AnaState::Optimized);
    let began = Instant::now();
    // An event tells of it, which comes with a keep-alive.
    while nodes[other].writes() == 0 {
        queue.run("Write", writing(0, 2)).unwrap();
        assert!(began.elapsed() < LONG, "nothing goes to the optimized path");
    }
    assert_eq!(session.generation(), 2);
}

#[test]
fn io__waits_while_no_path_gives_access() {
    let nodes = Node::pair();
    nodes.iter().for_each(|node| node.set(AnaState::Inaccessible));
    let session = connect(&nodes, 2);
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for qid in 1..=2 {
            let (session, sender) = (&session, sender.clone());
            scope.spawn(move || {
                let mut queue = session.queue(qid, 4).unwrap();
                queue.run("Write", writing(qid.into(), qid as u8)).unwrap();
                sender.send(value(&mut queue, qid.into())).unwrap();
            });
        }
        assert!(done.try_recv().is_err());
        nodes[1].set(AnaState::Change);
        nodes[1].set(AnaState::NonOptimized);
        let mut values = [(); 2].map(|()| done.recv_timeout(LONG).unwrap());
        values.sort_unstable();
        assert_eq!(values, [1, 2]);
    });
    assert_eq!([nodes[0].writes(), nodes[1].writes()], [0, 2]);
    // Not for ever.
    nodes[1].set(AnaState::PersistentLoss);
    let mut options = options(nodes[1].address);
    options.loss_timeout = Duration::from_millis(200);
    let session = Session::connect(options, 1).unwrap();
    let opened = session.open_namespace(NsId(1)).map(|_| ());
    let error = opened.and_then(|()| {
        let mut queue = session.queue(1, 1)?;
        queue.run("Write", writing(0, 9)).map(|_| ())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, HostError::Inaccessible { .. }), "{error}");
    let parts = ["no path gives access", "(PersistentLoss)", "nvme ana list"];
    assert!(
        parts.iter().all(|part| error.to_string().contains(part)),
        "{error}"
    );
}

#[test]
fn io__goes_on_by_tcp_when_a_node_dies() {
    check_death(TransportKind::Tcp, Transport::Tcp);
}

#[test]
fn io__goes_on_by_rdma_when_a_node_dies() {
    check_death(TransportKind::Rdma, Transport::Rdma);
}

fn check_death(kind: TransportKind, transport: Transport) {
    const QUEUES: u16 = 2;
    const BLOCKS: u64 = 600;
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new(16 << 20).unwrap());
    let mut nodes = [1, 2].map(|number| Some(Node::start_by(kind, number, backend.clone(), 1)));
    let paths = nodes
        .iter()
        .flatten()
        .map(|node| Options {
            transport,
            ..options_with(Duration::from_secs(2), node.address)
        })
        .collect();
    let session = Session::connect_by(paths, QUEUES).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    let (sender, ready) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for qid in 1..=QUEUES {
            let (session, sender) = (&session, sender.clone());
            scope.spawn(move || {
                let mut queue = session.queue(qid, 8).unwrap();
                let first = u64::from(qid) * 1024;
                let (mut begun, mut done) = (0, 0);
                while done < BLOCKS {
                    while begun < BLOCKS && queue.room() > 0 {
                        queue.submit(writing(first + begun, begun as u8));
                        begun += 1;
                        if begun == BLOCKS / 2 {
                            sender.send(()).unwrap();
                        }
                    }
                    queue.wait().unwrap();
                    while let Some(completion) = queue.poll() {
                        assert!(completion.status.is_success(), "{:?}", completion.status);
                        done += 1;
                    }
                }
                for at in 0..BLOCKS {
                    assert_eq!(value(&mut queue, first + at), at as u8, "block {at}");
                }
            });
        }
        (0..QUEUES).for_each(|_| ready.recv_timeout(LONG).unwrap());
        // I/O goes to it.
        let writes = nodes.iter().flatten().map(Node::writes);
        let busy = writes.enumerate().max_by_key(|(_, writes)| *writes).unwrap().0;
        nodes[busy].take();
    });
    assert_eq!(session.generation(), 2);
}

#[test]
fn path__that_leads_to_another_namespace_is_refused() {
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new(16 << 20).unwrap());
    let nodes = [1, 2].map(|number| Node::start(number, backend.clone(), number as u8));
    let paths = nodes.iter().map(|node| options(node.address)).collect();
    let session = Session::connect_by(paths, 1).unwrap();
    let error = session.open_namespace(NsId(1)).unwrap_err();
    assert!(error.to_string().contains("another namespace 1"), "{error}");
}

#[test]
fn path__that_does_not_answer_is_tried_again() {
    let nodes = Node::pair();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let session = Session::connect_by(vec![options(nobody), options(nodes[0].address)], 1).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    let mut queue = session.queue(1, 1).unwrap();
    queue.run("Write", writing(0, 7)).unwrap();
    assert_eq!(value(&mut queue, 0), 7);
    drop(queue);
    session.close();
    // One has to.
    let error = Session::connect_by(vec![options(nobody); 2], 1).unwrap_err();
    assert!(
        error.to_string().contains("does a target listen there?"),
        "{error}"
    );
}

/// A network between hosts and a target, which can be cut: hosts see the connections of before end, and what they have sent on them is late.
#[derive(Default)]
struct Network {
    state: Mutex<NetworkState>,
    changed: Condvar,
}

#[derive(Default)]
struct NetworkState {
    is_cut: bool,
    /// Bytes that are late arrive.
    is_released: bool,
    /// Connections of before whose target has not ended them.
    old: usize,
}

impl Network {
    fn to(target: SocketAddr) -> (SocketAddr, Arc<Network>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let network = Arc::new(Network::default());
        let shared = network.clone();
        std::thread::spawn(move || {
            while let Ok((host, _)) = listener.accept() {
                let Ok(target) = TcpStream::connect(target) else {
                    continue;
                };
                let mut state = shared.state.lock().unwrap();
                let old = (!state.is_cut).then_some(state.old);
                state.old += usize::from(old.is_some());
                drop(state);
                let (from, to) = (host.try_clone().unwrap(), target.try_clone().unwrap());
                let network = shared.clone();
                std::thread::spawn(move || network.pass(from, to, old));
                let network = shared.clone();
                std::thread::spawn(move || network.answer(target, host, old));
            }
        });
        (address, network)
    }

    /// Passes what a host sends, on a connection of before if it has a number.
    fn pass(&self, mut host: TcpStream, mut target: TcpStream, old: Option<usize>) {
        let mut bytes = [0; 4096];
        while let Ok(len) = host.read(&mut bytes) {
            let state = self.state.lock().unwrap();
            if let Some(number) = old.filter(|_| state.is_cut) {
                let _ = host.shutdown(std::net::Shutdown::Both);
                // The first, of the admin queue, is the last: the target does not end the others with it.
                let waits = |state: &mut NetworkState| !state.is_released || state.old > number + 1;
                drop(self.changed.wait_while(state, waits).unwrap());
            }
            if len == 0 || target.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
        let _ = target.shutdown(std::net::Shutdown::Write);
    }

    fn answer(&self, mut target: TcpStream, mut host: TcpStream, old: Option<usize>) {
        let mut bytes = [0; 4096];
        while let Ok(len) = target.read(&mut bytes)
            && len > 0
        {
            // To the end, also if the host has gone.
            let _ = host.write_all(&bytes[..len]);
        }
        let _ = host.shutdown(std::net::Shutdown::Both);
        self.state.lock().unwrap().old -= usize::from(old.is_some());
        self.changed.notify_all();
    }

    fn cut(&self) {
        self.state.lock().unwrap().is_cut = true;
    }

    /// Has arrive what is late, and waits until the target has taken it.
    fn release(&self) {
        let mut state = self.state.lock().unwrap();
        state.is_released = true;
        self.changed.notify_all();
        let waited = self
            .changed
            .wait_timeout_while(state, LONG, |state| state.old > 0);
        assert!(!waited.unwrap().1.timed_out(), "the target keeps old connections");
    }
}

/// Keep-alive time of a host that loses a path on which writes are late.
const LATE: Duration = Duration::from_secs(1);

/// Has writes late on a path of a session that has lost it, and checks that none of them undoes a later one.
fn check_late_write(paths: impl FnOnce(SocketAddr, &[Node]) -> Vec<Options>) {
    let nodes = Node::pair();
    let (address, network) = Network::to(nodes[0].address);
    let session = Session::connect_by(paths(address, &nodes), 1).unwrap();
    session.open_namespace(NsId(1)).unwrap();
    let mut queue = session.queue(1, 2).unwrap();
    network.cut();
    for value in [1, 2] {
        queue.run("Write", writing(0, value)).unwrap();
    }
    assert_eq!(session.generation(), 2);
    network.release();
    assert_eq!(value(&mut queue, 0), 2, "the first write came last");
}

#[test]
fn write__is_not_overtaken_by_one_of_a_lost_controller() {
    check_late_write(|cut, _| vec![options_with(LATE, cut)]);
}

#[test]
fn write__by_another_path_is_not_overtaken_by_one_of_a_lost_controller() {
    // The path that is cut is the one that I/O goes to.
    check_late_write(|cut, nodes| {
        nodes[1].set(AnaState::NonOptimized);
        vec![options_with(LATE, cut), options_with(LATE, nodes[1].address)]
    });
}
