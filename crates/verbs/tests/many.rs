//! As many processes of one user as an address has room for, but one; each exchanges messages with three others. Some are killed: the rest
//! goes on.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::{Write, stdin};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rdmux_verbs::*;

use common::LONG;

const PROCESSES: usize = 30;
const KILLED: usize = 8;
const FIRST_PORT: u16 = 20_000;
const BYTES: usize = 64;

/// In the environment of [`child`]: the address and its index.
const CHILD: &str = "RDMUX_MANY";

/// The processes that a process connects to.
fn peers_of(index: usize) -> [usize; 3] {
    [1, 7, 13].map(|step| (index + step) % PROCESSES)
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
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let mut exchange_all = |ends: &BTreeMap<usize, (End, Connection)>, round: usize| {
        for (peer, (end, _)) in ends {
            let mut bytes = [round as u8; BYTES];
            (bytes[0], bytes[1]) = (index as u8, *peer as u8);
            if !exchange(end, &cq, &mut lost, bytes) {
                lost.insert(end.qp.qpn());
            }
        }
        let ended = ends.iter().filter(|(_, (end, _))| lost.contains(&end.qp.qpn()));
        let ended: Vec<String> = ended.map(|(peer, _)| peer.to_string()).collect();
        ended.join(" ")
    };
    while let Ok(line) = told.recv() {
        match line.as_str() {
            "connect" => {
                for peer in peers_of(index) {
                    let end = End::new(&pd, &cq);
                    let to = SocketAddr::new(address, port_of(peer));
                    let connection = device.connect(&end.qp, to, &ConnectParams::default(), b"");
                    ends.insert(peer, (end, connection.unwrap()));
                }
                println!("@ connected");
            }
            "exchange" => {
                exchange_all(&ends, 0);
                println!("@ runs");
                // Until it is told to stop.
                for round in 1.. {
                    let lost = exchange_all(&ends, round);
                    if told.try_recv().is_ok() {
                        println!("@ lost {lost}");
                        break;
                    }
                }
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
        process.tell("connect");
    }
    for process in &processes {
        assert_eq!(process.next(), "connected");
    }
    processes
}

/// Lets processes exchange messages; returns once each has done so.
fn run(processes: &mut [Process]) {
    for process in &mut *processes {
        process.tell("exchange");
    }
    for process in processes {
        assert_eq!(process.next(), "runs", "process {}", process.index);
    }
}

/// Stops that; returns the peers that each process has lost.
fn stop(processes: &mut [Process]) -> Vec<BTreeSet<usize>> {
    for process in &mut *processes {
        process.tell("stop");
    }
    processes.iter().map(|process| process.lost()).collect()
}

#[test]
fn kill__of_some_while_all_exchange_messages() {
    let address = [127, 0, 1, 171].into();
    let seed = RandomState::new().hash_one(0);
    println!("seed {seed}");
    let hasher = |index: usize| {
        seed.rotate_left(index as u32 % 64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ index as u64)
    };
    let mut processes = start(address, 0..PROCESSES);
    run(&mut processes);
    for lost in stop(&mut processes) {
        assert_eq!(lost, BTreeSet::new());
    }
    run(&mut processes);
    processes.sort_by_key(|process| hasher(process.index));
    let killed: BTreeSet<usize> = processes.drain(..KILLED).map(|process| process.index).collect();
    for lost in stop(&mut processes) {
        assert!(lost.is_subset(&killed), "{lost:?}");
    }
    run(&mut processes);
    let lost = stop(&mut processes);
    for (process, lost) in processes.iter().zip(lost) {
        let peers = peers_of(process.index).into_iter();
        let dead: BTreeSet<usize> = peers.filter(|peer| killed.contains(peer)).collect();
        assert_eq!(lost, dead, "process {}", process.index);
    }
    // Others take the ports of the killed ones.
    let mut newcomers = start(address, killed.iter().copied());
    run(&mut newcomers);
    for lost in stop(&mut newcomers) {
        assert_eq!(lost, BTreeSet::new());
    }
}
