//! A hundred processes of one user on one address, each exchanging messages with three others. Some are killed: the rest goes on.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::{Write, stdin};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rdmux_verbs::*;

use common::LONG;

const PROCESSES: usize = 100;
const KILLED: usize = 20;
const FIRST_PORT: u16 = 20_000;
const BYTES: usize = 64;

/// In the environment of [`child`]: the address and its index.
const CHILD: &str = "RDMUX_MANY";

/// The processes that a process connects to.
fn peers_of(index: usize) -> [usize; 3] {
    [1, 7, 31].map(|step| (index + step) % PROCESSES)
}

fn port_of(index: usize) -> u16 {
    FIRST_PORT + index as u16
}

/// A queue pair with room for a message each way.
struct End {
    qp: QueuePair,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
}

impl End {
    fn new(pd: &ProtectionDomain, cq: &CompletionQueue) -> End {
        let memory = Arc::new(AnonymousMemory::new(2 * BYTES).unwrap());
        let mr = pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).unwrap();
        let qp = pd.create_qp(&QpOptions::new(cq)).unwrap();
        qp.init().unwrap();
        let end = End { qp, mr, memory };
        end.receive().unwrap();
        end
    }

    fn receive(&self) -> Result<(), PostError> {
        let sges = self.mr.sge(0, BYTES as u32).into();
        self.qp.post_recv(RecvRequest { wr_id: 0, sges })
    }

    fn received(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        self.memory.read(0, &mut bytes).unwrap();
        bytes
    }

    fn send(&self, bytes: &[u8; BYTES]) -> Result<(), PostError> {
        self.memory.write(BYTES as u64, bytes).unwrap();
        self.qp.post_send(SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: self.mr.sge(BYTES as u64, BYTES as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })
    }
}

/// Accepts every connection and sends each message back.
fn serve(device: &Device, pd: &ProtectionDomain, port: u16) {
    let cq = device.create_cq(1024).unwrap();
    let listener = device.listen(port).unwrap();
    println!("@ ready");
    let ends: Arc<Mutex<HashMap<Qpn, End>>> = Arc::default();
    let (served, completed) = (ends.clone(), cq.clone());
    thread::spawn(move || {
        while let Ok(wc) = completed.wait(Duration::MAX) {
            let Some(wc) = wc.filter(|wc| (wc.status, wc.opcode) == (Status::Success, WcOpcode::Recv)) else {
                continue;
            };
            let ends = served.lock().unwrap();
            let end = &ends[&wc.qpn];
            let bytes = end.received();
            // A peer that has died meanwhile gets no answer.
            let _ = end.receive().and_then(|()| end.send(&bytes));
        }
    });
    let pd = pd.clone();
    thread::spawn(move || {
        let mut connections = Vec::new();
        while let Some(request) = listener.accept(Duration::MAX) {
            let end = End::new(&pd, &cq);
            let qpn = end.qp.qpn();
            let mut ends = ends.lock().unwrap();
            let accepted = request.accept(&end.qp, &ConnectParams::default(), b"");
            ends.insert(qpn, end);
            // One whose peer has died meanwhile fails.
            connections.extend(accepted.ok());
        }
    });
}

/// Exchanges messages with a peer; false when the connection has ended.
fn exchange(end: &End, cq: &CompletionQueue, lost: &mut BTreeSet<Qpn>, bytes: [u8; BYTES]) -> bool {
    let qpn = end.qp.qpn();
    if lost.contains(&qpn) || end.send(&bytes).is_err() {
        return false;
    }
    let mut left = 2;
    while left > 0 {
        let wc = cq.wait(LONG).unwrap().expect("a completion");
        if wc.status != Status::Success {
            lost.insert(wc.qpn);
        }
        if lost.contains(&qpn) {
            return false;
        }
        left -= u32::from(wc.qpn == qpn);
    }
    assert_eq!(end.received(), bytes);
    end.receive().is_ok()
}

/// A process: does what it reads from standard input until that ends.
#[test]
fn child() {
    let Ok(who) = std::env::var(CHILD) else { return };
    let (address, index) = who.split_once(' ').unwrap();
    let (address, index): (IpAddr, usize) = (address.parse().unwrap(), index.parse().unwrap());
    let device = Device::open(address).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
    serve(&device, &pd, port_of(index));
    let mut ends: BTreeMap<usize, (End, Connection)> = BTreeMap::new();
    let mut lost = BTreeSet::new();
    for line in stdin().lines().map_while(Result::ok) {
        let (what, numbers) = line.split_once(' ').unwrap();
        let numbers: Vec<usize> = numbers.split(' ').map(|n| n.parse().unwrap()).collect();
        match what {
            "connect" => {
                for peer in numbers {
                    let end = End::new(&pd, &cq);
                    let to = SocketAddr::new(address, port_of(peer));
                    let connection = device.connect(&end.qp, to, &ConnectParams::default(), b"");
                    ends.insert(peer, (end, connection.unwrap()));
                }
                println!("@ connected");
            }
            "exchange" => {
                for round in 0..numbers[0] {
                    for (peer, (end, _)) in &ends {
                        let mut bytes = [round as u8; BYTES];
                        (bytes[0], bytes[1]) = (index as u8, *peer as u8);
                        if !exchange(end, &cq, &mut lost, bytes) {
                            lost.insert(end.qp.qpn());
                        }
                    }
                }
                let ended = ends.iter().filter(|(_, (end, _))| lost.contains(&end.qp.qpn()));
                let ended: Vec<String> = ended.map(|(peer, _)| peer.to_string()).collect();
                println!("@ lost {}", ended.join(" "));
            }
            other => panic!("{other}"),
        }
    }
    std::process::exit(0);
}

struct Process {
    index: usize,
    process: Child,
    stdin: ChildStdin,
    events: Receiver<String>,
}

impl Process {
    fn start(address: IpAddr, index: usize) -> Process {
        let mut process = Command::new("/proc/self/exe")
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{address} {index}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Process {
            index,
            stdin: process.stdin.take().unwrap(),
            events: common::told(process.stdout.take().unwrap()),
            process,
        }
    }

    fn tell(&mut self, words: &str) {
        writeln!(self.stdin, "{words}").unwrap();
    }

    fn connect(&mut self) {
        let peers = peers_of(self.index).map(|peer| peer.to_string());
        self.tell(&format!("connect {}", peers.join(" ")));
    }

    fn next(&self) -> String {
        let event = self.events.recv_timeout(LONG);
        event.unwrap_or_else(|why| panic!("process {}: {why}", self.index))
    }

    /// The peers that it has lost.
    fn lost(&self) -> BTreeSet<usize> {
        let event = self.next();
        let peers = event.strip_prefix("lost ").unwrap_or_else(|| panic!("{event}"));
        peers
            .split_whitespace()
            .map(|peer| peer.parse().unwrap())
            .collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts processes, and connects each once all of them listen.
fn start(address: IpAddr, indexes: impl Iterator<Item = usize>) -> Vec<Process> {
    let mut processes: Vec<Process> = indexes.map(|index| Process::start(address, index)).collect();
    for process in &processes {
        assert_eq!(process.next(), "ready");
    }
    for process in &mut processes {
        process.connect();
    }
    for process in &processes {
        assert_eq!(process.next(), "connected");
    }
    processes
}

#[test]
fn kill__of_some_of_a_hundred() {
    let address = [127, 0, 1, 171].into();
    let seed = RandomState::new().hash_one(0);
    println!("seed {seed}");
    let hasher = |index: usize| {
        seed.rotate_left(index as u32 % 64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ index as u64)
    };
    let mut processes = start(address, 0..PROCESSES);
    let exchange = |processes: &mut [Process], rounds: usize| {
        for process in processes {
            process.tell(&format!("exchange {rounds}"));
        }
    };
    exchange(&mut processes, 5);
    for process in &processes {
        assert_eq!(process.lost(), BTreeSet::new(), "process {}", process.index);
    }
    // They die while all of them exchange messages.
    exchange(&mut processes, 20);
    processes.sort_by_key(|process| hasher(process.index));
    let killed: BTreeSet<usize> = processes.drain(..KILLED).map(|process| process.index).collect();
    for process in &processes {
        let lost = process.lost();
        assert!(lost.is_subset(&killed), "process {}: {lost:?}", process.index);
    }
    exchange(&mut processes, 3);
    for process in &processes {
        let dead: BTreeSet<usize> = peers_of(process.index)
            .into_iter()
            .filter(|peer| killed.contains(peer))
            .collect();
        assert_eq!(process.lost(), dead, "process {}", process.index);
    }
    // Others take their places.
    let mut newcomers = start(address, killed.iter().copied());
    exchange(&mut newcomers, 3);
    for process in &newcomers {
        assert_eq!(process.lost(), BTreeSet::new(), "process {}", process.index);
    }
    exchange(&mut processes, 1);
    for process in &processes {
        assert!(process.lost().is_subset(&killed), "process {}", process.index);
    }
}
